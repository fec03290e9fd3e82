//! A record as a file: its setup, and where the chunks of each stream lie.

use std::io::{ErrorKind, Read, Seek, SeekFrom};

use larder_base::{KeyHasher, Now};
use larder_engine::kv::record::{Clocks, Decision, Input, RunSetup, decode};
use larder_format::recording::{
    CHUNK_HEADER, ChunkHeader, Cursor, END_STREAM, Ended, FILE_HEADER, FrameError, end_bytes,
    parse_end, parse_file_header,
};

use serde::de::DeserializeOwned;

use super::ReplayError;

/// Where a chunk lies.
#[derive(Clone, Copy, Debug)]
struct Place {
    offset: u64,
    header: ChunkHeader,
    /// Its checksum was seen to hold.
    checked: bool,
}

/// What stands at the beginning of a record: by it a replay builds what was recorded.
pub trait Setup: DeserializeOwned {
    /// Checks it.
    ///
    /// # Errors
    /// What cannot be.
    fn check(&self) -> Result<(), ReplayError>;

    /// Streams that the record begins with.
    fn streams(&self) -> usize;

    /// Streams that it has at most: others may begin later.
    fn most_streams(&self) -> usize {
        self.streams()
    }

    /// What messages call a stream.
    fn name(&self, stream: usize) -> String;
}

impl Setup for RunSetup {
    fn check(&self) -> Result<(), ReplayError> {
        Ok(self.validate()?)
    }

    fn streams(&self) -> usize {
        RunSetup::streams(self)
    }

    fn name(&self, stream: usize) -> String {
        self.whose(stream).map_or_else(|| format!("stream {stream}"), |whose| whose.to_string())
    }
}

/// Whose record it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// `larder kv`'s.
    Kv,
    /// `larder block`'s.
    Block,
}

/// Says whose record a file is, by its setup.
///
/// # Errors
/// What is not a record.
pub fn recorded_by<R: Read + Seek>(mut input: R) -> Result<Recorded, ReplayError> {
    let text = setup_text(&mut input)?;
    let setup: serde_json::Value = serde_json::from_slice(&text)?;
    Ok(if setup.get("block").is_some() { Recorded::Block } else { Recorded::Kv })
}

/// The bytes of the setup, checked; the input stands behind them.
fn setup_text<R: Read + Seek>(input: &mut R) -> Result<Vec<u8>, ReplayError> {
    let frame = |offset| move |source| ReplayError::Frame { offset, source };
    input.seek(SeekFrom::Start(0)).map_err(|source| ReplayError::Read { offset: 0, source })?;
    let mut head = [0; FILE_HEADER];
    if read_some(input, 0, &mut head)? < FILE_HEADER {
        return Err(frame(0)(FrameError::Magic));
    }
    let (len, crc) = parse_file_header(&head).map_err(frame(0))?;
    let mut text = vec![0; len];
    let got = read_some(input, FILE_HEADER as u64, &mut text)?;
    if got < len {
        let what = format!(
            "the file ends {got} bytes into its setup of {len} bytes: it was cut short, and nothing in it can be replayed"
        );
        return Err(ReplayError::Order { offset: (FILE_HEADER + got) as u64, what });
    }
    if crc32c::crc32c(&text) != crc {
        return Err(frame(FILE_HEADER as u64)(FrameError::Checksum("setup")));
    }
    Ok(text)
}

/// An opened record.
pub struct RecordFile<R, S = RunSetup> {
    input: R,
    setup: S,
    /// By stream.
    chunks: Vec<Vec<Place>>,
    ended: Option<Ended>,
    bytes: u64,
}

fn read_exact<R: Read>(input: &mut R, offset: u64, out: &mut [u8]) -> Result<(), ReplayError> {
    input.read_exact(out).map_err(|source| ReplayError::Read { offset, source })
}

