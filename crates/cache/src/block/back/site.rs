//! Where the journal of a volume may lie: places that would be lost with what it is for are refused.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use larder_volume::journal::{JournalError, Site, StoreNames};

use super::MarkerAt;
use super::journal::JournalAt;

/// Why a volume has no journal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoJournal {
    /// The place cannot be had.
    #[error(transparent)]
    Place(#[from] JournalError),
    /// It would be lost with the cache.
    #[error(
        "its journal '{journal}' would be lost with the cache '{cache}', which is {}: name a place for its journal on another device",
        if *itself { "the same" } else { "on the same device" }
    )]
    OnCache {
        /// The journal's place.
        journal: String,
        /// The cache.
        cache: String,
        /// It is the cache's own file or device.
        itself: bool,
    },
    /// The volume has its marker there, or would.
    #[error(
        "its journal '{journal}' is where its marker is, and each would be written over the other: name another place for its journal"
    )]
    Marker {
        /// The journal's place.
        journal: String,
    },
    /// It would be lost with the host, and the store would not.
    #[error(
        "its journal '{journal}' is on this host and backing store '{store}' is not: where the host is lost with its cache, the store is between two \
         epochs for good; name a place for its journal that outlives the host, or say that the journal may be local"
    )]
    Local {
        /// The journal's place.
        journal: String,
        /// The store.
        store: String,
    },
}

impl NoJournal {
    /// What was asked for cannot be meant; all else may be well another time.
    pub fn is_usage(&self) -> bool {
        match self {
            NoJournal::Place(error) => error.is_usage(),
            NoJournal::OnCache { .. } | NoJournal::Marker { .. } | NoJournal::Local { .. } => true,
        }
    }
}

/// Where the journal of `store` is as `at` says, for a volume that is cached at `cache` and has its marker at `marker`.
///
/// # Errors
/// [`NoJournal`].
pub(super) fn site(
    store: &StoreNames,
    (at, marker): (&JournalAt, &MarkerAt),
    cache: &Path,
) -> Result<Site, NoJournal> {
    let site = Site::of_names(store, at.at.as_deref())?;
    let marker = match marker {
        MarkerAt::At(place) => Some(place.as_str()),
        // (Where there is to be none one is looked for all the same.)
        MarkerAt::Beside | MarkerAt::Nowhere => None,
    };
    if !site.beside && site.is_markers(store, marker) {
        let journal = at.at.clone().unwrap_or_else(|| site.uri.to_string());
        return Err(NoJournal::Marker { journal });
    }
    if let Some(path) = site.path() {
        let on = |itself| NoJournal::OnCache {
            journal: path.display().to_string(),
            cache: cache.display().to_string(),
            itself,
        };
        let same = std::fs::canonicalize(path).ok().zip(std::fs::canonicalize(cache).ok());
        if same.is_some_and(|(journal, cache)| journal == cache) {
            return Err(on(true));
        }
        let store = store.image().and_then(|image| disk_of(image.path()));
        let (journal, cache) = (disk_of(path), disk_of(cache));
        // (Where the store is there too, all three are lost together.)
        if journal.is_some() && journal == cache && journal != store {
            return Err(on(false));
        }
    }
    if !at.local && site.is_lost_with_this_host(store)? {
        return Err(NoJournal::Local {
            journal: site.uri.to_string(),
            store: store.uri().to_owned(),
        });
    }
    Ok(site)
}

/// The disk that a file or block device is on, as far as the system says: all partitions of one are that one.
fn disk_of(path: &Path) -> Option<String> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // (A file that is yet to be made is on the disk of its directory.)
    let found = path.metadata().or_else(|_| dir.metadata()).ok()?;
    let number = match found.file_type().is_block_device() {
        true => found.rdev(),
        false => found.dev(),
    };
    let name = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    let Ok(node) = std::fs::canonicalize(Path::new("/sys/dev/block").join(&name)) else {
        return Some(name);
    };
    let disk: PathBuf = match node.join("partition").exists() {
        true => node.parent().map(Path::to_owned).unwrap_or(node),
        false => node,
    };
    Some(disk.display().to_string())
}
