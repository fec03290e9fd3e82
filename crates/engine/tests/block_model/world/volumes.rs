//! The stores of the volumes: where each lies in the line space, and what becomes of it while no cache looks.

use std::collections::BTreeMap;

use larder_engine::block::node::start::places::{Comer, Decided};
use larder_engine::block::volumes::{CannotGrow, Found, Growth, room_to_grow};
use larder_engine::block::{GROUP_LINES, LineId};
use larder_format::block::{BlockSuperblock, VolumeState};

use super::{GROUPS_EACH, PER_LINE, SECTOR, STRETCHES, VOLUME_LINES, World};

/// Sectors of each region of a volume that are in use at most, from its beginning on.
const MOST_USED: u64 = GROUPS_EACH * GROUP_LINES as u64 * PER_LINE;
use crate::parts::Truth;

/// A store.
pub(super) struct Store {
    pub(super) name: String,
    /// What it is known by: another number for each change by somebody else.
    version: u64,
    /// Its size, and what of that is served: it grows before the cache knows of it.
    pub(super) sectors: u64,
    served: u64,
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

    /// Behind its last sector in the line space.
    pub(super) fn end(&self) -> u64 {
        self.place.map_or(0, |place| place + self.served)
    }

    /// Its store has grown, and the cache does not know it: it comes without its lines.
    pub(super) fn has_outgrown(&self) -> bool {
        self.place.is_some() && self.sectors != self.served
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

    /// Sectors of the regions that it has, of so many each.
    fn span(&self, per_region: u64) -> u64 {
        self.served.next_multiple_of(per_region)
    }
}

/// The volume that has a sector of the line space, whose regions have so many.
pub(super) fn volume_at(volumes: &[Store], per_region: u64, at: u64) -> Option<usize> {
    let has = |v: &Store| v.place.is_some_and(|p| (p..p + v.span(per_region)).contains(&at));
    volumes.iter().position(has)
}

/// Volumes that end so many sectors before a line does.
pub(super) fn stores(cut: u64) -> Vec<Store> {
    let store = |i| Store {
        name: format!("volume {i}"),
        version: 1,
        sectors: VOLUME_LINES * PER_LINE - cut,
        served: VOLUME_LINES * PER_LINE - cut,
        place: None,
        wanted: true,
        closing: false,
        content: BTreeMap::new(),
        owed: BTreeMap::new(),
    };
    (0..STRETCHES).map(store).collect()
}

/// What lies in `place..place + span` of a map by sectors, by its own sectors; it is taken out.
pub(super) fn own(map: &mut BTreeMap<u64, u64>, place: u64, span: u64) -> BTreeMap<u64, u64> {
    let mut own = map.split_off(&place);
    map.append(&mut own.split_off(&(place + span)));
    own.into_iter().map(|(s, v)| (s - place, v)).collect()
}

impl World {
    /// Sectors of a region: volumes begin with one.
    pub(super) fn per_region(&self) -> u64 {
        self.layout.region_groups * u64::from(GROUP_LINES) * PER_LINE
    }

    /// The first sector of the region of a sector.
    pub(super) fn region_of(&self, at: u64) -> u64 {
        at / self.per_region() * self.per_region()
    }

    /// Sectors of the regions that a volume has.
    pub(super) fn span_of(&self, volume: usize) -> u64 {
        self.volumes[volume].span(self.per_region())
    }

    /// The volume that has a sector of the line space.
    pub(super) fn volume_at(&self, at: u64) -> Option<usize> {
        volume_at(&self.volumes, self.per_region(), at)
    }

    /// Where the volume of a sector begins; of one that is nobody's, its region.
    pub(super) fn base_of(&self, at: u64) -> u64 {
        let place = self.volume_at(at).and_then(|v| self.volumes[v].place);
        place.unwrap_or(self.region_of(at))
    }

    /// Any part of a volume that clients use, in a region of its own: its first sector, and how many are in use.
    pub(super) fn any_part(&mut self) -> (u64, u64) {
        let first = self.rng.below(self.volumes.len() as u64) as usize;
        let all = (0..self.volumes.len()).cycle().skip(first).take(self.volumes.len());
        let mut open = all.filter(|&v| self.volumes[v].is_open());
        let volume = open.next().expect("one volume is always used");
        let (per, regions) = (self.per_region(), self.span_of(volume) / self.per_region());
        let region = if regions > 1 { self.rng.below(regions) } else { 0 };
        let store = &self.volumes[volume];
        let from = store.place.expect("it is open") + region * per;
        (from, (store.end() - from).min(MOST_USED))
    }

    /// Nobody is attached: each store has what it has, and of that owes what it owes.
    pub(super) fn take_contents(&mut self) {
        for volume in 0..self.volumes.len() {
            let span = self.span_of(volume);
            let store = &mut self.volumes[volume];
            let Some(place) = store.place.take() else { continue };
            store.content = own(&mut self.backing, place, span);
            store.owed = own(&mut self.volatile, place, span);
        }
        if let Some(sector) = self.volatile.keys().next() {
            self.fail(format!("sector {sector} was written, and is nobody's"));
        }
    }

