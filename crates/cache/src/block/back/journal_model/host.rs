//! What a host does around it: a start, going, and a recovery without the cache, as the engine's holder says.

use larder_engine::block::writeback::holder::{Comer, Held, Holder, Logged, mark_of, state_of};
use larder_engine::block::writeback::marker::{self, Again, Mark, Step, look_again};
use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState, Order as MarkerOrder};
use larder_format::block::superblock::WrittenBack;
use larder_volume::Backing;
use larder_volume::journal::{JournalError, JournalPlace, Use, region_over};
use larder_volume::marker::{Found, MarkerPlace as _};
use larder_volume::op::Op;

use super::super::journal::{Anew, Coming, Journal, Kept, NotMarked, Of, unprobe};
use super::super::recover::{RecoverError, RecoverWish, recover_at};
use super::disk::{Current, Disk};
use super::marked::Marked;
use super::objects::Objects;
use super::world::{Run, World};

/// Why a start was not done.
enum NotDone {
    /// Some I/O failed.
    Failed(String),
    /// The history is wrong.
    Wrong(String),
}

fn failed(why: impl ToString) -> NotDone {
    NotDone::Failed(why.to_string())
}

/// Where the journal is: a region of a disk, or objects.
#[derive(Clone)]
pub(super) struct At {
    disk: Disk,
    objects: Option<Objects>,
}

impl At {
    fn open(&self, for_use: Use) -> Result<Box<dyn JournalPlace>, JournalError> {
        match &self.objects {
            Some(objects) => Ok(objects.open()),
            None => region_over(Box::new(self.disk.clone()), for_use),
        }
    }
}

pub(super) fn read_of(found: &Found) -> marker::Read {
    match found {
        Found::There(marker) => marker::Read::There(mark_of(marker, false)),
        Found::Absent { was } => marker::Read::Absent { was: *was },
        Found::Damaged => marker::Read::Damaged,
    }
}

impl World {
    pub(super) fn at(&self) -> At {
        At { disk: self.journal.clone(), objects: self.objects.clone() }
    }

    pub(super) fn marked(&mut self) -> Marked {
        Marked {
            inner: self.marker.open(false),
            memory: self.marker.clone(),
            power: self.power.clone(),
            rng: self.rng.fork(7),
            fails: if self.setup.fails { 0.03 } else { 0.0 },
        }
    }

    pub(super) fn says(
        &self,
        entry: &WrittenBack,
        number: u64,
        state: MarkerState,
        frontier: u64,
    ) -> Marker {
        Marker {
            number,
            state,
            volume: entry.volume,
            identity: self.store.identity().map_or([0; 64], |identity| identity.encode()),
            cache: self.cache,
            run: self.run,
            host: "here".into(),
            generation: entry.generation,
            attachment: entry.attachment,
            frontier,
            time: 0,
            mark: None,
            order: MarkerOrder::Journaled,
            applied: 0,
            joins: 0,
            probes: false,
        }
    }

    /// The volume comes with this cache.
    pub(super) fn start(&mut self) -> Result<(), String> {
        if self.rng.chance(0.2) {
            self.power.goes_after(self.rng.below(30));
        }
        let came = self.comes();
        match came {
            Ok(()) => {}
            Err(NotDone::Wrong(why)) => return Err(why),
            Err(NotDone::Failed(why)) => {
                self.say(|| format!("a start fails: {why}"));
                self.up = None;
                // An operator has the journal's head made anew where nothing else helps.
                if why.contains("is damaged") && !self.power.is_off() {
                    if self.journal_is_failing() {
                        // One copy is torn, and the other could not be read just now.
                        return Ok(());
                    }
                    if self.rotten == 0 {
                        return Err(format!("a start fails: {why}"));
                    }
                    match &self.objects {
                        Some(objects) => objects.behead(),
                        None => self.journal.wipe(0..8 << 10),
                    }
                }
            }
        }
        if self.power.is_off() {
            return self.fails();
        }
        Ok(())
    }

