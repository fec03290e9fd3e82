//! `-e FILE`: what is in DRAM outlives a stop in good order.
//!
//! A stop writes the objects into FILE, and describes it in FILE.meta. Which of them a start believes, and in which order they are
//! written, the engine decides ([`Claim`], [`DramKeeper`]): here are the files.
//!
//! What is found damaged ends the reading. What came before it was checked, and is kept.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use larder_base::lock::Threads;
use larder_base::{AppId, ByteSize, Expiry, Now, UnixSecs};
use larder_engine::kv::Saved;
use larder_engine::kv::node::Node;
use larder_engine::kv::node::start::{
    self, Claim, ComeBack, DramKeeper, FlashFound, KeepIo, Proved, VoidIo, application, new_names,
};
use larder_format::memory_file::{
    MAGIC, META_LEN, MemoryFileError, MemoryFileReader, MemoryFileWriter, Meta, Next, Object,
};
use larder_policy::application::Applications;
use larder_runtime::{Clock, DataDir, Refused, lock_exclusive};

use super::run::RunFile;
use super::warm::{Progress, Watched};
use super::{CacheConfig, CacheError, Core};

/// Bytes that are read and written at a time.
const CHUNK: usize = 1 << 20;
/// Objects between two looks at the time, and at whether it is to end.
const LOOK: u64 = 1 << 6;

/// In [`Object::state`], behind the rank.
const STATE: [u8; 4] = [1 << 2, 1 << 3, 1 << 4, 1 << 5];

/// The file that `-e` names, and what is in it that may be used.
pub(super) struct MemoryFile {
    path: PathBuf,
    /// Was made by this start.
    pub(super) made: bool,
    former: Former,
    /// Held locked: it is one server's alone.
    lock: File,
}

/// What an earlier run left.
enum Former {
    /// Nothing.
    None,
    /// Something that cannot be used, and why.
    Unusable(String),
    /// What has yet to be proved to be of the last run.
    Claimed(Claim, Meta),
    /// The last run's.
    Proved(Proved, Box<MemoryFileReader<BufReader<File>>>),
}

/// What loading came to.
#[derive(Default)]
pub(super) struct Loaded {
    /// One line for the log, if there is something to say.
    pub(super) note: Option<String>,
    /// The same, for what the operator should know.
    pub(super) warning: Option<String>,
}

fn meta_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".meta");
    PathBuf::from(name)
}

/// The directory of a file.
fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The first bytes of a file, at most `most`; `None` where there is no file.
fn beginning(path: &Path, most: usize) -> io::Result<Option<Vec<u8>>> {
    // Before it is opened: of a FIFO that would wait for a writer.
    match path.metadata() {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Ok(found) if found.is_file() => {}
        Ok(_) => return Err(io::Error::other("this is no regular file")),
        Err(e) => return Err(e),
    }
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// A file that takes the place of another when it is whole.
struct FreshFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
}

impl FreshFile {
    fn make(target: &Path) -> io::Result<FreshFile> {
        let mut temporary = OsString::from(target);
        temporary.push(".new");
        let temporary = PathBuf::from(temporary);
        match std::fs::remove_file(&temporary) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        Ok(FreshFile { file, temporary, target: target.to_owned() })
    }

    fn take_place(self, bytes: &[u8]) -> io::Result<()> {
        (&self.file).write_all(bytes)?;
        self.file.sync_all()?;
        std::fs::rename(&self.temporary, &self.target)?;
        File::open(parent(&self.target))?.sync_all()
    }
}

impl Drop for FreshFile {
    fn drop(&mut self) {
        // There is none any more where it has taken its place.
        std::fs::remove_file(&self.temporary).ok();
    }
}

