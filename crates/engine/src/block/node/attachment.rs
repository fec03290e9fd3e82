//! How a volume comes, goes, grows and is forgotten while the cache serves: which step follows which.
//!
//! What must never happen is a line that one volume has left and another finds in its place, or that a store has outlived. So:
//!
//! - a store is durable before anything of it is cached: what an earlier run wrote to it ahead of a bit that never came has none;
//! - lines of a stretch leave the map before the superblock gives the stretch to another, and before it gives up whose they are;
//! - with them the durable map begins anew, in the same write: lines that were evicted lately are in it alone;
//! - nobody is answered, and nothing is cached, before the superblock that says so is durable.
//!
//! A machine is a list of [`Step`]s. A host does the first, says what came of it, and asks for the next. What only a host has is its
//! own: sessions, who waits, words. An attachment that is given up, or cut off by a kill, has changed nothing before its record and all with it.

use std::collections::VecDeque;

use larder_base::Nanos;
use larder_format::block::layout::GROUP_LINES;
use larder_format::block::{BlockSuperblock, Layout, Volume, VolumeState};

use super::super::log::{LogFailed, LogIo, LogShards, MapLog};
use super::super::record::RecordedLog;
use super::super::volumes::{self, Found, Growth, TakenUp, take_up};
use super::super::{Fault, LineId, Planted};
use super::start::places::{Comer, Decided, decide};

/// What a volume that goes has not made durable within this time keeps its bits: these regions are dropped by a power cut.
pub const DURABLE: Nanos = Nanos::from_secs(20);

/// A volume that is to move waits so long for what is under way on it to end, and as long again for what is behind the answers.
pub const DRAIN: Nanos = Nanos::from_secs(10);
/// For bits of where it lay to go, in the same case: its store is durable by then.
const SOON: Nanos = Nanos::from_secs(1);

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Clients of the volume leave.
    Clients,
    /// The volume is closed: who comes all the same is refused.
    Close,
    /// Operations on the volume end, and new ones wait until the attachment is over: it moves.
    Hold,
    /// What was written to the volume's store becomes durable. What the store is known by is asked behind it.
    Store,
    /// What was written to the store of any volume becomes durable, within this time.
    Stores {
        /// So much of it.
        within: Nanos,
    },
    /// Nothing is under way in these lines. With `drop` they leave the map before anything begins there again.
    Lines {
        /// The first.
        first: LineId,
        /// The last.
        last: LineId,
        /// They leave.
        drop: bool,
    },
    /// The host does something of its own: nothing is under way in these lines, and nothing begins until it is done.
    Act {
        /// The first.
        first: LineId,
        /// The last.
        last: LineId,
    },
    /// A store may have lost writes that it had answered. In these lines nothing is under way: all that was answered before has its bits, and a fill
    /// of it is over too. Which losses the store knows of is noted; then regions that were not flushed are asked for
    /// ([`Maintenance::unflushed`](super::maintenance::Maintenance::unflushed)): of them all lines leave the map.
    Losses {
        /// The first.
        first: LineId,
        /// The last.
        last: LineId,
    },
    /// Bits of these regions go, as far as the store takes part. What it has lost is dropped before.
    Bits {
        /// The first.
        first: u32,
        /// The last.
        last: u32,
    },
    /// The superblock is changed durably: [`change`] with [`Attachment::is_anew`] and [`Attachment::apply`].
    Record,
    /// A cache that was given up begins anew, on the thread of its log: [`take_back`](super::maintenance::takeback::take_back).
    Anew,
    /// What was decided is in force: the volume is served, is gone, or has its new size and place; who waits for a loss may be told of it; a store that was
    /// changed by others is told that nothing is cached of what it had. Who asked is answered behind it.
    InForce,
}

#[derive(Clone, Debug)]
enum What {
    Comes(Box<(Decided, TakenUp)>),
    Goes { stretch: (u64, u64), identity: [u8; 64] },
    Forgotten,
    Grows { growth: Growth, bytes: u64, identity: [u8; 64] },
}

