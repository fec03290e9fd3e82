//! Volumes, and under which name each is served.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use larder_engine::block::node::losses::Losses;
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
    /// It is only read, whatever its store would take.
    kept: AtomicBool,
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
    losses: Losses,
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
            kept: AtomicBool::new(false),
            preferred,
            cached,
            clients: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            health: Health::default(),
            settled: AtomicU64::new(0),
            wants_settled: AtomicBool::new(false),
            losses: Losses::default(),
        }
    }

    /// So many [losses](Backing::losses) of its store are settled: what the cache had of writes before them is dropped.
    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::SeqCst)
    }

    /// Which losses of its store its clients hear of.
    pub(super) fn losses(&self) -> &Losses {
        &self.losses
    }

    /// How many losses of its store its clients have to hear of by now.
    pub(super) fn told(&self) -> u64 {
        self.losses.told(self.losses.last(self.backing.losses()))
    }

    /// It writes back from now on, or no more: its store has everything durably.
    pub(super) fn writes_back(&self, back: bool) {
        let losses = self.backing.losses();
        match back {
            true => self.losses.begins(losses),
            false => self.losses.ends(losses),
        }
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
        let read_only = self.about.read_only || self.kept.load(Ordering::SeqCst);
        Capabilities { size: self.size.load(Ordering::SeqCst), read_only, ..self.about }
    }

    /// It is only read from now on: nobody has been told otherwise.
    pub(super) fn keep_read_only(&self) {
        self.kept.store(true, Ordering::SeqCst);
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

/// Whether the store of `volume` is none of the others'. What may be one and cannot be told apart is returned, to be said when the
/// volume is there. It may take as long as file systems do.
fn no_twin(others: &[Arc<Volume>], volume: &Volume) -> Result<Option<String>, VolumeError> {
    let (place, peer) = (volume.backing().place(), volume.backing().peer());
    let mut alike = Vec::new();
    for other in others {
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
            Likeness::Perhaps if one_size => alike.push(other),
            _ => {}
        }
    }
    let Some(first) = alike.first() else { return Ok(None) };
    let more = match alike.len() - 1 {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    Ok(Some(format!(
        "volume '{}' ('{}') and volume '{}' ('{}'){more}: their stores are exports of one server, or of servers at addresses of this \
         host, of one size, and NBD does not say whether they are one disk: if they are, detach all but one, since what is written to \
         one is missing from what is cached of the others",
        volume.name,
        volume.backing().uri(),
        first.name,
        first.backing().uri(),
    )))
}

/// The volumes of a server.
#[derive(Debug, Default)]
pub struct Volumes {
    // A plain map: a lock is taken per connection, not per request. Nothing is asked of a store under it.
    all: RwLock<All>,
    /// Volumes that are to come.
    awaited: AtomicUsize,
}

#[derive(Debug, Default)]
struct All {
    map: BTreeMap<String, Arc<Volume>>,
    /// Volumes that come or go: they are not served, and their stores are theirs.
    beside: Vec<Weak<Volume>>,
    /// So often a volume has been added to these.
    grown: u64,
}

impl All {
    /// Those whose stores are theirs.
    fn owners(&self) -> Vec<Arc<Volume>> {
        let beside = self.beside.iter().filter_map(Weak::upgrade);
        self.map.values().cloned().chain(beside).collect()
    }

    fn insert(&mut self, volume: Arc<Volume>) {
        self.grown += 1;
        self.let_go(&volume);
        self.map.insert(volume.name.clone(), volume);
    }

    /// It neither comes nor goes any more. So with those that are no more.
    fn let_go(&mut self, volume: &Arc<Volume>) {
        let this = Arc::downgrade(volume);
        self.beside.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&this));
    }
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
        match self.all.read().map.contains_key(name) {
            true => Err(VolumeError::Exists(name.to_owned())),
            false => Ok(()),
        }
    }

    /// Adds a volume. What is to be known of its store is said in the log.
    ///
    /// # Errors
    /// [`VolumeError`].
    pub fn add(&self, volume: Volume) -> Result<Arc<Volume>, VolumeError> {
        self.check_free(&volume.name)?;
        let volume = Arc::new(volume);
        let alike = self.expect(&volume)?;
        self.restore(volume.clone())?;
        if let Some(alike) = alike {
            tracing::warn!("{alike}");
        }
        Ok(volume)
    }

    /// A volume is about to come, by [`Volumes::restore`], unless its store is another volume's. From now on, as long as it lives, its
    /// store is its own. Returns what is to be said in the log when it has come. It may take as long as the file systems that sockets
    /// lie on.
    ///
    /// # Errors
    /// [`VolumeError::Twin`].
    pub fn expect(&self, volume: &Arc<Volume>) -> Result<Option<String>, VolumeError> {
        loop {
            let (owners, grown) = {
                let all = self.all.read();
                (all.owners(), all.grown)
            };
            let alike = no_twin(&owners, volume)?;
            let mut all = self.all.write();
            // Others may have come meanwhile.
            if all.grown == grown {
                all.grown += 1;
                all.let_go(volume);
                all.beside.push(Arc::downgrade(volume));
                return Ok(alike);
            }
        }
    }

    /// Puts a volume in that was [expected](Volumes::expect), or back that was taken away.
    ///
    /// # Errors
    /// When another has its name by now.
    pub fn restore(&self, volume: Arc<Volume>) -> Result<(), VolumeError> {
        let mut all = self.all.write();
        if all.map.contains_key(&volume.name) {
            return Err(VolumeError::Exists(volume.name.clone()));
        }
        all.insert(volume);
        Ok(())
    }

    /// Takes a volume away: no further connection can choose it. Those that have it keep it. It may be put back: its store is its own
    /// as long as it lives, or until it is [gone](Volumes::gone).
    pub fn remove(&self, name: &str) -> Option<Arc<Volume>> {
        let mut all = self.all.write();
        let volume = all.map.remove(name)?;
        all.beside.push(Arc::downgrade(&volume));
        Some(volume)
    }

    /// A volume that was taken away does not come back: its store may be another's.
    pub fn gone(&self, volume: &Arc<Volume>) {
        self.all.write().let_go(volume);
    }

    /// Takes a volume away that does not come back: its store may be opened again.
    pub fn let_go(&self, name: &str) {
        self.all.write().map.remove(name);
    }

    /// So many more are to come: which is the only one is not said until then.
    pub fn set_awaited(&self, count: usize) {
        self.awaited.store(count, Ordering::SeqCst);
    }

    /// All of them, by name.
    pub fn all(&self) -> Vec<Arc<Volume>> {
        self.all.read().map.values().cloned().collect()
    }

    /// The volume of that name; the empty name is that of the only one.
    pub fn find(&self, name: &str) -> Option<Arc<Volume>> {
        let map = &self.all.read().map;
        if name.is_empty() && map.len() == 1 && self.awaited.load(Ordering::SeqCst) == 0 {
            return map.values().next().cloned();
        }
        map.get(name).cloned()
    }
}

