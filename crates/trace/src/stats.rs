//! What a trace holds: one pass, exact (but percentiles, to a thousandth), with memory for each distinct object (40 to 85 bytes) and, of block I/O, for each
//! disjoint range of bytes touched (twice 40 or so).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use hdrhistogram::Histogram;
use larder_base::Nanos;
use serde::Serialize;

use crate::extents::{Extents, Streams};
use crate::request::{Class, Op, Request, mix};

/// Ids are spread by one multiplication-xor round; neighbouring numbers must not share low bits.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = mix(self.0 ^ u64::from(b));
        }
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = mix(n);
    }
}

#[derive(Clone, Copy)]
struct Object {
    size: u64,
    requests: u32,
    /// The present version was written by a recorded write and has not been read.
    unread: bool,
}

struct Sizes(Histogram<u64>);

impl Default for Sizes {
    fn default() -> Sizes {
        Sizes(Histogram::new(3).expect("three digits are within its limits"))
    }
}

/// Collects [`Stats`].
#[derive(Default)]
pub struct Collector {
    objects: HashMap<u64, Object, BuildHasherDefault<IdHasher>>,
    ops: [u64; Op::ALL.len()],
    op_bytes: [u64; Op::ALL.len()],
    apps: BTreeMap<u32, u64>,
    more_apps: u64,
    requests: u64,
    bytes: u64,
    key_bytes: u64,
    keyed: u64,
    first: Option<Nanos>,
    last: Option<Nanos>,
    untimed: u64,
    with_ttl: u64,
    /// Requests by size, to three digits.
    sizes: Sizes,
    min_size: u64,
    max_size: u64,
    under_1k: u64,
    unread_writes: u64,
    /// Block reads and writes: how many, what they touch, and which continue others.
    block_requests: u64,
    touched: Extents,
    streams: Streams,
    sequential: u64,
    sequential_bytes: u64,
    block_bytes: u64,
    touched_apart: Extents,
    metadata: u64,
    classed: u64,
    hosts: BTreeSet<u16>,
}

/// Applications counted one by one.
const APPS: usize = 4096;

/// What a trace holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stats {
    /// Requests.
    pub requests: u64,
    /// Distinct ids.
    pub objects: u64,
    /// Sum of the latest size of every object, in bytes: the cache that would hold everything.
    pub footprint_bytes: u64,
    /// Bytes of all requests.
    pub request_bytes: u64,
    /// Mean size of a request, in bytes.
    pub mean_size: f64,
    /// Mean size of an object, in bytes.
    pub mean_object_size: f64,
    /// Smallest request.
    pub min_size: u64,
    /// Largest request.
    pub max_size: u64,
    /// Median size, to a thousandth.
    pub median_size: u64,
    /// 99th percentile of the size, to a thousandth.
    pub p99_size: u64,
    /// Share of requests for less than 1 KiB.
    pub under_1k: f64,
    /// Mean key size, of requests that state one.
    pub mean_key_size: f64,
    /// Share of requests that bring data.
    pub write_share: f64,
    /// Share of requested bytes that are written.
    pub write_byte_share: f64,
    /// Share of recorded writes whose data nobody read before they were overwritten, removed, or the trace ended;
    /// 0 without writes.
    pub unread_write_share: f64,
    /// Share of objects that are requested once.
    pub one_hit_share: f64,
    /// Requests per object.
    pub requests_per_object: f64,
    /// Misses no cache avoids, over requests: objects / requests.
    pub compulsory_miss_ratio: f64,
    /// Whether every request has a time.
    pub timed: bool,
    /// From the first to the last request, in seconds.
    pub seconds: f64,
    /// Requests a second over that time; 0 without times.
    pub requests_per_second: f64,
    /// Share of requests with a time to live.
    pub ttl_share: f64,
    /// Requests by operation, those that occur.
    pub operations: BTreeMap<&'static str, u64>,
    /// Number of distinct applications, tenants or devices (counted up to 4,096).
    pub applications: u64,
    /// Share of requests that read.
    pub read_share: f64,
    /// Number of clients before a server, where the trace tells them apart (1 otherwise).
    pub hosts: u64,
    /// What only block reads and writes have; absent without any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<BlockStats>,
}

