//! A marker whose place does not answer: its volume hears of that in time, and nobody else of it at all.

use std::path::Path;
use std::sync::mpsc;

use larder_format::block::marker::{Marker, MarkerState, choose};
use larder_volume::marker::memory::MemoryMarker;
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace};

use super::back::{builder, ordered};
use super::*;
use crate::block::Cache;
use crate::block::back::{Pace, Patient};

/// A place as on a file server that is away: what was read is known, and who writes waits.
struct Blocks {
    place: Box<dyn MarkerPlace>,
    blocked: Arc<AtomicBool>,
}

impl MarkerPlace for Blocks {
    fn read(&mut self) -> Result<Found, MarkerIoError> {
        self.place.read()
    }
    fn look(&mut self) -> Result<Found, MarkerIoError> {
        self.place.look()
    }
    fn write(&mut self, marker: &Marker) -> Result<(), MarkerIoError> {
        while self.blocked.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.place.write(marker)
    }
    fn remove(&mut self) -> Result<(), MarkerIoError> {
        self.place.remove()
    }
    fn is_fenced(&self) -> bool {
        self.place.is_fenced()
    }
    fn describe(&self) -> String {
        self.place.describe()
    }
}

/// It answers again when this is dropped, whatever has become of the test.
struct Answers(Arc<AtomicBool>);

impl Drop for Answers {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

const PATIENCE: Duration = Duration::from_secs(3);
/// Nothing that does not hang takes so long.
pub(super) const AT_MOST: Duration = Duration::from_secs(60);

/// Two volumes that write back; the marker of the first blocks who writes it while the flag is set.
fn two(dir: &Path) -> (Cache, Arc<AtomicBool>) {
    let more = dir.join("more");
    File::create(&more).unwrap().set_len(8 << 20).unwrap();
    let builder = builder(dir, Some(ordered(Pace::AtBound)));
    let builder = builder.volume("more", &format!("file:{}", more.display())).unwrap();
    let cache = builder.write_back("more", ordered(Pace::AtBound)).open().unwrap();
    let blocked = Arc::new(AtomicBool::new(false));
    let back = cache.core().back.get().unwrap();
    let written = back.written(cache.core().volume("disk").unwrap().attachment().unwrap()).unwrap();
    let mut place = locked(written.place.as_ref().unwrap());
    let own = std::mem::replace(&mut *place, MemoryMarker::new().open(true));
    let blocks = Blocks { place: own, blocked: blocked.clone() };
    *place = Box::new(Patient::new(Box::new(blocks), PATIENCE));
    drop(place);
    (cache, blocked)
}

fn marker(dir: &Path) -> Marker {
    let bytes = std::fs::read(dir.join("disk.larder")).unwrap();
    choose(&bytes[..4096], &bytes[4096..8192]).unwrap().marker
}

/// What comes of `f`, which must not hang.
pub(super) fn in_time<R: Send>(what: &str, f: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        scope.spawn(move || {
            let _ = tell.send(f());
        });
        told.recv_timeout(AT_MOST).unwrap_or_else(|_| {
            eprintln!("{what} hangs");
            std::process::abort();
        })
    })
}

#[test]
fn a_marker_that_cannot_be_written_holds_up_no_other_volume_and_its_own_hears_where_and_how_long() {
    let dir = TempDir::new().unwrap();
    let (cache, blocked) = two(dir.path());
    let _answers = Answers(blocked.clone());
    for name in ["disk", "more"] {
        cache.volume(name).unwrap().write(0, [1; 4096]).wait().unwrap();
    }
    blocked.store(true, Ordering::SeqCst);
    let core = cache.core();
    // The thread that looks at it each second is in the call, or has heard that it does not answer.
    // (What is dirty comes to the store, and the marker cannot be told so.)
    let why = in_time("a flush", || core.destage("disk", &mut |_| true)).unwrap_err().to_string();
    assert!(why.contains("all of it is in its store") && why.contains("disk.larder"), "{why}");
    in_time("a look", || core.look_at_marker(&core.volume("disk").unwrap(), true));
    let told = core.back_status("disk").unwrap().troubles.join("; ");
    assert!(told.contains("disk.larder") && told.contains("has not answered for"), "{told}");
    let why = in_time("a detach", || cache.detach("disk", &mut |_| true)).unwrap_err().to_string();
    assert!(why.contains("disk.larder") && why.contains("has not answered for"), "{why}");
    // Others have not waited for it.
    let begun = Instant::now();
    assert!(in_time("a flush", || core.destage("more", &mut |_| true)).unwrap());
    assert!(in_time("a detach", || cache.detach("more", &mut |_| true)).unwrap());
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(core.back_status("disk").unwrap().closed, None);
    in_time("a stop", || drop(cache));
    assert_eq!(marker(dir.path()).state, MarkerState::Dirty);
}

/// Whatever was tried may be there when the place answers again.
#[test]
fn a_volume_that_stays_takes_no_writes_before_its_marker_says_again_that_it_writes_back() {
    let dir = TempDir::new().unwrap();
    let (cache, blocked) = two(dir.path());
    let _answers = Answers(blocked.clone());
    let core = cache.core();
    for keep_dirty in [false, true] {
        let disk = cache.volume("disk").unwrap();
        disk.write(0, [1; 4096]).wait().unwrap();
        drop(disk);
        assert!(core.destage("disk", &mut |_| true).unwrap());
        blocked.store(true, Ordering::SeqCst);
        // It is looked at, and then it does not answer.
        let gone = in_time("a detach", || match keep_dirty {
            true => cache.detach_dirty("disk", &mut |_| true),
            false => cache.detach("disk", &mut |_| true),
        });
        let why = gone.unwrap_err().to_string();
        assert!(why.contains("disk.larder") && why.contains("has not answered for"), "{why}");
        let disk = cache.volume("disk").unwrap();
        in_time("a write", || disk.write(4096, [2; 4096]).wait()).unwrap_err();
        assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 1));
        let told = core.back_status("disk").unwrap().troubles.join("; ");
        assert!(told.contains("its writes fail"), "{told}");
        assert_eq!(core.back_status("disk").unwrap().closed, None);
        cache.volume("more").unwrap().write(0, [3; 4096]).wait().unwrap();
        blocked.store(false, Ordering::SeqCst);
        let until = Instant::now() + AT_MOST;
        while disk.write(4096, [2; 4096]).wait().is_err() {
            assert!(Instant::now() < until, "its changes are not logged again");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(marker(dir.path()).state, MarkerState::Dirty);
        let troubles = core.back_status("disk").unwrap().troubles;
        assert!(troubles.is_empty(), "{troubles:?}");
    }
    assert!(core.destage("disk", &mut |_| true).unwrap());
    assert!(cache.detach("disk", &mut |_| true).unwrap());
    assert_eq!(marker(dir.path()).state, MarkerState::Clean);
}
