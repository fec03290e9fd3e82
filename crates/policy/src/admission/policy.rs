//! The interface of a policy, and the choice among them.

use std::collections::BTreeMap;

use larder_base::{AppId, Nanos, ObjectHash};

use super::{
    Access, AdmissionConfig, AdmissionError, All, Candidate, Departure, ExpectedReads, Features,
    Flashiness, Ghost, PolicyName, Pool, Probability, Reason, RejectFirst, Setup, Tuning, Verdict,
    WriteRate,
};
use crate::learn::{Model, TrainingSet};

/// What an admission policy is told and asked. Times never run backwards.
pub trait AdmissionPolicy: Send {
    /// An object was written into DRAM. `update`: the key was in the cache (in either tier) before.
    fn on_write(&mut self, access: &Access, update: bool) {
        let _ = (access, update);
    }

    /// An object in DRAM was read; `features` as they are after this read.
    fn on_read(&mut self, access: &Access, features: &Features) {
        let _ = (access, features);
    }

    /// An object on flash was read.
    fn on_flash_read(&mut self, access: &Access) {
        let _ = access;
    }

    /// A read found nothing.
    fn on_miss(&mut self, hash: ObjectHash, app: AppId, now: Nanos) {
        let _ = (hash, app, now);
    }

    /// An object left DRAM, or its version there was replaced. Of a key that is only on flash, an update shows as
    /// [`AdmissionPolicy::on_write`] and a removal as this with [`Departure::Removed`].
    fn on_departure(&mut self, access: &Access, departure: Departure) {
        let _ = (access, departure);
    }

    /// Whether this object should go to flash.
    fn judge(&mut self, candidate: &Candidate, now: Nanos) -> Verdict;

    /// Which objects it wants to judge.
    fn pool(&self) -> Pool {
        Pool::Victims
    }

    /// Whether [`AdmissionPolicy::on_read`] would do anything with this object's features: a caller for whom it is work to
    /// gather them may skip the call when not.
    fn wants_read(&self, hash: ObjectHash) -> bool {
        let _ = hash;
        false
    }

    /// Asks for the cache line that says where what is known of the key is: for who knows what will be asked.
    fn warm(&self, hash: ObjectHash) {
        let _ = hash;
    }

    /// The second step, some requests after [`AdmissionPolicy::warm`]: asks for what that line leads to, for a miss or a
    /// write of the key. Other requests ask for nothing there.
    fn warm_again(&self, hash: ObjectHash) {
        let _ = hash;
    }

    /// Asks for the cache line at which judging a candidate of this key begins: for who knows what will be judged.
    fn warm_candidate(&self, hash: ObjectHash) {
        let _ = hash;
    }

    /// Asked before anything else: tables are to take memory as they are filled rather than at once. For simulations; it
    /// changes no decision, and not what [`AdmissionPolicy::memory_bytes`] says.
    fn grow_as_filled(&mut self) {}

    /// Bytes by which the tables are smaller than [`AdmissionPolicy::memory_bytes`] says, since they are not filled yet.
    fn spared_bytes(&self) -> usize {
        0
    }

    /// DRAM its tables take, bytes.
    fn memory_bytes(&self) -> usize;

    /// How long objects live in the cache by now: flash capacity over the rate at which it is written, or the age of
    /// what the last reclaimed segment held.
    fn set_lifetime(&mut self, now: Nanos, lifetime: Nanos) {
        let _ = (now, lifetime);
    }

    /// The write budget of the whole cache is now this many bytes per second.
    fn set_budget_rate(&mut self, bytes_per_second: f64) {
        let _ = bytes_per_second;
    }

    /// The whole cache's write budget would give `saved` bytes now, and can save up `most`. Not said where there is none.
    fn set_saved(&mut self, saved: u64, most: u64) {
        let _ = (saved, most);
    }

    /// An application whose classifier should be trained now, if any. Asking starts its wait for the next time.
    fn training_due(&mut self, now: Nanos) -> Option<AppId> {
        let _ = now;
        None
    }

    /// A copy of the labelled samples of an application; `None` if there are none.
    fn take_training_set(&mut self, app: AppId, now: Nanos) -> Option<TrainingSet> {
        let _ = (app, now);
        None
    }

