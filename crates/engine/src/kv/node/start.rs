//! How a cache on flash begins and ends: what of the last run can be believed, and in which order things become durable.
//!
//! What must never happen is a version that was overwritten or deleted coming back. So a start is warm only if nobody can have
//! answered for the same keys since the index was last right. Four places say which run was the last: the data directory, the superblock,
//! the memory that outlives the process, and the checkpoint of a clean stop. Each start draws a random number, the run, and writes it into
//! all of them: a flash or a directory that was put back from a copy has the number of another run in one of the places.
//!
//! Order of a start: the run is *announced* in the memory; then the directory has it, then the superblock; then the memory is
//! *owned* by it; then the old checkpoint goes. Nobody is answered before the end. A kill at any point leaves memory whose announced or
//! owning run is the one that directory and superblock name, which the next start goes on with, or a cold start.
//!
//! Order of a stop ([`Maintenance::stop`]): segments are durable, then the checkpoint, then the superblock says that the stop was clean,
//! then the memory is given back; then what is in DRAM is kept. The host reads and writes the bytes. Of the superblock there are two copies: [`Superblocks`]. What a directory says of
//! runs is [`RunNote`]; what was in DRAM comes back by a [`Claim`] and is kept by a [`DramKeeper`].
//!
//! ```text
//! word 0 magic   1 layout version   2,3 UUID   4 run   5 announced run   6 shards   7 words per index
//! 8 words of the segment table      9 bytes per segment      10 latest time that anything was judged by, Unix seconds
//! ```

mod begun;
mod dram;
pub mod drives;
mod runs;
mod superblocks;

use larder_base::lock::LockKind;
use larder_base::{Now, UnixSecs, Words};
use larder_format::Superblock;

use super::drive::DriveUpkeep;
use super::maintenance::{Maintenance, StateIo};
use super::node::{AtRest, Node};
use super::plan::{AdmissionNeed, Plan, PlanError};
use super::region::{REGION_HEADER, RegionLayout};
use crate::dram::ObjectMemory;
use crate::index::FlashIndex;
use crate::kv::config::FlashGeometry;
use crate::kv::log::SegmentIo;
use crate::kv::planted::Planted;
pub use begun::{Begun, Drawn, StartIo};
pub use dram::{
    Claim, ComeBack, DramKeeper, FlashFound, KeepIo, Proved, VoidIo, application, new_names, void,
};
pub use runs::{NO_BIRTHS, NoteFile, RunNote, TakeIo, Taken, UsedFlash, take_directory};
pub use superblocks::{Heads, Superblocks};

const MAGIC: u64 = u64::from_le_bytes(*b"LARDERkv");
const LAYOUT: u64 = 5;
const OWNER: usize = 4;
const ANNOUNCED: usize = 5;
/// Where in the memory the latest time is.
pub const LATEST: usize = 10;
/// Words of the header that bind the memory to a flash and a run.
pub const BINDING_WORDS: usize = 11;
/// CAS uniques that a start may give out, as a power of two: the next one begins above them.
const CAS_OF_A_START_BITS: u32 = 48;
const CAS_OF_A_START: u64 = 1 << CAS_OF_A_START_BITS;

/// How many of the CAS uniques of a start each of so many shards has for itself, as a power of two.
pub fn cas_bits(shards: usize) -> u32 {
    CAS_OF_A_START_BITS.saturating_sub(shards.max(1).next_power_of_two().ilog2())
}

/// How warm a start is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Warmth {
    /// The memory of the last run was still there.
    Memory,
    /// The last run's checkpoint was read.
    Checkpoint,
    /// Nothing that could be trusted was there, and why.
    Cold(String),
}

/// Why memory is not what the last run left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotOurs {
    /// There is none: a checkpoint may be.
    Absent(String),
    /// It is another run's, on this flash or on a copy of it.
    Other(String),
}

/// What the memory that outlives the process is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// UUID of the flash.
    pub uuid: [u8; 16],
    /// Words that the segment tables have addresses for.
    pub table_words: usize,
    /// Bytes of one segment.
    pub segment_bytes: u32,
    /// Shards.
    pub shards: usize,
    /// Buckets of each one's index before it grew.
    pub buckets: u32,
}

