//! Volumes that write back, served by the daemon: what was answered is there after a kill, comes to the store with a flush and a detach, and
//! a store whose cache is gone is refused until it is recovered.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_block::op::{FailureKind, Op};
use larder_runtime::{AlignedBuf, Payload};
use serde_json::Value;

use super::{format, has, prepare};
use crate::daemon::ask::{ask, json, status_when};
use crate::daemon::{Daemon, larder, one, read, session, session_of, write};
use crate::stores::faulty::Store;

/// Nothing is destaged before it is asked for.
const HELD: &str = "back:ordered,destage=none";
const BLOCK: u64 = 4096;

/// What was written: the block, and the byte that it is filled with.
type Blocks = Vec<(u64, u8)>;

/// Blocks all over a volume, some of them twice.
fn blocks() -> Blocks {
    let mut all: Blocks = (0..200u64).map(|i| (i * 37 % 1000, (i % 250 + 1) as u8)).collect();
    all.extend((0..50u64).map(|i| (i * 74 % 1000, 251)));
    all
}

fn write_all(dir: &Path, volume: &str, all: &Blocks) {
    let mut s = session_of(dir, volume);
    for (block, fill) in all {
        write(&mut *s, block * BLOCK, BLOCK as usize, *fill);
    }
}

/// What each block must hold: 0 where nothing was written.
fn expected(all: &Blocks) -> Vec<u8> {
    let mut out = vec![0; 1000];
    all.iter().for_each(|(block, fill)| out[*block as usize] = *fill);
    out
}

#[track_caller]
fn reads(dir: &Path, volume: &str, all: &Blocks) {
    let mut s = session_of(dir, volume);
    for (block, fill) in (0..).zip(expected(all)) {
        let found = read(&mut *s, block * BLOCK, BLOCK as usize);
        assert!(found.iter().all(|b| *b == fill), "block {block}: {} for {fill}", found[0]);
    }
}

#[track_caller]
fn store_holds(path: &Path, all: &Blocks) {
    let file = std::fs::File::open(path).unwrap();
    let mut found = vec![0; BLOCK as usize];
    for (block, fill) in (0..).zip(expected(all)) {
        file.read_exact_at(&mut found, block * BLOCK).unwrap();
        assert!(found.iter().all(|b| *b == fill), "block {block}: {} for {fill}", found[0]);
    }
}

#[test]
fn what_was_answered_is_there_after_a_kill_and_in_the_store_after_a_flush() {
    for mode in [HELD, "back:any,destage=none", "back:ordered", "back:ordered,grain=completion"] {
        let dir = prepare();
        let dir = dir.path();
        let all = blocks();
        let daemon = Daemon::start(dir, &["--write", mode]);
        write_all(dir, "disk", &all);
        reads(dir, "disk", &all);
        if mode.contains("none") {
            store_holds(&dir.join("disk"), &Vec::new());
            let status = json(dir, &["status"]);
            let back = &status["volumes"][0]["write_back"];
            let dirty = expected(&all).iter().filter(|b| **b > 0).count() as u64 * BLOCK;
            assert_eq!(back["dirty_bytes"], dirty, "{back:#}");
            assert_eq!(back["mode"], mode, "{back:#}");
            assert!(back["generation"].as_u64().unwrap() > 0, "{back:#}");
            assert!(back["oldest_seconds"].as_f64().unwrap() > 0.0, "{back:#}");
            let held = back["held_bytes"].as_u64().unwrap();
            assert!(held > dirty && held < back["bound_bytes"].as_u64().unwrap(), "{back:#}");
        }
        daemon.kill();

        let daemon = Daemon::start(dir, &["--write", mode]);
        reads(dir, "disk", &all);
        let (code, said, error) = ask(dir, &["flush"]);
        assert_eq!(code, 0, "{error}");
        has(&said, &["disk: all of it is durable in its store"]);
        store_holds(&dir.join("disk"), &all);
        let status = json(dir, &["status"]);
        assert_eq!(status["volumes"][0]["write_back"]["dirty_bytes"], 0, "{status:#}");
        reads(dir, "disk", &all);
        daemon.stop();
        let daemon = Daemon::start(dir, &["--write", mode]);
        reads(dir, "disk", &all);
        goes_through(dir, daemon, &all);
    }
}

