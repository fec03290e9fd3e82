//! `larder sim mrc`: miss ratios of eviction policies.

use std::cell::RefCell;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use larder_base::{ByteSize, Short};
use larder_policy::eviction::{EvictionKind, Unit};
use larder_sim::mrc::{Filter, Found, Items, Job, Row, Sampler, Sweep, SweepError, sweep};
use larder_sim::report::miss_ratio_curves;
use larder_trace::{HashOf, Hashed, Reader};
use serde::Serialize;

use super::once;
use super::origin::{Origin, configuration};
use super::report::Output;
use super::watch::Watch;
use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;
use crate::trace::{Input, Settings, note, skipped_of, trace_error};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum UnitArg {
    /// Every object takes 1; sizes are numbers of objects.
    Objects,
    /// Objects take their bytes (key and value); sizes are bytes.
    Bytes,
}

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder sim mrc trace.zst --policies lru,s3fifo,belady \\
      --sizes 1000,10000,100000
  larder sim mrc trace.zst --unit bytes --sizes 64m,1g --policies all \\
      --html curves.html
  larder sim mrc 'gen:zipf?objects=20000&requests=100000' --lru-curve --json")]
pub(super) struct MrcArgs {
    #[command(flatten)]
    input: Input,
    /// Policies, separated by commas: lru, fifo, clock, clock2, clock3, lfu, slru, 2q, arc, lirs, sieve, s3fifo
    /// (libCacheSim's release of 2024), s3fifo-2025, wtinylfu, gdsf, belady (reads the trace twice); or all.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "lru")]
    policies: Vec<String>,
    /// Cache sizes, separated by commas: objects, or bytes (4096, 64k, 512m, 4g) with --unit bytes [default: 0.1, 0.3, 1, 3, 10
    /// and 30 % of all objects of the trace, which is then read once more].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    sizes: Vec<String>,
    /// What sizes count.
    #[arg(long, value_enum, default_value = "objects")]
    unit: UnitArg,
    /// Requests that only fill the caches, before counting starts.
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: u64,
    /// Simulate only this share of the objects (0 to 1), in caches scaled down alike; adds an estimate of the error.
    #[arg(long, value_name = "SHARE")]
    sample: Option<f64>,
    /// What of the misses is taken in, separated by commas: all, reject_first, probability:P. Each with each policy.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "all")]
    admission: Vec<Filter>,
    /// Seed of the sample, and of admission by chance.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print the exact LRU curve too (objects only), at this many sizes (1 to 100,000) up to all objects, from one pass.
    #[arg(long, value_name = "POINTS", num_args = 0..=1, default_missing_value = "64", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    lru_curve: Option<u64>,
    /// Threads; all cores when not given.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write the curves as a report to this file too: one HTML file that needs nothing else.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print as JSON: a list of {policy, size, requests, misses, request_bytes, miss_bytes, …}.
    #[arg(long)]
    json: bool,
}

/// A sample of fewer objects says little: SHARDS is within a few hundredths from some thousands on (Waldspurger et al.,
/// FAST '15, figure 3).
const FEW_OBJECTS: u64 = 1_000;

fn policies(names: &[String]) -> Result<Vec<EvictionKind>, CliError> {
    let mut kinds = Vec::new();
    for name in names {
        if name == "all" {
            kinds.extend(EvictionKind::ALL);
        } else {
            let kind = name.parse();
            kinds.push(kind.map_err(|e| CliError::Usage(format!("--policies: {e}")))?);
        }
    }
    Ok(once("--policies", &kinds))
}

fn parse_sizes(texts: &[String], unit: Unit) -> Result<Vec<u64>, CliError> {
    texts
        .iter()
        .map(|text| {
            let size = match unit {
                Unit::Objects => text.trim().parse::<u64>().map_err(|_| {
                    let remedy = "with --unit objects a size is a whole number of objects; --unit bytes takes 64m and the like";
                    CliError::Usage(format!("--sizes: '{text}': {remedy}"))
                })?,
                Unit::Bytes => {
                    let size = text.parse::<ByteSize>();
                    size.map_err(|e| CliError::Usage(format!("--sizes: {e}")))?.0
                }
            };
            if size == 0 || size > 1 << 60 {
                let problem = format!("--sizes: '{text}': a size is between 1 and 2^60");
                return Err(CliError::Usage(problem));
            }
            Ok(size)
        })
        .collect()
}

/// Shares of all objects that caches have where no size is given.
const DEFAULT_SHARES: [f64; 6] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3];

