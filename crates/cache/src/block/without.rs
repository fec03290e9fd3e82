//! A start without the cache: its file or device is not there, or is no cache.
//!
//! In its place stands a file in memory that nothing is ever written to but its head, given up from the start: what orders
//! changes, counts, and shows is the same then as after a cache was given up in the middle of a run.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use larder_base::{ByteSize, UnixSecs};
use larder_engine::block::Fault;
use larder_engine::block::address::Placing;
use larder_engine::block::node::defaults;
use larder_engine::block::node::start::places::Places;
use larder_format::block::superblock::{self, COPY_BYTES};
use larder_policy::budget::WriteBudgetConfig;
use larder_runtime::{DeviceOptions, plain};
use rustix::fs::MemfdFlags;

use super::Running;
use super::node_limits::NodeLimits;
use super::notes::note_passed_by;
use super::open::{
    self, Begun, CacheConfig, CacheError, FormatConfig, Warmth, comer, open_device, read_superblock,
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
    note_passed_by(&config.state_dir, path, uuid_at(path).as_deref()).map_err(|e| {
        fail(format!(
            "it cannot be noted in '{}' that the cache must not be used when it comes back: {}; name a state directory that can \
             be written to",
            config.state_dir.display(),
            plain(&e),
        ))
    })?;
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
        yes: true,
    };
    open::format(&shape, [0; 32], UnixSecs(0))?;
    // Nothing is written to flash.
    config.rules.budget = WriteBudgetConfig::default();
    let device = open_device(&DeviceOptions::new(&stand_in))?;
    let mut superblock = read_superblock(&device)?;
    let mut places = Places::default();
    let mut placed = Vec::new();
    for volume in volumes {
        // One that has no place in the line space is ordered by its store alone.
        let comer = comer(volume, false);
        if comer.is_ok_and(|comer| places.take(&mut superblock, &comer, Fault::default()).is_ok()) {
            placed.push(volume.clone());
        }
    }
    let node_limits = NodeLimits::new(&config, &superblock, path.to_owned())?;
    let region = Region::private();
    let placing = Placing::of(&superblock.layout, superblock.key);
    let maps = region.empty_maps(&superblock, placing, config.making());
    tracing::error!(
        "there is no cache: {why}. Volumes are served without it (pass-through); see to it and start again: it is cold then"
    );
    let begun = Begun {
        device,
        superblock,
        region,
        maps,
        records: places.volumes().cloned().collect(),
        node_limits,
        log: None,
        given_up: Some(why.to_owned()),
        warmth: Warmth::Cold("there is none".to_owned()),
        stand_in: true,
        by_hand: None,
    };
    open::begin(config, &placed, begun)
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
