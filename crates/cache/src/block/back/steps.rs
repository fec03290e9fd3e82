//! The steps by which a volume comes to write back, goes, is put aside, or changes over, carried out: which comes next says the engine's
//! [`Holder`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use larder_base::Nanos;
use larder_engine::block::node::logged::call_log;
use larder_engine::block::writeback::holder::{Applied, Held, Holder, state_of};
use larder_engine::block::writeback::marker::{Again, Holds, Mark, Step};
use larder_engine::block::writeback::recovery::Recovered;
use larder_engine::block::writeback::scan;
use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState};
use larder_format::block::superblock::WrittenBack;
use larder_volume::journal::Site;
use larder_volume::marker::MarkerPlace;

use super::super::attached::Attached;
use super::super::open::CacheError;
use super::super::operators::LOOK;
use super::super::{Core, Mailbox, locked};
use super::ends::say_void;
use super::journal::{Journal, JournalAt, Journaling, Of, Taken};
use super::start::{no_journal, open_journal, random_uuid, read_marker, volume_error};
use super::{Back, BackConfig, MarkerAt, Written, beyond};

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
    pub journal: Option<Journal>,
    /// Where that was said to be.
    pub journal_at: JournalAt,
    /// It was journaled when it was last written.
    pub journaled: bool,
    /// Its journal is torn: the store is whole again behind that epoch.
    pub doubt: Option<u64>,
    pub config: BackConfig,
    pub marker: MarkerAt,
    /// Its store is the one that it was, as the operator says.
    pub moved: bool,
    /// The last mark that its store is known to have, and the attachment of which that was said.
    pub mark: Option<(u32, String)>,
    /// What a start has found in the log.
    pub found: Option<(&'a Recovered, &'a scan::Scan)>,
}

