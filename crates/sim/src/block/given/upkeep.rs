//! Maintenance's turns, and the rounds of who has time.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};

use larder_base::Nanos;
use larder_engine::block::node::calls::{Copying, Fill, Load};
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::event::ShardIo;
use larder_engine::block::node::flushes::{Flushed, has_made_durable};
use larder_engine::block::node::maintenance::{
    AtNode, Census, Effects, Lines, MOST_LOOKS, Maintenance, ROUND, Turn,
};
use larder_engine::block::node::owners::{Owners, Whose, aside_at, put_aside};
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
    flushed: Vec<(VolumeId, u64)>,
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
            flushed: Vec::new(),
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
        self.begun.flushed.push((store, number));
    }

    fn note_given_up(&mut self, _: &BlockSuperblock) -> bool {
        self.begun.barred = true;
        true
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
    pub machine: &'a mut Maintenance,
    pub shards: AtNode<'a, House<B>, GivenNode<B>>,
    pub io: Charged<MediumIo<'a>, &'a Medium>,
    pub fx: Carrier<'a, B>,
}

/// Something that an operator has done where the map's log is.
pub(super) type Task<'e, B> = &'e mut dyn FnMut(&mut AtWork<'_, B>);

/// Maintenance.
pub(super) struct Upkeep<B: Carried> {
    pub machine: Maintenance,
    pub begun: Begun<B>,
    /// When the machine wants its next turn.
    due: Nanos,
    /// The end has begun.
    stopping: bool,
    /// All is over.
    pub over: bool,
    rounds: Rounds,
}

impl<B: Carried> Upkeep<B> {
    pub(super) fn new(machine: Maintenance, memory: Memory) -> Upkeep<B> {
        Upkeep {
            machine,
            begun: Begun::new(memory),
            due: Nanos::ZERO,
            stopping: false,
            over: false,
            rounds: Rounds::default(),
        }
    }

    /// When it has something to do: at once, where a flush of a store has ended.
    pub(super) fn due(&self, node: &GivenNode<B>) -> Nanos {
        if !self.begun.flushed.is_empty() {
            return Nanos::ZERO;
        }
        node.inbox.borrow().due().map_or(self.due, |due| due.min(self.due))
    }

    /// Its turns, as long as there is something to do now. Returns whether there was.
    pub(super) fn step(
        &mut self,
        node: &GivenNode<B>,
        mut task: Option<Task<'_, B>>,
        stop: bool,
    ) -> bool {
        let mut did = false;
        loop {
            let begins_to_stop = stop && !self.stopping;
            let is_due = node.now.get() >= self.due(node);
            if self.over || !(task.is_some() || begins_to_stop || is_due) {
                return did;
            }
            did = true;
            if begins_to_stop {
                self.stopping = true;
                self.machine.stop(node.now.get());
            }
            match self.turn(node, task.take()) {
                Turn::Again => self.due = Nanos::ZERO,
                Turn::At(at) => self.due = at,
                Turn::Over { .. } => self.over = true,
            }
        }
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

    fn turn(&mut self, node: &GivenNode<B>, task: Option<Task<'_, B>>) -> Turn {
        let now = node.now.get();
        for (store, number) in std::mem::take(&mut self.begun.flushed) {
            // A volume that is gone has no store.
            let answered = node.volumes.borrow().values().any(|v| v.id == store);
            let durable = has_made_durable(answered, &InMemory);
            self.machine.store_flushed(now, store, number, durable);
        }
        let work = node.inbox.borrow_mut().take();
        let mut at = self.at_work(node);
        let AtWork { machine, shards, io, fx, .. } = &mut at;
        machine.take(now, work, shards, io, fx);
        if task.is_some() {
            machine.force();
        }
        let turn = machine.turn(now, shards, io, fx);
        if let Some(task) = task {
            task(&mut at);
        }
        self.end(node);
        turn
    }

    /// What has ended is told.
    fn end(&mut self, node: &GivenNode<B>) {
        while let Some(done) = self.begun.done.pop_front() {
            let AtWork { now, machine, mut shards, mut fx, .. } = self.at_work(node);
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

    /// The round of who has time, if it is due. Returns when the next is.
    pub(super) fn round(&mut self, node: &GivenNode<B>) -> Nanos {
        if node.now.get() >= self.rounds.due {
            self.rounds.due = self.rounds.turn(node, self.machine.line_space());
        }
        self.rounds.due
    }
}

/// Who counts lines, takes those of trimmed ranges out of the map, and reads what tells where a file system's metadata is.
#[derive(Default)]
struct Rounds {
    machine: Census,
    lines: Lined,
    due: Nanos,
}

impl Rounds {
    fn turn<B: Carried>(
        &mut self,
        node: &GivenNode<B>,
        superblock: Option<&BlockSuperblock>,
    ) -> Nanos {
        let now = node.now.get();
        if self.machine.keeps_budget(now) {
            node.medium.keep(now);
        }
        for volume in node.all() {
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
        loop {
            match self.machine.turn(now, &mut counted) {
                Turn::Again => {}
                Turn::At(at) => return at.min(now + ROUND),
                Turn::Over { .. } => return now + ROUND,
            }
        }
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
        self.node.cells[shard as usize].borrow_mut().0.sweep(steps)
    }

    fn count(&mut self, shard: u32, count: &mut Count) -> bool {
        let Counted { node, superblock, lines } = self;
        let Lined { aside, by_volume } = &mut **lines;
        let aside = aside.get_or_insert_with(|| superblock.map_or_else(Vec::new, put_aside));
        let of = |group: GroupId| {
            let attached = node.owner(group.line(0)).map(|v| Whose::Attached(v.id));
            attached.or_else(|| aside_at(aside, |&at| at, group).map(Whose::Aside))
        };
        count.turn(&node.cells[shard as usize].borrow().0, of, |volume, more| {
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
