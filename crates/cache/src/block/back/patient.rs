//! The place of a marker that may hang.
//!
//! A file on another host's file system can keep whoever reads or writes it waiting until that host is there again, and no signal ends that. So no thread
//! of the cache, of a client or of an operator is ever in such a call: each is made by a thread of its own, and who asks waits for [`PATIENCE`]. After that
//! the place is away with that thread, and whoever asks hears at once where the marker is, and for how long it has not answered. What was to be written may
//! be there later: it is as with a write that has failed.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use larder_format::block::marker::Marker;
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace, NamedPlace};

use super::super::locked;

/// For one call. A write of a marker makes two copies durable, one after the other.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

const ENDED: &str = "the thread that asked it has ended";

type Inner = Box<dyn MarkerPlace>;

/// See the [module](self).
pub(in crate::block) struct Patient {
    at: String,
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
    pub(in crate::block) fn new(place: Inner, patience: Duration) -> Patient {
        let (at, fenced, named) = (place.describe(), place.is_fenced(), place.named_by_store());
        Patient { at, fenced, named, patience, place: Where::Here(place) }
    }

    fn silent(&self, since: Instant) -> MarkerIoError {
        // (Told anew when it has become twice as long.)
        let (least, elapsed) = (self.patience.as_secs(), since.elapsed().as_secs());
        let seconds = match elapsed.checked_div(least) {
            Some(times @ 1..) => least << times.ilog2(),
            _ => elapsed,
        };
        let reason = format!(
            "it has not answered for {seconds} s or more: see to the file system or server that it is on"
        );
        MarkerIoError::Unreachable { place: self.at.clone(), reason }
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
                    let silent = self.silent(since);
                    self.place = Where::Away(since, back);
                    Err(silent)
                }
            },
        }
    }

    fn ask<T: Send + 'static>(
        &mut self,
        act: impl FnOnce(&mut dyn MarkerPlace) -> Result<T, MarkerIoError> + Send + 'static,
    ) -> Result<T, MarkerIoError> {
        // It is here still where there is no thread to be had.
        let here = Arc::new(Mutex::new(Some(self.take()?)));
        let (tell, told) = mpsc::channel();
        let (give, back) = mpsc::channel();
        let (begun, taken) = (Instant::now(), here.clone());
        let run = move || {
            let Some(mut place) = locked(&taken).take() else { return };
            let said = act(&mut *place);
            // Who has asked may have gone.
            let _ = give.send(place);
            let _ = tell.send(said);
        };
        let spawned = std::thread::Builder::new().name("block-marker".into()).spawn(run);
        self.place = Where::Away(begun, back);
        if let Err(error) = spawned {
            self.place = locked(&here).take().map_or(Where::Lost, Where::Here);
            return Err(self.failed(format!("no thread to ask it: {error}")));
        }
        match told.recv_timeout(self.patience) {
            Ok(said) => {
                let place = self.take()?;
                self.fenced = place.is_fenced();
                self.place = Where::Here(place);
                said
            }
            Err(RecvTimeoutError::Timeout) => Err(self.silent(begun)),
            Err(RecvTimeoutError::Disconnected) => {
                self.place = Where::Lost;
                Err(self.failed(ENDED.to_owned()))
            }
        }
    }
}

impl MarkerPlace for Patient {
    fn read(&mut self) -> Result<Found, MarkerIoError> {
        self.ask(|place| place.read())
    }

    fn look(&mut self) -> Result<Found, MarkerIoError> {
        self.ask(|place| place.look())
    }

    fn write(&mut self, marker: &Marker) -> Result<(), MarkerIoError> {
        let marker = marker.clone();
        self.ask(move |place| place.write(&marker))
    }

    fn remove(&mut self) -> Result<(), MarkerIoError> {
        self.ask(|place| place.remove())
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
