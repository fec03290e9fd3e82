//! Flashield's flash index in the paper's own form (Eisenman et al., "Flashield: a Key-value Cache that Minimizes Writes
//! to Flash", §3.2, §4.1 and §5.3), to measure Larder's against. It is a model for measurements: it answers from the
//! truth, and counts what the real thing would read.
//!
//! - [`table`]: a multiple-choice hash table without chains, and a Bloom filter for each segment.
//! - [`placement`]: objects at any byte of a segment, where one of a number of hash functions of the key says.

pub mod placement;
pub mod table;

/// Why a measurement cannot run.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}: it must be {must}")]
pub struct SettingError {
    /// Which setting.
    pub name: &'static str,
    /// As given.
    pub value: String,
    /// What it must be.
    pub must: &'static str,
}

fn check(
    name: &'static str,
    value: impl ToString,
    good: bool,
    must: &'static str,
) -> Result<(), SettingError> {
    if good {
        return Ok(());
    }
    let value = value.to_string();
    // 1e300 in three hundred digits is a number too.
    let value = match value.parse::<f64>() {
        Ok(number) if value.len() > 20 => larder_base::Short(number).to_string(),
        _ => value,
    };
    Err(SettingError { name, value, must })
}
