//! The steps by which a volume comes to write back, goes, is put aside, or changes over, carried out: which comes next says the engine's
//! [`Holder`].

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use larder_base::{ByteSize, Nanos};
use larder_engine::block::node::flushes::PATIENCE;
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::holder::{Applied, Held, Holder, state_of};
use larder_engine::block::writeback::log::WriteLog;
use larder_engine::block::writeback::marker::{Again, Holds, Mark, Step};
use larder_engine::block::writeback::recovery::RecoveredPacked;
use larder_engine::block::writeback::scan;
use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState};
use larder_format::block::superblock::WrittenBack;
use larder_runtime::Payload;
use larder_volume::journal::Site;
use larder_volume::marker::{MarkerIoError, MarkerPlace};

use super::super::attached::Attached;
use super::super::attended::{finishes, is_unwanted, lock_wanted};
use super::super::open::CacheError;
use super::super::operators::LOOK;
use super::super::{Core, Mailbox, locked};
use super::ends::say_void;
use super::journal::{Coming, JournalAt, Journaling, NotLaid, NotMarked, Of, unprobe};
use super::start::{
    marker_error, no_journal, open_journal, random_uuid, read_marker, volume_error,
};
use super::{Asking, Back, BackConfig, MarkerAt, Written, beyond};

/// Why a step was not done.
pub(super) enum NotDone {
    /// Who asked waits no longer.
    Unwanted,
    Failed(CacheError),
}

impl NotDone {
    /// As an error, where nobody may say no.
    pub(super) fn or_say(self, name: &str) -> CacheError {
        match self {
            NotDone::Unwanted => {
                volume_error(name, "whoever asked for it waits no longer".to_owned())
            }
            NotDone::Failed(error) => error,
        }
    }
}

impl From<CacheError> for NotDone {
    fn from(error: CacheError) -> NotDone {
        NotDone::Failed(error)
    }
}

/// What a volume that comes has.
#[derive(Default)]
pub(super) struct Begins<'a> {
    pub place: Option<Box<dyn MarkerPlace>>,
    /// Where its journal is to be, if it has one.
    pub site: Option<Site>,
    /// That, once it is open.
    pub journal: Coming,
    /// Where that was said to be.
    pub journal_at: JournalAt,
    pub config: BackConfig,
    pub marker: MarkerAt,
    /// Its store is the one that it was, as the operator says.
    pub moved: bool,
    /// The last mark that its store is known to have, and the attachment of which that was said.
    pub mark: Option<(u32, String)>,
    /// Until its store has all up to this record of that attachment it alone may be no image, by its marker.
    pub joins: (u32, u64),
    /// What a start has found in the log.
    pub found: Option<(&'a RecoveredPacked, &'a scan::Scan)>,
}

impl Begins<'_> {
    /// The last mark that its store is known to have, of those since it began to write back.
    fn known_mark(&self, holder: &Holder) -> Option<&str> {
        let of = [Some(holder.state().attachment), holder.before()];
        let (said, mark) = self.mark.as_ref().filter(|_| !holder.begins_anew())?;
        of.contains(&Some(*said)).then_some(mark.as_str())
    }

    /// Until its store has all up to here it alone may be no image.
    fn known_joins(&self, holder: &Holder) -> u64 {
        let of = [Some(holder.state().attachment), holder.before()];
        let (said, joins) = self.joins;
        if of.contains(&Some(said)) && !holder.begins_anew() { joins } else { 0 }
    }

    /// Its journal is open, if it has one.
    fn open_journal(
        &mut self,
        asking: Asking,
        volume: &Attached,
        names: &[Uuid],
    ) -> Result<(), CacheError> {
        if let (Some(site), None) = (&self.site, &self.journal.journal) {
            self.journal.journal = Some(open_journal(asking, volume, site, names)?);
        }
        Ok(())
    }
}

#[expect(clippy::large_enum_variant, reason = "one at a time, while its steps are carried out")]
enum Which<'a> {
    Comes(Begins<'a>),
    Held(Arc<Written>),
}

