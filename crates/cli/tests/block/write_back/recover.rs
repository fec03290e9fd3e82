//! `larder block recover`: markers that the library writes, and what the command makes of them.

use std::path::Path;
use std::process::Command;

use larder_block::backing::marker::{Found, MarkerPlace, PlaceOptions, marker_place};
use larder_block::backing::{self, Backing, OpenOptions};
use larder_block::op::FailureKind;
use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState, Order};
use serde_json::Value;
use tempfile::TempDir;

use super::has;
use crate::daemon::larder;
use crate::stores::faulty::Store;

/// Not quite two years before these lines were written.
const TIME: u64 = 1_700_000_000;

fn store() -> (TempDir, String) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk");
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let uri = format!("file:{}", path.display());
    (dir, uri)
}

fn open(uri: &str) -> Box<dyn Backing> {
    let options = OpenOptions { lease: false, ..OpenOptions::default() };
    backing::open_with(&uri.parse().unwrap(), &options).unwrap()
}

fn place(uri: &str, at: Option<&str>) -> Box<dyn MarkerPlace> {
    let options = PlaceOptions { at: at.map(str::to_owned), ..PlaceOptions::default() };
    marker_place(&*open(uri), &options).unwrap()
}

/// Writes a marker of generation 5, as a daemon on host `there` would, and returns its place.
fn mark(uri: &str, at: Option<&str>, state: MarkerState, order: Order) -> Box<dyn MarkerPlace> {
    let mut place = place(uri, at);
    let number = match place.read().unwrap() {
        Found::There(before) => before.number + 1,
        _ => 7,
    };
    let marker = Marker {
        number,
        state,
        volume: Uuid([1; 16]),
        identity: open(uri).identity().unwrap().encode(),
        cache: Uuid([0xab; 16]),
        run: 3,
        host: "there".into(),
        generation: 5,
        attachment: 1,
        frontier: 9,
        time: TIME * 1_000_000_000,
        mark: Some("before the move".into()),
        order,
        applied: 0,
        joins: 0,
        probes: false,
    };
    place.write(&marker).unwrap();
    place
}

fn marker(uri: &str, at: Option<&str>) -> Marker {
    let Found::There(marker) = place(uri, at).read().unwrap() else { panic!("it is not there") };
    *marker
}

