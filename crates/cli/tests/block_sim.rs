//! Azor's choices by the simulator and by the daemon: the same requests through `larder sim run` and over NBD through
//! `larder block serve` hit alike. With `--nocapture` it prints the table of docs/azor.md.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test of a process waits for it"
)]

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use larder_block::backing::{self, Patience, Session};
use larder_block::op::Op;
use larder_runtime::{AlignedBuf, Payload};
use larder_sim::experiment::{Experiment, run};
use larder_trace::{Options, Request};

/// A file server of 64 MiB in small, a third of which is touched.
const TRACE: &str = "gen:specsfs?size=64m&touched=0.5&requests=12000&seed=4";
const CACHE: &str = "12m";

/// Lines read that cost the volume nothing, of all, as the counters in the daemon's log say.
struct Daemon(Child, BufReader<std::process::ChildStderr>);

impl Daemon {
    fn start(dir: &Path, arguments: &[&str]) -> Daemon {
        let mut child = Command::new(env!("CARGO_BIN_EXE_larder"))
            // The simulator reads nothing ahead.
            .args(["block", "serve", "--threads", "1", "--readahead", "0"])
            .arg("--cache")
            .arg(dir.join("cache"))
            .arg("--volume")
            .arg(format!("disk=file:{}", dir.join("disk").display()))
            .arg("--listen")
            .arg(format!("unix:{}", dir.join("socket").display()))
            .arg("--state-dir")
            .arg(dir.join("state"))
            .args(arguments)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        let mut daemon = Daemon(child, log);
        daemon.line("ready");
        daemon
    }

    fn line(&mut self, what: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.1.read_line(&mut line).unwrap() > 0, "the daemon has ended");
            if line.contains(what) {
                return line;
            }
        }
    }

    fn hit_ratio(mut self) -> f64 {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, rustix::process::Signal::USR1).unwrap();
        let line = self.line("lines read");
        let (_, rest) = line.split_once("of them ").unwrap();
        let (flash, rest) = rest.split_once(" % from flash and ").unwrap();
        let (shared, _) = rest.split_once(" % shared").unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.0.wait().unwrap().success());
        (flash.parse::<f64>().unwrap() + shared.parse::<f64>().unwrap()) / 100.0
    }
}

/// A test that fails leaves no daemon behind.
impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn through_the_daemon(placement: &str, write: &str, admission: &str, requests: &[Request]) -> f64 {
    let dir = tempfile::tempdir().unwrap();
    File::create(dir.path().join("disk")).unwrap().set_len(64 << 20).unwrap();
    let cache = dir.path().join("cache");
    let status = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "format", cache.to_str().unwrap(), "--size", CACHE, "--shards", "1"])
        .args(["--placement", placement])
        .stdout(Stdio::null())
        .status();
    assert!(status.unwrap().success());
    let daemon = Daemon::start(dir.path(), &["--write", write, "--admission", admission]);
    let uri = format!("nbd+unix:///disk?socket={}", dir.path().join("socket").display());
    let store = backing::open(&uri.parse().unwrap(), false, false, Patience::default()).unwrap();
    let mut session = store.session().unwrap();
    for request in requests {
        let (offset, len) = (request.offset, request.size as usize);
        let op = if request.op.is_read() {
            Op::Read { offset, buf: AlignedBuf::zeroed(len) }
        } else {
            Op::Write { offset, data: Payload::new(AlignedBuf::zeroed(len)), fua: false }
        };
        one(&mut *session, op);
    }
    daemon.hit_ratio()
}

fn one(session: &mut dyn Session, op: Op) {
    session.submit(1, op);
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        session.flush(Instant::now());
        session.turn(Instant::now());
        if let Some(done) = session.pop() {
            done.outcome.unwrap();
            return;
        }
        assert!(Instant::now() < end, "no answer");
        std::thread::yield_now();
    }
}

#[test]
fn simulator_and_daemon_hit_alike() {
    let reader = larder_trace::open(TRACE, &Options::default()).unwrap().reader;
    let requests: Vec<Request> = reader.map(Result::unwrap).collect();
    let cases = [
        ("direct", "hdd-ssd", "all"),
        ("set:4", "hdd-ssd", "all"),
        ("set:16", "hdd-ssd", "all"),
        ("set:16", "hdd-upd", "all"),
        ("set:16", "hdd-inv", "all"),
        ("set:16", "hdd-ssd", "sseqr+tc"),
    ];
    let mut text = format!("[workload]\ntrace = \"{TRACE}\"\n[report]\npoints = 0\n");
    for (placement, write, admission) in cases {
        text.push_str(&format!(
            "[[cache]]\nkind = \"block\"\nname = \"{placement} {write} {admission}\"\nflash = \"{CACHE}\"\nload = \"closed\"\n\
             depth = 1\nvolume = \"64m\"\nplacement = \"{placement}\"\nwrite = \"{write}\"\nadmission = \"{admission}\"\n"
        ));
    }
    let simulated = run(&Experiment::parse(&text, "x").unwrap(), 2, |_, _| {}).unwrap();
    let mut ratios = Vec::new();
    for ((placement, write, admission), cache) in cases.into_iter().zip(&simulated.caches) {
        let sim = cache.block.as_ref().unwrap().line_hit_ratio;
        // The daemon fills behind the reply, and drops fills where the machine has too much to do: then once more.
        let mut daemon = 0.0;
        for _ in 0..3 {
            daemon = through_the_daemon(placement, write, admission, &requests);
            println!(
                "{}: simulator {:.1} %, daemon {:.1} %",
                cache.name,
                100.0 * sim,
                100.0 * daemon
            );
            if (sim - daemon).abs() < 0.02 {
                break;
            }
        }
        assert!((sim - daemon).abs() < 0.02, "{}: {sim} {daemon}", cache.name);
        ratios.push((sim, daemon));
    }
    for of in [|r: &(f64, f64)| r.0, |r: &(f64, f64)| r.1] {
        let all: Vec<f64> = ratios.iter().map(of).collect();
        assert!(all[0] < all[1] && all[1] < all[2], "conflict misses: {all:?}");
        assert!(all[4] < all[2] && all[4] < all[3], "write-around reads what it wrote: {all:?}");
    }
}
