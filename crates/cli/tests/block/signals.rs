//! Signals to the servers: some stop them, one has them read files again, and no other ends them.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use crate::daemon::Daemon;

/// Of Linux.
const NONBLOCK: i32 = 0o4000;
const LONG: Duration = Duration::from_secs(120);
/// What has no meaning to a server and ends a process that does not expect it.
const MEANINGLESS: [&str; 7] = ["USR2", "ALRM", "VTALRM", "PROF", "IO", "XCPU", "XFSZ"];

fn signal(pid: u32, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap();
    assert!(sent.success(), "{name}");
}

/// `larder kv` on a Unix socket, and its log.
struct Kv {
    child: Child,
    log: BufReader<ChildStderr>,
    socket: std::path::PathBuf,
}

impl Kv {
    fn start(dir: &std::path::Path, more: &[&str]) -> Kv {
        let mut kv = Kv::spawn(dir, more);
        kv.until("ready on");
        kv
    }

    /// Started, and not waited for.
    fn spawn(dir: &std::path::Path, more: &[&str]) -> Kv {
        let socket = dir.join("socket");
        let mut child = Command::new(env!("CARGO_BIN_EXE_larder"))
            .env_remove("RUST_LOG")
            .args(["kv", "--http", "off", "-m", "16", "--flash-size", "32m", "-t", "1", "-s"])
            .arg(&socket)
            .arg("--data-dir")
            .arg(dir.join("data"))
            .args(more)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        Kv { child, log, socket }
    }

    /// Reads the log up to a line with this, and returns it.
    fn until(&mut self, text: &str) -> String {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert!(self.log.read_line(&mut line).unwrap() > 0, "it ended before '{text}'");
        }
        line
    }

    /// Stores more than DRAM holds.
    fn fill(&self) {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let value = "v".repeat(2000);
        for i in 0..12_000 {
            stream.write_all(format!("set k{i} 0 0 2000\r\n{value}\r\n").as_bytes()).unwrap();
            let mut answer = [0; 8];
            stream.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"STORED\r\n");
        }
    }

    fn ask(&self, request: &str, answer_len: usize) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = vec![0; answer_len];
        stream.read_exact(&mut answer).unwrap();
        String::from_utf8(answer).unwrap()
    }

    fn end(&mut self) -> bool {
        self.rest();
        self.child.wait().unwrap().success()
    }

    /// What else it says until its end.
    fn rest(&mut self) -> String {
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).unwrap();
        rest
    }
}

