//! Many runs over one decode.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_policy::eviction::{Access, EvictionKind, Unit};
use larder_trace::TraceError;
use serde::Serialize;

use super::filter::{Filter, Gate};
use super::intern::Interner;
use super::items::Item;
use super::run::{Chunk, Run};
use super::shards::{PARTS, Sampler, standard_error};
use super::sizes::Sizes;
use super::stack::{LruCurve, StackDistances};

/// A policy at a size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Job {
    /// The policy.
    pub policy: EvictionKind,
    /// The cache's capacity in the sweep's unit; positive.
    pub size: u64,
    /// What of the misses is taken in. Objects that the policy remembers as ghosts are not asked about.
    pub admission: Filter,
}

/// What to simulate.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// The runs; rows come in this order.
    pub jobs: Vec<Job>,
    /// What sizes count.
    pub unit: Unit,
    /// Requests that fill the caches before counting starts.
    pub warmup: u64,
    /// Threads at most, at least 1.
    pub threads: usize,
    /// Seed of what filters draw.
    pub seed: u64,
    /// Take a share of the objects.
    pub sample: Option<Sampler>,
    /// Also compute the exact LRU curve of every size in objects (not with sampling).
    pub curve: bool,
}

/// One run's result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The policy's name.
    pub policy: &'static str,
    /// The cache's capacity.
    pub size: u64,
    /// The filter before the cache, unless everything is admitted.
    #[serde(serialize_with = "admission")]
    pub admission: Option<String>,
    /// Requests counted (after warm-up; deletes and trims are not requests).
    pub requests: u64,
    /// Requests that missed; an estimate when sampled.
    pub misses: u64,
    /// Bytes asked for.
    pub request_bytes: u64,
    /// Bytes asked for by requests that missed; an estimate when sampled.
    pub miss_bytes: u64,
    /// misses / requests.
    pub miss_ratio: f64,
    /// miss_bytes / request_bytes.
    pub byte_miss_ratio: f64,
    /// Share of the objects simulated, when sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample_rate: Option<f64>,
    /// Standard error of the miss ratio, when sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub miss_ratio_error: Option<f64>,
    /// A point of the exact LRU curve, which no job asked for.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub curve: bool,
}

/// A filter, or `all`.
#[allow(clippy::ref_option, reason = "the signature that serde calls")]
fn admission<S: serde::Serializer>(filter: &Option<String>, s: S) -> Result<S::Ok, S::Error> {
    s.serialize_str(filter.as_deref().unwrap_or("all"))
}

/// What a sweep found.
#[derive(Debug)]
pub struct Found {
    /// One row a job.
    pub rows: Vec<Row>,
    /// The exact LRU curve, when asked for.
    pub curve: Option<LruCurve>,
    /// Distinct objects simulated.
    pub objects: u64,
    /// Bytes of memory held at the end by interning and by all runs.
    pub memory_bytes: u64,
}

/// Why a sweep stopped.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The trace could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Tags or indices would overflow.
    #[error("the trace has more than {limit} {what}: take a sample of it (--sample)")]
    TooLarge {
        /// Distinct objects, or requests.
        what: &'static str,
        /// How many are possible.
        limit: u64,
    },
    /// The sample has no object.
    #[error(
        "none of the trace's objects is in a sample of {rate} of them: take a larger share (--sample), or all"
    )]
    NothingSampled {
        /// The share.
        rate: f64,
    },
    /// A filter's table does not fit.
    #[error(transparent)]
    Admission(#[from] larder_policy::admission::AdmissionError),
    /// Belady's two readings disagree.
    #[error("the trace changed between its two readings (belady needs the same requests twice)")]
    Changed,
    /// The trace ended before anything was counted.
    #[error(
        "--warmup: '{warmup}': the trace has {requests} requests, so that none is left to count"
    )]
    NothingCounted {
        /// Requests that were to warm up.
        warmup: u64,
        /// Requests in all.
        requests: u64,
    },
}

const CHUNK: usize = 1 << 17;

/// Decodes and interns.
struct Feed<'a, I> {
    items: I,
    interner: Interner,
    sizes: Sizes,
    sample: Option<Sampler>,
    warmup_left: u64,
    /// Indices of next requests, made by a first pass.
    future: Option<&'a [u32]>,
    accesses: u64,
    /// Of all requests after warm-up, sampled or not.
    requests: u64,
    request_bytes: u64,
    /// Bytes asked for by reads that did not say how many, on top of `request_bytes`.
    known_later: f64,
    buffer: Vec<(Item, u8)>,
    done: bool,
}

const NEVER: u32 = u32::MAX;

impl<'a, I: Iterator<Item = Result<Item, TraceError>>> Feed<'a, I> {
    fn new(items: I, sweep: &Sweep, future: Option<&'a [u32]>) -> Self {
        Feed {
            items,
            interner: Interner::new(),
            sizes: Sizes::default(),
            sample: sweep.sample,
            warmup_left: sweep.warmup,
            future,
            accesses: 0,
            requests: 0,
            request_bytes: 0,
            known_later: 0.0,
            buffer: Vec::with_capacity(CHUNK),
            done: false,
        }
    }

