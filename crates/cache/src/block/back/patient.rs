//! The place of a marker that may hang.
//!
//! A file on another host's file system can keep whoever reads or writes it waiting until that host is there again, and no signal ends that. So no thread
//! of the cache, of a client or of an operator is ever in such a call, nor a start: each is made by a thread of its own, and who asks waits for [`PATIENCE`],
//! also for a place to be [opened](Asking::open). After that
//! the place is away with that thread, and whoever asks hears at once where the marker is, and for how long it has not answered. What was to be written may
//! be there later: it is as with a write that has failed.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use larder_engine::block::writeback::marker::ANSWERS;
use larder_format::block::marker::Marker;
use larder_runtime::RingChoice;
use larder_volume::Backing;
use larder_volume::marker::{
    Found, MarkerIoError, MarkerPlace, NamedPlace, PlaceOptions, Unopened,
};

use super::super::attended::{is_attended, is_unwanted};
use super::super::locked;
use super::super::open::CacheConfig;
use super::super::operators::LOOK;

/// For one call.
pub(super) const PATIENCE: Duration = Duration::from_nanos(ANSWERS.0);

const ENDED: &str = "the thread that asked it has ended";

type Inner = Box<dyn MarkerPlace>;

/// Who opens the places of markers, and asks them.
#[derive(Clone, Copy, Debug)]
pub(in crate::block) enum Asking {
    /// A thread of its own for each call; it is waited for so long at most.
    AtMost(Duration),
    /// Whoever calls: a program without threads.
    Itself,
}

impl Asking {
    /// As it is for a cache with these settings.
    pub(in crate::block) fn of(config: &CacheConfig) -> Asking {
        match config.ring {
            RingChoice::Caller => Asking::Itself,
            _ => Asking::AtMost(PATIENCE),
        }
    }

    /// Opens the place of a store's marker, whose calls then are bounded as this is.
    ///
    /// # Errors
    /// As of [`larder_volume::marker::marker_place`], and [`MarkerIoError::Unreachable`] where opening it takes longer, or a call from before is under way
    /// yet: whoever tries again and again takes no more threads for that.
    pub(in crate::block) fn open(
        self,
        store: &dyn Backing,
        options: &PlaceOptions,
    ) -> Result<Box<dyn MarkerPlace>, MarkerIoError> {
        let unopened = Unopened::of(store, options);
        let Asking::AtMost(patience) = self else { return unopened.open() };
        let at = unopened.describe();
        if let Some((since, _)) = locked(&SILENT).get(&at) {
            return Err(silent(&at, patience, *since));
        }
        let opened_as = at.clone();
        let open = move || {
            let place = unopened.open()?;
            Ok(Patient::opened(place, patience, opened_as))
        };
        let failed = |reason| MarkerIoError::Failed { place: at.clone(), reason };
        let asked = Asked::on_a_thread(&at, open);
        let asked = asked.map_err(|e| failed(no_thread(&e)))?;
        match asked.wait(patience, true) {
            Ok(opened) => Ok(Box::new(opened?)),
            Err(RecvTimeoutError::Timeout) => Err(silent(&at, patience, asked.begun)),
            Err(RecvTimeoutError::Disconnected) => Err(failed(ENDED.to_owned())),
        }
    }
}

/// Places with calls that nobody waits for any more, by what they were called when they were opened: since when, and how many calls.
static SILENT: Mutex<BTreeMap<String, (Instant, usize)>> = Mutex::new(BTreeMap::new());

/// A call on a thread of its own.
struct Asked<T> {
    begun: Instant,
    told: Receiver<T>,
    call: Arc<Mutex<Call>>,
    at: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    UnderWay,
    /// Nobody waits for it.
    Late,
    Ended,
}

/// A call is under way until this goes.
struct Ends(Arc<Mutex<Call>>, String);

impl Drop for Ends {
    fn drop(&mut self) {
        let mut call = locked(&self.0);
        if std::mem::replace(&mut *call, Call::Ended) != Call::Late {
            return;
        }
        let mut all = locked(&SILENT);
        let left = all.get_mut(&self.1).map_or(0, |(_, calls)| {
            *calls -= 1;
            *calls
        });
        if left == 0 {
            all.remove(&self.1);
        }
    }
}

