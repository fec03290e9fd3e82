//! `larder trace`: looks into traces, converts and generates them.

use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use indicatif::{HumanBytes, ProgressBar};
use larder_trace::{
    Class, Collector, CsvColumns, Format, Hashed, Reader, Request, Trace, TraceError, ValueSizes,
    Writer,
};

use crate::error::CliError;
use crate::out::print;
use crate::table::{Columns, is_too_wide, print_prose};

/// Look into traces, convert and generate them.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// What a trace holds: requests, objects, sizes, operations, times, reuse.
    Stats(StatsArgs),
    /// The first requests, one a line.
    Head(HeadArgs),
    /// Write a trace in another format: larder (compact), csv, memcachier, webcachesim, oracle-general.
    Convert(ConvertArgs),
    /// Write what a generator makes: the same as convert of gen:SPEC.
    Generate(GenerateArgs),
    /// The formats that can be read, and the generators.
    Formats,
}

/// A trace as an argument, and how to read it.
#[derive(Debug, clap::Args)]
pub(crate) struct Input {
    /// A file (gz, xz, zst or plain), - for standard input, or gen:KIND?option=value&… (see larder trace formats).
    #[arg(value_name = "TRACE")]
    pub(crate) trace: String,
    /// The format; told from the contents when not given.
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    pub(crate) format: Option<Format>,
    /// Columns of a csv file: time-col=1,obj-id-col=2,obj-size-col=3,op-col=…,has-header=1,delimiter=,
    #[arg(long, value_name = "LIST", value_parser = CsvColumns::parse)]
    pub(crate) columns: Option<CsvColumns>,
    /// Pass over malformed records and count them.
    #[arg(long)]
    pub(crate) skip_bad: bool,
    /// Requests per second that give times to a trace without them.
    #[arg(long, value_name = "REQUESTS", value_parser = parse_rate)]
    pub(crate) rate: Option<f64>,
    /// Sizes of values by key in place of the trace's own, for traces of keys alone: lognormal:MEAN or lognormal:MEAN:SIGMA, as in
    /// lognormal:300.
    #[arg(long, value_name = "DISTRIBUTION")]
    pub(crate) value_sizes: Option<ValueSizes>,
    /// Split block I/O into pages, 4 KiB unless a size is given.
    #[arg(long, value_name = "SIZE", num_args = 0..=1, require_equals = true, default_missing_value = "4k", value_parser = parse_page)]
    pub(crate) pages: Option<u32>,
    /// Stop after N requests, at least 1.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) limit: Option<u64>,
}

pub(crate) fn parse_page(text: &str) -> Result<u32, String> {
    let size: larder_base::ByteSize =
        text.parse().map_err(|e: larder_base::ParseSizeError| e.to_string())?;
    match u32::try_from(size.0) {
        Ok(n) if n >= 512 && n.is_power_of_two() => Ok(n),
        _ => Err("write a power of two from 512 bytes to 2 GiB, as in 4k".to_owned()),
    }
}

pub(crate) fn parse_format(text: &str) -> Result<Format, TraceError> {
    text.parse()
}

/// A format that can be written: the others are of no use here, and are not listed.
fn parse_written(text: &str) -> Result<Format, String> {
    let known = || Writer::FORMATS.iter().map(|f| f.name()).collect::<Vec<_>>().join(", ");
    match text.parse::<Format>() {
        Ok(format) if Writer::FORMATS.contains(&format) => Ok(format),
        Ok(format) => Err(format!("{format} can be read but not written; {} can be", known())),
        Err(_) => Err(format!("there is no such format; {} can be written", known())),
    }
}

pub(crate) fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("write a positive number of requests per second".to_owned()),
    }
}

/// An error of a trace with its exit code: what was asked for cannot be meant (2), or it went wrong on the way (1).
pub(crate) fn trace_error(e: TraceError) -> CliError {
    match e {
        TraceError::Spec { .. }
        | TraceError::UnknownFormat { .. }
        | TraceError::Undetected { .. }
        | TraceError::Open { .. } => CliError::Usage(e.to_string()),
        _ => CliError::Runtime(e.to_string()),
    }
}

/// How a trace was read, for outputs that say so.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Settings {
    /// As it was told, where it was not named; `generated` of a generator.
    format: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    columns: Option<String>,
    skip_bad: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_sizes: Option<ValueSizes>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pages: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u64>,
}

