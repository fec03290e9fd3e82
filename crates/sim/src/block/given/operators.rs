//! What an operator asks for: volumes come, go, grow and are forgotten, lines are dropped, and what is selected changes. How each is done is the
//! engine's; it is done at one time, and what would have to wait for requests or fills under way is refused.

use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node::attachment::{Attachment, Step};
use larder_engine::block::node::calls::{Message, OP_BITS, Out};
use larder_engine::block::node::operator::select::{Choice, Kept};
use larder_engine::block::node::operator::{Ask, Operation};
use larder_engine::block::node::start::places::Comer;
use larder_engine::block::volumes::{Found, room_to_grow};
use larder_engine::block::{Fault, LineId, OpId};
use larder_format::block::layout::GROUP_LINES;
use larder_policy::block::Rule;

use super::bytes::Carried;
use super::node::OPERATOR;
use super::upkeep::AtWork;
use super::volume::Attached;
use super::{Given, GivenError};

/// Bits that have not gone after so many turns of the map's log do not go without time.
const MOST_HURRIES: u32 = 1000;

impl<B: Carried> Given<B> {
    /// Has `task` done where the map's log is, and everything else that is due.
    pub(super) fn in_log<R>(&mut self, mut task: impl FnMut(&mut AtWork<'_, B>) -> R) -> R {
        let mut result = None;
        self.all_turns(Some(&mut |at| result = Some(task(at))), false);
        result.expect("a task is done with the next turn of a run that goes on")
    }

    /// A new number for an operation, and how many shards there are.
    fn next_operation(&mut self) -> (OpId, u32) {
        self.operations += 1;
        let id = OpId((OPERATOR as u64) << OP_BITS | self.operations);
        (id, self.node.layout.shards)
    }

    /// Carries an operation through; `act` does what it asks for, and says whether it goes on. Returns whether it came to its end: not if something is under
    /// way that does not end now.
    fn carry(
        &mut self,
        operation: &mut Operation,
        mut act: impl FnMut(&mut Given<B>, &mut Operation, Step) -> Result<bool, GivenError>,
    ) -> Result<bool, GivenError> {
        let mut out = Out::default();
        loop {
            let now = self.now();
            let goes_on = match operation.next(&self.node, now, &mut out) {
                Ask::Over => return Ok(true),
                Ask::Again => Ok(true),
                Ask::Pause => {
                    self.all_turns(None, false);
                    Ok(true)
                }
                Ask::Lines => Ok(self.is_given(operation) || {
                    self.all_turns(None, false);
                    self.is_given(operation)
                }),
                Ask::Late => Ok(false),
                Ask::Do(step) => act(self, operation, step),
            };
            if !matches!(goes_on, Ok(true)) {
                operation.give_up(&self.node, now, &mut out);
                return goes_on;
            }
        }
    }

    /// Whether a shard has given its part of the lines of an operation.
    fn is_given(&self, operation: &mut Operation) -> bool {
        let mail = self.node.take_mail(OPERATOR);
        let is_its = |m: &Message<B>| matches!(m, Message::Done { .. });
        let given = mail.iter().any(|(op, m)| *op == operation.id() && is_its(m));
        if given {
            operation.given();
        }
        given
    }

    /// Bits of regions are to go, of which so many attempts were made.
    fn hurry(&mut self, operation: &mut Operation, regions: (u32, u32), hurries: &mut u32) {
        let left = self.in_log(|AtWork { now, machine, shards, io, fx }| {
            machine.hurry(*now, regions, shards, io, fx)
        });
        *hurries += 1;
        let waits = self.is_enabled() && (left == 0 || *hurries < MOST_HURRIES);
        operation.bits(self.now(), left, waits);
    }

    /// The step of an operation that changes the superblock. Returns whether the volume was as it was when this was planned.
    fn record(&mut self, operation: &mut Operation) -> bool {
        let change = operation.change();
        let applied = self.in_log(|AtWork { now, machine, shards, io, fx }| {
            let mut applied = false;
            let anew = change.is_anew();
            machine.change_superblock(*now, anew, shards, io, fx, |sb| applied = change.apply(sb));
            applied
        });
        operation.done();
        applied
    }

    fn lines_of(&self, base: u64, bytes: u64) -> (LineId, LineId) {
        let line = self.node.line_bytes();
        (LineId(base / line), LineId((base + bytes.max(1) - 1) / line))
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
        let superblock = self.in_log(|at| at.machine.line_space().cloned());
        let superblock = superblock.ok_or_else(|| fail("there is no cache"))?;
        let planned = Attachment::attach(&superblock, comer, !self.is_enabled(), Fault::default());
        let attachment = planned.map_err(|d| fail(&format!("it cannot come: {d:?}")))?;
        let comes = attachment.comes().map(|(_, taken)| taken.clone());
        let taken = comes.ok_or_else(|| fail("it does not come"))?;
        let attached = self.new_volume(&taken.volume, &superblock)?;
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let came = self.carry(&mut operation, |given, operation, step| {
            match step {
                Step::Record => {
                    if !given.record(operation) {
                        return Err(fail("it has changed meanwhile"));
                    }
                    return Ok(true);
                }
                Step::InForce => {
                    let name = comer.name.clone();
                    given.node.volumes.borrow_mut().insert(name, attached.clone());
                    given.node.placed();
                    given.restore_selection();
                }
                // What a store in memory has is durable.
                _ => {}
            }
            operation.done();
            Ok(true)
        })?;
        if !came {
            return Err(GivenError::busy(&comer.name));
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
            .in_log(|at| at.machine.line_space()?.volumes.iter().find(|v| v.name == name).cloned());
        let record = record.ok_or_else(|| GivenError::unknown(name))?;
        let attachment = Attachment::detach(&record, &self.node.layout);
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let mut hurries = 0;
        let went = self.carry(&mut operation, |given, operation, step| {
            match step {
                Step::Close => attached.closed.set(true),
                Step::Bits { first, last } => {
                    given.hurry(operation, (first, last), &mut hurries);
                    return Ok(true);
                }
                Step::Record => {
                    operation.known_by(identity);
                    given.in_log(|at| at.machine.forget_store(attached.id));
                    given.record(operation);
                    return Ok(true);
                }
                Step::InForce => {
                    given.node.volumes.borrow_mut().remove(name);
                    // Selections are removed by the volume's number and kept by its name: they apply again when it comes back.
                    given.node.selection.borrow_mut().remove_volume(attached.id);
                    given.node.placed();
                }
                _ => {}
            }
            operation.done();
            Ok(true)
        })?;
        if !went {
            attached.closed.set(false);
            return Err(GivenError::busy(name));
        }
        Ok(operation.way().is_some_and(Attachment::is_durable))
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
        let room = self.in_log(|at| Some(room_to_grow(at.machine.line_space()?, name, bytes)));
        if let Some(Err(why)) = room {
            return Err(GivenError::volume(name, format!("it cannot grow: {why:?}")));
        }
        let planned = self.in_log(|at| {
            let sb = at.machine.line_space()?;
            let record = sb.volumes.iter().find(|v| v.name == name)?.clone();
            Some((record, room_to_grow(sb, name, bytes).ok()?))
        });
        let (record, growth) = planned.ok_or_else(|| GivenError::unknown(name))?;
        let attachment = Attachment::grow(&record, growth, bytes, &self.node.layout);
        volume.store.borrow_mut().resize(bytes as usize, 0);
        let base = growth.first_group * GROUP_LINES * self.node.line_bytes();
        let outcome = self.carry_growth(&volume, attachment, (base, bytes), identity);
        volume.shut.set(false);
        outcome.map(|()| growth.moves_from.is_some())
    }

    fn carry_growth(
        &mut self,
        volume: &Rc<Attached>,
        attachment: Attachment,
        (base, bytes): (u64, u64),
        identity: [u8; 64],
    ) -> Result<(), GivenError> {
        let moves = attachment.moves();
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let mut hurries = 0;
        let grown = self.carry(&mut operation, |given, operation, step| {
            match step {
                Step::Hold => {
                    volume.shut.set(true);
                    if !volume.is_empty() {
                        given.all_turns(None, false);
                    }
                    if !volume.is_empty() {
                        return Ok(false);
                    }
                }
                Step::Store => operation.known_by(identity),
                Step::Bits { first, last } => {
                    given.hurry(operation, (first, last), &mut hurries);
                    return Ok(true);
                }
                Step::Record => {
                    if !given.record(operation) {
                        return Err(GivenError::volume(&volume.name, "it has changed meanwhile"));
                    }
                    return Ok(true);
                }
                Step::InForce => {
                    if moves {
                        volume.set_base(base);
                        volume.account.set(0);
                    }
                    volume.set_bytes(bytes);
                    given.node.placed();
                }
                _ => {}
            }
            operation.done();
            Ok(true)
        })?;
        if grown { Ok(()) } else { Err(GivenError::busy(&volume.name)) }
    }

    /// Forgets a volume that was put aside, with its lines. Returns how many those were.
    ///
    /// # Errors
    /// When there is no such volume, or something is under way that does not end now.
    pub fn forget(&mut self, now: Nanos, name: &str) -> Result<u64, GivenError> {
        self.set_now(now);
        let superblock = self.in_log(|at| at.machine.superblock().cloned());
        let planned = superblock.and_then(|sb| Attachment::forget(&sb, name, Fault::default()));
        let attachment = planned.ok_or_else(|| GivenError::unknown(name))?;
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let forgotten = self.carry(&mut operation, |given, operation, step| {
            match step {
                Step::Record => {
                    given.record(operation);
                    return Ok(true);
                }
                Step::InForce => drop(given.rules.saved.remove(name)),
                _ => {}
            }
            operation.done();
            Ok(true)
        })?;
        if forgotten { Ok(operation.dropped()) } else { Err(GivenError::busy(name)) }
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
        self.drop_ranges(&volume, &[range.unwrap_or((0, volume.bytes()))])
    }

    fn drop_ranges(&mut self, volume: &Attached, ranges: &[(u64, u64)]) -> Result<u64, GivenError> {
        let (id, shards) = self.next_operation();
        let lines =
            ranges.iter().map(|(start, bytes)| self.lines_of(volume.base() + start, *bytes));
        let mut operation = Operation::drop_lines(id, shards, lines);
        let done = self.carry(&mut operation, |_, _, _| Ok(true))?;
        if done { Ok(operation.dropped()) } else { Err(GivenError::busy(&volume.name)) }
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
        let choice = Choice { rule, ranges, label };
        let outcome = choice.put(&mut self.node.selection.borrow_mut(), volume.id);
        self.node.govern();
        outcome.map_err(|error| GivenError::volume(name, error.to_string()))?;
        let dropped = self.drop_ranges(&volume, &choice.drops(volume.bytes()))?;
        let kept = Kept::of(&self.node.selection.borrow(), volume.id);
        self.rules.saved.insert(name.to_owned(), kept);
        Ok(dropped)
    }

    /// What was selected earlier of a volume is in force again.
    pub(super) fn restore_selection(&mut self) {
        for volume in self.node.all() {
            let Some(kept) = self.rules.saved.get(&volume.name) else { continue };
            // It was there before, so it fits.
            let _ = kept.restore(&mut self.node.selection.borrow_mut(), volume.id);
        }
        self.node.govern();
    }
}
