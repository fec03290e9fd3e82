//! What a shard, or the log, was told.
//!
//! ```text
//! input    u8 kind (low 4 bits), bit 4 wall time changed; [varint nanoseconds, zigzag difference], [varint seconds, zigzag
//!          difference]: not for a call of the log, whose time is the log's
//! execute  u8 operation (low 3 bits), bit 3 fetched, bit 4 not the default application; u8 key length, key, [varint
//!          application], operation, [read]
//! read     u8 segment is an extent (bit 0), tries (bits 1..4), got (bits 4..6); location, tried locations
//! location varint segment, varint generation, varint offset, varint length
//! value    varint length; the bytes, if they are at most 24
//! ```

use larder_base::{AppId, Expiry, KeyHasher, Nanos, Now, ObjectHash, UnixSecs};
use larder_format::geometry::MAX_SEGMENTS;
use larder_policy::learn::{DIMENSIONS, Model};

use super::decision::Decision;
use crate::kv::api::{
    Arith, Delete, FlashRead, Get, Location, Op as KvOp, Request, Store, StoreMode,
};
use larder_format::recording::bytes::{BadRecord, Cursor, put, unzigzag, zigzag};

/// Values of at most this many bytes are recorded: as long as a number may be for incr and decr. Nothing depends on the
/// bytes of a longer one.
pub const MAX_KEPT_VALUE: usize = 24;

/// What reading flash came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// The bytes.
    Bytes,
    /// Nothing: the device failed.
    Nothing,
    /// Bytes that were not what had been written.
    Corrupt,
}

impl Got {
    pub(super) fn of(bytes: bool, corrupt: bool) -> Got {
        match (bytes, corrupt) {
            (_, true) => Got::Corrupt,
            (true, false) => Got::Bytes,
            (false, false) => Got::Nothing,
        }
    }
}

/// What the input or output of one of the log's steps came to: there is at most one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Io {
    /// There was none.
    #[default]
    None,
    /// A segment was read or written.
    Ok,
    /// The device failed.
    Failed,
}

/// What a shard, or the log, was told.
#[derive(Clone, Debug, PartialEq)]
pub enum Input<'a> {
    /// A request, the second time with what flash held.
    Execute {
        /// The request. A value longer than [`MAX_KEPT_VALUE`] is the reader's filler.
        request: Request<'a>,
        /// What was read for it.
        fetched: Option<(FlashRead, Got)>,
    },
    /// A suspect's verification.
    Verify {
        /// What was read.
        read: FlashRead,
        /// What came of it.
        got: Got,
    },
    /// Flush, now or later.
    Flush {
        /// When.
        at: Option<UnixSecs>,
    },
    /// Without flash: the cleaner makes room.
    FreeRoom,
    /// A large write waits for room: it is to be made.
    Await {
        /// Bytes of its key.
        key_len: usize,
        /// Bytes of its value.
        value_len: usize,
    },
    /// Expired objects leave DRAM.
    Expire {
        /// In a whole pass that was asked for.
        all: bool,
    },
    /// The log calls: what for is in its own stream.
    LogCall,
    /// Should a model be trained?
    TrainingDue,
    /// The samples for it.
    TrainingSet {
        /// Whose.
        app: AppId,
    },
    /// A trained model takes over.
    Install {
        /// Whose.
        app: AppId,
        /// The model.
        model: Box<Model>,
    },
    /// The log's only input: a step.
    Step {
        /// What its input or output came to.
        io: Io,
    },
}

/// The operations as a record names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// [`KvOp::Get`].
    Get = 0,
    /// [`KvOp::Store`].
    Store = 1,
    /// [`KvOp::Delete`].
    Delete = 2,
    /// [`KvOp::Arith`].
    Arith = 3,
    /// [`KvOp::Touch`].
    Touch = 4,
    /// [`KvOp::Peek`].
    Peek = 5,
}

/// The longest key.
const MAX_KEY: usize = 250;
/// Longer than any value that waits for room, bytes.
const MAX_LARGE: u64 = 1 << 40;

