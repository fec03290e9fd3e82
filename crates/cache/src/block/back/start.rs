//! What a start makes of volumes that write back: the marker beside each store decides, the log has what is dirty.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::Nanos;
use larder_engine::block::node::defaults;
use larder_engine::block::node::logged::call_log;
use larder_engine::block::writeback::log::{Attach, Config, WriteLog};
use larder_engine::block::writeback::marker::{self, Mark, Verdict, Why};
use larder_engine::block::writeback::recovery::{self, Recovered};
use larder_engine::block::writeback::{Fault, destager, scan};
use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState, Order as MarkerOrder};
use larder_format::block::superblock::{HoldsState, WrittenBack};
use larder_format::block::{BlockSuperblock, Volume as VolumeRecord};
use larder_runtime::{AlignedBuf, Device as _};
use larder_volume::Backing;
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace, PlaceOptions, marker_place};

use super::super::Core;
use super::super::attached::Attached;
use super::super::open::CacheError;
use super::journal::{Journal, Journaling, Of};
use super::{Back, BackConfig, BackWish, Cuts, Grain, MarkerAt, Order, Written};

/// The volume's own of what is wrong with it.
fn volume_error(name: &str, reason: String) -> CacheError {
    CacheError::Volume { name: name.to_owned(), reason }
}

fn order_of(order: Order) -> MarkerOrder {
    match order {
        Order::Any => MarkerOrder::Any,
        Order::Ordered(Grain::Flush) => MarkerOrder::Flush,
        Order::Ordered(Grain::Completion) => MarkerOrder::Completion,
        Order::Journaled(Cuts::Flushes | Cuts::Marks) => MarkerOrder::Journaled,
    }
}

/// What the superblock says of a volume, as the machine of markers has it.
fn holds(record: Option<&WrittenBack>) -> marker::Holds {
    match record.map(|record| (record.holds, record.generation)) {
        None | Some((HoldsState::Nothing, _)) => marker::Holds::Nothing,
        Some((HoldsState::Clean, g)) => marker::Holds::Clean(g),
        Some((HoldsState::Open, g)) => marker::Holds::Open(g),
        Some((HoldsState::TakingUp, g)) => marker::Holds::TakingUp(g),
        Some((HoldsState::Carried, g)) => marker::Holds::Carried(g),
    }
}

fn mark_of(marker: &Marker) -> marker::Marker {
    let mark = match marker.state {
        MarkerState::Clean => Mark::Clean,
        MarkerState::Dirty => Mark::Dirty(marker.cache),
        MarkerState::Carried => Mark::Carried(marker.cache),
        MarkerState::Closing => Mark::Closing(marker.cache),
        MarkerState::Closed => Mark::Closed(marker.cache),
    };
    let Marker { generation, number, run, .. } = *marker;
    marker::Marker { mark, generation, number, run }
}

/// Why a volume is refused, in words.
fn refused(name: &str, why: Why, place: &str, marker: Option<&Marker>) -> CacheError {
    let host = marker.map_or("unknown", |marker| marker.host.as_str());
    let reason = match why {
        Why::Elsewhere(cache) => format!(
            "{place} says that the cache {cache} (last used on host '{host}') holds writes that the store does not have: serve it with that \
             cache, or have its store recovered, which gives them up"
        ),
        Why::Lost => format!(
            "{place} says that this cache holds writes that the store does not have, and it does not have them any more: have its \
             store recovered, which gives them up"
        ),
        Why::NoMarker => format!(
            "this cache holds writes of it that the store does not have, and {place} is gone or damaged, so nothing says that they still count: \
             put it back"
        ),
        Why::MarkerLost => format!(
            "there was a marker of write-back, and {place} is gone or damaged: put it back, or have its store recovered, \
             which gives up what a cache may hold"
        ),
        Why::SetBack => format!(
            "{place} is older than what this cache knows of it, or the cache is older than the marker: one of the two was set back to a copy; \
             have its store recovered as one that was set back, which gives up what any cache holds"
        ),
    };
    volume_error(name, reason)
}

/// What is read of a volume's marker.
struct Looked {
    place: Box<dyn MarkerPlace>,
    said: String,
    found: Option<Box<Marker>>,
    judged: Verdict,
}

