//! A start that goes on without the volumes for which something does not answer: they come later.

use std::sync::Arc;

use super::open::{CacheConfig, CacheError};
use super::running::Running;
use super::volume::Volume;

/// A volume that a start went on without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComesLater {
    /// Its name.
    pub name: String,
    /// What does not answer, and what to do.
    pub why: String,
}

/// The volume that alone keeps a start from going on, where it may come another time without anything being changed.
fn kept_by(error: &CacheError) -> Option<&str> {
    match error {
        CacheError::NotYet { name, .. } | CacheError::Journal { name, .. } if error.may_pass() => {
            Some(name)
        }
        _ => None,
    }
}

/// Opens a cache for these volumes.
type Open<'a> = dyn FnMut(CacheConfig, &[Arc<Volume>]) -> Result<Running, CacheError> + 'a;

/// Opens with `open` what can be had: without each volume for which something does not answer now. Such a volume is awaited from then on, and what
/// is dirty of it is kept. (A start that fails ends in good order, and the next finds what it left.) Returns those that come later: whoever opened their
/// stores lets go of them. A record begins with all of its volumes: none comes later then.
///
/// # Errors
/// Those of `open` for anything else.
pub fn open_what_answers(
    mut config: CacheConfig,
    mut volumes: Vec<Arc<Volume>>,
    open: &mut Open<'_>,
) -> Result<(Running, Vec<ComesLater>), CacheError> {
    let mut later = Vec::new();
    loop {
        let error = match open(config.clone(), &volumes) {
            Ok(running) => return Ok((running, later)),
            Err(error) => error,
        };
        let name = kept_by(&error).filter(|_| config.record.is_none()).map(str::to_owned);
        let Some(name) = name.filter(|name| volumes.iter().any(|v| v.name() == name)) else {
            return Err(error);
        };
        volumes.retain(|volume| volume.name() != name);
        config.awaited.insert(name.clone());
        later.push(ComesLater { name, why: error.to_string() });
    }
}
