//! What lies under a sparse cache: the file system that has its file, and what the table says.
//!
//! The file seems as large as the line space; the drive has `flash` bytes. So somebody must say which block of the drive a
//! line lies in. [`Files`] does as ext4 does: what follows what is there already goes behind it if that is free, anything
//! else to the next free place; what becomes a hole is free at once (and trimmed, if the drive's trims are passed on).
//! Pages of the table, with superblock and write-intent map, have an area of their own, a 32nd of the drive; of the rest a
//! 32nd is left free for what is to become holes.
//!
//! A simulation has no bytes, and every line the same CRC-32C, so that of a page of the table a bit a slot is kept.

use std::collections::BTreeMap;

use larder_base::Nanos;
use larder_engine::block::address::Placing;
use larder_engine::block::{LineId, SlotId, Sum};
use larder_format::PAGE_SIZE;
use larder_format::block::{Layout, table};

use crate::device::DeviceOp;
use crate::device::drive::Drive;

/// The share of the drive that is not for lines, and of the rest what is not filled.
const SHARE: u64 = 32;
/// The least of it, bytes.
const LEAST: u64 = 1 << 20;
/// CRC-32C of every line.
const CRC: u32 = 0;

/// Bytes of lines that a cache on a drive of `flash` bytes holds.
pub(super) fn line_bytes(flash: u64) -> u64 {
    let area = flash - meta_bytes(flash).min(flash);
    area - area / SHARE
}

fn meta_bytes(flash: u64) -> u64 {
    (flash / SHARE).max(LEAST).next_multiple_of(1 << 16)
}

/// Units of a file in units of a stretch of the drive.
#[derive(Debug)]
struct Area {
    /// Where the stretch begins, and bytes of a unit.
    base: u64,
    unit: u64,
    units: BTreeMap<u64, u32>,
    free: Vec<u64>,
    free_units: u32,
    /// Where the next free one is looked for.
    next: u32,
}

impl Area {
    fn new(base: u64, bytes: u64, unit: u64) -> Area {
        let count = u32::try_from(bytes / unit).unwrap_or(u32::MAX);
        let mut free = vec![u64::MAX; count.div_ceil(64) as usize];
        if let Some(last) = free.last_mut().filter(|_| !count.is_multiple_of(64)) {
            *last = (1 << (count % 64)) - 1;
        }
        Area { base, unit, units: BTreeMap::new(), free, free_units: count, next: 0 }
    }

