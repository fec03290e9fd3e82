//! Volumes that write back: what a start finds of them, how they come and go, how they are doing.

pub(super) mod anew;
mod asked;
mod before;
mod closing;
pub mod discard;
mod ends;
pub mod journal;
#[cfg(test)]
mod journal_model;
mod kept;
mod lost;
mod marks;
pub mod offline;
mod patient;
mod recover;
mod site;
mod start;
mod steps;
mod thrift;
mod view;
mod words;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use larder_base::{ByteSize, Nanos};
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::holder::{Held, Holder};
use larder_engine::block::writeback::log::WriteLog;
use larder_engine::block::writeback::marker::Marker;
use larder_format::Uuid;
use larder_format::block::marker::MAX_HOST;
use larder_format::block::superblock::WrittenBack;
use larder_runtime::Payload;
use larder_volume::marker::MarkerPlace;

use super::attached::Attached;
use super::attended::{is_unwanted, lock_wanted};
use super::locked;
use super::operators::LOOK;
use super::volume::Volume;
pub(super) use before::{check, look, may_be_journaled};
pub use before::{marker_answers, size_of};
pub use journal::JournalAt;
use journal::Journaling;
pub use larder_engine::block::writeback::destager::Pace;
pub use larder_engine::block::writeback::log::{Status, most_on_its_way};
pub use larder_engine::block::writeback::throttle::Age;
pub use larder_engine::block::writeback::volume_log::{Cuts, Grain, Order};
pub(super) use start::{check_through, start};
use steps::{NotDone, Way};

pub(super) use thrift::Saves;

use super::Core;
use super::open::{CacheConfig, CacheError};
pub(super) use patient::Asking;
#[cfg(test)]
pub(super) use patient::Patient;
pub(super) use recover::order_words;
pub use recover::{RecoverError, RecoverWish, Recovery, recover};
pub use site::NoJournal;
pub use view::view;
pub use words::{
    BACK, FORM, LEAST_BOUND, LogSize, NotBack, NotHeld, check_bounds, check_mark, order_name,
};

/// Where the marker of a volume is, which says whether a cache may hold what its store lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MarkerAt {
    /// Beside the store, where its kind has a place for it.
    #[default]
    Beside,
    /// There: a path, or the URI of an NBD export.
    At(String),
    /// There is none, and the operator has said so: nothing tells a cache that is lost, or another that comes.
    Nowhere,
}

/// How a volume writes back.
#[derive(Clone, Debug, PartialEq)]
pub struct BackConfig {
    /// In which order its store gets what was written.
    pub order: Order,
    /// When.
    pub pace: Pace,
    /// Bytes of the log that it may hold; by default an equal share of four fifths of the log, at most 4 GiB.
    pub dirty_max: Option<ByteSize>,
    /// How old what is dirty may become; by default 60 s, as an aim. Not with a pace that waits for the log to fill up.
    pub age: Option<Age>,
}

impl BackConfig {
    /// Its store gets all of an epoch or nothing, through a journal.
    pub fn is_journaled(&self) -> bool {
        matches!(self.order, Order::Journaled(_))
    }
}

impl Default for BackConfig {
    fn default() -> BackConfig {
        BackConfig {
            order: Order::Ordered(Grain::Flush),
            pace: Pace::Async,
            dirty_max: None,
            age: None,
        }
    }
}

/// What is wanted of a volume that comes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackWish {
    /// It writes back so; `None`: it writes through.
    pub back: Option<BackConfig>,
    /// Where its marker is.
    pub marker: MarkerAt,
    /// Where its journal is, if it has one.
    pub journal: JournalAt,
    /// Its store is the one that it was, though it is known by another name, or is a copy: the operator says so.
    pub moved: bool,
}

impl CacheConfig {
    /// What is wanted of a volume of that name where it does not say so itself when it comes.
    pub fn wish_of(&self, name: &str) -> BackWish {
        BackWish {
            back: self.back.get(name).or(self.back_by_default.as_ref()).cloned(),
            marker: self.markers.get(name).cloned().unwrap_or_default(),
            journal: self.journals.get(name).cloned().unwrap_or_default(),
            moved: self.moved.contains(name),
        }
    }
}

