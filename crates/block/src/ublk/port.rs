//! `/dev/ublkcN`: where requests come from and answers go.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use larder_runtime::{COMMAND_BYTES, CommandRing};
use rustix::mm::{MapFlags, ProtFlags};

use super::abi::{self, DESCRIPTOR_BYTES};

/// Some queues of a device, as the thread that serves them sees them. A *slot* is one tag of one queue.
pub(super) trait Port {
    /// How many slots there are.
    fn slots(&self) -> usize;

    /// Readable (edge-triggered) when [`Port::next`] has something.
    fn fd(&self) -> RawFd;

    /// Asks for the first request of every slot. On the thread that is to serve them.
    fn fetch(&mut self) -> io::Result<()>;

    /// A slot that the driver has given back: with 0 there is a request in it, else an error, negative.
    fn next(&mut self) -> Option<(usize, i32)>;

    /// What is in the slot.
    fn descriptor(&self, slot: usize) -> [u8; DESCRIPTOR_BYTES];

    /// The data of the write in it.
    fn take_data(&mut self, slot: usize, into: &mut [u8]) -> io::Result<()>;

    /// The data of the read in it.
    fn give_data(&mut self, slot: usize, from: &[u8]) -> io::Result<()>;

    /// Its request has ended (bytes, or an error, negative), and the next, please.
    fn commit(&mut self, slot: usize, result: i32) -> io::Result<()>;

    /// Starts what was asked for and committed.
    fn submit(&mut self) -> io::Result<()>;
}

/// Memory from `mmap`.
struct Map {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone, like a box.
unsafe impl Send for Map {}

impl Map {
    /// Descriptors of a queue, which the driver writes.
    fn of(file: &File, offset: u64, len: usize) -> io::Result<Map> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                offset,
            )
        }?;
        Map::new(at.cast(), len)
    }

    /// Memory of our own, taken when it is touched.
    fn plain(len: usize) -> io::Result<Map> {
        let flags = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above.
        let at =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, flags, MapFlags::PRIVATE) }?;
        Map::new(at.cast(), len)
    }

    fn new(at: *mut u8, len: usize) -> io::Result<Map> {
        let at = NonNull::new(at).ok_or_else(|| io::Error::other("a mapping at address zero"))?;
        Ok(Map { at, len })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and nobody has a reference into it. It fails for bad arguments alone.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

struct Queue {
    number: u16,
    descriptors: Map,
    /// Where the driver copies data, `max_transfer` bytes a tag; none where they are read from the file.
    data: Option<Map>,
}

/// What is known of the device.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// `/dev/ublkcN`, open once for all threads.
    pub file: Arc<File>,
    /// Tags of each queue.
    pub depth: u16,
    /// Bytes of one request's data, at most.
    pub max_transfer: u32,
    /// Codes are made as those of ioctls.
    pub as_ioctl: bool,
    /// Data are read from and written to the file ([`abi::flag::USER_COPY`]).
    pub user_copy: bool,
}

/// Queues of a device of this kernel.
pub(super) struct KernelPort {
    ring: CommandRing,
    place: Place,
    queues: Vec<Queue>,
    /// Commands that have not ended.
    under_way: usize,
}

impl KernelPort {
    pub(super) fn open(place: Place, queues: &[u16]) -> io::Result<KernelPort> {
        let depth = usize::from(place.depth);
        let page = rustix::param::page_size();
        let open = |&number: &u16| {
            let (at, len) = abi::descriptors_at(number, place.depth, page);
            let descriptors = Map::of(&place.file, at, len)?;
            let data = match place.user_copy {
                true => None,
                false => Some(Map::plain(depth * place.max_transfer as usize)?),
            };
            Ok(Queue { number, descriptors, data })
        };
        let queues: Vec<Queue> = queues.iter().map(open).collect::<io::Result<_>>()?;
        let ring = CommandRing::open((queues.len() * depth).max(1) as u32)?;
        Ok(KernelPort { ring, place, queues, under_way: 0 })
    }

    fn at(&self, slot: usize) -> (&Queue, u16) {
        let depth = usize::from(self.place.depth);
        (&self.queues[slot / depth], (slot % depth) as u16)
    }

