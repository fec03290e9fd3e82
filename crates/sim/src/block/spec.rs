//! The block cache and the store behind it, as an experiment states them.

use std::collections::BTreeMap;

use larder_base::ByteSize;
use larder_engine::block::WriteMode;
use larder_engine::block::map::{Making, Replacement};
use larder_engine::block::node::defaults::{self, SizeError};
use larder_engine::block::node::share::Share;
use larder_engine::block::writeback::words::{BACK, FORM};
use larder_format::block::Placement;
use larder_policy::block::{
    BLOCK_ADMISSION_DEFAULT, BlockAdmissionConfig, Rule, Selection, SelectionError, VictimPolicy,
    VolumeId,
};
use larder_policy::budget::WriteBudgetConfig;
use serde::{Deserialize, Serialize};

use super::back;

/// The engine of `larder block` over a cache device of `flash` bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// Its name in reports. Default: the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The cache device, map and log included, as `larder block format --size` takes it. With `sparse`, the file system that
    /// has its file: lines take up 15/16 of it.
    pub flash: ByteSize,
    /// Bytes of a line. Default 4 KiB.
    #[serde(default = "line")]
    pub line: ByteSize,
    /// Where a line may lie: `direct`, `set:W`, `full`, `sparse` or `sparse:SPAN`. Default `set:8`.
    #[serde(default = "placement")]
    pub placement: String,
    /// Shards. Default 8, as `larder block format` makes them; a very small cache has room for fewer.
    #[serde(default = "shards")]
    pub shards: u32,
    /// Which line leaves: `lru`, `clock`, `sieve`, `s3fifo` or `fifo`; a `sparse` cache has a clock of its own. Default `lru`.
    #[serde(default = "replacement")]
    pub replacement: String,
    /// Which segment is reclaimed where the placement is `full`: `fifo`, `greedy`, `cost-benefit` or `random`. Default `fifo`.
    #[serde(default = "reclaim")]
    pub reclaim: String,
    /// Who makes room where the placement is `full`, as `larder block serve --evict` takes it: `cache`, `gc` or `gc:SHARE`.
    /// Default `gc`.
    #[serde(default = "evict")]
    pub evict: String,
    /// What a write does: `hdd-ssd`, `hdd-upd` or `hdd-inv`; or `back:ORDER[,grain=…][,destage=…]` but for `cut=marks`, as `larder block serve --write`
    /// takes it: it is answered when it is in the cache's write log, and comes to the store later. Default `hdd-ssd`.
    #[serde(default = "write")]
    pub write: String,
    /// Of `flash`, what the write log has of a cache that writes back. Default a tenth, at most 8 GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_log: Option<ByteSize>,
    /// Bytes of the write log that each volume may hold. Default an equal share of four fifths of it, at most 4 GiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_max: Option<ByteSize>,
    /// How old what is dirty may become, as `larder block serve --dirty-age-max` takes it: `SECONDS`, an aim, or `SECONDS,hard`. Default `60`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_age_max: Option<String>,
    /// A client flushes its volume after so many writes of it, and that counts as one of the requests under way. Default 0: never, since traces
    /// do not say when their clients did.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub flush_every: u64,
    /// Admission, as `larder block serve --admission` takes it. Default `seqr(free=on)`.
    #[serde(default = "admission")]
    pub admission: String,
    /// The drive's endurance and the wanted life: new lines beyond it are not cached, as with `larder block serve
    /// --endurance-tbw` and its kin. By default writes are not limited.
    #[serde(default)]
    pub write_budget: WriteBudgetConfig,
    /// Bytes that may be on their way to flash behind replies; beyond, lines are not cached. Default 64 MiB.
    #[serde(default = "fill_memory")]
    pub fill_memory: ByteSize,
    /// How far streams of reads are read ahead of at most, as `larder block serve --readahead` takes it; 0: not at all, as in the
    /// papers' caches. Default 1 MiB.
    #[serde(default = "ahead")]
    pub readahead: ByteSize,
    /// What volumes may have of the cache, by their numbers in the trace: `FLOOR..CEILING`, as `larder block serve --share` takes it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub shares: BTreeMap<String, String>,
    /// What is cached always or never, as `larder block select` takes it; what stands later wins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub select: Vec<Select>,
    /// Bytes of a volume, each of them: its place in the line space, behind whose end nothing may be asked for, and what admission
    /// sizes its tables by. Default 0: not known, stretches of 1 GiB as they are touched, and tables for sixteen times the flash.
    #[serde(default)]
    pub volume: ByteSize,
    /// `open`: requests come when the trace says. `closed`: whenever fewer than `depth` are under way. Default `open`.
    #[serde(default)]
    pub load: Load,
    /// Requests under way at most; those that come meanwhile wait, and their latency counts from when they came.
    /// Default 64.
    #[serde(default = "depth")]
    pub depth: u32,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}
fn line() -> ByteSize {
    ByteSize(defaults::LINE.into())
}
fn placement() -> String {
    defaults::PLACEMENT.to_string()
}
fn shards() -> u32 {
    defaults::SHARDS
}
fn replacement() -> String {
    defaults::REPLACEMENT.as_str().to_owned()
}
fn reclaim() -> String {
    defaults::RECLAIM.name().to_owned()
}
fn evict() -> String {
    "gc".to_owned()
}
fn write() -> String {
    defaults::WRITE.to_string()
}
fn admission() -> String {
    BLOCK_ADMISSION_DEFAULT.to_owned()
}
fn fill_memory() -> ByteSize {
    defaults::FILL_MEMORY
}
fn ahead() -> ByteSize {
    defaults::READAHEAD
}
fn depth() -> u32 {
    64
}

