//! Records of the block cache: every stream on its own.

use std::io::{Read, Seek};

use larder_base::ByteSize;
use larder_engine::block::record::{
    Again, BlockRunSetup, Replayed, ReplayedVolumes, StreamReader, TapedAdmission, TapedLog,
    TapedShard, Whose, later_volume,
};
use larder_engine::kv::record::{BadRecord, Ended};
use serde::Serialize;

use super::reader::Setup;
use super::run::Difference;
use super::{RecordFile, ReplayError};

/// Records between two calls of the watcher.
const WATCH_EVERY: u64 = 8192;

impl Setup for BlockRunSetup {
    fn check(&self) -> Result<(), ReplayError> {
        Ok(self.validate()?)
    }

    fn streams(&self) -> usize {
        // It was checked before it is asked.
        BlockRunSetup::streams(self).unwrap_or(0)
    }

    fn most_streams(&self) -> usize {
        BlockRunSetup::most_streams(self).unwrap_or(0)
    }

    fn name(&self, stream: usize) -> String {
        BlockRunSetup::name(self, stream)
    }
}

/// What a replay came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockReport {
    /// Version of the larder that recorded.
    pub larder: String,
    /// Shards.
    pub shards: usize,
    /// Volumes whose admission was recorded: one that came back counts again.
    pub volumes: usize,
    /// Times that a volume came, grew or went, or that this was refused.
    pub changes: u64,
    /// Records in the file.
    pub records: u64,
    /// Of these, compared.
    pub compared: u64,
    /// By stream: what it is called, and its records.
    pub streams: Vec<(String, u64)>,
    /// Why recording ended; `None` when the file was cut short.
    pub ended: Option<&'static str>,
    /// Recording went on to the end of the run.
    pub complete: bool,
    /// The first decision that differs, of the first stream that has one.
    pub difference: Option<Difference>,
}

/// What a stream is told.
enum Player {
    Shard(Box<TapedShard>),
    Log(Box<TapedLog>),
    Volumes(Box<ReplayedVolumes>),
    Admission(Box<TapedAdmission>),
    /// Of a volume that came later: its first record says what it is.
    Later(Box<BlockRunSetup>),
}

impl Player {
    fn new(setup: &BlockRunSetup, stream: usize) -> Result<Player, ReplayError> {
        Ok(match setup.whose(stream)? {
            Whose::Shard(shard) => Player::Shard(Box::new(setup.build_shard(shard)?)),
            Whose::Log => Player::Log(Box::new(setup.build_log()?)),
            Whose::Volumes => Player::Volumes(Box::new(setup.build_volumes()?)),
            Whose::Admission(n) => Player::Admission(Box::new(setup.build_admission(n)?)),
            Whose::Later(_) => Player::Later(Box::new(setup.clone())),
        })
    }

    fn replay(&mut self, reader: &mut StreamReader<'_>) -> Replayed {
        match self {
            Player::Shard(shard) => shard.replay(reader),
            Player::Log(log) => log.replay(reader),
            Player::Volumes(volumes) => volumes.replay(reader),
            Player::Admission(admission) => admission.replay(reader),
            Player::Later(setup) => {
                let (made, again) = TapedAdmission::replay_later(setup, reader)?;
                *self = Player::Admission(Box::new(made));
                Ok(again)
            }
        }
    }
}

/// What a stream is called: one that began later says itself whose it is.
fn name_of<R: Read + Seek>(
    file: &mut RecordFile<R, BlockRunSetup>,
    stream: usize,
) -> Result<String, ReplayError> {
    let name = file.name(stream);
    let Whose::Later(number) = file.setup().whose(stream)? else { return Ok(name) };
    let mut payload = Vec::new();
    let found = file.chunk(stream, 0, &mut payload)?;
    // What makes no sense is said when it is replayed.
    let volume = found.and_then(|_| later_volume(&mut StreamReader::new(&payload)).ok());
    let attachment = number + 1;
    Ok(volume
        .map_or(name, |v| format!("admission of volume '{}' (attachment {attachment})", v.name)))
}

