//! What a run was built from: by it a replay builds the same shards, log and admission.

use larder_base::{Nanos, Words};
use larder_format::block::superblock::{BlockSuperblockError, COPY_BYTES};
use larder_format::block::{BlockSuperblock, Placement};
use larder_policy::block::{BlockAdmission, BlockAdmissionConfig, BlockAdmissionError, BlockSetup};
use serde::{Deserialize, Serialize};

use super::{RecordedAdmission, RecordedLog, RecordedShard, ReplayedVolumes};
use crate::block::MapLog;
use crate::block::address::Placing;
use crate::block::api::{BlockLimits, WriteMode};
use crate::block::map::{Making, Map, Replacement, Shape};
use crate::block::shard::{BlockConfig, BlockShard, Regions};
use larder_format::recording::END_STREAM;

/// What a run was built from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockRunSetup {
    /// Version of this setup; by its name records of the block cache are told from others.
    pub block: u32,
    /// Version of the larder that recorded.
    pub larder: String,
    /// The superblock of the device as it was when the run began, hexadecimal, without the zeros at its end.
    pub superblock: String,
    /// What writes do: `hdd-ssd`, `hdd-upd`, `hdd-inv`.
    pub write: String,
    /// Which line leaves: `lru`, `clock`, `sieve`, `s3fifo`, `fifo`.
    pub replacement: String,
    /// Which segment of a log is reclaimed, as `--reclaim` takes it.
    pub reclaim: String,
    /// Who makes room in a log, as `--evict` takes it.
    pub evict: String,
    /// Fills under way at most.
    pub fills: u32,
    /// Parts that may wait in a shard.
    pub waiting: u32,
    /// After how long without writes a region loses its bit, nanoseconds.
    pub quiet_nanos: u64,
    /// Threads that have a queue: the workers, those of the program itself, and who prefetches for an operator.
    pub queues: u32,
    /// Admission, as `--admission` takes it.
    pub admission: String,
    /// Volumes, in the order of their streams.
    pub volumes: Vec<VolumeSetup>,
}

/// A volume, as far as its admission goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeSetup {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// Seed of its hashes.
    pub seed: u64,
}

/// Whose stream one of a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// A shard's.
    Shard(u32),
    /// The log's.
    Log,
    /// Maintenance's.
    Maintenance,
    /// What happens to volumes.
    Volumes,
    /// The queue of a thread.
    Queue(u32),
    /// The admission of a volume of the setup, by its number.
    Admission(usize),
    /// The admission of a volume that came later, by its number among these.
    Later(usize),
}

