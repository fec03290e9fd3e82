//! `larder block serve --record` while volumes come, grow and go: every decision is made again by `larder sim replay`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::daemon::ask::{ask, counter, json, status_when};
use crate::daemon::records::{replay, until_recorded};
use crate::daemon::{Daemon, larder, read, session_of, write};
use larder_sim::replay::flip_block_decision;

const MIB: u64 = 1 << 20;

/// Each stream has more records than this. Connections are dealt in turn, so one of the workers may have no client; and of the last volume nothing is
/// asked.
fn least(stream: usize) -> u64 {
    if matches!(stream, 5..8 | 13) { 0 } else { 5 }
}

/// Reads and writes all over a volume of `bytes`, by two clients.
fn under_load(dir: &Path, volume: &str, bytes: u64, seed: u64) {
    std::thread::scope(|scope| {
        for client in 0..2u64 {
            scope.spawn(move || {
                let mut session = session_of(dir, volume);
                let mut rng = larder_base::Rng::new(seed * 2 + client);
                for round in 0..150u64 {
                    let len = rng.range(1, 9) * 4096;
                    let at = rng.below((bytes - len) / 4096) * 4096;
                    if rng.chance(0.6) {
                        read(&mut *session, at, len as usize);
                    } else {
                        write(&mut *session, at, len as usize, (round % 250) as u8 + 1);
                    }
                }
            });
        }
    });
}

