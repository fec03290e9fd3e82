//! The threads beside the workers: the cleaner, which has the node's maintenance for its own and does what that says, and the
//! trainer, which fits classifiers and asks the drive for its wear.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use larder_base::{ByteSize, Now};
use larder_engine::kv::node::{
    DriveEffects, DriveUpkeep, Maintenance, MaintenanceEffects, MemoryError, StateIo, Turn,
};
use larder_engine::kv::{Evicted, IndexFull, IoFailed, SegmentIo, TooLarge};
use larder_format::superblock::PartOf;
use larder_policy::budget::BudgetState;
use larder_policy::learn::{Model, TrainingSet};
use larder_runtime::{AlignedBuf, Clock};

use super::{Core, Drive, Flash, locked};

/// The cleaner asks for the shortest slices there are: it works for moments and waits, and where processors are busy, those
/// with the shortest slice left run first. What it comes too late for is evicted on the request path and never reaches
/// flash.
const SLICE: Duration = Duration::from_micros(100);
/// How often the drive is asked for its wear.
const WEAR: Duration = Duration::from_secs(60);

/// What the write budget remembers.
pub(super) const BUDGET: &str = "budget.json";

/// The same for one of several drives.
pub(super) fn budget_name(part: Option<&PartOf>) -> String {
    part.map_or_else(|| BUDGET.to_owned(), |part| format!("budget-{:016x}.json", part.drive))
}

/// Whether this is the name of such a file.
pub(super) fn is_budget_of_drive(name: &str) -> bool {
    let drive = name.strip_prefix("budget-").and_then(|name| name.strip_suffix(".json"));
    drive.is_some_and(|drive| drive.len() == 16 && u64::from_str_radix(drive, 16).is_ok())
}
/// Which number stands for which application.
pub(super) const APPLICATIONS: &str = "applications.json";

/// Whole segments to and from one drive, and small files in the data directory, with a log line for what goes wrong.
#[derive(Clone, Copy)]
pub(super) struct Disk<'a>(pub(super) Option<(&'a Flash, usize)>);

impl<'a> Disk<'a> {
    /// The first drive.
    pub(super) fn first(flash: Option<&'a Flash>) -> Disk<'a> {
        Disk(flash.map(|flash| (flash, flash.drives.first().map_or(0, |drive| drive.place))))
    }

    fn drive(&self) -> Result<&'a Drive, IoFailed> {
        let (flash, place) = self.0.ok_or(IoFailed)?;
        flash.drive(place).ok_or(IoFailed)
    }
}

impl SegmentIo for Disk<'_> {
    type Buffer = AlignedBuf;

    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        let drive = self.drive()?;
        drive.device.write_at(drive.geometry.offset(segment), bytes).map_err(|error| {
            tracing::error!(
                %error,
                segment,
                "a segment could not be written; its objects stay in DRAM. Check the flash and the space on its file system"
            );
            IoFailed
        })
    }

    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        let drive = self.drive()?;
        drive.device.read_at(drive.geometry.offset(segment), bytes).map_err(|error| {
            tracing::error!(%error, segment, "a segment could not be read for reclaim; its objects are forgotten");
            IoFailed
        })
    }
}

impl Disk<'_> {
    fn keep(&self, name: &str, bytes: Result<Vec<u8>, serde_json::Error>) -> Result<(), String> {
        let Some((flash, _)) = self.0 else { return Ok(()) };
        let bytes = bytes.map_err(|e| e.to_string())?;
        flash.dir.replace(name, &bytes).map_err(|e| e.to_string())
    }
}

impl StateIo for Disk<'_> {
    fn keep_names(&mut self, names: &[Vec<u8>]) -> bool {
        let kept = self.keep(APPLICATIONS, serde_json::to_vec(names));
        if let Err(error) = &kept {
            let name = APPLICATIONS;
            tracing::warn!(
                %error,
                name,
                "could not be written, and there are new applications: until it is, nothing is written to flash, since the next \
                 start would not know whose it is. Make room in the data directory"
            );
        }
        kept.is_ok()
    }

    fn keep_budget(&mut self, state: BudgetState) -> bool {
        let name = self.drive().map_or(BUDGET, |drive| drive.budget.as_str());
        let kept = self.keep(name, serde_json::to_vec(&state));
        if let Err(error) = &kept {
            tracing::warn!(
                %error,
                "the write budget could not be written down: the cache goes on, and a start after a kill knows less of what was \
                 written to flash, and allows more. Make room in the data directory"
            );
        }
        kept.is_ok()
    }
}

/// What maintenance gives out, on its way to whoever fits models, to who watches and to the log.
pub(super) struct Fx<'a, T> {
    pub(super) cache: &'a Core,
    /// Has a model fitted.
    pub(super) fit: T,
}

