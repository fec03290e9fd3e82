use larder_format::Uuid;
use larder_format::block::marker::{COPY_BYTES, Marker, MarkerState, Order};

use super::memory::{MemoryMarker, Unflushed};
use super::{Found, MarkerIoError, MarkerPlace};

pub(super) fn marker(number: u64) -> Marker {
    Marker {
        number,
        state: if number.is_multiple_of(2) { MarkerState::Dirty } else { MarkerState::Clean },
        volume: Uuid([1; 16]),
        identity: [7; 64],
        cache: Uuid([2; 16]),
        run: 3,
        host: "a-host".into(),
        generation: 4,
        attachment: 5,
        frontier: number * 100,
        time: 6,
        // It goes into the second sector: no power cut between the two leaves a whole copy.
        mark: Some(format!("{number:02}").repeat(120)),
        order: Order::Flush,
        applied: 0,
        joins: 0,
        probes: false,
    }
}

pub(super) fn there(number: u64) -> Found {
    Found::There(Box::new(marker(number)))
}

pub(super) fn read(place: &mut dyn MarkerPlace) -> Found {
    place.read().unwrap()
}

const NONE: Found = Found::Absent { was: false };

/// One with this marker.
fn with(number: u64) -> MemoryMarker {
    let memory = MemoryMarker::new();
    let mut place = memory.open(false);
    read(&mut *place);
    place.write(&marker(number)).unwrap();
    memory
}

/// What a power cut may leave of a write that was not flushed.
fn leftovers() -> Vec<Unflushed> {
    let torn = (0..=8).map(Unflushed::Torn);
    [Unflushed::Lost, Unflushed::Kept].into_iter().chain(torn).collect()
}

#[test]
fn a_power_cut_at_any_step_of_a_write_leaves_one_of_the_two_markers() {
    for number in [2, 3] {
        for unflushed in leftovers() {
            for step in 0.. {
                let memory = with(1);
                let mut place = memory.open(false);
                read(&mut *place);
                memory.cut_after(step, unflushed);
                let written = place.write(&marker(number));
                let went = memory.is_off();
                memory.set_power(true);
                let found = read(&mut *memory.open(false));
                if written.is_ok() {
                    assert_eq!(found, there(number));
                } else {
                    assert!(found == there(1) || found == there(number), "{step} {unflushed:?}");
                }
                if !went {
                    assert!(step >= 4 && written.is_ok());
                    break;
                }
            }
        }
    }
}

