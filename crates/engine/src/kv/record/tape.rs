//! One stream as it is recorded.

use super::decision::Decision;
use super::input::{Clocks, Got, Input, encode, encode_execute};
use crate::kv::api::{FlashRead, Request};
use crate::record::Gathered;
use larder_base::Now;
use larder_format::recording::{ChunkSink, MAX_PAYLOAD};

/// A chunk is handed on when it has this many bytes. No record is longer than a few hundred.
const CHUNK: usize = 64 << 10;
const _: () = assert!(CHUNK + 4096 <= MAX_PAYLOAD);

/// One stream as it is recorded. It holds up to a chunk of 64 KiB.
pub struct Tape {
    gathered: Gathered,
    clocks: Clocks,
}

impl Tape {
    /// An empty stream.
    pub fn new(stream: u16, sink: Box<dyn ChunkSink>) -> Tape {
        Tape { gathered: Gathered::new(stream, CHUNK, sink), clocks: Clocks::default() }
    }

    /// Records so far.
    pub fn records(&self) -> u64 {
        self.gathered.records()
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
        encode_execute(self.gathered.buffer(), &mut self.clocks, now, request, fetched);
        self.end_record(decision)
    }

    /// Appends any other input.
    #[must_use]
    pub(super) fn push(&mut self, now: Now, input: &Input<'_>, decision: &Decision) -> bool {
        encode(self.gathered.buffer(), &mut self.clocks, now, input);
        self.end_record(decision)
    }

    fn end_record(&mut self, decision: &Decision) -> bool {
        decision.encode(self.gathered.buffer());
        if self.gathered.end_record() { self.flush_chunk() } else { true }
    }

    /// Hands on what there is. `false` when recording has ended.
    #[must_use]
    pub fn flush_chunk(&mut self) -> bool {
        self.clocks = Clocks::default();
        self.gathered.flush_chunk()
    }
}
