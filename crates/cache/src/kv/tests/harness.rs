//! A store on a device in memory, and a client of it that knows what it must answer.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use larder_base::{Expiry, Rng};
use larder_engine::kv::ClockMode;
use larder_engine::kv::api::{
    Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store as Write,
    StoreMode,
};
use larder_policy::admission::AdmissionConfig;
use larder_runtime::{Clock, DataDir, Device};

use crate::kv::open::{Medium, open_on};
use crate::kv::warm::Region;
use crate::kv::{CacheConfig, CacheError, Core, Opened};

/// What every store of these tests is opened with: little DRAM, so that flash is used at once.
pub(super) fn config(dir: PathBuf) -> CacheConfig {
    CacheConfig {
        memory: 2 << 20,
        max_item: 64 << 10,
        no_eviction: false,
        clock_max: 3,
        clock_mode: ClockMode::SetMax,
        data_dir: dir,
        flash: Some("memory".into()),
        flash_size: None,
        further: Vec::new(),
        flash_object_size: 1024,
        format_flash: false,
        admission: AdmissionConfig::from_name("all").unwrap(),
        budget: Default::default(),
        applications: Default::default(),
        memory_file: None,
        record: None,
        capture: None,
        hurry: Default::default(),
    }
}

/// Opens a store on any device.
pub(super) fn open(
    config: &CacheConfig,
    device: Arc<dyn Device>,
) -> Result<(Site, Opened), CacheError> {
    let dir = DataDir::open(&config.data_dir, 1)?;
    open_in(config, device, dir)
}

/// The same in a data directory that is open.
pub(super) fn open_in(
    config: &CacheConfig,
    device: Arc<dyn Device>,
    dir: DataDir,
) -> Result<(Site, Opened), CacheError> {
    let clock = Arc::new(Clock::start());
    let path = config.flash.clone().unwrap();
    let medium = Medium {
        path,
        size: config.flash_size,
        device: device.clone(),
        drive: None,
        why_buffered: None,
    };
    let (store, opened) = open_on(config, &clock, dir, medium, None)?;
    Ok((Site { store, clock, device }, opened))
}

/// An open store.
pub(super) struct Site {
    pub(super) store: Arc<Core>,
    pub(super) clock: Arc<Clock>,
    pub(super) device: Arc<dyn Device>,
}

impl Site {
    /// Stops it. What outlives a process (the index in shared memory) is removed with `forget`.
    pub(super) fn stop(self, forget: bool) {
        self.store.shutdown(self.clock.now());
        if forget && let Some(flash) = self.store.flash() {
            Region::forget(
                &crate::kv::locked(&flash.drives[0].superblock).current().uuid.to_string(),
            );
        }
    }

    pub(super) fn stats(&self) -> crate::kv::CacheStats {
        self.store.stats(self.clock.now())
    }
}

/// An answer, owned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Said {
    Value(Vec<u8>),
    Miss,
    Stored,
    Deleted,
    NotFound,
    OutOfMemory,
}

#[derive(Default)]
struct Sink {
    said: Option<Said>,
    verifies: Vec<FlashRead>,
    wake: bool,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        let said = match reply {
            Reply::Item(item) => Said::Value(item.value.to_vec()),
            Reply::Miss => Said::Miss,
            Reply::Stored { .. } => Said::Stored,
            Reply::Deleted { .. } => Said::Deleted,
            Reply::NotFound => Said::NotFound,
            Reply::OutOfMemory => Said::OutOfMemory,
            other => panic!("not asked for: {other:?}"),
        };
        assert!(self.said.replace(said).is_none(), "one answer to a request");
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {
        self.wake = true;
    }
}

/// Sends requests and knows the latest acknowledged value of every key. A cache may forget; it may not tell anything else.
pub(super) struct Client {
    pub(super) rng: Rng,
    latest: BTreeMap<u64, Vec<u8>>,
    pub(super) hits: u64,
    pub(super) from_flash: u64,
    /// Waits for the cleaner when room is short.
    pub(super) paced: bool,
    /// And for as long as it takes, at every request: what comes to flash does not depend on how fast the cleaner is.
    pub(super) patient: bool,
    /// Values of some fifty bytes.
    pub(super) small: bool,
    keys: u64,
}

