//! Block I/O against an export.

use std::time::Duration;

use indicatif::{HumanBytes, ProgressBar};
use larder_replay::{Snapshot, VolumeOptions, VolumeReport, run_volume};

use super::Args;
use crate::error::CliError;
use crate::table::Columns;

/// Flags that are about memcached.
fn refuse_other_flags(args: &Args) -> Result<(), CliError> {
    for (given, flag) in [
        (args.verify, "--verify"),
        (args.no_fill, "--no-fill"),
        (!args.key_prefix.is_empty(), "--key-prefix"),
        (args.threads != 1, "--threads"),
    ] {
        if given {
            return Err(CliError::Usage(format!("{flag} is not for block I/O: leave it out")));
        }
    }
    if args.connections > 64 {
        return Err(CliError::Usage(format!(
            "--connections {}: 64 are the most to an export; raise --depth",
            args.connections
        )));
    }
    Ok(())
}

pub(super) fn run(args: &Args) -> Result<(), CliError> {
    refuse_other_flags(args)?;
    let options = VolumeOptions {
        target: args.to.parse().map_err(|e| CliError::Usage(format!("--to: {e}")))?,
        connections: args.connections as usize,
        depth: args.pipeline as usize,
        speed: args.timed.then_some(args.speed),
        warmup: args.warmup,
        timeout: Duration::from_secs(args.timeout),
    };
    let (reader, interrupted) = super::opened(args)?;
    let bar = crate::progress::bar(10_000);
    let outcome = run_volume(reader, &options, |s| show(&bar, s));
    bar.finish_and_clear();
    larder_runtime::machine::end_on_broken_pipe();
    let report = outcome.map_err(|e| CliError::Runtime(e.to_string()))?;
    if args.json {
        let text =
            serde_json::to_string_pretty(&report).map_err(|e| CliError::Runtime(e.to_string()))?;
        outln!("{text}")?;
    } else {
        print_report(&report)?;
    }
    match (report.errors, report.first_error) {
        (0, _) => super::whole(&interrupted),
        (n, first) => Err(CliError::Runtime(format!(
            "{n} requests failed; the first: {}",
            first.unwrap_or_default()
        ))),
    }
}

fn show(bar: &ProgressBar, s: &Snapshot) {
    if let Some(fraction) = s.fraction {
        bar.set_position((fraction * 10_000.0) as u64);
    }
    let rate = s.completed as f64 / s.elapsed.as_secs_f64().max(1e-9);
    let reads = 100.0 * s.gets as f64 / s.completed.max(1) as f64;
    bar.set_message(format!("{} requests  {rate:.0}/s  reads {reads:.1} %", s.completed));
}

fn print_report(r: &VolumeReport) -> Result<(), CliError> {
    proseln!(
        "{} ({}): {}, {} requests under way, {}",
        r.target,
        HumanBytes(r.size),
        super::counted(r.connections, "connection"),
        r.depth,
        match r.speed {
            Some(speed) =>
                format!("recorded times / {speed}, at most {:.1} ms behind", r.behind_ms),
            None => "closed loop".to_owned(),
        }
    )?;
    proseln!(
        "{} requests in {:.2} s after {} to warm up: {:.0} a second, {:.1} % reads",
        r.requests,
        r.seconds,
        r.warmup,
        r.requests_per_second,
        100.0 * r.read_share
    )?;
    let header = ["operation", "count", "bytes", "mean µs", "p50", "p90", "p99", "p99.9", "max"];
    let mut table = Columns::new(1, 1, header);
    for op in &r.operations {
        let l = &op.service_us;
        let mut row =
            vec![op.op.to_owned(), op.count.to_string(), HumanBytes(op.bytes).to_string()];
        row.extend([l.mean, l.p50, l.p90, l.p99, l.p999, l.max].map(|v| format!("{v:.1}")));
        table.row(row);
    }
    table.print()?;
    for (n, what) in [
        (r.moved, "requests beyond the export's end, moved"),
        (r.empty, "records without a length passed over"),
        (r.overlapping, "requests that waited for one whose bytes they share"),
        (r.skipped_records, "malformed records of the trace passed over"),
        (r.errors, "requests that FAILED"),
    ] {
        if n > 0 {
            proseln!("{n} {what}")?;
        }
    }
    Ok(())
}
