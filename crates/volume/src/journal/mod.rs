//! The places that a journal may lie in. What is in it is [`larder_format::block::journal`]; what follows from it is decided elsewhere: here are
//! its bytes and their I/O.
//!
//! | place | layout | a second holder |
//! | --- | --- | --- |
//! | file, block device | a *region*: a head of 8 KiB, and two parts that epochs go to in turn | refused by a lock |
//! | NBD export | the same | not noticed |
//! | object store | below `wb/`: the object `head`, and one for each epoch, made by a conditional PUT | its PUTs are refused |
//!
//! The head is a [`Marker`] that says whose journal it is, as in the format. What is there and is no journal is never overwritten.
//!
//! An epoch's object is named by generation and epoch, not by the epoch alone: a DELETE has no condition, and one that a paused daemon sends
//! late must not meet an epoch of the next generation.

#[cfg(feature = "object")]
mod object;
mod region;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::{Path, PathBuf};

use larder_base::ByteSize;
use larder_format::Uuid;
use larder_format::block::marker::Marker;

use crate::marker::Image;
use crate::peer::is_here;
use crate::{Backing, Peer, Timeouts, Uri};

/// Behind the name of an image: its journal, unless another place is named.
const SUFFIX: &str = ".larder.journal";

/// Why a journal cannot be had, read or written. Each names the place or the store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// The store has no place for one.
    #[error(
        "backing store '{store}' has no place for a journal: {why}; name a place for its journal (a file, a block device, or an export of its own), or choose ordered"
    )]
    NoPlace {
        /// The store's name.
        store: String,
        /// Why.
        why: String,
    },
    /// What was named cannot be a place.
    #[error("'{option}' cannot be a journal's place: {reason}")]
    Option {
        /// As given.
        option: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// There is not room enough.
    #[error(
        "{place} has {}, and a journal needs {}: make it larger, or name another place",
        ByteSize(*bytes),
        ByteSize(*needed)
    )]
    Small {
        /// The place.
        place: String,
        /// Its bytes.
        bytes: u64,
        /// What it should have.
        needed: u64,
    },
    /// It is another volume's.
    #[error(
        "{place} is the journal of another volume ({volume}, last used on host '{host}'): it is left as it is; name another place, or remove it if \
         that volume is no more"
    )]
    Foreign {
        /// The place.
        place: String,
        /// The volume that it names.
        volume: Uuid,
        /// The host that it names.
        host: String,
    },
    /// Something is there that is no journal.
    #[error(
        "{place} {reason}: it is left as it is; name another place, or write zeros over its first 8 KiB if nobody needs it"
    )]
    NotAJournal {
        /// The place.
        place: String,
        /// What is there.
        reason: String,
    },
    /// It is not there, and was not to be made.
    #[error("{place} is not there")]
    Absent {
        /// The place.
        place: String,
    },
    /// It cannot be opened or reached.
    #[error("{place}: {reason}")]
    Open {
        /// The place.
        place: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Input or output failed.
    #[error("{place}: {reason}")]
    Failed {
        /// The place.
        place: String,
        /// What failed.
        reason: String,
    },
}

impl JournalError {
    /// What was asked for cannot be meant; all else may be well another time.
    pub fn is_usage(&self) -> bool {
        use JournalError as E;
        matches!(self, E::NoPlace { .. } | E::Option { .. } | E::Small { .. })
    }

    /// It may go another time without anything being changed here.
    pub fn may_pass(&self) -> bool {
        matches!(self, JournalError::Open { .. } | JournalError::Failed { .. })
    }
}

/// What the head of a journal is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Head {
    /// There is none: nobody has used the place yet.
    None,
    /// It says whose journal it is.
    Of(Box<Marker>),
    /// Neither copy is whole.
    Damaged,
}

/// The name of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EpochName {
    /// Generation of the volume (G).
    pub generation: u64,
    /// Number of the epoch.
    pub epoch: u64,
}

