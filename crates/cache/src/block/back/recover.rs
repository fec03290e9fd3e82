//! A store whose cache is lost: its marker is made clean, so that the store alone is the volume from then on, and the cache, should it come back,
//! counts no more.

use std::time::{Duration, Instant};

use larder_engine::block::writeback::holder::mark_of;
use larder_engine::block::writeback::marker::{self as machine, Mark, Step};
use larder_engine::block::writeback::{Fault, Planted};
use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState, Order as MarkerOrder};
use larder_volume::journal::{self, JournalError, Site, Use};
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace, PlaceOptions, marker_place};
use larder_volume::op::Op;
use larder_volume::{Alone, Backing, BackingError, Flushing, Timeouts};
use serde::{Deserialize, Serialize};

use super::journal::{Applied, Journal, unprobe};
use super::start::{is_moved, random_uuid};

/// For the store's flush.
const FLUSH: Duration = Duration::from_secs(120);

/// Why a store was not recovered. Its marker is as it was, unless it says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// The marker cannot be had.
    #[error(transparent)]
    Marker(#[from] MarkerIoError),
    /// The store does not say which it is.
    #[error(transparent)]
    Store(#[from] BackingError),
    /// There is nothing that says that a cache was before it.
    #[error(
        "{0} is not there: nothing says that a cache held what the store lacks, and nothing is to be recovered; name its place if it is another"
    )]
    NoMarker(String),
    /// The store says that its marker is elsewhere.
    #[error(
        "the store says that its marker is '{named}', and that is not {place}: name that one's place; if it is lost, name {place} as its place"
    )]
    Elsewhere {
        /// The place that was looked at.
        place: String,
        /// The one that the store names.
        named: String,
    },
    /// It was journaled, and is not the store that its marker was written beside: nothing is laid over it.
    #[error(
        "{0} says that the store was written through a journal, and the store is not the one that it had (another file, device or name): what the journal \
         has is laid over no other; name that one. If it is the same one moved, or a whole copy of it, say that the store was moved"
    )]
    OtherStore(String),
    /// Its journal has no place, or none that was named.
    #[error(transparent)]
    NoJournal(JournalError),
    /// Its journal is lost or damaged: the store may be between two epochs, and its cache alone could tell.
    #[error(
        "{place} says that the store was written through a journal, and that has not what it should have ({reason}): the store may be between two \
         epochs, which no volume ever was; have the cache or the journal back, or accept that it is torn"
    )]
    Torn {
        /// The marker's place.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// Its journal cannot be applied: the store may be between two epochs.
    #[error(
        "{place} says that the store was written through a journal, and it cannot be applied: {reason}; the store is not to be used before"
    )]
    Journal {
        /// The marker's place.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// The store cannot be flushed.
    #[error(
        "backing store '{store}' cannot make durable what it has: {reason}; see to the store and try again"
    )]
    Flush {
        /// The store.
        store: String,
        /// Why not.
        reason: String,
    },
    /// Nobody can ask it to.
    #[error(
        "backing store '{0}' offers no flush, and what is written to it now may be lost: have its server offer FLUSH, or vouch that what it has \
         answered is durable"
    )]
    CannotFlush(String),
    /// The system has no random numbers.
    #[error("the system gives no random numbers: {0}")]
    Random(String),
}

/// What a marker said before, and whether it was made clean.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Recovery {
    /// The store.
    pub store: String,
    /// Where its marker is.
    pub marker: String,
    /// `clean`, `dirty`, `carried`, `closing` or `closed`; `damaged`; `gone`: it was not there, and there had been one.
    pub was: String,
    /// It was made clean just now. If not, it was before.
    pub recovered: bool,
    /// The cache that held what the store lacks, or of a clean marker the last one. Nothing where the marker was lost.
    pub cache: Option<String>,
    /// The host that it was used on.
    pub host: Option<String>,
    /// In which order the store got what was written: `any`, `ordered` or `ordered,grain=completion`.
    pub order: Option<String>,
    /// The store is not older than at this time, seconds since the Unix epoch: it has all that was written before. Lost is at most what was
    /// written later.
    pub not_older_than: Option<u64>,
    /// The store has all of that cache's log up to this record, by the volume's sequence numbers; with a journal, just that.
    pub sequence: Option<u64>,
    /// Why the store may be between two epochs, which was accepted.
    pub torn: Option<String>,
    /// The store may be an image that never was: what could not be read had been written again, and not all that came to the store with it is known to be
    /// there. (Of an order that keeps images.)
    pub joined: bool,
    /// The last consistency point that the store has, as far as its marker or its journal knows.
    pub mark: Option<String>,
    /// The volume's generation, now.
    pub generation: u64,
    /// Nobody else could write the marker meanwhile. If not (NBD, object stores without conditional writes), whoever asks must see to it that
    /// no daemon serves the store.
    pub fenced: bool,
}

