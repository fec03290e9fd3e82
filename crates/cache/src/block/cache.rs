//! The block cache as a program that embeds it sees it: volumes through a cache, and what requests come to.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use larder_policy::block::BlockKind;
use larder_runtime::AlignedBuf;
use larder_volume::Backing;
use larder_volume::op::{Extent, Failure, FailureKind, MAX_PAYLOAD, Outcome};
use parking_lot::Mutex;

use super::back::BackWish;
use super::builder::Builder;
use super::open::Warmth;
use super::queue::{Queue, Queues};
use super::service::Command;
use super::volume::{Client, Volume, VolumeError, Volumes};
use super::workers::{Ask, Ended, Workers};
use super::{CacheError, CacheStats, Core, Detaching, One, Running, Told};
use crate::slot::Slot;

/// Most bytes of a trim or of zeroes that are asked for as one; longer ones are several.
const PIECE: u64 = 1 << 30;

/// A cache on flash before volumes. A clone is another handle of the same cache. When the last handle of it goes, and of its volumes, it
/// closes as by [`Cache::close`].
///
/// Volumes are written through: a write is answered when the volume's store has it, so that the cache may be lost at any time.
///
/// ```
/// use larder_base::ByteSize;
/// use larder_cache::block::Cache;
///
/// let dir = tempfile::tempdir()?;
/// let disk = dir.path().join("disk");
/// std::fs::File::create(&disk)?.set_len(16 << 20)?;
/// let cache = Cache::builder(dir.path().join("cache"))
///     .create(ByteSize::mib(64))
///     .state_dir(dir.path().join("state"))
///     .volume("disk", &format!("file:{}", disk.display()))?
///     .open()?;
/// let disk = cache.volume("disk").expect("it was named above");
/// disk.write(4096, b"written through").wait()?;
/// disk.flush().wait()?;
/// assert_eq!(&disk.read(4096, 15).wait()?[..], b"written through");
/// drop(disk);
/// cache.close();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Cache(Arc<Handles>);

/// What all handles share. It goes with the last of them.
pub(super) struct Handles(Arc<Shared>);

struct Shared {
    pub(super) workers: Workers,
    queues: Arc<Queues>,
    volumes: Volumes,
    next_worker: AtomicUsize,
    closed: AtomicBool,
    /// Held while it closes.
    closing: Mutex<()>,
    warmth: Warmth,
    line: u32,
    /// Ends last.
    running: Mutex<Option<Running>>,
    core: Arc<Core>,
}

impl Shared {
    /// Returns when it is closed, whoever closes it: without threads that may be this one, further up.
    fn close(&self) {
        let closing = match self.workers.are_threads() {
            true => Some(self.closing.lock()),
            false => self.closing.try_lock(),
        };
        if closing.is_none() || self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.queues.refuse();
        // What they wait for is done by the cache's threads.
        self.queues.wait();
        // Who hears how a request has ended may call the cache: it finds it closed.
        let running = self.running.lock().take();
        if let Some(running) = running {
            self.workers.end_by_hand(|| running.turn());
            self.workers.stop();
            running.stop();
        }
    }
}

impl Handles {
    pub(super) fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    pub(super) fn queues(&self) -> &Arc<Queues> {
        &self.0.queues
    }

    /// A thread of the cache cannot wait for its own end, nor one that has a queue for what it has begun in that.
    fn close(&self) {
        self.0.queues.refuse();
        if !self.0.workers.is_one() && !self.0.queues.waits_for_me() {
            return self.0.close();
        }
        let shared = self.0.clone();
        let closing = std::thread::Builder::new().name("larder-close".into());
        if let Err(error) = closing.spawn(move || shared.close()) {
            tracing::error!(%error, "the cache cannot be closed: its next start is as after a kill");
        }
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        if !self.0.closed.load(Ordering::SeqCst) {
            self.close();
        }
    }
}

impl Cache {
    /// Begins to describe the cache on the file or device at `path`.
    pub fn builder(path: impl Into<std::path::PathBuf>) -> Builder {
        Builder::new(path.into())
    }

