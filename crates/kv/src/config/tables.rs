//! Settings that are tables of the configuration file: admission's parameters and the applications' shares. The types
//! are the policy crate's; here are their descriptions, and where in a file a wrong one stands.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use larder_policy::admission::{AdmissionConfig, AdmissionError};
use larder_policy::application::{ApplicationError, ApplicationsTable};
use larder_settings::{Misplaced, Table};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Admission as one source states it: the policy's name alone, or a table of parameters.
#[derive(Clone, Debug, PartialEq)]
pub enum AdmissionSetting {
    /// `admission = "ghost"`, or the flag.
    Name(String),
    /// `[admission]` with `policy` and the parameters.
    Table(Box<AdmissionConfig>),
}

impl AdmissionSetting {
    /// This source over a lower one: a name alone keeps the lower one's parameters.
    #[must_use]
    pub(super) fn over(self, lower: &AdmissionSetting) -> AdmissionSetting {
        match (self, lower) {
            (AdmissionSetting::Name(name), AdmissionSetting::Table(table)) => {
                match AdmissionConfig::from_name(&name) {
                    Ok(named) => AdmissionSetting::Table(Box::new(AdmissionConfig {
                        policy: named.policy,
                        ..(**table).clone()
                    })),
                    // An unknown name is refused when the whole is checked.
                    Err(_) => AdmissionSetting::Name(name),
                }
            }
            (own, _) => own,
        }
    }

    /// The whole configuration, checked.
    ///
    /// # Errors
    /// An unknown policy, or a parameter out of its range.
    pub(super) fn resolve(&self) -> Result<AdmissionConfig, AdmissionError> {
        let config = match self {
            AdmissionSetting::Name(name) => AdmissionConfig::from_name(name)?,
            AdmissionSetting::Table(table) => (**table).clone(),
        };
        config.validate()?;
        Ok(config)
    }
}

impl FromStr for AdmissionSetting {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<AdmissionSetting, Infallible> {
        Ok(AdmissionSetting::Name(name.to_owned()))
    }
}

impl Serialize for AdmissionSetting {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            AdmissionSetting::Name(name) => name.serialize(serializer),
            AdmissionSetting::Table(table) => table.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for AdmissionSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<AdmissionSetting, D::Error> {
        struct NameOrTable;
        impl<'de> Visitor<'de> for NameOrTable {
            type Value = AdmissionSetting;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a policy, or a table")
            }
            fn visit_str<E>(self, name: &str) -> Result<AdmissionSetting, E> {
                Ok(AdmissionSetting::Name(name.to_owned()))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<AdmissionSetting, A::Error> {
                AdmissionConfig::deserialize(MapAccessDeserializer::new(map))
                    .map(|table| AdmissionSetting::Table(Box::new(table)))
            }
        }
        deserializer.deserialize_any(NameOrTable)
    }
}

/// The settings that are tables: no flag has room for their parameters, or for the names of applications.
pub(super) const TABLES: &[Table] = &[
    Table { key: "admission", help: "Which objects go to flash", example: admission_example },
    Table {
        key: "applications",
        help: "Shares of the cache by application (the prefix of a key; \"default\" for keys without one, \"other\" beyond 255): \
               [applications.shares.NAME] with floor, below which others cannot evict it, and ceiling, above which it does not \
               grow, as fractions of the cache",
        example: || "[applications.shares.web]\nfloor = 0.2\nceiling = 0.5\n".to_owned(),
    },
];

fn admission_example() -> String {
    let mut out = String::new();
    let table = toml::Table::try_from(AdmissionConfig::default()).unwrap_or_default();
    print(&mut out, "admission", &table);
    out
}

/// The tables of a file; what else it has is not looked at.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Tables {
    #[serde(default)]
    pub(super) admission: Option<AdmissionSetting>,
    #[serde(default)]
    pub(super) applications: Option<ApplicationsTable>,
}

impl Tables {
    /// Reads and checks them, but for the shares ([`check_shares`]). Admission that is a name is read with the keys that are
    /// flags, and left out here.
    ///
    /// # Errors
    /// Where they are wrong.
    pub(super) fn read(text: &str) -> Result<Tables, Misplaced> {
        let mut tables: Tables = toml::from_str(text).map_err(|e| Misplaced::of_toml(text, &e))?;
        if let Some((table, key, instead)) = stands_elsewhere(text) {
            let message =
                format!("is said by '{instead}', above all tables: write '{instead} =' there");
            return Err(misplaced(text, (table.to_owned(), key.to_owned()), message));
        }
        match &tables.admission {
            Some(table @ AdmissionSetting::Table(_)) => {
                table
                    .resolve()
                    .map_err(|e| misplaced(text, place_of_admission(&e), e.to_string()))?;
            }
            _ => tables.admission = None,
        }
        Ok(tables)
    }
}

