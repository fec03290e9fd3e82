//! The journal of a volume whose store gets all of an epoch or nothing: a file beside the image, with a thread of its own.
//!
//! It has two halves, each a journal of [`larder_format::block::journal`] without its header; epochs go to them in turn. So the one before is
//! whole until the next is committed and applied, and the last that is whole is what the store may lack: its stretches are after-images, and
//! applying them once more changes nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use larder_engine::block::OpId;
use larder_engine::block::PartKind;
use larder_engine::block::node::calls::{Message, OP_BITS, send};
use larder_engine::block::node::defaults;
use larder_engine::block::node::logged::JournalPart;
use larder_engine::block::node::queue::Node as _;
use larder_format::Uuid;
use larder_format::block::journal::{
    COMMIT_AT, COMMIT_BYTES, Commit, DESCRIPTORS_AT, Descriptors, ExtentKind, JournalExtent, Size,
};
use larder_format::block::write_log::pieces;
use larder_runtime::{AlignedBuf, Payload};
use larder_volume::op::{Op, Outcome};
use larder_volume::{Alone, Backing};

use super::super::Core;

/// A half has room for the bytes of an epoch and for what is said of them, however small its stretches are.
const HALF: u64 = 4 * defaults::EPOCH.0;
/// One request to a store when a journal is applied is waited for so long.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of one such request.
const PIECE: u64 = 1 << 20;

/// Whose journal it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Of {
    /// The volume.
    pub volume: Uuid,
    /// The cache.
    pub cache: Uuid,
    /// The volume's generation.
    pub generation: u64,
}

/// An epoch that was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Its number.
    pub epoch: u64,
    /// The store has all up to this record.
    pub last: u64,
    /// When the last of it was written, nanoseconds since the Unix epoch.
    pub time: u64,
    /// The last mark in it, or before.
    pub mark: Option<String>,
}

/// What an epoch is called: its number, its last record, when that was written, and the last mark at or before it.
type Named = (u64, u64, u64, Option<String>);

/// A journal.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
}

/// An epoch that is whole.
struct Whole {
    commit: Commit,
    descriptors: Descriptors,
    /// Where its data begins in the file.
    data: u64,
}

fn half(epoch: u64) -> u64 {
    epoch % 2 * HALF
}

impl Journal {
    /// Where the journal of an image lies.
    pub fn beside(image: &Path) -> PathBuf {
        let mut name = image.as_os_str().to_owned();
        name.push(".larder.journal");
        PathBuf::from(name)
    }

