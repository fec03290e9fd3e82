//! What the cleaner does inside a shard: pick what goes to flash and what leaves DRAM, publish what is durable, take back
//! what a reclaimed segment held. The cleaner itself is [`FlashLog`](super::log::FlashLog), which calls these one after
//! another with the shard locked for one call at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use larder_base::{AppId, Now, ObjectHash, UnixSecs};
use larder_format::page::{EXTENT_ALIGN, SMALL_MAX};
use larder_format::{Kind, Record, RecordMeta, claimed, walk};
use larder_policy::admission::{AdmissionPolicy, Candidate, Departure, Pool, Reason, Verdict};

use super::api::Location;
use super::flash::MAX_TWINS;
use super::log::Ends;
use super::planted::Planted;
use super::shard::KvShard;
use super::too_large::TooLarge;
use crate::dram::{Block, ObjectHeader, ObjectMemory, State};
use crate::index::{Entry, Family, Place};
use crate::segment::{NoRoom, Placed, extent_length, place_of};

/// Blocks that one [`KvShard::stage`] looks at, at most: bounds how long the shard stays locked (well under a
/// millisecond).
const WINDOW: usize = 2048;

/// Blocks of which the CLOCK hand knows a little ahead what will be asked, so that the waits for memory overlap.
const AHEAD: usize = 8;

/// An object that was copied into a segment which is not yet durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staged {
    /// Its key's hash.
    pub hash: ObjectHash,
    /// Where it lies in DRAM.
    pub block: Block,
    /// Which version.
    pub cas: u64,
    /// The segment where its record begins, and which filling of it.
    pub segment: u16,
    /// See `segment`.
    pub generation: u64,
    /// Where it lies in the segment.
    pub place: Place,
    /// Bytes of its record.
    pub bytes: u32,
}

/// Objects that were staged for one kind of segment of one drive, and are not published.
#[derive(Clone, Debug, Default)]
pub(super) struct OnTheirWay {
    /// How many there were.
    pub(super) staged: u32,
    /// Fingerprints of those that changed since: a second copy of such a key must not join the first in one segment.
    pub(super) dead: BTreeSet<u64>,
}

/// Where staged objects have come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The place of the drive.
    pub drive: usize,
    /// The kind of segment.
    pub kind: Kind,
    /// A record goes on in the next one.
    pub goes_on: bool,
}

/// Where a shard's objects are staged: the log's open segments.
pub trait StageSink {
    /// The place of its drive.
    fn drive(&self) -> usize {
        0
    }

    /// Copies an object into the open segment of its kind.
    ///
    /// # Errors
    /// When it has no room there; the object stays in DRAM.
    fn offer(
        &mut self,
        hash: ObjectHash,
        meta: &RecordMeta,
        key: &[u8],
        value: &[u8],
        block: Block,
    ) -> Result<(), NoRoom>;

    /// Whether the open segment of this kind takes nothing more before it has been written.
    fn is_full(&self, kind: Kind) -> bool;

    /// Has the open segment of this kind written as it is. Returns false when there is none, or nothing in it.
    fn close(&mut self, kind: Kind) -> bool;

    /// Takes `bytes` from the write budget.
    fn spend(&mut self, bytes: u32) -> bool;
}

/// What a call of [`KvShard::stage`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageReport {
    /// Objects staged.
    pub staged: u64,
    /// Bytes of their blocks.
    pub staged_bytes: u64,
    /// Objects evicted.
    pub evicted: u64,
    /// Objects that CLOCK spared this time.
    pub spared: u64,
    /// Nothing more is to be done before a segment has been written: what is wanted on flash waits for the next one.
    pub waits: bool,
    /// The shard has as much free room as it wants, what is staged counted in.
    pub satisfied: bool,
}

/// What became of an object that was to be staged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Staged,
    /// The open segment has no room for it; the next one may.
    Later,
    /// The open segment takes nothing more before it has been written.
    Full,
    /// The open segment holds an earlier version of it, which must be written first.
    Joins,
    /// The budget is spent, or it fits no segment.
    Never,
}

/// How hot the flash is in a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Heat {
    /// Entries with a CLOCK above zero.
    pub hot: u64,
    /// All entries.
    pub entries: u64,
}

