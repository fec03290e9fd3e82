//! What goes wrong around a daemon, and how its operator comes to know: stores that are lost, full or cut short, a second daemon,
//! one file by two names, clients that TLS keeps out, connections that ask nothing.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::daemon::ask::{ask, json, status_when};
use crate::daemon::{Daemon, larder, prepare, read, session, session_of, try_one, write};
use larder_block::op::Op;
use larder_runtime::{AlignedBuf, Payload};
use rcgen::{CertificateParams, KeyPair};

const MIB: u64 = 1 << 20;

fn metric(port: u16, name: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.lines().find(|l| l.starts_with(name)).unwrap_or_default().to_owned()
}

/// The port of the live page.
fn page(daemon: &Daemon) -> u16 {
    let line = daemon.seen.iter().find(|l| l.contains("live page http://")).unwrap();
    let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap();
    address.rsplit_once(':').unwrap().1.parse().unwrap()
}

/// A daemon serves what another daemon has, which is killed: who asks sees it, a detach ends, and it comes back.
#[test]
fn a_store_that_is_lost_is_seen() {
    let far = prepare("set:8");
    let near = prepare("set:8");
    let (far, near) = (far.path(), near.path());
    let store = Daemon::start(far, &[]);
    let uri = format!("far=nbd+unix:///disk?socket={}", far.join("socket").display());
    let mut daemon = Daemon::start(near, &["--volume", &uri, "--http", "127.0.0.1:0"]);
    let mut s = session_of(near, "far");
    write(&mut *s, 0, 65536, 3);
    let of = |status: &serde_json::Value| {
        let all = status["volumes"].as_array().unwrap().clone();
        all.into_iter().find(|v| v["name"] == "far").unwrap()["store"].clone()
    };
    assert_eq!(of(&json(near, &["status"]))["state"], "ok");
    store.kill();
    let status = status_when(near, "lost", |s| of(s)["state"] == "lost");
    let alarms = status["alarms"].to_string();
    assert!(alarms.contains("volume 'far'") && alarms.contains("is not reached"), "{alarms}");
    assert!(of(&status)["since_seconds"].as_u64().is_some());
    daemon.wait_for("connection lost");
    assert!(
        metric(page(&daemon), "larder_block_volume_store_usable{volume=\"far\"}").ends_with(" 0.0")
    );
    let (_, text, _) = ask(near, &["status"]);
    assert!(text.contains("lost for "), "{text}");

    // A request waits for it: the detach does not wait as long as that.
    s.submit(7, Op::Read { offset: 4 * MIB, buf: AlignedBuf::zeroed(4096) });
    s.flush(Instant::now());
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    let (code, _, error) = ask(near, &["detach", "far", "--disconnect", "--timeout", "2"]);
    assert!(begun.elapsed() < Duration::from_secs(120), "{:?}", begun.elapsed());
    assert!(
        code == 1 && error.contains("stays attached") && error.contains("is not reached"),
        "{error}"
    );
    drop(s);

    // Nobody asks anything of it, and it is seen all the same that it is there again.
    let store = Daemon::start(far, &[]);
    status_when(near, "found", |s| of(s)["state"] == "ok");
    let mut s = session_of(near, "far");
    assert!(read(&mut *s, 0, 65536).iter().all(|&b| b == 3));
    drop(s);
    // The killed one may have lost what was not durable: then it is not said to be.
    let (code, text, error) = ask(near, &["detach", "far", "--disconnect"]);
    assert!(code == 0 && text.contains("detached"), "{text} {error}");
    daemon.stop();
    store.stop();
}

