//! What survives: the region of words that outlives the process, and the checkpoint that outlives the machine.
//!
//! The region holds the segment table and every shard's flash index. On tmpfs it survives `kill -9` exactly as far as
//! the stores had come, which is what the engine's invariants are made for. A restart of the machine takes it away; then
//! a checkpoint is used, if the last run ended cleanly. After a power cut neither is there, and the cache is cold: there
//! is no proof that what lies on flash is the latest version of anything.
//!
//! What binds the region to the flash and to the data directory, and what of it can be believed, is the engine's to decide
//! (`engine/src/kv/node/start.rs`); its header is described there, too.
//!
//! ```text
//! word 0.. header    64.. see `engine/src/kv/node/region.rs`
//! ```

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_base::{AppId, UnixSecs, Words};
use larder_engine::index::FlashIndex;
use larder_engine::kv::node::start::{BINDING_WORDS, LATEST, Shape, can_go_on};
use larder_engine::kv::node::{Plan, REGION_HEADER, RegionLayout};
use larder_engine::kv::{FlashGeometry, MOST_DRIVES};
use larder_format::checkpoint::{CheckpointReader, CheckpointWriter, Identity};
use larder_format::geometry::{MIN_SEGMENTS, SEGMENTS_AT};
use larder_format::{Geometry, PAGE_SIZE, Superblock};
use larder_runtime::maps::{self, Owner, OwnerKind};
use larder_runtime::{DataDir, SHARED_DIR, SharedRegion};

use super::run::RunFile;

pub(super) const CHECKPOINT: &str = "checkpoint";
const SECTION_TABLE: u32 = 1;
const SECTION_INDEX: u32 = 2;
const SECTION_APPS: u32 = 3;

/// Memory for the segment table and the indexes.
pub(super) struct Region {
    pub(super) header: Words,
    pub(super) words: IndexWords,
    /// The latest wall time that anything was judged by, if it outlives the process.
    latest: Option<&'static AtomicU64>,
    /// Keeps the lock.
    shared: Option<SharedRegion>,
    /// Why the memory does not outlive the process.
    pub(super) why_private: Option<String>,
    /// This start has made it, and no run owns it yet: it goes when the start is refused.
    made_here: bool,
}

/// What of the region the engine owns while a run goes on.
pub(super) struct IndexWords {
    /// Of each drive, by its place.
    tables: Vec<(usize, Words)>,
    indexes: Vec<Words>,
    /// Each shard's bytes on flash by application.
    apps: Vec<Words>,
}

impl Region {
    /// The region of the flash at `path` with this superblock, for this data directory; on the heap when shared memory cannot be
    /// had. Maps whose owner is gone give their memory back.
    pub(super) fn open(
        superblock: &Superblock,
        plan: &Plan,
        layout: &RegionLayout,
        path: &Path,
        data_dir: &Path,
    ) -> Region {
        let name = Self::name(superblock);
        let bytes = layout.words() as u64 * 8;
        let dir = Path::new(SHARED_DIR);
        // What the indexes have at first; they take more as they grow.
        let backed = layout.backed();
        let open = || SharedRegion::open_in_parts(dir, &name, bytes, &backed);
        let mut opened = open();
        if matches!(opened, Err(larder_runtime::SharedError::SizeDiffers { .. })) {
            // Another configuration's: its index is of no use to this one.
            opened = SharedRegion::remove(dir, &name).and_then(|()| open());
        }
        if let Ok(shared) = &opened {
            shared.set_owner(&Owner::new(OwnerKind::Kv, data_dir, path));
        }
        // Only now: this flash's own map may be noted for another directory.
        maps::sweep(dir);
        let tables =
            || (0..MOST_DRIVES).map(|i| (i, layout.table(i))).filter(|(_, t)| !t.is_empty());
        let opened = opened.map_err(|e| e.to_string()).and_then(|shared| {
            let indexes = (0..plan.shards).map(|i| shared.growing(layout.index(i)));
            let indexes = indexes.collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
            Ok((shared, indexes))
        });
        match opened {
            Ok((shared, indexes)) => {
                let all = shared.words();
                Region {
                    header: Words::from_static(&all[..REGION_HEADER]),
                    words: IndexWords {
                        tables: tables().map(|(i, t)| (i, Words::from_static(&all[t]))).collect(),
                        indexes,
                        apps: (0..plan.shards)
                            .map(|i| Words::from_static(&all[layout.apps(i)]))
                            .collect(),
                    },
                    latest: Some(&all[LATEST]),
                    made_here: shared.is_fresh(),
                    shared: Some(shared),
                    why_private: None,
                }
            }
            Err(e) => Region {
                header: Words::heap(REGION_HEADER),
                words: IndexWords {
                    tables: tables().map(|(i, t)| (i, Words::heap(t.len()))).collect(),
                    indexes: (0..plan.shards)
                        .map(|_| Words::heap(FlashIndex::words_for(plan.index_most)))
                        .collect(),
                    apps: (0..plan.shards).map(|_| Words::heap(AppId::COUNT)).collect(),
                },
                latest: None,
                made_here: false,
                shared: None,
                why_private: Some(e),
            },
        }
    }

