//! Which line lies in which slot: the placements, behind one interface.
//!
//! | placement | a line may lie | DRAM of a slot |
//! | --- | --- | --- |
//! | [`sets`]: direct-mapped, set-associative | in one slot of each way of its set | 7 bytes |
//! | [`full`]: fully associative, a log of segments | anywhere | 15 bytes |
//! | [`sparse`]: a sparse file, its map on the device | in one slot that is no other's | a fixed sum in all |
//!
//! The shard finds lines, chooses and reserves slots, publishes and empties them through [`Map`]; what differs is asked
//! of it too: whether lines are [updated in place](Map::updates_in_place), and what is to be [cleaned](Map::next_clean).
//!
//! A slot is *free*, *held* or has a line. Every change is one store of one word, or ordered so that a kill between any
//! two stores leaves nothing that attaching would take for a line that is not there.

pub mod full;
mod index;
mod segments;
pub mod sets;
pub mod sparse;
#[cfg(test)]
mod tests;

use larder_base::Words;
use larder_format::block::Layout;
pub use larder_policy::block::Replacement;
use larder_policy::block::{EvictionBy, VictimPolicy};

use super::address::Placing;
use super::api::{GROUP_LINES, GroupId, LineId, SlotId, Sum};
pub use full::Full;
pub use sets::{MAX_WAYS, Sets};
pub use sparse::Sparse;

/// Words beside the map that name void regions: they are the shard's affair, and outlive the process with the map.
pub(super) const VOID_WORDS: usize = 32;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    /// Nothing, durably.
    Free,
    /// Nothing, but the durable map may say otherwise.
    Held,
    /// A line.
    Line(LineId),
}

/// The placement of a shard: part of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Direct-mapped (one way) or set-associative.
    Sets {
        /// Sets of groups.
        group_sets: u32,
        /// Ways of each, 1 to [`MAX_WAYS`].
        ways: u32,
    },
    /// Fully associative.
    Full {
        /// Segments of the log, at least [`full::LEAST_SEGMENTS`].
        segments: u32,
        /// Lines of a segment: a power of two.
        lines: u32,
    },
    /// A slot for each line of the line space.
    Sparse {
        /// Pages of the table.
        pages: u32,
        /// Slots of each.
        slots: u32,
        /// Pages of which the entries are in memory.
        frames: u32,
        /// Lines that may be there at a time.
        most: u64,
    },
}

impl Shape {
    /// That of a device.
    pub fn of(layout: &Layout) -> Shape {
        if layout.is_sparse() {
            let (pages, slots) = (layout.table_pages(), layout.page_groups * GROUP_LINES);
            let frames = sparse::frames_for(pages, slots, layout.shards);
            let most = layout.capacity() / u64::from(layout.shards);
            return Shape::Sparse { pages, slots, frames, most };
        }
        match layout.segment {
            0 => Shape::Sets { group_sets: layout.group_sets, ways: layout.ways },
            lines => Shape::Full { segments: layout.segments(), lines },
        }
    }

    /// Slots of the shard.
    pub fn slots(&self) -> u32 {
        match *self {
            Shape::Sets { group_sets, ways } => Sets::slots(group_sets, ways),
            Shape::Full { segments, lines } => segments * lines,
            Shape::Sparse { pages, slots, .. } => pages * slots,
        }
    }
}

/// Who goes when room is needed: may differ from run to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Making {
    /// The replacement policy.
    pub replacement: Replacement,
    /// [`Shape::Full`]: which segment is reclaimed.
    pub reclaim: VictimPolicy,
    /// [`Shape::Full`]: whether the policy drops lines or the cleaner does.
    pub evict: EvictionBy,
}

impl Default for Making {
    fn default() -> Making {
        Making {
            replacement: Replacement::Lru,
            reclaim: VictimPolicy::Fifo,
            evict: EvictionBy::default(),
        }
    }
}

/// A line that stands against one that is to be cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rival {
    /// Where it lies.
    pub slot: SlotId,
    /// The line.
    pub line: LineId,
    /// It must go if the other is to come; otherwise it is only one of those that the cleaner will drop.
    pub goes: bool,
}

/// Which place is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// Any.
    Place,
    /// Any; and if the cache is full, a line is to be named that the new one is to be better than.
    Contest,
    /// One for which a line goes, even if there is room.
    Displace,
    /// One for which no line goes, now or when the cleaner makes up for it.
    Free,
}

/// A place for a line that is to be filled. Nothing is changed before [`Map::reserve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Where.
    pub slot: SlotId,
    /// Whether the slot is free; else the log must first know that it is empty.
    pub free: bool,
    /// Whose place it takes.
    pub rival: Option<Rival>,
}

