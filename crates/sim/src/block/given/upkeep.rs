//! Maintenance's turns, and the rounds of who has time.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::marker::PhantomData;

use larder_base::Nanos;
use larder_engine::block::node::calls::{Copying, Fill, Load};
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::event::ShardIo;
use larder_engine::block::node::flushes::{Flushed, has_made_durable};
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::node::looks::Looks as _;
use larder_engine::block::node::maintenance::{
    AtNode, Census, Effects, Left, Lines, MOST_LOOKS, Maintenance, Turn, Work,
};
use larder_engine::block::node::owners::{Owners, Whose, aside_at, put_aside};
use larder_engine::block::node::record::RecordedMaintenance;
use larder_engine::block::node::round::{self, Rounds};
use larder_engine::block::node::share::Count;
use larder_engine::block::node::start::memory::Memory;
use larder_engine::block::{GroupId, SlotId};
use larder_format::PAGE_SIZE;
use larder_format::block::BlockSuperblock;
use larder_policy::block::VolumeId;

use super::bytes::{Carried, House};
use super::medium::{Medium, MediumIo};
use super::node::GivenNode;

/// I/O of lines that is over, and that no client waits for.
enum Done<B> {
    /// The first half of a copy.
    Read(Copying, B),
    /// A fill, or the second half.
    Written(ShardIo, B),
    /// A page of the table.
    Loaded(Load, Vec<u8>),
}

/// What maintenance has asked for.
pub(super) struct Begun<B> {
    done: VecDeque<Done<B>>,
    /// Flushes of stores: over when they are asked for.
    flushed: VecDeque<(VolumeId, u64)>,
    /// What binds the maps' memory to a run.
    pub memory: RefCell<Memory>,
    /// Nothing on the device is to be used by a later start.
    pub barred: bool,
    /// The run has ended in good order.
    pub stopped: bool,
    /// What stores are known by at the end.
    pub identities: BTreeMap<String, [u8; 64]>,
}

impl<B> Begun<B> {
    pub(super) fn new(memory: Memory) -> Begun<B> {
        Begun {
            done: VecDeque::new(),
            flushed: VecDeque::new(),
            memory: RefCell::new(memory),
            barred: false,
            stopped: false,
            identities: BTreeMap::new(),
        }
    }
}

/// A store that loses nothing, and of which nothing is to be noted.
struct InMemory;

impl Flushed for InMemory {}

/// Carries out what maintenance asks for.
pub(super) struct Carrier<'a, B: Carried> {
    node: &'a GivenNode<B>,
    begun: &'a mut Begun<B>,
}

impl<B: Carried> Carrier<'_, B> {
    fn write(&mut self, io: ShardIo, slot: SlotId, bytes: B) {
        self.node.medium.write(self.slot(io.shard, slot), &bytes);
        self.begun.done.push_back(Done::Written(io, bytes));
    }

    fn slot(&self, shard: u32, slot: SlotId) -> u64 {
        self.node.layout.slot_at(shard, slot.0)
    }
}

impl<B: Carried> Effects<B> for Carrier<'_, B> {
    fn fill(&mut self, Fill { shard, io, slot, bytes, .. }: Fill<B>) {
        self.write(ShardIo { shard, io }, slot, bytes);
    }

    fn copy(&mut self, copying: Copying) {
        let len = u64::from(copying.lines) * self.node.line_bytes();
        let bytes = self.node.medium.read(self.slot(copying.shard, copying.from), len);
        self.begun.done.push_back(Done::Read(copying, bytes));
    }

    fn load(&mut self, load: Load) {
        let at = self.node.layout.table_at(load.shard, load.page) as usize;
        let bytes = self.node.medium.flash.borrow()[at..at + PAGE_SIZE].to_vec();
        self.begun.done.push_back(Done::Loaded(load, bytes));
    }

    fn store_flush(&mut self, store: VolumeId, number: u64) {
        self.begun.flushed.push_back((store, number));
    }

    fn note_given_up(&mut self, _: &BlockSuperblock) -> Result<(), String> {
        self.begun.barred = true;
        Ok(())
    }

    fn disown(&mut self) {
        self.begun.memory.borrow_mut().disown();
    }

    fn given_up(&mut self, why: &str) {
        *self.node.given_up.borrow_mut() = Some(why.to_owned());
    }

    fn identity(&mut self, volume: &str) -> Option<[u8; 64]> {
        let is_served = self.node.volumes.borrow().contains_key(volume);
        is_served.then(|| self.begun.identities.get(volume).copied().unwrap_or([0; 64]))
    }

    fn stopped(&mut self) {
        self.begun.memory.borrow_mut().disown();
        self.begun.stopped = true;
    }
}

