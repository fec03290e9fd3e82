//! How a volume comes to write back, goes, is put aside with what is dirty, and changes over while it is served: which step follows which, and what
//! becomes of it when one fails.
//!
//! A [`Holder`] is a list of [`Step`]s, as an attachment is. A host does the first, says what came of it, and asks for the next; it decides nothing.
//! Each step is durable before the next. What the marker says is told by [`Holder::read`], which plans the rest or refuses; what a journal had by
//! [`Holder::replayed`]; what stands in the superblock now by [`Holder::recorded`]. A step that fails is told by [`Holder::failed`]: what is planned
//! then undoes as much as is needed for the volume to be as it was, and may be all that there is left to do.
//!
//! A marker that could not be written may have been written all the same. So a volume that goes on writing back says so again before anything is
//! answered [again]: else the store would count as whole, or as put aside, while it is written. Where that cannot be written either no change of the
//! volume is logged until it is ([`Holder::again`]).

use std::collections::VecDeque;

use larder_base::Nanos;
use larder_format::Uuid;
use larder_format::block::marker::{self as format, MarkerState, Order};
use larder_format::block::superblock::{HoldsState, WrittenBack};

use super::marker::{self, Cache, Holds, Mark, Marker, Read, Step, Verdict, Why, judge, unmarked};
use super::planted::{Fault, Planted};

/// Clients of a volume that changes over wait at most so long for what is dirty to come to its store; then they go on as before.
pub const HELD: Nanos = Nanos::from_secs(10);

/// What the log has of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Logged {
    /// The store has all up to here durably.
    pub frontier: u64,
    /// The last sequence.
    pub last: u64,
    /// Number of its marker that was last known durable.
    pub marker: u64,
    /// Records of it are lost in the midst of others.
    pub gap: bool,
}

/// A volume that comes.
#[derive(Clone, Copy, Debug)]
pub struct Comer {
    /// This cache.
    pub cache: Uuid,
    /// The run before this start's, or the present one where the volume comes later ([`cache_of`]).
    pub former: u64,
    /// The present run.
    pub run: u64,
    /// What the superblock has of the volume.
    pub record: Option<WrittenBack>,
    /// What the log has of it.
    pub logged: Option<Logged>,
    /// In which order its store is to get what is written; `None`: it is written through.
    pub order: Option<Order>,
    /// It has a marker. If not, this cache alone knows.
    pub marked: bool,
    /// It is served while it comes: it was written through until now.
    pub served: bool,
    /// Nothing is logged: the device does not work, or a start has found that the log had failed. What is dirty of the volume comes to its store;
    /// one that comes with nothing is written through.
    pub drains: bool,
    /// The log has begun: it comes later than the start.
    pub later: bool,
    /// Its store has become smaller: what is dirty of it may lie beyond its end, and it is shown as it is, and not written.
    pub shrunk: bool,
    /// Random: the volume's name for markers and caches if it has none.
    pub fresh: Uuid,
}

/// Why a volume is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// By its marker.
    Marker(Why),
    /// It is to be written through, and this cache holds writes, logged for this order, that its store lacks.
    Kept(Order),
    /// Writes that this cache alone had are lost in the midst of others.
    Gap,
    /// What is dirty was logged for another order than it is to be served in.
    Order {
        /// The order that it was logged for,
        logged: Order,
        /// and the one that is asked for.
        asked: Order,
    },
    /// Its journal may have what the store lacks, and it is not to be journaled any more.
    Journaled,
    /// It was put aside, and is not taken up while nothing is logged.
    Aside,
    /// Its log has failed in a former run, and this run logs: what is left of it is drained by a start that finds it.
    Drains,
    /// Its store has become smaller, and nothing that is dirty of it counts: it is as with one that was clean.
    Shrunk,
    /// The marker does not answer.
    Unread,
}

