//! What a connection needs of an engine.

use std::fmt::Debug;

use larder_base::{AppId, Nanos, Now, ObjectHash, UnixSecs};
use larder_cache::kv::Core;
use larder_engine::kv::api::{Effects, Fetched as CacheFetched, FlashRead, Item, Outcome, Request};

/// What [`Engine::execute`] needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Step<R> {
    /// Answered: the sink has the reply.
    Done,
    /// Read this and call again. The sink has nothing yet.
    Read(R),
}

/// The bytes of a read that [`Engine::execute`] asked for, or that they could not be had.
#[derive(Clone, Copy, Debug)]
pub struct Fetched<'a, R> {
    /// The read this answers.
    pub read: &'a R,
    /// All of its bytes, or `None` when the device failed.
    pub bytes: Option<&'a [u8]>,
}

/// A key-value engine that many connections share.
///
/// A [`Request`] that fails has changed nothing, with one exception that keeps stale values out: a set
/// ([`StoreMode::Set`](larder_engine::kv::api::StoreMode::Set)) answered with `TooLarge` or `OutOfMemory` has removed
/// what was there.
pub trait Engine {
    /// A read of flash: [`FlashRead`] in the server; tests choose their own.
    type Read: Copy + Debug;

    /// The hash of a key.
    fn hash(&self, key: &[u8]) -> ObjectHash;

    /// The application that a key belongs to.
    fn app(&self, _key: &[u8]) -> AppId {
        AppId::DEFAULT
    }

    /// Whether an object of these lengths is within the configured limit.
    fn fits(&self, key_len: usize, value_len: usize) -> bool;

    /// Bytes of memory that performing `read` takes.
    fn read_len(&self, read: &Self::Read) -> usize;

    /// Whether a write of a value of so many bytes should be put off, to be asked for again some milliseconds later. `since` is `None`
    /// at first, and kept for the next time.
    fn waits_for_room(
        &self,
        _now: Now,
        _key: &[u8],
        _value_len: usize,
        _since: &mut Option<Nanos>,
    ) -> bool {
        false
    }

    /// Executes one request, or says what must be read first.
    fn execute<X: Effects>(
        &self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<Fetched<'_, Self::Read>>,
        effects: &mut X,
    ) -> Step<Self::Read>;

    /// Shows some of the objects in DRAM from `cursor` (0 at first) on: key, properties, bytes taken. Says where to go on;
    /// `None` after the last.
    fn list(
        &self,
        _now: Now,
        _cursor: u64,
        _show: &mut dyn FnMut(&[u8], &Item<'_>, usize),
    ) -> Option<u64> {
        None
    }

    /// From second `at` on, objects written before it are gone. `at` may lie in the future; when it does not, every
    /// object that exists goes now, also those written in this very second. A later call replaces one still to come.
    fn flush_all(&self, now: Now, at: UnixSecs);
}

impl<E: Engine> Engine for std::sync::Arc<E> {
    type Read = E::Read;
    fn hash(&self, key: &[u8]) -> ObjectHash {
        (**self).hash(key)
    }
    fn app(&self, key: &[u8]) -> AppId {
        (**self).app(key)
    }
    fn fits(&self, key_len: usize, value_len: usize) -> bool {
        (**self).fits(key_len, value_len)
    }
    fn read_len(&self, read: &E::Read) -> usize {
        (**self).read_len(read)
    }
    fn waits_for_room(
        &self,
        now: Now,
        key: &[u8],
        value_len: usize,
        since: &mut Option<Nanos>,
    ) -> bool {
        (**self).waits_for_room(now, key, value_len, since)
    }
    fn execute<X: Effects>(
        &self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<Fetched<'_, E::Read>>,
        effects: &mut X,
    ) -> Step<E::Read> {
        (**self).execute(now, request, fetched, effects)
    }
    fn list(
        &self,
        now: Now,
        cursor: u64,
        show: &mut dyn FnMut(&[u8], &Item<'_>, usize),
    ) -> Option<u64> {
        (**self).list(now, cursor, show)
    }
    fn flush_all(&self, now: Now, at: UnixSecs) {
        (**self).flush_all(now, at);
    }
}

/// The cache itself.
impl Engine for Core {
    type Read = FlashRead;
    fn hash(&self, key: &[u8]) -> ObjectHash {
        Core::hash(self, key)
    }
    #[inline]
    fn app(&self, key: &[u8]) -> AppId {
        Core::app(self, key)
    }
    fn fits(&self, key_len: usize, value_len: usize) -> bool {
        Core::fits(self, key_len, value_len)
    }
    fn read_len(&self, read: &FlashRead) -> usize {
        read.at.len as usize
    }
    #[inline]
    fn waits_for_room(
        &self,
        now: Now,
        key: &[u8],
        value_len: usize,
        since: &mut Option<Nanos>,
    ) -> bool {
        Core::waits_for_room(self, now, key, value_len, since)
    }
    #[inline]
    fn execute<X: Effects>(
        &self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<Fetched<'_, FlashRead>>,
        effects: &mut X,
    ) -> Step<FlashRead> {
        let fetched = fetched.map(|f| CacheFetched { read: f.read, bytes: f.bytes });
        match Core::execute(self, now, request, fetched, effects) {
            Outcome::Done => Step::Done,
            Outcome::Read(read) => Step::Read(read),
        }
    }
    fn list(
        &self,
        now: Now,
        cursor: u64,
        show: &mut dyn FnMut(&[u8], &Item<'_>, usize),
    ) -> Option<u64> {
        Core::list(self, now, cursor, show)
    }
    fn flush_all(&self, now: Now, at: UnixSecs) {
        // (A stop begins behind the last request: nobody is told of one that is late.)
        let _ = Core::flush_all(self, now, at);
    }
}

/// What the engine asks for beside the reply: a worker collects it over a turn and performs it afterwards.
#[derive(Debug, Default)]
pub struct SideEffects {
    /// Background reads for [`Effects::verify`].
    pub verifies: Vec<FlashRead>,
    /// The cleaner should run soon.
    pub wake_cleaner: bool,
}

/// Passes a reply to a closure and the rest to [`SideEffects`].
pub(super) struct Sink<'a, F> {
    pub(super) side: &'a mut SideEffects,
    pub(super) on_reply: F,
}

impl<F: FnMut(larder_engine::kv::api::Reply<'_>)> Effects for Sink<'_, F> {
    #[inline]
    fn reply(&mut self, reply: larder_engine::kv::api::Reply<'_>) {
        (self.on_reply)(reply);
    }

    fn verify(&mut self, read: FlashRead) {
        self.side.verifies.push(read);
    }

    fn wake_cleaner(&mut self) {
        self.side.wake_cleaner = true;
    }
}
