//! Consistency points that an application names: a lost cache costs what came after the last one that the store has.

use super::{has, prepare};
use crate::daemon::ask::{ask, json, status_when};
use crate::daemon::{Daemon, larder, session_of, write};

#[test]
fn a_lost_cache_costs_what_was_written_after_the_last_mark() {
    let dir = prepare();
    let dir = dir.path();
    let daemon = Daemon::start(dir, &["--write", "back:journaled,cut=marks"]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 0, 4096, 7);
    drop(s);
    let said = json(dir, &["mark", "disk", "nightly"]);
    assert_eq!((&said["mark"], &said["sequence"]), (&"nightly".into(), &2.into()), "{said:#}");
    let status = status_when(dir, "the mark is in the store", |s| {
        s["volumes"][0]["write_back"]["stored_mark"] == "nightly"
    });
    let back = &status["volumes"][0]["write_back"];
    assert_eq!(back["mode"], "back:journaled,cut=marks", "{back:#}");
    assert_eq!((&back["age_max_seconds"], &back["missed_marks"]), (&60.0.into(), &0.into()));
    let (_, said, _) = ask(dir, &["status"]);
    has(&said, &["mark in store", "nightly"]);
    let mut s = session_of(dir, "disk");
    write(&mut *s, 0, 8192, 9);
    drop(s);
    daemon.kill();
    std::fs::remove_file(dir.join("cache")).unwrap();
    let uri = format!("file:{}", dir.join("disk").display());
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "recover", &uri])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{said}");
    has(&said, &["'nightly' is the last", "journaled"]);
    let left = std::fs::read(dir.join("disk")).unwrap();
    assert!(left[..4096].iter().all(|&b| b == 7) && left[4096..].iter().all(|&b| b == 0));
    assert_eq!(larder(&["recover", &uri]).0, Some(0));
}
