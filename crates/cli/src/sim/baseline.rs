//! `larder sim baseline`: flash caches to measure against.

use clap::{Parser, ValueEnum};
use larder_base::ByteSize;
use larder_sim::lab::baseline::{
    self, Baseline, BaselineError, Counts, FifoLog, HybridConfig, LogParams, Ripq, SetAssociative,
    SetParams, VictimCache,
};
use larder_sim::mrc::{Interner, Item};
use larder_trace::Hashed;
use serde::Serialize;

use super::once;
use super::origin::{Origin, configuration};
use super::run::beyond_memory;
use super::watch::Watch;
use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;
use crate::trace::{Input, Settings, note_skipped, trace_error};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Cache {
    /// LRU in DRAM; whatever it evicts is written to LRU on flash.
    Victim,
    /// RIPQ: a segmented LRU on flash with K insertion points and virtual updates; all objects are written to flash.
    Ripq,
    /// CacheLib's BigHash: LRU in DRAM, then 4 KiB buckets named by the key's hash, each written whole for every insertion.
    SetAssociative,
    /// Navy's block cache: LRU in DRAM, then a log of regions in FIFO order with every object indexed in DRAM.
    FifoLog,
}

#[derive(Debug, Parser, Serialize)]
#[command(after_help = "\
Examples:
  larder sim baseline trace.zst --cache victim,ripq --flash 64m,256m
  larder sim baseline trace.zst --cache fifo-log --flash 256m --json \\
      --admission all,reject_first")]
pub(super) struct BaselineArgs {
    #[command(flatten)]
    #[serde(skip)]
    input: Input,
    /// The caches, separated by commas.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "victim,ripq")]
    #[serde(skip)]
    cache: Vec<Cache>,
    /// Flash capacities, separated by commas (4m, 512m, 1g).
    #[arg(long, value_delimiter = ',', required = true, value_name = "LIST")]
    #[serde(skip)]
    flash: Vec<ByteSize>,
    /// DRAM before the flash (not RIPQ); a seventh of the flash when not given (DRAM : flash = 1 : 7).
    #[arg(long, value_name = "SIZE")]
    #[serde(skip)]
    dram: Option<ByteSize>,
    /// RIPQ's block.
    #[arg(long, default_value = "64k", value_name = "SIZE")]
    #[serde(skip)]
    block: ByteSize,
    /// RIPQ's insertion points (K).
    #[arg(long, default_value_t = 8, value_name = "K")]
    #[serde(skip)]
    sections: u16,
    /// Which of DRAM's victims set-associative and fifo-log write to flash: all, probability:P, reject_first, ghost
    /// (S3-FIFO's). Several, separated by commas, are run one beside the other.
    #[arg(long, default_value = "all", value_delimiter = ',', value_name = "LIST")]
    #[serde(skip)]
    admission: Vec<String>,
    /// Mean size of an object, by which reject_first and ghost choose how many keys they remember.
    #[arg(long, default_value = "300", value_name = "SIZE")]
    mean_object: ByteSize,
    /// Bucket of set-associative.
    #[arg(long, default_value = "4k", value_name = "SIZE")]
    bucket: ByteSize,
    /// Region of fifo-log.
    #[arg(long, default_value = "1m", value_name = "SIZE")]
    region: ByteSize,
    /// Records of fifo-log start at multiples of this many bytes (CacheLib: 512).
    #[arg(long, default_value_t = 1, value_name = "BYTES")]
    align: u32,
    /// fifo-log writes objects with so many hits again when their region is reclaimed; 0 never.
    #[arg(long, default_value_t = 0, value_name = "HITS")]
    reinsert: u32,
    /// Seed of hash functions and draws.
    #[arg(long, default_value_t = 1, value_name = "N")]
    #[serde(skip)]
    seed: u64,
    /// Requests that only fill the caches, before counting starts.
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: u64,
    /// Print as JSON.
    #[arg(long)]
    #[serde(skip)]
    json: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    cache: &'static str,
    flash: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dram: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sections: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    admission: Option<String>,
    /// Whose `requests` are all requests, and whose `miss_bytes` those of reads.
    #[serde(flatten)]
    counts: Counts,
    reads: u64,
    /// Bytes written by clients, or brought in after a miss.
    set_bytes: u64,
    hit_ratio: f64,
    clwa_of_sets: f64,
    clwa_of_misses: f64,
    /// DRAM of the flash index for each object on flash, where the model has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    index_bytes_per_object: Option<f64>,
}

