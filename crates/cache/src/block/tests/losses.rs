//! A store that forgets what was not flushed, below several clients, with a cache and without: every client that was there hears
//! of it once, and nobody who has heard finds again what is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard};

use rustix::event::{EventfdFlags, eventfd};

use super::hanging::{Hanging, State};
use super::*;
use crate::block::Cache;
use crate::block::back::{BackConfig, BackWish, MarkerAt};
use crate::block::service::pass_through;
use larder_volume::op::Outcome;
use larder_volume::{BackingError, Capabilities, Flushing, Identity, Session};

const LINE: usize = 4096;
const LINES: u64 = 64;

/// What the store has, by line: the byte that it is full of.
#[derive(Debug, Default)]
struct Lines {
    live: BTreeMap<u64, u8>,
    /// Changed and not flushed: what was there before.
    owed: BTreeMap<u64, u8>,
    losses: u64,
}

impl Lines {
    fn get(&self, line: u64) -> u8 {
        self.live.get(&line).copied().unwrap_or(0)
    }

    /// Some of what is owed is gone.
    fn forget(&mut self, rng: &mut Rng) -> bool {
        let owed = std::mem::take(&mut self.owed);
        let lost = !owed.is_empty();
        for (line, before) in owed {
            if rng.chance(0.7) {
                self.live.insert(line, before);
            }
        }
        self.losses += u64::from(lost);
        lost
    }
}

#[derive(Debug)]
struct Forgetful(Arc<Mutex<Lines>>);

impl Backing for Forgetful {
    fn uri(&self) -> &str {
        "nbd://forgetful"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            size: LINES * LINE as u64,
            read_only: false,
            trim: false,
            fast_zero: false,
            status: false,
            flush: Flushing::Offered,
            minimum: 1,
            maximum: 1 << 20,
        }
    }
    fn identity(&self) -> Result<Identity, BackingError> {
        Ok(Identity::Blind { name: self.uri().into(), size: self.capabilities().size })
    }
    fn resize(&self, _: Option<u64>) -> Result<u64, BackingError> {
        Ok(self.capabilities().size)
    }
    fn losses(&self) -> u64 {
        locked(&self.0).losses
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Ok(Box::new(AtOnce { lines: self.0.clone(), ended: Vec::new(), event }))
    }
}

/// Does everything at once; whole lines alone.
struct AtOnce {
    lines: Arc<Mutex<Lines>>,
    ended: Vec<Done>,
    event: OwnedFd,
}

impl Session for AtOnce {
    fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
    fn submit(&mut self, token: u64, mut op: Op) {
        let mut lines = locked(&self.lines);
        match &mut op {
            Op::Read { offset, buf } => {
                assert!(offset.is_multiple_of(LINE as u64));
                for (line, part) in (*offset / LINE as u64..).zip(buf.chunks_mut(LINE)) {
                    part.fill(lines.get(line));
                }
            }
            Op::Write { offset, data, fua } => {
                assert!(offset.is_multiple_of(LINE as u64));
                for (line, part) in (*offset / LINE as u64..).zip(data.chunks(LINE)) {
                    let before = lines.get(line);
                    lines.live.insert(line, part[0]);
                    if *fua {
                        lines.owed.remove(&line);
                    } else {
                        lines.owed.entry(line).or_insert(before);
                    }
                }
            }
            Op::Flush => lines.owed.clear(),
            other => panic!("{other:?}"),
        }
        drop(lines);
        self.ended.push(Done { token, op, outcome: Ok(Vec::new()) });
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }
    fn flush(&mut self, _: Instant) {}
    fn turn(&mut self, _: Instant) {}
    fn pop(&mut self) -> Option<Done> {
        self.ended.pop()
    }
    fn in_flight(&self) -> usize {
        self.ended.len()
    }
}

/// A connection, and whether it is to hear of a loss.
struct Someone {
    session: Box<dyn Session>,
    due: bool,
}

