//! `larder sim`: what would a cache of this kind and size have done with this trace, and what would the drive?

mod advise;
mod baseline;
mod block;
mod index;
mod mrc;
mod oracle;
mod origin;
mod replay;
mod report;
mod run;
mod ssd;
mod stack;
mod sweep;
mod watch;

use clap::{Parser, Subcommand};

use crate::error::CliError;

/// Simulate caches and drives on traces.
#[derive(Debug, Parser)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// An experiment: caches side by side in virtual time, each over a drive, with latencies.
    Run(run::RunArgs),
    /// Miss ratios of eviction policies at many sizes, in one decode of the trace.
    Mrc(mrc::MrcArgs),
    /// An experiment at every combination of its keys' values: tables, csv, Parquet and an HTML report.
    Sweep(sweep::SweepArgs),
    /// Which DRAM, flash and admission meet a hit ratio and a drive's life at least cost.
    Advise(Box<advise::AdviseArgs>),
    /// Other flash caches to measure against: a victim cache, RIPQ, CacheLib's two. Hit ratio and cache-level write
    /// amplification.
    Baseline(baseline::BaselineArgs),
    /// The best offline heuristic for a flash log with a write budget: which hits were there for who knew the next reads.
    Oracle(oracle::OracleArgs),
    /// The block cache's admission and replacement on block traces: read hits, bytes to flash.
    Block(block::BlockArgs),
    /// Decide again what a server recorded (larder kv --record, larder block serve --record) decided, by the same engine: ends with 1 where they differ.
    Replay(replay::ReplayArgs),
    /// Flashield's flash index as the paper has it, measured beside Larder's: DRAM, flash reads, evictions, packing.
    Index(index::IndexArgs),
    /// A drive: device-level write amplification and wear under synthetic writes or a block trace.
    Ssd(ssd::SsdArgs),
    /// RAM and flash on a client of a file server: three architectures, four policies of writing back, with latencies.
    Stack(stack::StackArgs),
}

pub(crate) fn run(args: Args) -> Result<(), CliError> {
    match args.command {
        Command::Run(args) => run::run(&args),
        Command::Mrc(args) => mrc::run(&args),
        Command::Sweep(args) => sweep::run(&args),
        Command::Advise(args) => advise::run(&args),
        Command::Baseline(args) => baseline::run(&args),
        Command::Oracle(args) => oracle::run(&args),
        Command::Block(args) => block::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Index(args) => index::run(&args),
        Command::Ssd(args) => ssd::run(&args),
        Command::Stack(args) => stack::run(&args),
    }
}

/// The values of a list in their order, each once: to simulate one again would show the same again. Says so of `flag` where
/// there were repeats.
fn once<T: PartialEq + Clone>(flag: &str, list: &[T]) -> Vec<T> {
    let mut all: Vec<T> = Vec::with_capacity(list.len());
    for value in list {
        if !all.contains(value) {
            all.push(value.clone());
        }
    }
    if all.len() < list.len() {
        noteln!("larder: {flag} names some more than once: each is simulated once");
    }
    all
}

/// The number of threads that `--threads` asks for; all cores when not given.
fn threads(given: Option<usize>) -> Result<usize, CliError> {
    match given {
        Some(0) => {
            Err(CliError::Usage("--threads '0': write a whole number, at least 1".to_owned()))
        }
        Some(n) => Ok(n),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}
