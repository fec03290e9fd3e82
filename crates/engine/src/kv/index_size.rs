//! How large the flash index is: it follows the objects that are on flash, a step at a time, within the shard's memory.
//!
//! It grows when it is full, as far as memory allows, by a sixteenth of what it had at first, and shrinks when all that it held in one turn of the
//! flash would have fitted a smaller one. It goes on with each call of the log, which does a bounded part of it with the shard locked:
//!
//! ```text
//! rests ──full──▶ the memory for objects gives up a step's bytes ──▶ buckets are split ──▶ rests
//!   └──roomy──▶ buckets are taken back ──▶ their memory goes back ──▶ the memory for objects takes it ──▶ rests
//! ```
//!
//! Nothing is read for it ([`FlashIndex::grow`]), and objects and index together never take more than they were given. What is decided
//! follows from the shard alone, so that a replay decides it again; a host only supplies the words ([`larder_base::Supply`]). Where it
//! cannot, the index stays as it is until the next start.

use larder_base::Now;

use super::shard::KvShard;
use crate::dram::ObjectMemory;
use crate::index::FlashIndex;

/// Buckets that one call splits or takes back, at most: bounds how long the shard stays locked (well under a millisecond).
const SPLITS: u32 = 1024;
/// Bytes by which one call changes the memory for objects.
const GIVES: usize = 1 << 20;
/// Steps in which the first buckets are doubled.
const STEPS: u32 = 16;
/// Load from which on an index grows that has not grown yet, and one that has: it holds more, but what comes while it grows needs room, and
/// one that is not doubled whole holds less.
const FULL: f64 = FlashIndex::TARGET_LOAD;
const FULL_GROWN: f64 = 0.96;
/// An index shrinks to what would have been filled so far.
const ROOMY: f64 = 0.85;

/// Where a step stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Step {
    #[default]
    Rests,
    /// The memory for objects gives up what the index grows by.
    Gives,
    /// Buckets are split.
    Grows,
    /// Buckets are taken back.
    Shrinks,
    /// The memory for objects takes what the index has given back.
    Takes,
}

/// What a shard keeps of its index's size.
#[derive(Debug, Default)]
pub(super) struct IndexSize {
    /// Most buckets that it may have.
    most: u32,
    /// Buckets that the present step goes to.
    goal: u32,
    step: Step,
    /// There was no memory to grow by.
    refused: bool,
    /// Slots in use at most since the present turn of the flash began, and segments that were published since.
    peak: u64,
    since: u32,
    /// Steps that were taken: by which it grew, and shrank.
    grown: u64,
    shrunk: u64,
}

/// Steps by which flash indexes have changed their size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexSteps {
    /// By which they grew.
    pub grown: u64,
    /// By which they shrank.
    pub shrunk: u64,
}

impl IndexSteps {
    /// With those of another shard.
    pub fn add(&mut self, other: IndexSteps) {
        self.grown += other.grown;
        self.shrunk += other.shrunk;
    }
}

impl IndexSize {
    /// Of an index that may have so many buckets.
    pub(super) fn new(most: u32) -> IndexSize {
        IndexSize { most, ..IndexSize::default() }
    }

    /// Bytes that the index has beside those it had at first, or is about to have.
    pub(super) fn taken(&self, index: &FlashIndex) -> usize {
        let goes_to = if self.step == Step::Rests { index.buckets() } else { self.goal };
        let buckets = goes_to.max(index.buckets()) - index.base_buckets();
        buckets as usize * FlashIndex::BUCKET_BYTES as usize
    }
}

impl<M: ObjectMemory> KvShard<M> {
    /// Steps by which the flash index has changed its size.
    pub fn index_steps(&self) -> IndexSteps {
        IndexSteps { grown: self.index_size.grown, shrunk: self.index_size.shrunk }
    }

    /// Bytes that the flash index has taken of the memory for objects.
    pub fn index_taken(&self) -> usize {
        self.index_size.taken(&self.index)
    }

