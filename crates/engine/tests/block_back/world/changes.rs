//! Volumes change over between writing back and through while clients write, step by step as the engine's [`Holder`] says, and kills, power cuts and
//! the loss of the cache come between any two steps. What marker and superblock say decides what the next start makes of the log.

use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::holder::{Comer, Held, Holder, Logged, Refused};
use larder_engine::block::writeback::marker::{Mark, Marker, Read, Step};
use larder_engine::block::writeback::volume_log::Order;
use larder_format::Uuid;
use larder_format::block::superblock::{HoldsState, WrittenBack};

use super::truth::Look;
use super::{CACHE, Checked, World};

/// What is said of a volume that can write back, and what is on its way.
#[derive(Clone, Debug)]
pub(super) struct Beside {
    /// Its marker.
    marker: Marker,
    /// Its entry in the cache's superblock.
    pub(super) record: WrittenBack,
    /// Numbers of the marker that was last tried to be written, and of that which is known durable.
    numbers: (u64, u64),
    /// What the log calls it; `None`: it is written through.
    pub(super) attached: Option<u32>,
    way: Option<Way>,
    /// Its clients wait.
    pub(super) held: bool,
    /// Changes of it are refused, since its marker could not be written.
    pub(super) refused: bool,
}

/// A volume on its way.
#[derive(Clone, Debug)]
struct Way {
    holder: Holder,
    /// Up to where it is being destaged.
    drains: Option<u64>,
    name: &'static str,
}

/// Of the volume of this number, which writes back from the beginning.
pub(super) fn beside(v: usize, order: Option<Order>) -> Beside {
    let (volume, attachment) = (Uuid([v as u8 + 1; 16]), v as u32 + 1);
    let mark = Mark::Dirty(CACHE);
    let of = Some((volume, attachment));
    let record = WrittenBack {
        volume,
        attachment,
        began: 0,
        holds: HoldsState::Open,
        generation: 1,
        marker: 0,
        run: 1,
        order: order.unwrap_or(Order::Any).marked(),
        cut: None,
    };
    Beside {
        marker: Marker { mark, generation: 1, number: 1, run: 1, of, moved: false },
        record,
        numbers: (1, 1),
        attached: order.map(|_| attachment),
        way: None,
        held: false,
        refused: false,
    }
}

impl World {
    /// Its number in the log, if it writes back.
    pub(super) fn attachment(&self, v: usize) -> Option<u32> {
        self.beside[v].attached
    }

    /// The process is gone, and all that it was about to do.
    pub(super) fn forget_ways(&mut self) {
        for beside in &mut self.beside {
            (beside.way, beside.held, beside.refused) = (None, false, false);
        }
    }

    fn comer(&self, v: usize, logged: Option<Logged>) -> Comer {
        let record = self.beside[v].record;
        let order = self.kinds[v].map(|kind| kind.destage.order.marked());
        Comer {
            cache: CACHE,
            former: record.run,
            run: self.log.run,
            record: Some(record),
            logged,
            order,
            marked: true,
            served: false,
            drains: false,
            later: logged.is_none(),
            shrunk: false,
            fresh: record.volume,
        }
    }

    fn held(&self, v: usize) -> Held {
        let Beside { record: entry, numbers: (number, durable), attached, .. } = self.beside[v];
        let log = self.life.as_ref().map(|life| life.shared.log.borrow());
        let status = log.zip(attached).and_then(|(log, of)| log.status(self.now, of));
        let frontier = status.map_or(0, |status| status.positions[0]);
        Held { cache: CACHE, entry, number, durable, marked: true, frontier }
    }

    /// Somebody has a volume change over; or has one written back again whose marker could not be written.
    pub(super) fn change_over(&mut self, v: usize) {
        if self.kinds[v].is_none() || self.beside[v].way.is_some() {
            return;
        }
        let fault = self.fault_in_log();
        let (holder, name) = match self.beside[v].attached {
            _ if self.beside[v].refused => (Holder::again(self.held(v), fault), "again"),
            Some(_) => (Holder::goes_through(self.held(v), fault), "through"),
            None => (Holder::comes(Comer { served: true, ..self.comer(v, None) }, fault), "back"),
        };
        self.says(|| format!("v{v}: changes over: {name}"));
        self.beside[v].way = Some(Way { holder, drains: None, name });
    }

    /// Whether a volume is on its way somewhere.
    pub(super) fn is_changing(&self, v: usize) -> bool {
        self.beside[v].way.is_some() || self.beside[v].refused
    }

