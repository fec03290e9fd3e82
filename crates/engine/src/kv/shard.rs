//! One shard of the key-value engine: a plain `&mut self` state machine over its part of the keys.

use std::collections::BTreeSet;

use larder_base::{AppId, Expiry, Nanos, Now, ObjectHash, UnixSecs, Words};
use larder_format::{Filling, RecordMeta, record_len};
use larder_policy::admission::{Access, Admission, AdmissionPolicy, Departure, Pool};

use super::access_times::AccessTimes;
use super::ahead::Ahead;
use super::api::{Effects, Item, Location, Request, Tier};
use super::clean::OnTheirWay;
use super::config::{ClockMode, ShardConfig};
use super::index_room::IndexRoom;
use super::index_size::IndexSize;
use super::marks::Marks;
use super::planted::Planted;
use super::stats::{AppTable, ShardStats};
use super::too_large::TooLarge;
use crate::dram::{Accesses, Arena, Block, ObjectHeader, ObjectMemory, State, Table, footprint};
use crate::index::{self, Attached, ClockBits, Entry, Family, FlashIndex, IndexError};

/// Owner word of the index that holds a flush announced for later (Unix seconds; 0 for none).
const WORD_FLUSH_AT: usize = 0;

/// An index entry that an overwrite removed because its tag matched, while a read finds out whose it was.
#[derive(Clone, Debug)]
pub(super) struct Suspect {
    pub(super) family: Family,
    pub(super) entry: Entry,
    pub(super) generation: u64,
    /// The key that was overwritten: its own old versions must never be found through this entry.
    pub(super) overwritten: ObjectHash,
    /// That key itself, to look for in what is read.
    pub(super) key: Box<[u8]>,
}

/// At most this many entries wait for their verification, and as many verifications are under way, for each shard; more are
/// forgotten at once.
pub(super) const MAX_SUSPECTS: usize = 64;

/// Buckets of the DRAM table that one call of [`KvShard::list`] shows: bounds the time of the lock, and what the caller
/// must hold.
const LIST_WINDOW: u32 = 32;

/// So many flushed objects are remembered, for the count of reads that miss because of a flush.
const MAX_FLUSHED: usize = 1024;

/// Objects that a write which needs room spares at most, since admission wants them on flash: bounds how long the shard stays locked
/// (a quarter of a millisecond). Beyond, a write evicts them all the same.
const MOST_SPARED: u32 = 512;

/// Blocks that a write which needs room looks at for objects that can move, at most.
const MOST_LOOKED_AT: usize = 1024;

/// What became of the object under the CLOCK hand when a write needed room.
enum Displaced {
    /// There was none, or CLOCK keeps it.
    Nothing,
    /// Admission wants it on flash.
    Spared,
    /// It went. `judged`: admission did not want it.
    Freed { bytes: usize, judged: bool, expired: bool },
}

/// What the new object of a write is made of.
#[derive(Clone, Copy)]
pub(super) struct NewObject<'a> {
    pub(super) key: &'a [u8],
    pub(super) hash: ObjectHash,
    pub(super) app: AppId,
    pub(super) value: [&'a [u8]; 2],
    pub(super) flags: u32,
    pub(super) expiry: Expiry,
    pub(super) cas: u64,
    pub(super) state: State,
}

impl<'a> NewObject<'a> {
    /// A new object of the request's key: no flags, of the lowest rank that is kept.
    pub(super) fn fresh(
        req: &Request<'a>,
        value: &'a [u8],
        expiry: Expiry,
        cas: u64,
    ) -> NewObject<'a> {
        NewObject {
            key: req.key,
            hash: req.hash,
            app: req.app,
            value: [value, b""],
            flags: 0,
            expiry,
            cas,
            state: State::default().with_clock(1),
        }
    }
}

