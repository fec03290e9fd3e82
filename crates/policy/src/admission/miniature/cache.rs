//! One miniature: DRAM with CLOCK before a log on flash, as the engine has them, over some of the keys. Of objects only their sizes are
//! there.

use std::collections::VecDeque;

use super::keys::{Keys, Size};

/// Bytes of an object in DRAM beside its record.
const BESIDE: u64 = 24;

/// Where an object lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tier {
    #[default]
    None,
    Dram,
    Flash,
}

/// What a miniature knows of a key.
#[derive(Clone, Copy, Debug, Default)]
struct Of {
    /// Milliseconds at which it came to DRAM.
    since: u32,
    reads: u8,
    /// Of where it lies: an entry of a queue with another is of a former place.
    version: u8,
    tier: Tier,
    /// CLOCK, in the lowest two bits, and marks.
    marks: u8,
}

const CLOCK: u8 = 3;
/// It came back from flash.
const SURVIVOR: u8 = 4;

const _: () = assert!(size_of::<Of>() == 8 && size_of::<Queued>() == 6);

impl Of {
    fn has(self, mark: u8) -> bool {
        self.marks & mark != 0
    }
}

/// An object in a queue.
#[derive(Clone, Copy, Debug)]
struct Queued {
    key: u16,
    size: Size,
    version: u8,
}

/// An object that is about to leave DRAM.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Leaving {
    pub(in super::super) fingerprint: u64,
    pub(in super::super) size: u32,
    pub(in super::super) reads: u32,
    /// Milliseconds since it came, and since it was used last.
    pub(in super::super) age: u32,
    pub(in super::super) idle: u32,
    pub(in super::super) survivor: bool,
}

/// What an object would earn: reads expected of it, and those over a power of its size.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Worth {
    pub(in super::super) reads: f32,
    pub(in super::super) worth: f32,
    /// Whether the rule admits it that decides before there is an estimate; `None` when there is one.
    pub(in super::super) rule: Option<bool>,
}

/// What is asked of an object: reads that are expected of it, and what those are worth.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Asked {
    pub(in super::super) least: f32,
    pub(in super::super) floor: f32,
}

impl Asked {
    /// As much more, or less.
    pub(in super::super) fn times(self, thrift: f32) -> Asked {
        Asked { least: self.least * thrift.min(1.0), floor: self.floor * thrift }
    }

    pub(in super::super) fn is_met(self, of: &Worth) -> bool {
        of.rule.unwrap_or(of.reads >= self.least && of.worth >= self.floor)
    }
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub(super) struct Miniature {
    of: Vec<Of>,
    dram: VecDeque<Queued>,
    flash: VecDeque<Queued>,
    dram_bytes: u64,
    flash_bytes: u64,
    /// Bytes written since the start.
    written: u64,
    /// Flash has been full once.
    pub(super) full: bool,
}

impl Miniature {
    /// Bytes of a key.
    pub(super) const BYTES: usize = size_of::<Of>() + size_of::<Queued>();

    pub(super) fn new(capacity: usize) -> Miniature {
        Miniature {
            of: vec![Of::default(); capacity],
            dram: VecDeque::new(),
            flash: VecDeque::new(),
            dram_bytes: 0,
            flash_bytes: 0,
            written: 0,
            full: false,
        }
    }

    /// Bytes written to flash since the start.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    pub(super) fn holds(&self, key: u16) -> bool {
        self.of[usize::from(key)].tier != Tier::None
    }

    /// A read of what it holds.
    pub(super) fn read(&mut self, key: u16) {
        let of = &mut self.of[usize::from(key)];
        of.reads = of.reads.saturating_add(1);
        if of.marks & CLOCK < CLOCK {
            of.marks += 1;
        }
    }

    /// Forgets what it holds of a key.
    pub(super) fn remove(&mut self, key: u16, keys: &mut Keys) {
        let of = &mut self.of[usize::from(key)];
        if of.tier == Tier::None {
            return;
        }
        if of.tier == Tier::Dram {
            self.dram_bytes -= in_dram(keys[key].size);
        }
        of.tier = Tier::None;
        of.version = of.version.wrapping_add(1);
        keys[key].held -= 1;
    }

