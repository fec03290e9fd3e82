//! The models of CacheLib's caches and of Flashield's flash as an experiment states them.

use larder_base::ByteSize;
use serde::{Deserialize, Serialize};

use super::error::{ExperimentError, value};
use crate::lab::baseline::{self, BaselineError, HybridConfig, LogParams, PaperParams, SetParams};

/// CacheLib's BigHash behind LRU in DRAM ([`baseline::SetAssociative`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetAssociative {
    /// Its name in reports. Default: the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// DRAM.
    pub dram: ByteSize,
    /// Flash.
    pub flash: ByteSize,
    /// Bytes of a bucket. Default 4 KiB.
    #[serde(default = "bucket")]
    pub bucket: ByteSize,
    /// Which of DRAM's victims go to flash: all, probability:P, reject_first or ghost. Default all.
    #[serde(default = "all")]
    pub admission: String,
    /// Mean bytes of an object, by which the filter is sized. Default 300.
    #[serde(default = "mean_object")]
    pub mean_object: u64,
}

/// Navy's block cache behind LRU in DRAM ([`baseline::FifoLog`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FifoLog {
    /// Its name in reports. Default: the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// DRAM.
    pub dram: ByteSize,
    /// Flash.
    pub flash: ByteSize,
    /// Bytes of a region. Default 1 MiB.
    #[serde(default = "region")]
    pub region: ByteSize,
    /// Records start at multiples of so many bytes. Default 1.
    #[serde(default = "align")]
    pub align: u32,
    /// Objects with so many hits are written again when their region is reclaimed; 0 (the default) never.
    #[serde(default)]
    pub reinsert: u32,
    /// Which of DRAM's victims go to flash: all, probability:P, reject_first or ghost. Default all.
    #[serde(default = "all")]
    pub admission: String,
    /// Mean bytes of an object, by which the filter is sized. Default 300.
    #[serde(default = "mean_object")]
    pub mean_object: u64,
}

/// Flashield's flash in the paper's form behind LRU in DRAM ([`baseline::FlashieldPaper`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlashieldPaper {
    /// Its name in reports. Default: the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// DRAM. What waits for a segment comes on top.
    pub dram: ByteSize,
    /// Flash.
    pub flash: ByteSize,
    /// Bytes of a segment. Default 1 MiB.
    #[serde(default = "region")]
    pub segment: ByteSize,
    /// Functions that name an object's place in its segment. Default 16.
    #[serde(default = "sixteen")]
    pub functions: u32,
    /// Functions that name an object's slot in the table. Default 16.
    #[serde(default = "sixteen")]
    pub choices: u32,
    /// Objects over slots that the table is sized for. Default 0.95.
    #[serde(default = "load")]
    pub load: f64,
    /// Which of DRAM's victims go to flash: all, probability:P, reject_first or ghost. Default all.
    #[serde(default = "all")]
    pub admission: String,
    /// Mean bytes of an object, by which table and filter are sized. Default 300.
    #[serde(default = "mean_object")]
    pub mean_object: u64,
}

fn sixteen() -> u32 {
    16
}
fn load() -> f64 {
    0.95
}
fn bucket() -> ByteSize {
    ByteSize::kib(4)
}
fn region() -> ByteSize {
    ByteSize::kib(1024)
}
fn align() -> u32 {
    1
}
fn all() -> String {
    "all".to_owned()
}
fn mean_object() -> u64 {
    300
}

/// Checks what is the same in both: `key` names a field of the cache.
pub(super) fn validate(
    key: &dyn Fn(&str) -> String,
    dram: ByteSize,
    admission: &str,
) -> Result<(), ExperimentError> {
    if dram.0 == 0 {
        return Err(value(key("dram"), 0, "give a size, such as \"8m\""));
    }
    baseline::admission(admission).map(drop).map_err(|_| {
        let must = "choose from all, reject_first, ghost, probability:P";
        value(key("admission"), format!("'{admission}'"), must)
    })
}

impl SetAssociative {
    pub(super) fn build(&self, seed: u64) -> Result<baseline::SetAssociative, BaselineError> {
        let config = config(self.dram, self.flash, &self.admission, self.mean_object, seed)?;
        let bucket = u32::try_from(self.bucket.0).unwrap_or(u32::MAX);
        baseline::SetAssociative::new(&config, SetParams { bucket })
    }
}

impl FlashieldPaper {
    pub(super) fn build(&self, seed: u64) -> Result<baseline::FlashieldPaper, BaselineError> {
        let config = config(self.dram, self.flash, &self.admission, self.mean_object, seed)?;
        let params = PaperParams {
            segment: self.segment.0,
            functions: self.functions,
            choices: self.choices,
            load: self.load,
        };
        baseline::FlashieldPaper::new(&config, params)
    }
}

impl FifoLog {
    pub(super) fn build(&self, seed: u64) -> Result<baseline::FifoLog, BaselineError> {
        let config = config(self.dram, self.flash, &self.admission, self.mean_object, seed)?;
        let params =
            LogParams { region: self.region.0, align: self.align, reinsert: self.reinsert };
        baseline::FifoLog::new(&config, params)
    }
}

