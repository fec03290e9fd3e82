//! What an operator asks of a cache that runs: volumes come and go, lines are dropped, and why a block is not cached.
//!
//! Each of these is rare and may take its time; one is done at a time, on the thread of who asks. What concerns the durable
//! map goes to the log's thread as a job. A range of lines is locked as a large trim locks it.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_engine::block::node::attachment::{Attachment, DURABLE, Step};
use larder_engine::block::node::limits::Allows as _;
use larder_engine::block::node::ranged::{Discard, Progress, STEP};
use larder_engine::block::node::start::places::NoPlace;
use larder_engine::block::volumes::Found;
use larder_engine::block::{Fault, GroupId, LineId, OpId};
use larder_format::block::VolumeState;
use larder_policy::block::{
    BlockCandidate, BlockKind, BlockOp, LineId as PolicyLine, Reason, Rule, VerdictCounts,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use super::attached::Attached;
use super::cell::{Message, Out};
use super::log::LogThread;
use super::open::{self, CacheError};
use super::{Core, OP_BITS, locked};
use crate::block::volume::Volume;

/// How long what is under way may keep the lines of a volume from being dropped, before it is tried again.
const DISTRUST: Duration = Duration::from_secs(2);
/// Between two looks at what is waited for.
const LOOK: Duration = Duration::from_millis(100);
/// The same at first where fills are waited for.
const SETTLE: Duration = Duration::from_micros(20);

/// What was planned holds no more.
pub(super) const OVERTAKEN: &str = "it was put aside or moved in the meantime: try again";

/// What the step of an attachment that changes the superblock has come to.
pub(super) struct Recorded {
    /// The attachment, with that step done.
    pub attachment: Attachment,
    /// Whether it is durable: not where the cache is given up.
    pub durable: bool,
    /// Whether the volume was as it was when this was planned.
    pub applied: bool,
}

/// See [`Core::desk_worker`].
#[derive(Debug, Default)]
pub(super) struct DeskState {
    next: u64,
}

/// How far a detach is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detaching {
    /// So many clients still use the volume.
    Clients(u64),
    /// Operations end.
    Draining,
    /// So many regions wait to be made durable.
    Durable(u64),
}

/// Where a line is, or why it is not there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Explanation {
    /// The volume.
    pub volume: String,
    /// The byte that was asked for.
    pub offset: u64,
    /// Its line.
    pub line: LineOf,
    /// Whether the line is cached.
    pub cached: bool,
    /// Where it lies, if it is cached.
    pub slot: Option<SlotOf>,
    /// Where its bytes lie on the cache device.
    pub device_offset: Option<u64>,
    /// Seconds since it was filled, if that is remembered (the last 16,384 fills are).
    pub cached_for_seconds: Option<f64>,
    /// What it holds: data, metadata, journal or unknown.
    pub kind: String,
    /// What is selected there.
    pub selection: String,
    /// What admission says of a read that misses, now.
    pub admission: String,
    /// The volume's share, and what it has.
    pub share: String,
    /// The write budget, if there is one.
    pub budget: String,
    /// Verdicts on the volume's requests so far: admitted, and rejected by reason.
    pub verdicts: BTreeMap<String, u64>,
}

/// The line that was asked about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LineOf {
    /// Its first byte in the volume.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Where in the map a line is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlotOf {
    /// The shard.
    pub shard: u32,
    /// The slot of the shard.
    pub slot: u32,
}

/// Named counts of verdicts, without those that are zero.
pub fn named(counts: &VerdictCounts) -> BTreeMap<String, u64> {
    use larder_policy::block::Reason;
    let mut all = BTreeMap::from([("admitted".to_owned(), counts.admitted)]);
    let rejected = Reason::ALL.iter().map(|&r| (r.as_str().to_owned(), counts.rejected(r)));
    all.extend([("if_free".to_owned(), counts.if_free)].into_iter().filter(|c| c.1 > 0));
    all.extend(rejected.filter(|r| r.1 > 0));
    all
}

fn kind_name(kind: BlockKind) -> &'static str {
    match kind {
        BlockKind::Data => "data",
        BlockKind::Metadata => "metadata",
        BlockKind::Journal => "journal",
        BlockKind::Unknown => "unknown",
    }
}

