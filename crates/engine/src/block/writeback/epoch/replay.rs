//! An epoch comes to its store by a start or a recovery: in which steps.
//!
//! | step | why then |
//! | --- | --- |
//! | what was read is made durable where the journal is | it may be in a cache alone, and vanish halfway [jflush] |
//! | its stretches are written, each in pieces | |
//! | the store is flushed | the journal may be given up then [jafter] |

use std::ops::Range;

use larder_format::block::journal::{COMMIT_AT, COMMIT_BYTES, DESCRIPTORS_AT, ExtentKind};

use super::super::planted::{Fault, Planted};
use super::Whole;

/// Bytes of one request to the store.
const PIECE: u64 = 1 << 20;

/// A step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// These bytes of the part are made durable, whatever became of a flush before.
    Renew([Range<u64>; 2]),
    /// What lies in the part from `at` on goes to this range of the store.
    Copy {
        /// Where in the part.
        at: u64,
        /// Where in the volume.
        to: Range<u64>,
    },
    /// This range of the store reads as zeros, and may give up its space. (What is trimmed does so in an image that is a cut, too.)
    Zero(Range<u64>),
    /// The store is flushed.
    Flush,
}

/// The store has fewer bytes than the epoch reaches up to: nothing of it is put over a store that cannot have all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// Where the last stretch of the epoch ends.
    pub end: u64,
}

/// The steps that bring an epoch to its store. Where one fails the store is between two epochs, and all are done again. See the [module](self).
#[derive(Debug)]
pub struct Replay<'a> {
    whole: &'a Whole,
    stretches: Vec<(Range<u64>, Option<u64>)>,
    /// The stretch that is next, and how much of it is done.
    next: (usize, u64),
    renews: bool,
    flushes: bool,
}

impl Whole {
    /// The stretches of the volume as the epoch leaves them, ascending, and where in the part their bytes begin; `None`: zeros.
    pub fn stretches(&self) -> impl Iterator<Item = (Range<u64>, Option<u64>)> {
        self.descriptors.entries().map(|entry| {
            let range = entry.extent.offset..entry.extent.offset + entry.extent.length;
            let data = entry.extent.kind == ExtentKind::Data;
            (range, data.then_some(self.data + entry.data.start))
        })
    }
}

impl Replay<'_> {
    /// For a store of so many bytes.
    ///
    /// # Errors
    /// [`TooLarge`].
    pub fn new(whole: &Whole, bytes: u64, fault: Fault) -> Result<Replay<'_>, TooLarge> {
        let stretches: Vec<_> = whole.stretches().collect();
        let end = stretches.last().map_or(0, |(range, _)| range.end);
        if end > bytes {
            return Err(TooLarge { end });
        }
        Ok(Replay {
            whole,
            stretches,
            next: (0, 0),
            renews: !fault.is(Planted::JournalReadUnflushed),
            flushes: !fault.is(Planted::ReplayNotFlushed),
        })
    }
}

impl Iterator for Replay<'_> {
    type Item = Task;

    /// The next step, when the one before was done.
    fn next(&mut self) -> Option<Task> {
        if std::mem::take(&mut self.renews) {
            let end = self.whole.data + self.whole.commit.data;
            let commit = COMMIT_AT..COMMIT_AT + COMMIT_BYTES as u64;
            return Some(Task::Renew([commit, DESCRIPTORS_AT..end]));
        }
        let (i, done) = self.next;
        let Some((range, data)) = self.stretches.get(i) else {
            return std::mem::take(&mut self.flushes).then_some(Task::Flush);
        };
        let start = range.start + done;
        let piece = start..range.end.min(start + PIECE);
        self.next = if piece.end == range.end { (i + 1, 0) } else { (i, done + PIECE) };
        Some(match data {
            Some(at) => Task::Copy { at: at + done, to: piece },
            None => Task::Zero(piece),
        })
    }
}

#[cfg(test)]
mod tests {
    use larder_format::Uuid;
    use larder_format::block::journal::{Commit, Descriptors, JournalExtent};
    use larder_format::block::write_log::pieces;

    use super::*;

    fn whole() -> Whole {
        let extent = |offset, length, kind| {
            let may_punch = kind == ExtentKind::Zero;
            JournalExtent { offset, length, kind, may_punch }
        };
        let extents = vec![
            extent(0, 512, ExtentKind::Data),
            extent(4096, 512, ExtentKind::Trim),
            extent(8192, PIECE + 512, ExtentKind::Data),
            extent(4 << 20, PIECE, ExtentKind::Zero),
        ];
        let sums = (pieces::count(512) + pieces::count(PIECE + 512)) as usize;
        let descriptors = Descriptors {
            volume: Uuid([1; 16]),
            cache: Uuid([2; 16]),
            epoch: 5,
            generation: 3,
            extents,
            sums: vec![0; sums],
        };
        let encoded = descriptors.encode();
        let commit = Commit::of(&descriptors, &encoded, 50, 0, None);
        Whole { commit, descriptors, data: DESCRIPTORS_AT + encoded.len() as u64 }
    }

    #[test]
    fn an_epoch_comes_to_its_store_durable_first_then_in_pieces_then_flushed() {
        let whole = whole();
        let data = whole.data;
        let tasks: Vec<Task> = Replay::new(&whole, 5 << 20, Fault::default()).unwrap().collect();
        let commit = COMMIT_AT..COMMIT_AT + COMMIT_BYTES as u64;
        assert_eq!(
            tasks,
            [
                Task::Renew([commit, DESCRIPTORS_AT..data + 512 + PIECE + 512]),
                Task::Copy { at: data, to: 0..512 },
                Task::Zero(4096..4608),
                Task::Copy { at: data + 512, to: 8192..8192 + PIECE },
                Task::Copy { at: data + 512 + PIECE, to: 8192 + PIECE..8704 + PIECE },
                Task::Zero(4 << 20..5 << 20),
                Task::Flush,
            ]
        );
    }

    #[test]
    fn nothing_of_an_epoch_comes_to_a_store_that_cannot_have_all_of_it() {
        let whole = whole();
        let short = Replay::new(&whole, (5 << 20) - 1, Fault::default());
        assert_eq!(short.err(), Some(TooLarge { end: 5 << 20 }));
    }
}
