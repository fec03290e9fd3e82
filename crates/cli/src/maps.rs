//! `larder maps`: the maps that caches keep in shared memory.

use std::path::{Path, PathBuf};

use clap::Parser;
use larder_base::ByteSize;
use larder_runtime::maps::{self, MapFile, MapState, Owner, OwnerKind};
use larder_runtime::{SHARED_DIR, SharedError};
use serde_json::json;

use crate::error::CliError;
use crate::out::print_json;
use crate::table::Columns;

/// List and remove the maps that caches keep in shared memory, to be warm after a crash
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    List(ListArgs),
    Remove(RemoveArgs),
}

/// Show each map: its size, whose it is, whether a process has it, whether its owner is gone
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder maps list
  larder maps list --json")]
struct ListArgs {
    /// Print as JSON.
    #[arg(long)]
    json: bool,
}

/// Remove maps: those whose owner is gone, or those that are named
///
/// Every start of `larder kv` and `larder block` removes the maps whose owner is gone too. A map that is in use is never removed.
/// A cache whose map is removed is cold at its next start, that of `larder block` but for what its log has.
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  larder maps remove
  larder maps remove larder-5f0c3a51-93cf-4e62-a1f5-6c2f7a3bd9e1
  larder maps remove --yes")]
struct RemoveArgs {
    /// These maps, whatever they keep warm; without a name, those whose owner is gone.
    names: Vec<String>,
    /// All maps that no process has, those that keep a cache warm too.
    #[arg(long, conflicts_with = "names")]
    yes: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), CliError> {
    match &args.command {
        Command::List(args) => list(args),
        Command::Remove(args) => remove(args),
    }
}

fn all() -> Result<Vec<MapFile>, CliError> {
    maps::list(Path::new(SHARED_DIR))
        .map_err(|e| CliError::Runtime(format!("the maps in '{SHARED_DIR}' cannot be listed: {e}")))
}

/// A word for programs, and a remark for people.
fn said(map: &MapFile) -> (&'static str, String) {
    let gone = |of: &str| {
        let what = map
            .owner
            .as_ref()
            .map_or("its owner".into(), |o| format!("'{}'", o.decides().display()));
        format!("{what} {of}")
    };
    match &map.state {
        MapState::InUse(Some(holder)) => ("in-use", format!("in use by {holder}")),
        MapState::InUse(None) => ("in-use", "in use".to_owned()),
        MapState::Stale if map.owner.is_none() => ("stale", "stale: it is empty".to_owned()),
        MapState::Stale => ("stale", format!("stale: {}", gone("is gone"))),
        MapState::Warm => ("warm", "keeps its cache warm".to_owned()),
        MapState::Away => ("away", gone("is moved or not mounted")),
        MapState::Unknown => ("unknown", "owner unknown: an earlier version made it".to_owned()),
        MapState::Foreign(why) => ("foreign", format!("not this user's: it {why}")),
    }
}

fn owner_text(map: &MapFile) -> String {
    map.owner
        .as_ref()
        .map_or("unknown".to_owned(), |o| format!("{} {}", o.kind, o.directory.display()))
}

fn list(args: &ListArgs) -> Result<(), CliError> {
    let all = all()?;
    if args.json {
        let maps: Vec<serde_json::Value> = all
            .iter()
            .map(|map| {
                let owner = map.owner.as_ref();
                json!({
                    "name": map.name,
                    "bytes": map.bytes,
                    "command": owner.map(|o| o.kind.to_string()),
                    "directory": owner.map(|o| o.directory.display().to_string()),
                    "cache": owner.map(|o| o.cache.display().to_string()),
                    "state": said(map).0,
                    "remark": said(map).1,
                })
            })
            .collect();
        return print_json(&json!({ "directory": SHARED_DIR, "maps": maps }));
    }
    if all.is_empty() {
        return outln!("no maps in {SHARED_DIR}");
    }
    let mut table = Columns::new(1, 4, ["map", "owner", "cache", "state", "size"]);
    for map in &all {
        let cache = map.owner.as_ref().map_or("–".to_owned(), |o| o.cache.display().to_string());
        let size = ByteSize(map.bytes).to_string();
        table.row([map.name.clone(), owner_text(map), cache, said(map).1, size]);
    }
    table.print()?;
    let stale: Vec<&MapFile> = all.iter().filter(|m| m.state == MapState::Stale).collect();
    if !stale.is_empty() {
        let bytes = stale.iter().map(|m| m.bytes).sum();
        proseln!(
            "{} of them stale, {}: `larder maps remove` removes those, and so does every start of a cache",
            stale.len(),
            ByteSize(bytes)
        )?;
    }
    Ok(())
}

/// A map by what the user calls it: its name, its path, or its UUID.
fn named<'a>(all: &'a [MapFile], given: &str) -> Result<&'a MapFile, CliError> {
    let name = Path::new(given)
        .strip_prefix(SHARED_DIR)
        .map_or_else(|_| PathBuf::from(given), Path::to_path_buf);
    all.iter()
        .find(|map| {
            Path::new(&map.name) == name || map.name.strip_prefix("larder-") == name.to_str()
        })
        .ok_or_else(|| {
            CliError::Usage(format!(
                "no map '{given}' in {SHARED_DIR}: `larder maps list` shows those that are there"
            ))
        })
}

fn remove(args: &RemoveArgs) -> Result<(), CliError> {
    let all = all()?;
    let chosen: Vec<&MapFile> = if args.names.is_empty() {
        let wanted = |map: &&MapFile| match map.state {
            MapState::Stale => true,
            MapState::InUse(_) | MapState::Foreign(_) => false,
            MapState::Warm | MapState::Away | MapState::Unknown => args.yes,
        };
        all.iter().filter(wanted).collect()
    } else {
        // All names before the first is removed.
        args.names.iter().map(|name| named(&all, name)).collect::<Result<_, _>>()?
    };
    for map in &chosen {
        let removed = maps::remove(Path::new(SHARED_DIR), &map.name).map_err(|e| {
            CliError::Runtime(match e {
                SharedError::InUse { holder, .. } => format!(
                    "map '{}' is in use{}: stop that process first",
                    map.name,
                    holder.map_or(String::new(), |h| format!(" by {h}"))
                ),
                SharedError::Foreign { why, .. } => {
                    format!("map '{}' {why}: run this as that user, or remove the file", map.name)
                }
                other => other.to_string(),
            })
        })?;
        if !removed {
            continue;
        }
        let cache = |o: &Owner| format!("the cache '{}'", o.cache.display());
        let then = match (&map.state, map.owner.as_ref().map(|o| (o.kind, cache(o)))) {
            (MapState::Stale, _) => String::new(),
            (_, Some((OwnerKind::Kv, cache))) => format!(": {cache} is cold at its next start"),
            (_, Some((OwnerKind::Block, cache))) => format!(
                ": {cache} is cold at its next start but for what its log on the device has"
            ),
            (_, None) => ": the cache that it belonged to is cold at its next start".to_owned(),
        };
        proseln!("removed {}, {}{then}", map.name, ByteSize(map.bytes))?;
    }
    let kept = all.len() - chosen.len();
    if args.names.is_empty() && chosen.is_empty() {
        proseln!("nothing to remove: {kept} maps, none of them stale (`larder maps list`)")?;
    }
    Ok(())
}
