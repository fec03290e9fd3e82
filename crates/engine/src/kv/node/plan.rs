//! How `-m` is divided: everything that grows with the configuration is counted before anything is allocated.

use larder_base::ByteSize;
use larder_format::geometry::{MIN_SEGMENTS, SEGMENTS_AT, SMALL_SEGMENTS};
use larder_format::page::SMALL_MAX;
use larder_format::{Geometry, GeometryError};
use larder_policy::admission::{AdmissionConfig, PolicyName};

use super::defaults::INDEX_BYTES_PER_OBJECT;
use super::region::RegionLayout;
use crate::dram::Table;
use crate::index::FlashIndex;
use crate::kv::{Drives, FlashGeometry};

/// Most shards where memory alone does not ask for more: enough that two threads seldom meet, few enough that each has memory worth the name.
const MAX_SHARDS: usize = 16;
/// A shard's arena holds at least this many objects of the largest size.
const LARGEST_PER_ARENA: u64 = 4;
/// Least memory with which every admission policy works, per shard.
const MIN_ADMISSION: u64 = 64 << 10;
/// What admission has for each object that flash can hold, tenths of a byte: with less it forgets keys before they come back; with
/// more, hits hardly rise and objects have less. A window of as many keys as flash holds objects is 15 for `reject_first` and 64 for
/// `ghost`, and `flashiness` takes 61 for the keys of two.
fn admission_per_object(policy: PolicyName) -> u64 {
    match policy {
        PolicyName::RejectFirst => 16,
        PolicyName::ExpectedReads => 20,
        PolicyName::Flashiness | PolicyName::FlashinessPaper => 30,
        PolicyName::Ghost => 43,
        PolicyName::All | PolicyName::Probability | PolicyName::WriteRate => 0,
    }
}
/// Largest arena: what 31 bits of 8-byte units can address, with room to spare.
const MAX_ARENA: u64 = 12 << 30;
/// Smallest arena.
const MIN_ARENA: u64 = 256 << 10;

/// Sizes that cannot work, with the arithmetic.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The flash index and buffers leave too little of the memory.
    #[error(
        "{memory} of DRAM cannot serve {flash} of flash: the flash index takes {index} (objects of {object}), segment buffers and admission {fixed}; at least {arena} must remain for objects. {least} would do"
    )]
    TooLittleMemory {
        /// The memory.
        memory: ByteSize,
        /// Flash.
        flash: ByteSize,
        /// Index bytes.
        index: ByteSize,
        /// Expected mean object size.
        object: ByteSize,
        /// Buffers, admission, tables.
        fixed: ByteSize,
        /// What objects need.
        arena: ByteSize,
        /// Memory that would do, in whole mebibytes.
        least: ByteSize,
    },
    /// More than the store can address.
    #[error("{memory} of DRAM is more than the {most} that one server can use")]
    TooMuchMemory {
        /// The memory.
        memory: ByteSize,
        /// The most.
        most: ByteSize,
    },
    /// The limit cannot be lowered so far while the server runs.
    #[error(
        "{memory} of DRAM is less than the {least} that this server needs: {fixed} for the flash index, buffers and tables, \
         which stay as they were divided at the start, and {objects} for objects"
    )]
    TooLowAtRunTime {
        /// What was asked for.
        memory: ByteSize,
        /// The least.
        least: ByteSize,
        /// Of this, what cannot shrink.
        fixed: ByteSize,
        /// Of this, what objects need.
        objects: ByteSize,
    },
    /// The largest object does not fit the memory.
    #[error(
        "objects of {item} need at least {needed} of DRAM for objects, and {memory} leaves {left}; {least} would do"
    )]
    ItemTooLarge {
        /// The largest object.
        item: ByteSize,
        /// Needed for objects.
        needed: ByteSize,
        /// The memory.
        memory: ByteSize,
        /// Left for objects.
        left: ByteSize,
        /// Memory that would do, in whole mebibytes.
        least: ByteSize,
    },
}

/// One over the part of the memory that an index may take which has room for more objects than flash holds of the mean size, and how many
/// times as many that are at most.
const CHEAP_PART: u64 = 32;
const MOST_CHEAP: u64 = 8;

/// What admission gets of the memory, which objects then do not have. No policy gets more than a quarter of what the flash index
/// leaves, nor less than 64 KiB a shard.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AdmissionNeed<'a> {
    /// The least: it remembers no keys.
    Nothing,
    /// By the objects that flash can hold, and as much as the window takes that this asks for.
    Objects(&'a AdmissionConfig),
}

