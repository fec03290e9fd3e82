//! The library's key-value cache on real files, and the simulator, request by request: what both were built from, every answer, every counter
//! with its reason, and every byte on flash are the same, while segments are written and reclaimed and classifiers are trained.
//!
//! The library has its locks, a flash file, a data directory and shared memory, but no threads: what is due is done before the next request.
//! The simulator has all bytes too, over a device in memory. Both are told the same times. That the simulator decides alike
//! without bytes is a test of its own (`leaving_bytes_out_changes_no_decision`); starts and stops are in the library's own lockstep with a node.
//!
//! What this cannot show: a cleaner that comes late, requests that meet in one fetch, a verification that ends behind the next write.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use larder_base::{AppId, ByteSize, Expiry, Nanos, Now, UnixSecs};
use larder_cache::kv::{CacheConfig, Core, Upkeep, open_without_threads};
use larder_engine::dram::Contents;
use larder_engine::kv::api::{
    Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request as Asked, Store,
    StoreMode, Tier,
};
use larder_engine::kv::node::defaults;
use larder_format::Geometry;
use larder_policy::admission::AdmissionConfig;
use larder_policy::application::{ApplicationsConfig, ApplicationsTable, Share};
use larder_policy::budget::WriteBudgetConfig;
use larder_runtime::Clock;
use larder_sim::kv::{self as sim, Drawn, EPOCH, HybridCache, Server, Sizes};
use larder_trace::{Op as TraceOp, Request, generate};

const SERVER: Server =
    Server { memory: 2 << 20, flash: 16 << 20, object: 2000, max_item: 64 << 10 };

#[derive(Default)]
struct Sink {
    hit: Option<Tier>,
    verifies: Vec<FlashRead>,
    wake: bool,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        if let Reply::Item(item) = reply {
            self.hit = Some(item.tier);
        }
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {
        self.wake = true;
    }
}

/// The library's cache, asked as the simulator asks its own.
struct Served {
    core: Arc<Core>,
    upkeep: Upkeep,
    flash: File,
    due: Nanos,
    now: Now,
}

impl Served {
    fn open(
        dir: &Path,
        admission: &AdmissionConfig,
        budget: &WriteBudgetConfig,
        applications: &ApplicationsConfig,
    ) -> Served {
        let config = CacheConfig {
            memory: SERVER.memory,
            max_item: SERVER.max_item,
            no_eviction: false,
            clock_max: 3,
            clock_mode: defaults::CLOCK_MODE,
            data_dir: dir.join("data"),
            flash: Some(dir.join("flash")),
            flash_size: Some(SERVER.flash),
            further: Vec::new(),
            flash_object_size: SERVER.object,
            format_flash: false,
            admission: admission.clone(),
            budget: budget.clone(),
            applications: applications.clone(),
            memory_file: None,
            record: None,
            capture: None,
            hurry: Default::default(),
        };
        let clock = Arc::new(Clock::start());
        let (core, _, upkeep) = open_without_threads(&config, &clock).unwrap();
        let flash = File::open(dir.join("flash")).unwrap();
        let now = Now { mono: Nanos::ZERO, wall: UnixSecs(EPOCH) };
        Served { core, upkeep, flash, due: Nanos::ZERO, now }
    }

    fn execute(&mut self, key: &[u8], app: AppId, op: Op<'_>) -> Option<Tier> {
        let core = &self.core;
        let request = Asked { key, hash: core.hash(key), app, op };
        let mut sink = Sink::default();
        let mut read: Option<(FlashRead, Vec<u8>)> = None;
        loop {
            let fetched = read.as_ref().map(|(read, bytes)| Fetched { read, bytes: Some(bytes) });
            match core.execute(self.now, &request, fetched, &mut sink) {
                Outcome::Done => break,
                Outcome::Read(next) => read = Some((next, core.read(&next).unwrap())),
            }
        }
        for read in &sink.verifies {
            core.verify(self.now, read, core.read(read).as_deref());
        }
        if sink.wake {
            core.wake_cleaner();
            self.due = self.upkeep.turn(self.now);
        }
        sink.hit
    }

