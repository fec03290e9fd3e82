//! `ghost`: S3-FIFO's filter with DRAM as the small queue.

use larder_base::{Nanos, ObjectHash};

use super::reject_first::{LEAST_WINDOW, share_of};
use super::simple::UNRANKED;
use super::{
    Access, AdmissionError, AdmissionPolicy, Candidate, Departure, GhostConfig, Reason, Setup,
    Verdict,
};

const WAYS: usize = 8;
/// Live entries per set on average when the queue is full: the rest is room for sets that get more than their part.
const MEAN_PER_SET: u64 = 5;
/// Sixteen-bit ages count in this part of the window.
const UNITS_PER_WINDOW: u64 = 4096;

/// S3-FIFO's admission (Yang et al., SOSP 2023, §4; and its flash form in §5.4): an object that was read in DRAM goes to
/// flash when it leaves; of one that was not, a fingerprint goes into a ghost queue; and an object whose key was in the
/// ghost queue when it was written goes to flash when it leaves DRAM, read or not.
#[derive(Debug)]
pub struct Ghost {
    queue: GhostQueue,
    reads: u32,
}

impl Ghost {
    /// With the parameters of `config`.
    ///
    /// # Errors
    /// [`AdmissionError::Memory`] when the configured window does not fit, or memory does not hold even 64 keys.
    pub fn new(config: &GhostConfig, setup: &Setup) -> Result<Ghost, AdmissionError> {
        let fits = GhostQueue::window_for(setup.memory);
        let window = if config.window == 0 {
            setup.objects.clamp(LEAST_WINDOW, fits.max(LEAST_WINDOW))
        } else {
            share_of(config.window, setup.share).max(LEAST_WINDOW)
        };
        if window > fits {
            let need = GhostQueue::bytes_for(window) as usize;
            return Err(AdmissionError::Memory { policy: "ghost", need, given: setup.memory });
        }
        Ok(Ghost { queue: GhostQueue::new(window), reads: config.reads })
    }

    /// Bytes that each of `shards` shards takes for a window of so many keys in all.
    pub(super) fn bytes_for(window: u64, shards: u64) -> u64 {
        let part = share_of(window, 1.0 / shards as f64).max(LEAST_WINDOW);
        GhostQueue::bytes_for(part)
    }
}

impl AdmissionPolicy for Ghost {
    fn on_write(&mut self, access: &Access, _update: bool) {
        // Marked rather than removed: the object is in DRAM now, and the mark admits it when it leaves.
        self.queue.promise(access.hash);
    }

    fn on_departure(&mut self, access: &Access, departure: Departure) {
        match departure {
            // A promise is kept, or void, once the object is gone.
            Departure::Moved | Departure::Removed => self.queue.forget(access.hash),
            Departure::Evicted | Departure::Updated => {}
        }
    }

    fn judge(&mut self, candidate: &Candidate, _: Nanos) -> Verdict {
        if candidate.survivor
            || candidate.features.reads >= self.reads
            || self.queue.promised(candidate.hash)
        {
            return UNRANKED;
        }
        self.queue.push(candidate.hash);
        Verdict::Reject(Reason::FirstSeen)
    }

    fn memory_bytes(&self) -> usize {
        self.queue.memory_bytes()
    }
}

/// The last `window` keys pushed, as fingerprints in a set-associative table (6.4 bytes per key of the window). A slot:
///
/// ```text
/// 31..17 tag 15 | 16 promised 1 | 15..0 age: number of the push, in units of window / 4096
/// ```
/// An entry is in the queue while fewer than `window` pushes have followed its own (to within a unit). Each look-up of an
/// absent key finds it with probability at most 8 × 2^-15 = 2.4e-4; a set that gets more than 8 live keys forgets its
/// oldest (about 3 % of the keys, before their time).
#[derive(Debug)]
pub(super) struct GhostQueue {
    slots: Box<[u32]>,
    sets: u64,
    /// Pushes per unit of age.
    unit: u64,
    /// Units in the window.
    live: u16,
    pushes: u64,
    /// The next set to clear of expired entries, before their ages wrap round.
    hand: u64,
}