    fn comes(&mut self) -> Result<(), NotDone> {
        let (was, record) = (self.run, self.record);
        self.run += 1;
        let logged = record.filter(|r| r.holds.may_be_dirty()).map(|_| Logged {
            frontier: self.noted,
            last: self.log.len() as u64,
            marker: self.known,
            gap: false,
        });
        let comer = Comer {
            cache: self.cache,
            former: was,
            run: self.run,
            record,
            logged,
            order: Some(MarkerOrder::Journaled),
            marked: true,
            served: false,
            drains: false,
            later: false,
            shrunk: false,
            fresh: self.volume,
        };
        let mut holder = Holder::comes(comer, self.fault());
        let journaled = record.is_some_and(|record| record.order == MarkerOrder::Journaled);
        let mut coming = Coming { journaled, ..Coming::default() };
        let mut place = self.marked();
        let mut why = None;
        while let Some(step) = holder.next() {
            match self.come(&mut holder, step, &mut coming, &mut place) {
                Ok(()) => {}
                Err(NotDone::Wrong(why)) => return Err(NotDone::Wrong(why)),
                Err(NotDone::Failed(reason)) => {
                    why.get_or_insert(reason);
                    if self.power.is_off() {
                        break;
                    }
                    holder.failed();
                }
            }
        }
        // It is held for as long as the volume is served.
        if let Some(run) = &mut self.up {
            run.marker = Some(place);
        }
        why.map_or(Ok(()), |why| Err(NotDone::Failed(why)))
    }

    fn come(
        &mut self,
        holder: &mut Holder,
        step: Step,
        coming: &mut Coming,
        marker: &mut Marked,
    ) -> Result<(), NotDone> {
        self.say(|| format!("start: {step:?}"));
        let of = |generation| Of { volume: self.volume, cache: self.cache, generation };
        match step {
            Step::Read => {
                let found = marker.read().map_err(failed)?;
                let said = match &found {
                    Found::There(marker) => Some(marker),
                    _ => None,
                };
                let judged = holder.read(read_of(&found), said.map(|marker| &**marker));
                judged.map_err(|why| {
                    NotDone::Wrong(format!("a start is refused: {why:?}, {said:?}"))
                })?;
                if said.is_some_and(|marker| marker.probes) {
                    coming.journaled = false;
                    unprobe(&self.store).map_err(failed)?;
                }
                if coming.journal.is_none() {
                    let opened = self.at().open(Use::Make).map_err(failed)?;
                    let journal = Journal::over(opened, &[holder.state().volume], self.fault());
                    coming.journal = Some(journal.map_err(failed)?);
                }
                return Ok(());
            }
            Step::DropLines => self.slots.clear(),
            Step::Replay(generation) => {
                let store = self.store.clone();
                let (applied, _) = coming
                    .replay(of(generation), &store, (holder.frontier(), holder.recovered().0))
                    .map_err(failed)?;
                self.say(|| format!("start: replayed {applied:?}, doubt {:?}", coming.doubt));
                if self.power.is_off() {
                    return Err(failed("no power"));
                }
                if coming.doubt.is_some() && self.journal_is_failing() {
                    // What could not be read counts as damaged.
                    self.rotten = self.rotten.max(2);
                } else if coming.doubt.is_some() && !self.unsure && self.rotten == 0 {
                    let read = coming.journal.as_mut().map(|journal| journal.read(of(generation)));
                    let why = format!("a start finds it torn: {read:?}");
                    if !why.contains("damaged before") {
                        return Err(NotDone::Wrong(why));
                    }
                }
                self.counts.replayed += u64::from(applied.is_some_and(|applied| applied.last > 0));
                holder.replayed(applied);
                return Ok(());
            }
            Step::FlushStore => {
                self.store.perform(&mut Op::Flush).map_err(failed)?;
            }
            Step::Holds(holds) => {
                if self.power.io() != Current::On {
                    return Err(failed("no power"));
                }
                let mut entry = holder.entry(holds);
                if entry.attachment == 0 {
                    self.attachments += 1;
                    entry.attachment = self.attachments;
                    let image = self.all();
                    self.attaches(image);
                }
                self.record = Some(entry);
                holder.recorded(entry);
                return Ok(());
            }
            Step::Mark(mark, generation) => {
                let entry = WrittenBack { generation, ..holder.state() };
                let number = holder.number() + 1;
                let says = self.says(&entry, number, state_of(mark), holder.frontier());
                match mark {
                    Mark::Dirty(_) => {
                        let (store, random) = (self.store.clone(), [self.rng.below(256) as u8; 16]);
                        let of = (&store as &dyn Backing, random, holder.begins_anew());
                        let marked = coming.mark(&says, of, |says| marker.write(says));
                        if std::mem::take(&mut coming.also_marked) {
                            holder.also_marked();
                        }
                        marked.map_err(|why| match why {
                            NotMarked::Journal(why) => failed(why),
                            NotMarked::Same(why) => failed(why),
                            NotMarked::Marker(why) => failed(why),
                        })?;
                    }
                    _ => {
                        if coming.probed {
                            unprobe(&self.store).map_err(failed)?;
                        }
                        marker.write(&says).map_err(failed)?;
                    }
                }
            }
            Step::Answer => {
                let Some(journal) = coming.journal.take() else {
                    return Err(NotDone::Wrong("there is no journal".into()));
                };
                let (at, store) = (self.at(), self.store.clone());
                let random = [self.rng.below(256) as u8; 16];
                let anew = Anew {
                    opens: Box::new(move || at.open(Use::Make)),
                    apart: Box::new(move |journal| {
                        journal.is_apart(&store, random).map_err(|(why, _)| why)
                    }),
                };
                let kept = Kept::new(
                    of(holder.state().generation),
                    Some(anew),
                    journal,
                    Default::default(),
                );
                let at = (holder.frontier(), holder.epoch());
                self.begins(at, kept, holder.number()).map_err(NotDone::Wrong)?;
            }
            Step::CloseLog => {}
            other => return Err(NotDone::Wrong(format!("a start has no step {other:?}"))),
        }
        holder.done();
        Ok(())
    }

