//! Azor's choices by the simulator and by the daemon: the same requests through `larder sim run` and over NBD through
//! `larder block serve` hit the same lines. With `--nocapture` it prints the table of docs/azor.md.
//!
//! Nothing in it depends on the machine's speed. What a request leaves to be done behind its reply, a fill above all, is over
//! before the next one comes: the simulator's requests come minutes apart, the daemon is asked to settle after each. (Else
//! a slow device decides how many fills find their place taken by another that still waits to be written.) And the
//! device has the simulator's key, so that lines meet the same neighbours. So the counts are not alike but the same.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use crate::daemon::ask::settle;
use crate::daemon::{Daemon, larder, one, session};
use larder_base::{Nanos, Rng};
use larder_block::control::client;
use larder_block::control::protocol::Request as Ask;
use larder_block::control::status::Status;
use larder_block::op::Op;
use larder_format::block::superblock::{COPY_BYTES, choose};
use larder_policy::block::BlockKind;
use larder_policy::block::detect::Detector;
use larder_runtime::{AlignedBuf, Payload};
use larder_sim::block::placement_key;
use larder_sim::experiment::{CacheOutcome, Experiment, run};
use larder_trace::{Class, Format, Options, Request, Writer};
use tempfile::TempDir;

/// A file server of 64 MiB in small, a third of which is touched. One request comes in 20 minutes, on average, so that by far
/// the least of the times between them is longer than what is done behind a reply takes.
const TRACE: &str = "gen:specsfs?size=64m&touched=0.5&requests=12000&seed=4&rate=0.0008";
const CACHE: &str = "12m";
const SEED: u64 = 1;

/// Where flushes cost nothing, if there is such a place: each fill that takes another line's slot waits for two of them. With
/// them the test is as slow as the disk, and comes to the same.
fn fast_dir() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Gives a device that has just been formatted the simulator's key.
fn set_key(cache: &Path) {
    let device = OpenOptions::new().read(true).write(true).open(cache).unwrap();
    let mut copies = vec![0; 2 * COPY_BYTES];
    device.read_exact_at(&mut copies, 0).unwrap();
    let (a, b) = copies.split_at(COPY_BYTES);
    let mut superblock = choose(a, b).unwrap();
    superblock.key = placement_key(SEED);
    let bytes = superblock.encode();
    for copy in 0..2 {
        device.write_all_at(&bytes, copy * COPY_BYTES as u64).unwrap();
    }
}

fn counter(status: &Status, name: &str) -> u64 {
    status.counters[name]
}

/// What came of it: lines read, of them those that cost the volume nothing, lines evicted and updated. (Not those filled: the
/// simulator stops with the last answer, and the last fill comes behind it.)
type Counts = [u64; 4];