impl AdmissionNeed<'_> {
    /// What the policy needs that is chosen here.
    pub fn of(config: &AdmissionConfig) -> AdmissionNeed<'_> {
        match config.policy {
            PolicyName::All | PolicyName::Probability | PolicyName::WriteRate => {
                AdmissionNeed::Nothing
            }
            PolicyName::RejectFirst
            | PolicyName::Ghost
            | PolicyName::Flashiness
            | PolicyName::ExpectedReads
            | PolicyName::FlashinessPaper => AdmissionNeed::Objects(config),
        }
    }

    /// Bytes that it would have of `memory` before a flash of `objects` objects, in `shards` shards.
    fn bytes(self, memory: u64, objects: u64, shards: u64) -> u64 {
        match self {
            AdmissionNeed::Nothing => 0,
            AdmissionNeed::Objects(config) => {
                let usual = objects.saturating_mul(admission_per_object(config.policy)) / 10;
                usual.max(self.window(shards)) + config.miniature_bytes(memory, shards)
            }
        }
    }

    /// Slots that the index should have, on a flash of so many objects of the mean size that they take `slots` slots. Who weighs reads against sizes takes small ones,
    /// of which there are more, and an index without room for them forces others out while they are still read (docs/admission.md,
    /// "Room in the index").
    fn indexed(self, slots: u64) -> u64 {
        match self {
            AdmissionNeed::Objects(config) if config.policy == PolicyName::ExpectedReads => {
                slots.saturating_mul(5) / 3
            }
            _ => slots,
        }
    }

    /// Bytes of index that it wants for each object of the mean size, `object` bytes, that flash holds.
    pub fn index_bytes(self, object: u64) -> u64 {
        self.indexed(slots_of(INDEX_BYTES_PER_OBJECT, object))
    }

    /// Bytes that a window takes which is stated.
    fn window(self, shards: u64) -> u64 {
        match self {
            AdmissionNeed::Nothing => 0,
            AdmissionNeed::Objects(config) => config.window_bytes(shards).saturating_mul(shards),
        }
    }
}

/// How the memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Shards, a power of two.
    pub shards: usize,
    /// Bytes of each shard's arena.
    pub arena_bytes: usize,
    /// Buckets of each shard's flash index at first; 1 without flash.
    pub buckets: u32,
    /// Buckets to which it may grow, in memory of the arena.
    pub index_most: u32,
    /// Words of the region: header, segment table, indexes.
    pub region_words: usize,
    /// Bytes of admission tables per shard.
    pub admission_bytes: usize,
    /// Entries of each shard's table of last accesses.
    pub access_times: usize,
    /// Objects that a shard's part of the flash is expected to hold.
    pub objects: u64,
    /// Free bytes of an arena at which the cleaner is called.
    pub free_low: usize,
    /// Free bytes of an arena at which the cleaner rests.
    pub free_high: usize,
    /// What was divided.
    pub memory: u64,
    /// Bytes that do not change with the limit at run time: flash index, buffers, admission, tables.
    pub fixed: u64,
    /// Bytes of the open segments that are one shard's part.
    pub staged: u64,
    /// Largest object.
    pub max_item: u64,
}

/// Free room of an arena at which the cleaner is called, and at which it rests. What is staged counts as free, so the
/// marks lie above a shard's part of the open segments: by so much that writes find room while both are filled. Without flash
/// nothing has to be written before there is room, so little ahead of writes is enough.
fn marks(arena: u64, staged: u64) -> (usize, usize) {
    if staged == 0 {
        return ((arena / 128) as usize, (arena / 64) as usize);
    }
    let low = (staged + arena / 64).max(arena / 32).min(arena / 2);
    (low as usize, (low + arena / 32).min(arena / 4 * 3) as usize)
}

/// What is left of `memory` for each of `shards` arenas beside the table that finds its objects: 1.0 to 2.1 % of it.
fn arena_of(memory: u64, fixed: u64, shards: u64) -> u64 {
    let each = memory.saturating_sub(fixed) / shards;
    each.saturating_sub(Table::bytes_for_arena(each as usize) as u64)
}

/// The memory with which [`arena_of`] gives `shards` arenas at least `bytes` together.
fn memory_of(bytes: u64, shards: u64) -> u64 {
    (bytes.div_ceil(shards) * shards).div_ceil(1000) * 1023 + 1023 + shards
}

/// A flash that is divided, with the number of objects that it is expected to hold. All zero without one.
struct Flashed {
    flash: FlashGeometry,
    capacity: u64,
    segment: u64,
    expected: u64,
    /// Slots of its index that those take, and that it should have.
    slots: u64,
    indexed: u64,
}

/// Slots of the index for so many objects of `object` bytes: more than one where they are not packed in pages.
fn slots_of(objects: u64, object: u64) -> u64 {
    if object <= SMALL_MAX as u64 {
        return objects;
    }
    // A conversion from a float saturates.
    (objects as f64 * FlashIndex::SLOTS_PER_WIDE) as u64
}

impl Flashed {
    fn of(flash: Option<(FlashGeometry, u64)>, need: AdmissionNeed<'_>) -> Flashed {
        let (flash, object) = flash.unwrap_or((FlashGeometry::NONE, 1));
        let capacity = flash.capacity();
        let expected = capacity / object.max(64);
        let slots = slots_of(expected, object);
        let segment = u64::from(flash.segment_bytes);
        Flashed { flash, capacity, segment, expected, slots, indexed: need.indexed(slots) }
    }

    /// Bytes of the open segments while they are filled and written: those of one drive, and where there are several of the next, too.
    fn staged(&self) -> u64 {
        let open = 2 * self.flash.drive_count().min(2) as u64;
        if self.capacity > 0 { open * self.segment } else { 0 }
    }

