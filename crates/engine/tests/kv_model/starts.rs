//! What outlives a run, and how it comes and goes: the engine's own starts and stops, killed between any two steps; memory that a
//! power cut takes; a flash or a directory that is put back from a copy. Runs without flash and memory files: [`dram`](super::dram).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::lock::Single;
use larder_base::{HashKey, Killed, Nanos, Now, Rng, Supply, UnixSecs, Words};
use larder_engine::index::FlashIndex;
use larder_engine::kv::node::start::{
    BINDING_WORDS, Closed, DramKeeper, Drawn, FlashFound, LATEST, Left, NoteFile, RunNote, Shape,
    StartIo, StopIo, Superblocks, Warmth,
};
use larder_engine::kv::node::{AtRest, Maintenance, Node, StateIo};
use larder_engine::kv::record::{AppsSetup, LogSetup, RunSetup, SetupError, ShardSeed, ShardSetup};
use larder_engine::kv::{IoFailed, Saved, SegmentIo, SegmentTable};
use larder_format::{Geometry, Superblock, Uuid};
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};

use super::dram::{Back, MemoryFiles};
use super::heads::{InUse, Pages};
use super::world::{Disk, Options, SEGMENT_BYTES, SEGMENTS, SHARDS};

/// What a directory holds.
#[derive(Clone, Default)]
pub(super) struct Directory {
    /// What it says of its last run.
    pub(super) note: Option<RunNote>,
    /// The file in which that lies.
    pub(super) file: NoteFile,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) names: Vec<Vec<u8>>,
}

impl Directory {
    /// The last run, if this is not a copy.
    pub(super) fn last(&self) -> Result<RunNote, String> {
        let note = self.note.clone().ok_or("a new directory")?;
        note.check_found_in(self.file).map(|()| note)
    }
}

#[derive(Clone)]
pub(super) struct Checkpoint {
    table: Vec<u64>,
    indexes: Vec<Vec<u64>>,
    written: UnixSecs,
}

fn all(words: &Words) -> Vec<u64> {
    (0..words.len()).map(|i| words.load(i)).collect()
}

/// A machine on which runs come and go.
pub(super) struct Machine {
    /// As the run that is under way has them.
    superblocks: Superblocks,
    /// The head of the flash.
    pages: Pages,
    /// A superblock of this number was durable.
    durable: u64,
    pub(super) directory: Directory,
    /// Memory that outlives a process: header, table, indexes.
    region: &'static [AtomicU64],
    /// It was made by this start.
    is_new: bool,
    pub(super) buckets: u32,
    /// A start was cold, whether it came to its end or not.
    pub(super) was_cold: bool,
    /// The file system says when a file was made.
    pub(super) births: bool,
    /// Files that were made.
    pub(super) files: u64,
    pub(super) memory: MemoryFiles,
    /// Keeps what is in DRAM at the stop of the run that is under way.
    pub(super) keeper: Option<DramKeeper>,
    /// What the last start has put back.
    pub(super) back: Back,
}

impl Machine {
    pub(super) fn new(seed: u64, buckets: u32) -> Machine {
        let bytes = larder_format::geometry::SEGMENTS_AT;
        let bytes = bytes + u64::from(SEGMENTS) * u64::from(SEGMENT_BYTES);
        let geometry = Geometry::with_segment(bytes, u64::from(SEGMENT_BYTES)).unwrap();
        let (uuid, key) = (Uuid([seed as u8; 16]), HashKey([seed as u8; 16]));
        let words = 16 + SegmentTable::words_for(SEGMENTS) + SHARDS * index_words(buckets);
        let region: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let superblock = Superblock::format(uuid, key, geometry, UnixSecs(1));
        Machine {
            pages: Pages::format(&superblock),
            durable: superblock.sequence,
            superblocks: Superblocks::formatted(superblock),
            directory: Directory::default(),
            region: region.leak(),
            is_new: true,
            buckets,
            was_cold: false,
            births: !seed.is_multiple_of(10),
            files: 0,
            memory: MemoryFiles::default(),
            keeper: None,
            back: Back::default(),
        }
    }

