//! How many reads are to be expected of an object: means of what became of its like.
//!
//! What is like is asked at four depths of [`Means`]: all objects; those with as many reads, refetches and as good a former life; of
//! those, the ones that were away as long; of those, the ones of the same size and idleness.

use larder_base::Nanos;

use crate::learn::{Features, History};
use crate::means::Means;

const READS: usize = 6;
const REFETCHES: usize = 4;
const LIVES: usize = 2;
const GAPS: usize = 6;
const SIZES: usize = 4;
const IDLE: usize = 4;
const COARSE: usize = READS * REFETCHES * LIVES;
const MIDDLE: usize = COARSE * GAPS;
const FINE: usize = MIDDLE * SIZES * IDLE;
const _: () = assert!(FINE <= 1 << 16);

/// Which place of the table an object belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Like(u16);

impl Like {
    pub(super) fn number(self) -> u16 {
        self.0
    }

    /// Of a number that [`Like::number`] gave.
    pub(super) fn of_number(number: u16) -> Like {
        Like(number)
    }

    fn fine(self) -> usize {
        usize::from(self.0) % FINE
    }

    fn middle(self) -> usize {
        self.fine() / (SIZES * IDLE)
    }

    fn coarse(self) -> usize {
        self.middle() / GAPS
    }
}

/// How sizes are spread: three quartiles of the logarithm, each followed by small steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quartiles {
    at: [f32; SIZES - 1],
    seen: u32,
}

/// A step, in doublings: the first are larger, so that a start from nowhere is soon there.
const STEP: (f32, f32) = (0.5, 0.01);

impl Quartiles {
    pub(super) const NONE: Quartiles = Quartiles { at: [8.0; SIZES - 1], seen: 0 };

    /// Takes in a size (Robbins and Monro's way to a quantile), and says in which quarter it is.
    pub(super) fn see(&mut self, log2_size: f32) -> usize {
        self.seen = self.seen.saturating_add(1);
        let step = (STEP.0 * 16.0 / (16.0 + self.seen as f32)).max(STEP.1);
        for (n, at) in self.at.iter_mut().enumerate() {
            let share = (n + 1) as f32 / SIZES as f32;
            *at += if log2_size > *at { step * share } else { -step * (1.0 - share) };
        }
        self.quarter(log2_size)
    }

    pub(super) fn quarter(&self, log2_size: f32) -> usize {
        self.at.iter().filter(|at| log2_size > **at).count()
    }
}

/// The place of an object with these features, in a cache whose objects live so long.
pub(super) fn like(
    f: &Features,
    past: History,
    survivor: bool,
    quarter: usize,
    lifetime: Nanos,
) -> Like {
    let reads = match f.reads {
        n @ 0..=2 => n as usize,
        3..=4 => 3,
        5..=8 => 4,
        _ => 5,
    };
    let refetches = match past.refetches {
        n @ 0..=1 => usize::from(n),
        2..=3 => 2,
        _ => 3,
    };
    let life = (lifetime.0 / 1_000_000).max(1);
    // Times away by octaves of two, around the time that flash holds what it has.
    let gap = match u64::from(past.away) {
        0 => 0,
        away if away * 16 < life => 1,
        away if away * 4 < life => 2,
        away if away < life => 3,
        away if away < life.saturating_mul(4) => 4,
        _ => 5,
    };
    let idle = match (u64::from(f.idle) * 8).checked_div(u64::from(f.age)) {
        Some(0..=1) => 0,
        Some(2..=4) => 1,
        Some(5..=6) => 2,
        _ => 3,
    };
    let coarse = (reads * REFETCHES + refetches) * LIVES + usize::from(survivor);
    let fine = ((coarse * GAPS + gap) * SIZES + quarter.min(SIZES - 1)) * IDLE + idle;
    Like(fine as u16)
}

type Depths = Means<3, 1>;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Table(Depths);

impl Table {
    /// A table in at most about `memory` bytes: the finest depth is left out where it would take more.
    pub(super) fn new(memory: usize) -> Table {
        let fine = if FINE * Depths::CELL <= memory { FINE } else { 0 };
        Table(Means::new([COARSE, MIDDLE, fine]))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    /// An object of this kind was read so often within one lifetime of flash.
    pub(super) fn learn(&mut self, like: Like, reads: u32) {
        self.0.learn([like.coarse(), like.middle(), like.fine()], [reads as f32]);
    }

    /// How many reads one of this kind is to be expected to get.
    pub(super) fn expected(&self, like: Like) -> f32 {
        let [reads] = self.0.expected([like.coarse(), like.middle(), like.fine()], [0.0]);
        reads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(reads: u32, refetches: u8, survivor: bool) -> Like {
        let f = Features { reads, age: 100, idle: 10, size: 300, ..Features::default() };
        let past = History { refetches, ..History::default() };
        like(&f, past, survivor, 1, Nanos::from_secs(60))
    }

    #[test]
    fn every_object_has_a_place() {
        for reads in [0, 1, 2, 3, 8, 9, u32::MAX] {
            for refetches in [0, 1, 3, 255] {
                for away in [0, 1, 1000, u32::MAX] {
                    for (age, idle) in [(0, 0), (0, 9), (9, 9), (9, 0), (9, u32::MAX)] {
                        for lifetime in [Nanos::ZERO, Nanos::from_secs(60), Nanos(u64::MAX)] {
                            let f = Features { reads, age, idle, ..Features::default() };
                            let past = History { refetches, away, ..History::default() };
                            let like = like(&f, past, true, 9, lifetime);
                            assert!(usize::from(like.0) < FINE, "{f:?} {past:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_mean_is_drawn_to_the_coarser_by_ten() {
        let mut table = Table::new(1 << 20);
        for _ in 0..20 {
            table.learn(of(1, 0, false), 3);
        }
        // all: 60 / 30 = 2; coarse: (60 + 20) / 30; middle and fine alike.
        let mean = |coarser: f32| (60.0 + 10.0 * coarser) / 30.0;
        let expected = mean(mean(mean(2.0)));
        assert!((table.expected(of(1, 0, false)) - expected).abs() < 1e-4);
        // Of others only what all have in common is known.
        assert!((table.expected(of(5, 2, true)) - 2.0).abs() < 1e-4);
    }

    #[test]
    fn sizes_are_told_apart_by_quarters() {
        let mut quartiles = Quartiles::NONE;
        let mut counts = [0; SIZES];
        for i in 0..40_000_u32 {
            // Uniform over 6..14.
            let at = 6.0 + (i.wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 24) as f32 * 8.0;
            let quarter = quartiles.see(at);
            if i > 10_000 {
                counts[quarter] += 1;
            }
        }
        for count in counts {
            assert!((6800..=8200).contains(&count), "{counts:?}");
        }
    }

    #[test]
    fn without_memory_the_finest_depth_is_left_out() {
        let small = Table::new(20_000);
        assert!(small.memory_bytes() < 3000 && Table::new(1 << 20).memory_bytes() < 40_000);
        assert_eq!(small.expected(of(0, 0, false)), 0.0);
    }
}
