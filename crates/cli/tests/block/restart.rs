//! `larder block` as a process: what is cached survives kill -9 and a clean stop, and the volume is always right.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::daemon::ask::{json, settle, status_when};
use crate::daemon::records::{replay, until_recorded};
use crate::daemon::{Daemon, larder, one, prepare, read, session, write};
use larder_block::op::Op;

#[test]
fn warm_after_kill_and_after_a_clean_stop() {
    for placement in ["set:8", "full", "sparse"] {
        warm(placement);
    }
}

fn warm(placement: &str) {
    let dir = prepare(placement);
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
    for placement in ["set:8", "full", "sparse"] {
        kills(placement);
    }
}

fn kills(placement: &str) {
    let dir = prepare(placement);
    let mut versions = [0u8; 64];
    // The last round looks only, and stops in good order: a daemon that is killed leaves its map in memory.
    for round in 0..=4u8 {
        let mode = ["hdd-ssd", "hdd-upd", "hdd-inv"][usize::from(round) % 3];
        let mut flags = vec!["--write", mode, "--replacement", "s3fifo"];
        if placement == "full" {
            flags.extend(["--evict", ["cache", "gc", "gc:0"][usize::from(round) % 3]]);
        }
        let daemon = Daemon::start(dir.path(), &flags);
        let mut s = session(dir.path());
        for (place, version) in versions.iter().enumerate() {
            let bytes = read(&mut *s, place as u64 * 6144, 6144);
            assert!(
                bytes.iter().all(|b| b == version),
                "round {round}, place {place}: {} for {version}",
                bytes[0]
            );
        }
        if round == 4 {
            daemon.stop();
            break;
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
    let dir = prepare("set:8");
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
            "set:W with W from 1 to 16",
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
    assert!(code == Some(2) && message.contains("another server listens there"), "{message}");
    let other = format!("unix:{}", dir.path().join("other").display());
    let (code, message) =
        larder(&["serve", "--cache", cache, "--listen", &other, "--volume", &disk]);
    assert!(code == Some(1) && message.contains("in use"), "{message}");
    daemon.stop();
    // Addresses that cannot be had: found out before the cache is touched.
    let before = std::fs::read(cache).unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = format!("tcp:{}", taken.local_addr().unwrap());
    let vhost = format!("vhost:{},volume=other", dir.path().join("guest").display());
    for (listen, text) in [
        ("unix:/nowhere/socket", "the directory must exist"),
        (&taken, "in use"),
        ("ublk:x", "not one"),
        ("ublk", "colon"),
        ("tcp:no.such.host.invalid:10809", "no.such.host.invalid"),
        ("vhost:/nowhere/guest,volume=disk", "the directory must exist"),
        (&vhost, "there is no volume 'other'"),
    ] {
        let (code, message) = serve(&["--volume", &disk, "--listen", listen]);
        assert!(code == Some(2) && message.contains(text), "{message}");
        assert!(!dir.path().join("socket").exists(), "what was opened is given back");
    }
    assert!(std::fs::read(cache).unwrap() == before);
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

    let dir = prepare("set:8");
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

/// Reads, writes, trims and zeros on several connections at once.
fn under_load(dir: &Path, rounds: u64) {
    std::thread::scope(|scope| {
        for client in 0..4u64 {
            scope.spawn(move || {
                let mut session = session(dir);
                let mut rng = larder_base::Rng::new(client + 1);
                for round in 0..rounds {
                    let len = rng.range(1, 9) * 4096;
                    // Some places that all clients want, so that they wait for one another.
                    let most = if rng.chance(0.3) { 8 } else { 1900 };
                    let offset = rng.below(most) * 4096;
                    match rng.below(20) {
                        0..12 => drop(read(&mut *session, offset, len as usize)),
                        12..18 => write(&mut *session, offset, len as usize, round as u8),
                        18 => drop(one(
                            &mut *session,
                            Op::Trim { offset, len: len as u32, fua: false },
                        )),
                        _ => drop(one(
                            &mut *session,
                            Op::WriteZeroes {
                                offset,
                                len: len as u32,
                                fua: false,
                                may_punch: true,
                                fast: false,
                            },
                        )),
                    }
                }
            });
        }
    });
}

/// The same where the placement is sparse, with more pages of the table than memory has room for: pages come and go, go
/// with all their lines, and their space is given back.
#[test]
fn what_a_sparse_cache_decides_is_decided_again() {
    use larder_sim::replay::flip_block_decision;
    /// One group in each page of the first of eight shards.
    const STEP: u64 = (63 * 8 * 64) << 10;
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    File::create(path("disk")).unwrap().set_len(48 << 30).unwrap();
    let (cache, record) = (path("cache"), path("run.rec"));
    let (cache, record_arg) = (cache.to_str().unwrap(), record.to_str().unwrap());
    let (code, said) = larder(&["format", cache, "--size", "8m", "--placement", "sparse:64g"]);
    assert_eq!(code, Some(0), "{said}");
    let daemon = Daemon::start(dir.path(), &["--threads", "3", "--record", record_arg]);
    under_load(dir.path(), 150);
    let mut client = session(dir.path());
    let places: Vec<u64> = (0..48u64 << 30).step_by(STEP as usize).collect();
    assert!(places.len() > 1_200, "more than a shard has frames: {}", places.len());
    for (i, &at) in places.iter().enumerate() {
        write(&mut *client, at, 8192, i as u8 | 1);
    }
    for (i, &at) in places.iter().enumerate() {
        assert!(read(&mut *client, at, 4096).iter().all(|&b| b == i as u8 | 1), "{at}");
    }
    drop(client);
    daemon.stop();
    let (report, code) = replay(&record);
    assert_eq!((code, &report["difference"]), (Some(0), &serde_json::Value::Null), "{report}");
    assert!(report["complete"] == true && report["records"] == report["compared"], "{report}");
    let streams = report["streams"].as_array().unwrap();
    // Eight shards, the log, maintenance, what happens to volumes, three workers' queues and that of a prefetch, a volume.
    assert_eq!(streams.len(), 16, "{report}");
    let busiest = (11..14).max_by_key(|&queue| streams[queue][1].as_u64()).unwrap();
    for stream in [0, 5, 8, 9, busiest] {
        let of = &streams[stream];
        let count = of[1].as_u64().unwrap();
        // The first shard is told of a part, its fill, and of most places of a page that is read.
        assert!(count > if stream == 0 { 5_000 } else { 50 }, "{report}");
        let flipped = path("flipped.rec");
        std::fs::copy(&record, &flipped).unwrap();
        let mut file = File::options().read(true).write(true).open(&flipped).unwrap();
        assert!(flip_block_decision(&mut file, stream, count / 2).unwrap());
        let (found, code) = replay(&flipped);
        assert_eq!(code, Some(1));
        let found = &found["difference"];
        assert_eq!((&found["stream"], &found["record"]), (&of[0], &serde_json::json!(count / 2)));
    }
    // Damage in the middle is no end: it is refused with its place.
    let mut bytes = std::fs::read(&record).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&record, &bytes).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "replay", record_arg])
        .output()
        .unwrap();
    let (said, why) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{said}{why}");
    assert!(why.contains("byte ") && !said.contains("is the same"), "{said}{why}");
}

