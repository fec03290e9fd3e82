//! How a run ends: kills, power cuts, clean stops; and what comes after it.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use larder_base::Words;
use larder_engine::block::BlockShard;
use larder_engine::block::node::maintenance::{Turn, Work};
use larder_engine::block::node::ranged::Turns;
use larder_format::block::{Volume, VolumeState};

use super::attaching::Working;
use super::begins::Survived;
use super::node::Waiting;
use super::takeback::Returning;
use super::volumes::Store;
use super::{TURNS, World, overlay};
use crate::parts::Event;

impl World {
    /// What the process was doing is cut off: writes under way may have happened, in part.
    pub(super) fn cut_off(&mut self) {
        for doing in std::mem::take(&mut self.doing) {
            if doing.landed.is_some() {
                continue;
            }
            let shard = doing.event.shard().unwrap_or_default();
            match doing.event {
                Event::FlashWrite(_, slot, bytes) => {
                    let to = self.flash_at(shard, slot);
                    self.device.borrow_mut().write_torn(to, bytes.sectors());
                }
                Event::BackingChange(_, _, at, len, bytes) => {
                    self.change_backing(at, len, bytes.as_ref(), true);
                }
                Event::Merge(_, merge, bytes) => {
                    if let Some(before) = doing.read {
                        let after = overlay(&before, merge, &bytes);
                        let to = self.flash_at(shard, merge.to);
                        self.device.borrow_mut().write_torn(to, &after);
                    }
                }
                Event::Copy(_, _, to, _) => {
                    if let Some(bytes) = doing.read {
                        let to = self.flash_at(shard, to);
                        self.device.borrow_mut().write_torn(to, &bytes);
                    }
                }
                _ => {}
            }
        }
        self.ops.clear();
        self.end_attachment();
        self.returning = Returning::default();
        self.operations.clear();
        self.given.clear();
        self.forgetting.clear();
        self.impatient.clear();
        self.turns = Turns::of(TURNS);
        self.waiting = Waiting::default();
        (self.work, self.ended) = (Work::default(), 0);
        self.device.borrow_mut().coming = None;
        self.backing_is_true();
    }

    pub(super) fn restart(&mut self, survived: Option<Survived>) {
        self.rot_map(survived.is_some());
        let mut device = self.device.borrow_mut();
        device.blown = false;
        device.fuse = u64::MAX;
        drop(device);
        if !self.is_enabled() && !self.says_given_up(&self.superblock()) {
            // It could be noted nowhere. The operator is told to format the device before anybody starts with it.
            self.seen.unsaid += 1;
            self.format();
        }
        self.between_runs();
        if std::mem::take(&mut self.device.borrow_mut().dead) && self.rng.chance(0.3) {
            // Another takes its place.
            self.format();
        }
        if self.rng.chance(0.03) {
            return self.begin_without(survived);
        }
        let survived = self.offered(survived);
        self.begin(survived);
        if self.rng.chance(0.1) {
            // The power fails before anything has happened.
            self.device.borrow_mut().power_cut();
            self.backing_loses();
            self.begin(None);
        }
        self.note_misfits();
        if let Err(why) = self.check_map() {
            self.fail(format!("after a restart: {why}"));
        }
    }

    pub(super) fn kill(&mut self) {
        self.seen.kills += 1;
        self.script.push(format!("{} kill", self.time));
        self.count();
        let words = match &self.returning.lasting {
            Some(lasting) => {
                let words = lasting.survived().words;
                self.check_owned(&words);
                words
            }
            None => self.shards.iter().map(|s| s.map().snapshot()).collect(),
        };
        let survived = Survived { header: self.memory.borrow().snapshot(), words };
        self.cut_off();
        // Of a run without the device nothing outlives the process but what was there before it.
        let survived = if self.is_passed_by { self.passed_by.take() } else { Some(survived) };
        self.restart(survived);
    }

    /// A cache that is being taken back was killed: memory that is somebody's has no line of before.
    fn check_owned(&mut self, words: &[(Words, Words)]) {
        let is_owned = self.memory.borrow().snapshot().load(0) != 0;
        let has_lines = |entries: &Words| (0..entries.len()).any(|at| entries.load(at) != 0);
        if is_owned && words.iter().any(|(entries, _)| has_lines(entries)) {
            self.fail("memory was owned before it was empty".to_owned());
        }
    }

