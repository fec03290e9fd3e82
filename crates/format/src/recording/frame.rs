//! The file around the records.

use super::bytes::BadRecord;

/// Version of the layout: another one is refused.
pub const VERSION: u32 = 2;
/// Bytes in front of the setup.
pub const FILE_HEADER: usize = 20;
/// Bytes in front of a chunk's payload.
pub const CHUNK_HEADER: usize = 28;
/// The longest payload of a chunk.
pub const MAX_PAYLOAD: usize = 128 << 10;
/// The longest setup.
pub const MAX_SETUP: usize = 16 << 20;
/// The stream of the end.
pub const END_STREAM: u16 = u16::MAX;

const MAGIC: &[u8; 8] = b"LRDRECRD";
const CHUNK_MAGIC: u32 = 0x4b4e_4843;

/// Why a part of a file is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not a record at all.
    #[error("it does not begin as a recording does")]
    Magic,
    /// A layout of another version.
    #[error(
        "it is of version {0}, and this larder reads version {VERSION}: replay it with the larder that wrote it"
    )]
    Version(u32),
    /// A field has a value that nothing writes.
    #[error(transparent)]
    Bad(#[from] BadRecord),
    /// The checksum does not hold.
    #[error("the checksum of the {0} does not hold: the file is damaged")]
    Checksum(&'static str),
    /// The length of a chunk is not what was written.
    #[error(
        "a chunk of {len} bytes, where the file has {left} more and was not cut short: the file is damaged"
    )]
    Length {
        /// What its header says.
        len: u32,
        /// Bytes from there to the end of the file.
        left: u64,
    },
}

/// Why recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The server stopped.
    Stopped,
    /// Records came faster than they could be written.
    TooSlow,
    /// The file could not be written any further.
    WriteFailed,
    /// The file has reached its limit.
    Limit,
}

impl Ended {
    const ALL: [Ended; 4] = [Ended::Stopped, Ended::TooSlow, Ended::WriteFailed, Ended::Limit];

    /// The reason, in a few words.
    pub fn as_str(self) -> &'static str {
        match self {
            Ended::Stopped => "the server stopped",
            Ended::TooSlow => "the file could not be written as fast as requests came",
            Ended::WriteFailed => "the file could not be written any further",
            Ended::Limit => "the file reached its limit",
        }
    }
}

/// Records of one stream, in one piece.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Whose.
    pub stream: u16,
    /// Number of the first.
    pub first: u64,
    /// How many.
    pub records: u32,
    /// The records.
    pub payload: Vec<u8>,
}

/// Takes chunks, without waiting for anything. What is recorded may lie behind a lock that many read at once.
pub trait ChunkSink: Send + Sync {
    /// Takes a chunk. `false`: recording has ended, and this and all that follow are not wanted.
    fn put(&mut self, chunk: Chunk) -> bool;

    /// Whether chunks are still wanted.
    fn is_open(&self) -> bool;
}

/// The start of a file, up to and with the setup. `None` if the setup is too long.
pub fn file_header(setup: &[u8]) -> Option<Vec<u8>> {
    if setup.len() > MAX_SETUP {
        return None;
    }
    let mut out = Vec::with_capacity(FILE_HEADER + setup.len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(setup.len() as u32).to_le_bytes());
    out.extend_from_slice(&crc32c::crc32c(setup).to_le_bytes());
    out.extend_from_slice(setup);
    Some(out)
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut n = [0; 4];
    n.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(n)
}

/// Reads the start of a file: the length and the checksum of the setup that follows.
///
/// # Errors
/// Another file, another version, a setup that is too long.
pub fn parse_file_header(head: &[u8; FILE_HEADER]) -> Result<(usize, u32), FrameError> {
    if !head.starts_with(MAGIC) {
        return Err(FrameError::Magic);
    }
    let version = u32_at(head, 8);
    if version != VERSION {
        return Err(FrameError::Version(version));
    }
    let len = u32_at(head, 12) as usize;
    if len > MAX_SETUP {
        let (what, value) = ("the length of the setup", len as u64);
        return Err(BadRecord::Value { what, value, must: "at most 16 MiB" }.into());
    }
    Ok((len, u32_at(head, 16)))
}

/// What stands in front of a chunk's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHeader {
    /// Whose records.
    pub stream: u16,
    /// Bytes of payload.
    pub len: u32,
    /// How many records.
    pub records: u32,
    /// Number of the first in its stream, from 0.
    pub first: u64,
    /// CRC-32C of the other fields and the payload.
    pub crc: u32,
}

impl ChunkHeader {
    fn fields(&self) -> [u8; CHUNK_HEADER - 4] {
        let mut out = [0; CHUNK_HEADER - 4];
        out[..4].copy_from_slice(&CHUNK_MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&self.stream.to_le_bytes());
        out[6..8].copy_from_slice(&u16::from(self.stream == END_STREAM).to_le_bytes());
        out[8..12].copy_from_slice(&self.len.to_le_bytes());
        out[12..16].copy_from_slice(&self.records.to_le_bytes());
        out[16..24].copy_from_slice(&self.first.to_le_bytes());
        out
    }

