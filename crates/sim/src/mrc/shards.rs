//! Spatial sampling (SHARDS: Waldspurger, Park, Garthwaite and Ahmad, FAST '15): a fixed share of the *objects*, chosen
//! by hash, with all their requests, in caches scaled down by the same share.

/// Sub-samples that the error is estimated from.
pub(super) const PARTS: u8 = 8;

/// Chooses objects by a seeded hash of their ids.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    rate: f64,
    seed: u64,
}

impl Sampler {
    /// Keeps `rate` of the objects; `None` unless 0 < rate ≤ 1.
    pub fn new(rate: f64, seed: u64) -> Option<Sampler> {
        (rate > 0.0 && rate <= 1.0).then_some(Sampler { rate, seed })
    }

    /// The share of objects kept.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// Whether the object is kept, and if so in which of the equal sub-samples it falls.
    #[inline]
    pub(super) fn part(&self, id: u64) -> Option<u8> {
        let hash = larder_trace::mix(id ^ self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let kept = ((hash >> 11) as f64) < self.rate * (1u64 << 53) as f64;
        // The low bits are not used above: sub-samples do not depend on the choice.
        kept.then_some((hash & 7) as u8)
    }

    /// A cache of `size` scaled to a share of the objects, at least 1.
    pub(super) fn scale(&self, size: u64, parts: u8) -> u64 {
        ((size as f64 * self.rate / f64::from(parts)).round() as u64).max(1)
    }
}

/// Standard error of the mean of `values`: an estimate of the error of what the whole sample says.
pub(super) fn standard_error(values: &[f64]) -> f64 {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (variance / n).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_share_it_says() {
        let sampler = Sampler::new(0.1, 5).unwrap();
        let mut parts = [0u32; PARTS as usize];
        for id in 0..100_000 {
            if let Some(part) = sampler.part(id) {
                parts[usize::from(part)] += 1;
            }
        }
        assert!((9_700..10_300).contains(&parts.iter().sum::<u32>()), "{parts:?}");
        assert!(parts.iter().all(|&p| (1_100..1_400).contains(&p)), "{parts:?}");
        assert!(Sampler::new(0.0, 1).is_none() && Sampler::new(1.5, 1).is_none());
        assert!((0..1000).all(|id| Sampler::new(1.0, 1).unwrap().part(id).is_some()));
    }

    #[test]
    fn error_of_the_mean() {
        assert!((standard_error(&[1.0, 2.0, 3.0, 4.0]) - 0.645_497).abs() < 1e-6);
    }
}
