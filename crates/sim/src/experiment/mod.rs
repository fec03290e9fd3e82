//! Whole-stack experiments: caches side by side on one workload in virtual time, each over a drive of its own, with
//! latencies.
//!
//! - [`Experiment`]: what is run, parsed from TOML.
//! - [`run`]: one decode of the trace for all caches.
//! - [`Outcome`]: what came out.

mod applications;
mod baseline;
mod block;
mod caches;
mod check;
mod error;
mod latency;
mod memory;
mod outcome;
pub(crate) mod place;
mod run;
mod series;
mod spec;

use std::collections::BTreeSet;

use larder_base::Short;
use larder_trace::{CsvColumns, Options};

pub use applications::AppFigures;
pub use baseline::{FifoLog, SetAssociative};
pub use block::BlockFigures;
pub use check::check;
pub use error::ExperimentError;
pub use outcome::{
    CacheOutcome, Checked, Latencies, Latency, Outcome, Point, WorkloadFacts, figures_of,
};
pub use run::run;
pub use spec::{
    Bound, CacheKind, CacheSpec, ClockMode, Expectations, Experiment, Hybrid, Orders, Report, Ripq,
    Victim, Workload,
};

pub use crate::device::{Drive, Timing};

use crate::device::Store;
use crate::kv::MAX_VALUE;
use error::value;

impl Experiment {
    /// Reads and validates an experiment's text; `file` is for messages.
    ///
    /// # Errors
    /// [`ExperimentError::Parse`] with the line, [`ExperimentError::Value`] with the key.
    pub fn parse(text: &str, file: &str) -> Result<Experiment, ExperimentError> {
        let experiment: Experiment = toml::from_str(text).map_err(|e| {
            let line = place::line_of::<Experiment>(text, &e);
            let message = e.message().lines().next().unwrap_or("cannot be read").to_owned();
            ExperimentError::Parse { file: file.to_owned(), line, message }
        })?;
        experiment.validate()?;
        Ok(experiment)
    }

    /// Checks every value that its type does not. What depends on sizes is checked when caches are built.
    ///
    /// # Errors
    /// [`ExperimentError::Value`] for the first that cannot be meant.
    pub fn validate(&self) -> Result<(), ExperimentError> {
        if self.caches.is_empty() {
            return Err(value("cache", "missing", "give at least one [[cache]] with its kind"));
        }
        let mut names = BTreeSet::new();
        for cache in &self.caches {
            let name = cache.name();
            if name.is_empty() || name == "order" || !names.insert(name) {
                let must =
                    "each cache has a name of its own, other than 'order': give name = \"…\"";
                return Err(value("cache.name", format!("'{name}'"), must));
            }
            validate_cache(cache)?;
        }
        self.workload.validate()?;
        self.ssd.validate()?;
        self.timing.validate()?;
        validate_store("store", &self.store)?;
        if let Some(journal) = &self.journal {
            validate_store("journal", journal)?;
        }
        let interval = self.report.interval;
        check_range("report.interval", interval, 1e-6, 1e9, "seconds between 0.000001 and 10^9")?;
        let points = f64::from(self.report.points);
        check_range("report.points", points, 0.0, 100_000.0, "at most 100000")?;
        let caches: Vec<_> = self
            .caches
            .iter()
            .map(|c| check::Named {
                name: c.name(),
                kind: c.kind(),
                applications: c.tells_applications(),
            })
            .collect();
        check::validate(&self.expect, &caches)
    }
}

fn check_range(key: &str, v: f64, low: f64, high: f64, must: &str) -> Result<(), ExperimentError> {
    // NaN is in no range.
    if (low..=high).contains(&v) {
        return Ok(());
    }
    Err(value(key, Short(v), format!("give {must}")))
}

