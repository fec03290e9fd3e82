//! Streams of the machines beside shards and log ([maintenance](crate::kv::node::Maintenance), the names of applications): what each
//! was told, what was answered to its questions, and a digest of what it asked for and decided. Each replays alone.
//!
//! ```text
//! record  u8 kind, zigzag nanoseconds and zigzag seconds since the last record of the chunk; what was told;
//!         varint number of answers, each a varint; u32 digest
//! ```

use larder_base::{Nanos, Now, UnixSecs};
use larder_format::recording::bytes::{BadRecord, Cursor, put, unzigzag, zigzag};
use larder_format::recording::{ChunkSink, MAX_PAYLOAD};

use super::decision::mix;
use crate::record::Gathered;

/// A chunk is handed on when it has this many bytes.
const CHUNK: usize = 16 << 10;
/// Most answers in one record: a look for samples asks every shard for those of every shard.
const MOST_ANSWERS: usize = 80 << 10;
const _: () = assert!(CHUNK + MOST_ANSWERS + 4096 <= MAX_PAYLOAD);
/// No run is longer: so that no sum of times overflows, whatever a file says.
const LONGEST: u64 = 1 << 62;

/// What a machine has heard in answer to its questions, and a digest of what it asked for.
#[derive(Clone, Debug, Default)]
pub(in crate::kv) struct Heard {
    answers: Vec<u64>,
    digest: u64,
}

impl Heard {
    /// It has asked for this, or decided it.
    pub(in crate::kv) fn note(&mut self, what: u64, numbers: &[u64]) {
        self.digest = numbers.iter().fold(mix(self.digest, what), |h, &n| mix(h, n));
    }

    /// It was answered.
    pub(in crate::kv) fn answer(&mut self, answer: u64) {
        self.answers.push(answer);
    }

    /// The digest.
    pub(in crate::kv) fn digest(&self) -> u32 {
        let h = mix(self.digest, 0);
        (h >> 32) as u32 ^ h as u32
    }
}

/// One such stream as it is recorded. It holds up to a chunk of 16 KiB.
pub struct MachineTape {
    gathered: Gathered,
    last: Now,
}

impl MachineTape {
    /// An empty stream.
    pub fn new(stream: u16, sink: Box<dyn ChunkSink>) -> MachineTape {
        MachineTape { gathered: Gathered::new(stream, CHUNK, sink), last: Now::default() }
    }

    /// Records so far.
    pub fn records(&self) -> u64 {
        self.gathered.records()
    }

    /// Appends a record. `false` when recording has ended: the tape is of no more use.
    #[must_use]
    pub(in crate::kv) fn push(
        &mut self,
        kind: u8,
        now: Now,
        told: impl FnOnce(&mut Vec<u8>),
        heard: &Heard,
    ) -> bool {
        // What is told without a time happens when the last thing did.
        let now = if now == Now::default() { self.last } else { now };
        let buffer = self.gathered.buffer();
        buffer.push(kind);
        put(buffer, zigzag(now.mono.0.wrapping_sub(self.last.mono.0) as i64));
        put(buffer, zigzag(i64::from(now.wall.0) - i64::from(self.last.wall.0)));
        told(buffer);
        put(buffer, heard.answers.len() as u64);
        heard.answers.iter().for_each(|&answer| put(buffer, answer));
        buffer.extend_from_slice(&heard.digest().to_le_bytes());
        self.last = now;
        if self.gathered.end_record() { self.flush_chunk() } else { true }
    }

    /// Hands on what there is. `false` when recording has ended.
    #[must_use]
    pub fn flush_chunk(&mut self) -> bool {
        self.last = Now::default();
        self.gathered.flush_chunk()
    }
}

/// The records of one chunk of such a stream, from front to back.
pub struct MachineReader<'a> {
    pub(in crate::kv) cursor: Cursor<'a>,
    last: Now,
}

/// The end of a record.
pub(in crate::kv) struct Ended {
    pub(in crate::kv) answers: Vec<u64>,
    pub(in crate::kv) digest: u32,
}

impl<'a> MachineReader<'a> {
    /// At the start of a chunk's payload.
    pub fn new(payload: &'a [u8]) -> MachineReader<'a> {
        MachineReader { cursor: Cursor::new(payload), last: Now::default() }
    }

    /// How far it has come.
    pub fn position(&self) -> usize {
        self.cursor.position()
    }

    /// Kind and time of the next record.
    pub(in crate::kv) fn begin(&mut self) -> Result<(u8, Now), BadRecord> {
        let kind = self.cursor.u8("kind")?;
        let mono = unzigzag(self.cursor.varint("time")?);
        let mono = self.last.mono.0.wrapping_add(mono as u64);
        if mono > LONGEST {
            let (what, must) = ("the time of a record", "less than a hundred years");
            return Err(BadRecord::Value { what, value: mono, must });
        }
        let wall = unzigzag(self.cursor.varint("wall time")?);
        let wall = i64::from(self.last.wall.0).wrapping_add(wall);
        let seconds = u32::try_from(wall).map_err(|_| BadRecord::Value {
            what: "the wall time of a record",
            value: wall as u64,
            must: "at most 2^32 - 1 seconds",
        })?;
        self.last = Now { mono: Nanos(mono), wall: UnixSecs(seconds) };
        Ok((kind, self.last))
    }

    /// Answers and digest, behind what was told.
    pub(in crate::kv) fn end(&mut self) -> Result<Ended, BadRecord> {
        let left = self.cursor.left().min(MOST_ANSWERS) as u64;
        let count = self.cursor.at_most(left, "number of answers")?;
        let answers = (0..count).map(|_| self.cursor.varint("answer")).collect::<Result<_, _>>()?;
        Ok(Ended { answers, digest: self.cursor.u32_le("digest")? })
    }
}

/// A kind of record that nothing writes.
pub(in crate::kv) fn unknown(kind: u8) -> BadRecord {
    let (what, must) = ("the kind of a record", "one that is written");
    BadRecord::Value { what, value: kind.into(), must }
}
