//! What maintenance does next, and when it comes again: the decisions of [`Maintenance`](super::Maintenance), apart from shards, log and
//! files. It asks for what it wants done and hears what came of that ([`Around`]), so a record of both replays alone.

use larder_base::{AppId, Nanos, Now};
use larder_policy::learn::TrainingSet;

use super::expiry::{Crawler, Expired, Expiring};
use super::training::{Trained, Training};
use crate::kv::planted::Planted;

/// It looks at everything this often at least.
pub(super) const EVERY: Nanos = Nanos::from_secs(1);
/// Turns that find room wanting, after which training is seen to all the same.
const BUSY: u32 = 1024;
/// What one step of the log may take from the write budget: three segments, and what one has for padding.
pub(super) const SEGMENTS_OF_A_STEP: u64 = 4;

/// When the next turn is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// At once: there is more to do.
    Again,
    /// Then, or as soon as a shard calls.
    At(Nanos),
}

/// What a step of the log came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stepped {
    /// There may be more to do.
    pub(super) worked: bool,
    /// Flash is out of use since writes fail.
    pub(super) degraded: bool,
}

/// What maintenance asks of shards, log and files, and has them do.
pub(super) trait Around: Trained {
    /// What clients want of the removal of expired objects.
    fn crawler(&mut self) -> Crawler;
    /// A piece of that in this shard, if anything is due.
    fn expire(&mut self, now: Now, shard: usize, all: bool) -> Option<Expired>;
    /// All objects have been looked through.
    fn crawled(&mut self);
    /// How many applications are known, the default included.
    fn names_known(&mut self) -> usize;
    /// Keeps their names on disk; how many are known by now. `None` if they could not be kept.
    fn keep_names(&mut self) -> Option<usize>;
    /// What the write budget must remember is on disk, before so many segments more are written.
    fn keep_budget(&mut self, now: Now, segments: u64);
    /// One step of the log.
    fn step(&mut self, now: Now) -> Stepped;
    /// Flash is out of use, or in use again.
    fn degraded(&mut self, degraded: bool);
    /// Where nothing goes to flash: makes room in a shard; false if there is enough.
    fn free_room(&mut self, now: Now, shard: usize) -> bool;
    /// Room was made: what was evicted is told to whoever wants to know.
    fn made_room(&mut self, now: Now);
    /// Once a second: what is on the tapes is handed on, so that a quiet shard's last requests are in the file too, and what flash
    /// could not take is told.
    fn hand_on(&mut self, now: Now);
    /// One step towards the limit on the memory; whether there are more.
    fn follow_limit(&mut self, now: Now) -> bool;
    /// Fit a model of these samples, with this seed.
    fn train(&mut self, samples: TrainingSet, seed: u64);
}

