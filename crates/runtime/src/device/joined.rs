//! Several devices that are read as one: each has a range of addresses of its own.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::{Device, Geometry};
use crate::error::{DeviceError, IoOp};

/// Bits of an address within one device: 16 TiB and more.
const BITS: u32 = 46;

/// Devices by place. An address says in its upper bits which; see [`JoinedDevices::address`]. For reads: whoever writes has the device itself.
#[derive(Debug)]
pub struct JoinedDevices {
    name: Arc<str>,
    devices: Vec<Option<Arc<dyn Device>>>,
}

impl JoinedDevices {
    /// These, by place.
    pub fn new(devices: Vec<Option<Arc<dyn Device>>>) -> JoinedDevices {
        let names: Vec<&str> = devices.iter().flatten().map(|d| &**d.name()).collect();
        JoinedDevices { name: names.join(", ").into(), devices }
    }

    /// Where the bytes at `offset` of the device at `place` are.
    pub fn address(place: usize, offset: u64) -> u64 {
        (place as u64) << BITS | offset
    }

    fn at(&self, op: IoOp, address: u64, len: u64) -> Result<(&Arc<dyn Device>, u64), DeviceError> {
        let (place, offset) = ((address >> BITS) as usize, address & ((1 << BITS) - 1));
        let device = self.devices.get(place).and_then(Option::as_ref);
        let device = device.ok_or_else(|| {
            let device = self.name.clone();
            DeviceError::OutOfRange { device, op, offset: address, len, size: 0 }
        })?;
        super::check_range(&**device, op, offset, len)?;
        Ok((device, offset))
    }
}

impl Device for JoinedDevices {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        let all = || self.devices.iter().flatten().map(|device| device.geometry());
        Geometry {
            size: (self.devices.len() as u64) << BITS,
            block: all().map(|g| g.block).max().unwrap_or(4096),
        }
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        let (device, at) = self.at(IoOp::Read, offset, out.len() as u64)?;
        device.read_at(at, out)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let (device, at) = self.at(IoOp::Write, offset, bytes.len() as u64)?;
        device.write_at(at, bytes)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        self.devices.iter().flatten().try_for_each(|device| device.sync())
    }

    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        let (device, at) = self.at(IoOp::Discard, offset, len)?;
        device.discard(at, len)
    }

    fn files(&self) -> Option<Vec<BorrowedFd<'_>>> {
        let mut files = Vec::with_capacity(self.devices.len());
        // A place without a device is never asked for; the list has one entry for each.
        let any = self.devices.iter().flatten().find_map(|device| device.raw())?;
        for device in &self.devices {
            files.push(match device {
                Some(device) => device.raw()?,
                None => any,
            });
        }
        Some(files)
    }

    fn read_unit(&self) -> u32 {
        self.devices.iter().flatten().map(|device| device.read_unit()).max().unwrap_or(1)
    }

    fn file_at(&self, offset: u64) -> (u32, u64) {
        ((offset >> BITS) as u32, offset & ((1 << BITS) - 1))
    }

    fn check(&self, op: IoOp, offset: u64, len: u64) -> Result<(), DeviceError> {
        self.at(op, offset, len).map(drop)
    }

    fn name_at(&self, offset: u64) -> &Arc<str> {
        let device = self.devices.get((offset >> BITS) as usize).and_then(Option::as_ref);
        device.map_or(&self.name, |device| device.name())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ring::{ReadRing, RingChoice, RingOptions};
    use crate::testing::MemoryDevice;
    use crate::{AlignedBuf, DeviceOptions, FlashDevice};
    use larder_base::ByteSize;

    fn file(dir: &std::path::Path, name: &str, bytes: u64) -> Arc<dyn Device> {
        let path = dir.join(name);
        let options = DeviceOptions { size: Some(ByteSize(bytes)), ..DeviceOptions::new(&path) };
        Arc::new(FlashDevice::open(&options).unwrap())
    }

    fn page(byte: u8) -> AlignedBuf {
        let mut page = AlignedBuf::zeroed(4096);
        page.fill(byte);
        page
    }

    /// By whichever ring, each read is of the device whose range it lies in.
    #[test]
    fn rings_read_each_device_by_its_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (file(dir.path(), "a", 1 << 20), file(dir.path(), "b", 2 << 20));
        a.write_at(8192, &page(1)).unwrap();
        b.write_at(8192, &page(2)).unwrap();
        b.write_at((2 << 20) - 4096, &page(3)).unwrap();
        let joined = || -> Arc<dyn Device> {
            Arc::new(JoinedDevices::new(vec![Some(a.clone()), None, Some(b.clone())]))
        };
        for choice in [RingChoice::Auto, RingChoice::Threads, RingChoice::Caller] {
            let options = RingOptions { choice, ..RingOptions::default() };
            let mut ring = ReadRing::open(joined(), &options).unwrap();
            let at = JoinedDevices::address;
            let asked = [
                (at(0, 8200), Ok(1)),
                (at(2, 8192), Ok(2)),
                (at(2, (2 << 20) - 100), Ok(3)),
                // Beyond the first, where nothing is, and beyond all.
                (at(0, 1 << 20), Err("a")),
                (at(1, 0), Err("a, ")),
                (at(3, 0), Err("a, ")),
            ];
            for (token, (address, _)) in asked.iter().enumerate() {
                ring.submit(token as u64, *address, 100).unwrap();
            }
            let mut seen = 0;
            while seen < asked.len() {
                ring.wait(Duration::from_secs(5));
                seen += ring.completions(|token, bytes| match (bytes, asked[token as usize].1) {
                    (Ok(bytes), Ok(byte)) => assert_eq!(bytes, [byte; 100]),
                    (Err(e), Err(name)) => assert!(e.to_string().contains(name), "{e}"),
                    (got, _) => panic!("{choice:?} {token}: {got:?}"),
                });
            }
        }
    }

    #[test]
    fn devices_without_descriptors_are_read_by_threads() {
        let memory: Arc<dyn Device> = Arc::new(MemoryDevice::new(1 << 20));
        let joined = JoinedDevices::new(vec![Some(memory)]);
        assert!(joined.files().is_none());
        assert_eq!(joined.geometry().block, 512);
    }
}
