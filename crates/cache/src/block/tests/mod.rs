mod awaited;
mod back;
mod beside;
mod bounds;
mod check;
mod ends;
mod failed_log;
mod gone;
mod hanging;
mod joined;
mod journaled;
mod kept;
mod left;
mod looked;
mod losses;
mod periodic;
mod piled;
mod refused;
mod ruled;
mod rules;
mod shrunk;
mod silent;
mod sparse;
mod swapped;
mod thrift;
mod through;
mod unopened;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::Duration;

use larder_base::{ByteSize, Rng, UnixSecs};
use larder_engine::block::map::Replacement;
use larder_engine::block::node::event::Came;
use larder_engine::block::{BlockEffects, IoId, Source, WriteMode};
use larder_format::block::Placement;
use larder_policy::block::{EvictionBy, VictimPolicy};
use larder_runtime::{AlignedBuf, Payload, RingChoice};
use tempfile::TempDir;

use super::*;
pub(super) use failed_log::Faults;
use larder_volume::op::{Done, Op};
use larder_volume::testing::{against_a_model, one, run};
use larder_volume::{self as backing, Backing, OpenOptions, Uri};
use through::{Served, payload};

/// A cache over files, with threads that serve them.
struct Bench {
    server: Option<Served>,
    handle: Option<Running>,
    cache: Arc<Core>,
    dir: Arc<TempDir>,
    shape: Shape,
}

#[derive(Clone, Copy)]
struct Shape {
    line: u32,
    ways: u32,
    write: WriteMode,
    workers: usize,
    volumes: usize,
    admission: &'static str,
    rules: fn() -> RulesConfig,
    /// Stores are used past the page cache where they can be.
    direct: bool,
}

/// Instead of ways: a log of segments.
const FULL: u32 = 0;
/// A sparse file.
const SPARSE: u32 = u32::MAX;

const SHAPE: Shape = Shape {
    line: 4096,
    ways: 8,
    write: WriteMode::WriteThrough,
    workers: 1,
    volumes: 1,
    admission: "all",
    rules: RulesConfig::default,
    direct: false,
};

fn format_config(dir: &TempDir, shape: Shape, cache_bytes: u64) -> FormatConfig {
    FormatConfig {
        path: dir.path().join("cache"),
        size: Some(ByteSize(cache_bytes)),
        line: shape.line,
        placement: match shape.ways {
            FULL => Placement::Full,
            SPARSE => Placement::Sparse(64 << 30),
            ways => Placement::Sets(ways),
        },
        shards: 8,
        write_log: None,
        yes: false,
        discard_dirty: false,
    }
}

/// Bytes of a cache with one set in each shard.
fn least(shape: Shape) -> u64 {
    if shape.ways == SPARSE {
        return 8 * 16 * u64::from(shape.line);
    }
    let dir = TempDir::new().unwrap();
    let config = format_config(&dir, shape, 1 << 20);
    let Err(CacheError::Layout {
        source: larder_format::block::LayoutError::TooSmall { least, .. },
        ..
    }) = open::format(&config, [0; 32], UnixSecs(1))
    else {
        panic!()
    };
    least
}

fn bench(sizes: &[u64], cache_bytes: u64, shape: Shape) -> Bench {
    let shape = Shape { volumes: sizes.len(), ..shape };
    let dir = Arc::new(TempDir::new().unwrap());
    let mut seed = [0u8; 32];
    Rng::new(u64::from(std::process::id()) << 32 | dir.path().as_os_str().len() as u64)
        .fill(&mut seed);
    // Tests run side by side: each device has a name of its own.
    seed[..8].copy_from_slice(&(Arc::as_ptr(&dir) as u64).to_le_bytes());
    open::format(&format_config(&dir, shape, cache_bytes), seed, UnixSecs(1)).unwrap();
    for (i, size) in sizes.iter().enumerate() {
        File::create(dir.path().join(format!("disk{i}"))).unwrap().set_len(*size).unwrap();
    }
    start(dir, shape).unwrap()
}