/// A file that is cut short under its server: alarmed, and what lay behind is an error, also when it has its length again.
#[test]
fn a_file_that_is_cut_short_is_seen() {
    let dir = prepare("set:8");
    let dir = dir.path();
    std::fs::write(dir.join("disk"), vec![7u8; 32 << 20]).unwrap();
    let mut daemon = Daemon::start(dir, &[]);
    let mut s = session(dir);
    assert!(read(&mut *s, 0, 4096).iter().all(|&b| b == 7));
    let file = File::options().write(true).open(dir.join("disk")).unwrap();
    file.set_len(16 << 20).unwrap();
    let status = status_when(dir, "shrunk", |s| s["volumes"][0]["store"]["state"] == "shrunk");
    let alarms = status["alarms"].to_string();
    assert!(alarms.contains("cut short") && alarms.contains("volume 'disk'"), "{alarms}");
    daemon.wait_for("was cut short");
    let read_at = |s: &mut dyn larder_block::backing::Session, offset| {
        try_one(s, Op::Read { offset, buf: AlignedBuf::zeroed(4096) })
    };
    let failure = read_at(&mut *s, 20 * MIB).unwrap_err();
    assert_eq!(failure.kind, larder_block::op::FailureKind::Failed);
    assert!(read_at(&mut *s, 8 * MIB).is_ok());
    // Zeroes where there was something are not what was written.
    file.set_len(32 << 20).unwrap();
    assert!(read_at(&mut *s, 24 * MIB).is_err());
    drop(s);
    daemon.stop();
}

/// A file that cannot be written to: the log names the volume, once in a while.
#[test]
fn a_store_that_fails_is_named() {
    let dir = prepare("set:8");
    let dir = dir.path();
    // It may not become longer than this, whoever writes.
    let mut command = Command::new("bash");
    let script = "trap '' XFSZ; ulimit -f 71680; exec \"$@\"";
    command.args(["-c", script, "bash", env!("CARGO_BIN_EXE_larder")]);
    File::create(dir.join("disk")).unwrap().set_len(96 << 20).unwrap();
    let cache = dir.join("cache");
    let mut daemon = Daemon::start_by(command, dir, &cache, &[]);
    let mut s = session(dir);
    for i in 0..20 {
        let mut buf = AlignedBuf::zeroed(4096);
        buf.fill(1);
        let op = Op::Write { offset: 80 * MIB + i * 4096, data: Payload::new(buf), fua: false };
        assert!(try_one(&mut *s, op).is_err());
    }
    let line = daemon.wait_for("volume 'disk'");
    assert!(line.contains("write of 4096 bytes") && !line.contains("os error"), "{line}");
    let status = json(dir, &["status"]);
    let store = &status["volumes"][0]["store"];
    assert!(store["state"] == "failing" && store["failures"].as_u64().unwrap() >= 20, "{store}");
    assert_eq!(daemon.seen.iter().filter(|l| l.contains("volume 'disk': write")).count(), 1);
    drop(s);
    daemon.stop();
}

#[test]
fn one_state_directory_one_daemon() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    let at = |name: &str| dir.join(name).display().to_string();
    let second = at("second");
    assert_eq!(larder(&["format", &second, "--size", "64m"]).0, Some(0));
    File::create(dir.join("more")).unwrap().set_len(8 << 20).unwrap();
    let (volume, listen) = (format!("more=file:{}", at("more")), format!("unix:{}", at("other")));
    let state = at("state");
    let arguments = [
        "serve",
        "--cache",
        &second,
        "--volume",
        &volume,
        "--listen",
        &listen,
        "--state-dir",
        &state,
    ];
    let (code, error) = larder(&arguments);
    let pid = format!("process {}", daemon.child.id());
    let last = error.trim().lines().last().unwrap_or_default();
    assert!(
        code == Some(1)
            && last.contains(&state)
            && last.contains(&pid)
            && last.contains("--state-dir"),
        "{code:?} {error}"
    );
    daemon.kill();
    // Nobody has it any more, though nobody cleaned up.
    Daemon::start(dir, &[]).stop();
}

