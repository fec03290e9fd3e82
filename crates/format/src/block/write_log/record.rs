//! Records of the write log, as they lie in the header of a batch and in the footer of a segment.
//!
//! ```text
//! record   0  8  sequence in its volume                   24  8  generation of the volume (G)
//!          8  8  dependency: a sequence before its own    32  4  attachment number of the volume
//!         16  8  offset in the volume                     36  4  position of its payload, from the payload's first byte
//!                                                         40  6  length
//!                                                         46  1  kind: 1 WRITE, 2 ZERO, 3 TRIM, 4 MARK, 5 FRONTIER
//!                                                         47  1  flags: 1 FUA, 2 may punch, 4 unreadable
//! ```
//!
//! | kind | length | payload | flags |
//! | --- | --- | --- | --- |
//! | WRITE | 1 to 1 MiB | the client's bytes | FUA, unreadable |
//! | ZERO, TRIM | 1 to (2^32 - 1) * 512 | none | FUA, may punch |
//! | MARK | 1 to 255 | the mark's name, UTF-8; offset 0 | FUA, unreadable |
//! | FRONTIER | of the table | the table; every other field is 0; the first of its batch | none |
//!
//! An *unreadable* record is a parked copy of one whose payload was lost: it has its length and no payload. Payloads lie in
//! the order of their records, each at the next multiple of 512; a record without payload has position 0. After the records
//! come the checksums of all payloads, in the same order, for each payload one for each of its [`pieces`].

use std::ops::Range;

use super::frontier::MAX_FRONTIER;
use super::{BLOCK, Wrong, must, pieces};
use crate::le;

/// Bytes of a record in a header or footer, without checksums.
pub const RECORD_BYTES: usize = 48;
/// Most bytes of a WRITE.
pub const MAX_WRITE: u64 = 1 << 20;
/// Most bytes of a ZERO or a TRIM.
pub const MAX_RANGE: u64 = u32::MAX as u64 * 512;
/// Most bytes of the name of a mark.
pub const MAX_MARK: usize = 255;
/// No volume reaches beyond this offset.
pub const MAX_VOLUME: u64 = 1 << 63;
/// Most records of a batch.
pub const MAX_RECORDS: u32 = 2048;
/// Most bytes of payload of a batch, with the zeros between payloads.
pub const MAX_PAYLOAD: u32 = 1 << 20;

const BITS48: u64 = (1 << 48) - 1;

/// What a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes.
    Write,
    /// A range that reads as zeros.
    Zero,
    /// A range that the client needs no more.
    Trim,
    /// A name for this place in the volume's sequence.
    Mark,
    /// How far the volumes have come ([`super::frontier`]); of no volume itself.
    Frontier,
}

impl Kind {
    pub(crate) fn code(self) -> u8 {
        match self {
            Kind::Write => 1,
            Kind::Zero => 2,
            Kind::Trim => 3,
            Kind::Mark => 4,
            Kind::Frontier => 5,
        }
    }

    pub(crate) fn of(code: u8) -> Option<Kind> {
        let all = [Kind::Write, Kind::Zero, Kind::Trim, Kind::Mark, Kind::Frontier];
        all.into_iter().find(|kind| kind.code() == code)
    }
}

/// What else is to be known of a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// The client asked that it be durable before it is answered.
    pub fua: bool,
    /// The store may give up the space of the range, as long as it reads as zeros.
    pub may_punch: bool,
    /// Its payload was lost before it was copied here: its range is EIO.
    pub unreadable: bool,
}

impl Flags {
    fn bits(self) -> u8 {
        u8::from(self.fua) | u8::from(self.may_punch) << 1 | u8::from(self.unreadable) << 2
    }

    fn of(bits: u8) -> Option<Flags> {
        let has = |bit| bits & bit != 0;
        let flags = Flags { fua: has(1), may_punch: has(2), unreadable: has(4) };
        (flags.bits() == bits).then_some(flags)
    }
}

/// One change of a volume, or a mark, or a FRONTIER.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The volume's attachment number on this cache, from 1; 0 of a FRONTIER.
    pub attachment: u32,
    /// The volume's generation (G).
    pub generation: u64,
    /// Its number in the volume, from 1.
    pub sequence: u64,
    /// The sequence that must be in the store before this record goes there; less than its own.
    pub dependency: u64,
    /// First byte in the volume.
    pub offset: u64,
    /// Bytes of the range, the mark's name or the FRONTIER's table.
    pub length: u64,
    /// What it is.
    pub kind: Kind,
    /// What else is to be known.
    pub flags: Flags,
}

impl Record {
    /// A FRONTIER whose table has `bytes`.
    pub fn frontier(bytes: usize) -> Record {
        Record {
            attachment: 0,
            generation: 0,
            sequence: 0,
            dependency: 0,
            offset: 0,
            length: bytes as u64,
            kind: Kind::Frontier,
            flags: Flags::default(),
        }
    }