    fn fill(&mut self, chunk: &mut Chunk) -> Result<(), SweepError> {
        chunk.clear();
        self.buffer.clear();
        let mut read = 0;
        while self.buffer.len() < CHUNK && read < 64 * CHUNK && !self.done {
            let Some(item) = self.items.next() else {
                self.done = true;
                break;
            };
            let item = item?;
            read += 1;
            let warming = self.warmup_left > 0;
            if !item.removes {
                if warming {
                    self.warmup_left -= 1;
                } else {
                    self.requests += 1;
                    self.request_bytes += u64::from(item.size);
                }
            }
            let part = match &self.sample {
                None => Some(0),
                Some(sampler) => sampler.part(item.id),
            };
            if let Some(part) = part {
                self.buffer.push((item, part));
            }
            if warming {
                chunk.counted_from = self.buffer.len();
            }
        }
        self.intern(chunk)
    }

    fn intern(&mut self, chunk: &mut Chunk) -> Result<(), SweepError> {
        for at in 0..self.buffer.len() {
            if let Some((ahead, _)) = self.buffer.get(at + 16) {
                self.interner.prefetch(ahead.id);
            }
            let (item, part) = self.buffer[at];
            let Some(tag) = self.interner.intern(item.id) else {
                return Err(SweepError::TooLarge { what: "objects", limit: u64::from(u32::MAX) });
            };
            chunk.tags.push(tag);
            let (size, resized) = self.sizes.of(tag, &item);
            if resized {
                chunk.resized.push(at as u32);
            }
            if size > item.size && at >= chunk.counted_from {
                // Known by the object alone; of what is not sampled as much as of what is.
                let more = f64::from(size - item.size);
                self.known_later += self.sample.map_or(more, |s| more / s.rate());
            }
            chunk.sizes.push(if item.removes { 0 } else { size });
            chunk.ids.push(item.id);
            if self.sample.is_some() {
                chunk.part.push(part);
            }
            if let Some(future) = self.future {
                let mut next = Access::NEVER;
                if !item.removes {
                    let known = future.get(self.accesses as usize).ok_or(SweepError::Changed)?;
                    if *known != NEVER {
                        next = u64::from(*known);
                    }
                }
                chunk.next.push(next);
            }
            self.accesses += u64::from(!item.removes);
        }
        chunk.known = self.interner.len();
        Ok(())
    }
}

/// The index of the next access to the same object, for each access.
fn look_ahead<I: Iterator<Item = Result<Item, TraceError>>>(
    items: I,
    sweep: &Sweep,
    progress: &mut dyn FnMut(&I, u64),
) -> Result<Vec<u32>, SweepError> {
    let mut feed = Feed::new(items, sweep, None);
    let mut next: Vec<u32> = Vec::new();
    let mut last: Vec<u32> = Vec::new();
    let mut chunk = Chunk::default();
    while !feed.done {
        feed.fill(&mut chunk)?;
        last.resize(chunk.known, NEVER);
        for (&tag, &size) in chunk.tags.iter().zip(&chunk.sizes) {
            if size == 0 {
                continue;
            }
            let index = next.len() as u64;
            if index >= u64::from(NEVER) {
                return Err(SweepError::TooLarge {
                    what: "requests for belady",
                    limit: u64::from(NEVER),
                });
            }
            let before = std::mem::replace(&mut last[tag as usize], index as u32);
            if before != NEVER {
                next[before as usize] = index as u32;
            }
            next.push(NEVER);
        }
        progress(&feed.items, feed.requests);
    }
    Ok(next)
}

