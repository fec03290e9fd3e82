//! Records of the block cache: every stream on its own.

use std::io::{Read, Seek};

use larder_base::ByteSize;
use larder_engine::block::node::record::{ReplayedMaintenance, ReplayedQueue};
use larder_engine::block::record::{
    Again, BlockRunSetup, RecordedAdmission, RecordedLog, RecordedShard, Replayed, ReplayedVolumes,
    StreamReader, Whose, later_volume,
};
use larder_format::recording::{BadRecord, ChunkHeader, Ended};
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
    /// Threads that had a queue.
    pub queues: usize,
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
    Shard(Box<RecordedShard>),
    Log(Box<RecordedLog>),
    Maintenance(Box<ReplayedMaintenance>),
    Volumes(Box<ReplayedVolumes>),
    Queue(Box<ReplayedQueue>),
    Admission(Box<RecordedAdmission>),
    /// Of a volume that came later: its first record says what it is.
    Later(Box<BlockRunSetup>),
}

impl Player {
    fn new(setup: &BlockRunSetup, stream: usize) -> Result<Player, ReplayError> {
        Ok(match setup.whose(stream)? {
            Whose::Shard(shard) => Player::Shard(Box::new(setup.build_shard(shard)?)),
            Whose::Log => Player::Log(Box::new(setup.build_log()?)),
            Whose::Maintenance => Player::Maintenance(Box::new(ReplayedMaintenance::of(setup)?)),
            Whose::Volumes => Player::Volumes(Box::new(setup.build_volumes()?)),
            Whose::Queue(_) => Player::Queue(Box::new(ReplayedQueue::of(setup)?)),
            Whose::Admission(n) => Player::Admission(Box::new(setup.build_admission(n)?)),
            Whose::Later(_) => Player::Later(Box::new(setup.clone())),
        })
    }

