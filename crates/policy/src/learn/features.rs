//! Feature vectors: what is known of an object, on scales on which a linear classifier can weigh it.

use serde::{Deserialize, Serialize};

/// What DRAM remembers of an object's reads: the five features of Flashield (§3.1), times in milliseconds, plus its size and age.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Number of reads since it was written.
    pub reads: u32,
    /// Mean time between reads; 0 with fewer than two.
    pub mean_gap: u32,
    /// Time between the last two reads; 0 with fewer than two.
    pub last_gap: u32,
    /// Longest time between two reads; 0 with fewer than two.
    pub max_gap: u32,
    /// From the write to the first read; 0 if never read.
    pub first_read: u32,
    /// Since it was written.
    pub age: u32,
    /// Since its last read (or write, if never read).
    pub idle: u32,
    /// Bytes it would take on flash.
    pub size: u32,
}

/// Length of a [`Vector`].
pub const DIMENSIONS: usize = 15;

/// Names of a [`Vector`]'s components, for reports.
pub const FEATURE_NAMES: [&str; DIMENSIONS] = [
    "reads",
    "mean_gap",
    "last_gap",
    "max_gap",
    "first_read",
    "size",
    "age",
    "idle",
    "unread",
    "one_read",
    "refetches",
    "updates",
    "away",
    "survivor",
    "first_life",
];

/// Components that have a meaning of their own outside the classifier.
pub(crate) const READS: usize = 0;
pub(crate) const SIZE: usize = 5;
pub(crate) const REFETCHES: usize = 10;
pub(crate) const SURVIVOR: usize = 13;

/// One object's features in fixed point, [`FRACTION`](log2_fixed) bits after the point. Counts, times and sizes are
/// log2(1 + x): they spread over many orders of magnitude, and ratios of times (idle against mean gap) become
/// differences, which a linear classifier can weigh. Indicators are 0 or 1.
///
/// Integers, so that every platform computes the same vector: a model's decisions must replay.
pub type Vector = [u16; DIMENSIONS];

/// Components that are 0 or [`ONE`].
const INDICATORS: [usize; 4] = [8, 9, SURVIVOR, 14];

/// A [`Vector`] in less room: indicators are bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    values: [u16; DIMENSIONS - INDICATORS.len()],
    /// From the lowest, those of [`INDICATORS`]; the highest is the owner's.
    bits: u8,
}

impl Packed {
    /// As [`vector`] makes them.
    pub(crate) fn of(x: &Vector) -> Packed {
        let mut packed = Packed { values: [0; DIMENSIONS - INDICATORS.len()], bits: 0 };
        let (mut value, mut bit) = (0, 0);
        for (at, &component) in x.iter().enumerate() {
            if INDICATORS.contains(&at) {
                debug_assert!(component == 0 || component == ONE, "{}", FEATURE_NAMES[at]);
                packed.bits |= u8::from(component != 0) << bit;
                bit += 1;
            } else {
                packed.values[value] = component;
                value += 1;
            }
        }
        packed
    }

    /// The vector.
    pub(crate) fn vector(&self) -> Vector {
        let (mut value, mut bit) = (0, 0);
        std::array::from_fn(|at| {
            if INDICATORS.contains(&at) {
                bit += 1;
                if self.bits >> (bit - 1) & 1 == 1 { ONE } else { 0 }
            } else {
                value += 1;
                self.values[value - 1]
            }
        })
    }

    /// With the owner's bit.
    pub(crate) fn marked(self, mark: bool) -> Packed {
        Packed { bits: self.bits & 0x7f | u8::from(mark) << 7, ..self }
    }

    /// The owner's bit; not set at first.
    pub(crate) fn mark(&self) -> bool {
        self.bits >> 7 == 1
    }
}

/// 1.0 in the fixed point of a [`Vector`].
pub(crate) const ONE: u16 = 1 << 10;

/// Which features a classifier may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FeatureSet {
    /// Flashield's five (§3.1): reads, mean, last and longest gap, time to the first read.
    Paper,
    /// Those, with size, age, idle time, indicators of never read and read once, history (zero without a memory) and
    /// whether it survived a reclaimed segment.
    Extended,
}

impl FeatureSet {
    /// How many leading components of a [`Vector`] are in use.
    pub fn len(self) -> usize {
        match self {
            FeatureSet::Paper => 5,
            FeatureSet::Extended => DIMENSIONS,
        }
    }

    /// Never: every set has features.
    pub fn is_empty(self) -> bool {
        false
    }
}

