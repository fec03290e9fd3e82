//! Every answer and every state against the naive index, exactly.

use larder_base::{Rng, Words};
use proptest::prelude::*;

use super::super::*;
use super::model::*;

fn new_index(buckets: u32, clock: ClockBits) -> FlashIndex {
    FlashIndex::create(Words::heap(FlashIndex::words_for(buckets)), clock)
        .unwrap()
        .of_segments(MAX_SEGMENTS)
}

fn family_of(model: &Contents, family: Family) -> Vec<Entry> {
    model.iter().filter(|e| e.0 == family).map(|e| e.1).collect()
}

fn sorted(candidates: &Candidates) -> Vec<Entry> {
    let mut all: Vec<Entry> = candidates.iter().collect();
    all.sort_unstable();
    all
}

/// Applies `change` to both, checks the answer, and returns whether an entry was forced out.
fn check(index: &mut FlashIndex, model: &mut Contents, change: Change) -> bool {
    let mut forced_out = false;
    match change {
        Change::Insert(hash, mut entry) => {
            let done = index.insert(hash, entry);
            entry.clock = entry.clock.min(index.clock_max);
            model.push((index.family(hash), entry));
            model.sort_unstable();
            let gone = minus(model, &contents(index));
            let mut gone_entries: Vec<Entry> = gone.iter().map(|e| e.1).collect();
            gone_entries.sort_unstable();
            assert_eq!(gone_entries, sorted(&done.forced), "what goes is reported, and only that");
            assert_eq!(done.forced.omitted(), 0);
            forced_out = !gone.is_empty();
            *model = minus(model, &gone);
        }
        Change::Remove(hash, segment, place) => {
            let family = index.family(hash);
            let expected: Vec<Entry> = family_of(model, family)
                .into_iter()
                .filter(|e| (e.segment, e.place) == (segment, place))
                .collect();
            let removed = index.remove(hash, segment, place);
            assert_eq!(removed.is_some(), !expected.is_empty());
            if let Some(entry) = removed {
                assert!(expected.contains(&entry));
                let at = model.iter().position(|e| *e == (family, entry)).unwrap();
                model.remove(at);
            }
        }
        Change::RemoveMatching(hash) => {
            let family = index.family(hash);
            let removed = index.remove_matching(hash);
            let expected = family_of(model, family);
            assert_eq!(removed.len() + removed.omitted(), expected.len());
            assert!(minus(&sorted(&removed), &expected).is_empty());
            model.retain(|e| e.0 != family);
            assert!(index.probe(hash).is_empty());
        }
        Change::Hit(hash, segment, place, mode) => {
            let family = index.family(hash);
            let clock = index.contains(hash, segment, place);
            let revived = index.hit(hash, segment, place, mode);
            let present = model.iter().position(|e| {
                e.0 == family
                    && (e.1.segment, e.1.place) == (segment, place)
                    && Some(e.1.clock) == clock
            });
            assert_eq!(present.is_some(), clock.is_some());
            assert_eq!(revived, clock.map(|c| c == 0));
            if let Some(at) = present {
                let up = if mode == ClockMode::SetMax { 3 } else { model[at].1.clock + 1 };
                model[at].1.clock = up.min(index.clock_max);
                model.sort_unstable();
            }
        }
        Change::Sweep(buckets) => {
            let from = index.hand;
            let within = |bucket: u32| (bucket + index.buckets - from) % index.buckets < buckets;
            let mut expected: Contents = Vec::new();
            let mut ghosts_expected = Vec::new();
            for (bucket, family, mut entry) in layout(index) {
                if within(bucket) && entry.clock > 0 {
                    entry.clock -= 1;
                    if entry.clock == 0 {
                        ghosts_expected.push(entry);
                    }
                }
                expected.push((family, entry));
            }
            expected.sort_unstable();
            let mut ghosts = Vec::new();
            let done = index.sweep(buckets, |e| ghosts.push(*e));
            ghosts.sort_unstable();
            ghosts_expected.sort_unstable();
            assert_eq!(ghosts, ghosts_expected);
            assert_eq!(done.ghosts_made, ghosts.len() as u64);
            *model = expected;
        }
        Change::DropSegment(segment) => {
            let before = model.len();
            model.retain(|e| e.1.segment != segment);
            assert_eq!(index.drop_segment(segment), (before - model.len()) as u64);
        }
        Change::Grow => {
            let (before, room) = (index.buckets(), index.room());
            assert_eq!(index.grow(), before < room);
            assert_eq!(index.buckets(), (before + 1).min(room));
        }
        Change::Shrink => {
            let (before, base) = (index.buckets(), index.base_buckets());
            let forced = index.shrink();
            assert_eq!(forced.is_some(), before > base);
            assert_eq!(index.buckets(), (before - 1).max(base));
            let gone = minus(model, &contents(index));
            if let Some(forced) = forced {
                assert_eq!(forced.len() + forced.omitted(), gone.len());
            }
            forced_out = !gone.is_empty();
            *model = minus(model, &gone);
        }
    }
    assert_eq!(*model, contents(index), "after {change:?}");
    index.validate().unwrap_or_else(|e| panic!("after {change:?}: {e}"));
    assert_eq!(index.len(), model.len() as u64);
    assert_eq!(index.ghosts(), model.iter().filter(|e| e.1.clock == 0).count() as u64);
    forced_out
}

