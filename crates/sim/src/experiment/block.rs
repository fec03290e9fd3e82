//! The lane of a block cache: the engine of `larder block` in virtual time, and what is counted of it.

use std::collections::BTreeMap;

use larder_base::{ByteSize, Nanos};
use larder_engine::block::{BlockStats, PartKind};
use larder_policy::block::{BlockKind, Reason};
use serde::Serialize;

use super::error::{self, ExperimentError, value};
use super::latency::{Met, Recorder};
use super::outcome::{CacheOutcome, Latency};
use super::run::{Chunk, Lane};
use super::series::{Event, Series};
use super::spec::{CacheSpec, Experiment};
use crate::block::{Answered, Block, BlockSim, Stop, Sums};
use crate::device::drive::Drive;

/// What is told of block caches alone. Lines are those that clients touched.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct BlockFigures {
    /// Lines that fit.
    pub slots: u64,
    /// Lines in the cache at the end.
    pub lines: u64,
    /// Lines read.
    pub read_lines: u64,
    /// Of these, from flash.
    pub hit_lines: u64,
    /// Of these, from what another request was bringing or had brought, but was not on flash yet.
    pub shared_lines: u64,
    /// `hit_lines` and `shared_lines` over `read_lines`: reads that cost the store nothing.
    pub line_hit_ratio: f64,
    /// Bytes read of metadata that cost the store nothing, of all. None where the trace does not say what is metadata.
    pub metadata_hit_ratio: Option<f64>,
    /// The same of everything else. None where nothing else was read.
    pub data_hit_ratio: Option<f64>,
    /// Fusion-io's CLWA: bytes written to flash over bytes that clients wrote. None where they wrote nothing.
    pub clwa_of_writes: Option<f64>,
    /// `clwa_of_writes` × `dlwa`.
    pub total_write_amplification: Option<f64>,
    /// Requests for which the store was asked, of all: writes always are.
    pub store_share: f64,
    /// Reads for which the store was asked, of all reads.
    pub store_read_share: f64,
    /// Reads of the store.
    pub store_reads: u64,
    /// Writes and trims of the store.
    pub store_writes: u64,
    /// Bytes read from the store.
    pub store_read_bytes: u64,
    /// Bytes written to the store.
    pub store_write_bytes: u64,
    /// Bytes that clients wrote.
    pub written_bytes: u64,
    /// Of the bytes written to flash, those of the map and its log.
    pub map_bytes: u64,
    /// The same of the write log: 0 of a cache that writes through, as all figures of what is dirty are.
    pub log_bytes: u64,
    /// Of these, bytes whose writes came to the store.
    pub destaged_bytes: u64,
    /// Bytes written to journals: data, what says where they belong, and commits.
    pub journal_bytes: u64,
    /// Epochs that journals got.
    pub epochs: u64,
    /// Bytes at the end that are in the log and not in the store, each counted once.
    pub dirty_bytes: u64,
    /// The same at most.
    pub dirty_bytes_max: u64,
    /// Age of the oldest write that the store does not have, seconds, mean over time: what a lost cache costs. 0 while there is none.
    pub staleness_mean_s: f64,
    /// The same at most.
    pub staleness_max_s: f64,
    /// How often a volume held as much of the log as it may, so that no write was answered until some was destaged.
    pub stalls: u64,
    /// The share of time that this was so.
    pub stalled_share: f64,
    /// The share of time in which a volume held more than half of what it may, so that writes were slowed down.
    pub slowed_share: f64,
    /// How long clients' flushes took.
    pub flush: Latency,
    /// Flushes of the store: clients', or those that end a window.
    pub store_flushes: u64,
    /// Pages of the table of a sparse cache that were read, 4 KiB each; 0 for others.
    pub table_reads: u64,
    /// Lines written to flash behind the reply.
    pub fills: u64,
    /// Lines that made room.
    pub evicted: u64,
    /// Lines updated in place by a write.
    pub updated: u64,
    /// Lines dropped by a write or a trim.
    pub dropped: u64,
    /// Lines that the cleaner of a `full` cache moved: each is written once more.
    pub copied: u64,
    /// Segments that it cleaned.
    pub cleaned: u64,
    /// Lines that were not filled because too many fills were under way, or no slot was free to be taken.
    pub fill_dropped: u64,
    /// Lines that admission let have free slots, and no others, whether there were some or not.
    pub if_free: u64,
    /// Lines that admission refused, by reason: all reasons, whether met with or not.
    pub rejected: BTreeMap<&'static str, u64>,
    /// DRAM of the map and of admission, for each line that fits, bytes.
    pub dram_per_line: f64,
    /// Of that, admission, bytes in all.
    pub admission_bytes: u64,
    /// Requests that were refused because too many waited.
    pub refused: u64,
    /// Requests a second of virtual time.
    pub requests_per_second: f64,
    /// Bytes read and written a second of virtual time.
    pub bytes_per_second: f64,
}

