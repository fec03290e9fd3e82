//! A linear support vector machine, trained by stochastic subgradient steps.

use larder_base::{AppId, Rng};
use serde::{Deserialize, Serialize};

use super::features::{DIMENSIONS, ONE, Vector, exp2};
use super::{Sample, TrainingSet};

/// How the two classes weigh in training.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClassWeights {
    /// By the policy's form: balanced for the paper's, [`IMPROVED`](ClassWeights::IMPROVED) for the improved one.
    Auto,
    /// Both classes weigh the same in sum, however rare one is. The default.
    Balanced,
    /// Every sample weighs the same: the fewest errors in all.
    Equal,
    /// A positive sample weighs this many times a negative one.
    Positive(f32),
}

impl ClassWeights {
    /// What [`Auto`](ClassWeights::Auto) means to the improved form: an object is called flashy if the chance that it is read
    /// again is above 1 / 1.8, since one wrongly admitted shortens the life of all that is on flash and one wrongly rejected
    /// costs a miss, after which its refetch is remembered. It is *not* the default, which is `Balanced`: without a rate to
    /// hold this admits nothing at all on some workloads, and with one the two differ little (`docs/admission.md`, *Weights of
    /// the classes*).
    pub const IMPROVED: ClassWeights = ClassWeights::Positive(0.8);
}

/// Parameters of [`train`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainParams {
    /// Regularisation: the λ of Pegasos.
    pub lambda: f32,
    /// Passes over the samples.
    pub epochs: u32,
    /// Weights of the classes.
    pub class_weights: ClassWeights,
    /// Share of the samples kept aside to state precision and recall, 0..=0.5.
    pub holdout: f32,
}

impl Default for TrainParams {
    fn default() -> TrainParams {
        TrainParams {
            lambda: 1e-4,
            epochs: 10,
            class_weights: ClassWeights::Balanced,
            holdout: 0.2,
        }
    }
}

/// Why no model could be trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LearnError {
    /// Nothing to learn from.
    #[error("the training set is empty: wait until labelled samples have come in")]
    Empty,
}

/// A trained classifier: the signed distance from the separating plane, in units of standardised features. Standardising
/// is folded into the weights.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Whose objects it judges.
    pub app: u16,
    /// Weight of each component of a raw [`Vector`].
    pub weights: [f32; DIMENSIONS],
    /// Added to the weighted sum.
    pub bias: f32,
    /// The chance that an object is positive is 1 / (1 + exp(−(slope × score + offset))).
    pub slope: f32,
    /// See `slope`.
    pub offset: f32,
    /// Samples it was trained from.
    pub samples: u32,
    /// Share of those that were positive.
    pub positive_share: f32,
    /// Precision on samples kept aside, TP / (TP + FP); `None` if it called none positive or none were kept aside.
    pub precision: Option<f32>,
    /// Recall on samples kept aside, TP / (TP + FN); `None` if none was positive.
    pub recall: Option<f32>,
}

impl Model {
    /// The signed distance of `x`: at or above 0 is flashy, and higher is surer.
    pub fn score(&self, x: &Vector) -> f32 {
        // Four sums, so that the additions do not wait for one another. The order is fixed: floating point addition is
        // not associative, and the score must be the same on every run.
        let mut sums = [0f32; 4];
        for (i, (&w, &v)) in self.weights.iter().zip(x).enumerate() {
            sums[i % 4] += w * f32::from(v);
        }
        self.bias + ((sums[0] + sums[1]) + (sums[2] + sums[3]))
    }

    /// The chance that an object of this score is positive.
    pub fn chance(&self, score: f32) -> f32 {
        1.0 / (1.0 + exp2((self.slope * score + self.offset) * -std::f32::consts::LOG2_E))
    }

    /// Whether every number in it is finite (one read from a file might not be).
    pub fn is_finite(&self) -> bool {
        self.slope.is_finite()
            && self.offset.is_finite()
            && self.bias.is_finite()
            && self.weights.iter().all(|w| w.is_finite())
    }

    /// The application.
    pub fn app(&self) -> AppId {
        AppId(self.app)
    }
}