/// What block reads and writes touch. Trims are left out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BlockStats {
    /// Reads and writes.
    pub requests: u64,
    /// Distinct bytes read or written, to the byte.
    pub unique_bytes: u64,
    /// Share of them that continue another: they start where one of the last 64 requests, or of the last 64 streams, of
    /// their volume ended.
    pub sequential_share: f64,
    /// Share of the bytes that they bring.
    pub sequential_byte_share: f64,
    /// Distinct bytes read or written by the others: the data set under sequentiality rejection.
    pub nonsequential_unique_bytes: u64,
    /// Share of reads and writes marked as metadata; none where nothing is marked.
    pub metadata_share: Option<f64>,
}

impl Collector {
    /// A collector that has seen nothing.
    pub fn new() -> Collector {
        Collector { min_size: u64::MAX, ..Collector::default() }
    }

    /// Takes one request into account.
    pub fn add(&mut self, r: &Request) {
        self.requests += 1;
        self.bytes = self.bytes.saturating_add(r.size);
        self.ops[r.op as usize] += 1;
        self.op_bytes[r.op as usize] = self.op_bytes[r.op as usize].saturating_add(r.size);
        if r.key_size > 0 {
            self.keyed += 1;
            self.key_bytes += u64::from(r.key_size);
        }
        match r.time {
            Some(t) => {
                self.first.get_or_insert(t);
                self.last = Some(t);
            }
            None => self.untimed += 1,
        }
        self.with_ttl += u64::from(r.ttl > 0);
        // It grows to any size.
        self.sizes.0.record(r.size).ok();
        self.min_size = self.min_size.min(r.size);
        self.max_size = self.max_size.max(r.size);
        self.under_1k += u64::from(r.size < 1024);
        if self.apps.len() < APPS || self.apps.contains_key(&r.app) {
            *self.apps.entry(r.app).or_default() += 1;
        } else {
            self.more_apps += 1;
        }
        if matches!(r.op, Op::Read | Op::Write) {
            self.add_block(r);
        }
        if self.hosts.len() < APPS || self.hosts.contains(&r.host) {
            self.hosts.insert(r.host);
        }
        let object =
            self.objects.entry(r.id).or_insert(Object { size: 0, requests: 0, unread: false });
        object.requests = object.requests.saturating_add(1);
        if r.size > 0 {
            object.size = r.size;
        }
        if r.op.is_write() {
            self.unread_writes += u64::from(object.unread);
            object.unread = true;
        } else if r.op.is_read() {
            object.unread = false;
        } else if r.op.is_removal() {
            self.unread_writes += u64::from(object.unread);
            object.unread = false;
        }
    }

    fn add_block(&mut self, r: &Request) {
        self.block_requests += 1;
        self.block_bytes = self.block_bytes.saturating_add(r.size);
        self.touched.add(r.app, r.offset, r.size);
        if self.streams.continues(r.app, r.offset, r.size) {
            self.sequential += 1;
            self.sequential_bytes = self.sequential_bytes.saturating_add(r.size);
        } else {
            self.touched_apart.add(r.app, r.offset, r.size);
        }
        self.metadata += u64::from(r.class == Class::Metadata);
        self.classed += u64::from(r.class != Class::Unstated);
    }

    fn percentile(&self, share: f64) -> u64 {
        if self.requests == 0 {
            return 0;
        }
        self.sizes.0.value_at_quantile(share).clamp(self.min_size, self.max_size)
    }