    /// The marker is to say how far the store is.
    pub(super) fn refresh(&mut self, run: &mut Run) {
        if let Some(mut place) = run.marker.take() {
            self.refreshes(run, &mut place);
            run.marker = Some(place);
        }
    }

    fn refreshes(&mut self, run: &mut Run, place: &mut Marked) {
        let Some(entry) = self.record else { return };
        let own = marker::Marker {
            mark: Mark::Dirty(self.cache),
            generation: entry.generation,
            number: run.durable_number,
            run: self.run,
            of: Some((self.volume, entry.attachment)),
            moved: false,
        };
        let frontier = run.records.frontier();
        let Ok(found) = place.read() else { return };
        if look_again(read_of(&found), &own, None) != Again::Own {
            return;
        }
        run.number += 1;
        let says = self.says(&entry, run.number, MarkerState::Dirty, frontier);
        let says = Marker { applied: run.destager.applied(), ..says };
        if place.write(&says).is_ok() {
            run.durable_number = run.number;
            self.known = run.number;
        }
    }

    /// It goes: killed, put aside, or in good order.
    pub(super) fn leaves(&mut self, mut run: Run) -> Result<(), String> {
        let Some(entry) = self.record else { return Err("nothing is recorded".into()) };
        let frontier = run.records.frontier();
        let (number, durable) = (run.number, run.durable_number);
        let held = Held { cache: self.cache, entry, number, durable, marked: true, frontier };
        let mut holder = match self.rng.below(4) {
            0 if self.is_clean(&run) => Holder::goes(held, self.fault()),
            1 | 2 if self.is_settled(&run) => {
                self.counts.carried += 1;
                Holder::carried(held, self.fault())
            }
            _ => {
                // What it has sent may come after its end.
                self.is_cut_off(&mut run);
                drop(run);
                let power = self.rng.chance(0.5);
                return self.ends(power);
            }
        };
        let Some(mut place) = run.marker.take() else { return Err("it has no marker".into()) };
        if self.rng.chance(0.3) {
            self.power.goes_after(self.rng.below(8));
        }
        // What the place holds is what the next write may follow.
        let mut ready = place.read().is_ok();
        while let Some(step) = holder.next() {
            self.say(|| format!("goes: {step:?}"));
            let done = ready
                && match step {
                    Step::FlushLog => {
                        self.log.iter_mut().for_each(|write| write.state = 2);
                        true
                    }
                    Step::FlushStore => self.store.perform(&mut Op::Flush).is_ok(),
                    Step::Holds(holds) if self.power.io() == Current::On => {
                        let entry = holder.entry(holds);
                        self.record = Some(entry);
                        holder.recorded(entry);
                        continue;
                    }
                    Step::Holds(_) => false,
                    Step::Mark(mark, generation) => {
                        let entry = WrittenBack { generation, ..holder.state() };
                        let says = self.says(&entry, holder.number() + 1, state_of(mark), frontier);
                        place.write(&says).is_ok()
                    }
                    _ => true,
                };
            if self.power.is_off() {
                break;
            }
            if done {
                holder.done();
            } else {
                ready = true;
                holder.failed();
                // Another try of a marker begins with reading it.
                ready &= place.read().is_ok();
            }
        }
        run.number = holder.number();
        drop(run);
        if self.power.is_off() {
            return self.fails();
        }
        // (One that could not go is killed.)
        self.crash(false)?;
        self.keeps(false)
    }

