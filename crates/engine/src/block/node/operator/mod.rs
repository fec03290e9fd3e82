//! What an operator asks for while the cache serves, step by step: volumes come, go, grow and are forgotten, lines are dropped, a store that
//! forgot or was changed by others is distrusted, something is done while nothing is under way in some lines.
//!
//! An [`Operation`] is a machine that a host drives. [`Operation::next`] calls the shards as far as that goes (a shard's part of a range is
//! locked, a turn of lines is dropped, trimmed ranges are swept) and says what is to be done: wait, or a step, such as looking after clients,
//! making a store durable, or changing the superblock. What the steps of a volume do is here too, over what the host supplies ([`steps`]). The machine
//! does no I/O and waits for nothing; how a host waits, in which words it speaks, and who may interrupt is the host's.
//!
//! Operations of several volumes go on beside each other: none holds anything that another waits for but its lines, which are one volume's. What two of
//! them decide about the line space meets in the superblock, where each is [applied](Change::apply) as it was planned or not at all.
//!
//! | module | is |
//! | --- | --- |
//! | [`attach`], [`detach`], [`forget`], [`grow`] | what each step does of a volume that comes, goes, is forgotten, grows |
//! | [`distrust`] | what follows when a store may have lost writes, or was changed by others |
//! | [`range`] | lines that an operator has for itself, in all shards |
//! | [`select`] | what a change of what is selected does, what it drops, and what is kept of it |
//! | [`steps`] | what steps have in common, and what every host supplies |

pub mod attach;
pub mod detach;
pub mod distrust;
pub mod forget;
pub mod grow;
pub mod range;
pub mod select;
pub mod steps;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use larder_base::Nanos;
use larder_format::block::Layout;

use super::attachment::{Attachment, Step};
use super::calls::{Calls, Out, Shard};
use super::event::Host;
use super::flushes::{AHEAD, LOCKED};
use super::maintenance::SWEEP_STEP;
use super::owners::Accounts;
use super::ranged::STEP;
use crate::block::api::{GroupId, LineId, OpId};
use crate::block::planted::{Fault, Planted};
use range::Range;
use steps::Change;

/// What is under way may keep the lines of a store that is distrusted from being dropped for so long, before it is tried again.
pub const DISTRUST: Nanos = Nanos::from_secs(2);
/// Steps of sweeping between two looks at bits that are to go.
const SWEEPS: u32 = 4096;

/// What a host does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// At once the next: a little was done.
    Again,
    /// A shard has yet to give its part of the lines: when there is mail for the operation, [`Operation::given`].
    Lines,
    /// So much time passes. Where it stands, whatever there is to do is done.
    Pause(Nanos),
    /// This: what does a step of the operation's kind is told. Of one that has no kind, [`Operation::done`] follows, or what the step says instead.
    Do(Step),
    /// It is to be given up ([`Operation::give_up`]).
    GiveUp(NotDone),
    /// Nothing: it is over.
    Over,
}

/// Why an operation is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotDone {
    /// What is waited for takes longer than the operation may.
    Late,
    /// Who asked waits no longer.
    Unwanted,
    /// The volume is not as it was when this was planned.
    Overtaken,
    /// The cache was given up on the way.
    GivenUp,
}

#[derive(Debug)]
enum Plan {
    Attachment(Box<Attachment>),
    Steps { steps: VecDeque<Step>, dropped: u64 },
}

/// See the [module](self).
#[derive(Debug)]
pub struct Operation {
    id: OpId,
    shards: u32,
    plan: Plan,
    /// The lines of the present step, and whether the host has done what it does with them.
    range: Option<Range>,
    acted: bool,
    /// What is done while the lines of the present step are its own.
    within: VecDeque<Step>,
    /// Lines of the range that are to be dropped.
    drops: VecDeque<(LineId, LineId)>,
    dropped: u64,
    /// Slots or groups looked at in one turn.
    turn: u32,
    /// Lines are waited for so long; counted from the first call.
    timeout: Option<Nanos>,
    since: Option<Nanos>,
    /// Bits were asked to go, and not all have gone.
    swept: bool,
    /// When something was looked at last that does not come about, and how often at that time.
    looked: Nanos,
    looks: u32,
    /// What it changes in the superblock is durable.
    is_recorded: bool,
    /// Losses of a store that were noted.
    losses: u64,
}

