//! Insertion: a free slot if there is one, else entries move to their other bucket, else one is forced out.

use larder_base::ObjectHash;

use super::bucket::{Line, MAX_WIDTH, Raw, positions, slot_clock, slot_tag};
use super::candidates::Candidates;
use super::{Entry, FlashIndex, distinct};

/// What [`FlashIndex::insert`] did besides inserting.
#[derive(Clone, Copy, Debug, Default)]
pub struct Inserted {
    /// Entries that were evicted because no room could be made: none nearly always, one at most for a small entry, up
    /// to eight for a wide one.
    pub forced: Candidates,
    /// Entries that moved to their other bucket.
    pub relocated: u8,
}

/// Buckets whose entries' other buckets are searched for a free slot: the two of the entry itself and the first ones
/// reached from them, in the order of a breadth-first search.
const SEARCHED: usize = 36;

/// A bucket reached by the search, and the entry whose move frees a slot in the bucket before it.
#[derive(Clone, Copy, Default)]
struct Step {
    bucket: u32,
    /// Step of the bucket before it; a root is its own parent.
    parent: u8,
    /// Position, in the parent's bucket, of the entry that would move here.
    pos: u8,
}

impl FlashIndex {
    /// Inserts `entry` for the object of `hash`. The index is a multiset: it does not look for an entry that is already
    /// there, and identical entries (of two objects of one [`Family`](super::Family), one segment and one page
    /// function) are both kept.
    ///
    /// A CLOCK above the highest in use is lowered to it.
    ///
    /// # Panics
    /// If a field of `entry` is out of the range that its documentation states.
    pub fn insert(&mut self, hash: ObjectHash, mut entry: Entry) -> Inserted {
        entry.clock = entry.clock.min(self.clock_max);
        let (tag, both) = self.buckets_of(hash);
        let raw = Raw::encode(tag, &entry);
        let mut done = Inserted::default();
        if raw.is_wide() {
            self.insert_wide(distinct(&both), raw, &mut done);
        } else {
            self.insert_small(distinct(&both), raw, &mut done);
        }
        done
    }

    fn insert_small(&mut self, buckets: &[u32], raw: Raw, done: &mut Inserted) {
        // The emptier bucket, the primary one when they are even: balance keeps room within reach of relocation.
        let free = |bucket: &u32| self.line(*bucket).free_small().count_ones();
        let emptier = if buckets.len() > 1 && free(&buckets[1]) > free(&buckets[0]) {
            buckets[1]
        } else {
            buckets[0]
        };
        let line = self.line(emptier);
        if line.free_small() != 0 {
            self.write_slot(emptier, lowest(line.free_small()), raw.slot());
            self.count_in(raw);
        } else if !self.relocate_small(buckets, raw, done) {
            self.force_small(buckets, raw, done);
        }
    }

    /// Searches breadth-first for the shortest chain of moves that ends in a free slot, and makes them. Returns whether
    /// `raw` is in.
    fn relocate_small(&mut self, roots: &[u32], raw: Raw, done: &mut Inserted) -> bool {
        let mut steps = [Step::default(); SEARCHED];
        for (i, &bucket) in roots.iter().enumerate() {
            steps[i] = Step { bucket, parent: i as u8, pos: 0 };
        }
        let mut reached = roots.len();
        let mut at = 0;
        while at < reached {
            let from = steps[at].bucket;
            let line = self.line(from);
            for pos in positions(line.live_small()) {
                let to = self.other(from, line.tag(pos));
                if to == from {
                    continue;
                }
                let free = self.line(to).free_small();
                if free != 0 {
                    self.shift_along(&steps, at, pos, raw, (to, lowest(free)), done);
                    return true;
                }
                if reached < SEARCHED {
                    steps[reached] = Step { bucket: to, parent: at as u8, pos: pos as u8 };
                    reached += 1;
                }
            }
            at += 1;
        }
        false
    }

