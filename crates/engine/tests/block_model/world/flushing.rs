//! The store's flushes, on a session of their own: they begin some time after they were wanted, and end some time after that.

use std::collections::BTreeMap;

use larder_base::Nanos;
use larder_engine::block::node::flushes::{Flushed, has_made_durable};
use larder_engine::block::node::quiet::Changes;

use super::World;
use super::in_log::STORE;

/// A flush that is under way, and what it makes durable: sectors with their values when it began.
pub(super) struct UnderWay {
    number: u64,
    covers: BTreeMap<u64, u64>,
}

/// Flushes of the store, as maintenance asks for them.
pub(super) struct Flushing {
    pub(super) changes: Changes,
    wanted: Option<u64>,
    under_way: Option<UnderWay>,
    /// How often the store may have lost writes, and after how many of those they are out of the cache.
    losses: u64,
    settled: u64,
}

impl Flushed for Flushing {
    fn losses(&self) -> u64 {
        self.losses
    }

    fn settled(&self) -> u64 {
        self.settled
    }
}

impl Flushing {
    pub(super) fn new(regions: u32, idle: Nanos) -> Flushing {
        let changes = Changes::new(regions, idle);
        Flushing { changes, wanted: None, under_way: None, losses: 0, settled: 0 }
    }

    /// Maintenance wants a flush.
    pub(super) fn want(&mut self, number: u64) {
        assert!(self.wanted.is_none() && self.under_way.is_none(), "one at a time");
        self.wanted = Some(number);
    }
}

impl World {
    /// A new process knows of no flush.
    pub(super) fn begin_flushing(&mut self) {
        self.flushing = Flushing::new(self.layout.regions, self.habits.idle);
    }

    /// All that was written to the store is durable.
    pub(super) fn store_is_durable(&mut self) {
        self.volatile.clear();
        if let Some(flush) = &mut self.flushing.under_way {
            flush.covers.clear();
        }
    }

    /// The store may have lost writes: what is cached of them is dropped.
    pub(super) fn begins_to_forget(&mut self) {
        self.flushing.losses += 1;
    }

    /// The store has lost writes, and nothing of them is cached any more: a flush that is under way is not believed.
    pub(super) fn has_forgotten(&mut self) {
        self.flushing.settled += 1;
        if let Some(flush) = self.flushing.under_way.take() {
            self.flushed(flush.number, false);
        }
    }

    /// Maintenance hears how a flush has ended.
    fn flushed(&mut self, number: u64, durable: bool) {
        self.maintain(|m, now, _, _, _| m.store_flushed(now, STORE, number, durable));
    }

    /// A flush begins or ends.
    pub(super) fn flush_on(&mut self) {
        let at_once = self.flushes_at_once;
        if let Some(number) = self.flushing.wanted {
            if at_once || self.rng.chance(0.3) {
                let now = |s: &u64| (*s, self.backing.get(s).copied().unwrap_or(0));
                let covers = self.volatile.keys().map(now).collect();
                self.flushing.wanted = None;
                self.flushing.under_way = Some(UnderWay { number, covers });
            }
            if !at_once {
                return;
            }
        }
        // Some take longer than it takes a region to become quiet.
        let share = if self.slow_store { 0.015 } else { 0.1 };
        if !at_once && !self.rng.chance(share) {
            return;
        }
        let Some(UnderWay { number, covers }) = self.flushing.under_way.take() else { return };
        let ends_well = self.rng.chance(0.9);
        for (sector, value) in covers.into_iter().filter(|_| ends_well) {
            if self.backing.get(&sector).copied().unwrap_or(0) == value {
                self.volatile.remove(&sector);
            } else if let Some(durable) = self.volatile.get_mut(&sector) {
                *durable = value;
            }
        }
        self.flushed(number, has_made_durable(ends_well, &self.flushing));
    }

    /// Clients are away, for so long that the log may find regions quiet again and again, with flushes in between.
    pub(super) fn spell(&mut self) {
        for _ in 0..self.rng.range(1, 5) {
            self.time += 100;
            if self.rng.chance(0.7) {
                self.step_log();
            }
            while self.flushing.wanted.is_some() || self.flushing.under_way.is_some() {
                self.flush_on();
                if self.rng.chance(0.02) {
                    break;
                }
            }
            if self.device.borrow().blown {
                return;
            }
        }
    }
}
