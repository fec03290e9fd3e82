//! The real `larder kv` in a process of its own, and the place where it keeps its things.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_format::superblock::choose;
use rustix::process::Signal;

use crate::client::Client;

/// A data directory with a flash file beside it. Dropping it removes both, and the shared memory of the flash.
pub(crate) struct Site {
    pub(crate) dir: tempfile::TempDir,
    /// Every region that a flash of this site has had.
    regions: Mutex<Vec<PathBuf>>,
}

impl Site {
    pub(crate) fn new() -> Site {
        Site { dir: tempfile::tempdir().unwrap(), regions: Mutex::default() }
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    pub(crate) fn flash(&self) -> PathBuf {
        self.dir.path().join("flash")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("sock")
    }

    /// The memory in which the index outlives the process, by the superblock on flash.
    pub(crate) fn region(&self) -> Option<PathBuf> {
        region_of(&self.flash())
    }

    /// What a restart of the machine does.
    pub(crate) fn lose_shared_memory(&self) {
        let region = self.region().expect("the flash has a superblock");
        match std::fs::remove_file(&region) {
            // A clean stop may have given it back already.
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                panic!("{}: {e}", region.display())
            }
            _ => {}
        }
    }

    pub(crate) fn remember_region(&self) {
        if let Some(region) = self.region() {
            self.remember(region);
        }
    }

    pub(crate) fn remember_region_of(&self, flash: &Path) {
        if let Some(region) = region_of(flash) {
            self.remember(region);
        }
    }

    fn remember(&self, region: PathBuf) {
        let mut all = self.regions.lock().unwrap();
        if !all.contains(&region) {
            all.push(region);
        }
    }

    /// The command that serves this site: `more` goes after the rest.
    pub(crate) fn command(&self, more: &[&str]) -> Command {
        self.command_on(&self.data_dir(), &self.flash(), more)
    }

    /// The same with another data directory, another flash, or the flash `none`.
    pub(crate) fn command_on(&self, data_dir: &Path, flash: &Path, more: &[&str]) -> Command {
        let mut c = Command::new(env!("CARGO_BIN_EXE_larder"));
        for variable in ["RUST_LOG", "STATE_DIRECTORY", "LARDER_LISTEN", "KUBERNETES_SERVICE_HOST"]
        {
            c.env_remove(variable);
        }
        c.args(["kv", "--http", "off", "-s"]).arg(self.socket());
        c.arg("--data-dir").arg(data_dir).arg("--flash").arg(flash);
        c.args(more);
        c
    }

    /// Starts a server with another data directory or flash.
    pub(crate) fn start_on(&self, data_dir: &Path, flash: &Path, more: &[&str]) -> Server {
        let server = Server::of(self.command_on(data_dir, flash, more), self.socket());
        self.remember_region_of(flash);
        server
    }

    /// Starts a server and waits until it is ready.
    pub(crate) fn start(&self, more: &[&str]) -> Server {
        let server = Server::of(self.command(more), self.socket());
        self.remember_region();
        server
    }

    /// Runs a command that must end by itself: its exit code and its last line.
    pub(crate) fn refused(&self, more: &[&str]) -> (Option<i32>, String) {
        self.refused_as(self.command(more))
    }

    /// The same for any command.
    pub(crate) fn refused_as(&self, command: Command) -> (Option<i32>, String) {
        let mut server = Server::spawn(command, self.socket());
        let status = server.wait(Duration::from_secs(30));
        let log = server.log();
        self.remember_region();
        (status.code(), log.lines().last().unwrap_or_default().to_owned())
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.remember_region();
        for region in self.regions.get_mut().unwrap().drain(..) {
            std::fs::remove_file(region).ok();
        }
    }
}

pub(crate) fn region_of(flash: &Path) -> Option<PathBuf> {
    use std::io::Read;
    let mut head = vec![0; 8192];
    std::fs::File::open(flash).ok()?.read_exact(&mut head).ok()?;
    let chosen = choose(&head[..4096], &head[4096..]).ok()?;
    Some(Path::new("/dev/shm").join(format!("larder-{}", chosen.superblock.uuid)))
}

/// A running server. Dropping it kills it.
pub(crate) struct Server {
    child: Child,
    socket: PathBuf,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Server {
    fn spawn(mut command: Command, socket: PathBuf) -> Server {
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        let begun = Instant::now();
        let mut child = loop {
            match command.spawn() {
                Ok(child) => break child,
                // The program is a copy, and a process that another test has just forked holds it open for a moment, as it was written.
                Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                    assert!(begun.elapsed() < Duration::from_secs(10), "{e}");
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(e) => panic!("{e}"),
            }
        };
        let log = Arc::new(Mutex::new(String::new()));
        let (out, stderr) = (log.clone(), child.stderr.take().unwrap());
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut all = out.lock().unwrap();
                all.push_str(&line);
                all.push('\n');
            }
        });
        Server { child, socket, log, reader: Some(reader) }
    }

    pub(crate) fn of(command: Command, socket: PathBuf) -> Server {
        Server::try_of(command, socket)
            .unwrap_or_else(|log| panic!("ended before it was ready:\n{log}"))
    }

    /// The same, or the log of one that ends before it is ready.
    pub(crate) fn try_of(command: Command, socket: PathBuf) -> Result<Server, String> {
        let mut server = Server::spawn(command, socket);
        let start = Instant::now();
        while !server.log().contains("ready on") {
            if server.child.try_wait().unwrap().is_some() {
                let status = server.wait(Duration::from_secs(1));
                return Err(format!("{}{status}", server.log()));
            }
            assert!(start.elapsed() < Duration::from_secs(60), "not ready:\n{}", server.log());
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(server)
    }

    /// What it has said so far.
    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn connect(&self) -> Client {
        Client::new(UnixStream::connect(&self.socket).unwrap())
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// `kill -9`.
    pub(crate) fn kill(mut self) -> String {
        self.child.kill().unwrap();
        self.wait(Duration::from_secs(30));
        self.log()
    }

    /// SIGTERM, and the end that follows.
    pub(crate) fn stop(self) -> String {
        self.stop_by(Signal::TERM)
    }

    /// A signal that stops in good order, and the end that follows.
    pub(crate) fn stop_by(mut self, signal: Signal) -> String {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
        let status = self.wait(Duration::from_secs(30));
        assert!(status.success(), "{status}:\n{}", self.log());
        self.log()
    }

    fn wait(&mut self, limit: Duration) -> ExitStatus {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < limit, "does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(2));
        };
        if let Some(reader) = self.reader.take() {
            reader.join().unwrap();
        }
        status
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
