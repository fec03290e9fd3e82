//! `larder sim ssd`: what a drive makes of writes.

use clap::Parser;
use larder_base::{ByteSize, Rng, Short};
use larder_runtime::machine::usable_memory;
use larder_sim::ssd::{Geometry, GeometryError, NoEviction, Ssd, Traffic, VictimPolicy, Wear};
use larder_trace::{HashOf, Hashed, Reader};
use serde::Serialize;

use super::origin::{Origin, configuration};
use super::watch::Watch;
use crate::error::CliError;
use crate::out::print_json;
use crate::trace::{Settings, trace_error};

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder sim ssd --capacity 4g --io 512m
  larder sim ssd --capacity 4g --over-provisioning 0.28 --hot 0.9:0.1 \\
      --victim cost-benefit
  larder sim ssd --capacity 4g --trace disk.vscsi.zst --json")]
pub(super) struct SsdArgs {
    /// Capacity that the host sees.
    #[arg(long, default_value = "16g", value_name = "SIZE")]
    capacity: ByteSize,
    /// The unit of mapping.
    #[arg(long, default_value = "16k", value_name = "SIZE")]
    page: ByteSize,
    /// A super-block: what is erased together, over all channels and planes.
    #[arg(long, default_value = "64m", value_name = "SIZE")]
    block: ByteSize,
    /// Physical space beyond the capacity, as a share of it.
    #[arg(long, default_value_t = 0.07, value_name = "SHARE")]
    over_provisioning: f64,
    /// The cleaner's choice: greedy, fifo, random or cost-benefit.
    #[arg(long, default_value = "greedy", value_name = "POLICY")]
    victim: VictimPolicy,
    /// Copies made by the cleaner go to super-blocks of their own.
    #[arg(long)]
    separate_cleaning: bool,
    /// Size of each write: the space is cut into regions of this size, each overwritten whole.
    #[arg(long, default_value = "16k", value_name = "SIZE")]
    io: ByteSize,
    /// Regions are written in turn, rather than at random.
    #[arg(long)]
    sequential: bool,
    /// WRITES:SHARE: this share of the writes goes to this share of the space (0.9:0.1).
    #[arg(long, value_parser = parse_hot, value_name = "WRITES:SHARE", conflicts_with = "sequential")]
    hot: Option<(f64, f64)>,
    /// The share of the capacity that is written to.
    #[arg(long, default_value_t = 1.0, value_name = "SHARE")]
    utilisation: f64,
    /// How often the space is overwritten; the first half only settles the drive.
    #[arg(long, default_value_t = 8, value_name = "N")]
    rounds: u32,
    /// Write what this block trace writes (and discard what it trims), page by page modulo the capacity, instead.
    #[arg(long, value_name = "TRACE", conflicts_with_all = ["io", "sequential", "hot", "utilisation", "rounds"])]
    trace: Option<String>,
    /// Seed of random writes and victims.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

fn parse_hot(text: &str) -> Result<(f64, f64), String> {
    let parts = text.split_once(':').and_then(|(w, s)| Some((w.parse().ok()?, s.parse().ok()?)));
    parts.filter(|(w, s)| (0.0..=1.0).contains(w) && *s > 0.0 && *s < 1.0).ok_or_else(|| {
        "give the share of the writes and the share of the space, such as 0.9:0.1".to_owned()
    })
}

/// The drive, and what was written to it where that was no trace.
#[derive(Debug, Serialize)]
struct Configuration {
    capacity: ByteSize,
    page: ByteSize,
    block: ByteSize,
    over_provisioning: f64,
    victim: &'static str,
    separate_cleaning: bool,
    #[serde(flatten)]
    writes: Option<Writes>,
}

#[derive(Debug, Serialize)]
struct Writes {
    io: ByteSize,
    sequential: bool,
    /// Shares of the writes and of the space, as the flag takes them.
    hot: Option<String>,
    utilisation: f64,
    rounds: u32,
}

impl Writes {
    fn line(&self) -> String {
        let order = match &self.hot {
            _ if self.sequential => "sequential".to_owned(),
            Some(hot) => format!("random, {hot} hot,"),
            None => "random".to_owned(),
        };
        let Writes { io, utilisation, rounds, .. } = self;
        format!("{order} writes of {io} over {utilisation} of the capacity, {rounds} rounds")
    }
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    /// Whether the drive was filled so far that its cleaner had to work.
    cleaned: bool,
    /// Device-level write amplification: pages programmed over pages that the host wrote.
    dlwa: f64,
    page_bytes: u64,
    traffic: Traffic,
    wear: Wear,
    /// Closed super-blocks by share of valid pages, in tenths.
    valid_distribution: Vec<u64>,
}

fn usage<T>(text: String) -> Result<T, CliError> {
    Err(CliError::Usage(text))
}

fn geometry(args: &SsdArgs) -> Result<Geometry, CliError> {
    let (capacity, page, block) = (args.capacity.0, args.page.0, args.block.0);
    if page == 0 || !block.is_multiple_of(page) || block < page {
        let text = format!("--block: {} is not a multiple of --page {}", args.block, args.page);
        return usage(text);
    }
    if !(args.over_provisioning > 0.0 && args.over_provisioning <= 100.0) {
        let shown = Short(args.over_provisioning);
        let must = "give a share above 0 and at most 100, such as 0.07";
        return usage(format!("--over-provisioning: '{shown}': {must}"));
    }
    let logical = u32::try_from(capacity / page).unwrap_or(u32::MAX);
    let per_block = u32::try_from(block / page).unwrap_or(u32::MAX);
    if logical == 0 || f64::from(logical) * (1.0 + args.over_provisioning) > 3e9 {
        let text = format!(
            "--capacity: {} has {} pages of {}: between 1 and 3 * 10^9 can be simulated; choose another --page",
            args.capacity,
            capacity / page,
            args.page
        );
        return usage(text);
    }
    let geometry = Geometry {
        logical_pages: logical,
        pages_per_block: per_block,
        over_provisioning: args.over_provisioning,
        streams: 1,
        separate_cleaning: args.separate_cleaning,
        victim: args.victim,
    };
    let (need, limit) = (geometry.memory_bytes(), usable_memory().unwrap_or(u64::MAX) / 4 * 3);
    if need > limit {
        return usage(format!(
            "--capacity: {} in pages of {} takes {} of memory, and {} may be used: choose a larger --page",
            args.capacity,
            args.page,
            ByteSize(need),
            ByteSize(limit)
        ));
    }
    Ok(geometry)
}

pub(super) fn run(args: &SsdArgs) -> Result<(), CliError> {
    let geometry = geometry(args)?;
    let ssd = Ssd::new(geometry, args.seed);
    // The model's fields have the flags' names.
    let refused = |e: GeometryError| match e {
        GeometryError::Bad { what, .. } => {
            CliError::Usage(e.to_string().replace(what, &format!("--{}", what.replace('_', "-"))))
        }
        e => CliError::Usage(e.to_string()),
    };
    let mut ssd = ssd.map_err(refused)?;
    let mut drive = Configuration {
        capacity: args.capacity,
        page: args.page,
        block: args.block,
        over_provisioning: args.over_provisioning,
        victim: args.victim.name(),
        separate_cleaning: args.separate_cleaning,
        writes: None,
    };
    let mut written = None;
    let origin = match &args.trace {
        Some(trace) => {
            let (settings, hash) = from_trace(args, trace, &mut ssd)?;
            Origin::new(args.seed, trace, &hash, configuration(Some(&settings), &drive)?)
        }
        None => {
            synthetic(args, &mut ssd)?;
            let writes = Writes {
                io: args.io,
                sequential: args.sequential,
                hot: args.hot.map(|(writes, space)| format!("{writes}:{space}")),
                utilisation: args.utilisation,
                rounds: args.rounds,
            };
            written = Some(writes.line());
            drive.writes = Some(writes);
            Origin::without_trace(args.seed, configuration(None, &drive)?)
        }
    };
    let traffic = ssd.traffic();
    let report = Report {
        origin,
        cleaned: ssd.wear().most > 0,
        dlwa: traffic.write_amplification(),
        page_bytes: args.page.0,
        traffic,
        wear: ssd.wear(),
        valid_distribution: ssd.valid_distribution(10),
    };
    if args.json {
        return print_json(&report);
    }
    let bytes = |pages: u64| ByteSize(pages.saturating_mul(args.page.0));
    proseln!("DLWA                  {:.4}", report.dlwa)?;
    proseln!("written by the host   {}", bytes(traffic.host_pages))?;
    proseln!("copied by the cleaner {}", bytes(traffic.copied_pages))?;
    let wear = report.wear;
    proseln!(
        "erases per super-block {:.1} on average, {} to {}, deviation {:.2}",
        wear.mean,
        wear.least,
        wear.most,
        wear.deviation
    )?;
    proseln!("super-blocks by share of valid pages (tenths): {:?}", report.valid_distribution)?;
    if !report.cleaned {
        proseln!(
            "the drive never filled: {} were written to it and nothing was erased, so this says nothing of its cleaner; \
             write more, or give a smaller --capacity",
            bytes(traffic.host_pages)
        )?;
    }
    let separate = if args.separate_cleaning { ", copies apart" } else { "" };
    proseln!(
        "drive of {} in pages of {} and super-blocks of {}, over-provisioning {}, victim {}{separate}",
        args.capacity,
        args.page,
        args.block,
        args.over_provisioning,
        args.victim.name()
    )?;
    if let Some(written) = written {
        proseln!("{written}")?;
    }
    report.origin.print()
}

fn synthetic(args: &SsdArgs, ssd: &mut Ssd) -> Result<(), CliError> {
    if !(args.utilisation > 0.0 && args.utilisation <= 1.0) {
        return usage(format!(
            "--utilisation: '{}' is not a share: give 0 < SHARE <= 1",
            Short(args.utilisation)
        ));
    }
    if args.io.0 == 0 || !args.io.0.is_multiple_of(args.page.0) {
        return usage(format!("--io: {} is not a multiple of --page {}", args.io, args.page));
    }
    let pages = f64::from(ssd.geometry().logical_pages) * args.utilisation;
    let region = args.io.0 / args.page.0;
    let regions = pages as u64 / region;
    if regions == 0 || args.rounds < 2 {
        return usage(
            "--io, --rounds: at least one region must fit, and be written twice".to_owned(),
        );
    }
    if args.hot.is_some() && regions < 2 {
        return usage("--hot: at least two regions must fit: give a smaller --io".to_owned());
    }
    let hot_regions =
        args.hot.map_or(0, |(_, share)| ((regions as f64 * share) as u64).clamp(1, regions - 1));
    let bar = crate::progress::bar(u64::from(args.rounds));
    let mut rng = Rng::new(args.seed);
    for round in 0..=args.rounds {
        if round == args.rounds / 2 + 1 {
            ssd.reset_traffic();
        }
        for turn in 0..regions {
            let index = match args.hot {
                _ if args.sequential || round == 0 => turn,
                Some((writes, _)) if rng.chance(writes) => rng.below(hot_regions),
                Some(_) => hot_regions + rng.below(regions - hot_regions),
                None => rng.below(regions),
            };
            for page in index * region..(index + 1) * region {
                ssd.write(page as u32, 0, &mut NoEviction);
            }
        }
        bar.inc(1);
        bar.set_message(format!("WA {:.3}", ssd.traffic().write_amplification()));
    }
    bar.finish_and_clear();
    Ok(())
}

/// Writes what the trace writes; how it was read, and its hash.
fn from_trace(args: &SsdArgs, name: &str, ssd: &mut Ssd) -> Result<(Settings, HashOf), CliError> {
    let options = larder_trace::Options::default();
    let trace = larder_trace::open(name, &options).map_err(trace_error)?;
    let settings = Settings::new(&options, trace.format);
    let (mut reader, hash) = Hashed::over(trace.reader);
    let pages = u64::from(ssd.geometry().logical_pages);
    let mut watch = Watch::new(1);
    let (mut requests, mut writes) = (0u64, 0u64);
    while let Some(request) = reader.next() {
        let request = request.map_err(trace_error)?;
        requests += 1;
        if requests % (1 << 14) == 0 {
            let reader: &dyn Reader = &*reader;
            watch.tick(reader, requests);
        }
        if request.size == 0 || !request.op.is_block() || request.op.is_read() {
            continue;
        }
        writes += u64::from(request.op.is_write());
        let first = request.offset / args.page.0;
        let last = request.offset.saturating_add(request.size - 1) / args.page.0;
        // A request larger than the drive covers all of it once.
        for page in first..=last.min(first.saturating_add(pages - 1)) {
            let page = (page % pages) as u32;
            if request.op.is_removal() {
                ssd.trim(page);
            } else {
                ssd.write(page, 0, &mut NoEviction);
            }
        }
    }
    watch.finish();
    if writes == 0 {
        return usage(format!(
            "--trace: '{name}' has no block writes: give a block trace that has, see larder trace stats"
        ));
    }
    Ok((settings, hash))
}