    fn request(&mut self, r: &Request) -> Option<Tier> {
        let mono = r.time.unwrap();
        self.now = Now { mono, wall: UnixSecs(EPOCH + (mono.0 / 1_000_000_000) as u32) };
        let mut key = vec![0; r.key_bytes().clamp(8, 250) as usize];
        Contents::key(r.id, &mut key);
        let expiry = match r.ttl {
            0 => Expiry::NEVER,
            ttl => Expiry::at(UnixSecs(self.now.wall.0 + ttl)),
        };
        let value = vec![0; r.size as usize];
        let contents = Contents::zeros();
        let set = Op::Store(Store {
            mode: StoreMode::Set,
            value: if value.is_empty() { contents.value(0) } else { &value },
            flags: 0,
            expiry,
            compare_cas: None,
            new_cas: None,
            invalidate: false,
            vivify: None,
        });
        // As of a key with the application's name before the delimiter.
        let app = match r.app {
            0 => self.core.app(b"key"),
            app => self.core.app(format!("{}:key", name_of(app)).as_bytes()),
        };
        let mut hit = None;
        if r.op.is_read() {
            hit = self.execute(&key, app, Op::Get(Get::default()));
            if hit.is_none() {
                self.execute(&key, app, set);
            }
        } else if r.op.is_removal() {
            self.execute(&key, app, Op::Delete(Delete::default()));
        } else if r.op == TraceOp::Touch {
            self.execute(&key, app, Op::Touch(expiry));
        } else {
            self.execute(&key, app, set);
        }
        if mono >= self.due {
            self.due = self.upkeep.turn(self.now);
        }
        hit
    }

    fn segment(&self, geometry: &Geometry, segment: u16) -> Vec<u8> {
        let mut bytes = vec![0; geometry.segment_bytes() as usize];
        self.flash.read_exact_at(&mut bytes, geometry.offset(segment)).unwrap();
        bytes
    }
}

/// What the trace's third application is called; the others are called by their numbers.
const NAMED: (u32, &str) = (3, "web");

fn name_of(app: u32) -> String {
    if app == NAMED.0 { NAMED.1.to_owned() } else { app.to_string() }
}

/// Shares, and the applications of objects by turns.
type Apps<'a> = (&'a ApplicationsConfig, &'a [u32]);

/// Returns how many bytes of memory each application had, by name: the mean of the second half of the requests. (What it has at one moment
/// swings: a segment that was just written has no objects in memory.)
fn lockstep(
    policy: &str,
    budget: &WriteBudgetConfig,
    (applications, apps): Apps<'_>,
    requests: u64,
) -> BTreeMap<String, u64> {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let mut admission = AdmissionConfig::from_name(policy).unwrap();
    admission.flashiness.first_training_samples = 200;
    admission.write_rate.bytes_per_second = ByteSize(300_000);
    let mut served = Served::open(dir.path(), &admission, budget, applications);
    let config = sim::CacheConfig {
        sizes: Sizes::Server(SERVER),
        admission,
        budget: budget.clone(),
        applications: applications.clone(),
        names: [(NAMED.0, NAMED.1.to_owned())].into(),
        ..sim::CacheConfig::default()
    };
    let drawn = Drawn::by(served.core.setup());
    let mut simulated = HybridCache::with_bytes_of(&config, &drawn).unwrap();
    assert_eq!(served.core.setup(), simulated.setup(), "{policy}: built from the same");
    let geometry = larder_engine::kv::node::Plan::geometry(
        SERVER.memory,
        SERVER.flash,
        u64::from(SERVER.max_item),
    )
    .unwrap();

    let spec = format!(
        "zipf?objects=60000&requests={requests}&skew=0.8&value=400..6000&deletes=0.01&writes=0.05"
    );
    let mut rng = larder_base::Rng::new(9);
    let mut time = Nanos::ZERO;
    let mut hits = [0u64; 2];
    let (mut memory, mut moments) = (BTreeMap::<String, u64>::new(), 0);
    for (i, r) in generate::parse(&spec).unwrap().enumerate() {
        let mut r = r.unwrap();
        time = Nanos(time.0 + rng.below(4_000_000));
        r.time = Some(time);
        r.app = apps[(r.id % apps.len() as u64) as usize];
        r.ttl = if rng.chance(0.1) { 1 + rng.below(60) as u32 } else { 0 };
        if rng.chance(0.02) {
            r.op = TraceOp::Touch;
        }
        // Some that have an extent of their own on flash, and some that it does not take.
        r.size = match r.id % 89 {
            0 => 20_000,
            1 => 60_000,
            _ => r.size,
        };
        let (ours, theirs) = (served.request(&r), simulated.request(&r));
        let at = || format!("{policy}, request {i}: {r:?}");
        assert_eq!(ours, theirs, "{}", at());
        assert_eq!(served.due, simulated.due(), "{}", at());
        hits[0] += u64::from(ours == Some(Tier::Dram));
        hits[1] += u64::from(ours == Some(Tier::Flash));
        if i % 101 == 0 {
            let ours = format!("{:?}", served.core.totals(served.now));
            assert_eq!(ours, format!("{:?}", simulated.totals()), "{}", at());
            if i as u64 > requests / 2 {
                moments += 1;
                for (name, app) in simulated.applications() {
                    *memory.entry(name).or_default() += app.dram_bytes;
                }
            }
        }
        if i % 5_000 == 0 || i as u64 + 1 == requests {
            for segment in 1..=geometry.segments() {
                let (ours, theirs) =
                    (served.segment(&geometry, segment), simulated.segment(segment).unwrap());
                assert!(ours == theirs, "segment {segment} differs; {}", at());
            }
        }
    }
    let totals = simulated.totals();
    let log = totals.log.unwrap().stats;
    println!(
        "{policy}: {hits:?} hits, {} segments written, {} reclaimed, {} models",
        log.segments_written,
        log.segments_reclaimed,
        simulated.counters().models
    );
    // (Keys are hashed with a secret that the start draws: how many it is differs from run to run.)
    assert!(hits[0] > 500 && hits[1] > 100, "{policy}: {hits:?}");
    assert!(
        policy != "all" || !applications.shares.is_empty() || log.segments_reclaimed > 20,
        "{}",
        log.segments_reclaimed
    );
    // Of several applications each learns by itself, and later.
    let learns = policy.starts_with("flashiness") && apps.len() == 1;
    assert!(!learns || simulated.counters().models > 2, "{policy}: too few models");
    served.upkeep.close(served.now);
    memory.into_iter().map(|(name, sum)| (name, sum / moments)).collect()
}