/// What is remembered of a key from before its present life in DRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Nothing is remembered of it: this is its first life, as far as is known.
    pub first_life: bool,
    /// Times it was missed and fetched again.
    pub refetches: u8,
    /// Times it was overwritten while in the cache, or written without having been asked for.
    pub updates: u8,
    /// From the write before the present life to the present one, in milliseconds; 0 if there is none.
    pub away: u32,
}

/// log2(1 + x) in fixed point with 10 bits after the point, linear between powers of two: monotone, within 0.087 of the
/// logarithm, and at most 32.0.
pub fn log2_fixed(x: u32) -> u16 {
    let n = u64::from(x) + 1;
    let whole = n.ilog2();
    let fraction = ((n - (1 << whole)) << 10) >> whole;
    (whole as u16) << 10 | fraction as u16
}

/// 2^x by a polynomial of degree 5, within 2e-5 of it in proportion, for x cut to ±60: the library's function may differ
/// between platforms in the last bit, and decisions must replay everywhere.
pub(crate) fn exp2(x: f32) -> f32 {
    let x = x.clamp(-60.0, 60.0);
    let whole = x.floor();
    let f = x - whole;
    let part = 1.0
        + f * (0.693_153
            + f * (0.240_153_6 + f * (0.055_826_3 + f * (0.008_989_34 + f * 0.001_877_58))));
    part * f32::from_bits(((whole as i32 + 127) as u32) << 23)
}

/// The vector of an object with these features and this history.
pub fn vector(f: &Features, history: History, survivor: bool) -> Vector {
    [
        log2_fixed(f.reads),
        log2_fixed(f.mean_gap),
        log2_fixed(f.last_gap),
        log2_fixed(f.max_gap),
        log2_fixed(f.first_read),
        log2_fixed(f.size),
        log2_fixed(f.age),
        log2_fixed(f.idle),
        // Times of an object that was not read (twice) are coded 0, which is no short time: the indicators give the
        // classifier an offset to tell the two apart.
        if f.reads == 0 { ONE } else { 0 },
        if f.reads == 1 { ONE } else { 0 },
        log2_fixed(u32::from(history.refetches)),
        log2_fixed(u32::from(history.updates)),
        log2_fixed(history.away),
        if survivor { ONE } else { 0 },
        if history.first_life { ONE } else { 0 },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_are_where_they_are_said_to_be() {
        assert_eq!(FEATURE_NAMES[READS], "reads");
        assert_eq!(FEATURE_NAMES[SIZE], "size");
        assert_eq!(FEATURE_NAMES[REFETCHES], "refetches");
        assert_eq!(FEATURE_NAMES[SURVIVOR], "survivor");
        let f = Features { reads: 1, ..Features::default() };
        let x = vector(&f, History { refetches: 3, ..History::default() }, true);
        assert_eq!((x[READS], x[REFETCHES], x[SURVIVOR]), (ONE, 2 * ONE, ONE));
    }

    #[test]
    fn packed_vectors_come_back() {
        let mut f = Features::default();
        for i in 0..64u32 {
            for (by, field) in [
                &mut f.reads,
                &mut f.mean_gap,
                &mut f.last_gap,
                &mut f.max_gap,
                &mut f.first_read,
                &mut f.size,
                &mut f.age,
                &mut f.idle,
            ]
            .into_iter()
            .enumerate()
            {
                *field = (i / 4).pow(1 + by as u32);
            }
            let past = History {
                first_life: i % 2 == 0,
                refetches: i as u8,
                updates: 255 - i as u8,
                away: u32::MAX - i,
            };
            let x = vector(&f, past, i % 3 == 0);
            let packed = Packed::of(&x);
            assert_eq!((packed.vector(), packed.mark()), (x, false));
            let marked = packed.marked(true);
            assert_eq!((marked.vector(), marked.mark(), marked.marked(false)), (x, true, packed));
        }
    }

    #[test]
    fn the_power_is_near_and_bounded() {
        for i in -6000..=6000 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp2();
            assert!((f64::from(exp2(x)) / exact - 1.0).abs() < 2e-5, "{x}");
        }
        assert!(exp2(1e9).is_finite() && exp2(-1e9) > 0.0);
    }

    #[test]
    fn the_logarithm_is_monotone_and_near() {
        let mut last = 0;
        let mut x = 0u64;
        while x <= u64::from(u32::MAX) {
            let fixed = log2_fixed(x as u32);
            assert!(fixed >= last);
            last = fixed;
            let exact = ((x + 1) as f64).log2();
            assert!((f64::from(fixed) / 1024.0 - exact).abs() < 0.088, "{x}");
            x += 1 + x / 7;
        }
        assert_eq!(log2_fixed(0), 0);
        assert_eq!(log2_fixed(u32::MAX), 32 << 10);
    }
}
