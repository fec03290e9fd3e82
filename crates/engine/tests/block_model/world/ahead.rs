//! The queue, as a process of the daemon has it, over small volumes; and the client that reads in sequence.

use larder_engine::block::GROUP_LINES;
use larder_engine::block::address::Placing;
use larder_engine::block::node::held::Held;
use larder_engine::block::node::queue::{Config, Queue};
use larder_engine::block::{LineId, OpId, PartKind, Verdict};
use larder_format::block::Layout;

use super::{KEY, LINE, PER_LINE, SECTOR, World};

/// A client that has read so many bytes in sequence is read ahead of.
const LEAST: u64 = 6 * LINE;
/// A change of more groups has its range as a whole.
const RANGE_GROUPS: u64 = 2;

/// A queue that reads so many bytes ahead.
pub(super) fn queue_config(layout: &Layout, ahead: u64) -> Config {
    Config {
        range_groups: RANGE_GROUPS,
        range_steps: 7,
        least_void: 0,
        ..Config::new(layout, Placing::of(layout, KEY), ahead)
    }
}

impl World {
    /// What the operator never wants to have cached: a stretch of each volume, in the middle of a group.
    pub(super) fn is_never(line: LineId) -> bool {
        // (Volumes begin with a region, which has a multiple of so many lines.)
        (22..25).contains(&(line.0 % (4 * u64::from(GROUP_LINES))))
    }

    /// A new process has nothing under way and knows no streams.
    pub(super) fn begin_streams(&mut self) {
        let config = queue_config(&self.layout, self.most_ahead);
        self.queue = Queue::new(0, config).with_least(LEAST);
        self.held = self.shards.iter().map(|_| Held::default()).collect();
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            self.queue.plant(fault);
        }
    }

    fn is_open(&self, at: u64) -> bool {
        self.volume_at(at).is_some_and(|volume| self.volumes[volume].is_open())
    }

    /// The client that reads in sequence reads on.
    pub(super) fn scan_on(&mut self) {
        let at = match self.scan {
            Some(at) if self.is_open(at) && !self.rng.chance(0.03) => at,
            _ if self.rng.chance(0.5) => self.random_sector() / PER_LINE * PER_LINE,
            _ => self.any_part().0,
        };
        let end = self.end_of_stretch(at);
        let len = (self.rng.range(1, 5) * PER_LINE).min(end - at);
        self.scan = Some(at + len).filter(|&next| next < end);
        let verdict = if self.scans_if_free { Verdict::IfFree } else { Verdict::Admit };
        self.submit_op(PartKind::Read, at, len, verdict);
    }

    /// The backing store is asked for bytes `at..at + len` on behalf of `op`, or of what is read ahead of it.
    pub(super) fn store_is_asked(&mut self, op: OpId, at: u64, len: u32, ahead: bool) {
        let sector = SECTOR as u64;
        let end = self.end_of_stretch(at / sector) * sector;
        if at + u64::from(len) > end {
            return self
                .fail(format!("{op:?}: {len} bytes at {at}, behind the volume's end {end}"));
        }
        self.seen.ahead_reads += u64::from(ahead);
    }
}
