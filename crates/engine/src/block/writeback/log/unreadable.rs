//! What of a volume was left out of its store because it could not be read: reads of it fail until it is written or discarded [bad].
//!
//! Every FRONTIER lists it, so that the log may let the records go. A table has room for [`MAX_UNREADABLE`] stretches of all volumes together; where
//! segments are small for one of an eighth of a segment. A window after which more would have to be listed does not begin: then a volume stops
//! before what cannot be read, whatever its order.

use std::collections::BTreeMap;
use std::ops::Range;

use larder_base::Nanos;
use larder_format::block::write_log::frontier::MAX_UNREADABLE;
use larder_format::block::write_log::{Extent, SegmentGeometry};

use super::super::overlay::Dirty;
use super::super::planted::Planted;
use super::super::void::Void;
use super::super::volume_log::Order;
use super::{Asks, WriteLog};

/// So often, one after the other, a record may not be readable for the destager before it counts as lost.
const READ_TRIES: u32 = 8;
/// Bytes of a stretch in the table.
const LISTED: usize = 16;

/// Why what cannot be read is not given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotGivenUp {
    /// The volume writes back no more.
    #[error("it writes back no more")]
    Gone,
    /// The log has failed.
    #[error(
        "its write log has failed: nothing of it is given up before the cache is opened anew, which reads its device once more"
    )]
    Closed,
}

/// What an operator may give up of a volume now: what is known not to be readable, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivingUp {
    /// Bytes of which reads fail.
    pub bytes: u64,
    /// What the superblock is to say of the volume before it is given up, with what was given up before.
    pub void: Void,
    /// Records, ascending, and the bytes of each.
    records: Vec<(u64, Range<u64>)>,
    /// Bytes whose records are gone.
    bad: Vec<Range<u64>>,
}

/// How many stretches a FRONTIER of a log with such segments lists at most.
pub(super) fn most(geometry: SegmentGeometry) -> usize {
    MAX_UNREADABLE.min(geometry.bytes() as usize / 8 / LISTED)
}

/// Bytes of a volume: stretches that neither overlap nor meet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Unreadable {
    /// Where each ends, by its first byte.
    all: BTreeMap<u64, u64>,
}

impl Unreadable {
    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// How many stretches.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// These cannot be read.
    pub(super) fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let (mut from, mut to) = (range.start, range.end);
        let meets = self.all.range(..=to).rev().take_while(|(_, end)| **end >= from);
        for at in meets.map(|(&at, _)| at).collect::<Vec<u64>>() {
            let end = self.all.remove(&at).unwrap_or(to);
            (from, to) = (from.min(at), to.max(end));
        }
        self.all.insert(from, to);
    }

    /// There is something newer.
    pub(super) fn remove(&mut self, range: Range<u64>) {
        for hit in self.within(range.clone()).collect::<Vec<_>>() {
            let before = self.all.range(..=hit.start).next_back();
            let Some((from, to)) = before.map(|(&from, &to)| (from, to)) else { continue };
            self.all.remove(&from);
            if from < range.start {
                self.all.insert(from, range.start);
            }
            if to > range.end {
                self.all.insert(range.end, to);
            }
        }
    }

    /// Those in this range, in order.
    pub(super) fn within(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let (start, end) = (range.start, range.end.max(range.start));
        let before = self.all.range(..start).next_back();
        let all = before.into_iter().chain(self.all.range(start..end));
        let cut = move |(&from, &to): (&u64, &u64)| from.max(start)..to.min(end);
        all.map(cut).filter(|range| !range.is_empty())
    }

    /// All of them, in order.
    pub(super) fn all(&self) -> impl Iterator<Item = Range<u64>> {
        self.all.iter().map(|(&from, &to)| from..to)
    }

    /// As a FRONTIER lists them.
    pub(super) fn listed(&self) -> Vec<Extent> {
        self.all.iter().map(|(&offset, &end)| Extent { offset, length: end - offset }).collect()
    }

    /// After a window that brings these stretches to the store, and leaves those out.
    pub(super) fn after(&self, stored: &[Dirty], skipped: &[Dirty]) -> Unreadable {
        let mut after = self.clone();
        if !after.is_empty() {
            stored.iter().for_each(|dirty| after.remove(dirty.at..dirty.at + dirty.len));
        }
        skipped.iter().for_each(|dirty| after.add(dirty.at..dirty.at + dirty.len));
        after
    }
}

