//! Markers are looked at before anything comes to the stores: by who was paused for long, and by who hears nothing of them.

use std::path::Path;

use larder_engine::block::node::logged::tell_log;
use larder_format::Uuid;
use larder_format::block::marker::{Marker, choose};
use larder_policy::block::BlockKind;
use larder_volume::marker::memory::MemoryMarker;
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace};

use super::back::{builder, ordered};
use super::*;
use crate::block::back::{Pace, Patient};
use crate::block::open::open_by_hand;
use crate::block::service::Command;
use crate::block::{ByHand, Running};

/// A cache without threads, whose time is given, and a volume that writes back. Nothing comes to its store before it is asked for.
fn by_hand(dir: &TempDir) -> (Running, Arc<Volume>) {
    let path = dir.path().join("disk");
    File::create(&path).unwrap().set_len(8 << 20).unwrap();
    let mut config = format_config(dir, SHAPE, 192 << 20);
    config.write_log = Some(ByteSize::mib(96));
    open::format(&config, [3; 32], UnixSecs(1)).unwrap();
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    let store = backing::open_with(&uri, &OpenOptions::default()).unwrap();
    let disk = Arc::new(Volume::new("disk", store, SHAPE.line, true));
    let mut config = CacheConfig::new(dir.path().join("state"));
    config.back.insert("disk".to_owned(), ordered(Pace::AtBound));
    let by = ByHand::Given { now: Nanos::ZERO, random: 1 };
    let cache = dir.path().join("cache");
    let running = open_by_hand(&cache, config, std::slice::from_ref(&disk), by).unwrap();
    (running, disk)
}

fn turns(running: &Running) {
    for _ in 0..50 {
        running.turn().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether it ended well.
fn ends(running: &Running, disk: &Arc<Volume>, command: Command) -> bool {
    let core = running.cache();
    core.with_lane(|lane| lane.submit(disk, 1, command, BlockKind::Unknown)).unwrap();
    for _ in 0..10_000 {
        running.turn().unwrap();
        if let Some(answer) = core.with_lane(|lane| lane.pop()).unwrap() {
            return answer.outcome.is_ok();
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("it is never answered");
}

fn write(byte: u8) -> Command {
    let mut buf = AlignedBuf::zeroed(4096);
    buf.fill(byte);
    Command::Write { offset: 0, buf, fua: true }
}

fn put(dir: &Path, marker: &Marker) {
    std::fs::write(dir.join("disk.larder"), [marker.encode(), marker.encode()].concat()).unwrap();
}

#[test]
fn who_was_paused_while_another_took_its_store_writes_nothing_there() {
    let dir = TempDir::new().unwrap();
    let (running, disk) = by_hand(&dir);
    let core = running.cache().clone();
    assert!(ends(&running, &disk, write(1)));
    let bytes = std::fs::read(dir.path().join("disk.larder")).unwrap();
    let was = choose(&bytes[..4096], &bytes[4096..8192]).unwrap().marker;
    let store = || std::fs::read(dir.path().join("disk")).unwrap()[0];
    let drain = |drains| {
        let of = core.volume("disk").unwrap().attachment().unwrap();
        tell_log(&*core, core.now(), |log, asks| log.drain(of, drains, asks));
    };
    // Nothing is done for a minute, and then what is due.
    let other = Marker { cache: Uuid([9; 16]), host: "there".into(), ..was.clone() };
    put(dir.path(), &Marker { number: was.number + 5, ..other });
    core.set_now(core.now() + Nanos::from_secs(60));
    drain(true);
    turns(&running);
    assert_eq!(store(), 0, "it is another's");
    let told = core.back_status("disk").unwrap().troubles.join("; ");
    assert!(told.contains("on host 'there'"), "{told}");
    assert!(!ends(&running, &disk, write(2)));
    // It is its own again.
    put(dir.path(), &was);
    core.set_now(core.now() + Nanos::from_secs(60));
    turns(&running);
    assert_eq!(store(), 1);
    drain(false);
}

/// Who looks waits while the flag is set.
struct Deaf(Box<dyn MarkerPlace>, Arc<AtomicBool>);

impl MarkerPlace for Deaf {
    fn read(&mut self) -> Result<Found, MarkerIoError> {
        self.look()
    }
    fn look(&mut self) -> Result<Found, MarkerIoError> {
        while self.1.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.0.look()
    }
    fn write(&mut self, marker: &Marker) -> Result<(), MarkerIoError> {
        self.0.write(marker)
    }
    fn remove(&mut self) -> Result<(), MarkerIoError> {
        self.0.remove()
    }
    fn is_fenced(&self) -> bool {
        self.0.is_fenced()
    }
    fn describe(&self) -> String {
        self.0.describe()
    }
}

#[test]
fn nothing_comes_to_a_store_while_the_place_of_its_marker_does_not_answer() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let deaf = Arc::new(AtomicBool::new(false));
    let core = cache.core();
    let attachment = core.volume("disk").unwrap().attachment().unwrap();
    let written = core.back.get().unwrap().written(attachment).unwrap();
    let mut place = locked(written.place.as_ref().unwrap());
    let own = std::mem::replace(&mut *place, MemoryMarker::new().open(true));
    let own = Box::new(Deaf(own, deaf.clone()));
    *place = Box::new(Patient::new(own, Duration::from_secs(3)));
    drop(place);
    cache.volume("disk").unwrap().write(0, [1; 4096]).wait().unwrap();
    deaf.store(true, Ordering::SeqCst);
    // What was seen last is too old by then.
    std::thread::sleep(Duration::from_secs(4));
    // It may be there again at any time: whoever wants it to be destaged waits as long as he likes.
    let begun = std::time::Instant::now();
    let mut waits = |_| begun.elapsed() < Duration::from_secs(5);
    let why = core.destage("disk", &mut waits).unwrap_err().to_string();
    assert!(begun.elapsed() >= Duration::from_secs(5), "{why}");
    assert!(why.contains("nothing more comes to the store before it has answered"), "{why}");
    assert_eq!(std::fs::read(dir.path().join("disk")).unwrap()[0], 0);
    // Clients go on meanwhile, and all comes there when it answers.
    cache.volume("disk").unwrap().write(4096, [2; 4096]).wait().unwrap();
    deaf.store(false, Ordering::SeqCst);
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while !core.destage("disk", &mut |_| true).unwrap_or(false) {
        assert!(std::time::Instant::now() < until, "{:?}", core.back_status("disk"));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(std::fs::read(dir.path().join("disk")).unwrap()[4096], 2);
}
