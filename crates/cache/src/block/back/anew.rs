//! A write log that has failed begins again on its device, once that works: a cache that was given up is taken back.
//!
//! That is what a start does which finds that every marker says that the store has everything: what lies in the log is read, so that the numbers of
//! segments and batches go on, and the first batch of the new run makes all of it void. Until then the log that has failed is looked at, and nobody uses
//! the other.

use std::sync::atomic::Ordering;

use larder_engine::block::node::logged::call_alone;
use larder_engine::block::writeback::log::WriteLog;
use larder_engine::block::writeback::recovery::RecoveredPacked;
use larder_engine::block::writeback::{Fault, scan};
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::WriteLogArea;
use larder_runtime::{Device as _, Payload};

use super::super::Core;
use super::super::open::CacheError;
use super::start::{begin_log, log_config, no_room};
use super::{Back, locked};

/// What lies in a log that has failed.
pub(in crate::block) struct Former {
    area: WriteLogArea,
    scanned: scan::Scan,
    found: RecoveredPacked,
}

impl Core {
    /// Reads what lies in the write log, which has failed, if the device has one.
    ///
    /// # Errors
    /// When it cannot be asked where it lies.
    pub(in crate::block) fn former_log(
        &self,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Former>, CacheError> {
        let sb = self.on_log(|log| log.line_space().map(|sb| (sb.write_log, sb.uuid)))?;
        let Some((Some(area), cache)) = sb else { return Ok(None) };
        let mut read = |at: u64, bytes: &mut [u8]| match go_on() {
            true => self.device.read_at(at, bytes).map_err(|_| scan::ReadFailed),
            false => Err(scan::ReadFailed),
        };
        let mut scanned = scan::scan(&area, cache, &mut read);
        let found = scanned.recover_packed(&[], Fault::default());
        Ok(Some(Former { area, scanned, found }))
    }

    /// Why the write log, which has failed, is not given up yet, if so: a volume's store may lack what it has.
    pub(in crate::block) fn why_log_stays(&self) -> Option<String> {
        let back = self.back.get()?;
        let log = back.log();
        let served = self
            .volumes()
            .into_iter()
            .find(|v| v.attachment().is_some_and(|attachment| log.has(attachment)));
        if let Some(volume) = served {
            return Some(format!(
                "what its write log, which has failed, has of volume '{}' is not all in the store of that yet: ask again when the volume writes through",
                volume.name
            ));
        }
        log.has_any().then(|| {
            "its write log, which has failed, has writes of a volume that is not served: start again with that volume, and they come to its store"
                .to_owned()
        })
    }

    /// Whether the write log may have what the store of a volume lacks, which has had this attachment number.
    pub(in crate::block) fn log_has(&self, name: &str, attachment: u32) -> bool {
        let log = |back: &Back| back.log().has(attachment);
        match self.volume(name) {
            Some(volume) if volume.attachment().is_some() => true,
            Some(_) => self.back.get().is_some_and(log),
            // It has gone since, or was not there: then the log keeps what it has of it. (The device says what was before: it is not written.)
            None => self.back.get().is_none_or(log),
        }
    }

    /// Whether the log has failed in a former run, and this one works with its device all the same.
    pub(in crate::block) fn log_drains(&self) -> bool {
        self.back.get().is_some_and(|back| back.drains.load(Ordering::Relaxed))
    }

    /// Whether nothing of a log that has failed is under way.
    pub(in crate::block) fn log_is_over(&self) -> bool {
        self.back.get().is_none_or(|back| back.log().is_over())
    }

    /// The log begins on its device, in the run of this superblock. Nobody has it yet.
    ///
    /// # Errors
    /// [`CacheError`]: the device fails.
    pub(in crate::block) fn log_anew(
        &self,
        sb: &BlockSuperblock,
        former: &Former,
    ) -> Result<WriteLog<Payload>, CacheError> {
        let Former { area, scanned, found } = former;
        let config = log_config(self, sb.uuid, sb.epoch, area);
        if scanned.batches.is_empty() {
            return Ok(WriteLog::new(config));
        }
        let mut log = WriteLog::found(config, found, scanned);
        self.device.sync()?;
        begin_log(self, &mut |told| {
            call_alone(&mut log, |log, asks| told.by(self.now(), log, asks)).1
        })?;
        if log.is_started() { Ok(log) } else { Err(no_room()) }
    }

    /// That log is used from now on.
    pub(in crate::block) fn use_log(&self, mut log: WriteLog<Payload>, sb: &BlockSuperblock) {
        let Some(back) = self.back.get() else {
            // (There was nothing to read at the start.)
            let _ = self.back.set(Back::new(log, (sb.uuid, sb.epoch)));
            return;
        };
        let mut there = locked(&back.log);
        log.follows(&there);
        *there = log;
        drop(there);
        back.cache.1.store(sb.epoch, Ordering::SeqCst);
        back.drains.store(false, Ordering::SeqCst);
    }

    /// Volumes that were to write back when they came, by what they are configured to, and write through though no operator wants it: they stay so until
    /// they are changed over.
    pub fn could_write_back(&self) -> Vec<String> {
        let could = |volume: &std::sync::Arc<super::Attached>| {
            let wished = self.config.wish_of(&volume.name).back.is_some();
            let chosen = volume.through_by_choice.load(Ordering::Relaxed);
            let through = volume.attachment().is_none() && volume.had().is_none();
            wished && through && !chosen && self.saves(&volume.name).is_none()
        };
        self.volumes().iter().filter(|v| could(v)).map(|v| v.name.clone()).collect()
    }
}
