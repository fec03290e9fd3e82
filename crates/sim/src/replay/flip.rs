//! A record with one decision changed: what a test replays to see that a difference is found where it is.

use std::io::{Read, Seek, SeekFrom, Write};

use larder_engine::block::record::BlockRunSetup;
use larder_format::recording::{CHUNK_HEADER, ChunkHeader, seal};

use super::{RecordFile, ReplayError, Stream};

/// Changes the decision of record `number` of a stream, in place, checksums and all, so that the file reads as if the engine
/// had decided otherwise. Returns `false` if there is no such record.
///
/// # Errors
/// A file that cannot be read or written, or makes no sense.
pub fn flip_decision<F: Read + Write + Seek>(
    file: &mut F,
    stream: usize,
    number: u64,
) -> Result<bool, ReplayError> {
    let mut record: RecordFile<_> = RecordFile::open(&mut *file)?;
    let mut found = None;
    let beside = super::beside::replay(&mut record, stream, |at, place, _| {
        if at == number {
            found = Some((place.offset, std::mem::take(&mut place.payload), place.end));
        }
        found.is_none()
    })?;
    if beside {
        let Some((offset, payload, end)) = found else { return Ok(false) };
        change(file, offset, payload, end)?;
        return Ok(true);
    }
    let hasher = record.setup().hasher();
    let filler = vec![0; record.setup().shard.max_object as usize];
    let mut reader = Stream::new(stream);
    while reader.fill(&mut record)? {
        if reader.take(&hasher, &filler)?.number < number {
            continue;
        }
        let (offset, end) = reader.position();
        let payload = std::mem::take(reader.payload());
        change(file, offset, payload, end)?;
        return Ok(true);
    }
    Ok(false)
}

/// The same, of a record of the block cache.
///
/// # Errors
/// As [`flip_decision`].
pub fn flip_block_decision<F: Read + Write + Seek>(
    file: &mut F,
    stream: usize,
    number: u64,
) -> Result<bool, ReplayError> {
    let mut record: RecordFile<_, BlockRunSetup> = RecordFile::open(&mut *file)?;
    let Some((offset, end, payload)) = super::block::find(&mut record, stream, number)? else {
        return Ok(false);
    };
    change(file, offset, payload, end)?;
    Ok(true)
}

/// A record's last four bytes are the digest of its decision.
fn change<F: Read + Write + Seek>(
    file: &mut F,
    offset: u64,
    mut payload: Vec<u8>,
    end: usize,
) -> Result<(), ReplayError> {
    payload[end - 1] ^= 1;
    let system = |source| ReplayError::Read { offset, source };
    let mut head = [0; CHUNK_HEADER];
    file.seek(SeekFrom::Start(offset)).map_err(system)?;
    file.read_exact(&mut head).map_err(system)?;
    let header =
        ChunkHeader::parse(&head).map_err(|source| ReplayError::Frame { offset, source })?;
    let head = seal(header.stream, header.first, header.records, &payload);
    file.seek(SeekFrom::Start(offset)).map_err(system)?;
    file.write_all(&head).and_then(|()| file.write_all(&payload)).map_err(system)?;
    file.flush().map_err(system)
}
