//! What was measured.

use std::time::Duration;

use hdrhistogram::Histogram;
use larder_trace::Op;
use serde::Serialize;

use crate::connection::Kind;
use crate::options::{Options, Order};
use crate::worker::Outcome;

/// How far a replay has come.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    /// Since the start.
    pub elapsed: Duration,
    /// Requests of the trace that were answered.
    pub completed: u64,
    /// Gets among them.
    pub gets: u64,
    /// Hits among those.
    pub hits: u64,
    /// Errors of any kind.
    pub errors: u64,
    /// Share of the trace that was read, where known.
    pub fraction: Option<f64>,
}

/// Latencies of one kind of request, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Longest.
    pub max: f64,
}

/// Of nanoseconds, to three digits.
pub(crate) fn new_histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, MAX_LATENCY_NS, 3).expect("constant bounds are valid")
}

/// What is in a histogram of nanoseconds.
pub(crate) fn latency(h: &Histogram<u64>) -> Latency {
    let us = |ns: u64| ns as f64 / 1e3;
    let at = |q: f64| us(h.value_at_quantile(q));
    Latency {
        mean: h.mean() / 1e3,
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        max: us(h.max()),
    }
}

/// One kind of request.
#[derive(Clone, Debug, Serialize)]
pub struct OpReport {
    /// `get hit`, `get miss`, `set`, `fill` (set after a miss), `delete`, `other`.
    pub op: &'static str,
    /// Requests answered.
    pub count: u64,
    /// From sending (timed: from when it was due) to the whole reply.
    pub latency_us: Latency,
}

/// The result of a replay. Everything but `warmup`, bytes, losses and verification counts what comes after the warm-up.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The server.
    pub target: String,
    /// Connections.
    pub connections: usize,
    /// Threads.
    pub threads: usize,
    /// Requests in flight on each connection.
    pub pipeline: usize,
    /// `key` or `any`.
    pub order: &'static str,
    /// Factor on the recorded times; absent in a closed loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speed: Option<f64>,
    /// Requests sent before counting began.
    pub warmup: u64,
    /// Requests of the trace that were answered.
    pub requests: u64,
    /// Gets among them.
    pub gets: u64,
    /// Gets that returned the object.
    pub hits: u64,
    /// Gets that did not.
    pub misses: u64,
    /// hits / gets; 0 without gets.
    pub hit_ratio: f64,
    /// Bytes of hits / bytes asked for (of misses, the recorded size).
    pub byte_hit_ratio: f64,
    /// Requests that waited because a get of the same key, or the store after its miss, was under way: an application that
    /// fetches what it misses once sends no second get behind the first. Without stores after misses, none.
    pub held_back: u64,
    /// Stores that the trace asked for.
    pub sets: u64,
    /// Stores after a miss.
    pub fills: u64,
    /// Deletes.
    pub deletes: u64,
    /// Counting, touching.
    pub others: u64,
    /// Stores, deletes and others that the server declined by the protocol's rules (NOT_STORED, NOT_FOUND, EXISTS).
    pub refused: u64,
    /// From the first counted request to the last reply.
    pub seconds: f64,
    /// Requests of the trace a second.
    pub requests_per_second: f64,
    /// Requests and fills a second: what the server did.
    pub operations_per_second: f64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Bytes received.
    pub bytes_received: u64,
    /// SERVER_ERROR object too large for cache.
    pub too_large: u64,
    /// SERVER_ERROR out of memory.
    pub out_of_memory: u64,
    /// CLIENT_ERROR cannot increment or decrement non-numeric value.
    pub not_numeric: u64,
    /// Any other error.
    pub other_errors: u64,
    /// Connections that broke.
    pub connections_lost: u64,
    /// Requests in flight on them.
    pub requests_lost: u64,
    /// The first error, as the server wrote it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_error: Option<String>,
    /// Values whose bytes and age were checked and right (`--verify`).
    pub verified: u64,
    /// Values older than an acknowledged write or delete.
    pub stale: u64,
    /// Values that are not the object's.
    pub damaged: u64,
    /// Records of the trace that were passed over as malformed.
    pub skipped_records: u64,
    /// Furthest behind its time that a request was sent (timed replay), in milliseconds.
    pub behind_ms: f64,
    /// By kind; kinds that did not occur are left out.
    pub operations: Vec<OpReport>,
}

const KINDS: [&str; 6] = ["get hit", "get miss", "set", "fill", "delete", "other"];

/// Latencies up to this are told apart; longer ones count as this long.
const MAX_LATENCY_NS: u64 = 600_000_000_000;

pub(crate) struct Tally {
    latencies: [Histogram<u64>; 6],
    pub(crate) first: Option<u64>,
    pub(crate) last: u64,
    refused: u64,
    too_large: u64,
    out_of_memory: u64,
    not_numeric: u64,
    other_errors: u64,
    failed_gets: u64,
    pub(crate) hit_bytes: u64,
    pub(crate) asked_bytes: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    pub(crate) connections_lost: u64,
    pub(crate) requests_lost: u64,
    pub(crate) verified: u64,
    pub(crate) stale: u64,
    pub(crate) damaged: u64,
    pub(crate) held_back: u64,
    pub(crate) first_error: Option<String>,
}

