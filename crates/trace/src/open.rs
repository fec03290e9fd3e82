//! Opening a trace by its name: a file, `-` for standard input, or `gen:…`.

use std::fs::File;
use std::io::Read;

use larder_base::Nanos;

use crate::error::TraceError;
use crate::format::{self, Format};
use crate::generate;
use crate::input::Input;
use crate::pages::Pages;
use crate::read::kv::CsvColumns;
use crate::read::{FileReader, Progress, Reader};
use crate::request::Request;
use crate::value_sizes::{Sized, ValueSizes};

/// How to read a trace.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The format; told from the contents when absent.
    pub format: Option<Format>,
    /// Pass over malformed records and count them, rather than stop at the first.
    pub skip_bad: bool,
    /// Columns of a csv file (`--format csv`).
    pub columns: Option<CsvColumns>,
    /// Requests per second that give times to a trace without them.
    pub rate: Option<f64>,
    /// Sizes of objects, drawn by key, in place of the trace's own. Block operations keep theirs.
    pub value_sizes: Option<ValueSizes>,
    /// Split block operations into pages of so many bytes.
    pub pages: Option<u32>,
    /// Stop after so many requests (of what is handed out, so pages where there are pages).
    pub limit: Option<u64>,
}

/// An opened trace.
pub struct Trace {
    /// The requests.
    pub reader: Box<dyn Reader>,
    /// The format, for files.
    pub format: Option<Format>,
    /// How the format was told.
    pub explanation: String,
}

/// Opens `name`: `gen:KIND?options` generates, `-` is standard input, anything else is a file, compressed or not.
///
/// # Errors
/// A file that cannot be opened, a format that cannot be told, a generator's specification that is wrong.
pub fn open(name: &str, options: &Options) -> Result<Trace, TraceError> {
    if let Some(spec) = name.strip_prefix("gen:") {
        let generator = generate::parse(spec)?;
        return Ok(finish(generator, None, "generated".to_owned(), options));
    }
    let open_error = |source| TraceError::Open { file: name.to_owned(), source };
    if name == "-" {
        return read(name, Box::new(std::io::stdin()), None, options);
    }
    let file = File::open(name).map_err(open_error)?;
    let metadata = file.metadata().map_err(open_error)?;
    if metadata.is_dir() {
        return Err(open_error(std::io::Error::other("it is a directory; name a file in it")));
    }
    let size = metadata.is_file().then_some(metadata.len());
    read(name, Box::new(file), size, options)
}

/// Reads a trace from `raw`, whose size as stored is `size` where known; `name` is for messages.
///
/// # Errors
/// As [`open`].
pub fn read(
    name: &str,
    raw: Box<dyn Read + Send>,
    size: Option<u64>,
    options: &Options,
) -> Result<Trace, TraceError> {
    let mut input = Input::new(name, raw)?;
    let mut columns = options.columns.clone();
    let (format, explanation) = match options.format {
        Some(Format::Csv) if columns.is_none() => {
            let detected = format::detect(&mut input)?;
            columns = detected.columns;
            (Format::Csv, detected.why)
        }
        Some(format) => (format, "named by --format".to_owned()),
        None if columns.is_some() => (Format::Csv, "columns named".to_owned()),
        None => {
            let detected = format::detect(&mut input)?;
            columns = detected.columns;
            (detected.format, detected.why)
        }
    };
    let decode = format.decoder(columns).map_err(|problem| TraceError::spec(name, problem))?;
    let reader =
        FileReader::new(input, decode, format, explanation.clone(), options.skip_bad, size);
    Ok(finish(Box::new(reader), Some(format), explanation, options))
}

fn finish(
    reader: Box<dyn Reader>,
    format: Option<Format>,
    explanation: String,
    options: &Options,
) -> Trace {
    let mut reader = reader;
    if let Some(rate) = options.rate {
        let interval = 1e9 / rate;
        reader = Box::new(Rated { inner: reader, interval, count: 0, shift: 0, last: 0 });
    }
    if let Some(sizes) = options.value_sizes {
        reader = Box::new(Sized { inner: reader, sizes });
    }
    if let Some(page) = options.pages {
        reader = Box::new(Pages::new(reader, page));
    }
    if let Some(limit) = options.limit {
        reader = Box::new(Limited { inner: reader, left: limit, limit });
    }
    Trace { reader, format, explanation }
}

/// Gives times to requests that have none. In a trace that begins without times (an iolog before its first `wait`) those
/// that come later go on from there.
struct Rated {
    inner: Box<dyn Reader>,
    interval: f64,
    /// Untimed requests so far.
    count: u64,
    /// What is added to the trace's own times.
    shift: u64,
    last: u64,
}

impl Iterator for Rated {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut request = match self.inner.next()? {
            Ok(request) => request,
            Err(e) => return Some(Err(e)),
        };
        let time = match request.time {
            Some(time) => {
                if self.count > 0 {
                    // The first timed one after untimed ones, or after a further stretch of them.
                    self.shift = self.shift.max(self.last.saturating_sub(time.0));
                }
                time.0.saturating_add(self.shift)
            }
            None => {
                self.count += 1;
                ((self.count - 1) as f64 * self.interval) as u64
            }
        };
        self.last = self.last.max(time);
        request.time = Some(Nanos(self.last));
        Some(Ok(request))
    }
}

/// The first requests of a trace.
struct Limited {
    inner: Box<dyn Reader>,
    left: u64,
    limit: u64,
}

impl Iterator for Limited {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        self.left -= 1;
        self.inner.next()
    }
}

impl Reader for Rated {
    fn skipped(&self) -> u64 {
        self.inner.skipped()
    }
    fn first_skipped(&self) -> Option<&crate::error::BadRecord> {
        self.inner.first_skipped()
    }
    fn progress(&self) -> Progress {
        self.inner.progress()
    }
}

impl Reader for Limited {
    fn skipped(&self) -> u64 {
        self.inner.skipped()
    }
    fn first_skipped(&self) -> Option<&crate::error::BadRecord> {
        self.inner.first_skipped()
    }
    fn progress(&self) -> Progress {
        let inner = self.inner.progress();
        let done = self.limit - self.left;
        // Whichever ends first, as far as can be told.
        match inner.fraction() {
            Some(share) if share > done as f64 / self.limit.max(1) as f64 => inner,
            _ => Progress { done, total: Some(self.limit) },
        }
    }
}
