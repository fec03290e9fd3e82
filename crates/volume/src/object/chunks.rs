//! A volume's chunks: reads by range, changes by reading, merging and writing a whole chunk.
//!
//! **One writer for each chunk at a time.** Changes of a chunk go to its queue; whoever finds no task there starts one. The
//! task takes all that waits, merges it into the chunk's bytes, and writes them on condition that the object is still the
//! version that they were read from. So neighbouring small writes share one request, none is lost, and a writer from
//! elsewhere is noticed instead of overwritten.
//!
//! **A change is answered when its object is stored.** Nothing is held back, so a flush has nothing to do, and a killed
//! process loses nothing that it had answered.
//!
//! **What a lost answer may mean.** A request that was given up may still be carried out. Its object bears this
//! attachment's generation in its trailer: one that appears late is recognised, anything else is another writer's, and ends
//! the use of the volume.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use larder_base::{HashKey, KeyHasher};
use larder_runtime::Payload;
use object_store::GetRange;
use object_store::path::Path;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;

use super::lease::Holding;
use super::manifest::{CHUNKS, MANIFEST, Manifest, TRAILER_BYTES, Trailer, chunk_name, chunk_of};
use super::requests::{Requests, Trouble};
use crate::op::{Extent, Failure, FailureKind};

/// Bytes of chunks that may be under way at once.
const ROOM: u64 = 128 << 20;
/// They are counted in units of this.
const ROOM_UNIT: u64 = 64 << 10;
/// Bytes of chunks that are kept after they were written: the next write needs not read them.
const KEPT: usize = 64 << 20;
/// Extents of one status.
const MAX_EXTENTS: usize = 256;
/// A chunk that is found to be changed is looked at so often before that is an error of its own.
const LOOKS: u32 = 8;

/// A chunk's object as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    tag: Box<str>,
    /// Bytes before the trailer.
    len: u32,
}

/// What is to happen to a chunk.
enum Change {
    Write { from: usize, data: Payload },
    Zero { from: usize, len: usize },
}

impl Change {
    fn range(&self) -> (usize, usize) {
        match self {
            Change::Write { from, data } => (*from, from + data.len()),
            Change::Zero { from, len } => (*from, from + len),
        }
    }
}

struct Pending {
    change: Change,
    done: oneshot::Sender<Result<(), Failure>>,
}

/// Chunks that were written lately.
#[derive(Default)]
struct Kept {
    /// The bytes, and when they were last used.
    chunks: BTreeMap<u64, (Bytes, u64)>,
    bytes: usize,
    clock: u64,
}

impl Kept {
    fn get(&mut self, chunk: u64) -> Option<Bytes> {
        self.clock += 1;
        let (bytes, used) = self.chunks.get_mut(&chunk)?;
        *used = self.clock;
        Some(bytes.clone())
    }

    fn remove(&mut self, chunk: u64) {
        if let Some((bytes, _)) = self.chunks.remove(&chunk) {
            self.bytes -= bytes.len();
        }
    }

    fn put(&mut self, chunk: u64, bytes: Bytes) {
        self.remove(chunk);
        self.clock += 1;
        self.bytes += bytes.len();
        self.chunks.insert(chunk, (bytes, self.clock));
        while self.bytes > KEPT {
            let Some((&oldest, _)) = self.chunks.iter().min_by_key(|(_, (_, used))| *used) else {
                return;
            };
            self.remove(oldest);
        }
    }
}

/// A volume in an object store.
pub(super) struct Chunks {
    pub(super) requests: Requests,
    prefix: Path,
    manifest: RefCell<Manifest>,
    manifest_tag: RefCell<Option<String>>,
    /// Held while the manifest says that this attachment has changed something.
    marking: tokio::sync::Mutex<()>,
    marked: Cell<bool>,
    versions: RefCell<BTreeMap<u64, Version>>,
    /// The first chunk behind the volume's end that was there when the chunks were listed: somebody else's, or left over.
    stray: Cell<Option<u64>>,
    /// Sum over the versions.
    digest: Cell<u64>,
    /// A chunk has an entry as long as a task works on it.
    queues: RefCell<BTreeMap<u64, Vec<Pending>>>,
    kept: RefCell<Kept>,
    room: Semaphore,
    sequence: Cell<u64>,
    /// What keeps others from writing.
    pub(super) holding: Holding,
    fence: RefCell<Option<String>>,
    /// For other threads: there is a fence.
    lost: Arc<AtomicBool>,
}

