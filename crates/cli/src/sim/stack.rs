//! `larder sim stack`: RAM and flash on a client of a file server.

use clap::Parser;
use larder_base::{ByteSize, Short};
use larder_sim::stack::{Architecture, Config, Figures, Policy, Restart, Timing, run as simulate};
use larder_trace::{HashOf, Hashed, Options, Reader};
use serde::Serialize;

use super::origin::{Origin, configuration};
use super::watch::Watch;
use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;
use crate::trace::{Input, Settings, note, skipped_of, trace_error};

#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder sim stack 'gen:fileserver?scale=0.01' --ram 80m --flash 640m
  larder sim stack disk.vscsi.zst --architecture naive,unified --flash 0,1g \\
      --ram-policy a,p30")]
pub(super) struct StackArgs {
    #[command(flatten)]
    input: Input,
    /// RAM for blocks, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "8g", value_name = "LIST")]
    ram: Vec<ByteSize>,
    /// Flash capacities, separated by commas; 0 is no flash.
    #[arg(long, value_delimiter = ',', default_value = "64g", value_name = "LIST")]
    flash: Vec<ByteSize>,
    /// naive (RAM is a part of flash), lookaside (flash is never dirty), unified (one LRU over both); separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "naive,lookaside,unified",
        value_name = "LIST"
    )]
    architecture: Vec<Architecture>,
    /// When RAM is written back: s (synchronously), a (at once, asynchronously), pN (every N seconds), n (when a frame is
    /// needed); separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "a", value_name = "LIST")]
    ram_policy: Vec<Policy>,
    /// When flash is written back, likewise.
    #[arg(long, value_delimiter = ',', default_value = "a", value_name = "LIST")]
    flash_policy: Vec<Policy>,
    /// Threads of the application on each host, each waiting for its answer. Hosts are those of the trace
    /// (gen:fileserver?hosts=4&shared=1).
    #[arg(long, default_value_t = 8, value_name = "N")]
    threads: u16,
    /// Blocks that only fill, before counting starts.
    #[arg(long, default_value_t = 0, value_name = "N")]
    warmup: u64,
    /// After so many blocks all clients stop in good order and start again with empty RAM; what comes after is counted.
    #[arg(long, value_name = "N")]
    restart: Option<u64>,
    /// Whether flash outlives that restart: warm or cold; separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "warm",
        value_name = "LIST",
        requires = "restart"
    )]
    persistence: Vec<Persistence>,
    /// Reading a block of flash, microseconds.
    #[arg(long, default_value_t = 88.0, value_name = "US")]
    flash_read: f64,
    /// Writing a block of flash, microseconds.
    #[arg(long, default_value_t = 21.0, value_name = "US")]
    flash_write: f64,
    /// Writing a block on the filer, microseconds.
    #[arg(long, default_value_t = 92.0, value_name = "US")]
    filer_write: f64,
    /// The share of the filer's reads that are fast (read ahead).
    #[arg(long, default_value_t = 0.9, value_name = "SHARE")]
    fast_share: f64,
    /// Seed of which reads are slow.
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// What a restart leaves of flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Persistence {
    /// All of it.
    Warm,
    /// Nothing.
    Cold,
}

#[derive(Debug, Serialize)]
struct Row {
    architecture: Architecture,
    dram: u64,
    flash: u64,
    ram_policy: String,
    flash_policy: String,
    /// Of flash, over the restart.
    #[serde(skip_serializing_if = "Option::is_none")]
    persistence: Option<&'static str>,
    #[serde(flatten)]
    figures: Figures,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    origin: Origin,
    rows: Vec<Row>,
}

/// What all rows were simulated with; the rest is the row's own.
#[derive(Debug, Serialize)]
struct Shared {
    /// Of the application, on each host.
    threads: u16,
    warmup: u64,
    restart: Option<u64>,
    #[serde(flatten)]
    times: Times,
}

/// Microseconds for a block of 4 KiB, of a bit apart.
#[derive(Debug, Serialize)]
struct Times {
    ram_access: f64,
    flash_read: f64,
    flash_write: f64,
    flash_channels: u16,
    network_packet: f64,
    network_block: f64,
    filer_fast: f64,
    filer_slow: f64,
    filer_write: f64,
    fast_share: f64,
}

