//! The key-value node's locks under every schedule that a scheduler can think of: two threads that ask and one that maintains, over
//! two shards and flash.
//!
//! No schedule may lose a wake-up, end in a deadlock, or show a value older than one that was seen before.

use std::sync::Arc;

use larder_base::lock::{Lock, LockKind, Rank, SharedLock};
use larder_base::{Expiry, Nanos, Now, UnixSecs};
use larder_engine::kv::api::{
    Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::node::{Maintenance, MaintenanceEffects, Node, StateIo, Turn};
use larder_engine::kv::record::{AppsSetup, LogSetup, RunSetup, ShardSeed, ShardSetup};
use larder_engine::kv::{IoFailed, SegmentIo};
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};
use larder_policy::learn::TrainingSet;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use shuttle::{Config, Runner, thread};

const SHARDS: usize = 2;
const SEGMENTS: u16 = 6;
const SEGMENT: u32 = 16 << 10;
/// Sets by each thread.
const SETS: u64 = 100;
/// Keys that each thread writes; it reads the other's, too.
const KEYS: u64 = 48;
const NOW: Now = Now { mono: Nanos::from_secs(1), wall: UnixSecs(1_000_000) };

/// Locks at which the scheduler may let another thread run.
struct Explore;

struct ExploredLock<T>(Mutex<T>);
struct ExploredShared<T>(RwLock<T>);

impl LockKind for Explore {
    type Lock<T> = ExploredLock<T>;
    type Shared<T> = ExploredShared<T>;
}

impl<T> Lock<T> for ExploredLock<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        Self: 'a;
    fn new(_: Rank, value: T) -> Self {
        ExploredLock(Mutex::new(value))
    }
    fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap()
    }
}

impl<T> SharedLock<T> for ExploredShared<T> {
    type Read<'a>
        = RwLockReadGuard<'a, T>
    where
        Self: 'a;
    type Write<'a>
        = RwLockWriteGuard<'a, T>
    where
        Self: 'a;
    fn new(_: Rank, value: T) -> Self {
        ExploredShared(RwLock::new(value))
    }
    fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap()
    }
    fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap()
    }
}

/// The device, which others read while maintenance writes.
#[derive(Clone)]
struct Disk(Arc<Vec<Mutex<Vec<u8>>>>);

impl Disk {
    fn new() -> Disk {
        let segment = |_| Mutex::new(vec![0; SEGMENT as usize]);
        Disk(Arc::new((0..=SEGMENTS).map(segment).collect()))
    }

    fn fetch(&self, read: &FlashRead) -> Vec<u8> {
        let (at, len) = (read.at.offset as usize, read.at.len as usize);
        let mut bytes = Vec::with_capacity(at + len);
        for segment in &self.0[usize::from(read.at.segment)..] {
            bytes.extend_from_slice(&segment.lock().unwrap());
            if bytes.len() >= at + len {
                break;
            }
        }
        bytes[at..at + len].to_vec()
    }
}

impl SegmentIo for Disk {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.0[usize::from(segment)].lock().unwrap().copy_from_slice(bytes);
        Ok(())
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        bytes.copy_from_slice(&self.0[usize::from(segment)].lock().unwrap());
        Ok(())
    }
}

