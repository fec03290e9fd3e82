//! What must hold at any moment; rot; what the backing store forgets.

use std::collections::BTreeMap;
use std::ops::Range;

use larder_base::Rng;
use larder_engine::block::address::Place;
use larder_engine::block::map::Slot;
use larder_engine::block::node::failing::page_slots;
use larder_engine::block::{GROUP_LINES, IoFailed, LineId, MapRecord, SlotId, Sum};
use larder_format::PAGE_SIZE;
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::COPY_BYTES;

use super::{PER_LINE, SECTOR, SHARDS, World};
use crate::parts::{Doing, Event, Truth, crcs, value};

impl World {
    pub(super) fn put_backing(&mut self, sector: u64, value: u64) {
        let before = self.backing.insert(sector, value).unwrap_or(0);
        self.volatile.entry(sector).or_insert(before);
        let region = (sector / self.per_region()) as u32;
        self.flushing.changed(sector, region);
    }

    /// From now on the backing store's bytes are the only answer.
    pub(super) fn backing_is_true(&mut self) {
        for (s, truth) in &mut self.truth {
            *truth = Truth {
                settled: [self.backing.get(s).copied().unwrap_or(0)].into(),
                ..Truth::default()
            };
        }
    }

    /// The backing store has lost its power too: each change that was not flushed is there or not. (Of a process that is killed alone
    /// the store has what it had: it does not know what was lost before; docs/nbd.md.)
    pub(super) fn backing_loses(&mut self) {
        for (sector, durable) in std::mem::take(&mut self.volatile) {
            if self.flushing.has_lost(sector) || self.rng.chance(0.5) {
                self.backing.insert(sector, durable);
            }
        }
        for store in &mut self.volumes {
            for (sector, durable) in std::mem::take(&mut store.owed) {
                if self.rng.chance(0.5) {
                    store.content.insert(sector, durable);
                }
            }
        }
        self.backing_is_true();
    }

    /// The same for sectors that have what they had before from now on, while everything goes on; nothing of them is under way at
    /// the backing store. Who reads there or writes meanwhile may find either.
    pub(super) fn stretch_loses(&mut self, lost: BTreeMap<u64, u64>) {
        for (sector, durable) in lost {
            self.volatile.remove(&sector);
            self.seen.forgotten += 1;
            self.backing.insert(sector, durable);
            let truth = self.truth.entry(sector).or_default();
            truth.settled = [durable].into();
            truth.acked.push((self.time, durable));
        }
    }

    /// Every line in the map has the bytes of the backing store.
    pub(super) fn check_map(&self) -> Result<(), String> {
        for (i, shard) in self.shards.iter().enumerate() {
            shard.map().validate().map_err(|e| e.to_string())?;
            if !shard.is_enabled() {
                continue;
            }
            self.check_table(i)?;
            for slot in (0..shard.map().len()).map(SlotId) {
                let Slot::Line(line) = shard.get(slot) else { continue };
                self.check_line(i, slot, line)?;
            }
        }
        Ok(())
    }

    fn check_line(&self, shard: usize, slot: SlotId, line: LineId) -> Result<(), String> {
        if World::is_never(line) {
            return Err(format!("shard {shard} {slot:?}: {line:?} is never to be cached"));
        }
        if self.rotten.contains(&(shard, slot)) || self.is_aside(line) {
            return Ok(());
        }
        if self.volume_at(line.0 * PER_LINE).is_none() {
            return Err(format!("shard {shard} {slot:?}: {line:?} is cached, and nobody's"));
        }
        let flash = self.device.borrow().read(self.flash_at(shard, slot), PER_LINE as usize);
        for (s, content) in (line.0 * PER_LINE..).zip(&flash) {
            let backing = self.backing.get(&s).copied().unwrap_or(0);
            if value(content) != backing {
                return Err(format!(
                    "shard {shard} {slot:?} {line:?}: sector {s} is {} on flash, {backing} on the backing store",
                    value(content)
                ));
            }
        }
        Ok(())
    }

