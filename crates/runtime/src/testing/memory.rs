//! A device in memory that knows what would survive a power cut.

use std::fmt;
use std::sync::{Arc, Mutex};

use larder_base::Rng;

use super::locked;
use crate::buffer::PAGE;
use crate::device::{Device, Geometry, check_range};
use crate::error::{DeviceError, IoOp};

/// A device whose bytes lie in memory: the live ones, as reads show them, and the durable ones, as of the last sync.
/// Writes since then are remembered one by one, so that [`MemoryDevice::power_cut`] can lose, tear and reorder them.
pub struct MemoryDevice {
    name: Arc<str>,
    block: u32,
    state: Mutex<State>,
}

#[derive(Clone)]
struct State {
    live: Vec<u8>,
    durable: Vec<u8>,
    unsynced: Vec<(u64, Vec<u8>)>,
}

impl MemoryDevice {
    /// `size` zero bytes (rounded down to whole pages) in blocks of 512.
    pub fn new(size: usize) -> MemoryDevice {
        MemoryDevice::from_bytes(vec![0; size / PAGE * PAGE])
    }

    /// A device that holds an image, all of it durable. A last partial page is filled up with zeros.
    pub fn from_bytes(mut image: Vec<u8>) -> MemoryDevice {
        image.resize(image.len().next_multiple_of(PAGE), 0);
        let state = State { durable: image.clone(), live: image, unsynced: Vec::new() };
        MemoryDevice { name: "memory".into(), block: 512, state: Mutex::new(state) }
    }

    /// The device as the next start finds it when the power goes now. Each write since the last sync has, by chance,
    /// landed whole, not at all, or torn into any subset of its blocks; and where writes overlap, any of them may have
    /// landed last. This device itself is left as it is.
    pub fn power_cut(&self, rng: &mut Rng) -> MemoryDevice {
        let mut state = locked(&self.state).clone();
        rng.shuffle(&mut state.unsynced);
        let block = self.block as usize;
        for (offset, bytes) in &state.unsynced {
            let fate = rng.below(3);
            for (i, chunk) in bytes.chunks(block).enumerate() {
                if fate == 0 || (fate == 1 && rng.chance(0.5)) {
                    let at = *offset as usize + i * block;
                    state.durable[at..at + chunk.len()].copy_from_slice(chunk);
                }
            }
        }
        MemoryDevice::from_bytes(state.durable)
    }

    /// The bytes as reads show them now.
    pub fn live(&self) -> Vec<u8> {
        locked(&self.state).live.clone()
    }

    /// The bytes that are certain to survive a power cut.
    pub fn durable(&self) -> Vec<u8> {
        locked(&self.state).durable.clone()
    }

    /// Bytes written since the last sync.
    pub fn unsynced_bytes(&self) -> u64 {
        locked(&self.state).unsynced.iter().map(|(_, b)| b.len() as u64).sum()
    }

    /// Bit rot: flips `bits` random bits of the medium within `len` bytes from `offset`, in the live and the durable
    /// bytes alike.
    ///
    /// # Panics
    /// If the range is empty or not within the device.
    pub fn rot(&self, offset: u64, len: u64, bits: u32, rng: &mut Rng) {
        let state = &mut *locked(&self.state);
        for _ in 0..bits {
            let (at, bit) = ((offset + rng.below(len)) as usize, 1 << rng.below(8));
            state.live[at] ^= bit;
            state.durable[at] ^= bit;
        }
    }
}

impl Device for MemoryDevice {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        Geometry { size: locked(&self.state).live.len() as u64, block: self.block }
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        check_range(self, IoOp::Read, offset, out.len() as u64)?;
        let at = offset as usize;
        out.copy_from_slice(&locked(&self.state).live[at..at + out.len()]);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        check_range(self, IoOp::Write, offset, bytes.len() as u64)?;
        let mut state = locked(&self.state);
        let at = offset as usize;
        state.live[at..at + bytes.len()].copy_from_slice(bytes);
        state.unsynced.push((offset, bytes.to_vec()));
        Ok(())
    }

    fn sync(&self) -> Result<(), DeviceError> {
        let state = &mut *locked(&self.state);
        for (offset, bytes) in state.unsynced.drain(..) {
            let at = offset as usize;
            state.durable[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        check_range(self, IoOp::Discard, offset, len)?;
        // Reads zero afterwards, like a hole; until a sync it may yet come back, like any write.
        let mut state = locked(&self.state);
        let at = offset as usize;
        state.live[at..at + len as usize].fill(0);
        state.unsynced.push((offset, vec![0; len as usize]));
        Ok(())
    }
}

impl fmt::Debug for MemoryDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryDevice").field("geometry", &self.geometry()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(byte: u8) -> Vec<u8> {
        vec![byte; PAGE]
    }

    #[test]
    fn a_power_cut_keeps_what_was_synced_and_any_blocks_of_the_rest() {
        let device = MemoryDevice::new(16 * PAGE);
        device.write_at(0, &page(1)).unwrap();
        device.sync().unwrap();
        device.write_at(0, &page(2)).unwrap();
        device.write_at(0, &page(3)).unwrap();
        device.write_at(PAGE as u64, &page(4)).unwrap();
        let (mut old, mut second, mut third, mut torn) = (0, 0, 0, 0);
        for seed in 0..500 {
            let after = device.power_cut(&mut Rng::new(seed)).live();
            for block in after[..PAGE].chunks(512) {
                assert!(block.iter().all(|&b| b == block[0]), "blocks are whole");
                match block[0] {
                    1 => old += 1,
                    2 => second += 1,
                    3 => third += 1,
                    other => panic!("byte {other} was never written here"),
                }
            }
            let neighbour = &after[PAGE..2 * PAGE];
            torn += i32::from(neighbour.contains(&0) && neighbour.contains(&4));
            assert!(after[2 * PAGE..].iter().all(|&b| b == 0));
        }
        assert!(
            old > 300 && second > 300 && third > 300 && torn > 50,
            "{old} {second} {third} {torn}"
        );
        device.sync().unwrap();
        assert_eq!(device.power_cut(&mut Rng::new(9)).live()[..PAGE], page(3));
        assert_eq!(device.unsynced_bytes(), 0);
    }

    #[test]
    fn rot_flips_exactly_that_many_bits_of_the_medium() {
        let device = MemoryDevice::new(4 * PAGE);
        device.rot(PAGE as u64, PAGE as u64, 1, &mut Rng::new(5));
        let ones = |bytes: &[u8]| bytes.iter().map(|b| b.count_ones()).sum::<u32>();
        assert_eq!(ones(&device.live()), 1);
        assert_eq!(ones(&device.durable()[PAGE..2 * PAGE]), 1);
    }

    #[test]
    fn refuses_what_a_disk_refuses() {
        let device = MemoryDevice::new(PAGE);
        assert!(matches!(device.write_at(1, &page(1)), Err(DeviceError::OutOfRange { .. })));
        assert!(matches!(device.write_at(0, &[0; 100]), Err(DeviceError::Misaligned { .. })));
        assert!(matches!(
            device.read_at(u64::MAX, &mut [0; 2]),
            Err(DeviceError::OutOfRange { .. })
        ));
        assert!(device.read_at(4095, &mut [0; 1]).is_ok());
    }
}
