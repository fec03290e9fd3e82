//! What is dirty of a volume is given up, on a cache device that is not in use: all of it, or what lies beyond the end of a store that has become
//! smaller.
//!
//! No older copy of the cache may return with it. Where all is given up the marker becomes clean with the next generation first, as by a recovery,
//! and then the cache says that it holds nothing. Where the rest stays, the generation rises in the cache first, then in the marker: a copy has the
//! one before, and is refused. Cut short in between, either has to be done again, and the volume is refused until then.

use std::path::PathBuf;

use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::holder::{Refused, cache_of, mark_of};
use larder_engine::block::writeback::marker::{self, Verdict, Why};
use larder_format::block::BlockSuperblock;
use larder_format::block::marker::{Marker, MarkerState, Order as MarkerOrder};
use larder_format::block::superblock::{COPY_BYTES, Cut, HoldsState, VolumeState, WrittenBack};
use larder_runtime::{Device as _, DeviceOptions, FlashDevice};
use larder_volume::Backing;
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace, PlaceOptions, marker_place};
use serde::{Deserialize, Serialize};

use super::super::open::{self, CacheError};
use super::MarkerAt;
use super::lost::TOO_MANY;
use super::offline::{self, dirty_beyond};
use super::recover::{RecoverError, RecoverWish, recover};
use super::start::{is_moved, refused, volume_error};

/// What is to be given up.
#[derive(Clone, Debug, Default)]
pub struct DiscardWish {
    /// The cache device.
    pub cache: PathBuf,
    /// The volume.
    pub volume: String,
    /// Only what lies beyond the end of its store.
    pub beyond_end: bool,
    /// Only what cannot be read.
    pub unreadable: bool,
    /// Where its marker is.
    pub marker: MarkerAt,
    /// Where its journal is, if not beside the store.
    pub journal: Option<String>,
    /// Its journal is lost, or torn, and the store is taken as it is.
    pub accept_torn: bool,
    /// Its store is the one that it was, though it lies elsewhere now.
    pub moved: bool,
    /// It is to be done; else it is only told.
    pub yes: bool,
}

/// What was, or would be, given up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Discarded {
    /// The volume.
    pub volume: String,
    /// Bytes that only the cache has and nobody will have any more, each counted once.
    pub lost_bytes: u64,
    /// The first of them in the volume,
    pub first_byte: u64,
    /// and the first behind the last.
    pub end_byte: u64,
    /// Dirty bytes that stay.
    pub kept_bytes: u64,
    /// Writes are missing in the midst of others, and how much they had is not known.
    pub gap: bool,
    /// Bytes of the store, if it was asked.
    pub store_bytes: Option<u64>,
    /// The marker is clean, or says that older copies of the cache do not count.
    pub fenced: bool,
    /// It was done.
    pub done: bool,
}

