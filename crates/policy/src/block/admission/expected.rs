//! `expected_reads`: a line is worth the reads that the cache would answer of it, and costs what is written for it.
//!
//! What is known of a line when it is read or written and not cached sorts it into a table of [`Means`]: how often its like was read, and
//! how often written, while the cache would have held it. The table is learnt from a part of such lines, which are followed for one
//! lifetime of the cache whether they were admitted or not ([`Follow`]); how long that is, [`Lines`] finds out.
//!
//! A line costs one write to flash when it is admitted, and another with each write of it while it is held. It is admitted if it is
//! expected to be read often enough for each of these writes, and more often than the line that leaves for it would still be. While the
//! cache has never been full, lines have its free slots for less: the first write is not charged.

use larder_base::Rng;

use super::config::{ExpectedReadsConfig, SequentialConfig};
use super::lines::{AWAY, Lines, Past, WRITES};
use super::streams::Streams;
use crate::block::access::{Hints, mix};
use crate::block::{BlockAccess, BlockCandidate, BlockOp, LineId, Reason, Verdict, VolumeId};
use crate::follow::Follow;
use crate::means::Means;

/// Lines that were followed to their end before anything counts as known.
const LEAST_SEEN: u32 = 64;
/// Bytes of a volume that share what is remembered of their neighbourhood.
const REGION_SHIFT: u32 = 16;
/// Lines that are remembered for each region that is.
const LINES_PER_REGION: u64 = 8;
/// At the start one line in so many is followed, and as many lines of the cache have one place to follow one, within these bounds.
const FOLLOWED: u64 = 10;
const LEAST_FOLLOWED: u64 = 1024;
const MOST_FOLLOWED: u64 = 65_536;

/// Levels of reads that are told apart, of the region's accesses, and of an access's length.
const READS: usize = super::lines::READS;
const REGION: usize = 4;
const LENGTH: usize = Hints::LENGTHS;
const RUNS: usize = Hints::RUNS;
const COARSE: usize = 2 * RUNS * READS * WRITES;
const MIDDLE: usize = COARSE * AWAY;
const FINE: usize = MIDDLE * REGION * LENGTH;
const _: () = assert!(FINE <= 1 << 16);

/// Reads, or writes, that are supposed to come to a line that had so many, by the level of their number.
const SUPPOSED: [f32; READS] = [0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0];

type Table = Means<3, 2>;

/// Which kind a line is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Kind(u16);

impl Kind {
    fn new(op: BlockOp, hints: Hints, past: Past, region: Past) -> Kind {
        let reads = (past.reads as usize).min(READS - 1);
        let near = ((region.reads.max(region.writes)) as usize).min(REGION - 1);
        let (write, run) = (usize::from(op == BlockOp::Write), hints.run());
        let coarse = ((write * RUNS + run) * READS + reads) * WRITES + past.writes as usize;
        let middle = coarse * AWAY + (past.away as usize).min(AWAY - 1);
        Kind(((middle * REGION + near) * LENGTH + hints.length()) as u16)
    }

    /// What is supposed of a line before any was followed: that it will be read and written as often as it was, as far as it is remembered.
    fn supposed(self) -> [f32; 2] {
        let coarse = self.depths()[0];
        let (reads, writes) = (coarse / WRITES % READS, coarse % WRITES);
        let run = !(coarse / (WRITES * READS)).is_multiple_of(RUNS);
        let supposed = [SUPPOSED[reads], SUPPOSED[writes]];
        if run { supposed.map(|n| n / 4.0) } else { supposed }
    }

    /// Its place at each depth.
    fn depths(self) -> [usize; 3] {
        let fine = usize::from(self.0) % FINE;
        let middle = fine / (REGION * LENGTH);
        [middle / AWAY, middle, fine]
    }
}

/// What is kept of a line that is followed.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    kind: [u8; 2],
    reads: u8,
    writes: u8,
}

/// What is expected of a line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expected {
    /// Reads while the cache would hold it, and writes.
    pub(super) reads: f32,
    pub(super) writes: f32,
    /// Reads that it needs for each write, and those that it needs to displace another.
    pub(super) needed: f32,
    pub(super) displaced: f32,
    /// Enough lines were followed for this to be more than what is supposed at first.
    pub(super) known: bool,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct ExpectedReads {
    config: ExpectedReadsConfig,
    seed: u64,
    line_shift: u32,
    lines: Lines,
    regions: Lines,
    streams: Streams,
    follow: Follow<Kept>,
    table: Table,
    seen: u32,
}

impl ExpectedReads {
    pub(super) fn new(config: &ExpectedReadsConfig, setup: &super::BlockSetup) -> ExpectedReads {
        let lines = setup.lines.max(1);
        let mut rng = Rng::new(setup.seed);
        let followed = Self::places(lines) as usize;
        // Small caches have as many places as it takes to learn at all, and follow more than a tenth.
        let parts = (lines / LEAST_FOLLOWED).clamp(1, FOLLOWED);
        let follow = Follow::new(followed * Follow::<Kept>::BYTES, rng.next_u64());
        // What a run is, is what it is for `seqr`.
        let SequentialConfig { window, gap, run, .. } = SequentialConfig::REJECT;
        ExpectedReads {
            config: *config,
            seed: rng.next_u64(),
            line_shift: setup.line_bytes.max(1).ilog2(),
            lines: Lines::new(Self::keys(config, lines), lines),
            regions: Lines::new(Self::keys(config, lines) / LINES_PER_REGION, lines),
            streams: Streams::new(window, gap.0, run).over_connections(true),
            follow: follow.beginning_with(parts),
            table: Table::new([COARSE, MIDDLE, FINE]),
            seen: 0,
        }
    }