/// A part of a journal that may hold an epoch: of those that [`JournalPlace::parts`] has found last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part(pub usize);

/// A place for a journal. Calls wait for their I/O: it is used from a thread of its own.
pub trait JournalPlace: Send {
    /// What the head is, once what was written before is durable: what only a server's memory has could vanish later.
    ///
    /// # Errors
    /// [`JournalError`].
    fn head(&mut self) -> Result<Head, JournalError>;

    /// What the head is now, durable or not, while the place is used: [`JournalError::Absent`] where what is open is not what its name leads
    /// to any more.
    ///
    /// # Errors
    /// [`JournalError`].
    fn look(&mut self) -> Result<Head, JournalError>;

    /// Replaces the head, durably. Where there was none the parts are made empty first.
    ///
    /// # Errors
    /// [`JournalError`]. What is there then may be the one before, the new one, or damaged; another try goes over each of them.
    fn set_head(&mut self, head: &Marker) -> Result<(), JournalError>;

    /// Where there is no head yet, has these bytes in its place, or with `None` what was there, durably. The place of a journal may be that of the
    /// store by another name: whoever looks at the store then knows. Returns whether it was done; where a name leads to one place alone it is not.
    ///
    /// # Errors
    /// [`JournalError`].
    fn probe(&mut self, bytes: Option<&[u8]>) -> Result<bool, JournalError> {
        let _ = bytes;
        Ok(false)
    }

    /// Most bytes of an epoch, with all that belongs to it.
    fn most(&self) -> u64;

    /// Writes an epoch, its commit last. `body` is what lies from the descriptors on. The epoch before stays whole until this has ended well.
    /// It is durable once [`JournalPlace::flush`] has ended well too.
    ///
    /// # Errors
    /// [`JournalError`]: it may be there or not.
    fn write(&mut self, name: EpochName, commit: &[u8], body: &[u8]) -> Result<(), JournalError>;

    /// What was written is durable. Fails also if any of it may have been lost meanwhile.
    ///
    /// # Errors
    /// [`JournalError`]: what was written since the last flush may be gone.
    fn flush(&mut self) -> Result<(), JournalError>;

    /// The parts that may hold an epoch.
    ///
    /// # Errors
    /// [`JournalError`].
    fn parts(&mut self) -> Result<Vec<Part>, JournalError>;

    /// Reads bytes of a part, where it has so many: `at` counts from where an epoch's journal begins in the format.
    ///
    /// # Errors
    /// [`JournalError`]. `Ok(None)`: it is shorter.
    fn read(&mut self, part: Part, at: u64, len: usize) -> Result<Option<Vec<u8>>, JournalError>;

    /// These bytes of a part, each range from a whole page on, are durable, whatever became of a flush before: where they may be in a cache alone, whose
    /// flush has failed, they are written once more.
    ///
    /// # Errors
    /// [`JournalError`].
    fn renew(&mut self, part: Part, ranges: &[Range<u64>]) -> Result<(), JournalError>;

    /// So many of the last epochs are always there, once there were so many.
    fn keeps(&self) -> usize {
        1
    }

    /// An epoch before those that it [keeps](JournalPlace::keeps) may be there still, since it could not be taken away.
    fn has_older(&self) -> bool {
        false
    }

    /// A call that nobody waits for any more is under way: what it writes may come yet.
    fn is_away(&mut self) -> bool {
        false
    }

    /// No part holds an epoch any more. The head stays.
    ///
    /// # Errors
    /// [`JournalError`].
    fn empty(&mut self) -> Result<(), JournalError>;

    /// It is used from another thread from now on.
    fn rest(&mut self);

    /// Where it is, for people.
    fn describe(&self) -> String;
}

/// What a place is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// To be written: it is made where that can be done.
    Make,
    /// What is there is to be applied.
    Apply,
    /// To be looked at alone: nothing is locked or changed.
    Look,
}