    fn name(superblock: &Superblock) -> String {
        Self::name_of(&superblock.uuid.to_string())
    }

    fn name_of(uuid: &str) -> String {
        format!("larder-{uuid}")
    }

    /// Whether what the last run left is there, and could be gone on with by a memory that is divided as in `plan`.
    pub(super) fn is_left(
        superblock: &Superblock,
        layout: &RegionLayout,
        last: &RunFile,
        dir: &DataDir,
    ) -> bool {
        let bytes = (layout.words() as u64 * 8).next_multiple_of(PAGE_SIZE as u64);
        let header = Self::header_in(&Path::new(SHARED_DIR).join(Self::name(superblock)), bytes);
        let shape = Shape::new(superblock, layout);
        can_go_on(
            &shape,
            superblock,
            &last.note().last_run(),
            header,
            dir.join(CHECKPOINT).exists(),
        )
    }

    /// The header of a region of so many bytes; `None` where there is none.
    fn header_in(path: &Path, bytes: u64) -> Option<[u64; BINDING_WORDS]> {
        let mut file = File::open(path).ok()?;
        let mut raw = [0; REGION_HEADER * 8];
        (file.metadata().ok()?.len() == bytes).then(|| file.read_exact(&mut raw).ok())??;
        let mut words = raw.as_chunks::<8>().0.iter().map(|w| u64::from_ne_bytes(*w));
        Some(std::array::from_fn(|_| words.next().unwrap_or_default()))
    }

    /// Removes the region of a flash that has been formatted anew or will be cold: nobody else ever would.
    pub(super) fn forget(uuid: &str) {
        let dir = Path::new(SHARED_DIR);
        if let Err(error) = SharedRegion::remove(dir, &Self::name_of(uuid)) {
            tracing::warn!(%error, "the shared memory of the former flash stays");
        }
    }

    /// A run owns it from now on: it stays, however this process ends.
    pub(super) fn own(&mut self) {
        self.made_here = false;
    }

    /// There was none before this start.
    pub(super) fn is_new(&self) -> bool {
        self.shared.as_ref().is_none_or(SharedRegion::is_fresh)
    }

    /// Where the latest wall time that anything is judged by is kept, if it outlives the process.
    pub(super) fn latest(&self) -> Option<&'static AtomicU64> {
        self.latest
    }

    /// Gives the shared memory back to the machine: after a clean stop the checkpoint holds all of it.
    pub(super) fn release(&self) {
        let Some(shared) = &self.shared else { return };
        if let Err(error) = shared.discard() {
            tracing::debug!(%error, "the shared memory of the index stays");
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.made_here {
            self.release();
        }
    }
}

