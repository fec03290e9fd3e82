//! Records of a daemon's runs, decided again.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

/// What `larder sim replay --json` says of a record, and how it ended.
pub(crate) fn replay(file: &Path) -> (Value, Option<i32>) {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "replay", file.to_str().unwrap(), "--json"])
        .output()
        .unwrap();
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    let report = serde_json::from_slice(&output.stdout);
    (report.unwrap_or_else(|e| panic!("{e}: {problem}")), output.status.code())
}

/// Waits until the file of a daemon that runs has what is looked for: tapes are handed on now and then.
pub(crate) fn until_recorded(record: &Path, enough: impl Fn(&Value) -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    let so_far = record.with_extension("so-far");
    loop {
        std::fs::copy(record, &so_far).unwrap();
        let report = replay(&so_far).0;
        if enough(&report) {
            return;
        }
        assert!(Instant::now() < end, "{report}");
        std::thread::sleep(Duration::from_millis(200));
    }
}
