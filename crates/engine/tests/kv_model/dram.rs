//! The memory file and the runs without flash: what a stop keeps of DRAM, what a start puts back, and who may believe it. The steps are
//! the engine's; here a kill falls between them, they fail, and a power cut takes what was not durable.

use std::rc::Rc;

use larder_base::lock::Single;
use larder_base::{AppId, Now, Rng, UnixSecs, Words};
use larder_engine::kv::node::Node;
use larder_engine::kv::node::start::{
    Claim, ComeBack, DramKeeper, FlashFound, KeepIo, NoteFile, Proved, RunNote, TakeIo, UsedFlash,
    VoidIo, application, cas_base, new_names, take_directory, void,
};
use larder_engine::kv::{IoFailed, Saved};
use larder_format::memory_file::Meta;

use super::starts::{Kept, Machine, NotStarted, Started, index_words, kill_or, setup_alone, start};
use super::world::{Options, SHARDS};

/// How often a step fails.
const FAILS: f64 = 0.04;

/// What is in the file.
#[derive(Clone, Default)]
struct Content {
    id: [u8; 16],
    names: Vec<Vec<u8>>,
    objects: Rc<Vec<Kept>>,
    /// So many of the objects are there.
    len: usize,
    whole: bool,
    /// It has been damaged since it was written: what comes before the damage can be used.
    rotten: bool,
}

/// The file and its description: what is read of each, and what a power cut leaves.
#[derive(Clone, Default)]
pub(super) struct MemoryFiles {
    file: Content,
    durable: Content,
    meta: Option<Meta>,
    durable_meta: Option<Meta>,
}

impl MemoryFiles {
    /// Whether there is a description.
    pub(super) fn is_described(&self) -> bool {
        self.meta.is_some()
    }

    /// What was not durable is there, or not, or a part of it.
    pub(super) fn power_cut(&mut self, rng: &mut Rng) {
        if self.file.id != self.durable.id {
            match rng.below(3) {
                0 => self.file = self.durable.clone(),
                1 => self.file = self.file.part(rng),
                _ => {}
            }
        }
        if rng.chance(0.5) {
            self.meta = self.durable_meta;
        }
        self.settle();
    }

    /// Nothing is on its way any more.
    fn settle(&mut self) {
        (self.durable, self.durable_meta) = (self.file.clone(), self.meta);
    }

    /// The same files on a copy.
    pub(super) fn copied(&self) -> MemoryFiles {
        let mut copy = self.clone();
        copy.settle();
        copy
    }

    /// The engine's steps that make it void. What stays there is of another run.
    pub(super) fn void(&mut self, rng: &mut Rng) {
        let _ = void(&mut Voiding { files: self, rng });
    }

    /// Somewhere in the file bits are lost.
    pub(super) fn rot(&mut self, rng: &mut Rng) {
        if self.file.whole {
            self.file = Content { rotten: true, ..self.file.part(rng) };
            self.settle();
        }
    }
}

impl Content {
    fn part(&self, rng: &mut Rng) -> Content {
        let len = rng.below(self.len as u64 + 1) as usize;
        Content { len, whole: false, ..self.clone() }
    }
}

/// What a start has put back.
#[derive(Clone, Default)]
pub(super) struct Back {
    pub(super) objects: Vec<Kept>,
    /// A memory file was believed, and its objects come back with the flush that was announced.
    pub(super) believed: bool,
}

/// A memory file that is believed, opened.
pub(super) struct Opened {
    proved: Proved,
    content: Content,
}

