//! `expected_reads`: an object is worth the reads that flash would answer of it.
//!
//! What leaves DRAM is sorted by what is known of it (reads, refetches, time away, size, idleness) into a table of means: how many reads
//! its like got in one lifetime of flash ([`table`]). The table is filled by some of the objects that are judged, which are followed
//! for a lifetime whether they went to flash or not ([`follow`]).
//!
//! An object goes to flash if what is expected of it is worth its room: more, per byte, than what the far end of the log still earns.
//! Every byte that is written takes a byte's room from there; see [`price`](super::price) for why that is the cost of a write.

mod follow;
mod table;

use larder_base::{AppId, Nanos, ObjectHash, Rng};

use super::cut::{Cut, Offered};
use super::memory::KeyMemory;
use super::miniature::{Asked, Leaving, Miniatures, Tuning, Worth};
use super::{
    Access, AdmissionError, AdmissionPolicy, Candidate, Departure, ExpectedReadsConfig, Features,
    Objective, Reason, Setup, Verdict,
};
use crate::learn::{exp2, log2_fixed};
use follow::{Became, Follow};
use table::{Like, Quartiles, Table};

/// Keys remembered for each object that flash can hold: one for it, and one for a key that was turned away.
const KEYS_PER_OBJECT: u64 = 2;
const LEAST_MEMORY: usize = 16 << 10;
/// Objects that were seen to their end before the table decides; until then what was read, or fetched again, is admitted.
const LEAST_SEEN: u32 = 64;
/// Followed objects over which earnings of the log's far end are averaged (exponentially).
const EARNED_OVER: f32 = 512.0;
const HOUR: Nanos = Nanos::from_secs(3600);
const WEEK: Nanos = Nanos::from_secs(7 * 86_400);

/// What the second half of their lives earned the objects that went to flash.
#[derive(Clone, Copy, Debug, Default)]
struct Earnings {
    value: f32,
    bytes: f32,
    seen: f32,
    at: Nanos,
}

impl Earnings {
    fn learn(&mut self, became: &Became, exponent: f32, now: Nanos) {
        let keep = 1.0 - 1.0 / EARNED_OVER;
        // The second half, doubled: as though it went on for a lifetime. Once, as in `price`: after the first miss it is fetched again.
        let value = 2.0 * became.late.min(1) as f32 * exp2((1.0 - exponent) * became.log2_size);
        self.value = self.value * keep + value;
        self.bytes = self.bytes * keep + exp2(became.log2_size);
        self.seen = self.seen * keep + 1.0;
        self.at = now;
    }

    /// Per byte; nothing before enough was seen. Halved with each lifetime in which nothing was: a price that keeps everything out
    /// must not stand for ever.
    fn per_byte(&self, now: Nanos, lifetime: Nanos) -> f32 {
        if self.seen < LEAST_SEEN as f32 / 2.0 {
            return 0.0;
        }
        let quiet = (now - self.at).as_secs_f64() / lifetime.as_secs_f64().max(1e-9);
        self.value / self.bytes * exp2(-quiet as f32)
    }
}

/// See the [module](self).
#[derive(Debug)]
pub struct ExpectedReads {
    config: ExpectedReadsConfig,
    exponent: f32,
    share: f64,
    memory: usize,
    history: KeyMemory,
    follow: Follow,
    table: Table,
    seen: u32,
    quartiles: Quartiles,
    earnings: Earnings,
    /// Holds a rate of writes, if there is one.
    cut: Option<Cut<Kind>>,
    /// Find the setting; `None` where there is none to be found, or no memory for it.
    miniatures: Option<Miniatures>,
    started: Option<Nanos>,
    /// As told, smoothed.
    lifetime: Option<Nanos>,
}

/// What a candidate is scored by.
#[derive(Clone, Copy, Debug)]
struct Kind {
    like: Like,
    log2_size: f32,
}