impl Operation {
    fn new(id: OpId, shards: u32, plan: Plan) -> Operation {
        Operation {
            id,
            shards,
            plan,
            range: None,
            acted: false,
            within: VecDeque::new(),
            drops: VecDeque::new(),
            dropped: 0,
            turn: STEP,
            timeout: None,
            since: None,
            swept: true,
            looked: Nanos::ZERO,
            looks: 0,
            is_recorded: false,
            losses: 0,
        }
    }

    fn of(id: OpId, shards: u32, steps: impl IntoIterator<Item = Step>) -> Operation {
        let steps = steps.into_iter().collect();
        Operation::new(id, shards, Plan::Steps { steps, dropped: 0 })
    }

    /// A volume comes, goes, grows or is forgotten. The number `id` is a new one of a thread that has a mailbox.
    pub fn attachment(id: OpId, shards: u32, attachment: Attachment) -> Operation {
        let timeout = attachment.drain();
        let plan = Plan::Attachment(Box::new(attachment));
        Operation { timeout, ..Operation::new(id, shards, plan) }
    }

    /// Lines are dropped, range by range.
    pub fn drop_lines(
        id: OpId,
        shards: u32,
        ranges: impl IntoIterator<Item = (LineId, LineId)>,
    ) -> Operation {
        let drop = |(first, last)| Step::Lines { first, last, drop: true };
        Operation::of(id, shards, ranges.into_iter().map(drop))
    }

    /// The host does something while nothing is under way in these lines: [`Step::Act`].
    pub fn act(id: OpId, shards: u32, (first, last): (LineId, LineId)) -> Operation {
        Operation::of(id, shards, [Step::Act { first, last }])
    }

    /// A store may have lost writes that it had answered: of the volume's lines those leave the map that may hold such writes. Nobody is told of the
    /// loss before.
    pub fn losses(id: OpId, shards: u32, (first, last): (LineId, LineId)) -> Operation {
        let timeout = Some(DISTRUST);
        Operation { timeout, ..Operation::of(id, shards, [Step::Losses { first, last }]) }
    }

    /// Somebody else has changed a store: all of the volume's lines leave the map, then, durably, what the durable map says of them; then the store may
    /// be told that this is done.
    pub fn changed(id: OpId, shards: u32, (first, last): (LineId, LineId)) -> Operation {
        let steps = [Step::Lines { first, last, drop: true }, Step::Record, Step::InForce];
        Operation { timeout: Some(DISTRUST), ..Operation::of(id, shards, steps) }
    }

    /// A cache that was given up is taken back, in the order of [`takeback`](super::maintenance::takeback). Who asks keeps volumes from coming, going and
    /// growing meanwhile.
    pub fn take_back(id: OpId, shards: u32, layout: &Layout, fault: Fault) -> Operation {
        let (first, last) = (LineId(0), LineId(layout.space_lines() - 1));
        let all = Step::Lines { first, last, drop: false };
        let steps = [Step::Stores { within: AHEAD }, all];
        let believes = fault.is(Planted::TakenBackStoresBelieved);
        let durable = (!believes).then_some(Step::Stores { within: LOCKED });
        let within = durable.into_iter().chain([Step::Anew]).collect();
        Operation { timeout: Some(LOCKED), within, ..Operation::of(id, shards, steps) }
    }

    /// The same, that waits for lines for so long, or without an end.
    #[must_use]
    pub fn with_patience(self, timeout: Option<Nanos>) -> Operation {
        Operation { timeout, ..self }
    }

