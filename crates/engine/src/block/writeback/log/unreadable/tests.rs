//! What cannot be read: the list, and what becomes of volumes.

use std::collections::VecDeque;

use larder_base::Nanos;
use larder_format::Uuid;
use larder_format::block::superblock::Cut;
use larder_format::block::write_log::pieces;
use proptest::prelude::*;

use super::super::super::destager::{Config as Destage, Pace};
use super::super::super::overlay;
use super::super::super::overlay::{Overlay, Stretch};
use super::super::super::recovery::Volume;
use super::super::super::scan::Scan;
use super::super::super::volume_log::{Grain, Kind, Logged, VolumeLog};
use super::super::{Append, Asked, Asks, Attach, Config, Found, Lies, Piece, Said, Sums};
use super::*;
use crate::block::api::OpId;

proptest! {
    #[test]
    fn stretches_are_what_single_bytes_say(
        steps in prop::collection::vec((0..64u64, 0..24u64, any::<bool>()), 0..60),
    ) {
        let mut all = Unreadable::default();
        let mut plain = [false; 100];
        for (at, len, bad) in steps {
            plain[at as usize..(at + len) as usize].fill(bad);
            if bad {
                all.add(at..at + len);
            } else {
                all.remove(at..at + len);
            }
            let mut seen = [false; 100];
            all.within(0..100).for_each(|r| seen[r.start as usize..r.end as usize].fill(true));
            assert_eq!(seen, plain);
            let runs = plain.chunk_by(|a, b| a == b).filter(|run| run[0]).count();
            assert_eq!((all.count(), all.is_empty()), (runs, runs == 0));
            let part: u64 = all.within(7..31).map(|r| r.end - r.start).sum();
            assert_eq!(part, plain[7..31].iter().filter(|bad| **bad).count() as u64);
        }
    }
}

/// A volume that ends at its first byte that does not count, and what a FRONTIER lists of it.
fn cut_at(end: u64, last: u64) -> WriteLog<Vec<u8>> {
    let mut log = log(Order::Any, SEGMENT, 16);
    log.set_void(1, Void::new(Some(Cut { end, last }), &[]));
    log
}

#[test]
fn what_is_listed_beyond_an_end_that_was_given_up_does_not_count() {
    let mut log = cut_at(2 * BLOCK, 5);
    let extent = |offset| Extent { offset, length: BLOCK };
    let unreadable = vec![extent(0), extent(2 * BLOCK), extent(9 * BLOCK)];
    let found = Volume { frontier: 5, last: 5, unreadable, ..Volume::default() };
    log.recover(NOW, 1, &found, &Scan::default());
    assert_eq!(log.status(NOW, 1).unwrap().unreadable, BLOCK);
    write(&mut log, 1, 0..BLOCK);
    destage(&mut log, NOW, |_| true);
    assert!(log.is_clean(1), "{:?}", log.status(NOW, 1));
}

#[test]
fn what_is_lost_beyond_an_end_that_was_given_up_stops_nothing() {
    let mut volume = VolumeLog::new(Order::Ordered(Grain::Flush), 0);
    volume.set_void(Void::new(Some(Cut { end: 2 * BLOCK, last: 1 }), &[]));
    let mut overlay = Overlay::default();
    let logged = |at, len| Logged { at, len, kind: Kind::Write, batch: 1, place: 0 };
    volume.recover(logged(BLOCK, 3 * BLOCK), 0, &mut overlay);
    volume.lose([1], &mut overlay);
    assert_eq!(volume.unreadable_bytes(), BLOCK);
    assert_eq!(volume.next(1, u64::MAX, false, false), None);
    // All of it that counts is written again.
    volume.assign(logged(BLOCK, BLOCK), None, &mut overlay);
    volume.answer(&mut overlay);
    assert_eq!(volume.unreadable_bytes(), 0);
    assert_eq!(volume.next(1, u64::MAX, false, false), Some(1..=2));
}