    /// The same for lines of pages of the table that are on the device alone.
    fn check_table(&self, shard: usize) -> Result<(), String> {
        let Some(map) = self.shards[shard].map().sparse() else { return Ok(()) };
        let per = map.page_slots();
        for page in (0..map.pages()).filter(|&p| !map.is_here(p) && !map.is_void(p)) {
            let Ok(slots) = self.read_page(shard, page) else {
                if map.lines_in(page) > 0 {
                    return Err(format!("shard {shard}: page {page} is not whole"));
                }
                continue;
            };
            let lines = slots.iter().flatten().count() as u32;
            if lines != map.lines_in(page) {
                let counted = map.lines_in(page);
                return Err(format!("shard {shard}: page {page} has {lines} lines, not {counted}"));
            }
            for (slot, _) in (page * per..).zip(&slots).filter(|(_, sum)| sum.is_some()) {
                let place = Place { group_set: slot / 16, tag: 0 };
                let line = map.placing().line(shard as u32, place, slot % 16);
                self.check_line(shard, SlotId(slot), line)?;
            }
        }
        Ok(())
    }

    /// A page of the table as the device has it.
    pub(super) fn read_page(&self, shard: usize, page: u32) -> Result<Vec<Option<Sum>>, IoFailed> {
        let at = self.layout.table_at(shard as u32, page);
        let bytes = self.device.borrow().read(at, 4096 / SECTOR).concat();
        let at = (shard as u32, page);
        page_slots(&self.layout, self.generation, at, &bytes).map_err(IoFailed::from)
    }

    pub(super) fn rot(&mut self) {
        let shard = self.rng.below(u64::from(SHARDS)) as usize;
        let slots = u64::from(self.shards[shard].map().len());
        let mut slot = SlotId(self.rng.below(slots) as u32);
        // Where nothing lies rot does nothing.
        for _ in 0..8 {
            if matches!(self.shards[shard].map().get(slot), Slot::Line(_)) {
                break;
            }
            slot = SlotId(self.rng.below(slots) as u32);
        }
        let at = self.flash_at(shard, slot) + self.rng.below(PER_LINE) * SECTOR as u64;
        self.device.borrow_mut().rot(at);
        self.rotten.insert((shard, slot));
    }

    /// Between two runs a page of the map on the device may rot: of the superblock, the write-intent map, a snapshot, a log
    /// or the table.
    pub(super) fn rot_map(&mut self, shared: bool) {
        if let Some((at, generation)) = self.rotting_end() {
            self.rotten_log = Some(generation);
            self.seen.rotten_ends += 1;
            return self.rot_page_of_map(at);
        }
        if self.rng.chance(0.8) {
            return;
        }
        let layout = self.layout;
        let page = PAGE_SIZE as u64;
        let of = |at: u64, pages: u64, rng: &mut Rng| {
            // Most of what was written is in the first pages.
            let most = if rng.chance(0.7) { pages.min(4) } else { pages };
            at + rng.below(most) * page
        };
        let area = self.rng.below(2) as u32;
        let at = match self.rng.below(10) {
            0 => {
                // Two copies that are not whole are more than one fault, and no superblock.
                let copies = [0, 1].map(|copy| copy * COPY_BYTES as u64);
                let whole = copies.map(|at| {
                    let device = self.device.borrow();
                    let live = device.read(at, COPY_BYTES / SECTOR).concat();
                    // (What is written and not durable may be torn yet.)
                    let is_durable = live == device.durable_bytes(at, COPY_BYTES);
                    is_durable && BlockSuperblock::decode(&live).is_ok()
                });
                if whole != [true; 2] {
                    return;
                }
                copies[area as usize]
            }
            1 => of(layout.intents_at(), layout.intent_pages(), &mut self.rng),
            // (A page that is in memory is believed, and written again.)
            _ if layout.is_sparse() && shared => return,
            _ if layout.is_sparse() => {
                of(layout.table_at(0, 0), layout.snapshot_pages, &mut self.rng)
            }
            2..4 => of(layout.snapshot_at(area), layout.snapshot_pages, &mut self.rng),
            _ => {
                self.rotten_log = Some(self.superblock().generation);
                of(layout.log_at(area), layout.log_pages, &mut self.rng)
            }
        };
        self.rot_page_of_map(at);
    }

