//! The durable map at a start: read, and the run begun on the device; or the device fails, and volumes are served without it.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use larder_base::{HashKey, KeyHasher};
use larder_engine::block::map::{Map, Slot};
use larder_engine::block::node::quiet::QUIET;
use larder_engine::block::{IoFailed, LineId, MapLog, Regions, SlotId, Sum};
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::COPY_BYTES;
use larder_runtime::{Device, FlashDevice, plain};

use super::log::CacheIo;
use super::open::{CacheConfig, CacheError, VolumePlan};
use super::region::{MAPS, Region};
use super::tables;

/// Is there as long as what is on the device of that UUID must not be used.
fn marker(dir: &Path, uuid: &str) -> PathBuf {
    dir.join(format!("given-up-{uuid}"))
}

/// Is there as long as the cache at `path`, whichever that is, must not be used.
fn passed_by(dir: &Path, path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let hash = KeyHasher::new(HashKey([0; 16])).hash(path.as_os_str().as_bytes());
    dir.join(format!("passed-by-{:016x}", hash.0))
}

/// Writes a note durably.
fn note(dir: &Path, note: &Path, text: &str) -> std::io::Result<()> {
    std::fs::create_dir_all(dir)?;
    std::fs::write(note, text)?;
    std::fs::File::open(note)?.sync_all()?;
    std::fs::File::open(dir)?.sync_all()
}

/// Notes durably that the next start must not use what is on the device.
pub(super) fn note_given_up(dir: &Path, sb: &BlockSuperblock) -> std::io::Result<()> {
    note(dir, &marker(dir, &sb.uuid.to_string()), "the cache was given up\n")
}

/// Forgets that, once the device has an empty map.
pub(super) fn forget_given_up(dir: &Path, uuid: &str) {
    Voided(vec![marker(dir, uuid)]).forget();
}

/// Notes durably that volumes are served without the cache that should be at `path`: it must not be used, when it comes back,
/// nor must any other that was served with this state directory. `uuid` is what is known of it.
pub(super) fn note_passed_by(dir: &Path, path: &Path, uuid: Option<&str>) -> std::io::Result<()> {
    let mut known: Vec<String> = uuid.map(str::to_owned).into_iter().collect();
    for entry in std::fs::read_dir(dir.join(MAPS)).into_iter().flatten() {
        known.extend(entry?.file_name().into_string().ok());
    }
    for uuid in known {
        note(dir, &marker(dir, &uuid), "volumes were served without the cache\n")?;
    }
    note(dir, &passed_by(dir, path), &format!("{}\n", path.display()))
}

/// Notes that say that what is on a device must not be used.
pub(super) struct Voided(Vec<PathBuf>);

impl Voided {
    /// Those on the device with this superblock, at `path`.
    pub(super) fn find(dir: &Path, sb: &BlockSuperblock, path: &Path) -> Voided {
        let mut notes = vec![marker(dir, &sb.uuid.to_string()), passed_by(dir, path)];
        notes.retain(|note| note.exists());
        Voided(notes)
    }

    pub(super) fn is_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// In words.
    pub(super) fn why(&self) -> Option<&'static str> {
        self.is_any().then_some("the cache was given up, or volumes were served without it")
    }

    /// The device has an empty map now.
    pub(super) fn forget(&self) {
        for note in &self.0 {
            if let Err(error) = std::fs::remove_file(note)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!(%error, "'{}' stays: the next start will be cold too", note.display());
            }
        }
    }
}

/// The durable map as a start has found it.
pub(super) struct Restored {
    pub log: MapLog,
    /// Records of the log.
    pub records: u64,
    /// Whether the log was as long as it is known to have been: if not, no line of it is used.
    pub whole: bool,
}

/// Why there is none.
pub(super) enum NotRestored {
    /// The device fails.
    Io(String),
    /// It could be had, and is not wanted so.
    Refused(CacheError),
}

impl From<CacheError> for NotRestored {
    fn from(error: CacheError) -> NotRestored {
        NotRestored::Refused(error)
    }
}

