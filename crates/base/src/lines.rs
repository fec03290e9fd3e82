//! Words that begin where a cache line begins.

use std::ops::{Deref, DerefMut};

/// Words in a cache line of 64 bytes.
pub(crate) const LINE_WORDS: usize = 8;

/// Zero words on the heap, the first of which begins a cache line: so that a set of eight, at a multiple of eight, is one
/// line to fetch and not parts of two. The allocator gives large tables as fresh pages but for its own 16 bytes at the
/// start, which would put every set of a table astride of a line's end.
#[derive(Debug)]
pub(crate) struct LineWords {
    words: Box<[u64]>,
    start: usize,
    len: usize,
}

impl LineWords {
    /// `len` zero words. Memory is not touched before it is used.
    pub(crate) fn zeroed(len: usize) -> LineWords {
        let words = vec![0u64; len + LINE_WORDS - 1].into_boxed_slice();
        let start = to_line(words.as_ptr());
        LineWords { words, start, len }
    }

    /// Bytes of memory taken.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }
}

/// How many words from `first` on the next line begins; fewer than [`LINE_WORDS`].
pub(crate) fn to_line<T>(first: *const T) -> usize {
    first.align_offset(LINE_WORDS * size_of::<u64>()).min(LINE_WORDS - 1)
}

impl Deref for LineWords {
    type Target = [u64];
    #[inline]
    fn deref(&self) -> &[u64] {
        &self.words[self.start..self.start + self.len]
    }
}

impl DerefMut for LineWords {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u64] {
        &mut self.words[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_begin_with_the_first_word() {
        for len in [0, 1, 7, 8, 9, 1000, 100_000] {
            let mut words = LineWords::zeroed(len);
            assert_eq!(words.as_ptr().addr() % 64, 0, "{len}");
            assert!(words.len() == len && words.iter().all(|&w| w == 0));
            words.fill(9);
            assert!(words.memory_bytes() <= (len + 7) * 8);
        }
    }
}
