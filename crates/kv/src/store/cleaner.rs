//! The threads beside the workers: the cleaner, which runs the flash log, and the trainer, which fits the classifiers and
//! does what else may take its time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use larder_base::{AppId, Now, UnixSecs};
use larder_engine::kv::node::Trained;
use larder_engine::kv::{IoFailed, SegmentIo, Step};
use larder_policy::learn::{Model, TrainingSet, train};
use larder_runtime::{AlignedBuf, Clock};

use super::{Flash, KvStore, LockedShards, locked};
use crate::server::Crawler;

/// The cleaner asks for the shortest slices there are: it works for moments and waits, and where processors are busy, those
/// with the shortest slice left run first. What it comes too late for is evicted on the request path and never reaches
/// flash.
const SLICE: Duration = Duration::from_micros(100);

/// Whole segments to and from the device, with a log line for what goes wrong.
struct Segments<'a>(&'a Flash);

impl SegmentIo for Segments<'_> {
    type Buffer = AlignedBuf;

    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.0.device.write_at(self.0.geometry.offset(segment), bytes).map_err(|error| {
            tracing::error!(
                %error,
                segment,
                "a segment could not be written; its objects stay in DRAM. Check the flash and the space on its file system"
            );
            IoFailed
        })
    }

    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        self.0.device.read_at(self.0.geometry.offset(segment), bytes).map_err(|error| {
            tracing::error!(%error, segment, "a segment could not be read for reclaim; its objects are forgotten");
            IoFailed
        })
    }
}

impl Trained for LockedShards<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }
    fn training_due(&mut self, shard: usize, now: Now) -> Option<AppId> {
        self.0[shard].lock().training_due(now)
    }
    fn take_training_set(&mut self, shard: usize, app: AppId, now: Now) -> Option<TrainingSet> {
        self.0[shard].lock().take_training_set(app, now)
    }
    fn install(&mut self, shard: usize, app: AppId, model: Model, now: Now) {
        self.0[shard].lock().install(app, model, now);
    }
}

/// Whether and how expired objects are removed from DRAM.
pub(super) struct CrawlerState {
    enabled: AtomicBool,
    /// A client wants all objects looked through, now.
    wanted: AtomicBool,
    starts: AtomicU64,
}

impl CrawlerState {
    pub(super) fn new(enabled: bool) -> CrawlerState {
        CrawlerState {
            enabled: AtomicBool::new(enabled),
            wanted: AtomicBool::new(false),
            starts: AtomicU64::new(0),
        }
    }

    pub(super) fn turn(&self, on: bool) {
        self.enabled.store(on, Ordering::Relaxed);
    }

    /// False when it is turned off. One pass that is under way serves whoever asks meanwhile.
    pub(super) fn begin(&self) -> bool {
        let on = self.enabled.load(Ordering::Relaxed);
        if on && !self.wanted.swap(true, Ordering::Relaxed) {
            self.starts.fetch_add(1, Ordering::Relaxed);
        }
        on
    }

    pub(super) fn report(&self) -> Crawler {
        Crawler {
            enabled: self.enabled.load(Ordering::Relaxed),
            running: self.wanted.load(Ordering::Relaxed),
            starts: self.starts.load(Ordering::Relaxed),
        }
    }
}

impl KvStore {
    /// Removes expired objects from DRAM: what is due in this second, or all when a client has asked for it.
    fn expire(&self, clock: &Clock, done: &mut UnixSecs) {
        let crawler = self.crawler.report();
        let second = clock.now().wall;
        if !crawler.enabled || !crawler.running && second == *done {
            return;
        }
        *done = second;
        for cell in &self.cells {
            // A pass that is under way may have gone past what has expired since.
            let passes = if crawler.running && cell.lock().is_expiring() { 2 } else { 1 };
            for _ in 0..passes {
                while !self.stopping() && cell.lock().expire(clock.now(), crawler.running) {}
            }
        }
        if crawler.running {
            self.crawler.wanted.store(false, Ordering::Relaxed);
        }
    }

    /// Starts the threads. They end at [`KvStore::stop`].
    pub(super) fn start_threads(self: &Arc<Self>, clock: &Arc<Clock>) -> std::io::Result<()> {
        let mut threads = locked(&self.threads);
        for (name, body) in [
            ("cleaner", KvStore::clean as fn(&KvStore, &Clock)),
            ("trainer", KvStore::train_models as fn(&KvStore, &Clock)),
        ] {
            let (store, clock) = (self.clone(), clock.clone());
            let thread = std::thread::Builder::new()
                .name(format!("larder-{name}"))
                .spawn(move || body(&store, &clock))?;
            threads.push(thread);
        }
        Ok(())
    }

    pub(super) fn stopping(&self) -> bool {
        self.bell.stop.load(Ordering::Acquire)
    }

