//! `larder sim index`: Flashield's flash index in the paper's form, beside Larder's.

use std::io::IsTerminal;
use std::str::FromStr;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use larder_base::ByteSize;
use larder_engine::segment::Choice;
use larder_format::Geometry;
use larder_lab::{index, packing};
use larder_sim::lab::baseline::paper_index::placement::{self, Order, PlacementConfig};
use larder_sim::lab::baseline::paper_index::table::{self, TableConfig};
use serde::Serialize;

use super::origin::{Origin, configuration};
use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;

/// Sizes of objects, for both packers.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mix(placement::Sizes);

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Mix, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let number = |t: &str, low: f64, high: f64| {
            t.parse::<f64>().ok().filter(|n| (low..=high).contains(n))
        };
        let found = match parts[..] {
            ["memcachier"] => Some(placement::Sizes::Memcachier),
            ["fixed", n] => {
                n.parse().ok().filter(|n| (32..=65_536).contains(n)).map(placement::Sizes::Fixed)
            }
            ["lognormal", mean, sigma] => number(mean, 16.0, 65_536.0)
                .zip(number(sigma, 0.0, 4.0))
                .map(|(mean, sigma)| placement::Sizes::LogNormal { mean, sigma }),
            _ => None,
        };
        found.map(Mix).ok_or_else(|| {
            "write memcachier, fixed:BYTES (32 to 65536) or lognormal:MEAN:SIGMA (mean 16 to 65536, sigma 0 to 4)"
                .to_owned()
        })
    }
}

impl Mix {
    /// The same for Larder's packer.
    fn ours(self) -> packing::Sizes {
        match self.0 {
            placement::Sizes::Fixed(n) => packing::Sizes::Record(n as usize),
            placement::Sizes::LogNormal { mean, sigma } => {
                packing::Sizes::LogNormal { mean, sigma }
            }
            placement::Sizes::Memcachier => packing::Sizes::Memcachier,
        }
    }
}

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder sim index --objects 100000 --choices 2,16
  larder sim index --sizes memcachier,fixed:300 --functions 1,16 --json")]
pub(super) struct IndexArgs {
    /// Live objects on flash.
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    objects: u64,
    /// How often the whole flash is written anew.
    #[arg(long, value_name = "N", default_value_t = 3)]
    turnovers: u32,
    /// Segments that the flash is divided into, 2 to 4095.
    #[arg(long, value_name = "N", default_value_t = 256)]
    segments: u16,
    /// Share of the writes that overwrite a live object, 0 to 0.9.
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    overwrites: f64,
    /// Hash functions of the paper's table, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "2,4,8,16")]
    choices: Vec<u32>,
    /// Live objects over slots, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.7,0.9,0.98")]
    load: Vec<f64>,
    /// Look-ups of present and of absent keys.
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    probes: u64,
    /// Sizes of the objects that are packed, separated by commas: memcachier, fixed:BYTES, lognormal:MEAN:SIGMA.
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        default_value = "memcachier,lognormal:257:1,fixed:280"
    )]
    sizes: Vec<Mix>,
    /// Bytes of the segment that is packed (the paper: 512m).
    #[arg(long, value_name = "SIZE", default_value = "16m")]
    segment: ByteSize,
    /// Hash functions of the placement, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,4,8,16,64")]
    functions: Vec<u32>,
    /// Bytes offered to a segment, in segments, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,1.5,2")]
    offered: Vec<f64>,
    /// Objects are placed as they come, rather than the largest first as in the paper.
    #[arg(long)]
    arrival: bool,
    /// Seed.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct IndexRow {
    index: &'static str,
    choices: u32,
    sized_load: f64,
    load: f64,
    index_bytes_per_object: f64,
    flash_reads_per_hit: f64,
    flash_reads_per_miss: f64,
    forced_share: f64,
    /// Look-ups of present keys answered with an overwritten version. Larder's index removes every entry that could lead
    /// to one together with the version, which the engine's model tests check.
    #[serde(skip_serializing_if = "Option::is_none")]
    stale_answers: Option<u64>,
}

