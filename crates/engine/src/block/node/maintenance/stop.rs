//! How a run ends in good order: fills end, trimmed ranges are swept, stores become durable, then the map; and the superblock says
//! that nothing is missing.

use larder_base::Nanos;
use larder_format::block::{BlockSuperblock, Volume, VolumeState};
use larder_policy::block::VolumeId;

use super::census::SWEEP_STEP;
use super::{Effects, Maintenance, Shards, Turn};
use crate::block::log::LogIo;
use crate::block::node::charged::{Charged, Charges};
use crate::block::planted::Planted;

/// Sweeping that is over so soon is not worth a word.
const WORD: Nanos = Nanos::from_millis(100);

/// How far the end is.
#[derive(Debug)]
pub(super) enum Stop {
    /// It has not begun.
    No,
    /// Fills and copies end, until then at most.
    Draining(Nanos),
    /// Lines of trimmed ranges leave the map, until then at most.
    Sweeping { begun: Nanos, until: Nanos, said: bool },
    /// Stores become durable, until then at most: flushes that cover all.
    Flushing { until: Nanos, wanted: Vec<(VolumeId, u64)> },
    /// All is over.
    Over { settled: bool },
}

impl Stop {
    /// Fills are not waited for any more.
    pub(super) fn is_past_fills(&self) -> bool {
        !matches!(self, Stop::No | Stop::Draining(_))
    }
}

impl Maintenance {
    /// The end: all is made durable, and the volumes are put aside in good order, by the next turns. No client's operation may
    /// be under way any more.
    pub fn stop(&mut self, now: Nanos) {
        if matches!(self.stop, Stop::No) {
            self.stop = Stop::Draining(now + self.pace.drain);
        }
    }

    pub(super) fn go_on_to_stop<B>(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) -> Turn {
        match &mut self.stop {
            Stop::No => return Turn::Again,
            Stop::Over { settled } => return Turn::Over { settled: *settled },
            &mut Stop::Draining(until) => {
                let leaves = self.planted(Planted::StopLeavesFills);
                if self.under_way > 0 && now < until && !leaves {
                    // They may wait for slots that the log makes free.
                    return match self.work(now, shards, io, fx) {
                        Turn::At(at) => Turn::At(at.min(until)),
                        turn => turn,
                    };
                }
                self.stop = match self.log {
                    None => Stop::Over { settled: false },
                    // What of a trim is left keeps its bits, and is not used by the next start either.
                    Some(_) => {
                        Stop::Sweeping { begun: now, until: now + self.pace.sweep, said: false }
                    }
                };
            }
            Stop::Sweeping { begun, until, said } => {
                let left = (0..shards.shards()).any(|shard| shards.sweep(shard, SWEEP_STEP));
                if left && now < *until {
                    if now.saturating_sub(*begun) >= WORD && !std::mem::replace(said, true) {
                        fx.sweeping(false);
                    }
                    return Turn::Again;
                }
                if left {
                    fx.sweeping(true);
                }
                self.flush_at_the_end(now, shards, fx);
            }
            Stop::Flushing { until, wanted } => {
                let awaited = |(store, number): &(VolumeId, u64)| {
                    self.stores.get(store).is_some_and(|n| n.is_durable(*number).is_none())
                };
                let until = *until;
                if now < until && wanted.iter().any(awaited) {
                    self.flush_stores(fx);
                    return Turn::At(until);
                }
                self.settle(now, shards, io, fx);
            }
        }
        Turn::Again
    }

    /// Every store is flushed once more, if any may have something that is not durable: nothing is written any more.
    fn flush_at_the_end<B>(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        fx: &mut impl Effects<B>,
    ) {
        let mut wanted = Vec::new();
        if self.regions_set() > 0 || self.asked {
            let stores = shards.stores();
            wanted
                .extend(stores.into_iter().map(|s| (s, self.stores.entry(s).or_default().want())));
        }
        self.stop = Stop::Flushing { until: now + self.pace.flush, wanted };
        self.flush_stores(fx);
    }

    fn settle<B>(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) {
        let Stop::Flushing { wanted, .. } = &mut self.stop else { return };
        let wanted = std::mem::take(wanted);
        let believes = self.planted(Planted::StopBelievesStores);
        let durable = |(store, number): (VolumeId, u64)| {
            let ended = self.stores.get(&store).and_then(|n| n.is_durable(number));
            (store, ended == Some(true) || believes)
        };
        let flushed: Vec<(VolumeId, bool)> = wanted.into_iter().map(durable).collect();
        flushed
            .iter()
            .filter(|(_, durable)| !durable)
            .for_each(|&(store, _)| fx.not_durable(store));
        self.stop = Stop::Over { settled: false };
        let Some(mut log) = self.log.take() else { return };
        // Nobody will change anything any more.
        self.hurried = Some(super::Hurry { first: 0, last: u32::MAX, until: Nanos(u64::MAX) });
        let outcome = log.settle(now, &mut self.as_seen(now, shards, &flushed), io);
        log.end_recording();
        let outcome = outcome.and_then(|settled| {
            let aside = put_aside(log.superblock(), fx);
            log.update(io, |sb| {
                sb.clean_epoch = sb.epoch;
                sb.volumes.clone_from(&aside);
            })?;
            Ok(settled)
        });
        self.stats = log.stats();
        self.log = Some(log);
        match outcome {
            Ok(settled) => {
                fx.stopped();
                self.stop = Stop::Over { settled };
            }
            Err(error) => self.give_up(now, &error.to_string(), shards, io, fx),
        }
    }
}

/// The volumes as the next start finds them: those that were served until now are put aside, known by what their stores are
/// known by now. One whose store may not be durable is among them: its lines are not used where its bits are set.
fn put_aside<B>(superblock: &BlockSuperblock, fx: &mut impl Effects<B>) -> Vec<Volume> {
    let mut volumes = superblock.volumes.clone();
    for volume in volumes.iter_mut().filter(|v| v.state == VolumeState::Attached) {
        if let Some(identity) = fx.identity(&volume.name) {
            (volume.state, volume.identity) = (VolumeState::Detached, identity);
        }
    }
    volumes
}
