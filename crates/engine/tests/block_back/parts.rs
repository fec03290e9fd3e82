//! The types that the model brings, and what its queues ask for.

use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node::event::{
    Answer, Effects, Host, JobId, ShardIo, State, StoreOp, Volume, Why,
};
use larder_engine::block::node::logged::LogIo;
use larder_engine::block::writeback::log::{Said, Sums, ToWrite};
use larder_engine::block::{IoFailed, LineId, Merge, SlotId};
use larder_format::block::write_log::pieces;
use larder_policy::block::VolumeId;

use crate::device::SECTOR;

/// Bytes of a line.
pub(crate) const LINE: u64 = 4096;

/// The types that the model brings.
pub(crate) struct Model;

/// Bytes, which a failure does not print.
#[derive(Clone)]
pub(crate) struct Bytes {
    all: Rc<Vec<u8>>,
    from: usize,
    len: usize,
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

impl Bytes {
    pub(crate) fn new(all: Vec<u8>) -> Bytes {
        Bytes { from: 0, len: all.len(), all: Rc::new(all) }
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.all[self.from..self.from + self.len]
    }
}

/// What a status says of a sector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Data,
    Zeros,
    Hole,
}

impl Host for Model {
    type Bytes = Bytes;
    type Volume = Vol;
    type Ticket = u64;
    type Failure = IoFailed;
    /// Sector by sector.
    type Extents = Vec<Extent>;

    fn part(bytes: &Bytes, from: u64, len: u64) -> Bytes {
        assert!((from + len) as usize <= bytes.len, "{from} {len} of {bytes:?}");
        Bytes { all: bytes.all.clone(), from: bytes.from + from as usize, len: len as usize }
    }

    fn apart(bytes: &Bytes, from: u64, len: u64) -> Bytes {
        Model::part(bytes, from, len)
    }

    fn failure(_: Why) -> IoFailed {
        IoFailed
    }

    fn sums(bytes: &Bytes) -> Sums {
        Sums::new(&sums(bytes.as_slice()))
    }

    fn overlay(
        mut extents: Vec<Extent>,
        (at, len): (u64, u64),
        dirty: &[(u64, u64, bool)],
    ) -> Vec<Extent> {
        for &(first, bytes, zeros) in dirty {
            let (from, to) = (first.max(at), (first + bytes).min(at + len));
            for place in (from..to.max(from)).step_by(SECTOR) {
                let which = ((place - at) / SECTOR as u64) as usize;
                extents[which] = if zeros { Extent::Zeros } else { Extent::Data };
            }
        }
        extents
    }
}

/// The CRC-32C of each 4 KiB.
pub(crate) fn sums(bytes: &[u8]) -> Vec<u32> {
    pieces::sums(bytes).collect()
}

/// A volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Vol {
    pub(crate) number: usize,
    /// It writes back.
    pub(crate) attachment: Option<u32>,
    /// Bytes of the line space.
    pub(crate) base: u64,
    pub(crate) whole: u64,
}

impl Volume for Vol {
    fn state(&self) -> State {
        State::Served
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn whole(&self) -> u64 {
        self.whole
    }
}

/// What is under way. The first number of most is that of the queue which has asked for it.
#[derive(Debug)]
pub(crate) enum Io {
    FlashRead(usize, ShardIo, SlotId, LineId, u32),
    /// Asked for by a queue, or by maintenance.
    FlashWrite(Option<usize>, ShardIo, SlotId, Bytes),
    Copy(ShardIo, SlotId, SlotId, u32),
    Merge(usize, ShardIo, Merge, Bytes),
    StoreRead(usize, JobId, Vol, u64, u64),
    /// With what a flush covers.
    StoreChange(usize, JobId, Vol, StoreOp<Bytes>, usize),
    /// Maintenance flushes a store: its number, and what that covers.
    StoreFlush(VolumeId, u64, usize),
    LogWrite(usize, ToWrite<Bytes>),
    LogFlush(usize, u64, usize),
    LogRead(usize, LogIo, u64, u32),
    /// The marker of a volume, by its attachment number, is to say this.
    Mark(usize, u32, Said),
    /// It is looked at, since then.
    Look(u32, Nanos),
}

/// What a queue has asked for.
#[derive(Debug)]
pub(crate) enum Effect {
    Io(Io),
    Deliver(u64, u64, Bytes),
    Zeros(u64, u64, u64),
    Answer(u64, Result<Vec<Extent>, IoFailed>),
}

/// What a queue has asked for during a call, in its order.
pub(crate) struct Carried {
    queue: usize,
    volumes: Vec<Vol>,
    pub(crate) said: Vec<Effect>,
}

impl Carried {
    pub(crate) fn new(queue: usize, volumes: &[Vol]) -> Carried {
        Carried { queue, volumes: volumes.to_vec(), said: Vec::new() }
    }