/// Simulates every job over the trace that `open` opens (twice, when a job needs the future). `progress` is called now
/// and then with the reader and the number of requests counted so far in this reading.
///
/// # Errors
/// Whatever the trace's reader reports; limits of 2^32 objects (and requests, for Belady); a sample without objects.
pub fn sweep<I: Iterator<Item = Result<Item, TraceError>>>(
    mut open: impl FnMut() -> Result<I, TraceError>,
    sweep: &Sweep,
    mut progress: impl FnMut(&I, u64),
) -> Result<Found, SweepError> {
    let future = if sweep.jobs.iter().any(|job| job.policy.needs_future()) {
        Some(look_ahead(open()?, sweep, &mut progress)?)
    } else {
        None
    };
    let runs: Vec<Mutex<Run>> = plan(sweep)?.into_iter().map(Mutex::new).collect();
    let mut stack = sweep.curve.then(StackDistances::new);
    let mut feed = Feed::new(open()?, sweep, future.as_deref());
    let helpers = sweep.threads.min(runs.len()).saturating_sub(1);
    let (mut chunk, mut coming) = (Chunk::default(), Chunk::default());
    feed.fill(&mut chunk)?;
    while chunk.len() > 0 || !feed.done {
        let turn = AtomicUsize::new(0);
        let work = || {
            while let Some(run) = runs.get(turn.fetch_add(1, Ordering::Relaxed)) {
                // A run that panicked has poisoned its lock; the panic itself is what the caller will see.
                run.lock().unwrap_or_else(std::sync::PoisonError::into_inner).process(&chunk);
            }
        };
        // Threads at the outermost loop only: this one decodes the next chunk, then helps with this one.
        let filled = std::thread::scope(|scope| {
            for _ in 0..helpers {
                scope.spawn(work);
            }
            let filled = feed.fill(&mut coming);
            if let Some(stack) = &mut stack {
                trace_stack(stack, &chunk);
            }
            work();
            filled
        });
        filled?;
        std::mem::swap(&mut chunk, &mut coming);
        progress(&feed.items, feed.requests);
    }
    if sweep.warmup > 0 && feed.requests == 0 {
        let requests = sweep.warmup - feed.warmup_left;
        return Err(SweepError::NothingCounted { warmup: sweep.warmup, requests });
    }
    let runs: Vec<Run> = runs
        .into_iter()
        .map(|run| run.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
        .collect();
    if let Some(sampler) = sweep.sample.filter(|_| feed.requests > 0 && feed.interner.is_empty()) {
        return Err(SweepError::NothingSampled { rate: sampler.rate() });
    }
    let memory = runs.iter().map(Run::memory_bytes).sum::<usize>()
        + feed.interner.memory_bytes()
        + feed.sizes.memory_bytes();
    Ok(Found {
        rows: rows(sweep, &runs, feed.requests, feed.request_bytes + feed.known_later as u64),
        curve: stack.map(|s| s.curve()),
        objects: feed.interner.len() as u64,
        memory_bytes: memory as u64,
    })
}

fn trace_stack(stack: &mut StackDistances, chunk: &Chunk) {
    for (at, (&tag, &size)) in chunk.tags.iter().zip(&chunk.sizes).enumerate() {
        if size == 0 {
            stack.forget(tag);
        } else {
            stack.request(tag, size, at >= chunk.counted_from);
        }
    }
}

/// A run for each job; with sampling, followed by one for each sub-sample.
fn plan(sweep: &Sweep) -> Result<Vec<Run>, SweepError> {
    let build = |job: &Job, size: u64, part: Option<u8>| {
        // The mean object of key-value caches is some hundred bytes; the window of a filter need not be exact.
        let objects = if sweep.unit == Unit::Objects { size } else { size.div_ceil(512) };
        let gate = Gate::new(job.admission, objects, sweep.seed)?;
        Ok::<Run, SweepError>(Run::new(job.policy.build(size, sweep.unit), sweep.unit, part, gate))
    };
    let mut runs = Vec::new();
    for job in &sweep.jobs {
        match &sweep.sample {
            None => runs.push(build(job, job.size, None)?),
            Some(sampler) => {
                runs.push(build(job, sampler.scale(job.size, 1), None)?);
                for part in 0..PARTS {
                    runs.push(build(job, sampler.scale(job.size, PARTS), Some(part))?);
                }
            }
        }
    }
    Ok(runs)
}

pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn rows(sweep: &Sweep, runs: &[Run], requests: u64, request_bytes: u64) -> Vec<Row> {
    let each = if sweep.sample.is_some() { 1 + usize::from(PARTS) } else { 1 };
    sweep
        .jobs
        .iter()
        .zip(runs.chunks(each))
        .map(|(job, runs)| {
            let counts = runs[0].counts;
            let (mut misses, mut miss_bytes, mut error) = (counts.misses, counts.miss_bytes, None);
            if let Some(sampler) = &sweep.sample {
                // "SHARDS-adj": a sample with more or fewer requests than its share has hot objects more or fewer,
                // whose requests hit; misses scale, and the difference counts as hits.
                let scale = |n: u64| (n as f64 / sampler.rate()).round() as u64;
                misses = scale(misses).min(requests);
                miss_bytes = scale(miss_bytes).min(request_bytes);
                let share = requests as f64 * sampler.rate() / f64::from(PARTS);
                let parts: Vec<f64> =
                    runs[1..].iter().map(|r| r.counts.misses as f64 / share.max(1.0)).collect();
                error = Some(standard_error(&parts));
            }
            Row {
                policy: job.policy.name(),
                size: job.size,
                admission: (job.admission != Filter::All).then(|| job.admission.to_string()),
                requests,
                misses,
                request_bytes,
                miss_bytes,
                miss_ratio: ratio(misses, requests),
                byte_miss_ratio: ratio(miss_bytes, request_bytes),
                sample_rate: sweep.sample.map(|s| s.rate()),
                miss_ratio_error: error,
                curve: false,
            }
        })
        .collect()
}
