//! What an input led to, in a few bytes: enough to see that a replay decided alike, and to say how it did not.
//!
//! ```text
//! decision   u8 what, varint detail, u8 effects (bit 0 the cleaner was called, above: reads to verify), varint objects
//!            evicted, u32 digest of answer and state
//! ```

use std::fmt;

use larder_base::{AppId, Now};
use larder_policy::admission::AdmissionPolicy;

use super::input::{Got, Input};
use crate::dram::ObjectMemory;
use crate::kv::api::{Effects, Fetched, FlashRead, Item, Outcome, Reply, Request, Tier};
use crate::kv::shard::KvShard;
use larder_format::recording::bytes::{BadRecord, Cursor, put, unzigzag, zigzag};

macro_rules! whats {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// What was decided.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum What { $($(#[$doc])* $name = $code),* }

        impl What {
            fn of(code: u8) -> Option<What> {
                match code { $($code => Some(What::$name),)* _ => None }
            }

            /// In a few words.
            pub fn as_str(self) -> &'static str {
                match self { $(What::$name => $text),* }
            }
        }
    };
}

whats! {
    /// Nothing is answered to this input.
    Done = 0, "done";
    /// The object, from DRAM. Detail: its CAS.
    HitDram = 1, "hit in DRAM";
    /// The object, from flash. Detail: its CAS.
    HitFlash = 2, "hit on flash";
    /// No such object, for a read.
    Miss = 3, "miss";
    /// Stored. Detail: its CAS.
    Stored = 4, "stored";
    /// The mode's condition did not hold.
    NotStored = 5, "not stored";
    /// The CAS did not match.
    Exists = 6, "exists";
    /// No such object.
    NotFound = 7, "not found";
    /// Deleted.
    Deleted = 8, "deleted";
    /// Expiry changed.
    Touched = 9, "touched";
    /// The number after the change. Detail: the number.
    Number = 10, "number";
    /// The value is no number.
    NotNumeric = 11, "not numeric";
    /// Too large.
    TooLarge = 12, "too large";
    /// No room could be made.
    OutOfMemory = 13, "out of memory";
    /// Flash must be read first. Detail: segment and offset.
    Read = 14, "a read of flash";
    /// Yes. Detail: of which application, plus one, where that is asked.
    Yes = 15, "yes";
    /// No.
    No = 16, "no";
    /// Detail: how many samples, plus one; 0 for none at all.
    Samples = 17, "samples";
    /// The log had nothing to do.
    Idle = 18, "idle";
    /// The log did something.
    Worked = 19, "worked";
    /// The log wrote a segment. Detail: which.
    Wrote = 20, "a segment written";
    /// The log read a segment. Detail: which.
    ReadSegment = 21, "a segment read";
}

/// What an input led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What was decided.
    pub what: What,
    /// More of it; see [`What`]. CAS uniques count from the first that the shard may give.
    pub detail: u64,
    /// The cleaner was called.
    pub woke: bool,
    /// Reads to verify that were asked for (127 stands for more).
    pub verifies: u8,
    /// Objects evicted from DRAM.
    pub evicted: u64,
    /// Digest of the answer, and of the counters, hands and tables of the shard (or of the log) afterwards.
    pub state: u32,
}

impl Decision {
    pub(super) fn of(what: What, detail: u64, state: u64) -> Decision {
        Decision { what, detail, woke: false, verifies: 0, evicted: 0, state: fold(state) }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.what as u8);
        put(out, self.detail);
        out.push(u8::from(self.woke) | self.verifies << 1);
        put(out, self.evicted);
        out.extend_from_slice(&self.state.to_le_bytes());
    }

    pub(super) fn decode(cursor: &mut Cursor<'_>) -> Result<Decision, BadRecord> {
        let code = cursor.u8("decision")?;
        let (what, value) = ("the decision", u64::from(code));
        let what = What::of(code).ok_or(BadRecord::Value { what, value, must: "at most 21" })?;
        let detail = cursor.varint("detail of a decision")?;
        let effects = cursor.u8("effects")?;
        let evicted = cursor.varint("number of evictions")?;
        let state = cursor.u32_le("digest")?;
        Ok(Decision {
            what,
            detail,
            woke: effects & 1 != 0,
            verifies: effects >> 1,
            evicted,
            state,
        })
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what.as_str())?;
        match self.what {
            What::HitDram | What::HitFlash | What::Stored => {
                write!(f, ", CAS +{}", unzigzag(self.detail))?;
            }
            What::Number => write!(f, " {}", self.detail)?,
            What::Read => {
                write!(f, ", segment {} offset {}", self.detail >> 32, self.detail as u32)?;
            }
            What::Yes if self.detail > 0 => write!(f, ", application {}", self.detail - 1)?,
            What::Samples if self.detail > 0 => write!(f, " {}", self.detail - 1)?,
            What::Samples => f.write_str(" none")?,
            What::Wrote | What::ReadSegment => write!(f, ", segment {}", self.detail)?,
            _ => {}
        }
        if self.evicted > 0 {
            write!(f, ", {} evicted", self.evicted)?;
        }
        if self.verifies > 0 {
            write!(f, ", {} to verify", self.verifies)?;
        }
        if self.woke {
            f.write_str(", cleaner called")?;
        }
        write!(f, ", state {:08x}", self.state)
    }
}

