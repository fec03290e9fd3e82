//! Whether the marker of a volume that is served is still what was written there, and says how far its store is.
//!
//! Who removes it, or writes over it, takes away what keeps others from serving a stale store. So it is looked at again while its volume is served.
//! What is to be done then says the engine's [`look_again`].

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_base::Nanos;
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::holder::{Holder, mark_of};
use larder_engine::block::writeback::log::FRESH;
use larder_engine::block::writeback::marker::{self, Again, Mark, look_again};
use larder_format::block::marker::{Marker, MarkerState};
use larder_format::block::superblock::WrittenBack;
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace};

use super::super::attached::Attached;
use super::super::attended::lock_wanted;
use super::super::open::CacheError;
use super::super::{Core, locked};
use super::steps::Way;
use super::{Back, Written, unix_nanos};

/// What was wrong and was set right is told for so long.
const TOLD: Nanos = Nanos::from_secs(600);

/// What is wrong with a marker or a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    what: String,
    /// When it was set right.
    mended: Option<Nanos>,
}

/// The last of what was wrong, if it is to be told.
#[derive(Debug, Default)]
pub(in crate::block) struct Troubles(Option<Trouble>);

impl Troubles {
    /// It is so. Returns whether that is news.
    pub(super) fn is(&mut self, what: &str, mended: Option<Nanos>) -> bool {
        let news = mended.is_some() || self.failing() != Some(what);
        self.0 = Some(Trouble { what: what.to_owned(), mended });
        news
    }

    /// Nothing is wrong any more.
    pub(super) fn none(&mut self) {
        self.0.take_if(|trouble| trouble.mended.is_none());
    }

    /// What is wrong still.
    pub(super) fn failing(&self) -> Option<&str> {
        self.0.as_ref().filter(|trouble| trouble.mended.is_none()).map(|t| t.what.as_str())
    }

    /// What is to be told now.
    pub(super) fn told(&self, now: Nanos) -> Option<&str> {
        let recent = |t: &&Trouble| t.mended.is_none_or(|at| now.0 < at.0 + TOLD.0);
        self.0.as_ref().filter(recent).map(|t| t.what.as_str())
    }
}

/// What a marker was found to be, in words; nothing of one that is as it should be.
struct Seen {
    again: Again,
    what: String,
}

/// Looks at a marker.
fn seen(place: &mut dyn MarkerPlace, own: &marker::Marker, tried: Option<&marker::Marker>) -> Seen {
    let at = place.describe();
    let (read, what) = match place.look() {
        Ok(Found::There(there)) => {
            let what = match there.state {
                MarkerState::Clean => format!(
                    "{at} says that the store was recovered, on host '{}': what this cache holds of it counts no more",
                    there.host
                ),
                _ => format!("{at} names cache {} on host '{}'", there.cache, there.host),
            };
            (marker::Read::There(mark_of(&there, false)), what)
        }
        Ok(Found::Absent { was }) => (marker::Read::Absent { was }, format!("{at} was removed")),
        Ok(Found::Damaged) => (marker::Read::Damaged, format!("{at} was damaged")),
        Err(error) => (marker::Read::Unreachable, error.to_string()),
    };
    let again = look_again(read, own, tried);
    let what = match again {
        Again::Lost if matches!(read, marker::Read::There(_)) => {
            format!("{at} was put back to an older copy")
        }
        _ => what,
    };
    Seen { again, what }
}

