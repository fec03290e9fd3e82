//! `larder sim replay`: what a server decided, decided again.

use std::fs::File;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Instant;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use larder_base::ByteSize;
use larder_engine::block::record::BlockRunSetup;
use larder_format::recording::{Ended, FrameError};
use larder_sim::replay::{
    Difference, RecordFile, Recorded, ReplayError, Report, recorded_by, replay, replay_block,
};
use serde::Serialize;
use serde_json::{Map, Value};

use super::origin::configuration;
use crate::error::CliError;
use crate::table::Columns;

/// The flags of `larder sim replay`.
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder kv -m 64 --flash-size 1g --record run.rec     # then stop it
  larder block serve --cache … --record run.rec        # or this
  larder sim replay run.rec

The same engine runs through the recorded inputs under their recorded times. It
ends with 0 when every decision is the same, and with 1 at the first that
differs: which stream, which record, what was told, and both decisions. A
record without a decision ends with 1 too.")]
pub(crate) struct ReplayArgs {
    /// A file of `larder kv --record` or `larder block serve --record`
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// DRAM that the replay may take. A recording of larder kv needs as much as that server's memory limit (-m), one of larder
    /// block as much as the map of its cache [default: three quarters of the memory]
    #[arg(long, value_name = "SIZE")]
    memory_limit: Option<ByteSize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<(), CliError> {
    let name = args.file.display();
    let input = File::open(&args.file).map_err(|e| {
        CliError::Usage(format!("record '{name}': {e}: give a file of `larder kv --record` or `larder block serve --record`"))
    })?;
    let failed = |e| CliError::Runtime(format!("record '{name}': {e}"));
    let what = recorded_by(&input).map_err(|e| {
        let more = match e {
            ReplayError::Frame { source: FrameError::Magic, .. } => {
                ": give a file of `larder kv --record` or `larder block serve --record`"
            }
            _ => "",
        };
        CliError::Runtime(format!("record '{name}': {e}{more}"))
    })?;
    let memory = args.memory_limit.map_or_else(
        || larder_runtime::machine::usable_memory().unwrap_or(1 << 30) / 4 * 3,
        |size| size.0,
    );
    if what == Recorded::Block {
        return run_block(args, &input, memory);
    }
    let mut file: RecordFile<_> = RecordFile::open(input).map_err(failed)?;
    let bar = bar(file.records());
    let begin = Instant::now();
    let report = replay(&mut file, memory, &mut |done| {
        if let Some(bar) = &bar {
            bar.set_position(done);
        }
    });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let report = report.map_err(failed)?;
    let seconds = begin.elapsed().as_secs_f64();
    if args.json {
        let seeds = file.setup().shards.iter().map(|s| s.seed).collect();
        print_report(args, seeds, file.setup(), &report)?;
    } else {
        print(&report, seconds)?;
    }
    verdict(args, report.difference.as_ref(), report.compared)
}

/// A bar, where somebody watches.
fn bar(records: u64) -> Option<ProgressBar> {
    std::io::stderr().is_terminal().then(|| {
        let bar = ProgressBar::new(records);
        let style = ProgressStyle::with_template(
            "{bar:30} {percent:>3} %  {human_pos} records  {per_sec}  {eta} left",
        )
        .unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style);
        bar
    })
}

/// Exit code 1 where a decision differs, and where there was none.
fn verdict(
    args: &ReplayArgs,
    difference: Option<&Difference>,
    compared: u64,
) -> Result<(), CliError> {
    match difference {
        None if compared == 0 => Err(CliError::Runtime(format!(
            "record '{}': it holds no decision that can be compared: the server had decided nothing yet, or the file was cut short",
            args.file.display(),
        ))),
        None => Ok(()),
        Some(d) => Err(CliError::Runtime(format!(
            "record '{}': {}, record {}: the replay decided otherwise",
            args.file.display(),
            d.stream,
            d.record
        ))),
    }
}

