//! Byte input: compressed or not, with a bounded buffer, positions and bounded lines.

use std::io::{self, BufRead, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Place, TraceError};

/// How a file is compressed, told by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// gzip (members may follow one another).
    Gzip,
    /// xz.
    Xz,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// The compression that `start`, the first bytes of a file, names.
    pub fn detect(start: &[u8]) -> Compression {
        if start.starts_with(&[0x1f, 0x8b]) {
            Compression::Gzip
        } else if start.starts_with(&[0xfd, b'7', b'z', b'X', b'Z', 0]) {
            Compression::Xz
        } else if start.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
            Compression::Zstd
        } else {
            Compression::None
        }
    }

    /// The compression that a file name's ending asks for.
    pub fn of_name(name: &str) -> Compression {
        match name.rsplit('.').next() {
            Some("gz") => Compression::Gzip,
            Some("xz") => Compression::Xz,
            Some("zst" | "zstd") => Compression::Zstd,
            _ => Compression::None,
        }
    }

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Compression::None => "not compressed",
            Compression::Gzip => "gzip",
            Compression::Xz => "xz",
            Compression::Zstd => "zstd",
        }
    }
}

/// How many bytes of the file, as stored, have been consumed: for progress bars.
#[derive(Clone, Debug, Default)]
pub(crate) struct Consumed(Arc<AtomicU64>);

impl Consumed {
    /// Bytes read from the file so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

struct Counting<R> {
    inner: R,
    count: Consumed,
}

impl<R: BufRead> Read for Counting<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.count.0.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// What was read ahead and a decoder has not taken is not counted.
impl<R: BufRead> BufRead for Counting<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.inner.fill_buf()
    }
    fn consume(&mut self, amount: usize) {
        self.count.0.fetch_add(amount as u64, Ordering::Relaxed);
        self.inner.consume(amount);
    }
}

/// What one read brought: between two positions of the decompressed stream, the bytes as stored that it was made from.
#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    offsets: (u64, u64),
    stored: (u64, u64),
}

const BUFFER: usize = 256 << 10;
/// A line longer than this is no trace's (Mooncake's longest are tens of kilobytes).
pub(crate) const MAX_LINE: usize = 4 << 20;
/// Memory that a zstd frame may ask for: 2^27 = 128 MiB, its own default ceiling.
const ZSTD_WINDOW_LOG: u32 = 27;
/// Memory that an xz stream may ask for.
const XZ_MEMORY: u64 = 256 << 20;

/// Decompressed bytes with their position.
pub(crate) struct Input {
    file: String,
    read: Box<dyn Read + Send>,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Offset of `buffer[start]` in the decompressed stream.
    offset: u64,
    eof: bool,
    /// Lines handed out.
    lines: u64,
    /// Whether the rest of a line that was too long comes next.
    within: bool,
    compression: Compression,
    consumed: Consumed,
    piece: Piece,
}