/// Trains a linear SVM on `set`: hinge loss with class weights, L2 regularisation, Pegasos steps (Shalev-Shwartz, Singer,
/// Srebro and Cotter, 2011) with averaging over the second half, on features standardised by the mean and variance of the
/// training part. The result depends on the arguments alone.
///
/// A set of one class yields a model that answers that class for every object.
///
/// # Errors
/// [`LearnError::Empty`] without samples.
pub fn train(set: &TrainingSet, params: &TrainParams, seed: u64) -> Result<Model, LearnError> {
    if set.samples.is_empty() {
        return Err(LearnError::Empty);
    }
    let dims = set.features.len();
    let mut rng = Rng::new(seed);
    let mut order: Vec<u32> = (0..set.samples.len() as u32).collect();
    rng.shuffle(&mut order);
    // Too few to keep any aside below 32.
    let aside = if order.len() < 32 {
        0
    } else {
        (order.len() as f32 * params.holdout.clamp(0.0, 0.5)) as usize
    };
    let (held, mut kept) = {
        let kept = order.split_off(aside);
        (order, kept)
    };
    let sample = |i: u32| &set.samples[i as usize];

    let count = kept.len() as f64;
    let mut mean = [0f64; DIMENSIONS];
    let mut inverse_deviation = [0f64; DIMENSIONS];
    for d in 0..dims {
        let m = kept.iter().map(|&i| scale(sample(i).x[d])).sum::<f64>() / count;
        let var = kept.iter().map(|&i| (scale(sample(i).x[d]) - m).powi(2)).sum::<f64>() / count;
        mean[d] = m;
        // A component that hardly varies says nothing; scaling it up would let noise in.
        inverse_deviation[d] = if var > 1e-6 { 1.0 / var.sqrt() } else { 0.0 };
    }

    let positives = kept.iter().filter(|&&i| sample(i).positive).count();
    let (w, b) = if positives == 0 || positives == kept.len() {
        ([0.0; DIMENSIONS], if positives == 0 { -1.0 } else { 1.0 })
    } else {
        let chosen = match params.class_weights {
            ClassWeights::Auto => set.class_weights,
            given => given,
        };
        let positive_weight = match chosen {
            ClassWeights::Equal => 1.0,
            ClassWeights::Positive(w) => f64::from(w).clamp(1e-3, 1e3),
            ClassWeights::Balanced | ClassWeights::Auto => {
                (kept.len() - positives) as f64 / positives as f64
            }
        };
        // Weights average to one, so that λ means the same whatever the balance.
        let share = positives as f64 / count;
        let unit = 1.0 / (share * positive_weight + (1.0 - share));
        let weights = (positive_weight * unit, unit);
        let standard: Vec<([f32; DIMENSIONS], bool)> = kept
            .iter()
            .map(|&i| {
                let Sample { x, positive } = sample(i);
                (
                    std::array::from_fn(|d| {
                        ((scale(x[d]) - mean[d]) * inverse_deviation[d]) as f32
                    }),
                    *positive,
                )
            })
            .collect();
        for (at, i) in kept.iter_mut().enumerate() {
            *i = at as u32;
        }
        pegasos(&standard, &mut kept, weights, params, &mut rng)
    };

    // Fold standardising and the fixed point into the weights, and divide by the norm: scores are distances.
    let norm = w.iter().map(|x| x * x).sum::<f64>().sqrt();
    let norm = if norm > 1e-12 { norm } else { 1.0 };
    let mut model = Model {
        app: set.app.0,
        weights: [0.0; DIMENSIONS],
        bias: 0.0,
        slope: 0.0,
        offset: 0.0,
        samples: set.samples.len() as u32,
        positive_share: set.positives() as f32 / set.samples.len() as f32,
        precision: None,
        recall: None,
    };
    let mut bias = b / norm;
    for d in 0..dims {
        let folded = w[d] * inverse_deviation[d] / norm;
        model.weights[d] = (folded / f64::from(ONE)) as f32;
        bias -= folded * mean[d];
    }
    model.bias = bias as f32;

    let (mut tp, mut fp, mut missed) = (0u32, 0u32, 0u32);
    for &i in &held {
        let s = sample(i);
        match (model.score(&s.x) >= 0.0, s.positive) {
            (true, true) => tp += 1,
            (true, false) => fp += 1,
            (false, true) => missed += 1,
            (false, false) => {}
        }
    }
    let scored: Vec<(f64, bool)> =
        set.samples.iter().map(|s| (f64::from(model.score(&s.x)), s.positive)).collect();
    let (slope, offset) = calibrate(&scored);
    (model.slope, model.offset) = (slope as f32, offset as f32);
    model.precision = ratio(tp, tp + fp);
    model.recall = ratio(tp, tp + missed);
    Ok(model)
}

