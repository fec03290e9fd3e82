//! Two queues, an operator and maintenance over two shards, under a scheduler that tries orders: no wake-up is lost (everything ends),
//! no answer comes before its bytes, and what was answered is what is read.

mod detach;
mod maintenance;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::{Nanos, Words};
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Making, Map, Shape};
use larder_engine::block::node::calls::{Calls, Mail, Out, Questions};
use larder_engine::block::node::event::{
    Answer, Effects, Ended, Host, JobId, Op, ShardIo, State, StoreOp, Submit, Volume, Why,
};
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::{Admits, Limits};
use larder_engine::block::node::maintenance::{Inbox, Stores};
use larder_engine::block::node::owners::Accounts;
use larder_engine::block::node::queue::{Config, Node, Queue};
use larder_engine::block::node::quiet::{Changes, QUIET};
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::{StoredShard, setup};
use larder_engine::block::{
    BlockConfig, BlockLimits, GroupId, LineId, Merge, OpId, Regions, SlotId, Verdict, WriteMode,
};
use larder_format::block::Layout;
use larder_policy::block::{
    BlockAccess, BlockCandidate, BlockKind, Observed, Reason, Rule, Verdict as PolicyVerdict,
    VolumeId,
};
use larder_policy::block::{EvictionBy, Replacement, VictimPolicy};
use maintenance::{Keeper, Task, pace};
use shuttle::sync::{Arc, Condvar, Mutex};

const LINE: u64 = 4096;
const GROUP: u64 = 16 * LINE;
const SHARDS: u32 = 2;
/// The operator's thread, behind the queues' threads.
const OPERATOR: usize = 2;
/// What lies in the store of groups that are zeroed later.
const OLD: u64 = 9;
const KEY: u64 = 7;
/// The volumes: each has a region of its own. The second goes.
const NAMES: [&str; 2] = ["stays", "goes"];

/// A value for each line.
#[derive(Clone, Debug)]
struct Values {
    all: std::sync::Arc<Vec<u64>>,
    from: usize,
    count: usize,
}

impl Values {
    fn new(all: Vec<u64>) -> Values {
        Values { count: all.len(), all: all.into(), from: 0 }
    }

    fn each(&self) -> &[u64] {
        &self.all[self.from..self.from + self.count]
    }
}

struct Model;

impl Host for Model {
    type Bytes = Values;
    type Volume = Whole;
    type Ticket = Ticket;
    type Failure = ();
    type Extents = ();

    fn part(bytes: &Values, from: u64, len: u64) -> Values {
        let (from, count) = ((from / LINE) as usize, (len / LINE) as usize);
        assert!(from + count <= bytes.count);
        Values { all: bytes.all.clone(), from: bytes.from + from, count }
    }

    fn apart(bytes: &Values, from: u64, len: u64) -> Values {
        Model::part(bytes, from, len)
    }

    fn failure(_: Why) {}
}

/// A volume, by its number.
#[derive(Clone)]
struct Whole(u32, std::sync::Arc<std::sync::Mutex<Flags>>);

/// What becomes of it.
struct Flags {
    state: State,
    moves: bool,
    inside: i32,
    losses: u64,
    settled: u64,
}

impl Whole {
    fn new(number: u32) -> Whole {
        let (moves, inside, losses, settled) = (false, 0, 0, 0);
        let flags = Flags { state: State::Served, moves, inside, losses, settled };
        Whole(number, std::sync::Arc::new(flags.into()))
    }

    fn flags<R>(&self, f: impl FnOnce(&mut Flags) -> R) -> R {
        f(&mut self.1.lock().unwrap())
    }
}

impl Volume for Whole {
    fn state(&self) -> State {
        self.flags(|f| f.state)
    }

    fn enter(&self) -> bool {
        self.flags(|f| {
            f.inside += i32::from(!f.moves);
            !f.moves
        })
    }

    fn leave(&self) {
        self.flags(|f| f.inside -= 1);
    }

    fn losses(&self) -> u64 {
        self.flags(|f| f.losses)
    }

    fn settled(&self) -> u64 {
        self.flags(|f| f.settled)
    }

    fn base(&self) -> u64 {
        u64::from(self.0) * layout().region_groups * GROUP
    }

    fn whole(&self) -> u64 {
        u64::MAX
    }
}

struct Ticket {
    number: usize,
    got: Vec<Option<u64>>,
}

