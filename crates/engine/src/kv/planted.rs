//! Faults planted on purpose, to check the checker: the model-based tests must catch each of them. Without the feature
//! `planted` none can be, and every question is the constant `false`.

/// A planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A set leaves the key's old index entry.
    SetKeepsEntry,
    /// A delete of an object on flash leaves its index entry.
    DeleteKeepsEntry,
    /// Objects that changed while staged are published all the same.
    StalePublished,
    /// What was read is believed though the entry that led to it has gone meanwhile.
    GoneEntryBelieved,
    /// A change in place of an object that is staged goes unnoticed.
    StagedChangeMissed,
    /// A compare-and-swap of an object on flash does not compare.
    CasNotCompared,
    /// A change keeps the CAS of the version before.
    CasReused,
    /// A flush leaves the flash index.
    FlushKeepsFlash,
    /// Expiry is not looked at on flash.
    ExpiredServed,
    /// An entry under suspicion is put back without looking.
    SuspectRestoredBlindly,
    /// Of identical entries only one is removed.
    TwinKept,
    /// An entry that leads to a dead record is published.
    DeadTwinPublished,
    /// An announced flush is not kept over a kill.
    FlushForgotten,
    /// The first record of a page is taken for the key's.
    KeyNotCompared,
    /// Reclaim forgets to remove entries.
    ReclaimLeavesEntries,
    /// An object that is put back at a start gets another CAS.
    RestoredUnderNewCas,
    /// A start believes a checkpoint though another run has used the flash since.
    CheckpointOfAnotherRun,
    /// A copy of the superblock is written though the other may not be durable.
    SuperblockNotAwaited,
    /// A superblock is written over the one that is in force.
    SuperblockInPlace,
    /// A memory file is believed though another run has answered for the keys since.
    MemoryFileOfAnotherRun,
    /// A memory file is described before its objects are durable.
    MemoryFileDescribedFirst,
    /// Objects of a memory file come back though a flush that was announced has come due meanwhile.
    DueFlushForgotten,
    /// Records are written though the names of new applications could not be kept.
    UnkeptNameWritten,
}

impl<M> super::KvShard<M> {
    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
    }

    #[cfg(feature = "planted")]
    pub(super) fn planted(&self, fault: Planted) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    #[inline(always)]
    pub(super) fn planted(&self, _: Planted) -> bool {
        false
    }
}
