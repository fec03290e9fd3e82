//! How a block cache begins: what of the last run is believed, which volumes keep their lines, and what becomes durable in which order.
//!
//! What must never happen is a line that is not as its volume is. The map of the last run is in memory that outlives the process, or it
//! is read from the device; where nothing proves a line, it goes:
//!
//! | what the last run left | a line is used if |
//! | --- | --- |
//! | memory of the run that the superblock names | its volume's store is as it was |
//! | snapshot and log, whole | the same, and its region has no bit in the write-intent map |
//! | a log that has lost pages it is known to have had | never |
//! | a note of the host that the cache was given up | never |
//!
//! **Order.** Memory that is not believed is disowned before a word of it changes. The epoch is announced in the memory, then the superblock has
//! it (with the volumes, and, where the durable map may name lines that are not used, with a durable map that is empty), then the memory is owned by
//! it, then the host's note goes. A kill at any point leaves what the next start decides anew: memory of the epoch before or after, or the device.
//!
//! **A device that fails** before the end leaves a run without a cache. Volumes change meanwhile, so it is noted first that nothing on
//! the device may be used again; then the memory is disowned, and the superblock loses its volumes if the device takes it.

mod durable;
pub mod memory;
pub mod places;
mod table;
#[cfg(test)]
mod tests;

use larder_base::{Nanos, Words};
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::COPY_BYTES;

use super::super::address::Placing;
use super::super::log::{LogFailed, LogStats};
use super::super::map::{BadEntry, Making, Map, Shape, Slot};
use super::super::{Fault, IoFailed, LogIo, MapLog, Planted, Regions, SlotId};
use super::charged::{Charged, Charges};
pub use durable::Found;
use memory::Memory;
use places::{Comer, NoPlace, Places};

/// Generations that a durable map which begins anew is ahead of every log that was ever written.
const ANEW: u64 = 1 << 20;

/// How the map was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Warmth {
    /// In the memory of the last run.
    Memory,
    /// From snapshot and log: so many records.
    Log(u64),
    /// Nothing that could be trusted was there, and why.
    Cold(String),
}

/// What the host notes beside the cache device.
pub trait Notes {
    /// Notes durably that no later start may use what is on the device.
    ///
    /// # Errors
    /// Why it cannot be noted, in words.
    fn given_up(&mut self) -> Result<(), String>;
    /// The device has an empty map: no note stays.
    fn forget(&mut self);
}

/// How a run is to be.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The maps' shape.
    pub shape: Shape,
    /// How they work.
    pub making: Making,
    /// A region without a change for so long is quiet.
    pub idle: Nanos,
    /// Only an empty cache will do: the run is recorded.
    pub empty: bool,
    /// By chance: how far on the epoch goes.
    pub random: u32,
    /// A planted fault.
    pub fault: Fault,
}

/// What the last run has left.
pub struct Left<'a> {
    /// The superblock that rules the device.
    pub superblock: BlockSuperblock,
    /// Why nothing on the device may be used, if a note of the host says so.
    pub voided: Option<&'static str>,
    /// The memory in which maps lie.
    pub memory: &'a mut Memory,
    /// Each shard's words of it: entries, and the rest.
    pub words: Vec<(Words, Words)>,
}

/// A run that has begun with its cache. Its stores must be made durable before the first line is cached.
#[derive(Debug)]
pub struct Begun {
    /// The durable map, whose superblock is in force.
    pub log: MapLog,
    /// Each shard's map.
    pub maps: Vec<Map>,
    /// The volumes.
    pub places: Places,
    /// How the map was found.
    pub warmth: Warmth,
    /// Lines that were found and are not used.
    pub dropped: u64,
    /// Pages of the map's log were damaged.
    pub damaged: bool,
}

/// A run without a cache: its device has failed. No later run uses what is on it.
#[derive(Debug)]
pub struct Without {
    /// Where volumes lie in the line space, in memory alone.
    pub superblock: BlockSuperblock,
    /// Maps that must not be used.
    pub maps: Vec<Map>,
    /// The volumes.
    pub places: Places,
    /// Why, in words.
    pub why: String,
}

/// What a start has come to.
#[derive(Debug)]
pub enum Started {
    /// With the cache.
    With(Box<Begun>),
    /// Without it.
    Without(Box<Without>),
}

