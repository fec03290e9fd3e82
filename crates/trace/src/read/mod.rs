//! The reader that all formats share: positions, times, skipping; and the decoders of each family of formats.

pub(crate) mod binary;
pub(crate) mod block;
pub(crate) mod block_binary;
pub(crate) mod kv;
pub(crate) mod text;

use std::collections::VecDeque;

use larder_base::Nanos;

use crate::error::{Bad, BadRecord, Place, TraceError};
use crate::format::Format;
use crate::input::Input;
use crate::request::{Op, Request};

/// A stream of requests.
pub trait Reader: Iterator<Item = Result<Request, TraceError>> + Send {
    /// Records passed over as malformed so far (only with `skip_bad`).
    fn skipped(&self) -> u64 {
        0
    }

    /// The first record passed over.
    fn first_skipped(&self) -> Option<&BadRecord> {
        None
    }

    /// How far the stream has come, in units of `total` (bytes of the file, or requests), and `total` where known.
    fn progress(&self) -> Progress;
}

/// How far a reader has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the stored file, or requests of a generator.
    pub done: u64,
    /// All of them, where known.
    pub total: Option<u64>,
}

impl Progress {
    /// The share done, 0 to 1, where the total is known.
    pub fn fraction(&self) -> Option<f64> {
        self.total.filter(|&t| t > 0).map(|t| (self.done as f64 / t as f64).min(1.0))
    }
}

impl<R: Reader + ?Sized> Reader for Box<R> {
    fn skipped(&self) -> u64 {
        (**self).skipped()
    }
    fn first_skipped(&self) -> Option<&BadRecord> {
        (**self).first_skipped()
    }
    fn progress(&self) -> Progress {
        (**self).progress()
    }
}

/// Requests decoded and not yet handed out. A record that stands for many equal requests is kept as one run, whatever
/// count it claims.
#[derive(Default)]
pub(crate) struct Out {
    runs: VecDeque<Run>,
}

struct Run {
    request: Request,
    left: u64,
    id_step: u64,
}

impl Out {
    /// One request. Its time is the source's own (any origin), in nanoseconds.
    #[inline]
    pub(crate) fn one(&mut self, request: Request) {
        self.runs.push_back(Run { request, left: 1, id_step: 0 });
    }

    /// `count` requests whose ids rise by `id_step`.
    pub(crate) fn run(&mut self, request: Request, count: u64, id_step: u64) {
        if count > 0 {
            self.runs.push_back(Run { request, left: count, id_step });
        }
    }

    #[inline]
    fn pop(&mut self) -> Option<Request> {
        let run = self.runs.front_mut()?;
        let request = run.request;
        run.left -= 1;
        if run.left == 0 {
            self.runs.pop_front();
        } else {
            run.request.id = request.id.wrapping_add(run.id_step);
        }
        Some(request)
    }
}

/// Why a step of a decoder failed.
pub(crate) enum Fault {
    /// The input could not be read: the end of the trace.
    Input(TraceError),
    /// A record is wrong; the decoder has moved past it.
    Record(Place, Bad),
}

impl From<TraceError> for Fault {
    fn from(e: TraceError) -> Fault {
        Fault::Input(e)
    }
}

/// Turns input into requests, one record at a time.
pub(crate) trait Decode: Send {
    /// Decodes one record into any number of requests. `Ok(false)` at the end. After [`Fault::Record`] the input
    /// stands behind the bad record.
    fn step(&mut self, input: &mut Input, out: &mut Out) -> Result<bool, Fault>;
}

/// A decoder of text lines; empty lines are passed over.
pub(crate) struct Lines<F>(pub(crate) F);

impl<F: FnMut(&[u8], &mut Out) -> Result<(), Bad> + Send> Decode for Lines<F> {
    #[inline]
    fn step(&mut self, input: &mut Input, out: &mut Out) -> Result<bool, Fault> {
        let result = match input.line()? {
            None => return Ok(false),
            Some(Ok(line)) if line.trim_ascii().is_empty() => return Ok(true),
            Some(Ok(line)) => (self.0)(line, out),
            Some(Err(most)) => Err(Bad::text(
                format!("a line of at most {most} bytes"),
                "more without a line end".to_owned(),
            )),
        };
        result.map_err(|bad| Fault::Record(Place::Line(input.line_number()), bad))?;
        Ok(true)
    }
}

/// A decoder of records of one length.
pub(crate) struct Records<F> {
    pub(crate) len: usize,
    pub(crate) decode: F,
}