    /// A trained model takes over. One that is not finite, or of another application, is ignored.
    fn install(&mut self, app: AppId, model: Model, now: Nanos) {
        let _ = (app, model, now);
    }

    /// What miniatures have found; `None` where the policy finds no setting by itself.
    fn tuning(&self) -> Option<Tuning> {
        None
    }

    /// What is known of each classifier, by application.
    fn models(&self) -> Vec<ModelReport> {
        Vec::new()
    }
}

/// A classifier and how well it does.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelReport {
    /// Whose classifier.
    pub app: AppId,
    /// Models installed so far; 0 means the simple rule still decides.
    pub version: u32,
    /// When the present one was installed.
    pub trained_at: Nanos,
    /// Samples it was trained from.
    pub trained_samples: u32,
    /// Labelled samples that wait for the next training.
    pub samples: u32,
    /// Share of those that were positive.
    pub positive_share: Option<f32>,
    /// Decisions whose outcome is known, by this and earlier models; each installation halves the weight of what was
    /// before it. `precision` and `recall` are of these.
    pub scored: u32,
    /// Of what was called flashy, the share that was: TP / (TP + FP).
    pub precision: Option<f32>,
    /// Of what was flashy, the share that was called so: TP / (TP + FN).
    pub recall: Option<f32>,
    /// The horizon of labels now.
    pub horizon: Nanos,
    /// Weights of the present model, one per entry of [`crate::learn::FEATURE_NAMES`].
    pub weights: Option<[f32; crate::learn::DIMENSIONS]>,
}

/// One application as admission sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct AppReport {
    /// Which.
    pub app: AppId,
    /// Objects that left flash.
    pub dropped: u64,
    /// Of those, never read while they were there: the paper's unread writes.
    pub dropped_unread: u64,
    /// Bytes that left flash.
    pub dropped_bytes: u64,
    /// Of those, never read.
    pub dropped_unread_bytes: u64,
    /// Its classifier, if the policy has one.
    pub model: Option<ModelReport>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Dropped {
    objects: u64,
    unread: u64,
    bytes: u64,
    unread_bytes: u64,
}

/// A shard's admission: one of the policies, and what is common to all.
pub struct Admission {
    policy: Policy,
    name: &'static str,
    min_ttl: u32,
    /// The configuration and the policy have nothing against a first fill, and the log says that it is under way.
    may_fill: bool,
    filling: bool,
    /// Objects admitted for that reason alone.
    filled: u64,
    /// At most 257 entries.
    dropped: BTreeMap<AppId, Dropped>,
    /// By reason, in the order of [`Reason::ALL`].
    rejected: [u64; Reason::ALL.len()],
}

enum Policy {
    All(All),
    Probability(Probability),
    RejectFirst(RejectFirst),
    Ghost(Ghost),
    WriteRate(WriteRate),
    Flashiness(Box<Flashiness>),
    ExpectedReads(Box<ExpectedReads>),
    Custom(Box<dyn AdmissionPolicy>),
}

macro_rules! dispatch {
    ($policy:expr, $p:ident => $call:expr) => {
        match $policy {
            Policy::All($p) => $call,
            Policy::Probability($p) => $call,
            Policy::RejectFirst($p) => $call,
            Policy::Ghost($p) => $call,
            Policy::WriteRate($p) => $call,
            Policy::Flashiness($p) => $call,
            Policy::ExpectedReads($p) => $call,
            Policy::Custom($p) => $call,
        }
    };
}

