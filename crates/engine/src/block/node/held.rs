//! Bytes that a shard may still ask for: of reads that are complete, and of clients' writes.

use std::collections::BTreeMap;

use super::event::{Came, Host};
use crate::block::api::{IoId, OpId, Source};

/// Of a read that is complete.
struct Buffer<B> {
    /// Where the first byte belongs in the line space.
    at: u64,
    bytes: B,
    from_flash: bool,
}

/// Of a write.
struct Payload<B> {
    at: u64,
    bytes: B,
    /// Parts that need them.
    parts: u32,
}

/// What one shard holds. It is guarded by the shard's lock.
pub struct Held<H: Host> {
    buffers: BTreeMap<IoId, Buffer<H::Bytes>>,
    payloads: BTreeMap<OpId, Payload<H::Bytes>>,
    /// While the shard hears that the store was read: which read, and for whom. Whoever is handed its bytes then has waited
    /// for it.
    fetched: Option<(IoId, OpId)>,
}

impl<H: Host> Default for Held<H> {
    fn default() -> Held<H> {
        Held { buffers: BTreeMap::new(), payloads: BTreeMap::new(), fetched: None }
    }
}

impl<H: Host> Held<H> {
    /// A read of flash is complete; its first byte belongs at `at` of the line space.
    pub fn keep_read(&mut self, io: IoId, at: u64, bytes: H::Bytes) {
        self.buffers.insert(io, Buffer { at, bytes, from_flash: true });
    }

    /// A read of the store is complete.
    pub fn keep_fetched(&mut self, io: IoId, at: u64, bytes: H::Bytes) {
        self.buffers.insert(io, Buffer { at, bytes, from_flash: false });
    }

    /// The shard is about to hear of this read of the store, or has heard (`None`).
    pub fn hears_of(&mut self, fetch: Option<(IoId, OpId)>) {
        self.fetched = fetch;
    }

    /// A part of a write is about to be submitted, whose first byte belongs at `at`.
    pub fn keep_payload(&mut self, op: OpId, at: u64, bytes: &H::Bytes) {
        let new = || Payload { at, bytes: bytes.clone(), parts: 0 };
        self.payloads.entry(op).or_insert_with(new).parts += 1;
    }

    /// The shard needs a read's bytes no longer.
    pub(super) fn release(&mut self, io: IoId) {
        self.buffers.remove(&io);
    }

    /// A part of a write needs its bytes no longer.
    pub(super) fn release_part(&mut self, op: OpId) {
        if let Some(payload) = self.payloads.get_mut(&op) {
            payload.parts -= 1;
            if payload.parts == 0 {
                self.payloads.remove(&op);
            }
        }
    }

    /// `len` bytes of a source that belong at `at`.
    ///
    /// # Panics
    /// When the shard has released them before.
    pub(super) fn bytes(&self, source: Source, at: u64, len: u64) -> H::Bytes {
        let held = match source {
            Source::Op(op) => self.payloads.get(&op).map(|p| (p.at, &p.bytes)),
            Source::Io(io) => self.buffers.get(&io).map(|b| (b.at, &b.bytes)),
        };
        // The engine says when it needs no more of them: the model test checks that it asks for none after that.
        let (start, bytes) = held.expect("bytes that the engine has not released");
        H::part(bytes, at - start, len)
    }

    /// Where bytes of `source` come from that are handed to `op`.
    pub(super) fn came(&self, source: Source, op: OpId) -> Came {
        match (source, self.fetched) {
            (Source::Io(io), Some((fetch, asker))) if fetch == io => {
                Came::Store { own: asker == op }
            }
            (Source::Io(io), _) if self.buffers.get(&io).is_some_and(|b| b.from_flash) => {
                Came::Flash
            }
            _ => Came::AtHand,
        }
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.buffers.is_empty() && self.payloads.is_empty()
    }
}
