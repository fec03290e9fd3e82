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
//! **Order.** A start has three parts, each of which is had from the one before: [`Left::judge`], [`Judged::stores_durable`], [`Ready::take_over`].
//!
//! 1. What is there is read and judged. Memory that is not believed is disowned before a word of it changes.
//! 2. The stores of the volumes become durable: what an earlier run wrote to them ahead of a bit that never came has none, and must not be lost when
//!    it is cached. Whatever else may refuse the start does it here: until now nothing has changed on the device, or in memory that is believed.
//! 3. Lines that are not used leave the map. The epoch is announced in the memory, then the superblock has it (with the volumes, and, where the
//!    durable map may name lines that are not used, with a durable map that is empty), then the memory is owned by it, then the host's note goes.
//!
//! A kill at any point leaves what the next start decides anew: memory of the epoch before or after, or the device.
//!
//! A device that is not there: [`without`].
//!
//! A cache that was given up is used again without a start: [`takeback`](super::maintenance::takeback).
//!
//! **A device that fails** before the end leaves a run without a cache. Volumes change meanwhile, so it is noted first that nothing on
//! the device may be used again; then the memory is disowned, and the superblock loses its volumes if the device takes it.

mod durable;
pub mod memory;
pub mod places;
mod table;
#[cfg(test)]
mod tests;
pub mod without;

use larder_base::{Nanos, Words};
use larder_format::block::superblock::COPY_BYTES;
use larder_format::block::{BlockSuperblock, Volume};

use super::super::address::Placing;
use super::super::map::{BadEntry, Making, Map, Shape, Slot};
use super::super::{
    BlockConfig, BlockShard, Fault, IoFailed, LogIo, MapLog, Planted, Regions, SlotId,
};
use super::charged::{Charged, Charges};
pub use durable::Found;
use memory::{Memory, clear};
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
    /// How the shards work.
    pub config: BlockConfig,
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

/// A run that has begun with its cache.
pub struct Begun {
    /// The durable map, whose superblock is in force.
    pub log: MapLog,
    /// The shards, over their maps.
    pub shards: Vec<BlockShard>,
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
pub struct Without {
    /// Where volumes lie in the line space, in memory alone.
    pub superblock: BlockSuperblock,
    /// Shards that cache nothing: changes which share bytes wait for one another there.
    pub shards: Vec<BlockShard>,
    /// The volumes.
    pub places: Places,
    /// Why, in words.
    pub why: String,
}

/// What a start has come to.
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

/// A start that knows what it uses, and of which volumes. Ended here it has changed nothing that another start would use.
#[derive(Debug)]
pub struct Judged {
    setup: Setup,
    is_voided: bool,
    /// Why the memory is not believed, if it is not.
    in_memory: Result<(), &'static str>,
    superblock: BlockSuperblock,
    places: Places,
    maps: Vec<Map>,
    /// What the device says, or what of it fails.
    durable: Result<durable::Durable, String>,
}

/// The same, and the volumes' stores are durable.
#[derive(Debug)]
pub struct Ready(Judged);

impl Left<'_> {
    /// Judges what there is, for a run with these volumes. The device is only read.
    ///
    /// # Errors
    /// Why nothing begins.
    pub fn judge(
        self,
        volumes: &[Comer],
        setup: &Setup,
        io: &mut impl LogIo,
    ) -> Result<Judged, Refused> {
        let Left { superblock: mut sb, voided, memory, mut words } = self;
        if voided.is_some() {
            // The same device, with nothing on it: of another generation, so that no old log is taken for a new one.
            sb.forget_volumes();
            sb.generation += ANEW;
            sb.snapshot = false;
        }
        let in_memory = voided.map_or_else(|| memory.is_of(&sb, setup.fault), Err);
        let places = Places::find(&mut sb, volumes, setup.fault).map_err(Refused::Volume)?;
        let shared = in_memory.is_ok();
        if !shared {
            memory.disown();
            words
                .iter_mut()
                .for_each(|(entries, rest)| [entries, rest].into_iter().for_each(clear));
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
        let unread = |IoFailed| "its map cannot be read".to_owned();
        let durable = durable::read(sb.clone(), shared, setup.idle, &mut maps, io);
        let durable = durable.map_err(unread);
        if setup.empty {
            let durable = durable.as_ref().map_err(|why| Refused::NotRecorded(why.clone()))?;
            let not_read = |failed| Refused::NotRecorded(unread(failed));
            if !durable.is_empty(&maps, shared, io).map_err(not_read)? {
                return Err(Refused::NotEmpty);
            }
        }
        let (setup, is_voided) = (*setup, voided.is_some());
        Ok(Judged { setup, is_voided, in_memory, superblock: sb, places, maps, durable })
    }
}

impl Judged {
    /// What of the device is known, with the places that the volumes will have.
    pub fn superblock(&self) -> &BlockSuperblock {
        &self.superblock
    }

    /// The volumes.
    pub fn places(&self) -> &Places {
        &self.places
    }

