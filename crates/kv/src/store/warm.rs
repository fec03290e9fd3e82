//! What survives: the region of words that outlives the process, and the checkpoint that outlives the machine.
//!
//! The region holds the segment table and every shard's flash index. On tmpfs it survives `kill -9` exactly as far as
//! the stores had come, which is what the engine's invariants are made for. A restart of the machine takes it away; then
//! a checkpoint is used, if the last run ended cleanly. After a power cut neither is there, and the cache is cold: there
//! is no proof that what lies on flash is the latest version of anything.
//!
//! The region is bound to the flash by the superblock's UUID and **epoch**, which every start raises. The order in which
//! a start writes (pending epoch into the region, superblock, epoch into the region) lets a kill at any point be told
//! from a flash that somebody else has used in between.
//!
//! ```text
//! word 0 magic   1 layout version   2,3 UUID   4 epoch   5 pending epoch   6 shards   7 words per index
//! 8 words of the segment table      9 bytes per segment      16.. CAS high water by shard
//! 64.. segment table, then the shards' indexes, then each shard's bytes on flash by application
//! ```

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::Path;

use larder_base::{AppId, UnixSecs, Words};
use larder_engine::index::FlashIndex;
use larder_format::checkpoint::{CheckpointReader, CheckpointWriter, Identity};
use larder_format::{Geometry, Superblock};
use larder_runtime::{DataDir, SHARED_DIR, SharedRegion};

use super::plan::{APP_WORDS, Plan, REGION_HEADER, table_words};

const MAGIC: u64 = u64::from_le_bytes(*b"LARDERkv");
const LAYOUT: u64 = 2;
const CHECKPOINT: &str = "checkpoint";
const SECTION_TABLE: u32 = 1;
const SECTION_INDEX: u32 = 2;
const SECTION_APPS: u32 = 3;

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

/// Memory for the segment table and the indexes.
pub(super) struct Region {
    header: Words,
    pub(super) table: Words,
    pub(super) indexes: Vec<Words>,
    /// Each shard's bytes on flash by application.
    pub(super) apps: Vec<Words>,
    /// Keeps the lock.
    shared: Option<SharedRegion>,
    /// Why the memory does not outlive the process.
    pub(super) why_private: Option<String>,
}

impl Region {
    /// The region of the flash with this superblock; on the heap when shared memory cannot be had.
    pub(super) fn open(superblock: &Superblock, plan: &Plan, geometry: &Geometry) -> Region {
        let name = Self::name(superblock);
        let bytes = plan.region_words as u64 * 8;
        let dir = Path::new(SHARED_DIR);
        let mut opened = SharedRegion::open(dir, &name, bytes);
        if matches!(opened, Err(larder_runtime::SharedError::SizeDiffers { .. })) {
            // Another configuration's: its index is of no use to this one.
            opened = SharedRegion::remove(dir, &name)
                .and_then(|()| SharedRegion::open(dir, &name, bytes));
        }
        let per_index = FlashIndex::words_for(plan.buckets).next_multiple_of(8);
        let exact = FlashIndex::words_for(plan.buckets);
        let table_at = REGION_HEADER;
        let table_len = larder_engine::kv::SegmentTable::words_for(geometry.segments());
        let index_at = |i: usize| REGION_HEADER + table_words(geometry.segments()) + i * per_index;
        let apps_at = |i: usize| index_at(plan.shards) + i * APP_WORDS;
        match opened {
            Ok(shared) => {
                let all = shared.words();
                Region {
                    header: Words::from_static(&all[..REGION_HEADER]),
                    table: Words::from_static(&all[table_at..table_at + table_len]),
                    indexes: (0..plan.shards)
                        .map(|i| Words::from_static(&all[index_at(i)..index_at(i) + exact]))
                        .collect(),
                    apps: (0..plan.shards)
                        .map(|i| Words::from_static(&all[apps_at(i)..apps_at(i) + AppId::COUNT]))
                        .collect(),
                    shared: Some(shared),
                    why_private: None,
                }
            }
            Err(e) => Region {
                header: Words::heap(REGION_HEADER),
                table: Words::heap(table_len),
                indexes: (0..plan.shards).map(|_| Words::heap(exact)).collect(),
                apps: (0..plan.shards).map(|_| Words::heap(AppId::COUNT)).collect(),
                shared: None,
                why_private: Some(e.to_string()),
            },
        }
    }

    fn name(superblock: &Superblock) -> String {
        format!("larder-{}", superblock.uuid)
    }

    /// Removes the region of a flash that has been formatted anew: nobody else ever would.
    pub(super) fn forget(former: &Superblock) {
        let dir = Path::new(SHARED_DIR);
        if let Err(error) = SharedRegion::remove(dir, &Self::name(former)) {
            tracing::warn!(%error, "the shared memory of the former flash stays");
        }
    }

    fn expected(superblock: &Superblock, plan: &Plan, geometry: &Geometry) -> [(usize, u64); 8] {
        let uuid = u128::from_le_bytes(superblock.uuid.0);
        [
            (0, MAGIC),
            (1, LAYOUT),
            (2, uuid as u64),
            (3, (uuid >> 64) as u64),
            (6, plan.shards as u64),
            (7, FlashIndex::words_for(plan.buckets) as u64),
            (8, larder_engine::kv::SegmentTable::words_for(geometry.segments()) as u64),
            (9, u64::from(geometry.segment_bytes())),
        ]
    }

