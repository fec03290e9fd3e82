//! The stores behind the cache.
//!
//! | module | what it is |
//! | --- | --- |
//! | `alone` | a session on a thread that waits for it |
//! | [`op`] | what is asked of a store, and how it failed |
//! | [`uri`] | how a store is named |
//! | [`file`] | a file or block device |
//! | `pages` | how two ways to one take turns in a page |
//! | [`nbd`] | an export of an NBD server |
//! | [`object`] | chunks in an S3-compatible object store |
//! | [`journal`] | the places that the journal of a store may lie in |
//! | `ledger` | which writes were answered and are not durable, and how often some may have gone |
//! | [`peer`] | which server is behind an NBD store, whatever it is called |
//! | [`identity`] | by what a store is known again, and what proves that nobody else has changed it |
//! | `syncs` | flushes of a file, and what one that failed takes with it |
//! | `at_path` | whether the path of an open file still leads to it |
//! | [`watch`] | whether somebody else changes a file that is served, and what times prove |
//! | [`emulation`] | what a store cannot do itself, done by what it can |
//! | [`marker`] | where it is kept whether a write-back cache may hold what a store lacks |
//! | [`rate_limited`] | lines in the log about what goes wrong again and again |
//!
//! A [`Backing`] is shared by all workers; each takes a [`Session`] of its own, whose descriptor it watches. A miss is
//! thus read and answered by one thread, without a hand-over to another.

#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "stores stand above the runtime: they read clocks and start threads"
)]

mod alone;
mod at_path;
mod change_markers;
mod device_name;
pub mod emulation;
pub mod file;
pub mod identity;
pub mod journal;
mod ledger;
mod looker;
pub mod marker;
#[cfg(feature = "nbd")]
pub mod nbd;
#[cfg(feature = "object")]
pub mod object;
pub mod op;
mod pages;
pub mod peer;
pub mod rate_limited;
mod syncs;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
pub mod uri;
pub mod watch;

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use larder_runtime::RingChoice;
use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};

use crate::op::{Done, Op};
pub use alone::Alone;
pub use identity::Identity;
pub use looker::{Looker, is_absent};
pub use peer::{Likeness, Peer};
pub use uri::{Uri, path_or_uri};

/// Whether a store is asked to make durable what it has answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flushing {
    /// It is, by a flush.
    #[default]
    Offered,
    /// It cannot be asked, and nothing says that what it has answered is durable. A flush ends well and has done nothing.
    Missing,
    /// It need not be: what it has answered is durable, by its kind or by the operator's word ([`OpenOptions::durable`]).
    Needless,
}

impl Flushing {
    /// In a word: `offered`, `missing`, `needless`.
    pub fn as_str(self) -> &'static str {
        match self {
            Flushing::Offered => "offered",
            Flushing::Missing => "missing",
            Flushing::Needless => "needless",
        }
    }
}

/// What a store can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Bytes.
    pub size: u64,
    /// Nothing may be written.
    pub read_only: bool,
    /// A trim does something.
    pub trim: bool,
    /// Zeroes can be had without writing them, or [`op::FailureKind::Unsupported`] comes at once.
    pub fast_zero: bool,
    /// Knows holes from data.
    pub status: bool,
    /// Whether it is flushed.
    pub flush: Flushing,
    /// Offsets and lengths are multiples of this, bytes: 1, or 512 where a server insists.
    pub minimum: u32,
    /// The longest operation that moves data, bytes.
    pub maximum: u32,
}

/// How long to wait for a store that is reached over a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For a connection and its handshake.
    pub connect: Duration,
    /// With requests under way and nothing heard, before the connection is given up for another.
    pub silence: Duration,
    /// With no connection, before requests fail. `None`: they wait for ever.
    pub give_up: Option<Duration>,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            connect: Duration::from_secs(10),
            silence: Duration::from_secs(30),
            give_up: Some(Duration::from_secs(120)),
        }
    }
}

/// Why a store cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum BackingError {
    /// The URI is not one.
    #[error(
        "'{uri}' does not name a backing store: {reason}; write file:PATH, nbd+unix:///EXPORT?socket=PATH, nbd://HOST:PORT/EXPORT or s3://BUCKET/PREFIX"
    )]
    Uri {
        /// As given.
        uri: String,
        /// What is wrong.
        reason: String,
    },
    /// It cannot be opened or reached.
    #[error("backing store '{uri}': {reason}")]
    Open {
        /// Its name.
        uri: String,
        /// What is wrong, and what to do.
        reason: String,
    },
}