impl Admission {
    /// The policy that `config` names.
    ///
    /// # Errors
    /// A parameter out of range, a rate or memory that is missing.
    pub fn new(config: &AdmissionConfig, setup: &Setup) -> Result<Admission, AdmissionError> {
        config.validate()?;
        let policy = match config.policy {
            PolicyName::All => Policy::All(All),
            PolicyName::Probability => {
                Policy::Probability(Probability::new(&config.probability, setup))
            }
            PolicyName::RejectFirst => {
                Policy::RejectFirst(RejectFirst::new(&config.reject_first, setup)?)
            }
            PolicyName::Ghost => Policy::Ghost(Ghost::new(&config.ghost, setup)?),
            PolicyName::WriteRate => Policy::WriteRate(WriteRate::new(&config.write_rate, setup)?),
            PolicyName::Flashiness => {
                Policy::Flashiness(Box::new(Flashiness::new(&config.flashiness, false, setup)?))
            }
            PolicyName::FlashinessPaper => {
                Policy::Flashiness(Box::new(Flashiness::new(&config.flashiness, true, setup)?))
            }
            PolicyName::ExpectedReads => {
                Policy::ExpectedReads(Box::new(ExpectedReads::new(&config.expected_reads, setup)?))
            }
        };
        // A rate or a chance that is asked for holds from the first byte on. Where any object in DRAM may move, admitting
        // all would empty DRAM of what is hot.
        let chooses = match config.policy {
            PolicyName::Flashiness => config.flashiness.bytes_per_second.0 == 0,
            PolicyName::ExpectedReads => config.expected_reads.bytes_per_second.0 == 0,
            PolicyName::Ghost | PolicyName::RejectFirst => true,
            _ => false,
        };
        let victims = dispatch!(&policy, p => p.pool()) == Pool::Victims;
        Ok(Admission {
            policy,
            name: config.policy.as_str(),
            min_ttl: config.min_ttl,
            may_fill: config.first_fill && chooses && victims,
            filling: false,
            filled: 0,
            dropped: BTreeMap::new(),
            rejected: Default::default(),
        })
    }

    /// A policy from outside this crate, under this name.
    pub fn custom(name: &'static str, policy: Box<dyn AdmissionPolicy>) -> Admission {
        Admission {
            policy: Policy::Custom(policy),
            name,
            min_ttl: 0,
            may_fill: false,
            filling: false,
            filled: 0,
            dropped: BTreeMap::new(),
            rejected: Default::default(),
        }
    }

    /// The policy's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// An object left flash for good (its segment was reclaimed and it was not written again, or it was overwritten or
    /// removed there).
    pub fn on_flash_object_dropped(&mut self, app: AppId, was_read: bool, bytes: u32) {
        // Indexed like every table of applications: unknown ids are counted as OTHER, so the map stays bounded.
        let d = self.dropped.entry(AppId(app.index() as u16)).or_default();
        d.objects += 1;
        d.bytes += u64::from(bytes);
        if !was_read {
            d.unread += 1;
            d.unread_bytes += u64::from(bytes);
        }
    }

    /// Something other than the policy kept an object from flash: its size, its application's ceiling, the budget. What
    /// [`AdmissionPolicy::judge`] rejects is counted there.
    pub fn count_rejected(&mut self, reason: Reason) {
        self.rejected[reason as usize] += 1;
    }

    /// Whether the flash is being filled for the first time, with bytes to spare: then nothing on it can be displaced, and
    /// what the policy turns away goes there all the same (see [`AdmissionConfig::first_fill`]).
    pub fn set_first_fill(&mut self, under_way: bool) {
        self.filling = self.may_fill && under_way;
    }

    /// Objects that the policy turned away and that were admitted because the flash was being filled for the first time.
    pub fn first_filled(&self) -> u64 {
        self.filled
    }

    /// Rejections by reason, zeros too. An object that is judged again counts again.
    pub fn rejected(&self) -> impl Iterator<Item = (Reason, u64)> + '_ {
        Reason::ALL.into_iter().zip(self.rejected)
    }

    /// What admission knows of each application that it has seen.
    pub fn report(&self) -> Vec<AppReport> {
        let mut apps: BTreeMap<AppId, AppReport> = BTreeMap::new();
        let blank = |app| AppReport {
            app,
            dropped: 0,
            dropped_unread: 0,
            dropped_bytes: 0,
            dropped_unread_bytes: 0,
            model: None,
        };
        for (&app, d) in &self.dropped {
            let r = apps.entry(app).or_insert_with(|| blank(app));
            (r.dropped, r.dropped_unread) = (d.objects, d.unread);
            (r.dropped_bytes, r.dropped_unread_bytes) = (d.bytes, d.unread_bytes);
        }
        for model in self.models() {
            let app = model.app;
            apps.entry(app).or_insert_with(|| blank(app)).model = Some(model);
        }
        apps.into_values().collect()
    }
}