struct Admission;

impl Admits for Admission {
    fn observe(&mut self, _: &BlockAccess) -> Observed {
        Observed::default()
    }

    fn wants_victim(&self) -> bool {
        false
    }

    fn ask(&mut self, _: &BlockCandidate, _: bool) -> Verdict {
        Verdict::Admit
    }

    fn ahead(&self, said: Verdict) -> Verdict {
        said
    }

    fn count(&mut self, _: PolicyVerdict) {}
}

/// A thread sleeps until it rings.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    wakes: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.wakes.notify_one();
    }

    fn sleep(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.wakes.wait(rung).unwrap();
        }
        *rung = false;
    }
}

struct Shared {
    shards: Vec<Mutex<(StoredShard, Held<Model>)>>,
    mail: Vec<Mutex<Mail<Model>>>,
    bells: Vec<Bell>,
    inbox: Mutex<Inbox<Values, Task>>,
    /// The owner of the inbox is woken.
    wakes: Condvar,
    time: AtomicU64,
    volumes: [Whole; 2],
    /// The second volume has no client any more; and is gone.
    left: Mutex<bool>,
    gone: Mutex<bool>,
    turns: Mutex<Turns>,
    store: Mutex<BTreeMap<u64, u64>>,
    flash: Mutex<BTreeMap<(u32, u32), u64>>,
    limits: Limits,
    changes: Changes,
}

impl Shared {
    fn new() -> Shared {
        let layout = layout();
        let shape = Shape::of(&layout);
        let config = BlockConfig {
            line_bytes: LINE as u32,
            write: WriteMode::WriteThrough,
            limits: BlockLimits::default(),
            regions: Regions { groups: layout.region_groups, count: layout.regions },
        };
        let shard = |i| {
            let (entries, sums) = Map::words(shape);
            let making = Making {
                replacement: Replacement::Lru,
                reclaim: VictimPolicy::Greedy,
                evict: EvictionBy::Cache,
            };
            let (entries, sums) = (Words::heap(entries), Words::heap(sums));
            let map = Map::new(entries, sums, placing(), i, shape, making);
            Mutex::new((setup::shard(config, map), Held::default()))
        };
        Shared {
            shards: (0..SHARDS).map(shard).collect(),
            mail: (0..3).map(|_| Mutex::default()).collect(),
            bells: (0..3).map(|_| Bell::default()).collect(),
            inbox: Mutex::new(Inbox::new(pace())),
            wakes: Condvar::new(),
            time: AtomicU64::new(1),
            volumes: [Whole::new(0), Whole::new(1)],
            left: Mutex::new(false),
            gone: Mutex::new(false),
            turns: Mutex::new(Turns::of(1)),
            store: Mutex::default(),
            flash: Mutex::default(),
            limits: Limits::default(),
            changes: Changes::new(layout.regions, QUIET),
        }
    }

    fn now(&self) -> Nanos {
        Nanos(self.time.load(Ordering::SeqCst))
    }

    fn goes_on(&self, until: Nanos) {
        self.time.fetch_max(until.0, Ordering::SeqCst);
    }

    /// Leaves something for maintenance by `f`, and wakes it if that says so.
    fn leave(&self, f: impl FnOnce(&mut Inbox<Values, Task>) -> bool) {
        let wakes = f(&mut self.inbox.lock().unwrap());
        if wakes {
            self.wakes.notify_one();
        }
    }

    fn write(&self, shard: u32, slot: SlotId, bytes: &Values) -> Vec<u32> {
        let mut flash = self.flash.lock().unwrap();
        for (slot, &value) in (slot.0..).zip(bytes.each()) {
            flash.insert((shard, slot), value);
        }
        bytes.each().iter().map(|&value| value as u32).collect()
    }
}

/// Four sets of groups in each shard: lines are evicted. Regions are as small as they can be.
fn layout() -> Layout {
    let layout = Layout::new(3 << 20, LINE as u32, 2, SHARDS).unwrap();
    assert_eq!((layout.group_sets, layout.region_groups), (4, 64));
    layout
}

fn queue(me: usize) -> Queue<Model> {
    let config = Config::new(&layout(), placing(), 0);
    Queue::new(me, Config { range_groups: 2, ..config })
}

fn placing() -> Placing {
    Placing::of(&layout(), KEY)
}

impl Questions for Shared {
    fn line_bytes(&self) -> u32 {
        LINE as u32
    }