impl Looked {
    fn number(&self) -> u64 {
        self.found.as_ref().map_or(0, |marker| marker.number)
    }
}

/// Looks at a volume's marker, as the cache `uuid` whose last run was `run`. `None` where there is none by the operator's word, or where its
/// store has no place for one and the volume does not need it.
fn look(
    (name, store): (&str, &dyn Backing),
    record: Option<&WrittenBack>,
    (uuid, run): (Uuid, u64),
    wish: &BackWish,
    found: Option<(&Recovered, &scan::Scan)>,
) -> Result<Option<Looked>, CacheError> {
    let logged = record.and_then(|record| found?.0.volumes.get(&record.attachment));
    let logged = logged.map_or(0, |volume| volume.marker);
    let writes_back = wish.back.is_some();
    let at = match &wish.marker {
        MarkerAt::Nowhere => return Ok(None),
        MarkerAt::At(place) => Some(place.clone()),
        MarkerAt::Beside => None,
    };
    let options = PlaceOptions { at, look: !writes_back, ..PlaceOptions::default() };
    let mut place = match marker_place(store, &options) {
        Ok(place) => place,
        Err(MarkerIoError::NoPlace { .. }) if !writes_back => return Ok(None),
        Err(error) => return Err(volume_error(name, error.to_string())),
    };
    let found = place.read().map_err(|error| volume_error(name, error.to_string()))?;
    let said = place.describe();
    let read = match &found {
        Found::There(marker) => marker::Read::There(mark_of(marker)),
        Found::Absent { was } => marker::Read::Absent { was: *was },
        Found::Damaged => marker::Read::Damaged,
    };
    let known = record.map_or(0, |record| record.marker).max(logged);
    let cache = marker::Cache { uuid, run, holds: holds(record), known };
    let judged = marker::judge(read, &cache, Fault::default());
    let found = match found {
        Found::There(marker) => Some(marker),
        _ => None,
    };
    Ok(Some(Looked { place, said, found, judged }))
}

/// A volume that does not write back: nothing else may hold writes of it that its store lacks, and this cache neither.
///
/// # Errors
/// When that is so, or cannot be found out.
pub(in crate::block) fn check_through(
    (name, store): (&str, &dyn Backing),
    record: Option<&WrittenBack>,
    cache: (Uuid, u64),
    wish: &BackWish,
) -> Result<(), CacheError> {
    let dirty = record.is_some_and(|record| record.holds.may_be_dirty());
    let kept = || {
        let reason = "this cache holds writes of it that its store does not have: serve it as a volume that writes back, so that they come there";
        volume_error(name, reason.to_owned())
    };
    let Some(looked) = look((name, store), record, cache, wish, None)? else {
        return if dirty { Err(kept()) } else { Ok(()) };
    };
    match looked.judged {
        Verdict::Attach { .. } if !dirty => Ok(()),
        Verdict::Refuse(why) => Err(refused(name, why, &looked.said, looked.found.as_deref())),
        _ => Err(kept()),
    }
}

