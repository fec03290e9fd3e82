//! Applications of a cache of objects: what is stated of them, and what each has had.

use std::collections::BTreeMap;

use larder_engine::kv::AppStats;
use larder_policy::application::{Applications, ApplicationsConfig};
use serde::Serialize;
use serde_json::Value;

use super::error::{ExperimentError, value};
use super::spec::Hybrid;

/// What ends the prefix of a key where a server is not told otherwise. No key of a simulation has one.
const DELIMITER: u8 = b':';

/// What an application has had of a cache of objects after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AppFigures {
    /// Reads.
    pub reads: u64,
    /// Reads answered from DRAM.
    pub hits_dram: u64,
    /// Reads answered from flash.
    pub hits_flash: u64,
    /// Reads answered, of all its reads.
    pub hit_ratio: f64,
    /// Objects set: written by the trace, or brought in after a miss.
    pub sets: u64,
    /// Objects evicted from DRAM.
    pub evictions: u64,
    /// What its objects have of the DRAM for objects at the end: what floor and ceiling are fractions of.
    pub dram_share: f64,
    /// What its records have of the flash at the end: what the ceiling is a fraction of.
    pub flash_share: f64,
}

impl AppFigures {
    /// Its counts since `before`, in a cache of so many bytes of DRAM for objects and of flash.
    pub(super) fn of(now: &AppStats, before: &AppStats, dram: u64, flash: u64) -> AppFigures {
        let share = |part: u64, whole: u64| match whole {
            0 => 0.0,
            whole => part as f64 / whole as f64,
        };
        let reads = now.gets - before.gets;
        let (hits_dram, hits_flash) =
            (now.hits_dram - before.hits_dram, now.hits_flash - before.hits_flash);
        AppFigures {
            reads,
            hits_dram,
            hits_flash,
            hit_ratio: share(hits_dram + hits_flash, reads),
            sets: now.sets - before.sets,
            evictions: now.evictions - before.evictions,
            dram_share: share(now.dram_bytes, dram),
            flash_share: share(now.flash_bytes, flash),
        }
    }

    /// Whether a figure of this name is one of some application's: `applications_NAME_hit_ratio`.
    pub(super) fn has(figure: &str) -> bool {
        let Some(rest) = figure.strip_prefix("applications_") else { return false };
        let Ok(Value::Object(all)) = serde_json::to_value(AppFigures::default()) else {
            return false;
        };
        all.keys().any(|figure| {
            let name = rest.strip_suffix(figure.as_str()).and_then(|rest| rest.strip_suffix('_'));
            name.is_some_and(|name| !name.is_empty())
        })
    }
}

/// The engine's configuration, and names by the trace's numbers.
pub(super) type Stated = (ApplicationsConfig, BTreeMap<u32, String>);

/// What is stated of the applications of the cache `name`.
///
/// # Errors
/// Shares that a server refuses, with its words; names that no prefix of a key, and shares that no application of the trace can have.
pub(super) fn stated(name: &str, c: &Hybrid) -> Result<Stated, ExperimentError> {
    let refused = |source| ExperimentError::Applications { name: name.to_owned(), source };
    let key = |field: &str| format!("cache '{name}' {field}");
    let table = c.applications.clone().unwrap_or_default();
    let config = table.resolve(DELIMITER).map_err(refused)?;
    let mut known = Applications::new(&config).map_err(refused)?;
    let mut names = BTreeMap::new();
    for (number, called) in &c.application_names {
        let Ok(number) = number.parse() else {
            let must = "say by its number in the trace which application is called so";
            return Err(value(key("application_names"), format!("{number} = '{called}'"), must));
        };
        known.register(called).map_err(refused)?;
        names.insert(number, called.clone());
    }
    let called = |wanted: &str| names.values().any(|called| called == wanted);
    for share in table.shares.keys() {
        let number = share.parse::<u32>().ok();
        let plain = number.is_some_and(|n| n > 0 && n.to_string() == *share);
        let named = number.is_some_and(|n| names.contains_key(&n));
        if share != "default" && share != "other" && !called(share) && (!plain || named) {
            let must = "no application of a trace is called so: name it by its number there, or say its number in application_names";
            return Err(value(key("applications.shares"), format!("'{share}'"), must));
        }
    }
    Ok((config, names))
}
