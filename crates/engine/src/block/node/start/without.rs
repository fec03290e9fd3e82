//! A run whose cache device is not there. Volumes change meanwhile, so it is noted first that nothing on it may be used when it comes back.

use larder_base::Words;
use larder_format::block::BlockSuperblock;

use super::super::super::address::Placing;
use super::super::super::map::Map;
use super::super::super::{BlockShard, Planted};
use super::places::{Comer, Places};
use super::{Notes, Refused, Setup, Without};

/// Begins a run without its cache, for the reason `why`. In the place of the device's stands `superblock`, of a cache that nobody has used. A volume that has no place
/// there is none of [`Without::places`]: its store alone orders what is written to it.
///
/// # Errors
/// [`Refused::NotNoted`]: nobody may write to the volumes past the cache then.
pub fn start_without(
    mut superblock: BlockSuperblock,
    volumes: &[Comer],
    setup: &Setup,
    why: &str,
    notes: &mut impl Notes,
) -> Result<Without, Refused> {
    if !setup.fault.is(Planted::PassedByNotNoted) {
        let unnoted = |reason| Refused::NotNoted { why: why.to_owned(), reason };
        notes.given_up().map_err(unnoted)?;
    }
    let mut places = Places::default();
    for volume in volumes {
        // (What was decided of it says why it has none.)
        let _ = places.take(&mut superblock, volume, setup.fault);
    }
    let placing = Placing::of(&superblock.layout, superblock.key);
    let (entries, rest) = Map::words(setup.shape);
    let shard = |shard| {
        let words = (Words::heap(entries), Words::heap(rest));
        let map = Map::new(words.0, words.1, placing, shard, setup.shape, setup.making);
        BlockShard::without(setup.config, map)
    };
    let shards = (0..superblock.layout.shards).map(shard).collect();
    Ok(Without { superblock, shards, places, why: why.to_owned() })
}
