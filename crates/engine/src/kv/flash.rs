//! Objects on flash: finding them, forgetting them, bringing them back.
//!
//! # What must never happen
//! A deleted or overwritten version of a key coming back. Records on flash never change, so a dead record of key K stays
//! readable until its segment goes; what keeps it from being found is that **no index entry of K's family leads to
//! it** (a family is what the index cannot tell apart: same tag, same two buckets). It is not enough to remove
//! K's own entry: another key J of the family may have an entry in the same segment whose function names, *for K*, the
//! page of K's record, and through J's entry K's page would be read, and K's dead record found in it. Hence:
//! - removing K removes every entry of the family that leads K to the same place ([`KvShard::remove_flash`]);
//! - a plain set, which does not wait for flash, removes the whole family's entries, and puts one back only after a read
//!   has shown that K's record is not where that entry would lead K ([`KvShard::verify`]);
//! - an object that changed while it was staged is dead in its segment from the start: at publication no entry
//!   that would lead to it is inserted (see `clean`), and its key does not join that segment a second time.

use larder_base::{AppId, Now, ObjectHash};
use larder_format::{Find, Record, find, find_extent};
use larder_policy::admission::{AdmissionPolicy, Departure};

use super::api::{Effects, Fetched, FlashRead, Location, Request};
use super::planted::Planted;
use super::shard::{KvShard, MAX_SUSPECTS, NewObject, Suspect};
use crate::dram::{Accesses, Block, Gaps, ObjectHeader, ObjectMemory, State};
use crate::index::{Candidates, Entry, FlashIndex, Place};
use crate::segment::span;

/// More entries than two buckets have slots: the bound of a loop that removes identical ones.
pub(super) const MAX_TWINS: usize = 2 * FlashIndex::SLOTS_PER_BUCKET as usize;

/// An object that a request found on flash.
pub(super) struct Found<'f> {
    pub(super) entry: Entry,
    pub(super) record: Record<'f>,
}

/// Where a request stands with flash.
pub(super) enum Located<'f> {
    Read(FlashRead),
    Found(Found<'f>),
    Absent,
}

impl<M: ObjectMemory> KvShard<M> {
    /// Where the object of `hash` would lie if `entry` were its.
    pub(super) fn location(&self, hash: ObjectHash, entry: &Entry) -> Location {
        let (segment, generation) = (entry.segment, self.generations[usize::from(entry.segment)]);
        let flash = &self.config.flash;
        let extent = matches!(entry.place, Place::Extent { .. });
        // (An extent alone may go beyond its segment.)
        let to_end = if extent { flash.to_end(segment) } else { flash.segment_bytes.into() };
        let (offset, len) = span(entry.place, hash, flash.pages(), to_end).unwrap_or((0, 0));
        Location { segment, generation, offset, len, extent }
    }

