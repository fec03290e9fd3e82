//! What could not be read is read again from time to time: its device may have been out of order for a while only.
//!
//! A round reads all records of a volume that count as lost and lie in the log still; what it can read counts again. Rounds begin 1, 2, 4, … seconds
//! after one another, at most a minute. `any` leaves out what cannot be read ([`unreadable`](super::unreadable)) when [`PATIENCE`] rounds were in vain
//! (about a minute), or when the log needs the room or somebody waits for its end; other orders stop before it as long as it takes.

use std::collections::BTreeSet;

use larder_base::Nanos;

use super::super::overlay::Dirty;
use super::parking::{MOST, Parks};
use super::{Asks, Piece, WriteLog, pin};

/// How long it is until the first round, and at most until the next.
const PAUSE: (Nanos, Nanos) = (Nanos::from_secs(1), Nanos::from_secs(60));
/// After so many rounds `any` goes on without what they could not read.
pub(super) const PATIENCE: u32 = 6;

/// The records of a volume that are read again.
#[derive(Debug, Default)]
pub(super) struct Rereads {
    of: BTreeSet<u64>,
    /// When the next round begins, and how long it waits for that.
    next: Nanos,
    pause: Nanos,
    /// What the round that is under way has not asked for yet begins here.
    from: Option<u64>,
    /// Rounds since something was lost.
    rounds: u32,
}

impl Rereads {
    /// This record counts as lost now.
    pub(super) fn add(&mut self, now: Nanos, sequence: u64) {
        if self.of.is_empty() {
            *self = Rereads { next: now + PAUSE.0, pause: PAUSE.0, ..Rereads::default() };
        }
        self.of.insert(sequence);
    }

    /// This record is not read again.
    pub(super) fn remove(&mut self, sequence: u64) {
        self.of.remove(&sequence);
    }

    /// Records up to this one are there no more.
    pub(super) fn let_go(&mut self, position: u64) {
        while self.of.first().is_some_and(|first| *first <= position) {
            self.of.pop_first();
        }
    }

    /// When something is to be read.
    fn at(&self) -> Option<Nanos> {
        let begun = self.from.map(|_| Nanos::ZERO);
        begun.or(Some(self.next)).filter(|_| !self.of.is_empty())
    }

    /// What was lost may be read yet: it is not left out.
    pub(super) fn is_patient(&self) -> bool {
        !self.of.is_empty() && self.rounds < PATIENCE
    }

    /// All has been asked for of which this round is.
    fn round_ends(&mut self, now: Nanos) {
        self.pause = Nanos((self.pause.0 * 2).min(PAUSE.1.0));
        (self.from, self.next) = (None, now + self.pause);
        self.rounds += 1;
    }
}

impl<B: Clone> WriteLog<B> {
    /// When records are to be read again, and of which volume: not while something else is read to be copied, which ends soon.
    pub(super) fn rereads(&self) -> Option<(Nanos, u32)> {
        if self.parking.is_some() || self.closed.is_some() {
            return None;
        }
        // (What something newer shows in place of is not needed.)
        let shows = |v: &super::Attached| v.log.unreadable_bytes() > 0;
        let volumes = self.volumes.iter().filter(|(_, v)| shows(v));
        volumes.filter_map(|(n, v)| Some((v.rereads.at()?, *n))).min()
    }

    /// Begins to read again what could not be read of a volume: what is to be read for it.
    pub(super) fn reread(&mut self, now: Nanos, attachment: u32) -> Option<Parks> {
        self.rereads().filter(|(at, of)| *of == attachment && now >= *at)?;
        let volume = self.volumes.get_mut(&attachment)?;
        let (mut parks, mut bytes) = (Parks::new(), 0);
        let from = volume.rereads.from.take().unwrap_or(0);
        for &sequence in volume.rereads.of.range(from..) {
            let Some(logged) = volume.log.record(sequence) else { continue };
            if bytes + logged.len > MOST && !parks.is_empty() {
                volume.rereads.from = Some(sequence);
                break;
            }
            let dirty = Dirty { at: logged.at, len: logged.len, sequence, holds: logged.holds() };
            let Some(piece) = volume.piece(&self.config, &dirty) else { continue };
            bytes += logged.len;
            parks.push((sequence, Some(piece)));
        }
        if volume.rereads.from.is_none() {
            volume.rereads.round_ends(now);
        }
        if parks.is_empty() {
            return None;
        }
        for piece in parks.iter().filter_map(|(_, piece)| piece.as_ref()) {
            pin(&mut self.segments, piece.pin);
        }
        self.parking = Some(super::parking::Parking::rereads(attachment));
        Some(parks)
    }

