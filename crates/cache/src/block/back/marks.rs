//! Consistency points that an application names.

use std::time::Duration;

use larder_engine::block::node::logged::tell_log;
use larder_engine::block::writeback::log::MarkState;
use larder_runtime::{AlignedBuf, Device as _, Payload};

use super::super::Core;
use super::super::open::CacheError;
use super::super::operators::LOOK;
use super::Back;

/// The first looks are close together: a flush of flash takes no longer.
const FIRST_LOOK: Duration = Duration::from_millis(1);

impl Core {
    /// A consistency point of a volume that writes back, with a name: all that was answered before it is durable on the cache's flash when this
    /// returns, and where epochs end at marks one may end here. Nothing is destaged for it. `go_on` may say no: then it returns
    /// nothing, and the mark may still come; else its sequence.
    ///
    /// # Errors
    /// When there is no such volume, it does not write back, [`check_mark`](super::check_mark) refuses the name, or the log fails.
    pub fn mark(
        &self,
        name: &str,
        mark: &str,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>, CacheError> {
        let fail = |reason: String| CacheError::Volume { name: name.to_owned(), reason };
        super::check_mark(mark).map_err(fail)?;
        self.attached(name)?;
        let (back, written) = self.back_of(name).ok_or_else(|| {
            fail(
                "it does not write back, and marks are for volumes that do: a flush makes its store durable"
                    .to_owned(),
            )
        })?;
        if written.shown {
            return Err(fail(super::ONLY_SHOWN.to_owned()));
        }
        let attachment = written.state.attachment;
        if back.log().is_refused(attachment) {
            return Err(fail(self.troubles_of(&written).join("; ")));
        }
        let failed = |back: &Back| {
            let halted = back.log().is_halted(attachment).then(|| self.troubles_of(&written));
            let why = back.log().closed().unwrap_or("it was detached");
            let why = halted.map_or(why.to_owned(), |troubles| troubles.join("; "));
            fail(format!("the mark is not in its write log: {why}"))
        };
        let mut buf = AlignedBuf::zeroed(mark.len());
        buf.copy_from_slice(mark.as_bytes());
        let bytes = Payload::new(buf);
        let now = self.now();
        let asked = tell_log(self, now, |log, asks| log.mark(attachment, mark, bytes, asks));
        let number = asked.flatten().ok_or_else(|| failed(back))?;
        let mut pause = FIRST_LOOK;
        loop {
            let state = tell_log(self, self.now(), |log, _| log.mark_state(attachment, number));
            match state {
                Some(MarkState::Durable(sequence)) => return Ok(Some(sequence)),
                Some(MarkState::Failed) => return Err(failed(back)),
                _ if !go_on() => {
                    tell_log(self, self.now(), |log, _| log.forget_mark(attachment, number));
                    return Ok(None);
                }
                _ => {}
            }
            self.pause(pause);
            pause = (pause * 2).min(LOOK);
        }
    }

    /// A start has found marks in the log: their names are read.
    pub(super) fn name_marks(&self, back: &Back, attachment: u32) {
        let unnamed = back.log().unnamed_marks(attachment);
        for (sequence, piece) in unnamed {
            let mut bytes = vec![0u8; piece.bytes as usize];
            // One that cannot be read has no name: it is no less a mark.
            if self.device.read_at(piece.place, &mut bytes).is_ok() {
                tell_log(self, self.now(), |log, _| {
                    log.name_mark(attachment, sequence, &piece, &bytes);
                });
            }
        }
    }
}
