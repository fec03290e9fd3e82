//! A cache within a program: no server, no socket. The program submits reads and writes itself, and says of each what it is
//! for, which a file system or a database knows better than anything that looks at bytes.
//!
//! ```text
//! cargo run --release -p larder-block --example embed -- /flash/cache 8g file:/srv/disk.img
//! ```
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a program has threads and a clock"
)]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::{ByteSize, UnixSecs};
use larder_block::backing::{self, Patience};
use larder_block::cache::{CacheConfig, CacheHandle, Cached, FormatConfig, open};
use larder_block::nbd::server::Command;
use larder_block::server::service::{Answer, Service};
use larder_block::server::{Told, Volume};
use larder_engine::block::WriteMode;
use larder_engine::block::map::Replacement;
use larder_policy::block::{BlockKind, EvictionBy, VictimPolicy};
use larder_runtime::{AlignedBuf, RingChoice};

/// One thread's use of a cached volume.
pub(crate) struct Embedded {
    service: Cached,
    volume: Arc<Volume>,
    /// What the program has been told of writes that its store may have lost.
    told: Told,
    poll: mio::Poll,
    /// Dropped last: the cache is as after a kill then; [`CacheHandle::stop`] would end it in good order.
    handle: CacheHandle,
}

impl Embedded {
    /// Opens the cache at `path`, which is formatted with `size` if it is not there, before the store at `uri`.
    ///
    /// # Errors
    /// Whatever opening them says.
    pub(crate) fn open(
        path: &Path,
        size: ByteSize,
        uri: &str,
        admission: &str,
    ) -> Result<Embedded, Box<dyn Error>> {
        let store = backing::open(&uri.parse()?, false, false, Patience::default())?;
        let volume = Volume::new("disk", store, 4096, true);
        if !path.exists() {
            let format = FormatConfig {
                path: path.to_owned(),
                size: Some(size),
                line: 4096,
                placement: larder_format::block::Placement::Sets(8),
                shards: 8,
                yes: false,
            };
            let seed = larder_runtime::machine::random_bytes()?;
            open::format(&format, seed, UnixSecs(0))?;
        }
        let config = CacheConfig {
            write: WriteMode::HddSsd,
            replacement: Replacement::Lru,
            reclaim: VictimPolicy::Fifo,
            evict: EvictionBy::default(),
            admission: admission.parse()?,
            fill_memory: ByteSize(64 << 20),
            readahead: ByteSize(0),
            workers: 1,
            ring: RingChoice::Auto,
            trust_unchanged: false,
            state_dir: path.parent().unwrap_or(Path::new(".")).to_owned(),
            record: None,
            rules: Default::default(),
        };
        let volume = Arc::new(volume);
        let handle = open::open(path, config, std::slice::from_ref(&volume))?;
        let poll = mio::Poll::new()?;
        let registry = poll.registry().try_clone()?;
        let service = Cached::new(handle.cache().clone(), 0, registry, 0, RingChoice::Auto)?;
        let told = Told::new(&volume);
        Ok(Embedded { service, volume, told, poll, handle })
    }

    /// Does one thing and waits for its answer. Many may be under way: submit each with a ticket of its own, and see by
    /// that whose answer [`Service::pop`] gives.
    ///
    /// # Errors
    /// If the kernel's poll fails. What became of the command is in the answer.
    pub(crate) fn ask(
        &mut self,
        command: Command,
        tag: BlockKind,
    ) -> Result<Answer, Box<dyn Error>> {
        self.service.submit_tagged(&self.volume, 1, command, tag);
        let mut events = mio::Events::with_capacity(64);
        loop {
            self.service.flush(Instant::now());
            if let Some(mut answer) = self.service.pop() {
                // A flush that ended well is not good where the store has lost what it was to cover.
                answer.outcome = self.told.hear(answer.losses, answer.outcome);
                return Ok(answer);
            }
            self.poll.poll(&mut events, Some(Duration::from_millis(10)))?;
            for event in &events {
                self.service.ready(event, Instant::now());
            }
        }
    }

    /// The cache.
    pub(crate) fn handle(&self) -> &CacheHandle {
        &self.handle
    }
}

/// Opens a cache, writes a block of metadata and reads it back.
#[allow(dead_code, reason = "a test uses the rest")]
fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [cache, size, uri] = &arguments[..] else {
        return Err("give CACHE SIZE URI: the cache's file, its size, and the store".into());
    };
    let mut disk = Embedded::open(Path::new(cache), size.parse()?, uri, "two_lbs")?;
    let mut buf = AlignedBuf::zeroed(4096);
    buf.fill(7);
    let write = Command::Write { offset: 0, buf, fua: false };
    disk.ask(write, BlockKind::Metadata)?.outcome.map_err(|e| e.to_string())?;
    let read = Command::Read { offset: 0, buf: AlignedBuf::zeroed(4096) };
    let answer = disk.ask(read, BlockKind::Metadata)?;
    answer.outcome.map_err(|e| e.to_string())?;
    println!(
        "read {:?}…, of it cached: {} lines",
        answer.buf.map(|b| b[0]),
        disk.handle().cache().stats().engine.read_hits
    );
    Ok(())
}