/// A test that fails leaves no server behind.
impl Drop for Kv {
    fn drop(&mut self) {
        // One that has been waited for is gone, and its number is not used again.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn kv_reads_its_files_again_and_is_ended_by_no_signal_that_does_not_stop_it() {
    let dir = tempfile::tempdir().unwrap();
    let users = dir.path().join("users");
    std::fs::write(&users, "u:old\n").unwrap();
    let mut kv = Kv::start(dir.path(), &["-Y", users.to_str().unwrap()]);
    let pid = kv.child.id();
    assert_eq!(kv.ask("set a 0 0 5\r\nu old\r\n", 8), "STORED\r\n");
    std::fs::write(&users, "u:new\n").unwrap();
    signal(pid, "HUP");
    kv.until("read again");
    assert_eq!(kv.ask("set a 0 0 5\r\nu new\r\n", 8), "STORED\r\n");
    // A file that cannot be used is told of and changes nothing.
    std::fs::write(&users, "nonsense\n").unwrap();
    signal(pid, "HUP");
    kv.until("the former users may log in");
    assert_eq!(kv.ask("set a 0 0 5\r\nu new\r\n", 8), "STORED\r\n");
    for name in MEANINGLESS {
        signal(pid, name);
        kv.until("means nothing here");
    }
    assert_eq!(kv.ask("set a 0 0 5\r\nu new\r\nset k 0 0 1\r\nx\r\n", 16), "STORED\r\nSTORED\r\n");
    signal(pid, "QUIT");
    kv.until("stopping: signal");
    assert!(kv.end(), "in good order");
}

/// SIGHUP has it read its certificate again, and nobody who cannot use a socket connects to it.
#[test]
fn block_reads_its_certificate_again_and_is_ended_by_no_signal_that_does_not_stop_it() {
    let dir = crate::daemon::prepare("set:8");
    let file = |name: &str| dir.path().join(name).display().to_string();
    let issue = || {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        std::fs::write(file("cert"), made.cert.pem()).unwrap();
        std::fs::write(file("key"), made.signing_key.serialize_pem()).unwrap();
    };
    issue();
    let more = ["--tls-certificate", &file("cert"), "--tls-key", &file("key"), "--http", "off"];
    let mut daemon = Daemon::start(dir.path(), &[&more[..], &["--socket-mode", "0660"]].concat());
    let mode = std::fs::metadata(dir.path().join("socket")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    issue();
    daemon.signal(rustix::process::Signal::HUP);
    daemon.wait_for("TLS certificates read again");
    std::fs::write(file("key"), "nothing").unwrap();
    daemon.signal(rustix::process::Signal::HUP);
    assert!(daemon.wait_for("stay in use").contains("key"));
    for name in MEANINGLESS {
        signal(daemon.child.id(), name);
        daemon.wait_for("means nothing here");
    }
    drop(crate::daemon::session(dir.path()));
    daemon.stop();
}

/// How many objects a line of the log says are on flash.
fn on_flash(line: &str) -> u64 {
    let before = line.split(" objects on flash").next().unwrap();
    before.rsplit(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{line}"))
}

/// The start is held at a cause: the checkpoint that it reads is a pipe, into which nobody writes.
#[test]
fn a_signal_during_the_start_ends_it_and_what_was_warm_stays_so() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--admission", "all"];
    let mut kv = Kv::start(dir.path(), &flags);
    kv.fill();
    signal(kv.child.id(), "TERM");
    let kept = on_flash(&kv.until("the next start is warm"));
    // How many get there depends on how fast the cleaner has its turns.
    assert!(kv.end() && kept > 0, "{kept}");
    let checkpoint = dir.path().join("data/checkpoint");
    let aside = dir.path().join("aside");
    for name in ["TERM", "INT"] {
        std::fs::rename(&checkpoint, &aside).unwrap();
        assert!(Command::new("mkfifo").arg(&checkpoint).status().unwrap().success());
        let mut kv = Kv::spawn(dir.path(), &flags);
        // It cannot be opened in this way before somebody reads.
        let began = Instant::now();
        let mut pipe = loop {
            let mut options = std::fs::OpenOptions::new();
            match options.write(true).custom_flags(NONBLOCK).open(&checkpoint) {
                Ok(pipe) => break pipe,
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
            assert!(began.elapsed() < LONG && kv.child.try_wait().unwrap().is_none());
        };
        signal(kv.child.id(), name);
        kv.until("the start ends");
        // A start whose read the signal has interrupted reads no more.
        match pipe.write_all(&[0; 4096]) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
            written => written.unwrap(),
        }
        drop(pipe);
        let rest = kv.rest();
        assert!(kv.child.wait().unwrap().success(), "{rest}");
        assert!(rest.contains("stopped during the start") && !rest.contains("ready on"), "{rest}");
        std::fs::remove_file(&checkpoint).unwrap();
        std::fs::rename(&aside, &checkpoint).unwrap();
    }
    let mut kv = Kv::spawn(dir.path(), &flags);
    assert_eq!(on_flash(&kv.until("warm: ")), kept);
    kv.until("ready on");
    signal(kv.child.id(), "TERM");
    assert!(kv.end());
}

/// Both signals are there when the process goes on, so that the second comes while it stops.
#[test]
fn a_second_signal_ends_a_stop_with_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let flags = ["--admission", "all"];
    let mut kept = 0;
    for attempt in 0.. {
        let mut kv = Kv::spawn(dir.path(), &flags);
        if attempt > 0 {
            assert_eq!(on_flash(&kv.until("warm: ")), kept);
        }
        kv.until("ready on");
        if attempt == 0 {
            kv.fill();
        }
        let pid = kv.child.id();
        signal(pid, "STOP");
        let stopped = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit(") ").next().unwrap().starts_with('T')
        };
        let began = Instant::now();
        while !stopped() {
            assert!(began.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(1));
        }
        for name in ["TERM", "INT", "CONT"] {
            signal(pid, name);
        }
        let said = kv.rest();
        let status = kv.child.wait().unwrap();
        if said.contains("second signal: ending with what is there")
            && said.contains("no checkpoint")
        {
            // In order, or by the timeout that a second signal has.
            assert!(matches!(status.code(), Some(0 | 1)), "{status}: {said}");
            assert!(!dir.path().join("data/checkpoint").exists());
            break;
        }
        // The stop was faster this time.
        kept = on_flash(said.lines().find(|l| l.contains("the next start is warm")).unwrap());
        assert!(attempt < 20, "never in time: {said}");
    }
    let mut kv = Kv::spawn(dir.path(), &flags);
    let warm = kv.until("warm: ");
    assert!(warm.contains("found in memory") && on_flash(&warm) > 1000, "{warm}");
    kv.until("ready on");
    // A stop that is let have its time leaves no shared memory behind.
    signal(kv.child.id(), "TERM");
    assert!(kv.end());
}
