//! Block admission: whether a line goes to flash.
//!
//! One [`BlockAdmission`] for a cache, or for each shard of one. It is told of every access, hit or miss, and asked about every line that is
//! not cached and could be. Whatever it says, [selection](super::Selection), the write budget and the volume's share have
//! the last word, and they are the engine's.

mod config;
mod counts;
mod expected;
mod lines;
mod streams;
mod touch;

pub use config::{
    BLOCK_ADMISSION_DEFAULT, BLOCK_POLICY_NAMES, BlockAdmissionConfig, BlockAdmissionError,
    ExpectedReadsConfig, Rotation, SequentialConfig, StageConfig, TouchCountConfig, TwoLevelConfig,
    TwoLevelWrites,
};

use std::fmt::Write as _;

use larder_base::ByteSize;

use self::counts::Counts;
use self::expected::ExpectedReads;
use self::streams::Streams;
use self::touch::{TouchCount, TouchShape};
use super::access::{
    BlockAccess, BlockCandidate, BlockKind, BlockOp, LineId, Observed, Reason, Verdict,
    VerdictCounts,
};

/// Of one access at most this much is counted. Engines split I/O at less.
const MOST_OBSERVED: u64 = 64 << 20;
/// No table may be larger than this.
const MOST_MEMORY: u64 = 16 << 30;

/// What the tables are sized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSetup {
    /// Bytes of a line: a power of two.
    pub line_bytes: u32,
    /// Lines that the cache has.
    pub lines: u64,
    /// Bytes of all volumes together.
    pub backing_bytes: u64,
    /// Seed of the hashes, so that clients cannot choose what collides.
    pub seed: u64,
}

/// Block admission: one policy or several in a chain. See the [module](self).
///
/// Memory is fixed when it is made ([`memory_bytes`](Self::memory_bytes)); an access or a verdict costs tens of nanoseconds
/// and allocates nothing.
#[derive(Debug)]
pub struct BlockAdmission {
    config: BlockAdmissionConfig,
    stages: Vec<Stage>,
    line_shift: u32,
    verdicts: VerdictCounts,
}

#[derive(Debug)]
enum Stage {
    Sequential(Streams, Rest),
    TouchCount(TouchCount, u32),
    TwoLevel(Counts, TwoLevelWrites),
    Expected(Box<ExpectedReads>),
}

/// What becomes of a stream beyond its admitted length.
#[derive(Clone, Copy, Debug)]
struct Rest {
    /// The admitted length, bytes.
    length: u64,
    /// It may have free slots.
    free: bool,
}

impl Rest {
    fn verdict(self) -> Verdict {
        if self.free { Verdict::IfFree } else { Verdict::Reject(Reason::Sequential) }
    }
}

impl BlockAdmission {
    /// The policies of `config` with tables for `setup`.
    ///
    /// # Errors
    /// When a table would be unreasonably large.
    pub fn new(
        config: &BlockAdmissionConfig,
        setup: &BlockSetup,
    ) -> Result<BlockAdmission, BlockAdmissionError> {
        let line_shift = setup.line_bytes.max(1).ilog2();
        let stages = config.stages.iter().map(|stage| Stage::new(stage, setup, line_shift));
        let stages = stages.collect::<Result<Vec<_>, _>>()?;
        let config = config.clone();
        Ok(BlockAdmission { config, stages, line_shift, verdicts: VerdictCounts::default() })
    }

    /// What it was made from.
    pub fn config(&self) -> &BlockAdmissionConfig {
        &self.config
    }

    /// Takes note of an access, whether it hits or not. What comes back belongs to the access: see [`Observed`].
    pub fn observe(&mut self, access: &BlockAccess) -> Observed {
        let mut observed = Observed::default();
        let metadata_passes = access.kind == BlockKind::Metadata && self.prefers_metadata();
        let end = access.end().min(access.offset.saturating_add(MOST_OBSERVED));
        // What is left of the access after the policies so far.
        let (mut left, mut right) = (access.offset, end);
        for stage in &mut self.stages {
            match stage {
                Stage::Sequential(_, _) if metadata_passes => {}
                Stage::Sequential(streams, Rest { length, .. }) => {
                    let Some(part) = streams.observe(access) else { continue };
                    let refused = if *length == 0 && !part.recognised {
                        (0, 0)
                    } else if part.lane {
                        (access.offset, access.end())
                    } else if part.down {
                        (access.offset, access.end().min(part.origin.saturating_sub(*length)))
                    } else {
                        (access.offset.max(part.origin.saturating_add(*length)), access.end())
                    };
                    if refused.0 < refused.1 {
                        observed.sequential = refused;
                        if part.down { left = refused.1 } else { right = right.min(refused.0) }
                    }
                }
                Stage::TouchCount(touch, _) => {
                    if left < right {
                        touch.observe(access, left, right);
                    }
                }
                Stage::TwoLevel(counts, _) => {
                    let mut line = left >> self.line_shift;
                    while left < right && line <= (right - 1) >> self.line_shift {
                        counts
                            .add(LineId { volume: access.volume, offset: line << self.line_shift });
                        line += 1;
                    }
                }
                Stage::Expected(reads) => observed.hints = reads.observe(access, left, right),
            }
        }
        observed
    }