    /// Lines that may be followed at once in a cache of so many.
    fn places(lines: u64) -> u64 {
        (lines / FOLLOWED).clamp(LEAST_FOLLOWED, MOST_FOLLOWED)
    }

    /// Keys that are remembered of a cache of so many lines.
    fn keys(config: &ExpectedReadsConfig, lines: u64) -> u64 {
        lines.saturating_mul(config.memory.into()).max(1024)
    }

    /// Bytes that it takes.
    pub(super) fn bytes_for(config: &ExpectedReadsConfig, lines: u64) -> u128 {
        let followed = u128::from(Self::places(lines));
        let keys = Self::keys(config, lines);
        Table::bytes_for([COARSE, MIDDLE, FINE])
            + Lines::bytes_for(keys)
            + Lines::bytes_for(keys / LINES_PER_REGION)
            + followed * Follow::<Kept>::BYTES as u128
    }

    fn line(&self, line: LineId) -> u64 {
        mix(self.seed, line.volume, line.offset >> self.line_shift)
    }

    fn region(&self, volume: VolumeId, offset: u64) -> u64 {
        mix(!self.seed, volume, offset >> REGION_SHIFT)
    }

    /// Takes note of the bytes `left..right` of an access, and says what is to be kept with it.
    pub(super) fn observe(&mut self, access: &BlockAccess, left: u64, right: u64) -> Hints {
        let part = self.streams.observe(access);
        let into = part.filter(|part| part.recognised || part.lane).map(|part| match part {
            // Where the stream began of which this is another lane is not known, but that it is long.
            part if part.lane => u64::MAX,
            part if part.down => part.origin.saturating_sub(access.offset),
            part => access.end().saturating_sub(part.origin),
        });
        let hints = Hints::new(into, access.bytes >> self.line_shift);
        if left >= right {
            return hints;
        }
        for region in left >> REGION_SHIFT..=(right - 1) >> REGION_SHIFT {
            let key = self.region(access.volume, region << REGION_SHIFT);
            self.regions.touch(key, access.op);
        }
        for line in left >> self.line_shift..=(right - 1) >> self.line_shift {
            let key = mix(self.seed, access.volume, line);
            self.lines.touch(key, access.op);
            self.followed(key, access.op);
        }
        hints
    }

    /// A line was read or written.
    fn followed(&mut self, key: u64, op: BlockOp) {
        let Some((of, _)) = self.follow.of(key, self.lines.clock()) else { return };
        match op {
            BlockOp::Read => of.reads = of.reads.saturating_add(1),
            BlockOp::Write => of.writes = of.writes.saturating_add(1),
        }
    }

    fn kind(&self, candidate: &BlockCandidate) -> Kind {
        let past = self.lines.recall(self.line(candidate.line));
        let region = self.regions.recall(self.region(candidate.line.volume, candidate.line.offset));
        Kind::new(candidate.op, candidate.observed.hints(), past, region)
    }

    /// What is expected of a line.
    pub(super) fn expected(&self, candidate: &BlockCandidate) -> Expected {
        let kind = self.kind(candidate);
        let [reads, writes] = self.table.expected(kind.depths(), kind.supposed());
        Expected {
            reads,
            writes,
            needed: self.config.least as f32,
            displaced: self.config.price as f32 * self.lines.reads_of_idle(),
            known: self.seen >= LEAST_SEEN,
        }
    }

    pub(super) fn judge(&self, candidate: &BlockCandidate) -> Verdict {
        let expected = self.expected(candidate);
        if expected.reads < expected.needed * (1.0 + expected.writes) {
            // That the cache is filled once is not charged; later writes of the line have to be earned all the same.
            let fills =
                !self.lines.is_full() && expected.reads >= expected.needed * expected.writes;
            return if fills { Verdict::IfFree } else { Verdict::Reject(Reason::FewReads) };
        }
        // A free slot costs nobody else's.
        if expected.reads < expected.displaced { Verdict::IfFree } else { Verdict::Admit }
    }

    /// A line was judged, by this policy and whatever others are asked.
    pub(super) fn judged(&mut self, candidate: &BlockCandidate, verdict: Verdict) {
        // Before the first has left there are free slots.
        let admitted = verdict.is_admit() || verdict == Verdict::IfFree && !self.lines.is_full();
        let (now, lifetime) = (self.lines.clock(), self.lines.lifetime());
        let (table, seen) = (&mut self.table, &mut self.seen);
        self.follow.next(now, |of| {
            let kind = Kind(u16::from_le_bytes(of.kind));
            table.learn(kind.depths(), [of.reads.into(), of.writes.into()]);
            *seen = seen.saturating_add(1);
        });
        let key = self.line(candidate.line);
        if self.lines.recall(key).held {
            // It is cached as far as is known here, and not to be decided about.
            return;
        }
        if self.follow.follows(key) {
            let kind = self.kind(candidate).0.to_le_bytes();
            let kept = Kept { kind, ..Kept::default() };
            self.follow.judged(key, now, lifetime, kept);
        }
        if admitted {
            self.lines.admitted(key, true);
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.lines.memory_bytes()
            + self.regions.memory_bytes()
            + self.follow.memory_bytes()
            + self.table.memory_bytes()
            + self.streams.memory_bytes()
    }
}

#[cfg(test)]
mod tests;
