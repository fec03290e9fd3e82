//! Outcomes of cells as tables.

use serde_json::Value;

use crate::report::{Field, Grid, Kinds, Report, Table, figures};

/// Columns that come first, after those of the axes; the others follow by name.
const FIRST: [&str; 24] = [
    "name",
    "kind",
    "dram",
    "flash",
    "requests",
    "reads",
    "hit_ratio",
    "dram_hit_ratio",
    "flash_hit_ratio",
    "miss_ratio",
    "byte_miss_ratio",
    "flash_bytes",
    "clwa_of_sets",
    "clwa_of_misses",
    "dlwa",
    "write_amplification",
    "life_years",
    "latency_read_mean_us",
    "latency_read_p50_us",
    "latency_read_p99_us",
    "flash_utilisation",
    "metadata_per_flash_object",
    "wear_most",
    "wear_mean",
];
/// Columns of the report's own table, where they have values.
const SHOWN: usize = FIRST.len();

/// What several runs gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results {
    /// A row for each cache of each cell: the axes' values, version, seed and hash of the trace, and every figure.
    pub results: Grid,
    /// A row for each point of each cache's time series.
    pub series: Grid,
    /// Keys that were varied.
    axes: Vec<String>,
    /// Traces and their hashes, as met.
    traces: Vec<(String, String)>,
}

impl Results {
    /// None yet; `axes` are the keys that are varied.
    pub fn new(axes: Vec<String>) -> Results {
        Results { axes, ..Results::default() }
    }

    /// Adds an outcome (an [`Outcome`](crate::experiment::Outcome) as JSON) at these values of the axes. Of a sweep, `cell` is
    /// the [key](super::Cell::key) under which the log of its cells has the whole configuration.
    pub fn add(&mut self, cell: Option<&str>, values: &[toml::Value], outcome: &Value) {
        let mut named: Vec<(String, Field)> =
            self.axes.iter().cloned().zip(values.iter().map(Field::from)).collect();
        if !self.axes.iter().any(|a| a == "seed") {
            named.push((
                "seed".to_owned(),
                outcome["seed"].as_i64().map_or(Field::Nothing, Field::Whole),
            ));
        }
        let text = |value: &Value| Field::Text(value.as_str().unwrap_or_default().to_owned());
        let (version, hash) = (&outcome["version"], &outcome["workload"]["trace_hash"]);
        named.push(("version".to_owned(), text(version)));
        named.push(("trace_hash".to_owned(), text(hash)));
        named.extend(cell.map(|key| ("cell".to_owned(), Field::Text(key.to_owned()))));
        let trace = outcome["experiment"]["workload"]["trace"].as_str().unwrap_or_default();
        let known = (trace.to_owned(), hash.as_str().unwrap_or_default().to_owned());
        if !self.traces.contains(&known) {
            self.traces.push(known);
        }
        for cache in outcome["caches"].as_array().into_iter().flatten() {
            let mut fields = named.clone();
            for name in FIRST {
                let mut at = cache;
                for part in path(name) {
                    at = &at[part];
                }
                if !at.is_null() || self.results.column(name).is_none() {
                    fields.push((name.to_owned(), Field::of(at)));
                }
            }
            self.results.push(&fields, cache);
            for point in cache["series"].as_array().into_iter().flatten() {
                let mut fields = named.clone();
                for name in ["name", "dram", "flash"] {
                    fields.push((name.to_owned(), Field::of(&cache[name])));
                }
                fields.push(("time".to_owned(), Field::of(&point["time"])));
                let dram = point["dram_hit_ratio"].as_f64().unwrap_or(0.0);
                let flash = point["flash_hit_ratio"].as_f64().unwrap_or(0.0);
                fields.push(("hit_ratio".to_owned(), Field::Number(dram + flash)));
                self.series.push(&fields, point);
            }
        }
    }

