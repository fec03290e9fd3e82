//! Why a block is cached or not: what an operator asks of one byte of a volume.

use std::collections::BTreeMap;

use larder_base::Nanos;
use larder_engine::block::LineId;
use larder_engine::block::node::limits::{self, Allows as _};
use larder_engine::block::node::looks::Looks as _;
use larder_policy::block::{BlockKind, LineId as PolicyLine, Reason, Rule, VerdictCounts};
use serde::{Deserialize, Serialize};

use super::attached::Attached;
use super::open::CacheError;
use super::operators::check_range;
use super::{Core, locked};

/// Where a line is, or why it is not there.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Explanation {
    /// The volume.
    pub volume: String,
    /// The byte that was asked for.
    pub offset: u64,
    /// Its line.
    pub line: LineOf,
    /// Whether the line is cached.
    pub cached: bool,
    /// Where it lies, if it is cached.
    pub slot: Option<SlotOf>,
    /// Where its bytes lie on the cache device.
    pub device_offset: Option<u64>,
    /// Seconds since it was filled, if that is remembered (the last 16,384 fills are).
    pub cached_for_seconds: Option<f64>,
    /// What of it is dirty, of a volume that writes back; none of one that writes through.
    pub dirty: Option<DirtyOf>,
    /// What it holds: data, metadata, journal or unknown.
    pub kind: String,
    /// What is selected there.
    pub selection: String,
    /// What admission says of a read that misses, now.
    pub admission: String,
    /// The volume's share, and what it has.
    pub share: String,
    /// The write budget, if there is one.
    pub budget: String,
    /// Verdicts on the volume's requests so far: admitted, and rejected by reason.
    pub verdicts: BTreeMap<String, u64>,
}

/// What of a line its store does not have yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct DirtyOf {
    /// Bytes of it that are in the write log alone; 0: the store has all of it.
    pub bytes: u64,
    /// Seconds since the oldest write that shows there was logged, or was found by this run's start.
    pub for_seconds: Option<f64>,
}

/// The line that was asked about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LineOf {
    /// Its first byte in the volume.
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
}

/// Where in the map a line is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SlotOf {
    /// The shard.
    pub shard: u32,
    /// The slot of the shard.
    pub slot: u32,
}

/// Named counts of verdicts, without those that are zero.
pub fn named(counts: &VerdictCounts) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::from([("admitted".to_owned(), counts.admitted)]);
    let rejected = Reason::ALL.iter().map(|&r| (r.as_str().to_owned(), counts.rejected(r)));
    all.extend([("if_free".to_owned(), counts.if_free)].into_iter().filter(|c| c.1 > 0));
    all.extend(rejected.filter(|r| r.1 > 0));
    all
}

fn kind_name(kind: BlockKind) -> &'static str {
    match kind {
        BlockKind::Data => "data",
        BlockKind::Metadata => "metadata",
        BlockKind::Journal => "journal",
        BlockKind::Unknown => "unknown",
    }
}

impl Core {
    /// What keeps one more line of a volume from being cached now, whatever admission says.
    fn in_the_way(&self, volume: &Attached, rule: Rule) -> Option<String> {
        let (node_limits, now) = (&self.node_limits, self.now());
        match node_limits.limits.refuses(rule, now, u64::from(self.layout.line)) {
            // (What is selected is said anyway.)
            Some(Reason::Never) => return None,
            Some(Reason::NoSpace) => {
                let left = node_limits.limits.backoff.left(now).unwrap_or(Nanos::ZERO);
                return Some(format!(
                    "it would be rejected: the file system of the cache is full, and nothing new is cached for {:.0} s",
                    left.as_secs_f64().ceil()
                ));
            }
            Some(_) => {
                let said = "it would be rejected: the write budget is used up for now";
                return Some(said.to_owned());
            }
            None => {}
        }
        volume.account.at_ceiling().then(|| {
            "the volume is at its ceiling: it could take the place of one of the volume's own lines alone"
                .to_owned()
        })
    }

    /// Whether the line at byte `offset` of a volume is cached and where, or what keeps it from being.
    ///
    /// # Errors
    /// When the volume is not attached, or has no such byte.
    pub fn explain(&self, name: &str, offset: u64) -> Result<Explanation, CacheError> {
        let volume = self.attached(name)?;
        check_range(&volume, offset, 1)?;
        let bytes = u64::from(self.layout.line);
        let start = offset / bytes * bytes;
        let line = LineId((volume.base() + start) / bytes);
        let shard = self.placing.shard(line.group());
        let find = || self.find(shard, line);
        let slot = if self.layout.is_sparse() && self.is_enabled() {
            // With the line its page of the table is there.
            let go_on = &mut || !locked(&self.log_inbox).stopped;
            self.with_lines((line, line), go_on, find).flatten()
        } else {
            find()
        };
        let kind = volume.classify(start, bytes);
        let node_limits = &self.node_limits;
        let rule = node_limits.rule(&volume, start, bytes);
        let selection = {
            let selection =
                node_limits.selection.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            selection.explain(volume.id, offset)
        };
        let admission = if offset >= volume.cached_bytes() {
            "the last bytes of a volume that do not fill a line are not cached".to_owned()
        } else if !self.is_enabled() {
            "the cache is out of use: the volume is in pass-through".to_owned()
        } else {
            let line = PolicyLine { volume: volume.id, offset: start };
            let said = limits::explain(&locked(&volume.admission), line, kind);
            let said = match rule {
                Rule::Always => format!("selected to be cached always; otherwise it {said}"),
                Rule::Never => format!("selected never to be cached; otherwise it {said}"),
                Rule::ByPolicy => format!("it {said}"),
            };
            let in_the_way = if slot.is_none() { self.in_the_way(&volume, rule) } else { None };
            in_the_way.map_or_else(|| said.clone(), |why| format!("{why}; but for that: {said}"))
        };
        let has = volume.lines();
        let share = match volume.share() {
            (0, None) => format!("{has} lines, no floor or ceiling"),
            (floor, None) => format!("{has} lines, floor {floor}"),
            (floor, Some(ceiling)) => format!("{has} lines, floor {floor}, ceiling {ceiling}"),
        };
        let now = node_limits.budget_now(self.now());
        let budget = match (now.rate, now.available) {
            (Some(rate), Some(left)) => {
                format!("{rate:.0} bytes a second, {left} bytes may be written now")
            }
            _ => "none".to_owned(),
        };
        let dirty = volume.attachment().zip(self.back.get()).map(|(attachment, back)| {
            let found = back.log().dirty_since(attachment, start..start + bytes);
            found.map_or_else(DirtyOf::default, |(bytes, since)| DirtyOf {
                bytes,
                for_seconds: Some(self.now().saturating_sub(since).as_secs_f64()),
            })
        });
        let filled = node_limits.filled_at(line).filter(|_| slot.is_some());
        Ok(Explanation {
            volume: name.to_owned(),
            offset,
            line: LineOf { offset: start, bytes },
            cached: slot.is_some(),
            slot: slot.map(|s| SlotOf { shard, slot: s.0 }),
            device_offset: slot.map(|s| self.layout.slot_at(shard, s.0)),
            cached_for_seconds: filled.map(|at| self.now().saturating_sub(at).as_secs_f64()),
            dirty,
            kind: kind_name(kind).to_owned(),
            selection,
            admission,
            share,
            budget,
            verdicts: named(&volume.verdicts()),
        })
    }
}
