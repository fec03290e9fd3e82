//! What must hold of a shard between two calls.

use super::shard::KvShard;
use crate::dram::{ObjectHeader, ObjectMemory, State};

impl<M: ObjectMemory> KvShard<M> {
    /// Walks the shard and checks what must hold between two calls. For tests.
    ///
    /// # Errors
    /// What does not hold.
    pub fn validate(&self) -> Result<(), String> {
        self.arena.validate()?;
        self.index.validate()?;
        let (mut objects, mut staged, mut at) = (0, 0, self.arena.first());
        let (mut hand, mut scan) = (false, false);
        loop {
            hand |= at == self.hand;
            scan |= at == self.scan;
            if self.arena.is_used(at) {
                let h = ObjectHeader::load(&self.arena, at);
                let (key, hash) = (h.key(&self.arena, at), self.hash_of(at, &h).dram());
                if self.table.find(&self.arena, hash, &key).map(|f| f.0) != Some(at) {
                    return Err(format!("object at {at:?} is not found by its key"));
                }
                objects += 1;
                staged += if h.state.has(State::STAGED) { self.arena.block_bytes(at) } else { 0 };
            }
            let next = self.arena.next(at);
            if next == self.arena.first() {
                break;
            }
            at = next;
        }
        if objects != self.table.len() || staged != self.staged_bytes || !hand || !scan {
            return Err(format!(
                "{objects} objects of {}, {staged} staged bytes of {}, hand on a block: {hand}, scan: {scan}",
                self.table.len(),
                self.staged_bytes
            ));
        }
        let mut live = vec![0u32; self.live.len()];
        self.index.for_each(|e| live[usize::from(e.segment)] += 1);
        if live[..] != self.live[..] {
            return Err(format!("entries by segment: {live:?}, counted {:?}", self.live));
        }
        if let Some(s) = (0..live.len()).find(|&s| live[s] > 0 && self.generations[s] == 0) {
            return Err(format!("entries lead to segment {s}, which holds nothing to be read"));
        }
        Ok(())
    }
}
