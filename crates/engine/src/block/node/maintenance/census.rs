//! What has time: lines of trimmed ranges leave the map, and the lines of each volume are counted.
//!
//! A machine of its own, owned by whichever thread has time for it.

use larder_base::Nanos;

use super::Turn;
use crate::block::node::share::Count;

/// Slots that are swept under one lock: a client waits for no more.
pub const SWEEP_STEP: u32 = 512;
/// Sweeping goes on for so long, then rests for as long.
const SWEEP: Nanos = Nanos::from_millis(20);
/// Where there is nothing to sweep it looks again after so long.
const LOOK: Nanos = Nanos::from_millis(100);
/// The least time between two counts; a count that takes long is made less often, so that it is no load.
const COUNT: Nanos = Nanos::from_secs(1);
const SHARE_OF_TIME: u64 = 100;
/// Reads of one volume's store, for what tells where a file system's metadata is, in one round.
pub const MOST_LOOKS: u32 = 16;

/// The longest time between two rounds of who has time.
pub const ROUND: Nanos = Nanos::from_millis(100);

/// Shards whose lines are counted and swept.
pub trait Lines {
    /// How many there are.
    fn shards(&self) -> u32;
    /// `BlockShard::sweep`, under the shard's lock.
    fn sweep(&mut self, shard: u32, steps: u32) -> bool;
    /// A turn of `count` at a shard, under its lock: notes the lines that it tells of. Returns whether there is more to count.
    fn count(&mut self, shard: u32, count: &mut Count) -> bool;
    /// Everything was counted since the last time.
    fn counted(&mut self);
}

/// A count that is under way.
#[derive(Debug)]
struct Counting {
    begun: Nanos,
    shard: u32,
    count: Count,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Census {
    next_count: Nanos,
    counting: Option<Counting>,
    /// The shard that is swept, and since when this is done without a rest.
    shard: u32,
    sweeping: Option<Nanos>,
    rests_until: Nanos,
}

impl Census {
    /// Does all that is due, and says when the next round is. `clock` tells the time: it is asked before each look at a shard.
    pub fn round(&mut self, mut clock: impl FnMut() -> Nanos, lines: &mut impl Lines) -> Nanos {
        loop {
            let now = clock();
            match self.turn(now, lines) {
                Turn::Again => {}
                Turn::At(at) => return at.min(now + ROUND),
                Turn::Over { .. } => return now + ROUND,
            }
        }
    }

    /// Nothing is to be swept before `at`, and the next round is due at `next`: a round that is to be made meanwhile, at its time, if what comes
    /// from then on is to be as if all had been made; nothing if the rest may be left out. `counts`: lines are counted for somebody.
    /// (For a host whose time is a number.)
    pub fn idled(&self, next: Nanos, at: Nanos, counts: bool) -> Option<Nanos> {
        let last = |from: u64, every: Nanos| {
            Nanos(from + (at.0 - 1).saturating_sub(from) / every.0 * every.0)
        };
        if next >= at {
            return None;
        }
        let count = last(self.next_count.saturating_sub(COUNT).0, COUNT);
        let last_count = (counts && self.counting.is_none() && count >= next).then_some(count);
        Some(last_count.unwrap_or_else(|| last(next.0, ROUND)))
    }

