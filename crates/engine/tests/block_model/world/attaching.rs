//! Volumes come, go and are forgotten while the cache serves the others.

use larder_base::Nanos;
use larder_engine::block::address::Placing;
use larder_engine::block::node::attachment::{Attachment, Step, lines_of};
use larder_engine::block::node::operator::attach::AttachIo;
use larder_engine::block::node::operator::detach::DetachIo;
use larder_engine::block::node::operator::forget::ForgetIo;
use larder_engine::block::node::operator::grow::GrowIo;
use larder_engine::block::node::operator::steps::{Change, OperatorIo, Recorded, StoreIo, Waits};
use larder_engine::block::node::operator::{Ask, NotDone, Operation};
use larder_engine::block::node::start::places::Decided;
use larder_engine::block::volumes::{Found, Growth, TakenUp};
use larder_engine::block::{GROUP_LINES, OpId};
use larder_format::block::superblock::COPY_BYTES;
use larder_format::block::{VolumeState, superblock};

use super::node::operators;
use super::ranged::TURN;
use super::volumes::{Store, own};
use super::{KEY, PER_LINE, SECTOR, SHARDS, World};
use crate::device::Coming;
use crate::parts::Event;

/// So long bits of a volume that goes are waited for.
const PATIENCE: Nanos = Nanos::from_millis(40);

/// An attachment under way.
pub(super) struct Working {
    operation: Operation,
    of: Of,
}

/// What it is about.
struct Of {
    volume: usize,
    kind: Kind,
}

enum Kind {
    Comes(Box<(Decided, TakenUp)>),
    Goes,
    Grows(Growth),
    /// It lies there: first group and groups.
    Forgotten((u64, u64)),
}

impl Working {
    /// Whether it has lines for itself, or waits for them.
    pub(super) fn has_lines(&self) -> bool {
        self.operation.has_lines()
    }
}

impl World {
    pub(super) fn place_of(first_group: u64) -> u64 {
        first_group * u64::from(GROUP_LINES) * PER_LINE
    }

    /// An operator attaches, detaches or forgets a volume.
    pub(super) fn begin_attachment(&mut self) {
        let (Some(machine), None) = (&self.maintenance, &self.working) else { return };
        if self.returning.is_under_way() {
            return;
        }
        let Some(sb) = machine.superblock().cloned() else { return };
        let mut volume = self.rng.below(self.volumes.len() as u64) as usize;
        if self.rng.chance(0.6) {
            volume = self.volumes.iter().position(|v| v.place.is_none()).unwrap_or(volume);
        }
        let name = self.volumes[volume].name.clone();
        let known = sb.volumes.iter().find(|v| v.name == name);
        let (attachment, kind) = match known {
            Some(known) if known.state == VolumeState::Attached && self.rng.chance(0.5) => {
                let Some(growth) = self.plan_growth(volume, &sb) else { return };
                let bytes = self.volumes[volume].sectors * SECTOR as u64;
                // The bits are not waited for.
                let attachment = Attachment::grow(known, growth, bytes, &self.layout)
                    .with_patience(Nanos::ZERO)
                    .with_fault(self.fault());
                (attachment, Kind::Grows(growth))
            }
            Some(known) if known.state == VolumeState::Attached => {
                let open = self.volumes.iter().filter(|v| v.is_open()).count();
                if open < 2 {
                    return;
                }
                self.volumes[volume].closing = true;
                let attachment = Attachment::detach(known, &self.layout).with_patience(PATIENCE);
                (attachment, Kind::Goes)
            }
            Some(known) if self.rng.chance(0.4) => {
                let stretch = (known.first_group, known.groups);
                let attachment = Attachment::forget(&sb, &name, self.fault());
                (attachment.expect("it was put aside"), Kind::Forgotten(stretch))
            }
            _ => {
                let what = self.rng.below(8);
                self.happens_to(volume, what);
                let comer = self.volumes[volume].comer();
                let planned = Attachment::attach(&sb, &comer, false, self.fault());
                let attachment = match planned {
                    Ok(attachment) => attachment,
                    Err(why) => return self.fail(format!("{name} cannot come: {why:?}")),
                };
                let (decided, taken) = attachment.comes().expect("it comes");
                let kind = Kind::Comes(Box::new((decided.clone(), taken.clone())));
                (attachment, kind)
            }
        };
        let first = attachment.next();
        self.script.push(format!("{} {name}: {first:?} and so on", self.time));
        let op = operators(OpId(self.next_op));
        self.next_op += 1;
        let operation = Operation::attachment(op, SHARDS, attachment);
        let operation = operation.with_patience(None).in_turns_of(TURN);
        self.working = Some(Working { operation, of: Of { volume, kind } });
    }

    /// It is cut off.
    pub(super) fn end_attachment(&mut self) {
        self.working = None;
        self.volumes.iter_mut().for_each(|v| v.closing = false);
    }