    /// Whether a line goes to flash. Counted in [`verdicts`](Self::verdicts).
    pub fn admit(&mut self, candidate: &BlockCandidate) -> Verdict {
        let verdict = self.judge(candidate);
        self.note(candidate, verdict);
        verdict
    }

    /// A line that [`judge`](Self::judge) would let have a free slot has found none.
    pub fn without_slot(&mut self, candidate: &BlockCandidate) {
        let sequential = candidate.observed.refuses(candidate.line.offset, 1 << self.line_shift);
        let reason = if sequential { Reason::Sequential } else { Reason::FewReads };
        self.note(candidate, Verdict::Reject(reason));
    }

    fn note(&mut self, candidate: &BlockCandidate, verdict: Verdict) {
        self.verdicts.count(verdict);
        for stage in &mut self.stages {
            if let Stage::Expected(reads) = stage {
                reads.judged(candidate, verdict);
            }
        }
    }

    /// What [`admit`](Self::admit) would say, without counting it.
    pub fn judge(&self, candidate: &BlockCandidate) -> Verdict {
        if candidate.kind == BlockKind::Metadata && self.prefers_metadata() {
            return Verdict::Admit;
        }
        let mut all = Verdict::Admit;
        for stage in &self.stages {
            match self.judge_stage(stage, candidate) {
                Verdict::Admit => {}
                // The others are asked all the same: a line must pass every policy.
                Verdict::IfFree => all = Verdict::IfFree,
                reject @ Verdict::Reject(_) => return reject,
            }
        }
        all
    }

    /// What holds for lines that are read ahead of somebody who reads in sequence, whose own lines are admitted. What is read
    /// ahead of is a stream, whether it has come far enough to be recognised or not.
    pub fn judge_ahead(&self) -> Verdict {
        let whole = |stage: &Stage| match stage {
            Stage::Sequential(_, rest) if rest.length == 0 => Some(rest.verdict()),
            _ => None,
        };
        self.stages.iter().find_map(whole).unwrap_or(Verdict::Admit)
    }

    fn judge_stage(&self, stage: &Stage, candidate: &BlockCandidate) -> Verdict {
        let line = candidate.line;
        match stage {
            Stage::Sequential(_, rest) => {
                if candidate.observed.refuses(line.offset, 1 << self.line_shift) {
                    return rest.verdict();
                }
            }
            Stage::TouchCount(touch, threshold) => {
                // A line larger than a segment counts by its most touched one.
                let step = touch.segment_bytes();
                let end = line.offset.saturating_add(1 << self.line_shift);
                let mut at = line.offset;
                loop {
                    if touch.touches(line.volume, at) >= *threshold {
                        break;
                    }
                    at = at.saturating_add(step);
                    if at >= end {
                        return Verdict::Reject(Reason::FewTouches);
                    }
                }
            }
            Stage::TwoLevel(counts, writes) => {
                let Some(victim) = candidate.victim else { return Verdict::Admit };
                if victim.kind == BlockKind::Metadata {
                    return Verdict::Reject(Reason::MetadataVictim);
                }
                let compare = match (candidate.op, writes) {
                    (BlockOp::Write, TwoLevelWrites::Admit) => return Verdict::Admit,
                    (BlockOp::Write, TwoLevelWrites::Reject) => false,
                    (BlockOp::Read, _) | (BlockOp::Write, TwoLevelWrites::Compare) => true,
                };
                if !compare || counts.of(line) <= counts.of(victim.line) {
                    return Verdict::Reject(Reason::NotHotter);
                }
            }
            Stage::Expected(reads) => return reads.judge(candidate),
        }
        Verdict::Admit
    }

    /// Whether metadata goes before data whatever the rest says: with `two_lbs` in the chain.
    pub fn prefers_metadata(&self) -> bool {
        self.stages.iter().any(|s| matches!(s, Stage::TwoLevel(..)))
    }

    /// Whether [`BlockCandidate::victim`] makes a difference: with `two_lbs`. If not, nobody need look for it.
    pub fn wants_victim(&self) -> bool {
        self.prefers_metadata()
    }

    /// Verdicts so far.
    pub fn verdicts(&self) -> &VerdictCounts {
        &self.verdicts
    }

    /// Counts a verdict that was the engine's own: the budget, a ceiling, pressure.
    pub fn count(&mut self, verdict: Verdict) {
        self.verdicts.count(verdict);
    }

    /// Bytes of DRAM that the tables take.
    pub fn memory_bytes(&self) -> usize {
        let stage = |stage: &Stage| match stage {
            Stage::Sequential(streams, _) => streams.memory_bytes(),
            Stage::TouchCount(touch, _) => touch.memory_bytes(),
            Stage::TwoLevel(counts, _) => counts.memory_bytes(),
            Stage::Expected(reads) => reads.memory_bytes(),
        };
        self.stages.iter().map(stage).sum()
    }