fn hash(chunk: u64, tag: &str) -> u64 {
    let mut bytes = chunk.to_le_bytes().to_vec();
    bytes.extend_from_slice(tag.as_bytes());
    KeyHasher::new(HashKey([0; 16])).hash(&bytes).0 as u64
}

/// A path below the prefix.
pub(crate) fn below(prefix: &Path, name: &str) -> Path {
    Path::from_iter(prefix.parts().chain(Path::from(name).parts()))
}

impl Chunks {
    pub(super) fn new(
        requests: Requests,
        prefix: Path,
        manifest: Manifest,
        manifest_tag: Option<String>,
        holding: Holding,
        lost: Arc<AtomicBool>,
    ) -> Chunks {
        Chunks {
            requests,
            prefix,
            manifest: RefCell::new(manifest),
            manifest_tag: RefCell::new(manifest_tag),
            marking: tokio::sync::Mutex::default(),
            marked: Cell::new(false),
            versions: RefCell::default(),
            stray: Cell::new(None),
            digest: Cell::new(0),
            queues: RefCell::default(),
            kept: RefCell::default(),
            room: Semaphore::new((ROOM / ROOM_UNIT) as usize),
            sequence: Cell::new(0),
            holding,
            fence: RefCell::default(),
            lost,
        }
    }

    pub(super) fn manifest(&self) -> Manifest {
        self.manifest.borrow().clone()
    }

    pub(super) fn digest(&self) -> u64 {
        self.digest.get()
    }

    fn path(&self, chunk: u64) -> Path {
        below(&self.prefix, &chunk_name(chunk))
    }

    fn chunk_bytes(&self) -> u64 {
        u64::from(self.manifest.borrow().chunk)
    }

    /// Bytes of a chunk: the last one may be shorter.
    fn chunk_len(&self, chunk: u64) -> usize {
        let manifest = self.manifest.borrow();
        let each = u64::from(manifest.chunk);
        manifest.size.saturating_sub(chunk * each).min(each) as usize
    }

    fn version(&self, chunk: u64) -> Option<Version> {
        self.versions.borrow().get(&chunk).cloned()
    }

    fn set_version(&self, chunk: u64, version: Option<Version>) {
        let mut versions = self.versions.borrow_mut();
        let mut digest = self.digest.get();
        let new = version.as_ref().map(|v| hash(chunk, &v.tag));
        let old = match version {
            Some(version) => versions.insert(chunk, version),
            None => versions.remove(&chunk),
        };
        digest = digest.wrapping_sub(old.map_or(0, |v| hash(chunk, &v.tag)));
        self.digest.set(digest.wrapping_add(new.unwrap_or(0)));
    }

