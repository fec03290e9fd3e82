//! Void regions: a trim of a whole volume takes its lines out of the cache at once, and out of the map later.
//!
//! The lines of a range that is trimmed or zeroed need not leave the map one by one before the backing store is changed.
//! It is enough that none of them is used any more, after `kill -9` and after a power cut too:
//!
//! * In this run a set of regions, a bit each, says so. Nothing of them is under way when they are put in (the range is
//!   locked), and the first part that begins in one of them takes its lines out before it does anything else
//!   ([`BlockShard::enter`]). So no part ever meets such a line, and nothing is filled beside one. The rest is the affair of
//!   [`BlockShard::sweep`], which is called when there is time. What looks at the map from outside is not shown them; the
//!   cleaner drops them where it meets them.
//! * After `kill -9` the map is still there, with the lines in it. A few words beside it name stretches of regions, and are
//!   stored before the range is given up: one store each. They say too much rather than too little (a region that was swept
//!   and filled again is in its stretch until the whole stretch is swept), which costs lines that need not have gone.
//! * After a power cut the durable map still names them. But before a range is changed the bits of all its regions are
//!   durable in the write-intent map, and no region loses its bit while it is void ([`BlockShard::quiet`]), nor before the
//!   log has what was swept.
//!
//! So the record of a range that outlives a power cut is the write-intent map, which has it anyway.

use super::api::{GroupId, LineId, SlotId};
use super::map::{Map, Slot, VOID_WORDS};
use super::planted::Planted;
use super::regions::RegionSet;
use super::shard::{BlockShard, Regions};

/// Stretches that lie so close are one: requests of clients rarely end where a region does, and what lies between them was
/// swept when the second came.
const GAP: u32 = 1;

/// A walk over all slots that takes out what is void.
#[derive(Debug)]
struct Pass {
    /// Regions that were void when it began and have been all the time.
    regions: RegionSet,
    next: u32,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Voids {
    regions: RegionSet,
    pass: Option<Pass>,
}

/// A stretch of regions as a word; 0 is none.
fn encode(first: u32, last: u32) -> u64 {
    u64::from(first) << 32 | (u64::from(last) + 1)
}

fn decode(word: u64) -> Option<(u32, u32)> {
    let (first, end) = ((word >> 32) as u32, word as u32);
    (first < end).then(|| (first, end - 1))
}

impl Voids {
    /// What an earlier run has left in `map`, in whose regions `present` lines lie.
    pub(super) fn found(map: &mut Map, present: &RegionSet) -> Voids {
        let mut voids = Voids::default();
        for (first, last) in (0..VOID_WORDS).filter_map(|i| decode(map.void_word(i))) {
            voids.regions.add_from(present, first, last);
        }
        voids.tidy(map);
        voids
    }

    /// Whether `region` is void.
    pub(super) fn has(&self, region: u32) -> bool {
        !self.regions.is_empty() && self.regions.has(region)
    }

    fn clear(&mut self, region: u32) {
        self.regions.clear(region);
        if let Some(pass) = &mut self.pass {
            pass.regions.clear(region);
        }
    }

    /// Gives back the words of stretches that have been swept.
    fn tidy(&self, map: &mut Map) {
        for at in 0..VOID_WORDS {
            if let Some((first, last)) = decode(map.void_word(at))
                && self.regions.next(first, last).is_none()
            {
                map.set_void_word(at, 0);
            }
        }
    }

    /// Notes regions `first..=last` beside the map, in one store. Returns whether there was room.
    fn note(&self, map: &mut Map, first: u32, last: u32) -> bool {
        let near = |at: &usize| {
            decode(map.void_word(*at)).is_some_and(|(f, l)| {
                f <= last.saturating_add(GAP + 1) && first <= l.saturating_add(GAP + 1)
            })
        };
        let found = (0..VOID_WORDS).find(near);
        let free = |map: &Map| (0..VOID_WORDS).find(|&at| decode(map.void_word(at)).is_none());
        let at = found.or_else(|| free(map)).or_else(|| {
            self.tidy(map);
            free(map)
        });
        let Some(at) = at else { return false };
        let (f, l) = decode(map.void_word(at)).unwrap_or((first, last));
        map.set_void_word(at, encode(f.min(first), l.max(last)));
        true
    }
}

impl BlockShard {
    /// Whether `line`, if the map has it, is one of those that have gone.
    pub(super) fn is_void(&self, line: LineId) -> bool {
        self.voids.has(self.config.regions.of(line))
    }

