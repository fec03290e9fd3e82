//! What is asked of shards by those who neither serve clients nor keep the durable map: operators, who counts and sweeps, who shows figures,
//! who records.
//!
//! Each call looks under one shard's lock, once. A host has them all of its [`Calls`], and calls no shard by itself.

use super::calls::Calls;
use super::event::Host;
use super::share::Count;
use crate::block::api::{BlockStats, GroupId, LineId, SlotId, Sum};
use crate::block::map::Slot;
use crate::block::record::{BlockTape, RecordedShard};

/// Where a line lies, and its checksum.
pub type Entry = (SlotId, LineId, Sum);

/// What slots of a shard with a table have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// Lines of pages that are in memory.
    pub here: Vec<Entry>,
    /// Pages with lines that are not.
    pub absent: Vec<u32>,
    /// Slots of a page.
    pub slots: u32,
}

/// The shards of a node, as they are looked at.
pub trait Looks<H: Host>: Calls<H, Shard = RecordedShard> {
    /// Where a line lies, if it is cached.
    fn find(&self, shard: u32, line: LineId) -> Option<SlotId> {
        self.shard(shard, |shard, _| shard.find(line))
    }

    /// The same with its checksum.
    fn find_sum(&self, shard: u32, line: LineId) -> Option<(SlotId, Sum)> {
        self.shard(shard, |shard, _| shard.find(line).map(|slot| (slot, shard.map().sum(slot))))
    }

    /// Which of the lines `wanted` of a group (a bit each) are cached, and how many fills of the shard are under way.
    fn cached(&self, shard: u32, group: GroupId, wanted: u16) -> (u16, u32) {
        self.shard(shard, |shard, _| {
            let is_wanted = |index: &u32| wanted & 1 << index != 0;
            let here = |index: &u32| shard.find(group.line(*index)).is_some();
            let lines = (0..u16::BITS).filter(is_wanted).filter(here);
            (lines.fold(0, |mask, index| mask | 1 << index), shard.fills_under_way())
        })
    }

    /// Fills of the shard that are under way.
    fn fills_under_way(&self, shard: u32) -> u32 {
        self.shard(shard, |shard, _| shard.fills_under_way())
    }

    /// The lines in slots `from..from + count` of a shard whose map is in memory.
    fn entries(&self, shard: u32, from: u32, count: u32) -> Vec<Entry> {
        self.shard(shard, |shard, _| {
            let slots = (from..from + count).map(SlotId);
            let line = |slot| match shard.get(slot) {
                Slot::Line(line) => Some((slot, line, shard.map().sum(slot))),
                Slot::Free | Slot::Held => None,
            };
            slots.filter_map(line).collect()
        })
    }

    /// Whether there may be lines in slots `from..from + count` of a shard with a table.
    fn may_have_lines(&self, shard: u32, from: u32, count: u32) -> bool {
        self.shard(shard, |shard, _| {
            shard.map().sparse().is_some_and(|table| {
                let per = table.page_slots();
                (from / per..=(from + count - 1) / per).any(|page| table.lines_in(page) > 0)
            })
        })
    }

    /// What is known in memory of slots `from..from + count` of a shard with a table; nothing of one without.
    fn pages(&self, shard: u32, from: u32, count: u32) -> Pages {
        self.shard(shard, |shard, _| {
            let map = shard.map();
            let Some(table) = map.sparse() else { return Pages::default() };
            let per = table.page_slots();
            let mut pages = Pages { slots: per, ..Pages::default() };
            for page in from / per..=(from + count - 1) / per {
                if table.lines_in(page) == 0 {
                    continue;
                }
                if !table.is_here(page) {
                    pages.absent.push(page);
                    continue;
                }
                let slots = (page * per).max(from)..((page + 1) * per).min(from + count);
                let line = |slot| match map.get(slot) {
                    Slot::Line(line) => Some((slot, line, map.sum(slot))),
                    Slot::Free | Slot::Held => None,
                };
                pages.here.extend(slots.map(SlotId).filter_map(line));
            }
            pages
        })
    }

    /// A shard's counters, and what its map takes of DRAM, bytes.
    fn figures(&self, shard: u32) -> (BlockStats, u64) {
        self.shard(shard, |shard, _| (shard.stats(), shard.map().memory_bytes()))
    }

    /// Lines of a shard, by a walk over its map: it takes its time.
    fn lines(&self, shard: u32) -> u32 {
        self.shard(shard, |shard, _| shard.lines())
    }

    /// Whether nothing is under way in a shard.
    fn is_idle(&self, shard: u32) -> bool {
        self.shard(shard, |shard, _| shard.is_idle())
    }

    /// Takes lines of trimmed ranges out of a shard's map, in so many steps at most. Returns whether there is more to do.
    fn sweep(&self, shard: u32, steps: u32) -> bool {
        self.shard(shard, |shard, _| shard.sweep(steps))
    }

    /// One turn of a count: see [`Count::turn`].
    fn count<K: Copy + Ord>(
        &self,
        shard: u32,
        count: &mut Count,
        of: impl Fn(GroupId) -> Option<K>,
        each: impl FnMut(K, u64),
    ) -> bool {
        self.shard(shard, |shard, _| count.turn(shard, of, each))
    }

    /// Records what a shard is told from now on; its map must be empty.
    fn record(&self, shard: u32, tape: BlockTape) {
        self.shard(shard, |shard, _| shard.record(tape));
    }

    /// Hands on what is on a shard's tape.
    fn hand_on_tape(&self, shard: u32) {
        self.shard(shard, |shard, _| shard.flush_chunk());
    }

    /// Ends recording a shard.
    fn end_tape(&self, shard: u32) {
        self.shard(shard, |shard, _| shard.end_recording());
    }
}

impl<H: Host, N: Calls<H, Shard = RecordedShard>> Looks<H> for N {}
