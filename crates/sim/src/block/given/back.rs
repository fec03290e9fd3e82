//! Volumes of a given cache that write back, in `any` or `ordered`: the engine's write log on the device that is given, without markers. A run that has
//! them cannot be gone on with: what a start makes of a log the crash models try.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node::defaults;
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::destager::{self, Pace};
use larder_engine::block::writeback::log::{Attach, Config, Status, WriteLog};
use larder_engine::block::writeback::throttle::Age;
use larder_engine::block::writeback::volume_log::Order;
use larder_engine::block::writeback::words::Mode;
use larder_format::Uuid;

use super::bytes::Carried;
use super::volume::Attached;
use super::{Given, GivenError};

/// How a volume writes back.
#[derive(Clone, Copy, Debug)]
pub struct WritesBack {
    /// In which order. (A journal takes its time, and is none of a given cache's.)
    pub order: Order,
    /// When.
    pub pace: Pace,
    /// Bytes of the log that it may hold, if that is stated.
    pub most: Option<u64>,
    /// How old what is dirty may become, where that is stated; else as old as usual.
    pub age: Option<Age>,
}

/// The write log, and the volumes in it by attachment number.
pub(super) struct Back<B> {
    pub log: RefCell<WriteLog<B>>,
    volumes: RefCell<BTreeMap<u32, Rc<Attached>>>,
}

impl<B> Back<B> {
    pub(super) fn attachment(&self, attached: &Attached) -> Option<u32> {
        let volumes = self.volumes.borrow();
        let of = volumes.iter().find(|(_, volume)| std::ptr::eq(Rc::as_ptr(volume), attached));
        of.map(|(&attachment, _)| attachment)
    }

    pub(super) fn volume(&self, attachment: u32) -> Option<Rc<Attached>> {
        self.volumes.borrow().get(&attachment).cloned()
    }

    /// How many volumes write back.
    pub(super) fn count(&self) -> usize {
        self.volumes.borrow().len()
    }
}

impl<B: Carried> Given<B> {
    /// A volume writes back from now on, to the write log that the device was formatted with.
    ///
    /// # Errors
    /// When there is no such volume, it writes back already, or there is no log or a journal is wanted.
    pub fn write_back(
        &mut self,
        now: Nanos,
        name: &str,
        how: WritesBack,
    ) -> Result<(), GivenError> {
        let area = self.superblock().and_then(|superblock| superblock.write_log);
        let uuid = self.superblock().map_or(Uuid([0; 16]), |superblock| superblock.uuid);
        let Some(area) = area else {
            let why = "the device has no write log: give one that was formatted with it";
            return Err(GivenError::volume(name, why));
        };
        let config = Config {
            cache: uuid,
            run: 1,
            at: area.at,
            geometry: area.geometry,
            segments: area.segments,
            depth: defaults::LOG_DEPTH,
            memory: self.fill_memory,
            wall: 0,
        };
        self.write_back_to(now, name, how, config)?;
        // That it does so is said on the device where the map's log is, which takes a step then.
        self.in_log(|_| ());
        Ok(())
    }

    /// The same, to a log of which this is said.
    pub(super) fn write_back_to(
        &mut self,
        now: Nanos,
        name: &str,
        how: WritesBack,
        config: Config,
    ) -> Result<(), GivenError> {
        let attached = self.attached(name)?;
        if matches!(how.order, Order::Journaled(_)) {
            let why = "a given cache has no journal: let it write back in another order";
            return Err(GivenError::volume(name, why));
        }
        let mode = Mode { order: how.order, pace: how.pace };
        let age = mode.age(how.age).map_err(|why| GivenError::volume(name, why.to_string()))?;
        self.set_now(now);
        let new = || Back { log: RefCell::new(WriteLog::new(config)), volumes: RefCell::default() };
        let back = self.node.back.get_or_insert_with(new);
        if back.attachment(&attached).is_some() {
            return Err(GivenError::volume(name, "it writes back already"));
        }
        let attachment = back.count() as u32 + 1;
        back.volumes.borrow_mut().insert(attachment, attached);
        let destage = destager::Config {
            order: how.order,
            pace: how.pace,
            most: defaults::window(how.order),
            depth: defaults::DESTAGE_DEPTH,
        };
        let attach = Attach {
            attachment,
            volume: Uuid([0; 16]),
            generation: 1,
            destage,
            bound: how.most,
            age,
            frontier: 0,
            epoch: 0,
            marker: 0,
            marked: false,
        };
        tell_log(&self.node, now, |log, asks| {
            log.attach(now, attach);
            asks.steps.push(attachment);
        });
        Ok(())
    }

    /// How a volume that writes back is doing; `None` of others.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn back_status(&self, name: &str) -> Result<Option<Status>, GivenError> {
        let attached = self.attached(name)?;
        let back = self.node.back.as_ref();
        let of = back.and_then(|back| Some((back, back.attachment(&attached)?)));
        Ok(of.and_then(|(back, attachment)| back.log.borrow().status(self.now(), attachment)))
    }

    /// Bytes that were written to the write log.
    pub fn written_back(&self) -> u64 {
        self.node.back.as_ref().map_or(0, |back| back.log.borrow().bytes())
    }
}
