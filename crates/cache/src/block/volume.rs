//! Volumes, and under which name each is served.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::health::Health;
use larder_volume::{Backing, Capabilities, Likeness};

/// The longest name, bytes: what NBD takes.
pub const LONGEST_NAME: usize = 4096;

/// A volume: a store under a name.
#[derive(Debug)]
pub struct Volume {
    name: String,
    backing: Box<dyn Backing>,
    about: Capabilities,
    size: AtomicU64,
    preferred: u32,
    /// Prefetching does something.
    cached: bool,
    clients: AtomicU64,
    /// Connections to it are closed.
    closing: AtomicBool,
    /// Nothing is done for it any more.
    closed: AtomicBool,
    health: Health,
    /// See [`Volume::settled`].
    settled: AtomicU64,
    wants_settled: AtomicBool,
}

/// A client of a volume, as long as it lives.
#[derive(Debug)]
pub struct Client(Arc<Volume>);

impl Client {
    /// One more client of `volume`.
    pub fn new(volume: &Arc<Volume>) -> Client {
        volume.clients.fetch_add(1, Ordering::SeqCst);
        Client(volume.clone())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.0.clients.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Volume {
    /// `preferred` is what requests are best multiples of: the cache's line. `cached` says that there is a cache, so
    /// that a prefetch is of use.
    pub fn new(name: &str, backing: Box<dyn Backing>, preferred: u32, cached: bool) -> Volume {
        let about = backing.capabilities();
        Volume {
            name: name.to_owned(),
            backing,
            about,
            size: AtomicU64::new(about.size),
            preferred,
            cached,
            clients: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            health: Health::default(),
            settled: AtomicU64::new(0),
            wants_settled: AtomicBool::new(false),
        }
    }

    /// So many [losses](Backing::losses) of its store are settled: what the cache had of writes before them is dropped.
    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::SeqCst)
    }

    /// They are.
    pub(super) fn settle(&self, losses: u64) {
        self.settled.fetch_max(losses, Ordering::SeqCst);
        self.wants_settled.store(false, Ordering::SeqCst);
    }

    /// A client's answer waits for the latest of them to be.
    pub(super) fn want_settled(&self) {
        self.wants_settled.store(true, Ordering::SeqCst);
    }

    /// Whether one does.
    pub(super) fn wants_settled(&self) -> bool {
        self.wants_settled.load(Ordering::SeqCst)
    }

    /// How its store does.
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Connections of clients that have asked something of it and are still there: one client may have several.
    pub fn clients(&self) -> u64 {
        self.clients.load(Ordering::SeqCst)
    }

    /// Its clients' connections are to be closed.
    pub fn close_clients(&self) {
        self.closing.store(true, Ordering::SeqCst);
    }

    /// They stay after all.
    pub fn keep_clients(&self) {
        self.closing.store(false, Ordering::SeqCst);
    }

    /// Whether connections are to be closed.
    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst) || self.is_closed()
    }

    /// It is put aside: whoever asks something of it from now on is refused.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// It is not put aside after all.
    pub fn reopen(&self) {
        self.closed.store(false, Ordering::SeqCst);
        self.keep_clients();
    }

    /// Whether it is put aside.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Its name, by which it is exported.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The store.
    pub fn backing(&self) -> &dyn Backing {
        &*self.backing
    }

    /// What requests are best multiples of, bytes: a line of the cache, or what its store wants.
    pub fn preferred(&self) -> u32 {
        self.preferred.max(self.about.minimum.max(1))
    }

    /// Whether there is a cache: that a range is to be read ahead does something.
    pub fn is_cached(&self) -> bool {
        self.cached
    }

    /// What the store can do. Its size is that of the volume, which [`Volume::set_size`] changes.
    pub fn capabilities(&self) -> Capabilities {
        Capabilities { size: self.size.load(Ordering::SeqCst), ..self.about }
    }

    /// The volume has so many bytes from now on: no fewer than before. Clients that are there keep the size that they were
    /// told.
    pub fn set_size(&self, bytes: u64) {
        self.size.fetch_max(bytes, Ordering::SeqCst);
    }
}

/// Why a volume cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// There is one of that name.
    #[error("volume '{0}' exists already: choose another name")]
    Exists(String),
    /// Its store is another volume's.
    #[error(
        "volume '{name}': its store '{uri}' is volume '{other}' already, perhaps by another name: what is written to one would be \
         missing from what is cached of the other"
    )]
    Twin {
        /// The volume.
        name: String,
        /// Its store.
        uri: String,
        /// The one that is there.
        other: String,
    },
    /// The name cannot be one.
    #[error(
        "'{0}' cannot be a volume's name: use 1 to 4096 bytes of text without control characters"
    )]
    Name(String),
}

