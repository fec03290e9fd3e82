//! Means of what became of the like of something, at several depths.
//!
//! The first depth is a single mean of all; each further depth tells more kinds apart. The mean of each depth is drawn towards that of
//! the coarser one, as though ten observations of that mean had been seen beside its own (empirical Bayes, with a fixed weight): a kind
//! that was seldom seen says what the next coarser one says.

/// Observations that stand for the coarser mean beside the seen.
const PRIOR: f32 = 10.0;
/// From so many seen on both sums are halved: means forget.
const HALVED_AT: f32 = 500.0;

/// Sums of one kind.
#[derive(Clone, Copy, Debug)]
struct Cell<const VALUES: usize> {
    sums: [f32; VALUES],
    seen: f32,
}

impl<const VALUES: usize> Cell<VALUES> {
    const NONE: Cell<VALUES> = Cell { sums: [0.0; VALUES], seen: 0.0 };

    fn add(&mut self, values: [f32; VALUES]) {
        if self.seen >= HALVED_AT {
            self.sums = self.sums.map(|sum| sum / 2.0);
            self.seen /= 2.0;
        }
        for (sum, value) in self.sums.iter_mut().zip(values) {
            *sum += value;
        }
        self.seen += 1.0;
    }

    /// Its means, drawn to those of the coarser.
    fn means(&self, coarser: [f32; VALUES]) -> [f32; VALUES] {
        std::array::from_fn(|i| (self.sums[i] + PRIOR * coarser[i]) / (self.seen + PRIOR))
    }
}

/// Means of `VALUES` values at `DEPTHS` depths below the mean of all. See the [module](self).
#[derive(Debug)]
pub(crate) struct Means<const DEPTHS: usize, const VALUES: usize> {
    all: Cell<VALUES>,
    /// A depth without kinds is left out.
    depths: [Box<[Cell<VALUES>]>; DEPTHS],
}

impl<const DEPTHS: usize, const VALUES: usize> Means<DEPTHS, VALUES> {
    /// Bytes of one kind.
    pub(crate) const CELL: usize = size_of::<Cell<VALUES>>();

    /// So many kinds at each depth, the coarsest first. A depth of none is left out.
    pub(crate) fn new(kinds: [usize; DEPTHS]) -> Self {
        Means { all: Cell::NONE, depths: kinds.map(|n| vec![Cell::NONE; n].into_boxed_slice()) }
    }

    /// Something of this kind, at each depth, came to these values.
    pub(crate) fn learn(&mut self, kind: [usize; DEPTHS], values: [f32; VALUES]) {
        self.all.add(values);
        for (cells, kind) in self.depths.iter_mut().zip(kind) {
            if let Some(cell) = cells.get_mut(kind) {
                cell.add(values);
            }
        }
    }

    /// What is to be expected of something of this kind; before anything was seen, what is `supposed`.
    pub(crate) fn expected(&self, kind: [usize; DEPTHS], supposed: [f32; VALUES]) -> [f32; VALUES] {
        let mut means = self.all.means(supposed);
        for (cells, kind) in self.depths.iter().zip(kind) {
            means = cells.get(kind).map_or(means, |cell| cell.means(means));
        }
        means
    }

    /// Bytes that so many kinds take.
    pub(crate) fn bytes_for(kinds: [usize; DEPTHS]) -> u128 {
        (kinds.iter().sum::<usize>() + 1) as u128 * Self::CELL as u128
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        (self.depths.iter().map(|cells| cells.len()).sum::<usize>() + 1) * Self::CELL
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn a_mean_is_drawn_to_the_coarser_by_ten() {
        let mut means = Means::<3, 2>::new([2, 4, 0]);
        for _ in 0..20 {
            means.learn([1, 3, 9], [3.0, 6.0]);
        }
        // All: 60 / 30 = 2; then (60 + 10 × coarser) / 30 at the two depths that there are.
        let drawn = |coarser: f32| (60.0 + 10.0 * coarser) / 30.0;
        let expected = drawn(drawn(2.0));
        let found = means.expected([1, 3, 9], [0.0; 2]);
        assert!((found[0] - expected).abs() < 1e-4 && (found[1] - 2.0 * expected).abs() < 1e-4);
        // Of others only what all have in common is known.
        assert!((means.expected([0, 0, 0], [0.0; 2])[0] - 2.0).abs() < 1e-4);
        // One that shares the coarse kind has its mean.
        assert!((means.expected([1, 2, 0], [0.0; 2])[0] - (drawn(2.0) * 10.0) / 10.0).abs() < 1e-4);
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut means = Means::<1, 1>::new([1]);
        for _ in 0..10_000 {
            means.learn([0], [4.0]);
        }
        for _ in 0..1500 {
            means.learn([0], [0.0]);
        }
        assert!(means.expected([0], [0.0])[0] < 0.3);
    }

    /// Two kinds whose values are geometric, with means p / (1 - p) of 1/3 and 3: what is learnt is that, as far as the 250 to 500 that a
    /// mean remembers and the ten of the coarser mean allow.
    #[test]
    fn a_known_distribution_is_learnt() {
        let mut means = Means::<2, 1>::new([1, 2]);
        let mut rng = Rng::new(5);
        let chance = [0.25, 0.75];
        for i in 0..20_000 {
            let kind = i % 2;
            let mut value = 0.0;
            while rng.chance(chance[kind]) {
                value += 1.0;
            }
            means.learn([0, kind], [value]);
        }
        for (kind, p) in chance.into_iter().enumerate() {
            let (mean, spread) = (p / (1.0 - p), p.sqrt() / (1.0 - p));
            let overall = (1.0 / 3.0 + 3.0) / 2.0;
            // Four standard errors of 250 observations, beside what ten of the coarser mean shift.
            let allowed = 4.0 * spread / 250.0_f64.sqrt() + 10.0 / 260.0 * (mean - overall).abs();
            let found = f64::from(means.expected([0, kind], [0.0])[0]);
            assert!((found - mean).abs() < allowed, "{kind}: {found}, not {mean} ± {allowed}");
        }
    }
}
