//! The driver: one decode of the trace, every cache over its own drive, in virtual time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use larder_base::Nanos;
use larder_engine::kv::AppStats;
use larder_engine::kv::api::Tier;
use larder_policy::budget::YEAR_SECONDS;
use larder_trace::{Reader, Request, TraceError, TraceHash};

use super::block::BlockLane;
use super::caches::{self, Asked, Cache, Effects, Totals, bytes_of};
use super::check;
use super::error::{self, ExperimentError};
use super::latency::{Met, Recorder};
use super::outcome::{CacheOutcome, Outcome, WorkloadFacts};
use super::series::{Event, Series};
use super::spec::{CacheSpec, Experiment};
use crate::device::DeviceOp;
use crate::device::backend::Backend;
use crate::device::drive::Drive;
use crate::mrc::Interner;

/// Requests that a cache is told of before they come.
const AHEAD: usize = 12;
/// Requests decoded at a time: few enough to be in the processor's cache still when a cache takes them.
const CHUNK: usize = 4096;

/// A stretch of the trace.
#[derive(Default)]
pub(super) struct Chunk {
    /// Number of the first request.
    pub(super) first: u64,
    pub(super) requests: Vec<Request>,
    /// Numbers of their objects; empty where no cache asks.
    tags: Vec<u32>,
}

/// Reads, times, numbers and hashes requests.
struct Feed {
    reader: Box<dyn Reader>,
    interval: f64,
    interner: Option<Interner>,
    facts: WorkloadFacts,
    hash: TraceHash,
    last: Nanos,
    done: bool,
}

impl Feed {
    fn open(e: &Experiment) -> Result<Feed, ExperimentError> {
        let reader = larder_trace::open(&e.workload.trace, &e.workload.options()?)?.reader;
        let tags = e.caches.iter().any(caches::needs_tags);
        Ok(Feed {
            reader,
            interval: 1e9 / e.workload.rate,
            interner: tags.then(Interner::new),
            facts: WorkloadFacts::default(),
            hash: TraceHash::default(),
            last: Nanos::ZERO,
            done: false,
        })
    }

    fn fill(&mut self, chunk: &mut Chunk) -> Result<(), ExperimentError> {
        chunk.first = self.facts.requests;
        chunk.requests.clear();
        chunk.tags.clear();
        while chunk.requests.len() < CHUNK && !self.done {
            match self.reader.next() {
                Some(request) => self.take(request?, chunk)?,
                None => self.done = true,
            }
        }
        Ok(())
    }

    #[inline]
    fn take(&mut self, mut r: Request, chunk: &mut Chunk) -> Result<(), ExperimentError> {
        self.hash.add(&r);
        let time = match r.time {
            Some(time) => time,
            None => {
                self.facts.times_from_rate = true;
                Nanos((self.facts.requests as f64 * self.interval) as u64)
            }
        };
        self.last = Nanos(time.0.max(self.last.0));
        r.time = Some(self.last);
        self.facts.requests += 1;
        self.facts.reads += u64::from(r.op.is_read());
        self.facts.writes += u64::from(r.op.is_write());
        self.facts.removals += u64::from(r.op.is_removal());
        self.facts.bytes += bytes_of(&r);
        if let Some(interner) = &mut self.interner {
            chunk.tags.push(interner.intern(r.id).ok_or(ExperimentError::TooManyObjects)?);
        }
        chunk.requests.push(r);
        Ok(())
    }

    fn facts(&self) -> WorkloadFacts {
        WorkloadFacts {
            trace_hash: self.hash.text(),
            seconds: self.last.as_secs_f64(),
            skipped: self.reader.skipped(),
            ..self.facts.clone()
        }
    }
}

/// Counts since counting began.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    requests: u64,
    reads: u64,
    hits_dram: u64,
    hits_flash: u64,
    read_bytes: u64,
    hit_bytes: u64,
    set_bytes: u64,
    miss_bytes: u64,
    flash_bytes: u64,
    flash_reads: u64,
    /// Of these, by reads that hit on flash, and by reads that missed.
    hit_flash_reads: u64,
    miss_flash_reads: u64,
}

