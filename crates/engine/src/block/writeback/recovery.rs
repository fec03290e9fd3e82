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
use larder_format::block::write_log::{Extent, Frontier, Kind, Link, Record, VolumeFrontier};

pub use super::packed::Packed;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
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
}

/// The same with its records.
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

impl Scanned {
    /// Without its records.
    pub fn seen(&self) -> Seen {
        let Scanned { link, parked, segment, end, footer, .. } = *self;
        Seen { link, parked, segment, end, footer }
    }
}

/// The batches that a recovery is made of, however they are kept.
pub trait Batches {
    /// How many there are.
    fn count(&self) -> usize;

    /// One of them.
    fn seen(&self, at: usize) -> Seen;

    /// The FRONTIER that it begins with, if that verifies.
    fn frontier(&self, at: usize) -> Option<&Frontier>;

    /// Its records, but for a FRONTIER.
    fn entries(&self, at: usize) -> impl Iterator<Item = Entry> + '_;
}

impl Batches for Vec<Scanned> {
    fn count(&self) -> usize {
        self.len()
    }

    fn seen(&self, at: usize) -> Seen {
        self[at].seen()
    }

    fn frontier(&self, at: usize) -> Option<&Frontier> {
        self[at].frontier.as_ref()
    }

    fn entries(&self, at: usize) -> impl Iterator<Item = Entry> + '_ {
        self[at].entries.iter().copied()
    }
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

/// Records of a volume in their order, however they are kept.
pub trait Records: Default {
    /// One more, behind all.
    fn push(&mut self, dirty: Dirty);

    /// How many there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, from the first on.
    fn each(&self) -> impl Iterator<Item = Dirty> + '_;
}

impl Records for Vec<Dirty> {
    fn push(&mut self, dirty: Dirty) {
        Vec::push(self, dirty);
    }

    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn each(&self) -> impl Iterator<Item = Dirty> + '_ {
        self.iter().copied()
    }
}

/// A volume as the log has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VolumeIn<R> {
    /// The store has all up to here durably.
    pub frontier: u64,
    /// The last sequence that is there without a gap.
    pub last: u64,
    /// Number of its marker that was last known durable.
    pub marker: u64,
    /// What was skipped because it could not be read.
    pub unreadable: Vec<Extent>,
    /// Its records behind the frontier, in order of their sequence, without a gap.
    pub records: R,
    /// Records of it are lost: it must not be read.
    pub gap: bool,
}

/// A volume whose records may be looked at one by one.
pub type Volume = VolumeIn<Vec<Dirty>>;

/// What a start has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredIn<R> {
    /// The chain: batches that count, numbers that are lost, the next number.
    pub chain: Reading,
    /// The volumes, by attachment number: those that were asked for.
    pub volumes: BTreeMap<u32, VolumeIn<R>>,
    /// Segments of the chain, oldest first.
    pub live: Vec<Found>,
    /// Parked segments that have records which are to be destaged.
    pub parked: Vec<Parked>,
    /// The highest generation that was seen.
    pub generation: u64,
}

/// The same with records that may be looked at one by one: about 100 bytes for each.
pub type Recovered = RecoveredIn<Vec<Dirty>>;
/// The same with records in few bytes, as a start has them.
pub type RecoveredPacked = RecoveredIn<Packed>;

/// Reads the log. `scanned` are the batches of each segment's own generation, as its header names it: what lies behind them is of an
/// earlier use, and void. `volumes` are the attachment numbers that the superblock knows, and behind which sequence each was attached or taken up: records of others are of
/// volumes that are gone.
pub fn recover(scanned: &impl Batches, volumes: &[(u32, u64)], fault: Fault) -> Recovered {
    recover_in(scanned, volumes, fault)
}