/// Those shares of a footprint, to two digits; every size once.
fn default_sizes(footprint: u64) -> Vec<u64> {
    let rounded = |x: f64| {
        let unit = 10f64.powf((x.log10().floor() - 1.0).max(0.0));
        ((x / unit).round() * unit).max(1.0) as u64
    };
    let mut sizes: Vec<u64> =
        DEFAULT_SHARES.iter().map(|share| rounded((share * footprint as f64).max(1.0))).collect();
    sizes.dedup();
    sizes
}

/// What all objects of the trace take, in the unit of sizes: objects, or bytes at each object's last size.
fn footprint(input: &Input, unit: Unit) -> Result<u64, CliError> {
    let reader = larder_trace::open(&input.trace, &input.options()).map_err(trace_error)?.reader;
    let mut items = Items::new(reader);
    let mut objects =
        std::collections::HashMap::<u64, u32, BuildHasherDefault<DefaultHasher>>::default();
    let mut watch = Watch::new(1);
    let mut requests = 0;
    while let Some(item) = items.next() {
        let item = item.map_err(trace_error)?;
        objects.insert(item.id, item.size);
        requests += 1;
        watch.tick(items.inner(), requests);
    }
    watch.finish();
    Ok(match unit {
        Unit::Objects => objects.len() as u64,
        Unit::Bytes => objects.values().map(|&size| u64::from(size)).sum(),
    })
}

/// The sizes that were given, or else shares of the trace's objects.
fn sizes(args: &MrcArgs, unit: Unit) -> Result<Vec<u64>, CliError> {
    if !args.sizes.is_empty() || args.lru_curve.is_some() {
        return Ok(once("--sizes", &parse_sizes(&args.sizes, unit)?));
    }
    if args.input.trace == "-" {
        let problem = "--sizes: standard input cannot be read twice, and default sizes are shares of what it holds: give \
                       sizes, such as --sizes 1000,10000";
        return Err(CliError::Usage(problem.to_owned()));
    }
    let all = footprint(&args.input, unit)?;
    let shown = match unit {
        Unit::Objects => format!("{all} objects"),
        Unit::Bytes => format!("{} of objects", ByteSize(all)),
    };
    noteln!("larder: no --sizes: caches of 0.1, 0.3, 1, 3, 10 and 30 % of {shown}");
    Ok(default_sizes(all))
}