/// What is known of the blocks that the CLOCK hand comes to next.
#[derive(Default)]
struct Lookout {
    /// The block after them; none behind the memory's end.
    at: Option<Block>,
    /// Those that CLOCK will give up, and their hashes: the one of step n at n modulo [`AHEAD`].
    coming: [Option<(Block, ObjectHash)>; AHEAD],
}

/// An object of the window that admission wants on flash.
struct Wanted {
    score: f32,
    /// Where it lies: those behind the memory's end before the others, then in order.
    place: (bool, usize),
    block: Block,
    hash: ObjectHash,
    header: ObjectHeader,
}

impl<M: ObjectMemory> KvShard<M> {
    /// Makes free room until the shard has as much as it wants, or a segment is full, or the window has been looked
    /// through: stages what admission wants on flash, evicts by CLOCK what it does not.
    pub fn stage(&mut self, now: Now, sink: &mut impl StageSink) -> StageReport {
        self.flush_if_due(now);
        self.cleaner_came();
        self.follow_index(now);
        let mut report = StageReport::default();
        let flash = self.config.flash.segments > 0;
        if flash
            && self.admission.pool() == Pool::Everything
            && self.wants_room()
            && self.may_stage()
        {
            self.stage_best(now, sink, &mut report);
        }
        let mut looked = 0;
        let mut lookout = Lookout::default();
        while self.wants_room() && looked < WINDOW && self.may_stage() && !report.waits {
            self.look_out(&mut lookout, looked);
            looked += 1;
            self.clean_step(now, flash, &lookout.coming, sink, &mut report);
        }
        report.satisfied = !self.wants_room();
        if report.satisfied {
            self.settle_extra_room();
        }
        report
    }

    /// Without flash: evicts by CLOCK until the shard has the free room it wants, a window at a time. Returns whether
    /// more is needed.
    pub fn make_free_room(&mut self, now: Now) -> bool {
        self.flush_if_due(now);
        self.cleaner_came();
        for _ in 0..WINDOW {
            if !self.wants_room() {
                self.settle_extra_room();
                return false;
            }
            self.clock_step(now, true, true);
        }
        self.wants_room()
    }

    /// The shard has the room it wants: if no write had to evict since the last time, it may want less.
    fn settle_extra_room(&mut self) {
        if self.stats.evictions_direct == self.direct_before {
            self.extra_room -= self.extra_room.div_ceil(16);
        }
        self.ahead.settle();
        self.direct_before = self.stats.evictions_direct;
    }

    fn wants_room(&self) -> bool {
        self.soon_free() < self.config.free_high + self.room_ahead() || self.is_starved()
    }

    /// At most half of the DRAM is staged: the rest can make room for a write at any time. More only happens where DRAM
    /// is small beside a segment, which is then written as full as it is.
    pub(super) fn may_stage(&self) -> bool {
        self.staged_bytes < self.arena.capacity() / 2
    }

    /// Keeps a look-out [`AHEAD`] blocks before the hand, which is about to make its `step`-th step of a call. One block with
    /// each step: each says where the next is, and waiting for several in a row would be most of the work.
    fn look_out(&self, lookout: &mut Lookout, step: usize) {
        // The look-out ends with the memory, so that the hand, which may free a block, never comes up from behind.
        if step == 0 || self.hand == self.arena.first() {
            lookout.at = Some(self.hand);
            (step..step + AHEAD - 1).for_each(|number| self.look_at_next(lookout, number));
        }
        self.look_at_next(lookout, step + AHEAD - 1);
        if let Some((_, hash)) = lookout.coming[(step + AHEAD / 2) % AHEAD] {
            self.admission.warm_candidate(hash);
        }
    }

    /// Asks for the places in the tables of the next block, if CLOCK will give it up.
    fn look_at_next(&self, lookout: &mut Lookout, number: usize) {
        let coming = &mut lookout.coming[number % AHEAD];
        *coming = None;
        let Some(block) = lookout.at else { return };
        let next = self.arena.next(block);
        lookout.at = (next != self.arena.first()).then_some(next);
        if !self.arena.is_used(block) {
            return;
        }
        let h = ObjectHeader::load(&self.arena, block);
        if h.state.has(State::STAGED) || h.state.clock() != 0 {
            return;
        }
        let hash = self.hash_of(block, &h);
        self.table.warm(hash.dram());
        self.admission.warm(hash);
        *coming = Some((block, hash));
    }

