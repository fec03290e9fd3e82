//! A list that knows how much its nodes take.

use larder_base::slab::{List, Slab};

/// What most policies keep of an object.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) tag: u32,
    pub(super) size: u32,
    /// Uses counted since some event; saturates.
    pub(super) uses: u8,
    /// Which queue the node is in (each policy has its own numbers).
    pub(super) place: u8,
}

impl Entry {
    pub(super) fn new(tag: u32, size: u32, place: u8) -> Entry {
        Entry { tag, size, uses: 0, place }
    }
}

/// Something that takes room.
pub(super) trait Sized32 {
    fn size(&self) -> u32;
}

impl Sized32 for Entry {
    #[inline]
    fn size(&self) -> u32 {
        self.size
    }
}

/// A [`List`] with the sum of its sizes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Queue {
    pub(super) list: List,
    pub(super) bytes: u64,
}

impl Queue {
    #[inline]
    pub(super) fn push_front<T: Sized32>(&mut self, slab: &mut Slab<T>, at: u32) {
        self.bytes += u64::from(slab.get(at).size());
        self.list.push_front(slab, at);
    }

    #[inline]
    pub(super) fn unlink<T: Sized32>(&mut self, slab: &mut Slab<T>, at: u32) {
        self.bytes -= u64::from(slab.get(at).size());
        self.list.unlink(slab, at);
    }

    #[inline]
    pub(super) fn pop_back<T: Sized32>(&mut self, slab: &mut Slab<T>) -> Option<u32> {
        let at = self.list.pop_back(slab)?;
        self.bytes -= u64::from(slab.get(at).size());
        Some(at)
    }
}
