//! When classifiers are trained, with which seed, and on whose samples.
//!
//! Shards label samples and say when they have enough of new ones; the samples of all of them make one model, which all then use.
//! Shards are looked at once a second, so that training costs what it costs however many requests come.

use larder_base::{AppId, Nanos, Now};
use larder_policy::learn::TrainingSet;

/// From one look at the shards to the next.
const EVERY: Nanos = Nanos::from_secs(1);

/// What training asks of the shards, which may be locked one at a time.
pub trait Trained {
    /// A model.
    type Model: Clone;
    /// How many there are.
    fn count(&self) -> usize;
    /// The application whose samples in this shard are enough for a model.
    fn training_due(&mut self, shard: usize, now: Now) -> Option<AppId>;
    /// The samples of this shard for a model of `app`.
    fn take_training_set(&mut self, shard: usize, app: AppId, now: Now) -> Option<TrainingSet>;
    /// This shard uses the model from now on.
    fn install(&mut self, shard: usize, app: AppId, model: Self::Model, now: Now);
}

/// The schedule of one cache.
#[derive(Clone, Debug)]
pub struct Training {
    seed: u64,
    turn: u64,
    next: Nanos,
    /// The shard that is asked next, in a look that is not at its end.
    asking: Option<usize>,
    /// A model is being fitted.
    fitting: bool,
}

impl Training {
    /// A schedule whose seeds follow from `seed`.
    pub fn new(seed: u64) -> Training {
        Training { seed, turn: 0, next: Nanos::ZERO, asking: None, fitting: false }
    }

    /// Whether shards are to be looked at: then [`Training::look`] is called.
    #[inline]
    pub fn is_due(&self, now: Nanos) -> bool {
        !self.fitting && (self.asking.is_some() || now >= self.next)
    }

    /// When shards are looked at next.
    pub fn next(&self) -> Nanos {
        self.next
    }

    /// Whether a model is being fitted: [`Training::fitted`] comes first.
    pub fn is_fitting(&self) -> bool {
        self.fitting
    }

    /// Looks at the shards, from where the last look stopped on. Returns samples of which a model is to be fitted, and the seed for
    /// that. The next look is a second after this one has begun.
    pub fn look(&mut self, now: Now, shards: &mut impl Trained) -> Option<(TrainingSet, u64)> {
        debug_assert!(!self.fitting, "one model at a time");
        let from = self.asking.take().unwrap_or_else(|| {
            self.next = now.mono + EVERY;
            0
        });
        for asking in from..shards.count() {
            let Some(app) = shards.training_due(asking, now) else { continue };
            let mut all: Option<TrainingSet> = None;
            for shard in 0..shards.count() {
                let Some(part) = shards.take_training_set(shard, app, now) else { continue };
                match &mut all {
                    Some(all) => all.merge(part),
                    None => all = Some(part),
                }
            }
            let Some(samples) = all else { continue };
            let seed = self.seed ^ self.turn;
            self.turn += 1;
            (self.asking, self.fitting) = (Some(asking + 1), true);
            return Some((samples, seed));
        }
        None
    }

    /// What came of fitting: all shards use the model from now on, if there is one.
    pub fn fitted<T: Trained>(
        &mut self,
        now: Now,
        shards: &mut T,
        app: AppId,
        model: Option<T::Model>,
    ) {
        self.fitting = false;
        let Some(model) = model else { return };
        for shard in 0..shards.count() {
            shards.install(shard, app, model.clone(), now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::UnixSecs;
    use larder_policy::learn::{ClassWeights, FeatureSet, Model};

    /// Shards with samples of an application each, and a model once they have one.
    #[derive(Default)]
    struct Asking {
        due: Vec<Option<AppId>>,
        installed: Vec<Nanos>,
    }

    impl Trained for Asking {
        type Model = Model;
        fn count(&self) -> usize {
            self.due.len()
        }
        fn training_due(&mut self, shard: usize, _: Now) -> Option<AppId> {
            self.due[shard]
        }
        fn take_training_set(&mut self, _: usize, app: AppId, _: Now) -> Option<TrainingSet> {
            Some(TrainingSet {
                app,
                features: FeatureSet::Extended,
                class_weights: ClassWeights::IMPROVED,
                samples: Vec::new(),
            })
        }
        fn install(&mut self, shard: usize, _: AppId, _: Model, now: Now) {
            // Who has a model asks for no other.
            self.due[shard] = None;
            self.installed.push(now.mono);
        }
    }

    fn at(nanos: u64) -> Now {
        Now { mono: Nanos(nanos), wall: UnixSecs(0) }
    }

    #[test]
    fn shards_are_looked_at_once_a_second_and_every_fit_has_a_seed_of_its_own() {
        let mut training = Training::new(8);
        let mut shards = Asking { due: vec![Some(AppId(1)), Some(AppId(2))], installed: vec![] };
        assert!(training.is_due(Nanos::ZERO));
        for seed in [8, 9] {
            let (set, with) = training.look(at(5), &mut shards).unwrap();
            assert_eq!(with, seed);
            // While a model is being fitted nobody is asked for samples of another.
            assert!(training.is_fitting() && !training.is_due(Nanos(u64::MAX)));
            training.fitted(at(6), &mut shards, set.app, None);
            // The look goes on with the next shard.
            assert!(training.is_due(Nanos(6)));
        }
        assert!(training.look(at(7), &mut shards).is_none());
        assert!(!training.is_due(Nanos(1_000_000_004)) && training.is_due(Nanos(1_000_000_005)));
        assert!(shards.installed.is_empty());
    }
}