/// Fills `out` as far as the file goes.
fn read_some<R: Read>(input: &mut R, offset: u64, out: &mut [u8]) -> Result<usize, ReplayError> {
    let mut got = 0;
    while got < out.len() {
        match input.read(&mut out[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(source) => return Err(ReplayError::Read { offset, source }),
        }
    }
    Ok(got)
}

impl<R: Read + Seek, S: Setup> RecordFile<R, S> {
    /// Reads the setup and finds the chunks; what is in them is checked when it is used. A file that was cut short (the
    /// server was killed) is read as far as it goes.
    ///
    /// # Errors
    /// What is not a record, of another version, or not in order, with the place.
    pub fn open(mut input: R) -> Result<RecordFile<R, S>, ReplayError> {
        let system = |offset| move |source| ReplayError::Read { offset, source };
        let bytes = input.seek(SeekFrom::End(0)).map_err(system(0))?;
        let frame = |offset| move |source| ReplayError::Frame { offset, source };
        let text = setup_text(&mut input)?;
        let setup: S = serde_json::from_slice(&text)?;
        setup.check()?;
        let most = setup.most_streams();
        let mut chunks: Vec<Vec<Place>> = vec![Vec::new(); setup.streams()];
        let mut ended = None;
        let mut offset = (FILE_HEADER + text.len()) as u64;
        while offset < bytes {
            let mut head = [0; CHUNK_HEADER];
            if read_some(&mut input, offset, &mut head)? < CHUNK_HEADER {
                break;
            }
            let header = ChunkHeader::parse(&head).map_err(frame(offset))?;
            let payload_at = offset + CHUNK_HEADER as u64;
            let next = payload_at + u64::from(header.len);
            if next > bytes {
                let mut rest = vec![0; (bytes - payload_at) as usize];
                read_exact(&mut input, payload_at, &mut rest)?;
                if !is_cut_short(&header, &rest, chunks.len()..=most) {
                    let (len, left) = (header.len, bytes - payload_at);
                    return Err(frame(offset)(FrameError::Length { len, left }));
                }
                break;
            }
            if header.stream == END_STREAM {
                let mut payload = vec![0; header.len as usize];
                read_exact(&mut input, payload_at, &mut payload)?;
                if !header.check(&payload) {
                    return Err(frame(offset)(FrameError::Checksum("end")));
                }
                let (why, records) = parse_end(&payload).map_err(frame(offset))?;
                // Of what began last there may be nothing.
                if (chunks.len()..=most).contains(&records.len()) {
                    chunks.resize(records.len(), Vec::new());
                }
                check_end(offset, &chunks, &records)?;
                if next != bytes {
                    let what = format!("{} bytes follow the end of the record", bytes - next);
                    return Err(ReplayError::Order { offset: next, what });
                }
                ended = Some(why);
                break;
            }
            let number = usize::from(header.stream);
            if (chunks.len()..most).contains(&number) {
                chunks.resize(number + 1, Vec::new());
            }
            let there = chunks.len();
            let Some(stream) = chunks.get_mut(number) else {
                let what = format!("a chunk of stream {number}: there are {there}");
                return Err(ReplayError::Order { offset, what });
            };
            let due = stream.last().map_or(0, |p| p.header.first + u64::from(p.header.records));
            if header.first != due {
                let what = format!(
                    "a chunk of stream {} begins with record {}, and {due} would be next: a part of the file is missing",
                    header.stream, header.first
                );
                return Err(ReplayError::Order { offset, what });
            }
            stream.push(Place { offset, header, checked: false });
            offset = next;
            input.seek(SeekFrom::Start(offset)).map_err(system(offset))?;
        }
        Ok(RecordFile { input, setup, chunks, ended, bytes })
    }

    /// What the run was built from.
    pub fn setup(&self) -> &S {
        &self.setup
    }

    /// Why recording ended; `None` when the file was cut short.
    pub fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Records of all streams.
    pub fn records(&self) -> u64 {
        (0..self.chunks.len()).map(|s| self.records_of(s)).sum()
    }

    /// Records of one stream.
    pub fn records_of(&self, stream: usize) -> u64 {
        let last = self.chunks.get(stream).and_then(|c| c.last());
        last.map_or(0, |p| p.header.first + u64::from(p.header.records))
    }

    /// Number of streams that are there.
    pub fn streams(&self) -> usize {
        self.chunks.len()
    }

    /// What messages call a stream.
    pub fn name(&self, stream: usize) -> String {
        self.setup.name(stream)
    }

    /// The bytes of chunk `index` of a stream, checked; `None` behind the last.
    pub(super) fn chunk(
        &mut self,
        stream: usize,
        index: usize,
        out: &mut Vec<u8>,
    ) -> Result<Option<(u64, ChunkHeader)>, ReplayError> {
        let Some(&Place { offset, header, .. }) =
            self.chunks.get(stream).and_then(|c| c.get(index))
        else {
            return Ok(None);
        };
        let at = offset + CHUNK_HEADER as u64;
        let system = |source| ReplayError::Read { offset: at, source };
        self.input.seek(SeekFrom::Start(at)).map_err(system)?;
        // At most 128 KiB: the header was checked.
        out.resize(header.len as usize, 0);
        read_exact(&mut self.input, at, out)?;
        if !header.check(out) {
            return Err(ReplayError::Frame { offset, source: FrameError::Checksum("chunk") });
        }
        if let Some(place) = self.chunks.get_mut(stream).and_then(|c| c.get_mut(index)) {
            place.checked = true;
        }
        Ok(Some((offset, header)))
    }

    /// Checks the chunks that nobody has asked for: "every decision is the same" is said of a file that is whole.
    pub(super) fn check_rest(&mut self) -> Result<(), ReplayError> {
        let mut payload = Vec::new();
        for stream in 0..self.chunks.len() {
            for index in 0..self.chunks[stream].len() {
                if !self.chunks[stream][index].checked {
                    self.chunk(stream, index, &mut payload)?;
                }
            }
        }
        Ok(())
    }
}

/// Whether a file that ends before the payload of its last chunk does was cut short there. If not, the length in the
/// chunk's header is not what was written: the payload fits its checksum with the length that it has, or chunks follow that
/// would have been skipped. `rest` is what comes behind the header: less than the longest payload.
/// Of `streams` streams there may be so many.
fn is_cut_short(
    header: &ChunkHeader,
    rest: &[u8],
    streams: std::ops::RangeInclusive<usize>,
) -> bool {
    let end = end_bytes(0);
    let of = (header.len as usize).wrapping_sub(end) / (end_bytes(1) - end);
    if header.stream == END_STREAM
        && (!streams.contains(&of) || header.len as usize != end_bytes(of))
    {
        return false;
    }
    let as_it_is = ChunkHeader { len: rest.len() as u32, ..*header };
    if as_it_is.check(rest) {
        return false;
    }
    let whole = |at: usize| {
        let head: Option<&[u8; CHUNK_HEADER]> = rest[at..].first_chunk();
        let header = head.and_then(|head| ChunkHeader::parse(head).ok());
        header.is_some_and(|h| {
            let from = at + CHUNK_HEADER;
            rest.get(from..from + h.len as usize).is_some_and(|payload| h.check(payload))
        })
    };
    // The chunk itself is whole, with another length: what follows may be cut short, it is not.
    let is_whole_to = |at: usize| {
        let follows = match rest[at..].first_chunk::<CHUNK_HEADER>() {
            Some(head) => ChunkHeader::parse(head).is_ok(),
            None => true,
        };
        follows && ChunkHeader { len: at as u32, ..*header }.check(&rest[..at])
    };
    !(0..rest.len()).any(|at| whole(at) || is_whole_to(at))
}

/// Whether the streams have as many records as the end says.
fn check_end(offset: u64, chunks: &[Vec<Place>], records: &[u64]) -> Result<(), ReplayError> {
    let found =
        |c: &Vec<Place>| c.last().map_or(0, |p| p.header.first + u64::from(p.header.records));
    let counts: Vec<u64> = chunks.iter().map(found).collect();
    if counts == records {
        return Ok(());
    }
    let what =
        format!("the end says that the streams have {records:?} records, and {counts:?} are there");
    Err(ReplayError::Order { offset, what })
}

/// One stream as it is read: a chunk at a time.
pub struct Stream {
    stream: usize,
    next_chunk: usize,
    payload: Vec<u8>,
    at: usize,
    left: u32,
    offset: u64,
    number: u64,
    clocks: Clocks,
}

/// A record as it is read.
pub(super) struct Read1<'a> {
    pub(super) number: u64,
    pub(super) now: Now,
    pub(super) input: Input<'a>,
    pub(super) decision: Decision,
}