impl<T: FnMut(TrainingSet, u64)> MaintenanceEffects for Fx<'_, T> {
    fn train(&mut self, samples: TrainingSet, seed: u64) {
        (self.fit)(samples, seed);
    }

    fn evicted(&mut self, now: Now, evicted: Vec<Evicted>, lost: u64) {
        self.cache.tell(now, &evicted, lost);
    }

    fn degraded(&mut self, degraded: bool) {
        let first = self.cache.flash().and_then(|flash| flash.drives.first());
        self.cache.say_degraded(first.map_or(0, |drive| drive.place), degraded);
    }

    fn pass(&mut self, drive: usize) {
        self.cache.notifier.pass(drive);
    }

    fn index_full(&mut self, full: Option<IndexFull>) {
        match full {
            Some(full) => tracing::warn!("flash: {full}"),
            None => {
                tracing::info!("the flash index has room again for the objects that come to flash")
            }
        }
    }

    fn too_large(&mut self, all: TooLarge) {
        tracing::warn!("flash: {all}");
    }

    fn memory_followed(&mut self, _: u64) {
        // Tables of other sizes, and what clients had under way: what the allocator keeps of that is nobody's.
        larder_runtime::machine::release_free_memory();
    }

    fn memory_refused(&mut self, limit: u64, why: MemoryError) {
        tracing::error!(error = %why, "the memory limit stays at {}", ByteSize(limit));
    }

    fn resized(&mut self, memory: &mut [u8]) {
        larder_runtime::machine::prefer_huge_pages(memory);
    }
}

/// What the upkeep of a further drive gives out.
pub(super) struct DriveFx<'a>(pub(super) &'a Core);

/// As long as a thread sees to a drive's log.
struct Attends<'a>(&'a Core, usize);

impl Drop for Attends<'_> {
    fn drop(&mut self) {
        self.0.node.leave(self.1);
    }
}

impl DriveEffects for DriveFx<'_> {
    fn degraded(&mut self, drive: usize, degraded: bool) {
        self.0.say_degraded(drive, degraded);
    }
    fn pass(&mut self, drive: usize) {
        self.0.notifier.pass(drive);
    }
}

/// The threads, while they run.
#[derive(Default)]
pub(super) struct Background {
    cleaner: Option<std::thread::JoinHandle<Maintenance<AlignedBuf>>>,
    /// One for each further drive.
    drives: Vec<std::thread::JoinHandle<DriveUpkeep<AlignedBuf>>>,
    trainer: Option<std::thread::JoinHandle<()>>,
}

impl Core {
    /// Starts the threads. They end at [`Core::shutdown`].
    pub(super) fn start_threads(
        self: &Arc<Self>,
        clock: &Arc<Clock>,
        maintenance: Maintenance<AlignedBuf>,
        further: Vec<DriveUpkeep<AlignedBuf>>,
    ) -> std::io::Result<()> {
        let mut threads = locked(&self.threads);
        for upkeep in further {
            let (store, theirs, place) = (self.clone(), clock.clone(), upkeep.drive());
            let listener = self.notifier.join(place);
            let thread = std::thread::Builder::new()
                .name(format!("larder-drive-{place}"))
                .spawn(move || store.maintain_drive(&theirs, upkeep, listener))?;
            threads.drives.push(thread);
        }
        let (trainer, asked) = channel();
        let (store, theirs) = (self.clone(), clock.clone());
        threads.cleaner = Some(
            std::thread::Builder::new()
                .name("larder-cleaner".into())
                .spawn(move || store.maintain(&theirs, maintenance, trainer))?,
        );
        let store = self.clone();
        threads.trainer = Some(
            std::thread::Builder::new()
                .name("larder-trainer".into())
                .spawn(move || store.train(&asked))?,
        );
        Ok(())
    }

    /// Waits until all is done that is due by `clock` and that the cleaner was woken for. Whoever does this after each request has
    /// no decision depend on how fast threads come.
    pub fn settle(&self, clock: &Clock) {
        self.notifier.settle(clock.now().mono);
    }

    fn maintain(
        &self,
        clock: &Clock,
        mut maintenance: Maintenance<AlignedBuf>,
        trainer: Sender<(TrainingSet, u64)>,
    ) -> Maintenance<AlignedBuf> {
        if let Err(error) = larder_runtime::prefer_slices(SLICE) {
            tracing::debug!(%error, "the cleaner cannot ask for shorter slices");
        }
        let fit = |samples: TrainingSet, seed| {
            let app = samples.app;
            if trainer.send((samples, seed)).is_err() {
                // It has died, which is reported where it is joined.
                self.notifier.fitted(app, None);
            }
        };
        let (mut disk, mut fx) = (Disk::first(self.flash()), Fx { cache: self, fit });
        let _attends = maintenance.log().map(|log| Attends(self, log.part().drive));
        while !self.notifier.stopped() {
            let heard = self.notifier.hear();
            if heard.rung {
                maintenance.wake();
            }
            for (app, model) in heard.fitted {
                maintenance.fitted(clock.now(), &self.node, app, model);
            }
            let turn = maintenance.turn(clock.now(), &self.node, &mut disk, &mut fx);
            if let Turn::At(at) = turn {
                self.notifier.rest(at, maintenance.is_fitting(), || clock.now().mono);
            }
        }
        maintenance
    }