impl<T: Send + 'static> Asked<T> {
    /// Of the place that was opened as `at`.
    fn on_a_thread(at: &str, act: impl FnOnce() -> T + Send + 'static) -> io::Result<Asked<T>> {
        let (tell, told) = mpsc::channel();
        let call = Arc::new(Mutex::new(Call::UnderWay));
        let ends = Ends(call.clone(), at.to_owned());
        let run = move || {
            // It goes last: what nobody waits for any more is gone by then.
            let _ends = ends;
            // Who has asked may have gone.
            let _ = tell.send(act());
        };
        let begun = Instant::now();
        std::thread::Builder::new().name("block-marker".into()).spawn(run)?;
        Ok(Asked { begun, told, call, at: at.to_owned() })
    }

    /// What came of it; nobody waits for it after that. `may_end`: nor once that is unwanted.
    fn wait(&self, patience: Duration, may_end: bool) -> Result<T, RecvTimeoutError> {
        let mut left = patience;
        let said = loop {
            let step = if may_end && is_attended() { left.min(LOOK) } else { left };
            let said = self.told.recv_timeout(step);
            left -= step;
            let waits = matches!(said, Err(RecvTimeoutError::Timeout)) && !left.is_zero();
            if !waits || is_unwanted() {
                break said;
            }
        };
        if said.is_err() {
            let mut call = locked(&self.call);
            if *call == Call::UnderWay {
                *call = Call::Late;
                let mut all = locked(&SILENT);
                all.entry(self.at.clone()).or_insert((self.begun, 0)).1 += 1;
            }
        }
        said
    }
}

/// It has been asked since then.
fn silent(at: &str, patience: Duration, since: Instant) -> MarkerIoError {
    // (Told anew when it has become twice as long.)
    let (least, elapsed) = (patience.as_secs(), since.elapsed().as_secs());
    let seconds = match elapsed.checked_div(least) {
        Some(times @ 1..) => least << times.ilog2(),
        _ => elapsed,
    };
    let reason = format!(
        "it has not answered for {seconds} s or more: see to the file system or server that it is on"
    );
    MarkerIoError::Unreachable { place: at.to_owned(), reason }
}

fn no_thread(error: &io::Error) -> String {
    format!("no thread to ask it: {error}")
}

/// See the [module](self).
pub(in crate::block) struct Patient {
    at: String,
    /// What it was called when it was opened.
    opened_as: String,
    fenced: bool,
    /// What the store says of it, as of when it was opened.
    named: Option<NamedPlace>,
    patience: Duration,
    place: Where,
}

enum Where {
    Here(Inner),
    /// A thread has it since then, and gives it back.
    Away(Instant, Receiver<Inner>),
    /// Its thread has panicked.
    Lost,
}

impl Patient {
    /// `place`, whose calls take `patience` at most.
    #[cfg(test)]
    pub(in crate::block) fn new(place: Inner, patience: Duration) -> Patient {
        let at = place.describe();
        Patient::opened(place, patience, at)
    }

    fn opened(place: Inner, patience: Duration, opened_as: String) -> Patient {
        let (at, fenced, named) = (place.describe(), place.is_fenced(), place.named_by_store());
        Patient { at, opened_as, fenced, named, patience, place: Where::Here(place) }
    }

    fn failed(&self, reason: String) -> MarkerIoError {
        MarkerIoError::Failed { place: self.at.clone(), reason }
    }

    /// The place, if it is not away.
    fn take(&mut self) -> Result<Inner, MarkerIoError> {
        match std::mem::replace(&mut self.place, Where::Lost) {
            Where::Here(place) => Ok(place),
            Where::Lost => Err(self.failed(ENDED.to_owned())),
            Where::Away(since, back) => match back.try_recv() {
                Ok(place) => Ok(place),
                Err(TryRecvError::Disconnected) => Err(self.failed(ENDED.to_owned())),
                Err(TryRecvError::Empty) => {
                    self.place = Where::Away(since, back);
                    Err(silent(&self.at, self.patience, since))
                }
            },
        }
    }