    /// Buckets of each of `n` shards' indexes at first. Room beyond that for objects of the mean size takes no more than a quarter of the memory.
    /// Where it costs next to nothing there is room for many more: what is read is smaller than the mean of all objects where sizes differ much.
    /// What is said of their size is a guess, and the index grows where they are smaller: it never has more than half of the memory for it.
    fn buckets(&self, memory: u64, n: u64, kept: Option<u32>) -> u32 {
        match kept {
            _ if self.capacity == 0 => 1,
            Some(buckets) => buckets,
            None => {
                let in_part = |part: u64| memory / part / INDEX_BYTES_PER_OBJECT;
                let wanted = self.indexed.min(in_part(4)).max(self.slots);
                let cheap = self.slots.saturating_mul(MOST_CHEAP).min(in_part(CHEAP_PART));
                // Of an index that would not fit a half not even that is known to be right: it begins with a quarter.
                let most = in_part(if self.slots > in_part(2) { 4 } else { 2 }).max(cheap);
                FlashIndex::buckets_for((wanted.max(cheap).min(most) / n).max(64))
            }
        }
    }
}

/// What lies beside objects and admission, bytes of all shards.
struct Beside {
    buckets: u32,
    index: u64,
    buffers: u64,
    tables: u64,
    access: u64,
    statistics: u64,
    /// What admission has at least.
    least_admission: u64,
}

impl Beside {
    fn of(memory: u64, n: u64, of: &Flashed, buckets: u32) -> Beside {
        let flash = of.capacity > 0;
        Beside {
            buckets,
            index: FlashIndex::words_for(buckets) as u64 * 8 * n,
            buffers: if flash { 3 * of.segment * of.flash.drive_count() as u64 } else { 0 },
            tables: (u64::from(of.flash.segments) + 1) * 12 * n + of.flash.table_words() as u64 * 8,
            // The times of last accesses have 0.5 %.
            access: if flash { memory / 200 } else { 64 * n },
            statistics: n * (257 * 104),
            least_admission: if flash { MIN_ADMISSION * n } else { 16 << 10 },
        }
    }

    fn sum(&self) -> u64 {
        self.index + self.buffers + self.tables + self.access + self.statistics
    }

    /// What admission has of `memory`, of which `objects` bytes are for objects and the table that finds them.
    fn admission(
        &self,
        need: AdmissionNeed<'_>,
        memory: u64,
        n: u64,
        of: &Flashed,
        objects: u64,
    ) -> u64 {
        if of.capacity == 0 {
            return self.least_admission;
        }
        need.bytes(memory, of.expected, n)
            .min(memory.saturating_sub(self.index) / 4)
            .min(memory.saturating_sub(self.sum() + objects))
            .max(self.least_admission)
    }
}

/// One shard holds the largest object, and something beside it.
fn least_arena(max_item: u64) -> u64 {
    max_item + max_item / 4 + 4096
}

/// The same while a server runs, in one of `n` shards.
fn least_at_run_time(max_item: u64, staged: u64, n: u64) -> u64 {
    least_arena(max_item).max(MIN_ARENA / n).max(2 * staged)
}

/// What objects have of `memory` at least.
fn least_objects(memory: u64) -> u64 {
    MIN_ARENA.max(memory / 16)
}

/// The smallest segment, bytes.
const LEAST_SEGMENT: u64 = 64 << 10;
/// The part of the memory above which a segment is not made larger only so that 4,095 of them reach over the flash: three are held in
/// memory. With as many of them an index that takes half of the memory is full of small objects, so that none is kept from the rest.
const MOST_SEGMENT: u64 = 16;

/// The smallest segment of a sample, bytes.
const LEAST_SAMPLED_SEGMENT: u64 = 16 << 10;

impl Plan {
    /// The smallest flash that can be divided, bytes.
    pub const LEAST_FLASH: u64 = SEGMENTS_AT + MIN_SEGMENTS as u64 * LEAST_SEGMENT;

    /// Divides `memory` bytes. `flash` is the division of the flash and the mean size of an object on it, if there is one.
    ///
    /// # Errors
    /// See [`PlanError`].
    pub fn new(
        memory: u64,
        max_item: u64,
        flash: Option<(&Geometry, u32)>,
        admission: AdmissionNeed<'_>,
    ) -> Result<Plan, PlanError> {
        let flash = flash.map(|(geometry, object)| (geometry.into(), object));
        Self::over(memory, max_item, flash, admission)
    }

    /// The same before a flash of any number of drives.
    ///
    /// # Errors
    /// See [`PlanError`].
    pub fn over(
        memory: u64,
        max_item: u64,
        flash: Option<(FlashGeometry, u32)>,
        admission: AdmissionNeed<'_>,
    ) -> Result<Plan, PlanError> {
        Self::divide_or_say(memory, max_item, flash, admission, None)
    }

    /// The same around an index that is there already, of so many shards and buckets for each: what it leads to stays in the
    /// cache.
    ///
    /// # Errors
    /// When the memory is too little for it, or more than so many shards can use.
    pub fn keeping(
        memory: u64,
        max_item: u64,
        flash: (FlashGeometry, u32),
        admission: AdmissionNeed<'_>,
        (shards, buckets): (usize, u32),
    ) -> Result<Plan, PlanError> {
        let kept = Some((shards.max(1), buckets));
        Self::divide_or_say(memory, max_item, Some(flash), admission, kept)
    }