/// How a volume that writes back is doing.
#[derive(Clone, Debug, PartialEq)]
pub struct BackStatus {
    /// How it writes back.
    pub config: BackConfig,
    /// Its generation: it rises with each attach.
    pub generation: u64,
    /// A second holder cannot write: its store or marker keeps it out.
    pub fenced: bool,
    /// What the log says.
    pub status: Status,
    /// How long ago the oldest dirty write was logged.
    pub age: Option<Nanos>,
    /// The name of the last consistency point that the store has.
    pub stored_mark: Option<String>,
    /// The name of the last that is durable, in the log or in the store; empty if it could not be read.
    pub last_mark: Option<String>,
    /// Why nothing is logged any more, if so.
    pub closed: Option<String>,
    /// Why its journal fails, if it does: what is dirty waits for that, and not for the store.
    pub journal_failure: Option<String>,
    /// What is wrong with its marker or its journal, or was not long ago: somebody has removed them or written over them.
    pub troubles: Vec<String>,
    /// Its store has become smaller, and it is only read.
    pub shrunk: Option<Beyond>,
}

/// A store that has become smaller than its volume was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beyond {
    /// Bytes that it has,
    pub end: u64,
    /// and had.
    pub had: u64,
    /// Bytes beyond its end that are dirty,
    pub dirty: u64,
    /// the first of them, and the first behind the last.
    pub range: (u64, u64),
}

/// Of a volume that is served without a cache.
pub(super) const NO_CACHE: (Uuid, u64) = (Uuid([0; 16]), 0);

/// Why nothing can be done with a volume whose store has become smaller.
pub(super) const ONLY_SHOWN: &str = "its store has become smaller, and it is only read: restore its size and attach it again, or stop and discard what lies \
                                     beyond its end";

/// Until it goes nobody else changes a volume over, or detaches it.
pub(super) struct Alone(Arc<AtomicBool>);

impl Drop for Alone {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// A volume that writes back.
pub(super) struct Written {
    pub attached: Arc<Attached>,
    /// Where its marker is; none by the operator's word.
    pub place: Option<Mutex<Box<dyn MarkerPlace>>>,
    /// As the superblock has it.
    pub state: WrittenBack,
    /// It was said that what cannot be read stops it; and bytes that were given up, as far as that was said.
    pub stopped: AtomicBool,
    pub given_up: AtomicU64,
    pub config: BackConfig,
    /// Where its marker was said to be.
    pub marker: MarkerAt,
    /// Where its journal was said to be.
    pub journal_at: JournalAt,
    /// Where its epochs go, if it is journaled.
    pub journal: Option<Journaling>,
    /// That keeps a second holder out.
    pub fenced: bool,
    /// It was said that it may hold less of the log than is stated: what it may; 0 if it may hold all of that.
    pub lowered: AtomicU64,
    /// Number of its marker.
    pub number: Mutex<u64>,
    /// That of the last which is known durable, and the run that it names.
    pub durable: AtomicU64,
    pub durable_run: AtomicU64,
    /// The last clean one that was to be written, if nothing is known to have been written since.
    pub tried: Mutex<Option<Marker>>,
    /// It did not answer when it was looked at last.
    pub silent: AtomicBool,
    /// The last that is written of it: it says, or is about to, that nothing is dirty, and is nobody else's for that.
    pub leaves: AtomicBool,
    /// What is wrong with it.
    pub trouble: Mutex<kept::Troubles>,
    /// How far the store is by its marker: its frontier, with the marks behind it.
    pub said: AtomicU64,
    /// Up to which record what is dirty was found by a start, and the time that its marker said then.
    pub recovered: (u64, u64),
    /// It is only shown: nothing is answered, nor destaged.
    pub shown: bool,
}

/// The write log, and the volumes that it serves.
pub(super) struct Back {
    log: Mutex<WriteLog<Payload>>,
    volumes: RwLock<BTreeMap<u32, Arc<Written>>>,
    /// This cache, and its run.
    cache: (Uuid, AtomicU64),
    /// A start has found a failed log, or a device that does not work: what is dirty comes to the stores, and nothing is logged.
    drains: AtomicBool,
}

/// The log as those have it who look at it. It is changed by [`tell_log`], so that what follows from that is done.
pub(super) struct Looks<'a>(MutexGuard<'a, WriteLog<Payload>>);