    /// Puts `raw` in place of the chain's first entry, that in place of the second, and so on; the last goes to `free`.
    /// In this order a cut loses the entry that is in hand and doubles none.
    fn shift_along(
        &mut self,
        steps: &[Step; SEARCHED],
        last: usize,
        pos: usize,
        raw: Raw,
        free: (u32, usize),
        done: &mut Inserted,
    ) {
        let mut chain = [(0u32, 0usize); SEARCHED];
        let mut len = 0;
        let (mut at, mut pos) = (last, pos);
        loop {
            chain[len] = (steps[at].bucket, pos);
            len += 1;
            let parent = usize::from(steps[at].parent);
            if parent == at {
                break;
            }
            (at, pos) = (parent, usize::from(steps[at].pos));
        }
        let mut hand = raw.slot();
        for &(bucket, pos) in chain[..len].iter().rev() {
            let next = self.line(bucket).slot(pos);
            self.write_slot(bucket, pos, hand);
            hand = next;
            done.relocated += 1;
        }
        self.write_slot(free.0, free.1, hand);
        self.count_in(raw);
    }

    /// Evicts the small entry of the lowest CLOCK (ghosts first) and takes its slot. There always is one: the spread
    /// slot is never given to wide entries.
    fn force_small(&mut self, buckets: &[u32], raw: Raw, done: &mut Inserted) {
        let mut victim = (u8::MAX, 0, 0);
        for &bucket in buckets {
            let line = self.line(bucket);
            for pos in positions(line.live_small()) {
                victim = victim.min((slot_clock(line.slot(pos)), bucket, pos));
            }
        }
        let (_, bucket, pos) = victim;
        let evicted = self.line(bucket).raw(pos);
        self.write_slot(bucket, pos, raw.slot());
        self.count_out(evicted);
        self.count_in(raw);
        done.forced.push(evicted);
    }

    fn insert_wide(&mut self, buckets: &[u32], raw: Raw, done: &mut Inserted) {
        // A word that is wide already, else a bucket that has room to widen without touching another, else a wide entry
        // that can move to such a bucket.
        let free = |index: &Self, bucket: u32| index.line(bucket).free_wide();
        let emptiest =
            buckets.iter().min_by_key(|bucket| self.line(**bucket).live_wide().count_ones());
        let first = emptiest.into_iter().chain(buckets);
        if let Some(&bucket) = first.clone().find(|bucket| free(self, **bucket) != 0) {
            return self.place_wide(bucket, free(self, bucket), raw);
        }
        if let Some(&bucket) = first.clone().find(|bucket| self.has_room_to_widen(**bucket)) {
            let free = self.widen(bucket, done);
            return self.place_wide(bucket, free, raw);
        }
        for &bucket in buckets {
            let line = self.line(bucket);
            for pos in positions(line.live_wide()) {
                let to = self.other(bucket, line.tag(pos));
                if to == bucket || (free(self, to) == 0 && !self.has_room_to_widen(to)) {
                    continue;
                }
                // Room first: then a cut finds at most one entry in hand.
                let room = if free(self, to) == 0 { self.widen(to, done) } else { free(self, to) };
                self.write_pair(bucket, pos, raw.0);
                self.write_pair(to, lowest(room), line.pair(pos / 2));
                self.count_in(raw);
                done.relocated += 1;
                return;
            }
        }
        // Widen by moving small entries to their other buckets, at the price of those that cannot; or evict the wide
        // entry of the lowest CLOCK, which is one. The cheaper wins, and wide entries pay for wide entries on a tie.
        let widening = buckets
            .iter()
            .filter(|bucket| self.line(**bucket).width() < MAX_WIDTH)
            .map(|&bucket| (self.lost_by_widening(bucket), bucket))
            .min();
        let mut victim: Option<(u8, u32, usize)> = None;
        for &bucket in buckets {
            let line = self.line(bucket);
            for pos in positions(line.live_wide()) {
                let this = (line.raw(pos).clock(), bucket, pos);
                victim = Some(victim.map_or(this, |v| v.min(this)));
            }
        }
        match (widening, victim) {
            (Some((lost, bucket)), victim) if lost == 0 || victim.is_none() => {
                let free = self.widen(bucket, done);
                self.place_wide(bucket, free, raw);
            }
            (_, Some((_, bucket, pos))) => {
                let evicted = self.line(bucket).raw(pos);
                self.write_pair(bucket, pos, raw.0);
                self.count_out(evicted);
                self.count_in(raw);
                done.forced.push(evicted);
            }
            (_, None) => unreachable!("a bucket without wide entries can be widened"),
        }
    }

