//! `larder sim oracle`: the best offline heuristic for a flash log with a write budget.

use clap::{Parser, ValueEnum};
use larder_base::ByteSize;
use larder_policy::admission::Objective;
use larder_sim::kv::workload::footprint;
use larder_sim::kv::{CacheError, Counters, Server, Sizes, study_of};
use larder_sim::lab::oracle::{self, Found, Known, Memory, Search, Setting};
use larder_trace::{Hashed, Request};
use serde::Serialize;

use super::origin::{Origin, configuration};
use super::watch::Watch;
use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;
use crate::trace::{Input, Settings, note_skipped, trace_error};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Order {
    NextRead,
    Lru,
}

#[derive(Debug, Parser, Serialize)]
#[command(after_help = "\
It is an offline heuristic, not a bound: it knows when each object is read next, and
nothing proves that no other choice has more hits. The trace is held in memory, some
130 bytes a request.

Examples:
  larder sim oracle trace.zst --dram 16m --flash 112m
  larder sim oracle trace.zst --memory 64m --flash 1g --levels 1,0.3,0.1,0.03
  larder sim oracle 'gen:memcachier?objects=200000&requests=1000000&rate=1000' \\
      --dram 4m --flash 28m --write-rate 50k --json")]
pub(super) struct OracleArgs {
    #[command(flatten)]
    #[serde(skip)]
    input: Input,
    /// DRAM for objects. This or --memory.
    #[arg(
        long,
        value_name = "SIZE",
        required_unless_present = "memory",
        conflicts_with = "memory"
    )]
    dram: Option<ByteSize>,
    /// DRAM with everything in it, as larder kv -m: the server's plan says what is left for objects.
    #[arg(long, short = 'm', value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Flash.
    #[arg(long, value_name = "SIZE")]
    flash: ByteSize,
    /// Mean size of an object on flash, as larder kv --flash-object-size; the trace's own when not given.
    #[arg(long, value_name = "SIZE")]
    flash_object_size: Option<ByteSize>,
    /// Budgets as shares of what the policy all writes after the warm-up, separated by commas.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "0.3,0.1",
        conflicts_with_all = ["writes", "write_rate"]
    )]
    #[serde(skip)]
    levels: Vec<f64>,
    /// A budget in bytes, for all that is written after the warm-up; several, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', conflicts_with = "write_rate")]
    #[serde(skip)]
    writes: Vec<ByteSize>,
    /// A budget in bytes per second of the trace's time; several, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    #[serde(skip)]
    write_rate: Vec<ByteSize>,
    /// Requests that only fill the cache, before counting starts; a third of them when not given.
    #[arg(long, value_name = "N")]
    warmup: Option<u64>,
    /// Which object leaves DRAM: next-read, the one that is read next the latest; lru, the one that was asked for the longest ago, so that the
    /// future is known to admission and reinsertion alone.
    #[arg(long, value_enum, value_name = "ORDER", default_value = "next-read")]
    dram_order: Order,
    /// Which hits are sought: requests or bytes.
    #[arg(long, value_name = "WHICH", default_value = "requests")]
    objective: Objective,
    /// Runs, at most, between the last threshold that keeps to a budget and the first that does not.
    #[arg(long, value_name = "N", default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=1000))]
    most_runs: u32,
    /// Seed of the policy all, which the levels are shares of.
    #[arg(long, default_value_t = 1, value_name = "N")]
    #[serde(skip)]
    seed: u64,
    /// Print as JSON.
    #[arg(long)]
    #[serde(skip)]
    json: bool,
}

#[derive(Clone, Debug, Serialize)]
struct Row {
    /// `oracle`, or the policy that it stands beside.
    cache: &'static str,
    /// Share of what `all` writes that was the budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    level: Option<f64>,
    /// Bytes that might be written after the warm-up.
    #[serde(skip_serializing_if = "Option::is_none")]
    budget: Option<u64>,
    dram: u64,
    flash: u64,
    segment: u32,
    reads: u64,
    hits_dram: u64,
    hits_flash: u64,
    hit_ratio: f64,
    byte_hit_ratio: f64,
    flash_bytes: u64,
    /// Of the budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    writes: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    setting: Option<Setting>,
}

fn refused(e: &CacheError) -> CliError {
    CliError::Usage(e.to_string())
}

/// What was asked for as a budget: its level, if it is one, and its bytes.
type Budget = (Option<f64>, u64);

fn budgets(
    args: &OracleArgs,
    requests: &[Request],
    warmup: usize,
    all: Option<u64>,
) -> Result<Vec<Budget>, CliError> {
    if let Some(all) = all {
        let of = |&level: &f64| (Some(level), (all as f64 * level) as u64);
        return Ok(args.levels.iter().map(of).collect());
    }
    if args.write_rate.is_empty() {
        return Ok(args.writes.iter().map(|w| (None, w.0)).collect());
    }
    let time = |r: Option<&Request>| r.and_then(|r| r.time);
    let (Some(from), Some(to)) = (time(requests.get(warmup)), time(requests.last())) else {
        return Err(CliError::Usage(
            "--write-rate: the trace has no times: give it some with --rate, or a budget with --writes"
                .to_owned(),
        ));
    };
    let seconds = to.saturating_sub(from).as_secs_f64();
    Ok(args.write_rate.iter().map(|r| (None, (r.0 as f64 * seconds) as u64)).collect())
}

