//! At what pace things are done in a run: as soon as they can be, or as a server does them.

use larder_base::{Nanos, Rng};
use larder_engine::block::PartKind;
use larder_engine::block::node::maintenance::Pace;

use super::World;
use crate::parts::Event;

/// What is the same in the whole run, and to whom clients have turned.
#[derive(Default)]
pub(super) struct Habits {
    /// Records are gathered for so long, and for so long where somebody waits for what they make free.
    records: Nanos,
    commit: Nanos,
    /// A region is quiet after this time.
    pub(super) idle: Nanos,
    /// Steps of the log in a row.
    steps: usize,
    /// Records that a batch has room for, of each shard.
    pub(super) batch: usize,
    /// Some writes of the device take long.
    slow_writes: bool,
    /// Clients change some volumes at a time, and only read the others: their regions become quiet, and have lines.
    turns: bool,
    /// What they change now.
    changed: Changed,
}

/// What clients change.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Changed {
    #[default]
    All,
    Volume(usize),
    Nothing,
}

impl Habits {
    pub(super) fn of(seed: u64, rng: &mut Rng) -> Habits {
        let millis = |rng: &mut Rng, of: [u64; 4]| Nanos::from_millis(of[rng.below(4) as usize]);
        Habits {
            records: millis(rng, [0, 0, 20, 60]),
            commit: millis(rng, [0, 0, 0, 10]),
            idle: millis(rng, [30, 30, 30, 4]),
            steps: [1, 1, 2, 16][rng.below(4) as usize],
            batch: [usize::MAX, usize::MAX, usize::MAX, 3][rng.below(4) as usize],
            slow_writes: rng.chance(0.25),
            turns: seed % 5 == 1,
            changed: Changed::All,
        }
    }

    /// Maintenance does nothing later than it can, but for records.
    pub(super) fn pace(&self) -> Pace {
        Pace {
            gather: Nanos::ZERO,
            records: self.records,
            commit: self.commit,
            tick: Nanos::ZERO,
            steps: self.steps,
            ..Pace::default()
        }
    }
}

impl World {
    /// Clients turn to something else.
    pub(super) fn change_habits(&mut self) {
        if self.habits.turns && self.rng.chance(0.012) {
            self.habits.changed = match self.rng.below(3) {
                0 => Changed::All,
                1 => Changed::Volume(self.rng.below(self.volumes.len() as u64) as usize),
                _ => Changed::Nothing,
            };
        }
    }

    /// What a client does at a sector that has it in mind to do this.
    pub(super) fn habitual(&mut self, kind: PartKind, at: u64) -> PartKind {
        let may_change = match self.habits.changed {
            Changed::All => true,
            Changed::Volume(volume) => self.volume_at(at) == Some(volume),
            Changed::Nothing => false,
        };
        if kind.changes() && !may_change {
            self.seen.rests += 1;
            return PartKind::Read;
        }
        kind
    }

    /// Whether this I/O is a write of the device that takes longer yet.
    pub(super) fn is_slow_write(&mut self, at: usize) -> bool {
        if !self.habits.slow_writes || self.draining {
            return false;
        }
        let doing = &self.doing[at];
        let slow = match &doing.event {
            Event::FlashWrite(_, _, bytes) => bytes.lines().0.0.is_multiple_of(5),
            Event::Merge(_, merge, _) => merge.line.0.is_multiple_of(5),
            _ => false,
        };
        let waits = slow && doing.landed.is_none() && !self.rng.chance(0.01);
        self.seen.slow_writes += u64::from(waits);
        waits
    }
}