impl Core {
    /// The marker of a volume is looked at, if it writes back, and written where something has removed it or put it back, or where it is to say how
    /// far the store is (`refresh`) and that has changed: it is what a recovery can tell of a cache that is lost. Where it is somebody else's
    /// nothing comes to the store any more.
    pub(in crate::block) fn look_at_marker(&self, volume: &Attached, refresh: bool) {
        let Some((back, attachment)) = self.back.get().zip(volume.attachment()) else { return };
        let Some(written) = back.written(attachment) else { return };
        if written.place.is_none() || written.shown || !back.log().is_started() {
            // (No marker of this run is there, or it does not say yet what becomes of it.)
            return;
        }
        if back.log().closed().is_some() {
            // What it says then is the log's to say. Whose it is decides whether that goes on, and it may be its own again.
            let _number = locked(&written.number);
            if volume.attachment().is_some() {
                self.check_marker(back, &written);
            }
            return;
        }
        if back.log().is_refused(attachment) {
            return self.says_again(back, &written);
        }
        // Before it is looked how far the store is: what comes meanwhile is not claimed.
        let time = unix_nanos();
        let Some(status) = back.log().status(self.now(), attachment) else { return };
        let frontier = status.positions[0];
        let Some(mut number) = lock_wanted(&written.number) else { return };
        if volume.attachment().is_none() {
            return;
        }
        if volume.changing.load(Ordering::SeqCst) {
            // What it says then is for who changes it over. As long as something is to be destaged it is its own still.
            let destages = {
                let log = back.log();
                !log.is_clean(attachment) && !log.is_aside(attachment)
            };
            if destages {
                self.check_marker(back, &written);
            }
            return;
        }
        let age = || status.oldest.map_or(0, |oldest| self.now().saturating_sub(oldest).0);
        let time = written.time_of(time, frontier, age);
        let again = self.check_marker(back, &written);
        // (A mark behind the frontier may be told of, too.)
        let told = written.said.load(Ordering::Relaxed) == status.image;
        match again {
            Again::Own if !refresh || told => return,
            Again::Own | Again::Lost => {}
            Again::Others | Again::Unknown => return,
        }
        let state = MarkerState::Dirty;
        let mut marker = self.marker(volume, &written.state, *number + 1, state, frontier);
        marker.time = time;
        // (One that could not be written may have been.)
        *number += 1;
        match self.write_marker(&written, &marker, again) {
            Ok(()) => {
                written.wrote(&marker);
                written.said.store(status.image, Ordering::Relaxed);
                tell_log(self, self.now(), |log, _| log.set_marker(attachment, *number));
            }
            Err(error) => self.marker_is(&written, &error.to_string(), None),
        }
    }

    /// The destage of a volume waits for a look at its marker, which may take its time: the log is told how that ended.
    pub(in crate::block) fn look_and_tell(&self, attachment: u32) {
        if let Some(back) = self.back.get()
            && let Some(written) = back.written(attachment)
        {
            // (Whoever has changed it over meanwhile has said that it is no longer its own.)
            let _number = locked(&written.number);
            if back.log().awaits_look(attachment).is_some() {
                self.check_marker(back, &written);
            }
        }
        let now = self.now();
        tell_log(self, now, |log, asks| log.look_ended(now, attachment, asks));
    }

    /// Looks at the marker of a volume, as [`Core::check_marker`] does: for as long as its place takes.
    pub(in crate::block) fn reads_marker(&self, name: &str) {
        if let Some((back, written)) = self.back_of(name) {
            self.check_marker(back, &written);
        }
    }

    /// What the marker of a volume is now. What is wrong is told, and nothing comes to the store where it is another's.
    pub(super) fn check_marker(&self, back: &Back, written: &Written) -> Again {
        let Some(place) = &written.place else { return Again::Own };
        let WrittenBack { attachment, generation, .. } = written.state;
        let leaves = || written.leaves.load(Ordering::SeqCst);
        if leaves() {
            return Again::Own;
        }
        let own = marker::Marker {
            of: Some((written.state.volume, attachment)),
            moved: false,
            mark: Mark::Dirty(back.cache.0),
            generation,
            number: written.durable.load(Ordering::Relaxed),
            run: written.durable_run.load(Ordering::Relaxed),
        };
        let tried = *locked(&written.tried);
        let Some(mut place) = lock_wanted(place) else { return Again::Unknown };
        let began = self.now();
        let mut it = seen(&mut **place, &own, tried.as_ref());
        if it.again == Again::Others && written.state.run > own.run {
            // One of this run that is not known to be written may be there.
            let own = marker::Marker { run: written.state.run, ..own };
            it = seen(&mut **place, &own, tried.as_ref());
        }
        let at = place.describe();
        drop(place);
        if leaves() {
            // What was found may be what says so.
            return Again::Own;
        }
        let Seen { again, what } = it;
        let is_late = self.now() > began + FRESH;
        written.silent.store(again == Again::Unknown, Ordering::Relaxed);
        let halted = again == Again::Others;
        let is_present = |now: Arc<Written>| std::ptr::eq(&raw const *now, written);
        if again != Again::Unknown && back.written(attachment).is_some_and(is_present) {
            written.attached.others.store(halted, Ordering::SeqCst);
        }
        if again != Again::Unknown && back.log().is_halted(attachment) != halted {
            tell_log(self, self.now(), |log, asks| log.halt(attachment, halted, asks));
        }
        if matches!(again, Again::Own | Again::Lost)
            && back.written(attachment).is_some_and(is_present)
        {
            tell_log(self, self.now(), |log, asks| log.looked(attachment, began, asks));
        }
        match again {
            // What is told then is why, and what follows.
            _ if back.log().is_refused(attachment) => {}
            Again::Own if is_late => {
                let least = FRESH.0 / 1_000_000_000;
                self.marker_is(
                    written,
                    &format!(
                        "{at} takes more than {least} s to answer: nothing more comes to the store before it answers sooner; see to the file system or server that \
                         it is on"
                    ),
                    None,
                );
            }
            Again::Own => locked(&written.trouble).none(),
            // It is told when it is written again, or why not.
            Again::Lost => {}
            Again::Others => self.marker_is(
                written,
                &format!(
                    "{what}: nothing comes to the store any more, and what clients ask for fails; see which of the two holds what counts, and stop the other"
                ),
                None,
            ),
            Again::Unknown => self.marker_is(
                written,
                &format!("{what}; nothing more comes to the store before it has answered"),
                None,
            ),
        }
        again
    }

