//! What volumes may have of the cache: volumes by number, with their accounts, and what of them is pinned.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_engine::block::node::owners::{Governed, govern};
use larder_engine::block::node::share::{Account, Pins, Share, ShareLines};
use larder_format::block::Layout;
use larder_policy::block::{Selection, VolumeId};

/// A volume that has come.
#[derive(Debug)]
pub(super) struct Sharer {
    pub id: VolumeId,
    bytes: u64,
    pub account: Account,
    /// Something is selected of it.
    selected: AtomicBool,
}

impl Sharer {
    pub(super) fn is_selected(&self) -> bool {
        self.selected.load(Ordering::Relaxed)
    }
}

impl Governed for Sharer {
    fn id(&self) -> VolumeId {
        self.id
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn select(&self, selected: bool) {
        self.selected.store(selected, Ordering::Relaxed);
    }
}

/// Volumes that have come, and what is stated of those that may.
#[derive(Debug)]
pub(super) struct Shares {
    pub pins: Pins,
    stated: BTreeMap<u32, ShareLines>,
    selection: Selection,
    volumes: RefCell<BTreeMap<u32, Arc<Sharer>>>,
}

impl Shares {
    /// The shares that are stated, by volume, and what is selected.
    ///
    /// # Errors
    /// When one makes no sense in a cache of this size: the volume and why.
    pub(super) fn new(
        stated: impl Iterator<Item = (u32, Share)>,
        selection: Selection,
        layout: &Layout,
    ) -> Result<Shares, (u32, String)> {
        let lines = |(volume, share)| {
            let lines = ShareLines::new(share, layout.capacity(), layout.line);
            lines.map(|lines| (volume, lines)).map_err(|why| (volume, why))
        };
        Ok(Shares {
            pins: Pins::new(layout.capacity() * u64::from(layout.line)),
            stated: stated.map(lines).collect::<Result<_, _>>()?,
            selection,
            volumes: RefCell::default(),
        })
    }

    /// What is cached always or never.
    pub(super) fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Whether lines are counted. Where no volume can have a share and nothing is selected no account is asked, and a count takes its time.
    pub(super) fn are_counted(&self) -> bool {
        !self.stated.is_empty() || self.selection.volumes().next().is_some()
    }

    /// A volume comes, of so many bytes.
    pub(super) fn comes(&self, volume: u32, bytes: u64) {
        let share = self.stated.get(&volume).copied().unwrap_or_default();
        let (id, account) = (VolumeId(volume), Account::new(share));
        let sharer = Sharer { id, bytes, account, selected: AtomicBool::new(false) };
        let mut volumes = self.volumes.borrow_mut();
        volumes.insert(volume, Arc::new(sharer));
        govern(volumes.values().map(|v| &**v), &self.selection, &self.pins);
    }

    /// The volume of this number, if it has come.
    pub(super) fn of(&self, volume: u32) -> Option<Arc<Sharer>> {
        self.volumes.borrow().get(&volume).cloned()
    }

    /// Volumes have so many lines, by a count.
    pub(super) fn set(&self, counts: &BTreeMap<u32, u64>) {
        for (volume, sharer) in &*self.volumes.borrow() {
            sharer.account.set(counts.get(volume).copied().unwrap_or(0));
        }
    }
}
