//! Volumes come, go and are forgotten while the cache serves the others.

use larder_base::Nanos;
use larder_engine::block::address::Placing;
use larder_engine::block::node::attachment::{Attachment, Step, lines_of};
use larder_engine::block::node::operator::{Ask, Operation};
use larder_engine::block::volumes::{Found, Growth};
use larder_engine::block::{GROUP_LINES, OpId};
use larder_format::block::superblock::COPY_BYTES;
use larder_format::block::{VolumeState, superblock};

use super::node::operators;
use super::ranged::TURN;
use super::volumes::own;
use super::{KEY, PER_LINE, SECTOR, SHARDS, World};
use crate::device::Coming;
use crate::parts::Event;

/// So long bits of a volume that goes are waited for.
const PATIENCE: Nanos = Nanos::from_millis(40);

/// An attachment under way.
pub(super) struct Working {
    operation: Operation,
    volume: usize,
    /// Where the volume lies, if the cache knows it: first group and groups.
    stretch: Option<(u64, u64)>,
    /// It grows: so.
    growth: Option<Growth>,
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
        let stretch = known.map(|v| (v.first_group, v.groups));
        let mut growth = None;
        let attachment = match known {
            Some(known) if known.state == VolumeState::Attached && self.rng.chance(0.5) => {
                let Some(planned) = self.plan_growth(volume, &sb) else { return };
                growth = Some(planned);
                self.volumes[volume].closing = planned.moves_from.is_some();
                let bytes = self.volumes[volume].sectors * SECTOR as u64;
                // The bits are not waited for.
                Attachment::grow(known, planned, bytes, &self.layout)
                    .with_patience(Nanos::ZERO)
                    .with_fault(self.fault())
            }
            Some(known) if known.state == VolumeState::Attached => {
                let open = self.volumes.iter().filter(|v| v.is_open()).count();
                if open < 2 {
                    return;
                }
                self.volumes[volume].closing = true;
                Attachment::detach(known, &self.layout).with_patience(PATIENCE)
            }
            Some(_) if self.rng.chance(0.4) => {
                Attachment::forget(&sb, &name, self.fault()).expect("it was put aside")
            }
            _ => {
                let what = self.rng.below(8);
                self.happens_to(volume, what);
                let comer = self.volumes[volume].comer();
                match Attachment::attach(&sb, &comer, false, self.fault()) {
                    Ok(attachment) => attachment,
                    Err(why) => return self.fail(format!("{name} cannot come: {why:?}")),
                }
            }
        };
        self.script.push(format!(
            "{} {name} ({growth:?}): {:?} and so on",
            self.time,
            attachment.next()
        ));
        let op = operators(OpId(self.next_op));
        self.next_op += 1;
        let operation = Operation::attachment(op, SHARDS, attachment);
        let operation = operation.with_patience(None).in_turns_of(TURN);
        self.working = Some(Working { operation, volume, stretch, growth });
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
        let goes_on = match self.next_of(&mut working.operation) {
            Ask::Over => false,
            Ask::Do(step) => self.do_step(&mut working, step),
            _ => true,
        };
        if !goes_on {
            return self.end_attachment();
        }
        self.working = Some(working);
    }

    /// What the attachment asks for is done, if it can be. False if it is cut off.
    fn do_step(&mut self, working: &mut Working, step: Step) -> bool {
        match step {
            Step::Clients | Step::Hold if self.is_used(working.volume) => return true,
            Step::Store if self.rng.chance(0.1) => return false,
            // It is asked again.
            Step::Store if !self.flush_now() => return true,
            Step::Store => {
                self.volumes[working.volume].owed.clear();
            }
            Step::Bits { first, last } => {
                let (now, left) = (self.now(), self.hurry(first, last));
                working.operation.bits(now, left, true);
                let over = working.operation.way().and_then(Attachment::next) != Some(step);
                self.seen.left_undurable += u64::from(left > 0 && over);
                return true;
            }
            Step::Record => {
                working.operation.known_by(self.volumes[working.volume].identity());
                if !self.record(&working.operation) {
                    return false;
                }
            }
            Step::InForce => self.in_force(working),
            _ => {}
        }
        working.operation.done();
        true
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
    fn coming(&self, operation: &Operation) -> Option<Coming> {
        let (_, taken) = operation.way().and_then(Attachment::comes)?;
        let volume = taken.volume.clone();
        let (first, last) = lines_of((volume.first_group, volume.groups));
        let placing = Placing::of(&self.layout, KEY);
        (self.layout.is_sparse() && taken.found != Found::Warm).then_some(Coming {
            volume,
            lines: first..=last,
            placing,
        })
    }

    /// The superblock is changed. False if the process is gone.
    fn record(&mut self, operation: &Operation) -> bool {
        let mut applied = false;
        // (Who drains waits for all to end: nobody is killed.)
        if self.is_enabled() && !self.draining && self.rng.chance(0.25) {
            // Of a table, what is behind the first copy of the superblock is looked at more often.
            let from = if self.layout.is_sparse() { 2 } else { 0 };
            self.device.borrow_mut().fuse = from + self.rng.below(8 - from);
        }
        let change = operation.change();
        let anew = change.is_anew();
        let coming = self.coming(operation);
        self.device.borrow_mut().coming = coming;
        self.maintain(|m, now, shards, io, fx| {
            m.change_superblock(now, anew, shards, io, fx, |sb| applied = change.apply(sb))
        });
        let mut device = self.device.borrow_mut();
        (device.fuse, device.coming) = (u64::MAX, None);
        drop(device);
        if self.device.borrow().blown {
            return false;
        }
        self.former = self.maintenance.as_ref().and_then(|m| m.line_space().cloned());
        if anew {
            // The durable map is empty.
            self.durable.clear();
        }
        self.check_places();
        self.forget();
        if !applied {
            self.fail(format!("{operation:?}: it was overtaken"));
        }
        true
    }

    fn in_force(&mut self, working: &Working) {
        let Working { operation, volume, stretch, .. } = working;
        let volume = *volume;
        if let Some((decided, taken)) = operation.way().and_then(Attachment::comes) {
            let recorded = &taken.volume;
            self.check_recorded(&recorded.name, recorded.first_group, recorded.bytes);
            let (decided, place) = (decided.clone(), World::place_of(taken.volume.first_group));
            if let Some(former) = taken.former {
                self.not_aside(former);
            }
            self.put_contents(volume, place);
            self.volumes[volume].wanted = true;
            self.has_come(&decided);
            self.seen.attached += 1;
            return;
        }
        if let Some(growth) = working.growth {
            return self.has_grown(volume, growth);
        }
        if let Some(place) = self.volumes[volume].place {
            // It goes.
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
        } else {
            if let Some(stretch) = *stretch {
                self.not_aside(stretch);
            }
            self.seen.forgot += 1;
        }
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
