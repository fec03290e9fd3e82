//! The library's block cache on real files, and the simulator, request by request: every answer, every counter with its reason, every time of the
//! next turn, and every byte on flash are the same, for each placement and way to write, with several volumes, selection, shares, a write budget,
//! read-ahead, trims, stores that fail, volumes that come, go, grow and are forgotten, and runs that end in good order or as by a kill.
//!
//! The library has its locks, a cache in a file, stores in files, a state directory and shared memory, but no threads: what is due is done before
//! the next request, and I/O on the thread that asks. The simulator has all bytes too, over a device in memory that takes no time. Both are told
//! the same times.
//!
//! What this cannot show: requests that meet on several threads, I/O that ends in another order than it was begun, the size of the log's batches
//! under load, a detector that comes late.

mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use larder_base::{ByteSize, Nanos, Rng, UnixSecs};
use larder_cache::block::back::{Age, BackConfig, Grain, MarkerAt, Order, Pace};
use larder_cache::block::open::{FormatConfig, format, open_by_hand};
use larder_cache::block::service::Command;
use larder_cache::block::{ByHand, CacheConfig, Core, RulesConfig, Running, Volume};
use larder_engine::block::map::Replacement;
use larder_engine::block::node::event::Op;
use larder_engine::block::{BlockStats, LogStats, WriteMode};
use larder_format::block::Placement;
use larder_policy::block::{BlockKind, EvictionBy, Rule, VictimPolicy};
use larder_policy::budget::WriteBudgetConfig;
use larder_runtime::AlignedBuf;
use larder_sim::block::{Block, GivenBlock, WritesBack};
use store::{Store, comer, known_by};
use tempfile::TempDir;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const STEPS: u32 = 240;
/// Of those that write back.
const LOG: ByteSize = ByteSize(64 * MIB);

/// A cache, as both are told of it.
#[derive(Clone)]
struct Case {
    flash: u64,
    line: u32,
    placement: Placement,
    write: WriteMode,
    replacement: &'static str,
    evict: &'static str,
    admission: &'static str,
    readahead: u64,
    /// By number of the volume.
    shares: Vec<(usize, &'static str)>,
    budget: WriteBudgetConfig,
    /// How volumes write back, but for the last one, which writes through.
    back: Option<WritesBack>,
}

const NAMES: [&str; 4] = ["a", "b", "c", "d"];
const SIZES: [u64; 4] = [18 * MIB, 2 * MIB + 512, 3 * MIB, MIB];

impl Case {
    fn new(placement: Placement, write: WriteMode) -> Case {
        Case {
            flash: 6 * MIB,
            line: 4096,
            placement,
            write,
            replacement: "lru",
            evict: "gc",
            admission: "all",
            readahead: 256 * KIB,
            shares: Vec::new(),
            budget: WriteBudgetConfig::default(),
            back: None,
        }
    }

    /// The names of volumes that write back.
    fn written_back(&self) -> &'static [&'static str] {
        if self.back.is_some() { &NAMES[..3] } else { &[] }
    }

