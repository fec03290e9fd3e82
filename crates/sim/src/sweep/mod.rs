//! Sweeps: one experiment run at every combination of some of its keys' values.
//!
//! - [`Sweep`]: what is swept, parsed from TOML, and its [`Cell`]s.
//! - [`log`]: the file of finished cells, from which a sweep goes on after it was interrupted.
//! - [`Results`]: outcomes as tables ([`Grid`](crate::report::Grid)), for CSV, Parquet and reports.

pub mod log;
mod parquet;
mod results;

use std::collections::{BTreeMap, BTreeSet};

use larder_base::{HashKey, KeyHasher};
use serde::Deserialize;
use toml::{Table, Value};

use crate::experiment::place::line_of;
use crate::experiment::{Experiment, ExperimentError};
use crate::report::shown;

pub use parquet::{ParquetFailed, write_parquet};
pub use results::Results;

/// Most cells of one sweep.
pub const MOST_CELLS: usize = 100_000;

/// One key of the experiment and the values that it takes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// The key, with its tables, dotted: `workload.trace`, `cache.flash`, `seed`. In a list of tables (`cache`) the next part
    /// may be the name of one, or its number from 0; else all of them are meant.
    pub key: String,
    /// Its values.
    pub values: Vec<Value>,
}

/// A sweep as the file states it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stated {
    #[serde(default)]
    title: String,
    /// The experiment's file, beside the sweep's.
    #[serde(default)]
    file: Option<String>,
    /// Or the experiment itself.
    #[serde(default)]
    experiment: Option<Table>,
    #[serde(default, rename = "axis")]
    axes: Vec<Axis>,
}

/// An experiment and the axes along which it is varied.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    /// One line on what it shows.
    pub title: String,
    /// What is varied; the last varies fastest.
    pub axes: Vec<Axis>,
    base: Table,
}

/// Why a sweep cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The text is not a sweep.
    #[error("'{file}' line {line}: {message}")]
    Parse {
        /// The file's name as given.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// It cannot be meant.
    #[error("'{file}': {problem}")]
    Meaning {
        /// The file's name as given.
        file: String,
        /// What is wrong, and the remedy.
        problem: String,
    },
    /// Two cells that are one, such as at the values `1m` and `1048576`.
    #[error("cells {one} and {other} are the same experiment: leave out one of the values")]
    Same {
        /// The axes' values of the first.
        one: String,
        /// And of the second.
        other: String,
    },
    /// The experiment is none at this cell.
    #[error("cell {cell}: {source}")]
    Cell {
        /// The axes' values.
        cell: String,
        /// What is wrong.
        source: Box<ExperimentError>,
    },
}

/// One combination of the axes' values.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// The value on each axis, in the axes' order.
    pub values: Vec<Value>,
    /// The experiment there.
    pub experiment: Experiment,
    /// Names configuration, version and what [`Sweep::cells`] was told of the trace: 32 hexadecimal digits.
    pub key: String,
}

impl Sweep {
    /// Reads a sweep's text; `file` is for messages, `read` gives the text of the experiment's file if the sweep names one.
    ///
    /// # Errors
    /// [`SweepError::Parse`] with the line, [`SweepError::Meaning`] for axes that cannot be meant.
    pub fn parse(
        text: &str,
        file: &str,
        read: impl FnOnce(&str) -> Result<(String, String), String>,
    ) -> Result<Sweep, SweepError> {
        let stated: Stated =
            toml::from_str(text).map_err(|e| parse_error::<Stated>(&e, text, file))?;
        let meaning = |problem: String| SweepError::Meaning { file: file.to_owned(), problem };
        let base = match (stated.file, stated.experiment) {
            (Some(named), None) => {
                let (path, text) = read(&named).map_err(meaning)?;
                toml::from_str(&text).map_err(|e| parse_error::<Table>(&e, &text, &path))?
            }
            (None, Some(table)) => table,
            (Some(_), Some(_)) => {
                return Err(meaning("file and [experiment] are both given: give one".to_owned()));
            }
            (None, None) => {
                let remedy = "give file = \"experiment.toml\", or [experiment] with its tables";
                return Err(meaning(format!("no experiment: {remedy}")));
            }
        };
        let mut keys = BTreeSet::new();
        for axis in &stated.axes {
            let key = &axis.key;
            if axis.values.is_empty() {
                return Err(meaning(format!("axis '{key}' has no values: give at least one")));
            }
            if !keys.insert(key.clone()) {
                return Err(meaning(format!("axis '{key}' is there twice: put its values in one")));
            }
            if key.split('.').any(str::is_empty) {
                let example = "give a key of the experiment, such as cache.flash";
                return Err(meaning(format!("axis '{key}': {example}")));
            }
            for (i, value) in axis.values.iter().enumerate() {
                if axis.values[..i].contains(value) {
                    return Err(meaning(format!(
                        "axis '{key}' has the value {} twice",
                        shown(value)
                    )));
                }
            }
        }
        let sweep = Sweep { title: stated.title, axes: stated.axes, base };
        match sweep.size() {
            Some(n) if n <= MOST_CELLS => Ok(sweep),
            _ => {
                let sizes: Vec<String> =
                    sweep.axes.iter().map(|a| a.values.len().to_string()).collect();
                let product = sizes.join(" × ");
                Err(meaning(format!(
                    "{product} cells are more than {MOST_CELLS}: give fewer values"
                )))
            }
        }
    }

