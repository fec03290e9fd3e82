//! Flushes of a file, of all its sessions.
//!
//! **What a failed flush may have taken with it.** The kernel says once of pages that it could not write that it could not, to
//! whoever asks first, and takes them for written then; all sessions share one open file. So that is counted (`ledger`), for the
//! next flush of every other client to fail too. Which of several flushes under way got to hear it is not known before they
//! have all ended: one that ended well waits for those beside it, and is believed then. (A write that is to be durable does not
//! wait: its client hears of it with the next.) The way past the page cache is another open file: what one of the two hears the
//! other may hear again, and then clients are told twice.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::ledger::Ledger;
use crate::op::Done;

/// What is made durable, by all sessions.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    pub(super) ledger: Ledger,
    under_way: Mutex<UnderWay>,
    /// The next of them hears from the kernel that pages could not be written.
    #[cfg(test)]
    pub(super) fails: std::sync::atomic::AtomicBool,
}

#[derive(Debug, Default)]
struct UnderWay {
    last: u64,
    /// Flushes, and changes that are to be durable, that nobody has heard of yet, by the order in which they began.
    numbers: BTreeSet<u64>,
    /// Whom to wake when one of them has ended.
    waiting: Vec<Arc<OwnedFd>>,
}

impl Syncs {
    fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        self.under_way.lock()
    }

    /// One begins. Returns its number.
    pub(super) fn begins(&self) -> u64 {
        let mut all = self.under_way();
        all.last += 1;
        let number = all.last;
        all.numbers.insert(number);
        number
    }

    /// It has ended; if badly, that is in the ledger. Returns up to which others must have ended too before it is known that
    /// what it says of all changes is so; `None` if they have.
    pub(super) fn ended(&self, number: u64) -> Option<u64> {
        let mut all = self.under_way();
        all.numbers.remove(&number);
        for event in all.waiting.drain(..) {
            // Full means that it will wake anyway.
            let _ = rustix::io::write(&event, &1u64.to_ne_bytes());
        }
        (!all.numbers.is_empty()).then_some(all.last)
    }

    /// Whether all of them up to that one have ended; else who waits is woken when one more has.
    pub(super) fn have_ended(&self, last: u64, waits: &Arc<OwnedFd>) -> bool {
        let mut all = self.under_way();
        let over = all.numbers.first().is_none_or(|&first| first > last);
        if !over && !all.waiting.iter().any(|event| Arc::ptr_eq(event, waits)) {
            all.waiting.push(waits.clone());
        }
        over
    }
}

/// A flush that has ended well while others were under way.
pub(super) struct Beside {
    /// All up to this one must have ended.
    pub(super) last: u64,
    pub(super) covers: u64,
    pub(super) done: Done,
}
