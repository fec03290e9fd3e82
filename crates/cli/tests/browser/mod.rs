//! Chromium without a window: `chromium`, or the program that LARDER_CHROMIUM names. Without it tests that
//! need it are ignored.

#[allow(dead_code, reason = "the tests of reports have no live page")]
pub(crate) mod stage;

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The browser's program.
pub(crate) fn chromium() -> String {
    std::env::var("LARDER_CHROMIUM").unwrap_or_else(|_| "chromium".into())
}

/// Runs the browser on the page and returns what it prints.
pub(crate) fn browse(program: &str, page: &str, more: &[&str]) -> String {
    let profile = tempfile::tempdir().unwrap();
    let mut child = Command::new(program)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        .args(["--disable-background-networking", "--no-first-run", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(["--virtual-time-budget=4000", "--timeout=20000"])
        .args(more)
        .arg(page)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        out.read_to_string(&mut text).map(|_| text)
    });
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(120) {
            child.kill().ok();
            child.wait().ok();
            panic!("the browser did not end");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    reader.join().unwrap().unwrap()
}
