//! What the live page shows: the latest sample, rates over the last seconds, and a few minutes of past.

use std::collections::VecDeque;

use serde::Serialize;

use crate::connection::ConnStats;
use crate::server::view::Sample;
use crate::stats::{CacheStats, Latency, Percentiles};

/// Seconds of past that the page shows.
const HISTORY: usize = 300;
/// Seconds that rates and percentiles are taken over.
const WINDOW: usize = 5;

/// One answer of `/api/live.json`. Rates are per second over the last five seconds.
#[derive(Debug, Default, Serialize)]
pub struct Live {
    /// Version of Larder.
    pub version: &'static str,
    /// Seconds since the start.
    pub uptime_seconds: u64,
    /// Requests per second, all kinds.
    pub requests_per_second: f64,
    /// Reads per second.
    pub gets_per_second: f64,
    /// Stores per second.
    pub sets_per_second: f64,
    /// Bytes received and sent per second.
    pub network_bytes_per_second: (f64, f64),
    /// Share of reads that hit, by tier.
    pub hit_ratio: LiveTier,
    /// The same since the start.
    pub hit_ratio_total: LiveTier,
    /// Latency of requests answered from DRAM (or by a miss), sampled.
    pub latency_dram: Percentiles,
    /// Latency of requests that waited for flash, sampled.
    pub latency_flash: Percentiles,
    /// Connections open, and the limit.
    pub connections: (u64, u64),
    /// Memory by what it is used for, bytes.
    pub memory: Vec<(String, u64)>,
    /// Resident memory of the process, bytes.
    pub resident_bytes: u64,
    /// Processors in use.
    pub cpu_cores: f64,
    /// The store as it is.
    pub store: CacheStats,
    /// Cache-level write amplification since the start: bytes written to flash per byte stored by clients.
    pub clwa: Option<f64>,
    /// Device-level write amplification over the drive's life, where the drive reports it.
    pub dlwa: Option<f64>,
    /// Bytes written to flash per second.
    pub flash_write_bytes_per_second: f64,
    /// Per application.
    pub applications: Vec<LiveApp>,
    /// Every counter of requests since the start, under the name that `stats` gives it.
    pub counters: Vec<(&'static str, u64)>,
    /// What to look at.
    pub alarms: Vec<String>,
    /// One point per second, oldest first.
    pub history: Vec<Point>,
}

/// Shares of reads.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct LiveTier {
    /// Answered from DRAM.
    pub dram: f64,
    /// Answered from flash.
    pub flash: f64,
    /// Reads that these shares are of.
    pub reads: u64,
}

/// One application.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LiveApp {
    /// Prefix.
    pub name: String,
    /// Share of reads that hit.
    pub hit_ratio: f64,
    /// Reads since the start.
    pub gets: u64,
    /// Stores since the start.
    pub sets: u64,
    /// Bytes in DRAM.
    pub dram_bytes: u64,
    /// Bytes on flash.
    pub flash_bytes: u64,
    /// Model version; 0 before the first.
    pub model: u64,
    /// Precision of its predictions.
    pub precision: Option<f64>,
    /// Recall.
    pub recall: Option<f64>,
    /// Share of its writes to flash that were never read.
    pub unread_writes: Option<f64>,
}

/// One second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Point {
    /// Seconds since the start.
    pub at: u64,
    /// Requests.
    pub requests: f64,
    /// Share of reads answered from DRAM; `None` without reads.
    pub dram: Option<f64>,
    /// Share of reads answered from flash; `None` without reads.
    pub flash: Option<f64>,
    /// 99th percentile of latency from DRAM, microseconds; `None` where nothing was sampled.
    pub p99_dram: Option<f64>,
    /// 99th percentile of latency from flash, microseconds; `None` where nothing was sampled.
    pub p99_flash: Option<f64>,
    /// Bytes written to flash.
    pub flash_writes: f64,
}

