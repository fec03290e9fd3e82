//! `larder replay`: replays a trace against any memcached server, or block I/O against an export of an NBD server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use indicatif::{HumanBytes, ProgressBar};
use larder_base::Nanos;
use larder_replay::{Options, Order, Report, Snapshot, Target};
use larder_trace::{BadRecord, Progress, Reader, Request, TraceError};
use signal_hook::consts::SIGINT;

mod volume;

use crate::error::CliError;
use crate::table::Columns;
use crate::trace::Input;

/// Replay a trace against any memcached server, or block I/O against an NBD export, and measure.
///
/// Gets are sent as gets; after a miss the object is stored with its recorded size. Writes and deletes are sent as
/// recorded. Without --timed every connection sends as soon as a reply makes room (closed loop). A request waits while a get of
/// its key is under way, as in an application that fetches what it misses once; how many waited is reported.
///
/// To an NBD export (nbd+unix:///EXPORT?socket=PATH, nbd://HOST:PORT/EXPORT) go reads, writes and trims with their offsets and
/// lengths; what lies beyond the export's end begins again at its start. Writes change the export's contents.
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder replay trace.csv.zst --to 127.0.0.1:11211 -c 8 --pipeline 16
  larder replay 'gen:zipf?objects=100000&requests=1000000&writes=0.05' \\
      --to unix:/run/memcached.sock --verify
  larder replay trace.csv --to 127.0.0.1:11211 --timed --speed 10 --json
  larder replay vm.vscsi.gz --to 'nbd+unix:///disk?socket=/run/larder.sock' \\
      -c 4 --depth 8 --warmup 50000")]
pub(crate) struct Args {
    #[command(flatten)]
    input: Input,
    /// The server: HOST:PORT or unix:PATH of memcached, nbd+unix:///EXPORT?socket=PATH or nbd://HOST:PORT/EXPORT for block I/O.
    #[arg(long, value_name = "ADDRESS")]
    to: String,
    /// Connections in all.
    #[arg(short = 'c', long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    connections: u64,
    /// Requests in flight on each connection.
    #[arg(long, visible_alias = "depth", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pipeline: u64,
    /// Threads of the client.
    #[arg(short = 't', long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1024))]
    threads: u64,
    /// Send at the recorded times instead of as fast as replies allow.
    #[arg(long)]
    timed: bool,
    /// Divide the recorded times by this (with --timed).
    #[arg(long, default_value_t = 1.0, value_name = "FACTOR", requires = "timed")]
    speed: f64,
    /// Check every value that comes back: its bytes, and that it is no older than an acknowledged write or delete.
    #[arg(long)]
    verify: bool,
    /// Do not store objects after a miss.
    #[arg(long)]
    no_fill: bool,
    /// Which connection a request goes through: the one its key chooses (the requests of a key keep their order), or any.
    #[arg(long, value_enum, default_value_t = OrderArg::Key)]
    order: OrderArg,
    /// Send the first N requests without counting them.
    #[arg(long, value_name = "N", default_value_t = 0)]
    warmup: u64,
    /// Pass over the first N requests of the trace: they are not sent.
    #[arg(long, value_name = "N", default_value_t = 0)]
    skip: u64,
    /// Put this before every key.
    #[arg(long, value_name = "TEXT", default_value = "")]
    key_prefix: String,
    /// A connection without a reply for so many seconds has failed.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum OrderArg {
    Key,
    Any,
}