fn check_probe(index: &FlashIndex, model: &Contents, rng: &mut Rng, tags: u64) {
    let hash = random_hash(rng, tags);
    let mut expected: Vec<(u16, Place)> =
        family_of(model, index.family(hash)).iter().map(|e| (e.segment, e.place)).collect();
    expected.dedup();
    let found = index.probe(hash);
    assert_eq!(index.first(hash), found.iter().next());
    index.expect(hash);
    let mut got: Vec<(u16, Place)> = found.iter().map(|e| (e.segment, e.place)).collect();
    got.sort_unstable();
    expected.sort_unstable();
    expected.dedup();
    if found.omitted() == 0 {
        assert_eq!(got, expected);
    } else {
        assert_eq!(got.len(), Candidates::CAPACITY);
        assert!(minus(&got, &expected).is_empty());
    }
}

fn run(seed: u64, buckets: u32, tags: u64, wide: f64, clock: ClockBits, changes: usize) -> usize {
    run_over(new_index(buckets, clock), 0.0, seed, tags, wide, changes)
}

fn run_over(
    mut index: FlashIndex,
    steps: f64,
    seed: u64,
    tags: u64,
    wide: f64,
    changes: usize,
) -> usize {
    let mut model = Contents::new();
    let mut source = Source::new(seed, tags, wide, index.clock_max);
    source.steps = steps;
    let mut forced = 0;
    for _ in 0..changes {
        let change = source.draw();
        forced += usize::from(check(&mut index, &mut model, change));
        check_probe(&index, &model, &mut source.rng, tags);
    }
    forced
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn equals_a_plain_multiset(
        seed: u64,
        buckets in 1u32..8,
        tags in prop_oneof![Just(2u64), Just(30), Just(4096)],
        wide in prop_oneof![Just(0.0), Just(0.1), Just(0.5), Just(1.0)],
        two_bits: bool,
        changes in 1usize..400,
    ) {
        let clock = if two_bits { ClockBits::Two } else { ClockBits::One };
        run(seed, buckets, tags, wide, clock, changes);
    }

    /// Nothing is lost by growing, and by shrinking only what is said to be.
    #[test]
    fn equals_a_plain_multiset_while_it_grows_and_shrinks(
        seed: u64,
        buckets in 1u32..6,
        tags in prop_oneof![Just(2u64), Just(30), Just(4096)],
        wide in prop_oneof![Just(0.0), Just(0.1), Just(0.5), Just(1.0)],
        steps in prop_oneof![Just(0.05), Just(0.3)],
        changes in 1usize..600,
    ) {
        run_over(with_room(buckets, ClockBits::Two), steps, seed, tags, wide, changes);
    }
}