fn start(dir: Arc<TempDir>, shape: Shape) -> Result<Bench, CacheError> {
    let volumes = Arc::new(Volumes::default());
    for i in 0..shape.volumes {
        let uri: Uri =
            format!("file:{}", dir.path().join(format!("disk{i}")).display()).parse().unwrap();
        // Tests change the files themselves, to see where an answer comes from.
        let options = OpenOptions { watch: false, direct: shape.direct, ..OpenOptions::default() };
        let backing = backing::open_with(&uri, &options).unwrap();
        volumes.add(Volume::new(&format!("disk{i}"), backing, shape.line, true)).unwrap();
    }
    serve(dir, shape, volumes)
}

fn serve(dir: Arc<TempDir>, shape: Shape, volumes: Arc<Volumes>) -> Result<Bench, CacheError> {
    let config = config_of(&dir, shape);
    let handle = open::open(&dir.path().join("cache"), config, &volumes.all())?;
    let cache = handle.cache().clone();
    let served = cache.clone();
    let server = Served::start(volumes, shape.workers, move |worker, registry, token| {
        Cached::new(served.clone(), worker, registry, token, RingChoice::Auto)
    });
    Ok(Bench { server: Some(server), handle: Some(handle), cache: cache.clone(), dir, shape })
}

fn config_of(dir: &TempDir, shape: Shape) -> CacheConfig {
    CacheConfig {
        back: std::collections::BTreeMap::new(),
        back_by_default: None,
        markers: std::collections::BTreeMap::new(),
        moved: std::collections::BTreeSet::new(),
        journals: std::collections::BTreeMap::new(),
        awaited: std::collections::BTreeSet::new(),
        write: shape.write,
        replacement: Replacement::Lru,
        reclaim: VictimPolicy::Fifo,
        evict: EvictionBy::default(),
        admission: shape.admission.parse().unwrap(),
        fill_memory: ByteSize(8 << 20),
        readahead: ByteSize(0),
        workers: shape.workers,
        queues: 0,
        ring: RingChoice::Auto,
        trust_unchanged: false,
        state_dir: dir.path().join("state"),
        record: None,
        rules: (shape.rules)(),
    }
}

impl Bench {
    /// Waits until nothing is done behind the replies any more.
    fn settle(&self) {
        assert_eq!(self.cache.settle(Duration::from_secs(120)).unwrap(), 0, "{:?}", self.engine());
    }

    fn engine(&self) -> BlockStats {
        self.cache.stats().engine
    }

    /// A clean stop and another start.
    fn restart(mut self) -> (Bench, Warmth) {
        self.server.take().unwrap().stop();
        self.handle.take().unwrap().stop();
        let (dir, shape) = (self.dir.clone(), self.shape);
        drop(self);
        let bench = start(dir, shape).unwrap();
        let warmth = bench.handle.as_ref().unwrap().warmth.clone();
        (bench, warmth)
    }
}

impl Bench {
    fn disk(&self, volume: usize) -> PathBuf {
        self.dir.path().join(format!("disk{volume}"))
    }

    fn client(&self, volume: usize) -> Box<dyn Backing> {
        self.server.as_ref().unwrap().client(&format!("disk{volume}"))
    }
}

fn read(offset: u64, len: usize) -> Op {
    Op::Read { offset, buf: AlignedBuf::zeroed(len) }
}

fn write(offset: u64, len: usize, fill: u8) -> Op {
    Op::Write { offset, data: payload(len, fill), fua: false }
}

fn bytes(done: Done) -> AlignedBuf {
    done.outcome.unwrap();
    let Op::Read { buf, .. } = done.op else { panic!() };
    buf
}

/// Every mode of writing and several shapes, a cache smaller than the volume, unaligned operations: what is read is what
/// was written, and the store has it.
#[test]
fn random_operations_against_a_model_disk() {
    let cases = [
        (WriteMode::WriteThrough, 4096, 1),
        (WriteMode::WriteUpdate, 4096, 8),
        (WriteMode::WriteAround, 16384, 4),
        (WriteMode::WriteThrough, 4096, FULL),
        (WriteMode::WriteUpdate, 16384, FULL),
        (WriteMode::WriteThrough, 4096, SPARSE),
        (WriteMode::WriteUpdate, 16384, SPARSE),
        (WriteMode::WriteAround, 4096, SPARSE),
    ];
    for (i, (write, line_bytes, ways)) in cases.into_iter().enumerate() {
        let shape = Shape { line: line_bytes, ways, write, workers: 2, ..SHAPE };
        // The least that it can be: one set of each shard, and the volume does not end with a line.
        let size = 1_000_000 + 512;
        let bench = bench(&[size, size], least(shape), shape);
        for volume in 0..2 {
            let client = bench.client(volume);
            let mut session = client.session().unwrap();
            let model = against_a_model(&mut *session, size as usize, i as u64, 25);
            let mut again = Vec::new();
            for at in (0..size).step_by(50_000) {
                let len = (size - at).min(50_000) as usize;
                again.extend_from_slice(&bytes(one(&mut *session, read(at, len))));
            }
            assert!(again == model, "{write:?}");
            assert!(std::fs::read(bench.disk(volume)).unwrap() == model);
        }
        let stats = bench.engine();
        assert!(stats.read_lines > 100 && stats.fills > 50 && stats.read_hits > 0, "{stats:?}");
        assert_eq!((stats.corrupt, stats.flash_errors, stats.backing_errors), (0, 0, 0));
    }
}