/// Whether the store of `volume` is none of the others'. What may be one and cannot be told apart is said in the log.
fn no_twin(map: &BTreeMap<String, Arc<Volume>>, volume: &Volume) -> Result<(), VolumeError> {
    let (place, peer) = (volume.backing().place(), volume.backing().peer());
    for other in map.values() {
        let theirs = other.backing().peer();
        let likeness = match (&peer, &theirs) {
            _ if other.backing().place() == place => Likeness::Same,
            (Some(peer), Some(theirs)) => peer.likeness(theirs),
            _ => Likeness::None,
        };
        let one_size = other.capabilities().size == volume.capabilities().size;
        match likeness {
            Likeness::Same => {
                return Err(VolumeError::Twin {
                    name: volume.name.clone(),
                    uri: volume.backing().uri().to_owned(),
                    other: other.name.clone(),
                });
            }
            Likeness::Perhaps if one_size => tracing::warn!(
                "volume '{}' ('{}') and volume '{}' ('{}'): their stores are exports of one server, of one size, and NBD does not say \
                 whether they are one disk: if they are, detach one, since what is written to one is missing from what is cached of \
                 the other",
                volume.name,
                volume.backing().uri(),
                other.name,
                other.backing().uri(),
            ),
            _ => {}
        }
    }
    Ok(())
}

/// The volumes of a server.
#[derive(Debug, Default)]
pub struct Volumes {
    // A plain map: a lock is taken per connection, not per request.
    map: RwLock<BTreeMap<String, Arc<Volume>>>,
    /// Volumes that are to come.
    awaited: AtomicUsize,
}

impl Volumes {
    /// Whether a volume may be called that.
    ///
    /// # Errors
    /// [`VolumeError::Name`].
    pub fn check_name(name: &str) -> Result<(), VolumeError> {
        if name.is_empty() || name.len() > LONGEST_NAME || name.chars().any(char::is_control) {
            return Err(VolumeError::Name(name.escape_debug().to_string()));
        }
        Ok(())
    }

    /// Whether a volume may be called that, and none is.
    ///
    /// # Errors
    /// [`VolumeError::Name`], [`VolumeError::Exists`].
    pub fn check_free(&self, name: &str) -> Result<(), VolumeError> {
        Volumes::check_name(name)?;
        match self.map.read().contains_key(name) {
            true => Err(VolumeError::Exists(name.to_owned())),
            false => Ok(()),
        }
    }

    /// Adds a volume.
    ///
    /// # Errors
    /// [`VolumeError`].
    pub fn add(&self, volume: Volume) -> Result<Arc<Volume>, VolumeError> {
        let name = volume.name.clone();
        Volumes::check_name(&name)?;
        let mut map = self.map.write();
        if map.contains_key(&name) {
            return Err(VolumeError::Exists(name));
        }
        no_twin(&map, &volume)?;
        let volume = Arc::new(volume);
        map.insert(name, volume.clone());
        Ok(volume)
    }

    /// Whether the store of `volume` is no other volume's.
    ///
    /// # Errors
    /// [`VolumeError::Twin`].
    pub fn check_twin(&self, volume: &Volume) -> Result<(), VolumeError> {
        no_twin(&self.map.read(), volume)
    }

    /// Puts a volume back that was taken away.
    ///
    /// # Errors
    /// When another has its name by now.
    pub fn restore(&self, volume: Arc<Volume>) -> Result<(), VolumeError> {
        let mut map = self.map.write();
        if map.contains_key(&volume.name) {
            return Err(VolumeError::Exists(volume.name.clone()));
        }
        map.insert(volume.name.clone(), volume);
        Ok(())
    }

    /// Takes a volume away: no further connection can choose it. Those that have it keep it.
    pub fn remove(&self, name: &str) -> Option<Arc<Volume>> {
        self.map.write().remove(name)
    }

    /// So many more are to come: which is the only one is not said until then.
    pub fn set_awaited(&self, count: usize) {
        self.awaited.store(count, Ordering::SeqCst);
    }

    /// All of them, by name.
    pub fn all(&self) -> Vec<Arc<Volume>> {
        self.map.read().values().cloned().collect()
    }

    /// The volume of that name; the empty name is that of the only one.
    pub fn find(&self, name: &str) -> Option<Arc<Volume>> {
        let map = self.map.read();
        if name.is_empty() && map.len() == 1 && self.awaited.load(Ordering::SeqCst) == 0 {
            return map.values().next().cloned();
        }
        map.get(name).cloned()
    }
}