/// One shard. See [`super::api`] for how it is used. A server's objects lie in an [`Arena`]; over another memory the
/// shard decides the same ([`KvShard::with_memory`]).
pub struct KvShard<M = Arena> {
    pub(super) config: ShardConfig,
    pub(super) arena: M,
    pub(super) table: Table,
    /// The CLOCK hand over DRAM: always the start of a block.
    pub(super) hand: Block,
    /// Where the search for flash-worthy objects goes on: always the start of a block.
    pub(super) scan: Block,
    pub(super) index: FlashIndex,
    pub(super) index_room: IndexRoom,
    pub(super) index_size: IndexSize,
    /// Objects that flash cannot hold.
    pub(super) too_large: TooLarge,
    /// Bytes of memory for objects and for what the index has grown by.
    pub(super) divided: usize,
    /// Marks of free room for a memory for objects that gives none of it to the index.
    pub(super) marks: (usize, usize),
    /// Generation of each segment's present filling as this shard was told; 0 when nothing of it may be read.
    pub(super) generations: Box<[u64]>,
    /// Index entries per segment.
    pub(super) live: Box<[u32]>,
    pub(super) admission: Admission,
    pub(super) access_times: AccessTimes,
    pub(super) suspects: Vec<Suspect>,
    /// Verifications that were asked for and are not answered.
    pub(super) verifying: usize,
    /// Suspects that were forgotten because as many verifications as may be were under way. Not among the shard's counters, which
    /// a record's digests cover: older records go on replaying.
    pub(super) unverified: u64,
    /// What is on its way to each drive, by kind of segment.
    pub(super) on_their_way: Box<[[OnTheirWay; 2]]>,
    /// Bytes of the arena whose objects are staged.
    pub(super) staged_bytes: usize,
    pub(super) apps: AppTable,
    /// The applications' bytes on flash where the next process finds them; empty when nobody wants that.
    flash_bytes: Words,
    pub(super) stats: ShardStats,
    pub(super) sweep: super::expire::Sweep,
    /// Evictions, while somebody wants to know of them.
    pub(super) noted: Option<Box<super::evicted::Noted>>,
    pub(super) scratch: Vec<u8>,
    /// Fingerprints of objects that the last flush took out of DRAM and that nobody has asked for since.
    pub(super) flushed: BTreeSet<u64>,
    /// Objects in DRAM that admission wants on flash and that are not on their way: a write would have displaced them, or no open segment had
    /// room. Each by its hash in DRAM: two of one hash share the mark.
    pub(super) wanted: Marks,
    next_cas: u64,
    flush_at: u32,
    pub(super) cleaner_woken: bool,
    /// Free room wanted beyond the marks, bytes: it grows when a write finds free bytes but none in one piece, and
    /// shrinks when writes find their place.
    pub(super) extra_room: usize,
    /// The same for large writes.
    pub(super) ahead: Ahead,
    /// Evictions on the request path when the cleaner was last satisfied.
    pub(super) direct_before: u64,
    #[cfg(feature = "planted")]
    pub(super) fault: Option<Planted>,
    /// Some application has a floor or a ceiling.
    pub(super) shares_matter: bool,
}

impl KvShard {
    /// An empty shard. `words` hold its flash index (see [`FlashIndex::words_for`]).
    ///
    /// # Errors
    /// When `words` are too few for an index.
    pub fn new(
        config: ShardConfig,
        admission: Admission,
        words: Words,
    ) -> Result<KvShard, IndexError> {
        let arena = Arena::new(config.arena_bytes);
        KvShard::with_memory(config, admission, words, arena)
    }

    /// A shard whose index outlived another process. `generations[s]` is the generation of segment `s` as the segment
    /// table shows it, 0 for one that holds nothing to be read; entries of those are dropped.
    ///
    /// # Errors
    /// When `words` do not hold an index of this layout: start with [`KvShard::new`] instead.
    pub fn attach(
        config: ShardConfig,
        admission: Admission,
        words: Words,
        generations: &[u64],
    ) -> Result<(KvShard, Attached), IndexError> {
        let mut live = vec![0u32; generations.len()];
        let known = |s: u16| generations.get(usize::from(s)).is_some_and(|&g| g != 0);
        let (index, report) =
            FlashIndex::attach(words, clock_bits(config.clock_max), config.flash.segments, |s| {
                let keep = known(s);
                if keep {
                    live[usize::from(s)] += 1;
                }
                keep
            })?;
        if index.base_buckets() != config.index_buckets {
            let recorded = u64::from(index.base_buckets());
            return Err(IndexError::Buckets { recorded, room: config.index_buckets });
        }
        let arena = Arena::new(config.arena_bytes);
        let mut shard = Self::with_index(config, admission, index, arena);
        let n = shard.generations.len().min(generations.len());
        shard.generations[..n].copy_from_slice(&generations[..n]);
        shard.live[..n].copy_from_slice(&live[..n]);
        shard.fit_index();
        if shard.index_taken() > 0 {
            // Nothing is in it yet.
            shard.arena = Arena::new(shard.arena_within(shard.divided));
            shard.arena.count_cas_from(shard.config.cas_base);
            (shard.hand, shard.scan) = (shard.arena.first(), shard.arena.first());
            shard.fit_marks();
        }
        shard.flush_at = shard.index.owner_word(WORD_FLUSH_AT) as u32;
        Ok((shard, report))
    }
}