/// A second write meets the copies as a first one that was cut short has left them.
#[test]
fn a_second_power_cut_leaves_a_marker_too() {
    for first in 0..4 {
        for unflushed in leftovers() {
            for second in 0..4 {
                for torn in leftovers() {
                    let memory = with(1);
                    let mut place = memory.open(false);
                    read(&mut *place);
                    memory.cut_after(first, unflushed);
                    assert!(place.write(&marker(2)).is_err());
                    memory.set_power(true);
                    let mut place = memory.open(false);
                    let between = read(&mut *place);
                    memory.cut_after(second, torn);
                    assert!(place.write(&marker(4)).is_err());
                    memory.set_power(true);
                    let found = read(&mut *memory.open(false));
                    assert!(
                        found == between || found == there(4),
                        "{first} {unflushed:?} {second} {torn:?}: {found:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_power_cut_at_any_step_of_the_first_write_leaves_none_or_the_marker() {
    for number in [1, 2] {
        for unflushed in leftovers() {
            for step in 0.. {
                let memory = MemoryMarker::new();
                let mut place = memory.open(false);
                assert_eq!(read(&mut *place), NONE);
                memory.cut_after(step, unflushed);
                let written = place.write(&marker(number));
                let went = memory.is_off();
                memory.set_power(true);
                let mut place = memory.open(false);
                let found = read(&mut *place);
                match written {
                    Ok(()) => assert_eq!(found, there(number)),
                    Err(_) => assert!(found == NONE || found == there(number), "{step}"),
                }
                place.write(&marker(3)).unwrap();
                assert_eq!(read(&mut *place), there(3));
                if !went {
                    break;
                }
            }
        }
    }
}

#[test]
fn a_power_cut_at_any_step_of_a_removal_leaves_none_or_the_marker() {
    for unflushed in leftovers() {
        for step in 0.. {
            let memory = with(1);
            memory.set_was(true);
            let mut place = memory.open(false);
            read(&mut *place);
            memory.cut_after(step, unflushed);
            let removed = place.remove();
            let went = memory.is_off();
            memory.set_power(true);
            let found = read(&mut *memory.open(false));
            assert!(found == NONE || found == there(1) && removed.is_err(), "{step} {found:?}");
            if !went {
                break;
            }
        }
    }
}

#[test]
fn one_damaged_copy_is_made_up_for_by_the_other_and_mended_by_the_next_write() {
    for copy in 0..2 {
        let memory = with(1);
        memory.set_bytes(copy * COPY_BYTES + 700, &[0xff; 9]);
        let mut place = memory.open(false);
        assert_eq!(read(&mut *place), there(1));
        place.write(&marker(2)).unwrap();
        memory.set_bytes((1 - copy) * COPY_BYTES + 700, &[0xff; 9]);
        assert_eq!(read(&mut *place), there(2));
    }
}

#[test]
fn with_both_copies_damaged_nothing_is_believed_and_a_new_marker_may_be_written() {
    let memory = with(1);
    let damage = || {
        memory.set_bytes(700, &[0xff]);
        memory.set_bytes(COPY_BYTES + 20, &[0xff]);
    };
    let mut place = memory.open(false);
    assert_eq!(read(&mut *place), there(1));
    damage();
    assert!(matches!(place.write(&marker(2)), Err(MarkerIoError::Changed { .. })), "unseen");
    assert_eq!(read(&mut *place), Found::Damaged);
    place.write(&marker(9)).unwrap();
    assert_eq!(read(&mut *memory.open(false)), there(9));
}

#[test]
fn a_marker_that_another_holder_has_written_is_not_overwritten() {
    let memory = with(1);
    let (mut one, mut other) = (memory.open(false), memory.open(false));
    read(&mut *one);
    read(&mut *other);
    assert!(!one.is_fenced());
    let theirs = Marker { cache: Uuid([9; 16]), ..marker(2) };
    other.write(&theirs).unwrap();
    let refused = one.write(&marker(7)).unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, MarkerIoError::Changed { .. }));
    assert!(text.contains("number 2") && text.contains("0909"), "{text}");
    assert!(matches!(one.remove(), Err(MarkerIoError::Changed { .. })));
    assert_eq!(read(&mut *other), Found::There(Box::new(theirs)));
    // Having seen it, whoever decides may do so.
    read(&mut *one);
    one.write(&marker(7)).unwrap();
    other.write(&marker(8)).unwrap_err();
    one.remove().unwrap();
    assert!(matches!(other.write(&marker(9)), Err(MarkerIoError::Changed { .. })), "it is gone");
}

#[test]
fn a_marker_does_not_follow_one_with_the_same_number_or_a_higher_one() {
    let memory = with(5);
    let mut place = memory.open(false);
    read(&mut *place);
    let same = Marker { frontier: 1, ..marker(5) };
    for wanted in [marker(4), same] {
        let refused = place.write(&wanted);
        assert!(matches!(refused, Err(MarkerIoError::Number { there: 5, .. })), "{refused:?}");
    }
    place.write(&marker(5)).unwrap();
    place.write(&marker(6)).unwrap();
}

#[test]
fn a_place_that_was_not_read_or_is_only_looked_at_is_not_written() {
    let memory = with(1);
    let mut place = memory.open(false);
    assert!(matches!(place.write(&marker(2)), Err(MarkerIoError::Unread { .. })));
    assert!(matches!(place.remove(), Err(MarkerIoError::Unread { .. })));
    let mut place = memory.open(true);
    assert_eq!(read(&mut *place), there(1));
    assert!(matches!(place.write(&marker(2)), Err(MarkerIoError::LookOnly { .. })));
    assert!(matches!(place.remove(), Err(MarkerIoError::LookOnly { .. })));
    assert_eq!(read(&mut *place), there(1));
}

/// Whichever of the two a failed write has left, it is known as this holder's own.
#[test]
fn a_write_that_failed_is_followed_by_another() {
    for step in 0..4 {
        for again in 0..4 {
            let memory = with(1);
            let mut place = memory.open(false);
            read(&mut *place);
            memory.fail_after(step);
            assert!(matches!(place.write(&marker(2)), Err(MarkerIoError::Failed { .. })));
            memory.fail_after(again);
            assert!(place.write(&marker(3)).is_err());
            place.write(&marker(4)).unwrap();
            assert_eq!(read(&mut *place), there(4));
        }
    }
}

#[test]
fn what_is_no_marker_is_never_overwritten() {
    let memory = MemoryMarker::new();
    memory.set_bytes(4000, b"somebody's data");
    let before = memory.bytes();
    let mut place = memory.open(false);
    assert!(matches!(place.read(), Err(MarkerIoError::NotAMarker { .. })));
    assert!(matches!(place.write(&marker(1)), Err(MarkerIoError::Unread { .. })));
    assert!(matches!(place.remove(), Err(MarkerIoError::Unread { .. })));
    assert_eq!(memory.bytes(), before);
    // It came after the place was read.
    let memory = MemoryMarker::new();
    let mut place = memory.open(false);
    read(&mut *place);
    memory.set_bytes(4000, b"somebody's data");
    assert!(matches!(place.write(&marker(1)), Err(MarkerIoError::NotAMarker { .. })));
    assert_eq!(memory.bytes(), before);
}

#[test]
fn a_marker_of_another_version_is_named_and_left_alone() {
    let memory = MemoryMarker::new();
    let mut bytes = marker(1).encode();
    bytes[12] = 9;
    let crc = crc32c::crc32c(&bytes[12..]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    memory.set_bytes(0, &bytes);
    let mut place = memory.open(false);
    let error = place.read().unwrap_err();
    assert!(error.to_string().contains("version 9"), "{error}");
    assert!(matches!(place.write(&marker(2)), Err(MarkerIoError::Unread { .. })));
    assert_eq!(memory.bytes()[..COPY_BYTES], bytes);
}

#[test]
fn a_fenced_place_has_one_holder_and_may_be_looked_at() {
    let memory = MemoryMarker::fenced();
    let (mut one, mut other) = (memory.open(false), memory.open(false));
    assert_eq!(read(&mut *one), NONE);
    assert!(one.is_fenced());
    assert!(matches!(other.read(), Err(MarkerIoError::Held { .. })));
    one.write(&marker(1)).unwrap();
    assert_eq!(read(&mut *memory.open(true)), there(1));
    drop(one);
    assert_eq!(read(&mut *other), there(1));
}

#[test]
fn that_there_was_one_is_told_until_it_is_removed() {
    let memory = with(1);
    memory.set_bytes(0, &[0; 2 * COPY_BYTES]);
    let mut place = memory.open(false);
    assert_eq!(read(&mut *place), Found::Absent { was: true });
    place.write(&marker(2)).unwrap();
    place.remove().unwrap();
    assert_eq!(read(&mut *place), NONE);
}

#[test]
fn a_place_that_hangs_is_waited_for() {
    let memory = with(1);
    memory.set_hangs(true);
    let mut place = memory.open(false);
    let thread = std::thread::spawn(move || read(&mut *place));
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!thread.is_finished());
    memory.set_hangs(false);
    assert_eq!(thread.join().unwrap(), there(1));
}

#[test]
fn a_marker_with_names_that_do_not_fit_is_refused() {
    let memory = with(1);
    let mut place = memory.open(false);
    read(&mut *place);
    let long = "x".repeat(256);
    let bad = [
        Marker { host: long.clone(), ..marker(2) },
        Marker { mark: Some(long), ..marker(2) },
        Marker { mark: Some(String::new()), ..marker(2) },
    ];
    for bad in bad {
        assert!(matches!(place.write(&bad), Err(MarkerIoError::Failed { .. })));
    }
    assert_eq!(read(&mut *place), there(1));
}
