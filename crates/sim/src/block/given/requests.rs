//! The queue's turns: what it asks for is done when it is asked for, and what has ended waits in the order in which it was asked for.

use std::collections::VecDeque;
use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node::event::{Answer, Effects, JobId, Op, ShardIo, StoreOp, Submit};
use larder_engine::block::node::logged::LogIo;
use larder_engine::block::node::queue::Queue;
use larder_engine::block::writeback::log::ToWrite;
use larder_engine::block::{LineId, Merge, SlotId};
use larder_format::PAGE_SIZE;
use larder_policy::block::BlockKind;

use super::bytes::{Carried, GivenAnswer, House, Ticket};
use super::node::{GivenNode, QUEUE};
use super::volume::{Attached, Known};

/// I/O of the device that is over.
enum FlashDone<B> {
    Read {
        io: ShardIo,
        line: LineId,
        bytes: B,
    },
    Written {
        io: ShardIo,
        bytes: B,
    },
    Loaded {
        io: ShardIo,
        page: u32,
        bytes: Vec<u8>,
    },
    /// A line was read that `over` is to be laid over.
    MergeRead {
        io: ShardIo,
        merge: Merge,
        over: B,
        bytes: B,
    },
    Merged {
        io: ShardIo,
        sums: (u32, u32),
    },
    /// Of the write log: a batch, a flush, and bytes of it.
    LogWritten(u64),
    LogFlushed(u64),
    LogRead(LogIo, B),
}

/// A request to a store that is over.
struct StoreDone<B> {
    job: JobId,
    came: Came<B>,
}

/// What a request to a store has come to.
enum Came<B> {
    Read(Result<B, &'static str>),
    Changed(Result<(), &'static str>),
}

/// Nothing of what was asked for is done.
const FAILED: &str = "the store failed";

/// What the queue has asked for.
pub(super) struct Asked<B> {
    flash: VecDeque<FlashDone<B>>,
    /// By volume, in the order in which they were first asked for.
    stores: Vec<VecDeque<StoreDone<B>>>,
    known: Vec<Option<Known>>,
    next: u64,
    pub answers: VecDeque<GivenAnswer>,
}

impl<B> Default for Asked<B> {
    fn default() -> Asked<B> {
        Asked {
            flash: VecDeque::new(),
            stores: Vec::new(),
            known: Vec::new(),
            next: 0,
            answers: VecDeque::new(),
        }
    }
}

impl<B> Asked<B> {
    /// The volume as the queue knows it.
    fn known(&mut self, attached: &Rc<Attached>) -> Known {
        let same = |k: &&Known| Rc::ptr_eq(&k.attached, attached);
        if let Some(known) = self.known.iter().flatten().find(same) {
            return known.clone();
        }
        let at = self.known.iter().position(Option::is_none).unwrap_or(self.known.len());
        if at == self.known.len() {
            self.known.push(None);
            self.stores.push(VecDeque::new());
        }
        let known = Known { attached: attached.clone(), session: at };
        self.known[at] = Some(known.clone());
        known
    }

    /// Volumes that are gone give their numbers back.
    fn let_go(&mut self) {
        self.known.iter_mut().for_each(|k| drop(k.take_if(|k| k.attached.closed.get())));
    }
}

/// Carries out what the queue asks for.
struct Carrier<'a, B: Carried> {
    node: &'a GivenNode<B>,
    asked: &'a mut Asked<B>,
}

impl<B: Carried> Carrier<'_, B> {
    fn slot(&self, shard: u32, slot: SlotId) -> u64 {
        self.node.layout.slot_at(shard, slot.0)
    }
}