impl<F: FnMut(&[u8], &mut Out) -> Result<(), Bad> + Send> Decode for Records<F> {
    #[inline]
    fn step(&mut self, input: &mut Input, out: &mut Out) -> Result<bool, Fault> {
        let place = Place::Byte(input.offset());
        let len = self.len;
        let record = input.peek(len)?;
        if record.is_empty() {
            return Ok(false);
        }
        let found = record.len();
        let result = if found < len {
            Err(Bad::text(
                format!("a record of {len} bytes"),
                format!("the end of the file after {found} bytes"),
            ))
        } else {
            (self.decode)(record, out)
        };
        input.advance(found);
        result.map_err(|bad| Fault::Record(place, bad))?;
        Ok(true)
    }
}

/// Bytes of one read or write at most: no device takes more at once, and a record that says so is damaged. What works on
/// pages takes a request for each page.
const IO_AT_MOST: u64 = 1 << 30;
/// Bytes of one trim at most: what 32 bits of bytes hold.
const TRIM_AT_MOST: u64 = 4 << 30;

/// What is wrong with the range of a block operation.
#[inline]
fn wrong_range(r: &Request) -> Option<Bad> {
    if !r.op.is_block() {
        return None;
    }
    let (most, text) =
        if r.op == Op::Trim { (TRIM_AT_MOST, "4 GiB") } else { (IO_AT_MOST, "1 GiB") };
    if r.size > most {
        return Some(Bad::text(
            format!("a {} of at most {text}", r.op),
            format!("{} bytes", r.size),
        ));
    }
    r.offset.checked_add(r.size).is_none().then(|| {
        let found = format!("{} bytes from byte {} on", r.size, r.offset);
        Bad::text("a range that ends below 2^64", found)
    })
}

/// A reader of a file in any format.
pub struct FileReader {
    input: Input,
    decode: Box<dyn Decode>,
    out: Out,
    /// Where the record begins that `out` is from.
    place: Place,
    format: Format,
    explanation: String,
    done: bool,
    /// Whether a request was handed out.
    any: bool,
    skip_bad: bool,
    skipped: u64,
    first_skipped: Option<BadRecord>,
    size: Option<u64>,
    clock: Clock,
}

impl FileReader {
    pub(crate) fn new(
        input: Input,
        decode: Box<dyn Decode>,
        format: Format,
        explanation: String,
        skip_bad: bool,
        size: Option<u64>,
    ) -> FileReader {
        FileReader {
            input,
            decode,
            out: Out::default(),
            place: Place::Byte(0),
            format,
            explanation,
            done: false,
            any: false,
            skip_bad,
            skipped: 0,
            first_skipped: None,
            size,
            clock: Clock::default(),
        }
    }

    /// The format that is being read.
    pub fn format(&self) -> Format {
        self.format
    }

    /// How the format was told.
    pub fn explanation(&self) -> &str {
        &self.explanation
    }

    /// At the end of an input that held no request at all: the error that says so, once. Figures of nothing would be taken for
    /// those of a trace; formats that pass over lines of other kinds would do so with any text. Larder's own format says
    /// how many requests it holds, and may hold none; but what was passed over was meant to be some.
    fn nothing_found(&mut self) -> Option<TraceError> {
        if self.any || (self.format == Format::Larder && self.skipped == 0) {
            return None;
        }
        self.any = true;
        let (lines, bytes) = (self.input.line_number(), self.input.offset());
        let (place, passed) = match (lines, bytes) {
            (_, 0) => (Place::Byte(0), "an empty file".to_owned()),
            (0, n) => (Place::Byte(n), format!("the end of the file, and none in its {n} bytes")),
            (n, _) => (Place::Line(n), format!("the end of the file, and none in its {n} lines")),
        };
        let found = match &self.first_skipped {
            None => passed,
            Some(first) => {
                let BadRecord { place, expected, found, .. } = first;
                let first = format!("the first, {place}: expected {expected}, found {found}");
                format!("{passed}; malformed records passed over: {}, {first}", self.skipped)
            }
        };
        Some(TraceError::NoRequest(Box::new(BadRecord {
            file: self.input.file().to_owned(),
            place,
            format: self.format.name(),
            expected: "a request".to_owned(),
            found,
        })))
    }

