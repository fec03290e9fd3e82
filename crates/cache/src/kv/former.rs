//! What the last run has left, and this one finds: how its index is divided, and what a run without flash does about it.

use std::io::ErrorKind;
use std::path::Path;

use larder_engine::kv::FlashGeometry;
use larder_engine::kv::node::start::{
    self, DivisionError, DramKeeper, NO_BIRTHS, TakeIo, UsedFlash,
};
use larder_engine::kv::node::{Plan, RegionLayout};
use larder_format::Superblock;
use larder_runtime::{DataDir, DataDirError, SHARED_DIR, SharedDir, maps};

use super::memory_file::MemoryFile;
use super::open::{DATA_DIR_VERSION, need, random_run};
use super::run::{self, FlashOfRun, RunFile};
use super::warm::{Region, remove_checkpoint};
use super::{CacheConfig, CacheError};

/// How the memory is divided for a start.
pub(super) enum Division {
    /// As the settings say.
    New(Plan),
    /// As the last run had it, so that its index can be kept, although the settings would have it otherwise.
    Kept {
        plan: Plan,
        /// What the last run said of itself: the settings that go with the division.
        from: FlashOfRun,
        /// What is to be said of it. Where the settings are the same, and another version would divide otherwise, there is
        /// nothing that anybody could do about it.
        said: Option<String>,
    },
}

/// The division of the memory for this start: that of the index that is there, if there is one, else that of the settings.
///
/// # Errors
/// Settings that cannot work, and those that cannot keep the index that is there.
pub(super) fn division(
    config: &CacheConfig,
    path: &Path,
    superblock: &Superblock,
    geometry: FlashGeometry,
    last: Option<&RunFile>,
    dir: &DataDir,
) -> Result<Division, CacheError> {
    let max_item = u64::from(config.max_item);
    let flash = (geometry, config.flash_object_size);
    let last = last.and_then(|last| Some((last, last.flash.as_ref()?)));
    let divided = start::divide(
        config.memory,
        max_item,
        flash,
        need(config),
        last.map(|(_, from)| from.division()),
        |plan| {
            let layout =
                RegionLayout { flash: geometry, shards: plan.shards, buckets: plan.buckets };
            last.is_some_and(|(last, _)| Region::is_left(superblock, &layout, last, dir))
        },
    );
    let Some((_, from)) = last else {
        return match divided {
            Ok(start::Division::New(plan) | start::Division::Kept { plan, .. }) => {
                Ok(Division::New(plan))
            }
            Err(DivisionError::Settings(why) | DivisionError::Kept(why)) => Err(why.into()),
        };
    };
    let (shards, buckets) = from.division();
    let or = |text: String, other: &str| if text.is_empty() { other.to_owned() } else { text };
    match divided {
        Ok(start::Division::New(plan)) => Ok(Division::New(plan)),
        Ok(start::Division::Kept { plan, wanted }) => {
            let this = FlashOfRun::new(superblock, path, &wanted, config.flash_object_size);
            let (was, is) = from.changed(&this);
            let same = was.is_empty();
            let said = format!(
                "the flash index stays as it was divided for {} ({shards} shards of {buckets} buckets), so that what is on \
                 flash is kept; for {} it would be {} shards of {} buckets: --format-flash once divides it anew, and loses \
                 what is cached",
                or(was, "the last version"),
                or(is, "this version"),
                wanted.shards,
                wanted.buckets,
            );
            Ok(Division::Kept { plan, from: from.clone(), said: (!same).then_some(said) })
        }
        Err(DivisionError::Settings(why)) => Err(why.into()),
        Err(DivisionError::Kept(why)) => {
            let wanted = Plan::over(config.memory, max_item, Some(flash), need(config))?;
            let this = FlashOfRun::new(superblock, path, &wanted, config.flash_object_size);
            let (was, is) = from.changed(&this);
            let (was, is) = (or(was, "the last version"), or(is, "this version"));
            let why = Box::new(why);
            Err(CacheError::Division { path: path.to_owned(), was, is, shards, buckets, why })
        }
    }
}

/// Opens the data directory of a run with flash.
pub(super) fn open_dir(path: &Path) -> Result<DataDir, CacheError> {
    DataDir::open(path, DATA_DIR_VERSION).map_err(|source| match source {
        // Those that share it are runs without flash.
        DataDirError::InUse { .. } if DataDir::share(path).is_ok() => {
            CacheError::ServedWithoutFlash(source)
        }
        source => source.into(),
    })
}

/// What a run without flash has made of what was on flash.
pub(super) struct Forsaken {
    /// As long as this is held, no run with flash begins.
    pub(super) lock: Option<SharedDir>,
    /// What the operator should know.
    pub(super) warnings: Vec<String>,
}

