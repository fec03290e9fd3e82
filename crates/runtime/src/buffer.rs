//! Page-aligned memory, as `O_DIRECT` wants it, from pools that state their limit.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of every buffer and the smallest one, bytes.
pub const PAGE: usize = 4096;

/// A buffer whose address is a multiple of [`PAGE`]. Its bytes are always initialised (zero at first).
pub struct AlignedBuf {
    start: NonNull<u8>,
    /// Bytes in use, at most `capacity`.
    len: usize,
    /// Bytes allocated: a positive multiple of [`PAGE`].
    capacity: usize,
}

// SAFETY: the buffer owns its memory alone, like a `Box<[u8]>`.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads, as with `Box<[u8]>`.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes. Memory is taken in whole pages (at least one).
    ///
    /// # Panics
    /// If `len` exceeds what an address space can hold; aborts when memory is exhausted, as `Vec` does.
    pub fn zeroed(len: usize) -> AlignedBuf {
        let capacity = len.max(1).next_multiple_of(PAGE);
        let layout = Self::layout(capacity);
        // SAFETY: the layout's size is not zero.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(raw) else { handle_alloc_error(layout) };
        AlignedBuf { start, len, capacity }
    }

    fn layout(capacity: usize) -> Layout {
        Layout::from_size_align(capacity, PAGE).expect("a buffer fits the address space")
    }

    /// Bytes allocated.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the length within the capacity. Bytes that come into view hold whatever was there before.
    ///
    /// # Panics
    /// If `len` exceeds the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "{len} exceeds a buffer of {}", self.capacity);
        self.len = len;
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this very layout, and freed only here.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.capacity)) }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len <= capacity` bytes from `start` are allocated, initialised and owned by self.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and self is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for AlignedBuf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for AlignedBuf {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuf")
            .field("len", &self.len)
            .field("capacity", &self.capacity)
            .finish()
    }
}

/// Buffers of power-of-two sizes that never take more than a stated number of bytes, in use and idle together.
#[derive(Debug)]
pub struct BufferPool {
    limit: usize,
    /// Bytes handed out and idle.
    allocated: usize,
    /// Idle buffers by capacity.
    idle: BTreeMap<usize, Vec<AlignedBuf>>,
}

impl BufferPool {
    /// A pool of at most `limit` bytes (rounded down to whole pages). Memory is taken as it is needed.
    pub fn new(limit: usize) -> BufferPool {
        BufferPool { limit: limit / PAGE * PAGE, allocated: 0, idle: BTreeMap::new() }
    }

    /// The most it will ever hold, bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes it holds now, in use and idle.
    pub fn allocated(&self) -> usize {
        self.allocated
    }

    /// What a buffer of `len` bytes takes from the pool: the next power of two, or whole pages where that would exceed
    /// the limit.
    fn class(&self, len: usize) -> Option<usize> {
        let pages = len.max(1).checked_next_multiple_of(PAGE)?;
        let rounded = pages.checked_next_power_of_two()?;
        if rounded <= self.limit { Some(rounded) } else { (pages <= self.limit).then_some(pages) }
    }

    /// A buffer of `len` bytes, its contents unspecified, or `None` when the limit would be passed. Idle buffers of
    /// other sizes are given up first.
    pub fn take(&mut self, len: usize) -> Option<AlignedBuf> {
        let class = self.class(len)?;
        if let Some(mut buf) = self.idle.get_mut(&class).and_then(Vec::pop) {
            buf.set_len(len);
            return Some(buf);
        }
        while self.allocated + class > self.limit {
            let (&size, list) = self.idle.iter_mut().rev().find(|(_, list)| !list.is_empty())?;
            list.pop();
            self.allocated -= size;
        }
        let mut buf = AlignedBuf::zeroed(class);
        self.allocated += class;
        buf.set_len(len);
        Some(buf)
    }

    /// Whether a buffer of `len` bytes could ever be had from this pool.
    pub fn could_hold(&self, len: usize) -> bool {
        self.class(len).is_some()
    }

    /// Takes a buffer back. It must have come from this pool.
    pub fn give(&mut self, buf: AlignedBuf) {
        debug_assert!(buf.capacity() <= self.allocated);
        self.idle.entry(buf.capacity()).or_default().push(buf);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    #[test]
    fn buffers_are_aligned_and_zero() {
        for len in [0, 1, 4095, 4096, 4097, 1 << 20] {
            let buf = AlignedBuf::zeroed(len);
            assert_eq!((buf.len(), buf.as_ptr() as usize % PAGE), (len, 0));
            assert!(buf.iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn the_pool_keeps_to_its_limit_and_gives_all_of_it() {
        let mut pool = BufferPool::new(64 * 1024);
        let mut held: Vec<AlignedBuf> = Vec::new();
        let mut rng = Rng::new(3);
        let (mut given, mut refused) = (0, 0);
        for _ in 0..20_000 {
            if rng.chance(0.5) && !held.is_empty() {
                let i = rng.below(held.len() as u64) as usize;
                pool.give(held.swap_remove(i));
            } else if let Some(mut buf) = pool.take(rng.range(1, 20_000) as usize) {
                buf.fill(given as u8);
                given += 1;
                held.push(buf);
            } else {
                refused += 1;
            }
            let in_use: usize = held.iter().map(AlignedBuf::capacity).sum();
            assert!(in_use <= pool.allocated() && pool.allocated() <= pool.limit());
        }
        assert!(given > 1_000 && refused > 1_000, "{given} {refused}");
        held.drain(..).for_each(|b| pool.give(b));
        assert!(pool.take(64 * 1024).is_some(), "idle buffers of other sizes give way");
        assert!(pool.take(1).is_none());
        assert!(!pool.could_hold(64 * 1024 + 1) && !pool.could_hold(usize::MAX));
    }

    #[test]
    fn a_limit_that_is_no_power_of_two_can_be_used_whole() {
        let mut pool = BufferPool::new(6 * PAGE + 17);
        assert_eq!(pool.take(5 * PAGE).map(|b| b.capacity()), Some(5 * PAGE));
    }
}