    /// Counts a malformed record, or ends the reading with it.
    fn pass_over(&mut self, place: Place, bad: Bad) -> Option<TraceError> {
        let record = BadRecord {
            file: self.input.file().to_owned(),
            place,
            format: self.format.name(),
            expected: bad.expected,
            found: bad.found,
        };
        if !self.skip_bad {
            (self.done, self.any, self.out) = (true, true, Out::default());
            return Some(TraceError::Record(Box::new(record)));
        }
        self.skipped += 1;
        self.first_skipped.get_or_insert(record);
        None
    }
}

impl Iterator for FileReader {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(mut request) = self.out.pop() {
                if let Some(bad) = wrong_range(&request) {
                    match self.pass_over(self.place, bad) {
                        Some(e) => return Some(Err(e)),
                        None => continue,
                    }
                }
                if let Some(raw) = request.time {
                    request.time = Some(self.clock.rebase(raw));
                }
                self.any = true;
                return Some(Ok(request));
            }
            if self.done {
                return self.nothing_found().map(Err);
            }
            let before = self.input.offset();
            let step = self.decode.step(&mut self.input, &mut self.out);
            // A step that consumed nothing would be repeated for ever: it is the last one.
            let stuck = self.input.offset() == before;
            match step {
                Ok(more) => {
                    self.done = !more || stuck;
                    self.place = match self.input.line_number() {
                        0 => Place::Byte(before),
                        line => Place::Line(line),
                    };
                }
                Err(Fault::Input(e)) => {
                    (self.done, self.any) = (true, true);
                    return Some(Err(e));
                }
                Err(Fault::Record(place, bad)) => {
                    self.done = stuck;
                    if stuck && before > 0 && self.first_skipped.is_some() {
                        // The end of an input that was passed over already.
                        continue;
                    }
                    if let Some(e) = self.pass_over(place, bad) {
                        return Some(Err(e));
                    }
                }
            }
        }
    }
}

impl Reader for FileReader {
    fn skipped(&self) -> u64 {
        self.skipped
    }

    fn first_skipped(&self) -> Option<&BadRecord> {
        self.first_skipped.as_ref()
    }

    fn progress(&self) -> Progress {
        Progress { done: self.input.stored_offset(), total: self.size }
    }
}

/// Times from the first request on, never going back. Records slightly out of order (several CPUs' buffers merged) take
/// the latest time seen; a clock that falls back by more than [`RESTART`], or leaps ahead by more than [`LEAP`], was
/// restarted, and goes on from there.
#[derive(Default)]
struct Clock {
    origin: Option<u64>,
    previous: u64,
    base: u64,
    last: u64,
}

/// A fall of the clock that cannot be disorder.
const RESTART: u64 = 1_000_000_000;

/// A leap ahead between two requests that no workload pauses for, a year: a clock that began to count from another day, as
/// from the boot and then from 1970.
const LEAP: u64 = 365 * 86_400 * 1_000_000_000;

impl Clock {
    fn rebase(&mut self, raw: Nanos) -> Nanos {
        let raw = raw.0;
        let origin = match self.origin {
            Some(o) => o,
            None => {
                self.origin = Some(raw);
                self.previous = raw;
                raw
            }
        };
        let restarted =
            raw.saturating_add(RESTART) < self.previous || raw > self.previous.saturating_add(LEAP);
        let origin = if restarted {
            self.origin = Some(raw);
            self.base = self.last;
            raw
        } else {
            origin
        };
        self.previous = raw;
        self.last = self.last.max(self.base.saturating_add(raw.saturating_sub(origin)));
        Nanos(self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_never_goes_back() {
        let mut c = Clock::default();
        let s = 1_000_000_000u64;
        let times: Vec<u64> = [100 * s, 101 * s, 101 * s - 5, 102 * s, 3 * s, 4 * s]
            .map(|t| c.rebase(Nanos(t)).0)
            .to_vec();
        assert_eq!(times, [0, s, s, 2 * s, 2 * s, 3 * s]);
    }

    #[test]
    fn a_clock_that_leaps_by_a_year_was_restarted() {
        let mut c = Clock::default();
        let s = 1_000_000_000u64;
        let times: Vec<u64> = [100 * s, 102 * s, 1_266_874_889 * s, 1_266_874_890 * s]
            .map(|t| c.rebase(Nanos(t)).0)
            .to_vec();
        assert_eq!(times, [0, 2 * s, 2 * s, 3 * s]);
        // Half a year is a pause.
        assert_eq!(c.rebase(Nanos(1_282_000_000 * s)).0 / s, 3 + 15_125_110);
    }
}