impl StateIo for Disk {
    fn keep_names(&mut self, _: &[Vec<u8>]) -> bool {
        true
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

/// Trains nothing.
struct Untrained;

impl MaintenanceEffects for Untrained {
    fn train(&mut self, _: TrainingSet, _: u64) {}
}

/// As a host waits: woken under a lock, slept only after a look under the same.
#[derive(Default)]
struct Bell {
    state: Mutex<State>,
    changed: Condvar,
    rested: Condvar,
}

#[derive(Default)]
struct State {
    rung: bool,
    resting: bool,
    stop: bool,
}

fn maintain(
    node: &Node<Explore>,
    mut maintenance: Maintenance<Vec<u8>>,
    mut disk: Disk,
    bell: &Bell,
) {
    loop {
        {
            let mut state = bell.state.lock().unwrap();
            if state.stop {
                return;
            }
            if std::mem::take(&mut state.rung) {
                maintenance.wake();
            }
            state.resting = false;
        }
        let turn = maintenance.turn(NOW, node, &mut disk, &mut Untrained);
        if turn == Turn::Again {
            continue;
        }
        let mut state = bell.state.lock().unwrap();
        while !state.rung && !state.stop {
            state.resting = true;
            bell.rested.notify_all();
            // Without a time: a wake-up that is lost is a deadlock, or leaves a shard short of room.
            state = bell.changed.wait(state).unwrap();
        }
    }
}

#[derive(Default)]
struct Sink {
    found: Option<u64>,
    woken: bool,
    verifies: Vec<FlashRead>,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        if let Reply::Item(item) = reply {
            self.found = Some(u64::from_le_bytes(item.value[..8].try_into().unwrap()));
        }
        assert!(!matches!(reply, Reply::OutOfMemory));
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {
        self.woken = true;
    }
}

struct Client {
    node: Arc<Node<Explore>>,
    disk: Disk,
    bell: Arc<Bell>,
}

impl Client {
    /// Carries out one request; what a read has found.
    fn execute(&self, key: u64, op: Op<'_>) -> Option<u64> {
        let name = format!("app{}:{key}", key % 2).into_bytes();
        let (hash, app) = (self.node.hash(&name), self.node.app(&name));
        let request = Request { key: &name, hash, app, op };
        let (mut sink, mut read) = (Sink::default(), None::<(FlashRead, Vec<u8>)>);
        loop {
            let fetched = read.as_ref().map(|(read, bytes)| Fetched { read, bytes: Some(bytes) });
            match self.node.execute(NOW, &request, fetched, &mut sink) {
                Outcome::Done => break,
                Outcome::Read(next) => read = Some((next, self.disk.fetch(&next))),
            }
        }
        for read in std::mem::take(&mut sink.verifies) {
            let bytes = self.disk.fetch(&read);
            self.node.verify(NOW, &read, Some(&bytes));
        }
        if sink.woken {
            self.bell.state.lock().unwrap().rung = true;
            self.bell.changed.notify_one();
        }
        sink.found
    }

    /// Writes its own keys, ever newer versions, and reads all.
    fn run(&self, me: u64) {
        let mut seen = [0u64; 2 * KEYS as usize];
        for version in 1..=SETS {
            let own = version % KEYS * 2 + me;
            let mut value = vec![0; 1200];
            value[..8].copy_from_slice(&version.to_le_bytes());
            self.execute(
                own,
                Op::Store(Store {
                    mode: StoreMode::Set,
                    value: &value,
                    flags: 0,
                    expiry: Expiry::NEVER,
                    compare_cas: None,
                    new_cas: None,
                    invalidate: false,
                    vivify: None,
                }),
            );
            seen[own as usize] = version;
            if version % 7 == 3 {
                self.execute(own, Op::Delete(Delete::default()));
                // Nothing that was there is there again.
                seen[own as usize] = version + 1;
            }
            let other = (version * 5) % (2 * KEYS);
            if let Some(found) = self.execute(other, Op::Get(Get::default())) {
                let least = &mut seen[other as usize];
                assert!(found >= *least, "key {other}: version {found} after {least}");
                assert!(other % 2 != me || found == *least, "key {other}: not my latest");
                *least = found;
            }
        }
    }
}

fn setup() -> RunSetup {
    RunSetup {
        kv: RunSetup::VERSION,
        larder: String::new(),
        uuid: String::new(),
        hash_key: [9; 16],
        salt: 3,
        segments: SEGMENTS,
        segment_bytes: SEGMENT,
        drives: Vec::new(),
        shard: ShardSetup {
            arena_bytes: 32 << 10,
            max_object: 4 << 10,
            no_eviction: false,
            clock_increment: false,
            clock_max: 3,
            free_low: 8 << 10,
            free_high: 12 << 10,
            flash_min_record: 0,
            access_times: 16,
            buckets: 4,
            index_most: 0,
            admission_memory: 16 << 10,
            objects: 64,
            share_bits: 0.5f64.to_bits(),
            budget_rate_bits: None,
        },
        shards: (0..SHARDS as u64).map(|i| ShardSeed { cas_base: i << 40, seed: i }).collect(),
        admission: AdmissionConfig::from_name("all").unwrap(),
        applications: AppsSetup::default(),
        log: Some(LogSetup {
            hot_percent: 70,
            reinsert_percent: 20,
            retry_after: Nanos::from_secs(5).0,
            generation_floor: 0,
            budget: WriteBudgetConfig::default(),
            budget_state: None,
            budget_at: 0,
        }),
    }
}

fn scenario() {
    let setup = setup();
    let shards = (0..SHARDS).map(|i| setup.build_shard(i).unwrap());
    let node: Arc<Node<Explore>> = Arc::new(Node::new(&setup, None, shards).unwrap());
    let maintenance = Maintenance::new(&node, setup.build_log().unwrap(), 1, 0);
    let (disk, bell) = (Disk::new(), Arc::new(Bell::default()));
    let maintained = {
        let (node, disk, bell) = (node.clone(), disk.clone(), bell.clone());
        thread::spawn(move || maintain(&node, maintenance, disk, &bell))
    };
    let asking: Vec<_> = (0..2)
        .map(|me| {
            let client = Client { node: node.clone(), disk: disk.clone(), bell: bell.clone() };
            thread::spawn(move || client.run(me))
        })
        .collect();
    asking.into_iter().for_each(|thread| thread.join().unwrap());
    let mut state = bell.state.lock().unwrap();
    while state.rung || !state.resting {
        state = bell.rested.wait(state).unwrap();
    }
    drop(state);
    // Nobody rings any more: what shards have called for has been done.
    for shard in 0..SHARDS {
        assert!(!node.lock(shard).is_short(), "shard {shard} was not heard");
    }
    bell.state.lock().unwrap().stop = true;
    bell.changed.notify_all();
    maintained.join().unwrap();
    node.validate().unwrap();
    let all = node.totals(NOW.mono);
    assert!(all.log.unwrap().stats.segments_written > 0, "nothing came to flash");
}

fn explore(scheduler: impl Scheduler + 'static) {
    let mut config = Config::new();
    config.stack_size = 1 << 20;
    Runner::new(scheduler, config).run(scenario);
}

#[test]
fn no_schedule_loses_a_call_or_shows_an_old_value() {
    explore(RandomScheduler::new(150));
}

#[test]
fn nor_one_in_which_threads_overtake_each_other_seldom_and_far() {
    explore(PctScheduler::new(3, 150));
}