impl Core {
    /// The party that is no worker: its door is behind the workers'.
    pub(super) fn desk_worker(&self) -> usize {
        self.doors.len() - 1
    }

    pub(super) fn no_volume(&self, name: &str) -> CacheError {
        let names: Vec<String> = self.volumes().iter().map(|v| v.name.clone()).collect();
        let reason = match names.len() {
            0 => "it is not attached; no volume is".to_owned(),
            _ => format!("it is not attached; these are: {}", names.join(", ")),
        };
        CacheError::Volume { name: name.to_owned(), reason }
    }

    /// The volume of that name.
    ///
    /// # Errors
    /// When there is none.
    pub fn attached(&self, name: &str) -> Result<Arc<Attached>, CacheError> {
        self.volume(name).ok_or_else(|| self.no_volume(name))
    }

    /// Has `job` done on the log's thread.
    pub(super) fn on_log<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut LogThread) -> R + Send + 'static,
    ) -> Result<R, CacheError> {
        let (tell, told) = mpsc::channel();
        locked(&self.log_inbox).jobs.push(Box::new(move |log| {
            // Whoever asked may have gone.
            let _ = tell.send(job(log));
        }));
        self.log_wake.notify_one();
        if self.hand.get().is_some() {
            self.turn();
        }
        let reason = match told.recv_timeout(Duration::from_secs(60)) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Timeout) => "the cache device does not answer".to_owned(),
            Err(RecvTimeoutError::Disconnected) => "the cache is stopping".to_owned(),
        };
        Err(CacheError::System { what: "the map's log", reason })
    }

    /// Waits until nothing is done behind the replies any more: all fills have ended, one way or the other, and the
    /// durable map says of every slot what it holds. For whoever counts what a request does; while others ask, it may
    /// take any time. Returns what was left after `patience`: I/O, fills that wait for their slot, and slots to record.
    ///
    /// # Errors
    /// When the log's thread does not answer.
    pub fn settle(&self, patience: Duration) -> Result<usize, CacheError> {
        let until = Instant::now() + patience;
        let mut pause = SETTLE;
        loop {
            // A job there has the log step, too: what waits for a slot to be durably empty does not wait for its pace.
            let left = self.on_log(|log| log.unsettled())?;
            if left == 0 || Instant::now() >= until {
                return Ok(left);
            }
            self.pause(pause);
            pause = (pause * 2).min(LOOK);
        }
    }

    /// Does `act` while nothing is under way in lines `first..=last`, and nothing begins. `None` if `go_on`, which is
    /// asked while operations end, has said no.
    pub(super) fn with_range<R>(
        &self,
        first: LineId,
        last: LineId,
        go_on: &mut dyn FnMut() -> bool,
        act: impl FnOnce(&mut Out) -> R,
    ) -> Option<R> {
        let me = self.desk_worker();
        let mut desk = locked(&self.governor.desk);
        desk.next += 1;
        let id = OpId((me as u64) << OP_BITS | desk.next);
        let mut out = Out::default();
        let mut range = Progress::new(first, last, self.layout.shards);
        // It takes none of the clients' turns, but is the one that goes past them.
        let (mut goes_on, mut next) = (true, range.next());
        while let Some(shard) = next.filter(|_| goes_on) {
            let now = self.now();
            self.with(shard, Some(me), &mut out, |s, fx| s.lock_range(now, id, first, last, fx));
            goes_on = self.given(id, go_on);
            next = range.given();
        }
        let result = goes_on.then(|| act(&mut out));
        for shard in 0..self.layout.shards {
            let now = self.now();
            self.with(shard, Some(me), &mut out, |s, fx| s.unlock_range(now, id, fx));
        }
        result
    }

    /// Waits until a shard has given the desk's range `id`. False if `go_on` has said no.
    fn given(&self, id: OpId, go_on: &mut dyn FnMut() -> bool) -> bool {
        let door = &self.doors[self.desk_worker()];
        loop {
            let messages = std::mem::take(&mut *locked(&door.inbox));
            if messages.iter().any(|(op, m)| *op == id && matches!(m, Message::Done { .. })) {
                return true;
            }
            if !go_on() {
                return false;
            }
            if self.turn().is_some() {
                continue;
            }
            let fd = door.event.as_fd();
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            let wait = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
            // Interrupted or not: it is looked at again.
            let _ = poll(&mut fds, Some(&wait));
            let _ = rustix::io::read(fd, &mut [0u8; 8]);
        }
    }

    /// Takes lines `first..=last`, which are locked, out of the map. Returns how many there were.
    pub(super) fn drop_locked(&self, first: LineId, last: LineId, out: &mut Out) -> u64 {
        let mut dropped = 0;
        for shard in 0..self.layout.shards {
            let (mut discard, mut more) = (Discard::lines(first, last, STEP), true);
            while more {
                self.with(shard, Some(self.desk_worker()), out, |s, _| {
                    let before = s.stats().dropped;
                    more = discard.turn(s);
                    dropped += s.stats().dropped - before;
                });
            }
        }
        dropped
    }

    pub(super) fn lines_of(&self, base: u64, bytes: u64) -> (LineId, LineId) {
        let line = u64::from(self.layout.line);
        (LineId(base / line), LineId((base + bytes.max(1) - 1) / line))
    }

    /// Drops the lines that hold bytes `start..start + bytes` of a volume. Returns how many there were; `None` if `go_on`
    /// has said no.
    ///
    /// # Errors
    /// When the volume is not attached, or the range is not in it.
    pub fn drop_lines(
        &self,
        name: &str,
        range: Option<(u64, u64)>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>, CacheError> {
        let volume = self.attached(name)?;
        let (start, bytes) = range.unwrap_or((0, volume.bytes()));
        check_range(&volume, start, bytes)?;
        let (first, last) = self.lines_of(volume.base() + start, bytes);
        let dropped = self.with_range(first, last, go_on, |out| self.drop_locked(first, last, out));
        if let Some(dropped) = dropped {
            volume.account.dropped(dropped);
        }
        Ok(dropped)
    }

    /// Looks whether somebody else has changed a volume's store, and drops all of its lines if so. What cannot be dropped now
    /// is, the next time.
    pub(super) fn look_at(&self, volume: &Arc<Attached>) {
        let changes = volume.volume().backing().look();
        if changes == volume.accounted.load(Ordering::Relaxed) {
            return;
        }
        let (first, last) = self.lines_of(volume.base(), volume.bytes());
        let until = Instant::now() + DISTRUST;
        let go_on = &mut || {
            let leaves = volume.volume().is_closed() || locked(&self.log_inbox).stopped;
            !leaves && Instant::now() < until
        };
        let dropped = self.with_range(first, last, go_on, |out| self.drop_locked(first, last, out));
        let Some(dropped) = dropped else { return };
        volume.account.dropped(dropped);
        volume.accounted.store(changes, Ordering::Relaxed);
        let of = volume.clone();
        // They must not come back, not even after a power cut in the next moment, nor those that were evicted lately. Nobody
        // waits for it: until then the store's notes say that nothing is proved.
        locked(&self.log_inbox).jobs.push(Box::new(move |log| {
            if log.change_superblock(true, |_| ()) {
                of.volume().backing().accounted(changes);
            }
        }));
        self.log_wake.notify_one();
        tracing::warn!(
            "volume '{}': {dropped} lines are dropped: its store was changed by something else",
            volume.name
        );
    }

    /// If a volume's store may have lost writes that it had answered, drops the lines that may hold them: of all regions that were
    /// changed since they were last made durable. Until that is done nobody is told of the loss. Returns whether nothing is left
    /// to be done; not if `go_on` has said no.
    pub(super) fn settle_losses(&self, volume: &Attached, go_on: &mut dyn FnMut() -> bool) -> bool {
        if volume.volume().settled() >= volume.volume().backing().losses() {
            return true;
        }
        let (first, last) = self.lines_of(volume.base(), volume.bytes());
        let regions = (self.region(first), self.region(last));
        // With nothing under way, all that was answered before has its bits; a fill of it is over too.
        let found = self.with_range(first, last, go_on, |_| {
            let losses = volume.volume().backing().losses();
            let runs = self.on_log(move |log| log.unflushed(regions.0, regions.1));
            runs.map(|runs| (losses, runs))
        });
        let Some(Ok((losses, runs))) = found else { return false };
        let of_region = self.layout.region_groups;
        let mut dropped = 0;
        for (from, to) in runs {
            let start = GroupId(u64::from(from) * of_region).line(0).max(first);
            let end = LineId(GroupId((u64::from(to) + 1) * of_region).line(0).0 - 1).min(last);
            let done = self.with_range(start, end, go_on, |out| self.drop_locked(start, end, out));
            let Some(lines) = done else { return false };
            volume.account.dropped(lines);
            dropped += lines;
        }
        // A power cut does not bring them back: the regions keep their bits until they are flushed, and the log has it by then.
        volume.volume().settle(losses);
        tracing::error!(
            "volume '{}': its store may have lost writes that it had answered and not made durable: the next flush of every client \
             fails, and {dropped} lines that may hold such writes are dropped",
            volume.name
        );
        // Answers wait for it.
        self.doors.iter().for_each(super::Door::wake);
        true
    }

    /// The same now and then: as soon as somebody waits for it, or the store is there. While it is not, operations wait for it, and
    /// those of lines that are cached need not wait for these.
    pub(super) fn look_for_losses(&self, volume: &Arc<Attached>) {
        let exported = volume.volume();
        if exported.settled() >= exported.backing().losses() {
            return;
        }
        let away = || exported.backing().trouble().is_some_and(|t| t.state == "lost");
        if !exported.wants_settled() && away() {
            return;
        }
        let until = Instant::now() + DISTRUST;
        self.settle_losses(volume, &mut || {
            let leaves = exported.is_closed() || locked(&self.log_inbox).stopped;
            !leaves && Instant::now() < until
        });
    }

    /// Forgets a volume that is not attached: drops its lines, gives its place up, and what is selected of it. Under its name
    /// another may come. Returns how many lines there were; `None` if `go_on` has said no.
    ///
    /// # Errors
    /// When the cache knows no such volume that is not attached, a record is being written, which has no word for it, or the
    /// cache device fails.
    pub fn forget(
        &self,
        name: &str,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>, CacheError> {
        let fail = |reason: String| CacheError::Volume { name: name.to_owned(), reason };
        let superblock = self.on_log(|log| log.superblock().cloned())?.ok_or_else(|| {
            fail("the cache was given up, and nothing that is cached is used again".to_owned())
        })?;
        let Some(mut attachment) = Attachment::forget(&superblock, name, Fault::default()) else {
            let CacheError::Volume { reason, .. } = self.no_volume(name) else {
                return Err(self.no_volume(name));
            };
            let aside = superblock.volumes.iter().filter(|v| v.state == VolumeState::Detached);
            let names: Vec<&str> = aside.map(|v| v.name.as_str()).collect();
            return Err(fail(match names.len() {
                0 => format!("{reason}; none was put aside"),
                _ => format!("{reason}; put aside were: {}", names.join(", ")),
            }));
        };
        if self.recorder.is_some() {
            return Err(fail(
                "it is not attached, and cannot be forgotten while --record writes: start the daemon without"
                    .to_owned(),
            ));
        }
        while let Some(step) = attachment.next() {
            match step {
                Step::Lines { first, last, drop } => {
                    let Some(dropped) = self.take_lines(first, last, drop, go_on) else {
                        return Ok(None);
                    };
                    attachment.done(dropped);
                }
                Step::Record => {
                    let recorded = self.record_attachment(attachment)?;
                    if !recorded.durable {
                        return Err(fail(
                            "the cache device failed, and the cache was given up".to_owned(),
                        ));
                    }
                    attachment = recorded.attachment;
                }
                Step::InForce => {
                    self.forget_selection(name)?;
                    attachment.done(0);
                }
                _ => attachment.done(0),
            }
        }
        Ok(Some(attachment.dropped()))
    }

    /// Waits until nothing is under way in lines `first..=last`, and takes them out of the map if they are to be dropped. Returns how
    /// many there were; `None` if `go_on` has said no.
    pub(super) fn take_lines(
        &self,
        first: LineId,
        last: LineId,
        drop: bool,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Option<u64> {
        self.with_range(first, last, go_on, |out| match drop {
            true => self.drop_locked(first, last, out),
            false => 0,
        })
    }

    /// The step of an attachment that changes the superblock.
    ///
    /// # Errors
    /// When the log's thread does not answer.
    pub(super) fn record_attachment(
        &self,
        mut attachment: Attachment,
    ) -> Result<Recorded, CacheError> {
        self.on_log(move |log| {
            let mut applied = false;
            let anew = attachment.is_anew();
            // (Without a cache, too, each volume has its place, in memory.)
            let durable = log.change_superblock(anew, |sb| applied = attachment.apply(sb));
            attachment.done(0);
            Recorded { attachment, durable, applied }
        })
    }

    /// Takes up a volume; `trust` vouches for a store that cannot tell whether it was changed. Returns whether what was cached of it is used, and if not, why not.
    ///
    /// # Errors
    /// When there is one of that name, it shrank, its identity cannot be found out, or the cache device fails.
    pub fn attach(
        &self,
        volume: &Arc<Volume>,
        trust: bool,
    ) -> Result<Result<(), String>, CacheError> {
        let name = volume.name().to_owned();
        if self.volume(&name).is_some() {
            let reason = "it is attached already: choose another name".to_owned();
            return Err(CacheError::Volume { name, reason });
        }
        self.may_be_recorded(&name)?;
        let comer = open::comer(volume, trust || self.config.trust_unchanged)?;
        let superblock = self.on_log(|log| log.line_space().cloned())?;
        let given_up = !self.is_enabled();
        let without = || Ok(Err("the cache was given up: it is served without".into()));
        let Some(superblock) = superblock else { return without() };
        let planned = Attachment::attach(&superblock, &comer, given_up, Fault::default());
        let mut attachment = match planned {
            Ok(attachment) => attachment,
            // It has no place in the line space: its store alone orders what is written there.
            Err(_) if given_up => return without(),
            Err(decided) => {
                self.record_arrival(&decided.coming, &decided.outcome, None);
                let Err(why) = decided.outcome else { return without() };
                return Err(open::cannot_come(&NoPlace { name, bytes: comer.bytes, why }));
            }
        };
        let comes = attachment.comes().map(|(decided, taken)| (decided.clone(), taken.clone()));
        let Some((decided, taken)) = comes else { return without() };
        open::say_cold(&decided);
        let id = self.governor.next_id();
        let attached = Attached::new(volume, id, &taken.volume, &superblock, &self.config)?;
        let mut durable = false;
        while let Some(step) = attachment.next() {
            match step {
                Step::Store => {
                    attached.make_durable()?;
                    attachment.done(0);
                }
                Step::Lines { first, last, drop } => {
                    let dropped = self.take_lines(first, last, drop, &mut || true);
                    attachment.done(dropped.unwrap_or(0));
                }
                Step::Record => {
                    let recorded = self.record_attachment(attachment)?;
                    if !recorded.applied {
                        return Err(CacheError::Volume { name, reason: OVERTAKEN.to_owned() });
                    }
                    (attachment, durable) = (recorded.attachment, recorded.durable);
                }
                Step::InForce => {
                    if durable {
                        self.record_arrival(&decided.coming, &decided.outcome, Some(&attached));
                    }
                    // Without a cache too: its lines, of which none is cached, are what changes exclude each other by.
                    self.admit_volume(attached.clone());
                    attachment.done(0);
                }
                _ => attachment.done(0),
            }
        }
        if !durable {
            return without();
        }
        Ok(match taken.found {
            Found::Warm if !given_up => Ok(()),
            _ => Err(decided.cold.unwrap_or("it is new to this cache").to_owned()),
        })
    }

    pub(super) fn group_bytes(&self) -> u64 {
        u64::from(self.layout.line) * larder_format::block::layout::GROUP_LINES
    }

    fn admit_volume(&self, attached: Arc<Attached>) {
        let mut volumes = self.volumes.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        volumes.insert(attached.name.clone(), attached);
        let all = volumes.values().cloned().collect();
        drop(volumes);
        self.governor.set_volumes(all);
        self.restore_selection();
    }

    /// Puts a volume aside in good order: waits for its clients to leave, ends what is under way, makes it durable, and
    /// remembers by what it is known again. The caller has taken it out of what is exported. `disconnect` closes its
    /// clients' connections. `go_on` hears how far it is, and may say no as long as there are clients. Returns whether it
    /// was put aside, and whether all of it was made durable.
    ///
    /// # Errors
    /// When there is no such volume, or the log's thread has ended.
    pub fn detach(
        &self,
        name: &str,
        disconnect: bool,
        go_on: &mut dyn FnMut(Detaching) -> bool,
    ) -> Result<Option<bool>, CacheError> {
        let attached = self.attached(name)?;
        let volume = attached.volume().clone();
        let of = name.to_owned();
        let record = self.on_log(move |log| {
            log.line_space().and_then(|sb| sb.volumes.iter().find(|v| v.name == of)).cloned()
        })?;
        let record = record.ok_or_else(|| self.no_volume(name))?;
        let mut attachment = Attachment::detach(&record, &self.layout);
        if disconnect {
            volume.close_clients();
        }
        let mut aside = None;
        while let Some(step) = attachment.next() {
            match step {
                Step::Clients => {
                    while volume.clients() > 0 {
                        if !go_on(Detaching::Clients(volume.clients())) {
                            volume.keep_clients();
                            return Ok(None);
                        }
                        self.pause(LOOK);
                    }
                    attachment.done(0);
                }
                Step::Close => {
                    volume.close();
                    attachment.done(0);
                }
                Step::Lines { first, last, drop } => {
                    let go_on = &mut || go_on(Detaching::Draining);
                    if self.take_lines(first, last, drop, go_on).is_none() {
                        volume.reopen();
                        return Ok(None);
                    }
                    attachment.done(0);
                }
                Step::Bits { first, last } => {
                    let until = Instant::now() + Duration::from_nanos(DURABLE.0);
                    loop {
                        self.settle_losses(&attached, &mut || {
                            go_on(Detaching::Draining) && Instant::now() < until
                        });
                        let left = self.on_log(move |log| log.hurry(first, last))?;
                        // It is closed already: asked to stop, it only waits no longer for what is not durable yet.
                        let waits =
                            self.is_enabled() && (left == 0 || go_on(Detaching::Durable(left)));
                        if attachment.bits(self.now(), left, waits) {
                            break;
                        }
                        if !self.sweep(LOOK) {
                            self.pause(LOOK);
                        }
                    }
                }
                Step::Record => {
                    attachment.known_by(attached.identity());
                    let store = attached.id;
                    self.on_log(move |log| log.forget_store(store))?;
                    let recorded = self.record_attachment(attachment)?;
                    let stretch = (record.first_group, record.groups);
                    aside = recorded.durable.then_some(recorded.applied.then_some(stretch));
                    attachment = recorded.attachment;
                }
                Step::InForce => {
                    self.forget_attached(&attached, attachment.is_durable(), aside);
                    attachment.done(0);
                }
                _ => attachment.done(0),
            }
        }
        Ok(Some(attachment.is_durable()))
    }

    /// A volume is attached no more.
    fn forget_attached(
        &self,
        attached: &Arc<Attached>,
        durable: bool,
        aside: Option<Option<(u64, u64)>>,
    ) {
        let mut volumes = self.volumes.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        volumes.remove(&attached.name);
        locked(&self.retired).add(attached);
        let all = volumes.values().cloned().collect();
        drop(volumes);
        // By this number nothing is selected any more; by its name it is, for when it comes back.
        self.governor.select(|selection| selection.remove_volume(attached.id));
        self.governor.set_volumes(all);
        self.record_departure(attached, durable, aside);
        // Its sessions go, with the workers' and this one.
        *locked(&attached.backing) = None;
        self.let_go_of_closed();
    }

    /// Has workers let go of the stores of volumes that are closed.
    pub fn let_go_of_closed(&self) {
        self.governor.gone.fetch_add(1, Ordering::SeqCst);
        self.doors.iter().for_each(super::Door::wake);
    }

    pub(super) fn region(&self, line: LineId) -> u32 {
        (line.group().0 / self.layout.region_groups) as u32
    }

    /// What keeps one more line of a volume from being cached now, whatever admission says.
    fn in_the_way(&self, volume: &Attached, rule: Rule) -> Option<String> {
        let (governor, now) = (&self.governor, self.now());
        match governor.limits.refuses(rule, now, u64::from(self.layout.line)) {
            // (What is selected is said anyway.)
            Some(Reason::Never) => return None,
            Some(Reason::NoSpace) => {
                let left = governor.limits.backoff.left(now).unwrap_or(Nanos::ZERO);
                return Some(format!(
                    "it would be rejected: the file system of the cache is full, and nothing new is cached for {:.0} s",
                    left.as_secs_f64().ceil()
                ));
            }
            Some(_) => {
                let said = "it would be rejected: the write budget is used up for now";
                return Some(said.to_owned());
            }
            None => {}
        }
        volume.account.at_ceiling().then(|| {
            "the volume is at its ceiling: it could take the place of one of the volume's own lines alone"
                .to_owned()
        })
    }

    /// Whether the line at byte `offset` of a volume is cached and where, or what keeps it from being.
    ///
    /// # Errors
    /// When the volume is not attached, or has no such byte.
    pub fn explain(&self, name: &str, offset: u64) -> Result<Explanation, CacheError> {
        let volume = self.attached(name)?;
        check_range(&volume, offset, 1)?;
        let bytes = u64::from(self.layout.line);
        let start = offset / bytes * bytes;
        let line = LineId((volume.base() + start) / bytes);
        let shard = self.placing.shard(line.group());
        let find = || locked(&self.shards[shard as usize]).shard.find(line);
        let slot = if self.layout.is_sparse() && self.is_enabled() {
            // With the line its page of the table is there.
            let go_on = &mut || !locked(&self.log_inbox).stopped;
            self.with_range(line, line, go_on, |_| find()).flatten()
        } else {
            find()
        };
        let kind = volume.classify(start, bytes);
        let governor = &self.governor;
        let rule = governor.rule(&volume, start, bytes);
        let selection = {
            let selection =
                governor.selection.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            selection.explain(volume.id, offset)
        };
        let admission = if offset >= volume.cached_bytes() {
            "the last bytes of a volume that do not fill a line are not cached".to_owned()
        } else if !self.is_enabled() {
            "the cache is out of use: the volume is in pass-through".to_owned()
        } else {
            let line = PolicyLine { volume: volume.id, offset: start };
            let op = BlockOp::Read;
            let observed = Default::default();
            let candidate = BlockCandidate { line, op, kind, observed, victim: None };
            let said = locked(&volume.admission).explain(&candidate);
            let said = match rule {
                Rule::Always => format!("selected to be cached always; otherwise it {said}"),
                Rule::Never => format!("selected never to be cached; otherwise it {said}"),
                Rule::ByPolicy => format!("it {said}"),
            };
            let in_the_way = if slot.is_none() { self.in_the_way(&volume, rule) } else { None };
            in_the_way.map_or_else(|| said.clone(), |why| format!("{why}; but for that: {said}"))
        };
        let has = volume.lines();
        let share = match volume.share() {
            (0, None) => format!("{has} lines, no floor or ceiling"),
            (floor, None) => format!("{has} lines, floor {floor}"),
            (floor, Some(ceiling)) => format!("{has} lines, floor {floor}, ceiling {ceiling}"),
        };
        let now = governor.budget_now(self.now());
        let budget = match (now.rate, now.available) {
            (Some(rate), Some(left)) => {
                format!("{rate:.0} bytes a second, {left} bytes may be written now")
            }
            _ => "none".to_owned(),
        };
        let filled = governor.filled_at(line).filter(|_| slot.is_some());
        Ok(Explanation {
            volume: name.to_owned(),
            offset,
            line: LineOf { offset: start, bytes },
            cached: slot.is_some(),
            slot: slot.map(|s| SlotOf { shard, slot: s.0 }),
            device_offset: slot.map(|s| self.layout.slot_at(shard, s.0)),
            cached_for_seconds: filled.map(|at| self.now().saturating_sub(at).as_secs_f64()),
            kind: kind_name(kind).to_owned(),
            selection,
            admission,
            share,
            budget,
            verdicts: named(&volume.verdicts()),
        })
    }
}

/// Whether the range lies in the volume.
pub(super) fn check_range(volume: &Attached, start: u64, bytes: u64) -> Result<(), CacheError> {
    if start.checked_add(bytes).is_some_and(|end| end <= volume.bytes()) && bytes > 0 {
        return Ok(());
    }
    let reason = format!(
        "bytes {start} to {} are not in it: it has {} bytes",
        start.saturating_add(bytes),
        volume.bytes()
    );
    Err(CacheError::Volume { name: volume.name.clone(), reason })
}
