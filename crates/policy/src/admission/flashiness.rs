//! `flashiness`: a classifier per application says whether an object will be read in time to come.

use larder_base::{AppId, Nanos, ObjectHash, Rng};

use super::cut::{Cut, Offered};
use super::memory::KeyMemory;
use super::policy::ModelReport;
use super::price::Price;
use super::{
    Access, AdmissionError, AdmissionPolicy, Candidate, Departure, Features, FlashinessConfig,
    HistoryKind, Pool, Reason, SampleAt, Setup, Verdict,
};
use crate::learn::{
    AtLeave, ClassWeights, Closed, FeatureSet, History, Model, READS, REFETCHES, RESERVED_BYTES,
    Reservoir, SIZE, SURVIVOR, Sample, Sampler, SamplerLimits, TRACKED_BYTES, TrainingSet, Vector,
    exp2, log2_fixed, ratio, vector,
};

/// Flashield's admission (§3.1, §4.2), in the paper's form or the improved one; see [`FlashinessConfig`] for where they
/// differ.
///
/// Until an application's first model is installed, a simple rule stands in: admit what was read at least once since it was
/// written (improved: or was fetched again after a miss), the most read first. In the improved form the rule goes on
/// admitting beside the model until the flash has been filled once.
#[derive(Debug)]
pub struct Flashiness {
    config: FlashinessConfig,
    features: FeatureSet,
    sample_at: SampleAt,
    pool: Pool,
    /// Nothing that was never read is admitted.
    paper_zero: bool,
    class_weights: ClassWeights,
    /// The simple rule admits beside the model until objects have been seen to leave the cache.
    rule_until_turnover: bool,
    share: f64,
    /// The power of its size that an object's chance is divided by.
    exponent: f32,
    /// Holds a rate of writes, if there is one.
    cut: Option<Cut<Seen>>,
    /// What a write must be worth beside, if that is asked.
    price: Option<Price>,
    /// As given.
    memory: usize,
    history: Option<KeyMemory>,
    sampler: Sampler,
    reservoir: Reservoir,
    /// Indexed by application; those past its end share the last.
    apps: Box<[AppState]>,
    /// First and latest moment seen.
    started: Option<Nanos>,
    latest: Nanos,
    /// As told, smoothed.
    lifetime: Option<Nanos>,
}

/// What a candidate is scored by.
#[derive(Clone, Copy, Debug)]
struct Seen {
    x: Vector,
    app: AppId,
    survivor: bool,
}

#[derive(Clone, Debug, Default)]
struct AppState {
    model: Option<Box<Model>>,
    version: u32,
    installed: Nanos,
    /// When training was last due.
    asked: Option<Nanos>,
    /// Labels since then.
    fresh: u32,
    scored: Confusion,
}

/// Decisions of a model against what happened.
#[derive(Clone, Copy, Debug, Default)]
struct Confusion {
    true_positive: u32,
    false_positive: u32,
    false_negative: u32,
    true_negative: u32,
}

impl Confusion {
    fn halve(&mut self) {
        self.true_positive /= 2;
        self.false_positive /= 2;
        self.false_negative /= 2;
        self.true_negative /= 2;
    }
}

/// Keys remembered for each object that flash can hold: one for it, and one for a key that was turned away.
const KEYS_PER_OBJECT: u64 = 2;
const LEAST_MEMORY: usize = 64 << 10;
const MOST_TRACKED: usize = 8192;
const MOST_SAMPLES: usize = 8192;
/// Trusted from the first model on: fewer samples than this never train one.
const LEAST_SAMPLES: u32 = 16;
const HOUR: Nanos = Nanos::from_secs(3600);

