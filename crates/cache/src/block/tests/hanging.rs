//! A store that hangs holds up nobody but who wants something of it.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::mpsc;

use larder_engine::block::node::calls::Calls as _;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::block::back::{BackConfig, BackWish, MarkerAt};
use larder_volume::op::{Failure, FailureKind};
use larder_volume::{BackingError, Capabilities, Flushing, Identity, Session};

pub(super) const BYTES: u64 = 1 << 20;

/// Whether it hangs, and who has noticed.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) hangs: AtomicBool,
    /// Operations wait for it, or somebody who looks at it.
    pub(super) waits: AtomicBool,
    looks: AtomicBool,
    /// It cannot be made durable.
    pub(super) fails: AtomicBool,
    /// Losses of its.
    pub(super) losses: AtomicU64,
    /// Operations that it was asked for, and those that have ended.
    pub(super) asked: AtomicU64,
    pub(super) ended: AtomicU64,
}

impl State {
    /// Waits until the flag is set. (It takes that long only if it never is.)
    pub(super) fn seen(flag: &AtomicBool) {
        let until = Instant::now() + Duration::from_secs(120);
        while !flag.load(Ordering::SeqCst) {
            assert!(Instant::now() < until, "it was not seen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The store goes on when this is dropped, whatever has become of the test.
pub(super) struct GoesOn(pub(super) Arc<State>);

impl Drop for GoesOn {
    fn drop(&mut self) {
        self.0.hangs.store(false, Ordering::SeqCst);
    }
}

/// A store of zeros.
#[derive(Debug)]
pub(super) struct Hanging(pub(super) Arc<State>);

impl Backing for Hanging {
    fn uri(&self) -> &str {
        "nbd://hanging"
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            size: BYTES,
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
        Ok(Identity::Blind { name: self.uri().into(), size: BYTES })
    }
    fn resize(&self, _: Option<u64>) -> Result<u64, BackingError> {
        Ok(BYTES)
    }
    fn look(&self) -> u64 {
        while self.0.hangs.load(Ordering::SeqCst) {
            self.0.looks.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
        0
    }
    fn losses(&self) -> u64 {
        self.0.losses.load(Ordering::SeqCst)
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        Ok(Box::new(Waits { state: self.0.clone(), ended: Vec::new(), event }))
    }
}

struct Waits {
    state: Arc<State>,
    ended: Vec<Done>,
    event: OwnedFd,
}

impl Session for Waits {
    fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
    fn submit(&mut self, token: u64, op: Op) {
        let fails = matches!(op, Op::Flush) && self.state.fails.load(Ordering::SeqCst);
        let failed = || Failure::new(FailureKind::Failed, "a test");
        let outcome = if fails { Err(failed()) } else { Ok(Vec::new()) };
        self.state.asked.fetch_add(1, Ordering::SeqCst);
        self.ended.push(Done { token, op, outcome });
    }
    fn flush(&mut self, _: Instant) {}
    fn turn(&mut self, _: Instant) {}
    fn pop(&mut self) -> Option<Done> {
        if self.state.hangs.load(Ordering::SeqCst) {
            self.state.waits.fetch_or(!self.ended.is_empty(), Ordering::SeqCst);
            return None;
        }
        let done = self.ended.pop()?;
        self.state.ended.fetch_add(1, Ordering::SeqCst);
        Some(done)
    }
    fn in_flight(&self) -> usize {
        self.ended.len()
    }
    fn wake_at(&self) -> Option<Instant> {
        (!self.ended.is_empty()).then(|| Instant::now() + Duration::from_millis(1))
    }
}

/// A cache with a volume whose store can hang, and one in a file.
pub(super) fn beside_another() -> (Bench, Arc<State>) {
    let shape = Shape { volumes: 2, ..SHAPE };
    let whole = bench(&[BYTES, 64 << 20], 64 << 20, shape);
    let dir = whole.dir.clone();
    drop(whole);
    let (volumes, state) = (Arc::new(Volumes::default()), Arc::new(State::default()));
    let uri: Uri = format!("file:{}", dir.path().join("disk1").display()).parse().unwrap();
    let options = OpenOptions { watch: false, ..OpenOptions::default() };
    let file = backing::open_with(&uri, &options).unwrap();
    volumes.add(Volume::new("hanging", Box::new(Hanging(state.clone())), 4096, true)).unwrap();
    volumes.add(Volume::new("disk1", file, 4096, true)).unwrap();
    (serve(dir, shape, volumes).unwrap(), state)
}

/// A request of a store that hangs keeps its volume from being detached. Another volume's lines are dropped, and it is detached.
#[test]
fn a_store_that_hangs_holds_up_no_work_on_another_volume() {
    let (bench, state) = beside_another();
    let _goes_on = GoesOn(state.clone());
    state.hangs.store(true, Ordering::SeqCst);
    let client = bench.server.as_ref().unwrap().client("hanging");
    let mut session = client.session().unwrap();
    session.submit(1, read(0, 4096));
    session.flush(Instant::now());
    State::seen(&state.waits);
    drop((session, client));
    let (draining, drains) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let (first, second) = (bench.cache.clone(), bench.cache.clone());
    let hanging = std::thread::spawn(move || {
        first.detach("hanging", true, &mut |how| {
            if how == Detaching::Draining {
                let _ = draining.send(());
            }
            true
        })
    });
    drains.recv_timeout(Duration::from_secs(120)).unwrap();
    let other = std::thread::spawn(move || {
        let dropped = second.drop_lines("disk1", None, &mut || true);
        let detached = second.detach("disk1", true, &mut |_| true);
        let _ = tell.send((dropped, detached));
    });
    // (Where it is held up it ends when the store goes on.)
    let said = told.recv_timeout(Duration::from_secs(60));
    assert!(!hanging.is_finished(), "the store hangs still");
    state.hangs.store(false, Ordering::SeqCst);
    other.join().unwrap();
    assert!(hanging.join().unwrap().unwrap().is_some(), "the store goes on");
    let (dropped, detached) = said.expect("the other volume waits for a store that is not its own");
    assert_eq!((dropped.unwrap(), detached.unwrap().is_some()), (Some(0), true));
}

/// Who looks at a store that hangs does not come back. What was trimmed of another volume is taken out of the map, and lines are counted.
#[test]
fn a_store_that_hangs_does_not_hold_up_sweep_and_count() {
    let (bench, state) = beside_another();
    let _goes_on = GoesOn(state.clone());
    state.hangs.store(true, Ordering::SeqCst);
    State::seen(&state.looks);
    let client = bench.server.as_ref().unwrap().client("disk1");
    let mut session = client.session().unwrap();
    for at in 0..16 {
        one(&mut *session, write(at << 20, 1 << 20, 7)).outcome.unwrap();
    }
    bench.settle();
    let volume = bench.cache.attached("disk1").unwrap();
    let until = Instant::now() + Duration::from_secs(120);
    let waits_for = |what: &dyn Fn() -> bool| {
        while !what() {
            assert!(Instant::now() < until, "nothing is swept or counted while a store hangs");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let lines = bench.cache.count_lines();
    waits_for(&|| volume.lines() == lines && lines > 0);
    let trim = Op::Trim { offset: 0, len: 64 << 20, fua: false };
    one(&mut *session, trim).outcome.unwrap();
    let wants = |shard| bench.cache.shard(shard, |shard, _| shard.wants_sweep());
    waits_for(&|| !(0..bench.cache.layout.shards).any(wants));
    waits_for(&|| volume.lines() == 0);
}

/// Somebody waits for a flush that does not end. The volume is detached all the same, then nobody waits for its store any more, and
/// what is asked of the cache meanwhile is answered.
#[test]
fn a_flush_that_hangs_holds_up_no_detach() {
    let (bench, state) = beside_another();
    let _goes_on = GoesOn(state.clone());
    state.hangs.store(true, Ordering::SeqCst);
    let volume = bench.cache.attached("hanging").unwrap();
    // As an attach does, and who takes a cache back: it waits for 120 s.
    let flushing = std::thread::spawn(move || volume.make_durable());
    State::seen(&state.waits);
    let (tell, told) = mpsc::channel();
    let cache = bench.cache.clone();
    let detaching = std::thread::spawn(move || {
        let stats = cache.stats();
        let other = cache.detach("disk1", true, &mut |_| true);
        let hanging = cache.detach("hanging", true, &mut |_| false);
        let _ = tell.send((stats.enabled, other, hanging));
    });
    // (Where it is held up it ends when the store goes on.)
    let said = told.recv_timeout(Duration::from_secs(60));
    let hangs = state.hangs.swap(false, Ordering::SeqCst);
    detaching.join().unwrap();
    let (enabled, other, hanging) = said.expect("a detach waits for a flush that hangs");
    assert!(hangs && enabled);
    assert!(other.unwrap().is_some() && hanging.unwrap().is_some());
    assert!(flushing.join().unwrap().is_err(), "nobody knows whether it is durable");
}

/// The store does not become durable, for which it has two minutes: a volume that changes over to be written back, or through, waits for that.
#[test]
fn who_has_a_volume_change_over_is_heard_while_its_store_does_not_become_durable() {
    let dir = TempDir::new().unwrap();
    let cache = super::back::builder(dir.path(), Some(BackConfig::default())).open().unwrap();
    let state = Arc::new(State::default());
    let _goes_on = GoesOn(state.clone());
    let marker = MarkerAt::At(dir.path().join("hanging.marker").display().to_string());
    let back = BackWish { back: Some(BackConfig::default()), marker, ..BackWish::default() };
    let through = BackWish::default();
    cache.attach_as("hanging", Box::new(Hanging(state.clone())), &through).unwrap();
    let core = cache.core();
    for wish in [&back, &through] {
        let writes_back = || core.back_status("hanging").is_some();
        let before = writes_back();
        state.hangs.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        let mut go_on = |_| begun.elapsed() < Duration::from_secs(1);
        assert!(!core.change_over("hanging", wish, &mut go_on).unwrap());
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
        assert_eq!(writes_back(), before, "it is as it was");
        state.hangs.store(false, Ordering::SeqCst);
        assert!(core.change_over("hanging", wish, &mut |_| true).unwrap());
        assert_eq!(writes_back(), !before);
    }
}

/// Before its lines are locked other operators go on; who asked for it is heard all the while, and ends it.
#[test]
fn a_cache_that_waits_for_a_store_to_be_taken_back_keeps_nobody_and_ends_when_nobody_waits() {
    use crate::block::TakingBack;
    let (bench, state) = beside_another();
    let _goes_on = GoesOn(state.clone());
    super::ends::give_up(&bench.cache);
    state.hangs.store(true, Ordering::SeqCst);
    let mut heard = Vec::new();
    let begun = Instant::now();
    let done = bench.cache.take_back_while(&mut |now| {
        heard.push(now.clone());
        if let TakingBack::Store(_) = now {
            // Another operator has it at once.
            assert!(bench.cache.changing().try_volume("other").is_some());
        }
        !matches!(now, TakingBack::Store(_))
    });
    assert!(!done.unwrap() && !bench.cache.is_enabled());
    assert!(matches!(heard.last(), Some(TakingBack::Store(_))), "{heard:?}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    state.hangs.store(false, Ordering::SeqCst);
    bench.cache.take_back().unwrap();
    assert!(bench.cache.is_enabled());
}