    /// That of the run.
    pub(super) fn superblock(&self) -> &Superblock {
        self.superblocks.current()
    }

    /// The flash's head, for a copy of it.
    pub(super) fn copied(&self) -> Pages {
        self.pages.copied()
    }

    /// A copy of the flash's head is put back.
    pub(super) fn put_back(&mut self, pages: Pages) {
        (self.pages, self.durable) = (pages, 0);
    }

    /// Whether the superblock in force is of another run than the one that this directory names.
    pub(super) fn is_flash_of_another_run(&self, directory: &Directory) -> bool {
        let run = self.pages.find().map(|chosen| chosen.superblock.run);
        directory.note.as_ref().is_none_or(|note| run.is_ok_and(|run| run != note.run))
    }

    /// A copy of the directory is put back. Where its file system does not say when a file was made, the copy may look like what it
    /// was made of.
    pub(super) fn put_back_directory(&mut self, directory: Directory, unnoticed: bool) {
        self.directory = directory;
        if !unnoticed {
            self.directory.file = self.new_file();
        }
    }

    /// The memory goes, and what was not durable.
    pub(super) fn power_cut(&mut self, rng: &mut Rng) {
        self.lose_memory();
        self.pages.power_cut(rng);
        self.memory.power_cut(rng);
    }

    /// The memory goes: by a power cut, or since a clean stop gives it back.
    pub(super) fn lose_memory(&mut self) {
        self.region.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.is_new = true;
    }

    /// The memory again, as another process sees it: header, table, indexes.
    fn words(&self) -> (Words, Words, Vec<Words>) {
        let (header, rest) = self.region.split_at(16);
        let (table, indexes) = rest.split_at(SegmentTable::words_for(SEGMENTS));
        let indexes = indexes.chunks_exact(index_words(self.buckets));
        (
            Words::from_static(header),
            Words::from_static(table),
            indexes.map(|cells| Words::supplied(cells, Arc::new(Backed(cells)))).collect(),
        )
    }

    /// Starts a run, as far as it comes, with a memory file if it is `named`.
    pub(super) fn start(
        &mut self,
        policy: &str,
        now: Now,
        rng: &mut Rng,
        options: &Options,
        named: bool,
    ) -> Result<(Started, Warmth), NotStarted> {
        let chosen = self.pages.find().map_err(NotStarted::Wrong)?;
        let (superblock, durable) = (chosen.superblock.clone(), self.durable);
        let found = superblock.sequence;
        if found < durable {
            let why = format!("superblock {found} rules, and {durable} was durable");
            return Err(NotStarted::Wrong(why));
        }
        self.superblocks = Superblocks::found(chosen);
        #[cfg(feature = "planted")]
        options.planted.iter().for_each(|fault| self.superblocks.plant(*fault));
        let (mut header, mut table, mut indexes) = self.words();
        // Some die on the way.
        let fuse = rng.chance(0.2).then(|| Arc::new(AtomicU64::new(rng.below(80))));
        if let Some(fuse) = &fuse {
            let words = [&mut header, &mut table].into_iter().chain(&mut indexes);
            words.for_each(|words| words.share_fuse(fuse.clone()));
        }
        let shape = Shape {
            uuid: superblock.uuid.0,
            table_words: SegmentTable::words_for(SEGMENTS),
            segment_bytes: SEGMENT_BYTES,
            shards: SHARDS,
            buckets: self.buckets,
        };
        let note = self.directory.last();
        let last = note.as_ref().map_err(Clone::clone);
        let last = last.and_then(|note| note.check_flash(&superblock).map(|()| note.last_run()));
        let last = last.as_ref().map_err(Clone::clone);
        #[cfg_attr(not(feature = "planted"), expect(unused_mut, reason = "for a fault"))]
        let mut left = Left::new(&superblock, false, last);
        #[cfg(feature = "planted")]
        options.planted.iter().for_each(|fault| left.plant(*fault));
        let drawn = Drawn { began: now.wall, cas: rng.next_u64(), run: rng.next_u64().max(1) };
        let begun = left.begin(shape, &mut header, self.is_new, drawn, || {
            let found = self.directory.checkpoint.as_ref().ok_or("there is none")?;
            // Whose it is the file says too, which `format` checks; here the start alone has to know.
            let copies = [&mut table].into_iter().chain(&mut indexes);
            for (to, from) in copies.zip([&found.table].into_iter().chain(&found.indexes)) {
                from.iter().enumerate().for_each(|(i, word)| to.store(i, *word));
            }
            Ok(found.written)
        });
        self.is_new = false;
        self.was_cold |= !begun.is_warm();
        let next = begun.superblock();
        let (table, generations) = begun.table(table);
        let flash = FlashFound { superblock: &superblock, formatted: false };
        let opened = if named { self.prove(&note, Some(flash), options)? } else { None };
        let mut names = self.directory.names.clone();
        let known = names.len();
        if let Some(opened) = &opened {
            names.extend(opened.new_names(&names));
        }
        let setup = setup(next, policy, self.buckets, names.clone());
        let started = start(&setup, indexes, Some(table), generations.as_deref(), known, options)?;
        self.back = opened.map_or_else(Back::default, |o| o.load(&started.0, &names, now));
        let mut io = Starting { machine: self, now, rng, named };
        let keeper = begun.take_over(&mut header, named, &mut io)?;
        self.own_memory_file(keeper, options);
        // The fuse was the start's.
        if let Some(fuse) = fuse {
            fuse.store(u64::MAX, Ordering::Relaxed);
        }
        Ok((started, begun.warmth().clone()))
    }
}

