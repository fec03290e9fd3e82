//! What a start reads of a table on the device, and what it voids of it.

use larder_format::PAGE_SIZE;
use larder_format::block::{BlockSuperblock, table};

use crate::block::map::{Map, Slot};
use crate::block::{FoundPage, GroupId, IoFailed, LineId, LogIo, SlotId, read_table};

/// Whether the table has a line.
pub(super) fn has_lines(
    superblock: &BlockSuperblock,
    io: &mut impl LogIo,
) -> Result<bool, IoFailed> {
    let mut any = false;
    read_table(superblock, io, |found: FoundPage<'_>| {
        any |= found.slots.is_some_and(|slots| slots.iter().any(Option::is_some));
        false
    })?;
    Ok(any)
}

/// Without the memory of an earlier run: finds what the table has, and keeps the lines that `used` names. Of the
/// others nothing is left, durably. Returns how many those were.
pub(super) fn find_pages(
    maps: &mut [Map],
    superblock: &BlockSuperblock,
    io: &mut impl LogIo,
    used: &dyn Fn(LineId) -> bool,
) -> Result<u64, IoFailed> {
    let layout = superblock.layout;
    let per = layout.shard_slots() / layout.table_pages();
    let mut dropped = 0;
    read_table(superblock, io, |found: FoundPage<'_>| {
        let Some(map) = maps.get_mut(found.shard as usize) else { return false };
        let Some(slots) = found.slots else { return true };
        let placing = *map.placing();
        let mut gone = 0;
        for (slot, held) in (found.page * per..).zip(slots.iter_mut()) {
            if held.is_some() && !used(placing.line_in(found.shard, slot)) {
                *held = None;
                gone += 1;
            }
        }
        let lines = slots.iter().flatten().count() as u32;
        if let Some(map) = map.sparse_mut().filter(|_| lines > 0) {
            map.found(found.page, lines);
        }
        dropped += gone;
        gone > 0
    })?;
    Ok(dropped)
}

/// With the memory of an earlier run: keeps the lines that `keeps` names. What the device says of pages with
/// others is void, durably. Returns how many lines are dropped.
pub(super) fn keep_pages(
    maps: &mut [Map],
    superblock: &BlockSuperblock,
    io: &mut impl LogIo,
    keeps: &dyn Fn(LineId) -> bool,
) -> Result<u64, IoFailed> {
    let layout = superblock.layout;
    let mut dropped = 0;
    let mut void: Vec<(u64, u64)> = Vec::new();
    for (shard, map) in (0u32..).zip(maps) {
        let placing = *map.placing();
        let Some((pages, per)) = map.sparse().map(|m| (m.pages(), m.page_slots())) else {
            continue;
        };
        for page in 0..pages {
            let Some(table) = map.sparse_mut() else { continue };
            let (here, was_void) = (table.is_here(page), table.is_void(page));
            if !here && !was_void && table.lines_in(page) == 0 {
                continue;
            }
            let (first, last) = table.groups_of(page);
            let strange = (first.0..=last.0)
                .step_by(placing.shards() as usize)
                .any(|group| !keeps(GroupId(group).line(0)));
            if !strange {
                continue;
            }
            if here {
                for slot in (page * per..(page + 1) * per).map(SlotId) {
                    if matches!(map.get(slot), Slot::Line(line) if !keeps(line)) {
                        map.hold(slot);
                        dropped += 1;
                    }
                }
            } else if !was_void {
                let number = layout.table_number(shard, page);
                let mut bytes = vec![0u8; PAGE_SIZE];
                io.read(layout.table_at(shard, page), &mut bytes)?;
                let right = table::decode(&bytes, superblock.generation, number).is_some_and(|s| {
                    (page * per..)
                        .zip(s.take(per as usize))
                        .all(|(slot, sum)| sum.is_none() || keeps(placing.line_in(shard, slot)))
                });
                if right {
                    continue;
                }
                // Its neighbours go with it.
                dropped += u64::from(table.void(page));
            }
            // A page that is in memory is written anew; one that is void need not say anything.
            let at = layout.table_at(shard, page);
            match void.last_mut() {
                Some((begin, len)) if *begin + *len == at => *len += PAGE_SIZE as u64,
                _ => void.push((at, PAGE_SIZE as u64)),
            }
        }
    }
    if !void.is_empty() {
        for (at, len) in void {
            io.punch(at, len)?;
        }
        io.flush()?;
    }
    Ok(dropped)
}