    /// One step of the CLOCK hand: what CLOCK gives up is offered to admission (which for `Pool::Everything` has had its
    /// say already), and evicted if it is not wanted.
    fn clean_step(
        &mut self,
        now: Now,
        flash: bool,
        coming: &[Option<(Block, ObjectHash)>; AHEAD],
        sink: &mut impl StageSink,
        report: &mut StageReport,
    ) {
        let block = self.hand;
        self.hand = self.arena.next(block);
        if !self.arena.is_used(block) {
            return;
        }
        let h = ObjectHeader::load(&self.arena, block);
        if h.state.has(State::STAGED) {
            return;
        }
        if !self.clock_gives_up(now, block, &h, true) {
            report.spared += 1;
            return;
        }
        // Nothing is put into a block while room is made: one that was looked at holds the same object.
        let known = coming.iter().flatten().find(|(at, _)| *at == block);
        let hash = known.map_or_else(|| self.hash_of(block, &h), |(_, hash)| *hash);
        if h.expiry.is_past(now.wall) {
            self.stats.expired += 1;
            self.remove_dram(hash, block, &h, Some((now, Departure::Removed)));
            return;
        }
        let victims = flash && self.admission.pool() == Pool::Victims;
        if victims && sink.is_full(Self::kind_of(&h)) && self.wanted.len() >= self.most_wanted() {
            // Admission must not hear twice of one eviction, nor a rate be charged twice: no more is judged than can be remembered.
            self.hand = block;
            report.waits = true;
            return;
        }
        // Asked once: a write that wanted the room may have done so, or it found no room in a segment. What its application may have on
        // flash can have changed since.
        if victims
            && self.may_go(&h)
            && (self.wanted.remove(hash.dram()) || self.judged(now, hash, &h).is_some())
        {
            let short = self.is_starved();
            let fate = self.stage_one(now, hash, block, &h, sink, report);
            match fate {
                Fate::Staged => return,
                // What is wanted and does not fit stays for the next round. It must not be evicted meanwhile however short
                // memory is: writing the segment frees more, and soon.
                Fate::Later | Fate::Full => {
                    self.want(hash);
                    report.waits |= fate == Fate::Full && short;
                    return;
                }
                Fate::Joins if !short => return,
                Fate::Joins | Fate::Never => {}
            }
        }
        self.evict(now, hash, block, &h);
        report.evicted += 1;
    }

    /// Looks through a window of DRAM and stages the best of what admission wants (Flashield §4: candidates are ranked
    /// by score; here within the window, so that the shard is never locked for a whole pass).
    fn stage_best(&mut self, now: Now, sink: &mut impl StageSink, report: &mut StageReport) {
        // By score, then as they lie: those behind the memory's end, where the window begins anew, before the others.
        let mut wanted: Vec<Wanted> = Vec::new();
        let start = self.scan;
        let mut first_turn = true;
        for looked in 0..WINDOW {
            let block = self.scan;
            if looked > 0 && block == start {
                break;
            }
            self.scan = self.arena.next(block);
            let place = (first_turn, looked);
            first_turn &= self.scan != self.arena.first();
            if !self.arena.is_used(block) {
                continue;
            }
            let h = ObjectHeader::load(&self.arena, block);
            if h.state.has(State::STAGED) || h.expiry.is_past(now.wall) {
                continue;
            }
            let hash = self.hash_of(block, &h);
            if let Some(score) = self.consider(now, hash, &h) {
                wanted.push(Wanted { score, place, block, hash, header: h });
            }
        }
        wanted.sort_by(|a, b| b.score.total_cmp(&a.score).then_with(|| a.place.cmp(&b.place)));
        for Wanted { block, hash, header: h, .. } in wanted {
            if !self.wants_room() || !self.may_stage() {
                break;
            }
            // What does not fit now is looked at again on the next pass.
            self.stage_one(now, hash, block, &h, sink, report);
        }
    }