    fn place_wide(&mut self, bucket: u32, free: u32, raw: Raw) {
        self.write_pair(bucket, lowest(free), raw.0);
        self.count_in(raw);
    }

    /// Whether the small entries that the next width displaces find room in the bucket itself.
    fn has_room_to_widen(&self, bucket: u32) -> bool {
        let line = self.line(bucket);
        line.width() < MAX_WIDTH && displaced_by_widening(&line) == 0
    }

    /// An estimate of how many small entries widening would force out: those that find no room in the bucket and none in
    /// their other one (two may count on the same free slot).
    fn lost_by_widening(&self, bucket: u32) -> u32 {
        let line = self.line(bucket);
        let movable = positions(line.live_small() & line.taken_by_widening())
            .filter(|&pos| self.free_elsewhere(bucket, line.slot(pos)).is_some())
            .count() as u32;
        displaced_by_widening(&line).saturating_sub(movable)
    }

    /// A free small slot in the other bucket of `slot`, which lies in `bucket`.
    fn free_elsewhere(&self, bucket: u32, slot: u32) -> Option<(u32, usize)> {
        let to = self.other(bucket, slot_tag(slot));
        let free = self.line(to).free_small();
        (to != bucket && free != 0).then(|| (to, lowest(free)))
    }

    /// Gives the next words to wide entries. The small entries there move within the bucket, else to their other bucket,
    /// else the lower CLOCK of them and of the small ones that stay is forced out. Returns the positions that are free
    /// for wide entries afterwards.
    fn widen(&mut self, bucket: u32, done: &mut Inserted) -> u32 {
        let mut line = self.line(bucket);
        let taken = line.taken_by_widening();
        // Those that can go elsewhere go first when there is not room for all.
        let mut excess = displaced_by_widening(&line);
        for pos in positions(line.live_small() & taken) {
            if excess == 0 {
                break;
            }
            let slot = line.slot(pos);
            if let Some((to, free)) = self.free_elsewhere(bucket, slot) {
                line = self.change_slot(bucket, line, pos, 0);
                self.write_slot(to, free, slot);
                done.relocated += 1;
                excess -= 1;
            }
        }
        for pos in positions(line.live_small() & taken) {
            let slot = line.slot(pos);
            line = self.change_slot(bucket, line, pos, 0);
            let room = line.free_small() & !taken;
            if room != 0 {
                line = self.change_slot(bucket, line, lowest(room), slot);
                continue;
            }
            let weakest =
                positions(line.live_small() & !taken).map(|p| (slot_clock(line.slot(p)), p)).min();
            let evicted = match weakest {
                Some((clock, p)) if clock < slot_clock(slot) => {
                    let evicted = line.raw(p);
                    line = self.change_slot(bucket, line, p, slot);
                    evicted
                }
                _ => Raw(u64::from(slot)),
            };
            self.count_out(evicted);
            done.forced.push(evicted);
        }
        line = line.with_width(line.width() + 1);
        self.update(bucket, line);
        line.free_wide()
    }

    /// [`Self::write_slot`] in memory and in the copy at hand.
    fn change_slot(&mut self, bucket: u32, line: Line, pos: usize, slot: u32) -> Line {
        self.write_slot(bucket, pos, slot);
        line.with_slot(pos, slot)
    }
}

/// Small entries for which the bucket has no room once it is widened.
fn displaced_by_widening(line: &Line) -> u32 {
    let taken = line.taken_by_widening();
    let leaving = (line.live_small() & taken).count_ones();
    leaving.saturating_sub((line.free_small() & !taken).count_ones())
}

fn lowest(mask: u32) -> usize {
    mask.trailing_zeros() as usize
}
