//! The list of cells, as a TOML file states it.

use std::path::Path;

use larder_trace::{Format, Options, Request, TraceError, ValueSizes};
use serde::{Deserialize, Serialize};

use crate::kv::workload::Workload;

/// Whether a trace took part when our default settings were chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Settings were chosen on it: what it shows is no evidence for them.
    Tuned,
    /// Results are claimed on it.
    Claimed,
}

/// A trace of the table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TraceSpec {
    /// Its name in the table.
    pub name: String,
    /// A file below the directory of traces, `gen:…` (`{traces}` stands for that directory), or a workload of `larder bench admission`
    /// as `workload:NAME`.
    pub source: String,
    /// Whether settings were chosen on it.
    pub role: Role,
    /// Format, where it is not told from the contents.
    #[serde(default)]
    pub format: Option<String>,
    /// Requests per second, for traces without times.
    #[serde(default)]
    pub rate: Option<f64>,
    /// Split block requests into pages of so many bytes.
    #[serde(default)]
    pub pages: Option<u32>,
    /// The first so many requests alone; of a `workload:`, how many are made.
    #[serde(default)]
    pub limit: Option<u64>,
    /// Sizes of values by key, for traces of keys alone.
    #[serde(default)]
    pub value_sizes: Option<ValueSizes>,
    /// Seeds that a median is taken of, where chance is in the trace.
    #[serde(default = "one")]
    pub seeds: u64,
}

fn one() -> u64 {
    1
}

/// The whole list.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// What it is.
    pub title: String,
    /// Flash as shares of the bytes of all objects.
    pub flash: Vec<f64>,
    /// All memory as shares of flash.
    pub memory: Vec<f64>,
    /// Budgets as shares of what `all` writes.
    pub budgets: Vec<f64>,
    /// Traces.
    #[serde(rename = "trace")]
    pub traces: Vec<TraceSpec>,
}

/// A trace, a size of flash and a size of memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The trace's name.
    pub trace: String,
    /// Flash as a share of the bytes of all objects.
    #[serde(rename = "flash_share")]
    pub flash: f64,
    /// Memory as a share of flash.
    #[serde(rename = "memory_share")]
    pub memory: f64,
}

impl Cell {
    /// `TRACE:FLASH:MEMORY`, shares in percent.
    pub fn name(&self) -> String {
        let percent = |share: f64| (share * 1e6).round() / 1e4;
        format!("{}:{}:{}", self.trace, percent(self.flash), percent(self.memory))
    }

    /// Whether `pattern` names it: `TRACE`, `TRACE:FLASH` or `TRACE:FLASH:MEMORY`.
    pub fn is(&self, pattern: &str) -> bool {
        let name = self.name();
        name == pattern || name.starts_with(&format!("{pattern}:"))
    }
}

/// Why a list of cells cannot be meant.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum SpecError {
    /// Not such a file.
    #[error("'{file}': {message}")]
    Parse {
        /// Its name.
        file: String,
        /// What is wrong.
        message: String,
    },
    /// A value out of its range.
    #[error("'{file}': {key} is {value}: it must be {must}")]
    Value {
        /// The file's name.
        file: String,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What it must be.
        must: &'static str,
    },
    /// A pattern that names no cell.
    #[error(
        "'{0}' names no cell: write TRACE, TRACE:FLASH or TRACE:FLASH:MEMORY, shares in percent, such as {1}"
    )]
    NoCell(String, String),
}

