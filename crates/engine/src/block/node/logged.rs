//! How the write log is called: behind its lock, and how what it asks for comes to those who do it.
//!
//! What it asks of its device ([`ForDevice`]) is carried out, whoever has called: a queue ([`call_log`]) does that itself. Whoever cannot
//! ([`tell_log`]: operators, and threads that look after volumes) leaves it in a queue's mailbox. So no call leaves behind what nobody does.
//! Answers go into mailboxes while the log is locked, so that they come in the order in which the log gave them; nobody is woken under its lock. It is
//! called with no shard locked.

use larder_base::Nanos;

use crate::block::api::{OpId, PartKind};
use crate::block::node::calls::{Message, OP_BITS, Wake, put, send, thread_of};
use crate::block::node::event::Host;
use crate::block::node::queue::Node;
use crate::block::writeback::log::{Append, Asks, NOBODY, ToWrite, WriteLog};
use crate::block::writeback::volume_log::Kind;

/// Number of a read of the log, of the queue that asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogIo(pub u32);

/// A stretch of an epoch, as the journal is to have it. They come in the order of the volume, and none overlaps another.
#[derive(Clone, Debug)]
pub struct JournalPart<B> {
    /// First byte in the volume.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// What it will hold: bytes, zeros, or what the store gives for what is trimmed.
    pub kind: PartKind,
    /// The bytes of a write.
    pub bytes: Option<B>,
}

/// What the log asks of the device that it is on, in any order. It waits for all of it.
#[derive(Debug)]
#[must_use = "the log waits for what nobody does"]
pub struct ForDevice<B> {
    /// Batches to be written: [`WriteLog::written`].
    pub writes: Vec<ToWrite<B>>,
    /// It is to be flushed: [`WriteLog::flushed`] with this.
    pub flush: Option<u64>,
    /// It has failed, for this reason: nothing else on it is to be used either.
    pub gives_up: Option<&'static str>,
}

impl<B> Default for ForDevice<B> {
    fn default() -> ForDevice<B> {
        ForDevice { writes: Vec::new(), flush: None, gives_up: None }
    }
}

impl<B> ForDevice<B> {
    /// Nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.writes.is_empty() && self.flush.is_none() && self.gives_up.is_none()
    }

    /// What another call has asked for, too.
    pub fn add(&mut self, more: ForDevice<B>) {
        self.writes.extend(more.writes);
        self.flush = self.flush.or(more.flush);
        self.gives_up = self.gives_up.or(more.gives_up);
    }
}

/// Calls the log on behalf of thread `me`, if it has a mailbox, which is to look into it afterwards. `carry` does what the log asks of its device, or
/// has it done. `None` where there is no log.
pub fn call_log<H: Host, N: Node<H>, R>(
    node: &N,
    me: Option<usize>,
    f: impl FnOnce(&mut WriteLog<H::Bytes>, &mut Asks<H::Bytes>) -> R,
    carry: impl FnOnce(ForDevice<H::Bytes>),
) -> Option<R> {
    let (result, device) = called(node, me, f)?;
    carry(device);
    Some(result)
}

/// Calls the log on behalf of somebody who carries nothing out and has no mailbox. What follows from that is done at once, or by a queue, which is woken
/// for it. `None` where there is no log.
pub fn tell_log<H: Host, N: Node<H>, R>(
    node: &N,
    now: Nanos,
    f: impl FnOnce(&mut WriteLog<H::Bytes>, &mut Asks<H::Bytes>) -> R,
) -> Option<R> {
    let ((result, sooner), device) = called(node, None, |log, asks| {
        let before = log.wakes(now);
        let result = f(log, asks);
        log.follow(now, asks);
        let sooner = |at: Nanos| before.is_none_or(|before| at < before);
        (result, log.wakes(now).is_some_and(sooner))
    })?;
    if sooner || !device.is_empty() {
        // Any queue will do. It looks again when something is due, too.
        let thread = node.destages(0) as u64;
        send(node, OpId(thread << OP_BITS), Message::ForDevice(Box::new(device)));
    }
    Some(result)
}

/// Calls a log that nobody has yet, and that answers nobody: what it asks of its device is for who begins it.
pub fn call_alone<B: Clone, R>(
    log: &mut WriteLog<B>,
    f: impl FnOnce(&mut WriteLog<B>, &mut Asks<B>) -> R,
) -> (R, ForDevice<B>) {
    let mut asks = Asks::default();
    let result = f(log, &mut asks);
    let Asks { writes, flush, gives_up, .. } = asks;
    (result, ForDevice { writes, flush, gives_up })
}

fn called<H: Host, N: Node<H>, R>(
    node: &N,
    me: Option<usize>,
    f: impl FnOnce(&mut WriteLog<H::Bytes>, &mut Asks<H::Bytes>) -> R,
) -> Option<(R, ForDevice<H::Bytes>)> {
    let mut wake = Wake::default();
    let called = node.log(|log| {
        let mut asks = Asks::default();
        let result = f(log, &mut asks);
        let mut send = |op: OpId, message| {
            let thread = thread_of(op);
            if put(node, thread, op, message) && Some(thread) != me {
                wake.add(thread);
            }
        };
        for (op, failed) in asks.answers.drain(..).filter(|(op, _)| *op != NOBODY) {
            send(op, Message::Logged { failed });
        }
        for (op, append) in asks.through.drain(..) {
            let message = match append {
                None => Message::FlushThrough,
                Some(Append { kind, at, len, bytes, may_punch, .. }) => {
                    let kind = match kind {
                        Kind::Write => PartKind::Write,
                        Kind::Zero => PartKind::Zero,
                        Kind::Trim => PartKind::Trim,
                        // Whoever asked for it hears that nothing is logged any more.
                        Kind::Mark => continue,
                    };
                    Message::Through { kind, at, len, bytes, may_punch }
                }
            };
            send(op, message);
        }
        asks.steps.sort_unstable();
        asks.steps.dedup();
        for attachment in asks.steps.drain(..) {
            let thread = node.destages(attachment) as u64;
            send(OpId(thread << OP_BITS), Message::Destage(attachment));
        }
        let Asks { writes, flush, gives_up, .. } = asks;
        (result, ForDevice { writes, flush, gives_up })
    });
    wake.each(|thread| node.notify(thread));
    called
}
