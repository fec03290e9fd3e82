//! What a start makes of volumes that write back: the marker beside each store decides, the log has what is dirty.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::Nanos;
use larder_engine::block::node::logged::call_log;
use larder_engine::block::writeback::log::{Attach, Config, WriteLog};
use larder_engine::block::writeback::marker::{self, Mark, Verdict, Why};
use larder_engine::block::writeback::recovery::{self, Recovered};
use larder_engine::block::writeback::{Fault, destager, scan};
use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState, Order as MarkerOrder};
use larder_format::block::superblock::{HoldsState, WrittenBack};
use larder_format::block::{BlockSuperblock, Volume as VolumeRecord};
use larder_runtime::Device as _;
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace, PlaceOptions, marker_place};

use super::super::Core;
use super::super::attached::Attached;
use super::super::open::CacheError;
use super::{Back, BackConfig, Cuts, Grain, MarkerAt, Order, Written};

/// Batches of the log under way at a time.
const DEPTH: u32 = 2;
/// Bytes of a window that goes to the store at once.
const WINDOW: u64 = 64 << 20;
/// Requests to a store for destage under way at a time, of a volume.
const STORE_DEPTH: u32 = 64;

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
             cache, or give them up with `larder block recover`"
        ),
        Why::Lost => format!(
            "{place} says that this cache holds writes that the store does not have, and it does not have them any more: `larder block \
             recover` gives them up"
        ),
        Why::NoMarker => format!(
            "this cache holds writes of it that the store does not have, and {place} is gone or damaged, so nothing says that they still count: \
             put it back"
        ),
        Why::MarkerLost => format!(
            "there was a marker of write-back, and {place} is gone or damaged: put it back, or give up what a cache may hold with `larder block \
             recover`"
        ),
        Why::SetBack => format!(
            "{place} is older than what this cache knows of it, or the cache is older than the marker: one of the two was set back to a copy; \
             `larder block recover --set-back` gives up what any cache holds"
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
    core: &Core,
    volume: &Attached,
    record: Option<&WrittenBack>,
    (uuid, run): (Uuid, u64),
    (writes_back, at): (bool, Option<&MarkerAt>),
) -> Result<Option<Looked>, CacheError> {
    let name = &volume.name;
    let at = match at.or(core.config.markers.get(name)) {
        Some(MarkerAt::Nowhere) => return Ok(None),
        Some(MarkerAt::At(place)) => Some(place.clone()),
        Some(MarkerAt::Beside) | None => None,
    };
    let options = PlaceOptions { at, look: !writes_back, ..PlaceOptions::default() };
    let mut place = match marker_place(volume.volume().backing(), &options) {
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
    let known = record.map_or(0, |record| record.marker);
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
    core: &Core,
    volume: &Attached,
    record: Option<&WrittenBack>,
    cache: (Uuid, u64),
    at: Option<&MarkerAt>,
) -> Result<(), CacheError> {
    let name = &volume.name;
    let dirty = record.is_some_and(|record| record.holds.may_be_dirty());
    let kept = || {
        let reason = "this cache holds writes of it that its store does not have: serve it with --write back, so that they come there";
        volume_error(name, reason.to_owned())
    };
    let Some(looked) = look(core, volume, record, cache, (false, at))? else {
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
    let through = |v: &&Arc<Attached>| !core.config.back.contains_key(&v.name);
    let volumes = core.volumes();
    for volume in volumes.iter().filter(through) {
        check_through(
            core,
            volume,
            record(&volume.name).and_then(|v| v.write_back.as_ref()),
            was,
            None,
        )?;
    }
    let Some(area) = sb.write_log else {
        return match core.config.back.keys().next() {
            None => Ok(()),
            Some(name) => Err(volume_error(
                name,
                "it is to write back, and this cache has no write log: make one that has (`larder block format --write-log`)".to_owned(),
            )),
        };
    };
    if !core.is_enabled() {
        return match core.config.back.keys().next() {
            None => Ok(()),
            Some(name) => Err(volume_error(
                name,
                "it is to write back, and the cache is not used: see why, or serve it without --write back".to_owned(),
            )),
        };
    }
    let missing = |v: &&VolumeRecord| {
        v.write_back.as_ref().is_some_and(|w| w.holds.may_be_dirty())
            && !volumes.iter().any(|volume| volume.name == v.name)
    };
    if let Some(missing) = sb.volumes.iter().find(missing) {
        let reason = "this cache holds writes of it that its store does not have: serve it too, with --write back, until they are there";
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
    // What was read may not be durable yet, and counts from now on.
    core.device.sync()?;
    let run = core.on_log(|log| log.line_space().map(|sb| sb.epoch))?;
    let config = Config {
        cache: sb.uuid,
        run: run.unwrap_or(sb.epoch),
        at: area.at,
        geometry: area.geometry,
        segments: area.segments,
        depth: DEPTH,
        wall: super::unix_nanos().saturating_sub(core.now().0),
    };
    let log = match asked.is_empty() && scanned.batches.is_empty() {
        true => WriteLog::new(config),
        false => WriteLog::found(config, &found, found.chain.before),
    };
    let back = Back::new(log, (sb.uuid, run.unwrap_or(sb.epoch)));
    if core.back.set(back).is_err() {
        return Ok(());
    }
    for volume in volumes.iter().filter(|volume| !through(volume)) {
        let written = record(&volume.name).and_then(|v| v.write_back);
        let config = core.config.back[&volume.name].clone();
        core.write_back(volume, written, was, (config, None), Some(&found))?;
    }
    call_log(&**core, None, |log, asks| log.recovered(asks));
    Ok(())
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
        (config, at): (BackConfig, Option<&MarkerAt>),
        found: Option<&Recovered>,
    ) -> Result<(), CacheError> {
        let name = &volume.name;
        let fail = |reason: String| volume_error(name, reason);
        let back = self.back.get().ok_or_else(|| fail("there is no write log".to_owned()))?;
        if matches!(config.order, Order::Journaled(_)) {
            return Err(fail("a journal is not kept yet".to_owned()));
        }
        let mut looked = look(self, volume, record.as_ref(), was, (true, at))?;
        let judged = match &looked {
            Some(looked) => looked.judged,
            // Without a marker this cache alone knows.
            None => match holds(record.as_ref()) {
                marker::Holds::Open(_) => Verdict::GoOn,
                marker::Holds::Clean(g) => Verdict::Attach { generation: g + 1, lines: true },
                _ => Verdict::Attach { generation: 1, lines: true },
            },
        };
        let (said, found_marker) = match &looked {
            Some(looked) => (looked.said.clone(), looked.found.clone()),
            None => ("the marker".to_owned(), None),
        };
        let mut number = looked.as_ref().map_or(0, Looked::number);
        let state = match judged {
            Verdict::GoOn => {
                let record =
                    record.ok_or_else(|| fail("the cache knows nothing of it".to_owned()))?;
                let found = found.and_then(|found| found.volumes.get(&record.attachment));
                if found.is_some_and(|found| found.gap) {
                    return Err(fail(
                        "writes of it that this cache alone had are lost in the midst of others: `larder block recover` gives up all of them"
                            .to_owned(),
                    ));
                }
                let state = WrittenBack { order: order_of(config.order), ..record };
                self.attach_log(
                    volume,
                    &state,
                    &config,
                    found.map_or(state.began, |f| f.frontier),
                    number,
                );
                if let Some(found) = found {
                    let now = self.now();
                    back.log().recover(now, state.attachment, found);
                }
                state
            }
            Verdict::Attach { generation, lines } => {
                if !lines {
                    self.distrust(volume, volume.volume().backing().look())?;
                }
                let uuid = found_marker.as_ref().map(|m| m.volume).or(record.map(|r| r.volume));
                let uuid = match uuid {
                    Some(uuid) => uuid,
                    None => random_uuid()?,
                };
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
                if let Some(looked) = &mut looked {
                    looked.place.write(&marker).map_err(|e| fail(e.to_string()))?;
                }
                volume.make_durable()?;
                self.attach_log(volume, &state, &config, 0, number);
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
                drop(looked.place.read());
                return self.write_back_again(volume, record, was, (config, at));
            }
            Verdict::Drain | Verdict::TakeUp { .. } | Verdict::Wait => {
                return Err(fail(format!(
                    "{said} says what this version of Larder does not do yet: use the version that has written it"
                )));
            }
        };
        back.add(Written {
            attached: volume.clone(),
            place: looked.map(|looked| looked.place.into()),
            state,
            config,
            number: number.into(),
            said: AtomicU64::new(0),
        });
        volume.attachment.store(state.attachment, Ordering::SeqCst);
        Ok(())
    }

    fn write_back_again(
        &self,
        volume: &Arc<Attached>,
        record: Option<WrittenBack>,
        was: (Uuid, u64),
        back: (BackConfig, Option<&MarkerAt>),
    ) -> Result<(), CacheError> {
        self.write_back(volume, record, was, back, None)
    }

    fn attach_log(
        &self,
        volume: &Attached,
        state: &WrittenBack,
        config: &BackConfig,
        frontier: u64,
        marker: u64,
    ) {
        let Some(back) = self.back.get() else { return };
        let destage = destager::Config {
            order: config.order,
            pace: config.pace,
            most: WINDOW,
            depth: STORE_DEPTH,
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
                epoch: 0,
                marker,
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
