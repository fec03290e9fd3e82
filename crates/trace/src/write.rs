//! Writing traces: the native format and those of other tools.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::TraceError;
use crate::format::Format;
use crate::input::Compression;
use crate::native::NativeWriter;
use crate::output::OutputFile;
use crate::request::{Class, Op, Request};
use crate::stats::IdHasher;

/// A compressed or plain file, or standard output.
enum Packed {
    Out(BufWriter<io::Stdout>),
    Plain(BufWriter<OutputFile>),
    Gzip(flate2::write::GzEncoder<BufWriter<OutputFile>>),
    Xz(liblzma::write::XzEncoder<BufWriter<OutputFile>>),
    Zstd(zstd::stream::write::Encoder<'static, BufWriter<OutputFile>>),
}

impl Write for Packed {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Packed::Out(w) => w.write(buf),
            Packed::Plain(w) => w.write(buf),
            Packed::Gzip(w) => w.write(buf),
            Packed::Xz(w) => w.write(buf),
            Packed::Zstd(w) => w.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Packed::Out(w) => w.flush(),
            Packed::Plain(w) => w.flush(),
            Packed::Gzip(w) => w.flush(),
            Packed::Xz(w) => w.flush(),
            Packed::Zstd(w) => w.flush(),
        }
    }
}

impl Packed {
    fn create(name: &str) -> io::Result<Packed> {
        if name == "-" {
            return Ok(Packed::Out(BufWriter::with_capacity(256 << 10, io::stdout())));
        }
        let file = BufWriter::with_capacity(256 << 10, OutputFile::create(Path::new(name))?);
        Ok(match Compression::of_name(name) {
            Compression::None => Packed::Plain(file),
            Compression::Gzip => {
                Packed::Gzip(flate2::write::GzEncoder::new(file, flate2::Compression::default()))
            }
            Compression::Xz => Packed::Xz(liblzma::write::XzEncoder::new(file, 6)),
            Compression::Zstd => Packed::Zstd(zstd::stream::write::Encoder::new(file, 3)?),
        })
    }

    fn finish(self) -> io::Result<()> {
        let file = match self {
            Packed::Out(mut w) => return w.flush(),
            Packed::Plain(w) => w,
            Packed::Gzip(w) => w.finish()?,
            Packed::Xz(w) => w.finish()?,
            Packed::Zstd(w) => w.finish()?,
        };
        file.into_inner().map_err(io::IntoInnerError::into_error)?.commit()
    }
}

enum Body {
    Native(Box<NativeWriter<Packed>>),
    Text(Packed, Format),
    /// oracleGeneral states the next access of each record, so all are kept until the end: 24 bytes each.
    Oracle(Packed, Vec<(u32, u64, u32)>),
}

/// Writes a trace to a file, or to standard output by the name `-`; the ending of its name (gz, xz, zst) says how it is compressed.
/// The file is in its place when the writer has [finished](Writer::finish), and what was there until then.
pub struct Writer {
    name: String,
    body: Body,
    count: u64,
    lost: Lost,
}

/// What requests had that the format has no place for.
#[derive(Clone, Copy, Default)]
struct Lost {
    operations: bool,
    offsets: bool,
    fractions: bool,
    keys: bool,
    lives: bool,
    applications: bool,
    classes: bool,
    hosts: bool,
}

impl Lost {
    /// Takes note of a request that is written as `format`. The native format and csv keep everything.
    fn note(&mut self, r: &Request, format: Format) {
        let bare = match format {
            Format::Larder | Format::Csv => return,
            Format::Memcachier => false,
            _ => true,
        };
        // Memcachier's has five operations, of objects.
        let kept = if bare {
            Op::Get
        } else {
            match r.op {
                Op::Get | Op::Set | Op::Delete | Op::Add | Op::Incr => r.op,
                _ => Op::Get,
            }
        };
        self.operations |= r.op != kept;
        self.offsets |= r.offset > 0;
        self.fractions |= bare && r.time.is_some_and(|t| !t.0.is_multiple_of(1_000_000_000));
        self.keys |= bare && r.key_size > 0;
        self.lives |= r.ttl > 0;
        self.applications |= bare && r.app > 0;
        self.classes |= r.class != Class::Unstated;
        self.hosts |= r.host > 0;
    }
}

impl Writer {
    /// The formats that can be written.
    pub const FORMATS: [Format; 5] = [
        Format::Larder,
        Format::Csv,
        Format::Memcachier,
        Format::WebCacheSim,
        Format::OracleGeneral,
    ];

