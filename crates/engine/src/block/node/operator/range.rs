//! Lines that an operator has for itself, in all shards.

use larder_base::Nanos;

use super::super::calls::{Calls, Out, Shard, call};
use super::super::event::Host;
use super::super::ranged::{Discard, Progress};
use crate::block::api::{LineId, OpId};

/// Lines `first..=last`: shard by shard, in ascending order, each gives its part when what is under way there has ended. Then
/// nothing is under way in any of them and nothing begins, until the range is [let go of](Range::let_go).
///
/// It takes none of the [turns](super::super::ranged::Turns) of clients' ranges. Several operators may have ranges at a time.
#[derive(Debug)]
pub struct Range {
    id: OpId,
    progress: Progress,
    shards: u32,
    /// The next shard has been asked.
    asked: bool,
    discard: Option<(u32, Discard)>,
}

impl Range {
    /// Lines `first..=last` for operation `id`, whose thread has the mailbox.
    pub fn new(id: OpId, first: LineId, last: LineId, shards: u32) -> Range {
        let progress = Progress::new(first, last, shards);
        Range { id, progress, shards, asked: false, discard: None }
    }

    /// Whether all shards have given it.
    pub fn is_given(&self) -> bool {
        self.progress.next().is_none()
    }

    /// Whether a shard was asked for its part and has not given it.
    pub fn is_asked(&self) -> bool {
        self.asked
    }

    /// Asks the next shard for its part, if that was not done yet. When the shard gives it, a
    /// [`Done`](super::super::calls::Message::Done) is in the mailbox, at once or later.
    pub fn ask<H: Host, N: Calls<H>>(&mut self, node: &N, now: Nanos, out: &mut Out<H::Bytes>) {
        let Some(shard) = self.progress.next().filter(|_| !self.asked) else { return };
        self.asked = true;
        let (id, Progress { first, last, .. }) = (self.id, self.progress);
        call(node, shard, None, out, |s, fx| s.lock_range(now, id, first, last, fx));
    }

    /// The shard that was asked has given its part.
    pub fn given(&mut self) {
        if std::mem::take(&mut self.asked) {
            self.progress.given();
        }
    }

    /// One turn at one shard in taking lines `first..=last`, which are all of the range or a part of it, out of the map: `steps`
    /// slots or groups are looked at. Returns how many lines have left; `None` if that was all before.
    pub fn drop_lines<H: Host, N: Calls<H>>(
        &mut self,
        node: &N,
        (first, last): (LineId, LineId),
        steps: u32,
        out: &mut Out<H::Bytes>,
    ) -> Option<u64> {
        let begin = || (0, Discard::lines(first, last, steps));
        let (shard, discard) = self.discard.get_or_insert_with(begin);
        if *shard >= self.shards {
            self.discard = None;
            return None;
        }
        let (more, dropped) = call(node, *shard, None, out, |s, _| {
            let before = s.dropped();
            let more = discard.turn(s);
            (more, s.dropped() - before)
        });
        if !more {
            (*shard, *discard) = (*shard + 1, Discard::lines(first, last, steps));
        }
        Some(dropped)
    }

    /// What waits for these lines goes on; those that were asked for and not given are not wanted any more.
    pub fn let_go<H: Host, N: Calls<H>>(self, node: &N, now: Nanos, out: &mut Out<H::Bytes>) {
        for shard in 0..self.shards {
            // Who gets them next may be another operator, who has the same mailbox: all are woken.
            call(node, shard, None, out, |s, fx| s.unlock_range(now, self.id, fx));
        }
    }
}