impl Flashiness {
    /// With the parameters of `config`; `paper`: what it leaves open is chosen as in the paper.
    ///
    /// # Errors
    /// [`AdmissionError::Memory`] below 64 KiB.
    pub fn new(
        config: &FlashinessConfig,
        paper: bool,
        setup: &Setup,
    ) -> Result<Flashiness, AdmissionError> {
        if setup.memory < LEAST_MEMORY {
            let policy = if paper { "flashiness_paper" } else { "flashiness" };
            return Err(AdmissionError::Memory { policy, need: LEAST_MEMORY, given: setup.memory });
        }
        let config = config.resolved(paper);
        let mut rng = Rng::new(setup.seed);
        // An eighth for the table of applications, half for the history, the rest for samples; what is more than the most samples
        // take is the history's too.
        let apps = (setup.memory / 8 / (size_of::<AppState>() + size_of::<Model>()))
            .clamp(1, AppId::COUNT);
        let beside = setup.memory / 8 + Cut::<Seen>::bytes_of(setup.memory) + AppId::COUNT * 16;
        let most_samples = 2 * (MOST_TRACKED * TRACKED_BYTES).max(MOST_SAMPLES * RESERVED_BYTES);
        let history = (config.history == Some(HistoryKind::Sketch)).then(|| {
            let keys = setup.objects.saturating_mul(KEYS_PER_OBJECT).max(64);
            let most = setup.memory.saturating_sub(beside + most_samples);
            KeyMemory::new(keys, most.max(setup.memory / 2))
        });
        let taken = beside + history.as_ref().map_or(0, KeyMemory::memory_bytes);
        let rest = setup.memory.saturating_sub(taken);
        let tracked = (rest / 2 / TRACKED_BYTES).clamp(1, MOST_TRACKED);
        let samples = (rest / 2 / RESERVED_BYTES).clamp(1, MOST_SAMPLES);
        Ok(Flashiness {
            features: config.features.unwrap_or(FeatureSet::Extended),
            sample_at: config.sample_at.unwrap_or(SampleAt::Decisions),
            pool: config.pool.unwrap_or(Pool::Everything),
            paper_zero: history.is_none(),
            class_weights: if paper { ClassWeights::Balanced } else { ClassWeights::IMPROVED },
            rule_until_turnover: !paper && config.horizon == 0,
            share: setup.share,
            memory: setup.memory,
            cut: match config.bytes_per_second.0 {
                0 => setup.budget_rate.filter(|r| r.is_finite() && *r > 0.0),
                fixed => Some(fixed as f64),
            }
            .map(|whole| Cut::new(whole * setup.share, setup.memory)),
            exponent: config.exponent(),
            price: Price::new(config.price, config.exponent()),
            history,
            sampler: Sampler::new(
                SamplerLimits { tracked },
                config.at_leave.unwrap_or(AtLeave::CountMisses),
                rng.next_u64(),
            ),
            reservoir: Reservoir::new(samples, AppId::COUNT),
            apps: vec![AppState::default(); apps].into_boxed_slice(),
            started: None,
            latest: Nanos::ZERO,
            lifetime: None,
            config,
        })
    }

    /// Where an application's classifier is kept.
    fn slot(&self, app: AppId) -> usize {
        app.index().min(self.apps.len() - 1)
    }

    /// The application whose classifier serves `app`.
    fn served(&self, app: AppId) -> AppId {
        AppId(self.slot(app) as u16)
    }

    /// The horizon of labels now.
    pub fn horizon(&self, now: Nanos) -> Nanos {
        if self.config.horizon != 0 {
            return Nanos::from_secs(u64::from(self.config.horizon));
        }
        let least = Nanos::from_secs(1);
        match self.lifetime {
            Some(l) => l.clamp(least, Nanos::from_secs(7 * 86_400)),
            // Nothing has left yet, so objects live at least as long as the cache has been up.
            None => (now - self.started.unwrap_or(now)).clamp(least, HOUR),
        }
    }

    fn past(&self, hash: ObjectHash) -> History {
        self.history.as_ref().map_or(History::default(), |h| h.recall(hash.fingerprint()))
    }

    /// Takes in what has closed. Runs before each event of a followed object, so that its label ends at the horizon.
    fn close(&mut self, now: Nanos) {
        if self.started.is_none() {
            self.started = Some(now);
        }
        self.latest = self.latest.max(now);
        let horizon = self.horizon(now);
        while let Some(closed) = self.sampler.next_closed(now, horizon) {
            self.learn(closed, now);
        }
    }