/// The second read comes from flash: the store may be changed behind the cache's back without being seen.
#[test]
fn hits_come_from_the_cache_device() {
    let bench = bench(&[8 << 20], 64 << 20, SHAPE);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, write(0, 1 << 20, 5)).outcome.unwrap();
    one(&mut *session, read(2 << 20, 1 << 20)).outcome.unwrap();
    // Fills happen behind the answer.
    bench.settle();
    assert_eq!(bench.engine().fills, 512);
    let disk = File::options().write(true).open(bench.disk(0)).unwrap();
    disk.write_all_at(&vec![9; 4 << 20], 0).unwrap();
    assert!(bytes(one(&mut *session, read(0, 1 << 20))).iter().all(|&b| b == 5));
    assert!(bytes(one(&mut *session, read(2 << 20, 1 << 20))).iter().all(|&b| b == 0));
    assert!(bytes(one(&mut *session, read(1 << 20, 1 << 20))).iter().all(|&b| b == 9));
    assert_eq!(bench.engine().read_hits, 512);
    // What was read last is filled before the file is written to by way of the page cache: where both meet, the kernel
    // reports an error with the next flush, and the cache is given up.
    bench.settle();
    assert_eq!(bench.engine().fills, 768);
    // Rot on the cache device: noticed, and read from the store.
    let flash = File::options().write(true).open(bench.dir.path().join("cache")).unwrap();
    let junk = vec![0xee; 1 << 20];
    let data = bench.cache.layout().data;
    for at in (data..63 << 20).step_by(1 << 20) {
        flash.write_all_at(&junk, at).unwrap();
    }
    assert!(bytes(one(&mut *session, read(0, 1 << 20))).iter().all(|&b| b == 9));
    assert_eq!(
        bench.engine().corrupt,
        256,
        "{:?} {:?}",
        bench.engine(),
        bench.cache.why_given_up()
    );
}

/// A trim or zeroes of far more than a group: quick, whole, and nothing of the old is ever read.
#[test]
fn large_ranges() {
    for ways in [SHAPE.ways, SPARSE] {
        ranges(Shape { workers: 2, ways, ..SHAPE });
    }
}

fn ranges(shape: Shape) {
    let bench = bench(&[64 << 20], 32 << 20, shape);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    for i in 0..8 {
        one(&mut *session, write(i << 20, 1 << 20, 7)).outcome.unwrap();
    }
    let (offset, len) = ((1 << 20) + 1000, 40 << 20);
    let zero = Op::WriteZeroes { offset, len, fua: true, may_punch: true, fast: false };
    // Reads beside it see one or the other.
    session.submit(1, zero);
    session.submit(2, read(3 << 20, 8192));
    session.submit(3, read(60 << 20, 8192));
    for done in run(&mut *session, 3) {
        let token = done.token;
        done.outcome.as_ref().unwrap();
        if token == 2 {
            let buf = bytes(done);
            assert!(buf.iter().all(|&b| b == buf[0]) && [0, 7].contains(&buf[0]));
        }
    }
    let buf = bytes(one(&mut *session, read(1 << 20, 8 << 20)));
    assert!(buf[..1000].iter().all(|&b| b == 7) && buf[1000..].iter().all(|&b| b == 0));
    assert!(bytes(one(&mut *session, read(0, 1 << 20))).iter().all(|&b| b == 7));
    let trim = Op::Trim { offset: 0, len: 64 << 20, fua: false };
    one(&mut *session, trim).outcome.unwrap();
    assert!(bytes(one(&mut *session, read(0, 1 << 20))).iter().all(|&b| b == 0));
}

