//! Reads the write log of a device at a start: all batches that verify.

use larder_format::Uuid;
use larder_format::block::superblock::WriteLogArea;
use larder_format::block::write_log::batch::{self, Place};
use larder_format::block::write_log::{Frontier, Kind, PartError, SegmentHeader};

use super::recovery::{Entry, Scanned};

/// Bytes of the device could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadFailed;

/// What a scan has found.
#[derive(Clone, Debug, Default)]
pub struct Scan {
    /// The batches.
    pub batches: Vec<Scanned>,
}

/// Reads the log of the cache `cache`. `read` fills bytes of the device from a place on.
pub fn scan(
    area: &WriteLogArea,
    cache: Uuid,
    read: &mut dyn FnMut(u64, &mut [u8]) -> Result<(), ReadFailed>,
) -> Scan {
    let mut scan = Scan::default();
    let size = area.geometry.bytes();
    let sector = area.geometry.sector();
    let mut bytes = vec![0u8; size as usize];
    for segment in 0..area.segments {
        let first = area.segment_at(segment);
        if read(first, &mut bytes[..sector as usize]).is_err() {
            continue;
        }
        let Ok(header) = SegmentHeader::decode(&bytes[..sector as usize], cache) else { continue };
        if read(first, &mut bytes).is_err() {
            continue;
        }
        let mut at = sector;
        while at < size {
            let place = Place { cache, generation: header.generation, at, segment: size };
            let here = &bytes[at as usize..];
            let batch = match batch::decode(here, &place) {
                Ok(batch) => batch,
                Err(PartError::Absent | PartError::Torn | PartError::Short { .. }) => break,
                Err(_) => break,
            };
            let shape = batch.contents.shape();
            let head = shape.header_bytes() as usize;
            let end = at + batch.bytes(sector);
            let payload = here.get(head..(end - at) as usize).unwrap_or(&[]);
            if batch.check_payload(payload).is_err() {
                break;
            }
            let mut frontier = None;
            let mut entries = Vec::new();
            for entry in batch.contents.entries() {
                let range = entry.payload.start as usize..entry.payload.end as usize;
                if entry.record.kind == Kind::Frontier {
                    frontier = payload.get(range).and_then(|bytes| Frontier::decode(bytes).ok());
                    continue;
                }
                let place = first + u64::from(at) - area.at + head as u64;
                entries.push(Entry {
                    record: *entry.record,
                    place: place + u64::from(entry.payload.start),
                    readable: !entry.record.flags.unreadable,
                    sums: entry.sums.into(),
                });
            }
            let (link, parked) = (batch.link(), batch.head.parked);
            scan.batches.push(Scanned {
                link,
                parked,
                segment,
                end: end - sector,
                entries,
                frontier,
            });
            at = end;
        }
    }
    scan
}
