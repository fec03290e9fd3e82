//! Whose a line is, and what follows from that when lines come and go: each host says where its volumes lie, and what is asked of a line is answered here
//! for all of them.
//!
//! [`Placed`] finds a volume by its place in the line space; hosts that know volumes otherwise implement [`Owners`] by themselves.

use larder_format::block::{BlockSuperblock, VolumeState};
use larder_policy::block::{BlockKind, LineId as PolicyLine, Reason, Selection, VolumeId};

use super::share::{self, Account, Pins, Side, Stays};
use crate::block::api::{GROUP_LINES, GroupId, LineId};

/// A line as admission knows it, and what it holds.
pub type Seen = (PolicyLine, BlockKind);

/// What a host knows of lines and volumes.
pub trait Owners {
    /// A volume. A copy of it is cheap.
    type Volume: Clone;
    /// What is pinned of all volumes.
    fn pins(&self) -> &Pins;
    /// Shards: every so manieth group is in the same.
    fn shards(&self) -> u32;
    /// The volume that has a line, if it is anybody's.
    fn owner(&self, line: LineId) -> Option<Self::Volume>;
    /// A volume's number.
    fn id(&self, volume: &Self::Volume) -> VolumeId;
    /// Its lines, and how many it may have.
    fn account<'a>(&'a self, volume: &'a Self::Volume) -> &'a Account;
    /// Whether anything is selected of it.
    fn selects(&self, volume: &Self::Volume) -> bool;
    /// Whether a line of it is selected to be cached always.
    fn is_pinned(&self, volume: &Self::Volume, line: LineId) -> bool;
    /// A line of it is refused for this reason; no policy was asked.
    fn refused(&self, volume: &Self::Volume, reason: Reason);
}

/// Who is told of lines that an operator's work has dropped, so that ceilings do not hold too early until lines are counted again.
pub trait Accounts {
    /// So many lines are gone from the map, all of the volume that has `line`, if it is anybody's.
    fn dropped(&self, line: LineId, lines: u64);
}

/// The account of the volume that has them.
impl<O: Owners> Accounts for O {
    fn dropped(&self, line: LineId, lines: u64) {
        if let Some(volume) = self.owner(line) {
            self.account(&volume).dropped(lines);
        }
    }
}

/// Whose a group is when lines are counted: an attached volume's, or that of one that was put aside, by its place among them.
/// (Where a page of a table is several volumes' each is taken to have its part, so those that are put aside have theirs.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Whose {
    /// Of this number.
    Attached(VolumeId),
    /// Among [`put_aside`], or what is in its order.
    Aside(usize),
}

/// Where the volumes lie that were put aside, each with its first group and how many there are, in this order.
pub fn put_aside(superblock: &BlockSuperblock) -> Vec<(u64, u64)> {
    let aside = superblock.volumes.iter().filter(|v| v.state == VolumeState::Detached);
    let mut all: Vec<_> = aside.map(|v| (v.first_group, v.groups)).collect();
    all.sort_unstable();
    all
}

/// The place in `all` of the volume that a group belongs to; `at` says where one of them lies.
pub fn aside_at<A>(all: &[A], at: impl Fn(&A) -> (u64, u64), group: GroupId) -> Option<usize> {
    let after = all.partition_point(|a| at(a).0 <= group.0);
    let found = after.checked_sub(1)?;
    let (first, groups) = at(&all[found]);
    (group.0 - first < groups).then_some(found)
}

/// Whether the line `victim` stays, though `line` would take its place (`None`: it is only about room). If not, it counts as evicted.
pub fn keep<O: Owners>(owners: &O, victim: LineId, line: Option<LineId>) -> bool {
    let Some(owner) = owners.owner(victim) else { return false };
    let of = line.and_then(|line| owners.owner(line).map(|v| (v, line)));
    let pinned = || owners.is_pinned(&owner, victim);
    let its = Side { volume: owners.id(&owner), account: owners.account(&owner), pinned };
    let comes = of.as_ref().map(|(v, line)| {
        let pinned = || owners.is_pinned(v, *line);
        Side { volume: owners.id(v), account: owners.account(v), pinned }
    });
    match share::keep(owners.pins(), &its, comes.as_ref()) {
        Stays::No => false,
        Stays::Yes(reason) => {
            if let (Some(reason), Some((of, _))) = (reason, &of) {
                owners.refused(of, reason);
            }
            true
        }
    }
}

