//! What else leads to a store of `larder block serve`: another name of the same server, the daemon itself, a file that was moved.

use std::path::Path;
use std::process::Command;

use crate::daemon::ask::{ask, json, status_when};
use crate::daemon::{Daemon, larder, prepare, read, session, session_of, write};
use rustix::process::Signal;

const MIB: usize = 1 << 20;

/// The port that a daemon with `--listen tcp:…:0` has by its log.
fn port(daemon: &Daemon) -> u16 {
    let ready = daemon.seen.iter().find(|line| line.contains("ready")).unwrap();
    ready.trim().rsplit_once(':').unwrap().1.parse().unwrap()
}

fn refused(dir: &Path, arguments: &[&str], why: &str) {
    let (code, out, error) = ask(dir, arguments);
    assert!(code == 1 && error.contains(why), "{arguments:?}: {code}: {out}{error}");
}

/// What is written to one of two volumes of one store would be missing from what is cached of the other.
#[test]
fn one_nbd_store_is_one_volume_by_whatever_name() {
    let (there, here) = (prepare("set:8"), prepare("set:8"));
    let (there, here) = (there.path(), here.path());
    let server = Daemon::start(there, &["--listen", "tcp:127.0.0.1:0"]);
    let port = port(&server);
    let mut daemon = Daemon::start(here, &[]);
    let socket = |path: &Path| format!("nbd+unix:///disk?socket={}", path.display());
    let place = there.join("socket");
    json(here, &["attach", &format!("one={}", socket(&place))]);
    std::os::unix::fs::symlink(&place, here.join("link")).unwrap();
    let around = there.join("state/../socket");
    for path in [place.clone(), here.join("link"), around] {
        let volume = format!("two={}", socket(&path));
        refused(here, &["attach", &volume], "is volume 'one' already");
    }
    json(here, &["attach", &format!("tcp=nbd://127.0.0.1:{port}/disk")]);
    for host in ["127.1", "localhost"] {
        let volume = format!("two=nbd://{host}:{port}/disk");
        refused(here, &["attach", &volume], "is volume 'tcp' already");
    }
    // The default export is the only one: the server does not say so.
    json(here, &["attach", &format!("three=nbd://127.0.0.1:{port}/")]);
    let line = daemon.wait_for("exports of one server");
    assert!(line.contains("'tcp'") && line.contains("'three'"), "{line}");
    for volume in ["one", "tcp", "three"] {
        json(here, &["detach", volume]);
    }
    daemon.stop();
    server.stop();
}

#[test]
fn what_is_the_daemons_own_is_no_store_of_it() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let log = dir.join("log");
    std::os::unix::fs::symlink(dir.join("socket"), dir.join("link")).unwrap();
    let path = |name: &str| dir.join(name).display().to_string();
    let own = "an export of this daemon itself";
    // At the start, where nobody would answer.
    let (listen, state) = (format!("unix:{}", path("socket")), path("state"));
    let volume = format!("loop=nbd+unix:///loop?socket={}", path("link"));
    let serve = ["serve", "--cache", &path("cache"), "--volume", &volume];
    let (code, error) =
        larder(&[&serve[..], &["--listen", &listen, "--state-dir", &state]].concat());
    assert!(code == Some(1) && error.contains(own), "{code:?}: {error}");
    let record = path("record");
    let daemon = Daemon::start(dir, &["--listen", "tcp:0.0.0.0:0", "--record", &record]);
    let port = port(&daemon);
    for uri in [
        format!("nbd+unix:///disk?socket={}", path("socket")),
        format!("nbd+unix:///disk?socket={}", path("link")),
        format!("nbd://127.0.0.1:{port}/disk"),
        format!("nbd://localhost:{port}/disk"),
        // Looked up when it is opened.
        format!("nbd://127.1:{port}/disk"),
    ] {
        refused(dir, &["attach", &format!("loop={uri}")], own);
    }
    std::fs::hard_link(dir.join("cache"), &log).unwrap();
    for (name, what) in [
        ("cache", "the cache of this daemon"),
        ("log", "the cache of this daemon"),
        ("state/block.lock", "the lock of its state directory"),
        ("record", "its record"),
    ] {
        let volume = format!("own=file:{}", path(name));
        refused(dir, &["attach", &volume], what);
    }
    let maps = std::fs::read_dir(dir.join("state/block-maps")).unwrap().next().unwrap().unwrap();
    let volume = format!("own=file:{}", maps.path().display());
    refused(dir, &["attach", &volume], "keeps in its state directory");
    daemon.stop();
}