    /// The same, that looks at so many slots or groups in a turn.
    #[must_use]
    pub fn in_turns_of(self, turn: u32) -> Operation {
        Operation { turn, ..self }
    }

    /// Its number: mail that says that lines are given bears it.
    pub fn id(&self) -> OpId {
        self.id
    }

    /// Whether it has lines for itself, or waits for them.
    pub fn has_lines(&self) -> bool {
        self.range.is_some()
    }

    /// Lines that have left the map.
    pub fn dropped(&self) -> u64 {
        match &self.plan {
            Plan::Attachment(attachment) => attachment.dropped(),
            Plan::Steps { dropped, .. } => *dropped,
        }
    }

    /// The volume's way, of an operation that is one.
    pub fn way(&self) -> Option<&Attachment> {
        match &self.plan {
            Plan::Attachment(attachment) => Some(attachment),
            Plan::Steps { .. } => None,
        }
    }

    /// Whether what it changes in the superblock is durable: not where the cache is given up.
    pub fn is_recorded(&self) -> bool {
        self.is_recorded
    }

    /// What a volume's store is known by, as of now.
    fn known_by(&mut self, now: [u8; 64]) {
        if let Plan::Attachment(attachment) = &mut self.plan {
            attachment.known_by(now);
        }
    }

    /// What [`Step::Record`] changes.
    pub fn change(&self) -> Change {
        Change(match &self.plan {
            Plan::Attachment(attachment) => Some(attachment.clone()),
            Plan::Steps { .. } => None,
        })
    }

    fn step(&self) -> Option<Step> {
        match &self.plan {
            Plan::Attachment(attachment) => attachment.next(),
            Plan::Steps { steps, .. } => steps.front().copied(),
        }
    }

    fn step_done(&mut self, more: u64) {
        match &mut self.plan {
            Plan::Attachment(attachment) => attachment.done(more),
            Plan::Steps { steps, dropped } => {
                steps.pop_front();
                *dropped += more;
            }
        }
    }

    fn is_late(&self, now: Nanos, times: u64) -> bool {
        let until = |timeout: Nanos, since: Nanos| since + Nanos(timeout.0 * times);
        self.timeout.zip(self.since).is_some_and(|(p, since)| now >= until(p, since))
    }

    /// Goes on as far as that goes without the host. Who has lines that it drops is told of them.
    pub fn next<H: Host, N: Calls<H> + Accounts>(
        &mut self,
        node: &N,
        now: Nanos,
        out: &mut Out<H::Bytes>,
    ) -> Ask {
        self.since.get_or_insert(now);
        while let Some(step) = self.step() {
            match step {
                Step::Lines { first, last, .. }
                | Step::Act { first, last }
                | Step::Losses { first, last } => {
                    if let Some(ask) = self.with_lines(step, (first, last), node, now, out) {
                        return ask;
                    }
                }
                Step::Hold if self.is_late(now, 1) => return Ask::GiveUp(NotDone::Late),
                Step::Bits { .. } if !std::mem::replace(&mut self.swept, true) => {
                    if !self.sweep(node) {
                        return Ask::Pause(steps::BITS);
                    }
                }
                _ => return Ask::Do(step),
            }
        }
        Ask::Over
    }

