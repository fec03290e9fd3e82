//! What a front end says to the device (the vhost-user protocol, by the `vhost` crate).

use std::fs::File;
use std::io;

use tracing::debug;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_queue::QueueT;

use super::config::{MAX_QUEUE_SIZE, MAX_QUEUES, SPACE, SPACE_READ, WRITEBACK, feature};
use super::device::Device;
use super::inflight::Inflight;
use super::memory::MAX_REGIONS;
use super::ring::Places;
use crate::cache::service::Service;

fn failed(e: io::Error) -> Error {
    Error::ReqHandlerError(e)
}

fn unknown<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl<S: Service> Device<S> {
    fn ring_index(&self, index: u32) -> Result<usize> {
        let index = index as usize;
        if index < self.rings.len() { Ok(index) } else { Err(Error::InvalidParam) }
    }

    /// The rings that run lie where the front end's addresses are now.
    fn place_again(&mut self) -> Result<()> {
        for index in 0..self.rings.len() {
            if self.rings[index].queue.ready() && !self.rings[index].place(&self.shared) {
                self.rings[index].fail();
                return Err(failed(io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("queue {index} is in memory that was taken away"),
                )));
            }
        }
        Ok(())
    }

    /// Ends and forgets whatever the driver had set up.
    fn reset(&mut self) {
        self.drain(None, None);
        for index in 0..self.rings.len() {
            self.forget(index);
        }
        self.features = 0;
        self.writeback = true;
    }
}

impl<S: Service> VhostUserBackendReqHandlerMut for Device<S> {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.shape.features())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.shape.features() != 0 {
            return Err(Error::InvalidParam);
        }
        self.features = features;
        let enabled = features & feature::PROTOCOL_FEATURES == 0;
        for ring in &mut self.rings {
            // With the protocol's features a ring waits until it is enabled.
            ring.enabled |= enabled;
            ring.queue.set_event_idx(features & feature::EVENT_IDX != 0);
        }
        debug!("{}: features {features:#x}", self.name);
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.shared.replace(regions.iter().copied().zip(files)).map_err(failed)?;
        self.place_again()?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let index = self.ring_index(index)?;
        let size = u16::try_from(num).map_err(|_| Error::InvalidParam)?;
        if size == 0 || size > MAX_QUEUE_SIZE || !size.is_power_of_two() {
            return Err(Error::InvalidParam);
        }
        if self.rings[index].queue.ready() {
            return unknown("the size of a queue that runs");
        }
        self.rings[index].size = size;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let index = self.ring_index(index)?;
        self.rings[index].places = Some(Places { descriptors, available, used });
        self.place_again()
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let index = self.ring_index(index)?;
        self.rings[index].base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let at = self.ring_index(index)?;
        // Nothing may move in the ring once this is answered.
        self.drain(Some(at), None);
        self.unwatch(at);
        let ring = &mut self.rings[at];
        let base = if ring.queue.ready() { ring.queue.next_avail() } else { ring.base };
        // What is still to be done again stays marked in the shared memory.
        ring.again.clear();
        ring.queue.set_ready(false);
        ring.kicked = false;
        ring.base = base;
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = self.ring_index(u32::from(index))?;
        let Some(file) = file else {
            return unknown("a queue without a descriptor for kicks: it would have to be polled");
        };
        self.unwatch(index);
        self.rings[index].kick = Some(file);
        self.watch(index).map_err(failed)?;
        self.start(index).map_err(failed)
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = self.ring_index(u32::from(index))?;
        self.rings[index].set_call(file);
        // The guest may have missed something meanwhile.
        self.rings[index].answered = self.rings[index].queue.ready();
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let index = self.ring_index(u32::from(index))?;
        self.rings[index].set_err(file);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        type F = VhostUserProtocolFeatures;
        Ok(F::MQ
            | F::CONFIG
            | F::REPLY_ACK
            | F::INFLIGHT_SHMFD
            | F::RESET_DEVICE
            | F::CONFIGURE_MEM_SLOTS
            | F::BACKEND_REQ)
    }

    fn set_protocol_features(&mut self, _features: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(MAX_QUEUES as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let index = self.ring_index(index)?;
        let ring = &mut self.rings[index];
        ring.enabled = enable;
        ring.kicked |= enable;
        Ok(())
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let (offset, size) = (offset as usize, size as usize);
        if offset.saturating_add(size) > SPACE_READ {
            return Err(Error::InvalidParam);
        }
        let mut space = self.shape.space(self.writeback).to_vec();
        space.resize(SPACE_READ, 0);
        // The volume's size is the first of it.
        if offset == 0 && size >= size_of::<u64>() {
            self.read_sectors = Some(self.shape.sectors);
        }
        Ok(space[offset..offset + size].to_vec())
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        // Front ends write the one byte, or the whole space with it.
        let (from, end) = (offset as usize, (offset as usize).saturating_add(buf.len()));
        if end > SPACE_READ {
            return Err(Error::InvalidParam);
        }
        if !(from..end).contains(&WRITEBACK) {
            return if from >= SPACE { Ok(()) } else { Err(Error::InvalidParam) };
        }
        match buf[WRITEBACK - from] {
            0 => self.writeback = false,
            1 => self.writeback = true,
            _ => return Err(Error::InvalidParam),
        }
        debug!("{}: writeback {}", self.name, self.writeback);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        unknown("a display")
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        unknown("shared objects")
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, len) = (asked.num_queues, asked.queue_size);
        if queues == 0 || usize::from(queues) > MAX_QUEUES || len == 0 || len > MAX_QUEUE_SIZE {
            return Err(Error::InvalidParam);
        }
        // It is used once the front end has sent it back.
        let (_, file, bytes) = Inflight::create(queues, len).map_err(failed)?;
        Ok((VhostUserInflight::new(bytes, 0, queues, len), file))
    }

    fn set_inflight_fd(&mut self, it: &VhostUserInflight, file: File) -> Result<()> {
        if usize::from(it.num_queues) > MAX_QUEUES || it.queue_size > MAX_QUEUE_SIZE {
            return Err(Error::InvalidParam);
        }
        if self.rings.iter().any(|r| r.queue.ready()) {
            return unknown("memory for requests under way while queues run");
        }
        let (bytes, offset) = (it.mmap_size, it.mmap_offset);
        let inflight = Inflight::adopt(file, offset, bytes, it.num_queues, it.queue_size);
        self.inflight = Some(inflight.map_err(failed)?);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        self.shared.add(region, file).map_err(failed)?;
        self.place_again()?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        self.shared.remove(region).map_err(failed)?;
        self.place_again()
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        unknown("a state to be moved")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unknown("a state to be moved")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unknown("shared memory of the device")
    }

    fn set_log_base(&mut self, _: &VhostUserLog, _: File) -> Result<()> {
        unknown("a log of pages")
    }
}