    fn learn(&mut self, Closed { app, x, reads, late, note }: Closed, now: Nanos) {
        // Before the first has left flash nothing has been displaced.
        if let Some(price) = &mut self.price
            && Note::admitted(note)
            && self.lifetime.is_some()
        {
            price.learn(log2_of(x[SIZE]), late, now);
        }
        let positive = reads >= self.config.reads;
        let app = self.served(app);
        let state = &mut self.apps[app.index()];
        if let Some(flashy) = Note::read(note) {
            let c = &mut state.scored;
            match (flashy, positive) {
                (true, true) => c.true_positive += 1,
                (true, false) => c.false_positive += 1,
                (false, true) => c.false_negative += 1,
                (false, false) => c.true_negative += 1,
            }
        }
        state.fresh = state.fresh.saturating_add(1);
        self.reservoir.push(app, Sample { x, positive });
    }

    /// The chance that an object is read, which unlike a distance can be compared between applications.
    fn chance(&self, Offered { of: s, .. }: &Offered<Seen>) -> f32 {
        let score = self.score(s.app, &s.x, s.survivor).score;
        match &self.apps[self.slot(s.app)].model {
            Some(m) => m.chance(score),
            None => score / (1.0 + score),
        }
    }

    /// What writing an object is worth where bytes written are what is scarce: its chance over a power of its size.
    fn worth(&self, s: &Offered<Seen>) -> f32 {
        let log2_size = log2_of(log2_fixed(s.bytes));
        self.chance(s) * exp2(-self.exponent * log2_size)
    }

    /// Whether an object is worth what its write would displace.
    fn is_worth_its_price(&self, s: &Offered<Seen>, now: Nanos) -> bool {
        self.price.as_ref().is_none_or(|p| {
            p.is_met(self.chance(s), log2_of(log2_fixed(s.bytes)), now, self.horizon(now))
        })
    }

    /// The score of a vector, and whether a model gave it.
    fn score(&self, app: AppId, x: &Vector, survivor: bool) -> Judgement {
        let state = &self.apps[self.slot(app)];
        match &state.model {
            // A classifier that has never met a survivor knows nothing of it; that it was read on flash speaks for it.
            Some(m) if !(survivor && m.weights[SURVIVOR] == 0.0) => {
                let score = m.score(x);
                let flashy = score >= self.config.min_score;
                // Before the flash has been filled once there is place for more, and labels know only the short time since
                // the start: they call too few flashy.
                let early = self.rule_until_turnover && self.lifetime.is_none() && rule(x) >= 1.0;
                Judgement { score, flashy: flashy || early, note: Note::of(flashy) }
            }
            _ => {
                let score = rule(x);
                Judgement { score, flashy: survivor || score >= 1.0, note: Note::NONE }
            }
        }
    }
}

/// A size's logarithm out of a vector.
fn log2_of(fixed: u16) -> f32 {
    f32::from(fixed) / 1024.0
}

/// The simple rule's score: log2(1 + reads), or of refetches; 1 for one.
fn rule(x: &Vector) -> f32 {
    f32::from(x[READS].max(x[REFETCHES])) / 1024.0
}

struct Judgement {
    score: f32,
    flashy: bool,
    note: u8,
}

/// What is kept with a sample: bit 0 a model judged it, bit 1 as flashy, bit 2 it was admitted.
struct Note;

impl Note {
    const NONE: u8 = 0;

    fn of(flashy: bool) -> u8 {
        1 | u8::from(flashy) << 1
    }

    fn and_admitted(note: u8, admitted: bool) -> u8 {
        note | u8::from(admitted) << 2
    }

    fn admitted(note: u8) -> bool {
        note & 4 == 4
    }

    fn read(note: u8) -> Option<bool> {
        (note & 1 == 1).then_some(note & 2 == 2)
    }
}

impl AdmissionPolicy for Flashiness {
    fn on_write(&mut self, access: &Access, update: bool) {
        let fingerprint = access.hash.fingerprint();
        if let Some(h) = &mut self.history {
            h.write(fingerprint, update, access.at);
        }
        if self.sampler.follows(fingerprint) {
            self.close(access.at);
            self.sampler.write(fingerprint, update);
        }
    }

    #[inline]
    fn on_read(&mut self, access: &Access, features: &Features) {
        let fingerprint = access.hash.fingerprint();
        if !self.sampler.follows(fingerprint) {
            return;
        }
        self.close(access.at);
        self.sampler.read(fingerprint, access.at, self.horizon(access.at));
        if self.sample_at == SampleAt::Reads {
            let x = vector(features, self.past(access.hash), false);
            let note = self.score(access.app, &x, false).note;
            let horizon = self.horizon(access.at);
            self.sampler.offer(fingerprint, access.app, access.at, horizon, || (x, note));
        }
    }