    /// One step more of each volume that is on its way.
    pub(super) fn go_on_ways(&mut self) -> Checked {
        for v in 0..self.stores.len() {
            let Some(mut way) = self.beside[v].way.take() else { continue };
            let Some(step) = way.holder.next() else {
                self.says(|| {
                    format!("v{v}: {} ends, failed: {}", way.name, way.holder.has_failed())
                });
                let back = self.beside[v].attached.is_some();
                match (way.name, way.holder.has_failed()) {
                    ("through", false) => self.seen.went_through += 1,
                    ("back", false) if back => self.seen.came_back += 1,
                    (_, true) => self.seen.stayed += 1,
                    _ => {}
                }
                continue;
            };
            let before = way.holder.next();
            self.go_on(v, &mut way, step)?;
            if way.holder.next() != before {
                self.says(|| format!("v{v}: {step:?}"));
            }
            self.beside[v].way = Some(way);
        }
        Ok(())
    }

    fn go_on(&mut self, v: usize, way: &mut Way, step: Step) -> Checked {
        let now = self.now;
        let holder = &mut way.holder;
        let of = self.beside[v].attached;
        match step {
            Step::Hold => {
                self.beside[v].held = true;
                if self.ops.values().any(|op| op.is_of(v)) {
                    // They wait for it no longer, some time.
                    if self.failures > 0 && self.rng.below(300) == 0 {
                        holder.failed();
                    }
                    return Ok(());
                }
            }
            Step::Release => self.beside[v].held = false,
            Step::DestageMost | Step::Destage => {
                let Some(of) = of else { return Err(format!("v{v}: nothing is to be destaged")) };
                let shared = &self.life().shared;
                if way.drains.is_none() {
                    tell_log(shared, now, |log, asks| log.drain(of, true, asks));
                    let last = shared.log.borrow().status(now, of).map(|s| s.positions[3]);
                    let last = last.filter(|_| step == Step::DestageMost);
                    way.drains = Some(last.unwrap_or(u64::MAX));
                }
                let (clean, frontier) = {
                    let log = shared.log.borrow();
                    (log.is_clean(of), log.status(now, of).map_or(0, |s| s.positions[0]))
                };
                let done = clean || way.drains.is_some_and(|last| frontier >= last);
                let gives_up = !done && self.failures > 0 && self.rng.below(2_000) == 0;
                if !done && !gives_up {
                    return Ok(());
                }
                way.drains = None;
                let shared = &self.life().shared;
                tell_log(shared, now, |log, asks| log.drain(of, false, asks));
                if gives_up {
                    way.holder.failed();
                    return Ok(());
                }
            }
            Step::Answer => {
                let entry = holder.state();
                let frontier = holder.frontier();
                self.beside[v].attached = Some(entry.attachment);
                let Some(attach) = self.attach_of(v, frontier) else {
                    return Err(format!("v{v}: it has no number"));
                };
                let shared = &self.life().shared;
                tell_log(shared, now, |log, asks| {
                    log.attach(now, attach);
                    asks.steps.push(attach.attachment);
                });
                self.serves(v);
            }
            Step::Through => {
                let Some(of) = of else { return Err(format!("v{v}: it writes through")) };
                let shared = &self.life().shared;
                tell_log(shared, now, |log, _| log.detach(of));
                self.beside[v].attached = None;
                self.serves(v);
            }
            Step::Refuse | Step::Accept => {
                let refuses = step == Step::Refuse;
                self.beside[v].refused = refuses;
                if let Some(of) = of {
                    let shared = &self.life().shared;
                    tell_log(shared, now, |log, _| log.refuse(of, refuses));
                }
                if !refuses {
                    self.let_go[v] = self.tick;
                }
            }
            step => return self.say(v, &mut way.holder, step),
        }
        way.holder.done();
        Ok(())
    }

    /// A step that says something of the volume, or asks what is said: by a start too.
    fn say(&mut self, v: usize, holder: &mut Holder, step: Step) -> Checked {
        match step {
            Step::Read => {
                let read = holder.read(Read::There(self.beside[v].marker), None);
                return read
                    .map_err(|why| format!("v{v} is refused: {why:?}, {:?}", self.beside[v]));
            }
            // (Nobody but this cache changes a store here: what lines hold is right.)
            Step::DropLines => {}
            Step::FlushStore => {
                let mark = self.stores[v].mark();
                self.stores[v].flush(mark);
            }
            Step::Holds(holds) => {
                let mut entry = holder.entry(holds);
                if entry.attachment == 0 {
                    entry.attachment = self.next_attachment;
                    self.next_attachment += 1;
                }
                self.beside[v].record = entry;
                holder.recorded(entry);
                return Ok(());
            }
            Step::Mark(mark, generation) => {
                let fails = self.started && self.marks_fail && self.rng.chance(0.35);
                let number = holder.number() + 1;
                self.beside[v].numbers.0 = number;
                if !fails || self.rng.chance(0.5) {
                    let WrittenBack { run, volume, attachment, .. } = holder.state();
                    let of = Some((volume, attachment));
                    let marker = Marker { mark, generation, number, run, of, moved: false };
                    self.beside[v].marker = marker;
                }
                if fails {
                    self.seen.failed_marks += 1;
                    holder.failed();
                    return Ok(());
                }
                self.beside[v].numbers = (number, number);
            }
            step => return Err(format!("v{v}: {step:?} is no step of one that changes over")),
        }
        holder.done();
        Ok(())
    }