/// Placement, write policy, admission.
type Case = (&'static str, &'static str, &'static str);

/// Bytes of the volume.
const VOLUME: usize = 64 << 20;

/// What came of it, and reads of metadata with those of them that hit, as far as the daemon looks for metadata. What the
/// volume holds is `image`, and what is written is what it holds already; without one it is zeros.
fn through_the_daemon(
    (placement, write, admission): Case,
    image: Option<&[u8]>,
    requests: &[Request],
    ahead: &str,
) -> (Counts, (u64, u64)) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    match image {
        Some(bytes) => std::fs::write(dir.join("disk"), bytes).unwrap(),
        None => File::create(dir.join("disk")).unwrap().set_len(VOLUME as u64).unwrap(),
    }
    let flash = fast_dir();
    let cache = flash.path().join("cache");
    let path = cache.to_str().unwrap();
    let (code, message) =
        larder(&["format", path, "--size", CACHE, "--shards", "1", "--placement", placement]);
    assert_eq!(code, Some(0), "{message}");
    set_key(&cache);
    let more = ["--threads", "1", "--readahead", ahead, "--write", write, "--admission", admission];
    let by = Command::new(env!("CARGO_BIN_EXE_larder"));
    let daemon = Daemon::start_by(by, dir, &cache, &more);
    let control = dir.join("state/block.sock");
    let ask = |what: &Ask| client::ask(&control, what, &mut |_| {}).unwrap();
    let mut session = session(dir);
    for request in requests {
        let (offset, len) = (request.offset, request.size as usize);
        let op = if request.op.is_read() {
            Op::Read { offset, buf: AlignedBuf::zeroed(len) }
        } else {
            let mut bytes = AlignedBuf::zeroed(len);
            if let Some(image) = image {
                bytes.copy_from_slice(&image[offset as usize..][..len]);
            }
            Op::Write { offset, data: Payload::new(bytes), fua: false }
        };
        one(&mut *session, op);
        settle(dir);
    }
    let status: Status = serde_json::from_value(ask(&Ask::Status {})).unwrap();
    drop(session);
    daemon.stop();
    let of = |name| counter(&status, name);
    // Nothing that was to be filled was lost, and no request met another one's fill.
    for name in ["fill_dropped", "fill_cancelled", "read_shared", "waited", "flash_errors"] {
        assert_eq!(of(name), 0, "{name}: {:?}", status.counters);
    }
    let volume = &status.volumes[0];
    let counts = [of("read_lines"), of("read_hits"), of("evicted"), of("updated")];
    (counts, (volume.metadata_reads, volume.metadata_hits))
}

/// What the simulator makes of each case.
fn simulated(trace: &str, cases: &[Case], ahead: &str) -> Vec<CacheOutcome> {
    let mut text =
        format!("seed = {SEED}\n[workload]\ntrace = \"{trace}\"\n[report]\npoints = 0\n");
    for (placement, write, admission) in cases {
        text.push_str(&format!(
            "[[cache]]\nkind = \"block\"\nname = \"{placement} {write} {admission}\"\nflash = \"{CACHE}\"\nload = \"open\"\nshards = 1\n\
             depth = 1\nvolume = \"{VOLUME}\"\nreadahead = \"{ahead}\"\nplacement = \"{placement}\"\nwrite = \"{write}\"\nadmission = \"{admission}\"\n"
        ));
    }
    run(&Experiment::parse(&text, "x").unwrap(), 2, |_, _| {}).unwrap().caches
}

/// What the daemon makes of each: one daemon for each, side by side.
fn served(
    cases: &[Case],
    image: Option<&[u8]>,
    requests: &[Request],
    ahead: &str,
) -> Vec<(Counts, (u64, u64))> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = cases
            .iter()
            .map(|&case| scope.spawn(move || through_the_daemon(case, image, requests, ahead)))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Lines evicted and updated, read and hit, as the daemon counts them.
fn counts(of: &CacheOutcome) -> Counts {
    let b = of.block.as_ref().unwrap();
    assert_eq!(b.shared_lines, 0, "{}", of.name);
    [b.read_lines, b.hit_lines, b.evicted, b.updated]
}

/// Of lines read those that hit, percent.
fn hits(counts: Counts) -> f64 {
    100.0 * counts[1] as f64 / counts[0] as f64
}

