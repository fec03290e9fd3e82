//! What a start makes of the write log: from all batches that verify, which count, what of each volume is still to be destaged, and what is
//! lost.
//!
//! The chain begins where the newest FRONTIER says and ends at the first batch that is missing, torn or not the successor of the one before it
//! (`larder_format::block::write_log::chain`). Up to the number that is known durable a missing batch is damage, not the end: what lies behind
//! it stays. A volume whose sequences do not run on across the hole, or of which nothing behind the hole speaks, refuses reads until the
//! operator decides [gap]. Records that were
//! parked count where the chain does not have them any more. Rules in brackets are those of `models/write_back.py`.

use std::collections::BTreeMap;

use larder_format::block::write_log::chain::{self, Reading};
use larder_format::block::write_log::{Extent, Frontier, Kind, Link, Record};

use super::planted::{Fault, Planted};
use super::segments::{Found, Parked, Size};

/// A record of a batch that verifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The record.
    pub record: Record,
    /// Where its payload lies in the log's area.
    pub place: u64,
    /// Its payload can be read, as far as is known: of a batch in the tail it was verified, or the batch is not there.
    pub readable: bool,
    /// Which checksums are its payload's: [`Scan::sums`](super::scan::Scan::sums).
    pub sums: u32,
}

/// A batch whose header verifies. One in the tail is whole, payload included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scanned {
    /// What the chain needs to know of it.
    pub link: Link,
    /// The attachment number of the volume that its segment is parked for; 0 in the main chain.
    pub parked: u32,
    /// Its segment.
    pub segment: u32,
    /// Where it ends in the segment, bytes of batches.
    pub end: u32,
    /// Bytes that the segment's footer has, or will have, of it.
    pub footer: u32,
    /// Its records, but for a FRONTIER.
    pub entries: Vec<Entry>,
    /// The FRONTIER that it begins with, if that verifies.
    pub frontier: Option<Frontier>,
}

/// A record that is to be destaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dirty {
    /// The record, its place, and whether it can be read.
    pub entry: Entry,
    /// Number of its batch, in the chain or in its parked segment.
    pub batch: u64,
    /// Generation of the segment, where that is a parked one.
    pub parked: Option<u64>,
}

/// A volume as the log has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Volume {
    /// The store has all up to here durably.
    pub frontier: u64,
    /// The last sequence that is there without a gap.
    pub last: u64,
    /// Number of its marker that was last known durable.
    pub marker: u64,
    /// What was skipped because it could not be read.
    pub unreadable: Vec<Extent>,
    /// Its records behind the frontier, in order of their sequence, without a gap.
    pub records: Vec<Dirty>,
    /// Records of it are lost: it must not be read.
    pub gap: bool,
}

/// What a start has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// The chain: batches that count, numbers that are lost, the next number.
    pub chain: Reading,
    /// The volumes, by attachment number: those that were asked for.
    pub volumes: BTreeMap<u32, Volume>,
    /// Segments of the chain, oldest first.
    pub live: Vec<Found>,
    /// Parked segments that have records which are to be destaged.
    pub parked: Vec<Parked>,
    /// The highest generation that was seen.
    pub generation: u64,
}

