//! Servers that are waited for.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use larder_base::Nanos;

/// So many equal servers, first come, first served. Work is known in the order in which requests are issued, and some of
/// it begins later (after a slow read of the filer): what has to be waited for is what was there at the issue, so that
/// nobody waits for what has not begun.
#[derive(Debug)]
pub(super) struct Servers(BinaryHeap<Reverse<Nanos>>);

impl Servers {
    pub(super) fn new(count: u16) -> Servers {
        Servers((0..count.max(1)).map(|_| Reverse(Nanos::ZERO)).collect())
    }

    /// When work of `span` is done that comes at `at`, of a request that was issued at `now`. `now` never goes back.
    pub(super) fn serve(&mut self, now: Nanos, at: Nanos, span: Nanos) -> Nanos {
        let free = self.0.pop().map_or(Nanos::ZERO, |Reverse(at)| at);
        let wait = free.saturating_sub(now);
        self.0.push(Reverse(now + wait + span));
        at + wait + span
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_waits_for_work_and_not_for_the_future() {
        let us = Nanos::from_micros;
        let mut two = Servers::new(2);
        let done: Vec<Nanos> =
            (0..3).map(|_| two.serve(Nanos::ZERO, Nanos::ZERO, us(10))).collect();
        assert_eq!(done, [us(10), us(10), us(20)]);
        let mut one = Servers::new(1);
        // What begins 8 ms later does not hold up who comes at 50 µs.
        assert_eq!(one.serve(Nanos::ZERO, us(8_000), us(10)), us(8_010));
        assert_eq!(one.serve(us(50), us(50), us(10)), us(60));
    }
}
