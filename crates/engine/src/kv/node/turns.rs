//! Whose turn it is, where there are several drives.
//!
//! Each drive's log fills its segments on a thread of its own. What shards want rid of goes to the drive that has been given the least for its size,
//! segment by segment, so that objects are spread by capacity. A drive that is writing or reading is not waited for: while it is busy the turn is another's,
//! so a slow one takes what it can. One that fails, or whose write budget is spent, has no turn as long as another can write; objects are evicted unwritten only
//! where none can.

use crate::kv::config::MOST_DRIVES;
use crate::kv::log::Standing;

/// By how many segments a drive may fall behind and still catch up: one that comes back is not given everything for hours.
const MOST_BEHIND: f64 = 4.0;

#[derive(Clone, Copy, Debug, Default)]
struct OfDrive {
    is_there: bool,
    takes: bool,
    busy: bool,
    /// What it has been given, in parts of its capacity.
    given: f64,
    written: u64,
}

/// Whose turn it is. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Turns {
    drives: [OfDrive; MOST_DRIVES],
}

impl Turns {
    /// A drive has come.
    pub(super) fn join(&mut self, drive: usize) {
        let given = self.drives.iter().filter(|d| d.is_there).map(|d| d.given).reduce(f64::min);
        if let Some(mine) = self.drives.get_mut(drive) {
            *mine = OfDrive { is_there: true, takes: true, given: given.unwrap_or(0.0), ..*mine };
        }
    }

    /// Its log begins to write or read, or has ended.
    pub(super) fn set_busy(&mut self, drive: usize, busy: bool) {
        if let Some(mine) = self.drives.get_mut(drive) {
            mine.busy = busy;
        }
    }

    /// A drive has gone, or nobody sees to it any more.
    pub(super) fn leave(&mut self, drive: usize) {
        if let Some(mine) = self.drives.get_mut(drive) {
            *mine = OfDrive::default();
        }
    }

    /// Whose turn it is, asked by this log.
    pub(super) fn whose(&mut self, standing: &Standing, segment_bytes: u64) -> usize {
        let (me, capacity) = (standing.drive, standing.capacity.max(1) as f64);
        let Some(mine) = self.drives.get_mut(me) else { return me };
        mine.given += standing.written.saturating_sub(mine.written) as f64 / capacity;
        (mine.written, mine.takes) = (standing.written, standing.takes);
        let most = self.drives.iter().map(|d| d.given).fold(0.0, f64::max);
        let behind = MOST_BEHIND * segment_bytes as f64 / capacity;
        let mine = &mut self.drives[me];
        mine.given = mine.given.max(most - behind);
        // What is busy is not waited for. Who asks is not.
        let free =
            self.drives.iter().enumerate().filter(|(i, d)| *i == me || d.is_there && !d.busy);
        let takers = free.clone().filter(|(_, d)| d.takes);
        let least = takers.min_by(|(i, a), (j, b)| a.given.total_cmp(&b.given).then(i.cmp(j)));
        // Where none can write the first evicts.
        least.or_else(|| free.min_by_key(|(i, _)| *i)).map_or(me, |(i, _)| i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 100;

    /// Drives of these capacities, and what each has written.
    struct Drives(Vec<(u64, u64, bool)>, Turns);

    impl Drives {
        fn of(capacities: &[u64]) -> Drives {
            let mut turns = Turns::default();
            (0..capacities.len()).for_each(|i| turns.join(i));
            Drives(capacities.iter().map(|c| (*c, 0, true)).collect(), turns)
        }
        fn asks(&mut self, drive: usize) -> bool {
            let (capacity, written, takes) = self.0[drive];
            self.1.whose(&Standing { drive, capacity, written, takes }, SEGMENT) == drive
        }
        /// Whose turn it is, when all have asked.
        fn turn(&mut self) -> Vec<usize> {
            (0..self.0.len()).for_each(|i| {
                self.asks(i);
            });
            (0..self.0.len()).filter(|i| self.asks(*i)).collect()
        }
        fn write(&mut self, segments: usize) {
            for _ in 0..segments {
                let turn = self.turn();
                assert_eq!(turn.len(), 1, "{turn:?}");
                self.0[turn[0]].1 += SEGMENT;
            }
        }
    }

    #[test]
    fn segments_are_spread_by_capacity() {
        let mut drives = Drives::of(&[10_000, 30_000, 20_000]);
        drives.write(600);
        assert_eq!(drives.0.iter().map(|d| d.1).collect::<Vec<_>>(), [10_000, 30_000, 20_000]);
    }

    #[test]
    fn a_busy_drive_is_not_waited_for() {
        let mut drives = Drives::of(&[10_000, 10_000]);
        assert_eq!(drives.turn(), [0]);
        drives.1.set_busy(0, true);
        drives.turn();
        assert!(drives.asks(1));
        drives.1.set_busy(0, false);
        assert!(!drives.asks(1) && drives.asks(0));
    }

    #[test]
    fn one_that_cannot_write_has_no_turn_as_long_as_another_can() {
        let mut drives = Drives::of(&[10_000, 10_000, 10_000]);
        drives.0[0].2 = false;
        drives.write(200);
        assert_eq!(drives.0[0].1, 0);
        // It comes back, and is not given all that it has missed.
        drives.0[0].2 = true;
        drives.write(30);
        assert!((800..2000).contains(&drives.0[0].1), "{:?}", drives.0);
        // None can: one of them evicts.
        (0..3).for_each(|i| drives.0[i].2 = false);
        assert_eq!(drives.turn(), [0]);
        // Nor is one that hangs waited for.
        drives.0[1].2 = true;
        drives.turn();
        drives.1.set_busy(1, true);
        assert!(drives.asks(0) && !drives.asks(2));
        drives.0[2].2 = true;
        drives.turn();
        assert!(drives.asks(2) && !drives.asks(0));
        // One whose thread has died has no turn.
        drives.1.leave(2);
        assert!(drives.asks(0));
    }

    #[test]
    fn a_new_drive_begins_where_the_others_are() {
        let mut drives = Drives::of(&[10_000, 10_000]);
        drives.write(100);
        drives.0.push((10_000, 0, true));
        drives.1.join(2);
        let before = drives.0[0].1;
        drives.write(30);
        assert!(drives.0[2].1 <= 1500 && drives.0[0].1 > before, "{:?}", drives.0);
    }
}
