//! One run of the model under one threshold.

use std::collections::{BTreeSet, VecDeque};

use larder_policy::admission::Objective;
use serde::Serialize;

use super::known::{Ask, Known, NEVER, Step};
use super::{Memory, Sizes};
use crate::kv::Counters;

/// What decides in a run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// An object is written if its reads per byte of its record (by bytes: the bytes that they read) are at least this.
    pub threshold: f64,
    /// Which object leaves DRAM.
    pub memory: Memory,
    /// Whatever is read again is written while the caches warm up, since what is written then is not counted.
    pub open_warmup: bool,
}

/// What a run was asked for beside its [`Setting`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) sizes: Sizes,
    pub(super) warmup: usize,
    pub(super) counted_from: usize,
    pub(super) objective: Objective,
}

/// Stretches of the trace in which the pace of writes is known.
const STRETCHES: usize = 1024;

/// What runs so far have shown of how long objects live on flash.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// Segments that are written in each stretch.
    paces: Vec<f64>,
    /// Where what is written at the beginning of each stretch is reclaimed, and at the end of the last; the trace's end, if it is not.
    ends: Vec<f64>,
    /// Requests of a stretch.
    stretch: f64,
}

impl Seen {
    /// Nothing is written: what is on flash stays there.
    pub(super) fn nothing(requests: usize) -> Seen {
        let stretch = (requests as f64 / STRETCHES as f64).max(1.0);
        let ends = vec![requests as f64; STRETCHES + 1];
        Seen { paces: vec![0.0; STRETCHES], ends, stretch }
    }

    /// Halfway to what a run did. Whoever believed the last run alone would write much because little was written before, and then little
    /// because of that.
    pub(super) fn learn(&mut self, run: &Run, live: usize) {
        let mut paces = vec![0.0; STRETCHES];
        for &seal in &run.seals {
            let at = (f64::from(seal) / self.stretch) as usize;
            paces[at.min(STRETCHES - 1)] += 1.0;
        }
        for (pace, new) in self.paces.iter_mut().zip(paces) {
            *pace = (*pace + new) / 2.0;
        }
        // Both ends move forwards.
        let (mut at, mut into, mut ahead) = (0, 0.0, 0.0);
        for from in 0..=STRETCHES {
            // `ahead` segments are written between the beginning of `from` and `into` of stretch `at`.
            while at < STRETCHES && ahead + self.paces[at] * (1.0 - into) < live as f64 {
                ahead += self.paces[at] * (1.0 - into);
                (at, into) = (at + 1, 0.0);
            }
            if at < STRETCHES && self.paces[at] > 0.0 {
                into += (live as f64 - ahead) / self.paces[at];
                ahead = live as f64;
            }
            self.ends[from] = (at as f64 + into) * self.stretch;
            ahead -= self.paces.get(from).copied().unwrap_or(0.0);
        }
    }

    /// Whether nothing was written so far.
    pub(super) fn is_idle(&self) -> bool {
        self.paces.iter().all(|&pace| pace == 0.0)
    }

    /// Where what is written by request `i` is reclaimed.
    fn end(&self, i: u32) -> u32 {
        let at = f64::from(i) / self.stretch;
        let stretch = (at as usize).min(STRETCHES - 1);
        let (from, to) = (self.ends[stretch], self.ends[stretch + 1]);
        (from + (to - from) * (at - stretch as f64)).ceil() as u32
    }
}

/// What a run did.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) counters: Counters,
    pub(super) whole: Counters,
    /// The requests at which a segment was written.
    seals: Vec<u32>,
}

/// Where an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Nowhere,
    Dram,
    Flash,
}

/// What is known of an object that is somewhere.
#[derive(Clone, Copy, Debug)]
struct Object {
    place: Place,
    /// Its last request.
    last: u32,
    /// The request that brought the version in.
    set: u32,
    /// In DRAM: where it stands in the order of leaving. On flash: which record is its own.
    at: u64,
}

#[derive(Debug, Default)]
struct Segment {
    /// Objects, and the numbers of their records.
    records: Vec<(u32, u64)>,
    used: u64,
}

/// The model. Segments are written when the next record does not fit; the oldest makes room, and what is judged worth it goes from it
/// into the segment that is filled next.
pub(super) struct Model<'a> {
    known: &'a Known,
    asked: Asked,
    setting: Setting,
    before: &'a Seen,
    objects: Vec<Object>,
    dram: BTreeSet<(u64, u32)>,
    dram_bytes: u64,
    sealed: VecDeque<Segment>,
    open: Segment,
    records: u64,
    seals: Vec<u32>,
    counters: Counters,
}

/// Runs `known` once.
pub(super) fn run(known: &Known, asked: Asked, setting: Setting, before: &Seen) -> Run {
    let nothing = Object { place: Place::Nowhere, last: 0, set: 0, at: 0 };
    let mut model = Model {
        known,
        asked,
        setting,
        before,
        objects: vec![nothing; known.tags],
        dram: BTreeSet::new(),
        dram_bytes: 0,
        sealed: VecDeque::new(),
        open: Segment::default(),
        records: 0,
        seals: Vec::new(),
        counters: Counters::default(),
    };
    let (mut warm, mut filled) = (Counters::default(), 0);
    for (i, step) in known.steps.iter().enumerate() {
        if i == asked.warmup {
            warm = model.counters;
        }
        if i == asked.counted_from {
            filled = model.counters.flash_bytes;
        }
        model.step(i as u32, step);
    }
    let mut counters = model.counters.since(&warm);
    counters.flash_bytes = model.counters.flash_bytes - filled;
    Run { counters, whole: model.counters, seals: model.seals }
}

