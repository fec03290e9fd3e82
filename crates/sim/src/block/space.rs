//! Volumes of a trace in the line space. Where their size is stated each has its place as the daemon gives it
//! ([`volumes`](larder_engine::block::volumes)), in the order in which they first come; else stretch by stretch as they are touched.

use std::collections::BTreeMap;

use larder_base::UnixSecs;
use larder_engine::block::volumes::{Coming, take_up};
use larder_format::Uuid;
use larder_format::block::layout::GROUP_LINES;
use larder_format::block::{BlockSuperblock, Layout};

/// Least bytes of a stretch.
const STRETCH: u64 = 1 << 30;

/// Which byte of which volume lies where. Neighbours within a volume, or a stretch of one, are neighbours in the line space.
#[derive(Debug)]
pub(crate) enum Space {
    Stated(Box<Stated>),
    Touched(Touched),
}

/// No place for a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPlace {
    /// The line space, of so many bytes, has no room for another volume or stretch.
    Full(u64),
    /// The volume ends before it.
    Beyond {
        /// The volume.
        volume: u32,
        /// The byte.
        offset: u64,
        /// What it has, bytes.
        bytes: u64,
    },
}

impl Space {
    /// `volume`: bytes of a volume, if that is known.
    pub(crate) fn new(layout: &Layout, volume: u64) -> Space {
        match volume {
            0 => Space::Touched(Touched::new(layout)),
            bytes => Space::Stated(Box::new(Stated::new(layout, bytes))),
        }
    }

    /// The address in the line space of byte `offset` of `volume`, and how many bytes from there on are neighbours.
    pub(crate) fn map(&mut self, volume: u32, offset: u64) -> Result<(u64, u64), NoPlace> {
        match self {
            Space::Stated(stated) => stated.map(volume, offset),
            Space::Touched(touched) => touched.map(volume, offset),
        }
    }

    /// The volume, and the byte in it, of an address; none of one where no volume lies.
    pub(crate) fn unmap(&self, address: u64) -> Option<(u32, u64)> {
        match self {
            Space::Stated(stated) => stated.unmap(address),
            Space::Touched(touched) => touched.unmap(address),
        }
    }
}

/// Volumes of the same size each.
#[derive(Debug)]
pub(crate) struct Stated {
    superblock: BlockSuperblock,
    bytes: u64,
    forward: BTreeMap<u32, u64>,
    /// By first byte.
    back: BTreeMap<u64, u32>,
}

impl Stated {
    fn new(layout: &Layout, bytes: u64) -> Stated {
        let superblock = BlockSuperblock::format(Uuid([0; 16]), 0, 0, *layout, UnixSecs(0));
        Stated { superblock, bytes, forward: BTreeMap::new(), back: BTreeMap::new() }
    }

    fn map(&mut self, volume: u32, offset: u64) -> Result<(u64, u64), NoPlace> {
        if offset >= self.bytes {
            return Err(NoPlace::Beyond { volume, offset, bytes: self.bytes });
        }
        let first = match self.forward.get(&volume) {
            Some(&first) => first,
            None => self.place(volume)?,
        };
        Ok((first + offset, self.bytes - offset))
    }

    fn place(&mut self, volume: u32) -> Result<u64, NoPlace> {
        let name = volume.to_string();
        let coming = Coming { name, bytes: self.bytes, unchanged: false, identity: [0; 64] };
        let layout = self.superblock.layout;
        let line = u64::from(layout.line);
        let taken = take_up(&mut self.superblock, &coming)
            .map_err(|_| NoPlace::Full(layout.space_lines() * line))?;
        let first = taken.volume.first_group * GROUP_LINES * line;
        self.forward.insert(volume, first);
        self.back.insert(first, volume);
        Ok(first)
    }

    fn unmap(&self, address: u64) -> Option<(u32, u64)> {
        let (first, volume) = self.back.range(..=address).next_back()?;
        (address - first < self.bytes).then_some((*volume, address - first))
    }
}