/// Whether `lines` lines, which lie nobody knows where in a shard's groups from `first` to `last`, stay. If not, they count as evicted.
pub fn keep_groups<O: Owners>(owners: &O, first: GroupId, last: GroupId, lines: u32) -> bool {
    let shares = of_page(owners, first, last, lines);
    let groups = (first.0..=last.0).step_by(owners.shards().max(1) as usize).map(GroupId);
    let mut all = groups.flat_map(|group| (0..GROUP_LINES).map(move |i| group.line(i)));
    let always = |line: LineId| {
        owners.owner(line).is_some_and(|v| owners.selects(&v) && owners.is_pinned(&v, line))
    };
    let pinned = || shares.iter().any(|(v, _)| owners.selects(v)) && all.any(always);
    let accounts = shares.iter().map(|(v, lines)| (owners.account(v), *lines));
    share::keep_page(owners.pins(), accounts, pinned)
}

/// Which volumes have how many of the lines of a page: see [`share::of_page`].
pub fn of_page<O: Owners>(
    owners: &O,
    first: GroupId,
    last: GroupId,
    lines: u32,
) -> Vec<(O::Volume, u64)> {
    let of = |group: GroupId| owners.owner(group.line(0)).map(|v| (owners.id(&v), v));
    share::of_page((first, last), owners.shards().into(), lines.into(), of)
}

/// Whether the volume of a line may have one more. If so, it counts as there.
pub fn may_grow<O: Owners>(owners: &O, line: LineId) -> bool {
    let Some(volume) = owners.owner(line) else { return true };
    let grows = owners.account(&volume).may_grow();
    if !grows {
        owners.refused(&volume, Reason::Ceiling);
    }
    grows
}

/// Whether a line is rather cached than `victim`: asked of the volume's admission, which `prefers` asks with both. If not, what [`keep`] let go stays after
/// all.
pub fn prefer<O: Owners>(
    owners: &O,
    line: LineId,
    victim: LineId,
    prefers: impl FnOnce(&O::Volume, &O::Volume) -> bool,
) -> bool {
    let (Some(of), Some(its)) = (owners.owner(line), owners.owner(victim)) else { return true };
    let preferred = prefers(&of, &its);
    if !preferred {
        share::not_taken(owners.account(&its), owners.account(&of));
    }
    preferred
}

/// A volume that may have a share, and of which something may be selected.
pub trait Governed {
    /// Its number.
    fn id(&self) -> VolumeId;
    /// Its bytes.
    fn bytes(&self) -> u64;
    /// Its lines, and how many it may have.
    fn account(&self) -> &Account;
    /// Something is selected of it, or nothing is.
    fn select(&self, selected: bool);
}

/// What is selected has changed, which volumes there are (all of them are `volumes`), or how long they are.
pub fn govern<'a, V: Governed + 'a>(
    volumes: impl Iterator<Item = &'a V>,
    selection: &Selection,
    pins: &Pins,
) {
    let (mut governed, mut pinned) = (false, 0);
    for volume in volumes {
        let selected = selection.selects(volume.id());
        volume.select(selected);
        governed |= selected || volume.account().share().is_any();
        pinned += selection.pinned_bytes(volume.id(), volume.bytes());
    }
    pins.set(pinned, governed);
}

/// A volume with a place in the line space.
pub trait Volume: Governed {
    /// Its first byte in the line space.
    fn base(&self) -> u64;
}

/// Volumes by their places in the line space.
#[derive(Debug)]
pub struct Placed<V>(Vec<V>);

impl<V> Default for Placed<V> {
    fn default() -> Placed<V> {
        Placed(Vec::new())
    }
}

impl<T: Volume, V: std::ops::Deref<Target = T> + Clone> Placed<V> {
    /// The volumes are these from now on.
    pub fn set(&mut self, volumes: impl IntoIterator<Item = V>) {
        self.0 = volumes.into_iter().collect();
        self.moved();
    }

    /// They lie elsewhere.
    pub fn moved(&mut self) {
        self.0.sort_by_key(|v| v.base());
    }

    /// The volume at a byte of the line space.
    pub fn at(&self, byte: u64) -> Option<&V> {
        let after = self.0.partition_point(|v| v.base() <= byte);
        let volume = self.0.get(after.checked_sub(1)?)?;
        (byte < volume.base() + volume.bytes()).then_some(volume)
    }

    /// The volume that has bytes in `from..to` of the line space: the first of them.
    pub fn within(&self, from: u64, to: u64) -> Option<&V> {
        self.0.iter().find(|v| v.base() < to && from < v.base() + v.bytes())
    }

    /// What is selected has changed, which volumes there are, or how long they are.
    pub fn govern(&self, selection: &Selection, pins: &Pins) {
        govern(self.0.iter().map(|v| &**v), selection, pins);
    }
}