impl AdmissionPolicy for Admission {
    fn on_write(&mut self, access: &Access, update: bool) {
        dispatch!(&mut self.policy, p => p.on_write(access, update));
    }

    #[inline]
    fn on_read(&mut self, access: &Access, features: &Features) {
        dispatch!(&mut self.policy, p => p.on_read(access, features));
    }

    #[inline]
    fn on_flash_read(&mut self, access: &Access) {
        dispatch!(&mut self.policy, p => p.on_flash_read(access));
    }

    fn on_miss(&mut self, hash: ObjectHash, app: AppId, now: Nanos) {
        dispatch!(&mut self.policy, p => p.on_miss(hash, app, now));
    }

    fn on_departure(&mut self, access: &Access, departure: Departure) {
        dispatch!(&mut self.policy, p => p.on_departure(access, departure));
    }

    fn judge(&mut self, candidate: &Candidate, now: Nanos) -> Verdict {
        let verdict = if candidate.ttl < self.min_ttl {
            Verdict::Reject(Reason::ShortTtl)
        } else {
            match dispatch!(&mut self.policy, p => p.judge(candidate, now)) {
                Verdict::Reject(_) if self.filling => {
                    self.filled += 1;
                    Verdict::Admit { score: 0.0 }
                }
                verdict => verdict,
            }
        };
        if let Verdict::Reject(reason) = verdict {
            self.count_rejected(reason);
        }
        verdict
    }

    fn pool(&self) -> Pool {
        dispatch!(&self.policy, p => p.pool())
    }

    #[inline]
    fn wants_read(&self, hash: ObjectHash) -> bool {
        dispatch!(&self.policy, p => p.wants_read(hash))
    }

    #[inline]
    fn warm(&self, hash: ObjectHash) {
        dispatch!(&self.policy, p => p.warm(hash));
    }

    #[inline]
    fn warm_again(&self, hash: ObjectHash) {
        dispatch!(&self.policy, p => p.warm_again(hash));
    }

    #[inline]
    fn warm_candidate(&self, hash: ObjectHash) {
        dispatch!(&self.policy, p => p.warm_candidate(hash));
    }

    fn grow_as_filled(&mut self) {
        dispatch!(&mut self.policy, p => p.grow_as_filled());
    }

    fn spared_bytes(&self) -> usize {
        dispatch!(&self.policy, p => p.spared_bytes())
    }

    fn memory_bytes(&self) -> usize {
        let own = self.dropped.len() * (size_of::<Dropped>() + size_of::<AppId>()) * 3 / 2;
        own + dispatch!(&self.policy, p => p.memory_bytes())
    }

    fn set_lifetime(&mut self, now: Nanos, lifetime: Nanos) {
        dispatch!(&mut self.policy, p => p.set_lifetime(now, lifetime));
    }

    fn set_saved(&mut self, saved: u64, most: u64) {
        dispatch!(&mut self.policy, p => p.set_saved(saved, most));
    }

    fn set_budget_rate(&mut self, bytes_per_second: f64) {
        dispatch!(&mut self.policy, p => p.set_budget_rate(bytes_per_second));
    }

    fn training_due(&mut self, now: Nanos) -> Option<AppId> {
        dispatch!(&mut self.policy, p => p.training_due(now))
    }

    fn take_training_set(&mut self, app: AppId, now: Nanos) -> Option<TrainingSet> {
        dispatch!(&mut self.policy, p => p.take_training_set(app, now))
    }

    fn install(&mut self, app: AppId, model: Model, now: Nanos) {
        dispatch!(&mut self.policy, p => p.install(app, model, now));
    }

    fn tuning(&self) -> Option<Tuning> {
        dispatch!(&self.policy, p => p.tuning())
    }

    fn models(&self) -> Vec<ModelReport> {
        dispatch!(&self.policy, p => p.models())
    }
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admission")
            .field("name", &self.name)
            .field("memory", &self.memory_bytes())
            .finish()
    }
}