impl Shape {
    /// Of this flash, divided so.
    pub fn new(superblock: &Superblock, layout: &RegionLayout) -> Shape {
        Shape {
            uuid: superblock.uuid.0,
            table_words: layout.table_words(),
            segment_bytes: layout.flash.segment_bytes,
            shards: layout.shards,
            buckets: layout.buckets,
        }
    }

    fn expected(&self) -> [(usize, u64); 8] {
        let uuid = u128::from_le_bytes(self.uuid);
        [
            (0, MAGIC),
            (1, LAYOUT),
            (2, uuid as u64),
            (3, (uuid >> 64) as u64),
            (6, self.shards as u64),
            (7, FlashIndex::words_for(FlashIndex::most_buckets(self.buckets)) as u64),
            (8, self.table_words as u64),
            (9, u64::from(self.segment_bytes)),
        ]
    }

    /// Whether memory with this header is what the last run has left: the superblock names it `on_flash`, the data directory
    /// `in_directory`. `None` where there is no memory.
    ///
    /// # Errors
    /// Why not.
    pub fn is_left(
        &self,
        header: Option<impl Fn(usize) -> u64>,
        on_flash: u64,
        in_directory: u64,
    ) -> Result<(), NotOurs> {
        // A clean stop removes it; a start that was cut short leaves it without its first word.
        let Some(load) = header.filter(|load| load(0) != 0) else {
            return Err(NotOurs::Absent("no memory of an earlier run is there".to_owned()));
        };
        let other = |why: &str| Err(NotOurs::Other(why.to_owned()));
        if self.expected().iter().any(|&(word, want)| load(word) != want) {
            return other("the memory left behind is of another configuration");
        }
        // A start that was cut short may have come to one of the places and not to the others.
        let (owner, announced) = (load(OWNER), load(ANNOUNCED));
        if [on_flash, in_directory].into_iter().any(|run| run != owner && run != announced) {
            return other("the flash has been used by another run since");
        }
        Ok(())
    }
}

/// What the data directory says of its last run, if that was on this flash.
#[derive(Clone, Debug)]
pub struct LastRun {
    /// Its number.
    pub run: u64,
    /// Whether it is certain that the directory was not put back from a copy since, which a checkpoint would go along with; else why
    /// not.
    pub proves_checkpoint: Result<(), String>,
}

/// What the last run has left of a flash.
#[derive(Debug)]
pub struct Left<'a> {
    superblock: &'a Superblock,
    formatted: bool,
    last: Result<&'a LastRun, String>,
    /// Epoch and CAS base above which this start begins.
    above: (u64, u64),
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

impl<'a> Left<'a> {
    /// `superblock` is on flash, and has just been written if the flash was `formatted`. `last` is the last run on this directory and this
    /// flash, or why nothing is known of it.
    pub fn new(
        superblock: &'a Superblock,
        formatted: bool,
        last: Result<&'a LastRun, String>,
    ) -> Left<'a> {
        Left {
            superblock,
            formatted,
            last,
            above: (0, 0),
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    /// The cache has this drive, too: what it may hold has no epoch and no CAS that this start gives out.
    #[must_use]
    pub fn beside(mut self, other: &Superblock) -> Left<'a> {
        let (epoch, cas) = self.above;
        self.above = (epoch.max(other.epoch), cas.max(other.cas_base));
        self
    }

    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
    }

    #[cfg(feature = "planted")]
    fn planted(&self, fault: Planted) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    fn planted(&self, _: Planted) -> bool {
        false
    }

    /// Whether a checkpoint may be believed.
    ///
    /// # Errors
    /// Why not.
    fn believes_checkpoint(&self, last: &LastRun, why_no_memory: String) -> Result<(), String> {
        let same = last.run == self.superblock.run;
        if !same && !self.planted(Planted::CheckpointOfAnotherRun) {
            return Err("the flash has been used by another run since".to_owned());
        }
        if !self.superblock.is_clean() {
            return Err(why_no_memory);
        }
        last.proves_checkpoint.clone()
    }

    /// How warm the start is, and the latest time by which the last run has judged anything: what had expired by then stays so.
    /// `header` is that of the memory, `is_new` if it was just made. Memory that is not the last run's is made nobody's; where a
    /// checkpoint may be believed, `load` reads it into the memory and says when it was written.
    fn warmth(
        &self,
        shape: &Shape,
        header: &mut Words,
        is_new: bool,
        load: impl FnOnce() -> Result<UnixSecs, String>,
    ) -> (Warmth, Option<UnixSecs>) {
        let found = match &self.last {
            _ if self.formatted => Err("the flash has just been formatted".to_owned()),
            Err(why) => Err(why.clone()),
            Ok(last) => {
                let words = (!is_new).then_some(|word| header.load(word));
                match shape.is_left(words, self.superblock.run, last.run) {
                    Ok(()) => {
                        let latest = header.load(LATEST).min(u64::from(u32::MAX)) as u32;
                        return (Warmth::Memory, Some(UnixSecs(latest)));
                    }
                    // Whoever has used the flash since, on whatever copy of it, a checkpoint from before proves nothing.
                    Err(NotOurs::Other(why)) => Err(why),
                    Err(NotOurs::Absent(why)) => self.believes_checkpoint(last, why),
                }
            }
        };
        // A kill while the words are being filled must not leave something that looks whole.
        header.store(0, 0);
        header.store(LATEST, 0);
        match found.and_then(|()| load()) {
            Ok(written) => (Warmth::Checkpoint, Some(written)),
            Err(why) => (Warmth::Cold(why), None),
        }
    }
}

