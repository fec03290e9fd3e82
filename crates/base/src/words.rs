//! Words of memory that may outlive the process.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use crate::lazy::LazyWords;
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
    /// Who has the memory of the words behind the first ones, where they are not all there from the start.
    supply: Option<Arc<dyn Supply>>,
}

/// Who supplies memory for words that are mapped and not all backed by memory: a store to one that is not would end the process.
pub trait Supply: Send + Sync {
    /// Backs the words of `range` with memory; those that are backed already stay as they are. Returns false if there is none.
    fn back(&self, range: Range<usize>) -> bool;
    /// Gives the memory of the words of `range` back, as far as that goes. They are zero when they are backed again.
    fn give_back(&self, range: Range<usize>);
}

/// The payload with which a store beyond a shared fuse unwinds ([`Words::share_fuse`]).
#[derive(Debug)]
pub struct Killed;

enum Cells {
    /// `len` words from `start` on, where a cache line begins.
    Heap { all: Box<[AtomicU64]>, start: usize, len: usize },
    /// Mapped for the life of the process.
    Static(&'static [AtomicU64]),
    /// Takes memory as it is filled.
    Lazy(LazyWords),
}

impl Words {
    /// `len` zero words on the heap; the first begins a cache line.
    pub fn heap(len: usize) -> Words {
        // Zeroed pages straight from the allocator: a large index does not touch its memory before it is used.
        let all = to_cells(vec![0u64; len + LINE_WORDS - 1].into_boxed_slice());
        let start = to_line(all.as_ptr());
        Words { cells: Cells::Heap { all, start, len }, fuse: None, fatal: false, supply: None }
    }

    /// `len` zero words on the heap that take memory as they are used, as [`LazyWords::growing`] has it: for simulations of
    /// large tables that are hardly filled. Slower than [`Words::heap`] until they are.
    pub fn growing(len: usize, percent: usize) -> Words {
        let cells = Cells::Lazy(LazyWords::growing(len, percent));
        Words { cells, fuse: None, fatal: false, supply: None }
    }

    /// Bytes of memory that the words take now.
    pub fn held_bytes(&self) -> usize {
        match &self.cells {
            Cells::Heap { all, .. } => size_of_val(&**all),
            Cells::Static(words) => size_of_val(*words),
            Cells::Lazy(words) => words.held_bytes(),
        }
    }

    /// Words that are already there, in a mapping that is never taken down.
    pub fn from_static(cells: &'static [AtomicU64]) -> Words {
        Words { cells: Cells::Static(cells), fuse: None, fatal: false, supply: None }
    }

    /// Words that are already there, in a mapping that is never taken down; those that are not backed by memory yet, `supply` has backed
    /// ([`Words::supply`]).
    pub fn supplied(cells: &'static [AtomicU64], supply: Arc<dyn Supply>) -> Words {
        Words { supply: Some(supply), ..Words::from_static(cells) }
    }

    /// Makes sure that the first `len` words can be used. Returns false where there are not so many, or no memory for them.
    pub fn supply(&mut self, len: usize) -> bool {
        len <= self.len() && self.supply.as_ref().is_none_or(|supply| supply.back(0..len))
    }

    /// The words from `len` on are not needed: what memory of theirs can be given back is. What they hold is lost.
    pub fn give_back(&mut self, len: usize) {
        if let Some(supply) = &self.supply {
            supply.give_back(len..self.len());
        }
    }

    /// Whether the words outlive the process.
    pub fn is_shared(&self) -> bool {
        matches!(self.cells, Cells::Static(_))
    }

