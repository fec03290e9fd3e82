//! Requests of the engine for the store that lie side by side become one request.
//!
//! The engine asks group by group, as its shards have them; a client's large read or write would reach the store in
//! pieces of a group each, and cost it (and the way to it) so many requests more.

use std::collections::VecDeque;

use larder_engine::block::{IoId, OpId};

use super::cell::Message;

/// Most bytes of one request to the store.
const MOST: u64 = 1 << 20;

/// What one shard asked of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub shard: u32,
    pub io: IoId,
    /// First byte in the line space, and bytes.
    pub at: u64,
    pub len: u32,
}

/// Pieces of one operation, each beginning where the one before ends.
#[derive(Debug)]
pub(super) struct Pieces {
    pub first: Piece,
    pub more: Vec<Piece>,
}

impl Pieces {
    /// `first`, and what follows it in `inbox`: the same kind of request, for the same operation. What the operation asks
    /// of the cache device in between stays where it is.
    pub(super) fn gather(
        op: OpId,
        first: Piece,
        reads: bool,
        inbox: &mut VecDeque<(OpId, Message)>,
    ) -> Pieces {
        let mut pieces = Pieces { first, more: Vec::new() };
        let mut next = 0;
        while let Some((of, message)) = inbox.get(next) {
            let piece = match *message {
                Message::BackingRead { shard, io, at, len } if reads => {
                    Piece { shard, io, at, len }
                }
                Message::BackingChange { shard, io, at, len } if !reads => {
                    Piece { shard, io, at, len }
                }
                Message::FlashWrite { .. } | Message::Merge { .. } if *of == op => {
                    next += 1;
                    continue;
                }
                _ => break,
            };
            let together = u64::from(pieces.len()) + u64::from(piece.len);
            if *of != op || piece.at != pieces.end() || together > MOST {
                break;
            }
            inbox.remove(next);
            pieces.more.push(piece);
        }
        pieces
    }

    fn end(&self) -> u64 {
        let last = self.more.last().unwrap_or(&self.first);
        last.at + u64::from(last.len)
    }

    /// First byte.
    pub(super) fn at(&self) -> u64 {
        self.first.at
    }

    /// Bytes of all.
    pub(super) fn len(&self) -> u32 {
        (self.end() - self.first.at) as u32
    }

    /// One after the other.
    pub(super) fn iter(&self) -> impl Iterator<Item = Piece> {
        std::iter::once(self.first).chain(self.more.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use larder_engine::block::SlotId;

    use super::*;

    fn read(op: u64, shard: u32, at: u64, len: u32) -> (OpId, Message) {
        (OpId(op), Message::BackingRead { shard, io: IoId(shard), at, len })
    }

    #[test]
    fn neighbours_go_together() {
        let change = (OpId(1), Message::BackingChange { shard: 0, io: IoId(9), at: 40, len: 10 });
        let mut inbox =
            VecDeque::from([read(1, 1, 10, 10), read(1, 2, 20, 20), change, read(1, 3, 50, 10)]);
        let first = Piece { shard: 0, io: IoId(0), at: 0, len: 10 };
        let pieces = Pieces::gather(OpId(1), first, true, &mut inbox);
        assert_eq!((pieces.at(), pieces.len(), pieces.iter().count(), inbox.len()), (0, 40, 3, 2));
        assert_eq!(pieces.iter().map(|p| p.shard).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn updates_of_cached_lines_do_not_keep_changes_apart() {
        let change =
            |shard: u32, at| Message::BackingChange { shard, io: IoId(shard), at, len: 10 };
        let update = |shard: u32, len: usize| {
            let bytes = larder_runtime::Payload::new(larder_runtime::AlignedBuf::zeroed(len));
            Message::FlashWrite { shard, io: IoId(100 + shard), slot: SlotId(7), bytes }
        };
        let mut inbox: VecDeque<_> =
            [update(0, 1), change(1, 10), update(1, 1), update(1, 2), change(2, 20), change(3, 40)]
                .map(|message| (OpId(1), message))
                .into();
        let first = Piece { shard: 0, io: IoId(0), at: 0, len: 10 };
        let pieces = Pieces::gather(OpId(1), first, false, &mut inbox);
        assert_eq!((pieces.len(), pieces.iter().count(), inbox.len()), (30, 3, 4));
        // What stays keeps its order.
        let lens: Vec<usize> = inbox.iter().filter_map(|(_, m)| len_of_update(m)).collect();
        assert_eq!(lens, [1, 1, 2]);
        inbox.insert(0, (OpId(2), update(9, 1)));
        let pieces = Pieces::gather(OpId(1), Piece { at: 30, ..first }, false, &mut inbox);
        assert_eq!(pieces.len(), 10, "not past another operation");
    }

    fn len_of_update(message: &Message) -> Option<usize> {
        match message {
            Message::FlashWrite { bytes, .. } => Some(bytes.len()),
            _ => None,
        }
    }

    #[test]
    fn strangers_and_gaps_do_not() {
        let first = Piece { shard: 0, io: IoId(0), at: 0, len: 10 };
        for next in [read(2, 1, 10, 10), read(1, 1, 11, 10), read(1, 1, 10, 1 << 20)] {
            let mut inbox = VecDeque::from([next]);
            let pieces = Pieces::gather(OpId(1), first, true, &mut inbox);
            assert_eq!((pieces.len(), inbox.len()), (10, 1));
        }
    }
}