impl Deref for Looks<'_> {
    type Target = WriteLog<Payload>;

    fn deref(&self) -> &WriteLog<Payload> {
        &self.0
    }
}

impl Drop for Back {
    /// Journals that do not answer are waited for together.
    fn drop(&mut self) {
        let volumes = self.volumes.get_mut().unwrap_or_else(PoisonError::into_inner);
        volumes.values().filter_map(|written| written.journal.as_ref()).for_each(|journal| {
            journal.end();
        });
    }
}

impl Back {
    fn new(log: WriteLog<Payload>, cache: (Uuid, u64)) -> Back {
        let cache = (cache.0, cache.1.into());
        Back { log: Mutex::new(log), volumes: RwLock::default(), cache, drains: false.into() }
    }

    /// The log, to look at.
    pub(super) fn log(&self) -> Looks<'_> {
        Looks(locked(&self.log))
    }

    /// Does `f` with the log, for [`tell_log`] and queues: what it leaves to be done they have done.
    pub(super) fn with_log<R>(&self, f: impl FnOnce(&mut WriteLog<Payload>) -> R) -> R {
        f(&mut locked(&self.log))
    }

    pub(super) fn written(&self, attachment: u32) -> Option<Arc<Written>> {
        self.volumes.read().unwrap_or_else(PoisonError::into_inner).get(&attachment).cloned()
    }

    /// The volume with this attachment number.
    pub(super) fn volume(&self, attachment: u32) -> Option<Arc<Attached>> {
        self.written(attachment).map(|written| written.attached.clone())
    }

    fn add(&self, written: Written) {
        let mut volumes = self.volumes.write().unwrap_or_else(PoisonError::into_inner);
        volumes.insert(written.state.attachment, Arc::new(written));
    }

    fn remove(&self, attachment: u32) {
        let mut volumes = self.volumes.write().unwrap_or_else(PoisonError::into_inner);
        let gone = volumes.remove(&attachment);
        drop(volumes);
        // To close its marker's place may take a while.
        drop(gone);
    }
}

impl Attached {
    /// Its attachment number, if it writes back.
    #[inline]
    pub(super) fn attachment(&self) -> Option<u32> {
        match self.attachment.load(Ordering::Relaxed) {
            0 => None,
            attachment => Some(attachment),
        }
    }
}

/// What is dirty beyond the end of a store that has become smaller.
fn beyond(log: &WriteLog<Payload>, attachment: u32, (end, had): (u64, u64)) -> Beyond {
    let all = log.dirty(attachment, end..had.max(end));
    let range = (all.first().map_or(0, |d| d.0), all.last().map_or(0, |d| d.0 + d.1));
    Beyond { end, had, dirty: all.iter().map(|d| d.1).sum(), range }
}

/// Nanoseconds since the Unix epoch.
fn unix_nanos() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn host_name() -> String {
    let mut name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    while name.len() > MAX_HOST {
        name.pop();
    }
    name
}

impl Core {
    fn back_of(&self, name: &str) -> Option<(&Back, Arc<Written>)> {
        let back = self.back.get()?;
        let written = back.written(self.volume(name)?.attachment()?)?;
        Some((back, written))
    }

    /// How large the write log is; `None`: there is none.
    pub fn write_log_size(&self) -> Option<LogSize> {
        self.back.get().map(|back| back.log().size())
    }

    /// Bytes of memory that what is dirty in the write log takes at most; 0 if there is none.
    pub fn write_log_memory(&self) -> u64 {
        self.back.get().map_or(0, |back| back.log().most_memory())
    }