    /// Prepares to write the file.
    ///
    /// # Errors
    /// A format that is only read; a file that cannot be created.
    pub fn create(name: &str, format: Format) -> Result<Writer, TraceError> {
        if !Writer::FORMATS.contains(&format) {
            let known: Vec<&str> = Writer::FORMATS.iter().map(|f| f.name()).collect();
            let problem =
                format!("format {format} can be read but not written; {} can be", known.join(", "));
            return Err(TraceError::spec(name, problem));
        }
        let mut packed = Packed::create(name)
            .map_err(|source| TraceError::Write { file: name.to_owned(), source })?;
        let error = |source| TraceError::Write { file: name.to_owned(), source };
        let body = match format {
            Format::Larder => Body::Native(Box::new(NativeWriter::new(packed).map_err(error)?)),
            Format::OracleGeneral => Body::Oracle(packed, Vec::new()),
            _ => {
                if format == Format::Csv {
                    packed
                        .write_all(b"time,op,id,offset,size,key_size,ttl,app,class,host\n")
                        .map_err(error)?;
                }
                Body::Text(packed, format)
            }
        };
        Ok(Writer { name: name.to_owned(), body, count: 0, lost: Lost::default() })
    }

    /// What the requests so far had that the format has no place for, in words; nothing with the native format and csv.
    pub fn left_out(&self) -> Vec<&'static str> {
        let l = self.lost;
        [
            (l.operations, "operations"),
            (l.offsets, "offsets"),
            (l.fractions, "fractions of seconds"),
            (l.keys, "sizes of keys"),
            (l.lives, "times to live"),
            (l.applications, "applications"),
            (l.classes, "classes"),
            (l.hosts, "hosts"),
        ]
        .into_iter()
        .filter_map(|(lost, what)| lost.then_some(what))
        .collect()
    }

    fn format(&self) -> Format {
        match &self.body {
            Body::Native(_) => Format::Larder,
            Body::Text(_, format) => *format,
            Body::Oracle(..) => Format::OracleGeneral,
        }
    }

    /// Appends a request.
    ///
    /// # Errors
    /// Those of the file; a request that the format cannot hold.
    pub fn push(&mut self, r: &Request) -> Result<(), TraceError> {
        self.count += 1;
        self.lost.note(r, self.format());
        let name = &self.name;
        let (seconds, nanos) =
            r.time.map_or((0, 0), |t| (t.0 / 1_000_000_000, t.0 % 1_000_000_000));
        let result = match &mut self.body {
            Body::Native(w) => w.push(r),
            Body::Oracle(_, records) => {
                let (Ok(seconds), Ok(size)) = (u32::try_from(seconds), u32::try_from(r.size))
                else {
                    return Err(TraceError::DoesNotFit {
                        request: self.count,
                        what: format!("{seconds} s and {} bytes", r.size),
                        limit: "oracle-general holds times in seconds and sizes in bytes up to 2^32-1",
                    });
                };
                records.push((seconds, r.id, size));
                Ok(())
            }
            Body::Text(w, Format::Csv) => match r.time {
                Some(_) => write!(w, "{seconds}.{nanos:09}"),
                None => Ok(()),
            }
            .and_then(|()| {
                writeln!(
                    w,
                    ",{},{},{},{},{},{},{},{},{}",
                    r.op,
                    r.id,
                    r.offset,
                    r.size,
                    r.key_size,
                    r.ttl,
                    r.app,
                    r.class.name(),
                    r.host
                )
            }),
            Body::Text(w, Format::WebCacheSim) => writeln!(w, "{seconds} {} {}", r.id, r.size),
            Body::Text(w, _) => {
                let kind = match r.op {
                    Op::Get | Op::Read | Op::Touch => 1,
                    Op::Delete | Op::Trim => 3,
                    Op::Add => 4,
                    Op::Incr | Op::Decr => 5,
                    _ => 2,
                };
                writeln!(
                    w,
                    "{seconds}.{nanos:09},{},{kind},{},{},{},0",
                    r.app, r.key_size, r.size, r.id
                )
            }
        };
        result.map_err(|source| TraceError::Write { file: name.clone(), source })
    }

    /// Completes the file; returns the number of requests written.
    ///
    /// # Errors
    /// Those of the file.
    pub fn finish(self) -> Result<u64, TraceError> {
        let result = match self.body {
            Body::Native(w) => w.finish().and_then(Packed::finish),
            Body::Text(w, _) => w.finish(),
            Body::Oracle(w, records) => finish_oracle(w, &records),
        };
        result.map_err(|source| TraceError::Write { file: self.name, source })?;
        Ok(self.count)
    }
}

fn finish_oracle(mut out: Packed, records: &[(u32, u64, u32)]) -> io::Result<()> {
    let mut next = vec![-1i64; records.len()];
    let mut seen: HashMap<u64, i64, BuildHasherDefault<IdHasher>> = HashMap::default();
    for (i, (_, id, _)) in records.iter().enumerate().rev() {
        // Numbered from 1.
        if let Some(later) = seen.insert(*id, i as i64 + 1) {
            next[i] = later;
        }
    }
    for ((time, id, size), next) in records.iter().zip(next) {
        out.write_all(&time.to_le_bytes())?;
        out.write_all(&id.to_le_bytes())?;
        out.write_all(&size.to_le_bytes())?;
        out.write_all(&next.to_le_bytes())?;
    }
    out.finish()
}
