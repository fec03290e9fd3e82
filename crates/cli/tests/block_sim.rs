//! Azor's choices by the simulator and by the daemon: the same requests through `larder sim run` and over NBD through
//! `larder block serve` hit the same lines. With `--nocapture` it prints the table of docs/azor.md.
//!
//! Nothing in it depends on the machine's speed. What a request leaves to be done behind its reply, a fill above all, is over
//! before the next one comes: the simulator's requests come minutes apart, the daemon is asked to settle after each. (Else
//! a slow device decides how many fills find their place taken by another that still waits to be written.) And the
//! device has the simulator's key, so that lines meet the same neighbours. So the counts are not alike but the same.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test of a process waits for it"
)]

mod daemon;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use daemon::ask::settle;
use daemon::{Daemon, larder, one, session};
use larder_block::control::client;
use larder_block::control::protocol::Request as Ask;
use larder_block::control::status::Status;
use larder_block::op::Op;
use larder_format::block::superblock::{COPY_BYTES, choose};
use larder_runtime::{AlignedBuf, Payload};
use larder_sim::block::placement_key;
use larder_sim::experiment::{Experiment, run};
use larder_trace::{Options, Request};
use tempfile::TempDir;

/// A file server of 64 MiB in small, a third of which is touched. One request comes in 20 minutes, on average, so that by far
/// the least of the times between them is longer than what is done behind a reply takes.
const TRACE: &str = "gen:specsfs?size=64m&touched=0.5&requests=12000&seed=4&rate=0.0008";
const CACHE: &str = "12m";
const SEED: u64 = 1;

/// Where flushes cost nothing, if there is such a place: each fill that takes another line's slot waits for two of them. With
/// them the test is as slow as the disk, and comes to the same.
fn fast_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Gives a device that has just been formatted the simulator's key.
fn set_key(cache: &Path) {
    let device = OpenOptions::new().read(true).write(true).open(cache).unwrap();
    let mut copies = vec![0; 2 * COPY_BYTES];
    device.read_exact_at(&mut copies, 0).unwrap();
    let (a, b) = copies.split_at(COPY_BYTES);
    let mut superblock = choose(a, b).unwrap();
    superblock.key = placement_key(SEED);
    let bytes = superblock.encode();
    for copy in 0..2 {
        device.write_all_at(&bytes, copy * COPY_BYTES as u64).unwrap();
    }
}

fn counter(status: &Status, name: &str) -> u64 {
    status.counters.iter().find(|c| c.0 == name).unwrap().1
}

/// What came of it: lines read, of them those that cost the volume nothing, lines evicted and updated. (Not those filled: the
/// simulator stops with the last answer, and the last fill comes behind it.)
type Counts = [u64; 4];

fn through_the_daemon(
    placement: &str,
    write: &str,
    admission: &str,
    requests: &[Request],
) -> Counts {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    File::create(dir.join("disk")).unwrap().set_len(64 << 20).unwrap();
    let flash = fast_dir();
    let cache = flash.path().join("cache");
    let path = cache.to_str().unwrap();
    let (code, message) =
        larder(&["format", path, "--size", CACHE, "--shards", "1", "--placement", placement]);
    assert_eq!(code, Some(0), "{message}");
    set_key(&cache);
    // The simulator reads nothing ahead.
    let more = ["--threads", "1", "--readahead", "0", "--write", write, "--admission", admission];
    let by = Command::new(env!("CARGO_BIN_EXE_larder"));
    let daemon = Daemon::start_by(by, dir, &cache, &more);
    let control = dir.join("state/block.sock");
    let ask = |what: &Ask| client::ask(&control, what, &mut |_| {}).unwrap();
    let mut session = session(dir);
    for request in requests {
        let (offset, len) = (request.offset, request.size as usize);
        let op = if request.op.is_read() {
            Op::Read { offset, buf: AlignedBuf::zeroed(len) }
        } else {
            Op::Write { offset, data: Payload::new(AlignedBuf::zeroed(len)), fua: false }
        };
        one(&mut *session, op);
        settle(dir);
    }
    let status: Status = serde_json::from_value(ask(&Ask::Status {})).unwrap();
    drop(session);
    daemon.stop();
    let of = |name| counter(&status, name);
    // Nothing that was to be filled was lost, and no request met another one's fill.
    for name in ["fill_dropped", "fill_cancelled", "read_shared", "waited", "flash_errors"] {
        assert_eq!(of(name), 0, "{name}: {:?}", status.counters);
    }
    [of("read_lines"), of("read_hits"), of("evicted"), of("updated")]
}

#[test]
fn simulator_and_daemon_hit_the_same() {
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
    let mut text =
        format!("seed = {SEED}\n[workload]\ntrace = \"{TRACE}\"\n[report]\npoints = 0\n");
    for (placement, write, admission) in cases {
        text.push_str(&format!(
            "[[cache]]\nkind = \"block\"\nname = \"{placement} {write} {admission}\"\nflash = \"{CACHE}\"\nload = \"open\"\n\
             depth = 1\nvolume = \"64m\"\nplacement = \"{placement}\"\nwrite = \"{write}\"\nadmission = \"{admission}\"\n"
        ));
    }
    let simulated = run(&Experiment::parse(&text, "x").unwrap(), 2, |_, _| {}).unwrap();
    let requests = &requests;
    let served: Vec<Counts> = std::thread::scope(|scope| {
        let threads: Vec<_> = cases
            .iter()
            .map(|(placement, write, admission)| {
                scope.spawn(move || through_the_daemon(placement, write, admission, requests))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let mut ratios = Vec::new();
    for ((case, daemon), cache) in cases.iter().zip(served).zip(&simulated.caches) {
        let b = cache.block.as_ref().unwrap();
        let sim = [b.read_lines, b.hit_lines, b.evicted, b.updated];
        let ratio = |counts: Counts| counts[1] as f64 / counts[0] as f64;
        ratios.push((ratio(sim), ratio(daemon)));
        let (of_sim, of_daemon) = (100.0 * ratio(sim), 100.0 * ratio(daemon));
        println!("{}: simulator {of_sim:.2} %, daemon {of_daemon:.2} %", cache.name);
        assert_eq!((sim[0], b.shared_lines), (daemon[0], 0), "{}", cache.name);
        match case.2 {
            "all" => assert_eq!(sim, daemon, "{}", cache.name),
            // Counts of touches are kept under hashes, of which the daemon's have another seed (the device's key): a few
            // lines share their counter with others than in the simulator. Both are the same in each run.
            _ => assert!((of_sim - of_daemon).abs() < 0.1, "{}: {sim:?} {daemon:?}", cache.name),
        }
    }
    for of in [|r: &(f64, f64)| r.0, |r: &(f64, f64)| r.1] {
        let all: Vec<f64> = ratios.iter().map(of).collect();
        assert!(all[0] < all[1] && all[1] < all[2], "conflict misses: {all:?}");
        assert!(all[4] < all[2] && all[4] < all[3], "write-around reads what it wrote: {all:?}");
    }
}
