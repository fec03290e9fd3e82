//! A cache that was given up is used again in the same run, once its device works again.
//!
//! Nothing proves what is on the device, and volumes have changed since, without bits. So it begins with nothing in it, in this order:
//!
//! 1. stores become durable, while clients are served: most of what there is to write;
//! 2. all lines are locked: nothing is under way, and nothing begins;
//! 3. stores become durable again: of what was changed meanwhile no bit says that a store may forget it;
//! 4. the durable map is empty, durably, and the superblock is that of a new epoch; of volumes that wrote back, which have all in their stores and
//!    write through since the write log has failed, it says that nothing of them is dirty; the write log begins in that epoch, which makes void what it
//!    had;
//! 5. each shard has an empty map, in the memory of the one that it had;
//! 6. the memory is owned: all that is in it is of this run;
//! 7. lines are used;
//! 8. the host's note goes that says that nothing on the device may be used: on the log's thread too, on which the cache may be given up anew;
//! 9. lines are let go of.
//!
//! Until 8 a start finds the note, or, where the host could not make one, a device without volumes or with an empty map, and memory that is nobody's.
//!
//! [`Operation::take_back`](super::super::operator::Operation::take_back) has the steps; [`take_back`] is the one on the log's thread, from 4 to 8.

use larder_base::Nanos;
use larder_format::block::superblock::HoldsState;
use larder_format::block::{BlockSuperblock, Volume};

use super::super::super::log::{LogFailed, LogIo, MapLog};
use super::super::super::map::Map;
use super::super::super::record::RecordedLog;
use super::super::super::{Fault, Planted};
use super::super::charged::{Charged, Charges};
use super::super::start::next_epoch;
use super::Maintenance;

/// Why a cache that was given up is not taken back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotTakenBack {
    /// It is in use.
    InUse,
    /// Something is under way yet.
    Busy,
    /// No superblock can be read, for this reason.
    Unread(String),
    /// Another cache is on the device by now.
    Other,
    /// The write log has something of this volume that its store may lack.
    Dirty(String),
    /// The write log cannot begin, for this reason.
    Log(String),
    /// It fails still.
    Failed(LogFailed),
}

/// What a host has for a cache that is taken back, on the thread of its log.
pub trait Anew {
    /// The superblock that is on the device now.
    ///
    /// # Errors
    /// Why there is none, in words.
    fn found(&mut self) -> Result<BlockSuperblock, String>;
    /// `BlockShard::is_idle`.
    fn is_idle(&mut self, shard: u32) -> bool;
    /// Whether nothing of the write log that has failed is under way; see [`WriteLog::is_over`](crate::block::writeback::log::WriteLog::is_over). True
    /// where there is none.
    fn log_is_idle(&mut self) -> bool {
        true
    }
    /// Whether that log may have what the store of this volume, which has that attachment number, lacks.
    fn may_be_dirty(&mut self, _name: &str, _attachment: u32) -> bool {
        true
    }
    /// The write log begins in the run of this superblock, on the device, with nothing in it. It is used from [`Anew::in_force`] on.
    ///
    /// # Errors
    /// Why it cannot, in words.
    fn begin_log(&mut self, _superblock: &BlockSuperblock) -> Result<(), String> {
        Ok(())
    }
    /// A map with nothing in it, in the memory of the one that the shard has and does not use any more.
    fn empty_map(&mut self, shard: u32) -> Map;
    /// `BlockShard::begin_anew`.
    fn begin_anew(&mut self, shard: u32, map: Map) -> bool;
    /// `BlockShard::disable`.
    fn disable(&mut self, shard: u32);
    /// The memory is [owned](super::super::start::memory::Memory::own).
    fn own(&mut self, superblock: &BlockSuperblock);
    /// The cache is in use: nothing is in it, of any volume, and why it was to be given up before does not matter any more (as
    /// [`Inbox::resumed`](super::Inbox::resumed)).
    fn in_force(&mut self);
    /// The note goes that nothing on the device may be used.
    fn forget(&mut self);
}

/// How the cache is to be used again.
#[derive(Clone, Copy, Debug)]
pub struct Again {
    /// A region without a change for so long is quiet.
    pub idle: Nanos,
    /// By chance: how far on the epoch goes.
    pub random: u32,
    /// A planted fault.
    pub fault: Fault,
}

/// Uses the cache again. All lines are locked, and stores are durable since then.
///
/// # Errors
/// Why not: it stays given up.
pub fn take_back(
    machine: &mut Maintenance,
    Again { idle, random, fault }: Again,
    io: &mut Charged<impl LogIo, impl Charges>,
    anew: &mut impl Anew,
) -> Result<(), NotTakenBack> {
    let former = machine.former().cloned().ok_or(NotTakenBack::InUse)?;
    if fault.is(Planted::TakenBackForgottenEarly) {
        anew.forget();
    }
    let shards = 0..former.layout.shards;
    let mut dirty = |volume: &&Volume| {
        let record = volume.write_back.filter(|w| w.holds.may_be_dirty());
        record.is_some_and(|record| anew.may_be_dirty(&volume.name, record.attachment))
    };
    if let Some(volume) = former.volumes.iter().find(&mut dirty) {
        return Err(NotTakenBack::Dirty(volume.name.clone()));
    }
    let idle_log = anew.log_is_idle();
    if machine.is_busy() || !idle_log || !shards.clone().all(|shard| anew.is_idle(shard)) {
        return Err(NotTakenBack::Busy);
    }
    let found = anew.found().map_err(NotTakenBack::Unread)?;
    let (here, there) = (former.write_log, found.write_log);
    if found.uuid != former.uuid || found.layout != former.layout || here != there {
        return Err(NotTakenBack::Other);
    }
    // Later than whatever has reached the device.
    let mut superblock = BlockSuperblock {
        sequence: former.sequence.max(found.sequence),
        generation: former.generation.max(found.generation),
        ..former
    };
    // Their markers say so already, or the device would have to.
    for record in superblock.volumes.iter_mut().filter_map(|volume| volume.write_back.as_mut()) {
        if record.holds.may_be_dirty() {
            record.holds = HoldsState::Clean;
        }
    }
    let epoch = next_epoch(superblock.epoch.max(found.epoch), random);
    let log = MapLog::take_back(superblock, epoch, idle, machine.stats(), io);
    let log = log.map_err(NotTakenBack::Failed)?;
    #[cfg(feature = "planted")]
    let log = {
        let mut log = log;
        log.plant_any(fault);
        log
    };
    anew.begin_log(log.superblock()).map_err(NotTakenBack::Log)?;
    if fault.is(Planted::TakenBackOwnedEarly) {
        anew.own(log.superblock());
    }
    let begun = shards.clone().all(|shard| {
        let map = anew.empty_map(shard);
        anew.begin_anew(shard, map)
    });
    if !begun {
        // Something has begun though all lines are locked. What has an empty map caches nothing, as before.
        shards.for_each(|shard| anew.disable(shard));
        return Err(NotTakenBack::Busy);
    }
    anew.own(log.superblock());
    machine.resume(RecordedLog::new(log));
    io.charges.limits().failures.works();
    anew.in_force();
    anew.forget();
    Ok(())
}
