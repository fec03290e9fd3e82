//! What a start makes of volumes that write back: the marker beside each store decides, the log has what is dirty.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_base::Nanos;
use larder_engine::block::node::defaults;
use larder_engine::block::node::logged::{ForDevice, call_log, tell_log};
use larder_engine::block::writeback::holder::{Comer, Holder, Logged, Refused, mark_of};
use larder_engine::block::writeback::log::{Asks, Attach, Config, WriteLog};
use larder_engine::block::writeback::marker::{self, Why};
use larder_engine::block::writeback::recovery::RecoveredPacked;
use larder_engine::block::writeback::{Fault, destager, scan};
use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState, Order as MarkerOrder};
use larder_format::block::superblock::{WriteLogArea, WrittenBack};
use larder_format::block::{BlockSuperblock, Volume as VolumeRecord};
use larder_runtime::{AlignedBuf, Device as _, Payload};
use larder_volume::journal::{Site, Use};
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace, PlaceOptions};
use larder_volume::{Backing, Flushing};

use super::super::Core;
use super::super::attached::Attached;
use super::super::open::CacheError;
use super::before::no_log;
use super::ends::say_void;
use super::journal::{Coming, Journal};
use super::steps::{Begins, Way};
use super::{Asking, BACK, Back, BackConfig, BackWish, MarkerAt, NoJournal, Order, order_words};

/// The volume's own of what is wrong with it.
pub(super) fn volume_error(name: &str, reason: String) -> CacheError {
    CacheError::Volume { name: name.to_owned(), reason }
}

/// The same of its marker's place.
pub(super) fn marker_error(name: &str, error: &MarkerIoError) -> CacheError {
    let reason = error.to_string();
    match error.may_pass() {
        true => CacheError::NotYet { name: name.to_owned(), reason },
        false => volume_error(name, reason),
    }
}

/// Why a volume is refused, in words. `place` is where its marker is.
pub(super) fn refused(
    name: &str,
    why: Refused,
    place: &str,
    marker: Option<&Marker>,
    known: &[VolumeRecord],
) -> CacheError {
    let host = marker.map_or("unknown", |marker| marker.host.as_str());
    // What else this cache knows of the marker's volume.
    let named = marker.and_then(|marker| {
        let of = |v: &&VolumeRecord| v.write_back.is_some_and(|w| w.volume == marker.volume);
        known.iter().filter(|v| v.name != name).find(of)
    });
    let is_dirty = |v: &VolumeRecord| v.write_back.is_some_and(|w| w.holds.may_be_dirty());
    let reason = match (why, named) {
        (Refused::Marker(Why::Lost | Why::OtherVolume(_)), Some(other)) if is_dirty(other) => {
            format!(
                "{place} and so this store are those of volume '{0}' of this cache, which holds writes of it that the store does not have: serve the store under \
             the name '{0}'; nothing is lost then, and a recovery of the store would give them up",
                other.name
            )
        }
        (Refused::Marker(Why::OtherVolume(_)), Some(other)) => format!(
            "{place} and so this store are those of volume '{}' of this cache, and not the ones whose writes this cache holds under the name '{name}': \
             name the store that it had",
            other.name
        ),
        (why, _) => refused_alone(why, place, host),
    };
    volume_error(name, reason)
}