    fn replay(&mut self, reader: &mut StreamReader<'_>) -> Replayed {
        match self {
            Player::Shard(shard) => shard.replay(reader),
            Player::Log(log) => log.replay(reader),
            Player::Maintenance(machine) => machine.replay(reader),
            Player::Volumes(volumes) => volumes.replay(reader),
            Player::Queue(queue) => queue.replay(reader),
            Player::Admission(admission) => admission.replay(reader),
            Player::Later(setup) => {
                let (made, again) = RecordedAdmission::replay_later(setup, reader)?;
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
    let mut logical = Logical::default();
    let found = logical.next(file, stream)?;
    // What makes no sense is said when it is replayed.
    let volume = found.and_then(|_| later_volume(&mut StreamReader::new(&logical.payload)).ok());
    let attachment = number + 1;
    Ok(volume
        .map_or(name, |v| format!("admission of volume '{}' (attachment {attachment})", v.name)))
}

/// The chunks of a stream from front to back, with the parts of what is longer than a chunk put together.
#[derive(Default)]
struct Logical {
    /// The next chunk.
    index: usize,
    payload: Vec<u8>,
    /// Where in the file each part's chunk begins, and where in the payload the part does.
    parts: Vec<(u64, usize)>,
}

impl Logical {
    /// The next whole: where its last part's chunk begins, and that one's header, which counts the records.
    fn next<R: Read + Seek>(
        &mut self,
        file: &mut RecordFile<R, BlockRunSetup>,
        stream: usize,
    ) -> Result<Option<(u64, ChunkHeader)>, ReplayError> {
        (self.payload, self.parts) = Default::default();
        let mut part = Vec::new();
        while let Some((offset, header)) = file.chunk(stream, self.index, &mut part)? {
            self.index += 1;
            self.parts.push((offset, self.payload.len()));
            self.payload.append(&mut part);
            if header.records > 0 {
                return Ok(Some((offset, header)));
            }
        }
        // Of one whose last part is not there recording had ended before it was whole.
        Ok(None)
    }

    /// The chunk in which byte `end - 1` of the payload is: where it begins, its own payload, and `end` in that.
    fn part_with(&self, end: usize) -> Option<(u64, usize, Vec<u8>)> {
        let at = self.parts.partition_point(|&(_, start)| start < end).checked_sub(1)?;
        let (offset, start) = self.parts[at];
        let next = self.parts.get(at + 1).map_or(self.payload.len(), |&(_, start)| start);
        Some((offset, end - start, self.payload[start..next].to_vec()))
    }
}

/// Visits every record of `stream` up to the first at which `each` says to stop: its number, the chunks that it is in, where
/// in their payload it ends, and what was decided.
fn visit<R: Read + Seek>(
    file: &mut RecordFile<R, BlockRunSetup>,
    stream: usize,
    mut each: impl FnMut(u64, &Logical, usize, Again) -> bool,
) -> Result<(), ReplayError> {
    let mut player = Player::new(file.setup(), stream)?;
    let name = name_of(file, stream)?;
    let mut logical = Logical::default();
    while let Some((offset, header)) = logical.next(file, stream)? {
        let mut reader = StreamReader::new(&logical.payload);
        for number in (header.first..).take(header.records as usize) {
            let bad = |source: BadRecord| ReplayError::Record {
                stream: name.clone(),
                number,
                offset,
                source,
            };
            let again = player.replay(&mut reader).map_err(bad)?;
            if !each(number, &logical, reader.position(), again) {
                return Ok(());
            }
        }
        if reader.position() != logical.payload.len() {
            let left = logical.payload.len() - reader.position();
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
    let (mut changes, mut later, mut queues) = (0, 0, 0);
    for stream in shards..file.streams() {
        match setup.whose(stream)? {
            Whose::Volumes => changes = file.records_of(stream),
            Whose::Later(_) => later += 1,
            Whose::Queue(_) => queues += usize::from(file.records_of(stream) > 0),
            _ => {}
        }
    }
    let mut report = BlockReport {
        larder: setup.larder.clone(),
        shards,
        queues,
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
        visit(file, stream, |record, _, _, again| {
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
    visit(file, stream, |record, chunks, end, _| {
        if record == number {
            found = chunks.part_with(end);
        }
        record < number
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::sync::{Arc, Mutex};

    use larder_base::{Nanos, UnixSecs};
    use larder_engine::block::map::Making;
    use larder_engine::block::record::BlockTape;
    use larder_engine::block::{
        BlockConfig, BlockLimits, IoFailed, LogIo, LogShards, LogStep, MapRecord, Regions, SlotId,
        TableChange, WriteMode,
    };
    use larder_format::Uuid;
    use larder_format::block::log::Held;
    use larder_format::block::{BlockSuperblock, Layout};
    use larder_format::recording::{Chunk, ChunkSink, MAX_PAYLOAD, end_chunk, file_header, seal};

    use super::*;
    use crate::replay::flip_block_decision;

    /// Takes so many chunks.
    #[derive(Clone)]
    struct Kept(Arc<Mutex<Vec<Chunk>>>, usize);

    impl ChunkSink for Kept {
        fn put(&mut self, chunk: Chunk) -> bool {
            let mut kept = self.0.lock().unwrap();
            let open = kept.len() < self.1;
            if open {
                kept.push(chunk);
            }
            open
        }

        fn is_open(&self) -> bool {
            self.0.lock().unwrap().len() < self.1
        }
    }

    /// Shards of which the first has a page and so many holes to be made.
    struct Holes(u32);

    impl LogShards for Holes {
        fn records_waiting(&mut self, shard: u32) -> usize {
            usize::from(shard == 0 && self.0 > 0)
        }
        fn take_records(&mut self, _: u32, _: usize, _: &mut Vec<MapRecord>) {}
        fn take_pages(&mut self, shard: u32, _: usize, out: &mut Vec<TableChange>) {
            if shard == 0 && self.0 > 0 {
                out.push(TableChange::Page { page: 0, slots: vec![None; 1008] });
            }
        }
        fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
            if shard == 0 {
                // None is the neighbour of another.
                out.extend((0..self.0).map(|i| (SlotId(3 * i), 1 + i % 2)));
            }
        }
        fn records_durable(&mut self, _: u32) {}
        fn records_lost(&mut self, _: u32) {}
        fn state(&mut self, _: u32, _: SlotId, _: u32, _: &mut Vec<Held>) {}
        fn quiet(&mut self, _: u32, _: u32) -> bool {
            true
        }
        fn intent_ready(&mut self, _: u32, _: u32) {}
        fn flush_backing(&mut self, _: u32) -> Result<(), IoFailed> {
            Ok(())
        }
    }

    /// A device that takes everything, but not every hole.
    #[derive(Default)]
    struct Device {
        holes: u32,
    }

    impl LogIo for Device {
        fn read(&mut self, _: u64, out: &mut [u8]) -> Result<(), IoFailed> {
            out.fill(0);
            Ok(())
        }
        fn write(&mut self, _: u64, _: &[u8]) -> Result<(), IoFailed> {
            Ok(())
        }
        fn flush(&mut self) -> Result<(), IoFailed> {
            Ok(())
        }
        fn punch(&mut self, _: u64, _: u64) -> Result<(), IoFailed> {
            self.holes += 1;
            if self.holes.is_multiple_of(5) { Err(IoFailed) } else { Ok(()) }
        }
    }

    fn setup() -> BlockRunSetup {
        let layout = Layout::sparse(1 << 30, 4096, 64 << 30, 8).unwrap();
        let sb = BlockSuperblock::format(Uuid([7; 16]), 1, 1, layout, UnixSecs(1));
        let config = BlockConfig {
            line_bytes: 4096,
            write: WriteMode::WriteThrough,
            limits: BlockLimits::default(),
            regions: Regions { groups: layout.region_groups, count: layout.regions },
        };
        let admission = "all".parse().unwrap();
        BlockRunSetup::new(&sb, &config, Making::default(), Nanos(1), &admission, Vec::new(), 1)
    }

    /// The log's chunks of a run in which batches of so many holes are made, up to `most` of them.
    fn chunks(batches: &[u32], most: usize) -> Vec<Chunk> {
        let kept = Kept(Arc::default(), most);
        let mut log = setup().build_log().unwrap();
        log.record(BlockTape::new(8, Box::new(kept.clone())));
        let mut device = Device::default();
        for (i, &holes) in (1..).zip(batches) {
            let step = log.step(Nanos::from_secs(i), &mut Holes(holes), &mut device);
            assert_eq!(step.unwrap(), LogStep::Worked);
        }
        log.end_recording();
        let chunks = std::mem::take(&mut *kept.0.lock().unwrap());
        assert!(chunks.iter().all(|c| c.payload.len() <= MAX_PAYLOAD));
        chunks
    }

    fn file(chunks: &[Chunk], ended: Ended) -> Vec<u8> {
        let setup = setup();
        let mut file = file_header(&serde_json::to_vec(&setup).unwrap()).unwrap();
        for c in chunks {
            file.extend_from_slice(&seal(c.stream, c.first, c.records, &c.payload));
            file.extend_from_slice(&c.payload);
        }
        let mut counts = vec![0; setup.streams().unwrap()];
        counts[8] = chunks.iter().map(|c| u64::from(c.records)).sum();
        file.extend_from_slice(&end_chunk(ended, &counts));
        file
    }

    fn replayed(file: &[u8]) -> BlockReport {
        let mut file = RecordFile::open(Cursor::new(file)).unwrap();
        replay_block(&mut file, 1 << 30, &mut |_| {}).unwrap()
    }

    /// What the log hears in one batch may be more than a chunk holds: it is in several, is decided again, and a change of
    /// it, or of a record beside it, is found where it is.
    #[test]
    fn a_record_that_is_longer_than_a_chunk_is_replayed() {
        let batches = [3, 40, 300_000, 5, 60_000, 2];
        let chunks = chunks(&batches, usize::MAX);
        let parts = chunks.iter().filter(|c| c.records == 0).count();
        assert!(parts >= 4, "{parts}");
        let file = file(&chunks, Ended::Stopped);
        let report = replayed(&file);
        assert_eq!(report.difference, None);
        assert!(report.complete);
        assert_eq!((report.records, report.compared), (6, 6));
        for at in 0..6 {
            let mut changed = Cursor::new(file.clone());
            assert!(flip_block_decision(&mut changed, 8, at).unwrap());
            let found = replayed(changed.get_ref()).difference.unwrap();
            assert_eq!((&found.stream[..], found.record), ("log", at));
        }
    }

    /// Recording ends in the midst of such a record: what is before it is replayed, and that it is not all is said.
    #[test]
    fn a_record_of_which_the_last_part_is_missing_is_left_out() {
        let chunks = chunks(&[3, 300_000, 3, 300_000, 1], 9);
        assert_eq!((chunks.len(), chunks.last().unwrap().records), (9, 0));
        let report = replayed(&file(&chunks, Ended::Limit));
        assert_eq!((report.difference, report.complete), (None, false));
        assert_eq!((report.records, report.compared), (2, 2));
    }
}
