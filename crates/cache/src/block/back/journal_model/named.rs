//! What the model has found, each by itself.

use larder_base::{Nanos, Rng};
use larder_engine::block::PartKind;
use larder_engine::block::node::logged::JournalPart;
use larder_engine::block::writeback::Fault;
use larder_format::Uuid;
use larder_format::block::journal::COMMIT_AT;
use larder_format::block::marker::{Marker, MarkerState, Order};
use larder_runtime::{AlignedBuf, Payload};
use larder_volume::journal::{Use, region_over};

use super::super::journal::{Anew, Coming, Doubt, Journal, Kept, NotLaid, Of, Work, unprobe};
use super::disk::{Current, Disk, Power};

const VOLUME: Uuid = Uuid([9; 16]);
const CACHE: Uuid = Uuid([1; 16]);

fn of(generation: u64) -> Of {
    Of { volume: VOLUME, cache: CACHE, generation }
}

fn disks() -> (Disk, Disk) {
    let power = Power::default();
    let disk = |name, bytes| Disk::new(name, bytes, &power, Rng::new(1));
    (disk("store", 8192), disk("journal", 128 << 20))
}

fn marker(generation: u64) -> Marker {
    Marker {
        number: 1,
        state: MarkerState::Dirty,
        volume: VOLUME,
        identity: [0; 64],
        cache: CACHE,
        run: 1,
        host: "here".into(),
        generation,
        attachment: 1,
        frontier: 0,
        time: 0,
        mark: None,
        order: Order::Journaled,
        applied: 0,
        joins: 0,
        probes: false,
    }
}

fn journal(disk: &Disk) -> Journal {
    let place = region_over(Box::new(disk.clone()), Use::Make).unwrap();
    Journal::over(place, &[VOLUME], Fault::default()).unwrap()
}

/// Claims it for a generation, and writes these epochs, each of which fills the volume's first sector with its number, and ends at ten times that.
fn written(disk: &Disk, generation: u64, doubt: Option<Doubt>, epochs: &[u64]) {
    let mut journal = journal(disk);
    journal.claim(&marker(generation), doubt).unwrap();
    let mut kept = Kept::new(of(generation), None, journal, Default::default());
    for &epoch in epochs {
        let mut buf = AlignedBuf::zeroed(512);
        buf.fill(epoch as u8);
        let bytes = Some(Payload::new(buf));
        let part = JournalPart { at: 0, len: 512, kind: PartKind::Write, bytes };
        let work = Work::Write((epoch, epoch * 10, 0, None), vec![part]);
        kept.do_work(Nanos(0), work).unwrap();
        kept.do_work(Nanos(0), Work::Flush).unwrap();
    }
}

/// Where the commit of an epoch is.
fn commit_at(epoch: u64) -> u64 {
    epoch % 2 * (64 << 20) + COMMIT_AT
}

#[test]
fn a_take_up_that_was_cut_short_has_not_torn_the_journal() {
    let (_, disk) = disks();
    written(&disk, 2, None, &[1, 2]);
    written(&disk, 3, None, &[]);
    assert_eq!(journal(&disk).read(of(2)).unwrap().torn, None);
    // It goes on: what it writes is no attachment's before it.
    written(&disk, 3, None, &[1]);
    assert!(journal(&disk).read(of(2)).unwrap().torn.is_some());
    assert!(journal(&disk).read(of(1)).unwrap().torn.is_some());
}

#[test]
fn an_older_epoch_is_not_put_over_one_that_is_damaged() {
    for at in [commit_at(2), commit_at(2) + 512 * 8] {
        let (store, disk) = disks();
        written(&disk, 2, None, &[1, 2]);
        disk.spoils(at);
        let taken = journal(&disk).take_over(of(2), &store, (0, 20)).unwrap();
        assert_eq!(taken.applied, None);
        assert!(taken.doubt.is_some(), "its log has what is missing");
        assert_eq!(store.peek(0, 512), vec![0; 512]);
    }
}

#[test]
fn an_earlier_copy_of_a_journal_is_not_that_of_a_store_that_has_had_later_epochs() {
    let (_, disk) = disks();
    written(&disk, 2, None, &[1, 2, 3]);
    let torn = |applied, frontier| {
        let marker = Marker { applied, frontier, ..marker(2) };
        journal(&disk).read_for(&marker).unwrap().torn.is_some()
    };
    // The store may have the last of it, and more than that where marks come behind it.
    assert!(!torn(0, 0) && !torn(2, 20) && !torn(3, 32));
    assert!(torn(4, 40));
}

