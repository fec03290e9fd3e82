//! How fast writes of one volume are acknowledged while it is more than half as dirty as it may be.
//!
//! `x` is the share of the bound that is held, `r` the rate at which the store takes what is dirty:
//!
//! ```text
//! rate(x) = max( r · (1 − x₀) / (x − x₀),  (1 − x) · bound / 60 s )    x₀ = 0.5; unlimited below, nothing at x = 1
//! ```
//!
//! Near the bound the first term is `r`: clients go as fast as the store. The second spends the rest smoothly while the store is
//! away. The *acknowledgement* is delayed, never the admission to the log: a write that had to wait to come into the log would depend
//! on the one before it, and windows would shrink to one write.
//!
//! A volume whose log writes more to flash than the write budget has is *slowed*: what counts is not the bound then, but `b`, what its
//! store takes in a second (at least 1 MiB, at most the bound), so that the log holds as much as keeps the store busy, and clients go as fast as the
//! store does:
//!
//! ```text
//! rate(x) = r · max( (1 − x₀) / (x − x₀),  1/2 )    x = held / b
//! ```
//!
//! What is held beyond `b` is worked off at half of the store's rate beside what is answered: nobody waits for all of it.

use larder_base::Nanos;

/// Below this share of the bound nothing is delayed.
const FREE: f64 = 0.5;
/// Whether a volume that holds so much of its bound has its writes delayed. From there on, too, it is destaged whatever its pace is.
pub fn is_delayed(held: u64, bound: u64) -> bool {
    held as f64 >= FREE * bound as f64
}

/// What is left of the bound lasts so long while the store takes nothing, seconds.
const SPEND: f64 = 60.0;
/// What was destaged so long ago counts 1/e of what is destaged now, seconds.
const MEMORY: f64 = 5.0;

/// A rate is known that was measured less than so long ago,
const KNOWN: Nanos = Nanos::from_secs(10);
/// and is at least so many bytes a second.
const LEAST_RATE: f64 = 1024.0;

/// Clients have been writing as long as the last write was answered less than so long ago.
const PAUSE: Nanos = Nanos::from_millis(100);

/// A volume that is slowed is to hold what its store takes in so long, seconds.
const SLOWED: f64 = 1.0;
/// However much a volume holds that is slowed, it is answered at this part of its store's rate.
const LEAST: f64 = 0.5;

/// How old dirty data of a volume may become: the time since its oldest write was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age {
    /// So old.
    pub most: Nanos,
    /// No write is answered while the oldest is older, so that a cache that is lost costs a span of at most that long. Else it is an aim.
    pub hard: bool,
}

impl Age {
    /// A window is to take at most so long: a part of what is allowed.
    const WINDOW: u64 = 4;

    /// From when on what was answered at `oldest` goes to the store, whatever else is waited for.
    pub fn presses(&self, oldest: Nanos) -> Nanos {
        Nanos(oldest.0.saturating_add(self.most.0 / 2))
    }

    /// Whether what was answered at `oldest` is older than it may be.
    pub fn is_over(&self, now: Nanos, oldest: Nanos) -> bool {
        now.saturating_sub(oldest) > self.most
    }

    /// Most bytes of a window, where so many a second came to the store of late.
    pub fn window(&self, rate: f64) -> u64 {
        let seconds = (self.most.0 / Age::WINDOW) as f64 / 1e9;
        ((rate * seconds) as u64).max(LEAST_WINDOW)
    }
}

/// A window of fewer bytes gains nothing: what it takes is the store's flush.
const LEAST_WINDOW: u64 = 1 << 20;

/// The throttle of one volume.
#[derive(Clone, Debug)]
pub struct Throttle {
    /// Bytes of log that the volume may hold.
    bound: u64,
    /// Bytes per second that were destaged of late, as of `measured`.
    rate: f64,
    measured: Nanos,
    /// When the last write was acknowledged.
    last: Nanos,
}

impl Throttle {
    /// Of a volume that may hold so many bytes of the log.
    pub fn new(bound: u64, now: Nanos) -> Throttle {
        Throttle { bound, rate: 0.0, measured: now, last: now }
    }

    /// The bound has changed: a volume that holds more is slowed, not refused.
    pub fn set_bound(&mut self, bound: u64) {
        self.bound = bound;
    }

    /// Bytes of log that the volume may hold.
    pub fn bound(&self) -> u64 {
        self.bound
    }

    /// The store has taken so many bytes of log since the last call.
    pub fn destaged(&mut self, now: Nanos, bytes: u64) {
        self.rate = self.rate_at(now) + bytes as f64 / MEMORY;
        self.measured = self.measured.max(now);
    }

    /// Bytes per second that are destaged.
    pub fn rate_at(&self, now: Nanos) -> f64 {
        let since = now.saturating_sub(self.measured).0 as f64 / 1e9;
        self.rate * (-since / MEMORY).exp()
    }

    /// The same for those who look: nothing where the store has taken nothing of late, or next to nothing.
    pub fn known_rate(&self, now: Nanos) -> Option<f64> {
        let rate = self.rate_at(now);
        (now.saturating_sub(self.measured) < KNOWN && rate >= LEAST_RATE).then_some(rate)
    }