    /// The figures over everything seen.
    pub fn finish(&self) -> Stats {
        let over = |part: f64, all: u64| if all == 0 { 0.0 } else { part / all as f64 };
        let share = |part: u64, all: u64| over(part as f64, all);
        let objects = self.objects.len() as u64;
        let footprint = self.objects.values().fold(0u64, |n, o| n.saturating_add(o.size));
        let once = self.objects.values().filter(|o| o.requests == 1).count() as u64;
        let at_end = self.objects.values().filter(|o| o.unread).count() as u64;
        let sum = |of: &[u64], pick: fn(Op) -> bool| {
            Op::ALL.iter().filter(|op| pick(**op)).map(|op| of[*op as usize]).sum::<u64>()
        };
        let writes = sum(&self.ops, Op::is_write);
        let seconds = match (self.first, self.last) {
            (Some(a), Some(b)) => (b - a).as_secs_f64(),
            _ => 0.0,
        };
        Stats {
            requests: self.requests,
            objects,
            footprint_bytes: footprint,
            request_bytes: self.bytes,
            mean_size: share(self.bytes, self.requests),
            mean_object_size: share(footprint, objects),
            min_size: if self.requests == 0 { 0 } else { self.min_size },
            max_size: self.max_size,
            median_size: self.percentile(0.5),
            p99_size: self.percentile(0.99),
            under_1k: share(self.under_1k, self.requests),
            mean_key_size: share(self.key_bytes, self.keyed),
            write_share: share(writes, self.requests),
            write_byte_share: share(sum(&self.op_bytes, Op::is_write), self.bytes),
            unread_write_share: share(self.unread_writes + at_end, writes),
            one_hit_share: share(once, objects),
            requests_per_object: share(self.requests, objects),
            compulsory_miss_ratio: share(objects, self.requests),
            timed: self.requests > 0 && self.untimed == 0,
            seconds,
            requests_per_second: if seconds > 0.0 { self.requests as f64 / seconds } else { 0.0 },
            ttl_share: share(self.with_ttl, self.requests),
            operations: Op::ALL
                .iter()
                .filter(|op| self.ops[**op as usize] > 0)
                .map(|op| (op.name(), self.ops[*op as usize]))
                .collect(),
            applications: self.apps.len() as u64,
            read_share: share(sum(&self.ops, Op::is_read), self.requests),
            hosts: self.hosts.len() as u64,
            block: (self.block_requests > 0).then(|| BlockStats {
                requests: self.block_requests,
                unique_bytes: self.touched.bytes(),
                sequential_share: share(self.sequential, self.block_requests),
                sequential_byte_share: share(self.sequential_bytes, self.block_bytes),
                nonsequential_unique_bytes: self.touched_apart.bytes(),
                metadata_share: (self.classed > 0)
                    .then(|| share(self.metadata, self.block_requests)),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_sizes_that_occur_to_a_thousandth() {
        let of = |sizes: &[u64]| {
            let mut c = Collector::new();
            sizes.iter().for_each(|&size| c.add(&Request::get(1, size)));
            let s = c.finish();
            (s.median_size, s.p99_size)
        };
        assert_eq!(of(&[257; 9]), (257, 257));
        assert_eq!(of(&[]), (0, 0));
        assert_eq!(of(&[0, 0, 9]), (0, 9));
        let (median, p99) = of(&(1..=100_000).collect::<Vec<_>>());
        assert!(median.abs_diff(50_000) <= 50 && p99.abs_diff(99_000) <= 99, "{median} {p99}");
        // The largest of all are counted too.
        assert!(of(&[u64::MAX, u64::MAX - 1]).1 >= u64::MAX - 1);
    }

    #[test]
    fn counts() {
        let mut c = Collector::new();
        let set = |id| Request { op: Op::Set, ..Request::get(id, 100) };
        let delete = |id| Request { op: Op::Delete, ..Request::get(id, 0) };
        // 1: written, read, rewritten and never read. 2: written, removed unread. 3: read only.
        for r in [set(1), Request::get(1, 100), set(1), set(2), delete(2), Request::get(3, 50)] {
            c.add(&r);
        }
        let s = c.finish();
        assert_eq!((s.requests, s.objects, s.footprint_bytes, s.request_bytes), (6, 3, 250, 450));
        assert_eq!(s.unread_write_share, 2.0 / 3.0);
        assert_eq!(s.write_share, 0.5);
        assert_eq!(s.one_hit_share, 1.0 / 3.0);
        assert!(!s.timed);
        assert_eq!(s.operations["set"], 3);
        assert_eq!((s.block, s.hosts, s.read_share), (None, 1, 2.0 / 6.0));
    }

    #[test]
    fn blocks_touched_and_continued() {
        let mut c = Collector::new();
        let io = |op, offset, size| Request::block(op, 3, offset, size);
        let metadata = Request { class: Class::Metadata, host: 2, ..io(Op::Write, 0, 4096) };
        // Two reads in a row, one that overlaps both, a write of metadata over the first, a trim.
        for r in [
            io(Op::Read, 0, 8192),
            io(Op::Read, 8192, 8192),
            io(Op::Read, 4096, 8192),
            metadata,
            io(Op::Trim, 1 << 20, 4096),
        ] {
            c.add(&r);
        }
        let s = c.finish();
        let b = s.block.unwrap();
        assert_eq!((b.requests, b.unique_bytes, b.nonsequential_unique_bytes), (4, 16_384, 12_288));
        assert_eq!((b.sequential_share, b.metadata_share), (0.25, Some(0.25)));
        assert_eq!(b.sequential_byte_share, 8192.0 / 28_672.0);
        assert_eq!((s.hosts, s.read_share), (2, 0.6));
    }
}
