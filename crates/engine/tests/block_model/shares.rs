//! What the volumes of a run may have of the cache, and which lines are pinned.

use std::cell::Cell;

use larder_engine::block::node::owners::{self, Owners};
use larder_engine::block::node::share::{Account, Count, Pins, ShareLines};
use larder_engine::block::{BlockShard, GroupId, LineId};
use larder_policy::block::{Reason, VolumeId};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shares {
    pins: Pins,
    accounts: Vec<Account>,
    /// Lines of the stretch in which a volume lies, and shards.
    stretch: u64,
    shards: u32,
    /// One line in 49 is pinned, and not one in seven.
    few_pinned: Cell<bool>,
    pub(crate) stayed: Cell<u64>,
    pub(crate) at_ceiling: Cell<u64>,
}

fn is_pinned(line: LineId) -> bool {
    line.0.is_multiple_of(7)
}

impl Owners for Shares {
    type Volume = usize;

    fn pins(&self) -> &Pins {
        &self.pins
    }

    fn shards(&self) -> u32 {
        self.shards
    }

    fn owner(&self, line: LineId) -> Option<usize> {
        Some(self.volume(line))
    }

    fn id(&self, volume: &usize) -> VolumeId {
        VolumeId(*volume as u32)
    }

    fn account<'a>(&'a self, volume: &'a usize) -> &'a Account {
        &self.accounts[*volume]
    }

    fn selects(&self, _: &usize) -> bool {
        true
    }

    fn is_pinned(&self, _: &usize, line: LineId) -> bool {
        if self.few_pinned.get() { line.0.is_multiple_of(49) } else { is_pinned(line) }
    }

    fn refused(&self, _: &usize, reason: Reason) {
        if reason == Reason::Ceiling {
            more(&self.at_ceiling);
        }
    }
}

fn more(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

impl Shares {
    /// Of so many volumes, each in a stretch of so many lines: the second has a floor, the third a ceiling.
    pub(crate) fn new(volumes: u64, stretch: u64, shards: u32, lines: u64) -> Shares {
        let share = |volume| match volume {
            1 => ShareLines { floor: lines / 8, ceiling: None },
            2 => ShareLines { floor: 0, ceiling: Some(lines / 4) },
            _ => ShareLines::default(),
        };
        let accounts = (0..volumes).map(|volume| Account::new(share(volume))).collect();
        let pins = Pins::new(lines);
        pins.set(lines / 7, true);
        Shares {
            pins,
            accounts,
            stretch,
            shards,
            few_pinned: Cell::new(false),
            stayed: Cell::default(),
            at_ceiling: Cell::default(),
        }
    }

    fn volume(&self, line: LineId) -> usize {
        ((line.0 / self.stretch) as usize).min(self.accounts.len() - 1)
    }

    pub(crate) fn keep(&self, victim: LineId, line: Option<LineId>) -> bool {
        let at_ceiling = self.at_ceiling.get();
        if owners::keep(self, victim, line) {
            if self.at_ceiling.get() == at_ceiling {
                more(&self.stayed);
            }
            return true;
        }
        let own = line.is_some_and(|l| self.volume(l) == self.volume(victim));
        let pinned = is_pinned(victim) && !line.is_some_and(is_pinned);
        assert!(!pinned, "{victim:?} is pinned, and goes for {line:?}");
        let account = &self.accounts[self.volume(victim)];
        let floor = account.share().floor;
        let below = floor > 0 && account.lines() < floor;
        assert!(own || is_pinned(victim) || !below, "{victim:?} goes for {line:?}: a floor");
        false
    }

    pub(crate) fn keep_page(&self, first: GroupId, last: GroupId, lines: u32) -> bool {
        // (With a line in seven no page would ever go.)
        self.few_pinned.set(true);
        let stays = owners::keep_groups(self, first, last, lines);
        self.few_pinned.set(false);
        self.stayed.set(self.stayed.get() + u64::from(stays));
        stays
    }

    pub(crate) fn may_grow(&self, line: LineId) -> bool {
        owners::may_grow(self, line)
    }

    pub(crate) fn prefer(&self, line: LineId, victim: LineId, preferred: bool) -> bool {
        owners::prefer(self, line, victim, |_, _| preferred)
    }

    /// The lines are counted.
    pub(crate) fn count(&self, shards: &[BlockShard]) {
        let mut counts = vec![0; self.accounts.len()];
        for shard in shards {
            let mut count = Count::default();
            let of = |group: GroupId| Some(VolumeId(self.volume(group.line(0)) as u32));
            while count.turn(shard, of, |volume, lines| counts[volume.0 as usize] += lines) {}
        }
        self.accounts.iter().zip(counts).for_each(|(account, lines)| account.set(lines));
    }
}