impl<B: Carried> Effects<House<B>> for Carrier<'_, B> {
    fn flash_read(&mut self, io: ShardIo, slot: SlotId, line: LineId, lines: u32) {
        let len = u64::from(lines) * self.node.line_bytes();
        let bytes = self.node.medium.read(self.slot(io.shard, slot), len);
        self.asked.flash.push_back(FlashDone::Read { io, line, bytes });
    }

    fn flash_write(&mut self, io: ShardIo, slot: SlotId, _lines: u32, bytes: B) {
        self.node.medium.write(self.slot(io.shard, slot), &bytes);
        self.asked.flash.push_back(FlashDone::Written { io, bytes });
    }

    fn merge(&mut self, io: ShardIo, merge: Merge, over: B) {
        let bytes = self.node.medium.read(self.slot(io.shard, merge.from), self.node.line_bytes());
        self.asked.flash.push_back(FlashDone::MergeRead { io, merge, over, bytes });
    }

    fn load(&mut self, io: ShardIo, page: u32) {
        let at = self.node.layout.table_at(io.shard, page) as usize;
        let bytes = self.node.medium.flash.borrow()[at..at + PAGE_SIZE].to_vec();
        self.asked.flash.push_back(FlashDone::Loaded { io, page, bytes });
    }

    fn store_read(&mut self, job: JobId, volume: &Known, at: u64, len: u32, _ahead: bool) {
        let came = Came::Read(match volume.attached.store_fails() {
            true => Err(FAILED),
            false => Ok(B::read(&volume.attached.store.borrow(), at, len.into())),
        });
        self.asked.stores[volume.session].push_back(StoreDone { job, came });
    }

    fn store_change(&mut self, job: JobId, volume: &Known, change: StoreOp<B>) {
        let mut store = volume.attached.store.borrow_mut();
        let changed = match change {
            StoreOp::Flush | StoreOp::Status { .. } => Ok(()),
            _ if volume.attached.store_fails() => Err(FAILED),
            StoreOp::Write { at, bytes, .. } => {
                bytes.write(&mut store, at);
                Ok(())
            }
            StoreOp::Zero { at, len, .. } | StoreOp::Trim { at, len, .. } => {
                store[at as usize..(at + len) as usize].fill(0);
                Ok(())
            }
        };
        let came = Came::Changed(changed);
        self.asked.stores[volume.session].push_back(StoreDone { job, came });
    }

    fn log_write(&mut self, write: ToWrite<B>) {
        let at = write.at as usize;
        let mut flash = self.node.medium.flash.borrow_mut();
        flash[at..at + write.len as usize].fill(0);
        flash[at..at + write.head.len()].copy_from_slice(&write.head);
        for (from, bytes) in &write.payload {
            bytes.write(&mut flash, write.at + u64::from(*from));
        }
        self.asked.flash.push_back(FlashDone::LogWritten(write.number));
    }

    fn log_flush(&mut self, covers: u64) {
        self.asked.flash.push_back(FlashDone::LogFlushed(covers));
    }

    fn log_read(&mut self, io: LogIo, at: u64, len: u32) {
        let bytes = self.node.medium.read(at, len.into());
        self.asked.flash.push_back(FlashDone::LogRead(io, bytes));
    }

    fn volume(&mut self, attachment: u32) -> Option<Known> {
        let attached = self.node.back.as_ref()?.volume(attachment)?;
        Some(self.asked.known(&attached))
    }

    fn deliver_zeros(&mut self, ticket: &mut Ticket, at: u64, len: u64) {
        ticket.bytes[at as usize..(at + len) as usize].fill(0);
    }

    fn deliver(&mut self, ticket: &mut Ticket, at: u64, bytes: B) {
        bytes.write(&mut ticket.bytes, at);
    }

    fn answer(&mut self, answer: Answer<House<B>>) {
        let Answer { ticket: Ticket { number, bytes }, outcome, ended, .. } = answer;
        self.asked.answers.push_back(GivenAnswer { number, outcome, bytes, ended });
    }
}

/// The queue, and what it has asked for.
pub(super) struct Requests<B: Carried> {
    pub queue: Queue<House<B>>,
    pub asked: Asked<B>,
}

