//! Which run used the data directory last, and with which flash.
//!
//! Every start with flash draws a random number, the run, and writes it into the data directory, the superblock and the
//! shared memory; a clean stop writes it into the checkpoint too. A start is warm only where all of them name the same run:
//! a flash or a directory that was put back from a copy, one that was used with another, or a copy that was used in turn with
//! what it was copied from, each has the number of another run in one of the places. A run that does not open the flash
//! answers for the same keys, and leaves a number of its own.
//!
//! A directory that was copied whole after a clean stop would agree with itself. So the file that holds the number says in which
//! file it was written: a copy is another file. That is by the file's number and by when it was made. Where the file system does not
//! say the latter, a copy may have been given the number of what it replaces, and no checkpoint is believed; the shared memory is, which
//! is not copied with a directory.

use std::fs::Metadata;
use std::io::{ErrorKind, Read};
use std::path::Path;

use larder_base::ByteSize;
use larder_engine::kv::node::Plan;
use larder_engine::kv::node::start::{NoteFile, RunNote, UsedFlash};
use larder_format::Superblock;
use larder_runtime::{DataDir, DataDirError, FileMark};

pub(super) const RUN: &str = "run.json";
/// No run file is longer, bytes.
const LONGEST: u64 = 64 << 10;

/// What the run file says.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct RunFile {
    /// The number that the run drew; never 0.
    pub(super) run: u64,
    /// The file in which this was written.
    inode: u64,
    /// When that file was made, nanoseconds since 1970; 0 if its file system does not say.
    born: u64,
    /// The flash that the run used; none for DRAM alone.
    pub(super) flash: Option<FlashOfRun>,
    /// Where a stop in good order of that run keeps what is in DRAM, if it does.
    #[serde(default)]
    pub(super) memory_file: Option<String>,
}

/// The flash of a run, and how its index was divided.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct FlashOfRun {
    /// Of the superblock.
    pub(super) uuid: String,
    /// As the configuration named it; with several drives the first.
    pub(super) path: String,
    /// The further drives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) further: Vec<String>,
    /// `-m`, bytes.
    memory: u64,
    /// `-I`, bytes.
    max_item: u64,
    /// `--flash-object-size`, bytes.
    object_size: u32,
    /// Shards.
    shards: u64,
    /// Buckets of each shard's index.
    buckets: u32,
}

impl RunFile {
    /// What it says, as a start judges it.
    pub(super) fn note(&self) -> RunNote {
        let used = |f: &FlashOfRun| UsedFlash { uuid: f.uuid.clone(), path: f.path.clone() };
        RunNote {
            run: self.run,
            written_in: NoteFile { inode: self.inode, born: self.born },
            flash: self.flash.as_ref().map(used),
            keeps_memory: self.memory_file.is_some(),
        }
    }
}

impl FlashOfRun {
    pub(super) fn new(
        superblock: &Superblock,
        path: &Path,
        plan: &Plan,
        object_size: u32,
    ) -> FlashOfRun {
        FlashOfRun {
            uuid: superblock.uuid.to_string(),
            path: path.display().to_string(),
            further: Vec::new(),
            memory: plan.memory,
            max_item: plan.max_item,
            object_size,
            shards: plan.shards as u64,
            buckets: plan.buckets,
        }
    }

    /// Shards and buckets of each one's index.
    pub(super) fn division(&self) -> (usize, u32) {
        (self.shards as usize, self.buckets)
    }

    /// The settings that decide the division, where they differ from those of `now`: what they were, what they are.
    pub(super) fn changed(&self, now: &FlashOfRun) -> (String, String) {
        let pairs = [
            ("-m", self.memory, now.memory),
            ("-I", self.max_item, now.max_item),
            ("--flash-object-size", self.object_size.into(), now.object_size.into()),
        ];
        let differing = pairs.iter().filter(|(_, was, is)| was != is);
        let all: Vec<_> = differing
            .map(|(flag, was, is)| {
                (format!("{flag} {}", ByteSize(*was)), format!("{flag} {}", ByteSize(*is)))
            })
            .collect();
        let join =
            |of: fn(&(String, String)) -> &str| all.iter().map(of).collect::<Vec<_>>().join(" ");
        (join(|pair| &pair.0), join(|pair| &pair.1))
    }
}

/// The run file of a directory, whoever has it locked; `None` where there is none, or none that can be understood, which
/// proves nothing about any flash.
fn peek(data_dir: &Path) -> std::io::Result<Option<(RunFile, Metadata)>> {
    let file = match std::fs::File::open(data_dir.join(RUN)) {
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        file => file?,
    };
    let found = file.metadata()?;
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes)?;
    let read: Option<RunFile> = serde_json::from_slice(&bytes).ok();
    Ok(read.map(|read| (read, found)))
}

/// The last run of this directory, as far as can be seen, if it may have left something that a later one would believe: flash, or
/// a file of what was in DRAM. An error where it cannot be seen.
pub(super) fn last_that_keeps(data_dir: &Path) -> std::io::Result<Option<RunFile>> {
    let last = peek(data_dir)?.map(|(read, _)| read);
    Ok(last.filter(|last| last.note().keeps()))
}

/// The last run of this directory, if this is the directory in which it ran and not a copy.
///
/// # Errors
/// Why nothing is known of it.
pub(super) fn last(dir: &DataDir) -> Result<RunFile, String> {
    let read = peek(dir.path()).map_err(|e| format!("the data directory's {RUN}: {e}"))?;
    let Some((read, found)) = read else {
        return Err("the data directory does not say which run used it last (it is new, or of an earlier version)".to_owned());
    };
    let FileMark { inode, born } = dir.mark_of(&found);
    read.note().check_found_in(NoteFile { inode, born })?;
    let divided = |f: &FlashOfRun| Plan::can_be_divided(f.shards, f.buckets);
    if !read.flash.as_ref().is_none_or(divided) {
        return Err(format!("the data directory's {RUN} says what cannot be"));
    }
    Ok(read)
}

/// Writes down that `run` uses the directory now, with this flash and this file of what is in DRAM; tells whether a checkpoint or
/// such a file of it will be believed.
pub(super) fn write(
    dir: &DataDir,
    run: u64,
    flash: Option<FlashOfRun>,
    memory_file: Option<String>,
) -> Result<bool, DataDirError> {
    let mut born = 0;
    dir.replace_marked(RUN, |mark| {
        born = mark.born;
        let file = RunFile { run, inode: mark.inode, born, flash, memory_file };
        // Numbers and strings: there is nothing that could fail.
        serde_json::to_vec(&file).unwrap_or_default()
    })?;
    Ok(born != 0)
}

/// The directory says of no run that it was the last.
pub(super) fn forget(dir: &DataDir) -> Result<(), DataDirError> {
    dir.remove(RUN)
}

/// The run file's place, for a start that is undone.
pub(super) fn path(dir: &Path) -> std::path::PathBuf {
    dir.join(RUN)
}
