//! What the volumes of a run may have of the cache, and which lines are pinned.

use std::cell::Cell;

use larder_engine::block::node::share::{
    Account, Count, Pins, ShareLines, Side, Stays, keep, keep_page, not_taken, of_page,
};
use larder_engine::block::{BlockShard, GROUP_LINES, GroupId, LineId};
use larder_policy::block::{Reason, VolumeId};

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shares {
    pins: Pins,
    accounts: Vec<Account>,
    /// Lines of the stretch in which a volume lies, and shards.
    stretch: u64,
    shards: u32,
    pub(crate) stayed: Cell<u64>,
    pub(crate) at_ceiling: Cell<u64>,
}

fn is_pinned(line: LineId) -> bool {
    line.0.is_multiple_of(7)
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
            stayed: Cell::default(),
            at_ceiling: Cell::default(),
        }
    }

    fn volume(&self, line: LineId) -> usize {
        ((line.0 / self.stretch) as usize).min(self.accounts.len() - 1)
    }

    fn side(&self, line: LineId) -> Side<'_, impl Fn() -> bool + use<>> {
        let volume = self.volume(line);
        let account = &self.accounts[volume];
        Side { volume: VolumeId(volume as u32), account, pinned: move || is_pinned(line) }
    }

    pub(crate) fn keep(&self, victim: LineId, line: Option<LineId>) -> bool {
        match keep(&self.pins, &self.side(victim), line.map(|l| self.side(l)).as_ref()) {
            Stays::No => {
                let own = line.is_some_and(|l| self.volume(l) == self.volume(victim));
                let pinned = is_pinned(victim) && !line.is_some_and(is_pinned);
                assert!(!pinned, "{victim:?} is pinned, and goes for {line:?}");
                let account = &self.accounts[self.volume(victim)];
                let floor = account.share().floor;
                let below = floor > 0 && account.lines() < floor;
                assert!(
                    own || is_pinned(victim) || !below,
                    "{victim:?} goes for {line:?}: a floor"
                );
                false
            }
            Stays::Yes(Some(Reason::Ceiling)) => {
                more(&self.at_ceiling);
                true
            }
            Stays::Yes(_) => {
                more(&self.stayed);
                true
            }
        }
    }

    pub(crate) fn keep_page(&self, first: GroupId, last: GroupId, lines: u32) -> bool {
        let of = |group: GroupId| {
            let volume = self.volume(group.line(0));
            Some((VolumeId(volume as u32), volume))
        };
        let shares = of_page((first, last), self.shards.into(), lines.into(), of);
        let groups = (first.0..=last.0).step_by(self.shards as usize);
        let mut all = groups.flat_map(|g| (0..GROUP_LINES).map(move |i| GroupId(g).line(i)));
        // (With a line in seven no page would ever go.)
        let pinned = || all.any(|line| line.0.is_multiple_of(49));
        let accounts = shares.iter().map(|(volume, lines)| (&self.accounts[*volume], *lines));
        let stays = keep_page(&self.pins, accounts, pinned);
        self.stayed.set(self.stayed.get() + u64::from(stays));
        stays
    }

    pub(crate) fn may_grow(&self, line: LineId) -> bool {
        let grows = self.accounts[self.volume(line)].may_grow();
        if !grows {
            more(&self.at_ceiling);
        }
        grows
    }

    pub(crate) fn not_taken(&self, victim: LineId, line: LineId) {
        not_taken(&self.accounts[self.volume(victim)], &self.accounts[self.volume(line)]);
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