/// Why a setup is of no run.
#[derive(Debug, thiserror::Error)]
pub enum BlockSetupError {
    /// Another version.
    #[error(
        "the record of the block cache is of version {0}, and this larder reads version {VERSION}: replay it with the larder that wrote it"
    )]
    Version(u32),
    /// A field that cannot be.
    #[error("{field} is '{value}': it must be {must}")]
    Field {
        /// Which.
        field: &'static str,
        /// What it says.
        value: String,
        /// What it could say.
        must: &'static str,
    },
    /// The superblock.
    #[error("superblock: {0}")]
    Superblock(#[from] BlockSuperblockError),
    /// The admission.
    #[error("admission: {0}")]
    Admission(#[from] BlockAdmissionError),
}

/// The version that is written and read: another one's streams are others, and so is what the engine decides.
const VERSION: u32 = 9;
/// Most lines that a replay builds a map for: 7 TiB of map, and memory is asked for first.
const MOST_VOLUMES: usize = 4096;
/// The most threads that have a queue.
const MOST_QUEUES: u32 = 4096;
/// See [`BlockRunSetup::validate`].
const MOST_COUNTED: u64 = (1 << 62) - 1;

impl BlockRunSetup {
    /// The setup of a run on a device whose superblock is `superblock`, with `config`, volumes, and so many threads that have a
    /// queue.
    pub fn new(
        superblock: &BlockSuperblock,
        config: &BlockConfig,
        making: Making,
        quiet: Nanos,
        admission: &BlockAdmissionConfig,
        volumes: Vec<VolumeSetup>,
        queues: u32,
    ) -> BlockRunSetup {
        let bytes = superblock.encode();
        let used = bytes.iter().rposition(|&b| b != 0).map_or(0, |at| at + 1);
        BlockRunSetup {
            block: VERSION,
            larder: env!("CARGO_PKG_VERSION").to_owned(),
            superblock: bytes[..used].iter().map(|b| format!("{b:02x}")).collect(),
            write: config.write.to_string(),
            replacement: making.replacement.to_string(),
            reclaim: making.reclaim.to_string(),
            evict: making.evict.to_string(),
            fills: config.limits.fills,
            waiting: config.limits.waiting,
            quiet_nanos: quiet.0,
            queues,
            admission: admission.to_string(),
            volumes,
        }
    }

    /// The device's superblock.
    ///
    /// # Errors
    /// Bytes that are none.
    pub fn superblock(&self) -> Result<BlockSuperblock, BlockSetupError> {
        let text = self.superblock.as_bytes();
        let bad = || BlockSetupError::Field {
            field: "superblock",
            value: self.superblock.chars().take(16).collect(),
            must: "an even number of hexadecimal digits, 65,536 bytes at most",
        };
        if !text.len().is_multiple_of(2) || text.len() / 2 > COPY_BYTES {
            return Err(bad());
        }
        let mut bytes = vec![0u8; COPY_BYTES];
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            let digit = |b: u8| (b as char).to_digit(16);
            let (Some(high), Some(low)) = (digit(pair[0]), digit(pair[1])) else {
                return Err(bad());
            };
            *byte = (high << 4 | low) as u8;
        }
        Ok(larder_format::block::superblock::choose(&bytes, &[0; COPY_BYTES])?)
    }

    fn config(&self, superblock: &BlockSuperblock) -> Result<BlockConfig, BlockSetupError> {
        let layout = &superblock.layout;
        let write: WriteMode = self.write.parse().map_err(|_| BlockSetupError::Field {
            field: "write",
            value: self.write.clone(),
            must: "hdd-ssd, hdd-upd or hdd-inv",
        })?;
        Ok(BlockConfig {
            line_bytes: layout.line,
            write,
            limits: BlockLimits { fills: self.fills, waiting: self.waiting },
            regions: Regions { groups: layout.region_groups, count: layout.regions },
        })
    }

    fn making(&self) -> Result<Making, BlockSetupError> {
        let field = |field, value: &str, must| BlockSetupError::Field {
            field,
            value: value.to_owned(),
            must,
        };
        let must = "lru, clock, sieve, s3fifo or fifo";
        let replacement: Result<Replacement, _> = self.replacement.parse();
        Ok(Making {
            replacement: replacement.map_err(|_| field("replacement", &self.replacement, must))?,
            reclaim: (self.reclaim.parse()).map_err(|_| {
                field("reclaim", &self.reclaim, "greedy, fifo, random or cost-benefit")
            })?,
            evict: (self.evict.parse())
                .map_err(|_| field("evict", &self.evict, "cache, gc or gc:SHARE"))?,
        })
    }

    /// Checks every field.
    ///
    /// # Errors
    /// The first that cannot be.
    pub fn validate(&self) -> Result<(), BlockSetupError> {
        if self.block != VERSION {
            return Err(BlockSetupError::Version(self.block));
        }
        let superblock = self.superblock()?;
        // Both are counted up: what no run has come to has no end either.
        for (field, count) in
            [("generation", superblock.generation), ("sequence", superblock.sequence)]
        {
            if count > MOST_COUNTED {
                let value = count.to_string();
                return Err(BlockSetupError::Field { field, value, must: "less than 2^62" });
            }
        }
        self.config(&superblock)?;
        self.making()?;
        let _: BlockAdmissionConfig = self.admission.parse()?;
        if self.volumes.len() > MOST_VOLUMES {
            let value = self.volumes.len().to_string();
            return Err(BlockSetupError::Field { field: "volumes", value, must: "4,096 at most" });
        }
        if self.queues > MOST_QUEUES {
            let value = self.queues.to_string();
            return Err(BlockSetupError::Field { field: "queues", value, must: "4,096 at most" });
        }
        Ok(())
    }

    /// Shards.
    ///
    /// # Errors
    /// As [`superblock`](Self::superblock).
    pub fn shards(&self) -> Result<usize, BlockSetupError> {
        Ok(self.superblock()?.layout.shards as usize)
    }

    /// Streams that a record begins with: the shards', the log's, maintenance's, that of volumes, the queues', and volumes' admission.
    ///
    /// # Errors
    /// As [`superblock`](Self::superblock).
    pub fn streams(&self) -> Result<usize, BlockSetupError> {
        Ok(self.first_admission(self.shards()?) + self.volumes.len())
    }

    /// Streams that it may have at most: with those of volumes that came later.
    ///
    /// # Errors
    /// As [`superblock`](Self::superblock).
    pub fn most_streams(&self) -> Result<usize, BlockSetupError> {
        self.streams().map(|least| least.max(usize::from(END_STREAM)))
    }

    fn first_admission(&self, shards: usize) -> usize {
        shards + 3 + self.queues as usize
    }

    /// The stream of what happens to volumes.
    ///
    /// # Errors
    /// As [`superblock`](Self::superblock).
    pub fn volumes_stream(&self) -> Result<usize, BlockSetupError> {
        Ok(self.shards()? + 2)
    }

    /// Whose stream it is.
    ///
    /// # Errors
    /// As [`superblock`](Self::superblock).
    pub fn whose(&self, stream: usize) -> Result<Whose, BlockSetupError> {
        let shards = self.shards()?;
        let first = self.first_admission(shards);
        Ok(match stream {
            s if s < shards => Whose::Shard(s as u32),
            s if s == shards => Whose::Log,
            s if s == shards + 1 => Whose::Maintenance,
            s if s == shards + 2 => Whose::Volumes,
            s if s < first => Whose::Queue((s - shards - 3) as u32),
            s if s - first < self.volumes.len() => Whose::Admission(s - first),
            s => Whose::Later(s - first - self.volumes.len()),
        })
    }

    /// What a stream is called.
    pub fn name(&self, stream: usize) -> String {
        match self.whose(stream) {
            Ok(Whose::Shard(shard)) => format!("shard {shard}"),
            Ok(Whose::Log) => "log".to_owned(),
            Ok(Whose::Maintenance) => "maintenance".to_owned(),
            Ok(Whose::Volumes) => "volumes".to_owned(),
            Ok(Whose::Queue(n)) if n + 1 == self.queues => "queue of the prefetch".to_owned(),
            Ok(Whose::Queue(n)) => format!("queue of worker {n}"),
            Ok(Whose::Admission(n)) => format!("admission of volume '{}'", self.volumes[n].name),
            Ok(Whose::Later(n)) => format!("admission of attached volume {}", n + 1),
            Err(_) => format!("stream {stream}"),
        }
    }

    /// Bytes of memory that the maps of a replay take.
    ///
    /// # Errors
    /// As [`superblock`](Self::superblock).
    pub fn memory_bytes(&self) -> Result<u64, BlockSetupError> {
        let layout = self.superblock()?.layout;
        let a_slot = match layout.placement() {
            Placement::Sets(_) => 8,
            Placement::Full => 16,
            Placement::Sparse(_) => {
                let (entries, states) = Map::words(Shape::of(&layout));
                return Ok((entries + states) as u64 * 8 * u64::from(layout.shards));
            }
        };
        Ok(layout.slots() * a_slot)
    }

    /// Shard number `shard` as it was when the run began: empty.
    ///
    /// # Errors
    /// A setup that is of no run.
    pub fn build_shard(&self, shard: u32) -> Result<RecordedShard, BlockSetupError> {
        let superblock = self.superblock()?;
        let layout = superblock.layout;
        let (shape, making) = (Shape::of(&layout), self.making()?);
        let placing = Placing::of(&layout, superblock.key);
        let (entries, sums) = Map::words(shape);
        let (entries, sums) = (Words::heap(entries), Words::heap(sums));
        let map = Map::new(entries, sums, placing, shard, shape, making);
        Ok(RecordedShard::new(BlockShard::new(self.config(&superblock)?, map)))
    }

    /// The log as it was when the run began.
    ///
    /// # Errors
    /// A setup that is of no run.
    pub fn build_log(&self) -> Result<RecordedLog, BlockSetupError> {
        Ok(RecordedLog::new(MapLog::fresh(self.superblock()?, Nanos(self.quiet_nanos))))
    }

    /// The list of volumes as it was when the run began.
    ///
    /// # Errors
    /// A setup that is of no run.
    pub fn build_volumes(&self) -> Result<ReplayedVolumes, BlockSetupError> {
        Ok(ReplayedVolumes::new(self.superblock()?))
    }

    /// The admission of volume number `volume` as it was when the run began.
    ///
    /// # Errors
    /// A setup that is of no run.
    pub fn build_admission(&self, volume: usize) -> Result<RecordedAdmission, BlockSetupError> {
        let none = VolumeSetup { name: String::new(), bytes: 0, seed: 0 };
        self.admission_of(self.volumes.get(volume).unwrap_or(&none))
    }

    /// The admission of a volume of which nothing was asked yet.
    pub(super) fn admission_of(
        &self,
        of: &VolumeSetup,
    ) -> Result<RecordedAdmission, BlockSetupError> {
        let layout = self.superblock()?.layout;
        let config: BlockAdmissionConfig = self.admission.parse()?;
        let setup = BlockSetup {
            line_bytes: layout.line,
            lines: layout.capacity(),
            backing_bytes: of.bytes,
            seed: of.seed,
        };
        Ok(RecordedAdmission::new(BlockAdmission::new(&config, &setup)?))
    }
}