/// What the cleaner of a log does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clean {
    /// The line moves; its new slot is reserved.
    Copy {
        /// Which line.
        line: LineId,
        /// Where it lies.
        from: SlotId,
        /// Where it goes.
        to: SlotId,
    },
    /// The line in the slot is dropped.
    Drop(SlotId),
}

/// An entry that attaching cannot accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "slot {slot} of shard {shard} has an entry that this version does not write ({entry:#018x})"
)]
pub struct BadEntry {
    /// The shard.
    pub shard: u32,
    /// The slot.
    pub slot: u32,
    /// Its entry.
    pub entry: u64,
}

#[derive(Debug)]
enum Kind {
    Sets(Box<Sets>),
    Full(Box<Full>),
    Sparse(Box<Sparse>),
}

/// The map of one shard.
#[derive(Debug)]
pub struct Map(Kind);

macro_rules! each {
    ($map:expr, $m:ident => $e:expr) => {
        match $map {
            Kind::Sets($m) => $e,
            Kind::Full($m) => $e,
            Kind::Sparse($m) => $e,
        }
    };
}

impl Map {
    /// Words that the two arrays of a map of this shape take.
    pub fn words(shape: Shape) -> (usize, usize) {
        let (entries, rest) = match shape {
            Shape::Sets { .. } => Sets::words(shape.slots()),
            Shape::Full { segments, lines } => Full::words(segments, lines),
            Shape::Sparse { pages, slots, frames, .. } => Sparse::words(pages, slots, frames),
        };
        (entries, rest + VOID_WORDS)
    }

    /// Bytes of memory that a map of this shape takes at most, words, index and all: for its slots, and beside them for what
    /// does not follow from their number (segments; words that note what is void).
    pub fn most_bytes(shape: Shape) -> (u64, u64) {
        let (slots, rest) = match shape {
            Shape::Sets { .. } => (u64::from(shape.slots()) * 7, 0),
            Shape::Full { segments, lines } => Full::most_bytes(segments, lines),
            Shape::Sparse { .. } => {
                let (entries, rest) = Self::words(shape);
                (0, (entries + rest) as u64 * 8)
            }
        };
        (slots, rest + VOID_WORDS as u64 * 8)
    }

    /// A map in `entries` and `rest`, which are zero or were one of the same shape.
    ///
    /// # Panics
    /// If the words are too few or the shape is none.
    pub fn new(
        entries: Words,
        rest: Words,
        placing: Placing,
        shard: u32,
        shape: Shape,
        making: Making,
    ) -> Map {
        let need = Self::words(shape);
        assert!(entries.len() >= need.0 && rest.len() >= need.1, "too few words for the map");
        Map(match shape {
            Shape::Sets { group_sets, ways } => {
                let replacement = making.replacement;
                let shape = (group_sets, ways);
                let sets = Sets::new(entries, rest, placing, shard, shape, replacement);
                Kind::Sets(Box::new(sets))
            }
            Shape::Full { segments, lines } => {
                let shape = (segments, lines);
                Kind::Full(Box::new(Full::new(entries, rest, placing, shard, shape, making)))
            }
            Shape::Sparse { pages, slots, frames, most } => {
                let shape = (pages, slots, frames);
                Kind::Sparse(Box::new(Sparse::new(entries, rest, placing, shard, shape, most)))
            }
        })
    }

    /// Word `at` of [`VOID_WORDS`].
    pub(super) fn void_word(&self, at: usize) -> u64 {
        each!(&self.0, m => m.rest().load(m.own_rest() + at))
    }

    /// Word `at` of [`VOID_WORDS`] is this from now on.
    pub(super) fn set_void_word(&mut self, at: usize, word: u64) {
        each!(&mut self.0, m => {
            let at = m.own_rest() + at;
            m.rest_mut().store(at, word)
        })
    }

    /// A copy of the words as they are.
    pub fn snapshot(&self) -> (Words, Words) {
        each!(&self.0, m => m.snapshot())
    }

    /// Number of slots.
    pub fn len(&self) -> u32 {
        each!(&self.0, m => m.len())
    }

    /// Whether there are none (never).
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of the shard whose map it is.
    pub fn shard(&self) -> u32 {
        each!(&self.0, m => m.shard())
    }

    /// How the line space is placed.
    pub fn placing(&self) -> &Placing {
        each!(&self.0, m => m.placing())
    }

    /// Bytes of memory: words, index and all.
    pub fn memory_bytes(&self) -> u64 {
        each!(&self.0, m => m.memory_bytes())
    }

