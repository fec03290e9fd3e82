//! What volumes may have of the cache: their accounts, by number, and what of them is pinned.

use std::collections::BTreeMap;

use larder_engine::block::node::share::{self, Account, Pins, Share, ShareLines, Side, Stays};
use larder_format::block::Layout;
use larder_policy::block::{Selection, VolumeId};

/// Accounts of volumes. Empty where no share is stated and nothing is selected: nothing is counted then.
#[derive(Debug, Default)]
pub(super) struct Shares {
    pins: Pins,
    stated: BTreeMap<u32, ShareLines>,
    accounts: BTreeMap<u32, Account>,
    governed: bool,
}

impl Shares {
    /// The shares that are stated, by volume, and what is selected of volumes of `volume` bytes.
    ///
    /// # Errors
    /// When one makes no sense in a cache of this size: the volume and why.
    pub(super) fn new(
        stated: impl Iterator<Item = (u32, Share)>,
        selection: &Selection,
        volume: u64,
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
        let pinned = selection.volumes().map(|id| selection.pinned_bytes(id, volume)).sum();
        shares.governed = !shares.stated.is_empty() || selection.volumes().next().is_some();
        shares.pins.set(pinned, shares.governed);
        Ok(shares)
    }

    /// Whether any volume has a share, or anything is selected.
    pub(super) fn is_any(&self) -> bool {
        self.governed
    }

    fn know(&mut self, volume: u32) {
        let share = self.stated.get(&volume).copied().unwrap_or_default();
        self.accounts.entry(volume).or_insert_with(|| Account::new(share));
    }

    /// Lines are given as their volumes, and what says whether they are pinned.
    pub(super) fn keep<P: Fn() -> bool>(
        &mut self,
        victim: (u32, P),
        line: Option<(u32, P)>,
    ) -> Stays {
        let volumes = [Some(victim.0), line.as_ref().map(|line| line.0)];
        volumes.into_iter().flatten().for_each(|volume| self.know(volume));
        let side = |(volume, pinned): (u32, P)| Side {
            volume: VolumeId(volume),
            account: &self.accounts[&volume],
            pinned,
        };
        share::keep(&self.pins, &side(victim), line.map(side).as_ref())
    }

    pub(super) fn keep_page(
        &mut self,
        groups: Vec<(u32, u64)>,
        pinned: impl FnOnce() -> bool,
    ) -> bool {
        groups.iter().for_each(|g| self.know(g.0));
        let accounts = groups.iter().map(|(volume, lines)| (&self.accounts[volume], *lines));
        share::keep_page(&self.pins, accounts, pinned)
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
