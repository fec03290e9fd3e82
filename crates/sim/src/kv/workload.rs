//! Timed workloads with sizes and updates, on which admission policies are compared.

use std::path::{Path, PathBuf};

use larder_base::{Nanos, Rng};
use larder_trace::generate::{self, Zipf};
use larder_trace::{Op, Options, Request, TraceError, mix};

/// A workload by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Its name.
    pub name: &'static str,
    /// One line on it.
    pub about: &'static str,
    source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Churn,
    Scan,
    Sessions,
    Phases,
    Bursts,
    Memcachier,
    /// Directory below the traces' one, in the layout of cachebench.
    Cachebench(&'static str),
    /// File below the traces' directory.
    File(&'static str),
}

/// All workloads.
pub const WORKLOADS: [Workload; 9] = [
    Workload {
        name: "memcachier",
        about: "eight applications with the totals that the Flashield paper gives of Memcachier",
        source: Source::Memcachier,
    },
    Workload {
        name: "kvcache",
        about: "CacheLib's published kvcache_reg: popularity, sizes, 1 set to 3.6 gets",
        source: Source::Cachebench("cachelib/kvcache_reg"),
    },
    Workload {
        name: "churn",
        about: "Zipf 0.9 whose popular objects are replaced by new ones; 10 % updates, 1 % deletes; 64 B to 2 KiB",
        source: Source::Churn,
    },
    Workload {
        name: "scan",
        about: "Zipf 0.9 with 2 % updates, and scans of a larger catalogue as 30 % of the requests; 100 B to 1 KiB",
        source: Source::Scan,
    },
    Workload {
        name: "sessions",
        about: "sessions read and updated for a while, a feed read once or twice or never, and a Zipf 0.8 catalogue",
        source: Source::Sessions,
    },
    Workload {
        name: "phases",
        about: "two Zipf 1.0 catalogues of unlike sizes that take turns in popularity, four turns a run; 5 % updates",
        source: Source::Phases,
    },
    Workload {
        name: "bursts",
        about: "objects written, read in bursts with pauses between, and forgotten; half are never read; 8 % updates",
        source: Source::Bursts,
    },
    Workload {
        name: "zipf09",
        about: "the shared trace of Zipf 0.9 with real sizes: windows of it, one per seed",
        source: Source::File("kv/kv_zipf09.lsmsim.csv.zst"),
    },
    Workload {
        name: "adaptsize",
        about: "the shared CDN trace, objects up to 64 KiB; 66,297 requests, seeds change hashing and draws only",
        source: Source::File("kv/kv_adaptsize64k.lsmsim.csv.zst"),
    },
];

impl Workload {
    /// The workload of this name.
    pub fn named(name: &str) -> Option<Workload> {
        WORKLOADS.into_iter().find(|w| w.name == name)
    }

    /// What must lie below the directory of traces for it, if anything.
    pub fn needs(&self, traces: &Path) -> Option<PathBuf> {
        match self.source {
            Source::Cachebench(path) | Source::File(path) => Some(traces.join(path)),
            _ => None,
        }
    }

    /// About so many requests of it, with times that never run backwards.
    ///
    /// # Errors
    /// A trace that is absent or malformed.
    pub fn requests(
        &self,
        seed: u64,
        requests: u64,
        traces: &Path,
    ) -> Result<Vec<Request>, TraceError> {
        let objects = (requests / 5).max(2000);
        match self.source {
            Source::Churn => Ok(churn(seed, requests, objects)),
            Source::Scan => Ok(scan(seed, requests, objects)),
            Source::Sessions => Ok(sessions(seed, requests, objects)),
            Source::Phases => Ok(phases(seed, requests, objects)),
            Source::Bursts => Ok(bursts(seed, requests, objects)),
            Source::Memcachier => collect(&format!(
                "memcachier?objects={objects}&requests={requests}&seed={seed}&rate={RATE}"
            )),
            Source::Cachebench(path) => collect(&format!(
                "cachebench?dir={}&objects={objects}&requests={requests}&seed={seed}&rate={RATE}",
                traces.join(path).display()
            )),
            Source::File(path) => window(&traces.join(path), seed, requests),
        }
    }
}

/// Requests per second of the generated workloads.
const RATE: f64 = 1000.0;

fn collect(spec: &str) -> Result<Vec<Request>, TraceError> {
    generate::parse(spec)?.collect()
}

/// `requests` of a trace, from a place that the seed chooses; the whole trace if it has no more.
fn window(file: &Path, seed: u64, requests: u64) -> Result<Vec<Request>, TraceError> {
    let name = file.display().to_string();
    let options = Options { rate: Some(RATE), ..Options::default() };
    // Eight windows tile a trace of that many; a shorter one is read from its start.
    let skip = ((seed.wrapping_sub(1)) % 5 * requests) as usize;
    let mut all = Vec::new();
    for request in larder_trace::open(&name, &options)?.reader {
        all.push(request?);
        if all.len() >= skip + requests as usize {
            break;
        }
    }
    let start = skip.min(all.len().saturating_sub(requests as usize));
    all.drain(..start);
    all.truncate(requests as usize);
    let first = all.first().and_then(|r| r.time).unwrap_or(Nanos::ZERO);
    for r in &mut all {
        r.time = r.time.map(|t| t.saturating_sub(first));
    }
    Ok(all)
}

/// Poisson arrivals at [`RATE`].
struct Clock(f64);

impl Clock {
    fn next(&mut self, rng: &mut Rng) -> Nanos {
        self.0 += -(1.0 - rng.unit()).ln() / RATE * 1e9;
        Nanos(self.0 as u64)
    }
}

/// A size of the object, the same at each of its requests; log-uniform.
fn size_of(id: u64, low: f64, high: f64) -> u64 {
    let u = (mix(id ^ 0x5157) >> 11) as f64 / (1u64 << 53) as f64;
    (low * (high / low).powf(u)).round() as u64
}

fn request(time: Nanos, op: Op, id: u64, size: u64, app: u32) -> Request {
    Request { time: Some(time), op, key_size: 24, app, ..Request::get(id, size) }
}

fn churn(seed: u64, requests: u64, objects: u64) -> Vec<Request> {
    let mut rng = Rng::new(seed ^ 0x63_6875_726e);
    let zipf = Zipf::new(objects, 0.9);
    let mut clock = Clock(0.0);
    // A rank's object is replaced every `period` requests, each rank at its own moment.
    let period = requests / 2;
    (0..requests)
        .map(|i| {
            let rank = zipf.draw(&mut rng);
            let epoch = (i + mix(rank ^ seed) % period) / period;
            let id = mix(rank << 8 | epoch);
            let op = match rng.unit() {
                u if u < 0.10 => Op::Set,
                u if u < 0.11 => Op::Delete,
                _ => Op::Get,
            };
            request(clock.next(&mut rng), op, id, size_of(id, 64.0, 2048.0), 0)
        })
        .collect()
}

fn scan(seed: u64, requests: u64, objects: u64) -> Vec<Request> {
    let mut rng = Rng::new(seed ^ 0x7363_616e);
    let zipf = Zipf::new(objects, 0.9);
    let mut clock = Clock(0.0);
    let catalogue = objects * 2;
    let burst = (objects / 10).max(100);
    let (mut at, mut left) = (rng.below(catalogue), 0u64);
    (0..requests)
        .map(|_| {
            // Scans and other requests mix: while a scan runs, three of four requests are its.
            if left == 0 && rng.chance(0.3 / (burst as f64 / 0.75 * 0.8)) {
                left = burst;
            }
            if left > 0 && rng.chance(0.75) {
                left -= 1;
                at = (at + 1) % catalogue;
                let id = mix(1 << 60 | at);
                return request(clock.next(&mut rng), Op::Get, id, size_of(id, 100.0, 1000.0), 0);
            }
            let id = mix(zipf.draw(&mut rng));
            let op = if rng.chance(0.02) { Op::Set } else { Op::Get };
            request(clock.next(&mut rng), op, id, size_of(id, 100.0, 1000.0), 0)
        })
        .collect()
}

fn sessions(seed: u64, requests: u64, objects: u64) -> Vec<Request> {
    let mut rng = Rng::new(seed ^ 0x0073_6573_7369_6f6e);
    let zipf = Zipf::new(objects, 0.8);
    let mut clock = Clock(0.0);
    let mut next_id = 0u64;
    // Sessions that go on, each with requests left; reads of the feed that are due, by request number.
    let mut open: Vec<(u64, u32)> = Vec::new();
    let mut due: std::collections::BTreeSet<(u64, u64)> = std::collections::BTreeSet::new();
    let mut out = Vec::with_capacity(requests as usize);
    for i in 0..requests {
        let time = clock.next(&mut rng);
        if let Some(&(when, id)) = due.first()
            && when <= i
        {
            due.remove(&(when, id));
            out.push(request(time, Op::Get, id, size_of(id, 80.0, 800.0), 2));
            continue;
        }
        let u = rng.unit();
        if u < 0.12 {
            // The feed: 60 % never read, the others once or twice, soon.
            next_id += 1;
            let id = mix(2 << 60 | next_id);
            if rng.chance(0.4) {
                for _ in 0..1 + rng.below(2) {
                    let after = (-(1.0 - rng.unit()).ln() * requests as f64 / 200.0) as u64;
                    due.insert((i + 1 + after, id));
                }
            }
            out.push(request(time, Op::Set, id, size_of(id, 80.0, 800.0), 2));
        } else if u < 0.40 {
            let enough = (objects / 50) as usize;
            let (id, op) = if open.len() < enough || rng.chance(0.08) {
                next_id += 1;
                let id = mix(1 << 60 | next_id);
                open.push((id, 4 + rng.below(24) as u32));
                (id, Op::Set)
            } else {
                let at = rng.below(open.len() as u64) as usize;
                let (id, left) = &mut open[at];
                let id = *id;
                *left -= 1;
                if *left == 0 {
                    open.swap_remove(at);
                }
                (id, if rng.chance(0.15) { Op::Set } else { Op::Get })
            };
            out.push(request(time, op, id, size_of(id, 100.0, 600.0), 1));
        } else {
            let id = mix(zipf.draw(&mut rng));
            let op = if rng.chance(0.01) { Op::Set } else { Op::Get };
            out.push(request(time, op, id, size_of(id, 64.0, 1024.0), 0));
        }
    }
    out
}

fn phases(seed: u64, requests: u64, objects: u64) -> Vec<Request> {
    let mut rng = Rng::new(seed ^ 0x7068_6173_6573);
    let zipf = Zipf::new(objects * 2 / 3, 1.0);
    let mut clock = Clock(0.0);
    (0..requests)
        .map(|i| {
            // Four turns: who has nine of ten requests changes at each.
            let turn = i * 4 / requests.max(1);
            let second = (turn % 2 == 1) == rng.chance(0.9);
            let id = mix(u64::from(second) << 60 | zipf.draw(&mut rng));
            let op = if rng.chance(0.05) { Op::Set } else { Op::Get };
            let (low, high) = if second { (512.0, 4096.0) } else { (64.0, 512.0) };
            let size = size_of(id, low, high);
            request(clock.next(&mut rng), op, id, size, u32::from(second))
        })
        .collect()
}

fn bursts(seed: u64, requests: u64, objects: u64) -> Vec<Request> {
    let mut rng = Rng::new(seed ^ 0x6275_7273_7473);
    let mut clock = Clock(0.0);
    let mut next_id = 0u64;
    // What is due, by request number: object, reads left of the burst, bursts left.
    let mut due: std::collections::BTreeSet<(u64, u64, u32, u32)> =
        std::collections::BTreeSet::new();
    let pause = objects as f64;
    let mut out = Vec::with_capacity(requests as usize);
    for i in 0..requests {
        let time = clock.next(&mut rng);
        let size = |id| size_of(id, 100.0, 1500.0);
        match due.first().copied() {
            Some(entry @ (when, id, reads, bursts)) if when <= i => {
                due.remove(&entry);
                if reads > 1 {
                    due.insert((i + 1 + rng.below(40), id, reads - 1, bursts));
                } else if bursts > 1 {
                    // Exponential pauses, of as many requests as there are objects in the mean.
                    let after = (-(1.0 - rng.unit()).ln() * pause) as u64;
                    due.insert((i + 1 + after, id, 1 + rng.below(5) as u32, bursts - 1));
                }
                let op = if rng.chance(0.08) { Op::Set } else { Op::Get };
                out.push(request(time, op, id, size(id), 0));
            }
            _ => {
                next_id += 1;
                let id = mix(3 << 60 | next_id);
                if rng.chance(0.5) {
                    let bursts = 1 + rng.below(6) as u32;
                    due.insert((i + 1 + rng.below(40), id, 1 + rng.below(5) as u32, bursts));
                }
                out.push(request(time, Op::Set, id, size(id), 0));
            }
        }
    }
    out
}

/// Bytes of the distinct objects of a trace (keys and values, at their last size), and their number.
pub fn footprint(requests: &[Request]) -> (u64, u64) {
    let mut sizes = std::collections::BTreeMap::new();
    for r in requests {
        sizes.insert(r.id, r.size + u64::from(r.key_bytes().max(8)));
    }
    (sizes.values().sum(), sizes.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_workloads_repeat_and_keep_time() {
        for w in WORKLOADS.iter().filter(|w| w.needs(Path::new("")).is_none()) {
            let one = w.requests(3, 20_000, Path::new("")).unwrap();
            assert_eq!(one.len(), 20_000, "{}", w.name);
            assert_eq!(one, w.requests(3, 20_000, Path::new("")).unwrap());
            assert_ne!(one, w.requests(4, 20_000, Path::new("")).unwrap());
            assert!(one.is_sorted_by_key(|r| r.time), "{}", w.name);
            let writes = one.iter().filter(|r| r.op.is_write()).count();
            assert!(writes > 100, "{} has {writes} writes", w.name);
            let (bytes, objects) = footprint(&one);
            assert!(objects > 2000 && bytes / objects > 50, "{}: {bytes} {objects}", w.name);
        }
    }

    #[test]
    fn absent_traces_are_named() {
        let w = Workload::named("zipf09").unwrap();
        let e = w.requests(1, 10, Path::new("/nowhere")).unwrap_err().to_string();
        assert!(e.contains("/nowhere/kv/kv_zipf09"), "{e}");
        assert!(Workload::named("nothing").is_none());
    }
}
