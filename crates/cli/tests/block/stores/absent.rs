//! Stores that are not there when the daemon starts, and daemons that are not gone yet when the next one does.

use larder_block::op::FailureKind;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::daemon::{Daemon, Host};
use super::faulty::Store;
use super::{LEN, MIB, at, check, write_all};

const LONG: Duration = Duration::from_secs(120);

fn volume(daemon: &Daemon, name: &str) -> Option<Value> {
    let status = daemon.status();
    let volumes = status["volumes"].as_array().unwrap();
    volumes.iter().find(|v| v["name"] == name).cloned()
}

fn until_served(daemon: &Daemon, name: &str) {
    let end = Instant::now() + LONG;
    let waits = |v: Value| matches!(v["store"]["state"].as_str(), Some("waiting" | "refused"));
    while volume(daemon, name).is_none_or(waits) {
        assert!(Instant::now() < end, "{:#}", daemon.status());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// One store that is not there keeps no other volume: its own waits for it, shows that it does, and is served when it comes, with
/// what the store has then.
#[test]
fn a_volume_whose_store_is_not_there_waits() {
    let dir = TempDir::new().unwrap();
    let other = dir.path().join("other");
    File::create(&other).unwrap().set_len(8 * MIB).unwrap();
    let mut store = Store::start(dir.path(), 8 * MIB, FailureKind::Failed);
    let late = format!("late={}", store.uri());
    let more = ["--volume", &late, "--on-backing-failure"];
    let uri = format!("file:{}", other.display());
    let waits = Host::new(dir.path(), "a", &uri, &[&more[..], &["wait"]].concat());
    let running = waits.start();
    write_all(&mut running.client(), 1);
    write_all(&mut running.client_of("late"), 1);
    check(&mut running.client_of("late"), |_| 1);
    running.settle();
    running.stop();
    store.leave();
    // Without the word it ends, and says which.
    let fails = Host::new(dir.path(), "b", &uri, &[&more[..], &["fail"]].concat());
    let (code, message) = fails.refused();
    let clear = message.contains("volume 'late'") && message.contains("--on-backing-failure wait");
    assert!(code == Some(1) && clear, "{message}");
    for kill in [false, true] {
        let running = waits.start();
        let waiting = volume(&running, "late").unwrap();
        assert_eq!(waiting["store"]["state"], "waiting", "{waiting:#}");
        let alarms = running.status()["alarms"].to_string();
        assert!(alarms.contains("volume 'late'") && alarms.contains("every 5 s"), "{alarms}");
        let aside = running.status()["put_aside"].as_array().map(Vec::len);
        assert_eq!(aside, Some(0), "what is waited for is not put aside");
        check(&mut running.client(), |_| 1);
        // Somebody else has the store meanwhile.
        let version = 5 + u8::from(kill);
        let file = File::options().write(true).open(store.file()).unwrap();
        (0..super::PLACES).for_each(|p| file.write_all_at(&[version; LEN], at(p)).unwrap());
        store.come_back();
        until_served(&running, "late");
        check(&mut running.client_of("late"), |_| version);
        check(&mut running.client(), |_| 1);
        running.settle();
        running.end(kill);
        store.leave();
    }
    // It is not waited for where it is put aside by hand, and no other store takes its place before.
    let running = waits.start();
    let other = format!("late=file:{}", dir.path().join("other").display());
    let (code, said) = waits.ask(&["attach", &other]);
    assert!(code == Some(1) && said.contains("waits for its store"), "{said}");
    let (code, said) = waits.ask(&["detach", "late"]);
    assert!(code == Some(0) && said.contains("not waited for any more"), "{said}");
    assert!(volume(&running, "late").is_none());
    running.stop();
}

/// A start while the former daemon is still stopping waits for it, and says so.
#[test]
fn a_start_waits_for_a_daemon_that_is_stopping() {
    let dir = TempDir::new().unwrap();
    let store = Store::start(dir.path(), 8 * MIB, FailureKind::Failed);
    let host = Host::new(dir.path(), "a", &store.uri(), &["--backing-give-up", "3600"]);
    let first = host.start();
    let mut client = first.client();
    client.write(at(0), LEN, 1);
    // It waits for a write that the store does not answer.
    store.plan.hang.store(true, Ordering::SeqCst);
    let writer = std::thread::spawn(move || {
        // Answered or not.
        let _ = client.try_write(at(1), LEN, 2);
    });
    let end = Instant::now() + LONG;
    while store.plan.under_way.load(Ordering::SeqCst) == 0 {
        assert!(Instant::now() < end, "it is not asked");
        std::thread::sleep(Duration::from_millis(5));
    }
    first.terminate();
    let mut first = first;
    first.wait_for("stopping");
    let mut second = host.spawn();
    let said = second.wait_for("which is stopping");
    assert!(said.contains("waiting for process"), "{said}");
    store.plan.hang.store(false, Ordering::SeqCst);
    second.wait_for("ready");
    assert_eq!(second.client().read(at(0), LEN), 1);
    writer.join().unwrap();
    drop(first);
    second.stop();
}