impl MemoryFile {
    /// Looks at the files, without a change to what is there. Whatever is not Larder's is refused: it would be overwritten.
    pub(super) fn look(path: &Path) -> Result<MemoryFile, CacheError> {
        let refused =
            |path: &Path, why: String| CacheError::MemoryFile { path: path.to_owned(), why };
        let other = "remove it, or name another file with -e";
        let begins = beginning(path, 4096)
            .map_err(|e| refused(path, format!("{e}: name another with -e")))?;
        let ours = |b: &[u8]| b.starts_with(&MAGIC) || b.iter().all(|&byte| byte == 0);
        if begins.as_deref().is_some_and(|b| !ours(b)) {
            let why =
                format!("it holds what Larder has not written, and would be overwritten: {other}");
            return Err(refused(path, why));
        }
        let meta = meta_path(path);
        let described = beginning(&meta, META_LEN + 1)
            .map_err(|e| refused(&meta, format!("{e}: name another file with -e")))?;
        let former = match described.as_deref().map(Meta::decode) {
            None => Former::None,
            Some(Ok(meta)) => Former::Claimed(Claim::new(meta), meta),
            Some(Err(MemoryFileError::Foreign)) => {
                let what = if described.is_some_and(|d| d.is_empty()) {
                    "is empty"
                } else {
                    "holds something else"
                };
                return Err(refused(
                    &meta,
                    format!(
                        "Larder describes there what '{}' holds, but it {what}: {other}",
                        path.display()
                    ),
                ));
            }
            Some(Err(e)) => Former::Unusable(format!("'{}': {e}", meta.display())),
        };
        // Whether a stop will be able to write both.
        let writable = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
        let writable = writable.and_then(|file| FreshFile::make(&meta).map(|_| file));
        let lock = writable.map_err(|e| {
            if begins.is_none() {
                std::fs::remove_file(path).ok();
            }
            refused(
                path,
                format!(
                    "it cannot be written: {e}: name a file in a directory that this user may write"
                ),
            )
        })?;
        // Two servers would each overwrite what the other has saved.
        match lock_exclusive(lock.as_fd()) {
            Ok(()) => {}
            Err(Refused::Held(holder)) => {
                let by = holder.map_or_else(|| "another process".to_owned(), |h| h.to_string());
                return Err(refused(
                    path,
                    format!("it is in use by {by}: name another file with -e, or stop that server"),
                ));
            }
            Err(Refused::Failed(error)) => tracing::warn!(
                "memory-file '{}' cannot be locked ({error}): see to it that no other server is given it",
                path.display()
            ),
        }
        Ok(MemoryFile { path: path.to_owned(), made: begins.is_none(), former, lock })
    }

    /// Whether what is there can be believed, by the last run that the data directory names and by the flash of this start; opens it.
    pub(super) fn prove(
        &mut self,
        last: Result<&RunFile, &String>,
        flash: Option<FlashFound<'_>>,
        largest: u32,
    ) {
        let Former::Claimed(claim, meta) = &self.former else { return };
        let last = last.map(RunFile::note);
        let known = claim.prove(last.as_ref().map_err(|why| why.as_str()), flash);
        let known = known
            .and_then(|proved| Ok((proved, self.open(meta, largest).map_err(|e| e.to_string())?)));
        self.former = match known {
            Ok((proved, reader)) => Former::Proved(proved, Box::new(reader)),
            Err(why) => Former::Unusable(why),
        };
    }

    fn open(
        &self,
        meta: &Meta,
        largest: u32,
    ) -> Result<MemoryFileReader<BufReader<File>>, MemoryFileError> {
        let file = File::open(&self.path)?;
        MemoryFileReader::open(BufReader::with_capacity(CHUNK, file), meta, largest as usize)
    }

    /// The applications of which there are objects, as far as there are numbers beside those of `known` and of `shares` more.
    pub(super) fn new_names(&self, known: &[Vec<u8>], shares: usize) -> Vec<Vec<u8>> {
        let Former::Proved(_, reader) = &self.former else { return Vec::new() };
        new_names(reader.names(), known, shares)
    }

    /// The least number at which the CAS of this start may begin: above all that the last run has given out.
    pub(super) fn least_cas(&self) -> u64 {
        match &self.former {
            Former::Proved(proved, _) => proved.least_cas(),
            _ => 0,
        }
    }

    /// The latest time that the run has seen whose objects will be put back.
    pub(super) fn latest(&self) -> Option<UnixSecs> {
        match &self.former {
            Former::Proved(proved, _) => Some(proved.latest()),
            _ => None,
        }
    }

