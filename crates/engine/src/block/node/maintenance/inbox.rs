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
    /// Whose writes wait until the write budget's file says more.
    pub budget: Vec<OpId>,
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
            budget: Vec::new(),
            commit: false,
            give_up: None,
        }
    }
}

/// All that was left.
#[derive(Debug)]
pub struct Left<B, T> {
    /// For [`Maintenance::take`](super::Maintenance::take).
    pub work: Work<B>,
    /// Tasks of operators.
    pub tasks: Vec<T>,
    /// The run is to end.
    pub stop: bool,
}

impl<B, T> Default for Left<B, T> {
    fn default() -> Left<B, T> {
        Left { work: Work::default(), tasks: Vec::new(), stop: false }
    }
}

/// The mailbox of maintenance. It is put behind a lock, and whoever has the machine sleeps until what it says: who leaves something
/// wakes it if it sleeps for longer, and who goes to sleep looks first. `T` is what an operator has done by that thread.
#[derive(Debug)]
pub struct Inbox<B, T = ()> {
    left: Left<B, T>,
    pace: Pace,
    /// When what is in it is to be seen to.
    due: Option<Nanos>,
    /// The owner sleeps, until then.
    sleeps: Option<Nanos>,
    #[cfg(feature = "planted")]
    fault: Option<InboxFault>,
}

/// A fault planted in an inbox, to check the checker: the protocol of sleep and wake-up is tried by a scheduler, which must find
/// each.
#[cfg(feature = "planted")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InboxFault {
    /// Who leaves something wakes nobody.
    NobodyIsWoken,
    /// The owner goes to sleep without a look at what was left since it was at work.
    SleepsWithoutALook,
    /// A task is left without a word of when it is to be done.
    TaskIsNotDue,
}

impl<B, T> Default for Inbox<B, T> {
    fn default() -> Inbox<B, T> {
        Inbox::new(Pace::default())
    }
}

impl<B, T> Inbox<B, T> {
    /// An empty one.
    pub fn new(pace: Pace) -> Inbox<B, T> {
        Inbox {
            left: Left::default(),
            pace,
            due: None,
            sleeps: None,
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: InboxFault) {
        self.fault = Some(fault);
    }

    /// Leaves what calls of shards have asked for (without what is for queues). Returns whether the owner is to be woken: a
    /// wake-up costs whoever calls, for whom clients wait, several microseconds.
    pub fn leave(&mut self, now: Nanos, out: &mut Out<B>) -> bool {
        let urgent = !out.asks.is_empty() || !out.loads.is_empty();
        let work = &mut self.left.work;
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
        self.left.work.ranges.push((op, first, last));
        self.wants(now)
    }

    /// A write of `op` waits until the write budget's file says more. Returns as [`Inbox::leave`].
    pub fn ask_budget(&mut self, now: Nanos, op: OpId) -> bool {
        self.left.work.budget.push(op);
        self.wants(now)
    }

    /// The device is not to be used any more. Returns as [`Inbox::leave`].
    pub fn give_up(&mut self, now: Nanos, why: String) -> bool {
        self.left.work.give_up.get_or_insert(why);
        self.wants(now)
    }

    /// The cache is used again that was given up: why it was to be given up before does not matter any more.
    pub fn resumed(&mut self) {
        self.left.work.give_up = None;
    }

    /// An operator has something done, with the next round, which is due at once. Returns as [`Inbox::leave`].
    pub fn task(&mut self, task: T) -> bool {
        self.left.tasks.push(task);
        #[cfg(feature = "planted")]
        if self.fault == Some(InboxFault::TaskIsNotDue) {
            return false;
        }
        self.wants(Nanos::ZERO)
    }

    /// The run is to end. Returns as [`Inbox::leave`].
    pub fn stop(&mut self) -> bool {
        self.left.stop = true;
        self.wants(Nanos::ZERO)
    }

    /// The owner is gone: no task is done any more.
    pub fn forget_tasks(&mut self) {
        self.left.tasks.clear();
    }

    fn wants(&mut self, at: Nanos) -> bool {
        let due = self.due.map_or(at, |due| due.min(at));
        self.due = Some(due);
        let wakes = self.sleeps.is_some_and(|until| due < until);
        if wakes {
            self.sleeps = Some(due);
        }
        #[cfg(feature = "planted")]
        if self.fault == Some(InboxFault::NobodyIsWoken) {
            return false;
        }
        wakes
    }

    /// The owner has nothing to do before `at`: see [`Maintenance::wakes`](super::Maintenance::wakes). Returns when it is to look
    /// again, if nobody wakes it.
    pub fn sleep(&mut self, at: Nanos) -> Nanos {
        let until = self.due(at);
        #[cfg(feature = "planted")]
        let until = if self.fault == Some(InboxFault::SleepsWithoutALook) { at } else { until };
        self.sleeps = Some(until);
        until
    }

    /// When the next round is due, of an owner that has nothing to do before `at` but for what is in here.
    pub fn due(&self, at: Nanos) -> Nanos {
        self.due.map_or(at, |due| due.min(at))
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.due.is_none()
    }

    /// Takes what is in it. The owner is awake.
    pub fn take(&mut self) -> Left<B, T> {
        (self.due, self.sleeps) = (None, None);
        std::mem::take(&mut self.left)
    }
}