/// Clients on several connections and workers write versions of few lines; nobody reads an older one than was answered
/// before the read was begun.
#[test]
fn several_workers_on_few_lines() {
    let shape = Shape { ways: 1, workers: 3, ..SHAPE };
    let bench = bench(&[1 << 20], least(shape), shape);
    const PLACES: usize = 24;
    let answered: Vec<AtomicU32> = (0..PLACES).map(|_| AtomicU32::new(0)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (bench, answered, stop) = (&bench, &answered, &stop);
        for reader in 0..3u64 {
            scope.spawn(move || {
                let client = bench.client(0);
                let mut session = client.session().unwrap();
                let mut rng = Rng::new(100 + reader);
                let mut reads = 0;
                while !stop.load(Ordering::Relaxed) || reads < 100 {
                    let places: Vec<usize> =
                        (0..8).map(|_| rng.below(PLACES as u64) as usize).collect();
                    let least: Vec<u32> =
                        places.iter().map(|p| answered[*p].load(Ordering::SeqCst)).collect();
                    for (i, place) in places.iter().enumerate() {
                        session.submit(i as u64, read(*place as u64 * 6144, 6144));
                    }
                    for done in run(&mut *session, 8) {
                        let token = done.token as usize;
                        let buf = bytes(done);
                        let version = u32::from_le_bytes(buf[..4].try_into().unwrap());
                        assert!(version >= least[token], "{version} after {}", least[token]);
                        // Within a sector never a mix.
                        for sector in buf.chunks(512) {
                            let first = &sector[..4];
                            assert!(sector.chunks(4).all(|word| word == first));
                        }
                        reads += 1;
                    }
                }
            });
        }
        let writer = scope.spawn(move || {
            let client = bench.client(0);
            let mut session = client.session().unwrap();
            let mut rng = Rng::new(1);
            for version in 1..400u32 {
                let place = rng.below(PLACES as u64) as usize;
                let mut buf = AlignedBuf::zeroed(6144);
                buf.chunks_exact_mut(4).for_each(|w| w.copy_from_slice(&version.to_le_bytes()));
                let (offset, data) = (place as u64 * 6144, Payload::new(buf));
                one(&mut *session, Op::Write { offset, data, fua: false }).outcome.unwrap();
                answered[place].store(version, Ordering::SeqCst);
            }
        });
        writer.join().unwrap();
        stop.store(true, Ordering::Relaxed);
    });
    let stats = bench.engine();
    assert!(stats.read_hits > 0 && stats.waited > 0, "{stats:?}");
}

/// A cache device that fails: clients see nothing of it.
#[test]
fn a_cache_device_that_is_cut_off() {
    let bench = bench(&[8 << 20], 64 << 20, SHAPE);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    let model = against_a_model(&mut *session, 8 << 20, 3, 5);
    // Lines that are read again, once they are on flash.
    let end = Instant::now() + Duration::from_secs(120);
    while bench.engine().read_hits == 0 {
        assert!(Instant::now() < end, "{:?}", bench.engine());
        bytes(one(&mut *session, read(0, 1 << 20)));
        std::thread::sleep(Duration::from_millis(10));
    }
    File::options()
        .write(true)
        .open(bench.dir.path().join("cache"))
        .unwrap()
        .set_len(4096)
        .unwrap();
    for round in 0..8u64 {
        for at in (0..8 << 20).step_by(1 << 20) {
            let buf = bytes(one(&mut *session, read(at, 1 << 20)));
            assert!(buf[..] == model[at as usize..][..1 << 20], "round {round}");
        }
    }
    // A read has met the end of the file, or zeros where a fill has made it longer again; or the log gave the cache up.
    let stats = bench.engine();
    let met = stats.flash_errors + stats.corrupt > 0 || !bench.cache.is_enabled();
    assert!(met, "{stats:?}");
}

/// What was cached is there again after a clean stop, unless the file was changed meanwhile.
#[test]
fn warm_after_a_clean_stop_and_cold_after_a_change() {
    for ways in [SHAPE.ways, FULL, SPARSE] {
        warm_and_cold(Shape { ways, ..SHAPE });
    }
}