    fn maintain_drive(
        &self,
        clock: &Clock,
        mut upkeep: DriveUpkeep<AlignedBuf>,
        listener: usize,
    ) -> DriveUpkeep<AlignedBuf> {
        if let Err(error) = larder_runtime::prefer_slices(SLICE) {
            tracing::debug!(%error, "the thread of a drive cannot ask for shorter slices");
        }
        let mut disk = Disk(self.flash().map(|flash| (flash, upkeep.drive())));
        let _attends = Attends(self, upkeep.drive());
        while !self.notifier.stopped() {
            if self.notifier.hear_of(listener) {
                upkeep.wake();
            }
            let turn = upkeep.turn(clock.now(), &self.node, &mut disk, &mut DriveFx(self));
            if let Turn::At(at) = turn {
                self.notifier.rest_of(listener, at, || clock.now().mono);
            }
        }
        upkeep
    }

    /// Says that writes to a drive fail, or are done again.
    fn say_degraded(&self, place: usize, degraded: bool) {
        let Some(flash) = self.flash() else { return };
        let path = flash.drive(place).map_or("", |drive| drive.path.as_str());
        let others =
            if flash.drives.len() > 1 { ", and the other drives take what it would" } else { "" };
        if degraded {
            tracing::error!(
                "flash is out of use, '{path}': writes fail. Serving goes on from DRAM and from what is on flash{others}; writing is \
                 tried again every few seconds"
            );
        } else {
            tracing::info!("flash is in use again, '{path}'");
        }
    }

    /// Fits what is asked for, and asks the drive for its wear now and then.
    fn train(&self, asked: &Receiver<(TrainingSet, u64)>) {
        loop {
            let (set, seed) = match asked.recv_timeout(WEAR) {
                Ok(asked) => asked,
                Err(RecvTimeoutError::Timeout) => {
                    for drive in self.flash().into_iter().flat_map(|flash| &flash.drives) {
                        if let Some(device) = &drive.drive {
                            *locked(&drive.wear) = larder_runtime::Wear::of(device);
                        }
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            let model = self.fit(&set, seed);
            self.notifier.fitted(set.app, model);
        }
    }

    /// Fits a model.
    pub(super) fn fit(&self, set: &TrainingSet, seed: u64) -> Option<Model> {
        match self.setup.train(set, seed) {
            Ok(model) => {
                let samples = set.samples.len();
                tracing::debug!(app = set.app.0, samples, "a classifier was trained");
                Some(model)
            }
            Err(error) => {
                tracing::warn!(app = set.app.0, %error, "a classifier could not be trained");
                None
            }
        }
    }

    /// Ends the threads, writes what is staged, and leaves everything as a warm start wants it. Called once; requests that
    /// still come are answered with misses.
    pub fn shutdown(&self, now: Now) {
        self.refuse();
        self.notifier.stop();
        let Background { cleaner, drives, trainer } = std::mem::take(&mut *locked(&self.threads));
        let maintenance = cleaner.and_then(|thread| thread.join().ok());
        let all = drives.len();
        let further: Vec<_> = drives.into_iter().filter_map(|thread| thread.join().ok()).collect();
        let trainer_lives = trainer.is_some_and(|thread| thread.join().is_ok());
        if maintenance.is_none() || !trainer_lives || further.len() < all {
            tracing::error!("a background thread had died");
        }
        self.close(maintenance, further, now);
    }

    /// Leaves everything as a warm start wants it: nobody asks any more.
    pub(super) fn close(
        &self,
        mut maintenance: Option<Maintenance<AlignedBuf>>,
        further: Vec<DriveUpkeep<AlignedBuf>>,
        now: Now,
    ) {
        self.end_recording(maintenance.as_mut());
        if let Some(capture) = &self.capture {
            capture.finish();
        }
        if let (Some(flash), Some(maintenance)) = (self.flash(), &mut maintenance) {
            return self.write_down(flash, maintenance, further, now);
        }
        // Without flash, or when its thread has died.
        if !self.save_memory(now) && self.flash().is_none() {
            let lost = self.node.dram_objects();
            tracing::info!("without flash nothing is kept: {lost} objects in DRAM are lost");
        }
    }
}
