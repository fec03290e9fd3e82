//! What surrounds the queue: devices that take their time, and requests under way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use larder_base::Nanos;
use larder_engine::block::node::event::{Answer, Effects, Ended, JobId, ShardIo, StoreOp};
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::logged::{JournalPart, LogIo};
use larder_engine::block::writeback::log::ToWrite;
use larder_engine::block::{IoId, LineId, Merge, PartKind, SlotId};
use larder_format::block::Layout;
use larder_policy::block::BlockKind;

use super::journal::Journals;
use super::node::{Blank, Run, Sim};
use super::sparse::Files;
use crate::device::drive::Drive;
use crate::device::store::StoreModel;

/// Something that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    FlashRead {
        shard: u32,
        io: IoId,
        line: LineId,
        lines: u32,
    },
    FlashWritten {
        shard: u32,
        io: IoId,
        lines: u32,
    },
    /// The file system has no room for lines.
    FlashFull {
        shard: u32,
        io: IoId,
    },
    /// A page of the table is there.
    Loaded {
        shard: u32,
        io: IoId,
        page: u32,
    },
    Merged {
        shard: u32,
        io: IoId,
    },
    /// A batch of the write log is written.
    LogWritten {
        batch: u64,
    },
    /// The drive under it is flushed.
    LogFlushed {
        covers: u64,
    },
    /// Bytes of it are read.
    LogRead {
        io: u32,
        len: u32,
    },
    /// Something is due in it.
    WritesDue,
    StoreRead {
        job: u32,
        len: u32,
    },
    StoreChanged {
        job: u32,
    },
    /// A request of an epoch to its journal is over.
    JournalWritten {
        attachment: u32,
    },
    /// The journal's device is flushed.
    JournalFlushed {
        attachment: u32,
    },
    /// Void lines are swept, and the lines of volumes are counted.
    Census,
    /// Maintenance's round.
    Log,
    /// The log's I/O in it is over.
    Logged,
}

/// I/O of maintenance that has ended, or will have: it looks itself which has, and nobody is woken by it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kept {
    /// Lines were written, or there was no room for them.
    Written(ShardIo, Result<u32, FlashError>),
    /// A page of the table was read.
    Loaded(ShardIo, u32),
}

/// What is done first of what ends at the same time: the order that a queue and maintenance have in [`Given`](super::Given).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Whose {
    /// I/O of the cache device that the queue has asked for.
    Device,
    /// What a store or a journal has done.
    Store,
    /// Maintenance's rounds.
    Log,
    /// Who has time.
    Round,
}

impl Whose {
    const ALL: [Whose; 4] = [Whose::Device, Whose::Store, Whose::Log, Whose::Round];
}

impl Event {
    fn whose(self) -> Whose {
        match self {
            Event::FlashRead { .. }
            | Event::FlashWritten { .. }
            | Event::FlashFull { .. }
            | Event::Loaded { .. }
            | Event::Merged { .. }
            | Event::LogWritten { .. }
            | Event::LogFlushed { .. }
            | Event::LogRead { .. }
            | Event::WritesDue => Whose::Device,
            Event::StoreRead { .. }
            | Event::StoreChanged { .. }
            | Event::JournalWritten { .. }
            | Event::JournalFlushed { .. } => Whose::Store,
            Event::Log | Event::Logged => Whose::Log,
            Event::Census => Whose::Round,
        }
    }
}

/// By time, and of the same time in the order in which they were put down.
type Events = BinaryHeap<Reverse<(Nanos, u64, Event)>>;

/// A request of the trace under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub volume: u32,
    pub answer: Answered,
    /// Operations that it was cut into: one for each stretch of the line space that it touches.
    pub pieces: u32,
}

/// A request that is answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    /// When it came, and when it was answered.
    pub came: Nanos,
    /// When it was answered.
    pub done: Nanos,
    /// Read, write, or trim.
    pub kind: PartKind,
    /// What it holds, as far as the trace says.
    pub class: BlockKind,
    /// Its bytes.
    pub bytes: u64,
    /// A read that counts as a hit: [`Ended::hit`].
    pub hit: bool,
    /// Of a read, bytes from flash.
    pub from_flash: u64,
    /// Of a read, bytes that somebody else's request had brought or was bringing.
    pub shared: u64,
    /// Whether the store was asked on its behalf.
    pub reached_store: bool,
    /// Refused: too many waited.
    pub failed: bool,
    /// It is no request of the trace, but a client's flush.
    pub flush: bool,
}