impl<B: Clone> WriteLog<B> {
    /// A stretch that was to be destaged could not be read, or is not what was written. It may be the next time; what fails again and again counts
    /// as lost: reads of it fail, it is read again from time to time ([`rereading`](super::rereading)), `any` goes on without it after a minute, and other orders stop before it.
    pub fn unread(&mut self, now: Nanos, attachment: u32, dirty: &Dirty) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        // Several stretches of one record that fail at once, as in a reset of the device, are one failure.
        let attempt = volume.destager.attempt();
        let (tries, last) = volume.unread.entry(dirty.sequence).or_insert((0, u64::MAX));
        if *last == attempt {
            return;
        }
        (*tries, *last) = (*tries + 1, attempt);
        if *tries < READ_TRIES {
            return;
        }
        volume.unread.remove(&dirty.sequence);
        volume.log.lose([dirty.sequence], &mut volume.overlay);
        volume.rereads.add(now, dirty.sequence);
        volume.destager.makes_anew();
    }

    /// An operator has given this up of older records of a volume. It is said between its attach and what a start has found.
    pub fn set_void(&mut self, attachment: u32, void: Void) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.log.set_void(void);
        }
    }

    /// What of a volume cannot be read any more, and what the superblock is to say before that is given up.
    ///
    /// # Errors
    /// Why it cannot be.
    pub fn giving_up(&self, attachment: u32) -> Result<GivingUp, NotGivenUp> {
        let volume = self.volumes.get(&attachment).ok_or(NotGivenUp::Gone)?;
        if self.closed.is_some() {
            return Err(NotGivenUp::Closed);
        }
        let range = |n: u64| Some((n, volume.log.record(n)?.range()));
        let records: Vec<(u64, Range<u64>)> = volume.log.lost().filter_map(range).collect();
        let next = volume.listing.as_ref().filter(|_| volume.destager.is_noting());
        let bad: Vec<Range<u64>> =
            [Some(&volume.bad), next].into_iter().flatten().flat_map(Unreadable::all).collect();
        // (What the next FRONTIERs list is not known yet. They list nothing of this.)
        let listed = (!volume.bad.is_empty()).then(|| volume.log.frontier());
        let void = volume.log.void().with(records.iter().map(|(n, _)| *n), listed);
        Ok(GivingUp { bytes: volume.unreadable_bytes(), void, records, bad })
    }

    /// An operator gives up what of a volume was known not to be readable, and the superblock says so durably: what it had been written over shows there
    /// again, from the log or the store. Returns how many bytes that are, and what the superblock is to say now: less where some could be read meanwhile.
    pub fn give_up_unreadable(
        &mut self,
        attachment: u32,
        giving: &GivingUp,
        asks: &mut Asks<B>,
    ) -> (u64, Void) {
        let Some(volume) = self.volumes.get_mut(&attachment) else {
            return (0, giving.void.clone());
        };
        let before = volume.unreadable_bytes();
        // What became of the records meanwhile: a window may have left them out.
        let gone = volume.log.frontier();
        let bad = giving.bad.iter().cloned();
        let left = giving.records.iter().filter(|(sequence, _)| *sequence <= gone);
        for range in bad.chain(left.map(|(_, range)| range.clone())) {
            volume.bad.remove(range);
        }
        if let Some(listing) = &mut volume.listing {
            // What the window that is under way leaves out was written before.
            let records = giving.records.iter().map(|(_, range)| range.clone());
            giving.bad.iter().cloned().chain(records).for_each(|range| listing.remove(range));
        }
        let records: Vec<u64> = giving.records.iter().map(|(sequence, _)| *sequence).collect();
        volume.log.give_up(&records, &mut volume.overlay);
        records.iter().for_each(|sequence| volume.rereads.remove(*sequence));
        let void = volume.log.void().with([], giving.void.listed());
        volume.log.set_void(void.clone());
        let bytes = before.saturating_sub(volume.unreadable_bytes());
        volume.given_up += bytes;
        volume.destager.makes_anew();
        volume.untold = true;
        // Whoever calls writes nothing: the thread that destages does.
        self.mark_waits = true;
        asks.steps.push(attachment);
        (bytes, void)
    }

    /// How many bytes keep all of a volume from coming to its store, since they cannot be read and nothing was written over them.
    pub fn cannot_drain(&self, attachment: u32) -> Option<u64> {
        let volume = self.volumes.get(&attachment).filter(|_| self.closed.is_none())?;
        Some(volume.unreadable_bytes()).filter(|bytes| *bytes > 0)
    }

    /// How many stretches of this volume may be listed: of a log that has failed nothing is, and nothing left out.
    pub(super) fn lists(&self, attachment: u32) -> Option<usize> {
        if self.closed.is_some() {
            return None;
        }
        let others = self.volumes.iter().filter(|(number, _)| **number != attachment);
        let listed = |volume: &super::Attached| {
            let next = volume.listing.as_ref().map_or(0, Unreadable::count);
            volume.bad.count().max(next)
        };
        let others: usize = others.map(|(_, volume)| listed(volume)).sum();
        Some(most(self.config.geometry).saturating_sub(others))
    }
}