/// What shards, log, maintenance, queues and admission decided under load from several clients, on several threads, is decided again; a
/// decision that is changed is found where it is; what a killed daemon leaves replays as far as it goes.
#[test]
fn what_is_recorded_is_decided_again() {
    use larder_engine::block::record::BlockRunSetup;
    use larder_sim::replay::{RecordFile, flip_block_decision};
    // Records of each stream at least: two shards, log and maintenance, the workers' queues (one may have no client), a volume.
    let least = |stream: usize| match stream {
        2 | 3 => 20,
        5..8 => 0,
        _ => 500,
    };
    // No volume comes or goes, and nobody prefetches.
    let unused = |stream: usize| [4, 8].contains(&stream);
    for (admission, killed) in
        [("two_lbs", false), ("sseqr(length=64k)+tc", true), ("expected_reads", true)]
    {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        File::create(path("disk")).unwrap().set_len(16 << 20).unwrap();
        let cache = path("cache");
        let (code, said) =
            larder(&["format", cache.to_str().unwrap(), "--size", "9m", "--shards", "2"]);
        assert_eq!(code, Some(0), "{said}");
        let record = path("run.rec");
        let record_arg = record.to_str().unwrap();
        let options = ["--threads", "3", "--admission", admission, "--record", record_arg];
        let daemon = Daemon::start(dir.path(), &options);
        under_load(dir.path(), 400);
        if killed {
            until_recorded(&record, |report| {
                let streams = report["streams"].as_array().unwrap();
                let mut of = streams.iter().enumerate().filter(|s| !unused(s.0));
                of.all(|(stream, of)| of[1].as_u64().unwrap() > least(stream))
            });
            daemon.kill();
        } else {
            daemon.stop();
        }
        let (report, code) = replay(&record);
        assert_eq!((code, &report["difference"]), (Some(0), &serde_json::Value::Null), "{report}");
        assert_eq!(report["complete"], !killed, "{report}");
        assert_eq!(report["records"], report["compared"], "{report}");
        let streams = report["streams"].as_array().unwrap();
        assert_eq!(streams.len(), 10, "{report}");
        assert_eq!((&streams[4][0], &streams[4][1]), (&"volumes".into(), &0.into()));
        let queues = streams[5..8].iter().filter_map(|of| of[1].as_u64());
        assert!(queues.sum::<u64>() > 1_000, "{report}");
        for (stream, of) in streams.iter().enumerate().filter(|s| !unused(s.0)) {
            let count = of[1].as_u64().unwrap();
            assert!(count > least(stream), "{report}");
            let flipped = path("flipped.rec");
            std::fs::copy(&record, &flipped).unwrap();
            let mut file = File::options().read(true).write(true).open(&flipped).unwrap();
            assert!(flip_block_decision(&mut file, stream, count / 2).unwrap());
            let (found, code) = replay(&flipped);
            assert_eq!(code, Some(1));
            assert_eq!(
                (&found["difference"]["stream"], &found["difference"]["record"]),
                (&of[0], &serde_json::json!(count / 2))
            );
        }
        let opened: RecordFile<_, BlockRunSetup> =
            RecordFile::open(File::open(&record).unwrap()).unwrap();
        assert_eq!(opened.name(9), "admission of volume 'disk'");
        // A cache that is not empty is no beginning, and a file that is there is nobody's to overwrite.
        let refused = |record: &Path| {
            let disk = format!("disk=file:{}", path("disk").display());
            let listen = format!("unix:{}", path("other").display());
            let state = path("state");
            larder(&[
                "serve",
                "--cache",
                cache.to_str().unwrap(),
                "--volume",
                &disk,
                "--listen",
                &listen,
                "--state-dir",
                state.to_str().unwrap(),
                "--record",
                record.to_str().unwrap(),
            ])
        };
        let (code, said) = refused(&path("again.rec"));
        assert!(code == Some(2) && said.contains("begins with an empty cache"), "{code:?} {said}");
        assert!(!path("again.rec").exists());
        let (code, said) =
            larder(&["format", cache.to_str().unwrap(), "--size", "9m", "--shards", "2", "--yes"]);
        assert_eq!(code, Some(0), "{said}");
        let (code, said) = refused(&record);
        assert!(code == Some(1) && said.contains("run.rec"), "{code:?} {said}");
    }
}

