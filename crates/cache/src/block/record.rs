//! `--record`: what shards, log, maintenance, queues and admission were told and decided, in a file.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use larder_engine::block::BlockConfig;
use larder_engine::block::node;
use larder_engine::block::node::looks::Looks as _;
use larder_engine::block::node::quiet::QUIET;
use larder_engine::block::record::{
    Arrival, BlockRunSetup, BlockTape, SharedTape, VolumeSetup, VolumesTape,
};
use larder_engine::block::volumes::{CannotCome, CannotGrow, Coming, Growth, TakenUp};
use larder_format::block::BlockSuperblock;
use larder_format::recording::END_STREAM;
use larder_runtime::record::{RecordConfig, RecordError, RecordFile, RecordStats, Recorder};

use super::open::{CacheConfig, CacheError};
use super::{Attached, Core, locked};

/// A recording under way.
pub(super) struct Recording {
    recorder: Recorder,
    /// Volumes of the beginning, in the order of their streams.
    volumes: Vec<String>,
    /// That of the first of these.
    first_admission: usize,
    /// What happens to volumes.
    changes: Mutex<VolumesTape>,
    /// Maintenance's tape.
    maintenance: SharedTape,
    /// The tapes of the workers' queues, and of that of who prefetches.
    queues: Vec<SharedTape>,
    /// The stream of the next volume that comes.
    next: AtomicUsize,
    /// Seed of admission's hashes.
    seed: u64,
}

/// A record that is to begin: its file is there, and it can be written.
pub(super) struct Prepared {
    file: RecordFile,
    block: BlockConfig,
}

impl Prepared {
    /// Creates the file. What a replay builds on is complete when the run has begun: `superblock` is as it will be but for that.
    ///
    /// # Errors
    /// When there cannot be such a record.
    pub(super) fn new(
        record: &RecordConfig,
        superblock: &BlockSuperblock,
        block: BlockConfig,
        config: &CacheConfig,
        attached: &BTreeMap<String, Arc<Attached>>,
    ) -> Result<Prepared, CacheError> {
        let path = record.file.display().to_string();
        begun_with(&path, superblock, &block, config, attached)?;
        let file = RecordFile::create(record).map_err(|e| refused(&path, e))?;
        Ok(Prepared { file, block })
    }
}

fn refused(path: &str, error: RecordError) -> CacheError {
    match error {
        RecordError::File { why, .. } => CacheError::Record { path: path.to_owned(), reason: why },
        RecordError::Thread(e) => CacheError::System { what: "a thread", reason: e.to_string() },
    }
}

/// What a replay builds on, and how many streams there are.
fn begun_with(
    path: &str,
    superblock: &BlockSuperblock,
    block: &BlockConfig,
    config: &CacheConfig,
    attached: &BTreeMap<String, Arc<Attached>>,
) -> Result<(BlockRunSetup, usize), CacheError> {
    let refused = |reason: String| CacheError::Record { path: path.to_owned(), reason };
    let volumes = attached
        .values()
        .map(|v| VolumeSetup { name: v.name.clone(), bytes: v.bytes(), seed: superblock.key })
        .collect();
    let (making, admission) = (config.making(), &config.admission);
    let queues = (config.workers + config.queues) as u32 + 1;
    let setup = BlockRunSetup::new(superblock, block, making, QUIET, admission, volumes, queues);
    // A replay builds on what is read back: it must be the same.
    setup.validate().map_err(|e| refused(e.to_string()))?;
    let streams = setup.streams().map_err(|e| refused(e.to_string()))?;
    Ok((setup, streams))
}

impl Recording {
    /// Begins the file, with what a replay builds on: `superblock` is in force.
    pub(super) fn start(
        Prepared { file, block }: Prepared,
        superblock: &BlockSuperblock,
        config: &CacheConfig,
        attached: &BTreeMap<String, Arc<Attached>>,
    ) -> Result<Recording, CacheError> {
        let path = file.path().display().to_string();
        let (setup, streams) = begun_with(&path, superblock, &block, config, attached)?;
        let other = |reason: String| CacheError::Record { path: path.clone(), reason };
        let text = serde_json::to_vec(&setup).map_err(|e| other(e.to_string()))?;
        let recorder = file.start(&text, streams).map_err(|e| refused(&path, e))?;
        let first_admission = streams - attached.len();
        let changes = setup.volumes_stream().map_err(|e| other(e.to_string()))?;
        let mut recording = Recording {
            recorder,
            volumes: attached.keys().cloned().collect(),
            first_admission,
            changes: Mutex::new(VolumesTape::new(None)),
            maintenance: SharedTape::new(None),
            queues: Vec::new(),
            next: AtomicUsize::new(streams),
            seed: superblock.key,
        };
        recording.changes = Mutex::new(VolumesTape::new(recording.tape(changes)));
        recording.maintenance = SharedTape::new(recording.tape(changes - 1));
        let tapes = (changes + 1..first_admission).map(|s| SharedTape::new(recording.tape(s)));
        recording.queues = tapes.collect();
        Ok(recording)
    }

