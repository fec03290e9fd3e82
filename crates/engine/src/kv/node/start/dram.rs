//! What is in DRAM outlives a stop in good order in a *memory file*: which of them a start believes, what it takes from it, and in
//! which order a stop makes it durable.
//!
//! A stop writes the objects into the file, makes it durable, and only then describes it: whose it is (the run, the flash) and the
//! random number that the file bears too. A start puts the objects back if no run has answered for these keys in between: the data
//! directory, and the superblock where there is flash, must name the very run that wrote the file. Then the start draws a number of its
//! own ([`take_over`](super::take_over), [`take_directory`](super::take_directory)), and with that the file can never be used again,
//! whatever is copied, put back or killed; the description is removed and the file emptied, too, before the first request.
//!
//! ```text
//! start   look, prove; objects are put back; the directory (and the superblock) name the new run; the file is void
//! stop    checkpoint and superblock where there is flash; the file is whole and durable; it is described, durably
//! ```

use larder_base::{AppId, Now, UnixSecs};
use larder_format::memory_file::Meta;
use larder_format::{Superblock, Uuid};

use super::CAS_OF_A_START;
use super::runs::{NO_BIRTHS, RunNote};
use crate::kv::planted::Planted;

/// Of so many applications the names are restored. The rest of the numbers is for those of the configuration.
const MOST_NAMES: usize = 240;
/// The UUID that a description has for a run without flash.
const NO_FLASH: Uuid = Uuid([0; 16]);

/// The flash of a start that looks at a memory file.
#[derive(Clone, Copy, Debug)]
pub struct FlashFound<'a> {
    /// As it is before this start writes its own.
    pub superblock: &'a Superblock,
    /// The flash has just been formatted.
    pub formatted: bool,
}