    /// Takes the locked lines `first..=last` out of the cache, as far as that can be done at once: whole regions of which
    /// lines may be cached become void. The bits of all regions must be durable. Returns what is left to be dropped by
    /// [`BlockShard::drop_range`]: the ends that are no whole regions, or all of it where fewer than `least` groups may
    /// have lines, or where so much is void in so many places that no more can be noted.
    pub fn void_range(
        &mut self,
        first: LineId,
        last: LineId,
        least: u64,
    ) -> [Option<(LineId, LineId)>; 2] {
        if self.map.sparse().is_some() {
            // A page of the table becomes void with all its lines, so that dropping them is quick as it is.
            return [Some((first, last)), None];
        }
        let Regions { groups, .. } = self.config.regions;
        let (begin, end) = (first.0.div_ceil(lines(groups)), (last.0 + 1) / lines(groups));
        if begin >= end {
            return [Some((first, last)), None];
        }
        let (low, high) = (begin as u32, (end - 1) as u32);
        let of_each = groups.div_ceil(self.map.placing().shards());
        if self.present.count(low, high) * of_each < least
            || !(self.planted(Planted::VoidNotNoted) || self.voids.note(&mut self.map, low, high))
        {
            return [Some((first, last)), None];
        }
        self.voids.regions.add_from(&self.present, low, high);
        let (inner, outer) = (LineId(begin * lines(groups)), LineId(end * lines(groups)));
        [
            (first < inner).then(|| (first, LineId(inner.0 - 1))),
            (outer <= last).then_some((outer, last)),
        ]
    }

    /// A part begins in `group`: what is void of its region goes now.
    pub(super) fn enter(&mut self, group: GroupId) {
        let region = self.config.regions.of(group.line(0));
        if self.voids.has(region) && !self.planted(Planted::VoidLinesUsed) {
            self.sweep_region(region);
        }
    }

    /// No line of `region` is in the map any more.
    pub(super) fn forget_void(&mut self, region: u32) {
        if self.voids.regions.has(region) {
            self.voids.clear(region);
            self.end_void();
        }
    }

    /// The last one gives back what was noted.
    fn end_void(&mut self) {
        if self.voids.regions.is_empty() {
            self.voids.pass = None;
            self.voids.regions.clear_all();
            self.voids.tidy(&mut self.map);
        }
    }

    fn sweep_region(&mut self, region: u32) {
        let (groups, placing) = (self.config.regions.groups, *self.map.placing());
        let end = (u64::from(region) + 1) * groups;
        let mut next = u64::from(region) * groups;
        loop {
            let group = placing.next_of(self.map.shard(), GroupId(next));
            if group.0 >= end {
                break;
            }
            self.stats.range_steps += 1;
            for (index, slot) in (0..).zip(self.map.find_all(group)) {
                if let Some(slot) = slot {
                    self.drop_of_range(slot, group.line(index));
                }
            }
            next = group.0 + 1;
        }
        self.present.clear(region);
        self.forget_void(region);
    }

    /// Whether there is anything for [`BlockShard::sweep`] to do.
    pub fn wants_sweep(&self) -> bool {
        !self.voids.regions.is_empty()
    }

    /// Takes lines that are void out of the map, looking at up to `steps` slots or a region. Returns whether there is more to
    /// do.
    pub fn sweep(&mut self, steps: u32) -> bool {
        if !self.wants_sweep() {
            return false;
        }
        if self.voids.pass.is_none() {
            let of_each = self.config.regions.groups.div_ceil(self.map.placing().shards());
            let groups = self.voids.regions.len() * of_each;
            if groups * self.map.cost_of_group() <= u64::from(self.map.len()) {
                if let Some(region) = self.voids.regions.next(0, u32::MAX) {
                    self.sweep_region(region);
                }
                return !self.voids.regions.is_empty();
            }
            self.voids.pass = Some(Pass { regions: self.voids.regions.clone(), next: 0 });
        }
        let Some(mut pass) = self.voids.pass.take() else { return false };
        let until = pass.next.saturating_add(steps).min(self.map.len());
        self.stats.range_steps += u64::from(until - pass.next);
        for slot in (pass.next..until).map(SlotId) {
            if let Slot::Line(line) = self.map.get(slot)
                && pass.regions.has(self.config.regions.of(line))
            {
                self.drop_of_range(slot, line);
            }
        }
        pass.next = until;
        if until < self.map.len() {
            self.voids.pass = Some(pass);
            return true;
        }
        let done =
            if self.planted(Planted::SweptAnew) { &self.voids.regions } else { &pass.regions };
        let mut at = 0;
        let done = done.clone();
        while let Some(region) = done.next(at, u32::MAX) {
            self.present.clear(region);
            self.voids.clear(region);
            at = region + 1;
        }
        self.end_void();
        self.voids.tidy(&mut self.map);
        !self.voids.regions.is_empty()
    }

    /// What `slot` holds for clients: a line that is void counts as gone.
    pub fn get(&self, slot: SlotId) -> Slot {
        match self.map.get(slot) {
            Slot::Line(line) if self.is_void(line) => Slot::Held,
            now => now,
        }
    }

    /// The slot where `line` lies, unless it is void.
    pub fn find(&self, line: LineId) -> Option<SlotId> {
        if self.is_void(line) { None } else { self.map.find(line) }
    }

    /// Lines that clients can be served, by a walk over the whole map.
    pub fn lines(&self) -> u32 {
        if self.voids.regions.is_empty() {
            return self.map.count();
        }
        let slots = (0..self.map.len()).map(SlotId);
        slots.filter(|&slot| matches!(self.get(slot), Slot::Line(_))).count() as u32
    }
}

/// Lines of so many groups.
fn lines(groups: u64) -> u64 {
    groups * u64::from(super::api::GROUP_LINES)
}
