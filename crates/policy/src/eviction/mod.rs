//! Eviction: which resident thing goes first when room is needed.
//!
//! A policy sees [`Slot`]s, sizes and opaque tags; never keys, values or reference counts. The driver keeps a map from
//! its objects to slots and hands the slot back with each request; the policy answers hit or miss, and reports through
//! [`Departures`] what left the cache (and, for policies that remember departed objects as ghosts, what was forgotten).
//! Nothing here reads a clock or draws randomness.
//!
//! Exactness: [`Lru`], [`Fifo`], [`Clock`], [`Sieve`], [`S3Fifo`], [`Slru`], [`TwoQ`], [`Arc`], [`Lirs`], [`Lfu`],
//! [`WTinyLfu`] and [`Belady`] make the decisions that libCacheSim makes, request by request, so that their miss counts
//! can be compared with its own; each module names the source and says where it deviates.

mod arc;
mod belady;
mod clock;
mod gdsf;
mod heap;
mod kind;
mod lfu;
mod lirs;
mod lru;
mod queue;
mod s3fifo;
mod sieve;
mod sketch;
mod slru;
mod two_q;
mod wtinylfu;

#[cfg(test)]
mod naive;
#[cfg(test)]
mod tests;

pub use arc::Arc;
pub use belady::Belady;
pub use clock::Clock;
pub use gdsf::Gdsf;
pub use kind::{AnyPolicy, EvictionKind, Unit, UnknownPolicy, Visitor};
pub use lfu::Lfu;
pub use lirs::Lirs;
pub use lru::{Fifo, Lru};
pub use s3fifo::{S3Fifo, S3FifoRelease};
pub use sieve::Sieve;
pub use slru::Slru;
pub use two_q::TwoQ;
pub use wtinylfu::WTinyLfu;

/// A policy's name for something that it holds or remembers. Valid until a [`Departure`] forgets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(pub u32);

impl Slot {
    /// No slot: the policy knows nothing of the object.
    pub const NONE: Slot = Slot(u32::MAX);

    /// Whether this is [`Slot::NONE`].
    #[inline]
    pub fn is_none(self) -> bool {
        self.0 == u32::MAX
    }
}

/// One request, as a policy sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The driver's name for the object; comes back in [`Departure`]s.
    pub tag: u32,
    /// What the object takes of the capacity: 1 where objects are counted, else bytes. At least 1.
    pub size: u32,
    /// 64 bits that stand for the object in sketches (any fixed function of its identity).
    pub fingerprint: u64,
    /// Index of the next request to the object, [`Access::NEVER`] when there is none. Only [`Belady`] reads it.
    pub next: u64,
}

impl Access {
    /// No further request.
    pub const NEVER: u64 = i64::MAX as u64;
}

/// The answer to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the object was resident.
    pub hit: bool,
    /// Where the object now is; [`Slot::NONE`] when it was not taken in.
    pub slot: Slot,
}

/// What became of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// No longer resident, remembered as a ghost: its slot stays valid.
    Ghost,
    /// No longer resident, and its slot is invalid.
    Dropped,
    /// It was a ghost; its slot is invalid.
    Forgotten,
}

/// An object that left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The tag that its last request carried.
    pub tag: u32,
    /// What became of it.
    pub fate: Fate,
}

/// The objects that one request drove out, in order.
#[derive(Clone, Debug, Default)]
pub struct Departures {
    list: Vec<Departure>,
}

impl Departures {
    /// An empty list; the driver keeps one and drains it after each request.
    pub fn new() -> Departures {
        Departures::default()
    }

    #[inline]
    pub(crate) fn push(&mut self, tag: u32, fate: Fate) {
        self.list.push(Departure { tag, fate });
    }

    /// Whether nothing left.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Takes the list.
    #[inline]
    pub fn drain(&mut self) -> std::vec::Drain<'_, Departure> {
        self.list.drain(..)
    }
}

/// An eviction policy over a fixed capacity.
pub trait Eviction {
    /// Serves one request. `slot` is what the last [`Outcome`] said of this object, unless it departed since.
    /// A miss takes the object in when the policy can hold it (it may refuse what is larger than its parts).
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome;

    /// Takes the object out (a delete or a trim): its slot is invalid from now on, no departure is reported. Returns
    /// whether it was resident.
    fn remove(&mut self, slot: Slot) -> bool;

    /// What the resident objects take of the capacity.
    fn used(&self) -> u64;

    /// Bytes of memory held by the policy's own state.
    fn memory_bytes(&self) -> usize;

    /// A hint that `slot` will be asked for soon.
    #[inline]
    fn prefetch(&self, slot: Slot) {
        let _ = slot;
    }
}
