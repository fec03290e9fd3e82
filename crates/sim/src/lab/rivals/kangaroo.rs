//! Kangaroo's flash: a small log, and sets of 4 KiB behind it that are written when several objects of one set come together.
//!
//! McAllister et al. (SOSP '21). When the log's oldest segment goes, each object in it takes along all of its set's that are in the log. If
//! these are as many as the threshold, the set is read and written once with all of them; if not, an object that was hit in the
//! log is written to the log's head again, and others are dropped. In a set objects have three bits of RRIP and a bit for hits
//! since the set was last written (RRIParoo); what is predicted to be read the latest leaves.

use std::collections::BTreeMap;

use larder_trace::mix;

use super::Flash;
use super::log::{Log, Oldest};
use crate::lab::oracle::Sizes;

/// Bytes of a set.
const SET: u32 = 4096;
/// Objects with larger records stay in the log: a set would hold one of them.
const MOST: u32 = SET / 2;
/// The largest prediction, and that with which objects come into a set.
const FAR: u8 = 7;
const LONG: u8 = 6;

#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: u32,
    record: u32,
    prediction: u8,
    hit: bool,
}

pub(super) struct Kangaroo {
    log: Log,
    together: usize,
    sets: Vec<Vec<Entry>>,
    /// Objects in the log by their set; with them some that have left it.
    waiting: Vec<Vec<(u32, u32)>>,
    /// Whether an object is in its set.
    in_set: Vec<bool>,
    written: u64,
}

impl Kangaroo {
    pub(super) fn new(sizes: Sizes, share: f64, together: usize, objects: usize) -> Kangaroo {
        let segments = ((f64::from(sizes.segments) * share) as u16).clamp(2, sizes.segments.max(2));
        let rest = sizes.flash().saturating_sub(u64::from(segments) * u64::from(sizes.segment));
        let sets = (rest / u64::from(SET)).max(1) as usize;
        Kangaroo {
            log: Log::new(Sizes { segments, ..sizes }, 1, objects),
            together,
            sets: vec![Vec::new(); sets],
            waiting: vec![Vec::new(); sets],
            in_set: vec![false; objects],
            written: 0,
        }
    }

    fn set_of(&self, tag: u32) -> usize {
        ((u128::from(mix(u64::from(tag))) * self.sets.len() as u128) >> 64) as usize
    }

    /// Objects that left the log's end find their sets, its head, or nothing.
    fn place(&mut self, oldest: Oldest) {
        let mut by_set: BTreeMap<usize, Oldest> = BTreeMap::new();
        let mut again = Vec::new();
        for object in oldest {
            if object.1 <= MOST {
                by_set.entry(self.set_of(object.0)).or_default().push(object);
            } else if object.2 > 0 {
                again.push(object);
            }
        }
        for (set, mut coming) in by_set {
            let mut others = std::mem::take(&mut self.waiting[set]);
            others.retain(|&(other, _)| self.log.holds(other));
            if coming.len() + others.len() >= self.together {
                for (other, record) in others {
                    coming.push((other, record, self.log.hits(other)));
                    self.log.remove(other);
                }
                self.write_set(set, &coming);
            } else {
                self.waiting[set] = others;
                again.extend(coming.into_iter().filter(|object| object.2 > 0));
            }
        }
        for (tag, record, _) in again {
            if self.log.has_room(record) {
                self.append(tag, record);
            }
        }
    }

    fn append(&mut self, tag: u32, record: u32) {
        self.log.append(tag, record, 0);
        if record <= MOST {
            let set = self.set_of(tag);
            self.waiting[set].retain(|&(other, _)| other != tag);
            self.waiting[set].push((tag, record));
        }
    }

    fn write_set(&mut self, set: usize, coming: &[(u32, u32, u8)]) {
        self.written += u64::from(SET);
        let mut all: Vec<Entry> = coming
            .iter()
            .map(|&(tag, record, hits)| Entry {
                tag,
                record,
                prediction: LONG - hits.min(1),
                hit: false,
            })
            .collect();
        let mut old = std::mem::take(&mut self.sets[set]);
        for entry in &mut old {
            if entry.hit {
                (entry.prediction, entry.hit) = (0, false);
            }
        }
        let size = |all: &[Entry]| all.iter().map(|e| e.record).sum::<u32>();
        if size(&all) + size(&old) > SET {
            // Someone must be far for someone to leave.
            let farthest = old.iter().map(|e| e.prediction).max().unwrap_or(FAR);
            old.iter_mut().for_each(|e| e.prediction += FAR - farthest);
        }
        all.append(&mut old);
        // Of equal ones those that come now stand first: the order is kept.
        all.sort_by_key(|e| e.prediction);
        let mut used = 0;
        for entry in all {
            let fits = used + entry.record <= SET;
            self.in_set[entry.tag as usize] = fits;
            if fits {
                used += entry.record;
                self.sets[set].push(entry);
            }
        }
    }
}

impl Flash for Kangaroo {
    fn read(&mut self, tag: u32) -> bool {
        if self.log.read(tag) {
            return true;
        }
        if !self.in_set[tag as usize] {
            return false;
        }
        let set = self.set_of(tag);
        self.sets[set].iter_mut().filter(|e| e.tag == tag).for_each(|e| e.hit = true);
        true
    }

    fn holds(&self, tag: u32) -> bool {
        self.in_set[tag as usize] || self.log.holds(tag)
    }

    fn fits(&self, record: u32) -> bool {
        self.log.fits(record)
    }

    fn write(&mut self, tag: u32, record: u32) {
        while !self.log.has_room(record) {
            let oldest = self.log.seal();
            self.place(oldest);
        }
        self.append(tag, record);
    }

    fn remove(&mut self, tag: u32) {
        self.log.remove(tag);
        if self.in_set[tag as usize] {
            // The set has its bytes until it is written again; in the model they are free at once.
            self.in_set[tag as usize] = false;
            let set = self.set_of(tag);
            self.sets[set].retain(|e| e.tag != tag);
        }
    }

    fn written(&self) -> u64 {
        self.written + self.log.written()
    }
}