struct World {
    lines: Arc<Mutex<Lines>>,
    client: Box<dyn Backing>,
    rng: Rng,
    clients: Vec<Someone>,
    /// What a line may be read as: what the store has, and what it has lost as long as nobody has heard of that.
    may: BTreeMap<u64, BTreeSet<u8>>,
    fill: u8,
    told: u32,
}

impl World {
    fn store(&self) -> MutexGuard<'_, Lines> {
        locked(&self.lines)
    }

    fn connect(&mut self) {
        let mut session = self.client.session().unwrap();
        // It is there once it has been answered.
        one(&mut *session, read(0, LINE)).outcome.unwrap();
        self.clients.push(Someone { session, due: false });
    }

    /// Something that is to be durable has ended: a client that was there at a loss hears of it.
    fn heard(&mut self, who: usize, outcome: &Outcome) {
        assert_eq!(outcome.is_err(), self.clients[who].due, "client {who}: {outcome:?}");
        if std::mem::take(&mut self.clients[who].due) {
            self.told += 1;
            let lines = self.lines.clone();
            let lines = locked(&lines);
            self.may.iter_mut().for_each(|(line, may)| *may = [lines.get(*line)].into());
        }
    }

    fn step(&mut self) {
        let who = self.rng.below(self.clients.len() as u64) as usize;
        let line = self.rng.below(LINES);
        let at = line * LINE as u64;
        match self.rng.below(100) {
            0..40 => {
                self.fill = self.fill.wrapping_add(1).max(1);
                let fua = self.rng.chance(0.2);
                let Op::Write { offset, data, .. } = write(at, LINE, self.fill) else { return };
                let op = Op::Write { offset, data, fua };
                let outcome = one(&mut *self.clients[who].session, op).outcome;
                // (It is there all the same.)
                self.may.insert(line, [self.fill].into());
                match fua {
                    true => self.heard(who, &outcome),
                    false => assert!(outcome.is_ok(), "{outcome:?}"),
                }
            }
            40..80 => {
                let bytes = bytes(one(&mut *self.clients[who].session, read(at, LINE)));
                let may = self.may.entry(line).or_insert_with(|| [0].into());
                assert!(
                    may.contains(&bytes[0]) && bytes.iter().all(|&b| b == bytes[0]),
                    "line {line} is {}, not of {may:?}",
                    bytes[0]
                );
            }
            80..88 => {
                let outcome = one(&mut *self.clients[who].session, Op::Flush).outcome;
                self.heard(who, &outcome);
            }
            88..94 => {
                let lines = self.lines.clone();
                let mut lines = locked(&lines);
                if lines.forget(&mut self.rng) {
                    self.clients.iter_mut().for_each(|client| client.due = true);
                    for (line, may) in &mut self.may {
                        may.insert(lines.get(*line));
                    }
                }
            }
            94..97 if self.clients.len() < 5 => self.connect(),
            97..99 if self.clients.len() > 1 => drop(self.clients.swap_remove(who)),
            _ => {}
        }
    }
}

/// `workers` fewer than clients: some share a worker, and its session.
fn run_world(seed: u64, ways: Option<u32>, write: WriteMode, workers: usize) -> u32 {
    let lines = Arc::new(Mutex::new(Lines::default()));
    let volumes = Arc::new(Volumes::default());
    let cached = ways.is_some();
    let volume = Volume::new("disk0", Box::new(Forgetful(lines.clone())), LINE as u32, cached);
    volumes.add(volume).unwrap();
    let dir = Arc::new(TempDir::new().unwrap());
    let (mut bench, mut plain) = (None, None);
    match ways {
        Some(ways) => {
            let shape = Shape { ways, workers, write, ..SHAPE };
            let mut key = [0u8; 32];
            Rng::new(seed ^ u64::from(std::process::id()) << 32).fill(&mut key);
            key[..8].copy_from_slice(&(Arc::as_ptr(&dir) as u64).to_le_bytes());
            open::format(&format_config(&dir, shape, 64 << 20), key, UnixSecs(1)).unwrap();
            bench = Some(serve(dir.clone(), shape, volumes).unwrap());
        }
        None => {
            plain = Some(Served::start(volumes, workers, pass_through));
        }
    }
    let (rng, may) = (Rng::new(seed), BTreeMap::new());
    let client = match (&bench, &plain) {
        (Some(bench), _) => bench.client(0),
        (None, Some(plain)) => plain.client("disk0"),
        (None, None) => unreachable!(),
    };
    let mut world = World { lines, client, rng, clients: Vec::new(), may, fill: 0, told: 0 };
    (0..3).for_each(|_| world.connect());
    for _ in 0..300 {
        world.step();
    }
    assert!(world.store().losses > 3);
    if let Some(bench) = &bench {
        let engine = bench.engine();
        assert!(engine.read_hits > 0 && engine.dropped > 0, "{engine:?}");
    }
    drop((world.clients, bench, plain));
    world.told
}

