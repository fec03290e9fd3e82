//! What of a volume that is served cannot be read any more: it is said, and an operator may give it up.

use std::sync::atomic::Ordering;

use larder_base::ByteSize;
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::void::Void;
use larder_format::block::superblock::WrittenBack;

use super::super::Core;
use super::super::attached::Attached;
use super::super::log::GaveUp;
use super::super::open::CacheError;
use super::discard::Discarded;
use super::start::volume_error;

/// There are more stretches of records than a superblock lists.
pub(super) const TOO_MANY: &str = "what cannot be read lies in more stretches of writes than can be recorded: write some of it again as a whole, or give up all \
                                   that is dirty of it";

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

    /// A volume may hold less of the log than is stated, since others have come or hold some that are put aside; or all of that again: it is said once.
    pub(in crate::block) fn look_at_bound(&self, volume: &Attached) {
        let Some((back, written)) = self.back_of(&volume.name) else { return };
        let Some(status) = back.log().status(self.now(), written.state.attachment) else { return };
        let (name, bound) = (&volume.name, status.held.1);
        let lowered = status.stated.filter(|&stated| bound < stated);
        let said = written.lowered.swap(lowered.map_or(0, |_| bound), Ordering::Relaxed);
        match (lowered, status.stated) {
            (Some(stated), _) if said != bound => tracing::warn!(
                "volume '{name}': it may hold {} of the write log, and not {} as is stated: there is no room for that beside the other volumes",
                ByteSize(bound),
                ByteSize(stated)
            ),
            (None, Some(stated)) if said > 0 => tracing::info!(
                "volume '{name}': it may hold {} of the write log again, as is stated",
                ByteSize(stated)
            ),
            _ => {}
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
        let giving = back.log().giving_up(attachment).map_err(|e| fail(&e.to_string()))?;
        let dirty = back.log().status(self.now(), attachment).map_or(0, |status| status.dirty);
        let mut told = Discarded {
            volume: name.to_owned(),
            lost_bytes: giving.bytes,
            kept_bytes: dirty.saturating_sub(giving.bytes),
            // Nothing that an older copy of the cache has is contradicted.
            fenced: true,
            ..Discarded::default()
        };
        if !yes {
            return Ok(told);
        }
        // What is given up is so after a kill too.
        self.record_void(name, attachment, &giving.void)?;
        let now = self.now();
        let given =
            tell_log(self, now, |log, asks| log.give_up_unreadable(attachment, &giving, asks));
        if let Some((bytes, void)) = given {
            told.lost_bytes = bytes;
            if void != giving.void {
                // Some could be read again, or is gone.
                self.record_void(name, attachment, &void)?;
            }
        }
        told.done = true;
        self.look_at_losses(&volume);
        Ok(told)
    }
    /// The superblock says what an operator has given up of a volume.
    fn record_void(&self, name: &str, attachment: u32, void: &Void) -> Result<(), CacheError> {
        let given = void.given_up();
        let recorded = self.on_log(move |log| log.give_up(attachment, &given))?;
        let why = match recorded {
            GaveUp::Done => return Ok(()),
            GaveUp::NoRoom => TOO_MANY,
            GaveUp::NotDurable => "that it is given up could not be recorded on the cache device",
        };
        Err(volume_error(name, why.to_owned()))
    }

    /// What an operator has given up of a volume, as the superblock says.
    pub(super) fn void_of(&self, state: &WrittenBack) -> Result<Void, CacheError> {
        let attachment = state.attachment;
        let given = self.on_log(move |log| Some(log.line_space()?.given_up_of(attachment)))?;
        Ok(Void::new(state.cut, &given.unwrap_or_default()))
    }
}
