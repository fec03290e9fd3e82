//! What a tape costs a queue of the block cache: processor time of a read of 4 KiB that is answered from flash (the queue, the
//! shard and admission, without the I/O itself) without a tape type, with a tape type and no tape, and with a tape whose chunks are
//! summed and dropped. The least of several rounds, the three in turn: other programs can only add.

use std::cell::RefCell;

use larder_base::{Nanos, UnixSecs};
use larder_engine::block::address::Placing;
use larder_engine::block::map::Making;
use larder_engine::block::node::calls::{self, Calls, Mail, Out, Questions};
use larder_engine::block::node::event::{
    Answer, Effects, Ended, Host, JobId, Op, ShardIo, State, StoreOp, Submit, Volume, Why,
};
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::Limits;
use larder_engine::block::node::queue::{Config, Node, Queue};
use larder_engine::block::node::quiet::{Changes, QUIET};
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::record::RecordedQueue;
use larder_engine::block::record::{
    BlockRunSetup, BlockTape, RecordedAdmission, RecordedShard, SharedTape, VolumeSetup,
};
use larder_engine::block::{
    BlockConfig, BlockLimits, GroupId, LineId, Merge, OpId, Regions, SlotId, WriteMode,
};
use larder_format::Uuid;
use larder_format::block::{BlockSuperblock, Layout};
use larder_format::recording::{Chunk, ChunkSink, seal};
use larder_policy::block::{BlockKind, Reason, Rule, VolumeId};

const LINE: u64 = 4096;
/// Lines that are read again and again.
const LINES: u64 = 1024;
const READS: u64 = 300_000;
const ROUNDS: u64 = 7;

/// Without bytes.
struct Cost;

impl Host for Cost {
    type Bytes = ();
    type Volume = Whole;
    type Ticket = ();
    type Failure = ();
    type Extents = ();

    fn part(_: &(), _: u64, _: u64) {}
    fn apart(_: &(), _: u64, _: u64) {}
    fn failure(_: Why) {}
}

/// The only volume.
#[derive(Clone)]
struct Whole;

impl Volume for Whole {
    fn state(&self) -> State {
        State::Served
    }
    fn base(&self) -> u64 {
        0
    }
    fn whole(&self) -> u64 {
        1 << 30
    }
}

/// One shard, one mailbox.
struct Shared {
    shard: RefCell<(RecordedShard, Held<Cost>)>,
    mail: RefCell<Mail<Cost>>,
    out: RefCell<Out<()>>,
    admission: RefCell<RecordedAdmission>,
    turns: RefCell<Turns>,
    limits: Limits,
    changes: Changes,
}

impl Questions for Shared {
    fn line_bytes(&self) -> u32 {
        LINE as u32
    }
    fn prefer(&self, _: LineId, _: LineId) -> bool {
        true
    }
    fn keep(&self, _: LineId, _: Option<LineId>) -> bool {
        false
    }
    fn keep_groups(&self, _: GroupId, _: GroupId, _: u32) -> bool {
        false
    }
    fn may_grow(&self, _: LineId) -> bool {
        true
    }
}

impl Calls<Cost> for Shared {
    type Shard = RecordedShard;

    fn shard<R>(&self, _: u32, f: impl FnOnce(&mut RecordedShard, &mut Held<Cost>) -> R) -> R {
        let (shard, held) = &mut *self.shard.borrow_mut();
        f(shard, held)
    }
    fn mailbox<R>(&self, _: usize, f: impl FnOnce(&mut Mail<Cost>) -> R) -> R {
        f(&mut self.mail.borrow_mut())
    }
    fn notify(&self, _: usize) {}
    fn maintain(&self, out: &mut Out<()>) {
        // Nobody waits for records or bits here.
        out.asks.clear();
        out.commit = false;
        self.out.borrow_mut().fills.append(&mut out.fills);
    }
}

impl Node<Cost> for Shared {
    type Admission = RecordedAdmission;

    fn is_enabled(&self) -> bool {
        true
    }
    fn limits(&self) -> &Limits {
        &self.limits
    }
    fn ask_budget(&self, _: OpId) {}
    fn changes(&self) -> &Changes {
        &self.changes
    }
    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut self.turns.borrow_mut())
    }
    fn ask_bits(&self, _: OpId, _: u32, _: u32) {}
    fn give_up(&self, _: Nanos, why: String) {
        panic!("{why}");
    }
    fn id(&self, _: &Whole) -> VolumeId {
        VolumeId(0)
    }
    fn selects(&self, _: &Whole) -> bool {
        false
    }
    fn rule(&self, _: &Whole, _: u64, _: u64) -> Rule {
        Rule::ByPolicy
    }
    fn kind(&self, _: &Whole, _: u64, _: u64) -> BlockKind {
        BlockKind::Unknown
    }
    fn admission<R>(&self, _: &Whole, f: impl FnOnce(&mut RecordedAdmission) -> R) -> R {
        f(&mut self.admission.borrow_mut())
    }
    fn refused(&self, _: &Whole, _: Reason) {}
    fn pass(&self, _: &Whole, _: u64, (): &()) {}
    fn ended(&self, _: &Whole, _: usize, _: Nanos, _: &Ended) {}
}

/// I/O that is asked for, and operations that are answered.
#[derive(Default)]
struct Asked {
    reads: Vec<(ShardIo, LineId)>,
    fetches: Vec<JobId>,
    answered: u64,
}