    /// How a volume that writes back is doing; `None` of others.
    pub fn back_status(&self, name: &str) -> Option<BackStatus> {
        let (back, written) = self.back_of(name)?;
        let now = self.now();
        let log = back.log();
        let status = log.status(now, written.state.attachment)?;
        Some(BackStatus {
            config: written.config.clone(),
            generation: written.state.generation,
            fenced: written.fenced,
            age: status.oldest.map(|oldest| now.saturating_sub(oldest)),
            status,
            stored_mark: log.stored_mark(written.state.attachment).map(str::to_owned),
            last_mark: log.last_mark(written.state.attachment).map(str::to_owned),
            closed: log.closed().map(str::to_owned),
            journal_failure: written.journal.as_ref().and_then(Journaling::failure),
            troubles: self.troubles_of(&written),
            shrunk: written
                .attached
                .had()
                .map(|had| beyond(&log, written.state.attachment, (written.attached.bytes(), had))),
        })
    }

    /// A volume was attached: it writes back from now on, if that is wanted; else no cache may hold more than its store.
    pub(super) fn begin_back(&self, of: &Volume, wish: &BackWish) -> Result<(), CacheError> {
        let (name, store) = (of.name(), of.backing());
        let Some(volume) = self.volume(name) else {
            // It has no place in the cache: its store is all that there is of it.
            if wish.back.is_some() {
                let reason = "it is to write back, and the cache is not used".to_owned();
                return Err(CacheError::Volume { name: name.to_owned(), reason });
            }
            let how = (true, false);
            let asking = Asking::of(&self.config);
            return check_through((name, store), None, NO_CACHE, (wish, asking), how, &[])
                .map(drop);
        };
        let of = name.to_owned();
        let found = self.on_log(move |log| {
            let sb = log.line_space()?;
            let volume = sb.volumes.iter().find(|v| v.name == of);
            Some(((sb.uuid, sb.epoch), volume.and_then(|v| v.write_back), sb.volumes.clone()))
        })?;
        let Some((cache, record, known)) = found else { return Ok(()) };
        match wish.back {
            Some(_) => {
                let comes = (None, false);
                self.write_back(&volume, record, cache, wish, comes, &mut |_| !is_unwanted())
            }
            None => {
                let closed = self.back.get().is_some_and(|back| back.log().closed().is_some());
                let drains = closed || !self.is_enabled();
                let of = (name, store);
                let how = (drains, volume.had().is_some());
                let wish = (wish, Asking::of(&self.config));
                let mut holder = check_through(of, record.as_ref(), cache, wish, how, &known)?;
                if let Some(void) = record.filter(|_| holder.next().is_some()) {
                    self.let_go_void(name, &void);
                }
                self.voids(&volume, &mut holder)
            }
        }
    }

