//! Operating a daemon that runs: the control socket, what is asked over it, and what is counted.
//!
//! | module | what it is |
//! | --- | --- |
//! | `back` | volumes that write back |
//! | [`protocol`] | requests and answers, one JSON value a line |
//! | `select` | what is cached always or never |
//! | `attach` | volumes that come |
//! | `socket` | the socket, of mode 0600, and a thread for each of its few connections |
//! | [`client`] | its other end |
//! | [`status`] | everything that is counted, as it is shown |
//! | `waiting` | volumes whose store was not there at the start |
//! | [`http`] | the live page and `/metrics` |

mod attach;
mod back;
pub mod client;
mod counters;
pub mod http;
pub mod protocol;
mod select;
mod socket;
pub mod status;
mod waiting;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_base::ByteSize;
use larder_policy::block::Rule;
use larder_runtime::{Wear, machine};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::backing::{Backing, BackingError, Uri};
use crate::cache::{CacheError, CheckWish, Core, Detaching, One, Prefetching, TakingBack, named};
use crate::cache::{Volume, Volumes};
use crate::served::Face;
use crate::server::Counters;
use protocol::{Progress, Refusal, Request};
pub use socket::ControlServer;
use status::{
    CacheStatus, ConnectionStatus, FileSystem, FlashStatus, LatencyStatus, ProcessorTime,
    RecordingStatus, Status, StoreStatus, TotalStatus, VolumeStatus,
};
use waiting::WaitingVolumes;
pub use waiting::{Absent, Lacks, RETRY};

/// How a volume's store is to be opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HowOpened {
    /// It is only read.
    pub read_only: bool,
    /// What it has answered is durable, by the operator's word.
    pub durable: bool,
}

/// Opens the store of the volume of that name: with what the daemon was started with, and as is asked beyond that.
pub type OpenStore =
    dyn Fn(&str, &Uri, HowOpened) -> Result<Box<dyn Backing>, BackingError> + Send + Sync;

/// Between two questions to the drive about its wear.
const WEAR: Duration = Duration::from_secs(60);

/// For what a detach waits for, where nothing else is said and it is neither clients nor what comes to a store that is reached.
const DETACH: Duration = Duration::from_secs(30);

/// For a mark to be durable, by default, seconds.
const MARK_SECONDS: u64 = 60;

/// Between two looks whether whoever asked is still there.
const LOOK: Duration = Duration::from_millis(100);

/// So long until it is looked again whether a volume is free.
const TAKEN: Duration = Duration::from_millis(20);

/// For fills to end, where that is waited for, by default, seconds.
const SETTLE_SECONDS: u64 = 60;

/// For everybody to let go of a detached volume's store.
const RELEASE: Duration = Duration::from_secs(30);

/// A store fails for so long after an operation of it failed.
const FAILING: Duration = Duration::from_secs(60);
/// That a store was changed while its volume was not attached is told for so long, as a change while it is.
const CHANGED: Duration = Duration::from_secs(3600);

/// Hears how far something is, and says whether whoever asked is still there.
pub(crate) type GoOn<'a> = &'a mut dyn FnMut(Progress) -> bool;

/// A daemon as its operator sees it.
pub struct Control {
    cache: Arc<Core>,
    volumes: Arc<Volumes>,
    counters: Arc<Counters>,
    open: Arc<OpenStore>,
    warmth: String,
    version: &'static str,
    faces: Vec<Face>,
    wear: Mutex<Option<(Instant, Option<Wear>)>>,
    waiting: WaitingVolumes,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("cache", &self.cache).finish_non_exhaustive()
    }
}

fn refused(message: impl Into<String>) -> Refusal {
    Refusal { message: message.into(), usage: false }
}

impl From<CacheError> for Refusal {
    fn from(error: CacheError) -> Refusal {
        let usage = matches!(&error, CacheError::Journal { why, .. } if why.is_usage());
        Refusal { usage, ..refused(error.to_string()) }
    }
}

