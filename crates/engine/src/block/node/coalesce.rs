//! Requests of shards for the store that lie side by side become one request.
//!
//! Shards ask group by group; a client's large read or write would reach the store in pieces of a group each, and cost it
//! (and the way to it) so many requests more.

use std::collections::VecDeque;

use crate::block::api::{IoId, OpId};

/// Most bytes of one request to the store.
const MOST: u64 = 1 << 20;

/// What one shard asked of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which shard.
    pub shard: u32,
    /// Its number for the I/O.
    pub io: IoId,
    /// First byte in the line space.
    pub at: u64,
    /// Bytes.
    pub len: u32,
}

/// What waits in a queue of things that shards have asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// A read of the store.
    Read(Piece),
    /// A change of the store.
    Change(Piece),
    /// A write of the cache device, which requests for the store go past.
    Beside,
    /// Anything else: requests behind it are requests of their own.
    Other,
}

/// Pieces of one operation, each beginning where the one before ends.
#[derive(Debug)]
pub struct Pieces {
    first: Piece,
    more: Vec<Piece>,
}

impl Pieces {
    /// `first`, and what follows it in `queue`: the same kind of request (`reads`), for the same operation, as `look` sees it.
    /// What goes into the request leaves the queue.
    pub fn gather<M>(
        op: OpId,
        first: Piece,
        reads: bool,
        queue: &mut VecDeque<(OpId, M)>,
        look: impl Fn(&M) -> Waiting,
    ) -> Pieces {
        let mut pieces = Pieces { first, more: Vec::new() };
        let mut next = 0;
        while let Some((of, message)) = queue.get(next) {
            let piece = match look(message) {
                Waiting::Read(piece) if reads => piece,
                Waiting::Change(piece) if !reads => piece,
                Waiting::Beside if *of == op => {
                    next += 1;
                    continue;
                }
                _ => break,
            };
            let together = u64::from(pieces.len()) + u64::from(piece.len);
            if *of != op || piece.at != pieces.end() || together > MOST {
                break;
            }
            queue.remove(next);
            pieces.more.push(piece);
        }
        pieces
    }

    fn end(&self) -> u64 {
        let last = self.more.last().unwrap_or(&self.first);
        last.at + u64::from(last.len)
    }

    /// First byte in the line space.
    pub fn at(&self) -> u64 {
        self.first.at
    }

    /// Bytes of all.
    #[allow(clippy::len_without_is_empty, reason = "there is always a piece, and it has bytes")]
    pub fn len(&self) -> u32 {
        (self.end() - self.first.at) as u32
    }

    /// One after the other.
    pub fn iter(&self) -> impl Iterator<Item = Piece> + use<> {
        std::iter::once(self.first).chain(self.more.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(shard: u32, at: u64, len: u32) -> Piece {
        Piece { shard, io: IoId(shard), at, len }
    }

    fn gather(op: u64, first: Piece, reads: bool, queue: &mut VecDeque<(OpId, Waiting)>) -> Pieces {
        Pieces::gather(OpId(op), first, reads, queue, |w| *w)
    }

    #[test]
    fn neighbours_go_together() {
        let read = |shard, at, len| (OpId(1), Waiting::Read(piece(shard, at, len)));
        let change = (OpId(1), Waiting::Change(piece(0, 40, 10)));
        let mut queue = VecDeque::from([read(1, 10, 10), read(2, 20, 20), change, read(3, 50, 10)]);
        let pieces = gather(1, piece(0, 0, 10), true, &mut queue);
        assert_eq!((pieces.at(), pieces.len(), pieces.iter().count(), queue.len()), (0, 40, 3, 2));
        assert_eq!(pieces.iter().map(|p| p.shard).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn updates_of_cached_lines_do_not_keep_changes_apart() {
        let change = |shard, at| (OpId(1), Waiting::Change(piece(shard, at, 10)));
        let update = (OpId(1), Waiting::Beside);
        let all = [update, change(1, 10), update, update, change(2, 20), change(3, 40)];
        let mut queue = VecDeque::from(all);
        let pieces = gather(1, piece(0, 0, 10), false, &mut queue);
        assert_eq!((pieces.len(), pieces.iter().count()), (30, 3));
        // What stays keeps its order.
        assert_eq!(queue, [update, update, update, change(3, 40)]);
        queue.push_front((OpId(2), Waiting::Beside));
        let pieces = gather(1, piece(0, 30, 10), false, &mut queue);
        assert_eq!(pieces.len(), 10, "not past another operation");
    }

    #[test]
    fn strangers_gaps_and_more_than_a_mebibyte_do_not() {
        let read = |op, at, len| (OpId(op), Waiting::Read(piece(1, at, len)));
        for next in
            [read(2, 10, 10), read(1, 11, 10), read(1, 10, 1 << 20), (OpId(1), Waiting::Other)]
        {
            let mut queue = VecDeque::from([next]);
            let pieces = gather(1, piece(0, 0, 10), true, &mut queue);
            assert_eq!((pieces.len(), queue.len()), (10, 1));
        }
    }
}