    pub(super) fn over(running: Running, volumes: Volumes, workers: Workers) -> Cache {
        let (core, warmth) = (running.cache().clone(), running.warmth.clone());
        Cache(Arc::new(Handles(Arc::new(Shared {
            queues: Arc::new(Queues::new(&core)),
            workers,
            volumes,
            next_worker: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            closing: Mutex::new(()),
            warmth,
            line: core.line_bytes(),
            running: Mutex::new(Some(running)),
            core,
        }))))
    }

    /// How the map of what is cached was found.
    pub fn warmth(&self) -> &Warmth {
        &self.0.0.warmth
    }

    /// A client of the volume of that name. Requests of one client are seen as one stream: readers in sequence are recognised by it.
    pub fn volume(&self, name: &str) -> Option<CachedVolume> {
        self.0.0.volumes.find(name).filter(|_| !name.is_empty()).map(|volume| self.client(&volume))
    }

    fn client(&self, volume: &Arc<Volume>) -> CachedVolume {
        let client = OfClient {
            worker: self.0.0.next_worker.fetch_add(1, Ordering::Relaxed),
            told: Told::new(volume),
            _client: Client::new(volume),
            volume: volume.clone(),
        };
        let (of, cache) = (Arc::new(client), self.0.clone());
        CachedVolume { of, cache, holds: BlockKind::Unknown }
    }

    /// A queue of the calling thread's own, with a descriptor to poll. There may be as many at a time as [`Builder::queues`] says.
    ///
    /// # Errors
    /// When there are as many, the cache has no threads or is closed, or a ring or a descriptor cannot be had.
    pub fn queue(&self) -> Result<Queue, CacheError> {
        Queue::new(self.0.clone(), self.0.0.core.config().ring)
    }

    /// Names of the volumes.
    pub fn volumes(&self) -> Vec<String> {
        self.0.0.volumes.all().iter().map(|v| v.name().to_owned()).collect()
    }

