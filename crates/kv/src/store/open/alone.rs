//! A store in DRAM alone. It has a data directory only where something must be known of the last run: with `-e`, and where that
//! run had flash or a memory file.

use std::path::Path;
use std::sync::Arc;

use larder_base::{AppId, HashKey, Words};
use larder_engine::index::FlashIndex;
use larder_engine::kv::FlashGeometry;
use larder_format::Uuid;
use larder_runtime::{Clock, DataDir, DataDirError, SHARED_DIR, maps};

use super::{
    DATA_DIR_VERSION, MemoryFile, Opened, Parts, Plan, Region, ShardWords, StoreConfig, Undo,
    Watchers, cas_base, cells, load, memory_file, not_before, random, random_run,
    remove_checkpoint, run, run_setup, settle, store,
};
use crate::store::{KvStore, StoreError};

pub(super) fn open(
    config: &StoreConfig,
    clock: &Arc<Clock>,
) -> Result<(Arc<KvStore>, Opened), StoreError> {
    let began = clock.now();
    let plan = Plan::new(config.memory, u64::from(config.max_item), None)?;
    let mut undo = Undo(Vec::new());
    let mut memory_file = memory_file_alone(config, &mut undo)?;
    let mut warnings: Vec<String> = match memory_file {
        Some(_) => Vec::new(),
        None => forsake_flash(&config.data_dir)?.into_iter().collect(),
    };
    let mut secret = [0; 16];
    random(&mut secret)?;
    let least_cas = memory_file.as_ref().map_or(0, |(file, _)| file.least_cas());
    let names = memory_file.as_ref().map(|(file, _)| file);
    let names = names.map_or(Vec::new(), |f| f.new_names(&[], config.applications.shares.len()));
    if let Some(latest) = memory_file.as_ref().and_then(|(file, _)| file.latest()) {
        warnings.extend(not_before(clock, latest, "a start with the .meta file removed"));
    }
    let words = (0..plan.shards)
        .map(|_| ShardWords {
            index: Words::heap(FlashIndex::words_for(plan.buckets)),
            apps: Words::heap(AppId::COUNT),
        })
        .collect();
    let mut uuid = [0; 16];
    random(&mut uuid)?;
    let parts = Parts {
        plan,
        uuid: Uuid(uuid),
        hash_key: HashKey(secret),
        geometry: FlashGeometry { salt: 0, segments: 0, segment_bytes: 4096 },
        cas_base: cas_base(began, least_cas)?,
        budget_rate: None,
    };
    let setup = run_setup(config, &parts, names, None)?;
    let (cells, _, _) = cells(&setup, words, None)?;
    let loaded = load(config, memory_file.as_mut().map(|(file, _)| file), &setup, &cells, clock)?;
    let watchers = Watchers::start(config, &setup, clock)?;
    let mut store = store(config, &parts, &setup, cells, None, watchers)?;
    let mut notes = Vec::new();
    if let Some((file, dir)) = memory_file {
        let run = random_run()?;
        warnings.extend(take_directory(&dir, run, Some(&file))?);
        settle(&mut store, &file, loaded, &mut notes, &mut warnings);
        store.memory_file = Some(file.keeper(run, parts.cas_base, None, Some(dir)));
    }
    let store = Arc::new(store);
    undo.0.clear();
    store
        .start_threads(clock)
        .map_err(|source| StoreError::System { what: "start a thread", source })?;
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
    Ok((store, opened))
}

/// The file for what is in DRAM and the data directory that says whose it is, for a run without flash.
fn memory_file_alone(
    config: &StoreConfig,
    undo: &mut Undo,
) -> Result<Option<(MemoryFile, DataDir)>, StoreError> {
    if config.memory_file.is_none() {
        return Ok(None);
    }
    let dir = DataDir::open(&config.data_dir, DATA_DIR_VERSION)?;
    undo.0.extend_from_slice(dir.made());
    if !dir.made().is_empty() {
        undo.0.push(run::path(dir.path()));
    }
    let Some(mut file) = memory_file(config, undo)? else { return Ok(None) };
    file.prove(run::last(&dir).as_ref(), None, config.max_item);
    Ok(Some((file, dir)))
}

/// A run without flash answers for the same keys: what the last run on this data directory has left, on flash or in a file of what
/// was in DRAM, is not believed any more. Tells so, if there was flash. A directory that is not there is left so.
fn forsake_flash(data_dir: &Path) -> Result<Option<String>, StoreError> {
    maps::sweep(Path::new(SHARED_DIR));
    // Where it cannot be seen, it is tried: the error says why.
    if matches!(run::last_that_keeps(data_dir), Ok(None)) {
        return Ok(None);
    }
    let dir = DataDir::open(data_dir, DATA_DIR_VERSION).map_err(|source| match source {
        DataDirError::InUse { .. } => StoreError::ServedWithFlash(source),
        source => source.into(),
    })?;
    take_directory(&dir, random_run()?, None)
}

/// The directory is that of `run`, which has no flash.
fn take_directory(
    dir: &DataDir,
    run: u64,
    file: Option<&MemoryFile>,
) -> Result<Option<String>, StoreError> {
    let last = run::last_that_keeps(dir.path()).ok().flatten();
    run::write(dir, run, None, file.map(MemoryFile::name))?;
    remove_checkpoint(dir)?;
    let Some(flash) = last.and_then(|last| last.flash) else { return Ok(None) };
    Region::forget(&flash.uuid);
    Ok(Some(format!(
        "this run is without flash: what flash '{}' holds may be outdated by what is stored and deleted now, so the next start \
         with it is cold; a run that shall not do that is given a --data-dir of its own (this one's is '{}')",
        flash.path,
        dir.path().display()
    )))
}