/// Slope and offset of the logistic curve that turns scores into chances (Platt, 1999), by Newton's method on the
/// likelihood with a weak pull towards slope 1, so that separable sets have an answer too.
fn calibrate(scored: &[(f64, bool)]) -> (f64, f64) {
    let (mut a, mut b) = (1.0f64, 0.0f64);
    for _ in 0..12 {
        let (mut ga, mut gb) = (a - 1.0, b * 0.01);
        let (mut haa, mut hab, mut hbb) = (1.0, 0.0, 0.01);
        for &(s, positive) in scored {
            let p = 1.0 / (1.0 + (-(a * s + b)).exp());
            let (off, w) = (p - f64::from(u8::from(positive)), p * (1.0 - p));
            ga += off * s;
            gb += off;
            haa += w * s * s;
            hab += w * s;
            hbb += w;
        }
        let det = haa * hbb - hab * hab;
        if det <= 1e-12 {
            break;
        }
        // Steps are bounded: far out the curvature vanishes and Newton would leap.
        a = (a - ((hbb * ga - hab * gb) / det).clamp(-2.0, 2.0)).clamp(0.0, 50.0);
        b = (b - ((haa * gb - hab * ga) / det).clamp(-2.0, 2.0)).clamp(-50.0, 50.0);
    }
    (a, b)
}

pub(crate) fn ratio(part: u32, whole: u32) -> Option<f32> {
    (whole > 0).then(|| part as f32 / whole as f32)
}

fn scale(x: u16) -> f64 {
    f64::from(x) / f64::from(ONE)
}

/// Weights and bias (unregularised) after `params.epochs` passes.
fn pegasos(
    samples: &[([f32; DIMENSIONS], bool)],
    order: &mut [u32],
    (positive_weight, negative_weight): (f64, f64),
    params: &TrainParams,
    rng: &mut Rng,
) -> ([f64; DIMENSIONS], f64) {
    let lambda = f64::from(params.lambda).clamp(1e-9, 1.0);
    let epochs = u64::from(params.epochs.clamp(1, 1000));
    let steps = epochs * samples.len() as u64;
    // Pegasos' step is 1 / (λ t): enormous at first. Starting the clock at 1/λ (Bottou's t0) keeps steps at most 1.
    let offset = 1.0 / lambda;
    let (mut w, mut b) = ([0f64; DIMENSIONS], 0f64);
    let (mut w_sum, mut b_sum, mut summed) = ([0f64; DIMENSIONS], 0f64, 0u64);
    let mut t = 0u64;
    for _ in 0..epochs {
        rng.shuffle(order);
        for &i in order.iter() {
            let (x, positive) = &samples[i as usize];
            let (y, class_weight) =
                if *positive { (1.0, positive_weight) } else { (-1.0, negative_weight) };
            t += 1;
            let step = 1.0 / (lambda * (t as f64 + offset));
            let margin = y * (w.iter().zip(x).map(|(w, &x)| w * f64::from(x)).sum::<f64>() + b);
            let shrink = 1.0 - step * lambda;
            for w in &mut w {
                *w *= shrink;
            }
            if margin < 1.0 {
                let push = step * y * class_weight;
                for (w, &x) in w.iter_mut().zip(x) {
                    *w += push * f64::from(x);
                }
                b += push;
            }
            if t * 2 > steps {
                for (sum, w) in w_sum.iter_mut().zip(&w) {
                    *sum += w;
                }
                b_sum += b;
                summed += 1;
            }
        }
    }
    let n = summed.max(1) as f64;
    (w_sum.map(|w| w / n), b_sum / n)
}

#[cfg(test)]
mod tests {
    use super::super::FeatureSet;
    use super::*;

    /// Samples whose class follows from a plane through the first three components, flipped with probability `noise`;
    /// `gap` keeps them away from the plane.
    fn planar(count: usize, noise: f64, gap: f64, seed: u64) -> TrainingSet {
        let mut rng = Rng::new(seed);
        let mut samples = Vec::new();
        while samples.len() < count {
            let mut x: Vector = [0; DIMENSIONS];
            for v in &mut x {
                *v = rng.below(20 << 10) as u16;
            }
            let side = scale(x[0]) * 1.0 + scale(x[1]) * 0.5 - scale(x[2]) * 0.8 - 8.0;
            if side.abs() >= gap {
                samples.push(Sample { x, positive: (side > 0.0) != rng.chance(noise) });
            }
        }
        TrainingSet {
            app: AppId(3),
            features: FeatureSet::Extended,
            class_weights: ClassWeights::Balanced,
            samples,
        }
    }

