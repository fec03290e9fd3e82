//! What a run notes about a file that it writes, so that the next one can tell its last write from somebody else's.
//!
//! A file's time of change says when, not by whom. So with every write the time is noted, in memory that is a mapped file:
//! it outlives `kill -9`, and the kernel carries it to the disk within a minute. If the file was last changed no later than
//! the run's last write (and [`SLACK`] for what was under way), the run itself did it: while it lived its lock kept others
//! out. Besides, the number of the run that writes is put into an attribute of the file itself, before its first write:
//! another daemon that has written since, on whatever host and within whatever time, has left its own there.
//!
//! What escapes both: a program that is not Larder and writes within that slack after the kill. That is what
//! `docs/stores.md` says.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use larder_runtime::{SharedRegion, boot_id};
use rustix::fs::XattrFlags;
use rustix::time::{ClockId, clock_gettime};

/// A write that was under way when its process was killed may still be carried out for so long, nanoseconds.
pub(super) const SLACK: i128 = 1_000_000_000;
/// After a power cut the notes are those that were carried to the disk: as old as this at most, nanoseconds.
pub(super) const CARRIED: i128 = 60_000_000_000;
/// No file system's clock goes in longer steps, on this host.
pub(super) const TICK: Duration = Duration::from_millis(20);
/// The attribute with the number of the last run that wrote.
const ATTRIBUTE: &str = "user.larder.writer";

// Words of the notes. The run's number is stored last.
const RUN: usize = 0;
const LAST: usize = 1;
const BOOT: usize = 2;
const SKEW: usize = 4;
const BYTES: u64 = 64;

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Former {
    /// Whose notes they are.
    pub(super) run: u64,
    /// Its last write, nanoseconds since 1970 by the clock of this host.
    pub(super) last_ns: i128,
    /// The file's clock was so far ahead of this host's, nanoseconds.
    pub(super) skew_ns: i128,
    /// The system has been started anew since.
    pub(super) rebooted: bool,
}

impl Former {
    /// Whether a change at that time, by the file's clock, was the run's own. `boot_ns` is when this system was started,
    /// `writer` the run that the file's attribute names.
    pub(super) fn explains(
        &self,
        changed_ns: i128,
        boot_ns: Option<i128>,
        writer: Option<u64>,
    ) -> bool {
        let changed = changed_ns - self.skew_ns;
        let in_time = match (self.rebooted, boot_ns) {
            (false, _) => changed <= self.last_ns + SLACK,
            (true, Some(boot)) => changed < boot && changed <= self.last_ns + CARRIED,
            (true, None) => false,
        };
        in_time && writer.is_none_or(|writer| writer == self.run)
    }
}

/// The notes of this run on one file.
#[derive(Debug)]
pub(super) struct Notes {
    run: u64,
    /// Kept for its lock.
    region: Option<SharedRegion>,
    begun: AtomicBool,
    beginning: Mutex<()>,
    /// What the region keeps too, for the run itself: its last change, and how far the file's clock is ahead.
    last: AtomicU64,
    skew: AtomicI64,
}

/// By the clock that file systems take their times from, nanoseconds since 1970.
fn now_ns() -> i128 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}

fn boot_words() -> [u64; 2] {
    let all = u128::from_le_bytes(boot_id().unwrap_or_default());
    [all as u64, (all >> 64) as u64]
}

