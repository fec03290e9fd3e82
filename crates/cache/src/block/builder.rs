//! How a [`Cache`] is opened.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use larder_base::{ByteSize, UnixSecs};
use larder_engine::block::WriteMode;
use larder_engine::block::node::defaults;
use larder_engine::block::node::share::Share;
use larder_format::block::Placement;
use larder_policy::budget::WriteBudgetConfig;
use larder_runtime::RingChoice;
use larder_volume::{Backing, OpenOptions, Uri, open_with};

use super::back::{BackConfig, JournalAt, MarkerAt};
use super::cache::Cache;
use super::open::{self, CacheConfig, CacheError, FormatConfig, layout_of};
use super::workers::Workers;
use super::{ByHand, Volume, Volumes};

/// Most threads.
const MOST_THREADS: usize = 64;
/// Most queues of the program's own.
const MOST_QUEUES: usize = 1024;
/// How many there may be where nobody says so.
const QUEUES: usize = 8;

/// What a [`Cache`] is opened with; [`Cache::builder`] begins one.
#[derive(Debug)]
pub struct Builder {
    format: FormatConfig,
    create: bool,
    state_dir: Option<PathBuf>,
    volumes: Vec<(String, Store)>,
    admission: String,
    write: WriteMode,
    fill_memory: ByteSize,
    readahead: ByteSize,
    shares: Vec<(String, Share)>,
    budget: WriteBudgetConfig,
    back: BTreeMap<String, BackConfig>,
    markers: BTreeMap<String, MarkerAt>,
    moved: BTreeSet<String>,
    journals: BTreeMap<String, JournalAt>,
    awaited: BTreeSet<String>,
    trust_unchanged: bool,
    threads: usize,
    queues: usize,
    ring: RingChoice,
}

/// A volume's store, or what it is called.
#[derive(Debug)]
enum Store {
    Open(Box<dyn Backing>),
    Named(Uri),
}

impl Builder {
    pub(super) fn new(path: PathBuf) -> Builder {
        Builder {
            format: FormatConfig {
                path,
                size: None,
                line: defaults::LINE,
                placement: defaults::PLACEMENT,
                shards: defaults::SHARDS,
                write_log: None,
                yes: false,
                discard_dirty: false,
            },
            create: false,
            state_dir: None,
            volumes: Vec::new(),
            admission: larder_policy::block::BLOCK_ADMISSION_DEFAULT.to_owned(),
            write: defaults::WRITE,
            fill_memory: defaults::FILL_MEMORY,
            readahead: defaults::READAHEAD,
            shares: Vec::new(),
            budget: WriteBudgetConfig::default(),
            back: BTreeMap::new(),
            markers: BTreeMap::new(),
            moved: BTreeSet::new(),
            journals: BTreeMap::new(),
            awaited: BTreeSet::new(),
            trust_unchanged: false,
            threads: defaults::WORKERS,
            queues: QUEUES,
            ring: RingChoice::Auto,
        }
    }

    /// The cache is formatted with so many bytes if its file is not there, or is empty. What holds anything is never formatted.
    #[must_use]
    pub fn create(mut self, bytes: ByteSize) -> Builder {
        (self.create, self.format.size) = (true, Some(bytes));
        self
    }

    /// Bytes of a line, where the cache is formatted: 4 KiB to 64 KiB, a power of two; 4 KiB by default.
    #[must_use]
    pub fn line(mut self, bytes: u32) -> Builder {
        self.format.line = bytes;
        self
    }

    /// Where a line may lie, where the cache is formatted; sets of 8 by default.
    #[must_use]
    pub fn placement(mut self, placement: Placement) -> Builder {
        self.format.placement = placement;
        self
    }

    /// Where it is noted what must be known beside the cache device: that the cache was given up, what is selected, the write budget, and
    /// what proves that a file is as it was left. By default the directory of the cache's file; beside a device there is none, and it must be named. It belongs to this cache alone.
    #[must_use]
    pub fn state_dir(mut self, directory: impl Into<PathBuf>) -> Builder {
        self.state_dir = Some(directory.into());
        self
    }