    /// In the words of an experiment. What layout and lines are is the device's.
    fn spec(&self) -> Block {
        let write = match self.write {
            WriteMode::WriteThrough => "hdd-ssd",
            WriteMode::WriteUpdate => "hdd-upd",
            WriteMode::WriteAround => "hdd-inv",
        };
        let placement = match self.placement {
            Placement::Full => "full".to_owned(),
            Placement::Sparse(_) => "sparse".to_owned(),
            Placement::Sets(ways) => format!("set:{ways}"),
        };
        let shares = self.shares.iter().map(|(n, share)| format!("'{n}' = '{share}'"));
        let shares: Vec<String> = shares.collect();
        let text = format!(
            "flash = '{}'\nplacement = '{placement}'\nwrite = '{write}'\nreplacement = '{}'\nevict = '{}'\nadmission = '{}'\n\
             readahead = '{}'\nshares = {{ {} }}\nwrite_budget = {}\n",
            self.flash,
            self.replacement,
            self.evict,
            self.admission,
            self.readahead,
            shares.join(", "),
            toml::Value::try_from(&self.budget).unwrap(),
        );
        toml::from_str(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    fn config(&self, state_dir: PathBuf) -> CacheConfig {
        let mut config = CacheConfig::new(state_dir);
        config.write = self.write;
        config.replacement = self.replacement.parse::<Replacement>().unwrap();
        config.evict = self.evict.parse::<EvictionBy>().unwrap();
        config.reclaim = VictimPolicy::Fifo;
        config.admission = self.admission.parse().unwrap();
        config.readahead = ByteSize(self.readahead);
        config.trust_unchanged = true;
        let share = |(n, share): &(usize, &str)| (NAMES[*n].to_owned(), share.parse().unwrap());
        config.rules = RulesConfig {
            shares: self.shares.iter().map(share).collect(),
            budget: self.budget.clone(),
        };
        for name in self.written_back() {
            let back = self.back.map(|how| BackConfig {
                order: how.order,
                pace: how.pace,
                dirty_max: how.most.map(ByteSize),
                age: how.age,
            });
            config.back.extend(back.map(|back| ((*name).to_owned(), back)));
            config.markers.insert((*name).to_owned(), MarkerAt::Nowhere);
        }
        config
    }
}

/// What a request came to: whether it ended well, and what was read.
type Answer = (bool, Vec<u8>);

/// The library.
struct Library {
    case: Case,
    dir: TempDir,
    flash: File,
    running: Option<Running>,
    volumes: BTreeMap<String, Arc<Volume>>,
    /// How many operations of each store fail.
    fails: BTreeMap<String, Arc<AtomicU32>>,
    next: u64,
}

impl Library {
    fn new(case: &Case, seed: u64) -> Library {
        let dir = TempDir::new().unwrap();
        let config = FormatConfig {
            path: dir.path().join("cache"),
            size: Some(ByteSize(case.flash)),
            line: case.line,
            placement: case.placement,
            shards: 2,
            write_log: case.back.map(|_| LOG),
            yes: false,
            discard_dirty: false,
        };
        let mut key = [0u8; 32];
        Rng::new(seed).fill(&mut key);
        // Runs side by side: each device has a name of its own.
        key[..4].copy_from_slice(&std::process::id().to_le_bytes());
        format(&config, key, UnixSecs(1)).unwrap();
        for (name, size) in NAMES.iter().zip(SIZES) {
            File::create(dir.path().join(name)).unwrap().set_len(size).unwrap();
        }
        let flash = File::open(dir.path().join("cache")).unwrap();
        let volumes = BTreeMap::new();
        Library {
            case: case.clone(),
            dir,
            flash,
            running: None,
            volumes,
            fails: BTreeMap::new(),
            next: 0,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.flash.metadata().unwrap().len() as usize];
        self.flash.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn volume(&mut self, name: &str) -> Arc<Volume> {
        let fails = self.fails.entry(name.to_owned()).or_default().clone();
        let store = Store::open(&self.dir.path().join(name), name, fails);
        let volume = Arc::new(Volume::new(name, store, self.case.line, true));
        self.volumes.insert(name.to_owned(), volume.clone());
        volume
    }

    fn begin(&mut self, names: &[&str], random: u32) {
        self.volumes.clear();
        let volumes: Vec<_> = names.iter().map(|name| self.volume(name)).collect();
        let config = self.case.config(self.dir.path().join("state"));
        let by = ByHand::Given { now: Nanos::ZERO, random };
        let path = self.dir.path().join("cache");
        self.running = Some(open_by_hand(&path, config, &volumes, by).unwrap());
    }

    fn running(&self) -> &Running {
        self.running.as_ref().unwrap()
    }

    fn core(&self) -> &Arc<Core> {
        self.running().cache()
    }

    fn submit(&mut self, now: Nanos, name: &str, op: Op<Vec<u8>>) -> u64 {
        self.core().set_now(now);
        self.next += 1;
        let (volume, ticket) = (&self.volumes[name], self.next);
        let command = match op {
            Op::Read { at: offset, len } => {
                Command::Read { offset, buf: AlignedBuf::zeroed(len as usize) }
            }
            Op::Write { at: offset, bytes, fua, .. } => {
                let mut buf = AlignedBuf::zeroed(bytes.len());
                buf.copy_from_slice(&bytes);
                Command::Write { offset, buf, fua }
            }
            Op::Flush => Command::Flush,
            Op::Zero { at: offset, len, fua, may_punch, fast } => {
                Command::WriteZeroes { offset, len: len as u32, fua, may_punch, fast }
            }
            Op::Trim { at: offset, len, fua } => Command::Trim { offset, len: len as u32, fua },
            Op::Status { at: offset, len, one } => Command::Status { offset, len: len as u32, one },
            Op::Advise { at: offset, len } => Command::Advise { offset, len: len as u32 },
        };
        let core = self.core();
        core.with_lane(|lane| lane.submit(volume, ticket, command, BlockKind::Unknown)).unwrap();
        ticket
    }

    fn turn(&self, now: Nanos) -> Nanos {
        self.core().set_now(now);
        self.running().turn().unwrap()
    }

    fn answers(&self) -> Vec<(u64, Answer)> {
        let popped = self.core().with_lane(|lane| std::iter::from_fn(|| lane.pop()).collect());
        let popped: Vec<larder_cache::block::service::Answer> = popped.unwrap();
        let bytes = |buf: Option<AlignedBuf>| buf.map_or_else(Vec::new, |buf| buf.to_vec());
        popped.into_iter().map(|a| (a.ticket, (a.outcome.is_ok(), bytes(a.buf)))).collect()
    }
}

/// Both, and what volumes must have.
struct Lockstep {
    library: Library,
    spec: Block,
    given: Option<GivenBlock>,
    truth: BTreeMap<String, (Vec<u8>, bool)>,
    /// Volumes that are not even remembered.
    forgotten: BTreeSet<String>,
    /// Stores may fail.
    failing: bool,
    rng: Rng,
    now: Nanos,
    due: Nanos,
    met: BTreeMap<&'static str, u64>,
    /// What each had written when both began: the library has said on its device which volumes write back.
    begun: [LogStats; 2],
}

impl Lockstep {
    fn new(case: &Case, seed: u64) -> Lockstep {
        let mut library = Library::new(case, seed);
        let (spec, formatted) = (case.spec(), library.bytes());
        library.begin(&NAMES, 3);
        let comers: Vec<_> = NAMES.iter().zip(SIZES).map(|(n, bytes)| comer(n, bytes)).collect();
        let mut given = GivenBlock::new(&spec, formatted, &comers, 3).unwrap();
        if let Some(how) = case.back {
            for name in case.written_back() {
                given.write_back(Nanos::ZERO, name, how).unwrap();
            }
        }
        let begun = [library.core().stats().log, given.log_stats()];
        let truth = NAMES.iter().zip(SIZES);
        let truth = truth.map(|(n, bytes)| ((*n).to_owned(), (vec![0; bytes as usize], true)));
        let mut both = Lockstep {
            library,
            spec,
            given: Some(given),
            truth: truth.collect(),
            forgotten: BTreeSet::new(),
            failing: false,
            rng: Rng::new(seed),
            now: Nanos::ZERO,
            due: Nanos::ZERO,
            met: BTreeMap::new(),
            begun,
        };
        both.turn(Nanos::ZERO);
        both
    }

    fn given(&mut self) -> &mut GivenBlock {
        self.given.as_mut().unwrap()
    }

    fn meet(&mut self, what: &'static str, times: u64) {
        *self.met.entry(what).or_default() += times;
    }

    /// Both do what is due.
    fn turn(&mut self, now: Nanos) {
        self.now = now;
        self.due = self.library.turn(now);
        let due = self.given().turn(now);
        assert_eq!(self.due, due, "when something is due again after {now:?}");
    }

    /// Everything that can be looked at is the same; `bytes`: those on flash, too.
    fn same(&mut self, bytes: bool) {
        let (core, given) = (self.library.core().clone(), self.given.as_mut().unwrap());
        let stats = core.stats();
        assert_eq!(format!("{:?}", stats.engine), format!("{:?}", given.stats()));
        let [mine, theirs] = [stats.log, given.log_stats()];
        if self.library.case.back.is_none() {
            assert_eq!(format!("{mine:?}"), format!("{theirs:?}"));
            assert_eq!(stats.flash_bytes, given.flash_bytes());
        } else {
            let [mine, theirs] = [since(&mine, &self.begun[0]), since(&theirs, &self.begun[1])];
            assert_eq!(format!("{mine:?}"), format!("{theirs:?}"));
            let lines = |stats: &BlockStats| stats.flash_lines_written;
            let line = u64::from(self.library.case.line);
            let logged = stats.flash_bytes - lines(&stats.engine) * line - stats.log.bytes;
            assert_eq!(logged, given.written_back(), "bytes written to the write log");
        }
        assert_eq!(stats.regions_set, given.regions_set() as u64);
        assert_eq!(core.is_enabled(), given.is_enabled());
        let budget = stats.budget.rate.zip(stats.budget.available);
        assert_eq!(budget, given.budget());
        let names: Vec<String> = core.volumes().iter().map(|v| v.name.clone()).collect();
        assert_eq!(names, given.names());
        for name in names {
            let volume = core.volume(&name).unwrap();
            assert_eq!(volume.counters.counts(), given.counts(&name).unwrap(), "{name}");
            let verdicts = given.verdicts(&name).unwrap();
            assert_eq!(format!("{:?}", volume.verdicts()), format!("{verdicts:?}"), "{name}");
            assert_eq!(volume.lines(), given.lines(&name).unwrap(), "lines of {name}");
            assert_eq!(volume.bytes(), given.place(&name).unwrap().1, "{name}");
            let mine = core.back_status(&name).map(|back| back.status);
            assert_eq!(mine, given.back_status(&name).unwrap(), "{name}");
        }
        if !bytes {
            return;
        }
        let bytes = self.library.bytes();
        let theirs = given.flash();
        assert_eq!(bytes.len(), theirs.len());
        // (Of one with a write log the slots: which run it is, and when, the log's batches and the superblock say.)
        let superblock = given.superblock().unwrap();
        let slots = match superblock.write_log {
            Some(log) => superblock.layout.slot_at(0, 0) as usize..log.at as usize,
            None => 0..bytes.len(),
        };
        if bytes[slots.clone()] != theirs[slots.clone()] {
            let differs = |at: &usize| bytes[*at] != theirs[*at];
            let at = slots.clone().find(differs).unwrap();
            panic!("byte {at} on flash is {} and {}", bytes[at], theirs[at]);
        }
    }

    /// Time goes on, sometimes until something is due, sometimes far.
    fn wait(&mut self) {
        let on = match self.rng.below(20) {
            0 => 3_000_000_000,
            1..4 => self.due.saturating_sub(self.now).0,
            4..8 => self.rng.below(50_000_000),
            _ => self.rng.below(1_000_000),
        };
        self.turn(Nanos(self.now.0 + on));
    }

    fn range(&mut self, bytes: u64, part: u64, parts: u64) -> (u64, u64) {
        let (from, to) = (bytes * part / parts, bytes * (part + 1) / parts);
        // Some places are asked for more often.
        let span = if self.rng.chance(0.7) { (to - from).min(256 * KIB) } else { to - from };
        let unit = if self.rng.chance(0.1) { 1 } else { 512 };
        let at = from + self.rng.below(span - 1) / unit * unit;
        let most = if self.rng.chance(0.1) { 300 * KIB } else { 24 * KIB };
        let len = (1 + self.rng.below(most)).next_multiple_of(unit).min(to - at);
        (at, len)
    }

    fn operation(&mut self, name: &str, part: u64, parts: u64) -> (Op<Vec<u8>>, Option<Vec<u8>>) {
        let bytes = self.truth[name].0.len() as u64;
        let (at, len) = self.range(bytes, part, parts);
        let (first, end) = (at as usize, (at + len) as usize);
        let fua = self.rng.chance(0.1);
        let what = self.rng.below(20);
        let whole = parts == 1 && self.rng.chance(0.2);
        let mut written = vec![0; len as usize];
        self.rng.fill(&mut written);
        let truth = &mut self.truth.get_mut(name).unwrap().0;
        let op = match what {
            0..9 => return (Op::Read { at, len }, Some(truth[first..end].to_vec())),
            9..15 => {
                truth[first..end].copy_from_slice(&written);
                Op::Write { at, len, bytes: written, fua }
            }
            15 => {
                truth[first..end].fill(0);
                Op::Zero { at, len, fua, may_punch: true, fast: false }
            }
            16 if whole => {
                truth.fill(0);
                Op::Trim { at: 0, len: bytes, fua }
            }
            16 => {
                truth[first..end].fill(0);
                Op::Trim { at, len, fua }
            }
            17 => Op::Flush,
            18 => Op::Status { at, len, one: false },
            _ => Op::Advise { at, len },
        };
        (op, None)
    }

    /// The same while a store fails now and then. What a change that failed has changed is what the stores say, which must say the same.
    fn requests_that_fail(&mut self) {
        let names = self.names(true);
        for name in &names {
            let times = self.rng.below(4) as u32;
            self.given().fail_store(name, times).unwrap();
            self.library.fails[name].store(times, Ordering::SeqCst);
        }
        self.failing = true;
        self.requests();
        self.failing = false;
        for name in names {
            self.given().fail_store(&name, 0).unwrap();
            self.library.fails[&name].store(0, Ordering::SeqCst);
            let mine = std::fs::read(self.library.dir.path().join(&name)).unwrap();
            assert!(mine == *self.given().store(&name).unwrap(), "what the store of {name} has");
            self.truth.get_mut(&name).unwrap().0 = mine;
        }
        self.meet("with faults", 1);
    }

    /// Some requests at the same time, on different parts of volumes, until all are answered.
    fn requests(&mut self) {
        let parts = 1 + self.rng.below(4);
        let names: Vec<String> = self.names(true);
        let mut wanted = BTreeMap::new();
        for part in 0..parts {
            let name = names[self.rng.below(names.len() as u64) as usize].clone();
            let (op, read) = self.operation(&name, part, parts);
            let now = self.now;
            let mine = self.library.submit(now, &name, op.clone());
            let theirs = self.given().submit(now, &name, op, BlockKind::Unknown).unwrap();
            wanted.insert(mine, (theirs, read));
        }
        self.answer(wanted);
    }

    fn answer(&mut self, mut wanted: BTreeMap<u64, (u64, Option<Vec<u8>>)>) {
        // Some wait for fills that are gathered.
        for _ in 0..100 {
            self.turn(self.now);
            let mine = self.library.answers();
            let theirs: Vec<_> =
                std::iter::from_fn(|| self.given.as_mut().unwrap().answer()).collect();
            assert_eq!(mine.len(), theirs.len(), "answers at {:?}", self.now);
            for ((ticket, (ok, bytes)), theirs) in mine.into_iter().zip(theirs) {
                let (number, read) = wanted.remove(&ticket).expect("an answer to what was asked");
                assert_eq!((number, ok), (theirs.number, theirs.outcome.is_ok()));
                assert!(ok || self.failing);
                self.meet("failed", u64::from(!ok));
                if let Some(read) = read.filter(|_| ok) {
                    assert!(read == bytes && read == theirs.bytes, "{:?}", theirs.ended);
                    self.meet("reads", 1);
                }
            }
            if wanted.is_empty() {
                return;
            }
            self.now = self.due;
        }
        panic!("never answered: {:?}", wanted.keys());
    }

    /// A client reads one piece after the other.
    fn sequence(&mut self) {
        let names = self.names(true);
        let name = names[self.rng.below(names.len() as u64) as usize].clone();
        let bytes = self.truth[&name].0.len() as u64;
        let mut at = self.rng.below(bytes / 2) / 4096 * 4096;
        for _ in 0..self.rng.range(4, 12) {
            let len = (16 * KIB).min(bytes - at);
            let read = self.truth[&name].0[at as usize..(at + len) as usize].to_vec();
            let op = Op::Read { at, len };
            let now = self.now;
            let mine = self.library.submit(now, &name, op.clone());
            let theirs = self.given().submit(now, &name, op, BlockKind::Unknown).unwrap();
            self.answer([(mine, (theirs, Some(read)))].into());
            at = (at + len) % (bytes / 4096 * 4096).max(1);
        }
        self.meet("sequences", 1);
    }

    fn names(&self, attached: bool) -> Vec<String> {
        let these = self.truth.iter().filter(|t| t.1.1 == attached);
        these.map(|t| t.0.clone()).collect()
    }

    /// Nothing is under way any more.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            let now = self.now;
            self.library.core().set_now(now);
            let mine = self.library.core().settle(std::time::Duration::ZERO).unwrap();
            let theirs = self.given().unsettled(now);
            assert_eq!(mine, theirs);
            if mine == 0 {
                return;
            }
            self.turn(now);
            self.now = self.due;
        }
        panic!("it does not settle");
    }

    /// A volume comes or goes, grows, is forgotten, something is selected of it, or its lines are dropped.
    fn operator(&mut self) {
        self.settle();
        let (now, what) = (self.now, self.rng.below(7));
        let names = self.names(what < 5);
        if names.len() <= usize::from(what < 5) {
            return;
        }
        let name = names[self.rng.below(names.len() as u64) as usize].clone();
        let core = self.library.core().clone();
        core.set_now(now);
        let given = self.given.as_mut().unwrap();
        let truth = self.truth.get_mut(&name).unwrap();
        let bytes = truth.0.len() as u64;
        let line = u64::from(self.library.case.line);
        match what {
            0 => {
                let kept = core.detach(&name, false, &mut |_| true).unwrap();
                let theirs = given.detach(now, &name, known_by(&name, bytes)).unwrap();
                assert_eq!(kept, Some(theirs), "{name} goes");
                self.library.volumes.remove(&name);
                truth.1 = false;
                self.meet("detached", 1);
            }
            1 | 2 if bytes.is_multiple_of(line) && bytes < 64 * MIB => {
                let bytes = bytes + [line, MIB, 5 * MIB][self.rng.below(3) as usize];
                let fits = core.may_grow_to(&name, bytes).is_ok();
                let theirs = given.grow(now, &name, bytes, known_by(&name, bytes));
                assert_eq!(fits, theirs.is_ok(), "{name}, to {bytes}: {theirs:?}");
                let Ok(theirs) = theirs else {
                    self.meet("too large", 1);
                    return self.turn(now);
                };
                self.library.volumes[&name].backing().resize(Some(bytes)).unwrap();
                let moved = core.grow(&name, bytes).unwrap();
                assert_eq!(moved, theirs, "{name} grows");
                truth.0.resize(bytes as usize, 0);
                self.meet(if moved { "moved" } else { "grown" }, 1);
            }
            1..4 => {
                let rule = [Some(Rule::Always), Some(Rule::Never), Some(Rule::ByPolicy), None];
                let rule = rule[self.rng.below(4) as usize];
                let ranges = [(64 * KIB, 128 * KIB), (512 * KIB, 4 * KIB)];
                let ranges = self.rng.chance(0.7).then_some(&ranges[..]);
                let mine = core.select(&name, rule, ranges, "some").unwrap();
                let theirs = given.select(now, &name, rule, ranges, "some").unwrap();
                assert_eq!(mine.1, theirs, "{name}: {rule:?}");
                self.meet("selected", 1);
            }
            4 => {
                let range = self.rng.chance(0.5).then_some((0, 100 * KIB));
                let mine = core.drop_lines(&name, range, &mut || true).unwrap();
                let theirs = given.drop_lines(now, &name, range).unwrap();
                assert_eq!(mine, Some(theirs), "lines of {name}");
                self.meet("dropped", theirs);
            }
            5 if self.rng.chance(0.3) && !self.forgotten.contains(&name) => {
                self.forgotten.insert(name.clone());
                let mine = core.forget(&name, &mut || true).unwrap();
                assert_eq!(mine, Some(given.forget(now, &name).unwrap()), "{name} is forgotten");
                self.meet("forgotten", 1);
            }
            _ => {
                let theirs = given.attach(now, &comer(&name, bytes)).unwrap();
                let volume = self.library.volume(&name);
                let mine = core.attach(&volume, false).unwrap();
                assert_eq!(mine.is_ok(), theirs, "{name} comes: {mine:?}");
                self.truth.get_mut(&name).unwrap().1 = true;
                self.forgotten.remove(&name);
                self.meet(if theirs { "warm" } else { "cold" }, 1);
            }
        }
        self.turn(now);
    }

    /// The run ends in one way or another, and the next begins.
    fn restart(&mut self) {
        let attached = self.names(true);
        let known = attached.iter().map(|n| (n.clone(), known_by(n, self.truth[n].0.len() as u64)));
        let known = known.collect();
        let kills = self.rng.chance(0.5);
        let given = self.given.take().unwrap();
        let running = self.library.running.take().unwrap();
        running.cache().set_now(self.now);
        let left = if kills {
            running.abandon();
            self.meet("killed", 1);
            given.kill()
        } else {
            running.stop();
            self.meet("stopped", 1);
            given.stop(self.now, &known).map_err(|e| e.0).unwrap()
        };
        assert!(self.library.bytes() == left.flash(), "flash at the end, killed: {kills}");
        let random = self.rng.next_u64() as u32;
        let names: Vec<&str> = attached.iter().map(String::as_str).collect();
        self.library.begin(&names, random);
        let comers: Vec<_> =
            names.iter().map(|n| comer(n, self.truth[*n].0.len() as u64)).collect();
        let given = GivenBlock::again(&self.spec, left, &comers, random).unwrap();
        assert_eq!(&self.library.running().warmth, given.warmth());
        assert_eq!(self.library.core().count_lines(), given.count_lines());
        self.given = Some(given);
        self.turn(Nanos::ZERO);
    }

    fn run(&mut self) {
        // Bytes are looked at now and then: a device of holes is long.
        let every =
            if matches!(self.library.case.placement, Placement::Sparse(_)) { 40 } else { 2 };
        for step in 0..STEPS {
            self.wait();
            match self.rng.below(40) {
                0 => self.restart(),
                1..5 => self.operator(),
                5..8 => self.sequence(),
                // (What detectors of metadata wish to see is read at times that only the host knows.)
                8..12 if self.library.case.admission != "two_lbs" => self.requests_that_fail(),
                _ => self.requests(),
            }
            self.same(step % every == 0 || step + 1 == STEPS);
        }
        let stats = self.library.core().stats().engine;
        self.meet("hits", stats.read_hits);
        self.meet("fills", stats.fills);
    }
}

/// What was written since then.
fn since(now: &LogStats, then: &LogStats) -> LogStats {
    LogStats {
        records: now.records - then.records,
        batches: now.batches - then.batches,
        snapshots: now.snapshots - then.snapshots,
        bytes: now.bytes - then.bytes,
        intents_set: now.intents_set - then.intents_set,
        intents_cleared: now.intents_cleared - then.intents_cleared,
    }
}

/// Volumes that write back, beside one that writes through.
fn writes_back(case: &Case, seed: u64) -> BTreeMap<&'static str, u64> {
    let mut both = Lockstep::new(case, seed);
    let mut stalled = 0;
    for step in 0..STEPS {
        both.wait();
        match both.rng.below(10) {
            0 => both.sequence(),
            _ => both.requests(),
        }
        both.same(step + 1 == STEPS);
        for name in case.written_back() {
            let status = both.given().back_status(name).unwrap().unwrap();
            stalled += u64::from(status.delayed);
            both.meet("dirty", u64::from(status.dirty > 0));
        }
    }
    for name in NAMES {
        let mine = std::fs::read(both.library.dir.path().join(name)).unwrap();
        assert!(mine == *both.given().store(name).unwrap(), "what the store of {name} has");
        let destaged = both.given().back_status(name).unwrap().map_or(0, |s| s.destaged);
        both.meet("destaged", destaged);
    }
    let stats = both.library.core().stats().engine;
    both.meet("hits", stats.read_hits);
    both.meet("delayed", stalled);
    both.met
}

