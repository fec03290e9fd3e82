//! Answers that wait until what a store may have lost is out of the cache.

use std::sync::Arc;

use super::Cached;
use crate::server::Volume;
use crate::server::service::Answer;

impl Cached {
    /// Gives an answer, by which something is durable or not. If the store may have lost writes, it waits until nothing of them is
    /// cached any more: who is told of the loss must not find them afterwards.
    pub(super) fn give(&mut self, known: usize, durable: bool, mut answer: Answer) {
        if let Some(known) = self.known[known].as_ref().filter(|_| durable) {
            let losses = known.volume.backing().losses();
            answer.losses = Some(losses);
            if known.attached.is_some() && known.volume.settled() < losses {
                known.volume.want_settled();
                return self.held.push((known.volume.clone(), answer));
            }
        }
        self.ended.push_back(answer);
    }

    /// Gives answers that have waited for that.
    pub(super) fn give_held(&mut self) {
        let ready = |(volume, answer): &mut (Arc<Volume>, Answer)| {
            volume.is_closed() || answer.losses.is_none_or(|losses| volume.settled() >= losses)
        };
        self.ended.extend(self.held.extract_if(.., ready).map(|(_, answer)| answer));
    }
}