    /// Admission's word on an object: its score if it should go to flash.
    pub(super) fn consider(&mut self, now: Now, hash: ObjectHash, h: &ObjectHeader) -> Option<f32> {
        if self.may_go(h) { self.judged(now, hash, h) } else { None }
    }

    /// Whether an object may go to flash at all, by its size and its application's share.
    fn may_go(&mut self, h: &ObjectHeader) -> bool {
        let size = Self::record_bytes(h);
        let too_large = u64::from(size) > self.too_large.limit;
        if too_large {
            self.too_large.met(size.into());
        }
        if too_large || size < self.config.flash_min_record {
            self.admission.count_rejected(Reason::Size);
            return false;
        }
        if self.shares_matter {
            let all = self.config.flash.capacity() / u64::from(self.config.shards);
            let mine = self.apps.of(h.app).flash_bytes;
            if self.config.shares.over_ceiling(h.app, mine, u64::from(size), all) {
                self.admission.count_rejected(Reason::AppCeiling);
                return false;
            }
        }
        true
    }

    /// Objects that flash cannot hold for their size.
    pub fn too_large(&self) -> &TooLarge {
        &self.too_large
    }

    /// The policy's word on an object.
    fn judged(&mut self, now: Now, hash: ObjectHash, h: &ObjectHeader) -> Option<f32> {
        let size = Self::record_bytes(h);
        let ttl = h.expiry.remaining(now.wall).unwrap_or(u32::MAX);
        let candidate = Candidate {
            hash,
            app: h.app,
            features: h.features(now.millis32(), size),
            survivor: h.state.has(State::SURVIVOR),
            ttl,
        };
        match self.admission.judge(&candidate, now.mono) {
            Verdict::Admit { score } => Some(score),
            Verdict::Reject(_) => None,
        }
    }

    /// The kind of segment that an object goes to.
    fn kind_of(h: &ObjectHeader) -> Kind {
        if Self::record_bytes(h) as usize > SMALL_MAX { Kind::Large } else { Kind::Small }
    }

    fn stage_one(
        &mut self,
        now: Now,
        hash: ObjectHash,
        block: Block,
        h: &ObjectHeader,
        sink: &mut impl StageSink,
        report: &mut StageReport,
    ) -> Fate {
        let size = Self::record_bytes(h);
        let kind = Self::kind_of(h);
        let joins = self.joins_dead(sink.drive(), kind, hash);
        if joins {
            return Fate::Joins;
        }
        if sink.is_full(kind) {
            return Fate::Full;
        }
        if !sink.spend(size) {
            self.admission.count_rejected(Reason::Budget);
            return Fate::Never;
        }
        let idle = now.millis32().wrapping_sub(h.last()) / 1000;
        let meta = RecordMeta {
            cas: h.cas,
            expiry: h.expiry,
            flags: h.flags,
            app: h.app,
            last_access: UnixSecs(now.wall.0.saturating_sub(idle)),
            fetched: h.state.has(State::FETCHED),
            stale: h.state.has(State::STALE),
            won: h.state.has(State::WON),
        };
        let key = h.key(&self.arena, block);
        let offered = sink.offer(hash, &meta, &key, h.value(&self.arena, block), block);
        drop(key);
        match offered {
            Ok(()) => {}
            // Large records go one behind the other: one that does not fit is at the end, and while memory is short nobody
            // waits for a smaller one.
            Err(NoRoom::Full) if kind == Kind::Large && self.is_starved() && sink.close(kind) => {
                return Fate::Full;
            }
            Err(NoRoom::Full) => return Fate::Later,
            Err(NoRoom::OtherKind | NoRoom::TooLarge) => return Fate::Never,
        }
        ObjectHeader::set_state(&mut self.arena, block, h.state.with(State::STAGED));
        let bytes = self.arena.block_bytes(block);
        self.staged_bytes += bytes;
        self.way(sink.drive(), kind).staged += 1;
        report.staged += 1;
        report.staged_bytes += bytes as u64;
        Fate::Staged
    }

    /// Hands out the value of an object that was staged, if it has not changed since. Returns whether.
    pub fn with_staged(&self, s: &Staged, f: impl FnOnce(&[u8])) -> bool {
        let Some(h) = self.still_staged(s) else { return false };
        f(h.value(&self.arena, s.block));
        true
    }

