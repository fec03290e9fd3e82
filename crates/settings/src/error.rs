//! What is said of settings that cannot be meant: one line that names the thing, its value and the remedy.

use std::path::PathBuf;

/// Settings that were refused.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file could not be read.
    #[error("configuration file '{}' cannot be read: {source}", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file says something that is not a setting, or gives one a value that it cannot have.
    #[error("configuration file '{}' {at} ({command} --print-config shows every key)", path.display())]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where in it, and what is wrong.
        at: Misplaced,
        /// The command as it is typed.
        command: &'static str,
    },
    /// Flags that cannot be had together, or one that is missing, as clap says it.
    #[error("{0}")]
    Flags(String),
}

/// Something wrong at a place of a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: '{key}': {message}")]
pub struct Misplaced {
    /// From 1.
    pub line: usize,
    /// The key on that line.
    pub key: String,
    /// What is wrong, and what to write instead.
    pub message: String,
}

impl Misplaced {
    /// What toml says of `text`. A key that it does not know is told the nearest that it would.
    pub fn of_toml(text: &str, error: &toml::de::Error) -> Misplaced {
        let line = line_of(text, error.span().map_or(0, |s| s.start));
        let key = text.lines().nth(line - 1).unwrap_or_default();
        let key = key.split('=').next().unwrap_or_default().trim().to_owned();
        let said = error.message().lines().next().unwrap_or("cannot be read");
        let message = match said.split_once(", expected") {
            Some((what, known)) if what.starts_with("unknown field") => {
                no_setting(&key, known.split('`').skip(1).step_by(2))
            }
            _ => said.to_owned(),
        };
        Misplaced { line, key, message }
    }
}

/// Line of a place in a text, from 1.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes().iter().take(at).filter(|&&b| b == b'\n').count()
}

/// What to say of a key that is none of `known`.
pub(crate) fn no_setting<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> String {
    match nearest(key, known) {
        Some(near) => format!("is no setting; there is '{near}'"),
        None => "is no setting".to_owned(),
    }
}

/// The name next to `key`, if one is near: at most a third of it is to be changed.
pub fn nearest<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (far, name) = known.map(|name| (strsim::osa_distance(key, name), name)).min()?;
    (far * 3 <= name.len()).then_some(name)
}

/// A setting whose value cannot be meant.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} '{value}': {remedy}")]
pub struct Refused {
    /// Which setting.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// What to write instead.
    pub remedy: String,
}

impl Refused {
    /// That `key` cannot have `value`, and what to write instead.
    pub fn new(key: &'static str, value: impl ToString, remedy: impl Into<String>) -> Refused {
        Refused { key, value: value.to_string(), remedy: remedy.into() }
    }
}
