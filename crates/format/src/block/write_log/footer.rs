//! The footer of a segment: what the headers of all its batches say, once more. A start reads it in place of the segment, and
//! it knows which records were lost where a header is damaged.
//!
//! ```text
//! footer          batches of 56 bytes, in the order in which they lie in the segment
//!                 records of 48 bytes, those of the first batch, then of the second, ... (see `record`)
//!                 checksums of 4 bytes, likewise
//!                 zeros
//!                 end, the last 96 bytes of the segment
//!
//! batch    0   8  number                                  32   8  number known durable
//!          8   8  run                                     40   8  wall time
//!         16   8  hash of its head                        48   4  position in the segment
//!         24   8  hash of the head before                 52   4  records
//!
//! end      0   8  magic "LARDERWF"                        48   4  attachment number, parked; 0 in the main chain
//!          8   4  CRC-32C: the end from byte 12, then     52   4  bytes of the footer, a multiple of the sector
//!                 the footer before the end               56   4  batches
//!         12   4  format version                          60   4  records
//!         16  16  UUID of the cache                       64   4  checksums
//!         32   8  generation of the segment               68  28  zero
//!         40   8  number of the last batch known durable
//! ```
//!
//! A footer is written when the payload before it is durable, so a segment with a footer that verifies is whole but for later
//! damage. It leaves out batches that were lost before it was written.

use super::batch::{Batch, Head};
use super::record::{Contents, MAX_RECORDS, RECORD_BYTES, Shape};
use super::{PartError, SegmentGeometry, VERSION, must};
use crate::le;
use crate::superblock::Uuid;

/// Bytes of the end: enough to learn how long the footer is.
pub const END_BYTES: usize = 96;

const BATCH_BYTES: usize = 56;
const MAGIC: [u8; 8] = *b"LARDERWF";
const CRC_FROM: usize = 12;

/// Bytes that a footer has of a batch of this shape.
pub fn of_batch(shape: Shape) -> u32 {
    BATCH_BYTES as u32 + shape.records() * RECORD_BYTES as u32 + shape.sums() * 4
}

/// Bytes of the footer of a segment with so many batches, records and checksums.
pub fn bytes(batches: u32, records: u32, sums: u32, sector: u32) -> u32 {
    let contents = u64::from(batches) * BATCH_BYTES as u64
        + u64::from(records) * RECORD_BYTES as u64
        + u64::from(sums) * 4;
    let bytes = (contents + END_BYTES as u64).next_multiple_of(sector.into());
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// What a footer says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footer {
    /// The cache.
    pub cache: Uuid,
    /// Generation of the segment.
    pub generation: u64,
    /// Attachment number of the volume that the segment is parked for; 0 in the main chain.
    pub parked: u32,
    /// Number of the last batch that was known durable when the footer was written: that of the segment's last, or more.
    pub known: u64,
    /// The batches, as their headers say.
    pub batches: Vec<Batch>,
}

impl Footer {
    fn check(&self, geometry: SegmentGeometry, bytes: u32) -> Result<(), (&'static str, u64)> {
        let most =
            geometry.bytes().checked_sub(bytes).ok_or(("bytes of the footer", bytes.into()))?;
        let (mut number, mut run, mut end) = (0, 0, geometry.sector());
        for Batch { head, contents, .. } in &self.batches {
            must("batch number", head.number, head.number > number)?;
            must("batch known durable", head.known, head.known < head.number)?;
            must("run", head.run, head.run >= run)?;
            must("position of a batch", head.at.into(), head.at >= end)?;
            let aligned = head.at.is_multiple_of(geometry.sector());
            must("position of a batch", head.at.into(), aligned && head.at <= most)?;
            let records = contents.records().len() as u64;
            must("records of a batch", records, records > 0)?;
            (number, run) = (head.number, head.run);
            end = head.at + contents.shape().bytes(geometry.sector());
            must("end of a batch", end.into(), end <= most)?;
        }
        must("batch known durable", self.known, self.known >= number)
    }

    fn bytes(&self, sector: u32) -> u32 {
        let shapes = || self.batches.iter().map(|batch| batch.contents.shape());
        let records: u32 = shapes().map(|shape| shape.records()).sum();
        let sums: u32 = shapes().map(|shape| shape.sums()).sum();
        bytes(self.batches.len() as u32, records, sums, sector)
    }

    /// Whether it can be written: its batches are in their order, lie in the segment, leave room for it, and the last is known durable.
    pub fn fits(&self, geometry: SegmentGeometry) -> bool {
        self.check(geometry, self.bytes(geometry.sector())).is_ok()
    }