    fn rot_page_of_map(&mut self, at: u64) {
        self.script.push(format!("{} the map rots at {at}", self.time));
        self.device.borrow_mut().rot_page(at);
        self.seen.rotten_maps += 1;
    }

    /// After a start that may have read a log whose end has rotted. Nobody misses the last batch: slots that it said are empty count as taken. Those
    /// that were used for other lines since have the wrong bytes. They are as good as rotten: a read finds it by the checksum, and nothing else is
    /// promised. Where the checksum is right the bytes must be, too.
    pub(super) fn note_misfits(&mut self) {
        let is_read = |of: u64| self.generation.checked_sub(of).is_some_and(|since| since <= 1);
        if self.layout.is_sparse() || !self.rotten_log.is_some_and(is_read) {
            return;
        }
        for shard in 0..self.shards.len() {
            for slot in (0..self.shards[shard].map().len()).map(SlotId) {
                let Slot::Line(line) = self.shards[shard].get(slot) else { continue };
                let at = self.flash_at(shard, slot);
                let crc = crcs(&self.device.borrow().read(at, PER_LINE as usize))[0];
                if Sum::of(line, crc) != self.shards[shard].map().sum(slot) {
                    self.seen.misfits += u64::from(self.rotten.insert((shard, slot)));
                }
            }
        }
    }

    /// After a start: what lies in a slot is durable, and of those that are held nobody knows.
    pub(super) fn know_what_is_durable(&mut self) {
        self.writing.clear();
        self.durable.clear();
        if self.layout.is_sparse() {
            // A slot is one line's: what the durable map names in it is that line.
            return;
        }
        for (i, shard) in self.shards.iter().enumerate() {
            for slot in (0..shard.map().len()).map(SlotId) {
                match shard.map().get(slot) {
                    Slot::Line(line) => self.durable.insert((i, slot), Some(line)),
                    Slot::Held => self.durable.insert((i, slot), None),
                    Slot::Free => None,
                };
            }
        }
    }

    /// The superblock has been changed: the durable map names no line in a stretch that is nobody's now. Who comes there need
    /// not ask, and a power cut would bring it back. (A table has no such list: there is nothing in it that has left memory.)
    pub(super) fn check_places(&mut self) {
        let Some(sb) = self.former.as_ref().filter(|_| self.is_enabled()) else { return };
        let is_known = |line: &LineId| {
            let group = line.0 / u64::from(GROUP_LINES);
            sb.volumes.iter().any(|v| (v.first_group..v.first_group + v.groups).contains(&group))
        };
        let lines = self.durable.values().flatten();
        if let Some(line) = lines.copied().find(|line| !is_known(line)) {
            self.fail(format!("the durable map names {line:?}, which is nobody's"));
        }
    }

    /// The records that a shard gave are durable now, or may be.
    pub(super) fn recorded(&mut self, shard: usize, certain: bool) {
        let (of, others) =
            std::mem::take(&mut self.writing).into_iter().partition(|(s, _)| *s == shard);
        self.writing = others;
        if certain && shard == 0 {
            self.gone.batch();
        }
        for (shard, MapRecord { slot, holds }) in of {
            let before = match holds {
                Some((line, _)) if certain => self.durable.insert((shard, slot), Some(line)),
                None if certain => self.durable.remove(&(shard, slot)),
                _ => self.durable.insert((shard, slot), None),
            };
            if holds.is_none()
                && certain
                && let Some(Some(line)) = before
            {
                self.gone.add(line);
            }
        }
    }

    /// With sets, a line that is read stays where it is.
    pub(super) fn check_read(&mut self, shard: usize, slot: SlotId, line: LineId) {
        let now = self.shards[shard].map().get(slot);
        if self.layout.segment == 0 && now != Slot::Line(line) {
            self.fail(format!("{slot:?} changed under a read: {now:?}"));
        }
    }

