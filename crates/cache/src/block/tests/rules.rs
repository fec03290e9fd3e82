//! What has the last word over admission: selection, shares, the write budget; and what is taken for metadata.

use std::process::Command;

use larder_policy::block::{BlockKind, Reason};
use larder_policy::budget::{BudgetState, WriteBudgetConfig};

use super::*;

const MIB: u64 = 1 << 20;

impl Bench {
    /// Lines of a stretch of a volume that are cached.
    fn cached(&self, volume: usize, start: u64, bytes: u64) -> u64 {
        let name = format!("disk{volume}");
        let line = u64::from(self.shape.line);
        let at = (start..start + bytes).step_by(line as usize);
        at.filter(|&at| self.cache.explain(&name, at).unwrap().cached).count() as u64
    }

    /// Reads a stretch in requests of 64 KiB.
    fn read_all(&self, volume: usize, start: u64, bytes: u64) {
        let client = self.client(volume);
        let mut session = client.session().unwrap();
        for at in (start..start + bytes).step_by(65_536) {
            one(&mut *session, read(at, 65_536)).outcome.unwrap();
            // Else more would be dropped the slower the disk is: what wants the slot of a line that is still to be written.
            if at % (4 * 65_536) == 0 {
                self.settle();
            }
        }
    }

    fn refused(&self, reason: Reason) -> u64 {
        self.cache.stats().verdicts.rejected(reason)
    }
}

fn load(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// What is selected never is not cached, by reads nor by writes, and what is cached of it goes; forgotten, it is as others.
#[test]
fn never() {
    let bench = bench(&[8 * MIB], 64 * MIB, SHAPE);
    bench.read_all(0, 0, MIB);
    bench.settle();
    assert_eq!(bench.cached(0, 0, MIB), 256);
    // Half of what is cached, and as much beside it. A line with one byte of it has the rule too.
    let ranges = [(MIB / 2, MIB / 2), (MIB, MIB / 2 - 4095)];
    let done = bench.cache.select("disk0", Some(Rule::Never), Some(&ranges), "swap").unwrap();
    assert_eq!(done, (1, 128), "one range, neighbours joined; its lines dropped");
    assert_eq!(bench.cached(0, 0, 2 * MIB), 128);
    bench.read_all(0, 0, 2 * MIB);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, write(MIB / 2, MIB as usize, 7)).outcome.unwrap();
    bench.settle();
    assert_eq!(bench.cached(0, 0, MIB / 2), 128);
    assert_eq!(bench.cached(0, MIB / 2, MIB), 0);
    assert_eq!(bench.cached(0, 3 * MIB / 2, MIB / 2), 128);
    assert!(bench.refused(Reason::Never) > 0);
    assert!(bytes(one(&mut *session, read(MIB, 4096))).iter().all(|&b| b == 7));
    let why = bench.cache.explain("disk0", MIB).unwrap();
    assert!(why.selection.contains("never (swap)") && why.admission.contains("never"), "{why:?}");

    assert_eq!(bench.cache.unselect_label("disk0", "swap").unwrap(), 1);
    bench.read_all(0, MIB / 2, MIB);
    bench.settle();
    assert_eq!(bench.cached(0, 0, 2 * MIB), 512);
}

/// What is selected always is cached though admission says no, and stays while all else comes and goes; a restart keeps the
/// rule and the lines.
#[test]
fn always() {
    for ways in [SHAPE.ways, FULL] {
        let shape =
            Shape { ways, admission: "touch_count(threshold=200,bits=8,segment=4k)", ..SHAPE };
        let bench = bench(&[64 * MIB], least(shape), shape);
        bench.read_all(0, 0, MIB);
        bench.settle();
        assert_eq!(bench.cached(0, 0, MIB), 0, "nothing is touched so often");
        let pinned = 256 << 10;
        let range = [(MIB, pinned)];
        bench.cache.select("disk0", Some(Rule::Always), Some(&range), "index").unwrap();
        assert_eq!(bench.cache.pinned().0, pinned);
        bench.read_all(0, 0, 2 * MIB);
        bench.settle();
        assert_eq!((bench.cached(0, MIB, pinned), bench.cached(0, 0, 2 * MIB)), (64, 64));
        bench_keeps(bench, pinned);
    }
}