/// A cache and the row that will report it.
type Contender = (Row, Box<dyn Baseline>);

fn build(args: &BaselineArgs) -> Result<Vec<Contender>, CliError> {
    let usage = |text: String| Err(CliError::Usage(text));
    if args.sections == 0 {
        return usage("--sections: '0': at least 1 insertion point".to_owned());
    }
    if args.dram == Some(ByteSize(0)) {
        return usage(
            "--dram: '0': the caches before flash need room for an object, as 64m".to_owned(),
        );
    }
    if args.cache.contains(&Cache::SetAssociative) {
        let buckets = |flash: &ByteSize| flash.0 / args.bucket.0.max(1);
        let each = args.flash.iter().map(buckets).fold(0, u64::saturating_add);
        let bytes = each
            .saturating_mul(SetAssociative::BUCKET_BYTES)
            .saturating_mul(args.admission.len() as u64);
        if let Some((needed, memory)) = beyond_memory(bytes) {
            return usage(format!(
                "--flash: the buckets of set-associative take {needed} of memory, and there are {memory}: give less flash, or a larger \
                 --bucket"
            ));
        }
    }
    let mut caches: Vec<Contender> = Vec::new();
    let kinds = once("--cache", &args.cache);
    let admissions = once("--admission", &args.admission);
    for ByteSize(flash) in once("--flash", &args.flash) {
        for cache in &kinds {
            let empty = Row {
                cache: "victim",
                flash,
                dram: None,
                block: None,
                sections: None,
                admission: None,
                counts: Counts::default(),
                reads: 0,
                set_bytes: 0,
                hit_ratio: 0.0,
                clwa_of_sets: 0.0,
                clwa_of_misses: 0.0,
                index_bytes_per_object: None,
            };
            match cache {
                Cache::Victim => {
                    let dram = args.dram.map_or(flash / 7, |d| d.0);
                    let row = Row { dram: Some(dram), ..empty };
                    caches.push((row, Box::new(VictimCache::new(dram, flash))));
                }
                Cache::Ripq => {
                    let ByteSize(block) = args.block;
                    let room = flash / u64::from(args.sections);
                    if block == 0 || room < block {
                        return usage(format!(
                            "--flash: {} over {} sections is {} each, less than a block of {}: give more \
                             flash, fewer --sections or a smaller --block",
                            ByteSize(flash),
                            args.sections,
                            ByteSize(room),
                            args.block
                        ));
                    }
                    let sections = Some(args.sections);
                    let row = Row { cache: "ripq", block: Some(block), sections, ..empty };
                    caches
                        .push((row, Box::new(Ripq::new(flash, block, usize::from(args.sections)))));
                }
                Cache::SetAssociative | Cache::FifoLog => {
                    for text in &admissions {
                        let dram = args.dram.map_or(flash / 7, |d| d.0);
                        let config = HybridConfig {
                            dram,
                            flash,
                            admission: baseline::admission(text).map_err(refused)?,
                            mean_object: args.mean_object.0,
                            seed: args.seed,
                        };
                        let row = Row {
                            dram: Some(dram),
                            admission: Some(text.clone()),
                            ..empty.clone()
                        };
                        caches.push(hybrid(args, *cache, &config, row)?);
                    }
                }
            }
        }
    }
    Ok(caches)
}

fn refused(e: BaselineError) -> CliError {
    let flag = match &e {
        BaselineError::Size { what, .. } => format!("--{}: ", what.replace('_', "-")),
        BaselineError::Admission(_) | BaselineError::UnknownAdmission(_) => "--".to_owned(),
    };
    CliError::Usage(format!("{flag}{e}"))
}

fn hybrid(
    args: &BaselineArgs,
    cache: Cache,
    config: &HybridConfig,
    row: Row,
) -> Result<Contender, CliError> {
    if cache == Cache::SetAssociative {
        // More than 32 bits are refused by the model as too large.
        let bucket = u32::try_from(args.bucket.0).unwrap_or(u32::MAX);
        let model = SetAssociative::new(config, SetParams { bucket }).map_err(refused)?;
        return Ok((Row { cache: "set-associative", ..row }, Box::new(model)));
    }
    let params = LogParams { region: args.region.0, align: args.align, reinsert: args.reinsert };
    let model = FifoLog::new(config, params).map_err(refused)?;
    Ok((Row { cache: "fifo-log", ..row }, Box::new(model)))
}