/// One cache of an experiment, with all that is around it.
pub(super) trait Lane: Send {
    /// Takes the next stretch of the trace.
    fn process(&mut self, e: &Experiment, chunk: &Chunk);

    /// What came out; `last` is when the last request came.
    ///
    /// # Errors
    /// When the cache and the trace do not fit each other.
    fn outcome(
        &mut self,
        e: &Experiment,
        spec: &CacheSpec,
        last: Nanos,
    ) -> Result<CacheOutcome, ExperimentError>;
}

fn lane(e: &Experiment, spec: &CacheSpec) -> Result<Box<dyn Lane>, ExperimentError> {
    Ok(match spec {
        CacheSpec::Block(c) => Box::new(BlockLane::new(e, c)?),
        _ => Box::new(KvLane::new(e, spec)?),
    })
}

/// Years that the drive's endurance lasts at `rate` bytes a second.
pub(super) fn life(e: &Experiment, capacity: u64, dlwa: Option<f64>, rate: f64) -> Option<f64> {
    let endurance = e.ssd.tbw.map_or_else(
        || e.ssd.dwpd * e.ssd.warranty_years * 365.25 * capacity as f64,
        |tbw| tbw.bytes as f64,
    );
    let programmed = dlwa.map(|d| d * rate).filter(|&p| p > 0.0);
    programmed.map(|p| endurance / p / YEAR_SECONDS)
}

/// A cache of objects.
struct KvLane {
    cache: Box<dyn Cache>,
    drive: Drive,
    backend: Backend,
    dram: Nanos,
    counts: Counts,
    recorder: Recorder,
    series: Series,
    effects: Effects,
    /// Totals when counting began.
    before: Totals,
    /// What applications had done then; empty where nobody wants to know.
    apps_before: BTreeMap<String, AppStats>,
    tells_apps: bool,
    started: Nanos,
    warmup: u64,
}

impl KvLane {
    fn new(e: &Experiment, spec: &CacheSpec) -> Result<KvLane, ExperimentError> {
        Ok(KvLane {
            cache: caches::build(spec, e.seed)?,
            drive: Drive::new(&e.ssd, &e.timing, spec.flash(), e.seed)
                .map_err(|error| error::drive(spec.name(), error))?,
            backend: Backend::new(&e.timing, e.seed),
            dram: Nanos((e.timing.dram_us * 1000.0) as u64),
            counts: Counts::default(),
            recorder: Recorder::new(),
            series: Series::new(&e.report, Nanos::ZERO),
            effects: Effects::default(),
            before: Totals::default(),
            apps_before: BTreeMap::new(),
            tells_apps: spec.tells_applications(),
            started: Nanos::ZERO,
            warmup: e.workload.warmup,
        })
    }

    fn begin(&mut self, e: &Experiment, now: Nanos) {
        self.counts = Counts::default();
        self.recorder.reset();
        self.drive.reset();
        self.backend.reset();
        self.before = self.cache.totals();
        if self.tells_apps {
            self.apps_before = self.cache.applications();
        }
        self.started = now;
        self.series = Series::new(&e.report, now);
    }

    fn request(&mut self, number: u64, asked: &Asked<'_>) {
        let r = asked.request;
        let now = r.time.unwrap_or(Nanos::ZERO);
        let bytes = bytes_of(r);
        let tier = self.cache.request(asked, &mut self.effects);
        let mut done = now + self.dram;
        let (mut written, mut flash_reads) = (0, 0);
        for op in self.effects.ops.drain(..) {
            match op {
                DeviceOp::Read { offset, len } => {
                    flash_reads += 1;
                    done = self.drive.read(done, offset, len);
                }
                other => {
                    if let DeviceOp::Write { len, .. } = other {
                        written += u64::from(len);
                    }
                    self.drive.apply(now, other);
                }
            }
        }
        let c = &mut self.counts;
        c.requests += 1;
        c.flash_bytes += written;
        c.flash_reads += flash_reads;
        let mut set_bytes = 0;
        let met = if r.op.is_read() {
            c.reads += 1;
            c.read_bytes += bytes;
            match tier {
                Some(tier) => {
                    c.hit_bytes += bytes;
                    if tier == Tier::Dram {
                        c.hits_dram += 1;
                        Met::Dram
                    } else {
                        c.hits_flash += 1;
                        c.hit_flash_reads += flash_reads;
                        Met::Flash
                    }
                }
                None => {
                    c.miss_bytes += bytes;
                    c.miss_flash_reads += flash_reads;
                    set_bytes = bytes;
                    done = self.backend.fetch(done, number, bytes);
                    Met::Miss
                }
            }
        } else {
            if r.op.is_write() {
                set_bytes = bytes;
            }
            Met::Write
        };
        c.set_bytes += set_bytes;
        let latency = done.saturating_sub(now);
        self.recorder.record(met, latency);
        self.series.add(&Event { at: now, met, latency, set_bytes, flash_bytes: written });
        if written > 0 {
            self.series.traffic(now, self.drive.traffic());
        }
    }
}