    fn prefer(&self, _: LineId, _: LineId) -> bool {
        true
    }

    fn keep(&self, _: LineId, _: Option<LineId>) -> bool {
        false
    }

    fn keep_groups(&self, _: GroupId, _: GroupId, _: u32) -> bool {
        false
    }

    fn may_grow(&self, _: LineId) -> bool {
        true
    }
}

impl Calls<Model> for Shared {
    type Shard = StoredShard;

    fn shard<R>(&self, shard: u32, f: impl FnOnce(&mut StoredShard, &mut Held<Model>) -> R) -> R {
        let (shard, held) = &mut *self.shards[shard as usize].lock().unwrap();
        f(shard, held)
    }

    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<Model>) -> R) -> R {
        f(&mut self.mail[thread].lock().unwrap())
    }

    fn notify(&self, thread: usize) {
        self.bells[thread].ring();
    }

    fn maintain(&self, out: &mut Out<Values>) {
        self.leave(|inbox| inbox.leave(self.now(), out));
    }
}

impl Accounts for Shared {
    /// Nothing is shared.
    fn dropped(&self, _: LineId, _: u64) {}
}

impl Stores for Shared {
    fn store_of(&self, region: u32) -> Option<VolumeId> {
        self.stores().into_iter().find(|store| store.0 == region)
    }

    fn stores(&self) -> Vec<VolumeId> {
        let gone = *self.gone.lock().unwrap();
        (0..if gone { 1 } else { 2 }).map(VolumeId).collect()
    }
}

impl Node<Model> for Shared {
    type Admission = Admission;

    fn is_enabled(&self) -> bool {
        true
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn ask_budget(&self, op: OpId) {
        self.leave(|inbox| inbox.ask_budget(self.now(), op));
    }

    fn changes(&self) -> &Changes {
        &self.changes
    }

    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut self.turns.lock().unwrap())
    }

    fn ask_bits(&self, op: OpId, first: u32, last: u32) {
        self.leave(|inbox| inbox.ask_bits(self.now(), op, first, last));
    }

    fn give_up(&self, _: Nanos, why: String) {
        panic!("{why}");
    }

    fn id(&self, volume: &Whole) -> VolumeId {
        VolumeId(volume.0)
    }

    fn selects(&self, _: &Whole) -> bool {
        false
    }

    fn rule(&self, _: &Whole, _: u64, _: u64) -> Rule {
        Rule::ByPolicy
    }

    fn kind(&self, _: &Whole, _: u64, _: u64) -> BlockKind {
        BlockKind::Unknown
    }

    fn admission<R>(&self, _: &Whole, f: impl FnOnce(&mut Admission) -> R) -> R {
        f(&mut Admission)
    }

    fn refused(&self, _: &Whole, _: Reason) {}

    fn pass(&self, _: &Whole, _: u64, _: &Values) {}

    fn ended(&self, _: &Whole, _: usize, _: Nanos, _: &Ended) {}
}

/// I/O that a thread has to do.
enum Io {
    Read(ShardIo, SlotId, LineId, u32),
    Write(ShardIo, SlotId, Values),
    StoreRead(JobId, u64, u32),
    StoreChange(JobId, u64, StoreOp<Values>),
}

#[derive(Default)]
struct Carried {
    io: Vec<Io>,
    answered: Vec<(Ticket, bool, Option<Ended>)>,
}

impl Effects<Model> for Carried {
    fn flash_read(&mut self, io: ShardIo, slot: SlotId, line: LineId, lines: u32) {
        self.io.push(Io::Read(io, slot, line, lines));
    }

    fn flash_write(&mut self, io: ShardIo, slot: SlotId, _: u32, bytes: Values) {
        self.io.push(Io::Write(io, slot, bytes));
    }

    fn merge(&mut self, _: ShardIo, _: Merge, _: Values) {
        unreachable!("whole lines are written");
    }

    fn load(&mut self, _: ShardIo, _: u32) {
        unreachable!("there is no table");
    }

    fn store_read(&mut self, job: JobId, volume: &Whole, at: u64, len: u32, _: bool) {
        self.io.push(Io::StoreRead(job, volume.base() + at, len));
    }

    fn store_change(&mut self, job: JobId, volume: &Whole, change: StoreOp<Values>) {
        self.io.push(Io::StoreChange(job, volume.base(), change));
    }

