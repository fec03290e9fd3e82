//! What a store is no longer trusted with: its server may have lost writes that it had answered, or somebody else has changed it.

use std::sync::atomic::Ordering;

use larder_engine::block::node::attachment::Step;
use larder_engine::block::node::operator::Operation;

use super::attached::Attached;
use super::{Core, Mailbox, locked};

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
        let lines = self.lines_of(volume.base(), volume.bytes());
        let (id, shards) = self.next_operation();
        let mut operation = Operation::changed(id, shards, lines);
        let mut durable = false;
        // Who does not answer is asked again another time: until the store is told, its notes say that nothing is proved.
        let _ = self.carry(&mut operation, &mut || self.goes_on(volume), &mut |operation, step| {
            match step {
                // Lines must not come back, not even after a power cut in the next moment, nor those that were evicted lately.
                Step::Record => {
                    let dropped = operation.dropped();
                    tracing::warn!(
                        "volume '{}': {dropped} lines are dropped: its store was changed by something else",
                        volume.name
                    );
                    durable = self.record_change(operation)?.1;
                    volume.accounted.store(changes, Ordering::Relaxed);
                    return Ok(true);
                }
                Step::InForce if durable => volume.volume().backing().accounted(changes),
                _ => {}
            }
            operation.done();
            Ok(true)
        });
    }

    /// If a volume's store may have lost writes that it had answered, drops the lines that may hold them: of all regions that were
    /// changed since they were last made durable. Until that is done nobody is told of the loss. Returns whether nothing is left
    /// to be done; not if `go_on` has said no, or what is under way does not end soon.
    pub(super) fn settle_losses(&self, volume: &Attached, go_on: &mut dyn FnMut() -> bool) -> bool {
        if volume.volume().settled() >= volume.volume().backing().losses() {
            return true;
        }
        let base = volume.base();
        let (first, last) = self.lines_of(base, volume.bytes());
        let regions = (self.region(first), self.region(last));
        let (id, shards) = self.next_operation();
        let mut operation = Operation::losses(id, shards, (first, last));
        let mut losses = 0;
        let done = self.carry(&mut operation, go_on, &mut |operation, step| {
            match step {
                // It has moved: these lines are not its own any more. (While they are given it cannot.)
                Step::Losses { .. } if volume.base() != base => return Ok(false),
                Step::Losses { .. } => {
                    losses = volume.volume().backing().losses();
                    let runs = self.on_log(move |log| log.unflushed(regions.0, regions.1))?;
                    operation.unflushed(&runs, &self.layout);
                    return Ok(true);
                }
                Step::InForce => {
                    let dropped = operation.dropped();
                    // A power cut does not bring them back: the regions keep their bits until they are flushed, and the log has it by then.
                    volume.volume().settle(losses);
                    tracing::error!(
                        "volume '{}': its store may have lost writes that it had answered and not made durable: the next flush \
                         of every client fails, and {dropped} lines that may hold such writes are dropped",
                        volume.name
                    );
                    // Answers wait for it.
                    self.mailboxes.iter().for_each(Mailbox::wake);
                }
                _ => {}
            }
            operation.done();
            Ok(true)
        });
        matches!(done, Ok(true))
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
