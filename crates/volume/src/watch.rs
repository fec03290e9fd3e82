//! Whether a file is changed by somebody else while this daemon has it, and what its times prove.
//!
//! Every change by this daemon is bracketed: [`Watch::begins`] before, [`Watch::ended`] after. So while none is under way it is
//! known between which times the file's own last change must lie, and a look at the file ([`Watch::look`], one `statx`) that
//! finds it changed at another time, or of another size, has found somebody else's change. What it cannot see is a change
//! between two of ours that are less than [`PAUSE`] apart: it ends up under the later one's time.
//!
//! What was noticed is noted durably enough to outlive `kill -9` (`change_markers`), before the own change that would hide it. It is
//! taken back when the cache has dropped all lines of the volume ([`Watch::accounted`]).

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{AtFlags, StatxFlags};

use super::at_path::AtPath;
use super::change_markers::{self, Notes};
use crate::rate_limited::RateLimited;

/// Between two looks at a store that is served.
pub const LOOK: Duration = Duration::from_millis(500);
/// Before a change that comes so long after the last one of this daemon, the file is looked at. Two ticks of most clocks: changes
/// closer together may have the same time.
const PAUSE_NS: i128 = 20_000_000;
/// A write that was under way when its process was killed may still be carried out for so long; and clocks of two hosts agree
/// no better, nanoseconds.
pub(super) const SLACK: i128 = 1_000_000_000;
/// What a file system on another host was told to write may be carried out so much later; and after a power cut the notes, which
/// the kernel carries to the disk by and by, may be as old as this, nanoseconds.
pub(super) const CARRIED: i128 = 60_000_000_000;
/// No file system's clock goes in longer steps, on this host.
pub(super) const TICK: Duration = Duration::from_millis(20);
/// A time that is a multiple of this comes from a file system that keeps whole seconds, or tenths (or else by rare chance): within
/// such a step anybody may have written, so it proves nothing. Nanoseconds.
const COARSE: i128 = 100_000_000;
/// How long `status` speaks of a foreign change.
const REMEMBERED: Duration = Duration::from_secs(3600);

/// Whether a time of change is too coarse to prove anything.
pub(super) fn is_coarse(changed_ns: i128) -> bool {
    changed_ns % COARSE == 0
}

/// A file as it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// When it was last changed, nanoseconds since 1970 by the file's clock.
    pub(super) changed_ns: i128,
    /// Bytes.
    pub(super) size: u64,
}

impl Found {
    /// As far as it is known here: a server that has it is not asked, since it may hang.
    fn of(file: impl AsFd) -> Option<Found> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let wanted = StatxFlags::SIZE | StatxFlags::CTIME | StatxFlags::MTIME;
        let found = rustix::fs::statx(file, "", flags, wanted).ok()?;
        let ns = |at: rustix::fs::StatxTimestamp| {
            i128::from(at.tv_sec) * 1_000_000_000 + i128::from(at.tv_nsec)
        };
        let changed_ns = ns(found.stx_ctime).max(ns(found.stx_mtime));
        Some(Found { changed_ns, size: found.stx_size })
    }
}

/// Own changes until now, by this host's clock, nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Own {
    /// The newest that has ended had begun then: the file was changed no earlier.
    pub(super) floor_ns: i128,
    /// The newest had ended by then.
    pub(super) last_ns: i128,
    /// The file's clock is so far ahead.
    pub(super) skew_ns: i128,
    /// The file's times are this host's own.
    pub(super) local: bool,
}

impl Own {
    /// Whether a change at that time was one of them; `late` is what the end may be passed by.
    pub(super) fn explains(&self, changed_ns: i128, late: i128) -> bool {
        let changed = changed_ns - self.skew_ns;
        let early = if self.local { 0 } else { SLACK };
        // A coarse time lies before what it stands for.
        (is_coarse(changed_ns) || changed >= self.floor_ns - early)
            && changed <= self.last_ns + late
    }
}

/// What was last found, and how many own changes had begun.
#[derive(Debug)]
struct Seen {
    found: Found,
    begun: u64,
    quiet: RateLimited,
    /// When somebody else's change was noticed last.
    foreign: Option<Instant>,
    /// When one was noticed that may be no more than another name: its path is still to be looked at.
    unexplained: Option<Instant>,
}

