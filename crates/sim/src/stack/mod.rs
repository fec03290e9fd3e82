//! RAM and flash on a client of a file server, as Holland, Angelino, Wald and Seltzer studied them ("Flash caching on the
//! storage client", USENIX ATC '13): three architectures, four policies of writing back, their timings.
//!
//! - [`Stack`]: the caches of one client, block by block; `hosts`: several of them, kept alike.
//! - [`run`]: a workload on so many threads, each of which waits for its answer before it asks again.
//!
//! The flash of `naive` under `s` and `a` decides as the block node does, set by set (`block/tests/stack.rs`); all else is a model alone.
//!
//! Where the slides are silent, this model has: each level is LRU; what a read brings is written to flash behind the
//! reader's back; a dirty block is written down before its frame is used for another, and the request that needs
//! the frame waits; the network is one link in either direction, flash works on `flash_channels` blocks at once, the filer
//! on any number.

mod client;
mod hosts;
mod level;
mod queue;

pub use client::{Counts, Source, Stack};
pub use hosts::Shared;

use std::str::FromStr;

use larder_base::Nanos;
use larder_trace::{Reader, TraceError};
use serde::Serialize;

use hosts::Hosts;

/// How RAM and flash stand to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// RAM before flash before the filer: what is in RAM is on flash too, writes go down step by step.
    Naive,
    /// RAM writes to the filer; flash is written beside it and never dirty.
    Lookaside,
    /// One LRU over the frames of both; a block stays in the frame that it got.
    Unified,
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Architecture; 3] =
        [Architecture::Naive, Architecture::Lookaside, Architecture::Unified];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Naive => "naive",
            Architecture::Lookaside => "lookaside",
            Architecture::Unified => "unified",
        }
    }
}

impl FromStr for Architecture {
    type Err = String;

    fn from_str(text: &str) -> Result<Architecture, String> {
        Architecture::ALL.into_iter().find(|a| a.name() == text).ok_or_else(|| {
            format!("unknown architecture '{text}': choose from naive, lookaside, unified")
        })
    }
}

/// When a dirty block is written to the level below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Before the write is answered.
    Synchronous,
    /// At once, but the write does not wait.
    Asynchronous,
    /// By a syncer, every so many seconds.
    Periodic(u32),
    /// When its frame is needed.
    None,
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Policy, String> {
        let periodic = || text.strip_prefix('p')?.parse().ok().filter(|&n: &u32| n > 0);
        match text {
            "s" => Ok(Policy::Synchronous),
            "a" => Ok(Policy::Asynchronous),
            "n" => Ok(Policy::None),
            _ => periodic().map(Policy::Periodic).ok_or_else(|| {
                format!("unknown policy '{text}': choose s, a, n, or p and seconds, such as p30")
            }),
        }
    }
}

impl std::fmt::Display for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Policy::Synchronous => f.write_str("s"),
            Policy::Asynchronous => f.write_str("a"),
            Policy::Periodic(seconds) => write!(f, "p{seconds}"),
            Policy::None => f.write_str("n"),
        }
    }
}

/// The client's caches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// How they stand to each other.
    pub architecture: Architecture,
    /// Blocks of 4 KiB in RAM, at least 1.
    pub ram_blocks: u32,
    /// Blocks of 4 KiB on flash; 0 is no flash.
    pub flash_blocks: u32,
    /// When RAM is written back.
    pub ram_policy: Policy,
    /// When flash is written back (naive and unified).
    pub flash_policy: Policy,
    /// How long everything takes.
    pub timing: Timing,
    /// A stop and a start of all hosts in the middle.
    pub restart: Option<Restart>,
    /// Seed of which reads of the filer are slow.
    pub seed: u64,
}

/// A clean stop of all hosts, and a start with empty RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restart {
    /// After so many blocks.
    pub after: u64,
    /// Flash is as it was; otherwise empty.
    pub warm: bool,
}

/// Times for one block of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// RAM, reading and writing.
    pub ram: Nanos,
    /// Flash, reading.
    pub flash_read: Nanos,
    /// Flash, writing.
    pub flash_write: Nanos,
    /// Blocks that flash works on at once.
    pub flash_channels: u16,
    /// A packet's base latency.
    pub packet: Nanos,
    /// A block's data on the network.
    pub data: Nanos,
    /// The filer reads fast: from its memory, or what it read ahead.
    pub filer_fast: Nanos,
    /// The filer reads slowly.
    pub filer_slow: Nanos,
    /// The share of fast reads.
    pub fast_share: f64,
    /// The filer writes.
    pub filer_write: Nanos,
}

