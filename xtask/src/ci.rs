//! `cargo xtask ci`: every check in order, each under a heading with the time it took.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::{edges, tidy, verdict};

/// Features that only tests have: the planted faults of the engine's checker.
const FEATURES: &str = "larder-engine/planted";

pub(crate) fn run(root: &Path, tests: bool) -> Result<(), String> {
    step("rustfmt", || cargo(root, &["fmt", "--all", "--check"]))?;
    step("clippy", || {
        cargo(
            root,
            &[
                "clippy",
                "--workspace",
                "--all-targets",
                "--features",
                FEATURES,
                "--locked",
                "--",
                "-D",
                "warnings",
            ],
        )
    })?;
    // What users build: no part of it may need what only tests have.
    step("programs", || cargo(root, &["check", "--workspace", "--bins", "--locked"]))?;
    step("fuzz targets", || fuzz(root))?;
    step("edges", || edges::check(root).and_then(|found| verdict("edges", &found)))?;
    step("tidy", || tidy::check(root).and_then(|found| verdict("tidy", &found)))?;
    step("cargo-deny", || deny(root))?;
    if tests {
        step("tests", || {
            cargo(root, &["test", "--workspace", "--features", FEATURES, "--locked"])
        })?;
    }
    Ok(())
}

/// The fuzz targets are a workspace of their own, so that nothing else needs a C++ compiler: this sees that they still fit what
/// they call. They are checked with the dependencies of the product, and what libFuzzer brings on top.
fn fuzz(root: &Path) -> Result<(), String> {
    let (from, to) = (root.join("Cargo.lock"), root.join("fuzz/Cargo.lock"));
    std::fs::copy(&from, &to).map_err(|e| format!("cannot write {}: {e}", to.display()))?;
    cargo(root, &["check", "--manifest-path", "fuzz/Cargo.toml", "--bins"])
}

/// Licences, sources and duplicates. Advisories are not among them: their data base is fetched from the net on every
/// run, and a new advisory would turn an old commit red; `cargo deny check advisories` is for the maintainer's hand.
fn deny(root: &Path) -> Result<(), String> {
    let installed =
        Command::new("cargo-deny").arg("--version").output().is_ok_and(|o| o.status.success());
    if installed {
        return cargo(
            root,
            &["deny", "--workspace", "--locked", "check", "bans", "licenses", "sources"],
        );
    }
    if std::env::var_os("CI").is_some() {
        return Err(
            "cargo-deny is not installed, and CI skips nothing: cargo install cargo-deny --locked"
                .to_owned(),
        );
    }
    println!("not run: cargo-deny is not installed (cargo install cargo-deny --locked)");
    Ok(())
}

fn step(name: &str, run: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    println!("== {name}");
    let begin = Instant::now();
    let outcome = run();
    println!(
        "== {name}: {} in {:.1} s",
        if outcome.is_ok() { "ok" } else { "FAILED" },
        begin.elapsed().as_secs_f64()
    );
    outcome
}

fn cargo(root: &Path, arguments: &[&str]) -> Result<(), String> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(program)
        .args(arguments)
        .current_dir(root)
        .status()
        .map_err(|e| format!("cannot start cargo {}: {e}", arguments.join(" ")))?;
    if status.success() { Ok(()) } else { Err(format!("cargo {}: {status}", arguments.join(" "))) }
}
