//! Miniature caches: what other settings would do, measured beside what is done.
//!
//! Of the keys that a hash chooses, each miniature simulates the whole cache (DRAM with CLOCK, judgement, a log on flash) in the same
//! proportion and with a setting of its own: a cache that holds one part of the keys in one part of the room hits as often as the whole
//! (Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", ATC 2017, §3). All see the same requests, so that
//! what they differ by is what their settings do.
//!
//! A setting is how thrifty a policy is: what it asks of a write times a factor. One miniature does what the cache itself does; one is
//! thriftier, the others are less. When another has fewer misses, the cache takes its setting, and all move on by one; see [`choose`].

mod cache;
mod choose;
mod keys;

use larder_base::Nanos;

use cache::Miniature;
pub(super) use cache::{Asked, Leaving, Worth};
use choose::{Move, Paid, Rung, choose};
pub use choose::{Tuned, Tuning};
use keys::{Keys, Size};

/// Miniatures; each asks `choose::STEP` times as much as the one before.
const COUNT: usize = 4;
/// The one that does what the cache does.
const OWN: usize = 2;
/// One key in so many at first; half as many each time they take more than their memory.
const FIRST_PART: u64 = 8;
/// One over the part of a shard's memory that they take, and the most of it where that would be fewer than `FEW_KEYS`.
const PART: u64 = 32;
const MOST_OF_SMALL: u64 = 12;
const FEW_KEYS: u64 = 2048;
/// Keys with which miniatures say something at all.
const LEAST_KEYS: usize = 256;
/// Keys that are enough: with more, what miniatures say is hardly more certain.
const MOST_KEYS: usize = 8192;
/// A choice is made after so many reads of the sample.
const LOOK: u64 = 512;
/// What was seen fades over so many reads for each key.
const FADE: f64 = 4.0;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Miniatures {
    /// Bytes are what counts, and not requests.
    by_bytes: bool,
    keys: Keys,
    caches: Vec<Miniature>,
    /// Bytes of the shard's objects in DRAM and on flash.
    whole: (u64, u64),
    /// One key in so many.
    part: u64,
    /// Reads since the last choice.
    reads: u64,
    since: Option<Nanos>,
    /// Seconds, reads and their value, all fading.
    seen: (f64, f64),
    rungs: [Rung; COUNT],
    /// Of each miniature when it was looked at last.
    written: [u64; COUNT],
    hits: [f64; COUNT],
    /// Bytes that the shard itself admitted since then, and of late.
    admitted: (f64, f64),
    chosen: Tuning,
}

impl Miniatures {
    /// Bytes of a key.
    const EACH: usize = Keys::BYTES + COUNT * Miniature::BYTES;

    fn keys(memory: u64) -> usize {
        let in_part = |part: u64| memory / part / Self::EACH as u64;
        let keys = in_part(PART).max(FEW_KEYS.min(in_part(MOST_OF_SMALL)));
        match keys.min(MOST_KEYS as u64) as usize {
            keys if keys < LEAST_KEYS => 0,
            keys => keys,
        }
    }

    /// Bytes that those of a shard take that has so many bytes of memory; 0 where there are none, since they would know too few keys.
    pub(super) fn bytes(memory: u64) -> usize {
        Self::keys(memory) * Self::EACH
    }

    /// Miniatures of a shard with so many bytes for objects in DRAM and on flash, in at most `memory` bytes; `None` where that is too
    /// little.
    pub(super) fn new(memory: usize, whole: (u64, u64), by_bytes: bool) -> Option<Miniatures> {
        let capacity = Self::keys(whole.0).min(memory / Self::EACH);
        if capacity < LEAST_KEYS || whole.1 == 0 {
            return None;
        }
        Some(Miniatures {
            by_bytes,
            keys: Keys::new(capacity),
            caches: vec![Miniature::new(capacity); COUNT],
            whole,
            part: FIRST_PART,
            reads: 0,
            since: None,
            seen: (0.0, 0.0),
            rungs: [Rung::default(); COUNT],
            written: [0; COUNT],
            hits: [0.0; COUNT],
            admitted: (0.0, 0.0),
            chosen: Tuning::default(),
        })
    }

