//! Maintenance as a server has it: a thread that sleeps by the inbox, over a device that takes everything.
//!
//! Time stands while the thread is at work, and goes on when it would sleep for a while. It never comes as far as a tick: what nobody wakes
//! the thread for is not done, and whoever waits for it waits for ever, which the scheduler reports.

use larder_base::{Nanos, UnixSecs};
use larder_engine::block::node::calls::{Copying, Fill, Load};
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::event::ShardIo;
use larder_engine::block::node::limits::Limits;
use larder_engine::block::node::maintenance::{
    AtNode, Effects, Left, Maintenance, Pace, Turn, Work,
};
use larder_engine::block::node::record::RecordedMaintenance;
use larder_engine::block::node::round::{self, Rounds};
use larder_engine::block::node::setup::fresh_log;
use larder_engine::block::{IoFailed, LogIo};
use larder_format::Uuid;
use larder_format::block::{BlockSuperblock, Volume, VolumeState};
use larder_policy::block::VolumeId;
use shuttle::sync::Arc;
use shuttle::sync::mpsc::channel;

use super::{GROUP, KEY, Model, NAMES, Shared, Values, layout};

/// Nobody sleeps until then without being woken.
const NEVER: Nanos = Nanos(u64::MAX / 2);
/// When what is done: as in a server, but for ticks.
pub(super) fn pace() -> Pace {
    Pace { tick: Nanos(u64::MAX), ..Pace::default() }
}

/// Something to be done on the thread of maintenance.
pub(super) type Task = Box<dyn FnOnce(&mut Keeper) + Send>;

/// The device as the log uses it: what is written nobody reads.
pub(super) struct Blank;

impl LogIo for Blank {
    fn read(&mut self, _: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.fill(0);
        Ok(())
    }
    fn write(&mut self, _: u64, _: &[u8]) -> Result<(), IoFailed> {
        shuttle::thread::yield_now();
        Ok(())
    }
    fn flush(&mut self) -> Result<(), IoFailed> {
        Ok(())
    }
}

/// What maintenance has asked for.
#[derive(Default)]
pub(super) struct Begun {
    fills: Vec<Fill<Values>>,
    /// Writes that have begun since it was last looked what has ended, and those that are over.
    writing: Vec<(ShardIo, Vec<u32>)>,
    written: Vec<(ShardIo, Vec<u32>)>,
    flushes: Vec<(VolumeId, u64)>,
}

impl Effects<Values> for Begun {
    fn fill(&mut self, fill: Fill<Values>) {
        self.fills.push(fill);
    }
    fn copy(&mut self, _: Copying) {
        unreachable!("nothing is moved");
    }
    fn load(&mut self, _: Load) {
        unreachable!("there is no table");
    }
    fn store_flush(&mut self, store: VolumeId, number: u64) {
        self.flushes.push((store, number));
    }
    fn note_given_up(&mut self, _: &BlockSuperblock) -> Result<(), String> {
        panic!("the device does not fail");
    }
    fn disown(&mut self) {}
    fn given_up(&mut self, why: &str) {
        panic!("{why}");
    }
    fn identity(&mut self, _: &str) -> Option<[u8; 64]> {
        Some([1; 64])
    }
}

/// Whoever has maintenance.
pub(super) struct Keeper {
    pub(super) shared: Arc<Shared>,
    pub(super) machine: RecordedMaintenance,
    begun: Begun,
}

fn superblock() -> BlockSuperblock {
    let mut superblock = BlockSuperblock::format(Uuid([1; 16]), KEY, 9, layout(), UnixSecs(1));
    superblock.volumes = (0..)
        .zip(NAMES)
        .map(|(n, name)| Volume {
            name: name.to_owned(),
            first_group: n * layout().region_groups,
            groups: layout().region_groups,
            bytes: layout().region_groups * GROUP,
            state: VolumeState::Attached,
            identity: [0; 64],
            write_back: None,
        })
        .collect();
    superblock
}

