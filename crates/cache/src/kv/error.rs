//! Why a cache does not open.

use std::path::PathBuf;

use larder_base::ByteSize;
use larder_engine::kv::node::PlanError;
use larder_engine::kv::record::SetupError;

/// Why a cache does not open. Nothing has been written to the flash then.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// It was stopped before it was open. What was warm stays warm.
    #[error("stopped during the start")]
    Stopped,
    /// The data directory.
    #[error(transparent)]
    DataDir(#[from] larder_runtime::DataDirError),
    /// The flash.
    #[error(transparent)]
    Device(#[from] larder_runtime::DeviceError),
    /// A flash file of another size.
    #[error(
        "{0}, or start once with --format-flash to make it anew with that size (what it caches is lost)"
    )]
    FileSize(#[source] larder_runtime::DeviceError),
    /// A run without flash on the data directory of one with flash.
    #[error(
        "{0}. (This run is without flash and keeps nothing, but the other one would not know what is stored and deleted here, and \
         could serve outdated values afterwards)"
    )]
    ServedWithFlash(#[source] larder_runtime::DataDirError),
    /// A run with flash on the data directory of one without.
    #[error(
        "{0}. (That run is without flash; this one would not know what is stored and deleted there meanwhile, and could serve \
         outdated values to clients that come from it)"
    )]
    ServedWithoutFlash(#[source] larder_runtime::DataDirError),
    /// Other settings than those of the last run, with which its index cannot be kept.
    #[error(
        "flash '{path}': its index was divided for {was} ({shards} shards of {buckets} buckets), and {is} cannot hold that: \
         {why}. Start with {was} again to keep what is on flash, or once with --format-flash to begin anew (what is cached is \
         lost)"
    )]
    Division {
        /// Which flash.
        path: PathBuf,
        /// Settings that the index was divided for.
        was: String,
        /// What they are now.
        is: String,
        /// Shards.
        shards: usize,
        /// Buckets of each one's index.
        buckets: u32,
        /// What does not fit.
        why: Box<PlanError>,
    },
    /// A size that cannot be asked for.
    #[error("{what} {size} {source}")]
    Size {
        /// Of what.
        what: &'static str,
        /// What was asked for.
        size: ByteSize,
        /// Why not.
        source: larder_engine::kv::node::defaults::SizeError,
    },
    /// Sizes that cannot work.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The flash is too small or too large to be divided.
    #[error(transparent)]
    Geometry(#[from] larder_format::GeometryError),
    /// A superblock of another version, or a device that shrank.
    #[error("flash '{path}': {source}")]
    Superblock {
        /// Which flash.
        path: PathBuf,
        /// What is wrong.
        source: larder_format::SuperblockError,
    },
    /// Somebody's data.
    #[error(
        "flash '{path}' holds {what}, not Larder's data; nothing was written. To erase it and use it as flash, start once \
         with --format-flash"
    )]
    Foreign {
        /// Which flash.
        path: PathBuf,
        /// What was recognised.
        what: String,
    },
    /// Both superblocks of what was Larder's flash are unreadable.
    #[error(
        "flash '{path}' was Larder's, but neither superblock is whole ({why}); nothing was written. Start once with \
         --format-flash to begin anew: what it cached is lost"
    )]
    Damaged {
        /// Which flash.
        path: PathBuf,
        /// What is wrong with them.
        why: String,
    },
    /// The flash was formatted with another size.
    #[error(
        "flash '{path}' was formatted for {formatted}, and {wanted} is asked for; leave --flash-size out to go on with it, \
         or start once with --format-flash to begin anew"
    )]
    OtherSize {
        /// Which flash.
        path: PathBuf,
        /// Its size as formatted.
        formatted: ByteSize,
        /// What the configuration says.
        wanted: ByteSize,
    },
    /// A drive that is named twice, by whatever path.
    #[error("flash '{0}': it is named twice: name each drive once")]
    DriveTwice(PathBuf),
    /// One of several drives.
    #[error("flash '{path}': {why}")]
    Drive {
        /// Which.
        path: PathBuf,
        /// What is wrong, and what helps.
        why: String,
    },
    /// Admission's configuration.
    #[error(transparent)]
    Admission(#[from] larder_policy::admission::AdmissionError),
    /// The write budget's configuration.
    #[error(transparent)]
    Budget(#[from] larder_policy::budget::BudgetError),
    /// The applications' configuration.
    #[error(transparent)]
    Application(#[from] larder_policy::application::ApplicationError),
    /// A record that cannot be begun.
    #[error("record '{path}': {why}")]
    Record {
        /// Which file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A record of a cache that is not empty.
    #[error(
        "record '{path}': a record begins with an empty cache, and flash '{flash}' holds what an earlier run cached. Start once with --format-flash (what is cached is lost), or record with another --data-dir"
    )]
    RecordWarm {
        /// Which file.
        path: PathBuf,
        /// Which flash.
        flash: PathBuf,
    },
    /// A record of several drives.
    #[error(
        "record '{0}': a record is of a cache with one drive, and there are several: leave the record out, or the drives but for one"
    )]
    RecordSeveral(PathBuf),
    /// A file for what is in DRAM that cannot be used.
    #[error("memory-file '{path}': {why}")]
    MemoryFile {
        /// Which file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A capture that cannot be begun.
    #[error("capture '{path}': {why}")]
    Capture {
        /// Which file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The operating system gives no random numbers, threads or the like.
    #[error("cannot {what}: {source}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// An index that was just made is not accepted: a defect.
    #[error("the flash index cannot be made: {0}; please report this")]
    Index(#[from] larder_engine::index::IndexError),
}

impl From<SetupError> for CacheError {
    fn from(e: SetupError) -> CacheError {
        match e {
            SetupError::Admission(e) => e.into(),
            SetupError::Budget(e) => e.into(),
            SetupError::Application(e) => e.into(),
            SetupError::Index(e) => e.into(),
            // Numbers that the plan has checked, and the version that this program writes.
            SetupError::Value { .. } | SetupError::Version(_) => {
                CacheError::System { what: "divide the memory", source: std::io::Error::other(e) }
            }
        }
    }
}
