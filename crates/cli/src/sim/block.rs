//! `larder sim block`: admission and replacement of the block cache on a block trace.

use std::sync::{Mutex, PoisonError};

use clap::Parser;
use larder_base::{ByteSize, Short};
use larder_engine::block::WriteMode;
use larder_engine::block::node::defaults;
use larder_policy::block::{
    BLOCK_ADMISSION_DEFAULT, BlockAdmissionConfig, EvictionBy, Replacement, VictimPolicy,
};
use larder_sim::lab::block_study::{
    BlockCache, BlockCacheSpec, BlockOutcome, Placement, StudyDrive,
};
use larder_trace::{Hashed, Request};
use serde::Serialize;

use super::once;
use super::origin::{Origin, configuration};
use super::run::beyond_memory;
use super::watch::Watch;
use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;
use crate::trace::{Input, Settings, note_skipped, trace_error};

#[derive(Debug, Parser)]
#[command(after_help = "\
A model of lines alone, fast enough for many policies at once. A block cache in
larder sim run is the engine itself, with segments, frames and its own reclaiming:
its figures of the same name differ a little.

Examples:
  larder sim block disk.vscsi.zst --sizes 64m,256m --replacement lru,sieve
  larder sim block disk.vscsi.zst --sizes 256m --admission all \\
      --admission 'sseqr(length=1m)+two_lbs'")]
pub(super) struct BlockArgs {
    #[command(flatten)]
    input: Input,
    /// Admission: all, seqr, sseqr, touch_count, two_lbs, expected_reads, or several joined by '+', each with parameters in parentheses:
    /// 'sseqr(window=32,length=4m)+tc(threshold=2)'. By default a stream's lines may have free slots and displace nothing. May be given several times; each with each size, placement and
    /// replacement.
    #[arg(long, value_name = "POLICY", default_value = BLOCK_ADMISSION_DEFAULT)]
    admission: Vec<BlockAdmissionConfig>,
    /// Bytes of flash, separated by commas (64m, 4g).
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true)]
    sizes: Vec<ByteSize>,
    /// Which line leaves: lru, clock, sieve, s3fifo; separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [defaults::REPLACEMENT])]
    replacement: Vec<Replacement>,
    /// Where lines lie: full, direct, set:WAYS; separated by commas. (sparse is the engine's affair: larder sim run has it.)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "full")]
    placement: Vec<Placement>,
    /// What a write does: hdd-ssd, hdd-upd, hdd-inv.
    #[arg(long, value_name = "POLICY", default_value_t = defaults::WRITE)]
    write: WriteMode,
    /// Bytes of a line.
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(defaults::LINE.into()))]
    line: ByteSize,
    /// A drive under each cache whose cleaner chooses by fifo (tail drop), greedy, cost-benefit or random; separated by
    /// commas. Shows flash-level write amplification.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    reclaim: Vec<VictimPolicy>,
    /// Who evicts: cache (the cleaner copies every valid line), or gc:SHARE (the cleaner drops lines that are not among
    /// that hottest share); separated by commas.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "cache",
        requires = "reclaim"
    )]
    evict: Vec<EvictionBy>,
    /// The drive's physical space beyond the cache's, as a share of it.
    #[arg(long, value_name = "SHARE", default_value_t = 0.07, requires = "reclaim")]
    over_provisioning: f64,
    /// Requests that only fill the caches, before counting starts.
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: u64,
    /// Bytes of all volumes together, by which admission sizes its tables; sixteen times the cache when not given.
    #[arg(long, value_name = "SIZE")]
    backing: Option<ByteSize>,
    /// Seed of hashes.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Threads; caches run side by side. All cores when not given. Results do not depend on it.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// What all rows were simulated with; the rest is the row's own.
#[derive(Serialize)]
struct Shared {
    write: &'static str,
    line: ByteSize,
    over_provisioning: Option<f64>,
    warmup: u64,
    backing: Option<ByteSize>,
}