    fn find_in<'f>(&self, at: &Location, bytes: &'f [u8], key: &[u8]) -> Find<'f> {
        let filling = self.filling(at.segment, at.generation);
        if self.planted(Planted::KeyNotCompared)
            && let Some(first) =
                larder_format::walk(bytes, larder_format::Kind::Small, filling).next()
        {
            return Find::Found(first.record);
        }
        if at.extent { find_extent(bytes, key, filling) } else { find(bytes, key, filling) }
    }

    /// Looks for a request's object among its candidates on flash.
    pub(super) fn locate<'f>(
        &mut self,
        now: Now,
        req: &Request<'_>,
        fetched: Option<Fetched<'f>>,
    ) -> Located<'f> {
        if self.config.flash.segments == 0 {
            return Located::Absent;
        }
        let candidates = self.index.probe(req.hash);
        if candidates.is_empty() && self.suspects.is_empty() {
            return Located::Absent;
        }
        let mut tried = [None; 4];
        let any_read = fetched.is_some();
        if let Some(fetched) = fetched {
            tried = fetched.read.tried;
            let at = fetched.read.at;
            // The entry may have gone, or its segment been filled anew, while the read was under way: then the bytes
            // say nothing of the present.
            let owner = candidates.iter().find(|e| self.location(req.hash, e) == at);
            if owner.is_none()
                && self.planted(Planted::GoneEntryBelieved)
                && let Some(Find::Found(record)) =
                    fetched.bytes.map(|b| self.find_in(&at, b, req.key))
            {
                let place = Place::Page { function: 0 };
                return Located::Found(Found {
                    entry: Entry { segment: at.segment, place, clock: 0 },
                    record,
                });
            }
            if let Some(entry) = owner {
                match fetched.bytes.map(|bytes| self.find_in(&at, bytes, req.key)) {
                    Some(Find::Found(record)) => {
                        if record.meta().expiry.is_past(now.wall)
                            && !self.planted(Planted::ExpiredServed)
                        {
                            self.stats.expired += 1;
                            let access =
                                self.access(req.hash, req.app, now.mono, record.len() as u32);
                            self.admission.on_departure(&access, Departure::Removed);
                            self.remove_flash(req.hash, &entry);
                            return Located::Absent;
                        }
                        return Located::Found(Found { entry, record });
                    }
                    Some(Find::Absent) => {
                        self.stats.flash_reads_false += 1;
                        note(&mut tried, at);
                    }
                    Some(Find::Corrupt) => {
                        // Whoever's it was, it cannot be read any more: forget it.
                        self.stats.flash_corrupt += 1;
                        self.remove_flash(req.hash, &entry);
                    }
                    None => {
                        self.stats.flash_read_errors += 1;
                        self.remove_flash(req.hash, &entry);
                    }
                }
            } else if let Some(i) = self.suspect_at(req.hash, &at) {
                match fetched.bytes.map(|bytes| self.find_in(&at, bytes, req.key)) {
                    // This very object is the innocent, and its latest version. Its entry is not put back here: it may
                    // lead the overwritten key to its dead version all the same.
                    Some(Find::Found(record)) if !record.meta().expiry.is_past(now.wall) => {
                        return Located::Found(Found { entry: self.suspects[i].entry, record });
                    }
                    Some(Find::Found(_)) => {
                        // Expired: nothing may lead to it any more, not even after a clock went back.
                        let entry = self.suspects[i].entry;
                        self.remove_flash(req.hash, &entry);
                    }
                    Some(Find::Absent) => note(&mut tried, at),
                    unread @ (Some(Find::Corrupt) | None) => {
                        self.suspects.swap_remove(i);
                        self.stats.flash_corrupt += u64::from(unread.is_some());
                        self.stats.innocents_lost += 1;
                    }
                }
            }
        }
        let full = tried.iter().all(Option::is_some);
        // What was read may have led to the removal of entries.
        let candidates = if any_read { self.index.probe(req.hash) } else { candidates };
        for entry in candidates.iter() {
            let at = self.location(req.hash, &entry);
            if tried.contains(&Some(at)) {
                continue;
            }
            if full || at.generation == 0 || at.len == 0 {
                // Five false candidates at once, or an entry that leads nowhere: forget it rather than leave unknown
                // whether it is this key's.
                self.remove_flash(req.hash, &entry);
                self.stats.innocents_lost += 1;
                continue;
            }
            return Located::Read(FlashRead { at, hash: req.hash, tried });
        }
        if !full && !self.suspects.is_empty() {
            let family = self.index.family(req.hash);
            let next = self.suspects.iter().find_map(|s| {
                let at = self.location(req.hash, &s.entry);
                let ours = s.family == family
                    && s.overwritten != req.hash
                    && at.generation == s.generation;
                (ours && !tried.contains(&Some(at))).then_some(at)
            });
            if let Some(at) = next {
                return Located::Read(FlashRead { at, hash: req.hash, tried });
            }
        }
        Located::Absent
    }

    fn suspect_at(&self, hash: ObjectHash, at: &Location) -> Option<usize> {
        let family = self.index.family(hash);
        self.suspects.iter().position(|s| {
            s.family == family
                && s.overwritten != hash
                && s.generation == at.generation
                && self.location(hash, &s.entry) == *at
        })
    }

    /// Removes an object's entry and every other entry of its family that leads it to the same place, and whatever of
    /// its family waits for verification.
    pub(super) fn remove_flash(&mut self, hash: ObjectHash, entry: &Entry) {
        let at = self.location(hash, entry);
        let mut removed = 0u64;
        for other in self.index.probe(hash).iter() {
            if self.location(hash, &other) != at {
                continue;
            }
            for _ in 0..MAX_TWINS {
                if self.index.remove(hash, other.segment, other.place).is_none() {
                    break;
                }
                self.entry_gone(other.segment);
                removed += 1;
                if self.planted(Planted::TwinKept) {
                    break;
                }
            }
        }
        self.stats.innocents_lost += removed.saturating_sub(1);
        if !self.suspects.is_empty() {
            self.cancel_suspects(hash);
        }
        self.access_times.remove(hash.fingerprint());
    }

    /// Suspects of this family may lead to the version that is being removed: they are forgotten.
    fn cancel_suspects(&mut self, hash: ObjectHash) {
        let family = self.index.family(hash);
        let before = self.suspects.len();
        self.suspects.retain(|s| s.family != family);
        self.stats.innocents_lost += (before - self.suspects.len()) as u64;
    }

    pub(super) fn entry_gone(&mut self, segment: u16) {
        // Saturating, because memory that a test has declared dead keeps its entries; `validate` compares the counts.
        let live = &mut self.live[usize::from(segment)];
        *live = live.saturating_sub(1);
    }

    /// What a plain set does to flash: afterwards no older version of the key can be found. Returns whether there may
    /// have been one.
    pub(super) fn disown(&mut self, hash: ObjectHash, key: &[u8], fx: &mut impl Effects) -> bool {
        if self.config.flash.segments == 0 {
            return false;
        }
        if !self.suspects.is_empty() {
            self.cancel_suspects(hash);
        }
        let removed = self.index.remove_matching(hash);
        if removed.is_empty() {
            return false;
        }
        self.access_times.remove(hash.fingerprint());
        self.stats.innocents_lost += removed.omitted() as u64;
        let family = self.index.family(hash);
        let mut seen: [Option<Location>; 8] = [None; 8];
        for (i, entry) in removed.iter().enumerate() {
            self.entry_gone(entry.segment);
            let at = self.location(hash, &entry);
            let twin = seen.contains(&Some(at));
            seen[i] = Some(at);
            // Identical entries: at most one comes back, and only if the page does not hold the key.
            if twin || at.generation == 0 {
                self.stats.innocents_lost += u64::from(twin);
                continue;
            }
            if self.suspects.len().max(self.verifying) >= MAX_SUSPECTS {
                self.unverified += 1;
                continue;
            }
            self.verifying += 1;
            self.suspects.push(Suspect {
                family,
                entry,
                generation: at.generation,
                overwritten: hash,
                key: key.into(),
            });
            fx.verify(FlashRead { at, hash, tried: [None; 4] });
        }
        if removed.omitted() > 0 {
            // Their segments are not known here; recount.
            self.recount();
        }
        true
    }

    /// Counts index entries per segment anew: only after the index removed more than it could name.
    fn recount(&mut self) {
        self.live.fill(0);
        let live = &mut self.live;
        self.index.for_each(|e| live[usize::from(e.segment)] += 1);
    }

    /// Suspects that were forgotten because too many verifications were under way.
    pub fn unverified(&self) -> u64 {
        self.unverified
    }

    /// The bytes of a verification that [`Effects::verify`] asked for (`None`: not read). An entry whose place does not
    /// hold the key that was overwritten was another's and is put back.
    pub fn verify(&mut self, now: Now, read: &FlashRead, bytes: Option<&[u8]>) {
        self.verifying = self.verifying.saturating_sub(1);
        self.flush_if_due(now);
        let at = read.at;
        let place = self.suspects.iter().position(|s| {
            s.overwritten == read.hash
                && s.generation == at.generation
                && self.location(read.hash, &s.entry) == at
        });
        let Some(i) = place else { return };
        let suspect = self.suspects.swap_remove(i);
        match bytes.map(|bytes| self.find_in(&at, bytes, &suspect.key)) {
            Some(Find::Absent) => self.put_back(&suspect),
            Some(Find::Found(_)) if self.planted(Planted::SuspectRestoredBlindly) => {
                self.put_back(&suspect)
            }
            Some(Find::Found(_)) => {}
            Some(Find::Corrupt) => self.stats.flash_corrupt += 1,
            None => self.stats.innocents_lost += 1,
        }
    }

    fn put_back(&mut self, suspect: &Suspect) {
        if self.generations[usize::from(suspect.entry.segment)] != suspect.generation {
            return;
        }
        self.stats.innocents_restored += 1;
        self.insert_entry(suspect.overwritten, suspect.entry);
    }

    /// Inserts an index entry and accounts for those that it forces out.
    pub(super) fn insert_entry(&mut self, hash: ObjectHash, entry: Entry) {
        let inserted = self.index.insert(hash, entry);
        self.live[usize::from(entry.segment)] += 1;
        let forced = (inserted.forced.len() + inserted.forced.omitted()) as u64;
        self.index_room.inserted(forced);
        self.note_index_use();
        if forced > 0 {
            self.forced_out(&inserted.forced);
        }
    }

    /// Accounts for entries that were forced out of the index.
    pub(super) fn forced_out(&mut self, forced: &Candidates) {
        let omitted = forced.omitted() as u64;
        for entry in forced.iter() {
            self.entry_gone(entry.segment);
            self.stats.forced_evictions += 1;
        }
        if omitted > 0 {
            self.stats.forced_evictions += omitted;
            self.recount();
        }
    }

    /// Puts a record from flash into DRAM. Its entry is gone already.
    pub(super) fn insert_record(
        &mut self,
        now: Now,
        hash: ObjectHash,
        record: &Record<'_>,
        clock: u8,
        last_access: u32,
        fetched: bool,
    ) -> Option<(Block, ObjectHeader)> {
        let m = record.meta();
        let mut state = State::default().with_clock(clock).with(State::SURVIVOR);
        for (set, bit) in [(fetched, State::FETCHED), (m.stale, State::STALE), (m.won, State::WON)]
        {
            state = if set { state.with(bit) } else { state };
        }
        let new = NewObject {
            key: record.key(),
            hash,
            app: AppId(m.app.0.min(AppId::OTHER.0)),
            value: [record.value(), b""],
            flags: m.flags,
            expiry: m.expiry,
            cas: m.cas,
            state,
        };
        let (block, mut h) = self.insert_dram(now, &new)?;
        // It was read at least once, if it was; the features of longer ago are not on flash.
        h.written = now.millis32().wrapping_sub(last_access.saturating_mul(1000));
        h.accesses = Accesses::known(0, u32::from(fetched), Gaps::default());
        h.save(&mut self.arena, block);
        Some((block, h))
    }
}

fn note(tried: &mut [Option<Location>; 4], at: Location) {
    if let Some(free) = tried.iter_mut().find(|t| t.is_none()) {
        *free = Some(at);
    }
}