    /// Drops from its queues what it no longer holds: keys were taken out of the sample, and its room is less by what they had.
    pub(super) fn shrink(&mut self) {
        let of = &self.of;
        let lives = |tier: Tier| {
            move |queued: &Queued| {
                let of = of[usize::from(queued.key)];
                of.tier == tier && of.version == queued.version
            }
        };
        self.dram.retain(lives(Tier::Dram));
        self.flash.retain(lives(Tier::Flash));
        self.flash_bytes = self.flash.iter().map(|queued| u64::from(queued.size.bytes())).sum();
    }

    /// Brings a key that it does not hold to DRAM.
    pub(super) fn insert(&mut self, key: u16, keys: &mut Keys, now: u32) {
        keys[key].held += 1;
        self.enter(key, keys, now, 1);
    }

    fn enter(&mut self, key: u16, keys: &Keys, now: u32, marks: u8) {
        let of = &mut self.of[usize::from(key)];
        let version = of.version.wrapping_add(1);
        *of = Of { since: now, version, tier: Tier::Dram, marks, ..Of::default() };
        let size = keys[key].size;
        self.dram.push_back(Queued { key, size, version });
        self.dram_bytes += in_dram(size);
    }

    /// Makes room in DRAM of `dram` bytes before flash of `flash`: what CLOCK gives up is judged.
    pub(super) fn settle(
        &mut self,
        keys: &mut Keys,
        now: u32,
        (dram, flash): (u64, u64),
        asked: Asked,
        worth: &mut impl FnMut(&Leaving) -> Worth,
    ) {
        while self.dram_bytes > dram {
            let Some(queued) = self.dram.pop_front() else { break };
            let of = &mut self.of[usize::from(queued.key)];
            if of.tier != Tier::Dram || of.version != queued.version {
                continue;
            }
            // The only one stays as long as it is: an object as large as all the room is none that CLOCK passes by.
            if of.has(CLOCK) && !self.dram.is_empty() {
                of.marks -= 1;
                self.dram.push_back(queued);
                continue;
            }
            let key = &keys[queued.key];
            let leaving = Leaving {
                fingerprint: key.fingerprint(),
                size: queued.size.bytes(),
                reads: of.reads.into(),
                age: now.wrapping_sub(of.since),
                idle: now.wrapping_sub(key.last),
                survivor: of.has(SURVIVOR),
            };
            self.dram_bytes -= in_dram(queued.size);
            let bytes = u64::from(leaving.size);
            let fits = bytes <= flash / 2;
            let goes = fits && (!self.full || asked.is_met(&worth(&leaving)));
            let of = &mut self.of[usize::from(queued.key)];
            of.version = of.version.wrapping_add(1);
            if !goes {
                of.tier = Tier::None;
                keys[queued.key].held -= 1;
                if keys[queued.key].held == 0 {
                    keys.remove(queued.key);
                }
                continue;
            }
            let version = of.version;
            *of = Of { version, tier: Tier::Flash, marks: 1, ..Of::default() };
            self.written += bytes;
            self.flash_bytes += bytes;
            self.flash.push_back(Queued { version, ..queued });
            while self.flash_bytes > flash {
                self.full = true;
                self.reclaim(keys, now);
            }
        }
    }

    /// The oldest on flash leaves it; one that was read there comes back to DRAM.
    fn reclaim(&mut self, keys: &mut Keys, now: u32) {
        let Some(oldest) = self.flash.pop_front() else {
            self.flash_bytes = 0;
            return;
        };
        self.flash_bytes -= u64::from(oldest.size.bytes());
        let of = self.of[usize::from(oldest.key)];
        let lives = of.tier == Tier::Flash && of.version == oldest.version;
        if !lives {
            return;
        }
        // As the engine takes back what was read so often that CLOCK is at its end.
        if of.marks & CLOCK == CLOCK {
            self.enter(oldest.key, keys, now, SURVIVOR | (CLOCK - 1));
            return;
        }
        let of = &mut self.of[usize::from(oldest.key)];
        of.tier = Tier::None;
        of.version = of.version.wrapping_add(1);
        keys[oldest.key].held -= 1;
        if keys[oldest.key].held == 0 {
            keys.remove(oldest.key);
        }
    }
}

/// Bytes that an object takes of DRAM.
fn in_dram(size: Size) -> u64 {
    u64::from(size.bytes()) + BESIDE
}