    fn io(&mut self, io: Io) {
        self.said.push(Effect::Io(io));
    }
}

impl Effects<Model> for Carried {
    fn flash_read(&mut self, io: ShardIo, slot: SlotId, line: LineId, lines: u32) {
        self.io(Io::FlashRead(self.queue, io, slot, line, lines));
    }

    fn flash_write(&mut self, io: ShardIo, slot: SlotId, lines: u32, bytes: Bytes) {
        assert_eq!(bytes.len as u64, u64::from(lines) * LINE);
        self.io(Io::FlashWrite(Some(self.queue), io, slot, bytes));
    }

    fn merge(&mut self, io: ShardIo, merge: Merge, bytes: Bytes) {
        self.io(Io::Merge(self.queue, io, merge, bytes));
    }

    fn load(&mut self, _: ShardIo, _: u32) {
        unreachable!("no table lies on the device");
    }

    fn store_read(&mut self, job: JobId, volume: &Vol, at: u64, len: u32, _: bool) {
        self.io(Io::StoreRead(self.queue, job, *volume, at, len.into()));
    }

    fn store_change(&mut self, job: JobId, volume: &Vol, change: StoreOp<Bytes>) {
        self.io(Io::StoreChange(self.queue, job, *volume, change, 0));
    }

    fn deliver(&mut self, ticket: &mut u64, at: u64, bytes: Bytes) {
        self.said.push(Effect::Deliver(*ticket, at, bytes));
    }

    fn answer(&mut self, answer: Answer<Model>) {
        self.said.push(Effect::Answer(answer.ticket, answer.outcome));
    }

    fn log_write(&mut self, write: ToWrite<Bytes>) {
        self.io(Io::LogWrite(self.queue, write));
    }

    fn log_flush(&mut self, covers: u64) {
        self.io(Io::LogFlush(self.queue, covers, 0));
    }

    fn log_read(&mut self, io: LogIo, at: u64, len: u32) {
        self.io(Io::LogRead(self.queue, io, at, len));
    }

    fn marker_write(&mut self, attachment: u32, said: Said, _: u64) {
        self.io(Io::Mark(self.queue, attachment, said));
    }

    fn marker_look(&mut self, attachment: u32) {
        self.io(Io::Look(attachment, Nanos::ZERO));
    }

    fn deliver_zeros(&mut self, ticket: &mut u64, at: u64, len: u64) {
        self.said.push(Effect::Zeros(*ticket, at, len));
    }

    fn volume(&mut self, attachment: u32) -> Option<Vol> {
        self.volumes.iter().find(|v| v.attachment == Some(attachment)).copied()
    }
}

/// What a write fills a sector with: who it is, and where.
pub(crate) fn fill(volume: usize, number: u64, sector: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    if number == 0 {
        return bytes;
    }
    for (i, eight) in (1u64..).zip(bytes.chunks_exact_mut(8)) {
        let word = number << 24 ^ sector << 8 ^ (volume as u64) << 4 ^ i << 56;
        eight.copy_from_slice(&word.to_le_bytes());
    }
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Which write filled it, if it is whole; 0: zeros.
pub(crate) fn filled(volume: usize, sector: u64, bytes: &[u8]) -> Option<u64> {
    let number = u64::from_le_bytes(bytes[..8].try_into().ok()?);
    (bytes == fill(volume, number, sector)).then_some(number)
}

/// A batch of the log as the device gets it.
pub(crate) fn flat(write: &ToWrite<Bytes>) -> Vec<u8> {
    let mut bytes = write.head.clone();
    bytes.resize(write.len as usize, 0);
    for (at, payload) in &write.payload {
        bytes[*at as usize..*at as usize + payload.len].copy_from_slice(payload.as_slice());
    }
    bytes
}