#[test]
fn simulator_and_daemon_hit_the_same() {
    let reader = larder_trace::open(TRACE, &Options::default()).unwrap().reader;
    let requests: Vec<Request> = reader.map(Result::unwrap).collect();
    let cases: [Case; 8] = [
        ("direct", "hdd-ssd", "all"),
        ("set:4", "hdd-ssd", "all"),
        ("set:16", "hdd-ssd", "all"),
        ("set:16", "hdd-upd", "all"),
        ("set:16", "hdd-inv", "all"),
        ("set:16", "hdd-ssd", "sseqr+tc"),
        ("full", "hdd-ssd", "all"),
        ("full", "hdd-upd", "all"),
    ];
    let mut ratios = Vec::new();
    let served = served(&cases, None, &requests, "0");
    for ((case, (daemon, _)), cache) in cases.iter().zip(served).zip(&simulated(TRACE, &cases, "0"))
    {
        let sim = counts(cache);
        let (of_sim, of_daemon) = (hits(sim), hits(daemon));
        ratios.push((of_sim, of_daemon));
        println!("{}: simulator {of_sim:.2} %, daemon {of_daemon:.2} %", cache.name);
        assert_eq!(sim[0], daemon[0], "{}", cache.name);
        match case.0 {
            // When a segment that was emptied is free again depends on when the log has had its turn, and with that
            // which segment is cleaned next and what it still holds: a few lines in a thousand.
            "full" => {
                assert!((of_sim - of_daemon).abs() < 1.0, "{}: {sim:?} {daemon:?}", cache.name);
            }
            // (With touches counted under hashes of the same key, too.)
            _ => assert_eq!(sim, daemon, "{}", cache.name),
        }
    }
    for of in [|r: &(f64, f64)| r.0, |r: &(f64, f64)| r.1] {
        let all: Vec<f64> = ratios.iter().map(of).collect();
        assert!(all[0] < all[1] && all[1] < all[2], "conflict misses: {all:?}");
        assert!(all[4] < all[2] && all[4] < all[3], "write-around reads what it wrote: {all:?}");
    }
}

/// What is read at random, then a scan of more than the cache holds, then the same at random again.
fn scanned() -> Vec<Request> {
    let mut rng = Rng::new(5);
    let mut requests = Vec::new();
    let random = |requests: &mut Vec<(u64, u64)>, rng: &mut Rng| {
        requests.extend((0..1200).map(|_| (rng.below(4 << 8) * 4096, 4096)));
    };
    random(&mut requests, &mut rng);
    requests.extend((0..384).map(|i| ((16 << 20) + (i << 16), 1 << 16)));
    random(&mut requests, &mut rng);
    let read = |(i, (offset, len))| {
        let time = Some(Nanos::from_secs(1200 * (i + 1)));
        Request { time, ..Request::block(larder_trace::Op::Read, 0, offset, len) }
    };
    (0u64..).zip(requests).map(read).collect()
}

/// What a stream may have is decided alike: by `seqr(free=on)` free slots, and nobody's place.
#[test]
fn a_scan_has_the_same_free_slots_in_both() {
    let requests = scanned();
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace");
    let trace = trace.to_str().unwrap();
    let mut writer = Writer::create(trace, Format::Larder).unwrap();
    requests.iter().for_each(|r| writer.push(r).unwrap());
    writer.finish().unwrap();
    let cases: [Case; 5] = [
        ("set:8", "hdd-ssd", "all"),
        ("set:8", "hdd-ssd", "seqr(free=on)"),
        ("direct", "hdd-ssd", "seqr(free=on)"),
        ("full", "hdd-ssd", "seqr(free=on)"),
        ("set:8", "hdd-ssd", "seqr"),
    ];
    let served = served(&cases, None, &requests, "0");
    let mut found = Vec::new();
    for ((case, (daemon, _)), cache) in cases.iter().zip(served).zip(&simulated(trace, &cases, "0"))
    {
        let sim = counts(cache);
        println!("{}: simulator {sim:?}, daemon {daemon:?}", cache.name);
        if case.0 == "full" {
            // (When a segment is free again is the log's affair.)
            let points = (hits(sim) - hits(daemon)).abs();
            assert!(points < 1.0, "{}: {sim:?} {daemon:?}", cache.name);
        } else {
            assert_eq!(sim, daemon, "{}", cache.name);
        }
        found.push(sim);
    }
    let evicted = |of: usize| found[of][2];
    // (What is read at random for the first time behind the scan displaces something, then as before.)
    assert!(evicted(0) > 3000 && evicted(1) < 400, "{found:?}");
    assert!(found[1][1] > found[0][1] + 300, "{found:?}");
}