/// Whether what the last run left could be gone on with by memory of this shape, as far as can be seen without it. `header` is that of
/// memory of the same size, if there is any.
pub fn can_go_on(
    shape: &Shape,
    superblock: &Superblock,
    last: &LastRun,
    header: Option<[u64; BINDING_WORDS]>,
    has_checkpoint: bool,
) -> bool {
    let words = header.map(|header| move |word: usize| header[word]);
    match shape.is_left(words, superblock.run, last.run) {
        Ok(()) => true,
        Err(NotOurs::Other(_)) => false,
        Err(NotOurs::Absent(_)) => {
            superblock.is_clean()
                && last.run == superblock.run
                && last.proves_checkpoint.is_ok()
                && has_checkpoint
        }
    }
}

/// Where the CAS of a start begin: by chance how far on, so that two lines of runs that began with copies of one flash give no
/// number out twice, nor a server whose clock was set back. `random` is drawn for this.
pub fn cas_base(began: UnixSecs, least: u64, random: u64) -> u64 {
    let base = (u64::from(began.0) * 1_000_000_000).max(least);
    base.saturating_add(random >> 18)
}

/// What a stop makes durable. Drives are given by their place; one that is alone has place 0.
pub trait StopIo: StateIo {
    /// All segments that were written to this drive are durable.
    ///
    /// # Errors
    /// Then the checkpoint says nothing of it.
    fn sync(&mut self, drive: usize) -> Result<(), String>;
    /// A checkpoint of these words, durable when it returns: the segment table of each drive, and the rest. Also says how many bytes were written,
    /// whatever came of it.
    fn write_checkpoint(
        &mut self,
        tables: &[(usize, &Words)],
        rest: &AtRest<'_>,
    ) -> (Result<(), String>, u64);
    /// The drive says that this run was stopped in good order, durable when it returns.
    ///
    /// # Errors
    /// Then what the checkpoint says of it is worth nothing.
    fn write_superblock(&mut self, drive: usize) -> Result<(), String>;
    /// The memory goes back to the machine: the checkpoint holds all of it.
    fn release(&mut self);
    /// What is in DRAM is kept, if there is a memory file. `closed` is what the flash has come to.
    fn keep_dram(&mut self, closed: Option<&Closed>);
}