fn bench_keeps(mut bench: Bench, pinned: u64) {
    // From now on everything is admitted.
    bench.shape.admission = "all";
    let (bench, _) = bench.restart();
    let kept = bench.cache.selection("disk0").unwrap();
    assert_eq!(kept, [(MIB, MIB + pinned, "always".to_owned(), "index".to_owned())]);
    assert_eq!(bench.cached(0, MIB, pinned), 64, "they are there after a restart");
    bench.read_all(0, 4 * MIB, 40 * MIB);
    bench.settle();
    assert_eq!(bench.cached(0, MIB, pinned), 64, "a flood does not touch them");
    assert!(bench.engine().evicted > 1000, "{:?}", bench.engine());
    // Without the rule the same flood does.
    bench.cache.select("disk0", None, Some(&[(MIB, pinned)]), "").unwrap();
    assert!(bench.cache.selection("disk0").unwrap().is_empty());
    bench.read_all(0, 4 * MIB, 40 * MIB);
    bench.settle();
    assert!(bench.cached(0, MIB, pinned) < 64);
}

/// More is pinned than fits: it is not kept, so that others have a place.
#[test]
fn more_pinned_than_fits() {
    for ways in [SHAPE.ways, FULL] {
        let shape = Shape { ways, ..SHAPE };
        let bench = bench(&[64 * MIB, 8 * MIB], least(shape), shape);
        bench.cache.select("disk0", Some(Rule::Always), None, "").unwrap();
        let (pinned, most) = bench.cache.pinned();
        assert!(pinned == 64 * MIB && most < bench.cache.layout().slots() * 4096, "{most}");
        bench.read_all(0, 0, 32 * MIB);
        bench.settle();
        let evicted = bench.engine().evicted;
        bench.read_all(1, 0, MIB);
        bench.settle();
        assert!(bench.cached(1, 0, MIB) > 128, "{:?}", bench.engine());
        assert!(bench.engine().evicted > evicted);
        // An exception within it.
        let rest = [(32 * MIB, 32 * MIB), (MIB, 31 * MIB)];
        bench.cache.select("disk0", Some(Rule::ByPolicy), Some(&rest), "").unwrap();
        assert_eq!(bench.cache.pinned().0, MIB);
    }
}

/// Selections that are too many, too long or elsewhere change nothing.
#[test]
fn selections_that_are_refused() {
    let bench = bench(&[8 * MIB], 64 * MIB, SHAPE);
    bench.cache.select("disk0", Some(Rule::Always), Some(&[(0, 4096)]), "a").unwrap();
    let before = bench.cache.selection("disk0").unwrap();
    let refused = |ranges: &[(u64, u64)], label: &str| {
        let error = bench.cache.select("disk0", Some(Rule::Never), Some(ranges), label);
        assert_eq!(bench.cache.selection("disk0").unwrap(), before);
        error.unwrap_err().to_string()
    };
    assert!(refused(&[(0, 8 * MIB + 1)], "").contains("it has 8388608 bytes"));
    assert!(refused(&[(0, 4096), (u64::MAX, 2)], "").contains("not in it"));
    assert!(refused(&[(0, 4096)], &"x".repeat(256)).contains("at most 255"));
    let many: Vec<(u64, u64)> = (0..70_000).map(|i| (i * 64, 1)).collect();
    assert!(refused(&many, "").contains("at most 65536"));
    assert!(bench.cache.select("none", Some(Rule::Never), None, "").is_err());
}

fn floor() -> RulesConfig {
    RulesConfig { shares: vec![("disk0".into(), "50%..".parse().unwrap())], ..Default::default() }
}

fn ceiling() -> RulesConfig {
    RulesConfig { shares: vec![("disk1".into(), "..25%".parse().unwrap())], ..Default::default() }
}

