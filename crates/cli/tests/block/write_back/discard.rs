//! What is given up of a volume that writes back, as an operator does it: offline, and of one that is served.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use super::{has, prepare};
use crate::daemon::ask::{ask, json, status_when};
use crate::daemon::{Daemon, larder, session_of, write};

const HELD: &str = "back:ordered,destage=none";

/// A cache that holds 12 KiB of `disk`, and is not in use.
fn left(dir: &Path) {
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 4096, 4096, 7);
    write(&mut *s, 16 << 20, 8192, 9);
    drop(s);
    daemon.kill();
}

/// A byte of the second write rots, behind what a start may take for a torn tail.
fn rot(dir: &Path) {
    let cache = std::fs::read(dir.join("cache")).unwrap();
    let at = (0..cache.len()).step_by(512).find(|&at| cache[at..].starts_with(&[9; 8192]));
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 0, 512, 5);
    drop(s);
    daemon.kill();
    let file = std::fs::File::options().write(true).open(dir.join("cache")).unwrap();
    file.write_all_at(&[1], at.unwrap() as u64 + 5000).unwrap();
}

/// Its exit code, and all that it says.
fn discard(dir: &Path, more: &[&str]) -> (Option<i32>, String) {
    let cache = dir.join("cache");
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    let output = command.args(["block", "discard"]).arg(cache).args(more).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn what_is_dirty_is_given_up_only_with_a_yes_and_of_a_volume_that_there_is() {
    let dir = prepare();
    let dir = dir.path();
    let store = format!("file:{}", dir.join("disk").display());
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 4096, 4096, 7);
    drop(s);
    let (code, said) = discard(dir, &["disk", &store, "--yes"]);
    assert_eq!(code, Some(1), "{said}");
    has(&said, &["locked", "stop that one first"]);
    assert!(!said.contains("--no-store"), "a live lock is not to be gone round: {said}");
    let (code, said) = discard(dir, &["disk", "--no-store", "--yes"]);
    assert_eq!(code, Some(1), "{said}");
    has(&said, &["in use"]);
    daemon.kill();
    let (code, said) = discard(dir, &["other", &store, "--yes"]);
    assert_eq!(code, Some(1), "{said}");
    has(&said, &["'other'", "does not know"]);
    let (code, said) = discard(dir, &["disk"]);
    assert_eq!(code, Some(2), "{said}");
    let (code, said) = larder(&["discard", "/nowhere", "disk", &store]);
    assert_eq!(code, Some(2), "{said}");
    has(&said, &["no such file"]);
    // No terminal asks: what would be lost is said, and nothing is done.
    let (code, said) = discard(dir, &["disk", &store]);
    assert_eq!(code, Some(1), "{said}");
    has(&said, &["4096 bytes", "would be given up", "--yes"]);
    let (code, said) = discard(dir, &["disk", &store, "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    has(&said, &["4096 bytes", "given up"]);
    let (code, said) = discard(dir, &["disk", &store, "--yes"]);
    assert_eq!(code, Some(1), "{said}");
    has(&said, &["nothing that its store lacks"]);
    let daemon = Daemon::start(dir, &["--write", HELD]);
    assert_eq!(json(dir, &["status"])["volumes"][0]["write_back"]["dirty_bytes"], 0);
    daemon.kill();
}

#[test]
fn what_lies_beyond_the_end_is_given_up_and_the_rest_stays() {
    let dir = prepare();
    let dir = dir.path();
    left(dir);
    let store = format!("file:{}", dir.join("disk").display());
    let (code, said) = discard(dir, &["disk", &store, "--beyond-end", "--yes"]);
    assert_eq!(code, Some(1), "{said}");
    has(&said, &["nothing lies beyond"]);
    let disk = std::fs::File::options().write(true).open(dir.join("disk")).unwrap();
    disk.set_len(8 << 20).unwrap();
    let (code, said) = discard(dir, &["disk", &store, "--beyond-end", "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    has(&said, &["8192 bytes", "given up", "4 KiB that are dirty stay"]);
    let daemon = Daemon::start(dir, &["--write", HELD]);
    assert_eq!(json(dir, &["status"])["volumes"][0]["write_back"]["dirty_bytes"], 4096);
    daemon.kill();
}

#[test]
fn what_cannot_be_read_is_given_up_on_a_cache_that_is_not_in_use() {
    let dir = prepare();
    let dir = dir.path();
    left(dir);
    rot(dir);
    let (code, said) = discard(dir, &["disk", "--unreadable"]);
    assert_eq!(code, Some(1), "{said}");
    has(&said, &["8192 bytes", "cannot be read would be given up", "--yes"]);
    let (code, said) = discard(dir, &["disk", "--unreadable", "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    has(&said, &["8192 bytes", "cannot be read given up", "stay"]);
    let (code, said) = discard(dir, &["disk", "--unreadable", "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    has(&said, &["no byte given up"]);
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let (code, _, error) = ask(dir, &["flush", "disk"]);
    assert_eq!(code, 0, "{error}");
    let back = &json(dir, &["status"])["volumes"][0]["write_back"];
    assert_eq!((&back["unreadable_bytes"], &back["dirty_bytes"]), (&0.into(), &0.into()));
    daemon.kill();
    assert!(std::fs::read(dir.join("disk")).unwrap()[4096..8192].iter().all(|b| *b == 7));
}

#[test]
fn what_could_not_be_read_and_was_given_up_stays_so_when_what_lies_beyond_the_end_is_given_up() {
    let dir = prepare();
    let dir = dir.path();
    left(dir);
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 28 << 20, 4096, 3);
    drop(s);
    daemon.kill();
    rot(dir);
    let (code, said) = discard(dir, &["disk", "--unreadable", "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    let disk = std::fs::File::options().write(true).open(dir.join("disk")).unwrap();
    disk.set_len(24 << 20).unwrap();
    let store = format!("file:{}", dir.join("disk").display());
    let (code, said) = discard(dir, &["disk", &store, "--beyond-end", "--yes"]);
    assert_eq!(code, Some(0), "{said}");
    has(&said, &["4096 bytes", "given up"]);
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let (code, _, error) = ask(dir, &["flush", "disk"]);
    assert_eq!(code, 0, "{error}");
    let back = &json(dir, &["status"])["volumes"][0]["write_back"];
    assert_eq!((&back["unreadable_bytes"], &back["dirty_bytes"]), (&0.into(), &0.into()));
    daemon.kill();
    let image = std::fs::read(dir.join("disk")).unwrap();
    assert!(image[16 << 20..][..8192].iter().all(|b| *b != 9), "it was given up");
}

#[test]
fn what_cannot_be_read_of_a_volume_that_is_served_is_given_up_over_the_socket() {
    let dir = prepare();
    let dir = dir.path();
    left(dir);
    rot(dir);
    let daemon = Daemon::start(dir, &["--write", "back:ordered"]);
    let what = "stopped by what cannot be read";
    let stops =
        |status: &serde_json::Value| status["volumes"][0]["write_back"]["unreadable_stops"] == true;
    let status = status_when(dir, what, stops);
    has(&status["alarms"].to_string(), &["discard --served disk --unreadable"]);
    // Whoever wants it to write through hears why that cannot be, and no client waits.
    let (code, _, error) = ask(dir, &["write", "disk", "through"]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["cannot be read", "give them up"]);
    let (code, _, error) = ask(dir, &["discard", "--served", "other", "--unreadable"]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["'other'"]);
    let (code, _, error) = ask(dir, &["discard", "--served", "disk", "--yes"]);
    assert_eq!(code, 2, "{error}");
    has(&error, &["--unreadable"]);
    let (code, said, error) = ask(dir, &["discard", "--served", "disk", "--unreadable"]);
    assert_eq!(code, 1, "{error}");
    has(&said, &["would be given up"]);
    let (code, said, error) = ask(dir, &["discard", "--served", "disk", "--unreadable", "--yes"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["8192 bytes", "cannot be read given up"]);
    status_when(dir, "clean", |status| {
        let back = &status["volumes"][0]["write_back"];
        back["dirty_bytes"] == 0 && back["unreadable_bytes"] == 0 && back["given_up_bytes"] == 8192
    });
    daemon.kill();
}
