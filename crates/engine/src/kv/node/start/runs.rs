//! Which run used a data directory last, whether that can be believed, and what a run without flash makes void there.
//!
//! Every run draws a number and notes it in the data directory, with the flash that it uses. A directory that was copied whole after a
//! clean stop would agree with itself, so the note says in which file it was written: a copy is another file.

use larder_format::Superblock;

use super::LastRun;
use super::dram::DramKeeper;

/// Why a directory proves nothing about a checkpoint or a memory file.
pub const NO_BIRTHS: &str = "the data directory's file system does not say when a file was made, so that a directory that \
                             was put back from a copy cannot be told from this one (ext4 with inodes of 128 bytes is \
                             such; name a directory elsewhere)";

/// Which file a note was written in: what tells it from a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoteFile {
    /// The number of the file in its file system.
    pub inode: u64,
    /// When the file was made, nanoseconds since 1970; 0 where the file system does not say.
    pub born: u64,
}

/// The flash that a run has used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsedFlash {
    /// UUID of its superblock, as text.
    pub uuid: String,
    /// As the configuration named it.
    pub path: String,
}

/// What a data directory says of the run that used it last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunNote {
    /// Its number; never 0.
    pub run: u64,
    /// The file in which this was written.
    pub written_in: NoteFile,
    /// Its flash; `None` for DRAM alone.
    pub flash: Option<UsedFlash>,
    /// Its stop keeps what is in DRAM in a file.
    pub keeps_memory: bool,
}

impl RunNote {
    /// Whether that run may have left something that a later one would believe: flash, or a memory file. A run without flash and
    /// without a memory file takes only such a directory.
    pub fn keeps(&self) -> bool {
        self.flash.is_some() || self.keeps_memory
    }

    /// Whether the run was the last of the directory in which its note was found, in the file `found`.
    ///
    /// # Errors
    /// Why nothing is known of the last run.
    pub fn check_found_in(&self, found: NoteFile) -> Result<(), String> {
        if self.written_in == found {
            return Ok(());
        }
        Err("the data directory is a copy: whether what it was copied from has been used since cannot be known".to_owned())
    }

    /// Whether the flash with this superblock is the one that the run used.
    ///
    /// # Errors
    /// Why it is not.
    pub fn check_flash(&self, superblock: &Superblock) -> Result<(), String> {
        match &self.flash {
            None => Err("a run without flash has used the data directory since".to_owned()),
            Some(flash) if flash.uuid != superblock.uuid.to_string() => Err(format!(
                "the data directory was last used with another flash ('{}')",
                flash.path
            )),
            Some(_) if superblock.run == 0 => {
                Err("the flash was last used by a version of Larder that did not say in which run"
                    .to_owned())
            }
            Some(_) => Ok(()),
        }
    }

    /// Whether the note proves that the directory was not put back from a copy since, with a checkpoint or beside a memory file. Where
    /// the file system does not say when a file was made, a copy may have been given the number of what it replaces.
    pub fn proves_no_copy(&self) -> bool {
        self.written_in.born != 0
    }

    /// As a start with flash judges it.
    pub fn last_run(&self) -> LastRun {
        let why = || format!("no checkpoint is believed: {NO_BIRTHS}");
        let proves_checkpoint = self.proves_no_copy().then_some(()).ok_or_else(why);
        LastRun { run: self.run, proves_checkpoint }
    }
}

/// What a run without flash makes durable in a data directory that it takes. Each is durable when it returns.
pub trait TakeIo {
    /// What ends the start.
    type Error;
    /// The data directory names this run, which has no flash.
    ///
    /// # Errors
    /// What ends the start.
    fn write_run(&mut self, run: u64) -> Result<(), Self::Error>;
    /// No start may use the checkpoint any more.
    ///
    /// # Errors
    /// What ends the start.
    fn remove_checkpoint(&mut self) -> Result<(), Self::Error>;
    /// The memory that outlives the processes of this flash goes back to the machine: nothing can use it any more.
    fn release_memory(&mut self, flash: &UsedFlash);
    /// The memory file is void ([`void`](super::void)). What goes wrong the operator should know; the run goes on.
    fn void_memory_file(&mut self);
}