fn warm_and_cold(shape: Shape) {
    let bench = bench(&[8 << 20], 64 << 20, shape);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, write(0, 1 << 20, 5)).outcome.unwrap();
    bench.settle();
    assert_eq!(bench.engine().fills, 256);
    drop(session);
    drop(client);
    let (bench, warmth) = bench.restart();
    assert!(matches!(warmth, Warmth::Log(_)), "{warmth:?}");
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    assert!(bytes(one(&mut *session, read(0, 1 << 20))).iter().all(|&b| b == 5));
    assert_eq!(bench.engine().read_hits, 256);
    drop(session);
    drop(client);
    let disk = bench.disk(0);
    let mut bench = bench;
    bench.server.take().unwrap().stop();
    bench.handle.take().unwrap().stop();
    let (dir, shape) = (bench.dir.clone(), bench.shape);
    drop(bench);
    File::options().write(true).open(disk).unwrap().write_all_at(&[9; 4096], 0).unwrap();
    let bench = start(dir, shape).unwrap();
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    assert_eq!(bytes(one(&mut *session, read(0, 1 << 20)))[..4096], [9; 4096]);
    assert_eq!(bench.engine().read_hits, 0);
}

/// Each policy, over operations whose answers must be right whatever it says; and a stream is not cached.
#[test]
fn admission() {
    for policy in larder_policy::block::BLOCK_POLICY_NAMES.into_iter().chain(["seqr(free=on)"]) {
        let shape = Shape { ways: 2, workers: 2, admission: policy, ..SHAPE };
        let bench = bench(&[4 << 20], least(shape), shape);
        let client = bench.client(0);
        let mut session = client.session().unwrap();
        let model = against_a_model(&mut *session, 4 << 20, 7, 20);
        for at in (0..4 << 20).step_by(1 << 18) {
            let buf = bytes(one(&mut *session, read(at, 1 << 18)));
            assert!(buf[..] == model[at as usize..][..1 << 18], "{policy}");
        }
    }
    let bench = bench(&[64 << 20], 128 << 20, Shape { admission: "seqr", ..SHAPE });
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    for at in (0..32 << 20).step_by(1 << 18) {
        one(&mut *session, read(at, 1 << 18)).outcome.unwrap();
    }
    let mut rng = Rng::new(5);
    for _ in 0..500 {
        let at = (32 << 20) + rng.below(8192) * 4096;
        one(&mut *session, read(at, 4096)).outcome.unwrap();
    }
    bench.settle();
    assert!(bench.engine().fills >= 400);
    let stats = bench.engine();
    assert!(stats.fill_rejected > 6000 && stats.fills < 2500, "{stats:?}");
}

#[test]
fn what_cannot_be_formatted_or_opened() {
    let dir = TempDir::new().unwrap();
    let attempt = |change: fn(&mut FormatConfig)| {
        let mut config = format_config(&dir, SHAPE, 64 << 20);
        change(&mut config);
        let outcome = open::format(&config, [3; 32], UnixSecs(1));
        outcome.map_err(|e| e.to_string())
    };
    assert!(attempt(|c| c.line = 5000).unwrap_err().contains("a line of 5000"));
    assert!(attempt(|c| c.placement = Placement::Sets(17)).unwrap_err().contains("a set of 17"));
    assert!(attempt(|c| c.size = Some(ByteSize(1 << 20))).unwrap_err().contains("are needed"));
    assert!(!dir.path().join("cache").exists(), "a refusal leaves no file");
    attempt(|_| ()).unwrap();
    assert!(attempt(|_| ()).unwrap_err().contains("not said that this is meant"));
    attempt(|c| c.yes = true).unwrap();
    std::fs::write(dir.path().join("cache"), vec![1u8; 1 << 20]).unwrap();
    let error = open::layout_of(&dir.path().join("cache")).unwrap_err().to_string();
    assert!(error.contains("no superblock") && error.contains("larder block format"), "{error}");
}

