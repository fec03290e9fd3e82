//! A cache that was given up is used again, without a stop: its device works again, and everything on it is forgotten.
//!
//! Nothing proves what is on the device, and volumes have changed since. So the durable map begins anew, empty, and is durable
//! before the first line is cached. All lines are locked meanwhile: nothing is under way. What was changed while the cache was
//! not used has no bit in the write-intent map, so stores are made durable first, as at a start. Only then the note that the
//! cache must not be used again goes.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_engine::block::LineId;
use larder_engine::block::node;
use larder_engine::block::node::quiet::QUIET;
use larder_engine::block::node::start::{self, NotTakenBack};

use super::log::{CacheIo, LogThread};
use super::notes::forget_given_up;
use super::open::{CacheError, random, read_superblock};
use super::shard::Out;
use super::{Core, locked};

/// For requests under way to end, and then for stores to become durable once more: new requests wait so long.
const DRAIN: Duration = Duration::from_secs(10);
/// For stores to become durable before that.
const LONG: Duration = Duration::from_secs(60);

fn fail(reason: impl Into<String>) -> CacheError {
    CacheError::System { what: "the cache is not taken back", reason: reason.into() }
}

impl Core {
    /// Uses a cache again that was given up. It begins with nothing in it.
    ///
    /// # Errors
    /// When it was not given up or cannot be taken back while volumes are served, one of them comes, goes or grows, a store cannot be made durable, requests
    /// under way do not end within 10 s, or the device fails still: it stays given up then.
    pub fn take_back(&self) -> Result<(), CacheError> {
        let _all = self.changing.all().map_err(|which| {
            fail(format!(
                "'{which}' is being attached, detached or resized: take the cache back when that has ended"
            ))
        })?;
        if self.is_enabled() {
            if self.why_given_up().is_none() {
                return Err(fail("it is in use"));
            }
            // It is being given up at this moment, and whoever asks has read the line that says so.
            self.on_log(|_| ())?;
        }
        let anew = "start the daemon again: the cache is cold then";
        if self.stand_in {
            return Err(fail(format!("it was not there at the start; when it is, {anew}")));
        }
        if self.layout.is_sparse() {
            return Err(fail(format!("it is sparse; {anew}")));
        }
        if self.recorder.is_some() {
            return Err(fail(format!(
                "what happens was recorded, and the record has ended; {anew}"
            )));
        }
        if self.is_unlinked() {
            return Err(fail("its file was removed: format another and start the daemon again"));
        }
        // Most of it while clients are served.
        self.make_stores_durable(LONG)?;
        let last = LineId(self.layout.space_lines() - 1);
        let until = Instant::now() + DRAIN;
        let go_on = &mut || Instant::now() < until && !locked(&self.log_inbox).stopped;
        let outcome = self.with_lines((LineId(0), last), go_on, || {
            self.make_stores_durable(DRAIN)?;
            match self.on_log(LogThread::take_back) {
                _ if self.is_enabled() => Ok(()),
                said => said?.map_err(fail),
            }
        });
        outcome.unwrap_or_else(|| {
            Err(fail(format!(
                "requests under way did not end within {} s: see to the stores, and ask again",
                DRAIN.as_secs()
            )))
        })?;
        forget_given_up(&self.config.state_dir, self.uuid());
        tracing::warn!("the cache is taken back: it is used again, and begins with nothing in it");
        Ok(())
    }

    fn make_stores_durable(&self, timeout: Duration) -> Result<(), CacheError> {
        self.volumes().iter().try_for_each(|volume| volume.make_durable_within(timeout))
    }
}

impl LogThread {
    /// The cache is used again. All of its lines are locked.
    ///
    /// # Errors
    /// In words: it stays given up.
    pub(super) fn take_back(&mut self) -> Result<(), String> {
        let cache = self.cache().clone();
        let Some(superblock) = self.given_up() else { return Err("it is in use".to_owned()) };
        if self.is_busy() || cache.shards.iter().any(|cell| !locked(cell).shard.is_idle()) {
            return Err("operations of its device have not ended: ask again".to_owned());
        }
        let found = read_superblock(&cache.device).map_err(|e| e.to_string())?;
        let random = random().map_err(|e| e.to_string())?;
        let stats = locked(&cache.log_stats).0;
        let io = &mut CacheIo::of(&cache.device, &cache.node_limits, cache.now());
        let log = start::take_back(superblock, &found, (QUIET, random), stats, io);
        let log = log.map_err(|why| match why {
            NotTakenBack::Other => format!(
                "'{}' holds another cache by now: start the daemon again",
                cache.path().display()
            ),
            NotTakenBack::Failed(e) => {
                format!("{e} still: replace it, format it and start the daemon again")
            }
        })?;
        // I/O that has ended may have asked once more that it be given up, and this thread has not heard of it.
        locked(&cache.log_inbox).mail.resumed();
        let maps = cache.region.empty_maps(log.superblock(), cache.placing, cache.config.making());
        let mut out = Out::default();
        let mut begun = true;
        for (shard, map) in (0..).zip(maps) {
            begun &= cache.with(shard, None, &mut out, |s, _| s.begin_anew(map));
        }
        self.resume(node::Log::new(log));
        if !begun {
            let why = "a shard was not at rest";
            self.give_up(why);
            return Err(why.to_owned());
        }
        if let Some(superblock) = self.superblock() {
            cache.region.own(superblock);
        }
        for volume in cache.volumes() {
            volume.account.set(0);
        }
        cache.node_limits.limits.failures.works();
        *locked(&cache.node_limits.given_up) = None;
        *locked(&cache.node_limits.not_noted) = None;
        cache.enabled.store(true, Ordering::SeqCst);
        Ok(())
    }
}