fn validate_store(table: &str, store: &Store) -> Result<(), ExperimentError> {
    let check_range =
        |key: &str, v, low, high, must| check_range(&format!("{table}.{key}"), v, low, high, must);
    let positive = "a number above 0 and at most 10^9";
    for (key, v) in [
        ("disk_iops", store.disk_iops),
        ("disk_read_mb", store.disk_read_mb),
        ("disk_write_mb", store.disk_write_mb),
    ] {
        check_range(key, v, 1e-6, 1e9, positive)?;
    }
    for (key, v) in [("write_us", store.write_us), ("disk_ms", store.disk_ms)] {
        check_range(key, v, 0.0, 1e9, "a time between 0 and 10^9")?;
    }
    if let Some(us) = store.flush_us {
        check_range("flush_us", us, 0.0, 1e9, "a time between 0 and 10^9")?;
    }
    check_range("disks", f64::from(store.disks), 1.0, 4096.0, "between 1 and 4096")?;
    let stripe = store.stripe.0 as f64;
    check_range("stripe", stripe, 512.0, 1e12, "at least 512 bytes")
}

/// Either all of the memory is stated, and divided as a server divides it, or what objects have.
fn validate_dram(c: &Hybrid, key: &dyn Fn(&str) -> String) -> Result<(), ExperimentError> {
    let stated = |field, stated, other| match stated {
        false => Ok(()),
        true => Err(value(key(field), "given", format!("goes with {other} alone: leave it out"))),
    };
    match (c.memory, c.dram) {
        (Some(_), None) => {
            stated("segment", c.segment.is_some(), "dram")?;
            stated("shards", c.shards.is_some(), "dram")
        }
        (None, Some(_)) => stated("max_item", c.max_item.is_some(), "memory"),
        (None, None) => {
            let must = "give memory = \"…\", DRAM with everything in it as larder kv -m, or dram = \"…\", DRAM for objects alone";
            Err(value(key("memory"), "missing", must))
        }
        (Some(_), Some(dram)) => {
            let must = "give memory, DRAM with everything in it, or dram, DRAM for objects alone, and not both";
            Err(value(key("dram"), dram, must))
        }
    }
}

fn validate_cache(cache: &CacheSpec) -> Result<(), ExperimentError> {
    let name = cache.name();
    let key = |field: &str| format!("cache '{name}' {field}");
    if cache.flash() == 0 {
        return Err(value(key("flash"), 0, "give a size, such as \"64m\""));
    }
    match cache {
        CacheSpec::Hybrid(c) => {
            let bits = f64::from(c.clock_bits);
            check_range(&key("clock_bits"), bits, 1.0, 2.0, "1 or 2")?;
            let hot = f64::from(c.hot_percent);
            check_range(&key("hot_percent"), hot, 0.0, 100.0, "at most 100")?;
            let back = f64::from(c.reinsert_percent);
            check_range(&key("reinsert_percent"), back, 0.0, 100.0, "at most 100")?;
            let mean = c.object() as f64;
            check_range(&key("mean_record"), mean, 64.0, 1e9, "between 64 and 10^9 bytes")?;
            let item = c.max_item.map_or(1024.0, |n| n.0 as f64);
            let most = MAX_VALUE as f64;
            check_range(&key("max_item"), item, 1024.0, most, "between 1 KiB and 1 MiB")?;
            applications::stated(name, c)?;
            validate_dram(c, &key)
        }
        CacheSpec::Victim(c) => {
            if c.dram.0 == 0 {
                return Err(value(key("dram"), 0, "give a size, such as \"8m\""));
            }
            Ok(())
        }
        CacheSpec::Block(c) => {
            c.validate().map_err(|(field, found, must)| value(key(field), found, must))
        }
        CacheSpec::SetAssociative(c) => baseline::validate(&key, c.dram, &c.admission),
        CacheSpec::FifoLog(c) => baseline::validate(&key, c.dram, &c.admission),
        CacheSpec::FlashieldPaper(c) => baseline::validate(&key, c.dram, &c.admission),
        CacheSpec::Ripq(c) => {
            let sections = u64::from(c.sections);
            if sections == 0 || c.block.0 == 0 || c.flash.0 / sections < c.block.0 {
                let text =
                    format!("{} over {sections} sections of {}-byte blocks", c.flash, c.block.0);
                let must = "a section holds at least one block: more flash, fewer sections or a smaller block";
                return Err(value(key("flash"), text, must));
            }
            Ok(())
        }
    }
}