    fn still_staged(&self, s: &Staged) -> Option<ObjectHeader> {
        let held = self.table.holds(&self.arena, s.hash.dram(), s.block);
        // (A client may choose a CAS, and choose it twice.)
        held.filter(|h| {
            h.cas == s.cas && h.state.has(State::STAGED) && Self::record_bytes(h) == s.bytes
        })
    }

    /// Publishes what ends in a segment that is now durable, on the drive at that place, with all before it: every object that has not changed since it was
    /// staged moves from DRAM to the index.
    pub fn publish(
        &mut self,
        now: Now,
        segment: u16,
        generation: u64,
        to: Destination,
        staged: &[Staged],
    ) {
        self.generations[usize::from(segment)] = generation;
        // What would lead to a dead record must not be inserted at all, not even for a moment: a kill may fall between.
        let mut dead: BTreeMap<Family, Vec<(ObjectHash, Location)>> = BTreeMap::new();
        for (i, s) in staged.iter().enumerate() {
            if let Some(next) = staged.get(i + AHEAD) {
                self.table.warm(next.hash.dram());
                self.arena.warm(next.block);
            }
            if self.still_staged(s).is_some() {
                self.arena.warm_neighbours(s.block);
                continue;
            }
            let entry = Entry { segment: s.segment, place: s.place, clock: 0 };
            let at = self.location(s.hash, &entry);
            dead.entry(self.index.family(s.hash)).or_default().push((s.hash, at));
        }
        for (i, s) in staged.iter().enumerate() {
            if let Some(next) = staged.get(i + AHEAD) {
                // A whole segment's objects were looked at since: what the first loop asked for may be gone.
                self.table.warm(next.hash.dram());
                self.arena.warm(next.block);
                self.index.warm(next.hash);
            }
            let entry = Entry { segment: s.segment, place: s.place, clock: 0 };
            let Some(h) = self.still_staged(s) else {
                if self.planted(Planted::StalePublished) {
                    self.insert_entry(s.hash, Entry { clock: 1, ..entry });
                }
                continue;
            };
            let leads = |(hash, at): &(ObjectHash, Location)| self.location(*hash, &entry) == *at;
            let kin = dead.get(&self.index.family(s.hash));
            // Where it begins is reclaimed after all of it is written; what is not so is not believed.
            let gone = self.generations[usize::from(s.segment)] != s.generation;
            let led = kin.is_some_and(|kin| kin.iter().any(leads));
            if gone || led && !self.planted(Planted::DeadTwinPublished) {
                // It stays in DRAM.
                self.unstage(s, &h);
                continue;
            }
            // The rank moves along, but not at its maximum: only a read on flash puts an entry there, so that reclaim can
            // tell what was read since it came (see `most_unread`).
            let clock = h.state.clock().min(self.config.clock_max.saturating_sub(1)).max(1);
            self.insert_entry(s.hash, Entry { clock, ..entry });
            self.stats.flash_written_objects += 1;
            self.stats.flash_written_bytes += u64::from(s.bytes);
            let app = self.apps.of_mut(h.app);
            app.flash_written_objects += 1;
            app.flash_written_bytes += u64::from(s.bytes);
            let bytes = app.flash_bytes + u64::from(s.bytes);
            self.set_app_flash_bytes(h.app, bytes);
            self.remove_dram(s.hash, s.block, &h, Some((now, Departure::Moved)));
        }
        self.has_arrived(to);
        self.follow_index_after_segment(now);
    }

    /// The segment could not be written: what was staged for it stays in DRAM.
    pub fn abandon(&mut self, to: Destination, staged: &[Staged]) {
        for s in staged {
            if let Some(h) = self.still_staged(s) {
                self.unstage(s, &h);
            }
        }
        self.has_arrived(to);
    }

    /// Nothing is on its way there any more but what goes on.
    fn has_arrived(&mut self, to: Destination) {
        let way = self.way(to.drive, to.kind);
        way.staged = u32::from(to.goes_on);
        // What goes on may have changed: it does not go to flash again before its end is written.
        if !to.goes_on {
            way.dead.clear();
        }
    }