    /// Takes a volume, so that nobody else attaches, detaches or resizes it meanwhile.
    fn takes(&self, name: &str) -> Result<One<'_>, CacheError> {
        self.0.0.core.changing().try_volume(name).ok_or_else(|| CacheError::Volume {
            name: name.to_owned(),
            reason: "it is being attached, detached or resized: try again when that has ended"
                .to_owned(),
        })
    }

    /// The same of a volume's store.
    fn takes_store(&self, volume: &Volume) -> Result<One<'_>, CacheError> {
        let taken = self.0.0.core.changing().try_store(volume.backing().place());
        taken.ok_or_else(|| CacheError::Volume {
            name: volume.name().to_owned(),
            reason: format!(
                "its store '{}' is being attached or detached as another volume: try again when that has ended",
                volume.backing().uri()
            ),
        })
    }

    /// Takes up another volume, with what is cached of it if its store is as it was left. It may take as long as the store does.
    ///
    /// # Errors
    /// When there is one of that name or with that store, one comes or goes at this moment, it does not fit, or its identity cannot be found
    /// out.
    pub fn attach(&self, name: &str, store: Box<dyn Backing>) -> Result<CachedVolume, CacheError> {
        let marker = self.0.0.core.config().wish_of(name).marker;
        self.attach_as(name, store, &BackWish { back: None, marker })
    }

    /// The same of a volume that may write back. One that was put aside with what is dirty ([`Cache::detach_dirty`]) is taken up by this, with
    /// the cache that it was put aside in: on any host.
    ///
    /// # Errors
    /// As [`Cache::attach`], and when its marker forbids it.
    pub fn attach_as(
        &self,
        name: &str,
        store: Box<dyn Backing>,
        wish: &BackWish,
    ) -> Result<CachedVolume, CacheError> {
        let fail =
            |e: VolumeError| CacheError::Volume { name: name.to_owned(), reason: e.to_string() };
        let volume = Arc::new(Volume::new(name, store, self.0.0.line, true));
        let volumes = &self.0.0.volumes;
        let _one = self.takes(name)?;
        let _store = self.takes_store(&volume)?;
        volumes.check_free(name).map_err(fail)?;
        let alike = volumes.expect(&volume).map_err(fail)?;
        // Nobody may ask anything of it before it has its place: it would be asked past the cache.
        let cached = self.0.0.core.attach_as(&volume, false, wish)?;
        if let Err(why) = cached {
            tracing::info!("volume '{name}': nothing of it is cached: {why}");
        }
        volumes.restore(volume.clone()).map_err(fail)?;
        if let Some(alike) = alike {
            tracing::warn!("{alike}");
        }
        Ok(self.client(&volume))
    }

    /// Puts a volume aside in good order, when the last of its clients has gone; `go_on` hears how far it is and may say no as long as there
    /// are clients. What is cached of it is used when it comes back. Returns whether it was put aside.
    ///
    /// # Errors
    /// When there is no such volume, somebody else attaches, detaches or resizes it, or the cache is closed: nothing has changed then.
    pub fn detach(
        &self,
        name: &str,
        go_on: &mut dyn FnMut(Detaching) -> bool,
    ) -> Result<bool, CacheError> {
        self.puts_aside(name, false, go_on)
    }

    /// The same of a volume that writes back, with what is dirty: it stays in the cache, which may be moved to another host. The volume is
    /// served by no other cache until this one has taken it up again.
    ///
    /// # Errors
    /// As [`Cache::detach`], and when it does not write back, or what is dirty is not durable on the cache device.
    pub fn detach_dirty(
        &self,
        name: &str,
        go_on: &mut dyn FnMut(Detaching) -> bool,
    ) -> Result<bool, CacheError> {
        self.puts_aside(name, true, go_on)
    }

    /// A volume writes back from now on, or through, while it is served; requests wait for a moment. `go_on` hears how many bytes of the
    /// write log are still to come to its store, and may say no. Returns whether it changed over. A later start goes by its own configuration.
    ///
    /// # Errors
    /// When it does so already, its marker forbids it, its clients would have to wait too long, or a step fails: it is as it was then.
    pub fn change_over(
        &self,
        name: &str,
        wish: &BackWish,
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<bool, CacheError> {
        let _one = self.takes(name)?;
        self.0.0.core.change_over(name, wish, go_on)
    }

    fn puts_aside(
        &self,
        name: &str,
        keep_dirty: bool,
        go_on: &mut dyn FnMut(Detaching) -> bool,
    ) -> Result<bool, CacheError> {
        let Shared { core, volumes, .. } = &*self.0.0;
        let _one = self.takes(name)?;
        let found = volumes.find(name).filter(|volume| volume.name() == name);
        let _store = found.map(|volume| self.takes_store(&volume)).transpose()?;
        let Some(volume) = volumes.remove(name) else {
            return Err(CacheError::Volume {
                name: name.to_owned(),
                reason: "there is no such volume".to_owned(),
            });
        };
        let aside = match core.volume(name) {
            Some(_) if keep_dirty => core.detach_dirty(name, false, go_on),
            Some(_) => core.detach(name, false, go_on),
            None => Ok(core.let_go(&volume, false, go_on).then_some(true)),
        };
        if matches!(aside, Ok(Some(_))) {
            volumes.gone(&volume);
        } else {
            // (Nobody else has its name: it is taken.)
            volumes
                .restore(volume)
                .map_err(|e| CacheError::Volume { name: name.to_owned(), reason: e.to_string() })?;
        }
        aside.map(|aside| aside.is_some())
    }

    /// A volume has `bytes` from now on, or what its store has grown to. Returns its size.
    ///
    /// # Errors
    /// When there is no such volume, somebody else attaches, detaches or resizes it, its store does not grow from here, or it does not fit.
    pub fn grow(&self, name: &str, bytes: Option<u64>) -> Result<u64, CacheError> {
        let _one = self.takes(name)?;
        let volume = self.0.0.core.attached(name)?;
        let fail = |reason: String| CacheError::Volume { name: name.to_owned(), reason };
        if let Some(bytes) = bytes {
            self.0.0.core.may_grow_to(name, bytes)?;
        }
        let size = volume.volume().backing().resize(bytes).map_err(|e| fail(e.to_string()))?;
        if size > volume.bytes() {
            self.0.0.core.grow(name, size)?;
        }
        Ok(volume.bytes())
    }

    /// What the cache holds and has done.
    pub fn stats(&self) -> CacheStats {
        self.0.0.core.stats()
    }

    /// The core of the cache, for programs that operate it: what is selected, explained, checked, brought ahead, taken back.
    pub fn core(&self) -> &Arc<Core> {
        &self.0.0.core
    }

    /// Without threads ([`Builder::threads`] of 0): does what is due, and tells after what time something is due again. `None` where threads do
    /// it, or the cache is closed.
    pub fn turn(&self) -> Option<Duration> {
        let due = self.0.0.running.lock().as_ref()?.turn()?;
        // Who hears of it may call the cache.
        self.0.0.workers.answer();
        Some(Duration::from_nanos(due.saturating_sub(self.0.0.core.uptime()).0))
    }

    /// Ends the cache: requests under way end, and the map becomes durable, so that the next start is warm after a reboot too. Requests from now
    /// on fail. It waits for stores as long as they take, and for what threads have begun in [queues](Cache::queue) of their own, which they must
    /// go on with; where this thread has, it closes behind that, and this returns at once. It can be opened again when the last handle has
    /// gone, those of volumes and queues among them.
    pub fn close(&self) {
        self.0.close();
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("volumes", &self.volumes()).finish_non_exhaustive()
    }
}

