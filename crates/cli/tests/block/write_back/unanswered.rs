//! Journals and stores on servers that take connections and do not answer: operators, other volumes and a stop are not held by them.

use std::io::Read;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_block::op::{FailureKind, Op};
use tempfile::TempDir;

use super::{has, prepare};
use crate::daemon::ask::{ask, json, status_when};
use crate::daemon::{Daemon, one, read, session_of, write};
use crate::stores::faulty::Store;

/// A journal has no less.
const JOURNAL: u64 = 128 << 20;
/// What takes at most 3 s is over by then, on a slow machine too. A server's own time limits are longer.
const IN_TIME: Duration = Duration::from_secs(8);
/// A stop has ended by then.
const STOPPED: Duration = Duration::from_secs(12);

/// A socket that takes connections, reads what comes, and says nothing.
fn silent(dir: &Path) -> String {
    let path = dir.join("silent");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || while stream.read(&mut [0; 512]).is_ok_and(|n| n > 0) {});
        }
    });
    format!("nbd+unix:///?socket={}", path.display())
}

fn image(dir: &Path, name: &str) -> String {
    let path = dir.join(name);
    std::fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
    format!("{name}=file:{}", path.display())
}

fn is_attached(dir: &Path, name: &str) -> bool {
    let status = json(dir, &["status"]);
    status["volumes"].as_array().unwrap().iter().any(|v| v["name"] == name)
}

/// Ends on SIGTERM, in its time.
fn stops(mut daemon: Daemon) {
    let begun = Instant::now();
    daemon.signal(rustix::process::Signal::TERM);
    let status = daemon.child.wait().unwrap();
    assert!(status.success(), "{status}");
    assert!(begun.elapsed() < STOPPED, "{:?}", begun.elapsed());
}

/// Ends an attach by its time and says what it waited for; others go on meanwhile, and nothing of it is left.
fn an_attach_ends(dir: &Path, journal: &str) {
    let late = image(dir, "late");
    let begun = Instant::now();
    let args =
        ["attach", &late, "--write", "back:journaled", "--journal", journal, "--timeout", "3"];
    std::thread::scope(|scope| {
        let attach = scope.spawn(|| ask(dir, &args));
        // Others' commands go on.
        json(dir, &["attach", &image(dir, "other")]);
        json(dir, &["detach", "other"]);
        assert!(!attach.is_finished(), "{:?}", attach.join());
        let (code, _, error) = attach.join().unwrap();
        assert!(begun.elapsed() < IN_TIME, "{:?}: {error}", begun.elapsed());
        assert_eq!(code, 1, "{error}");
        has(&error, &["volume 'late' is not attached", "journal '", journal, "after 3 s"]);
    });
    assert!(!is_attached(dir, "late"));
    // Its store is free.
    json(dir, &["attach", &late]);
    json(dir, &["detach", "late"]);
}

#[test]
fn an_attach_whose_journal_takes_connections_and_says_nothing_ends_in_its_time() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    an_attach_ends(dir, &silent(dir));
    stops(daemon);
}

#[test]
fn an_attach_whose_journal_hangs_behind_its_handshake_ends_in_its_time_and_is_not_attached_later() {
    let (dir, away) = (prepare(), TempDir::new().unwrap());
    let dir = dir.path();
    let store = Store::start(away.path(), JOURNAL, FailureKind::Failed);
    let daemon = Daemon::start(dir, &[]);
    store.plan.hang.store(true, Ordering::SeqCst);
    an_attach_ends(dir, &store.uri());
    store.plan.hang.store(false, Ordering::SeqCst);
    std::thread::sleep(Duration::from_secs(2));
    assert!(!is_attached(dir, "late"), "it was attached though its attach was broken off");
    let late = format!("late=file:{}", dir.join("late").display());
    json(dir, &["attach", &late, "--write", "back:journaled", "--journal", &store.uri()]);
    json(dir, &["detach", "late"]);
    daemon.stop();
}

#[test]
fn a_daemon_that_attaches_a_volume_whose_journal_hangs_stops_in_its_time() {
    let (dir, away) = (prepare(), TempDir::new().unwrap());
    let dir = dir.path();
    let store = Store::start(away.path(), JOURNAL, FailureKind::Failed);
    let daemon = Daemon::start(dir, &[]);
    store.plan.hang.store(true, Ordering::SeqCst);
    let attach = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "attach", &image(dir, "late"), "--write", "back:journaled"])
        .args(["--journal", &store.uri(), "--state-dir"])
        .arg(dir.join("state"))
        .stderr(Stdio::null())
        .spawn();
    let mut attach = attach.unwrap();
    std::thread::sleep(Duration::from_secs(1));
    stops(daemon);
    attach.wait().unwrap();
    store.plan.hang.store(false, Ordering::SeqCst);
}