    /// How long the store takes for so many bytes of log at the rate of now; `None` where that is not known.
    pub fn time_left(&self, now: Nanos, held: u64) -> Option<Nanos> {
        self.known_rate(now).map(|rate| Nanos((held as f64 / rate * 1e9) as u64))
    }

    /// When a write of `bytes` of log may be acknowledged whose device write is done, while `held` are held: `None` for not before
    /// some are destaged. It changes with both, so it is asked again whenever they do.
    pub fn due(&self, now: Nanos, held: u64, bytes: u64) -> Option<Nanos> {
        let share = held as f64 / self.bound.max(1) as f64;
        if share <= FREE {
            return Some(now);
        }
        if share >= 1.0 {
            return None;
        }
        let by_store = self.rate_at(now) * (1.0 - FREE) / (share - FREE);
        let by_rest = (1.0 - share) * self.bound as f64 / SPEND;
        let wait = bytes as f64 / by_store.max(by_rest);
        let wait = Nanos((wait * 1e9).min(u64::MAX as f64 / 2.0) as u64);
        Some(Nanos(self.last.0.saturating_add(wait.0)).max(now.min(self.last)).max(self.last))
    }

    /// Of so many writes to the store at a time, how many destage takes while it is in no hurry. Client and destage share processors, flash and store,
    /// so below half of the bound destage takes the part of its depth that half of the bound is held: it takes as much as comes where the store can, and
    /// a burst goes ahead. When clients pause it takes all: `None`.
    pub fn destages(&self, now: Nanos, held: u64, depth: u32) -> Option<u32> {
        if now.saturating_sub(self.last) >= PAUSE {
            return None;
        }
        let share = held as f64 / (self.bound as f64 * FREE).max(1.0);
        Some(((f64::from(depth) * share).ceil() as u32).clamp(1, depth.max(1)))
    }

    /// What the volume is to hold while it is slowed: what its store takes in a second.
    pub fn slowed_bound(&self, now: Nanos) -> u64 {
        ((self.rate_at(now) * SLOWED) as u64).max(LEAST_WINDOW).min(self.bound)
    }

    /// The same as [`Throttle::due`] while the volume is slowed to its store's rate.
    pub fn due_slowed(&self, now: Nanos, held: u64, bytes: u64) -> Option<Nanos> {
        let due = self.due(now, held, bytes)?;
        let share = held as f64 / self.slowed_bound(now).max(1) as f64;
        if share <= FREE {
            return Some(due);
        }
        let rate = self.rate_at(now) * ((1.0 - FREE) / (share - FREE)).max(LEAST);
        if rate < 1.0 {
            return None;
        }
        let wait = Nanos((bytes as f64 / rate * 1e9).min(u64::MAX as f64 / 2.0) as u64);
        Some(due.max(Nanos(self.last.0.saturating_add(wait.0))))
    }