    /// Whether the words are those that the last run on this flash left, and if not, why.
    pub(super) fn is_of(
        &self,
        superblock: &Superblock,
        plan: &Plan,
        geometry: &Geometry,
    ) -> Result<(), String> {
        if self.shared.as_ref().is_none_or(SharedRegion::is_fresh) {
            return Err("no memory of an earlier run is there".to_owned());
        }
        for (word, want) in Self::expected(superblock, plan, geometry) {
            if self.header.load(word) != want {
                return Err("the memory left behind is of another configuration".to_owned());
            }
        }
        let (epoch, pending) = (self.header.load(4), self.header.load(5));
        if superblock.epoch != epoch && superblock.epoch != pending {
            return Err("the flash has been used by another run since".to_owned());
        }
        Ok(())
    }

    /// Makes the words nobody's: a kill while they are being filled must not leave something that looks whole.
    pub(super) fn disown(&mut self) {
        self.header.store(0, 0);
    }

    /// The superblock of `next` is about to be written.
    pub(super) fn announce(&mut self, next: &Superblock) {
        self.header.store(5, next.epoch);
    }

    /// The words are whole and belong to the run of `superblock`.
    pub(super) fn own(&mut self, superblock: &Superblock, plan: &Plan, geometry: &Geometry) {
        self.header.store(4, superblock.epoch);
        self.header.store(5, superblock.epoch);
        for (word, value) in Self::expected(superblock, plan, geometry).into_iter().rev() {
            self.header.store(word, value);
        }
    }

    /// Reads the checkpoint of a clean stop into the words.
    pub(super) fn load_checkpoint(
        &mut self,
        dir: &DataDir,
        superblock: &Superblock,
        geometry: &Geometry,
    ) -> Result<(), String> {
        let file = File::open(dir.join(CHECKPOINT))
            .map_err(|e| format!("there is no checkpoint ({e})"))?;
        let identity =
            Identity { uuid: superblock.uuid, epoch: superblock.epoch, geometry: *geometry };
        let mut reader = CheckpointReader::open(BufReader::with_capacity(1 << 20, file), &identity)
            .map_err(|e| e.to_string())?;
        let (mut seen, sections) = (0, 1 + self.indexes.len() + self.apps.len());
        while let Some(section) = reader.next_section().map_err(|e| e.to_string())? {
            let target = match (section.kind, section.id as usize) {
                (SECTION_TABLE, 0) => &mut self.table,
                (SECTION_INDEX, i) if i < self.indexes.len() => &mut self.indexes[i],
                (SECTION_APPS, i) if i < self.apps.len() => &mut self.apps[i],
                _ => return Err("the checkpoint is of another configuration".to_owned()),
            };
            if section.words != target.len() as u64 {
                return Err("the checkpoint is of another configuration".to_owned());
            }
            let mut at = 0;
            reader
                .read_words(|word| {
                    if target.load(at) != word {
                        target.store(at, word);
                    }
                    at += 1;
                })
                .map_err(|e| e.to_string())?;
            seen += 1;
        }
        if seen == sections { Ok(()) } else { Err("the checkpoint is not whole".to_owned()) }
    }

    /// Gives the shared memory back to the machine: after a clean stop the checkpoint holds all of it.
    pub(super) fn release(&self) {
        let Some(shared) = &self.shared else { return };
        if let Err(error) = std::fs::remove_file(shared.path()) {
            tracing::debug!(%error, "the shared memory of the index stays");
        }
    }

    /// Gives up the parts for the engine to own; the rest must be kept as long as they are in use.
    pub(super) fn split(&mut self) -> (Words, Vec<ShardWords>) {
        let indexes = std::mem::take(&mut self.indexes).into_iter();
        let shards = indexes.zip(std::mem::take(&mut self.apps));
        (
            std::mem::replace(&mut self.table, Words::heap(0)),
            shards.map(|(index, apps)| ShardWords { index, apps }).collect(),
        )
    }
}

/// What outlives the process of one shard.
pub(super) struct ShardWords {
    pub(super) index: Words,
    /// Bytes on flash by application.
    pub(super) apps: Words,
}

/// Writes a checkpoint of a stopped store.
pub(super) fn write_checkpoint(
    dir: &DataDir,
    superblock: &Superblock,
    geometry: &Geometry,
    written: UnixSecs,
    table: &Words,
    indexes: &[&Words],
    apps: &[Vec<u64>],
) -> Result<(), larder_runtime::DataDirError> {
    let identity = Identity { uuid: superblock.uuid, epoch: superblock.epoch, geometry: *geometry };
    dir.replace_with(CHECKPOINT, |file| {
        let out = BufWriter::with_capacity(1 << 20, file);
        let mut writer = CheckpointWriter::create(out, &identity, u64::from(written.0))?;
        let words = |w: &Words| (0..w.len()).map(|i| w.load(i)).collect::<Vec<u64>>();
        writer.section(SECTION_TABLE, 0, table.len() as u64, words(table))?;
        for (i, index) in indexes.iter().enumerate() {
            writer.section(
                SECTION_INDEX,
                i as u32,
                index.len() as u64,
                (0..index.len()).map(|k| index.load(k)),
            )?;
        }
        for (i, bytes) in apps.iter().enumerate() {
            writer.section(SECTION_APPS, i as u32, bytes.len() as u64, bytes.iter().copied())?;
        }
        writer.finish()?.flush()
    })
}

/// Removes a checkpoint that no start may use any more.
pub(super) fn remove_checkpoint(dir: &DataDir) -> Result<(), larder_runtime::DataDirError> {
    dir.remove(CHECKPOINT)
}
