//! What the key-value engine is asked and what it answers, free of any wire format.
//!
//! A request is executed by [`KvShard::execute`](super::KvShard::execute). When the answer needs an object that lies on
//! flash, the engine returns [`Outcome::Read`]: the caller reads those bytes and calls `execute` again with the same
//! request and the bytes. The engine keeps no record of waiting requests, so nothing leaks when a client goes away, and
//! a request always decides on the state of the moment at which it completes.

use larder_base::{AppId, Expiry, ObjectHash, UnixSecs};

use super::evicted::Evicted;

/// One request for one key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request<'a> {
    /// The key, 1 to 250 bytes (binary keys of the meta protocol arrive decoded).
    pub key: &'a [u8],
    /// Its hash under the device's key.
    pub hash: ObjectHash,
    /// The application it belongs to.
    pub app: AppId,
    /// What is asked.
    pub op: Op<'a>,
}

/// What a [`Request`] asks. The text and the meta protocol both map onto these.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Op<'a> {
    /// get, gets, gat, gats, mg. Answer: [`Reply::Item`] or [`Reply::Miss`].
    Get(Get),
    /// set, add, replace, append, prepend, cas, ms. Answer: [`Reply::Stored`], `NotStored`, `Exists`, `NotFound`,
    /// `TooLarge` or `OutOfMemory`.
    Store(Store<'a>),
    /// delete, md. Answer: [`Reply::Deleted`], `NotFound` or `Exists`.
    Delete(Delete),
    /// incr, decr, ma. Answer: [`Reply::Number`], `NotFound`, `NotStored`, `NotNumeric`, `Exists` or `OutOfMemory`.
    Arith(Arith),
    /// touch. Answer: [`Reply::Touched`] or `NotFound`.
    Touch(Expiry),
    /// me: looks without counting as an access. Answer: [`Reply::Item`] or [`Reply::Miss`].
    Peek,
}

/// A read, with what the meta protocol hangs on it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Get {
    /// A new expiry for the object when it is found (gat, mg T).
    pub touch: Option<Expiry>,
    /// On a miss, create an empty object with this expiry and let this client win the right to fill it (mg N).
    pub vivify: Option<Expiry>,
    /// Let one client win the right to refill an object that had fewer seconds left than this before any
    /// [`Get::touch`] (mg R). [`u32::MAX`]: whatever it had left, also one that never expires.
    pub recache_below: Option<u32>,
    /// CAS for an object that this request creates (mg E with N).
    pub new_cas: Option<u64>,
    /// Take part in win/stale (the meta protocol does, the text protocol does not): without it a stale object is
    /// returned as it is and no win is handed out.
    pub meta: bool,
}

impl Get {
    /// Whether an object that expires at `expiry` is due to be refilled.
    pub fn recache_due(&self, expiry: Expiry, now: UnixSecs) -> bool {
        match self.recache_below {
            None => false,
            Some(u32::MAX) => true,
            Some(below) => expiry.remaining(now).is_some_and(|left| left < below),
        }
    }
}

/// How a [`Store`] treats what is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreMode {
    /// Store in any case.
    Set,
    /// Store only if the key is absent.
    Add,
    /// Store only if the key is present.
    Replace,
    /// Append to the present value, keeping its flags and expiry.
    Append,
    /// Prepend to the present value, keeping its flags and expiry.
    Prepend,
}

/// A write.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Store<'a> {
    /// What to do with what is there.
    pub mode: StoreMode,
    /// The value.
    pub value: &'a [u8],
    /// Client flags.
    pub flags: u32,
    /// Expiry.
    pub expiry: Expiry,
    /// Store only if the object's CAS equals this (cas, ms C): absent gives `NotFound`, different gives `Exists`.
    pub compare_cas: Option<u64>,
    /// CAS to give the object instead of the next number (ms E).
    pub new_cas: Option<u64>,
    /// With `compare_cas`: when the object's CAS is *higher* than the one given, store anyway and mark the object
    /// stale (ms I).
    pub invalidate: bool,
    /// With append or prepend: create the object with this expiry when the key is absent (ms N).
    pub vivify: Option<Expiry>,
}

/// A deletion.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Delete {
    /// Delete only if the object's CAS equals this (md C).
    pub compare_cas: Option<u64>,
    /// CAS for the object that stays, with `mark_stale` or `drop_value` (md E).
    pub new_cas: Option<u64>,
    /// Mark the object stale instead of removing it, so that one client may win the right to refill it (md I).
    pub mark_stale: bool,
    /// With `mark_stale`: a new expiry (md T).
    pub touch: Option<Expiry>,
    /// Drop the value and the client flags but keep the object (md x).
    pub drop_value: bool,
}

