//! The `larder` command.
//!
//! Every subcommand lives in its own file with an `Args` struct and `run(Args) -> Result<(), CliError>`; to add one,
//! declare the module, add a variant to [`Command`] and an arm to [`dispatch`]. What it prints goes through `out`, and tables
//! that may be wider than a terminal through `table`.

#![forbid(unsafe_code)]
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
mod error;
mod kv;
mod log;
mod maps;
mod progress;
mod replay;
mod signals;
mod sim;
mod table;
mod trace;

use std::ffi::OsString;
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
    Maps(maps::Args),
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
            Command::Bench(_) | Command::Maps(_) | Command::Sim(_) | Command::Trace(_) => false,
        }
    }
}

fn dispatch(command: Command) -> Result<(), CliError> {
    match command {
        Command::Bench(args) => bench::run(*args),
        Command::Block(args) => block::run(*args),
        Command::Kv(args) => kv::run(&args),
        Command::Maps(args) => maps::run(&args),
        Command::Replay(args) => replay::run(*args),
        Command::Sim(args) => sim::run(*args),
        Command::Trace(args) => trace::run(*args),
    }
}

/// Whether an argument can only be meant as a value, though it begins with a dash: `-1`, `-1m`, `-1,2`, `-.5`, `-inf`. No flag
/// begins with a digit.
fn is_negative(argument: &str) -> bool {
    argument.strip_prefix('-').is_some_and(|rest| {
        let number = rest.strip_prefix('.').unwrap_or(rest);
        number.starts_with(|c: char| c.is_ascii_digit())
            || ["inf", "infinity", "nan"].contains(&rest.to_ascii_lowercase().as_str())
    })
}

/// Whether an argument is a flag without a value in it: `--sizes`, `-n`.
fn is_flag(argument: &str) -> bool {
    match argument.strip_prefix("--") {
        Some(name) => !name.is_empty() && !name.contains('='),
        None => argument.len() == 2 && argument.starts_with('-') && !is_negative(argument),
    }
}

/// Joins a flag and the negative value behind it (`--sizes=-1m`): the flag's own parser then refuses it and names both, where
/// clap would take the value for a flag that there is not.
fn with_values_joined(arguments: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let mut out: Vec<OsString> = Vec::new();
    let mut all_plain = false;
    for argument in arguments {
        let after_flag = out.last().and_then(|a| a.to_str()).is_some_and(is_flag);
        match out.last_mut() {
            Some(flag)
                if !all_plain && after_flag && argument.to_str().is_some_and(is_negative) =>
            {
                flag.push("=");
                flag.push(argument);
            }
            _ => {
                all_plain |= argument == "--";
                out.push(argument);
            }
        }
    }
    out
}

/// The command that is asked for, and how it is typed.
fn asked_for(words: &[OsString]) -> (clap::Command, String) {
    let mut all = Cli::command();
    all.build();
    let (mut command, mut typed) = (&all, "larder".to_owned());
    for word in words.iter().skip(1) {
        let Some(next) = word.to_str().and_then(|word| command.find_subcommand(word)) else {
            break;
        };
        typed.push(' ');
        typed.push_str(next.get_name());
        command = next;
    }
    (command.clone(), typed)
}

/// Says why a command line cannot be meant, in one sentence. Help and the version are shown as clap has them.
fn refuse(words: &[OsString], error: &clap::Error) -> ExitCode {
    let shows = [
        clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand,
        clap::error::ErrorKind::MissingSubcommand,
    ];
    if !error.use_stderr() || shows.contains(&error.kind()) {
        error.exit();
    }
    let (command, typed) = asked_for(words);
    let refusal = larder_settings::refusal(&command, &typed, error);
    writeln!(std::io::stderr(), "larder: {refusal}").ok();
    ExitCode::from(2)
}

/// The command line, each value as it is meant. White space around values is no part of them for `larder kv`, whose command lines are
/// memcached's: charts write a flag and its value into one argument.
fn command_line(words: impl IntoIterator<Item = OsString>) -> Vec<OsString> {
    let words: Vec<_> = words.into_iter().collect();
    let (command, _) = asked_for(&words);
    with_values_joined(match command.get_name() {
        "kv" => larder_settings::without_spaces(&command, words),
        _ => words,
    })
}