    fn crc_with(&self, payload: &[u8]) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&self.fields()), payload)
    }

    /// Reads a header. Its checksum is judged with the payload, by [`ChunkHeader::check`].
    ///
    /// # Errors
    /// Fields that nothing writes.
    pub fn parse(head: &[u8; CHUNK_HEADER]) -> Result<ChunkHeader, FrameError> {
        let magic = u32_at(head, 0);
        if magic != CHUNK_MAGIC {
            let (what, value) = ("the mark of a chunk", u64::from(magic));
            return Err(BadRecord::Value { what, value, must: "0x4b4e4843" }.into());
        }
        let stream = u16::from_le_bytes([head[4], head[5]]);
        let kind = u16::from_le_bytes([head[6], head[7]]);
        if kind != u16::from(stream == END_STREAM) {
            let (what, value) = ("the kind of a chunk", u64::from(kind));
            return Err(BadRecord::Value { what, value, must: "0, or 1 for the end" }.into());
        }
        let mut first = [0; 8];
        first.copy_from_slice(&head[16..24]);
        let header = ChunkHeader {
            stream,
            len: u32_at(head, 8),
            records: u32_at(head, 12),
            first: u64::from_le_bytes(first),
            crc: u32_at(head, 24),
        };
        let bad = |what, value: u32, must| {
            Err(FrameError::Bad(BadRecord::Value { what, value: u64::from(value), must }))
        };
        if header.len as usize > MAX_PAYLOAD {
            return bad("the length of a chunk", header.len, "at most 128 KiB");
        }
        // A record takes a byte at the least.
        if header.records > header.len {
            return bad("the number of records of a chunk", header.records, "at most its bytes");
        }
        if header.first.checked_add(u64::from(header.records)).is_none() {
            return bad("the number of records of a chunk", header.records, "smaller");
        }
        Ok(header)
    }

    /// Whether header and payload are what was written.
    pub fn check(&self, payload: &[u8]) -> bool {
        self.crc_with(payload) == self.crc
    }
}

/// A chunk as it lies in the file: `payload` behind its header.
pub fn seal(stream: u16, first: u64, records: u32, payload: &[u8]) -> [u8; CHUNK_HEADER] {
    let mut header = ChunkHeader { stream, len: payload.len() as u32, records, first, crc: 0 };
    header.crc = header.crc_with(payload);
    let mut out = [0; CHUNK_HEADER];
    out[..CHUNK_HEADER - 4].copy_from_slice(&header.fields());
    out[CHUNK_HEADER - 4..].copy_from_slice(&header.crc.to_le_bytes());
    out
}

/// The end of a file: why, and how many records each stream has.
pub fn end_chunk(why: Ended, records: &[u64]) -> Vec<u8> {
    let mut payload = vec![why as u8];
    payload.extend_from_slice(&(records.len() as u32).to_le_bytes());
    for n in records {
        payload.extend_from_slice(&n.to_le_bytes());
    }
    let mut out = seal(END_STREAM, 0, 0, &payload).to_vec();
    out.extend_from_slice(&payload);
    out
}

/// Bytes of the payload of an end, where there are so many streams.
pub fn end_bytes(streams: usize) -> usize {
    5 + 8 * streams
}

/// Reads the payload of an end.
///
/// # Errors
/// What [`end_chunk`] does not write.
pub fn parse_end(payload: &[u8]) -> Result<(Ended, Vec<u64>), FrameError> {
    let mut cursor = super::bytes::Cursor::new(payload);
    let code = cursor.u8("reason of the end")?;
    let why = Ended::ALL.get(usize::from(code)).copied().ok_or(BadRecord::Value {
        what: "the reason of the end",
        value: u64::from(code),
        must: "at most 3",
    })?;
    let streams = cursor.u32_le("number of streams")?;
    let mut all = Vec::new();
    for _ in 0..streams {
        let taken = cursor.take(8, "number of records")?;
        let mut n = [0; 8];
        n.copy_from_slice(taken);
        all.push(u64::from_le_bytes(n));
    }
    Ok((why, all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_read_and_damage_is_seen() {
        let payload = b"some records";
        let head = seal(3, 77, 4, payload);
        let header = ChunkHeader::parse(&head).unwrap();
        assert_eq!((header.stream, header.first, header.records), (3, 77, 4));
        assert!(header.check(payload) && !header.check(b"some recordz"));
        for byte in 0..CHUNK_HEADER {
            let mut other = head;
            other[byte] ^= 1;
            assert!(ChunkHeader::parse(&other).map_or(true, |h| !h.check(payload)), "byte {byte}");
        }
    }

    #[test]
    fn ends_round_trip() {
        for why in Ended::ALL {
            let chunk = end_chunk(why, &[1, u64::MAX, 0]);
            let (head, payload) = chunk.split_at(CHUNK_HEADER);
            let header = ChunkHeader::parse(head.try_into().unwrap()).unwrap();
            assert!(header.stream == END_STREAM && header.check(payload));
            assert_eq!(payload.len(), end_bytes(3));
            assert_eq!(parse_end(payload).unwrap(), (why, vec![1, u64::MAX, 0]));
            assert!(parse_end(&payload[..payload.len() - 1]).is_err());
        }
        assert!(parse_end(&[9, 0, 0, 0, 0]).unwrap_err().to_string().contains("is 9"));
    }

    #[test]
    fn other_files_are_told_apart() {
        let file = file_header(b"{}").unwrap();
        let mut head: [u8; FILE_HEADER] = file[..FILE_HEADER].try_into().unwrap();
        assert_eq!(parse_file_header(&head).unwrap(), (2, crc32c::crc32c(b"{}")));
        head[8] = 1;
        assert_eq!(parse_file_header(&head), Err(FrameError::Version(1)));
        head[0] = 0;
        assert_eq!(parse_file_header(&head), Err(FrameError::Magic));
        assert!(file_header(&vec![0; MAX_SETUP + 1]).is_none());
    }
}
