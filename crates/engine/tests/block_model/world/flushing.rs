//! The store's flushes, on a session of their own: they begin some time after they were wanted, and end some time after that.

use std::collections::BTreeMap;

use larder_base::Nanos;
use larder_engine::block::node::flushes::{Flushes, Numbers};
use larder_engine::block::node::quiet::Changes;

use super::World;

/// A region is quiet after this time.
pub(super) const IDLE: Nanos = Nanos::from_millis(30);

/// A flush that is under way, and what it makes durable: sectors with their values when it began.
pub(super) struct UnderWay {
    number: u64,
    covers: BTreeMap<u64, u64>,
}

/// Flushes of the store, as maintenance numbers them.
pub(super) struct Flushing {
    pub(super) numbers: Numbers,
    pub(super) flushes: Flushes,
    pub(super) changes: Changes,
    under_way: Option<UnderWay>,
    /// Until then the store is flushed at once: the cache stops, or a volume is put aside.
    pub(super) hurried: u64,
}

impl Flushing {
    pub(super) fn new(regions: u32) -> Flushing {
        Flushing {
            numbers: Numbers::default(),
            flushes: Flushes::default(),
            changes: Changes::new(regions, IDLE),
            under_way: None,
            hurried: 0,
        }
    }
}

impl World {
    /// A new process knows of no flush.
    pub(super) fn begin_flushing(&mut self) {
        self.flushing = Flushing::new(self.layout.regions);
        if self.flushes_at_once {
            self.flushing.hurried = u64::MAX;
        }
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            self.flushing.flushes.plant(fault);
        }
    }

    /// All that was written to the store is durable.
    pub(super) fn store_is_durable(&mut self) {
        self.volatile.clear();
        if let Some(flush) = &mut self.flushing.under_way {
            flush.covers.clear();
        }
    }

    /// The store has lost writes: a flush that is under way is not believed.
    pub(super) fn flush_is_doubtful(&mut self) {
        if let Some(flush) = self.flushing.under_way.take() {
            self.flushing.numbers.ended(flush.number, false);
        }
    }

    /// A flush begins or ends.
    pub(super) fn flush_on(&mut self) {
        if self.flushing.under_way.is_none() {
            if self.flushing.numbers.is_wanted() && self.rng.chance(0.3) {
                let number = self.flushing.numbers.begin();
                let now = |s: &u64| (*s, self.backing.get(s).copied().unwrap_or(0));
                let covers = self.volatile.keys().map(now).collect();
                self.flushing.under_way = Some(UnderWay { number, covers });
            }
            return;
        }
        if !self.rng.chance(0.1) {
            return;
        }
        let Some(UnderWay { number, covers }) = self.flushing.under_way.take() else { return };
        let ends_well = self.rng.chance(0.9);
        self.flushing.numbers.ended(number, ends_well);
        for (sector, value) in covers.into_iter().filter(|_| ends_well) {
            if self.backing.get(&sector).copied().unwrap_or(0) == value {
                self.volatile.remove(&sector);
            } else if let Some(durable) = self.volatile.get_mut(&sector) {
                *durable = value;
            }
        }
    }

    /// Clients are away, for so long that the log may find regions quiet again and again, with flushes in between.
    pub(super) fn spell(&mut self) {
        if self.flushes_at_once {
            self.time += 100;
            return;
        }
        for _ in 0..self.rng.range(1, 5) {
            self.time += 100;
            if self.rng.chance(0.7) {
                self.step_log();
            }
            while self.flushing.numbers.is_wanted() || self.flushing.under_way.is_some() {
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

    /// Whether what was written to `region` is durable: see [`Flushes::is_durable`].
    pub(super) fn region_is_durable(&mut self, region: u32) -> bool {
        let place = u64::from(region) * self.per_region();
        if self.volume_at(place).is_none() {
            // No store can be flushed. Where nobody lies, who comes begins with one that is durable.
            return !self.aside.contains(&place);
        }
        if self.time < self.flushing.hurried {
            let flushed = !self.rng.chance(0.1);
            if flushed {
                self.store_is_durable();
            }
            return flushed;
        }
        let Flushing { numbers, flushes, .. } = &mut self.flushing;
        let numbers = std::cell::RefCell::new(numbers);
        let want = || numbers.borrow_mut().want();
        let durable = flushes.is_durable(region, 0, want, |n| numbers.borrow().is_durable(n));
        self.seen.covered += u64::from(durable);
        durable
    }
}