impl Stream {
    /// At the start of stream `stream`.
    pub fn new(stream: usize) -> Stream {
        Stream {
            stream,
            next_chunk: 0,
            payload: Vec::new(),
            at: 0,
            left: 0,
            offset: 0,
            number: 0,
            clocks: Clocks::default(),
        }
    }

    /// Records read so far.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Where in the payload of the present chunk the next record begins, and where the chunk begins in the file.
    pub(super) fn position(&self) -> (u64, usize) {
        (self.offset, self.at)
    }

    /// The present chunk's payload.
    pub(super) fn payload(&mut self) -> &mut Vec<u8> {
        &mut self.payload
    }

    /// Makes sure that the present chunk has a record; `false` at the end of the stream.
    pub(super) fn fill<R: Read + Seek>(
        &mut self,
        file: &mut RecordFile<R>,
    ) -> Result<bool, ReplayError> {
        while self.left == 0 {
            if self.at != self.payload.len() {
                let offset = self.offset;
                let what = format!(
                    "{} bytes follow the last record of the chunk",
                    self.payload.len() - self.at
                );
                return Err(ReplayError::Order { offset, what });
            }
            let Some((offset, header)) =
                file.chunk(self.stream, self.next_chunk, &mut self.payload)?
            else {
                return Ok(false);
            };
            self.next_chunk += 1;
            (self.at, self.left, self.offset) = (0, header.records, offset);
            self.clocks = Clocks::default();
        }
        Ok(true)
    }

    /// The next record of the present chunk, which [`Stream::fill`] has said to have one.
    pub(super) fn take<'a>(
        &'a mut self,
        hasher: &KeyHasher,
        filler: &'a [u8],
    ) -> Result<Read1<'a>, ReplayError> {
        let Stream { stream, payload, at, left, offset, number, clocks, .. } = self;
        let mut cursor = Cursor::resume(payload, *at);
        let decoded = decode(&mut cursor, clocks, hasher, filler);
        let (now, input, decision) = decoded.map_err(|source| ReplayError::Record {
            stream: format!("stream {stream}"),
            number: *number,
            offset: *offset,
            source,
        })?;
        *at = cursor.position();
        *left -= 1;
        *number += 1;
        Ok(Read1 { number: *number - 1, now, input, decision })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor as Bytes;

    use super::*;

    #[test]
    fn what_is_no_record_is_refused() {
        for (bytes, words) in [
            (&b""[..], "byte 0: it does not begin"),
            (b"some text that is long enough", "byte 0: it does not begin"),
        ] {
            let error = RecordFile::<_>::open(Bytes::new(bytes)).err().unwrap().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