    /// What is on its way to a drive.
    fn way(&mut self, drive: usize, kind: Kind) -> &mut OnTheirWay {
        let at = drive.min(self.on_their_way.len() - 1);
        &mut self.on_their_way[at][usize::from(kind == Kind::Large)]
    }

    /// Whether an earlier version of the object is dead in the open segment of this kind, or on its way to another drive: there nothing but
    /// its CAS would tell it from this one, and not every change gives another.
    fn joins_dead(&self, drive: usize, kind: Kind, hash: ObjectHash) -> bool {
        let (kind, hash) = (usize::from(kind == Kind::Large), hash.fingerprint());
        self.on_their_way.iter().enumerate().any(|(i, ways)| match i == drive {
            true => ways[kind].dead.contains(&hash),
            false => ways.iter().any(|way| way.dead.contains(&hash)),
        })
    }

    fn unstage(&mut self, s: &Staged, h: &ObjectHeader) {
        self.staged_bytes -= self.arena.block_bytes(s.block);
        ObjectHeader::set_state(&mut self.arena, s.block, h.state.without(State::STAGED));
    }

    /// Takes back what segment `segment` held for this shard, whose bytes are about to be overwritten: the hot objects
    /// that were read go back to DRAM (Flashield §4.3), as far as `budget` bytes allow, the rest is dropped. Afterwards
    /// the index does not mention the segment. `mine` tells whether a hash belongs to this shard.
    pub fn reclaim(
        &mut self,
        now: Now,
        segment: u16,
        (kind, ends): (Kind, Ends),
        bytes: Option<&[u8]>,
        mut budget: u64,
        mine: impl Fn(ObjectHash) -> bool,
    ) -> u64 {
        self.flush_if_due(now);
        let generation = self.generations[usize::from(segment)];
        if generation == 0 {
            return 0;
        }
        self.suspects.retain(|s| s.entry.segment != segment);
        let mut taken = 0;
        let filling = self.filling(segment, generation);
        let hasher = self.config.hasher;
        if let Some(bytes) = bytes {
            let end = ends.cut.unwrap_or(bytes.len());
            let all = walk(bytes, kind, filling);
            let all = if kind == Kind::Large { all.within(ends.begins..end) } else { all };
            let mut walk = all
                .map(|walked| (hasher.hash(walked.record.key()), walked))
                .filter(|(hash, _)| mine(*hash));
            let mut coming = VecDeque::with_capacity(AHEAD);
            loop {
                while coming.len() < AHEAD
                    && let Some((hash, walked)) = walk.next()
                {
                    self.index.warm(hash);
                    self.access_times.warm(hash.fingerprint());
                    coming.push_back((hash, walked));
                }
                let Some((hash, walked)) = coming.pop_front() else { break };
                let app = walked.record.meta().app;
                let bytes = self.apps.of(app).flash_bytes;
                self.set_app_flash_bytes(app, bytes.saturating_sub(walked.record.len() as u64));
                let Some(place) = place_of(kind, &walked, hash, self.config.flash.pages()) else {
                    continue;
                };
                if self.planted(Planted::ReclaimLeavesEntries) {
                    self.live[usize::from(segment)] = 0;
                    continue;
                }
                let Some(entry) = self.index.remove(hash, segment, place) else { continue };
                self.entry_gone(segment);
                for _ in 0..MAX_TWINS {
                    if self.index.remove(hash, segment, place).is_none() {
                        break;
                    }
                    self.entry_gone(segment);
                }
                taken += self.take_back(now, hash, &entry, &walked.record, &mut budget);
            }
            if let Some(at) = ends.cut.filter(|_| kind == Kind::Large && !ends.lost) {
                self.drop_cut(segment, at, bytes, mine);
            }
        }
        if self.live[usize::from(segment)] != 0 {
            // Damage, or a read error: some entries could not be named.
            let dropped = self.index.drop_segment(segment);
            self.stats.flash_dropped += dropped;
            self.live[usize::from(segment)] = 0;
        }
        self.generations[usize::from(segment)] = 0;
        self.follow_index(now);
        taken
    }