/// How a place is opened.
#[derive(Clone, Debug)]
pub struct PlaceOptions {
    /// What was said: a path, or a URI of [`Uri`]. `None`: beside the store.
    pub at: Option<String>,
    /// What for.
    pub for_use: Use,
    /// With places that are reached over a network. Where requests would wait for ever they wait for as long as by default.
    pub timeout: Timeouts,
}

/// What is known of a store by which its journal's place is found: that may hang, and another thread finds it then, without the store.
#[derive(Clone, Debug)]
pub struct StoreNames {
    uri: String,
    image: Option<Image>,
    peer: Option<Peer>,
}

impl StoreNames {
    /// Those of this store.
    pub fn of(store: &dyn Backing) -> StoreNames {
        StoreNames { uri: store.uri().to_owned(), image: store.image(), peer: store.peer() }
    }

    /// As it was named.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// The file or block device that it is, if it is one.
    pub fn image(&self) -> Option<&Image> {
        self.image.as_ref()
    }

    /// Whether a place is the store itself.
    fn are_at(&self, uri: &Uri) -> Result<bool, String> {
        if let Some(peer) = &self.peer {
            let other = Peer::of(uri)?;
            return Ok(other.is_some_and(|other| peer.likeness(&other) == crate::Likeness::Same));
        }
        if let (Some(image), Uri::File { path }) = (&self.image, uri) {
            return Ok(image.is_at(path));
        }
        Ok(self.uri.parse::<Uri>().is_ok_and(|own| own == *uri))
    }
}

/// Where a journal lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Its place.
    pub uri: Uri,
    /// It is where the store is, so that it is lost or reached with it.
    pub beside: bool,
}

impl Site {
    /// The journal of a store: where `at` says, or beside it.
    ///
    /// # Errors
    /// [`JournalError::NoPlace`] where the store has none and none was named; `Option` if what was named cannot be one.
    pub fn of(store: &dyn Backing, at: Option<&str>) -> Result<Site, JournalError> {
        Site::of_names(&StoreNames::of(store), at)
    }

    /// The same, without the store.
    ///
    /// # Errors
    /// As [`Site::of`].
    pub fn of_names(store: &StoreNames, at: Option<&str>) -> Result<Site, JournalError> {
        let none = |why: &str| JournalError::NoPlace { store: store.uri.clone(), why: why.into() };
        let Some(option) = at else {
            let uri = match store.uri.parse::<Uri>() {
                Ok(Uri::File { .. }) => match &store.image {
                    Some(image) if !image.is_device() => Uri::File { path: beside(image.path()) },
                    _ => return Err(none("it is a block device")),
                },
                Ok(Uri::NbdUnix { .. } | Uri::NbdTcp { .. }) => {
                    return Err(none("an NBD export has none beside it"));
                }
                Ok(uri @ Uri::S3 { .. }) => uri,
                Err(_) => return Err(none("it is of no kind that is known")),
            };
            return Ok(Site { uri, beside: true });
        };
        let bad = |reason: String| JournalError::Option { option: option.to_owned(), reason };
        let uri = crate::uri::path_or_uri(option).map_err(bad)?;
        #[cfg(any(test, feature = "testing"))]
        if let Uri::File { path } = &uri {
            crate::testing::answers(path);
        }
        let beside =
            store.uri.parse::<Uri>().is_ok_and(|own| own == uri) && matches!(uri, Uri::S3 { .. });
        if !beside && store.are_at(&uri).map_err(bad)? {
            return Err(bad("is the volume's own store: name another place".into()));
        }
        Ok(Site { uri, beside })
    }

    /// The file that it is, if it is one.
    pub fn path(&self) -> Option<&Path> {
        match &self.uri {
            Uri::File { path } => Some(path),
            _ => None,
        }
    }