impl Model<'_> {
    fn step(&mut self, i: u32, step: &Step) {
        self.counters.requests += 1;
        let bytes = u64::from(step.bytes);
        match step.ask {
            Ask::Read => {
                self.counters.gets += 1;
                self.counters.get_bytes += bytes;
                let object = self.objects[step.tag as usize];
                let there = object.place != Place::Nowhere
                    && i < self.known.steps[object.set as usize].expires;
                if there {
                    self.counters.hit_bytes += bytes;
                    self.objects[step.tag as usize].last = i;
                    if object.place == Place::Dram {
                        self.counters.hits_dram += 1;
                        self.dram.remove(&(object.at, step.tag));
                        self.stand(step.tag, i);
                    } else {
                        self.counters.hits_flash += 1;
                    }
                } else {
                    self.counters.miss_bytes += bytes;
                    self.bring(i, step);
                }
            }
            Ask::Write => self.bring(i, step),
            Ask::Remove => self.forget(step.tag),
            Ask::Other => {}
        }
    }

    /// A new version comes into DRAM.
    fn bring(&mut self, i: u32, step: &Step) {
        self.counters.set_bytes += u64::from(step.bytes);
        self.forget(step.tag);
        if u64::from(step.dram) > self.asked.sizes.dram {
            return;
        }
        let object = Object { place: Place::Dram, last: i, set: i, at: 0 };
        self.objects[step.tag as usize] = object;
        self.stand(step.tag, i);
        self.dram_bytes += u64::from(step.dram);
        while self.dram_bytes > self.asked.sizes.dram {
            let Some((_, victim)) = self.dram.pop_first() else { break };
            self.leave(victim, i);
        }
    }

    /// The object takes its place in the order of leaving DRAM.
    fn stand(&mut self, tag: u32, i: u32) {
        let object = &mut self.objects[tag as usize];
        object.at = match self.setting.memory {
            Memory::Lru => u64::from(i),
            Memory::NextRead => {
                let end = self.known.steps[object.set as usize].expires;
                u64::from(NEVER - self.known.next_read(i, end))
            }
        };
        self.dram.insert((object.at, tag));
    }

    /// The object, which is in no order any more, leaves DRAM.
    fn leave(&mut self, tag: u32, i: u32) {
        let object = self.objects[tag as usize];
        let step = self.known.steps[object.set as usize];
        self.dram_bytes -= u64::from(step.dram);
        self.objects[tag as usize].place = Place::Nowhere;
        if u64::from(step.record) <= self.asked.sizes.room() && self.is_worth(tag, i) {
            self.write(tag, i);
        } else {
            self.counters.dram_evictions += 1;
        }
    }

    /// Whether the reads that flash would answer are worth the write.
    fn is_worth(&self, tag: u32, i: u32) -> bool {
        let object = &self.objects[tag as usize];
        let step = &self.known.steps[object.set as usize];
        let end = self.before.end(i).min(step.expires);
        let (from, to) = self.known.reads_until(object.last, end);
        if from == to {
            return false;
        }
        if self.setting.open_warmup && (i as usize) < self.asked.counted_from {
            return true;
        }
        let reads = (to - from) as f64;
        let gain = match self.asked.objective {
            Objective::Requests => reads,
            Objective::Bytes => reads * f64::from(step.bytes),
        };
        // Objects of one size have few values: a little chance lets a part of those of equal worth pass.
        let chance = larder_trace::mix(u64::from(tag) << 32 | u64::from(object.set)) >> 11;
        let chance = 1.0 + 1e-3 * chance as f64 / (1u64 << 53) as f64;
        gain / f64::from(step.record) * chance >= self.setting.threshold
    }

    /// Into the open segment; the object is read from there until it is on flash.
    fn write(&mut self, tag: u32, i: u32) {
        let record = self.known.steps[self.objects[tag as usize].set as usize].record;
        let mut turns = 0;
        while self.open.used + u64::from(record) > self.asked.sizes.room() {
            // Where all that is old is worth another round, the new object would wait for ever.
            self.seal(i, turns < self.asked.sizes.segments);
            turns += 1;
        }
        self.append(tag, record);
    }

    fn append(&mut self, tag: u32, record: u32) {
        self.records += 1;
        self.open.used += u64::from(record);
        self.open.records.push((tag, self.records));
        let object = &mut self.objects[tag as usize];
        object.place = Place::Flash;
        object.at = self.records;
        self.counters.flash_record_bytes += u64::from(record);
    }

    fn seal(&mut self, i: u32, keep: bool) {
        self.counters.flash_bytes += u64::from(self.asked.sizes.segment);
        self.seals.push(i);
        self.sealed.push_back(std::mem::take(&mut self.open));
        if self.sealed.len() <= self.asked.sizes.live() {
            return;
        }
        let oldest = self.sealed.pop_front().unwrap_or_default();
        for (tag, record) in oldest.records {
            let object = self.objects[tag as usize];
            if object.place != Place::Flash || object.at != record {
                continue;
            }
            if keep && self.is_worth(tag, i) {
                self.counters.reinserted += 1;
                self.append(tag, self.known.steps[object.set as usize].record);
            } else {
                self.objects[tag as usize].place = Place::Nowhere;
                self.counters.flash_dropped += 1;
            }
        }
    }

    fn forget(&mut self, tag: u32) {
        let object = &mut self.objects[tag as usize];
        if object.place == Place::Dram {
            self.dram.remove(&(object.at, tag));
            self.dram_bytes -= u64::from(self.known.steps[object.set as usize].dram);
        }
        object.place = Place::Nowhere;
    }
}