#[test]
fn one_file_is_one_volume() {
    let dir = prepare("set:8");
    let dir = dir.path();
    std::fs::hard_link(dir.join("disk"), dir.join("again")).unwrap();
    let uri = format!("again=file:{}", dir.join("again").display());
    let daemon = Daemon::start(dir, &["--no-lease"]);
    let (code, _, error) = ask(dir, &["attach", &uri]);
    assert!(code == 1 && error.contains("is volume 'disk' already"), "{code} {error}");
    assert_eq!(json(dir, &["status"])["volumes"].as_array().unwrap().len(), 1);
    daemon.stop();
    let at = |name: &str| dir.join(name).display().to_string();
    let (disk, listen) = (format!("disk=file:{}", at("disk")), format!("unix:{}", at("socket")));
    let (cache, state) = (at("cache"), at("state"));
    let arguments = [
        "serve",
        "--no-lease",
        "--cache",
        &cache,
        "--volume",
        &disk,
        "--volume",
        &uri,
        "--listen",
        &listen,
        "--state-dir",
        &state,
    ];
    let (code, error) = larder(&arguments);
    assert!(code == Some(2) && error.contains("is volume 'disk' already"), "{code:?} {error}");
    // With a lease it is the lock that says so, and it is not another process that has it.
    let daemon = Daemon::start(dir, &[]);
    let (code, _, error) = ask(dir, &["attach", &uri]);
    assert!(code == 1 && error.contains("locked by this daemon itself"), "{code} {error}");
    daemon.stop();
}

/// A volume smaller than a page that is served is not made a cache.
#[test]
fn a_small_file_that_is_served_is_not_formatted() {
    let dir = prepare("set:8");
    let dir = dir.path();
    std::fs::write(dir.join("disk"), [9u8; 2048]).unwrap();
    let daemon = Daemon::start(dir, &[]);
    let disk = dir.join("disk").display().to_string();
    for placement in ["sparse:1g", "set:8"] {
        let (code, error) =
            larder(&["format", &disk, "--size", "64m", "--placement", placement, "--yes"]);
        assert!(code == Some(1) && error.contains("in use"), "{placement}: {code:?} {error}");
    }
    assert_eq!(std::fs::read(dir.join("disk")).unwrap(), [9u8; 2048]);
    daemon.stop();
    let nothing = dir.join("nothing").display().to_string();
    let (_, error) = larder(&["format", &nothing]);
    assert!(error.contains("(--size)"), "{error}");
}

/// Whoever connects to the control socket and asks nothing does not keep the operator out.
#[test]
fn idle_control_connections_make_way() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    let idle: Vec<UnixStream> = (0..40)
        .map(|_| UnixStream::connect(dir.join("state").join("block.sock")).unwrap())
        .collect();
    for _ in 0..5 {
        json(dir, &["status"]);
    }
    drop(idle);
    daemon.stop();
}

fn plain_client(port: u16) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut hello = 3u32.to_be_bytes().to_vec();
    hello.extend(b"IHAVEOPT");
    hello.extend(3u32.to_be_bytes());
    hello.extend(0u32.to_be_bytes());
    stream.write_all(&hello).unwrap();
    // TLS is required: it goes.
    stream.read_exact(&mut [0; 20]).unwrap();
}

/// TLS begins, and what follows is none.
fn broken_client(port: u16) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut hello = 3u32.to_be_bytes().to_vec();
    hello.extend(b"IHAVEOPT");
    hello.extend(5u32.to_be_bytes());
    hello.extend(0u32.to_be_bytes());
    stream.write_all(&hello).unwrap();
    stream.read_exact(&mut [0; 20]).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn clients_that_tls_keeps_out_are_counted_and_named() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = certificate.self_signed(&key).unwrap();
    std::fs::write(dir.join("cert"), certificate.pem()).unwrap();
    std::fs::write(dir.join("key"), key.serialize_pem()).unwrap();
    let at = |name: &str| dir.join(name).display().to_string();
    let (cert, key) = (at("cert"), at("key"));
    let flags = [
        "--tls-certificate",
        &cert,
        "--tls-key",
        &key,
        "--listen",
        "tcp:127.0.0.1:0",
        "-t",
        "1",
        "--http",
        "127.0.0.1:0",
    ];
    let mut daemon = Daemon::start(dir, &flags);
    let begun = Instant::now();
    let ready = daemon.seen.iter().find(|l| l.contains("ready: ")).unwrap();
    let port: u16 = ready.rsplit_once(':').unwrap().1.trim().parse().unwrap();
    plain_client(port);
    let line = daemon.wait_for("is refused");
    assert!(line.contains("127.0.0.1:") && line.contains("TLS is required"), "{line}");
    for _ in 0..10 {
        broken_client(port);
    }
    status_when(dir, "counted", |s| s["connections"]["tls_refused"] == 11);
    let page = page(&daemon);
    assert!(metric(page, "larder_block_connections_tls_refused_total").ends_with(" 11"));
    daemon.said("");
    // One line in a while, however many they are.
    let said = daemon.seen.iter().filter(|l| l.contains("is refused")).count() as u64;
    assert!((1..=1 + begun.elapsed().as_secs() / 10).contains(&said), "{:#?}", daemon.seen);
    daemon.stop();
}