#[test]
fn every_client_hears_of_a_loss_once_and_finds_nothing_of_it() {
    let cases = [
        (Some(8), WriteMode::WriteThrough, 2),
        (Some(8), WriteMode::WriteThrough, 1),
        (Some(FULL), WriteMode::WriteUpdate, 2),
        (Some(SPARSE), WriteMode::WriteThrough, 2),
        (Some(SPARSE), WriteMode::WriteAround, 1),
        (None, WriteMode::WriteThrough, 2),
        (None, WriteMode::WriteThrough, 1),
    ];
    for (seed, (ways, write, workers)) in (0..).zip(cases) {
        let told = run_world(seed, ways, write, workers);
        assert!(told > 10, "{told}");
    }
}

/// What is in the write log comes to the store again, so that no client lost it, whatever the volume does later.
#[test]
fn what_a_store_lost_under_write_back_no_client_hears_of_and_what_it_lost_before_or_behind_every_client_does()
 {
    let dir = TempDir::new().unwrap();
    let state = Arc::new(State::default());
    let lose = || state.losses.fetch_add(1, Ordering::SeqCst);
    let marker = MarkerAt::At(format!("file:{}", dir.path().join("marker").display()));
    let builder = Cache::builder(dir.path().join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.path().join("state"));
    let builder = builder.threads(2).volume_over("disk", Box::new(Hanging(state.clone())));
    let back = BackConfig::default();
    let builder = builder.write_back("disk", back.clone()).marker("disk", marker.clone());
    let cache = builder.open().unwrap();
    let (disk, core) = (cache.volume("disk").unwrap(), cache.core());
    disk.write(0, vec![1; LINE]).wait().unwrap();
    assert!(core.destage("disk", &mut |_| true).unwrap());
    lose();
    disk.write(0, vec![2; LINE]).wait().unwrap();
    disk.flush().wait().unwrap();
    assert!(core.destage("disk", &mut |_| true).unwrap());
    disk.flush().wait().unwrap();
    let through = BackWish { marker: marker.clone(), ..BackWish::default() };
    assert!(core.change_over("disk", &through, &mut |_| true).unwrap());
    disk.flush().wait().unwrap();
    // What is written through is lost with the store.
    disk.write(0, vec![3; LINE]).wait().unwrap();
    lose();
    disk.flush().wait().unwrap_err();
    disk.flush().wait().unwrap();
    // It is told under write-back too.
    disk.write(0, vec![4; LINE]).wait().unwrap();
    lose();
    let wish = BackWish { back: Some(back), marker, ..BackWish::default() };
    let end = Instant::now() + Duration::from_secs(60);
    while let Err(why) = core.change_over("disk", &wish, &mut |_| true) {
        // Nothing is durable before what was lost is out of the cache.
        assert!(Instant::now() < end, "{why}");
        std::thread::sleep(Duration::from_millis(20));
    }
    disk.flush().wait().unwrap_err();
    disk.flush().wait().unwrap();
    lose();
    disk.flush().wait().unwrap();
    // One that the log has no more: its device fails.
    cache.core().faults.flushes.store(true, Ordering::SeqCst);
    disk.write(0, vec![5; LINE]).wait().unwrap();
    disk.flush().wait().unwrap();
    while core.back_status("disk").is_some() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
    disk.flush().wait().unwrap();
    lose();
    disk.flush().wait().unwrap_err();
}