    /// Writes a marker over what was found. One that was lost is made anew.
    pub(super) fn write_marker(
        &self,
        written: &Written,
        marker: &Marker,
        again: Again,
    ) -> Result<(), MarkerIoError> {
        let Some(place) = &written.place else { return Ok(()) };
        let tried = *locked(&written.tried);
        if marker.state == MarkerState::Clean {
            // Until it is known to be there it may be.
            *locked(&written.tried) = Some(mark_of(marker, false));
        }
        let mut place = locked(place);
        if again != Again::Lost {
            return place.write(marker);
        }
        let at = place.describe();
        let what = match place.read()? {
            Found::Absent { .. } => "was removed",
            Found::Damaged => "was damaged",
            Found::There(there)
                if tried.is_some_and(|tried| {
                    let own = written.durable.load(Ordering::Relaxed);
                    marker::was_tried(&mark_of(&there, false), &tried, own)
                }) =>
            {
                return place.write(marker);
            }
            Found::There(_) => "was put back to an older copy",
        };
        place.write(marker)?;
        drop(place);
        self.marker_is(
            written,
            &format!(
                "{at} {what} while the volume is served, and was written again: see what does that; without it a store that lacks writes is \
                 served to anybody"
            ),
            Some(self.now()),
        );
        Ok(())
    }

    /// A volume stays whose marker may say that it has gone: it says again that it writes back, as soon as it can be written.
    fn says_again(&self, back: &Back, written: &Arc<Written>) {
        let volume = &written.attached;
        let Some(_alone) = self.try_alone(volume) else { return };
        let (again, number) = {
            let number = locked(&written.number);
            (self.check_marker(back, written), *number)
        };
        if again == Again::Others {
            let why = "its marker is another's by now: see which of the two holds what counts, and stop the other";
            return self.refuses(written, why);
        }
        let mut holder = Holder::again(written.held(back, self.now(), number), Fault::default());
        match Way::of(self, back, volume, written.clone()).carry_out(&mut holder, &mut |_| true) {
            Ok(()) => {
                locked(&written.trouble).none();
                tracing::info!(
                    "volume '{}': its marker is written: its changes are logged again",
                    volume.name
                );
            }
            Err(why) => {
                let why = match why.or_say(&volume.name) {
                    CacheError::Volume { reason, .. } | CacheError::NotYet { reason, .. } => reason,
                    error => error.to_string(),
                };
                self.refuses(written, &why);
            }
        }
    }

    /// No change of a volume is logged: its marker could not be written when it was to go.
    pub(super) fn refuses(&self, written: &Written, why: &str) {
        let what = format!(
            "{why}; its marker may say that nothing of it is dirty: until that is written again the volume is only read, and its writes fail"
        );
        self.marker_is(written, &what, None);
    }

    fn marker_is(&self, written: &Written, what: &str, mended: Option<Nanos>) {
        if locked(&written.trouble).is(what, mended) {
            tracing::warn!("volume '{}': {what}", written.attached.name);
        }
    }

    /// What is wrong with marker and journal of a volume, or was not long ago.
    pub(super) fn troubles_of(&self, written: &Written) -> Vec<String> {
        let now = self.now();
        let marker = locked(&written.trouble).told(now).map(str::to_owned);
        let journal = written.journal.as_ref().and_then(|journal| journal.told(now));
        marker.into_iter().chain(journal).collect()
    }
}