/// What is the matter with a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreTrouble {
    /// In a word: `lost`, `shrunk`, `moved` or `changed`.
    pub state: &'static str,
    /// Since when.
    pub since: Instant,
    /// What it is, and what to do.
    pub what: String,
}

/// A store.
pub trait Backing: Send + Sync + fmt::Debug {
    /// As it was named.
    fn uri(&self) -> &str;

    /// What it can do.
    fn capabilities(&self) -> Capabilities;

    /// Who it is, now.
    ///
    /// # Errors
    /// When that cannot be found out.
    fn identity(&self) -> Result<Identity, BackingError>;

    /// Somebody else has it now: nothing may be served of it any more, from the cache neither.
    fn is_lost(&self) -> bool {
        false
    }

    /// Which store it is, whatever it is called: two with the same are one store. As far as it can be told.
    fn place(&self) -> String {
        self.uri().to_owned()
    }

    /// The server that it is an export of, if it is one's.
    fn peer(&self) -> Option<Peer> {
        None
    }

    /// Looks whether somebody else changes it, as far as that is cheap to see, and says how many times that was noticed since
    /// it was opened: what was cached of it before the last of them may not be what it holds. To be asked every
    /// [`watch::LOOK`].
    fn look(&self) -> u64 {
        0
    }

    /// Looks whether the store is still where it was named, which takes a second where a file system hangs (nobody knows then): for
    /// whoever looks after this store, and for operators. [`Backing::trouble`] says what was found.
    fn look_at_place(&self) {}

    /// Nothing is cached any more from before so many such changes were noticed, and will not come back.
    fn accounted(&self, _changes: u64) {}

    /// Times, since it was opened, that it may have lost writes that were answered and that no flush had covered. Every client
    /// that was there is told (`larder_cache::block::Told`), and what is cached of such writes is dropped before that. A flush that
    /// has ended well has covered what was answered before it only if this has not grown since then.
    fn losses(&self) -> u64 {
        0
    }

    /// Carries to the disk what is noted of changes that have ended, by which they are known again after a power cut.
    fn keep_notes(&self) -> bool {
        true
    }

    /// Sessions that are open.
    fn sessions(&self) -> usize {
        0
    }

    /// What is the matter with it now, as far as it can tell by itself: it is not reached, or it was cut short.
    fn trouble(&self) -> Option<StoreTrouble> {
        None
    }

    /// Whoever has it goes and waits for nothing that it was asked: as far as it can, it ends all of that with failures as soon as its
    /// sessions are called next, and so all that it is asked from now on; or it is asked as before again. What it was sent may still be done.
    fn abandon(&self, _abandoned: bool) {}

    /// Makes it as large as that (bytes; no smaller than it is), or looks how large it is by now. Returns its size, which
    /// [`Backing::about`] says from then on. What was there is as it was.
    ///
    /// # Errors
    /// When it cannot be made larger from here, has become smaller, or does not say how large it is.
    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError>;

    /// The file or block device that it is, if it is one.
    fn image(&self) -> Option<marker::Image> {
        None
    }

    /// What a journal has for it is laid over it.
    fn has_journal_laid_over(&self) -> bool {
        false
    }

    /// A worker's own way to it.
    ///
    /// # Errors
    /// When there is no more to be had.
    fn session(&self) -> Result<Box<dyn Session>, BackingError>;
}

/// How many tokens of a poll a session may use.
pub const TOKENS: usize = 64;

/// A worker's way to a store. It may be made on any thread and is used on one.
///
/// Operations may end in any order, and nothing orders two that are under way at once; a flush covers what had ended
/// when it was submitted, in whatever session of the store.
pub trait Session: Send {
    /// Readable (edge-triggered) when [`Session::turn`] has something to do.
    fn fd(&self) -> RawFd;

    /// Registers its descriptors with a poll, under tokens from `first` on, [`TOKENS`] at most. From then on
    /// [`Session::ready`] is called for what that poll says, and [`Session::fd`] says nothing. To be called before the first
    /// operation, if at all: one poll, where the descriptor of a poll would be asked first.
    ///
    /// # Errors
    /// If it cannot be registered.
    fn attach(&mut self, registry: &Registry, first: usize) -> io::Result<()> {
        registry.register(&mut SourceFd(&self.fd()), Token(first), Interest::READABLE)
    }

