//! `larder block` before stores that fail, hang, lose connections, are written by others, or move between hosts: as
//! processes, against stores of ours.

mod absent;
mod daemon;
pub(crate) mod faulty;
mod forgets;
pub(crate) mod s3;
mod unflushed;

use larder_block::op::FailureKind;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use daemon::{Client, Host, larder};
use faulty::Store;
use s3::S3;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// Places that versions are written to, each a little more than two lines.
const PLACES: u64 = 48;
const LEN: usize = 9000;

fn at(place: u64) -> u64 {
    place * 20_000
}

fn disk(dir: &Path) -> String {
    let path = dir.join("disk");
    File::create(&path).unwrap().set_len(8 * MIB).unwrap();
    format!("file:{}", path.display())
}

fn object_volume(s3: &S3) -> String {
    let uri = s3.uri("vm1");
    let (code, text) = larder(&["block", "create", &uri, "--size", "8m", "--chunk", "128k"]);
    assert_eq!(code, Some(0), "{text}");
    uri
}

fn write_all(client: &mut Client, version: u8) {
    (0..PLACES).for_each(|place| client.write(at(place), LEN, version));
}

/// Every place has the version that `wanted` says; read twice, so that the second time may come from the cache.
fn check(client: &mut Client, wanted: impl Fn(u64) -> u8) {
    for round in 0..2 {
        for place in 0..PLACES {
            assert_eq!(client.read(at(place), LEN), wanted(place), "place {place}, round {round}");
        }
    }
}

/// A writes, B overwrites a third, A reads: whatever was cached at A, it is B's.
fn moves(uri: &str, dir: &Path, kill: bool, keeps_others_away: bool) {
    // One of the caches is sparse.
    let (one, other) = if kill { ("sparse", "set:8") } else { ("set:8", "sparse") };
    let a = Host::placing(one, dir, "a", uri, &[]);
    let b = Host::placing(other, dir, "b", uri, &[]);
    let running = a.start();
    let mut client = running.client();
    write_all(&mut client, 1);
    check(&mut client, |_| 1);
    if keeps_others_away {
        let (code, message) = b.refused();
        assert_eq!(code, Some(1), "{message}");
        assert!(message.contains("stop that"), "{message}");
        check(&mut client, |_| 1);
    }
    drop(client);
    running.end(kill);

    let running = b.start();
    let mut client = running.client();
    check(&mut client, |_| 1);
    (0..PLACES).step_by(3).for_each(|place| client.write(at(place), LEN, 2));
    drop(client);
    running.end(kill);

    let newest = |place: u64| if place.is_multiple_of(3) { 2 } else { 1 };
    let running = a.start();
    assert_eq!(running.lines_at_start(), 0, "{:#?}", running.seen);
    assert!(running.said("what was cached is dropped"), "{:#?}", running.seen);
    let mut client = running.client();
    check(&mut client, newest);
    // And once more to B, which has lines of its own that A has not touched.
    (1..PLACES).step_by(3).for_each(|place| client.write(at(place), LEN, 3));
    drop(client);
    running.end(!kill);
    let running = b.start();
    let mut client = running.client();
    check(&mut client, |place| if place % 3 == 1 { 3 } else { newest(place) });
    drop(client);
    running.stop();
}

#[test]
fn a_file_moves_between_hosts() {
    for kill in [false, true] {
        let dir = TempDir::new().unwrap();
        moves(&disk(dir.path()), dir.path(), kill, true);
    }
}

#[test]
fn an_object_store_moves_between_hosts() {
    for kill in [false, true] {
        let dir = TempDir::new().unwrap();
        let s3 = S3::start();
        moves(&object_volume(&s3), dir.path(), kill, true);
    }
}

#[test]
fn an_export_moves_between_hosts() {
    for kill in [false, true] {
        let dir = TempDir::new().unwrap();
        let store = Store::start(dir.path(), 8 * MIB, FailureKind::Failed);
        moves(&store.uri(), dir.path(), kill, false);
    }
}