struct Past {
    mono: f64,
    requests: ConnStats,
    latency: Latency,
    cpu: u64,
    flash_written: u64,
}

/// Keeps the last samples.
pub(super) struct Sampler {
    latest: Option<Sample>,
    past: VecDeque<Past>,
    history: VecDeque<Point>,
}

/// Requests of all kinds.
fn requests(c: &ConnStats) -> u64 {
    c.cmd_get
        + c.cmd_set
        + c.cmd_touch
        + c.cmd_meta
        + c.cmd_flush
        + c.delete_hits
        + c.delete_misses
        + c.incr_hits
        + c.incr_misses
        + c.decr_hits
        + c.decr_misses
}

fn tier(now: &ConnStats, before: &ConnStats) -> LiveTier {
    let reads = now.cmd_get.saturating_sub(before.cmd_get);
    if reads == 0 {
        return LiveTier::default();
    }
    let hits = now.get_hits.saturating_sub(before.get_hits) as f64;
    let flash = now.get_flash_hits.saturating_sub(before.get_flash_hits) as f64;
    let share = |x: f64| (x / reads as f64).clamp(0.0, 1.0);
    LiveTier { dram: share(hits - flash), flash: share(flash), reads }
}

impl Sampler {
    pub(super) fn new() -> Sampler {
        Sampler { latest: None, past: VecDeque::new(), history: VecDeque::new() }
    }

    pub(super) fn push(&mut self, sample: Sample) {
        let mut latency = Latency::new();
        latency.add(&sample.latency);
        let past = Past {
            mono: sample.now.mono.as_secs_f64(),
            requests: sample.requests.clone(),
            latency,
            cpu: sample.cpu.0 + sample.cpu.1,
            flash_written: sample.store.flash.as_ref().map_or(0, |f| f.bytes_written),
        };
        // A reset of the statistics makes counters smaller: what lies before it cannot be compared.
        if self.past.back().is_some_and(|p| requests(&p.requests) > requests(&past.requests)) {
            self.past.clear();
        }
        if let Some(before) = self.past.back() {
            let span = (past.mono - before.mono).max(1e-3);
            let shares = tier(&past.requests, &before.requests);
            let latency = past.latency.since(&before.latency);
            self.history.push_back(Point {
                at: past.mono as u64,
                requests: requests(&past.requests).saturating_sub(requests(&before.requests))
                    as f64
                    / span,
                dram: (shares.reads > 0).then_some(shares.dram),
                flash: (shares.reads > 0).then_some(shares.flash),
                p99_dram: Some(latency.dram().p99).filter(|&p| p > 0.0),
                p99_flash: Some(latency.flash().p99).filter(|&p| p > 0.0),
                flash_writes: past.flash_written.saturating_sub(before.flash_written) as f64 / span,
            });
            if self.history.len() > HISTORY {
                self.history.pop_front();
            }
        }
        self.past.push_back(past);
        if self.past.len() > WINDOW + 1 {
            self.past.pop_front();
        }
        self.latest = Some(sample);
    }