    /// Does a little, under one lock, and says when to come again.
    pub fn turn(&mut self, now: Nanos, lines: &mut impl Lines) -> Turn {
        if self.counting.is_none() && now >= self.next_count {
            self.counting = Some(Counting { begun: now, shard: 0, count: Count::default() });
        }
        if let Some(Counting { begun, shard, count }) = &mut self.counting {
            if *shard < lines.shards() && !lines.count(*shard, count) {
                (*shard, *count) = (*shard + 1, Count::default());
            }
            if *shard >= lines.shards() {
                lines.counted();
                let took = now.saturating_sub(*begun).0;
                self.next_count = *begun + COUNT.max(Nanos(took.saturating_mul(SHARE_OF_TIME)));
                self.counting = None;
            }
            return Turn::Again;
        }
        if now < self.rests_until {
            return Turn::At(self.next_count.min(self.rests_until));
        }
        let begun = *self.sweeping.get_or_insert(now);
        while self.shard < lines.shards() {
            if lines.sweep(self.shard, SWEEP_STEP) {
                if now.saturating_sub(begun) < SWEEP {
                    return Turn::Again;
                }
                break;
            }
            self.shard += 1;
        }
        let rest = if self.shard < lines.shards() { SWEEP } else { LOOK };
        (self.sweeping, self.rests_until) = (None, now + rest);
        if self.shard >= lines.shards() {
            self.shard = 0;
        }
        Turn::At(self.next_count.min(self.rests_until))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shards with so many steps to sweep.
    struct Left {
        steps: Vec<u32>,
        counted: u32,
    }

    impl Lines for Left {
        fn shards(&self) -> u32 {
            self.steps.len() as u32
        }

        fn sweep(&mut self, shard: u32, _: u32) -> bool {
            let left = &mut self.steps[shard as usize];
            *left = left.saturating_sub(1);
            *left > 0
        }

        fn count(&mut self, _: u32, _: &mut Count) -> bool {
            false
        }

        fn counted(&mut self) {
            self.counted += 1;
        }
    }

    #[test]
    fn it_sweeps_half_of_the_time_and_counts_every_second() {
        let (mut census, mut lines) =
            (Census::default(), Left { steps: vec![150, 0, 210], counted: 0 });
        let (mut now, mut busy, mut rested) = (Nanos::ZERO, Nanos::ZERO, Nanos::ZERO);
        while lines.steps.iter().any(|&n| n > 0) {
            match census.turn(now, &mut lines) {
                // A step takes a millisecond.
                Turn::Again => {
                    now = now + Nanos::from_millis(1);
                    busy = busy + Nanos::from_millis(1);
                }
                Turn::At(at) => {
                    rested = rested + at.saturating_sub(now);
                    now = at;
                }
                Turn::Over { .. } => panic!("it is never over"),
            }
            assert!(now < Nanos::from_secs(1));
        }
        let share = busy.as_secs_f64() / (busy + rested).as_secs_f64();
        assert!((0.4..0.7).contains(&share), "{share}");
        let mut last = now;
        while now < Nanos::from_secs(10) {
            if let Turn::At(at) = census.turn(now, &mut lines) {
                assert!(at > now && at <= now + Nanos::from_millis(100), "{now:?} {at:?}");
                (last, now) = (now, at);
            }
        }
        assert!(last < now);
        assert_eq!(lines.counted, 10);
    }

    /// A host that leaves out rounds in which nothing happens comes again, and counts, when one would that makes them all.
    #[test]
    fn rounds_that_were_left_out_are_not_missed() {
        for (from, to) in [(0, 10_050), (30, 999), (30, 1_001), (1_700, 1_750), (77, 60_000)] {
            let counted = |leaves_out: bool| {
                let (mut census, mut lines) =
                    (Census::default(), Left { steps: vec![0; 5], counted: 0 });
                let mut now = Nanos::ZERO;
                let mut next = census.round(|| now, &mut lines);
                let mut make = |at: Nanos, census: &mut Census| {
                    now = at;
                    census.round(|| at, &mut lines)
                };
                while next < Nanos::from_millis(from) {
                    next = make(next, &mut census);
                }
                let to = Nanos::from_millis(to);
                while next < to {
                    let at = if leaves_out { census.idled(next, to, true) } else { Some(next) };
                    next = make(at.expect("one is due"), &mut census);
                }
                (next, census.next_count)
            };
            assert_eq!(counted(true), counted(false), "{from} {to}");
        }
    }

    #[test]
    fn a_count_that_takes_long_is_made_less_often() {
        let (mut census, mut lines) = (Census::default(), Left { steps: vec![0; 5], counted: 0 });
        let mut now = Nanos::ZERO;
        while now < Nanos::from_secs(100) {
            match census.turn(now, &mut lines) {
                // Each shard takes 100 ms.
                Turn::Again => now = now + Nanos::from_millis(100),
                Turn::At(at) => now = at,
                Turn::Over { .. } => panic!("it is never over"),
            }
        }
        assert!((2..=4).contains(&lines.counted), "{}", lines.counted);
    }
}