/// One step of a digest: a multiplication and a rotation, so that neither order nor place is lost.
#[inline]
pub(super) fn mix(h: u64, x: u64) -> u64 {
    (h ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

fn fold(h: u64) -> u32 {
    let h = mix(h, 0);
    (h >> 32) as u32 ^ h as u32
}

/// The digest of a shard: whatever an input can change shows in one of these.
fn state_of<M: ObjectMemory>(s: &KvShard<M>, seed: u64) -> u64 {
    let mut h = s.stats.digest(seed, mix);
    for x in [
        s.arena.free_bytes() as u64,
        s.staged_bytes as u64,
        u64::from(s.hand.0) << 32 | u64::from(s.scan.0),
        s.table.len() as u64,
        s.index.len(),
        s.index.hot(),
        s.suspects.len() as u64,
        s.extra_room as u64,
        s.ahead.bytes() as u64,
    ] {
        h = mix(h, x);
    }
    for (_, n) in s.admission.rejected() {
        h = mix(h, n);
    }
    h
}

/// Stands between a shard and those who take its effects, and notes what they are given.
struct Watch<'x, X> {
    inner: &'x mut X,
    cas_base: u64,
    seen: Decision,
    digest: u64,
}

impl<X> Watch<'_, X> {
    fn item(&mut self, item: &Item<'_>) {
        let bits = [item.hit_before, item.won, item.stale, item.already_won];
        let bits = bits.iter().fold(0u64, |b, &set| b << 1 | u64::from(set));
        for x in [
            item.value.len() as u64,
            u64::from(item.flags) << 32 | u64::from(item.expiry.0),
            u64::from(item.last_access) << 4 | bits,
            item.cas,
        ] {
            self.digest = mix(self.digest, x);
        }
    }

    fn cas(&self, cas: u64) -> u64 {
        zigzag(cas.wrapping_sub(self.cas_base) as i64)
    }
}

impl<X: Effects> Effects for Watch<'_, X> {
    fn reply(&mut self, reply: Reply<'_>) {
        let (what, detail) = match &reply {
            Reply::Item(item) => {
                self.item(item);
                let what = if item.tier == Tier::Dram { What::HitDram } else { What::HitFlash };
                (what, self.cas(item.cas))
            }
            Reply::Miss => (What::Miss, 0),
            Reply::Stored { cas, size } => {
                self.digest = mix(self.digest, u64::from(*size));
                (What::Stored, self.cas(*cas))
            }
            Reply::NotStored => (What::NotStored, 0),
            Reply::Exists => (What::Exists, 0),
            Reply::NotFound => (What::NotFound, 0),
            Reply::Deleted { .. } => (What::Deleted, 0),
            Reply::Touched => (What::Touched, 0),
            Reply::Number(n, item) => {
                self.item(item);
                (What::Number, *n)
            }
            Reply::NotNumeric => (What::NotNumeric, 0),
            Reply::TooLarge => (What::TooLarge, 0),
            Reply::OutOfMemory => (What::OutOfMemory, 0),
        };
        (self.seen.what, self.seen.detail) = (what, detail);
        self.inner.reply(reply);
    }

    fn verify(&mut self, read: FlashRead) {
        self.seen.verifies = (self.seen.verifies + 1).min(127);
        self.inner.verify(read);
    }

    fn wake_cleaner(&mut self) {
        self.seen.woke = true;
        self.inner.wake_cleaner();
    }
}

/// Executes a request and says what was decided, and what the flash that was read came to.
pub(super) fn execute<M: ObjectMemory, X: Effects>(
    shard: &mut KvShard<M>,
    now: Now,
    req: &Request<'_>,
    fetched: Option<Fetched<'_>>,
    fx: &mut X,
) -> (Outcome, Decision, Got) {
    let before = (shard.stats.evictions, shard.stats.flash_corrupt);
    let had = fetched.map(|f| f.bytes.is_some());
    let cas_base = shard.config.cas_base;
    let seen = Decision::of(What::Done, 0, 0);
    let mut watch = Watch { inner: fx, cas_base, seen, digest: 0 };
    let outcome = shard.execute(now, req, fetched, &mut watch);
    let (mut decision, digest) = (watch.seen, watch.digest);
    if let Outcome::Read(read) = &outcome {
        decision.what = What::Read;
        decision.detail = u64::from(read.at.segment) << 32 | u64::from(read.at.offset);
    }
    decision.evicted = shard.stats.evictions - before.0;
    decision.state = fold(state_of(shard, digest));
    let corrupt = shard.stats.flash_corrupt > before.1;
    (outcome, decision, Got::of(had == Some(true), corrupt))
}

