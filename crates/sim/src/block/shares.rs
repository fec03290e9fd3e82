//! What volumes may have of the cache: their accounts, by number, and what of them is pinned.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use larder_engine::block::node::share::{Account, Pins, Share, ShareLines};
use larder_format::block::Layout;
use larder_policy::block::Selection;

/// Accounts of volumes. Empty where no share is stated and nothing is selected: nothing is counted then.
#[derive(Debug, Default)]
pub(super) struct Shares {
    pub pins: Pins,
    stated: BTreeMap<u32, ShareLines>,
    accounts: RefCell<BTreeMap<u32, Arc<Account>>>,
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

    /// The account of a volume.
    pub(super) fn account(&self, volume: u32) -> Arc<Account> {
        let share = || self.stated.get(&volume).copied().unwrap_or_default();
        let mut accounts = self.accounts.borrow_mut();
        accounts.entry(volume).or_insert_with(|| Arc::new(Account::new(share()))).clone()
    }

    /// Volumes have so many lines, by a count.
    pub(super) fn set(&self, counts: &BTreeMap<u32, u64>) {
        counts.keys().for_each(|&volume| drop(self.account(volume)));
        for (volume, account) in &*self.accounts.borrow() {
            account.set(counts.get(volume).copied().unwrap_or(0));
        }
    }
}
