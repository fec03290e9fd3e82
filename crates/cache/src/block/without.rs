//! A start without the cache: its file or device is not there, or is no cache.
//!
//! In its place stands a file in memory that nothing is ever written to but its head, given up from the start: what orders
//! changes, counts, and shows is the same then as after a cache was given up in the middle of a run.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use larder_base::{ByteSize, UnixSecs};
use larder_engine::block::Fault;
use larder_engine::block::map::Shape;
use larder_engine::block::node;
use larder_engine::block::node::defaults;
use larder_engine::block::node::quiet::QUIET;
use larder_engine::block::node::setup;
use larder_engine::block::node::start::without::start_without;
use larder_engine::block::node::start::{Refused, Setup, Without};
use larder_format::block::superblock::{self, COPY_BYTES};
use larder_policy::budget::WriteBudgetConfig;
use larder_runtime::{DeviceOptions, plain};
use rustix::fs::MemfdFlags;

use super::Running;
use super::back::{self, BackWish};
use super::budget::BudgetFile;
use super::node_limits::NodeLimits;
use super::notes::PassedBy;
use super::open::{
    self, Begun, CacheConfig, CacheError, FormatConfig, Needed, Warmth, comer, open_device,
    read_superblock,
};
use super::region::Region;
use crate::block::volume::Volume;

/// Bytes of what stands in for the cache, nearly all of them never written.
const SIZE: u64 = 64 << 20;
/// Bytes of its lines, which clients are told requests are best multiples of.
pub const LINE: u32 = defaults::LINE;

/// Serves volumes without the cache that should be at `path`, and is not, for the reason `why`. When it comes back it is cold,
/// since volumes change meanwhile: that is noted in the state directory first.
///
/// # Errors
/// [`CacheError`], in particular when that cannot be noted: nobody may write to the volumes past the cache then.
pub fn open_without(
    path: &Path,
    mut config: CacheConfig,
    volumes: &[Arc<Volume>],
    why: &str,
) -> Result<Running, CacheError> {
    let fail = |reason: String| CacheError::System { what: "serving without a cache", reason };
    if config.record.is_some() {
        return Err(fail(format!("{why}; nothing could be recorded without it")));
    }
    // What a cache holds and a store lacks is not to be passed by.
    for volume in volumes {
        let through = BackWish { back: None, ..config.wish_of(volume.name()) };
        back::check_through(
            (volume.name(), volume.backing()),
            None,
            back::NO_CACHE,
            (&through, back::Asking::of(&config)),
            (true, false),
            &[],
        )?;
    }
    let system = |e: std::io::Error| fail(format!("a file in memory: {}", plain(&e)));
    let memory = rustix::fs::memfd_create("larder-no-cache", MemfdFlags::CLOEXEC)
        .map_err(|e| system(e.into()))?;
    rustix::fs::ftruncate(&memory, SIZE).map_err(|e| system(e.into()))?;
    let stand_in = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let shape = FormatConfig {
        path: stand_in.clone().into(),
        size: Some(ByteSize(SIZE)),
        line: LINE,
        placement: defaults::PLACEMENT,
        shards: defaults::SHARDS,
        write_log: None,
        yes: true,
        discard_dirty: false,
    };
    open::format(&shape, [0; 32], UnixSecs(0))?;
    // Nothing is written to flash.
    config.rules.budget = WriteBudgetConfig::default();
    let device = open_device(&DeviceOptions::new(&stand_in))?;
    let superblock = read_superblock(&device)?;
    // (One that does not say what it is known by has no place either.)
    let comers: Vec<_> = volumes.iter().filter_map(|v| comer(v, false).ok()).collect();
    let setup = Setup {
        shape: Shape::of(&superblock.layout),
        making: config.making(),
        config: setup::shard_config(config.write, config.fill_memory, &superblock.layout),
        idle: QUIET,
        empty: false,
        random: 0,
        fault: Fault::default(),
    };
    let notes = &mut PassedBy { dir: &config.state_dir, path, uuid: uuid_at(path) };
    let without = start_without(superblock, &comers, &setup, why, notes);
    let Without { superblock, shards, places, .. } = without.map_err(|refused| match refused {
        Refused::NotNoted { reason, .. } => fail(format!(
            "it cannot be noted in '{}' that the cache must not be used when it comes back: {reason}; name a state directory that can \
             be written to",
            config.state_dir.display(),
        )),
        other => fail(format!("{other:?}")),
    })?;
    let records: Vec<_> = places.volumes().cloned().collect();
    let is_placed = |v: &&Arc<Volume>| records.iter().any(|r| r.name == v.name());
    let placed: Vec<_> = volumes.iter().filter(is_placed).cloned().collect();
    let budget = BudgetFile::new(&config, &superblock);
    let node_limits = NodeLimits::new(&config, &superblock, path.to_owned(), &budget)?;
    let of = (&placed[..], &records[..]);
    let needed = Needed::new(&config, &device, &superblock, of, &node_limits)?;
    tracing::error!(
        "there is no cache: {why}. Volumes are served without it (pass-through); see to it and start again: it is cold then"
    );
    let begun = Begun {
        device,
        superblock,
        region: Region::private(),
        shards: shards.into_iter().map(node::StoredShard::new).collect(),
        needed,
        node_limits,
        budget,
        log: None,
        given_up: Some(why.to_owned()),
        warmth: Warmth::Cold("there is none".to_owned()),
        stand_in: true,
        by_hand: None,
    };
    open::begin(config, begun)
}

/// The UUID of the cache at `path`, if its head can be read: it may be cut short.
fn uuid_at(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut head = Vec::new();
    let file = std::fs::File::open(path).ok()?;
    file.take(2 * COPY_BYTES as u64).read_to_end(&mut head).ok()?;
    head.resize(2 * COPY_BYTES, 0);
    let (a, b) = head.split_at(COPY_BYTES);
    superblock::choose(a, b).ok().map(|sb| sb.uuid.to_string())
}
