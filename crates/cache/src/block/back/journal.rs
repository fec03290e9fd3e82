//! The journal of a volume whose store gets all of an epoch or nothing, with a thread of its own.
//!
//! Where it lies is a [`JournalPlace`]. Its head says whose it is, and is written before the marker says that anything is dirty: a journal that a
//! marker speaks of and that is not there, or is that of an earlier attachment, is *torn*, and so is one in which an epoch was begun behind the
//! last that is whole. With its cache that is no loss, since the log has all of it; without, the store may be between two epochs.
//!
//! The last epoch that is whole is what the store may lack: its stretches are after-images, and applying them once more changes nothing.

mod keeping;
mod patient;

use std::io;
use std::ops::Range;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_engine::block::PartKind;
use larder_engine::block::node::logged::JournalPart;
use larder_engine::block::writeback::epoch::{self, Apart, Reading, Replay, Task, TooLarge, Whole};
use larder_engine::block::writeback::{Fault, Planted, holder};
use larder_format::Uuid;
use larder_format::block::journal::{Commit, Descriptors, ExtentKind, JournalExtent, Size};
use larder_format::block::marker::{Marker, PROBE_BYTES, is_probe, probe};
use larder_format::block::write_log::pieces;
use larder_runtime::{AlignedBuf, Payload};
use larder_volume::journal::{EpochName, Head, JournalError, JournalPlace, Part, Site, Use};
use larder_volume::op::{Op, Outcome};
use larder_volume::{Alone, Backing, Timeouts};

use super::super::attached::Attached;
use super::super::attended::{is_unwanted, waits_for};
use super::super::{Core, locked};
use super::kept::Troubles;
use super::patient::{Asking, PATIENCE};
use super::start::random_uuid;

pub(super) use keeping::{Anew, Kept};
pub(super) use larder_engine::block::writeback::epoch::Doubt;
pub use larder_engine::block::writeback::epoch::Of;

/// One change of a store when a journal is applied is waited for so long.
const STORE: Duration = Duration::from_secs(60);
/// A journal's thread that is in the midst of something is waited for so long.
const RELEASE: Duration = Duration::from_secs(5);

/// Why what a journal has is not in its store.
#[derive(Debug, thiserror::Error)]
pub enum NotLaid {
    /// The store fails, or does not answer: it may go another time.
    #[error(
        "what its journal has comes to its store before it is served, and the store fails: {0}"
    )]
    Store(String),
    /// Something is wrong with the journal, or with the store.
    #[error("{0}")]
    Journal(String),
}

impl From<String> for NotLaid {
    fn from(why: String) -> NotLaid {
        NotLaid::Journal(why)
    }
}

/// Where the journal of a volume is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalAt {
    /// There: a path, or the URI of an NBD export or object store. `None`: beside the store.
    pub at: Option<String>,
    /// It may go with this host where the store does not: then it covers the loss of the cache device, not that of the host.
    pub local: bool,
}

/// An epoch that was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Its number.
    pub epoch: u64,
    /// The store has all up to this record.
    pub last: u64,
    /// When the last of it was written, nanoseconds since the Unix epoch.
    pub time: u64,
    /// The last mark in it, or before.
    pub mark: Option<String>,
}

/// A stretch of the volume as an epoch leaves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Laid {
    /// Where in the volume.
    pub range: Range<u64>,
    /// What it holds; `None`: zeros.
    pub bytes: Option<Vec<u8>>,
}

/// What an epoch is called: its number, its last record, when that was written, and the last mark at or before it.
pub(super) type Named = (u64, u64, u64, Option<String>);

/// What a journal has for a store.
#[derive(Debug)]
pub struct Read {
    /// The last epoch that is whole, unless the store may have one behind it.
    whole: Option<(Whole, Part)>,
    /// The last epoch that was begun.
    last: u64,
    /// Why the store may be between two epochs all the same.
    pub torn: Option<&'static str>,
}

/// What a start has taken over of a journal.
#[derive(Clone, Debug, Default)]
pub(super) struct Taken {
    /// What was applied.
    pub(super) applied: Option<Applied>,
    /// The last epoch that was begun.
    pub(super) last: u64,
    /// When the store is whole again, if it may not be.
    pub(super) doubt: Option<Doubt>,
}