impl<M: ObjectMemory> KvShard<M> {
    /// An empty shard over `memory`, which is as large as [`ShardConfig::arena_bytes`] says.
    ///
    /// # Errors
    /// When `words` are too few for an index.
    pub fn with_memory(
        config: ShardConfig,
        admission: Admission,
        words: Words,
        memory: M,
    ) -> Result<KvShard<M>, IndexError> {
        let (clock, base) = (clock_bits(config.clock_max), config.index_buckets);
        let segments = config.flash.segments;
        let index = FlashIndex::create_in(words, base, clock)?.of_segments(segments);
        Ok(Self::with_index(config, admission, index, memory))
    }

    fn with_index(
        config: ShardConfig,
        admission: Admission,
        index: FlashIndex,
        mut arena: M,
    ) -> KvShard<M> {
        // What was given out before this start has another number: the first is one above.
        arena.count_cas_from(config.cas_base);
        let segments = usize::from(config.flash.segments) + 1;
        KvShard {
            table: Table::for_arena(config.arena_bytes),
            hand: arena.first(),
            scan: arena.first(),
            arena,
            too_large: TooLarge { limit: config.flash.longest_record(), ..TooLarge::default() },
            index_room: IndexRoom::new(FlashIndex::objects_for(index.buckets())),
            index_size: IndexSize::new(config.index_most),
            divided: config.arena_bytes,
            marks: (config.free_low, config.free_high),
            index,
            generations: vec![0; segments].into_boxed_slice(),
            live: vec![0; segments].into_boxed_slice(),
            admission,
            access_times: AccessTimes::new(config.access_times, M::SPARING),
            suspects: Vec::with_capacity(MAX_SUSPECTS),
            verifying: 0,
            unverified: 0,
            on_their_way: vec![Default::default(); config.flash.places()].into_boxed_slice(),
            staged_bytes: 0,
            apps: AppTable::default(),
            flash_bytes: Words::heap(0),
            stats: ShardStats::default(),
            sweep: super::expire::Sweep::default(),
            noted: None,
            scratch: Vec::new(),
            flushed: BTreeSet::new(),
            wanted: Marks::default(),
            next_cas: config.cas_base,
            flush_at: 0,
            cleaner_woken: false,
            extra_room: 0,
            ahead: Ahead::default(),
            direct_before: 0,
            #[cfg(feature = "planted")]
            fault: None,
            shares_matter: config.shares.any(),
            config,
        }
    }

    /// Fetches the cache line at which a request for `hash` begins. Called some requests ahead, it lets their cache
    /// misses overlap: worth it for who knows what will be asked (a trace is read, many keys came at once).
    #[inline]
    pub fn warm(&self, hash: ObjectHash) {
        self.table.warm(hash.dram());
    }

    /// The second step, some requests after [`KvShard::warm`]: the object that the table names.
    #[inline]
    pub fn warm_object(&self, hash: ObjectHash) {
        self.table.warm_object(&self.arena, hash.dram());
        self.index.expect(hash);
        self.admission.warm(hash);
    }

    /// The third step: whether that is the object, in which case nothing else is needed. If not, the flash index.
    #[inline]
    pub fn warm_index(&self, hash: ObjectHash, key: &[u8]) -> bool {
        let found = self.table.warm_further(&self.arena, hash.dram(), key);
        if !found {
            self.index.warm(hash);
        }
        found
    }

    /// The fourth step: where a look-up would read flash first, if the object is on flash, for who can have it at hand
    /// sooner. Nothing is on flash of an object that is to be written (`write`), or will be missed: then what admission knows
    /// is needed.
    #[inline]
    pub fn warm_flash(&self, hash: ObjectHash, write: bool) -> Option<Location> {
        let entry = if write { None } else { self.index.first(hash) };
        match entry {
            Some(entry) => {
                self.access_times.warm(hash.fingerprint());
                Some(self.location(hash, &entry))
            }
            None => {
                self.admission.warm_again(hash);
                None
            }
        }
    }

    /// The shard's counters.
    pub fn stats(&self) -> &ShardStats {
        &self.stats
    }

    /// The counters of each application.
    pub fn apps(&self) -> &AppTable {
        &self.apps
    }

    /// Keeps each application's bytes on flash in `words` ([`AppId::COUNT`] of them) from now on, so that they outlive the
    /// process. When the index was attached, what the words hold is where counting goes on from.
    pub fn keep_flash_bytes(&mut self, words: Words, attached: bool) {
        assert_eq!(words.len(), AppId::COUNT, "one word for each application");
        self.flash_bytes = words;
        for i in 0..AppId::COUNT {
            if attached {
                self.apps.of_mut(AppId(i as u16)).flash_bytes = self.flash_bytes.load(i);
            } else if self.flash_bytes.load(i) != 0 {
                self.flash_bytes.store(i, 0);
            }
        }
    }