impl ExpectedReads {
    /// With the parameters of `config`.
    ///
    /// # Errors
    /// [`AdmissionError::Memory`] below 16 KiB.
    pub fn new(
        config: &ExpectedReadsConfig,
        setup: &Setup,
    ) -> Result<ExpectedReads, AdmissionError> {
        if setup.memory < LEAST_MEMORY {
            let (policy, need) = ("expected_reads", LEAST_MEMORY);
            return Err(AdmissionError::Memory { policy, need, given: setup.memory });
        }
        let mut rng = Rng::new(setup.seed);
        // A sixth for the objects that are followed, at most a quarter for the table, the rest for keys.
        let followed = (setup.memory / 6).min(MOST_FOLLOWED * Follow::BYTES);
        let follow = Follow::new(followed, rng.next_u64());
        let table = Table::new(setup.memory / 4);
        let rate = match config.bytes_per_second.0 {
            0 => setup.budget_rate.filter(|rate| rate.is_finite() && *rate > 0.0),
            fixed => Some(fixed as f64),
        };
        let cut = rate.map(|whole| Cut::new(whole * setup.share, setup.memory));
        let beside =
            follow.memory_bytes() + table.memory_bytes() + Cut::<Kind>::bytes_of(setup.memory);
        let keys = setup.objects.saturating_mul(KEYS_PER_OBJECT).max(64);
        let exponent = config.exponent();
        let miniatures = match config.self_tuning {
            true => {
                let by_bytes = config.objective == Objective::Bytes;
                Miniatures::new(setup.memory / 2, (setup.dram, setup.flash), by_bytes)
            }
            false => None,
        };
        let beside = beside + miniatures.as_ref().map_or(0, Miniatures::memory_bytes);
        Ok(ExpectedReads {
            miniatures,
            exponent,
            share: setup.share,
            memory: setup.memory,
            history: KeyMemory::new(keys, setup.memory.saturating_sub(beside)),
            follow,
            table,
            seen: 0,
            quartiles: Quartiles::NONE,
            earnings: Earnings::default(),
            cut,
            started: None,
            lifetime: None,
            config: config.clone(),
        })
    }

    /// How long flash holds what it has, as far as that is known.
    fn lifetime(&self, now: Nanos) -> Nanos {
        let least = Nanos::from_secs(1);
        match self.lifetime {
            Some(lifetime) => lifetime.clamp(least, WEEK),
            // Nothing has left yet: objects live at least as long as the cache has been up.
            None => (now - self.started.unwrap_or(now)).clamp(least, HOUR),
        }
    }

    /// Takes in what has become of the followed.
    fn learn(&mut self, now: Nanos) {
        let (table, earnings, exponent) = (&mut self.table, &mut self.earnings, self.exponent);
        let (seen, full) = (&mut self.seen, self.lifetime.is_some());
        self.follow.next(now, |became| {
            table.learn(became.like, became.reads);
            *seen = seen.saturating_add(1);
            // Before the first has left flash nothing has been displaced.
            if became.admitted && full {
                earnings.learn(&became, exponent, now);
            }
        });
    }

    /// Whether enough is known for the table to decide.
    fn decides(&self) -> bool {
        self.seen >= ((f64::from(LEAST_SEEN) * self.share) as u32).max(16)
    }

    /// What a write has to be worth.
    fn floor(&self, now: Nanos, lifetime: Nanos) -> f32 {
        self.config.price * self.earnings.per_byte(now, lifetime)
    }