/// What nobody else has touched is warm again, where that can be proved.
#[test]
fn warm_where_it_is_proved() {
    let dir = TempDir::new().unwrap();
    let s3 = S3::start();
    let store = Store::start(dir.path(), 8 * MIB, FailureKind::Failed);
    let nbd = store.uri();
    let file = dir.path().join("other");
    File::create(&file).unwrap().set_len(8 * MIB).unwrap();
    let file = format!("file:{}", file.display());
    let stores = [
        (object_volume(&s3), &[][..], true),
        (file, &[], true),
        (nbd.clone(), &[], false),
        (nbd, &["--trust-unchanged"], true),
    ];
    let both = |store| [("set:8", store), ("sparse", store)];
    for (number, (placement, (uri, more, warm))) in stores.iter().flat_map(both).enumerate() {
        let (more, warm) = (*more, *warm);
        let host = Host::placing(placement, dir.path(), &format!("host{number}"), uri, more);
        for kill in [true, false] {
            let running = host.start();
            let mut client = running.client();
            write_all(&mut client, 1 + u8::from(kill));
            check(&mut client, |_| 1 + u8::from(kill));
            drop(client);
            running.settle();
            running.end(kill);
            let running = host.start();
            assert_eq!(
                running.lines_at_start() > 0,
                warm,
                "{uri}, kill: {kill}: {:#?}",
                running.seen
            );
            check(&mut running.client(), |_| 1 + u8::from(kill));
            running.stop();
        }
    }
}

/// Somebody writes to the file between the kill and the next start, though no daemon did.
#[test]
fn a_file_that_was_changed_after_the_kill() {
    let dir = TempDir::new().unwrap();
    let uri = disk(dir.path());
    let host = Host::new(dir.path(), "a", &uri, &[]);
    let running = host.start();
    let mut client = running.client();
    write_all(&mut client, 1);
    check(&mut client, |_| 1);
    drop(client);
    running.kill();
    std::thread::sleep(Duration::from_millis(1_500));
    let file = File::options().write(true).open(dir.path().join("disk")).unwrap();
    file.write_all_at(&[9; LEN], at(5)).unwrap();
    let running = host.start();
    assert!(
        running.said("nothing shows that the run that was cut short was the last"),
        "{:#?}",
        running.seen
    );
    check(&mut running.client(), |place| if place == 5 { 9 } else { 1 });
    running.stop();
}

#[test]
fn an_object_store_that_fails_and_cuts_connections() {
    let dir = TempDir::new().unwrap();
    let s3 = S3::start();
    let uri = object_volume(&s3);
    let (code, text) = larder(&["block", "create", &uri, "--size", "8m"]);
    assert!(code == Some(1) && text.contains("there is a volume already"), "{text}");
    let host = Host::new(dir.path(), "a", &uri, &["--backing-timeout", "2"]);
    s3.state.fail_every.store(9, Ordering::SeqCst);
    s3.state.cut_every.store(11, Ordering::SeqCst);
    let mut version = 0;
    for kill in [true, false] {
        let running = host.start();
        let mut client = running.client();
        for _ in 0..2 {
            version += 1;
            write_all(&mut client, version);
        }
        check(&mut client, |_| version);
        drop(client);
        running.end(kill);
    }
    assert!(s3.keys().len() > 7, "{:?}", s3.keys());
    let running = host.start();
    check(&mut running.client(), |_| version);
    running.stop();
    assert!(s3.text("vm1/lease.json").contains("\"free\": true"), "it was let go");
    // A chunk goes: that is not served as if nothing had happened.
    s3.state.fail_every.store(0, Ordering::SeqCst);
    s3.state.cut_every.store(0, Ordering::SeqCst);
    s3.remove("vm1/chunks/00/000000000000");
    let running = host.start();
    assert_eq!(running.lines_at_start(), 0, "{:#?}", running.seen);
    assert!(running.said("changed by something that is not Larder"), "{:#?}", running.seen);
    assert_eq!(running.client().read(at(0), LEN), 0);
    running.stop();
    let (code, message) = Host::new(dir.path(), "c", &s3.uri("nothing"), &[]).refused();
    assert!(code == Some(1) && message.contains("larder block create"), "{message}");
}

