//! Closed forms of write amplification under uniform random page writes, α = physical / logical pages.

/// A random victim: α / (α − 1).
pub fn random(alpha: f64) -> f64 {
    alpha / (alpha - 1.0)
}

/// FIFO cleaning: α / (α + W₀(−α e^−α)) (Desnoyers, SYSTOR '12; Xiang and Kurkoski, ISIT '12), W₀ being Lambert's function.
pub fn fifo(alpha: f64) -> f64 {
    // A page survives one turn of the log with probability x, where x = exp(−α (1 − x)): the smaller root, by iteration.
    let mut survives = 0.0;
    for _ in 0..100_000 {
        let next = (-alpha * (1.0f64 - survives)).exp();
        if next - survives < 1e-15 {
            break;
        }
        survives = next;
    }
    1.0 / (1.0 - survives)
}

/// Greedy cleaning of blocks of `b` pages, by mean field: find m and θ in [0, 1] with
/// Σ_{k=m+1..b} 1/k + θ/m = (α / b)(b − m + θ); write amplification is b / (b − m + θ).
///
/// In the stationary state blocks with k valid pages lose one at a rate proportional to k; none falls below m − 1, where
/// the cleaner takes it.
pub fn greedy(alpha: f64, b: u32) -> f64 {
    let pages = f64::from(b);
    let mut sum = 0.0;
    for m in (1..=b).rev() {
        // The condition is linear in θ.
        let lost = f64::from(b - m);
        let slope = 1.0 / f64::from(m) - alpha / pages;
        let theta = (alpha / pages * lost - sum) / slope;
        if (0.0..=1.0).contains(&theta) && lost + theta > 0.0 {
            return pages / (lost + theta);
        }
        sum += 1.0 / f64::from(m);
    }
    1.0
}

/// Hot and cold pages in one FIFO log: the fixed point A = Σ rᵢ / (1 − exp(−α rᵢ / (A fᵢ))), where class i takes the
/// share rᵢ of the writes on the share fᵢ of the pages.
pub fn fifo_classes(alpha: f64, classes: &[(f64, f64)]) -> f64 {
    let mut amplification = fifo(alpha);
    for _ in 0..100_000 {
        let next: f64 = classes
            .iter()
            .map(|&(writes, pages)| {
                writes / (1.0 - (-alpha * writes / (amplification * pages)).exp())
            })
            .sum();
        if (next - amplification).abs() < 1e-13 {
            break;
        }
        amplification = next;
    }
    amplification
}
