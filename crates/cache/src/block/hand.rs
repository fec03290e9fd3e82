//! A cache without threads: its program calls [`Core::turn`], which does what they do else, in the order of the engine's
//! [`all_rounds`].
//!
//! Whatever waits for others meanwhile calls it too, so that an operator's work gets on.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use larder_base::Nanos;
use larder_engine::block::node::maintenance::Turn;
use larder_engine::block::node::round::{AllRounds, all_rounds};
use larder_runtime::RingChoice;

use super::census::Rounds;
use super::lane::Lane;
use super::log::LogThread;
use super::{Core, Time, locked};

/// A cache without threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByHand {
    /// Time is the system's.
    Clock,
    /// Time stands until it is set ([`Core::set_now`]), and nothing is left to chance.
    Given {
        /// Time since the start.
        now: Nanos,
        /// The start's random number.
        random: u32,
    },
}

/// What threads have otherwise.
pub(super) struct Hand {
    lane: Mutex<Option<Lane>>,
    log: Mutex<Option<LogThread>>,
    rounds: Mutex<(Rounds, Nanos)>,
}

/// Something that is in use further up on this thread gets on when that does.
fn free<T, R>(mutex: &Mutex<T>, f: impl FnOnce(&mut T) -> R) -> Option<R> {
    match mutex.try_lock() {
        Ok(mut held) => Some(f(&mut held)),
        Err(TryLockError::Poisoned(held)) => Some(f(&mut held.into_inner())),
        Err(TryLockError::WouldBlock) => None,
    }
}

impl Hand {
    /// What threads would have is `core`'s own from now on.
    ///
    /// # Errors
    /// When a descriptor cannot be had.
    pub(super) fn take(core: &Arc<Core>, log: LogThread) -> io::Result<()> {
        let lane = Lane::new(core.clone(), 0, RingChoice::Caller)?;
        let hand = Hand {
            lane: Mutex::new(Some(lane)),
            log: Mutex::new(Some(log)),
            rounds: Mutex::default(),
        };
        // It is the only one.
        let _ = core.hand.set(hand);
        Ok(())
    }
}

/// The hand at work.
struct Turning<'a> {
    core: &'a Core,
    hand: &'a Hand,
}

impl AllRounds for Turning<'_> {
    fn queues(&mut self) -> bool {
        let asked = free(&self.hand.lane, |lane| lane.as_mut().is_some_and(Lane::step));
        asked.unwrap_or(false)
    }

    fn maintenance(&mut self) -> bool {
        let kept = free(&self.hand.log, |log| {
            let turn = log.as_mut().and_then(LogThread::step);
            if matches!(turn, Some(Turn::Over { .. })) {
                *log = None;
            }
            turn.is_some()
        });
        kept.unwrap_or(false)
    }

    fn scan(&mut self) -> Option<Nanos> {
        free(&self.hand.rounds, |(rounds, due)| {
            if self.core.now() >= *due {
                *due = rounds.turn(self.core);
            }
            *due
        })
    }

    fn due(&mut self) -> Option<Nanos> {
        let map = free(&self.hand.log, |log| log.as_ref().map(LogThread::due)).flatten();
        let written = self.core.back.get().and_then(|back| back.log().wakes(self.core.now()));
        map.into_iter().chain(written).min()
    }
}

impl Core {
    /// Time is `now` from now on, of a cache whose time is [given](ByHand::Given). It does not go back.
    pub fn set_now(&self, now: Nanos) {
        if let Time::Given(at) = &self.time {
            at.fetch_max(now.0, Ordering::SeqCst);
        }
    }

    /// Uses the lane of a cache without threads; `None` where there are, or when it has ended.
    pub fn with_lane<R>(&self, f: impl FnOnce(&mut Lane) -> R) -> Option<R> {
        locked(&self.hand.get()?.lane).as_mut().map(f)
    }

    /// Without threads: an operator's call is under way.
    pub(super) fn is_operated(&self) -> bool {
        self.hand.get().is_some() && self.operators.are_at_work()
    }

    /// See [`super::Running::turn`].
    pub(super) fn turn(&self) -> Option<Nanos> {
        let hand = self.hand.get()?;
        all_rounds(&mut Turning { core: self, hand })
    }

    /// Waits a little for others. Without threads they are oneself, and what is given as time stands.
    pub(super) fn pause(&self, time: Duration) {
        match (self.turn(), &self.time) {
            (None, _) => std::thread::sleep(time),
            (Some(_), Time::Given(_)) => {}
            (Some(due), Time::Runs(_)) => {
                let left = Duration::from_nanos(due.saturating_sub(self.now()).0);
                std::thread::sleep(left.min(time));
            }
        }
    }

    /// Without threads: nothing more is done, as after a kill.
    pub(super) fn abandon(&self) {
        let Some(hand) = self.hand.get() else { return };
        (*locked(&hand.lane), *locked(&hand.log)) = (None, None);
        self.has_stopped();
    }

    /// Without threads: ends as their end does.
    pub(super) fn end_by_hand(&self) {
        let Some(hand) = self.hand.get() else { return };
        *locked(&hand.lane) = None;
        self.leave_for_log(|inbox| inbox.stop());
        while let Some(due) = free(&hand.log, |log| log.as_ref().map(LogThread::due)).flatten() {
            let left = due.saturating_sub(self.now());
            match &self.time {
                Time::Given(_) => self.set_now(due),
                Time::Runs(_) => std::thread::sleep(Duration::from_nanos(left.0)),
            }
            self.turn();
        }
        self.has_stopped();
    }
}