#[test]
fn volumes_that_write_back() {
    let orders = [Order::Any, Order::Ordered(Grain::Flush), Order::Ordered(Grain::Completion)];
    let paces = [Pace::Async, Pace::Periodic(Nanos::from_millis(300)), Pace::AtBound];
    let mut met = BTreeMap::new();
    for (n, order) in (0..).zip(orders) {
        for (m, pace) in (0..).zip(paces) {
            let placement = [Placement::Sets(8), Placement::Sets(1), Placement::Full][m as usize];
            let mut case = Case::new(placement, WriteMode::WriteThrough);
            case.flash = 96 * MIB;
            let age = (m == 1).then_some(Age { most: Nanos::from_millis(500), hard: n == 1 });
            let most = (m > 0).then_some(MIB);
            case.back = Some(WritesBack { order, pace, most, age });
            for (what, times) in writes_back(&case, 700 + n * 10 + m) {
                *met.entry(what).or_insert(0) += times;
            }
        }
    }
    println!("{met:?}");
    for what in ["hits", "sequences", "dirty", "destaged", "delayed"] {
        assert!(met.get(what).is_some_and(|times| *times > 0), "no {what}: {met:?}");
    }
}

fn run(case: &Case, seed: u64) -> BTreeMap<&'static str, u64> {
    let mut both = Lockstep::new(case, seed);
    both.run();
    // A run without hits shows nothing.
    assert!(both.met["reads"] > 50, "{:?}", both.met);
    both.met
}

