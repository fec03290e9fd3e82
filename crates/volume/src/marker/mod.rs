//! The place of a marker beside each kind of store.
//!
//! A marker ([`larder_format::block::marker`]) says whether a write-back cache may hold data that the store lacks, and which
//! cache. What follows from it is decided elsewhere: here are its bytes and their I/O.
//!
//! | store | place | a second holder |
//! | --- | --- | --- |
//! | file | `NAME.larder` beside it; an attribute of the image says that there is one, and where | refused by a lock |
//! | block device | a file: `--marker PATH` | refused by a lock |
//! | NBD | a file, or the first 8 KiB of another export: `--marker PATH` or URI | noticed when the marker is read again, before each write |
//! | object store | object `marker` beside the manifest | refused by a conditional PUT, where the store has that |
//!
//! The object store's marker is an object of its own, not a field of the manifest: attachments, growth and reading-only
//! attachments go by the manifest's ETag, which each marker would change under them. A second object, `marked`, says that there
//! was a marker, as the attribute does for a file.
//!
//! | module | what it is |
//! | --- | --- |
//! | `place` | which state may be overwritten by which, for all places: [`MarkerPlace`] over a `Medium` |
//! | `file`, `nbd`, `object` | the media |
//! | [`memory`] | one in memory, with faults, for tests |
//! | `region` | a marker in bytes that are there before it is |
//! | `image` | what a file store says of its image |
//!
//! **Two copies.** A write puts the marker into one copy, makes it durable, and then does the same with the other. It begins with the
//! copy that does not rule, so that a torn write leaves the marker before. A copy that was found damaged is thus mended by the
//! next write. An object is written whole, and has one copy.
//!
//! **Never over what is not known.** A write is refused unless the place holds what was last read from it, or what was last
//! tried to be written. What is there and is no marker is never overwritten.

#[cfg(test)]
mod choice_tests;
mod cut;
mod file;
#[cfg(test)]
mod file_tests;
mod image;
#[cfg(any(test, feature = "testing"))]
pub mod memory;
#[cfg(feature = "nbd")]
mod nbd;
#[cfg(all(test, feature = "nbd"))]
mod nbd_tests;
#[cfg(feature = "object")]
mod object;
#[cfg(all(test, feature = "object"))]
mod object_tests;
mod place;
#[cfg(test)]
mod place_tests;
pub(crate) mod region;

use std::path::{Path, PathBuf};

use larder_format::block::marker::{Marker, MarkerError};

use crate::{Backing, Timeouts, Uri};
pub use image::{Attribute, Image};
use place::Place;

/// What reading a marker came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It is there.
    There(Box<Marker>),
    /// There is none.
    Absent {
        /// The store says that there was one.
        was: bool,
    },
    /// Neither copy is whole.
    Damaged,
}

/// Why a marker could not be read or written. Each names the place or the store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MarkerIoError {
    /// The store has no place for one. The front end says by which flags a place is named, or a marker done without.
    #[error(
        "backing store '{store}' has no place for a write-back marker: {why}; name a place for it (a file, or an export of its own), or choose to do without a marker"
    )]
    NoPlace {
        /// The store's name.
        store: String,
        /// Why.
        why: String,
    },
    /// What was named cannot be a place. The front end says by which flag.
    #[error("'{option}' cannot be a write-back marker's place: {reason}")]
    Option {
        /// As given.
        option: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Somebody else has it.
    #[error("{place} is held{by}: stop that one first")]
    Held {
        /// The place.
        place: String,
        /// ` by process 7 (larder)`, or nothing if it is not known.
        by: String,
    },
    /// Something is there that is no marker. It is left as it is.
    #[error("{place} {reason}: it is left as it is; move it away, or name another place")]
    NotAMarker {
        /// The place.
        place: String,
        /// What is there.
        reason: String,
    },
    /// A marker is there that this program cannot read.
    #[error("{place}: {why}")]
    Unusable {
        /// The place.
        place: String,
        /// Why.
        why: MarkerError,
    },
    /// The place does not hold what was last read from it, or written to it. Nothing was written.
    #[error("{place} was changed by something else: {now}")]
    Changed {
        /// The place.
        place: String,
        /// What it holds now.
        now: String,
    },
    /// A number that is not higher than that of the marker that is there. Nothing was written.
    #[error("{place} has number {there}, and {wanted} was to follow it")]
    Number {
        /// The place.
        place: String,
        /// The number that is there.
        there: u64,
        /// The one that was to be written.
        wanted: u64,
    },
    /// It is to be read before it is written. Nothing was written.
    #[error("{place} was not read, and so is not written")]
    Unread {
        /// The place.
        place: String,
    },
    /// The place was opened to be looked at only.
    #[error("{place} is open to be read only")]
    LookOnly {
        /// The place.
        place: String,
    },
    /// It does not answer, or refuses to: to be tried again.
    #[error("{place} cannot be reached: {reason}")]
    Unreachable {
        /// The place.
        place: String,
        /// What was found.
        reason: String,
    },
    /// Input or output failed, or there is no room. After a write either marker may be there: the next read tells.
    #[error("{place}: {reason}")]
    Failed {
        /// The place.
        place: String,
        /// What failed, and what to do.
        reason: String,
    },
}

