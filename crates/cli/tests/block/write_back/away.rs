//! Stores that stop, come back, and stay away: what commands say of a volume that writes back meanwhile, and how long they wait.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::{format, has, prepare};
use crate::daemon::ask::{ask, json, status_when};
use crate::daemon::{Daemon, larder, one, read, session, write};
use larder_block::op::Op;

const HELD: &str = "back:ordered,destage=none";

/// nbdkit over a file.
struct Kit {
    dir: PathBuf,
    child: Child,
}

impl Kit {
    fn start(dir: &Path) -> Kit {
        let (socket, file) = (dir.join("kit"), dir.join("disk"));
        let mut kit = Command::new("nbdkit");
        kit.args(["-f", "--exit-with-parent", "-U"]).arg(&socket).arg("file").arg(&file);
        let kit = kit.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let kit = Kit { dir: dir.to_owned(), child: kit.spawn().unwrap() };
        let end = Instant::now() + Duration::from_secs(60);
        while !socket.exists() {
            assert!(Instant::now() < end, "nbdkit does not come up");
            std::thread::sleep(Duration::from_millis(5));
        }
        kit
    }

    /// Asked to stop, it ends when its connections have, which `meanwhile` may bring about.
    fn stop(mut self, mut meanwhile: impl FnMut()) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while self.child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "it waits for its connections to end");
            meanwhile();
            std::thread::sleep(Duration::from_millis(10));
        }
        std::fs::remove_file(self.dir.join("kit")).ok();
    }

    /// It does not answer any more, until it is [freed](Kit::goes_on).
    fn hangs(&self) {
        kill_process(Pid::from_child(&self.child), Signal::STOP).unwrap();
    }

    fn goes_on(&self) {
        kill_process(Pid::from_child(&self.child), Signal::CONT).unwrap();
    }

    /// It is gone at once.
    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        std::fs::remove_file(self.dir.join("kit")).ok();
    }
}

