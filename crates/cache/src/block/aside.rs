//! Volumes that were put aside: the cache has lines of them, and serves them to nobody until they are attached again.

use std::sync::{Arc, PoisonError};

use larder_engine::block::GroupId;
use larder_engine::block::node::owners;
use larder_format::block::{BlockSuperblock, VolumeState};
use serde::{Deserialize, Serialize};

use super::{Core, locked};

/// A volume that was put aside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AsideVolume {
    /// Its name.
    pub name: String,
    /// Its size when it was put aside, bytes.
    pub bytes: u64,
    /// Lines of it that are cached still, as of the last count; `None` before the first.
    pub lines: Option<u64>,
    /// It was put aside with what is dirty, or its store was not there at the start: bytes that the store lacks, and the write log has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub carried_bytes: Option<u64>,
}

/// One of them, and its part of the line space.
#[derive(Clone, Debug)]
pub(super) struct Aside {
    volume: AsideVolume,
    /// Its attachment number, if it may be dirty.
    carried: Option<u32>,
    first_group: u64,
    groups: u64,
}

/// All of them, in the order of their parts of the line space.
pub(super) type AsideVolumes = Arc<Vec<Aside>>;

impl Aside {
    /// The volumes of a superblock that are not in use. What was counted of one that lies where it lay is kept.
    pub(super) fn of(superblock: &BlockSuperblock, known: &[Aside]) -> AsideVolumes {
        let aside = superblock.volumes.iter().filter(|v| v.state == VolumeState::Detached);
        let mut all: Vec<Aside> = aside
            .map(|v| {
                let same = |a: &&Aside| a.volume.name == v.name && a.first_group == v.first_group;
                Aside {
                    volume: AsideVolume {
                        name: v.name.clone(),
                        bytes: v.bytes,
                        lines: known.iter().find(same).and_then(|a| a.volume.lines),
                        carried_bytes: None,
                    },
                    carried: v.write_back.filter(|w| w.holds.may_be_dirty()).map(|w| w.attachment),
                    first_group: v.first_group,
                    groups: v.groups,
                }
            })
            .collect();
        all.sort_by_key(|a| a.first_group);
        Arc::new(all)
    }

    /// The place in `all` of the volume that a group belongs to.
    pub(super) fn at(all: &[Aside], group: GroupId) -> Option<usize> {
        owners::aside_at(all, |a| (a.first_group, a.groups), group)
    }
}

impl Core {
    /// The volumes that were put aside, by name. None where the cache is out of use: nothing that was cached is used again.
    pub fn put_aside(&self) -> Vec<AsideVolume> {
        if !self.is_enabled() {
            return Vec::new();
        }
        let mut all: Vec<AsideVolume> =
            self.aside_volumes().iter().map(|a| self.with_dirty(a)).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    fn with_dirty(&self, aside: &Aside) -> AsideVolume {
        let of = self.back.get().zip(aside.carried);
        let status = of.and_then(|(back, of)| back.log().status(self.now(), of));
        let dirty = status.map_or(0, |status| status.dirty);
        AsideVolume { carried_bytes: aside.carried.map(|_| dirty), ..aside.volume.clone() }
    }

    pub(super) fn aside_volumes(&self) -> AsideVolumes {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The superblock says which volumes are in use and which are not, anew.
    pub(super) fn follow_superblock(&self, superblock: &BlockSuperblock) {
        let mut aside = locked(&self.aside);
        *aside = Aside::of(superblock, &aside);
    }

    /// What a count has found of the volumes that `counted` names, in its order.
    pub(super) fn count_aside(&self, counted: &[Aside], lines: impl Fn(usize) -> u64) {
        let mut aside = locked(&self.aside);
        let mut all = aside.to_vec();
        for now in &mut all {
            let same =
                |a: &Aside| a.volume.name == now.volume.name && a.first_group == now.first_group;
            if let Some(at) = counted.iter().position(same) {
                now.volume.lines = Some(lines(at));
            }
        }
        *aside = Arc::new(all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_belongs_to_the_volume_whose_part_it_lies_in() {
        let aside = |first_group, groups| Aside {
            volume: AsideVolume::default(),
            carried: None,
            first_group,
            groups,
        };
        let all = [aside(4, 4), aside(8, 1), aside(20, 2)];
        let found = |group| Aside::at(&all, GroupId(group));
        assert_eq!(
            [3, 4, 7, 8, 9, 19, 21, 22].map(found),
            [None, Some(0), Some(0), Some(1), None, None, Some(2), None]
        );
    }
}
