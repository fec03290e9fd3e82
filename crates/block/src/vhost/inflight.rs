//! Which requests were begun and not answered, in memory that the front end keeps while this process is gone
//! (vhost-user, "Inflight I/O tracking").
//!
//! ```text
//! for each queue: features u64 | version u16 | descriptors u16 | last batch head u16 | used index u16
//!                 then for each descriptor: in flight u8 | 5 zero | next u16 | counter u64
//! ```
//!
//! All little-endian; a queue's part begins at a multiple of 64 bytes. Requests end one by one: a batch is one request. The
//! order of the stores is what makes it whole at any moment: the mark is set before a request is begun; the head of the
//! batch is noted, the used ring moves on, the mark is cleared, the used index is noted.

use std::fs::File;
use std::io;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use super::memory::long_enough;

const VERSION: u16 = 1;
const HEAD: usize = 16;
const ENTRY: usize = 16;
const AT_VERSION: usize = 8;
const AT_LEN: usize = 10;
const AT_BATCH: usize = 12;
const AT_USED: usize = 14;

/// The shared memory.
#[derive(Debug)]
pub struct Inflight {
    map: MmapRegion,
    queues: u16,
    len: u16,
    counter: u64,
}

fn stride(len: u16) -> usize {
    (HEAD + ENTRY * usize::from(len)).next_multiple_of(64)
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

impl Inflight {
    /// New memory for `queues` queues of `len` descriptors, and the file to share it by. Nobody can make it shorter.
    ///
    /// # Errors
    /// The system's.
    pub fn create(queues: u16, len: u16) -> io::Result<(Inflight, File, u64)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("larder-inflight", flags)?);
        let bytes = (stride(len) * usize::from(queues)) as u64;
        file.set_len(bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let shared = file.try_clone()?;
        let inflight = Inflight::adopt(file, 0, bytes, queues, len)?;
        Ok((inflight, shared, bytes))
    }

    /// Memory that a front end has kept.
    ///
    /// # Errors
    /// When it is too short, is of another shape, or could be made shorter under our hands.
    pub fn adopt(
        file: File,
        offset: u64,
        bytes: u64,
        queues: u16,
        len: u16,
    ) -> io::Result<Inflight> {
        let needed = (stride(len) * usize::from(queues)) as u64;
        if bytes < needed {
            return Err(invalid(format!("{bytes} bytes for requests under way: {needed} needed")));
        }
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(invalid("the memory for requests under way can be cut short".into()));
        }
        long_enough(&file, offset, needed)?;
        let map = MmapRegion::from_file(FileOffset::new(file, offset), needed as usize)
            .map_err(|e| invalid(e.to_string()))?;
        let mut inflight = Inflight { map, queues, len, counter: 0 };
        for queue in 0..queues {
            inflight.check(queue)?;
        }
        Ok(inflight)
    }

    fn check(&mut self, queue: u16) -> io::Result<()> {
        let (version, len): (u16, u16) = (self.get(queue, AT_VERSION), self.get(queue, AT_LEN));
        match version {
            // Never used.
            0 => {
                self.put(queue, AT_LEN, self.len);
                self.put(queue, AT_VERSION, VERSION);
            }
            VERSION if len == self.len => {}
            _ => return Err(invalid(format!("requests under way: version {version} of {len}"))),
        }
        for head in 0..self.len {
            let counter = self.get::<u64>(queue, HEAD + ENTRY * usize::from(head) + 8);
            self.counter = self.counter.max(counter);
        }
        Ok(())
    }

    /// It has this queue, and all of its descriptors.
    pub fn covers(&self, queue: usize, size: u16) -> bool {
        queue < usize::from(self.queues) && size <= self.len
    }

    /// Places are computed from numbers below the limits: they are within the memory, and aligned.
    fn at(&self, queue: u16, offset: usize) -> usize {
        stride(self.len) * usize::from(queue) + offset
    }

    fn get<T: vm_memory::AtomicAccess + Default>(&self, queue: u16, offset: usize) -> T {
        let at = self.at(queue, offset);
        self.map.as_volatile_slice().load(at, Ordering::Acquire).unwrap_or_default()
    }

    fn put<T: vm_memory::AtomicAccess>(&self, queue: u16, offset: usize, value: T) {
        let at = self.at(queue, offset);
        let stored = self.map.as_volatile_slice().store(value, at, Ordering::Release);
        debug_assert!(stored.is_ok(), "within the memory");
    }

    fn entry(head: u16) -> usize {
        HEAD + ENTRY * usize::from(head)
    }

    /// A request is begun.
    pub fn begin(&mut self, queue: usize, head: u16) {
        if !self.covers(queue, head.saturating_add(1)) {
            return;
        }
        self.counter = self.counter.wrapping_add(1);
        self.put(queue as u16, Self::entry(head) + 8, self.counter);
        self.put(queue as u16, Self::entry(head), 1u8);
    }

    /// A request is about to be put into the used ring.
    pub fn ending(&self, queue: usize, head: u16) {
        if self.covers(queue, head.saturating_add(1)) {
            let queue = queue as u16;
            let before: u16 = self.get(queue, AT_BATCH);
            self.put(queue, Self::entry(head) + 6, before);
            self.put(queue, AT_BATCH, head);
        }
    }

    /// It is in the used ring, whose index is `used` now.
    pub fn ended(&self, queue: usize, head: u16, used: u16) {
        if self.covers(queue, head.saturating_add(1)) {
            fence(Ordering::SeqCst);
            self.put(queue as u16, Self::entry(head), 0u8);
            self.put(queue as u16, AT_USED, used);
        }
    }

    /// What was begun and not answered when the used ring's index was `used`, in the order it was begun in.
    pub fn recover(&self, queue: usize, size: u16, used: u16) -> Vec<u16> {
        if !self.covers(queue, size) {
            return Vec::new();
        }
        let q = queue as u16;
        if self.get::<u16>(q, AT_USED) != used {
            // It ended between the ring and the mark.
            let head: u16 = self.get(q, AT_BATCH);
            if head < self.len {
                self.put(q, Self::entry(head), 0u8);
            }
            self.put(q, AT_USED, used);
        }
        let mut open: Vec<(u64, u16)> = (0..size)
            .filter(|&head| self.get::<u8>(q, Self::entry(head)) == 1)
            .map(|head| (self.get(q, Self::entry(head) + 8), head))
            .collect();
        open.sort_unstable();
        open.into_iter().map(|(_, head)| head).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(file: &File, bytes: u64) -> Inflight {
        Inflight::adopt(file.try_clone().unwrap(), 0, bytes, 3, 8).unwrap()
    }

    #[test]
    fn what_was_begun_is_found_again_in_its_order() {
        let (mut first, file, bytes) = Inflight::create(3, 8).unwrap();
        for head in [5, 2, 7, 0] {
            first.begin(1, head);
        }
        first.ending(1, 2);
        first.ended(1, 2, 1);
        // Killed before the ring moved on: 7 is still to be answered.
        first.ending(1, 7);
        drop(first);
        let mut second = again(&file, bytes);
        assert_eq!(second.recover(1, 8, 1), [5, 7, 0]);
        assert!(second.recover(0, 8, 0).is_empty());
        second.begin(1, 2);
        // Killed after the ring moved on and before the mark was cleared: 7 is answered.
        second.ending(1, 7);
        drop(second);
        let third = again(&file, bytes);
        assert_eq!(third.recover(1, 8, 2), [5, 0, 2]);
        assert_eq!(third.recover(1, 8, 2), [5, 0, 2]);
        // Of a queue that it does not cover it knows nothing.
        assert!(third.recover(3, 8, 0).is_empty());
        assert!(third.recover(0, 16, 0).is_empty());
    }

    #[test]
    fn memory_that_cannot_be_trusted_is_refused() {
        let (_inflight, file, bytes) = Inflight::create(2, 8).unwrap();
        let adopt = |bytes, queues, len| {
            Inflight::adopt(file.try_clone().unwrap(), 0, bytes, queues, len).map(|_| ())
        };
        assert!(adopt(bytes, 2, 8).is_ok());
        assert!(adopt(bytes - 1, 2, 8).is_err(), "too short");
        assert!(adopt(bytes, 1, 16).is_err(), "of another shape");
        assert!(adopt(u64::MAX, 3, 8).is_err(), "longer than the file");
        let plain = tempfile::tempfile().unwrap();
        plain.set_len(1 << 20).unwrap();
        assert!(Inflight::adopt(plain, 0, 1 << 20, 1, 8).is_err(), "can be cut short");
    }

    /// Whatever a front end has written there: heads within the queue, each once, and no panic.
    #[test]
    fn garbage() {
        let mut rng = larder_base::Rng::new(11);
        for _ in 0..500 {
            let (inflight, _file, bytes) = Inflight::create(1, 16).unwrap();
            let mut raw = vec![0u8; bytes as usize];
            raw.iter_mut().for_each(|b| *b = rng.below(3) as u8);
            inflight.map.as_volatile_slice().write_slice(&raw, 0).unwrap();
            let heads = inflight.recover(0, 16, rng.below(65536) as u16);
            let mut sorted = heads.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert!(sorted.len() == heads.len() && heads.iter().all(|&h| h < 16));
        }
    }
}