/// Why nothing begins.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// A volume cannot come. Nothing has changed.
    Volume(NoPlace),
    /// The memory of the last run has an entry that no run writes. Nothing has changed.
    Memory(BadEntry),
    /// The cache is not empty, and the run is to be recorded. The volumes' lines stay as they are.
    NotEmpty,
    /// The device fails, and the run is to be recorded.
    NotRecorded(String),
    /// The device fails, and it cannot be noted that what is on it must not be used: nobody may write to the volumes past it.
    NotNoted {
        /// What of the device fails.
        why: String,
        /// Why it cannot be noted.
        reason: String,
    },
}

/// The epoch of the run after `last`: by chance how far on, and never back. Two lines of runs that began with copies of one device do
/// not come to the same number, so the memory of one is not taken for the other's.
pub fn next_epoch(last: u64, random: u32) -> u64 {
    last + 1 + u64::from(random)
}

/// Begins a run with these volumes on what the last one has left.
///
/// # Errors
/// Why nothing begins.
pub fn start(
    left: Left<'_>,
    volumes: &[Comer],
    setup: &Setup,
    io: &mut Charged<impl LogIo, impl Charges>,
    notes: &mut impl Notes,
) -> Result<Started, Refused> {
    let Left { superblock: mut sb, voided, memory, mut words } = left;
    if voided.is_some() {
        // The same device, with nothing on it: of another generation, so that no old log is taken for a new one.
        sb.volumes.clear();
        sb.generation += ANEW;
        sb.snapshot = false;
    }
    let in_memory = voided.map_or_else(|| memory.is_of(&sb, setup.fault), Err);
    let places = Places::find(&mut sb, volumes, setup.fault).map_err(Refused::Volume)?;
    let shared = in_memory.is_ok();
    if !shared {
        memory.disown();
        words.iter_mut().for_each(|(entries, rest)| [entries, rest].into_iter().for_each(clear));
    }
    let placing = Placing::of(&sb.layout, sb.key);
    let mut maps: Vec<Map> = (0..)
        .zip(words)
        .map(|(shard, (entries, rest))| {
            Map::new(entries, rest, placing, shard, setup.shape, setup.making)
        })
        .collect();
    if shared {
        maps.iter().try_for_each(Map::validate).map_err(Refused::Memory)?;
    }
    let early = setup.fault.is(Planted::NoteForgottenEarly);
    if voided.is_some() && early {
        notes.forget();
    }
    let planned = sb.clone();
    let restored = restore(sb, shared, &places, setup, memory, &mut maps, io);
    let Restored { log, records, dropped, whole } = match restored {
        Ok(restored) => restored,
        Err(NotRestored::NotEmpty) => return Err(Refused::NotEmpty),
        Err(NotRestored::Io(why, _)) if setup.empty => return Err(Refused::NotRecorded(why)),
        Err(NotRestored::Io(why, sequence)) => {
            let planned = BlockSuperblock { sequence, ..planned };
            begin_without(&planned, (&why, setup.fault), memory, io, notes)?;
            let without = Without { superblock: planned, maps, places, why };
            return Ok(Started::Without(Box::new(without)));
        }
    };
    if voided.is_some() {
        notes.forget();
    }
    let warmth = match in_memory {
        Ok(()) => Warmth::Memory,
        Err(_) if maps.iter().any(|m| m.count() > 0) => Warmth::Log(records),
        Err(_) if !whole => Warmth::Cold("pages of the map's log are damaged".to_owned()),
        Err(why) => Warmth::Cold(why.to_owned()),
    };
    let begun = Begun { log, maps, places, warmth, dropped, damaged: !whole };
    Ok(Started::With(Box::new(begun)))
}

fn clear(words: &mut Words) {
    for at in 0..words.len() {
        if words.load(at) != 0 {
            words.store(at, 0);
        }
    }
}

struct Restored {
    log: MapLog,
    records: u64,
    dropped: u64,
    whole: bool,
}

enum NotRestored {
    /// In words, and the number of the latest copy of the superblock that is whole.
    Io(String, u64),
    NotEmpty,
}