    /// A step that needs lines. `None` if it is over.
    fn with_lines<H: Host, N: Calls<H> + Accounts>(
        &mut self,
        step: Step,
        (first, last): (LineId, LineId),
        node: &N,
        now: Nanos,
        out: &mut Out<H::Bytes>,
    ) -> Option<Ask> {
        // A volume that moves has held its clients before, which took its time.
        let times = if self.way().is_some() { 2 } else { 1 };
        let late = self.is_late(now, times);
        let (id, shards) = (self.id, self.shards);
        let range = self.range.get_or_insert_with(|| Range::new(id, first, last, shards));
        if !range.is_given() {
            // What can be had at once is taken.
            if late && range.is_asked() {
                return Some(Ask::GiveUp(NotDone::Late));
            }
            range.ask(node, now, out);
            return Some(Ask::Lines);
        }
        if !self.acted {
            match step {
                Step::Lines { drop, .. } => self.drops.extend(drop.then_some((first, last))),
                _ => return Some(Ask::Do(step)),
            }
            self.acted = true;
        }
        if let Some(&lines) = self.drops.front() {
            match range.drop_lines(node, lines, self.turn, out) {
                Some(0) => {}
                Some(dropped) => {
                    node.dropped(lines.0, dropped);
                    self.dropped += dropped;
                }
                None => drop(self.drops.pop_front()),
            }
            return Some(Ask::Again);
        }
        if let Some(step) = self.within.front() {
            return Some(Ask::Do(*step));
        }
        if let Plan::Steps { steps, dropped } = &mut self.plan
            && matches!(step, Step::Losses { .. })
        {
            // Told while nothing begins: what comes next finds it told.
            *dropped += std::mem::take(&mut self.dropped);
            steps[0] = Step::Act { first, last };
            steps.push_front(Step::InForce);
            return Some(Ask::Do(Step::InForce));
        }
        if let Some(range) = self.range.take() {
            range.let_go(node, now, out);
        }
        self.acted = false;
        let dropped = std::mem::take(&mut self.dropped);
        self.step_done(dropped);
        None
    }

    /// Lines of trimmed ranges leave the map: regions that have such lines keep their bits. Returns whether there are more.
    fn sweep<H: Host, N: Calls<H>>(&self, node: &N) -> bool {
        let mut left = SWEEPS;
        for shard in 0..self.shards {
            while node.shard(shard, |shard, _| shard.sweep(SWEEP_STEP)) {
                left -= 1;
                if left == 0 {
                    return true;
                }
            }
        }
        false
    }

    /// The shard that was asked has given its part of the lines.
    pub fn given(&mut self) {
        if let Some(range) = &mut self.range {
            range.given();
        }
    }

    /// What [`Ask::Do`] said is done.
    pub fn done(&mut self) {
        match self.step() {
            Some(Step::Act { .. } | Step::Losses { .. }) => self.acted = true,
            Some(Step::Lines { .. }) => drop(self.within.pop_front()),
            Some(Step::Stores { .. }) => {
                // Lines are waited for from here on.
                self.since = None;
                self.step_done(0);
            }
            _ => self.step_done(0),
        }
    }

    /// [`Step::Act`] is done but for these lines, which are of its own: they leave the map before anything begins there.
    pub fn drop_there(&mut self, lines: (LineId, LineId)) {
        self.drops.push_back(lines);
    }

    /// [`Step::Losses`] is done: these are the runs of regions, first and last, whose lines may hold what the store has not made durable.
    fn unflushed(&mut self, runs: &[(u32, u32)], layout: &Layout) {
        let Some(Step::Losses { first, last }) = self.step() else { return };
        let of_region = layout.region_groups;
        self.drops = runs
            .iter()
            .map(|&(from, to)| {
                let start = GroupId(u64::from(from) * of_region).line(0);
                let end = GroupId((u64::from(to) + 1) * of_region).line(0).0 - 1;
                (start.max(first), LineId(end).min(last))
            })
            .filter(|(start, end)| start <= end)
            .collect();
        self.acted = true;
    }

    /// [`Step::Bits`] was looked at: so many bits are left. `goes_on` is whether who asked waits on.
    fn bits(&mut self, now: Nanos, left: u64, goes_on: bool) {
        if let Plan::Attachment(attachment) = &mut self.plan {
            self.swept = attachment.bits(now, left, goes_on);
        }
    }

    /// It is given up: what waits for its lines goes on. Nothing has changed before its [`Step::Record`], but lines that have left the map.
    pub fn give_up<H: Host, N: Calls<H>>(&mut self, node: &N, now: Nanos, out: &mut Out<H::Bytes>) {
        if let Some(range) = self.range.take() {
            range.let_go(node, now, out);
        }
    }
}
