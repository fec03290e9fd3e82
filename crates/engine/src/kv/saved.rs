//! Objects in DRAM that outlive the process: handed out at a stop, taken back at the next start.
//!
//! A key has one copy. What is in DRAM is its latest version, and no entry of the flash index leads to another one; so an object
//! is put back without a look at the index. That holds as long as nobody has answered for the key in between: the caller
//! proves that, by the number of the run.

use larder_base::{AppId, Expiry, Now, ObjectHash, UnixSecs};

use super::config::object_fits;
use super::planted::Planted;
use super::shard::{KvShard, NewObject};
use crate::dram::{Accesses, Gaps, ObjectHeader, ObjectMemory, State};

/// Milliseconds are kept in 32 bits that wrap: a longer time is told as this one.
const LONGEST: u32 = i32::MAX as u32;

/// An object in DRAM with all that is known of it. Times are milliseconds before the moment of saving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved<'a> {
    /// The key, 1 to 250 bytes.
    pub key: &'a [u8],
    /// The value.
    pub value: &'a [u8],
    /// Client flags.
    pub flags: u32,
    /// Expiry.
    pub expiry: Expiry,
    /// CAS unique.
    pub cas: u64,
    /// The application, as the run that saves it numbers them.
    pub app: AppId,
    /// Rank, 0..=3.
    pub clock: u8,
    /// It has been read since it was stored.
    pub fetched: bool,
    /// Marked stale (meta protocol).
    pub stale: bool,
    /// A client has won the right to refill it.
    pub won: bool,
    /// It came back from a reclaimed segment.
    pub survivor: bool,
    /// Since it was written.
    pub age: u32,
    /// Since the last access.
    pub idle: u32,
    /// Reads since it was written.
    pub reads: u32,
    /// Longest time between two reads.
    pub max_gap: u32,
    /// From the write to the first read.
    pub first_read: u32,
    /// Between the last two reads.
    pub last_gap: u32,
}

impl<M: ObjectMemory> KvShard<M> {
    /// The flush that has been announced and has not come due, if there is one.
    pub fn announced_flush(&mut self, now: Now) -> Option<UnixSecs> {
        self.flush_if_due(now);
        self.flush_announced()
    }

    /// Hands every object in DRAM that has not expired to `keep`, in the order in which CLOCK would come to them: put back in
    /// that order, they stand as they stood.
    ///
    /// # Errors
    /// The first error of `keep`, which ends it.
    pub fn save<E>(
        &mut self,
        now: Now,
        mut keep: impl FnMut(&Saved<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.flush_if_due(now);
        let ms = now.millis32();
        let mut at = self.hand;
        loop {
            if self.arena.is_used(at) {
                let h = ObjectHeader::load(&self.arena, at);
                if !h.expiry.is_past(now.wall) {
                    let key = h.key(&self.arena, at);
                    let gaps = h.accesses.gaps();
                    keep(&Saved {
                        key: &key,
                        value: h.value(&self.arena, at),
                        flags: h.flags,
                        expiry: h.expiry,
                        cas: h.cas,
                        app: h.app,
                        clock: h.state.clock(),
                        fetched: h.state.has(State::FETCHED),
                        stale: h.state.has(State::STALE),
                        won: h.state.has(State::WON),
                        survivor: h.state.has(State::SURVIVOR),
                        age: ms.wrapping_sub(h.written),
                        idle: ms.wrapping_sub(h.last()),
                        reads: h.accesses.reads(),
                        max_gap: gaps.max,
                        first_read: gaps.first_read,
                        last_gap: gaps.last,
                    })?;
                }
            }
            at = self.arena.next(at);
            if at == self.hand {
                return Ok(());
            }
        }
    }

    /// Puts an object back that [`KvShard::save`] handed out, `away` milliseconds ago, before the first request. Where there is no
    /// room, CLOCK makes some, and the lowest in rank go. False: it has expired, its key is there already, it is larger than an
    /// object may be, or there is no room for it.
    pub fn restore(&mut self, now: Now, hash: ObjectHash, saved: &Saved<'_>, away: u32) -> bool {
        let too_large = !object_fits(saved.key.len(), saved.value.len(), self.config.max_object);
        if saved.key.is_empty()
            || saved.key.len() > usize::from(u8::MAX)
            || too_large
            || saved.expiry.is_past(now.wall)
            || self.table.find(&self.arena, hash.dram(), saved.key).is_some()
        {
            return false;
        }
        let mut state = State::default().with_clock(saved.clock.min(self.config.clock_max));
        for (set, bit) in [
            (saved.fetched, State::FETCHED),
            (saved.stale, State::STALE),
            (saved.won, State::WON),
            (saved.survivor, State::SURVIVOR),
        ] {
            state = if set { state.with(bit) } else { state };
        }
        let cas = if self.planted(Planted::RestoredUnderNewCas) {
            self.take_cas(None)
        } else {
            saved.cas
        };
        let new = NewObject {
            key: saved.key,
            hash,
            app: AppId(saved.app.0.min(AppId::OTHER.0)),
            value: [saved.value, b""],
            flags: saved.flags,
            expiry: saved.expiry,
            cas,
            state,
        };
        let Some((block, mut h)) = self.insert_dram(now, &new) else { return false };
        let since = |span: u32| span.saturating_add(away).min(LONGEST);
        let (age, idle) = (since(saved.age.max(saved.idle)), since(saved.idle));
        h.written = now.millis32().wrapping_sub(age);
        let gaps = Gaps { max: saved.max_gap, first_read: saved.first_read, last: saved.last_gap };
        h.accesses = Accesses::known(age - idle, saved.reads, gaps);
        h.save(&mut self.arena, block);
        true
    }
}