/// A stream is read ahead of alike, and what is read ahead has the same places.
#[test]
fn a_scan_is_read_ahead_of_alike_in_both() {
    let requests = scanned();
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace");
    let trace = trace.to_str().unwrap();
    let mut writer = Writer::create(trace, Format::Larder).unwrap();
    requests.iter().for_each(|r| writer.push(r).unwrap());
    writer.finish().unwrap();
    let cases: [Case; 3] = [
        ("set:8", "hdd-ssd", "all"),
        ("set:8", "hdd-ssd", "seqr(free=on)"),
        ("direct", "hdd-ssd", "all"),
    ];
    let without: Vec<_> = simulated(trace, &cases, "0").iter().map(counts).collect();
    let served = served(&cases, None, &requests, "1m");
    let simulated = simulated(trace, &cases, "1m");
    for ((cache, (daemon, _)), without) in simulated.iter().zip(served).zip(without) {
        let sim = counts(cache);
        println!("{}: simulator {sim:?}, daemon {daemon:?}; without {without:?}", cache.name);
        assert_eq!(sim, daemon, "{}", cache.name);
        // (A scan of 6,144 lines.)
        let more = if cache.name.contains("seqr") { 0 } else { 3000 };
        assert!(sim[1] >= without[1] + more, "{}: {sim:?} {without:?}", cache.name);
    }
}

/// An ext4 file system with thousands of small files and a few large ones in an image of [`VOLUME`] bytes.
fn ext4_image() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("image"));
    for i in 0..2400 {
        let below = tree.join(format!("directory-{}", i % 600));
        std::fs::create_dir_all(&below).unwrap();
        std::fs::write(below.join(format!("a file with a longer name {i}")), vec![7; 3000])
            .unwrap();
    }
    for i in 0..4 {
        std::fs::write(tree.join(format!("large-{i}")), vec![i; 9 << 20]).unwrap();
    }
    File::create(&image).unwrap().set_len(VOLUME as u64).unwrap();
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let made = Command::new("mkfs.ext4")
        .env("PATH", path)
        .args(["-q", "-F", "-b", "4096", "-d"])
        .args([&tree, &image])
        .output();
    let made = made.unwrap_or_else(|e| panic!("mkfs.ext4: {e}"));
    assert!(made.status.success(), "mkfs.ext4: {made:?}");
    std::fs::read(&image).unwrap()
}

/// What a file server does to the image: six accesses in ten are to single blocks of metadata, others to 64 KiB of data;
/// half of either are writes.
fn file_server(image: &[u8]) -> Vec<Request> {
    const LINE: usize = 4096;
    const RUN: usize = 16 * LINE;
    let mut detector = Detector::new(image.len() as u64, Detector::DEFAULT_BLOCKS);
    while let Some((offset, len)) = detector.next_wanted() {
        let end = (offset + len).min(image.len() as u64);
        detector.observe(offset, &image[offset as usize..end as usize]);
    }
    let mut used = Vec::new();
    for (at, block) in (0..).step_by(LINE).zip(image.chunks(LINE)) {
        detector.observe(at, block);
        used.push(block.iter().any(|&b| b > 0));
    }
    let kind = |block: usize| detector.classify((block * LINE) as u64, LINE as u64);
    let blocks = image.len() / LINE;
    let mut metadata: Vec<usize> =
        (0..blocks).filter(|&b| used[b] && kind(b) == BlockKind::Metadata).collect();
    let mut data: Vec<usize> = (0..blocks)
        .step_by(RUN / LINE)
        .filter(|&run| (run..run + RUN / LINE).all(|b| used[b] && kind(b) == BlockKind::Data))
        .collect();
    assert!(metadata.len() > 600 && data.len() > 400, "{} {}", metadata.len(), data.len());
    let mut rng = Rng::new(3);
    rng.shuffle(&mut metadata);
    rng.shuffle(&mut data);
    // The third power of an even number: a few are wanted often, all now and then.
    let pick = |from: &[usize], rng: &mut Rng| {
        let even = rng.below(1 << 20) as f64 / f64::from(1 << 20);
        from[(even.powi(3) * from.len() as f64) as usize]
    };
    (0..12_000)
        .map(|i| {
            let op = if rng.chance(0.5) { larder_trace::Op::Read } else { larder_trace::Op::Write };
            let (class, block, size) = if rng.chance(0.6) {
                (Class::Metadata, pick(&metadata, &mut rng), LINE)
            } else {
                (Class::Data, pick(&data, &mut rng), RUN)
            };
            let time = Some(Nanos::from_secs(1200 * (i + 1)));
            Request { class, time, ..Request::block(op, 0, (block * LINE) as u64, size as u64) }
        })
        .collect()
}

