//! The place of a journal that may hang, until its volume is served: each of its calls is [asked](super::super::asked) on a thread of its own, and who asks
//! waits for so long at most. From then on it has a thread for itself alone, which may wait.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use larder_format::block::marker::Marker;
use larder_volume::journal::{
    EpochName, Head, JournalError, JournalPlace, Part, Site, StoreNames, Use,
};
use larder_volume::{Backing, Timeouts};

use super::super::BackWish;
use super::super::asked::{Bound, Lent, NoAnswer, ask};
use super::super::patient::Asking;
use super::super::site::{self, NoJournal};

/// For a call that moves much: an epoch has up to 64 MiB, and a file that is made is written whole.
const MUCH: Duration = Duration::from_secs(60);

type Inner = Box<dyn JournalPlace>;

fn not_answered(place: String, why: NoAnswer) -> JournalError {
    match why {
        NoAnswer::Late(reason) => JournalError::Open { place, reason },
        NoAnswer::Failed(reason) => JournalError::Failed { place, reason },
    }
}

impl Asking {
    /// Where the journal of a store is as `wish` says, for a volume that is cached at `cache`.
    ///
    /// # Errors
    /// As of [`site::site`], and [`JournalError::Open`] where it takes longer to find that out.
    pub(in super::super) fn journal_site(
        self,
        store: &dyn Backing,
        wish: &BackWish,
        cache: &Path,
    ) -> Result<Site, NoJournal> {
        let store = StoreNames::of(store);
        let (at, marker) = (wish.journal.clone(), wish.marker.clone());
        let Asking::AtMost(patience) = self else {
            return site::site(&store, (&at, &marker), cache);
        };
        let name = match &at.at {
            Some(at) => format!("journal '{}'", at.strip_prefix("file:").unwrap_or(at)),
            None => format!("the journal of '{}'", store.uri()),
        };
        let cache = cache.to_owned();
        let found = ask(&name, Bound { patience, changes: false }, move || {
            site::site(&store, (&at, &marker), &cache)
        });
        found.unwrap_or_else(|why| Err(not_answered(name, why).into()))
    }

    /// Opens the place of a journal, whose calls then are bounded as this is.
    ///
    /// # Errors
    /// As of [`Site::open`], and [`JournalError::Open`] where it takes longer, or a call from before is under way yet.
    pub(in super::super) fn open_journal(
        self,
        site: &Site,
        for_use: Use,
    ) -> Result<Inner, JournalError> {
        let Asking::AtMost(patience) = self else { return site.open(for_use, Timeouts::default()) };
        let at = site.describe();
        // (That what it is on answers was seen when it was found.)
        let makes = for_use == Use::Make && site.path().is_some();
        let bound =
            Bound { patience: if makes { MUCH.max(patience) } else { patience }, changes: false };
        let (site, opened_as) = (site.clone(), at.clone());
        let open = move || {
            let place = site.open(for_use, Timeouts::default())?;
            Ok(Patient::opened(place, patience, opened_as))
        };
        match ask(&at, bound, open) {
            Ok(opened) => Ok(Box::new(opened?)),
            Err(why) => Err(not_answered(at, why)),
        }
    }
}

/// See the [module](self).
pub(super) struct Patient {
    at: String,
    most: u64,
    keeps: usize,
    older: bool,
    patience: Duration,
    place: Place,
}

enum Place {
    Lent(Lent<Inner>),
    /// Whoever has it asks it himself.
    Own(Inner),
}

impl Patient {
    pub(super) fn opened(place: Inner, patience: Duration, opened_as: String) -> Patient {
        let (at, most, keeps) = (place.describe(), place.most(), place.keeps());
        let older = place.has_older();
        Patient {
            at,
            most,
            keeps,
            older,
            patience,
            place: Place::Lent(Lent::new(place, opened_as, patience)),
        }
    }

    fn ask<T: Send + 'static>(
        &mut self,
        (patience, changes): (Duration, bool),
        act: impl FnOnce(&mut dyn JournalPlace) -> Result<T, JournalError> + Send + 'static,
    ) -> Result<T, JournalError> {
        let older = &mut self.older;
        let said = match &mut self.place {
            Place::Own(place) => return act(&mut **place),
            Place::Lent(place) => {
                let bound = Bound { patience, changes };
                place.ask(bound, |place| act(&mut **place), |place| *older = place.has_older())
            }
        };
        said.unwrap_or_else(|why| Err(not_answered(self.at.clone(), why)))
    }

    fn reads(&self) -> (Duration, bool) {
        (self.patience, false)
    }

    fn changes(&self) -> (Duration, bool) {
        (self.patience, true)
    }

    fn much(&self, changes: bool) -> (Duration, bool) {
        (self.patience.max(MUCH), changes)
    }
}

impl JournalPlace for Patient {
    fn head(&mut self) -> Result<Head, JournalError> {
        self.ask(self.reads(), |place| place.head())
    }

    fn look(&mut self) -> Result<Head, JournalError> {
        self.ask(self.reads(), |place| place.look())
    }

    fn set_head(&mut self, head: &Marker) -> Result<(), JournalError> {
        let head = head.clone();
        self.ask(self.changes(), move |place| place.set_head(&head))
    }

    fn probe(&mut self, bytes: Option<&[u8]>) -> Result<bool, JournalError> {
        let bytes = bytes.map(<[u8]>::to_vec);
        self.ask(self.changes(), move |place| place.probe(bytes.as_deref()))
    }

    fn most(&self) -> u64 {
        self.most
    }

    fn write(&mut self, name: EpochName, commit: &[u8], body: &[u8]) -> Result<(), JournalError> {
        if let Place::Own(place) = &mut self.place {
            return place.write(name, commit, body);
        }
        let (commit, body) = (commit.to_vec(), body.to_vec());
        self.ask(self.much(true), move |place| place.write(name, &commit, &body))
    }

    fn flush(&mut self) -> Result<(), JournalError> {
        self.ask(self.changes(), |place| place.flush())
    }

    fn parts(&mut self) -> Result<Vec<Part>, JournalError> {
        self.ask(self.reads(), |place| place.parts())
    }

    fn read(&mut self, part: Part, at: u64, len: usize) -> Result<Option<Vec<u8>>, JournalError> {
        self.ask(self.much(false), move |place| place.read(part, at, len))
    }

    fn renew(&mut self, part: Part, ranges: &[Range<u64>]) -> Result<(), JournalError> {
        let ranges = ranges.to_vec();
        self.ask(self.much(true), move |place| place.renew(part, &ranges))
    }

    fn keeps(&self) -> usize {
        self.keeps
    }

    fn has_older(&self) -> bool {
        match &self.place {
            Place::Own(place) => place.has_older(),
            Place::Lent(_) => self.older,
        }
    }

    fn is_away(&mut self) -> bool {
        match &mut self.place {
            Place::Own(_) => false,
            Place::Lent(place) => place.is_away(),
        }
    }

    fn empty(&mut self) -> Result<(), JournalError> {
        self.ask(self.changes(), |place| place.empty())
    }

    fn rest(&mut self) {
        if let Place::Lent(lent) = &mut self.place
            && let Some(place) = lent.give()
        {
            self.place = Place::Own(place);
        }
        if let Place::Own(place) = &mut self.place {
            place.rest();
        }
    }

    fn describe(&self) -> String {
        self.at.clone()
    }
}