/// Volumes whose size nobody knows.
#[derive(Debug)]
pub(crate) struct Touched {
    stretch: u64,
    most: u64,
    /// Volume and number of the stretch in it.
    forward: BTreeMap<(u32, u64), u64>,
    back: Vec<(u32, u64)>,
}

impl Touched {
    fn new(layout: &Layout) -> Touched {
        let region = layout.region_groups * GROUP_LINES * u64::from(layout.line);
        let stretch = STRETCH.next_multiple_of(region);
        let bytes = layout.space_lines() * u64::from(layout.line);
        Touched { stretch, most: bytes / stretch, forward: BTreeMap::new(), back: Vec::new() }
    }

    fn map(&mut self, volume: u32, offset: u64) -> Result<(u64, u64), NoPlace> {
        let number = offset / self.stretch;
        let at = match self.forward.get(&(volume, number)) {
            Some(&at) => at,
            None => {
                let at = self.back.len() as u64;
                if at >= self.most {
                    return Err(NoPlace::Full(self.most * self.stretch));
                }
                self.back.push((volume, number));
                self.forward.insert((volume, number), at);
                at
            }
        };
        let within = offset % self.stretch;
        Ok((at * self.stretch + within, self.stretch - within))
    }

    fn unmap(&self, address: u64) -> Option<(u32, u64)> {
        let at = (address / self.stretch) as usize;
        let (volume, number) = self.back.get(at).copied()?;
        Some((volume, number * self.stretch + address % self.stretch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_back_and_do_not_meet() {
        let layout = Layout::new(64 << 20, 4096, 4, 1).unwrap();
        let mut space = Space::new(&layout, 0);
        let mut seen = BTreeMap::new();
        for volume in 0..5 {
            for offset in [0, 4096, 5 << 30, (1 << 50) + 512] {
                let (at, left) = space.map(volume, offset).unwrap();
                assert_eq!(space.unmap(at), Some((volume, offset)));
                assert!(left > 0 && offset % STRETCH + left == STRETCH);
                assert!(at < layout.space_lines() * 4096);
                assert_eq!(seen.insert(at, (volume, offset)), None);
                assert_eq!(space.map(volume, offset).unwrap().0, at);
            }
        }
        let many = (0..1u64 << 20).find_map(|i| space.map(9, i << 30).err());
        let all = layout.space_lines() * 4096 / STRETCH * STRETCH;
        assert_eq!(many.unwrap(), NoPlace::Full(all));
    }

    /// As the daemon has them: side by side, each as long as it is in whole regions.
    #[test]
    fn volumes_whose_size_is_stated_have_their_place_as_in_the_daemon() {
        const BYTES: u64 = (5 << 20) + 512;
        let layout = Layout::new(64 << 20, 4096, 4, 1).unwrap();
        let region = layout.region_groups * GROUP_LINES * 4096;
        let mut space = Space::new(&layout, BYTES);
        for (place, volume) in (0u64..).zip([7, 3, 5]) {
            let first = place * BYTES.next_multiple_of(region);
            assert_eq!(space.map(volume, 512), Ok((first + 512, BYTES - 512)));
            assert_eq!(space.map(volume, BYTES - 1), Ok((first + BYTES - 1, 1)));
            assert_eq!(space.unmap(first + 4096), Some((volume, 4096)));
            assert_eq!(space.unmap(first + BYTES), None, "nobody's");
            let beyond = NoPlace::Beyond { volume, offset: BYTES, bytes: BYTES };
            assert_eq!(space.map(volume, BYTES), Err(beyond));
        }
        let all = layout.space_lines() * 4096;
        let mut large = Space::new(&layout, all);
        assert_eq!(large.map(0, 0), Ok((0, all)));
        assert_eq!(large.map(1, 0), Err(NoPlace::Full(all)));
    }
}
