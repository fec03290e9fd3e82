//! Records that go on in the next segment, and which segments they may go on in.
//!
//! A large record that finds no room at the end of its segment goes on in the segment behind it on the device, and further: it is read in one
//! piece. It stays in DRAM, and out of the index, until the last of its segments is written; if it changes meanwhile, what is missing of it is
//! not written. Its entry names the segment where it begins, which is reclaimed before the others ([`FlashGeometry::zone_end`](crate::kv::FlashGeometry::zone_end)): the
//! log keeps the rest of a zone for its large records once one goes on there, until the next round comes to it.

use larder_base::Now;
use larder_format::Kind;

use super::{FlashLog, Phase, SegmentIo, SegmentState, Shards};
use crate::dram::ObjectMemory;
use crate::kv::clean::{Destination, Staged};
use crate::segment::Rest;

/// A record that goes on in segments that are not written yet.
pub(super) struct GoingOn {
    /// The shard that it is of.
    pub(super) shard: usize,
    pub(super) staged: Staged,
    pub(super) rest: Rest,
    /// The segment that it begins in.
    pub(super) began: u16,
    /// The segment that it goes on in.
    pub(super) next: u16,
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> FlashLog<B> {
    /// The segment that is to be filled next with records of this kind.
    pub(super) fn next_segment(&mut self, kind: Kind) -> Option<u16> {
        if kind == Kind::Large
            && let Some((first, _)) = self.kept
        {
            return Some(first);
        }
        let segment = self.at_cursor(self.needed())?;
        if kind == Kind::Small && segment > self.last_small() {
            return self.oldest_small();
        }
        // A round has come to it.
        self.kept = self.kept.filter(|(first, last)| !(*first..=*last).contains(&segment));
        Some(segment)
    }

    /// What is kept for a record that goes on.
    fn needed(&self) -> Option<(u16, u16)> {
        self.kept.filter(|_| self.going_on.is_some())
    }

    /// Of the segments that can hold small records the one that was filled first, or that holds nothing: where the cursor is beyond
    /// them. (An entry of the index has no more bits for the number.)
    fn oldest_small(&self) -> Option<u16> {
        let is_kept = |s: u16| self.kept.is_some_and(|(first, last)| (first..=last).contains(&s));
        (1..=self.last_small().min(self.config.flash.segments))
            .filter(|&s| self.table.state(s) != SegmentState::Filling && !is_kept(s))
            .min_by_key(|&s| match self.table.state(s) {
                SegmentState::Free => 0,
                _ => self.table.generation(s),
            })
    }

    /// Whether the segment, which is about to be opened, is not the cursor's.
    pub(super) fn is_beside(&self, kind: Kind, segment: u16) -> bool {
        kind == Kind::Small
            && self
                .at_cursor(self.needed())
                .is_some_and(|at| at > self.last_small() && at != segment)
    }

    /// Whether the cursor passes over a segment, for one round: a small one that was filled beside it is as young as those before it.
    fn passes_over(&self, s: u16) -> bool {
        s <= self.last_small()
            && self.table.state(s) == SegmentState::Live(Kind::Small)
            && self.table.generation(s) > self.beside_from
    }

    /// The segment that the cursor is at, passing over those that are being filled, and over those `kept`.
    fn at_cursor(&self, kept: Option<(u16, u16)>) -> Option<u16> {
        let n = u32::from(self.config.flash.segments);
        let start = (self.table.words.load(0) % u64::from(n)) as u32;
        let is_kept = |s: u16| kept.is_some_and(|(first, last)| (first..=last).contains(&s));
        (0..n).map(|i| ((start + i) % n + 1) as u16).find(|&s| {
            self.table.state(s) != SegmentState::Filling && !is_kept(s) && !self.passes_over(s)
        })
    }

    /// The last segment in which a record of the open large one may go on; the open one itself where it may not.
    pub(super) fn may_go_on_to(&self) -> u16 {
        let Some(open) = &self.open[usize::from(true)] else { return 0 };
        let segment = open.segment;
        match self.kept {
            Some((first, last)) if first == segment + 1 => last,
            Some(_) => segment,
            None => self.behind(segment),
        }
    }

    /// The last segment that can be kept for large records behind `segment`; itself where others have begun to fill those.
    fn behind(&self, segment: u16) -> u16 {
        if self.at_cursor(None) != Some(segment + 1) {
            return segment;
        }
        let end = self.config.flash.zone_end(segment, self.last_small());
        let free = |s: &u16| self.table.state(*s) != SegmentState::Filling && !self.passes_over(*s);
        (segment + 1..=end).take_while(free).last().unwrap_or(segment)
    }

    /// Keeps what is behind `segment` for large records, if it can be and is not kept already.
    pub(super) fn keep_behind(&mut self, segment: u16) {
        let last = self.behind(segment);
        if self.kept.is_none() && last > segment {
            self.kept = Some((segment + 1, last));
            self.move_cursor(last);
        }
    }

    /// A record has not enough room in this zone: what is open is written as it is, or if that is empty the next zone is begun. The
    /// segments that are passed over keep what they hold until the next round comes to them. Returns whether anything was done.
    pub(super) fn pass_zone(&mut self) -> bool {
        let Some(open) = &mut self.open[1] else { return false };
        if !open.builder.is_empty() {
            open.full = true;
            return true;
        }
        let Some(open) = self.open[1].take() else { return false };
        self.table.set(open.segment, SegmentState::Free, 0);
        self.buffers.push(open.builder.finish().0);
        let end = self.config.flash.zone_end(open.segment, self.last_small());
        self.kept = None;
        // (Small segments may have taken it further.)
        if self.at_cursor(None).is_some_and(|at| at <= end && at > open.segment) {
            self.move_cursor(end);
        }
        true
    }

    /// Goes on with a record in the segment that was opened for it; before, has that segment reclaimed and opened.
    pub(super) fn go_on<M: ObjectMemory>(
        &mut self,
        now: Now,
        mut record: GoingOn,
        shards: &mut impl Shards<M>,
        io: &mut impl SegmentIo,
    ) {
        let (shard, next) = (record.shard, record.next);
        if self.usable(now) && self.open[1].is_none() {
            self.going_on = Some(record);
            match self.prepare(now, io) {
                Some(reclaim) => {
                    self.phase = Phase::Reclaim(reclaim);
                    return;
                }
                None if self.open[1].is_some() => return,
                None => {}
            }
            let Some(back) = self.going_on.take() else { return };
            record = back;
        }
        let Some(open) = self.open[1].as_mut().filter(|open| open.segment == next) else {
            // The device fails.
            self.table.set_lost(record.began);
            let to =
                Destination { drive: self.config.part.drive, kind: Kind::Large, goes_on: false };
            shards.with(shard, |s| s.abandon(to, &[record.staged]));
            return;
        };
        let (staged, rest) = (record.staged, &mut record.rest);
        let lives =
            shards.with(shard, |s| s.with_staged(&staged, |value| open.builder.go_on(rest, value)));
        if !lives {
            // It has changed: nobody will look for it.
            self.table.set_lost(record.began);
        } else if record.rest.bytes() == 0 {
            open.staged[shard].push(staged);
            open.full = open.builder.is_full_enough();
        } else {
            open.full = true;
            self.going_on = Some(GoingOn { next: next + 1, ..record });
        }
    }
}