    /// Opens it; `make`: it is made if it is not there.
    ///
    /// # Errors
    /// Of the file system.
    pub fn open(path: &Path, make: bool) -> io::Result<Journal> {
        let there = path.exists();
        let mut options = File::options();
        options.read(true).write(true).create(make).mode(0o600);
        let file = options.open(path)?;
        if !there || file.metadata()?.len() < 2 * HALF {
            // Written, not only set aside: a flush is then one of the bytes alone.
            let zeros = vec![0u8; PIECE as usize];
            let mut at = file.metadata()?.len();
            while at < 2 * HALF {
                let n = (2 * HALF - at).min(PIECE);
                file.write_all_at(&zeros[..n as usize], at)?;
                at += n;
            }
            file.sync_all()?;
            if let Some(dir) = path.parent() {
                let dir = if dir == Path::new("") { Path::new(".") } else { dir };
                File::open(dir)?.sync_all()?;
            }
        }
        Ok(Journal { file, path: path.to_owned() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn write(
        &self,
        of: Of,
        (epoch, last, time, mark): Named,
        parts: &[JournalPart<Payload>],
    ) -> io::Result<()> {
        let Of { volume, cache, generation } = of;
        let extent = |part: &JournalPart<Payload>| JournalExtent {
            offset: part.at,
            length: part.len,
            kind: match part.kind {
                PartKind::Zero => ExtentKind::Zero,
                PartKind::Trim => ExtentKind::Trim,
                _ => ExtentKind::Data,
            },
            may_punch: part.kind == PartKind::Zero,
        };
        let extents: Vec<JournalExtent> = parts.iter().map(extent).collect();
        let size = Size::of(&extents).filter(|size| size.journal_bytes() <= HALF);
        if size.is_none() {
            return Err(io::Error::other("the epoch is larger than the journal"));
        }
        let bytes = parts.iter().filter_map(|part| part.bytes.as_deref());
        let sums = bytes.flat_map(|bytes: &[u8]| pieces::sums(bytes).collect::<Vec<_>>()).collect();
        let descriptors = Descriptors { volume, cache, epoch, generation, extents, sums };
        let encoded = descriptors.encode();
        let commit = Commit::of(&descriptors, &encoded, last, time, mark);
        let first = half(epoch);
        let data = first + DESCRIPTORS_AT + encoded.len() as u64;
        self.file.write_all_at(&encoded, first + DESCRIPTORS_AT)?;
        for (entry, part) in descriptors.entries().zip(parts) {
            if let Some(bytes) = part.bytes.as_deref().filter(|_| !entry.data.is_empty()) {
                self.file.write_all_at(bytes, data + entry.data.start)?;
            }
        }
        self.file.write_all_at(&commit.encode(), first + COMMIT_AT)
    }

    /// The epoch in a half, if it is whole.
    fn read(&self, of: Of, first: u64) -> io::Result<Option<Whole>> {
        let mut bytes = [0u8; COMMIT_BYTES];
        self.file.read_exact_at(&mut bytes, first + COMMIT_AT)?;
        let Ok(commit) = Commit::decode(&bytes, of.volume) else { return Ok(None) };
        let mine = commit.cache == of.cache && commit.generation == of.generation;
        let fits = DESCRIPTORS_AT + u64::from(commit.descriptors) + commit.data <= HALF;
        if !mine || !fits || half(commit.epoch) != first {
            return Ok(None);
        }
        let mut encoded = vec![0u8; commit.descriptors as usize];
        self.file.read_exact_at(&mut encoded, first + DESCRIPTORS_AT)?;
        let descriptors = Descriptors::decode(&encoded, of.volume);
        let Ok(descriptors) = descriptors else { return Ok(None) };
        let same = descriptors.epoch == commit.epoch && descriptors.generation == of.generation;
        if !same || !commit.covers(&encoded) {
            return Ok(None);
        }
        let data = first + DESCRIPTORS_AT + encoded.len() as u64;
        for entry in descriptors.entries() {
            let mut bytes = vec![0u8; (entry.data.end - entry.data.start) as usize];
            self.file.read_exact_at(&mut bytes, data + entry.data.start)?;
            if pieces::check(entry.sums, 0, &bytes).is_err() {
                return Ok(None);
            }
        }
        Ok(Some(Whole { commit, descriptors, data }))
    }

    /// Applies the last epoch that is whole to the store, and makes that durable. `None`: there is none, and no write in place of one has ever
    /// begun. What is read is made durable before [jflush]: it may be in the memory of the system alone.
    ///
    /// # Errors
    /// When the journal cannot be read or the store cannot be written: then the store is between two epochs, and this is to be done again.
    pub fn apply(&self, of: Of, store: &dyn Backing) -> Result<Option<Applied>, String> {
        let say = |e: io::Error| format!("journal '{}': {e}", self.path.display());
        self.file.sync_all().map_err(say)?;
        let halves = [0, HALF].map(|first| self.read(of, first));
        let [a, b] = halves;
        let mut whole: Vec<Whole> =
            [a.map_err(say)?, b.map_err(say)?].into_iter().flatten().collect();
        whole.sort_by_key(|whole| whole.commit.epoch);
        let Some(Whole { commit, descriptors, data }) = whole.pop() else { return Ok(None) };
        let session = store.session().map_err(|e| e.to_string())?;
        let mut session = Alone::new(session).map_err(|e| e.to_string())?;
        for entry in descriptors.entries() {
            let mut done = 0;
            while done < entry.extent.length {
                let len = (entry.extent.length - done).min(PIECE);
                let offset = entry.extent.offset + done;
                let op = match entry.extent.kind {
                    ExtentKind::Data => {
                        let mut buf = AlignedBuf::zeroed(len as usize);
                        let at = data + entry.data.start + done;
                        self.file.read_exact_at(&mut buf, at).map_err(say)?;
                        Op::Write { offset, data: Payload::new(buf), fua: false }
                    }
                    // What is trimmed reads as zeros in an image that is a cut.
                    ExtentKind::Zero | ExtentKind::Trim => {
                        let len = len as u32;
                        Op::WriteZeroes { offset, len, fua: false, may_punch: true, fast: false }
                    }
                };
                ask(&mut session, op)?;
                done += len;
            }
        }
        ask(&mut session, Op::Flush)?;
        let Commit { epoch, last, time, mark, .. } = commit;
        Ok(Some(Applied { epoch, last, time, mark }))
    }
}

fn ask(session: &mut Alone, op: Op) -> Result<(), String> {
    session.submit(0, op);
    let done = session.next(PATIENCE, || false).ok_or("the store does not answer")?;
    let outcome: Outcome = done.outcome;
    outcome.map(drop).map_err(|failure| failure.to_string())
}

/// What a journal's thread is asked for.
enum Work {
    Write(Named, Vec<JournalPart<Payload>>),
    Flush,
}

/// A journal with its thread. It ends when this goes.
pub(in crate::block) struct Journaling {
    work: Sender<Work>,
}

impl Journaling {
    /// The journal of the volume with this attachment number.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub(super) fn start(
        core: Weak<Core>,
        attachment: u32,
        of: Of,
        journal: Journal,
    ) -> io::Result<Journaling> {
        let (work, asked) = channel();
        std::thread::Builder::new()
            .name("block-journal".into())
            .spawn(move || run(&core, attachment, of, &journal, &asked))?;
        Ok(Journaling { work })
    }

    pub(in crate::block) fn write(
        &self,
        (epoch, last, mark): (u64, u64, Option<String>),
        parts: Vec<JournalPart<Payload>>,
    ) {
        // Where the thread has ended nothing is journaled any more, and the destage stands.
        let _ = self.work.send(Work::Write((epoch, last, super::unix_nanos(), mark), parts));
    }

    pub(in crate::block) fn flush(&self) {
        let _ = self.work.send(Work::Flush);
    }
}

fn run(core: &Weak<Core>, attachment: u32, of: Of, journal: &Journal, asked: &Receiver<Work>) {
    while let Ok(work) = asked.recv() {
        let (flushed, done) = match work {
            Work::Write(named, parts) => (false, journal.write(of, named, &parts)),
            Work::Flush => (true, journal.file.sync_data()),
        };
        if let Err(error) = &done {
            tracing::error!("journal '{}': {error}", journal.path.display());
        }
        let Some(core) = core.upgrade() else { return };
        let thread = core.destages(attachment) as u64;
        let message = Message::Journal { attachment, flushed, done: done.is_ok() };
        send(&*core, OpId(thread << OP_BITS), message);
    }
}