fn state_name(state: MarkerState) -> &'static str {
    match state {
        MarkerState::Clean => "clean",
        MarkerState::Dirty => "dirty",
        MarkerState::Carried => "carried",
        MarkerState::Closing => "closing",
        MarkerState::Closed => "closed",
    }
}

/// The name of an order, as a mode of write-back has it.
pub(in crate::block) fn order_words(order: MarkerOrder) -> &'static str {
    match order {
        MarkerOrder::Any => "any",
        MarkerOrder::Flush => "ordered",
        MarkerOrder::Completion => "ordered,grain=completion",
        MarkerOrder::Journaled => "journaled",
    }
}

/// What is wanted of a recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoverWish {
    /// Where the marker is, if not beside the store.
    pub marker: Option<String>,
    /// Where the journal is, if there is one and it is not beside the store.
    pub journal: Option<String>,
    /// The store, or a cache, was put back to an older copy: no cache counts any more, though the marker may be clean.
    pub set_back: bool,
    /// Where the journal is lost or damaged the store is taken as it is.
    pub accept_torn: bool,
    /// The store is the one that it was, though it lies elsewhere now, or a whole copy of it: the operator says so.
    pub moved: bool,
}

/// Makes a store the whole of its volume: what a cache may hold of it is given up, and counts no more.
///
/// # Errors
/// [`RecoverError`]; in particular [`MarkerIoError::Held`] where somebody serves the store.
pub fn recover(store: &dyn Backing, wish: &RecoverWish) -> Result<Recovery, RecoverError> {
    let options = PlaceOptions { at: wish.marker.clone(), ..PlaceOptions::default() };
    let mut place = marker_place(store, &options)?;
    let mut open = |volume| {
        let site = Site::of(store, wish.journal.as_deref())?;
        Journal::open(&site, &[volume], Use::Apply, Timeouts::default())
    };
    recover_at(store, &mut *place, &mut open, wish, Fault::default())
}

/// Opens the journal of a volume.
pub(super) type OpenJournal<'a> = &'a mut dyn FnMut(Uuid) -> Result<Journal, JournalError>;

