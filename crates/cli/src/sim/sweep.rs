//! `larder sim sweep`: an experiment at every combination of its keys' values, on all cores, resumable.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, UNIX_EPOCH};

use clap::Parser;
use larder_sim::experiment::{self, ExperimentError};
use larder_sim::report::Grid;
use larder_sim::sweep::log::{self, Line};
use larder_sim::sweep::{Cell, Results, Sweep, SweepError, write_parquet};
use larder_trace::Reader;
use signal_hook::consts::SIGINT;

use super::report::{failed_file, read_text, write_whole};
use crate::error::CliError;
use crate::out::{as_json, print_json};
use crate::table::Columns;

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder sim sweep sweep.toml --out results
  larder sim sweep sweep.toml --out results --resume")]
pub(super) struct SweepArgs {
    /// The sweep, TOML: an experiment (file = "…", or [experiment] with its tables) and [[axis]] tables of key and values.
    #[arg(value_name = "SWEEP.toml")]
    sweep: PathBuf,
    /// Where results go: cells.jsonl, results and series as csv and parquet, report.html. By default the sweep's name
    /// without .toml, here.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on with what is in the directory: finished cells are not run again.
    #[arg(long)]
    resume: bool,
    /// Threads, a cell on each; all cores when not given. Results do not depend on it.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Print a row for each cache of each cell as JSON, rather than a table.
    #[arg(long)]
    json: bool,
}

fn sweep_error(e: &SweepError) -> CliError {
    CliError::Usage(e.to_string())
}

/// Length and time of change of a trace's file; a trace that changes makes other cells.
fn stamp(trace: &str) -> String {
    let Ok(m) = std::fs::metadata(trace) else { return String::new() };
    let changed = m.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    format!("{} {}", m.len(), changed.map_or(0, |t| t.as_nanos()))
}

/// The file of finished cells, locked, and what it held.
struct Log {
    file: File,
    path: PathBuf,
    finished: log::Finished,
}

impl Log {
    fn open(dir: &Path, resume: bool) -> Result<Log, CliError> {
        std::fs::create_dir_all(dir)
            .map_err(|e| CliError::Usage(format!("--out: cannot make '{}': {e}", dir.display())))?;
        let path = dir.join("cells.jsonl");
        let failed = |e| failed_file(&path, &e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        if rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            let remedy = "another sweep writes to it: wait for it, or give another --out";
            return Err(CliError::Usage(format!("'{}': {remedy}", path.display())));
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(failed)?;
        let finished = log::read(&bytes);
        if let Some(line) = finished.foreign.first() {
            let remedy = "is no finished cell: mend or remove the line, or give another --out";
            return Err(CliError::Usage(format!("'{}' line {line} {remedy}", path.display())));
        }
        let cells = finished.lines.len() + finished.damaged.len();
        if !resume && cells > 0 {
            return Err(CliError::Usage(format!(
                "'{}' has {cells} finished cells: give --resume to go on with them, or another --out",
                path.display(),
            )));
        }
        for line in &finished.damaged {
            noteln!(
                "larder: '{}' line {line} is damaged or was changed: its cell is run again",
                path.display()
            );
        }
        // What a kill left of a line goes.
        file.set_len(finished.whole).map_err(failed)?;
        file.seek(SeekFrom::End(0)).map_err(failed)?;
        Ok(Log { file, path, finished })
    }

    fn append(&mut self, line: Line) -> Result<(), CliError> {
        let written =
            self.file.write_all(line.text.as_bytes()).and_then(|()| self.file.sync_data());
        written.map_err(|e| failed_file(&self.path, &e))?;
        self.finished.lines.insert(line.key.clone(), line);
        Ok(())
    }
}

fn cell_failed(sweep: &Sweep, cell: &Cell, e: &ExperimentError) -> CliError {
    let text = format!("cell {}: {e}", sweep.describe(&cell.values));
    if e.is_usage() { CliError::Usage(text) } else { CliError::Runtime(text) }
}

/// At SIGINT: what is finished, how to go on, and the end. Finished cells are in the file, whole and synced; a line that is
/// being written then is left out at the next start.
fn say_how_to_go_on(
    bar: indicatif::ProgressBar,
    done: Arc<AtomicUsize>,
    already: usize,
    all: usize,
) -> Result<(), CliError> {
    let failed = |e: std::io::Error| CliError::Runtime(format!("the thread for signals: {e}"));
    let mut signals = signal_hook::iterator::Signals::new([SIGINT]).map_err(failed)?;
    let heed = move || {
        if signals.forever().next().is_some() {
            bar.finish_and_clear();
            let finished = already + done.load(Ordering::Relaxed);
            writeln!(
                std::io::stderr(),
                "larder: interrupted, {finished} of {all} cells are finished: the same command with --resume goes on"
            )
            .ok();
            std::process::exit(130);
        }
    };
    std::thread::Builder::new().name("larder-signals".into()).spawn(heed).map_err(failed)?;
    Ok(())
}

/// Runs what is not finished.
fn run_cells(sweep: &Sweep, cells: &[Cell], log: &mut Log, threads: usize) -> Result<(), CliError> {
    let open: Vec<&Cell> =
        cells.iter().filter(|c| !log.finished.lines.contains_key(&c.key)).collect();
    let already = cells.len() - open.len();
    if already > 0 {
        noteln!("larder: {already} of {} cells are finished already", cells.len());
    }
    let bar = crate::progress::bar(open.len() as u64);
    let (next, done) = (AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    say_how_to_go_on(bar.clone(), done.clone(), already, cells.len())?;
    let requests = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let log = Mutex::new(log);
    let failure: Mutex<Option<CliError>> = Mutex::new(None);
    let began = Instant::now();
    let show = || {
        let rate =
            requests.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64().max(1e-3);
        let done = done.load(Ordering::Relaxed);
        bar.set_message(format!("{done} of {} cells  {rate:.0} requests/s", open.len()));
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.min(open.len()) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let Some(cell) = open.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                    let mut counted = 0;
                    let outcome =
                        experiment::run(&cell.experiment, 1, |_: &dyn Reader, read: u64| {
                            requests.fetch_add(read.saturating_sub(counted), Ordering::Relaxed);
                            counted = counted.max(read);
                            show();
                        });
                    let result = outcome.map_err(|e| cell_failed(sweep, cell, &e)).and_then(|o| {
                        requests.fetch_add(
                            o.workload.requests.saturating_sub(counted),
                            Ordering::Relaxed,
                        );
                        let outcome = as_json(&o)?;
                        let line =
                            Line::new(cell.key.clone(), sweep.describe(&cell.values), outcome)
                                .map_err(|e| CliError::Runtime(e.to_string()))?;
                        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                        log.append(line)?;
                        // Counted as soon as it is in the file, as an interruption says how many are.
                        done.fetch_add(1, Ordering::Relaxed);
                        Ok(())
                    });
                    if let Err(e) = result {
                        stop.store(true, Ordering::Relaxed);
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                        return;
                    }
                    bar.inc(1);
                    show();
                }
            });
        }
    });
    bar.finish_and_clear();
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(()),
    }
}

