//! A trace whose future is known: for each request, when its object is read next and when the version ends.

use larder_engine::dram::{footprint, object_bytes};
use larder_format::RecordMeta;
use larder_format::page::{EXTENT_ALIGN, SMALL_MAX};
use larder_format::record_len;
use larder_policy::admission::Objective;
use larder_trace::Request;

use crate::kv::{MAX_VALUE, key_len};
use crate::mrc::Interner;

/// A time that does not come.
pub(super) const NEVER: u32 = u32::MAX;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::lab) enum Ask {
    Read,
    /// A new version, whatever was there.
    Write,
    Remove,
    /// Nothing that changes what is cached.
    Other,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(in crate::lab) struct Step {
    pub(in crate::lab) tag: u32,
    /// Bytes of key and value.
    pub(in crate::lab) bytes: u32,
    /// What a record of it takes on flash.
    pub(in crate::lab) record: u32,
    /// What it takes of the DRAM for objects.
    pub(in crate::lab) dram: u32,
    pub(in crate::lab) ask: Ask,
    /// Of the tag's reads, the number of the first that comes after this request, over all tags.
    pub(super) first_read: u32,
    /// When a write or a removal ends the version that is there after this request.
    pub(super) ends: u32,
    /// The first request at which the object has expired.
    pub(in crate::lab) expires: u32,
}

/// Requests with their futures. 36 bytes a request, and 8 a read.
pub struct Known {
    pub(in crate::lab) steps: Vec<Step>,
    /// Requests that are reads, by tag and then in their order.
    pub(super) reads: Vec<u32>,
    /// Where each tag's reads begin.
    pub(super) starts: Vec<u32>,
    pub(super) tags: usize,
}

/// More requests, or objects, than numbers of 32 bits can name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the trace has more than 2^32 - 2 requests: limit it")]
pub struct TooLong;

impl Known {
    /// Looks ahead in `requests`.
    ///
    /// # Errors
    /// [`TooLong`].
    pub fn of(requests: &[Request]) -> Result<Known, TooLong> {
        if requests.len() >= NEVER as usize {
            return Err(TooLong);
        }
        let mut interner = Interner::new();
        let mut steps = Vec::with_capacity(requests.len());
        let mut counts: Vec<u32> = Vec::new();
        for r in requests {
            let tag = interner.intern(r.id).ok_or(TooLong)?;
            let (key, value) = (usize::from(key_len(r)), r.size.min(MAX_VALUE) as usize);
            let ask = if r.op.is_read() {
                Ask::Read
            } else if r.op.is_removal() {
                Ask::Remove
            } else if r.op.is_write() {
                Ask::Write
            } else {
                Ask::Other
            };
            if counts.len() <= tag as usize {
                counts.push(0);
            }
            counts[tag as usize] += u32::from(ask == Ask::Read);
            steps.push(Step {
                tag,
                bytes: (key + value) as u32,
                record: record_bytes(r, key, value),
                dram: footprint(object_bytes(key, value)) as u32,
                ask,
                first_read: 0,
                ends: NEVER,
                expires: NEVER,
            });
        }
        let tags = counts.len();
        let mut starts = Vec::with_capacity(tags + 1);
        let mut at = 0;
        for n in counts {
            starts.push(at);
            at += n;
        }
        starts.push(at);
        let mut known = Known { steps, reads: vec![0; at as usize], starts, tags };
        known.look_ahead();
        known.expire(requests);
        Ok(known)
    }

    /// From the last request to the first.
    fn look_ahead(&mut self) {
        let mut next_read: Vec<u32> = self.starts[1..].to_vec();
        let mut ends = vec![NEVER; self.tags];
        for (i, step) in self.steps.iter_mut().enumerate().rev() {
            let tag = step.tag as usize;
            step.first_read = next_read[tag];
            step.ends = ends[tag];
            match step.ask {
                Ask::Read => {
                    next_read[tag] -= 1;
                    self.reads[next_read[tag] as usize] = i as u32;
                }
                Ask::Write | Ask::Remove => ends[tag] = i as u32,
                Ask::Other => {}
            }
        }
    }

    /// An object that is brought in by a request with a time to live is gone at the first request after that.
    fn expire(&mut self, requests: &[Request]) {
        if requests.iter().all(|r| r.ttl == 0) {
            return;
        }
        for (step, r) in self.steps.iter_mut().zip(requests) {
            if let (true, Some(time)) = (r.ttl > 0, r.time) {
                let until = time.0.saturating_add(u64::from(r.ttl) * 1_000_000_000);
                let at = requests.partition_point(|r| r.time.is_none_or(|t| t.0 < until));
                step.expires = if at < requests.len() { at as u32 } else { NEVER };
            }
        }
    }

    /// Requests.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Distinct objects.
    pub fn objects(&self) -> usize {
        self.tags
    }

    /// Mean bytes of the records of what is asked for.
    pub fn mean_record(&self) -> f64 {
        let sum: u64 = self.steps.iter().map(|s| u64::from(s.record)).sum();
        sum as f64 / self.steps.len().max(1) as f64
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// When what was last asked for by request `at` is read next, before `end`.
    pub(super) fn next_read(&self, at: u32, end: u32) -> u32 {
        let step = &self.steps[at as usize];
        let last = self.starts[step.tag as usize + 1];
        if step.first_read >= last {
            return NEVER;
        }
        let next = self.reads[step.first_read as usize];
        if next < end.min(step.ends) { next } else { NEVER }
    }

    /// The reads, by their place in [`Known::reads`], that come after request `at` of the version that it left, before `end`.
    pub(super) fn reads_until(&self, at: u32, end: u32) -> (usize, usize) {
        let step = &self.steps[at as usize];
        let (from, to) = (step.first_read as usize, self.starts[step.tag as usize + 1] as usize);
        let end = end.min(step.ends);
        (from, from + self.reads[from..to].partition_point(|&read| read < end))
    }

    /// The least that an object is worth that is read once, and more than any is worth.
    pub(super) fn gains(&self, objective: Objective) -> (f64, f64) {
        let mut most_reads = 0;
        for range in self.starts.windows(2) {
            most_reads = (range[1] - range[0]).max(most_reads);
        }
        let one = |step: &Step| match objective {
            Objective::Requests => 1.0 / f64::from(step.record),
            Objective::Bytes => f64::from(step.bytes) / f64::from(step.record),
        };
        let (mut least, mut most) = (f64::MAX, 0.0);
        for gain in self.steps.iter().map(one) {
            (least, most) = (gain.min(least), gain.max(most));
        }
        if self.steps.is_empty() {
            return (1.0, 1.0);
        }
        (least, most * f64::from(most_reads + 1) * 1.01)
    }
}

/// What a record takes on flash: header, key and value, and the padding to the next 64 bytes if it is a large one.
fn record_bytes(r: &Request, key: usize, value: usize) -> u32 {
    let mut meta = RecordMeta::default();
    if r.ttl > 0 {
        meta.expiry = larder_base::Expiry::at(larder_base::UnixSecs(crate::kv::EPOCH));
    }
    if r.app != 0 {
        meta.app = larder_base::AppId(1);
    }
    let bytes = record_len(&meta, key, value);
    let bytes = if bytes > SMALL_MAX { bytes.next_multiple_of(EXTENT_ALIGN) } else { bytes };
    bytes as u32
}
