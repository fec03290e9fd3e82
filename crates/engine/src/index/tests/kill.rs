//! Kills between any two stores of every change.

use larder_base::Words;

use super::super::*;
use super::model::*;

fn object(e: &(Family, Entry)) -> (Family, u16, Place) {
    (e.0, e.1.segment, e.1.place)
}

fn objects(all: &Contents) -> Vec<(Family, u16, Place)> {
    let mut objects: Vec<_> = all.iter().map(object).collect();
    objects.sort_unstable();
    objects
}

fn attach(words: Words) -> (FlashIndex, Attached) {
    FlashIndex::attach(words, ClockBits::Two, MAX_SEGMENTS, |_| true).unwrap()
}

/// Cuts `change` after every number of stores and checks what is found. Returns how many cuts there were and how many
/// wiped a bucket.
fn cut_everywhere(index: &FlashIndex, change: Change) -> (u64, u64) {
    let before = contents(index);
    let places = layout(index);
    let mut whole = attach(index.words.snapshot()).0;
    whole.hand = index.hand;
    apply(&mut whole, change);
    let after = contents(&whole);
    let touched: Vec<u32> = (0..index.buckets)
        .filter(|&b| b >= whole.buckets || index.line(b) != whole.line(b))
        .collect();
    let (objects_before, objects_after) = (objects(&before), objects(&after));
    let (mut cuts, mut wipes) = (0, 0);
    loop {
        let mut dying = attach(index.words.snapshot()).0;
        dying.hand = index.hand;
        dying.words.set_fuse(cuts);
        apply(&mut dying, change);
        let finished = !dying.words.is_dead();
        let (found, report) = attach(dying.words.snapshot());
        found.validate().unwrap_or_else(|e| panic!("{change:?} cut after {cuts} stores: {e}"));
        let left = contents(&found);
        wipes += u64::from(report.wiped_buckets);
        let context = || format!("{change:?} cut after {cuts} stores");

        // Nothing that was not there, before or after; no more copies of an object than either had.
        for e in &left {
            assert!(
                before.binary_search(e).is_ok() || after.binary_search(e).is_ok(),
                "{}: {e:?}",
                context()
            );
            let copies =
                |all: &[(Family, u16, Place)]| all.iter().filter(|o| **o == object(e)).count();
            let most = copies(&objects_before).max(copies(&objects_after));
            assert!(copies(&objects(&left)) <= most, "{}: {e:?} was doubled", context());
        }
        // What is gone lay in a bucket that the change touches, and is one entry in hand (or those that widening
        // displaces) unless a bucket was wiped.
        let stays = minus(&objects_before, &minus(&objects_before, &objects_after));
        let lost = minus(&stays, &objects(&left));
        for gone in &lost {
            assert!(
                places.iter().any(|(b, f, e)| touched.contains(b) && object(&(*f, *e)) == *gone),
                "{}: {gone:?} was lost from a bucket that the change does not touch",
                context()
            );
        }
        let in_hand = match change {
            Change::Insert(_, Entry { place: Place::Extent { .. }, .. }) => 9,
            Change::Shrink => SLOTS,
            _ => 1,
        };
        assert!(report.wiped_buckets == 1 || lost.len() <= in_hand, "{}: lost {lost:?}", context());
        if finished {
            assert_eq!((left, report.wiped_buckets), (after, 0), "{}", context());
            return (cuts, wipes);
        }
        cuts += 1;
    }
}

#[test]
fn a_kill_anywhere_leaves_a_sound_index() {
    let (mut cuts, mut wipes) = (0, 0);
    for (seed, buckets, tags, wide) in [
        (1, 3, 4096, 0.0),
        (2, 6, 30, 0.0),
        (3, 5, 4096, 0.15),
        (4, 4, 30, 0.5),
        (5, 3, 4096, 1.0),
        (6, 12, 4096, 0.1),
    ] {
        let words = Words::heap(FlashIndex::words_for(buckets));
        let mut index =
            FlashIndex::create(words, ClockBits::Two).unwrap().of_segments(MAX_SEGMENTS);
        let mut source = Source::new(seed, tags, wide, 3);
        for _ in 0..700 {
            let change = source.draw();
            let (c, w) = cut_everywhere(&index, change);
            cuts += c;
            wipes += w;
            apply(&mut index, change);
        }
        assert!(!index.is_empty());
    }
    assert!(
        cuts > 5_000 && wipes > 300,
        "the test must reach the case it is for: {cuts} cuts, {wipes} wipes"
    );
}