    /// A volume, and its store: `file:PATH`, and with the features of that name what NBD servers export and what lies in an object
    /// store.
    ///
    /// # Errors
    /// When `uri` names no store.
    pub fn volume(mut self, name: &str, uri: &str) -> Result<Builder, CacheError> {
        let uri = uri.parse().map_err(|e: larder_volume::BackingError| CacheError::Volume {
            name: name.to_owned(),
            reason: e.to_string(),
        })?;
        self.volumes.push((name.to_owned(), Store::Named(uri)));
        Ok(self)
    }

    /// A volume over a store of the program's own.
    #[must_use]
    pub fn volume_over(mut self, name: &str, store: Box<dyn Backing>) -> Builder {
        self.volumes.push((name.to_owned(), Store::Open(store)));
        self
    }

    /// The cache is formatted with a write log of so many bytes, for volumes that write back.
    #[must_use]
    pub fn write_log(mut self, bytes: ByteSize) -> Builder {
        self.format.write_log = Some(bytes);
        self
    }

    /// This volume writes back: what is written to it is answered when it is on the cache's flash, and comes to its store later.
    #[must_use]
    pub fn write_back(mut self, volume: &str, back: BackConfig) -> Builder {
        self.back.insert(volume.to_owned(), back);
        self
    }

    /// Where the marker of a volume is, if not beside its store.
    #[must_use]
    pub fn marker(mut self, volume: &str, at: MarkerAt) -> Builder {
        self.markers.insert(volume.to_owned(), at);
        self
    }

    /// Where the journal of a volume is, if not beside its store.
    #[must_use]
    pub fn journal(mut self, volume: &str, at: JournalAt) -> Builder {
        self.journals.insert(volume.to_owned(), at);
        self
    }

    /// A volume of this name is attached later, when its store is there: what the cache holds of it that the store lacks is kept until then.
    #[must_use]
    pub fn awaits(mut self, volume: &str) -> Builder {
        self.awaited.insert(volume.to_owned());
        self
    }

    /// Which lines are worth their place on flash, as `larder block serve --admission` names it.
    #[must_use]
    pub fn admission(mut self, policy: &str) -> Builder {
        policy.clone_into(&mut self.admission);
        self
    }

    /// What a write does to the cache: by default what is written is cached.
    #[must_use]
    pub fn write(mut self, write: WriteMode) -> Builder {
        self.write = write;
        self
    }

    /// Bytes that may be on their way to flash behind replies; beyond, lines are not cached. 64 MiB by default.
    #[must_use]
    pub fn fill_memory(mut self, bytes: ByteSize) -> Builder {
        self.fill_memory = bytes;
        self
    }

    /// How far is read ahead of who reads in sequence; 1 MiB by default, 0: not at all.
    #[must_use]
    pub fn readahead(mut self, bytes: ByteSize) -> Builder {
        self.readahead = bytes;
        self
    }

    /// What a volume has of the cache at least and at most.
    #[must_use]
    pub fn share(mut self, volume: &str, share: Share) -> Builder {
        self.shares.push((volume.to_owned(), share));
        self
    }

    /// The drive's endurance and the life that is wanted of it: no more is written to flash than that allows.
    #[must_use]
    pub fn write_budget(mut self, budget: WriteBudgetConfig) -> Builder {
        self.budget = budget;
        self
    }

    /// Stores that cannot tell whether they changed (NBD, block devices) are taken as unchanged since the last run.
    #[must_use]
    pub fn trust_unchanged(mut self) -> Builder {
        self.trust_unchanged = true;
        self
    }

    /// Threads that serve requests, at most 64; 2 by default. With 0 there are none of any kind, and the program calls [`Cache::turn`].
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Builder {
        self.threads = threads.min(MOST_THREADS);
        self
    }