impl Default for Timing {
    /// The slides' table: 400 ns, 88 µs, 21 µs; 8.2 µs a packet and 1 ns a bit; 92 µs, 7,952 µs, 90 %, 92 µs.
    fn default() -> Timing {
        Timing {
            ram: Nanos(400),
            flash_read: Nanos::from_micros(88),
            flash_write: Nanos::from_micros(21),
            flash_channels: 8,
            packet: Nanos(8_200),
            data: Nanos(4096 * 8),
            filer_fast: Nanos::from_micros(92),
            filer_slow: Nanos::from_micros(7_952),
            fast_share: 0.9,
            filer_write: Nanos::from_micros(92),
        }
    }
}

/// What came out, after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Blocks read and written, by where from and to.
    #[serde(flatten)]
    pub counts: Counts,
    /// Blocks read and written in all, the warm-up included.
    #[serde(skip)]
    pub blocks: u64,
    /// What keeping hosts alike cost.
    #[serde(flatten)]
    pub shared: Shared,
    /// Hosts.
    pub hosts: usize,
    /// Requests that the filer worked on at a time, in the mean, network apart.
    pub filer_load: f64,
    /// Mean latency of reading a block, microseconds.
    pub read_mean_us: f64,
    /// Mean latency of writing a block, microseconds.
    pub write_mean_us: f64,
    /// Virtual seconds that it took.
    pub seconds: f64,
}

/// Runs the block requests of `reader` (4 KiB each: open it with pages of that size) on `threads` threads of each host that
/// the trace names; the first `warmup` of them are not counted: where there are no others, every figure but [`blocks`](Figures::blocks) is 0. `tick` is
/// called now and then.
///
/// # Errors
/// Whatever the reader reports.
pub fn run(
    config: &Config,
    threads: u16,
    warmup: u64,
    reader: &mut dyn Reader,
    mut tick: impl FnMut(&dyn Reader, u64),
) -> Result<Figures, TraceError> {
    let mut hosts = Hosts::new(config, threads);
    let (mut read, mut written, mut requests) = (0u128, 0u128, 0u64);
    let (mut before, mut shared, mut filer) = (Counts::default(), Shared::default(), 0.0);
    let (mut started, mut last) = (Nanos::ZERO, Nanos::ZERO);
    while let Some(request) = reader.next() {
        let request = request?;
        if !request.op.is_block() || request.op.is_removal() {
            continue;
        }
        if let Some(restart) = config.restart.filter(|r| r.after == requests) {
            hosts.restart(restart);
        }
        if requests == warmup {
            (before, shared, filer) = (hosts.counts(), hosts.shared(), hosts.filer_seconds());
            (started, read, written) = (hosts.now(), 0, 0);
        }
        let served = hosts.ask(request.host, request.id, request.op.is_read());
        let took = u128::from(served.done.saturating_sub(served.issued).0);
        if request.op.is_read() {
            read += took;
        } else {
            written += took;
        }
        last = Nanos(last.0.max(served.done.0));
        requests += 1;
        if requests.is_multiple_of(1 << 16) {
            tick(reader, requests);
        }
    }
    if requests <= warmup {
        return Ok(Figures { blocks: requests, hosts: hosts.count(), ..Figures::default() });
    }
    let counts = hosts.counts().since(&before);
    let mean = |sum: u128, n: u64| if n == 0 { 0.0 } else { sum as f64 / n as f64 / 1000.0 };
    let seconds = last.saturating_sub(started).as_secs_f64();
    let work = hosts.filer_seconds() - filer;
    Ok(Figures {
        counts,
        blocks: requests,
        shared: hosts.shared().since(&shared),
        hosts: hosts.count(),
        filer_load: if seconds > 0.0 { work / seconds } else { 0.0 },
        read_mean_us: mean(read, counts.reads),
        write_mean_us: mean(written, counts.writes),
        seconds,
    })
}

#[cfg(test)]
mod tests;