    /// Waits until the bell rings or a second has gone.
    fn wait_for_bell(&self) {
        let mut state = locked(&self.bell.state);
        if !state.rung && !self.stopping() {
            state.resting = true;
            self.bell.rested.notify_all();
            let waited = self.bell.changed.wait_timeout(state, Duration::from_secs(1));
            state = match waited {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        (state.rung, state.resting) = (false, false);
    }

    /// Waits until the cleaner has made the room that it was woken for, and trains what is due by `clock`. Whoever does this after
    /// each request has no decision depend on how fast threads come.
    pub fn settle(&self, clock: &Clock) {
        let mut state = locked(&self.bell.state);
        while (state.rung || !state.resting) && !self.stopping() {
            // The stop does not tell it.
            let waited = self.bell.rested.wait_timeout(state, Duration::from_secs(1));
            state = match waited {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        drop(state);
        self.train(clock);
    }

    fn clean(&self, clock: &Clock) {
        if let Err(error) = larder_runtime::prefer_slices(SLICE) {
            tracing::debug!(%error, "the cleaner cannot ask for shorter slices");
        }
        let mut degraded = false;
        let mut expired = UnixSecs(0);
        while !self.stopping() {
            self.wait_for_bell();
            self.expire(clock, &mut expired);
            match self.flash() {
                Some(flash) => {
                    let mut io = Segments(flash);
                    // What one step may take from the budget: three segments, and what one has for padding.
                    let segments = 4 * u64::from(flash.geometry.segment_bytes());
                    while !self.stopping() {
                        // A worker that was asked for statistics waits for one step, not for all of the cleaning.
                        while flash.log_wanted.load(Ordering::Relaxed) > 0 {
                            std::thread::yield_now();
                        }
                        self.remember_applications(flash);
                        self.keep_budget(flash, clock.now(), segments);
                        let mut log = locked(&flash.log);
                        let step = log.step(clock.now(), &mut LockedShards(&self.cells), &mut io);
                        if log.stats().degraded != degraded {
                            degraded = !degraded;
                            if degraded {
                                tracing::error!(
                                    "flash is out of use: writes fail. Serving goes on from DRAM and from what is on flash; \
                                     writing is tried again every few seconds"
                                );
                            } else {
                                tracing::info!("flash is in use again");
                            }
                        }
                        drop(log);
                        self.watch.tell_all(clock.now(), &self.cells);
                        if step == Step::Idle {
                            break;
                        }
                        self.expire(clock, &mut expired);
                    }
                }
                None => {
                    // DRAM alone: free room is kept ahead of writes all the same.
                    for cell in &self.cells {
                        while !self.stopping() && cell.lock().make_free_room(clock.now()) {}
                    }
                    self.watch.tell_all(clock.now(), &self.cells);
                }
            }
        }
    }

    fn train_models(&self, clock: &Clock) {
        let mut seconds = 0u64;
        let mut divided = self.plan.memory;
        while !self.stopping() {
            // The stop wakes it, and so does another memory limit.
            std::thread::park_timeout(Duration::from_secs(1));
            if self.stopping() {
                return;
            }
            self.follow_memory_limit(clock, &mut divided);
            seconds += 1;
            self.hand_on_tapes();
            if seconds.is_multiple_of(60)
                && let Some(flash) = self.flash()
                && let Some(drive) = &flash.drive
            {
                *locked(&flash.wear) = larder_runtime::Wear::of(drive);
            }
            self.train(clock);
        }
    }

    /// Trains the classifiers that are due.
    pub(super) fn train(&self, clock: &Clock) {
        let mut schedule = locked(&self.schedule);
        if !schedule.is_due(clock.now().mono) {
            return;
        }
        schedule.run(
            || clock.now(),
            &mut LockedShards(&self.cells),
            |set, seed| match train(set, &self.training, seed) {
                Ok(model) => {
                    let samples = set.samples.len();
                    tracing::debug!(app = set.app.0, samples, "a classifier was trained");
                    Some(model)
                }
                Err(error) => {
                    tracing::warn!(app = set.app.0, %error, "a classifier could not be trained");
                    None
                }
            },
        );
    }

    /// Ends the threads, writes what is staged, and leaves everything as a warm start wants it.
    pub(super) fn stop(&self, now: Now) {
        self.bell.stop.store(true, Ordering::Release);
        self.bell.changed.notify_all();
        for thread in locked(&self.threads).drain(..) {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("a background thread had died");
            }
        }
        self.end_recording();
        if let Some(capture) = &self.capture {
            capture.finish();
        }
        if let Some(flash) = self.flash() {
            // The padding of two segments.
            self.keep_budget(flash, now, 2 * u64::from(flash.geometry.segment_bytes()));
            let mut log = locked(&flash.log);
            log.unrecorded().drain(now, &mut LockedShards(&self.cells), &mut Segments(flash));
            drop(log);
            self.write_down(flash, now);
        }
        // After the checkpoint: it must not take the room that the checkpoint needs.
        if !self.save_memory(now) && self.flash().is_none() {
            let lost: usize = self.cells.iter().map(|cell| cell.lock().dram_objects()).sum();
            tracing::info!("without flash nothing is kept: {lost} objects in DRAM are lost");
        }
    }
}