/// An index that grows as it is filled holds what one of that size from the start would, at any number of buckets in between.
#[test]
fn a_grown_index_can_be_filled_as_any_other() {
    let base = 700;
    for (wide, wanted) in [(0.0, 0.955), (0.1, 0.85)] {
        let mut index = with_room(base, ClockBits::Two);
        let mut rng = Rng::new(17);
        let mut loads = Vec::new();
        loop {
            let hash = hash_of(rng.next_u64() as u32, rng.below(4096) as u16);
            if index.insert(hash, random_entry(&mut rng, wide, 3)).forced.is_empty() {
                continue;
            }
            loads.push((index.buckets(), (index.load() * 1000.0) as u64));
            let step = base / 8 * (index.buckets() / base).next_power_of_two().max(1);
            if !(0..step).all(|_| index.grow()) {
                break;
            }
        }
        index.validate().unwrap();
        let least = loads.iter().map(|l| l.1).min().unwrap();
        println!("{wide}: {loads:?}");
        assert!(least as f64 / 1000.0 > wanted, "{loads:?}");
    }
}

#[test]
fn overfull_indexes_force_and_say_so() {
    let forced: usize =
        [0.0, 0.05, 0.3, 1.0].iter().map(|&wide| run(5, 5, 4096, wide, ClockBits::Two, 1500)).sum();
    assert!(forced > 100, "the test must reach the case it is for: {forced}");
}

#[test]
fn ghosts_are_forced_out_first() {
    let mut index = new_index(4, ClockBits::Two);
    let mut rng = Rng::new(3);
    while index.len() < index.capacity() {
        let hash = random_hash(&mut rng, 4096);
        index.insert(hash, Entry { segment: 1, place: Place::Page { function: 0 }, clock: 2 });
    }
    // Two ghosts in each bucket; each bucket is full, so that nothing can move.
    for bucket in 0..4 {
        for pos in [3, SPREAD] {
            let line = index.line(bucket).with_clock(pos, 0);
            let before = index.line(bucket);
            index.update(bucket, &before, &line);
            index.hot -= 1;
        }
    }
    index.validate().unwrap();
    for _ in 0..4 {
        let forced = index.insert(
            random_hash(&mut rng, 4096),
            Entry { segment: 2, place: Place::Page { function: 1 }, clock: 1 },
        );
        assert_eq!(
            forced.forced.iter().map(|e| (e.segment, e.clock)).collect::<Vec<_>>(),
            [(1, 0)]
        );
    }
}

#[test]
fn the_other_bucket_of_the_other_is_the_first() {
    for buckets in [1u32, 2, 3, 17, 1000, 65_537, u32::MAX] {
        // No memory behind it: the mapping needs only the number.
        let index = FlashIndex {
            words: Words::heap(0),
            buckets,
            base: buckets,
            spots: Spots::new(buckets, buckets),
            clock_max: 3,
            runs: Runs::default(),
            len: 0,
            wide: 0,
            hot: 0,
            hand: 0,
        };
        let mut rng = Rng::new(u64::from(buckets));
        for _ in 0..2000 {
            let (bucket, tag) = (rng.below(u64::from(buckets)) as u32, rng.below(4096) as u16);
            let other = index.other(bucket, tag);
            assert!(other < buckets);
            assert_eq!(index.other(other, tag), bucket);
        }
    }
}

#[test]
fn an_innocent_is_found_again_by_its_own_hash() {
    let mut index = new_index(50, ClockBits::Two);
    let mut rng = Rng::new(11);
    let mut restored = 0;
    for round in 0..20_000u32 {
        let innocent = random_hash(&mut rng, 64);
        let entry = random_entry(&mut rng, 0.2, 3);
        if index.load() > 0.5 || !index.insert(innocent, entry).forced.is_empty() {
            index = new_index(50, ClockBits::Two);
            continue;
        }
        // Another hash of the same family: same tag, and a bucket of the pair.
        let pair = index.buckets_of(innocent).1;
        let bits = ((u64::from(pair[round as usize % 2]) << 32) / 50 + 1) as u32;
        let writer = hash_of(bits, innocent.tag());
        assert_eq!(index.family(writer), index.family(innocent));
        let before = contents(&index);
        let taken = index.remove_matching(writer);
        assert_eq!(taken.omitted(), 0);
        assert_eq!(index.contains(innocent, entry.segment, entry.place), None);
        for back in taken.iter() {
            assert!(index.restore(writer, back).forced.is_empty());
        }
        assert!(index.contains(innocent, entry.segment, entry.place).is_some());
        assert!(contents(&index) == before);
        restored += taken.len();
    }
    assert!(restored > 5_000, "{restored}");
}

