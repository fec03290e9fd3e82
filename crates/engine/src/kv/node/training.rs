//! When classifiers are trained, with which seed, and on whose samples.
//!
//! Shards label samples and say when they have enough of new ones; the samples of all of them make one model, which all then use.
//! Shards are looked at once a second, so that training costs what it costs however many requests come.

use larder_base::{AppId, Nanos, Now};
use larder_policy::learn::{Model, TrainingSet};

/// From one look at the shards to the next.
const EVERY: Nanos = Nanos::from_secs(1);

/// What training asks of the shards, which may be locked one at a time.
pub trait Trained {
    /// How many there are.
    fn count(&self) -> usize;
    /// The application whose samples in this shard are enough for a model.
    fn training_due(&mut self, shard: usize, now: Now) -> Option<AppId>;
    /// The samples of this shard for a model of `app`.
    fn take_training_set(&mut self, shard: usize, app: AppId, now: Now) -> Option<TrainingSet>;
    /// This shard uses the model from now on.
    fn install(&mut self, shard: usize, app: AppId, model: Model, now: Now);
}

/// The schedule of one cache.
#[derive(Clone, Debug)]
pub struct Training {
    seed: u64,
    turn: u64,
    next: Nanos,
}

impl Training {
    /// A schedule whose seeds follow from `seed`.
    pub fn new(seed: u64) -> Training {
        Training { seed, turn: 0, next: Nanos::ZERO }
    }

    /// Whether shards are to be looked at: then [`Training::run`] is called.
    #[inline]
    pub fn is_due(&self, now: Nanos) -> bool {
        now >= self.next
    }

    /// Looks at every shard, has `fit` make a model where one asks for it (of these samples, with this seed), and installs it in
    /// all of them. The next look is a second after this one has begun. `now` is asked again for each step, since fitting may take
    /// long. Returns how many models there are more.
    pub fn run(
        &mut self,
        mut now: impl FnMut() -> Now,
        shards: &mut impl Trained,
        mut fit: impl FnMut(&TrainingSet, u64) -> Option<Model>,
    ) -> u64 {
        self.next = now().mono + EVERY;
        let mut models = 0;
        for asking in 0..shards.count() {
            let Some(app) = shards.training_due(asking, now()) else { continue };
            let mut all: Option<TrainingSet> = None;
            for shard in 0..shards.count() {
                let Some(part) = shards.take_training_set(shard, app, now()) else { continue };
                match &mut all {
                    Some(all) => all.merge(part),
                    None => all = Some(part),
                }
            }
            let Some(samples) = all else { continue };
            let seed = self.seed ^ self.turn;
            self.turn += 1;
            let Some(model) = fit(&samples, seed) else { continue };
            models += 1;
            for shard in 0..shards.count() {
                shards.install(shard, samples.app, model.clone(), now());
            }
        }
        models
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::UnixSecs;
    use larder_policy::learn::{ClassWeights, FeatureSet};

    /// Shards with samples of an application each, and a model once they have one.
    #[derive(Default)]
    struct Asking {
        due: Vec<Option<AppId>>,
        installed: Vec<Nanos>,
    }

    impl Trained for Asking {
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
        let mut seeds = Vec::new();
        let fails = |_: &TrainingSet, seed| {
            seeds.push(seed);
            None
        };
        assert_eq!(training.run(|| at(5), &mut shards, fails), 0);
        assert_eq!(seeds, [8, 9]);
        assert!(!training.is_due(Nanos(1_000_000_004)) && training.is_due(Nanos(1_000_000_005)));
        assert!(shards.installed.is_empty());
    }
}