impl Machine {
    /// The memory file, if it can be believed.
    pub(super) fn prove(
        &self,
        note: &Result<RunNote, String>,
        flash: Option<FlashFound<'_>>,
        options: &Options,
    ) -> Result<Option<Opened>, NotStarted> {
        let Some(meta) = self.memory.meta else { return Ok(None) };
        #[cfg_attr(not(feature = "planted"), expect(unused_mut, reason = "for a fault"))]
        let mut claim = Claim::new(meta);
        #[cfg(feature = "planted")]
        options.planted.iter().for_each(|fault| claim.plant(*fault));
        let _ = options.planted;
        let proved = claim.prove(note.as_ref().map_err(String::as_str), flash);
        let content = self.memory.file.clone();
        // As `format` sees it: another file than the one that is described.
        let Some(proved) = proved.ok().filter(|_| content.id == meta.id) else { return Ok(None) };
        if !content.whole && !content.rotten {
            let why = "a memory file is described, and was never whole".to_owned();
            return Err(NotStarted::Wrong(why));
        }
        Ok(Some(Opened { proved, content }))
    }

    /// The run has the memory file from here on, if it has one.
    pub(super) fn own_memory_file(&mut self, keeper: Option<DramKeeper>, options: &Options) {
        self.keeper = keeper;
        #[cfg(feature = "planted")]
        if let (Some(keeper), Some(fault)) = (&mut self.keeper, options.planted) {
            keeper.plant(fault);
        }
        let _ = options.planted;
    }

    /// Starts a run without flash, with a memory file if it is `named`.
    pub(super) fn start_alone(
        &mut self,
        policy: &str,
        now: Now,
        rng: &mut Rng,
        options: &Options,
        named: bool,
    ) -> Result<Started, NotStarted> {
        self.was_cold = true;
        let former = self.directory.note.clone().filter(RunNote::keeps);
        let run = rng.next_u64().max(1);
        if !named && former.is_some() {
            let mut io = Taking { machine: self, named, rng };
            take_directory(former.as_ref(), run, None, &mut io)?;
        }
        let opened = match named {
            true => self.prove(&self.directory.last(), None, options)?,
            false => None,
        };
        let least = opened.as_ref().map_or(0, |opened| opened.proved.least_cas());
        let base = cas_base(now.wall, least, rng.next_u64());
        let names = opened.as_ref().map_or(Vec::new(), |opened| opened.new_names(&[]));
        let setup = setup_alone(self.superblock(), base, policy, self.buckets, names.clone());
        let index = || Words::heap(index_words(self.buckets));
        let words = (0..SHARDS).map(|_| index()).collect();
        let started = start(&setup, words, None, None, 0, options)?;
        self.back = opened.map_or_else(Back::default, |o| o.load(&started.0, &names, now));
        let mut keeper = None;
        if named {
            let mut io = Taking { machine: self, named, rng };
            keeper = take_directory(former.as_ref(), run, Some(base), &mut io)?.keeper;
        }
        self.own_memory_file(keeper, options);
        Ok(started)
    }

    /// The last thing that a stop does.
    pub(super) fn keep(&mut self, node: &Node<Single>, now: Now, rng: &mut Rng) {
        let Some(keeper) = self.keeper else { return };
        let mut id = [0; 16];
        rng.fill(&mut id);
        let (flush_at, flushed_at) = (node.announced_flush(now), node.flushed_at());
        let mut io = Keeping { files: &mut self.memory, node, now, rng };
        // What fails is lost.
        let _ = keeper.keep(now, id, flush_at, flushed_at, &mut io);
    }

    /// A directory or a file is written anew.
    pub(super) fn new_file(&mut self) -> NoteFile {
        self.files += 1;
        NoteFile { inode: self.files, born: if self.births { self.files } else { 0 } }
    }

    /// The directory names this run.
    pub(super) fn name_run(&mut self, run: u64, flash: bool, keeps_memory: bool) {
        let written_in = self.new_file();
        let uuid = self.superblock().uuid.to_string();
        let flash = flash.then(|| UsedFlash { uuid, path: "flash".to_owned() });
        self.directory.note = Some(RunNote { run, written_in, flash, keeps_memory });
        self.directory.file = written_in;
    }
}

impl Opened {
    /// The names of the applications in the file that are not among these.
    pub(super) fn new_names(&self, known: &[Vec<u8>]) -> Vec<Vec<u8>> {
        new_names(self.content.names.iter().map(Vec::as_slice), known, 0)
    }

