//! A journal in bytes that are there before it is: of a file, a block device or an NBD export.
//!
//! ```text
//! 0        8 KiB                           64 MiB
//! +--------+----------- ... --------------+----------- ... ---------+
//! | head   | commit, descriptors, data    | the same, from 8 KiB on |
//! +--------+----------- ... --------------+----------- ... ---------+
//! ```
//!
//! Epochs go to the parts in turn, so the one before is whole until the next is committed.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use larder_format::block::journal::{
    COMMIT_AT, COMMIT_BYTES, DESCRIPTORS_AT, PART_BYTES as PART, REQUEST_BYTES, REQUESTS as DEPTH,
};
use larder_format::block::marker::{self, COPY_BYTES, Marker, MarkerError};
use larder_runtime::{AlignedBuf, Payload, plain};

use super::{EpochName, Head, JournalError, JournalPlace, Part, Use};
use crate::marker::region::{self, Region};
use crate::op::Op;
use crate::{Alone, Backing, Flushing, OpenOptions, Timeouts, Uri};

/// Bytes of a region.
pub(super) const REGION: u64 = 2 * PART;
/// Bytes of one request.
const PIECE: usize = REQUEST_BYTES as usize;
/// What is written begins and ends at multiples of this: a server may insist.
const UNIT: usize = 512;
/// An operation of a store over a network ends by itself before that is over, with what went wrong.
const SPARE: Duration = Duration::from_secs(60);

pub(super) struct RegionPlace {
    name: String,
    backing: Box<dyn Backing>,
    for_use: Use,
    timeout: Timeouts,
    /// With the thread that it belongs to: a ring is that thread's alone. Another has its own made.
    way: Option<(Alone, ThreadId)>,
    /// Losses of the backing store when something was first written that is not durable yet.
    lost: Option<u64>,
    /// The copy of the head that the next write begins with; `None`: there is no head.
    first: Option<usize>,
    /// The copy that was read, where it may be in a cache alone from which no flush takes it any more.
    seen: Option<Vec<u8>>,
}

impl RegionPlace {
    pub(super) fn open(
        uri: &Uri,
        for_use: Use,
        timeout: Timeouts,
    ) -> Result<RegionPlace, JournalError> {
        let name = match uri {
            Uri::File { path } => format!("journal '{}'", path.display()),
            other => format!("journal '{other}'"),
        };
        let open = |reason: String| JournalError::Open { place: name.clone(), reason };
        if let Uri::File { path } = uri {
            match (path.exists(), for_use) {
                (true, Use::Make) if path.metadata().is_ok_and(|m| m.is_file()) => {
                    is_ours(&name, path)?;
                    if path.metadata().is_ok_and(|m| m.len() == 0) {
                        // (As a store it could not be opened.)
                        fill(path).map_err(|e| open(plain(&e)))?;
                    }
                }
                (false, Use::Make) => make(path).map_err(|e| open(plain(&e)))?,
                (false, _) => return Err(JournalError::Absent { place: name }),
                _ => {}
            }
        }
        let options = OpenOptions {
            read_only: for_use == Use::Look,
            lease: for_use != Use::Look,
            watch: false,
            timeout,
            ..OpenOptions::default()
        };
        let backing = crate::open_with(uri, &options).map_err(|e| open(reason_of(e)))?;
        if let Uri::File { path } = uri
            && for_use == Use::Make
            && !path.metadata().is_ok_and(|m| m.file_type().is_block_device())
            && backing.capabilities().size < REGION
        {
            fill(path).map_err(|e| open(plain(&e)))?;
            backing.resize(None).map_err(|e| open(reason_of(e)))?;
        }
        let flush = backing.capabilities().flush;
        if flush == Flushing::Missing && for_use == Use::Make {
            return Err(open(
                "it offers no FLUSH, so that what is written there may be lost: name a place that does"
                    .to_owned(),
            ));
        }
        RegionPlace::of(name, backing, for_use, timeout)
    }

