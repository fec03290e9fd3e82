//! What a thread of its own does for each further drive: it owns that drive's log with its write budget. All else is
//! [`Maintenance`](super::Maintenance)'s, which owns the log of the first.

use larder_base::Now;
use larder_base::lock::LockKind;

use super::maintenance::{Flash, StateIo};
use super::node::Node;
use super::schedule::{EVERY, SEGMENTS_OF_A_STEP, Turn};
use crate::dram::ObjectMemory;
use crate::kv::log::{FlashLog, SegmentIo};

/// Takes what the upkeep of a drive gives out.
pub trait DriveEffects {
    /// The drive is out of use since writes fail, or in use again.
    fn degraded(&mut self, _drive: usize, _degraded: bool) {}
    /// The turn is that of the drive at this place, whose thread may rest: it is to look.
    fn pass(&mut self, _drive: usize) {}
}

/// Owned by one thread. See the [module](self).
pub struct DriveUpkeep<B> {
    flash: Flash<B>,
    /// The last turn found nothing more to do.
    rested: bool,
    wanted: bool,
    degraded: bool,
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> DriveUpkeep<B> {
    /// The upkeep of the drive of this log.
    pub fn new<L: LockKind, M: ObjectMemory>(node: &Node<L, M>, log: FlashLog<B>) -> Self {
        let flash = Flash::new(node, log);
        flash.publish(node);
        DriveUpkeep { flash, rested: true, wanted: false, degraded: false }
    }

    /// The place of its drive.
    pub fn drive(&self) -> usize {
        self.flash.drive()
    }

    /// Does a little. Whoever calls it again at once, as long as it says so, has everything done that is due. `io` is the drive's own, and
    /// keeps its budget apart from others'; names are never given to it.
    pub fn turn<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut (impl SegmentIo + StateIo),
        fx: &mut impl DriveEffects,
    ) -> Turn {
        self.wanted |= std::mem::take(&mut self.rested);
        // Records bear numbers of applications: they must not be on flash before those are known on disk.
        if self.wanted && node.names_are_kept() {
            self.flash.keep_budget(now, SEGMENTS_OF_A_STEP * self.flash.segment_bytes(), io);
            let stepped = self.flash.step(now, node, io);
            self.wanted = stepped.worked;
            if let Some(to) = stepped.passed {
                fx.pass(to);
            }
            if std::mem::replace(&mut self.degraded, stepped.degraded) != stepped.degraded {
                fx.degraded(self.drive(), stepped.degraded);
            }
        } else {
            self.wanted = false;
            node.set_making_room(self.drive(), false);
        }
        if self.wanted {
            return Turn::Again;
        }
        self.rested = true;
        Turn::At(now.mono + EVERY)
    }

    /// A shard has called since the last turn.
    pub fn wake(&mut self) {
        self.wanted = true;
    }

    /// Writes out what is staged, however little, after the last request. Where names are not kept it is not written.
    pub fn drain<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut (impl SegmentIo + StateIo),
    ) {
        if node.names_are_kept() {
            self.flash.drain(now, node, io);
        }
        self.flash.keep_what_is(now, io);
    }

    /// The log.
    pub fn log(&self) -> &FlashLog<B> {
        self.flash.log()
    }

    /// The log, for tests.
    pub fn log_mut(&mut self) -> &mut FlashLog<B> {
        self.flash.log_mut()
    }
}
