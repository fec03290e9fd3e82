//! DRAM before a flash: LRU or FIFO by bytes, and what decides on writing what leaves it.

use larder_base::Rng;
use larder_base::slab::{List, Slab};

use super::{Flash, Kind, Setting};
use crate::kv::Counters;
use crate::lab::oracle::{Ask, Known, Sizes, Step};

const NONE: u32 = u32::MAX;

struct Item {
    tag: u32,
    /// The request that brought it in.
    set: u32,
    reads: u32,
}

/// Which keys were among the last so many that were remembered.
struct Recent {
    /// When each key was remembered last, counted from 1.
    at: Vec<u32>,
    now: u32,
    window: u32,
}

impl Recent {
    fn has(&self, tag: u32) -> bool {
        let at = self.at[tag as usize];
        at > 0 && self.now - at < self.window
    }

    fn remember(&mut self, tag: u32) {
        self.now += 1;
        self.at[tag as usize] = self.now;
    }
}

pub(super) struct Front<'a, F> {
    known: &'a Known,
    capacity: u64,
    setting: Setting,
    rng: Rng,
    flash: F,
    slab: Slab<Item>,
    list: List,
    /// Where in the slab each object is.
    places: Vec<u32>,
    /// When the version on flash is gone, for each object.
    expires: Vec<u32>,
    bytes: u64,
    recent: Recent,
    counters: Counters,
}

impl<'a, F: Flash> Front<'a, F> {
    pub(super) fn new(
        known: &'a Known,
        sizes: Sizes,
        setting: Setting,
        window: u32,
        seed: u64,
        flash: F,
    ) -> Front<'a, F> {
        Front {
            known,
            capacity: sizes.dram,
            setting,
            rng: Rng::new(seed ^ 0x7269_7661_6c73),
            flash,
            slab: Slab::new(),
            list: List::new(),
            places: vec![NONE; known.objects()],
            expires: vec![NONE; known.objects()],
            bytes: 0,
            recent: Recent { at: vec![0; known.objects()], now: 0, window },
            counters: Counters::default(),
        }
    }

    /// All requests; what was done after the first `warmup`.
    pub(super) fn run(mut self, warmup: usize) -> Counters {
        let mut warm = Counters::default();
        for (i, step) in self.known.steps.iter().enumerate() {
            if i == warmup {
                warm = Counters { flash_bytes: self.flash.written(), ..self.counters };
            }
            self.step(i as u32, step);
        }
        Counters { flash_bytes: self.flash.written(), ..self.counters }.since(&warm)
    }

    fn step(&mut self, i: u32, step: &Step) {
        let bytes = u64::from(step.bytes);
        self.counters.requests += 1;
        match step.ask {
            Ask::Read => {
                self.counters.gets += 1;
                self.counters.get_bytes += bytes;
                if self.read(i, step) {
                    self.counters.hit_bytes += bytes;
                } else {
                    self.counters.miss_bytes += bytes;
                    self.bring(i, step, true);
                }
            }
            Ask::Write => self.bring(i, step, false),
            Ask::Remove => {
                self.forget(step.tag);
                self.flash.remove(step.tag);
            }
            Ask::Other => {}
        }
    }

    fn read(&mut self, i: u32, step: &Step) -> bool {
        let at = self.places[step.tag as usize];
        if at != NONE {
            let item = self.slab.get_mut(at);
            if i >= self.known.steps[item.set as usize].expires {
                return false;
            }
            item.reads = item.reads.saturating_add(1);
            self.counters.hits_dram += 1;
            if self.setting.kind != Kind::S3Fifo {
                self.list.unlink(&mut self.slab, at);
                self.list.push_front(&mut self.slab, at);
            }
            return true;
        }
        if i >= self.expires[step.tag as usize] || !self.flash.read(step.tag) {
            return false;
        }
        self.counters.hits_flash += 1;
        if self.setting.copy {
            self.enter(i, step);
        }
        true
    }

    /// A new version. After a miss S3-FIFO writes to flash at once what its ghost knows.
    fn bring(&mut self, i: u32, step: &Step, missed: bool) {
        self.counters.set_bytes += u64::from(step.bytes);
        self.forget(step.tag);
        self.flash.remove(step.tag);
        let known = self.setting.kind == Kind::S3Fifo && missed && self.recent.has(step.tag);
        if known && self.flash.fits(step.record) && self.rng.chance(self.setting.chance) {
            self.write(step.tag, step);
        } else {
            self.enter(i, step);
        }
    }

    fn write(&mut self, tag: u32, step: &Step) {
        self.expires[tag as usize] = step.expires;
        self.flash.write(tag, step.record);
    }

    /// Into DRAM.
    fn enter(&mut self, i: u32, step: &Step) {
        let size = u64::from(step.dram);
        if size > self.capacity {
            return;
        }
        while self.bytes + size > self.capacity {
            let Some(victim) = self.list.pop_back(&mut self.slab) else { break };
            self.leave(victim);
        }
        let at = self.slab.take(Item { tag: step.tag, set: i, reads: 0 });
        self.list.push_front(&mut self.slab, at);
        self.places[step.tag as usize] = at;
        self.bytes += size;
    }

    /// Item `at`, which is in no list any more, leaves DRAM.
    fn leave(&mut self, at: u32) {
        let &Item { tag, set, reads } = self.slab.get(at);
        let step = self.known.steps[set as usize];
        self.drop_item(at);
        if self.flash.holds(tag) {
            return;
        }
        let wanted = match self.setting.kind {
            Kind::S3Fifo => {
                let wanted = reads >= self.setting.reads;
                if !wanted {
                    self.recent.remember(tag);
                }
                wanted
            }
            Kind::RejectFirst => {
                let wanted = self.recent.has(tag);
                self.recent.remember(tag);
                wanted
            }
            Kind::Clock | Kind::Kangaroo => true,
        };
        if wanted && self.flash.fits(step.record) && self.rng.chance(self.setting.chance) {
            self.write(tag, &step);
        } else {
            self.counters.dram_evictions += 1;
        }
    }

    fn drop_item(&mut self, at: u32) {
        let &Item { tag, set, .. } = self.slab.get(at);
        self.bytes -= u64::from(self.known.steps[set as usize].dram);
        self.places[tag as usize] = NONE;
        self.slab.free(at);
    }

    fn forget(&mut self, tag: u32) {
        let at = self.places[tag as usize];
        if at != NONE {
            self.list.unlink(&mut self.slab, at);
            self.drop_item(at);
        }
    }
}