/// Reads the durable map into `maps`, unless it is there from memory, without lines that must not be used, and begins the run on
/// the device.
fn restore(
    sb: BlockSuperblock,
    shared: bool,
    places: &Places,
    setup: &Setup,
    memory: &mut Memory,
    maps: &mut [Map],
    io: &mut impl LogIo,
) -> Result<Restored, NotRestored> {
    let (layout, sequence) = (sb.layout, sb.sequence);
    let read = durable::read(sb, shared, setup.idle, maps, io)
        .map_err(|IoFailed| NotRestored::Io("its map cannot be read".to_owned(), sequence))?;
    let (mut log, records) = (read.log, read.records);
    #[cfg(feature = "planted")]
    log.plant_any(setup.fault);
    let whole = log.is_whole();
    let regions = Regions { groups: layout.region_groups, count: layout.regions };
    let keeps = |line| places.keeps(line, &layout);
    // (Those that were evicted lately are in the durable map alone.)
    let mut foreign = places.has_gone();
    let mut dropped = 0u64;
    if layout.is_sparse() {
        dropped = if shared {
            table::keep_pages(maps, log.superblock(), io, &keeps)
        } else {
            let used = |line| keeps(line) && !log.is_set(regions.of(line));
            table::find_pages(maps, log.superblock(), io, &used)
        }
        .map_err(|IoFailed| {
            NotRestored::Io("its map cannot be read or written".to_owned(), sequence)
        })?;
    }
    // (What is in a table was looked at.)
    for map in maps.iter_mut().filter(|_| !layout.is_sparse()) {
        for slot in (0..map.len()).map(SlotId) {
            let proved = |line| shared || (whole && !log.is_set(regions.of(line)));
            if let Slot::Line(line) = map.get(slot)
                && !(proved(line) && keeps(line))
            {
                map.hold(slot);
                dropped += 1;
                foreign |= !keeps(line);
            }
        }
    }
    let is_empty = records == 0
        && !log.superblock().snapshot
        && log.regions_set() == 0
        && maps.iter().all(|m| match m.sparse() {
            Some(table) => table.is_new(),
            None => (0..m.len()).all(|s| m.get(SlotId(s)) == Slot::Free),
        });
    if setup.empty && !is_empty {
        return Err(NotRestored::NotEmpty);
    }
    let epoch = next_epoch(log.superblock().epoch, setup.random);
    memory.announce(epoch);
    // Lines of volumes that are not as they were must not come back after a power cut either, nor what a damaged log says.
    let outcome = if foreign || !whole {
        log.begin_anew(io, |sb| sb.epoch = epoch)
    } else {
        log.update(io, |sb| sb.epoch = epoch)
    };
    outcome.map_err(|failed| NotRestored::Io(failed.to_string(), log.superblock().sequence))?;
    memory.own(log.superblock());
    Ok(Restored { log, records, dropped, whole })
}

/// The device fails before anything was used of it.
fn begin_without(
    sb: &BlockSuperblock,
    (why, fault): (&str, Fault),
    memory: &mut Memory,
    io: &mut impl LogIo,
    notes: &mut impl Notes,
) -> Result<(), Refused> {
    let unnoted = |reason| Refused::NotNoted { why: why.to_owned(), reason };
    // In the order of `Maintenance::give_up`; a start that cannot note it is refused, and leaves memory as it was.
    if !fault.is(Planted::GivenUpNotNoted) {
        notes.given_up().map_err(unnoted)?;
    }
    memory.disown();
    // For a start whose host does not know of the note, if the device takes it.
    let mut next = sb.clone();
    next.volumes.clear();
    next.sequence += 1;
    let at = (next.copy() * COPY_BYTES) as u64;
    // Refused, the superblock stays as it is, and the note alone says it. (The copy that rules may not be durable: a run that was killed may have
    // written it. Until it is, the other is all that there is after a power cut.)
    let _ = io.flush().and_then(|()| io.write(at, &next.encode())).and_then(|()| io.flush());
    Ok(())
}

/// Why a cache that was given up is not taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTakenBack {
    /// Another cache is on the device by now.
    Other,
    /// It fails still.
    Failed(LogFailed),
}

/// A cache that was given up is used again in the same run, with nothing in it: the durable map begins anew, and is durable before the first
/// line is cached. All lines are locked, and stores are durable. `former` is what the cache had when it was given up, `found` what is
/// on the device. The host's note goes when the shards have empty maps and the memory is owned.
///
/// # Errors
/// Why not: it stays given up.
pub fn take_back(
    former: BlockSuperblock,
    found: &BlockSuperblock,
    (idle, random): (Nanos, u32),
    stats: LogStats,
    io: &mut Charged<impl LogIo, impl Charges>,
) -> Result<MapLog, NotTakenBack> {
    if found.uuid != former.uuid || found.layout != former.layout {
        return Err(NotTakenBack::Other);
    }
    // Later than whatever has reached the device.
    let superblock = BlockSuperblock {
        sequence: former.sequence.max(found.sequence),
        generation: former.generation.max(found.generation),
        ..former
    };
    let epoch = next_epoch(superblock.epoch.max(found.epoch), random);
    MapLog::take_back(superblock, epoch, idle, stats, io).map_err(NotTakenBack::Failed)
}