/// Reads the write log of the device, if it has one, and has its volumes served with what is in it. `sb` is the superblock as this start has
/// found it, before its own run.
///
/// # Errors
/// [`CacheError`]: a volume that must not be served, a log that is damaged, a volume that is missing of which there is dirty data.
pub(in crate::block) fn start(core: &Arc<Core>, sb: &BlockSuperblock) -> Result<(), CacheError> {
    let was = (sb.uuid, sb.epoch);
    let record = |name: &str| sb.volumes.iter().find(|v| v.name == name);
    let wish = |volume: &Attached| core.config.wish_of(&volume.name);
    let through = |volume: &&Arc<Attached>| wish(volume).back.is_none();
    let volumes = core.volumes();
    let first = volumes.iter().find(|volume| !through(volume)).map(|volume| &volume.name);
    for volume in volumes.iter().filter(through) {
        let record = record(&volume.name).and_then(|v| v.write_back.as_ref());
        check_through((&volume.name, volume.volume().backing()), record, was, &wish(volume))?;
    }
    if core.config.record.is_some() && first.is_some() {
        let reason =
            "a run with volumes that write back cannot be recorded: record one that writes through";
        return Err(CacheError::System { what: "the record", reason: reason.to_owned() });
    }
    let Some(area) = sb.write_log else {
        return match first {
            None => Ok(()),
            Some(name) => Err(volume_error(
                name,
                "it is to write back, and this cache has no write log: format one that has"
                    .to_owned(),
            )),
        };
    };
    let any = sb.volumes.iter().any(|v| v.write_back.is_some_and(|w| w.holds.may_be_dirty()));
    if !core.is_enabled() && !any {
        return match first {
            None => Ok(()),
            Some(name) => Err(volume_error(
                name,
                "it is to write back, and the cache is not used: see why, or serve it as one that writes through".to_owned(),
            )),
        };
    }
    let missing = |v: &&VolumeRecord| {
        v.write_back.as_ref().is_some_and(|w| w.holds.may_be_dirty())
            && !volumes.iter().any(|volume| volume.name == v.name)
    };
    if let Some(missing) = sb.volumes.iter().find(missing) {
        let reason = "this cache holds writes of it that its store does not have: serve it too, as a volume that writes back, until they are there";
        return Err(volume_error(&missing.name, reason.to_owned()));
    }
    let asked: Vec<(u32, u64)> = sb
        .volumes
        .iter()
        .filter_map(|v| v.write_back.filter(|w| w.holds.may_be_dirty()))
        .map(|w| (w.attachment, w.began))
        .collect();
    let mut read =
        |at: u64, bytes: &mut [u8]| core.device.read_at(at, bytes).map_err(|_| scan::ReadFailed);
    let scanned = scan::scan(&area, sb.uuid, &mut read);
    let found = recovery::recover(&scanned.batches, &asked, Fault::default());
    let run = core.on_log(|log| log.line_space().map(|sb| sb.epoch))?;
    let config = Config {
        cache: sb.uuid,
        run: run.unwrap_or(sb.epoch),
        at: area.at,
        geometry: area.geometry,
        segments: area.segments,
        depth: defaults::LOG_DEPTH,
        wall: super::unix_nanos().saturating_sub(core.now().0),
    };
    let log = match asked.is_empty() && scanned.batches.is_empty() {
        true => WriteLog::new(config),
        false => WriteLog::found(config, &found, &scanned),
    };
    let back = Back::new(log, (sb.uuid, run.unwrap_or(sb.epoch)));
    // Where the device does not work, what can be read of it comes to the stores. There are no lines then.
    back.drains.store(!core.is_enabled(), Ordering::Relaxed);
    if core.back.set(back).is_err() {
        return Ok(());
    }
    for volume in volumes.iter().filter(|volume| !through(volume)) {
        let written = record(&volume.name).and_then(|v| v.write_back);
        core.write_back(volume, written, was, &wish(volume), Some((&found, &scanned)))?;
    }
    if let Some(back) = core.back.get() {
        // What is of volumes that came anew, or go their own way, is void.
        let mut log = back.log();
        found
            .volumes
            .iter()
            .for_each(|(&attachment, volume)| log.give_up_found(attachment, volume));
    }
    if core.back.get().is_some_and(|back| back.drains.load(Ordering::Relaxed)) {
        // The device is not written any more, and need not be able to make anything durable.
        call_log(&**core, None, |log, asks| log.start_closed(core.now(), asks));
        return Ok(());
    }
    // What was read may not be durable yet, and counts from now on.
    core.device.sync()?;
    // The first batch of this run makes void what a crash may still bring back of the last.
    let begun = call_log(&**core, None, |log, asks| log.start(asks));
    let mut asks = begun.map(|(_, asks)| asks).unwrap_or_default();
    loop {
        let (writes, flush) = (std::mem::take(&mut asks.writes), asks.flush.take());
        if writes.is_empty() && flush.is_none() {
            break;
        }
        for write in writes {
            let mut bytes = AlignedBuf::zeroed(write.len as usize);
            bytes[..write.head.len()].copy_from_slice(&write.head);
            core.device.write_at(write.at, &bytes)?;
            let done = call_log(&**core, None, |log, asks| {
                log.written(core.now(), write.number, true, asks);
            });
            asks.add(done.map(|(_, asks)| asks).unwrap_or_default());
        }
        if let Some(covers) = flush {
            core.device.sync()?;
            let done = call_log(&**core, None, |log, asks| {
                log.flushed(core.now(), covers, true, asks);
            });
            asks.add(done.map(|(_, asks)| asks).unwrap_or_default());
        }
    }
    match core.back.get().is_some_and(|back| back.log().is_started()) {
        true => Ok(()),
        false => Err(CacheError::System {
            what: "the write log",
            reason: "it is full, and has no room for what a start writes".to_owned(),
        }),
    }
}