/// What a host gives of a volume's journal when that was replayed: the last epoch that was applied, and the sequence up to which it goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Number of the epoch.
    pub epoch: u64,
    /// The store has all up to this record.
    pub last: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// It comes.
    Comes,
    /// It goes, or changes over to be written through.
    Goes,
    /// It is put aside with what is dirty.
    Carried,
    /// It was only shown, and goes as it came.
    Left,
    /// It stays, and its marker has to say so.
    Again,
}

/// One volume's way. See the [module](self).
#[derive(Clone, Debug)]
pub struct Holder {
    what: What,
    comer: Comer,
    steps: VecDeque<Step>,
    /// Of the marker that was last written, or tried to be, and of that which is known durable.
    number: u64,
    durable: u64,
    /// The run of the latter.
    marked_by: u64,
    frontier: u64,
    epoch: u64,
    /// The superblock's entry, as it is or will be. Attachment 0: it gets a new one.
    entry: WrittenBack,
    /// Up to which record what is dirty was found, and the time that its marker said then.
    recovered: (u64, u64),
    /// A step has failed, and what is left undoes others.
    undoing: bool,
    /// It comes with nothing that was logged before.
    anew: bool,
    /// The name that its marker gave it, where it has another now.
    former: Option<Uuid>,
    /// What is dirty of it comes to its store, and nothing is logged.
    drains: bool,
    fault: Fault,
}

/// A volume that writes back, as its host has it.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// This cache.
    pub cache: Uuid,
    /// The superblock's entry of the volume.
    pub entry: WrittenBack,
    /// Number of its marker.
    pub number: u64,
    /// Number of the last that is known durable: what the superblock may say. (One that could not be written may have a later one.)
    pub durable: u64,
    /// It has one.
    pub marked: bool,
    /// The store has all up to here durably.
    pub frontier: u64,
}

/// A marker as the machine sees it. `moved`: it was written beside another store than that which is there now.
pub fn mark_of(marker: &format::Marker, moved: bool) -> Marker {
    let mark = match marker.state {
        MarkerState::Clean => Mark::Clean,
        MarkerState::Dirty => Mark::Dirty(marker.cache),
        MarkerState::Carried => Mark::Carried(marker.cache),
        MarkerState::Closing => Mark::Closing(marker.cache),
        MarkerState::Closed => Mark::Closed(marker.cache),
    };
    let format::Marker { generation, number, run, volume, attachment, .. } = *marker;
    // One that a recovery made where nothing was known names no cache.
    let of = (marker.cache != Uuid([0; 16])).then_some((volume, attachment));
    Marker { mark, generation, number, run, of, moved }
}

/// What a marker says, as it is written.
pub fn state_of(mark: Mark) -> MarkerState {
    match mark {
        Mark::Clean => MarkerState::Clean,
        Mark::Dirty(_) => MarkerState::Dirty,
        Mark::Carried(_) => MarkerState::Carried,
        Mark::Closing(_) => MarkerState::Closing,
        Mark::Closed(_) => MarkerState::Closed,
    }
}

/// What a superblock says of a volume, as the machine sees it.
pub fn holds_of(record: Option<&WrittenBack>) -> Holds {
    match record.map(|record| (record.holds, record.generation)) {
        None | Some((HoldsState::Nothing, _)) => Holds::Nothing,
        Some((HoldsState::Clean, g)) => Holds::Clean(g),
        Some((HoldsState::Open, g)) => Holds::Open(g),
        Some((HoldsState::TakingUp, g)) => Holds::TakingUp(g),
        Some((HoldsState::Carried, g)) => Holds::Carried(g),
    }
}