/// The volume is detached in good order, and written through from now on: its marker is clean, and nothing is missing.
#[track_caller]
#[test]
fn a_stop_says_what_it_leaves_dirty() {
    let dir = prepare();
    let dir = dir.path();
    let mut daemon = Daemon::start(dir, &["--write", HELD]);
    write_all(dir, "disk", &vec![(1, 9), (7, 9)]);
    daemon.signal(rustix::process::Signal::TERM);
    let line = daemon.wait_for("not to its store");
    has(&line, &["volume 'disk': 8 KiB", "larder block detach disk"]);
}

fn goes_through(dir: &Path, daemon: Daemon, all: &Blocks) {
    let (code, _, error) = ask(dir, &["detach", "disk", "--disconnect"]);
    assert_eq!(code, 0, "{error}");
    daemon.stop();
    store_holds(&dir.join("disk"), all);
    let daemon = Daemon::start(dir, &[]);
    reads(dir, "disk", all);
    daemon.stop();
}

#[test]
fn a_store_whose_cache_is_gone_is_refused_until_it_is_recovered() {
    let dir = prepare();
    let dir = dir.path();
    let mut all = blocks();
    let daemon = Daemon::start(dir, &["--write", HELD]);
    write_all(dir, "disk", &all);
    let (code, _, error) = ask(dir, &["flush", "disk"]);
    assert_eq!(code, 0, "{error}");
    let generation =
        |status: &Value| status["volumes"][0]["write_back"]["generation"].as_u64().unwrap();
    let before = generation(&json(dir, &["status"]));
    // These are lost with the cache.
    write_all(dir, "disk", &vec![(1, 99), (2, 99)]);
    let uri = format!("file:{}", dir.join("disk").display());
    let (code, message) = larder(&["recover", &uri]);
    assert_eq!(code, Some(1), "a living daemon: {message}");
    daemon.kill();
    std::fs::remove_file(dir.join("cache")).unwrap();
    format(&dir.join("cache"));
    for write in [&["--write", HELD][..], &[]] {
        let (code, message) = refused(dir, write);
        assert_eq!(code, Some(1), "{message}");
        has(&message, &["volume 'disk'", "disk.larder", "larder block recover"]);
    }
    let (code, message) = larder(&["recover", &uri]);
    assert_eq!(code, Some(0), "{message}");
    let daemon = Daemon::start(dir, &["--write", HELD]);
    reads(dir, "disk", &all);
    write_all(dir, "disk", &vec![(3, 77)]);
    all.push((3, 77));
    daemon.kill();
    let daemon = Daemon::start(dir, &["--write", HELD]);
    reads(dir, "disk", &all);
    let status = json(dir, &["status"]);
    assert!(generation(&status) > before + 1, "{before}: {status:#}");
    daemon.stop();
}

/// A start that must fail.
fn refused(dir: &Path, more: &[&str]) -> (Option<i32>, String) {
    let at = |name: &str| dir.join(name).display().to_string();
    let (cache, volume) = (at("cache"), format!("disk=file:{}", at("disk")));
    let (listen, state) = (format!("unix:{}", at("socket")), at("state"));
    let serve = ["serve", "--cache", &cache, "--volume", &volume, "--listen", &listen];
    larder(&[&serve[..], &["--state-dir", &state], more].concat())
}