    fn deliver(&mut self, ticket: &mut Ticket, at: u64, bytes: Values) {
        for (to, &value) in ticket.got[(at / LINE) as usize..].iter_mut().zip(bytes.each()) {
            assert_eq!(to.replace(value), None, "delivered twice");
        }
    }

    fn answer(&mut self, answer: Answer<Model>) {
        self.answered.push((answer.ticket, answer.outcome.is_ok(), answer.ended));
    }
}

/// One thread's client asks one thing after the other, each of a volume, `depth` at a time; `check` sees what its reads have got.
fn client(
    shared: &Shared,
    (me, depth): (usize, usize),
    ops: Vec<(usize, Op<Values>)>,
    check: impl Fn(usize, Vec<u64>),
) {
    let (mut queue, mut fx) = (queue(me), Carried::default());
    let (mut next, mut left) = (0, ops.len());
    let mut of_second: Vec<usize> = (0..ops.len()).filter(|&n| ops[n].0 == 1).collect();
    while left > 0 {
        if next < ops.len() && next - (ops.len() - left) < depth {
            let (volume, op) = ops[next].clone();
            let volume = shared.volumes[volume].clone();
            let lines = if let Op::Read { len, .. } = op { (len / LINE) as usize } else { 0 };
            let ticket = Ticket { number: next, got: vec![None; lines] };
            let submit = Submit { volume, ticket, op, holds: BlockKind::Unknown };
            queue.submit(shared, shared.now(), &mut fx, submit);
            next += 1;
        }
        queue.take_mail(shared);
        queue.turn(shared, shared.now(), &mut fx);
        for (Ticket { number, got }, done, _) in fx.answered.drain(..) {
            assert!(done);
            left -= 1;
            check(
                number,
                got.into_iter().map(|v| v.expect("an answer behind its bytes")).collect(),
            );
            if of_second.contains(&number) {
                of_second.retain(|n| *n != number);
                if of_second.is_empty() {
                    *shared.left.lock().unwrap() = true;
                    shared.bells[OPERATOR].ring();
                }
            }
        }
        match fx.io.pop() {
            Some(io) => perform(shared, &mut queue, &mut fx, io),
            None if left == 0 || (next < ops.len() && next - (ops.len() - left) < depth) => {}
            None if queue.is_settled() => shared.bells[me].sleep(),
            None => {}
        }
    }
    assert_eq!(queue.under_way(), 0);
}

fn perform(shared: &Shared, queue: &mut Queue<Model>, fx: &mut Carried, io: Io) {
    match io {
        Io::Read(io, slot, line, lines) => {
            let flash = shared.flash.lock().unwrap();
            let values: Vec<u64> =
                (slot.0..slot.0 + lines).map(|slot| flash[&(io.shard, slot)]).collect();
            drop(flash);
            let crcs: Vec<u32> = values.iter().map(|&v| v as u32).collect();
            queue.flash_read(shared, shared.now(), io, line, Ok((&crcs, Values::new(values))));
        }
        Io::Write(io, slot, bytes) => {
            let crcs = shared.write(io.shard, slot, &bytes);
            queue.flash_written(shared, shared.now(), io, Ok(&crcs));
        }
        Io::StoreRead(job, at, len) => {
            let store = shared.store.lock().unwrap();
            let lines = at / LINE..(at + u64::from(len)) / LINE;
            let values = lines.map(|line| store.get(&line).copied().unwrap_or(OLD)).collect();
            drop(store);
            queue.store_read(shared, shared.now(), fx, job, Ok(Values::new(values)));
        }
        Io::StoreChange(job, base, change) => {
            let mut store = shared.store.lock().unwrap();
            let first = |at: u64| (base + at) / LINE;
            match change {
                StoreOp::Write { at, bytes, .. } => {
                    store.extend((first(at)..).zip(bytes.each().iter().copied()));
                }
                StoreOp::Zero { at, len, .. } | StoreOp::Trim { at, len, .. } => {
                    store.extend((first(at)..first(at + len)).map(|line| (line, 0)));
                }
                StoreOp::Flush | StoreOp::Status { .. } => {}
            }
            drop(store);
            queue.store_changed(shared, shared.now(), fx, job, Ok(()));
        }
    }
}

fn read(at: u64, len: u64) -> Op<Values> {
    Op::Read { at, len }
}

