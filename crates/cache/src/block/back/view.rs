//! A store that is only read while a cache that is lost, or elsewhere, holds what it lacks: with what its journal has laid over it, it is the
//! volume as it was at one moment. Neither store nor journal is changed, so a recovery finds both as they were.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use larder_format::block::marker::{MarkerState, Order as MarkerOrder};
use larder_volume::journal::{JournalError, Site, Use};
use larder_volume::marker::{Found, Image, PlaceOptions};
use larder_volume::op::{Done, Op};
use larder_volume::{Backing, BackingError, Capabilities, Identity, Peer, Session, StoreTrouble};
use mio::Registry;
use mio::event::Event;

use super::super::open::CacheError;
use super::journal::{Journal, Laid};
use super::patient::PATIENCE;
use super::start::is_moved;
use super::{Asking, BackWish, MarkerAt};

/// A store that is opened to be read only, as it is to be served: with its journal laid over it where its marker says that it needs that.
///
/// # Errors
/// [`CacheError::Volume`] where the journal is needed and cannot be had.
pub fn view(
    name: &str,
    store: Box<dyn Backing>,
    wish: &BackWish,
) -> Result<Box<dyn Backing>, CacheError> {
    let at = match &wish.marker {
        _ if !store.capabilities().read_only => return Ok(store),
        MarkerAt::Nowhere => return Ok(store),
        MarkerAt::At(place) => Some(place.clone()),
        MarkerAt::Beside => None,
    };
    let options = PlaceOptions { at, look: true, ..PlaceOptions::default() };
    // What is wrong with a marker is said when the volume comes.
    let asking = Asking::AtMost(PATIENCE);
    let place = asking.open(&*store, &options);
    let Ok(mut place) = place else { return Ok(store) };
    let Ok(Found::There(marker)) = place.read() else { return Ok(store) };
    if marker.state == MarkerState::Clean || marker.order != MarkerOrder::Journaled {
        return Ok(store);
    }
    let (cache, host) = (marker.cache, marker.host.clone());
    let fail = |reason: String| {
        let reason = format!(
            "its store was written through a journal, and cannot be read without what that has: {reason}; serve it with the cache that has written it ({cache}, \
             last used on host '{host}'), so that what is missing comes there, or have its store recovered, which gives up what that cache alone has"
        );
        CacheError::Volume { name: name.to_owned(), reason }
    };
    if is_moved(&*store, &*place, &marker, wish.moved) {
        let reason = format!(
            "{} was written beside another store (another file, device or name): name that one. If it is the same one moved, or a whole copy of it, say that \
             the store was moved",
            place.describe()
        );
        return Err(CacheError::Volume { name: name.to_owned(), reason });
    }
    drop(place);
    let site = Site::of(&*store, wish.journal.at.as_deref()).map_err(|e| fail(e.to_string()))?;
    // What does not answer may another time.
    let fails = |error: JournalError| match error.may_pass() {
        true => CacheError::Journal { name: name.to_owned(), why: error.into() },
        false => fail(error.to_string()),
    };
    let mut journal =
        Journal::open_by(asking, &site, &[marker.volume], Use::Look).map_err(fails)?;
    let read = journal.read_for(&marker).map_err(fails)?;
    if let Some(why) = read.torn {
        return Err(fail(format!("{}: {why}", journal.describe())));
    }
    let laid = journal.stretches(&read).map_err(fails)?;
    Ok(Box::new(View { store, laid: laid.into() }))
}

/// A store with stretches laid over it, ascending.
#[derive(Debug)]
struct View {
    store: Box<dyn Backing>,
    laid: Arc<[Laid]>,
}

impl Backing for View {
    fn uri(&self) -> &str {
        self.store.uri()
    }

    fn capabilities(&self) -> Capabilities {
        let about = self.store.capabilities();
        // Holes of the store may be data here.
        Capabilities { read_only: true, status: false, ..about }
    }

    fn identity(&self) -> Result<Identity, BackingError> {
        // What is cached of it is not what the store alone holds.
        let name = format!("{} with its journal", self.store.place());
        Ok(Identity::Blind { name, size: self.capabilities().size })
    }

