//! A volume with a cache in front of it, served over NBD: what a program does that embeds cache and server.
//!
//! ```text
//! cargo run --release -p larder-block --example serve -- /flash/cache 8g file:/srv/disk.img unix:/run/disk.sock
//! nbdinfo 'nbd+unix:///disk?socket=/run/disk.sock'
//! ```
//!
//! `none` instead of a cache's path passes requests through. `larder block serve` is the daemon.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a program has threads and a clock"
)]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use larder_base::{ByteSize, UnixSecs};
use larder_block::backing::{self, Timeouts, Uri};
use larder_block::cache::{CacheConfig, Cached, FormatConfig, open};
use larder_block::server::service::pass_through;
use larder_block::server::{Listen, Server, ServerConfig, Volume, Volumes};
use larder_runtime::RingChoice;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [cache, size, uri, listen] = &arguments[..] else {
        return Err("give CACHE SIZE URI LISTEN: the cache's file and its size, the store, and where to listen".into());
    };
    let uri: Uri = uri.parse()?;
    let listen: Listen = listen.parse()?;
    let config = ServerConfig { listen: vec![listen], ..ServerConfig::default() };
    let store = backing::open(&uri, false, false, Timeouts::default())?;
    let volumes = Arc::new(Volumes::default());
    let cached = cache != "none";
    volumes.add(Volume::new("disk", store, 4096, cached))?;
    let mut handle = None;
    let server = if cached {
        let path = Path::new(cache);
        if !path.exists() {
            let size: ByteSize = size.parse()?;
            let format = FormatConfig {
                path: path.to_owned(),
                size: Some(size),
                line: 4096,
                placement: larder_format::block::Placement::Sets(8),
                shards: 8,
                write_log: None,
                yes: false,
                discard_dirty: false,
            };
            let seed = larder_runtime::machine::random_bytes()?;
            open::format(&format, seed, UnixSecs(0))?;
        }
        let mut cache_config = CacheConfig::new(path.parent().unwrap_or(Path::new(".")).to_owned());
        cache_config.workers = config.threads;
        let opened = open::open(path, cache_config, &volumes.all())?;
        let cache = opened.cache().clone();
        println!("the map: {:?}, {} of memory", opened.warmth, ByteSize(cache.stats().map_bytes));
        handle = Some(opened);
        Server::start(config, volumes, |worker, registry, token| {
            Cached::new(cache.clone(), worker, registry, token, RingChoice::Auto)
        })?
    } else {
        Server::start(config, volumes, pass_through)?
    };
    println!("ready");
    // Until it is killed: the next start is warm from memory, or from the device as far as it can be proved.
    let _running = (server, handle);
    loop {
        std::thread::park();
    }
}