#[test]
fn a_store_that_is_away_at_the_start_keeps_no_other_volume_and_is_gone_on_with_when_it_comes() {
    let dir = prepare();
    let dir = dir.path();
    std::fs::File::create(dir.join("more")).unwrap().set_len(32 << 20).unwrap();
    let more = format!("more=file:{}", dir.join("more").display());
    let more: &[&str] = &["--volume", &more, "--write", HELD, "--on-backing-failure", "wait"];
    let all = blocks();
    let daemon = Daemon::start(dir, more);
    write_all(dir, "disk", &all);
    write_all(dir, "more", &vec![(3, 7)]);
    daemon.kill();
    let names = ["disk", "disk.larder"];
    let rename = |from: &dyn Fn(&str) -> String, to: &dyn Fn(&str) -> String| {
        names.iter().for_each(|n| std::fs::rename(dir.join(from(n)), dir.join(to(n))).unwrap());
    };
    let (here, away) = (|n: &str| n.to_owned(), |n: &str| format!("away-{n}"));
    rename(&here, &away);
    let dirty = expected(&all).iter().filter(|b| **b > 0).count() as u64 * BLOCK;
    let mut daemon = Daemon::start(dir, more);
    let status = json(dir, &["status"]);
    let disk = &status["volumes"][0];
    assert_eq!((&disk["name"], &disk["store"]["state"]), (&"disk".into(), &"waiting".into()));
    assert_eq!(disk["kept_dirty_bytes"], dirty, "{disk:#}");
    let alarms = status["alarms"].to_string();
    has(&alarms, &["volume 'disk'", "that the store lacks are kept in the write log"]);
    reads(dir, "more", &vec![(3, 7)]);
    daemon.signal(rustix::process::Signal::TERM);
    daemon.wait_for("it was not served at the end");
    daemon.stop();
    let daemon = Daemon::start(dir, more);
    rename(&away, &here);
    status_when(dir, "the store is there", |s| s["volumes"][0]["store"]["state"] == "ok");
    reads(dir, "disk", &all);
    let (code, _, error) = ask(dir, &["flush"]);
    assert_eq!(code, 0, "{error}");
    store_holds(&dir.join("disk"), &all);
    daemon.stop();
}

/// 40 bytes for each 4 KiB of the 64 MiB that the log has.
#[test]
fn the_start_counts_what_dirty_data_may_take_of_memory() {
    let dir = prepare();
    let mut daemon = Daemon::start(dir.path(), &["--write", HELD]);
    assert!(daemon.said("640 KiB for what is dirty"), "{:#?}", daemon.seen);
    daemon.stop();
}

/// Which volume waits, and why.
fn waits(status: &serde_json::Value, state: &str, why: &str) -> bool {
    let store = &status["volumes"][0]["store"];
    store["state"] == state && store["trouble"].as_str().is_some_and(|t| t.contains(why))
}

#[test]
fn a_volume_that_waits_says_whether_that_passes_by_itself() {
    let dir = prepare();
    let dir = dir.path();
    let (place, marker) = (dir.join("place"), format!("disk={}", dir.join("place").display()));
    let more = |order| ["--write", order, "--marker", &marker, "--on-backing-failure", "wait"];
    let daemon = Daemon::start(dir, &more(HELD));
    write_all(dir, "disk", &vec![(1, 99)]);
    daemon.kill();
    let (here, away) = (dir.join("disk"), dir.join("away"));
    std::fs::rename(&here, &away).unwrap();
    let daemon = Daemon::start(dir, &more(HELD));
    // Somebody else has its marker, and lets it go.
    let held = std::fs::File::options().read(true).write(true).open(&place).unwrap();
    assert!(larder_runtime::lock_exclusive(std::os::fd::AsFd::as_fd(&held)).is_ok());
    std::fs::rename(&away, &here).unwrap();
    status_when(dir, "its marker is held", |s| waits(s, "waiting", "is held"));
    drop(held);
    status_when(dir, "it is served", |s| s["volumes"][0]["store"]["state"] == "ok");
    reads(dir, "disk", &vec![(1, 99)]);
    daemon.kill();
    // What it may not be served as, nobody but the operator changes.
    std::fs::rename(&here, &away).unwrap();
    let daemon = Daemon::start(dir, &more("back:any"));
    std::fs::rename(&away, &here).unwrap();
    status_when(dir, "it is refused", |s| waits(s, "refused", "for another order"));
    daemon.stop();
    let daemon = Daemon::start(dir, &more(HELD));
    reads(dir, "disk", &vec![(1, 99)]);
    daemon.stop();
}