/// What a cache that is gone has left in memory goes with the next start.
#[test]
fn the_memory_of_a_cache_that_is_gone_is_removed() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    let uuid = json(dir, &["status"])["cache"]["uuid"].as_str().unwrap().to_owned();
    let memory = Path::new("/dev/shm").join(format!("larder-{uuid}"));
    assert!(memory.exists());
    daemon.kill();
    std::fs::remove_file(dir.join("cache")).unwrap();
    let cache = dir.join("cache2");
    assert_eq!(larder(&["format", &cache.display().to_string(), "--size", "64m"]).0, Some(0));
    let command = Command::new(env!("CARGO_BIN_EXE_larder"));
    let daemon = Daemon::start_by(command, dir, &cache, &[]);
    assert!(!memory.exists());
    daemon.stop();
}

#[test]
fn what_is_wrong_is_said_by_the_name_of_its_flag() {
    let dir = prepare("set:8");
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (cache, disk, socket, state) = (
        at("cache"),
        format!("disk=file:{}", at("disk")),
        format!("unix:{}", at("socket")),
        at("state"),
    );
    let base =
        ["serve", "--cache", &cache, "--volume", &disk, "--listen", &socket, "--state-dir", &state];
    for (more, says) in [
        (["--endurance-tbw", "0.0000000001"], "endurance"),
        (["--http", "192.0.2.1:80"], "no address of this machine"),
    ] {
        let (code, error) = larder(&[&base[..], &more[..]].concat());
        assert!(code != Some(0), "{more:?} {code:?} {error}");
        let wrong = error.contains("write_budget.") || error.contains("os error");
        assert!(!wrong && error.contains(says), "{more:?}: {code:?} {error}");
    }
}

/// A cache file and its copy, used in turn on one host: the memory that one leaves behind is not the other's, although both have
/// been started as often.
#[test]
fn the_memory_of_a_copied_cache_is_not_taken_for_the_others() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let (cache, copy) = (dir.join("cache"), dir.join("copy"));
    let serve = |cache: &Path| {
        let mut daemon =
            Daemon::start_by(Command::new(env!("CARGO_BIN_EXE_larder")), dir, cache, &[]);
        let how = daemon.seen.iter().find(|l| l.contains("of DRAM for the map")).cloned();
        assert!(!daemon.said("panicked"));
        (daemon, how.unwrap())
    };
    let (daemon, _) = serve(&cache);
    let mut s = session(dir);
    write(&mut *s, 0, 1 << 20, 1);
    drop(s);
    daemon.kill();
    std::fs::copy(&cache, &copy).unwrap();
    let (daemon, how) = serve(&cache);
    assert!(how.contains("warm from memory"), "{how}");
    let mut s = session(dir);
    write(&mut *s, 0, 1 << 20, 2);
    drop(s);
    daemon.kill();
    for (served, value) in [(&copy, 3), (&cache, 4), (&copy, 5)] {
        let (daemon, how) = serve(served);
        assert!(!how.contains("warm from memory"), "{}: {how}", served.display());
        let mut s = session(dir);
        let before = read(&mut *s, 0, 1 << 20);
        assert!(before.iter().all(|&b| b == value - 1), "{} for {}", before[0], value - 1);
        write(&mut *s, 0, 1 << 20, value);
        drop(s);
        // The last one leaves no memory behind.
        if value == 5 { daemon.stop() } else { daemon.kill() }
    }
}
