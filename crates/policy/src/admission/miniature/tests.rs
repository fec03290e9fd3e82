use larder_base::Rng;

use super::*;

/// Bytes of every object.
const SIZE: u32 = 1000;
/// Keys that are read again and again. All others are read once.
const LIKED: u64 = 20_000;
/// Room for two thousand objects in DRAM, twenty thousand on flash.
const WHOLE: (u64, u64) = (2_000_000, 20_000_000);

fn fingerprint(key: u64) -> u64 {
    Rng::new(key).next_u64()
}

/// What is read again is worth 1, the rest a tenth.
fn worth(liked: impl Fn(u64) -> bool) -> impl FnMut(&Leaving) -> Worth {
    move |of| Worth { reads: 1.0, worth: if liked(of.fingerprint) { 1.0 } else { 0.1 }, rule: None }
}

/// Every second read is of one of the liked keys, all as often. Whoever misses writes; the cache itself always does.
fn play(miniatures: &mut Miniatures, floor: f32, rate: Option<f64>, reads: u64) {
    let liked: std::collections::BTreeSet<u64> = (0..LIKED).map(fingerprint).collect();
    let asked = Asked { least: 0.0, floor };
    let mut rng = Rng::new(7);
    for at in 0..reads {
        let now = Nanos::from_millis(at);
        let key = if at % 2 == 0 { rng.below(LIKED) } else { LIKED + at };
        let hash = fingerprint(key);
        miniatures.admitted(SIZE);
        if miniatures.samples(hash) {
            let known = |of: u64| liked.contains(&of);
            miniatures.read(hash, None, now, (asked, rate), worth(known));
            miniatures.write(hash, SIZE, (false, asked), now, worth(known));
        }
    }
}

#[test]
fn what_is_asked_too_much_of_is_asked_less_of() {
    let mut miniatures = Miniatures::new(usize::MAX, WHOLE, false).unwrap();
    // At first nothing that is worth 1 is admitted, once flash has been filled.
    play(&mut miniatures, 2.0, None, 600_000);
    let tuning = miniatures.tuning();
    assert!(tuning.thrift * 2.0 <= 1.0, "{tuning:?}");
    // Half of the reads are of keys that flash has room for.
    assert!(tuning.misses < 0.6, "{tuning:?}");
    assert_eq!(tuning.reason, Tuned::FewestMisses);
}

#[test]
fn what_is_asked_too_little_of_is_asked_more_of() {
    let mut miniatures = Miniatures::new(usize::MAX, WHOLE, false).unwrap();
    // At first all is admitted, and most of it is not read again.
    play(&mut miniatures, 0.08, None, 600_000);
    let tuning = miniatures.tuning();
    assert!(tuning.thrift * 0.08 > 0.1, "{tuning:?}");
    assert!(tuning.misses < 0.6, "{tuning:?}");
}

#[test]
fn a_rate_that_is_used_up_asks_no_less() {
    // A thousand reads a second, at each of which a thousand bytes are admitted.
    for (rate, less, reason) in [(1.05e6, false, Tuned::Rate), (2e6, true, Tuned::FewestMisses)] {
        let mut miniatures = Miniatures::new(usize::MAX, WHOLE, false).unwrap();
        play(&mut miniatures, 2.0, Some(rate), 600_000);
        let tuning = miniatures.tuning();
        assert_eq!((tuning.thrift < 1.0, tuning.reason), (less, reason), "{tuning:?}");
    }
}

#[test]
fn a_part_of_the_keys_in_a_part_of_the_room_misses_as_much() {
    let misses = |part: u64| {
        let mut miniatures = Miniatures::new(usize::MAX, WHOLE, false).unwrap();
        // All keys that there are have room.
        miniatures.keys = Keys::new(Keys::MOST);
        miniatures.caches = vec![Miniature::new(Keys::MOST); COUNT];
        miniatures.part = part;
        play(&mut miniatures, 0.5, None, 400_000);
        assert_eq!(miniatures.part, part);
        miniatures.tuning().misses
    };
    let (whole, part) = (misses(1), misses(8));
    assert!((whole - part).abs() < 0.02, "{whole} {part}");
}

#[test]
fn more_keys_than_there_is_room_for_are_fewer_of_all() {
    let mut miniatures = Miniatures::new(usize::MAX, WHOLE, false).unwrap();
    let before = miniatures.memory_bytes();
    play(&mut miniatures, 0.0, None, 300_000);
    assert!(miniatures.part > FIRST_PART);
    assert_eq!(miniatures.memory_bytes(), before);
    for key in 0..miniatures.keys.end() {
        let of = miniatures.keys[key];
        assert!(of.held == 0 || miniatures.samples(of.fingerprint()));
        let held = miniatures.caches.iter().filter(|cache| cache.holds(key)).count();
        assert_eq!(held, usize::from(of.held));
    }
}

#[test]
fn what_is_deleted_is_gone_from_all() {
    let mut miniatures = Miniatures::new(usize::MAX, WHOLE, false).unwrap();
    play(&mut miniatures, 0.5, None, 100_000);
    for key in 0..LIKED {
        miniatures.removed(fingerprint(key));
        assert_eq!(miniatures.keys.find(fingerprint(key)), None);
    }
}

#[test]
fn where_memory_is_too_small_there_are_none() {
    assert_eq!(Miniatures::bytes(100_000), 0);
    assert!(Miniatures::new(usize::MAX, (100_000, 1 << 20), false).is_none());
    // A small cache gives a twelfth, a larger one a thirty-second.
    let part = |memory: u64| memory as f64 / Miniatures::bytes(memory) as f64;
    assert!((12.0..13.0).contains(&part(1 << 20)), "{}", part(1 << 20));
    assert!((32.0..33.0).contains(&part(16 << 20)), "{}", part(16 << 20));
}