    /// The store of a volume is the one that it was, though it is known by another name now, or a whole copy of it: without this a cache that
    /// holds writes of it refuses a store that it does not know again.
    #[must_use]
    pub fn store_moved(mut self, volume: &str) -> Builder {
        self.moved.insert(volume.to_owned());
        self
    }

    /// How many [queues](Cache::queue) there may be at a time, at most 1024; 8 by default. Room for one takes 60 KiB. Without threads there are
    /// none.
    #[must_use]
    pub fn queues(mut self, queues: usize) -> Builder {
        self.queues = queues.min(MOST_QUEUES);
        self
    }

    /// How the cache device and files are read and written; io_uring by default, threads where that cannot be had.
    #[must_use]
    pub fn ring(mut self, ring: RingChoice) -> Builder {
        self.ring = ring;
        self
    }

    /// Opens the cache: warm if it was there and is known to be what it was.
    ///
    /// # Errors
    /// [`CacheError`]: nothing was changed then, but that a file may have been formatted.
    pub fn open(self) -> Result<Cache, CacheError> {
        let path = self.format.path.clone();
        let state_dir = match &self.state_dir {
            Some(dir) => dir.clone(),
            // Notes in /dev would be gone after a reboot.
            None if std::fs::metadata(&path).is_ok_and(|m| !m.is_file()) => {
                return Err(CacheError::System {
                    what: "a directory for notes",
                    reason: format!(
                        "'{}' is no regular file, so none lies beside it: name one (state_dir)",
                        path.display()
                    ),
                });
            }
            None => match path.parent() {
                Some(dir) if dir != Path::new("") => dir.to_owned(),
                _ => PathBuf::from("."),
            },
        };
        let ring = if self.threads == 0 { RingChoice::Caller } else { self.ring };
        if self.create && std::fs::metadata(&path).map_or(true, |m| m.is_file() && m.len() == 0) {
            let random = |e: std::io::Error| CacheError::System {
                what: "random bytes",
                reason: e.to_string(),
            };
            let seed = larder_runtime::machine::random_bytes().map_err(random)?;
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
            open::format(&self.format, seed, UnixSecs(u32::try_from(now).unwrap_or(u32::MAX)))?;
        }
        let line = layout_of(&path)?.line;
        let volumes = Volumes::default();
        for (name, store) in self.volumes {
            let fail = |reason: String| CacheError::Volume { name: name.clone(), reason };
            volumes.check_free(&name).map_err(|e| fail(e.to_string()))?;
            let store = match store {
                Store::Open(store) => store,
                Store::Named(uri) => {
                    let notes = Some(state_dir.join("stores"));
                    let options =
                        OpenOptions { direct: true, notes, ring, ..OpenOptions::default() };
                    open_with(&uri, &options).map_err(|e| fail(e.to_string()))?
                }
            };
            volumes.add(Volume::new(&name, store, line, true)).map_err(|e| fail(e.to_string()))?;
        }
        let mut config = CacheConfig::new(state_dir);
        config.admission = self.admission.parse()?;
        (config.write, config.ring, config.workers) = (self.write, ring, self.threads.max(1));
        (config.fill_memory, config.readahead) = (self.fill_memory, self.readahead);
        (config.queues, config.trust_unchanged) = (self.queues, self.trust_unchanged);
        (config.rules.shares, config.rules.budget) = (self.shares, self.budget);
        (config.back, config.markers, config.moved) = (self.back, self.markers, self.moved);
        (config.journals, config.awaited) = (self.journals, self.awaited);
        let (all, threads) = (volumes.all(), self.threads);
        let running = match threads {
            0 => open::open_by_hand(&path, config, &all, ByHand::Clock)?,
            _ => open::open(&path, config, &all)?,
        };
        let core: &Arc<_> = running.cache();
        let workers = match threads {
            0 => Workers::by_hand(core.clone()),
            _ => Workers::start(core, threads, ring)?,
        };
        Ok(Cache::over(running, volumes, workers))
    }
}