impl Drop for Kit {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(dir: &Path, more: &[&str]) -> Daemon {
    let mut larder = Command::new(env!("CARGO_BIN_EXE_larder"));
    larder.args(["block", "serve", "--cache"]).arg(dir.join("cache"));
    larder.arg("--volume").arg(format!("disk=nbd+unix:///?socket={}", dir.join("kit").display()));
    larder.arg("--listen").arg(format!("unix:{}", dir.join("socket").display()));
    larder.arg("--state-dir").arg(dir.join("state")).args(more);
    Daemon::of(larder)
}

fn marker(dir: &Path) -> String {
    format!("disk={}", dir.join("marker").display())
}

/// A store that is away, of a volume with 1 MiB that is dirty.
fn away() -> (TempDir, Daemon) {
    let dir = prepare();
    let kit = Kit::start(dir.path());
    let daemon = serve(dir.path(), &["--write", HELD, "--marker", &marker(dir.path())]);
    let mut s = session(dir.path());
    write(&mut *s, 0, 1 << 20, 7);
    drop(s);
    kit.kill();
    // (It is looked for where it is not asked.)
    status_when(dir.path(), "its store is lost", |s| s["volumes"][0]["store"]["state"] == "lost");
    (dir, daemon)
}

#[test]
#[cfg_attr(without = "nbdkit", ignore = "needs nbdkit (Debian: nbdkit)")]
fn a_server_that_is_asked_to_stop_ends_though_nobody_asks_its_volume_anything() {
    for (mode, asked) in [("hdd-ssd", true), ("hdd-ssd", false), ("back:ordered", true)] {
        let dir = prepare();
        let dir = dir.path();
        let mut kit = Kit::start(dir);
        let place = marker(dir);
        let back = ["--write", mode, "--marker", &place];
        let daemon = serve(dir, if mode == "hdd-ssd" { &back[..2] } else { &back });
        let mut s = asked.then(|| session(dir));
        for round in 1..3u8 {
            if let Some(s) = &mut s {
                write(&mut **s, 0, 64 << 10, round);
                one(&mut **s, Op::Flush);
            }
            kit.stop(|| {});
            kit = Kit::start(dir);
        }
        let mut s = s.unwrap_or_else(|| session(dir));
        write(&mut *s, 0, 64 << 10, 9);
        one(&mut *s, Op::Flush);
        assert!(read(&mut *s, 0, 64 << 10).iter().all(|&b| b == 9));
        drop(s);
        daemon.stop();
    }
}

#[test]
#[cfg_attr(without = "nbdkit", ignore = "needs nbdkit (Debian: nbdkit)")]
fn a_server_that_is_asked_to_stop_ends_and_the_one_that_follows_is_used() {
    for mode in ["hdd-ssd", "back:ordered"] {
        let dir = prepare();
        let dir = dir.path();
        let mut kit = Kit::start(dir);
        let place = marker(dir);
        let back = ["--write", mode, "--marker", &place];
        let daemon = serve(dir, if mode == "hdd-ssd" { &back[..2] } else { &back });
        let mut s = session(dir);
        for round in 1..4u8 {
            write(&mut *s, 0, 64 << 10, round);
            one(&mut *s, Op::Flush);
            let (mut asks, mut at) = (true, (8 + u64::from(round)) << 20);
            kit.stop(|| {
                // Something is asked, and not waited for: once more if it had not begun to stop yet.
                asks |= s.pop().is_some();
                if std::mem::take(&mut asks) {
                    let buf = larder_runtime::AlignedBuf::zeroed(4096);
                    s.submit(99, Op::Read { offset: at, buf });
                    at += 64 << 10;
                }
                s.flush(Instant::now());
                s.turn(Instant::now());
            });
            let is_lost = |s: &serde_json::Value| s["volumes"][0]["store"]["state"] == "lost";
            let status = status_when(dir, "its store is lost", is_lost);
            let store = &status["volumes"][0]["store"];
            has(store["trouble"].as_str().unwrap(), &["nbd+unix", "is not reached"]);
            kit = Kit::start(dir);
            let end = Instant::now() + Duration::from_secs(60);
            let done = loop {
                s.turn(Instant::now());
                if let Some(done) = s.pop() {
                    break done;
                }
                assert!(Instant::now() < end, "{mode}: no answer");
                std::thread::sleep(Duration::from_millis(1));
            };
            assert!(done.outcome.is_ok(), "{mode}: {:?}", done.outcome);
            assert_eq!(read(&mut *s, 0, 4096)[0], round);
        }
        write(&mut *s, 0, 64 << 10, 9);
        one(&mut *s, Op::Flush);
        drop(s);
        let (code, _, error) = ask(dir, &["detach", "disk", "--disconnect"]);
        assert_eq!(code, 0, "{error}");
        daemon.stop();
        drop(kit);
        assert_eq!(std::fs::read(dir.join("disk")).unwrap()[..64 << 10], [9; 64 << 10]);
    }
}

#[test]
#[cfg_attr(without = "nbdkit", ignore = "needs nbdkit (Debian: nbdkit)")]
fn a_volume_whose_store_is_away_is_put_aside_at_once_with_what_is_dirty() {
    for destage in [false, true] {
        let (dir, daemon) = away();
        let dir = dir.path();
        if destage {
            // Something is under way to the store.
            let (code, ..) = ask(dir, &["flush", "disk", "--timeout", "1"]);
            assert_eq!(code, 1);
        }
        let begun = Instant::now();
        let (code, said, error) = ask(dir, &["detach", "disk", "--keep-dirty"]);
        assert_eq!(code, 0, "{error}");
        assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
        has(&said, &["disk: detached", "1 MiB that its store lacks"]);
        daemon.stop();
        let kit = Kit::start(dir);
        let daemon = serve(dir, &["--write", HELD, "--marker", &marker(dir)]);
        let mut s = session(dir);
        assert!(read(&mut *s, 0, 1 << 20).iter().all(|b| *b == 7));
        drop(s);
        let (code, _, error) = ask(dir, &["detach", "disk"]);
        assert_eq!(code, 0, "{error}");
        daemon.stop();
        drop(kit);
        assert_eq!(std::fs::read(dir.join("disk")).unwrap()[..1 << 20], [7; 1 << 20]);
    }
}

/// Writes wait, and nothing makes room for them.
#[test]
#[cfg_attr(without = "nbdkit", ignore = "needs nbdkit (Debian: nbdkit)")]
fn a_volume_whose_writes_wait_at_its_bound_is_marked_and_put_aside_though_its_store_is_away() {
    let dir = prepare();
    let dir = dir.path();
    let place = marker(dir);
    let back = ["--write", "back:ordered", "--dirty-max", "disk=1m", "--marker", &place];
    let kit = Kit::start(dir);
    let daemon = serve(dir, &back);
    let mut s = session(dir);
    write(&mut *s, 0, 64 << 10, 7);
    kit.kill();
    for n in 1..64u64 {
        let mut buf = larder_runtime::AlignedBuf::zeroed(64 << 10);
        buf.fill(8);
        let data = larder_runtime::Payload::new(buf);
        s.submit(n, Op::Write { offset: n << 16, data, fua: false });
    }
    let mut waits = || {
        s.flush(Instant::now());
        s.turn(Instant::now());
    };
    let end = Instant::now() + Duration::from_secs(60);
    let back_of = || json(dir, &["status"])["volumes"][0]["write_back"].clone();
    while back_of()["held_bytes"].as_u64().unwrap() < 5 << 18 {
        assert!(Instant::now() < end, "{:#}", back_of());
        waits();
    }
    let (code, said, error) = ask(dir, &["mark", "disk", "here"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["'here' is durable"]);
    let (code, said, error) = ask(dir, &["detach", "disk", "--keep-dirty", "--disconnect"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["disk: detached", "that its store lacks"]);
    drop(s);
    daemon.stop();
    let kit = Kit::start(dir);
    let daemon = serve(dir, &back);
    let mut s = session(dir);
    assert!(read(&mut *s, 0, 64 << 10).iter().all(|b| *b == 7));
    drop(s);
    let (code, _, error) = ask(dir, &["detach", "disk"]);
    assert_eq!(code, 0, "{error}");
    daemon.stop();
    drop(kit);
    assert_eq!(std::fs::read(dir.join("disk")).unwrap()[..64 << 10], [7; 64 << 10]);
}

/// A server does not answer that has the store, or the marker. Nothing but a mark can be done then.
#[test]
#[cfg_attr(without = "nbdkit", ignore = "needs nbdkit (Debian: nbdkit)")]
fn what_waits_for_a_server_that_does_not_answer_ends_in_its_time_and_with_whoever_asked_for_it() {
    for of_marker in [false, true] {
        let (dir, other) = (prepare(), TempDir::new().unwrap());
        std::fs::File::create(other.path().join("disk")).unwrap().set_len(1 << 20).unwrap();
        let (kit, marks) = (Kit::start(dir.path()), Kit::start(other.path()));
        let place = format!("disk=nbd+unix:///?socket={}", other.path().join("kit").display());
        let dir = dir.path();
        let daemon = serve(dir, &["--write", HELD, "--marker", &place]);
        let mut s = session(dir);
        write(&mut *s, 0, 1 << 20, 7);
        drop(s);
        let hangs = if of_marker { &marks } else { &kit };
        hangs.hangs();
        let commands = [
            &["detach", "disk"][..],
            &["detach", "disk", "--disconnect"],
            &["flush", "disk"],
            &["write", "disk", "through"],
            &["detach", "disk", "--keep-dirty"],
        ];
        // (Of a store that does not answer it may be put aside as long as nothing is under way there, which is for chance here.)
        for command in &commands[..if of_marker { 5 } else { 4 }] {
            let begun = Instant::now();
            let (code, said, error) = ask(dir, &[*command, &["--timeout", "2"]].concat());
            let took = begun.elapsed();
            assert_eq!(code, 1, "{command:?}: {said}{error}");
            assert!(took < Duration::from_secs(9), "{command:?}: {took:?}");
        }
        let (code, _, error) = ask(dir, &["mark", "disk", "here", "--timeout", "20"]);
        assert_eq!(code, 0, "{error}");
        // Who has asked goes. (Of a place that is silent by now a detach hears at once.)
        if !of_marker {
            let mut detach = Command::new(env!("CARGO_BIN_EXE_larder"));
            detach.args(["block", "detach", "disk", "--control"]).arg(dir.join("state/block.sock"));
            let mut detach = detach.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let leaves =
                |status: &serde_json::Value| status["alarms"].to_string().contains("detached");
            status_when(dir, "it is being detached", leaves);
            detach.kill().unwrap();
            detach.wait().unwrap();
            let begun = Instant::now();
            status_when(dir, "it is given up", |status| !leaves(status));
            assert!(begun.elapsed() < Duration::from_secs(9), "{:?}", begun.elapsed());
        }
        hangs.goes_on();
        status_when(dir, "its server answers", |status| {
            !status["alarms"].to_string().contains("has not answered")
        });
        let (code, _, error) = ask(dir, &["detach", "disk"]);
        assert_eq!(code, 0, "{error}");
        daemon.stop();
        drop((kit, marks));
        assert_eq!(std::fs::read(dir.join("disk")).unwrap()[..1 << 20], [7; 1 << 20]);
    }
}

#[test]
#[cfg_attr(without = "nbdkit", ignore = "needs nbdkit (Debian: nbdkit)")]
fn a_change_over_and_a_flush_name_the_store_that_is_away_and_end_in_time() {
    let (dir, daemon) = away();
    let dir = dir.path();
    for command in [&["write", "disk", "through"][..], &["flush", "disk"], &["flush"]] {
        let begun = Instant::now();
        let (code, said, error) = ask(dir, &[command, &["--timeout", "3"]].concat());
        assert_eq!(code, 1, "{command:?}: {said}{error}");
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        let said = format!("{said}{error}");
        has(&said, &["disk", "nbd+unix", "is not reached"]);
    }
    let status = json(dir, &["status"]);
    let v = &status["volumes"][0];
    assert_eq!(v["write_back"]["dirty_bytes"], 1 << 20, "as it was: {v:#}");
    let (_, text, _) = ask(dir, &["status"]);
    has(&text, &["store lost", "writes back"]);
    assert!(!text.contains("hdd-ssd"), "{text}");
    let kit = Kit::start(dir);
    let (code, _, error) = ask(dir, &["write", "disk", "through"]);
    assert_eq!(code, 0, "{error}");
    let (_, text, _) = ask(dir, &["status"]);
    has(&text, &["hdd-ssd"]);
    daemon.stop();
    drop(kit);
    assert_eq!(std::fs::read(dir.join("disk")).unwrap()[..1 << 20], [7; 1 << 20]);
}

#[test]
fn a_mark_is_one_of_the_time_since_the_volume_began_to_write_back() {
    for order in ["back:ordered", "back:journaled"] {
        let dir = prepare();
        let dir = dir.path();
        let stored = || {
            let status = json(dir, &["status"]);
            status["volumes"][0]["write_back"]["stored_mark"].clone()
        };
        let recovered = || {
            let uri = format!("file:{}", dir.join("disk").display());
            let out = Command::new(env!("CARGO_BIN_EXE_larder"))
                .args(["block", "recover", &uri])
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&out.stdout).into_owned();
            assert!(out.status.success(), "{said}");
            said.contains("'nightly'")
        };
        let daemon = Daemon::start(dir, &["--write", order]);
        let mut s = session(dir);
        write(&mut *s, 0, 4096, 1);
        drop(s);
        json(dir, &["mark", "disk", "nightly"]);
        json(dir, &["flush", "disk"]);
        assert_eq!(stored(), "nightly", "{order}");
        json(dir, &["write", "disk", "through"]);
        json(dir, &["write", "disk", order]);
        assert!(stored().is_null(), "{order}");
        daemon.kill();
        // Its cache is lost.
        std::fs::remove_file(dir.join("cache")).unwrap();
        assert!(!recovered(), "{order}: recover knows what status does not");
        // Marked once more, and put aside for another cache.
        format(&dir.join("cache"));
        let daemon = Daemon::start(dir, &["--write", order]);
        json(dir, &["mark", "disk", "nightly"]);
        json(dir, &["flush", "disk"]);
        assert_eq!(stored(), "nightly", "{order}");
        json(dir, &["detach", "disk"]);
        daemon.stop();
        std::fs::remove_file(dir.join("cache")).unwrap();
        format(&dir.join("cache"));
        let daemon = Daemon::start(dir, &["--write", order]);
        assert!(stored().is_null(), "{order}");
        daemon.kill();
        std::fs::remove_file(dir.join("cache")).unwrap();
        assert!(!recovered(), "{order}: recover knows what status does not");
        let uri = format!("file:{}", dir.join("disk").display());
        assert_eq!(larder(&["recover", &uri]).0, Some(0));
    }
}