    /// [`Plan::divide`], and where it is refused for want of memory, how much would do.
    fn divide_or_say(
        memory: u64,
        max_item: u64,
        flash: Option<(FlashGeometry, u32)>,
        admission: AdmissionNeed<'_>,
        kept: Option<(usize, u32)>,
    ) -> Result<Plan, PlanError> {
        let mut refused = match Self::divide(memory, max_item, flash, admission, kept) {
            Err(e @ (PlanError::TooLittleMemory { .. } | PlanError::ItemTooLarge { .. })) => e,
            other => return other,
        };
        // A flash that is not formatted yet may be divided otherwise for more memory.
        let does = |mib: u64| {
            let memory = mib << 20;
            let one = flash.filter(|(flash, _)| kept.is_none() && flash.drives.is_one());
            let other = one.and_then(|(of, object)| {
                let flash = of.capacity() + SEGMENTS_AT;
                Some(((&Self::geometry(memory, flash, max_item).ok()?).into(), object))
            });
            [flash, other.or(flash)]
                .into_iter()
                .all(|flash| Self::divide(memory, max_item, flash, admission, kept).is_ok())
        };
        let mut low = memory >> 20;
        let mut high = low + 1;
        while !does(high) && high < 1 << 40 {
            (low, high) = (high, 2 * high);
        }
        while low + 1 < high {
            let middle = low + (high - low) / 2;
            match does(middle) {
                true => high = middle,
                false => low = middle,
            }
        }
        if let PlanError::TooLittleMemory { least, .. } | PlanError::ItemTooLarge { least, .. } =
            &mut refused
        {
            *least = ByteSize(high << 20);
        }
        Err(refused)
    }

    /// Most shards that there can be.
    pub const MOST_SHARDS: usize = 256;

    /// Whether memory can have been divided so: into so many shards with so many buckets each.
    pub fn can_be_divided(shards: u64, buckets: u32) -> bool {
        shards.is_power_of_two() && shards <= Plan::MOST_SHARDS as u64 && buckets > 0
    }

    /// Buckets to which an index that begins with `buckets` may grow beside an arena of `arena` bytes: half of that, while what it must hold
    /// finds room.
    fn index_most(arena: u64, buckets: u32, needed: u64) -> u32 {
        let gives =
            (arena / 2).min(arena.saturating_sub(needed)) / u64::from(FlashIndex::BUCKET_BYTES);
        let most = u64::from(buckets).saturating_add(gives);
        most.min(u64::from(FlashIndex::most_buckets(buckets))) as u32
    }

    fn divide(
        memory: u64,
        max_item: u64,
        flash: Option<(FlashGeometry, u32)>,
        admission: AdmissionNeed<'_>,
        kept: Option<(usize, u32)>,
    ) -> Result<Plan, PlanError> {
        let flash = flash.map(|(flash, object)| (flash, u64::from(object)));
        let object = flash.map_or(1, |(_, object)| object);
        let of = Flashed::of(flash, admission);
        let capacity = of.capacity;
        let mut shards = MAX_SHARDS;
        while memory / shards as u64 > MAX_ARENA && shards < Plan::MOST_SHARDS {
            shards *= 2;
        }
        if let Some((kept, _)) = kept {
            shards = kept;
        }
        if memory / shards as u64 > MAX_ARENA {
            return Err(PlanError::TooMuchMemory {
                memory: ByteSize(memory),
                most: ByteSize(kept.map_or(Plan::MOST_SHARDS, |(n, _)| n) as u64 * MAX_ARENA),
            });
        }
        loop {
            let n = shards as u64;
            let buckets = of.buckets(memory, n, kept.map(|(_, buckets)| buckets));
            let beside = Beside::of(memory, n, &of, buckets);
            // How many shards there are is for the objects to decide: not for what admission would like to have.
            let enough = (LARGEST_PER_ARENA * max_item).max(MIN_ARENA);
            if arena_of(memory, beside.sum() + beside.least_admission, n) < enough
                && shards > 1
                && kept.is_none()
            {
                shards /= 2;
                continue;
            }
            let mut needed = least_arena(max_item);
            if kept.is_some() {
                needed = needed.max(MIN_ARENA).max(2 * (of.staged() / n));
            }
            let least_objects = least_objects(memory);
            // What cannot be served otherwise is served with less admission.
            let objects = memory_of((needed * n).max(least_objects), n);
            let admission = beside.admission(admission, memory, n, &of, objects);
            let fixed = beside.sum() + admission;
            let arena = arena_of(memory, fixed, n);
            if capacity > 0 && arena * n < least_objects {
                return Err(PlanError::TooLittleMemory {
                    memory: ByteSize(memory),
                    flash: ByteSize(capacity),
                    index: ByteSize(beside.index),
                    object: ByteSize(object),
                    fixed: ByteSize(fixed - beside.index),
                    arena: ByteSize(least_objects),
                    least: ByteSize(0),
                });
            }
            if arena < needed {
                return Err(PlanError::ItemTooLarge {
                    item: ByteSize(max_item),
                    needed: ByteSize(needed),
                    memory: ByteSize(memory),
                    left: ByteSize(arena),
                    least: ByteSize(0),
                });
            }
            return Ok(Self::laid_out(memory, arena, shards, max_item, &of, &beside, admission));
        }
    }