    /// Brings all that is dirty of a volume by now to its store. `go_on` hears how many bytes of the log it still holds, and may say no. Returns whether
    /// all of it came there.
    ///
    /// # Errors
    /// When there is no such volume, or its store is somebody else's by now.
    pub fn destage(
        &self,
        name: &str,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<bool, CacheError> {
        let left = self.back_status(name).map_or(0, |now| now.status.held.0);
        self.attended(left, go_on, |go_on| self.brings(name, go_on))
    }

    fn brings(&self, name: &str, go_on: &mut dyn FnMut(u64) -> bool) -> Result<bool, CacheError> {
        let fail =
            |reason: &str| CacheError::Volume { name: name.to_owned(), reason: reason.to_owned() };
        self.attached(name)?;
        // One that writes through has nothing dirty.
        let Some((back, written)) = self.back_of(name) else { return Ok(true) };
        if written.shown {
            return Err(fail(ONLY_SHOWN));
        }
        let attachment = written.state.attachment;
        let all = self.drain(back, &written, go_on);
        tell_log(self, self.now(), |log, asks| log.drain(attachment, false, asks));
        if !all && written.stays(&back.log()) {
            return Err(fail(&self.troubles_of(&written).join("; ")));
        }
        if let Some(why) = back.log().stands(attachment).filter(|_| !all) {
            return Err(fail(&why.to_string()));
        }
        if all {
            self.say_destaged(&written)?;
        }
        Ok(all)
    }

    /// The marker of a volume says how far its store is, durably: from then on an older copy of this cache, which has not heard of all that, is
    /// refused.
    fn say_destaged(&self, written: &Written) -> Result<(), CacheError> {
        let (volume, attachment) = (&written.attached, written.state.attachment);
        let there = |core: &Core| {
            let status = core.back.get()?.log().status(core.now(), attachment)?;
            Some(status.positions[0])
        };
        let Some(frontier) = there(self) else { return Ok(()) };
        self.look_at_marker(volume, true);
        let says = written.place.is_none() || written.said.load(Ordering::Relaxed) >= frontier;
        // One that changes over, or whose log has failed, says so itself.
        let log_closed = self.back.get().is_some_and(|back| back.log().closed().is_some());
        if says || log_closed || volume.changing.load(Ordering::SeqCst) {
            return Ok(());
        }
        let why = match self.troubles_of(written) {
            troubles if troubles.is_empty() => "its place does not answer".to_owned(),
            troubles => troubles.join("; "),
        };
        let reason = format!(
            "all of it is in its store, and its marker could not be told so ({why}): an older copy of this cache would still be believed"
        );
        Err(CacheError::Volume { name: volume.name.clone(), reason })
    }

    /// Destages all that is logged of a volume by now as fast as can be, until it is in the store or `go_on` says no. What clients write
    /// meanwhile is not waited for.
    fn drain(&self, back: &Back, written: &Written, go_on: &mut dyn FnMut(u64) -> bool) -> bool {
        let attachment = written.state.attachment;
        tell_log(self, self.now(), |log, asks| log.drain(attachment, true, asks));
        let last = back.log().status(self.now(), attachment).map_or(0, |s| s.positions[3]);
        loop {
            let (clean, held, stands) = {
                let log = back.log();
                let status = log.status(self.now(), attachment);
                let held = status.map_or(0, |status| status.held.0);
                // A volume whose log has failed writes through in the end.
                let there = status.is_some_and(|status| status.positions[0] >= last);
                let clean = (log.is_clean(attachment) || there)
                    && (log.closed().is_none() || status.is_none());
                (clean, held, log.stands(attachment).is_some() || written.is_kept(&log))
            };
            if clean {
                return true;
            }
            if stands || !go_on(held) {
                return false;
            }
            self.pause(LOOK);
        }
    }

    /// The same, if nobody does it.
    pub(super) fn try_alone(&self, volume: &Attached) -> Option<Alone> {
        let others = volume.changing.swap(true, Ordering::SeqCst);
        (!others).then(|| Alone(volume.changing.clone()))
    }

    /// A volume is changed over by one at a time.
    fn alone(&self, volume: &Attached) -> Result<Alone, CacheError> {
        match self.try_alone(volume) {
            Some(alone) => Ok(alone),
            None => {
                let reason =
                    "it is changed over or detached already: try again when that has ended"
                        .to_owned();
                Err(CacheError::Volume { name: volume.name.clone(), reason })
            }
        }
    }

    /// Has the steps of a volume that writes back carried out. `None` where it does not; else whether they were, or `go_on` has said no.
    fn let_go_back(
        &self,
        (volume, _alone): (&Arc<Attached>, &Alone),
        machine: fn(Held, Fault) -> Holder,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<bool>, CacheError> {
        let Some((back, written)) = self.back_of(&volume.name) else { return Ok(None) };
        let machine = if written.shown { Holder::left } else { machine };
        // (Who looks at the marker may have it.)
        let Some(number) = lock_wanted(&written.number).map(|number| *number) else {
            return Ok(Some(false));
        };
        let mut holder = machine(written.held(back, self.now(), number), Fault::default());
        let mut way = Way::of(self, back, volume, written.clone());
        let done = way.carry_out(&mut holder, go_on);
        match done {
            Ok(()) => Ok(Some(true)),
            Err(NotDone::Unwanted) => Ok(Some(false)),
            Err(NotDone::Failed(error)) => Err(error),
        }
    }

    /// Nobody uses a volume that goes: all that is dirty comes to its store, and cache and marker say so. `None` where it does not write back;
    /// else whether all of it came there.
    pub(super) fn write_back_no_more(
        &self,
        of: (&Arc<Attached>, &Alone),
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<bool>, CacheError> {
        self.let_go_back(of, Holder::goes, go_on)
    }

    /// Nobody uses a volume that goes, and its store may not be had: what is dirty stays in the cache, which may be moved to another host, and
    /// the marker says so. `None` where it does not write back; else how it is to be taken up if it stays after all.
    pub(super) fn carry_back(
        &self,
        (volume, alone): (&Arc<Attached>, &Alone),
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<(bool, BackWish)>, CacheError> {
        let Some((_, written)) = self.back_of(&volume.name) else { return Ok(None) };
        let wish = BackWish {
            back: Some(written.config.clone()),
            marker: written.marker.clone(),
            journal: written.journal_at.clone(),
            moved: false,
        };
        drop(written);
        let done = self.let_go_back((volume, alone), Holder::carried, go_on)?;
        Ok(done.map(|done| (done, wish)))
    }

    /// A volume changes over while it is served: it writes back from now on as is wanted, or through. Its clients wait for a moment. It is
    /// not remembered: the next start goes by its configuration. Returns false if `go_on` has said no, which hears how many bytes of the log are
    /// still to come to the store.
    ///
    /// # Errors
    /// When it does not write as it did not before either, its marker forbids it, a step fails, or its clients would have to wait too long: then
    /// it is as it was.
    pub fn change_over(
        &self,
        name: &str,
        wish: &BackWish,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<bool, CacheError> {
        let fail =
            |reason: &str| CacheError::Volume { name: name.to_owned(), reason: reason.to_owned() };
        let volume = self.attached(name)?;
        if volume.had().is_some() {
            return Err(fail(ONLY_SHOWN));
        }
        if self.recorder.is_some() {
            return Err(fail("a run that is recorded has no volumes that write back"));
        }
        match (&wish.back, volume.attachment()) {
            // It would write back when there is budget again.
            (None, None) if self.stays_through(&volume) => Ok(true),
            (Some(_), None) if self.saves(name).is_some() => Err(fail(
                "the write budget is used up: it writes back by itself when there is budget again",
            )),
            _ => {
                let left = self.back_status(name).map_or(0, |now| now.status.held.0);
                let done =
                    self.attended(left, go_on, |go_on| self.changes_over(&volume, wish, go_on))?;
                if done {
                    volume.through_by_choice.store(wish.back.is_none(), Ordering::Relaxed);
                }
                Ok(done)
            }
        }
    }

    /// The same, whoever wants it.
    fn changes_over(
        &self,
        volume: &Arc<Attached>,
        wish: &BackWish,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<bool, CacheError> {
        let name = &volume.name;
        let fail =
            |reason: &str| CacheError::Volume { name: name.clone(), reason: reason.to_owned() };
        match (&wish.back, volume.attachment()) {
            // Nothing is to be done.
            (None, None) => Ok(true),
            (Some(_), Some(attachment)) => {
                let written = self.back.get().and_then(|back| back.written(attachment));
                let how = written.map_or_else(String::new, |w| format!(", {}", w.config));
                Err(fail(&format!(
                    "it writes back already{how}: have it write through first, and then back in another way"
                )))
            }
            (None, Some(_)) => {
                let alone = self.alone(volume)?;
                let through = Holder::goes_through;
                Ok(self.let_go_back((volume, &alone), through, go_on)?.unwrap_or(true))
            }
            (Some(_), None) => {
                if volume.volume().capabilities().read_only {
                    return Err(fail("it is only read, and writes nothing back"));
                }
                let _alone = self.alone(volume)?;
                let of = name.clone();
                let found = self.on_log(move |log| {
                    let sb = log.superblock()?;
                    let volume = sb.volumes.iter().find(|v| v.name == of);
                    Some(((sb.uuid, sb.epoch), volume.and_then(|v| v.write_back)))
                })?;
                let Some((cache, record)) = found.filter(|_| self.is_enabled()) else {
                    return Err(fail("it is to write back, and the cache is not used"));
                };
                let done = self.write_back(volume, record, cache, wish, (None, true), go_on);
                // (It may have failed for not being waited for.)
                if done.is_err() && !go_on(0) { Ok(false) } else { done.map(|()| true) }
            }
        }
    }
}