impl Table {
    /// Reads a list.
    ///
    /// # Errors
    /// [`SpecError`], not of a pattern.
    pub fn parse(text: &str, file: &str) -> Result<Table, SpecError> {
        let named = || file.to_owned();
        let table: Table = toml::from_str(text).map_err(|e| SpecError::Parse {
            file: named(),
            message: e.to_string().trim().to_owned(),
        })?;
        let check = |ok: bool, key: String, value: String, must| {
            if ok { Ok(()) } else { Err(SpecError::Value { file: named(), key, value, must }) }
        };
        for (key, shares) in
            [("flash", &table.flash), ("memory", &table.memory), ("budgets", &table.budgets)]
        {
            let text = || format!("{shares:?}");
            check(!shares.is_empty(), key.to_owned(), text(), "at least one share")?;
            let within = shares.iter().all(|s| (1e-4..=1.0).contains(s));
            check(within, key.to_owned(), text(), "shares between 0.0001 and 1")?;
        }
        check(!table.traces.is_empty(), "trace".to_owned(), "none".to_owned(), "at least one")?;
        for (i, t) in table.traces.iter().enumerate() {
            let key = |name: &str| format!("trace {} {name}", t.name);
            let repeats = table.traces[..i].iter().any(|other| other.name == t.name);
            let plain = !t.name.is_empty() && !t.name.contains([':', ',']);
            let must = "a name of its own without ':' and ','";
            check(plain && !repeats, key("name"), t.name.clone(), must)?;
            if let Some(format) = &t.format {
                let known = format.parse::<Format>().is_ok();
                check(known, key("format"), format.clone(), "a format of `larder trace formats`")?;
            }
            if let Some(rate) = t.rate {
                let ok = rate.is_finite() && rate > 0.0;
                check(ok, key("rate"), rate.to_string(), "requests per second, above 0")?;
            }
            check((1..=100).contains(&t.seeds), key("seeds"), t.seeds.to_string(), "1 to 100")?;
            if let Some(name) = t.source.strip_prefix("workload:") {
                let known = Workload::named(name).is_some();
                let must = "a workload of `larder bench admission --list-workloads`";
                check(known, key("source"), t.source.clone(), must)?;
            }
        }
        Ok(table)
    }

    /// All cells, trace by trace.
    pub fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for trace in &self.traces {
            for &flash in &self.flash {
                for &memory in &self.memory {
                    cells.push(Cell { trace: trace.name.clone(), flash, memory });
                }
            }
        }
        cells
    }

    /// The cells that any of `patterns` names, in the table's order; all if there are no patterns.
    ///
    /// # Errors
    /// A pattern that names none.
    pub fn chosen(&self, patterns: &[String]) -> Result<Vec<Cell>, SpecError> {
        let cells = self.cells();
        for pattern in patterns {
            if !cells.iter().any(|cell| cell.is(pattern)) {
                let such = cells.first().map(Cell::name).unwrap_or_default();
                return Err(SpecError::NoCell(pattern.clone(), such));
            }
        }
        let wanted = |cell: &Cell| patterns.is_empty() || patterns.iter().any(|p| cell.is(p));
        Ok(cells.into_iter().filter(wanted).collect())
    }

    /// The trace of this name.
    pub fn trace(&self, name: &str) -> Option<&TraceSpec> {
        self.traces.iter().find(|t| t.name == name)
    }
}

impl TraceSpec {
    /// What must lie below the directory of traces for it, if anything.
    pub fn needs(&self, traces: &Path) -> Option<std::path::PathBuf> {
        match (self.source.strip_prefix("gen:"), self.source.strip_prefix("workload:")) {
            (Some(spec), _) => {
                let (_, rest) = spec.split_once("{traces}/")?;
                Some(traces.join(rest.split('&').next().unwrap_or(rest)))
            }
            (_, Some(name)) => Workload::named(name).and_then(|w| w.needs(traces)),
            _ => Some(traces.join(&self.source)),
        }
    }

    /// Its requests. `seed` is a generator's, and changes nothing of a file.
    ///
    /// # Errors
    /// A trace that is absent or malformed.
    pub fn requests(&self, traces: &Path, seed: u64) -> Result<Vec<Request>, TraceError> {
        if let Some(workload) = self.source.strip_prefix("workload:").and_then(Workload::named) {
            return workload.requests(seed, self.limit.unwrap_or(1_000_000), traces);
        }
        let options = Options {
            format: self.format.as_deref().and_then(|f| f.parse().ok()),
            rate: self.rate,
            value_sizes: self.value_sizes,
            pages: self.pages,
            limit: self.limit,
            ..Options::default()
        };
        let name = match self.source.strip_prefix("gen:") {
            Some(spec) => {
                let joint = if spec.contains('?') { '&' } else { '?' };
                let spec = spec.replace("{traces}", &traces.display().to_string());
                format!("gen:{spec}{joint}seed={seed}")
            }
            None => traces.join(&self.source).display().to_string(),
        };
        larder_trace::open(&name, &options)?.reader.collect()
    }
}