    /// Bytes of its payload; 0 without one.
    pub fn payload_bytes(&self) -> u64 {
        match self.kind {
            Kind::Zero | Kind::Trim => 0,
            _ if self.flags.unreadable => 0,
            Kind::Write | Kind::Mark | Kind::Frontier => self.length,
        }
    }

    /// Refuses what no record can be.
    ///
    /// # Errors
    /// The name of the first wrong field, and its value.
    pub fn check(&self) -> Result<(), (&'static str, u64)> {
        let most = match self.kind {
            Kind::Write => MAX_WRITE,
            Kind::Zero | Kind::Trim => MAX_RANGE,
            Kind::Mark => MAX_MARK as u64,
            Kind::Frontier => MAX_FRONTIER as u64,
        };
        must("length", self.length, (1..=most).contains(&self.length))?;
        let flags = Flags {
            fua: self.kind != Kind::Frontier,
            may_punch: matches!(self.kind, Kind::Zero | Kind::Trim),
            unreadable: matches!(self.kind, Kind::Write | Kind::Mark),
        };
        must("flags", self.flags.bits().into(), self.flags.bits() & !flags.bits() == 0)?;
        if self.kind == Kind::Frontier {
            must("attachment number", self.attachment.into(), self.attachment == 0)?;
            must("generation", self.generation, self.generation == 0)?;
            must("sequence", self.sequence, self.sequence == 0)?;
            must("dependency", self.dependency, self.dependency == 0)?;
        } else {
            must("attachment number", self.attachment.into(), self.attachment > 0)?;
            must("sequence", self.sequence, self.sequence > 0)?;
            must("dependency", self.dependency, self.dependency < self.sequence)?;
        }
        let ranged = matches!(self.kind, Kind::Write | Kind::Zero | Kind::Trim);
        let most = if ranged { MAX_VOLUME - self.length } else { 0 };
        must("offset", self.offset, self.offset <= most)
    }

    fn put(&self, out: &mut [u8], position: u32) {
        out[..8].copy_from_slice(&self.sequence.to_le_bytes());
        out[8..16].copy_from_slice(&self.dependency.to_le_bytes());
        out[16..24].copy_from_slice(&self.offset.to_le_bytes());
        out[24..32].copy_from_slice(&self.generation.to_le_bytes());
        out[32..36].copy_from_slice(&self.attachment.to_le_bytes());
        out[36..40].copy_from_slice(&position.to_le_bytes());
        out[40..48].copy_from_slice(&pack(self.length, self.kind.code(), self.flags.bits()));
    }

    fn get(bytes: &[u8]) -> Result<(Record, u32), Wrong> {
        let (length, kind, flags) = unpack(&bytes[40..48]);
        let record = Record {
            sequence: le(&bytes[..8]),
            dependency: le(&bytes[8..16]),
            offset: le(&bytes[16..24]),
            generation: le(&bytes[24..32]),
            attachment: le(&bytes[32..36]) as u32,
            length,
            kind: Kind::of(kind).ok_or(("kind", kind.into()))?,
            flags: Flags::of(flags).ok_or(("flags", flags.into()))?,
        };
        record.check()?;
        Ok((record, le(&bytes[36..40]) as u32))
    }
}

/// A length of less than 2^48, a kind and flags, in eight bytes.
pub(crate) fn pack(length: u64, kind: u8, flags: u8) -> [u8; 8] {
    (length & BITS48 | u64::from(kind) << 48 | u64::from(flags) << 56).to_le_bytes()
}

/// What [`pack`] packed.
pub(crate) fn unpack(bytes: &[u8]) -> (u64, u8, u8) {
    (le(&bytes[..6]), bytes[6], bytes[7])
}

/// How large a batch of some records is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    records: u32,
    sums: u32,
    payload: u32,
}

impl Shape {
    /// The shape with one record more, or nothing if no batch has room for it: it would have more than [`MAX_RECORDS`]
    /// records or more than [`MAX_PAYLOAD`] bytes of payload.
    pub fn with(self, record: &Record) -> Option<Shape> {
        let bytes = record.payload_bytes();
        let payload = if bytes == 0 {
            u64::from(self.payload)
        } else {
            u64::from(self.payload).next_multiple_of(BLOCK as u64).checked_add(bytes)?
        };
        let fits = self.records < MAX_RECORDS && payload <= u64::from(MAX_PAYLOAD);
        fits.then(|| Shape {
            records: self.records + 1,
            sums: self.sums + pieces::count(bytes) as u32,
            payload: payload as u32,
        })
    }

    /// The shape of these records together, or nothing if no batch has room for them.
    pub fn of<'a>(records: impl IntoIterator<Item = &'a Record>) -> Option<Shape> {
        records.into_iter().try_fold(Shape::default(), Shape::with)
    }

    /// Records.
    pub fn records(self) -> u32 {
        self.records
    }

    /// Checksums.
    pub fn sums(self) -> u32 {
        self.sums
    }

    /// Bytes of payload, with the zeros between payloads.
    pub fn payload_bytes(self) -> u32 {
        self.payload
    }

    /// Bytes of the header: a multiple of 512.
    pub fn header_bytes(self) -> u32 {
        let contents = self.records * RECORD_BYTES as u32 + self.sums * 4;
        (super::batch::HEAD_BYTES as u32 + contents).next_multiple_of(BLOCK as u32)
    }

    /// Bytes of the batch on a device with sectors of `sector` bytes.
    pub fn bytes(self, sector: u32) -> u32 {
        (self.header_bytes() + self.payload).next_multiple_of(sector)
    }
}