impl Input {
    pub(crate) fn new(file: &str, raw: Box<dyn Read + Send>) -> Result<Input, TraceError> {
        let consumed = Consumed::default();
        let raw = io::BufReader::with_capacity(BUFFER, raw);
        let mut raw = Counting { inner: raw, count: consumed.clone() };
        let read_error =
            |source| TraceError::Read { file: file.to_owned(), place: Place::Byte(0), source };
        let compression = Compression::detect(raw.fill_buf().map_err(read_error)?);
        let read: Box<dyn Read + Send> = match compression {
            Compression::None => Box::new(raw),
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(raw)),
            Compression::Xz => {
                let stream = liblzma::stream::Stream::new_stream_decoder(
                    XZ_MEMORY,
                    liblzma::stream::CONCATENATED,
                )
                .map_err(|e| read_error(io::Error::other(e)))?;
                Box::new(liblzma::bufread::XzDecoder::new_stream(raw, stream))
            }
            Compression::Zstd => {
                let mut decoder =
                    zstd::stream::read::Decoder::with_buffer(raw).map_err(read_error)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(read_error)?;
                Box::new(decoder)
            }
        };
        Ok(Input {
            file: file.to_owned(),
            read,
            buffer: vec![0; BUFFER],
            start: 0,
            end: 0,
            offset: 0,
            eof: false,
            lines: 0,
            within: false,
            compression,
            consumed,
            piece: Piece::default(),
        })
    }

    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    pub(crate) fn compression(&self) -> Compression {
        self.compression
    }

    /// How many bytes of the file, as stored, what was taken so far was made from: for progress bars. Within what one read
    /// brought it is a guess, in proportion.
    pub(crate) fn stored_offset(&self) -> u64 {
        let Piece { offsets: (from, to), stored: (first, last) } = self.piece;
        if self.offset >= to {
            return last;
        }
        let share = self.offset.saturating_sub(from) as f64 / (to - from) as f64;
        first + (last.saturating_sub(first) as f64 * share) as u64
    }

    /// Offset of the next unread byte in the decompressed stream.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of the line last handed out.
    pub(crate) fn line_number(&self) -> u64 {
        self.lines
    }

    fn read_more(&mut self) -> Result<(), TraceError> {
        let stored = self.stored_offset();
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if self.end == self.buffer.len() {
            let len = self.buffer.len() * 2;
            self.buffer.resize(len, 0);
        }
        loop {
            match self.read.read(&mut self.buffer[self.end..]) {
                Ok(0) => self.eof = true,
                Ok(n) => self.end += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(source) => {
                    let place = Place::Byte(self.offset + self.end as u64);
                    return Err(TraceError::Read { file: self.file.clone(), place, source });
                }
            }
            let end = self.offset + (self.end - self.start) as u64;
            self.piece =
                Piece { offsets: (self.offset, end), stored: (stored, self.consumed.bytes()) };
            return Ok(());
        }
    }

    /// Up to `len` bytes (at most [`MAX_LINE`]) from the current position without consuming them; fewer only at the
    /// end of the stream.
    pub(crate) fn peek(&mut self, len: usize) -> Result<&[u8], TraceError> {
        let len = len.min(MAX_LINE);
        while self.end - self.start < len && !self.eof {
            self.read_more()?;
        }
        Ok(&self.buffer[self.start..self.end.min(self.start + len)])
    }

    /// Passes over `len` bytes that [`Input::peek`] has shown.
    pub(crate) fn advance(&mut self, len: usize) {
        let len = len.min(self.end - self.start);
        self.start += len;
        self.offset += len as u64;
    }

    /// The next line without its end (`\n` or `\r\n`); `None` at the end. `Err(MAX_LINE)` inside `Ok(Some)` stands for a
    /// line that is longer than that: known as soon as so much was read, its rest passed over by the next call, in bounded
    /// memory. (Where the first such line ends the run, one without an end does not keep it from ending.)
    pub(crate) fn line(&mut self) -> Result<Option<Result<&[u8], usize>>, TraceError> {
        if self.within {
            self.pass_long_line()?;
        }
        let mut searched = 0;
        loop {
            if let Some(at) = memchr::memchr(b'\n', &self.buffer[self.start + searched..self.end]) {
                let begin = self.start;
                let length = searched + at;
                self.start += length + 1;
                self.offset += length as u64 + 1;
                self.lines += 1;
                return Ok(Some(Ok(trim_cr(&self.buffer[begin..begin + length]))));
            }
            searched = self.end - self.start;
            if self.eof {
                if searched == 0 {
                    return Ok(None);
                }
                let begin = self.start;
                self.start = self.end;
                self.offset += searched as u64;
                self.lines += 1;
                return Ok(Some(Ok(trim_cr(&self.buffer[begin..self.end]))));
            }
            if searched > MAX_LINE {
                self.advance(searched);
                self.lines += 1;
                self.within = true;
                return Ok(Some(Err(MAX_LINE)));
            }
            self.read_more()?;
        }
    }

    fn pass_long_line(&mut self) -> Result<(), TraceError> {
        loop {
            let at = memchr::memchr(b'\n', &self.buffer[self.start..self.end]);
            self.advance(at.map_or(self.end - self.start, |n| n + 1));
            if at.is_some() || self.eof {
                self.within = false;
                return Ok(());
            }
            self.read_more()?;
        }
    }
}