    fn is_free(&self, at: u32) -> bool {
        self.free.get(at as usize / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    /// The next free one from `from` on, and from the beginning behind the last.
    fn next_free(&self, from: u32) -> Option<u32> {
        if self.free_units == 0 {
            return None;
        }
        let words = self.free.len();
        let first = (from as usize / 64).min(words - 1);
        let mask = u64::MAX << (from % 64);
        let at = |word: usize, mask: u64| {
            let bits = self.free[word] & mask;
            (bits != 0).then(|| word as u32 * 64 + bits.trailing_zeros())
        };
        at(first, mask).or_else(|| (1..=words).find_map(|i| at((first + i) % words, u64::MAX)))
    }

    /// Where on the drive `unit` of the file is.
    fn find(&self, unit: u64) -> Option<u64> {
        self.units.get(&unit).map(|&at| self.base + u64::from(at) * self.unit)
    }

    /// The same; it is given a place if it has none. `None`: there is none.
    fn place(&mut self, unit: u64) -> Option<u64> {
        if let Some(at) = self.find(unit) {
            return Some(at);
        }
        let before = unit.checked_sub(1).and_then(|before| self.units.get(&before));
        let behind = before.map(|at| at + 1).filter(|&at| self.is_free(at));
        let at = behind.or_else(|| self.next_free(self.next))?;
        self.free[at as usize / 64] &= !(1 << (at % 64));
        self.free_units -= 1;
        self.next = at + 1;
        self.units.insert(unit, at);
        self.find(unit)
    }

    /// Units `first..end` become holes; `each` is told where they were.
    fn punch(&mut self, first: u64, end: u64, mut each: impl FnMut(u64)) {
        while let Some((&unit, &at)) = self.units.range(first..end).next() {
            self.units.remove(&unit);
            self.free[at as usize / 64] |= 1 << (at % 64);
            self.free_units += 1;
            each(self.base + u64::from(at) * self.unit);
        }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Files {
    layout: Layout,
    placing: Placing,
    generation: u64,
    meta: Area,
    lines: Area,
    /// By number: which slots of a page of the table have lines.
    pages: BTreeMap<u64, Vec<u64>>,
    /// Something of the table had no place.
    pub full: bool,
    /// Pages of the table that were read.
    pub reads: u64,
}

impl Files {
    pub(super) fn new(layout: Layout, placing: Placing, generation: u64, flash: u64) -> Files {
        let meta = meta_bytes(flash);
        let unit = u64::from(layout.line);
        Files {
            layout,
            placing,
            generation,
            meta: Area::new(0, meta, PAGE_SIZE as u64),
            lines: Area::new(meta, flash.saturating_sub(meta), unit),
            pages: BTreeMap::new(),
            full: false,
            reads: 0,
        }
    }

    fn unit(&self, shard: u32, slot: SlotId) -> u64 {
        (self.layout.slot_at(shard, slot.0) - self.layout.data) / u64::from(self.layout.line)
    }

    /// A read of `lines` lines from `slot` on: when it is done. A line that is not there is a hole, and takes no time.
    pub(super) fn read(
        &self,
        drive: &mut Drive,
        now: Nanos,
        (shard, slot): (u32, SlotId),
        lines: u32,
    ) -> Nanos {
        let first = self.unit(shard, slot);
        let places = (first..first + u64::from(lines)).filter_map(|unit| self.lines.find(unit));
        places.fold(now, |done, at| Nanos(done.0.max(drive.read(now, at, self.layout.line).0)))
    }

    /// A write of the same. `None`: the file system is full.
    pub(super) fn write(
        &mut self,
        drive: &mut Drive,
        now: Nanos,
        (shard, slot): (u32, SlotId),
        lines: u32,
    ) -> Option<Nanos> {
        let first = self.unit(shard, slot);
        let mut done = now;
        for unit in first..first + u64::from(lines) {
            let at = self.lines.place(unit)?;
            done = Nanos(done.0.max(drive.write(now, at, self.layout.line).0));
        }
        Some(done)
    }

    /// A page of the table is read: when that is done.
    pub(super) fn load(&mut self, drive: &mut Drive, now: Nanos, shard: u32, page: u32) -> Nanos {
        self.reads += 1;
        let unit = self.layout.table_at(shard, page) / PAGE_SIZE as u64;
        self.meta.find(unit).map_or(now, |at| drive.read(now, at, PAGE_SIZE as u32))
    }

    /// What that page says of its slots.
    pub(super) fn page(&self, shard: u32, page: u32) -> Vec<Option<Sum>> {
        let per = self.layout.shard_slots() / self.layout.table_pages().max(1);
        let bits = self.pages.get(&self.layout.table_number(shard, page));
        let has = |i: u32| bits.is_some_and(|b| b[i as usize / 64] >> (i % 64) & 1 == 1);
        let line = |i: u32| -> LineId { self.placing.line_in(shard, page * per + i) };
        (0..per).map(|i| has(i).then(|| Sum::of(line(i), CRC))).collect()
    }

    /// The log writes `bytes` at `at` of the file: when that is done.
    pub(super) fn write_meta(
        &mut self,
        drive: &mut Drive,
        now: Nanos,
        at: u64,
        bytes: &[u8],
    ) -> Nanos {
        let mut done = now;
        let table = self.layout.snapshot_at(0);
        for (i, page) in (0u64..).zip(bytes.chunks(PAGE_SIZE)) {
            let at = at + i * PAGE_SIZE as u64;
            let Some(place) = self.meta.place(at / PAGE_SIZE as u64) else {
                self.full = true;
                return done;
            };
            done = Nanos(done.0.max(drive.write(now, place, PAGE_SIZE as u32).0));
            let number = at.checked_sub(table).map(|behind| behind / PAGE_SIZE as u64);
            let Some(number) = number.filter(|&n| n < self.layout.snapshot_pages) else { continue };
            if let Some(slots) = table::decode(page, self.generation, number) {
                let mut bits = vec![0u64; table::SLOTS_PER_PAGE.div_ceil(64)];
                for (i, _) in slots.enumerate().filter(|(_, sum)| sum.is_some()) {
                    bits[i / 64] |= 1 << (i % 64);
                }
                self.pages.insert(number, bits);
            }
        }
        done
    }

    /// Bytes `at..at + len` of the file become a hole.
    pub(super) fn punch(&mut self, drive: &mut Drive, now: Nanos, at: u64, len: u64) {
        let layout = &self.layout;
        let (table, page) = (layout.snapshot_at(0), PAGE_SIZE as u64);
        let (area, base) = match at >= layout.data {
            true => (&mut self.lines, layout.data),
            false => {
                let number = |at: u64| at.saturating_sub(table) / page;
                let gone: Vec<u64> =
                    self.pages.range(number(at)..number(at + len)).map(|(&n, _)| n).collect();
                gone.iter().for_each(|number| drop(self.pages.remove(number)));
                (&mut self.meta, 0)
            }
        };
        let (unit, bytes) = (area.unit, area.unit as u32);
        area.punch((at - base) / unit, (at - base + len) / unit, |offset| {
            drive.apply(now, DeviceOp::Trim { offset, len: bytes });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_have_places_of_their_own_and_give_them_back() {
        let mut area = Area::new(4096, 100 * 4096, 4096);
        let first: Vec<u64> = (50..80).map(|unit| area.place(unit).unwrap()).collect();
        assert!(first.windows(2).all(|w| w[1] == w[0] + 4096), "neighbours are neighbours");
        assert_eq!(area.place(50), Some(first[0]));
        let rest: Vec<u64> = (0..70).map(|unit| area.place(unit * 1000 + 7).unwrap()).collect();
        let all: std::collections::BTreeSet<u64> = first.iter().chain(&rest).copied().collect();
        assert_eq!(all.len(), 100);
        assert!(all.iter().all(|&at| (4096..101 * 4096).contains(&at)));
        assert_eq!(area.place(1), None, "full");
        let mut freed = Vec::new();
        area.punch(60, 62, |at| freed.push(at));
        assert_eq!(freed, first[10..12]);
        assert_eq!((area.find(60), area.free_units), (None, 2));
        let again = [area.place(1).unwrap(), area.place(90_000).unwrap()];
        assert_eq!(freed, again);
        assert_eq!(area.place(2), None);
    }

    #[test]
    fn a_drive_has_room_for_what_its_lines_take_and_more() {
        for flash in [2u64 << 20, 24 << 20, 1 << 30, 3 << 40] {
            let lines = line_bytes(flash);
            assert!(lines + meta_bytes(flash) < flash, "{flash}");
            assert!(flash < 64 << 20 || lines * 15 > flash * 14, "{flash}: {lines}");
        }
        assert_eq!(line_bytes(100), 0);
    }
}