/// What a kill leaves of a bucket that is being split or taken back.
#[test]
fn a_kill_while_it_grows_or_shrinks_leaves_a_sound_index() {
    let mut cuts = 0;
    for (seed, buckets, tags, wide) in
        [(1, 1, 4096, 0.0), (2, 2, 30, 0.1), (3, 3, 4096, 0.3), (4, 2, 4096, 1.0)]
    {
        let mut index = with_room(buckets, ClockBits::Two);
        let mut source = Source::new(seed, tags, wide, 3);
        source.steps = 0.2;
        for _ in 0..500 {
            let change = source.draw();
            if matches!(change, Change::Grow | Change::Shrink) {
                cuts += cut_everywhere(&index, change).0;
            }
            apply(&mut index, change);
        }
        assert!(!index.is_empty());
    }
    assert!(cuts > 2_000, "the test must reach the case it is for: {cuts} cuts");
}

#[test]
fn a_removal_that_returned_stays_removed() {
    // Removed before, cut in any later change: it never returns.
    let mut index = with_room(3, ClockBits::Two);
    let mut source = Source::new(21, 4096, 0.2, 3);
    source.steps = 0.1;
    let mut checked = 0;
    for round in 0..400 {
        let change = source.draw();
        apply(&mut index, change);
        let hash = random_hash(&mut source.rng, 4096);
        // A segment that no other entry uses.
        let entry = Entry { segment: 4095, place: Place::Page { function: 5 }, clock: 1 };
        index.insert(hash, entry);
        (0..3).for_each(|_| apply(&mut index, source.draw()));
        if index.remove(hash, entry.segment, entry.place).is_none() {
            continue;
        }
        let change = source.draw();
        for fuse in 0..40 {
            let mut dying = attach(index.words.snapshot()).0;
            dying.words.set_fuse(fuse);
            apply(&mut dying, change);
            let found = attach(dying.words.snapshot()).0;
            assert!(
                contents(&found).iter().all(|e| e.1.segment != 4095),
                "round {round}, fuse {fuse}"
            );
        }
        checked += 1;
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn attaching_can_itself_be_cut() {
    let mut index = FlashIndex::create(Words::heap(FlashIndex::words_for(4)), ClockBits::Two)
        .unwrap()
        .of_segments(MAX_SEGMENTS);
    let mut source = Source::new(31, 4096, 0.2, 3);
    (0..200).for_each(|_| apply(&mut index, source.draw()));
    // A kill in the middle of the spread slot's change, then kills while that is repaired and half is dropped.
    index.words.store(JOURNAL, 2);
    let keep = |segment: u16| !segment.is_multiple_of(3);
    let expected = contents(
        &FlashIndex::attach(index.words.snapshot(), ClockBits::Two, MAX_SEGMENTS, keep).unwrap().0,
    );
    for fuse in 0..400 {
        let mut words = index.words.snapshot();
        words.set_fuse(fuse);
        let (dying, _) = FlashIndex::attach(words, ClockBits::Two, MAX_SEGMENTS, keep).unwrap();
        let finished = !dying.words.is_dead();
        let (found, _) =
            FlashIndex::attach(dying.words.snapshot(), ClockBits::Two, MAX_SEGMENTS, keep).unwrap();
        found.validate().unwrap();
        let left = contents(&found);
        assert!(minus(&left, &expected).is_empty(), "fuse {fuse}");
        if finished {
            assert_eq!(left, expected);
            return;
        }
    }
    panic!("attaching took more stores than there are words to change");
}

#[test]
fn garbage_is_wiped_and_breaks_nothing() {
    let mut rng = larder_base::Rng::new(77);
    for round in 0..400 {
        let mut index = FlashIndex::create(Words::heap(FlashIndex::words_for(6)), ClockBits::Two)
            .unwrap()
            .of_segments(MAX_SEGMENTS);
        let mut source = Source::new(round, 4096, 0.3, 3);
        (0..100).for_each(|_| apply(&mut index, source.draw()));
        for _ in 0..rng.range(1, 40) {
            let at = HEADER_WORDS + rng.below(6 * WORDS as u64) as usize;
            let bits = [rng.next_u64(), rng.next_u64() & rng.next_u64(), 1 << rng.below(64)];
            let old = index.words.load(at);
            index.words.store(at, old ^ bits[rng.below(3) as usize]);
        }
        let (mut found, report) = attach(index.words.snapshot());
        found.validate().unwrap();
        assert_eq!(report.kept, found.len());
        for _ in 0..200 {
            apply(&mut found, source.draw());
            let hash = random_hash(&mut source.rng, 4096);
            // Whatever is given out can be given back.
            for entry in found.remove_matching(hash).iter() {
                found.restore(hash, entry);
            }
        }
        found.validate().unwrap();
    }
}