    /// The share of objects coming to flash that force others out of the index, while it is too small and cannot grow; else 0.
    pub fn index_short(&self) -> f64 {
        if self.index_can_grow() { 0.0 } else { self.index_room.short() }
    }

    fn index_can_grow(&self) -> bool {
        let size = &self.index_size;
        self.index.buckets() < size.most.min(self.index.room())
            && !size.refused
            && !self.config.no_eviction
    }

    /// An entry was inserted.
    pub(super) fn note_index_use(&mut self) {
        let size = &mut self.index_size;
        size.peak = size.peak.max(self.index.len() + self.index.wide());
    }

    /// A segment was published.
    pub(super) fn follow_index_after_segment(&mut self, now: Now) {
        self.index_size.since = self.index_size.since.saturating_add(1);
        self.follow_index(now);
    }

    /// Takes the index a part of a step closer to the size that it should have.
    pub(super) fn follow_index(&mut self, now: Now) {
        match self.index_size.step {
            Step::Rests => self.look_at_index(),
            Step::Gives => self.give_to_index(now),
            Step::Grows => self.grow_index(),
            Step::Shrinks => {
                let left = self.index.buckets() - self.index_size.goal;
                for _ in 0..left.min(SPLITS) {
                    if let Some(forced) = self.index.shrink() {
                        self.forced_out(&forced);
                    }
                }
                self.index.give_back();
                if left <= SPLITS {
                    self.index_size.shrunk += 1;
                    self.index_size.step = Step::Takes;
                }
            }
            // Without memory to grow by it stays smaller.
            Step::Takes => {
                if !self.fit_arena(now, GIVES).unwrap_or(false) {
                    self.index_stays();
                }
            }
        }
    }

    /// Whether a step is due.
    fn look_at_index(&mut self) {
        let (buckets, base) = (self.index.buckets(), self.index.base_buckets());
        let unit = (base / STEPS).max(1);
        let full = if buckets > base { FULL_GROWN } else { FULL };
        let fills = self.index.load() >= full || self.index_room.forces();
        let (can_grow, room) = (self.index_can_grow(), self.index.room());
        let size = &mut self.index_size;
        if fills && can_grow {
            size.goal = size.most.min(room).min(buckets + unit);
            size.step = Step::Gives;
            return;
        }
        if size.since < u32::from(self.config.flash.segments) {
            return;
        }
        let each = f64::from(FlashIndex::SLOTS_PER_BUCKET) * ROOMY;
        // A conversion from a float saturates.
        let needed = (size.peak as f64 / each).ceil() as u32;
        let steps = needed.saturating_sub(base).div_ceil(unit);
        let fewer = base.saturating_add(steps.saturating_mul(unit));
        (size.peak, size.since) = (0, 0);
        if fewer < buckets {
            size.goal = fewer;
            size.step = Step::Shrinks;
        }
    }

    fn give_to_index(&mut self, now: Now) {
        if self.fit_arena(now, GIVES).unwrap_or(false) {
            return;
        }
        self.index_size.step = Step::Grows;
    }

    fn grow_index(&mut self) {
        let (has, goal) = (self.index.buckets(), self.index_size.goal);
        let part = goal.min(has + SPLITS);
        // A little at a time, since the system may have to clear that memory first.
        if !self.index.supply(part) {
            self.index_size.refused = true;
            self.index_size.goal = has;
            self.index_size.step = Step::Takes;
            return;
        }
        for _ in has..part {
            self.index.grow();
        }
        if part == goal {
            self.index_size.grown += 1;
            self.index_stays();
        }
    }

    /// A step has ended.
    fn index_stays(&mut self) {
        self.index_size.step = Step::Rests;
        (self.index_size.peak, self.index_size.since) = (0, 0);
        self.index_room.resized(FlashIndex::objects_for(self.index.buckets()));
    }

    /// Makes an index that outlived another process fit the memory of this one, whatever is lost; before the first request.
    pub(super) fn fit_index(&mut self) {
        while self.index.buckets() > self.index_size.most {
            let Some(forced) = self.index.shrink() else { break };
            self.forced_out(&forced);
        }
        self.index.give_back();
    }
}
