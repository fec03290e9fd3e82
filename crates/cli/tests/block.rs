//! `larder block` as a process: what is cached survives kill -9 and a clean stop, and the volume is always right.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test of a process waits for it"
)]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use larder_block::backing::{self, Patience, Session};
use larder_block::op::Op;
use larder_runtime::{AlignedBuf, Payload};
use tempfile::TempDir;

struct Daemon {
    child: Child,
    log: std::sync::mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl Daemon {
    fn start(dir: &Path, more: &[&str]) -> Daemon {
        let mut child = Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["block", "serve", "--cache"])
            .arg(dir.join("cache"))
            .arg("--volume")
            .arg(format!("disk=file:{}", dir.join("disk").display()))
            .arg("--listen")
            .arg(format!("unix:{}", dir.join("socket").display()))
            .arg("--state-dir")
            .arg(dir.join("state"))
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = child.stderr.take().unwrap();
        let (tell, log) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let mut daemon = Daemon { child, log, seen: Vec::new() };
        daemon.wait_for("ready");
        daemon
    }

    fn wait_for(&mut self, what: &str) -> String {
        let end = Instant::now() + Duration::from_secs(60);
        while Instant::now() < end {
            match self.log.recv_timeout(Duration::from_millis(100)) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(what) {
                        return line;
                    }
                }
                Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
                Err(_) => break,
            }
        }
        panic!("no '{what}' in the log: {:#?}", self.seen);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn stop(mut self) {
        self.signal(rustix::process::Signal::TERM);
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }

    /// A line of the counters that says `what`, asked for until it does.
    fn counters(&mut self, what: &str) -> String {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            self.signal(rustix::process::Signal::USR1);
            let line = self.wait_for("lines read");
            if line.contains(what) || Instant::now() > end {
                return line;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn session(dir: &Path) -> Box<dyn Session> {
    let uri = format!("nbd+unix:///disk?socket={}", dir.join("socket").display());
    let backing = backing::open(&uri.parse().unwrap(), false, false, Patience::default()).unwrap();
    backing.session().unwrap()
}

fn one(session: &mut dyn Session, op: Op) -> Op {
    session.submit(1, op);
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        session.flush(Instant::now());
        session.turn(Instant::now());
        if let Some(done) = session.pop() {
            done.outcome.unwrap();
            return done.op;
        }
        assert!(Instant::now() < end, "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn write(session: &mut dyn Session, offset: u64, len: usize, fill: u8) {
    let mut buf = AlignedBuf::zeroed(len);
    buf.fill(fill);
    one(session, Op::Write { offset, data: Payload::new(buf), fua: false });
}

fn read(session: &mut dyn Session, offset: u64, len: usize) -> Vec<u8> {
    let Op::Read { buf, .. } = one(session, Op::Read { offset, buf: AlignedBuf::zeroed(len) })
    else {
        panic!()
    };
    buf.to_vec()
}

fn larder(arguments: &[&str]) -> (Option<i32>, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_larder")).arg("block").args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn prepare() -> TempDir {
    let dir = TempDir::new().unwrap();
    let cache = dir.path().join("cache");
    let (code, message) = larder(&["format", cache.to_str().unwrap(), "--size", "64m"]);
    assert_eq!(code, Some(0), "{message}");
    File::create(dir.path().join("disk")).unwrap().set_len(32 << 20).unwrap();
    dir
}

#[test]
fn warm_after_kill_and_after_a_clean_stop() {
    let dir = prepare();
    let mut daemon = Daemon::start(dir.path(), &[]);
    let mut s = session(dir.path());
    write(&mut *s, 0, 1 << 20, 5);
    read(&mut *s, 2 << 20, 1 << 20);
    let filled = daemon.counters("filled 512");
    assert!(filled.contains("filled 512"), "{filled}");
    daemon.kill();

    let mut daemon = Daemon::start(dir.path(), &[]);
    assert!(
        daemon.seen.iter().any(|l| l.contains("warm from memory") && l.contains("512 lines")),
        "{:?}",
        daemon.seen
    );
    let mut s = session(dir.path());
    assert!(read(&mut *s, 0, 1 << 20).iter().all(|&b| b == 5));
    let counters = daemon.counters("100.0 % from flash");
    assert!(counters.contains("100.0 % from flash"), "{counters}");
    // The update is in both places.
    write(&mut *s, 0, 4096, 6);
    drop(s);
    daemon.stop();

    let daemon = Daemon::start(dir.path(), &[]);
    assert!(
        daemon.seen.iter().any(|l| l.contains("warm from the device") && l.contains("512 lines")),
        "{:?}",
        daemon.seen
    );
    let mut s = session(dir.path());
    assert!(read(&mut *s, 0, 4096).iter().all(|&b| b == 6));
    assert!(read(&mut *s, 4096, 4096).iter().all(|&b| b == 5));
    drop(s);
    daemon.stop();
    let mut disk = vec![0u8; 8192];
    File::open(dir.path().join("disk")).unwrap().read_exact_at(&mut disk, 0).unwrap();
    assert!(disk[..4096].iter().all(|&b| b == 6) && disk[4096..].iter().all(|&b| b == 5));

    // Somebody else writes to the volume: what was cached of it is not used.
    File::options()
        .write(true)
        .open(dir.path().join("disk"))
        .unwrap()
        .write_all_at(&[9; 4096], 0)
        .unwrap();
    let daemon = Daemon::start(dir.path(), &[]);
    let mut s = session(dir.path());
    assert!(read(&mut *s, 0, 4096).iter().all(|&b| b == 9));
    drop(s);
    daemon.stop();
}

/// A thousand writes, each a version of its place; kill -9 in between; no place is ever older than what was answered.
#[test]
fn kills_lose_no_answered_write() {
    let dir = prepare();
    let mut versions = [0u8; 64];
    for round in 0..4u8 {
        let daemon = Daemon::start(
            dir.path(),
            &["--write", ["hdd-ssd", "hdd-upd", "hdd-inv"][usize::from(round) % 3]],
        );
        let mut s = session(dir.path());
        for (place, version) in versions.iter().enumerate() {
            let bytes = read(&mut *s, place as u64 * 6144, 6144);
            assert!(
                bytes.iter().all(|b| b == version),
                "round {round}, place {place}: {} for {version}",
                bytes[0]
            );
        }
        for i in 0..60u8 {
            let place = usize::from(i.wrapping_mul(37).wrapping_add(round)) % versions.len();
            versions[place] = round * 60 + i + 1;
            write(&mut *s, place as u64 * 6144, 6144, versions[place]);
        }
        daemon.kill();
    }
}

#[test]
fn wrong_use() {
    let dir = prepare();
    let cache = dir.path().join("cache");
    let cache = cache.to_str().unwrap();
    let disk = format!("disk=file:{}", dir.path().join("disk").display());
    let socket = format!("unix:{}", dir.path().join("socket").display());
    let serve = |more: &[&str]| {
        let mut arguments = vec!["serve", "--cache", cache, "--listen", &socket];
        arguments.extend(more);
        larder(&arguments)
    };
    let table = [
        (larder(&["format", cache, "--size", "64m"]), 2, "--yes"),
        (larder(&["format", cache, "--line", "5k", "--yes"]), 2, "a line of 5120 bytes"),
        (
            larder(&["format", cache, "--placement", "set:99", "--yes"]),
            2,
            "set:W with W from 2 to 16",
        ),
        (serve(&["--volume", "disk"]), 2, "NAME=URI"),
        (serve(&["--volume", "disk=ftp:x"]), 2, "does not name a backing store"),
        (serve(&["--volume", &disk, "--admission", "best"]), 2, "best"),
        (serve(&["--volume", "disk=file:/nowhere/disk"]), 1, "/nowhere/disk"),
        (
            larder(&["serve", "--cache", "/nowhere/cache", "--volume", &disk, "--listen", &socket]),
            1,
            "/nowhere/cache",
        ),
    ];
    for ((code, message), want, text) in table {
        assert_eq!(code, Some(want), "{message}");
        assert!(message.contains(text), "'{text}' is not in: {message}");
    }
    // Two daemons on one cache.
    let daemon = Daemon::start(dir.path(), &[]);
    let (code, message) = serve(&["--volume", &disk]);
    assert!(code == Some(1) && message.contains("in use"), "{message}");
    daemon.stop();
    // A volume that shrank.
    File::options().write(true).open(dir.path().join("disk")).unwrap().set_len(1 << 20).unwrap();
    let (code, message) = serve(&["--volume", &disk]);
    assert!(code == Some(1) && message.contains("1048576 bytes but had 33554432"), "{message}");
}

/// Clients that ask for megabytes and hang up before the answer: writing to them must only fail. (SIGPIPE ended the daemon.)
#[test]
fn clients_that_hang_up_do_not_end_the_daemon() {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    let dir = prepare();
    let daemon = Daemon::start(dir.path(), &[]);
    for _ in 0..30 {
        let mut client = UnixStream::connect(dir.path().join("socket")).unwrap();
        let mut greeting = [0u8; 18];
        client.read_exact(&mut greeting).unwrap();
        // Fixed newstyle without zeroes, then NBD_OPT_EXPORT_NAME "disk", whose answer is 8 bytes of size and 2 of flags.
        let mut hello = 3u32.to_be_bytes().to_vec();
        hello.extend_from_slice(b"IHAVEOPT");
        hello.extend_from_slice(&1u32.to_be_bytes());
        hello.extend_from_slice(&4u32.to_be_bytes());
        hello.extend_from_slice(b"disk");
        client.write_all(&hello).unwrap();
        client.read_exact(&mut [0u8; 10]).unwrap();
        let mut requests = Vec::new();
        for i in 0..16u64 {
            requests.extend_from_slice(&0x2560_9513u32.to_be_bytes());
            requests.extend_from_slice(&[0, 0, 0, 0]);
            requests.extend_from_slice(&i.to_be_bytes());
            requests.extend_from_slice(&(i << 20).to_be_bytes());
            requests.extend_from_slice(&(1u32 << 20).to_be_bytes());
        }
        client.write_all(&requests).unwrap();
    }
    let mut s = session(dir.path());
    assert_eq!(read(&mut *s, 0, 4096).len(), 4096);
    drop(s);
    daemon.stop();
}