    /// Where the slot's data are copied, if they are.
    fn memory(&self, slot: usize) -> Option<NonNull<u8>> {
        let (queue, tag) = self.at(slot);
        let map = queue.data.as_ref()?;
        // SAFETY: a mapping has `max_transfer` bytes for each of `depth` tags, and `at` gives tags below that.
        Some(unsafe { map.at.add(usize::from(tag) * self.place.max_transfer as usize) })
    }

    fn ask(&mut self, number: u8, slot: usize, result: i32) -> io::Result<()> {
        let memory = self.memory(slot).map_or(0, |at| at.as_ptr().expose_provenance() as u64);
        let (queue, tag) = self.at(slot);
        let mut body = [0u8; COMMAND_BYTES];
        body[..abi::IO_BYTES].copy_from_slice(&abi::io_command(queue.number, tag, result, memory));
        let code = abi::io_code(number, self.place.as_ioctl);
        // SAFETY: the memory is the slot's own, `max_transfer` bytes, which the driver leaves alone from the end of the
        // command to the next; with commands under way it is never given back (`drop`). The file is kept open by `place`.
        unsafe { self.ring.push(self.place.file.as_fd(), code, &body, slot as u64)? };
        self.under_way += 1;
        Ok(())
    }
}

impl Drop for KernelPort {
    fn drop(&mut self) {
        if self.under_way > 0 {
            // The driver may still copy something there, behind the end of the ring.
            self.queues.iter_mut().filter_map(|q| q.data.take()).for_each(std::mem::forget);
        }
    }
}

impl Port for KernelPort {
    fn slots(&self) -> usize {
        self.queues.len() * usize::from(self.place.depth)
    }

    fn fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    fn fetch(&mut self) -> io::Result<()> {
        for slot in 0..self.slots() {
            self.ask(abi::io::FETCH, slot, 0)?;
        }
        self.ring.submit()
    }

    fn next(&mut self) -> Option<(usize, i32)> {
        let ended = self.ring.pop().or_else(|| {
            // Before the last look: what ends afterwards signals anew.
            self.ring.acknowledge();
            self.ring.pop()
        });
        let (slot, result) = ended?;
        self.under_way = self.under_way.saturating_sub(1);
        Some((slot as usize, result))
    }

    fn descriptor(&self, slot: usize) -> [u8; DESCRIPTOR_BYTES] {
        let (queue, tag) = self.at(slot);
        let at = usize::from(tag) * DESCRIPTOR_BYTES;
        // SAFETY: the mapping has a descriptor for each tag.
        let place = unsafe { queue.descriptors.at.add(at) };
        // SAFETY: as above. The driver may write meanwhile, as hardware would: all bytes are read once, each is a value, and
        // whatever comes of it is checked.
        unsafe { place.cast::<[u8; DESCRIPTOR_BYTES]>().read_volatile() }
    }

    fn take_data(&mut self, slot: usize, into: &mut [u8]) -> io::Result<()> {
        if let Some(from) = self.memory(slot) {
            let len = into.len().min(self.place.max_transfer as usize);
            // SAFETY: both have `len` bytes, and the mapping is no Rust object's. Between the end of a command and the next the
            // driver leaves it alone.
            unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), len) };
            return Ok(());
        }
        let (queue, tag) = self.at(slot);
        self.place.file.read_exact_at(into, abi::data_at(queue.number, tag))
    }

    fn give_data(&mut self, slot: usize, from: &[u8]) -> io::Result<()> {
        if let Some(into) = self.memory(slot) {
            let len = from.len().min(self.place.max_transfer as usize);
            // SAFETY: as in `take_data`.
            unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into.as_ptr(), len) };
            return Ok(());
        }
        let (queue, tag) = self.at(slot);
        self.place.file.write_all_at(from, abi::data_at(queue.number, tag))
    }

    fn commit(&mut self, slot: usize, result: i32) -> io::Result<()> {
        self.ask(abi::io::COMMIT_AND_FETCH, slot, result)
    }

    fn submit(&mut self) -> io::Result<()> {
        self.ring.submit()
    }
}