/// This cache, as its superblock has a volume, and the log, which knows a marker of this number durable. `former` is the run before this start, or the
/// present one where the volume comes later.
///
/// A run that only keeps what is dirty, while the store is away, has written no marker. So a volume that the superblock knows is judged by the run that
/// had it last: by a later one an older copy of the cache would be believed once it was started without the store [runkept].
pub fn cache_of(
    (uuid, former): (Uuid, u64),
    record: Option<&WrittenBack>,
    logged: u64,
    fault: Fault,
) -> Cache {
    let known = record.map_or(0, |record| record.marker).max(logged);
    let record_run = record.filter(|_| !fault.is(Planted::RunRaisedUnseen)).map(|r| r.run);
    let of = record.filter(|r| r.attachment > 0).map(|record| (record.volume, record.attachment));
    Cache { uuid, run: record_run.unwrap_or(former), holds: holds_of(record), known, of }
}

impl Holder {
    /// A volume comes: to write back, or to be written through where no cache may hold more than its store.
    pub fn comes(comer: Comer, fault: Fault) -> Holder {
        let nothing = WrittenBack {
            volume: comer.fresh,
            attachment: 0,
            began: 0,
            holds: HoldsState::Nothing,
            generation: 0,
            marker: 0,
            run: comer.run,
            order: comer.order.unwrap_or(Order::Any),
            cut: None,
        };
        Holder {
            what: What::Comes,
            steps: VecDeque::from([Step::Read]),
            number: 0,
            durable: 0,
            marked_by: 0,
            frontier: 0,
            epoch: 0,
            entry: comer.record.unwrap_or(nothing),
            recovered: (0, 0),
            undoing: false,
            anew: false,
            former: None,
            drains: false,
            comer,
            fault,
        }
    }

    fn held(what: What, held: Held, mut steps: Vec<Step>, fault: Fault) -> Holder {
        let Held { cache, entry, number, durable, marked, frontier } = held;
        if !marked {
            steps.retain(|step| !matches!(step, Step::Mark(..)));
        }
        let comer = Comer {
            cache,
            former: entry.run,
            run: entry.run,
            record: Some(entry),
            logged: None,
            order: Some(entry.order),
            marked,
            served: steps.contains(&Step::Hold),
            drains: false,
            later: false,
            shrunk: false,
            fresh: entry.volume,
        };
        let comes = Holder::comes(comer, fault);
        let (steps, marked_by) = (steps.into(), entry.run);
        Holder { what, steps, number, durable, marked_by, frontier, ..comes }
    }

    /// A volume that writes back goes, with all that is dirty in its store. Its clients have gone.
    pub fn goes(held: Held, fault: Fault) -> Holder {
        Holder::held(What::Goes, held, marker::detach(held.entry.generation, fault), fault)
    }

    /// A volume that writes back is written through from now on, and is served meanwhile: what is dirty at first comes to the store while
    /// clients go on, what they have written by then while they wait.
    pub fn goes_through(held: Held, fault: Fault) -> Holder {
        let mut steps = marker::detach(held.entry.generation, fault);
        if fault.is(Planted::ThroughBeforeClean) {
            steps.retain(|step| *step != Step::Through);
            let clean = steps.iter().position(|step| matches!(step, Step::Holds(_)));
            steps.insert(clean.unwrap_or(0), Step::Through);
        }
        steps.splice(0..0, [Step::DestageMost, Step::Hold]);
        steps.push(Step::Release);
        Holder::held(What::Goes, held, steps, fault)
    }

    /// A volume that writes back is put aside with what is dirty. Its clients have gone.
    pub fn carried(held: Held, fault: Fault) -> Holder {
        let steps = marker::carry(held.cache, held.entry.generation);
        Holder::held(What::Carried, held, steps, fault)
    }

    /// A volume that is shown as it is and not written goes: cache and marker say what they said.
    pub fn left(held: Held, fault: Fault) -> Holder {
        Holder::held(What::Left, held, vec![Step::Aside], fault)
    }

    /// A volume stays after all whose marker could not be written: it is tried again, until it says that the volume writes back.
    pub fn again(held: Held, fault: Fault) -> Holder {
        let steps = marker::again(held.cache, held.entry.generation);
        Holder::held(What::Again, held, steps, fault)
    }