/// Visits every record of `stream` up to the first at which `each` says to stop: its number, where its chunk begins, where
/// in the payload it ends, and what was decided.
fn visit<R: Read + Seek>(
    file: &mut RecordFile<R, BlockRunSetup>,
    stream: usize,
    mut each: impl FnMut(u64, u64, usize, &[u8], Again) -> bool,
) -> Result<(), ReplayError> {
    let mut player = Player::new(file.setup(), stream)?;
    let name = name_of(file, stream)?;
    let mut payload = Vec::new();
    let mut index = 0;
    while let Some((offset, header)) = file.chunk(stream, index, &mut payload)? {
        index += 1;
        let mut reader = StreamReader::new(&payload);
        for number in (header.first..).take(header.records as usize) {
            let bad = |source: BadRecord| ReplayError::Record {
                stream: name.clone(),
                number,
                offset,
                source,
            };
            let again = player.replay(&mut reader).map_err(bad)?;
            if !each(number, offset, reader.position(), &payload, again) {
                return Ok(());
            }
        }
        if reader.position() != payload.len() {
            let left = payload.len() - reader.position();
            let what = format!("{left} bytes follow the last record of the chunk");
            return Err(ReplayError::Order { offset, what });
        }
    }
    Ok(())
}

/// Replays a record of the block cache, stream by stream. `memory` is what the maps may take; `watch` is told, now and
/// then, how many records are done.
///
/// # Errors
/// A file that cannot be read or makes no sense, with the place; too little memory. A decision that differs is no error but
/// [`BlockReport::difference`].
pub fn replay_block<R: Read + Seek>(
    file: &mut RecordFile<R, BlockRunSetup>,
    memory: u64,
    watch: &mut dyn FnMut(u64),
) -> Result<BlockReport, ReplayError> {
    let setup = file.setup().clone();
    // One shard at a time.
    let shards = setup.shards()?;
    let need = setup.memory_bytes()? / shards.max(1) as u64;
    if need > memory {
        return Err(ReplayError::Memory { need: ByteSize(need), limit: ByteSize(memory) });
    }
    let streams = (0..file.streams())
        .map(|s| Ok((name_of(file, s)?, file.records_of(s))))
        .collect::<Result<Vec<_>, ReplayError>>()?;
    let (mut changes, mut later) = (0, 0);
    for stream in shards..file.streams() {
        match setup.whose(stream)? {
            Whose::Volumes => changes = file.records_of(stream),
            Whose::Later(_) => later += 1,
            _ => {}
        }
    }
    let mut report = BlockReport {
        larder: setup.larder.clone(),
        shards,
        volumes: setup.volumes.len() + later,
        changes,
        records: file.records(),
        compared: 0,
        streams,
        ended: file.ended().map(Ended::as_str),
        complete: file.ended() == Some(Ended::Stopped),
        difference: None,
    };
    for stream in 0..file.streams() {
        let name = report.streams[stream].0.clone();
        let (compared, difference) = (&mut report.compared, &mut report.difference);
        visit(file, stream, |record, _, _, _, again| {
            *compared += 1;
            if compared.is_multiple_of(WATCH_EVERY) {
                watch(*compared);
            }
            if again.recorded == again.replayed {
                return true;
            }
            *difference = Some(Difference {
                stream: name.clone(),
                record,
                nanos: again.nanos,
                input: again.input,
                recorded: format!("digest {:08x}", again.recorded),
                replayed: format!("digest {:08x}", again.replayed),
            });
            false
        })?;
        if report.difference.is_some() {
            break;
        }
    }
    Ok(report)
}

/// Where the record `number` of `stream` is: its chunk, and the end of the record in the chunk's payload.
pub(super) fn find<R: Read + Seek>(
    file: &mut RecordFile<R, BlockRunSetup>,
    stream: usize,
    number: u64,
) -> Result<Option<(u64, usize, Vec<u8>)>, ReplayError> {
    let mut found = None;
    visit(file, stream, |record, offset, end, payload, _| {
        if record == number {
            found = Some((offset, end, payload.to_vec()));
        }
        record < number
    })?;
    Ok(found)
}