/// One volume's way.
#[derive(Clone, Debug)]
pub struct Attachment {
    name: String,
    what: What,
    steps: VecDeque<Step>,
    dropped: u64,
    anew: bool,
    /// Bits that are left of a volume that goes.
    left: u64,
    /// Until when bits are waited for; set when the wait begins.
    until: Option<Nanos>,
    timeout: Nanos,
    fault: Fault,
}

impl Attachment {
    fn new(name: &str, what: What, steps: impl IntoIterator<Item = Step>) -> Attachment {
        let steps = steps.into_iter().chain([Step::Record, Step::InForce]).collect();
        Attachment {
            name: name.to_owned(),
            what,
            steps,
            dropped: 0,
            anew: false,
            left: 0,
            until: None,
            timeout: DURABLE,
            fault: Fault::default(),
        }
    }

    /// A volume comes. `sb` is the superblock in force, or, where the cache was given up, what it had: there are no lines then.
    ///
    /// # Errors
    /// What was decided, if it cannot come.
    pub fn attach(
        sb: &BlockSuperblock,
        comer: &Comer,
        given_up: bool,
        fault: Fault,
    ) -> Result<Attachment, Box<Decided>> {
        let decided = decide(&mut sb.clone(), comer, fault);
        let Ok(taken) = decided.outcome.clone() else { return Err(Box::new(decided)) };
        let own = (taken.volume.first_group, taken.volume.groups);
        let is_cold = taken.found != Found::Warm;
        let mut steps = Vec::new();
        if !given_up {
            steps.push(Step::Store);
        }
        if !given_up && is_cold {
            // Of whoever had the stretch before, and what it had elsewhere: somebody else may come there.
            let former = taken.former.filter(|former| *former != own);
            steps.extend([own].into_iter().chain(former).map(drop_of));
        }
        let had_lines = is_cold && taken.former.is_some();
        let what = What::Comes(Box::new((decided, taken)));
        let mut attachment = Attachment::new(&comer.name, what, steps);
        attachment.anew = had_lines;
        Ok(attachment.with_fault(fault))
    }

    /// A volume goes: its lines stay, for when it comes back. It is put aside though its store is not durable, if that takes longer
    /// than [`DURABLE`].
    pub fn detach(volume: &Volume, layout: &Layout) -> Attachment {
        let stretch = (volume.first_group, volume.groups);
        let (first, last) = lines_of(stretch);
        let (from, to) = regions_of(stretch, layout);
        let steps = [
            Step::Clients,
            Step::Close,
            Step::Lines { first, last, drop: false },
            Step::Bits { first: from, last: to },
        ];
        Attachment::new(&volume.name, What::Goes { stretch, identity: [0; 64] }, steps)
    }

    /// The same, which waits so long for bits to go.
    pub fn with_patience(self, timeout: Nanos) -> Attachment {
        Attachment { timeout, ..self }
    }

    /// A volume that was put aside is forgotten, with its lines. `None` if there is no such volume.
    pub fn forget(sb: &BlockSuperblock, name: &str, fault: Fault) -> Option<Attachment> {
        let aside = |v: &&Volume| v.name == name && v.state == VolumeState::Detached;
        let volume = sb.volumes.iter().find(aside)?;
        let (first, last) = lines_of((volume.first_group, volume.groups));
        let drop = !fault.is(Planted::ForgetLeavesLines);
        let mut attachment =
            Attachment::new(name, What::Forgotten, [Step::Lines { first, last, drop }]);
        attachment.anew = true;
        Some(attachment)
    }

    /// A volume grows to `bytes`, as [`room_to_grow`](volumes::room_to_grow) has planned it for the volume as it stands.
    pub fn grow(volume: &Volume, growth: Growth, bytes: u64, layout: &Layout) -> Attachment {
        let what = What::Grows { growth, bytes, identity: [0; 64] };
        if growth.moves_from.is_none() {
            // Lines of whoever had the stretch before are not its own.
            let more = (growth.first_group + growth.groups, growth.needed - growth.groups);
            let more = (more.1 > 0).then(|| drop_of(more));
            return Attachment::new(&volume.name, what, [Step::Store].into_iter().chain(more));
        }
        let own = (volume.first_group, volume.groups);
        let (first, last) = regions_of(own, layout);
        let steps = [
            Step::Hold,
            Step::Store,
            // Fills may be under way behind the answers. No line is left where it lies: somebody else may come there.
            drop_of(own),
            // All of it is durable: its bits can go. What is left of them is nobody's.
            Step::Bits { first, last },
            drop_of((growth.first_group, growth.needed)),
        ];
        let mut attachment = Attachment::new(&volume.name, what, steps);
        attachment.anew = true;
        attachment.with_patience(SOON)
    }

