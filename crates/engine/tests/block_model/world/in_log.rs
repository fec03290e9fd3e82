//! The world as maintenance sees it, and what it asks for.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node::calls::{Copying, Fill, Load};
use larder_engine::block::node::event::ShardIo;
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::maintenance::{
    Effects, Left, Maintenance, Pace, Shards, Turn, Work,
};
use larder_engine::block::node::record::RecordedMaintenance;
use larder_engine::block::node::round::{self, Rounds};
use larder_engine::block::node::start::memory::Memory;
use larder_engine::block::record::RecordedLog;
use larder_engine::block::{IoFailed, MapLog, MapRecord, OpId, SlotId, Sum, TableChange};
use larder_format::block::BlockSuperblock;
use larder_format::block::log::Held;
use larder_format::block::superblock::{COPY_BYTES, choose};
use larder_policy::block::VolumeId;

use super::limited::Charging;
use super::{SHARDS, World};
use crate::device::Device;
use crate::parts::{Bytes, Event};

/// All volumes have one store.
pub(super) const STORE: VolumeId = VolumeId(0);

/// The world as maintenance sees it: the engine's [`AtNode`], between whose calls the world goes on.
pub(super) struct InWorld<'a>(pub(super) &'a mut World);

impl InWorld<'_> {
    fn meanwhile(&mut self) {
        while self.0.rng.chance(0.3) {
            self.0.advance();
        }
    }

    /// The power has failed: what the process does now nobody sees.
    fn is_dead(&self) -> bool {
        self.0.device.borrow().blown
    }
}

impl Shards for InWorld<'_> {
    fn shards(&self) -> u32 {
        SHARDS
    }
    fn records_waiting(&mut self, shard: u32) -> usize {
        self.0.look(|at| at.records_waiting(shard))
    }
    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        let from = out.len();
        // (Of so few slots there are never more records than a batch has room for.)
        let most = most.min(self.0.habits.batch);
        let left = self.0.look(|at| {
            at.take_records(shard, most, out);
            at.records_waiting(shard)
        });
        self.0.seen.full_batches += u64::from(left > 0 && out.len() - from == most);
        self.0.writing.extend(out[from..].iter().map(|&r| (shard as usize, r)));
        self.meanwhile();
    }
    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        self.0.look(|at| at.take_pages(shard, most.min(2), out));
        let cleared = out.iter().filter(|c| matches!(c, TableChange::Cleared { .. })).count();
        self.0.seen.cleared_pages += cleared as u64;
        self.meanwhile();
    }
    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        self.0.look(|at| at.emptied(shard, out));
        self.meanwhile();
    }
    fn records_durable(&mut self, now: Nanos, shard: u32) {
        self.meanwhile();
        self.0.recorded(shard as usize, true);
        self.0.at_node(|at| at.records_durable(now, shard));
    }
    fn records_lost(&mut self, shard: u32) {
        self.0.recorded(shard as usize, false);
        self.0.look(|at| at.records_lost(shard));
    }
    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        self.0.look(|at| at.state(shard, first, most, out));
        self.meanwhile();
    }
    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        self.meanwhile();
        self.0.look(|at| at.quiet(shard, region))
    }
    fn intent_ready(&mut self, now: Nanos, shard: u32, region: u32) {
        if !self.is_dead() {
            self.0.at_node(|at| at.intent_ready(now, shard, region));
        }
    }
    fn flash_written(&mut self, now: Nanos, io: ShardIo, sums: Result<&[u32], IoFailed>) {
        self.0.at_node(|at| at.flash_written(now, io, sums));
    }
    fn page_loaded(&mut self, now: Nanos, io: ShardIo, slots: Result<&[Option<Sum>], IoFailed>) {
        self.0.at_node(|at| at.page_loaded(now, io, slots));
    }
    fn flash_ended(&mut self, now: Nanos, ended: Result<(), FlashError>) {
        self.0.flash_ended(now, ended);
    }
    fn sweep(&mut self, shard: u32, steps: u32) -> bool {
        self.0.look(|at| at.sweep(shard, steps.min(7)))
    }
    fn disable(&mut self, now: Nanos, shard: u32) {
        if !self.is_dead() {
            self.0.at_node(|at| at.disable(now, shard));
        }
        self.meanwhile();
    }
    fn unsettled(&mut self, shard: u32) -> usize {
        self.0.look(|at| at.unsettled(shard))
    }
    fn bits_ready(&mut self, op: OpId) {
        if !self.is_dead() {
            self.0.look(|at| at.bits_ready(op));
            self.0.go_on();
        }
    }
    fn budget_kept(&mut self, op: OpId) {
        if !self.is_dead() {
            self.0.look(|at| at.budget_kept(op));
            self.0.go_on();
        }
    }
    fn is_left_alone(&mut self, now: Nanos, region: u32) -> bool {
        self.0.flushes_at_once || self.0.look(|at| at.is_left_alone(now, region))
    }
    fn store_of(&mut self, region: u32) -> Option<VolumeId> {
        self.0.look(|at| at.store_of(region))
    }
    fn stores(&mut self) -> Vec<VolumeId> {
        self.0.look(|at| at.stores())
    }
}