#[test]
fn a_store_that_hangs() {
    let dir = TempDir::new().unwrap();
    let s3 = S3::start();
    let store = Store::start(dir.path(), 8 * MIB, FailureKind::Failed);
    let stores = [
        (store.uri(), &store.plan.hang, &store.plan.under_way),
        (object_volume(&s3), &s3.state.hang, &s3.state.under_way),
    ];
    for (number, (uri, hang, under_way)) in stores.into_iter().enumerate() {
        let fast = ["--backing-timeout", "3", "--backing-give-up", "6"];
        let host = Host::new(dir.path(), &format!("fail{number}"), &uri, &fast);
        let running = host.start();
        let mut client = running.client();
        write_all(&mut client, 1);
        hang.store(true, Ordering::SeqCst);
        let started = Instant::now();
        let error = client.try_write(at(1), LEN, 2).expect_err("it gives up");
        assert_eq!(error.kind, FailureKind::Failed);
        assert!((3..120).contains(&started.elapsed().as_secs()), "{:?}", started.elapsed());
        let state = || {
            let (_, text) = host.ask(&["status", "--json"]);
            let status: serde_json::Value = serde_json::from_str(&text).unwrap();
            status["volumes"][0]["store"]["state"].as_str().unwrap().to_owned()
        };
        // It takes connections, and answers nothing: that is no store, whether anybody asks or not.
        let nbd = uri.starts_with("nbd");
        while nbd && started.elapsed() < Duration::from_secs(14) {
            assert_eq!(state(), "lost", "{:?}", started.elapsed());
            std::thread::sleep(Duration::from_millis(100));
        }
        hang.store(false, Ordering::SeqCst);
        let end = Instant::now() + Duration::from_secs(120);
        while state() == "lost" {
            assert!(Instant::now() < end, "it stays lost");
            std::thread::sleep(Duration::from_millis(50));
        }
        // What was given up may still be carried out by a server of NBD (docs/nbd.md): it is let do so. What the store has
        // not seen by then is in no socket any more.
        let (end, mut quiet) = (Instant::now() + Duration::from_secs(120), 0);
        while quiet < 20 {
            assert!(Instant::now() < end, "it does not come to rest");
            quiet = if under_way.load(Ordering::SeqCst) == 0 { quiet + 1 } else { 0 };
            std::thread::sleep(Duration::from_millis(50));
        }
        client.write(at(1), LEN, 3);
        check(&mut client, |place| if place == 1 { 3 } else { 1 });
        drop(client);
        running.stop();

        // Or it waits for as long as it takes.
        let wait = [&fast[..], &["--on-backing-failure", "wait"]].concat();
        let host = Host::new(dir.path(), &format!("wait{number}"), &uri, &wait);
        let running = host.start();
        let mut client = running.client();
        hang.store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(9));
                hang.store(false, Ordering::SeqCst);
            });
            let started = Instant::now();
            client.write(at(2), LEN, 4);
            assert!(started.elapsed() > Duration::from_secs(8));
        });
        check(&mut client, |place| [1, 3, 4].get(place as usize).copied().unwrap_or(1));
        drop(client);
        running.stop();
    }
}

/// Connections go, in the middle of writes: they are made anew and nothing is lost. A flush may fail, once, and says why.
#[test]
fn connections_that_are_lost() {
    let dir = TempDir::new().unwrap();
    let mut store = Store::start(dir.path(), 8 * MIB, FailureKind::Failed);
    let host = Host::new(dir.path(), "a", &store.uri(), &[]);
    let running = host.start();
    for round in 1..=3u8 {
        std::thread::scope(|scope| {
            let mut client = running.client();
            let writer = scope.spawn(move || {
                for _ in 0..4 {
                    write_all(&mut client, round);
                }
            });
            std::thread::sleep(Duration::from_millis(30));
            store.cut(Duration::from_millis(300));
            writer.join().unwrap();
        });
        let mut client = running.client();
        check(&mut client, |_| round);
        if client.flush().is_err() {
            client.flush().unwrap();
        }
    }
    running.stop();
}