#[test]
fn a_full_list_that_would_have_to_split_a_stretch_is_said_to_stop_the_volume() {
    let mut log = log(Order::Any, SEGMENT, 16);
    let stretch = |n: u64| n * 8 * BLOCK..(n * 8 + 3) * BLOCK;
    let bad = &mut log.volumes.get_mut(&1).unwrap().bad;
    (0..most(log.config.geometry) as u64).for_each(|n| bad.add(stretch(n)));
    write(&mut log, 1, BLOCK..2 * BLOCK);
    destage(&mut log, NOW, |_| true);
    let status = log.status(NOW, 1).unwrap();
    assert_eq!((status.dirty, status.is_stopped, status.unlisted), (BLOCK, true, true));
    // With the rest of the stretch there is no more to list than before.
    write(&mut log, 2, stretch(0));
    destage(&mut log, NOW, |_| true);
    let status = log.status(NOW, 1).unwrap();
    assert_eq!((status.dirty, status.is_stopped, status.unlisted), (0, false, false));
}

/// The store of volume 1 is away, so that nothing makes room but what is parked.
#[test]
fn what_counted_as_lost_and_is_read_when_it_is_parked_is_lost_no_more() {
    for order in [Order::Any, Order::Ordered(Grain::Flush)] {
        let mut log = log(order, 64 << 10, 12);
        write(&mut log, 1, 0..BLOCK);
        let mut now = NOW;
        for _ in 0..READ_TRIES {
            let status = log.status(now, 1).unwrap();
            assert_eq!(status.unreadable, 0);
            destage(&mut log, now, |_| false);
            now = now + Nanos::from_secs(10);
        }
        assert_eq!(log.status(now, 1).unwrap().unreadable, BLOCK);
        log.volumes.get_mut(&1).unwrap().destager.fails(now);
        let mut op = 10;
        while log.parks(now).is_none() {
            op += 1;
            assert!(op < 500, "nothing is parked");
            let mut asks = Asks::default();
            log.append(now, append(op, op * BLOCK..(op + 1) * BLOCK), &mut asks);
            carry(&mut log, asks);
        }
        let parks = log.park(now, 1).unwrap();
        assert!(parks.iter().any(|(sequence, _)| *sequence == 1));
        let read = |(sequence, piece): (u64, Option<Piece>)| {
            let bytes = piece.as_ref().map(|piece| vec![0; piece.bytes as usize]);
            (sequence, piece, bytes)
        };
        let mut asks = Asks::default();
        log.parked(now, 1, parks.into_iter().map(read).collect(), &mut asks);
        carry(&mut log, asks);
        assert_eq!(log.status(now, 1).unwrap().unreadable, 0, "{order:?}");
        let mut found = Vec::new();
        log.look(1, 0..BLOCK, |one| found.push(one));
        assert!(matches!(found[..], [Found::Logged(_)]), "{order:?}: {found:?}");
    }
}

/// Nothing can be read of the volume's only record over an older one: it is lost, and given up.
#[test]
fn what_cannot_be_read_and_is_given_up_shows_what_was_there_before_and_stops_nothing() {
    for order in [Order::Any, Order::Ordered(Grain::Flush)] {
        let mut log = log(order, SEGMENT, 16);
        write(&mut log, 1, 0..2 * BLOCK);
        destage(&mut log, NOW, |_| true);
        write(&mut log, 2, BLOCK..3 * BLOCK);
        let mut now = NOW;
        for _ in 0..READ_TRIES {
            destage(&mut log, now, |_| false);
            now = now + Nanos::from_secs(10);
        }
        destage(&mut log, now, |_| false);
        let status = log.status(now, 1).unwrap();
        assert_eq!((status.unreadable, log.cannot_drain(1)), (2 * BLOCK, Some(2 * BLOCK)));
        assert_eq!(status.is_stopped, order != Order::Any);
        let giving = log.giving_up(1).unwrap();
        let bytes = giving.bytes;
        assert_eq!(bytes, 2 * BLOCK);
        let mut asks = Asks::default();
        let given = log.give_up_unreadable(1, &giving, &mut asks);
        assert_eq!(given, (bytes, giving.void), "{order:?}");
        // An operator's thread carries out no write: nothing may wait for one.
        assert!(asks.writes.is_empty() && asks.flush.is_none() && asks.steps == [1]);
        let mut found = Vec::new();
        log.look(1, 0..4 * BLOCK, |one| found.push(one));
        assert!(found.iter().all(|one| matches!(one, Found::Clean(..))), "{order:?}: {found:?}");
        destage(&mut log, now, |_| true);
        let status = log.status(now, 1).unwrap();
        assert_eq!((status.unreadable, status.is_stopped, status.given_up), (0, false, bytes));
        assert!(log.is_clean(1) && log.cannot_drain(1).is_none(), "{order:?}: {status:?}");
        // What is lost of later writes is lost.
        write(&mut log, 3, 0..BLOCK);
        for _ in 0..READ_TRIES + 1 {
            now = now + Nanos::from_secs(10);
            destage(&mut log, now, |_| false);
        }
        assert_eq!(log.status(now, 1).unwrap().unreadable, BLOCK, "{order:?}");
    }
}