    /// That was read, or not.
    pub(super) fn was_reread(
        &mut self,
        attachment: u32,
        read: &[(u64, Option<Piece>, Option<B>)],
        asks: &mut Asks<B>,
    ) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        let mut found = false;
        for (sequence, _, _) in read.iter().filter(|(_, _, bytes)| bytes.is_some()) {
            found |= volume.find(*sequence);
        }
        if found {
            volume.destager.makes_anew();
        }
        // The round goes on, or was the last in vain.
        asks.steps.push(attachment);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::volume_log::{Grain, Order};
    use super::super::unreadable::tests::{BLOCK, NOW, SEGMENT, destage, log, write};
    use super::*;

    /// A log of three writes of which the second cannot be read, and has been tried as often as it is at once.
    fn lost(order: Order) -> (WriteLog<Vec<u8>>, Nanos) {
        let mut log = log(order, SEGMENT, 16);
        for n in 0..3 {
            write(&mut log, n, n * 4 * BLOCK..(n * 4 + 4) * BLOCK);
        }
        let mut now = NOW;
        for _ in 0..60 {
            if log.volumes[&1].unreadable_bytes() > 0 {
                break;
            }
            now = now + Nanos::from_secs(6);
            destage(&mut log, now, |dirty| dirty.sequence != 2);
        }
        assert_eq!(log.volumes[&1].unreadable_bytes(), 4 * BLOCK);
        (log, now)
    }

    #[test]
    fn what_could_not_be_read_is_read_again_and_comes_to_its_store() {
        for order in [Order::Any, Order::Ordered(Grain::Flush), Order::Ordered(Grain::Completion)] {
            let (mut log, mut now) = lost(order);
            for pause in [1, 2, 4] {
                let (next, _) = log.rereads().unwrap();
                assert_eq!(next, now + Nanos::from_secs(pause), "{order:?}");
                assert!(log.wakes(now).is_some_and(|wakes| wakes <= next), "{order:?}");
                now = next;
                destage(&mut log, now, |dirty| dirty.sequence != 2);
                assert_eq!(log.volumes[&1].unreadable_bytes(), 4 * BLOCK, "{order:?}");
                assert!(log.volumes[&1].log.frontier() <= 1, "{order:?}");
            }
            (now, _) = log.rereads().unwrap();
            destage(&mut log, now, |_| true);
            assert_eq!(log.volumes[&1].unreadable_bytes(), 0, "{order:?}");
            assert!(log.is_clean(1), "{order:?}");
            assert!(log.rereads().is_none(), "{order:?}");
        }
    }

    #[test]
    fn any_leaves_it_out_after_a_minute_in_vain_and_other_orders_wait_on() {
        for (order, waits) in [(Order::Any, false), (Order::Ordered(Grain::Flush), true)] {
            let (mut log, begin) = lost(order);
            let mut now = begin;
            for round in 0..PATIENCE {
                assert!(log.volumes[&1].log.frontier() <= 1, "{order:?}: after {round}");
                (now, _) = log.rereads().unwrap();
                destage(&mut log, now, |dirty| dirty.sequence != 2);
            }
            assert!(now >= begin + Nanos::from_secs(60), "{begin:?} {now:?}");
            assert_eq!(log.volumes[&1].log.frontier() <= 1, waits, "{order:?}");
            assert_eq!(log.rereads().is_some(), waits, "{order:?}");
        }
    }

    #[test]
    fn any_does_not_wait_for_it_where_somebody_waits_for_the_end() {
        let (mut log, now) = lost(Order::Any);
        let mut asks = Asks::default();
        log.drain(1, true, &mut asks);
        // (What was begun with it rests for five seconds at most.)
        destage(&mut log, now + Nanos::from_secs(5), |dirty| dirty.sequence != 2);
        assert_eq!(log.volumes[&1].log.frontier(), 3);
    }
}