    /// What is to be done next; `None` at the end.
    pub fn next(&self) -> Option<Step> {
        self.steps.front().copied()
    }

    /// It is done.
    pub fn done(&mut self) {
        if let Some(Step::Mark(..)) = self.steps.pop_front() {
            self.number += 1;
            (self.durable, self.marked_by) = (self.number, self.entry.run);
        }
    }

    /// The marker was, or may have been, written once more at the step that is next.
    pub fn also_marked(&mut self) {
        self.number += 1;
    }

    /// The superblock says this of the volume now.
    pub fn recorded(&mut self, entry: WrittenBack) {
        self.entry = entry;
        self.done();
    }

    /// Its journal was replayed, and the store flushed: what that had, if anything.
    pub fn replayed(&mut self, applied: Option<Applied>) {
        if let Some(Applied { epoch, last }) = applied {
            self.epoch = self.epoch.max(epoch);
            self.frontier = self.frontier.max(last);
        }
        self.done();
    }

    /// The marker was read. Where there is none by the operator's word `read` does not matter.
    ///
    /// # Errors
    /// The volume must not be served so: nothing was changed.
    pub fn read(&mut self, read: Read, said: Option<&format::Marker>) -> Result<(), Refused> {
        self.done();
        let comer = self.comer;
        let mut entry = comer.record.unwrap_or(self.entry);
        let logged = comer.logged.map_or(0, |logged| logged.marker);
        let record = comer.record.as_ref();
        let cache = cache_of((comer.cache, comer.former), record, logged, self.fault);
        let verdict = match comer.marked {
            true => judge(read, &cache, self.fault),
            false => unmarked(cache.holds, false),
        };
        let (mut there, absent) = (None, comer.marked && !matches!(read, Read::There(_)));
        if let (Read::There(marker), true) = (read, comer.marked) {
            there = Some(marker);
            (self.number, self.durable) = (marker.number, marker.number);
            self.marked_by = marker.run;
        }
        let Some(order) = comer.order else {
            let dirty = comer.record.is_some_and(|record| record.holds.may_be_dirty());
            return match verdict {
                Verdict::Attach { .. } if !dirty => Ok(()),
                Verdict::Attach { .. } if comer.shrunk => Err(Refused::Shrunk),
                // What this cache holds is void [fence]; that it is written nowhere else costs nothing but to find it void again.
                Verdict::Attach { .. } if comer.drains => {
                    self.steps.push_back(Step::DropLines);
                    Ok(())
                }
                Verdict::Attach { generation, .. } => {
                    let clean = Step::Holds(Holds::Clean(generation.saturating_sub(1)));
                    self.steps.extend([Step::DropLines, clean, Step::Through]);
                    Ok(())
                }
                Verdict::Refuse(why) => Err(Refused::Marker(why)),
                _ => Err(Refused::Kept(entry.order)),
            };
        };
        let mut g;
        let lines = match verdict {
            Verdict::Attach { .. } if comer.shrunk => return Err(Refused::Shrunk),
            Verdict::GoOn | Verdict::TakeUp { .. } | Verdict::Drain if comer.shrunk => {
                let kept = entry;
                self.keeps(&mut entry, said, order, verdict == Verdict::Drain)?;
                self.entry = kept;
                self.steps.extend([Step::DropLines, Step::Show]);
                return Ok(());
            }
            Verdict::Attach { lines, .. } if comer.drains => {
                if !lines && there.is_some() {
                    self.steps.push_back(Step::DropLines);
                }
                return Ok(());
            }
            Verdict::Attach { generation, lines } => {
                (g, self.anew) = (generation, true);
                let before = there.is_some();
                entry.volume = said.map_or(entry.volume, |said| said.volume);
                entry =
                    WrittenBack { attachment: 0, began: 0, marker: 0, order, cut: None, ..entry };
                (self.entry, self.frontier, self.epoch) = (entry, 0, 0);
                if absent {
                    // A kill behind the next step finds one that says that nothing is dirty.
                    self.steps.push_back(Step::Mark(Mark::Clean, generation));
                    g += 1;
                }
                if comer.served {
                    self.steps.extend([Step::Hold, Step::FlushStore]);
                }
                // Where there never was a marker no cache has ever written back: the lines are as true as the store says they are.
                lines || !before
            }
            Verdict::TakeUp { .. } if comer.drains => return Err(Refused::Aside),
            Verdict::Drain if comer.later && !comer.drains => return Err(Refused::Drains),
            Verdict::GoOn | Verdict::TakeUp { .. } | Verdict::Drain => {
                self.keeps(&mut entry, said, order, verdict == Verdict::Drain)?;
                g = entry.generation;
                self.entry = entry;
                self.drains = verdict == Verdict::Drain || comer.drains;
                verdict.keeps_lines(self.fault)
            }
            Verdict::Tidy => {
                // A detach was cut short behind the cache's part: the store has everything.
                self.steps.extend([Step::Mark(Mark::Clean, entry.generation), Step::Read]);
                return Ok(());
            }
            Verdict::Refuse(why) => return Err(Refused::Marker(why)),
            Verdict::Wait => return Err(Refused::Unread),
        };
        if !lines {
            self.steps.push_back(Step::DropLines);
        }
        let journaled = entry.order == Order::Journaled;
        self.steps.extend(match verdict {
            Verdict::TakeUp { generation } => {
                marker::take_up(comer.cache, generation, journaled, self.fault)
            }
            _ if self.drains => marker::drain(g, journaled, self.fault),
            Verdict::GoOn => marker::go_on(comer.cache, g, journaled, self.fault),
            _ => marker::attach(comer.cache, g, self.fault),
        });
        if comer.served {
            self.steps.push_back(Step::Release);
        }
        if !comer.marked {
            self.steps.retain(|step| !matches!(step, Step::Mark(..)));
        }
        Ok(())
    }