impl Seen {
    /// Whether what is found now is as this daemon left it; `None` where that cannot be said yet.
    fn judge(&self, found: Found, begun: u64, own: Own, now_ns: i128) -> Option<bool> {
        if begun == self.begun {
            return Some(found == self.found);
        }
        let late = if own.local { 0 } else { CARRIED };
        if !own.local && now_ns < own.last_ns + late {
            return None;
        }
        Some(found.size == self.found.size && own.explains(found.changed_ns, late))
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Watch {
    uri: String,
    notes: Notes,
    place: AtPath,
    /// It is looked at while it is served. (A block device has no times.)
    looks: bool,
    /// So is its path, of a device too.
    watches_place: bool,
    begun: AtomicU64,
    in_flight: AtomicU64,
    /// Changes by others that were noticed.
    foreign: AtomicU64,
    seen: Mutex<Seen>,
}

impl Watch {
    /// Of a file that was found so when it was opened.
    pub(super) fn new(
        uri: &str,
        notes: Notes,
        place: AtPath,
        found: Found,
        device: bool,
        watch: bool,
    ) -> Watch {
        let seen = Seen {
            found,
            begun: 0,
            quiet: RateLimited::default(),
            foreign: None,
            unexplained: None,
        };
        Watch {
            uri: uri.to_owned(),
            notes,
            place,
            looks: !device && watch,
            watches_place: watch,
            begun: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            foreign: AtomicU64::new(0),
            seen: Mutex::new(seen),
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock()
    }

    /// Looks whether the file is still at its path, where it is looked at at all, which may take a second. A change by somebody else
    /// that is not explained by that is said.
    pub(super) fn look_at_place(&self, file: impl AsFd) {
        if !self.watches_place {
            return;
        }
        // Noticed before the look, so that what has made it is seen by it.
        let unexplained = self.seen().unexplained;
        let Some(explained) = self.place.look(file, unexplained.is_some()) else { return };
        if unexplained.is_none() {
            return;
        }
        let mut seen = self.seen();
        if seen.unexplained == unexplained {
            seen.unexplained = None;
        }
        // A file that is renamed or removed has another time too: that is said, and nobody need have written to it.
        if !explained {
            let now = Instant::now();
            seen.foreign = Some(now);
            if let Some(unsaid) = seen.quiet.wrong(now) {
                tracing::error!("backing store {}{unsaid}", self.text());
            }
        }
    }

    /// Since when the file is not at its path, and what to say.
    pub(super) fn moved(&self, file: impl AsFd) -> Option<(Instant, String)> {
        if self.watches_place {
            self.place.look_at_links(file);
        }
        self.place.trouble()
    }

    /// What is noted of this run.
    pub(super) fn notes(&self) -> &Notes {
        &self.notes
    }

    /// The file is about to be changed by this daemon. Returns when, for [`Watch::ended`].
    pub(super) fn begins(&self, file: impl AsFd) -> i64 {
        let start = change_markers::coarse_now_ns();
        let idle = self.in_flight.load(Ordering::SeqCst) == 0;
        if idle && start - self.notes.last_ns() >= PAUSE_NS {
            self.look(file.as_fd());
        }
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        self.begun.fetch_add(1, Ordering::SeqCst);
        self.notes.begins(file, start);
        start as i64
    }

    /// What began then has ended. `wrote`: and has set the file's time for certain.
    pub(super) fn ended(&self, start: i64, wrote: bool) {
        self.notes.ended(wrote.then_some(start));
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// The daemon has given the file another size.
    pub(super) fn resized(&self, size: u64) {
        self.seen().found.size = size;
    }

    /// Looks whether somebody else has changed the file, unless this daemon is changing it. Returns how many times that was
    /// noticed so far.
    pub(super) fn look(&self, file: impl AsFd) -> u64 {
        if self.looks {
            self.examine(file);
        }
        self.foreign.load(Ordering::SeqCst)
    }

    fn examine(&self, file: impl AsFd) {
        let begun = self.begun.load(Ordering::SeqCst);
        if self.in_flight.load(Ordering::SeqCst) == 0
            && let Some(found) = Found::of(&file)
        {
            let own = self.notes.own();
            let mut seen = self.seen();
            // Whoever looks and then changes the file has looked before any other change began.
            if self.begun.load(Ordering::SeqCst) == begun {
                self.take(&mut seen, found, begun, own);
            }
        }
    }

    fn take(&self, seen: &mut Seen, found: Found, begun: u64, own: Own) {
        let Some(as_left) = seen.judge(found, begun, own, change_markers::now_ns()) else { return };
        if !as_left {
            self.notes.doubt();
            // What is cached of a file that was cut short may be all that is left of it: it stays, and is proved no more.
            if found.size >= seen.found.size {
                self.foreign.fetch_add(1, Ordering::SeqCst);
                // Whoever has time looks at its path: a client's request waits for no file system.
                seen.unexplained = Some(Instant::now());
            }
        }
        (seen.found, seen.begun) = (found, begun);
    }

    fn text(&self) -> String {
        format!(
            "'{}' was written to by something else: what was cached of it is dropped, and what was read since that write may have \
             been older; write to it through this daemon alone",
            self.uri
        )
    }

    /// When somebody else's change was noticed, and what to say, for as long as it is to be spoken of.
    pub(super) fn trouble(&self) -> Option<(Instant, String)> {
        let at = self.seen().foreign.filter(|at| at.elapsed() < REMEMBERED)?;
        Some((at, self.text()))
    }

    /// Nothing is cached any more from before that many changes by others were noticed.
    pub(super) fn accounted(&self, foreign: u64) {
        let seen = self.seen();
        if self.foreign.load(Ordering::SeqCst) == foreign {
            self.notes.trust();
        }
        drop(seen);
    }

    /// Whether the file, found so by who lets go of it, is as this daemon left it.
    pub(super) fn is_own(&self, file: impl AsFd, found: Found) -> bool {
        self.examine(file.as_fd());
        if self.seen().unexplained.is_some() {
            self.look_at_place(file.as_fd());
        }
        let seen = self.seen();
        let same = seen.found == found && seen.begun == self.begun.load(Ordering::SeqCst);
        !self.notes.is_doubted() && (same || self.notes.explains(found.changed_ns, file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i128 = 1_000_000_000;
    const AT: i128 = 1_700_000_000 * SECOND + 123_456_789;

    fn found(changed_ns: i128) -> Found {
        Found { changed_ns, size: 4096 }
    }

    fn seen(changed_ns: i128, begun: u64) -> Seen {
        Seen {
            found: found(changed_ns),
            begun,
            quiet: RateLimited::default(),
            foreign: None,
            unexplained: None,
        }
    }

    fn own(local: bool) -> Own {
        Own { floor_ns: AT, last_ns: AT + 500, skew_ns: 0, local }
    }

    /// One own change has ended since the last look, between `AT` and 500 ns later.
    #[test]
    fn a_change_outside_of_our_own_is_somebody_elses() {
        let judge = |changed, size| {
            let found = Found { size, ..found(changed) };
            seen(AT - SECOND, 0).judge(found, 1, own(true), AT + SECOND)
        };
        assert_eq!(judge(AT, 4096), Some(true));
        assert_eq!(judge(AT + 500, 4096), Some(true));
        assert_eq!(judge(AT + 501, 4096), Some(false), "after it");
        assert_eq!(judge(AT - 1, 4096), Some(false), "an older state");
        assert_eq!(judge(AT, 8192), Some(false), "longer");
    }

    #[test]
    fn without_a_change_of_our_own_nothing_changes() {
        let judge = |now| seen(AT, 3).judge(now, 3, own(true), AT + SECOND);
        assert_eq!(judge(found(AT)), Some(true));
        assert_eq!(judge(found(AT + 1)), Some(false));
        assert_eq!(judge(found(AT - 1)), Some(false));
    }

    /// A time of whole seconds lies before the change that it stands for, which is no older state.
    #[test]
    fn coarse_times_are_no_older_states() {
        let second = AT / SECOND * SECOND;
        let judge = |changed| seen(AT - SECOND, 0).judge(found(changed), 1, own(true), AT + SECOND);
        assert_eq!(judge(second), Some(true));
        assert_eq!(judge(second + SECOND), Some(false));
    }

    /// Another host's file system sets its times when what it was told to write is carried out.
    #[test]
    fn on_another_host_nothing_is_said_until_all_is_carried_out() {
        let judge =
            |changed, after| seen(AT - SECOND, 0).judge(found(changed), 1, own(false), AT + after);
        assert_eq!(judge(AT + SECOND, SECOND), None);
        assert_eq!(judge(AT + 30 * SECOND, CARRIED + 500), Some(true));
        assert_eq!(judge(AT + CARRIED + 501, 2 * CARRIED), Some(false));
    }
}