/// Verifies a suspect; see [`execute`].
pub(super) fn verify<M: ObjectMemory>(
    shard: &mut KvShard<M>,
    now: Now,
    read: &FlashRead,
    bytes: Option<&[u8]>,
) -> (Decision, Got) {
    let before = shard.stats.flash_corrupt;
    shard.verify(now, read, bytes);
    let got = Got::of(bytes.is_some(), shard.stats.flash_corrupt > before);
    (plain(shard, What::Done, 0), got)
}

/// The decision on an input that is answered by `what` and has evicted nothing on the way.
pub(super) fn plain<M: ObjectMemory>(shard: &KvShard<M>, what: What, detail: u64) -> Decision {
    Decision::of(what, detail, state_of(shard, 0))
}

/// A call of the log.
pub(super) fn log_call<M: ObjectMemory, R>(
    shard: &mut KvShard<M>,
    call: impl FnOnce(&mut KvShard<M>) -> R,
) -> (R, Decision) {
    let before = shard.stats.evictions;
    let answer = call(shard);
    let mut decision = plain(shard, What::Done, 0);
    decision.evicted = shard.stats.evictions - before;
    (answer, decision)
}

pub(super) fn free_room<M: ObjectMemory>(shard: &mut KvShard<M>, now: Now) -> (bool, Decision) {
    let before = shard.stats.evictions;
    let more = shard.make_free_room(now);
    let mut decision = plain(shard, if more { What::Yes } else { What::No }, 0);
    decision.evicted = shard.stats.evictions - before;
    (more, decision)
}

pub(super) fn expire<M: ObjectMemory>(
    shard: &mut KvShard<M>,
    now: Now,
    all: bool,
) -> (bool, Decision) {
    let more = shard.expire(now, all);
    (more, plain(shard, if more { What::Yes } else { What::No }, 0))
}

pub(super) fn training_due<M: ObjectMemory>(
    shard: &mut KvShard<M>,
    now: Now,
) -> (Option<AppId>, Decision) {
    let due = shard.admission.training_due(now.mono);
    let decision = match due {
        Some(app) => plain(shard, What::Yes, u64::from(app.0) + 1),
        None => plain(shard, What::No, 0),
    };
    (due, decision)
}

pub(super) fn training_set<M: ObjectMemory>(
    shard: &mut KvShard<M>,
    app: AppId,
    now: Now,
) -> (Option<larder_policy::learn::TrainingSet>, Decision) {
    let set = shard.admission.take_training_set(app, now.mono);
    let samples = set.as_ref().map_or(0, |s| s.samples.len() as u64 + 1);
    let mut h = state_of(shard, samples);
    for sample in set.iter().flat_map(|s| &s.samples) {
        h = sample.x.iter().fold(mix(h, u64::from(sample.positive)), |h, &x| mix(h, u64::from(x)));
    }
    (set, Decision::of(What::Samples, samples, h))
}

/// Swallows effects: in a replay they come back as inputs of their own.
struct Nobody;

impl Effects for Nobody {
    fn reply(&mut self, _: Reply<'_>) {}
    fn verify(&mut self, _: FlashRead) {}
    fn wake_cleaner(&mut self) {}
}

/// Gives a shard a recorded input and says what it decides. `bytes` are what flash holds where the input says that it was
/// read. [`Input::LogCall`] and [`Input::Step`] are not for a shard alone and change nothing.
pub(in crate::kv) fn replay<M: ObjectMemory>(
    shard: &mut KvShard<M>,
    now: Now,
    input: &Input<'_>,
    bytes: Option<&[u8]>,
) -> Decision {
    match input {
        Input::Execute { request, fetched } => {
            let fetched = fetched.as_ref().map(|(read, _)| Fetched { read, bytes });
            execute(shard, now, request, fetched, &mut Nobody).1
        }
        Input::Verify { read, .. } => verify(shard, now, read, bytes).0,
        Input::Flush { at } => {
            shard.flush(now, *at);
            plain(shard, What::Done, 0)
        }
        Input::FreeRoom => free_room(shard, now).1,
        Input::Await { key_len, value_len } => {
            let calls = shard.await_room(*key_len, *value_len);
            plain(shard, What::Done, u64::from(calls))
        }
        Input::Expire { all } => expire(shard, now, *all).1,
        Input::TrainingDue => training_due(shard, now).1,
        Input::TrainingSet { app } => training_set(shard, *app, now).1,
        Input::Install { app, model } => {
            shard.admission.install(*app, (**model).clone(), now.mono);
            plain(shard, What::Done, 0)
        }
        Input::LogCall | Input::Step { .. } => plain(shard, What::Done, 0),
    }
}

/// A digest of `words`.
pub(super) fn mix_all(seed: u64, words: &[u64]) -> u64 {
    words.iter().fold(seed, |h, &x| mix(h, x))
}