#[derive(Serialize)]
struct Row {
    admission: String,
    placement: String,
    replacement: &'static str,
    /// Bytes.
    flash: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reclaim: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    evict: Option<String>,
    /// Of reads that were wholly in the cache, as in experiments.
    hit_ratio: f64,
    line_hit_ratio: f64,
    clwa_of_writes: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dlwa: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    total_write_amplification: Option<f64>,
    #[serde(flatten)]
    outcome: BlockOutcome,
}

fn caches(args: &BlockArgs) -> Result<Vec<BlockCache>, CliError> {
    let line_bytes = u32::try_from(args.line.0)
        .map_err(|_| CliError::Usage(format!("--line: {} is too large: at most 1m", args.line)))?;
    if !(1e-3..=100.0).contains(&args.over_provisioning) {
        let given = Short(args.over_provisioning);
        let must = "give a share from 0.001 to 100, such as 0.07";
        return Err(CliError::Usage(format!("--over-provisioning: '{given}': {must}")));
    }
    if args.backing == Some(ByteSize(0)) {
        let text = "--backing: '0': volumes hold something: give their bytes, or leave it out for sixteen times the cache";
        return Err(CliError::Usage(text.to_owned()));
    }
    let mut drives: Vec<Option<StudyDrive>> = Vec::new();
    let evict = once("--evict", &args.evict);
    for victim in once("--reclaim", &args.reclaim) {
        for &eviction in &evict {
            let over_provisioning = args.over_provisioning;
            drives.push(Some(StudyDrive { over_provisioning, victim, eviction }));
        }
    }
    if drives.is_empty() {
        drives.push(None);
    }
    let (mut caches, mut table_bytes) = (Vec::new(), 0u64);
    let placements = once("--placement", &args.placement);
    let replacements = once("--replacement", &args.replacement);
    let admissions = once("--admission", &args.admission);
    for size in once("--sizes", &args.sizes) {
        for &placement in &placements {
            for &replacement in &replacements {
                for admission in &admissions {
                    for &drive in &drives {
                        let spec = BlockCacheSpec {
                            bytes: size.0,
                            line_bytes,
                            placement,
                            replacement,
                            admission: admission.clone(),
                            writes: args.write,
                            drive,
                            backing_bytes: args.backing.map_or(0, |b| b.0),
                            seed: args.seed,
                        };
                        table_bytes = table_bytes.saturating_add(spec.table_bytes());
                        if let Some((needed, memory)) = beyond_memory(table_bytes) {
                            return Err(CliError::Usage(format!(
                                "--sizes: up to {size} the tables of the caches take {needed} of memory, and there are {memory}: \
                                 give smaller or fewer sizes, or a larger --line"
                            )));
                        }
                        caches.push(BlockCache::new(spec).map_err(CliError::Usage)?);
                    }
                }
            }
        }
    }
    Ok(caches)
}

pub(super) fn run(args: &BlockArgs) -> Result<(), CliError> {
    let mut caches = caches(args)?;
    let trace = args.input.open()?;
    let settings = Settings::new(&args.input.options(), trace.format);
    let (mut reader, hash) = Hashed::over(trace.reader);
    let threads = super::threads(args.threads)?;
    let mut watch = Watch::new(1);
    let (mut requests, mut blocks) = (0u64, 0u64);
    let mut chunk = Vec::with_capacity(CHUNK);
    loop {
        chunk.clear();
        while chunk.len() < CHUNK
            && let Some(request) = reader.next()
        {
            chunk.push(request.map_err(trace_error)?);
        }
        if chunk.is_empty() {
            break;
        }
        feed(&mut caches, &chunk, args.warmup.checked_sub(requests), threads);
        requests += chunk.len() as u64;
        blocks += chunk.iter().filter(|r| r.op.is_block()).count() as u64;
        watch.tick(&*reader, requests);
    }
    watch.finish();
    if blocks == 0 {
        let problem = "has no block reads or writes: give a block trace, see larder trace stats";
        return Err(CliError::Usage(format!("'{}' {problem}", args.input.trace)));
    }
    if requests <= args.warmup {
        let problem = format!(
            "--warmup: '{}': the trace has {requests} requests, so that none is left to count",
            args.warmup
        );
        return Err(CliError::Usage(problem));
    }
    note_skipped(&*reader);
    let rows: Vec<Row> = caches.iter().map(row).collect();
    let shared = Shared {
        write: args.write.as_str(),
        line: args.line,
        over_provisioning: (!args.reclaim.is_empty()).then_some(args.over_provisioning),
        warmup: args.warmup,
        backing: args.backing,
    };
    let shared = configuration(Some(&settings), &shared)?;
    let origin = Origin::new(args.seed, &args.input.trace, &hash, shared);
    if args.json {
        return print_json(&origin.of(&rows));
    }
    print_table(&rows)?;
    origin.print()
}