/// A memory file that is described by what lies beside it, and has yet to be proved to be the last run's.
#[derive(Debug)]
pub struct Claim {
    meta: Meta,
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

impl Claim {
    /// The memory file that `meta` describes.
    pub fn new(meta: Meta) -> Claim {
        Claim {
            meta,
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    /// Whether what is in the file may be put back. `last` is the last run of the data directory, or why it is not known; `flash` is
    /// that of this start, if it has one.
    ///
    /// # Errors
    /// Why not.
    pub fn prove(
        &self,
        last: Result<&RunNote, &str>,
        flash: Option<FlashFound<'_>>,
    ) -> Result<Proved, String> {
        let meta = &self.meta;
        let proved = Proved {
            meta: *meta,
            #[cfg(feature = "planted")]
            fault: self.fault,
        };
        if flash.is_some_and(|flash| flash.formatted) {
            return Err("the flash has just been formatted".to_owned());
        }
        let last = last.map_err(str::to_owned)?;
        let (uuid, on_flash) = match flash {
            None => (NO_FLASH, meta.run),
            Some(FlashFound { superblock, .. }) => {
                last.check_flash(superblock)?;
                (superblock.uuid, superblock.run)
            }
        };
        let another = last.run != meta.run || on_flash != meta.run;
        if another && !self.planted(Planted::MemoryFileOfAnotherRun) {
            return Err(
                "another run has answered for the same keys since it was written".to_owned()
            );
        }
        if uuid != meta.flash {
            return Err("it was written beside another flash, or none".to_owned());
        }
        // The file and the directory may have been put back together.
        if !last.proves_no_copy() {
            return Err(NO_BIRTHS.to_owned());
        }
        Ok(proved)
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
}

/// A memory file of the last run.
#[derive(Clone, Copy, Debug)]
pub struct Proved {
    meta: Meta,
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

/// How objects come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComeBack {
    /// They do not: a flush that a client had announced has come due meanwhile. It was then.
    Flushed(UnixSecs),
    /// They do.
    Objects {
        /// Milliseconds since the file was written: so much older are they.
        away: u32,
        /// A flush that a client had announced is still to come: it is announced again once they are there.
        flush_at: Option<UnixSecs>,
        /// When everything was last flushed; 0 for never.
        flushed_at: UnixSecs,
    },
}

impl Proved {
    /// What the file is described by.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// The least number at which the CAS of this start may begin: above all that the last run has given out.
    pub fn least_cas(&self) -> u64 {
        self.meta.cas_base.saturating_add(CAS_OF_A_START)
    }

    /// The latest time that the run has seen whose objects are put back: the clock of this start tells none before it.
    pub fn latest(&self) -> UnixSecs {
        seconds(self.meta.written)
    }

    /// How the objects come back at `now`.
    pub fn come_back(&self, now: Now) -> ComeBack {
        let meta = &self.meta;
        let flush_at = (meta.flush_at != 0).then(|| seconds(meta.flush_at));
        match flush_at.filter(|at| at.0 <= now.wall.0) {
            Some(at) if !self.planted(Planted::DueFlushForgotten) => ComeBack::Flushed(at),
            _ => {
                let away = u64::from(now.wall.0).saturating_sub(meta.written).saturating_mul(1000);
                ComeBack::Objects {
                    away: away.min(u64::from(u32::MAX)) as u32,
                    flush_at: flush_at.filter(|_| !self.planted(Planted::DueFlushForgotten)),
                    flushed_at: seconds(meta.flushed_at),
                }
            }
        }
    }

    #[cfg(feature = "planted")]
    fn planted(&self, fault: Planted) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    fn planted(&self, _: Planted) -> bool {
        false
    }
}

fn seconds(at: u64) -> UnixSecs {
    UnixSecs(at.min(u64::from(u32::MAX)) as u32)
}

/// The applications in a memory file that this start does not know, as far as there are numbers for them beside those of `known` and
/// of `shares` that the configuration names.
pub fn new_names<'a>(
    in_file: impl Iterator<Item = &'a [u8]>,
    known: &[Vec<u8>],
    shares: usize,
) -> Vec<Vec<u8>> {
    let room = MOST_NAMES.saturating_sub(known.len() + shares);
    let new = in_file.filter(|name| !known.iter().any(|k| k == name));
    new.take(room).map(<[u8]>::to_vec).collect()
}

/// The application of an object that comes back: `number` is the one that the file has, `ids` those that the names of the file have
/// in this run, in their order.
pub fn application(number: u16, ids: &[AppId]) -> AppId {
    match usize::from(number) {
        0 => AppId::DEFAULT,
        n => ids.get(n - 1).copied().unwrap_or(AppId::OTHER),
    }
}

/// What a start does with a memory file once the run owns what it speaks of.
pub trait VoidIo {
    /// What went wrong.
    type Error;
    /// The description is gone, durably.
    ///
    /// # Errors
    /// It may be there still.
    fn remove_description(&mut self) -> Result<(), Self::Error>;
    /// Nothing is in the file.
    ///
    /// # Errors
    /// Something is.
    fn empty(&mut self) -> Result<(), Self::Error>;
}

/// The run is named in the directory (and on flash): the file is void, and a kill from here on leaves nothing to be put back.
///
/// # Errors
/// Those of `io`, which the operator should know. The number of the run keeps what is left from being used all the same.
pub fn void<I: VoidIo>(io: &mut I) -> Result<(), I::Error> {
    io.remove_description()?;
    io.empty()
}

/// What a stop does with a memory file.
pub trait KeepIo {
    /// What went wrong.
    type Error;
    /// Writes the objects into the file, which bears `id`, in the place of what is there; whole and durable when it returns. Returns how
    /// many, and the bytes of the file.
    ///
    /// # Errors
    /// Any part of it may have been written.
    fn write_objects(&mut self, id: [u8; 16]) -> Result<(u64, u64), Self::Error>;
    /// Describes the file: all of it durable when it returns, or nothing.
    ///
    /// # Errors
    /// It may be described or not.
    fn describe(&mut self, meta: &Meta) -> Result<(), Self::Error>;
    /// The file is of no use, and takes room that somebody may want: it is emptied.
    fn discard(&mut self);
}

/// What a run keeps in DRAM, and what a stop in good order does with it. Only a run that owns its flash
/// ([`Begun::take_over`](super::Begun::take_over)) or its directory ([`take_directory`](super::take_directory)) has one.
#[derive(Clone, Copy, Debug)]
pub struct DramKeeper {
    run: u64,
    cas_base: u64,
    flash: Uuid,
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

impl DramKeeper {
    /// That of this run, whose CAS begin at `cas_base`, on this flash, if it has one.
    pub(super) fn new(run: u64, cas_base: u64, flash: Option<Uuid>) -> DramKeeper {
        DramKeeper {
            run,
            cas_base,
            flash: flash.unwrap_or(NO_FLASH),
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    /// Its number.
    pub fn run(&self) -> u64 {
        self.run
    }

    /// The last thing that a stop does: the objects are in the file, which bears the random number `id` and is described then.
    /// `flush_at` is a flush that a client has announced, `flushed_at` the last one. Returns how many objects, and the bytes of the file.
    ///
    /// # Errors
    /// Those of `io`: what was in DRAM is lost.
    pub fn keep<I: KeepIo>(
        &self,
        now: Now,
        id: [u8; 16],
        flush_at: Option<UnixSecs>,
        flushed_at: UnixSecs,
        io: &mut I,
    ) -> Result<(u64, u64), I::Error> {
        let mut meta = Meta {
            id,
            run: self.run,
            cas_base: self.cas_base,
            flash: self.flash,
            written: u64::from(now.wall.0),
            flush_at: flush_at.map_or(0, |at| u64::from(at.0)),
            flushed_at: u64::from(flushed_at.0),
            objects: 0,
            bytes: 0,
        };
        if self.planted(Planted::MemoryFileDescribedFirst) {
            io.describe(&meta)?;
            return io.write_objects(id);
        }
        let kept = io.write_objects(id).and_then(|kept| {
            (meta.objects, meta.bytes) = kept;
            io.describe(&meta)?;
            Ok(kept)
        });
        if kept.is_err() {
            io.discard();
        }
        kept
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
}

#[cfg(test)]
mod tests {
    use super::super::runs::{NoteFile, UsedFlash};
    use super::*;
    use larder_base::{HashKey, Nanos};
    use larder_format::Geometry;

    const RUN: u64 = 7;

    fn flash(run: u64) -> Superblock {
        let bytes = larder_format::geometry::SEGMENTS_AT + (64 << 20);
        let geometry = Geometry::with_segment(bytes, 1 << 20).unwrap();
        let first = Superblock::format(Uuid([3; 16]), HashKey([1; 16]), geometry, UnixSecs(1));
        first.start(5, run)
    }

    fn note(run: u64, flash: Option<&Superblock>) -> RunNote {
        let used = |s: &Superblock| UsedFlash { uuid: s.uuid.to_string(), path: "f".to_owned() };
        let written_in = NoteFile { inode: 1, born: 1 };
        RunNote { run, written_in, flash: flash.map(used), keeps_memory: true }
    }

    fn meta(flash: Uuid) -> Meta {
        Meta {
            id: [9; 16],
            run: RUN,
            cas_base: 100,
            flash,
            written: 1_000,
            flush_at: 0,
            flushed_at: 900,
            objects: 1,
            bytes: 1,
        }
    }

    /// Why the file is not believed.
    fn why(meta: Meta, note: &RunNote, flash: Option<&Superblock>) -> String {
        let flash = flash.map(|superblock| FlashFound { superblock, formatted: false });
        Claim::new(meta).prove(Ok(note), flash).map(|_| ()).unwrap_err()
    }

    #[test]
    fn a_memory_file_is_of_the_run_that_directory_and_flash_name() {
        let (last, other) = (flash(RUN), flash(8));
        let found = FlashFound { superblock: &last, formatted: false };
        let beside = meta(last.uuid);
        let proved = Claim::new(beside).prove(Ok(&note(RUN, Some(&last))), Some(found)).unwrap();
        assert_eq!((proved.latest(), proved.least_cas()), (UnixSecs(1_000), 100 + (1 << 48)));
        assert!(Claim::new(meta(NO_FLASH)).prove(Ok(&note(RUN, None)), None).is_ok());
        let another = "another run has answered";
        assert!(why(beside, &note(8, Some(&last)), Some(&last)).contains(another));
        assert!(why(beside, &note(RUN, Some(&other)), Some(&other)).contains(another));
        assert!(why(meta(NO_FLASH), &note(8, None), None).contains(another));
        // With flash in between, or without.
        assert!(why(beside, &note(RUN, None), Some(&last)).contains("a run without flash"));
        assert!(why(beside, &note(RUN, Some(&last)), None).contains("beside another flash"));
        assert!(why(meta(NO_FLASH), &note(RUN, Some(&last)), Some(&last)).contains("or none"));
        // A directory that may be a copy, one of which nothing is known, and a flash that was formatted.
        let mut copy = note(RUN, Some(&last));
        copy.written_in.born = 0;
        assert_eq!(why(beside, &copy, Some(&last)), NO_BIRTHS);
        assert!(Claim::new(beside).prove(Err("new"), Some(found)).is_err());
        let formatted = FlashFound { formatted: true, ..found };
        assert!(Claim::new(beside).prove(Ok(&note(RUN, Some(&last))), Some(formatted)).is_err());
    }

    #[test]
    fn what_was_flushed_meanwhile_does_not_come_back() {
        let at = |wall| Now { mono: Nanos::ZERO, wall: UnixSecs(wall) };
        let proved = |flush_at| {
            let meta = Meta { flush_at, ..meta(NO_FLASH) };
            Claim::new(meta).prove(Ok(&note(RUN, None)), None).unwrap()
        };
        let objects = |away, flush_at: Option<u32>| ComeBack::Objects {
            away,
            flush_at: flush_at.map(UnixSecs),
            flushed_at: UnixSecs(900),
        };
        assert_eq!(proved(0).come_back(at(1_002)), objects(2_000, None));
        assert_eq!(proved(1_003).come_back(at(1_002)), objects(2_000, Some(1_003)));
        assert_eq!(proved(1_002).come_back(at(1_002)), ComeBack::Flushed(UnixSecs(1_002)));
        // A clock that was set back makes nothing younger.
        assert_eq!(proved(0).come_back(at(10)), objects(0, None));
    }

    #[derive(Default)]
    struct Steps {
        made: Vec<&'static str>,
        fails: bool,
    }

    impl KeepIo for Steps {
        type Error = ();
        fn write_objects(&mut self, _: [u8; 16]) -> Result<(u64, u64), ()> {
            self.made.push("objects");
            if self.fails { Err(()) } else { Ok((4, 50)) }
        }
        fn describe(&mut self, meta: &Meta) -> Result<(), ()> {
            assert_eq!((meta.objects, meta.bytes, meta.run), (4, 50, RUN));
            self.made.push("description");
            Ok(())
        }
        fn discard(&mut self) {
            self.made.push("nothing");
        }
    }

    #[test]
    fn a_file_is_described_when_it_is_whole() {
        let keeper = DramKeeper::new(RUN, 0, None);
        let keep = |io: &mut Steps| keeper.keep(Now::default(), [1; 16], None, UnixSecs(0), io);
        let mut io = Steps::default();
        assert_eq!(keep(&mut io), Ok((4, 50)));
        assert_eq!(io.made, ["objects", "description"]);
        let mut io = Steps { fails: true, ..Steps::default() };
        assert_eq!(keep(&mut io), Err(()));
        assert_eq!(io.made, ["objects", "nothing"]);
    }

    #[test]
    fn names_have_room_beside_those_that_are_known() {
        let many: Vec<Vec<u8>> = (0..300u32).map(|i| i.to_string().into_bytes()).collect();
        let names = || many.iter().map(Vec::as_slice);
        assert_eq!(new_names(names(), &many[..2], 38).len(), 200);
        assert_eq!(new_names(names().take(3), &many[..2], 0), [b"2"]);
        assert!(new_names(names(), &[], 999).is_empty());
    }
}