/// When this system was started, nanoseconds since 1970.
pub(super) fn boot_ns() -> Option<i128> {
    let text = std::fs::read_to_string("/proc/stat").ok()?;
    let seconds: i128 = text.lines().find_map(|l| l.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(seconds * 1_000_000_000)
}

/// The run that wrote the file last, as it says itself; `None` if it does not.
pub(super) fn writer(file: impl AsFd) -> Option<u64> {
    let mut value = [0u8; 17];
    let len = rustix::fs::fgetxattr(file, ATTRIBUTE, &mut value).ok()?;
    u64::from_str_radix(std::str::from_utf8(value.get(..len)?).ok()?, 16).ok()
}

/// When it was last changed, nanoseconds since 1970.
pub(super) fn changed_ns(meta: &rustix::fs::Stat) -> i128 {
    let ns = |s: i64, ns: i64| i128::from(s) * 1_000_000_000 + i128::from(ns);
    ns(meta.st_ctime, meta.st_ctime_nsec as i64).max(ns(meta.st_mtime, meta.st_mtime_nsec as i64))
}

/// It was changed within the last tick.
pub(super) fn is_recent(meta: &rustix::fs::Stat) -> bool {
    (now_ns() - changed_ns(meta)).unsigned_abs() < TICK.as_nanos()
}

impl Notes {
    /// Opens the notes of that name, and says what is in them. Without a directory, or where it has no room, nothing is noted:
    /// after a kill the file is then not known to be as it was.
    pub(super) fn open(dir: Option<&Path>, name: &str, run: u64) -> (Notes, Option<Former>) {
        let region = dir.and_then(|dir| {
            let made = std::fs::create_dir_all(dir).map_err(|e| e.to_string());
            match made.and_then(|()| SharedRegion::open(dir, name, BYTES).map_err(|e| e.to_string())) {
                Ok(region) => Some(region),
                Err(why) => {
                    tracing::warn!("nothing can be noted in '{}': {why}; after a kill the file will be taken for changed", dir.display());
                    None
                }
            }
        });
        let former = region.as_ref().and_then(|region| former(region.words()));
        let notes = Notes {
            run,
            region,
            begun: AtomicBool::new(false),
            beginning: Mutex::new(()),
            last: AtomicU64::new(0),
            skew: AtomicI64::new(0),
        };
        (notes, former)
    }

    /// This run's number.
    pub(super) fn run(&self) -> u64 {
        self.run
    }

    /// The file is about to be changed.
    pub(super) fn changing(&self, file: impl AsFd) {
        if !self.begun.load(Ordering::Acquire) {
            self.begin(file);
        }
        self.changed();
    }

    /// A change has been carried out.
    pub(super) fn changed(&self) {
        let now = now_ns() as u64;
        self.last.store(now, Ordering::Release);
        if let Some(region) = &self.region {
            region.words()[LAST].store(now, Ordering::Release);
        }
    }

    /// Whether this run made the file's last change, which was at that time by the file's clock, as a later run would ask:
    /// see [`Former::explains`].
    pub(super) fn explains(&self, changed_ns: i128, file: impl AsFd) -> bool {
        if !self.begun.load(Ordering::Acquire) {
            return false;
        }
        let own = Former {
            run: self.run,
            last_ns: i128::from(self.last.load(Ordering::Acquire)),
            skew_ns: i128::from(self.skew.load(Ordering::Acquire)),
            rebooted: false,
        };
        own.explains(changed_ns, None, writer(file))
    }

    fn begin(&self, file: impl AsFd) {
        let _one = self.beginning.lock().unwrap_or_else(PoisonError::into_inner);
        if self.begun.load(Ordering::Acquire) {
            return;
        }
        let before = now_ns();
        let said = rustix::fs::fsetxattr(
            file.as_fd(),
            ATTRIBUTE,
            format!("{:016x}", self.run).as_bytes(),
            XattrFlags::empty(),
        );
        if let Err(e) = &said {
            tracing::debug!("the file takes no attribute: {e}");
        }
        // The attribute has set the file's time of change, by the clock of whoever keeps the file.
        let skew = match (said, rustix::fs::fstat(file)) {
            (Ok(()), Ok(meta)) => changed_ns(&meta) - before,
            _ => 0,
        };
        self.last.store(now_ns() as u64, Ordering::Release);
        self.skew.store(skew as i64, Ordering::Release);
        if let Some(region) = &self.region {
            let words = region.words();
            words[RUN].store(0, Ordering::SeqCst);
            words[LAST].store(now_ns() as u64, Ordering::SeqCst);
            let boot = boot_words();
            words[BOOT].store(boot[0], Ordering::SeqCst);
            words[BOOT + 1].store(boot[1], Ordering::SeqCst);
            words[SKEW].store(skew as i64 as u64, Ordering::SeqCst);
            words[RUN].store(self.run, Ordering::SeqCst);
            // After a power cut there are notes at all.
            if let Err(e) = std::fs::File::open(region.path()).and_then(|f| f.sync_all()) {
                tracing::debug!("the notes are not durable: {e}");
            }
        }
        self.begun.store(true, Ordering::Release);
    }
}

fn former(words: &[AtomicU64]) -> Option<Former> {
    let word = |at: usize| words[at].load(Ordering::Acquire);
    let run = word(RUN);
    let boot = boot_words();
    (run != 0).then(|| Former {
        run,
        last_ns: i128::from(word(LAST)),
        skew_ns: i128::from(word(SKEW) as i64),
        rebooted: boot == [0, 0] || boot != [word(BOOT), word(BOOT + 1)],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_change_it_was() {
        let second = 1_000_000_000;
        let former = Former { run: 7, last_ns: 100 * second, skew_ns: 0, rebooted: false };
        assert!(former.explains(100 * second, None, Some(7)));
        assert!(former.explains(101 * second, None, None), "what was under way");
        assert!(!former.explains(102 * second, None, Some(7)), "too late");
        assert!(!former.explains(100 * second, None, Some(8)), "another daemon");
        let ahead = Former { skew_ns: 50 * second, ..former };
        assert!(ahead.explains(150 * second, None, Some(7)));
        assert!(!ahead.explains(153 * second, None, Some(7)));
        let rebooted = Former { rebooted: true, ..former };
        assert!(rebooted.explains(130 * second, Some(200 * second), Some(7)));
        assert!(!rebooted.explains(130 * second, Some(120 * second), Some(7)), "since the start");
        assert!(
            !rebooted.explains(170 * second, Some(200 * second), Some(7)),
            "longer than notes lie"
        );
        assert!(!rebooted.explains(130 * second, None, Some(7)));
    }

    #[test]
    fn notes_outlive_their_run() {
        let dir = tempfile::TempDir::new().unwrap();
        let file = tempfile::tempfile().unwrap();
        let (notes, former) = Notes::open(Some(dir.path()), "a", 5);
        assert_eq!(former, None);
        drop(notes);
        let (notes, former) = Notes::open(Some(dir.path()), "a", 6);
        assert_eq!(former, None, "nothing was written");
        notes.changing(&file);
        drop(notes);
        let (notes, former) = Notes::open(Some(dir.path()), "a", 8);
        let found = former.unwrap();
        assert_eq!((found.run, found.rebooted), (6, false));
        let changed = changed_ns(&rustix::fs::fstat(&file).unwrap());
        assert!(found.explains(changed, boot_ns(), writer(&file)));
        assert!(matches!(writer(&file), Some(6) | None));
        notes.changing(&file);
        assert!(!found.explains(changed, boot_ns(), Some(8)));
        let (_, none) = Notes::open(None, "a", 9);
        assert_eq!(none, None);
    }
}