/// A data directory that a run without flash has taken.
#[derive(Debug)]
pub struct Taken<'a> {
    /// The flash whose objects may be outdated from now on.
    pub outdated: Option<&'a UsedFlash>,
    /// Keeps what is in DRAM at a stop, with a memory file.
    pub keeper: Option<DramKeeper>,
}

/// A run without flash answers for the keys of this directory from here on, so all that its last run left is void: flash, its index,
/// and a memory file, be it the one that this run has: then its CAS begin at `keeps`. Nobody is answered before. `former` is that run,
/// as far as can be seen.
///
/// # Errors
/// Those of `io`. Where the run is written already, the next start is cold.
pub fn take_directory<'a, I: TakeIo>(
    former: Option<&'a RunNote>,
    run: u64,
    keeps: Option<u64>,
    io: &mut I,
) -> Result<Taken<'a>, I::Error> {
    io.write_run(run)?;
    io.remove_checkpoint()?;
    let flash = former.and_then(|former| former.flash.as_ref());
    if let Some(flash) = flash {
        io.release_memory(flash);
    }
    if keeps.is_some() {
        io.void_memory_file();
    }
    let keeper = keeps.map(|cas_base| DramKeeper::new(run, cas_base, None));
    Ok(Taken { outdated: flash, keeper })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note() -> RunNote {
        RunNote {
            run: 7,
            written_in: NoteFile { inode: 5, born: 100 },
            flash: Some(UsedFlash { uuid: "u".to_owned(), path: "/dev/x".to_owned() }),
            keeps_memory: false,
        }
    }

    #[test]
    fn a_copy_of_a_directory_names_no_run() {
        let note = note();
        assert!(note.check_found_in(NoteFile { inode: 5, born: 100 }).is_ok());
        for (inode, born) in [(6, 100), (5, 101)] {
            let why = note.check_found_in(NoteFile { inode, born }).unwrap_err();
            assert!(why.contains("is a copy"), "{why}");
        }
    }

    #[test]
    fn without_the_time_at_which_a_file_was_made_nothing_is_proved() {
        let mut note = note();
        assert!(note.last_run().proves_checkpoint.is_ok());
        note.written_in.born = 0;
        assert!(note.last_run().proves_checkpoint.unwrap_err().contains(NO_BIRTHS));
    }

    #[derive(Default)]
    struct Steps {
        made: Vec<String>,
        refuses: bool,
    }

    impl TakeIo for Steps {
        type Error = ();
        fn write_run(&mut self, run: u64) -> Result<(), ()> {
            self.made.push(format!("run {run}"));
            if self.refuses { Err(()) } else { Ok(()) }
        }
        fn remove_checkpoint(&mut self) -> Result<(), ()> {
            self.made.push("no checkpoint".to_owned());
            Ok(())
        }
        fn release_memory(&mut self, flash: &UsedFlash) {
            self.made.push(format!("no memory of {}", flash.uuid));
        }
        fn void_memory_file(&mut self) {
            self.made.push("no memory file".to_owned());
        }
    }

    #[test]
    fn a_run_without_flash_is_named_before_anything_is_removed() {
        let (note, mut io) = (note(), Steps::default());
        let taken = take_directory(Some(&note), 9, Some(3), &mut io).unwrap();
        assert_eq!(taken.outdated, note.flash.as_ref());
        assert_eq!(taken.keeper.map(|keeper| keeper.run()), Some(9));
        assert_eq!(io.made, ["run 9", "no checkpoint", "no memory of u", "no memory file"]);
        let mut io = Steps { refuses: true, ..Steps::default() };
        assert!(take_directory(Some(&note), 9, Some(3), &mut io).is_err());
        assert_eq!(io.made, ["run 9"], "nothing keeps what is in DRAM then");
        let mut io = Steps::default();
        assert!(take_directory(None, 9, None, &mut io).unwrap().keeper.is_none());
        assert_eq!(io.made, ["run 9", "no checkpoint"]);
    }
}