impl MarkerIoError {
    /// It may go another time without anything being changed here: the place does not answer, or somebody else has it.
    pub fn may_pass(&self) -> bool {
        use MarkerIoError as E;
        matches!(
            self,
            E::Held { .. } | E::Changed { .. } | E::Unreachable { .. } | E::Failed { .. }
        )
    }
}

/// A place for a marker. Calls wait for their I/O: it is used from a volume's own thread.
pub trait MarkerPlace: Send {
    /// Looks what is there. What is found is what the next write may follow.
    ///
    /// # Errors
    /// [`MarkerIoError`]: also if what is there is no marker.
    fn read(&mut self) -> Result<Found, MarkerIoError>;

    /// Looks what is there now, while it is held: what the next write may follow stays what it was, and nothing is made durable.
    ///
    /// # Errors
    /// As [`MarkerPlace::read`].
    fn look(&mut self) -> Result<Found, MarkerIoError>;

    /// Writes a marker, durable when this returns; its number is higher than that of the one that is there. If it fails, the one
    /// before or this one is there, never neither; the next one tried has a higher number again.
    ///
    /// # Errors
    /// [`MarkerIoError`]: nothing was written if it is `Changed`, `Number`, `Unread` or `LookOnly`.
    fn write(&mut self, marker: &Marker) -> Result<(), MarkerIoError>;

    /// Removes the marker, and what says that there was one. What lies behind it in a file (a journal) goes too.
    ///
    /// # Errors
    /// As [`MarkerPlace::write`].
    fn remove(&mut self) -> Result<(), MarkerIoError>;

    /// A second holder cannot write: it is locked out, or its write is refused by the store itself. Of an object store that is known once
    /// the place was read; an NBD export never says so.
    fn is_fenced(&self) -> bool;

    /// Where it is, for people.
    fn describe(&self) -> String;

    /// Where the store itself says that its marker is, and whether that is here. `None` where it says nothing.
    fn named_by_store(&self) -> Option<NamedPlace> {
        None
    }
}

/// Where a store says that its marker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPlace {
    /// The path.
    pub path: PathBuf,
    /// It is the place that was opened.
    pub is_this: bool,
}

/// How a place is opened.
#[derive(Clone, Debug, Default)]
pub struct PlaceOptions {
    /// What `--marker` says: a path, or a URI of [`Uri`].
    pub at: Option<String>,
    /// It is read only: nothing is locked, made or written.
    pub look: bool,
    /// With places that are reached over a network. Where requests would wait for ever they wait for as long as by default.
    pub timeout: Timeouts,
}

/// The marker beside an image, whose path has no links.
pub fn beside(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(file::SUFFIX);
    PathBuf::from(name)
}

/// The place of a store's marker. Nothing is read yet, and no server is asked: [`MarkerPlace::read`] says how it went. A file's directory is
/// opened, which may hang with its file system: [`Unopened`] can be opened by another thread.
///
/// # Errors
/// [`MarkerIoError::NoPlace`] where the store has none and none was named; `Option` if what was named cannot be one.
pub fn marker_place(
    store: &dyn Backing,
    options: &PlaceOptions,
) -> Result<Box<dyn MarkerPlace>, MarkerIoError> {
    Unopened::of(store, options).open()
}