    #[inline]
    fn on_flash_read(&mut self, access: &Access) {
        let fingerprint = access.hash.fingerprint();
        if self.sampler.follows(fingerprint) {
            self.close(access.at);
            self.sampler.read(fingerprint, access.at, self.horizon(access.at));
        }
    }

    fn on_miss(&mut self, hash: ObjectHash, _app: AppId, now: Nanos) {
        let fingerprint = hash.fingerprint();
        if let Some(h) = &mut self.history {
            h.miss(fingerprint);
        }
        if self.sampler.follows(fingerprint) {
            self.close(now);
            self.sampler.miss(fingerprint, now, self.horizon(now));
        }
    }

    fn on_departure(&mut self, access: &Access, departure: Departure) {
        let fingerprint = access.hash.fingerprint();
        if !self.sampler.follows(fingerprint) {
            return;
        }
        self.close(access.at);
        match departure {
            Departure::Evicted => self.sampler.evicted(fingerprint),
            Departure::Removed => self.sampler.removed(fingerprint),
            // Moved: it lives on. Updated: on_write said so.
            Departure::Moved | Departure::Updated => {}
        }
    }

    fn judge(&mut self, candidate: &Candidate, now: Nanos) -> Verdict {
        let f = &candidate.features;
        let past = self.past(candidate.hash);
        // Nothing speaks for an object that was never read and is not known from before. In the paper's form that is all
        // objects never read (§4.2). With a memory, one that is wanted after all costs one miss: then it is known.
        // Where a rate of writes is held, the cut decides, and such objects come last.
        let unknown = f.reads == 0 && !candidate.survivor;
        if unknown && (self.paper_zero || self.cut.is_none() && past.refetches == 0) {
            return Verdict::Reject(Reason::Unread);
        }
        let x = vector(f, past, candidate.survivor);
        let judgement = self.score(candidate.app, &x, candidate.survivor);
        let fingerprint = candidate.hash.fingerprint();
        // What has closed is known before the decision that it may bear on.
        let sampled = self.sample_at == SampleAt::Decisions && self.sampler.follows(fingerprint);
        if sampled {
            self.close(now);
        }
        let admitted = match self.cut.take() {
            None => judgement.flashy,
            Some(mut cut) => {
                let (app, survivor) = (candidate.app, candidate.survivor);
                let seen = Offered { of: Seen { x, app, survivor }, bytes: f.size };
                let wanted = self.is_worth_its_price(&seen, now);
                let rescore = |s: &Offered<Seen>| self.worth(s);
                let admitted = cut.admits(self.worth(&seen), seen, wanted, now, rescore);
                self.cut = Some(cut);
                admitted
            }
        };
        if sampled {
            let horizon = self.horizon(now);
            let note = Note::and_admitted(judgement.note, admitted);
            self.sampler.offer(fingerprint, candidate.app, now, horizon, || (x, note));
        }
        if !admitted {
            let unread = judgement.note == Note::NONE && f.reads == 0;
            return Verdict::Reject(if unread { Reason::Unread } else { Reason::NotFlashy });
        }
        let score = if self.config.per_byte {
            // Halved with each doubling of the size: a score is a distance, no count of hits, so this ranks and no more.
            (judgement.score - self.config.min_score) * 256.0 / (f.size.max(1) as f32)
        } else {
            judgement.score
        };
        Verdict::Admit { score }
    }

    fn set_budget_rate(&mut self, bytes_per_second: f64) {
        if self.config.bytes_per_second.0 == 0 && bytes_per_second > 0.0 {
            let rate = bytes_per_second * self.share;
            match &mut self.cut {
                Some(cut) => cut.set_rate(rate),
                None => self.cut = Some(Cut::new(rate, self.memory)),
            }
        }
    }

    fn pool(&self) -> Pool {
        self.pool
    }

    #[inline]
    fn wants_read(&self, hash: ObjectHash) -> bool {
        self.sampler.follows(hash.fingerprint())
    }

    #[inline]
    fn warm(&self, hash: ObjectHash) {
        if let Some(history) = &self.history {
            history.expect(hash.fingerprint());
        }
    }