const EXECUTE: u8 = 0;
const VERIFY: u8 = 1;
const FLUSH: u8 = 2;
const FREE_ROOM: u8 = 3;
const LOG_CALL: u8 = 4;
const TRAINING_DUE: u8 = 5;
const TRAINING_SET: u8 = 6;
const INSTALL: u8 = 7;
const STEP: u8 = 8;
const EXPIRE: u8 = 9;
const EXPIRE_ALL: u8 = 10;
const AWAIT: u8 = 11;

const WALL: u8 = 1 << 4;

/// The times of the record before, from which differences count. A chunk starts at zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clocks {
    mono: u64,
    wall: u32,
}

fn put_time(out: &mut Vec<u8>, kind: u8, now: Now, clocks: &mut Clocks) {
    let moved = now.wall.0 != clocks.wall;
    out.push(kind | if moved { WALL } else { 0 });
    put(out, zigzag(now.mono.0.wrapping_sub(clocks.mono) as i64));
    if moved {
        put(out, zigzag(i64::from(now.wall.0) - i64::from(clocks.wall)));
    }
    *clocks = Clocks { mono: now.mono.0, wall: now.wall.0 };
}

fn put_option(out: &mut Vec<u8>, value: Option<u64>) {
    if let Some(n) = value {
        put(out, n);
    }
}

fn put_read(out: &mut Vec<u8>, read: &FlashRead, got: Got) {
    let tried = read.tried.iter().flatten().count() as u8;
    out.push(u8::from(read.at.extent) | tried << 1 | (got as u8) << 4);
    put_location(out, &read.at);
    for at in read.tried.iter().flatten() {
        out.push(u8::from(at.extent));
        put_location(out, at);
    }
}

fn put_location(out: &mut Vec<u8>, at: &Location) {
    for n in [u64::from(at.segment), at.generation, u64::from(at.offset), u64::from(at.len)] {
        put(out, n);
    }
}

/// Bits of an operation's flags, in the order in which its options follow.
fn bits(set: &[bool]) -> u8 {
    set.iter().enumerate().fold(0, |b, (i, &set)| b | u8::from(set) << i)
}

pub(super) fn encode_execute(
    out: &mut Vec<u8>,
    clocks: &mut Clocks,
    now: Now,
    request: &Request<'_>,
    fetched: Option<(&FlashRead, Got)>,
) {
    put_time(out, EXECUTE, now, clocks);
    let op = match &request.op {
        KvOp::Get(_) => Op::Get,
        KvOp::Store(_) => Op::Store,
        KvOp::Delete(_) => Op::Delete,
        KvOp::Arith(_) => Op::Arith,
        KvOp::Touch(_) => Op::Touch,
        KvOp::Peek => Op::Peek,
    };
    let named = request.app != AppId::DEFAULT;
    out.push(op as u8 | u8::from(fetched.is_some()) << 3 | u8::from(named) << 4);
    debug_assert!((1..=MAX_KEY).contains(&request.key.len()));
    out.push(request.key.len() as u8);
    out.extend_from_slice(request.key);
    if named {
        put(out, u64::from(request.app.0));
    }
    let expiry = |e: Option<Expiry>| e.map(|e| u64::from(e.0));
    match &request.op {
        KvOp::Get(g) => {
            let recache = g.recache_below.map(u64::from);
            let options = [expiry(g.touch), expiry(g.vivify), recache, g.new_cas];
            let [a, b, c, d] = options.map(|o| o.is_some());
            out.push(bits(&[a, b, c, d, g.meta]));
            options.into_iter().for_each(|o| put_option(out, o));
        }
        KvOp::Store(s) => {
            let options = [s.compare_cas, s.new_cas, expiry(s.vivify)];
            let [a, b, c] = options.map(|o| o.is_some());
            out.push(bits(&[a, b, c, s.invalidate]) | (s.mode as u8) << 4);
            put(out, s.value.len() as u64);
            if s.value.len() <= MAX_KEPT_VALUE {
                out.extend_from_slice(s.value);
            }
            put(out, u64::from(s.flags));
            put(out, u64::from(s.expiry.0));
            options.into_iter().for_each(|o| put_option(out, o));
        }
        KvOp::Delete(d) => {
            let options = [d.compare_cas, d.new_cas, expiry(d.touch)];
            let [a, b, c] = options.map(|o| o.is_some());
            out.push(bits(&[a, b, c, d.mark_stale, d.drop_value]));
            options.into_iter().for_each(|o| put_option(out, o));
        }
        KvOp::Arith(a) => {
            let (create, initial) = (a.vivify.map(|v| u64::from(v.0.0)), a.vivify.map(|v| v.1));
            let options = [a.compare_cas, a.new_cas, create, expiry(a.touch)];
            let [b, c, d, e] = options.map(|o| o.is_some());
            out.push(bits(&[b, c, d, e, a.decrement, a.meta]));
            put(out, a.delta);
            options.into_iter().for_each(|o| put_option(out, o));
            put_option(out, initial);
        }
        KvOp::Touch(e) => put(out, u64::from(e.0)),
        KvOp::Peek => {}
    }
    if let Some((read, got)) = fetched {
        put_read(out, read, got);
    }
}

