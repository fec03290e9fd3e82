//! The `larder` command.
//!
//! Every subcommand lives in its own file with an `Args` struct and `run(Args) -> Result<(), CliError>`; to add one,
//! declare the module, add a variant to [`Command`] and an arm to [`dispatch`].
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the command stands above the runtime: it reads clocks and starts threads"
)]

mod bench;
mod error;
mod kv;
mod replay;
mod sim;
mod trace;

use std::io::Write;

use std::process::ExitCode;

use clap::Parser;

use crate::error::CliError;

/// Larder, the flash cache.
#[derive(Debug, Parser)]
#[command(name = "larder", version, about, propagate_version = true, subcommand_required = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Bench(Box<bench::Args>),
    Kv(Box<kv::Args>),
    Replay(Box<replay::Args>),
    Sim(Box<sim::Args>),
    Trace(Box<trace::Args>),
}

fn dispatch(command: Command) -> Result<(), CliError> {
    match command {
        Command::Bench(args) => bench::run(*args),
        Command::Kv(args) => kv::run(&args),
        Command::Replay(args) => replay::run(*args),
        Command::Sim(args) => sim::run(*args),
        Command::Trace(args) => trace::run(*args),
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match dispatch(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // Not by eprintln, which panics when nobody reads.
            writeln!(std::io::stderr(), "larder: {e}").ok();
            e.exit_code()
        }
    }
}
