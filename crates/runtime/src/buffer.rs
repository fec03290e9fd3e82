//! Page-aligned memory, as `O_DIRECT` wants it, from pools that state their limit.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Alignment of every buffer and the smallest one, bytes.
pub const PAGE: usize = 4096;

/// A pool's buffers of at least this size are mappings of their own; smaller ones are parts of a [`Slab`].
const OWN: usize = 64 << 10;
/// Bytes of address space of a slab.
const SLAB: usize = 1 << 20;

/// A buffer whose address is a multiple of [`PAGE`]. Its bytes are always initialised (zero at first).
pub struct AlignedBuf {
    start: NonNull<u8>,
    /// Bytes in use, at most `capacity`.
    len: usize,
    /// Bytes allocated: a positive multiple of [`PAGE`].
    capacity: usize,
    source: Source,
}

/// Where a buffer's memory comes from.
enum Source {
    /// The allocator.
    Heap,
    /// A pool, as a mapping of its own.
    Mapped,
    /// A pool, as a part of this.
    Slab(#[expect(dead_code, reason = "kept as long as the buffer is")] Arc<Slab>),
}

/// Address space that small buffers of a pool lie in, side by side. The allocator would need twice as much for them, since each
/// has its bookkeeping before a page's border, and would keep most of it.
struct Slab {
    start: NonNull<u8>,
}

// SAFETY: nothing is read or written through it; its parts belong to one buffer each.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this very length; no buffer has a part of it any more, or it would not be dropped.
        unsafe { unmap(self.start, SLAB) }
    }
}

/// `len` zero bytes of their own, of which memory is taken page by page as they are touched.
fn map(len: usize) -> Option<NonNull<u8>> {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a new private mapping at an address that the system chooses touches no memory that is in use.
    let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, flags) };
    NonNull::new(start.ok()?.cast())
}

