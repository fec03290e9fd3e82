//! `--record`: what shards, log and admission were told and decided, in a file.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_engine::block::BlockConfig;
use larder_engine::block::record::{BlockRunSetup, BlockTape, TapedLog, VolumeSetup};
use larder_format::block::BlockSuperblock;
use larder_runtime::record::{RecordConfig, RecordError, RecordStats, Recorder};

use super::open::{CacheConfig, CacheError, QUIET};
use super::{Attached, Cache, locked};

/// A recording under way.
pub(super) struct Recording {
    recorder: Recorder,
    /// Volumes in the order of their streams.
    volumes: Vec<String>,
}

impl Recording {
    /// Creates the file, with what a replay builds on.
    pub(super) fn start(
        record: &RecordConfig,
        superblock: &BlockSuperblock,
        block: &BlockConfig,
        config: &CacheConfig,
        attached: &BTreeMap<String, Arc<Attached>>,
    ) -> Result<Recording, CacheError> {
        let path = record.file.display().to_string();
        let refused = |reason: String| CacheError::Record { path: path.clone(), reason };
        let volumes = attached
            .values()
            .map(|v| VolumeSetup { name: v.name.clone(), bytes: v.bytes(), seed: superblock.key })
            .collect();
        let (making, admission) = (config.making(), &config.admission);
        let setup = BlockRunSetup::new(superblock, block, making, QUIET, admission, volumes);
        // A replay builds on what is read back: it must be the same.
        setup.validate().map_err(|e| refused(e.to_string()))?;
        let text = serde_json::to_vec(&setup).map_err(|e| refused(e.to_string()))?;
        let streams = setup.streams().map_err(|e| refused(e.to_string()))?;
        let recorder = Recorder::start(record, &text, streams).map_err(|e| match e {
            RecordError::File { why, .. } => refused(why),
            RecordError::Thread(e) => {
                CacheError::System { what: "a thread", reason: e.to_string() }
            }
        })?;
        Ok(Recording { recorder, volumes: attached.keys().cloned().collect() })
    }

    fn tape(&self, stream: usize) -> Option<BlockTape> {
        Some(BlockTape::new(stream as u16, self.recorder.sink()?))
    }
}

impl Cache {
    /// Every stream gets its tape, before anything runs.
    pub(super) fn begin_recording(&self, log: &mut TapedLog) {
        let Some(recording) = &self.recorder else { return };
        for (stream, cell) in self.shards.iter().enumerate() {
            if let Some(tape) = recording.tape(stream) {
                locked(cell).shard.record(tape);
            }
        }
        if let Some(tape) = recording.tape(self.shards.len()) {
            log.record(tape);
        }
        for (number, name) in recording.volumes.iter().enumerate() {
            if let (Some(volume), Some(tape)) =
                (self.volume(name), recording.tape(self.shards.len() + 1 + number))
            {
                locked(&volume.admission).record(tape);
            }
        }
    }

    /// Hands on what is on the tapes of shards and admission.
    pub(super) fn hand_on_tapes(&self) {
        self.shards.iter().for_each(|cell| locked(cell).shard.hand_on());
        self.volumes().iter().for_each(|v| locked(&v.admission).hand_on());
    }

    /// Ends recording: nothing is asked any more. The log's own tape has ended before.
    pub(super) fn end_recording(&self) {
        let Some(recording) = &self.recorder else { return };
        self.shards.iter().for_each(|cell| locked(cell).shard.end_recording());
        self.volumes().iter().for_each(|v| locked(&v.admission).end_recording());
        recording.recorder.finish();
    }

    /// How recording goes, where it was asked for.
    pub fn record_stats(&self) -> Option<RecordStats> {
        self.recorder.as_ref().map(|r| r.recorder.stats())
    }
}