    fn precision_recall(model: &Model, set: &TrainingSet) -> (f64, f64) {
        let called: Vec<_> = set.samples.iter().filter(|s| model.score(&s.x) >= 0.0).collect();
        let tp = called.iter().filter(|s| s.positive).count() as f64;
        (tp / called.len() as f64, tp / set.positives() as f64)
    }

    #[test]
    fn separates_what_is_separable() {
        let model = train(&planar(2000, 0.0, 1.0, 1), &TrainParams::default(), 7).unwrap();
        let test = planar(2000, 0.0, 1.0, 2);
        let wrong =
            test.samples.iter().filter(|s| (model.score(&s.x) >= 0.0) != s.positive).count();
        assert!(wrong <= 4, "{wrong} of 2000 wrong");
        assert_eq!(model.app(), AppId(3));
    }

    #[test]
    fn keeps_its_precision_under_noise() {
        let model = train(&planar(4000, 0.05, 0.0, 3), &TrainParams::default(), 7).unwrap();
        let (precision, recall) = precision_recall(&model, &planar(4000, 0.05, 0.0, 4));
        assert!(precision >= 0.9 && recall >= 0.85, "precision {precision}, recall {recall}");
        let stated = model.precision.unwrap();
        assert!((f64::from(stated) - precision).abs() < 0.05, "stated {stated}, true {precision}");
    }

    #[test]
    fn class_weights_move_the_plane() {
        let set = planar(4000, 0.15, 0.0, 5);
        let called = |w: f32| {
            let params =
                TrainParams { class_weights: ClassWeights::Positive(w), ..TrainParams::default() };
            let model = train(&set, &params, 7).unwrap();
            set.samples.iter().filter(|s| model.score(&s.x) >= 0.0).count()
        };
        assert!(called(8.0) > called(1.0) && called(1.0) > called(0.125));
    }

    #[test]
    fn the_papers_features_ignore_the_rest() {
        let mut set = planar(500, 0.0, 1.0, 6);
        set.features = FeatureSet::Paper;
        let model = train(&set, &TrainParams::default(), 7).unwrap();
        assert!(model.weights[5..].iter().all(|&w| w == 0.0));
        assert!(model.weights[..3].iter().all(|&w| w != 0.0));
    }

    #[test]
    fn chances_are_those_of_the_samples() {
        // Of scores below 0 a tenth is positive, of those above seven tenths.
        let mut rng = Rng::new(11);
        let scored: Vec<(f64, bool)> = (0..20_000)
            .map(|i| {
                let s = if i % 2 == 0 { -1.0 } else { 1.0 };
                (s, rng.chance(if s < 0.0 { 0.1 } else { 0.7 }))
            })
            .collect();
        let (a, b) = calibrate(&scored);
        let chance = |s: f64| 1.0 / (1.0 + (-(a * s + b)).exp());
        assert!((chance(-1.0) - 0.1).abs() < 0.015 && (chance(1.0) - 0.7).abs() < 0.015);
        let one_class: Vec<(f64, bool)> = (0..100).map(|i| (f64::from(i) / 50.0, true)).collect();
        let (a, b) = calibrate(&one_class);
        assert!(a.is_finite() && b.is_finite() && a >= 0.0);
    }

    #[test]
    fn same_seed_same_model() {
        let set = planar(300, 0.1, 0.0, 8);
        let params = TrainParams::default();
        assert_eq!(train(&set, &params, 1), train(&set, &params, 1));
        assert_ne!(train(&set, &params, 1), train(&set, &params, 2));
    }

    #[test]
    fn one_class_or_none() {
        let mut set = planar(100, 0.0, 0.0, 9);
        set.samples.retain(|s| s.positive);
        let model = train(&set, &TrainParams::default(), 1).unwrap();
        assert!(model.score(&[0; DIMENSIONS]) > 0.0);
        set.samples.clear();
        assert_eq!(train(&set, &TrainParams::default(), 1), Err(LearnError::Empty));
    }

    #[test]
    fn constant_features_are_harmless() {
        let set = TrainingSet {
            app: AppId(0),
            features: FeatureSet::Extended,
            class_weights: ClassWeights::Balanced,
            samples: (0..100u16)
                .map(|i| {
                    let mut x = [5 << 10; DIMENSIONS];
                    x[0] = i * 100;
                    Sample { x, positive: i >= 50 }
                })
                .collect(),
        };
        let model = train(&set, &TrainParams::default(), 1).unwrap();
        assert!(model.is_finite());
        let wrong = set.samples.iter().filter(|s| (model.score(&s.x) >= 0.0) != s.positive).count();
        assert!(wrong <= 4, "{wrong}");
    }
}
