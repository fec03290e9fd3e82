//! The durable map, as snapshot and log have it.

use larder_base::{Nanos, Words};
use larder_format::PAGE_SIZE;
use larder_format::block::{BlockSuperblock, intents};

use super::super::super::address::Placing;
use super::super::super::map::{Making, Map, Shape, Slot};
use super::super::super::{IoFailed, LineId, LogIo, MapLog, Regions, SlotId, Sum};
use super::table;

/// A durable map that was read.
#[derive(Debug)]
pub(super) struct Durable {
    pub log: MapLog,
    /// Records of the log.
    pub records: u64,
    /// Pages of the snapshot that are damaged. What their slots held is not known: they are held.
    pub damaged: u64,
}

impl Durable {
    /// Whether there is nothing in it, nor in `maps`, into which it was read, or which an earlier run has left (`shared`).
    pub(super) fn is_empty(
        &self,
        maps: &[Map],
        shared: bool,
        io: &mut impl LogIo,
    ) -> Result<bool, IoFailed> {
        let superblock = self.log.superblock();
        if superblock.layout.is_sparse() && !shared && table::has_lines(superblock, io)? {
            return Ok(false);
        }
        let is_free = |m: &Map| match m.sparse() {
            Some(table) => table.is_new(),
            None => (0..m.len()).all(|s| m.get(SlotId(s)) == Slot::Free),
        };
        let is_new = self.records == 0 && !superblock.snapshot && self.log.regions_set() == 0;
        Ok(is_new && maps.iter().all(is_free))
    }
}

/// Reads the durable map into `maps`, unless that is there from memory (`shared`).
///
/// # Errors
/// When the device cannot be read.
pub(super) fn read(
    sb: BlockSuperblock,
    shared: bool,
    idle: Nanos,
    maps: &mut [Map],
    io: &mut impl LogIo,
) -> Result<Durable, IoFailed> {
    let per = u64::from(Shape::of(&sb.layout).slots());
    let recovered = MapLog::recover(sb, shared, idle, io, |slot, held| {
        let held = held.map(|(line, sum)| (LineId(line), Sum(sum)));
        maps[(slot / per) as usize].restore(SlotId((slot % per) as u32), held);
    })?;
    let damaged = recovered.damaged.len() as u64;
    for slot in recovered.damaged.into_iter().flatten() {
        let (map, slot) = (&mut maps[(slot / per) as usize], SlotId((slot % per) as u32));
        if map.get(slot) == Slot::Free {
            map.hold(slot);
        }
    }
    Ok(Durable { log: recovered.log, records: recovered.records, damaged })
}

/// What a start after a power cut would find on a device, of which nothing is changed.
pub struct Found {
    /// The map of each shard; of a sparse cache they are empty, its lines are in its table.
    pub maps: Vec<Map>,
    /// Records of the log.
    pub records: u64,
    /// Pages of the snapshot that are damaged.
    pub snapshot_damaged: u64,
    /// Pages of the write-intent map that are damaged.
    pub intents_damaged: u64,
    /// The log has all pages that it is known to have had; otherwise no line is used.
    pub is_whole: bool,
    log: MapLog,
    regions: Regions,
}

impl Found {
    /// Looks at the device of `sb`. It is only read.
    ///
    /// # Errors
    /// When it cannot be.
    pub fn of(sb: &BlockSuperblock, io: &mut impl LogIo) -> Result<Found, IoFailed> {
        let (layout, shape) = (sb.layout, Shape::of(&sb.layout));
        let (entries, rest) = Map::words(shape);
        let placing = Placing::of(&layout, sb.key);
        let map = |shard| {
            let words = (Words::heap(entries), Words::heap(rest));
            Map::new(words.0, words.1, placing, shard, shape, Making::default())
        };
        let mut maps: Vec<Map> = (0..layout.shards).map(map).collect();
        let durable = read(sb.clone(), false, Nanos::ZERO, &mut maps, io)?;
        let (mut page, mut intents_damaged) = (vec![0u8; PAGE_SIZE], 0);
        for number in 0..layout.intent_pages() {
            io.read(layout.intents_at() + number * PAGE_SIZE as u64, &mut page)?;
            let decoded = intents::decode(&page, number, sb.generation);
            intents_damaged += u64::from(decoded.is_none() && page.iter().any(|&b| b != 0));
        }
        Ok(Found {
            maps,
            records: durable.records,
            snapshot_damaged: durable.damaged,
            intents_damaged,
            is_whole: durable.log.is_whole(),
            log: durable.log,
            regions: Regions { groups: layout.region_groups, count: layout.regions },
        })
    }

    /// Regions whose bit is set.
    pub fn regions_set(&self) -> u64 {
        self.log.regions_set() as u64
    }

    /// Whether the line was perhaps being written to when the last run ended: then it is not used.
    pub fn in_doubt(&self, line: LineId) -> bool {
        self.log.is_set(self.regions.of(line))
    }
}
