//! What a marker says of a volume while its failed log is brought to the store, and then: it writes through.

use std::sync::atomic::Ordering;

use larder_engine::block::OpId;
use larder_engine::block::node::calls::{Message, OP_BITS, send};
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::node::queue::Node as _;
use larder_engine::block::writeback::log::Said;
use larder_engine::block::writeback::marker::Again;
use larder_format::block::marker::MarkerState;
use larder_format::block::superblock::{HoldsState, WrittenBack};

use super::super::{Core, locked};
use super::unix_nanos;

impl Core {
    /// The marker of a volume is to say this, which may take its time; [`Message::Marked`] says how that ended.
    pub(in crate::block) fn mark_and_tell(&self, attachment: u32, said: Said, frontier: u64) {
        let done = self.have_said(attachment, said, frontier);
        let thread = self.destages(attachment) as u64;
        send(self, OpId(thread << OP_BITS), Message::Marked { attachment, done });
    }

    fn have_said(&self, attachment: u32, said: Said, frontier: u64) -> bool {
        let Some(back) = self.back.get() else { return false };
        let Some(written) = back.written(attachment) else { return false };
        let volume = &written.attached;
        #[cfg(test)]
        if said != Said::Closing && self.faults.marks.load(Ordering::SeqCst) {
            return false;
        }
        let state = match said {
            Said::Closing => MarkerState::Closing,
            Said::Closed => MarkerState::Closed,
            Said::Clean => MarkerState::Clean,
            Said::Joins { closed: true, .. } => MarkerState::Closed,
            Said::Joins { closed: false, .. } => MarkerState::Dirty,
        };
        if written.place.is_some() {
            let time = unix_nanos();
            let age = || self.age_of(Some(attachment));
            let time = written.time_of(time, frontier, age);
            let mut number = locked(&written.number);
            if back.written(attachment).is_none() {
                // It has gone meanwhile.
                return false;
            }
            let again = self.check_marker(back, &written);
            if again == Again::Others {
                return false;
            }
            // (One that could not be written may have been.)
            *number += 1;
            let mut marker = self.marker(volume, &written.state, *number, state, frontier);
            marker.time = time;
            written.leaves.store(said == Said::Clean, Ordering::SeqCst);
            if let Err(error) = self.write_marker(&written, &marker, again) {
                written.leaves.store(false, Ordering::SeqCst);
                tracing::warn!("volume '{}': {error}: it is tried again", volume.name);
                return false;
            }
            written.wrote(&marker);
            if let Said::Joins { closed: false, .. } = said {
                tell_log(self, self.now(), |log, _| log.set_marker(attachment, marker.number));
            }
        } else if !self.holds_nothing(&volume.name) {
            tracing::error!(
                "volume '{}': all of it is in its store, and neither a marker nor the cache device can say so: it is not written any more; format \
                 the cache, or replace it, and start again",
                volume.name
            );
            return false;
        }
        match said {
            Said::Closing => tracing::error!(
                "volume '{}': the write log has failed: what it holds comes to the store from memory, and new writes wait for that",
                volume.name
            ),
            Said::Closed => {}
            Said::Joins { last, .. } => tracing::warn!(
                "volume '{}': what could not be read was written again, and goes to the store with all up to write {last}: until it is there the store alone \
                 is no image",
                volume.name
            ),
            Said::Clean => {
                if written.place.is_some()
                    && back.drains.load(Ordering::Relaxed)
                    && self.is_enabled()
                {
                    // The device works, and lines of it are used: it does not show any more what the store has by now. (One that fails is not asked.)
                    self.holds_nothing(&volume.name);
                }
                tracing::warn!(
                    "volume '{}': the write log has failed, and all that it held is in the store: it is written through from now on. If the \
                     cache device works again the cache can be taken back, and the volume then changed to write back; else replace it, format it and \
                     start again",
                    volume.name
                );
                volume.volume().writes_back(false);
                volume.attachment.store(0, Ordering::SeqCst);
                back.remove(attachment);
            }
        }
        true
    }

    /// The cache device says that it holds nothing of a volume.
    fn holds_nothing(&self, name: &str) -> bool {
        if self.hand.get().is_some() {
            // The thread that would do it is this one.
            return false;
        }
        let of = name.to_owned();
        let said = self.on_log(move |log| {
            log.change_write_back_of(&of, |was| WrittenBack { holds: HoldsState::Clean, ..was })
        });
        matches!(said, Ok(Some(_)))
    }

    /// The device that the write log is on is used no more, for this reason: nor is the log.
    pub(in crate::block) fn close_log(&self, why: &'static str) {
        tell_log(self, self.now(), |log, asks| {
            log.close(self.now(), why, asks);
            // The cache is given up already.
            asks.gives_up = None;
        });
    }
}