/// A client of a volume.
pub(super) struct OfClient {
    worker: usize,
    told: Told,
    _client: Client,
    volume: Arc<Volume>,
}

impl OfClient {
    pub(super) fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    /// What the client is to hear of a request that has ended so.
    pub(super) fn hear(&self, losses: Option<u64>, outcome: Outcome) -> Outcome {
        self.told.hear(losses, outcome)
    }
}

/// A volume through the cache. Clones are one client.
#[derive(Clone)]
pub struct CachedVolume {
    /// Requests under way have it too: what they do not have is a handle of the cache.
    of: Arc<OfClient>,
    cache: Arc<Handles>,
    holds: BlockKind,
}

impl CachedVolume {
    /// Its name.
    pub fn name(&self) -> &str {
        self.of.volume.name()
    }

    /// Its size, bytes.
    pub fn bytes(&self) -> u64 {
        self.of.volume.capabilities().size
    }

    /// The same client, whose requests are about blocks that hold that: admission need not find out.
    #[must_use]
    pub fn holding(&self, holds: BlockKind) -> CachedVolume {
        CachedVolume { of: self.of.clone(), cache: self.cache.clone(), holds }
    }

    /// Reads `len` bytes from byte `offset` on.
    pub fn read(&self, offset: u64, len: usize) -> Pending<Bytes> {
        if let Some(failure) = self.refuses(offset, len as u64, u64::from(MAX_PAYLOAD), false) {
            return Pending::failed(failure);
        }
        self.ask([Command::Read { offset, buf: AlignedBuf::zeroed(len) }])
    }

    /// Writes bytes from byte `offset` on. It has ended well when the store has them; durable they are behind the next [`CachedVolume::flush`].
    pub fn write(&self, offset: u64, bytes: impl AsRef<[u8]>) -> Pending<()> {
        self.write_as(offset, bytes.as_ref(), false)
    }

    /// The same, and durable.
    pub fn write_durably(&self, offset: u64, bytes: impl AsRef<[u8]>) -> Pending<()> {
        self.write_as(offset, bytes.as_ref(), true)
    }

    fn write_as(&self, offset: u64, bytes: &[u8], fua: bool) -> Pending<()> {
        let len = bytes.len() as u64;
        if let Some(failure) = self.refuses(offset, len, u64::from(MAX_PAYLOAD), true) {
            return Pending::failed(failure);
        }
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        self.ask([Command::Write { offset, buf, fua }])
    }

