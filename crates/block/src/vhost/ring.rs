//! A queue of the device, and what goes with it.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::OFlags;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestAddress;

use super::config::MAX_QUEUE_SIZE;
use super::memory::{Memory, Shared};
use super::request::{Parsed, Table};

/// Where the parts of a ring lie, in the front end's address space.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    pub descriptors: u64,
    pub available: u64,
    pub used: u64,
}

/// A request that has been taken and waits for memory.
pub(super) struct Waiting {
    pub parsed: Parsed,
    /// It was begun before this process was.
    pub resumed: bool,
}

/// A queue.
pub(super) struct Ring {
    pub queue: Queue,
    pub size: u16,
    pub places: Option<Places>,
    /// Where the front end says that it is to go on.
    pub base: u16,
    pub kick: Option<File>,
    call: Option<File>,
    err: Option<File>,
    pub enabled: bool,
    /// The guest broke its rules: nothing more until the front end starts it anew.
    pub broken: bool,
    /// There may be something to take.
    pub kicked: bool,
    /// Taken, and waiting for memory.
    pub waiting: Option<Waiting>,
    /// Begun before this process was, and not answered.
    pub again: VecDeque<u16>,
    /// Taken and not answered.
    pub under_way: u32,
    /// Something was answered, and the guest not told yet.
    pub answered: bool,
}

impl Ring {
    pub(super) fn new() -> Ring {
        Ring {
            // A power of two within the crate's limit.
            queue: Queue::new(MAX_QUEUE_SIZE).unwrap_or_default(),
            size: MAX_QUEUE_SIZE,
            places: None,
            base: 0,
            kick: None,
            call: None,
            err: None,
            enabled: false,
            broken: false,
            kicked: false,
            waiting: None,
            again: VecDeque::new(),
            under_way: 0,
            answered: false,
        }
    }

    /// It may be worked on.
    pub(super) fn runs(&self) -> bool {
        self.queue.ready() && self.enabled && !self.broken
    }

    pub(super) fn set_call(&mut self, file: Option<File>) {
        self.call = file.inspect(unblocked);
    }

    pub(super) fn set_err(&mut self, file: Option<File>) {
        self.err = file.inspect(unblocked);
    }

    /// The table that chains are read from.
    pub(super) fn table(&self) -> Table {
        Table { at: GuestAddress(self.queue.desc_table()), len: self.queue.size() }
    }

    /// Puts the ring where the front end has said. `false`: it does not lie in the shared memory.
    pub(super) fn place(&mut self, shared: &Shared) -> bool {
        let Some(places) = self.places else { return false };
        let at = |user| shared.guest_address(user);
        let (Some(descriptors), Some(available), Some(used)) =
            (at(places.descriptors), at(places.available), at(places.used))
        else {
            return false;
        };
        self.queue.try_set_size(self.size).is_ok()
            && self.queue.try_set_desc_table_address(descriptors).is_ok()
            && self.queue.try_set_avail_ring_address(available).is_ok()
            && self.queue.try_set_used_ring_address(used).is_ok()
    }

    /// The first descriptor of the next chain that the guest has made available.
    ///
    /// # Errors
    /// In words, when the ring cannot be what it says.
    pub(super) fn take(&mut self, memory: &Memory) -> Result<Option<u16>, String> {
        if self.under_way >= u32::from(self.queue.size()) {
            // Only a guest that offers a chain twice gets here: it cannot have that many of them.
            return match self.queue.avail_idx(memory, std::sync::atomic::Ordering::Acquire) {
                Ok(idx) if idx.0 == self.queue.next_avail() => Ok(None),
                Ok(_) => Err("more requests than the ring has descriptors".into()),
                Err(e) => Err(e.to_string()),
            };
        }
        let mut chains = self.queue.iter(memory).map_err(|e| e.to_string())?;
        Ok(chains.next().map(|chain| chain.head_index()))
    }

    /// Tells the guest of what was answered, if it wants to know.
    pub(super) fn tell(&mut self, memory: &Memory) {
        if std::mem::take(&mut self.answered)
            && self.queue.needs_notification(memory).unwrap_or(true)
        {
            signal(self.call.as_ref());
        }
    }

    /// What was taken and waits is as if it had not been taken.
    pub(super) fn put_back(&mut self) {
        if let Some(waiting) = self.waiting.take() {
            self.under_way -= 1;
            if waiting.resumed {
                self.again.push_front(waiting.parsed.head);
            } else {
                self.queue.go_to_previous_position();
                self.kicked = true;
            }
        }
    }

    /// The ring is given up.
    pub(super) fn fail(&mut self) {
        self.broken = true;
        self.put_back();
        self.again.clear();
        signal(self.err.as_ref());
    }

    /// As it was at first; what is under way is not forgotten.
    pub(super) fn reset(&mut self) {
        let under_way = self.under_way;
        *self = Ring { under_way, ..Ring::new() };
    }
}

/// A counter that is full wakes whom it is for all the same.
fn signal(file: Option<&File>) {
    if let Some(file) = file {
        let _ = rustix::io::write(file.as_fd(), &1u64.to_ne_bytes());
    }
}

/// No front end can make us wait by a full counter.
fn unblocked(file: &File) {
    if let Ok(flags) = rustix::fs::fcntl_getfl(file) {
        let _ = rustix::fs::fcntl_setfl(file, flags | OFlags::NONBLOCK);
    }
}

/// The memory that a request began with.
pub(super) type Kept = Arc<Memory>;