/// The same, where no other volume of the cache has to do with it.
fn refused_alone(why: Refused, place: &str, host: &str) -> String {
    match why {
        Refused::Marker(Why::OtherVolume(other)) => format!(
            "{place} and so this store are those of another volume ({other}), and this cache holds writes that the store of its own volume does not have: \
             name the store that it had"
        ),
        Refused::Marker(Why::OtherStore) => format!(
            "this cache holds writes of it, or {place} says so, and the store is not the one that it had (another file, device or name): name that one. If it is \
             the same one moved, or a whole copy of it that was made since this cache was last used, say that the store was moved"
        ),
        Refused::Marker(Why::Elsewhere(cache)) => format!(
            "{place} says that the cache {cache} (last used on host '{host}') may hold writes that the store does not have: serve it with that \
             cache, or have its store recovered, which gives them up"
        ),
        Refused::Marker(Why::Lost) => format!(
            "{place} says that this cache may hold writes that the store does not have, and it does not have them any more: have its \
             store recovered, which gives them up"
        ),
        Refused::Marker(Why::NoMarker) => format!(
            "this cache may hold writes of it that the store does not have, and {place} is gone or damaged, so nothing says that they still count: \
             put it back. If it is lost for good, export what is dirty over a copy of the store: that is the volume as it was; then have this cache discard what it \
             holds, and put the copy in the place of the store"
        ),
        Refused::Marker(Why::MarkerLost) => format!(
            "there was a marker of write-back, and {place} is gone or damaged: put it back, or have its store recovered, \
             which gives up what a cache may hold"
        ),
        Refused::Marker(Why::SetBack) => format!(
            "{place} and this cache are not of one time: one of the two is an older copy. Is there a newer copy of the cache, or of the store with its \
             marker? Use that: nothing is lost then. If there is none, have its store recovered as one that was set back, which gives up what any \
             cache holds (where only the cache is older, a plain recovery does too)"
        ),
        Refused::Kept(order) => format!(
            "this cache may hold writes of it that its store does not have: serve it as {BACK}{}, as it was, so that they come there",
            order_words(order)
        ),
        Refused::Gap => "writes of it that this cache alone had are lost in the midst of others: have its store recovered, which gives up all of \
                         them"
            .to_owned(),
        Refused::Order { logged, asked } => {
            let (logged, asked) = (order_words(logged), order_words(asked));
            format!(
                "this cache holds writes of it that were logged for another order, {logged}, than {asked}: serve it as {BACK}{logged} once more, and \
                 destage all of it before its order changes"
            )
        }
        Refused::Journaled => "its last run was journaled: serve it so once more, and destage all of it before its order changes".to_owned(),
        Refused::Aside => "what is dirty of it was put aside in this cache, and nothing can be logged there now: take it up with a cache device that works, or \
                           have its store recovered, which gives it up"
            .to_owned(),
        Refused::Drains => "the write log of this cache failed in a former run, and what is left of it there comes to the store when the cache starts with \
                            the store in reach: start again now"
            .to_owned(),
        Refused::Shrunk => "its store has become smaller since it was last attached, and what this cache holds of it does not count any more: restore its \
                            size, or have this cache discard what it holds"
            .to_owned(),
        Refused::Unread => format!("{place} does not answer"),
    }
}

/// Opens the place of a volume's marker. `None` where there is none by the operator's word, or where its store has no place for one and the
/// volume does not need it.
pub(super) fn place_of(
    (name, store): (&str, &dyn Backing),
    (wish, asking): (&BackWish, Asking),
) -> Result<Option<Box<dyn MarkerPlace>>, CacheError> {
    let writes_back = wish.back.is_some();
    let at = match &wish.marker {
        MarkerAt::Nowhere => return none_dirty((name, store), asking).map(|()| None),
        MarkerAt::At(place) => Some(place.clone()),
        MarkerAt::Beside => None,
    };
    let options = PlaceOptions { at, look: !writes_back, ..PlaceOptions::default() };
    match asking.open(store, &options) {
        Ok(place) => Ok(Some(place)),
        Err(MarkerIoError::NoPlace { .. }) if !writes_back => Ok(None),
        Err(error) => Err(marker_error(name, &error)),
    }
}

/// A volume that is to have no marker has none that says more than that all is well.
///
/// # Errors
/// [`CacheError`]: it has one.
pub(super) fn none_dirty(
    (name, store): (&str, &dyn Backing),
    asking: Asking,
) -> Result<(), CacheError> {
    let look = |at: Option<String>| {
        asking.open(store, &PlaceOptions { at, look: true, ..PlaceOptions::default() })
    };
    let fail = |what: String| {
        volume_error(
            name,
            format!(
                "{what}, and it is to be served without a marker: serve it with that one, until it is clean"
            ),
        )
    };
    // Where there is no place for one there is none; elsewhere it is where the store says.
    let mut place = match look(None) {
        Ok(place) => place,
        Err(error @ MarkerIoError::Unreachable { .. }) => return Err(marker_error(name, &error)),
        Err(error @ MarkerIoError::Option { .. }) => {
            return Err(fail(format!("its store has a marker: {error}")));
        }
        Err(_) => return Ok(()),
    };
    let named = place.named_by_store().filter(|named| !named.is_this);
    if let Some(named) = named {
        let at = format!("file:{}", named.path.display());
        place = look(Some(at)).map_err(|e| match e.may_pass() {
            true => marker_error(name, &e),
            false => fail(format!("its store has a marker: {e}")),
        })?;
    }
    match place.read() {
        Ok(Found::There(marker)) if marker.state != MarkerState::Clean => Err(fail(format!(
            "{} says that the cache {} (last used on host '{}') may hold writes that the store does not have",
            place.describe(),
            marker.cache,
            marker.host
        ))),
        Ok(Found::There(_) | Found::Absent { was: false }) => Ok(()),
        Ok(Found::Absent { was: true }) => {
            Err(fail(format!("there was a marker of write-back, and {} is gone", place.describe())))
        }
        Ok(Found::Damaged) => Err(fail(format!("{} is damaged", place.describe()))),
        // What is there is no marker.
        Err(MarkerIoError::NotAMarker { .. }) => Ok(()),
        Err(error) if error.may_pass() => Err(marker_error(name, &error)),
        Err(error) => Err(fail(error.to_string())),
    }
}

