//! `larder sim run`: an experiment, whole stack, in virtual time.

use std::path::PathBuf;

use clap::Parser;
use larder_base::ByteSize;
use larder_sim::experiment::{
    BlockFigures, CacheOutcome, Experiment, ExperimentError, Latency, Outcome, Point,
    run as simulate,
};
use larder_sim::sweep::Results;
use larder_trace::Reader;

use super::report::{Output, read_text};
use super::watch::Watch;
use crate::error::CliError;
use crate::out::{as_json, print_json};
use crate::table::Columns;
use crate::trace::{note, skipped_of};

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder sim run experiment.toml --html run.html --csv series.csv
  larder sim run experiment.toml --seed 7 --json")]
pub(super) struct RunArgs {
    /// The experiment, TOML (docs/simulation.md lists every key; experiments/ has examples).
    #[arg(value_name = "EXPERIMENT.toml")]
    experiment: PathBuf,
    /// Seed of hashing and of all draws, instead of the experiment's. Generated workloads have a seed of their own.
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Threads; caches run side by side. All cores when not given. Results do not depend on it.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write the time series of all caches to this file, as csv.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a report with figures to this file: one HTML file that needs nothing else.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

fn failure(e: ExperimentError) -> CliError {
    if e.is_usage() { CliError::Usage(e.to_string()) } else { CliError::Runtime(e.to_string()) }
}

/// Refuses tables that the machine has no memory for: `what` names whose.
pub(super) fn fits_memory(what: &str, bytes: u64) -> Result<(), CliError> {
    match beyond_memory(bytes) {
        Some((needed, memory)) => Err(CliError::Usage(format!(
            "{what}: the tables of its caches and drives take {needed}, and there are {memory} of memory: less flash, or a larger ssd.page"
        ))),
        None => Ok(()),
    }
}

/// So many bytes and those of the memory that may be used, where they are more.
pub(super) fn beyond_memory(bytes: u64) -> Option<(ByteSize, ByteSize)> {
    let memory = larder_runtime::machine::usable_memory().filter(|&memory| bytes > memory)?;
    Some((ByteSize(bytes), ByteSize(memory)))
}

pub(super) fn run(args: &RunArgs) -> Result<(), CliError> {
    let file = args.experiment.display().to_string();
    let text = read_text(&args.experiment, "experiment").map_err(CliError::Usage)?;
    let mut experiment = Experiment::parse(&text, &file).map_err(failure)?;
    if let Some(seed) = args.seed {
        experiment.seed = seed;
    }
    let threads = match args.threads {
        Some(0) => {
            return Err(CliError::Usage(
                "--threads '0': write a whole number, at least 1".to_owned(),
            ));
        }
        Some(n) => n,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    fits_memory(&file, experiment.table_bytes())?;
    if args.csv.is_some() && args.csv == args.html {
        let both = "--csv and --html name one file: name two";
        return Err(CliError::Usage(both.to_owned()));
    }
    let inputs = [file.as_str(), &experiment.workload.trace];
    let output = |path: &Option<PathBuf>, flag| {
        path.as_deref().map(|path| Output::create(path, flag, &inputs)).transpose()
    };
    let (csv, html) = (output(&args.csv, "--csv")?, output(&args.html, "--html")?);
    let mut watch = Watch::new(1);
    let mut skipped = None;
    let outcome = simulate(&experiment, threads, |reader: &dyn Reader, requests| {
        watch.tick(reader, requests);
        skipped = skipped_of(reader);
    });
    watch.finish();
    let outcome = outcome.map_err(failure)?;
    note(skipped);
    if let Some(csv) = csv {
        csv.write(series_csv(&outcome)?.as_bytes())?;
    }
    if let Some(html) = html {
        let json = as_json(&outcome)?;
        let mut results = Results::new(Vec::new());
        results.add(None, &[], &json);
        let title = if outcome.experiment.title.is_empty() {
            file
        } else {
            outcome.experiment.title.clone()
        };
        let configuration = serde_json::to_string_pretty(&json["experiment"])
            .map_err(|e| CliError::Runtime(e.to_string()))?;
        let facts = results.facts(&[
            ("seed", outcome.seed.to_string()),
            ("experiment", text),
            ("configuration", configuration),
        ]);
        html.write_report(&results.report(&title, facts))?;
    }
    if args.json {
        print_json(&outcome)?;
    } else {
        print(&outcome)?;
    }
    let missed: Vec<String> = outcome
        .expectations
        .iter()
        .filter(|c| !c.met)
        .map(|c| format!("expected {}, found {}", c.expected, c.found))
        .collect();
    if missed.is_empty() { Ok(()) } else { Err(CliError::Runtime(missed.join("; "))) }
}

fn some(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |v| format!("{v:.digits$}"))
}

/// Digits after the point that show a number of years to three figures.
pub(super) fn digits(years: f64) -> usize {
    if years > 0.0 { (2 - years.log10().floor() as i32).clamp(0, 9) as usize } else { 1 }
}

fn micros(us: f64) -> String {
    match us {
        us if us >= 100_000.0 => format!("{:.0} ms", us / 1000.0),
        us if us >= 1000.0 => format!("{:.2} ms", us / 1000.0),
        us => format!("{us:.1} µs"),
    }
}

/// What only block caches have.
fn of_block(c: &CacheOutcome, show: fn(&BlockFigures) -> Option<String>) -> String {
    c.block.as_ref().and_then(show).unwrap_or_else(|| "-".to_owned())
}

/// What only block caches have that write back.
fn written_back(c: &CacheOutcome, show: fn(&BlockFigures) -> String) -> String {
    let back = c.block.as_ref().filter(|b| b.log_bytes > 0);
    back.map_or_else(|| "-".to_owned(), show)
}

/// Of caches of objects a write is a write to DRAM.
fn writes_of_block(c: &CacheOutcome, figure: fn(&Latency) -> f64) -> String {
    if c.block.is_some() { latency(&c.latency.write, figure) } else { "-".to_owned() }
}

/// A row of the table: what it shows, and how.
type Row = (&'static str, fn(&CacheOutcome) -> String);

const ROWS: &[Row] = &[
    ("DRAM for objects", |c| {
        if c.block.is_some() { "-".to_owned() } else { ByteSize(c.dram).to_string() }
    }),
    ("flash", |c| ByteSize(c.flash).to_string()),
    ("hit ratio", |c| format!("{:.4}", c.hit_ratio)),
    ("  in DRAM", |c| format!("{:.4}", c.dram_hit_ratio)),
    ("  on flash", |c| format!("{:.4}", c.flash_hit_ratio)),
    ("miss ratio", |c| format!("{:.4}", c.miss_ratio)),
    ("  by bytes", |c| format!("{:.4}", c.byte_miss_ratio)),
    ("CLWA, of bytes set", |c| format!("{:.3}", c.clwa_of_sets)),
    ("CLWA, of bytes missed", |c| format!("{:.3}", c.clwa_of_misses)),
    ("DLWA", |c| some(c.dlwa, 3)),
    ("CLWA of sets × DLWA", |c| some(c.write_amplification, 3)),
    ("written to flash", |c| ByteSize(c.flash_bytes).to_string()),
    ("  per second", |c| ByteSize(c.flash_bytes_per_second as u64).to_string()),
    ("drive life, years", |c| some(c.life_years, c.life_years.map_or(0, digits))),
    ("flash reads per hit", |c| some(c.flash_reads_per_hit, 3)),
    ("flash reads per miss", |c| some(c.flash_reads_per_miss, 4)),
    ("records, of bytes written", |c| some(c.flash_fill, 3)),
    ("left flash unread", |c| some(c.unread_share, 3)),
    ("left DRAM unjudged", |c| c.evicted_unjudged.map_or("-".to_owned(), |n| n.to_string())),
    ("objects on flash", |c| c.flash_objects.map_or("-".to_owned(), |n| n.to_string())),
    ("other DRAM per object", |c| {
        c.metadata_per_flash_object.map_or("-".to_owned(), |b| format!("{b:.1} B"))
    }),
    ("simulator's memory per object", |c| {
        c.simulator_bytes_per_object.map_or("-".to_owned(), |b| format!("{b:.1} B"))
    }),
    ("read latency, mean", |c| latency(&c.latency.read, |l| l.mean_us)),
    ("  median", |c| latency(&c.latency.read, |l| l.p50_us)),
    ("  90 %", |c| latency(&c.latency.read, |l| l.p90_us)),
    ("  99 %", |c| latency(&c.latency.read, |l| l.p99_us)),
    ("  99.9 %", |c| latency(&c.latency.read, |l| l.p999_us)),
    ("hit on flash, mean", |c| latency(&c.latency.hit_flash, |l| l.mean_us)),
    ("  99 %", |c| latency(&c.latency.hit_flash, |l| l.p99_us)),
    ("miss, mean", |c| latency(&c.latency.miss, |l| l.mean_us)),
    ("lines read that hit", |c| of_block(c, |b| Some(format!("{:.4}", b.line_hit_ratio)))),
    ("bytes of metadata that hit", |c| {
        of_block(c, |b| b.metadata_hit_ratio.map(|r| format!("{r:.4}")))
    }),
    ("bytes of data that hit", |c| of_block(c, |b| b.data_hit_ratio.map(|r| format!("{r:.4}")))),
    ("CLWA, of bytes written", |c| of_block(c, |b| b.clwa_of_writes.map(|w| format!("{w:.3}")))),
    ("  × DLWA", |c| of_block(c, |b| b.total_write_amplification.map(|w| format!("{w:.3}")))),
    ("lines moved by its cleaner", |c| {
        of_block(c, |b| (b.cleaned > 0).then(|| b.copied.to_string()))
    }),
    ("requests that ask the store", |c| of_block(c, |b| Some(format!("{:.4}", b.store_share)))),
    ("  of reads", |c| of_block(c, |b| Some(format!("{:.4}", b.store_read_share)))),
    ("requests per second", |c| of_block(c, |b| Some(format!("{:.0}", b.requests_per_second)))),
    ("write latency, mean", |c| writes_of_block(c, |l| l.mean_us)),
    ("  99 %", |c| writes_of_block(c, |l| l.p99_us)),
    ("flush latency, mean", |c| {
        of_block(c, |b| (b.flush.count > 0).then(|| micros(b.flush.mean_us)))
    }),
    ("  99 %", |c| of_block(c, |b| (b.flush.count > 0).then(|| micros(b.flush.p99_us)))),
    ("written to the log", |c| written_back(c, |b| ByteSize(b.log_bytes).to_string())),
    ("  destaged", |c| written_back(c, |b| ByteSize(b.destaged_bytes).to_string())),
    ("  epochs in its journal", |c| of_block(c, |b| (b.epochs > 0).then(|| b.epochs.to_string()))),
    ("    bytes of them", |c| {
        of_block(c, |b| (b.epochs > 0).then(|| ByteSize(b.journal_bytes).to_string()))
    }),
    ("dirty at the end", |c| written_back(c, |b| ByteSize(b.dirty_bytes).to_string())),
    ("  at most", |c| written_back(c, |b| ByteSize(b.dirty_bytes_max).to_string())),
    ("staleness, mean", |c| written_back(c, |b| micros(b.staleness_mean_s * 1e6))),
    ("  at most", |c| written_back(c, |b| micros(b.staleness_max_s * 1e6))),
    ("stalls at the bound", |c| written_back(c, |b| b.stalls.to_string())),
    ("  of time", |c| written_back(c, |b| format!("{:.2} %", b.stalled_share * 100.0))),
    ("slowed down, of time", |c| written_back(c, |b| format!("{:.2} %", b.slowed_share * 100.0))),
    ("DRAM per line", |c| of_block(c, |b| Some(format!("{:.1} B", b.dram_per_line)))),
    ("drive busy", |c| format!("{:.2} %", c.flash_utilisation * 100.0)),
    ("backing store busy", |c| match c.backend_utilisation {
        times if times > 1.0 => format!("{times:.2} ×"),
        share => format!("{:.2} %", share * 100.0),
    }),
];

/// A figure of a distribution; of an empty one there is none.
fn latency(of: &Latency, figure: fn(&Latency) -> f64) -> String {
    if of.count == 0 { "-".to_owned() } else { micros(figure(of)) }
}

fn print(outcome: &Outcome) -> Result<(), CliError> {
    let (w, e) = (&outcome.workload, &outcome.experiment);
    if !e.title.is_empty() {
        proseln!("{}", e.title)?;
    }
    proseln!("trace {}, hash {}", e.workload.trace, w.trace_hash)?;
    proseln!(
        "{} requests ({} warm up), {} reads, {} writes, {} removals, {:.1} s{}",
        w.requests,
        e.workload.warmup,
        w.reads,
        w.writes,
        w.removals,
        w.seconds,
        if w.times_from_rate { " by workload.rate" } else { "" }
    )?;
    proseln!("larder {}, seed {}", outcome.version, outcome.seed)?;
    let names = outcome.caches.iter().map(|c| c.name.clone());
    let mut table = Columns::new(1, 1, std::iter::once(String::new()).chain(names));
    for (what, show) in ROWS {
        let cells: Vec<String> = outcome.caches.iter().map(show).collect();
        if cells.iter().any(|cell| cell != "-") {
            table.row(std::iter::once((*what).to_owned()).chain(cells));
        }
    }
    table.print()?;
    for c in outcome.caches.iter().filter(|c| !c.applications.is_empty()) {
        print_applications(c)?;
    }
    proseln!(
        "bytes set: written by clients, or brought in after a miss; bytes missed: the latter"
    )?;
    if outcome.caches.iter().any(|c| c.backend_utilisation > 1.0) {
        proseln!(
            "backing store busy N ×: the store works on N requests at a time in the mean, or, where it is limited, is asked for N times what it can do"
        )?;
    }
    if e.ssd.tbw.is_none() {
        proseln!(
            "drive life: at {} drive write{} a day for {} years",
            e.ssd.dwpd,
            if e.ssd.dwpd == 1.0 { "" } else { "s" },
            e.ssd.warranty_years
        )?;
    }
    for c in &outcome.expectations {
        let met = if c.met { "met    " } else { "NOT MET" };
        let text = format!("{met}  {} (found {})", c.expected, c.found);
        crate::table::print_prose(&text, met.len() + 2)?;
    }
    proseln!("--json prints the whole configuration, all percentiles and the time series")
}

/// What each application has had.
fn print_applications(c: &CacheOutcome) -> Result<(), CliError> {
    let of = format!("applications of {}", c.name);
    let names =
        ["reads", "hit ratio", "in DRAM", "on flash", "sets", "has of DRAM", "has of flash"];
    let names = names.into_iter().map(str::to_owned);
    let mut table = Columns::new(1, 1, std::iter::once(of).chain(names));
    for (name, a) in &c.applications {
        let of_reads = |n: u64| if a.reads == 0 { 0.0 } else { n as f64 / a.reads as f64 };
        table.row([
            name.clone(),
            a.reads.to_string(),
            format!("{:.4}", a.hit_ratio),
            format!("{:.4}", of_reads(a.hits_dram)),
            format!("{:.4}", of_reads(a.hits_flash)),
            a.sets.to_string(),
            format!("{:.4}", a.dram_share),
            format!("{:.4}", a.flash_share),
        ]);
    }
    table.print()
}

/// A column of the time series.
type Column = (&'static str, fn(&Point) -> String);

const COLUMNS: &[Column] = &[
    ("time", |p| p.time.to_string()),
    ("interval_share", |p| p.interval_share.to_string()),
    ("requests", |p| p.requests.to_string()),
    ("reads", |p| p.reads.to_string()),
    ("dram_hit_ratio", |p| p.dram_hit_ratio.to_string()),
    ("flash_hit_ratio", |p| p.flash_hit_ratio.to_string()),
    ("flash_bytes", |p| p.flash_bytes.to_string()),
    ("clwa_of_sets", |p| p.clwa_of_sets.to_string()),
    ("dlwa", |p| p.dlwa.to_string()),
    ("latency_read_mean_us", |p| p.latency_read_mean_us.to_string()),
    ("latency_read_p99_us", |p| p.latency_read_p99_us.to_string()),
];

/// A first line that says where the figures come from, as a remark; names; a line for each point.
fn series_csv(outcome: &Outcome) -> Result<String, CliError> {
    let configuration =
        serde_json::to_string(&outcome.experiment).map_err(|e| CliError::Runtime(e.to_string()))?;
    let names: Vec<&str> = COLUMNS.iter().map(|c| c.0).collect();
    let mut out = format!(
        "# larder {} seed {} trace {} hash {} configuration {configuration}\ncache,{}\n",
        outcome.version,
        outcome.seed,
        outcome.experiment.workload.trace,
        outcome.workload.trace_hash,
        names.join(",")
    );
    for cache in &outcome.caches {
        // A name may hold what csv holds dear.
        let name = cache.name.replace('"', "\"\"");
        for point in &cache.series {
            let cells: Vec<String> = COLUMNS.iter().map(|c| c.1(point)).collect();
            out.push_str(&format!("\"{name}\",{}\n", cells.join(",")));
        }
    }
    Ok(out)
}
