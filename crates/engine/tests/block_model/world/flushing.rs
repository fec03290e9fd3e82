//! The store's flushes, on a session of their own: they begin some time after they were wanted, and end some time after that.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use larder_base::Nanos;
use larder_engine::block::Fault;
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
    /// Sectors that the store has lost, with what they had before: whoever asks the store finds that as soon as nothing of them
    /// is cached any more.
    lost: BTreeMap<u64, u64>,
    /// Regions that were changed since what a start must know of the store's last change was durable; and whether that can be kept.
    unnoted: RefCell<BTreeSet<u32>>,
    keeps_notes: bool,
    fault: Fault,
}

impl Flushed for Flushing {
    fn keep_notes(&self) -> bool {
        if self.keeps_notes {
            self.unnoted.borrow_mut().clear();
        }
        self.keeps_notes
    }

    fn losses(&self) -> u64 {
        self.losses
    }

    fn settled(&self) -> u64 {
        self.settled
    }

    fn fault(&self) -> Fault {
        self.fault
    }
}

impl Flushing {
    pub(super) fn new(regions: u32, idle: Nanos) -> Flushing {
        let changes = Changes::new(regions, idle);
        Flushing {
            changes,
            wanted: None,
            under_way: None,
            losses: 0,
            settled: 0,
            lost: BTreeMap::new(),
            unnoted: RefCell::default(),
            keeps_notes: true,
            fault: Fault::default(),
        }
    }

    /// The store is changed there: what it had lost does not matter any more.
    pub(super) fn changed(&mut self, sector: u64, region: u32) {
        self.lost.remove(&sector);
        self.unnoted.borrow_mut().insert(region);
    }

    /// Whether it has lost what was written there.
    pub(super) fn has_lost(&self, sector: u64) -> bool {
        self.lost.contains_key(&sector)
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
        self.flushing.fault = self.fault();
    }

    /// All that was written to the store is durable, but for what it has lost.
    pub(super) fn store_is_durable(&mut self) {
        let lost = &self.flushing.lost;
        self.volatile.retain(|sector, _| lost.contains_key(sector));
        if let Some(flush) = &mut self.flushing.under_way {
            flush.covers.clear();
        }
    }

    /// The store is flushed for somebody who waits for it. Returns whether what was written to it is durable then.
    pub(super) fn flush_now(&mut self) -> bool {
        self.store_is_durable();
        self.keeps_notes_or_not();
        has_made_durable(true, &self.flushing)
    }

    /// Notes can be kept next time, or not.
    fn keeps_notes_or_not(&mut self) {
        self.flushing.keeps_notes = self.draining || self.rng.chance(0.9);
    }

    /// The store loses some of what was written to sectors `from..to` and not flushed: no flush makes that durable any more.
    pub(super) fn begins_to_forget(&mut self, from: u64, to: u64) {
        self.flushing.losses += 1;
        let Flushing { lost, under_way, .. } = &mut self.flushing;
        for (&sector, &durable) in self.volatile.range(from..to) {
            if !lost.contains_key(&sector) && self.rng.chance(0.5) {
                lost.insert(sector, durable);
                if let Some(flush) = under_way {
                    flush.covers.remove(&sector);
                }
            }
        }
    }

    /// Nothing is cached any more of what the store has lost in sectors `from..to`, and nothing is under way there.
    pub(super) fn has_forgotten(&mut self, from: u64, to: u64) {
        self.flushing.settled += 1;
        let mut lost = self.flushing.lost.split_off(&from);
        self.flushing.lost.append(&mut lost.split_off(&to));
        self.stretch_loses(lost);
    }

    /// Maintenance hears how a flush has ended.
    fn flushed(&mut self, number: u64, durable: bool) {
        self.maintain(|m, now, _, _, _| m.store_flushed(now, STORE, number, durable));
    }

    /// A region that was changed has its bit, or will have it, until what a start must know of that change is durable: nobody else
    /// tries again to keep it, and without it a start does not use a line of the store.
    pub(super) fn check_notes(&mut self) {
        let Some(machine) = self.maintenance.as_ref().filter(|_| self.is_enabled()) else { return };
        let asked = |region: u32| {
            let ranges = || self.work.ranges.iter().any(|r| (r.1..=r.2).contains(&region));
            self.work.asks.iter().any(|ask| ask.1 == region) || ranges()
        };
        let is_used = |region: u32| self.volume_at(u64::from(region) * self.per_region()).is_some();
        let unnoted = self.flushing.unnoted.borrow();
        let mut forgotten =
            unnoted.iter().filter(|&&r| !machine.is_set(r) && !asked(r) && is_used(r));
        if let Some(region) = forgotten.next() {
            let why = format!("region {region} has no bit, and a start would not know its store");
            drop(unnoted);
            self.fail(why);
        }
    }

    /// A flush begins or ends.
    pub(super) fn flush_on(&mut self) {
        let at_once = self.flushes_at_once;
        if let Some(number) = self.flushing.wanted {
            if at_once || self.rng.chance(0.3) {
                let now = |s: &u64| (*s, self.backing.get(s).copied().unwrap_or(0));
                let is_there = |s: &&u64| !self.flushing.has_lost(**s);
                let covers = self.volatile.keys().filter(is_there).map(now).collect();
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
        self.keeps_notes_or_not();
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