/// Any input but a request.
pub(super) fn encode(out: &mut Vec<u8>, clocks: &mut Clocks, now: Now, input: &Input<'_>) {
    match input {
        Input::Execute { request, fetched } => {
            let fetched = fetched.as_ref().map(|(read, got)| (read, *got));
            encode_execute(out, clocks, now, request, fetched);
        }
        Input::Verify { read, got } => {
            put_time(out, VERIFY, now, clocks);
            out.extend_from_slice(&read.hash.0.to_le_bytes());
            put_read(out, read, *got);
        }
        Input::Flush { at } => {
            put_time(out, FLUSH, now, clocks);
            put(out, at.map_or(0, |at| u64::from(at.0) + 1));
        }
        Input::FreeRoom => put_time(out, FREE_ROOM, now, clocks),
        Input::Await { key_len, value_len } => {
            put_time(out, AWAIT, now, clocks);
            put(out, *key_len as u64);
            put(out, *value_len as u64);
        }
        Input::Expire { all: false } => put_time(out, EXPIRE, now, clocks),
        Input::Expire { all: true } => put_time(out, EXPIRE_ALL, now, clocks),
        Input::LogCall => out.push(LOG_CALL),
        Input::TrainingDue => put_time(out, TRAINING_DUE, now, clocks),
        Input::TrainingSet { app } => {
            put_time(out, TRAINING_SET, now, clocks);
            put(out, u64::from(app.0));
        }
        Input::Install { app, model } => {
            put_time(out, INSTALL, now, clocks);
            put(out, u64::from(app.0));
            put_model(out, model);
        }
        Input::Step { io } => {
            put_time(out, STEP, now, clocks);
            out.push(*io as u8);
        }
    }
}

fn put_model(out: &mut Vec<u8>, m: &Model) {
    put(out, u64::from(m.app));
    put(out, u64::from(m.samples));
    // Bit for bit: a score must be the same.
    let scalars = [m.bias, m.slope, m.offset, m.positive_share];
    for x in m.weights.iter().chain(&scalars) {
        out.extend_from_slice(&x.to_bits().to_le_bytes());
    }
    out.push(bits(&[m.precision.is_some(), m.recall.is_some()]));
    for x in [m.precision, m.recall].into_iter().flatten() {
        out.extend_from_slice(&x.to_bits().to_le_bytes());
    }
}

fn model(cursor: &mut Cursor<'_>) -> Result<Model, BadRecord> {
    let app = cursor.at_most(u64::from(u16::MAX), "the application of a model")? as u16;
    let samples = cursor.u32("the samples of a model")?;
    let mut float = || cursor.u32_le("model").map(f32::from_bits);
    let mut weights = [0f32; DIMENSIONS];
    for w in &mut weights {
        *w = float()?;
    }
    let (bias, slope, offset, positive_share) = (float()?, float()?, float()?, float()?);
    let flags = cursor.u8("model")?;
    let mut float = |bit: u8| {
        (flags & bit != 0).then(|| cursor.u32_le("model").map(f32::from_bits)).transpose()
    };
    let (precision, recall) = (float(1)?, float(2)?);
    Ok(Model { app, weights, bias, slope, offset, samples, positive_share, precision, recall })
}

fn location(cursor: &mut Cursor<'_>, extent: bool) -> Result<Location, BadRecord> {
    Ok(Location {
        segment: cursor.at_most(MAX_SEGMENTS.into(), "a segment")? as u16,
        generation: cursor.varint("generation")?,
        offset: cursor.u32("an offset")?,
        len: cursor.u32("a length")?,
        extent,
    })
}