const PROMISED: u32 = 1 << 16;

impl GhostQueue {
    pub(super) fn bytes_for(window: u64) -> u64 {
        window.div_ceil(MEAN_PER_SET).max(1).saturating_mul(WAYS as u64 * 4)
    }

    pub(super) fn window_for(bytes: usize) -> u64 {
        bytes as u64 / (WAYS as u64 * 4) * MEAN_PER_SET
    }

    pub(super) fn new(window: u64) -> GhostQueue {
        let window = window.max(1);
        let sets = window.div_ceil(MEAN_PER_SET);
        let unit = window.div_ceil(UNITS_PER_WINDOW);
        GhostQueue {
            slots: vec![0; sets as usize * WAYS].into_boxed_slice(),
            sets,
            unit,
            live: window.div_ceil(unit) as u16,
            // Age 0 would be live at the start; an all-zero slot is empty because no tag is zero.
            pushes: 0,
            hand: 0,
        }
    }

    fn now(&self) -> u16 {
        (self.pushes / self.unit) as u16
    }

    /// First slot of its set, and its tag in place.
    fn place(&self, hash: ObjectHash) -> (usize, u32) {
        let fingerprint = hash.fingerprint();
        let set = ((u128::from(fingerprint) * u128::from(self.sets)) >> 64) as usize;
        (set * WAYS, ((fingerprint as u32 & 0x7fff).max(1)) << 17)
    }

    /// The slot of a key that is in the queue, or promised.
    fn find(&self, hash: ObjectHash) -> Option<usize> {
        let (start, tag) = self.place(hash);
        let now = self.now();
        (start..start + WAYS).find(|&i| {
            let slot = self.slots[i];
            slot & 0xfffe_0000 == tag && self.is_live(slot, now)
        })
    }

    fn is_live(&self, slot: u32, now: u16) -> bool {
        // A promise lives as long as an entry that was pushed when it was given.
        slot != 0 && now.wrapping_sub(slot as u16) < self.live
    }

    /// Adds a key at the young end (moving it there if it is in the queue).
    pub(super) fn push(&mut self, hash: ObjectHash) {
        let (start, tag) = self.place(hash);
        let now = self.now();
        let slot = tag | u32::from(now);
        self.pushes += 1;
        let at = self.find(hash).unwrap_or_else(|| {
            // An empty or expired slot, or the oldest.
            let age = |slot: u32| if slot == 0 { u16::MAX } else { now.wrapping_sub(slot as u16) };
            (start..start + WAYS).max_by_key(|&i| age(self.slots[i])).unwrap_or(start)
        });
        self.slots[at] = slot;
        self.clear_expired();
    }

    /// One set per push: a full round takes a fifth of a window, ages wrap after 16 windows.
    fn clear_expired(&mut self) {
        let now = self.now();
        let start = self.hand as usize * WAYS;
        for i in start..start + WAYS {
            if !self.is_live(self.slots[i], now) {
                self.slots[i] = 0;
            }
        }
        self.hand = (self.hand + 1) % self.sets;
    }

    /// The key was written: if it is in the queue, note that it is to be admitted.
    pub(super) fn promise(&mut self, hash: ObjectHash) {
        if let Some(at) = self.find(hash) {
            let now = self.now();
            self.slots[at] = self.slots[at] & 0xfffe_0000 | PROMISED | u32::from(now);
        }
    }

    /// Whether the key was in the queue when it was written.
    pub(super) fn promised(&self, hash: ObjectHash) -> bool {
        self.find(hash).is_some_and(|at| self.slots[at] & PROMISED != 0)
    }

    /// The key is gone.
    pub(super) fn forget(&mut self, hash: ObjectHash) {
        if let Some(at) = self.find(hash) {
            self.slots[at] = 0;
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.len() * 4
    }
}
