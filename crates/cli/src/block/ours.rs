//! What is this daemon's own cannot be a store behind it: its exports, its cache, its files.

use std::collections::BTreeSet;
use std::fs::{File, Metadata};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use larder_block::backing::{Backing, BackingError, Likeness, Peer, Uri};
use larder_block::server::Doors;

use super::settings::Settings;

/// See the [module](self).
pub(super) struct Ours {
    /// Where it exports volumes.
    sockets: Vec<PathBuf>,
    addresses: Vec<SocketAddr>,
    /// Files and devices, and what they are.
    files: Vec<(PathBuf, &'static str)>,
    /// Directories of which everything is its own.
    directories: Vec<PathBuf>,
    /// Standard error, where that is a file.
    log: Option<Metadata>,
    /// Stores of which it was said that they may be its own: they may be opened again and again.
    said: Mutex<BTreeSet<String>>,
}

impl Ours {
    pub(super) fn new(doors: &Doors, args: &Settings, state_dir: &Path) -> Ours {
        let (sockets, addresses) = doors.places();
        let mut files = vec![
            (args.cache.clone(), "the cache"),
            (state_dir.join("block.lock"), "the lock of its state directory"),
        ];
        files.extend(args.recording.record.iter().map(|file| (file.clone(), "its record")));
        let directories = ["stores", "block-maps"].map(|name| state_dir.join(name)).to_vec();
        let log = standard_error().ok().filter(|found| found.is_file());
        let said = Mutex::default();
        Ours { sockets, addresses, files, directories, log, said }
    }

    /// Opens the store of that name, if it is nothing of the daemon's own.
    ///
    /// # Errors
    /// [`BackingError::Open`], saying what it is; those of `open`.
    pub(super) fn open_other(
        &self,
        uri: &Uri,
        open: impl FnOnce() -> Result<Box<dyn Backing>, BackingError>,
    ) -> Result<Box<dyn Backing>, BackingError> {
        self.check(uri)?;
        let store = open()?;
        match store.peer() {
            Some(peer) if self.is_export(uri, &peer) => Err(own_export(uri)),
            _ => Ok(store),
        }
    }

    /// Whether it is. Where nobody can tell that is said, once for each name.
    fn is_export(&self, uri: &Uri, peer: &Peer) -> bool {
        match peer.place.is_among(&self.sockets, &self.addresses) {
            Likeness::Same => true,
            Likeness::Perhaps => {
                let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
                if said.insert(uri.to_string()) {
                    tracing::warn!(
                        "backing store '{uri}' may be an export of this daemon itself, by another address of this host: it would wait \
                         for its own answers then; name another store"
                    );
                }
                false
            }
            Likeness::None => false,
        }
    }

    /// What can be told before it is opened: the daemon's own export may not answer yet. Names of hosts are looked up once, when it
    /// is opened.
    fn check(&self, uri: &Uri) -> Result<(), BackingError> {
        let refused = |what: &str| Err(own(uri, what));
        if let Uri::File { path } = uri {
            let Ok(found) = path.metadata() else { return Ok(()) };
            let is = |own: &Metadata| is_one(own, &found);
            if let Some((_, what)) =
                self.files.iter().find(|f| f.0.metadata().is_ok_and(|m| is(&m)))
            {
                return refused(&format!("{what} of this daemon itself"));
            }
            if self.log.as_ref().is_some_and(is) {
                return refused("the file that this daemon writes its log to");
            }
            let whole = path.canonicalize().unwrap_or_else(|_| path.clone());
            let inside = |dir: &PathBuf| dir.canonicalize().is_ok_and(|dir| whole.starts_with(dir));
            if self.directories.iter().any(inside) {
                return refused("one of the files that this daemon keeps in its state directory");
            }
            return Ok(());
        }
        if let Uri::NbdTcp { host, .. } = uri
            && host.parse::<IpAddr>().is_err()
            && host != "localhost"
        {
            return Ok(());
        }
        match Peer::of(uri) {
            Ok(Some(peer)) if self.is_export(uri, &peer) => Err(own_export(uri)),
            _ => Ok(()),
        }
    }
}

fn own(uri: &Uri, what: &str) -> BackingError {
    BackingError::Open { uri: uri.to_string(), reason: format!("is {what}: name another store") }
}

fn own_export(uri: &Uri) -> BackingError {
    own(uri, "an export of this daemon itself, which would wait for its own answers")
}

/// Whether both are one file, or one block device by whatever name.
fn is_one(a: &Metadata, b: &Metadata) -> bool {
    if a.file_type().is_block_device() && b.file_type().is_block_device() {
        return a.rdev() == b.rdev();
    }
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

fn standard_error() -> io::Result<Metadata> {
    File::from(io::stderr().as_fd().try_clone_to_owned()?).metadata()
}