const WRITES: [WriteMode; 3] =
    [WriteMode::WriteThrough, WriteMode::WriteUpdate, WriteMode::WriteAround];

/// Each way to write, with one admission or another, shares and a budget.
fn placement(placement: Placement, seed: u64) {
    let mut met = BTreeMap::new();
    for (n, write) in (0..).zip(WRITES) {
        for (m, admission) in
            (0..).zip(["all", "seqr(free=on)", "two_lbs", "sseqr+tc", "expected_reads"])
        {
            let mut case = Case::new(placement, write);
            case.admission = admission;
            if m % 2 == 1 {
                case.shares = vec![(1, "10%.."), (2, "..20%")];
            }
            if m == 2 {
                case.budget.tbw = Some(ByteSize(2 << 40));
                case.budget.years = 0.001;
            }
            for (what, times) in run(&case, seed + n * 10 + m) {
                *met.entry(what).or_insert(0) += times;
            }
        }
    }
    println!("{met:?}");
    let all = [
        "hits",
        "fills",
        "sequences",
        "detached",
        "grown",
        "selected",
        "dropped",
        "warm",
        "killed",
        "stopped",
        "with faults",
        "failed",
    ];
    for what in all {
        assert!(met.get(what).is_some_and(|times| *times > 0), "no {what}: {met:?}");
    }
}

#[test]
fn one_place_for_each_line() {
    placement(Placement::Sets(1), 100);
}

#[test]
fn sets_of_eight() {
    placement(Placement::Sets(8), 200);
}

#[test]
fn a_log_of_segments() {
    placement(Placement::Full, 300);
}

#[test]
fn a_sparse_file() {
    placement(Placement::Sparse(64 * MIB), 400);
}

/// Other policies of eviction, lines, and who makes room.
#[test]
fn other_policies() {
    for (n, replacement) in (0..).zip(["clock", "sieve", "s3fifo", "fifo"]) {
        let mut case = Case::new(Placement::Sets(8), WriteMode::WriteThrough);
        case.replacement = replacement;
        run(&case, 500 + n);
        let mut case = Case::new(Placement::Full, WriteMode::WriteUpdate);
        (case.replacement, case.evict, case.line, case.flash) =
            (replacement, "cache", 16 << 10, 16 * MIB);
        run(&case, 600 + n);
    }
}
