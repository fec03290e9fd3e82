//! Operating `larder block serve`: what the commands beside it say and do.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::daemon::ask::{ask, counter, fits_a_terminal, json, settle, status_when};
use crate::daemon::{Daemon, larder, prepare, read, session, session_of, write};
use serde_json::Value;

#[test]
fn status_explain_and_drop() {
    for placement in ["set:8", "sparse"] {
        explain_and_drop(placement);
    }
}

fn explain_and_drop(placement: &str) {
    let dir = prepare(placement);
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    let socket = dir.join("state").join("block.sock");
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let mut s = session(dir);
    write(&mut *s, 0, 1 << 20, 5);
    read(&mut *s, 4 << 20, 1 << 20);
    settle(dir);
    assert_eq!(counter(&json(dir, &["status"]), "fills"), 512);
    read(&mut *s, 0, 1 << 20);
    let status = status_when(dir, "counted", |s| s["cache"]["lines"] == 512);
    let volume = &status["volumes"][0];
    assert_eq!((&volume["name"], &volume["lines"]), (&"disk".into(), &512.into()));
    assert_eq!((&volume["reads"], &volume["read_hits"]), (&2.into(), &1.into()));
    assert_eq!((&volume["writes"], &volume["write_bytes"]), (&1.into(), &(1 << 20).into()));
    // The session has two connections where its first request was sent by the one that was made last.
    let clients = volume["clients"].as_u64().unwrap();
    assert!((1..=2).contains(&clients), "{clients} clients");
    assert_eq!(status["hit_ratio"], 0.5);
    for kind in ["hit", "miss", "write"] {
        assert_eq!(status["latency"][kind]["samples"], 1, "{kind}");
    }
    // Two MiB of lines for a MiB of writes and one of misses, and some log.
    let clwa = status["flash"]["clwa"].as_f64().unwrap();
    assert!((1.0..1.5).contains(&clwa), "{clwa}");
    let (code, text, _) = ask(dir, &["status"]);
    assert!(code == 0 && text.contains("50.0 % of reads") && text.contains("file:"), "{text}");
    fits_a_terminal(dir, &["status"], &["volume", "hit ratio", "clients", "errors"]);

    let cached = json(dir, &["explain", "disk", "8"]);
    assert_eq!((&cached["cached"], &cached["offset"]), (&true.into(), &4096.into()));
    assert!(cached["cached_for_seconds"].as_f64().unwrap() < 60.0);
    // The place that it names has the line.
    let at = cached["device_offset"].as_u64().unwrap();
    let mut bytes = [0u8; 4096];
    std::fs::File::open(dir.join("cache")).unwrap().read_exact_at(&mut bytes, at).unwrap();
    assert!(bytes.iter().all(|&b| b == 5));
    let missing = json(dir, &["explain", "disk", "20000000", "--byte"]);
    assert_eq!(missing["cached"], false);
    assert!(missing["admission"].as_str().unwrap().contains("would be admitted"), "{missing}");

    assert_eq!(json(dir, &["drop", "disk"])["dropped_lines"], 512);
    assert_eq!(json(dir, &["explain", "disk", "8"])["cached"], false);
    assert!(read(&mut *s, 0, 1 << 20).iter().all(|&b| b == 5));
    drop(s);
    status_when(dir, "left", |s| s["volumes"][0]["clients"] == 0);
    daemon.stop();
    assert!(!socket.exists(), "the socket goes with the daemon");
}

/// That a name is taken is said before the store is opened: the same file would be called locked.
#[test]
fn a_name_that_is_taken() {
    let dir = prepare("set:8");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let volume = format!("disk=file:{}", path("disk"));
    let (cache, state) = (path("cache"), path("state"));
    let serve = ["serve", "--cache", &cache, "--volume", &volume, "--volume", &volume];
    let listen = format!("unix:{}", path("socket"));
    let (code, error) =
        larder(&[&serve[..], &["--listen", &listen, "--state-dir", &state]].concat());
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("'disk' exists already: choose another name"), "{error}");
    assert!(!error.contains("locked"), "{error}");
    let daemon = Daemon::start(dir.path(), &[]);
    let (code, _, error) = ask(dir.path(), &["attach", &volume]);
    assert!(code == 1 && error.contains("'disk' is attached already: choose another"), "{error}");
    let (code, _, error) = ask(dir.path(), &["attach", &format!("a\nb=file:{}", path("disk"))]);
    assert!(code == 2 && error.contains("cannot be a volume's name"), "{error}");
    daemon.stop();
}

