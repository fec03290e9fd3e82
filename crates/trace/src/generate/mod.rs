//! Seeded generators, as streams: the same specification gives the same requests on every machine.
//!
//! A specification is `KIND?name=value&name=value`; as a trace's name it is written `gen:KIND?…`.

mod azor;
mod blocks;
mod cachebench;
mod memcachier;
mod oltp;
mod simple;
pub(crate) mod spec;
mod touch;
mod tpcc;
mod zipf;

pub use zipf::Zipf;

use larder_base::{Nanos, Rng};

use crate::error::TraceError;
use crate::read::{Progress, Reader};
use crate::request::Request;
use spec::Spec;

/// What a generator draws: the next request without its time.
pub(crate) trait Draw: Send {
    fn draw(&mut self, index: u64, rng: &mut Rng) -> Request;
}

/// The kinds of generators, with one line on each, for help texts.
pub const KINDS: &[(&str, &str)] = &[
    ("fill", "sets objects 0..objects in order, once: objects, value, key, ttl, app"),
    (
        "uniform",
        "gets of uniformly drawn objects: objects, requests, first, value, key, writes, deletes",
    ),
    ("zipf", "gets whose popularity follows Zipf's law: as uniform, and skew"),
    ("scan", "objects in order, each once, over and over: as uniform"),
    ("loop", "the same as scan"),
    (
        "hotcold",
        "a hot share of the objects takes a share of the requests: as uniform, and hot, hot-requests",
    ),
    (
        "memcachier",
        "applications with the Flashield paper's totals: apps, objects, requests, writes, updates, unread; rate 10000",
    ),
    (
        "cachebench",
        "CacheLib's cachebench: dir with config.json, pop.json, sizes.json; objects, requests",
    ),
    (
        "fileserver",
        "block I/O of Holland's file server: size, set, hosts, shared, outside, writes, volume, requests, scale",
    ),
    (
        "oltp",
        "block I/O of a database as measured of TPC-E: data, log, reads, log-share, log-io, skew, requests, scale",
    ),
    (
        "oltp-backup",
        "the same with a backup that reads the volume once: as oltp, and volume, backup-io, backup-from",
    ),
    (
        "specsfs",
        "block I/O of a file server, metadata marked: size, touched, metadata, writes, skew, requests, scale",
    ),
    ("tpch", "block reads of a data warehouse: size, index, lookups, skew, requests, scale"),
    ("tpcc", "block I/O of an order-entry database: size, written, requests, scale"),
];

/// The generator that `spec` (`KIND?name=value&…`) describes.
///
/// # Errors
/// An unknown kind or option, a value that is not a number or lies outside its range.
pub fn parse(text: &str) -> Result<Box<dyn Reader>, TraceError> {
    let mut spec = Spec::parse(text)?;
    let kind = spec.kind().to_owned();
    let mut default_rate = 0.0;
    let (requests, draw): (u64, Box<dyn Draw>) = match kind.as_str() {
        "memcachier" => {
            default_rate = 10_000.0;
            memcachier::build(&mut spec)?
        }
        "cachebench" => cachebench::build(&mut spec)?,
        "fileserver" => blocks::file_server(&mut spec)?,
        "oltp" | "oltp-backup" => oltp::build(&mut spec)?,
        "specsfs" => azor::spec_sfs(&mut spec)?,
        "tpch" => azor::tpc_h(&mut spec)?,
        "tpcc" => tpcc::build(&mut spec)?,
        "fill" | "uniform" | "zipf" | "scan" | "loop" | "hotcold" => simple::build(&mut spec)?,
        _ => {
            let known: Vec<&str> = KINDS.iter().map(|(k, _)| *k).collect();
            return Err(
                spec.error(format!("unknown generator '{kind}'; known are {}", known.join(", ")))
            );
        }
    };
    let seed = spec.number("seed", 1, 0..=u64::MAX)?;
    // Without a rate there are no times; a rate of 0 would be another name for that, and surprise who meant another.
    let rate = spec.float("rate", default_rate, 1e-6..=1e9)?;
    spec.finish()?;
    let mut rng = Rng::new(seed);
    let arrivals = rng.fork(1);
    Ok(Box::new(Generated { draw, rng, arrivals, rate, clock: 0.0, done: 0, requests }))
}

struct Generated {
    draw: Box<dyn Draw>,
    rng: Rng,
    arrivals: Rng,
    /// Requests per second of the Poisson process that gives times; 0 gives none.
    rate: f64,
    clock: f64,
    done: u64,
    requests: u64,
}

impl Iterator for Generated {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done == self.requests {
            return None;
        }
        let mut request = self.draw.draw(self.done, &mut self.rng);
        if self.rate > 0.0 {
            request.time = Some(Nanos(self.clock as u64));
            // Exponential gaps; 1 − u is never 0.
            self.clock += -(1.0 - self.arrivals.unit()).ln() / self.rate * 1e9;
        }
        self.done += 1;
        Some(Ok(request))
    }
}

impl Reader for Generated {
    fn progress(&self) -> Progress {
        Progress { done: self.done, total: Some(self.requests) }
    }
}