    /// Puts the objects into the shards, which have had no request yet. `hurry` ends it; what is there is as it was then.
    pub(super) fn load(
        &mut self,
        node: &Node<Threads>,
        mut applications: Applications,
        clock: &Clock,
        hurry: &AtomicBool,
    ) -> Loaded {
        let name = format!("memory-file '{}'", self.path.display());
        let cold = |why: &str| format!("DRAM is cold: {name}: {why}");
        let (proved, reader) = match std::mem::replace(&mut self.former, Former::None) {
            Former::None | Former::Claimed(..) => {
                return Loaded {
                    note: Some(cold("no clean stop has left anything there")),
                    ..Loaded::default()
                };
            }
            Former::Unusable(why) => {
                return Loaded { warning: Some(cold(&why)), ..Loaded::default() };
            }
            Former::Proved(proved, reader) => (proved, reader),
        };
        let (began, now) = (Instant::now(), clock.now());
        let meta = *proved.meta();
        let (away, flush_at, flushed_at) = match proved.come_back(now) {
            ComeBack::Flushed(flushed_at) => {
                node.set_flushed_at(flushed_at);
                let note = Some(cold("a flush that a client had announced has come due"));
                return Loaded { note, warning: None };
            }
            ComeBack::Objects { away, flush_at, flushed_at } => (away, flush_at, flushed_at),
        };
        let mut load = Load { node, now, away, offered: 0, expired: 0, too_large: 0 };
        let names: Vec<&[u8]> = reader.names().collect();
        let ids = applications.restore(names);
        let ended = load.run(*reader, &ids, &meta, hurry);
        if let Some(at) = flush_at {
            node.announce_flush(now, at);
        }
        node.set_flushed_at(flushed_at);
        let (there, bytes) = node.in_dram();
        let mut said = format!(
            "DRAM is warm: {name}: {there} of {} objects are there again, {} in {} ms",
            meta.objects,
            ByteSize(bytes),
            began.elapsed().as_millis()
        );
        if load.expired > 0 {
            said.push_str(&format!("; {} have expired meanwhile", load.expired));
        }
        let unfit = load.too_large + load.offered.saturating_sub(there);
        if unfit > 0 {
            said.push_str(&format!("; {unfit} found no room (-m, -I)"));
        }
        if let Err(why) = &ended {
            said.push_str(&format!("; the rest is lost: {why}"));
        }
        if unfit > 0 || ended.is_err() {
            Loaded { warning: Some(said), note: None }
        } else {
            Loaded { note: Some(said), warning: None }
        }
    }

    /// The run owns the files: what was in them is void. Says what went wrong, if anything did.
    pub(super) fn void(&self) -> Result<(), String> {
        start::void(&mut Voiding(&self.path)).map_err(|e| {
            format!(
                "memory-file '{}': what was read stays there, though nothing can use it: {e}",
                self.path.display()
            )
        })
    }

    /// What a stop needs: `dir` stays locked, if nobody else keeps it so.
    pub(super) fn keeper(self, keeper: DramKeeper, dir: Option<DataDir>) -> Keeper {
        Keeper { path: self.path, keeper, _lock: self.lock, _dir: dir }
    }

    /// A record begins with an empty cache.
    pub(super) fn check_recorded(&self, config: &CacheConfig) -> Result<(), CacheError> {
        let Some(record) = &config.record else { return Ok(()) };
        if !matches!(self.former, Former::Proved(..)) {
            return Ok(());
        }
        let why = format!(
            "it holds what an earlier run had in DRAM, and record '{}' begins with an empty cache: leave one of them out",
            record.file.display()
        );
        Err(CacheError::MemoryFile { path: self.path.clone(), why })
    }

    /// As the run file names it.
    pub(super) fn name(&self) -> String {
        self.path.display().to_string()
    }
}

/// A memory file that becomes void.
struct Voiding<'a>(&'a Path);

impl VoidIo for Voiding<'_> {
    type Error = io::Error;

    fn remove_description(&mut self) -> io::Result<()> {
        let meta = meta_path(self.0);
        match std::fs::remove_file(&meta) {
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            Err(e) => Err(e),
            Ok(()) => File::open(parent(&meta)).and_then(|dir| dir.sync_all()),
        }
    }
    fn empty(&mut self) -> io::Result<()> {
        OpenOptions::new().write(true).open(self.0)?.set_len(0)
    }
}

struct Load<'a> {
    node: &'a Node<Threads>,
    now: Now,
    away: u32,
    /// Objects that a shard was given.
    offered: u64,
    expired: u64,
    too_large: u64,
}

impl Load<'_> {
    fn run(
        &mut self,
        mut reader: MemoryFileReader<BufReader<File>>,
        ids: &[AppId],
        meta: &Meta,
        hurry: &AtomicBool,
    ) -> Result<(), String> {
        let mut progress =
            Progress::new("reading the memory file", (meta.bytes >> 20) as usize + 1);
        for n in 0u64.. {
            if n.is_multiple_of(LOOK) {
                if hurry.load(Ordering::Relaxed) {
                    return Err("it was asked to end at once".to_owned());
                }
                progress.reach((reader.position() >> 20) as usize);
            }
            match reader.next_object().map_err(|e| e.to_string())? {
                Next::End => break,
                Next::TooLarge => self.too_large += 1,
                Next::Object(object) => self.put_back(&object, ids),
            }
        }
        Ok(())
    }

    fn put_back(&mut self, o: &Object<'_>, ids: &[AppId]) {
        if Expiry(o.expiry).is_past(self.now.wall) {
            self.expired += 1;
            return;
        }
        let app = application(o.app, ids);
        let has = |i: usize| o.state & STATE[i] != 0;
        let saved = Saved {
            key: o.key,
            value: o.value,
            flags: o.flags,
            expiry: Expiry(o.expiry),
            cas: o.cas,
            app,
            clock: o.state & 3,
            fetched: has(0),
            stale: has(1),
            won: has(2),
            survivor: has(3),
            age: o.age,
            idle: o.idle,
            reads: o.reads,
            max_gap: o.gaps[0],
            first_read: o.gaps[1],
            last_gap: o.gaps[2],
        };
        self.offered += 1;
        // One that finds no room is told by what is there at the end.
        self.node.restore(self.now, &saved, self.away);
    }
}