impl Core {
    /// A volume writes back from now on, as its marker and this cache allow. `found` is what a start has found in the log.
    ///
    /// # Errors
    /// [`CacheError`]: it must not be served.
    pub(in crate::block) fn write_back(
        &self,
        volume: &Arc<Attached>,
        record: Option<WrittenBack>,
        was: (Uuid, u64),
        wish: &BackWish,
        found: Option<(&Recovered, &scan::Scan)>,
    ) -> Result<(), CacheError> {
        let name = &volume.name;
        let fail = |reason: String| volume_error(name, reason);
        let no_log = || {
            fail(
                "it is to write back, and this cache has no write log: format one that has"
                    .to_owned(),
            )
        };
        let back = self.back.get().ok_or_else(no_log)?;
        if back.log().closed().is_some() {
            return Err(fail(
                "it is to write back, and the write log of this cache has failed: replace the cache device, format it and start again, or serve it as \
                 one that writes through"
                    .to_owned(),
            ));
        }
        let config = wish.back.clone().unwrap_or_default();
        let journal = match config.order {
            Order::Journaled(_) => Some(journal_of(self, volume)?),
            _ => None,
        };
        let mut looked_at =
            look((name, volume.volume().backing()), record.as_ref(), was, wish, found)?;
        let looked = &mut looked_at;
        let judged = match looked {
            Some(looked) => looked.judged,
            // Without a marker this cache alone knows.
            None => match holds(record.as_ref()) {
                marker::Holds::Open(_) => Verdict::GoOn,
                marker::Holds::Clean(g) => Verdict::Attach { generation: g + 1, lines: true },
                _ => Verdict::Attach { generation: 1, lines: true },
            },
        };
        let (said, found_marker) = match looked {
            Some(looked) => (looked.said.clone(), looked.found.clone()),
            None => ("the marker".to_owned(), None),
        };
        let mut number = looked.as_ref().map_or(0, Looked::number);
        // Up to which record what is dirty was found by this start, and how far back the marker was sure.
        let mut recovered = (0, 0);
        let state = match judged {
            Verdict::GoOn | Verdict::Drain => {
                let drains = judged == Verdict::Drain;
                if drains {
                    back.drains.store(true, Ordering::Relaxed);
                    // What came to the store from memory, and is in no log, is durable before anybody sees it.
                    volume.make_durable()?;
                }
                if !judged.keeps_lines(Fault::default()) && self.is_enabled() {
                    self.distrust(volume, volume.volume().backing().look())?;
                }
                let record =
                    record.ok_or_else(|| fail("the cache knows nothing of it".to_owned()))?;
                let scanned = found.map(|(_, scanned)| scanned);
                let found = found.and_then(|(found, _)| found.volumes.get(&record.attachment));
                if found.is_some_and(|found| found.gap) {
                    return Err(fail(
                        "writes of it that this cache alone had are lost in the midst of others: have its store recovered, which gives up all of them"
                            .to_owned(),
                    ));
                }
                let last = found.map_or(record.began, |found| found.last);
                let mine = found_marker.as_ref().filter(|m| m.attachment == record.attachment);
                let stored = mine.map_or(0, |marker| marker.frontier);
                if stored > last && !drains {
                    // The store has more than this cache has ever heard of.
                    return Err(refused(name, Why::SetBack, &said, found_marker.as_deref()));
                }
                let order = order_of(config.order);
                if order != record.order
                    && found.is_some_and(|found| last > found.frontier.max(stored))
                {
                    return Err(fail(
                        "this cache holds writes of it that were logged for another order: serve it as before, and destage all of it before its \
                         order changes"
                            .to_owned(),
                    ));
                }
                recovered = (last, found_marker.as_ref().map_or(0, |marker| marker.time));
                // A journal of the last run may hold what the store lacks, whatever the order is now.
                let left = match (&journal, record.order) {
                    (Some(journal), _) => Some(journal),
                    (None, MarkerOrder::Journaled) => {
                        return Err(fail(
                            "its last run was journaled: serve it so once more, and destage all of it before its order \
                             changes"
                                .to_owned(),
                        ));
                    }
                    (None, _) => None,
                };
                let of = Of {
                    volume: record.volume,
                    cache: back.cache.0,
                    generation: record.generation,
                };
                let applied = match left {
                    Some(journal) => {
                        let store = volume.volume().backing();
                        // Lines under it are older than what it brings.
                        self.distrust(volume, store.look())?;
                        journal.apply(of, store).map_err(fail)?
                    }
                    None => None,
                };
                let epoch = applied.as_ref().map_or(0, |applied| applied.epoch);
                let applied = applied.map_or(0, |applied| applied.last);
                let frontier = found.map_or(record.began, |found| found.frontier);
                let frontier = frontier.max(applied).max(stored);
                let state = WrittenBack { order, ..record };
                if order != record.order {
                    let of = name.clone();
                    let changed = self.on_log(move |log| {
                        log.change_write_back_of(&of, |was| WrittenBack { order, ..was })
                    })?;
                    changed.ok_or_else(|| {
                        fail("its order could not be recorded on the cache device".to_owned())
                    })?;
                }
                let marked = looked.is_some();
                self.attach_log(volume, &state, &config, frontier, (number, epoch, marked));
                if let Some((found, scanned)) = found.zip(scanned) {
                    let now = self.now();
                    back.log().recover(now, state.attachment, found, scanned);
                }
                state
            }
            Verdict::Attach { .. } if !self.is_enabled() => {
                tracing::warn!(
                    "volume '{name}': it is written through, since the cache is not used; others write back what they have"
                );
                return Ok(());
            }
            Verdict::Attach { generation, lines } => {
                // Where there never was a marker no cache has ever written back: the lines are as true as the store says they are.
                if !lines && found_marker.is_some() {
                    self.distrust(volume, volume.volume().backing().look())?;
                }
                let uuid = found_marker.as_ref().map(|m| m.volume).or(record.map(|r| r.volume));
                let uuid = match uuid {
                    Some(uuid) => uuid,
                    None => random_uuid()?,
                };
                let mut generation = generation;
                if found_marker.is_none()
                    && let Some(looked) = looked
                {
                    // A kill behind the next step finds one that says that nothing is dirty.
                    let first = WrittenBack {
                        volume: uuid,
                        attachment: 0,
                        began: 0,
                        holds: HoldsState::Nothing,
                        generation,
                        marker: 0,
                        order: order_of(config.order),
                    };
                    number += 1;
                    let clean = self.marker(volume, &first, number, MarkerState::Clean, 0);
                    looked.place.write(&clean).map_err(|e| fail(e.to_string()))?;
                    generation += 1;
                }
                let order = order_of(config.order);
                let of = name.clone();
                let state = self.on_log(move |log| {
                    log.change_write_back(&of, |attachments| WrittenBack {
                        volume: uuid,
                        attachment: attachments,
                        began: 0,
                        holds: HoldsState::Open,
                        generation,
                        marker: number,
                        order,
                    })
                })?;
                let state = state.ok_or_else(|| {
                    fail(
                        "it could not be recorded on the cache device that it writes back"
                            .to_owned(),
                    )
                })?;
                number += 1;
                let marker = self.marker(volume, &state, number, MarkerState::Dirty, 0);
                if let Some(looked) = looked {
                    looked.place.write(&marker).map_err(|e| fail(e.to_string()))?;
                }
                volume.make_durable()?;
                let marked = looked.is_some();
                self.attach_log(volume, &state, &config, 0, (number, 0, marked));
                state
            }
            Verdict::Refuse(why) => return Err(refused(name, why, &said, found_marker.as_deref())),
            Verdict::Tidy => {
                // A detach was cut short behind the cache's part: the store has everything.
                let Some((looked, state)) = looked.as_mut().zip(record) else {
                    return Err(fail("its marker is gone".to_owned()));
                };
                let clean = self.marker(volume, &state, number + 1, MarkerState::Clean, 0);
                looked.place.write(&clean).map_err(|e| fail(e.to_string()))?;
                // Its place is let go of before it is looked at again.
                looked_at = None;
                drop(looked_at);
                return self.write_back_again(volume, record, was, wish);
            }
            Verdict::TakeUp { .. } | Verdict::Wait => {
                return Err(fail(format!(
                    "{said} says what this version of Larder does not do yet: use the version that has written it"
                )));
            }
        };
        let journal = match journal {
            Some(journal) => {
                let of =
                    Of { volume: state.volume, cache: back.cache.0, generation: state.generation };
                let core = self.me.get().cloned().unwrap_or_default();
                let started = Journaling::start(core, state.attachment, of, journal);
                Some(started.map_err(|e| fail(format!("a thread for its journal: {e}")))?)
            }
            None => None,
        };
        back.add(Written {
            journal,
            attached: volume.clone(),
            place: looked_at.map(|looked| looked.place.into()),
            state,
            config,
            number: number.into(),
            said: AtomicU64::new(0),
            recovered,
        });
        volume.attachment.store(state.attachment, Ordering::SeqCst);
        Ok(())
    }