/// The same with a marker's place and a journal's.
pub(super) fn recover_at(
    store: &dyn Backing,
    place: &mut dyn MarkerPlace,
    open: OpenJournal<'_>,
    wish: &RecoverWish,
    fault: Fault,
) -> Result<Recovery, RecoverError> {
    let set_back = wish.set_back;
    let found = place.read()?;
    let mut told = Recovery {
        store: store.uri().to_owned(),
        marker: place.describe(),
        fenced: place.is_fenced(),
        ..Recovery::default()
    };
    if let Some(named) = place.named_by_store().filter(|named| !named.is_this) {
        let elsewhere = || RecoverError::Elsewhere {
            place: told.marker.clone(),
            named: named.path.display().to_string(),
        };
        let absent = matches!(found, Found::Absent { .. } | Found::Damaged);
        // A marker that lies with the store has gone where that has gone; one that was named is taken, but over one that says that there is more.
        let at = Some(format!("file:{}", named.path.display()));
        let look = PlaceOptions { at, look: true, ..PlaceOptions::default() };
        let there = || marker_place(store, &look).and_then(|mut place| place.read());
        if absent
            && (wish.marker.is_none()
                || matches!(there(), Ok(Found::There(m)) if m.state != MarkerState::Clean))
        {
            return Err(elsewhere());
        }
    }
    let before = match found {
        Found::Absent { was: false } => return Err(RecoverError::NoMarker(told.marker)),
        Found::Absent { was: true } => {
            "gone".clone_into(&mut told.was);
            None
        }
        Found::Damaged => {
            "damaged".clone_into(&mut told.was);
            None
        }
        Found::There(marker) => {
            state_name(marker.state).clone_into(&mut told.was);
            told.cache = Some(marker.cache.to_string());
            told.host = Some(marker.host.clone());
            told.order = Some(order_words(marker.order).to_owned());
            told.generation = marker.generation;
            told.mark = marker.mark.clone();
            let image = matches!(marker.order, MarkerOrder::Flush | MarkerOrder::Completion);
            told.joined = image && marker.joins > marker.frontier;
            if marker.state != MarkerState::Clean {
                told.not_older_than = Some(marker.time / 1_000_000_000);
                told.sequence = Some(marker.frontier);
            }
            Some(*marker)
        }
    };
    if before.as_ref().is_some_and(|marker| marker.state == MarkerState::Clean) && !set_back {
        return Ok(told);
    }
    if let Some(marker) = &before {
        let journaled = marker.order == MarkerOrder::Journaled;
        let mark = mark_of(marker, is_moved(store, place, marker, wish.moved));
        if machine::may_recover(&mark, journaled).is_err() {
            return Err(RecoverError::OtherStore(told.marker));
        }
    }
    if store.capabilities().flush == Flushing::Missing {
        return Err(RecoverError::CannotFlush(told.store));
    }
    let ahead = if set_back { machine::AHEAD } else { 0 };
    let last = match before {
        Some(marker) => Marker { number: marker.number.saturating_add(ahead), ..marker },
        None => {
            let journal = store.image().map(|image| journal::beside(image.path()));
            if let Some(journal) = journal.filter(|journal| journal.exists()) {
                let reason = format!(
                    "journal '{}' is there, and without a marker nothing says whose it is; move it away to give up what it has",
                    journal.display()
                );
                return Err(RecoverError::Journal { place: told.marker, reason });
            }
            unknown()?
        }
    };
    let fail = |reason| RecoverError::Journal { place: told.marker.clone(), reason };
    if last.probes || last.order == MarkerOrder::Journaled {
        unprobe(store).map_err(fail)?;
    }
    // (Nothing was answered while that was found out, and no epoch came to the store.)
    let dirty = last.state != MarkerState::Clean && !last.probes;
    let replays = last.order == MarkerOrder::Journaled && dirty;
    let mut journal = None;
    for step in machine::recover(last.generation.saturating_add(ahead)) {
        match step {
            Step::Replay(_) if replays => {
                match replay(store, open, &last, wish.accept_torn) {
                    Ok((opened, applied, torn)) => {
                        // What was written before the last epoch ended is there.
                        if let Some(Applied { last, time, mark, .. }) = applied {
                            told.not_older_than =
                                told.not_older_than.max(Some(time / 1_000_000_000));
                            told.sequence = told.sequence.max(Some(last));
                            told.mark = mark.or(told.mark);
                        }
                        told.torn = torn;
                        journal = Some(opened);
                    }
                    Err(NotReplayed::Torn(reason)) if wish.accept_torn => told.torn = Some(reason),
                    Err(NotReplayed::NoPlace(e)) if wish.accept_torn => {
                        told.torn = Some(e.to_string());
                    }
                    Err(NotReplayed::Torn(reason)) => {
                        return Err(RecoverError::Torn { place: told.marker, reason });
                    }
                    Err(NotReplayed::NoPlace(e)) => return Err(RecoverError::NoJournal(e)),
                    Err(NotReplayed::Store(reason)) => {
                        return Err(RecoverError::Journal { place: told.marker, reason });
                    }
                }
                if !fault.is(Planted::ReplayNotFlushed) {
                    flush(store)?;
                }
            }
            Step::EmptyJournal => {
                // What the marker says by now is that it does not count.
                if let Some(Err(error)) = journal.as_mut().map(Journal::empty) {
                    tracing::warn!("{error}: it was not emptied, and counts no more");
                }
            }
            // There is no journal to replay, nor to empty: the store is flushed.
            Step::Replay(_) => flush(store)?,
            Step::Mark(Mark::Clean, generation) => {
                let clean = Marker {
                    number: last.number.saturating_add(1),
                    state: MarkerState::Clean,
                    generation,
                    identity: store.identity()?.encode(),
                    host: super::host_name(),
                    mark: told.mark.clone(),
                    joins: 0,
                    probes: false,
                    ..last.clone()
                };
                place.write(&clean)?;
                told.generation = generation;
            }
            _ => {}
        }
    }
    told.fenced = place.is_fenced();
    told.recovered = true;
    Ok(told)
}

/// So often a journal is read again that seems torn.
const TRIES: u32 = 2;

/// Why a journal was not replayed.
enum NotReplayed {
    /// Nobody knows where it is.
    NoPlace(JournalError),
    /// It is not there, or not what it should be.
    Torn(String),
    /// The store does not take it.
    Store(String),
}