/// Cells in the sweep's order, so that the file is the same whatever finished first; cells of former sweeps follow.
fn settle(log: &mut Log, cells: &[Cell]) -> Result<(), CliError> {
    let mut text = String::new();
    let own = cells.iter().filter_map(|c| log.finished.lines.get(&c.key));
    let keys: std::collections::BTreeSet<&str> = cells.iter().map(|c| c.key.as_str()).collect();
    let others = log.finished.lines.values().filter(|l| !keys.contains(l.key.as_str()));
    for line in own.chain(others) {
        text += &line.text;
    }
    write_whole(&log.path, text.as_bytes())
}

/// What a sweep leaves in its directory.
const OUTPUTS: [&str; 6] = [
    "cells.jsonl",
    "results.csv",
    "results.parquet",
    "series.csv",
    "series.parquet",
    "report.html",
];

/// No output may be what the sweep reads.
fn refuse_inputs(dir: &Path, sweep: &Path, cells: &[Cell]) -> Result<(), CliError> {
    let sweep = sweep.display().to_string();
    let mut inputs: std::collections::BTreeSet<&str> =
        cells.iter().map(|c| c.experiment.workload.trace.as_str()).collect();
    inputs.insert(&sweep);
    for output in OUTPUTS.map(|name| dir.join(name).display().to_string()) {
        if let Some(input) = inputs.iter().find(|i| larder_trace::is_same_file(i, &output)) {
            let problem = "is read, and would be written over: give another --out";
            return Err(CliError::Usage(format!("'{input}' is '{output}': it {problem}")));
        }
    }
    Ok(())
}

fn write_grid(
    dir: &Path,
    name: &str,
    grid: &Grid,
    facts: &[(String, String)],
) -> Result<(), CliError> {
    write_whole(&dir.join(format!("{name}.csv")), grid.csv().as_bytes())?;
    let mut bytes = Vec::new();
    write_parquet(grid, facts, &mut bytes).map_err(|e| CliError::Runtime(e.to_string()))?;
    write_whole(&dir.join(format!("{name}.parquet")), &bytes)
}