#[test]
fn what_was_given_up_is_so_after_a_restart_and_later_losses_are_not() {
    let mut log = log(Order::Any, SEGMENT, 16);
    log.set_void(1, Void::new(None, &[(0, 5)]));
    let unreadable = vec![Extent { offset: 0, length: BLOCK }];
    let found = Volume { frontier: 5, last: 5, unreadable, ..Volume::default() };
    log.recover(NOW, 1, &found, &Scan::default());
    let status = log.status(NOW, 1).unwrap();
    assert_eq!((status.unreadable, status.given_up), (0, BLOCK));
    let later = Volume { frontier: 6, last: 6, ..found };
    log.recover(NOW, 1, &later, &Scan::default());
    assert_eq!(log.status(NOW, 1).unwrap().unreadable, BLOCK);
}

/// The second of two writes fails after a yes that was said to the first.
#[test]
fn a_yes_gives_up_only_what_was_known_not_to_be_readable_when_it_was_said() {
    let mut log = log(Order::Ordered(Grain::Flush), SEGMENT, 16);
    write(&mut log, 1, 0..BLOCK);
    write(&mut log, 2, BLOCK..2 * BLOCK);
    let mut now = NOW;
    let mut fails = |log: &mut WriteLog<Vec<u8>>| {
        for _ in 0..READ_TRIES + 1 {
            destage(log, now, |_| false);
            now = now + Nanos::from_secs(10);
        }
        log.status(now, 1).unwrap()
    };
    assert_eq!(fails(&mut log).unreadable, BLOCK);
    let giving = log.giving_up(1).unwrap();
    assert_eq!(giving.void.given_up(), [(1, 1)]);
    log.give_up_unreadable(1, &giving, &mut Asks::default());
    let status = fails(&mut log);
    assert_eq!((status.given_up, status.unreadable), (BLOCK, BLOCK), "{status:?}");
    // So it is after a restart.
    let mut overlay = Overlay::default();
    let mut volume = VolumeLog::new(Order::Ordered(Grain::Flush), 0);
    volume.set_void(Void::new(None, &giving.void.given_up()));
    for n in 0..2 {
        volume.recover(logged(n * BLOCK, BLOCK), 0, &mut overlay);
    }
    volume.lose([1, 2], &mut overlay);
    assert_eq!((volume.unreadable_bytes(), overlay.bytes()), (BLOCK, BLOCK));
}

/// The first of two writes cannot be read, and the second has all of its bytes again.
#[test]
fn what_makes_a_store_no_image_is_said_before_and_after_a_restart_until_all_of_it_is_there() {
    let mut log = log(Order::Ordered(Grain::Flush), SEGMENT, 16);
    write(&mut log, 1, 0..BLOCK);
    let mut now = NOW;
    for _ in 0..READ_TRIES + 1 {
        destage(&mut log, now, |_| false);
        now = now + Nanos::from_secs(10);
    }
    write(&mut log, 2, BLOCK..2 * BLOCK);
    write(&mut log, 3, 0..BLOCK);
    let steps = |log: &mut WriteLog<Vec<u8>>, now| {
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        log.looked(1, now, &mut asks);
        log.step(now, 1, &mut out, &mut asks);
        carry(log, asks);
        // (What is read again is not answered.)
        out.retain(|asked| !matches!(asked, Asked::Park(_)));
        out
    };
    let wants = Asked::Mark(Said::Joins { last: 3, closed: false }, 0);
    assert_eq!(log.joins(1), 0);
    for done in [false, true] {
        let out = steps(&mut log, now);
        assert_eq!(out, std::slice::from_ref(&wants), "nothing goes to the store before");
        assert!(log.status(now, 1).unwrap().joins && log.joins(1) == 3);
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        log.marked(now, 1, done, &mut out, &mut asks);
        assert_eq!(out.iter().any(|one| matches!(one, Asked::Store(..))), done, "{out:?}");
        now = now + Nanos::from_secs(10);
    }
    // A start with what that marker says.
    let mut log = self::log(Order::Ordered(Grain::Flush), SEGMENT, 16);
    for op in 1..4 {
        write(&mut log, op, 0..BLOCK);
    }
    log.set_joins(1, 9);
    assert!(log.status(now, 1).unwrap().joins && log.joins(1) == 3, "no more than there is");
    destage(&mut log, now, |_| true);
    assert!(!log.status(now, 1).unwrap().joins && log.joins(1) == 0);
}