#[derive(Debug, Serialize)]
struct PackingRow {
    placement: &'static str,
    sizes: String,
    functions: u32,
    offered: f64,
    utilisation: f64,
    /// Candidates that found a place.
    placed: f64,
    /// Places (or pages) tried for each candidate (ours: for each that was placed).
    tries: f64,
    /// Mean size of the placed over that of the candidates.
    #[serde(skip_serializing_if = "Option::is_none")]
    size_bias: Option<f64>,
}

/// What all rows were measured with; the rest is the row's own.
#[derive(Debug, Serialize)]
struct Shared {
    objects: u64,
    turnovers: u32,
    segments: u16,
    overwrites: f64,
    probes: u64,
    segment: ByteSize,
    arrival: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    index: Vec<IndexRow>,
    packing: Vec<PackingRow>,
}

fn usage(e: &dyn std::fmt::Display) -> CliError {
    CliError::Usage(format!("--{e}"))
}

/// A progress bar of `steps`, drawn on a terminal only.
fn progress(steps: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(steps * 1000);
    let style = ProgressStyle::with_template("{bar:30} {percent:>3} %  {msg}  {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    bar
}

pub(super) fn run(args: &IndexArgs) -> Result<(), CliError> {
    let steps = args.load.len() * (args.choices.len() + 1) + 2 * args.sizes.len();
    // What the second part cannot work with is known before the first has run for a minute.
    args.sizes
        .iter()
        .try_for_each(|&mix| placement_of(args, mix).check())
        .map_err(|e| usage(&e))?;
    let bar = progress(steps as u64);
    let mut done = 0u64;
    let index = tables(args, &bar, &mut done)?;
    let packing = packings(args, &bar, &mut done)?;
    bar.finish_and_clear();
    let shared = Shared {
        objects: args.objects,
        turnovers: args.turnovers,
        segments: args.segments,
        overwrites: args.overwrites,
        probes: args.probes,
        segment: args.segment,
        arrival: args.arrival,
    };
    let origin = Origin::without_trace(args.seed, configuration(None, &shared)?);
    let report = Report { origin, index, packing };
    if args.json {
        return print_json(&report);
    }
    show(&report, &shared)
}

fn tables(args: &IndexArgs, bar: &ProgressBar, done: &mut u64) -> Result<Vec<IndexRow>, CliError> {
    let mut rows = Vec::new();
    for &load in &args.load {
        for &choices in &args.choices {
            bar.set_message(format!("paper's table: {choices} choices at load {load}"));
            let config = TableConfig {
                objects: args.objects,
                turnovers: args.turnovers,
                segments: args.segments,
                overwrites: args.overwrites,
                choices,
                load,
                probes: args.probes,
                seed: args.seed,
            };
            let r = table::run(&config, &mut |share| {
                bar.set_position(*done * 1000 + (share * 1000.0) as u64);
            })
            .map_err(|e| usage(&e))?;
            *done += 1;
            rows.push(IndexRow {
                index: "paper",
                choices,
                sized_load: load,
                load: r.load,
                index_bytes_per_object: r.bytes_per_object,
                flash_reads_per_hit: r.flash_reads_per_hit,
                flash_reads_per_miss: r.flash_reads_per_miss,
                forced_share: r.forced_share,
                stale_answers: Some(r.stale_answers),
            });
        }
        bar.set_message(format!("larder's index at load {load}"));
        let config = index::BenchConfig {
            objects: args.objects,
            turnovers: args.turnovers,
            segments: args.segments,
            overwrites: args.overwrites,
            load,
            probes: args.probes,
            seed: args.seed,
            ..Default::default()
        };
        let mut meters = index::Meters { resident: &mut || 0, nanos: None };
        let r = index::run(config, &mut meters, &mut |share| {
            bar.set_position(*done * 1000 + (share * 1000.0) as u64);
        })
        .map_err(|e| usage(&e))?;
        *done += 1;
        rows.push(IndexRow {
            index: "larder",
            choices: 2,
            sized_load: load,
            load: r.load,
            index_bytes_per_object: r.bytes_per_object_accounted,
            flash_reads_per_hit: r.flash_reads_per_hit,
            flash_reads_per_miss: r.flash_reads_per_miss,
            forced_share: r.forced_share,
            stale_answers: None,
        });
    }
    Ok(rows)
}

/// What the paper's placement is asked for.
fn placement_of(args: &IndexArgs, mix: Mix) -> PlacementConfig {
    PlacementConfig {
        segment: args.segment.0,
        sizes: mix.0,
        functions: args.functions.clone(),
        offered: args.offered.clone(),
        order: if args.arrival { Order::Arrival } else { Order::LargestFirst },
        seed: args.seed,
    }
}

fn packings(
    args: &IndexArgs,
    bar: &ProgressBar,
    done: &mut u64,
) -> Result<Vec<PackingRow>, CliError> {
    let mut rows = Vec::new();
    for &mix in &args.sizes {
        bar.set_message(format!("paper's placement of {}", mix.0.name()));
        let paper = placement::run(&placement_of(args, mix), &mut |share| {
            bar.set_position(*done * 1000 + (share * 1000.0) as u64);
        })
        .map_err(|e| usage(&e))?;
        *done += 1;
        rows.extend(paper.into_iter().map(|r| PackingRow {
            placement: "paper",
            sizes: r.sizes,
            functions: r.functions,
            offered: r.offered,
            utilisation: r.utilisation,
            placed: r.placed,
            tries: r.tries,
            size_bias: Some(r.size_bias),
        }));
        bar.set_message(format!("larder's packing of {}", mix.0.name()));
        let geometry = Geometry::plan(64 << 30).map_err(|e| usage(&e))?;
        let standard = packing::PackingConfig::standard(geometry);
        let ours = packing::PackingConfig {
            segments: 2,
            sizes: vec![mix.ours()],
            functions: vec![16],
            choices: vec![Choice::default()],
            offered: args.offered.clone(),
            seed: args.seed,
            ..standard
        };
        let report = packing::run(&ours, &mut |share| {
            bar.set_position(*done * 1000 + (share * 1000.0) as u64);
        });
        *done += 1;
        let once = report.rows.into_iter().filter(|r| r.mode == packing::Mode::Once);
        rows.extend(once.map(|r| PackingRow {
            placement: "larder",
            sizes: mix.0.name(),
            functions: u32::from(r.functions),
            offered: r.offered,
            utilisation: r.utilisation,
            placed: 1.0 - r.refused,
            tries: r.tries,
            size_bias: None,
        }));
    }
    Ok(rows)
}

fn show(report: &Report, with: &Shared) -> Result<(), CliError> {
    let header = [
        "index",
        "choices",
        "sized load",
        "load",
        "B/object",
        "reads/hit",
        "reads/miss",
        "forced out",
        "stale",
    ];
    let mut t = Columns::new(3, 1, header);
    for r in &report.index {
        t.row([
            r.index.to_owned(),
            r.choices.to_string(),
            format!("{:.2}", r.sized_load),
            format!("{:.3}", r.load),
            format!("{:.3}", r.index_bytes_per_object),
            format!("{:.4}", r.flash_reads_per_hit),
            format!("{:.4}", r.flash_reads_per_miss),
            format!("{:.3} %", 100.0 * r.forced_share),
            r.stale_answers.map_or("-".to_owned(), |n| n.to_string()),
        ]);
    }
    t.print()?;
    proseln!(
        "{} live objects, {} segments, flash written {} times over, {:.0} % overwrites. forced out: entries lost for\n\
         lack of room, over insertions; stale: look-ups answered with an overwritten version",
        with.objects,
        with.segments,
        with.turnovers,
        100.0 * with.overwrites
    )?;
    let header = [
        "placement",
        "sizes",
        "functions",
        "offered",
        "utilisation",
        "placed",
        "tries",
        "size bias",
    ];
    let mut t = Columns::new(4, 2, header);
    for r in &report.packing {
        t.row([
            r.placement.to_owned(),
            r.sizes.clone(),
            r.functions.to_string(),
            format!("{:.2}", r.offered),
            format!("{:.2} %", 100.0 * r.utilisation),
            format!("{:.2} %", 100.0 * r.placed),
            format!("{:.2}", r.tries),
            r.size_bias.map_or("-".to_owned(), |b| format!("{b:.2}")),
        ]);
    }
    t.print()?;
    proseln!(
        "offered: bytes of candidates, in segments; placed: candidates that found a place; size bias: mean size of the\n\
         placed over that of all. larder packs objects into 4 KiB pages that 16 functions name"
    )?;
    report.origin.print()
}