    fn of(
        name: String,
        backing: Box<dyn Backing>,
        for_use: Use,
        timeout: Timeouts,
    ) -> Result<RegionPlace, JournalError> {
        let bytes = backing.capabilities().size;
        if bytes < REGION {
            return Err(JournalError::Small { place: name, bytes, needed: REGION });
        }
        Ok(RegionPlace {
            name,
            backing,
            for_use,
            timeout,
            way: None,
            lost: None,
            first: None,
            seen: None,
        })
    }

    /// One in a store that is open.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn over(
        backing: Box<dyn Backing>,
        for_use: Use,
        timeout: Timeouts,
    ) -> Result<RegionPlace, JournalError> {
        let name = format!("journal '{}'", backing.uri());
        RegionPlace::of(name, backing, for_use, timeout)
    }

    fn failed(&self, reason: impl ToString) -> JournalError {
        JournalError::Failed { place: self.name.clone(), reason: reason.to_string() }
    }

    /// Has operations done, [`DEPTH`] at a time, and returns them in their order.
    fn ask_all(&mut self, ops: Vec<Op>) -> Result<Vec<Op>, JournalError> {
        let me = std::thread::current().id();
        let mut way = match self.way.take() {
            Some((way, whose)) if whose == me => way,
            _ => {
                let session = self.backing.session().map_err(|e| self.failed(e))?;
                Alone::new(session).map_err(|e| self.failed(e))?
            }
        };
        let limit = self.timeout.give_up.unwrap_or_default() + self.timeout.connect + SPARE;
        let count = ops.len();
        let mut ended: Vec<Option<Op>> = Vec::new();
        ended.resize_with(count, || None);
        let (mut left, mut under_way, mut why) = (ops.into_iter().enumerate(), 0, None);
        loop {
            while under_way < DEPTH && why.is_none() {
                let Some((at, op)) = left.next() else { break };
                way.submit(at as u64, op);
                under_way += 1;
            }
            if under_way == 0 {
                break;
            }
            let until = Instant::now() + limit;
            let Some(done) = way.next(limit, || Instant::now() >= until) else {
                // Its buffers are the session's: it goes with them.
                return Err(self.failed("no answer in time"));
            };
            under_way -= 1;
            match done.outcome {
                Ok(_) => {
                    if let Some(slot) = ended.get_mut(done.token as usize) {
                        *slot = Some(done.op);
                    }
                }
                Err(failure) => why = Some(failure),
            }
        }
        self.way = Some((way, me));
        match why {
            Some(why) => Err(self.failed(why)),
            None => Ok(ended.into_iter().flatten().collect()),
        }
    }

    /// Writes bytes, with zeros behind them to the next multiple of [`UNIT`].
    fn write_at(&mut self, at: u64, bytes: &[u8]) -> Result<(), JournalError> {
        self.lost.get_or_insert(self.backing.losses());
        let pieces = bytes.chunks(PIECE).enumerate().map(|(i, piece)| {
            let mut buf = AlignedBuf::zeroed(piece.len().next_multiple_of(UNIT));
            buf[..piece.len()].copy_from_slice(piece);
            let offset = at + (i * PIECE) as u64;
            Op::Write { offset, data: Payload::new(buf), fua: false }
        });
        let pieces = pieces.collect();
        self.ask_all(pieces).map(drop)
    }

    fn read_at(&mut self, at: u64, len: usize) -> Result<Vec<u8>, JournalError> {
        let (from, end) = (at / UNIT as u64 * UNIT as u64, at + len as u64);
        let end = end.next_multiple_of(UNIT as u64).min(self.backing.capabilities().size);
        let mut ops = Vec::new();
        let mut next = from;
        while next < end {
            let n = (end - next).min(PIECE as u64);
            ops.push(Op::Read { offset: next, buf: AlignedBuf::zeroed(n as usize) });
            next += n;
        }
        let mut bytes = Vec::with_capacity((end - from) as usize);
        for op in self.ask_all(ops)? {
            if let Op::Read { buf, .. } = op {
                bytes.extend_from_slice(&buf);
            }
        }
        let skip = (at - from) as usize;
        let bytes = bytes.get(skip..skip + len);
        bytes.map(<[u8]>::to_vec).ok_or_else(|| self.failed("it answered something else"))
    }
}