    /// The same with a fault that is planted in it.
    pub fn with_fault(mut self, fault: Fault) -> Attachment {
        self.fault = fault;
        if self.moves() && fault.is(Planted::MovedUnderClients) {
            self.steps.retain(|step| *step != Step::Hold);
        }
        if self.moves() && fault.is(Planted::MoveLeavesLines) {
            self.steps.iter_mut().for_each(|step| {
                if let Step::Lines { drop, .. } = step {
                    *drop = false;
                }
            });
        }
        let is_early = match self.what {
            What::Comes(_) => fault.is(Planted::AnsweredBeforeRecord),
            What::Grows { .. } => fault.is(Planted::GrownBeforeRecord),
            What::Goes { .. } | What::Forgotten => false,
        };
        if is_early {
            let record = self.steps.len() - 2;
            self.steps.swap(record, record + 1);
        }
        self
    }

    /// Whether it is a volume that moves in the line space.
    pub fn moves(&self) -> bool {
        matches!(&self.what, What::Grows { growth, .. } if growth.moves_from.is_some())
    }

    /// How long what is under way may keep it waiting, where others wait for it; then it is given up.
    pub fn drain(&self) -> Option<Nanos> {
        self.moves().then_some(DRAIN)
    }

    /// What is to be done next; `None` at the end.
    pub fn next(&self) -> Option<Step> {
        self.steps.front().copied()
    }

    /// It is done. Of lines that were to be dropped `dropped` were in the map.
    pub fn done(&mut self, dropped: u64) {
        self.dropped += dropped;
        self.steps.pop_front();
    }

    /// Bits have been asked to go, and so many are left. `goes_on` is whether who asked waits on. True if that was all.
    pub(super) fn bits(&mut self, now: Nanos, left: u64, goes_on: bool) -> bool {
        let until = *self.until.get_or_insert(now + self.timeout);
        self.left = left;
        let over = left == 0 || now >= until || !goes_on;
        if over {
            self.steps.pop_front();
        }
        over
    }

    /// What the store is known by, as of now.
    pub(super) fn known_by(&mut self, now: [u8; 64]) {
        match &mut self.what {
            What::Goes { identity, .. } | What::Grows { identity, .. } => *identity = now,
            What::Comes(_) | What::Forgotten => {}
        }
    }

    /// Whether the durable map begins anew with the record: it may name lines that must not come back, not even after a power cut in the
    /// next moment.
    pub fn is_anew(&self) -> bool {
        let keeps = self.moves() && self.fault.is(Planted::MovedNotAnew);
        (self.anew || self.dropped > 0) && !keeps
    }

    /// Makes the change in a superblock. False if the volume is not as it was when this was planned: then nothing changes.
    pub fn apply(&self, sb: &mut BlockSuperblock) -> bool {
        match &self.what {
            What::Comes(comes) => {
                let (decided, taken) = &**comes;
                if self.fault.is(Planted::AddressGivenTwice) {
                    sb.volumes.retain(|v| v.name != self.name);
                    sb.volumes.push(taken.volume.clone());
                    return true;
                }
                let mut next = sb.clone();
                let same = take_up(&mut next, &decided.coming).as_ref() == Ok(taken);
                if same {
                    *sb = next;
                }
                same
            }
            What::Goes { identity, .. } => volumes::put_aside(sb, &self.name, *identity).is_some(),
            What::Forgotten => volumes::forget(sb, &self.name).is_some(),
            What::Grows { growth, bytes, identity } => {
                volumes::room_to_grow(sb, &self.name, *bytes) == Ok(*growth)
                    && volumes::grow(sb, &self.name, *bytes, *identity).is_ok()
            }
        }
    }