/// Devices and requests.
pub(super) struct World {
    /// The time.
    pub now: Nanos,
    layout: Layout,
    pub drive: Drive,
    /// Of a sparse cache, what lies between its file and the drive.
    pub files: Option<Files>,
    pub store: StoreModel,
    pub journals: Journals,
    /// By [`Whose`].
    events: [Events; Whose::ALL.len()],
    /// By the same order.
    kept: BTreeMap<(Nanos, u64), Kept>,
    sequence: u64,
    /// By the number that their operations have as ticket.
    pub asked: BTreeMap<u64, Asked>,
    next: u64,
    pub answered: Vec<Answered>,
    /// Bytes of lines written to the cache device.
    pub line_bytes_written: u64,
    /// Bytes of the write log.
    pub log_bytes_written: u64,
    /// What a flush of the drive takes.
    flush: Nanos,
    /// What was written to stores: volume, first byte, bytes.
    #[cfg(test)]
    pub stored: Vec<(u32, u64, u64)>,
    /// Epochs as their journals were to have them, and when.
    #[cfg(test)]
    pub epochs: Vec<(Nanos, u64, u64, Vec<JournalPart<Blank>>)>,
    /// Volumes that write back, by attachment number from 1.
    pub written_back: Vec<Run>,
}

impl World {
    pub(super) fn new(
        layout: Layout,
        drive: Drive,
        (store, journals): (StoreModel, Journals),
        files: Option<Files>,
        flush: Nanos,
    ) -> World {
        World {
            now: Nanos::ZERO,
            layout,
            drive,
            files,
            store,
            journals,
            events: Default::default(),
            kept: BTreeMap::new(),
            sequence: 0,
            asked: BTreeMap::new(),
            next: 0,
            answered: Vec::new(),
            line_bytes_written: 0,
            log_bytes_written: 0,
            flush,
            #[cfg(test)]
            stored: Vec::new(),
            #[cfg(test)]
            epochs: Vec::new(),
            written_back: Vec::new(),
        }
    }

    // ---- events ----

    pub(super) fn at(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.events[event.whose() as usize].push(Reverse((at, self.sequence, event)));
    }

    /// When the next thing ends, and what it is.
    pub(super) fn next(&self) -> Option<(Nanos, Whose)> {
        let first = |whose: Whose| {
            let Reverse((at, ..)) = self.events[whose as usize].peek()?;
            Some((*at, whose))
        };
        Whose::ALL.into_iter().filter_map(first).min()
    }

    /// When the next thing ends.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        self.next().map(|(at, _)| at)
    }

    /// What of this has ended by `now`, one after the other.
    pub(super) fn take(&mut self, whose: Whose, now: Nanos) -> Option<(Nanos, Event)> {
        let events = &mut self.events[whose as usize];
        events.peek().filter(|Reverse((at, ..))| *at <= now)?;
        events.pop().map(|Reverse((at, _, event))| (at, event))
    }

    fn keep(&mut self, at: Nanos, kept: Kept) {
        self.sequence += 1;
        self.kept.insert((at, self.sequence), kept);
    }

    /// I/O of maintenance that has ended by `now`, one after the other.
    pub(super) fn take_kept(&mut self, now: Nanos) -> Option<Kept> {
        let first = self.kept.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }

    /// Requests of an epoch to its journal that were begun, and end then.
    pub(super) fn journal_goes_on(&mut self, attachment: u32, ends: Vec<Nanos>) {
        ends.into_iter().for_each(|end| self.at(end, Event::JournalWritten { attachment }));
    }

    // ---- requests ----

    /// A request comes. Returns the ticket of its operations.
    pub(super) fn begin(&mut self, volume: u32, answer: Answered, pieces: u32) -> u64 {
        self.next += 1;
        self.asked.insert(self.next, Asked { volume, answer, pieces });
        self.next
    }

    // ---- the drive ----

    /// Lines are read from `slot` on: when they are there.
    fn read_lines(&mut self, shard: u32, slot: SlotId, lines: u32) -> Nanos {
        let World { drive, files, layout, now, .. } = self;
        match files {
            Some(files) => files.read(drive, *now, (shard, slot), lines),
            None => drive.read(*now, layout.slot_at(shard, slot.0), lines * layout.line),
        }
    }

    /// They are written from `now` on: when that is done. `None`: there is no room for them.
    fn write_lines(&mut self, now: Nanos, shard: u32, slot: SlotId, lines: u32) -> Option<Nanos> {
        let World { drive, files, layout, .. } = self;
        let len = lines * layout.line;
        let done = match files {
            Some(files) => files.write(drive, now, (shard, slot), lines)?,
            None => drive.write(now, layout.slot_at(shard, slot.0), len),
        };
        self.line_bytes_written += u64::from(len);
        Some(done)
    }

    /// The same for maintenance.
    pub(super) fn fill(&mut self, now: Nanos, io: ShardIo, slot: SlotId, lines: u32) {
        match self.write_lines(now, io.shard, slot, lines) {
            Some(done) => self.keep(done, Kept::Written(io, Ok(lines))),
            None => self.keep(now, Kept::Written(io, Err(FlashError::NoSpace))),
        }
    }

    /// Lines are moved.
    pub(super) fn copy(&mut self, io: ShardIo, from: SlotId, to: SlotId, lines: u32) {
        let read = self.read_lines(io.shard, from, lines);
        self.fill(read, io, to, lines);
    }

    /// A page of the table is read: when it is there.
    fn read_page(&mut self, shard: u32, page: u32) -> Nanos {
        let World { drive, files, now, .. } = self;
        files.as_mut().map_or(*now, |f| f.load(drive, *now, shard, page))
    }

    /// The same for maintenance.
    pub(super) fn load_page(&mut self, io: ShardIo, page: u32) {
        let done = self.read_page(io.shard, page);
        self.keep(done, Kept::Loaded(io, page));
    }
}