    /// The map, if its placement is sparse.
    pub fn sparse(&self) -> Option<&Sparse> {
        match &self.0 {
            Kind::Sparse(m) => Some(m),
            _ => None,
        }
    }

    /// The same, to change what the others do not have.
    pub fn sparse_mut(&mut self) -> Option<&mut Sparse> {
        match &mut self.0 {
            Kind::Sparse(m) => Some(m),
            _ => None,
        }
    }

    /// Lines in the map, by a walk over all of it where they are not counted.
    pub fn count(&self) -> u32 {
        if let Some(map) = self.sparse() {
            return u32::try_from(map.lines()).unwrap_or(u32::MAX);
        }
        (0..self.len()).filter(|&s| matches!(self.get(SlotId(s)), Slot::Line(_))).count() as u32
    }

    /// What `slot` holds.
    pub fn get(&self, slot: SlotId) -> Slot {
        each!(&self.0, m => m.get(slot))
    }

    /// The checksum of the line in `slot`.
    pub fn sum(&self, slot: SlotId) -> Sum {
        each!(&self.0, m => m.sum(slot))
    }

    /// The slot where `line` lies.
    pub fn find(&self, line: LineId) -> Option<SlotId> {
        each!(&self.0, m => m.find(line))
    }

    /// The slots where the lines of `group` lie.
    pub fn find_all(&self, group: GroupId) -> [Option<SlotId>; GROUP_LINES as usize] {
        match &self.0 {
            Kind::Sets(m) => m.find_all(group),
            Kind::Full(m) => std::array::from_fn(|i| m.find(group.line(i as u32))),
            Kind::Sparse(m) => std::array::from_fn(|i| m.find(group.line(i as u32))),
        }
    }

    /// What it costs to look for the lines of a group, in slots that are looked at one after the other.
    pub fn cost_of_group(&self) -> u64 {
        match &self.0 {
            // The ways lie side by side.
            Kind::Sets(_) | Kind::Sparse(_) => u64::from(GROUP_LINES),
            // Each look is a walk of its own into a large table.
            Kind::Full(_) => 8 * u64::from(GROUP_LINES),
        }
    }

    /// The line in `slot` was used.
    pub fn hit(&mut self, slot: SlotId) {
        each!(&mut self.0, m => m.hit(slot))
    }

    /// Whether a line that is written again keeps its slot; else it goes to another.
    pub fn updates_in_place(&self) -> bool {
        matches!(self.0, Kind::Sets(_) | Kind::Sparse(_))
    }

    /// Whether a slot may be emptied while it is read: it is not used for another line before that is over.
    pub fn outlives_reads(&self) -> bool {
        matches!(self.0, Kind::Full(_))
    }

    /// A slot for `line`, which lies in none. `busy` tells slots that must not be touched. Nothing is changed but what
    /// the replacement policy remembers.
    pub fn choose(
        &mut self,
        line: LineId,
        busy: impl Fn(SlotId, Slot) -> bool,
        want: Want,
    ) -> Option<Choice> {
        match &mut self.0 {
            Kind::Sets(m) => m.choose(line, |slot, now| {
                let taken = matches!(now, Slot::Line(_));
                let unwanted = match want {
                    Want::Displace => !taken,
                    Want::Free => taken,
                    Want::Place | Want::Contest => false,
                };
                unwanted || busy(slot, now)
            }),
            Kind::Full(m) => m.choose(line, |slot, line| busy(slot, Slot::Line(line)), want),
            Kind::Sparse(m) => m.choose(line, busy, want),
        }
    }

    /// How many of the `lines` lines of a group from `first` on, which lie in no slot, could be had with [`Want::Free`] if
    /// `under_way` others are to have their places as well.
    pub fn free_for(
        &self,
        first: LineId,
        lines: u32,
        under_way: u32,
        busy: impl Fn(SlotId, Slot) -> bool,
    ) -> u32 {
        let all = (first.0..first.0 + u64::from(lines)).map(LineId);
        match &self.0 {
            Kind::Sets(m) => all.filter(|&line| m.has_free(line, &busy)).count() as u32,
            Kind::Full(m) => m.free_for(under_way).min(lines),
            Kind::Sparse(m) => {
                let free = all.filter(|&line| m.has_free(line, &busy)).count() as u32;
                free.min(m.free_for(under_way))
            }
        }
    }

    /// `slot`, which was chosen, is going to be written.
    pub fn reserve(&mut self, slot: SlotId) {
        match &mut self.0 {
            Kind::Sets(_) => {}
            Kind::Full(m) => m.reserve(slot),
            Kind::Sparse(m) => m.reserve(slot),
        }
    }