    /// Another volume of this cache has the name for markers and caches that its marker gives it: its store was one of that volume, or is a copy. If
    /// it comes with nothing that was logged before it gets a name of its own, which its marker has before the cache.
    pub fn is_another(&mut self) {
        if !self.anew {
            return;
        }
        self.former = Some(std::mem::replace(&mut self.entry.volume, self.comer.fresh));
        if self.comer.marked && !matches!(self.steps.front(), Some(Step::Mark(Mark::Clean, _))) {
            let g = self.steps.iter().find_map(|step| match step {
                Step::Holds(Holds::Open(g)) => Some(g.saturating_sub(1)),
                _ => None,
            });
            self.steps.push_front(Step::Mark(Mark::Clean, g.unwrap_or(0)));
        }
    }

    /// What this cache holds counts: whether it can be gone on from.
    fn keeps(
        &mut self,
        entry: &mut WrittenBack,
        said: Option<&format::Marker>,
        order: Order,
        drains: bool,
    ) -> Result<(), Refused> {
        let logged = self.comer.logged.unwrap_or(Logged {
            frontier: entry.began,
            last: entry.began,
            ..Logged::default()
        });
        if logged.gap {
            return Err(Refused::Gap);
        }
        let stored = said.filter(|said| said.attachment == entry.attachment);
        let stored = stored.map_or(0, |said| said.frontier);
        if stored > logged.last && !drains {
            // The store has more than this cache has ever heard of. (What came there from memory is in no log that has failed.)
            return Err(Refused::Marker(Why::SetBack));
        }
        self.frontier = logged.frontier.max(stored).max(entry.began);
        if order != entry.order && logged.last > self.frontier {
            return Err(Refused::Order { logged: entry.order, asked: order });
        }
        if entry.order == Order::Journaled && order != Order::Journaled {
            return Err(Refused::Journaled);
        }
        self.recovered = (logged.last, said.map_or(0, |said| said.time));
        entry.order = order;
        Ok(())
    }