/// Somebody takes connections there, and says nothing.
#[test]
fn a_marker_that_does_not_answer_at_the_start_keeps_no_other_volume() {
    let dir = prepare();
    let dir = dir.path();
    std::fs::File::create(dir.join("more")).unwrap().set_len(32 << 20).unwrap();
    let more = format!("more=file:{}", dir.join("more").display());
    let _mute = std::os::unix::net::UnixListener::bind(dir.join("mute")).unwrap();
    let marker = format!("disk=nbd+unix:///m?socket={}", dir.join("mute").display());
    let more = ["--volume", &more, "--write", HELD, "--marker", &marker];
    let (code, message) = refused(dir, &more);
    assert_eq!(code, Some(1), "{message}");
    has(&message, &["volume 'disk'", "cannot be reached", "mute"]);
    let daemon = Daemon::start(dir, &[&more[..], &["--on-backing-failure", "wait"]].concat());
    write_all(dir, "more", &vec![(3, 7)]);
    reads(dir, "more", &vec![(3, 7)]);
    status_when(dir, "it waits", |s| waits(s, "waiting", "cannot be reached"));
    daemon.stop();
}

#[test]
fn a_cache_that_was_given_up_counts_no_more_when_it_returns() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &["--write", HELD]);
    write_all(dir, "disk", &vec![(1, 99)]);
    daemon.kill();
    let uri = format!("file:{}", dir.join("disk").display());
    let (code, message) = larder(&["recover", &uri]);
    assert_eq!(code, Some(0), "{message}");
    // The cache was not lost after all.
    let daemon = Daemon::start(dir, &["--write", "back:ordered"]);
    reads(dir, "disk", &Vec::new());
    write_all(dir, "disk", &vec![(2, 5)]);
    goes_through(dir, daemon, &vec![(2, 5)]);
}

#[test]
fn dirty_data_is_not_passed_over_by_a_start_that_writes_through() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &["--write", HELD]);
    write_all(dir, "disk", &vec![(1, 99)]);
    daemon.kill();
    let (code, message) = refused(dir, &[]);
    assert_eq!(code, Some(1), "{message}");
    has(&message, &["volume 'disk'", "--write NAME=back:ordered"]);
    // Nor is it brought to the store in an order that it was not logged for.
    let (code, message) = refused(dir, &["--write", "back:any"]);
    assert_eq!(code, Some(1), "{message}");
    let words = ["volume 'disk'", "another order, ordered, than any", "larder block flush"];
    has(&message, &words);
    has(&message, &["serve it with --write NAME=back:ordered once more"]);
    let daemon = Daemon::start(dir, &["--write", "back:ordered"]);
    reads(dir, "disk", &vec![(1, 99)]);
    goes_through(dir, daemon, &vec![(1, 99)]);
}

/// Nothing is destaged, so no time can be told until it is; and who asks for what cannot be hears which volume and which mode are in the way.
#[test]
fn what_rests_in_the_log_has_no_time_left_and_a_refusal_says_what_is_in_the_way() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &["--write", HELD]);
    write_all(dir, "disk", &vec![(1, 99)]);
    let status = status_when(dir, "dirty", |s| s["volumes"][0]["write_back"]["dirty_bytes"] != 0);
    let back = &status["volumes"][0]["write_back"];
    assert!(back["seconds_left"].is_null() && !back["oldest_seconds"].is_null(), "{back:#}");
    let (code, _, error) = ask(dir, &["write", "disk", "back:any"]);
    assert_eq!(code, 1, "{error}");
    has(&error, &[HELD, "larder block write 'disk' through"]);
    let again = format!("two=file:{}", dir.join("disk").display());
    let (code, _, error) = ask(dir, &["attach", &again]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["the store of volume 'disk' already"]);
    // All of it is there, and then only a mark: the store has that too, and nothing ages.
    assert_eq!(ask(dir, &["flush"]).0, 0);
    assert_eq!(ask(dir, &["mark", "disk", "nightly"]).0, 0);
    let status =
        status_when(dir, "a mark", |s| s["volumes"][0]["write_back"]["stored_mark"] == "nightly");
    let back = &status["volumes"][0]["write_back"];
    assert!(back["oldest_seconds"].is_null() && back["seconds_left"] == 0.0, "{back:#}");
    daemon.stop();
}

