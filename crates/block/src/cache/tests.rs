use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use larder_base::Rng;
use larder_runtime::{AlignedBuf, DeviceOptions, RingChoice};
use tempfile::TempDir;

use super::*;
use crate::backing::file::tests::{against_a_model, one, run};
use crate::backing::{self, Backing, Patience, Uri};
use crate::op::{Done, Op};
use crate::server::{Listen, Server, ServerConfig, Volumes};

/// A server with a cache over files.
struct Bench {
    dir: TempDir,
    cache: Arc<Cache>,
    server: Server,
}

fn bench(sizes: &[u64], cache_bytes: u64, options: CacheOptions, workers: usize) -> Bench {
    bench_with(sizes, cache_bytes, options, workers, None)
}

fn bench_with(
    sizes: &[u64],
    cache_bytes: u64,
    options: CacheOptions,
    workers: usize,
    admission: Option<&str>,
) -> Bench {
    let dir = TempDir::new().unwrap();
    let device = DeviceOptions::new(dir.path().join("cache")).size(ByteSize(cache_bytes));
    let device = Arc::new(FlashDevice::open(&device).unwrap());
    let mut cache = Cache::open(device, options, workers).unwrap();
    if let Some(admission) = admission {
        let all = sizes.iter().sum();
        cache = cache.with_admission(&admission.parse().unwrap(), all).unwrap();
    }
    let cache = Arc::new(cache);
    let volumes = Arc::new(Volumes::default());
    for (i, size) in sizes.iter().enumerate() {
        let path = dir.path().join(format!("disk{i}"));
        File::create(&path).unwrap().set_len(*size).unwrap();
        let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
        let backing = backing::open(&uri, false, false, Patience::default()).unwrap();
        let volume = Volume::new(&format!("disk{i}"), backing, options.line_bytes, true);
        cache.attach(&volumes.add(volume).unwrap()).unwrap();
    }
    let listen = vec![Listen::Unix(dir.path().join("socket"))];
    let config = ServerConfig { listen, threads: workers, ..ServerConfig::default() };
    let server = Server::start(config, volumes, |worker, registry, token| {
        CacheService::new(cache.clone(), worker, registry, token, RingChoice::Auto)
    });
    Bench { dir, cache: cache.clone(), server: server.unwrap() }
}

impl Bench {
    fn disk(&self, volume: usize) -> PathBuf {
        self.dir.path().join(format!("disk{volume}"))
    }

    fn client(&self, volume: usize) -> Box<dyn Backing> {
        let socket = self.dir.path().join("socket");
        let uri = format!("nbd+unix:///disk{volume}?socket={}", socket.display());
        backing::open(&uri.parse().unwrap(), false, false, Patience::default()).unwrap()
    }
}

fn read(offset: u64, len: usize) -> Op {
    Op::Read { offset, buf: AlignedBuf::zeroed(len) }
}

fn write(offset: u64, len: usize, fill: u8) -> Op {
    let mut buf = AlignedBuf::zeroed(len);
    buf.fill(fill);
    Op::Write { offset, data: Payload::new(buf), fua: false }
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
    let modes = [WriteMode::HddSsd, WriteMode::HddUpd, WriteMode::HddInv];
    let shapes = [(4096, 1), (4096, 8), (16384, 4)];
    for (i, write) in modes.into_iter().enumerate() {
        let (line_bytes, ways) = shapes[i];
        let options = CacheOptions { line_bytes, ways, write, ..CacheOptions::default() };
        // The least that it can be: one set of each shard, and the volume does not end with a line.
        let set = u64::from(line_bytes * ways * GROUP_LINES);
        let size = 1_000_000 + 512;
        let bench = bench(&[size, size], DATA_START + 8 * set, options, 2);
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
        let stats = bench.cache.stats();
        assert!(stats.read_lines > 100 && stats.fills > 50 && stats.read_hits > 0, "{stats:?}");
        assert_eq!((stats.corrupt, stats.flash_errors, stats.backing_errors), (0, 0, 0));
    }
}

