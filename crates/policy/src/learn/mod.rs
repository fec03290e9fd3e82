//! Learning which objects are flashy: feature vectors, samples with labels, and the linear classifier.
//!
//! The decision path only collects ([`Sampler`]) and scores ([`Model`]). Training ([`train`]) is a pure function of a
//! [`TrainingSet`], its parameters and a seed: a background thread runs it, and the model comes back to the policy as an
//! input with a time, so that a recorded run replays.

mod features;
mod followed;
mod reservoir;
mod sampler;
mod svm;

pub use features::{
    DIMENSIONS, FEATURE_NAMES, FeatureSet, Features, History, Vector, log2_fixed, vector,
};
pub(crate) use features::{READS, REFETCHES, SIZE, SURVIVOR, exp2};
pub(crate) use reservoir::{RESERVED_BYTES, Reservoir};
pub(crate) use sampler::TRACKED_BYTES;
pub use sampler::{AtLeave, Closed, Sampler, SamplerLimits};
pub(crate) use svm::ratio;
pub use svm::{ClassWeights, LearnError, Model, TrainParams, train};

use larder_base::AppId;

/// A feature vector with what became of the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The features at the sampled moment.
    pub x: Vector,
    /// Whether it was read at least `n` times within the horizon after it.
    pub positive: bool,
}

/// What a model is trained from: a copy, so that training holds no lock.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingSet {
    /// Whose objects these are.
    pub app: AppId,
    /// The features in use; all others are ignored.
    pub features: FeatureSet,
    /// Weights of the classes where the parameters of training leave them to the policy.
    pub class_weights: ClassWeights,
    /// Labelled samples, oldest first.
    pub samples: Vec<Sample>,
}

impl TrainingSet {
    /// Adds another shard's samples of the same application. Shards hold disjoint objects, so none counts twice.
    ///
    /// # Panics
    /// If the sets are of different applications or features.
    pub fn merge(&mut self, other: TrainingSet) {
        assert_eq!(
            (self.app, self.features),
            (other.app, other.features),
            "training sets of different kinds"
        );
        self.samples.extend(other.samples);
    }

    /// How many samples are positive.
    pub fn positives(&self) -> usize {
        self.samples.iter().filter(|s| s.positive).count()
    }
}