/// Waits until all have let go of a volume's store, who serve it and who reads of it when there is time: with the last of them
/// its lock goes, and whoever wants it next can have it.
fn released(name: &str, volume: &Arc<Volume>, go_on: &mut dyn FnMut() -> bool) {
    let until = Instant::now() + RELEASE;
    while Arc::strong_count(volume) > 1 || volume.backing().sessions() > 0 {
        if Instant::now() >= until || !go_on() {
            tracing::warn!(
                "volume '{name}': its store is still in use, and stays locked until that ends"
            );
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What there is to say of a volume's store that is not where it was named any more. (Where its file system hangs: as far as it was
/// known.)
fn moved(volume: &Volume) -> Option<String> {
    volume.backing().look_at_place();
    let trouble = volume.backing().trouble().filter(|trouble| trouble.state == "moved");
    trouble.map(|trouble| trouble.what)
}

/// How a volume's store does.
fn store_status(volume: &Volume, changed: Option<(Duration, &'static str)>) -> StoreStatus {
    let (failures, last) = volume.health().failures();
    let mut status = StoreStatus { state: "ok".into(), failures, ..StoreStatus::default() };
    if let Some(last) = last {
        let ago = last.at.elapsed();
        if ago < FAILING {
            status.state = "failing".into();
        }
        status.last_failure = Some(last.what);
        status.last_failure_seconds = Some(ago.as_secs());
    }
    let changed = changed.filter(|(ago, _)| *ago < CHANGED && status.state == "ok");
    if let Some((_, why)) = changed {
        status.state = "changed".into();
        status.trouble = Some(format!(
            "was not as this cache had left it when it came ({why}): what was cached of it was dropped; see what else writes to it"
        ));
    }
    if let Some(trouble) = volume.backing().trouble() {
        status.state = trouble.state.into();
        let ago = trouble.since.elapsed().as_secs();
        // That it was changed does not last.
        status.since_seconds = (trouble.state != "changed").then_some(ago);
        status.trouble = Some(trouble.what);
    }
    status.foreign_changes = volume.backing().look();
    status.losses = volume.backing().losses();
    status.flush = volume.backing().capabilities().flush.as_str().to_owned();
    status
}

impl Control {
    /// Of a daemon with these. `warmth` says how the map was found.
    pub fn new(
        cache: Arc<Core>,
        volumes: Arc<Volumes>,
        counters: Arc<Counters>,
        faces: Vec<Face>,
        open: Arc<OpenStore>,
        warmth: String,
        version: &'static str,
    ) -> Arc<Control> {
        Arc::new(Control {
            cache,
            volumes,
            counters,
            faces,
            open,
            warmth,
            version,
            wear: Mutex::default(),
            waiting: WaitingVolumes::default(),
        })
    }

    /// The cache.
    pub fn cache(&self) -> &Arc<Core> {
        &self.cache
    }

    /// Does what is asked.
    ///
    /// # Errors
    /// What there is to say about it.
    pub(crate) fn perform(&self, request: Request, go_on: GoOn<'_>) -> Result<Value, Refusal> {
        match request {
            Request::Status {} => Ok(json!(self.status())),
            Request::Attach {
                volume,
                uri,
                read_only,
                trust_unchanged,
                store_durable,
                back,
                seconds,
            } => {
                let how = HowOpened { read_only, durable: store_durable };
                let timeout = seconds.map(Duration::from_secs);
                self.attach(&volume, &uri, (how, trust_unchanged), (&back, timeout), go_on)
            }
            Request::Flush { volume, seconds } => {
                self.flush(volume.as_deref(), seconds.map(Duration::from_secs), go_on)
            }
            Request::Mark { volume, name, seconds } => {
                let timeout = Duration::from_secs(seconds.unwrap_or(MARK_SECONDS));
                self.mark(&volume, &name, timeout, go_on)
            }
            Request::Discard { volume, yes } => {
                Ok(json!(self.cache.discard_unreadable(&volume, yes)?))
            }
            Request::Detach { volume, disconnect, seconds, keep_dirty } => {
                let timeout = seconds.map(Duration::from_secs);
                self.detach(&volume, (disconnect, keep_dirty), timeout, go_on)
            }
            Request::Write { volume, back, seconds } => {
                self.write(&volume, &back, seconds.map(Duration::from_secs), go_on)
            }
            Request::Resize { volume, bytes } => self.resize(&volume, bytes, go_on),
            Request::TakeBack { seconds } => {
                self.take_back(seconds.map(Duration::from_secs), go_on)
            }
            Request::Drop { volume } => self.drop_lines(&volume, go_on),
            Request::Select { volume, rule, ranges, partition, label, disk_bytes } => {
                let wanted = select::Wanted { rule, ranges, partition, label, disk_bytes };
                select::select(&self.cache, &volume, wanted)
            }
            Request::Prefetch { volume, ranges } => self.prefetch(&volume, ranges, go_on),
            Request::Check { volume, compare, drop } => {
                let wish = CheckWish { volume, compare, drop };
                let mut hear =
                    |done, total| go_on(Progress { what: "slots looked at".into(), done, total });
                Ok(json!(self.cache.check(&wish, &mut hear)?))
            }
            Request::Settle { seconds } => self.settle(seconds.unwrap_or(SETTLE_SECONDS)),
            Request::Selected { volume } => select::selected(&self.cache, &volume),
            Request::Explain { volume, offset } => Ok(json!(self.cache.explain(&volume, offset)?)),
        }
    }

    fn drop_lines(&self, name: &str, go_on: GoOn<'_>) -> Result<Value, Refusal> {
        let mut go_on = || go_on(Progress::default());
        let mut one = None;
        if self.cache.volume(name).is_none() {
            // It is not taken up meanwhile.
            one = Some(self.take(name, &mut |_| go_on())?);
        }
        let attached = self.cache.volume(name).is_some();
        let dropped = if attached {
            drop(one);
            self.cache.drop_lines(name, None, &mut go_on)?
        } else {
            self.cache.forget(name, &mut go_on)?
        };
        let dropped = dropped.ok_or_else(|| refused("interrupted: nothing was dropped"))?;
        if !attached {
            tracing::info!("volume '{name}', which was not attached, is forgotten");
        }
        Ok(json!({ "volume": name, "dropped_lines": dropped, "forgotten": !attached }))
    }

    fn settle(&self, seconds: u64) -> Result<Value, Refusal> {
        // Nobody waits longer than a day, and the clock's arithmetic ends somewhere.
        match self.cache.settle(Duration::from_secs(seconds.min(86_400)))? {
            0 => Ok(json!({})),
            left => Err(refused(format!(
                "after {seconds} s {left} things are still done behind the replies: ask again when clients ask nothing"
            ))),
        }
    }

    fn take_back(&self, timeout: Option<Duration>, go_on: GoOn<'_>) -> Result<Value, Refusal> {
        let begun = Instant::now();
        let (mut late, mut waits_for) = (false, String::new());
        let mut hear = |now: &TakingBack| {
            waits_for = match now {
                TakingBack::Log => "what lies in the write log is read".to_owned(),
                TakingBack::Store(name) => {
                    let volume = self.cache.volume(name);
                    let trouble = volume.map(|v| back::not_reached(v.volume().backing()));
                    format!(
                        "the store of volume '{name}' is made durable{}",
                        trouble.unwrap_or_default()
                    )
                }
                TakingBack::Requests => "what is under way ends".to_owned(),
            };
            late = timeout.is_some_and(|timeout| begun.elapsed() >= timeout);
            !late && go_on(Progress { what: waits_for.clone(), ..Progress::default() })
        };
        if self.cache.take_back_while(&mut hear)? {
            return Ok(json!({ "through": self.cache.could_write_back() }));
        }
        Err(refused(match timeout.filter(|_| late) {
            Some(timeout) => format!(
                "the cache stays out of use: it was not taken back within {} s ({waits_for}); see to that and ask again, or wait longer with --timeout",
                timeout.as_secs()
            ),
            None => "interrupted: the cache stays out of use".to_owned(),
        }))
    }

    fn detach(
        &self,
        name: &str,
        (disconnect, keep_dirty): (bool, bool),
        timeout: Option<Duration>,
        go_on: GoOn<'_>,
    ) -> Result<Value, Refusal> {
        let begun = Instant::now();
        let is_late = || timeout.is_some_and(|timeout| begun.elapsed() >= timeout);
        // (Not kept while this waits: another detach waits until nobody has the store any more.)
        let was_leaving = self.leaves(name).is_some_and(|leaves| {
            if disconnect {
                // Another detach of it may wait for them.
                leaves.close_clients();
            }
            true
        });
        let taken = |name: &str| {
            refused(format!(
                "volume '{name}' stays as it is: something else was done with it for {} s",
                timeout.unwrap_or_default().as_secs()
            ))
        };
        let mut waits = |progress: Progress| !is_late() && go_on(progress);
        let _one = self.take(name, &mut waits).map_err(|why| match is_late() {
            true => taken(name),
            false => why,
        })?;
        if was_leaving && self.cache.volume(name).is_none() {
            return Err(refused(format!(
                "volume '{name}' was detached meanwhile, by another command"
            )));
        }
        let store = self.volumes.find(name).map(|v| v.backing().place());
        let mut _store = None;
        if let Some(place) = store {
            while _store.is_none() {
                _store = self.cache.changing().try_store(place.clone());
                if _store.is_none() && !waits(Progress::default()) {
                    return Err(taken(name));
                }
                std::thread::sleep(TAKEN * u32::from(_store.is_none()));
            }
        }
        let Some(volume) = self.volumes.remove(name) else {
            if self.forget_waiting(name) {
                tracing::info!("volume '{name}' is not waited for any more");
                let kept = self.kept_dirty(name);
                return Ok(
                    json!({ "volume": name, "durable": true, "was_waiting": true, "kept_dirty_bytes": kept }),
                );
            }
            return Err(self.cache.attached(name).map_or_else(Refusal::from, |_| {
                refused(format!("volume '{name}' is being detached already"))
            }));
        };
        let (mut regions, mut dirty) = (0, 0);
        let (mut waiting, mut late, mut marker) = (None, None, false);
        let trouble = || back::not_reached(volume.backing());
        let mut hear = |how: Detaching| {
            // Clients may take their time, unless they were told to go.
            let hurry = match how {
                Detaching::Clients(_) => disconnect,
                Detaching::Draining | Detaching::Marker => true,
                // Its store takes its time, if it is there.
                Detaching::Dirty(_) => keep_dirty || !trouble().is_empty(),
                Detaching::Durable(_) => false,
            };
            marker = how == Detaching::Marker;
            let (since, most) = match timeout {
                Some(timeout) => (Some(begun), timeout),
                None if hurry => (Some(*waiting.get_or_insert_with(Instant::now)), DETACH),
                None => (None, DETACH),
            };
            if since.is_some_and(|since| since.elapsed() >= most) {
                late = Some(most.as_secs());
            }
            late.is_none()
                && waits(match how {
                    Detaching::Clients(1) => Progress {
                        what: "1 client is still there (--disconnect closes its connection)".into(),
                        ..Progress::default()
                    },
                    Detaching::Clients(n) => Progress {
                        what: format!(
                            "{n} clients are still there (--disconnect closes their connections)"
                        ),
                        ..Progress::default()
                    },
                    Detaching::Draining => Progress {
                        what: format!("requests to its store end{}", trouble()),
                        ..Progress::default()
                    },
                    Detaching::Marker => Progress {
                        what: "its marker is not reached, and has to say that the cache has what its store lacks".into(),
                        ..Progress::default()
                    },
                    Detaching::Dirty(left) => {
                        dirty = dirty.max(left);
                        match keep_dirty {
                            true => Progress {
                                what: format!(
                                    "requests to its store end, and {} stay in the write log{}",
                                    ByteSize(left),
                                    trouble()
                                ),
                                ..Progress::default()
                            },
                            false => Progress {
                                what: format!("{} of the write log left{}", ByteSize(left), trouble()),
                                done: dirty - left,
                                total: dirty,
                            },
                        }
                    }
                    Detaching::Durable(left) => {
                        regions = regions.max(left);
                        Progress {
                            what: "regions durable".into(),
                            done: regions - left,
                            total: regions,
                        }
                    }
                })
        };
        let gone = match self.cache.volume(name) {
            Some(_) if keep_dirty => self.cache.detach_dirty(name, disconnect, &mut hear),
            Some(_) => self.cache.detach(name, disconnect, &mut hear),
            // It is served without the cache: there is nothing to put aside.
            None => Ok(self.cache.let_go(&volume, disconnect, &mut hear).then_some(true)),
        };
        match gone {
            Ok(Some(durable)) => {
                // As long as somebody has it.
                let moved = moved(&volume);
                self.volumes.gone(&volume);
                released(name, &volume, &mut || waits(Progress::default()));
                if durable {
                    tracing::info!("volume '{name}' is detached");
                } else {
                    tracing::warn!(
                        "volume '{name}' is detached, and its store has not said that what was written to it last is durable"
                    );
                }
                let kept = self.kept_dirty(name);
                Ok(
                    json!({ "volume": name, "durable": durable, "store_moved": moved, "kept_dirty_bytes": kept }),
                )
            }
            Ok(None) => {
                if let Some(seconds) = late.filter(|_| marker) {
                    self.volumes.restore(volume).map_err(|e| refused(e.to_string()))?;
                    return Err(refused(format!(
                        "volume '{name}' stays attached: its marker was not reached within {seconds} s, and has to say that the cache has what \
                         its store lacks. Nothing is lost: bring the marker's place back and detach again, or wait longer with --timeout"
                    )));
                }
                let volume_again = volume.clone();
                self.volumes.restore(volume).map_err(|e| refused(e.to_string()))?;
                let Some(seconds) = late else {
                    return Err(refused(format!("interrupted: volume '{name}' stays attached")));
                };
                let back = self.cache.back_status(name);
                let troubles = back.map_or_else(Vec::new, |back| back.troubles);
                let why = match (volume_again.backing().trouble(), troubles.first()) {
                    (Some(trouble), _) => format!("its store {}", trouble.what),
                    (None, Some(trouble)) => trouble.clone(),
                    (None, None) if volume_again.clients() > 0 => format!(
                        "clients still there: {} (--disconnect closes their connections)",
                        volume_again.clients()
                    ),
                    (None, None) => "its store has not answered them".to_owned(),
                };
                Err(refused(format!(
                    "volume '{name}' stays attached: requests for it did not end within {seconds} s: {why}. Nothing is lost: bring the \
                     store back and detach again, or wait longer with --timeout"
                )))
            }
            Err(error) => {
                self.volumes.restore(volume).map_err(|e| refused(e.to_string()))?;
                Err(error.into())
            }
        }
    }

    /// What is dirty of a volume that is not attached.
    fn kept_dirty(&self, name: &str) -> Option<u64> {
        let aside = self.cache.put_aside().into_iter().find(|aside| aside.name == name);
        aside.and_then(|aside| aside.carried_bytes)
    }

    /// A volume that is being detached, and whose clients are still there perhaps.
    fn leaves(&self, name: &str) -> Option<Arc<Volume>> {
        let attached = self.cache.volume(name)?;
        self.volumes.find(name).is_none().then(|| attached.volume().clone())
    }

    /// Takes a volume when nobody else does anything with it; `go_on` hears that it waits, and may say no.
    fn take(&self, name: &str, go_on: GoOn<'_>) -> Result<One<'_>, Refusal> {
        loop {
            if let Some(one) = self.cache.changing().try_volume(name) {
                return Ok(one);
            }
            let what = match self.leaves(name).map(|volume| volume.clients()) {
                Some(clients @ 1..) => format!(
                    "volume '{name}' is being detached, and {clients} of its clients are still there (detach --disconnect closes their \
                     connections)"
                ),
                _ => format!("something else is done with volume '{name}'"),
            };
            if !go_on(Progress { what, ..Progress::default() }) {
                return Err(refused(format!("interrupted: nothing was done with volume '{name}'")));
            }
            std::thread::sleep(TAKEN);
        }
    }

    fn resize(&self, name: &str, bytes: Option<u64>, go_on: GoOn<'_>) -> Result<Value, Refusal> {
        let _one = self.take(name, go_on)?;
        let attached = self.cache.attached(name)?;
        let volume = attached.volume();
        let before = attached.bytes();
        if bytes.is_some_and(|b| b < before) {
            return Err(Refusal {
                message: format!(
                    "volume '{name}' has {before} bytes: it cannot be made smaller while it is attached; detach it, and \
                     attach its store under another name"
                ),
                usage: true,
            });
        }
        self.cache.may_grow_to(name, bytes.unwrap_or(before))?;
        let moved_store = moved(volume);
        let now = volume.backing().resize(bytes).map_err(|e| refused(e.to_string()))?;
        let mut moved = false;
        if now != before {
            moved = self.cache.grow(name, now)?;
            tracing::info!("volume '{name}' has grown from {before} to {now} bytes");
        }
        // Disks that are told; whoever is connected over NBD is not.
        let faces = self.faces.iter().map(Face::status);
        let told = faces.filter(|f| f.volume == name && f.connected && f.grows).count() as u64;
        Ok(json!({
            "volume": name,
            "bytes_before": before,
            "bytes": now,
            "moved": moved,
            "clients": volume.clients(),
            "told": told.min(volume.clients()),
            "store_moved": moved_store,
        }))
    }

    fn prefetch(
        &self,
        volume: &str,
        ranges: Option<Vec<(u64, u64)>>,
        go_on: GoOn<'_>,
    ) -> Result<Value, Refusal> {
        let begun = Instant::now();
        let mut hear = |p: Prefetching| {
            let rate = p.brought as f64 / begun.elapsed().as_secs_f64().max(0.001);
            let (brought, rate) = (ByteSize(p.brought), ByteSize(rate as u64));
            let what = format!("{brought} brought, {rate}/s");
            go_on(Progress { what, done: p.done, total: p.total })
        };
        let report = self.cache.prefetch(volume, ranges.as_deref(), &mut hear)?;
        Ok(json!(report))
    }

    fn wear(&self) -> Option<Wear> {
        let mut wear = self.wear.lock();
        if let Some((at, wear)) = &*wear
            && at.elapsed() < WEAR
        {
            return wear.clone();
        }
        let now = self.cache.wear();
        *wear = Some((Instant::now(), now.clone()));
        now
    }

    /// Everything that is counted, now.
    pub fn status(&self) -> Status {
        let cache = &self.cache;
        let stats = cache.stats();
        let layout = cache.layout();
        let config = cache.config();
        let e = &stats.engine;
        let load = |a: &std::sync::atomic::AtomicU64| a.load(Ordering::Relaxed);
        let c = &self.counters;
        let connections = ConnectionStatus {
            open: load(&c.connections),
            accepted: load(&c.accepted),
            refused: load(&c.refused),
            made_way: load(&c.made_way),
            abandoned: load(&c.abandoned),
            broken: load(&c.broken),
            tls_refused: load(&c.tls_refused),
            requests: load(&c.requests),
        };
        let mut volumes: Vec<VolumeStatus> =
            self.volumes.all().iter().map(|v| self.volume_status(v)).collect();
        volumes.extend(self.waiting.status());
        volumes.sort_by(|a, b| a.name.cmp(&b.name));
        // One that waits for its store is shown as waiting.
        let mut put_aside = cache.put_aside();
        put_aside.retain(|aside| {
            let waits = volumes.iter_mut().find(|v| v.name == aside.name);
            waits.map(|v| v.kept_dirty_bytes = aside.carried_bytes).is_none()
        });
        let t = stats.totals;
        let latencies = cache.latencies();
        let wear = self.wear();
        let given_up = cache.why_given_up();
        let mut alarms = Vec::new();
        if let Some(why) = &given_up {
            alarms.push(format!("the cache is out of use, volumes are in pass-through: {why}"));
        }
        for attached in cache.volumes() {
            if let Some(volume) = self.leaves(&attached.name) {
                let what = match volume.clients() {
                    0 => format!("what is under way ends{}", back::not_reached(volume.backing())),
                    n => format!(
                        "clients still there: {n} (detach --disconnect closes their connections)"
                    ),
                };
                alarms.push(format!("volume '{}' is being detached: {what}", attached.name));
            }
        }
        for v in &volumes {
            if let Some(trouble) = &v.store.trouble {
                let kept = v.kept_dirty_bytes.map_or_else(String::new, |kept| {
                    let kept = ByteSize(kept);
                    format!("; {kept} that the store lacks are kept in the write log until then")
                });
                alarms.push(format!("volume '{}': its store {trouble}{kept}", v.name));
            } else if v.store.state == "failing" {
                let last = v.store.last_failure.as_deref().unwrap_or("nothing said why");
                alarms.push(format!("volume '{}': its store fails: {last}", v.name));
            }
            if let Some(mode) = &v.through_for_budget {
                alarms.push(format!(
                    "volume '{}': the write budget is used up: it is written through, and writes back ({mode}) when there is budget again",
                    v.name
                ));
            }
            if let Some(back) = &v.write_back {
                alarms.extend(back::alarms(&v.name, back));
            }
        }
        alarms.extend(cache.could_write_back().iter().map(|name| back::goes_through(name)));
        alarms.extend(cache.state_dir_trouble());
        if cache.is_unlinked() {
            alarms.push(format!(
                "the file of the cache, '{}', was removed: what is cached is served until the daemon stops, and is gone then; \
                 format another and start again",
                cache.path().display()
            ));
        }
        let (rests, rest_count) = cache.filling_rests();
        if let Some(rest) = rests {
            alarms.push(format!(
                "the file system of the cache is full: nothing new is cached for {:.0} s; free some space there",
                rest.as_secs_f64().ceil()
            ));
        }
        let recording = cache.record_stats().map(|r| RecordingStatus {
            records: r.records,
            bytes: r.bytes,
            ended: r.ended.map(str::to_owned),
        });
        if let Some(why) = recording.as_ref().and_then(|r| r.ended.as_ref()) {
            alarms.push(format!(
                "recording has ended: {why}; what is recorded so far can be replayed, the server goes on"
            ));
        }
        let (pinned, most) = cache.pinned();
        if pinned > most {
            alarms.push(select::too_much(pinned, most));
        }
        if e.corrupt > 0 {
            alarms.push(format!(
                "{} lines did not match their checksum and were read from the store: watch the cache device",
                e.corrupt
            ));
        }
        if e.backing_errors > 0 {
            let times = if e.backing_errors == 1 { "read or change" } else { "reads and changes" };
            alarms.push(format!(
                "{} {times} of backing stores have failed since the start, tries that were repeated among them",
                e.backing_errors
            ));
        }
        let (user, system) = machine::processor_time();
        Status {
            version: self.version.to_owned(),
            uptime_seconds: cache.uptime().0 / 1_000_000_000,
            alarms,
            cache: CacheStatus {
                path: cache.path().display().to_string(),
                uuid: cache.uuid().to_owned(),
                given_up,
                warmth: self.warmth.clone(),
                line_bytes: layout.line,
                placement: layout.placement().to_string(),
                slots: stats.slots,
                // Each is about right, as of the last count and since: together no more than there can be.
                lines: volumes.iter().map(|v| v.lines).sum::<u64>().min(stats.slots),
                map_bytes: stats.map_bytes,
                write: config.write.to_string(),
                admission: config.admission.to_string(),
                replacement: config.replacement.to_string(),
                regions_marked: stats.regions_set,
                pinned_bytes: pinned,
                pinned_most_bytes: most,
            },
            flash: FlashStatus {
                bytes_written: stats.flash_bytes,
                client_bytes: stats.client_bytes,
                read_fill_bytes: stats.read_fill_bytes,
                clwa: stats.clwa(),
                errors: e.flash_errors,
                corrupt: e.corrupt,
                budget_bytes_per_second: stats.budget.rate,
                budget_available_bytes: stats.budget.available,
                expected_life_years: stats.life_years,
                drive_used_percent: wear.as_ref().map(|w| u64::from(w.percentage_used)),
                drive_host_bytes: wear.as_ref().map(|w| w.host_written),
                drive_nand_bytes: wear.as_ref().and_then(|w| w.nand_written),
            },
            hit_ratio: (t.reads > 0).then(|| t.read_hits as f64 / t.reads as f64),
            totals: TotalStatus {
                reads: t.reads,
                read_hits: t.read_hits,
                read_bytes: t.read_bytes,
                writes: t.writes,
                write_bytes: t.write_bytes,
            },
            latency: LatencyStatus {
                hit: latencies.hit.percentiles(),
                miss: latencies.miss.percentiles(),
                write: latencies.write.percentiles(),
            },
            verdicts: named(&stats.verdicts),
            volumes,
            put_aside,
            recording,
            connections,
            faces: self.faces.iter().map(Face::status).collect(),
            counters: counters::counters(e, &stats.log, rest_count)
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
            resident_bytes: machine::resident_memory().unwrap_or(0),
            cpu_seconds: ProcessorTime { user: user.as_secs_f64(), system: system.as_secs_f64() },
        }
    }

    fn volume_status(&self, volume: &Arc<Volume>) -> VolumeStatus {
        let about = volume.capabilities();
        let mut status = VolumeStatus {
            name: volume.name().to_owned(),
            uri: volume.backing().uri().to_owned(),
            bytes: about.size,
            read_only: about.read_only,
            clients: volume.clients(),
            rule: Rule::ByPolicy.as_str().to_owned(),
            pass_through: true,
            ..VolumeStatus::default()
        };
        let attached = self.cache.volume(volume.name());
        let changed = attached.as_ref().and_then(|attached| attached.came_changed());
        status.store = store_status(volume, changed);
        let Some(attached) = attached else { return status };
        let c = &attached.counters;
        let load = |a: &std::sync::atomic::AtomicU64| a.load(Ordering::Relaxed);
        let (floor, ceiling) = attached.share();
        let (rule, selected) = self.cache.selected_of(&attached);
        status.pass_through = !self.cache.is_enabled();
        status.lines = attached.lines().min(self.cache.layout().capacity());
        (status.floor, status.ceiling) = (floor, ceiling);
        (status.reads, status.read_hits) = (load(&c.reads), load(&c.read_hits));
        (status.read_bytes, status.writes) = (load(&c.read_bytes), load(&c.writes));
        (status.write_bytes, status.failed) = (load(&c.write_bytes), load(&c.failed));
        status.filled = load(&c.filled);
        (status.metadata_reads, status.metadata_hits) =
            (load(&c.metadata_reads), load(&c.metadata_hits));
        let found = attached.file_systems().into_iter();
        let found = found.map(|(kind, offset)| FileSystem { kind: kind.to_owned(), offset });
        status.file_systems = found.collect();
        status.rule = rule.as_str().to_owned();
        status.selected = selected;
        status.verdicts = named(&attached.verdicts());
        status.through_for_budget = self.cache.saves(&attached.name).map(|back| back.to_string());
        status.write_back = self.cache.back_status(&attached.name).map(|back| back::shown(&back));
        status
    }
}
