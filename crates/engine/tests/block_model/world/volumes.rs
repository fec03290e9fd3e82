//! The stores of the volumes: where each lies in the line space, and what becomes of it while no cache looks.

use std::collections::BTreeMap;

use larder_engine::block::node::start::places::{Comer, Decided};
use larder_engine::block::volumes::Found;
use larder_engine::block::{GROUP_LINES, LineId};
use larder_format::block::{BlockSuperblock, VolumeState};

use super::{GROUPS_EACH, PER_LINE, SECTOR, STRETCHES, VOLUME_LINES, World};
use crate::parts::Truth;

/// A store.
pub(super) struct Store {
    pub(super) name: String,
    /// What it is known by: another number for each change by somebody else.
    version: u64,
    /// Its size.
    pub(super) sectors: u64,
    /// Its first sector in the line space, while it is attached.
    pub(super) place: Option<u64>,
    /// It is to be attached at the next start.
    pub(super) wanted: bool,
    /// Its clients are leaving.
    pub(super) closing: bool,
    /// What it has, by its own sectors, while it is not attached; and what of that is not durable, with what is.
    pub(super) content: BTreeMap<u64, u64>,
    pub(super) owed: BTreeMap<u64, u64>,
}

impl Store {
    /// Clients use it.
    pub(super) fn is_open(&self) -> bool {
        self.place.is_some() && !self.closing
    }

    pub(super) fn identity(&self) -> [u8; 64] {
        let mut identity = [1; 64];
        identity[8..16].copy_from_slice(&self.version.to_le_bytes());
        identity
    }

    pub(super) fn comer(&self) -> Comer {
        let identity = self.identity();
        let proves = move |then: &[u8; 64], _| {
            if *then == identity { Ok(()) } else { Err("it was changed") }
        };
        let name = self.name.clone();
        Comer { name, bytes: self.sectors * SECTOR as u64, identity, proves: Box::new(proves) }
    }
}

/// Volumes that end so many sectors before a line does.
pub(super) fn stores(cut: u64) -> Vec<Store> {
    let store = |i| Store {
        name: format!("volume {i}"),
        version: 1,
        sectors: VOLUME_LINES * PER_LINE - cut,
        place: None,
        wanted: true,
        closing: false,
        content: BTreeMap::new(),
        owed: BTreeMap::new(),
    };
    (0..STRETCHES).map(store).collect()
}

impl World {
    /// Sectors of a region: volumes begin with one.
    pub(super) fn per_region(&self) -> u64 {
        self.layout.region_groups * u64::from(GROUP_LINES) * PER_LINE
    }

    /// The volume that has a sector of the line space.
    pub(super) fn volume_at(&self, at: u64) -> Option<usize> {
        let place = at / self.per_region() * self.per_region();
        self.volumes.iter().position(|v| v.place == Some(place))
    }

    /// Any volume that clients use: its first sector, and how many it has.
    pub(super) fn any_volume(&mut self) -> (u64, u64) {
        let first = self.rng.below(self.volumes.len() as u64) as usize;
        let all = self.volumes.iter().cycle().skip(first).take(self.volumes.len());
        let mut open = all.filter(|v| v.is_open());
        let found = open.find_map(|v| v.place.map(|place| (place, v.sectors)));
        found.expect("one volume is always used")
    }

    /// Nobody is attached: each store has what it has.
    fn take_contents(&mut self) {
        let per = self.per_region();
        for store in &mut self.volumes {
            let Some(place) = store.place.take() else { continue };
            let mut own = self.backing.split_off(&place);
            self.backing.append(&mut own.split_off(&(place + per)));
            store.content = own.into_iter().map(|(s, v)| (s - place, v)).collect();
        }
    }

    /// Volumes lie where the superblock has them from now on.
    pub(super) fn place(&mut self, sb: &BlockSuperblock) {
        self.take_contents();
        let of_group = u64::from(GROUP_LINES) * PER_LINE;
        self.aside.clear();
        for volume in &sb.volumes {
            let place = volume.first_group * of_group;
            let store = self.volumes.iter_mut().find(|s| s.name == volume.name);
            match store.filter(|_| volume.state == VolumeState::Attached) {
                Some(store) => {
                    store.place = Some(place);
                    let content = std::mem::take(&mut store.content);
                    self.backing.extend(content.into_iter().map(|(s, v)| (s + place, v)));
                }
                None => self.aside.push(place),
            }
        }
        self.truth.clear();
        for &sector in self.backing.keys() {
            self.truth.entry(sector).or_default();
        }
        self.backing_is_true();
        self.scan = None;
    }

    /// Whether lines may be cached there that are nobody's now: of a volume that was put aside.
    pub(super) fn is_aside(&self, line: LineId) -> bool {
        let place = line.0 * PER_LINE / self.per_region() * self.per_region();
        self.aside.contains(&place)
    }

    /// No cache looks: stores are changed by others and grow, and volumes are not attached any more, or again.
    pub(super) fn between_runs(&mut self) {
        self.take_contents();
        for volume in 0..self.volumes.len() {
            self.volumes[volume].owed.clear();
            let others = self.volumes.iter().enumerate().any(|(n, v)| n != volume && v.wanted);
            let what = self.rng.below(60);
            if (6..8).contains(&what) && others {
                self.volumes[volume].wanted ^= true;
                self.seen.changed_between += 1;
            } else {
                self.happens_to(volume, what);
            }
        }
    }

    /// A store is changed by somebody else, grows, or stays as it is.
    pub(super) fn happens_to(&mut self, volume: usize, what: u64) {
        let most = GROUPS_EACH * u64::from(GROUP_LINES) * PER_LINE;
        let all = self.rng.chance(0.5);
        let store = &mut self.volumes[volume];
        match what {
            0 | 1 => {
                store.version += 1;
                for sector in 0..store.sectors {
                    if all || self.rng.chance(0.1) {
                        store.content.insert(sector, self.next_op);
                        self.next_op += 1;
                    }
                }
            }
            2 if store.sectors + PER_LINE <= most => store.sectors += PER_LINE,
            _ => return,
        }
        self.seen.changed_between += 1;
    }

    /// A volume that comes lies at `place`, with what its store has.
    pub(super) fn put_contents(&mut self, volume: usize, place: u64) {
        let store = &mut self.volumes[volume];
        store.place = Some(place);
        self.aside.retain(|aside| *aside != place);
        for (sector, value) in std::mem::take(&mut store.content) {
            self.backing.insert(sector + place, value);
            let truth = Truth { settled: [value].into(), ..Truth::default() };
            self.truth.insert(sector + place, truth);
        }
    }

    /// Those that are to be attached.
    pub(super) fn comers(&self) -> Vec<Comer> {
        self.volumes.iter().filter(|v| v.wanted).map(Store::comer).collect()
    }

    /// What a start has decided of a volume.
    pub(super) fn has_come(&mut self, decided: &Decided) {
        match decided.outcome.as_ref().map(|taken| taken.found) {
            Ok(Found::Warm) => self.seen.came_warm += 1,
            Ok(Found::Changed | Found::Grown) => self.seen.came_cold += 1,
            Ok(Found::New) => {}
            Err(why) => self.fail(format!("{:?} cannot come: {why:?}", decided.coming)),
        }
    }
}
