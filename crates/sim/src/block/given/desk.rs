//! What an operator asks for: volumes come, go, grow and are forgotten, lines are dropped, and what is selected changes. Each is done in the
//! order of the daemon's desk, at one time; what would have to wait for requests or fills under way is refused.

use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node::attachment::{Attachment, Step};
use larder_engine::block::node::calls::{Calls, Message, OP_BITS, Out, call};
use larder_engine::block::node::maintenance::SWEEP_STEP;
use larder_engine::block::node::ranged::{Discard, Progress, STEP};
use larder_engine::block::node::start::places::Comer;
use larder_engine::block::volumes::{Found, Growth, room_to_grow};
use larder_engine::block::{Fault, LineId, OpId};
use larder_format::block::layout::GROUP_LINES;
use larder_policy::block::{Rule, Selected, Selection, VolumeId};

use super::bytes::Carried;
use super::node::DESK;
use super::upkeep::AtWork;
use super::volume::Attached;
use super::{Given, GivenError};

/// Bits that have not gone after so many turns of the map's log do not go without time.
const MOST_HURRIES: u32 = 1000;

/// What is selected of a volume, by its name.
#[derive(Clone, Debug, Default)]
pub(super) struct Saved {
    pub whole: Rule,
    /// First byte, byte after the last, rule, label.
    pub ranges: Vec<(u64, u64, Rule, String)>,
}

impl Saved {
    /// Selects it of a volume of which nothing is selected.
    fn put(&self, selection: &mut Selection, id: VolumeId) {
        selection.set_volume(id, self.whole);
        for (start, end, rule, label) in &self.ranges {
            // They were there before, so they fit.
            let _ = selection.set(id, *start, *end, *rule, label);
        }
    }
}

