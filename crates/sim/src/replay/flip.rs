//! A record with one decision changed: what a test replays to see that a difference is found where it is.

use std::io::{Read, Seek, SeekFrom, Write};

use larder_engine::kv::record::{CHUNK_HEADER, ChunkHeader, seal};

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
    let mut record = RecordFile::open(&mut *file)?;
    let hasher = record.setup().hasher();
    let filler = vec![0; record.setup().shard.max_object as usize];
    let mut reader = Stream::new(stream);
    while reader.fill(&mut record)? {
        if reader.take(&hasher, &filler)?.number < number {
            continue;
        }
        // A record's last four bytes are the digest of its decision.
        let (offset, end) = reader.position();
        let mut payload = std::mem::take(reader.payload());
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
        file.flush().map_err(system)?;
        return Ok(true);
    }
    Ok(false)
}