    /// What is known of a line and how it would be judged, for people.
    pub fn explain(&self, candidate: &BlockCandidate) -> String {
        let mut out = match self.judge(candidate) {
            Verdict::Admit => "would be admitted".to_owned(),
            Verdict::IfFree => "would have a free slot, and displace nothing".to_owned(),
            Verdict::Reject(reason) => format!("would be rejected: {}", reason.describe()),
        };
        let line = candidate.line;
        for stage in &self.stages {
            // Writing to a string cannot fail.
            let _ = match stage {
                Stage::Sequential(streams, _) => {
                    let near = streams.covering(line.volume, line.offset);
                    write!(out, "; lies in {near} of the sequential streams under way")
                }
                Stage::TouchCount(touch, threshold) => {
                    let touches = touch.touches(line.volume, line.offset);
                    write!(
                        out,
                        "; its segment was touched {touches} times lately, {threshold} are needed"
                    )
                }
                Stage::TwoLevel(counts, _) => match candidate.victim {
                    None => write!(out, "; accessed {} times lately", counts.of(line)),
                    Some(victim) => write!(
                        out,
                        "; accessed {} times lately, the line it would displace {} times",
                        counts.of(line),
                        counts.of(victim.line)
                    ),
                },
                Stage::Expected(reads) => {
                    let e = reads.expected(candidate);
                    let known = if e.known {
                        ""
                    } else {
                        " as is supposed until some were followed to their end"
                    };
                    let needed = (e.needed * (1.0 + e.writes)).max(e.displaced);
                    write!(
                        out,
                        "; its like was read {:.2} times and written {:.2} times in a lifetime of the cache{known}; {needed:.2} reads are needed",
                        e.reads, e.writes
                    )
                }
            };
        }
        out
    }
}

impl Stage {
    fn new(
        config: &StageConfig,
        setup: &BlockSetup,
        line_shift: u32,
    ) -> Result<Stage, BlockAdmissionError> {
        let lines = setup.lines.max(1);
        let fits_with = |policy, what: &dyn Fn() -> String, bytes: u128| {
            if bytes <= u128::from(MOST_MEMORY) {
                return Ok(());
            }
            let need = ByteSize(u64::try_from(bytes).unwrap_or(u64::MAX));
            let what = what();
            Err(BlockAdmissionError::Memory { policy, need, what, most: ByteSize(MOST_MEMORY) })
        };
        let fits = |policy, counters: u64, bytes| {
            fits_with(policy, &|| format!("{counters} counters"), bytes)
        };
        match config {
            StageConfig::Sequential(c) => {
                let rest = Rest { length: c.length.0, free: c.free };
                let streams = Streams::new(c.window, c.gap.0, c.run).over_connections(c.free);
                Ok(Stage::Sequential(streams, rest))
            }
            StageConfig::TouchCount(c) => {
                let tables = u64::from(c.bitmaps) + 1;
                let counters = if c.counters > 0 {
                    c.counters
                } else {
                    let segments = setup.backing_bytes.div_ceil(c.segment.0).max(1);
                    // Twice as many as segments keeps most from sharing; a byte for each line is the limit, 64 KiB the least.
                    let wanted = segments.saturating_mul(2).min(1 << 40).next_power_of_two();
                    let bits = lines.max(64 << 10).saturating_mul(8);
                    let most = (bits / (u64::from(c.bits) * tables)).max(64);
                    wanted.min(1 << most.ilog2())
                };
                let bytes = u128::from(counters) * u128::from(c.bits) * u128::from(tables) / 8;
                fits("touch_count", counters, bytes)?;
                let shape = TouchShape {
                    segment: c.segment.0,
                    bits: c.bits,
                    bitmaps: c.bitmaps,
                    rotation: c.rotation,
                    counters: counters.max(64),
                    cache_bytes: lines << line_shift,
                    seed: setup.seed,
                };
                Ok(Stage::TouchCount(TouchCount::new(&shape), c.threshold))
            }
            StageConfig::TwoLevel(c) => {
                let counters = if c.counters > 0 { c.counters } else { lines.saturating_mul(4) };
                fits("two_lbs", counters, u128::from(counters) * u128::from(c.bits) / 8)?;
                let sample = lines.saturating_mul(u64::from(c.ageing));
                let counts = Counts::new(counters, c.bits, sample, line_shift, setup.seed);
                Ok(Stage::TwoLevel(counts, c.writes))
            }
            StageConfig::ExpectedReads(c) => {
                let bytes = ExpectedReads::bytes_for(c, lines);
                fits_with(
                    "expected_reads",
                    &|| format!("memory={} for each of {lines} lines", c.memory),
                    bytes,
                )?;
                Ok(Stage::Expected(Box::new(ExpectedReads::new(c, setup))))
            }
        }
    }
}

#[cfg(test)]
mod tests;