#[test]
fn the_library_and_the_simulator_decide_and_write_the_same() {
    let free = WriteBudgetConfig::default();
    for policy in [
        "flashiness",
        "flashiness_paper",
        "expected_reads",
        "ghost",
        "reject_first",
        "probability",
        "write_rate",
        "all",
    ] {
        lockstep(policy, &free, (&ApplicationsConfig::default(), &[0]), 60_000);
    }
}

/// Applications with floors and ceilings get what the library gives them: the comparison is of every counter of each.
#[test]
fn they_give_applications_the_same_shares() {
    let free = WriteBudgetConfig::default();
    let share = |floor, ceiling| Share { floor, ceiling };
    let table = |shares: &[(&str, Share)]| {
        let shares = shares.iter().map(|(name, share)| ((*name).to_owned(), *share)).collect();
        ApplicationsTable { shares }.resolve(b':').unwrap()
    };
    for policy in ["flashiness", "all"] {
        let stated = table(&[("1", share(0.5, 1.0)), ("web", share(0.0, 0.2))]);
        let apps = [0, 1, 2, 3, 3, 3];
        let with = lockstep(policy, &free, (&stated, &apps), 40_000);
        let without = lockstep(policy, &free, (&table(&[]), &apps), 40_000);
        println!("with shares {with:?}, without {without:?}");
        assert!(with["1"] > without["1"], "{with:?} {without:?}");
        assert!(with["web"] < without["web"], "{with:?} {without:?}");
        let names: Vec<&str> = with.keys().map(String::as_str).collect();
        assert_eq!(names, ["1", "2", "default", "web"]);
    }
}

#[test]
fn they_do_so_under_a_write_budget() {
    // About 20 KB/s: what a minute of these requests wants is several times that.
    let years = 5.0;
    let tbw = (20_000.0 * years * 365.25 * 86_400.0) as u64;
    let budget = WriteBudgetConfig {
        tbw: Some(ByteSize(tbw)),
        years,
        burst_hours: 0.01,
        first_fill: false,
        ..WriteBudgetConfig::default()
    };
    for policy in ["flashiness", "reject_first"] {
        lockstep(policy, &budget, (&ApplicationsConfig::default(), &[0]), 40_000);
    }
}