impl Client {
    pub(super) fn new(seed: u64, keys: u64) -> Client {
        let rng = Rng::new(seed);
        let (latest, patient) = (BTreeMap::new(), false);
        Client { rng, latest, hits: 0, from_flash: 0, paced: true, patient, small: false, keys }
    }

    /// Reads flash as a worker does, failures included.
    fn read(site: &Site, read: &FlashRead) -> Option<Vec<u8>> {
        let span = site.store.span(read);
        let mut bytes = vec![0; span.len as usize];
        match site.device.read_at(span.offset, &mut bytes) {
            Ok(()) => Some(bytes),
            Err(e) => {
                site.store.read_failed(&e);
                None
            }
        }
    }

    pub(super) fn execute(&mut self, site: &Site, key: &[u8], op: Op<'_>) -> Said {
        let store = &site.store;
        let request = Request { key, hash: store.hash(key), app: store.app(key), op };
        let mut sink = Sink::default();
        let mut fetched: Option<(FlashRead, Option<Vec<u8>>)> = None;
        for _ in 0..100 {
            let given =
                fetched.as_ref().map(|(read, bytes)| Fetched { read, bytes: bytes.as_deref() });
            match store.execute(site.clock.now(), &request, given, &mut sink) {
                Outcome::Done => break,
                Outcome::Read(read) => {
                    self.from_flash += 1;
                    fetched = Some((read, Self::read(site, &read)));
                }
            }
        }
        for read in std::mem::take(&mut sink.verifies) {
            let bytes = Self::read(site, &read);
            store.verify(site.clock.now(), &read, bytes.as_deref());
        }
        if sink.wake {
            store.wake_cleaner();
        }
        if sink.wake || self.patient {
            // As a network would: the cleaner gets some time, or all that is written would be evicted before it comes.
            let began = std::time::Instant::now();
            let most = std::time::Duration::from_millis(if self.patient { 10_000 } else { 20 });
            while self.paced
                && store.node.lock(store.node.shard_of(request.hash)).is_short()
                && began.elapsed() < most
            {
                std::thread::yield_now();
            }
        }
        sink.said.expect("every request is answered")
    }

    /// One random request, checked.
    pub(super) fn step(&mut self, site: &Site) {
        let n = self.rng.below(self.keys);
        let key = format!("app{}:key{n}", n % 3);
        match self.rng.below(10) {
            0..6 => self.check(site, n),
            6..9 => {
                let len = match self.rng.chance(0.05) {
                    _ if self.small => 20 + self.rng.below(60),
                    true => 20_000,
                    false => 200 + self.rng.below(4_000),
                };
                let mut value = vec![0; len as usize];
                self.rng.fill(&mut value);
                let write = Write {
                    mode: StoreMode::Set,
                    value: &value,
                    flags: 0,
                    expiry: Expiry::NEVER,
                    compare_cas: None,
                    new_cas: None,
                    invalidate: false,
                    vivify: None,
                };
                match self.execute(site, key.as_bytes(), Op::Store(write)) {
                    Said::Stored => drop(self.latest.insert(n, value)),
                    Said::OutOfMemory => drop(self.latest.remove(&n)),
                    other => panic!("{key}: set answered {other:?}"),
                }
            }
            _ => {
                let said = self.execute(site, key.as_bytes(), Op::Delete(Delete::default()));
                assert!(matches!(said, Said::Deleted | Said::NotFound), "{key}: {said:?}");
                assert!(
                    said == Said::NotFound || self.latest.contains_key(&n),
                    "{key}: deleted though it was not there"
                );
                self.latest.remove(&n);
            }
        }
    }

    /// Reads one key.
    fn check(&mut self, site: &Site, n: u64) {
        let key = format!("app{}:key{n}", n % 3);
        match self.execute(site, key.as_bytes(), Op::Get(Get::default())) {
            Said::Value(value) => {
                assert_eq!(
                    Some(&value),
                    self.latest.get(&n),
                    "{key}: a value that is not the latest"
                );
                self.hits += 1;
            }
            Said::Miss => {}
            other => panic!("{key}: get answered {other:?}"),
        }
    }

    /// Reads every key; tells how many are there.
    pub(super) fn check_all(&mut self, site: &Site) -> u64 {
        let before = self.hits;
        (0..self.keys).for_each(|n| self.check(site, n));
        self.hits - before
    }
}