fn write(at: u64, value: u64, lines: u64) -> Op<Values> {
    let bytes = Values::new(vec![value; lines as usize]);
    Op::Write { at, len: lines * LINE, bytes, fua: false }
}

/// What one thread reads of what only changes once.
fn falls(last: &Cell<u64>, got: &[u64]) {
    for &value in got {
        assert!(value == OLD || value == 0, "{got:?}");
        assert!(value <= last.get(), "{value} behind {}", last.get());
    }
    last.set(got.iter().copied().min().unwrap_or(OLD).min(last.get()));
}

/// Reads what the other writes, zeroes a range, and uses the second volume for a while.
fn reader(shared: &Shared) {
    let zero = Op::Zero { at: 4 * GROUP, len: 3 * GROUP, fua: false, may_punch: true, fast: false };
    let ops = vec![
        (0, read(0, 2 * LINE)),
        (1, read(GROUP, 2 * LINE)),
        (1, write(3 * GROUP, 5, 2)),
        (0, read(GROUP, LINE)),
        (0, zero),
        (1, read(3 * GROUP, 2 * LINE)),
        (0, read(0, 2 * LINE)),
        (0, Op::Flush),
        (0, read(4 * GROUP, LINE)),
    ];
    client(shared, (0, 2), ops, |number, got| match number {
        0 | 6 => assert!(got.iter().all(|v| [OLD, 1, 2].contains(v)), "{got:?}"),
        1 => assert_eq!(got, [OLD, OLD]),
        5 => assert_eq!(got, [5, 5]),
        _ => {}
    });
}

/// Alone with what it writes; reads of the range, and zeroes another that waits for its turn.
fn writer(shared: &Shared) {
    let last = Cell::new(OLD);
    let ops = vec![
        (0, write(0, 1, 2)),
        (0, read(5 * GROUP, LINE)),
        (0, read(GROUP, LINE)),
        (0, write(0, 2, 2)),
        (0, Op::Trim { at: 8 * GROUP, len: 3 * GROUP, fua: false }),
        (0, read(5 * GROUP, LINE)),
        (0, read(9 * GROUP, 2 * LINE)),
        (0, read(0, 2 * LINE)),
    ];
    client(shared, (1, 1), ops, |number, got| match number {
        1 | 5 => falls(&last, &got),
        7 => assert_eq!(got, [2, 2]),
        _ => {}
    });
}

fn node(prepare: impl FnOnce(&Shared)) {
    let shared = Arc::new(Shared::new());
    prepare(&shared);
    let spawn = |does: fn(&Shared)| {
        let shared = shared.clone();
        shuttle::thread::spawn(move || does(&shared))
    };
    let others = [reader, writer, detach::detach].map(spawn);
    let keeper = Keeper::new(shared.clone());
    let keeping = shuttle::thread::spawn(move || keeper.run());
    others.into_iter().for_each(|thread| thread.join().unwrap());
    // What is under way behind the answers ends, too.
    while maintenance::in_log(&shared, Keeper::unsettled) > 0 {
        shuttle::thread::yield_now();
    }
    shared.leave(|inbox| inbox.stop());
    assert!(keeping.join().unwrap(), "all is durable at the end");
    assert!(shared.volumes.iter().all(|v| v.flags(|f| f.inside) == 0));
    for cell in &shared.shards {
        let (shard, _) = &*cell.lock().unwrap();
        assert_eq!((shard.unsettled(), shard.records_waiting()), (0, 0));
    }
}

#[test]
fn no_wake_up_is_lost_and_no_answer_comes_before_its_bytes() {
    shuttle::check_random(|| node(|_| {}), 300);
    shuttle::check_pct(|| node(|_| {}), 300, 4);
}

/// The checker is checked: a wake-up that is lost is found, as something that waits for ever.
#[cfg(feature = "planted")]
#[test]
fn a_lost_wake_up_is_found() {
    use larder_engine::block::node::maintenance::InboxFault;
    for fault in
        [InboxFault::NobodyIsWoken, InboxFault::SleepsWithoutALook, InboxFault::TaskIsNotDue]
    {
        let faulty = move || {
            let plant = move |shared: &Shared| shared.inbox.lock().unwrap().plant(fault);
            shuttle::check_random(move || node(plant), 300);
        };
        let found = std::panic::catch_unwind(faulty).expect_err("a lost wake-up is not found");
        let text = found.downcast_ref::<String>().cloned().unwrap_or_default();
        assert!(text.contains("deadlock"), "{fault:?}: {text}");
    }
}