    /// The next step could not be done. If something is to be undone, it is next.
    pub fn failed(&mut self) {
        let step = self.steps.front().copied();
        let (cache, g) = (self.comer.cache, self.entry.generation);
        if let Some(Step::Mark(..)) = step {
            // It may have been written.
            self.number += 1;
        }
        let held = self.is_held();
        let (was_undoing, what) = (std::mem::replace(&mut self.undoing, true), self.what);
        self.steps.clear();
        match (what, step) {
            // The marker cannot say that it writes back: nothing of it may be answered by the log until it does. Others are as well as they were.
            (What::Goes | What::Carried, Some(Step::Mark(..))) if was_undoing => {
                self.steps.push_back(Step::Refuse);
            }
            // The cache cannot: nor can it say anything of others.
            (What::Goes | What::Carried, _) if was_undoing => self.steps.push_back(Step::CloseLog),
            (What::Goes | What::Carried, Some(Step::Holds(_) | Step::Mark(..))) => {
                self.steps.push_back(Step::Holds(Holds::Open(g)));
                // Neither is known to be as it was before. One that says carried speaks of a cache that is; one that says clean of none that is open.
                if self.comer.marked && !self.fault.is(Planted::FailedMarkForgotten) {
                    let mark = Step::Mark(Mark::Dirty(cache), g);
                    self.steps.insert(usize::from(what == What::Goes), mark);
                }
            }
            // Nothing was logged: it goes in good order.
            (What::Comes, _)
                if self.anew && self.entry.holds == HoldsState::Open && !was_undoing =>
            {
                self.steps.push_back(Step::Holds(Holds::Clean(g)));
                if self.comer.marked {
                    self.steps.push_back(Step::Mark(Mark::Clean, g));
                }
            }
            _ => {}
        }
        if what == What::Carried {
            self.steps.push_back(Step::Resume);
        }
        if held {
            self.steps.push_back(Step::Release);
        }
    }

    /// The log has failed meanwhile, and all of the volume is in its store, as its marker says: it is written through, and nothing is left to do.
    pub fn went_through(&mut self) {
        let held = self.is_held();
        self.steps.clear();
        if held {
            self.steps.push_back(Step::Release);
        }
    }

    /// Clients wait for what is next.
    fn is_held(&self) -> bool {
        self.comer.served && !self.steps.iter().skip(1).any(|s| *s == Step::Hold)
    }

    /// Whether it goes, or changes over to be written through, with all that is dirty in its store.
    pub fn is_going(&self) -> bool {
        self.what == What::Goes
    }

    /// Whether it comes to be drained: its log has failed, or nothing can be logged, and its lines are not used.
    pub fn drains(&self) -> bool {
        self.drains
    }

    /// How long what is next may take, where clients wait for it.
    pub fn within(&self) -> Option<Nanos> {
        self.is_held().then_some(HELD)
    }

    /// Whether a step has failed, so that the volume stays as it was.
    pub fn has_failed(&self) -> bool {
        self.undoing
    }

    /// What the superblock is to say of the volume at this step. With attachment number 0 it gets a new one, and what the log had of it is void.
    pub fn entry(&self, holds: Holds) -> WrittenBack {
        let (holds, generation) = match holds {
            Holds::Nothing => (HoldsState::Nothing, 0),
            Holds::Clean(g) => (HoldsState::Clean, g),
            Holds::Open(g) => (HoldsState::Open, g),
            Holds::TakingUp(g) => (HoldsState::TakingUp, g),
            Holds::Carried(g) => (HoldsState::Carried, g),
        };
        // What was replayed of a journal that counts no more is known by its cache, too.
        let began = match holds {
            HoldsState::Open => self.entry.began.max(self.frontier),
            _ => self.entry.began,
        };
        let marker = self.entry.marker.max(self.durable);
        // Before the marker has it.
        let run = self.entry.run.max(self.comer.run);
        WrittenBack { holds, generation, began, marker, run, ..self.entry }
    }

