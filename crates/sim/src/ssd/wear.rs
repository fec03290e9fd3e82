//! Wear: how often blocks were erased.

use serde::Serialize;

/// Erase counts over all super-blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Wear {
    /// Erases in all.
    pub erases: u64,
    /// Of the least worn super-block.
    pub least: u32,
    /// Of the most worn.
    pub most: u32,
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub deviation: f64,
}

impl Wear {
    pub(super) fn of(counts: &[u32]) -> Wear {
        if counts.is_empty() {
            return Wear::default();
        }
        let n = counts.len() as f64;
        let erases: u64 = counts.iter().map(|&c| u64::from(c)).sum();
        let mean = erases as f64 / n;
        let variance = counts.iter().map(|&c| (f64::from(c) - mean).powi(2)).sum::<f64>() / n;
        Wear {
            erases,
            least: counts.iter().copied().min().unwrap_or(0),
            most: counts.iter().copied().max().unwrap_or(0),
            mean,
            deviation: variance.sqrt(),
        }
    }

    /// The share of a drive's rated program/erase cycles that the most worn super-block has used.
    pub fn used(&self, rated_cycles: u32) -> f64 {
        f64::from(self.most) / f64::from(rated_cycles.max(1))
    }
}