impl Begins<'_> {
    /// Its journal, open; `None`: it has none.
    fn open_journal(
        &mut self,
        volume: &Attached,
        uuid: Uuid,
    ) -> Result<Option<&mut Journal>, CacheError> {
        if let (Some(site), None) = (&self.site, &self.journal) {
            self.journal = Some(open_journal(volume, site, uuid)?);
        }
        Ok(self.journal.as_mut())
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
            if let Err(why) = self.step(holder, step, go_on) {
                if let (NotDone::Failed(error), Some(_)) = (&why, &failed) {
                    tracing::warn!("volume '{}': {error}", self.volume.name);
                }
                failed.get_or_insert(why);
                holder.failed();
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
                    begins.mark = read_marker(of, holder, place, begins.moved, &known)?;
                    // Where it cannot be had nothing is changed.
                    begins.open_journal(volume, holder.state().volume)?;
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
            Step::DropLines => core.distrust(volume, volume.volume().backing().look())?,
            Step::DestageMost | Step::Destage => {
                self.destage(step, within, go_on)?;
                if self.goes_itself(holder) {
                    return Ok(());
                }
            }
            Step::Settle => {
                let attachment = holder.state().attachment;
                self.back.log().put_aside(attachment);
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
                self.still_ours()?;
            }
            Step::FlushStore => {
                volume.make_durable()?;
                self.still_ours()?;
            }
            Step::Replay(generation) => {
                let applied = self.replay(&holder.state(), generation)?;
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
            Step::Show => self.show(holder),
            Step::Through | Step::Aside => {
                let attachment = holder.state().attachment;
                let mut log = self.back.log();
                if step == Step::Through && holder.is_going() && log.closed().is_some() {
                    return Ok(());
                }
                volume.attachment.store(0, Ordering::SeqCst);
                if step == Step::Through {
                    log.detach(attachment);
                }
                drop(log);
                self.back.remove(attachment);
            }
            Step::Resume => {
                let attachment = holder.state().attachment;
                call_log(core, None, |log, asks| log.resume(attachment, asks));
            }
            Step::CloseLog => {
                call_log(core, None, |log, asks| {
                    log.close(
                        core.now(),
                        "a volume that stays could not be recorded as dirty",
                        asks,
                    );
                });
            }
            // (A journal that was applied is void with its generation.)
            Step::EmptyJournal => {}
        }
        holder.done();
        Ok(())
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
            if let (Which::Held(written), true) = (&self.which, self.is_halted(attachment)) {
                return Err(self.fail(self.core.troubles_of(written).join("; ")));
            }
            if !go_on(held.map_or(0, |status| status.held.0)) {
                return Err(NotDone::Unwanted);
            }
            self.core.pause(LOOK);
        }
        Ok(())
    }

    /// Nothing of it comes to its store: that is somebody else's.
    fn is_halted(&self, attachment: u32) -> bool {
        self.back.log().is_halted(attachment)
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
        self.wait(within, go_on, |way| way.back.written(attachment).is_none() || stands(way))?;
        if stands(self) {
            return Err(NotDone::Unwanted);
        }
        holder.went_through();
        Ok(())
    }

    /// What is dirty comes to the store; most of it is what was when this began.
    fn destage(&self, step: Step, within: Option<Nanos>, go_on: GoOn<'_>) -> Result<(), NotDone> {
        let attachment = self.volume.attachment().unwrap_or(0);
        let core = self.core;
        call_log(core, None, |log, asks| log.drain(attachment, true, asks));
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
        call_log(core, None, |log, asks| log.drain(attachment, false, asks));
        waited
    }

    fn replay(&mut self, state: &WrittenBack, generation: u64) -> Result<Option<Applied>, NotDone> {
        let Which::Comes(begins) = &mut self.which else { return Ok(None) };
        let journaled = begins.journaled;
        let Some(journal) = begins.open_journal(self.volume, state.volume)? else {
            return Ok(None);
        };
        let of = Of { volume: state.volume, cache: self.back.cache.0, generation };
        // One that was in another order has nothing in it.
        let taken = match journaled {
            true => journal.take_over(of, self.volume.volume().backing()),
            false => Ok(Taken::default()),
        };
        let Taken { applied, last: epoch, doubt } =
            taken.map_err(|reason| NotDone::Failed(volume_error(&self.volume.name, reason)))?;
        begins.doubt = doubt;
        let last = applied.as_ref().map_or(0, |applied| applied.last);
        if let Some(mark) = applied.and_then(|applied| applied.mark) {
            begins.mark = Some((state.attachment, mark));
        }
        Ok(Some(Applied { epoch, last }))
    }

    /// The journal of a volume that comes, if it has one, is that of this attachment from now on. (Nothing speaks of it before: one that is not
    /// this attachment's is a lost one.)
    fn claim(&mut self, marker: &Marker) -> Result<(), NotDone> {
        let Which::Comes(begins) = &mut self.which else { return Ok(()) };
        let doubt = begins.doubt;
        let Some(journal) = begins.open_journal(self.volume, marker.volume)? else { return Ok(()) };
        let random = random_uuid()?.0;
        let apart = journal.is_apart(self.volume.volume().backing(), random);
        apart.map_err(|reason| NotDone::Failed(volume_error(&self.volume.name, reason)))?;
        let claimed = journal.claim(marker, doubt);
        claimed.map_err(|e| NotDone::Failed(no_journal(&self.volume.name, e.into())))
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
            Again::Unknown => Err(self.fail("its marker cannot be read".to_owned())),
        }
    }

    /// Writes the marker; false if the log has failed meanwhile, whose it is then.
    fn mark(&mut self, holder: &Holder, mark: Mark, generation: u64) -> Result<bool, NotDone> {
        let state = WrittenBack { generation, ..holder.state() };
        let attachment = self.volume.attachment();
        let held = match &self.which {
            Which::Held(written) => Some(written.clone()),
            Which::Comes(_) => None,
        };
        let mut last_number = held.as_ref().map(|written| locked(&written.number));
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
        if matches!(mark, Mark::Dirty(_)) {
            self.claim(&marker)?;
        }
        if let Some(last_number) = &mut last_number {
            // (One that could not be written may have been.)
            **last_number = number;
        }
        let done = match &mut self.which {
            Which::Comes(Begins { place: Some(place), .. }) => place.write(&marker),
            Which::Held(written) => {
                let again = self.core.check_marker(self.back, written);
                self.core.write_marker(written, &marker, again)
            }
            Which::Comes(_) => Ok(()),
        };
        done.map_err(|error| self.fail(error.to_string()))?;
        if let Which::Held(written) = &self.which {
            written.said.store(frontier, Ordering::Relaxed);
            written.durable.store(number, Ordering::Relaxed);
        }
        Ok(true)
    }

    /// The log has the volume from now on.
    fn answer(&mut self, holder: &Holder) -> Result<(), NotDone> {
        let (core, back, state) = (self.core, self.back, holder.state());
        if back.log().closed().is_some() {
            return Err(self.fail("its write log has failed".to_owned()));
        }
        if matches!(&self.which, Which::Comes(begins) if begins.place.is_none()) {
            // No marker was written, and its journal is to be its own all the same.
            let (number, frontier) = (holder.number(), holder.frontier());
            let marker = core.marker(self.volume, &state, number, MarkerState::Dirty, frontier);
            self.claim(&marker)?;
        }
        let Which::Comes(begins) = &mut self.which else { return Ok(()) };
        let journal = match begins.journal.take() {
            Some(journal) => {
                let of =
                    Of { volume: state.volume, cache: back.cache.0, generation: state.generation };
                let core = core.me.get().cloned().unwrap_or_default();
                let site = begins.site.clone();
                let started = Journaling::start(core, state.attachment, of, (site, journal));
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
        let of = [Some(state.attachment), holder.before()];
        let mark = begins.mark.take().filter(|(said, _)| of.contains(&Some(*said)));
        // Before the log has it: what was put aside is destaged at once, through its journal.
        back.add(Written {
            journal,
            attached: self.volume.clone(),
            place: begins.place.take().map(Into::into),
            state,
            config: begins.config.clone(),
            marker: begins.marker.clone(),
            journal_at: begins.journal_at.clone(),
            number: holder.number().into(),
            durable: holder.number().into(),
            said: AtomicU64::new(holder.frontier()),
            trouble: Default::default(),
            recovered: holder.recovered(),
            shown: false,
        });
        call_log(core, None, |log, asks| {
            let now = core.now();
            if log.is_aside(state.attachment) {
                let none = log.stored_mark(state.attachment).is_none();
                if let Some((_, mark)) = mark.filter(|_| none) {
                    log.had_mark(state.attachment, mark);
                }
                return log.take_up(now, attach, asks);
            }
            log.attach(now, attach);
            log.cut_off(state.attachment, state.cut);
            asks.steps.push(state.attachment);
            if let Some((_, mark)) = mark {
                log.had_mark(state.attachment, mark);
            }
            if let Some((found, scanned)) = found {
                log.recover(now, state.attachment, found, scanned);
            }
        });
        if found.is_some() {
            core.name_marks(back, state.attachment);
        }
        // What it had under another number is void.
        if let Some(before) = holder.before().filter(|before| *before != state.attachment) {
            let mut log = back.log();
            let void = log.status(core.now(), before).map_or(0, |status| status.dirty);
            log.detach(before);
            drop(log);
            say_void(&self.volume.name, void);
        }
        tracing::debug!(volume = self.volume.name, attachment = state.attachment, "writes back");
        self.volume.attachment.store(state.attachment, Ordering::SeqCst);
        Ok(())
    }

    /// The log has the volume, as it was put aside, and whoever reads sees what is dirty.
    fn show(&mut self, holder: &Holder) {
        let (core, back, state) = (self.core, self.back, holder.state());
        let Which::Comes(begins) = &mut self.which else { return };
        let named = (holder.number(), holder.epoch(), begins.place.is_some());
        let attach = core.attach_of(&state, &begins.config, holder.frontier(), named);
        let found = begins
            .found
            .and_then(|(found, scanned)| Some((found.volumes.get(&state.attachment)?, scanned)));
        let mut log = back.log();
        if !log.is_aside(state.attachment) {
            log.attach(core.now(), attach);
            log.cut_off(state.attachment, state.cut);
            log.put_aside(state.attachment);
            if let Some((found, scanned)) = found {
                log.recover(core.now(), state.attachment, found, scanned);
            }
        }
        let had = self.volume.had().unwrap_or(0);
        let beyond = beyond(&log, state.attachment, (self.volume.bytes(), had));
        drop(log);
        core.name_marks(back, state.attachment);
        tracing::error!("volume '{}': {beyond}", self.volume.name);
        back.add(Written {
            journal: None,
            attached: self.volume.clone(),
            place: begins.place.take().map(Into::into),
            state,
            config: begins.config.clone(),
            marker: begins.marker.clone(),
            journal_at: begins.journal_at.clone(),
            number: holder.number().into(),
            durable: holder.number().into(),
            trouble: Default::default(),
            said: AtomicU64::new(holder.frontier()),
            recovered: holder.recovered(),
            shown: true,
        });
        self.volume.attachment.store(state.attachment, Ordering::SeqCst);
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
    /// As the machine has it.
    pub(super) fn held(&self, back: &Back, now: Nanos) -> Held {
        let frontier = back.log().status(now, self.state.attachment);
        Held {
            cache: back.cache.0,
            entry: self.state,
            number: *locked(&self.number),
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
