//! The memory that a front end shares.

use std::fs::File;
use std::io;
use std::sync::Arc;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{Address, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

/// Regions, at most: what QEMU uses, with memory slots.
pub(super) const MAX_REGIONS: usize = 509;

/// Guest memory, mapped.
pub type Memory = GuestMemoryMmap<()>;

struct Region {
    map: Arc<GuestRegionMmap>,
    /// Its first byte in the front end's own address space, in which rings are named.
    user: u64,
}

/// What is mapped now. Requests under way keep what they began with.
#[derive(Default)]
pub(super) struct Shared {
    regions: Vec<Region>,
    memory: Arc<Memory>,
}

fn invalid(text: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text.to_string())
}

impl Shared {
    pub(super) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Another table in the place of this one.
    pub(super) fn replace(
        &mut self,
        table: impl Iterator<Item = (VhostUserMemoryRegion, File)>,
    ) -> io::Result<()> {
        let mut regions = Vec::new();
        for (region, file) in table {
            regions.push(map(&region, file)?);
        }
        self.set(regions)
    }

    /// One more region.
    pub(super) fn add(&mut self, region: &VhostUserMemoryRegion, file: File) -> io::Result<()> {
        let new = map(region, file)?;
        let mut regions: Vec<Region> = self.regions.iter().map(Region::again).collect();
        regions.push(new);
        self.set(regions)
    }

    /// One less.
    pub(super) fn remove(&mut self, region: &VhostUserMemoryRegion) -> io::Result<()> {
        let of = |r: &Region| (r.map.start_addr().0, r.map.len(), r.user);
        let gone = (region.guest_phys_addr, region.memory_size, region.user_addr);
        if !self.regions.iter().any(|r| of(r) == gone) {
            return Err(invalid("a memory region to be taken away that is not there"));
        }
        let left = self.regions.iter().filter(|r| of(r) != gone).map(Region::again).collect();
        self.set(left)
    }

    fn set(&mut self, mut regions: Vec<Region>) -> io::Result<()> {
        if regions.len() > MAX_REGIONS {
            return Err(invalid(format!("more than {MAX_REGIONS} memory regions")));
        }
        regions.sort_by_key(|r| r.map.start_addr().0);
        let memory = if regions.is_empty() {
            Memory::new()
        } else {
            Memory::from_arc_regions(regions.iter().map(|r| r.map.clone()).collect())
                .map_err(invalid)?
        };
        self.memory = Arc::new(memory);
        self.regions = regions;
        Ok(())
    }

    /// Where the guest sees what the front end sees there.
    pub(super) fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|r| {
            let offset = user.checked_sub(r.user).filter(|&o| o < r.map.len())?;
            r.map.start_addr().checked_add(offset)
        })
    }
}

impl Region {
    fn again(&self) -> Region {
        Region { map: self.map.clone(), user: self.user }
    }
}

fn map(region: &VhostUserMemoryRegion, file: File) -> io::Result<Region> {
    long_enough(&file, region.mmap_offset, region.memory_size)?;
    let mapping = region.mmap_region(file).map_err(|e| invalid(format!("guest memory: {e}")))?;
    let map = GuestRegionMmap::new(mapping, GuestAddress(region.guest_phys_addr))
        .ok_or_else(|| invalid("guest memory beyond the end of all addresses"))?;
    Ok(Region { map: Arc::new(map), user: region.user_addr })
}

/// Beyond the end of its file a mapping is a signal: nothing is mapped that is not there.
pub(super) fn long_enough(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    let has = file.metadata()?.len();
    match offset.checked_add(bytes) {
        Some(end) if end <= has => Ok(()),
        _ => Err(invalid(format!("shared memory of {bytes} bytes at {offset} in a file of {has}"))),
    }
}
