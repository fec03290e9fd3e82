//! The segments of the write log: where the next batch goes, how far the log is written and durable, and when a segment may be used
//! again.
//!
//! ```text
//! free ──open──▶ live (oldest first, the last one is open) ──retire──▶ retired ──said──▶ free
//!                                          parked: one volume's records, out of the way ──let go──▶ free
//! ```
//!
//! Freed segments stay readable until they are overwritten, so a start must be told which of them count: segments retire oldest first
//! [fifo], a FRONTIER names the oldest that is live [oldest], each segment begins with one [repeat], and a retired segment is used again
//! only when a FRONTIER that no longer counts it as live is durable [saidfree]. Client writes leave segments for FRONTIERs and for parking
//! [reserve]; a FRONTIER takes one of those only where that frees one, or lets go of what holds the oldest and leaves enough for parking.
//!
//! Of free segments the one that was freed last is filled next. So a log that holds little goes round in few segments, and what it left in
//! the others long ago is not written anew: each stale page that a drive takes for valid it copies, where it could be spare
//! (`docs/results/drive-share.md`).
//!
//! A FLUSH joins the next flush of the device that *begins*, and covers the batches whose writes had ended by then [flushlog]. Rules in
//! brackets are those of `models/write_back.py`.

use std::collections::{BTreeMap, VecDeque};

use super::planted::{Fault, Planted};

/// What the log is built from.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// How many segments there are.
    pub segments: u32,
    /// Bytes of a segment that batches and the footer may take.
    pub room: u32,
    /// Bytes of the end of a footer, and of a sector: a footer fills whole ones.
    pub footer: (u32, u32),
    /// Segments that client writes leave.
    pub reserve: u32,
}

impl Config {
    /// Bytes of the footer of batches that have so much in it.
    fn footer(&self, of: u32) -> u32 {
        let (end, sector) = self.footer;
        of.saturating_add(end).next_multiple_of(sector)
    }

    /// Whether batches of this size fit a segment, with a footer.
    pub fn fits(&self, size: Size) -> bool {
        size.bytes.saturating_add(self.footer(size.footer)) <= self.room
    }
}

/// How large one or more batches are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Bytes of them.
    pub bytes: u32,
    /// Bytes that the segment's footer has of them.
    pub footer: u32,
}

impl Size {
    fn and(self, more: Size) -> Size {
        let sum = |a: u32, b: u32| a.saturating_add(b);
        Size { bytes: sum(self.bytes, more.bytes), footer: sum(self.footer, more.footer) }
    }
}

/// What a batch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Records of clients.
    Clients,
    /// A FRONTIER alone.
    Frontier,
    /// The same, by which records of the oldest segment are let go: the log hangs without.
    Release,
}

/// Where a batch goes, and what it says of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// Its number.
    pub number: u64,
    /// Generation of its segment.
    pub generation: u64,
    /// Which segment.
    pub segment: u32,
    /// Bytes of batches before it in the segment.
    pub at: u32,
    /// The first of its segment: it begins with a FRONTIER.
    pub opens: bool,
    /// The last batch that is known durable.
    pub known: u64,
}

/// Where the chain begins, as a FRONTIER says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Oldest {
    /// Generation of the oldest live segment.
    pub generation: u64,
    /// Number of its first batch.
    pub batch: u64,
}

/// A segment of the main chain as a start has found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which.
    pub segment: u32,
    /// Its generation.
    pub generation: u64,
    /// Number of its first batch.
    pub first: u64,
    /// How large its batches are.
    pub used: Size,
    /// Records in it that are dirty.
    pub records: u32,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    found: Found,
    /// Reads of it that are under way.
    pins: u32,
}

/// A segment with the records of one volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parked {
    /// Which.
    pub segment: u32,
    /// Its generation.
    pub generation: u64,
    /// The attachment number of its volume.
    pub attachment: u32,
    /// Batches in it.
    pub batches: u64,
    /// How large they are.
    pub used: Size,
    /// Records in it that are dirty.
    pub records: u32,
}

/// The segments of a log. See the [module](self).
#[derive(Debug)]
pub struct Segments {
    config: Config,
    free: VecDeque<u32>,
    live: VecDeque<Live>,
    /// The last batch when it retired, and the segment; in that order.
    retired: VecDeque<(u64, u32)>,
    parked: Vec<Parked>,
    /// Reads of parked segments that are under way, by generation.
    parked_pins: BTreeMap<u64, u32>,
    /// The last generation that was given out.
    generation: u64,
    /// The last batch number that was given out.
    number: u64,
    /// All batches up to here are written.
    written: u64,
    /// Of those behind: which are.
    ahead: VecDeque<bool>,
    durable: u64,
    /// Batches with a FRONTIER that are not known durable.
    said: VecDeque<u64>,
    /// The last batch that has one.
    told: u64,
    fault: Fault,
}