/// What writes the file at a stop.
pub(super) struct Keeper {
    path: PathBuf,
    keeper: DramKeeper,
    /// Keeps FILE locked.
    _lock: File,
    /// Keeps the data directory locked.
    _dir: Option<DataDir>,
}

/// FILE as a stop writes it.
struct Keeping<'a> {
    path: &'a Path,
    run: u64,
    node: &'a Node<Threads>,
    now: Now,
    hurry: &'a AtomicBool,
}

impl KeepIo for Keeping<'_> {
    type Error = io::Error;

    fn write_objects(&mut self, id: [u8; 16]) -> io::Result<(u64, u64)> {
        let (node, hurry) = (self.node, self.hurry);
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(self.path)?;
        // It may have been made by somebody with other ideas of who may read it.
        file.set_permissions(std::fs::Permissions::from_mode(0o600)).ok();
        let (objects, _) = node.in_dram();
        let mut progress = Progress::new("writing the memory file", objects.max(1) as usize);
        let out = BufWriter::with_capacity(CHUNK, Watched { file: &file, hurry });
        let names = node.names();
        let names = names.iter().map(Vec::as_slice);
        let mut writer = MemoryFileWriter::create(out, id, self.run, names)?;
        let mut n = 0u64;
        node.save(self.now, |saved| {
            n += 1;
            if n.is_multiple_of(LOOK) {
                progress.reach(n as usize);
            }
            writer.object(&object(saved))
        })?;
        let (mut out, objects, bytes) = writer.finish()?;
        out.flush()?;
        drop(out);
        file.sync_all()?;
        Ok((objects, bytes))
    }

    fn describe(&mut self, meta: &Meta) -> io::Result<()> {
        FreshFile::make(&meta_path(self.path))?.take_place(&meta.encode())
    }

    fn discard(&mut self) {
        OpenOptions::new().write(true).open(self.path).and_then(|f| f.set_len(0)).ok();
    }
}

impl Keeper {
    /// Writes FILE, then FILE.meta; the objects and bytes of FILE.
    fn save(
        &self,
        node: &Node<Threads>,
        now: Now,
        hurry: &AtomicBool,
    ) -> Result<(u64, u64), String> {
        let id: [u8; 16] = super::open::random().map_err(|e| e.to_string())?;
        let flush_at = node.announced_flush(now);
        let run = self.keeper.run();
        let mut keeping = Keeping { path: &self.path, run, node, now, hurry };
        let kept = self.keeper.keep(now, id, flush_at, node.flushed_at(), &mut keeping);
        kept.map_err(|e| e.to_string())
    }
}

fn object<'a>(s: &Saved<'a>) -> Object<'a> {
    let bits = [s.fetched, s.stale, s.won, s.survivor];
    let state = bits
        .iter()
        .zip(STATE)
        .filter(|(set, _)| **set)
        .fold(s.clock & 3, |all, (_, bit)| all | bit);
    Object {
        key: s.key,
        value: s.value,
        state,
        app: s.app.0,
        flags: s.flags,
        expiry: s.expiry.0,
        cas: s.cas,
        age: s.age,
        idle: s.idle,
        reads: s.reads,
        gaps: [s.max_gap, s.first_read, s.last_gap],
    }
}

impl Core {
    /// Saves what is in DRAM, if a file was named; false if nothing is kept. The last thing that a stop does with the store.
    pub(super) fn save_memory(&self, now: Now) -> bool {
        let Some(keeper) = &self.memory_file else { return false };
        let began = Instant::now();
        let path = keeper.path.display();
        match keeper.save(&self.node, now, &self.hurry) {
            Ok((objects, bytes)) => tracing::info!(
                "memory-file '{path}': {objects} objects in DRAM saved, {} in {} ms; the next start has them again",
                ByteSize(bytes),
                began.elapsed().as_millis()
            ),
            Err(error) => {
                let lost = self.node.dram_objects();
                tracing::warn!(
                    "memory-file '{path}': {error}: {lost} objects in DRAM are lost, and the next start is cold in DRAM"
                );
            }
        }
        true
    }
}
