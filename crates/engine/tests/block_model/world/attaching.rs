//! Volumes come, go and are forgotten while the cache serves the others.

use larder_base::Nanos;
use larder_engine::block::node::attachment::{Attachment, Step};
use larder_engine::block::node::ranged::{Discard, Progress};
use larder_engine::block::{BlockShard, GROUP_LINES, LineId, OpId, PartKind};
use larder_format::block::superblock::COPY_BYTES;
use larder_format::block::{VolumeState, superblock};

use super::node::operators;
use super::{PER_LINE, SECTOR, SHARDS, World};
use crate::parts::Event;

/// So long bits of a volume that goes are waited for.
const PATIENCE: Nanos = Nanos::from_millis(40);

/// An attachment under way.
pub(super) struct Working {
    attachment: Attachment,
    volume: usize,
    /// Where the volume lies, if the cache knows it.
    place: Option<u64>,
    /// Who has locked lines for it, and whether they are given.
    lock: Option<(OpId, bool)>,
}

impl World {
    fn place_of(first_group: u64) -> u64 {
        first_group * u64::from(GROUP_LINES) * PER_LINE
    }

    /// An operator attaches, detaches or forgets a volume.
    pub(super) fn begin_attachment(&mut self) {
        let (Some(machine), None) = (&self.maintenance, &self.working) else { return };
        let Some(sb) = machine.superblock().cloned() else { return };
        let mut volume = self.rng.below(self.volumes.len() as u64) as usize;
        if self.rng.chance(0.6) {
            volume = self.volumes.iter().position(|v| v.place.is_none()).unwrap_or(volume);
        }
        let name = self.volumes[volume].name.clone();
        let known = sb.volumes.iter().find(|v| v.name == name);
        let place = known.map(|v| World::place_of(v.first_group));
        let attachment = match known {
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
        self.script.push(format!("{} {name}: {:?} and so on", self.time, attachment.next()));
        self.working = Some(Working { attachment, volume, place, lock: None });
    }

    /// It is cut off.
    pub(super) fn end_attachment(&mut self) {
        self.working = None;
        self.volumes.iter_mut().for_each(|v| v.closing = false);
    }

    /// Whether something is under way of a volume's.
    fn is_used(&self, volume: usize) -> bool {
        let Some(place) = self.volumes[volume].place else { return false };
        let own = place..place + self.per_region();
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
        let Some(step) = working.attachment.next() else { return self.end_attachment() };
        // (The log's thread does one thing at a time.)
        if self.maintenance.is_none() {
            self.working = Some(working);
            return;
        }
        match step {
            Step::Clients if self.is_used(working.volume) => {}
            Step::Clients | Step::Close | Step::Hold => working.attachment.done(0),
            Step::Store if self.rng.chance(0.1) => return self.end_attachment(),
            Step::Store => {
                self.store_is_durable();
                self.volumes[working.volume].owed.clear();
                working.attachment.done(0);
            }
            Step::Lines { first, last, drop } => match working.lock {
                None => {
                    let op = operators(OpId(self.next_op));
                    self.next_op += 1;
                    working.lock = Some((op, false));
                    self.working = Some(working);
                    let progress = Progress::new(first, last, SHARDS);
                    self.begin_op(op, PartKind::Prefetch, first.0 * PER_LINE, 0, Some(progress));
                    return self.lock_next(op);
                }
                Some((_, false)) => {}
                Some((op, true)) => {
                    let dropped = if drop { self.drop_lines(first, last) } else { 0 };
                    self.unlock(op);
                    working.lock = None;
                    working.attachment.done(dropped);
                    // What was dropped is in the table soon, or not before the superblock.
                    if self.rng.chance(0.7) {
                        self.working = Some(working);
                        return self.attach_on();
                    }
                }
            },
            Step::Bits { first, last } => {
                let (now, left) = (self.now(), self.hurry(first, last));
                working.attachment.bits(now, left, true);
                self.seen.left_undurable +=
                    u64::from(left > 0 && working.attachment.next() != Some(step));
            }
            Step::Record => {
                working.attachment.known_by(self.volumes[working.volume].identity());
                if !self.record(&working.attachment) {
                    return self.end_attachment();
                }
                working.attachment.done(0);
            }
            Step::InForce => {
                self.in_force(&working);
                working.attachment.done(0);
            }
        }
        self.working = Some(working);
    }

    /// The lines that an attachment needs are given, if `op` is its lock.
    pub(super) fn given_to_attachment(&mut self, op: OpId) -> bool {
        let lock = self.working.as_mut().and_then(|w| w.lock.as_mut());
        lock.filter(|lock| lock.0 == op).map(|lock| lock.1 = true).is_some()
    }

    fn drop_lines(&mut self, first: LineId, last: LineId) -> u64 {
        let dropped = |shards: &[BlockShard]| shards.iter().map(|s| s.stats().dropped).sum::<u64>();
        let before = dropped(&self.shards);
        for shard in &mut self.shards {
            let mut discard = Discard::lines(first, last, 7);
            while discard.turn(shard) {}
        }
        dropped(&self.shards) - before
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

    /// The superblock is changed. False if the process is gone.
    fn record(&mut self, attachment: &Attachment) -> bool {
        let mut applied = false;
        // (Who drains waits for all to end: nobody is killed.)
        if self.is_enabled() && !self.draining && self.rng.chance(0.25) {
            // Of a table, what is behind the first copy of the superblock is looked at more often.
            let from = if self.layout.is_sparse() { 2 } else { 0 };
            self.device.borrow_mut().fuse = from + self.rng.below(8 - from);
        }
        let anew = attachment.is_anew();
        self.maintain(|m, now, shards, io, fx| {
            m.change_superblock(now, anew, shards, io, fx, |sb| applied = attachment.apply(sb))
        });
        self.device.borrow_mut().fuse = u64::MAX;
        if self.device.borrow().blown {
            return false;
        }
        self.former = self.maintenance.as_ref().and_then(|m| m.line_space().cloned());
        self.forget();
        if !applied {
            self.fail(format!("{attachment:?}: it was overtaken"));
        }
        true
    }

    fn in_force(&mut self, working: &Working) {
        let Working { attachment, volume, place, .. } = working;
        let (volume, per) = (*volume, self.per_region());
        if let Some((decided, taken)) = attachment.comes() {
            self.check_recorded(&taken.volume.name, taken.volume.first_group);
            let (decided, place) = (decided.clone(), World::place_of(taken.volume.first_group));
            let former = taken.former.map(|(first, _)| World::place_of(first));
            self.aside.retain(|aside| Some(*aside) != former);
            self.put_contents(volume, place);
            self.volumes[volume].wanted = true;
            self.has_come(&decided);
            self.seen.attached += 1;
            return;
        }
        if let Some(place) = self.volumes[volume].place {
            // It goes.
            let own = |map: &mut std::collections::BTreeMap<u64, u64>| {
                let mut own = map.split_off(&place);
                map.append(&mut own.split_off(&(place + per)));
                own.into_iter().map(|(s, v)| (s - place, v)).collect()
            };
            let (content, owed) = (own(&mut self.backing), own(&mut self.volatile));
            self.truth.retain(|s, _| !(place..place + per).contains(s));
            let store = &mut self.volumes[volume];
            (store.content, store.owed) = (content, owed);
            (store.place, store.wanted) = (None, false);
            self.aside.push(place);
            self.seen.detached += 1;
        } else {
            self.aside.retain(|aside| Some(*aside) != *place);
            self.seen.forgot += 1;
        }
    }

    /// Who is answered can rely on it: the superblock that says so is durable.
    fn check_recorded(&mut self, name: &str, first_group: u64) {
        if !self.is_enabled() {
            return;
        }
        let copy =
            |n: usize| self.device.borrow().durable_bytes((n * COPY_BYTES) as u64, COPY_BYTES);
        let found = superblock::choose(&copy(0), &copy(1));
        let is_there = found.is_ok_and(|sb| {
            sb.volumes.iter().any(|v| {
                v.name == name && v.first_group == first_group && v.state == VolumeState::Attached
            })
        });
        if !is_there {
            self.fail(format!("{name} is attached, and the superblock does not have it"));
        }
    }
}