/// One queue alone, whose I/O is done when the test says so.
struct Alone {
    shared: Arc<Shared>,
    keeper: Keeper,
    queue: Queue<Model>,
    fx: Carried,
    volume: Whole,
    next: usize,
}

impl Alone {
    fn new() -> Alone {
        let (shared, fx) = (Arc::new(Shared::new()), Carried::default());
        let (keeper, volume) = (Keeper::new(shared.clone()), shared.volumes[0].clone());
        Alone { shared, keeper, queue: queue(0), fx, volume, next: 0 }
    }

    fn submit(&mut self, op: Op<Values>) {
        let lines = if let Op::Read { len, .. } = op { (len / LINE) as usize } else { 0 };
        let ticket = Ticket { number: self.next, got: vec![None; lines] };
        self.next += 1;
        let submit = Submit { volume: self.volume.clone(), ticket, op, holds: BlockKind::Unknown };
        let now = self.shared.now();
        self.queue.submit(&*self.shared, now, &mut self.fx, submit);
        self.turn();
    }

    fn turn(&mut self) {
        self.queue.take_mail(&*self.shared);
        self.queue.turn(&*self.shared, self.shared.now(), &mut self.fx);
    }

    /// Does all I/O, maintenance's too.
    fn settle(&mut self) {
        loop {
            while let Some(io) = self.fx.io.pop() {
                perform(&self.shared, &mut self.queue, &mut self.fx, io);
                self.turn();
            }
            if !self.keeper.step() {
                return;
            }
            self.turn();
        }
    }

    /// Numbers of what was answered, whether it was done, and whether it is a hit.
    fn answered(&mut self) -> Vec<(usize, bool, bool)> {
        let said = self.fx.answered.drain(..);
        said.map(|(t, done, ended)| (t.number, done, ended.is_some_and(|e| e.hit))).collect()
    }
}

fn one_queue() {
    let mut alone = Alone::new();
    // A volume that is detached or lost is refused, whatever is asked.
    for state in [State::Detached, State::Lost] {
        alone.volume.flags(|f| f.state = state);
        alone.submit(read(0, LINE));
        alone.submit(Op::Flush);
        assert!(alone.answered().iter().all(|a| !a.1) && alone.fx.io.is_empty());
    }
    // One that moves is waited for; a flush of it is not.
    alone.volume.flags(|f| (f.state, f.moves) = (State::Served, true));
    alone.submit(read(0, LINE));
    alone.submit(Op::Flush);
    alone.settle();
    assert_eq!(alone.answered(), [(5, true, false)]);
    alone.volume.flags(|f| f.moves = false);
    alone.queue.tick(&*alone.shared, alone.shared.now(), &mut alone.fx);
    alone.turn();
    // Who joins another's fetch has waited for the store, as the other has; what is on its way to flash then, or there, is a hit.
    alone.submit(read(0, LINE));
    assert_eq!(alone.volume.flags(|f| f.inside), 2);
    let Some(fetch) = alone.fx.io.pop() else { panic!("no fetch") };
    assert!(alone.fx.io.is_empty(), "one fetch for both");
    perform(&alone.shared, &mut alone.queue, &mut alone.fx, fetch);
    alone.turn();
    assert_eq!(alone.answered(), [(4, true, false), (6, true, false)]);
    alone.submit(read(0, LINE));
    assert_eq!(alone.answered(), [(7, true, true)]);
    alone.settle();
    alone.submit(read(0, LINE));
    alone.settle();
    assert_eq!(alone.answered(), [(8, true, true)]);
    assert_eq!(alone.volume.flags(|f| f.inside), 0);
    // A flush is not answered before what the store may have lost is out of the cache.
    alone.volume.flags(|f| f.losses = 1);
    alone.submit(Op::Flush);
    alone.settle();
    alone.queue.tell(&*alone.shared, &mut alone.fx);
    assert!(alone.answered().is_empty());
    alone.volume.flags(|f| f.settled = 1);
    alone.queue.tell(&*alone.shared, &mut alone.fx);
    assert_eq!(alone.answered(), [(9, true, false)]);
}

#[test]
fn what_is_refused_what_waits_and_what_is_a_hit() {
    shuttle::check_random(one_queue, 1);
}