/// The same, with records that are kept in another way.
pub fn recover_in<R: Records>(
    scanned: &impl Batches,
    volumes: &[(u32, u64)],
    fault: Fault,
) -> RecoveredIn<R> {
    let all = 0..scanned.count();
    let main: Vec<u32> =
        all.clone().filter(|&at| scanned.seen(at).parked == 0).map(|at| at as u32).collect();
    let link = |i: usize| {
        let link = scanned.seen(main[i] as usize).link;
        let run = if fault.is(Planted::RunIgnored) { 0 } else { link.run };
        Link { run, ..link }
    };
    let fronts: Vec<(Link, &Frontier)> = main
        .iter()
        .filter_map(|&at| {
            let at = at as usize;
            Some((scanned.seen(at).link, scanned.frontier(at)?))
        })
        .collect();
    // The newest says it. A void one may name a segment that was lost with it, as the only one.
    let newest = fronts.iter().max_by_key(|(link, _)| (link.run, link.number));
    let mut oldest = newest.map_or((0, 1), |(_, f)| (f.oldest_generation, f.oldest_batch));
    if fault.is(Planted::OldestIgnored) {
        oldest = (0, (0..main.len()).map(|i| link(i).number).min().unwrap_or(1));
    }
    #[allow(unused_mut, reason = "faults are planted in tests")]
    let mut chain = chain::read_by(main.len(), link, oldest.0, oldest.1);
    if fault.is(Planted::HoleIsEnd)
        && let Some(first) = chain.damaged.first().map(|lost| lost.start)
    {
        chain.batches.retain(|&at| link(at).number < first);
        chain.damaged.clear();
        chain.next = first;
    }
    if fault.is(Planted::TailGoesOn) {
        let links: Vec<Link> = (0..main.len()).map(link).collect();
        let mut behind = chain::counting(&links, oldest.0);
        behind.retain(|&i| links[i].number >= chain.next);
        if let Some(&last) = behind.last() {
            (chain.next, chain.before) = (links[last].number + 1, links[last].hash);
        }
        chain.batches.extend(behind);
    }
    let mut parked: Vec<usize> = all.clone().filter(|&at| scanned.seen(at).parked != 0).collect();
    parked.sort_by_key(|&at| {
        let Link { generation, number, .. } = scanned.seen(at).link;
        (generation, number)
    });
    let mut finds: BTreeMap<u32, Finds<R>> = BTreeMap::new();
    for &(number, began) in volumes {
        let front = fronts.iter().filter_map(|(link, f)| Some((link, f.volume(number)?)));
        let front = front.max_by_key(|(link, f)| (f.frontier, link.run, link.number));
        finds.insert(number, Finds::new(front.map(|(_, f)| f), began));
    }
    for &at in &parked {
        let Seen { parked, link, .. } = scanned.seen(at);
        if let Some(finds) = finds.get_mut(&parked) {
            for entry in scanned.entries(at).filter(|e| is_of(e, parked)) {
                finds.parked(Dirty { entry, batch: link.number, parked: Some(link.generation) });
            }
        }
    }
    // What batches behind the last hole say of a volume: nothing, and its last records may be in the hole. Without a hole they may have been
    // in a parked segment that is lost.
    let hole = chain.damaged.last().map(|lost| lost.end);
    for &i in &chain.batches {
        let at = main[i] as usize;
        let number = scanned.seen(at).link.number;
        let names = hole.is_none_or(|end| number >= end);
        let front = scanned.frontier(at).filter(|_| names);
        for said in front.iter().flat_map(|front| &front.volumes) {
            if let Some(finds) = finds.get_mut(&said.attachment) {
                finds.names(said.last);
            }
        }
        for entry in scanned.entries(at) {
            let Some(finds) = finds.get_mut(&entry.record.attachment) else { continue };
            if names {
                finds.names(entry.record.sequence);
            }
            if entry.record.kind != Kind::Frontier {
                finds.logged(Dirty { entry, batch: number, parked: None });
            }
        }
    }
    let again = |number| {
        // (As many as there are, and sorted: no log that was written here is so.)
        let mut dirty: Vec<Dirty> = Vec::new();
        for &at in &parked {
            let Seen { parked, link, .. } = scanned.seen(at);
            if parked == number {
                let of = |entry| Dirty { entry, batch: link.number, parked: Some(link.generation) };
                dirty.extend(scanned.entries(at).filter(|e| is_of(e, number)).map(of));
            }
        }
        for &i in &chain.batches {
            let at = main[i] as usize;
            let batch = scanned.seen(at).link.number;
            let of = |entry| Dirty { entry, batch, parked: None };
            dirty.extend(scanned.entries(at).filter(|e| is_of(e, number)).map(of));
        }
        dirty
    };
    let volumes: BTreeMap<u32, VolumeIn<R>> = finds
        .into_iter()
        .map(|(number, finds)| {
            let finds = match finds.unordered {
                true => finds.again(again(number)),
                false => finds,
            };
            (number, finds.volume(hole.is_some(), fault))
        })
        .collect();
    let generation = all.clone().map(|at| scanned.seen(at).link.generation).max().unwrap_or(0);
    let counts = chain.batches.iter().map(|&i| scanned.seen(main[i] as usize));
    let live = live(counts, &volumes);
    let parked = self::parked(parked.iter().map(|&at| scanned.seen(at)), &volumes);
    RecoveredIn { live, parked, generation, chain, volumes }
}

/// What is found of one volume, record by record.
struct Finds<R> {
    volume: VolumeIn<R>,
    /// The best parked copies of records behind the frontier that are not among them yet.
    copies: BTreeMap<u64, Dirty>,
    /// The last sequence of the chain, the highest of all that was found, and the highest that anything names.
    last: u64,
    highest: u64,
    named: Option<u64>,
    /// The chain's records do not come in the order of their sequence.
    unordered: bool,
}

impl<R: Records> Finds<R> {
    fn new(front: Option<&VolumeFrontier>, began: u64) -> Finds<R> {
        let frontier = front.map_or(began, |f| f.frontier.max(began));
        let mut volume = VolumeIn { frontier, last: frontier, ..VolumeIn::default() };
        if let Some(front) = front {
            (volume.marker, volume.unreadable) = (front.marker, front.unreadable.clone());
        }
        Finds {
            volume,
            copies: BTreeMap::new(),
            last: frontier,
            highest: frontier,
            named: None,
            unordered: false,
        }
    }