/// What a client zeroed or trimmed reads as the volume has it, however the run ends: its lines leave the map behind the reply.
#[test]
fn a_whole_volume_is_zeroed_and_the_daemon_ends() {
    for (placement, kill) in [("set:8", true), ("full", true), ("set:8", false), ("full", false)] {
        let dir = prepare(placement);
        let dir = dir.path();
        let daemon = Daemon::start(dir, &[]);
        let mut s = session(dir);
        let all = 32 << 20;
        for round in 1..3u8 {
            (0..32).for_each(|mib| write(&mut *s, mib << 20, 1 << 20, round));
            settle(dir);
            status_when(dir, "cached", |s| s["cache"]["lines"].as_u64() > Some(4096));
            let zeroes =
                Op::WriteZeroes { offset: 0, len: all, fua: false, may_punch: true, fast: false };
            one(&mut *s, zeroes);
            // Some of it is written again before it is swept.
            write(&mut *s, 5 << 20, 4096, round);
        }
        let begun = Instant::now();
        drop(s);
        if kill {
            daemon.kill()
        } else {
            daemon.stop()
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "it ends");
        let daemon = Daemon::start(dir, &[]);
        let mut s = session(dir);
        for _ in 0..2 {
            for mib in 0..32 {
                let bytes = read(&mut *s, mib << 20, 1 << 20);
                let from = if mib == 5 { 4096 } else { 0 };
                assert!(bytes[..from].iter().all(|&b| b == 2), "{placement}, MiB {mib}");
                assert!(bytes[from..].iter().all(|&b| b == 0), "{placement}, MiB {mib}");
            }
        }
        json(dir, &["check", "--compare"]);
        drop(s);
        daemon.stop();
    }
}

/// Half a million regions have a bit then: taking them back, and what is left of the lines, holds up no stop.
#[test]
fn a_stop_after_a_trim_of_two_tebibytes_ends() {
    const PIECE: u64 = (4 << 30) - (1 << 20);
    let dir = prepare("set:8");
    let dir = dir.path();
    let size = 2u64 << 40;
    File::options().write(true).open(dir.join("disk")).unwrap().set_len(size).unwrap();
    let daemon = Daemon::start(dir, &[]);
    let mut s = session(dir);
    (0..16).for_each(|mib| write(&mut *s, mib << 20, 1 << 20, 1));
    settle(dir);
    let mut at = 0;
    while at < size {
        let len = PIECE.min(size - at);
        one(&mut *s, Op::Trim { offset: at, len: len as u32, fua: false });
        at += len;
    }
    let begun = Instant::now();
    drop(s);
    daemon.stop();
    // It took 7 to 10 s, and five times as much after five times the bytes.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let daemon = Daemon::start(dir, &[]);
    let mut s = session(dir);
    let file = File::open(dir.join("disk")).unwrap();
    let mut truth = vec![0; 1 << 20];
    for mib in 0..16 {
        file.read_exact_at(&mut truth, mib << 20).unwrap();
        assert!(read(&mut *s, mib << 20, 1 << 20) == truth, "MiB {mib}");
    }
    drop(s);
    daemon.stop();
}
