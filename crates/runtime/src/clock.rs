//! The two clocks, read together.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use larder_base::{Nanos, Now, UnixSecs};
use rustix::time::{ClockId, clock_gettime};

const SECOND: i64 = 1_000_000_000;

/// Wall and monotonic time of a process, shared by its threads.
///
/// Monotonic time counts from the clock's start. Wall time never goes back within a process: it is monotonic time plus
/// the largest difference between the two that was ever seen. A wall clock that is set forward is followed at once; one
/// that is set back is not followed (expired objects would come back to life), but time goes on, so that relative
/// expiries keep their length; [`Clock::behind`] reports by how much the system's clock lies behind. The same holds from one
/// process to the next where the latest time is kept in memory that outlives it ([`Clock::keep_in`], [`Clock::not_before`]).
#[derive(Debug)]
pub struct Clock {
    /// CLOCK_MONOTONIC at the start, nanoseconds.
    start: i64,
    /// Largest wall minus monotonic seen, nanoseconds.
    skew: AtomicI64,
    /// By how much the wall clock was behind when last read, nanoseconds.
    behind: AtomicU64,
    /// Whether the test command has touched the clock: the only case that takes the lock.
    adjusted: AtomicBool,
    adjustment: Mutex<Adjustment>,
    /// Where the latest wall time that was ever told is kept, Unix seconds.
    kept: OnceLock<&'static AtomicU64>,
}

#[derive(Debug, Default)]
struct Adjustment {
    secs: i64,
    paused_at: Option<Now>,
}

/// What the system's clocks say, nanoseconds.
#[derive(Clone, Copy)]
struct Reading {
    wall: i64,
    mono: i64,
}

impl Reading {
    /// Wall first: a delay between the two makes the difference too small, never too large, and only the largest
    /// counts.
    fn take() -> Reading {
        // By way of libc, so that a clock that a test puts before it is seen; the other has no such use.
        let wall = match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
            Err(before) => -i64::try_from(before.duration().as_nanos()).unwrap_or(i64::MAX),
        };
        let mono = nanos(clock_gettime(ClockId::Monotonic));
        Reading { wall, mono }
    }
}

fn nanos(t: rustix::time::Timespec) -> i64 {
    t.tv_sec.saturating_mul(SECOND).saturating_add(i64::from(t.tv_nsec as i32))
}

impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        Clock::start_at(Reading::take())
    }

    fn start_at(reading: Reading) -> Clock {
        Clock {
            start: reading.mono,
            skew: AtomicI64::new(reading.wall.saturating_sub(reading.mono)),
            behind: AtomicU64::new(0),
            adjusted: AtomicBool::new(false),
            adjustment: Mutex::default(),
            kept: OnceLock::new(),
        }
    }

    /// The time now. Two calls into the vDSO, no system call.
    pub fn now(&self) -> Now {
        let now = self.at(Reading::take());
        let now = if self.adjusted.load(Ordering::Relaxed) { self.adjust(now) } else { now };
        // Before anything is judged by it: a kill right behind that must find it.
        if let Some(kept) = self.kept.get()
            && kept.load(Ordering::Relaxed) < u64::from(now.wall.0)
        {
            kept.fetch_max(u64::from(now.wall.0), Ordering::Relaxed);
        }
        now
    }

    /// From now on `word` holds the latest wall time that this clock has told, Unix seconds, or what it held if that is
    /// later. Only the first call has an effect.
    pub fn keep_in(&self, word: &'static AtomicU64) {
        if self.kept.set(word).is_ok() {
            self.now();
        }
    }

    /// Wall time is not before `latest` from now on: what an earlier process saw expire stays expired. Tells by how much the
    /// system's clock lies behind it, if it does.
    pub fn not_before(&self, latest: UnixSecs) -> Option<Nanos> {
        self.not_before_at(Reading::take(), latest)
    }

    fn not_before_at(&self, reading: Reading, latest: UnixSecs) -> Option<Nanos> {
        if self.at(reading).wall >= latest {
            return None;
        }
        let latest = i64::from(latest.0) * SECOND;
        self.skew.fetch_max(latest.saturating_sub(reading.mono), Ordering::Relaxed);
        let behind = latest.saturating_sub(reading.wall).max(0) as u64;
        // Whoever asks says so; it need not be said again at the next look.
        self.behind.store(behind.max(SECOND as u64), Ordering::Relaxed);
        Some(Nanos(behind))
    }

    fn at(&self, reading: Reading) -> Now {
        let seen = reading.wall.saturating_sub(reading.mono);
        let skew = self.skew.fetch_max(seen, Ordering::Relaxed).max(seen);
        let behind = skew.saturating_sub(seen).max(0) as u64;
        let before = self.behind.swap(behind, Ordering::Relaxed);
        if behind >= SECOND as u64 && before < SECOND as u64 {
            tracing::warn!(
                seconds = behind / SECOND as u64,
                "the system's clock was set back; expiry goes on by the old time"
            );
        }
        let wall = reading.mono.saturating_add(skew) / SECOND;
        Now {
            mono: Nanos(reading.mono.saturating_sub(self.start).max(0) as u64),
            wall: UnixSecs(wall.clamp(0, i64::from(u32::MAX)) as u32),
        }
    }

    /// By how much the system's wall clock is behind this one because it was set back.
    pub fn behind(&self) -> Nanos {
        Nanos(self.behind.load(Ordering::Relaxed))
    }

    fn adjust(&self, now: Now) -> Now {
        let adjustment = self.adjustment.lock().unwrap_or_else(PoisonError::into_inner);
        let now = adjustment.paused_at.unwrap_or(now);
        let wall = i64::from(now.wall.0).saturating_add(adjustment.secs);
        Now {
            mono: Nanos(
                now.mono.0.saturating_add_signed(adjustment.secs.max(0).saturating_mul(SECOND)),
            ),
            wall: UnixSecs(wall.clamp(0, i64::from(u32::MAX)) as u32),
        }
    }

    /// Moves both clocks by so many seconds, for the hidden test command `debugtime`. Only here may wall time go back
    /// (monotonic time then stays at no adjustment).
    pub fn debug_advance(&self, secs: i64) {
        let mut adjustment = self.adjustment.lock().unwrap_or_else(PoisonError::into_inner);
        adjustment.secs = adjustment.secs.saturating_add(secs);
        self.adjusted.store(true, Ordering::Relaxed);
    }

    /// Stops or restarts both clocks, for the hidden test command `debugtime`.
    pub fn debug_pause(&self, paused: bool) {
        let now = self.at(Reading::take());
        let mut adjustment = self.adjustment.lock().unwrap_or_else(PoisonError::into_inner);
        adjustment.paused_at = if paused { adjustment.paused_at.or(Some(now)) } else { None };
        self.adjusted.store(true, Ordering::Relaxed);
    }
}

/// A worker's view of the clock: read once per turn of its event loop, so that everything in a turn has one time.
#[derive(Debug)]
pub struct TurnClock {
    clock: Arc<Clock>,
    now: Now,
}

impl TurnClock {
    /// A view of `clock`, read now.
    pub fn new(clock: Arc<Clock>) -> TurnClock {
        let now = clock.now();
        TurnClock { clock, now }
    }

    /// The time of this turn.
    pub fn now(&self) -> Now {
        self.now
    }

    /// Begins a turn.
    pub fn refresh(&mut self) -> Now {
        self.now = self.clock.now();
        self.now
    }