    /// Something says that there was this record.
    fn names(&mut self, sequence: u64) {
        self.named = self.named.max(Some(sequence));
    }

    /// A parked copy.
    fn parked(&mut self, dirty: Dirty) {
        let sequence = dirty.entry.record.sequence;
        if sequence > self.volume.frontier {
            self.highest = self.highest.max(sequence);
            let best = self.copies.get(&sequence).map_or(dirty, |before| better(*before, dirty));
            self.copies.insert(sequence, best);
        }
    }

    /// A record of the chain.
    fn logged(&mut self, dirty: Dirty) {
        let sequence = dirty.entry.record.sequence;
        if sequence <= self.volume.frontier || self.unordered {
            return;
        }
        if sequence <= self.last {
            self.unordered = true;
            return;
        }
        self.last = sequence;
        self.highest = self.highest.max(sequence);
        self.take_copies(sequence);
        let dirty = self.copies.remove(&sequence).map_or(dirty, |copy| better(copy, dirty));
        self.take(dirty);
    }

    /// The copies of records before this one.
    fn take_copies(&mut self, sequence: u64) {
        while let Some(copy) = self.copies.first_entry() {
            if *copy.key() >= sequence {
                break;
            }
            let copy = copy.remove();
            self.take(copy);
        }
    }

    /// The next record that there is: it counts if none before it is missing.
    fn take(&mut self, dirty: Dirty) {
        let sequence = dirty.entry.record.sequence;
        if self.volume.last.checked_add(1) == Some(sequence) {
            self.volume.last = sequence;
            self.volume.records.push(dirty);
        }
    }

    /// All of them, in any order: of a sequence the best.
    fn again(mut self, mut dirty: Vec<Dirty>) -> Finds<R> {
        let frontier = self.volume.frontier;
        let sequence = |dirty: &Dirty| dirty.entry.record.sequence;
        dirty.retain(|dirty| sequence(dirty) > frontier);
        dirty.sort_by_key(sequence);
        dirty.dedup_by(|later, before| {
            let same = sequence(later) == sequence(before);
            if same {
                *before = better(*before, *later);
            }
            same
        });
        self.highest = dirty.last().map_or(frontier, sequence);
        self.copies.clear();
        (self.volume.records, self.volume.last) = (R::default(), frontier);
        dirty.into_iter().for_each(|dirty| self.take(dirty));
        self
    }

    fn volume(mut self, hole: bool, fault: Fault) -> VolumeIn<R> {
        while let Some((_, copy)) = self.copies.pop_first() {
            self.take(copy);
        }
        let last = self.volume.last;
        let unknown = self.named.map_or(hole, |named| last < named);
        self.volume.gap = (last < self.highest || unknown) && !fault.is(Planted::GapIgnored);
        self.volume
    }
}

/// Of one record the later copy, unless only the earlier one can be read.
fn better(before: Dirty, later: Dirty) -> Dirty {
    let reads = |dirty: &Dirty| dirty.entry.readable && !dirty.entry.record.flags.unreadable;
    match reads(&later) || !reads(&before) {
        true => later,
        false => before,
    }
}

fn is_of(entry: &Entry, number: u32) -> bool {
    entry.record.attachment == number && entry.record.kind != Kind::Frontier
}

/// The segments of the chain, oldest first.
fn live<R: Records>(
    counts: impl Iterator<Item = Seen>,
    volumes: &BTreeMap<u32, VolumeIn<R>>,
) -> Vec<Found> {
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
    let records = volumes.values().flat_map(|volume| volume.records.each());
    for dirty in records.filter(|d| d.parked.is_none()) {
        let at = live.partition_point(|found| found.first <= dirty.batch);
        if let Some(found) = at.checked_sub(1).and_then(|at| live.get_mut(at)) {
            found.records += 1;
        }
    }
    live
}

/// The parked segments that are still needed.
fn parked<R: Records>(
    scanned: impl Iterator<Item = Seen>,
    volumes: &BTreeMap<u32, VolumeIn<R>>,
) -> Vec<Parked> {
    let mut all: BTreeMap<u64, Parked> = BTreeMap::new();
    for batch in scanned {
        let (segment, generation, attachment) =
            (batch.segment, batch.link.generation, batch.parked);
        let used = Size::default();
        let none = Parked { segment, generation, attachment, batches: 0, used, records: 0 };
        let parked = all.entry(generation).or_insert(none);
        parked.batches = parked.batches.max(batch.link.number);
        parked.used.bytes = parked.used.bytes.max(batch.end);
    }
    if all.is_empty() {
        return Vec::new();
    }
    for dirty in volumes.values().flat_map(|volume| volume.records.each()) {
        if let Some(parked) = dirty.parked.and_then(|generation| all.get_mut(&generation)) {
            parked.records += 1;
        }
    }
    all.into_values().filter(|parked| parked.records > 0).collect()
}