/// The records of a batch with the checksums of their payloads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    records: Vec<Record>,
    sums: Vec<u32>,
    shape: Shape,
}

/// A record, and what belongs to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The record.
    pub record: &'a Record,
    /// Where its payload lies, from the first byte behind the batch's header; empty without payload.
    pub payload: Range<u32>,
    /// The checksums of its [`pieces`].
    pub sums: &'a [u32],
}

impl Contents {
    /// These records with these checksums.
    ///
    /// # Panics
    /// If a record cannot be, the records are too many or too large for a batch, or the checksums are not theirs in number.
    pub(crate) fn new(records: Vec<Record>, sums: Vec<u32>) -> Contents {
        for (i, record) in records.iter().enumerate() {
            assert_eq!(record.check(), Ok(()), "record {i} cannot be: {record:?}");
            assert!(
                i == 0 || record.kind != Kind::Frontier,
                "a FRONTIER is the first of its batch"
            );
        }
        let shape = Shape::of(&records).expect("the records fit into a batch");
        assert_eq!(shape.sums as usize, sums.len(), "checksums");
        Contents { records, sums, shape }
    }

    /// The records.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// The checksums of all payloads.
    pub fn sums(&self) -> &[u32] {
        &self.sums
    }

    /// How large they are together.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Each record with its payload's place and checksums.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let (mut end, mut sums) = (0, &self.sums[..]);
        self.records.iter().map(move |record| {
            let bytes = record.payload_bytes() as u32;
            let mine;
            (mine, sums) = sums.split_at(pieces::count(bytes.into()) as usize);
            let payload = if bytes == 0 { 0..0 } else { place(end, bytes) };
            end = end.max(payload.end);
            Entry { record, payload, sums: mine }
        })
    }

    /// Writes the records to `out`, which they fill.
    pub(crate) fn put_records(&self, out: &mut [u8]) {
        for (bytes, entry) in out.chunks_exact_mut(RECORD_BYTES).zip(self.entries()) {
            entry.record.put(bytes, entry.payload.start);
        }
    }

    /// Writes the checksums to `out`, which they fill.
    pub(crate) fn put_sums(&self, out: &mut [u8]) {
        for (bytes, sum) in out.chunks_exact_mut(4).zip(&self.sums) {
            bytes.copy_from_slice(&sum.to_le_bytes());
        }
    }

    /// Reads `records`, whole records and at most [`MAX_RECORDS`] of them. The checksums are yet to be given
    /// ([`Contents::take_sums`]): how many they are is in the [`Contents::shape`].
    ///
    /// # Errors
    /// The number of the first record that cannot be, the field and its value.
    pub(crate) fn get_records(records: &[u8]) -> Result<Contents, (u32, Wrong)> {
        let mut found = Contents::default();
        for (number, bytes) in (0..).zip(records.chunks_exact(RECORD_BYTES)) {
            let wrong = |field, value| (number, (field, value));
            let (record, position) = Record::get(bytes).map_err(|wrong| (number, wrong))?;
            let bytes = record.payload_bytes() as u32;
            let want = if bytes == 0 { 0 } else { place(found.shape.payload, bytes).start };
            if position != want {
                return Err(wrong("payload position", position.into()));
            }
            if record.kind == Kind::Frontier && number > 0 {
                return Err(wrong("kind", record.kind.code().into()));
            }
            let shape = found.shape.with(&record);
            found.shape = shape.ok_or(wrong("length", record.length))?;
            found.records.push(record);
        }
        Ok(found)
    }

    /// Takes its checksums from the beginning of `sums`, and leaves the rest; nothing if they are too few.
    pub(crate) fn take_sums(&mut self, sums: &mut &[u8]) -> Option<()> {
        let (mine, rest) = sums.split_at_checked(self.shape.sums as usize * 4)?;
        self.sums = mine.chunks_exact(4).map(|sum| le(sum) as u32).collect();
        *sums = rest;
        Some(())
    }
}

/// Where `bytes` of payload lie behind payloads that reach to `end`.
fn place(end: u32, bytes: u32) -> Range<u32> {
    let start = end.next_multiple_of(BLOCK as u32);
    start..start + bytes
}

/// The name of a mark: UTF-8 of 1 to [`MAX_MARK`] bytes, or nothing if the payload is not that.
pub fn mark_name(payload: &[u8]) -> Option<&str> {
    let name = std::str::from_utf8(payload).ok()?;
    (1..=MAX_MARK).contains(&name.len()).then_some(name)
}