/// A journal.
pub struct Journal {
    place: Box<dyn JournalPlace>,
    head: Option<Box<Marker>>,
    fault: Fault,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("place", &self.place.describe()).finish_non_exhaustive()
    }
}

impl Journal {
    /// Opens the journal of `volume` at `site`. Nothing is said of it yet that was not said before.
    ///
    /// # Errors
    /// [`JournalError`]: also if it is another volume's, or something else is there.
    pub fn open(
        site: &Site,
        names: &[Uuid],
        for_use: Use,
        timeout: Timeouts,
    ) -> Result<Journal, JournalError> {
        Journal::over(site.open(for_use, timeout)?, names, Fault::default())
    }

    /// The same, where its place may hang: it is asked as `asking` says, until its volume is served.
    ///
    /// # Errors
    /// As [`Journal::open`], and where it does not answer in time.
    pub(super) fn open_by(
        asking: Asking,
        site: &Site,
        names: &[Uuid],
        for_use: Use,
    ) -> Result<Journal, JournalError> {
        Journal::over(asking.open_journal(site, for_use)?, names, Fault::default())
    }

    /// The same at a place that is open. What is there is durable first [jflush].
    ///
    /// # Errors
    /// As [`Journal::open`].
    pub fn over(
        mut place: Box<dyn JournalPlace>,
        names: &[Uuid],
        fault: Fault,
    ) -> Result<Journal, JournalError> {
        let head = match fault.is(Planted::JournalReadUnflushed) {
            false => place.head()?,
            true => place.look()?,
        };
        let head = match head {
            Head::None => None,
            Head::Of(head) if names.contains(&head.volume) => Some(head),
            Head::Of(head) => {
                return Err(JournalError::Foreign {
                    place: place.describe(),
                    volume: head.volume,
                    host: head.host,
                });
            }
            Head::Damaged => {
                return Err(JournalError::NotAJournal {
                    place: place.describe(),
                    reason: "is damaged: both copies of its head are".into(),
                });
            }
        };
        Ok(Journal { place, head, fault })
    }

    /// The same at a place that was lost while it was used as `head` says: what is damaged there is written over. Says whether there is something.
    fn again(
        mut place: Box<dyn JournalPlace>,
        head: &Marker,
        fault: Fault,
    ) -> Result<(Journal, bool), JournalError> {
        match place.head()? {
            Head::Damaged => Ok((Journal { place, head: None, fault }, true)),
            Head::None => Ok((Journal::over(place, &[head.volume], fault)?, false)),
            Head::Of(_) => Ok((Journal::over(place, &[head.volume], fault)?, true)),
        }
    }

    /// Where it is, for people.
    pub fn describe(&self) -> String {
        self.place.describe()
    }

    /// It is that of this attachment from now on, durably. `marker` is what the volume's marker says or will say. `doubt`: when the store is
    /// whole, if it may not be.
    ///
    /// # Errors
    /// [`JournalError`].
    pub(super) fn claim(
        &mut self,
        marker: &Marker,
        doubt: Option<Doubt>,
    ) -> Result<(), JournalError> {
        let head = epoch::claim(self.head.as_deref(), marker, doubt, self.fault);
        let doubt = doubt.filter(|_| !self.fault.is(Planted::DoubtForgotten));
        self.place.set_head(&head)?;
        self.head = Some(Box::new(head));
        // What is there is no more than that the store is in doubt, which is said now. A part of which it cannot be read which epoch it has would be taken
        // for a later one than the next, which makes the store whole.
        if doubt.is_some() { self.place.empty() } else { Ok(()) }
    }

    /// This epoch was begun, and it was told before that the one before it was (`second`): what is missing from now on is torn. Durable when this returns.
    fn begun(&mut self, epoch: u64, second: bool) -> Result<(), JournalError> {
        let next = self.head.as_ref().and_then(|head| epoch::begun(head, epoch, second));
        let Some(next) = next else { return Ok(()) };
        // (One that has failed may be seen and be nowhere: the next try writes it once more.)
        self.place.set_head(&next)?;
        self.head = Some(Box::new(next));
        Ok(())
    }