/// Applies what a journal has. Where it is torn and that is accepted what is whole in it is applied all the same: the store may be in the midst of that.
fn replay(
    store: &dyn Backing,
    open: OpenJournal<'_>,
    marker: &Marker,
    accept_torn: bool,
) -> Result<(Journal, Option<Applied>, Option<String>), NotReplayed> {
    let torn = |e: JournalError| NotReplayed::Torn(e.to_string());
    let mut journal = open(marker.volume)
        .map_err(|e| if e.is_usage() { NotReplayed::NoPlace(e) } else { torn(e) })?;
    let mut read = journal.read_for(marker).map_err(torn)?;
    // What is not read once may be read the next time: what counts as torn is given up.
    for _ in 0..TRIES {
        if read.torn.is_some() {
            read = journal.read_for(marker).map_err(torn)?;
        }
    }
    let why = read.torn.map(|why| format!("{}: {why}", journal.describe()));
    if let Some(why) = why.clone().filter(|_| !accept_torn) {
        return Err(NotReplayed::Torn(why));
    }
    let applied =
        journal.apply_read(&read, store).map_err(|e| NotReplayed::Store(e.to_string()))?;
    Ok((journal, applied, why))
}

/// In place of a marker of which nothing is known.
fn unknown() -> Result<Marker, RecoverError> {
    let time = super::unix_nanos();
    let ahead = machine::unknown(time / 1_000_000_000);
    Ok(Marker {
        number: ahead,
        state: MarkerState::Clean,
        volume: random_uuid().map_err(|e| RecoverError::Random(e.to_string()))?,
        identity: [0; 64],
        cache: Uuid([0; 16]),
        run: 0,
        host: String::new(),
        generation: ahead,
        attachment: 0,
        frontier: 0,
        time,
        mark: None,
        order: MarkerOrder::Any,
        applied: 0,
        joins: 0,
        probes: false,
    })
}

/// What the store holds is durable.
fn flush(store: &dyn Backing) -> Result<(), RecoverError> {
    let failed = |reason: String| RecoverError::Flush { store: store.uri().to_owned(), reason };
    let mut session = Alone::new(store.session()?).map_err(|e| failed(e.to_string()))?;
    session.submit(0, Op::Flush);
    let until = Instant::now() + FLUSH;
    let done = session.next(FLUSH, || Instant::now() >= until);
    let done = done.ok_or_else(|| failed(format!("no answer within {} s", FLUSH.as_secs())))?;
    done.outcome.map(drop).map_err(|e| failed(e.to_string()))
}

#[cfg(test)]
mod tests {
    use larder_volume::{OpenOptions, open_with};
    use tempfile::TempDir;

    use super::*;

    fn store(dir: &TempDir) -> Box<dyn Backing> {
        let path = dir.path().join("disk");
        if !path.exists() {
            std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        }
        let uri = format!("file:{}", path.display()).parse().unwrap();
        open_with(&uri, &OpenOptions::default()).unwrap()
    }

    fn mark(store: &dyn Backing, state: MarkerState, order: MarkerOrder) -> Marker {
        let marker = Marker {
            number: 7,
            state,
            volume: Uuid([1; 16]),
            identity: store.identity().unwrap().encode(),
            cache: Uuid([2; 16]),
            run: 3,
            host: "there".into(),
            generation: 5,
            attachment: 1,
            frontier: 9,
            time: 1_700_000_000_000_000_000,
            mark: None,
            order,
            applied: 0,
            joins: 0,
            probes: false,
        };
        let mut place = marker_place(store, &PlaceOptions::default()).unwrap();
        place.read().unwrap();
        place.write(&marker).unwrap();
        marker
    }

    fn read(store: &dyn Backing) -> Marker {
        let mut place = marker_place(store, &PlaceOptions::default()).unwrap();
        let Found::There(marker) = place.read().unwrap() else { panic!("there is none") };
        *marker
    }

    #[test]
    fn a_dirty_marker_becomes_clean_with_the_next_generation() {
        for state in
            [MarkerState::Dirty, MarkerState::Carried, MarkerState::Closing, MarkerState::Closed]
        {
            let dir = TempDir::new().unwrap();
            let store = store(&dir);
            let was = mark(&*store, state, MarkerOrder::Completion);
            let told = recover(&*store, &RecoverWish::default()).unwrap();
            assert!(told.recovered && told.fenced, "{told:?}");
            assert_eq!((told.was.as_str(), told.generation), (state_name(state), 6));
            assert_eq!(told.host.as_deref(), Some("there"));
            assert_eq!(told.order.as_deref(), Some("ordered,grain=completion"));
            assert_eq!(told.not_older_than, Some(1_700_000_000));
            let now = read(&*store);
            assert_eq!((now.state, now.number, now.generation), (MarkerState::Clean, 8, 6));
            assert_eq!((now.volume, now.cache), (was.volume, was.cache));
            // Once more there is nothing to do.
            let again = recover(&*store, &RecoverWish::default()).unwrap();
            assert_eq!((again.recovered, again.was.as_str()), (false, "clean"));
            assert_eq!(read(&*store), now);
        }
    }

