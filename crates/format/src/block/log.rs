//! Pages of the map's log and of its snapshots.
//!
//! ```text
//! log        0  4  magic "LMLG"         8  8  generation    24  8  epoch of the run      40  8  first page of its batch
//! page       4  4  CRC-32C of 8..4096  16  8  page number   32  4  records               48  8  pages of the log before
//!           36  4  zero                56  8  zero                                       64     252 records of 16 bytes
//!
//! record     0  5  slot of the device   5  1  0 empty, 1 a line   6  2  zero
//!            8  5  line                13  3  checksum
//!
//! snapshot   0  4  magic "LMSN"         8  8  generation    24  8  zero
//! page       4  4  CRC-32C of 8..4096  16  8  page number   32      508 slots of 8 bytes: line 5, checksum 3;
//!                                                                   all ones: empty
//! ```
//!
//! Generations count snapshots; a snapshot and the log that follows it have the same. A log is read from its first page
//! to the first that is not of its generation, not whole, or of an earlier epoch than the page before: such a page is
//! what an interrupted batch of an earlier run left behind the end.
//!
//! A page that was damaged later would pass for the end, too, and what had become of lines since would be forgotten. Three
//! things tell: a page behind the end whose batch began behind it (a batch is written when what is before it is durable);
//! a log of the next generation, which says how long this one had become; and the [`Reach`] that the superblock and the
//! write-intent map have noted.

use crate::{PAGE_SIZE, le};

/// Records of a log page.
pub const RECORDS_PER_PAGE: usize = (PAGE_SIZE - LOG_HEADER) / RECORD;
/// Slots of a snapshot page.
pub const SLOTS_PER_PAGE: usize = (PAGE_SIZE - SNAPSHOT_HEADER) / 8;
const LOG_HEADER: usize = 64;
const SNAPSHOT_HEADER: usize = 32;
const RECORD: usize = 16;
const LOG_MAGIC: [u8; 4] = *b"LMLG";
const SNAPSHOT_MAGIC: [u8; 4] = *b"LMSN";
const BITS40: u64 = (1 << 40) - 1;
const EMPTY: u64 = u64::MAX;

/// What a slot holds, durably: the line's number (40 bits) and 24 bits of checksum.
pub type Held = Option<(u64, u32)>;

/// A record: a slot of the device (40 bits) and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// The slot, counted over all shards.
    pub slot: u64,
    /// What is there.
    pub holds: Held,
}

/// How far the log had come at a time: all its pages before are durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// The log's generation.
    pub generation: u64,
    /// Its pages.
    pub pages: u64,
}

/// What a log page says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogHead {
    /// Of the snapshot that it follows.
    pub generation: u64,
    /// Which page it is.
    pub number: u64,
    /// The run that wrote it.
    pub epoch: u64,
    /// First page of its batch: all before were durable when it was written.
    pub batch: u64,
    /// Pages that the log of the generation before had when this one began, as far as they count.
    pub before: u64,
}

/// A log page that is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogPage {
    /// What it says of itself.
    pub head: LogHead,
    /// In the order in which they were made.
    pub records: Vec<Record>,
}

fn pack((line, sum): (u64, u32)) -> u64 {
    line & BITS40 | u64::from(sum) << 40
}

fn unpack(word: u64) -> (u64, u32) {
    (word & BITS40, (word >> 40) as u32)
}

fn seal(out: &mut [u8]) {
    let crc = crc32c::crc32c(&out[8..]);
    out[4..8].copy_from_slice(&crc.to_le_bytes());
}

fn is_whole(page: &[u8], magic: [u8; 4], generation: u64, number: u64) -> bool {
    page.len() == PAGE_SIZE
        && page[..4] == magic
        && le(&page[8..16]) == generation
        && le(&page[16..24]) == number
        && le(&page[4..8]) as u32 == crc32c::crc32c(&page[8..])
}

/// Writes a log page to `out`.
///
/// # Panics
/// If `out` is not a page or the records are more than [`RECORDS_PER_PAGE`].
pub fn encode_log(out: &mut [u8], head: LogHead, records: &[Record]) {
    assert!(out.len() == PAGE_SIZE && records.len() <= RECORDS_PER_PAGE, "not a log page");
    out.fill(0);
    out[..4].copy_from_slice(&LOG_MAGIC);
    out[8..16].copy_from_slice(&head.generation.to_le_bytes());
    out[16..24].copy_from_slice(&head.number.to_le_bytes());
    out[24..32].copy_from_slice(&head.epoch.to_le_bytes());
    out[40..48].copy_from_slice(&head.batch.to_le_bytes());
    out[48..56].copy_from_slice(&head.before.to_le_bytes());
    out[32..36].copy_from_slice(&(records.len() as u32).to_le_bytes());
    for (bytes, record) in out[LOG_HEADER..].chunks_exact_mut(RECORD).zip(records) {
        let kind = u64::from(record.holds.is_some());
        bytes[..8].copy_from_slice(&(record.slot & BITS40 | kind << 40).to_le_bytes());
        bytes[8..].copy_from_slice(&record.holds.map_or(0, pack).to_le_bytes());
    }
    seal(out);
}