    /// Drops the object whose record begins at `at` and goes on in the next segment: the rest of it is not at hand, so that what was
    /// read of it cannot be taken back.
    fn drop_cut(
        &mut self,
        segment: u16,
        at: usize,
        bytes: &[u8],
        mine: impl Fn(ObjectHash) -> bool,
    ) {
        // Not verified: a name that was damaged leads to no entry, and the entry goes with all that could not be named.
        let Some(said) = bytes.get(at..).and_then(claimed) else { return };
        let hash = self.config.hasher.hash(said.key);
        let Some(length) = extent_length(said.len).filter(|_| mine(hash)) else { return };
        let app = AppId(said.app.0.min(AppId::OTHER.0));
        let held = self.apps.of(app).flash_bytes;
        self.set_app_flash_bytes(app, held.saturating_sub(said.len as u64));
        let place = Place::Extent { start64: (at / EXTENT_ALIGN) as u32, length };
        let Some(entry) = self.index.remove(hash, segment, place) else { return };
        self.entry_gone(segment);
        let was_read =
            self.access_times.get(hash.fingerprint()).is_some() || entry.clock > self.most_unread();
        self.access_times.remove(hash.fingerprint());
        self.admission.on_flash_object_dropped(app, was_read, said.len as u32);
        self.stats.flash_dropped += 1;
        self.stats.flash_dropped_unread += u64::from(!was_read);
    }

    fn take_back(
        &mut self,
        now: Now,
        hash: ObjectHash,
        entry: &Entry,
        record: &Record<'_>,
        budget: &mut u64,
    ) -> u64 {
        let meta = record.meta();
        let read = self.access_times.get(hash.fingerprint());
        self.access_times.remove(hash.fingerprint());
        if meta.expiry.is_past(now.wall) {
            self.stats.expired += 1;
            return 0;
        }
        let bytes = record.len() as u64;
        // Times of reads are known of the last ones alone. CLOCK is above what an entry came with only if the object was read since it was
        // judged and the hand has not passed it since.
        let was_read = read.is_some() || entry.clock > self.most_unread();
        let last = read.unwrap_or(meta.last_access.0).max(meta.last_access.0);
        self.admission.on_flash_object_dropped(meta.app, was_read, record.len() as u32);
        let fits = *budget >= bytes && self.arena.free_bytes() > self.config.free_low / 2;
        if entry.clock > 0 && was_read && fits {
            *budget -= bytes;
            let idle = now.wall.0.saturating_sub(last);
            let clock = entry.clock.saturating_sub(1).max(1);
            let (key_len, value_len) = (record.key().len(), record.value().len());
            let payload = self.arena.object_bytes(key_len, value_len, meta.flags, meta.cas);
            if self.arena.has_room(payload)
                && self
                    .insert_record(now, hash, record, clock, idle, meta.fetched || read.is_some())
                    .is_some()
            {
                self.stats.reinserted += 1;
                return bytes;
            }
        }
        self.stats.flash_dropped += 1;
        self.stats.flash_dropped_unread += u64::from(!was_read);
        0
    }

    /// The highest CLOCK with which an object comes to flash that was not read since it was judged: what CLOCK gives up has none and comes
    /// with 1; what is chosen from all of DRAM comes with its rank, but below the maximum.
    fn most_unread(&self) -> u8 {
        let most = self.config.clock_max.saturating_sub(1);
        match self.admission.pool() {
            Pool::Victims => most.min(1),
            Pool::Everything => most,
        }
    }

    /// How hot the flash is in this shard.
    pub fn heat(&self) -> Heat {
        Heat { hot: self.index.hot(), entries: self.index.len() }
    }

    /// Turns CLOCK over the flash index until at most `hot_limit` entries are hot, or `buckets` have been visited
    /// (Flashield §4.3: the others become ghosts).
    pub fn cool(&mut self, hot_limit: u64, buckets: u32) -> u64 {
        let mut ghosts = 0;
        let mut left = buckets;
        while self.index.hot() > hot_limit && left > 0 {
            let step = left.min(64);
            ghosts += self.index.sweep(step, |_| {}).ghosts_made;
            left -= step;
        }
        ghosts
    }
}

/// The index's place for what the builder placed.
pub(super) fn place_of_placed(placed: Placed) -> Place {
    match placed {
        Placed::Page { function, .. } => Place::Page { function },
        Placed::Extent { start64, length } => Place::Extent { start64, length },
    }
}