    fn is_lost(&self) -> bool {
        self.store.is_lost()
    }

    fn place(&self) -> String {
        self.store.place()
    }

    fn peer(&self) -> Option<Peer> {
        self.store.peer()
    }

    fn look(&self) -> u64 {
        self.store.look()
    }

    fn look_at_place(&self) {
        self.store.look_at_place();
    }

    fn accounted(&self, changes: u64) {
        self.store.accounted(changes);
    }

    fn losses(&self) -> u64 {
        self.store.losses()
    }

    fn keep_notes(&self) -> bool {
        self.store.keep_notes()
    }

    fn sessions(&self) -> usize {
        self.store.sessions()
    }

    fn trouble(&self) -> Option<StoreTrouble> {
        self.store.trouble()
    }

    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        self.store.resize(bytes)
    }

    fn image(&self) -> Option<Image> {
        self.store.image()
    }

    fn has_journal_laid_over(&self) -> bool {
        true
    }

    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        Ok(Box::new(ViewSession { of: self.store.session()?, laid: self.laid.clone() }))
    }
}

struct ViewSession {
    of: Box<dyn Session>,
    laid: Arc<[Laid]>,
}

/// Lays over `bytes`, which were read from `at` on, what is laid over them.
fn lay_over(laid: &[Laid], at: u64, bytes: &mut [u8]) {
    let end = at + bytes.len() as u64;
    let first = laid.partition_point(|one| one.range.end <= at);
    for Laid { range, bytes: of } in laid[first..].iter().take_while(|one| one.range.start < end) {
        let both: Range<u64> = range.start.max(at)..range.end.min(end);
        let into = &mut bytes[(both.start - at) as usize..(both.end - at) as usize];
        match of {
            Some(of) => {
                let from = (both.start - range.start) as usize;
                into.copy_from_slice(&of[from..from + into.len()]);
            }
            None => into.fill(0),
        }
    }
}

impl Session for ViewSession {
    fn fd(&self) -> RawFd {
        self.of.fd()
    }

    fn attach(&mut self, registry: &Registry, first: usize) -> io::Result<()> {
        self.of.attach(registry, first)
    }

    fn detach(&mut self, registry: &Registry) {
        self.of.detach(registry);
    }

    fn ready(&mut self, at: usize, event: &Event, now: Instant) {
        self.of.ready(at, event, now);
    }

    fn submit(&mut self, token: u64, op: Op) {
        self.of.submit(token, op);
    }

    fn flush(&mut self, now: Instant) {
        self.of.flush(now);
    }

    fn turn(&mut self, now: Instant) {
        self.of.turn(now);
    }

    fn pop(&mut self) -> Option<Done> {
        let mut done = self.of.pop()?;
        if let (Ok(_), Op::Read { offset, buf }) = (&done.outcome, &mut done.op) {
            lay_over(&self.laid, *offset, buf);
        }
        Some(done)
    }

    fn in_flight(&self) -> usize {
        self.of.in_flight()
    }

    fn wake_at(&self) -> Option<Instant> {
        self.of.wake_at()
    }

    fn rest(&mut self) {
        self.of.rest();
    }

    fn native_fua(&self) -> bool {
        self.of.native_fua()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_laid_over_a_store_hides_it_byte_by_byte() {
        let laid = [
            Laid { range: 10..14, bytes: Some(vec![1, 2, 3, 4]) },
            Laid { range: 14..16, bytes: None },
            Laid { range: 20..30, bytes: Some(vec![5; 10]) },
        ];
        let read = |at: u64, len: usize| {
            let mut bytes = vec![9; len];
            lay_over(&laid, at, &mut bytes);
            bytes
        };
        assert_eq!(read(0, 10), [9; 10]);
        assert_eq!(read(8, 10), [9, 9, 1, 2, 3, 4, 0, 0, 9, 9]);
        assert_eq!(read(12, 3), [3, 4, 0]);
        assert_eq!(read(29, 3), [5, 9, 9]);
        assert_eq!(read(21, 2), [5, 5]);
        assert_eq!(read(30, 2), [9, 9]);
    }
}
