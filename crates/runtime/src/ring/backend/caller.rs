//! Operations on the thread that asks for them: for programs that want no threads, where everything happens in order.

use std::collections::VecDeque;

use super::super::event::Event;
use super::{Done, Work};

/// Operations end when they are submitted, and are taken in that order.
pub(in crate::ring) struct Caller<W: Work> {
    context: W::Context,
    event: Event,
    done: VecDeque<Done<W>>,
}

impl<W: Work> Caller<W> {
    pub(super) fn new(context: W::Context, event: Event) -> Caller<W> {
        Caller { context, event, done: VecDeque::new() }
    }

    pub(super) fn submit(&mut self, mut work: W) {
        let result = work.perform(&self.context);
        self.done.push_back((work, result));
        if self.done.len() == 1 {
            self.event.signal();
        }
    }

    pub(super) fn pop(&mut self) -> Option<Done<W>> {
        self.done.pop_front()
    }
}