/// Checks the shares of the file `text`.
///
/// # Errors
/// Where they are wrong.
pub(super) fn check_shares(
    text: &str,
    table: &ApplicationsTable,
    delimiter: u8,
) -> Result<(), Misplaced> {
    let checked = table.resolve(delimiter);
    checked.map(drop).map_err(|e| misplaced(text, place_of_share(&e), e.to_string()))
}

/// What a check has refused that runs after the parser.
fn misplaced(text: &str, (table, key): (String, String), message: String) -> Misplaced {
    Misplaced { line: line_of(text, &table, &key), key, message }
}

/// The line (from 1) of `key` in table `table` of a file: what a checker needs that runs after the parser. Falls back to
/// the table's header, and to the first line.
fn line_of(text: &str, table: &str, key: &str) -> usize {
    let mut header = String::new();
    let mut fallback = 1;
    for (i, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.split(']').next()) {
            header = name.trim().to_owned();
            if header == table {
                fallback = i + 1;
            }
        } else if let Some((name, _)) = line.split_once('=') {
            let name = name.trim();
            let full = if header.is_empty() { name.to_owned() } else { format!("{header}.{name}") };
            if full == format!("{table}.{key}") {
                return i + 1;
            }
        }
    }
    fallback
}

/// Where admission's parameter or an application's share stands that a check has refused: table and key.
fn place_of_admission(error: &AdmissionError) -> (String, String) {
    let path = match error {
        AdmissionError::Parameter { name, .. } => *name,
        AdmissionError::NoRate => "write_rate.bytes_per_second",
        AdmissionError::UnknownPolicy(_) | AdmissionError::Memory { .. } => "policy",
    };
    match path.rsplit_once('.') {
        Some((table, key)) => (format!("admission.{table}"), key.to_owned()),
        None => ("admission".to_owned(), path.to_owned()),
    }
}

/// The same for shares.
fn place_of_share(error: &ApplicationError) -> (String, String) {
    let shares = "applications.shares";
    match error {
        ApplicationError::Fraction { app, bound, .. } => {
            (format!("{shares}.{app}"), (*bound).to_owned())
        }
        ApplicationError::Crossed { app, .. } => (format!("{shares}.{app}"), "floor".to_owned()),
        ApplicationError::Name(app) | ApplicationError::TooMany(app) => {
            (format!("{shares}.{app}"), app.clone())
        }
        ApplicationError::Floors(_) | ApplicationError::Delimiter(_) => {
            (shares.to_owned(), "shares".to_owned())
        }
    }
}

/// Parameters of the policy crate's that are settings of their own here: table, key, and the setting.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("admission", "first_fill", "first-fill"),
    ("admission.flashiness", "objective", "admission-objective"),
    ("admission.expected_reads", "objective", "admission-objective"),
];

/// The first of [`ELSEWHERE`] that a file has.
fn stands_elsewhere(text: &str) -> Option<(&'static str, &'static str, &'static str)> {
    let file: toml::Table = text.parse().ok()?;
    ELSEWHERE.iter().copied().find(|(table, key, _)| {
        let mut names = table.split('.').chain([*key]);
        let first = names.next().and_then(|name| file.get(name));
        names.fold(first, |below, name| below?.get(name)).is_some()
    })
}

