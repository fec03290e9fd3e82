//! A volume grows while it is served, and moves in the line space if it must.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_engine::block::node::attachment::{Attachment, DRAIN};
use larder_engine::block::node::operator::{NotDone, Operation};
use larder_engine::block::volumes::{CannotGrow, room_to_grow};

use super::Core;
use super::attached::Attached;
use super::open::CacheError;
use super::operators::OVERTAKEN;
use super::steps::At;

impl Core {
    fn cannot_grow(&self, name: &str, bytes: u64, why: CannotGrow) -> CacheError {
        let fail = |reason: String| CacheError::Volume { name: name.to_owned(), reason };
        match why {
            CannotGrow::Unknown => self.no_volume(name),
            CannotGrow::Uneven => fail(
                "its size is no multiple of the cache's line: detach it and attach it again"
                    .to_owned(),
            ),
            CannotGrow::NoRoom => fail(format!(
                "{bytes} bytes do not fit in the line space of this cache, neither where it lies nor elsewhere: `larder block \
                 drop` forgets volumes that are not attached"
            )),
        }
    }

    /// Whether a volume may grow to so many bytes while it is attached.
    ///
    /// # Errors
    /// What is in the way.
    pub fn may_grow_to(&self, name: &str, bytes: u64) -> Result<(), CacheError> {
        if self.attached(name)?.had().is_some() {
            let reason = super::back::ONLY_SHOWN.to_owned();
            return Err(CacheError::Volume { name: name.to_owned(), reason });
        }
        self.check_state_dir(name)?;
        let of = name.to_owned();
        // Without a cache too: by its lines changes exclude each other, and it may be taken back.
        let decided = self.on_log(move |log| Some(room_to_grow(log.line_space()?, &of, bytes)))?;
        let Some(Err(why)) = decided else { return Ok(()) };
        self.record_growth(name, bytes, &Err(why));
        Err(self.cannot_grow(name, bytes, why))
    }

    /// A volume has so many bytes from now on: its store has grown. What is cached of it stays, unless another volume lies right
    /// behind it: then it moves to where there is room, and begins there with nothing cached. Returns whether it moved.
    ///
    /// # Errors
    /// As [`Core::may_grow_to`]; when the store's identity cannot be found out; or when it must move and requests for it do not
    /// end. Nothing has changed then.
    pub fn grow(&self, name: &str, bytes: u64) -> Result<bool, CacheError> {
        self.may_grow_to(name, bytes)?;
        let volume = self.attached(name)?;
        let of = name.to_owned();
        let planned = self.on_log(move |log| {
            let sb = log.line_space()?;
            let volume = sb.volumes.iter().find(|v| v.name == of)?.clone();
            Some((volume, room_to_grow(sb, &of, bytes).ok()?))
        })?;
        let (record, growth) = planned.ok_or_else(|| self.no_volume(name))?;
        let attachment = Attachment::grow(&record, growth, bytes, &self.layout);
        if growth.moves_from.is_none() {
            self.carry_growth(&volume, attachment)?;
            return Ok(false);
        }
        if self.node_limits.prefetching.swap(true, Ordering::SeqCst) {
            let reason = "another volume lies right behind it, so that it must move, and something is prefetched or another volume moves: wait for that to end";
            return Err(CacheError::Volume { name: name.to_owned(), reason: reason.to_owned() });
        }
        let outcome = self.carry_growth(&volume, attachment);
        self.node_limits.prefetching.store(false, Ordering::SeqCst);
        outcome.map(|()| true)
    }

    fn carry_growth(
        &self,
        volume: &Arc<Attached>,
        attachment: Attachment,
    ) -> Result<(), CacheError> {
        let fail = |reason: String| CacheError::Volume { name: volume.name.clone(), reason };
        let late = || {
            fail(format!(
                "another volume lies right behind it, so that it must move, and requests for it did not end within {} s: see to \
                 its store and try again",
                DRAIN.0 / 1_000_000_000
            ))
        };
        let (id, shards) = self.next_operation();
        let mut operation = Operation::attachment(id, shards, attachment);
        let mut io = At { core: self, of: volume.clone(), go_on: &mut |_| true };
        let grown = self.carry_over(&mut operation, &mut io, Operation::grow_step);
        if !matches!(grown, Ok(Ok(()))) {
            operation.grow_given_up(&mut io);
        }
        match grown? {
            Ok(()) => {}
            Err(NotDone::Overtaken) => return Err(fail(OVERTAKEN.to_owned())),
            Err(_) => return Err(late()),
        }
        if operation.way().is_some_and(Attachment::moves) {
            tracing::warn!(
                "volume '{}': another lies right behind it, so it has moved to grow: {} lines are dropped, and nothing of it is cached",
                volume.name,
                operation.dropped(),
            );
        }
        Ok(())
    }
}