impl Lane for KvLane {
    fn process(&mut self, e: &Experiment, chunk: &Chunk) {
        let mut coming = chunk.requests.iter();
        for request in coming.by_ref().take(AHEAD) {
            self.cache.announce(request);
        }
        for (i, request) in chunk.requests.iter().enumerate() {
            if let Some(next) = coming.next() {
                self.cache.announce(next);
            }
            let number = chunk.first + i as u64;
            if number == self.warmup {
                self.begin(e, request.time.unwrap_or(Nanos::ZERO));
            }
            let tag = chunk.tags.get(i).copied().unwrap_or(0);
            self.request(number, &Asked { request, tag });
        }
    }

    fn outcome(
        &mut self,
        e: &Experiment,
        spec: &CacheSpec,
        last: Nanos,
    ) -> Result<CacheOutcome, ExperimentError> {
        let c = &self.counts;
        let seconds = last.saturating_sub(self.started).as_secs_f64();
        let share = |part: u64, whole: u64| {
            if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
        };
        let clwa_of_sets = share(c.flash_bytes, c.set_bytes);
        let traffic = self.drive.traffic();
        let dlwa = (traffic.written > 0).then(|| traffic.amplification());
        let rate = if seconds > 0.0 { c.flash_bytes as f64 / seconds } else { 0.0 };
        let totals = self.cache.totals();
        let (left, unread) = match (totals.dropped, self.before.dropped) {
            (Some(after), before) => {
                let before = before.unwrap_or_default();
                (after.0 - before.0, after.1 - before.1)
            }
            (None, _) => (0, 0),
        };
        let hits = c.hits_dram + c.hits_flash;
        Ok(CacheOutcome {
            name: spec.name().to_owned(),
            kind: spec.kind().name().to_owned(),
            dram: spec.dram(),
            flash: spec.flash(),
            requests: c.requests,
            reads: c.reads,
            hits_dram: c.hits_dram,
            hits_flash: c.hits_flash,
            read_bytes: c.read_bytes,
            hit_bytes: c.hit_bytes,
            set_bytes: c.set_bytes,
            miss_bytes: c.miss_bytes,
            flash_bytes: c.flash_bytes,
            hit_ratio: share(hits, c.reads),
            dram_hit_ratio: share(c.hits_dram, c.reads),
            flash_hit_ratio: share(c.hits_flash, c.reads),
            miss_ratio: share(c.reads - hits, c.reads),
            byte_miss_ratio: share(c.miss_bytes, c.read_bytes),
            clwa_of_sets,
            clwa_of_misses: share(c.flash_bytes, c.miss_bytes),
            dlwa,
            write_amplification: dlwa.map(|d| d * clwa_of_sets),
            flash_bytes_per_second: rate,
            life_years: life(e, self.drive.capacity, dlwa, rate),
            wear: dlwa.map(|_| self.drive.wear()),
            flash_reads: Some(c.flash_reads),
            flash_reads_per_hit: (c.hits_flash > 0).then(|| share(c.hit_flash_reads, c.hits_flash)),
            flash_reads_per_miss: (c.reads > hits)
                .then(|| share(c.miss_flash_reads, c.reads - hits)),
            flash_fill: totals.record_bytes.filter(|_| c.flash_bytes > 0).map(|bytes| {
                share(bytes - self.before.record_bytes.unwrap_or_default(), c.flash_bytes)
            }),
            unread_share: (left > 0).then(|| share(unread, left)),
            evicted_unjudged: totals
                .evicted_unjudged
                .map(|n| n - self.before.evicted_unjudged.unwrap_or_default()),
            dram_objects: totals.dram_objects,
            flash_objects: totals.flash_objects,
            metadata_bytes: totals.metadata_bytes,
            metadata_per_flash_object: match (totals.metadata_bytes, totals.flash_objects) {
                (Some(bytes), Some(objects)) if objects > 0 => Some(share(bytes, objects)),
                _ => None,
            },
            simulator_bytes: totals.simulator_bytes,
            simulator_bytes_per_object: totals.simulator_bytes.and_then(|bytes| {
                let objects = totals.dram_objects? + totals.flash_objects?;
                (objects > 0).then(|| share(bytes, objects))
            }),
            latency: self.recorder.latencies(),
            flash_utilisation: self.drive.utilisation(seconds),
            backend_utilisation: self.backend.utilisation(seconds),
            block: None,
            applications: match self.tells_apps {
                true => self.cache.since(&self.apps_before),
                false => BTreeMap::new(),
            },
            series: self.series.points(),
        })
    }
}

