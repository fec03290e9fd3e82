//! Where the figures of an output come from.

use larder_trace::HashOf;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::CliError;
use crate::out::as_json;
use crate::table::print_words;

/// What every output names, so that it can be made again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Origin {
    /// Of the program.
    version: &'static str,
    seed: u64,
    /// The trace's name; none where nothing was read.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
    /// Of the requests that were simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_hash: Option<String>,
    /// Every flag that the figures depend on, by its name with `_` for `-`, as it was meant: defaults filled in, sizes in
    /// bytes, without what is not set. In a row of a list without those that the row's own keys say.
    configuration: Map<String, Value>,
}

/// A row of an output that is a list: its figures, and where they come from.
#[derive(Debug, Serialize)]
pub(super) struct Named<'a, T> {
    #[serde(flatten)]
    figures: &'a T,
    #[serde(flatten)]
    origin: &'a Origin,
}

impl Origin {
    /// `configuration` comes from the function of that name.
    pub(super) fn new(
        seed: u64,
        trace: &str,
        hash: &HashOf,
        configuration: Map<String, Value>,
    ) -> Origin {
        let (trace, hash) = (trace.to_owned(), hash.text());
        Origin {
            trace: Some(trace),
            trace_hash: Some(hash),
            ..Origin::without_trace(seed, configuration)
        }
    }

    /// Of figures that no trace is behind.
    pub(super) fn without_trace(seed: u64, configuration: Map<String, Value>) -> Origin {
        let version = env!("CARGO_PKG_VERSION");
        Origin { version, seed, trace: None, trace_hash: None, configuration }
    }

    pub(super) fn of<'a, T: Serialize>(&'a self, rows: &'a [T]) -> Vec<Named<'a, T>> {
        rows.iter().map(|figures| Named { figures, origin: self }).collect()
    }

    /// The line under a table.
    pub(super) fn line(&self) -> String {
        let Origin { version, seed, .. } = self;
        let trace = match (&self.trace, &self.trace_hash) {
            (Some(trace), Some(hash)) => format!(", trace {trace}, hash {hash}"),
            _ => String::new(),
        };
        format!("larder {version}, seed {seed}{trace}")
    }

    /// The configuration as words, `name=value`; without what is not set.
    fn words(&self) -> Vec<String> {
        fn text(value: &Value) -> Option<String> {
            match value {
                Value::Null => None,
                // Nothing was given.
                Value::Array(all) if all.is_empty() => None,
                Value::String(text) => Some(text.clone()),
                Value::Array(all) => {
                    Some(all.iter().filter_map(text).collect::<Vec<_>>().join(","))
                }
                Value::Object(all) => {
                    let one = |(k, v)| text(v).map(|v| format!("{k}={v}"));
                    Some(format!("({})", all.iter().filter_map(one).collect::<Vec<_>>().join(" ")))
                }
                other => Some(other.to_string()),
            }
        }
        let one = |(name, value): (&String, &Value)| text(value).map(|v| format!("{name}={v}"));
        self.configuration.iter().filter_map(one).collect()
    }

    /// What stands under a table: version, seed and trace, and below them the configuration.
    ///
    /// # Errors
    /// As [`print_words`].
    pub(super) fn print(&self) -> Result<(), CliError> {
        proseln!("{}", self.line())?;
        self.print_configuration()
    }

    /// The configuration alone.
    ///
    /// # Errors
    /// As [`print_words`].
    pub(super) fn print_configuration(&self) -> Result<(), CliError> {
        let words = std::iter::once("configuration:".to_owned()).chain(self.words());
        print_words(&words.collect::<Vec<_>>())
    }

    /// For a report.
    pub(super) fn facts(&self) -> Vec<(String, String)> {
        let mut facts = vec![("version", self.version.to_owned()), ("seed", self.seed.to_string())];
        facts.extend(self.trace.clone().map(|trace| ("trace", trace)));
        facts.extend(self.trace_hash.clone().map(|hash| ("trace hash", hash)));
        facts.push(("configuration", self.words().join("\n")));
        facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// An object of `own` and, where a trace was read, of `input`, without what is not set.
///
/// # Errors
/// None that is known: flags serialise as JSON.
pub(super) fn configuration(
    input: Option<&crate::trace::Settings>,
    own: &impl Serialize,
) -> Result<Map<String, Value>, CliError> {
    let mut all = Map::new();
    for value in [as_json(&input)?, as_json(own)?] {
        if let Value::Object(entries) = value {
            all.extend(entries.into_iter().filter(|(_, value)| !value.is_null()));
        }
    }
    Ok(all)
}
