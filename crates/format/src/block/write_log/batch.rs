//! A batch: what one device write carries.
//!
//! ```text
//! head     0   8  magic "LARDERWB"                           | fixed in every version
//!          8   4  CRC-32C of the header from byte 12         |
//!         12   4  format version                             |
//!         16   4  bytes of the header, a multiple of 512     |
//!         20   4  records, 1 to 2,048
//!         24   4  bytes of payload, at most 1 MiB
//!         28   4  position of the batch in its segment
//!         32  16  UUID of the cache
//!         48   8  generation of the segment
//!         56   8  number of the batch, from 1
//!         64   8  run: the superblock's epoch
//!         72   8  hash of the head before, 0 for the first of a chain
//!         80   8  number of the last batch that was known durable when this one was written; less than its own
//!         88   8  wall time
//!         96   4  attachment number of the volume that the segment is parked for; 0 in the main chain
//!        100  28  zero
//!
//! header   0 128  head
//!        128      records of 48 bytes (see `record`)
//!                 checksums of 4 bytes
//!                 zeros to a multiple of 512
//! ```
//!
//! The payload begins behind the header; the batch ends with zeros at the next sector. One checksum covers the whole header,
//! records and checksums of payload included: a header that verifies is believed as a whole. A batch names its position, so
//! neither a misdirected write nor a client's copy of a log is taken for a batch.
//!
//! The hash of a head is the low half of SipHash-1-3-128 of its 128 bytes under the cache's UUID. The head has the run and
//! the header's checksum, so the hash stands for both.

use super::record::{Contents, MAX_PAYLOAD, MAX_RECORDS, RECORD_BYTES, Record, Shape};
use super::{BLOCK, Link, PartError, VERSION, hash, must, pieces};
use crate::le;
use crate::superblock::Uuid;

/// Bytes of the head.
pub const HEAD_BYTES: usize = 128;
/// Most bytes of a header.
pub const MAX_HEADER: usize = {
    // A payload begins at a multiple of 512: each record has at most one piece that is not full.
    let sums = MAX_RECORDS as usize + MAX_PAYLOAD as usize / pieces::PIECE;
    (HEAD_BYTES + MAX_RECORDS as usize * RECORD_BYTES + sums * 4).next_multiple_of(BLOCK)
};

const MAGIC: [u8; 8] = *b"LARDERWB";
const CRC_FROM: usize = 12;

/// What a batch says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The cache.
    pub cache: Uuid,
    /// Generation of its segment.
    pub generation: u64,
    /// Its position in the segment.
    pub at: u32,
    /// Attachment number of the volume that the segment is parked for; 0 in the main chain.
    pub parked: u32,
    /// Its number, from 1; in a parked segment counted in that segment.
    pub number: u64,
    /// The run that wrote it: the superblock's epoch.
    pub run: u64,
    /// Hash of the batch before; 0 for the first of a chain.
    pub before: u64,
    /// Number of the last batch that was known durable when this one was written.
    pub known: u64,
    /// When it was written.
    pub time: u64,
}

impl Head {
    fn check(&self) -> Result<(), (&'static str, u64)> {
        must("batch number", self.number, (1..u64::MAX).contains(&self.number))?;
        must("batch known durable", self.known, self.known < self.number)
    }
}

/// A record to be written, with its payload.
#[derive(Clone, Copy, Debug)]
pub struct Item<'a> {
    /// The record.
    pub record: Record,
    /// Its payload, as long as [`Record::payload_bytes`] says.
    pub payload: &'a [u8],
    /// Its payload's checksums where they are known, as they are of a record that is copied: new ones would vouch for
    /// bytes that were damaged in the meantime.
    pub sums: Option<&'a [u32]>,
}

/// Where a batch is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The cache.
    pub cache: Uuid,
    /// Generation of the segment.
    pub generation: u64,
    /// Position in the segment.
    pub at: u32,
    /// Bytes of the segment: the batch ends before.
    pub segment: u32,
}

/// A batch whose header is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// What it says of itself.
    pub head: Head,
    /// What the next batch of the chain calls it.
    pub hash: u64,
    /// Its records.
    pub contents: Contents,
}

