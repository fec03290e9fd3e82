//! A daemon as a process, and a client of it.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use larder_block::backing::{self, Session, Timeouts};
use larder_block::control::client;
use larder_block::control::protocol::Request;
use larder_block::op::{Done, Failure, Op};
use larder_runtime::{AlignedBuf, Payload};
use serde_json::Value;

/// For the object store of `s3.rs`.
pub(crate) const CREDENTIALS: [(&str, &str); 4] = [
    ("NO_PROXY", "127.0.0.1"),
    ("AWS_ACCESS_KEY_ID", "larder"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
    ("AWS_REGION", "us-east-1"),
];

pub(crate) fn larder(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(arguments)
        .envs(CREDENTIALS)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), text + &String::from_utf8_lossy(&output.stdout))
}

/// A host: its own cache, its own state, its own socket.
pub(crate) struct Host {
    dir: PathBuf,
    uri: String,
    more: Vec<String>,
}

impl Host {
    /// A host below `dir`, in front of the store `uri`.
    pub(crate) fn new(dir: &Path, name: &str, uri: &str, more: &[&str]) -> Host {
        Host::placing("set:8", dir, name, uri, more)
    }

    /// The same with another placement.
    pub(crate) fn placing(
        placement: &str,
        dir: &Path,
        name: &str,
        uri: &str,
        more: &[&str],
    ) -> Host {
        let dir = dir.join(name);
        std::fs::create_dir(&dir).unwrap();
        let cache = dir.join("cache");
        let format = ["block", "format", cache.to_str().unwrap(), "--size", "64m", "--placement"];
        let (code, message) = larder(&[&format[..], &[placement]].concat());
        assert_eq!(code, Some(0), "{message}");
        let more = more.iter().map(|&s| s.to_owned()).collect();
        Host { dir, uri: uri.to_owned(), more }
    }

    fn command(&self) -> Command {
        let path = |name: &str| self.dir.join(name).display().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command
            .args(["block", "serve", "--cache", &path("cache")])
            .args(["--volume", &format!("disk={}", self.uri)])
            .args(["--listen", &format!("unix:{}", path("socket"))])
            .args(["--state-dir", &path("state")])
            .args(&self.more)
            .envs(CREDENTIALS);
        command
    }

    /// Starts the daemon.
    pub(crate) fn start(&self) -> Daemon {
        let mut daemon = self.spawn();
        daemon.wait_for("ready");
        daemon
    }

    /// Starts the daemon, and does not wait for it.
    pub(crate) fn spawn(&self) -> Daemon {
        let mut child = self.command().stderr(Stdio::piped()).spawn().unwrap();
        let stderr = child.stderr.take().unwrap();
        let (tell, log) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let socket = self.dir.join("socket");
        Daemon { child, log, seen: Vec::new(), socket }
    }

    /// What a command of `larder block` says to its daemon's answer.
    pub(crate) fn ask(&self, arguments: &[&str]) -> (Option<i32>, String) {
        let state = self.dir.join("state").display().to_string();
        larder(
            &[&["block"], arguments, &["--state-dir", &state, "--answer-within", "120"]].concat(),
        )
    }

    /// Starts a daemon that is to be refused: its exit code and what it says.
    pub(crate) fn refused(&self) -> (Option<i32>, String) {
        let output = self.command().output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

pub(crate) struct Daemon {
    child: Child,
    log: Receiver<String>,
    pub(crate) seen: Vec<String>,
    socket: PathBuf,
}

impl Daemon {
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
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        panic!("no '{what}' in the log: {:#?}", self.seen);
    }

    /// What it said on its way to being ready.
    pub(crate) fn said(&self, what: &str) -> bool {
        self.seen.iter().any(|line| line.contains(what))
    }

    /// So many lines were in the cache at its start.
    pub(crate) fn lines_at_start(&self) -> u64 {
        let line = self.seen.iter().find(|l| l.contains("lines cached")).expect("it says so");
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.windows(2).position(|w| w == ["lines", "cached"]).unwrap();
        words[at - 1].parse().unwrap()
    }

    /// Waits until it has nothing to do behind its replies: what was to be filled is filled.
    pub(crate) fn settle(&self) {
        let control = self.socket.with_file_name("state").join("block.sock");
        let request = Request::Settle { seconds: Some(120) };
        client::ask(&control, &request, &mut |_| {}).unwrap();
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn stop(mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{status}: {:#?}", self.log.iter().collect::<Vec<_>>());
    }

    pub(crate) fn end(self, kill: bool) {
        if kill { self.kill() } else { self.stop() }
    }

    /// Has it stop, and does not wait for that.
    pub(crate) fn terminate(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    }

    pub(crate) fn status(&self) -> Value {
        let control = self.socket.with_file_name("state").join("block.sock");
        client::ask(&control, &Request::Status {}, &mut |_| {}).unwrap()
    }

    pub(crate) fn client(&self) -> Client {
        self.client_of("disk")
    }

    pub(crate) fn client_of(&self, volume: &str) -> Client {
        let uri = format!("nbd+unix:///{volume}?socket={}", self.socket.display());
        let backing =
            backing::open(&uri.parse().unwrap(), false, false, Timeouts::default()).unwrap();
        Client { session: backing.session().unwrap() }
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

/// A connection to a daemon.
pub(crate) struct Client {
    session: Box<dyn Session>,
}

impl Client {
    pub(crate) fn one(&mut self, op: Op) -> Done {
        self.session.submit(1, op);
        let end = Instant::now() + Duration::from_secs(120);
        loop {
            self.session.flush(Instant::now());
            self.session.turn(Instant::now());
            if let Some(done) = self.session.pop() {
                return done;
            }
            assert!(Instant::now() < end, "no answer");
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    pub(crate) fn try_write(&mut self, offset: u64, len: usize, fill: u8) -> Result<(), Failure> {
        let mut buf = AlignedBuf::zeroed(len);
        buf.fill(fill);
        let done = self.one(Op::Write { offset, data: Payload::new(buf), fua: false });
        done.outcome.map(|_| ())
    }

    pub(crate) fn write(&mut self, offset: u64, len: usize, fill: u8) {
        self.try_write(offset, len, fill).unwrap();
    }

    pub(crate) fn try_read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Failure> {
        let done = self.one(Op::Read { offset, buf: AlignedBuf::zeroed(len) });
        done.outcome?;
        let Op::Read { buf, .. } = done.op else { panic!("another operation came back") };
        Ok(buf.to_vec())
    }

    /// The byte that a range consists of.
    pub(crate) fn read(&mut self, offset: u64, len: usize) -> u8 {
        let bytes = self.try_read(offset, len).unwrap();
        assert!(bytes.iter().all(|b| *b == bytes[0]), "a mix of writes at {offset}");
        bytes[0]
    }

    pub(crate) fn flush(&mut self) -> Result<(), Failure> {
        self.one(Op::Flush).outcome.map(|_| ())
    }
}