    fn tape(&self, stream: usize) -> Option<BlockTape> {
        Some(BlockTape::new(stream as u16, self.recorder.sink()?))
    }
}

impl Core {
    /// Every stream gets its tape, before anything runs.
    pub(super) fn begin_recording(&self, log: &mut node::StoredLog) {
        let Some(recording) = &self.recorder else { return };
        for shard in 0..self.layout.shards {
            if let Some(tape) = recording.tape(shard as usize) {
                self.record(shard, tape);
            }
        }
        if let Some(tape) = recording.tape(self.shards.len()) {
            log.record(tape);
        }
        for (number, name) in recording.volumes.iter().enumerate() {
            if let (Some(volume), Some(tape)) =
                (self.volume(name), recording.tape(recording.first_admission + number))
            {
                locked(&volume.admission).record(tape);
            }
        }
    }

    /// Maintenance's tape, where a record is written.
    pub(super) fn maintenance_tape(&self) -> Option<SharedTape> {
        self.recorder.as_ref().map(|recording| recording.maintenance.clone())
    }

    /// The tape of the queue of thread `me`, where a record is written.
    pub(super) fn queue_tape(&self, me: usize) -> Option<SharedTape> {
        self.recorder.as_ref().and_then(|recording| recording.queues.get(me).cloned())
    }

    /// Whether the record has a stream left for a volume that comes.
    ///
    /// # Errors
    /// When it has not.
    pub(super) fn may_be_recorded(&self, name: &str) -> Result<(), CacheError> {
        let full = |r: &Recording| r.next.load(Ordering::Relaxed) >= usize::from(END_STREAM);
        if !self.recorder.as_ref().is_some_and(full) {
            return Ok(());
        }
        let reason = format!(
            "the record has {END_STREAM} streams already: start the cache anew, with another file"
        );
        Err(CacheError::Volume { name: name.to_owned(), reason })
    }

    /// A volume came, or was refused. What is asked of its admission is recorded from now on.
    pub(super) fn record_arrival(
        &self,
        coming: &Coming,
        outcome: &Result<TakenUp, CannotCome>,
        attached: Option<&Attached>,
    ) {
        let Some(recording) = &self.recorder else { return };
        let (now, name) = (self.now(), coming.name.clone());
        let stream = attached.map(|_| recording.next.fetch_add(1, Ordering::Relaxed));
        let arrival = Arrival {
            name: name.clone(),
            bytes: coming.bytes,
            unchanged: coming.unchanged,
            share: attached.map_or((0, None), Attached::share),
            stream: stream.map(|s| s as u16),
        };
        locked(&recording.changes).came(now, &arrival, outcome);
        if let (Some(attached), Some(tape)) = (attached, stream.and_then(|s| recording.tape(s))) {
            let of = VolumeSetup { name, bytes: coming.bytes, seed: recording.seed };
            locked(&attached.admission).record_later(tape, now, &of);
        }
    }

    /// A volume grew, or was refused to.
    pub(super) fn record_growth(
        &self,
        name: &str,
        bytes: u64,
        outcome: &Result<Growth, CannotGrow>,
    ) {
        if let Some(recording) = &self.recorder {
            locked(&recording.changes).grew(self.now(), name, bytes, outcome);
        }
    }

    /// A volume was put aside: whether all of it was made durable, and what it keeps of the line space.
    pub(super) fn record_departure(&self, name: &str, durable: bool, stretch: Option<(u64, u64)>) {
        if let Some(recording) = &self.recorder {
            locked(&recording.changes).went(self.now(), name, durable, stretch);
        }
    }

    /// Hands on what is on the tapes of shards, queues, volumes and admission.
    pub(super) fn hand_on_tapes(&self) {
        if let Some(recording) = &self.recorder {
            locked(&recording.changes).flush_chunk();
            recording.queues.iter().for_each(SharedTape::flush_chunk);
        }
        (0..self.layout.shards).for_each(|shard| self.hand_on_tape(shard));
        self.volumes().iter().for_each(|v| locked(&v.admission).flush_chunk());
    }

    /// Ends recording: nothing is asked any more. The log's own tape has ended before.
    pub(super) fn end_recording(&self) {
        let Some(recording) = &self.recorder else { return };
        (0..self.layout.shards).for_each(|shard| self.end_tape(shard));
        locked(&recording.changes).end_recording();
        recording.maintenance.end_recording();
        recording.queues.iter().for_each(SharedTape::end_recording);
        self.volumes().iter().for_each(|v| locked(&v.admission).end_recording());
        recording.recorder.finish();
    }

    /// How recording goes, where it was asked for.
    pub fn record_stats(&self) -> Option<RecordStats> {
        self.recorder.as_ref().map(|r| r.recorder.stats())
    }
}
