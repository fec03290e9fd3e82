mod lockstep;

use std::collections::BTreeMap;

use larder_base::{Rng, UnixSecs};
use larder_engine::block::node::event::Ended;
use larder_format::Uuid;
use larder_format::block::Layout;
use larder_policy::block::{Reason, Rule};

use super::*;
use crate::block::node::Blank;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Bytes that are left out.
impl Carried for Blank {
    fn of(bytes: Vec<u8>) -> Blank {
        Blank(bytes.len() as u64)
    }

    fn read(_memory: &[u8], _at: u64, len: u64) -> Blank {
        Blank(len)
    }

    fn write(&self, _memory: &mut [u8], _at: u64) {}

    fn part(&self, _from: u64, len: u64) -> Blank {
        Blank(len)
    }

    fn crcs(&self, line: u32) -> Vec<u32> {
        vec![0; self.0.div_ceil(u64::from(line)) as usize]
    }

    fn under(&self, _others: &Blank, _at: u64) -> Blank {
        *self
    }

    fn sums(&self) -> Vec<u32> {
        vec![0; self.0.div_ceil(4096) as usize]
    }

    fn seen(&self) -> Option<&[u8]> {
        None
    }
}

fn spec(placement: &str, write: &str, more: &str) -> Block {
    let shards = if more.contains("shards") { "" } else { "shards = 1\n" };
    let text =
        format!("flash = '12m'\nplacement = '{placement}'\nwrite = '{write}'\n{shards}{more}");
    toml::from_str(&text).unwrap()
}

/// The device as it is formatted.
fn formatted(spec: &Block) -> Vec<u8> {
    let line = spec.line.0 as u32;
    let layout = Layout::of(spec.flash.0, line, spec.placement().unwrap(), spec.shards).unwrap();
    let superblock = BlockSuperblock::format(Uuid([5; 16]), 77, 1 << 40, layout, UnixSecs(1));
    let mut flash = vec![0; layout.device as usize];
    let at = superblock.copy() * COPY_BYTES;
    let bytes = superblock.encode();
    flash[at..at + bytes.len()].copy_from_slice(&bytes);
    flash
}

fn identity(version: u64) -> [u8; 64] {
    let mut identity = [1; 64];
    identity[..8].copy_from_slice(&version.to_le_bytes());
    identity
}

fn comer(name: &str, bytes: u64, version: u64) -> Comer {
    let proves = move |then: &[u8; 64], _| match *then == identity(version) {
        true => Ok(()),
        false => Err("it was changed"),
    };
    let identity = identity(version);
    Comer { name: name.to_owned(), bytes, identity, proves: Box::new(proves) }
}

/// A volume as its clients have it.
struct Truth {
    bytes: Vec<u8>,
    version: u64,
    attached: bool,
}

/// What a step of a script has come to, but for bytes.
type Seen = (Vec<String>, String);

/// A cache, and what its volumes must have.
struct Driver<B: Carried> {
    spec: Block,
    given: Option<Given<B>>,
    truth: BTreeMap<String, Truth>,
    rng: Rng,
    now: Nanos,
    due: Nanos,
    reads: u64,
    hits: u64,
    /// Whether bytes are to be looked at.
    looks: bool,
    moved: u64,
    grown: u64,
    warm: u64,
    /// Counters of runs that are over.
    ended: BlockStats,
}

impl<B: Carried> Driver<B> {
    fn new(spec: Block, looks: bool, seed: u64) -> Driver<B> {
        let sizes = [("a", 18 * MIB), ("b", 2 * MIB + 512), ("c", 3 * MIB), ("d", MIB)];
        let truth = |&(name, bytes): &(&str, u64)| {
            let bytes = vec![0; bytes as usize];
            (name.to_owned(), Truth { bytes, version: 1, attached: true })
        };
        let truth: BTreeMap<String, Truth> = sizes.iter().map(truth).collect();
        let comers: Vec<Comer> = sizes.iter().map(|s| comer(s.0, s.1, 1)).collect();
        let given = Given::new(&spec, formatted(&spec), &comers, 3).unwrap();
        Driver {
            spec,
            given: Some(given),
            truth,
            rng: Rng::new(seed),
            now: Nanos::ZERO,
            due: Nanos::ZERO,
            reads: 0,
            hits: 0,
            looks,
            moved: 0,
            grown: 0,
            warm: 0,
            ended: BlockStats::default(),
        }
    }