    /// Bytes that they take.
    pub(super) fn memory_bytes(&self) -> usize {
        self.keys.capacity() * Self::EACH
    }

    /// What a policy is to multiply what it asks by.
    pub(super) fn thrift(&self) -> f32 {
        self.chosen.thrift
    }

    /// What was found, and chosen.
    pub(super) fn tuning(&self) -> Tuning {
        self.chosen
    }

    /// Whether a key belongs to those of which miniatures are told.
    #[inline]
    pub(super) fn samples(&self, fingerprint: u64) -> bool {
        // Of bits that neither key memories nor the table of keys take.
        fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15) <= u64::MAX / self.part
    }

    /// The shard itself admits so many bytes.
    #[inline]
    pub(super) fn admitted(&mut self, bytes: u32) {
        self.admitted.0 += f64::from(bytes);
    }

    /// A read that the cache answered with an object of `size` bytes on flash, or missed.
    pub(super) fn read(
        &mut self,
        fingerprint: u64,
        size: Option<u32>,
        now: Nanos,
        (asked, rate): (Asked, Option<f64>),
        mut worth: impl FnMut(&Leaving) -> Worth,
    ) {
        let millis = millis(now);
        self.since.get_or_insert(now);
        self.reads += 1;
        let known = self.keys.find(fingerprint);
        let key = match (known, size) {
            (Some(key), _) => key,
            // Not known, and not there: its write is about to come.
            (None, None) => {
                self.seen.1 += 1.0;
                return self.look(now, rate);
            }
            (None, Some(size)) => match self.enter(fingerprint, size, millis) {
                Some(key) => key,
                None => return self.look(now, rate),
            },
        };
        let value = self.value(self.keys[key].size.bytes());
        let mut brought = false;
        for (cache, hits) in self.caches.iter_mut().zip(&mut self.hits) {
            if cache.holds(key) {
                cache.read(key);
                *hits += value;
            } else if size.is_some() {
                // It is fetched again.
                cache.insert(key, &mut self.keys, millis);
                brought = true;
            }
        }
        self.seen.1 += value;
        let of = &mut self.keys[key];
        of.last = millis;
        of.missed = size.is_none();
        if brought {
            self.settle(millis, asked, &mut worth);
        }
        self.look(now, rate);
    }

    /// A write of an object. `update`: the key was in the cache.
    pub(super) fn write(
        &mut self,
        fingerprint: u64,
        size: u32,
        (update, asked): (bool, Asked),
        now: Nanos,
        mut worth: impl FnMut(&Leaving) -> Worth,
    ) {
        let millis = millis(now);
        let fetched = match self.keys.find(fingerprint) {
            Some(key)
                if self.keys[key].missed && !update && self.keys[key].size == Size::of(size) =>
            {
                self.keys[key].missed = false;
                Some(key)
            }
            Some(key) => {
                self.forget(key);
                None
            }
            None => None,
        };
        let key = match fetched {
            Some(key) => key,
            None => match self.enter(fingerprint, size, millis) {
                Some(key) => key,
                None => return,
            },
        };
        self.keys[key].last = millis;
        for cache in &mut self.caches {
            if !cache.holds(key) {
                cache.insert(key, &mut self.keys, millis);
            }
        }
        self.settle(millis, asked, &mut worth);
    }

    /// An object was deleted, or has expired.
    pub(super) fn removed(&mut self, fingerprint: u64) {
        if let Some(key) = self.keys.find(fingerprint) {
            self.forget(key);
        }
    }

    /// A read's value.
    fn value(&self, size: u32) -> f64 {
        if self.by_bytes { f64::from(size) } else { 1.0 }
    }

    /// The part of the whole room that the miniatures have.
    fn room(&self) -> (u64, u64) {
        // A sixteenth of DRAM is kept free, or is staged.
        (self.whole.0 / self.part / 16 * 15, self.whole.1 / self.part)
    }

    fn forget(&mut self, key: u16) {
        for cache in &mut self.caches {
            cache.remove(key, &mut self.keys);
        }
        self.keys.remove(key);
    }

    /// Takes in a key. If there is no place, fewer keys belong to the sample from now on.
    fn enter(&mut self, fingerprint: u64, size: u32, now: u32) -> Option<u16> {
        while self.keys.is_full() {
            self.part *= 2;
            for key in 0..self.keys.end() {
                let of = self.keys[key];
                if of.held > 0 && !self.samples(of.fingerprint()) {
                    self.forget(key);
                }
            }
            // What was written and read till now was of twice as many.
            for value in self.hits.iter_mut().chain([&mut self.seen.1]) {
                *value /= 2.0;
            }
            for rung in &mut self.rungs {
                rung.halve();
            }
            self.written = [0; COUNT];
            for (written, cache) in self.written.iter_mut().zip(&mut self.caches) {
                cache.shrink();
                *written = cache.written();
            }
        }
        if !self.samples(fingerprint) {
            return None;
        }
        self.keys.insert(fingerprint, Size::of(size), now)
    }

    fn settle(&mut self, now: u32, asked: Asked, worth: &mut impl FnMut(&Leaving) -> Worth) {
        let room = self.room();
        for (at, cache) in self.caches.iter_mut().enumerate() {
            let asked = asked.times(self.chosen.of(at));
            cache.settle(&mut self.keys, now, room, asked, worth);
        }
    }

    /// Chooses, if it is time.
    fn look(&mut self, now: Nanos, rate: Option<f64>) {
        if self.reads < LOOK {
            return;
        }
        self.reads = 0;
        let seconds = now.saturating_sub(self.since.replace(now).unwrap_or(now)).as_secs_f64();
        let full = self.caches.iter().all(|cache| cache.full);
        let (admitted, reads) = (self.admitted.0, self.seen.1);
        (self.admitted.0, self.seen.1) = (0.0, 0.0);
        let hits = std::mem::take(&mut self.hits);
        let mut written = [0.0; COUNT];
        for (at, cache) in self.caches.iter().enumerate() {
            written[at] = (cache.written() - self.written[at]) as f64 * self.part as f64;
            self.written[at] = cache.written();
        }
        if !full || seconds <= 0.0 {
            return;
        }
        let keep = 1.0 - LOOK as f64 / (FADE * self.keys.capacity().max(1024) as f64);
        self.seen.0 = self.seen.0 * keep + seconds;
        self.admitted.1 = self.admitted.1 * keep + admitted;
        for (at, rung) in self.rungs.iter_mut().enumerate() {
            rung.see(keep, reads, hits[at], written[at]);
        }
        let (seconds, admitted) = (self.seen.0, self.admitted.1);
        let paid = match rate {
            None => Paid::NoRate,
            Some(rate) if admitted > USED * rate * seconds => Paid::ForThis,
            Some(_) => Paid::ForMore,
        };
        match choose(&mut self.chosen, &self.rungs, paid) {
            Move::Stay => {}
            Move::Thriftier => self.shift(true),
            Move::Freer => self.shift(false),
        }
    }

    /// The neighbour that is thriftier, or the one that is less, becomes the cache's own; the one at the end is new, and begins as the
    /// one beside it.
    fn shift(&mut self, thriftier: bool) {
        if thriftier {
            self.caches.rotate_left(1);
            self.rungs.rotate_left(1);
            self.written.rotate_left(1);
            self.caches[COUNT - 1] = self.caches[COUNT - 2].clone();
            self.rungs[COUNT - 1] = self.rungs[COUNT - 2];
            self.written[COUNT - 1] = self.written[COUNT - 2];
        } else {
            self.caches.rotate_right(1);
            self.rungs.rotate_right(1);
            self.written.rotate_right(1);
            self.caches[0] = self.caches[1].clone();
            self.rungs[0] = self.rungs[1];
            self.written[0] = self.written[1];
        }
        for key in 0..self.keys.end() {
            let held = self.caches.iter().filter(|cache| cache.holds(key)).count();
            if held == 0 && self.keys[key].held > 0 {
                self.keys.remove(key);
            }
            self.keys[key].held = held as u8;
        }
    }
}

/// From this part of a rate on it is the rate that holds writes.
const USED: f64 = 0.9;

fn millis(now: Nanos) -> u32 {
    (now.0 / 1_000_000) as u32
}

#[cfg(test)]
mod tests;