/// The place of a store's marker, before anything of it is asked: it needs its store no more.
#[derive(Debug)]
pub struct Unopened {
    store: String,
    image: Option<Image>,
    peer: Option<crate::Peer>,
    options: PlaceOptions,
}

impl Unopened {
    /// That of this store.
    pub fn of(store: &dyn Backing, options: &PlaceOptions) -> Unopened {
        Unopened {
            store: store.uri().to_owned(),
            image: store.image(),
            peer: store.peer(),
            options: options.clone(),
        }
    }

    /// Where it is, for people, as far as that is known before it is opened.
    pub fn describe(&self) -> String {
        match (&self.options.at, &self.image) {
            (Some(at), _) => format!("marker '{at}'"),
            (None, Some(image)) if !image.is_device() => {
                format!("marker '{}{}'", image.path().display(), file::SUFFIX)
            }
            (None, _) => format!("the marker of '{}'", self.store),
        }
    }

    /// Opens it.
    ///
    /// # Errors
    /// As [`marker_place`].
    pub fn open(self) -> Result<Box<dyn MarkerPlace>, MarkerIoError> {
        let Unopened { store, image, peer, options } = self;
        if let Some(option) = &options.at {
            return named(image, peer, option, &options);
        }
        let none = |why: &str| MarkerIoError::NoPlace { store: store.clone(), why: why.into() };
        match store.parse::<Uri>() {
            Ok(Uri::File { .. }) => match image {
                Some(image) if !image.is_device() => {
                    let says = image.names_marker();
                    match (file::FileMedium::beside(&store, image.clone(), options.look), says) {
                        // By this name (mounted as a single file, a name that is too long) it has no place, and by another it had one.
                        (Err(MarkerIoError::NoPlace { .. }), Some(path)) => {
                            named(Some(image), peer, &format!("file:{}", path.display()), &options)
                        }
                        (medium, _) => Ok(Box::new(Place::new(medium?))),
                    }
                }
                _ => Err(none("it is a block device")),
            },
            Ok(Uri::NbdUnix { .. } | Uri::NbdTcp { .. }) => {
                Err(none("an NBD export has none beside it"))
            }
            #[cfg(feature = "object")]
            Ok(uri @ Uri::S3 { .. }) => match object::ObjectMedium::connect(&uri, &options) {
                Ok(medium) => Ok(Box::new(Place::new(medium))),
                Err(why) => Err(none(&why)),
            },
            #[cfg(not(feature = "object"))]
            Ok(Uri::S3 { .. }) => Err(none("this program was built without object stores")),
            Err(_) => Err(none("it is of no kind that is known")),
        }
    }
}

fn named(
    image: Option<Image>,
    peer: Option<crate::Peer>,
    option: &str,
    options: &PlaceOptions,
) -> Result<Box<dyn MarkerPlace>, MarkerIoError> {
    let bad = |reason: String| MarkerIoError::Option { option: option.to_owned(), reason };
    let uri = crate::uri::path_or_uri(option).map_err(bad)?;
    match uri {
        Uri::File { path } => {
            let medium = file::FileMedium::at(&path, image, options.look).map_err(bad)?;
            Ok(Box::new(Place::new(medium)))
        }
        #[cfg(feature = "nbd")]
        Uri::NbdUnix { .. } | Uri::NbdTcp { .. } => {
            Ok(Box::new(Place::new(nbd::NbdMedium::new(uri, peer, options))))
        }
        #[cfg(feature = "object")]
        Uri::S3 { .. } => {
            let medium = object::ObjectMedium::connect(&uri, options).map_err(bad)?;
            Ok(Box::new(Place::new(medium)))
        }
        #[cfg(not(all(feature = "nbd", feature = "object")))]
        _ => {
            let _ = peer;
            Err(bad("this program was built without stores of its kind".into()))
        }
    }
}

/// Who waits for a marker does not wait for ever.
#[cfg(any(feature = "nbd", feature = "object"))]
fn bounded(timeout: Timeouts) -> Timeouts {
    Timeouts { give_up: timeout.give_up.or(Timeouts::default().give_up), ..timeout }
}
