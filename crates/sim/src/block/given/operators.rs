//! What an operator asks for: volumes come, go, grow and are forgotten, lines are dropped, and what is selected changes. How each is done is the
//! engine's; it is done at one time, and what would have to wait for requests or fills under way is refused.

use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node::attachment::{Attachment, Step};
use larder_engine::block::node::calls::{Message, OP_BITS, Out};
use larder_engine::block::node::operator::attach::AttachIo;
use larder_engine::block::node::operator::detach::DetachIo;
use larder_engine::block::node::operator::forget::ForgetIo;
use larder_engine::block::node::operator::grow::GrowIo;
use larder_engine::block::node::operator::select::{Choice, Kept};
use larder_engine::block::node::operator::steps::{Change, OperatorIo, Recorded, StoreIo, Waits};
use larder_engine::block::node::operator::{Ask, NotDone, Operation};
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

    /// Carries an operation through; `step` does what it asks for. Returns whether it came to its end: not if something is under way that does not end
    /// now.
    fn carry(
        &mut self,
        operation: &mut Operation,
        mut step: impl FnMut(&mut Given<B>, &mut Operation, Step) -> Result<Ask, GivenError>,
    ) -> Result<Result<(), NotDone>, GivenError> {
        let mut out = Out::default();
        loop {
            let now = self.now();
            let ask = match operation.next(&self.node, now, &mut out) {
                Ask::Do(what) => step(self, operation, what),
                ask => Ok(ask),
            };
            let why = match ask {
                Ok(Ask::Over) => return Ok(Ok(())),
                Ok(Ask::Again | Ask::Do(_)) => continue,
                Ok(Ask::Pause(_)) => {
                    self.all_turns(None, false);
                    continue;
                }
                Ok(Ask::Lines) => {
                    if self.is_given(operation) {
                        continue;
                    }
                    self.all_turns(None, false);
                    if self.is_given(operation) {
                        continue;
                    }
                    Ok(Err(NotDone::Late))
                }
                Ok(Ask::GiveUp(why)) => Ok(Err(why)),
                Err(error) => Err(error),
            };
            operation.give_up(&self.node, now, &mut out);
            return why;
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
        let of = (attached, comer.identity);
        let came = self.carry(&mut operation, |given, operation, step| {
            operation.attach_step(step, &mut At { given, of: &of })
        })?;
        came.map_err(|why| GivenError::not_done(&comer.name, why))?;
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
        let of = (attached, identity);
        let went = self.carry(&mut operation, |given, operation, step| {
            operation.detach_step(step, &mut At { given, of: &of })
        });
        if !matches!(went, Ok(Ok(()))) {
            operation.detach_given_up(&mut At { given: self, of: &of });
        }
        went?.map_err(|why| GivenError::not_done(name, why))?;
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
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let of = (volume, identity);
        let grown = self.carry(&mut operation, |given, operation, step| {
            operation.grow_step(step, &mut At { given, of: &of })
        });
        if !matches!(grown, Ok(Ok(()))) {
            operation.grow_given_up(&mut At { given: self, of: &of });
        }
        grown?.map_err(|why| GivenError::not_done(name, why))?;
        Ok(growth.moves_from.is_some())
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
            operation.forget_step(step, &mut At { given, of: name })
        })?;
        forgotten.map_err(|why| GivenError::not_done(name, why))?;
        Ok(operation.dropped())
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
        let done = self.carry(&mut operation, |_, _, _| Ok(Ask::Again))?;
        done.map_err(|why| GivenError::not_done(&volume.name, why))?;
        Ok(operation.dropped())
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
    pub(super) fn restore_selection(&mut self, volume: &Attached) {
        if let Some(kept) = self.rules.saved.get(&volume.name) {
            // It was there before, so it fits.
            let _ = kept.restore(&mut self.node.selection.borrow_mut(), volume.id);
        }
        self.node.govern();
    }
}

/// An operation on `of`: a volume, with what its store is known by, or the name of one.
struct At<'a, B: Carried, V: ?Sized> {
    given: &'a mut Given<B>,
    of: &'a V,
}

type Known = (Rc<Attached>, [u8; 64]);

impl<B: Carried, V: ?Sized> OperatorIo for At<'_, B, V> {
    type Error = GivenError;

    fn now(&self) -> Nanos {
        self.given.now()
    }

    fn goes_on(&mut self, _: Waits) -> bool {
        true
    }

    fn is_enabled(&self) -> bool {
        self.given.is_enabled()
    }

    fn record(&mut self, change: Change) -> Result<Recorded, GivenError> {
        Ok(self.given.in_log(|AtWork { now, machine, shards, io, fx }| {
            change.make(machine, *now, shards, io, fx)
        }))
    }

    fn hurry(&mut self, regions: (u32, u32)) -> Result<u64, GivenError> {
        Ok(self.given.in_log(|AtWork { now, machine, shards, io, fx }| {
            machine.hurry(*now, regions, shards, io, fx)
        }))
    }
}

impl<B: Carried> StoreIo for At<'_, B, Known> {
    /// What a store in memory has is durable.
    fn make_durable(&mut self) -> Result<(), GivenError> {
        Ok(())
    }
}

impl<B: Carried> AttachIo for At<'_, B, Known> {
    fn holds(&mut self, change: Change) -> Result<bool, GivenError> {
        Ok(self.given.in_log(|at| change.holds(at.machine.line_space())))
    }

    fn add(&mut self) {
        let (attached, _) = self.of;
        self.given.node.volumes.borrow_mut().insert(attached.name.clone(), attached.clone());
        self.given.node.placed();
    }

    fn restore_selection(&mut self) {
        self.given.restore_selection(&self.of.0);
    }
}

impl<B: Carried> GrowIo for At<'_, B, Known> {
    fn hold(&mut self) {
        self.of.0.shut.set(true);
    }

    fn is_used(&mut self) -> bool {
        !self.of.0.is_empty()
    }

    fn release(&mut self) {
        self.of.0.shut.set(false);
    }

    fn identity(&mut self) -> Result<[u8; 64], GivenError> {
        Ok(self.of.1)
    }

    fn moved(&mut self, first_group: u64) {
        let (attached, _) = self.of;
        attached.set_base(first_group * GROUP_LINES * self.given.node.line_bytes());
        attached.account.set(0);
        self.given.node.placed();
    }

    fn grown(&mut self, bytes: u64) {
        self.of.0.set_bytes(bytes);
        self.given.node.govern();
    }
}

impl<B: Carried> ForgetIo for At<'_, B, str> {
    fn forget_selection(&mut self) -> Result<(), GivenError> {
        self.given.rules.saved.remove(self.of);
        Ok(())
    }
}

impl<B: Carried> DetachIo for At<'_, B, Known> {
    /// Requests count as what is under way in lines.
    fn clients(&mut self) -> u64 {
        0
    }

    fn close(&mut self) {
        self.of.0.closed.set(true);
    }

    fn reopen(&mut self) {
        self.of.0.closed.set(false);
    }

    /// A store in memory loses nothing.
    fn settle_losses(&mut self) {}

    fn identity(&mut self) -> [u8; 64] {
        self.of.1
    }

    fn remove(&mut self) {
        self.given.node.volumes.borrow_mut().remove(&self.of.0.name);
        self.given.node.placed();
    }

    fn deselect(&mut self) {
        self.given.node.selection.borrow_mut().remove_volume(self.of.0.id);
        self.given.node.govern();
    }

    fn forget_store(&mut self) {
        self.given.in_log(|at| at.machine.forget_store(self.of.0.id));
    }

    fn end(&mut self) {}
}