    /// Learns which chunks there are.
    pub(super) async fn list(&self) -> Result<(), Trouble> {
        let folder = below(&self.prefix, CHUNKS);
        let depth = self.prefix.parts().count();
        let mut after: Option<Path> = None;
        let mut said = std::time::Instant::now();
        // A list may be long: each try goes on where the last one failed.
        let end = self.requests.timeout().give_up.map(|p| std::time::Instant::now() + p);
        loop {
            let mut stream = match &after {
                None => self.requests.store().list(Some(&folder)),
                Some(after) => self.requests.store().list_with_offset(Some(&folder), after),
            };
            let trouble = loop {
                let next = tokio::time::timeout(self.requests.timeout().silence, stream.next());
                let meta = match next.await {
                    Ok(Some(Ok(meta))) => meta,
                    Ok(None) => {
                        self.requests.well();
                        return Ok(());
                    }
                    Ok(Some(Err(e))) => break e.to_string(),
                    Err(_) => break "no answer".to_owned(),
                };
                let parts: Vec<String> =
                    meta.location.parts().skip(depth).map(|p| p.as_ref().to_owned()).collect();
                let chunk = chunk_of(&parts.join("/"));
                if let Some(chunk) = chunk.filter(|&c| self.chunk_len(c) == 0) {
                    self.stray.set(Some(self.stray.get().map_or(chunk, |s| s.min(chunk))));
                }
                if let Some(chunk) = chunk
                    && self.chunk_len(chunk) > 0
                    && let Some(tag) = &meta.e_tag
                {
                    let len = meta.size.saturating_sub(TRAILER_BYTES as u64);
                    let len = len.min(self.chunk_bytes()) as u32;
                    self.set_version(chunk, Some(Version { tag: tag.as_str().into(), len }));
                } else {
                    tracing::warn!(
                        "backing store '{}': '{}' is none of the volume's chunks",
                        self.requests.uri(),
                        meta.location
                    );
                }
                after = Some(meta.location);
                if said.elapsed() > Duration::from_secs(5) {
                    said = std::time::Instant::now();
                    let known = self.versions.borrow().len();
                    tracing::info!(
                        "backing store '{}': {known} chunks listed so far",
                        self.requests.uri()
                    );
                }
            };
            self.requests.unwell(&format!("the list of chunks: {trouble}"));
            if end.is_some_and(|end| std::time::Instant::now() >= end) {
                return Err(Trouble::Failed(trouble));
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }

    /// Ends the use of the volume.
    pub(super) fn fence(&self, why: String) {
        if self.fence.borrow().is_none() {
            tracing::error!(
                "backing store '{}': {why}. The volume is not used any more; stop the other writer, then start this one again",
                self.requests.uri()
            );
            *self.fence.borrow_mut() = Some(why);
            self.lost.store(true, Ordering::SeqCst);
        }
    }

    pub(super) fn is_fenced(&self) -> bool {
        self.fence.borrow().is_some()
    }

    fn check_fence(&self) -> Result<(), Failure> {
        match &*self.fence.borrow() {
            None => Ok(()),
            Some(why) => Err(self.failure(why)),
        }
    }

    fn failure(&self, why: &str) -> Failure {
        Failure::new(FailureKind::Failed, format!("backing store '{}': {why}", self.requests.uri()))
    }

    fn failed(&self, what: &str, chunk: u64, trouble: &Trouble) -> Failure {
        self.failure(&format!("chunk {chunk} could not be {what}: {trouble}"))
    }

    /// A chunk's object is not the version that is known: a late request of ours, or somebody else's.
    async fn look(&self, chunk: u64, known: Option<&Version>) -> Result<(), Failure> {
        let tail = GetRange::Suffix(TRAILER_BYTES as u64);
        let generation = self.holding.generation();
        match self.requests.get(&self.path(chunk), Some(tail), None).await {
            Ok(got) => {
                let Some(tag) = got.meta.e_tag.clone() else {
                    return Err(self.failure("it gives no ETags, and they are needed"));
                };
                let same = known.is_some_and(|v| *v.tag == *tag);
                let ours =
                    Trailer::decode(&got.bytes).is_some_and(|t| generation == Some(t.generation));
                if same || ours {
                    let len = got.meta.size.saturating_sub(TRAILER_BYTES as u64);
                    let version = Version {
                        tag: tag.as_str().into(),
                        len: len.min(self.chunk_bytes()) as u32,
                    };
                    // A write that is under way is not late; and one that has ended meanwhile knows better.
                    if !same && !self.queues.borrow().contains_key(&chunk) {
                        tracing::warn!(
                            "backing store '{}': a request for chunk {chunk} that was given up was carried out",
                            self.requests.uri()
                        );
                    }
                    if self.version(chunk).as_ref() == known {
                        self.kept.borrow_mut().remove(chunk);
                        self.set_version(chunk, Some(version));
                    }
                    return Ok(());
                }
                self.fence(format!("chunk {chunk} was written by somebody else"));
            }
            Err(Trouble::Missing) if known.is_none() => return Ok(()),
            Err(Trouble::Missing) => {
                self.fence(format!("chunk {chunk} was removed by somebody else"))
            }
            Err(e) => return Err(self.failed("read", chunk, &e)),
        }
        self.check_fence()
    }

    // ---- reads ----

    /// A range of the volume, in pieces by chunk: each with its place in the range.
    fn pieces(
        &self,
        offset: u64,
        len: u64,
    ) -> impl Iterator<Item = (u64, usize, usize, usize)> + use<> {
        let each = self.chunk_bytes();
        let (first, end) = (offset / each, offset + len);
        (first..end.div_ceil(each)).map(move |chunk| {
            let from = offset.max(chunk * each);
            let to = end.min((chunk + 1) * each);
            (chunk, (from - chunk * each) as usize, (to - from) as usize, (from - offset) as usize)
        })
    }

    pub(super) async fn read(
        self: &Rc<Chunks>,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), Failure> {
        self.check_fence()?;
        let mut pieces: Vec<_> = self.pieces(offset, out.len() as u64).collect();
        if pieces.len() == 1 {
            let (chunk, from, len, _) = pieces.remove(0);
            let bytes = self.piece(chunk, from, len).await?;
            fill(out, &bytes);
            return Ok(());
        }
        let mut tasks = JoinSet::new();
        for (chunk, from, len, at) in pieces {
            let me = self.clone();
            tasks.spawn_local(async move { (at, len, me.piece(chunk, from, len).await) });
        }
        while let Some(done) = tasks.join_next().await {
            let (at, len, bytes) = done.map_err(|e| self.failure(&e.to_string()))?;
            fill(&mut out[at..at + len], &bytes?);
        }
        Ok(())
    }

    /// Bytes of a chunk, as many as there are: behind them are zeroes.
    async fn piece(&self, chunk: u64, from: usize, len: usize) -> Result<Bytes, Failure> {
        for _ in 0..LOOKS {
            let Some(version) = self.version(chunk) else { return Ok(Bytes::new()) };
            if let Some(kept) = self.kept.borrow_mut().get(chunk) {
                let to = (from + len).min(kept.len());
                return Ok(kept.slice(from.min(to)..to));
            }
            let to = (from + len).min(version.len as usize);
            if from >= to {
                return Ok(Bytes::new());
            }
            let units = ((to - from) as u64).div_ceil(ROOM_UNIT) as u32;
            let _room = self.room.acquire_many(units).await;
            let range = GetRange::Bounded(from as u64..to as u64);
            let got = self.requests.get(&self.path(chunk), Some(range), Some(&version.tag)).await;
            self.check_fence()?;
            match got {
                Ok(got) if got.bytes.len() == to - from => return Ok(got.bytes),
                Ok(got) => {
                    let found = got.bytes.len();
                    return Err(self.failure(&format!(
                        "{found} bytes of chunk {chunk} came instead of {}",
                        to - from
                    )));
                }
                // It was written meanwhile, by us.
                Err(Trouble::Changed | Trouble::Missing)
                    if self.version(chunk).as_ref() != Some(&version) => {}
                Err(Trouble::Changed | Trouble::Missing) => {
                    self.look(chunk, Some(&version)).await?
                }
                Err(e) => return Err(self.failed("read", chunk, &e)),
            }
        }
        Err(self.failure(&format!("chunk {chunk} changes faster than it can be read")))
    }

    /// The part of a range that consists of whole chunks: start and length.
    pub(super) fn whole_chunks(&self, offset: u64, len: u64) -> (u64, u64) {
        let manifest = self.manifest.borrow();
        let (each, end) = (u64::from(manifest.chunk), offset + len);
        let from = offset.next_multiple_of(each);
        let to = if end == manifest.size { end } else { end / each * each };
        (from, to.saturating_sub(from))
    }

    /// Which parts of a range are zeroes, as far as whole chunks tell.
    pub(super) fn status(&self, offset: u64, len: u32, one: bool) -> Vec<Extent> {
        let mut out: Vec<Extent> = Vec::new();
        for (chunk, from, len, _) in self.pieces(offset, u64::from(len)) {
            let data = self.version(chunk).is_some_and(|v| (v.len as usize) > from);
            let hole = !data && !self.queues.borrow().contains_key(&chunk);
            let full = one || out.len() == MAX_EXTENTS;
            match out.last_mut() {
                Some(last) if last.hole == hole => last.len += len as u32,
                Some(_) if full => break,
                _ => out.push(Extent { len: len as u32, hole, zero: hole }),
            }
        }
        out
    }

    // ---- changes ----

    /// Writes, or zeroes where there are no bytes.
    pub(super) async fn change(
        self: &Rc<Chunks>,
        offset: u64,
        len: u64,
        data: Option<&Payload>,
    ) -> Result<(), Failure> {
        self.check_fence()?;
        let mut waits = Vec::new();
        for (chunk, from, len, at) in self.pieces(offset, len) {
            let change = match data {
                Some(data) => Change::Write { from, data: data.part(at, len) },
                None => Change::Zero { from, len },
            };
            let (done, wait) = oneshot::channel();
            waits.push(wait);
            let pending = Pending { change, done };
            let mut queues = self.queues.borrow_mut();
            match queues.entry(chunk) {
                Entry::Occupied(mut queue) => queue.get_mut().push(pending),
                Entry::Vacant(place) => {
                    place.insert(vec![pending]);
                    let me = self.clone();
                    tokio::task::spawn_local(async move { me.run(chunk).await });
                }
            }
        }
        let mut outcome = Ok(());
        for wait in waits {
            let one = wait.await.unwrap_or_else(|_| Err(self.failure("the write was dropped")));
            if outcome.is_ok() {
                outcome = one;
            }
        }
        outcome
    }

    /// Carries out a chunk's changes until there are none.
    async fn run(self: Rc<Chunks>, chunk: u64) {
        loop {
            let group = match self.queues.borrow_mut().get_mut(&chunk) {
                Some(queue) => std::mem::take(queue),
                None => return,
            };
            if group.is_empty() {
                self.queues.borrow_mut().remove(&chunk);
                return;
            }
            let changes: Vec<&Change> = group.iter().map(|p| &p.change).collect();
            let outcome = self.commit(chunk, &changes).await;
            for pending in group {
                // Nobody waits any more: it is done all the same.
                let _ = pending.done.send(outcome.clone());
            }
        }
    }

    /// Makes a chunk what the changes say, in one write.
    async fn commit(&self, chunk: u64, changes: &[&Change]) -> Result<(), Failure> {
        let len = self.chunk_len(chunk);
        self.mark().await?;
        // What is replaced as a whole need not be read; what is zero from end to end is not stored.
        let covered = |c: &&Change| c.range() == (0, len);
        let zeroed = changes.iter().rposition(|c| covered(c) && matches!(c, Change::Zero { .. }));
        if zeroed == Some(changes.len() - 1) {
            return self.clear(chunk).await;
        }
        // Its bytes as they were, and as they will be.
        let units = (2 * len as u64).div_ceil(ROOM_UNIT).min(ROOM / ROOM_UNIT) as u32;
        let _room = self.room.acquire_many(units).await;
        for _ in 0..LOOKS {
            self.check_fence()?;
            let whole = changes.iter().any(covered);
            let version = self.version(chunk);
            let old = match &version {
                Some(version) if !whole && version.len > 0 => {
                    match self.whole(chunk, version).await? {
                        Some(bytes) => bytes,
                        None => continue,
                    }
                }
                _ => Bytes::new(),
            };
            let mut object = vec![0u8; len + TRAILER_BYTES];
            let there = old.len().min(len);
            object[..there].copy_from_slice(&old[..there]);
            for change in changes {
                let (from, to) = change.range();
                match change {
                    Change::Write { data, .. } => object[from..to].copy_from_slice(data),
                    Change::Zero { .. } => object[from..to].fill(0),
                }
            }
            if self.store(chunk, version, object, len).await? {
                return Ok(());
            }
        }
        Err(self.failure(&format!("chunk {chunk} changes faster than it can be written")))
    }

    /// A whole chunk, checked; `None` if it is another version now.
    async fn whole(&self, chunk: u64, version: &Version) -> Result<Option<Bytes>, Failure> {
        if let Some(kept) = self.kept.borrow_mut().get(chunk) {
            return Ok(Some(kept));
        }
        match self.requests.get(&self.path(chunk), None, Some(&version.tag)).await {
            Ok(got) => {
                match Trailer::check(&got.bytes) {
                    Some((data, _)) => Ok(Some(got.bytes.slice(..data.len()))),
                    None => Err(self
                        .failure(&format!("chunk {chunk} is damaged: its checksum does not fit"))),
                }
            }
            Err(Trouble::Changed | Trouble::Missing) => {
                self.look(chunk, Some(version)).await?;
                Ok(None)
            }
            Err(e) => Err(self.failed("read", chunk, &e)),
        }
    }

    /// Makes a chunk all zeroes. An object that is only a trailer stays: a deletion cannot be made conditional, and one that
    /// comes late would take newer bytes with it.
    async fn clear(&self, chunk: u64) -> Result<(), Failure> {
        for _ in 0..LOOKS {
            self.check_fence()?;
            let version = self.version(chunk);
            if version.as_ref().is_none_or(|v| v.len == 0) {
                return Ok(());
            }
            if self.store(chunk, version, vec![0; TRAILER_BYTES], 0).await? {
                return Ok(());
            }
        }
        Err(self.failure(&format!("chunk {chunk} changes faster than it can be cleared")))
    }

    /// Stores an object of `len` bytes and room for the trailer behind `version`. `false`: that is not there any more.
    async fn store(
        &self,
        chunk: u64,
        version: Option<Version>,
        mut object: Vec<u8>,
        len: usize,
    ) -> Result<bool, Failure> {
        let Some(generation) = self.holding.generation() else {
            return Err(Failure::new(FailureKind::Denied, "the volume was attached read-only"));
        };
        self.sequence.set(self.sequence.get() + 1);
        let trailer = Trailer::of(&object[..len], generation, self.sequence.get());
        object[len..].copy_from_slice(&trailer.encode());
        let object = Bytes::from(object);
        self.kept.borrow_mut().remove(chunk);
        let follows = version.as_ref().map(|v| &*v.tag);
        let left = || (!self.is_fenced()).then(|| self.holding.left());
        match self.requests.put(&self.path(chunk), object.clone(), follows, left).await {
            Ok(Some(tag)) => {
                let version = Version { tag: tag.as_str().into(), len: len as u32 };
                self.set_version(chunk, Some(version));
                if len > 0 {
                    self.kept.borrow_mut().put(chunk, object.slice(..len));
                }
                Ok(true)
            }
            Ok(None) => Err(self.failure("it gives no ETags, and they are needed")),
            Err(Trouble::Changed | Trouble::Missing) => {
                self.look(chunk, version.as_ref()).await?;
                // An earlier try may have been the one.
                let tail = GetRange::Suffix(TRAILER_BYTES as u64);
                let known = self.version(chunk);
                let tag = known.as_ref().map(|v| &*v.tag);
                match self.requests.get(&self.path(chunk), Some(tail), tag).await {
                    Ok(got) => Ok(Trailer::decode(&got.bytes) == Some(trailer)),
                    Err(Trouble::Changed | Trouble::Missing) => Ok(false),
                    Err(e) => Err(self.failed("read", chunk, &e)),
                }
            }
            Err(e) => {
                self.check_fence()?;
                Err(self.failed("written", chunk, &e))
            }
        }
    }

    /// Before the first change: the manifest says that this attachment changes the volume.
    async fn mark(&self) -> Result<(), Failure> {
        if self.marked.get() {
            return Ok(());
        }
        let _one = self.marking.lock().await;
        if self.marked.get() {
            return Ok(());
        }
        let Some(generation) = self.holding.generation() else {
            return Err(Failure::new(FailureKind::Denied, "the volume was attached read-only"));
        };
        let mut manifest = self.manifest();
        manifest.changed = generation;
        let tag = self.manifest_tag.borrow().clone();
        let at = below(&self.prefix, MANIFEST);
        match self.requests.put_record(&at, manifest.encode(), tag.as_deref()).await {
            Ok(tag) => {
                *self.manifest_tag.borrow_mut() = tag;
                *self.manifest.borrow_mut() = manifest;
                self.marked.set(true);
                Ok(())
            }
            Err(Trouble::Changed | Trouble::Missing) => {
                self.fence("another writer has attached the volume".into());
                self.check_fence()
            }
            Err(e) => Err(self.failure(&format!("its {MANIFEST} could not be written: {e}"))),
        }
    }

    /// Makes the volume `bytes` large, or only looks whether it is still as it is known. Returns its size. What is added is
    /// zeroes: there is no chunk of it.
    ///
    /// # Errors
    /// What is in the way: it is read only, would shrink, cannot be laid out so, or something lies where its chunks would.
    pub(super) async fn resize(&self, bytes: Option<u64>) -> Result<u64, String> {
        // Nothing else replaces the manifest meanwhile.
        let _one = self.marking.lock().await;
        let now = self.manifest().size;
        let Some(bytes) = bytes.filter(|&b| b != now) else {
            self.check_manifest().await;
            return self.check_fence().map(|()| now).map_err(|e| e.message);
        };
        self.check_fence().map_err(|e| e.message)?;
        if bytes < now {
            return Err(format!(
                "it has {now} bytes already, more than {bytes}: say no size, or that"
            ));
        }
        if self.holding.generation().is_none() {
            return Err("it was attached to be read only".into());
        }
        let larger = self.manifest().resized(bytes)?;
        let chunks = bytes.div_ceil(u64::from(larger.chunk));
        if let Some(stray) = self.stray.get().filter(|&s| s < chunks) {
            let name = self.path(stray);
            return Err(format!(
                "'{name}' lies where the volume would grow to, and is none of its chunks: remove what is behind the volume's end, \
                 detach the volume and attach it again"
            ));
        }
        let tag = self.manifest_tag.borrow().clone();
        let at = below(&self.prefix, MANIFEST);
        match self.requests.put_record(&at, larger.encode(), tag.as_deref()).await {
            Ok(tag) => {
                *self.manifest_tag.borrow_mut() = tag;
                *self.manifest.borrow_mut() = larger;
                Ok(bytes)
            }
            Err(Trouble::Changed | Trouble::Missing) => {
                self.fence("another writer has attached the volume".into());
                self.check_fence().map(|()| now).map_err(|e| e.message)
            }
            // It may have been carried out all the same: asked once more, that is found.
            Err(e) => Err(format!("its {MANIFEST} could not be written: {e}; try again")),
        }
    }

    /// Whether the manifest is still the one that is known. Whoever only reads looks now and then.
    pub(super) async fn check_manifest(&self) {
        let at = below(&self.prefix, MANIFEST);
        match self.requests.record(&at).await {
            Ok((_, tag)) if tag == *self.manifest_tag.borrow() => {}
            Ok(_) | Err(Trouble::Missing | Trouble::Changed) => {
                self.fence("a writer has attached the volume".into());
            }
            Err(Trouble::Failed(_)) => {}
        }
    }
}

/// What came, and zeroes behind it.
fn fill(out: &mut [u8], bytes: &[u8]) {
    out[..bytes.len()].copy_from_slice(bytes);
    out[bytes.len()..].fill(0);
}