    /// The words where they are an array, or the table that stands for one.
    #[inline]
    fn cells(&self) -> Result<&[AtomicU64], &LazyWords> {
        match &self.cells {
            Cells::Heap { all, start, len } => Ok(&all[*start..*start + *len]),
            Cells::Static(s) => Ok(s),
            Cells::Lazy(words) => Err(words),
        }
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.cells().map_or_else(LazyWords::len, <[AtomicU64]>::len)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Word `index`.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    #[inline]
    pub fn load(&self, index: usize) -> u64 {
        match self.cells() {
            Ok(cells) => cells[index].load(Ordering::Relaxed),
            Err(lazy) => lazy.get(index),
        }
    }

    /// Asks the processor for the cache line of word `index`; nothing when it is out of bounds.
    #[inline]
    pub fn prefetch(&self, index: usize) {
        match self.cells() {
            Ok(cells) => crate::prefetch(cells, index),
            Err(lazy) => lazy.warm(index),
        }
    }

    /// Asks for the cache line that says where word `index` is, where the words take memory as they are filled: before
    /// [`Words::prefetch`], which would wait for it.
    #[inline]
    pub fn expect(&self, index: usize) {
        if let Err(lazy) = self.cells() {
            lazy.expect(index);
        }
    }

    /// Changes word `index`, after every earlier store and before every later one.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    #[inline]
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
        if let Cells::Lazy(lazy) = &mut self.cells {
            lazy.set(index, value);
        } else if let Ok(cells) = self.cells() {
            cells[index].store(value, Ordering::Relaxed);
        }
        compiler_fence(Ordering::SeqCst);
    }

    /// Eight neighbouring words: one cache line when `index` is a multiple of 8.
    ///
    /// # Panics
    /// If the line is out of bounds.
    #[inline]
    pub fn load_line(&self, index: usize) -> [u64; 8] {
        match self.cells() {
            Ok(cells) => {
                let line = &cells[index..index + 8];
                std::array::from_fn(|i| line[i].load(Ordering::Relaxed))
            }
            Err(lazy) if index.is_multiple_of(8) => lazy.line(index),
            Err(lazy) => std::array::from_fn(|i| lazy.get(index + i)),
        }
    }

    /// Folds the words of [`Words::load_line`] with their numbers, 0 to 7, where they lie: for who looks at most lines to
    /// find that there is nothing in them. `None` where they are not kept as an array, or out of bounds.
    #[inline]
    pub fn fold_line<A>(
        &self,
        index: usize,
        start: A,
        f: impl Fn(A, (usize, u64)) -> A,
    ) -> Option<A> {
        Some(match &self.cells {
            Cells::Lazy(lazy) => {
                let line: &[u64; 8] = lazy.array()?.get(index..)?.first_chunk()?;
                line.iter().copied().enumerate().fold(start, f)
            }
            _ => {
                let line: &[AtomicU64; 8] = self.cells().ok()?.get(index..)?.first_chunk()?;
                line.iter().map(|w| w.load(Ordering::Relaxed)).enumerate().fold(start, f)
            }
        })
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
        let mut copy = Words::heap(self.len());
        for i in 0..self.len() {
            copy.store(i, self.load(i));
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
            let at = w.cells().map(|c| c.as_ptr().addr() % 64);
            assert!(at.is_ok_and(|at| at == 0), "{len}");
            assert_eq!((w.len(), w.snapshot().len()), (len, len));
        }
    }

    #[test]
    fn words_that_grow_are_as_any_others() {
        let mut w = Words::growing(64, 50);
        for i in (0..64).step_by(3) {
            w.store(i, i as u64 + 1);
        }
        let copy = w.snapshot();
        assert_eq!((w.len(), w.load(3), w.load(4)), (64, 4, 0));
        assert!((0..56).all(|i| w.load_line(i) == copy.load_line(i)));
        assert!(w.held_bytes() < 64 * 8 && copy.held_bytes() >= 64 * 8);
        // Line by line where they are an array: of cells, or of what has grown into one.
        let mut grown = Words::growing(64, 10);
        (0..64).for_each(|i| grown.store(i, copy.load(i)));
        let fold = |w: &Words, i| w.fold_line(i, 0, |sum, (k, word)| sum * 9 + word * k as u64);
        assert!((0..56).all(|i| fold(&grown, i) == fold(&copy, i) && fold(&copy, i).is_some()));
        assert!(fold(&copy, 8) != fold(&copy, 16) && fold(&copy, 57).is_none());
        assert!(fold(&Words::growing(64, 50), 8).is_none());
        w.set_fuse(0);
        w.store(4, 1);
        assert_eq!(w.load(4), 0);
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