fn logged(at: u64, len: u64) -> Logged {
    Logged { at, len, kind: Kind::Write, batch: 1, place: 0 }
}

/// How many rows of the log are looked at for the loss of one record in its midst, and when it is found again.
fn looks(records: u64) -> (u64, u64) {
    let (mut volume, mut overlay) = (VolumeLog::new(Order::Any, 0), Overlay::default());
    for n in 0..records {
        volume.recover(logged(n * BLOCK, BLOCK), 0, &mut overlay);
    }
    volume.lose([1], &mut overlay);
    let before = volume.looks();
    volume.lose([records / 2], &mut overlay);
    let lost = volume.looks();
    assert_eq!(volume.unreadable_bytes(), 2 * BLOCK);
    assert!(volume.find(records / 2, &mut overlay));
    assert_eq!(volume.unreadable_bytes(), BLOCK);
    (lost - before, volume.looks() - lost)
}

#[test]
fn a_loss_costs_what_is_lost_and_not_what_there_is() {
    assert_eq!(looks(200), looks(20_000));
}

/// A volume of these records, of which some are void and some lost.
fn volume_of(records: &[(u64, u64)], void: Void, lost: &[u64]) -> (VolumeLog, Overlay) {
    let (mut volume, mut overlay) = (VolumeLog::new(Order::Any, 0), Overlay::default());
    volume.set_void(void);
    for (at, len) in records {
        volume.recover(logged(*at, *len), 0, &mut overlay);
    }
    volume.lose(lost.iter().copied(), &mut overlay);
    (volume, overlay)
}

proptest! {
    #[test]
    fn what_is_given_up_shows_what_would_be_there_without_it(
        records in prop::collection::vec((0..40u64, 1..24u64), 1..30),
        picks in prop::collection::vec((0..30u64, any::<bool>()), 0..20),
    ) {
        let there = |n: &u64| *n < records.len() as u64;
        let all: Vec<(u64, bool)> = picks.into_iter().filter(|(n, _)| there(n)).collect();
        let mut lost: Vec<u64> = all.iter().map(|(n, _)| n + 1).collect();
        let mut given: Vec<u64> = all.iter().filter(|(_, g)| *g).map(|(n, _)| n + 1).collect();
        lost.sort_unstable();
        given.sort_unstable();
        given.dedup();
        let (mut volume, mut overlay) = volume_of(&records, Void::default(), &lost);
        volume.give_up(&given, &mut overlay);
        let runs: Vec<(u64, u64)> = given.iter().map(|&n| (n, n)).collect();
        let (want, shows) = volume_of(&records, Void::new(None, &runs), &lost);
        let stretches = |overlay: &Overlay| {
            let mut all = Vec::new();
            overlay.look(0..100, |stretch| all.push(stretch));
            all
        };
        // (What lies side by side may be in pieces.)
        let bytes = |all: Vec<Stretch>| all.into_iter().flat_map(|stretch| match stretch {
            Stretch::Clean(_, len) => vec![None; len as usize],
            Stretch::Dirty(d) => vec![Some((d.sequence, d.holds)); d.len as usize],
        }).collect::<Vec<_>>();
        assert_eq!(bytes(stretches(&overlay)), bytes(stretches(&shows)));
        assert_eq!(overlay.bytes(), shows.bytes());
        assert_eq!(volume.unreadable_bytes(), want.unreadable_bytes());
        assert_eq!(volume.void(), want.void());
    }
}

