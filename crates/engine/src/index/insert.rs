//! Insertion: a free place if there is one, else entries move to their other bucket, else one is forced out.

use larder_base::ObjectHash;

use super::bucket::{MAX_WIDTH, Raw, positions, slot_tag};
use super::candidates::Candidates;
use super::search::Kind;
use super::{Entry, FlashIndex, distinct};

/// What [`FlashIndex::insert`] did besides inserting.
#[derive(Clone, Copy, Debug)]
pub struct Inserted {
    /// Entries that were evicted because no room could be made: none nearly always, one at most for a small entry, up
    /// to eight for a wide one.
    pub forced: Candidates,
    /// Entries that moved.
    pub relocated: u8,
}

/// Small entries that one step of widening displaces, at most.
const MOST_DISPLACED: usize = 8;

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
        let raw = Raw::encode(tag, &entry, self.runs);
        let mut done = self.nothing_done();
        self.insert_raw(distinct(&both), raw, &mut done);
        done
    }

    pub(super) fn nothing_done(&self) -> Inserted {
        Inserted { forced: Candidates::new(self.runs), relocated: 0 }
    }

    pub(super) fn insert_raw(&mut self, buckets: &[u32], raw: Raw, done: &mut Inserted) {
        if raw.is_wide() {
            self.insert_wide(buckets, raw, done);
        } else {
            self.insert_small(buckets, raw, done);
        }
    }

    fn insert_small(&mut self, buckets: &[u32], raw: Raw, done: &mut Inserted) {
        if let Some((bucket, pos)) = self.free_place(buckets, Kind::Small) {
            self.write(bucket, pos, raw);
        } else if let Some(chain) = self.find_chain(buckets, Kind::Small) {
            done.relocated += self.move_along(&chain, raw);
        } else if let Some((bucket, pos)) = self.weakest(buckets, Kind::Small) {
            self.replace(bucket, pos, raw, done);
            return;
        }
        self.count_in(raw);
    }

    fn insert_wide(&mut self, buckets: &[u32], raw: Raw, done: &mut Inserted) {
        // Words that are wide already come first, here or by moving others: each widening takes more than it needs.
        if let Some((bucket, pos)) = self.free_place(buckets, Kind::Wide) {
            self.write(bucket, pos, raw);
            self.count_in(raw);
            return;
        }
        if let Some(chain) = self.find_chain(buckets, Kind::Wide) {
            done.relocated += self.move_along(&chain, raw);
            self.count_in(raw);
            return;
        }
        // Widening costs the small entries that find no other room. Where it is free, here or in the other bucket of a
        // wide entry that lies here, it is done.
        let widening = buckets
            .iter()
            .filter(|bucket| self.line(**bucket).width() < MAX_WIDTH)
            .map(|&bucket| (self.lost_by_widening(bucket), self.line(bucket).width(), bucket))
            .min();
        if let Some((0, _, bucket)) = widening {
            return self.widen(bucket, raw, done);
        }
        for &bucket in buckets {
            let line = self.line(bucket);
            for pos in positions(line.live_wide()) {
                let to = self.other(bucket, line.tag(pos));
                if to != bucket
                    && self.line(to).width() < MAX_WIDTH
                    && self.lost_by_widening(to) == 0
                {
                    let moved = self.clear(bucket, pos);
                    self.write(bucket, pos, raw);
                    self.count_in(raw);
                    done.relocated += 1;
                    return self.widen(to, moved, done);
                }
            }
        }
        // Evicting the weakest wide entry costs one, so that wide entries pay for wide entries where there are any.
        match (self.weakest(buckets, Kind::Wide), widening) {
            (Some((bucket, pos)), _) => self.replace(bucket, pos, raw, done),
            (None, Some((_, _, bucket))) => self.widen(bucket, raw, done),
            (None, None) => unreachable!("a bucket without wide entries can be widened"),
        }
    }

    /// A free place in the bucket that has more of them, the primary one when they are even: balance keeps room within
    /// reach of chains.
    fn free_place(&self, buckets: &[u32], kind: Kind) -> Option<(u32, usize)> {
        let mut best: Option<(u32, u32)> = None;
        for &bucket in buckets {
            let free = kind.free(&self.line(bucket));
            if free.count_ones() > best.map_or(0, |(_, b)| b.count_ones()) {
                best = Some((bucket, free));
            }
        }
        best.map(|(bucket, free)| (bucket, free.trailing_zeros() as usize))
    }

    /// The entry of the lowest CLOCK: a ghost if there is one. Of small entries there always is one where none is free:
    /// the spread slot is never given to wide ones.
    fn weakest(&self, buckets: &[u32], kind: Kind) -> Option<(u32, usize)> {
        let mut weakest: Option<(u8, u32, usize)> = None;
        for &bucket in buckets {
            let line = self.line(bucket);
            for pos in positions(kind.live(&line)) {
                let this = (line.raw(pos).clock(), bucket, pos);
                weakest = Some(weakest.map_or(this, |w| w.min(this)));
            }
        }
        weakest.map(|(_, bucket, pos)| (bucket, pos))
    }

    /// Forces out the entry at `pos` and puts `raw` of the same kind in its place.
    fn replace(&mut self, bucket: u32, pos: usize, raw: Raw, done: &mut Inserted) {
        let evicted = self.line(bucket).raw(pos);
        self.write(bucket, pos, raw);
        self.count_out(evicted);
        self.count_in(raw);
        done.forced.push(evicted);
    }

    /// An estimate of how many small entries widening would force out: those that find no room in the bucket, and none
    /// by way of their other bucket (two may count on the same free place).
    fn lost_by_widening(&self, bucket: u32) -> u32 {
        let line = self.line(bucket);
        let taken = line.taken_by_widening();
        let displaced = (line.live_small() & taken).count_ones();
        let room = (line.free_small() & !taken).count_ones();
        if displaced <= room {
            return 0;
        }
        let movable = positions(line.live_small() & taken).filter(|&pos| {
            let to = self.other(bucket, line.tag(pos));
            to != bucket
                && (self.line(to).free_small() != 0
                    || self.find_chain(&[to], Kind::Small).is_some())
        });
        (displaced - room).saturating_sub(movable.count() as u32)
    }

    /// Gives more words to wide entries, puts `raw` there, and inserts the small entries of those words anew. A cut in
    /// between loses those of them that are in hand.
    fn widen(&mut self, bucket: u32, raw: Raw, done: &mut Inserted) {
        let mut line = self.line(bucket);
        let mut displaced = [Raw::default(); MOST_DISPLACED];
        let mut count = 0;
        for pos in positions(line.live_small() & line.taken_by_widening()) {
            displaced[count] = line.raw(pos);
            count += 1;
            self.write(bucket, pos, Raw::default());
            self.count_out(line.raw(pos));
            line = line.with_slot(pos, 0);
        }
        let before = line;
        line = line.with_width(line.width() + 1);
        self.update(bucket, &before, &line);
        self.write(bucket, line.free_wide().trailing_zeros() as usize, raw);
        self.count_in(raw);
        for &small in &displaced[..count] {
            let both = [bucket, self.other(bucket, slot_tag(small.slot()))];
            self.insert_small(distinct(&both), small, done);
            done.relocated += 1;
        }
    }
}
