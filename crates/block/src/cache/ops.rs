//! Clients' operations under way.

use larder_engine::block::{OpId, PartKind};
use larder_runtime::{AlignedBuf, Payload};

use crate::op::Failure;

/// What a client has asked for.
#[derive(Debug)]
pub(super) enum Kind {
    /// Into this buffer.
    Read(AlignedBuf),
    /// From this one.
    Write {
        data: Payload,
        fua: bool,
    },
    Zero {
        fua: bool,
        may_punch: bool,
        fast: bool,
    },
    Trim {
        fua: bool,
    },
    Prefetch,
}

impl Kind {
    pub(super) fn part(&self) -> PartKind {
        match self {
            Kind::Read(_) => PartKind::Read,
            Kind::Write { .. } => PartKind::Write,
            Kind::Zero { .. } => PartKind::Zero,
            Kind::Trim { .. } => PartKind::Trim,
            Kind::Prefetch => PartKind::Prefetch,
        }
    }
}

/// An operation.
#[derive(Debug)]
pub(super) struct OpState {
    /// What the worker knows it by.
    pub(super) ticket: u64,
    /// First byte in the line space.
    pub(super) start: u64,
    /// Bytes.
    pub(super) len: u64,
    pub(super) kind: Kind,
    /// Parts that are not done, and one while they are being submitted.
    pub(super) left: u32,
    /// Parts that still need the bytes after they were done.
    pub(super) holds: u32,
    pub(super) failure: Option<Failure>,
    /// The client has its answer; only `holds` keeps it here.
    pub(super) answered: bool,
    /// A range that is locked as a whole.
    pub(super) range: bool,
}

/// The operations of one worker, by number.
#[derive(Debug, Default)]
pub(super) struct OpTable {
    list: Vec<Option<Box<OpState>>>,
    free: Vec<u32>,
}

impl OpTable {
    pub(super) fn insert(&mut self, op: OpState) -> u32 {
        let op = Some(Box::new(op));
        match self.free.pop() {
            Some(index) => {
                self.list[index as usize] = op;
                index
            }
            None => {
                self.list.push(op);
                self.list.len() as u32 - 1
            }
        }
    }

    pub(super) fn get(&mut self, index: u32) -> Option<&mut OpState> {
        self.list.get_mut(index as usize)?.as_deref_mut()
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<OpState> {
        let op = self.list.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(*op)
    }
}

/// The engine's number of an operation: its worker, and its number in that worker's table.
pub(super) fn id(worker: usize, index: u32) -> OpId {
    OpId((worker as u64) << 32 | u64::from(index))
}

/// The worker and the number.
pub(super) fn place(op: OpId) -> (usize, u32) {
    ((op.0 >> 32) as usize, op.0 as u32)
}
