//! Memory of the map that outlives the process.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;

use larder_base::Words;
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Making, Map, Shape};
use larder_engine::block::node::start::memory::{HEADER_WORDS, Memory, clear};
use larder_format::block::{BlockSuperblock, Layout};
use larder_runtime::maps::{self, Owner, OwnerKind};
use larder_runtime::{SHARED_DIR, SharedError, SharedRegion};

use super::locked;
use super::open::CacheError;

/// Below the state directory: for each cache, by its UUID, the path that it was served by.
pub(super) const MAPS: &str = "block-maps";

/// Memory of the map that outlives the process.
pub(super) struct Region {
    pub(super) memory: Mutex<Memory>,
    shared: Option<SharedRegion>,
}

/// A region, the entries and checksums of each shard's map, and why it does not outlive the process, if so.
pub(super) type Opened = (Region, Vec<(Words, Words)>, Option<String>);

impl Region {
    fn name(sb: &BlockSuperblock) -> String {
        format!("larder-{}", sb.uuid)
    }

    pub(super) fn forget(sb: &BlockSuperblock) {
        if let Err(error) = SharedRegion::remove(Path::new(SHARED_DIR), &Self::name(sb)) {
            tracing::warn!(%error, "the shared memory of the former cache stays");
        }
    }

    /// Notes in the state directory which cache was served with it: should the cache be missing once, and volumes be served
    /// without it, that is what it is known by. Maps of earlier versions have no owner; these notes say who it is.
    fn note(state_dir: &Path, sb: &BlockSuperblock, path: &Path) {
        let dir = state_dir.join(MAPS);
        let own = sb.uuid.to_string();
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let Ok(uuid) = entry.file_name().into_string() else { continue };
            let former = std::fs::read(entry.path()).unwrap_or_default();
            let former = Path::new(std::ffi::OsStr::from_bytes(&former));
            if uuid == own || !former.is_absolute() {
                continue;
            }
            let owner = Owner::of_old(OwnerKind::Block, state_dir, former);
            maps::adopt(Path::new(SHARED_DIR), &format!("larder-{uuid}"), &owner);
            // A drive may be put in again.
            if !former.starts_with("/dev") && former.symlink_metadata().is_err() {
                // If it stays, it is looked at again.
                let _ = std::fs::remove_file(entry.path());
            }
        }
        let noted = std::path::absolute(path).and_then(|path| {
            std::fs::create_dir_all(&dir)?;
            std::fs::write(dir.join(own), path.as_os_str().as_bytes())
        });
        if let Err(error) = noted {
            tracing::warn!(
                %error,
                "it is not noted in the state directory which cache is served: should volumes be served without it later, only \
                 its path tells that it must not be used again"
            );
        }
    }

    /// The region of the cache at `path`, and the words of each shard's map. Maps whose owner is gone give their memory back.
    pub(super) fn open(
        sb: &BlockSuperblock,
        path: &Path,
        state_dir: &Path,
    ) -> Result<Opened, CacheError> {
        let (entries, sums) = Map::words(Shape::of(&sb.layout));
        let total = HEADER_WORDS + per_shard(entries, sums) * sb.layout.shards as usize;
        let name = Self::name(sb);
        let dir = Path::new(SHARED_DIR);
        let mut opened = SharedRegion::open(dir, &name, total as u64 * 8);
        if matches!(opened, Err(SharedError::SizeDiffers { .. })) {
            opened = SharedRegion::remove(dir, &name)
                .and_then(|()| SharedRegion::open(dir, &name, total as u64 * 8));
        }
        if let Ok(shared) = &opened {
            shared.set_owner(&Owner::new(OwnerKind::Block, state_dir, path));
        }
        Self::note(state_dir, sb, path);
        maps::sweep(dir);
        match opened {
            Ok(shared) => {
                let all = shared.words();
                let maps =
                    (0..sb.layout.shards as usize).map(|i| parts(all, i, entries, sums)).collect();
                let header = Words::from_static(&all[..HEADER_WORDS]);
                let memory = Mutex::new(Memory::new(header, !shared.is_fresh()));
                Ok((Region { memory, shared: Some(shared) }, maps, None))
            }
            Err(e @ SharedError::InUse { .. }) => {
                Err(CacheError::System { what: "shared memory", reason: e.to_string() })
            }
            Err(e) => {
                let maps = (0..sb.layout.shards).map(|_| (Words::heap(entries), Words::heap(sums)));
                Ok((Region::private(), maps.collect(), Some(e.to_string())))
            }
        }
    }

    /// One that nobody finds again: of a cache that is none.
    pub(super) fn private() -> Region {
        let memory = Mutex::new(Memory::new(Words::heap(HEADER_WORDS), false));
        Region { memory, shared: None }
    }

    /// A map of that shard with nothing in it, in the memory that the region has for it. One that has it so far must not be used any more.
    pub(super) fn empty_map(
        &self,
        layout: &Layout,
        placing: Placing,
        making: Making,
        shard: u32,
    ) -> Map {
        let shape = Shape::of(layout);
        let (entries, sums) = Map::words(shape);
        let (mut entries, mut sums) = match &self.shared {
            Some(shared) => parts(shared.words(), shard as usize, entries, sums),
            None => (Words::heap(entries), Words::heap(sums)),
        };
        clear(&mut entries);
        clear(&mut sums);
        Map::new(entries, sums, placing, shard, shape, making)
    }

    /// Makes the words nobody's.
    pub(super) fn disown(&self) {
        locked(&self.memory).disown();
    }

    pub(super) fn own(&self, sb: &BlockSuperblock) {
        locked(&self.memory).own(sb);
    }

    /// After a clean stop all of it is on the device.
    pub(super) fn release(&self) {
        self.disown();
        if let Some(shared) = &self.shared
            && let Err(error) = shared.discard()
        {
            tracing::debug!(%error, "the shared memory of the map stays");
        }
    }
}

fn per_shard(entries: usize, sums: usize) -> usize {
    (entries + sums).next_multiple_of(8)
}

/// The words of a shard's map.
fn parts(
    all: &'static [std::sync::atomic::AtomicU64],
    shard: usize,
    entries: usize,
    sums: usize,
) -> (Words, Words) {
    let at = HEADER_WORDS + shard * per_shard(entries, sums);
    let (e, s) = (&all[at..at + entries], &all[at + entries..at + entries + sums]);
    (Words::from_static(e), Words::from_static(s))
}