    /// Of the objects on flash so many were kept at a start and so many dropped with a drive, each application's alike for want of
    /// knowing better.
    pub fn forget_share(&mut self, kept: u64, dropped: u64) {
        if dropped == 0 {
            return;
        }
        for i in 0..AppId::COUNT {
            let app = AppId(i as u16);
            let bytes = u128::from(self.apps.of(app).flash_bytes) * u128::from(kept);
            let left = (bytes / u128::from(kept + dropped)) as u64;
            self.set_app_flash_bytes(app, left);
        }
    }

    /// Changes the bytes of an application's records on flash.
    pub(super) fn set_app_flash_bytes(&mut self, app: AppId, bytes: u64) {
        self.apps.of_mut(app).flash_bytes = bytes;
        if self.flash_bytes.len() > app.index() {
            self.flash_bytes.store(app.index(), bytes);
        }
    }

    /// The flash index, to look at.
    pub fn index(&self) -> &FlashIndex {
        &self.index
    }

    /// Bytes of DRAM whose objects are in a segment that is not durable yet.
    pub fn staged_bytes(&self) -> usize {
        self.staged_bytes
    }

    /// The flash index's words, for a checkpoint.
    pub fn index_words(&mut self) -> &mut Words {
        self.index.words_mut()
    }

    /// The admission policy.
    pub fn admission(&self) -> &Admission {
        &self.admission
    }

    /// The admission policy, to take training sets from and install models in.
    pub fn admission_mut(&mut self) -> &mut Admission {
        &mut self.admission
    }

    /// What the shard was built from.
    pub fn config(&self) -> &ShardConfig {
        &self.config
    }

    /// Objects in DRAM.
    pub fn dram_objects(&self) -> usize {
        self.table.len()
    }

    /// Bytes that the process holds for objects in DRAM; what [`KvShard::memory`] calls `objects` is what they count.
    pub fn object_memory_held(&self) -> usize {
        self.arena.held_bytes()
    }

    /// The memory of objects, for the runtime to advise the kernel on before it is used.
    pub fn object_memory_mut(&mut self) -> &mut [u8]
    where
        M: super::resize::Resizable,
    {
        self.arena.bytes_mut()
    }

    /// Bytes of the arena that are free.
    pub fn dram_free_bytes(&self) -> usize {
        self.arena.free_bytes()
    }

    /// Bytes of the arena.
    pub fn dram_capacity(&self) -> usize {
        self.arena.capacity()
    }

    /// Bytes by which tables are smaller than [`KvShard::memory`] says, since they take memory as they are filled.
    pub fn spared_bytes(&self) -> usize {
        self.index.spared_bytes() + self.admission.spared_bytes() + self.access_times.spared_bytes()
    }