pub(crate) fn run(args: Args) -> Result<(), CliError> {
    if args.key_prefix.len() > 200 || args.key_prefix.bytes().any(|b| b <= b' ' || b == 127) {
        return Err(CliError::Usage(format!(
            "--key-prefix '{}' cannot start a key: at most 200 bytes, no blanks or control characters",
            args.key_prefix.escape_debug()
        )));
    }
    if !(args.speed.is_finite() && args.speed > 0.0) {
        return Err(CliError::Usage(format!("--speed {} is not a positive factor", args.speed)));
    }
    if args.to.starts_with("nbd") && args.to.contains("://") {
        return volume::run(&args);
    }
    let target: Target = args.to.parse().map_err(|e| CliError::Usage(format!("--to: {e}")))?;
    let (reader, interrupted) = opened(&args)?;
    let options = Options {
        connections: args.connections as usize,
        pipeline: args.pipeline as usize,
        threads: args.threads as usize,
        speed: args.timed.then_some(args.speed),
        verify: args.verify,
        fill: !args.no_fill,
        order: match args.order {
            OrderArg::Key => Order::Key,
            OrderArg::Any => Order::Any,
        },
        warmup: args.warmup,
        key_prefix: args.key_prefix.clone(),
        timeout: Duration::from_secs(args.timeout),
        ..Options::new(target)
    };
    let bar = crate::progress::bar(10_000);
    let outcome = larder_replay::run(reader, &options, |s| {
        show(&bar, s);
    });
    bar.finish_and_clear();
    let (report, failure) = match outcome {
        Ok(report) => (Some(Box::new(report)), None),
        Err((e, report)) => (report, Some(e)),
    };
    // The sockets are closed: from here on only standard output can break.
    larder_runtime::machine::end_on_broken_pipe();
    if let Some(report) = &report {
        if args.json {
            let text = serde_json::to_string_pretty(report)
                .map_err(|e| CliError::Runtime(e.to_string()))?;
            outln!("{text}")?;
        } else if report.requests > 0 || failure.is_none() {
            print_report(report)?;
        }
    }
    if let Some(e) = failure {
        return Err(CliError::Runtime(e.to_string()));
    }
    match report.and_then(|r| verdict(&r)) {
        Some(problem) => Err(CliError::Runtime(problem)),
        None => whole(&interrupted),
    }
}

/// An error where the replay ended because it was asked to.
fn whole(interrupted: &AtomicBool) -> Result<(), CliError> {
    if interrupted.load(Ordering::Relaxed) {
        let said = "interrupted: these are the figures up to then";
        return Err(CliError::Interrupted(said.to_owned()));
    }
    Ok(())
}

/// The trace ends where SIGINT comes: what is under way is answered, and what was measured is printed. A second one ends the
/// process at once.
struct UntilInterrupted {
    reader: Box<dyn Reader>,
    asked: Arc<AtomicBool>,
}

impl UntilInterrupted {
    fn new(reader: Box<dyn Reader>) -> Result<UntilInterrupted, CliError> {
        let asked = Arc::new(AtomicBool::new(false));
        let failed = |e: std::io::Error| CliError::Runtime(format!("signal handlers: {e}"));
        // In this order: the first signal finds the flag down and raises it.
        signal_hook::flag::register_conditional_shutdown(SIGINT, 130, asked.clone())
            .map_err(failed)?;
        signal_hook::flag::register(SIGINT, asked.clone()).map_err(failed)?;
        Ok(UntilInterrupted { reader, asked })
    }
}

impl Iterator for UntilInterrupted {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.asked.load(Ordering::Relaxed) { None } else { self.reader.next() }
    }
}

impl Reader for UntilInterrupted {
    fn skipped(&self) -> u64 {
        self.reader.skipped()
    }

    fn first_skipped(&self) -> Option<&BadRecord> {
        self.reader.first_skipped()
    }

    fn progress(&self) -> Progress {
        self.reader.progress()
    }
}

/// The trace from where it is to be sent, until SIGINT, and whether that came.
fn opened(args: &Args) -> Result<(Box<dyn Reader>, Arc<AtomicBool>), CliError> {
    let reader = UntilInterrupted::new(args.input.open()?.reader)?;
    let interrupted = reader.asked.clone();
    let mut reader: Box<dyn Reader> = Box::new(reader);
    if args.skip == 0 {
        return Ok((reader, interrupted));
    }
    for _ in 0..args.skip {
        match reader.next() {
            Some(Ok(_)) => {}
            Some(Err(e)) => return Err(crate::trace::trace_error(e)),
            None => break,
        }
    }
    Ok((Box::new(Rest { reader, began: None }), interrupted))
}

/// What is left of a trace, as if it began there.
struct Rest {
    reader: Box<dyn Reader>,
    began: Option<Nanos>,
}