impl Settings {
    pub(crate) fn new(options: &larder_trace::Options, format: Option<Format>) -> Settings {
        Settings {
            format: format.map_or("generated", Format::name),
            columns: options.columns.as_ref().map(ToString::to_string),
            skip_bad: options.skip_bad,
            rate: options.rate,
            value_sizes: options.value_sizes,
            pages: options.pages,
            limit: options.limit,
        }
    }
}

impl Input {
    pub(crate) fn options(&self) -> larder_trace::Options {
        larder_trace::Options {
            format: self.format,
            skip_bad: self.skip_bad,
            columns: self.columns.clone(),
            rate: self.rate,
            value_sizes: self.value_sizes,
            pages: self.pages,
            limit: self.limit,
        }
    }

    pub(crate) fn open(&self) -> Result<Trace, CliError> {
        larder_trace::open(&self.trace, &self.options()).map_err(trace_error)
    }
}

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder trace stats trace.oracleGeneral.zst
  larder trace stats disk.csv --format msr --pages --json")]
struct StatsArgs {
    #[command(flatten)]
    input: Input,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder trace head trace.csv.zst -n 3
  larder trace head 'gen:zipf?objects=100&requests=10' --json")]
struct HeadArgs {
    #[command(flatten)]
    input: Input,
    /// How many.
    #[arg(short = 'n', long, default_value_t = 10)]
    requests: u64,
    /// Print as JSON, one object a line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder trace convert disk.vscsi disk.larder.zst
  larder trace convert trace.csv - --to csv \\
      --columns time-col=1,obj-id-col=2,obj-size-col=3")]
struct ConvertArgs {
    #[command(flatten)]
    input: Input,
    /// The file to write, or - for standard output; its ending (gz, xz, zst) says how it is compressed.
    #[arg(value_name = "OUTPUT")]
    output: String,
    /// The format to write: larder (compact), csv, memcachier, webcachesim or oracle-general.
    #[arg(long, value_name = "FORMAT", default_value = "larder", value_parser = parse_written)]
    to: Format,
}

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder trace generate 'zipf?objects=1m&requests=10m&skew=0.9&rate=1000' \\
      zipf.larder.zst
  larder trace generate 'fileserver?scale=0.01' - --to csv")]
struct GenerateArgs {
    /// KIND?option=value&… (see larder trace formats).
    #[arg(value_name = "SPEC")]
    spec: String,
    /// The file to write, or - for standard output; its ending (gz, xz, zst) says how it is compressed.
    #[arg(value_name = "OUTPUT")]
    output: String,
    /// The format to write: larder (compact), csv, memcachier, webcachesim or oracle-general.
    #[arg(long, value_name = "FORMAT", default_value = "larder", value_parser = parse_written)]
    to: Format,
}

fn convert(input: &Input, output: &str, to: Format) -> Result<(), CliError> {
    if larder_trace::is_same_file(&input.trace, output) {
        return Err(CliError::Usage(format!(
            "'{output}' is the trace that is read; name another file to write"
        )));
    }
    // What a name promises that is not kept: the reader would take it for what it is, the user not.
    if let Some(ending) =
        [".bz2", ".lz4", ".zip", ".7z", ".br"].iter().find(|e| output.ends_with(*e))
    {
        let problem = "is not written: end the name in gz, xz or zst, or in none of them";
        return Err(CliError::Usage(format!("'{output}': {ending} {problem}")));
    }
    let mut trace = input.open()?;
    let mut writer = Writer::create(output, to).map_err(trace_error)?;
    let mut watch = Watch::new();
    while let Some(request) = trace.reader.next() {
        writer.push(&request.map_err(trace_error)?).map_err(trace_error)?;
        watch.tick(&*trace.reader);
    }
    drop(watch);
    let left_out = writer.left_out();
    let count = writer.finish().map_err(trace_error)?;
    note_skipped(&*trace.reader);
    if !left_out.is_empty() {
        let left_out = left_out.join(", ");
        noteln!("larder: {to} has no place for {left_out} of these requests; larder and csv have");
    }
    noteln!("{count} requests written to {output} as {to}");
    Ok(())
}

pub(crate) fn run(args: Args) -> Result<(), CliError> {
    match args.command {
        Command::Stats(a) => stats(&a),
        Command::Head(a) => head(&a),
        Command::Convert(a) => convert(&a.input, &a.output, a.to),
        Command::Generate(a) => {
            let spec = if a.spec.starts_with("gen:") { a.spec } else { format!("gen:{}", a.spec) };
            let input = Input {
                trace: spec,
                format: None,
                columns: None,
                skip_bad: false,
                rate: None,
                value_sizes: None,
                pages: None,
                limit: None,
            };
            convert(&input, &a.output, a.to)
        }
        Command::Formats => formats(),
    }
}

/// Progress over a reader.
struct Watch {
    bar: ProgressBar,
    count: u64,
    last: Instant,
    started: Instant,
}

impl Watch {
    fn new() -> Watch {
        let bar = crate::progress::bar(10_000);
        Watch { bar, count: 0, last: Instant::now(), started: Instant::now() }
    }