/// What says whether the cache may be used: in this run, and by the next.
#[derive(Clone, Default)]
pub(super) struct Validity {
    pub(super) enabled: Rc<Cell<bool>>,
    /// It is noted, beside the device, that the map on it must not be used again.
    pub(super) barred: Rc<Cell<bool>>,
    /// Maintenance has had that noted, or tried to, since the cache was used last or its turn began.
    pub(super) asked: Rc<Cell<bool>>,
    /// How often it could not be noted.
    pub(super) refused: Rc<Cell<u64>>,
    /// The next such note cannot be made, where the device itself can say it.
    pub(super) unnoted: Rc<Cell<bool>>,
}

/// What the stores of volumes that are served are known by, by name.
pub(super) type Identities = Rc<BTreeMap<String, [u8; 64]>>;

/// What maintenance has asked for during a call.
pub(super) struct Begun {
    io: Vec<Event>,
    flushes: Vec<u64>,
    identities: Identities,
    validity: Validity,
    memory: Rc<RefCell<Memory>>,
    device: Rc<RefCell<Device>>,
}

impl Effects<Bytes> for Begun {
    fn fill(&mut self, Fill { shard, io, slot, bytes, .. }: Fill<Bytes>) {
        self.io.push(Event::FlashWrite(ShardIo { shard, io }, slot, bytes));
    }
    fn copy(&mut self, Copying { shard, io, from, to, lines }: Copying) {
        self.io.push(Event::Copy(ShardIo { shard, io }, from, to, lines));
    }
    fn load(&mut self, Load { shard, io, page }: Load) {
        self.io.push(Event::Load(ShardIo { shard, io }, page));
    }
    fn store_flush(&mut self, store: VolumeId, number: u64) {
        assert_eq!(store, STORE);
        self.flushes.push(number);
    }
    fn note_given_up(&mut self, _: &BlockSuperblock) -> Result<(), String> {
        let Validity { barred, asked, refused, unnoted, .. } = &self.validity;
        let mut device = self.device.borrow_mut();
        asked.set(true);
        let must_fail = unnoted.take() && device.works_for_now();
        if device.blown {
            return Ok(());
        }
        // (What is not noted is tried again.)
        let fails = must_fail || device.rng.chance(0.3);
        refused.set(refused.get() + u64::from(fails));
        barred.set(barred.get() || !fails);
        if fails { Err("it fails".into()) } else { Ok(()) }
    }
    fn disown(&mut self) {
        if !self.device.borrow().blown {
            self.memory.borrow_mut().disown();
        }
    }
    fn given_up(&mut self, _: &str) {
        let mut device = self.device.borrow_mut();
        if device.blown {
            return;
        }
        // Changes go on without bits from here on: after a kill the map would be believed.
        if !self.validity.asked.get() {
            device.complaint =
                Some("the cache is given up before that is noted, or without".to_owned());
        } else if self.memory.borrow().snapshot().load(0) != 0 {
            device.complaint = Some("the cache is given up, and memory is the run's".to_owned());
        }
        self.validity.enabled.set(false);
    }
    fn identity(&mut self, volume: &str) -> Option<[u8; 64]> {
        self.identities.get(volume).copied()
    }
}