    /// The writing of `slot` is over, one way or the other.
    pub fn unreserve(&mut self, slot: SlotId) {
        match &mut self.0 {
            Kind::Sets(_) => {}
            Kind::Full(m) => m.unreserve(slot),
            Kind::Sparse(m) => m.unreserve(slot),
        }
    }

    /// A read of `slot` begins: until it ends, the slot is not used for another line.
    pub fn begin_read(&mut self, slot: SlotId) {
        if let Kind::Full(m) = &mut self.0 {
            m.begin_read(slot);
        }
    }

    /// A read of `slot` has ended.
    pub fn end_read(&mut self, slot: SlotId) {
        if let Kind::Full(m) = &mut self.0 {
            m.end_read(slot);
        }
    }

    /// Empties `slot`: from now on it is held.
    pub fn hold(&mut self, slot: SlotId) {
        each!(&mut self.0, m => m.hold(slot))
    }

    /// The line in `slot` leaves the cache: like [`Map::hold`], and what is cleaned may gain room by it.
    pub fn drop_line(&mut self, slot: SlotId) {
        match &mut self.0 {
            Kind::Sets(m) => m.hold(slot),
            Kind::Full(m) => m.drop_line(slot),
            Kind::Sparse(m) => m.hold(slot),
        }
    }

    /// The line in `slot` makes room for another: like [`Map::hold`], and the replacement policy remembers it.
    pub fn evict(&mut self, slot: SlotId) {
        match &mut self.0 {
            Kind::Sets(m) => m.evict(slot),
            Kind::Full(m) => m.evict(slot),
            Kind::Sparse(m) => m.hold(slot),
        }
    }

    /// The durable map knows that `slot`, which is held, is empty.
    pub fn free(&mut self, slot: SlotId) {
        each!(&mut self.0, m => m.free(slot))
    }

    /// The bytes of `line` are in `slot`, which is empty, and have checksum `sum`.
    pub fn publish(&mut self, slot: SlotId, line: LineId, sum: Sum) {
        each!(&mut self.0, m => m.publish(slot, line, sum))
    }

    /// Puts what was durable into `slot`: `line` with `sum`, or nothing; later states last. A line that cannot lie there
    /// (a damaged record) leaves the slot held, and so does one that is found elsewhere later: the durable map has it,
    /// this one does not.
    pub fn restore(&mut self, slot: SlotId, holds: Option<(LineId, Sum)>) {
        match &mut self.0 {
            Kind::Sets(m) => m.restore(slot, holds),
            Kind::Full(m) => m.restore(slot, holds),
            // Its durable map is no list of slots: see `Sparse::found`.
            Kind::Sparse(_) => {}
        }
    }

    /// What was found is all that there is: the map is going to be used.
    pub fn begin(&mut self) {
        if let Kind::Full(m) = &mut self.0 {
            m.begin();
        }
    }

    /// What the cleaner of a log is to do now: see [`Full::next_clean`]. Nothing for other placements.
    pub fn next_clean(
        &mut self,
        keep: impl FnMut(LineId) -> bool,
        locked: impl Fn(LineId) -> bool,
        busy: impl Fn(SlotId, LineId) -> bool,
    ) -> Option<Clean> {
        match &mut self.0 {
            Kind::Sets(_) | Kind::Sparse(_) => None,
            Kind::Full(m) => m.next_clean(keep, locked, busy),
        }
    }

    /// A line that [`Clean::Copy`] named is written, or will not be. The new slot is to be unreserved besides.
    pub fn copied(&mut self) {
        if let Kind::Full(m) = &mut self.0 {
            m.copied();
        }
    }

    /// Segments reclaimed so far, and whether the cleaner waits until the log has freed slots.
    pub fn cleaning(&self) -> (u64, bool) {
        match &self.0 {
            Kind::Sets(_) | Kind::Sparse(_) => (0, false),
            Kind::Full(m) => m.cleaning(),
        }
    }

    /// Whether every entry is one that this version writes.
    ///
    /// # Errors
    /// The first that is not.
    pub fn validate(&self) -> Result<(), BadEntry> {
        each!(&self.0, m => m.validate())
    }

    /// A segment that may be written anew while something of it is read: there must be none. For checkers; it looks at all segments.
    pub fn free_while_read(&self) -> Option<u32> {
        match &self.0 {
            Kind::Full(m) => m.free_while_read(),
            _ => None,
        }
    }

    /// Plants a fault in the log of segments: they are used again before the durable map knows that they are empty, or
    /// while they are read.
    #[cfg(feature = "planted")]
    pub(super) fn plant(&mut self, fault: super::Planted) {
        if let Kind::Full(m) = &mut self.0 {
            m.plant(fault);
        }
    }
}