fn trim_cr(line: &[u8]) -> &[u8] {
    line.strip_suffix(b"\r").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(bytes: &[u8]) -> Input {
        Input::new("test", Box::new(io::Cursor::new(bytes.to_vec()))).unwrap()
    }

    #[test]
    fn lines_and_positions() {
        let mut i = input(b"a\r\n\nlast");
        assert_eq!(i.line().unwrap(), Some(Ok(&b"a"[..])));
        assert_eq!(i.line().unwrap(), Some(Ok(&b""[..])));
        assert_eq!(i.offset(), 4);
        assert_eq!(i.line().unwrap(), Some(Ok(&b"last"[..])));
        assert_eq!(i.line_number(), 3);
        assert_eq!(i.line().unwrap(), None);
    }

    #[test]
    fn a_line_without_end_is_passed_in_bounded_memory() {
        let mut bytes = vec![b'x'; 3 * MAX_LINE];
        bytes.extend_from_slice(b"\nnext\n");
        let mut i = input(&bytes);
        assert_eq!(i.line().unwrap(), Some(Err(MAX_LINE)));
        assert!(i.offset() <= 2 * MAX_LINE as u64, "{} bytes read to tell", i.offset());
        assert_eq!(i.line().unwrap(), Some(Ok(&b"next"[..])));
        assert_eq!((i.line_number(), i.offset()), (2, bytes.len() as u64));
        assert!(i.buffer.len() <= 4 * MAX_LINE);
        // Without any end, it is known all the same.
        let mut endless = Input::new("test", Box::new(io::repeat(0))).unwrap();
        assert_eq!(endless.line().unwrap(), Some(Err(MAX_LINE)));
    }

    #[test]
    fn what_was_read_ahead_does_not_count_as_progress() {
        use std::io::Write;
        // Lines of digits that hardly compress, several buffers of them even when packed.
        let mut rng = larder_base::Rng::new(5);
        let mut text = Vec::new();
        let lines = 100_000u64;
        for _ in 0..lines {
            writeln!(text, "{:020}", rng.next_u64()).unwrap();
        }
        let zst = zstd::encode_all(&text[..], 1).unwrap();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&text).unwrap();
        let gz = gz.finish().unwrap();
        assert!(zst.len() > 3 * BUFFER && gz.len() > 3 * BUFFER);
        for packed in [text, gz, zst] {
            let mut i = input(&packed);
            let mut last = 0;
            for line in 0..lines {
                let taken = i.stored_offset();
                let (share, wanted) =
                    (taken as f64 / packed.len() as f64, line as f64 / lines as f64);
                assert!((share - wanted).abs() < 0.08, "line {line}: {share} {}", packed.len());
                assert!(taken >= last, "line {line}: back from {last} to {taken}");
                last = taken;
                i.line().unwrap().unwrap().unwrap();
            }
            assert_eq!(i.line().unwrap(), None);
            assert_eq!(i.stored_offset(), packed.len() as u64);
        }
    }

    #[test]
    fn every_compression_reads_the_same() {
        use std::io::Write;
        let text = b"hello\nworld\n".repeat(1000);
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&text).unwrap();
        let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 1);
        xz.write_all(&text).unwrap();
        let zst = zstd::encode_all(&text[..], 1).unwrap();
        for packed in [text.clone(), gz.finish().unwrap(), xz.finish().unwrap(), zst] {
            let mut i = input(&packed);
            let mut lines = 0;
            while let Some(line) = i.line().unwrap() {
                assert!(matches!(line.unwrap(), b"hello" | b"world"));
                lines += 1;
            }
            assert_eq!(lines, 2000);
            assert_eq!(i.stored_offset(), packed.len() as u64);
        }
    }
}
