//! One stream as it is recorded, and as it is read again.

use larder_base::Nanos;

use super::digest::{Answers, Digest};
use larder_format::recording::bytes::{put, unzigzag, zigzag};
use larder_format::recording::{BadRecord, Chunk, ChunkSink, Cursor, MAX_PAYLOAD};

/// A chunk is handed on when it has this many bytes.
const CHUNK: usize = 48 << 10;

/// One stream as it is recorded. It holds up to a chunk of 48 KiB.
pub struct BlockTape {
    stream: u16,
    first: u64,
    records: u32,
    buffer: Vec<u8>,
    last: u64,
    sink: Box<dyn ChunkSink>,
}

impl BlockTape {
    /// An empty stream.
    pub fn new(stream: u16, sink: Box<dyn ChunkSink>) -> BlockTape {
        BlockTape { stream, first: 0, records: 0, buffer: Vec::new(), last: 0, sink }
    }

    /// Appends a record. `false` when recording has ended: the tape is of no more use.
    #[must_use]
    pub(super) fn push(
        &mut self,
        tag: u8,
        now: Nanos,
        fields: impl FnOnce(&mut Vec<u8>),
        answers: &Answers,
        digest: Digest,
    ) -> bool {
        // What is told without a time happens when the last thing did.
        let now = if now == Nanos::ZERO { self.last } else { now.0 };
        self.buffer.push(tag);
        put(&mut self.buffer, zigzag(now.wrapping_sub(self.last) as i64));
        fields(&mut self.buffer);
        put(&mut self.buffer, answers.count);
        self.buffer.extend_from_slice(&answers.bits);
        self.buffer.extend_from_slice(&digest.finish().to_le_bytes());
        self.last = now;
        self.records += 1;
        if self.buffer.len() >= CHUNK { self.hand_on() } else { true }
    }

    /// Hands on what there is. `false` when recording has ended.
    ///
    /// What is longer than a chunk may be, because a record is, goes in parts of about the same length: the last says how many
    /// records there are, and those before it that there are none.
    #[must_use]
    pub fn hand_on(&mut self) -> bool {
        if self.records == 0 {
            return self.sink.is_open();
        }
        let mut payload = std::mem::take(&mut self.buffer);
        let parts = payload.len().div_ceil(MAX_PAYLOAD);
        let part = payload.len().div_ceil(parts);
        let (stream, first) = (self.stream, self.first);
        while payload.len() > part {
            let rest = payload.split_off(part);
            let payload = std::mem::replace(&mut payload, rest);
            if !self.sink.put(Chunk { stream, first, records: 0, payload }) {
                return false;
            }
        }
        let chunk = Chunk { stream, first, records: self.records, payload };
        self.first += u64::from(self.records);
        (self.records, self.last) = (0, 0);
        self.sink.put(chunk)
    }
}

/// What a record was decided to, then and now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Again {
    /// Monotonic nanoseconds of the input, as recorded.
    pub nanos: u64,
    /// What was told.
    pub input: String,
    /// Digest of what was decided when it was recorded.
    pub recorded: u32,
    /// Digest of what is decided now.
    pub replayed: u32,
}

/// What a replay of one record came to.
pub type Replayed = Result<Again, BadRecord>;

/// The records of one chunk, or of several that are parts of one another, from front to back.
pub struct StreamReader<'a> {
    pub(super) cursor: Cursor<'a>,
    last: u64,
}

/// A record's beginning.
pub(super) struct Begun {
    pub tag: u8,
    pub now: Nanos,
}

/// A record's end.
pub(super) struct Ended {
    pub answers: Answers,
    pub digest: u32,
}

impl<'a> StreamReader<'a> {
    /// At the start of a chunk's payload, which begins with that of the chunks before it that say that they have no records.
    pub fn new(payload: &'a [u8]) -> StreamReader<'a> {
        StreamReader { cursor: Cursor::new(payload), last: 0 }
    }

    /// How far it has come.
    pub fn position(&self) -> usize {
        self.cursor.position()
    }

    pub(super) fn begin(&mut self) -> Result<Begun, BadRecord> {
        let tag = self.cursor.u8("kind")?;
        let since = unzigzag(self.cursor.varint("time")?);
        self.last = self.last.wrapping_add(since as u64);
        Ok(Begun { tag, now: Nanos(self.last) })
    }

    pub(super) fn end(&mut self) -> Result<Ended, BadRecord> {
        // As many as there are bits.
        let count = self.cursor.at_most(8 * self.cursor.left() as u64, "number of answers")?;
        let bits = self.cursor.take(count.div_ceil(8) as usize, "answers")?.to_vec();
        let digest = self.cursor.u32_le("digest")?;
        Ok(Ended { answers: Answers { count, bits }, digest })
    }
}

/// Neither a request nor anything else that is recorded.
pub(super) fn unknown(tag: u8) -> BadRecord {
    BadRecord::Value {
        what: "the kind of a record",
        value: tag.into(),
        must: "one that is written",
    }
}
