//! A volume through a cache on flash, within a program: no server, no socket.
//!
//! ```text
//! cargo run --release -p larder-cache --example block -- /flash/cache 8g file:/srv/disk.img
//! ```
#![allow(clippy::disallowed_types, reason = "a program reads its arguments")]

use std::error::Error;

use larder_cache::block::Cache;
use larder_policy::block::BlockKind;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, size, uri] = &arguments[..] else {
        return Err("give CACHE SIZE URI: the cache's file, its size, and the store".into());
    };
    let cache = Cache::builder(path).create(size.parse()?).volume("disk", uri)?.open()?;
    println!("the map was found so: {:?}", cache.warmth());
    let disk = cache.volume("disk").ok_or("no such volume")?;
    // A file system knows what a block is for, better than anything that looks at bytes.
    let metadata = disk.holding(BlockKind::Metadata);
    let superblock = metadata.read(0, 4096).wait()?;
    metadata.write(0, &superblock).wait()?;
    disk.flush().wait()?;
    println!("{} lines are cached", cache.core().count_lines());
    drop((disk, metadata));
    cache.close();
    Ok(())
}