    /// What was decided of a volume that comes, and how it stands in the superblock.
    pub fn comes(&self) -> Option<(&Decided, &TakenUp)> {
        match &self.what {
            What::Comes(comes) => Some((&comes.0, &comes.1)),
            _ => None,
        }
    }

    /// How a volume grows, and to how many bytes.
    pub fn grows(&self) -> Option<(Growth, u64)> {
        match self.what {
            What::Grows { growth, bytes, .. } => Some((growth, bytes)),
            _ => None,
        }
    }

    /// What a volume that goes keeps of the line space: its first group, and groups.
    pub fn goes(&self) -> Option<(u64, u64)> {
        match self.what {
            What::Goes { stretch, .. } => Some(stretch),
            _ => None,
        }
    }

    /// Lines that have left the map.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether all that a volume that goes had is durable in its store.
    pub fn is_durable(&self) -> bool {
        self.left == 0
    }
}

/// The first and the last line of a stretch: first group and groups.
pub fn lines_of((first, groups): (u64, u64)) -> (LineId, LineId) {
    (LineId(first * GROUP_LINES), LineId((first + groups.max(1)) * GROUP_LINES - 1))
}

/// The first and the last region of a stretch. (Stretches are whole regions.)
fn regions_of((first, groups): (u64, u64), layout: &Layout) -> (u32, u32) {
    let region = |group: u64| (group / layout.region_groups) as u32;
    (region(first), region(first + groups.max(1) - 1))
}

fn drop_of(stretch: (u64, u64)) -> Step {
    let (first, last) = lines_of(stretch);
    Step::Lines { first, last, drop: true }
}

/// A durable map, with a tape or without.
pub trait DurableMap {
    /// Itself, to look at.
    fn log(&self) -> &MapLog;
    /// [`MapLog::write_out`].
    ///
    /// # Errors
    /// If the device fails.
    fn write_out(
        &mut self,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed>;
    /// [`MapLog::update`].
    ///
    /// # Errors
    /// If the device fails.
    fn update(
        &mut self,
        io: &mut impl LogIo,
        change: impl FnOnce(&mut BlockSuperblock),
    ) -> Result<(), LogFailed>;
    /// [`MapLog::begin_anew`].
    ///
    /// # Errors
    /// If the device fails.
    fn begin_anew(
        &mut self,
        io: &mut impl LogIo,
        change: impl FnOnce(&mut BlockSuperblock),
    ) -> Result<(), LogFailed>;
}

macro_rules! durable_map {
    ($log:ty) => {
        impl DurableMap for $log {
            fn log(&self) -> &MapLog {
                self
            }
            fn write_out(
                &mut self,
                shards: &mut impl LogShards,
                io: &mut impl LogIo,
            ) -> Result<(), LogFailed> {
                <$log>::write_out(self, shards, io)
            }
            fn update(
                &mut self,
                io: &mut impl LogIo,
                change: impl FnOnce(&mut BlockSuperblock),
            ) -> Result<(), LogFailed> {
                <$log>::update(self, io, change)
            }
            fn begin_anew(
                &mut self,
                io: &mut impl LogIo,
                change: impl FnOnce(&mut BlockSuperblock),
            ) -> Result<(), LogFailed> {
                <$log>::begin_anew(self, io, change)
            }
        }
    };
}

durable_map!(MapLog);
durable_map!(RecordedLog);

/// Changes the superblock durably; with `anew`, what the durable map says of lines that were dropped is void with it. A table is not begun
/// anew: what has left the map must be in it before the superblock is.
///
/// # Errors
/// If the device fails: the cache must be given up.
pub fn change(
    log: &mut impl DurableMap,
    anew: bool,
    shards: &mut impl LogShards,
    io: &mut impl LogIo,
    change: impl FnOnce(&mut BlockSuperblock),
) -> Result<(), LogFailed> {
    if log.log().superblock().layout.is_sparse() {
        if log.log().planted(Planted::SuperblockBeforeTable) {
            log.update(io, change)?;
            return log.write_out(shards, io);
        }
        log.write_out(shards, io)?;
        return log.update(io, change);
    }
    if anew { log.begin_anew(io, change) } else { log.update(io, change) }
}
