//! Volumes that are put aside with what is dirty, and taken up elsewhere; and those that change over while they are served.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{has, prepare};
use crate::daemon::ask::{ask, json};
use crate::daemon::{Daemon, larder, one, read, session_of, write};

const HELD: &str = "back:ordered,destage=none";
const BLOCK: u64 = 4096;

#[track_caller]
fn holds(dir: &Path, block: u64, fill: u8) {
    let mut s = session_of(dir, "disk");
    let found = read(&mut *s, block * BLOCK, BLOCK as usize);
    assert!(found.iter().all(|b| *b == fill), "block {block}: {} for {fill}", found[0]);
}

fn writes(dir: &Path, block: u64, fill: u8) {
    let mut s = session_of(dir, "disk");
    write(&mut *s, block * BLOCK, BLOCK as usize, fill);
}

#[test]
fn a_volume_is_put_aside_with_what_is_dirty_and_taken_up_by_another_daemon() {
    let (dir, other) = (prepare(), tempfile::TempDir::new().unwrap());
    let (dir, other) = (dir.path(), other.path());
    let daemon = Daemon::start(dir, &["--write", HELD]);
    for block in 0..100 {
        writes(dir, block, block as u8 + 1);
    }
    let (code, said, error) = ask(dir, &["detach", "disk", "--keep-dirty"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["disk: detached", "400 KiB that its store lacks"]);
    let status = json(dir, &["status"]);
    assert_eq!(status["put_aside"][0]["carried_bytes"], 400 << 10, "{status:#}");
    let (_, text, _) = ask(dir, &["status"]);
    has(&text, &["put aside", "dirty", "400 KiB", "attach the volume with it"]);
    let (code, _, error) = ask(dir, &["drop", "disk"]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["its store does not have"]);
    daemon.stop();
    let cache = dir.join("cache").display().to_string();
    let (code, text) = larder(&["check", &cache]);
    assert_eq!(code, Some(0), "{text}");
    let file = dir.join("dirty").display().to_string();
    let (code, text) = larder(&["export", &cache, "disk", &file]);
    assert_eq!(code, Some(0), "{text}");
    std::fs::copy(dir.join("cache"), dir.join("copy")).unwrap();
    for name in ["cache", "disk", "disk.larder"] {
        std::fs::rename(dir.join(name), other.join(name)).unwrap();
    }
    let daemon = Daemon::start(other, &["--write", HELD]);
    for block in 0..100 {
        holds(other, block, block as u8 + 1);
    }
    writes(other, 7, 200);
    daemon.kill();
    let daemon = Daemon::start(other, &["--write", HELD]);
    holds(other, 7, 200);
    holds(other, 8, 9);
    daemon.stop();
    // What was copied before counts no more.
    std::fs::rename(other.join("cache"), other.join("right")).unwrap();
    std::fs::rename(dir.join("copy"), other.join("cache")).unwrap();
    let at = |name: &str| other.join(name).display().to_string();
    let (cache, volume) = (at("cache"), format!("disk=file:{}", at("disk")));
    let (listen, state) = (format!("unix:{}", at("socket")), at("state"));
    let serve = ["serve", "--cache", &cache, "--volume", &volume, "--listen", &listen];
    let (code, text) = larder(&[&serve[..], &["--state-dir", &state, "--write", HELD]].concat());
    assert_eq!(code, Some(1), "{text}");
    has(&text, &["volume 'disk'", "larder block recover"]);
    std::fs::rename(other.join("right"), other.join("cache")).unwrap();
    let daemon = Daemon::start(other, &["--write", HELD]);
    let (code, _, error) = ask(other, &["detach", "disk", "--disconnect"]);
    assert_eq!(code, 0, "{error}");
    daemon.stop();
    let store = std::fs::read(other.join("disk")).unwrap();
    for (block, found) in store.chunks(BLOCK as usize).take(100).enumerate() {
        let fill = if block == 7 { 200 } else { block as u8 + 1 };
        assert!(found.iter().all(|b| *b == fill), "block {block}");
    }
}

#[test]
fn a_volume_that_writes_through_keeps_nothing_dirty() {
    let dir = prepare();
    let daemon = Daemon::start(dir.path(), &[]);
    let (code, _, error) = ask(dir.path(), &["detach", "disk", "--keep-dirty"]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["it does not write back"]);
    writes(dir.path(), 1, 1);
    holds(dir.path(), 1, 1);
    daemon.stop();
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_volume_changes_over_while_clients_write_and_a_restart_goes_by_its_flags() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    let stop = AtomicBool::new(false);
    let newest = std::thread::scope(|scope| {
        // What fails here ends the client too.
        let _ends = Ends(&stop);
        let client = scope.spawn(|| {
            let mut s = session_of(dir, "disk");
            let mut fill = 0u8;
            while !stop.load(Ordering::Relaxed) {
                fill = fill.wrapping_add(1);
                for block in 0..8 {
                    write(&mut *s, block * BLOCK, BLOCK as usize, fill);
                    let found = read(&mut *s, block * BLOCK, BLOCK as usize);
                    assert!(found.iter().all(|b| *b == fill), "{} for {fill}", found[0]);
                }
                one(&mut *s, larder_block::op::Op::Flush);
            }
            fill
        });
        for _ in 0..4 {
            let (code, said, error) = ask(dir, &["write", "disk", "back:ordered"]);
            assert_eq!(code, 0, "{error}");
            has(&said, &["disk: writes back from now on, back:ordered", "next start"]);
            let status = json(dir, &["status"]);
            assert_eq!(status["volumes"][0]["write_back"]["mode"], "back:ordered");
            let (code, _, error) = ask(dir, &["write", "disk", "back:any"]);
            assert_eq!(code, 1, "{error}");
            has(&error, &["writes back already"]);
            std::thread::sleep(std::time::Duration::from_millis(100));
            let (code, said, error) = ask(dir, &["write", "disk", "through"]);
            assert_eq!(code, 0, "{error}");
            has(&said, &["disk: writes through from now on"]);
            let status = json(dir, &["status"]);
            assert!(status["volumes"][0]["write_back"].is_null(), "{status:#}");
        }
        stop.store(true, Ordering::Relaxed);
        client.join().unwrap()
    });
    daemon.kill();
    let store = std::fs::read(dir.join("disk")).unwrap();
    assert!(store[..8 * BLOCK as usize].iter().all(|b| *b == newest));
    let daemon = Daemon::start(dir, &[]);
    holds(dir, 3, newest);
    for (wrong, words) in [
        (&["write", "disk", "back:best"][..], &["'best' is no order"][..]),
        (&["write", "disk", "through", "--dirty-max", "16m"], &["leave them out"]),
    ] {
        let (code, _, error) = ask(dir, wrong);
        assert_eq!(code, 2, "{error}");
        has(&error, words);
    }
    // It is as was asked for.
    let (code, out, error) = ask(dir, &["write", "disk", "through"]);
    assert_eq!(code, 0, "{error}");
    has(&out, &["writes through from now on"]);
    // A kill behind a change over: the dirty data needs its cache, and write-back.
    let (code, _, error) = ask(dir, &["write", "disk", HELD]);
    assert_eq!(code, 0, "{error}");
    writes(dir, 3, 99);
    daemon.kill();
    let daemon = Daemon::start(dir, &["--write", "back:ordered"]);
    holds(dir, 3, 99);
    daemon.stop();
}