/// Whether a marker was written beside another store than this one. `vouched`: the operator says that it was not.
pub(super) fn is_moved(
    store: &dyn Backing,
    place: &dyn MarkerPlace,
    marker: &Marker,
    vouched: bool,
) -> bool {
    // (Of one with its journal laid over it that was seen before, and it is known by another name for its lines alone.)
    let vouched = vouched || store.has_journal_laid_over();
    let remembers = place.named_by_store().is_some_and(|named| named.is_this);
    !vouched && store.identity().is_ok_and(|now| now.is_of(&marker.identity, remembers).is_err())
}

/// The same to be looked at alone, of a volume that is to have one.
pub(super) fn place_to_look(
    (name, store): (&str, &dyn Backing),
    (wish, asking): (&BackWish, Asking),
) -> Result<Box<dyn MarkerPlace>, CacheError> {
    let at = match &wish.marker {
        MarkerAt::At(place) => Some(place.clone()),
        MarkerAt::Beside | MarkerAt::Nowhere => None,
    };
    let options = PlaceOptions { at, look: true, ..PlaceOptions::default() };
    asking.open(store, &options).map_err(|error| marker_error(name, &error))
}

/// Where a marker is, in words. Of one that is not `there` the store may say that it is elsewhere: it may have several names.
pub(super) fn described(place: Option<&dyn MarkerPlace>, there: bool) -> String {
    let Some(place) = place else { return "the marker".to_owned() };
    let named = place.named_by_store().filter(|named| !there && !named.is_this);
    match named {
        Some(named) => format!(
            "{} (the store says that its marker is '{}': serve it by the name that it has beside that one)",
            place.describe(),
            named.path.display()
        ),
        None => place.describe(),
    }
}

/// What a marker says, if it is there, and whether its volume is refused.
type Judged = (Option<Box<Marker>>, Result<(), Refused>);

