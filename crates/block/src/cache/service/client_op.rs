//! What a worker keeps of a client's operation.

use std::time::Instant;

use larder_engine::block::node::ranged::Progress;
use larder_engine::block::{PartKind, Verdict};
use larder_policy::block::BlockKind;
use larder_runtime::{AlignedBuf, PAGE, Payload};

use super::super::attached::Inside;
use crate::op::Failure;

/// A client's operation.
pub(super) struct ClientOp {
    pub ticket: u64,
    pub known: usize,
    pub kind: PartKind,
    /// Where it begins in the line space, and its bytes.
    pub at: u64,
    pub len: u64,
    /// Being filled, for a read.
    pub buf: Option<AlignedBuf>,
    /// Bytes that were delivered and not copied into it, with where they belong.
    pub lent: Vec<(u64, Payload)>,
    pub payload: Option<Payload>,
    pub fua: bool,
    pub may_punch: bool,
    pub fast: bool,
    /// What it waits for.
    pub pending: u32,
    pub failure: Option<Failure>,
    /// Of a change that has its range as a whole: how far it is.
    pub range: Option<Progress>,
    /// What the client says that it holds.
    pub tag: BlockKind,
    /// Of a prefetch: which slots its lines may have.
    pub advice: Verdict,
    pub begun: Instant,
    /// The store was asked on its behalf.
    pub asked_store: bool,
    /// Some of its bytes came with a read of the store, its own or another's, that it waited for.
    pub waited_for_store: bool,
    /// Its volume stays where it is until it has ended.
    pub _inside: Option<Inside>,
}

impl ClientOp {
    pub(super) fn new(ticket: u64, known: usize, kind: PartKind, at: u64, len: u64) -> ClientOp {
        ClientOp {
            ticket,
            known,
            kind,
            at,
            len,
            buf: None,
            lent: Vec::new(),
            payload: None,
            fua: false,
            may_punch: false,
            fast: false,
            pending: 0,
            failure: None,
            range: None,
            tag: BlockKind::Unknown,
            advice: Verdict::Admit,
            begun: Instant::now(),
            asked_store: false,
            waited_for_store: false,
            _inside: None,
        }
    }

    /// A read was answered without asking the store or waiting for it: from flash, or from bytes that are held because they
    /// are on their way there.
    pub(super) fn is_hit(&self) -> bool {
        self.failure.is_none() && !self.asked_store && !self.waited_for_store
    }

    /// Bytes from `at` on were delivered.
    pub(super) fn copy(&mut self, at: u64, bytes: &[u8]) {
        if let Some(buf) = &mut self.buf {
            let from = (at - self.at) as usize;
            buf[from..from + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// What was delivered, if it is all that was asked for; else it is copied to what is in the buffer.
    pub(super) fn take_lent(&mut self) -> Vec<Payload> {
        let mut lent = std::mem::take(&mut self.lent);
        lent.sort_unstable_by_key(|piece| piece.0);
        let end = lent
            .iter()
            .try_fold(self.at, |end, (at, bytes)| (*at == end).then_some(end + bytes.len() as u64));
        // A small part of what was read for somebody else would keep all of that, for as long as a client likes.
        let most = 2 * self.len.max(PAGE as u64);
        let costly = |piece: &(u64, Payload)| piece.1.capacity() as u64 > most;
        let end = end.filter(|_| !lent.iter().any(costly));
        if self.failure.is_none() && end == Some(self.at + self.len) {
            return lent.into_iter().map(|piece| piece.1).collect();
        }
        lent.iter().for_each(|(at, bytes)| self.copy(*at, bytes));
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lent: &[(u64, u8)]) -> ClientOp {
        let mut op = ClientOp::new(1, 0, PartKind::Read, 1000, 300);
        op.buf = Some(AlignedBuf::zeroed(300));
        for &(at, byte) in lent {
            let mut buf = AlignedBuf::zeroed(100);
            buf.fill(byte);
            op.lent.push((at, Payload::new(buf)));
        }
        op
    }

    #[test]
    fn pieces_that_are_all_of_it_are_lent_in_order() {
        let mut op = read(&[(1200, 3), (1000, 1), (1100, 2)]);
        let lent = op.take_lent();
        assert_eq!(
            lent.iter().map(|p| (p.len(), p[0])).collect::<Vec<_>>(),
            [(100, 1), (100, 2), (100, 3)]
        );
    }

    #[test]
    fn a_part_of_much_more_is_copied() {
        let mut op = read(&[(1000, 1), (1100, 2)]);
        let mut long = AlignedBuf::zeroed(64 << 10);
        long.fill(3);
        op.lent.push((1200, Payload::new(long).part(5000, 100)));
        assert!(op.take_lent().is_empty());
        let buf = op.buf.unwrap();
        assert!((0..300).all(|i| buf[i] == 1 + (i / 100) as u8));
    }

    #[test]
    fn what_is_beside_something_that_was_copied_is_copied_too() {
        let mut op = read(&[(1200, 3), (1000, 1)]);
        op.copy(1100, &[2; 100]);
        assert!(op.take_lent().is_empty());
        let buf = op.buf.unwrap();
        assert!((0..300).all(|i| buf[i] == 1 + (i / 100) as u8));
    }
}
