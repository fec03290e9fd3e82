//! What only a sparse cache does: pages of its table come into memory and go, and its file gives space back.

use std::os::unix::fs::MetadataExt;

use super::*;

const SPARSE_SHAPE: Shape = Shape { ways: SPARSE, ..SHAPE };

fn until(what: &str, mut yes: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !yes() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Bytes that the cache takes up.
fn taken(bench: &Bench) -> u64 {
    bench.dir.path().join("cache").metadata().unwrap().blocks() * 512
}

/// A volume so large that memory has not room for all pages of the table that its lines need: each line is there when it
/// is asked for again, then and after a restart, and what is written meanwhile is what is read.
#[test]
fn more_pages_than_memory_has_room_for() {
    let bench = bench(&[60 << 30], 1 << 30, SPARSE_SHAPE);
    let map = bench.cache.stats().map_bytes;
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    let places = a_group_in_each_page();
    assert!(places.len() > 1_500, "more than there are frames: {}", places.len());
    for (i, &at) in places.iter().enumerate() {
        one(&mut *session, write(at, 8192, i as u8 | 1)).outcome.unwrap();
        // More than may be under way at a time would be dropped.
        if i % 64 == 63 {
            bench.settle();
        }
    }
    bench.settle();
    assert_eq!(bench.cache.count_lines(), 2 * places.len() as u64, "{:?}", bench.engine());
    let before = bench.engine().read_hits;
    for (i, &at) in places.iter().enumerate() {
        let got = bytes(one(&mut *session, read(at, 4096)));
        assert!(got.iter().all(|&b| b == i as u8 | 1), "{at}");
    }
    assert_eq!(bench.engine().read_hits - before, places.len() as u64);
    assert_eq!(bench.cache.count_lines(), 2 * places.len() as u64);
    // Others, over the first of each.
    for &at in &places {
        one(&mut *session, write(at, 4096, 7)).outcome.unwrap();
    }
    let report =
        bench.cache.check(&CheckWish { compare: true, ..CheckWish::default() }, &mut |_, _| true);
    let report = report.unwrap();
    assert_eq!((report.corrupt, report.unreadable, report.differing), (0, 0, 0));
    assert_eq!(report.lines, 2 * places.len() as u64);
    let said = bench.cache.explain("disk0", places[3]).unwrap();
    assert!(said.cached && said.device_offset.is_some());
    assert!(!bench.cache.explain("disk0", places[3] + (1 << 20)).unwrap().cached);
    assert_eq!(bench.cache.stats().map_bytes, map, "a fixed sum");
    drop((session, client));
    let (bench, warmth) = bench.restart();
    assert!(matches!(warmth, Warmth::Log(_)), "{warmth:?}");
    assert_eq!(bench.cache.count_lines(), 2 * places.len() as u64);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    for (i, &at) in places.iter().enumerate() {
        let got = bytes(one(&mut *session, read(at, 8192)));
        assert!(got[..4096].iter().all(|&b| b == 7), "{at}");
        assert!(got[4096..].iter().all(|&b| b == i as u8 | 1), "{at}");
    }
    assert_eq!(bench.engine().read_hits, 2 * places.len() as u64);
    assert_eq!(bench.engine().corrupt, 0);
}

/// One group in each page of the first shard, of a volume of 60 GiB.
fn a_group_in_each_page() -> Vec<u64> {
    const STEP: u64 = (63 * 8 * 64) << 10;
    (0..60u64 << 30).step_by(STEP as usize).collect()
}

/// Of a page that goes as a whole, its volume has the lines less that were in it, and no others; and a volume keeps its floor.
#[test]
fn a_page_that_goes_counts_as_the_lines_that_it_had() {
    let floor: fn() -> RulesConfig = || RulesConfig {
        shares: vec![("disk0".into(), "90%..".parse().unwrap())],
        ..Default::default()
    };
    let places = a_group_in_each_page();
    for rules in [RulesConfig::default, floor] {
        let bench = bench(&[60 << 30], 72 << 20, Shape { rules, ..SPARSE_SHAPE });
        let volume = bench.cache.volume("disk0").unwrap();
        let client = bench.client(0);
        let mut session = client.session().unwrap();
        for (i, &at) in places.iter().enumerate() {
            one(&mut *session, write(at, 8192, 1)).outcome.unwrap();
            if i % 100 == 99 {
                bench.settle();
                // What is counted just while it arrives may be counted twice, until the next time.
                let (has, is) = (volume.lines(), bench.cache.count_lines());
                assert!(has.abs_diff(is) <= 2 * 100, "{has}, and {is} are there");
            }
        }
        bench.settle();
        assert!(bench.engine().evicted > 1000, "{:?}", bench.engine());
        // Pages that are not in memory go first, unless the volume has no more than its floor: then lines of the others.
        let there = bench.cache.explain("disk0", places[0]).unwrap().cached;
        assert_eq!(there, volume.share().0 > 0, "{:?}", bench.engine());
    }
}

/// The file takes up no more than it may, however much passes by, and gives back what is trimmed and dropped.
#[test]
fn space_is_given_back() {
    const SIZE: u64 = 16 << 20;
    let bench = bench(&[128 << 20], SIZE, SPARSE_SHAPE);
    let empty = taken(&bench);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    for at in (0..128 << 20).step_by(1 << 20) {
        one(&mut *session, write(at, 1 << 20, 3)).outcome.unwrap();
        bench.settle();
    }
    assert!(bench.engine().evicted > 1_000, "{:?}", bench.engine());
    assert!(bench.cache.count_lines() <= SIZE / 4096);
    // What was evicted becomes holes with the next pages of the table.
    let most = empty + SIZE + (4 << 20);
    until("evicted lines are holes", || taken(&bench) <= most);
    assert!(taken(&bench) > empty + SIZE / 2, "{}", taken(&bench));
    let last = bytes(one(&mut *session, read(127 << 20, 1 << 20)));
    assert!(last.iter().all(|&b| b == 3));
    let dropped = bench.cache.drop_lines("disk0", None, &mut || true).unwrap().unwrap();
    assert!(dropped > 1_000);
    assert_eq!(bench.cache.count_lines(), 0);
    until("dropped lines are holes", || taken(&bench) < empty + (2 << 20));
}

#[test]
fn what_cannot_have_holes_is_refused() {
    let dir = TempDir::new().unwrap();
    let config = format_config(&dir, SPARSE_SHAPE, 64 << 20);
    let refused =
        |config: &FormatConfig| open::format(config, [1; 32], UnixSecs(1)).unwrap_err().to_string();
    let why = refused(&FormatConfig { path: "/dev/null".into(), yes: true, ..config.clone() });
    assert!(why.contains("cannot be a sparse cache") || why.contains("/dev/null"), "{why}");
    let why = refused(&FormatConfig { size: None, ..config.clone() });
    assert!(why.contains("its size is missing"), "{why}");
    let why = refused(&FormatConfig { placement: Placement::Sparse(1 << 20), ..config.clone() });
    assert!(why.contains("room for volumes of 1048576 bytes"), "{why}");
    assert!(!config.path.exists());
    // What was there is gone when it is formatted anew.
    std::fs::write(&config.path, vec![9u8; 1 << 20]).unwrap();
    let layout = open::format(&FormatConfig { yes: true, ..config.clone() }, [1; 32], UnixSecs(1));
    let file = config.path.metadata().unwrap();
    assert_eq!(file.len(), layout.unwrap().device);
    assert!(file.blocks() * 512 < 1 << 20, "{}", file.blocks());
}