    fn tick(&mut self, reader: &dyn Reader) {
        self.count += 1;
        if !self.count.is_multiple_of(65_536) || self.last.elapsed() < Duration::from_millis(200) {
            return;
        }
        self.last = Instant::now();
        if let Some(fraction) = reader.progress().fraction() {
            self.bar.set_position((fraction * 10_000.0) as u64);
        }
        let rate = self.count as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        self.bar.set_message(format!("{} requests  {rate:.0}/s", self.count));
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// How many records `--skip-bad` passed over and the first one, where it did: for [`note`] when the reader is gone.
pub(crate) fn skipped_of(reader: &dyn Reader) -> Option<(u64, String)> {
    reader.first_skipped().map(|first| (reader.skipped(), first.to_string()))
}

/// Tells of records that were passed over.
pub(crate) fn note(skipped: Option<(u64, String)>) {
    if let Some((count, first)) = skipped {
        let records = if count == 1 { "record" } else { "records" };
        noteln!("larder: {count} malformed {records} passed over; the first: {first}");
    }
}

pub(crate) fn note_skipped(reader: &dyn Reader) {
    note(skipped_of(reader));
}

/// Characters of the names in front of what is said of a trace.
const NAMES: usize = 22;

fn stats(args: &StatsArgs) -> Result<(), CliError> {
    let trace = args.input.open()?;
    let (mut reader, hash) = Hashed::over(trace.reader);
    let mut collector = Collector::new();
    let mut watch = Watch::new();
    while let Some(request) = reader.next() {
        collector.add(&request.map_err(trace_error)?);
        watch.tick(&*reader);
    }
    drop(watch);
    note_skipped(&*reader);
    let s = collector.finish();
    if args.json {
        let mut value = serde_json::to_value(&s).map_err(|e| CliError::Runtime(e.to_string()))?;
        value["trace"] = args.input.trace.clone().into();
        value["format"] = trace.format.map_or("generated", Format::name).into();
        value["detection"] = trace.explanation.clone().into();
        value["skipped"] = reader.skipped().into();
        value["trace_hash"] = hash.text().into();
        value["version"] = env!("CARGO_PKG_VERSION").into();
        value["configuration"] =
            serde_json::to_value(Settings::new(&args.input.options(), trace.format))
                .map_err(|e| CliError::Runtime(e.to_string()))?;
        return print(&format!("{value:#}\n"));
    }
    let mut out = String::new();
    let mut line = |name: &str, value: String| out.push_str(&format!("{name:<NAMES$}{value}\n"));
    line("trace", args.input.trace.clone());
    line("hash", hash.text());
    line("counted by", format!("larder {}", env!("CARGO_PKG_VERSION")));
    line(
        "format",
        format!("{} ({})", trace.format.map_or("generated", Format::name), trace.explanation),
    );
    line("requests", s.requests.to_string());
    line(
        "objects",
        format!(
            "{} ({:.2} requests each, {:.1} % requested once)",
            s.objects,
            s.requests_per_object,
            100.0 * s.one_hit_share
        ),
    );
    line(
        "footprint",
        format!("{} (mean object {:.0} B)", HumanBytes(s.footprint_bytes), s.mean_object_size),
    );
    line(
        "requested",
        format!(
            "{} (mean {:.0} B, median ~{}, p99 ~{}, {} to {} B; {:.2} % under 1 KiB)",
            HumanBytes(s.request_bytes),
            s.mean_size,
            s.median_size,
            s.p99_size,
            s.min_size,
            s.max_size,
            100.0 * s.under_1k
        ),
    );
    let ops: Vec<String> = s.operations.iter().map(|(op, n)| format!("{op} {n}")).collect();
    line("operations", ops.join(", "));
    line(
        "writes",
        format!(
            "{:.2} % of requests, {:.2} % of bytes{}",
            100.0 * s.write_share,
            100.0 * s.write_byte_share,
            if s.write_share > 0.0 {
                format!(", {:.1} % of them never read", 100.0 * s.unread_write_share)
            } else {
                String::new()
            }
        ),
    );
    line("compulsory misses", format!("{:.2} % of requests", 100.0 * s.compulsory_miss_ratio));
    line(
        "times",
        if s.timed {
            format!("{:.1} s, {:.1} requests a second", s.seconds, s.requests_per_second)
        } else {
            "none (--rate gives some)".to_owned()
        },
    );
    if s.mean_key_size > 0.0 {
        line("keys", format!("mean {:.1} B", s.mean_key_size));
    }
    if s.ttl_share > 0.0 {
        line("time to live", format!("on {:.2} % of requests", 100.0 * s.ttl_share));
    }
    line("applications", s.applications.to_string());
    line("reads", format!("{:.2} % of requests", 100.0 * s.read_share));
    if s.hosts > 1 {
        line("hosts", s.hosts.to_string());
    }
    if let Some(b) = s.block {
        line("unique block data", format!("{}", HumanBytes(b.unique_bytes)));
        line(
            "sequential",
            format!(
                "{:.2} % of block requests, {:.2} % of bytes; {} unique without them",
                100.0 * b.sequential_share,
                100.0 * b.sequential_byte_share,
                HumanBytes(b.nonsequential_unique_bytes)
            ),
        );
        if let Some(share) = b.metadata_share {
            line("metadata", format!("{:.2} % of block requests", 100.0 * share));
        }
    }
    print_prose(out.trim_end(), NAMES)
}

fn head(args: &HeadArgs) -> Result<(), CliError> {
    let mut trace = args.input.open()?;
    let mut out = String::new();
    // In parts where a line does not fit; what nobody reads on a screen goes in lines all the same, as it comes.
    let parts = !args.json && is_too_wide(HEAD_WIDTH) && args.requests <= 10_000;
    let mut table = Columns::new(3, 0, HEAD);
    if !args.json && !parts {
        out.push_str(&head_line(&HEAD.map(str::to_owned)));
    }
    for _ in 0..args.requests {
        let Some(request) = trace.reader.next() else { break };
        let request = match request {
            Ok(r) => r,
            Err(e) => {
                if parts {
                    table.print()?;
                }
                print(&out)?;
                return Err(trace_error(e));
            }
        };
        if parts {
            table.row(head_cells(&request));
            continue;
        }
        out.push_str(&if args.json {
            json_line(&request)
        } else {
            head_line(&head_cells(&request))
        });
        if out.len() > 1 << 16 {
            print(&out)?;
            out.clear();
        }
    }
    if parts {
        table.print()?;
    }
    print(&out)?;
    if !args.json {
        noteln!(
            "format {} ({})",
            trace.format.map_or("generated", Format::name),
            trace.explanation
        );
    }
    note_skipped(&*trace.reader);
    Ok(())
}

const HEAD: [&str; 10] =
    ["time_s", "op", "id", "offset", "size", "key", "ttl", "app", "host", "class"];
/// Characters of a line of all of them.
const HEAD_WIDTH: usize = 111;

fn head_line(cells: &[String; 10]) -> String {
    let [time, op, id, offset, size, key, ttl, app, host, class] = cells;
    format!(
        "{time:>14} {op:8} {id:>20} {offset:>14} {size:>10} {key:>5} {ttl:>8} {app:>10} {host:>5} {class}\n"
    )
}

fn head_cells(r: &Request) -> [String; 10] {
    let time = r.time.map_or("-".to_owned(), |t| format!("{:.9}", t.as_secs_f64()));
    let class = if r.class == Class::Unstated { "-" } else { r.class.name() };
    [
        time,
        r.op.to_string(),
        r.id.to_string(),
        r.offset.to_string(),
        r.size.to_string(),
        r.key_size.to_string(),
        r.ttl.to_string(),
        r.app.to_string(),
        r.host.to_string(),
        class.to_owned(),
    ]
}

fn json_line(r: &Request) -> String {
    let value = serde_json::json!({
        "time_ns": r.time.map(|t| t.0), "op": r.op.name(), "id": r.id, "offset": r.offset, "size": r.size,
        "key_size": r.key_size, "ttl": r.ttl, "app": r.app, "host": r.host, "class": r.class.name(),
    });
    format!("{value}\n")
}

fn formats() -> Result<(), CliError> {
    let mut out = String::from("Formats (--format; told from the contents where it can be):\n");
    for f in Format::ALL {
        out.push_str(&format!("  {:20} {}\n", f.name(), f.about()));
    }
    out.push_str("\nGenerators (gen:KIND?option=value&…; all take seed and rate, requests a second that give times):\n");
    for (kind, about) in larder_trace::generate::KINDS {
        out.push_str(&format!("  {kind:20} {about}\n"));
    }
    print_prose(out.trim_end(), NAMES + 1)
}