/// The machine, and what it is called with.
pub(super) struct AtWork<'a, B: Carried> {
    pub now: Nanos,
    pub machine: &'a mut RecordedMaintenance,
    pub shards: AtNode<'a, House<B>, GivenNode<B>>,
    pub io: Charged<MediumIo<'a>, &'a Medium>,
    pub fx: Carrier<'a, B>,
}

/// Something that an operator has done where the map's log is.
pub(super) type Task<'e, B> = &'e mut dyn FnMut(&mut AtWork<'_, B>);

/// Maintenance.
pub(super) struct Upkeep<B: Carried> {
    pub machine: RecordedMaintenance,
    pub begun: Begun<B>,
    /// All is over.
    pub over: bool,
    scan: Scan,
}

impl<B: Carried> Upkeep<B> {
    pub(super) fn new(machine: Maintenance, memory: Memory) -> Upkeep<B> {
        Upkeep {
            machine: RecordedMaintenance::new(machine),
            begun: Begun::new(memory),
            over: false,
            scan: Scan::default(),
        }
    }

    /// When it has something to do.
    pub(super) fn due(&self, node: &GivenNode<B>) -> Nanos {
        node.inbox.borrow().due(self.machine.wakes())
    }

    /// A round, if it is due, if there is a task, or if the end is to begin. Returns whether it was.
    pub(super) fn step(
        &mut self,
        node: &GivenNode<B>,
        task: &mut Option<Task<'_, B>>,
        stop: bool,
    ) -> bool {
        let stop = stop && !self.machine.is_stopping();
        let is_due = node.now.get() >= self.due(node);
        if self.over || !(task.is_some() || stop || is_due) {
            return false;
        }
        let Left { work, .. } = node.inbox.borrow_mut().take();
        let tasks = task.take().into_iter().collect();
        let working = &mut Working { node, upkeep: self, tasks: PhantomData };
        self.over = matches!(round::round(working, Left { work, tasks, stop }), Turn::Over { .. });
        true
    }

    fn at_work<'a>(&'a mut self, node: &'a GivenNode<B>) -> AtWork<'a, B> {
        let now = node.now.get();
        AtWork {
            now,
            machine: &mut self.machine,
            shards: AtNode::new(node, node.layout.shards),
            io: MediumIo::of(&node.medium, now),
            fx: Carrier { node, begun: &mut self.begun },
        }
    }

    /// The round of who has time, if it is due. Returns when the next is.
    pub(super) fn round(&mut self, node: &GivenNode<B>) -> Nanos {
        if node.now.get() >= self.scan.due {
            self.scan.due = self.scan.turn(node, self.machine.line_space());
        }
        self.scan.due
    }
}

/// Maintenance in a round, with tasks of an operator's that is there for so long.
struct Working<'a, 'e, B: Carried> {
    node: &'a GivenNode<B>,
    upkeep: &'a mut Upkeep<B>,
    tasks: PhantomData<Task<'e, B>>,
}

impl<'e, B: Carried> Rounds for Working<'_, 'e, B> {
    type Bytes = B;
    type Task = Task<'e, B>;

    fn now(&self) -> Nanos {
        self.node.now.get()
    }

    fn machine(&mut self) -> &mut RecordedMaintenance {
        &mut self.upkeep.machine
    }

    fn take(&mut self, now: Nanos, work: Work<B>) {
        let AtWork { machine, mut shards, mut io, mut fx, .. } = self.upkeep.at_work(self.node);
        machine.take(now, work, &mut shards, &mut io, &mut fx);
    }

    fn turn(&mut self, now: Nanos) -> Turn {
        let AtWork { machine, mut shards, mut io, mut fx, .. } = self.upkeep.at_work(self.node);
        machine.turn(now, &mut shards, &mut io, &mut fx)
    }

    fn next_flushed(&mut self) -> Option<(VolumeId, u64, bool)> {
        let (store, number) = self.upkeep.begun.flushed.pop_front()?;
        // A volume that is gone has no store.
        let answered = self.node.volumes.borrow().values().any(|v| v.id == store);
        Some((store, number, has_made_durable(answered, &InMemory)))
    }

    /// It is over when it is asked for.
    fn begin_io(&mut self) {}

    fn task(&mut self, task: Task<'e, B>) {
        task(&mut self.upkeep.at_work(self.node));
    }

    fn end_io(&mut self) {
        let Working { node, upkeep, .. } = self;
        while let Some(done) = upkeep.begun.done.pop_front() {
            let AtWork { now, machine, mut shards, mut fx, .. } = upkeep.at_work(node);
            match done {
                Done::Read(Copying { shard, io, to: slot, .. }, bytes) => {
                    fx.write(ShardIo { shard, io }, slot, bytes);
                }
                Done::Written(io, bytes) => {
                    let crcs = bytes.crcs(node.layout.line);
                    machine.flash_written(now, &mut shards, io, Ok(&crcs));
                }
                Done::Loaded(Load { shard, io, page }, bytes) => {
                    let slots = node.decode_page(shard, page, &bytes);
                    let slots = slots.as_deref().map_err(|&e| e);
                    machine.page_loaded(now, &mut shards, ShardIo { shard, io }, slots);
                }
            }
        }
    }
}