    /// The attachment number that the volume had before it came, if it had one.
    pub fn before(&self) -> Option<u32> {
        self.comer.record.map(|record| record.attachment)
    }

    /// Nothing that was logged before is its own: it begins to write back.
    pub fn begins_anew(&self) -> bool {
        self.anew
    }

    /// The name that its marker and its journal gave it, where it has another now ([`Holder::is_another`]).
    pub fn former(&self) -> Option<Uuid> {
        self.former
    }

    /// The superblock's entry, as it is now.
    pub fn state(&self) -> WrittenBack {
        self.entry
    }

    /// Number of the marker that was written last; the next has the next.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The run of the marker that was last read or written.
    pub fn marked_by(&self) -> u64 {
        self.marked_by
    }

    /// All up to here is durable in the store.
    pub fn frontier(&self) -> u64 {
        self.frontier
    }

    /// The last epoch of its journal that was applied.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Up to which record what is dirty was found when it came, and the time that its marker said then. Of one that came with nothing (0, 0).
    pub fn recovered(&self) -> (u64, u64) {
        self.recovered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CACHE: Uuid = Uuid([1; 16]);

    /// A volume of generation 5, open here.
    fn comer(order: Option<Order>) -> Comer {
        let record = WrittenBack {
            volume: Uuid([2; 16]),
            attachment: 3,
            began: 0,
            holds: HoldsState::Open,
            generation: 5,
            marker: 7,
            run: 9,
            order: Order::Flush,
            cut: None,
        };
        Comer {
            cache: CACHE,
            former: 9,
            run: 10,
            record: Some(record),
            logged: None,
            order,
            marked: true,
            served: false,
            drains: false,
            later: true,
            shrunk: false,
            fresh: Uuid([4; 16]),
        }
    }

    fn read(comer: Comer, mark: Mark, generation: u64) -> (Holder, Result<(), Refused>) {
        let mut holder = Holder::comes(comer, Fault::default());
        let of = Some((Uuid([2; 16]), 3));
        let read = Read::There(Marker { mark, generation, number: 8, run: 9, of, moved: false });
        let judged = holder.read(read, None);
        (holder, judged)
    }

    fn steps(mut holder: Holder) -> Vec<Step> {
        std::iter::from_fn(|| holder.next().inspect(|_| holder.done())).collect()
    }

    /// A superblock that knew a marker which was never written would call the one that is there set back.
    #[test]
    fn the_superblock_knows_the_last_marker_that_is_durable_and_none_that_could_not_be_written() {
        let entry = comer(None).record.unwrap();
        let held = Held { cache: CACHE, entry, number: 12, durable: 9, marked: true, frontier: 0 };
        let mut holder = Holder::goes(held, Fault::default());
        while !matches!(holder.next(), Some(Step::Mark(..))) {
            assert_eq!(holder.entry(Holds::Clean(5)).marker, 9);
            holder.done();
        }
        holder.failed();
        assert_eq!((holder.number(), holder.entry(Holds::Open(5)).marker), (13, 9));
    }

    #[test]
    fn a_volume_that_writes_through_voids_what_its_cache_held_when_its_store_was_recovered() {
        let (holder, judged) = read(comer(None), Mark::Clean, 6);
        assert_eq!(judged, Ok(()));
        let wanted = [Step::DropLines, Step::Holds(Holds::Clean(6)), Step::Through];
        assert_eq!(steps(holder), wanted);
        let (_, judged) = read(comer(None), Mark::Dirty(CACHE), 5);
        assert_eq!(judged, Err(Refused::Kept(Order::Flush)));
        // The device is not written then, and no line of it counts.
        let (holder, judged) = read(Comer { drains: true, ..comer(None) }, Mark::Clean, 6);
        assert_eq!((judged, steps(holder)), (Ok(()), vec![Step::DropLines]));
    }

    #[test]
    fn a_shrunk_store_is_shown_with_what_is_dirty_and_nothing_is_said_of_it_anew() {
        for (mark, holds) in [
            (Mark::Dirty(CACHE), HoldsState::Open),
            (Mark::Carried(CACHE), HoldsState::Carried),
            (Mark::Closing(CACHE), HoldsState::Open),
        ] {
            let record = comer(None).record.map(|record| WrittenBack { holds, ..record });
            for later in [false, true] {
                let comer = Comer { shrunk: true, record, later, ..comer(Some(Order::Flush)) };
                let (holder, judged) = read(comer, mark, 5);
                assert_eq!(judged, Ok(()), "{mark:?}");
                assert_eq!(Some(holder.state()), record);
                assert_eq!(steps(holder), [Step::DropLines, Step::Show], "{mark:?}");
            }
        }
        for order in [None, Some(Order::Flush)] {
            let (_, judged) = read(Comer { shrunk: true, ..comer(order) }, Mark::Clean, 6);
            assert_eq!(judged, Err(Refused::Shrunk));
        }
    }

    #[test]
    fn what_a_failed_log_has_left_is_drained_by_a_start_and_not_by_a_log_that_works() {
        for mark in [Mark::Closing(CACHE), Mark::Closed(CACHE)] {
            let (_, judged) = read(comer(Some(Order::Flush)), mark, 5);
            assert_eq!(judged, Err(Refused::Drains));
            let at_start = Comer { later: false, ..comer(Some(Order::Flush)) };
            let (holder, judged) = read(at_start, mark, 5);
            assert!(judged.is_ok() && holder.drains());
        }
    }

    /// By the number of one that was only tried the next start would take the marker that is there for one that was set back.
    #[test]
    fn the_superblock_has_the_number_of_a_marker_that_is_durable_not_of_one_that_was_tried() {
        let there = |number| {
            let of = Some((Uuid([2; 16]), 3));
            let (mark, generation, run) = (Mark::Dirty(CACHE), 5, 9);
            Read::There(Marker { mark, generation, number, run, of, moved: false })
        };
        let held = Held {
            cache: CACHE,
            entry: comer(None).record.unwrap(),
            // Two were tried since the last that is known to be there.
            number: 12,
            durable: 10,
            marked: true,
            frontier: 0,
        };
        for machine in [Holder::goes, Holder::carried] {
            let mut holder = machine(held, Fault::default());
            let (mut tried, mut refused) = (0, false);
            while let Some(step) = holder.next() {
                match step {
                    Step::Holds(holds) => {
                        let entry = holder.entry(holds);
                        assert_eq!(entry.marker, 10, "{step:?}");
                        holder.recorded(entry);
                    }
                    Step::Mark(..) => {
                        tried += 1;
                        holder.failed();
                    }
                    step => {
                        refused |= step == Step::Refuse;
                        holder.done();
                    }
                }
            }
            assert!(tried == 2 && refused && holder.number() == 14, "{holder:?}");
            // A start finds the last that is known, or any that was tried.
            let left = holder.state();
            for number in 10..=14 {
                let comer = Comer { record: Some(left), ..comer(Some(Order::Flush)) };
                let mut holder = Holder::comes(comer, Fault::default());
                assert_eq!(holder.read(there(number), None), Ok(()), "{number}: {left:?}");
            }
            let comer = Comer { record: Some(left), ..comer(Some(Order::Flush)) };
            let judged = Holder::comes(comer, Fault::default()).read(there(9), None);
            assert_eq!(judged, Err(Refused::Marker(Why::SetBack)));
        }
        // One that was written counts.
        let mut holder = Holder::again(held, Fault::default());
        assert_eq!(holder.next(), Some(Step::Mark(Mark::Dirty(CACHE), 5)));
        holder.done();
        assert_eq!(holder.entry(Holds::Open(5)).marker, 13);
    }
}
