//! The key-value cache as a program that embeds it sees it: handles, look-ups, what they come to.

use std::any::Any;
use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use larder_base::{AppId, Expiry, ObjectHash, UnixSecs};
use larder_engine::kv::api::{
    Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_runtime::{Clock, RingOptions};

use super::builder::{Builder, seconds};
use super::reads::{Readers, Resume, Side};
use super::{CacheError, CacheStats, Core, Opened, Upkeep, locked};
use crate::slot::Slot;

/// A key-value cache in DRAM and on flash. A clone is another handle of the same cache; it may be used from any thread. When the last
/// handle goes, the cache closes as by [`Cache::close`].
///
/// A cache may forget what it was given; it never answers with an older value than the last that was inserted.
///
/// ```
/// use larder_base::ByteSize;
/// use larder_cache::kv::Cache;
///
/// let dir = tempfile::tempdir()?;
/// let cache = Cache::builder()
///     .memory(ByteSize(16 << 20))
///     .flash(dir.path(), ByteSize(64 << 20))
///     .admission("reject_first")
///     .open()?;
/// cache.insert(b"key", b"value", None)?;
/// assert_eq!(cache.get(b"key").wait().as_deref(), Some(&b"value"[..]));
/// assert!(cache.remove(b"key")?);
/// assert_eq!(cache.get(b"key").wait(), None);
/// cache.close();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Cache(Arc<Handles>);

/// What all handles share. It goes with the last of them.
struct Handles(Arc<Shared>);

struct Shared {
    core: Arc<Core>,
    clock: Arc<Clock>,
    readers: Readers,
    opened: Opened,
    /// What a cache without threads has instead of them.
    upkeep: Mutex<Option<Upkeep>>,
    closed: AtomicBool,
    /// Held while it closes.
    closing: Mutex<()>,
}

/// What a [`Cache`] is made of.
pub(super) struct Opening {
    pub(super) core: Arc<Core>,
    pub(super) clock: Arc<Clock>,
    pub(super) opened: Opened,
    /// Of a cache without threads.
    pub(super) upkeep: Option<Upkeep>,
    /// Reading threads.
    pub(super) threads: usize,
    pub(super) ring: RingOptions,
}

/// An object that was not stored. What had been stored under its key is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotStored {
    /// Key and value are longer than the largest object.
    #[error(
        "the object is larger than the largest that this cache takes: open it with a larger max_object"
    )]
    TooLarge,
    /// The key is empty or longer than 250 bytes.
    #[error("the key has {0} bytes: a key has 1 to 250")]
    Key(usize),
    /// No room could be made in DRAM.
    #[error("no room could be made in DRAM: give the cache more memory")]
    OutOfMemory,
    /// The cache has been closed.
    #[error("the cache is closed")]
    Closed,
}

/// The cache has been closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cache is closed")]
pub struct Closed;

/// The longest key, bytes.
pub const LONGEST_KEY: usize = 250;

thread_local! {
    /// A closure of [`Cache::get_with`] is running on this thread, under the lock of a shard.
    static SHOWING: Cell<bool> = const { Cell::new(false) };
}

/// A shard's lock is held on this thread while a value is shown: another call would wait for itself.
fn not_while_showing() {
    assert!(
        !SHOWING.get(),
        "the cache was called from the closure of get_with, which runs under a lock: take the value out and call afterwards"
    );
}

