//! What a run notes about a file that it writes, so that the next one can tell its last write from somebody else's.
//!
//! A file's time of change says when, not by whom. So with every write it is noted when it began and when it had ended, in
//! memory that is a mapped file: it outlives `kill -9`, and the kernel carries it to the disk within a minute (and it is made
//! durable before the cache takes a write for durable that it would use the lines of after a power cut). If the file was
//! last changed no earlier than the run's newest finished write began, and no later than its last one ended (and
//! [`SLACK`](super::watch::SLACK) if there was more under way), the run itself did it: while it lived its lock kept others out. A
//! file that was changed earlier is an older state of it, from a snapshot or a copy of the disk that it lies on. Besides, the
//! number of the run that writes is put into an attribute of the file itself, before its first write: another daemon that has
//! written since, on whatever host and within whatever time, has left its own there.
//!
//! What escapes all of it: a program that is not Larder and writes within that slack after a kill in the midst of writes. That is
//! what `docs/stores.md` says.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use larder_runtime::{SharedRegion, boot_id};
use parking_lot::Mutex;
use rustix::fs::XattrFlags;
use rustix::time::{ClockId, clock_gettime};

use super::watch::{CARRIED, Own, SLACK, TICK, is_coarse};

/// The attribute with the number of the last run that wrote.
const ATTRIBUTE: &str = "user.larder.writer";

// Words of the notes. What says that they are whole is stored last.
const RUN: usize = 0;
const LAST: usize = 1;
const BOOT: usize = 2;
const SKEW: usize = 4;
/// When the newest write began that has ended.
const FLOOR: usize = 5;
const FLAGS: usize = 6;
/// The run that has the file now, or had it last, whether or not it wrote.
const ATTACHED: usize = 7;
/// [`RUN`], and by whom: notes of versions that had less of them are not used.
const CHECK: usize = 8;
/// Changes under way.
const BUSY: usize = 9;
const BYTES: u64 = 80;
const VERSION: u64 = 0x6c61_7264_6e6f_7402;

/// Somebody else has changed the file, and lines from before may be cached.
const DOUBT: u64 = 1;
/// The file's times are this host's own.
const LOCAL: u64 = 1 << 1;
/// The file has taken the attribute.
const MARKED: u64 = 1 << 2;

/// File systems of this host, by what `statfs` says: a change that has ended has set the file's time, by this host's clock.
const LOCAL_KINDS: [u64; 8] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
    0x0102_1994, // tmpfs
    0xf2f5_2010, // F2FS
    0xca45_1a4e, // bcachefs
    0x2fc1_2fc1, // ZFS
    0x794c_7630, // overlayfs
];

/// What was found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Former {
    /// Whose notes they are; 0 if nobody wrote.
    pub(super) run: u64,
    /// Who had the file last: if it is another, that one has not written.
    pub(super) attached: u64,
    /// Its changes.
    pub(super) own: Own,
    /// The system has been started anew since.
    pub(super) rebooted: bool,
    /// Its number was put into the file's attribute.
    pub(super) marked: bool,
    /// It has noticed a change that was not its own.
    pub(super) doubted: bool,
    /// Nothing was under way when it ended.
    pub(super) at_rest: bool,
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
        if self.doubted || is_coarse(changed_ns) {
            return false;
        }
        let in_time = match (self.rebooted, boot_ns) {
            (false, _) => {
                let late = if self.at_rest && self.own.local { 0 } else { SLACK };
                self.own.explains(changed_ns, late)
            }
            (true, Some(boot)) => {
                changed_ns - self.own.skew_ns < boot && self.own.explains(changed_ns, CARRIED)
            }
            (true, None) => false,
        };
        in_time && writer.map_or(!self.marked, |writer| writer == self.run)
    }

    /// The run that had the file last and has written nothing.
    pub(super) fn idle(&self) -> Option<u64> {
        (self.attached != 0 && self.attached != self.run).then_some(self.attached)
    }
}

/// The notes of this run on one file.
#[derive(Debug)]
pub(super) struct Notes {
    run: u64,
    region: Option<SharedRegion>,
    known: AtomicBool,
    begun: AtomicBool,
    beginning: Mutex<()>,
    /// What the region keeps too, for the run itself.
    last: AtomicU64,
    floor: AtomicU64,
    skew: AtomicI64,
    flags: AtomicU64,
}