    fn write_back_again(
        &self,
        volume: &Arc<Attached>,
        record: Option<WrittenBack>,
        was: (Uuid, u64),
        wish: &BackWish,
    ) -> Result<(), CacheError> {
        self.write_back(volume, record, was, wish, None)
    }

    fn attach_log(
        &self,
        volume: &Attached,
        state: &WrittenBack,
        config: &BackConfig,
        frontier: u64,
        (marker, epoch, marked): (u64, u64, bool),
    ) {
        let Some(back) = self.back.get() else { return };
        let destage = destager::Config {
            order: config.order,
            pace: config.pace,
            most: match config.order {
                Order::Journaled(_) => defaults::EPOCH.0,
                _ => defaults::WINDOW.0,
            },
            depth: defaults::DESTAGE_DEPTH,
        };
        let now: Nanos = self.now();
        tracing::debug!(volume = volume.name, attachment = state.attachment, "writes back");
        back.log().attach(
            now,
            Attach {
                attachment: state.attachment,
                volume: state.volume,
                generation: state.generation,
                destage,
                bound: config.dirty_max.map(|bytes| bytes.0),
                frontier,
                epoch,
                marker,
                marked,
            },
        );
    }

    /// What a marker of a volume says.
    pub(super) fn marker(
        &self,
        volume: &Attached,
        state: &WrittenBack,
        number: u64,
        said: MarkerState,
        frontier: u64,
    ) -> Marker {
        let (cache, run) = self.back.get().map_or((Uuid([0; 16]), 0), |back| back.cache);
        Marker {
            number,
            state: said,
            volume: state.volume,
            identity: volume.identity(),
            cache,
            run,
            host: super::host_name(),
            generation: state.generation,
            attachment: state.attachment,
            frontier,
            time: super::unix_nanos(),
            mark: None,
            order: state.order,
            applied: 0,
        }
    }
}

pub(super) fn random_uuid() -> Result<Uuid, CacheError> {
    let random = larder_runtime::machine::random_bytes::<16>();
    let random =
        random.map_err(|e| CacheError::System { what: "random bytes", reason: e.to_string() })?;
    Ok(Uuid(random))
}

/// The journal of a volume: beside its image.
fn journal_of(core: &Core, volume: &Attached) -> Result<Journal, CacheError> {
    let fail = |reason: String| volume_error(&volume.name, reason);
    let image = volume.volume().backing().image().filter(|image| !image.is_device());
    let Some(image) = image else {
        return Err(fail(
            "journaled needs a journal, which is kept beside the image of a file store alone: choose ordered".to_owned(),
        ));
    };
    let path = Journal::beside(image.path());
    let same = std::fs::canonicalize(&path).ok().zip(std::fs::canonicalize(core.path()).ok());
    if same.is_some_and(|(journal, cache)| journal == cache) {
        return Err(fail(format!("its journal '{}' would be the cache itself", path.display())));
    }
    Journal::open(&path, true).map_err(|e| fail(format!("journal '{}': {e}", path.display())))
}