/// What the parameters mean: table, key, description.
const DESCRIPTIONS: &[(&str, &str, &str)] = &[
    (
        "admission",
        "policy",
        "flashiness, flashiness_paper, expected_reads, ghost, reject_first, probability, write_rate, all",
    ),
    ("admission", "min_ttl", "Objects that expire sooner than this many seconds never go to flash"),
    ("admission.probability", "probability", "Chance that an object leaving DRAM goes to flash"),
    (
        "admission.reject_first",
        "window",
        "Keys remembered; 0: as many as flash holds objects, as memory allows",
    ),
    (
        "admission.expected_reads",
        "size_exponent",
        "Rank by expected reads over size to this power; 0 ignores size, 1 is per byte; by the objective 1 or 0",
    ),
    (
        "admission.expected_reads",
        "price",
        "Least worth of a write over what the far end of the log still earns in the same room",
    ),
    ("admission.expected_reads", "least", "Least reads to be expected of what is admitted"),
    (
        "admission.expected_reads",
        "bytes_per_second",
        "Bytes per second for the best; 0: the write budget's rate, if there is one",
    ),
    (
        "admission.expected_reads",
        "self_tuning",
        "Miniature caches over some keys measure whether to ask less of a write, or more",
    ),
    ("admission.ghost", "reads", "Reads in DRAM that send an object to flash"),
    ("admission.ghost", "window", "Keys in the ghost queue; 0: as many as flash holds objects"),
    (
        "admission.write_rate",
        "bytes_per_second",
        "Bytes per second that may be written to flash; 0: the write budget's rate",
    ),
    ("admission.write_rate", "interval", "Seconds between adjustments of the chance"),
    ("admission.flashiness", "reads", "Reads within the horizon that make an object flashy"),
    ("admission.flashiness", "horizon", "Seconds; 0: the time that objects live in the cache"),
    (
        "admission.flashiness",
        "min_score",
        "Least distance from the classifier's plane at which an object is admitted",
    ),
    (
        "admission.flashiness",
        "bytes_per_second",
        "Bytes per second for the best-scored; 0: the write budget's rate, and without one min_score",
    ),
    (
        "admission.flashiness",
        "size_exponent",
        "Where a rate is held: rank by chance over size to this power; 0 ignores size, 1 is per byte; by the objective 0.5 or 0",
    ),
    (
        "admission.flashiness",
        "price",
        "Where a rate is held: least worth of a write over that of what it displaces; 0 spends the rate",
    ),
    ("admission.flashiness", "per_byte", "Divide scores by size"),
    (
        "admission.flashiness",
        "first_training_after",
        "Seconds before the first training; 0: when there are samples enough",
    ),
    ("admission.flashiness", "first_training_samples", "Samples before the first training"),
    ("admission.flashiness", "retrain", "Seconds between trainings; 0: a quarter of the horizon"),
    ("admission.flashiness", "features", "Features of the classifier: extended or paper"),
    ("admission.flashiness", "history", "Memory of keys that left DRAM: sketch or none"),
    ("admission.flashiness", "sample_at", "When features are sampled: decisions or reads"),
    (
        "admission.flashiness",
        "at_leave",
        "What an eviction means for a label: count_misses or close",
    ),
    ("admission.flashiness", "pool", "Which objects may move: victims or everything"),
    ("admission.flashiness.training", "lambda", "Regularisation (Pegasos)"),
    ("admission.flashiness.training", "epochs", "Passes over the samples"),
    (
        "admission.flashiness.training",
        "class_weights",
        "auto, balanced, equal, or { positive = WEIGHT }",
    ),
    (
        "admission.flashiness.training",
        "holdout",
        "Share of samples kept to state precision and recall",
    ),
];

/// Writes a table and those below it, with descriptions.
pub(super) fn print(out: &mut String, name: &str, table: &toml::Table) {
    out.push_str(&format!("[{name}]\n"));
    let is_elsewhere = |key: &str| ELSEWHERE.iter().any(|(t, k, _)| *t == name && *k == key);
    for (key, value) in table.iter().filter(|(k, v)| !v.is_table() && !is_elsewhere(k)) {
        if let Some((_, _, text)) = DESCRIPTIONS.iter().find(|(t, k, _)| *t == name && k == key) {
            out.push_str(&format!("# {text}\n"));
        }
        out.push_str(&format!("{key} = {}\n", number_or(value)));
    }
    for (key, value) in table {
        let Some(below) = value.as_table() else { continue };
        // The weight of a class is a table of one number: it reads better on one line.
        if key == "class_weights" {
            out.push_str(&format!("{key} = {value}\n"));
            continue;
        }
        let bare = key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-');
        let key = if bare { key.clone() } else { toml::Value::String(key.clone()).to_string() };
        out.push('\n');
        print(out, &format!("{name}.{key}"), below);
    }
}

/// Numbers of single precision as short as they were written: 0.2, not 0.20000000298023224.
fn number_or(value: &toml::Value) -> String {
    match value {
        toml::Value::Float(x) if f64::from(*x as f32) == *x => format!("{:?}", *x as f32),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_under_their_table() {
        let text = "port = 1\n[admission]\npolicy = \"all\"\n\n[admission.ghost]\nreads = 0\n[admission.flashiness]\nreads = 1\n";
        assert_eq!(line_of(text, "admission.ghost", "reads"), 6);
        assert_eq!(line_of(text, "admission.flashiness", "reads"), 8);
        assert_eq!(line_of(text, "admission.flashiness", "retrain"), 7);
        assert_eq!(line_of("admission.ghost.reads = 0\n", "admission.ghost", "reads"), 1);
    }

    #[test]
    fn a_name_keeps_the_parameters_beneath_it() {
        let mut below = AdmissionConfig::default();
        below.ghost.reads = 7;
        let table = AdmissionSetting::Table(Box::new(below));
        let merged = AdmissionSetting::Name("ghost".into()).over(&table).resolve().unwrap();
        assert_eq!((merged.policy.as_str(), merged.ghost.reads), ("ghost", 7));
        assert!(AdmissionSetting::Name("lru".into()).over(&table).resolve().is_err());
    }
}