/// The simulator is told by the trace what is metadata, the daemon finds out by what passes by.
#[test]
#[cfg_attr(without = "mkfs.ext4", ignore = "needs mkfs.ext4 (Debian: e2fsprogs)")]
fn metadata_of_a_real_file_system_come_first_in_both() {
    let image = ext4_image();
    let requests = file_server(&image);
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace");
    let trace = trace.to_str().unwrap();
    let mut writer = Writer::create(trace, Format::Larder).unwrap();
    requests.iter().for_each(|r| writer.push(r).unwrap());
    writer.finish().unwrap();
    let cases: [Case; 4] = [
        ("set:16", "hdd-ssd", "all"),
        ("set:16", "hdd-ssd", "two_lbs"),
        ("full", "hdd-ssd", "all"),
        ("full", "hdd-ssd", "two_lbs"),
    ];
    let reads = requests.iter().filter(|r| r.op.is_read() && r.class == Class::Metadata).count();
    let of_metadata = |hits: u64| 100.0 * hits as f64 / reads as f64;
    let (mut told, mut found) = (Vec::new(), Vec::new());
    let served = served(&cases, Some(&image), &requests, "0");
    for ((case, (daemon, (seen, hit))), cache) in
        cases.iter().zip(served).zip(&simulated(trace, &cases, "0"))
    {
        let sim = counts(cache);
        let (of_sim, of_daemon) = (hits(sim), hits(daemon));
        told.push(100.0 * cache.block.as_ref().unwrap().metadata_hit_ratio.unwrap());
        found.push(of_metadata(hit));
        println!(
            "{}: simulator {of_sim:.2} %, of metadata {:.2} %; daemon {of_daemon:.2} %, of metadata {:.2} % \
             ({seen} of {reads} reads recognised)",
            cache.name,
            told[told.len() - 1],
            found[found.len() - 1],
        );
        assert_eq!(sim[0], daemon[0]);
        if case.2 == "all" {
            // Nothing asks what is metadata, so that the daemon does not look for it.
            assert_eq!(seen, 0, "{}", cache.name);
            assert!(case.0 == "full" || sim == daemon, "{}: {sim:?} {daemon:?}", cache.name);
            continue;
        }
        // A directory is recognised when it has passed by once.
        assert!(seen > 8 * reads as u64 / 10 && seen <= reads as u64, "{seen} of {reads}");
        // Until then the daemon takes it for data, which the simulator was told it is not.
        let points = 1.0;
        assert!((of_sim - of_daemon).abs() < points, "{}: {sim:?} {daemon:?}", cache.name);
        let (told, found) = (told[told.len() - 1], found[found.len() - 1]);
        assert!((told - found).abs() < points, "{}: {told} {found}", cache.name);
    }
    for (all, two_lbs) in [(0, 1), (2, 3)] {
        // What `all` hits of metadata is the simulator's to say; with sets it is the same in the daemon, line by line.
        assert!(told[two_lbs] > told[all] && found[two_lbs] > told[all], "{told:?} {found:?}");
    }
}