impl Keeper {
    pub(super) fn new(shared: Arc<Shared>) -> Keeper {
        let superblock = superblock();
        let log = fresh_log(superblock.clone());
        let machine = RecordedMaintenance::new(Maintenance::new(pace(), Some(log), superblock));
        Keeper { shared, machine, begun: Begun::default() }
    }

    pub(super) fn parts(
        &mut self,
    ) -> (&mut RecordedMaintenance, AtNode<'_, Model, Shared>, Charged<Blank, &Limits>, &mut Begun)
    {
        let Keeper { shared, machine, begun } = self;
        let io = Charged::new(Blank, &shared.limits, shared.now());
        (machine, AtNode::new(shared, layout().shards), io, begun)
    }

    /// What is under way, and slots that the durable map does not know as they are.
    pub(super) fn unsettled(&mut self) -> usize {
        let (machine, mut shards, ..) = self.parts();
        machine.unsettled(&mut shards)
    }

    /// Goes on until the run is over. Returns whether all was durable then.
    pub(super) fn run(mut self) -> bool {
        loop {
            let left = self.wait();
            if let Turn::Over { settled } = round::round(&mut self, left) {
                return settled && self.begun.writing.is_empty() && self.begun.written.is_empty();
            }
        }
    }

    fn wait(&self) -> Left<Values, Task> {
        let at = self.machine.wakes();
        let mut inbox = self.shared.inbox.lock().unwrap();
        loop {
            let until = inbox.sleep(at);
            if self.shared.now() >= until {
                return inbox.take();
            }
            if until < NEVER {
                drop(inbox);
                shuttle::thread::yield_now();
                self.shared.goes_on(until);
                inbox = self.shared.inbox.lock().unwrap();
            } else {
                inbox = self.shared.wakes.wait(inbox).unwrap();
            }
        }
    }

    /// A round, if one is due before somebody leaves something. Returns whether one was.
    pub(super) fn step(&mut self) -> bool {
        let mut inbox = self.shared.inbox.lock().unwrap();
        let due = inbox.due(self.machine.wakes());
        if due >= NEVER {
            return false;
        }
        let left = inbox.take();
        drop(inbox);
        self.shared.goes_on(due);
        round::round(self, left);
        true
    }
}

impl Rounds for Keeper {
    type Bytes = Values;
    type Task = Task;

    fn now(&self) -> Nanos {
        self.shared.now()
    }

    fn machine(&mut self) -> &mut RecordedMaintenance {
        &mut self.machine
    }

    fn take(&mut self, now: Nanos, work: Work<Values>) {
        let (machine, mut shards, mut io, fx) = self.parts();
        machine.take(now, work, &mut shards, &mut io, fx);
    }

    fn turn(&mut self, now: Nanos) -> Turn {
        let (machine, mut shards, mut io, fx) = self.parts();
        machine.turn(now, &mut shards, &mut io, fx)
    }

    fn next_flushed(&mut self) -> Option<(VolumeId, u64, bool)> {
        self.begun.flushes.pop().map(|(store, number)| (store, number, true))
    }

    fn begin_io(&mut self) {
        let Keeper { shared, begun, .. } = self;
        for Fill { shard, io, slot, bytes, .. } in begun.fills.drain(..) {
            begun.writing.push((ShardIo { shard, io }, shared.write(shard, slot, &bytes)));
        }
    }

    fn task(&mut self, task: Task) {
        task(self);
    }

    /// A fill that has begun is over at the next look.
    fn end_io(&mut self) {
        let now = self.shared.now();
        for (io, crcs) in std::mem::take(&mut self.begun.written) {
            let (machine, mut shards, ..) = self.parts();
            machine.flash_written(now, &mut shards, io, Ok(&crcs));
        }
        self.begun.written = std::mem::take(&mut self.begun.writing);
    }
}

/// Has `task` done by whoever has maintenance, and waits for what it says.
pub(super) fn in_log<R: Send + 'static>(
    shared: &Shared,
    task: impl FnOnce(&mut Keeper) -> R + Send + 'static,
) -> R {
    let (tell, told) = channel();
    shared.leave(|inbox| inbox.task(Box::new(move |keeper| tell.send(task(keeper)).unwrap())));
    told.recv().unwrap()
}