/// A volume on its way, and what its steps need.
pub(super) struct Way<'a> {
    core: &'a Core,
    back: &'a Back,
    volume: &'a Arc<Attached>,
    which: Which<'a>,
}

/// The volume's own of what kept a marker from being written; what the marker's place says is for the caller.
fn not_marked(
    name: &str,
    marked: Result<(), NotMarked<MarkerIoError>>,
) -> Result<Result<(), MarkerIoError>, NotDone> {
    match marked {
        Ok(()) => Ok(Ok(())),
        Err(NotMarked::Marker(error)) => Ok(Err(error)),
        Err(NotMarked::Journal(error)) => Err(NotDone::Failed(no_journal(name, error.into()))),
        Err(NotMarked::Same(why)) => Err(NotDone::Failed(volume_error(name, why))),
    }
}

type GoOn<'a> = &'a mut dyn FnMut(u64) -> bool;

impl<'a> Way<'a> {
    /// Of a volume that comes.
    pub(super) fn comes(
        core: &'a Core,
        back: &'a Back,
        volume: &'a Arc<Attached>,
        begins: Begins<'a>,
    ) -> Way<'a> {
        Way { core, back, volume, which: Which::Comes(begins) }
    }

    /// Of one that writes back.
    pub(super) fn of(
        core: &'a Core,
        back: &'a Back,
        volume: &'a Arc<Attached>,
        written: Arc<Written>,
    ) -> Way<'a> {
        Way { core, back, volume, which: Which::Held(written) }
    }

    /// Does one step after the other. `go_on` hears how many bytes of the log are still to be destaged, and may say no.
    ///
    /// # Errors
    /// What has failed first. The volume is as it was then, as far as that could be.
    pub(super) fn carry_out(
        &mut self,
        holder: &mut Holder,
        go_on: GoOn<'_>,
    ) -> Result<(), NotDone> {
        let mut failed = None;
        while let Some(step) = holder.next() {
            // A volume that comes goes no further for somebody who waits no longer: what he was told is so.
            let comes = matches!(self.which, Which::Comes(_)) && !holder.has_failed();
            let done = match comes && !step.is_last() && is_unwanted() {
                true => Err(NotDone::Unwanted),
                false => self.step(holder, step, go_on),
            };
            if let Err(mut why) = done {
                if is_unwanted() && !holder.has_failed() {
                    // (It may have failed for not being waited for.)
                    why = NotDone::Unwanted;
                }
                if let (NotDone::Failed(error), Some(_)) = (&why, &failed) {
                    tracing::warn!("volume '{}': {error}", self.volume.name);
                }
                failed.get_or_insert(why);
                holder.failed();
                finishes();
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn fail(&self, reason: String) -> NotDone {
        NotDone::Failed(volume_error(&self.volume.name, reason))
    }

    fn step(&mut self, holder: &mut Holder, step: Step, go_on: GoOn<'_>) -> Result<(), NotDone> {
        let (core, volume) = (self.core, self.volume);
        let within = holder.within();
        if self.goes_itself(holder) {
            match step {
                Step::Release => {}
                // What cache and marker say of it is the log's to say, and is not undone here.
                _ if holder.has_failed() => {
                    holder.done();
                    return Ok(());
                }
                _ => return self.wait_through(holder, within, go_on),
            }
        }
        match step {
            Step::Read => {
                if let Which::Comes(begins) = &mut self.which {
                    let place = begins.place.as_deref_mut();
                    let known = core.on_log(|log| log.line_space().map(|sb| sb.volumes.clone()))?;
                    let of = (volume.name.as_str(), volume.volume().backing());
                    let known = known.unwrap_or_default();
                    let read = read_marker(of, holder, place, begins.moved, &known)?;
                    let unmarked = begins.place.is_none() && begins.journal.journaled;
                    if read.probes || unmarked {
                        unprobe(of.1).map_err(|why| CacheError::NotYet {
                            name: of.0.to_owned(),
                            reason: format!("its store '{}' fails: {why}", of.1.uri()),
                        })?;
                    }
                    // Nothing was answered while its journal was looked for: an empty one lacks nothing.
                    begins.journal.journaled &= !read.probes;
                    (begins.mark, begins.joins) = (read.mark, read.joins);
                    // Where it cannot be had nothing is changed.
                    let names: Vec<_> =
                        [holder.state().volume].into_iter().chain(holder.former()).collect();
                    begins.open_journal(Asking::of(&core.config), volume, &names)?;
                }
                return Ok(());
            }
            Step::Hold => {
                volume.gate.hold();
                self.wait(within, go_on, |_| volume.gate.is_empty())?;
            }
            Step::Release => {
                volume.gate.release();
                core.mailboxes.iter().for_each(Mailbox::wake);
            }
            // (A device that does not work has none.)
            Step::DropLines if !core.is_enabled() => {}
            Step::DropLines => core.distrust(volume, volume.volume().backing().look(), true)?,
            Step::DestageMost | Step::Destage => {
                self.destage(step, within, go_on)?;
                if self.goes_itself(holder) {
                    return Ok(());
                }
            }
            Step::Settle => {
                let attachment = holder.state().attachment;
                tell_log(core, core.now(), |log, asks| {
                    log.put_aside(attachment);
                    log.clients_left(attachment, asks);
                });
                self.wait(within, go_on, |way| {
                    let log = way.back.log();
                    log.is_settled(attachment) || log.closed().is_some()
                })?;
            }
            Step::FlushLog => {
                let attachment = holder.state().attachment;
                self.wait(within, go_on, |way| {
                    let log = way.back.log();
                    log.is_durable(attachment) || log.closed().is_some()
                })?;
                if let Some(why) = self.back.log().closed() {
                    return Err(self.fail(format!(
                        "its write log is closed ({why}): what is dirty in it may not be durable"
                    )));
                }
                if core.is_unlinked() {
                    return Err(self.fail(
                        "the file of the cache was removed, and what is dirty in it cannot be carried anywhere: have it come to its store".to_owned(),
                    ));
                }
                self.still_ours()?;
            }
            Step::FlushStore => {
                self.flush_store(within, go_on)?;
                self.still_ours()?;
            }
            Step::Replay(generation) => {
                let applied = self.replay(holder, generation)?;
                holder.replayed(applied);
                return Ok(());
            }
            Step::Holds(holds) if holder.drains() => {
                // A device that does not work is not written.
                let said = core.is_enabled().then(|| self.record(holder, holds));
                match said {
                    Some(Ok(())) => {}
                    Some(Err(_)) | None => holder.done(),
                }
                return Ok(());
            }
            Step::Holds(holds) => return self.record(holder, holds),
            Step::Mark(mark, generation) => {
                if !self.mark(holder, mark, generation)? {
                    return Ok(());
                }
            }
            Step::Answer => self.answer(holder)?,
            Step::Show => self.show(holder)?,
            Step::Through | Step::Aside => {
                let attachment = holder.state().attachment;
                let through = step == Step::Through;
                let goes = tell_log(core, core.now(), |log, _| {
                    if through && holder.is_going() && log.closed().is_some() {
                        return false;
                    }
                    volume.volume().writes_back(false);
                    volume.attachment.store(0, Ordering::SeqCst);
                    if through {
                        log.detach(attachment);
                    }
                    true
                });
                if goes == Some(false) {
                    return Ok(());
                }
                self.back.remove(attachment);
            }
            Step::Resume => {
                let attachment = holder.state().attachment;
                tell_log(core, core.now(), |log, asks| log.resume(attachment, asks));
            }
            Step::CloseLog => {
                let why = "a volume that stays could not be recorded as dirty";
                tell_log(core, core.now(), |log, asks| log.close(core.now(), why, asks));
            }
            Step::Refuse => {
                self.refuse(holder, true);
                if let Which::Held(written) = &self.which {
                    let at = written.place.as_ref().map(|place| locked(place).describe());
                    let why = format!("{} could not be written", at.unwrap_or_default());
                    core.refuses(written, &why);
                }
            }
            Step::Accept => self.refuse(holder, false),
            // (A journal that was applied is void with its generation.)
            Step::EmptyJournal => {}
        }
        holder.done();
        Ok(())
    }

    /// Changes of the volume are not logged from now on, or again.
    fn refuse(&self, holder: &Holder, refuses: bool) {
        let attachment = holder.state().attachment;
        tell_log(self.core, self.core.now(), |log, _| log.refuse(attachment, refuses));
    }

    /// The store is made durable.
    fn flush_store(&self, within: Option<Nanos>, go_on: GoOn<'_>) -> Result<(), NotDone> {
        let volume = self.volume;
        if volume.volume().capabilities().read_only {
            return Ok(());
        }
        let until = Instant::now() + Duration::from_nanos(PATIENCE.0);
        let backing = volume.volume().backing();
        loop {
            let number = volume.flusher.want();
            let ended = |_: &Way<'_>| {
                let durable = volume.flusher.wait(number, LOOK);
                durable.is_some() || Instant::now() >= until
            };
            self.wait(within, go_on, ended)?;
            if volume.flusher.is_durable(number) == Some(true) {
                return Ok(());
            }
            // It has come back, and what may be lost is settled first: what was destaged before it went was destaged again.
            let settled = volume.volume().settled() >= backing.losses();
            let settles = !settled && self.core.settle_losses(volume, &mut || go_on(0));
            if !settles || Instant::now() >= until {
                return Err(volume.is_not_durable(PATIENCE).into());
            }
        }
    }

    /// Waits until something is so.
    fn wait(
        &self,
        within: Option<Nanos>,
        go_on: GoOn<'_>,
        is_so: impl Fn(&Way<'_>) -> bool,
    ) -> Result<(), NotDone> {
        let begun = Instant::now();
        while !is_so(self) {
            if within.is_some_and(|within| begun.elapsed().as_nanos() > u128::from(within.0)) {
                return Err(self.fail(
                    "its clients would have to wait too long for what is under way to end: it stays as it is; try again when its store is \
                     faster or its clients are quiet"
                        .to_owned(),
                ));
            }
            let attachment = self.volume.attachment().unwrap_or(0);
            let held = self.back.log().status(self.core.now(), attachment);
            if let Which::Held(written) = &self.which
                && written.stays(&self.back.log())
            {
                return Err(self.fail(self.core.troubles_of(written).join("; ")));
            }
            if !go_on(held.map_or(0, |status| status.held.0)) {
                return Err(NotDone::Unwanted);
            }
            self.core.pause(LOOK);
        }
        Ok(())
    }

    /// Whether a volume that goes has a log that has failed: it comes to its store, and is written through in the end, without these steps.
    fn goes_itself(&self, holder: &Holder) -> bool {
        holder.is_going() && self.back.log().closed().is_some()
    }

    /// Waits until that is so.
    fn wait_through(
        &self,
        holder: &mut Holder,
        within: Option<Nanos>,
        go_on: GoOn<'_>,
    ) -> Result<(), NotDone> {
        let attachment = holder.state().attachment;
        let stands = |way: &Way<'_>| way.back.log().stands(attachment);
        let over = |way: &Way<'_>| way.back.written(attachment).is_none() || stands(way).is_some();
        self.wait(within, go_on, over)?;
        if let Some(why) = stands(self) {
            return Err(self.fail(why.to_string()));
        }
        holder.went_through();
        Ok(())
    }

    /// What is dirty comes to the store; most of it is what was when this began.
    fn destage(&self, step: Step, within: Option<Nanos>, go_on: GoOn<'_>) -> Result<(), NotDone> {
        let attachment = self.volume.attachment().unwrap_or(0);
        let core = self.core;
        // Nobody is held, and nobody waits, for what cannot come.
        self.can_drain(attachment)?;
        tell_log(core, core.now(), |log, asks| log.drain(attachment, true, asks));
        let last = match step {
            Step::DestageMost => {
                let status = self.back.log().status(core.now(), attachment);
                status.map_or(0, |status| status.positions[3])
            }
            _ => u64::MAX,
        };
        let waited = self.wait(within, go_on, |way| {
            let log = way.back.log();
            let status = log.status(core.now(), attachment);
            log.is_clean(attachment)
                || log.closed().is_some()
                || status.is_none_or(|status| status.positions[0] >= last)
        });
        tell_log(core, core.now(), |log, asks| log.drain(attachment, false, asks));
        waited.and_then(|()| self.can_drain(attachment))
    }

    /// All of it can come to its store, as far as is known.
    fn can_drain(&self, attachment: u32) -> Result<(), NotDone> {
        let missing = self.back.log().cannot_drain(attachment);
        missing.map_or(Ok(()), |bytes| {
            Err(self.fail(format!(
                "{} of what was written cannot be read from the write log, so that not all of it can come to its store: write them again, trim them, or \
                 give them up",
                ByteSize(bytes)
            )))
        })
    }

    fn replay(&mut self, holder: &Holder, generation: u64) -> Result<Option<Applied>, NotDone> {
        let (state, positions) = (holder.state(), (holder.frontier(), holder.recovered().0));
        let Which::Comes(begins) = &mut self.which else { return Ok(None) };
        begins.open_journal(Asking::of(&self.core.config), self.volume, &[state.volume])?;
        let of = Of { volume: state.volume, cache: self.back.cache.0, generation };
        let replayed = begins.journal.replay(of, self.volume.volume().backing(), positions);
        let (applied, mark) = replayed.map_err(|why| {
            let name = self.volume.name.clone();
            NotDone::Failed(match why {
                NotLaid::Store(why) => {
                    let store = self.volume.volume().backing().uri();
                    let reason = format!(
                        "what its journal has comes to its store '{store}' before it is served, and the store fails: {why}. See to the store, and try again"
                    );
                    CacheError::NotYet { name, reason }
                }
                NotLaid::Journal(reason) => CacheError::NotYet { name, reason },
            })
        })?;
        if let Some(mark) = mark {
            begins.mark = Some((state.attachment, mark));
        }
        Ok(applied)
    }

    /// The superblock says of the volume what it holds.
    fn record(&self, holder: &mut Holder, holds: Holds) -> Result<(), NotDone> {
        let (of, entry) = (self.volume.name.clone(), holder.entry(holds));
        let state = self.core.on_log(move |log| match entry.attachment {
            0 => log.change_write_back(&of, |attachment| WrittenBack { attachment, ..entry }),
            _ => log.change_write_back_of(&of, |_| entry),
        })?;
        let state = state.ok_or_else(|| {
            self.fail("what is dirty of it could not be recorded on the cache device".to_owned())
        })?;
        holder.recorded(state);
        Ok(())
    }

    /// Before this cache says anything of a volume that goes: its marker is its own, or nothing is said.
    fn still_ours(&self) -> Result<(), NotDone> {
        let Which::Held(written) = &self.which else { return Ok(()) };
        match self.core.check_marker(self.back, written) {
            Again::Own | Again::Lost => Ok(()),
            Again::Others => Err(self.fail(
                "its marker names another holder: see which of the two holds what counts"
                    .to_owned(),
            )),
            Again::Unknown => Err(self.fail(self.core.troubles_of(written).join("; "))),
        }
    }

    /// Writes the marker; false if the log has failed meanwhile, whose it is then.
    fn mark(&mut self, holder: &mut Holder, mark: Mark, generation: u64) -> Result<bool, NotDone> {
        let state = WrittenBack { generation, ..holder.state() };
        let attachment = self.volume.attachment();
        let held = match &self.which {
            Which::Held(written) => Some(written.clone()),
            Which::Comes(_) => None,
        };
        let mut last_number = match &held {
            Some(written) => Some(lock_wanted(&written.number).ok_or(NotDone::Unwanted)?),
            None => None,
        };
        if self.goes_itself(holder) {
            return Ok(false);
        }
        // It says how far the store is now.
        let frontier = attachment.and_then(|a| self.back.log().status(self.core.now(), a));
        let frontier = frontier.map_or(holder.frontier(), |status| status.positions[0]);
        let number = last_number.as_ref().map_or(holder.number(), |number| **number) + 1;
        let mut marker = self.core.marker(self.volume, &state, number, state_of(mark), frontier);
        let (last, time) = holder.recovered();
        if last > frontier && time > 0 {
            // When the oldest of what is dirty was written is not known.
            marker.time = time;
        }
        if let Some(written) = &held {
            marker.time = written.time_of(marker.time, frontier, || self.core.age_of(attachment));
        }
        if let Which::Comes(begins) = &self.which {
            // The log does not have it yet.
            marker.mark = marker.mark.or_else(|| begins.known_mark(holder).map(str::to_owned));
            marker.joins = match mark {
                Mark::Clean => 0,
                _ => Some(begins.known_joins(holder)).filter(|last| *last > frontier).unwrap_or(0),
            };
        }
        if let Some(last_number) = &mut last_number {
            // (One that could not be written may have been.)
            **last_number = number;
        }
        let done = if let Some(written) = &held {
            let again = self.core.check_marker(self.back, written);
            if again == Again::Others {
                return Err(self.fail(self.core.troubles_of(written).join("; ")));
            }
            self.core.write_marker(written, &marker, again)
        } else if let Which::Comes(begins) = &mut self.which {
            let dirty = matches!(mark, Mark::Dirty(_));
            if dirty {
                begins.open_journal(
                    Asking::of(&self.core.config),
                    self.volume,
                    &[marker.volume],
                )?;
            }
            let Begins { place, journal, .. } = begins;
            let mut write = |marker: &Marker| match place {
                Some(place) => place.write(marker),
                None => Ok(()),
            };
            let store = self.volume.volume().backing();
            match dirty {
                true => {
                    let of = (store, random_uuid()?.0, holder.begins_anew());
                    let marked = journal.mark(&marker, of, write);
                    if std::mem::take(&mut journal.also_marked) {
                        holder.also_marked();
                    }
                    not_marked(&self.volume.name, marked)?
                }
                // What was to be written there, and so perhaps to the store, may come yet.
                false if journal.probed && journal.is_away() => {
                    let reason = "its journal does not answer, and may be its store by another name: what looks whether it is may be written to the store yet, and its \
                                  marker says so until it is attached again".to_owned();
                    let name = self.volume.name.clone();
                    return Err(NotDone::Failed(CacheError::NotYet { name, reason }));
                }
                false if journal.probed => {
                    // What it says then holds until the store has its zeros again.
                    unprobe(store).map_err(|why| volume_error(&self.volume.name, why))?;
                    journal.probed = false;
                    write(&marker)
                }
                false => write(&marker),
            }
        } else {
            Ok(())
        };
        done.map_err(|error| NotDone::Failed(marker_error(&self.volume.name, &error)))?;
        if let Some(written) = &held {
            written.wrote(&marker);
        }
        Ok(true)
    }

    /// The log has the volume from now on.
    fn answer(&mut self, holder: &Holder) -> Result<(), NotDone> {
        let (core, back, state) = (self.core, self.back, holder.state());
        if back.log().closed().is_some() {
            return Err(self.fail("its write log has failed".to_owned()));
        }
        let Which::Comes(begins) = &mut self.which else { return Ok(()) };
        if begins.place.is_none() {
            // No marker was written, and its journal is to be its own all the same.
            let (number, frontier) = (holder.number(), holder.frontier());
            let marker = core.marker(self.volume, &state, number, MarkerState::Dirty, frontier);
            begins.open_journal(Asking::of(&self.core.config), self.volume, &[marker.volume])?;
            // (This cache says that it is open: it looks for a probe when it comes again.)
            let of = (self.volume.volume().backing(), random_uuid()?.0);
            let apart = begins.journal.finds_apart(of, || Ok::<(), MarkerIoError>(()));
            let _nothing_said = not_marked(&self.volume.name, apart)?;
            let claimed = begins.journal.claim(&marker);
            claimed.map_err(|e| NotDone::Failed(no_journal(&self.volume.name, e.into())))?;
        }
        let journal = match begins.journal.journal.take() {
            Some(journal) => {
                let of =
                    Of { volume: state.volume, cache: back.cache.0, generation: state.generation };
                let core = core.me.get().cloned().unwrap_or_default();
                let site = begins.site.clone();
                let started =
                    Journaling::start(core, state.attachment, of, (site, self.volume, journal));
                let fail =
                    |e| volume_error(&self.volume.name, format!("a thread for its journal: {e}"));
                Some(started.map_err(fail)?)
            }
            None => None,
        };
        let named = (holder.number(), holder.epoch(), begins.place.is_some());
        let attach = core.attach_of(&state, &begins.config, holder.frontier(), named);
        let found = begins
            .found
            .and_then(|(found, scanned)| Some((found.volumes.get(&state.attachment)?, scanned)));
        let mark = begins.known_mark(holder).map(str::to_owned);
        let (void, joins) = (core.void_of(&state)?, begins.known_joins(holder));
        // Before the log has it: what was put aside is destaged at once, through its journal.
        back.add(Written { journal, ..Written::new(self.volume, holder, begins) });
        let now = core.now();
        tell_log(core, now, |log, asks| {
            if log.is_aside(state.attachment) {
                let none = log.stored_mark(state.attachment).is_none();
                if let Some(mark) = mark.filter(|_| none) {
                    log.had_mark(state.attachment, mark);
                }
                log.set_joins(state.attachment, joins);
                return log.take_up(now, attach, asks);
            }
            log.attach(now, attach);
            log.set_void(state.attachment, void);
            asks.steps.push(state.attachment);
            if let Some(mark) = mark {
                log.had_mark(state.attachment, mark);
            }
            if let Some((found, scanned)) = found {
                log.recover(now, state.attachment, found, scanned);
            }
            log.set_joins(state.attachment, joins);
        });
        if found.is_some() {
            core.name_marks(back, state.attachment);
        }
        // What it had under another number is void.
        if let Some(before) = holder.before().filter(|before| *before != state.attachment) {
            let void = tell_log(core, now, |log, _| {
                let void = log.status(now, before).map_or(0, |status| status.dirty);
                log.detach(before);
                void
            });
            say_void(&self.volume.name, void.unwrap_or(0));
        }
        tracing::debug!(volume = self.volume.name, attachment = state.attachment, "writes back");
        self.volume.volume().writes_back(true);
        self.volume.others.store(false, Ordering::SeqCst);
        self.volume.attachment.store(state.attachment, Ordering::SeqCst);
        Ok(())
    }

    /// The log has the volume, as it was put aside, and whoever reads sees what is dirty.
    fn show(&mut self, holder: &Holder) -> Result<(), NotDone> {
        let (core, back, state) = (self.core, self.back, holder.state());
        let Which::Comes(begins) = &mut self.which else { return Ok(()) };
        let (void, joins) = (core.void_of(&state)?, begins.known_joins(holder));
        let named = (holder.number(), holder.epoch(), begins.place.is_some());
        let attach = core.attach_of(&state, &begins.config, holder.frontier(), named);
        let found = begins
            .found
            .and_then(|(found, scanned)| Some((found.volumes.get(&state.attachment)?, scanned)));
        let now = core.now();
        tell_log(core, now, |log, _| {
            if !log.is_aside(state.attachment) {
                log.attach(now, attach);
                log.set_void(state.attachment, void);
                log.put_aside(state.attachment);
                if let Some((found, scanned)) = found {
                    log.recover(now, state.attachment, found, scanned);
                }
            }
            log.set_joins(state.attachment, joins);
        });
        let had = self.volume.had().unwrap_or(0);
        let beyond = beyond(&back.log(), state.attachment, (self.volume.bytes(), had));
        core.name_marks(back, state.attachment);
        tracing::error!("volume '{}': {beyond}", self.volume.name);
        back.add(Written { shown: true, ..Written::new(self.volume, holder, begins) });
        self.volume.others.store(false, Ordering::SeqCst);
        self.volume.attachment.store(state.attachment, Ordering::SeqCst);
        Ok(())
    }
}

impl Core {
    /// How long ago the oldest dirty write of a volume was logged, nanoseconds.
    pub(super) fn age_of(&self, attachment: Option<u32>) -> u64 {
        let status = self.back.get().zip(attachment);
        let status = status.and_then(|(back, of)| back.log().status(self.now(), of));
        let oldest = status.and_then(|status| status.oldest);
        oldest.map_or(0, |oldest| self.now().saturating_sub(oldest).0)
    }
}

impl Written {
    /// A volume as its way has brought it, without a journal, and served.
    fn new(attached: &Arc<Attached>, holder: &Holder, begins: &mut Begins<'_>) -> Written {
        Written {
            attached: attached.clone(),
            fenced: begins.place.as_ref().is_some_and(|place| place.is_fenced()),
            lowered: 0.into(),
            place: begins.place.take().map(Into::into),
            state: holder.state(),
            stopped: false.into(),
            given_up: 0.into(),
            config: begins.config.clone(),
            marker: begins.marker.clone(),
            journal_at: begins.journal_at.clone(),
            journal: None,
            number: holder.number().into(),
            durable: holder.number().into(),
            durable_run: holder.marked_by().into(),
            tried: Mutex::default(),
            silent: AtomicBool::new(false),
            leaves: AtomicBool::new(false),
            trouble: Mutex::default(),
            said: AtomicU64::new(holder.frontier()),
            recovered: holder.recovered(),
            shown: false,
        }
    }

    /// This marker is there, durably.
    pub(super) fn wrote(&self, marker: &Marker) {
        *locked(&self.tried) = None;
        self.said.store(marker.frontier, Ordering::Relaxed);
        self.durable.store(marker.number, Ordering::Relaxed);
        self.durable_run.store(marker.run, Ordering::Relaxed);
    }

    /// What is dirty does not come to the store before something has become of its marker: that is another's, or a log that has failed waits for it to say how
    /// far the store is, and it does not answer.
    pub(super) fn is_kept(&self, log: &WriteLog<Payload>) -> bool {
        let waits = log.closed().is_some() && self.silent.load(Ordering::Relaxed);
        waits || log.is_halted(self.state.attachment)
    }

    /// Nothing comes to the store as long as its marker does not answer: with the store's server, both may be there again at any time.
    pub(super) fn awaits_marker(&self, log: &WriteLog<Payload>) -> bool {
        log.awaits_look(self.state.attachment).is_some() && self.silent.load(Ordering::Relaxed)
    }

    /// Either: a step that needs the marker is not waited for.
    pub(super) fn stays(&self, log: &WriteLog<Payload>) -> bool {
        self.is_kept(log) || self.awaits_marker(log)
    }

    /// As the machine has it; `number` is that of its marker.
    pub(super) fn held(&self, back: &Back, now: Nanos, number: u64) -> Held {
        let frontier = back.log().status(now, self.state.attachment);
        Held {
            cache: back.cache.0,
            entry: self.state,
            number,
            durable: self.durable.load(Ordering::Relaxed),
            marked: self.place.is_some(),
            frontier: frontier.map_or(0, |status| status.positions[0]),
        }
    }

    /// Up to which time all that was written is in the store, if its frontier is this: what is dirty was written since.
    pub(super) fn time_of(&self, now: u64, frontier: u64, age: impl FnOnce() -> u64) -> u64 {
        match self.recovered {
            // When the oldest of them was written is not known.
            (last, time) if frontier < last => time,
            _ => now.saturating_sub(age()),
        }
    }
}
