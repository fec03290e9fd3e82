//! What a store is no longer trusted with: its server may have lost writes that it had answered, or somebody else has changed it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_engine::block::node::operator::Operation;
use larder_engine::block::node::operator::distrust::{ChangedIo, LossesIo};
use larder_format::block::Layout;

use super::attached::Attached;
use super::open::CacheError;
use super::steps::{About, At};
use super::{Core, Mailbox, locked};

/// A volume whose store is distrusted.
struct Distrusted<'a> {
    volume: &'a Attached,
    /// Where it lay when that began.
    base: u64,
    /// Changes by others that its store knew of then.
    changes: u64,
    /// Nobody else has changed it: its lines are not what it holds, by its marker.
    voids: bool,
}

impl About for Distrusted<'_> {
    fn attached(&self) -> Option<Arc<Attached>> {
        None
    }
}

impl LossesIo for At<'_, Distrusted<'_>> {
    fn layout(&self) -> Layout {
        self.core.layout
    }

    fn is_there(&mut self) -> bool {
        self.of.volume.base() == self.of.base
    }

    fn losses(&mut self) -> u64 {
        self.of.volume.volume().backing().losses()
    }

    fn unflushed(&mut self, (first, last): (u32, u32)) -> Result<Vec<(u32, u32)>, CacheError> {
        self.core.on_log(move |log| log.unflushed(first, last))
    }

    fn settle(&mut self, losses: u64, dropped: u64) {
        let volume = self.of.volume.volume();
        volume.settle(losses);
        let name = volume.name();
        match self.of.volume.attachment() {
            None => tracing::error!(
                "volume '{name}': its store may have lost writes that it had answered and not made durable: the next flush \
                 of every client fails, and {dropped} lines that may hold such writes are dropped"
            ),
            // The destager finds that its window was written to a store of a former life.
            Some(_) => tracing::warn!(
                "volume '{name}': its store may have lost writes that it had answered and not made durable: they are in the write log and come to it \
                 again, and {dropped} lines that may hold such writes are dropped"
            ),
        }
        // Answers wait for it.
        self.core.mailboxes.iter().for_each(Mailbox::wake);
    }
}

impl ChangedIo for At<'_, Distrusted<'_>> {
    fn say_dropped(&mut self, dropped: u64) {
        if self.of.voids {
            if dropped > 0 {
                tracing::info!(
                    "volume '{}': {dropped} lines are dropped: its marker does not say that they are what its store holds",
                    self.of.volume.name
                );
            }
            return;
        }
        if dropped == 0 {
            tracing::info!(
                "volume '{}': its store was changed by something else, and no line of it was cached",
                self.of.volume.name
            );
            return;
        }
        tracing::warn!(
            "volume '{}': {dropped} lines are dropped: its store was changed by something else",
            self.of.volume.name
        );
    }

    fn accounted(&mut self, durable: bool) {
        let Distrusted { volume, changes, .. } = self.of;
        volume.accounted.store(changes, Ordering::Relaxed);
        if durable {
            volume.volume().backing().accounted(changes);
        }
    }
}

impl Core {
    /// Whether work on a volume that nobody has asked for is to go on.
    pub(super) fn goes_on(&self, volume: &Attached) -> bool {
        !volume.volume().is_closed() && !locked(&self.log_inbox).stopped
    }

    /// Whether a volume is attached still, by its number.
    pub(super) fn is_attached(&self, volume: &Attached) -> bool {
        self.volume(&volume.name).is_some_and(|v| v.id == volume.id)
    }

    /// Looks whether somebody else has changed a volume's store, and drops all of its lines if so. What cannot be dropped now
    /// is, the next time.
    pub(super) fn look_for_changes(&self, volume: &Attached) {
        let changes = volume.volume().backing().look();
        if changes == volume.accounted.load(Ordering::Relaxed) {
            return;
        }
        // Who does not answer is asked again another time.
        let _ = self.distrust(volume, changes, false);
    }

    /// Drops all lines of a volume: its store was changed by others, so often as far as is known; or (`voids`) its marker does not say that they are
    /// what the store holds.
    ///
    /// # Errors
    /// When that could not be done.
    pub(super) fn distrust(
        &self,
        volume: &Attached,
        changes: u64,
        voids: bool,
    ) -> Result<(), CacheError> {
        let base = volume.base();
        let (id, shards) = self.next_operation();
        let mut operation = Operation::changed(id, shards, self.lines_of(base, volume.bytes()));
        let of = Distrusted { volume, base, changes, voids };
        let mut io = At { core: self, of, go_on: &mut |_| self.goes_on(volume) };
        let done = self.carry_over(&mut operation, &mut io, Operation::changed_step)?;
        done.map_err(|_| CacheError::Volume {
            name: volume.name.clone(),
            reason: "requests for its lines do not end: try again".to_owned(),
        })
    }

    /// If a volume's store may have lost writes that it had answered, drops the lines that may hold them: of all regions that were
    /// changed since they were last made durable. Until that is done nobody is told of the loss. Returns whether nothing is left
    /// to be done; not if `go_on` has said no, or what is under way does not end soon.
    pub(super) fn settle_losses(&self, volume: &Attached, go_on: &mut dyn FnMut() -> bool) -> bool {
        if volume.volume().settled() >= volume.volume().backing().losses() {
            return true;
        }
        let base = volume.base();
        let (id, shards) = self.next_operation();
        let mut operation = Operation::losses(id, shards, self.lines_of(base, volume.bytes()));
        let of = Distrusted { volume, base, changes: 0, voids: false };
        let mut io = At { core: self, of, go_on: &mut |_| go_on() };
        let done = self.carry_over(&mut operation, &mut io, Operation::losses_step);
        matches!(done, Ok(Ok(())))
    }

    /// The same now and then: as soon as somebody waits for it, or the store is there. While it is not, operations wait for it, and
    /// those of lines that are cached need not wait for these.
    pub(super) fn look_for_losses(&self, volume: &Attached) {
        let exported = volume.volume();
        if exported.settled() >= exported.backing().losses() {
            return;
        }
        let away = || exported.backing().trouble().is_some_and(|t| t.state == "lost");
        if !exported.wants_settled() && away() {
            return;
        }
        self.settle_losses(volume, &mut || self.goes_on(volume));
    }
}