/// # Safety
/// `start..start + len` has been mapped by [`map`] with that length, and nobody has a part of it.
unsafe fn unmap(start: NonNull<u8>, len: usize) {
    // SAFETY: by the contract of this function. It fails only where there are too many mappings: then the memory stays.
    let _ = unsafe { rustix::mm::munmap(start.as_ptr().cast(), len) };
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
        AlignedBuf { start, len, capacity, source: Source::Heap }
    }

    /// As [`AlignedBuf::zeroed`], as a mapping of its own; where the system has no more of them, from the allocator.
    fn mapped(capacity: usize) -> AlignedBuf {
        match map(capacity) {
            Some(start) => AlignedBuf { start, len: capacity, capacity, source: Source::Mapped },
            None => AlignedBuf::zeroed(capacity),
        }
    }

    /// Gives the memory of its pages back to the system; they read as zeroes afterwards. False where the allocator has them.
    fn discard(&mut self) -> bool {
        if matches!(self.source, Source::Heap) {
            return false;
        }
        let start = self.start.as_ptr().cast();
        // SAFETY: whole pages of a private anonymous mapping, owned by self alone; they read as zeroes from now on, which are
        // initialised bytes.
        unsafe { rustix::mm::madvise(start, self.capacity, Advice::LinuxDontNeed) }.is_ok()
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
        match self.source {
            // SAFETY: allocated in `zeroed` with this very layout, and freed only here.
            Source::Heap => unsafe { dealloc(self.start.as_ptr(), Self::layout(self.capacity)) },
            // SAFETY: mapped in `mapped` with this very length, owned by self alone, and unmapped only here.
            Source::Mapped => unsafe { unmap(self.start, self.capacity) },
            // Its memory goes with the last of its buffers, or by `discard`.
            Source::Slab(_) => {}
        }
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

/// Buffers of power-of-two sizes that never take more than a stated number of bytes, in use and idle together, and give
/// back to the system what is idle for long ([`BufferPool::trim`]).
#[derive(Debug)]
pub struct BufferPool {
    limit: usize,
    /// Bytes handed out.
    in_use: usize,
    /// Bytes that somebody holds elsewhere on this pool's account.
    charged: usize,
    /// Bytes that somebody waits for.
    aside: usize,
    /// Bytes of who is to have its long buffer before all others.
    promised: usize,
    /// Bytes of idle buffers that have memory.
    idle_bytes: usize,
    /// By capacity.
    classes: BTreeMap<usize, Class>,
}

/// Buffers of one capacity that are not in use.
#[derive(Debug, Default)]
struct Class {
    /// With their memory.
    idle: Vec<AlignedBuf>,
    /// The fewest of those since the pool was last trimmed.
    least: usize,
    /// Parts of slabs without memory.
    bare: Vec<AlignedBuf>,
}

impl Class {
    /// Gives one idle buffer's memory back.
    fn release(&mut self) -> bool {
        let Some(mut buf) = self.idle.pop() else { return false };
        self.least = self.least.min(self.idle.len());
        // Mappings of their own go whole.
        if matches!(buf.source, Source::Slab(_)) && buf.discard() {
            self.bare.push(buf);
        }
        true
    }
}

impl BufferPool {
    /// A pool of at most `limit` bytes (rounded down to whole pages). Memory is taken as it is needed.
    pub fn new(limit: usize) -> BufferPool {
        BufferPool {
            limit: limit / PAGE * PAGE,
            in_use: 0,
            charged: 0,
            aside: 0,
            promised: 0,
            idle_bytes: 0,
            classes: BTreeMap::new(),
        }
    }

    /// The most it will ever hold, bytes.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Bytes it holds now, in use and idle, with what is charged to it.
    pub fn allocated(&self) -> usize {
        self.in_use + self.charged + self.idle_bytes
    }

    /// Bytes that could still be had.
    pub fn room(&self) -> usize {
        self.limit.saturating_sub(self.in_use + self.charged)
    }

    /// Bytes that could be had by who has some already: half is left for those who have nothing, and what somebody waits for ([`BufferPool::set_aside`]).
    pub fn spare(&self) -> usize {
        self.room().saturating_sub(self.limit / 2 + self.aside)
    }

    /// Somebody waits for so many bytes (0: nobody does): they are not [spare](BufferPool::spare).
    pub fn set_aside(&mut self, bytes: usize) {
        self.aside = bytes;
    }

    /// The next long buffer ([`BufferPool::lets_long`]) is for somebody who waits for so many bytes; 0: for whoever comes.
    pub fn promise(&mut self, bytes: usize) {
        self.promised = bytes;
    }

    /// Whether a buffer of `len` bytes is a long one, of which few fit: more than a 64th of the pool.
    pub fn is_long(&self, len: usize) -> bool {
        len > self.limit / 64
    }

    /// Whether a long buffer may be had now: with it an eighth of the pool is left for short ones, unless it is the only one, and
    /// so is what was [promised](BufferPool::promise).
    pub fn lets_long(&self, len: usize) -> bool {
        let alone = self.promised == 0 && self.room() == self.limit;
        self.class(len).is_some_and(|size| size <= self.room())
            && (alone || self.room() >= len + self.promised + self.limit / 8)
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
        let size = self.class(len)?;
        if size > self.room() {
            return None;
        }
        let class = self.classes.entry(size).or_default();
        let mut buf = if let Some(buf) = class.idle.pop() {
            class.least = class.least.min(class.idle.len());
            self.idle_bytes -= size;
            buf
        } else {
            self.shrink_to(self.limit - self.in_use - self.charged - size);
            self.classes.entry(size).or_default().bare.pop().unwrap_or_else(|| self.make(size))
        };
        self.in_use += size;
        buf.set_len(len);
        Some(buf)
    }

    /// Memory that was not there before.
    fn make(&mut self, size: usize) -> AlignedBuf {
        if size >= OWN {
            return AlignedBuf::mapped(size);
        }
        let Some(start) = map(SLAB) else { return AlignedBuf::zeroed(size) };
        let slab = Arc::new(Slab { start });
        let class = self.classes.entry(size).or_default();
        // Sizes below OWN that are no power of two, in a pool that is smaller than one, leave a rest.
        for at in (0..SLAB / size).rev() {
            // SAFETY: the part lies within the mapping, which `source` keeps, and belongs to this buffer alone.
            let start = unsafe { slab.start.add(at * size) };
            let source = Source::Slab(slab.clone());
            class.bare.push(AlignedBuf { start, len: size, capacity: size, source });
        }
        class.bare.pop().unwrap_or_else(|| AlignedBuf::zeroed(size))
    }

    /// Gives idle buffers up, the largest first, until they are at most `most` bytes.
    fn shrink_to(&mut self, most: usize) {
        for (&size, class) in self.classes.iter_mut().rev() {
            while self.idle_bytes > most && class.release() {
                self.idle_bytes -= size;
            }
        }
    }

    /// Counts `bytes` of other memory as taken from the pool, in place of `before` of the same holder. What is idle makes way
    /// for it; more than the limit can be charged, and then nothing can be had.
    pub fn charge(&mut self, before: usize, bytes: usize) {
        self.charged = self.charged.saturating_sub(before) + bytes;
        self.shrink_to(self.limit.saturating_sub(self.in_use + self.charged));
    }

    /// Whether a buffer of `len` bytes could ever be had from this pool.
    pub fn could_hold(&self, len: usize) -> bool {
        self.class(len).is_some()
    }

    /// Takes a buffer back. It must have come from this pool.
    pub fn give(&mut self, buf: AlignedBuf) {
        let size = buf.capacity();
        debug_assert!(size <= self.in_use);
        self.in_use = self.in_use.saturating_sub(size);
        self.idle_bytes += size;
        self.classes.entry(size).or_default().idle.push(buf);
        self.shrink_to(self.limit.saturating_sub(self.in_use + self.charged));
    }

    /// Gives the memory of up to `most` buffers back to the system, of those that were idle all the time since the pool was
    /// last trimmed. To be called from time to time; returns how many bytes went.
    pub fn trim(&mut self, most: usize) -> usize {
        let (mut left, mut gone) = (most, 0);
        for (&size, class) in self.classes.iter_mut().rev() {
            let now = class.least.min(left);
            for _ in 0..now {
                class.release();
            }
            left -= now;
            gone += now * size;
            class.least = class.idle.len();
        }
        self.idle_bytes -= gone;
        gone
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

    /// What the system has given for a buffer's pages.
    fn resident(buf: &AlignedBuf) -> usize {
        let mut pages = vec![0u8; buf.capacity() / PAGE];
        // SAFETY: the range is mapped, and `pages` has a byte for each of its pages.
        let result = unsafe {
            libc::mincore(buf.as_ptr().cast_mut().cast(), buf.capacity(), pages.as_mut_ptr())
        };
        assert_eq!(result, 0);
        pages.iter().filter(|&&p| p & 1 != 0).count() * PAGE
    }

    #[test]
    fn what_is_idle_for_long_is_given_back() {
        for size in [PAGE, 4 * PAGE, OWN, 16 * OWN] {
            let mut pool = BufferPool::new(64 * OWN);
            let count = 64 * OWN / size;
            let mut bufs: Vec<AlignedBuf> = (0..count).map(|_| pool.take(size).unwrap()).collect();
            assert!(pool.take(1).is_none());
            bufs.iter_mut().for_each(|b| b.fill(7));
            assert!(bufs.iter().all(|b| resident(b) == size));
            bufs.drain(..).for_each(|b| pool.give(b));
            assert_eq!((pool.trim(count), pool.allocated()), (0, 64 * OWN), "just given back");
            // One in use now and then stays.
            let one = pool.take(size).unwrap();
            assert_eq!((one[0], resident(&one)), (7, size));
            pool.give(one);
            assert_eq!(pool.trim(1), size, "no more than so many at once");
            pool.trim(count);
            assert_eq!(pool.allocated(), 0, "{size}");
            let one = pool.take(size).unwrap();
            assert!(resident(&one) == 0 && one.iter().all(|&b| b == 0), "{size}");
        }
    }

    #[test]
    fn what_is_charged_takes_room() {
        let mut pool = BufferPool::new(4 * OWN);
        let held = pool.take(OWN).unwrap();
        let idle = pool.take(2 * OWN).unwrap();
        pool.give(idle);
        pool.charge(0, 2 * OWN);
        assert_eq!((pool.room(), pool.allocated()), (OWN, 3 * OWN), "what was idle made way");
        assert!(pool.take(2 * OWN).is_none());
        pool.charge(2 * OWN, 9 * OWN);
        assert!(pool.room() == 0 && pool.take(1).is_none());
        pool.give(held);
        assert_eq!(pool.allocated(), 9 * OWN, "nothing is kept idle beyond the limit");
        pool.charge(9 * OWN, 0);
        assert_eq!(pool.room(), 4 * OWN);
    }

    #[test]
    fn a_limit_that_is_no_power_of_two_can_be_used_whole() {
        let mut pool = BufferPool::new(6 * PAGE + 17);
        assert_eq!(pool.take(5 * PAGE).map(|b| b.capacity()), Some(5 * PAGE));
    }
}