/// Reads the log. `scanned` are the batches of each segment's own generation, as its header names it: what lies behind them is of an
/// earlier use, and void. `volumes` are the attachment numbers that the superblock knows, and behind which sequence each was attached or taken up: records of others are of
/// volumes that are gone.
pub fn recover(scanned: &[Scanned], volumes: &[(u32, u64)], fault: Fault) -> Recovered {
    let main: Vec<&Scanned> = scanned.iter().filter(|batch| batch.parked == 0).collect();
    let links: Vec<Link> = main.iter().map(|batch| batch.link).collect();
    let fronts: Vec<(&Scanned, &Frontier)> =
        main.iter().filter_map(|batch| Some((*batch, batch.frontier.as_ref()?))).collect();
    // The newest says it. A void one may name a segment that was lost with it, as the only one.
    let newest = fronts.iter().max_by_key(|(batch, _)| (batch.link.run, batch.link.number));
    let mut oldest = newest.map_or((0, 1), |(_, f)| (f.oldest_generation, f.oldest_batch));
    if fault.is(Planted::OldestIgnored) {
        oldest = (0, links.iter().map(|link| link.number).min().unwrap_or(1));
    }
    #[allow(unused_mut, reason = "faults are planted in tests")]
    let mut chain = chain::read(&links, oldest.0, oldest.1);
    if fault.is(Planted::HoleIsEnd)
        && let Some(first) = chain.damaged.first().map(|lost| lost.start)
    {
        chain.batches.retain(|&at| links[at].number < first);
        chain.damaged.clear();
        chain.next = first;
    }
    let counts: Vec<&Scanned> = chain.batches.iter().map(|&i| main[i]).collect();
    let mut found = BTreeMap::new();
    for &(number, began) in volumes {
        let front = fronts.iter().filter_map(|(batch, f)| Some((batch.link, f.volume(number)?)));
        let front = front.max_by_key(|(link, f)| (f.frontier, link.run, link.number));
        let front = front.map(|(_, f)| f);
        // As many as there are: a log that is full of small writes has millions.
        let all = scanned.iter().filter(|b| b.parked == number).chain(counts.iter().copied());
        let all = all.flat_map(|batch| &batch.entries).filter(|e| is_of(e, number));
        let mut dirty: Vec<Dirty> = Vec::with_capacity(all.count());
        // Of a record that was parked twice the later copy.
        let mut parked: Vec<&Scanned> = scanned.iter().filter(|b| b.parked == number).collect();
        parked.sort_by_key(|batch| (batch.link.generation, batch.link.number));
        for batch in parked {
            add(&mut dirty, batch, number, Some(batch.link.generation));
        }
        for batch in &counts {
            add(&mut dirty, batch, number, None);
        }
        let frontier = front.map_or(began, |f| f.frontier.max(began));
        dirty.retain(|dirty| dirty.entry.record.sequence > frontier);
        latest(&mut dirty);
        let mut volume = Volume { frontier, last: frontier, ..Volume::default() };
        if let Some(front) = front {
            (volume.marker, volume.unreadable) = (front.marker, front.unreadable.clone());
        }
        let highest = dirty.last().map_or(frontier, |last| last.entry.record.sequence);
        let whole = dirty.iter().zip(frontier + 1..);
        let whole = whole.take_while(|(dirty, next)| dirty.entry.record.sequence == *next).count();
        dirty.truncate(whole);
        volume.last += whole as u64;
        volume.records = dirty;
        // What batches behind the last hole say of it: nothing, and its last records may be in the hole. Without a hole they may have been
        // in a parked segment that is lost.
        let hole = chain.damaged.last().map(|lost| lost.end);
        let behind = counts.iter().filter(|b| hole.is_none_or(|end| b.link.number >= end));
        let named = behind.flat_map(|batch| {
            let last = batch.frontier.as_ref().and_then(|f| f.volume(number)).map(|f| f.last);
            let seen = batch.entries.iter().filter(|e| e.record.attachment == number);
            last.into_iter().chain(seen.map(|e| e.record.sequence))
        });
        let unknown = named.max().map_or(hole.is_some(), |named| volume.last < named);
        volume.gap = (volume.last < highest || unknown) && !fault.is(Planted::GapIgnored);
        found.insert(number, volume);
    }
    let mut recovered = Recovered {
        live: Vec::new(),
        parked: Vec::new(),
        generation: scanned.iter().map(|batch| batch.link.generation).max().unwrap_or(0),
        chain,
        volumes: found,
    };
    recovered.live = live(&counts, &recovered.volumes);
    recovered.parked = parked(scanned, &recovered.volumes);
    recovered
}

fn is_of(entry: &Entry, number: u32) -> bool {
    entry.record.attachment == number && entry.record.kind != Kind::Frontier
}

/// The volume's records of this batch.
fn add(dirty: &mut Vec<Dirty>, batch: &Scanned, number: u32, parked: Option<u64>) {
    let mine = |e: &&Entry| is_of(e, number);
    let of = |&entry: &Entry| Dirty { entry, batch: batch.link.number, parked };
    dirty.extend(batch.entries.iter().filter(mine).map(of));
}

/// In order of their sequence; of one sequence the last, unless only an earlier one can be read.
fn latest(dirty: &mut Vec<Dirty>) {
    let reads = |dirty: &Dirty| dirty.entry.readable && !dirty.entry.record.flags.unreadable;
    let sequence = |dirty: &Dirty| dirty.entry.record.sequence;
    if !dirty.is_sorted_by_key(sequence) {
        dirty.sort_by_key(sequence);
    }
    dirty.dedup_by(|later, before| {
        let same = sequence(later) == sequence(before);
        if same && (reads(later) || !reads(before)) {
            *before = *later;
        }
        same
    });
}

/// The segments of the chain, oldest first.
fn live(counts: &[&Scanned], volumes: &BTreeMap<u32, Volume>) -> Vec<Found> {
    let mut live: Vec<Found> = Vec::new();
    for batch in counts {
        let generation = batch.link.generation;
        match live.last_mut() {
            Some(found) if found.generation == generation => {
                let footer = found.used.footer.saturating_add(batch.footer);
                found.used = Size { bytes: batch.end, footer };
            }
            _ => live.push(Found {
                segment: batch.segment,
                generation,
                first: batch.link.number,
                used: Size { bytes: batch.end, footer: batch.footer },
                records: 0,
            }),
        }
    }
    for dirty in volumes.values().flat_map(|volume| &volume.records).filter(|d| d.parked.is_none())
    {
        let at = live.partition_point(|found| found.first <= dirty.batch);
        if let Some(found) = at.checked_sub(1).and_then(|at| live.get_mut(at)) {
            found.records += 1;
        }
    }
    live
}

/// The parked segments that are still needed.
fn parked(scanned: &[Scanned], volumes: &BTreeMap<u32, Volume>) -> Vec<Parked> {
    let mut all: BTreeMap<u64, Parked> = BTreeMap::new();
    for batch in scanned.iter().filter(|batch| batch.parked != 0) {
        let (segment, generation, attachment) =
            (batch.segment, batch.link.generation, batch.parked);
        let used = Size::default();
        let none = Parked { segment, generation, attachment, batches: 0, used, records: 0 };
        let parked = all.entry(generation).or_insert(none);
        parked.batches = parked.batches.max(batch.link.number);
        parked.used.bytes = parked.used.bytes.max(batch.end);
    }
    for dirty in volumes.values().flat_map(|volume| &volume.records) {
        if let Some(parked) = dirty.parked.and_then(|generation| all.get_mut(&generation)) {
            parked.records += 1;
        }
    }
    all.into_values().filter(|parked| parked.records > 0).collect()
}