    /// The power has gone in the midst of something, or only this process has.
    pub(super) fn fails(&mut self) -> Result<(), String> {
        let power = self.rng.chance(0.7);
        self.ends(power)
    }

    fn ends(&mut self, power: bool) -> Result<(), String> {
        self.crash(power)?;
        match self.rng.chance(0.35) {
            true => self.recovers(),
            false => self.keeps(power),
        }
    }

    /// The cache is lost: store and journal are made an image, by one host after the other.
    pub(super) fn recovers(&mut self) -> Result<(), String> {
        let mut accept = false;
        for attempt in 0..40 {
            if attempt < 4 && self.rng.chance(0.5) {
                self.power.goes_after(self.rng.below(24));
            }
            if attempt > 8 {
                self.store.fails(0.0);
                self.journal_fails(0.0);
            }
            let (store, at, fault) = (self.store.clone(), self.at(), self.fault());
            let mut marker = self.marked();
            let mut open = |volume| Journal::over(at.open(Use::Apply)?, &[volume], fault);
            let wish = RecoverWish { accept_torn: accept, ..RecoverWish::default() };
            let told = recover_at(&store, &mut marker, &mut open, &wish, fault);
            drop(marker);
            self.say(|| format!("recover: {told:?}"));
            match told {
                Ok(_) | Err(RecoverError::NoMarker(_)) => {
                    if self.rng.chance(0.5) || self.power.is_off() {
                        self.store.crash();
                        self.journal.crash();
                    }
                    self.power.comes_back();
                    self.marker.set_power(true);
                    self.counts.recovered += 1;
                    let image = self.check_recovered(accept)?;
                    self.comes_anew(image);
                    return Ok(());
                }
                Err(_) if self.power.is_off() => {
                    let power = self.rng.chance(0.7);
                    self.crash(power)?;
                }
                Err(RecoverError::Torn { reason, .. }) => {
                    if self.journal_is_failing() {
                        self.journal_fails(0.0);
                        continue;
                    }
                    // A doubt outlasts what it is about.
                    if reason.contains("damaged before") {
                        self.rotten = self.rotten.max(1);
                    }
                    if !self.unsure && self.rotten == 0 {
                        return Err(format!("a journal that is whole is refused: {reason}"));
                    }
                    self.counts.refused += 1;
                    accept = true;
                }
                Err(_) => {}
            }
        }
        Err("it is never recovered".into())
    }

    /// Another cache is before it from now on.
    fn comes_anew(&mut self, image: Vec<u64>) {
        self.caches += 1;
        self.cache = Uuid([self.caches; 16]);
        (self.run, self.record, self.attachments, self.known) = (0, None, 0, 0);
        self.slots.clear();
        self.attaches(image);
    }
}