fn read(cursor: &mut Cursor<'_>, hash: ObjectHash) -> Result<(FlashRead, Got), BadRecord> {
    let head = cursor.u8("read")?;
    let bad = |what, must| BadRecord::Value { what, value: u64::from(head), must };
    let got = match head >> 4 {
        0 => Got::Bytes,
        1 => Got::Nothing,
        2 => Got::Corrupt,
        _ => return Err(bad("what a read came to", "0 to 2 in its upper bits")),
    };
    let at = location(cursor, head & 1 != 0)?;
    let count = usize::from(head >> 1 & 7);
    let mut tried = [None; 4];
    let places =
        tried.get_mut(..count).ok_or(bad("the number of tries", "at most 4 in bits 1 to 3"))?;
    for place in places {
        let extent = cursor.u8("location")? != 0;
        *place = Some(location(cursor, extent)?);
    }
    Ok((FlashRead { at, hash, tried }, got))
}

/// Which options follow, from an operation's flags.
fn option(cursor: &mut Cursor<'_>, flags: u8, bit: u8) -> Result<Option<u64>, BadRecord> {
    (flags & 1 << bit != 0).then(|| cursor.varint("option")).transpose()
}

fn expiry(cursor: &mut Cursor<'_>, flags: u8, bit: u8) -> Result<Option<Expiry>, BadRecord> {
    (flags & 1 << bit != 0).then(|| cursor.u32("an expiry").map(Expiry)).transpose()
}

fn store<'a>(cursor: &mut Cursor<'a>, filler: &'a [u8]) -> Result<Store<'a>, BadRecord> {
    let flags = cursor.u8("store")?;
    let mode = match flags >> 4 {
        0 => StoreMode::Set,
        1 => StoreMode::Add,
        2 => StoreMode::Replace,
        3 => StoreMode::Append,
        4 => StoreMode::Prepend,
        other => {
            let (what, value) = ("the mode of a store", u64::from(other));
            return Err(BadRecord::Value { what, value, must: "at most 4" });
        }
    };
    let len = cursor.varint("length of a value")?;
    let value = if len <= MAX_KEPT_VALUE as u64 {
        cursor.take(len as usize, "value")?
    } else {
        // The filler is as long as the largest object: what is longer is too large either way.
        &filler[..filler.len().min(len as usize)]
    };
    Ok(Store {
        mode,
        value,
        flags: cursor.u32("client flags")?,
        expiry: Expiry(cursor.u32("an expiry")?),
        compare_cas: option(cursor, flags, 0)?,
        new_cas: option(cursor, flags, 1)?,
        vivify: expiry(cursor, flags, 2)?,
        invalidate: flags & 1 << 3 != 0,
    })
}

fn operation<'a>(
    code: u8,
    cursor: &mut Cursor<'a>,
    filler: &'a [u8],
) -> Result<KvOp<'a>, BadRecord> {
    Ok(match code {
        0 => {
            let flags = cursor.u8("get")?;
            KvOp::Get(Get {
                touch: expiry(cursor, flags, 0)?,
                vivify: expiry(cursor, flags, 1)?,
                recache_below: (flags & 1 << 2 != 0)
                    .then(|| cursor.u32("a number of seconds"))
                    .transpose()?,
                new_cas: option(cursor, flags, 3)?,
                meta: flags & 1 << 4 != 0,
            })
        }
        1 => KvOp::Store(store(cursor, filler)?),
        2 => {
            let flags = cursor.u8("delete")?;
            KvOp::Delete(Delete {
                compare_cas: option(cursor, flags, 0)?,
                new_cas: option(cursor, flags, 1)?,
                touch: expiry(cursor, flags, 2)?,
                mark_stale: flags & 1 << 3 != 0,
                drop_value: flags & 1 << 4 != 0,
            })
        }
        3 => {
            let flags = cursor.u8("arithmetic")?;
            let delta = cursor.varint("delta")?;
            let compare_cas = option(cursor, flags, 0)?;
            let new_cas = option(cursor, flags, 1)?;
            let create = expiry(cursor, flags, 2)?;
            let touch = expiry(cursor, flags, 3)?;
            let initial = create.map(|_| cursor.varint("initial number")).transpose()?;
            KvOp::Arith(Arith {
                decrement: flags & 1 << 4 != 0,
                delta,
                compare_cas,
                new_cas,
                vivify: create.zip(initial),
                touch,
                meta: flags & 1 << 5 != 0,
            })
        }
        4 => KvOp::Touch(Expiry(cursor.u32("an expiry")?)),
        5 => KvOp::Peek,
        other => {
            let (what, value) = ("the operation", u64::from(other));
            return Err(BadRecord::Value { what, value, must: "at most 5" });
        }
    })
}

