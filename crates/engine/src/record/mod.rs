//! What recordings of both engines have in common: the records of a stream, gathered into chunks.
//!
//! What a record says is each engine's own ([`kv::record`](crate::kv::record), [`block::record`](crate::block::record)); the
//! container is [`larder_format::recording`].

use larder_format::recording::{BadRecord, Chunk, ChunkSink, MAX_PAYLOAD};

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

/// The records of one stream that are not handed on yet.
pub(crate) struct Gathered {
    stream: u16,
    /// Number of the first record in the buffer.
    first: u64,
    records: u32,
    buffer: Vec<u8>,
    chunk: usize,
    sink: Box<dyn ChunkSink>,
}

impl Gathered {
    /// None yet of this stream. They are to be handed on when there are `chunk` bytes of them.
    pub(crate) fn new(stream: u16, chunk: usize, sink: Box<dyn ChunkSink>) -> Gathered {
        Gathered { stream, first: 0, records: 0, buffer: Vec::new(), chunk, sink }
    }

    /// Where the next record goes.
    pub(crate) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// A record has its end. Returns whether they are to be handed on.
    pub(crate) fn end_record(&mut self) -> bool {
        self.records += 1;
        self.buffer.len() >= self.chunk
    }

    /// Records so far, with those that were handed on.
    pub(crate) fn records(&self) -> u64 {
        self.first + u64::from(self.records)
    }

    /// Hands on what there is. `false` when recording has ended.
    ///
    /// What is longer than a chunk may be, because a record is, goes in parts of about the same length: the last says how many
    /// records there are, and those before it that there are none.
    #[must_use]
    pub(crate) fn flush_chunk(&mut self) -> bool {
        if self.records == 0 {
            return self.sink.is_open();
        }
        // Who has filled a chunk fills another; a quiet stream takes no more memory than it needs.
        let next = Vec::with_capacity(self.buffer.len().min(self.chunk + 1024));
        let mut payload = std::mem::replace(&mut self.buffer, next);
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
        self.records = 0;
        self.sink.put(chunk)
    }
}