pub(super) fn run(args: &SweepArgs) -> Result<(), CliError> {
    let file = args.sweep.display().to_string();
    let text = read_text(&args.sweep, "sweep").map_err(CliError::Usage)?;
    let beside = args.sweep.parent().unwrap_or(Path::new(""));
    let sweep = Sweep::parse(&text, &file, |named| {
        let path = beside.join(named);
        let text = read_text(&path, "experiment")?;
        Ok((path.display().to_string(), text))
    })
    .map_err(|e| sweep_error(&e))?;
    let cells = sweep.cells(env!("CARGO_PKG_VERSION"), stamp).map_err(|e| sweep_error(&e))?;
    if let Some(cell) = cells.iter().find(|c| c.experiment.workload.trace == "-") {
        let cell = sweep.describe(&cell.values);
        let problem = "a sweep reads its trace many times, which standard input does not allow";
        return Err(CliError::Usage(format!(
            "cell {cell}: workload.trace is -: {problem}: name a file"
        )));
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
    let dir = match (&args.out, args.sweep.file_stem()) {
        (Some(dir), _) => dir.clone(),
        (None, Some(stem)) if args.sweep.extension().is_some() => PathBuf::from(stem),
        _ => {
            let problem = "has no .toml to leave out for a directory's name: give --out DIR";
            return Err(CliError::Usage(format!("'{file}' {problem}")));
        }
    };
    // As many cells run at once as there are threads: at the worst the largest.
    let mut tables: Vec<u64> = cells.iter().map(|c| c.experiment.table_bytes()).collect();
    tables.sort_unstable_by(|a, b| b.cmp(a));
    let at_once = tables.iter().take(threads).fold(0, |sum: u64, &t| sum.saturating_add(t));
    super::run::fits_memory(&format!("{file}, {threads} cells at once"), at_once)?;
    refuse_inputs(&dir, &args.sweep, &cells)?;
    let mut log = Log::open(&dir, args.resume)?;
    run_cells(&sweep, &cells, &mut log, threads)?;
    settle(&mut log, &cells)?;

    let axes: Vec<String> = sweep.axes.iter().map(|a| a.key.clone()).collect();
    let mut results = Results::new(axes);
    let mut unmet = Vec::new();
    for cell in &cells {
        let Some(line) = log.finished.lines.get(&cell.key) else { continue };
        results.add(Some(&cell.key), &cell.values, &line.outcome);
        for check in line.outcome["expectations"].as_array().into_iter().flatten() {
            if check["met"] == false {
                let (expected, found) = (&check["expected"], &check["found"]);
                unmet.push(format!("cell {}: expected {expected}, found {found}", line.cell));
            }
        }
    }
    let facts = results.facts(&[("sweep", text), ("cells", cells.len().to_string())]);
    write_grid(&dir, "results", &results.results, &facts)?;
    write_grid(&dir, "series", &results.series, &facts)?;
    let title = if sweep.title.is_empty() { file } else { sweep.title.clone() };
    let html = results.report(&title, facts).html();
    let html = html.map_err(|e| CliError::Runtime(e.to_string()))?;
    write_whole(&dir.join("report.html"), html.as_bytes())?;
    if args.json {
        print_json(&rows(&results.results))?;
    } else {
        print_table(&results)?;
        proseln!(
            "larder {}; seeds are a column; traces and their hashes:",
            env!("CARGO_PKG_VERSION")
        )?;
        results.traces().try_for_each(|(trace, hash)| proseln!("  {trace}  {hash}"))?;
        proseln!(
            "{} cells; cells.jsonl, results and series as csv and parquet, and report.html are in {}",
            cells.len(),
            dir.display()
        )?;
    }
    if unmet.is_empty() { Ok(()) } else { Err(CliError::Runtime(unmet.join("; "))) }
}

fn rows(grid: &Grid) -> Vec<serde_json::Map<String, serde_json::Value>> {
    use larder_sim::report::Field;
    let value = |field: &Field| match field {
        Field::Nothing => serde_json::Value::Null,
        Field::Whole(n) => (*n).into(),
        Field::Number(x) => (*x).into(),
        Field::Text(s) => s.clone().into(),
    };
    let row =
        |fields: &Vec<Field>| grid.columns.iter().cloned().zip(fields.iter().map(value)).collect();
    grid.rows.iter().map(row).collect()
}

fn print_table(results: &Results) -> Result<(), CliError> {
    // What fits a terminal: the axes, the name, and the figures that a choice is made by.
    let few = [
        "dram",
        "flash",
        "miss_ratio",
        "byte_miss_ratio",
        "flash_bytes",
        "clwa_of_sets",
        "dlwa",
        "life_years",
    ];
    let grid = &results.results;
    let mut at = results.varied();
    let keys = at.len();
    at.extend(few.iter().filter_map(|c| grid.column(c)));
    let mut table = Columns::new(keys, 1, at.iter().map(|&c| grid.columns[c].clone()));
    for row in &grid.rows {
        table.row(at.iter().map(|&c| {
            let text = row[c].text();
            match (grid.columns[c].as_str(), row[c].number()) {
                ("dram" | "flash" | "flash_bytes", Some(n)) => {
                    larder_base::ByteSize(n as u64).to_string()
                }
                // As `sim run` has it: a small figure keeps its digits.
                ("life_years", Some(x)) => format!("{x:.0$}", super::run::digits(x).max(4)),
                (name, Some(x)) if few.contains(&name) => format!("{x:.4}"),
                _ => text,
            }
        }));
    }
    table.print()
}