/// Reads one record: its time, what was told and what was decided. `hasher` hashes the keys, `filler` stands for values that
/// are recorded by their length.
///
/// # Errors
/// What nothing writes.
pub fn decode<'a>(
    cursor: &mut Cursor<'a>,
    clocks: &mut Clocks,
    hasher: &KeyHasher,
    filler: &'a [u8],
) -> Result<(Now, Input<'a>, Decision), BadRecord> {
    let head = cursor.u8("kind")?;
    let kind = head & 0xf;
    if kind != LOG_CALL {
        let mono = unzigzag(cursor.varint("time")?) as u64;
        clocks.mono = clocks.mono.wrapping_add(mono);
        if head & WALL != 0 {
            let seconds = unzigzag(cursor.varint("time")?);
            clocks.wall = clocks.wall.wrapping_add(seconds as u32);
        }
    }
    let now = Now { mono: Nanos(clocks.mono), wall: UnixSecs(clocks.wall) };
    let input = match kind {
        EXECUTE => {
            let op = cursor.u8("operation")?;
            let len = usize::from(cursor.u8("length of a key")?);
            if !(1..=MAX_KEY).contains(&len) {
                let (what, value) = ("the length of a key", len as u64);
                return Err(BadRecord::Value { what, value, must: "1 to 250" });
            }
            let key = cursor.take(len, "key")?;
            let app = match op & 1 << 4 {
                0 => AppId::DEFAULT,
                _ => AppId(cursor.at_most(u64::from(u16::MAX), "an application")? as u16),
            };
            let hash = hasher.hash(key);
            let request = Request { key, hash, app, op: operation(op & 7, cursor, filler)? };
            let fetched = (op & 1 << 3 != 0).then(|| read(cursor, hash)).transpose()?;
            Input::Execute { request, fetched }
        }
        VERIFY => {
            let mut hash = [0; 16];
            hash.copy_from_slice(cursor.take(16, "hash")?);
            let (read, got) = read(cursor, ObjectHash(u128::from_le_bytes(hash)))?;
            Input::Verify { read, got }
        }
        FLUSH => {
            let at = cursor.at_most(u64::from(u32::MAX) + 1, "the time of a flush")?;
            Input::Flush { at: at.checked_sub(1).map(|at| UnixSecs(at as u32)) }
        }
        FREE_ROOM => Input::FreeRoom,
        AWAIT => Input::Await {
            key_len: cursor.at_most(MAX_KEY as u64, "the length of a key")? as usize,
            value_len: cursor.at_most(MAX_LARGE, "the length of a value")? as usize,
        },
        EXPIRE => Input::Expire { all: false },
        EXPIRE_ALL => Input::Expire { all: true },
        LOG_CALL => Input::LogCall,
        TRAINING_DUE => Input::TrainingDue,
        TRAINING_SET => {
            let app = cursor.at_most(u64::from(u16::MAX), "an application")? as u16;
            Input::TrainingSet { app: AppId(app) }
        }
        INSTALL => {
            let app = cursor.at_most(u64::from(u16::MAX), "an application")? as u16;
            Input::Install { app: AppId(app), model: Box::new(model(cursor)?) }
        }
        STEP => {
            let code = cursor.u8("what input and output came to")?;
            let io = match code {
                0 => Io::None,
                1 => Io::Ok,
                2 => Io::Failed,
                _ => {
                    let (what, value) = ("what input and output came to", u64::from(code));
                    return Err(BadRecord::Value { what, value, must: "at most 2" });
                }
            };
            Input::Step { io }
        }
        other => {
            let (what, value) = ("the kind of a record", u64::from(other));
            return Err(BadRecord::Value { what, value, must: "at most 8" });
        }
    };
    Ok((now, input, Decision::decode(cursor)?))
}

#[cfg(test)]
mod tests;