    /// Does something with the miniatures, if there are any and the key is one of theirs.
    #[inline]
    fn with_miniatures(
        &mut self,
        fingerprint: u64,
        now: Nanos,
        does: impl FnOnce(&mut Miniatures, &Known<'_>),
    ) {
        if !self.miniatures.as_ref().is_some_and(|m| m.samples(fingerprint)) {
            return;
        }
        let (lifetime, decides) = (self.lifetime(now), self.decides());
        let known = Known {
            table: &self.table,
            history: &self.history,
            quartiles: &self.quartiles,
            exponent: self.exponent,
            lifetime,
            decides,
            asked: Asked { least: self.config.least, floor: self.floor(now, lifetime) },
        };
        if let Some(miniatures) = &mut self.miniatures {
            does(miniatures, &known);
        }
    }

    #[inline]
    fn read_in_miniature(&mut self, fingerprint: u64, size: Option<u32>, now: Nanos) {
        let rate = self.cut.as_ref().map(Cut::rate);
        self.with_miniatures(fingerprint, now, |miniatures, known| {
            miniatures.read(fingerprint, size, now, (known.asked, rate), |of| known.worth(of));
        });
    }

    /// Reads to be expected of an object, over a power of its size.
    fn worth(&self, of: Kind) -> f32 {
        self.worth_of(self.table.expected(of.like), of.log2_size)
    }

    fn worth_of(&self, expected: f32, log2_size: f32) -> f32 {
        expected * exp2(-self.exponent * log2_size)
    }
}

/// What is known of those that are judged.
struct Known<'a> {
    table: &'a Table,
    history: &'a KeyMemory,
    quartiles: &'a Quartiles,
    exponent: f32,
    lifetime: Nanos,
    /// The table decides, and not the rule.
    decides: bool,
    asked: Asked,
}

impl Known<'_> {
    /// What an object of a miniature is worth.
    fn worth(&self, of: &Leaving) -> Worth {
        let past = self.history.recall(of.fingerprint);
        let f = Features {
            reads: of.reads,
            age: of.age,
            idle: of.idle,
            size: of.size,
            ..Features::default()
        };
        let log2_size = f32::from(log2_fixed(of.size)) / 1024.0;
        let quarter = self.quartiles.quarter(log2_size);
        let like = table::like(&f, past, of.survivor, quarter, self.lifetime);
        let reads = self.table.expected(like);
        Worth {
            reads,
            worth: reads * exp2(-self.exponent * log2_size),
            rule: (!self.decides).then(|| rule(&f, past.refetches, of.survivor)),
        }
    }
}

/// Objects that are followed at most in a shard.
const MOST_FOLLOWED: usize = 65_536;

/// Whether the simple rule admits it, which decides until the table does.
fn rule(f: &Features, refetches: u8, survivor: bool) -> bool {
    survivor || f.reads > 0 || refetches > 0
}

impl AdmissionPolicy for ExpectedReads {
    fn on_write(&mut self, access: &Access, update: bool) {
        let fingerprint = access.hash.fingerprint();
        self.started.get_or_insert(access.at);
        self.history.write(fingerprint, update, access.at);
        self.follow.write(fingerprint, access.at, update);
        self.with_miniatures(fingerprint, access.at, |miniatures, known| {
            let of = (update, known.asked);
            miniatures.write(fingerprint, access.size, of, access.at, |of| known.worth(of));
        });
    }

    #[inline]
    fn on_read(&mut self, access: &Access, _: &Features) {
        self.on_flash_read(access);
    }

    #[inline]
    fn on_flash_read(&mut self, access: &Access) {
        let fingerprint = access.hash.fingerprint();
        if self.follow.follows(fingerprint) {
            self.follow.read(fingerprint, access.at, self.lifetime(access.at), false);
        }
        self.read_in_miniature(fingerprint, Some(access.size), access.at);
    }

    fn on_miss(&mut self, hash: ObjectHash, _: AppId, now: Nanos) {
        let fingerprint = hash.fingerprint();
        self.history.miss(fingerprint);
        if self.follow.follows(fingerprint) {
            self.follow.read(fingerprint, now, self.lifetime(now), true);
        }
        self.read_in_miniature(fingerprint, None, now);
    }

    fn on_departure(&mut self, access: &Access, departure: Departure) {
        match departure {
            Departure::Removed => {
                let fingerprint = access.hash.fingerprint();
                self.follow.removed(fingerprint, access.at);
                self.with_miniatures(fingerprint, access.at, |m, _| m.removed(fingerprint));
            }
            // Moved: it lives on. Updated: on_write said so. Evicted: misses count in its place.
            Departure::Moved | Departure::Updated | Departure::Evicted => {}
        }
    }

