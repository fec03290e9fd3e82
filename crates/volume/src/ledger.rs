//! Which writes a store has answered and not made durable, and how often some of them may have gone.
//!
//! A server that was killed may have lost writes that it had answered. Who comes back cannot be asked. A kernel that could not
//! write pages of a file says so once, to whoever asks first. So a loss has a number, which only grows: whoever was there
//! before compares it with the one that he has seen (`larder_block::server::Told`), and each hears of it once.
//!
//! A connection's end is noticed by the thread that has it. What is not seen: a server that is killed and started anew, and has
//! answered a flush on a connection that another thread made meanwhile, before this thread has looked at its own. Threads look
//! as soon as the kernel tells them.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// See the [module](self). Shared by all sessions of a store.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Writes and the like that were answered and may not be durable.
    answered: AtomicU64,
    /// Of them, those that a flush has covered.
    durable: AtomicU64,
    /// Of them, those whose loss has a number.
    given_up: Mutex<u64>,
    losses: AtomicU64,
}

impl Ledger {
    /// A write was answered that may not be durable. To be called before anybody hears of the answer.
    pub(super) fn answered(&self) {
        self.answered.fetch_add(1, Ordering::SeqCst);
    }

    /// What a flush that begins now will have covered.
    pub(super) fn covers(&self) -> u64 {
        self.answered.load(Ordering::SeqCst)
    }

    /// A flush that covers so many has ended well.
    pub(super) fn flushed(&self, covers: u64) {
        self.durable.fetch_max(covers, Ordering::SeqCst);
    }

    /// There are writes that were answered, that no flush has covered, and whose loss has no number.
    #[cfg(any(test, feature = "nbd"))]
    pub(super) fn is_owed(&self) -> bool {
        let given_up = *self.given_up.lock();
        self.covers() > self.durable.load(Ordering::SeqCst).max(given_up)
    }

    /// A connection has gone, or a flush has failed: what is owed may be lost. Returns whether something was. When this returns,
    /// the loss has its number, whoever of several that noticed it was the first.
    pub(super) fn lost(&self) -> bool {
        let mut given_up = self.given_up.lock();
        let answered = self.covers();
        if answered <= self.durable.load(Ordering::SeqCst).max(*given_up) {
            return false;
        }
        *given_up = answered;
        self.losses.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Times that answered writes may have been lost.
    pub(super) fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_has_one_number_whoever_notices_it() {
        let ledger = Ledger::default();
        assert!(!ledger.lost(), "nothing was written");
        ledger.answered();
        assert!(ledger.is_owed() && ledger.lost());
        // Another connection to the server that was killed.
        assert!(!ledger.lost() && !ledger.is_owed());
        assert_eq!(ledger.losses(), 1);
        ledger.answered();
        let covers = ledger.covers();
        ledger.answered();
        ledger.flushed(covers);
        assert!(ledger.is_owed(), "the last one came behind the flush");
        assert!(ledger.lost());
        ledger.flushed(ledger.covers());
        assert!(!ledger.lost());
        assert_eq!(ledger.losses(), 2);
    }
}