/// What was asked since counting began.
#[derive(Clone, Copy, Debug, Default)]
struct Asked {
    requests: u64,
    reads: u64,
    written_bytes: u64,
}

impl Asked {
    /// The row of a cache, over reads as `larder sim run` has it: for the models a write is a request that missed.
    fn row(&self, row: Row, cache: &dyn Baseline) -> Row {
        let counts = cache.counts();
        let share =
            |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let set_bytes = counts.miss_bytes;
        let miss_bytes = set_bytes.saturating_sub(self.written_bytes);
        Row {
            counts: Counts { requests: self.requests, miss_bytes, ..counts },
            reads: self.reads,
            set_bytes,
            hit_ratio: share(counts.hits, self.reads),
            clwa_of_sets: share(counts.flash_bytes, set_bytes),
            clwa_of_misses: share(counts.flash_bytes, miss_bytes),
            index_bytes_per_object: cache.index_size().map(|s| s.per_object()),
            ..row
        }
    }
}

pub(super) fn run(args: &BaselineArgs) -> Result<(), CliError> {
    let mut caches = build(args)?;
    let trace = args.input.open()?;
    let settings = Settings::new(&args.input.options(), trace.format);
    let (mut reader, hash) = Hashed::over(trace.reader);
    let mut interner = Interner::new();
    let mut watch = Watch::new(1);
    let (mut requests, mut asked) = (0u64, Asked::default());
    while let Some(request) = reader.next() {
        let request = request.map_err(trace_error)?;
        let item = Item::from(&request);
        let Some(tag) = interner.intern(item.id) else {
            return Err(CliError::Runtime("the trace has more than 2^32 - 1 objects".to_owned()));
        };
        if requests == args.warmup && requests > 0 {
            caches.iter_mut().for_each(|(_, cache)| cache.reset_counts());
            asked = Asked::default();
        }
        requests += 1;
        asked.requests += 1;
        if requests.is_multiple_of(1 << 16) {
            watch.tick(&*reader, requests);
        }
        let (reads, writes) = (request.op.is_read(), request.op.is_write());
        asked.reads += u64::from(reads);
        if writes {
            asked.written_bytes += u64::from(item.size);
        }
        for (_, cache) in &mut caches {
            // What is written is a new version, whatever its size.
            if writes || item.removes {
                cache.remove(tag);
            }
            if reads || writes {
                cache.request(tag, item.size);
            }
        }
    }
    watch.finish();
    if args.warmup > 0 && requests <= args.warmup {
        return Err(CliError::Usage(format!(
            "--warmup: '{}': the trace has {requests} requests, so that none is left to count",
            args.warmup
        )));
    }
    note_skipped(&*reader);
    let rows: Vec<Row> =
        caches.into_iter().map(|(row, cache)| asked.row(row, cache.as_ref())).collect();
    let origin =
        Origin::new(args.seed, &args.input.trace, &hash, configuration(Some(&settings), args)?);
    if args.json {
        return print_json(&origin.of(&rows));
    }
    let header = [
        "cache",
        "admission",
        "flash",
        "DRAM",
        "hit ratio",
        "CLWA of misses",
        "flash written",
        "missed",
        "index B/object",
    ];
    let mut table = Columns::new(3, 2, header);
    for row in &rows {
        table.row([
            row.cache.to_owned(),
            row.admission.clone().unwrap_or_else(|| "-".to_owned()),
            ByteSize(row.flash).to_string(),
            row.dram.map_or("-".to_owned(), |d| ByteSize(d).to_string()),
            format!("{:.4}", row.hit_ratio),
            format!("{:.4}", row.clwa_of_misses),
            ByteSize(row.counts.flash_bytes).to_string(),
            ByteSize(row.counts.miss_bytes).to_string(),
            row.index_bytes_per_object.map_or("-".to_owned(), |b| format!("{b:.2}")),
        ]);
    }
    table.print()?;
    proseln!(
        "hit ratio: of reads; CLWA: bytes written to flash over bytes missed, which every miss of a read brings in"
    )?;
    origin.print()
}