    /// Where this comes from: the program's version, traces with their hashes, and `more`.
    pub fn facts(&self, more: &[(&str, String)]) -> Vec<(String, String)> {
        let mut facts = vec![("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())];
        let traces: Vec<String> = self.traces.iter().map(|(t, h)| format!("{t}  {h}")).collect();
        facts.push(("traces and their hashes".to_owned(), traces.join("\n")));
        facts.extend(more.iter().map(|(k, v)| ((*k).to_owned(), v.clone())));
        facts
    }

    /// The traces that were simulated, and their hashes.
    pub fn traces(&self) -> impl Iterator<Item = (&str, &str)> {
        self.traces.iter().map(|(trace, hash)| (trace.as_str(), hash.as_str()))
    }

    /// The columns that tell rows apart: the axes and the caches' names.
    pub fn varied(&self) -> Vec<usize> {
        let names = self.axes.iter().map(String::as_str).chain(["name"]);
        names.filter_map(|n| self.results.column(n)).collect()
    }

    /// The columns worth a look: the axes, the seed, and the first figures that have a value anywhere.
    pub fn shown(&self) -> Vec<usize> {
        let grid = &self.results;
        let axes = self.axes.iter().map(String::as_str).chain(["seed"]);
        let figures = FIRST[..SHOWN].iter().copied();
        let mut at: Vec<usize> = axes.chain(figures).filter_map(|n| grid.column(n)).collect();
        at.dedup();
        at.retain(|&c| grid.rows.iter().any(|row| row[c] != Field::Nothing));
        at
    }

    /// The report: figures, the table of [`shown`](Results::shown) columns, `facts`.
    pub fn report(&self, title: &str, facts: Vec<(String, String)>) -> Report {
        let kinds = Kinds { axes: self.axes.clone() };
        let at = self.shown();
        let grid = &self.results;
        let table = Table {
            title: "Results".to_owned(),
            columns: at.iter().map(|&c| grid.columns[c].clone()).collect(),
            rows: grid.rows.iter().map(|row| at.iter().map(|&c| row[c].text()).collect()).collect(),
        };
        Report {
            title: title.to_owned(),
            facts,
            plots: figures(grid, &self.series, &kinds),
            tables: vec![table],
        }
    }
}

/// Where in an outcome's cache a flattened column is.
fn path(name: &str) -> Vec<&str> {
    for prefix in ["latency_read", "wear"] {
        if let Some(rest) = name.strip_prefix(prefix).and_then(|r| r.strip_prefix('_')) {
            let mut parts: Vec<&str> = prefix.split('_').collect();
            parts.push(rest);
            return parts;
        }
    }
    vec![name]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_name_where_they_come_from() {
        let outcome = |miss: f64| {
            json!({ "version": "1", "seed": 7, "workload": { "trace_hash": "ab" },
                "experiment": { "workload": { "trace": "t" } },
                "caches": [ { "name": "x", "kind": "ripq", "flash": 5, "miss_ratio": miss,
                    "flash_bytes": 3, "latency": { "read": { "p99_us": 2.5 } }, "dlwa": null,
                    "series": [ { "time": 1.0, "dram_hit_ratio": 0.25, "flash_hit_ratio": 0.5 } ] } ] })
        };
        let mut results = Results::new(vec!["cache.flash".into()]);
        results.add(Some("k1"), &["1m".into()], &outcome(0.5));
        results.add(Some("k2"), &["2m".into()], &outcome(0.25));
        let grid = &results.results;
        let row: Vec<String> = grid.rows[1].iter().map(Field::text).collect();
        let cell = |name: &str| row[grid.column(name).unwrap()].as_str();
        assert_eq!(
            [cell("cache.flash"), cell("seed"), cell("version"), cell("trace_hash"), cell("name")],
            ["2m", "7", "1", "ab", "x"]
        );
        assert_eq!(cell("cell"), "k2");
        assert_eq!([cell("miss_ratio"), cell("latency_read_p99_us")], ["0.25", "2.5"]);
        assert_eq!(grid.columns.iter().filter(|c| *c == "latency_read_p99_us").count(), 1);
        let shown: Vec<&str> =
            results.shown().into_iter().map(|c| grid.columns[c].as_str()).collect();
        assert!(!shown.contains(&"dlwa") && shown.contains(&"latency_read_p99_us"), "{shown:?}");
        assert_eq!(results.series.rows.len(), 2);
        let at = results.series.column("hit_ratio").unwrap();
        assert_eq!(results.series.rows[0][at], Field::Number(0.75));
        let report = results.report("t", results.facts(&[("seed", "7".into())]));
        assert!(report.facts.iter().any(|(_, v)| v == "t  ab"));
        assert!(report.html().unwrap().contains("<td class=\"n\" title=\"0.25\">0.25</td>"));
    }
}