/// A journal that hangs at a start, whose volume was written.
fn starts(dir: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.args(["block", "serve", "--cache"]).arg(dir.join("cache"));
    command.arg("--volume").arg(format!("disk=file:{}", dir.join("disk").display()));
    command.arg("--volume").arg(format!("other=file:{}", dir.join("other").display()));
    command.arg("--listen").arg(format!("unix:{}", dir.join("socket").display()));
    command.arg("--state-dir").arg(dir.join("state"));
    command.args(["--write", "disk=back:journaled"]).args(more);
    command
}

#[test]
fn a_start_whose_journal_hangs_keeps_no_other_volume_and_ends_when_it_is_stopped() {
    let (dir, away) = (prepare(), TempDir::new().unwrap());
    let dir = dir.path();
    image(dir, "other");
    let store = Store::start(away.path(), JOURNAL, FailureKind::Failed);
    let journal = format!("disk={}", store.uri());
    let with = ["--journal", &journal];
    Daemon::of(starts(dir, &with)).stop();
    store.plan.hang.store(true, Ordering::SeqCst);
    // Stopped while it starts.
    let mut starting = starts(dir, &with).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert!(starting.try_wait().unwrap().is_none(), "it does not wait");
    let begun = Instant::now();
    let pid = rustix::process::Pid::from_child(&starting);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = starting.wait().unwrap();
    assert!(status.success() && begun.elapsed() < STOPPED, "{status} {:?}", begun.elapsed());
    // Without the word it ends, and says which.
    let begun = Instant::now();
    let failed = starts(dir, &with).output().unwrap();
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert_eq!(failed.status.code(), Some(1), "{said}");
    has(
        &said,
        &[
            "volume 'disk'",
            "journal '",
            &store.uri(),
            "has not answered",
            "--on-backing-failure wait",
        ],
    );
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    let begun = Instant::now();
    let waits = Daemon::of(starts(dir, &[&with[..], &["--on-backing-failure", "wait"]].concat()));
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    let state = |status: &serde_json::Value, name: &str| {
        let volumes = status["volumes"].as_array().unwrap();
        volumes.iter().find(|v| v["name"] == name).map(|v| v["store"]["state"].clone())
    };
    let status = json(dir, &["status"]);
    assert_eq!(state(&status, "disk").unwrap(), "waiting", "{status:#}");
    assert_eq!(state(&status, "other").unwrap(), "ok", "{status:#}");
    stops(waits);
    let waits = Daemon::of(starts(dir, &[&with[..], &["--on-backing-failure", "wait"]].concat()));
    store.plan.hang.store(false, Ordering::SeqCst);
    status_when(dir, "served", |status| state(status, "disk").is_some_and(|state| state == "ok"));
    waits.stop();
}

#[test]
fn a_start_whose_store_does_not_open_ends_when_it_is_stopped() {
    let dir = prepare();
    let dir = dir.path();
    image(dir, "other");
    let late = format!("late={}", silent(dir));
    let mut starting = starts(dir, &["--volume", &late]).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let begun = Instant::now();
    let pid = rustix::process::Pid::from_child(&starting);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let status = starting.wait().unwrap();
    assert!(
        status.success() && begun.elapsed() < Duration::from_secs(6),
        "{status} {:?}",
        begun.elapsed()
    );
}

/// Its journal is being written, and what it has under way never ends.
#[test]
fn a_daemon_whose_volume_has_a_journal_that_hangs_stops_in_its_time() {
    let (dir, away) = (prepare(), TempDir::new().unwrap());
    let dir = dir.path();
    image(dir, "other");
    let store = Store::start(away.path(), JOURNAL, FailureKind::Failed);
    let journal = format!("disk={}", store.uri());
    let daemon = Daemon::of(starts(dir, &["--journal", &journal]));
    store.plan.hang.store(true, Ordering::SeqCst);
    let mut client = session_of(dir, "disk");
    write(&mut *client, 0, 4096, 1);
    one(&mut *client, Op::Flush);
    drop(client);
    let end = Instant::now() + Duration::from_secs(60);
    while store.plan.under_way.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < end, "its journal is not written");
        std::thread::sleep(Duration::from_millis(20));
    }
    stops(daemon);
    store.plan.hang.store(false, Ordering::SeqCst);
    let daemon = Daemon::of(starts(dir, &["--journal", &journal]));
    assert_eq!(read(&mut *session_of(dir, "disk"), 0, 4096), [1; 4096]);
    daemon.stop();
}
