//! Who has been told that a store may have lost writes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::volume::Volume;
use larder_volume::op::{Failure, FailureKind, Outcome};

/// A client of a volume who relies on flushes: a connection over NBD, a guest's disk, a disk of this host with all its queues.
/// Made when the client comes; it is told of what is lost from then on.
///
/// A flush covers what all clients of a volume have written. So each client that was there when answered writes may have been
/// lost hears of it: its first flush, or write that is to be durable, that ends after that fails, once.
#[derive(Debug)]
pub struct Told {
    losses: AtomicU64,
}

impl Told {
    /// A client of `volume` that comes now.
    pub fn new(volume: &Volume) -> Told {
        Told { losses: AtomicU64::new(volume.told()) }
    }

    /// What the client is to hear of a request that has ended so; `losses` is [`Answer::losses`](super::service::Answer::losses).
    pub fn hear(&self, losses: Option<u64>, outcome: Outcome) -> Outcome {
        let Some(losses) = losses else { return outcome };
        let before = self.losses.fetch_max(losses, Ordering::SeqCst);
        if losses <= before {
            return outcome;
        }
        // One that has failed anyhow says it as well.
        outcome.and_then(|_| {
            Err(Failure::new(
                FailureKind::Failed,
                "the backing store may have lost writes that it had answered and not yet made durable",
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_loss_is_told_once_and_to_who_asks_for_something_durable() {
        let told = Told { losses: AtomicU64::new(2) };
        let good = || Ok(Vec::new());
        assert!(told.hear(Some(2), good()).is_ok(), "it came after that");
        assert!(told.hear(None, good()).is_ok());
        let failure = told.hear(Some(3), good()).unwrap_err();
        assert_eq!(failure.kind, FailureKind::Failed);
        assert!(told.hear(Some(3), good()).is_ok() && told.hear(Some(2), good()).is_ok());
        // One that has failed says what it says, and counts.
        let full = Failure::new(FailureKind::NoSpace, "full");
        assert_eq!(told.hear(Some(4), Err(full.clone())), Err(full));
        assert!(told.hear(Some(4), good()).is_ok());
    }
}