/// Reads the durable map into `maps`, unless it is there from `shared` memory, without lines that must not be used, and begins
/// the run on the device. With `empty`: only if nothing is in it.
pub(super) fn restore(
    sb: BlockSuperblock,
    shared: bool,
    plan: &VolumePlan,
    io: &mut CacheIo<'_>,
    maps: &mut [Map],
    region: &Region,
    empty: bool,
) -> Result<Restored, NotRestored> {
    let layout = sb.layout;
    let per = u64::from(layout.shard_slots());
    let recovered = MapLog::recover(sb, shared, QUIET, io, |slot, held| {
        let held = held.map(|(line, sum)| (LineId(line), Sum(sum)));
        maps[(slot / per) as usize].restore(SlotId((slot % per) as u32), held);
    })
    .map_err(|IoFailed| NotRestored::Io("its map cannot be read".to_owned()))?;
    let mut log = recovered.log;
    let whole = log.is_whole();
    if !whole {
        tracing::error!(
            "'{}': pages of the map's log are damaged{}. If that happens again, replace the device",
            io.device.name(),
            if shared {
                "; the map in memory is whole, and is written anew"
            } else {
                ": the cache is cold"
            }
        );
    }
    let regions = Regions { groups: layout.region_groups, count: layout.regions };
    for range in recovered.damaged {
        for slot in range {
            let (map, slot) = (&mut maps[(slot / per) as usize], SlotId((slot % per) as u32));
            if map.get(slot) == Slot::Free {
                map.hold(slot);
            }
        }
    }
    let (mut dropped, mut foreign) = (0u64, 0u64);
    if layout.is_sparse() {
        let keeps = |line| plan.keeps(line, &layout);
        (dropped, foreign) = if shared {
            tables::keep_pages(maps, log.superblock(), io, &keeps)
        } else {
            let used = |line| keeps(line) && !log.is_set(regions.of(line));
            tables::find_pages(maps, log.superblock(), io, &used).map(|dropped| (dropped, 0))
        }
        .map_err(|IoFailed| NotRestored::Io("its map cannot be read or written".to_owned()))?;
    }
    // (What is in a table was looked at.)
    for map in maps.iter_mut().filter(|_| !layout.is_sparse()) {
        for slot in (0..map.len()).map(SlotId) {
            let proved = |line| shared || (whole && !log.is_set(regions.of(line)));
            if let Slot::Line(line) = map.get(slot)
                && !(proved(line) && plan.keeps(line, &layout))
            {
                map.hold(slot);
                dropped += 1;
                foreign += u64::from(!plan.keeps(line, &layout));
            }
        }
    }
    if dropped > 0 {
        tracing::info!(
            "{dropped} lines are dropped: nothing proves that they are as the volumes are"
        );
    }
    let is_empty = recovered.records == 0
        && !log.superblock().snapshot
        && log.regions_set() == 0
        && maps.iter().all(|m| match m.sparse() {
            Some(table) => table.is_new(),
            None => (0..m.len()).all(|s| m.get(SlotId(s)) == Slot::Free),
        });
    if empty && !is_empty {
        return Err(CacheError::NotEmpty { path: io.device.name().to_string() }.into());
    }
    // By chance how far on, and never back: two lines of runs that began with copies of one device do not come to the same
    // number, so the memory of one is not taken for the other's.
    let epoch = next_epoch(log.superblock().epoch)?;
    region.announce(epoch);
    // Lines of volumes that are not as they were must not come back after a power cut either, nor what a damaged log says.
    let outcome = if foreign == 0 && whole {
        log.update(io, |sb| sb.epoch = epoch)
    } else {
        log.begin_anew(io, |sb| sb.epoch = epoch)
    };
    outcome.map_err(|e| NotRestored::Io(e.to_string()))?;
    region.own(log.superblock());
    Ok(Restored { log, records: recovered.records, whole })
}

/// By chance how far on, and never back.
pub(super) fn next_epoch(last: u64) -> Result<u64, CacheError> {
    let random = larder_runtime::machine::random()
        .map_err(|e| CacheError::System { what: "a random number", reason: e.to_string() })?;
    Ok(last + 1 + (random >> 32))
}

/// The device fails before anything was used of it: volumes are served without. No later start may use what is on it, since they
/// change meanwhile.
///
/// # Errors
/// When that cannot be noted: then nobody may write to the volumes past the cache.
pub(super) fn begin_without(
    config: &CacheConfig,
    sb: &BlockSuperblock,
    device: &FlashDevice,
    region: &Region,
    why: &str,
) -> Result<(), CacheError> {
    let fail = |reason: String| CacheError::System { what: "the cache device", reason };
    if config.record.is_some() {
        return Err(fail(format!("{why}, and nothing could be recorded without it: replace it")));
    }
    note_given_up(&config.state_dir, sb).map_err(|e| {
        fail(format!(
            "{why}, and it cannot be noted in '{}' that what is on it must not be used again: {}; replace the device, or name a \
             --state-dir that can be written to",
            config.state_dir.display(),
            plain(&e),
        ))
    })?;
    region.disown();
    // For a start with another state directory, if the device takes it.
    let mut next = sb.clone();
    next.volumes.clear();
    next.sequence += 1;
    let at = (next.copy() * COPY_BYTES) as u64;
    let barred = device.write_at(at, &next.encode()).and_then(|()| device.sync());
    if let Err(error) = barred {
        tracing::debug!(%error, "the superblock stays");
    }
    tracing::error!(
        "the cache '{}' is not used: {why}. Volumes go on without it (pass-through); replace the cache device, format it and start \
         again, or start again when it can be read: it is cold then",
        device.name()
    );
    Ok(())
}