impl Effects<Cost> for Asked {
    fn flash_read(&mut self, io: ShardIo, _: SlotId, line: LineId, _: u32) {
        self.reads.push((io, line));
    }
    fn flash_write(&mut self, _: ShardIo, _: SlotId, _: u32, (): ()) {}
    fn merge(&mut self, _: ShardIo, _: Merge, (): ()) {}
    fn load(&mut self, _: ShardIo, _: u32) {}
    fn store_read(&mut self, job: JobId, _: &Whole, _: u64, _: u32, _: bool) {
        self.fetches.push(job);
    }
    fn store_change(&mut self, _: JobId, _: &Whole, _: StoreOp<()>) {}
    fn deliver(&mut self, (): &mut (), _: u64, (): ()) {}
    fn answer(&mut self, _: Answer<Cost>) {
        self.answered += 1;
    }
}

/// Sums chunks, as the writing thread does, and drops them.
struct Drain(u64);

impl ChunkSink for Drain {
    fn put(&mut self, chunk: Chunk) -> bool {
        let head = seal(chunk.stream, chunk.first, chunk.records, &chunk.payload);
        self.0 += (head.len() + chunk.payload.len()) as u64;
        true
    }
    fn is_open(&self) -> bool {
        true
    }
}

/// A read of one line by `$queue`, to its answer.
macro_rules! read {
    ($queue:expr, $shared:expr, $asked:expr, $now:expr, $line:expr) => {{
        let op = Op::Read { at: $line * LINE, len: LINE };
        let submit = Submit { volume: Whole, ticket: (), op, holds: BlockKind::Unknown };
        $queue.submit($shared, $now, $asked, submit);
        $queue.turn($shared, $now, $asked);
        while let Some(job) = $asked.fetches.pop() {
            $queue.store_read($shared, $now, $asked, job, Ok(()));
        }
        while let Some((io, line)) = $asked.reads.pop() {
            $queue.flash_read($shared, $now, io, line, Ok((&[0], ())));
        }
        $queue.turn($shared, $now, $asked);
    }};
}

enum Subject {
    Plain(Queue<Cost>),
    Recorded(RecordedQueue<Cost>),
}

impl Subject {
    fn read(&mut self, shared: &Shared, asked: &mut Asked, now: Nanos, line: u64) {
        match self {
            Subject::Plain(queue) => read!(queue, shared, asked, now, line),
            Subject::Recorded(queue) => read!(queue, shared, asked, now, line),
        }
    }
}

fn setup(layout: &Layout, superblock: &BlockSuperblock) -> BlockRunSetup {
    let config = BlockConfig {
        line_bytes: LINE as u32,
        write: WriteMode::WriteThrough,
        limits: BlockLimits::default(),
        regions: Regions { groups: layout.region_groups, count: layout.regions },
    };
    let admission = "all".parse().unwrap_or_else(|e| panic!("{e}"));
    let volumes = vec![VolumeSetup { name: "v".into(), bytes: 1 << 30, seed: 3 }];
    BlockRunSetup::new(superblock, &config, Making::default(), QUIET, &admission, volumes, 1)
}

fn shared(setup: &BlockRunSetup) -> Shared {
    let shard = setup.build_shard(0).unwrap_or_else(|e| panic!("{e}"));
    let admission = setup.build_admission(0).unwrap_or_else(|e| panic!("{e}"));
    Shared {
        shard: RefCell::new((shard, Held::default())),
        mail: RefCell::default(),
        out: RefCell::default(),
        admission: RefCell::new(admission),
        turns: RefCell::default(),
        limits: Limits::default(),
        changes: Changes::new(1, QUIET),
    }
}

/// What is to be filled is on flash.
fn fill(shared: &Shared, now: Nanos) {
    let fills = std::mem::take(&mut shared.out.borrow_mut().fills);
    for fill in fills {
        calls::call(shared, 0, None, &mut Out::default(), |s, fx| {
            s.flash_written(now, fill.io, Ok(&[0]), fx);
        });
    }
}

/// Processor time of this process so far, in seconds, where the system tells it.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    let ticks = |i: usize| after_name.split(' ').nth(i).and_then(|t| t.parse::<f64>().ok());
    // Fields 14 and 15: user and system time, in hundredths.
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

fn main() {
    let layout = Layout::new(64 << 20, LINE as u32, 8, 1).unwrap_or_else(|e| panic!("{e}"));
    let superblock = BlockSuperblock::format(Uuid([1; 16]), 7, 9, layout, UnixSecs(0));
    let setup = setup(&layout, &superblock);
    let config = Config::new(&layout, Placing::of(&layout, superblock.key), 0);
    let mut taped = RecordedQueue::new(Queue::new(0, config));
    taped.record(SharedTape::new(Some(BlockTape::new(0, Box::new(Drain(0))))));
    let mut subjects = [
        ("no tape type", Subject::Plain(Queue::new(0, config))),
        ("tape type, no tape", Subject::Recorded(RecordedQueue::new(Queue::new(0, config)))),
        ("tape", Subject::Recorded(taped)),
    ]
    .map(|(name, subject)| (name, subject, shared(&setup)));
    let mut least = [f64::INFINITY; 3];
    let mut asked = Asked::default();
    for round in 0..ROUNDS {
        for ((_, subject, shared), least) in subjects.iter_mut().zip(&mut least) {
            let at = |i: u64| Nanos((round * READS + i + 1) * 1_000);
            // Whatever is not on flash yet comes there.
            for line in 0..LINES {
                subject.read(shared, &mut asked, at(0), line);
                fill(shared, at(0));
            }
            (asked.answered, asked.fetches) = (0, Vec::new());
            let began = processor_seconds();
            for i in 0..READS {
                subject.read(shared, &mut asked, at(i), i * 7919 % LINES);
            }
            *least = least.min(processor_seconds() - began);
            assert_eq!(asked.answered, READS);
        }
    }
    for ((name, ..), least) in subjects.iter().zip(least) {
        println!("{name}: {:.0} ns a read", least / READS as f64 * 1e9);
    }
}