impl Cache {
    /// Begins to describe a cache.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(super) fn over(opening: Opening) -> Result<Cache, CacheError> {
        let Opening { core, clock, opened, upkeep, threads, ring } = opening;
        let readers = match Readers::start(&core, &clock, threads, &ring) {
            Ok(readers) => readers,
            Err(error) => {
                core.shutdown(clock.now());
                return Err(error);
            }
        };
        let closed = AtomicBool::new(false);
        let (upkeep, closing) = (Mutex::new(upkeep), Mutex::new(()));
        let shared = Shared { core, clock, readers, opened, upkeep, closed, closing };
        Ok(Cache(Arc::new(Handles(Arc::new(shared)))))
    }

    /// What opening found.
    pub fn opened(&self) -> &Opened {
        &self.0.0.opened
    }

    /// Stores an object, in DRAM; it never waits for flash. (Without threads flash is read here where another key may have to be told apart.) With `ttl` the object is gone after that, rounded up to seconds.
    ///
    /// # Errors
    /// [`NotStored`]; then nothing is stored under the key.
    pub fn insert(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        ttl: Option<Duration>,
    ) -> Result<(), NotStored> {
        let (key, value) = (key.as_ref(), value.as_ref());
        if key.is_empty() || key.len() > LONGEST_KEY {
            return Err(NotStored::Key(key.len()));
        }
        let now = self.0.0.clock.now();
        let expiry = match ttl {
            None => Expiry::NEVER,
            Some(ttl) => Expiry::at(UnixSecs(now.wall.0.saturating_add(seconds(ttl)))),
        };
        let store = Store {
            mode: StoreMode::Set,
            value,
            flags: 0,
            expiry,
            compare_cas: None,
            new_cas: None,
            invalidate: false,
            vivify: None,
        };
        let mut said = Err(NotStored::Closed);
        self.now(key, Op::Store(store), |reply| {
            said = match reply {
                Reply::Stored { .. } => Ok(()),
                Reply::TooLarge => Err(NotStored::TooLarge),
                _ => Err(NotStored::OutOfMemory),
            };
        });
        if said.is_err() && self.is_closed() { Err(NotStored::Closed) } else { said }
    }

    /// Removes an object; tells whether there was one. It is gone when this returns. Where the object may be on flash, this thread reads
    /// there (about 100 µs), since no other key may be removed with it.
    ///
    /// # Errors
    /// [`Closed`]: it may be there behind the next opening.
    pub fn remove(&self, key: impl AsRef<[u8]>) -> Result<bool, Closed> {
        let mut removed = false;
        let key = key.as_ref();
        if key.is_empty() || key.len() > LONGEST_KEY {
            return Ok(false);
        }
        self.now(key, Op::Delete(Delete::default()), |reply| {
            removed = matches!(reply, Reply::Deleted { .. });
        });
        // (Who finds it open here was answered by a cache that was.)
        if removed || !self.is_closed() { Ok(removed) } else { Err(Closed) }
    }

    /// The value of a key: at once where it is in DRAM, by one read where it is on flash. The look-up begins with this call.
    pub fn get(&self, key: impl AsRef<[u8]>) -> Lookup<Bytes> {
        self.get_with(key, Bytes::copy_from_slice)
    }

    /// What `show` makes of the value of a key, without a copy. `show` runs under the lock of a shard, on this thread or on one that
    /// reads flash: it should be short.
    ///
    /// # Panics
    /// A call of the cache from within `show`. A panic of `show` goes on in this call, or in the one that waits for its result.
    pub fn get_with<R: Send + 'static>(
        &self,
        key: impl AsRef<[u8]>,
        show: impl FnOnce(&[u8]) -> R + Send + 'static,
    ) -> Lookup<R> {
        not_while_showing();
        let key = key.as_ref();
        let slot = Arc::new(Slot::default());
        let mut finding = Finding {
            hash: self.0.0.core.hash(key),
            app: self.0.0.core.app(key),
            key: key.into(),
            show: Some(show),
            slot: slot.clone(),
        };
        let mut side = Side::default();
        let next = finding.resume(&self.0.0.core, &self.0.0.clock, None, &mut side);
        self.0.0.readers.carry_out(&self.0.0.core, &self.0.0.clock, side);
        if let Some(read) = next {
            self.0.0.readers.read(&self.0.0.core, &self.0.0.clock, read, Box::new(finding));
        }
        Lookup(slot)
    }

    /// Without threads ([`Builder::threads`] of 0): does what is due, and tells after what time it is due again; it may be due sooner when
    /// much was inserted. `None` where threads do it, or the cache is closed.
    pub fn turn(&self) -> Option<Duration> {
        not_while_showing();
        let mut upkeep = locked(&self.0.0.upkeep);
        let now = self.0.0.clock.now();
        let due = upkeep.as_mut()?.turn(now);
        Some(Duration::from_nanos(due.saturating_sub(now.mono).0))
    }

    /// What the cache holds and has done.
    pub fn stats(&self) -> CacheStats {
        not_while_showing();
        self.0.0.core.stats(self.0.0.clock.now())
    }

    /// Forgets everything: nothing that was there before is there when this returns, in this run or behind the next opening.
    ///
    /// # Errors
    /// [`Closed`]: the next opening may find what this was to forget.
    pub fn clear(&self) -> Result<(), Closed> {
        not_while_showing();
        let now = self.0.0.clock.now();
        self.0.0.core.flush_all(now, now.wall).then_some(()).ok_or(Closed)
    }

    /// Ends the cache: what is on flash is there when it is opened again, which can be when the last handle has gone. Whoever holds a handle
    /// finds nothing and stores nothing from now on.
    pub fn close(&self) {
        not_while_showing();
        self.0.0.close();
    }

    /// Whether it has been closed.
    pub fn is_closed(&self) -> bool {
        self.0.0.closed.load(Ordering::Acquire)
    }

    /// The parts of the cache, for programs that have rings of their own.
    pub fn core(&self) -> &Arc<Core> {
        &self.0.0.core
    }

    /// The clock that the cache goes by.
    pub fn clock(&self) -> &Arc<Clock> {
        &self.0.0.clock
    }

    /// One request that the calling thread sees through, reads included.
    fn now(&self, key: &[u8], op: Op<'_>, mut on_reply: impl FnMut(Reply<'_>)) {
        not_while_showing();
        let core = &self.0.0.core;
        let request = Request { key, hash: core.hash(key), app: core.app(key), op };
        let mut side = Side::default();
        let mut read: Option<(FlashRead, Option<Vec<u8>>)> = None;
        loop {
            let fetched =
                read.as_ref().map(|(read, bytes)| Fetched { read, bytes: bytes.as_deref() });
            let mut sink = Sink { side: &mut side, on_reply: &mut on_reply };
            match core.execute(self.0.0.clock.now(), &request, fetched, &mut sink) {
                Outcome::Done => break,
                Outcome::Read(next) => read = Some((next, core.read(&next))),
            }
        }
        self.0.0.readers.carry_out(core, &self.0.0.clock, side);
    }
}