    fn judge(&mut self, candidate: &Candidate, now: Nanos) -> Verdict {
        let f = &candidate.features;
        let fingerprint = candidate.hash.fingerprint();
        let past = self.history.recall(fingerprint);
        let lifetime = self.lifetime(now);
        // What has become of others is known before the decision that it may bear on.
        self.learn(now);
        let log2_size = f32::from(log2_fixed(f.size)) / 1024.0;
        let quarter = self.quartiles.see(log2_size);
        let like = table::like(f, past, candidate.survivor, quarter, lifetime);
        let kind = Kind { like, log2_size };
        let expected = self.table.expected(like);
        let worth = self.worth_of(expected, log2_size);
        // Less is asked where miniatures found that to be better, or a rate allows more than is left to be written then.
        let (least, floor) = match (&self.miniatures, &self.cut) {
            (Some(miniatures), _) => (miniatures.thrift().min(1.0), miniatures.thrift()),
            (None, Some(cut)) => (cut.ease(), cut.ease_price()),
            (None, None) => (1.0, 1.0),
        };
        let wanted = match self.decides() {
            true => {
                expected >= least * self.config.least && worth >= floor * self.floor(now, lifetime)
            }
            false => rule(f, past.refetches, candidate.survivor),
        };
        let admitted = match self.cut.take() {
            None => wanted,
            Some(mut cut) => {
                let offered = Offered { of: kind, bytes: f.size };
                let admitted = cut.admits(worth, offered, wanted, now, |o| self.worth(o.of));
                self.cut = Some(cut);
                admitted
            }
        };
        self.follow.judged(fingerprint, now, lifetime, (like, log2_size, admitted));
        if admitted && let Some(miniatures) = &mut self.miniatures {
            miniatures.admitted(f.size);
        }
        match admitted {
            true => Verdict::Admit { score: worth },
            false if f.reads == 0 && past.refetches == 0 => Verdict::Reject(Reason::Unread),
            false => Verdict::Reject(Reason::NotFlashy),
        }
    }

    fn set_saved(&mut self, saved: u64, most: u64) {
        // A rate that was asked for is not the budget's.
        if self.config.bytes_per_second.0 == 0
            && let Some(cut) = &mut self.cut
        {
            cut.set_saved(saved as f64 * self.share, most as f64 * self.share);
        }
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

    #[inline]
    fn wants_read(&self, hash: ObjectHash) -> bool {
        let fingerprint = hash.fingerprint();
        self.follow.follows(fingerprint)
            || self.miniatures.as_ref().is_some_and(|m| m.samples(fingerprint))
    }

    #[inline]
    fn warm(&self, hash: ObjectHash) {
        self.history.expect(hash.fingerprint());
    }

    #[inline]
    fn warm_again(&self, hash: ObjectHash) {
        self.history.warm_to_write(hash.fingerprint());
    }

    #[inline]
    fn warm_candidate(&self, hash: ObjectHash) {
        self.history.warm(hash.fingerprint());
    }

    fn grow_as_filled(&mut self) {
        self.history.grow_as_filled();
    }

    fn spared_bytes(&self) -> usize {
        self.history.spared_bytes()
    }

    fn tuning(&self) -> Option<Tuning> {
        let found = self.miniatures.as_ref().map_or(Tuning::NO_MEMORY, Miniatures::tuning);
        self.config.self_tuning.then_some(found)
    }

    fn memory_bytes(&self) -> usize {
        self.history.memory_bytes()
            + self.follow.memory_bytes()
            + self.table.memory_bytes()
            + self.miniatures.as_ref().map_or(0, Miniatures::memory_bytes)
            + self.cut.as_ref().map_or(0, Cut::memory_bytes)
    }

    fn set_lifetime(&mut self, _: Nanos, lifetime: Nanos) {
        // Smoothed: one odd segment must not stretch every label.
        self.lifetime = Some(match self.lifetime {
            Some(old) => Nanos(old.0 - old.0 / 4 + lifetime.0 / 4),
            None => lifetime,
        });
    }
}
