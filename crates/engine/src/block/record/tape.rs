//! One stream as it is recorded, and as it is read again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_base::Nanos;

use super::digest::{Answers, Digest};
use crate::record::Gathered;
pub use crate::record::{Again, Replayed};
use larder_format::recording::bytes::{put, unzigzag, zigzag};
use larder_format::recording::{BadRecord, ChunkSink, Cursor};

/// A chunk is handed on when it has this many bytes.
const CHUNK: usize = 48 << 10;

/// One stream as it is recorded. It holds up to a chunk of 48 KiB.
pub struct BlockTape {
    gathered: Gathered,
    /// The time of the last record in the chunk.
    last: u64,
}

impl BlockTape {
    /// An empty stream.
    pub fn new(stream: u16, sink: Box<dyn ChunkSink>) -> BlockTape {
        BlockTape { gathered: Gathered::new(stream, CHUNK, sink), last: 0 }
    }

    /// Appends a record. `false` when recording has ended: the tape is of no more use.
    #[must_use]
    pub(in crate::block) fn push(
        &mut self,
        tag: u8,
        now: Nanos,
        fields: impl FnOnce(&mut Vec<u8>),
        answers: &Answers,
        digest: Digest,
    ) -> bool {
        // What is told without a time happens when the last thing did.
        let now = if now == Nanos::ZERO { self.last } else { now.0 };
        let buffer = self.gathered.buffer();
        buffer.push(tag);
        put(buffer, zigzag(now.wrapping_sub(self.last) as i64));
        fields(buffer);
        put(buffer, answers.count);
        buffer.extend_from_slice(&answers.bits);
        buffer.extend_from_slice(&digest.finish().to_le_bytes());
        self.last = now;
        if self.gathered.end_record() { self.flush_chunk() } else { true }
    }

    /// Hands on what there is. `false` when recording has ended.
    #[must_use]
    pub fn flush_chunk(&mut self) -> bool {
        self.last = 0;
        self.gathered.flush_chunk()
    }
}

/// A tape that is handed on, and ended, by others than those who record on it.
#[derive(Clone)]
pub struct SharedTape(Arc<Mutex<Option<BlockTape>>>);

impl SharedTape {
    /// This tape; without one nothing is recorded.
    pub fn new(tape: Option<BlockTape>) -> SharedTape {
        SharedTape(Arc::new(Mutex::new(tape)))
    }

    /// No record is left half written by a thread that panicked.
    fn tape(&self) -> MutexGuard<'_, Option<BlockTape>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `false` when recording has ended.
    #[must_use]
    pub(in crate::block) fn push(&self, f: impl FnOnce(&mut BlockTape) -> bool) -> bool {
        let mut tape = self.tape();
        let open = tape.as_mut().is_some_and(f);
        if !open {
            *tape = None;
        }
        open
    }

    /// Hands on what is on the tape.
    pub fn flush_chunk(&self) {
        // Whether it is of more use is seen at the next record.
        let _ = self.push(BlockTape::flush_chunk);
    }

    /// Ends recording: hands on what is on the tape.
    pub fn end_recording(&self) {
        self.flush_chunk();
        *self.tape() = None;
    }
}

/// The records of one chunk, or of several that are parts of one another, from front to back.
pub struct StreamReader<'a> {
    pub(in crate::block) cursor: Cursor<'a>,
    last: u64,
}

/// A record's beginning.
pub(in crate::block) struct Begun {
    pub tag: u8,
    pub now: Nanos,
}

/// A record's end.
pub(in crate::block) struct Ended {
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

    pub(in crate::block) fn begin(&mut self) -> Result<Begun, BadRecord> {
        let tag = self.cursor.u8("kind")?;
        let since = unzigzag(self.cursor.varint("time")?);
        self.last = self.last.wrapping_add(since as u64);
        Ok(Begun { tag, now: Nanos(self.last) })
    }

    pub(in crate::block) fn end(&mut self) -> Result<Ended, BadRecord> {
        // As many as there are bits.
        let count = self.cursor.at_most(8 * self.cursor.left() as u64, "number of answers")?;
        let bits = self.cursor.take(count.div_ceil(8) as usize, "answers")?.to_vec();
        let digest = self.cursor.u32_le("digest")?;
        Ok(Ended { answers: Answers { count, bits }, digest })
    }
}

/// Neither a request nor anything else that is recorded.
pub(in crate::block) fn unknown(tag: u8) -> BadRecord {
    BadRecord::Value {
        what: "the kind of a record",
        value: tag.into(),
        must: "one that is written",
    }
}
