//! Developer chores, started as `cargo xtask NAME`: the checks that CI runs, runnable one by one.

#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    reason = "a developer's tool that times its steps; no product code"
)]

mod ci;
mod circles;
mod edges;
mod modules;
mod ratchet;
mod tidy;
mod words;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const HELP: &str = "\
usage: cargo xtask COMMAND

  edges        crates import only downward; none below the runtime sets aside the ban on clocks; no import circle between
               folders; no new use of the engine's machines by a host (xtask/ratchets lists the old)
  edges --shrink  takes off that list what has gone
  tidy         long files, notes of unfinished work, words that have no place in the repository
  ci           rustfmt, clippy, fuzz targets, edges, tidy, cargo-deny where installed, all tests
  ci --checks  the same without the tests
";

/// What a check found wrong, one line each; empty when all is well.
type Findings = Vec<String>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = root();
    let outcome = match arguments.as_slice() {
        ["edges"] => edges::check(&root).and_then(|found| verdict("edges", &found)),
        ["edges", "--shrink"] => edges::shrink(&root),
        ["tidy"] => tidy::check(&root).and_then(|found| verdict("tidy", &found)),
        ["ci"] => ci::run(&root, true),
        ["ci", "--checks"] => ci::run(&root, false),
        ["help" | "--help" | "-h"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's folder: this crate's parent.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().map_or_else(|| here.to_path_buf(), Path::to_path_buf)
}

fn verdict(check: &str, found: &Findings) -> Result<(), String> {
    if found.is_empty() {
        println!("{check}: nothing found");
        return Ok(());
    }
    for finding in found {
        eprintln!("{finding}");
    }
    Err(format!("{check}: {} found", found.len()))
}