    /// It is not asked any more.
    fn detach(&mut self, registry: &Registry) {
        // It goes with the descriptor at the latest.
        let _ = registry.deregister(&mut SourceFd(&self.fd()));
    }

    /// What was registered under the `at`th token is ready: does what that asks for.
    fn ready(&mut self, _at: usize, _event: &Event, now: Instant) {
        self.turn(now);
    }

    /// Takes an operation, whose range lies within the store; it starts with the next [`Session::flush`].
    fn submit(&mut self, token: u64, op: Op);

    /// Starts what was submitted.
    fn flush(&mut self, now: Instant);

    /// Does what the descriptor's readiness, or the time, asks for.
    fn turn(&mut self, now: Instant);

    /// The next operation that has ended. Take until `None` before waiting.
    fn pop(&mut self) -> Option<Done>;

    /// Submitted and not taken.
    fn in_flight(&self) -> usize;

    /// [`Session::turn`] is wanted at this time even if the descriptor says nothing.
    fn wake_at(&self) -> Option<Instant> {
        None
    }

    /// Nobody turns it before it is asked something again: it keeps no server waiting.
    fn rest(&mut self) {}

    /// A write's or trim's `fua` is kept by the store itself.
    fn native_fua(&self) -> bool {
        true
    }
}

/// How a store is opened.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// It will not be written.
    pub read_only: bool,
    /// Past the page cache, where there is one.
    pub direct: bool,
    /// With stores that are reached over a network.
    pub timeout: Timeouts,
    /// Others are kept from writing, where the store has a way to do that.
    pub lease: bool,
    /// Where notes about files are kept, by which a run that is cut short knows its last write again. `None`: after such a
    /// run a file cannot be proved to be as it was.
    pub notes: Option<PathBuf>,
    /// A store that can tell is looked at while it is served, whether somebody else changes it. Not for who does so himself.
    pub watch: bool,
    /// How files are read and written.
    pub ring: RingChoice,
    /// The operator's word that whatever the store has answered is durable: it is never flushed. Not of files and block devices, which the
    /// kernel keeps in its page cache.
    pub durable: bool,
}

impl Default for OpenOptions {
    fn default() -> OpenOptions {
        OpenOptions {
            read_only: false,
            direct: false,
            timeout: Timeouts::default(),
            lease: true,
            notes: None,
            watch: true,
            ring: RingChoice::Auto,
            durable: false,
        }
    }
}

/// Opens the store of that name, without notes.
///
/// # Errors
/// [`BackingError`].
pub fn open(
    uri: &Uri,
    read_only: bool,
    direct: bool,
    timeout: Timeouts,
) -> Result<Box<dyn Backing>, BackingError> {
    open_with(uri, &OpenOptions { read_only, direct, timeout, ..OpenOptions::default() })
}

/// Opens the store of that name.
///
/// # Errors
/// [`BackingError`].
pub fn open_with(uri: &Uri, options: &OpenOptions) -> Result<Box<dyn Backing>, BackingError> {
    match uri {
        Uri::File { .. } if options.durable => Err(BackingError::Open {
            uri: uri.to_string(),
            reason: "what a file or block device has answered may be in a volatile cache, and it is flushed: nobody can vouch for it".to_owned(),
        }),
        Uri::File { .. } => Ok(Box::new(file::FileBacking::open(uri, options)?)),
        #[cfg(feature = "nbd")]
        Uri::NbdUnix { .. } | Uri::NbdTcp { .. } => {
            Ok(Box::new(nbd::NbdBacking::open_with(uri, options)?))
        }
        #[cfg(feature = "object")]
        Uri::S3 { .. } => Ok(Box::new(object::ObjectBacking::open(uri, options)?)),
        #[cfg(not(all(feature = "nbd", feature = "object")))]
        other => Err(BackingError::Open {
            uri: other.to_string(),
            reason: "this program was built without stores of its kind: build larder-volume with the features nbd and object"
                .to_owned(),
        }),
    }
}

/// A number that no other attachment has: not 0.
fn nonce() -> io::Result<u64> {
    larder_runtime::machine::random().map(|number| number.max(1))
}