/// The second read comes from flash: the store may be changed behind the cache's back without being seen.
#[test]
fn hits_come_from_the_cache_device() {
    let bench = bench(&[8 << 20], 64 << 20, CacheOptions::default(), 1);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, write(0, 1 << 20, 5)).outcome.unwrap();
    one(&mut *session, read(2 << 20, 1 << 20)).outcome.unwrap();
    // Fills happen behind the answer.
    let end = Instant::now() + Duration::from_secs(20);
    while bench.cache.stats().fills < 512 {
        assert!(Instant::now() < end, "{:?}", bench.cache.stats());
        std::thread::sleep(Duration::from_millis(10));
    }
    let disk = File::options().write(true).open(bench.disk(0)).unwrap();
    disk.write_all_at(&vec![9; 4 << 20], 0).unwrap();
    assert!(bytes(one(&mut *session, read(0, 1 << 20))).iter().all(|&b| b == 5));
    assert!(bytes(one(&mut *session, read(2 << 20, 1 << 20))).iter().all(|&b| b == 0));
    assert!(bytes(one(&mut *session, read(1 << 20, 1 << 20))).iter().all(|&b| b == 9));
    assert_eq!(bench.cache.stats().read_hits, 512);
    // Rot on the cache device: noticed, and read from the store.
    let flash = File::options().write(true).open(bench.dir.path().join("cache")).unwrap();
    let junk = vec![0xee; 1 << 20];
    for at in (0..63).map(|i| DATA_START + (i << 20)) {
        flash.write_all_at(&junk, at).unwrap();
    }
    assert!(bytes(one(&mut *session, read(0, 1 << 20))).iter().all(|&b| b == 9));
    assert_eq!(bench.cache.stats().corrupt, 256);
}

/// Each policy, over operations whose answers must be right whatever it says; and a stream is not cached.
#[test]
fn admission() {
    for policy in ["all", "seqr", "sseqr", "touch_count", "seqr+tc", "sseqr+tc", "two_lbs"] {
        let options = CacheOptions { ways: 2, ..CacheOptions::default() };
        let cache_bytes = DATA_START + 16 * 2 * 16 * 4096;
        let bench = bench_with(&[4 << 20], cache_bytes, options, 2, Some(policy));
        let client = bench.client(0);
        let mut session = client.session().unwrap();
        let model = against_a_model(&mut *session, 4 << 20, 7, 20);
        for at in (0..4 << 20).step_by(1 << 18) {
            let buf = bytes(one(&mut *session, read(at, 1 << 18)));
            assert!(buf[..] == model[at as usize..][..1 << 18], "{policy}");
        }
    }
    let bench = bench_with(&[64 << 20], 128 << 20, CacheOptions::default(), 1, Some("seqr"));
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
    let end = Instant::now() + Duration::from_secs(20);
    while bench.cache.stats().fills < 400 {
        assert!(Instant::now() < end, "{:?}", bench.cache.stats());
        std::thread::sleep(Duration::from_millis(10));
    }
    let stats = bench.cache.stats();
    assert!(stats.fill_rejected > 6000 && stats.fills < 2500, "{stats:?}");
}

/// A trim or zeroes of far more than a group: quick, whole, and nothing of the old is ever read.
#[test]
fn large_ranges() {
    let bench = bench(&[64 << 20], 32 << 20, CacheOptions::default(), 2);
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
    let options = CacheOptions { ways: 1, ..CacheOptions::default() };
    let bench = bench(&[1 << 20], DATA_START + 8 * 16 * 4096, options, 3);
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
    let stats = bench.cache.stats();
    assert!(stats.read_hits > 0 && stats.waited > 0, "{stats:?}");
}

/// A cache device that fails: clients see nothing of it.
#[test]
fn a_cache_device_that_is_cut_off() {
    let bench = bench(&[8 << 20], 64 << 20, CacheOptions::default(), 1);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    let model = against_a_model(&mut *session, 8 << 20, 3, 5);
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
    assert!(bench.cache.stats().flash_errors > 0);
}

#[test]
fn what_cannot_be_opened() {
    let dir = TempDir::new().unwrap();
    let device = DeviceOptions::new(dir.path().join("cache")).size(ByteSize(2 << 20));
    let device = Arc::new(FlashDevice::open(&device).unwrap());
    let open = |change: fn(&mut CacheOptions)| {
        let mut options = CacheOptions::default();
        change(&mut options);
        Cache::open(device.clone(), options, 1).unwrap_err().to_string()
    };
    assert!(open(|o| o.line_bytes = 5000).contains("lines of 5000"));
    assert!(open(|o| o.line_bytes = 1 << 20).contains("lines of 1048576"));
    assert!(open(|o| o.ways = 17).contains("ways of 17"));
    assert!(open(|o| o.ways = 0).contains("ways of 0"));
    assert!(open(|_| ()).contains("give it more"));
}

/// The server stops with requests under way, and answers them.
#[test]
fn a_stop_answers_what_is_under_way() {
    let bench = bench(&[8 << 20], 64 << 20, CacheOptions::default(), 2);
    let client = bench.client(0);
    let mut session = client.session().unwrap();
    one(&mut *session, read(0, 512)).outcome.unwrap();
    // So little that the socket takes all of it at once.
    for i in 0..16 {
        session.submit(i, write(i * 4096, 4096, 1));
    }
    session.flush(Instant::now());
    std::thread::sleep(Duration::from_millis(50));
    bench.server.stop();
    let disk = std::fs::read(bench.dir.path().join("disk0")).unwrap();
    assert!(disk[..16 * 4096].iter().all(|&b| b == 1));
}