impl Default for Tally {
    fn default() -> Tally {
        let histogram = || {
            // The bounds are constants that the constructor accepts: low ≥ 1, high ≥ 2 × low, digits ≤ 5.
            new_histogram()
        };
        Tally {
            latencies: std::array::from_fn(|_| histogram()),
            first: None,
            last: 0,
            refused: 0,
            too_large: 0,
            out_of_memory: 0,
            not_numeric: 0,
            other_errors: 0,
            failed_gets: 0,
            hit_bytes: 0,
            asked_bytes: 0,
            bytes_sent: 0,
            bytes_received: 0,
            connections_lost: 0,
            requests_lost: 0,
            verified: 0,
            stale: 0,
            damaged: 0,
            held_back: 0,
            first_error: None,
        }
    }
}

impl Tally {
    pub(crate) fn record(&mut self, kind: Kind, outcome: Outcome, _op: Op, nanos: u64) {
        match outcome {
            Outcome::Refused => self.refused += 1,
            Outcome::TooLarge => self.too_large += 1,
            Outcome::OutOfMemory => self.out_of_memory += 1,
            Outcome::NotNumeric => self.not_numeric += 1,
            Outcome::Error => self.other_errors += 1,
            Outcome::Hit(_) | Outcome::Miss | Outcome::Done => {}
        }
        let class = match (kind, outcome) {
            (Kind::Get, Outcome::Hit(_)) => 0,
            (Kind::Get, Outcome::Miss) => 1,
            (Kind::Get, _) => {
                self.failed_gets += 1;
                return;
            }
            (Kind::Set, _) => 2,
            (Kind::Fill, _) => 3,
            (Kind::Delete, _) => 4,
            (Kind::Other, _) => 5,
        };
        self.latencies[class].saturating_record(nanos.clamp(1, MAX_LATENCY_NS));
    }

    pub(crate) fn merge(&mut self, other: &Tally) {
        for (mine, theirs) in self.latencies.iter_mut().zip(&other.latencies) {
            // Both have the same bounds, so nothing can be out of range.
            let _ = mine.add(theirs);
        }
        self.first = match (self.first, other.first) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.last = self.last.max(other.last);
        self.refused += other.refused;
        self.too_large += other.too_large;
        self.out_of_memory += other.out_of_memory;
        self.not_numeric += other.not_numeric;
        self.other_errors += other.other_errors;
        self.failed_gets += other.failed_gets;
        self.hit_bytes += other.hit_bytes;
        self.asked_bytes += other.asked_bytes;
        self.bytes_sent += other.bytes_sent;
        self.bytes_received += other.bytes_received;
        self.connections_lost += other.connections_lost;
        self.requests_lost += other.requests_lost;
        self.verified += other.verified;
        self.stale += other.stale;
        self.damaged += other.damaged;
        self.held_back += other.held_back;
        if self.first_error.is_none() {
            self.first_error.clone_from(&other.first_error);
        }
    }

    pub(crate) fn report(
        &self,
        options: &Options,
        threads: usize,
        elapsed: Duration,
        skipped_records: u64,
        lag: u64,
    ) -> Report {
        let count = |class: usize| self.latencies[class].len();
        let [hits, misses, sets, fills, deletes, others] = std::array::from_fn(count);
        let gets = hits + misses + self.failed_gets;
        let requests = gets + sets + deletes + others;
        let seconds = match self.first {
            Some(first) => self.last.saturating_sub(first) as f64 / 1e9,
            None => elapsed.as_secs_f64(),
        };
        let ratio = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 / all as f64 };
        let rate = |n: u64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
        let operations = KINDS
            .iter()
            .zip(&self.latencies)
            .filter(|(_, h)| !h.is_empty())
            .map(|(&op, h)| OpReport { op, count: h.len(), latency_us: latency(h) })
            .collect();
        Report {
            target: options.target.to_string(),
            connections: options.connections.max(1),
            threads,
            pipeline: options.pipeline,
            order: match options.order {
                Order::Key => "key",
                Order::Any => "any",
            },
            speed: options.speed,
            warmup: options.warmup,
            requests,
            gets,
            hits,
            misses,
            hit_ratio: ratio(hits, gets),
            byte_hit_ratio: ratio(self.hit_bytes, self.asked_bytes),
            held_back: self.held_back,
            sets,
            fills,
            deletes,
            others,
            refused: self.refused,
            seconds,
            requests_per_second: rate(requests),
            operations_per_second: rate(requests + fills),
            bytes_sent: self.bytes_sent,
            bytes_received: self.bytes_received,
            too_large: self.too_large,
            out_of_memory: self.out_of_memory,
            not_numeric: self.not_numeric,
            other_errors: self.other_errors,
            connections_lost: self.connections_lost,
            requests_lost: self.requests_lost,
            first_error: self.first_error.clone(),
            verified: self.verified,
            stale: self.stale,
            damaged: self.damaged,
            skipped_records,
            behind_ms: if options.speed.is_some() { lag as f64 / 1e6 } else { 0.0 },
            operations,
        }
    }
}