/// A file system that fills up after the format takes room from lines, not from the map: its log would not fit, and the cache
/// would be given up whole. A cache of an earlier version has its room from its next start on.
#[test]
fn the_map_has_its_room_from_the_format_on() {
    use std::os::unix::fs::MetadataExt;
    for ways in [8, FULL] {
        let shape = Shape { ways, ..SHAPE };
        let dir = Arc::new(TempDir::new().unwrap());
        let layout = open::format(&format_config(&dir, shape, 256 << 20), [5; 32], UnixSecs(1));
        let layout = layout.unwrap();
        let path = dir.path().join("cache");
        let taken = || std::fs::metadata(&path).unwrap().blocks() * 512;
        assert!(taken() >= layout.data, "{} of {}", taken(), layout.data);
        let device = FlashDevice::open(&larder_runtime::DeviceOptions::new(&path)).unwrap();
        let at = layout.intents_at() + layout.intent_pages() * 4096;
        device.punch(at, layout.data - at).unwrap();
        assert!(taken() < layout.data);
        drop(device);
        File::create(dir.path().join("disk0")).unwrap().set_len(8 << 20).unwrap();
        let bench = start(dir.clone(), shape).unwrap();
        assert!(taken() >= layout.data, "{} of {}", taken(), layout.data);
        drop(bench);
    }
}

/// What is selected names files of guests.
#[test]
fn what_is_kept_in_the_state_directory_is_its_owners() {
    use std::os::unix::fs::PermissionsExt;
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("state").join("x.json");
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    store_file(&path, b"1").unwrap();
    assert_eq!(mode(), 0o600);
    for left in [&path, &path.with_extension("tmp")] {
        std::fs::write(left, b"0").unwrap();
        std::fs::set_permissions(left, std::fs::Permissions::from_mode(0o644)).unwrap();
    }
    store_file(&path, b"2").unwrap();
    assert_eq!((mode(), std::fs::read(&path).unwrap()), (0o600, b"2".to_vec()));
}

/// The server stops with requests under way, and answers them.
#[test]
fn a_stop_answers_what_is_under_way() {
    let bench = bench(&[8 << 20], 64 << 20, Shape { workers: 2, ..SHAPE });
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, read(0, 512)).outcome.unwrap();
    // So little that the socket takes all of it at once.
    for i in 0..16 {
        session.submit(i, write(i * 4096, 4096, 1));
    }
    session.flush(Instant::now());
    std::thread::sleep(Duration::from_millis(50));
    let mut bench = bench;
    bench.server.take().unwrap().stop();
    let disk = std::fs::read(bench.dir.path().join("disk0")).unwrap();
    assert!(disk[..16 * 4096].iter().all(|&b| b == 1));
}

/// A read is a hit unless it asked the store or waited for it: bytes that are held for a fill are at hand.
#[test]
fn bytes_at_hand_are_told_from_those_that_were_waited_for() {
    let bench = bench(&[1 << 20], 64 << 20, SHAPE);
    let (io, reader, writer) = (IoId(u32::MAX), OpId(1), OpId(2));
    let mut out = Out::default();
    bench.cache.with(0, None, &mut out, |_, fx| {
        let bytes = Payload::new(AlignedBuf::zeroed(4096));
        fx.held.keep_fetched(io, 0, bytes.clone());
        fx.held.keep_payload(writer, 0, &bytes);
        fx.deliver(Source::Io(io), reader, 0, 512);
        fx.deliver(Source::Op(writer), reader, 0, 512);
        fx.held.hears_of(Some((io, reader)));
        fx.deliver(Source::Io(io), reader, 0, 512);
        fx.deliver(Source::Op(writer), reader, 0, 512);
        fx.held.hears_of(None);
        fx.deliver(Source::Io(io), reader, 0, 512);
        fx.release(io);
        fx.release_op(writer);
        let waited = |(_, m): (OpId, Message)| {
            matches!(m, Message::Deliver { came: Came::Store { own: true }, .. })
        };
        let waited: Vec<bool> = fx.out.messages.drain(..).map(waited).collect();
        assert_eq!(waited, [false, false, true, false, false]);
    });
    // A read right behind the write, whose lines may be on flash by then or not; and one that asks the store.
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, write(0, 65_536, 7)).outcome.unwrap();
    assert!(bytes(one(&mut *session, read(0, 65_536))).iter().all(|&b| b == 7));
    one(&mut *session, read(1 << 19, 4096)).outcome.unwrap();
    let volume = bench.cache.volume("disk0").unwrap();
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    assert_eq!((count(&volume.counters.reads), count(&volume.counters.read_hits)), (2, 1));
}
