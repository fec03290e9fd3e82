//! The durable map where the placement is sparse: a table of pages that are written where they lie.
//!
//! A batch is: take what became of pages; flush (the lines that they name become durable); write them, and make holes of
//! those that have no lines left; flush; make holes of the slots that are empty now; tell the shards. A page that is cut off
//! while it is written is not whole: then it says nothing, which is always right, because every line is on the backing
//! store.

use larder_format::PAGE_SIZE;
use larder_format::block::{BlockSuperblock, table};

use super::super::api::{IoFailed, SlotId, Sum};
use super::super::paging::TableChange;
use super::super::planted::Planted;
use super::{LogFailed, LogIo, LogShards, MapLog};

/// Pages that a shard gives for one batch.
const BATCH: usize = 128;
/// Pages that are read at a time.
const STEP: u64 = 256;

/// A page of the table as it was found.
#[derive(Debug)]
pub struct FoundPage<'a> {
    /// The shard.
    pub shard: u32,
    /// Which page of the shard.
    pub page: u32,
    /// The checksum of the line in each slot; `None` if it is not whole: then its lines are lost.
    pub slots: Option<&'a mut Vec<Option<Sum>>>,
}

/// Reads the table of the device. `each` is given every page that is not a hole, and returns whether it has changed it (or,
/// of one that is not whole, whether it is to be cleared); what is changed is durable before this returns, and the space of
/// the lines that are not there any more is given back. Returns how many pages were not whole.
///
/// # Errors
/// If the device does not read or take it.
pub fn read_table(
    superblock: &BlockSuperblock,
    io: &mut impl LogIo,
    mut each: impl FnMut(FoundPage<'_>) -> bool,
) -> Result<u64, IoFailed> {
    let layout = superblock.layout;
    let (per, total) = (layout.table_pages(), layout.snapshot_pages);
    let (base, slots) = (layout.snapshot_at(0), layout.shard_slots() / per.max(1));
    let end = base + total * PAGE_SIZE as u64;
    let mut bytes = vec![0u8; STEP.min(total) as usize * PAGE_SIZE];
    let (mut number, mut damaged) = (0, 0);
    while number < total {
        match io.next_data(base + number * PAGE_SIZE as u64) {
            Some(at) if at < end => number = number.max((at - base) / PAGE_SIZE as u64),
            _ => break,
        }
        let n = STEP.min(total - number);
        let part = &mut bytes[..n as usize * PAGE_SIZE];
        let at = base + number * PAGE_SIZE as u64;
        io.read(at, part)?;
        let mut holes: Vec<(u64, u64)> = Vec::new();
        let mut changed = false;
        for (page, number) in part.chunks_exact_mut(PAGE_SIZE).zip(number..) {
            if page.iter().all(|&b| b == 0) {
                continue;
            }
            let (shard, of) = ((number / u64::from(per)) as u32, (number % u64::from(per)) as u32);
            let at = layout.slot_at(shard, of * slots);
            let line = u64::from(layout.line);
            let found = table::decode(page, superblock.generation, number)
                .map(|s| s.take(slots as usize).map(|s| s.map(Sum)).collect::<Vec<_>>());
            let Some(before) = found else {
                damaged += 1;
                if each(FoundPage { shard, page: of, slots: None }) {
                    page.fill(0);
                    changed = true;
                    holes.push((at, u64::from(slots) * line));
                }
                continue;
            };
            let mut after = before.clone();
            if each(FoundPage { shard, page: of, slots: Some(&mut after) }) {
                let sums = after.iter().map(|s| s.map(|s| s.0));
                table::encode(page, superblock.generation, number, sums);
                changed = true;
                let gone = (0u64..).zip(before.iter().zip(&after));
                holes.extend(
                    gone.filter(|(_, (b, a))| b.is_some() && a.is_none())
                        .map(|(i, _)| (at + i * line, line)),
                );
            }
        }
        if changed {
            io.write(at, part)?;
            io.flush()?;
            for (at, len) in merged(holes) {
                // Space that is not given back is lost until the line comes again, and nothing else.
                let _ = io.punch(at, len);
            }
        }
        number += n;
    }
    Ok(damaged)
}

/// Neighbours become one.
fn merged(runs: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    let mut out: Vec<(u64, u64)> = Vec::new();
    for (at, len) in runs {
        match out.last_mut() {
            Some((begin, had)) if *begin + *had == at => *had += len,
            _ => out.push((at, len)),
        }
    }
    out
}

impl MapLog {
    pub(super) fn table_batch(
        &mut self,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed> {
        let mut changes = Vec::new();
        for shard in 0..self.shards() {
            let mut taken = Vec::new();
            shards.take_pages(shard, BATCH, &mut taken);
            changes.extend(taken.into_iter().map(|change| (shard, change)));
        }
        if self.planted(Planted::HoleBeforeDurable) {
            self.punch_emptied(shards, io);
        }
        let outcome = self.write_table(&changes, io);
        if outcome.is_ok() && !self.planted(Planted::HoleTooLate) {
            self.punch_emptied(shards, io);
        }
        let mut late = Vec::new();
        if self.planted(Planted::HoleTooLate) {
            late = self.emptied(shards);
        }
        for shard in 0..self.shards() {
            match outcome {
                Ok(()) => shards.records_durable(shard),
                Err(_) => shards.records_lost(shard),
            }
        }
        for (at, len) in late {
            let _ = io.punch(at, len);
        }
        outcome
    }

    fn emptied(&self, shards: &mut impl LogShards) -> Vec<(u64, u64)> {
        let layout = self.superblock.layout;
        let mut out = Vec::new();
        for shard in 0..self.shards() {
            let mut runs: Vec<(SlotId, u32)> = Vec::new();
            shards.emptied(shard, &mut runs);
            let line = u64::from(layout.line);
            out.extend(
                runs.iter().map(|(slot, n)| (layout.slot_at(shard, slot.0), u64::from(*n) * line)),
            );
        }
        // A stretch that a client overwrites comes in the order in which its lines were looked at.
        out.sort_unstable();
        merged(out)
    }

    fn punch_emptied(&self, shards: &mut impl LogShards, io: &mut impl LogIo) {
        for (at, len) in self.emptied(shards) {
            // Space that is not given back is lost until the line comes again, and nothing else.
            let _ = io.punch(at, len);
        }
    }

    fn write_table(
        &mut self,
        changes: &[(u32, TableChange)],
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed> {
        if changes.is_empty() {
            return Ok(());
        }
        let names = |(_, change): &(u32, TableChange)| matches!(change, TableChange::Page { .. });
        if changes.iter().any(names) && !self.planted(Planted::RecordBeforeData) {
            self.flush(io, "a flush of its lines")?;
        }
        let layout = self.superblock.layout;
        // Neighbours are written together.
        let mut run: (u64, Vec<u8>) = (0, Vec::new());
        for (shard, change) in changes {
            match change {
                TableChange::Page { page, slots } => {
                    let at = layout.table_at(*shard, *page);
                    if run.0 + run.1.len() as u64 != at {
                        let (at, bytes) = std::mem::take(&mut run);
                        self.write_run(at, &bytes, io)?;
                    }
                    if run.1.is_empty() {
                        run.0 = at;
                    }
                    let from = run.1.len();
                    run.1.resize(from + PAGE_SIZE, 0);
                    let number = layout.table_number(*shard, *page);
                    let sums = slots.iter().map(|s| s.map(|s| s.0));
                    table::encode(&mut run.1[from..], self.superblock.generation, number, sums);
                }
                TableChange::Cleared { first, count } => {
                    let len = u64::from(*count) * PAGE_SIZE as u64;
                    io.punch(layout.table_at(*shard, *first), len)
                        .map_err(|IoFailed| LogFailed { what: "pages of its map" })?;
                }
            }
            self.stats.records += 1;
        }
        self.write_run(run.0, &run.1, io)?;
        self.flush(io, "a flush of its map")?;
        self.stats.batches += 1;
        Ok(())
    }

    fn write_run(&mut self, at: u64, bytes: &[u8], io: &mut impl LogIo) -> Result<(), LogFailed> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.write(io, at, bytes, "pages of its map")
    }
}
