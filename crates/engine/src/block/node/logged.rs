//! How the write log is called: behind its lock, and how what it asks for comes to those who do it.
//!
//! Whoever calls it carries out what it asks of the device ([`Asks`]). Answers go into mailboxes while the log is locked, so that they come
//! in the order in which the log gave them; nobody is woken under its lock. It is called with no shard locked.

use crate::block::api::{OpId, PartKind};
use crate::block::node::calls::{Message, OP_BITS, Wake, put, thread_of};
use crate::block::node::event::Host;
use crate::block::node::queue::Node;
use crate::block::writeback::log::{Append, Asks, NOBODY, WriteLog};
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

/// Calls the log on behalf of thread `me`, if it has a mailbox, which is to look into it afterwards. What is left in the asks is for the
/// caller to carry out; `None` where there is no log.
pub fn call_log<H: Host, N: Node<H>, R>(
    node: &N,
    me: Option<usize>,
    f: impl FnOnce(&mut WriteLog<H::Bytes>, &mut Asks<H::Bytes>) -> R,
) -> Option<(R, Asks<H::Bytes>)> {
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
        (result, asks)
    });
    wake.each(|thread| node.notify(thread));
    called
}