    /// The division around arenas of `arena` bytes each, of so many shards: what a server has beside its objects whose memory leaves
    /// them this much. For who states the memory of objects rather than all of it; nothing is refused here.
    pub(super) fn around(
        arena: u64,
        shards: usize,
        max_item: u64,
        (flash, object): (FlashGeometry, u64),
        need: AdmissionNeed<'_>,
    ) -> Plan {
        let n = shards as u64;
        let of = Flashed::of(Some((flash, object)), need);
        let divided = |memory: u64| {
            let beside = Beside::of(memory, n, &of, of.buckets(memory, n, None));
            let objects = memory_of(least_objects(memory), n);
            let admission = beside.admission(need, memory, n, &of, objects);
            (beside, admission)
        };
        // The least memory that leaves so much. What is beside grows by less than the memory does, so there is one.
        let (mut low, mut high) = (0, memory_of(arena * n, n));
        loop {
            let (beside, admission) = divided(high);
            if arena_of(high, beside.sum() + admission, n) >= arena {
                break;
            }
            (low, high) = (high, high.saturating_mul(2));
        }
        while low + 1 < high {
            let memory = low + (high - low) / 2;
            let (beside, admission) = divided(memory);
            match arena_of(memory, beside.sum() + admission, n) >= arena {
                true => high = memory,
                false => low = memory,
            }
        }
        let (beside, usual) = divided(high);
        // A window that is stated has what it takes, where a server would refuse it for want of memory.
        let admission = usual.max(need.window(n));
        let memory = high + (admission - usual);
        Self::laid_out(memory, arena, shards, max_item, &of, &beside, admission)
    }

    fn laid_out(
        memory: u64,
        arena: u64,
        shards: usize,
        max_item: u64,
        of: &Flashed,
        beside: &Beside,
        admission: u64,
    ) -> Plan {
        let n = shards as u64;
        let staged = of.staged() / n;
        let (free_low, free_high) = marks(arena, staged);
        let index_most = match of.capacity {
            0 => beside.buckets,
            _ => Self::index_most(arena, beside.buckets, least_at_run_time(max_item, staged, n)),
        };
        Plan {
            shards,
            arena_bytes: arena as usize,
            buckets: beside.buckets,
            index_most,
            region_words: RegionLayout { flash: of.flash, shards, buckets: beside.buckets }.words(),
            admission_bytes: (admission / n) as usize,
            access_times: (beside.access / n / 8) as usize,
            objects: of.expected / n,
            free_low,
            free_high,
            memory,
            fixed: beside.sum() + admission,
            staged,
            max_item,
        }
    }

    /// The same with `memory` bytes, for a server that runs: what is beside the arenas stays as it was divided.
    ///
    /// # Errors
    /// When too little is left for objects, or more than the arenas can address.
    pub fn resized(&self, memory: u64) -> Result<Plan, PlanError> {
        let n = self.shards as u64;
        let arena = arena_of(memory, self.fixed, n);
        let needed = least_at_run_time(self.max_item, self.staged, n);
        if arena < needed {
            return Err(PlanError::TooLowAtRunTime {
                memory: ByteSize(memory),
                least: ByteSize(
                    (self.fixed + (needed * n + n).div_ceil(1000) * 1024).next_multiple_of(1 << 20),
                ),
                fixed: ByteSize(self.fixed),
                objects: ByteSize(needed * n),
            });
        }
        if arena > MAX_ARENA {
            return Err(PlanError::TooMuchMemory {
                memory: ByteSize(memory),
                most: ByteSize(self.fixed + n * MAX_ARENA),
            });
        }
        let (free_low, free_high) = marks(arena, self.staged);
        Ok(Plan { memory, arena_bytes: arena as usize, free_low, free_high, ..*self })
    }

    /// This division for a share of the objects, and for a flash of that share, in one shard: what a sample of a trace is simulated
    /// in. What grows with objects shrinks alike; segments do not become smaller than 16 KiB, nor admission smaller than every
    /// policy needs.
    pub fn sampled(&self, flash: FlashGeometry, share: f64) -> (Plan, FlashGeometry) {
        let part = |bytes: u64| (bytes as f64 * share) as u64;
        let n = self.shards as u64;
        let capacity = part(flash.capacity());
        let arena = part(self.arena_bytes as u64 * n);
        let wanted = part(u64::from(flash.segment_bytes)).max(LEAST_SAMPLED_SEGMENT);
        let segment = 1u64 << wanted.ilog2();
        // Not beyond those that can hold small objects, where the whole is not.
        let most = flash.segments.max(SMALL_SEGMENTS);
        let segments = (capacity / segment).min(most.into()) as u16;
        let objects = part(self.objects * n);
        let staged = if segments > 0 { 2 * segment } else { 0 };
        let (free_low, free_high) = marks(arena, staged);
        let indexed = part(FlashIndex::objects_for(self.buckets) * n);
        let buckets = if segments > 0 { FlashIndex::buckets_for(indexed.max(64)) } else { 1 };
        let (segment_bytes, drives) = (segment as u32, Drives::ONE);
        let sampled = FlashGeometry { segments, segment_bytes, drives, ..flash };
        let plan = Plan {
            shards: 1,
            arena_bytes: arena as usize,
            buckets,
            index_most: Self::index_most(
                arena,
                buckets,
                least_at_run_time(self.max_item, staged, 1),
            ),
            region_words: RegionLayout { flash: sampled, shards: 1, buckets }.words(),
            admission_bytes: part(self.admission_bytes as u64 * n).max(MIN_ADMISSION) as usize,
            access_times: part(self.access_times as u64 * n).max(64) as usize,
            objects,
            free_low,
            free_high,
            memory: part(self.memory),
            fixed: part(self.fixed),
            staged,
            max_item: self.max_item,
        };
        (plan, sampled)
    }