/// A payload that is not what the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the payload of record {record} is damaged in its 4 KiB piece {piece}")]
pub struct DamagedPayload {
    /// The record, from 0.
    pub record: u32,
    /// The piece, from 0.
    pub piece: u32,
}

impl Batch {
    /// Its bytes on a device with sectors of `sector` bytes: the next batch of the segment begins behind them.
    pub fn bytes(&self, sector: u32) -> u32 {
        self.contents.shape().bytes(sector)
    }

    /// What the rules of the chain need to know of it.
    pub fn link(&self) -> Link {
        let Head { number, run, generation, before, known, .. } = self.head;
        Link { number, run, generation, hash: self.hash, before, known }
    }

    /// Verifies all of its payload: the bytes behind its header, or more.
    ///
    /// # Errors
    /// The first damaged piece; pieces that are not at hand count as damaged.
    pub fn check_payload(&self, payload: &[u8]) -> Result<(), DamagedPayload> {
        for (record, entry) in (0..).zip(self.contents.entries()) {
            let (from, to) = (entry.payload.start as usize, entry.payload.end as usize);
            let mine = &payload[from.min(payload.len())..to.min(payload.len())];
            let piece = match pieces::check(entry.sums, 0, mine) {
                Err(piece) => piece,
                Ok(()) if mine.len() < to - from => mine.len() / pieces::PIECE,
                Ok(()) => continue,
            };
            return Err(DamagedPayload { record, piece: piece as u32 });
        }
        Ok(())
    }
}