pub(in super::super) const NOW: Nanos = Nanos::from_secs(1);
pub(in super::super) const BLOCK: u64 = 4096;
pub(in super::super) const SEGMENT: u32 = 1 << 20;

pub(in super::super) fn log(order: Order, segment: u32, segments: u32) -> WriteLog<Vec<u8>> {
    let mut log = WriteLog::new(Config {
        cache: Uuid([1; 16]),
        run: 1,
        at: 0,
        geometry: SegmentGeometry::new(segment, 4096).unwrap(),
        segments,
        depth: 2,
        memory: 64 << 20,
        wall: 0,
    });
    let destage = Destage { order, pace: Pace::Async, most: 1 << 20, depth: 8 };
    log.attach(
        NOW,
        Attach {
            attachment: 1,
            volume: Uuid([2; 16]),
            generation: 1,
            destage,
            bound: None,
            age: None,
            frontier: 0,
            epoch: 0,
            marker: 1,
            marked: true,
        },
    );
    log.looked(1, NOW, &mut Asks::default());
    log
}

fn append(op: u64, range: Range<u64>) -> Append<Vec<u8>> {
    let bytes = vec![0; (range.end - range.start) as usize];
    Append {
        op: OpId(op),
        attachment: 1,
        kind: Kind::Write,
        at: range.start,
        len: range.end - range.start,
        sums: Sums::new(&pieces::sums(&bytes).collect::<Vec<_>>()),
        bytes: Some(bytes),
        fua: false,
        may_punch: false,
    }
}

/// Carries out what the log asks of its device, until it asks for no more.
pub(in super::super) fn carry(log: &mut WriteLog<Vec<u8>>, mut asks: Asks<Vec<u8>>) {
    while !asks.writes.is_empty() || asks.flush.is_some() {
        let mut next = Asks::default();
        for write in &asks.writes {
            log.written(NOW, write.number, true, &mut next);
        }
        if let Some(covers) = asks.flush {
            log.flushed(NOW, covers, true, &mut next);
        }
        asks = next;
    }
}

/// Writes, and makes it durable.
pub(in super::super) fn write(log: &mut WriteLog<Vec<u8>>, op: u64, range: Range<u64>) {
    let mut asks = Asks::default();
    log.append(NOW, append(op, range), &mut asks);
    carry(log, asks);
    let mut asks = Asks::default();
    log.flush(NOW, 1, OpId(op + 1000), &mut asks);
    carry(log, asks);
}

/// Has the volume destage until it asks for nothing; `reads` says what of the log can be read.
pub(in super::super) fn destage(
    log: &mut WriteLog<Vec<u8>>,
    now: Nanos,
    reads: impl Fn(&Dirty) -> bool,
) {
    for _ in 0..20 {
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        log.looked(1, now, &mut asks);
        log.step(now, 1, &mut out, &mut asks);
        let mut asked = VecDeque::from(out);
        while let Some(one) = asked.pop_front() {
            let mut out = Vec::new();
            match one {
                Asked::Store(dirty, lies) => {
                    if let Some(piece) = lies.as_ref().and_then(Lies::piece) {
                        log.unpin(now, piece.pin, &mut asks);
                    }
                    let done = lies.is_none() || reads(&dirty);
                    if !done {
                        log.unread(now, 1, &dirty);
                    }
                    let outcome = (dirty.memory(), done.then_some(1));
                    log.stored(now, 1, outcome, &mut out, &mut asks);
                }
                Asked::Flush => log.store_flushed(now, 1, Some(1), &mut out, &mut asks),
                Asked::Mark(Said::Joins { .. }, _) => log.marked(now, 1, true, &mut out, &mut asks),
                Asked::Park(parks) => {
                    let read = parks.into_iter().map(|(sequence, piece)| {
                        let (at, len) =
                            piece.as_ref().map_or((0, 0), |piece| (piece.at, piece.len));
                        let dirty = Dirty { at, len, sequence, holds: overlay::Holds::Bytes };
                        (sequence, piece, reads(&dirty).then(|| vec![0; len as usize]))
                    });
                    log.parked(now, 1, read.collect(), &mut asks);
                }
                other => panic!("{other:?}"),
            }
            asked.extend(out);
        }
        carry(log, asks);
    }
}