    /// The footer: the last bytes of the segment.
    ///
    /// # Panics
    /// If a batch is of another cache, segment or chain, the batches are not in their order, overlap, do not lie in the segment
    /// or leave no room for the footer ([`super::Room`]), or the last is not known durable.
    pub fn encode(&self, geometry: SegmentGeometry) -> Vec<u8> {
        let shapes = || self.batches.iter().map(|batch| batch.contents.shape());
        let records: u32 = shapes().map(|shape| shape.records()).sum();
        let sums: u32 = shapes().map(|shape| shape.sums()).sum();
        let batches = self.batches.len() as u32;
        let bytes = bytes(batches, records, sums, geometry.sector());
        assert_eq!(self.check(geometry, bytes), Ok(()), "no footer");
        let mut out = vec![0; bytes as usize];
        let (body, end) = out.split_at_mut(bytes as usize - END_BYTES);
        let (rows, rest) = body.split_at_mut(self.batches.len() * BATCH_BYTES);
        let (mut records_at, mut sums_at) = rest.split_at_mut(records as usize * RECORD_BYTES);
        for (row, Batch { head, hash, contents }) in
            rows.chunks_exact_mut(BATCH_BYTES).zip(&self.batches)
        {
            let mine = (head.cache, head.generation, head.parked);
            assert_eq!(mine, (self.cache, self.generation, self.parked), "another segment's batch");
            let shape = contents.shape();
            let words = [head.number, head.run, *hash, head.before, head.known, head.time];
            for (at, word) in row.chunks_exact_mut(8).zip(words) {
                at.copy_from_slice(&word.to_le_bytes());
            }
            row[48..52].copy_from_slice(&head.at.to_le_bytes());
            row[52..56].copy_from_slice(&shape.records().to_le_bytes());
            let (mine, rest) = records_at.split_at_mut(shape.records() as usize * RECORD_BYTES);
            contents.put_records(mine);
            records_at = rest;
            let (mine, rest) = sums_at.split_at_mut(shape.sums() as usize * 4);
            contents.put_sums(mine);
            sums_at = rest;
        }
        let mut put = |at: usize, bytes: &[u8]| end[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.cache.0);
        put(32, &self.generation.to_le_bytes());
        put(40, &self.known.to_le_bytes());
        put(48, &self.parked.to_le_bytes());
        put(52, &bytes.to_le_bytes());
        put(56, &batches.to_le_bytes());
        put(60, &records.to_le_bytes());
        put(64, &sums.to_le_bytes());
        let crc = checksum(body, end);
        end[8..12].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads the footer of the segment of `generation` from the last bytes of the segment, as many as are at hand.
    ///
    /// # Errors
    /// Any [`PartError`] but `Place`. `Short` says how many bytes the footer has, at most the segment's; it may be a torn one
    /// that says so. A record's number is that in the footer.
    pub fn decode(
        last: &[u8],
        cache: Uuid,
        generation: u64,
        geometry: SegmentGeometry,
    ) -> Result<Footer, PartError> {
        use PartError as E;
        let short = |need| E::Short { have: last.len(), need };
        let end = last.last_chunk::<END_BYTES>().ok_or(short(END_BYTES))?;
        if !end.starts_with(&MAGIC) {
            return Err(E::Absent);
        }
        let u64_at = |at: usize| le(&end[at..at + 8]);
        let u32_at = |at: usize| le(&end[at..at + 4]) as u32;
        let bytes = u32_at(52);
        if !bytes.is_multiple_of(geometry.sector()) || !(1..=geometry.bytes()).contains(&bytes) {
            return Err(E::Torn);
        }
        let start = last.len().checked_sub(bytes as usize).ok_or(short(bytes as usize))?;
        let body = &last[start..last.len() - END_BYTES];
        if u32_at(8) != checksum(body, end) {
            return Err(E::Torn);
        }
        if u32_at(12) != VERSION {
            return Err(E::Version { found: u32_at(12) });
        }
        let found = Uuid(end[16..32].try_into().expect("16 bytes"));
        if found != cache {
            return Err(E::Cache { found });
        }
        if u64_at(32) != generation {
            return Err(E::Generation { found: u64_at(32) });
        }
        let (batches, records, sums) = (u32_at(56), u32_at(60), u32_at(64));
        let need = self::bytes(batches, records, sums, geometry.sector());
        must("bytes of the footer", bytes.into(), bytes == need)?;
        let (rows, rest) = body.split_at(batches as usize * BATCH_BYTES);
        let (mut records_left, rest) = rest.split_at(records as usize * RECORD_BYTES);
        let mut sums_left = &rest[..sums as usize * 4];
        let mut read = 0;
        let mut found = Footer {
            cache,
            generation,
            parked: u32_at(48),
            known: u64_at(40),
            batches: Vec::new(),
        };
        for row in rows.chunks_exact(BATCH_BYTES) {
            let word = |n: usize| le(&row[n * 8..n * 8 + 8]);
            let mine = le(&row[52..56]) as u32;
            must("records of a batch", mine.into(), mine <= MAX_RECORDS)?;
            let split = records_left.split_at_checked(mine as usize * RECORD_BYTES);
            let (bytes, rest) =
                split.ok_or(E::Field { field: "records of a batch", value: mine.into() })?;
            records_left = rest;
            let mut contents = Contents::get_records(bytes)
                .map_err(|(n, (field, value))| E::Record { number: read + n, field, value })?;
            let taken = contents.take_sums(&mut sums_left);
            taken.ok_or(E::Field { field: "checksums", value: sums.into() })?;
            read += mine;
            let head = Head {
                cache,
                generation,
                at: le(&row[48..52]) as u32,
                parked: found.parked,
                number: word(0),
                run: word(1),
                before: word(3),
                known: word(4),
                time: word(5),
            };
            found.batches.push(Batch { head, hash: word(2), contents });
        }
        must("records", records.into(), records_left.is_empty())?;
        must("checksums", sums.into(), sums_left.is_empty())?;
        found.check(geometry, bytes)?;
        Ok(found)
    }
}

fn checksum(body: &[u8], end: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&end[CRC_FROM..]), body)
}
