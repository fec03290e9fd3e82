use std::sync::atomic::Ordering;
use std::time::Duration;

use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};

use super::object::ObjectMedium;
use super::place::Place;
use super::place_tests::{marker, read, there};
use super::{Found, MarkerIoError, MarkerPlace, PlaceOptions};
use crate::Timeouts;
use crate::object::{Memory, runtime};

const NONE: Found = Found::Absent { was: false };

fn place_with(store: &Memory, look: bool) -> Place<ObjectMedium> {
    let timeout = Timeouts {
        connect: Duration::from_secs(1),
        silence: Duration::from_millis(500),
        give_up: Some(Duration::from_secs(2)),
    };
    let options = PlaceOptions { at: None, look, timeout };
    let (name, prefix) = ("s3://test/a".to_owned(), Path::from("a"));
    let store = Box::new(store.clone());
    Place::new(ObjectMedium::with_store(name, store, prefix, &options).unwrap())
}

fn place(store: &Memory) -> Place<ObjectMedium> {
    place_with(store, false)
}

fn get(store: &Memory, name: &str) -> Option<Vec<u8>> {
    let work = async { store.store.get(&Path::from(name)).await.ok()?.bytes().await.ok() };
    runtime().unwrap().block_on(work).map(|bytes| bytes.to_vec())
}

fn put(store: &Memory, name: &str, bytes: Vec<u8>) {
    let at = Path::from(name);
    runtime().unwrap().block_on(store.store.put(&at, PutPayload::from(bytes))).unwrap();
}

fn delete(store: &Memory, name: &str) {
    runtime().unwrap().block_on(store.store.delete(&Path::from(name))).unwrap();
}

#[test]
fn a_marker_is_written_read_and_removed() {
    let store = Memory::default();
    let mut place = place(&store);
    assert_eq!(read(&mut place), NONE);
    assert!(place.is_fenced() && place.describe().contains("s3://test/a"));
    for number in 1..4 {
        place.write(&marker(number)).unwrap();
        assert_eq!(get(&store, "a/marker"), Some(marker(number).encode()));
    }
    assert_eq!(read(&mut self::place(&store)), there(3));
    let mut looking = place_with(&store, true);
    assert_eq!(read(&mut looking), there(3));
    assert!(matches!(looking.write(&marker(4)), Err(MarkerIoError::LookOnly { .. })));
    place.remove().unwrap();
    assert!(["a/marker", "a/marked", "a/marker.probe"].iter().all(|n| get(&store, n).is_none()));
    assert_eq!(read(&mut place), NONE);
    place.write(&marker(1)).unwrap();
    assert_eq!(read(&mut place), there(1));
}

#[test]
fn a_marker_that_was_deleted_is_missed() {
    let store = Memory::default();
    let mut place = place(&store);
    read(&mut place);
    place.write(&marker(1)).unwrap();
    delete(&store, "a/marker");
    assert!(matches!(place.write(&marker(2)), Err(MarkerIoError::Changed { .. })));
    assert_eq!(read(&mut place), Found::Absent { was: true });
    place.write(&marker(2)).unwrap();
    assert_eq!(read(&mut place), there(2));
}

#[test]
fn of_two_holders_one_writes() {
    let store = Memory::default();
    let (mut one, mut other) = (place(&store), place(&store));
    read(&mut one);
    read(&mut other);
    one.write(&marker(1)).unwrap();
    assert!(matches!(other.write(&marker(2)), Err(MarkerIoError::Changed { .. })));
    read(&mut other);
    other.write(&marker(2)).unwrap();
    assert!(matches!(one.write(&marker(3)), Err(MarkerIoError::Changed { .. })));
    assert_eq!(get(&store, "a/marker"), Some(marker(2).encode()));
}

/// Another holder's PUT comes between the look and the PUT.
#[test]
fn a_write_that_comes_in_between_is_not_overwritten() {
    let store = Memory::default();
    let mut place = place(&store);
    read(&mut place);
    place.write(&marker(1)).unwrap();
    use super::place::Medium;
    place.medium().load().unwrap();
    put(&store, "a/marker", marker(2).encode());
    let refused = place.medium().replace(0, &marker(3).encode());
    assert!(matches!(refused, Err(MarkerIoError::Changed { .. })), "{refused:?}");
    assert_eq!(get(&store, "a/marker"), Some(marker(2).encode()));
}

#[test]
fn a_store_whose_puts_are_not_conditional_is_called_so_and_looked_at_before_each() {
    let store = Memory::default();
    store.faults.unconditional.store(true, Ordering::SeqCst);
    let (mut one, mut other) = (place(&store), place(&store));
    read(&mut one);
    read(&mut other);
    assert!(!one.is_fenced());
    assert!(get(&store, "a/marker.probe").is_none(), "nothing is left of the question");
    one.write(&marker(1)).unwrap();
    assert!(matches!(other.write(&marker(2)), Err(MarkerIoError::Changed { .. })));
    assert_eq!(read(&mut other), there(1));
}

#[test]
fn requests_that_fail_and_answers_that_are_lost_are_made_up_for() {
    for (before, after) in [(3, 0), (0, 2), (5, 3)] {
        let store = Memory::default();
        store.faults.before.store(before, Ordering::SeqCst);
        store.faults.after.store(after, Ordering::SeqCst);
        let mut place = place(&store);
        read(&mut place);
        for number in 1..6 {
            place.write(&marker(number)).unwrap();
            assert_eq!(read(&mut place), there(number));
        }
        assert!(place.is_fenced());
        place.remove().unwrap();
        assert_eq!(read(&mut place), NONE);
    }
}

#[test]
fn a_store_that_does_not_answer_is_unreachable_for_a_time() {
    let store = Memory::default();
    let mut place = place(&store);
    read(&mut place);
    place.write(&marker(1)).unwrap();
    store.faults.hang.store(true, Ordering::SeqCst);
    let error = place.write(&marker(2)).unwrap_err();
    assert!(matches!(error, MarkerIoError::Unreachable { .. }), "{error:?}");
    let error = self::place(&store).read().unwrap_err();
    assert!(matches!(error, MarkerIoError::Unreachable { .. }), "{error:?}");
    store.faults.hang.store(false, Ordering::SeqCst);
    place.write(&marker(2)).unwrap();
    assert_eq!(read(&mut place), there(2));
}

#[test]
fn what_is_no_marker_is_left_as_it_is_and_a_damaged_one_is_called_so() {
    for (bytes, is_damage) in [
        (b"somebody's notes".to_vec(), false),
        (Vec::new(), false),
        (vec![1; 100_000], false),
        (marker(1).encode()[..100].to_vec(), true),
    ] {
        let store = Memory::default();
        put(&store, "a/marker", bytes.clone());
        let mut place = place(&store);
        let found = place.read();
        match is_damage {
            true => {
                assert_eq!(found, Ok(Found::Damaged));
                place.write(&marker(2)).unwrap();
                assert_eq!(read(&mut place), there(2));
            }
            false => {
                assert!(matches!(found, Err(MarkerIoError::NotAMarker { .. })), "{found:?}");
                assert!(place.write(&marker(2)).is_err());
                assert_eq!(get(&store, "a/marker"), Some(bytes));
            }
        }
    }
}