impl Region for RegionPlace {
    type Error = JournalError;

    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<(), JournalError> {
        self.write_at(at, bytes)?;
        self.flush()
    }
}

impl RegionPlace {
    fn read_head(&mut self) -> Result<Head, JournalError> {
        let copies = [self.read_at(0, COPY_BYTES), self.read_at(COPY_BYTES as u64, COPY_BYTES)];
        // One that cannot be read is as one that is torn, beside one that can.
        let torn = || {
            let mut torn = vec![0; COPY_BYTES];
            torn[..marker::MAGIC.len()].copy_from_slice(&marker::MAGIC);
            torn
        };
        let copies = match copies {
            [Err(why), Err(_)] => return Err(why),
            [a, b] => [a.unwrap_or_else(|_| torn()), b.unwrap_or_else(|_| torn())],
        };
        // Zeros were there before it was found out what place this is, and that was cut short.
        let copies = copies.map(|mut copy| {
            if marker::is_probe(&copy) {
                copy[..marker::PROBE_BYTES].fill(0);
            }
            copy
        });
        (self.first, self.seen) = (None, None);
        if region::is_nothing(&copies) {
            return Ok(Head::None);
        }
        let [a, b] = copies;
        match marker::choose(&a, &b) {
            Ok(chosen) => {
                self.first = Some(1 - chosen.copy);
                self.seen = [a, b].into_iter().nth(chosen.copy);
                Ok(Head::Of(Box::new(chosen.marker)))
            }
            Err(MarkerError::Damaged) => Ok(Head::Damaged),
            Err(MarkerError::None) => Err(JournalError::NotAJournal {
                place: self.name.clone(),
                reason: "holds something that is no journal".into(),
            }),
            Err(why) => Err(self.failed(why)),
        }
    }
}

impl JournalPlace for RegionPlace {
    fn head(&mut self) -> Result<Head, JournalError> {
        if self.for_use != Use::Look {
            self.flush()?;
        }
        self.read_head()
    }

    fn look(&mut self) -> Result<Head, JournalError> {
        if let Some(image) = self.backing.image() {
            if !image.is_at(image.path()) {
                return Err(JournalError::Absent { place: self.name.clone() });
            }
            let cut = !image.is_device() && image.bytes().is_ok_and(|bytes| bytes < REGION);
            if cut {
                return Ok(Head::Damaged);
            }
        }
        let (first, seen) = (self.first, self.seen.take());
        let head = self.read_head();
        (self.first, self.seen) = (first, seen);
        head
    }

    fn set_head(&mut self, head: &Marker) -> Result<(), JournalError> {
        let bytes = head.encode();
        match self.first {
            Some(first) => {
                // A flush may have failed, and the copy that was read be in a cache alone: the other is written when it is not. (It stays what it is
                // where it was durable, whatever becomes of this.)
                if let Some(seen) = self.seen.clone() {
                    self.put((1 - first) as u64 * COPY_BYTES as u64, &seen)?;
                    self.seen = None;
                }
                region::replace(self, first, &bytes)?;
            }
            None => {
                self.empty()?;
                region::create(self, head.copy(), &bytes)?;
            }
        }
        self.first = Some(1 - head.copy());
        Ok(())
    }

    fn probe(&mut self, bytes: Option<&[u8]>) -> Result<bool, JournalError> {
        if self.first.is_some() {
            return Ok(false);
        }
        // (Nothing but zeros was there.)
        let nothing = [0; UNIT];
        self.put(0, bytes.unwrap_or(&nothing))?;
        Ok(true)
    }

    fn most(&self) -> u64 {
        PART
    }

