//! `--capture`: a sample of the requests as a trace, every request of a sampled key among them.
//!
//! Which keys are sampled follows from their hash and a number drawn at the start; what stands for a key in the trace is a
//! hash under a secret that is drawn at the start and kept nowhere. Requests wait in a queue of a fixed length; when it is full they are
//! counted and left out, and nobody waits.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use larder_base::{HashKey, KeyHasher, Nanos, Now, ObjectHash};
use larder_engine::kv::Evicted;
use larder_engine::kv::api::{Effects, FlashRead, Op, Reply, Request, StoreMode};
use larder_trace::{Format, Op as TraceOp, Request as TraceRequest, Writer};

use super::{CacheError, locked};

/// What to capture.
#[derive(Clone, Debug, PartialEq)]
pub struct CaptureConfig {
    /// The file; it must not be there yet. Its ending says how it is compressed.
    pub file: PathBuf,
    /// Share of the keys, above 0 and at most 1.
    pub share: f64,
}

/// How capturing goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct CaptureStats {
    /// Requests written.
    pub requests: u64,
    /// Requests of sampled keys that were left out: they came faster than they could be written.
    pub dropped: u64,
    /// The file cannot be written any more.
    pub failed: bool,
}

/// Requests that may wait to be written.
const QUEUE: usize = 65_536;

#[derive(Default)]
struct Counts {
    requests: AtomicU64,
    dropped: AtomicU64,
    failed: AtomicBool,
}

/// A capture under way.
pub(super) struct Capture {
    /// A key whose mixed hash is at most this is sampled.
    threshold: u64,
    salt: u64,
    ids: KeyHasher,
    began: Nanos,
    queue: SyncSender<Option<TraceRequest>>,
    counts: std::sync::Arc<Counts>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Capture {
    /// Creates the file and starts the thread that writes it. `secret` and `salt` are random.
    pub(super) fn start(
        config: &CaptureConfig,
        now: Now,
        secret: [u8; 16],
        salt: u64,
    ) -> Result<Capture, CacheError> {
        let refused = |why: String| CacheError::Capture { path: config.file.clone(), why };
        let name = config
            .file
            .to_str()
            .ok_or_else(|| refused("its name is not UTF-8: choose another".to_owned()))?;
        std::fs::OpenOptions::new().write(true).create_new(true).open(&config.file).map_err(
            |e| refused(format!("{e}: give a new file in a folder that can be written")),
        )?;
        let writer = Writer::create(name, Format::Larder).map_err(|e| refused(e.to_string()))?;
        let (queue, requests) = sync_channel(QUEUE);
        let counts = std::sync::Arc::new(Counts::default());
        let theirs = counts.clone();
        let thread = std::thread::Builder::new()
            .name("larder-capture".into())
            .spawn(move || write(writer, &requests, &theirs))
            .map_err(|source| CacheError::System { what: "start a thread", source })?;
        Ok(Capture {
            // A conversion from a float saturates.
            threshold: (config.share * u64::MAX as f64) as u64,
            salt,
            ids: KeyHasher::new(HashKey(secret)),
            began: now.mono,
            queue,
            counts,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Whether requests for this key are captured.
    #[inline]
    pub(super) fn samples(&self, hash: ObjectHash) -> bool {
        larder_trace::mix(hash.fingerprint() ^ self.salt) <= self.threshold
    }

    /// Takes a request that has been answered; `found` is the size of the value that was returned.
    pub(super) fn take(&self, now: Now, request: &Request<'_>, found: Option<usize>) {
        let (op, size, expiry) = match &request.op {
            Op::Get(get) => (TraceOp::Get, found.unwrap_or(0), get.touch),
            Op::Store(store) => {
                let op = match store.mode {
                    _ if store.compare_cas.is_some() => TraceOp::Cas,
                    StoreMode::Set => TraceOp::Set,
                    StoreMode::Add => TraceOp::Add,
                    StoreMode::Replace => TraceOp::Replace,
                    StoreMode::Append => TraceOp::Append,
                    StoreMode::Prepend => TraceOp::Prepend,
                };
                (op, store.value.len(), Some(store.expiry))
            }
            Op::Delete(_) => (TraceOp::Delete, 0, None),
            Op::Arith(a) => {
                let op = if a.decrement { TraceOp::Decr } else { TraceOp::Incr };
                (op, found.unwrap_or(0), a.touch)
            }
            Op::Touch(expiry) => (TraceOp::Touch, 0, Some(*expiry)),
            Op::Peek => return,
        };
        let captured = TraceRequest {
            time: Some(now.mono.saturating_sub(self.began)),
            key_size: request.key.len() as u32,
            ttl: expiry.and_then(|e| e.remaining(now.wall)).unwrap_or(0),
            app: u32::from(request.app.0),
            op,
            ..TraceRequest::get(self.ids.hash(request.key).fingerprint(), size as u64)
        };
        if self.queue.try_send(Some(captured)).is_err()
            && self.counts.dropped.fetch_add(1, Ordering::Relaxed) == 0
        {
            tracing::warn!(
                "the capture cannot be written as fast as requests come: some are left out and counted. A smaller \
                 capture-share keeps up"
            );
        }
    }

    pub(super) fn stats(&self) -> CaptureStats {
        CaptureStats {
            requests: self.counts.requests.load(Ordering::Relaxed),
            dropped: self.counts.dropped.load(Ordering::Relaxed),
            failed: self.counts.failed.load(Ordering::Relaxed),
        }
    }

    /// Writes what is queued and the end of the file.
    pub(super) fn finish(&self) {
        // Fails only if the thread has died.
        self.queue.send(None).ok();
        if let Some(thread) = locked(&self.thread).take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that writes the capture had died");
        }
    }
}

fn write(mut writer: Writer, requests: &Receiver<Option<TraceRequest>>, counts: &Counts) {
    let failed = |error: larder_trace::TraceError| {
        if !counts.failed.swap(true, Ordering::Relaxed) {
            tracing::error!(%error, "the capture cannot be written any further; the server goes on");
        }
    };
    // Times may go back by as much as threads overtake one another; the format holds them where they were.
    while let Ok(Some(request)) = requests.recv() {
        if counts.failed.load(Ordering::Relaxed) {
            continue;
        }
        match writer.push(&request) {
            Ok(()) => drop(counts.requests.fetch_add(1, Ordering::Relaxed)),
            Err(error) => failed(error),
        }
    }
    if !counts.failed.load(Ordering::Relaxed)
        && let Err(error) = writer.finish()
    {
        failed(error);
    }
}

/// Passes effects on, and notes the size of the value that an answer carries.
pub(super) struct Sizing<'x, X> {
    pub(super) inner: &'x mut X,
    pub(super) found: Option<usize>,
}

impl<X: Effects> Effects for Sizing<'_, X> {
    fn reply(&mut self, reply: Reply<'_>) {
        if let Reply::Item(item) | Reply::Number(_, item) = &reply {
            self.found = Some(item.value.len());
        }
        self.inner.reply(reply);
    }

    fn verify(&mut self, read: FlashRead) {
        self.inner.verify(read);
    }

    fn wake_cleaner(&mut self) {
        self.inner.wake_cleaner();
    }

    fn evicted(&mut self, evicted: Vec<Evicted>, lost: u64) {
        self.inner.evicted(evicted, lost);
    }
}