    pub(super) fn live(&self) -> Live {
        let (Some(sample), Some(first), Some(last)) =
            (&self.latest, self.past.front(), self.past.back())
        else {
            return Live::default();
        };
        let span = (last.mono - first.mono).max(1e-3);
        let rate = |f: fn(&ConnStats) -> u64| {
            f(&last.requests).saturating_sub(f(&first.requests)) as f64 / span
        };
        let latency = last.latency.since(&first.latency);
        let store = &sample.store;
        let mut memory: Vec<(String, u64)> =
            store.memory.iter().map(|(n, b)| ((*n).to_owned(), *b)).collect();
        memory.push(("requests being received".into(), sample.buffers.0));
        memory.push(("answers being sent".into(), sample.buffers.1));
        let mut alarms = store.alarms.clone();
        if sample.connections >= sample.max_connections {
            alarms.push(format!("the limit of {} connections is reached", sample.max_connections));
        }
        let mut counters = Vec::new();
        sample.requests.each(|name, count| counters.push((name, count)));
        Live {
            version: sample.version,
            uptime_seconds: sample.uptime.0 / 1_000_000_000,
            requests_per_second: rate(requests),
            gets_per_second: rate(|c| c.cmd_get),
            sets_per_second: rate(|c| c.cmd_set),
            network_bytes_per_second: (rate(|c| c.bytes_read), rate(|c| c.bytes_written)),
            hit_ratio: tier(&last.requests, &first.requests),
            hit_ratio_total: tier(&last.requests, &ConnStats::default()),
            latency_dram: latency.dram(),
            latency_flash: latency.flash(),
            connections: (sample.connections, sample.max_connections),
            memory,
            resident_bytes: sample.resident_bytes,
            cpu_cores: last.cpu.saturating_sub(first.cpu) as f64 / 1e6 / span,
            clwa: store.clwa(),
            dlwa: store.flash.as_ref().and_then(crate::stats::FlashStats::dlwa),
            flash_write_bytes_per_second: last.flash_written.saturating_sub(first.flash_written)
                as f64
                / span,
            applications: store
                .applications
                .iter()
                .map(|a| LiveApp {
                    name: a.name.clone(),
                    hit_ratio: if a.gets == 0 { 0.0 } else { a.hits as f64 / a.gets as f64 },
                    gets: a.gets,
                    sets: a.sets,
                    dram_bytes: a.dram_bytes,
                    flash_bytes: a.flash_bytes,
                    model: a.model_version,
                    precision: a.precision,
                    recall: a.recall,
                    unread_writes: a.unread_writes,
                })
                .collect(),
            store: store.clone(),
            counters,
            alarms,
            history: self.history.iter().copied().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_base::{Nanos, Now, UnixSecs};

    use super::*;

    fn sample(second: u64, gets: u64, hits: u64, flash: u64) -> Sample {
        let requests = ConnStats {
            cmd_get: gets,
            get_hits: hits,
            get_flash_hits: flash,
            ..ConnStats::default()
        };
        Sample {
            now: Now { mono: Nanos::from_secs(second), wall: UnixSecs(1) },
            uptime: Nanos::from_secs(second),
            version: "x",
            requests,
            connections: 1,
            max_connections: 1,
            total_connections: 1,
            rejected_connections: 0,
            idle_kicks: 0,
            latency: Latency::new(),
            store: CacheStats::default(),
            buffers: (0, 0),
            resident_bytes: 0,
            cpu: (second * 500_000, 0),
            stopping: false,
        }
    }

    #[test]
    fn rates_are_over_the_window_and_a_reset_does_not_break_them() {
        let mut s = Sampler::new();
        for second in 0..20 {
            s.push(sample(second, second * 100, second * 80, second * 30));
        }
        let live = s.live();
        assert!((live.gets_per_second - 100.0).abs() < 1e-6);
        assert!(
            (live.hit_ratio.dram - 0.5).abs() < 1e-6 && (live.hit_ratio.flash - 0.3).abs() < 1e-6
        );
        assert!((live.cpu_cores - 0.5).abs() < 1e-6);
        assert_eq!(live.history.len(), 19);
        assert_eq!((live.history[0].dram, live.history[0].p99_dram), (Some(0.5), None));
        assert!(live.alarms[0].contains("1 connections"));
        s.push(sample(20, 5, 5, 0));
        assert!(s.live().gets_per_second < 1.0);
        for second in 21..2 * HISTORY as u64 {
            s.push(sample(second, second, 0, 0));
        }
        assert_eq!(s.live().history.len(), HISTORY);
        s.push(sample(2 * HISTORY as u64, 2 * HISTORY as u64 - 1, 0, 0));
        let idle = *s.live().history.last().unwrap();
        assert_eq!(
            (idle.dram, idle.flash),
            (None, None),
            "a second without reads has no hit ratio"
        );
    }
}