    #[inline]
    fn warm_again(&self, hash: ObjectHash) {
        if let Some(history) = &self.history {
            history.warm_to_write(hash.fingerprint());
        }
    }

    #[inline]
    fn warm_candidate(&self, hash: ObjectHash) {
        if let Some(history) = &self.history {
            history.warm(hash.fingerprint());
        }
    }

    fn grow_as_filled(&mut self) {
        if let Some(history) = &mut self.history {
            history.grow_as_filled();
        }
    }

    fn spared_bytes(&self) -> usize {
        self.history.as_ref().map_or(0, KeyMemory::spared_bytes)
    }

    fn memory_bytes(&self) -> usize {
        let models = self.apps.iter().filter(|a| a.model.is_some()).count();
        self.history.as_ref().map_or(0, KeyMemory::memory_bytes)
            + self.cut.as_ref().map_or(0, Cut::memory_bytes)
            + self.sampler.memory_bytes()
            + self.reservoir.memory_bytes()
            + self.apps.len() * size_of::<AppState>()
            + models * size_of::<Model>()
    }

    fn set_lifetime(&mut self, _now: Nanos, lifetime: Nanos) {
        // Smoothed: one odd segment must not stretch every label.
        self.lifetime = Some(match self.lifetime {
            Some(old) => Nanos(old.0 - old.0 / 4 + lifetime.0 / 4),
            None => lifetime,
        });
    }

    fn training_due(&mut self, now: Nanos) -> Option<AppId> {
        self.close(now);
        let started = self.started?;
        let horizon = self.horizon(now);
        let first = ((f64::from(self.config.first_training_samples) * self.share).ceil() as u32)
            .max(LEAST_SAMPLES);
        let wait = match self.config.retrain {
            0 => Nanos(horizon.0 / 4),
            secs => Nanos::from_secs(u64::from(secs)),
        };
        for index in 0..self.apps.len() {
            let app = AppId(index as u16);
            let held = self.reservoir.len(app);
            let state = &mut self.apps[index];
            let due = match state.asked {
                None => {
                    now - started >= Nanos::from_secs(u64::from(self.config.first_training_after))
                        && (held >= first
                            || held >= LEAST_SAMPLES && self.reservoir.has_its_part(app))
                }
                Some(asked) => now - asked >= wait && state.fresh >= LEAST_SAMPLES.max(held / 16),
            };
            if due {
                state.asked = Some(now);
                state.fresh = 0;
                return Some(app);
            }
        }
        None
    }

    fn take_training_set(&mut self, app: AppId, now: Nanos) -> Option<TrainingSet> {
        self.close(now);
        let app = self.served(app);
        (self.reservoir.len(app) > 0).then(|| TrainingSet {
            app,
            features: self.features,
            class_weights: self.class_weights,
            samples: self.reservoir.iter(app).collect(),
        })
    }

    fn install(&mut self, app: AppId, model: Model, now: Nanos) {
        if !model.is_finite() || model.app() != app {
            return;
        }
        let slot = self.slot(app);
        let state = &mut self.apps[slot];
        state.version += 1;
        state.installed = now;
        // Outcomes come one horizon late, when the next model may be there already: the score is that of the models of
        // late, each installation halving the weight of what was before.
        state.scored.halve();
        state.model = Some(Box::new(model));
    }

    fn models(&self) -> Vec<ModelReport> {
        let seen =
            |i: &usize| self.reservoir.len(AppId(*i as u16)) > 0 || self.apps[*i].model.is_some();
        (0..self.apps.len())
            .filter(seen)
            .map(|i| {
                let app = AppId(i as u16);
                let (s, c) = (&self.apps[i], self.apps[i].scored);
                ModelReport {
                    app,
                    version: s.version,
                    trained_at: s.installed,
                    trained_samples: s.model.as_ref().map_or(0, |m| m.samples),
                    samples: self.reservoir.len(app),
                    positive_share: ratio(self.reservoir.positives(app), self.reservoir.len(app)),
                    scored: c.true_positive + c.false_positive + c.false_negative + c.true_negative,
                    precision: ratio(c.true_positive, c.true_positive + c.false_positive),
                    recall: ratio(c.true_positive, c.true_positive + c.false_negative),
                    horizon: self.horizon(self.latest),
                    weights: s.model.as_ref().map(|m| m.weights),
                }
            })
            .collect()
    }
}
