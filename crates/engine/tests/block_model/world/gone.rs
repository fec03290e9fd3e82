//! Lines that have left the map with the last batch of the log. If that batch rots nobody misses it, and after a power cut they are named again.

use larder_engine::block::{LineId, PartKind, Verdict};
use larder_format::PAGE_SIZE;
use larder_format::block::log::decode_log;

use super::{PER_LINE, SECTOR, World};

/// See the [module](self).
#[derive(Default)]
pub(super) struct Gone {
    /// What the last batch says has left.
    lines: Vec<LineId>,
    /// The last page of the log rots before the next start.
    rots: bool,
}

impl Gone {
    /// Of another batch this shard is told first.
    pub(super) fn batch(&mut self) {
        self.lines.clear();
    }

    pub(super) fn add(&mut self, line: LineId) {
        self.lines.push(line);
    }
}

impl World {
    /// A client changes a line that has left with the last batch, and the power fails before the bit of its region is durable. The batch rots then,
    /// or has rotted before: a process was killed, and the next has the memory of that.
    pub(super) fn change_what_has_gone(&mut self) {
        if self.gone.lines.is_empty() {
            return;
        }
        let line = self.gone.lines[self.rng.below(self.gone.lines.len() as u64) as usize];
        let before = self.rng.chance(0.5);
        if before {
            self.gone.rots = true;
            self.kill();
        }
        let at = line.0 * PER_LINE;
        if self.volume_at(at).is_none() || at + PER_LINE > self.end_of_stretch(at) {
            return;
        }
        self.submit_op(PartKind::Write, at, PER_LINE, Verdict::Reject);
        (0..self.rng.below(12)).for_each(|_| self.advance());
        if self.is_asked() && self.rng.chance(0.6) {
            self.gone.rots = !before;
            self.power_cut();
        }
    }

    /// The last page of the log that a start reads, if it is to rot now, and the generation of the superblock.
    pub(super) fn rotting_end(&mut self) -> Option<(u64, u64)> {
        let rots = std::mem::take(&mut self.gone.rots);
        if !rots || self.layout.is_sparse() {
            return None;
        }
        let sb = self.superblock();
        let last = self.last_of_log(1 - sb.area, sb.generation + 1);
        let last = last.or_else(|| self.last_of_log(sb.area, sb.generation))?;
        Some((last, sb.generation))
    }

    /// Where the last page of the log of `generation` is, in `area`.
    fn last_of_log(&self, area: u32, generation: u64) -> Option<u64> {
        let at = |number: u64| self.layout.log_at(area) + number * PAGE_SIZE as u64;
        let is_read = |&number: &u64| {
            let page = self.device.borrow().read(at(number), PAGE_SIZE / SECTOR).concat();
            decode_log(&page, generation, number).is_some()
        };
        (0..self.layout.log_pages).take_while(is_read).last().map(at)
    }
}
