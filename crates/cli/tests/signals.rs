//! Signals to the servers: some stop them, one has them read files again, and no other ends them.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test of a process waits for it"
)]

mod daemon;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use daemon::Daemon;

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
        let mut kv = Kv { child, log, socket };
        kv.until("ready on");
        kv
    }

    /// Reads the log up to a line with this.
    fn until(&mut self, text: &str) {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert!(self.log.read_line(&mut line).unwrap() > 0, "it ended before '{text}'");
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
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).unwrap();
        self.child.wait().unwrap().success()
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
    let dir = daemon::prepare("set:8");
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
    drop(daemon::session(dir.path()));
    daemon.stop();
}