impl<B: Carried> Given<B> {
    /// Has `errand` done where the map's log is, and everything else that is due.
    pub(super) fn errand<R>(&mut self, mut errand: impl FnMut(&mut AtWork<'_, B>) -> R) -> R {
        let mut result = None;
        self.all_turns(Some(&mut |at| result = Some(errand(at))), false);
        result.expect("an errand is done with the next turn of a run that goes on")
    }

    /// Does `act` while nothing is under way in lines `first..=last`. `None` if something is that does not end now.
    fn with_range<R>(
        &mut self,
        (first, last): (LineId, LineId),
        act: impl FnOnce(&mut Given<B>, &mut Out<B>) -> R,
    ) -> Option<R> {
        self.ranges += 1;
        let id = OpId((DESK as u64) << OP_BITS | self.ranges);
        let mut out = Out::default();
        let mut range = Progress::new(first, last, self.node.layout.shards);
        let (mut given, mut next) = (true, range.next());
        while let Some(shard) = next.filter(|_| given) {
            let now = self.now();
            call(&self.node, shard, Some(DESK), &mut out, |s, fx| {
                s.lock_range(now, id, first, last, fx);
            });
            given = self.is_given(id) || {
                self.all_turns(None, false);
                self.is_given(id)
            };
            next = range.given();
        }
        let result = given.then(|| act(self, &mut out));
        for shard in 0..self.node.layout.shards {
            let now = self.now();
            call(&self.node, shard, Some(DESK), &mut out, |s, fx| s.unlock_range(now, id, fx));
        }
        result
    }

    /// Whether a shard has given the range `id`.
    fn is_given(&self, id: OpId) -> bool {
        let mail = self.node.mailbox(DESK, std::mem::take);
        mail.iter().any(|(op, m)| *op == id && matches!(m, Message::Done { .. }))
    }

    /// Takes lines that are locked out of the map. Returns how many there were.
    fn drop_locked(&mut self, (first, last): (LineId, LineId), out: &mut Out<B>) -> u64 {
        let mut dropped = 0;
        for shard in 0..self.node.layout.shards {
            let (mut discard, mut more) = (Discard::lines(first, last, STEP), true);
            while more {
                call(&self.node, shard, Some(DESK), out, |s, _| {
                    let before = s.stats().dropped;
                    more = discard.turn(s);
                    dropped += s.stats().dropped - before;
                });
            }
        }
        dropped
    }

    fn take_lines(&mut self, range: (LineId, LineId), drop: bool) -> Option<u64> {
        self.with_range(range, |given, out| match drop {
            true => given.drop_locked(range, out),
            false => 0,
        })
    }

    fn lines_of(&self, base: u64, bytes: u64) -> (LineId, LineId) {
        let line = self.node.line_bytes();
        (LineId(base / line), LineId((base + bytes.max(1) - 1) / line))
    }

    /// The step of an attachment that changes the superblock. Returns whether the volume was as it was when this was planned.
    fn record(&mut self, attachment: &mut Attachment) -> bool {
        let anew = attachment.is_anew();
        let applied = self.errand(|AtWork { now, machine, shards, io, fx }| {
            let mut applied = false;
            let change = |sb: &mut _| applied = attachment.apply(sb);
            machine.change_superblock(*now, anew, shards, io, fx, change);
            applied
        });
        attachment.done(0);
        applied
    }

    /// Has bits of regions cleared. Returns how many are left.
    fn hurry(&mut self, regions: (u32, u32)) -> u64 {
        self.errand(|AtWork { now, machine, shards, io, fx }| {
            machine.hurry(*now, regions, shards, io, fx)
        })
    }

    /// Takes up a volume. A store that was here before keeps its bytes, and grows to the size that is stated; another has zeros. Returns whether
    /// what was cached of it is used.
    ///
    /// # Errors
    /// When there is one of that name, or it cannot come; when something is under way that does not end now.
    pub fn attach(&mut self, now: Nanos, comer: &Comer) -> Result<bool, GivenError> {
        self.set_now(now);
        let fail = |why: &str| GivenError::volume(&comer.name, why);
        if self.node.volumes.borrow().contains_key(&comer.name) {
            return Err(fail("it is attached already: detach it, or choose another name"));
        }
        let superblock = self.errand(|at| at.machine.line_space().cloned());
        let superblock = superblock.ok_or_else(|| fail("there is no cache"))?;
        let planned = Attachment::attach(&superblock, comer, !self.is_enabled(), Fault::default());
        let mut attachment = planned.map_err(|d| fail(&format!("it cannot come: {d:?}")))?;
        let comes = attachment.comes().map(|(_, taken)| taken.clone());
        let taken = comes.ok_or_else(|| fail("it does not come"))?;
        let attached = self.new_volume(&taken.volume, &superblock)?;
        while let Some(step) = attachment.next() {
            match step {
                Step::Lines { first, last, drop } => {
                    let dropped = self.take_lines((first, last), drop);
                    attachment.done(dropped.ok_or_else(|| GivenError::busy(&comer.name))?);
                }
                Step::Record => {
                    if !self.record(&mut attachment) {
                        return Err(fail("it has changed meanwhile"));
                    }
                }
                Step::InForce => {
                    let name = comer.name.clone();
                    self.node.volumes.borrow_mut().insert(name, attached.clone());
                    self.node.placed();
                    self.restore_selection();
                    attachment.done(0);
                }
                // What a store in memory has is durable.
                _ => attachment.done(0),
            }
        }
        Ok(taken.found == Found::Warm)
    }

    /// Puts a volume aside; `identity` is what its store is known by from now on. Returns whether all of it was made durable.
    ///
    /// # Errors
    /// When there is no such volume, or something is under way that does not end now.
    pub fn detach(
        &mut self,
        now: Nanos,
        name: &str,
        identity: [u8; 64],
    ) -> Result<bool, GivenError> {
        self.set_now(now);
        let attached = self.attached(name)?;
        let record = self
            .errand(|at| at.machine.line_space()?.volumes.iter().find(|v| v.name == name).cloned());
        let record = record.ok_or_else(|| GivenError::unknown(name))?;
        let mut attachment = Attachment::detach(&record, &self.node.layout);
        let mut hurries = 0;
        while let Some(step) = attachment.next() {
            match step {
                Step::Close => {
                    attached.closed.set(true);
                    attachment.done(0);
                }
                Step::Lines { first, last, drop } => {
                    if self.take_lines((first, last), drop).is_none() {
                        attached.closed.set(false);
                        return Err(GivenError::busy(name));
                    }
                    attachment.done(0);
                }
                Step::Bits { first, last } => {
                    let left = self.hurry((first, last));
                    hurries += 1;
                    let waits = self.is_enabled() && (left == 0 || hurries < MOST_HURRIES);
                    if !attachment.bits(self.now(), left, waits) {
                        self.sweep();
                        self.all_turns(None, false);
                    }
                }
                Step::Record => {
                    attachment.known_by(identity);
                    self.errand(|at| at.machine.forget_store(attached.id));
                    self.record(&mut attachment);
                }
                Step::InForce => {
                    self.node.volumes.borrow_mut().remove(name);
                    // By this number nothing is selected any more; by its name it is, for when it comes back.
                    self.node.selection.borrow_mut().remove_volume(attached.id);
                    self.node.placed();
                    attachment.done(0);
                }
                _ => attachment.done(0),
            }
        }
        Ok(attachment.is_durable())
    }

    fn sweep(&mut self) {
        for cell in &self.node.cells {
            while cell.borrow_mut().0.sweep(SWEEP_STEP) {}
        }
    }

    /// A volume, whose store has grown, has so many bytes; `identity` is what the store is known by. Returns whether it moved.
    ///
    /// # Errors
    /// When it cannot grow, or something is under way that does not end now.
    pub fn grow(
        &mut self,
        now: Nanos,
        name: &str,
        bytes: u64,
        identity: [u8; 64],
    ) -> Result<bool, GivenError> {
        self.set_now(now);
        let volume = self.attached(name)?;
        let room = self.errand(|at| Some(room_to_grow(at.machine.line_space()?, name, bytes)));
        if let Some(Err(why)) = room {
            return Err(GivenError::volume(name, format!("it cannot grow: {why:?}")));
        }
        let planned = self.errand(|at| {
            let sb = at.machine.line_space()?;
            let record = sb.volumes.iter().find(|v| v.name == name)?.clone();
            Some((record, room_to_grow(sb, name, bytes).ok()?))
        });
        let (record, growth) = planned.ok_or_else(|| GivenError::unknown(name))?;
        let mut attachment = Attachment::grow(&record, growth, bytes, &self.node.layout);
        volume.store.borrow_mut().resize(bytes as usize, 0);
        let outcome = self.carry_growth(&volume, &mut attachment, (growth, bytes), identity);
        volume.shut.set(false);
        outcome.map(|()| growth.moves_from.is_some())
    }

    fn carry_growth(
        &mut self,
        volume: &Rc<Attached>,
        attachment: &mut Attachment,
        (growth, bytes): (Growth, u64),
        identity: [u8; 64],
    ) -> Result<(), GivenError> {
        let moves = growth.moves_from.is_some();
        while let Some(step) = attachment.next() {
            match step {
                Step::Hold => {
                    volume.shut.set(true);
                    if !volume.is_empty() {
                        self.all_turns(None, false);
                    }
                    if !volume.is_empty() {
                        return Err(GivenError::busy(&volume.name));
                    }
                    attachment.done(0);
                }
                Step::Store => {
                    attachment.known_by(identity);
                    attachment.done(0);
                }
                Step::Lines { first, last, drop } => {
                    let dropped = self.take_lines((first, last), drop);
                    let dropped = dropped.ok_or_else(|| GivenError::busy(&volume.name))?;
                    if moves {
                        volume.account.dropped(dropped);
                    }
                    attachment.done(dropped);
                }
                Step::Bits { first, last } => {
                    let mut left = self.hurry((first, last));
                    for _ in 1..MOST_HURRIES {
                        if left == 0 {
                            break;
                        }
                        self.all_turns(None, false);
                        left = self.hurry((first, last));
                    }
                    attachment.bits(self.now(), left, true);
                }
                Step::Record => {
                    if !self.record(attachment) {
                        return Err(GivenError::volume(&volume.name, "it has changed meanwhile"));
                    }
                }
                Step::InForce => {
                    if moves {
                        volume.set_base(growth.first_group * GROUP_LINES * self.node.line_bytes());
                        volume.account.set(0);
                    }
                    volume.set_bytes(bytes);
                    self.node.placed();
                    attachment.done(0);
                }
                Step::Clients | Step::Close => attachment.done(0),
            }
        }
        Ok(())
    }

    /// Forgets a volume that was put aside, with its lines. Returns how many those were.
    ///
    /// # Errors
    /// When there is no such volume, or something is under way that does not end now.
    pub fn forget(&mut self, now: Nanos, name: &str) -> Result<u64, GivenError> {
        self.set_now(now);
        let superblock = self.errand(|at| at.machine.superblock().cloned());
        let planned = superblock.and_then(|sb| Attachment::forget(&sb, name, Fault::default()));
        let mut attachment = planned.ok_or_else(|| GivenError::unknown(name))?;
        while let Some(step) = attachment.next() {
            match step {
                Step::Lines { first, last, drop } => {
                    let dropped = self.take_lines((first, last), drop);
                    attachment.done(dropped.ok_or_else(|| GivenError::busy(name))?);
                }
                Step::Record => {
                    self.record(&mut attachment);
                }
                Step::InForce => {
                    self.rules.saved.remove(name);
                    attachment.done(0);
                }
                _ => attachment.done(0),
            }
        }
        Ok(attachment.dropped())
    }

    /// Drops the lines that hold bytes of a volume, all of it if no range is given: first byte and bytes. Returns how many there were.
    ///
    /// # Errors
    /// When there is no such volume, or something is under way that does not end now.
    pub fn drop_lines(
        &mut self,
        now: Nanos,
        name: &str,
        range: Option<(u64, u64)>,
    ) -> Result<u64, GivenError> {
        self.set_now(now);
        let volume = self.attached(name)?;
        let (start, bytes) = range.unwrap_or((0, volume.bytes()));
        let lines = self.lines_of(volume.base() + start, bytes);
        let dropped = self.take_lines(lines, true).ok_or_else(|| GivenError::busy(name))?;
        volume.account.dropped(dropped);
        Ok(dropped)
    }

    /// Selects ranges of a volume (first byte and bytes), or all of it: `rule` nothing forgets what was selected there. What is never to be
    /// cached is dropped. It is kept over restarts. Returns how many lines were dropped.
    ///
    /// # Errors
    /// When there is no such volume, there are too many ranges, or something is under way that does not end now.
    pub fn select(
        &mut self,
        now: Nanos,
        name: &str,
        rule: Option<Rule>,
        ranges: Option<&[(u64, u64)]>,
        label: &str,
    ) -> Result<u64, GivenError> {
        self.set_now(now);
        let volume = self.attached(name)?;
        let id = volume.id;
        let before = self.saved(id);
        let mut selection = self.node.selection.borrow_mut();
        let outcome = match ranges {
            None => {
                selection.remove_volume(id);
                selection.set_volume(id, rule.unwrap_or_default());
                Ok(())
            }
            Some(ranges) => {
                if rule.is_some() && !label.is_empty() {
                    selection.clear_label(id, label);
                }
                ranges.iter().try_for_each(|&(start, bytes)| match rule {
                    Some(rule) => selection.set(id, start, start + bytes, rule, label),
                    None => selection.clear(id, start, start + bytes),
                })
            }
        };
        if let Err(error) = outcome {
            selection.remove_volume(id);
            before.put(&mut selection, id);
            drop(selection);
            self.node.govern();
            return Err(GivenError::volume(name, error.to_string()));
        }
        drop(selection);
        self.node.govern();
        let mut dropped = 0;
        if rule == Some(Rule::Never) {
            let all = [(0, volume.bytes())];
            for &range in ranges.unwrap_or(&all) {
                dropped += self.drop_lines(now, name, Some(range))?;
            }
        }
        let saved = self.saved(id);
        self.rules.saved.insert(name.to_owned(), saved);
        Ok(dropped)
    }

    /// What is selected of a volume.
    fn saved(&self, id: VolumeId) -> Saved {
        let selection = self.node.selection.borrow();
        let range = |r: Selected| (r.start, r.end, r.rule, r.label);
        Saved { whole: selection.whole(id), ranges: selection.selected(id).map(range).collect() }
    }

    /// What was selected earlier of a volume is in force again.
    pub(super) fn restore_selection(&mut self) {
        for volume in self.node.all() {
            let Some(saved) = self.rules.saved.get(&volume.name) else { continue };
            let mut selection = self.node.selection.borrow_mut();
            let id = volume.id;
            if selection.whole(id) != Rule::ByPolicy || selection.selected(id).next().is_some() {
                continue;
            }
            saved.put(&mut selection, id);
        }
        self.node.govern();
    }
}