    /// Whether only a [probe](Journal::is_apart) can tell that its place is not the store by another name.
    ///
    /// # Errors
    /// That it is, or why it cannot be found out.
    pub(super) fn is_doubtful(&mut self, store: &dyn Backing) -> Result<bool, String> {
        // (One that was left is no bytes of the volume.)
        unprobe(store)?;
        let before = first_sector(store)?;
        match epoch::apart(self.head.is_some(), &before) {
            Apart::Is => Ok(false),
            Apart::IsNot => Err(self.is_the_store()),
            Apart::Unknown => Ok(true),
        }
    }

    fn is_the_store(&self) -> String {
        format!(
            "{} is the store itself by another name, and would be written over it: name another place",
            self.place.describe()
        )
    }

    /// Refuses a journal whose place is that of the store by another name: what was written there would go over the volume. Its first sector gets a
    /// [`probe`], and then its zeros again; nothing else is written. Where that is cut short the store may have the probe, and [`unprobe`] takes it away: a
    /// marker is to say so before ([`Coming::mark`]). `random` is like nothing else.
    ///
    /// # Errors
    /// Why it is refused, or could not be found out; and whether the probe may be there still.
    pub(in crate::block) fn is_apart(
        &mut self,
        store: &dyn Backing,
        random: [u8; 16],
    ) -> Result<(), (String, bool)> {
        if !self.is_doubtful(store).map_err(|why| (why, false))? {
            return Ok(());
        }
        let bytes = probe(random);
        let put = self.place.probe(Some(&bytes));
        if put == Ok(false) {
            return Ok(());
        }
        let found = first_sector(store);
        let away = self.place.probe(None).map_err(|e| (e.to_string(), true));
        put.map_err(|e| (e.to_string(), away.is_err()))?;
        away?;
        match found.map_err(|why| (why, false))? {
            found if found.is_empty() || found != bytes[..found.len()] => Ok(()),
            _ => Err((self.is_the_store(), false)),
        }
    }

    /// A start with the cache that has written it: what is whole is applied, unless the cache knows that the store has all up to its end (`frontier`). Its log
    /// goes up to `logged`.
    /// What is not is in the log, and comes once more.
    ///
    /// # Errors
    /// As [`Journal::apply`].
    pub(super) fn take_over(
        &mut self,
        of: Of,
        store: &dyn Backing,
        (frontier, logged): (u64, u64),
    ) -> Result<Taken, NotLaid> {
        let read = self.read_behind(of, frontier).map_err(|e| e.to_string())?;
        let applied = self.apply_read(&read, store)?;
        if let Some(why) = read.torn {
            tracing::warn!("{}: {why}; the cache has all of it still", self.describe());
        }
        let doubt = read.torn.map(|_| Doubt::of_torn(read.last, logged));
        Ok(Taken { applied, last: read.last, doubt })
    }