/// What a stop came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    /// Whether the next start may be warm without the memory; else why not.
    pub checkpoint: Result<(), String>,
    /// Objects on flash.
    pub on_flash: u64,
    /// Objects in DRAM.
    pub in_dram: usize,
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> Maintenance<B> {
    /// After the last request: what is staged is written ([`Maintenance::drain`]; `further` drives have been drained), then the checkpoint, then
    /// the superblocks of a clean stop; the memory goes back, and what is in DRAM is kept. That comes last: it must not take the room that
    /// the checkpoint needs.
    pub fn stop<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        further: &[DriveUpkeep<B>],
        io: &mut (impl SegmentIo + StopIo),
    ) {
        self.drain(now, node, io);
        let closed = self.close(now, node, further, io);
        io.keep_dram(closed.as_ref());
    }

    /// The checkpoint, then the superblocks of a clean stop. `None` without flash. A drive that cannot be synced has no part in it, and is
    /// cold at the next start.
    fn close<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        further: &[DriveUpkeep<B>],
        io: &mut impl StopIo,
    ) -> Option<Closed> {
        let place = self.log()?.part().drive;
        let places = || std::iter::once(place).chain(further.iter().map(DriveUpkeep::drive));
        let words: usize = self.log()?.table().words().len()
            + further.iter().map(|drive| drive.log().table().words().len()).sum::<usize>();
        let mut bytes = 0;
        let mut whole = Vec::new();
        let mut closed = node.at_rest(|rest| {
            let indexes: usize = rest.indexes.iter().map(|index| index.used_words()).sum();
            let apps: usize = rest.apps.iter().map(Vec::len).sum();
            // What the checkpoint can come to at most, should this be killed while it is written.
            let about = REGION_HEADER * (2 + rest.indexes.len());
            self.keep_ahead(now, node, 9 * (words + indexes + apps + about) as u64, io);
            let mut failed = Ok(());
            for drive in places() {
                match io.sync(drive) {
                    Ok(()) => whole.push(drive),
                    Err(why) => failed = Err(why),
                }
            }
            let logs = self.log().into_iter().chain(further.iter().map(DriveUpkeep::log));
            let tables = logs.map(|log| (log.part().drive, log.table().words()));
            let tables: Vec<_> = tables.filter(|(drive, _)| whole.contains(drive)).collect();
            let written = match tables.is_empty() {
                true => failed,
                false => {
                    let (written, of) = io.write_checkpoint(&tables, rest);
                    bytes = of;
                    written
                }
            };
            Closed { checkpoint: written, on_flash: rest.on_flash, in_dram: rest.in_dram }
        });
        if closed.checkpoint.is_ok() {
            let mut said = Err("no drive is whole".to_owned());
            for drive in whole {
                let written = io.write_superblock(drive);
                said = if said.is_ok() { said } else { written };
            }
            closed.checkpoint = said;
        }
        self.charge(now, node, bytes, io);
        if closed.checkpoint.is_ok() {
            io.release();
        }
        Some(closed)
    }
}

/// How the memory is divided for a start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Division {
    /// As the settings say.
    New(Plan),
    /// As the last run had it, so that its index can be kept, although the settings would have it as in `wanted`.
    Kept {
        /// The division.
        plan: Plan,
        /// What it would be.
        wanted: Plan,
    },
}

/// Why memory cannot be divided for a start.
#[derive(Debug)]
pub enum DivisionError {
    /// The settings cannot work.
    Settings(PlanError),
    /// They can, but not with the index that is there.
    Kept(PlanError),
}

/// The division of the memory for a start: that of the index that is there, if there is one, else that of the settings. `former` are
/// the shards and buckets of the last run on this flash; `is_left` says of memory that is divided so whether it could be gone on with.
///
/// # Errors
/// Settings that cannot work, and those that cannot keep the index that is there.
pub fn divide(
    memory: u64,
    max_item: u64,
    flash: (FlashGeometry, u32),
    need: AdmissionNeed<'_>,
    former: Option<(usize, u32)>,
    is_left: impl FnOnce(&Plan) -> bool,
) -> Result<Division, DivisionError> {
    let wanted =
        Plan::over(memory, max_item, Some(flash), need).map_err(DivisionError::Settings)?;
    let Some((shards, buckets)) = former.filter(|f| *f != (wanted.shards, wanted.buckets)) else {
        return Ok(Division::New(wanted));
    };
    let region_words = RegionLayout { flash: flash.0, shards, buckets }.words();
    if !is_left(&Plan { shards, buckets, region_words, ..wanted }) {
        return Ok(Division::New(wanted));
    }
    let plan = Plan::keeping(memory, max_item, flash, need, (shards, buckets))
        .map_err(DivisionError::Kept)?;
    Ok(Division::Kept { plan, wanted })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next start begins above what the last one may have given out, however many shards that had.
    #[test]
    fn all_shards_together_have_the_cas_uniques_of_a_start() {
        for shards in [1, 2, 16, 64, Plan::MOST_SHARDS] {
            assert!(Plan::can_be_divided(shards as u64, 1));
            assert_eq!((shards as u64) << cas_bits(shards), CAS_OF_A_START, "{shards} shards");
        }
    }
}
