//! A cache that was given up is taken back, step by step, while clients go on.

use std::sync::atomic::Ordering;

use larder_engine::block::OpId;
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Making, Map, Shape};
use larder_engine::block::node::attachment::Step;
use larder_engine::block::node::maintenance::takeback::{Again, Anew, NotTakenBack};
use larder_engine::block::node::operator::{Ask, Operation};
use larder_engine::block::node::start::memory::clear;
use larder_format::block::BlockSuperblock;
use larder_policy::block::EvictionBy;

use super::begins::Lasting;
use super::node::operators;
use super::{KEY, SHARDS, World};

/// A cache that is taken back.
#[derive(Default)]
pub(super) struct Returning {
    operation: Option<Operation>,
    /// While maps are emptied: the memory that they are in.
    pub(super) lasting: Option<Lasting>,
}

impl Returning {
    pub(super) fn is_under_way(&self) -> bool {
        self.operation.is_some()
    }

    /// Whether it has lines for itself, or waits for them.
    pub(super) fn has_lines(&self) -> bool {
        self.operation.as_ref().is_some_and(Operation::has_lines)
    }
}

impl World {
    /// The device works again, and an operator wants the cache to be used again, from nothing. (That of a start without it is another.)
    pub(super) fn begin_taking_back(&mut self) {
        let is_busy = self.working.is_some() || self.returning.is_under_way();
        if self.layout.is_sparse() || self.is_passed_by || is_busy {
            return;
        }
        self.script.push(format!("{} is to be taken back", self.time));
        let op = operators(OpId(self.next_op));
        self.next_op += 1;
        let operation = Operation::take_back(op, SHARDS, &self.layout, self.fault());
        self.returning.operation = Some(operation.with_patience(None));
    }

    /// Its next step, if it can be done.
    pub(super) fn take_back_on(&mut self) {
        let Some(mut operation) = self.returning.operation.take() else { return };
        // (The log's thread does one thing at a time.)
        if self.maintenance.is_none() {
            self.returning.operation = Some(operation);
            return;
        }
        let goes_on = match self.next_of(&mut operation) {
            Ask::Over => false,
            Ask::Do(step) => self.return_by(&mut operation, step),
            // The operator waits no longer.
            Ask::Lines => self.draining || !self.rng.chance(0.003),
            _ => true,
        };
        if goes_on {
            self.returning.operation = Some(operation);
        } else {
            self.give_up_lines(&mut operation);
            self.given.remove(&operation.id());
        }
    }

    /// False if it is over.
    fn return_by(&mut self, operation: &mut Operation, step: Step) -> bool {
        match step {
            Step::Stores { .. } if self.rng.chance(0.05) || !self.flush_now() => return false,
            Step::Stores { .. } => {}
            Step::Anew => match self.return_to_use() {
                Ok(()) => {}
                Err(NotTakenBack::Busy) => return true,
                Err(NotTakenBack::Failed(_) | NotTakenBack::Unread(_)) => return false,
                Err(why) => {
                    self.fail(format!("it is not taken back: {why:?}"));
                    return false;
                }
            },
            _ => {}
        }
        operation.done();
        true
    }

    /// The step of the log's thread. It may be cut off anywhere.
    fn return_to_use(&mut self) -> Result<(), NotTakenBack> {
        let Some(mut machine) = self.maintenance.take() else { return Err(NotTakenBack::Busy) };
        self.device.borrow_mut().dead = false;
        let share = if self.is_fragile { 0.6 } else { 0.3 };
        if !self.draining && self.rng.chance(share) {
            match self.rng.chance(0.3) {
                true => self.device.borrow_mut().fuse = self.rng.below(6),
                false => self.fuse.store(self.rng.below(40), Ordering::Relaxed),
            }
        }
        let words = self.shards.iter().map(|s| s.map().snapshot()).collect::<Vec<_>>();
        self.returning.lasting = Some(Lasting::of(&self.memory.borrow().snapshot(), &words));
        let random = self.rng.next_u64() as u32;
        let again = Again { idle: self.habits.idle, random, fault: self.fault() };
        let (mut io, making) = (self.io(), self.making());
        let making = Making { evict: EvictionBy::default(), ..making };
        let outcome = machine.take_back(again, &mut io, &mut Empty { world: self, making });
        self.maintenance = Some(machine);
        self.returning.lasting = None;
        self.fuse.store(u64::MAX, Ordering::Relaxed);
        if !self.device.borrow().blown {
            self.device.borrow_mut().fuse = u64::MAX;
        }
        outcome?;
        self.seen.taken_back += 1;
        self.script.push(format!("{} taken back", self.time));
        self.forget();
        if let Err(why) = self.check_map() {
            self.fail(format!("it was taken back: {why}"));
        }
        Ok(())
    }
}

/// The cache that is to be empty.
struct Empty<'a> {
    world: &'a mut World,
    making: Making,
}

impl Anew for Empty<'_> {
    fn found(&mut self) -> Result<BlockSuperblock, String> {
        // The device fails still, where nothing shows what it has.
        if !self.world.draining && self.world.rng.chance(0.2) {
            return Err("it cannot be read".to_owned());
        }
        Ok(self.world.superblock())
    }

    fn is_idle(&mut self, shard: u32) -> bool {
        self.world.shards[shard as usize].is_idle()
    }

    fn empty_map(&mut self, shard: u32) -> Map {
        let world = &mut *self.world;
        let lasting = world.returning.lasting.as_ref().expect("it is being emptied");
        let (mut entries, mut rest) = lasting.words().1.swap_remove(shard as usize);
        for words in [&mut entries, &mut rest] {
            words.share_fuse(world.fuse.clone());
            clear(words);
        }
        let (placing, shape) = (Placing::of(&world.layout, KEY), Shape::of(&world.layout));
        Map::new(entries, rest, placing, shard, shape, self.making)
    }

    fn begin_anew(&mut self, shard: u32, map: Map) -> bool {
        let begun = self.world.shards[shard as usize].begin_anew(map);
        #[cfg(feature = "planted")]
        if let Some(fault) = self.world.options.fault {
            self.world.shards[shard as usize].plant(fault);
        }
        begun
    }

    fn disable(&mut self, shard: u32) {
        let why = self.world.shards[shard as usize].under_way();
        self.world.fail(format!("shard {shard} is not at rest, and its lines are locked: {why}"));
    }

    fn own(&mut self, superblock: &BlockSuperblock) {
        self.world.memory.borrow_mut().own(superblock);
    }

    fn in_force(&mut self) {
        let world = &mut *self.world;
        let superblock = world.superblock();
        world.generation = superblock.generation;
        world.former = Some(superblock);
        world.work.give_up = None;
        world.validity.enabled.set(true);
        world.validity.asked.set(false);
        world.rotten.clear();
        world.device.borrow_mut().fail = if world.rng.chance(0.5) { 0.0 } else { 0.03 };
        world.know_what_is_durable();
    }

    fn forget(&mut self) {
        self.world.validity.barred.set(false);
    }
}