    /// Makes durable whatever has ended before. It fails once where the store may have lost writes that it had answered.
    pub fn flush(&self) -> Pending<()> {
        self.ask([Command::Flush])
    }

    /// A consistency point of a volume that writes back: whatever has ended before is durable on the cache's flash, under that name (1 to 255
    /// bytes), and where the volume's epochs end at marks, its store may be what it is now. It waits until that is so, and brings nothing to
    /// the store. Other volumes have none. Returns the mark's sequence.
    ///
    /// # Errors
    /// When the volume does not write back, the name is none, or the write log fails.
    pub fn consistency_point(&self, name: &str) -> Result<u64, CacheError> {
        let sequence = self.cache.0.core.mark(self.name(), name, &mut || true)?;
        Ok(sequence.unwrap_or(0))
    }

    /// The range reads as zeroes from now on.
    pub fn zero(&self, offset: u64, len: u64) -> Pending<()> {
        let zero = |(offset, len)| Command::WriteZeroes {
            offset,
            len,
            fua: false,
            may_punch: true,
            fast: false,
        };
        self.ranged(offset, len, true, zero)
    }

    /// The range is no longer needed: it may read as anything.
    pub fn trim(&self, offset: u64, len: u64) -> Pending<()> {
        self.ranged(offset, len, true, |(offset, len)| Command::Trim { offset, len, fua: false })
    }

    /// The range will be read soon: as much of it as there is room for is brought into the cache.
    pub fn advise(&self, offset: u64, len: u64) -> Pending<()> {
        self.ranged(offset, len, false, |(offset, len)| Command::Advise { offset, len })
    }

    /// Which parts of the range are holes in the store, and which read as zeroes.
    pub fn status(&self, offset: u64, len: u32) -> Pending<Vec<Extent>> {
        if let Some(failure) = self.refuses(offset, len.into(), u32::MAX.into(), false) {
            return Pending::failed(failure);
        }
        self.ask([Command::Status { offset, len, one: false }])
    }

    fn ranged<R: Ends>(
        &self,
        offset: u64,
        len: u64,
        changes: bool,
        command: impl Fn((u64, u32)) -> Command,
    ) -> Pending<R> {
        if let Some(failure) = self.refuses(offset, len, u64::MAX, changes) {
            return Pending::failed(failure);
        }
        let pieces = (0..len.div_ceil(PIECE)).map(|n| (n * PIECE, (len - n * PIECE).min(PIECE)));
        self.ask(pieces.map(|(at, len)| command((offset + at, len as u32))))
    }

    /// What is wrong with a range, if something is.
    fn refuses(&self, offset: u64, len: u64, most: u64, changes: bool) -> Option<Failure> {
        let about = self.of.volume.capabilities();
        let end = offset.checked_add(len).filter(|end| *end <= about.size);
        let minimum = u64::from(about.minimum.max(1));
        let refuse = |kind, text: String| Some(Failure::new(kind, text));
        if len == 0 || end.is_none() {
            let text = format!(
                "bytes {offset} to {} are not in the volume, which has {}",
                offset.saturating_add(len),
                about.size
            );
            return refuse(FailureKind::Invalid, text);
        }
        if len > most {
            return refuse(
                FailureKind::TooLong,
                format!("{len} bytes at once are too many: at most {most}"),
            );
        }
        if !offset.is_multiple_of(minimum) || !len.is_multiple_of(minimum) {
            let text = format!("its store takes multiples of {minimum} bytes alone");
            return refuse(FailureKind::Invalid, text);
        }
        if changes && about.read_only {
            return refuse(FailureKind::Denied, "the volume is read-only".to_owned());
        }
        None
    }

    /// Whether it is a volume of that cache.
    pub(super) fn is_of(&self, cache: &Arc<Handles>) -> bool {
        Arc::ptr_eq(&self.cache, cache)
    }