/// What is to be done next. See the [module](self).
#[derive(Debug)]
pub(super) struct Schedule {
    /// There is flash.
    flash: bool,
    /// How many applications are known on disk, the default included.
    names_kept: usize,
    /// Names that could not be kept are kept again from then on.
    names_again: Nanos,
    degraded: bool,
    expiring: Expiring,
    training: Training,
    /// The last turn found nothing more to do.
    rested: bool,
    /// Some shard may be short of room.
    wanted: bool,
    /// The shard for which room is made next, where there is no flash.
    room_at: usize,
    /// Turns in a row that made room.
    busy: u32,
    next: Nanos,
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

impl Schedule {
    /// That of a new cache, with flash or without. Seeds of training follow from `seed`; `names_kept` applications are known on disk,
    /// the default included.
    pub(super) fn new(flash: bool, seed: u64, names_kept: usize) -> Schedule {
        Schedule {
            flash,
            names_kept,
            names_again: Nanos::ZERO,
            degraded: false,
            expiring: Expiring::default(),
            training: Training::new(seed),
            rested: true,
            wanted: false,
            room_at: 0,
            busy: 0,
            next: Nanos::ZERO,
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    #[cfg(feature = "planted")]
    pub(super) fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
    }

    #[cfg(feature = "planted")]
    fn planted(&self, fault: Planted) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    fn planted(&self, _: Planted) -> bool {
        false
    }

    /// How many applications are known on disk, the default included.
    pub(super) fn names_kept(&self) -> usize {
        self.names_kept
    }

    /// The next turn.
    pub(super) fn turn(&mut self, now: Now, around: &mut impl Around) -> Turn {
        self.wanted |= std::mem::take(&mut self.rested);
        let mut again = self.expiring.step(now, around);
        if self.wanted {
            self.wanted = self.make_room(now, around);
            again |= self.wanted;
        }
        self.busy = if self.wanted { self.busy.saturating_add(1) } else { 0 };
        if now.mono >= self.next {
            around.hand_on(now);
        }
        again |= around.follow_limit(now);
        // What is wanted at once goes first.
        if (!self.wanted || self.busy > BUSY) && self.training.is_due(now.mono) {
            self.busy = 0;
            if let Some((samples, seed)) = self.training.look(now, around) {
                around.train(samples, seed);
            }
        }
        if now.mono >= self.next || !again {
            self.next = now.mono + EVERY;
        }
        if again {
            return Turn::Again;
        }
        self.rested = true;
        let training = if self.training.is_fitting() { self.next } else { self.training.next() };
        Turn::At(self.next.min(training))
    }

    /// Whether a shard has called since the last turn.
    pub(super) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// A shard has called.
    pub(super) fn wake(&mut self) {
        self.wanted = true;
    }

    /// What came of fitting a model of `app`.
    pub(super) fn fitted<A: Trained>(
        &mut self,
        now: Now,
        around: &mut A,
        app: AppId,
        model: Option<A::Model>,
    ) {
        self.training.fitted(now, around, app, model);
    }

    /// Whether [`Schedule::fitted`] is awaited.
    pub(super) fn is_fitting(&self) -> bool {
        self.training.is_fitting()
    }

    /// `known` applications are known, and `keep` keeps their names on disk and says how many are known by then. Records on flash bear
    /// numbers of applications, and must not outlive what they mean. Returns false if they could not be kept: nothing may be written.
    pub(super) fn keep_names(
        &mut self,
        known: usize,
        keep: impl FnOnce() -> Option<usize>,
    ) -> bool {
        if self.names_kept == known {
            return true;
        }
        let kept = keep().or_else(|| self.planted(Planted::UnkeptNameWritten).then_some(known));
        self.names_kept = kept.unwrap_or(self.names_kept);
        kept.is_some()
    }

    /// The same ahead of a step of the log. A directory that is full stays so for longer than a step: it is tried again after a second.
    fn names_are_kept(&mut self, now: Now, around: &mut impl Around) -> bool {
        if now.mono < self.names_again {
            return false;
        }
        let known = around.names_known();
        let kept = self.keep_names(known, || around.keep_names());
        if !kept {
            self.names_again = now.mono + EVERY;
        }
        kept
    }

    /// One step towards the room that shards want. Returns whether there may be more to do.
    fn make_room(&mut self, now: Now, around: &mut impl Around) -> bool {
        let more = if self.flash && !self.names_are_kept(now, around) {
            // What is staged gives no room until it is written: each shard has a little made, and calls when it wants more.
            for shard in 0..around.count() {
                around.free_room(now, shard);
            }
            false
        } else if self.flash {
            around.keep_budget(now, SEGMENTS_OF_A_STEP);
            let stepped = around.step(now);
            if std::mem::replace(&mut self.degraded, stepped.degraded) != stepped.degraded {
                around.degraded(stepped.degraded);
            }
            stepped.worked
        } else {
            loop {
                if self.room_at == around.count() {
                    self.room_at = 0;
                    break false;
                }
                if around.free_room(now, self.room_at) {
                    break true;
                }
                self.room_at += 1;
            }
        };
        around.made_room(now);
        more
    }
}
