//! What a write costs: the reads that it takes from what leaves flash the sooner for it.
//!
//! Flash of capacity C is a queue that is written at rate R, so that everything lives T = C / R there. If what is written
//! has r(t) reads per byte and second at age t, flash answers H = R ∫₀ᵀ r dt reads a second. A little more written, dR, of
//! objects of which E reads per byte are expected within T changes that by dR × (E − T × r(T)): every byte written takes a
//! byte's room from the far end of the queue. So a write gains only if E is above T × r(T), the reads that the last there
//! would have in another turn at the rate of their last days. Where popularity stands still they are worth as much as
//! anything that comes, and the best is to write little; where objects are soon forgotten they are worth nothing.
//!
//! T × r(T) is measured on the admitted among the samples: twice the share that is read in the second half of the horizon,
//! which is T. Reads there count once, since the second would be a hit again soon after the first missed.

use larder_base::Nanos;

use crate::learn::exp2;

/// Admitted samples over which the mean is taken (exponentially).
const MEMORY: f32 = 512.0;
/// Before this many nothing is said.
const LEAST: f32 = 32.0;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Price {
    /// Times the cost that a write has to be worth.
    times: f32,
    /// The value of a read is size^(1 − exponent), the cost of a write its size.
    exponent: f32,
    /// Value of the late reads, and cost of the writes, of late.
    late: f32,
    spent: f32,
    samples: f32,
    /// When the latest came.
    at: Nanos,
}

impl Price {
    /// A price of `times` the cost; `None` if that is 0.
    pub(super) fn new(times: f32, exponent: f32) -> Option<Price> {
        let price = Price { times, exponent, late: 0.0, spent: 0.0, samples: 0.0, at: Nanos::ZERO };
        (times > 0.0).then_some(price)
    }

    /// The label of a sample that was admitted has closed: it was read late, or not.
    pub(super) fn learn(&mut self, log2_size: f32, late: bool, now: Nanos) {
        let keep = 1.0 - 1.0 / MEMORY;
        let value = if late { 2.0 * exp2((1.0 - self.exponent) * log2_size) } else { 0.0 };
        self.late = self.late * keep + value;
        self.spent = self.spent * keep + exp2(log2_size);
        self.samples = self.samples * keep + 1.0;
        self.at = now;
    }

    /// Whether an object of this size and chance to be read is worth a write.
    ///
    /// Of objects whose rates of reading are spread exponentially, those with the chance c have c / (1 − c) reads in the mean.
    pub(super) fn is_met(&self, chance: f32, log2_size: f32, now: Nanos, horizon: Nanos) -> bool {
        if self.samples < LEAST {
            return true;
        }
        let reads = chance / (1.0 - chance).max(1e-3);
        // Halved with each horizon in which none closed: a price that keeps everything out must not stand for ever.
        let quiet = (now - self.at).as_secs_f64() / horizon.as_secs_f64().max(1e-9);
        let floor = self.times * self.late / self.spent * exp2(-quiet as f32);
        reads * exp2(-self.exponent * log2_size) >= floor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Nanos = Nanos::from_secs(3600);

    fn learned(times: f32, exponent: f32, samples: &[(f32, bool)]) -> Price {
        let mut p = Price::new(times, exponent).unwrap();
        for _ in 0..200 {
            for &(log2_size, late) in samples {
                p.learn(log2_size, late, HOUR);
            }
        }
        p
    }

    #[test]
    fn no_price_without_a_factor_nor_before_there_are_samples() {
        assert!(Price::new(0.0, 0.5).is_none());
        let mut p = Price::new(1.0, 0.0).unwrap();
        for i in 0..40 {
            // Older ones count for a little less.
            assert!(p.is_met(0.01, 8.0, HOUR, HOUR) == (i < 34), "{i}");
            p.learn(8.0, true, HOUR);
        }
    }

    #[test]
    fn a_write_must_be_worth_what_the_last_are_still_read() {
        // A quarter is read late: half a read per object in another turn, that is a chance of a third.
        let quarter = [(8.0, true), (8.0, false), (8.0, false), (8.0, false)];
        let p = learned(1.0, 0.0, &quarter);
        assert!(p.is_met(0.35, 8.0, HOUR, HOUR) && !p.is_met(0.32, 8.0, HOUR, HOUR));
        let half = learned(0.5, 0.0, &quarter);
        assert!(half.is_met(0.22, 8.0, HOUR, HOUR) && !half.is_met(0.18, 8.0, HOUR, HOUR));
        let forgotten = learned(1.0, 0.0, &[(8.0, false)]);
        assert!(forgotten.is_met(0.0, 8.0, HOUR, HOUR), "nothing is lost by any write");
    }

    #[test]
    fn sizes_count_as_the_objective_has_them() {
        // Small ones are read late, large ones are not.
        let mixed = [(6.0, true), (10.0, false)];
        let (number, bytes) = (learned(1.0, 1.0, &mixed), learned(1.0, 0.0, &mixed));
        let chance = 0.2;
        // By number 2 reads for 64 + 1024 bytes: 0.25 reads are dear at 1024 bytes and cheap at 64.
        assert!(number.is_met(chance, 6.0, HOUR, HOUR) && !number.is_met(chance, 10.0, HOUR, HOUR));
        // By bytes the late reads are 2 × 64 of 1088: 0.12, whatever the size of who asks.
        assert!(bytes.is_met(chance, 6.0, HOUR, HOUR) && bytes.is_met(chance, 10.0, HOUR, HOUR));
        assert!(!bytes.is_met(0.1, 6.0, HOUR, HOUR));
    }

    #[test]
    fn a_price_that_keeps_everything_out_fades() {
        let p = learned(1.0, 0.0, &[(8.0, true)]);
        assert!(!p.is_met(0.5, 8.0, HOUR, HOUR));
        assert!(!p.is_met(0.5, 8.0, Nanos(HOUR.0 * 3 / 2), HOUR));
        assert!(p.is_met(0.5, 8.0, Nanos(HOUR.0 * 5 / 2), HOUR), "two reads fade to one");
    }
}