    pub(super) fn power_cut(&mut self) {
        self.seen.power_cuts += 1;
        let bits = self.maintenance.as_ref().map_or(0, |m| m.regions_set());
        let attached = self.volumes.iter().filter(|v| v.place.is_some()).count();
        let waits = self.shards.iter().any(|s| s.records_waiting() > 0);
        self.seen.behind += u64::from(self.is_enabled() && bits < attached && waits);
        self.script.push(format!("{} power cut", self.time));
        self.count();
        self.cut_off();
        self.device.borrow_mut().power_cut();
        self.backing_loses();
        self.restart(None);
        self.seen.warm_lines += self.shards.iter().map(|s| u64::from(s.map().count())).sum::<u64>();
    }

    pub(super) fn drain(&mut self) -> Result<(), String> {
        self.drain_until(|world| {
            // Fills go on when the clients have their answers.
            let idle = world.shards.iter().all(BlockShard::is_idle);
            let lines = world.working.as_ref().is_some_and(Working::has_lines)
                || world.returning.has_lines();
            world.ops.is_empty() && world.doing.is_empty() && idle && !lines
        })
    }

    fn drain_until(&mut self, done: impl Fn(&World) -> bool) -> Result<(), String> {
        self.draining = true;
        self.fuse.store(u64::MAX, Ordering::Relaxed);
        self.device.borrow_mut().fuse = u64::MAX;
        self.device.borrow_mut().fail = 0.0;
        for _ in 0..100_000 {
            if done(self) {
                self.draining = false;
                return Ok(());
            }
            self.time += 1;
            self.advance();
            self.attach_on();
            self.take_back_on();
            self.step_log();
            if let Some(why) = self.error.take() {
                return Err(why);
            }
        }
        let op = self.ops.iter().next().map(|(id, o)| (*id, o.kind, o.at, o.operators));
        let shards: Vec<_> = self.shards.iter().map(|s| s.under_way()).collect();
        Err(format!(
            "{shards:?} stuck: {} operations, {} I/Os, the first {op:?}",
            self.ops.len(),
            self.doing.len()
        ))
    }

    pub(super) fn stop(&mut self) -> Result<(), String> {
        if self.rng.chance(0.5) {
            self.drain()?;
        } else {
            // Clients have their answers, and nothing of theirs is under way; fills and copies are.
            self.drain_until(|w| {
                w.ops.is_empty() && w.queue.under_way() == 0 && w.doing.iter().all(|d| d.upkeep)
            })?;
        }
        self.seen.stops += 1;
        self.seen.busy_stops += u64::from(!self.doing.is_empty());
        self.script.push(format!("{} stop", self.time));
        self.count();
        let fuse = self.rng.below(14);
        if self.rng.chance(0.2) {
            self.device.borrow_mut().fuse = fuse;
        }
        let settled = self.settle()?;
        if self.device.borrow().blown {
            self.seen.kills_in_stop += 1;
            if self.rng.chance(0.5) {
                self.kill()
            } else {
                self.power_cut()
            }
            return Ok(());
        }
        self.device.borrow_mut().fuse = u64::MAX;
        if let Some(late) = self.doing.iter().find(|d| d.upkeep) {
            return Err(format!("it has stopped, and this is under way: {:?}", late.event));
        }
        let enabled = self.is_enabled();
        let lines: u32 = self.shards.iter().map(BlockShard::lines).sum();
        // (One that is coming is not served yet.)
        let served = |v: &Volume| self.identities.contains_key(&v.name);
        let is_left = |v: &&Volume| v.state == VolumeState::Attached && served(v);
        if enabled && let Some(left) = self.superblock().volumes.iter().find(is_left) {
            return Err(format!("it has stopped, and {} is not put aside", left.name));
        }
        self.cut_off();
        self.device.borrow_mut().power_cut();
        self.backing_loses();
        let losses = self.seen.losses();
        let outgrown = self.volumes.iter().any(Store::has_outgrown);
        self.restart(None);
        let rotten = outgrown || losses != self.seen.losses();
        let after: u32 = self.shards.iter().map(BlockShard::lines).sum();
        if enabled && settled && !rotten && after != lines {
            return Err(format!("{lines} lines before a clean stop, {after} after it"));
        }
        Ok(())
    }

    /// Maintenance ends the run. The backing store may refuse to flush: then its regions stay cold. Returns whether all is
    /// settled.
    fn settle(&mut self) -> Result<bool, String> {
        let served = self.volumes.iter().filter(|v| v.place.is_some());
        self.identities = Rc::new(served.map(|v| (v.name.clone(), v.identity())).collect());
        self.maintain(|m, now, _, _, _| m.stop(now));
        for _ in 0..100_000 {
            self.time += 1;
            if let Some(Turn::Over { settled }) = self.step_log() {
                return Ok(settled);
            }
            self.advance();
            self.flush_on();
            if let Some(why) = self.error.take() {
                return Err(why);
            }
        }
        Err("it does not stop".to_owned())
    }
}