#[cfg(test)]
mod tests {
    use larder_volume::peer::Place;
    use larder_volume::{BackingError, Flushing, Identity, Peer, Session};

    use super::*;

    /// An export of a server.
    #[derive(Debug)]
    struct Export(Peer);

    impl Backing for Export {
        fn uri(&self) -> &str {
            "nbd:export"
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities {
                size: 1 << 20,
                read_only: false,
                trim: false,
                fast_zero: false,
                status: false,
                flush: Flushing::Offered,
                minimum: 1,
                maximum: 1 << 20,
            }
        }
        fn identity(&self) -> Result<Identity, BackingError> {
            Ok(Identity::Blind { name: self.0.key(), size: 1 << 20 })
        }
        fn place(&self) -> String {
            self.0.key()
        }
        fn peer(&self) -> Option<Peer> {
            Some(self.0.clone())
        }
        fn resize(&self, _: Option<u64>) -> Result<u64, BackingError> {
            Ok(1 << 20)
        }
        fn session(&self) -> Result<Box<dyn Session>, BackingError> {
            Err(BackingError::Open { uri: self.uri().to_owned(), reason: "is none".to_owned() })
        }
    }

    fn at(name: &str, addresses: &[&str], export: &str) -> Volume {
        let list = addresses.iter().map(|a| a.parse().unwrap()).collect();
        let peer = Peer { place: Place::Addresses(list), export: export.to_owned() };
        Volume::new(name, Box::new(Export(peer)), 4096, true)
    }

    fn is_twin<T>(found: Result<T, VolumeError>, of: &str) -> bool {
        matches!(found, Err(VolumeError::Twin { other, .. }) if other == of)
    }

    /// Exports of one server are said once of each volume, however many there are.
    #[test]
    fn what_may_be_one_disk_is_said_in_one_sentence() {
        let volumes = Volumes::default();
        for i in 0..3 {
            volumes.add(at(&format!("v{i}"), &["127.0.0.1:9"], &format!("e{i}"))).unwrap();
        }
        let one = Arc::new(at("one", &["127.0.0.1:9"], "one"));
        let text = volumes.expect(&one).unwrap().unwrap();
        assert!(text.contains("exports of one server") && text.contains("volume 'v0'"), "{text}");
        assert!(text.contains("and 2 more") && !text.contains("'v1'"), "{text}");
        let elsewhere = Arc::new(at("elsewhere", &["127.0.0.1:10"], "one"));
        assert_eq!(volumes.expect(&elsewhere).unwrap(), None);
    }

    /// The servers are one by an address that they share, though not by their keys: nothing but this keeps two from coming at once.
    #[test]
    fn a_store_is_that_of_the_volume_that_comes_or_goes() {
        let volumes = Volumes::default();
        let both = ["192.0.2.1:9", "192.0.2.2:9"];
        let comes = Arc::new(at("comes", &both, ""));
        let other = || Arc::new(at("other", &both[1..], ""));
        assert!(volumes.expect(&comes).is_ok());
        assert!(is_twin(volumes.expect(&other()), "comes"), "it comes");
        volumes.restore(comes.clone()).unwrap();
        assert!(is_twin(volumes.expect(&other()), "comes"), "it is there");
        let goes = volumes.remove("comes").unwrap();
        assert!(is_twin(volumes.expect(&other()), "comes"), "it may come back");
        volumes.restore(goes).unwrap();
        let goes = volumes.remove("comes").unwrap();
        volumes.gone(&goes);
        let second = other();
        assert!(volumes.expect(&second).is_ok(), "it does not come back");
        // One that did not come after all is in nobody's way.
        drop(second);
        assert!(volumes.expect(&other()).is_ok());
    }
}