    /// Has the store of each volume made durable, all that was written to it by anybody; of a device that fails nothing is cached, and none is.
    ///
    /// # Errors
    /// The first of `make`: the start is over then.
    pub fn stores_durable<E>(
        self,
        mut make: impl FnMut(&Volume) -> Result<(), E>,
    ) -> Result<Ready, E> {
        if self.durable.is_ok() && !self.setup.fault.is(Planted::StartBelievesStores) {
            self.places.volumes().try_for_each(&mut make)?;
        }
        Ok(Ready(self))
    }
}

impl Ready {
    /// The run has the device from here on, and `memory`, which was judged. What may refuse the start but for the device has done so before.
    ///
    /// # Errors
    /// Why nothing begins: the device fails, and that cannot be recorded or noted.
    pub fn take_over(
        self,
        memory: &mut Memory,
        io: &mut Charged<impl LogIo, impl Charges>,
        notes: &mut impl Notes,
    ) -> Result<Started, Refused> {
        let Judged { setup, is_voided, in_memory, superblock, places, mut maps, durable } = self.0;
        let config = setup.config;
        if is_voided && setup.fault.is(Planted::NoteForgottenEarly) {
            notes.forget();
        }
        let shared = in_memory.is_ok();
        let is_clean = superblock.is_clean() && !is_voided;
        let failed = |why| NotRestored { why, sequence: superblock.sequence };
        let restored = durable
            .map_err(failed)
            .and_then(|durable| restore(durable, shared, &places, &setup, memory, &mut maps, io));
        let Restored { log, records, dropped, whole, names_unknown } = match restored {
            Ok(restored) => restored,
            Err(failed) if setup.empty => return Err(Refused::NotRecorded(failed.why)),
            Err(NotRestored { why, sequence }) => {
                let superblock = BlockSuperblock { sequence, ..superblock };
                begin_without(&superblock, (&why, setup.fault), memory, io, notes)?;
                let shards = maps.into_iter().map(|map| BlockShard::without(config, map));
                let without = Without { superblock, shards: shards.collect(), places, why };
                return Ok(Started::Without(Box::new(without)));
            }
        };
        if is_voided {
            notes.forget();
        }
        let warmth = match in_memory {
            Ok(()) => Warmth::Memory,
            Err(_) if maps.iter().any(|m| m.count() > 0) => Warmth::Log(records),
            Err(_) if is_clean && dropped == 0 => {
                Warmth::Cold("the last run left no lines".to_owned())
            }
            Err(_) if !whole => Warmth::Cold("pages of the map's log are damaged".to_owned()),
            Err(why) => Warmth::Cold(why.to_owned()),
        };
        let shard = |map| {
            let mut shard = BlockShard::new(config, map);
            if names_unknown {
                shard.distrust_log();
            }
            shard
        };
        let shards = maps.into_iter().map(shard).collect();
        let begun = Begun { log, shards, places, warmth, dropped, damaged: !whole };
        Ok(Started::With(Box::new(begun)))
    }
}

struct Restored {
    log: MapLog,
    records: u64,
    dropped: u64,
    whole: bool,
    /// The durable map may name lines that memory has not, and nobody knows which.
    names_unknown: bool,
}

/// What of the device fails, in words, and the number of the latest copy of the superblock that is whole.
struct NotRestored {
    why: String,
    sequence: u64,
}

/// Takes lines that must not be used out of `maps`, and begins the run on the device.
fn restore(
    read: durable::Durable,
    shared: bool,
    places: &Places,
    setup: &Setup,
    memory: &mut Memory,
    maps: &mut [Map],
    io: &mut impl LogIo,
) -> Result<Restored, NotRestored> {
    let (mut log, records) = (read.log, read.records);
    let (layout, sequence) = (log.superblock().layout, log.superblock().sequence);
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
        .map_err(|IoFailed| NotRestored {
            why: "its map cannot be read or written".to_owned(),
            sequence,
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
    let epoch = next_epoch(log.superblock().epoch, setup.random);
    memory.announce(epoch);
    // Lines of volumes that are not as they were must not come back after a power cut either, nor what a damaged log says.
    let anew = foreign || !whole;
    let outcome = if anew {
        log.begin_anew(io, |sb| sb.epoch = epoch)
    } else {
        log.update(io, |sb| sb.epoch = epoch)
    };
    outcome.map_err(|failed| NotRestored {
        why: failed.to_string(),
        sequence: log.superblock().sequence,
    })?;
    memory.own(log.superblock());
    // (An empty one names none. A page of a table is not taken for what it was before.)
    let names_unknown = shared && !(anew || setup.empty || layout.is_sparse());
    Ok(Restored { log, records, dropped, whole, names_unknown })
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
    next.forget_volumes();
    next.sequence += 1;
    let at = (next.copy() * COPY_BYTES) as u64;
    // Refused, the superblock stays as it is, and the note alone says it. (The copy that rules may not be durable: a run that was killed may have
    // written it. Until it is, the other is all that there is after a power cut.)
    let _ = io.flush().and_then(|()| io.write(at, &next.encode())).and_then(|()| io.flush());
    Ok(())
}