fn unpoisoned<T>(lock: Result<T, PoisonError<T>>) -> T {
    // A lane that panicked has poisoned its lock; the panic itself is what the caller will see.
    lock.unwrap_or_else(PoisonError::into_inner)
}

/// Runs an experiment on up to `threads` threads; what comes out does not depend on their number. `progress` is called
/// now and then with the reader and the number of requests read.
///
/// # Errors
/// What [`Experiment::validate`] finds, sizes that cannot work, a trace that cannot be read or is shorter than the
/// warm-up.
pub fn run(
    e: &Experiment,
    threads: usize,
    mut progress: impl FnMut(&dyn Reader, u64),
) -> Result<Outcome, ExperimentError> {
    e.validate()?;
    let lanes = e.caches.iter().map(|spec| Ok(Mutex::new(lane(e, spec)?)));
    let lanes: Vec<Mutex<Box<dyn Lane>>> = lanes.collect::<Result<_, ExperimentError>>()?;
    let mut feed = Feed::open(e)?;
    let helpers = threads.min(lanes.len()).saturating_sub(1);
    let (mut chunk, mut coming) = (Chunk::default(), Chunk::default());
    feed.fill(&mut chunk)?;
    while !chunk.requests.is_empty() {
        let turn = AtomicUsize::new(0);
        let work = || {
            while let Some(lane) = lanes.get(turn.fetch_add(1, Ordering::Relaxed)) {
                unpoisoned(lane.lock()).process(e, &chunk);
            }
        };
        // Threads at the outermost loop only: this one decodes the next chunk, then helps with this one.
        std::thread::scope(|scope| {
            for _ in 0..helpers {
                scope.spawn(work);
            }
            let filled = feed.fill(&mut coming);
            work();
            filled
        })?;
        std::mem::swap(&mut chunk, &mut coming);
        progress(&*feed.reader, feed.facts.requests);
    }
    if feed.facts.requests == 0 {
        let spec = "the trace has no requests".to_owned();
        return Err(TraceError::Spec { spec: e.workload.trace.clone(), problem: spec }.into());
    }
    if feed.facts.requests <= e.workload.warmup {
        return Err(ExperimentError::NothingCounted {
            trace: e.workload.trace.clone(),
            warmup: e.workload.warmup,
            requests: feed.facts.requests,
        });
    }
    let caches: Vec<CacheOutcome> = lanes
        .into_iter()
        .zip(&e.caches)
        .map(|(lane, spec)| unpoisoned(lane.into_inner()).outcome(e, spec, feed.last))
        .collect::<Result<_, ExperimentError>>()?;
    let workload = feed.facts();
    Ok(Outcome {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        seed: e.seed,
        trace: e.workload.trace.clone(),
        trace_hash: workload.trace_hash.clone(),
        experiment: e.clone(),
        workload,
        expectations: check::check(&e.expect, &caches),
        caches,
    })
}