impl Workload {
    fn validate(&self) -> Result<(), ExperimentError> {
        if self.trace.is_empty() {
            return Err(value("workload.trace", "''", "name a file, - or gen:…"));
        }
        check_range("workload.rate", self.rate, 1e-6, 1e9, "requests per second up to 10^9")?;
        if self.limit == Some(0) {
            return Err(value("workload.limit", 0, "give at least 1, or leave it out for all"));
        }
        if self.limit.is_some_and(|limit| limit <= self.warmup) {
            let must = "must be less than workload.limit";
            return Err(value("workload.warmup", self.warmup, must));
        }
        if self.pages.is_some_and(|p| p < 512 || !p.is_power_of_two()) {
            let must = "a page is a power of two from 512 bytes to 2 GiB";
            return Err(value("workload.pages", self.pages.unwrap_or(0), must));
        }
        self.options().map(drop)
    }

    /// How the trace is to be opened, but for the rate: the run itself gives times where there are none.
    ///
    /// # Errors
    /// An unknown format, columns that cannot be meant.
    pub fn options(&self) -> Result<Options, ExperimentError> {
        let columns = self.columns.as_deref().map(CsvColumns::parse).transpose();
        let columns = columns
            .map_err(|e| value("workload.columns", self.columns.clone().unwrap_or_default(), e))?;
        Ok(Options {
            format: self.format.as_deref().map(str::parse).transpose()?,
            skip_bad: self.skip_bad,
            columns,
            rate: None,
            value_sizes: self.value_sizes,
            pages: self.pages,
            limit: self.limit,
        })
    }
}

impl Drive {
    fn validate(&self) -> Result<(), ExperimentError> {
        let page = self.page.0;
        if !(512..=1 << 30).contains(&page) || !page.is_power_of_two() {
            let must = "a page is a power of two from 512 bytes to 1 GiB";
            return Err(value("ssd.page", self.page, must));
        }
        if self.block.0 != 0 && !self.block.0.is_multiple_of(page) {
            return Err(value(
                "ssd.block",
                self.block,
                format!("a multiple of ssd.page {}", self.page),
            ));
        }
        let share = "a share above 0 and at most 100, such as 0.07";
        check_range("ssd.over_provisioning", self.over_provisioning, 1e-6, 100.0, share)?;
        check_range("ssd.dwpd", self.dwpd, 1e-9, 1000.0, "above 0 and at most 1000")?;
        check_range("ssd.warranty_years", self.warranty_years, 1e-3, 100.0, "at most 100 years")?;
        Ok(())
    }
}

impl Timing {
    fn validate(&self) -> Result<(), ExperimentError> {
        for (key, v) in [
            ("timing.dram_us", self.dram_us),
            ("timing.flash_read_us", self.flash_read_us),
            ("timing.flash_program_us", self.flash_program_us),
            ("timing.flash_erase_us", self.flash_erase_us),
            ("timing.backend_fast_us", self.backend_fast_us),
            ("timing.backend_slow_us", self.backend_slow_us),
            ("timing.network_packet_us", self.network_packet_us),
            ("timing.network_bit_ns", self.network_bit_ns),
            ("timing.flash_flush_us", self.flash_flush_us),
        ] {
            check_range(key, v, 0.0, 1e9, "a time between 0 and 10^9")?;
        }
        let share = self.backend_fast_share;
        check_range("timing.backend_fast_share", share, 0.0, 1.0, "a share between 0 and 1")?;
        let channels = f64::from(self.channels);
        check_range("timing.channels", channels, 1.0, 4096.0, "between 1 and 4096")?;
        let servers = f64::from(self.backend_servers);
        check_range("timing.backend_servers", servers, 0.0, 65_536.0, "at most 65536")
    }
}

#[cfg(test)]
mod tests;