impl Iterator for Rest {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut next = self.reader.next()?;
        if let Ok(Request { time: Some(time), .. }) = &mut next {
            let began = *self.began.get_or_insert(*time);
            *time = Nanos(time.0.saturating_sub(began.0));
        }
        Some(next)
    }
}

impl Reader for Rest {
    fn skipped(&self) -> u64 {
        self.reader.skipped()
    }

    fn first_skipped(&self) -> Option<&BadRecord> {
        self.reader.first_skipped()
    }

    fn progress(&self) -> Progress {
        self.reader.progress()
    }
}

/// What makes a finished replay a failed one.
fn verdict(r: &Report) -> Option<String> {
    if r.stale + r.damaged > 0 {
        return Some(format!(
            "the server answered {} stale and {} damaged values",
            r.stale, r.damaged
        ));
    }
    let first = r.first_error.as_deref().unwrap_or("unknown");
    if r.connections_lost > 0 {
        return Some(format!(
            "{} connections broke with {} requests in flight; the first: {first}",
            r.connections_lost, r.requests_lost
        ));
    }
    (r.other_errors > 0)
        .then(|| format!("the server answered {} errors; the first: {first}", r.other_errors))
}

/// How far it has come.
fn show(bar: &ProgressBar, s: &Snapshot) {
    if let Some(fraction) = s.fraction {
        bar.set_position((fraction * 10_000.0) as u64);
    }
    let seconds = s.elapsed.as_secs_f64().max(1e-9);
    let hits = if s.gets == 0 { 0.0 } else { 100.0 * s.hits as f64 / s.gets as f64 };
    let errors = if s.errors > 0 { format!("  {} errors", s.errors) } else { String::new() };
    bar.set_message(format!(
        "{} requests  {:.0}/s  hits {hits:.2} %{errors}",
        s.completed,
        s.completed as f64 / seconds
    ));
}

/// `1 thread`, `2 threads`.
fn counted(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

fn print_report(r: &Report) -> Result<(), CliError> {
    proseln!(
        "{}: {}, pipeline {}, {}, {}",
        r.target,
        counted(r.connections, "connection"),
        r.pipeline,
        counted(r.threads, "thread"),
        match r.speed {
            Some(speed) =>
                format!("recorded times / {speed}, at most {:.1} ms behind", r.behind_ms),
            None => "closed loop".to_owned(),
        }
    )?;
    proseln!(
        "{} requests in {:.2} s: {:.0} a second ({:.0} with fills)",
        r.requests,
        r.seconds,
        r.requests_per_second,
        r.operations_per_second
    )?;
    proseln!(
        "hit ratio {:.4} ({} of {} gets), by bytes {:.4}",
        r.hit_ratio,
        r.hits,
        r.gets,
        r.byte_hit_ratio
    )?;
    proseln!("sent {}, received {}", HumanBytes(r.bytes_sent), HumanBytes(r.bytes_received))?;
    let header = ["operation", "count", "mean µs", "p50", "p90", "p99", "p99.9", "max"];
    let mut table = Columns::new(1, 1, header);
    for op in &r.operations {
        let l = &op.latency_us;
        let mut row = vec![op.op.to_owned(), op.count.to_string()];
        row.extend([l.mean, l.p50, l.p90, l.p99, l.p999, l.max].map(|v| format!("{v:.1}")));
        table.row(row);
    }
    table.print()?;
    for (n, what) in [
        (
            r.held_back,
            "held back behind a get of the same key, as by an application that fetches a key once",
        ),
        (r.refused, "declined by the server (not stored, not found)"),
        (r.too_large, "too large for the server"),
        (r.out_of_memory, "refused for want of memory"),
        (r.not_numeric, "incr or decr of a value that is no number"),
        (r.other_errors, "answered with an error"),
        (r.connections_lost, "connections lost"),
        (r.requests_lost, "requests lost with them"),
        (r.skipped_records, "malformed records of the trace passed over"),
        (r.verified, "values checked and right"),
        (r.stale, "STALE values"),
        (r.damaged, "DAMAGED values"),
    ] {
        if n > 0 {
            proseln!("{n} {what}")?;
        }
    }
    Ok(())
}