    /// Whether something is under way of a volume's.
    fn is_used(&self, volume: usize) -> bool {
        let Some(place) = self.volumes[volume].place else { return false };
        let own = place..place + self.span_of(volume);
        let base = place * SECTOR as u64;
        let of = |event: &Event| match event {
            Event::BackingRead(_, stretch, ..) | Event::BackingChange(_, stretch, ..) => {
                stretch.base == base
            }
            _ => false,
        };
        self.ops.values().any(|o| own.contains(&o.at)) || self.doing.iter().any(|d| of(&d.event))
    }

    /// The next step of the attachment that is under way, if it can be done.
    pub(super) fn attach_on(&mut self) {
        let Some(mut working) = self.working.take() else { return };
        // (The log's thread does one thing at a time.)
        if self.maintenance.is_none() {
            self.working = Some(working);
            return;
        }
        let mut ask = self.next_of(&mut working.operation);
        if let Ask::Do(step) = ask {
            ask = self.do_step(&mut working, step);
        }
        match ask {
            Ask::Over => return self.end_attachment(),
            Ask::GiveUp(_) => return self.give_up_attachment(working),
            _ => {}
        }
        self.working = Some(working);
    }

    /// What the attachment asks for is done, if it can be. Returns what is next.
    fn do_step(&mut self, Working { operation, of }: &mut Working, step: Step) -> Ask {
        let io = &mut At { world: self, of: &*of };
        let ask = match of.kind {
            Kind::Comes(_) => operation.attach_step(step, io),
            Kind::Goes => operation.detach_step(step, io),
            Kind::Grows(_) => operation.grow_step(step, io),
            Kind::Forgotten(_) => operation.forget_step(step, io),
        };
        let is_durable = operation.way().is_some_and(Attachment::is_durable);
        self.seen.left_undurable += u64::from(step == Step::Record && !is_durable);
        ask.unwrap_or(Ask::GiveUp(NotDone::Unwanted))
    }

    /// It is given up, or the process is gone.
    fn give_up_attachment(&mut self, mut working: Working) {
        if !self.device.borrow().blown {
            self.give_up_lines(&mut working.operation);
        }
        self.given.remove(&working.operation.id());
        let Working { operation, of } = &working;
        let io = &mut At { world: self, of };
        match of.kind {
            Kind::Goes => operation.detach_given_up(io),
            Kind::Grows(_) => operation.grow_given_up(io),
            Kind::Comes(_) | Kind::Forgotten(_) => {}
        }
        self.end_attachment();
    }

    /// Bits of any region are to go at once, whatever is under way there.
    pub(super) fn hurry_any(&mut self) {
        if self.maintenance.is_some() {
            let region = self.rng.below(u64::from(self.layout.regions)) as u32;
            self.hurry(region, region);
        }
    }

    /// Bits of regions are to go at once. Returns how many are left.
    fn hurry(&mut self, first: u32, last: u32) -> u64 {
        let work = std::mem::take(&mut self.work);
        let left = self.maintain(|m, now, shards, io, fx| {
            m.take(now, work, shards, io, fx);
            m.hurry(now, (first, last), shards, io, fx)
        });
        self.forget();
        left.unwrap_or(0)
    }

    /// What is checked while the superblock is written, if a volume comes without its lines to a cache with a table.
    fn coming(&self, change: &Change) -> Option<Coming> {
        let (_, taken) = change.way().and_then(Attachment::comes)?;
        let volume = taken.volume.clone();
        let (first, last) = lines_of((volume.first_group, volume.groups));
        let placing = Placing::of(&self.layout, KEY);
        (self.layout.is_sparse() && taken.found != Found::Warm).then_some(Coming {
            volume,
            lines: first..=last,
            placing,
        })
    }

    /// The superblock is changed, if the process is not gone meanwhile.
    fn record(&mut self, change: &Change) -> Result<Recorded, CutOff> {
        // (Who drains waits for all to end: nobody is killed.)
        if self.is_enabled() && !self.draining && self.rng.chance(0.25) {
            // Of a table, what is behind the first copy of the superblock is looked at more often.
            let from = if self.layout.is_sparse() { 2 } else { 0 };
            self.device.borrow_mut().fuse = from + self.rng.below(8 - from);
        }
        let coming = self.coming(change);
        self.device.borrow_mut().coming = coming;
        let recorded = self.maintain(|m, now, shards, io, fx| change.make(m, now, shards, io, fx));
        let mut device = self.device.borrow_mut();
        (device.fuse, device.coming) = (u64::MAX, None);
        let is_gone = device.blown;
        drop(device);
        let recorded = recorded.filter(|_| !is_gone).ok_or(CutOff)?;
        self.former = self.maintenance.as_ref().and_then(|m| m.line_space().cloned());
        if change.is_anew() {
            // The durable map is empty.
            self.durable.clear();
        }
        self.check_places();
        self.forget();
        if !recorded.applied {
            self.fail(format!("{change:?}: it was overtaken"));
        }
        Ok(recorded)
    }

    /// A volume comes.
    fn comes(&mut self, volume: usize, decided: &Decided, taken: &TakenUp) {
        let recorded = &taken.volume;
        self.check_recorded(&recorded.name, recorded.first_group, recorded.bytes);
        if let Some(former) = taken.former {
            self.not_aside(former);
        }
        self.put_contents(volume, World::place_of(recorded.first_group));
        self.volumes[volume].wanted = true;
        self.has_come(decided);
        self.seen.attached += 1;
    }