#[test]
fn what_cannot_be_read_of_a_journal_does_not_keep_a_volume_from_its_cache() {
    let (store, disk) = disks();
    written(&disk, 2, None, &[1, 2]);
    disk.spoils(0);
    disk.spoils(commit_at(1));
    let taken = journal(&disk).take_over(of(2), &store, (0, 20)).unwrap();
    assert_eq!(
        taken.applied.map(|applied| applied.last),
        Some(20),
        "of the other it is known that it is older"
    );
    assert_eq!(store.peek(0, 512), vec![2; 512]);
}

#[test]
fn a_doubt_ends_with_an_epoch_that_has_all_that_the_store_may_have() {
    let (_, disk) = disks();
    written(&disk, 2, Some(Doubt { epoch: 0, last: 25 }), &[1, 2]);
    assert!(journal(&disk).read(of(2)).unwrap().torn.is_some());
    written(&disk, 2, Some(Doubt { epoch: 0, last: 25 }), &[3]);
    assert_eq!(journal(&disk).read(of(2)).unwrap().torn, None);
}

#[test]
fn what_was_torn_before_is_no_reason_to_refuse_an_epoch_behind_it_that_is_whole() {
    let (store, disk) = disks();
    written(&disk, 2, None, &[1, 2, 3]);
    disk.spoils(commit_at(3) + 512 * 8);
    let taken = journal(&disk).take_over(of(2), &store, (20, 30)).unwrap();
    assert_eq!((taken.last, taken.doubt), (3, Some(Doubt { epoch: 2, last: 30 })));
    // Nothing says any more which epoch that was.
    disk.spoils(commit_at(3));
    written(&disk, 2, taken.doubt, &[4]);
    assert_eq!(journal(&disk).read(of(2)).unwrap().torn, None);
}

#[test]
fn an_epoch_that_is_missing_in_a_journal_is_noticed() {
    let part = |epoch: u64| commit_at(epoch)..epoch % 2 * (64 << 20) + (64 << 20);
    for last in 1..=4 {
        let epochs: Vec<u64> = (1..=last).collect();
        for gone in [&[last][..], &[last, last - 1]] {
            let (store, disk) = disks();
            written(&disk, 2, None, &epochs);
            assert_eq!(journal(&disk).read(of(2)).unwrap().torn, None);
            gone.iter().for_each(|&epoch| disk.wipe(part(epoch)));
            let torn = journal(&disk).read(of(2)).unwrap().torn;
            assert!(torn.is_some_and(|why| why.contains("missing")), "{last}, {gone:?}: {torn:?}");
            assert_eq!(journal(&disk).apply(of(2), &store).unwrap(), None);
        }
    }
    // Of a next attachment it is none.
    let (_, disk) = disks();
    written(&disk, 2, None, &[1, 2, 3]);
    written(&disk, 3, None, &[]);
    assert_eq!(journal(&disk).read(of(3)).unwrap().torn, None);
}

#[test]
fn a_journal_that_is_made_anew_while_it_is_used_is_not_made_where_the_store_is() {
    let (store, disk) = (disks().1, disks().1);
    let mut journal = journal(&disk);
    journal.claim(&marker(2), None).unwrap();
    let (at, own) = (store.clone(), store.clone());
    let anew = Anew {
        opens: Box::new(move || region_over(Box::new(at.clone()), Use::Make)),
        apart: Box::new(move |journal| journal.is_apart(&own, [5; 16]).map_err(|(why, _)| why)),
    };
    let mut kept = Kept::new(of(2), Some(anew), journal, Default::default());
    kept.do_work(Nanos(0), Work::Look(true)).unwrap();
    // Its name leads to the store by now.
    disk.wipe(0..128 << 20);
    for _ in 0..2 {
        let why = kept.do_work(Nanos(0), Work::Look(true)).unwrap_err().to_string();
        assert!(why.contains("the store itself by another name"), "{why}");
        assert!(store.peek(0, 64 << 10).iter().all(|&b| b == 0));
    }
}