impl Effects<Sim> for World {
    fn flash_read(
        &mut self,
        ShardIo { shard, io }: ShardIo,
        slot: SlotId,
        line: LineId,
        lines: u32,
    ) {
        let done = self.read_lines(shard, slot, lines);
        self.at(done, Event::FlashRead { shard, io, line, lines });
    }

    fn flash_write(
        &mut self,
        ShardIo { shard, io }: ShardIo,
        slot: SlotId,
        lines: u32,
        _bytes: Blank,
    ) {
        let now = self.now;
        match self.write_lines(now, shard, slot, lines) {
            Some(done) => self.at(done, Event::FlashWritten { shard, io, lines }),
            None => self.at(now, Event::FlashFull { shard, io }),
        }
    }

    fn merge(&mut self, ShardIo { shard, io }: ShardIo, merge: Merge, _bytes: Blank) {
        let read = self.read_lines(shard, merge.from, 1);
        // (It has its place already.)
        let done = self.write_lines(read, shard, merge.to, 1).unwrap_or(read);
        self.at(done, Event::Merged { shard, io });
    }

    fn load(&mut self, ShardIo { shard, io }: ShardIo, page: u32) {
        let done = self.read_page(shard, page);
        self.at(done, Event::Loaded { shard, io, page });
    }

    fn store_read(&mut self, JobId(job): JobId, volume: &Run, at: u64, len: u32, _ahead: bool) {
        let place = (volume.volume, at);
        let done = self.store.read(self.now, volume.number, place, len.into());
        self.at(done, Event::StoreRead { job, len });
    }

    fn store_change(&mut self, JobId(job): JobId, volume: &Run, change: StoreOp<Blank>) {
        let done = match change {
            StoreOp::Write { at, len, .. } => {
                #[cfg(test)]
                self.stored.push((volume.volume, at, len));
                self.store.write(self.now, (volume.volume, at), len, true)
            }
            StoreOp::Zero { at, len, .. } | StoreOp::Trim { at, len, .. } => {
                self.store.write(self.now, (volume.volume, at), len, false)
            }
            StoreOp::Flush => self.store.flush(self.now),
            // No trace has it.
            StoreOp::Status { .. } => self.now,
        };
        self.at(done, Event::StoreChanged { job });
    }

    fn deliver(&mut self, _ticket: &mut u64, _at: u64, _bytes: Blank) {}

    fn log_write(&mut self, write: ToWrite<Blank>) {
        let done = self.drive.write(self.now, write.at, write.len);
        self.log_bytes_written += u64::from(write.len);
        self.at(done, Event::LogWritten { batch: write.number });
    }

    fn log_flush(&mut self, covers: u64) {
        self.at(self.now + self.flush, Event::LogFlushed { covers });
    }

    fn log_read(&mut self, LogIo(io): LogIo, at: u64, len: u32) {
        let done = self.drive.read(self.now, at, len);
        self.at(done, Event::LogRead { io, len });
    }

    fn journal_write(
        &mut self,
        attachment: u32,
        epoch: u64,
        last: u64,
        parts: Vec<JournalPart<Blank>>,
    ) {
        let ends = self.journals.write(self.now, (attachment, epoch), &parts);
        self.journal_goes_on(attachment, ends);
        #[cfg(test)]
        self.epochs.push((self.now, epoch, last, parts));
        #[cfg(not(test))]
        let _ = last;
    }

    fn journal_flush(&mut self, attachment: u32) {
        let done = self.journals.flush(self.now);
        self.at(done, Event::JournalFlushed { attachment });
    }

    fn deliver_zeros(&mut self, _ticket: &mut u64, _at: u64, _len: u64) {}

    fn volume(&mut self, attachment: u32) -> Option<Run> {
        self.written_back.get(attachment.checked_sub(1)? as usize).copied()
    }

    fn answer(&mut self, Answer { ticket, ended, .. }: Answer<Sim>) {
        let Some(asked) = self.asked.get_mut(&ticket) else { return };
        let a = &mut asked.answer;
        if let Some(Ended { hit, asked_store, from_flash, shared, failed, .. }) = ended {
            a.hit &= hit;
            a.reached_store |= asked_store;
            a.failed |= failed;
            a.from_flash += from_flash;
            a.shared += shared;
        }
        asked.pieces -= 1;
        if asked.pieces == 0 {
            a.done = self.now;
            self.answered.push(*a);
            self.asked.remove(&ticket);
        }
    }
}