impl Times {
    fn of(t: &Timing) -> Times {
        let us = |time: larder_base::Nanos| time.0 as f64 / 1000.0;
        Times {
            ram_access: us(t.ram),
            flash_read: us(t.flash_read),
            flash_write: us(t.flash_write),
            flash_channels: t.flash_channels,
            network_packet: us(t.packet),
            network_block: us(t.data),
            filer_fast: us(t.filer_fast),
            filer_slow: us(t.filer_slow),
            filer_write: us(t.filer_write),
            fast_share: t.fast_share,
        }
    }
}

fn blocks(flag: &str, size: ByteSize, least: u64) -> Result<u32, CliError> {
    let count = size.0 / 4096;
    if count == 0 && size.0 > 0 && least == 0 {
        let text =
            format!("--{flag}: {size} is less than a block: give 4k or more, or 0 for no {flag}");
        return Err(CliError::Usage(text));
    }
    if count < least || count > 1 << 31 {
        let text = format!(
            "--{flag}: {size} is {count} blocks of 4 KiB: {least} to 2^31 can be simulated"
        );
        return Err(CliError::Usage(text));
    }
    Ok(count as u32)
}

fn timing(args: &StackArgs) -> Result<Timing, CliError> {
    let micros = |flag: &str, us: f64| {
        if !(0.0..=1e9).contains(&us) {
            let text = format!(
                "--{flag}: '{}' is not a time: give microseconds from 0 to 10^9",
                Short(us)
            );
            return Err(CliError::Usage(text));
        }
        Ok(larder_base::Nanos((us * 1000.0) as u64))
    };
    if !(0.0..=1.0).contains(&args.fast_share) {
        let text =
            format!("--fast-share: '{}' is not a share: give 0 to 1", Short(args.fast_share));
        return Err(CliError::Usage(text));
    }
    Ok(Timing {
        flash_read: micros("flash-read", args.flash_read)?,
        flash_write: micros("flash-write", args.flash_write)?,
        filer_write: micros("filer-write", args.filer_write)?,
        fast_share: args.fast_share,
        ..Timing::default()
    })
}

/// Every combination that was asked for. Without flash, or with flash that is never dirty, there
/// is no policy for it, and one run stands for all.
fn plan(args: &StackArgs) -> Result<Vec<Config>, CliError> {
    let timing = timing(args)?;
    let mut all: Vec<Config> = Vec::new();
    for &ram in &args.ram {
        let ram_blocks = blocks("ram", ram, 1)?;
        for &flash in &args.flash {
            let flash_blocks = blocks("flash", flash, 0)?;
            plan_of(args, (ram_blocks, flash_blocks), timing, &mut all);
        }
    }
    Ok(all)
}

/// Those with so many blocks of RAM and flash.
fn plan_of(
    args: &StackArgs,
    (ram_blocks, flash_blocks): (u32, u32),
    timing: Timing,
    all: &mut Vec<Config>,
) {
    for &architecture in &args.architecture {
        for &ram_policy in &args.ram_policy {
            for &flash_policy in &args.flash_policy {
                let flash_policy = match architecture {
                    Architecture::Lookaside => Policy::None,
                    _ if flash_blocks == 0 => Policy::None,
                    _ => flash_policy,
                };
                let seed = args.seed;
                for &persistence in &args.persistence {
                    let restart = args.restart.map(|after| Restart {
                        after,
                        warm: persistence == Persistence::Warm && flash_blocks > 0,
                    });
                    let config = Config {
                        architecture,
                        ram_blocks,
                        flash_blocks,
                        ram_policy,
                        flash_policy,
                        timing,
                        restart,
                        seed,
                    };
                    if !all.contains(&config) {
                        all.push(config);
                    }
                }
            }
        }
    }
}