impl IndexWords {
    /// Reads the checkpoint of a clean stop into the words; tells when it was written. A drive that it knows and that is not here is passed
    /// over, and one that it does not know has an empty table.
    pub(super) fn load_checkpoint(
        &mut self,
        dir: &DataDir,
        superblock: &Superblock,
        flash: &FlashGeometry,
        buckets: u32,
        is_new: bool,
        hurry: &AtomicBool,
    ) -> Result<UnixSecs, String> {
        // What a checkpoint leaves out is zero.
        if !is_new {
            // What an index had grown by has no memory, and is zero once it has some.
            let first = FlashIndex::words_for(buckets);
            self.indexes.iter_mut().for_each(|words| words.give_back(first));
            let tables = self.tables.iter_mut().map(|(_, words)| words);
            let all = tables.chain(&mut self.apps).map(|w| (w.len(), w));
            for (len, words) in all.chain(self.indexes.iter_mut().map(|words| (first, words))) {
                for at in 0..len {
                    if words.load(at) != 0 {
                        words.store(at, 0);
                    }
                }
            }
        }
        let mut progress =
            Progress::new("reading the checkpoint", self.tables.len() + self.indexes.len());
        let open = |identity: &Identity| {
            let file = File::open(dir.join(CHECKPOINT))
                .map_err(|e| format!("there is no checkpoint ({e})"))?;
            let input = BufReader::with_capacity(1 << 20, Watched { file, hurry });
            CheckpointReader::open(input, identity).map_err(|e| e.to_string())
        };
        // It may have been written before other drives joined this one.
        let alone = identity(superblock, superblock.geometry);
        let mut reader = match flash.drives.is_one() {
            true => open(&alone)?,
            false => open(&identity(superblock, any_of(flash)?))
                .or_else(|why| open(&alone).map_err(|_| why))?,
        };
        let (mut seen, sections) = (0, self.indexes.len() + self.apps.len());
        while let Some(section) = reader.next_section().map_err(|e| e.to_string())? {
            let is_table = section.kind == SECTION_TABLE;
            let target = match (section.kind, section.id as usize) {
                (SECTION_TABLE, place) => {
                    let table = self.tables.iter_mut().find(|(i, _)| *i == place);
                    match table.filter(|(_, t)| t.len() == section.words as usize) {
                        Some((_, table)) => table,
                        None if !flash.drives.is_one() => {
                            reader.read_used(|_, _| {}).map_err(|e| e.to_string())?;
                            continue;
                        }
                        None => return Err("the checkpoint is of another configuration".to_owned()),
                    }
                }
                (SECTION_INDEX, i) if i < self.indexes.len() => &mut self.indexes[i],
                (SECTION_APPS, i) if i < self.apps.len() => &mut self.apps[i],
                _ => return Err("the checkpoint is of another configuration".to_owned()),
            };
            let (words, whole) = (section.words as usize, section.kind != SECTION_INDEX);
            if whole && words != target.len() || !target.supply(words) {
                return Err("the checkpoint is of another configuration".to_owned());
            }
            reader
                .read_used(|at, word| target.store(at as usize, word))
                .map_err(|e| e.to_string())?;
            if !whole && !FlashIndex::began_with(target, buckets) {
                return Err("the checkpoint is of another configuration".to_owned());
            }
            seen += usize::from(!is_table);
            progress.step();
        }
        if seen != sections {
            return Err("the checkpoint is not whole".to_owned());
        }
        Ok(UnixSecs(reader.written().min(u64::from(u32::MAX)) as u32))
    }

    /// Gives up the parts for the engine to own; the rest must be kept as long as they are in use.
    pub(super) fn split(&mut self) -> (Vec<(usize, Words)>, Vec<ShardWords>) {
        let indexes = std::mem::take(&mut self.indexes).into_iter();
        let shards = indexes.zip(std::mem::take(&mut self.apps));
        (
            std::mem::take(&mut self.tables),
            shards.map(|(index, apps)| ShardWords { index, apps }).collect(),
        )
    }
}

fn identity(superblock: &Superblock, geometry: Geometry) -> Identity {
    let Superblock { uuid, epoch, run, .. } = *superblock;
    Identity { uuid, epoch, run, geometry }
}

/// What a checkpoint of several drives names as its geometry, whichever those are: the smallest with segments of their size.
fn any_of(flash: &FlashGeometry) -> Result<Geometry, String> {
    let segment = u64::from(flash.segment_bytes);
    let bytes = SEGMENTS_AT + u64::from(MIN_SEGMENTS) * segment;
    Geometry::with_segment(bytes, segment).map_err(|e| e.to_string())
}