/// A kill between two steps, or while one is made: then it has been made or not.
pub(super) fn kill_or(rng: &mut Rng, step: impl FnOnce()) {
    let (dies, after) = (rng.chance(0.04), rng.chance(0.5));
    if !dies || after {
        step();
    }
    if dies {
        std::panic::resume_unwind(Box::new(Killed));
    }
}

/// Why no run begins.
pub(super) enum NotStarted {
    /// The flash has failed: it is tried again.
    Failed,
    /// It must not happen.
    Wrong(String),
}

impl From<IoFailed> for NotStarted {
    fn from(IoFailed: IoFailed) -> NotStarted {
        NotStarted::Failed
    }
}

impl From<SetupError> for NotStarted {
    fn from(why: SetupError) -> NotStarted {
        NotStarted::Wrong(format!("recovery failed: {why}"))
    }
}

struct Starting<'a> {
    machine: &'a mut Machine,
    now: Now,
    rng: &'a mut Rng,
    /// It has a memory file.
    named: bool,
}

impl StartIo for Starting<'_> {
    type Error = IoFailed;

    fn write_run(&mut self, run: u64) -> Result<(), Self::Error> {
        let (fails, made) = (self.rng.chance(0.04), self.rng.chance(0.5));
        if !fails || made {
            kill_or(self.rng, || self.machine.name_run(run, true, self.named));
        }
        if fails { Err(IoFailed) } else { Ok(()) }
    }
    fn forget_run(&mut self) -> Result<(), Self::Error> {
        if self.rng.chance(0.3) {
            return Err(IoFailed);
        }
        kill_or(self.rng, || self.machine.directory.note = None);
        Ok(())
    }
    fn write_superblock(&mut self, next: &Superblock) -> Result<(), Self::Error> {
        self.machine.write(next, self.rng)
    }
    fn keep_time(&mut self) {
        const { assert!(LATEST < BINDING_WORDS) };
        self.machine.region[LATEST].store(u64::from(self.now.wall.0), Ordering::Relaxed);
    }
    fn remove_checkpoint(&mut self) -> Result<(), Self::Error> {
        kill_or(self.rng, || self.machine.directory.checkpoint = None);
        Ok(())
    }
    fn void_memory_file(&mut self) {
        self.machine.memory.void(self.rng);
    }
}