fn config(
    dram: ByteSize,
    flash: ByteSize,
    admission: &str,
    mean_object: u64,
    seed: u64,
) -> Result<HybridConfig, BaselineError> {
    let admission = baseline::admission(admission)?;
    Ok(HybridConfig { dram: dram.0, flash: flash.0, admission, mean_object, seed })
}

#[cfg(test)]
mod tests {
    use super::super::{Experiment, run};

    const TEXT: &str = r#"
[workload]
trace = "gen:zipf?objects=30000&requests=150000&skew=0.8&rate=5000"
warmup = 60000
[[cache]]
kind = "set-associative"
dram = "256k"
flash = "2m"
[[cache]]
kind = "set-associative"
name = "tenth"
dram = "256k"
flash = "2m"
admission = "probability:0.1"
[[cache]]
kind = "fifo-log"
dram = "256k"
flash = "2m"
region = "64k"
[[cache]]
kind = "fifo-log"
name = "ghost"
dram = "256k"
flash = "2m"
region = "64k"
admission = "ghost"
"#;

    /// A 4 KiB write for each insertion, at random, on a full drive; regions in turn cost the drive nothing more.
    #[test]
    fn places_make_the_drives_part_visible() {
        let e = Experiment::parse(TEXT, "x.toml").unwrap();
        let outcome = run(&e, 1, |_, _| {}).unwrap();
        let [sets, tenth, log, ghost] = &outcome.caches[..] else { panic!("four caches") };
        assert!(sets.dlwa.unwrap() > 3.0, "{:?}", sets.dlwa);
        assert!(log.dlwa.unwrap() < 1.05 && ghost.dlwa.unwrap() < 1.05, "{:?}", log.dlwa);
        assert!(sets.clwa_of_misses > 8.0 * log.clwa_of_misses);
        assert!(tenth.flash_bytes * 8 < sets.flash_bytes && ghost.flash_bytes < log.flash_bytes);
        // DRAM of the index: 8 bytes a bucket, 9.25 bytes an object.
        assert_eq!(sets.metadata_bytes, Some((2 << 20) / 4096 * 8));
        assert_eq!(log.metadata_bytes, log.flash_objects.map(|n| n * 925 / 100));
        for c in &outcome.caches {
            assert!(c.hits_flash > 1000 && c.latency.hit_flash.p50_us >= 88.0, "{c:?}");
        }
    }

    /// The paper's index and segments beside Larder's, on the same requests and with the same filter.
    #[test]
    fn the_papers_index_beside_ours() {
        let text = r#"
[workload]
trace = "gen:memcachier?objects=20000&requests=150000&rate=2000"
warmup = 60000
[[cache]]
kind = "hybrid"
dram = "512k"
flash = "4m"
segment = "64k"
mean_record = 300
admission.policy = "reject_first"
[[cache]]
kind = "flashield-paper"
dram = "512k"
flash = "4m"
segment = "64k"
admission = "reject_first"
[[cache]]
kind = "flashield-paper"
name = "two"
dram = "512k"
flash = "4m"
segment = "64k"
choices = 2
functions = 2
"#;
        let outcome = run(&Experiment::parse(text, "x.toml").unwrap(), 1, |_, _| {}).unwrap();
        let [ours, paper, two] = &outcome.caches[..] else { panic!("three caches") };
        for c in [ours, paper, two] {
            assert!(c.hits_flash > 2000, "{c:?}");
            assert!((1.0..1.1).contains(&c.flash_reads_per_hit.unwrap()), "{c:?}");
            assert!((0.9..1.3).contains(&c.dlwa.unwrap()), "{}: {:?}", c.name, c.dlwa);
        }
        let fill = |c: &super::super::CacheOutcome| c.flash_fill.unwrap();
        assert!(fill(ours) > 0.8 && fill(paper) > 0.8 && fill(two) < fill(paper) - 0.1);
        let bytes = |c: &super::super::CacheOutcome| c.metadata_per_flash_object.unwrap();
        assert!((3.0..8.0).contains(&bytes(paper)), "{}", bytes(paper));
        let misses = |c: &super::super::CacheOutcome| c.flash_reads_per_miss.unwrap();
        assert!(misses(ours) < 0.05 && misses(paper) > 0.0 && misses(paper) < 0.3);
        let bad = text.replace("choices = 2", "choices = 65");
        let e = Experiment::parse(&bad, "x.toml").and_then(|e| run(&e, 1, |_, _| {})).unwrap_err();
        assert!(e.to_string().contains("choices is 65") && e.is_usage(), "{e}");
    }

    #[test]
    fn what_cannot_be_meant_is_named() {
        for (from, to, words) in [
            ("\"probability:0.1\"", "\"flashiness\"", "cache 'tenth' admission is 'flashiness'"),
            ("region = \"64k\"", "region = \"2m\"", "flash is 2097152: it must be from 2"),
            ("dram = \"256k\"", "dram = 0", "cache 'set-associative' dram is 0"),
            ("admission = \"ghost\"", "align = 0", "align is 0: it must be"),
            ("admission = \"ghost\"", "buckets = 4", "unknown field `buckets`"),
        ] {
            let text = TEXT.replace(from, to);
            let e = Experiment::parse(&text, "x.toml").and_then(|e| run(&e, 1, |_, _| {}));
            let e = e.err().unwrap();
            assert!(e.to_string().contains(words) && e.is_usage(), "'{e}' lacks '{words}'");
        }
    }
}