impl Segments {
    /// A log that holds nothing.
    pub fn new(config: Config) -> Segments {
        Segments::found(config, &[], &[], (0, 0))
    }

    /// The log that a start has found, oldest segment first, durable as it is; `last` are the highest generation and the last batch number
    /// that were seen.
    pub fn found(config: Config, live: &[Found], parked: &[Parked], last: (u64, u64)) -> Segments {
        let used = |segment: &u32| {
            live.iter().any(|f| f.segment == *segment)
                || parked.iter().any(|p| p.segment == *segment)
        };
        let full = Size { bytes: config.room, footer: 0 };
        let mut segments = Segments {
            config,
            free: (0..config.segments).filter(|segment| !used(segment)).collect(),
            live: live.iter().map(|&found| Live { found, pins: 0 }).collect(),
            retired: VecDeque::new(),
            parked_pins: BTreeMap::new(),
            // Of a former run: nothing is added to them, since what their chains end with is not known.
            parked: parked.iter().map(|&p| Parked { used: full, ..p }).collect(),
            generation: last.0,
            number: last.1,
            written: last.1,
            ahead: VecDeque::new(),
            durable: last.1,
            said: VecDeque::new(),
            told: 0,
            fault: Fault::default(),
        };
        segments.retire();
        segments
    }

    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Fault) {
        self.fault = fault;
    }

    /// What was found was read, and may be in the device's cache alone: nothing of it is durable before a flush.
    pub fn doubt(&mut self) {
        self.durable = 0;
    }

    /// It is taken for durable all the same.
    pub(super) fn sure(&mut self) {
        self.durable = self.written;
    }

    /// So many segments client writes leave from now on.
    pub fn set_reserve(&mut self, reserve: u32) {
        self.config.reserve = reserve;
    }

    /// Segments that nothing is in.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// All batches up to here are written, volatile perhaps.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// All batches up to here are durable.
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// The last batch number that was given out.
    pub fn last(&self) -> u64 {
        self.number
    }

    /// Where the chain begins: what a FRONTIER says.
    pub fn oldest(&self) -> Oldest {
        let next = Oldest { generation: self.generation + 1, batch: self.number + 1 };
        let of =
            |live: &Live| Oldest { generation: live.found.generation, batch: live.found.first };
        self.live.front().map_or(next, of)
    }

    /// The last batch of the oldest segment; of the open one there is no last.
    pub fn last_of_oldest(&self) -> u64 {
        self.live.get(1).map_or(u64::MAX, |next| next.found.first - 1)
    }

    /// Whether a FRONTIER would free a segment.
    pub fn would_free(&self) -> bool {
        self.retired.back().is_some_and(|&(at, _)| at >= self.told)
    }

    /// Places a batch of this size; where it opens a segment it begins with a FRONTIER, and is of the size `with_frontier`. It goes to the device at
    /// once, in the order of the numbers. `None` where there is no room for this purpose.
    pub fn place(
        &mut self,
        purpose: Purpose,
        size: Size,
        with_frontier: Size,
        records: u32,
    ) -> Option<Placed> {
        let fits = |live: &Live| self.config.fits(live.found.used.and(size));
        let opens = !self.live.back().is_some_and(fits);
        // What is left afterwards.
        let left = (self.free.len() as u32).checked_sub(u32::from(opens));
        let reserve = match purpose {
            _ if self.fault.is(Planted::NoReserve) => 0,
            Purpose::Clients => self.config.reserve,
            Purpose::Frontier | Purpose::Release if self.would_free() => 0,
            // Two are needed to copy all of it out of the way at once: where each record wants a FRONTIER of its own, the last ones would be used up by them.
            Purpose::Release if self.free.len() == 2 && self.to_park().is_some() => 2,
            Purpose::Release => 0,
            Purpose::Frontier => self.config.reserve,
        };
        if left? < reserve {
            return None;
        }
        let size = if opens { with_frontier } else { size };
        if opens {
            let segment = self.free.pop_front()?;
            self.generation += 1;
            let (generation, first) = (self.generation, self.number + 1);
            let found = Found { segment, generation, first, used: Size::default(), records: 0 };
            self.live.push_back(Live { found, pins: 0 });
            // The one before was open, and nothing may need it any more: the FRONTIER that comes first says so.
            self.retire();
        }
        self.number += 1;
        self.ahead.push_back(false);
        let open = &mut self.live.back_mut()?.found;
        let placed = Placed {
            number: self.number,
            generation: open.generation,
            segment: open.segment,
            at: open.used.bytes,
            opens: opens && !self.fault.is(Planted::FrontierNotRepeated),
            known: self.durable,
        };
        open.used = open.used.and(size);
        open.records += records;
        Some(placed)
    }

    /// The batch that was just placed has a FRONTIER, made after it was placed: it says where the chain begins, and how far each volume is.
    pub fn says(&mut self, batch: u64) {
        self.said.push_back(batch);
        self.told = batch;
    }

    /// Whether a FRONTIER was given out that is not durable.
    pub fn has_said(&self) -> bool {
        !self.said.is_empty()
    }

    /// The device write of a batch has ended.
    pub fn ended(&mut self, batch: u64) {
        let at = batch.checked_sub(self.written + 1);
        if let Some(ended) = at.and_then(|at| self.ahead.get_mut(at as usize)) {
            *ended = true;
        }
        while self.ahead.front() == Some(&true) {
            self.ahead.pop_front();
            self.written += 1;
        }
    }

    /// A flush of the device begins: it makes durable all up to the batch that is returned.
    pub fn flush_begins(&self) -> u64 {
        self.written
    }

    /// A flush has ended well that made durable all up to `batch`.
    pub fn flushed(&mut self, batch: u64) {
        self.durable = self.durable.max(batch);
        let mut said = 0;
        while let Some(&batch) = self.said.front().filter(|batch| **batch <= self.durable) {
            said = batch;
            self.said.pop_front();
        }
        while let Some(&(_, segment)) = self.retired.front().filter(|(at, _)| *at < said) {
            self.retired.pop_front();
            self.free.push_front(segment);
        }
    }

    /// The segment of a batch.
    fn of(&mut self, batch: u64) -> Option<&mut Live> {
        let at = self.live.partition_point(|live| live.found.first <= batch);
        self.live.get_mut(at.checked_sub(1)?)
    }

    /// A record of a batch is not needed there any more: the store has it durably, or a parked copy is durable. The next FRONTIER says so, and
    /// until that is durable the segment is as it is.
    pub fn let_go(&mut self, batch: u64) {
        if let Some(live) = self.of(batch) {
            live.found.records -= 1;
        }
        self.retire();
    }

    /// Bytes of a batch are being read.
    pub fn pin(&mut self, batch: u64) {
        if let Some(live) = self.of(batch) {
            live.pins += 1;
        }
    }

    /// Whether anything is being read, or written outside batches.
    pub fn is_pinned(&self) -> bool {
        !self.parked_pins.is_empty() || self.live.iter().any(|live| live.pins > 0)
    }

    /// They have been.
    pub fn unpin(&mut self, batch: u64) {
        if let Some(live) = self.of(batch) {
            live.pins -= 1;
        }
        self.retire();
    }

    /// The segment of this generation is written to, outside its batches: it is not used again before [`Segments::unpin_segment`]. False if nothing
    /// needs it any more.
    pub fn pin_segment(&mut self, generation: u64) -> bool {
        let unpinned = self.fault.is(Planted::FooterNotPinned);
        if self.parked.iter().any(|parked| parked.generation == generation) {
            if !unpinned {
                self.pin_parked(generation);
            }
            return true;
        }
        let live = self.live.iter_mut().find(|live| live.found.generation == generation);
        live.map(|live| live.pins += u32::from(!unpinned)).is_some()
    }

    /// It has been.
    pub fn unpin_segment(&mut self, generation: u64) {
        self.unpin_parked(generation);
        if let Some(live) = self.live.iter_mut().find(|live| live.found.generation == generation) {
            live.pins -= u32::from(!self.fault.is(Planted::FooterNotPinned));
        }
        self.retire();
    }

    /// Whether this generation's segment has parked records.
    pub(super) fn has_parked(&self, generation: u64) -> bool {
        self.parked.iter().any(|parked| parked.generation == generation)
    }

    /// Segments that nothing needs retire, oldest first; never the one that is open.
    fn retire(&mut self) {
        let most = if self.fault.is(Planted::RetiredInAnyOrder) { self.live.len() } else { 1 };
        let mut at = 0;
        while at < most && at + 1 < self.live.len() {
            let Live { found, pins } = self.live[at];
            if found.records > 0 || pins > 0 && !self.fault.is(Planted::PinsIgnored) {
                at += 1;
                continue;
            }
            self.live.remove(at);
            self.retires(found.segment);
        }
    }

    fn retires(&mut self, segment: u32) {
        if self.fault.is(Planted::FreedBeforeSaid) {
            self.free.push_front(segment);
        } else {
            self.retired.push_back((self.number, segment));
        }
    }

    /// The batches of the oldest segment whose records hold it while others need the room: they are to be parked. They are durable.
    pub fn to_park(&self) -> Option<std::ops::RangeInclusive<u64>> {
        let (oldest, next) = (self.live.front()?, self.live.get(1)?);
        let wanted = (self.free.len() + self.retired.len()) as u32 <= self.config.reserve;
        let last = next.found.first - 1;
        (wanted && oldest.found.records > 0 && last <= self.durable)
            .then_some(oldest.found.first..=last)
    }

    /// A segment for records of this volume, with room for so much: the one that it has, or another, and then nothing comes to that one any more.
    /// The batch's number counts in the segment.
    pub fn park(&mut self, attachment: u32, size: Size, records: u32) -> Option<Placed> {
        let config = self.config;
        let mine = |p: &Parked| p.attachment == attachment && config.fits(p.used.and(size));
        let at = match self.parked.iter().position(mine) {
            Some(at) => at,
            None => {
                // The last one is for the FRONTIER that frees others.
                let segment = (self.free.len() > 1).then(|| self.free.pop_front())??;
                self.generation += 1;
                let generation = self.generation;
                let used = Size::default();
                for before in self.parked.iter_mut().filter(|p| p.attachment == attachment) {
                    before.used.bytes = config.room;
                }
                let parked =
                    Parked { segment, generation, attachment, batches: 0, used, records: 0 };
                self.parked.push(parked);
                self.parked.len() - 1
            }
        };
        let parked = &mut self.parked[at];
        parked.batches += 1;
        let placed = Placed {
            number: parked.batches,
            generation: parked.generation,
            segment: parked.segment,
            at: parked.used.bytes,
            opens: parked.batches == 1,
            known: 0,
        };
        parked.used = parked.used.and(size);
        parked.records += records;
        Some(placed)
    }

    /// So many records of a parked segment are not needed any more, or all of them.
    pub fn let_go_parked(&mut self, generation: u64, records: Option<u32>) {
        let Some(at) = self.parked.iter().position(|p| p.generation == generation) else { return };
        let parked = &mut self.parked[at];
        parked.records -= records.unwrap_or(parked.records).min(parked.records);
        if parked.records == 0 && !self.parked_pins.contains_key(&generation) {
            let segment = parked.segment;
            self.parked.swap_remove(at);
            self.retires(segment);
        }
    }

    /// Bytes of a parked segment are being read.
    pub fn pin_parked(&mut self, generation: u64) {
        *self.parked_pins.entry(generation).or_default() += 1;
    }

    /// They have been.
    pub fn unpin_parked(&mut self, generation: u64) {
        let Some(pins) = self.parked_pins.get_mut(&generation) else { return };
        *pins -= 1;
        if *pins == 0 {
            self.parked_pins.remove(&generation);
            self.let_go_parked(generation, Some(0));
        }
    }

    /// The parked segments.
    pub fn parked(&self) -> &[Parked] {
        &self.parked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A log that never holds more than a few segments stays in as many, however long it goes on.
    #[test]
    fn a_log_that_holds_little_goes_round_in_few_segments() {
        let config = Config { segments: 64, room: 64 << 10, footer: (96, 4096), reserve: 8 };
        let size = Size { bytes: 16 << 10, footer: 56 };
        let mut segments = Segments::new(config);
        let mut used = std::collections::BTreeSet::new();
        for _ in 0..2000 {
            let placed = segments.place(Purpose::Clients, size, size, 1).unwrap();
            used.insert(placed.segment);
            if placed.opens {
                segments.says(placed.number);
            }
            segments.ended(placed.number);
            segments.flushed(segments.flush_begins());
            segments.let_go(placed.number);
        }
        // The one that is open, the one before, which the open one's FRONTIER still counts, and the one before that.
        assert!(used.len() <= 4, "{used:?}");
        assert_eq!(segments.free() + segments.live.len() + segments.retired.len(), 64);
    }
}