    /// Whether it is where the store's marker is, or would be: `marker` is as it was said, `None` where that is beside the store.
    pub fn is_markers(&self, store: &StoreNames, marker: Option<&str>) -> bool {
        let marker = match (marker, store.image()) {
            (Some(said), _) => crate::uri::path_or_uri(said).ok(),
            (None, Some(image)) if !image.is_device() => {
                // Wherever links lead to it from.
                let path = image.path().canonicalize().unwrap_or_else(|_| image.path().to_owned());
                let path = crate::marker::beside(&path);
                Some(Uri::File { path })
            }
            (None, _) => None,
        };
        match (&self.uri, marker) {
            (Uri::File { path }, Some(Uri::File { path: marker })) => is_one_place(path, &marker),
            (Uri::S3 { .. }, _) | (_, None) => false,
            (own, Some(marker)) => {
                let peers = Peer::of(own).ok().flatten().zip(Peer::of(&marker).ok().flatten());
                *own == marker
                    || peers.is_some_and(|(a, b)| a.likeness(&b) == crate::Likeness::Same)
            }
        }
    }

    /// What it is called before it is open, for people.
    pub fn describe(&self) -> String {
        match &self.uri {
            Uri::File { path } => format!("journal '{}'", path.display()),
            uri => format!("journal '{uri}'"),
        }
    }

    /// It goes with this host, and the store does not, as far as that can be told.
    ///
    /// # Errors
    /// When an address cannot be looked up.
    pub fn is_lost_with_this_host(&self, store: &StoreNames) -> Result<bool, JournalError> {
        if self.beside {
            return Ok(false);
        }
        let here = |uri: &Uri| {
            is_here(uri).map_err(|reason| JournalError::Option { option: uri.to_string(), reason })
        };
        let store = store.uri.parse::<Uri>();
        Ok(here(&self.uri)? && !store.map_or(Ok(true), |uri| here(&uri))?)
    }

    /// Opens it.
    ///
    /// # Errors
    /// [`JournalError`].
    pub fn open(
        &self,
        for_use: Use,
        timeout: Timeouts,
    ) -> Result<Box<dyn JournalPlace>, JournalError> {
        let timeout =
            Timeouts { give_up: timeout.give_up.or(Timeouts::default().give_up), ..timeout };
        match &self.uri {
            #[cfg(feature = "object")]
            uri @ Uri::S3 { .. } => {
                Ok(Box::new(object::ObjectPlace::connect(uri, for_use, timeout)?))
            }
            uri => Ok(Box::new(region::RegionPlace::open(uri, for_use, timeout)?)),
        }
    }
}

/// A journal in a store that is open, for tests.
///
/// # Errors
/// [`JournalError::Small`].
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub fn region_over(
    backing: Box<dyn Backing>,
    for_use: Use,
) -> Result<Box<dyn JournalPlace>, JournalError> {
    Ok(Box::new(region::RegionPlace::over(backing, for_use, Timeouts::default())?))
}

/// Whether both names lead to one file, which need not be there yet.
fn is_one_place(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
    if let (Ok(a), Ok(b)) = (a.metadata(), b.metadata()) {
        let device = a.file_type().is_block_device() && b.file_type().is_block_device();
        return (a.dev(), a.ino()) == (b.dev(), b.ino()) || device && a.rdev() == b.rdev();
    }
    whole(a).zip(whole(b)).is_some_and(|(a, b)| a == b)
}

/// A path without links; of a file that is yet to be made, as it would be made.
fn whole(path: &Path) -> Option<PathBuf> {
    if let Ok(whole) = path.canonicalize() {
        return Some(whole);
    }
    // (A link that leads nowhere yet leads to where the file would be made.)
    let leads = path.read_link().map(|leads| path.parent().unwrap_or(path).join(leads));
    let path = leads.as_deref().unwrap_or(path);
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Some(dir.canonicalize().ok()?.join(path.file_name()?))
}

/// The journal beside an image.
pub fn beside(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(SUFFIX);
    PathBuf::from(name)
}