    fn given(&mut self) -> &mut Given<B> {
        self.given.as_mut().unwrap()
    }

    /// Time goes on, sometimes until something is due, sometimes far.
    fn wait(&mut self) {
        let on = match self.rng.below(20) {
            0 => 3_000_000_000,
            1..4 => self.due.saturating_sub(self.now).0,
            4..8 => self.rng.below(50_000_000),
            _ => self.rng.below(1_000_000),
        };
        self.now = Nanos(self.now.0 + on);
        let now = self.now;
        self.due = self.given().turn(now);
        assert!(self.due > now, "{:?} is due at {now:?}", self.due);
    }

    /// Nothing is under way any more.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            let now = self.now;
            if self.given().unsettled(now) == 0 {
                return;
            }
            self.due = self.given().turn(now);
            self.now = self.due;
        }
        panic!("it does not settle");
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

    /// Some requests at the same time, on different parts of volumes. Returns what became of them.
    fn requests(&mut self) -> Vec<String> {
        let parts = 1 + self.rng.below(4);
        let names: Vec<String> =
            self.truth.iter().filter(|t| t.1.attached).map(|t| t.0.clone()).collect();
        let mut wanted = BTreeMap::new();
        for part in 0..parts {
            let name = names[self.rng.below(names.len() as u64) as usize].clone();
            let bytes = self.truth[&name].bytes.len() as u64;
            let (at, len) = self.range(bytes, part, parts);
            let (first, end) = (at as usize, (at + len) as usize);
            let fua = self.rng.chance(0.1);
            let truth = &mut self.truth.get_mut(&name).unwrap().bytes;
            let op = match self.rng.below(20) {
                0..9 => Op::Read { at, len },
                9..15 => {
                    let mut bytes = vec![0; len as usize];
                    self.rng.fill(&mut bytes);
                    truth[first..end].copy_from_slice(&bytes);
                    Op::Write { at, len, bytes, fua }
                }
                15 => {
                    truth[first..end].fill(0);
                    Op::Zero { at, len, fua, may_punch: true, fast: false }
                }
                16 if parts == 1 && self.rng.chance(0.2) => {
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
            let read = match &op {
                Op::Read { .. } => Some(truth[first..end].to_vec()),
                _ => None,
            };
            let now = self.now;
            let number = self.given().submit(now, &name, op, BlockKind::Unknown).unwrap();
            wanted.insert(number, read);
        }
        let mut seen = Vec::new();
        let mut now = self.now;
        // Some wait for fills that are gathered.
        for _ in 0..100 {
            self.due = self.given().turn(now);
            while let Some(answer) = self.given().answer() {
                assert_eq!(answer.outcome, Ok(()));
                let read = wanted.remove(&answer.number).expect("an answer to what was asked");
                if let Some(read) = read {
                    assert!(!self.looks || read == answer.bytes, "{answer:?}");
                    self.reads += 1;
                    self.hits += u64::from(answer.ended.is_some_and(|e: Ended| e.hit));
                }
                seen.push(format!("{now:?} {} {:?}", answer.number, answer.ended));
            }
            self.now = now;
            if wanted.is_empty() {
                return seen;
            }
            now = self.due;
        }
        panic!("never answered: {:?}", wanted.keys());
    }

    fn volume(&mut self, attached: bool) -> Option<String> {
        let names: Vec<String> =
            self.truth.iter().filter(|t| t.1.attached == attached).map(|t| t.0.clone()).collect();
        let least = usize::from(attached);
        (names.len() > least).then(|| names[self.rng.below(names.len() as u64) as usize].clone())
    }

    /// A volume comes or goes, grows, is forgotten, or something is selected of it.
    fn operator(&mut self) -> String {
        self.settle();
        let now = self.now;
        let what = self.rng.below(6);
        let Some(name) = self.volume(what < 4) else { return String::new() };
        let truth = self.truth.get_mut(&name).unwrap();
        let given = self.given.as_mut().unwrap();
        match what {
            0 => {
                let kept = given.detach(now, &name, identity(truth.version)).unwrap();
                truth.attached = false;
                format!("{name} goes: {kept}")
            }
            1 | 2 if truth.bytes.len().is_multiple_of(4096) && truth.bytes.len() < 64 << 20 => {
                let more = [4 * KIB, MIB, 5 * MIB][self.rng.below(3) as usize];
                let bytes = truth.bytes.len() as u64 + more;
                truth.version += 1;
                let moved = given.grow(now, &name, bytes, identity(truth.version)).unwrap();
                truth.bytes.resize(bytes as usize, 0);
                self.moved += u64::from(moved);
                self.grown += u64::from(!moved);
                format!("{name} grows to {bytes}: {moved}")
            }
            1..4 => {
                let rule = [Some(Rule::Always), Some(Rule::Never), Some(Rule::ByPolicy), None];
                let rule = rule[self.rng.below(4) as usize];
                let ranges = [(64 * KIB, 128 * KIB), (512 * KIB, 4 * KIB)];
                let ranges = self.rng.chance(0.7).then_some(&ranges[..]);
                let dropped = given.select(now, &name, rule, ranges, "some").unwrap();
                format!("{name} {rule:?}: {dropped}")
            }
            4 if self.rng.chance(0.2) => {
                format!("{name} is forgotten: {}", given.forget(now, &name).unwrap())
            }
            _ => {
                if self.rng.chance(0.2) {
                    // Somebody else writes there.
                    truth.version += 1;
                    truth.bytes[1000..2000].fill(9);
                    given.put(&name, 1000, &[9; 1000]);
                }
                let comes = comer(&name, truth.bytes.len() as u64, truth.version);
                let warm = given.attach(now, &comes).unwrap();
                truth.attached = true;
                self.warm += u64::from(warm);
                format!("{name} comes: {warm}")
            }
        }
    }

    /// The run ends in one way or another, and the next begins.
    fn restart(&mut self) -> String {
        let given = self.given.take().unwrap();
        self.ended.add(&given.stats());
        let attached = self.truth.iter().filter(|t| t.1.attached);
        let identities = attached.map(|(name, t)| (name.clone(), identity(t.version))).collect();
        let how = self.rng.below(3);
        let mut left = match how {
            0 => given.stop(self.now, &identities).map_err(|e| e.0).unwrap(),
            _ => given.kill(),
        };
        if how == 2 {
            left.lose_memory();
        }
        let attached = self.truth.iter().filter(|t| t.1.attached);
        let comers: Vec<Comer> =
            attached.map(|(name, t)| comer(name, t.bytes.len() as u64, t.version)).collect();
        let random = self.rng.next_u64() as u32;
        let given = Given::again(&self.spec, left, &comers, random).unwrap();
        let seen = format!("{how}: {:?}, {} lines", given.warmth(), given.count_lines());
        if how < 2 {
            assert!(!matches!(given.warmth(), Warmth::Cold(_)) || given.count_lines() == 0);
        }
        self.given = Some(given);
        (self.now, self.due) = (Nanos::ZERO, Nanos::ZERO);
        seen
    }

    fn step(&mut self) -> Seen {
        self.wait();
        let mut seen = match self.rng.below(60) {
            0 => vec![self.restart()],
            1..4 => vec![self.operator()],
            _ => self.requests(),
        };
        seen.push(format!("{:?}", self.due));
        (seen, self.counters())
    }

    /// Everything that is counted.
    fn counters(&mut self) -> String {
        let given = self.given.as_ref().unwrap();
        let of = |name: &String| {
            let (verdicts, counts) = (given.verdicts(name).unwrap(), given.counts(name).unwrap());
            let place = given.place(name).unwrap();
            format!("{name} {verdicts:?} {counts:?} {} {place:?}", given.lines(name).unwrap())
        };
        let volumes: Vec<String> = given.names().iter().map(of).collect();
        let (stats, log) = (given.stats(), given.log_stats());
        let budget = (given.budget(), given.budget_file());
        format!("{stats:?} {log:?} {} {budget:?} {volumes:?}", given.regions_set())
    }

    /// All volumes have in their stores what their clients wrote, and what is read of them is that.
    fn check(&mut self) {
        for (name, truth) in &self.truth {
            let given = self.given.as_mut().unwrap();
            assert!(*given.store(name).unwrap() == truth.bytes[..], "store of {name}");
            if !truth.attached {
                continue;
            }
            for (at, bytes) in (0u64..).zip(truth.bytes.chunks(MIB as usize)) {
                let read = Op::Read { at: at * MIB, len: bytes.len() as u64 };
                let answer = given.ask(self.now, name, read).unwrap().unwrap();
                assert!(answer.bytes == bytes, "{name} {at}");
            }
        }
    }
}

const PLACEMENTS: [&str; 4] = ["direct", "set:8", "full", "sparse:256m"];

#[test]
fn what_is_read_is_what_was_written_through_all_that_operators_and_restarts_do() {
    let (mut moved, mut grown, mut warm, mut all) = (0, 0, 0, BlockStats::default());
    for (n, placement) in (0u64..).zip(PLACEMENTS) {
        for (m, write) in (0u64..).zip(["hdd-ssd", "hdd-upd", "hdd-inv"]) {
            let more = "admission = 'all'\nshards = 2\nreadahead = '256k'\n\
                        shares = { '1' = '10%..', '2' = '..20%' }";
            let seed = n * 3 + m;
            let spec = spec(placement, write, more);
            let mut driver = Driver::<Octets>::new(spec, true, seed);
            for _ in 0..500 {
                driver.step();
            }
            driver.check();
            all.add(&driver.ended);
            all.add(&driver.given().stats());
            let at = || format!("{placement} {write}: {} of {}", driver.hits, driver.reads);
            assert!(driver.hits > 30 && driver.hits < driver.reads, "{}", at());
            moved += driver.moved;
            grown += driver.grown;
            warm += driver.warm;
        }
    }
    assert!(moved > 3 && grown > 3 && warm > 3, "{moved} {grown} {warm}");
    assert_eq!((all.corrupt, all.flash_errors, all.backing_errors), (0, 0, 0));
    let much = [all.read_shared, all.updated, all.evicted, all.copied, all.dropped, all.waited];
    assert!(much.iter().all(|&n| n > 50) && all.range_steps > 0, "{all:?}");
}

/// What looks into bytes is left out.
#[test]
fn leaving_bytes_out_changes_no_decision() {
    let budget = "write_budget = { tbw = '50g', years = 100.0, first_fill = false }";
    let mut refused = 0;
    for (n, placement) in (0u64..).zip(PLACEMENTS) {
        for (m, write) in (0u64..).zip(["hdd-ssd", "hdd-upd", "hdd-inv"]) {
            let admission = ["all", "seqr(free=on)", "two_lbs", "sseqr+tc", "expected_reads"]
                [(n + m) as usize % 5];
            let more = format!(
                "admission = '{admission}'\nshards = 2\nreadahead = '256k'\n{budget}\n\
                 shares = {{ '1' = '10%..', '2' = '..20%' }}"
            );
            let spec = spec(placement, write, &more);
            let mut with = Driver::<Octets>::new(spec.clone(), true, 100 + n * 3 + m);
            let mut without = Driver::<Blank>::new(spec, false, 100 + n * 3 + m);
            for i in 0..300 {
                let (a, b) = (with.step(), without.step());
                assert_eq!(a, b, "{placement} {write} {admission}, step {i}");
            }
            let given = with.given();
            let of = |name: &String| given.verdicts(name).unwrap().rejected(Reason::Budget);
            refused += given.names().iter().map(of).sum::<u64>();
        }
    }
    assert!(refused > 100, "{refused}");
}

/// One volume of 18 MiB.
fn one(spec: &Block) -> GivenBlock {
    Given::new(spec, formatted(spec), &[comer("a", 18 * MIB, 1)], 3).unwrap()
}

fn read(at: u64, len: u64) -> Op<Vec<u8>> {
    Op::Read { at, len }
}

/// Everything that is under way ends.
fn settle(given: &mut GivenBlock) {
    while given.unsettled(given.now()) > 0 {
        let next = given.turn(given.now());
        given.turn(next);
    }
}

#[test]
fn a_clean_stop_and_a_kill_leave_every_line_and_a_power_cut_those_that_are_durable() {
    for placement in PLACEMENTS {
        let spec = spec(placement, "hdd-ssd", "admission = 'all'\nreadahead = 0");
        let comers = || [comer("a", 18 * MIB, 1)];
        let identities = BTreeMap::from([("a".to_owned(), identity(1))]);
        let mut given = one(&spec);
        for i in 0..32 {
            given.ask(given.now(), "a", read(i * 64 * KIB, 64 * KIB)).unwrap().unwrap();
        }
        settle(&mut given);
        let lines = given.count_lines();
        assert!(lines > 400, "{placement}: {lines}");
        let left = given.stop(Nanos::ZERO, &identities).unwrap();
        let mut given = GivenBlock::again(&spec, left, &comers(), 4).unwrap();
        assert!(matches!(given.warmth(), Warmth::Log(_)), "{placement}: {:?}", given.warmth());
        assert_eq!(given.count_lines(), lines, "{placement}");
        // A page of a table is read first.
        let write = Op::Write { at: 0, len: 4096, bytes: vec![7; 4096], fua: false };
        given.ask(Nanos::ZERO, "a", write).unwrap().unwrap();
        let answer = given.ask(Nanos::ZERO, "a", read(0, 4096)).unwrap().unwrap();
        assert!(answer.bytes == [7; 4096]);
        settle(&mut given);
        let lines = given.count_lines();
        let mut left = {
            let left = given.kill();
            let given = GivenBlock::again(&spec, left, &comers(), 5).unwrap();
            assert_eq!((given.warmth(), given.count_lines()), (&Warmth::Memory, lines));
            given.kill()
        };
        left.lose_memory();
        // The region that was written to has its bit.
        let given = GivenBlock::again(&spec, left, &comers(), 6).unwrap();
        assert!(given.count_lines() < lines, "{placement}");
        let comers = [comer("a", 18 * MIB, 2)];
        let given = GivenBlock::again(&spec, given.kill(), &comers, 7).unwrap();
        assert_eq!(given.count_lines(), 0, "{placement}: its store was changed");
        assert_eq!(given.decided()[0].cold, Some("it was changed"));
    }
}

/// A superblock of ext4 with blocks of 4 KiB, 32768 of them to a group.
fn ext4_head(blocks: u32) -> Vec<u8> {
    let mut head = vec![0u8; 4096];
    let mut put = |at: usize, value: u32, bytes: usize| {
        head[1024 + at..][..bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
    };
    for (at, value) in [
        (0, 8192 * blocks.div_ceil(32768)),
        (4, blocks),
        (0x18, 2),
        (0x20, 32768),
        (0x28, 8192),
        (0x4c, 1),
        (0x60, 0x42),
        (0x64, 1),
    ] {
        put(at, value, 4);
    }
    put(0x38, 0xef53, 2);
    put(0x58, 256, 2);
    head
}

#[test]
fn a_detector_sees_what_passes_by_and_what_it_asks_the_store_for() {
    for is_there in [true, false] {
        let mut given = one(&spec("set:8", "hdd-ssd", "admission = 'two_lbs'\nreadahead = 0"));
        let head = ext4_head(4608);
        if is_there {
            given.put("a", 0, &head);
        } else {
            let write = Op::Write { at: 0, len: 4096, bytes: head, fua: false };
            given.ask(Nanos::ZERO, "a", write).unwrap().unwrap();
        }
        given.turn(Nanos::from_millis(200));
        given.ask(given.now(), "a", read(0, 4096)).unwrap().unwrap();
        given.ask(given.now(), "a", read(16 * MIB, 4096)).unwrap().unwrap();
        let counts = given.counts("a").unwrap();
        assert_eq!((counts.reads, counts.metadata_reads), (2, 1), "{is_there}");
    }
}

#[test]
fn shares_and_rules_are_of_the_volumes_by_number() {
    let more = "shares = { '1' = '..10%' }\nselect = [{ volume = 0, rule = 'never' }]";
    let spec = spec("set:8", "hdd-ssd", &format!("admission = 'all'\nreadahead = 0\n{more}"));
    let comers = [comer("a", 8 * MIB, 1), comer("b", 8 * MIB, 1)];
    let mut given = GivenBlock::new(&spec, formatted(&spec), &comers, 1).unwrap();
    for name in ["a", "b"] {
        for i in 0..128 {
            given.ask(given.now(), name, read(i * 64 * KIB, 64 * KIB)).unwrap().unwrap();
        }
        settle(&mut given);
    }
    let slots = given.superblock().unwrap().layout.capacity();
    assert_eq!(given.lines("a").unwrap(), 0);
    assert_eq!(given.verdicts("a").unwrap().rejected(Reason::Never), 128, "a part each");
    assert_eq!(given.lines("b").unwrap(), slots / 10);
    assert!(given.verdicts("b").unwrap().rejected(Reason::Ceiling) > 0);
    // Over a restart too.
    let comers = [comer("b", 8 * MIB, 1), comer("a", 8 * MIB, 1)];
    let mut given = GivenBlock::again(&spec, given.kill(), &comers, 2).unwrap();
    given.ask(Nanos::ZERO, "a", read(0, 4096)).unwrap().unwrap();
    assert_eq!(given.verdicts("a").unwrap().rejected(Reason::Never), 1);
    given.select(Nanos::ZERO, "a", None, None, "").unwrap();
    given.ask(Nanos::ZERO, "a", read(0, 4096)).unwrap().unwrap();
    assert_eq!(given.verdicts("a").unwrap().admitted, 1);
}

#[test]
fn what_cannot_be_done_is_refused_with_a_remedy() {
    let spec = spec("set:8", "hdd-ssd", "");
    let mut given = one(&spec);
    let now = Nanos::ZERO;
    let say = |error: GivenError| error.to_string();
    let unknown = given.ask(now, "z", read(0, 1)).map(drop).map_err(say);
    let said = "volume 'z': there is none of that name: attach it, or name another";
    assert_eq!(unknown, Err(said.to_owned()));
    let again = given.attach(now, &comer("a", MIB, 1)).map_err(say).unwrap_err();
    assert!(again.contains("'a': it is attached already: detach it"), "{again}");
    assert!(given.forget(now, "a").is_err() && given.detach(now, "z", [0; 64]).is_err());
    let shrinks = given.grow(now, "z", MIB, [0; 64]).map_err(say).unwrap_err();
    assert!(shrinks.contains("volume 'z'"), "{shrinks}");
    let blank = GivenBlock::new(&spec, vec![0; 12 << 20], &[], 1).map(drop).map_err(say);
    assert!(blank.unwrap_err().contains("give it as it was formatted"));
    let text = "flash = '12m'\nshares = { '7' = '..10%' }";
    let wrong = GivenBlock::new(&toml::from_str(text).unwrap(), formatted(&spec), &[], 1);
    let wrong = wrong.map(drop).map_err(say).unwrap_err();
    assert_eq!(wrong, "shares is of volume 7: give one of the 0 volumes by its number");
}