/// Page `number` of the log of `generation`, or nothing if that is not what `page` is.
pub fn decode_log(page: &[u8], generation: u64, number: u64) -> Option<LogPage> {
    if !is_whole(page, LOG_MAGIC, generation, number) {
        return None;
    }
    let count = le(&page[32..36]) as usize;
    if count > RECORDS_PER_PAGE {
        return None;
    }
    let mut records = Vec::with_capacity(count);
    for bytes in page[LOG_HEADER..].chunks_exact(RECORD).take(count) {
        let head = le(&bytes[..8]);
        let holds = match head >> 40 {
            0 => None,
            1 => Some(unpack(le(&bytes[8..]))),
            _ => return None,
        };
        records.push(Record { slot: head & BITS40, holds });
    }
    let (epoch, batch, before) = (le(&page[24..32]), le(&page[40..48]), le(&page[48..56]));
    Some(LogPage { head: LogHead { generation, number, epoch, batch, before }, records })
}

/// Writes a snapshot page to `out`.
///
/// # Panics
/// If `out` is not a page or the slots are more than [`SLOTS_PER_PAGE`].
pub fn encode_snapshot(out: &mut [u8], generation: u64, number: u64, slots: &[Held]) {
    assert!(out.len() == PAGE_SIZE && slots.len() <= SLOTS_PER_PAGE, "not a snapshot page");
    out.fill(0);
    out[..4].copy_from_slice(&SNAPSHOT_MAGIC);
    out[8..16].copy_from_slice(&generation.to_le_bytes());
    out[16..24].copy_from_slice(&number.to_le_bytes());
    for (i, bytes) in out[SNAPSHOT_HEADER..].chunks_exact_mut(8).enumerate() {
        let word = slots.get(i).copied().flatten().map_or(EMPTY, pack);
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    seal(out);
}

/// The slots of page `number` of the snapshot of `generation`, or nothing if that is not what `page` is.
pub fn decode_snapshot(
    page: &[u8],
    generation: u64,
    number: u64,
) -> Option<impl Iterator<Item = Held> + '_> {
    is_whole(page, SNAPSHOT_MAGIC, generation, number).then(|| {
        page[SNAPSHOT_HEADER..].chunks_exact(8).map(|bytes| match le(bytes) {
            EMPTY => None,
            word => Some(unpack(word)),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_log_page_comes_back() {
        let records = vec![
            Record { slot: 7, holds: Some((BITS40, 0x00ff_ffff)) },
            Record { slot: BITS40, holds: None },
        ];
        let mut page = vec![0; PAGE_SIZE];
        let head = LogHead { generation: 5, number: 2, epoch: 9, batch: 1, before: 77 };
        encode_log(&mut page, head, &records);
        assert_eq!(decode_log(&page, 5, 2), Some(LogPage { head, records }));
        assert_eq!(decode_log(&page, 5, 3), None);
        assert_eq!(decode_log(&page, 6, 2), None);
    }

    #[test]
    fn a_snapshot_page_comes_back() {
        let slots = vec![Some((1, 2)), None, Some((BITS40 - 1, 3))];
        let mut page = vec![0; PAGE_SIZE];
        encode_snapshot(&mut page, 5, 2, &slots);
        let back: Vec<Held> = decode_snapshot(&page, 5, 2).unwrap().collect();
        assert_eq!(back[..3], slots);
        assert!(back[3..].iter().all(Option::is_none) && back.len() == SLOTS_PER_PAGE);
        assert!(decode_log(&page, 5, 2).is_none());
    }

    proptest! {
        #[test]
        fn garbage_is_refused(mut page in proptest::collection::vec(any::<u8>(), PAGE_SIZE), sealed: bool) {
            page[..4].copy_from_slice(&LOG_MAGIC);
            page[8..16].copy_from_slice(&1u64.to_le_bytes());
            page[16..24].copy_from_slice(&0u64.to_le_bytes());
            if sealed {
                seal(&mut page);
            }
            if let Some(log) = decode_log(&page, 1, 0) {
                prop_assert!(sealed && log.records.len() <= RECORDS_PER_PAGE);
            }
        }
    }
}
