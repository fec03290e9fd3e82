//! The commands that ask a daemon.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use larder_block::control::client;
use larder_block::control::protocol::Request;
use serde_json::Value;

/// Whatever is waited for has come by then, on the slowest machine.
const LONG: Duration = Duration::from_secs(120);

/// What a command prints, and its exit code.
pub(crate) fn ask(dir: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .arg("block")
        .args(arguments)
        .arg("--state-dir")
        .arg(dir.join("state"))
        .args(["--answer-within", "120"])
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

pub(crate) fn json(dir: &Path, arguments: &[&str]) -> Value {
    let mut all = arguments.to_vec();
    all.push("--json");
    let (code, out, err) = ask(dir, &all);
    assert_eq!(code, 0, "{arguments:?}: {err}");
    serde_json::from_str(&out).unwrap()
}

/// The status, as soon as it is as wanted.
pub(crate) fn status_when(dir: &Path, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + LONG;
    loop {
        let status = json(dir, &["status"]);
        if wanted(&status) {
            return status;
        }
        assert!(Instant::now() < end, "not {what}: {status:#}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until the daemon has nothing to do behind its replies: what was to be filled is filled, or was dropped.
pub(crate) fn settle(dir: &Path) {
    let request = Request::Settle { seconds: Some(LONG.as_secs()) };
    client::ask(&dir.join("state/block.sock"), &request, &mut |_| {}).unwrap();
}

pub(crate) fn counter(status: &Value, name: &str) -> u64 {
    status["counters"][name].as_u64().unwrap()
}

/// No line is longer than a terminal of 60 columns, but for a word that is.
pub(crate) fn fits_a_terminal(dir: &Path, arguments: &[&str], words: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.arg("block").args(arguments).arg("--state-dir").arg(dir.join("state"));
    command.args(["--answer-within", "120"]);
    let output = command.env("COLUMNS", "60").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    for line in text.lines() {
        let alone = line.split_whitespace().count() <= 2;
        assert!(line.chars().count() <= 60 || alone, "{arguments:?}: '{line}'");
    }
    for word in words.iter().flat_map(|w| w.split(' ')) {
        assert!(text.contains(word), "{arguments:?}: no '{word}' in {text}");
    }
}