fn recover(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "recover"])
        .args(arguments)
        .output()
        .unwrap();
    let text = |bytes: Vec<u8>| {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_dirty_store_is_clean_afterwards_and_what_is_lost_is_said() {
    for (state, order, words) in [
        (MarkerState::Dirty, Order::Flush, ["it was dirty", "order ordered", "volatile cache"]),
        (
            MarkerState::Carried,
            Order::Completion,
            ["put aside in the cache", "grain=completion", "crashed"],
        ),
        (MarkerState::Dirty, Order::Any, ["it was dirty", "order any", "never existed"]),
        (
            MarkerState::Closed,
            Order::Flush,
            ["log of the cache had failed", "order ordered", "power cut"],
        ),
    ] {
        let (_dir, uri) = store();
        drop(mark(&uri, None, state, order));
        let (code, said, error) = recover(&[&uri]);
        assert_eq!(code, 0, "{error}");
        has(&said, &words);
        has(
            &said,
            &[
                "abababab-abab-abab-abab-abababababab, of host 'there'",
                "not older than 2023-11-14 22:13:20 UTC",
                "lost at most what was written after that",
                "generation 6",
            ],
        );
        let now = marker(&uri, None);
        assert_eq!((now.state, now.generation), (MarkerState::Clean, 6));
        assert!(now.number > 7, "{now:?}");
        // Asked again it has nothing to do, and changes nothing.
        let (code, said, error) = recover(&[&uri]);
        assert_eq!(code, 0, "{error}");
        has(&said, &["it was clean", "nothing"]);
        assert_eq!(marker(&uri, None), now);
    }
}

#[test]
fn it_is_answered_in_json_too() {
    let (_dir, uri) = store();
    drop(mark(&uri, None, MarkerState::Dirty, Order::Flush));
    let (code, said, error) = recover(&[&uri, "--json"]);
    assert_eq!(code, 0, "{error}");
    let said: Value = serde_json::from_str(&said).unwrap();
    for (key, value) in [
        ("store", Value::from(uri.as_str())),
        ("was", "dirty".into()),
        ("recovered", true.into()),
        ("cache", "abababab-abab-abab-abab-abababababab".into()),
        ("host", "there".into()),
        ("order", "ordered".into()),
        ("not_older_than", TIME.into()),
        ("mark", "before the move".into()),
        ("generation", 6.into()),
        ("fenced", true.into()),
    ] {
        assert_eq!(said[key], value, "{key}: {said:#}");
    }
}

#[test]
fn a_living_holder_keeps_its_marker() {
    let (_dir, uri) = store();
    let holder = mark(&uri, None, MarkerState::Dirty, Order::Flush);
    let (code, _, error) = recover(&[&uri]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["is held", "stop that one first"]);
    drop(holder);
    assert_eq!(marker(&uri, None).state, MarkerState::Dirty);
    assert_eq!(recover(&[&uri]).0, 0);
}

#[test]
fn a_store_that_is_served_is_not_recovered() {
    let (_dir, uri) = store();
    drop(mark(&uri, None, MarkerState::Dirty, Order::Flush));
    let served = backing::open_with(&uri.parse().unwrap(), &OpenOptions::default()).unwrap();
    let (code, _, error) = recover(&[&uri]);
    assert!(code == 1 && error.contains("locked"), "{error}");
    drop(served);
    assert_eq!(recover(&[&uri]).0, 0);
}

#[test]
fn without_a_marker_there_is_nothing_to_recover() {
    let (dir, uri) = store();
    let (code, _, error) = recover(&[&uri]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["disk.larder", "is not there", "--marker"]);
    assert!(!dir.path().join("disk.larder").exists(), "one was made");
    let (code, _, error) = recover(&["file:/nowhere/disk"]);
    assert!(code == 1 && error.contains("/nowhere/disk"), "{error}");
    let (code, _, error) = recover(&["/nowhere/disk"]);
    assert!(code == 2 && error.contains("file:PATH"), "{error}");
}

/// It was there: an attribute of the file says so.
#[test]
fn a_marker_that_was_removed_is_replaced() {
    let (dir, uri) = store();
    drop(mark(&uri, None, MarkerState::Dirty, Order::Flush));
    let path = dir.path().join("disk.larder");
    std::fs::remove_file(&path).unwrap();
    let Found::Absent { was } = place(&uri, None).read().unwrap() else { panic!("it is there") };
    let (code, said, error) = recover(&[&uri]);
    if !was {
        // The file system has no attributes.
        assert_eq!(code, 1, "{said}");
        return;
    }
    assert_eq!(code, 0, "{error}");
    has(&said, &["it was gone", "at most all that was written", "never existed"]);
    assert_eq!(marker(&uri, None).state, MarkerState::Clean);
}

#[test]
fn what_is_no_marker_is_left_alone() {
    let (dir, uri) = store();
    let path = dir.path().join("disk.larder");
    std::fs::write(&path, "my notes").unwrap();
    let (code, _, error) = recover(&[&uri]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["disk.larder", "left as it is"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"my notes");
}

#[test]
fn a_store_that_was_set_back_voids_every_cache() {
    let (_dir, uri) = store();
    drop(mark(&uri, None, MarkerState::Clean, Order::Flush));
    let (code, said, error) = recover(&[&uri, "--set-back"]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["it was clean", "counts no more"]);
    let now = marker(&uri, None);
    assert!(now.generation > 1 << 32 && now.number > 1 << 32, "{now:?}");
}

#[test]
fn a_store_without_a_place_of_its_own_names_one() {
    let dir = TempDir::new().unwrap();
    let server = Store::start(dir.path(), 1 << 20, FailureKind::Failed);
    let uri = server.uri();
    let (code, _, error) = recover(&[&uri]);
    assert_eq!(code, 2, "{error}");
    has(&error, &["has no place for a write-back marker", "--marker"]);
    assert!(!error.contains("--no-marker"), "{error}");
    let path = dir.path().join("marker");
    let at = path.to_str().unwrap();
    drop(mark(&uri, Some(at), MarkerState::Dirty, Order::Flush));
    let (code, said, error) = recover(&[&uri, "--marker", at]);
    assert_eq!(code, 0, "{error}");
    has(&said, &["it was dirty", "generation 6"]);
    assert_eq!(marker(&uri, Some(at)).state, MarkerState::Clean);
    // A path is meant from where the command runs.
    drop(mark(&uri, Some(at), MarkerState::Clean, Order::Flush));
    let (code, _, error) = recover(&[&uri, "--marker", &uri]);
    assert_ne!(code, 0, "the store itself: {error}");
    assert!(Path::new(at).exists());
}

/// Of a daemon that is there nothing is asked.
#[test]
fn it_needs_no_daemon() {
    let (code, message) = larder(&["recover", "--help"]);
    assert_eq!(code, Some(0), "{message}");
    let (code, message) = larder(&["recover"]);
    assert_eq!(code, Some(2), "{message}");
}
