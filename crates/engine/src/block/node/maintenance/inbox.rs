//! What is left for maintenance, by queues and others: when it is to be seen to, and whether that wakes anybody.

use larder_base::Nanos;

use super::Pace;
use crate::block::api::OpId;
use crate::block::node::calls::{Copying, Fill, Load, Out};

/// What there is to do.
#[derive(Debug)]
pub struct Work<B> {
    /// Lines to be written.
    pub fills: Vec<Fill<B>>,
    /// Lines to be moved.
    pub copies: Vec<Copying>,
    /// Pages of the table to be read.
    pub loads: Vec<Load>,
    /// Bits of regions to be made durable: shard and region.
    pub asks: Vec<(u32, u32)>,
    /// The same for whole ranges: whose, first and last region.
    pub ranges: Vec<(OpId, u32, u32)>,
    /// Somebody waits for records to be durable.
    pub commit: bool,
    /// Why the cache device is not to be used any more.
    pub give_up: Option<String>,
}

impl<B> Default for Work<B> {
    fn default() -> Work<B> {
        Work {
            fills: Vec::new(),
            copies: Vec::new(),
            loads: Vec::new(),
            asks: Vec::new(),
            ranges: Vec::new(),
            commit: false,
            give_up: None,
        }
    }
}

/// The mailbox of maintenance. It is put behind a lock, and whoever has the machine sleeps until what it says.
#[derive(Debug)]
pub struct Inbox<B> {
    work: Work<B>,
    pace: Pace,
    /// When what is in it is to be seen to.
    due: Option<Nanos>,
    /// The owner sleeps, until then.
    sleeps: Option<Nanos>,
}

impl<B> Default for Inbox<B> {
    fn default() -> Inbox<B> {
        Inbox::new(Pace::default())
    }
}

impl<B> Inbox<B> {
    /// An empty one.
    pub fn new(pace: Pace) -> Inbox<B> {
        Inbox { work: Work::default(), pace, due: None, sleeps: None }
    }

    /// Leaves what calls of shards have asked for (without what is for queues). Returns whether the owner is to be woken: a
    /// wake-up costs whoever calls, for whom clients wait, several microseconds.
    pub fn leave(&mut self, now: Nanos, out: &mut Out<B>) -> bool {
        let urgent = !out.asks.is_empty() || !out.loads.is_empty();
        let work = &mut self.work;
        work.fills.append(&mut out.fills);
        work.copies.append(&mut out.copies);
        work.loads.append(&mut out.loads);
        work.asks.append(&mut out.asks);
        work.commit |= std::mem::take(&mut out.commit);
        if urgent || work.fills.len() >= self.pace.batch {
            self.wants(now)
        } else {
            self.wants(now + self.pace.gather)
        }
    }

    /// The range `op` waits for the bits of `first..=last`. Returns as [`Inbox::leave`].
    pub fn ask_bits(&mut self, now: Nanos, op: OpId, first: u32, last: u32) -> bool {
        self.work.ranges.push((op, first, last));
        self.wants(now)
    }

    /// The device is not to be used any more. Returns as [`Inbox::leave`].
    pub fn give_up(&mut self, now: Nanos, why: String) -> bool {
        self.work.give_up.get_or_insert(why);
        self.wants(now)
    }

    /// The cache is used again that was given up: why it was to be given up before does not matter any more.
    pub fn resumed(&mut self) {
        self.work.give_up = None;
    }

    fn wants(&mut self, at: Nanos) -> bool {
        let due = self.due.map_or(at, |due| due.min(at));
        self.due = Some(due);
        let wakes = self.sleeps.is_some_and(|until| due < until);
        if wakes {
            self.sleeps = Some(due);
        }
        wakes
    }

    /// The owner has nothing to do before `at`. Returns when it is to look again, if nobody wakes it.
    pub fn sleep(&mut self, at: Nanos) -> Nanos {
        let until = self.due.map_or(at, |due| due.min(at));
        self.sleeps = Some(until);
        until
    }

    /// When what is in it is to be seen to; `None` if it is empty.
    pub fn due(&self) -> Option<Nanos> {
        self.due
    }

    /// Takes what is in it. The owner is awake.
    pub fn take(&mut self) -> Work<B> {
        (self.due, self.sleeps) = (None, None);
        std::mem::take(&mut self.work)
    }
}