    /// A volume is served no more.
    fn goes(&mut self, volume: usize) {
        let Some(place) = self.volumes[volume].place else { return };
        let span = self.span_of(volume);
        let content = own(&mut self.backing, place, span);
        let owed = own(&mut self.volatile, place, span);
        self.truth.retain(|s, _| !(place..place + span).contains(s));
        let store = &mut self.volumes[volume];
        (store.content, store.owed) = (content, owed);
        (store.place, store.wanted) = (None, false);
        let regions = (place..place + span).step_by(self.per_region() as usize);
        self.aside.extend(regions);
        self.seen.detached += 1;
    }

    /// Who is answered can rely on it: the superblock that says so is durable.
    pub(super) fn check_recorded(&mut self, name: &str, first_group: u64, bytes: u64) {
        if !self.is_enabled() {
            return;
        }
        let copy =
            |n: usize| self.device.borrow().durable_bytes((n * COPY_BYTES) as u64, COPY_BYTES);
        let found = superblock::choose(&copy(0), &copy(1));
        let is_there = found.is_ok_and(|sb| {
            sb.volumes.iter().any(|v| {
                (&v.name[..], v.first_group, v.bytes) == (name, first_group, bytes)
                    && v.state == VolumeState::Attached
            })
        });
        if !is_there {
            self.fail(format!("{name} has {bytes} bytes, and the superblock does not have it so"));
        }
    }
}

/// The process is gone, or who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CutOff;

/// The world, as an operator's work on `of` has it.
pub(super) struct At<'a, O> {
    pub(super) world: &'a mut World,
    pub(super) of: O,
}

impl At<'_, &Of> {
    fn store(&mut self) -> &mut Store {
        &mut self.world.volumes[self.of.volume]
    }
}

impl<O> OperatorIo for At<'_, O> {
    type Error = CutOff;

    fn now(&self) -> Nanos {
        self.world.now()
    }

    /// An operator waits as long as the operation does, but for bits not always.
    fn goes_on(&mut self, waits: Waits) -> bool {
        match waits {
            Waits::Bits(_) => self.world.draining || !self.world.rng.chance(0.02),
            _ => true,
        }
    }

    fn is_enabled(&self) -> bool {
        self.world.is_enabled()
    }

    fn record(&mut self, change: Change) -> Result<Recorded, CutOff> {
        self.world.record(&change)
    }

    fn hurry(&mut self, (first, last): (u32, u32)) -> Result<u64, CutOff> {
        Ok(self.world.hurry(first, last))
    }
}

impl StoreIo for At<'_, &Of> {
    fn make_durable(&mut self) -> Result<(), CutOff> {
        let fails = self.world.rng.chance(0.1) || !self.world.flush_now();
        if fails {
            return Err(CutOff);
        }
        self.store().owed.clear();
        Ok(())
    }
}

impl AttachIo for At<'_, &Of> {
    fn holds(&mut self, change: Change) -> Result<bool, CutOff> {
        Ok(self.world.maintenance.as_ref().is_none_or(|m| change.holds(m.line_space())))
    }

    fn add(&mut self) {
        if let Kind::Comes(comes) = &self.of.kind {
            self.world.comes(self.of.volume, &comes.0, &comes.1);
        }
    }

    fn restore_selection(&mut self) {}
}

impl GrowIo for At<'_, &Of> {
    fn hold(&mut self) {
        self.store().closing = true;
    }

    fn is_used(&mut self) -> bool {
        self.world.is_used(self.of.volume)
    }

    fn release(&mut self) {
        self.store().closing = false;
    }

    fn identity(&mut self) -> Result<[u8; 64], CutOff> {
        Ok(self.store().identity())
    }

    fn moved(&mut self, first_group: u64) {
        self.world.moves_to(self.of.volume, first_group);
    }

    fn grown(&mut self, _: u64) {
        if let Kind::Grows(growth) = self.of.kind {
            self.world.has_grown(self.of.volume, growth);
        }
    }
}

impl ForgetIo for At<'_, &Of> {
    fn forget_selection(&mut self) -> Result<(), CutOff> {
        if let Kind::Forgotten(stretch) = self.of.kind {
            self.world.not_aside(stretch);
        }
        self.world.seen.forgot += 1;
        Ok(())
    }
}

impl DetachIo for At<'_, &Of> {
    fn clients(&mut self) -> u64 {
        self.world.is_used(self.of.volume).into()
    }

    fn close(&mut self) {}

    fn reopen(&mut self) {
        self.store().closing = false;
    }

    /// Whatever a store has lost is looked at from the moment on that it is lost.
    fn settle_losses(&mut self) {}

    fn identity(&mut self) -> [u8; 64] {
        self.store().identity()
    }

    fn remove(&mut self) {
        self.world.goes(self.of.volume);
    }

    fn deselect(&mut self) {}

    /// All volumes have one, which stays.
    fn forget_store(&mut self) {}

    fn end(&mut self) {}
}
