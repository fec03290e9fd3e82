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

/// Most buffers of batches that are kept: the log has fewer batches under way.
const BATCHES: usize = 4;

/// Buffers of batches of the write log, which only one has at a time, in sizes of which each holds many.
#[derive(Debug, Default)]
pub(super) struct Batches(Vec<AlignedBuf>);

impl Batches {
    /// A buffer of `len` bytes, whose contents are unspecified.
    pub(super) fn take(&mut self, len: usize) -> AlignedBuf {
        let fits = self.0.iter().enumerate().filter(|(_, buf)| buf.capacity() >= len);
        match fits.min_by_key(|(_, buf)| buf.capacity()).map(|(at, _)| at) {
            Some(at) => {
                let mut buf = self.0.swap_remove(at);
                buf.set_len(len);
                buf
            }
            None => {
                let mut buf = AlignedBuf::zeroed(len.next_power_of_two());
                buf.set_len(len);
                buf
            }
        }
    }

    /// Nobody has it any more. The smallest go.
    pub(super) fn give(&mut self, buf: AlignedBuf) {
        self.0.push(buf);
        if self.0.len() > BATCHES {
            let least = self.0.iter().enumerate().min_by_key(|(_, buf)| buf.capacity());
            if let Some(at) = least.map(|(at, _)| at) {
                self.0.swap_remove(at);
            }
        }
    }

    /// Keeps nothing. Returns how many bytes were kept.
    pub(super) fn rest(&mut self) -> usize {
        std::mem::take(&mut self.0).iter().map(AlignedBuf::capacity).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_the_smallest_buffer_that_holds_it_and_the_largest_are_kept() {
        let mut batches = Batches::default();
        let (small, large) = (batches.take(5000), batches.take(300_000));
        let places = [small.as_ptr(), large.as_ptr()];
        batches.give(large);
        batches.give(small);
        let again = [batches.take(8192), batches.take(8193)];
        assert_eq!(again.each_ref().map(|buf| buf.as_ptr()), places);
        assert_eq!(again.each_ref().map(|buf| buf.len()), [8192, 8193]);
        again.into_iter().for_each(|buf| batches.give(buf));
        let more: Vec<AlignedBuf> = (0..4).map(|_| AlignedBuf::zeroed(16384)).collect();
        more.into_iter().for_each(|buf| batches.give(buf));
        assert_eq!((batches.rest(), batches.rest()), (3 * 16384 + (512 << 10), 0));
    }

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
