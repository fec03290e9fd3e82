//! What an operator wants to be cached ahead: how fast it is asked for, group by group, beside clients.
//!
//! Whoever walks over the volume asks [`Prefetch::may_ask`] before each group. While clients are at work there is one group at a
//! time, and a rest as long as it took. Half of what may be on its way to flash is left to clients.

use larder_base::Nanos;

/// Groups asked for at a time, when no client is at work.
const WINDOW: usize = 16;
/// The shortest rest after a group, when one is.
const REST: Nanos = Nanos::from_millis(2);
/// Groups whose lines are on their way to flash, before no more are asked for.
const SETTLING: usize = 1024;
/// A group whose lines are not cached so long after its answer is looked at for the last time.
const PATIENCE: Nanos = Nanos::from_secs(1);
/// Reads of the store that fail one after the other, before it is given up.
const FAILURES: u32 = 16;

/// See the [module](self).
#[derive(Debug)]
pub struct Prefetch {
    /// Lines of a shard that may be on their way to flash.
    most: u32,
    /// What clients had asked for when that was last looked at, and whether it was more than before.
    seen: u64,
    busy: bool,
    rests_until: Nanos,
    failures: u32,
    /// Groups that are asked for, and those answered whose lines are on their way to flash.
    under_way: usize,
    settling: usize,
}

impl Prefetch {
    /// Of a cache in which `fills` lines of a shard may be on their way to flash.
    pub fn new(fills: u32) -> Prefetch {
        Prefetch {
            most: fills / 2,
            seen: 0,
            busy: false,
            rests_until: Nanos::ZERO,
            failures: 0,
            under_way: 0,
            settling: 0,
        }
    }

    /// Clients have asked for so much so far.
    pub fn look_at_clients(&mut self, asked: u64) {
        self.busy = asked != self.seen;
        self.seen = asked;
    }

    /// Whether a group of `lines` lines may be asked for, of a shard of which `filling` are on their way to flash.
    pub fn may_ask(&self, now: Nanos, filling: u32, lines: u32) -> bool {
        let window = if self.busy { 1 } else { WINDOW };
        self.under_way < window
            && self.settling < SETTLING
            && now >= self.rests_until
            && (filling == 0 || filling + lines <= self.most)
    }

    /// A group is asked for.
    pub fn asked(&mut self) {
        self.under_way += 1;
    }

    /// A group that was asked for at `since` is answered. If that went well its lines are on their way to flash.
    pub fn answered(&mut self, now: Nanos, since: Nanos, well: bool) {
        self.under_way = self.under_way.saturating_sub(1);
        if self.busy {
            self.rests_until = now + now.saturating_sub(since).max(REST);
        }
        self.settling += usize::from(well);
        self.failures = if well { 0 } else { self.failures + 1 };
    }

    /// Whether lines of a group that was answered at `since` are looked for once more.
    pub fn waits_for(&self, now: Nanos, since: Nanos) -> bool {
        now.saturating_sub(since) < PATIENCE
    }

    /// The lines of a group have come to flash, or will not come. Returns whether it may be asked for again: a write may have come
    /// in between, or too many fills.
    pub fn settled(&mut self) -> bool {
        self.settling = self.settling.saturating_sub(1);
        self.under_way < WINDOW
    }

    /// So many reads of the store have failed one after the other that it is given up.
    pub fn gives_up(&self) -> Option<u32> {
        (self.failures >= FAILURES).then_some(self.failures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Nanos {
        Nanos::from_millis(millis)
    }

    #[test]
    fn one_group_at_a_time_and_a_rest_while_clients_are_at_work() {
        let mut prefetch = Prefetch::new(100);
        for _ in 0..WINDOW {
            assert!(prefetch.may_ask(at(0), 0, 16));
            prefetch.asked();
        }
        assert!(!prefetch.may_ask(at(0), 0, 16));
        (0..WINDOW).for_each(|_| prefetch.answered(at(5), at(0), true));
        assert!(prefetch.may_ask(at(5), 0, 16), "nobody is at work");
        prefetch.look_at_clients(7);
        prefetch.asked();
        assert!(!prefetch.may_ask(at(5), 0, 16));
        prefetch.answered(at(15), at(5), true);
        assert!(!prefetch.may_ask(at(24), 0, 16) && prefetch.may_ask(at(25), 0, 16));
        prefetch.asked();
        prefetch.answered(at(25), at(25), true);
        assert!(!prefetch.may_ask(at(26), 0, 16) && prefetch.may_ask(at(27), 0, 16));
        prefetch.look_at_clients(7);
        prefetch.asked();
        assert!(prefetch.may_ask(at(27), 0, 16), "clients have left");
    }

    #[test]
    fn half_of_the_fills_are_left_to_clients() {
        let prefetch = Prefetch::new(64);
        assert!(prefetch.may_ask(at(0), 16, 16) && !prefetch.may_ask(at(0), 17, 16));
        assert!(Prefetch::new(16).may_ask(at(0), 0, 16), "one group at least");
    }

    #[test]
    fn a_store_that_fails_is_given_up() {
        let mut prefetch = Prefetch::new(64);
        for _ in 1..FAILURES {
            prefetch.asked();
            prefetch.answered(at(1), at(0), false);
        }
        assert_eq!(prefetch.gives_up(), None);
        prefetch.answered(at(1), at(0), true);
        prefetch.answered(at(1), at(0), false);
        assert_eq!(prefetch.gives_up(), None);
        (1..FAILURES).for_each(|_| prefetch.answered(at(1), at(0), false));
        assert_eq!(prefetch.gives_up(), Some(FAILURES));
        assert!(prefetch.settled() && prefetch.waits_for(at(999), at(0)));
        assert!(!prefetch.waits_for(at(1000), at(0)));
    }
}