    /// How to divide a flash of `flash` bytes for this memory: larger segments take larger objects to flash, but three of
    /// them are held in DRAM.
    ///
    /// # Errors
    /// When the flash is too small or too large to be divided.
    pub fn geometry(memory: u64, flash: u64, max_item: u64) -> Result<Geometry, GeometryError> {
        let most = (flash / 64).min(memory / 64).min(4 * max_item).max(1);
        let segment = (1u64 << (63 - most.leading_zeros())).clamp(LEAST_SEGMENT, 256 << 20);
        if flash / segment <= u64::from(SMALL_SEGMENTS)
            && let Ok(geometry) = Geometry::with_segment(flash, segment)
        {
            return Ok(geometry);
        }
        Geometry::plan_within(flash, memory / MOST_SEGMENT)
    }
}

#[cfg(test)]
mod tests {
    use larder_policy::admission::{Admission, Setup};

    use super::super::defaults;
    use super::*;

    /// What most of these tests are about: the default's.
    fn default_need() -> AdmissionNeed<'static> {
        static CONFIG: std::sync::OnceLock<AdmissionConfig> = std::sync::OnceLock::new();
        AdmissionNeed::of(CONFIG.get_or_init(AdmissionConfig::default))
    }

    fn plan(memory: u64, item: u64, flash: Option<(&Geometry, u32)>) -> Result<Plan, PlanError> {
        Plan::new(memory, item, flash, default_need())
    }

    /// Who is refused is told what would do, and it does: with the flash as it is, and with one that is formatted for it.
    #[test]
    fn memory_that_would_do_is_named() {
        let mut refused = 0;
        for (memory, flash) in [(1, 24), (2, 64), (2, 1 << 10), (8, 4 << 10), (64, 1 << 17)] {
            for item in [1 << 10, 256 << 10, 1 << 20, 16 << 20] {
                let flash = flash << 20;
                let geometry = Plan::geometry(memory << 20, flash, item).unwrap();
                let of = |g| Some((g, defaults::OBJECT_SIZE));
                let Err(e) = plan(memory << 20, item, of(&geometry)) else { continue };
                let (PlanError::TooLittleMemory { least, .. }
                | PlanError::ItemTooLarge { least, .. }) = e
                else {
                    panic!("{e}")
                };
                refused += 1;
                let ByteSize(least) = least;
                assert!(least > memory << 20 && e.to_string().contains("would do"), "{e}");
                let other = Plan::geometry(least, flash, item).unwrap();
                plan(least, item, of(&geometry)).unwrap();
                plan(least, item, of(&other)).unwrap();
            }
        }
        assert!(refused > 8, "{refused}");
    }

    fn geometry(memory: u64, flash: u64) -> Geometry {
        Plan::geometry(memory, flash, 1 << 20).unwrap()
    }

    #[test]
    fn everything_is_counted() {
        for (memory, flash) in
            [(64 << 20, 1 << 30), (128 << 20, 1 << 30), (1 << 30, 8u64 << 30), (256 << 20, 4 << 30)]
        {
            let g = geometry(memory, flash);
            let p = plan(memory, 1 << 20, Some((&g, 280))).unwrap();
            let sum = p.shards as u64 * p.arena_bytes as u64
                + FlashGeometry::from(&g).table_words() as u64 * 8
                + (p.shards * (FlashIndex::words_for(p.buckets) + 257)) as u64 * 8
                + 3 * u64::from(g.segment_bytes())
                + p.shards as u64 * (p.admission_bytes + p.access_times * 8) as u64;
            assert!(sum <= memory && sum > memory * 9 / 10, "{memory}: {sum} {p:?}");
            assert!(p.free_low < p.free_high && p.free_high < p.arena_bytes);
        }
    }

    /// Else all that is free may be staged, and every write evicts on the request path until a segment is written.
    #[test]
    fn marks_leave_room_beside_what_is_staged() {
        for (memory, flash) in [(4 << 20, 26 << 20), (64 << 20, 1 << 30), (1 << 30, 16u64 << 30)] {
            let p = plan(memory, 1 << 20, Some((&geometry(memory, flash), 337))).unwrap();
            let arena = p.arena_bytes as u64;
            assert!(p.free_low as u64 >= p.staged + arena / 64 && p.free_high < p.arena_bytes / 4);
            assert!(p.free_high as u64 >= p.free_low as u64 + arena / 32, "{p:?}");
        }
    }

    #[test]
    fn little_memory_has_few_shards_rather_than_starved_ones() {
        for memory in [2u64 << 20, 6 << 20, 24 << 20, 64 << 20] {
            let g = geometry(memory, 32 << 20);
            let p = plan(memory, 64 << 10, Some((&g, 280))).unwrap();
            assert!(p.admission_bytes >= 64 << 10, "{memory}: {p:?}");
            // Three of the largest objects, whatever admission has.
            assert!(p.arena_bytes >= 3 * (64 << 10), "{memory}: {p:?}");
        }
    }

    /// The server of the study: 4 MiB before 26 MiB of flash, objects of 280 bytes. A fiftieth of the memory was 82 KiB.
    #[test]
    fn admission_is_sized_by_the_objects_that_flash_can_hold() {
        let (memory, flash) = (4 << 20, 26 << 20);
        let g = geometry(memory, flash);
        let objects = g.capacity() / 280;
        let p = plan(memory, 1 << 20, Some((&g, 280))).unwrap();
        let all = |p: &Plan| (p.admission_bytes * p.shards) as u64;
        let of = |policy| objects * admission_per_object(policy) / 10;
        assert!(all(&p).abs_diff(of(PolicyName::ExpectedReads)) < p.shards as u64, "{p:?}");
        assert!(all(&p) > 180_000, "{p:?}");
        let config = AdmissionConfig::from_name("reject_first").unwrap();
        let r = Plan::new(memory, 1 << 20, Some((&g, 280)), AdmissionNeed::of(&config)).unwrap();
        assert!(all(&r).abs_diff(of(PolicyName::RejectFirst)) < r.shards as u64, "{r:?}");
        // More memory is the objects', not admission's.
        let twice = plan(2 * memory, 1 << 20, Some((&g, 280))).unwrap();
        assert!(all(&twice).abs_diff(all(&p)) < 8 && twice.shards == p.shards, "{twice:?}");
        // Objects pay for it.
        let sum = p.fixed + p.shards as u64 * p.arena_bytes as u64;
        assert!(sum <= memory && sum > memory * 97 / 100, "{sum}: {p:?}");
        // Smaller objects allow more shards, of which each has the least.
        let p = plan(memory, 64 << 10, Some((&g, 280))).unwrap();
        assert!(p.shards > 4 && p.admission_bytes == 64 << 10, "{p:?}");

        // Where flash is 24 times the memory, it is a quarter of what the index leaves.
        let g = geometry(64 << 20, 24 * (64 << 20));
        let p = plan(64 << 20, 1 << 20, Some((&g, 280))).unwrap();
        let index = (FlashIndex::words_for(p.buckets) * 8 * p.shards) as u64;
        assert!(all(&p).abs_diff(((64 << 20) - index) / 4) <= p.shards as u64, "{p:?}");
        assert!(g.capacity() / 280 * admission_per_object(PolicyName::Flashiness) / 10 > all(&p));
    }

    #[test]
    fn what_admission_needs_is_asked_of_the_policy() {
        let (memory, item) = (64u64 << 20, 1u64 << 20);
        let g = geometry(memory, 256 << 20);
        let with = |change: fn(&mut AdmissionConfig)| {
            let mut config = AdmissionConfig::default();
            change(&mut config);
            let p = Plan::new(memory, item, Some((&g, 280)), AdmissionNeed::of(&config)).unwrap();
            let setup = Setup {
                memory: p.admission_bytes,
                seed: 1,
                objects: p.objects,
                share: 1.0 / p.shards as f64,
                dram: 0,
                flash: 0,
                budget_rate: Some(1e6),
            };
            let built = Admission::new(&config, &setup).map(|_| ());
            let too_much = config.ghost.window == u64::MAX;
            assert_eq!(built.is_ok(), !too_much, "{built:?}");
            (p.shards, p.buckets, (p.admission_bytes * p.shards) as u64)
        };
        let (shards, roomy, default) = with(|_| {});
        let (_, buckets, _) = with(|c| c.policy = PolicyName::All);
        // Who takes small objects has room for two thirds more.
        assert!(roomy.abs_diff(buckets * 5 / 3) <= 1, "{roomy} and {buckets}");
        let least = 64 << 10;
        let of = |policy| {
            (g.capacity() / 280 * admission_per_object(policy) / 10).max(least * shards as u64)
        };
        assert!(default.abs_diff(of(PolicyName::ExpectedReads)) < shards as u64);
        // No other policy changes how the index is divided.
        for (want, change) in [
            (least * shards as u64, (|c| c.policy = PolicyName::All) as fn(&mut AdmissionConfig)),
            (least * shards as u64, |c| c.policy = PolicyName::Probability),
            (least * shards as u64, |c| c.policy = PolicyName::WriteRate),
            (of(PolicyName::RejectFirst), |c| c.policy = PolicyName::RejectFirst),
            (of(PolicyName::Ghost), |c| c.policy = PolicyName::Ghost),
            (of(PolicyName::Flashiness), |c| c.policy = PolicyName::FlashinessPaper),
            (of(PolicyName::RejectFirst), |c| {
                c.policy = PolicyName::RejectFirst;
                c.reject_first.window = 1000;
            }),
        ] {
            let (s, b, bytes) = with(change);
            assert_eq!((s, b), (shards, buckets));
            assert!(bytes.abs_diff(want) < shards as u64, "{bytes}, not {want}");
        }
        // A window that is asked for is had, as far as a quarter goes.
        let (.., bytes) = with(|c| {
            c.policy = PolicyName::Ghost;
            c.ghost.window = 1_500_000;
        });
        assert!(bytes > default && bytes >= 1_500_000 * 32 / 5, "{bytes}");
        let (.., bytes) = with(|c| {
            c.policy = PolicyName::Ghost;
            c.ghost.window = u64::MAX;
        });
        assert!(bytes <= memory / 4, "{bytes}");
    }

    /// What was served with a fiftieth for admission is served still, with less than the rule says if need be.
    #[test]
    fn admission_refuses_no_flash_that_objects_allow() {
        let flash = |mib: u64| geometry(64 << 20, mib << 20);
        let served =
            |mib, need| Plan::new(64 << 20, 1 << 20, Some((&flash(mib), 280)), need).is_ok();
        let most = |need| (256..8192).rev().find(|&mib| served(mib, need)).unwrap();
        let (with, without) = (most(default_need()), most(AdmissionNeed::Nothing));
        assert_eq!(with, without);
        let p = plan(64 << 20, 1 << 20, Some((&flash(with), 280))).unwrap();
        assert!(p.arena_bytes as u64 * p.shards as u64 >= 4 << 20, "{p:?}");
    }

    #[test]
    fn arenas_stay_addressable() {
        for memory in [64u64 << 30, 1 << 40, 3 << 40] {
            let p = plan(memory, 1 << 20, None).unwrap();
            assert!(p.arena_bytes as u64 <= MAX_ARENA && p.shards <= 256, "{memory}: {p:?}");
        }
        let e = plan(900 << 40, 1 << 20, None).unwrap_err().to_string();
        assert!(e.contains("more than the 3 TiB"), "{e}");
    }

    #[test]
    fn an_index_that_is_there_is_kept_over_other_settings_while_it_fits() {
        let g = geometry(24 << 20, 64 << 20);
        let was = plan(24 << 20, 1 << 20, Some((&g, 280))).unwrap();
        let division = (was.shards, was.buckets);
        let keep = |memory, item, object| {
            Plan::keeping(memory, item, ((&g).into(), object), default_need(), division)
        };
        assert_eq!(keep(24 << 20, 1 << 20, 280).unwrap(), was);
        for (memory, item, object) in [
            (65 << 20, 1 << 20, 280),
            (24 << 20, 2 << 20, 280),
            (24 << 20, 1 << 20, 1000),
            (20 << 20, 1 << 20, 280),
        ] {
            let other = plan(memory, item, Some((&g, object))).unwrap();
            let p = keep(memory, item, object).unwrap();
            assert_eq!(
                (p.shards, p.buckets, p.region_words),
                (was.shards, was.buckets, was.region_words)
            );
            assert_eq!(p.memory, memory);
            let sum = p.fixed + p.shards as u64 * p.arena_bytes as u64;
            assert!(sum <= memory && sum > memory * 9 / 10, "{p:?}");
            assert!(
                p.admission_bytes >= 64 << 10 && p.arena_bytes as u64 > item,
                "{p:?} {other:?}"
            );
        }
        // Every shard must hold the largest object, and all of them must fit.
        assert!(keep(24 << 20, 12 << 20, 280).is_err() && keep(2 << 20, 64 << 10, 280).is_err());
        assert!(keep(was.shards as u64 * (13 << 30), 1 << 20, 280).is_err());
    }

    /// What an index may take of objects leaves them half of what they have, and what the largest of them needs.
    #[test]
    fn an_index_grows_within_the_memory_of_objects() {
        for (memory, item, flash, object) in [
            (4 << 20, 64 << 10, 26 << 20, 280),
            (64 << 20, 1 << 20, 1 << 30, 280),
            (64 << 20, 1 << 20, 1 << 30, 4096),
            (2 << 20, 256 << 10, 32 << 20, 1000),
        ] {
            let g = Plan::geometry(memory, flash, item).unwrap();
            let p = plan(memory, item, Some((&g, object))).unwrap();
            let taken = u64::from(p.index_most - p.buckets) * u64::from(FlashIndex::BUCKET_BYTES);
            assert!(p.index_most <= FlashIndex::most_buckets(p.buckets), "{p:?}");
            assert!(taken <= p.arena_bytes as u64 / 2, "{p:?}");
            assert!(p.arena_bytes as u64 - taken >= item, "{p:?}");
            assert!(p.index_most > p.buckets, "{p:?}");
        }
        assert_eq!(plan(64 << 20, 1 << 20, None).unwrap().index_most, 1);
    }

    #[test]
    fn a_changed_limit_changes_what_objects_have_and_nothing_else() {
        let g = geometry(64 << 20, 256 << 20);
        let p = plan(64 << 20, 1 << 20, Some((&g, 280))).unwrap();
        assert_eq!(p.resized(64 << 20).unwrap(), p);
        let more = p.resized(96 << 20).unwrap();
        let gained = (more.arena_bytes - p.arena_bytes) as u64 * p.shards as u64;
        assert!(gained <= 32 << 20 && gained > 31 << 20, "{gained}");
        assert_eq!((more.buckets, more.region_words), (p.buckets, p.region_words));
        let PlanError::TooLowAtRunTime { least, .. } = p.resized(8 << 20).unwrap_err() else {
            panic!("8 MiB cannot do");
        };
        assert!(p.resized(least.0).is_ok() && p.resized(least.0 - (3 << 20)).is_err(), "{least}");
        assert!(p.resized(1 << 50).is_err());
    }

    #[test]
    fn the_impossible_is_refused_with_the_arithmetic() {
        // An index that begins small would do; three segments do not fit.
        let g = geometry(4 << 20, 200 << 30);
        let e = plan(4 << 20, 1 << 10, Some((&g, 280))).unwrap_err().to_string();
        assert!(e.contains("4 MiB") && e.contains("GiB") && e.contains("flash index takes"), "{e}");
        // Where they do, flash of any size is served.
        let g = geometry(64 << 20, 100 << 30);
        let p = plan(64 << 20, 1 << 20, Some((&g, 280))).unwrap();
        let index = p.shards * FlashIndex::words_for(p.buckets) * 8;
        assert!(index <= 17 << 20 && 3 * g.segment_bytes() <= 13 << 20, "{p:?} {g:?}");
        let e = plan(64 << 20, 64 << 20, None).unwrap_err().to_string();
        assert!(e.contains("objects of 64 MiB need at least"), "{e}");
    }
}
