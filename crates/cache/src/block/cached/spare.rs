//! Buffers that are used again when whoever shares them has let go.
//!
//! What is read for a client is shared: it is delivered, perhaps to several, and it is the source of fills. A new buffer for
//! each read costs its allocation and its zeroing, and for long ones the page faults of memory that goes back and forth.

use std::collections::VecDeque;

use larder_runtime::{AlignedBuf, Payload};

/// Most bytes that are kept, in use or not.
const MOST: usize = 16 << 20;
/// So many are looked at for one that is free.
const LOOKS: usize = 4;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Spare {
    list: VecDeque<Payload>,
    bytes: usize,
}

impl Spare {
    /// A buffer of `len` bytes, whose contents are unspecified.
    pub(super) fn take(&mut self, len: usize) -> AlignedBuf {
        // They become free about in the order in which they came.
        for _ in 0..self.list.len().min(LOOKS) {
            let Some(payload) = self.list.pop_front() else { break };
            let capacity = payload.capacity();
            match payload.try_into_buf() {
                Ok(mut buf) => {
                    self.bytes -= capacity;
                    if (len..=2 * len.next_multiple_of(4096)).contains(&capacity) {
                        buf.set_len(len);
                        return buf;
                    }
                    // Of another size: it goes.
                }
                Err(payload) => self.list.push_back(payload),
            }
        }
        AlignedBuf::zeroed(len)
    }

    /// Keeps nothing: those that somebody has go when they let go. Returns how many bytes were kept.
    pub(super) fn rest(&mut self) -> usize {
        self.list = VecDeque::new();
        std::mem::take(&mut self.bytes)
    }

    /// The bytes of `buf`, to be shared; when they are not any more, it can be had again.
    pub(super) fn share(&mut self, buf: AlignedBuf) -> Payload {
        let payload = Payload::new(buf);
        if self.bytes + payload.capacity() <= MOST {
            self.bytes += payload.capacity();
            self.list.push_back(payload.clone());
        }
        payload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_nobody_has_it() {
        let mut spare = Spare::default();
        let mut first = spare.take(8192);
        first[0] = 7;
        let place = first.as_ptr();
        let shared = spare.share(first);
        let part = shared.part(4096, 4096);
        drop(shared);
        // Somebody has a part of it.
        assert_ne!(spare.take(8192).as_ptr(), place);
        drop(part);
        let again = spare.take(5000);
        assert_eq!((again.as_ptr(), again.len(), again[0]), (place, 5000, 7));
        assert_eq!((spare.bytes, spare.list.len()), (0, 0));
    }

    #[test]
    fn those_of_another_size_go_and_no_more_than_the_most_are_kept() {
        let mut spare = Spare::default();
        drop(spare.share(AlignedBuf::zeroed(1 << 20)));
        assert_eq!(spare.take(4096).capacity(), 4096);
        assert_eq!((spare.bytes, spare.list.len()), (0, 0));
        let held: Vec<Payload> =
            (0..40).map(|_| spare.share(AlignedBuf::zeroed(1 << 20))).collect();
        assert_eq!((spare.bytes, held.len()), (MOST, 40));
        assert_eq!((spare.rest(), spare.rest(), spare.list.len()), (MOST, 0, 0));
    }
}
