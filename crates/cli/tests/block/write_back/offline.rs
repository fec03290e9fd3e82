//! Dirty data of a cache that is not in use: it is verified and exported without its store; marks and explanations while it is served.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::{has, prepare};
use crate::daemon::ask::{ask, json};
use crate::daemon::{Daemon, session_of, write};

const HELD: &str = "back:ordered,destage=none";

/// A cache that holds 12 KiB of `disk`, with two marks, and a volume with nothing dirty; the store is gone.
fn left(dir: &Path) {
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 4096, 4096, 7);
    drop(s);
    let (code, said, error) = ask(dir, &["mark", "disk", "before the move"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["disk: mark 'before the move' is durable on flash, write 2"]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 1 << 20, 8192, 9);
    drop(s);
    let status = json(dir, &["status"]);
    let back = &status["volumes"][0]["write_back"];
    assert_eq!(back["last_mark"], "before the move", "{back:#}");
    assert!(back["stored_mark"].is_null(), "{back:#}");
    let (code, said, _) = ask(dir, &["explain", "disk", "8"]);
    assert_eq!(code, 0);
    has(&said, &["dirty", "4 KiB of it for", "not in its store"]);
    let (_, said, _) = ask(dir, &["explain", "disk", "0"]);
    has(&said, &["its store has all of it"]);
    let (code, _, error) = ask(dir, &["mark", "disk", ""]);
    assert_eq!(code, 2);
    has(&error, &["1 to 255 bytes"]);
    let (code, _, error) = ask(dir, &["mark", "other", "a"]);
    assert_eq!(code, 1);
    has(&error, &["'other'"]);
    let (code, _, error) = export(dir, "early", &[]);
    assert_eq!(code, Some(1), "{error}");
    has(&error, &["in use", "larder block flush"]);
    daemon.kill();
    std::fs::rename(dir.join("disk"), dir.join("gone")).unwrap();
}

/// Its exit code, and what it says on standard output and standard error.
fn larder_out(arguments: &[&str]) -> (Option<i32>, String, String) {
    let larder = Command::new(env!("CARGO_BIN_EXE_larder")).arg("block").args(arguments).output();
    let output = larder.unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn export(dir: &Path, file: &str, more: &[&str]) -> (Option<i32>, String, String) {
    let (cache, file) = (dir.join("cache"), dir.join(file));
    let mut args = vec!["export", cache.to_str().unwrap(), "disk", file.to_str().unwrap()];
    args.extend(more);
    larder_out(&args)
}

fn check(dir: &Path, more: &[&str]) -> (Option<i32>, String, String) {
    let cache = dir.join("cache");
    let mut args = vec!["check", cache.to_str().unwrap()];
    args.extend(more);
    larder_out(&args)
}

#[test]
fn dirty_data_is_verified_and_exported_when_its_store_is_gone() {
    let dir = prepare();
    let dir = dir.path();
    left(dir);
    let (code, said, error) = check(dir, &[]);
    assert_eq!(code, Some(0), "{said}{error}");
    has(&said, &["dirty data", "disk: 12 KiB dirty in 3 records, writes 1 to 3"]);
    let (code, said, error) = export(dir, "out", &[]);
    assert_eq!(code, Some(0), "{error}");
    has(&said, &["disk: 12 KiB in 2 extents, up to write 3"]);
    let out = std::fs::read(dir.join("out")).unwrap();
    let mut wanted = vec![0u8; 32 << 20];
    wanted[4096..8192].fill(7);
    wanted[1 << 20..(1 << 20) + 8192].fill(9);
    assert!(out == wanted);
    let (code, _, error) = export(dir, "out", &[]);
    assert_eq!(code, Some(2));
    has(&error, &["is there already"]);
    let base = dir.join("nowhere");
    let (code, _, error) = export(dir, "new", &["--base", base.to_str().unwrap()]);
    assert_eq!(code, Some(2));
    has(&error, &["no such file"]);
    // Rot where the second write lies: both say which bytes, and what to do; the rest is exported.
    let cache = std::fs::read(dir.join("cache")).unwrap();
    let at = (0..cache.len()).step_by(512).find(|&at| cache[at..].starts_with(&[9; 8192]));
    let at = at.unwrap() as u64;
    // A start has found all of it, and it is no torn tail any more.
    std::fs::rename(dir.join("gone"), dir.join("disk")).unwrap();
    let daemon = Daemon::start(dir, &["--write", HELD]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 0, 512, 5);
    drop(s);
    daemon.kill();
    let file = std::fs::File::options().write(true).open(dir.join("cache")).unwrap();
    file.write_all_at(&[1], at + 5000).unwrap();
    let (code, said, error) = check(dir, &[]);
    assert_eq!(code, Some(1), "{said}");
    has(
        &said,
        &["dirty bytes 1052672 to 1056768 of disk (write 3)", "checksum", "export what is left"],
    );
    has(&error, &["fault"]);
    let (code, said, _) = check(dir, &["--json"]);
    assert_eq!(code, Some(1));
    let said: Value = serde_json::from_str(&said).unwrap();
    let dirty = &said["dirty_data"];
    assert_eq!((&dirty["volumes"][0]["lost_bytes"], &dirty["faulty"]), (&4096.into(), &1.into()));
    assert_eq!(dirty["faults"][0]["offset"], 1_052_672);
    let (code, said, error) = export(dir, "rest", &[]);
    assert_eq!(code, Some(1), "{said}");
    has(&said, &["bytes 1052672 to 1056768", "are not in the file"]);
    has(&error, &["4 KiB could not be read"]);
    wanted[..512].fill(5);
    wanted[1_052_672..1_056_768].fill(0);
    assert!(std::fs::read(dir.join("rest")).unwrap() == wanted);
}
