//! Footers: when a segment is full and all of it is durable, what its batches say goes once more to its end. A start reads that in place of the
//! segment (`larder_format::block::write_log::footer`).
//!
//! Nothing waits for a footer, and nothing depends on it: where it is missing or torn, the batches are read. The segment is pinned while its footer is
//! written, so that it does not land in what another generation holds.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use larder_base::Nanos;
use larder_format::block::write_log::{Batch, Footer};

use super::super::planted::Planted;
use super::super::recovery::{RecoveredIn, Seen};
use super::super::scan::Scan;
use super::super::segments::Found;
use super::{Asks, TRIES, ToWrite, WriteLog};

/// Numbers of footers have this bit, where one is told from a batch; behind it is the generation.
const FOOTER: u64 = 1 << 62;

/// A write that has ended is a footer's.
pub(super) fn is_footer(number: u64) -> bool {
    number & FOOTER != 0 && number >> 63 == 0
}

/// The segment that a batch goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Writing {
    pub segment: u32,
    pub generation: u64,
    /// The attachment number that it is parked for; 0 in the main chain.
    pub parked: u32,
}

/// A segment with its batches.
#[derive(Debug)]
struct Filled {
    to: Writing,
    batches: Vec<Batch>,
    /// It has others, of an earlier run, which are not at hand: no footer speaks for them.
    more: bool,
}

impl Filled {
    fn new(to: Writing, more: bool) -> Filled {
        Filled { to, batches: Vec::new(), more }
    }
}

/// What becomes of segments that are full. See the [module](self).
#[derive(Debug)]
pub(super) struct Footers<B> {
    /// Segments that batches go to: of the main chain (0), and of those that are parked for a volume.
    open: BTreeMap<u32, Filled>,
    /// Those that are full, oldest first: they wait until their last batch is durable.
    full: VecDeque<Filled>,
    /// Footers that are being written, and how often that has failed.
    writing: BTreeMap<u64, (ToWrite<B>, u32)>,
}

impl<B> Default for Footers<B> {
    fn default() -> Footers<B> {
        Footers { open: BTreeMap::new(), full: VecDeque::new(), writing: BTreeMap::new() }
    }
}

impl<B> Footers<B> {
    /// Whether any are being written.
    pub(super) fn is_writing(&self) -> bool {
        !self.writing.is_empty()
    }

    /// The numbers of those that are being written.
    pub(super) fn under_way(&self) -> impl Iterator<Item = u64> {
        self.writing.keys().copied()
    }

    /// Of the log that a start has found: segments that the last run had no time to seal.
    pub(super) fn found<R>(found: &RecoveredIn<R>, scan: &Scan) -> Footers<B> {
        let mut footers = Footers::default();
        if let Some(&Found { segment, generation, .. }) = found.live.last() {
            footers.open.insert(0, Filled::new(Writing { segment, generation, parked: 0 }, true));
        }
        let main: Vec<&Seen> = scan.batches.iter().filter(|batch| batch.parked == 0).collect();
        let counting = found.chain.batches.iter().filter_map(|&at| main.get(at));
        let is_open = |batch: &&&Seen| {
            scan.open.iter().any(|(generation, _)| *generation == batch.link.generation)
        };
        let counting: BTreeSet<(u64, u64)> =
            counting.filter(is_open).map(|batch| (batch.link.number, batch.link.hash)).collect();
        for (generation, batches) in scan.open.iter().rev() {
            let Some(at) = found.live.iter().position(|live| live.generation == *generation) else {
                continue;
            };
            let to =
                Writing { segment: found.live[at].segment, generation: *generation, parked: 0 };
            let counts = |batch: &&Batch| counting.contains(&(batch.head.number, batch.hash));
            let batches = batches.iter().filter(counts).cloned().collect();
            let filled = Filled { to, batches, more: false };
            if at + 1 == found.live.len() {
                footers.open.insert(0, filled);
            } else {
                footers.full.push_back(filled);
            }
        }
        footers
    }

    /// A batch has its place. The first of another segment says that the one before is full.
    pub(super) fn add(&mut self, to: Writing, batch: Batch) {
        let open = self.open.entry(to.parked).or_insert(Filled::new(to, false));
        if open.to != to {
            let full = std::mem::replace(open, Filled::new(to, false));
            self.full.push_back(full);
        }
        open.batches.push(batch);
    }

    /// Nothing is parked for a volume any more.
    pub(super) fn forget(&mut self, attachment: u32) {
        self.open.remove(&attachment);
    }
}

impl<B: Clone> WriteLog<B> {
    /// Segments that are full and durable get their footers.
    pub(super) fn seal(&mut self, asks: &mut Asks<B>) {
        let early = self.fault.is(Planted::FooterBeforePayload);
        let durable = if early { u64::MAX } else { self.segments.durable() };
        // A parked copy is durable before the next is begun.
        let waits = |filled: &Filled| {
            filled.to.parked == 0 && filled.batches.last().is_some_and(|b| b.head.number > durable)
        };
        for filled in std::mem::take(&mut self.footers.full) {
            if waits(&filled) {
                self.footers.full.push_back(filled);
            } else if self.closed.is_none() {
                self.write_footer(filled, asks);
            }
        }
    }

    fn write_footer(&mut self, filled: Filled, asks: &mut Asks<B>) {
        let Filled { to, batches, more } = filled;
        let Writing { segment, generation, parked } = to;
        let (geometry, cache) = (self.config.geometry, self.config.cache);
        let Some(last) = batches.last().map(|batch| batch.head.number) else { return };
        let known = if parked == 0 { self.segments.durable().max(last) } else { last };
        let footer = Footer { cache, generation, parked, known, batches };
        // A segment of an earlier version may have no room for it; and one that nothing needs needs none.
        if more || !footer.fits(geometry) || !self.segments.pin_segment(generation) {
            return;
        }
        let head = footer.encode(geometry);
        let len = head.len() as u32;
        let end = self.config.at + (u64::from(segment) + 1) * u64::from(geometry.bytes());
        let number = FOOTER | generation;
        let write = ToWrite { number, at: end - u64::from(len), len, head, payload: Vec::new() };
        self.footers.writing.insert(number, (write.clone(), 0));
        asks.writes.push(write);
    }

    /// A footer is written, or not: then there is none, after some tries.
    pub(super) fn footer_written(
        &mut self,
        now: Nanos,
        number: u64,
        done: bool,
        asks: &mut Asks<B>,
    ) {
        let Some((write, tries)) = self.footers.writing.remove(&number) else { return };
        if !done && tries + 1 < TRIES && self.closed.is_none() {
            asks.writes.push(write.clone());
            self.footers.writing.insert(number, (write, tries + 1));
            return;
        }
        self.bytes += u64::from(write.len);
        self.segments.unpin_segment(number & !FOOTER);
        // Its segment may be what others wait for.
        self.form(now, asks);
    }
}