impl Machine {
    /// A superblock is put into force.
    fn write(&mut self, next: &Superblock, rng: &mut Rng) -> Result<(), IoFailed> {
        let mut heads = InUse { pages: &mut self.pages, rng };
        self.superblocks.write(&mut heads, next.clone())?;
        self.durable = next.sequence;
        Ok(())
    }
}

struct Stopping<'a> {
    node: &'a Node<Single>,
    machine: &'a mut Machine,
    disk: &'a mut Disk,
    now: Now,
    rng: &'a mut Rng,
}

impl StateIo for Stopping<'_> {
    fn keep_names(&mut self, names: &[Vec<u8>]) -> bool {
        self.disk.keep_names(&mut self.machine.directory.names, names)
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

impl SegmentIo for Stopping<'_> {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.disk.write(segment, bytes)
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        self.disk.read(segment, bytes)
    }
}

impl StopIo for Stopping<'_> {
    /// Some stops come to no checkpoint.
    fn sync(&mut self, _: usize) -> Result<(), String> {
        if !self.rng.chance(0.7) || self.disk.fails() { Err("a fault".to_owned()) } else { Ok(()) }
    }
    fn write_checkpoint(
        &mut self,
        tables: &[(usize, &Words)],
        rest: &AtRest<'_>,
    ) -> (Result<(), String>, u64) {
        if self.disk.fails() {
            return (Err("a fault".to_owned()), 1);
        }
        let (table, indexes) =
            (all(tables[0].1), rest.indexes.iter().map(|i| i.used().collect()).collect());
        let written = self.now.wall;
        let checkpoint = Checkpoint { table, indexes, written };
        kill_or(self.rng, || self.machine.directory.checkpoint = Some(checkpoint));
        (Ok(()), 1)
    }
    fn write_superblock(&mut self, _: usize) -> Result<(), String> {
        let current = self.machine.superblock();
        let stopped = current.stop(current.cas_base);
        let written = self.machine.write(&stopped, self.rng);
        written.map_err(|IoFailed| "a fault".to_owned())
    }
    fn release(&mut self) {
        self.machine.lose_memory();
    }
    /// Some are cut off before what is in DRAM is kept.
    fn keep_dram(&mut self, _: Option<&Closed>) {
        if self.rng.chance(0.8) {
            self.machine.keep(self.node, self.now, self.rng);
        }
    }
}

/// Stops in good order, with a checkpoint if nothing goes wrong.
pub(super) fn stop(
    node: &Node<Single>,
    maintenance: &mut Maintenance<Vec<u8>>,
    machine: &mut Machine,
    disk: &mut Disk,
    now: Now,
    rng: &mut Rng,
) {
    let mut io = Stopping { node, machine, disk, now, rng };
    maintenance.stop(now, node, &[], &mut io);
}

/// What a start has made, and how many entries it has kept of the index.
pub(super) type Started = (Node<Single>, Maintenance<Vec<u8>>, u64);

/// An object that is kept while no process runs.
#[derive(Clone)]
pub(super) struct Kept {
    pub(super) key: Vec<u8>,
    pub(super) value: Vec<u8>,
    /// All but the key and the value.
    pub(super) rest: Saved<'static>,
}

impl Kept {
    pub(super) fn of(saved: &Saved<'_>) -> Kept {
        Kept {
            key: saved.key.to_vec(),
            value: saved.value.to_vec(),
            rest: Saved { key: b"", value: b"", ..*saved },
        }
    }

    pub(super) fn saved(&self) -> Saved<'_> {
        Saved { key: &self.key, value: &self.value, ..self.rest }
    }
}

/// Words of an index of so many buckets, and of those that it may grow to.
pub(super) fn index_words(buckets: u32) -> usize {
    FlashIndex::words_for(FlashIndex::most_buckets(buckets))
}