    /// Whose requests they are, and what those are about.
    pub(super) fn asks(&self) -> (&Arc<OfClient>, BlockKind) {
        (&self.of, self.holds)
    }

    /// What is wrong with a request, if something is.
    pub(super) fn refuses_command(&self, command: &Command) -> Option<Failure> {
        let (payload, any) = (u64::from(MAX_PAYLOAD), u64::from(u32::MAX));
        match *command {
            Command::Read { offset, ref buf } => {
                self.refuses(offset, buf.len() as u64, payload, false)
            }
            Command::Write { offset, ref buf, .. } => {
                self.refuses(offset, buf.len() as u64, payload, true)
            }
            Command::Flush => None,
            Command::Trim { offset, len, .. } | Command::WriteZeroes { offset, len, .. } => {
                self.refuses(offset, len.into(), any, true)
            }
            Command::Advise { offset, len } | Command::Status { offset, len, .. } => {
                self.refuses(offset, len.into(), any, false)
            }
        }
    }

    /// Has all of `commands` done, at once.
    fn ask<R: Ends>(&self, commands: impl IntoIterator<Item = Command>) -> Pending<R> {
        let commands: Vec<Command> = commands.into_iter().collect();
        let slot = Arc::new(Slot::default());
        let waiting =
            Arc::new(Mutex::new(Waiting { left: commands.len(), ended: Ok(R::default()) }));
        for command in commands {
            let (slot, waiting, of) = (slot.clone(), waiting.clone(), self.of.clone());
            let ended = Ended::new(move |outcome: Outcome, buf: Option<AlignedBuf>, losses| {
                let outcome = of.told.hear(losses, outcome);
                let mut waiting = waiting.lock();
                let ended = outcome.map(|extents| R::ended(extents, buf));
                if waiting.ended.is_ok() {
                    waiting.ended = ended;
                }
                waiting.left -= 1;
                if waiting.left == 0 {
                    slot.fill(std::mem::replace(&mut waiting.ended, Ok(R::default())));
                }
            });
            let (volume, holds) = (self.of.volume.clone(), self.holds);
            let ask = Ask { volume, command, holds, ended };
            let shared = &self.cache.0;
            shared.workers.ask(self.of.worker, &shared.core, ask);
        }
        Pending(slot)
    }
}

impl fmt::Debug for CachedVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CachedVolume").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Parts of a request that have not ended, and what the others came to.
struct Waiting<R> {
    left: usize,
    ended: Result<R, Failure>,
}

/// What a request comes to.
trait Ends: Default + Send + 'static {
    fn ended(extents: Vec<Extent>, buf: Option<AlignedBuf>) -> Self;
}

impl Ends for () {
    fn ended(_: Vec<Extent>, _: Option<AlignedBuf>) {}
}

impl Ends for Bytes {
    fn ended(_: Vec<Extent>, buf: Option<AlignedBuf>) -> Bytes {
        buf.map_or_else(Bytes::new, Bytes::from_owner)
    }
}

impl Ends for Vec<Extent> {
    fn ended(extents: Vec<Extent>, _: Option<AlignedBuf>) -> Vec<Extent> {
        extents
    }
}

/// A request under way: a future that needs no particular runtime, or [`Pending::wait`]. If it is dropped the request ends all the same.
#[must_use = "a request tells nothing unless it is awaited"]
pub struct Pending<R>(Arc<Slot<Result<R, Failure>>>);

impl<R> Pending<R> {
    fn failed(failure: Failure) -> Pending<R> {
        let slot = Slot::default();
        slot.fill(Err(failure));
        Pending(Arc::new(slot))
    }

    /// Blocks until it has ended. Of a cache without threads another thread must call [`Cache::turn`].
    ///
    /// # Errors
    /// As the store says, or the cache, if the request was none that the volume can do.
    pub fn wait(self) -> Result<R, Failure> {
        self.0.wait()
    }

    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

impl<R> Future for Pending<R> {
    type Output = Result<R, Failure>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(context)
    }
}

impl<R> fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("done", &self.is_done()).finish()
    }
}
