//! A log of segments in which objects leave first in, first out, and those that were hit may be written again.

use std::collections::VecDeque;

use super::Flash;
use crate::lab::oracle::Sizes;

/// What is known of an object.
#[derive(Clone, Copy, Debug, Default)]
struct Object {
    /// The number of its record; 0: it is not here.
    record: u64,
    /// Hits that count for the next turn.
    hits: u8,
}

#[derive(Debug, Default)]
struct Segment {
    /// Objects, the numbers of their records, and their bytes.
    records: Vec<(u32, u64, u32)>,
    used: u64,
}

/// What leaves the log's end: objects, their bytes, and whether they were hit there.
pub(super) type Oldest = Vec<(u32, u32, u8)>;

pub(super) struct Log {
    sizes: Sizes,
    turns: u8,
    objects: Vec<Object>,
    sealed: VecDeque<Segment>,
    open: Segment,
    records: u64,
    written: u64,
}

impl Log {
    pub(super) fn new(sizes: Sizes, turns: u8, objects: usize) -> Log {
        Log {
            sizes,
            turns,
            objects: vec![Object::default(); objects],
            sealed: VecDeque::new(),
            open: Segment::default(),
            records: 0,
            written: 0,
        }
    }

    /// Whether a record of so many bytes fits into the segment that is being filled.
    pub(super) fn has_room(&self, record: u32) -> bool {
        self.open.used + u64::from(record) <= self.sizes.room()
    }

    /// Writes the segment that is being filled. Returns what was alive in the oldest, if that had to go: it is not here any more.
    pub(super) fn seal(&mut self) -> Oldest {
        self.written += u64::from(self.sizes.segment);
        self.sealed.push_back(std::mem::take(&mut self.open));
        if self.sealed.len() <= self.sizes.live() {
            return Vec::new();
        }
        let oldest = self.sealed.pop_front().unwrap_or_default();
        let mut left = Vec::new();
        for (tag, number, bytes) in oldest.records {
            let object = &mut self.objects[tag as usize];
            if object.record == number {
                left.push((tag, bytes, object.hits));
                *object = Object::default();
            }
        }
        left
    }

    /// Puts a record, which has room, into the segment that is being filled.
    pub(super) fn append(&mut self, tag: u32, record: u32, hits: u8) {
        self.records += 1;
        self.open.used += u64::from(record);
        self.open.records.push((tag, self.records, record));
        self.objects[tag as usize] = Object { record: self.records, hits };
    }

    pub(super) fn hits(&self, tag: u32) -> u8 {
        self.objects[tag as usize].hits
    }
}

impl Flash for Log {
    fn read(&mut self, tag: u32) -> bool {
        let object = &mut self.objects[tag as usize];
        if object.record == 0 {
            return false;
        }
        object.hits = (object.hits + 1).min(self.turns);
        true
    }

    fn holds(&self, tag: u32) -> bool {
        self.objects[tag as usize].record != 0
    }

    fn fits(&self, record: u32) -> bool {
        u64::from(record) <= self.sizes.room()
    }

    fn write(&mut self, tag: u32, record: u32) {
        // Each turn takes a hit, so this ends.
        while !self.has_room(record) {
            for (tag, bytes, hits) in self.seal() {
                if hits > 0 && self.has_room(bytes) {
                    self.append(tag, bytes, hits - 1);
                }
            }
        }
        self.append(tag, record, 0);
    }

    fn remove(&mut self, tag: u32) {
        self.objects[tag as usize] = Object::default();
    }

    fn written(&self) -> u64 {
        self.written
    }
}
