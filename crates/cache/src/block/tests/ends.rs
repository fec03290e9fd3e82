//! Volumes that end anywhere, with a cache or after it was given up: who writes to the same pages at once loses nothing.

use super::*;
use larder_volume::Session;
use larder_volume::op::Failure;

/// A volume that ends in a line of 64 KiB.
const WHOLE: u64 = 16 << 20;
const TAIL: usize = 12_288;
/// Of that a write that no direct transfer takes.
const SHORT: usize = 11_776;

fn uneven() -> Bench {
    let shape = Shape { line: 65_536, workers: 2, direct: true, ..SHAPE };
    bench(&[WHOLE + TAIL as u64], 256 << 20, shape)
}

fn submit(session: &mut dyn Session, op: Op) {
    session.submit(1, op);
    session.flush(Instant::now());
}

/// Two connections write `TAIL` and `SHORT` bytes at `at` at once, make them durable, and look.
fn collide(client: &dyn Backing, at: u64) {
    let mut sessions: Vec<_> = (0..2).map(|_| client.session().unwrap()).collect();
    for round in 0..400u64 {
        let long = 1 + (round % 127) as u8;
        let order = if round.is_multiple_of(2) { [0, 1] } else { [1, 0] };
        for who in order {
            let op = match who {
                0 => write(at, TAIL, long),
                _ => write(at, SHORT, long + 128),
            };
            submit(&mut *sessions[who], op);
        }
        for session in &mut sessions {
            let done = run(&mut **session, 1).pop().unwrap();
            assert_eq!(done.outcome, Ok(Vec::new()), "round {round}: a write");
            let flushed: Result<_, Failure> = one(&mut **session, Op::Flush).outcome;
            assert_eq!(flushed, Ok(Vec::new()), "round {round}: a flush");
        }
        let found = bytes(one(&mut *sessions[0], read(at, TAIL)));
        let own = found[SHORT..].iter().all(|&b| b == long);
        assert!(own, "round {round}: bytes that one of them wrote alone are {}", found[TAIL - 1]);
        let either = found[..SHORT].iter().all(|&b| b == long || b == long + 128);
        assert!(either, "round {round}: bytes that nobody wrote");
    }
}

#[test]
fn two_that_write_past_the_last_whole_line_lose_nothing() {
    let bench = uneven();
    collide(&*bench.client(0), WHOLE);
    assert_eq!(bench.engine().backing_errors, 0);
    // They waited for one another in a shard, as anywhere else.
    assert!(bench.engine().waited > 0, "{:?}", bench.engine());
}