impl super::Attached {
    /// What a FRONTIER says now: of a window that the store has, what is so behind it.
    pub(super) fn unreadable(&self) -> &Unreadable {
        self.listing.as_ref().filter(|_| self.destager.is_noting()).unwrap_or(&self.bad)
    }

    /// The store has all up to here, and that is said, or may be (`notes`).
    pub(super) fn said_by(&self, notes: bool) -> u64 {
        if notes { self.stored } else { self.log.frontier() }
    }

    /// What cannot be read stops it, where so much may be listed.
    pub(super) fn stops(&self, durable: u64, lists: Option<usize>) -> bool {
        let next = |skips| self.log.next(durable, u64::MAX, true, skips);
        let any = self.destager.order() == Order::Any;
        let bad = any && self.bad.count() >= lists.unwrap_or(0);
        self.log.unreadable_bytes() > 0
            && self.destager.is_idle()
            && (!any || bad)
            && next(true).is_some()
            && next(false).is_none()
    }

    /// A record lies where it can be read. Returns whether it counted as lost.
    pub(super) fn find(&mut self, sequence: u64) -> bool {
        self.unread.remove(&sequence);
        self.rereads.remove(sequence);
        self.log.find(sequence, &mut self.overlay)
    }

    /// Bytes of which reads fail.
    pub(super) fn unreadable_bytes(&self) -> u64 {
        let mut bytes = self.log.unreadable_bytes();
        for range in self.bad.within(0..u64::MAX) {
            self.overlay.look(range, |stretch| {
                if let super::Stretch::Clean(_, len) = stretch {
                    bytes += len;
                }
            });
        }
        bytes
    }

    /// The log knows a window durably.
    pub(super) fn listed(&mut self, forgets: bool) {
        if let Some(after) = self.listing.take() {
            self.bad = after;
            if forgets {
                self.bad = Unreadable::default();
            }
        }
    }
}

/// Whether what was left out is forgotten.
pub(super) fn forgets(fault: super::Fault) -> bool {
    fault.is(Planted::SkippedForgotten)
}

#[cfg(test)]
pub(super) mod tests;