fn run_block(args: &ReplayArgs, input: &File, memory: u64) -> Result<(), CliError> {
    let failed = |e| CliError::Runtime(format!("record '{}': {e}", args.file.display()));
    let mut file: RecordFile<_, BlockRunSetup> = RecordFile::open(input).map_err(failed)?;
    let bar = bar(file.records());
    let begin = Instant::now();
    let report = replay_block(&mut file, memory, &mut |done| {
        if let Some(bar) = &bar {
            bar.set_position(done);
        }
    });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    let report = report.map_err(failed)?;
    if args.json {
        let seeds = file.setup().volumes.iter().map(|v| v.seed).collect();
        print_report(args, seeds, file.setup(), &report)?;
        return verdict(args, report.difference.as_ref(), report.compared);
    }
    let seconds = begin.elapsed().as_secs_f64();
    let streams = report.streams.len();
    proseln!(
        "recorded by larder block {}: {} shards, {} request queues with records (of workers and of the prefetch), {} volumes{}, {} records in {streams} streams, {}",
        report.larder,
        report.shards,
        report.queues,
        report.volumes,
        match report.changes {
            0 => String::new(),
            n => format!(" ({n} times one came, grew or went)"),
        },
        report.records,
        ending(report.ended),
    )?;
    let mut table = Columns::new(1, 1, ["stream", "records"]);
    for (name, records) in &report.streams {
        table.row([name.clone(), records.to_string()]);
    }
    crate::out::print(&format!("{}\n", table.text(crate::table::width()).trim_end_matches('\n')))?;
    let rate = report.compared as f64 / seconds.max(1e-9);
    proseln!(
        "replayed: {} decisions compared, {seconds:.1} s ({rate:.0} records/s)",
        report.compared
    )?;
    print_difference(report.difference.as_ref(), report.compared, &report.larder)?;
    verdict(args, report.difference.as_ref(), report.compared)
}

/// A report as JSON, with where it comes from: the version of the program that replayed, the record, and what of its head a
/// reader may know. The secret under which keys are hashed stays in the file.
fn print_report(
    args: &ReplayArgs,
    seeds: Vec<u64>,
    setup: &impl Serialize,
    report: &impl Serialize,
) -> Result<(), CliError> {
    #[derive(Serialize)]
    struct Named<'a, R> {
        version: &'static str,
        /// Of the shards; of a block cache those of its volumes' admission.
        seed: Vec<u64>,
        /// The record's file.
        trace: String,
        configuration: Map<String, Value>,
        #[serde(flatten)]
        report: &'a R,
    }
    let mut configuration = configuration(None, setup)?;
    // Secrets, and the image of a superblock, which has one and is no figure.
    for left_out in ["hash_key", "salt", "superblock"] {
        configuration.remove(left_out);
    }
    let version = env!("CARGO_PKG_VERSION");
    let trace = args.file.display().to_string();
    crate::out::print_json(&Named { version, seed: seeds, trace, configuration, report })
}

fn ending(ended: Option<&str>) -> String {
    match ended {
        Some(why) if why == Ended::Stopped.as_str() => format!("to the end ({why})"),
        Some(why) => format!("as far as it goes ({why})"),
        None => "cut short: why is not in the file (the server was killed, or its disk was full)"
            .to_owned(),
    }
}

fn print(report: &Report, seconds: f64) -> Result<(), CliError> {
    proseln!(
        "recorded by larder {} on {}: {} shards, {} records, {}",
        report.larder,
        report.uuid,
        report.shards,
        report.records,
        ending(report.ended)
    )?;
    let shards = report.streams.iter().take(report.shards).map(|(_, records)| records).sum::<u64>();
    let others = report.streams.iter().skip(report.shards);
    let others: Vec<String> = others.map(|(name, records)| format!("{name} {records}")).collect();
    proseln!("records by stream: shards {shards}, {}", others.join(", "))?;
    proseln!(
        "replayed: {} decisions compared, {} of them requests, {} segments written, {seconds:.1} s ({:.0} records/s)",
        report.compared,
        report.requests,
        report.segments_written,
        report.compared as f64 / seconds.max(1e-9)
    )?;
    if report.compared < report.records && report.difference.is_none() {
        proseln!(
            "not compared: {} records at the end, whose counterparts in other streams are not in the file",
            report.records - report.compared
        )?;
    }
    print_difference(report.difference.as_ref(), report.compared, &report.larder)
}

fn print_difference(
    difference: Option<&Difference>,
    compared: u64,
    larder: &str,
) -> Result<(), CliError> {
    match difference {
        None if compared == 0 => Ok(()),
        None => proseln!("every decision is the same"),
        Some(d) => {
            proseln!("first difference: {}, record {}", d.stream, d.record)?;
            proseln!("  time      {:.9} s", d.nanos as f64 / 1e9)?;
            proseln!("  input     {}", d.input)?;
            proseln!("  recorded  {}", d.recorded)?;
            proseln!("  replayed  {}", d.replayed)?;
            let mine = env!("CARGO_PKG_VERSION");
            if larder != mine {
                proseln!(
                    "this is larder {mine}, and {larder} recorded: another version may decide otherwise"
                )?;
            }
            Ok(())
        }
    }
}