#[test]
fn a_volume_comes_and_goes_and_comes_back() {
    for placement in ["set:8", "sparse"] {
        comes_and_goes(placement);
    }
}

fn comes_and_goes(placement: &str) {
    let dir = prepare(placement);
    let dir = dir.path();
    let other = dir.join("other");
    std::fs::write(&other, vec![3u8; 8 << 20]).unwrap();
    let uri = format!("more=file:{}", other.display());
    let daemon = Daemon::start(dir, &[]);
    let attached = json(dir, &["attach", &uri]);
    assert_eq!((&attached["warm"], &attached["bytes"]), (&false.into(), &(8 << 20).into()));
    let (code, _, error) = ask(dir, &["attach", &uri]);
    assert!(code == 1 && error.contains("attached already"), "{error}");
    let mut s = session_of(dir, "more");
    assert!(read(&mut *s, 0, 1 << 20).iter().all(|&b| b == 3));
    write(&mut *s, 0, 65536, 7);
    settle(dir);
    assert!(counter(&json(dir, &["status"]), "fills") >= 256);

    // A client is there: the detach waits for it, and can be interrupted.
    let mut waiting = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "detach", "more", "--state-dir"])
        .arg(dir.join("state"))
        .args(["--answer-within", "120"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let volumes = |s: &Value| s["volumes"].as_array().unwrap().len();
    status_when(dir, "closed to others", |s| volumes(s) == 1);
    assert!(waiting.try_wait().unwrap().is_none(), "it did not wait");
    // Where nobody sees a bar it says what it waits for.
    let said = BufReader::new(waiting.stderr.take().unwrap());
    let mut said = said.lines().map(Result::unwrap);
    let line = said.find(|line| line.contains("client")).unwrap_or_default();
    assert!(line.contains("waits") && line.contains("--disconnect"), "{line}");
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    status_when(dir, "back", |s| volumes(s) == 2);
    assert!(read(&mut *s, 0, 4096).iter().all(|&b| b == 7));

    let totals = |s: &Value| {
        let flash = ["client_bytes", "read_fill_bytes"].map(|name| s["flash"][name].as_u64());
        (s["totals"].clone(), flash, s["verdicts"].clone())
    };
    let before = status_when(dir, "counted", |s| s["totals"]["reads"].as_u64() >= Some(2));
    // While one waits another says why it waits too, unless it hangs up: then the first goes on.
    let waits = |args: &[&str]| {
        let mut detach = Command::new(env!("CARGO_BIN_EXE_larder"));
        detach.args(["block"]).args(args).arg("--state-dir").arg(dir.join("state"));
        detach.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let first = waits(&["detach", "more", "--json"]);
    let now = status_when(dir, "closed to others", |s| volumes(s) == 1);
    assert!(now["alarms"].to_string().contains("'more' is being detached"), "{now:#}");
    let mut second = waits(&["resize", "more"]);
    let mut said = BufReader::new(second.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = said.find(|line| line.contains("being detached")).unwrap_or_default();
    assert!(line.contains("--disconnect"), "{line}");
    second.kill().unwrap();
    second.wait().unwrap();
    let asked = Instant::now();
    let (code, _, error) = ask(dir, &["detach", "more", "--disconnect"]);
    assert!(code == 1 && error.contains("was detached meanwhile"), "{error}");
    // Whoever waits here has nothing that the other waits for.
    assert!(asked.elapsed() < Duration::from_secs(20), "{:?}", asked.elapsed());
    let first = first.wait_with_output().unwrap();
    let gone: Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!((first.status.code(), &gone["durable"]), (Some(0), &Value::Bool(true)));
    drop(s);
    let after = json(dir, &["status"]);
    assert_eq!(after["volumes"].as_array().unwrap().len(), 1);
    // Its lines are kept, and counted, and it is listed until it is back.
    let aside = |s: &Value| s["put_aside"][0]["lines"].as_u64();
    let kept = status_when(dir, "counted", |s| aside(s).is_some());
    assert_eq!(kept["put_aside"][0]["name"], "more");
    assert!(aside(&kept) >= Some(256), "{kept:#}");
    let (_, text, _) = ask(dir, &["status"]);
    assert!(text.contains("put aside") && text.contains("larder block drop"), "{text}");
    assert_eq!(totals(&after), totals(&before), "totals do not fall with a volume");
    let (code, _, error) = ask(dir, &["detach", "more"]);
    assert!(code == 1 && error.contains("put aside, and nothing of it is dirty"), "{error}");

    // Unchanged, it is warm; changed, it is not, and nothing old is read.
    assert_eq!(json(dir, &["attach", &uri])["warm"], true);
    assert_eq!(json(dir, &["status"])["put_aside"].as_array().map(Vec::len), Some(0));
    let mut s = session_of(dir, "more");
    assert!(read(&mut *s, 0, 65536).iter().all(|&b| b == 7));
    let status = json(dir, &["status"]);
    assert_eq!(status["volumes"][1]["read_hits"], 1, "{status:#}");
    drop(s);
    json(dir, &["detach", "more", "--disconnect"]);
    std::fs::File::options().write(true).open(&other).unwrap().write_all_at(&[9; 8192], 0).unwrap();
    let cold = json(dir, &["attach", &uri]);
    assert!(cold["why_cold"].as_str().unwrap().contains("change"), "{cold}");
    let mut s = session_of(dir, "more");
    assert!(read(&mut *s, 0, 8192).iter().all(|&b| b == 9));
    drop(s);
    // The first volume was not disturbed, and a kill does not bring anything back.
    daemon.kill();
    let daemon = Daemon::start(dir, &["--volume", &uri]);
    let mut s = session_of(dir, "more");
    assert!(read(&mut *s, 0, 8192).iter().all(|&b| b == 9));
    assert!(read(&mut *s, 8192, 4096).iter().all(|&b| b == 7));
    drop(s);
    daemon.stop();
}

/// What is not attached is known until it is dropped: then its lines, its name and what was selected of it are gone.
#[test]
fn a_volume_that_was_put_aside_is_forgotten() {
    for placement in ["set:8", "full", "sparse"] {
        forgotten(placement);
    }
}

fn forgotten(placement: &str) {
    let dir = prepare(placement);
    let dir = dir.path();
    let other = dir.join("other");
    std::fs::write(&other, vec![3u8; 8 << 20]).unwrap();
    let uri = format!("more=file:{}", other.display());
    let daemon = Daemon::start(dir, &[]);
    let fill = || {
        let mut s = session_of(dir, "more");
        assert!(read(&mut *s, 0, 1 << 20).iter().all(|&b| b == 3));
        settle(dir);
    };
    let mut s = session(dir);
    write(&mut *s, 0, 1 << 20, 5);
    json(dir, &["attach", &uri]);
    fill();
    json(dir, &["pin", "more"]);
    json(dir, &["detach", "more", "--disconnect"]);
    let (code, _, error) = ask(dir, &["drop", "mode"]);
    assert!(code == 1 && error.contains("these are: disk; put aside were: more"), "{error}");
    let gone = json(dir, &["drop", "more"]);
    assert_eq!((&gone["dropped_lines"], &gone["forgotten"]), (&256.into(), &true.into()));
    let (code, _, error) = ask(dir, &["drop", "more"]);
    assert!(code == 1 && error.contains("none was put aside"), "{error}");
    // Lines of others stay, and of those that are attached the names.
    let hits = |dir| json(dir, &["status"])["volumes"][0]["read_hits"].as_u64().unwrap();
    let before = hits(dir);
    assert!(read(&mut *s, 0, 1 << 20).iter().all(|&b| b == 5));
    assert_eq!(hits(dir), before + 1);
    assert_eq!(json(dir, &["drop", "disk"])["forgotten"], false);
    drop(s);

    let new = json(dir, &["attach", &uri]);
    assert_eq!(new["why_cold"], "it is new to this cache");
    let selected = &json(dir, &["status"])["volumes"][1];
    assert_eq!((&selected["rule"], &selected["selected"]), (&"policy".into(), &0.into()));
    fill();
    json(dir, &["detach", "more", "--disconnect"]);
    // A store that became smaller is refused until what was known of it is forgotten.
    std::fs::File::options().write(true).open(&other).unwrap().set_len(4 << 20).unwrap();
    let (code, _, error) = ask(dir, &["attach", &uri]);
    assert!(code == 1 && error.contains("larder block drop"), "{error}");
    let (code, text, _) = ask(dir, &["drop", "more"]);
    assert!(code == 0 && text.contains("256 lines dropped; it was not attached"), "{text}");
    // It is forgotten for good.
    daemon.kill();
    let daemon = Daemon::start(dir, &[]);
    let new = json(dir, &["attach", &uri]);
    assert_eq!(
        (&new["why_cold"], &new["bytes"]),
        (&"it is new to this cache".into(), &(4 << 20).into())
    );
    fill();
    daemon.stop();
    // Nor does a volume stay known that a start has left out.
    let daemon = Daemon::start(dir, &[]);
    assert_eq!(json(dir, &["drop", "more"])["dropped_lines"], 256);
    daemon.stop();
    let mut check = Command::new(env!("CARGO_BIN_EXE_larder"));
    let output = check.args(["block", "check", "--json"]).arg(dir.join("cache")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("\"disk\"") && !text.contains("\"more\""), "{text}");
}

#[test]
fn wrong_use_of_the_commands() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let (code, _, error) = ask(dir, &["status"]);
    assert!(
        code == 1 && error.contains("no daemon answers at") && error.contains("--control"),
        "{error}"
    );
    let daemon = Daemon::start(dir, &[]);
    let table: [(&[&str], i32, &str); 9] = [
        (&["attach", "x"], 2, "NAME=URI"),
        (&["attach", "x=ftp:y"], 2, "does not name a backing store"),
        (&["attach", "x=file:/nowhere/x"], 1, "/nowhere/x"),
        (&["attach", "x=nbd+unix:///e?socket=/nowhere/s"], 1, "there is no socket '/nowhere/s'"),
        (&["explain", "disk", "1q"], 2, "as in 8m or 1g"),
        (&["detach", "none"], 1, "'none'"),
        (&["drop", "none"], 1, "these are: disk"),
        (&["explain", "disk", "99999999999"], 1, "it has 33554432 bytes"),
        (&["explain", "disk", "99999999999999999999"], 2, "99999999999999999999"),
    ];
    for (arguments, want, text) in table {
        let (code, _, error) = ask(dir, arguments);
        assert_eq!(code, want, "{arguments:?}: {error}");
        assert!(error.contains(text), "'{text}' is not in: {error}");
    }
    // What is no request is refused, and the daemon goes on.
    let socket = dir.join("state").join("block.sock");
    for wrong in [&b"\n"[..], b"{}\n", b"\xff\xfe\n", b"{\"do\":\"status\"", &[b'['; 100_000]] {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.write_all(wrong).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        std::io::Read::read_to_string(&mut BufReader::new(stream), &mut answer).unwrap();
        assert!(answer.contains("\"error\""), "{answer}");
    }
    assert_eq!(json(dir, &["status"])["volumes"][0]["name"], "disk");
    daemon.stop();
    // A default socket that is in use costs the socket, one that was asked for the start.
    let (code, message) = larder(&[
        "serve",
        "--cache",
        "/nowhere",
        "--listen",
        "unix:/nowhere/s",
        "--volume",
        "a=file:/nowhere",
    ]);
    assert!(code == Some(1) && message.contains("larder block format /nowhere"), "{message}");
    // What holds data is no cache, and nobody is told to format it or to make it anew.
    let (made, absent) = (dir.join("made"), dir.join("absent"));
    let (made, absent) = (made.to_str().unwrap(), absent.to_str().unwrap());
    let create = ["create", &format!("file:{made}"), "--size", "1m"];
    assert_eq!(larder(&create).0, Some(0));
    let table: [(&[&str], i32, &str); 3] = [
        (&create, 1, "it is there already"),
        (&["check", made], 1, "is no block cache"),
        (&["format", absent], 2, "--size"),
    ];
    for (arguments, want, text) in table {
        let (code, message) = larder(arguments);
        assert!(code == Some(want) && message.contains(text), "{arguments:?}: {message}");
    }
}

/// A guest's disk is a client too: a detach waits for it or hangs up, the store is let go of, and the disk is there again
/// when the volume comes back.
#[test]
fn a_disk_of_a_guest_is_put_aside_and_comes_back() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let path = dir.join("vhost");
    let listen = format!("vhost:{},volume=disk", path.display());
    let daemon = Daemon::start(dir, &["--listen", &listen]);
    let connect = || {
        let mut guest = UnixStream::connect(&path).unwrap();
        guest.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        // VHOST_USER_GET_FEATURES: 12 bytes of header, and as much with eight bytes more comes back.
        guest.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        std::io::Read::read_exact(&mut guest, &mut [0; 20]).unwrap();
        guest
    };
    let mut guest = connect();
    assert_eq!(
        status_when(dir, "there", |s| s["volumes"][0]["clients"] == 1)["volumes"][0]["name"],
        "disk"
    );
    // Which face it is, and what it has come to; a larger volume is told of, or to be connected to again.
    let face = &json(dir, &["status"])["faces"][0];
    assert_eq!((&face["face"], &face["volume"]), (&"vhost-user-blk".into(), &"disk".into()));
    assert_eq!((&face["connected"], &face["grows"]), (&true.into(), &false.into()), "{face}");
    assert_eq!((&face["queues"], &face["bytes"]), (&0.into(), &(32 << 20).into()), "{face}");
    let (code, text, _) = ask(dir, &["status"]);
    assert!(code == 0 && text.contains("a guest's disk of 32 MiB, 0 queues of 0"), "{text}");
    let (code, text, _) = ask(dir, &["resize", "disk", "40m"]);
    assert!(code == 0 && text.contains("1 client keeps the old size"), "{text}");
    status_when(dir, "larger", |s| s["faces"][0]["bytes"] == 40 << 20);
    let mut waiting = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "detach", "disk", "--state-dir"])
        .arg(dir.join("state"))
        .args(["--answer-within", "120"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let volumes = |s: &Value| s["volumes"].as_array().unwrap().len();
    status_when(dir, "closed to others", |s| volumes(s) == 0);
    assert!(waiting.try_wait().unwrap().is_none(), "it did not wait");
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    status_when(dir, "back", |s| volumes(s) == 1);

    let disk = std::fs::File::options().read(true).write(true).open(dir.join("disk")).unwrap();
    let lock = || rustix::fs::flock(&disk, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    assert!(lock().is_err(), "the daemon has it");
    assert_eq!(json(dir, &["detach", "disk", "--disconnect"])["durable"], true);
    assert_eq!(std::io::Read::read(&mut guest, &mut [0; 1]).unwrap(), 0, "hung up");
    lock().expect("its lease is given back");
    rustix::fs::flock(&disk, rustix::fs::FlockOperation::Unlock).unwrap();
    json(dir, &["attach", &format!("disk=file:{}", dir.join("disk").display())]);
    let guest = connect();
    status_when(dir, "there again", |s| s["volumes"][0]["clients"] == 1);
    drop(guest);
    status_when(dir, "gone", |s| s["volumes"][0]["clients"] == 0);
    daemon.stop();
}

/// A volume that is served is not formatted, nor is the cache's own file served; a relative path means the directory of
/// whoever asks.
#[test]
fn what_is_in_use_is_neither_formatted_nor_attached() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    let before = std::fs::read(dir.join("disk")).unwrap();
    let format = |path: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        let output = command.args(["block", "format"]).arg(dir.join(path)).args(more).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, error) = format("disk", &["--yes"]);
    assert!(code != Some(0) && error.contains("in use"), "{code:?} {error}");
    assert!(std::fs::read(dir.join("disk")).unwrap() == before);
    for link in [false, true] {
        let name = if link { "hard" } else { "cache" };
        if link {
            std::fs::hard_link(dir.join("cache"), dir.join("hard")).unwrap();
        }
        let uri = format!("own=file:{}", dir.join(name).display());
        let (code, _, error) = ask(dir, &["attach", &uri]);
        assert!(code == 1 && error.contains("the cache of this daemon itself"), "{code} {error}");
    }
    std::fs::create_dir(dir.join("sub")).unwrap();
    std::fs::File::create(dir.join("sub").join("rel.img")).unwrap().set_len(5 << 20).unwrap();
    let attached = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "attach", "rel=file:rel.img", "--state-dir"])
        .arg(dir.join("state"))
        .args(["--answer-within", "120"])
        .current_dir(dir.join("sub"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&attached.stdout).into_owned();
    assert!(attached.status.success() && text.contains("5 MiB"), "{text} {attached:?}");
    daemon.stop();
    // What begins far behind the places of signatures is somebody's too.
    let late = std::fs::File::create(dir.join("late")).unwrap();
    late.set_len(64 << 20).unwrap();
    late.write_all_at(b"dear diary", 5 << 20).unwrap();
    let (code, error) = format("late", &[]);
    assert!(code == Some(2) && error.contains("not zero) at byte 5242880"), "{code:?} {error}");
}