impl BlockFigures {
    /// With every figure that there may be.
    pub(super) fn shape() -> BlockFigures {
        BlockFigures {
            metadata_hit_ratio: Some(0.0),
            data_hit_ratio: Some(0.0),
            clwa_of_writes: Some(0.0),
            total_write_amplification: Some(0.0),
            rejected: Reason::ALL.iter().map(|r| (r.as_str(), 0)).collect(),
            flush: Latency { count: 1, ..Latency::default() },
            ..BlockFigures::default()
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    requests: u64,
    reads: u64,
    /// Reads that are hits, as the engine counts them: answered without asking the store or waiting for it.
    hits: u64,
    reached_store: u64,
    reads_reached: u64,
    read_bytes: u64,
    hit_bytes: u64,
    written_bytes: u64,
    metadata: (u64, u64),
    data: (u64, u64),
    refused: u64,
}

/// A block cache with all that is around it.
pub(super) struct BlockLane {
    sim: BlockSim,
    counts: Counts,
    recorder: Recorder,
    /// Clients' flushes.
    flushes: Recorder,
    series: Series,
    answered: Vec<Answered>,
    before: Sums,
    /// Bytes on flash when the last point of the series was made.
    flash_bytes: u64,
    /// Requests that came before count for nothing.
    started: Nanos,
    counting: bool,
    warmup: u64,
    blocks: u64,
    name: String,
    stopped: Option<Stop>,
}

impl BlockLane {
    pub(super) fn new(e: &Experiment, spec: &Block) -> Result<BlockLane, ExperimentError> {
        let name = spec.name.clone().unwrap_or_else(|| "block".to_owned());
        let drive = |bytes| Drive::new(&e.ssd, &e.timing, bytes, e.seed);
        let journal = e.journal.as_ref().unwrap_or(&e.store);
        Ok(BlockLane {
            sim: BlockSim::new(spec, (&e.store, journal), &e.timing, drive, e.seed)
                .map_err(|error| error::block(&name, error))?,
            counts: Counts::default(),
            recorder: Recorder::new(),
            flushes: Recorder::new(),
            series: Series::new(&e.report, Nanos::ZERO),
            answered: Vec::new(),
            before: Sums::default(),
            flash_bytes: 0,
            started: Nanos::ZERO,
            counting: e.workload.warmup == 0,
            warmup: e.workload.warmup,
            blocks: 0,
            name,
            stopped: None,
        })
    }

    fn begin(&mut self, e: &Experiment) {
        self.counts = Counts::default();
        self.recorder.reset();
        self.flushes.reset();
        self.sim.reset();
        self.before = self.sim.sums();
        self.before.store = Default::default();
        self.flash_bytes = written(&self.before);
        self.started = self.sim.now();
        self.series = Series::new(&e.report, self.started);
        self.counting = true;
    }

    fn take_answers(&mut self) {
        let mut answered = std::mem::take(&mut self.answered);
        for a in answered.drain(..) {
            if self.counting {
                self.count(&a);
            }
        }
        self.answered = answered;
    }

    fn count(&mut self, a: &Answered) {
        let latency = a.done.saturating_sub(a.came);
        if a.flush {
            return self.flushes.record(Met::Write, latency);
        }
        let c = &mut self.counts;
        c.requests += 1;
        c.reached_store += u64::from(a.reached_store);
        c.refused += u64::from(a.failed);
        let (mut met, mut set_bytes) = (Met::Write, 0);
        match a.kind {
            PartKind::Read => {
                c.reads += 1;
                c.reads_reached += u64::from(a.reached_store);
                let saved = (a.from_flash + a.shared).min(a.bytes);
                c.read_bytes += a.bytes;
                c.hit_bytes += saved;
                set_bytes = a.bytes - saved;
                let by = if a.class == BlockKind::Metadata { &mut c.metadata } else { &mut c.data };
                by.0 += saved;
                by.1 += a.bytes;
                met = Met::Miss;
                if a.hit {
                    c.hits += 1;
                    met = Met::Flash;
                }
            }
            PartKind::Write => {
                c.written_bytes += a.bytes;
                set_bytes = a.bytes;
            }
            _ => {}
        }
        self.recorder.record(met, latency);
        let now = written(&self.sim.sums_of_writes());
        let flash_bytes = now - std::mem::replace(&mut self.flash_bytes, now);
        self.series.add(&Event { at: a.came, met, latency, set_bytes, flash_bytes });
    }
}

fn written(sums: &Sums) -> u64 {
    sums.line_bytes_written + sums.map_bytes_written + sums.log_bytes_written
}

fn less(a: &BlockStats, b: &BlockStats) -> BlockStats {
    BlockStats {
        read_lines: a.read_lines - b.read_lines,
        read_hits: a.read_hits.saturating_sub(b.read_hits),
        read_shared: a.read_shared - b.read_shared,
        fills: a.fills - b.fills,
        evicted: a.evicted - b.evicted,
        updated: a.updated - b.updated,
        dropped: a.dropped - b.dropped,
        fill_dropped: a.fill_dropped - b.fill_dropped,
        copied: a.copied - b.copied,
        cleaned: a.cleaned - b.cleaned,
        ..*a
    }
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

impl Lane for BlockLane {
    fn process(&mut self, e: &Experiment, chunk: &Chunk) {
        for (number, request) in (chunk.first..).zip(&chunk.requests) {
            if self.stopped.is_some() {
                return;
            }
            if number == self.warmup {
                self.take_answers();
                self.begin(e);
            }
            match self.sim.request(number, request, &mut self.answered) {
                Ok(block) => self.blocks += u64::from(block),
                Err(stop) => self.stopped = Some(stop),
            }
            self.take_answers();
            let traffic = self.sim.drive().traffic();
            if self.counting && traffic.written > 0 {
                self.series.traffic(self.sim.now(), traffic);
            }
        }
    }

    fn outcome(
        &mut self,
        e: &Experiment,
        spec: &CacheSpec,
        _last: Nanos,
    ) -> Result<CacheOutcome, ExperimentError> {
        let name = &self.name;
        match &self.stopped {
            None => {}
            Some(Stop::Volumes) => {
                let most = larder_format::block::superblock::MAX_VOLUMES;
                let must = format!(
                    "a cache device knows {most} volumes at most: set workload.limit, or split the trace"
                );
                return Err(value(
                    "workload.trace",
                    format!("one of more than {most} volumes"),
                    must,
                ));
            }
            Some(Stop::Space(bytes)) => {
                let must = format!(
                    "the trace touches more than the {bytes} bytes that its line space holds: give more flash or larger lines"
                );
                return Err(value(format!("cache '{name}' flash"), spec.flash(), must));
            }
            &Some(Stop::Beyond { volume, offset, bytes }) => {
                let must = format!(
                    "the trace touches byte {offset} of volume {volume}: state the size of the largest, or 0 if it is not known"
                );
                return Err(value(format!("cache '{name}' volume"), ByteSize(bytes), must));
            }
            Some(Stop::Table) => {
                let must = "the table takes more than a 32nd of the file system, since lines are scattered thinly: give more \
                            flash, or larger lines"
                    .to_owned();
                return Err(value(format!("cache '{name}' flash"), spec.flash(), must));
            }
            Some(Stop::Admission(why)) => {
                return Err(value(format!("cache '{name}' admission"), "too large", why));
            }
        }
        if self.blocks == 0 {
            let must = "a block cache needs block reads and writes: see larder trace stats";
            return Err(value("workload.trace", format!("'{}'", e.workload.trace), must));
        }
        self.sim.finish(&mut self.answered);
        self.take_answers();
        let (c, sums, ages) = (&self.counts, self.sim.sums(), self.sim.ages());
        let of_time = |part: Nanos| match ages.time {
            Nanos::ZERO => 0.0,
            all => part.as_secs_f64() / all.as_secs_f64(),
        };
        let engine = less(&sums.engine, &self.before.engine);
        let seconds = self.sim.now().saturating_sub(self.started).as_secs_f64();
        let flash_bytes = written(&sums) - written(&self.before);
        let drive = self.sim.drive();
        let traffic = drive.traffic();
        let dlwa = (traffic.written > 0).then(|| traffic.amplification());
        let rate = if seconds > 0.0 { flash_bytes as f64 / seconds } else { 0.0 };
        let miss_bytes = c.read_bytes - c.hit_bytes;
        let set_bytes = c.written_bytes + miss_bytes;
        let clwa_of_sets = share(flash_bytes, set_bytes);
        let clwa_of_writes = (c.written_bytes > 0).then(|| share(flash_bytes, c.written_bytes));
        let (map, admission) = self.sim.memory();
        let lines = self.sim.lines();
        let ratio = |(saved, all): (u64, u64)| (all > 0).then(|| share(saved, all));
        let figures = BlockFigures {
            slots: self.sim.slots(),
            lines,
            read_lines: engine.read_lines,
            hit_lines: engine.read_hits,
            shared_lines: engine.read_shared,
            line_hit_ratio: share(engine.read_hits + engine.read_shared, engine.read_lines),
            metadata_hit_ratio: ratio(c.metadata),
            // Where nothing is marked, data is all there is.
            data_hit_ratio: ratio(c.metadata).and_then(|_| ratio(c.data)),
            clwa_of_writes,
            total_write_amplification: clwa_of_writes.zip(dlwa).map(|(c, d)| c * d),
            store_share: share(c.reached_store, c.requests),
            store_read_share: share(c.reads_reached, c.reads),
            store_reads: sums.store.reads,
            store_writes: sums.store.writes,
            store_read_bytes: sums.store.read_bytes,
            store_write_bytes: sums.store.write_bytes,
            written_bytes: c.written_bytes,
            map_bytes: sums.map_bytes_written - self.before.map_bytes_written,
            log_bytes: sums.log_bytes_written - self.before.log_bytes_written,
            destaged_bytes: sums.destaged - self.before.destaged,
            journal_bytes: sums.journal_bytes_written - self.before.journal_bytes_written,
            epochs: sums.epochs - self.before.epochs,
            dirty_bytes: ages.dirty,
            dirty_bytes_max: ages.most_dirty,
            staleness_mean_s: match ages.time {
                Nanos::ZERO => 0.0,
                all => ages.age / all.as_secs_f64(),
            },
            staleness_max_s: ages.oldest.as_secs_f64(),
            stalls: ages.stalls,
            stalled_share: of_time(ages.stalled),
            slowed_share: of_time(ages.slowed),
            flush: self.flushes.latencies().write,
            store_flushes: sums.store.flushes,
            table_reads: sums.table_reads - self.before.table_reads,
            fills: engine.fills,
            evicted: engine.evicted,
            updated: engine.updated,
            dropped: engine.dropped,
            copied: engine.copied,
            cleaned: engine.cleaned,
            fill_dropped: engine.fill_dropped,
            if_free: sums.verdicts.if_free - self.before.verdicts.if_free,
            rejected: Reason::ALL
                .iter()
                .map(|&r| {
                    let before = self.before.verdicts.rejected(r);
                    (r.as_str(), sums.verdicts.rejected(r) - before)
                })
                .collect(),
            dram_per_line: share(map + admission, self.sim.slots()),
            admission_bytes: admission,
            refused: c.refused,
            requests_per_second: if seconds > 0.0 { c.requests as f64 / seconds } else { 0.0 },
            bytes_per_second: if seconds > 0.0 {
                (c.read_bytes + c.written_bytes) as f64 / seconds
            } else {
                0.0
            },
        };
        let hits = c.hits;
        Ok(CacheOutcome {
            name: spec.name().to_owned(),
            kind: spec.kind().name().to_owned(),
            flash: spec.flash(),
            requests: c.requests,
            reads: c.reads,
            hits_flash: hits,
            read_bytes: c.read_bytes,
            hit_bytes: c.hit_bytes,
            set_bytes,
            miss_bytes,
            flash_bytes,
            hit_ratio: share(hits, c.reads),
            flash_hit_ratio: share(hits, c.reads),
            miss_ratio: share(c.reads - hits, c.reads),
            byte_miss_ratio: share(miss_bytes, c.read_bytes),
            clwa_of_sets,
            clwa_of_misses: share(flash_bytes, miss_bytes),
            dlwa,
            write_amplification: dlwa.map(|d| d * clwa_of_sets),
            flash_bytes_per_second: rate,
            life_years: super::run::life(e, drive.capacity, dlwa, rate),
            wear: dlwa.map(|_| drive.wear()),
            flash_objects: Some(lines),
            metadata_bytes: Some(map + admission),
            metadata_per_flash_object: (lines > 0).then(|| share(map + admission, lines)),
            latency: self.recorder.latencies(),
            flash_utilisation: drive.utilisation(seconds),
            backend_utilisation: self.sim.store().utilisation(seconds),
            block: Some(figures),
            series: self.series.points(),
            ..CacheOutcome::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CacheKind, Experiment, Outcome, figures_of, run};

    const TEXT: &str = r#"
[workload]
trace = "gen:specsfs?scale=0.0002&requests=60000&rate=2000"
warmup = 20000
[store]
kind = "disk"
disks = 12
[[cache]]
kind = "block"
flash = "24m"
flush_every = 100
[[cache]]
kind = "block"
name = "two_lbs"
flash = "24m"
admission = "two_lbs"
flush_every = 100
[[cache]]
kind = "block"
name = "around"
flash = "24m"
write = "hdd-inv"
load = "closed"
depth = 16
flush_every = 100
[report]
interval = 2
[expect.order]
metadata_hit_ratio = ["block", "two_lbs"]
clwa_of_writes = ["around", "two_lbs", "block"]
[expect.block]
hit_ratio = { min = 0.01, max = 0.99 }
"#;

    fn outcome(threads: usize, seed: u64) -> Outcome {
        let e = Experiment { seed, ..Experiment::parse(TEXT, "block.toml").unwrap() };
        run(&e, threads, |_, _| {}).unwrap()
    }

    #[test]
    fn figures_add_up() {
        let outcome = outcome(2, 1);
        assert!(outcome.expectations.iter().all(|c| c.met), "{:?}", outcome.expectations);
        for c in &outcome.caches {
            let found: Vec<String> = c.figures().into_keys().collect();
            assert_eq!(found, figures_of(CacheKind::Block));
            let b = c.block.as_ref().unwrap();
            assert_eq!(c.metric("line_hit_ratio"), Some(b.line_hit_ratio));
            // In a closed loop some of the warm-up's are still under way when counting begins.
            assert!((40_000..40_100).contains(&c.requests), "{}", c.requests);
            assert_eq!(c.latency.all.count, c.requests);
            assert_eq!(c.latency.read.count, c.reads);
            assert_eq!(c.read_bytes, c.hit_bytes + c.miss_bytes);
            assert_eq!(c.set_bytes, c.miss_bytes + b.written_bytes);
            // Some of what did not reach the store has waited for another's fetch: that is no hit.
            let waited = 1.0 - b.store_read_share - c.hit_ratio;
            assert!((-1e-12..0.1).contains(&waited), "{waited}");
            let spared = (1.0 - b.store_read_share) * c.reads as f64 / c.requests as f64;
            assert!((b.store_share - 1.0 + spared).abs() < 1e-9, "writes always reach the store");
            assert!(c.dlwa.unwrap() >= 1.0 && c.life_years.unwrap() > 0.0);
            assert!(b.map_bytes > 0 && b.map_bytes < c.flash_bytes);
            assert!(b.lines <= b.slots && b.lines > b.slots / 2, "{b:?}");
            assert!((7.0..10.0).contains(&b.dram_per_line), "{}", b.dram_per_line);
            assert!(c.latency.hit_flash.p50_us >= 88.0 && c.backend_utilisation > 0.0);
            assert_eq!(c.series.iter().map(|p| p.requests).sum::<u64>(), c.requests);
            let bytes: u64 = c.series.iter().map(|p| p.flash_bytes).sum();
            assert!(bytes <= c.flash_bytes && bytes * 100 > c.flash_bytes * 99);
            assert_eq!(b.refused, 0);
        }
        let rejected = &outcome.caches[1].block.as_ref().unwrap().rejected;
        assert!(rejected["metadata_victim"] > 0 && rejected["not_hotter"] > 0, "{rejected:?}");
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes_on_any_number_of_threads() {
        let text = |o: &Outcome| serde_json::to_string(o).unwrap();
        let one = text(&outcome(1, 3));
        assert_eq!(one, text(&outcome(3, 3)));
        assert_ne!(one, text(&outcome(2, 4)));
    }

    #[test]
    fn what_cannot_be_run_is_refused() {
        for (from, to, words) in [
            (
                "gen:specsfs?scale=0.0002&requests=60000&rate=2000",
                "gen:zipf?requests=30000",
                "block reads and writes",
            ),
            ("kind = \"disk\"", "kind = \"tape\"", "unknown variant `tape`"),
            ("disks = 12", "disk_iops = 0", "store.disk_iops is 0"),
            ("admission = \"two_lbs\"", "admission = \"tc(bits=3)\"", "cache 'two_lbs' admission"),
            ("write = \"hdd-inv\"", "write = \"back\"", "cache 'around' write is 'back'"),
            (
                "write = \"hdd-inv\"",
                "write = \"back:journaled,cut=marks\"",
                "cache 'around' write is 'back:journaled,cut=marks': no trace names marks",
            ),
            (
                "write = \"hdd-inv\"",
                "write = \"back:journaled,cut=marks,on-full=cut\"",
                "no trace names marks",
            ),
            (
                "[report]",
                "[journal]\nkind = \"disk\"\ndisk_iops = 0\n[report]",
                "journal.disk_iops is 0",
            ),
            (
                "write = \"hdd-inv\"",
                "dirty_age_max = \"5\"",
                "cache 'around' dirty_age_max is '5': goes with",
            ),
            (
                "write = \"hdd-inv\"",
                "write = \"back:any,destage=none\"\nvolume = \"1g\"\nwrite_log = \"16m\"\ndirty_age_max = \"5\"",
                "no limit on their age can be kept",
            ),
            (
                "write = \"hdd-inv\"",
                "write = \"back:any\"\nvolume = \"1g\"\nwrite_log = \"16m\"\ndirty_age_max = \"5,soft\"",
                "'5,soft' is no age",
            ),
            ("write = \"hdd-inv\"", "write = \"back:all\"", "'all' is no order of write-back"),
            ("write = \"hdd-inv\"", "write = \"back:any\"", "cache 'around' volume is not stated"),
            (
                "write = \"hdd-inv\"",
                "write_log = \"16m\"",
                "cache 'around' write_log is 16 MiB: goes with",
            ),
            (
                "write = \"hdd-inv\"",
                "write = \"back:any\"\nvolume = \"1g\"",
                "a write log has at least 16 MiB",
            ),
            (
                "write = \"hdd-inv\"",
                "write = \"back:any\"\nvolume = \"1g\"\nwrite_log = \"16m\"\ndirty_max = 1",
                "dirty_max is 1 B: 1 B of the write log is too little: give it 1 MiB at least",
            ),
            (
                "flash = \"24m\"",
                "flash = \"240m\"\nwrite = \"back:any\"\nvolume = \"1g\"\nwrite_log = \"100m\"\ndirty_max = \"300m\"",
                "dirty_max is 300 MiB: 300 MiB is more than it can hold of the write log",
            ),
            ("depth = 16", "depth = 0", "cache 'around' depth is 0"),
            ("flash = \"24m\"", "flash = \"100k\"", "too few for a cache device"),
        ] {
            assert!(TEXT.contains(from));
            let text = TEXT.replacen(from, to, 1);
            let e = Experiment::parse(&text, "x.toml").and_then(|e| run(&e, 1, |_, _| {}));
            let e = e.err().unwrap_or_else(|| panic!("{to} is taken"));
            assert!(e.to_string().contains(words) && e.is_usage(), "'{e}' lacks '{words}'");
        }
    }
}