#[test]
fn only_wide_entries_fill_nearly_half_the_slots() {
    let mut index = new_index(500, ClockBits::Two);
    let mut rng = Rng::new(4);
    let mut inserted = 0;
    for _ in 0..4_000 {
        let entry = random_entry(&mut rng, 1.0, 3);
        if !index
            .insert(hash_of(rng.next_u64() as u32, rng.below(4096) as u16), entry)
            .forced
            .is_empty()
        {
            break;
        }
        inserted += 1;
    }
    // Of at most seven per bucket.
    assert!(inserted as f64 > 0.85 * 7.0 * 500.0, "{inserted}");
    index.validate().unwrap();
}

#[test]
fn sizes_and_foreign_memory_are_refused() {
    for words in [0, 16, 23, 25] {
        assert!(matches!(
            FlashIndex::create(Words::heap(words), ClockBits::Two),
            Err(IndexError::Size { .. })
        ));
    }
    let attach =
        |words| FlashIndex::attach(words, ClockBits::Two, MAX_SEGMENTS, |_| true).map(|_| ());
    assert_eq!(attach(Words::heap(24)), Err(IndexError::Foreign { found: 0 }));
    let mut index = new_index(3, ClockBits::Two);
    let mut bigger = Words::heap(FlashIndex::words_for(4));
    (0..index.words.len()).for_each(|i| bigger.store(i, index.words.load(i)));
    assert_eq!(attach(bigger), Ok(()), "it has room to grow");
    let mut smaller = Words::heap(FlashIndex::words_for(2));
    (0..smaller.len()).for_each(|i| smaller.store(i, index.words.load(i)));
    assert_eq!(attach(smaller), Err(IndexError::Buckets { recorded: 3, room: 2 }));
    index.words.store(JOURNAL, 4);
    assert_eq!(attach(index.words.snapshot()), Err(IndexError::Journal { bucket: 3, buckets: 3 }));
}

#[test]
fn attaching_keeps_what_is_wanted_and_the_owner_s_words() {
    let mut index = new_index(40, ClockBits::Two);
    let mut source = Source::new(8, 4096, 0.2, 3);
    (0..900).for_each(|_| apply(&mut index, source.draw()));
    index.set_owner_word(0, 77);
    index.set_owner_word(7, u64::MAX);
    let (same, report) =
        FlashIndex::attach(index.words.snapshot(), ClockBits::Two, MAX_SEGMENTS, |_| true).unwrap();
    assert_eq!(report, Attached { kept: index.len(), dropped: 0, wiped_buckets: 0 });
    assert_eq!(contents(&same), contents(&index));
    assert_eq!((same.owner_word(0), same.owner_word(1), same.owner_word(7)), (77, 0, u64::MAX));
    let (half, report) =
        FlashIndex::attach(index.words.snapshot(), ClockBits::One, MAX_SEGMENTS, |s| s % 2 == 0)
            .unwrap();
    half.validate().unwrap();
    let mut expected: Contents =
        contents(&index).into_iter().filter(|e| e.1.segment % 2 == 0).collect();
    expected.iter_mut().for_each(|e| e.1.clock = e.1.clock.min(1));
    expected.sort_unstable();
    assert_eq!(contents(&half), expected);
    assert_eq!((report.kept, report.kept + report.dropped), (half.len(), index.len()));
    assert!(report.dropped > 0 && report.kept > 0);
}