/// Requests that all caches take before the next are read.
const CHUNK: usize = 1 << 14;

/// Gives the chunk to every cache; from its request number `count_from` on, where that is in the chunk, they count.
fn feed(caches: &mut [BlockCache], chunk: &[Request], count_from: Option<u64>, threads: usize) {
    let one = |cache: &mut BlockCache| {
        for (i, request) in chunk.iter().enumerate() {
            if count_from == Some(i as u64) {
                cache.count();
            }
            cache.request(request);
        }
    };
    if threads == 1 || caches.len() == 1 {
        caches.iter_mut().for_each(one);
        return;
    }
    let threads = threads.min(caches.len());
    let queue = Mutex::new(caches.iter_mut());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
                    let Some(cache) = next else { return };
                    one(cache);
                }
            });
        }
    });
}

fn row(cache: &BlockCache) -> Row {
    let (spec, outcome) = (cache.spec(), cache.outcome());
    let clwa_of_writes = (outcome.written_bytes > 0).then(|| outcome.clwa_of_writes());
    Row {
        admission: spec.admission.to_string(),
        placement: spec.placement.to_string(),
        replacement: spec.replacement.as_str(),
        flash: spec.bytes,
        reclaim: spec.drive.map(|d| d.victim.name()),
        evict: spec.drive.map(|d| d.eviction.to_string()),
        hit_ratio: outcome.hit_ratio(),
        line_hit_ratio: outcome.line_hit_ratio(),
        clwa_of_writes,
        dlwa: outcome.dlwa(),
        total_write_amplification: clwa_of_writes.zip(outcome.dlwa()).map(|(c, d)| c * d),
        outcome,
    }
}

fn print_table(rows: &[Row]) -> Result<(), CliError> {
    let metadata = rows.iter().any(|r| r.outcome.metadata_lines > 0);
    let mut header = vec![
        "admission",
        "flash",
        "cache",
        "hit ratio",
        "of lines",
        "flash written",
        "CLWA of writes",
        "admission's DRAM",
    ];
    if metadata {
        header.insert(5, "of metadata lines");
    }
    let drives = rows.iter().any(|r| r.reclaim.is_some());
    if drives {
        header.extend(["DLWA", "CLWA × DLWA"]);
    }
    let mut table = Columns::new(3, 3, header);
    for row in rows {
        let o = &row.outcome;
        let mut cells = vec![
            row.admission.clone(),
            ByteSize(row.flash).to_string(),
            match (row.reclaim, &row.evict) {
                (Some(reclaim), Some(evict)) => {
                    format!("{} {} {reclaim} {evict}", row.placement, row.replacement)
                }
                _ => format!("{} {}", row.placement, row.replacement),
            },
            format!("{:.4}", row.hit_ratio),
            format!("{:.4}", row.line_hit_ratio),
            ByteSize(o.flash_bytes).to_string(),
            row.clwa_of_writes.map_or_else(|| "-".to_owned(), |c| format!("{c:.3}")),
            ByteSize(o.admission_memory).to_string(),
        ];
        if metadata {
            cells.insert(5, format!("{:.4}", o.metadata_hit_ratio()));
        }
        if drives {
            let shown = |v: Option<f64>| v.map_or_else(|| "-".to_owned(), |v| format!("{v:.3}"));
            cells.extend([shown(row.dlwa), shown(row.total_write_amplification)]);
        }
        table.row(cells);
    }
    table.print()
}