/// Reads a marker, and has the machine plan what follows.
fn judge_marker(
    (name, store): (&str, &dyn Backing),
    holder: &mut Holder,
    place: Option<&mut (dyn MarkerPlace + 'static)>,
    vouched: bool,
) -> Result<Judged, CacheError> {
    let Some(place) = place else {
        return Ok((None, holder.read(marker::Read::Absent { was: false }, None)));
    };
    let found = place.read().map_err(|error| marker_error(name, &error))?;
    let (read, said) = match found {
        Found::There(marker) => {
            let moved = is_moved(store, place, &marker, vouched);
            (marker::Read::There(mark_of(&marker, moved)), Some(marker))
        }
        Found::Absent { was } => (marker::Read::Absent { was }, None),
        Found::Damaged => (marker::Read::Damaged, None),
    };
    let judged = holder.read(read, said.as_deref());
    Ok((said, judged))
}

/// What a marker says to one who comes.
#[derive(Default)]
pub(super) struct SaidThere {
    /// The attachment that it is of, and the last mark that it names.
    pub(super) mark: Option<(u32, String)>,
    /// Until the store has all up to this record of that attachment it alone may be no image.
    pub(super) joins: (u32, u64),
    /// The store may have a probe in its first sector.
    pub(super) probes: bool,
}

/// The same of a volume that must not be refused.
pub(super) fn read_marker(
    (name, store): (&str, &dyn Backing),
    holder: &mut Holder,
    mut place: Option<&mut (dyn MarkerPlace + 'static)>,
    vouched: bool,
    known: &[VolumeRecord],
) -> Result<SaidThere, CacheError> {
    let (said, judged) = judge_marker((name, store), holder, place.as_deref_mut(), vouched)?;
    let said = said.as_deref();
    judged.map_err(|why| {
        refused(name, why, &described(place.as_deref(), said.is_some()), said, known)
    })?;
    let taken = |v: &VolumeRecord| {
        v.name != name && v.write_back.is_some_and(|w| w.volume == holder.state().volume)
    };
    if known.iter().any(taken) {
        holder.is_another();
    }
    Ok(SaidThere {
        mark: said.and_then(|marker| Some((marker.attachment, marker.mark.clone()?))),
        joins: said.map_or((0, 0), |marker| (marker.attachment, marker.joins)),
        probes: said.is_some_and(|marker| marker.probes),
    })
}

/// A volume that does not write back: nothing else may hold writes of it that its store lacks, and this cache neither. Returns what is left to do,
/// where what this cache holds is void: [`Core::voids`] does it.
///
/// # Errors
/// When that is so, or cannot be found out.
pub(in crate::block) fn check_through(
    (name, store): (&str, &dyn Backing),
    record: Option<&WrittenBack>,
    (cache, run): (Uuid, u64),
    (wish, asking): (&BackWish, Asking),
    (drains, shrunk): (bool, bool),
    known: &[VolumeRecord],
) -> Result<Holder, CacheError> {
    let mut place = place_of((name, store), (wish, asking))?;
    let comer = Comer {
        cache,
        former: run,
        run,
        record: record.copied(),
        logged: None,
        order: None,
        marked: place.is_some(),
        served: false,
        drains,
        later: false,
        shrunk,
        fresh: Uuid([0; 16]),
    };
    let dirty = record.is_some_and(|record| record.holds.may_be_dirty());
    let mut holder = Holder::comes(comer, Fault::default());
    let (said, judged) =
        judge_marker((name, store), &mut holder, place.as_deref_mut(), wish.moved)?;
    let said = said.as_deref();
    match judged {
        Err(Refused::Marker(Why::Elsewhere(_) | Why::Lost | Why::OtherVolume(_)))
            if !dirty && may_be_read(store, said) =>
        {
            tracing::warn!(
                "volume '{name}': {} says that a cache may hold writes that the store does not have: it is read as it was before them",
                described(place.as_deref(), true)
            );
            Ok(holder)
        }
        judged => judged.map(|()| holder).map_err(|why| {
            refused(name, why, &described(place.as_deref(), said.is_some()), said, known)
        }),
    }
}

/// A store that is only read is an image without what a cache holds of it: one that was written in order as it is, one that was journaled with
/// what its journal has.
fn may_be_read(store: &dyn Backing, marker: Option<&Marker>) -> bool {
    store.capabilities().read_only
        && marker.is_some_and(|marker| match marker.order {
            MarkerOrder::Any => false,
            MarkerOrder::Flush | MarkerOrder::Completion => marker.joins <= marker.frontier,
            MarkerOrder::Journaled => store.has_journal_laid_over(),
        })
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
    let asking = Asking::of(&core.config);
    let through = |volume: &&Arc<Attached>| wish(volume).back.is_none();
    let volumes = core.volumes();
    let first = volumes.iter().find(|volume| !through(volume)).map(|volume| &volume.name);
    let mut void = Vec::new();
    for volume in volumes.iter().filter(through) {
        let record = record(&volume.name).and_then(|v| v.write_back.as_ref());
        let of = (volume.name.as_str(), volume.volume().backing());
        let holder = {
            let how = (!core.is_enabled(), volume.had().is_some());
            let wish = wish(volume);
            check_through(of, record, was, (&wish, asking), how, &sb.volumes)?
        };
        void.push((volume, holder));
    }
    if core.config.record.is_some() && first.is_some() {
        let reason =
            "a run with volumes that write back cannot be recorded: record one that writes through";
        return Err(CacheError::System { what: "the record", reason: reason.to_owned() });
    }
    let Some(area) = sb.write_log else {
        return match first {
            None => Ok(()),
            Some(name) => Err(no_log(name)),
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
    let asked: Vec<(u32, u64)> = sb
        .volumes
        .iter()
        .filter_map(|v| v.write_back.filter(|w| w.holds.may_be_dirty()))
        .map(|w| (w.attachment, w.began))
        .collect();
    let mut read =
        |at: u64, bytes: &mut [u8]| core.device.read_at(at, bytes).map_err(|_| scan::ReadFailed);
    let mut scanned = scan::scan(&area, sb.uuid, &mut read);
    let found = scanned.recover_packed(&asked, Fault::default());
    let run = core.on_log(|log| log.line_space().map(|sb| sb.epoch))?;
    let config = log_config(core, sb.uuid, run.unwrap_or(sb.epoch), &area);
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
        let comes = (Some((&found, &scanned)), false);
        core.write_back(volume, written, was, &wish(volume), comes, &mut |_| true)?;
    }
    for (volume, mut holder) in void {
        core.voids(volume, &mut holder)?;
    }
    for volume in &sb.volumes {
        let kept = volume.write_back.filter(|w| w.holds.may_be_dirty());
        if let Some(kept) = kept.filter(|_| core.volume(&volume.name).is_none()) {
            core.keep_aside(&volume.name, &kept, (&found, &scanned))?;
        }
    }
    // What is of volumes that came anew, or go their own way, is void.
    for (&attachment, volume) in &found.volumes {
        let bytes = tell_log(&**core, core.now(), |log, _| log.give_up_found(attachment, volume));
        let of = |v: &&VolumeRecord| v.write_back.is_some_and(|w| w.attachment == attachment);
        if let Some(of) = sb.volumes.iter().find(of) {
            say_void(&of.name, bytes.unwrap_or(0));
        }
    }
    if core.back.get().is_some_and(|back| back.drains.load(Ordering::Relaxed)) {
        // The device is not written any more, and need not be able to make anything durable.
        tell_log(&**core, core.now(), |log, asks| log.start_closed(core.now(), asks));
        return Ok(());
    }
    // What was read may not be durable yet, and counts from now on.
    core.device.sync()?;
    begin_log(core, &mut |told| {
        let mut asked = ForDevice::default();
        call_log(&**core, None, |log, asks| told.by(core.now(), log, asks), |more| asked = more);
        asked
    })?;
    match core.back.get().is_some_and(|back| back.log().is_started()) {
        true => Ok(()),
        false => Err(no_room()),
    }
}

/// What a log is told that begins.
pub(super) enum Told {
    Start,
    Written(u64),
    Flushed(u64),
}

impl Told {
    pub(super) fn by(self, now: Nanos, log: &mut WriteLog<Payload>, asks: &mut Asks<Payload>) {
        match self {
            Told::Start => log.start(asks),
            Told::Written(number) => log.written(now, number, true, asks),
            Told::Flushed(covers) => log.flushed(now, covers, true, asks),
        }
    }
}

pub(super) fn no_room() -> CacheError {
    CacheError::System {
        what: "the write log",
        reason: "it is full, and has no room for what a start writes".to_owned(),
    }
}

/// The first batch of this run makes void what a crash may still bring back of the last. `tell` calls the log, and returns what that asks of the device.
pub(super) fn begin_log(
    core: &Core,
    tell: &mut dyn FnMut(Told) -> ForDevice<Payload>,
) -> Result<(), CacheError> {
    let mut asked = tell(Told::Start);
    while !asked.is_empty() {
        let ForDevice { writes, flush, gives_up } = std::mem::take(&mut asked);
        if let Some(why) = gives_up {
            let (what, reason) = ("the write log", why.to_owned());
            return Err(CacheError::System { what, reason });
        }
        for write in writes {
            let mut bytes = AlignedBuf::zeroed(write.len as usize);
            bytes[..write.head.len()].copy_from_slice(&write.head);
            core.device.write_at(write.at, &bytes)?;
            asked.add(tell(Told::Written(write.number)));
        }
        if let Some(covers) = flush {
            core.device.sync()?;
            asked.add(tell(Told::Flushed(covers)));
        }
    }
    Ok(())
}

/// What a log of this cache is built from, in this run.
pub(super) fn log_config(core: &Core, cache: Uuid, run: u64, area: &WriteLogArea) -> Config {
    Config {
        cache,
        run,
        at: area.at,
        geometry: area.geometry,
        segments: area.segments,
        depth: defaults::LOG_DEPTH,
        memory: core.config.fill_memory.0,
        wall: super::unix_nanos().saturating_sub(core.now().0),
    }
}

impl Core {
    /// A volume writes back from now on, as its marker and this cache allow. `found` is what a start has found in the log. `served`: it was
    /// written through until now, and its clients wait. `go_on` may say no: it fails then.
    ///
    /// # Errors
    /// [`CacheError`]: it must not be served so. One that was served is served as before.
    pub(in crate::block) fn write_back(
        &self,
        volume: &Arc<Attached>,
        record: Option<WrittenBack>,
        (cache, run): (Uuid, u64),
        wish: &BackWish,
        (found, served): (Option<(&RecoveredPacked, &scan::Scan)>, bool),
        go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<(), CacheError> {
        let name = &volume.name;
        let back = self.back.get().ok_or_else(|| no_log(name))?;
        check_flush(name, volume.volume().backing())?;
        if back.log().closed().is_some() && record.is_some_and(|r| r.holds.may_be_dirty()) {
            return Err(refused(name, Refused::Drains, "the marker", None, &[]));
        }
        if back.log().closed().is_some() {
            return Err(volume_error(
                name,
                match self.log_drains() && self.is_enabled() {
                    true => "it is to write back, and the write log of this cache failed in a former run: what was left of it has come to the stores, so start again \
                             now, and it logs again; or serve the volume as one that writes through",
                    false => "it is to write back, and the write log of this cache has failed: if the cache device works again take the cache back, else replace it, \
                              format it and start again; or serve the volume as one that writes through",
                }
                .to_owned(),
            ));
        }
        let config = wish.back.clone().unwrap_or_default();
        config.age().map_err(|e| volume_error(name, e.to_string()))?;
        config.check_bound(back.log().size()).map_err(|e| volume_error(name, e.to_string()))?;
        let site = match config.order {
            Order::Journaled(_) if volume.had().is_none() => {
                Some(journal_site(self, volume, wish)?)
            }
            _ => None,
        };
        let asking = Asking::of(&self.config);
        let place = place_of((name, volume.volume().backing()), (wish, asking))?;
        let logged = record.and_then(|record| match found {
            Some((found, _)) => {
                let volume = found.volumes.get(&record.attachment)?;
                let (frontier, last, marker) = (volume.frontier, volume.last, volume.marker);
                Some(Logged { frontier, last, marker, gap: volume.gap })
            }
            // It was put aside in this run, or its store was not there at the start.
            None => {
                let log = back.log();
                let [frontier, .., last] = log.status(self.now(), record.attachment)?.positions;
                let marker = log.marker(record.attachment).unwrap_or(0);
                Some(Logged { frontier, last, marker, gap: false })
            }
        });
        let comer = Comer {
            cache,
            former: run,
            run: back.cache.1.load(Ordering::SeqCst),
            record,
            logged,
            order: Some(config.order.marked()),
            marked: place.is_some(),
            served,
            drains: back.drains.load(Ordering::Relaxed),
            later: found.is_none(),
            shrunk: volume.had().is_some(),
            fresh: random_uuid()?,
        };
        let mut holder = Holder::comes(comer, Fault::default());
        let marker = wish.marker.clone();
        let journaled = record.is_some_and(|record| record.order == MarkerOrder::Journaled);
        let begins = Begins {
            place,
            site,
            journal: Coming { journaled, ..Coming::default() },
            journal_at: wish.journal.clone(),
            config,
            marker,
            moved: wish.moved,
            mark: None,
            joins: (0, 0),
            found,
        };
        let mut way = Way::comes(self, back, volume, begins);
        way.carry_out(&mut holder, go_on).map_err(|why| why.or_say(name))?;
        // Others may hold less since it has come.
        self.volumes().iter().for_each(|volume| self.look_at_bound(volume));
        if holder.drains() {
            back.drains.store(true, Ordering::Relaxed);
        } else if comer.drains {
            tracing::warn!(
                "volume '{name}': it is written through, since nothing is logged on this cache device; others write back what they have"
            );
        }
        Ok(())
    }

    /// A volume that does not write back comes, and what this cache holds of it is void, if that is so.
    ///
    /// # Errors
    /// [`CacheError`]: its lines could not be dropped, or that could not be recorded.
    pub(super) fn voids(
        &self,
        volume: &Arc<Attached>,
        holder: &mut Holder,
    ) -> Result<(), CacheError> {
        let Some(back) = self.back.get().filter(|_| holder.next().is_some()) else { return Ok(()) };
        tracing::warn!(
            "volume '{}': its marker says that its store has everything: it was recovered or served without this cache since, or this is an older copy of \
             the cache; what this cache holds of it is void",
            volume.name
        );
        let mut way = Way::comes(self, back, volume, Begins::default());
        way.carry_out(holder, &mut |_| true).map_err(|why| why.or_say(&volume.name))
    }

    /// A volume that was put aside with what is dirty, or whose store is not there yet, is not served: the log keeps it.
    fn keep_aside(
        &self,
        name: &str,
        carried: &WrittenBack,
        (found, scanned): (&RecoveredPacked, &scan::Scan),
    ) -> Result<(), CacheError> {
        let Some((back, of)) = self.back.get().zip(found.volumes.get(&carried.attachment)) else {
            return Ok(());
        };
        if of.gap {
            // What lies behind the gap would be forgotten.
            return Err(refused(name, Refused::Gap, "the marker", None, &[]));
        }
        // Where epochs end at marks, no other end is made of what was found.
        let wished = self.config.wish_of(name).back;
        let wished = wished.filter(|wished| wished.order.marked() == carried.order);
        let order = wished.map_or(Order::of_marked(carried.order), |wished| wished.order);
        let config = BackConfig { order, ..BackConfig::default() };
        let attach = self.attach_of(carried, &config, of.frontier, (of.marker, 0, false));
        let void = self.void_of(carried)?;
        let now = self.now();
        tell_log(self, now, |log, _| {
            log.attach(now, attach);
            log.set_void(carried.attachment, void);
            log.put_aside(carried.attachment);
            log.recover(now, carried.attachment, of, scanned);
        });
        self.name_marks(back, carried.attachment);
        Ok(())
    }

    /// How the log is to have a volume.
    pub(super) fn attach_of(
        &self,
        state: &WrittenBack,
        config: &BackConfig,
        frontier: u64,
        (marker, epoch, marked): (u64, u64, bool),
    ) -> Attach {
        let destage = destager::Config {
            order: config.order,
            pace: config.pace,
            most: defaults::window(config.order),
            depth: defaults::DESTAGE_DEPTH,
        };
        Attach {
            attachment: state.attachment,
            volume: state.volume,
            generation: state.generation,
            destage,
            bound: config.dirty_max.map(|bytes| bytes.0),
            age: config.age().ok().flatten(),
            frontier,
            epoch,
            marker,
            marked,
        }
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
        let cache = self.back.get().map_or(Uuid([0; 16]), |back| back.cache.0);
        Marker {
            number,
            state: said,
            volume: state.volume,
            identity: volume.identity(),
            cache,
            // As the superblock has it: that is durable before.
            run: state.run,
            host: super::host_name(),
            generation: state.generation,
            attachment: state.attachment,
            frontier,
            time: super::unix_nanos(),
            mark: self
                .back
                .get()
                .and_then(|back| back.log().stored_mark(state.attachment).map(str::to_owned)),
            order: state.order,
            applied: self.back.get().map_or(0, |back| back.log().applied(state.attachment)),
            joins: self.back.get().map_or(0, |back| back.log().joins(state.attachment)),
            probes: false,
        }
    }
}

pub(super) fn random_uuid() -> Result<Uuid, CacheError> {
    let random = larder_runtime::machine::random_bytes::<16>();
    let random =
        random.map_err(|e| CacheError::System { what: "random bytes", reason: e.to_string() })?;
    Ok(Uuid(random))
}

/// Nothing is let go of here that its store may lose. (Whether it does cannot be seen.)
pub(super) fn check_flush(name: &str, store: &dyn Backing) -> Result<(), CacheError> {
    match store.capabilities().flush {
        Flushing::Missing => {
            Err(CacheError::CannotFlush { name: name.to_owned(), store: store.uri().to_owned() })
        }
        Flushing::Offered | Flushing::Needless => Ok(()),
    }
}

pub(super) fn no_journal(name: &str, why: NoJournal) -> CacheError {
    CacheError::Journal { name: name.to_owned(), why }
}

/// Where the journal of a volume is to be.
fn journal_site(core: &Core, volume: &Attached, wish: &BackWish) -> Result<Site, CacheError> {
    let store = volume.volume().backing();
    let found = Asking::of(&core.config).journal_site(store, wish, core.path());
    found.map_err(|why| no_journal(&volume.name, why))
}

/// The journal of a volume, to be written.
pub(super) fn open_journal(
    asking: Asking,
    volume: &Attached,
    site: &Site,
    names: &[Uuid],
) -> Result<Journal, CacheError> {
    let opened = Journal::open_by(asking, site, names, Use::Make);
    opened.map_err(|e| no_journal(&volume.name, e.into()))
}
