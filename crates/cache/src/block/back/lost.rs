//! What of a volume that is served cannot be read any more: it is said, and an operator may give it up.

use std::sync::atomic::Ordering;

use larder_base::ByteSize;
use larder_engine::block::node::logged::tell_log;
use larder_format::block::superblock::WrittenBack;

use super::super::attached::Attached;
use super::super::open::CacheError;
use super::super::{Core, locked};
use super::discard::Discarded;
use super::start::volume_error;

impl Core {
    /// What cannot be read stops a volume, or was given up: it is said once.
    pub(in crate::block) fn look_at_losses(&self, volume: &Attached) {
        let Some((back, written)) = self.back_of(&volume.name) else { return };
        let Some(status) = back.log().status(self.now(), written.state.attachment) else { return };
        let name = &volume.name;
        let said = written.given_up.swap(status.given_up, Ordering::Relaxed);
        if status.given_up > said {
            tracing::warn!(
                "volume '{name}': {} could not be read from the write log, and are given up as the operator has said",
                ByteSize(status.given_up - said)
            );
        }
        let stopped = status.is_stopped;
        if written.stopped.swap(stopped, Ordering::Relaxed) || !stopped {
            return;
        }
        match status.unlisted {
            true => tracing::error!(
                "volume '{name}': no more stretches that cannot be read can be listed, and what is to come to its store next would leave more: nothing \
                 is destaged before some of them are written again as a whole, trimmed, or given up"
            ),
            false => tracing::error!(
                "volume '{name}': {} of what was written cannot be read from the write log: nothing is destaged before they are written again, trimmed, or \
                 given up",
                ByteSize(status.unreadable)
            ),
        }
    }

    /// Gives up what of a volume that is served cannot be read any more: what was there before shows again, from the log or the store. Without `yes` it
    /// is only told what that would be.
    ///
    /// # Errors
    /// When the volume is not attached, does not write back, is only shown or changes over, or it cannot be recorded.
    pub fn discard_unreadable(&self, name: &str, yes: bool) -> Result<Discarded, CacheError> {
        let fail = |reason: &str| volume_error(name, reason.to_owned());
        let volume = self.attached(name)?;
        let Some((back, written)) = self.back_of(name) else {
            return Err(fail("it does not write back: its store has all of it"));
        };
        if written.shown {
            return Err(fail(super::ONLY_SHOWN));
        }
        let _alone = self.alone(&volume)?;
        let attachment = written.state.attachment;
        let giving_up = back.log().giving_up(attachment);
        let (bytes, cut) = giving_up.map_err(|e| fail(&e.to_string()))?;
        let dirty = back.log().status(self.now(), attachment).map_or(0, |status| status.dirty);
        let mut told = Discarded {
            volume: name.to_owned(),
            lost_bytes: bytes,
            kept_bytes: dirty.saturating_sub(bytes),
            // Nothing that an older copy of the cache has is contradicted.
            fenced: true,
            ..Discarded::default()
        };
        if !yes {
            return Ok(told);
        }
        // What is given up is so after a kill too.
        let of = name.to_owned();
        let record = self.on_log(move |log| {
            log.change_write_back_of(&of, |entry| WrittenBack { cut: Some(cut), ..entry })
        })?;
        if record.is_none() {
            return Err(fail("that it is given up could not be recorded on the cache device"));
        }
        *locked(&written.cut) = Some(cut);
        let given =
            tell_log(self, self.now(), |log, asks| log.give_up_unreadable(attachment, cut, asks));
        told.lost_bytes = given.unwrap_or(0);
        told.done = true;
        self.look_at_losses(&volume);
        Ok(told)
    }
}