/// What of a volume is cached, whatever admission says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Select {
    /// Its number in the trace.
    pub volume: u32,
    /// `always`, `never`, or `policy`, which makes an exception of the others.
    pub rule: String,
    /// First byte.
    #[serde(default)]
    pub start: ByteSize,
    /// How many bytes; left out: all of the volume, and `start` with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<ByteSize>,
}

/// When requests come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Load {
    /// When the trace says, however long earlier ones take.
    #[default]
    Open,
    /// As soon as one that is under way has been answered.
    Closed,
}

/// A key with a value that cannot be meant: the key, the value, what it must be.
pub(crate) type Wrong = (&'static str, String, String);

impl Block {
    /// The engine's placement.
    pub(crate) fn placement(&self) -> Result<Placement, Wrong> {
        self.placement.parse().map_err(|_| {
            let must = "write direct, set:W with W from 1 to 16, full, sparse or sparse:SPAN";
            ("placement", format!("'{}'", self.placement), must.to_owned())
        })
    }

    /// The engine's replacement.
    fn replacement(&self) -> Result<Replacement, Wrong> {
        self.replacement.parse().map_err(|_| {
            let must =
                format!("choose one of {}", Replacement::ALL.map(Replacement::as_str).join(", "));
            ("replacement", format!("'{}'", self.replacement), must)
        })
    }

    /// What the map is made with: replacement, and for a log of segments who reclaims which and how.
    pub(crate) fn making(&self) -> Result<Making, Wrong> {
        let reclaim = self.reclaim.parse().map_err(|_| {
            let must =
                format!("choose one of {}", VictimPolicy::ALL.map(VictimPolicy::name).join(", "));
            ("reclaim", format!("'{}'", self.reclaim), must)
        })?;
        let evict = self.evict.parse().map_err(|_| {
            let must = "write cache, gc, or gc:SHARE with the share of a segment that may be kept, 0 to 0.95";
            ("evict", format!("'{}'", self.evict), must.to_owned())
        })?;
        let making = Making { replacement: self.replacement()?, reclaim, evict };
        defaults::check_making(&making, self.placement()?)
            .map_err(|e| (e.what, format!("'{}'", e.value), e.to_string()))?;
        Ok(making)
    }

    /// What volumes may have, by number.
    pub(crate) fn stated_shares(&self) -> Result<Vec<(u32, Share)>, Wrong> {
        let parse = |(volume, share): (&String, &String)| {
            let wrong = |must: String| ("shares", format!("{volume} = '{share}'"), must);
            let number = volume.parse();
            let number =
                number.map_err(|_| wrong("name a volume by its number in the trace".to_owned()))?;
            Ok((number, share.parse().map_err(wrong)?))
        };
        self.shares.iter().map(parse).collect()
    }

    /// What is selected.
    pub(crate) fn selection(&self) -> Result<Selection, Wrong> {
        let mut selection = Selection::new(Selection::MOST_RANGES);
        for select in &self.select {
            let said = || {
                let bytes = select.bytes.map_or_else(String::new, |bytes| {
                    format!(", start = '{}', bytes = '{bytes}'", select.start)
                });
                format!("volume = {}, rule = '{}'{bytes}", select.volume, select.rule)
            };
            let rule: Rule = select
                .rule
                .parse()
                .map_err(|e: SelectionError| ("select", said(), e.to_string()))?;
            let volume = VolumeId(select.volume);
            match select.bytes {
                Some(bytes) => {
                    let (start, end) = (select.start.0, select.start.0.saturating_add(bytes.0));
                    let set = selection.set(volume, start, end, rule, "");
                    set.map_err(|e| ("select", said(), e.to_string()))?;
                }
                None if select.start.0 > 0 => {
                    let must = "say with bytes how long the range is".to_owned();
                    return Err((
                        "select",
                        format!("{}, start = '{}'", said(), select.start),
                        must,
                    ));
                }
                None if rule == Rule::Always && self.volume.0 == 0 => {
                    let must =
                        "say with the cache's key volume how many bytes a volume has".to_owned();
                    return Err(("select", said(), must));
                }
                None => selection.set_volume(volume, rule),
            }
        }
        Ok(selection)
    }

    /// The engine's write mode.
    pub(crate) fn write_mode(&self) -> Result<WriteMode, Wrong> {
        if self.write.starts_with(BACK) {
            return Ok(defaults::WRITE);
        }
        self.write.parse().map_err(|_| {
            let must =
                format!("choose {}, or {FORM}", WriteMode::ALL.map(WriteMode::as_str).join(", "));
            ("write", format!("'{}'", self.write), must)
        })
    }

    /// The admission policies.
    pub(crate) fn admission(&self) -> Result<BlockAdmissionConfig, Wrong> {
        self.admission.parse().map_err(|e: larder_policy::block::BlockAdmissionError| {
            ("admission", format!("'{}'", self.admission), e.to_string())
        })
    }

    /// Checks every value that does not depend on others.
    pub(crate) fn validate(&self) -> Result<(), Wrong> {
        self.placement()?;
        self.making()?;
        self.write_mode()?;
        back::Stated::of(self)?;
        self.admission()?;
        self.selection()?;
        let wrong = |key, size: ByteSize, e: SizeError| (key, size.to_string(), e.to_string());
        defaults::check_fill_memory(self.fill_memory)
            .map_err(|e| wrong("fill_memory", self.fill_memory, e))?;
        defaults::check_readahead(self.readahead)
            .map_err(|e| wrong("readahead", self.readahead, e))?;
        if !(1..=65_536).contains(&self.depth) {
            let must = "between 1 and 65536 requests under way".to_owned();
            return Err(("depth", self.depth.to_string(), must));
        }
        Ok(())
    }
}
