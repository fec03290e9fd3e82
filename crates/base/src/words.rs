//! Words of memory that may outlive the process.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use crate::lines::{LINE_WORDS, to_line};

/// An array of 64-bit words that its owner changes one whole word at a time, in program order.
///
/// The flash index lives in one. On the heap it dies with the process; on a shared mapping (made by the runtime from a
/// file on tmpfs) it survives `kill -9` exactly as far as the stores had come. A kill is precise: every store before
/// the point of the kill has happened and none after it, so program order is all that recovery needs, and the fence in
/// [`Words::store`] keeps the compiler to it. A power cut takes the whole mapping away, so nothing is promised there.
///
/// [`Words::set_fuse`] lets a test die between any two stores.
pub struct Words {
    cells: Cells,
    /// Stores still performed before the memory "dies" (tests only).
    fuse: Option<Arc<AtomicU64>>,
    /// A store beyond the fuse ends the run instead of being dropped.
    fatal: bool,
}

/// The payload with which a store beyond a shared fuse unwinds ([`Words::share_fuse`]).
#[derive(Debug)]
pub struct Killed;

enum Cells {
    /// `len` words from `start` on, where a cache line begins.
    Heap { all: Box<[AtomicU64]>, start: usize, len: usize },
    /// Mapped for the life of the process.
    Static(&'static [AtomicU64]),
}

impl Words {
    /// `len` zero words on the heap; the first begins a cache line.
    pub fn heap(len: usize) -> Words {
        // Zeroed pages straight from the allocator: a large index does not touch its memory before it is used.
        let all = to_cells(vec![0u64; len + LINE_WORDS - 1].into_boxed_slice());
        let start = to_line(all.as_ptr());
        Words { cells: Cells::Heap { all, start, len }, fuse: None, fatal: false }
    }

    /// Words that are already there, in a mapping that is never taken down.
    pub fn from_static(cells: &'static [AtomicU64]) -> Words {
        Words { cells: Cells::Static(cells), fuse: None, fatal: false }
    }

    /// Whether the words outlive the process.
    pub fn is_shared(&self) -> bool {
        matches!(self.cells, Cells::Static(_))
    }

    #[inline]
    fn cells(&self) -> &[AtomicU64] {
        match &self.cells {
            Cells::Heap { all, start, len } => &all[*start..*start + *len],
            Cells::Static(s) => s,
        }
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.cells().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Word `index`.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    pub fn load(&self, index: usize) -> u64 {
        self.cells()[index].load(Ordering::Relaxed)
    }

    /// Asks the processor for the cache line of word `index`; nothing when it is out of bounds.
    #[inline]
    pub fn prefetch(&self, index: usize) {
        crate::prefetch(self.cells(), index);
    }

    /// Changes word `index`, after every earlier store and before every later one.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    pub fn store(&mut self, index: usize, value: u64) {
        if let Some(fuse) = &self.fuse {
            let left = fuse.load(Ordering::Relaxed);
            if left == 0 {
                if self.fatal {
                    std::panic::resume_unwind(Box::new(Killed));
                }
                return;
            }
            fuse.store(left - 1, Ordering::Relaxed);
        }
        compiler_fence(Ordering::SeqCst);
        self.cells()[index].store(value, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    /// Eight neighbouring words: one cache line when `index` is a multiple of 8.
    ///
    /// # Panics
    /// If the line is out of bounds.
    pub fn load_line(&self, index: usize) -> [u64; 8] {
        let line = &self.cells()[index..index + 8];
        std::array::from_fn(|i| line[i].load(Ordering::Relaxed))
    }

    /// After `stores` more stores, further ones are dropped: the memory as a kill at that moment would leave it.
    pub fn set_fuse(&mut self, stores: u64) {
        self.fuse = Some(Arc::new(AtomicU64::new(stores)));
    }

    /// Burns the same fuse as other words: a kill is one moment for all memory. `fuse` counts the stores that are still
    /// performed; the next one unwinds with [`Killed`] as its payload, so that, as after a kill, nothing more is
    /// executed.
    pub fn share_fuse(&mut self, fuse: Arc<AtomicU64>) {
        self.fuse = Some(fuse);
        self.fatal = true;
    }

    /// Whether a fuse was set and has burnt down.
    pub fn is_dead(&self) -> bool {
        self.fuse.as_ref().is_some_and(|f| f.load(Ordering::Relaxed) == 0)
    }

    /// A copy of the words as they are (without the fuse), on the heap.
    pub fn snapshot(&self) -> Words {
        let copy = Words::heap(self.len());
        for (to, from) in copy.cells().iter().zip(self.cells()) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        copy
    }
}

fn to_cells(words: Box<[u64]>) -> Box<[AtomicU64]> {
    let raw = Box::into_raw(words) as *mut [AtomicU64];
    // SAFETY: AtomicU64 is documented to have the size and bit validity of u64, and on every target with 64-bit atomics
    // its alignment is 8, which `Box<[u64]>` on those targets has too (checked below at compile time); ownership is
    // passed on whole.
    unsafe { Box::from_raw(raw) }
}

const _: () = assert!(
    align_of::<AtomicU64>() == align_of::<u64>() && size_of::<AtomicU64>() == size_of::<u64>()
);

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Words")
            .field("len", &self.len())
            .field("shared", &self.is_shared())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heap_words_begin_a_cache_line() {
        for len in [1, 8, 100, 1 << 16] {
            let w = Words::heap(len);
            assert_eq!(w.cells().as_ptr().addr() % 64, 0, "{len}");
            assert_eq!((w.len(), w.snapshot().len()), (len, len));
        }
    }

    #[test]
    fn the_fuse_stops_stores_in_order() {
        let mut w = Words::heap(16);
        w.set_fuse(2);
        for i in 0..4 {
            w.store(i, 7);
        }
        assert_eq!((w.load(0), w.load(1), w.load(2), w.load(3)), (7, 7, 0, 0));
        assert!(w.is_dead());
        let mut copy = w.snapshot();
        copy.store(2, 9);
        assert_eq!((copy.load(1), copy.load(2)), (7, 9));
    }
}