    #[test]
    fn a_store_that_may_be_no_image_is_said_to_be_so() {
        for (order, joins, joined) in [
            (MarkerOrder::Flush, 12, true),
            (MarkerOrder::Completion, 10, true),
            (MarkerOrder::Flush, 9, false),
            (MarkerOrder::Flush, 0, false),
            // It keeps no image.
            (MarkerOrder::Any, 12, false),
        ] {
            let dir = TempDir::new().unwrap();
            let store = store(&dir);
            let was = mark(&*store, MarkerState::Dirty, order);
            let mut place = marker_place(&*store, &PlaceOptions::default()).unwrap();
            place.read().unwrap();
            place.write(&Marker { joins, number: 8, ..was }).unwrap();
            drop(place);
            let told = recover(&*store, &RecoverWish::default()).unwrap();
            assert_eq!((told.recovered, told.joined), (true, joined), "{order:?}, {joins}");
            assert_eq!(read(&*store).joins, 0);
        }
    }

    #[test]
    fn a_store_that_was_set_back_is_ahead_of_every_cache() {
        let dir = TempDir::new().unwrap();
        let store = store(&dir);
        mark(&*store, MarkerState::Clean, MarkerOrder::Flush);
        assert!(!recover(&*store, &RecoverWish::default()).unwrap().recovered);
        let told =
            recover(&*store, &RecoverWish { set_back: true, ..RecoverWish::default() }).unwrap();
        assert!(told.recovered && told.generation == 5 + machine::AHEAD + 1, "{told:?}");
        assert_eq!(read(&*store).number, 7 + machine::AHEAD + 1);
    }

    #[test]
    fn a_marker_that_is_lost_is_replaced_by_one_that_no_cache_knows() {
        let dir = TempDir::new().unwrap();
        let store = store(&dir);
        let Err(RecoverError::NoMarker(_)) = recover(&*store, &RecoverWish::default()) else {
            panic!("there was none")
        };
        mark(&*store, MarkerState::Dirty, MarkerOrder::Any);
        let path = dir.path().join("disk.larder");
        let mut bytes = std::fs::read(&path).unwrap();
        for at in [20, larder_format::block::marker::COPY_BYTES + 20] {
            bytes[at] ^= 1;
        }
        std::fs::write(&path, bytes).unwrap();
        let told = recover(&*store, &RecoverWish::default()).unwrap();
        assert_eq!((told.was.as_str(), told.recovered, told.cache), ("damaged", true, None));
        assert!(read(&*store).generation > machine::UNKNOWN);
    }

    #[test]
    fn a_journal_is_not_passed_over() {
        let dir = TempDir::new().unwrap();
        let store = store(&dir);
        let was = mark(&*store, MarkerState::Dirty, MarkerOrder::Journaled);
        let error = recover(&*store, &RecoverWish::default()).unwrap_err();
        assert!(matches!(error, RecoverError::Torn { .. }), "{error}");
        assert_eq!(read(&*store), was);
        let wish = RecoverWish { accept_torn: true, ..RecoverWish::default() };
        let told = recover(&*store, &wish).unwrap();
        assert!(told.recovered && told.torn.unwrap().contains("is not there"));
        assert_eq!(read(&*store).state, MarkerState::Clean);
    }

    #[test]
    fn a_living_holder_is_left_alone() {
        let dir = TempDir::new().unwrap();
        let store = store(&dir);
        let was = mark(&*store, MarkerState::Dirty, MarkerOrder::Flush);
        let mut holder = marker_place(&*store, &PlaceOptions::default()).unwrap();
        holder.read().unwrap();
        holder.write(&Marker { number: 8, ..was }).unwrap();
        let error = recover(&*store, &RecoverWish::default()).unwrap_err().to_string();
        assert!(error.contains("is held"), "{error}");
        drop(holder);
        assert!(recover(&*store, &RecoverWish::default()).unwrap().recovered);
    }
}