#[test]
fn a_cache_without_a_write_log_writes_nothing_back() {
    let dir = crate::daemon::prepare("set:8");
    let (code, message) = refused(dir.path(), &["--write", "back:ordered"]);
    assert_eq!(code, Some(1), "{message}");
    has(&message, &["volume 'disk'", "no write log", "--write-log"]);
}

#[test]
fn a_volume_is_attached_to_write_back_and_drained_when_it_is_detached() {
    let dir = prepare();
    let dir = dir.path();
    let more = dir.join("more");
    std::fs::File::create(&more).unwrap().set_len(32 << 20).unwrap();
    let uri = format!("more=file:{}", more.display());
    let daemon = Daemon::start(dir, &[]);
    for (wrong, code, words) in [
        (&["--write", "back:best"][..], 2, &["'best' is no order", "choose any, ordered"][..]),
        (&["--write", "hdd-ssd"], 2, &["'hdd-ssd' does not say how to write back"]),
        (&["--dirty-max", "16m"], 2, &["'more' does not write back"]),
        (&["--dirty-age-max", "5"], 2, &["'more' does not write back"]),
        (
            &["--write", HELD, "--dirty-age-max", "5"],
            2,
            &["destage=none", "leave one of the two out"],
        ),
        (&["--write", HELD, "--read-only"], 2, &["is only read"]),
        (&["--marker", "/m", "--no-marker"], 2, &["--no-marker"]),
    ] {
        let (found, _, error) = ask(dir, &[&["attach", &uri], wrong].concat());
        assert_eq!(found, code, "{wrong:?}: {error}");
        has(&error, words);
    }
    let marker = dir.join("more.marker");
    let attach = ["attach", &uri, "--write", HELD, "--dirty-max", "8m", "--marker"];
    let attached = json(dir, &[&attach[..], &[marker.to_str().unwrap()]].concat());
    assert_eq!(attached["write"], HELD, "{attached:#}");
    let all = blocks();
    write_all(dir, "more", &all);
    let status = status_when(dir, "dirty", |s| s["volumes"][1]["write_back"]["dirty_bytes"] != 0);
    assert_eq!(status["volumes"][1]["write_back"]["bound_bytes"], 8 << 20, "{status:#}");
    assert!(status["volumes"][0]["write_back"].is_null(), "{status:#}");
    assert!(marker.exists());
    let (code, said, error) = ask(dir, &["flush", "disk"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["it writes through: nothing is dirty"]);
    store_holds(&more, &Vec::new());
    let (code, said, error) = ask(dir, &["detach", "more", "--disconnect"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["durable in its store"]);
    store_holds(&more, &all);
    // Its marker is clean: nothing is to be recovered.
    let uri = format!("file:{}", more.display());
    let (code, message) = larder(&["recover", &uri, "--marker", marker.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{message}");
    let (code, said, error) = ask(dir, &["flush"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["no volume writes back"]);
    daemon.stop();
}

#[test]
fn a_flush_that_waits_says_how_far_it_is_and_may_be_interrupted() {
    let dir = prepare();
    let dir = dir.path();
    let disk = tempfile::tempdir().unwrap();
    let store = Store::start(disk.path(), 32 << 20, FailureKind::Failed);
    let marker = format!("slow={}", dir.join("slow.marker").display());
    let volume = format!("slow={}", store.uri());
    let more = ["--volume", &volume, "--write", "slow=back:ordered,destage=none"];
    let daemon = Daemon::start(dir, &[&more[..], &["--marker", &marker]].concat());
    let all = blocks();
    write_all(dir, "slow", &all);
    store.plan.hang.store(true, Ordering::SeqCst);
    let mut flush = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "flush", "slow", "--state-dir"])
        .arg(dir.join("state"))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = std::io::BufReader::new(flush.stderr.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut said, &mut line).unwrap();
    has(&line, &["waits: ", "of the write log left"]);
    let pid = rustix::process::Pid::from_child(&flush);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert!(!flush.wait().unwrap().success());
    // The daemon goes on, and what is dirty needs no store.
    let mut s = session_of(dir, "slow");
    for (block, fill) in (0..).zip(expected(&all)).filter(|(_, fill)| *fill > 0) {
        let found = read(&mut *s, block * BLOCK, BLOCK as usize);
        assert!(found.iter().all(|b| *b == fill), "block {block}: {} for {fill}", found[0]);
    }
    drop(s);
    store.plan.hang.store(false, Ordering::SeqCst);
    let (code, _, error) = ask(dir, &["flush", "slow"]);
    assert_eq!(code, 0, "{error}");
    store_holds(store.file(), &all);
    daemon.stop();
}

#[test]
fn a_store_that_fails_is_an_alarm_and_the_flush_waits_for_it() {
    let dir = prepare();
    let dir = dir.path();
    let disk = tempfile::tempdir().unwrap();
    let store = Store::start(disk.path(), 32 << 20, FailureKind::Failed);
    let volume = format!("bad={}", store.uri());
    let more = ["--volume", &volume, "--write", "bad=back:ordered", "--no-marker", "bad"];
    let daemon = Daemon::start(dir, &more);
    store.plan.fail_every.store(1, Ordering::SeqCst);
    let all = blocks();
    write_all(dir, "bad", &all);
    let status = status_when(dir, "failing", |s| s["volumes"][0]["write_back"]["failures"] != 0);
    let alarms = status["alarms"].to_string();
    has(&alarms, &["volume 'bad': destaging fails", "wait for its store"]);
    let (code, text, _) = ask(dir, &["status"]);
    assert!(code == 0 && text.contains("failed"), "{text}");
    store.plan.fail_every.store(0, Ordering::SeqCst);
    let (code, _, error) = ask(dir, &["flush"]);
    assert_eq!(code, 0, "{error}");
    store_holds(store.file(), &all);
    daemon.stop();
}

#[test]
fn the_metrics_have_what_the_status_has() {
    use std::io::{Read, Write};
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &["--write", HELD, "--http", "127.0.0.1:0"]);
    let line = daemon.seen.iter().find(|l| l.contains("live page")).unwrap();
    let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap().to_owned();
    write_all(dir, "disk", &vec![(1, 9), (7, 9)]);
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        let request =
            format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        if text.contains("larder_block_volume_dirty_bytes{volume=\"disk\"} 8192.0") {
            has(&text, &["# HELP larder_block_volume_dirty_bytes ", "volume_generation"]);
            break;
        }
        assert!(Instant::now() < end, "{text}");
        std::thread::sleep(Duration::from_millis(100));
    }
    daemon.stop();
}

#[test]
fn a_flush_of_a_client_is_a_flush_of_the_log_and_fua_is_kept() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let mut s = session(dir);
    let mut buf = AlignedBuf::zeroed(BLOCK as usize);
    buf.fill(8);
    one(&mut *s, Op::Write { offset: 0, data: Payload::new(buf), fua: true });
    write(&mut *s, BLOCK, BLOCK as usize, 9);
    one(&mut *s, Op::Flush);
    let status = json(dir, &["status"]);
    let back = &status["volumes"][0]["write_back"];
    assert_eq!((&back["promised"], &back["frontier"]), (&back["acknowledged"], &0.into()));
    drop(s);
    daemon.kill();
    let daemon = Daemon::start(dir, &["--write", HELD]);
    reads(dir, "disk", &vec![(0, 8), (1, 9)]);
    daemon.stop();
}
