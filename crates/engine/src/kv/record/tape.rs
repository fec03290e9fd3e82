//! One stream as it is recorded.

use super::decision::Decision;
use super::input::{Clocks, Got, Input, encode, encode_execute};
use crate::kv::api::{FlashRead, Request};
use larder_base::Now;
use larder_format::recording::{Chunk, ChunkSink, MAX_PAYLOAD};

/// A chunk is handed on when it has this many bytes. No record is longer than a few hundred.
const CHUNK: usize = 64 << 10;
const _: () = assert!(CHUNK + 4096 <= MAX_PAYLOAD);

/// One stream as it is recorded. It holds up to a chunk of 64 KiB.
pub struct Tape {
    stream: u16,
    first: u64,
    records: u32,
    buffer: Vec<u8>,
    clocks: Clocks,
    sink: Box<dyn ChunkSink>,
}

impl Tape {
    /// An empty stream.
    pub fn new(stream: u16, sink: Box<dyn ChunkSink>) -> Tape {
        let buffer = Vec::with_capacity(CHUNK + 1024);
        Tape { stream, first: 0, records: 0, buffer, clocks: Clocks::default(), sink }
    }

    /// Records so far.
    pub fn records(&self) -> u64 {
        self.first + u64::from(self.records)
    }

    /// Appends a request. `false` when recording has ended: the tape is of no more use.
    #[must_use]
    pub(super) fn request(
        &mut self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<(&FlashRead, Got)>,
        decision: &Decision,
    ) -> bool {
        encode_execute(&mut self.buffer, &mut self.clocks, now, request, fetched);
        self.end_record(decision)
    }

    /// Appends any other input.
    #[must_use]
    pub(super) fn push(&mut self, now: Now, input: &Input<'_>, decision: &Decision) -> bool {
        encode(&mut self.buffer, &mut self.clocks, now, input);
        self.end_record(decision)
    }

    fn end_record(&mut self, decision: &Decision) -> bool {
        decision.encode(&mut self.buffer);
        self.records += 1;
        if self.buffer.len() >= CHUNK { self.hand_on() } else { true }
    }

    /// Hands on what there is. `false` when recording has ended.
    #[must_use]
    pub fn hand_on(&mut self) -> bool {
        if self.records == 0 {
            return self.sink.is_open();
        }
        let payload = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK + 1024));
        let chunk =
            Chunk { stream: self.stream, first: self.first, records: self.records, payload };
        self.first += u64::from(self.records);
        self.records = 0;
        self.clocks = Clocks::default();
        self.sink.put(chunk)
    }
}