fn clock_ns(clock: ClockId) -> i128 {
    let now = clock_gettime(clock);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}

/// By the clock that file systems take their times from, nanoseconds since 1970: no later than the time that a change gets from
/// now on.
pub(super) fn coarse_now_ns() -> i128 {
    clock_ns(ClockId::RealtimeCoarse)
}

/// By the finest clock: no earlier than the time that a change has got until now.
pub(super) fn now_ns() -> i128 {
    clock_ns(ClockId::Realtime)
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

fn is_local(file: impl AsFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| LOCAL_KINDS.contains(&(fs.f_type as u64)))
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
        let former = region.as_ref().map(|region| former(region.words()));
        let notes = Notes {
            run,
            region,
            known: AtomicBool::new(false),
            begun: AtomicBool::new(false),
            beginning: Mutex::new(()),
            last: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            skew: AtomicI64::new(0),
            flags: AtomicU64::new(0),
        };
        (notes, former)
    }

    /// This run's number.
    pub(super) fn run(&self) -> u64 {
        self.run
    }

    /// The cache knows this run by now: that it has written nothing counts.
    pub(super) fn attached(&self) {
        if !self.known.swap(true, Ordering::SeqCst) && !self.is_doubted() {
            self.store(ATTACHED, self.run);
        }
    }

    fn store(&self, at: usize, value: u64) {
        if let Some(region) = &self.region {
            region.words()[at].store(value, Ordering::SeqCst);
        }
    }

    fn flag(&self, flag: u64, on: bool) {
        let before = if on {
            self.flags.fetch_or(flag, Ordering::SeqCst)
        } else {
            self.flags.fetch_and(!flag, Ordering::SeqCst)
        };
        if self.begun.load(Ordering::SeqCst) {
            self.store(FLAGS, if on { before | flag } else { before & !flag });
        }
    }

    /// Somebody else has changed the file: nothing is proved from now on.
    pub(super) fn doubt(&self) {
        // Not even that nothing was changed.
        self.store(ATTACHED, 0);
        self.flag(DOUBT, true);
        // Nor after a power cut in the next moment, when the lines may not be dropped durably yet.
        self.keep();
    }

    /// No line is left from before that.
    pub(super) fn trust(&self) {
        self.flag(DOUBT, false);
    }

    pub(super) fn is_doubted(&self) -> bool {
        self.flags.load(Ordering::SeqCst) & DOUBT != 0
    }

    /// The file is about to be changed, at that time by the coarse clock.
    pub(super) fn begins(&self, file: impl AsFd, start: i128) {
        if !self.begun.load(Ordering::Acquire) {
            self.begin(file);
        }
        if start + SLACK < i128::from(self.floor.load(Ordering::Relaxed)) {
            // The clock was set back: what is changed from now on has an earlier time.
            self.floor.store(start as u64, Ordering::SeqCst);
            self.store(FLOOR, start as u64);
        }
        self.now();
        if let Some(region) = &self.region {
            region.words()[BUSY].fetch_add(1, Ordering::AcqRel);
        }
    }

    fn now(&self) {
        let now = now_ns() as u64;
        self.last.store(now, Ordering::Release);
        if let Some(region) = &self.region {
            region.words()[LAST].store(now, Ordering::Release);
        }
    }

    /// What began has ended; if it is certain to have set the file's time, with when it began.
    pub(super) fn ended(&self, start: Option<i64>) {
        self.now();
        if let Some(start) = start {
            self.floor.fetch_max(start as u64, Ordering::AcqRel);
            if let Some(region) = &self.region {
                region.words()[FLOOR].fetch_max(start as u64, Ordering::AcqRel);
            }
        }
        if let Some(region) = &self.region {
            region.words()[BUSY].fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The end of the run's last change, or 0.
    pub(super) fn last_ns(&self) -> i128 {
        i128::from(self.last.load(Ordering::Acquire))
    }

    /// This run's changes so far.
    pub(super) fn own(&self) -> Own {
        Own {
            floor_ns: i128::from(self.floor.load(Ordering::Acquire)),
            last_ns: self.last_ns(),
            skew_ns: i128::from(self.skew.load(Ordering::Acquire)),
            local: self.flags.load(Ordering::Acquire) & LOCAL != 0,
        }
    }

    /// Whether this run made the file's last change, which was at that time by the file's clock, as a later run would ask:
    /// see [`Former::explains`].
    pub(super) fn explains(&self, changed_ns: i128, file: impl AsFd) -> bool {
        if !self.begun.load(Ordering::Acquire) {
            return false;
        }
        let flags = self.flags.load(Ordering::SeqCst);
        let own = Former {
            run: self.run,
            attached: self.run,
            own: self.own(),
            rebooted: false,
            marked: flags & MARKED != 0,
            doubted: flags & DOUBT != 0,
            at_rest: false,
        };
        own.explains(changed_ns, None, writer(file))
    }

    /// Carries the notes to the disk.
    pub(super) fn keep(&self) -> bool {
        let Some(region) = &self.region else { return true };
        let kept = std::fs::File::open(region.path()).and_then(|f| f.sync_all());
        if let Err(e) = &kept {
            tracing::warn!("notes in '{}' are not durable: {e}", region.path().display());
        }
        kept.is_ok()
    }

    fn begin(&self, file: impl AsFd) {
        let _one = self.beginning.lock();
        if self.begun.load(Ordering::Acquire) {
            return;
        }
        // Whatever is noted of the run before does not hold once the attribute names this one.
        self.store(CHECK, 0);
        self.store(ATTACHED, 0);
        let before = coarse_now_ns();
        let said = rustix::fs::fsetxattr(
            file.as_fd(),
            ATTRIBUTE,
            format!("{:016x}", self.run).as_bytes(),
            XattrFlags::empty(),
        );
        if let Err(e) = &said {
            tracing::debug!("the file takes no attribute: {e}");
        }
        let local = is_local(file.as_fd());
        // The attribute has set the file's time of change, by the clock of whoever keeps the file.
        let skew = match (&said, rustix::fs::fstat(file)) {
            (Ok(()), Ok(meta)) if !local => changed_ns(&meta) - before,
            _ => 0,
        };
        self.skew.store(skew as i64, Ordering::Release);
        self.flags.fetch_or(if local { LOCAL } else { 0 }, Ordering::SeqCst);
        self.flags.fetch_or(if said.is_ok() { MARKED } else { 0 }, Ordering::SeqCst);
        self.now();
        self.store(FLOOR, 0);
        self.store(BUSY, 0);
        let boot = boot_words();
        self.store(BOOT, boot[0]);
        self.store(BOOT + 1, boot[1]);
        self.store(SKEW, skew as i64 as u64);
        self.begun.store(true, Ordering::SeqCst);
        self.store(FLAGS, self.flags.load(Ordering::SeqCst));
        self.store(RUN, self.run);
        self.store(ATTACHED, self.run);
        self.store(CHECK, self.run ^ VERSION);
        // After a power cut there are notes at all.
        self.keep();
    }
}

fn former(words: &[AtomicU64]) -> Former {
    let word = |at: usize| words[at].load(Ordering::Acquire);
    let boot = boot_words();
    let run = if word(CHECK) == word(RUN) ^ VERSION { word(RUN) } else { 0 };
    Former {
        run,
        attached: word(ATTACHED),
        own: Own {
            floor_ns: i128::from(word(FLOOR)),
            last_ns: i128::from(word(LAST)),
            skew_ns: i128::from(word(SKEW) as i64),
            local: word(FLAGS) & LOCAL != 0,
        },
        rebooted: boot == [0, 0] || boot != [word(BOOT), word(BOOT + 1)],
        marked: word(FLAGS) & MARKED != 0,
        doubted: word(FLAGS) & DOUBT != 0,
        at_rest: word(BUSY) == 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i128 = 1_000_000_000;

    fn former(at: i128) -> Former {
        Former {
            run: 7,
            attached: 7,
            own: Own { floor_ns: at - SECOND / 4, last_ns: at, skew_ns: 0, local: true },
            rebooted: false,
            marked: true,
            doubted: false,
            at_rest: false,
        }
    }

    #[test]
    fn whose_change_it_was() {
        let at = 100 * SECOND + 1_234_567;
        let found = former(at);
        assert!(found.explains(at, None, Some(7)));
        let unmarked = Former { marked: false, ..found };
        assert!(unmarked.explains(at + SECOND, None, None), "what was under way");
        assert!(!found.explains(at, None, None), "the attribute is gone");
        assert!(!found.explains(at + SECOND + 1, None, Some(7)), "too late");
        let at_rest = Former { at_rest: true, ..found };
        assert!(at_rest.explains(at, None, Some(7)));
        assert!(!at_rest.explains(at + 1, None, Some(7)), "nothing was under way");
        assert!(!found.explains(at, None, Some(8)), "another daemon");
        assert!(!Former { doubted: true, ..found }.explains(at, None, Some(7)));
        let ahead =
            Former { own: Own { skew_ns: 50 * SECOND, local: false, ..found.own }, ..found };
        assert!(ahead.explains(at + 50 * SECOND, None, Some(7)));
        assert!(!ahead.explains(at + 53 * SECOND, None, Some(7)));
        assert!(!ahead.explains(at + 48 * SECOND, None, Some(7)), "an older state");
        let rebooted = Former { rebooted: true, ..found };
        let boot = |seconds| Some(seconds * SECOND);
        assert!(rebooted.explains(at + 30 * SECOND, boot(200), Some(7)));
        assert!(!rebooted.explains(at + 30 * SECOND, boot(120), Some(7)), "since the start");
        assert!(!rebooted.explains(at + 70 * SECOND, boot(200), Some(7)), "longer than notes lie");
        assert!(!rebooted.explains(at + 30 * SECOND, None, Some(7)));
        assert!(!rebooted.explains(at - SECOND, boot(200), Some(7)), "an older state");
    }

    /// The file system was rolled back to a snapshot: the file's last change is older than the last one that is noted.
    #[test]
    fn a_time_before_the_last_write_is_an_older_state() {
        let at = 100 * SECOND + 1_234_567;
        assert!(former(at).explains(at - SECOND / 4, None, Some(7)));
        assert!(!former(at).explains(at - SECOND / 4 - 1, None, Some(7)));
    }

    #[test]
    fn coarse_times_prove_nothing() {
        let at = 100 * SECOND;
        assert!(!former(at).explains(at, None, Some(7)));
        assert!(!former(at + 5).explains(at - SECOND / 10, None, Some(7)), "tenths");
    }

    #[test]
    fn notes_outlive_their_run() {
        let dir = tempfile::TempDir::new().unwrap();
        let file = tempfile::tempfile().unwrap();
        let written = |notes: &Notes| {
            let start = coarse_now_ns();
            notes.begins(&file, start);
            rustix::io::pwrite(&file, b"x", 0).unwrap();
            notes.ended(Some(start as i64));
        };
        let (notes, former) = Notes::open(Some(dir.path()), "a", 5);
        assert_eq!((former.unwrap().run, former.unwrap().idle()), (0, None));
        notes.attached();
        drop(notes);
        let (notes, former) = Notes::open(Some(dir.path()), "a", 6);
        assert_eq!(
            (former.unwrap().run, former.unwrap().idle()),
            (0, Some(5)),
            "nothing was written"
        );
        notes.attached();
        written(&notes);
        drop(notes);
        let (notes, former) = Notes::open(Some(dir.path()), "a", 8);
        let found = former.unwrap();
        assert_eq!((found.run, found.rebooted, found.idle()), (6, false, None));
        let changed = changed_ns(&rustix::fs::fstat(&file).unwrap());
        assert!(found.explains(changed, boot_ns(), writer(&file)));
        assert!(matches!(writer(&file), Some(6) | None));
        written(&notes);
        assert!(!found.explains(changed, boot_ns(), Some(8)));
        // It notices somebody else's change; then nothing is left of what was there before.
        let doubted = |notes| {
            drop(notes);
            Notes::open(Some(dir.path()), "a", 9)
        };
        notes.doubt();
        assert!(notes.is_doubted());
        let (notes, former) = doubted(notes);
        assert!(former.unwrap().doubted && former.unwrap().idle().is_none());
        written(&notes);
        notes.doubt();
        notes.trust();
        let (_, former) = doubted(notes);
        assert!(!former.unwrap().doubted && former.unwrap().run == 9);
        let (_, none) = Notes::open(None, "a", 9);
        assert!(none.is_none());
    }

    /// Notes as they were before they had a lower bound.
    #[test]
    fn older_notes_are_not_used() {
        let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
        words[RUN].store(7, Ordering::Relaxed);
        words[LAST].store(1 << 60, Ordering::Relaxed);
        assert_eq!(super::former(&words).run, 0);
    }
}