    fn write(
        &mut self,
        of: Of,
        (epoch, last, time, mark): Named,
        parts: &[JournalPart<Payload>],
    ) -> Result<(), JournalError> {
        let Of { volume, cache, generation } = of;
        let extent = |part: &JournalPart<Payload>| JournalExtent {
            offset: part.at,
            length: part.len,
            kind: match part.kind {
                PartKind::Zero => ExtentKind::Zero,
                PartKind::Trim => ExtentKind::Trim,
                _ => ExtentKind::Data,
            },
            may_punch: part.kind == PartKind::Zero,
        };
        let extents: Vec<JournalExtent> = parts.iter().map(extent).collect();
        let most = self.place.most();
        let size = Size::of(&extents).filter(|size| size.journal_bytes() <= most);
        let Some(size) = size else {
            let reason = "the epoch is larger than the journal".to_owned();
            return Err(JournalError::Failed { place: self.place.describe(), reason });
        };
        let bytes = parts.iter().filter_map(|part| part.bytes.as_deref());
        let sums = bytes.flat_map(|bytes: &[u8]| pieces::sums(bytes).collect::<Vec<_>>()).collect();
        let descriptors = Descriptors { volume, cache, epoch, generation, extents, sums };
        let mut body = descriptors.encode();
        let commit = Commit::of(&descriptors, &body, last, time, mark);
        let data = body.len();
        body.resize(data + size.data_bytes() as usize, 0);
        for (entry, part) in descriptors.entries().zip(parts) {
            if let Some(bytes) = part.bytes.as_deref().filter(|_| !entry.data.is_empty()) {
                let at = data + entry.data.start as usize;
                body[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
        self.place.write(EpochName { generation, epoch }, &commit.encode(), &body)
    }

    /// What it has for the store of `of`.
    ///
    /// # Errors
    /// [`JournalError`] when it cannot be read.
    pub fn read(&mut self, of: Of) -> Result<Read, JournalError> {
        let (mut found, mut wholes) = (Vec::new(), Vec::new());
        for part in self.place.parts()? {
            let mut reading = Reading::new(of, self.place.most(), self.fault);
            while let Some((at, len)) = reading.wants() {
                reading.given(self.place.read(part, at, len).ok().flatten().as_deref());
            }
            let (one, whole) = reading.end();
            found.push(one);
            wholes.push(whole.map(|whole| (whole, part)));
        }
        let keeps = self.place.keeps();
        let judged = epoch::judge(self.head.as_deref(), of, &found, keeps, self.fault);
        let whole = judged.whole.and_then(|at| wholes.swap_remove(at));
        Ok(Read { whole, last: judged.last, torn: judged.torn })
    }

    /// The same where the store is known to have all up to `frontier`: an epoch before that is none that counts.
    ///
    /// # Errors
    /// As [`Journal::read`].
    pub(super) fn read_behind(&mut self, of: Of, frontier: u64) -> Result<Read, JournalError> {
        let mut read = self.read(of)?;
        read.whole.take_if(|(whole, _)| whole.commit.last < frontier);
        Ok(read)
    }

    /// What it has for the store of which this marker speaks, without its cache.
    ///
    /// # Errors
    /// As [`Journal::read`].
    pub(super) fn read_for(&mut self, marker: &Marker) -> Result<Read, JournalError> {
        let of = Of { volume: marker.volume, cache: marker.cache, generation: marker.generation };
        let mut read = self.read(of)?;
        let last = read.whole.as_ref().map(|(whole, _)| whole.commit.epoch);
        read.torn = read.torn.or_else(|| epoch::is_older(last, marker));
        read.whole.take_if(|(whole, _)| whole.commit.last < marker.frontier);
        Ok(read)
    }

    /// The stretches of the epoch that was read, ascending.
    ///
    /// # Errors
    /// [`JournalError`] when it cannot be read any more.
    pub fn stretches(&mut self, read: &Read) -> Result<Vec<Laid>, JournalError> {
        let Some((whole, part)) = &read.whole else { return Ok(Vec::new()) };
        let mut all = Vec::new();
        for (range, data) in whole.stretches() {
            let len = (range.end - range.start) as usize;
            let bytes = data.map(|at| self.bytes(*part, at, len)).transpose()?;
            all.push(Laid { range, bytes });
        }
        Ok(all)
    }

    /// Bytes of a part that was found whole.
    fn bytes(&mut self, part: Part, at: u64, len: usize) -> Result<Vec<u8>, JournalError> {
        self.place.read(part, at, len)?.ok_or_else(|| {
            let reason = "it was changed by something else".to_owned();
            JournalError::Failed { place: self.place.describe(), reason }
        })
    }

    /// Applies the last epoch that is whole to the store, and makes that durable. `None`: there is none. What is read was made durable when the
    /// journal was opened [jflush]: it may have been in the memory of the system alone.
    ///
    /// # Errors
    /// When the journal cannot be read or the store cannot be written: then the store is between two epochs, and this is to be done again.
    pub fn apply(&mut self, of: Of, store: &dyn Backing) -> Result<Option<Applied>, NotLaid> {
        let read = self.read(of).map_err(|e| e.to_string())?;
        self.apply_read(&read, store)
    }

    /// The same with what was read.
    pub(super) fn apply_read(
        &mut self,
        read: &Read,
        store: &dyn Backing,
    ) -> Result<Option<Applied>, NotLaid> {
        let Some((whole, part)) = &read.whole else { return Ok(None) };
        let bytes = store.capabilities().size;
        let replay = Replay::new(whole, bytes, self.fault).map_err(|TooLarge { end }| {
            NotLaid::Journal(format!(
                "{} has what lies up to byte {end}, and the store has {bytes} bytes: restore its size",
                self.describe()
            ))
        })?;
        let session = store.session().map_err(|e| NotLaid::Store(e.to_string()))?;
        let mut session = Alone::new(session).map_err(|e| NotLaid::Store(e.to_string()))?;
        for task in replay {
            let op = match task {
                Task::Renew(ranges) => {
                    self.place.renew(*part, &ranges).map_err(|e| e.to_string())?;
                    continue;
                }
                Task::Copy { at, to } => {
                    let len = (to.end - to.start) as usize;
                    let bytes = self.bytes(*part, at, len).map_err(|e| e.to_string())?;
                    let mut buf = AlignedBuf::zeroed(len);
                    buf.copy_from_slice(&bytes);
                    Op::Write { offset: to.start, data: Payload::new(buf), fua: false }
                }
                Task::Zero(range) => {
                    let (offset, len) = (range.start, (range.end - range.start) as u32);
                    Op::WriteZeroes { offset, len, fua: false, may_punch: true, fast: false }
                }
                Task::Flush => Op::Flush,
            };
            ask(&mut session, store, op).map_err(NotLaid::Store)?;
        }
        let Commit { epoch, last, time, mark, .. } = whole.commit.clone();
        Ok(Some(Applied { epoch, last, time, mark }))
    }

    /// A call of its place that nobody waits for is under way: what that writes may come yet.
    pub(super) fn is_away(&mut self) -> bool {
        self.place.is_away()
    }

    /// It holds nothing any more. To be said when nothing speaks of it.
    ///
    /// # Errors
    /// [`JournalError`].
    pub(super) fn empty(&mut self) -> Result<(), JournalError> {
        self.place.empty()
    }
}

/// The journal of a volume that comes, and what is known of it.
#[derive(Default)]
pub(super) struct Coming {
    /// Open, if it has one and that was reached.
    pub(super) journal: Option<Journal>,
    /// The volume was journaled when it was last written.
    pub(super) journaled: bool,
    /// It is torn: when the store is whole again.
    pub(super) doubt: Option<Doubt>,
    /// The store may have a probe in its first sector.
    pub(super) probed: bool,
    /// A marker was, or may have been, written that says so, before that which was to be.
    pub(super) also_marked: bool,
}

/// Why a marker that speaks of a journal was not written.
pub(super) enum NotMarked<E> {
    /// The journal could not be claimed.
    Journal(JournalError),
    /// Its place is the store by another name, or that could not be found out.
    Same(String),
    /// The marker could not be written.
    Marker(E),
}

impl Coming {
    /// What is whole in it is applied to the store, durably. `positions`: what the store is known to have, and the last that the log has.
    /// Returns that for the volume's holder, and the last mark that the store has with it. Nothing
    /// where there is no journal.
    ///
    /// # Errors
    /// As [`Journal::apply`].
    pub(super) fn replay(
        &mut self,
        of: Of,
        store: &dyn Backing,
        positions: (u64, u64),
    ) -> Result<(Option<holder::Applied>, Option<String>), NotLaid> {
        let Some(journal) = &mut self.journal else { return Ok((None, None)) };
        // One that was in another order has nothing in it.
        let taken = match self.journaled {
            true => journal.take_over(of, store, positions)?,
            false => Taken::default(),
        };
        let Taken { applied, last: epoch, doubt } = taken;
        self.doubt = doubt;
        let last = applied.as_ref().map_or(0, |applied| applied.last);
        let last = if journal.fault.is(Planted::EpochLastIgnored) { 0 } else { last };
        let mark = applied.and_then(|applied| applied.mark);
        Ok((Some(holder::Applied { epoch, last }), mark))
    }

    /// As of [`Journal::is_away`].
    pub(super) fn is_away(&mut self) -> bool {
        self.journal.as_mut().is_some_and(Journal::is_away)
    }

    /// It is that of the attachment of `marker`, if there is one. (Nothing speaks of it before: one that is not this attachment's is a lost one.)
    ///
    /// # Errors
    /// [`JournalError`].
    pub(super) fn claim(&mut self, marker: &Marker) -> Result<(), JournalError> {
        let doubt = self.doubt;
        self.journal.as_mut().map_or(Ok(()), |journal| journal.claim(marker, doubt))
    }

    /// The same, and then a marker is written that speaks of it. Before that its place is found not to be the store by another name: a marker says first
    /// that the store may have a probe (`anew`: nothing was answered yet, and no marker is dirty).
    ///
    /// # Errors
    /// [`NotMarked`].
    pub(super) fn mark<E>(
        &mut self,
        marker: &Marker,
        (store, random, anew): (&dyn Backing, [u8; 16], bool),
        mut write: impl FnMut(&Marker) -> Result<(), E>,
    ) -> Result<(), NotMarked<E>> {
        let mut also = false;
        let found = self.finds_apart((store, random), || {
            also = anew;
            if anew { write(&Marker { probes: true, ..marker.clone() }) } else { Ok(()) }
        });
        self.also_marked |= also;
        found?;
        let marker = &Marker { number: marker.number + u64::from(also), ..marker.clone() };
        let late = |journal: &Journal| journal.fault.is(Planted::JournalClaimedLate);
        if self.journal.as_ref().is_some_and(late) {
            write(marker).map_err(NotMarked::Marker)?;
            return self.claim(marker).map_err(NotMarked::Journal);
        }
        self.claim(marker).map_err(NotMarked::Journal)?;
        write(marker).map_err(NotMarked::Marker)
    }

    /// Its place is not the store by another name. `says`: where that cannot be told without a probe, and before there is one, it is said durably.
    ///
    /// # Errors
    /// [`NotMarked`].
    pub(super) fn finds_apart<E>(
        &mut self,
        (store, random): (&dyn Backing, [u8; 16]),
        says: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), NotMarked<E>> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        if !journal.is_doubtful(store).map_err(NotMarked::Same)? {
            return Ok(());
        }
        says().map_err(NotMarked::Marker)?;
        self.probed = true;
        let apart = journal.is_apart(store, random);
        self.probed = apart.as_ref().is_err_and(|(_, left)| *left);
        apart.map_err(|(why, _)| NotMarked::Same(why))
    }
}

/// Takes away what an attempt to find out whether the place of a volume's journal is its store may have left in the store.
///
/// # Errors
/// When the store cannot be read or written.
pub(super) fn unprobe(store: &dyn Backing) -> Result<(), String> {
    let there = first_sector(store)?;
    if !is_probe(&there) {
        return Ok(());
    }
    let session = store.session().map_err(|e| e.to_string())?;
    let mut session = Alone::new(session).map_err(|e| e.to_string())?;
    let data = Payload::new(AlignedBuf::zeroed(PROBE_BYTES));
    ask(&mut session, store, Op::Write { offset: 0, data, fua: false })?;
    ask(&mut session, store, Op::Flush)
}

/// The first sector of a store, or as much as it has of one.
fn first_sector(store: &dyn Backing) -> Result<Vec<u8>, String> {
    let session = store.session().map_err(|e| e.to_string())?;
    let mut session = Alone::new(session).map_err(|e| e.to_string())?;
    let len = store.capabilities().size.min(PROBE_BYTES as u64) as usize;
    let buf = AlignedBuf::zeroed(len);
    session.submit(0, Op::Read { offset: 0, buf });
    let _waits = waits_for(&format!("store '{}'", store.uri()));
    let done = session.next(PATIENCE, is_unwanted).ok_or("the store does not answer")?;
    done.outcome.map_err(|failure| failure.to_string())?;
    match done.op {
        Op::Read { buf, .. } => Ok(buf.to_vec()),
        _ => Err("the store answered something else".to_owned()),
    }
}

fn ask(session: &mut Alone, store: &dyn Backing, op: Op) -> Result<(), String> {
    session.submit(0, op);
    let _waits = waits_for(&format!("store '{}'", store.uri()));
    let done = session.next(STORE, is_unwanted).ok_or("the store does not answer")?;
    let outcome: Outcome = done.outcome;
    outcome.map(drop).map_err(|failure| failure.to_string())
}

/// What a journal's thread is asked for.
pub(super) enum Work {
    Write(Named, Vec<JournalPart<Payload>>),
    Flush,
    /// It is to be looked whether it is still there; nothing is on its way if that is said.
    Look(bool),
}

impl Work {
    fn asks(&self) -> epoch::Work {
        match self {
            Work::Write((epoch, last, ..), _) => epoch::Work::Write { epoch: *epoch, last: *last },
            Work::Flush => epoch::Work::Flush,
            Work::Look(idle) => epoch::Work::Look { idle: *idle },
        }
    }
}

/// A journal with its thread. It ends when this goes, and lets go of its place.
pub(in crate::block) struct Journaling {
    /// Until it ends, and when that was.
    work: Mutex<Result<Sender<Work>, Instant>>,
    thread: JoinHandle<()>,
    trouble: Arc<Mutex<Troubles>>,
}

impl Drop for Journaling {
    fn drop(&mut self) {
        let until = self.end() + RELEASE;
        // It may be this one that lets go of the last of the cache.
        while self.thread.thread().id() != std::thread::current().id()
            && !self.thread.is_finished()
            && Instant::now() < until
            && !is_unwanted()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Journaling {
    /// The journal of the volume with this attachment number.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub(super) fn start(
        core: Weak<Core>,
        attachment: u32,
        of: Of,
        (site, volume, mut journal): (Option<Site>, &Arc<Attached>, Journal),
    ) -> io::Result<Journaling> {
        let (work, asked) = channel();
        journal.place.rest();
        let trouble = Arc::<Mutex<Troubles>>::default();
        let of_volume = Arc::downgrade(volume);
        let apart = move |journal: &mut Journal| {
            let volume = of_volume.upgrade().ok_or("its volume has gone")?;
            let random = random_uuid().map_err(|e| e.to_string())?;
            let apart = journal.is_apart(volume.volume().backing(), random.0);
            apart.map_err(|(why, _)| why)
        };
        let anew = site.map(|site| Anew {
            opens: Box::new(move || site.open(Use::Make, Timeouts::default())),
            apart: Box::new(apart),
        });
        let mut kept = Kept::new(of, anew, journal, trouble.clone());
        let thread = std::thread::Builder::new()
            .name("block-journal".into())
            .spawn(move || keeping::run(&core, attachment, &mut kept, &asked))?;
        Ok(Journaling { work: Mutex::new(Ok(work)), thread, trouble })
    }

    pub(in crate::block) fn write(
        &self,
        (epoch, last, mark): (u64, u64, Option<String>),
        parts: Vec<JournalPart<Payload>>,
    ) {
        self.ask(Work::Write((epoch, last, super::unix_nanos(), mark), parts));
    }

    pub(in crate::block) fn flush(&self) {
        self.ask(Work::Flush);
    }

    /// It is looked at.
    pub(super) fn look(&self, idle: bool) {
        self.ask(Work::Look(idle));
    }

    /// Why it fails, if it does.
    pub(super) fn failure(&self) -> Option<String> {
        locked(&self.trouble).failing().map(str::to_owned)
    }

    /// What is to be told of it now.
    pub(super) fn told(&self, now: Nanos) -> Option<String> {
        locked(&self.trouble).told(now).map(str::to_owned)
    }

    fn ask(&self, work: Work) {
        // Where the thread has ended nothing is journaled any more, and the destage stands.
        let _ = locked(&self.work).as_ref().map(|to| to.send(work));
    }

    /// Nothing more is asked of it, and its thread ends with what it is at. Returns since when that is so.
    pub(super) fn end(&self) -> Instant {
        let mut work = locked(&self.work);
        let since = work.as_ref().err().copied().unwrap_or_else(Instant::now);
        *work = Err(since);
        since
    }
}

impl Core {
    /// The journal of a volume is looked at, if it has one.
    pub(in crate::block) fn look_at_journal(&self, volume: &Attached) {
        let Some((back, attachment)) = self.back.get().zip(volume.attachment()) else { return };
        let Some(written) = back.written(attachment) else { return };
        if let Some(journal) = &written.journal {
            // All of an epoch is in the store durably when nothing is on its way: an empty journal is as good.
            journal.look(back.log().is_clean(attachment));
        }
    }
}