    /// The store is never asked for two changes at a time that share bytes, whether there is a cache or not: whatever lies
    /// below may lose what only one of them has.
    pub(super) fn check_changes(&mut self, event: &Event) {
        if let Event::BackingRead(_, _, at, len, _) = *event {
            return self.check_untorn(event, (at, at + u64::from(len)), |other| match *other {
                Event::BackingChange(_, _, at, len, _) => Some((at, at + len)),
                _ => None,
            });
        }
        let Event::BackingChange(_, _, at, len, _) = *event else { return };
        let end = at + len;
        self.check_untorn(event, (at, end), |other| match *other {
            Event::BackingRead(_, _, at, len, _) => Some((at, at + u64::from(len))),
            _ => None,
        });
        let last = self.end_of_stretch(at / SECTOR as u64) * SECTOR as u64;
        if end > last {
            return self.fail(format!("{event:?} goes behind the volume's end {last}"));
        }
        self.seen.uncached += u64::from(!self.is_enabled());
        let other = self.doing.iter().find(|d| match d.event {
            Event::BackingChange(_, _, from, len, _) => at < from + len && from < end,
            _ => false,
        });
        if let Some(other) = other {
            let why = format!("{event:?} shares bytes with {:?}", other.event);
            self.fail(why);
        }
    }

    /// A store is asked for no bytes that it is told to change meanwhile: what it copies may be half of each.
    fn check_untorn(
        &mut self,
        event: &Event,
        (at, end): (u64, u64),
        range: impl Fn(&Event) -> Option<(u64, u64)>,
    ) {
        let beside = |d: &&Doing| {
            d.landed.is_none()
                && range(&d.event).is_some_and(|(from, until)| at < until && from < end)
        };
        if let Some(other) = self.doing.iter().find(beside) {
            let why = format!("{event:?} may return a part of a write: {:?}", other.event);
            self.fail(why);
        }
    }

    /// No slot is written while it is read or written already, nor for another line while the durable map may still name
    /// one there.
    pub(super) fn check_slots(&mut self, event: &Event) {
        let Some(shard) = event.shard() else { return };
        if self.device.borrow().blown {
            // The process is gone: what its log could not write would have been given up.
            return;
        }
        let (reads, writes) = slots_of(event);
        for (i, slot) in (0..).zip(writes.clone().map(SlotId)) {
            let line = match event {
                Event::FlashWrite(_, _, bytes) => Some(LineId(bytes.lines().0.0 + i)),
                Event::Merge(_, merge, _) => Some(merge.line),
                _ => None,
            };
            if let Some(taken) = self.durable.get(&(shard, slot))
                && (taken.is_none() || *taken != line)
            {
                let why = format!("{event:?}: the durable map may name {taken:?} in {slot:?}");
                return self.fail(why);
            }
        }
        for other in self.doing.iter().filter(|d| d.event.shard() == Some(shard)) {
            let (read, written) = slots_of(&other.event);
            let meet = |a: &Range<u32>, b: &Range<u32>| a.start < b.end && b.start < a.end;
            if meet(&writes, &written) || meet(&writes, &read) || meet(&reads, &written) {
                let why = format!("{event:?} meets {:?}", other.event);
                return self.fail(why);
            }
        }
    }
}

/// The slots that an I/O reads and writes.
fn slots_of(event: &Event) -> (Range<u32>, Range<u32>) {
    let run = |slot: SlotId, lines: u32| slot.0..slot.0 + lines;
    match *event {
        Event::FlashRead(_, slot, _, lines) => (run(slot, lines), 0..0),
        Event::FlashWrite(_, slot, ref bytes) => (0..0, run(slot, bytes.lines().1)),
        Event::Copy(_, from, to, lines) => (run(from, lines), run(to, lines)),
        Event::Merge(_, merge, _) => (run(merge.from, 1), run(merge.to, 1)),
        _ => (0..0, 0..0),
    }
}