#[test]
fn a_head_that_a_flush_has_lost_is_written_again_by_the_next_start() {
    let (_, disk) = disks();
    written(&disk, 2, None, &[]);
    disk.forgets();
    written(&disk, 2, None, &[]);
    disk.crash();
    assert_eq!(journal(&disk).read(of(2)).unwrap().torn, None);
}

#[test]
fn an_epoch_that_a_flush_has_lost_is_durable_before_it_is_applied() {
    let (store, disk) = disks();
    written(&disk, 2, None, &[1]);
    disk.forgets();
    assert!(journal(&disk).apply(of(2), &store).unwrap().is_some());
    disk.crash();
    assert!(journal(&disk).apply(of(2), &store).unwrap().is_some());
}

/// A volume comes to be journaled for the first time, whose journal's place is the store itself (`same`) or not, and is killed at the I/O behind so many;
/// then it comes again. False: it was not killed.
fn comes_killed(same: bool, ios: u64) -> bool {
    let power = Power::default();
    let disk = |name| Disk::new(name, 128 << 20, &power, Rng::new(ios));
    let store = disk("store");
    let place = if same { store.clone() } else { disk("journal") };
    let comes = |said: &mut Option<Marker>| -> Result<(), ()> {
        let opened = region_over(Box::new(place.clone()), Use::Make).map_err(drop)?;
        let journal = Journal::over(opened, &[VOLUME], Fault::default()).map_err(drop)?;
        let mut coming = Coming { journal: Some(journal), ..Coming::default() };
        let marked = coming.mark(&marker(2), (&store, [7; 16], true), |marker| {
            if power.io() != Current::On {
                return Err("no power");
            }
            *said = Some(marker.clone());
            Ok(())
        });
        marked.map_err(drop)
    };
    let untouched =
        || [0, 64 << 20].into_iter().all(|at| store.peek(at, 64 << 10).iter().all(|&b| b == 0));
    let mut said = None;
    power.goes_after(ios);
    let came = comes(&mut said);
    let killed = power.is_off();
    store.crash();
    place.crash();
    power.comes_back();
    if killed {
        if said.as_ref().is_some_and(|marker: &Marker| marker.probes) {
            unprobe(&store).unwrap();
        }
        assert!(untouched(), "killed at {ios}");
        assert_eq!(comes(&mut said).is_ok(), !same, "killed at {ios}");
    } else {
        assert_eq!(came.is_ok(), !same);
    }
    assert!(untouched(), "killed at {ios}");
    killed
}

#[test]
fn a_kill_while_it_is_found_out_whether_a_journal_is_the_store_leaves_the_store_as_it_was() {
    for same in [true, false] {
        let kills = (0..).take_while(|&ios| comes_killed(same, ios)).count();
        assert!(kills > 8, "{kills}");
    }
}

#[test]
fn a_store_whose_first_attach_was_cut_short_is_recovered_without_its_probe() {
    let (store, place) = (disks().1, disks().1);
    let mut memory = larder_volume::marker::memory::MemoryMarker::new().open(false);
    memory.read().unwrap();
    memory.write(&Marker { probes: true, ..marker(2) }).unwrap();
    let mut at = region_over(Box::new(store.clone()), Use::Make).unwrap();
    at.head().unwrap();
    assert!(at.probe(Some(&larder_format::block::marker::probe([3; 16]))).unwrap());
    let mut open = |volume| {
        let place = region_over(Box::new(place.clone()), Use::Apply)?;
        Journal::over(place, &[volume], Fault::default())
    };
    let wish = super::super::recover::RecoverWish::default();
    let told =
        super::super::recover::recover_at(&store, &mut *memory, &mut open, &wish, Fault::default());
    assert!(told.is_ok_and(|told| told.recovered && told.torn.is_none()));
    assert_eq!(store.peek(0, 512), vec![0; 512]);
}

/// Whoever starts may wait for it, as for a store that is away.
#[test]
fn a_journal_whose_store_fails_is_laid_into_it_another_time() {
    let (store, disk) = disks();
    written(&disk, 2, None, &[1]);
    store.fails(1.0);
    let why = journal(&disk).apply(of(2), &store).unwrap_err();
    assert!(matches!(why, NotLaid::Store(_)), "{why:?}");
    store.fails(0.0);
    assert!(journal(&disk).apply(of(2), &store).unwrap().is_some());
}