/// A run without flash answers for the same keys: what the last run on this data directory has left, on flash or in a file of what
/// was in DRAM, is not believed any more, and none with flash begins on it while this one goes on, which would not know what is stored and deleted here and could be warm
/// later. A directory that is not there is left so.
pub(super) fn forsake_flash(data_dir: &Path) -> Result<Forsaken, CacheError> {
    maps::sweep(Path::new(SHARED_DIR));
    // Where it cannot be seen, it is tried: the error says why.
    let is_kept = || !matches!(run::last_that_keeps(data_dir), Ok(None));
    if !data_dir.is_dir() {
        return Ok(Forsaken { lock: None, warnings: Vec::new() });
    }
    let mut in_use = None;
    // Runs with flash that begin and end meanwhile are rare, and seldom more than one.
    for _ in 0..3 {
        if is_kept() {
            match DataDir::open(data_dir, DATA_DIR_VERSION) {
                Ok(dir) => return forsake(dir),
                // By another run without flash, perhaps, which has seen to it: that is looked at below.
                Err(e @ DataDirError::InUse { .. }) => in_use = Some(e),
                Err(e) => return Err(e.into()),
            }
        }
        let (lock, warnings) = match DataDir::share(data_dir) {
            Ok(lock) => (Some(lock), Vec::new()),
            Err(DataDirError::Io { source, .. }) if may_not(&source) => (
                None,
                vec![format!(
                    "data directory '{}' cannot be locked ({source}): a run with flash that begins there meanwhile does not know \
                     what is stored and deleted here, and may serve outdated values afterwards; give this run a --data-dir of \
                     its own",
                    data_dir.display()
                )],
            ),
            Err(e) => return Err(served(e)),
        };
        if !is_kept() {
            return Ok(Forsaken { lock, warnings });
        }
    }
    let path = data_dir.to_owned();
    Err(served(in_use.unwrap_or(DataDirError::InUse { path, pid: None, holder: None })))
}

fn may_not(e: &std::io::Error) -> bool {
    matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
}

fn served(source: DataDirError) -> CacheError {
    match source {
        DataDirError::InUse { .. } => CacheError::ServedWithFlash(source),
        source => source.into(),
    }
}

/// Makes cold what this directory has left, which is shared from then on.
fn forsake(dir: DataDir) -> Result<Forsaken, CacheError> {
    let warnings = take_directory(&dir, random_run()?, None)?.0;
    Ok(Forsaken { lock: Some(dir.into_shared().map_err(served)?), warnings })
}

/// A data directory that a run without flash takes.
struct Taking<'a> {
    dir: &'a DataDir,
    file: Option<&'a MemoryFile>,
    /// Why what is in that may be there still.
    not_void: Option<String>,
    /// Whether a memory file of this run will be believed.
    believed: bool,
}

impl TakeIo for Taking<'_> {
    type Error = CacheError;

    fn write_run(&mut self, run: u64) -> Result<(), CacheError> {
        self.believed = run::write(self.dir, run, None, self.file.map(MemoryFile::name))?;
        Ok(())
    }
    fn remove_checkpoint(&mut self) -> Result<(), CacheError> {
        Ok(remove_checkpoint(self.dir)?)
    }
    fn release_memory(&mut self, flash: &UsedFlash) {
        Region::forget(&flash.uuid);
    }
    fn void_memory_file(&mut self) {
        self.not_void = self.file.and_then(|file| file.void().err());
    }
}

/// The directory is that of `run`, which has no flash, and this file of what is in DRAM, of CAS from this one on. What the operator
/// should know, and what keeps DRAM in that file.
pub(super) fn take_directory(
    dir: &DataDir,
    run: u64,
    file: Option<(&MemoryFile, u64)>,
) -> Result<(Vec<String>, Option<DramKeeper>), CacheError> {
    let former = run::last_that_keeps(dir.path()).ok().flatten().map(|last| last.note());
    let (file, cas_base) = file.unzip();
    let mut taking = Taking { dir, file, not_void: None, believed: false };
    let taken = start::take_directory(former.as_ref(), run, cas_base, &mut taking)?;
    let mut warnings = Vec::from_iter(taking.not_void);
    if file.is_some() && !taking.believed {
        warnings.push(format!("{NO_BIRTHS}: what is in DRAM is not put back from a file there"));
    }
    if let Some(flash) = taken.outdated {
        warnings.push(format!(
            "this run is without flash: what flash '{}' holds may be outdated by what is stored and deleted now, so the next \
             start with it is cold; a run that shall not do that is given a --data-dir of its own (this one's is '{}')",
            flash.path,
            dir.path().display()
        ));
    }
    Ok((warnings, taken.keeper))
}