    fn write(&mut self, name: EpochName, commit: &[u8], body: &[u8]) -> Result<(), JournalError> {
        let start = name.epoch % 2 * PART;
        self.write_at(start + DESCRIPTORS_AT, body)?;
        self.write_at(start + COMMIT_AT, commit)
    }

    fn flush(&mut self) -> Result<(), JournalError> {
        let before = self.lost.take().unwrap_or_else(|| self.backing.losses());
        self.ask_all(vec![Op::Flush])?;
        // A server that was lost in between has perhaps never had what is flushed now.
        match self.backing.losses() == before {
            true => Ok(()),
            false => Err(self.failed("it was away, and may have lost what it was told")),
        }
    }

    fn parts(&mut self) -> Result<Vec<Part>, JournalError> {
        Ok(vec![Part(0), Part(1)])
    }

    fn read(&mut self, part: Part, at: u64, len: usize) -> Result<Option<Vec<u8>>, JournalError> {
        let fits = at.checked_add(len as u64).is_some_and(|end| end <= PART);
        if !fits {
            return Ok(None);
        }
        self.read_at(part.0 as u64 * PART + at, len).map(Some)
    }

    fn renew(&mut self, part: Part, ranges: &[Range<u64>]) -> Result<(), JournalError> {
        let start = part.0 as u64 * PART;
        for range in ranges {
            let (mut at, end) = (range.start, range.end.min(PART));
            while at < end {
                let len = (end - at).min(PIECE as u64) as usize;
                let piece = self.read_at(start + at, len)?;
                self.write_at(start + at, &piece)?;
                at += len as u64;
            }
        }
        self.flush()
    }

    fn keeps(&self) -> usize {
        2
    }

    fn empty(&mut self) -> Result<(), JournalError> {
        for start in [0, PART] {
            self.write_at(start + COMMIT_AT, &[0; COMMIT_BYTES])?;
        }
        self.flush()
    }

    fn rest(&mut self) {
        self.way = None;
    }

    fn describe(&self) -> String {
        self.name.clone()
    }
}

/// What is wrong, without the store's name, which the place has.
fn reason_of(error: crate::BackingError) -> String {
    match error {
        crate::BackingError::Open { reason, .. } | crate::BackingError::Uri { reason, .. } => {
            reason
        }
    }
}

/// Makes an empty file of that name, and its name durable.
fn make(path: &Path) -> std::io::Result<()> {
    let mut options = File::options();
    // (Of no length it could not be opened as a store.)
    let file = options.write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all_at(&[0; UNIT], 0)?;
    fill(path)?;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(dir)?.sync_all()
}

/// Writes zeros behind what is there, and makes them durable: where they were only set aside, a flush would be one of the file system's too.
fn fill(path: &Path) -> std::io::Result<()> {
    let file = File::options().write(true).open(path)?;
    let zeros = vec![0u8; PIECE];
    let mut at = file.metadata()?.len();
    while at < REGION {
        let n = (REGION - at).min(PIECE as u64);
        file.write_all_at(&zeros[..n as usize], at)?;
        at += n;
    }
    file.sync_all()
}

/// A file that is there is made longer only if it begins as a journal does, or with zeros.
fn is_ours(name: &str, path: &Path) -> Result<(), JournalError> {
    let read = || -> std::io::Result<bool> {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        let mut head = vec![0u8; len.min(2 * COPY_BYTES as u64) as usize];
        file.read_exact_at(&mut head, 0)?;
        Ok(head.iter().all(|&b| b == 0)
            || head.chunks(COPY_BYTES).any(|copy| copy.starts_with(&marker::MAGIC)))
    };
    match read() {
        Ok(true) => Ok(()),
        Ok(false) => Err(JournalError::NotAJournal {
            place: name.to_owned(),
            reason: "holds something that is no journal".into(),
        }),
        Err(e) => Err(JournalError::Open { place: name.to_owned(), reason: plain(&e) }),
    }
}