pub(super) fn run(args: &StackArgs) -> Result<(), CliError> {
    if args.threads == 0 {
        return Err(CliError::Usage("--threads '0': write a whole number, at least 1".to_owned()));
    }
    let configs = plan(args)?;
    if args.input.trace == "-" && configs.len() > 1 {
        let problem = "several combinations read the trace several times, which standard input does not allow: name a file";
        return Err(CliError::Usage(problem.to_owned()));
    }
    let options = Options { pages: Some(4096), ..args.input.options() };
    // What came before the restart is not what is asked.
    let warmup = args.warmup.max(args.restart.unwrap_or(0));
    let mut watch = Watch::new(configs.len() as u64);
    let mut rows = Vec::new();
    let times = Times::of(&timing(args)?);
    // Of the last reading: they are all the same.
    let (mut hash, mut format, mut skipped) = (HashOf::default(), None, None);
    for config in configs {
        let trace = larder_trace::open(&args.input.trace, &options).map_err(trace_error)?;
        format = trace.format;
        let (mut reader, of) = Hashed::over(trace.reader);
        let tick = |reader: &dyn Reader, requests: u64| watch.tick(reader, requests);
        let figures = simulate(&config, args.threads, warmup, &mut *reader, tick);
        let figures = figures.map_err(trace_error)?;
        hash = of;
        skipped = skipped_of(&*reader);
        if figures.blocks <= warmup {
            watch.finish();
            return Err(too_few(args, figures.blocks));
        }
        let none = config.architecture == Architecture::Lookaside || config.flash_blocks == 0;
        rows.push(Row {
            architecture: config.architecture,
            dram: u64::from(config.ram_blocks) * 4096,
            flash: u64::from(config.flash_blocks) * 4096,
            ram_policy: config.ram_policy.to_string(),
            flash_policy: if none { "-".to_owned() } else { config.flash_policy.to_string() },
            persistence: config.restart.map(|r| if r.warm { "warm" } else { "cold" }),
            figures,
        });
    }
    watch.finish();
    note(skipped);
    let settings = Settings::new(&options, format);
    let shared = Shared { threads: args.threads, warmup, restart: args.restart, times };
    let shared = configuration(Some(&settings), &shared)?;
    let origin = Origin::new(args.seed, &args.input.trace, &hash, shared);
    if args.json {
        return print_json(&Report { origin, rows });
    }
    print_table(&rows)?;
    origin.print()
}

/// Why a trace of so many blocks leaves none to count.
fn too_few(args: &StackArgs, blocks: u64) -> CliError {
    CliError::Usage(match (blocks, args.restart) {
        (0, _) => format!(
            "'{}' has no block reads or writes: give a block trace, see larder trace stats",
            args.input.trace
        ),
        (_, Some(after)) if after >= args.warmup => format!(
            "--restart: '{after}': the trace has {blocks} blocks of 4 KiB, so that none is left to count"
        ),
        _ => format!(
            "--warmup: '{}': the trace has {blocks} blocks of 4 KiB, so that none is left to count",
            args.warmup
        ),
    })
}

fn print_table(rows: &[Row]) -> Result<(), CliError> {
    let header = [
        "architecture",
        "RAM",
        "flash",
        "RAM/flash policy",
        "read µs",
        "write µs",
        "RAM hits",
        "flash hits",
        "filer reads",
        "filer writes",
        "flash writes",
        "filer load",
        "invalidating",
    ];
    let mut table = Columns::new(4, 1, header);
    for row in rows {
        let c = &row.figures.counts;
        let share = |n: u64| format!("{:.4}", n as f64 / c.reads.max(1) as f64);
        table.row([
            row.architecture.name().to_owned(),
            ByteSize(row.dram).to_string(),
            ByteSize(row.flash).to_string(),
            match row.persistence {
                Some(kept) => format!("{}/{}, {kept}", row.ram_policy, row.flash_policy),
                None => format!("{}/{}", row.ram_policy, row.flash_policy),
            },
            format!("{:.1}", row.figures.read_mean_us),
            format!("{:.1}", row.figures.write_mean_us),
            share(c.hits_dram),
            share(c.hits_flash),
            c.filer_reads.to_string(),
            c.filer_writes.to_string(),
            c.flash_writes.to_string(),
            format!("{:.3}", row.figures.filer_load),
            if row.figures.hosts > 1 {
                let all = c.writes.max(1) as f64;
                format!("{:.4}", row.figures.shared.invalidating_writes as f64 / all)
            } else {
                "-".to_owned()
            },
        ]);
    }
    table.print()?;
    if rows.iter().any(|r| r.figures.hosts > 1) {
        proseln!("invalidating: writes that another host's copy was taken away for, of all")?;
    }
    Ok(())
}