    /// The clock behind it.
    pub fn clock(&self) -> &Arc<Clock> {
        &self.clock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(wall_secs: i64, mono_secs: i64) -> Reading {
        Reading { wall: wall_secs * SECOND, mono: mono_secs * SECOND }
    }

    #[test]
    fn wall_time_follows_forward_steps_and_outlives_backward_ones() {
        let clock = Clock::start_at(reading(1_000, 50));
        assert_eq!(clock.at(reading(1_000, 50)), Now { mono: Nanos::ZERO, wall: UnixSecs(1_000) });
        assert_eq!(
            clock.at(reading(1_010, 60)),
            Now { mono: Nanos::from_secs(10), wall: UnixSecs(1_010) }
        );
        assert_eq!(clock.at(reading(5_000, 61)).wall, UnixSecs(5_000), "set forward: followed");
        assert_eq!(clock.behind(), Nanos::ZERO);
        assert_eq!(
            clock.at(reading(1_012, 62)).wall,
            UnixSecs(5_001),
            "set back: goes on at its own pace"
        );
        assert_eq!(clock.behind(), Nanos::from_secs(3_989));
        assert_eq!(clock.at(reading(1_112, 162)).wall, UnixSecs(5_101));
        assert_eq!(clock.at(reading(9_000, 163)).wall, UnixSecs(9_000));
        assert_eq!(clock.behind(), Nanos::ZERO);
    }

    #[test]
    fn a_clock_that_was_set_back_while_nobody_ran_is_not_followed_either() {
        let clock = Clock::start_at(reading(1_000, 50));
        assert_eq!(clock.not_before_at(reading(1_000, 50), UnixSecs(1_000)), None);
        let behind = clock.not_before_at(reading(1_001, 51), UnixSecs(1_101));
        assert_eq!(behind, Some(Nanos::from_secs(100)));
        assert_eq!(clock.at(reading(1_001, 51)).wall, UnixSecs(1_101));
        assert_eq!(clock.at(reading(1_011, 61)).wall, UnixSecs(1_111), "and goes on");
        assert_eq!(clock.behind(), Nanos::from_secs(100));
        assert_eq!(clock.at(reading(1_200, 62)).wall, UnixSecs(1_200), "set right: followed");
        assert_eq!(clock.behind(), Nanos::ZERO);
        assert_eq!(clock.not_before_at(reading(1_201, 63), UnixSecs(900)), None);
        let absurd = clock.not_before_at(reading(1_202, 64), UnixSecs(u32::MAX));
        assert!(absurd.is_some() && clock.at(reading(1_203, 65)).wall == UnixSecs(u32::MAX));
    }

    #[test]
    fn the_latest_time_is_kept_before_it_is_told() {
        static KEPT: AtomicU64 = AtomicU64::new(7);
        let clock = Clock::start();
        clock.keep_in(&KEPT);
        clock.debug_advance(1_000);
        let ahead = clock.now().wall;
        assert_eq!(KEPT.load(Ordering::Relaxed), u64::from(ahead.0));
        clock.debug_advance(-1_000);
        assert!(clock.now().wall < ahead && KEPT.load(Ordering::Relaxed) == u64::from(ahead.0));
    }

    #[test]
    fn absurd_clocks_do_not_overflow() {
        let clock = Clock::start_at(Reading { wall: i64::MAX, mono: 5 });
        assert_eq!(clock.at(Reading { wall: i64::MAX, mono: i64::MAX }).wall, UnixSecs(u32::MAX));
        let clock = Clock::start_at(Reading { wall: -SECOND, mono: 5 });
        assert_eq!(clock.at(Reading { wall: -SECOND, mono: 0 }), Now::default());
    }

    #[test]
    fn time_passes_and_is_the_systems() {
        let clock = Arc::new(Clock::start());
        let mut turn = TurnClock::new(clock.clone());
        let first = turn.now();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(turn.now(), first, "one time per turn");
        assert!(turn.refresh().mono.saturating_sub(first.mono) >= Nanos::from_millis(20));
        let system =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        assert!(u64::from(clock.now().wall.0).abs_diff(system) <= 1);
    }

    #[test]
    fn the_test_command_moves_and_stops_it() {
        let clock = Clock::start();
        let before = clock.now();
        clock.debug_advance(100);
        let after = clock.now();
        assert!((100..=101).contains(&(after.wall.0 - before.wall.0)));
        assert!(after.mono.saturating_sub(before.mono) >= Nanos::from_secs(100));
        clock.debug_pause(true);
        let paused = clock.now();
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(clock.now(), paused);
        clock.debug_advance(-50);
        assert_eq!(clock.now().wall.0, paused.wall.0 - 50);
        clock.debug_pause(false);
        assert_ne!(clock.now().mono, paused.mono);
    }
}