    /// Volumes lie where the superblock has them from now on.
    pub(super) fn place(&mut self, sb: &BlockSuperblock) {
        self.take_contents();
        let of_group = u64::from(GROUP_LINES) * PER_LINE;
        self.aside.clear();
        let per = self.per_region();
        for volume in &sb.volumes {
            let place = volume.first_group * of_group;
            let store = self.volumes.iter_mut().find(|s| s.name == volume.name);
            match store.filter(|_| volume.state == VolumeState::Attached) {
                Some(store) => {
                    (store.place, store.served) = (Some(place), volume.bytes / SECTOR as u64);
                    let content = std::mem::take(&mut store.content);
                    self.backing.extend(content.into_iter().map(|(s, v)| (s + place, v)));
                    let owed = std::mem::take(&mut store.owed);
                    self.volatile.extend(owed.into_iter().map(|(s, v)| (s + place, v)));
                }
                None => {
                    let regions = volume.groups / self.layout.region_groups;
                    self.aside.extend((0..regions).map(|r| place + r * per));
                }
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
        self.aside.contains(&self.region_of(line.0 * PER_LINE))
    }

    /// No cache looks: stores are changed by others and grow, and volumes are not attached any more, or again.
    pub(super) fn between_runs(&mut self) {
        self.take_contents();
        for volume in 0..self.volumes.len() {
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
        let (all, per) = (self.rng.chance(0.5), self.per_region());
        let store = &mut self.volumes[volume];
        match what {
            0 | 1 => {
                store.version += 1;
                for sector in (0..store.sectors).filter(|s| s % per < MOST_USED) {
                    if all || self.rng.chance(0.1) {
                        store.content.insert(sector, self.next_op);
                        self.next_op += 1;
                    }
                }
            }
            2 if store.sectors % per + PER_LINE <= MOST_USED => store.sectors += PER_LINE,
            _ => return,
        }
        self.seen.changed_between += 1;
    }

    /// A volume that comes lies at `place`, with what its store has.
    pub(super) fn put_contents(&mut self, volume: usize, place: u64) {
        let store = &mut self.volumes[volume];
        (store.place, store.served) = (Some(place), store.sectors);
        let span = self.span_of(volume);
        self.aside.retain(|aside| !(place..place + span).contains(aside));
        let store = &mut self.volumes[volume];
        for (sector, value) in std::mem::take(&mut store.content) {
            self.backing.insert(sector + place, value);
            let truth = Truth { settled: [value].into(), ..Truth::default() };
            self.truth.insert(sector + place, truth);
        }
    }

    /// A stretch of groups is not put aside any more.
    pub(super) fn not_aside(&mut self, (first, groups): (u64, u64)) {
        let (from, to) = (World::place_of(first), World::place_of(first + groups));
        self.aside.retain(|aside| !(from..to).contains(aside));
    }

    /// A store that is served grows by a line, or, the first, into another region; what the cache makes of it.
    pub(super) fn plan_growth(&mut self, volume: usize, sb: &BlockSuperblock) -> Option<Growth> {
        let (per, wide) = (self.per_region(), volume == 0 && self.rng.chance(0.7));
        let others = self.volumes.iter().enumerate().any(|(n, v)| n != volume && v.is_open());
        let store = &mut self.volumes[volume];
        if !others || !store.is_open() {
            return None;
        }
        let is_uneven = !store.served.is_multiple_of(PER_LINE);
        if wide && store.sectors < per {
            store.sectors = per + VOLUME_LINES * PER_LINE;
        } else if store.sectors % per + PER_LINE <= MOST_USED {
            store.sectors += PER_LINE;
        }
        let grows = store.sectors > store.served;
        match room_to_grow(sb, &store.name, store.sectors * SECTOR as u64) {
            Ok(growth) if grows && !is_uneven => Some(growth),
            Err(CannotGrow::Uneven) if is_uneven => None,
            Ok(_) if !grows && !is_uneven => None,
            other => {
                let why = format!("{} cannot grow: {other:?}", store.name);
                self.fail(why);
                None
            }
        }
    }

    /// It has grown, and who asked is answered.
    pub(super) fn has_grown(&mut self, volume: usize, growth: Growth) {
        let bytes = self.volumes[volume].sectors * SECTOR as u64;
        let name = self.volumes[volume].name.clone();
        self.check_recorded(&name, growth.first_group, bytes);
        self.volumes[volume].served = self.volumes[volume].sectors;
        let count = match growth.moves_from {
            Some(_) => &mut self.seen.moved,
            None => &mut self.seen.grown,
        };
        *count += 1;
    }

    /// It lies elsewhere from now on.
    pub(super) fn moves_to(&mut self, volume: usize, first_group: u64) {
        let (span, place) = (self.span_of(volume), World::place_of(first_group));
        let Some(from) = self.volumes[volume].place else { return };
        let content = own(&mut self.backing, from, span);
        let owed = own(&mut self.volatile, from, span);
        self.truth.retain(|s, _| !(from..from + span).contains(s));
        self.volumes[volume].content = content;
        self.put_contents(volume, place);
        self.volatile.extend(owed.into_iter().map(|(s, v)| (s + place, v)));
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