    fn size(&self) -> Option<usize> {
        self.axes.iter().try_fold(1usize, |n, axis| n.checked_mul(axis.values.len()))
    }

    /// All cells, each checked. `stamp` tells states of a trace apart (such as its length and time of change), so that
    /// results of another are not taken for this one's; `version` is the program's.
    ///
    /// # Errors
    /// [`SweepError::Cell`] for the first that is no experiment, [`SweepError::Same`] for two that are one.
    pub fn cells(
        &self,
        version: &str,
        mut stamp: impl FnMut(&str) -> String,
    ) -> Result<Vec<Cell>, SweepError> {
        let hasher = KeyHasher::new(HashKey(*b"larder sim sweep"));
        let count = self.size().unwrap_or(0);
        let mut cells: Vec<Cell> = Vec::with_capacity(count);
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        for number in 0..count {
            let mut rest = number;
            let mut values: Vec<Value> = Vec::with_capacity(self.axes.len());
            for axis in self.axes.iter().rev() {
                values.push(axis.values[rest % axis.values.len()].clone());
                rest /= axis.values.len();
            }
            values.reverse();
            let failed = |source| SweepError::Cell {
                cell: self.describe(&values),
                source: Box::new(source),
            };
            let mut table = self.base.clone();
            for (axis, value) in self.axes.iter().zip(&values) {
                let path: Vec<&str> = axis.key.split('.').collect();
                set(&mut table, &path, value).map_err(|problem| {
                    failed(ExperimentError::Value {
                        key: axis.key.clone(),
                        value: shown(value),
                        must: problem,
                    })
                })?;
            }
            let experiment = experiment(table).map_err(failed)?;
            // Serialised as JSON, whose maps are sorted: one text for one meaning.
            let json = serde_json::to_value(&experiment).unwrap_or_default();
            let text = format!("{version}\n{}\n{json}", stamp(&experiment.workload.trace));
            let key = format!("{:032x}", hasher.hash(text.as_bytes()).0);
            if let Some(other) = seen.insert(key.clone(), number) {
                return Err(SweepError::Same {
                    one: self.describe(&cells[other].values),
                    other: self.describe(&values),
                });
            }
            cells.push(Cell { values, experiment, key });
        }
        Ok(cells)
    }

    /// The axes' values in words: `cache.flash=64m seed=1`.
    pub fn describe(&self, values: &[Value]) -> String {
        let all: Vec<String> =
            self.axes.iter().zip(values).map(|(a, v)| format!("{}={}", a.key, shown(v))).collect();
        if all.is_empty() { "0".to_owned() } else { all.join(" ") }
    }
}

fn experiment(table: Table) -> Result<Experiment, ExperimentError> {
    let experiment: Experiment = Value::Table(table).try_into().map_err(|e: toml::de::Error| {
        let must = e.message().lines().collect::<Vec<_>>().join(" ");
        ExperimentError::Value { key: "experiment".to_owned(), value: "not one".to_owned(), must }
    })?;
    experiment.validate()?;
    Ok(experiment)
}

fn parse_error<T: serde::de::DeserializeOwned>(
    e: &toml::de::Error,
    text: &str,
    file: &str,
) -> SweepError {
    let line = line_of::<T>(text, e);
    let message = e.message().lines().next().unwrap_or("cannot be read").to_owned();
    SweepError::Parse { file: file.to_owned(), line, message }
}

/// Sets the key at `path`, making tables on the way. In lists see [`Axis::key`].
fn set(table: &mut Table, path: &[&str], value: &Value) -> Result<(), String> {
    let Some((&first, rest)) = path.split_first() else { return Ok(()) };
    if rest.is_empty() {
        table.insert(first.to_owned(), value.clone());
        return Ok(());
    }
    let next = table.entry(first).or_insert_with(|| Value::Table(Table::new()));
    descend(next, first, rest, value)
}

fn descend(at: &mut Value, name: &str, rest: &[&str], value: &Value) -> Result<(), String> {
    match at {
        Value::Table(table) => set(table, rest, value),
        Value::Array(list) => {
            let chosen = rest.first().and_then(|part| {
                let named = |v: &Value| {
                    v.get("name").or_else(|| v.get("kind")).and_then(Value::as_str) == Some(part)
                };
                let number = part.parse::<usize>().ok().filter(|n| *n < list.len());
                number.or_else(|| list.iter().position(named))
            });
            match chosen {
                Some(i) if rest.len() > 1 => descend(&mut list[i], name, &rest[1..], value),
                Some(_) => Err(format!("'{name}' names a whole entry: name a key in it")),
                None => list.iter_mut().try_for_each(|entry| descend(entry, name, rest, value)),
            }
        }
        _ => Err(format!("'{name}' is a value, not a table, in the experiment")),
    }
}

#[cfg(test)]
mod tests;
