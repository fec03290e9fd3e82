//! A volume with a cache in front of it, by the library: what a program that embeds the cache does.
//!
//! ```text
//! cargo run --release -p larder-block --example serve -- /flash/cache 8g file:/srv/disk.img unix:/run/disk.sock
//! nbdinfo 'nbd+unix:///disk?socket=/run/disk.sock'
//! ```
//!
//! The cache is empty at each start. `none` instead of a cache's path passes requests through.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a program has threads and a clock"
)]

use std::error::Error;
use std::sync::Arc;

use larder_base::ByteSize;
use larder_block::backing::{self, Patience, Uri};
use larder_block::cache::{Cache, CacheOptions, CacheService};
use larder_block::server::service::pass_through;
use larder_block::server::{Listen, Server, ServerConfig, Volume, Volumes};
use larder_runtime::{DeviceOptions, FlashDevice, RingChoice};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [cache, size, uri, listen] = &arguments[..] else {
        return Err("give CACHE SIZE URI LISTEN: the cache's file and its size, the store, and where to listen".into());
    };
    let uri: Uri = uri.parse()?;
    let listen: Listen = listen.parse()?;
    let config = ServerConfig { listen: vec![listen], ..ServerConfig::default() };
    let store = backing::open(&uri, false, false, Patience::default())?;
    let volumes = Arc::new(Volumes::default());
    let cached = cache != "none";
    let volume = volumes.add(Volume::new("disk", store, 4096, cached))?;
    let server = if cached {
        let size: ByteSize = size.parse()?;
        let device = FlashDevice::open(&DeviceOptions::new(cache).size(size))?;
        let cache = Cache::open(Arc::new(device), CacheOptions::default(), config.threads)?;
        println!(
            "{} of lines, {} of memory",
            ByteSize(cache.capacity()),
            ByteSize(cache.map_bytes())
        );
        let cache = Arc::new(cache);
        cache.attach(&volume)?;
        let server = Server::start(config, volumes, |worker, registry, token| {
            CacheService::new(cache.clone(), worker, registry, token, RingChoice::Auto)
        })?;
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(std::time::Duration::from_secs(10));
                println!("{:?}", cache.stats());
            }
        });
        server
    } else {
        Server::start(config, volumes, pass_through)?
    };
    println!("ready");
    // Until it is killed.
    let _server = server;
    loop {
        std::thread::park();
    }
}