/// Why nothing was given up.
#[derive(Debug, thiserror::Error)]
pub enum DiscardError {
    /// The cache, or the volume in it.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The store's marker could not be made clean.
    #[error(transparent)]
    Recover(#[from] RecoverError),
}

impl From<larder_runtime::DeviceError> for DiscardError {
    fn from(error: larder_runtime::DeviceError) -> DiscardError {
        DiscardError::Cache(error.into())
    }
}

/// Gives it up; `store` is the volume's, if it can be had.
///
/// # Errors
/// [`DiscardError`].
pub fn discard(wish: &DiscardWish, store: Option<&dyn Backing>) -> Result<Discarded, DiscardError> {
    let name = &wish.volume;
    let fail = |reason: &str| volume_error(name, reason.to_owned());
    let device = open::open_device(&DeviceOptions::new(&wish.cache))?;
    let mut sb = open::read_superblock(&device)?;
    let at = sb.volumes.iter().position(|v| v.name == *name);
    let known = || sb.volumes.iter().map(|v| v.name.as_str()).collect::<Vec<_>>().join(", ");
    let at = at.ok_or_else(|| match sb.volumes.is_empty() {
        true => fail("this cache knows no volume"),
        false => fail(&format!("this cache does not know it; it knows {}", known())),
    })?;
    let record = sb.volumes[at].write_back.filter(|w| w.holds.may_be_dirty());
    let record = record.ok_or_else(|| fail("this cache holds nothing that its store lacks"))?;
    if wish.unreadable {
        return discard_unreadable(wish, &device, &mut sb, record);
    }
    let store_bytes = store.map(|store| store.capabilities().size);
    // It was cut short behind the cache's part.
    let is_again = wish.beyond_end
        && record.cut.is_some_and(|cut| store_bytes.is_some_and(|end| cut.end <= end))
        && store_bytes == Some(sb.volumes[at].bytes);
    let end = match (wish.beyond_end, store_bytes) {
        (false, _) => 0,
        (true, None) => return Err(fail("its store says where it ends: name it").into()),
        (true, Some(end)) if end >= sb.volumes[at].bytes && !is_again => {
            return Err(fail(&format!(
                "its store has {end} bytes, and the volume has {}: nothing lies beyond",
                sb.volumes[at].bytes
            ))
            .into());
        }
        (true, Some(end)) => end,
    };
    let found = dirty_beyond(&device, &sb, record.attachment, end);
    let mut told = Discarded {
        volume: name.clone(),
        lost_bytes: found.beyond,
        first_byte: found.range.start,
        end_byte: found.range.end,
        kept_bytes: found.below,
        gap: found.gap,
        store_bytes,
        fenced: false,
        done: false,
    };
    if wish.beyond_end {
        if found.gap {
            return Err(fail(
                "writes of it are lost in the midst of others, so nobody knows what lies beyond: discard all that is dirty of it",
            )
            .into());
        }
        if record.order == MarkerOrder::Journaled {
            return Err(fail(
                "it is journaled, and what lies beyond the end cannot be taken out of an epoch, which comes to the store as a whole, and which its journal may \
                 have: restore the store's size, have all that is dirty come to it, and make it smaller then; or discard all that is dirty of it",
            )
            .into());
        }
        // Of what was given up before nothing comes back.
        let before = record.cut.filter(|cut| !is_again && found.frontier < cut.last);
        if before.is_some_and(|cut| cut.end < end && found.furthest > cut.end) {
            return Err(fail(
                "what older writes have beyond a former end was given up, and later ones lie there: restore the store's size, and have all that is dirty come to \
                 it first; or discard all that is dirty of it",
            )
            .into());
        }
        let cut_at = before.map_or(end, |cut| cut.end.min(end));
        let store = store.ok_or_else(|| fail("its store says where it ends: name it"))?;
        let before = record.generation.saturating_sub(u64::from(is_again));
        let of = WrittenBack { generation: before, ..record };
        let marked = match read_marker(wish, store, (&sb, of, found.marker)) {
            Err(_) if is_again => {
                return Err(fail("it was given up already: nothing lies beyond").into());
            }
            marked => marked?,
        };
        if !wish.yes {
            return Ok(told);
        }
        // The cache first: what is cut short here is refused until it is done again.
        let generation = match is_again {
            true => record.generation,
            false => record.generation + 1,
        };
        if !is_again {
            let cut = (found.last > 0).then_some(Cut { end: cut_at, last: found.last });
            let volume = &mut sb.volumes[at];
            (volume.bytes, volume.identity) = (end, [0; 64]);
            volume.write_back = Some(WrittenBack { cut, generation, ..record });
            write(&device, &mut sb)?;
        }
        if let Some((mut place, marker)) = marked {
            let next = Marker {
                number: marker.number.saturating_add(1),
                generation: marker.generation + 1,
                identity: store.identity().map_err(|e| fail(&e.to_string()))?.encode(),
                host: super::host_name(),
                ..marker
            };
            place.write(&next).map_err(|e| fail(&e.to_string()))?;
            told.fenced = true;
        }
    } else {
        if let Some(store) = store {
            is_its(wish, store, &sb, &record)?;
        }
        if !wish.yes {
            return Ok(told);
        }
        if let Some(store) = store {
            told.fenced = clean(wish, store, &sb)?;
        }
        let volume = &mut sb.volumes[at];
        (volume.state, volume.identity) = (VolumeState::Detached, [0; 64]);
        volume.bytes = store_bytes.map_or(volume.bytes, |bytes| bytes.min(volume.bytes));
        let nothing = HoldsState::Nothing;
        volume.write_back =
            Some(WrittenBack { holds: nothing, generation: 0, cut: None, ..record });
        write(&device, &mut sb)?;
    }
    told.done = true;
    Ok(told)
}

/// Gives up what cannot be read. Nothing that an older copy of the cache has is contradicted, so that no marker says it.
fn discard_unreadable(
    wish: &DiscardWish,
    device: &FlashDevice,
    sb: &mut BlockSuperblock,
    record: WrittenBack,
) -> Result<Discarded, DiscardError> {
    let fail = |reason: &str| volume_error(&wish.volume, reason.to_owned());
    let found = offline::lost(device, sb, record.attachment);
    if found.gap {
        return Err(fail(
            "writes of it are lost in the midst of others, so nobody knows what of it cannot be read: discard all that is dirty of it",
        )
        .into());
    }
    let mut told = Discarded {
        volume: wish.volume.clone(),
        lost_bytes: found.bytes,
        kept_bytes: found.dirty.saturating_sub(found.bytes),
        fenced: true,
        ..Discarded::default()
    };
    if !wish.yes {
        return Ok(told);
    }
    if !sb.give_up(record.attachment, &found.void.given_up()) {
        return Err(fail(TOO_MANY).into());
    }
    write(device, sb)?;
    told.done = true;
    Ok(told)
}

/// Both copies of the superblock, one after the other.
fn write(device: &FlashDevice, sb: &mut BlockSuperblock) -> Result<(), CacheError> {
    for _ in 0..2 {
        sb.sequence += 1;
        device.write_at((sb.copy() * COPY_BYTES) as u64, &sb.encode())?;
        device.sync()?;
    }
    Ok(())
}

fn place(
    wish: &DiscardWish,
    store: &dyn Backing,
) -> Result<Option<Box<dyn MarkerPlace>>, MarkerIoError> {
    let at = match &wish.marker {
        MarkerAt::Nowhere => return Ok(None),
        MarkerAt::At(place) => Some(place.clone()),
        MarkerAt::Beside => None,
    };
    marker_place(store, &PlaceOptions { at, ..PlaceOptions::default() }).map(Some)
}

type Marked = Option<(Box<dyn MarkerPlace>, Marker)>;

/// The marker of a volume of which some stays: it must name what this cache holds. `None`: it has none, by the operator's word.
fn read_marker(
    wish: &DiscardWish,
    store: &dyn Backing,
    (sb, record, known): (&BlockSuperblock, WrittenBack, u64),
) -> Result<Marked, CacheError> {
    let name = &wish.volume;
    let fail = |e: MarkerIoError| volume_error(name, e.to_string());
    let Some(mut place) = place(wish, store).map_err(fail)? else { return Ok(None) };
    let found = place.read().map_err(fail)?;
    let (read, marker) = match found {
        Found::There(marker) => {
            let moved = is_moved(store, &*place, &marker, wish.moved);
            (marker::Read::There(mark_of(&marker, moved)), Some(*marker))
        }
        Found::Absent { was } => (marker::Read::Absent { was }, None),
        Found::Damaged => (marker::Read::Damaged, None),
    };
    let cache = cache_of((sb.uuid, sb.epoch), Some(&record), known, Fault::default());
    match (marker::judge(read, &cache, Fault::default()), marker) {
        (Verdict::GoOn | Verdict::TakeUp { .. } | Verdict::Drain, Some(marker)) => {
            Ok(Some((place, marker)))
        }
        (Verdict::Refuse(why), marker) => {
            Err(refused(name, Refused::Marker(why), &place.describe(), marker.as_ref(), &sb.volumes))
        }
        _ => Err(volume_error(
            name,
            "its store has been recovered, and nothing that this cache holds of it counts: discard all of it"
                .to_owned(),
        )),
    }
}

/// A store that is named for what is given up is the volume's: it has a marker of that volume, made beside it.
fn is_its(
    wish: &DiscardWish,
    store: &dyn Backing,
    sb: &BlockSuperblock,
    record: &WrittenBack,
) -> Result<(), DiscardError> {
    let of = |e: MarkerIoError| DiscardError::Recover(e.into());
    let Some(mut place) = place(wish, store).map_err(of)? else { return Ok(()) };
    let marker = match place.read().map_err(of)? {
        Found::There(marker) => marker,
        Found::Absent { was: false } if !wish.moved => {
            let reason = format!(
                "its cache was written beside a marker, and {} has none: this is another store, or its marker was removed. Name the volume's store or the \
                 marker's place; or do without the store, which then stays as it is",
                store.place()
            );
            return Err(volume_error(&wish.volume, reason).into());
        }
        _ => return Ok(()),
    };
    if marker.state != MarkerState::Clean && marker.cache != sb.uuid {
        return Ok(());
    }
    of_volume(wish, &*place, &marker, (sb, record))?;
    if is_moved(store, &*place, &marker, wish.moved) {
        let why = Refused::Marker(Why::OtherStore);
        let found = Some(&*marker);
        return Err(refused(&wish.volume, why, &place.describe(), found, &sb.volumes).into());
    }
    Ok(())
}

/// The marker of a volume of which nothing stays is clean, unless another cache has the volume. Returns whether no copy of this one counts.
fn clean(
    wish: &DiscardWish,
    store: &dyn Backing,
    sb: &BlockSuperblock,
) -> Result<bool, DiscardError> {
    let of = |e: MarkerIoError| DiscardError::Recover(e.into());
    {
        let Some(mut place) = place(wish, store).map_err(of)? else { return Ok(false) };
        match place.read().map_err(of)? {
            Found::There(marker)
                if marker.state != MarkerState::Clean && marker.cache != sb.uuid =>
            {
                return Ok(true);
            }
            Found::Absent { was: false } => return Ok(false),
            _ => {}
        }
    }
    let marker = match &wish.marker {
        MarkerAt::At(place) => Some(place.clone()),
        _ => None,
    };
    let wish = RecoverWish {
        marker,
        journal: wish.journal.clone(),
        accept_torn: wish.accept_torn,
        moved: wish.moved,
        ..RecoverWish::default()
    };
    recover(store, &wish)?;
    Ok(true)
}

/// A marker that is to become clean is that of the volume which is given up, and of no other.
fn of_volume(
    wish: &DiscardWish,
    place: &dyn MarkerPlace,
    marker: &Marker,
    (sb, record): (&BlockSuperblock, &WrittenBack),
) -> Result<(), CacheError> {
    let of = mark_of(marker, false).of;
    match of {
        Some((volume, _)) if volume != record.volume => {
            let why = Refused::Marker(Why::OtherVolume(volume));
            Err(refused(&wish.volume, why, &place.describe(), Some(marker), &sb.volumes))
        }
        _ => Ok(()),
    }
}
