//! One policy at one size.

use larder_base::prefetch;
use larder_policy::eviction::{
    Access, AnyPolicy, Departures, Eviction, Fate, Outcome, Slot, Unit, Visitor,
};

use super::filter::Gate;

/// A stretch of the trace, decoded and interned.
#[derive(Default)]
pub(super) struct Chunk {
    /// Items before this one only warm the caches up.
    pub(super) counted_from: usize,
    pub(super) tags: Vec<u32>,
    /// Bytes; 0 marks a removal.
    pub(super) sizes: Vec<u32>,
    /// Ids of the objects.
    pub(super) ids: Vec<u64>,
    /// Index of the next request to the same object; empty when no policy asks.
    pub(super) next: Vec<u64>,
    /// Which sub-sample each item belongs to; empty when nothing is sampled.
    pub(super) part: Vec<u8>,
    /// Items, in order, at which an object that is there must be charged with another size.
    pub(super) resized: Vec<u32>,
    /// Tags known after this chunk.
    pub(super) known: usize,
}

impl Chunk {
    pub(super) fn clear(&mut self) {
        self.tags.clear();
        self.sizes.clear();
        self.ids.clear();
        self.next.clear();
        self.part.clear();
        self.resized.clear();
        self.counted_from = 0;
    }

    pub(super) fn len(&self) -> usize {
        self.tags.len()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) requests: u64,
    pub(super) misses: u64,
    pub(super) request_bytes: u64,
    pub(super) miss_bytes: u64,
}

impl Counts {
    #[inline]
    fn add(&mut self, bytes: u32, hit: bool) {
        self.requests += 1;
        self.request_bytes += u64::from(bytes);
        if !hit {
            self.misses += 1;
            self.miss_bytes += u64::from(bytes);
        }
    }
}

pub(super) struct Run {
    policy: AnyPolicy,
    unit: Unit,
    /// The sub-sample that the run is about; all items when `None`.
    part: Option<u8>,
    gate: Option<Gate>,
    slots: Vec<u32>,
    gone: Departures,
    pub(super) counts: Counts,
}

impl Run {
    pub(super) fn new(policy: AnyPolicy, unit: Unit, part: Option<u8>, gate: Option<Gate>) -> Run {
        Run {
            policy,
            unit,
            part,
            gate,
            slots: Vec::new(),
            gone: Departures::new(),
            counts: Counts::default(),
        }
    }

    pub(super) fn process(&mut self, chunk: &Chunk) {
        if self.slots.len() < chunk.known {
            let more = chunk.known - self.slots.len();
            // Grow by a quarter at least, so that the cost of growing stays linear and memory close to the need.
            if self.slots.capacity() < chunk.known {
                self.slots.reserve_exact(more.max(self.slots.len() / 4));
            }
            self.slots.resize(chunk.known, Slot::NONE.0);
        }
        let pass = Pass {
            chunk,
            unit: self.unit,
            part: self.part,
            gate: &mut self.gate,
            slots: &mut self.slots,
            gone: &mut self.gone,
            counts: &mut self.counts,
        };
        self.policy.visit(pass);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        let gate = self.gate.as_ref().map_or(0, Gate::memory_bytes);
        self.policy.memory_bytes() + self.slots.capacity() * 4 + gate
    }
}

struct Pass<'a> {
    chunk: &'a Chunk,
    unit: Unit,
    part: Option<u8>,
    gate: &'a mut Option<Gate>,
    slots: &'a mut [u32],
    gone: &'a mut Departures,
    counts: &'a mut Counts,
}

/// How far ahead slots are asked for, and nodes half as far.
const AHEAD: usize = 24;

impl Visitor for Pass<'_> {
    fn visit<P: Eviction>(self, policy: &mut P) {
        let Pass { chunk, unit, part, gate, slots, gone, counts } = self;
        let tags = &chunk.tags[..];
        let mut resized = chunk.resized.iter().peekable();
        for at in 0..tags.len() {
            if let Some(&tag) = tags.get(at + AHEAD) {
                prefetch(slots, tag as usize);
            }
            if let Some(&tag) = tags.get(at + AHEAD / 2) {
                policy.prefetch(Slot(slots[tag as usize]));
            }
            let resizes = resized.next_if(|&&there| there as usize == at).is_some();
            if part.is_some_and(|part| chunk.part[at] != part) {
                continue;
            }
            let tag = tags[at];
            let slot = Slot(slots[tag as usize]);
            let bytes = chunk.sizes[at];
            if bytes == 0 {
                if !slot.is_none() {
                    policy.remove(slot);
                    slots[tag as usize] = Slot::NONE.0;
                }
                continue;
            }
            if slot.is_none()
                && let Some(gate) = gate
                && !gate.admits(chunk.ids[at], bytes)
            {
                if at >= chunk.counted_from {
                    counts.add(bytes, false);
                }
                continue;
            }
            let access = Access {
                tag,
                size: if unit == Unit::Objects { 1 } else { bytes },
                fingerprint: chunk.ids[at],
                next: chunk.next.get(at).copied().unwrap_or(Access::NEVER),
            };
            let outcome = serve(policy, &access, slot, gone, slots);
            if outcome.hit && resizes && unit == Unit::Bytes && !outcome.slot.is_none() {
                // Whatever the policy, what has another size is a new object: the old one goes, and as much room is made
                // as the new one takes.
                policy.remove(outcome.slot);
                slots[tag as usize] = Slot::NONE.0;
                serve(policy, &access, Slot::NONE, gone, slots);
            }
            if at >= chunk.counted_from {
                counts.add(bytes, outcome.hit);
            }
        }
    }
}

/// One request, after which `slots` say where everything is.
#[inline]
fn serve<P: Eviction>(
    policy: &mut P,
    access: &Access,
    slot: Slot,
    gone: &mut Departures,
    slots: &mut [u32],
) -> Outcome {
    let outcome = policy.request(access, slot, gone);
    if !gone.is_empty() {
        for departure in gone.drain() {
            if departure.fate != Fate::Ghost {
                slots[departure.tag as usize] = Slot::NONE.0;
            }
        }
    }
    if outcome.slot != slot {
        slots[access.tag as usize] = outcome.slot.0;
    }
    outcome
}