    /// Puts the objects back. `names` are those of the run's applications.
    pub(super) fn load(self, node: &Node<Single>, names: &[Vec<u8>], now: Now) -> Back {
        let Opened { proved, content } = self;
        // Numbered as they were made known.
        let id = |name| {
            names.iter().position(|n| n == name).map_or(AppId::OTHER, |at| AppId(at as u16 + 1))
        };
        let ids: Vec<AppId> = content.names.iter().map(id).collect();
        let ComeBack::Objects { away, flush_at, flushed_at } = proved.come_back(now) else {
            return Back::default();
        };
        let mut back = Back { objects: Vec::new(), believed: true };
        for object in &content.objects[..content.len] {
            let saved = Saved { app: application(object.rest.app.0, &ids), ..object.saved() };
            if node.restore(now, &saved, away) {
                assert!(!node.restore(now, &saved, away), "an object was put back twice");
                back.objects.push(object.clone());
            }
        }
        if let Some(at) = flush_at {
            node.announce_flush(now, at);
        }
        node.set_flushed_at(UnixSecs(flushed_at.0));
        back
    }
}

struct Taking<'a> {
    machine: &'a mut Machine,
    named: bool,
    rng: &'a mut Rng,
}

impl TakeIo for Taking<'_> {
    type Error = IoFailed;

    fn write_run(&mut self, run: u64) -> Result<(), IoFailed> {
        if self.rng.chance(FAILS) {
            return Err(IoFailed);
        }
        kill_or(self.rng, || self.machine.name_run(run, false, self.named));
        Ok(())
    }
    fn remove_checkpoint(&mut self) -> Result<(), IoFailed> {
        kill_or(self.rng, || self.machine.directory.checkpoint = None);
        Ok(())
    }
    fn release_memory(&mut self, _: &UsedFlash) {
        self.machine.lose_memory();
    }
    fn void_memory_file(&mut self) {
        self.machine.memory.void(self.rng);
    }
}

struct Voiding<'a> {
    files: &'a mut MemoryFiles,
    rng: &'a mut Rng,
}

impl VoidIo for Voiding<'_> {
    type Error = IoFailed;

    fn remove_description(&mut self) -> Result<(), IoFailed> {
        if self.rng.chance(FAILS) {
            return Err(IoFailed);
        }
        kill_or(self.rng, || (self.files.meta, self.files.durable_meta) = (None, None));
        Ok(())
    }
    fn empty(&mut self) -> Result<(), IoFailed> {
        kill_or(self.rng, || self.files.file = Content::default());
        Ok(())
    }
}

struct Keeping<'a> {
    files: &'a mut MemoryFiles,
    node: &'a Node<Single>,
    now: Now,
    rng: &'a mut Rng,
}

impl KeepIo for Keeping<'_> {
    type Error = IoFailed;

    fn write_objects(&mut self, id: [u8; 16]) -> Result<(u64, u64), IoFailed> {
        let mut objects = Vec::new();
        let Ok(()) = self.node.save(self.now, |saved| {
            objects.push(Kept::of(saved));
            Ok::<(), std::convert::Infallible>(())
        });
        let (names, len) = (self.node.names(), objects.len());
        let objects = Rc::new(objects);
        let whole = Content { id, names, objects, len, whole: true, rotten: false };
        // As far as it has come when it fails or is killed.
        self.files.file = whole.part(self.rng);
        if self.rng.chance(FAILS) {
            return Err(IoFailed);
        }
        let files = &mut *self.files;
        kill_or(self.rng, || (files.file, files.durable) = (whole.clone(), whole));
        Ok((len as u64, len as u64))
    }

    fn describe(&mut self, meta: &Meta) -> Result<(), IoFailed> {
        let (fails, made) = (self.rng.chance(FAILS), self.rng.chance(0.5));
        if fails {
            if made {
                self.files.meta = Some(*meta);
            }
            return Err(IoFailed);
        }
        let files = &mut *self.files;
        kill_or(self.rng, || (files.meta, files.durable_meta) = (Some(*meta), Some(*meta)));
        Ok(())
    }

    fn discard(&mut self) {
        self.files.file = Content::default();
    }
}