impl fmt::Debug for Cache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cache").field("closed", &self.is_closed()).finish_non_exhaustive()
    }
}

impl Shared {
    fn close(&self) {
        let _closing = locked(&self.closing);
        if !self.closed.swap(true, Ordering::AcqRel) {
            self.core.refuse();
            self.readers.stop();
            match locked(&self.upkeep).take() {
                Some(upkeep) => upkeep.close(self.clock.now()),
                None => self.core.shutdown(self.clock.now()),
            }
        }
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        if self.0.closed.load(Ordering::Acquire) {
            return;
        }
        // A closure of get_with may own the last handle: it goes under a lock that closing takes, or on a thread that closing ends.
        if SHOWING.get() || self.0.readers.is_one() {
            let shared = self.0.clone();
            let closing = std::thread::Builder::new().name("larder-close".into());
            if let Err(error) = closing.spawn(move || shared.close()) {
                tracing::error!(%error, "the cache cannot be closed: its next start is as after a kill");
            }
        } else {
            self.0.close();
        }
    }
}

/// Passes the reply to a closure and keeps the rest.
struct Sink<'a, F> {
    side: &'a mut Side,
    on_reply: F,
}

impl<F: FnMut(Reply<'_>)> Effects for Sink<'_, F> {
    #[inline]
    fn reply(&mut self, reply: Reply<'_>) {
        (self.on_reply)(reply);
    }

    fn verify(&mut self, read: FlashRead) {
        self.side.verifies.push(read);
    }

    fn wake_cleaner(&mut self) {
        self.side.wake_cleaner = true;
    }
}

/// A look-up under way: whose, and what becomes of the value.
struct Finding<R, F> {
    key: Box<[u8]>,
    hash: ObjectHash,
    app: AppId,
    show: Option<F>,
    slot: Arc<Slot<Came<R>>>,
}

impl<R: Send + 'static, F: FnOnce(&[u8]) -> R + Send + 'static> Resume for Finding<R, F> {
    fn resume(
        &mut self,
        core: &Core,
        clock: &Clock,
        fetched: Option<Fetched<'_>>,
        side: &mut Side,
    ) -> Option<FlashRead> {
        let (hash, app) = (self.hash, self.app);
        let request = Request { key: &self.key, hash, app, op: Op::Get(Get::default()) };
        let show = &mut self.show;
        let mut came = Came::Nothing;
        let mut sink = Sink {
            side,
            on_reply: |reply: Reply<'_>| {
                if let Reply::Item(item) = reply
                    && let Some(show) = show.take()
                {
                    SHOWING.set(true);
                    // It ends outside of the shard, which it must leave whole.
                    let shown = catch_unwind(AssertUnwindSafe(|| show(item.value)));
                    SHOWING.set(false);
                    came = match shown {
                        Ok(shown) => Came::Value(shown),
                        Err(panic) => Came::Panic(panic),
                    };
                }
            },
        };
        match core.execute(clock.now(), &request, fetched, &mut sink) {
            Outcome::Done => self.slot.fill(came),
            Outcome::Read(read) => return Some(read),
        }
        None
    }
}

impl<R, F> Drop for Finding<R, F> {
    /// A look-up that nobody goes on with has found nothing.
    fn drop(&mut self) {
        if self.show.is_some() {
            self.slot.fill(Came::Nothing);
        }
    }
}

/// What a look-up came to.
enum Came<R> {
    Value(R),
    Nothing,
    Panic(Box<dyn Any + Send>),
}

impl<R> Came<R> {
    fn result(self) -> Option<R> {
        match self {
            Came::Value(value) => Some(value),
            Came::Nothing => None,
            Came::Panic(panic) => resume_unwind(panic),
        }
    }
}

/// A look-up that [`Cache::get`] or [`Cache::get_with`] has begun: a future that needs no particular runtime, or [`Lookup::wait`]. If it
/// is dropped the look-up ends by itself.
#[must_use = "a look-up tells nothing unless it is awaited"]
pub struct Lookup<R>(Arc<Slot<Came<R>>>);

impl<R> Lookup<R> {
    /// Blocks until the look-up has ended. `None`: the cache has not got it.
    pub fn wait(self) -> Option<R> {
        not_while_showing();
        self.0.wait().result()
    }
}

impl<R> Future for Lookup<R> {
    type Output = Option<R>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<R>> {
        self.0.poll(context).map(Came::result)
    }
}

impl<R> fmt::Debug for Lookup<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup").field("done", &self.0.is_done()).finish()
    }
}
