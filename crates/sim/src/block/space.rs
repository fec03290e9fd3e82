//! Volumes of a trace, whose sizes nobody knows, in the line space: stretch by stretch as they are touched.

use std::collections::BTreeMap;

use larder_format::block::Layout;
use larder_format::block::layout::GROUP_LINES;

/// Least bytes of a stretch.
const STRETCH: u64 = 1 << 30;

/// Which stretch of which volume lies where. Neighbours within a stretch are neighbours in the line space, as they are in
/// the daemon, which gives a volume all of its stretch when it is attached.
#[derive(Debug)]
pub(crate) struct Space {
    stretch: u64,
    most: u64,
    /// Volume and number of the stretch in it.
    forward: BTreeMap<(u32, u64), u64>,
    back: Vec<(u32, u64)>,
}

/// The line space has no room for another stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full {
    /// Bytes of the line space.
    pub bytes: u64,
}

impl Space {
    /// `volume`: bytes of a volume, if that is known.
    pub(crate) fn new(layout: &Layout, volume: u64) -> Space {
        let region = layout.region_groups * GROUP_LINES * u64::from(layout.line);
        let stretch = STRETCH.max(volume).next_multiple_of(region);
        let bytes = layout.space_lines() * u64::from(layout.line);
        Space { stretch, most: bytes / stretch, forward: BTreeMap::new(), back: Vec::new() }
    }

    /// The address in the line space of byte `offset` of `volume`, and how many bytes from there on are neighbours.
    pub(crate) fn map(&mut self, volume: u32, offset: u64) -> Result<(u64, u64), Full> {
        let number = offset / self.stretch;
        let at = match self.forward.get(&(volume, number)) {
            Some(&at) => at,
            None => {
                let at = self.back.len() as u64;
                if at >= self.most {
                    return Err(Full { bytes: self.most * self.stretch });
                }
                self.back.push((volume, number));
                self.forward.insert((volume, number), at);
                at
            }
        };
        let within = offset % self.stretch;
        Ok((at * self.stretch + within, self.stretch - within))
    }

    /// The volume, and the byte in it, of an address that was mapped.
    pub(crate) fn unmap(&self, address: u64) -> (u32, u64) {
        let at = (address / self.stretch) as usize;
        let (volume, number) = self.back.get(at).copied().unwrap_or_default();
        (volume, number * self.stretch + address % self.stretch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_lead_back_and_do_not_meet() {
        let layout = Layout::new(64 << 20, 4096, 4, 1).unwrap();
        let mut space = Space::new(&layout, 0);
        let mut seen = std::collections::BTreeMap::new();
        for volume in 0..5 {
            for offset in [0, 4096, 5 << 30, (1 << 50) + 512] {
                let (at, left) = space.map(volume, offset).unwrap();
                assert_eq!(space.unmap(at), (volume, offset));
                assert!(left > 0 && offset % STRETCH + left == STRETCH);
                assert!(at < layout.space_lines() * 4096);
                assert_eq!(seen.insert(at, (volume, offset)), None);
                assert_eq!(space.map(volume, offset).unwrap().0, at);
            }
        }
        let many = (0..1u64 << 20).find_map(|i| space.map(9, i << 30).err());
        assert_eq!(many.unwrap().bytes, layout.space_lines() * 4096 / STRETCH * STRETCH);
    }
}
