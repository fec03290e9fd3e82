//! Volumes that are attached while what they need does not answer, or that are refused: when the command ends, and what is left then.

use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{has, prepare};
use crate::daemon::Daemon;
use crate::daemon::ask::{ask, json};

#[test]
fn an_attach_whose_store_does_not_open_ends_in_its_time_and_when_its_command_is_broken_off() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    // It takes up connections, and says nothing.
    let silent = dir.join("silent");
    let _listener = UnixListener::bind(&silent).unwrap();
    let volume = format!("late=nbd+unix:///?socket={}", silent.display());
    let begun = Instant::now();
    let (code, _, error) = ask(dir, &["attach", &volume, "--timeout", "2"]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["volume 'late' is not attached", "its store is not open", "2 s"]);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    let attach = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "attach", &volume, "--state-dir"])
        .arg(dir.join("state"))
        .stderr(Stdio::null())
        .spawn();
    let mut attach = attach.unwrap();
    std::thread::sleep(Duration::from_secs(1));
    attach.kill().unwrap();
    attach.wait().unwrap();
    let begun = Instant::now();
    let more = dir.join("more");
    std::fs::File::create(&more).unwrap().set_len(1 << 20).unwrap();
    let (code, _, error) = ask(dir, &["attach", &format!("late=file:{}", more.display())]);
    assert_eq!(code, 0, "{error}");
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    daemon.stop();
}

#[test]
fn whoever_hears_that_an_attach_was_refused_may_have_its_store() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    let more = dir.join("more");
    std::fs::File::create(&more).unwrap().set_len(1 << 20).unwrap();
    let volume = format!("more=file:{}", more.display());
    let nowhere = dir.join("nowhere/marker").display().to_string();
    for _ in 0..10 {
        let (code, _, error) =
            ask(dir, &["attach", &volume, "--write", "back:ordered", "--marker", &nowhere]);
        assert_ne!(code, 0, "{error}");
        has(&error, &["nowhere"]);
        json(dir, &["attach", &volume]);
        json(dir, &["detach", "more"]);
    }
    daemon.stop();
}