/// Waits until the lines of a volume have been counted anew.
fn until_counted(bench: &Bench, volume: &Attached) {
    const NONE: u64 = 1 << 40;
    volume.account.set(NONE);
    let end = Instant::now() + Duration::from_secs(120);
    while volume.lines() >= NONE / 2 {
        assert!(Instant::now() < end, "{:?}", bench.engine());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Others leave a volume its floor; without one they take nearly everything.
#[test]
fn a_floor_is_kept() {
    let left = |rules: fn() -> RulesConfig| {
        let shape = Shape { rules, ..SHAPE };
        let bench = bench(&[8 * MIB, 64 * MIB], least(shape), shape);
        assert_eq!(bench.cache.layout().slots(), 1024);
        bench.read_all(0, 0, 2 * MIB);
        bench.settle();
        // From here on it is known how many there are.
        let volume = bench.cache.volume("disk0").unwrap();
        until_counted(&bench, &volume);
        bench.read_all(1, 0, 32 * MIB);
        bench.settle();
        bench.cached(0, 0, 2 * MIB)
    };
    let (with, without) = (left(floor), left(RulesConfig::default));
    assert!(with > 384 && without < 128, "{with} {without}");
}

/// A volume takes no more than its ceiling, though there is room; also when lines have been counted anew, of which a page of
/// a sparse cache's table holds those of many volumes.
#[test]
fn a_ceiling_is_kept() {
    for ways in [SHAPE.ways, SPARSE] {
        let shape = Shape { rules: ceiling, ways, ..SHAPE };
        let size = if ways == SPARSE { 4 * MIB } else { least(shape) };
        let bench = bench(&[8 * MIB, 64 * MIB], size, shape);
        let quarter = bench.cache.layout().capacity() / 4;
        for _ in 0..3 {
            bench.read_all(1, 0, 32 * MIB);
            bench.settle();
            let has = bench.cached(1, 0, 32 * MIB);
            let most = quarter + quarter / 8;
            assert!(
                (quarter / 2..=most).contains(&has),
                "{ways}: {has}, and it may have {quarter}"
            );
            until_counted(&bench, &bench.cache.volume("disk1").unwrap());
        }
        assert!(bench.refused(Reason::Ceiling) > 0);
        // Nobody else is held to it.
        bench.read_all(0, 0, 2 * MIB);
        bench.settle();
        assert!(bench.cached(0, 0, 2 * MIB) > 384);
    }
}

/// A refusal is told of the volume whose request it was, and of no other; all together have them all.
#[test]
fn verdicts_are_of_the_volume_that_was_refused() {
    let shape = Shape { rules: ceiling, ..SHAPE };
    let bench = bench(&[8 * MIB, 64 * MIB], least(shape), shape);
    bench.read_all(1, 0, 8 * MIB);
    bench.read_all(0, 0, MIB);
    bench.settle();
    let said = |name: &str| {
        let verdicts = bench.cache.explain(name, 0).unwrap().verdicts;
        verdicts.get("ceiling").copied().unwrap_or(0)
    };
    let of = |name: &str| bench.cache.volume(name).unwrap().verdicts().rejected(Reason::Ceiling);
    assert!(said("disk1") > 1000, "{:?}", bench.engine());
    assert_eq!((said("disk0"), of("disk0")), (0, 0));
    assert_eq!(said("disk1"), of("disk1"));
    assert_eq!(bench.refused(Reason::Ceiling), of("disk1"));
}

fn budget(first_fill: bool) -> RulesConfig {
    // Six bytes a second: as good as none, but for what may be lent.
    let tbw = Some(ByteSize(1_000_000_000));
    let budget = WriteBudgetConfig { tbw, first_fill, ..Default::default() };
    RulesConfig { budget, ..Default::default() }
}

/// Fills beyond the write budget are refused, and what is read is right all the same.
#[test]
fn the_write_budget() {
    for (first_fill, rules) in
        [(true, (|| budget(true)) as fn() -> RulesConfig), (false, || budget(false))]
    {
        let bench = bench(&[8 * MIB], 64 * MIB, Shape { rules, ..SHAPE });
        std::fs::write(bench.disk(0), vec![5; 8 << 20]).unwrap();
        let client = bench.client(0);
        let mut session = client.session().unwrap();
        for _ in 0..2 {
            let buf = bytes(one(&mut *session, read(0, 4 << 20)));
            assert!(buf.iter().all(|&b| b == 5));
            bench.settle();
        }
        let (fills, refused) = (bench.engine().fills, bench.refused(Reason::Budget));
        if first_fill {
            assert!(fills == 1024 && refused == 0, "{fills} {refused}");
        } else {
            assert!(fills < 64 && refused > 64, "{fills} {refused}");
            assert!(bench.cache.explain("disk0", 0).unwrap().budget.contains("bytes a second"));
            let said = || bench.cache.explain("disk0", 6 * MIB).unwrap().admission;
            let node_limits = &bench.cache.node_limits;
            assert!(node_limits.limits.charge(bench.cache.now(), 1 << 30).is_some());
            assert!(said().starts_with("it would be rejected: the write budget"), "{}", said());
            assert!(bench.cache.node_limits.limits.backoff.full(bench.cache.now()).is_some());
            assert!(said().starts_with("it would be rejected: the file system"), "{}", said());
        }
    }
}

/// A small change of a cached line writes the whole line anew: that counts, as the simulator counts it.
#[test]
fn merges_count_against_the_write_budget() {
    let bench = bench(&[8 * MIB], 64 * MIB, Shape { rules: || budget(true), ..SHAPE });
    bench.read_all(0, 0, MIB);
    bench.settle();
    let lines = || {
        let log = bench.cache.node_limits.limits.log_bytes();
        bench.cache.node_limits.limits.spent() - log
    };
    let (before, engine) = (lines(), bench.engine());
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    for line in 0..256 {
        one(&mut *session, write(line * 4096 + 512, 512, 7)).outcome.unwrap();
    }
    bench.settle();
    assert_eq!(bench.cached(0, 0, MIB), 256, "they are lines of the cache still");
    // Nothing else has written lines, and the log's bytes are not among these.
    let now = bench.engine();
    assert_eq!(
        (now.fills, now.flash_lines_written),
        (engine.fills, engine.flash_lines_written + 256)
    );
    assert_eq!(lines() - before, MIB);
}

/// Whenever the process is killed, the file says of at least as many bytes that they are written as are.
#[test]
fn a_kill_earns_no_write_budget() {
    let bench = bench(&[8 * MIB], 64 * MIB, Shape { rules: || budget(true), ..SHAPE });
    let file = bench
        .dir
        .path()
        .join("state")
        .join(format!("block-budget-{}.json", bench.cache.node_limits.uuid));
    let said =
        || -> BudgetState { serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap() };
    for at in 0..4 {
        bench.read_all(0, at * MIB, MIB);
        // (What was charged a moment ago is not written before the file knows of it.)
        let (spent, written) =
            (bench.cache.node_limits.limits.spent(), bench.cache.stats().flash_bytes);
        let state = said();
        assert!(spent > at * MIB && state.spent >= written, "{spent} {written} {state:?}");
        assert!(state.loan <= 64 * MIB - written, "{written} {state:?}");
    }
    // The next start begins where this one ends.
    let (bench, _) = bench.restart();
    let (spent, written) =
        (bench.cache.node_limits.limits.spent(), bench.cache.stats().flash_bytes);
    let state = said();
    assert!(spent >= 4 * MIB && state.spent >= 4 * MIB + written, "{spent} {written} {state:?}");
}

/// Who starts and is killed at once writes as well, again and again.
#[test]
fn what_a_start_writes_counts_before_anything_else_is_done() {
    for ways in [SHAPE.ways, FULL, SPARSE] {
        let shape = Shape { ways, rules: || budget(true), ..SHAPE };
        let mut bench = bench(&[8 * MIB], 64 * MIB, shape);
        bench.read_all(0, 0, MIB);
        for round in 0..3 {
            let (dir, uuid) = (bench.dir.clone(), bench.cache.node_limits.uuid.clone());
            let file = dir.path().join("state").join(format!("block-budget-{uuid}.json"));
            let said = || -> BudgetState {
                serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap()
            };
            bench.server.take().unwrap().stop();
            bench.handle.take().unwrap().stop();
            drop(bench);
            let stopped = said().spent;
            bench = start(dir, shape).unwrap();
            // The log's thread has not had its first turn: what is counted is what the start itself wrote.
            let (log, spent) = (
                bench.cache.node_limits.limits.log_bytes(),
                bench.cache.node_limits.limits.spent(),
            );
            assert!(log >= 4096, "round {round}: {log} bytes");
            assert!(spent >= stopped + 4096, "round {round}: {stopped}, then {spent}");
            assert!(said().spent >= spent, "round {round}: {:?}", said());
        }
    }
}

/// What a program of e2fsprogs prints.
fn e2fsprogs(program: &str, arguments: &[&str]) -> String {
    let out = Command::new(program).args(arguments).output();
    let out = out.unwrap_or_else(|e| panic!("{program}: {e}"));
    assert!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// A real ext4: what is metadata by debugfs is metadata here, and what is a file's is not; and reads of it are counted.
#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "debugfs"),
    ignore = "needs mkfs.ext4 and debugfs (Debian: e2fsprogs)"
)]
fn metadata_of_ext4() {
    let shape = Shape { admission: "two_lbs", ..SHAPE };
    let bench = bench(&[64 * MIB], 64 * MIB, shape);
    let tree = TempDir::new().unwrap();
    for i in 0..300 {
        let dir = tree.path().join(format!("directory-{}", i % 30));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(format!("a file with a longer name {i}")), vec![7; 9000]).unwrap();
    }
    std::fs::write(tree.path().join("large"), vec![9; 8 << 20]).unwrap();
    let (image, tree) = (bench.disk(0), tree.path().display().to_string());
    let image = image.to_str().unwrap();
    let made = ["-q", "-F", "-b", "4096", "-d", &tree, image];
    e2fsprogs("mkfs.ext4", &made);
    let ext = e2fsprogs("debugfs", &["-R", "stats", image]);
    let number = |text: &str| -> u64 { text.trim().parse().unwrap() };
    let table = ext.split("inode table at ").nth(1).unwrap();
    let table = number(&table[..table.find(|c: char| !c.is_ascii_digit()).unwrap()]);
    let blocks = |path: &str| -> Vec<u64> {
        let text = e2fsprogs("debugfs", &["-R", &format!("blocks {path}"), image]);
        text.split_whitespace().map(number).collect()
    };
    let (directory, large) = (blocks("/directory-7"), blocks("/large"));
    assert!(!directory.is_empty() && large.len() == 2048);

    // The image was made behind the daemon's back, before anything of it was read; all of it passes by once.
    bench.read_all(0, 0, 64 * MIB);
    let volume = bench.cache.volume("disk0").unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    while volume.file_systems().is_empty()
        || volume.classify(table * 4096, 4096) != BlockKind::Metadata
    {
        assert!(Instant::now() < end, "{:?}", volume.file_systems());
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(volume.file_systems(), [("ext4", 0)]);
    bench.read_all(0, 0, 64 * MIB);
    for (what, block) in [("superblock", 0), ("inodes", table), ("a directory", directory[0])] {
        assert_eq!(volume.classify(block * 4096, 4096), BlockKind::Metadata, "{what}: {block}");
    }
    for block in [large[0], large[1000], large[2047]] {
        assert_ne!(volume.classify(block * 4096, 4096), BlockKind::Metadata, "{block}");
    }
    let before = load(&volume.counters.metadata_reads);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, read(directory[0] * 4096, 4096)).outcome.unwrap();
    one(&mut *session, read(large[1000] * 4096, 4096)).outcome.unwrap();
    assert_eq!(load(&volume.counters.metadata_reads), before + 1);
}