impl<B: Carried> Requests<B> {
    /// A request begins. Returns its number.
    pub(super) fn submit(
        &mut self,
        node: &GivenNode<B>,
        volume: &Rc<Attached>,
        op: Op<Vec<u8>>,
        holds: BlockKind,
    ) -> u64 {
        let Requests { queue, asked } = self;
        asked.next += 1;
        let number = asked.next;
        let volume = asked.known(volume);
        let mut ticket = Ticket { number, bytes: Vec::new() };
        let op = match op {
            Op::Read { at, len } => {
                ticket.bytes = vec![0; len as usize];
                Op::Read { at, len }
            }
            Op::Write { at, len, bytes, fua } => Op::Write { at, len, bytes: B::of(bytes), fua },
            Op::Flush => Op::Flush,
            Op::Zero { at, len, fua, may_punch, fast } => {
                Op::Zero { at, len, fua, may_punch, fast }
            }
            Op::Trim { at, len, fua } => Op::Trim { at, len, fua },
            Op::Status { at, len, one } => Op::Status { at, len, one },
            Op::Advise { at, len } => Op::Advise { at, len },
        };
        let now = node.now.get();
        let submit = Submit { volume, ticket, op, holds };
        queue.submit(node, now, &mut Carrier { node, asked }, submit);
        number
    }

    /// Does all there is to do now. Returns whether there was something.
    pub(super) fn step(&mut self, node: &GivenNode<B>) -> bool {
        let Requests { queue, asked } = self;
        let now = node.now.get();
        let mut did = node.has_mail(QUEUE);
        queue.take_mail(node);
        asked.let_go();
        queue.tick(node, now, &mut Carrier { node, asked });
        queue.tell(node, &mut Carrier { node, asked });
        log_due(node, now, queue, asked);
        loop {
            let mut any = false;
            if !queue.is_settled() {
                did = true;
                queue.turn(node, now, &mut Carrier { node, asked });
            }
            while let Some(done) = asked.flash.pop_front() {
                any = true;
                flash_done(node, now, queue, asked, done);
            }
            for at in 0..asked.stores.len() {
                while let Some(StoreDone { job, came }) = asked.stores[at].pop_front() {
                    any = true;
                    let fx = &mut Carrier { node, asked };
                    match came {
                        Came::Read(read) => queue.store_read(node, now, fx, job, read),
                        Came::Changed(changed) => queue.store_changed(node, now, fx, job, changed),
                    }
                }
            }
            did |= any;
            if !any && queue.is_settled() {
                if did {
                    log_due(node, now, queue, asked);
                }
                if queue.is_settled() {
                    return did;
                }
            }
        }
    }
}

/// What the write log has by time.
fn log_due<B: Carried>(
    node: &GivenNode<B>,
    now: Nanos,
    queue: &mut Queue<House<B>>,
    asked: &mut Asked<B>,
) {
    if node.back.is_some() {
        queue.log_due(node, now, &mut Carrier { node, asked });
    }
}

fn flash_done<B: Carried>(
    node: &GivenNode<B>,
    now: Nanos,
    queue: &mut Queue<House<B>>,
    asked: &mut Asked<B>,
    done: FlashDone<B>,
) {
    let line = node.layout.line;
    match done {
        FlashDone::Read { io, line: first, bytes } => {
            let crcs = bytes.crcs(line);
            queue.flash_read(node, now, io, first, Ok((&crcs, bytes)));
        }
        FlashDone::Written { io, bytes } => {
            queue.flash_written(node, now, io, Ok(&bytes.crcs(line)));
        }
        FlashDone::Loaded { io, page, bytes } => {
            let slots = node.decode_page(io.shard, page, &bytes);
            queue.page_loaded(node, now, io, slots.as_deref().map_err(|&e| e));
        }
        FlashDone::MergeRead { io, merge, over, bytes } => {
            let merged = bytes.under(&over, merge.at - merge.line.0 * u64::from(line));
            let sums = (bytes.crcs(line)[0], merged.crcs(line)[0]);
            node.medium.write(node.layout.slot_at(io.shard, merge.to.0), &merged);
            asked.flash.push_back(FlashDone::Merged { io, sums });
        }
        FlashDone::LogWritten(batch) => {
            queue.log_written(node, now, &mut Carrier { node, asked }, batch, true);
        }
        FlashDone::LogFlushed(covers) => {
            queue.log_flushed(node, now, &mut Carrier { node, asked }, covers, true);
        }
        FlashDone::LogRead(io, bytes) => {
            let sums = bytes.sums();
            let read = Some((&sums[..], bytes));
            queue.log_read(node, now, &mut Carrier { node, asked }, io, read);
        }
        FlashDone::Merged { io, sums } => queue.merged(node, now, io, Ok(sums)),
    }
}