/// Operations fail in the store, some after they were carried out, and the daemon is killed again and again: what is read is
/// what was last answered, or something that was tried since.
#[test]
fn errors_of_the_store_and_kills() {
    for (kind, placement) in [(FailureKind::Failed, "set:8"), (FailureKind::NoSpace, "sparse")] {
        let dir = TempDir::new().unwrap();
        let store = Store::start(dir.path(), 8 * MIB, kind);
        let (uri, more) = (store.uri(), &["--trust-unchanged"]);
        let host = Host::placing(placement, dir.path(), "a", &uri, more);
        // What may be there: the last answered version first.
        let mut may: Vec<Vec<u8>> = vec![vec![0]; PLACES as usize];
        let (mut version, mut failed) = (0u8, 0);
        for round in 0..4u64 {
            let running = host.start();
            let mut client = running.client();
            store.plan.fail_every.store(5 + round, Ordering::SeqCst);
            for i in 0..50u64 {
                let place = (i * 37 + round) % PLACES;
                version = version.wrapping_add(1).max(1);
                match client.try_write(at(place), LEN, version) {
                    Ok(()) => may[place as usize] = vec![version],
                    Err(error) => {
                        assert!(
                            matches!(error.kind, FailureKind::Failed | FailureKind::NoSpace),
                            "{error}"
                        );
                        may[place as usize].push(version);
                        failed += 1;
                    }
                }
                let look = (i * 11) % PLACES;
                if let Ok(bytes) = client.try_read(at(look), LEN) {
                    for byte in bytes {
                        assert!(may[look as usize].contains(&byte), "place {look}: {byte}");
                    }
                }
            }
            store.plan.fail_every.store(0, Ordering::SeqCst);
            drop(client);
            running.kill();
            let running = host.start();
            let mut client = running.client();
            for place in 0..PLACES {
                // A write that failed may have been carried out in a part of its lines.
                for byte in client.try_read(at(place), LEN).unwrap() {
                    assert!(
                        may[place as usize].contains(&byte),
                        "round {round}, place {place}: {byte}"
                    );
                }
            }
            drop(client);
            running.stop();
        }
        assert!(failed > 10, "{failed}");
    }
}

/// Volumes on an NBD server and in an object store grow while they are served: clients that connect see the new size, those
/// that are there go on, and what was cached is used, now and after a stop or a kill.
#[test]
fn volumes_on_other_stores_grow() {
    let dir = TempDir::new().unwrap();
    let s3 = S3::start();
    let store = Store::start(dir.path(), 8 * MIB, FailureKind::Failed);
    let (nbd, object) = (store.uri(), object_volume(&s3));
    for (name, uri, more) in [("nbd", nbd, &["--trust-unchanged"][..]), ("s3", object, &[])] {
        let host = Host::new(dir.path(), name, &uri, more);
        let mut running = host.start();
        let mut old = running.client();
        write_all(&mut old, 1);
        check(&mut old, |_| 1);
        let ask = |arguments: &[&str]| host.ask(arguments);
        let (code, text) = ask(&["resize", "disk"]);
        assert!(code == Some(0) && text.contains("8 MiB as before"), "{text}");
        if name == "nbd" {
            let (code, text) = ask(&["resize", "disk", "12m"]);
            assert!(code == Some(1) && text.contains("larger there first"), "{text}");
            store.grow(12 * MIB);
            let (code, text) = ask(&["resize", "disk"]);
            assert!(code == Some(0) && text.contains("from 8 MiB to 12 MiB"), "{text}");
        } else {
            let (code, text) = ask(&["resize", "disk", "12m"]);
            assert!(code == Some(0) && text.contains("from 8 MiB to 12 MiB"), "{text}");
            assert!(s3.text("vm1/volume.json").contains("\"size\": 12582912"));
            let (code, text) = ask(&["resize", "disk", "12582913"]);
            assert!(code == Some(1) && text.contains("a multiple of 512"), "{text}");
        }
        let (code, text) = ask(&["resize", "disk", "4m"]);
        assert!(code == Some(2) && text.contains("cannot be made smaller"), "{text}");
        // Who was there goes on, within what it knows.
        check(&mut old, |_| 1);
        assert!(old.try_read(11 * MIB, 4096).is_err());
        let mut new = running.client();
        assert_eq!(new.read(11 * MIB, 4096), 0);
        new.write(12 * MIB - 8192, 8192, 7);
        old.write(at(0), LEN, 2);
        assert_eq!(new.read(12 * MIB - 8192, 8192), 7);
        new.flush().unwrap();
        drop((old, new));
        for kill in [true, false] {
            running.end(kill);
            running = host.start();
            assert!(running.lines_at_start() > 0, "{uri}, {kill}: {:#?}", running.seen);
            let mut client = running.client();
            assert_eq!(client.read(12 * MIB - 8192, 8192), 7);
            check(&mut client, |place| if place == 0 { 2 } else { 1 });
        }
        running.stop();
    }
}

