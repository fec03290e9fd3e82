//! Faults planted on purpose, to check the checker: the model test must catch each of them. Without the feature `planted`
//! none can be, and every question is the constant `false`.

/// The faults, once: as an enum, and as the list of all of them.
macro_rules! faults {
    ($($(#[$said:meta])+ $name:ident,)+) => {
        /// A planted fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Planted {
            $($(#[$said])+ $name,)+
        }

        impl Planted {
            /// All of them.
            pub const ALL: &[Planted] = &[$(Planted::$name,)+];
        }
    };
}

faults! {
    /// An update in place stays in the map while it is written.
    UpdateStaysInMap,
    /// What the backing store refused is published all the same.
    FailedChangePublished,
    /// A fill does not wait until the durable map knows that its slot is empty.
    FillBeforeDurable,
    /// A change does not wait for the region's bit.
    IntentNotAwaited,
    /// A line is filled before the bit of its region is durable, ahead of which it was changed.
    FillBeforeIntent,
    /// A change goes ahead of the bit though the durable map may still name its line.
    LeftIgnored,
    /// A change goes ahead of the bit though only the log's last batch says that its line has left.
    LastBatchBelieved,
    /// A region is called quiet though a change of it is under way.
    QuietTooEarly,
    /// A region is called quiet though a line of it is still being updated, behind the reply.
    QuietBehindReply,
    /// Changes do not wait for fetches and fills of their lines.
    ChangeIgnoresFill,
    /// A change does not wait for reads of its bytes that bring no line.
    ChangeIgnoresRead,
    /// Lines with something under way are evicted.
    BusyEvicted,
    /// Checksums are not compared.
    SumNotCompared,
    /// A write around leaves the cached copy.
    PartialWriteKeepsLine,
    /// Lines are recorded before they are durable.
    RecordBeforeData,
    /// Recovery does not look at the write-intent map.
    IntentsNotRead,
    /// A log that has lost its end to damage is taken for one that ended earlier.
    ShortLogBelieved,
    /// Bits are cleared before the log has what happened.
    ClearedBeforeLog,
    /// A range is granted while parts of it are under way.
    RangeNotAwaited,
    /// A segment is used again before the durable map knows that it is empty.
    SegmentReusedEarly,
    /// A segment is used again while it is read.
    SegmentReusedWhileRead,
    /// A change does not wait for the copy of its line, which is published behind it.
    CopyIgnoresChange,
    /// What the cleaner copied is taken for right, whatever it read.
    CopyNotVerified,
    /// A line that is overwritten in part is taken for right as it was read.
    MergeNotVerified,
    /// A change of a line that another overwrites in part is not laid over it too.
    MergeNotJoined,
    /// Changes that share bytes do not wait for one another.
    ChangesRace,
    /// The same once the cache was given up.
    ChangesRaceWithoutCache,
    /// The old copy of a line that moved stays in the durable map.
    OldCopyNotRecorded,
    /// A part begins in a void region whose lines are still in the map.
    VoidLinesUsed,
    /// What is void is forgotten when the process is killed.
    VoidNotNoted,
    /// A void region is called quiet.
    QuietWhileVoid,
    /// What became void behind the sweep counts as swept.
    SweptAnew,
    /// The space of a line is given back before the durable map has forgotten it.
    HoleBeforeDurable,
    /// The space of a line is given back when its slot may be written again.
    HoleTooLate,
    /// A page of the table leaves memory though the device's copy differs.
    FrameTakenDirty,
    /// A page of the table that was dropped as a whole comes back as the device has it.
    VoidForgotten,
    /// A change does not wait for the fetch of a line that is only read ahead.
    AheadNotAwaited,
    /// What lies behind the end of a volume is read ahead.
    AheadPastEnd,
    /// A line that may have a free slot only takes another one's.
    IfFreeDisplaces,
    /// What the operator has said something else of is read ahead.
    AheadIgnoresRule,
    /// A cache that is taken back has the lines that it had when it was given up.
    TakenBackWithLines,
    /// A cache is taken back though what was changed under it is not durable in the stores.
    TakenBackStoresBelieved,
    /// The note that a cache must not be used goes before it is known whether it can be taken back.
    TakenBackForgottenEarly,
    /// Memory is owned before the maps in it are empty, when a cache is taken back.
    TakenBackOwnedEarly,
    /// What a store may have forgotten is cached on.
    UnflushedTrusted,
    /// A flush that was wanted before a region was changed again is taken to cover that change.
    FlushCoversLater,
    /// A start believes memory of a run that another has followed.
    MemoryOfAnotherRun,
    /// Lines of a volume are used though its store is not as it was.
    ChangedStoreBelieved,
    /// A volume that comes gets the place of one that was put aside.
    AddressGivenTwice,
    /// The note that a cache must not be used goes before its device has an empty map.
    NoteForgottenEarly,
    /// A volume is forgotten, and its lines are not.
    ForgetLeavesLines,
    /// Who attaches a volume is answered before the superblock has it.
    AnsweredBeforeRecord,
    /// Who lets a volume grow is answered before the superblock has it.
    GrownBeforeRecord,
    /// The lines of a volume that moves stay where they lay.
    MoveLeavesLines,
    /// The durable map goes on to name lines where a volume lay that has moved.
    MovedNotAnew,
    /// The superblock says whose a stretch is before the durable table has forgotten who had it.
    SuperblockBeforeTable,
    /// A volume moves while its clients' operations are under way.
    MovedUnderClients,
    /// A start takes stores for durable, whatever an earlier run has written to them.
    StartBelievesStores,
    /// A start that the device fails goes on without the cache, and does not note it.
    GivenUpNotNoted,
    /// A start whose device is not there goes on without the cache, and does not note it.
    PassedByNotNoted,
    /// Changes go on without bits before it is noted that the cache was given up.
    GivenUpBeforeNoted,
    /// The map on the device stays valid when the cache is given up.
    GivenUpValid,
    /// The bit of a region goes before the flush of its store that covers it has ended.
    ClearedBeforeFlush,
    /// A clean stop does not wait for fills that are under way.
    StopLeavesFills,
    /// A volume is put aside as durable at a clean stop though its store is not.
    StopBelievesStores,
    /// A flush of a store counts as if it had begun when it ended.
    FlushNumberedLate,
    /// A flush counts though its store may have lost writes that are in the cache still.
    LossNotAwaited,
    /// A flush counts though what a start must know of its store is not durable.
    NotesNotAwaited,
    /// The memory of the maps stays the run's when the cache is given up.
    GivenUpOwned,
    /// The superblock on the device keeps its volumes when the cache is given up, and counts as if it did not.
    GivenUpOnDevice,
    /// Lines that are moved are not charged to the write budget.
    CopyNotCharged,
    /// A line that is overwritten in part is not charged to the write budget.
    MergeNotCharged,
    /// A queue writes lines before the write budget's file says that they are.
    WriteNotAwaited,
    /// What is destaged goes past the slots: a line of before is found there again when the log is let go.
    DestagedPastSlots,
    /// `twoqueues`: what is destaged waits for changes of its bytes that wait for the log.
    DestageWaitsForLog,
    /// `fillbehind`: a line that is destaged is filled with a newer record's bytes.
    NewerRecordFilled,
    /// What the log has of a range is not known to a status: the store's holes are reported.
    DirtyCalledHole,
}

impl Planted {
    /// Those that show where a volume writes back alone.
    pub const OF_WRITE_BACK: &[Planted] = &[
        Planted::DestagedPastSlots,
        Planted::DestageWaitsForLog,
        Planted::NewerRecordFilled,
        Planted::DirtyCalledHole,
    ];
}

/// The fault that is planted in what is called with it; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    #[cfg(feature = "planted")]
    is: Option<Planted>,
}

impl Fault {
    /// This one, if any.
    #[cfg(feature = "planted")]
    pub fn of(is: Option<Planted>) -> Fault {
        Fault { is }
    }

    #[cfg(feature = "planted")]
    pub(super) fn is(self, fault: Planted) -> bool {
        self.is == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    #[inline(always)]
    pub(super) fn is(self, _: Planted) -> bool {
        false
    }
}

impl super::BlockShard {
    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
        self.map.plant(fault);
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

impl super::MapLog {
    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
    }

    /// Plants a fault, if there is one.
    #[cfg(feature = "planted")]
    pub(super) fn plant_any(&mut self, Fault { is }: Fault) {
        self.fault = is;
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
