//! In which order maintenance and what is around it do what there is to do: the same in a server, a program without threads, a
//! simulator and a crash model.
//!
//! | function | whose order |
//! | --- | --- |
//! | [`round`] | of whoever has [`Maintenance`](super::maintenance::Maintenance): one look at all that it is told, and one turn |
//! | [`all_rounds`] | of a program that calls: queues, maintenance, and who has time |
//!
//! When the next round is due is said by [`Maintenance::wakes`](super::maintenance::Maintenance::wakes) and the
//! [`Inbox`](super::maintenance::Inbox): a thread sleeps until [`Inbox::sleep`](super::maintenance::Inbox::sleep), who has no thread comes
//! again at [`Inbox::due`](super::maintenance::Inbox::due).

use larder_base::Nanos;
use larder_policy::block::VolumeId;

use super::maintenance::{Left, Turn, Work};
use super::record::RecordedMaintenance;

/// Whoever has maintenance: what is carried out in a round, and the machine with what it is called with.
pub trait Rounds {
    /// Bytes of lines.
    type Bytes;
    /// What an operator has done here.
    type Task;
    /// The time.
    fn now(&self) -> Nanos;
    /// The machine.
    fn machine(&mut self) -> &mut RecordedMaintenance;
    /// [`Maintenance::take`](super::maintenance::Maintenance::take), at `now`.
    fn take(&mut self, now: Nanos, work: Work<Self::Bytes>);
    /// [`Maintenance::turn`](super::maintenance::Maintenance::turn), at `now`.
    fn turn(&mut self, now: Nanos) -> Turn;
    /// A flush of a store that has ended and was not told yet: its volume, its number, and whether the store is durable.
    fn next_flushed(&mut self) -> Option<(VolumeId, u64, bool)>;
    /// Fills, copies and loads that were asked for begin, if they have not.
    fn begin_io(&mut self);
    /// Does what an operator has asked for.
    fn task(&mut self, task: Self::Task);
    /// Tells the machine of the fills, copies and loads that have ended.
    fn end_io(&mut self);
}

/// One round: what has ended of flushes, what was left, a turn, tasks of operators, what has ended of fills. Returns when the turn wants the
/// next; looks at what is under way come in addition ([`Maintenance::wakes`](super::maintenance::Maintenance::wakes)).
///
/// An operator's task forces a step of the log: what it waits for does not wait for the log's pace.
pub fn round<R: Rounds>(host: &mut R, left: Left<R::Bytes, R::Task>) -> Turn {
    let Left { work, tasks, stop } = left;
    let now = host.now();
    if stop && !host.machine().is_stopping() {
        host.machine().stop(now);
    }
    while let Some((store, number, durable)) = host.next_flushed() {
        let now = host.now();
        host.machine().store_flushed(now, store, number, durable);
    }
    let now = host.now();
    host.take(now, work);
    host.begin_io();
    if !tasks.is_empty() {
        host.machine().force();
    }
    let turn = host.turn(now);
    tasks.into_iter().for_each(|task| host.task(task));
    host.end_io();
    let now = host.now();
    host.machine().has_looked(now);
    turn
}

/// All that is at work in a cache without threads.
pub trait AllRounds {
    /// Queues do what there is for them: their mailboxes, requests, I/O that has ended. Returns whether there was anything.
    fn queues(&mut self) -> bool;
    /// A [`round`], if one is due. Returns whether it was.
    fn maintenance(&mut self) -> bool;
    /// Who has time does what is due: what detectors wish to see, lines that are swept and counted. Returns when the
    /// next is; `None` if somebody further up on this thread is at it.
    fn scan(&mut self) -> Option<Nanos>;
    /// When the next round of maintenance is due; `None` where there is none any more.
    fn due(&mut self) -> Option<Nanos>;
}

/// Does all that is due: queues, then maintenance, again until neither has anything to do; then who has time. Returns when there is
/// something to do again.
pub fn all_rounds(host: &mut impl AllRounds) -> Option<Nanos> {
    loop {
        let asked = host.queues();
        let mut kept = false;
        while host.maintenance() {
            kept = true;
        }
        if !asked && !kept {
            break;
        }
    }
    let scan = host.scan();
    scan.into_iter().chain(host.due()).min()
}
