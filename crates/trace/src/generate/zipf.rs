//! Zipf's law by rejection-inversion: constant memory and time per draw, whatever the number of objects.

use larder_base::Rng;

/// Ranks `0..n` with probability proportional to `1 / (rank + 1)^s`.
///
/// Hörmann and Derflinger, "Rejection-inversion to generate variates from monotone discrete distributions" (ACM TOMACS
/// 6(3), 1996), for any `s ≥ 0`.
#[derive(Clone, Debug)]
pub struct Zipf {
    n: f64,
    s: f64,
    low: f64,
    high: f64,
    shortcut: f64,
}

impl Zipf {
    /// Ranks `0..n` (at least one) with skew `s`.
    pub fn new(n: u64, s: f64) -> Zipf {
        let n = n.max(1) as f64;
        let mut z = Zipf { n, s, low: 0.0, high: 0.0, shortcut: 0.0 };
        z.low = z.integral(1.5) - 1.0;
        z.high = z.integral(n + 0.5);
        z.shortcut = 2.0 - z.inverse(z.integral(2.5) - z.density(2.0));
        z
    }

    fn density(&self, x: f64) -> f64 {
        (-self.s * x.ln()).exp()
    }

    /// ∫ x^−s, written so that s = 1 is no exception.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        exp_m1_over((1.0 - self.s) * log) * log
    }

    fn inverse(&self, y: f64) -> f64 {
        let t = (y * (1.0 - self.s)).max(-1.0);
        (ln_1p_over(t) * y).exp()
    }

    /// A rank, 0 the most popular.
    pub fn draw(&self, rng: &mut Rng) -> u64 {
        loop {
            let u = self.high + rng.unit() * (self.low - self.high);
            let x = self.inverse(u);
            let k = (x + 0.5).floor().clamp(1.0, self.n);
            if k - x <= self.shortcut || u >= self.integral(k + 0.5) - self.density(k) {
                return k as u64 - 1;
            }
        }
    }
}

/// (e^x − 1) / x
fn exp_m1_over(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.exp_m1() / x } else { 1.0 + x / 2.0 * (1.0 + x / 3.0) }
}

/// ln(1 + x) / x
fn ln_1p_over(x: f64) -> f64 {
    if x.abs() > 1e-8 { x.ln_1p() / x } else { 1.0 - x * (0.5 - x * (1.0 / 3.0)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_law() {
        for s in [0.0, 0.6, 0.9, 1.0, 1.3] {
            let n = 1000u64;
            let z = Zipf::new(n, s);
            let mut rng = Rng::new(5);
            let draws = 400_000;
            let mut counts = vec![0u32; n as usize];
            for _ in 0..draws {
                counts[z.draw(&mut rng) as usize] += 1;
            }
            let norm: f64 = (1..=n).map(|k| (k as f64).powf(-s)).sum();
            // Cumulative shares at several ranks, within four standard deviations.
            for upto in [1usize, 10, 100, 500] {
                let expected: f64 = (1..=upto).map(|k| (k as f64).powf(-s)).sum::<f64>() / norm;
                let got = f64::from(counts[..upto].iter().sum::<u32>()) / f64::from(draws);
                let sigma = (expected * (1.0 - expected) / f64::from(draws)).sqrt();
                assert!(
                    (got - expected).abs() < 4.0 * sigma + 1e-9,
                    "s={s} upto={upto}: {got} against {expected}"
                );
            }
        }
    }
}