    /// Bytes of memory by component, everything counted.
    pub fn memory(&self) -> [(&'static str, usize); 6] {
        let segments = self.generations.len() * 12;
        [
            ("objects", self.arena.capacity()),
            ("dram_table", self.table.memory_bytes()),
            ("flash_index", self.index.memory_bytes() as usize),
            ("segment_table", segments),
            ("admission", self.admission.memory_bytes()),
            (
                "access_times",
                self.access_times.memory_bytes()
                    + AppId::COUNT * size_of::<super::stats::AppStats>(),
            ),
        ]
    }

    /// Whether free room has fallen below the mark at which the cleaner should run.
    pub fn is_short(&self) -> bool {
        self.soon_free() < self.config.free_low + self.room_ahead() || self.is_starved()
    }

    /// Free room wanted beyond the marks, bytes.
    pub(super) fn room_ahead(&self) -> usize {
        self.extra_room.max(self.ahead.bytes())
    }

    /// Bytes that are free, or staged for segments that are about to be written: not all of a large object is, since it stays until
    /// the last of its segments is full.
    pub(super) fn soon_free(&self) -> usize {
        let open = 3 * self.config.flash.segment_bytes as usize;
        self.arena.free_bytes() + self.staged_bytes.min(open)
    }

    /// What is staged counts as free, since it will be; but not when nothing else is: an open segment that nobody fills
    /// up would keep the cleaner away for good, and every write would evict on the request path.
    pub(super) fn is_starved(&self) -> bool {
        self.arena.free_bytes() < self.config.free_low / 2
    }

    pub(super) fn call_cleaner(&mut self, fx: &mut impl Effects) {
        if !self.cleaner_woken && self.is_short() {
            self.cleaner_woken = true;
            fx.wake_cleaner();
        }
    }

    /// The cleaner has come: it may be woken again.
    pub(super) fn cleaner_came(&mut self) {
        self.cleaner_woken = false;
    }

    pub(super) fn take_cas(&mut self, wanted: Option<u64>) -> u64 {
        wanted.unwrap_or_else(|| {
            self.next_cas += 1;
            self.next_cas
        })
    }

    pub(super) fn filling(&self, segment: u16, generation: u64) -> Filling {
        Filling { salt: self.config.flash.salt, segment, generation }
    }

    pub(super) fn access(&self, hash: ObjectHash, app: AppId, at: Nanos, size: u32) -> Access {
        Access { hash, app, at, size }
    }

    /// Bytes that an object in DRAM would take on flash.
    pub(super) fn record_bytes(h: &ObjectHeader) -> u32 {
        let meta =
            RecordMeta { expiry: h.expiry, flags: h.flags, app: h.app, ..RecordMeta::default() };
        record_len(&meta, usize::from(h.key_len), h.value_len as usize) as u32
    }

    /// Shows the objects in DRAM whose place in the table is in a window from `at` on, and says where to go on; `None`
    /// after the last. Objects that stay while a listing goes on are shown once, unless the memory is resized meanwhile.
    pub fn list(
        &self,
        now: Now,
        at: u32,
        mut show: impl FnMut(&[u8], &Item<'_>, usize),
    ) -> Option<u32> {
        if self.flush_at != 0 && self.flush_at <= now.wall.0 {
            return None;
        }
        let end = self.table.width().min(at.saturating_add(LIST_WINDOW));
        for bucket in at..end {
            for (block, h) in self.table.chain(&self.arena, bucket) {
                if !h.expiry.is_past(now.wall) {
                    let item = Self::item(&self.arena, now, block, &h);
                    show(&h.key(&self.arena, block), &item, self.arena.block_bytes(block));
                }
            }
        }
        (end < self.table.width()).then_some(end)
    }

    // ---- flush ----

    /// Forgets everything (`at` in the past or none), or everything that will be there at `at`. Survives `kill -9`.
    pub fn flush(&mut self, now: Now, at: Option<UnixSecs>) {
        match at {
            Some(when) if when > now.wall => {
                // One that has come due is not replaced but carried out.
                self.flush_if_due(now);
                self.flush_at = when.0;
                if !self.planted(Planted::FlushForgotten) {
                    self.index.set_owner_word(WORD_FLUSH_AT, u64::from(when.0));
                }
            }
            _ => {
                self.flush_at = 0;
                self.flush_now();
                self.index.set_owner_word(WORD_FLUSH_AT, 0);
            }
        }
    }

    /// Carries out a flush that has come due.
    #[inline]
    pub(super) fn flush_if_due(&mut self, now: Now) {
        if self.flush_at != 0 && self.flush_at <= now.wall.0 {
            self.flush(now, None);
        }
    }

    /// When everything is to be forgotten, if that has been announced.
    pub(super) fn flush_announced(&self) -> Option<UnixSecs> {
        (self.flush_at != 0).then_some(UnixSecs(self.flush_at))
    }

    fn flush_now(&mut self) {
        // Flash first: a kill in between leaves nothing behind in DRAM anyway.
        self.suspects.clear();
        self.flushed.clear();
        if !self.planted(Planted::FlushKeepsFlash) {
            self.live.fill(0);
            self.index.clear_all();
        }
        // The scan hand is the cursor: freeing keeps it on the start of a block.
        self.scan = self.arena.first();
        loop {
            let block = self.scan;
            self.scan = self.arena.next(block);
            let last = self.scan == self.arena.first();
            if self.arena.is_used(block) {
                let h = ObjectHeader::load(&self.arena, block);
                let hash = self.hash_of(block, &h);
                if self.flushed.len() < MAX_FLUSHED {
                    self.flushed.insert(hash.fingerprint());
                }
                self.remove_dram(hash, block, &h, None);
            }
            if last {
                break;
            }
        }
    }

    // ---- DRAM ----

    /// The full hash of an object in DRAM: not kept in its header, since only its departure needs it.
    pub(super) fn hash_of(&self, block: Block, h: &ObjectHeader) -> ObjectHash {
        self.config.hasher.hash(&h.key(&self.arena, block))
    }

    /// The object of `hash` and `key` in DRAM; one that has expired is removed on the way (`Err`).
    pub(super) fn find_dram(
        &mut self,
        now: Now,
        hash: ObjectHash,
        key: &[u8],
    ) -> Result<Option<(Block, ObjectHeader)>, ()> {
        match self.table.find(&self.arena, hash.dram(), key) {
            Some((block, h)) if h.expiry.is_past(now.wall) => {
                self.remove_dram(hash, block, &h, Some((now, Departure::Removed)));
                self.stats.expired += 1;
                Err(())
            }
            found => Ok(found),
        }
    }

    /// Unlinks and frees an object.
    pub(super) fn remove_dram(
        &mut self,
        hash: ObjectHash,
        block: Block,
        h: &ObjectHeader,
        departure: Option<(Now, Departure)>,
    ) {
        self.take_out(hash, block, h, departure);
        self.free_block(block);
    }

    /// What [`KvShard::remove_dram`] does but for freeing the block.
    pub(super) fn take_out(
        &mut self,
        hash: ObjectHash,
        block: Block,
        h: &ObjectHeader,
        departure: Option<(Now, Departure)>,
    ) {
        self.table.unlink(&mut self.arena, hash.dram(), block);
        if !self.wanted.is_empty() {
            self.wanted.remove(hash.dram());
        }
        let bytes = self.arena.block_bytes(block);
        if h.state.has(State::STAGED) {
            self.staged_bytes -= bytes;
            if !matches!(departure, Some((_, Departure::Moved))) {
                self.note_staged_dead(hash);
            }
        }
        let app = self.apps.of_mut(h.app);
        app.dram_bytes -= bytes as u64;
        app.dram_objects -= 1;
        if let Some((now, departure)) = departure {
            let access = self.access(hash, h.app, now.mono, Self::record_bytes(h));
            self.admission.on_departure(&access, departure);
        }
    }

    /// A staged object has changed: its copy in the segment that is being filled is dead. Which segment that is
    /// need not be known: all that are open are told.
    pub(super) fn note_staged_dead(&mut self, hash: ObjectHash) {
        let one = self.on_their_way.len() == 1;
        for way in self.on_their_way.as_flattened_mut() {
            if one || way.staged > 0 {
                way.dead.insert(hash.fingerprint());
            }
        }
        self.stats.staged_dead += 1;
    }

    /// Room for `bytes` of payload by moving up to `may_move` bytes of objects under the CLOCK hand to free ranges elsewhere.
    fn join_pieces(&mut self, bytes: usize, may_move: &mut usize) -> Option<Block> {
        for _ in 0..(footprint(bytes) / 32).min(MOST_LOOKED_AT) {
            let block = self.hand;
            self.hand = self.arena.next(block);
            if !self.arena.is_used(block) {
                continue;
            }
            let h = ObjectHeader::load(&self.arena, block);
            // What is half as large is as hard to find room for.
            let small = 2 * self.arena.block_bytes(block) <= footprint(bytes);
            if small
                && !h.state.has(State::STAGED)
                && self.move_aside(block, &h, may_move)
                && self.arena.has_room(bytes)
            {
                return self.arena.alloc(bytes);
            }
        }
        None
    }

    /// Moves an object to another free range, so that its block joins with what is free beside it. Returns false when there is none that
    /// is long enough, or `may_move` has fewer bytes left than it takes.
    fn move_aside(&mut self, block: Block, h: &ObjectHeader, may_move: &mut usize) -> bool {
        let before = self.arena.block_bytes(block);
        if *may_move < before {
            return false;
        }
        let Some(to) = self.arena.copy_object(block) else { return false };
        *may_move -= before;
        let hash = self.hash_of(block, h);
        let after = self.arena.block_bytes(to);
        self.table.unlink(&mut self.arena, hash.dram(), block);
        self.free_block(block);
        self.table.link(&mut self.arena, hash.dram(), to);
        let app = self.apps.of_mut(h.app);
        app.dram_bytes = app.dram_bytes + after as u64 - before as u64;
        true
    }

    fn free_block(&mut self, block: Block) {
        self.arena.free(block, [&mut self.hand, &mut self.scan]);
    }

    /// Puts an object into DRAM; the caller has made sure that no other of this key exists. `None` when no room can be
    /// made.
    pub(super) fn insert_dram(
        &mut self,
        now: Now,
        new: &NewObject<'_>,
    ) -> Option<(Block, ObjectHeader)> {
        let value_len = new.value[0].len() + new.value[1].len();
        let bytes = self.arena.object_bytes(new.key.len(), value_len, new.flags, new.cas);
        let block = self.make_room(now, bytes)?;
        if self.config.flash.segments > 0 {
            self.ahead.wrote(footprint(bytes), self.arena.capacity());
        }
        let h = ObjectHeader {
            cas: new.cas,
            expiry: new.expiry,
            flags: new.flags,
            value_len: value_len as u32,
            key_len: new.key.len() as u8,
            state: new.state,
            app: new.app,
            written: now.millis32(),
            accesses: Accesses::default(),
        };
        self.arena.fill(block, &h, new.hash.dram(), new.key, new.value);
        self.sweep.note(new.expiry);
        self.table.link(&mut self.arena, new.hash.dram(), block);
        let app = self.apps.of_mut(new.app);
        app.dram_bytes += self.arena.block_bytes(block) as u64;
        app.dram_objects += 1;
        Some((block, h))
    }

    /// Room for `bytes` of payload, evicting by CLOCK when there is none: the request path's last resort. Admission is asked here too,
    /// since what is lost here is lost as for good as what the cleaner evicts: what it wants on flash is spared, until there is too
    /// much of that.
    fn make_room(&mut self, now: Now, bytes: usize) -> Option<Block> {
        if let Some(block) = self.arena.alloc(bytes) {
            return Some(block);
        }
        if self.config.no_eviction || footprint(bytes) > self.arena.capacity() {
            return None;
        }
        let has_flash = self.config.flash.segments > 0;
        // Mixed sizes leave free bytes in pieces: more of them must be kept free, ahead of writes.
        let capacity = self.arena.capacity();
        self.extra_room = (self.extra_room + capacity / 256).min(capacity / 8);
        if has_flash {
            self.ahead.missed(footprint(bytes), capacity);
        }
        // Where enough is free, but in pieces, nothing need go.
        let mut may_move = 4 * footprint(bytes);
        if self.arena.free_bytes() >= 2 * footprint(bytes)
            && let Some(block) = self.join_pieces(bytes, &mut may_move)
        {
            return Some(block);
        }
        // Then by rank. Small objects find room soon; a large one may not, since what CLOCK spares lies in between.
        let mut budget =
            self.arena.capacity().min(footprint(bytes).saturating_mul(8).max(64 << 10));
        let mut spared = 0usize;
        let asks = has_flash && self.admission.pool() == Pool::Victims;
        let mut may_spare = if asks { MOST_SPARED } else { 0 };
        while budget > 0 {
            let size = self.arena.block_bytes(self.hand);
            let freed = match self.displace(now, spared < 2 * self.arena.capacity(), may_spare > 0)
            {
                Displaced::Nothing => 0,
                Displaced::Spared => {
                    may_spare -= 1;
                    0
                }
                Displaced::Freed { bytes, judged, expired } => {
                    self.stats.evictions_direct += 1;
                    self.stats.evictions_unjudged += u64::from(has_flash && !judged && !expired);
                    bytes
                }
            };
            spared += size;
            if freed > 0 {
                if self.arena.has_room(bytes) {
                    return self.arena.alloc(bytes);
                }
                budget = budget.saturating_sub(freed);
            }
            if spared > 4 * self.arena.capacity() {
                break;
            }
        }
        // At last clear neighbours until a run is long enough: what finds room elsewhere moves there, the rest goes, whatever its rank. Staged
        // objects stay: a run starts anew behind them. Where what is staged lies so that no run is left between, it goes too: a cache may
        // forget, but what it is given it takes.
        for staged_too in [false, true] {
            let mut walked = 0;
            while walked <= 2 * self.arena.capacity() {
                let block = self.hand;
                walked += self.arena.block_bytes(block);
                self.hand = self.arena.next(block);
                if !self.arena.is_used(block) {
                    continue;
                }
                let h = ObjectHeader::load(&self.arena, block);
                let staged = h.state.has(State::STAGED);
                if staged && !staged_too {
                    continue;
                }
                if !staged && self.move_aside(block, &h, &mut may_move) {
                    if self.arena.has_room(bytes) {
                        return self.arena.alloc(bytes);
                    }
                    continue;
                }
                self.evict(now, self.hash_of(block, &h), block, &h);
                self.stats.evictions_direct += 1;
                // What is staged has been judged.
                if has_flash && !staged {
                    self.stats.evictions_unjudged += 1;
                }
                if self.arena.has_room(bytes) {
                    return self.arena.alloc(bytes);
                }
            }
        }
        None
    }

    /// Moves the CLOCK hand over one block, and evicts the object there if CLOCK gives it up. `ask`: unless admission wants it.
    fn displace(&mut self, now: Now, respect: bool, ask: bool) -> Displaced {
        let block = self.hand;
        self.hand = self.arena.next(block);
        if !self.arena.is_used(block) {
            return Displaced::Nothing;
        }
        let h = ObjectHeader::load(&self.arena, block);
        if h.state.has(State::STAGED) || !self.clock_gives_up(now, block, &h, respect) {
            return Displaced::Nothing;
        }
        let expired = h.expiry.is_past(now.wall);
        let hash = self.hash_of(block, &h);
        if ask && !expired && self.wanted.contains(hash.dram()) {
            return Displaced::Spared;
        }
        let bytes = self.arena.block_bytes(block);
        if expired {
            self.stats.expired += 1;
            self.remove_dram(hash, block, &h, Some((now, Departure::Removed)));
            return Displaced::Freed { bytes, judged: false, expired };
        }
        let mut judged = false;
        if ask {
            judged = self.consider(now, hash, &h).is_none();
            if !judged && self.want(hash) {
                return Displaced::Spared;
            }
        }
        self.evict(now, hash, block, &h);
        Displaced::Freed { bytes, judged, expired }
    }

    /// Objects that are noted as wanted on flash, at most: eight to sixteen bytes each, some hundredth of the memory. Beyond, the cleaner
    /// waits until a segment has been written.
    pub(super) fn most_wanted(&self) -> usize {
        (self.arena.capacity() / 1024).clamp(1024, 4096)
    }

    /// Remembers that admission wants an object on flash, if there is room for that.
    pub(super) fn want(&mut self, hash: ObjectHash) -> bool {
        let remembers = self.wanted.len() < self.most_wanted();
        if remembers {
            self.wanted.insert(hash.dram());
        }
        remembers
    }

    pub(super) fn count_eviction(&mut self, now: Now, block: Block, h: &ObjectHeader) {
        self.note_eviction(now, block, h);
        self.stats.evictions += 1;
        self.stats.evicted_unfetched += u64::from(h.accesses.reads() == 0);
        self.apps.of_mut(h.app).evictions += 1;
    }

    /// Evicts one object from DRAM for good.
    pub(super) fn evict(&mut self, now: Now, hash: ObjectHash, block: Block, h: &ObjectHeader) {
        self.count_eviction(now, block, h);
        self.remove_dram(hash, block, h, Some((now, Departure::Evicted)));
    }

    /// Moves the CLOCK hand over one block. With `evict`, an object that CLOCK gives up goes; the return value is the
    /// bytes freed. `respect` keeps applications below their floor.
    pub(super) fn clock_step(&mut self, now: Now, evict: bool, respect: bool) -> usize {
        let block = self.hand;
        self.hand = self.arena.next(block);
        if !self.arena.is_used(block) {
            return 0;
        }
        let h = ObjectHeader::load(&self.arena, block);
        if h.state.has(State::STAGED) {
            return 0;
        }
        if !self.clock_gives_up(now, block, &h, respect) || !evict {
            return 0;
        }
        let bytes = self.arena.block_bytes(block);
        let hash = self.hash_of(block, &h);
        if h.expiry.is_past(now.wall) {
            self.stats.expired += 1;
            self.remove_dram(hash, block, &h, Some((now, Departure::Removed)));
        } else {
            self.evict(now, hash, block, &h);
        }
        bytes
    }

    /// Whether CLOCK gives up the object now under the hand; counts it down if not.
    pub(super) fn clock_gives_up(
        &mut self,
        now: Now,
        block: Block,
        h: &ObjectHeader,
        respect: bool,
    ) -> bool {
        if h.expiry.is_past(now.wall) {
            return true;
        }
        if self.shares_matter {
            let (mine, all) = (self.apps.of(h.app).dram_bytes, self.arena.capacity() as u64);
            if self.config.shares.over_ceiling(h.app, mine, 0, all) {
                return true;
            }
            if respect && !self.config.shares.may_evict(h.app, mine, all) {
                return false;
            }
        }
        let clock = h.state.clock();
        if clock == 0 {
            return true;
        }
        ObjectHeader::set_state(&mut self.arena, block, h.state.with_clock(clock - 1));
        false
    }

    /// CLOCK after a read.
    #[inline]
    pub(super) fn raised(&self, clock: u8) -> u8 {
        match self.config.clock_mode {
            ClockMode::SetMax => self.config.clock_max,
            ClockMode::Increment => (clock + 1).min(self.config.clock_max),
        }
    }

    pub(super) fn index_clock_mode(&self) -> index::ClockMode {
        match self.config.clock_mode {
            ClockMode::SetMax => index::ClockMode::SetMax,
            ClockMode::Increment => index::ClockMode::Increment,
        }
    }

    /// An object in DRAM as an answer shows it.
    #[inline]
    pub(super) fn item<'a>(arena: &'a M, now: Now, block: Block, h: &ObjectHeader) -> Item<'a> {
        Item {
            value: h.value(arena, block),
            flags: h.flags,
            cas: h.cas,
            expiry: h.expiry,
            expiry_before: h.expiry,
            last_access: now.millis32().wrapping_sub(h.last()) / 1000,
            hit_before: h.state.has(State::FETCHED),
            won: false,
            stale: h.state.has(State::STALE),
            already_won: h.state.has(State::WON),
            tier: Tier::Dram,
        }
    }
}

fn clock_bits(max: u8) -> ClockBits {
    if max <= 1 { ClockBits::One } else { ClockBits::Two }
}