fn main() -> ExitCode {
    let words = command_line(std::env::args_os());
    let parsed = Cli::command().try_get_matches_from(&words);
    let cli = match parsed.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        Err(e) => return refuse(&words, &e),
    };
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

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(line: &str) -> String {
        let arguments = line.split(' ').map(OsString::from);
        let out = with_values_joined(arguments).into_iter().map(|a| a.into_string().unwrap());
        out.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn negative_values_are_their_flags() {
        for (line, out) in [
            ("larder sim mrc t --sizes -1,2", "larder sim mrc t --sizes=-1,2"),
            ("larder trace head t -n -1m", "larder trace head t -n=-1m"),
            ("larder kv -p -1 -m 64", "larder kv -p=-1 -m 64"),
            ("larder sim ssd --io -.5k --hot -inf:1", "larder sim ssd --io=-.5k --hot -inf:1"),
            ("larder sim ssd --utilisation -NaN", "larder sim ssd --utilisation=-NaN"),
        ] {
            assert_eq!(joined(line), out);
        }
        for same in [
            "larder sim mrc t --sizes 1,2 --json",
            "larder trace head -1",
            "larder trace head -- --sizes -1",
            "larder sim mrc t --sizes=5 -1",
            "larder kv -vv -A",
        ] {
            assert_eq!(joined(same), same);
        }
    }

    /// Makes the pages of reference anew.
    const REMAKE: &str = "LARDER_WRITE_PAGES=1 cargo test -p larder-cli reference_pages";

    fn check_page(name: &str, page: &str) {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        if std::env::var_os("LARDER_WRITE_PAGES").is_some() {
            std::fs::write(&path, page).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        let line = written.lines().zip(page.lines()).find(|(a, b)| a != b);
        assert!(
            written == page,
            "docs/{name} is not what the list yields, from {line:?} on: {REMAKE}"
        );
    }

    #[test]
    fn the_reference_pages_are_what_the_lists_yield() {
        let all = Cli::command();
        let kv = all.find_subcommand("kv").unwrap();
        let serve = all.find_subcommand("block").unwrap().find_subcommand("serve").unwrap();
        let page = larder_settings::page::<larder_kv::config::Settings>(kv, REMAKE);
        check_page("kv-settings.md", &page);
        check_page("block-settings.md", &larder_settings::page::<block::Settings>(serve, REMAKE));
    }

    /// Words that say what to write instead.
    const REMEDIES: [&str; 8] = [
        "write",
        "choose",
        "known are",
        "can be written",
        "at most",
        "at least",
        "between",
        "must be",
    ];

    /// Every value of every command that its parser refuses is refused in one sentence with flag, value and remedy.
    #[test]
    fn every_value_parser_says_flag_value_and_remedy() {
        fn check(command: &clap::Command, typed: &str, seen: &mut usize) {
            let alone = command.clone().no_binary_name(true).subcommand_required(false);
            let alone = alone.mut_args(|arg| arg.required(false));
            for arg in command.get_arguments() {
                let takes = arg.get_action().takes_values();
                let Some(long) = arg.get_long().filter(|_| takes) else { continue };
                for value in ["x", "0", "-1", "", "99999999999999999999"] {
                    let words = [format!("--{long}={value}")];
                    let Err(error) = alone.clone().try_get_matches_from(&words) else { continue };
                    let kinds = [
                        clap::error::ErrorKind::ValueValidation,
                        clap::error::ErrorKind::InvalidValue,
                    ];
                    if !kinds.contains(&error.kind()) {
                        continue;
                    }
                    *seen += 1;
                    let said = larder_settings::refusal(command, typed, &error);
                    let begins = format!("--{long} '{value}'");
                    assert!(said.starts_with(&begins), "{typed} {words:?}: {said}");
                    assert!(!said.contains('\n'), "{typed} {words:?}: {said}");
                    let remedy = REMEDIES.iter().any(|word| said.contains(word));
                    let raw = ["invalid digit", "float literal", "empty string", "is not in"];
                    assert!(remedy && !raw.iter().any(|r| said.contains(r)), "{typed}: {said}");
                }
            }
            for command in command.get_subcommands() {
                check(command, &format!("{typed} {}", command.get_name()), seen);
            }
        }
        let mut all = Cli::command();
        all.build();
        let mut seen = 0;
        check(&all, "larder", &mut seen);
        assert!(seen > 400, "{seen}");
    }

    #[test]
    fn a_refusal_names_the_command_that_was_typed() {
        let words: Vec<OsString> =
            ["larder", "block", "serve", "-t", "0"].map(OsString::from).to_vec();
        let (command, typed) = asked_for(&words);
        assert_eq!((command.get_name(), typed.as_str()), ("serve", "larder block serve"));
    }

    /// An example that is folded by a terminal cannot be copied out of it.
    #[test]
    fn examples_fit_eighty_columns() {
        fn check(command: &clap::Command, seen: &mut usize) {
            for line in
                command.get_after_help().map(ToString::to_string).iter().flat_map(|t| t.lines())
            {
                // What is no command is prose, or a remark, and folds.
                let copied = line.starts_with("  ") && !line.trim_start().starts_with('#');
                assert!(!copied || line.chars().count() <= 80, "{}: '{line}'", command.get_name());
                *seen += 1;
            }
            command.get_subcommands().for_each(|c| check(c, seen));
        }
        let mut seen = 0;
        check(&Cli::command(), &mut seen);
        assert!(seen > 50, "{seen}");
    }
}