/// A daemon that records, while volumes come, grow, go, come back warm and cold, and are refused. What is in the record then.
fn recorded(placement: &str, killed: bool) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let path = |name: &str| dir.join(name);
    File::create(path("disk")).unwrap().set_len(16 * MIB).unwrap();
    std::fs::write(path("more"), vec![3u8; 8 * MIB as usize]).unwrap();
    std::fs::write(path("odd"), vec![4u8; 5_000_001]).unwrap();
    let cache = path("cache");
    let format = ["format", cache.to_str().unwrap(), "--size", "24m", "--shards", "2"];
    let (code, said) = larder(&[&format[..], &["--placement", placement]].concat());
    assert_eq!(code, Some(0), "{said}");
    let record = path("run.rec");
    let options = ["--threads", "3", "--admission", "sseqr(length=64k)+tc", "--share", "more=..8m"];
    let daemon =
        Daemon::start(dir, &[&options[..], &["--record", record.to_str().unwrap()]].concat());
    let uri = |name: &str| format!("{name}=file:{}", path(name).display());
    under_load(dir, "disk", 16 * MIB, 1);
    json(dir, &["prefetch", "disk", "..8m"]);
    // It comes, grows, goes, and comes back as it went.
    assert_eq!(json(dir, &["attach", &uri("more")])["warm"], false);
    under_load(dir, "more", 8 * MIB, 2);
    assert_eq!(json(dir, &["resize", "more", "12m"])["bytes"], 12 * MIB);
    under_load(dir, "more", 12 * MIB, 3);
    json(dir, &["detach", "more", "--disconnect"]);
    assert_eq!(json(dir, &["attach", &uri("more")])["warm"], true);
    under_load(dir, "more", 12 * MIB, 4);
    // Changed behind its back, what is cached of it is dropped, and the durable map begins anew.
    status_when(dir, "filled", |s| counter(s, "fills") > 100);
    json(dir, &["detach", "more", "--disconnect"]);
    File::options().write(true).open(path("more")).unwrap().write_all_at(&[9; 8192], 0).unwrap();
    assert_eq!(json(dir, &["attach", &uri("more")])["warm"], false);
    under_load(dir, "more", 12 * MIB, 5);
    // With another right behind it, it moves.
    assert_eq!(json(dir, &["resize", "disk", "40m"])["moved"], true);
    // Refusals are decisions too: no multiple of a line, and smaller than it was.
    json(dir, &["attach", &uri("odd")]);
    let (code, _, error) = ask(dir, &["resize", "odd", "8m"]);
    assert!(code == 1 && error.contains("no multiple of the cache's line"), "{error}");
    json(dir, &["detach", "odd", "--disconnect"]);
    File::options().write(true).open(path("odd")).unwrap().set_len(4 * MIB).unwrap();
    let (code, _, error) = ask(dir, &["attach", &uri("odd")]);
    assert!(code == 1 && error.contains("restore its size"), "{error}");
    under_load(dir, "disk", 40 * MIB, 6);
    if killed {
        until_recorded(&record, |report| {
            let streams = report["streams"].as_array().unwrap();
            let has =
                |(stream, of): (usize, &serde_json::Value)| of[1].as_u64().unwrap() > least(stream);
            report["changes"] == 11 && streams.len() == 14 && streams.iter().enumerate().all(has)
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
    let names: Vec<&str> = streams.iter().map(|s| s[0].as_str().unwrap()).collect();
    let expected = [
        "shard 0",
        "shard 1",
        "log",
        "maintenance",
        "volumes",
        "queue of worker 0",
        "queue of worker 1",
        "queue of worker 2",
        "queue of the prefetch",
        "admission of volume 'disk'",
        "admission of volume 'more' (attachment 1)",
        "admission of volume 'more' (attachment 2)",
        "admission of volume 'more' (attachment 3)",
        "admission of volume 'odd' (attachment 4)",
    ];
    assert_eq!(names, expected);
    // Three workers, and the prefetch.
    assert_eq!(report["queues"], 4, "{report}");
    let of_workers = streams[5..8].iter().filter_map(|of| of[1].as_u64());
    assert!(of_workers.sum::<u64>() > 1_000, "{report}");
    // Five came (one of them was refused), two grew and one could not, three went.
    assert_eq!((&report["changes"], &report["volumes"]), (&11.into(), &5.into()), "{report}");
    for (stream, of) in streams.iter().enumerate() {
        let count = of[1].as_u64().unwrap();
        assert!(count > least(stream), "{report}");
        for at in [0, count / 2, count - 1] {
            let flipped = path("flipped.rec");
            std::fs::copy(&record, &flipped).unwrap();
            let mut file = File::options().read(true).write(true).open(&flipped).unwrap();
            assert!(flip_block_decision(&mut file, stream, at).unwrap());
            let (found, code) = replay(&flipped);
            assert_eq!(code, Some(1));
            let found = &found["difference"];
            assert_eq!((&found["stream"], &found["record"]), (&of[0], &serde_json::json!(at)));
        }
    }
    // For people: what was decided otherwise.
    let flipped = path("flipped.rec");
    std::fs::copy(&record, &flipped).unwrap();
    let mut file = File::options().read(true).write(true).open(&flipped).unwrap();
    assert!(flip_block_decision(&mut file, 4, 1).unwrap());
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "replay", flipped.to_str().unwrap()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("(11 times one came, grew or went)"), "{said}");
    // The report has what --json has of the streams.
    for line in ["stream", "queue of the prefetch", "admission of volume 'disk'"] {
        assert!(said.lines().any(|l| l.trim_start().starts_with(line)), "'{line}' in {said}");
    }
    assert!(said.contains("volume 'more' grows to 12582912 bytes"), "{said}");
}

#[test]
fn volumes_that_come_grow_and_go_are_part_of_the_record() {
    recorded("set:8", false);
}

#[test]
fn the_same_in_a_log_of_segments_and_after_a_kill() {
    recorded("full", true);
}

#[test]
fn the_same_with_a_table_on_the_device() {
    recorded("sparse", false);
}

/// A recording that reaches its limit ends, says so in status and metrics, and the daemon goes on; what was recorded replays. A
/// volume that is not attached cannot be dropped while a daemon records, and the refusal says what to do.
#[test]
fn a_recording_that_reaches_its_limit_is_an_alarm() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for name in ["disk", "more"] {
        File::create(dir.join(name)).unwrap().set_len(16 * MIB).unwrap();
    }
    let cache = dir.join("cache");
    let (code, said) =
        larder(&["format", cache.to_str().unwrap(), "--size", "24m", "--shards", "2"]);
    assert_eq!(code, Some(0), "{said}");
    let record = dir.join("run.rec");
    let record = record.to_str().unwrap();
    let daemon = Daemon::start(dir, &["--record", record, "--record-limit", "4m"]);
    assert_eq!(json(dir, &["status"])["recording"]["ended"], serde_json::Value::Null);
    json(dir, &["attach", &format!("more=file:{}", dir.join("more").display())]);
    json(dir, &["detach", "more"]);
    let (code, _, error) = ask(dir, &["drop", "more"]);
    assert!(code == 1 && error.contains("without a recording"), "{error}");
    let ended = |status: &serde_json::Value| status["recording"]["ended"].is_string();
    let mut session = session_of(dir, "disk");
    let mut status = json(dir, &["status"]);
    for round in 0..100_000u64 {
        if round % 64 == 0 {
            status = json(dir, &["status"]);
            if ended(&status) {
                break;
            }
        }
        read(&mut *session, round % 16 * MIB, 1 << 20);
    }
    assert_eq!(status["recording"]["ended"], "the file reached its limit", "{status:#}");
    let alarm =
        |a: &serde_json::Value| a.as_str().is_some_and(|a| a.contains("recording has ended"));
    assert!(status["alarms"].as_array().unwrap().iter().any(alarm), "{status:#}");
    let (_, text, _) = ask(dir, &["status"]);
    assert!(text.contains("recording") && text.contains("ENDED: the file reached"), "{text}");
    assert_eq!(read(&mut *session, 0, 4096).len(), 4096, "the daemon goes on");
    drop(session);
    daemon.stop();
    let (report, code) = replay(std::path::Path::new(record));
    assert_eq!((code, report["complete"].as_bool()), (Some(0), Some(false)), "{report}");
}