    /// `changes`: it is not broken off.
    fn ask<T: Send + 'static>(
        &mut self,
        changes: bool,
        act: impl FnOnce(&mut dyn MarkerPlace) -> Result<T, MarkerIoError> + Send + 'static,
    ) -> Result<T, MarkerIoError> {
        // It is here still where there is no thread to be had.
        let here = Arc::new(Mutex::new(Some(self.take()?)));
        let (give, back) = mpsc::channel();
        let taken = here.clone();
        let run = move || {
            let mut place = locked(&taken).take()?;
            let said = act(&mut *place);
            // (Before it is told: then it is here again.)
            let _ = give.send(place);
            Some(said)
        };
        self.place = Where::Away(Instant::now(), back);
        let asked = match Asked::on_a_thread(&self.opened_as, run) {
            Ok(asked) => asked,
            Err(error) => {
                self.place = locked(&here).take().map_or(Where::Lost, Where::Here);
                return Err(self.failed(no_thread(&error)));
            }
        };
        match asked.wait(self.patience, !changes) {
            Ok(Some(said)) => {
                let place = self.take()?;
                self.fenced = place.is_fenced();
                self.place = Where::Here(place);
                said
            }
            Err(RecvTimeoutError::Timeout) => Err(silent(&self.at, self.patience, asked.begun)),
            Ok(None) | Err(RecvTimeoutError::Disconnected) => {
                self.place = Where::Lost;
                Err(self.failed(ENDED.to_owned()))
            }
        }
    }
}

impl Drop for Patient {
    /// To close it may take as long as any other call.
    fn drop(&mut self) {
        if let Where::Here(place) = std::mem::replace(&mut self.place, Where::Lost)
            && let Ok(asked) = Asked::on_a_thread(&self.opened_as, move || drop(place))
        {
            let _ = asked.wait(self.patience, true);
        }
    }
}

impl MarkerPlace for Patient {
    fn read(&mut self) -> Result<Found, MarkerIoError> {
        self.ask(false, |place| place.read())
    }

    fn look(&mut self) -> Result<Found, MarkerIoError> {
        self.ask(false, |place| place.look())
    }

    fn write(&mut self, marker: &Marker) -> Result<(), MarkerIoError> {
        let marker = marker.clone();
        self.ask(true, move |place| place.write(&marker))
    }

    fn remove(&mut self) -> Result<(), MarkerIoError> {
        self.ask(true, |place| place.remove())
    }

    fn is_fenced(&self) -> bool {
        self.fenced
    }

    fn describe(&self) -> String {
        self.at.clone()
    }

    fn named_by_store(&self) -> Option<NamedPlace> {
        self.named.clone()
    }
}

#[cfg(test)]
mod tests {
    use larder_volume::marker::memory::MemoryMarker;

    use super::*;

    #[test]
    fn who_asks_a_place_that_hangs_hears_that_in_time_and_the_next_at_once() {
        let memory = MemoryMarker::new();
        // (Long enough that a slow machine answers in time.)
        let patience = Duration::from_secs(2);
        let mut place = Patient::new(memory.open(false), patience);
        assert_eq!(place.read(), Ok(Found::Absent { was: false }));
        memory.set_hangs(true);
        let begun = Instant::now();
        let why = place.look().unwrap_err().to_string();
        assert!(why.contains(&place.describe()) && why.contains("has not answered for"), "{why}");
        assert!(begun.elapsed() >= patience, "{:?}", begun.elapsed());
        let begun = Instant::now();
        for _ in 0..20 {
            assert!(place.read().is_err());
        }
        assert!(begun.elapsed() < 10 * patience, "each waits again: {:?}", begun.elapsed());
        memory.set_hangs(false);
        let until = Instant::now() + Duration::from_secs(60);
        while place.look().is_err() {
            assert!(Instant::now() < until, "it does not come back");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(place.read(), Ok(Found::Absent { was: false }));
    }

    /// A place that its store names.
    struct Named(Inner, NamedPlace);

    impl MarkerPlace for Named {
        fn read(&mut self) -> Result<Found, MarkerIoError> {
            self.0.read()
        }
        fn look(&mut self) -> Result<Found, MarkerIoError> {
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
        fn named_by_store(&self) -> Option<NamedPlace> {
            Some(self.1.clone())
        }
    }

    /// By that a store is known again whose file system has another number after a reboot.
    #[test]
    fn what_the_store_says_of_its_place_is_known_whether_that_answers_or_not() {
        let memory = MemoryMarker::new();
        for is_this in [true, false] {
            let says = NamedPlace { path: "/there/disk.larder".into(), is_this };
            let place = Named(memory.open(false), says.clone());
            let mut place = Patient::new(Box::new(place), Duration::from_millis(50));
            assert_eq!(place.named_by_store(), Some(says.clone()));
            memory.set_hangs(true);
            assert!(place.look().is_err());
            assert_eq!(place.named_by_store(), Some(says));
            memory.set_hangs(false);
        }
        let place = Patient::new(memory.open(false), Duration::from_secs(2));
        assert_eq!(place.named_by_store(), None);
    }
}