/// An increment or decrement. Numbers are unsigned 64-bit decimals; increments wrap, decrements stop at zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Arith {
    /// Decrement instead of increment.
    pub decrement: bool,
    /// By how much.
    pub delta: u64,
    /// Apply only if the object's CAS equals this (ma C).
    pub compare_cas: Option<u64>,
    /// CAS to give the object instead of the next number (ma E).
    pub new_cas: Option<u64>,
    /// On a miss, create the object with this expiry and value (ma N, J).
    pub vivify: Option<(Expiry, u64)>,
    /// A new expiry for an object that is found (ma T).
    pub touch: Option<Expiry>,
    /// The text protocol keeps the width when a decrement shortens the number (trailing spaces); the meta protocol too.
    pub meta: bool,
}

/// Where an object was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tier {
    /// In DRAM (also while it is being moved: objects leave DRAM only when their segment is durable).
    Dram,
    /// On flash.
    Flash,
}

/// An object as an answer shows it. Borrowed: the sink copies what it sends.
#[derive(Clone, Copy, Debug)]
pub struct Item<'a> {
    /// The value.
    pub value: &'a [u8],
    /// Client flags.
    pub flags: u32,
    /// CAS unique.
    pub cas: u64,
    /// When it expires, after any touch that this request asked for.
    pub expiry: Expiry,
    /// When it expired before: never, for an object that this request has created.
    pub expiry_before: Expiry,
    /// Seconds since the last access before this one (meta `l`).
    pub last_access: u32,
    /// Whether it had been read before this request (meta `h`).
    pub hit_before: bool,
    /// This client won the right to refill it (meta `W`).
    pub won: bool,
    /// It is stale (meta `X`).
    pub stale: bool,
    /// Another client has already won (meta `Z`).
    pub already_won: bool,
    /// Where it was found.
    pub tier: Tier,
}

/// The answer to a request.
#[derive(Clone, Copy, Debug)]
pub enum Reply<'a> {
    /// The object (also when it was just vivified: then it is empty and `won`).
    Item(Item<'a>),
    /// No such object, for a read.
    Miss,
    /// Stored, with its CAS and the length of the value as stored.
    Stored {
        /// The CAS it got.
        cas: u64,
        /// Length of the whole value, after an append or prepend too.
        size: u32,
    },
    /// The mode's condition did not hold.
    NotStored,
    /// The CAS did not match.
    Exists,
    /// No such object, for anything but a read.
    NotFound,
    /// Gone (or marked stale).
    Deleted {
        /// Length of its value.
        size: u32,
    },
    /// Expiry changed.
    Touched,
    /// The number after the change, with the object's other properties.
    Number(u64, Item<'a>),
    /// The value is not a decimal number of at most 64 bits.
    NotNumeric,
    /// Larger than the configured limit on objects.
    TooLarge,
    /// No room could be made in DRAM.
    OutOfMemory,
}

/// Where bytes lie on flash, and of which life of the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// Segment, from 1 on.
    pub segment: u16,
    /// Which filling of that segment: a read can complete after the segment was reclaimed and filled anew.
    pub generation: u64,
    /// Offset in the segment, bytes, a multiple of 64.
    pub offset: u32,
    /// Bytes to look at from `offset` (4096 and page-aligned for small objects; an extent for large ones).
    pub len: u32,
    /// The extent of one large object that starts exactly at `offset`, not a page packed with small ones.
    pub extent: bool,
}

/// A read of flash that the caller must perform before it calls `execute` again. It remembers the candidates that were
/// already found not to hold the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashRead {
    /// What to read.
    pub at: Location,
    /// Hash of the key for which it is read: tells the shard.
    pub hash: ObjectHash,
    pub(crate) tried: [Option<Location>; 4],
}

/// The bytes of a [`FlashRead`], or that they could not be had.
#[derive(Clone, Copy, Debug)]
pub struct Fetched<'a> {
    /// The read this answers.
    pub read: &'a FlashRead,
    /// Exactly `read.at.len` bytes, or `None` when the device failed (the caller has logged and counted it).
    pub bytes: Option<&'a [u8]>,
}

/// What `execute` needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// Answered: the sink has the reply.
    Done,
    /// Read this and call again. The sink has nothing yet.
    Read(FlashRead),
}

/// Takes what a shard gives out while it is locked. The protocol formats replies straight into the connection's buffer.
pub trait Effects {
    /// The answer to the request under execution: called exactly once when `execute` returns [`Outcome::Done`].
    fn reply(&mut self, reply: Reply<'_>);

    /// Read this in the background and hand it to [`KvShard::verify`](super::KvShard::verify): an overwritten key's tag
    /// matched an index entry, which was removed and must be put back if it turns out to belong to another key. Each is answered
    /// once, without bytes where it was not read. The shard bounds how many wait.
    fn verify(&mut self, read: FlashRead);

    /// Free room has fallen below the mark: the cleaner should run soon.
    fn wake_cleaner(&mut self);

    /// These were evicted from DRAM, and `lost` more that are not known by name. Called with no lock held, and only while
    /// somebody [watches](super::node::Node::watch_evictions).
    fn evicted(&mut self, _evicted: Vec<Evicted>, _lost: u64) {}
}