/// What outlives the process of one shard.
pub(super) struct ShardWords {
    pub(super) index: Words,
    /// Bytes on flash by application.
    pub(super) apps: Words,
}

/// A file that ends with an error when there is no time for it any more.
pub(super) struct Watched<'a, F> {
    pub(super) file: F,
    pub(super) hurry: &'a AtomicBool,
}

impl<F> Watched<'_, F> {
    fn look(&self) -> std::io::Result<()> {
        if self.hurry.load(Ordering::Relaxed) {
            return Err(std::io::Error::other("it was asked to end at once"));
        }
        Ok(())
    }
}

impl<F: Read> Read for Watched<'_, F> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        self.look()?;
        self.file.read(out)
    }
}

impl<F: Write> Write for Watched<'_, F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.look()?;
        self.file.write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

/// How far something is that may take long: a line in the log every few seconds.
pub(super) struct Progress {
    what: &'static str,
    steps: usize,
    done: usize,
    said: Instant,
}

impl Progress {
    const EVERY: Duration = Duration::from_secs(2);

    pub(super) fn new(what: &'static str, steps: usize) -> Progress {
        Progress { what, steps, done: 0, said: Instant::now() }
    }

    fn step(&mut self) {
        self.reach(self.done + 1);
    }

    /// So many steps are done.
    pub(super) fn reach(&mut self, done: usize) {
        self.done = done;
        if self.said.elapsed() >= Self::EVERY && self.done < self.steps {
            self.said = Instant::now();
            tracing::info!("{}: {} %", self.what, self.done * 100 / self.steps);
        }
    }
}

/// A checkpoint that is being written.
pub(super) struct Writing<'a> {
    /// When.
    pub(super) at: UnixSecs,
    /// Ends it before its end.
    pub(super) hurry: &'a AtomicBool,
    /// Bytes that were written, whatever came of it.
    pub(super) bytes: u64,
}

/// Writes a checkpoint of a stopped store, of what is used of it.
pub(super) fn write_checkpoint(
    dir: &DataDir,
    superblock: &Superblock,
    flash: &FlashGeometry,
    writing: &mut Writing<'_>,
    tables: &[(usize, &Words)],
    indexes: &[&FlashIndex],
    apps: &[Vec<u64>],
) -> Result<(), larder_runtime::DataDirError> {
    let geometry = match flash.drives.is_one() {
        true => superblock.geometry,
        // (The segments' size is that of drives that are in use.)
        false => any_of(flash).unwrap_or(superblock.geometry),
    };
    let identity = identity(superblock, geometry);
    let write = |file: &mut File| {
        let out = BufWriter::with_capacity(1 << 20, Watched { file, hurry: writing.hurry });
        let mut progress = Progress::new("writing the checkpoint", indexes.len());
        let mut writer = CheckpointWriter::create(out, &identity, u64::from(writing.at.0))?;
        let words = |w: &Words| (0..w.len()).map(|i| w.load(i)).collect::<Vec<u64>>();
        for (place, table) in tables {
            writer.section(SECTION_TABLE, *place as u32, table.len() as u64, words(table))?;
        }
        for (i, index) in indexes.iter().enumerate() {
            writer.section(SECTION_INDEX, i as u32, index.used_words() as u64, index.used())?;
            progress.step();
        }
        for (i, bytes) in apps.iter().enumerate() {
            writer.section(SECTION_APPS, i as u32, bytes.len() as u64, bytes.iter().copied())?;
        }
        writer.finish()?.flush()
    };
    dir.replace_with(CHECKPOINT, |file| {
        let written = write(file);
        writing.bytes = file.metadata().map_or(0, |m| m.len());
        written
    })
}

/// Removes a checkpoint that no start may use any more.
pub(super) fn remove_checkpoint(dir: &DataDir) -> Result<(), larder_runtime::DataDirError> {
    dir.remove(CHECKPOINT)
}
