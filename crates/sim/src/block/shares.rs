//! What volumes may have of the cache: their accounts, by number.

use std::collections::BTreeMap;

use larder_engine::block::node::share::{self, Account, Pins, Share, ShareLines, Side, Stays};
use larder_format::block::Layout;
use larder_policy::block::VolumeId;

/// Accounts of volumes. Empty where no share is stated: nothing is counted then.
#[derive(Debug, Default)]
pub(super) struct Shares {
    pins: Pins,
    stated: BTreeMap<u32, ShareLines>,
    accounts: BTreeMap<u32, Account>,
}

fn unpinned() -> bool {
    false
}

impl Shares {
    /// The shares that are stated, by volume.
    ///
    /// # Errors
    /// When one makes no sense in a cache of this size: the volume and why.
    pub(super) fn new(
        stated: impl Iterator<Item = (u32, Share)>,
        layout: &Layout,
    ) -> Result<Shares, (u32, String)> {
        let mut shares = Shares {
            pins: Pins::new(layout.capacity() * u64::from(layout.line)),
            ..Shares::default()
        };
        for (volume, share) in stated {
            let lines = ShareLines::new(share, layout.capacity(), layout.line);
            shares.stated.insert(volume, lines.map_err(|why| (volume, why))?);
        }
        shares.pins.set(0, shares.is_any());
        Ok(shares)
    }

    /// Whether any volume has a share.
    pub(super) fn is_any(&self) -> bool {
        !self.stated.is_empty()
    }

    fn know(&mut self, volume: u32) {
        let share = self.stated.get(&volume).copied().unwrap_or_default();
        self.accounts.entry(volume).or_insert_with(|| Account::new(share));
    }

    pub(super) fn keep(&mut self, victim: u32, line: Option<u32>) -> Stays {
        [Some(victim), line].into_iter().flatten().for_each(|volume| self.know(volume));
        let side = |volume: u32| {
            let account = &self.accounts[&volume];
            Side { volume: VolumeId(volume), account, pinned: unpinned }
        };
        share::keep(&self.pins, &side(victim), line.map(side).as_ref())
    }

    pub(super) fn keep_page(&mut self, groups: Vec<(u32, u64)>) -> bool {
        groups.iter().for_each(|g| self.know(g.0));
        let accounts = groups.iter().map(|(volume, lines)| (&self.accounts[volume], *lines));
        share::keep_page(&self.pins, accounts, unpinned)
    }

    pub(super) fn may_grow(&mut self, volume: u32) -> bool {
        self.know(volume);
        self.accounts[&volume].may_grow()
    }

    pub(super) fn not_taken(&mut self, victim: u32, line: u32) {
        if let (Some(victim), Some(line)) = (self.accounts.get(&victim), self.accounts.get(&line)) {
            share::not_taken(victim, line);
        }
    }

    /// Volumes have so many lines, by a count.
    pub(super) fn set(&mut self, counts: &BTreeMap<u32, u64>) {
        counts.keys().for_each(|&volume| self.know(volume));
        for (volume, account) in &self.accounts {
            account.set(counts.get(volume).copied().unwrap_or(0));
        }
    }
}
