//! The place of a marker that may hang: each of its calls is [asked](super::asked) on a thread of its own, and who asks waits for [`PATIENCE`], also for a
//! place to be [opened](Asking::open). After that the place is away with that thread, and whoever asks hears at once where the marker is, and for how long
//! it has not answered.

use std::time::Duration;

use larder_engine::block::writeback::marker::ANSWERS;
use larder_format::block::marker::Marker;
use larder_runtime::RingChoice;
use larder_volume::Backing;
use larder_volume::marker::{
    Found, MarkerIoError, MarkerPlace, NamedPlace, PlaceOptions, Unopened,
};

use super::super::open::CacheConfig;
use super::asked::{Bound, Lent, NoAnswer, ask};

/// For one call.
pub(super) const PATIENCE: Duration = Duration::from_nanos(ANSWERS.0);

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
        let opened_as = at.clone();
        let open = move || {
            let place = unopened.open()?;
            Ok(Patient::opened(place, patience, opened_as))
        };
        match ask(&at, Bound { patience, changes: false }, open) {
            Ok(opened) => Ok(Box::new(opened?)),
            Err(why) => Err(not_answered(at, why)),
        }
    }
}

fn not_answered(place: String, why: NoAnswer) -> MarkerIoError {
    match why {
        NoAnswer::Late(reason) => MarkerIoError::Unreachable { place, reason },
        NoAnswer::Failed(reason) => MarkerIoError::Failed { place, reason },
    }
}

/// See the [module](self).
pub(in crate::block) struct Patient {
    at: String,
    fenced: bool,
    /// What the store says of it, as of when it was opened.
    named: Option<NamedPlace>,
    patience: Duration,
    place: Lent<Inner>,
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
        let place = Lent::new(place, opened_as, patience);
        Patient { at, fenced, named, patience, place }
    }

    /// `changes`: what is written.
    fn ask<T: Send + 'static>(
        &mut self,
        changes: bool,
        act: impl FnOnce(&mut dyn MarkerPlace) -> Result<T, MarkerIoError> + Send + 'static,
    ) -> Result<T, MarkerIoError> {
        let bound = Bound { patience: self.patience, changes };
        let fenced = &mut self.fenced;
        let said =
            self.place.ask(bound, |place| act(&mut **place), |place| *fenced = place.is_fenced());
        said.unwrap_or_else(|why| Err(not_answered(self.at.clone(), why)))
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
    use std::time::Instant;

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