/// Writes a batch to `out`, and answers it as [`decode`] will. Each payload is read for its checksums and copied once.
///
/// # Panics
/// If `out` is not as long as the [`Shape`] of the records says for sectors of 512 bytes or more, or as
/// [`encode_header`].
pub fn encode(out: &mut [u8], head: &Head, items: &[Item<'_>]) -> Batch {
    let shape = Shape::of(items.iter().map(|item| &item.record)).expect("the records fit");
    let (header, payload) = out.split_at_mut(shape.header_bytes() as usize);
    let batch = encode_header(header, head, items);
    let mut end = 0;
    for (item, entry) in items.iter().zip(batch.contents.entries()) {
        if !item.payload.is_empty() {
            let (from, to) = (entry.payload.start as usize, entry.payload.end as usize);
            payload[end..from].fill(0);
            payload[from..to].copy_from_slice(item.payload);
            end = to;
        }
    }
    payload[end..].fill(0);
    batch
}

/// Writes the header of a batch to `out`, which it fills, for a device write that gathers the payloads from where they are:
/// each at the position that [`Contents::entries`] says.
///
/// # Panics
/// If `out` is not [`Shape::header_bytes`] long, the batch number is 0 or not above the one known durable, a record cannot
/// be ([`Record::check`]), a FRONTIER is not the first record, the records do not fit a batch, there are none, or payload or
/// checksums are not as long as the record says.
pub fn encode_header(out: &mut [u8], head: &Head, items: &[Item<'_>]) -> Batch {
    assert!(!items.is_empty(), "a batch without records");
    let mut sums = Vec::new();
    for Item { record, payload, sums: known } in items {
        assert_eq!(record.payload_bytes(), payload.len() as u64, "payload of {record:?}");
        match known {
            Some(known) => sums.extend_from_slice(known),
            None => sums.extend(pieces::sums(payload)),
        }
    }
    encode_header_of(out, head, items.iter().map(|item| item.record).collect(), sums)
}

/// The same where only the checksums of the payloads are at hand: those of the first record first.
///
/// # Panics
/// As [`encode_header`].
pub fn encode_header_of(
    out: &mut [u8],
    head: &Head,
    records: Vec<Record>,
    sums: Vec<u32>,
) -> Batch {
    assert_eq!(head.check(), Ok(()), "no head of a batch: {head:?}");
    assert!(!records.is_empty(), "a batch without records");
    let contents = Contents::new(records, sums);
    let shape = contents.shape();
    assert_eq!(out.len(), shape.header_bytes() as usize, "bytes of the header");
    let (front, rest) = out.split_at_mut(HEAD_BYTES);
    let (records, rest) = rest.split_at_mut(shape.records() as usize * RECORD_BYTES);
    let (sums, rest) = rest.split_at_mut(shape.sums() as usize * 4);
    contents.put_records(records);
    contents.put_sums(sums);
    rest.fill(0);
    front.fill(0);
    let mut put = |at: usize, bytes: &[u8]| front[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC);
    put(12, &VERSION.to_le_bytes());
    put(16, &shape.header_bytes().to_le_bytes());
    put(20, &shape.records().to_le_bytes());
    put(24, &shape.payload_bytes().to_le_bytes());
    put(28, &head.at.to_le_bytes());
    put(32, &head.cache.0);
    put(48, &head.generation.to_le_bytes());
    put(56, &head.number.to_le_bytes());
    put(64, &head.run.to_le_bytes());
    put(72, &head.before.to_le_bytes());
    put(80, &head.known.to_le_bytes());
    put(88, &head.time.to_le_bytes());
    put(96, &head.parked.to_le_bytes());
    let crc = crc32c::crc32c(&out[CRC_FROM..]);
    out[8..12].copy_from_slice(&crc.to_le_bytes());
    Batch { head: *head, hash: hash(head.cache, &out[..HEAD_BYTES]) as u64, contents }
}

/// Reads the header of the batch at `place` from `bytes`, which begin there; the payload is left alone
/// ([`Batch::check_payload`]).
///
/// # Errors
/// Any [`PartError`]. `Short` says how many bytes the header has: at most [`MAX_HEADER`]. It may be a torn head that says so.
pub fn decode(bytes: &[u8], place: &Place) -> Result<Batch, PartError> {
    use PartError as E;
    if !bytes.starts_with(&MAGIC) {
        return Err(E::Absent);
    }
    let short = |need| E::Short { have: bytes.len(), need };
    let head = bytes.get(..HEAD_BYTES).ok_or(short(BLOCK))?;
    let u64_at = |at: usize| le(&head[at..at + 8]);
    let u32_at = |at: usize| le(&head[at..at + 4]) as u32;
    let header_bytes = u32_at(16) as usize;
    if !header_bytes.is_multiple_of(BLOCK) || !(BLOCK..=MAX_HEADER).contains(&header_bytes) {
        return Err(E::Torn);
    }
    let header = bytes.get(..header_bytes).ok_or(short(header_bytes))?;
    if u32_at(8) != crc32c::crc32c(&header[CRC_FROM..]) {
        return Err(E::Torn);
    }
    if u32_at(12) != VERSION {
        return Err(E::Version { found: u32_at(12) });
    }
    let found = Head {
        cache: Uuid(head[32..48].try_into().expect("16 bytes")),
        generation: u64_at(48),
        at: u32_at(28),
        parked: u32_at(96),
        number: u64_at(56),
        run: u64_at(64),
        before: u64_at(72),
        known: u64_at(80),
        time: u64_at(88),
    };
    if found.cache != place.cache {
        return Err(E::Cache { found: found.cache });
    }
    if found.generation != place.generation {
        return Err(E::Generation { found: found.generation });
    }
    if found.at != place.at {
        return Err(E::Place { found: found.at });
    }
    found.check()?;
    let records = u32_at(20);
    must("records", records.into(), (1..=MAX_RECORDS).contains(&records))?;
    let records_end = HEAD_BYTES + records as usize * RECORD_BYTES;
    must("records", records.into(), records_end <= header_bytes)?;
    let mut contents = Contents::get_records(&header[HEAD_BYTES..records_end])
        .map_err(|(number, (field, value))| E::Record { number, field, value })?;
    let shape = contents.shape();
    must("header bytes", header_bytes as u64, header_bytes == shape.header_bytes() as usize)?;
    must("payload bytes", u32_at(24).into(), u32_at(24) == shape.payload_bytes())?;
    let end = u64::from(found.at) + u64::from(shape.header_bytes() + shape.payload_bytes());
    must("end of the batch", end, end <= u64::from(place.segment))?;
    contents.take_sums(&mut &header[records_end..]).ok_or(E::Torn)?;
    Ok(Batch { head: found, hash: hash(found.cache, head) as u64, contents })
}
