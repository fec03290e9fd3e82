//! Servers that are waited for.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use larder_base::Nanos;

/// So many equal servers, first come, first served.
#[derive(Debug)]
pub(super) struct Servers(BinaryHeap<Reverse<Nanos>>);

impl Servers {
    pub(super) fn new(count: u16) -> Servers {
        Servers((0..count.max(1)).map(|_| Reverse(Nanos::ZERO)).collect())
    }

    /// When work of `span` that comes at `now` is done.
    pub(super) fn serve(&mut self, now: Nanos, span: Nanos) -> Nanos {
        let free = self.0.pop().map_or(Nanos::ZERO, |Reverse(at)| at);
        let done = Nanos(free.0.max(now.0)) + span;
        self.0.push(Reverse(done));
        done
    }
}