    /// A write was acknowledged.
    pub fn acknowledged(&mut self, now: Nanos) {
        self.last = self.last.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn seconds(s: f64) -> Nanos {
        Nanos((s * 1e9) as u64)
    }

    /// Clients that write at once when they are answered, before a store of this rate; what they get per second, over the second half.
    fn sustained(bound: u64, store: f64, clients: usize) -> (f64, f64, f64) {
        sustained_so(bound, store, clients, false)
    }

    fn sustained_so(bound: u64, store: f64, clients: usize, slowed: bool) -> (f64, f64, f64) {
        let bytes = 4096u64;
        let mut throttle = Throttle::new(bound, Nanos(0));
        let (mut now, mut held, mut done) = (0.0, 0u64, 0u64);
        let (mut gap, mut last, mut late) = (0.0f64, 0.0, 0u64);
        let (mut waiting, step, end) = (clients, 0.001, 60.0);
        let mut owed = 0.0;
        held += bytes * waiting as u64;
        while now < end {
            now += step;
            owed += store * step;
            let take = ((owed as u64).min(held)) / bytes * bytes;
            if take > 0 {
                held -= take;
                owed -= take as f64;
                throttle.destaged(seconds(now), take);
            }
            let due = |throttle: &Throttle, held| match slowed {
                true => throttle.due_slowed(seconds(now), held, bytes),
                false => throttle.due(seconds(now), held, bytes),
            };
            while waiting > 0 && due(&throttle, held).is_some_and(|at| at <= seconds(now)) {
                throttle.acknowledged(seconds(now));
                done += 1;
                // The client writes again; the log admits it at once.
                held += bytes;
                if now > end / 2.0 {
                    late += 1;
                    gap = gap.max(now - last);
                }
                last = now;
                waiting -= 1;
            }
            waiting = clients;
            let _ = done;
        }
        (late as f64 * bytes as f64 / (end / 2.0), gap, held as f64 / bound as f64)
    }

    #[test]
    fn below_half_of_the_bound_nothing_waits() {
        let throttle = Throttle::new(100 * MIB, Nanos(0));
        assert_eq!(throttle.due(Nanos(7), 50 * MIB, 4096), Some(Nanos(7)));
        assert_eq!(throttle.due(Nanos(7), 100 * MIB, 4096), None);
        assert_eq!(throttle.due(Nanos(7), 200 * MIB, 4096), None);
    }

    #[test]
    fn while_clients_write_destage_takes_the_part_of_its_depth_that_half_of_the_bound_is_held() {
        let mut throttle = Throttle::new(100 * MIB, Nanos(0));
        throttle.acknowledged(seconds(1.0));
        let at = |held: u64| throttle.destages(seconds(1.05), held * MIB, 64);
        assert_eq!([0, 1, 10, 25, 50, 90].map(at), [1, 2, 13, 32, 64, 64].map(Some));
        // They pause.
        assert_eq!(throttle.destages(seconds(1.1), MIB, 64), None);
        // There is no bound yet.
        assert_eq!(Throttle::new(0, seconds(1.0)).destages(seconds(1.0), 0, 64), Some(1));
    }

    #[test]
    fn a_rate_of_long_ago_is_none_and_no_time_is_left_at_it() {
        let mut throttle = Throttle::new(100 * MIB, Nanos(0));
        assert_eq!(throttle.time_left(seconds(1.0), MIB), None);
        assert_eq!(throttle.known_rate(seconds(1.0)), None);
        throttle.destaged(seconds(10.0), 5_000_000);
        assert_eq!(throttle.time_left(seconds(10.0), 3_000_000), Some(seconds(3.0)));
        assert_eq!(throttle.known_rate(seconds(10.0)), Some(1_000_000.0));
        assert_eq!(throttle.known_rate(seconds(20.0)), None);
        assert!(throttle.time_left(seconds(15.0), 3_000_000).is_some());
        assert_eq!(throttle.time_left(seconds(20.0), 3_000_000), None);
        throttle.destaged(seconds(100.0), 4096);
        assert_eq!(throttle.time_left(seconds(100.0), 3_000_000), None);
    }

    /// The formula itself, at points worked out by hand.
    #[test]
    fn the_rate_is_the_formulas() {
        let mut throttle = Throttle::new(100 * MIB, Nanos(0));
        // 5 MB within one instant count as 1 MB/s.
        throttle.destaged(seconds(10.0), 5_000_000);
        throttle.acknowledged(seconds(10.0));
        let wait = |share: f64| {
            let held = (share * (100 * MIB) as f64) as u64;
            let due = throttle.due(seconds(10.0), held, 1_000_000).unwrap();
            (due - seconds(10.0)).0 as f64 / 1e9
        };
        // r · 0.5 / 0.25 = 2 r at x = 0.75; r · 0.5 / 0.45 at 0.95.
        assert!((wait(0.75) - 0.5).abs() < 1e-3, "{}", wait(0.75));
        assert!((wait(0.95) - 0.9).abs() < 1e-3, "{}", wait(0.95));
        // The store is gone: what is left lasts a minute.
        let gone = Throttle::new(60 * MIB, Nanos(0));
        let due = gone.due(Nanos(0), 45 * MIB, MIB).unwrap();
        assert!((due.0 as f64 / 1e9 - 4.0).abs() < 1e-3, "{due:?}");
    }

    /// Far below its bound a volume that is slowed goes as fast as its store, whatever that is, and holds a second of it.
    #[test]
    fn slowed_clients_go_as_fast_as_the_store() {
        for store in [400_000.0, 4_000_000.0, 40_000_000.0] {
            let (rate, gap, share) = sustained_so(1 << 30, store, 16, true);
            assert!((rate / store - 1.0).abs() < 0.05, "{rate} of {store}");
            assert!(gap < 0.5, "{gap} s at {store}");
            let second = store.max(LEAST_WINDOW as f64) / (1u64 << 30) as f64;
            assert!(share < 1.1 * second, "{share} at {store}");
        }
    }

    /// What was held when it began is worked off, and clients go on at half of the store's rate meanwhile.
    #[test]
    fn what_is_held_beyond_is_worked_off_while_clients_go_on() {
        let mut throttle = Throttle::new(1 << 30, Nanos(0));
        throttle.destaged(seconds(10.0), 50_000_000);
        throttle.acknowledged(seconds(10.0));
        let due = throttle.due_slowed(seconds(10.0), 400_000_000, 1_000_000).unwrap();
        assert!(((due - seconds(10.0)).0 as f64 / 1e9 - 0.2).abs() < 1e-3, "{due:?}");
        assert_eq!(throttle.due_slowed(seconds(10.0), 1 << 30, 4096), None);
        assert_eq!(throttle.due_slowed(seconds(10.0), 4096, 4096), Some(seconds(10.0)));
    }

    #[test]
    fn clients_at_the_bound_go_as_fast_as_the_store_without_a_cliff() {
        for store in [400_000.0, 4_000_000.0] {
            let (rate, gap, share) = sustained(8 * MIB, store, 16);
            assert!((rate / store - 1.0).abs() < 0.05, "{rate} of {store}");
            assert!(gap < 16.0 * 4096.0 / store * 5.0, "{gap} s at {store}");
            assert!(share < 1.02, "{share}");
        }
    }
}
