//! What a worker keeps of a client's request while the engine has it.

use larder_runtime::{AlignedBuf, PAGE, Payload};

/// Replies to reads of this length and longer are lent, not copied together, where they may be.
const LENT: u64 = 32 << 10;

/// A client's request.
pub(in crate::block) struct Client {
    /// What it came under.
    pub ticket: u64,
    /// Being filled, for a read.
    pub buf: Option<AlignedBuf>,
    /// Bytes that were delivered and not copied into it, with where they belong.
    lent: Vec<(u64, Payload)>,
}

impl Client {
    pub(super) fn new(ticket: u64, buf: Option<AlignedBuf>) -> Client {
        Client { ticket, buf, lent: Vec::new() }
    }

    fn len(&self) -> u64 {
        self.buf.as_ref().map_or(0, |buf| buf.len() as u64)
    }

    /// Bytes that belong `at` bytes behind the first are delivered; `lends`: they need not be copied.
    #[inline]
    pub(super) fn take(&mut self, at: u64, bytes: Payload, lends: bool) {
        if lends && self.len() >= LENT {
            self.lent.push((at, bytes));
        } else {
            self.copy(at, &bytes);
        }
    }

    /// Zeros belong there.
    pub(super) fn zero(&mut self, at: u64, len: u64) {
        if let Some(buf) = &mut self.buf {
            buf[at as usize..(at + len) as usize].fill(0);
        }
    }

    #[inline]
    fn copy(&mut self, at: u64, bytes: &[u8]) {
        if let Some(buf) = &mut self.buf {
            buf[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// What was delivered, if it is all that was asked for; else it is copied to what is in the buffer.
    pub(super) fn take_lent(&mut self) -> Vec<Payload> {
        let mut lent = std::mem::take(&mut self.lent);
        lent.sort_unstable_by_key(|piece| piece.0);
        let end = lent
            .iter()
            .try_fold(0, |end, (at, bytes)| (*at == end).then_some(end + bytes.len() as u64));
        // A small part of what was read for somebody else would keep all of that, for as long as a client likes.
        let most = 2 * self.len().max(PAGE as u64);
        let costly = |piece: &(u64, Payload)| piece.1.capacity() as u64 > most;
        let end = end.filter(|_| !lent.iter().any(costly));
        if end == Some(self.len()) {
            return lent.into_iter().map(|piece| piece.1).collect();
        }
        lent.iter().for_each(|(at, bytes)| self.copy(*at, bytes));
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lent: &[(u64, u8)]) -> Client {
        let mut client = Client::new(1, Some(AlignedBuf::zeroed(300)));
        for &(at, byte) in lent {
            let mut buf = AlignedBuf::zeroed(100);
            buf.fill(byte);
            client.lent.push((at, Payload::new(buf)));
        }
        client
    }

    #[test]
    fn pieces_that_are_all_of_it_are_lent_in_order() {
        let mut client = read(&[(200, 3), (0, 1), (100, 2)]);
        let lent = client.take_lent();
        assert_eq!(
            lent.iter().map(|p| (p.len(), p[0])).collect::<Vec<_>>(),
            [(100, 1), (100, 2), (100, 3)]
        );
    }

    #[test]
    fn a_part_of_much_more_is_copied() {
        let mut client = read(&[(0, 1), (100, 2)]);
        let mut long = AlignedBuf::zeroed(64 << 10);
        long.fill(3);
        client.lent.push((200, Payload::new(long).part(5000, 100)));
        assert!(client.take_lent().is_empty());
        let buf = client.buf.unwrap();
        assert!((0..300).all(|i| buf[i] == 1 + (i / 100) as u8));
    }

    #[test]
    fn what_is_beside_something_that_was_copied_is_copied_too() {
        let mut client = read(&[(200, 3), (0, 1)]);
        client.copy(100, &[2; 100]);
        assert!(client.take_lent().is_empty());
        let buf = client.buf.unwrap();
        assert!((0..300).all(|i| buf[i] == 1 + (i / 100) as u8));
    }
}