/// A directory that the detector cannot know but by its bytes: of it nothing passes by after a restart but what comes from the
/// cache.
#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "debugfs"),
    ignore = "needs mkfs.ext4 and debugfs (Debian: e2fsprogs)"
)]
fn a_directory_that_is_cached_is_known_again_after_a_restart() {
    let shape = Shape { admission: "two_lbs", ..SHAPE };
    let bench = bench(&[64 * MIB], 64 * MIB, shape);
    let image = bench.disk(0);
    e2fsprogs("mkfs.ext4", &["-q", "-F", "-b", "4096", image.to_str().unwrap()]);
    let found = |bench: &Bench| {
        let volume = bench.cache.volume("disk0").unwrap();
        let end = Instant::now() + Duration::from_secs(120);
        while volume.file_systems().is_empty() {
            assert!(Instant::now() < end, "no file system");
            std::thread::sleep(Duration::from_millis(20));
        }
        volume
    };
    bench.read_all(0, 0, MIB);
    let volume = found(&bench);
    // As a guest writes it whose inode still lies in the journal.
    let mut block = AlignedBuf::zeroed(4096);
    let entries: [(u32, u16, &[u8]); 3] = [(12, 12, b"."), (2, 12, b".."), (13, 4072, b"a file")];
    let mut at = 0;
    for (inode, len, name) in entries {
        block[at..at + 4].copy_from_slice(&inode.to_le_bytes());
        block[at + 4..at + 6].copy_from_slice(&len.to_le_bytes());
        block[at + 6..at + 8].copy_from_slice(&[name.len() as u8, 2]);
        block[at + 8..at + 8 + name.len()].copy_from_slice(name);
        at += usize::from(len);
    }
    let place = 60 * MIB;
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    let data = Payload::new(block);
    one(&mut *session, Op::Write { offset: place, data, fua: false }).outcome.unwrap();
    assert_eq!(volume.classify(place, 4096), BlockKind::Metadata);
    one(&mut *session, read(place, 4096)).outcome.unwrap();
    bench.settle();
    assert_eq!(bench.cached(0, place, 4096), 1);
    drop((session, client, volume));
    let (bench, _) = bench.restart();
    let volume = found(&bench);
    let hits = load(&volume.counters.read_hits);
    assert_eq!(volume.classify(place, 4096), BlockKind::Data, "nothing says so yet");
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, read(place, 4096)).outcome.unwrap();
    assert_eq!(load(&volume.counters.read_hits), hits + 1, "it came from the cache");
    assert_eq!(volume.classify(place, 4096), BlockKind::Metadata);
    assert_eq!(load(&volume.counters.metadata_hits), 1);
}