impl World {
    /// A run begins with this log, or without one.
    pub(super) fn begin_maintenance(&mut self, log: Option<MapLog>, superblock: BlockSuperblock) {
        // Some ends do not wait for what is void.
        let sweep = if self.rng.chance(0.5) { Nanos::ZERO } else { Pace::default().sweep };
        let pace = Pace { sweep, ..self.habits.pace() };
        self.validity.enabled.set(log.is_some());
        self.validity.asked.set(false);
        let machine = Maintenance::new(pace, log.map(RecordedLog::new), superblock);
        #[allow(unused_mut, reason = "faults are planted with a feature")]
        let mut machine = machine;
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            machine.plant(fault);
        }
        self.maintenance = Some(RecordedMaintenance::new(machine));
    }

    /// Whether a start knows that the cache was given up. (Where it was to be taken back, and that has failed on the way, the device has an empty
    /// map, of an epoch that no run had.)
    pub(super) fn says_given_up(&self, superblock: &BlockSuperblock) -> bool {
        let is_emptied = self.former.as_ref().is_some_and(|sb| superblock.epoch > sb.epoch);
        self.validity.barred.get() || superblock.volumes.is_empty() || is_emptied
    }

    /// Behind a turn of maintenance: a start knows that the cache was given up, or that was tried again.
    fn check_given_up(&mut self) {
        if self.is_enabled() || self.device.borrow().blown || self.validity.asked.get() {
            return;
        }
        let copy =
            |n: usize| self.device.borrow().durable_bytes((n * COPY_BYTES) as u64, COPY_BYTES);
        let found = choose(&copy(0), &copy(1));
        if found.is_ok_and(|sb| !self.says_given_up(&sb)) {
            self.fail("the cache was given up, and nothing says so to a start".to_owned());
        }
    }

    /// Whether the cache is in use.
    pub(super) fn is_enabled(&self) -> bool {
        self.validity.enabled.get()
    }

    /// Calls maintenance, and begins what it asks for. While it is at work it is not called: the world goes on without it.
    pub(super) fn maintain<R>(
        &mut self,
        f: impl FnOnce(
            &mut RecordedMaintenance,
            Nanos,
            &mut InWorld<'_>,
            &mut Charging,
            &mut Begun,
        ) -> R,
    ) -> Option<R> {
        let mut machine = self.maintenance.take()?;
        let (now, mut io) = (self.now(), self.io());
        let mut begun = Begun {
            io: Vec::new(),
            flushes: Vec::new(),
            identities: self.identities.clone(),
            validity: self.validity.clone(),
            memory: self.memory.clone(),
            device: self.device.clone(),
        };
        let result = f(&mut machine, now, &mut InWorld(self), &mut io, &mut begun);
        (0..std::mem::take(&mut self.ended)).for_each(|_| machine.ended());
        self.maintenance = Some(machine);
        for event in begun.io {
            self.begin_io_of(event, true);
        }
        begun.flushes.into_iter().for_each(|number| self.flushing.want(number));
        self.begin_fills();
        Some(result)
    }

    /// Fills, copies and loads that were left for maintenance begin at once, if it is not at work.
    pub(super) fn begin_fills(&mut self) {
        let work = &mut self.work;
        if self.maintenance.is_none()
            || work.fills.is_empty() && work.copies.is_empty() && work.loads.is_empty()
        {
            return;
        }
        let fills = std::mem::take(&mut work.fills);
        let copies = std::mem::take(&mut work.copies);
        let loads = std::mem::take(&mut work.loads);
        let work = Work { fills, copies, loads, ..Work::default() };
        self.maintain(|m, now, shards, io, fx| m.take(now, work, shards, io, fx));
    }

    /// A round of maintenance.
    pub(super) fn step_log(&mut self) -> Option<Turn> {
        let before = self.maintenance.as_ref()?.stats();
        let mut work = Work::default();
        // What was asked for since maintenance last looked may wait for its next turn.
        if self.draining || self.trims || self.rng.chance(0.6) {
            work = std::mem::take(&mut self.work);
        }
        self.seen.given_up += u64::from(work.give_up.is_some() && self.is_enabled());
        self.validity.asked.set(false);
        let turn = Some(round::round(&mut Rounding(self), Left { work, ..Left::default() }));
        self.check_given_up();
        let after = self.maintenance.as_ref()?.stats();
        let cleared = after.intents_cleared - before.intents_cleared;
        self.seen.snapshots += after.snapshots - before.snapshots;
        self.seen.cleared += cleared;
        self.seen.covered += if self.flushes_at_once { 0 } else { cleared };
        self.forget();
        turn
    }
}

/// The world in a round of maintenance. Of I/O that ends the machine hears when it ends, between rounds and in the midst of one: a server
/// looks at it in rounds alone.
struct Rounding<'a>(&'a mut World);

impl Rounds for Rounding<'_> {
    type Bytes = Bytes;
    type Task = ();

    fn now(&self) -> Nanos {
        self.0.now()
    }

    fn machine(&mut self) -> &mut RecordedMaintenance {
        self.0.maintenance.as_mut().expect("it is not at work")
    }

    fn take(&mut self, now: Nanos, work: Work<Bytes>) {
        self.0.maintain(|m, _, shards, io, fx| m.take(now, work, shards, io, fx));
    }

    fn turn(&mut self, now: Nanos) -> Turn {
        let turn = self.0.maintain(|m, _, shards, io, fx| m.turn(now, shards, io, fx));
        turn.expect("it is not at work")
    }

    fn next_flushed(&mut self) -> Option<(VolumeId, u64, bool)> {
        None
    }

    fn begin_io(&mut self) {}

    fn task(&mut self, (): ()) {}

    fn end_io(&mut self) {}
}
