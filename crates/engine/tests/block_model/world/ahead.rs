//! Reading ahead, as a worker of the daemon does it: the engine's streams say how far, the operator's rules where it ends.

use larder_engine::block::node::readahead::{ReadAhead, Streams};
use larder_engine::block::{GROUP_LINES, LineId, OpId, PartKind, Verdict};
use larder_policy::block::Rule;

use super::{LINE, PER_LINE, SECTOR, STRETCHES, World};

/// A client that has read so many bytes in sequence is read ahead of.
const LEAST: u64 = 6 * LINE;

impl World {
    /// What the operator never wants to have cached: a stretch of each volume, in the middle of a group.
    pub(super) fn is_never(line: LineId) -> bool {
        // (Volumes begin with a region, which has a multiple of so many lines.)
        (22..25).contains(&(line.0 % (4 * u64::from(GROUP_LINES))))
    }

    /// A new process knows no streams.
    pub(super) fn begin_streams(&mut self) {
        let group = u64::from(GROUP_LINES) * LINE;
        self.streams = Streams::new(self.most_ahead, group).with_least(LEAST);
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            self.streams.plant(fault);
        }
    }

    /// The client that reads in sequence reads on.
    pub(super) fn scan_on(&mut self) {
        let at = match self.scan {
            Some(at) if !self.rng.chance(0.03) => at,
            _ if self.rng.chance(0.5) => self.random_sector() / PER_LINE * PER_LINE,
            _ => {
                let volume = self.rng.below(STRETCHES);
                volume * self.layout.region_groups * u64::from(GROUP_LINES) * PER_LINE
            }
        };
        let end = self.end_of_stretch(at);
        let len = (self.rng.range(1, 5) * PER_LINE).min(end - at);
        self.scan = Some(at + len).filter(|&next| next < end);
        let verdict = if self.scans_if_free { Verdict::IfFree } else { Verdict::Admit };
        self.submit_op(PartKind::Read, at, len, verdict, false);
    }

    /// A client reads sectors `at..at + len`, of all of which admission says the same.
    pub(super) fn read_by_client(&mut self, at: u64, len: u64, verdict: Verdict) {
        let sector = SECTOR as u64;
        let end = self.end_of_lines(at) * sector;
        let ahead = self.streams.read(at * sector, len * sector, end, verdict);
        self.to_read_ahead.extend(ahead);
    }

    /// The backing store is asked for bytes `at..at + len` on behalf of `op`.
    pub(super) fn store_is_asked(&mut self, op: OpId, at: u64, len: u32) {
        let sector = SECTOR as u64;
        let end = self.end_of_stretch(at / sector) * sector;
        if at + u64::from(len) > end {
            return self
                .fail(format!("{op:?}: {len} bytes at {at}, behind the volume's end {end}"));
        }
        let Some(o) = self.ops.get_mut(&op) else { return };
        o.asked_store = true;
        self.seen.ahead_reads += u64::from(o.ahead);
        if o.kind == PartKind::Read {
            let at = o.at * sector;
            let end = self.end_of_lines(at / sector) * sector;
            self.to_read_ahead.extend(self.streams.missed(at, end));
        }
    }

    /// What the streams have asked for, as far as the operator's rules are the same.
    pub(super) fn read_ahead(&mut self) {
        let sector = SECTOR as u64;
        for mut stretch in std::mem::take(&mut self.to_read_ahead) {
            let ReadAhead { from, to, verdict } = stretch;
            let per_region = self.layout.region_groups * u64::from(GROUP_LINES) * LINE;
            let base = from / per_region * per_region;
            let rule = |at: u64| World::is_never(LineId(at / LINE));
            stretch.to = self.streams.same_rule((from, to), base, LINE, rule);
            let now = self.now();
            while let Some((at, len)) =
                stretch.next(|bytes| self.limits.refuses(Rule::ByPolicy, now, bytes).is_some())
            {
                self.seen.aheads += 1;
                let (at, len) = (at / sector, len / sector);
                let end = self.end_of_lines(at);
                if at + len > end {
                    return self
                        .fail(format!("{len} sectors at {at} are read ahead, behind {end}"));
                }
                self.submit_op(PartKind::Prefetch, at, len, verdict, true);
            }
        }
    }
}