#[test]
fn block_io_is_replayed_through_a_daemon() {
    let dir = TempDir::new().unwrap();
    let host = Host::new(dir.path(), "a", &disk(dir.path()), &[]);
    let trace = dir.path().join("trace.csv");
    let mut text = String::new();
    for i in 0..400u64 {
        // MSR: time (100 ns), host, disk, type, offset, size, response time.
        let kind = if i % 4 == 0 { "Write" } else { "Read" };
        text.push_str(&format!(
            "{},vm,0,{kind},{},{},1\n",
            128_166_372_000_000_000 + i * 10_000,
            i % 50 * 8192,
            4096 + i % 3 * 512
        ));
    }
    std::fs::write(&trace, text).unwrap();
    let running = host.start();
    let to = format!("nbd+unix:///disk?socket={}", dir.path().join("a/socket").display());
    let trace = trace.to_str().unwrap();
    for more in [&[][..], &["--timed", "--speed", "2"]] {
        let arguments = [
            &["replay", trace, "--to", &to, "-c", "2", "--depth", "4", "--warmup", "100", "--json"]
                [..],
            more,
        ]
        .concat();
        let started = Instant::now();
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(&arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["requests"], 300);
        let count = |at: usize| report["operations"][at]["count"].as_u64().unwrap();
        assert_eq!((count(0), count(1), count(2)), (225, 75, 300));
        let mean = report["operations"][2]["service_us"]["mean"].as_f64().unwrap();
        assert!(mean > 1.0 && report["errors"] == 0, "{report}");
        if !more.is_empty() {
            // 400 ms of trace at twice its speed.
            assert!(started.elapsed() > Duration::from_millis(190), "{report}");
        }
    }
    for (more, what) in
        [(&["--verify"][..], "is not for block I/O"), (&["-c", "100"], "64 are the most")]
    {
        let (code, text) = larder(&[&["replay", trace, "--to", &to][..], more].concat());
        assert!(code == Some(2) && text.contains(what), "{text}");
    }
    let (code, text) = larder(&["replay", "gen:zipf?objects=10&requests=10", "--to", &to]);
    assert!(code == Some(1) && text.contains("is no block I/O"), "{text}");
    // A server that dies meanwhile answers none of the rest: they are not tried one by one.
    let mut slow = std::process::Command::new(env!("CARGO_BIN_EXE_larder"))
        .args([
            "replay",
            trace,
            "--to",
            &to,
            "--timed",
            "--speed",
            "0.02",
            "--timeout",
            "1",
            "--json",
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(slow.try_wait().unwrap(), None, "it has hardly begun");
    running.kill();
    let output = slow.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let (answered, errors) = (report["requests"].as_u64(), report["errors"].as_u64());
    assert!(answered < Some(300) && errors > Some(0) && errors < Some(100), "{report}");
}