pub(super) fn run(args: &OracleArgs) -> Result<(), CliError> {
    for level in &args.levels {
        if !(0.001..=1.0).contains(level) {
            return Err(CliError::Usage(format!("--levels: '{level}': between 0.001 and 1")));
        }
    }
    let trace = args.input.open()?;
    let settings = Settings::new(&args.input.options(), trace.format);
    let (mut reader, hash) = Hashed::over(trace.reader);
    let mut watch = Watch::new(1);
    let mut requests: Vec<Request> = Vec::new();
    while let Some(request) = reader.next() {
        requests.push(request.map_err(trace_error)?);
        if requests.len().is_multiple_of(1 << 16) {
            watch.tick(&*reader, requests.len() as u64);
        }
    }
    watch.finish();
    note_skipped(&*reader);
    let warmup = args.warmup.map_or(requests.len() / 3, |n| n as usize);
    if requests.len() <= warmup {
        return Err(CliError::Usage(format!(
            "--warmup: '{warmup}': the trace has {} requests, so that none is left to count",
            requests.len()
        )));
    }
    let (bytes, objects) = footprint(&requests);
    let object = args.flash_object_size.map_or(bytes / objects.max(1) + 40, |s| s.0);
    let sizes = match (args.memory, args.dram) {
        (Some(memory), _) => Sizes::Server(Server {
            memory: memory.0,
            flash: args.flash.0,
            object: u32::try_from(object).unwrap_or(u32::MAX),
            max_item: study_of(0, 0).max_item.min(1 << 20) as u32,
        }),
        (None, dram) => {
            let mut study = study_of(dram.map_or(0, |d| d.0), args.flash.0);
            study.object = object;
            Sizes::Study(study)
        }
    };
    let model = oracle::Sizes::of(&sizes).map_err(|e| refused(&e))?;
    let by_level = args.writes.is_empty() && args.write_rate.is_empty();
    let mut rows = Vec::new();
    let row = |cache, c: &Counters| Row {
        cache,
        level: None,
        budget: None,
        dram: model.dram,
        flash: u64::from(model.segment) * u64::from(model.segments),
        segment: model.segment,
        reads: c.gets,
        hits_dram: c.hits_dram,
        hits_flash: c.hits_flash,
        hit_ratio: c.hit_ratio(),
        byte_hit_ratio: c.byte_hit_ratio(),
        flash_bytes: c.flash_bytes,
        writes: None,
        setting: None,
    };
    let mut all = None;
    if by_level {
        let counters = oracle::all(&requests, sizes, warmup, args.seed).map_err(|e| refused(&e))?;
        rows.push(row("all", &counters));
        all = Some(counters.flash_bytes);
    }
    let budgets = budgets(args, &requests, warmup, all)?;
    let known = Known::of(&requests).map_err(|e| CliError::Runtime(e.to_string()))?;
    drop(requests);
    let bar = crate::progress::bar(budgets.len() as u64);
    for (level, budget) in budgets {
        let search = Search {
            sizes: model,
            warmup,
            counted_from: warmup,
            budget,
            memory: match args.dram_order {
                Order::NextRead => Memory::NextRead,
                Order::Lru => Memory::Lru,
            },
            objective: args.objective,
            tolerance: 0.01,
            most_runs: args.most_runs,
        };
        let Found { counters, setting, writes, .. } = search.find(&known);
        rows.push(Row {
            level,
            budget: Some(budget),
            writes: Some(writes),
            setting: Some(setting),
            ..row("oracle", &counters)
        });
        bar.inc(1);
    }
    bar.finish_and_clear();
    let origin =
        Origin::new(args.seed, &args.input.trace, &hash, configuration(Some(&settings), args)?);
    if args.json {
        return print_json(&origin.of(&rows));
    }
    print(&rows)?;
    origin.print()
}

fn print(rows: &[Row]) -> Result<(), CliError> {
    let header = [
        "cache",
        "budget",
        "of all",
        "written to flash",
        "of the budget",
        "hit ratio",
        "in DRAM",
        "on flash",
        "by bytes",
        "threshold",
    ];
    let mut table = Columns::new(1, 2, header);
    let dash = || "-".to_owned();
    for r in rows {
        let of = |n: u64| if r.reads == 0 { 0.0 } else { n as f64 / r.reads as f64 };
        table.row([
            r.cache.to_owned(),
            r.budget.map_or_else(dash, |b| ByteSize(b).to_string()),
            r.level.map_or_else(dash, |l| format!("{l}")),
            ByteSize(r.flash_bytes).to_string(),
            r.writes.map_or_else(dash, |w| format!("{w:.3}")),
            format!("{:.4}", r.hit_ratio),
            format!("{:.4}", of(r.hits_dram)),
            format!("{:.4}", of(r.hits_flash)),
            format!("{:.4}", r.byte_hit_ratio),
            r.setting.map_or_else(dash, |s| format!("{:.3e}", s.threshold)),
        ]);
    }
    table.print()?;
    proseln!(
        "oracle: an offline heuristic that knows every object's next reads, not a bound; threshold: reads per byte of a record (by \
         bytes: bytes read per byte) from which on an object is written"
    )
}