    /// Queues hear what the log calls a volume now.
    fn serves(&mut self, v: usize) {
        let attached = self.beside[v].attached;
        self.life().shared.volumes[v].attachment = attached;
    }

    /// What a start asks the log for: the number of each volume of which it may have something, and up to where the store has all of that.
    pub(super) fn numbers(&self) -> Vec<(u32, u64)> {
        let volumes = self.beside.iter().zip(&self.kinds).filter(|(_, kind)| kind.is_some());
        let dirty = volumes.filter(|(beside, _)| beside.record.holds.may_be_dirty());
        dirty.map(|(beside, _)| (beside.record.attachment, beside.record.began)).collect()
    }

    /// A start has a volume come, of which it has found this in the log: back, or written through. Returns up to where the store has all of it, if it
    /// writes back.
    pub(super) fn comes_at_start(
        &mut self,
        v: usize,
        logged: Logged,
    ) -> Result<Option<u64>, String> {
        if !self.changes {
            return Ok(self.kinds[v].map(|_| logged.frontier));
        }
        let fault = self.fault_in_log();
        self.beside[v].attached = None;
        if self.kinds[v].is_none() {
            return Ok(None);
        }
        // The start before this was killed in its midst.
        if self.rng.chance(0.2) {
            self.log.run += 1;
            let mut holder = Holder::comes(self.comer(v, Some(logged)), fault);
            for _ in 0..self.rng.range(1, 5) {
                match holder.next() {
                    Some(Step::Answer) | None => break,
                    Some(step) => self.say(v, &mut holder, step)?,
                }
            }
            self.log.run += 1;
        }
        if self.rng.chance(0.3) && self.comes_through(v, logged, fault)? {
            return Ok(None);
        }
        let mut holder = Holder::comes(self.comer(v, Some(logged)), fault);
        while let Some(step) = holder.next() {
            match step {
                Step::Answer => holder.done(),
                step => self.say(v, &mut holder, step)?,
            }
        }
        let entry = holder.state();
        self.beside[v].attached = Some(entry.attachment);
        self.serves(v);
        Ok(Some(holder.frontier()))
    }

    /// It is to be written through from now on, and is, unless the cache has what its store lacks.
    fn comes_through(&mut self, v: usize, logged: Logged, fault: Fault) -> Result<bool, String> {
        let comer = Comer { order: None, ..self.comer(v, Some(logged)) };
        let mut holder = Holder::comes(comer, fault);
        match holder.read(Read::There(self.beside[v].marker), None) {
            Ok(()) => {}
            Err(Refused::Kept(_)) => return Ok(false),
            Err(why) => return Err(format!("v{v} is refused: {why:?}")),
        }
        while let Some(step) = holder.next() {
            match step {
                Step::Through => holder.done(),
                step => self.say(v, &mut holder, step)?,
            }
        }
        self.serves(v);
        Ok(true)
    }

    /// Where no marker says that the cache may hold more than its store, that has everything: it may be served without the cache.
    pub(super) fn check_unmarked(&self, v: usize, image: &[u64], look: Look) -> Checked {
        if !self.changes || self.kinds[v].is_none() || self.beside[v].marker.mark != Mark::Clean {
            return Ok(());
        }
        for (sector, &found) in (0..).zip(image) {
            if !self.truth[v].may_hold(sector, found, look) {
                let of = self.truth[v].of(sector);
                return Err(format!(
                    "v{v}: its marker says clean, and its store has {found} in sector {sector}: {of}"
                ));
            }
        }
        Ok(())
    }

    /// Nobody is on his way any more.
    pub(super) fn end_ways(&mut self) -> Checked {
        for _ in 0..4 {
            self.quiet("changes over", |world| world.beside.iter().all(|b| b.way.is_none()))?;
            for v in 0..self.stores.len() {
                if self.beside[v].refused {
                    self.change_over(v);
                }
            }
        }
        match self.beside.iter().position(|beside| beside.held || beside.refused) {
            Some(v) => Err(format!("v{v}: its clients wait for ever: {:?}", self.beside[v])),
            None => Ok(()),
        }
    }
}