/// Who counts lines, takes those of trimmed ranges out of the map, and reads what tells where a file system's metadata is.
#[derive(Default)]
struct Scan {
    machine: Census,
    lines: Lined,
    due: Nanos,
}

impl Scan {
    fn turn<B: Carried>(
        &mut self,
        node: &GivenNode<B>,
        superblock: Option<&BlockSuperblock>,
    ) -> Nanos {
        let now = node.now.get();
        for volume in node.all() {
            let writes_back = node.back.as_ref().and_then(|back| back.attachment(&volume));
            if writes_back.is_some() {
                let means = node.medium.limits.means(now);
                tell_log(node, now, |log, asks| log.afford(now, means, asks));
            }
            let Some(detector) = &volume.detector else { continue };
            let mut detector = detector.borrow_mut();
            for _ in 0..MOST_LOOKS {
                let Some((at, len)) = detector.next_wanted() else { break };
                let bytes = B::read(&volume.store.borrow(), at, len);
                if let Some(bytes) = bytes.seen() {
                    detector.observe(at, bytes);
                }
            }
        }
        let mut counted = Counted { node, superblock, lines: &mut self.lines };
        self.machine.round(|| now, &mut counted)
    }
}

/// What a count has found so far.
#[derive(Default)]
struct Lined {
    /// Where volumes lay that were put aside when it began.
    aside: Option<Vec<(u64, u64)>>,
    by_volume: BTreeMap<Whose, u64>,
}

/// Shards whose lines are counted and swept.
struct Counted<'a, B: Carried> {
    node: &'a GivenNode<B>,
    superblock: Option<&'a BlockSuperblock>,
    lines: &'a mut Lined,
}

impl<B: Carried> Lines for Counted<'_, B> {
    fn shards(&self) -> u32 {
        self.node.layout.shards
    }

    fn sweep(&mut self, shard: u32, steps: u32) -> bool {
        self.node.sweep(shard, steps)
    }

    fn count(&mut self, shard: u32, count: &mut Count) -> bool {
        let Counted { node, superblock, lines } = self;
        let Lined { aside, by_volume } = &mut **lines;
        let aside = aside.get_or_insert_with(|| superblock.map_or_else(Vec::new, put_aside));
        let of = |group: GroupId| {
            let attached = node.owner(group.line(0)).map(|v| Whose::Attached(v.id));
            attached.or_else(|| aside_at(aside, |&at| at, group).map(Whose::Aside))
        };
        node.count(shard, count, of, |volume, more| {
            *by_volume.entry(volume).or_default() += more;
        })
    }

    fn counted(&mut self) {
        let Lined { by_volume, .. } = std::mem::take(self.lines);
        for volume in self.node.all() {
            let lines = by_volume.get(&Whose::Attached(volume.id));
            volume.account.set(lines.copied().unwrap_or(0));
        }
    }
}
