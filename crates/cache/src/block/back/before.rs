//! What a start can know to be refused before it changes anything: what configuration, superblock and markers say. (What only the log tells is
//! judged later, as is what another holder does meanwhile.)

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::holder::{Refused, cache_of, mark_of};
use larder_engine::block::writeback::marker::{self, Verdict, judge, unmarked};
use larder_format::block::superblock::{HoldsState, WriteLogArea};
use larder_format::block::{BlockSuperblock, Volume as VolumeRecord};
use larder_volume::Backing;
use larder_volume::marker::{Found, MarkerIoError, PlaceOptions};

use super::super::open::{CacheConfig, CacheError};
use super::super::volume::Volume;
use super::patient::PATIENCE;
use super::start::{
    check_flush, check_through, described, is_moved, marker_error, no_journal, none_dirty,
    place_to_look, refused, volume_error,
};
use super::{Asking, BACK, BackConfig, BackWish, LogSize, MarkerAt, check_bounds, order_words};

/// Refuses a start with these volumes on a cache at `path` whose superblock is `sb`, if it is to be.
///
/// # Errors
/// [`CacheError`]: a volume that must not be served so.
pub(in crate::block) fn check(
    config: &CacheConfig,
    path: &Path,
    volumes: &[Arc<Volume>],
    sb: &BlockSuperblock,
) -> Result<(), CacheError> {
    let asking = Asking::of(config);
    for volume in volumes {
        let name = volume.name();
        let wish = config.wish_of(name);
        let record = sb.volumes.iter().find(|v| v.name == name).and_then(|v| v.write_back);
        match &wish.back {
            None => {
                let store = volume.backing();
                // What is left to do is done when the log was read.
                check_through(
                    (name, store),
                    record.as_ref(),
                    (sb.uuid, sb.epoch),
                    (&wish, asking),
                    (false, false),
                    &sb.volumes,
                )?;
            }
            Some(back) => {
                check_flush(name, volume.backing())?;
                let area = sb.write_log.ok_or_else(|| no_log(name))?;
                back.check_bound(size_of(&area)).map_err(|e| volume_error(name, e.to_string()))?;
                back.age().map_err(|e| volume_error(name, e.to_string()))?;
                may_be_journaled(volume, (&wish, asking), path)?;
                look(volume, (&wish, asking), sb)?;
            }
        }
    }
    together(config, volumes, sb)?;
    let missing = |v: &&VolumeRecord| {
        v.write_back
            .as_ref()
            .is_some_and(|w| w.holds.may_be_dirty() && w.holds != HoldsState::Carried)
            && !volumes.iter().any(|volume| volume.name() == v.name)
            && !config.awaited.contains(&v.name)
    };
    if let Some(missing) = sb.volumes.iter().find(missing) {
        let order = missing.write_back.map_or("", |w| order_words(w.order));
        let reason = format!(
            "this cache may hold writes of it that its store does not have: serve it too, as {BACK}{order}, until they are there"
        );
        return Err(volume_error(&missing.name, reason));
    }
    Ok(())
}

/// The journal of a volume that is to have one may lie where it is to.
///
/// # Errors
/// [`CacheError::Journal`].
pub(in crate::block) fn may_be_journaled(
    volume: &Volume,
    (wish, asking): (&BackWish, Asking),
    cache: &Path,
) -> Result<(), CacheError> {
    if !wish.back.as_ref().is_some_and(BackConfig::is_journaled) {
        return Ok(());
    }
    let found = asking.journal_site(volume.backing(), wish, cache);
    found.map(drop).map_err(|why| no_journal(volume.name(), why))
}

/// How large the write log of a cache is.
pub fn size_of(area: &WriteLogArea) -> LogSize {
    LogSize { segments: area.segments, segment: area.geometry.bytes() }
}

/// What volumes that write back are to hold of the log, those among them whose stores are not there yet, fits together.
fn together(
    config: &CacheConfig,
    volumes: &[Arc<Volume>],
    sb: &BlockSuperblock,
) -> Result<(), CacheError> {
    let Some(area) = sb.write_log else { return Ok(()) };
    let names: BTreeSet<&str> = volumes.iter().map(|volume| volume.name()).collect();
    let names: BTreeSet<&str> =
        names.into_iter().chain(config.awaited.iter().map(|s| &**s)).collect();
    let all: Vec<BackConfig> = names.iter().filter_map(|name| config.wish_of(name).back).collect();
    let Err(why) = check_bounds(all.iter(), size_of(&area)) else { return Ok(()) };
    let states =
        |name: &&&str| config.wish_of(name).back.is_some_and(|back| back.dirty_max.is_some());
    let first = names.iter().find(states).copied().unwrap_or_default();
    Err(volume_error(first, why.to_string()))
}

/// It is to write back, and cannot.
pub(super) fn no_log(name: &str) -> CacheError {
    volume_error(
        name,
        "it is to write back, and this cache has no write log: format one that has".to_owned(),
    )
}

/// Looks at the marker of a volume that is to write back, and at what this cache knows its store by.
///
/// # Errors
/// [`CacheError`]: it must not be served so.
pub(in crate::block) fn look(
    volume: &Volume,
    (wish, asking): (&BackWish, Asking),
    sb: &BlockSuperblock,
) -> Result<(), CacheError> {
    let (name, store) = (volume.name(), volume.backing());
    let entry = sb.volumes.iter().find(|v| v.name == name);
    let record = entry.and_then(|v| v.write_back);
    let cache = cache_of((sb.uuid, sb.epoch), record.as_ref(), 0, Fault::default());
    // Where no marker says what the store was, this cache does.
    let moved = entry.filter(|_| !wish.moved).is_some_and(|entry| {
        store.identity().is_ok_and(|now| now.is_of(&entry.identity, false).is_err())
    });
    let (verdict, at, said) = if wish.marker == MarkerAt::Nowhere {
        none_dirty((name, store), asking)?;
        (unmarked(cache.holds, moved), "this cache".to_owned(), None)
    } else {
        let mut place = place_to_look((name, store), (wish, asking))?;
        let found = place.read().map_err(|error| marker_error(name, &error))?;
        let (read, said) = match found {
            Found::There(there) => {
                let of = mark_of(&there, false);
                let moved =
                    is_moved(store, &*place, &there, wish.moved) || of.of.is_none() && moved;
                (marker::Read::There(marker::Marker { moved, ..of }), Some(there))
            }
            Found::Absent { was } => (marker::Read::Absent { was }, None),
            Found::Damaged => (marker::Read::Damaged, None),
        };
        let at = described(Some(&*place), said.is_some());
        (judge(read, &cache, Fault::default()), at, said)
    };
    match verdict {
        Verdict::Refuse(why) => {
            Err(refused(name, Refused::Marker(why), &at, said.as_deref(), &sb.volumes))
        }
        _ => Ok(()),
    }
}

/// Whether the place of a volume's marker answers. What else may be wrong with it is said when the volume comes.
///
/// # Errors
/// [`MarkerIoError::Unreachable`]: it does not, in 10 s.
pub fn marker_answers(store: &dyn Backing, wish: &BackWish) -> Result<(), MarkerIoError> {
    let at = match &wish.marker {
        MarkerAt::At(place) => Some(place.clone()),
        MarkerAt::Beside | MarkerAt::Nowhere => None,
    };
    let options = PlaceOptions { at, look: true, ..PlaceOptions::default() };
    let place = Asking::AtMost(PATIENCE).open(store, &options);
    match place.and_then(|mut place| place.read()) {
        Err(error @ MarkerIoError::Unreachable { .. }) => Err(error),
        _ => Ok(()),
    }
}