/// Memory that is there and loses what is given back.
struct Backed(&'static [AtomicU64]);

impl Supply for Backed {
    fn back(&self, _: Range<usize>) -> bool {
        true
    }
    fn give_back(&self, range: Range<usize>) {
        self.0[range].iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// The largest object of runs with large ones: it lies in up to four segments.
pub(super) const BIG: u32 = 20_000;

/// Whether this run has objects larger than a segment.
pub(super) fn has_big(superblock: &Superblock) -> bool {
    superblock.salt().is_multiple_of(3)
}

/// What a run is built from. Most indexes may grow.
fn setup(superblock: &Superblock, policy: &str, buckets: u32, names: Vec<Vec<u8>>) -> RunSetup {
    let index_most = match superblock.salt() % 8 {
        0 => buckets,
        1 => 2 * buckets + 1,
        _ => FlashIndex::most_buckets(buckets),
    };
    let big = has_big(superblock);
    RunSetup {
        kv: RunSetup::VERSION,
        larder: String::new(),
        uuid: String::new(),
        hash_key: superblock.hash_key.0,
        salt: superblock.salt(),
        segments: SEGMENTS,
        segment_bytes: SEGMENT_BYTES,
        drives: Vec::new(),
        shard: ShardSetup {
            arena_bytes: if big { 48 << 10 } else { 8 << 10 },
            max_object: if big { BIG } else { 3_400 },
            no_eviction: false,
            clock_increment: false,
            clock_max: 3,
            free_low: if big { 30 << 10 } else { 5 << 10 },
            free_high: if big { 40 << 10 } else { 7 << 10 },
            flash_min_record: 0,
            access_times: 16,
            buckets,
            index_most,
            admission_memory: 64 << 10,
            objects: 64,
            share_bits: 0.5f64.to_bits(),
            budget_rate_bits: None,
        },
        shards: (0..SHARDS as u64)
            .map(|i| ShardSeed { cas_base: superblock.cas_base + (i << 44), seed: i })
            .collect(),
        admission: AdmissionConfig::from_name(policy).unwrap(),
        applications: AppsSetup { names, ..AppsSetup::default() },
        log: Some(LogSetup {
            hot_percent: 70,
            reinsert_percent: 20,
            retry_after: Nanos::from_millis(5).0,
            generation_floor: superblock.first_generation(),
            budget: WriteBudgetConfig::default(),
            budget_state: None,
            budget_at: 0,
        }),
    }
}

/// What a run without flash is built from.
pub(super) fn setup_alone(
    superblock: &Superblock,
    cas_base: u64,
    policy: &str,
    buckets: u32,
    names: Vec<Vec<u8>>,
) -> RunSetup {
    let seed = |i: u64| ShardSeed { cas_base: cas_base + (i << 44), seed: i };
    let shards = (0..SHARDS as u64).map(seed).collect();
    let with_flash = setup(superblock, policy, buckets, names);
    RunSetup { segments: 0, segment_bytes: 4096, shards, log: None, ..with_flash }
}

/// A node over these words, and how many entries it has kept of them. Without flash there is no `table`; `names_kept` applications are
/// known on disk.
pub(super) fn start(
    setup: &RunSetup,
    words: Vec<Words>,
    table: Option<SegmentTable>,
    generations: Option<&[u64]>,
    names_kept: usize,
    options: &Options,
) -> Result<Started, SetupError> {
    let (mut shards, mut kept) = (Vec::new(), 0);
    for (i, words) in words.into_iter().enumerate() {
        let (shard, report) = setup.shard_in(i, words, generations)?;
        kept += report.kept;
        shards.push(shard);
    }
    let node: Node<Single> = Node::new(setup, None, shards)?;
    #[cfg(feature = "planted")]
    for i in 0..SHARDS {
        if let Some(fault) = options.planted {
            node.lock(i).unrecorded().plant(fault);
        }
    }
    let _ = options.planted;
    let log = match table {
        None => None,
        Some(table) => setup.log_over(table, vec![vec![0; SEGMENT_BYTES as usize]; 3])?,
    };
    #[cfg_attr(not(feature = "planted"), expect(unused_mut, reason = "for a fault"))]
    let mut maintenance = Maintenance::new(&node, log, setup.shards[0].cas_base, names_kept);
    #[cfg(feature = "planted")]
    options.planted.iter().for_each(|fault| maintenance.plant(*fault));
    Ok((node, maintenance, kept))
}