pub(super) fn give_up(cache: &Core) {
    cache.leave_for_log(|inbox| inbox.give_up(cache.now(), "a test".into()));
    let end = Instant::now() + Duration::from_secs(120);
    while cache.is_enabled() {
        assert!(Instant::now() < end, "it is still used");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A volume `disk1` of so many bytes, which is exported.
fn late(bench: &Bench, bytes: u64) -> Arc<Volume> {
    let path = bench.dir.path().join("late");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    // Whoever had it a moment ago may be about to let go of it.
    let end = Instant::now() + Duration::from_secs(120);
    let backing = loop {
        match backing::open(&uri, false, true, backing::Timeouts::default()) {
            Ok(backing) => break backing,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let volumes = bench.server.as_ref().unwrap().volumes();
    volumes.add(Volume::new("disk1", backing, 65_536, true)).unwrap()
}

#[test]
fn two_that_write_to_a_volume_attached_after_the_cache_was_given_up_lose_nothing() {
    let bench = uneven();
    give_up(&bench.cache);
    collide(&*bench.client(0), WHOLE);
    // One that comes now.
    let volume = late(&bench, WHOLE + TAIL as u64);
    let cached = bench.cache.attach(&volume, false).unwrap();
    assert!(cached.unwrap_err().contains("given up"));
    let before = bench.engine().waited;
    let client = bench.client(1);
    collide(&*client, 4096);
    collide(&*client, WHOLE);
    assert!(bench.engine().waited > before, "changes of it wait for one another");
    drop(client);
    // And it goes as any other.
    let gone = bench.cache.detach("disk1", true, &mut |_| true).unwrap();
    assert!(gone.is_some());
}

/// It has no place in the line space, and its changes do not wait for one another there: the store's own order is enough.
#[test]
fn two_that_write_to_a_volume_that_has_no_place_in_a_cache_that_was_given_up_lose_nothing() {
    let bench = uneven();
    let volume = late(&bench, 2 * WHOLE + TAIL as u64);
    bench.cache.attach(&volume, false).unwrap().unwrap_err();
    give_up(&bench.cache);
    let volumes = bench.server.as_ref().unwrap().volumes().clone();
    volumes.remove("disk1");
    assert!(bench.cache.detach("disk1", true, &mut |_| true).unwrap().is_some());
    drop(volume);
    // Smaller than it was: with a cache it would be refused.
    let volume = late(&bench, WHOLE + TAIL as u64);
    let cached = bench.cache.attach(&volume, false).unwrap();
    assert!(cached.unwrap_err().contains("given up"));
    assert!(bench.cache.volume("disk1").is_none(), "it has a place");
    let client = bench.client(1);
    collide(&*client, 4096);
    collide(&*client, WHOLE);
}

/// A program that has no cache at all.
#[test]
fn two_that_write_where_there_is_no_cache_lose_nothing() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk");
    File::create(&path).unwrap().set_len(WHOLE + TAIL as u64).unwrap();
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    let options = OpenOptions { direct: true, ..OpenOptions::default() };
    let backing = backing::open_with(&uri, &options).unwrap();
    let volumes = Arc::new(Volumes::default());
    volumes.add(Volume::new("disk", backing, 65_536, false)).unwrap();
    let server = Served::start(volumes, 2, crate::block::service::pass_through);
    let client = server.client("disk");
    collide(&*client, 4096);
    collide(&*client, WHOLE);
    drop(client);
    server.stop();
}

struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Its device fails once more, and the log's thread has not heard of that when it takes the cache back.
#[test]
fn a_cache_that_is_taken_back_is_not_given_up_for_what_was_before() {
    let bench = bench(&[8 << 20], 32 << 20, SHAPE);
    give_up(&bench.cache);
    let taken_back = bench.cache.on_log(|log| {
        let cache = log.cache().clone();
        locked(&cache.log_inbox).mail.give_up(cache.now(), "it failed before".into());
        takeback::take_back(log, None)
    });
    taken_back.unwrap().unwrap();
    // It has had another turn.
    bench.cache.on_log(|_| ()).unwrap();
    assert!(bench.cache.is_enabled(), "{:?}", bench.cache.why_given_up());
}

/// It is given up and taken back again and again while a client writes and reads: what was changed past it is never answered as
/// it was before, then and after a start from memory and from the device.
#[test]
fn a_cache_that_was_given_up_is_taken_back() {
    for ways in [8, FULL] {
        let mut bench = bench(&[8 << 20], 32 << 20, Shape { ways, ..SHAPE });
        let refused = bench.cache.take_back().unwrap_err().to_string();
        assert!(refused.contains("it is in use"), "{refused}");
        let marker =
            bench.dir.path().join("state").join(format!("given-up-{}", bench.cache.uuid()));
        let client = bench.client(0);
        let done = AtomicBool::new(false);
        let seen = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut session, mut rng) = (client.session().unwrap(), Rng::new(7));
                let mut versions = vec![0u8; 256];
                while !done.load(Ordering::SeqCst) {
                    let place = rng.below(256) as usize;
                    let (at, wanted) = (place as u64 * 20_000, versions[place]);
                    let found = bytes(one(&mut *session, read(at, 9_000)));
                    assert!(found.iter().all(|&b| b == wanted), "{place}: {}", found[0]);
                    if rng.chance(0.5) {
                        versions[place] = rng.range(1, 256) as u8;
                        one(&mut *session, write(at, 9_000, versions[place])).outcome.unwrap();
                    }
                    seen.fetch_add(1, Ordering::SeqCst);
                }
            });
            // A test that fails ends.
            let _ends = Ends(&done);
            let pass = |steps| {
                let until = seen.load(Ordering::SeqCst) + steps;
                let end = Instant::now() + Duration::from_secs(120);
                while seen.load(Ordering::SeqCst) < until && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(2));
                }
            };
            for _ in 0..4 {
                pass(200);
                give_up(&bench.cache);
                assert!(marker.exists());
                pass(100);
                // A busy disk may take longer than clients are to wait: then it is asked again.
                let end = Instant::now() + Duration::from_secs(120);
                while let Err(error) = bench.cache.take_back() {
                    println!("{error}");
                    assert!(Instant::now() < end, "{error}");
                }
                assert!(bench.cache.is_enabled() && !marker.exists());
                assert_eq!(bench.cache.why_given_up(), None);
            }
            pass(300);
            done.store(true, Ordering::SeqCst);
        });
        bench.settle();
        assert!(bench.cache.count_lines() > 0, "it is used again");
        let whole = std::fs::read(bench.disk(0)).unwrap();
        let check = |bench: &Bench| {
            let client = bench.client(0);
            let mut session = client.session().unwrap();
            for _ in 0..2 {
                for at in (0..whole.len()).step_by(1 << 20) {
                    let found = bytes(one(&mut *session, read(at as u64, 1 << 20)));
                    assert!(found[..] == whole[at..at + (1 << 20)], "{at}");
                }
            }
        };
        check(&bench);
        drop(client);
        let warmth;
        (bench, warmth) = bench.restart();
        assert!(matches!(warmth, Warmth::Log(_)), "{warmth:?}");
        check(&bench);
    }
}