fn plan(args: &MrcArgs) -> Result<Sweep, CliError> {
    let unit = match args.unit {
        UnitArg::Objects => Unit::Objects,
        UnitArg::Bytes => Unit::Bytes,
    };
    let admissions = once("--admission", &args.admission);
    let kinds = policies(&args.policies)?;
    if args.input.trace == "-" && kinds.contains(&EvictionKind::Belady) {
        let problem =
            "belady reads the trace twice, which standard input does not allow: name a file";
        return Err(CliError::Usage(problem.to_owned()));
    }
    let sample = match args.sample {
        None => None,
        Some(rate) => Some(Sampler::new(rate, args.seed).ok_or_else(|| {
            let shown = Short(rate);
            CliError::Usage(format!("--sample: '{shown}' is not a share: give 0 < SHARE <= 1"))
        })?),
    };
    if args.lru_curve.is_some() && (sample.is_some() || unit == Unit::Bytes) {
        let problem = "--lru-curve is exact and in objects: leave out --sample and --unit bytes";
        return Err(CliError::Usage(problem.to_owned()));
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = match args.threads {
        Some(0) => {
            return Err(CliError::Usage(
                "--threads '0': write a whole number, at least 1".to_owned(),
            ));
        }
        Some(n) => n,
        None => cores,
    };
    let curve = args.lru_curve.is_some();
    let sizes = sizes(args, unit)?;
    let mut jobs = Vec::new();
    for &policy in &kinds {
        for &admission in &admissions {
            jobs.extend(sizes.iter().map(|&size| Job { policy, size, admission }));
        }
    }
    Ok(Sweep { jobs, unit, warmup: args.warmup, threads, seed: args.seed, sample, curve })
}

/// What all rows were simulated with; policy, size and admission are the row's own.
#[derive(Serialize)]
struct Shared {
    unit: UnitArg,
    warmup: u64,
    sample: Option<f64>,
}

fn failure(e: SweepError) -> CliError {
    match e {
        SweepError::Trace(e) => trace_error(e),
        e @ SweepError::NothingCounted { .. } => CliError::Usage(e.to_string()),
        e => CliError::Runtime(e.to_string()),
    }
}

pub(super) fn run(args: &MrcArgs) -> Result<(), CliError> {
    let plan = plan(args)?;
    let html =
        args.html.as_deref().map(|path| Output::create(path, "--html", &[&args.input.trace]));
    let html = html.transpose()?;
    let options = args.input.options();
    // Of the last reading: they are all the same.
    let read = RefCell::new((HashOf::default(), None));
    let open = || {
        let trace = larder_trace::open(&args.input.trace, &options)?;
        let (reader, of) = Hashed::over(trace.reader);
        *read.borrow_mut() = (of, trace.format);
        Ok(Items::new(reader))
    };
    let passes = if plan.jobs.iter().any(|j| j.policy.needs_future()) { 2 } else { 1 };
    let mut watch = Watch::new(passes);
    let (mut skipped, mut blocks) = (None, false);
    let found = sweep(open, &plan, |items, requests| {
        let reader: &dyn Reader = items.inner();
        watch.tick(reader, requests);
        blocks |= items.has_blocks();
        skipped = skipped_of(reader);
    });
    watch.finish();
    let found = found.map_err(failure)?;
    note(skipped);
    if args.input.pages.is_some() && !blocks {
        noteln!(
            "larder: --pages: '{}' has no block I/O, so that nothing was split",
            args.input.trace
        );
    }
    if plan.sample.is_some() && found.objects < FEW_OBJECTS {
        noteln!(
            "larder: only {} objects were sampled (--sample): expect large errors under {FEW_OBJECTS}",
            found.objects
        );
    }
    let (hash, format) = &*read.borrow();
    let settings = Settings::new(&options, *format);
    let shared = Shared { unit: args.unit, warmup: args.warmup, sample: args.sample };
    let shared = configuration(Some(&settings), &shared)?;
    let origin = Origin::new(args.seed, &args.input.trace, hash, shared);
    let rows = with_curve(&found, args.lru_curve);
    if let Some(html) = html {
        let title = format!("Miss ratios of {}", args.input.trace);
        let facts = facts(&origin, &found);
        html.write_report(&miss_ratio_curves(&title, &rows, plan.unit, facts))?;
    }
    if args.json {
        print_json(&origin.of(&rows))?;
    } else {
        print_table(&rows, plan.unit)?;
        proseln!(
            "{} objects, {} of simulator memory",
            found.objects,
            ByteSize(found.memory_bytes)
        )?;
        origin.print()?;
    }
    Ok(())
}

/// Where the numbers of a report come from.
fn facts(origin: &Origin, found: &Found) -> Vec<(String, String)> {
    let mut facts = origin.facts();
    facts.push(("objects simulated".to_owned(), found.objects.to_string()));
    facts
}

/// The rows, followed by the points of the exact LRU curve.
fn with_curve(found: &Found, points: Option<u64>) -> Vec<Row> {
    let mut rows = found.rows.clone();
    if let (Some(curve), Some(points)) = (&found.curve, points) {
        rows.extend(
            curve.sizes(points as usize, found.objects).into_iter().map(|size| curve.row(size)),
        );
    }
    rows
}

fn print_table(rows: &[Row], unit: Unit) -> Result<(), CliError> {
    let sampled = rows.iter().any(|r| r.sample_rate.is_some());
    let mut header = vec!["policy", "size", "requests", "misses", "miss ratio", "byte miss ratio"];
    if sampled {
        header.push("± error");
    }
    let mut table = Columns::new(2, 1, header);
    for row in rows {
        let size = match unit {
            Unit::Objects => row.size.to_string(),
            Unit::Bytes => ByteSize(row.size).to_string(),
        };
        let mut cells = vec![
            match &row.admission {
                None if row.curve => format!("{} (curve)", row.policy),
                None => row.policy.to_owned(),
                Some(admission) => format!("{} + {admission}", row.policy),
            },
            size,
            row.requests.to_string(),
            row.misses.to_string(),
            format!("{:.4}", row.miss_ratio),
            format!("{:.4}", row.byte_miss_ratio),
        ];
        if sampled {
            cells.push(format!("{:.4}", row.miss_ratio_error.unwrap_or(0.0)));
        }
        table.row(cells);
    }
    table.print()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_sizes_are_shares_of_what_there_is() {
        assert_eq!(default_sizes(1_000_000), [1_000, 3_000, 10_000, 30_000, 100_000, 300_000]);
        assert_eq!(default_sizes(182_790), [180, 550, 1_800, 5_500, 18_000, 55_000]);
        assert_eq!(default_sizes(20), [1, 2, 6]);
        assert_eq!(default_sizes(0), [1]);
    }
}
