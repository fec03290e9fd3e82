//! The `larder` command.
//!
//! Every subcommand lives in its own file with an `Args` struct and `run(Args) -> Result<(), CliError>`; to add one,
//! declare the module, add a variant to [`Command`] and an arm to [`dispatch`]. What it prints goes through `out`, and tables
//! that may be wider than a terminal through `table`.
#![deny(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "println! and eprintln! panic where nobody can read: outln! and noteln! of out.rs do not"
)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the command stands above the runtime: it reads clocks and starts threads"
)]

#[macro_use]
mod out;

mod bench;
mod block;
mod config_file;
mod error;
mod kv;
mod progress;
mod replay;
mod sim;
mod table;
mod trace;

use std::io::Write;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser};

use crate::error::CliError;

/// Where to look next.
const NEXT: &str = "\
Begin with `larder kv`: it serves memcached's protocol on 127.0.0.1:11211 and shows itself at http://127.0.0.1:11280/.
`larder COMMAND --help` shows a command's options with examples; the README's tour takes five minutes.";

/// Larder, the flash cache.
#[derive(Debug, Parser)]
#[command(
    name = "larder",
    version,
    about,
    propagate_version = true,
    subcommand_required = true,
    after_help = NEXT
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Bench(Box<bench::Args>),
    Block(Box<block::Args>),
    Kv(Box<kv::Args>),
    Replay(Box<replay::Args>),
    Sim(Box<sim::Args>),
    Trace(Box<trace::Args>),
}

impl Command {
    /// Whether the command works with sockets, whose peers may hang up at any moment: a write to them must only fail. These
    /// commands do what is right for standard output themselves, when they come to print.
    fn has_sockets(&self) -> bool {
        match self {
            Command::Kv(_) | Command::Block(_) | Command::Replay(_) => true,
            Command::Bench(_) | Command::Sim(_) | Command::Trace(_) => false,
        }
    }
}

fn dispatch(command: Command) -> Result<(), CliError> {
    match command {
        Command::Bench(args) => bench::run(*args),
        Command::Block(args) => block::run(*args),
        Command::Kv(args) => kv::run(&args),
        Command::Replay(args) => replay::run(*args),
        Command::Sim(args) => sim::run(*args),
        Command::Trace(args) => trace::run(*args),
    }
}

/// Lets every flag that takes a value take a negative number: the flag's own parser then refuses it and names both, where
/// clap would take -1 for a flag that there is not.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let flag = |arg: clap::Arg| {
        let takes = !arg.is_positional() && arg.get_action().takes_values();
        arg.allow_negative_numbers(takes)
    };
    command.mut_args(flag).mut_subcommands(with_negative_numbers)
}

fn main() -> ExitCode {
    let matches = with_negative_numbers(Cli::command()).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    if !cli.command.has_sockets() {
        larder_runtime::machine::end_on_broken_pipe();
    }
    match dispatch(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // Not by eprintln, which panics when nobody reads.
            writeln!(std::io::stderr(), "larder: {e}").ok();
            e.exit_code()
        }
    }
}
