//! Evictions, noted for whoever watches. Nothing is decided by what is noted, so a record of a run does not know of it.

use larder_base::{Expiry, Now};

use super::shard::KvShard;
use crate::dram::{Block, ObjectHeader, ObjectMemory, State};

/// Evictions that are kept until they are taken; more are counted.
const KEPT: usize = 256;

/// An object that was evicted from DRAM for good.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evicted {
    /// Its key.
    pub key: Box<[u8]>,
    /// It had been read.
    pub fetched: bool,
    /// When it would have expired.
    pub expiry: Expiry,
    /// Seconds since its last access.
    pub last_access: u32,
    /// Bytes of its value.
    pub size: u32,
}

/// What is noted.
#[derive(Debug, Default)]
pub(super) struct Noted {
    list: Vec<Evicted>,
    lost: u64,
}

impl<M: ObjectMemory> KvShard<M> {
    /// Notes evictions from now on, or stops.
    pub fn watch_evictions(&mut self, on: bool) {
        self.noted = on.then(Box::default);
    }

    /// Takes the evictions noted since the last time, and the number of those that there was no room for.
    pub fn take_evicted(&mut self) -> (Vec<Evicted>, u64) {
        match &mut self.noted {
            Some(noted) => (std::mem::take(&mut noted.list), std::mem::take(&mut noted.lost)),
            None => (Vec::new(), 0),
        }
    }

    pub(super) fn note_eviction(&mut self, now: Now, block: Block, h: &ObjectHeader) {
        let Some(noted) = &mut self.noted else { return };
        if noted.list.len() == KEPT {
            noted.lost += 1;
            return;
        }
        noted.list.push(Evicted {
            key: h.key(&self.arena, block).to_vec().into(),
            fetched: h.state.has(State::FETCHED),
            expiry: h.expiry,
            last_access: now.millis32().wrapping_sub(h.last()) / 1000,
            size: h.value_len,
        });
    }
}
