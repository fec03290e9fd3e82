//! Reads of a scan: through one buffer, and around what the device does not give.

use std::ops::Range;

/// The device did not give the bytes that were asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device did not give the bytes")]
pub struct ReadFailed;

/// Most bytes of a read.
const MOST: usize = 1 << 20;
/// A read that fails is done again in halves, which begin at multiples of this, as long as it spans two of them.
const LEAST: u64 = 4096;
/// After so many failures no read is done again: each may take seconds.
const MOST_FAILURES: u32 = 1_000;

/// Fills the buffer from a byte of the device on.
pub type ReadAt<'a> = dyn FnMut(u64, &mut [u8]) -> Result<(), ReadFailed> + 'a;

pub(super) struct Reader<'a> {
    read: &'a mut ReadAt<'a>,
    sector: u64,
    /// Bytes of the device from `at` on; zeros where there are none to be had.
    buffer: Vec<u8>,
    at: u64,
    failures: u32,
    /// Bytes that could not be read: ascending, none meets another.
    unreadable: Vec<Range<u64>>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(sector: u32, read: &'a mut ReadAt<'a>) -> Reader<'a> {
        let sector = u64::from(sector);
        Reader { read, sector, buffer: Vec::new(), at: 0, failures: 0, unreadable: Vec::new() }
    }

    /// The bytes of the device in `range`, and what follows as far as the buffer has it: up to `until` that is read ahead.
    pub(super) fn bytes(&mut self, range: Range<u64>, until: u64) -> &[u8] {
        let held = self.at + self.buffer.len() as u64;
        if range.start < self.at || range.end > held {
            let from = range.start / self.sector * self.sector;
            let ahead = until.min(from + MOST as u64);
            let to = range.end.max(ahead).next_multiple_of(self.sector);
            self.load(from, (to - from) as usize);
        }
        let from = (range.start - self.at) as usize;
        self.buffer.get(from..).unwrap_or(&[])
    }

    fn load(&mut self, from: u64, bytes: usize) {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(bytes, 0);
        let mut at = from;
        for chunk in buffer.chunks_mut(MOST) {
            self.fill(at, chunk);
            at += chunk.len() as u64;
        }
        (self.buffer, self.at) = (buffer, from);
    }

    fn fill(&mut self, at: u64, out: &mut [u8]) {
        if (self.read)(at, out).is_ok() {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        let end = at + out.len() as u64;
        let half = (at + out.len() as u64 / 2) / LEAST * LEAST;
        let half = if half > at { half } else { half + LEAST };
        if half >= end || self.failures > MOST_FAILURES {
            out.fill(0);
            self.lose(at..end);
            return;
        }
        let (first, second) = out.split_at_mut((half - at) as usize);
        self.fill(at, first);
        self.fill(half, second);
    }

    fn lose(&mut self, mut lost: Range<u64>) {
        let from = self.unreadable.partition_point(|range| range.end < lost.start);
        let to = self.unreadable.partition_point(|range| range.start <= lost.end);
        if let Some([first, ..]) = self.unreadable.get(from..to) {
            lost.start = lost.start.min(first.start);
        }
        if let Some([.., last]) = self.unreadable.get(from..to) {
            lost.end = lost.end.max(last.end);
        }
        self.unreadable.splice(from..to.max(from), [lost]);
    }

    /// Whether some of these bytes could not be read.
    pub(super) fn is_unreadable(&self, range: Range<u64>) -> bool {
        let at = self.unreadable.partition_point(|lost| lost.end <= range.start);
        self.unreadable.get(at).is_some_and(|lost| lost.start < range.end)
    }

    /// What could not be read.
    pub(super) fn unreadable(self) -> Vec<Range<u64>> {
        self.unreadable
    }
}
