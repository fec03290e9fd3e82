//! `larder block serve` as a process of a test, and a client of it.

pub(crate) mod ask;
pub(crate) mod records;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use larder_block::backing::{self, Session, Timeouts};
use larder_block::op::{Failure, Op};
use larder_runtime::{AlignedBuf, Payload};
use tempfile::TempDir;

pub(crate) struct Daemon {
    pub(crate) child: Child,
    log: std::sync::mpsc::Receiver<String>,
    pub(crate) seen: Vec<String>,
}

impl Daemon {
    pub(crate) fn start(dir: &Path, more: &[&str]) -> Daemon {
        let cache = dir.join("cache");
        Daemon::start_by(Command::new(env!("CARGO_BIN_EXE_larder")), dir, &cache, more)
    }

    /// Started by a command that takes the arguments of larder.
    pub(crate) fn start_by(mut by: Command, dir: &Path, cache: &Path, more: &[&str]) -> Daemon {
        by.args(["block", "serve", "--cache"])
            .arg(cache)
            .arg("--volume")
            .arg(format!("disk=file:{}", dir.join("disk").display()))
            .arg("--listen")
            .arg(format!("unix:{}", dir.join("socket").display()))
            .arg("--state-dir")
            .arg(dir.join("state"))
            .args(more);
        Daemon::of(by)
    }

    /// This command, once it is ready.
    pub(crate) fn of(mut command: Command) -> Daemon {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
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

    /// Whether the log has said it by now.
    pub(crate) fn said(&mut self, what: &str) -> bool {
        self.seen.extend(self.log.try_iter());
        self.seen.iter().any(|line| line.contains(what))
    }

    pub(crate) fn wait_for(&mut self, what: &str) -> String {
        let end = Instant::now() + Duration::from_secs(120);
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

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn stop(mut self) {
        self.signal(rustix::process::Signal::TERM);
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}");
    }

    /// A line of the counters that says `what`, asked for until it does.
    pub(crate) fn counters(&mut self, what: &str) -> String {
        let end = Instant::now() + Duration::from_secs(120);
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

/// A test that fails leaves no daemon behind.
impl Drop for Daemon {
    fn drop(&mut self) {
        // One that has been waited for is gone, and its number is not used again.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn session(dir: &Path) -> Box<dyn Session> {
    session_of(dir, "disk")
}

pub(crate) fn session_of(dir: &Path, volume: &str) -> Box<dyn Session> {
    let uri = format!("nbd+unix:///{volume}?socket={}", dir.join("socket").display());
    let backing = backing::open(&uri.parse().unwrap(), false, false, Timeouts::default()).unwrap();
    backing.session().unwrap()
}

pub(crate) fn one(session: &mut dyn Session, op: Op) -> Op {
    try_one(session, op).unwrap()
}

pub(crate) fn try_one(session: &mut dyn Session, op: Op) -> Result<Op, Failure> {
    session.submit(1, op);
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        session.flush(Instant::now());
        session.turn(Instant::now());
        if let Some(done) = session.pop() {
            return done.outcome.map(|_| done.op);
        }
        assert!(Instant::now() < end, "no answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn write(session: &mut dyn Session, offset: u64, len: usize, fill: u8) {
    let mut buf = AlignedBuf::zeroed(len);
    buf.fill(fill);
    one(session, Op::Write { offset, data: Payload::new(buf), fua: false });
}

pub(crate) fn read(session: &mut dyn Session, offset: u64, len: usize) -> Vec<u8> {
    let Op::Read { buf, .. } = one(session, Op::Read { offset, buf: AlignedBuf::zeroed(len) })
    else {
        panic!()
    };
    buf.to_vec()
}

pub(crate) fn larder(arguments: &[&str]) -> (Option<i32>, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_larder")).arg("block").args(arguments).output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

pub(crate) fn prepare(placement: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    let cache = dir.path().join("cache");
    let format = ["format", cache.to_str().unwrap(), "--size", "64m", "--placement", placement];
    let (code, message) = larder(&format);
    assert_eq!(code, Some(0), "{message}");
    File::create(dir.path().join("disk")).unwrap().set_len(32 << 20).unwrap();
    dir
}