#[test]
fn a_file_that_is_not_at_its_path_any_more_is_told_of() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let mut daemon = Daemon::start(dir, &[]);
    let (disk, moved) = (dir.join("disk"), dir.join("moved"));
    let mut s = session(dir);
    write(&mut *s, 0, MIB, 5);
    std::fs::rename(&disk, &moved).unwrap();
    let is = |state: &'static str| {
        move |s: &serde_json::Value| s["volumes"][0]["store"]["state"] == state
    };
    let status = status_when(dir, "moved", is("moved"));
    let alarms = status["alarms"].to_string();
    assert!(alarms.contains("is not the one that is open: it was moved"), "{alarms}");
    assert!(alarms.contains(moved.to_str().unwrap()), "{alarms}");
    // Another file in its place is not opened.
    std::fs::write(&disk, vec![9u8; 32 * MIB]).unwrap();
    status_when(dir, "replaced", |s| s["alarms"].to_string().contains("it was replaced"));
    write(&mut *s, 0, MIB, 6);
    assert!(read(&mut *s, 0, MIB).iter().all(|&b| b == 6));
    let (code, text, _) = ask(dir, &["resize", "disk"]);
    assert!(code == 0 && text.contains("it was replaced"), "{text}");
    drop(s);
    status_when(dir, "left", |s| s["volumes"][0]["clients"] == 0);
    let (code, text, _) = ask(dir, &["detach", "disk"]);
    assert!(code == 0 && text.contains("it was replaced"), "{text}");
    assert!(std::fs::read(&disk).unwrap().iter().all(|&b| b == 9), "it was left alone");
    assert!(std::fs::read(&moved).unwrap()[..MIB].iter().all(|&b| b == 6));
    // One that is removed is to be copied before it is let go.
    json(dir, &["attach", &format!("other=file:{}", moved.display())]);
    std::fs::remove_file(&moved).unwrap();
    let status = status_when(dir, "moved", is("moved"));
    assert!(status["alarms"].to_string().contains("it was removed"), "{status}");
    assert!(read(&mut *session_of(dir, "other"), 0, MIB).iter().all(|&b| b == 6));
    assert!(!daemon.said("written to by something else"), "{:#?}", daemon.seen);
    daemon.stop();
}

#[test]
fn a_state_directory_that_is_moved_away_is_told_of() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let mut daemon = Daemon::start(dir, &[]);
    write(&mut *session(dir), 0, MIB, 5);
    let (state, moved) = (dir.join("state"), dir.join("moved"));
    std::fs::rename(&state, &moved).unwrap();
    daemon.wait_for("is not the one that this process began with");
    let control = moved.join("block.sock").display().to_string();
    let name = format!("state directory '{}'", state.display());
    let asked = |arguments: &[&str]| {
        larder(&[arguments, &["--control", &control, "--answer-within", "120"]].concat())
    };
    let (code, error) = asked(&["detach", "disk", "--disconnect"]);
    assert!(code == Some(1) && error.contains(&name) && error.contains("move it back"), "{error}");
    let (code, error) = asked(&["attach", &format!("a=file:{}", dir.join("disk").display())]);
    assert!(code == Some(1) && error.contains(&name), "{error}");
    assert!(!state.exists(), "nothing is made there");
    let status = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "status", "--json", "--control", &control, "--answer-within", "120"])
        .output()
        .unwrap();
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert!(status["alarms"].to_string().contains(&name), "{status}");
    std::fs::rename(&moved, &state).unwrap();
    daemon.wait_for("is back");
    assert_eq!(json(dir, &["detach", "disk", "--disconnect"])["durable"], true);
    daemon.stop();
}

#[test]
fn a_daemon_that_is_stopped_is_not_waited_for() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let mut daemon = Daemon::start(dir, &[]);
    let control = dir.join("state/block.sock").display().to_string();
    daemon.signal(Signal::STOP);
    let volume = format!("a=file:{}", dir.join("other").display());
    for asked in [&["status"][..], &["detach", "disk"], &["attach", volume.as_str()]] {
        let (code, error) =
            larder(&[asked, &["--control", &control, "--answer-within", "1"]].concat());
        assert_eq!(code, Some(1), "{asked:?}: {error}");
        for word in [control.as_str(), "within 1 s", "kill -CONT", &daemon.child.id().to_string()] {
            assert!(error.contains(word), "{asked:?}: no '{word}' in {error}");
        }
    }
    daemon.signal(Signal::CONT);
    // What was said to have failed is not done later.
    for _ in ["detach", "attach"] {
        daemon.wait_for("whoever gave it did not wait");
    }
    assert_eq!(json(dir, &["status"])["volumes"][0]["name"], "disk");
    assert!(!daemon.said("is detached"), "{:#?}", daemon.seen);
    let file = dir.join("disk").display().to_string();
    let (code, error) = larder(&["status", "--control", &file]);
    assert!(code == Some(1) && error.contains("is no socket"), "{error}");
    let (code, error) = larder(&["status", "--control", &format!("{file}-not")]);
    assert!(code == Some(1) && error.contains("there is no such socket"), "{error}");
    drop(daemon);
}
