//! A store in DRAM alone. It has a data directory only where something must be known of the last run: with `-e`, and where that
//! run had flash or a memory file.

use std::path::Path;
use std::sync::Arc;

use larder_base::{AppId, HashKey, Words};
use larder_engine::index::FlashIndex;
use larder_engine::kv::FlashGeometry;
use larder_engine::kv::node::start::cas_base;
use larder_format::Uuid;
use larder_runtime::{Clock, DataDir, SHARED_DIR, maps};

use super::{
    CacheConfig, Maintenance, MemoryFile, Opened, Parts, Plan, Ready, ShardWords, Undo, Watchers,
    build_node, load, memory_file, need, not_before, random, random_run, run, run_setup, store,
};
use crate::kv::CacheError;
use crate::kv::former::{self, Forsaken};

pub(super) fn prepare(config: &CacheConfig, clock: &Arc<Clock>) -> Result<Ready, CacheError> {
    let began = clock.now();
    let plan = Plan::new(config.memory, u64::from(config.max_item), None, need(config))?;
    let mut undo = Undo(Vec::new());
    let mut memory_file = memory_file_alone(config, &mut undo)?;
    let Forsaken { lock, mut warnings } = match memory_file {
        Some(_) => Forsaken { lock: None, warnings: Vec::new() },
        None => former::forsake_flash(&config.data_dir)?,
    };
    let secret = random()?;
    let least_cas = memory_file.as_ref().map_or(0, |(file, _)| file.least_cas());
    let names = memory_file.as_ref().map(|(file, _)| file);
    let names = names.map_or(Vec::new(), |f| f.new_names(&[], config.applications.shares.len()));
    if let Some(latest) = memory_file.as_ref().and_then(|(file, _)| file.latest()) {
        warnings.extend(not_before(clock, latest, "a start with the .meta file removed"));
    }
    let words = (0..plan.shards)
        .map(|_| ShardWords {
            index: Words::heap(FlashIndex::words_for(plan.index_most)),
            apps: Words::heap(AppId::COUNT),
        })
        .collect();
    let parts = Parts {
        plan,
        uuid: Uuid(random()?),
        hash_key: HashKey(secret),
        geometry: FlashGeometry::NONE,
        cas_base: cas_base(began.wall, least_cas, random_run()?),
        log: None,
    };
    let setup = run_setup(config, &parts, names)?;
    let (node, _, _) = build_node(&setup, plan, words, None)?;
    let loaded = load(config, memory_file.as_mut().map(|(file, _)| file), &setup, &node, clock)?;
    let watchers = Watchers::start(config, &setup, clock)?;
    let mut maintenance = Maintenance::new(&node, None, parts.cas_base, 0);
    let mut store = store(config, setup, plan, node, &mut maintenance, None, watchers);
    store._shared_dir = lock;
    warnings.extend(loaded.warning);
    let notes = Vec::from_iter(loaded.note);
    if let Some((file, dir)) = memory_file {
        let owned = Some((&file, parts.cas_base));
        let (said, keeper) = former::take_directory(&dir, random_run()?, owned)?;
        warnings.extend(said);
        store.memory_file = keeper.map(|keeper| file.keeper(keeper, Some(dir)));
    }
    undo.0.clear();
    let opened = Opened {
        warmth: None,
        kept: 0,
        dropped: 0,
        why_buffered: None,
        why_private: None,
        formatted: false,
        flash_bytes: 0,
        budget: None,
        recovery: clock.now().mono.saturating_sub(began.mono),
        notes,
        warnings,
    };
    Ok(Ready { store, opened, maintenance, further: Vec::new() })
}

/// The file for what is in DRAM and the data directory that says whose it is, for a run without flash.
fn memory_file_alone(
    config: &CacheConfig,
    undo: &mut Undo,
) -> Result<Option<(MemoryFile, DataDir)>, CacheError> {
    if config.memory_file.is_none() {
        return Ok(None);
    }
    maps::sweep(Path::new(SHARED_DIR));
    let dir = former::open_dir(&config.data_dir)?;
    undo.0.extend_from_slice(dir.made());
    if !dir.made().is_empty() {
        undo.0.push(run::path(dir.path()));
    }
    let Some(mut file) = memory_file(config, undo)? else { return Ok(None) };
    file.prove(run::last(&dir).as_ref(), None, config.max_item);
    file.check_recorded(config)?;
    Ok(Some((file, dir)))
}
