//! Faults planted on purpose: each is a rule of the write-back design left out, and the crash model must catch it. Without the feature
//! `planted` none can be, and every question is the constant `false`.
//!
//! The design plans 59 faults. Here is each, and what is planted for it. Those marked ¹ are of the block engine (`../planted.rs`): they are planted
//! in queues, shards and the map's log. Where one fault of ours stands for several rules, one step of a machine keeps them all.
//!
//! | the design's | planted |
//! | --- | --- |
//! | **log** | |
//! | `ackorder` | `AnsweredOutOfOrder` |
//! | `visible` | `ShownBeforeAnswered` |
//! | `flushlog` | `FlushNotAwaited`, `FlushBegunBefore`, `MarkNotAwaited` |
//! | `startflush` | `StartNotFlushed` |
//! | `prefix` | `TailGoesOn` |
//! | `run` | `RunIgnored` |
//! | `damage` | `HoleIsEnd` |
//! | `gap` | `GapIgnored` |
//! | `bad` | `SkippedForgotten` |
//! | `fifo` | `RetiredInAnyOrder` |
//! | `oldest` | `OldestIgnored` |
//! | `repeat` | `FrontierNotRepeated` |
//! | `saidfree` | `FreedBeforeSaid`; of a footer's segment `FooterNotPinned` |
//! | `parked` | `CopyNotAwaited`, `CopyForgotten` |
//! | `reserve` | `NoReserve` |
//! | `number` | `SequencesRestarted` |
//! | `parkbad` | `DamageParkedAsData` |
//! | a segment is reused while it is read | `PinsIgnored` |
//! | **destage** | |
//! | `wal` | `DestagedBeforeDurable` |
//! | `dep` | `DependencyIgnored` |
//! | `global`, `depnow` | `DependencyStale`: the log is not told who asks |
//! | `barrier` | `WindowNotFlushed`, in both grains of `ordered` |
//! | `free` | `WindowNotFlushed`, in `any`, which has no barrier; `OlderFrontierCounts` |
//! | `frontier` | `FrontierNotNoted` |
//! | `rewrite` | `LostNotRewritten` |
//! | `lives` | `LivesIgnored` |
//! | `coalesce` | `CoalescedAcross` |
//! | `twoqueues` | `DestageWaitsForLog`¹ |
//! | `fillbehind` | `NewerRecordFilled`¹ |
//! | `dep` is forgotten after a kill | `DependencyForgotten` |
//! | a TRIM overtakes a write | `TrimOvertakes` |
//! | **journal** | |
//! | `jcommit` | `JournalNotFlushed` |
//! | `jsum` | `EpochSumsIgnored` |
//! | `jlast` | `EpochLastIgnored` |
//! | `jflush` | `JournalReadUnflushed` |
//! | `jafter` | `ReplayNotFlushed` |
//! | `jhome` | `WindowNotFlushed`, in `journaled` |
//! | `jstart` | `StartUnreplayed` |
//! | `jslots` | `ReplayedSlotsBelieved` |
//! | `atomic` | `NoJournal` |
//! | `cut` | `CutAnywhere` |
//! | **marker** | |
//! | `cachefirst` | `MarkerBeforeCache` |
//! | `markfirst` | `AnsweredBeforeMarker`; of its journal `JournalClaimedLate` |
//! | `drain` | `CleanBeforeDrained` |
//! | `gencheck` | `CacheBelieved` |
//! | `refuse` | `OthersDirtServed` |
//! | `fence` | `GenerationIgnored` |
//! | `recarry` | `TakenUpUnraised` |
//! | `takereplay` | `TakenUpUnreplayed` |
//! | `closed` | `ClosedUnmarked` |
//! | `closedslots` | `ClosedSlotsBelieved` |
//! | `cleanfirst` | `ThroughBeforeClean` |
//! | `setback` | `SetBackBelieved`, `RunRaisedUnseen` |
//! | `fresh`, in place of a look before each window | `OldLookCounts` |
//! | **beside** | |
//! | `through` | `ThroughAroundDirt`, in `ordered` |
//! | `around` | `ThroughAroundDirt`, in `any`: no order writes around what is dirty, so there is no rule about the durable frontier to leave out |
//! | a stale clean slot is uncovered when the log is let go | `DestagedPastSlots`¹ |
//! | a destage passes a fetch of its line | `ChangeIgnoresFill`¹ |
//! | BLOCK_STATUS calls a dirty range a hole | `DirtyCalledHole`¹ |
//!
//! The others are rules that were found later.

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
    /// `wal`: a record is destaged before it is durable on the cache.
    DestagedBeforeDurable,
    /// `dep`: a window holds records that depend on others in it.
    DependencyIgnored,
    /// The dependency is forgotten over a restart.
    DependencyForgotten,
    /// `ackorder`: a write is answered before one that was logged before it.
    AnsweredOutOfOrder,
    /// `visible`: a write is shown before it is answered.
    ShownBeforeAnswered,
    /// `barrier`, `free`, `jhome`: the store is not flushed before the log is let go and the next window or epoch begins.
    WindowNotFlushed,
    /// `frontier`: the log is let go, and the next window begins, before the log knows the frontier durably.
    FrontierNotNoted,
    /// `rewrite`: what a store may have lost is flushed once more, not written again.
    LostNotRewritten,
    /// `lives`: a flush counts though the store has lived anew since the window's first write.
    LivesIgnored,
    /// `jcommit`: writes in place begin before the journal is durable.
    JournalNotFlushed,
    /// `atomic`: an epoch is applied in place, without the journal.
    NoJournal,
    /// `cut`: an epoch ends anywhere.
    CutAnywhere,
    /// `flushlog`: a FLUSH is answered before its flush of the device.
    FlushNotAwaited,
    /// `flushlog`: a FLUSH is answered by one that began before its writes had ended.
    FlushBegunBefore,
    /// `startflush`: a start counts what it has read as durable, though it may be in the device's cache alone.
    StartNotFlushed,
    /// `depnow`, `global`: the dependency is that of an earlier moment. (The log is not told who asks: what one connection alone
    /// had heard of would be an earlier position of the volume too.)
    DependencyStale,
    /// A segment is used again while it is read.
    PinsIgnored,
    /// What the log lets go is what the last window noted, though the FRONTIER says less.
    OlderFrontierCounts,
    /// `saidfree`: a segment is used again before a durable FRONTIER says that it is free.
    FreedBeforeSaid,
    /// `reserve`: client writes leave no segment for FRONTIERs and parking.
    NoReserve,
    /// `fifo`: segments retire in any order.
    RetiredInAnyOrder,
    /// `repeat`: a segment does not begin with a FRONTIER.
    FrontierNotRepeated,
    /// `parked`: an original is let go before its parked copy is durable.
    CopyNotAwaited,
    /// `parked`: a copy that is written while the device is flushed is not flushed afterwards, so that it lets nothing go.
    CopyForgotten,
    /// `parkbad`: a record that cannot be read is parked as if it could be.
    DamageParkedAsData,
    /// `oldest`: a start begins the chain at whatever is the oldest that it finds.
    OldestIgnored,
    /// `closed`: a FLUSH is answered, and a window over, though the marker of a failed log does not say that the store has it.
    ClosedUnmarked,
    /// `closedslots`: a start that finds a failed log believes the slots of its volumes.
    ClosedSlotsBelieved,
    /// `bad`: what was left out because it could not be read is forgotten.
    SkippedForgotten,
    /// `cachefirst`: an attach writes the marker before the cache's superblock.
    MarkerBeforeCache,
    /// `markfirst`: a write is answered before the marker is durable.
    AnsweredBeforeMarker,
    /// `drain`: a detach writes the marker clean before the store has everything.
    CleanBeforeDrained,
    /// `gencheck`: a cache that says it holds dirty data is believed under a clean marker.
    CacheBelieved,
    /// `gencheck`: dirty data of any generation counts.
    GenerationIgnored,
    /// `refuse`: a volume that another cache may hold more of is served.
    OthersDirtServed,
    /// `recarry`: a take-up does not raise the generation.
    TakenUpUnraised,
    /// `takereplay`: a take-up does not replay the journal.
    TakenUpUnreplayed,
    /// `cleanfirst`: a volume that changes over is written through before its marker is clean.
    ThroughBeforeClean,
    /// `through`, `around`: a write goes to the store for want of budget while its volume has something dirty.
    ThroughAroundDirt,
    /// `again`: a marker that could not be written is not written again before a volume that stays is answered.
    FailedMarkForgotten,
    /// `setback`: a marker that was set back is believed.
    SetBackBelieved,
    /// `runkept`: a start that does not see the marker raises the run by which it is judged later.
    RunRaisedUnseen,
    /// `samevolume`: a marker of another volume of this cache is believed.
    OtherVolumeServed,
    /// `samestore`: a marker that lies beside another store than its own is believed.
    OtherStoreServed,
    /// A footer is written before what it speaks of is durable.
    FooterBeforePayload,
    /// A segment is used again while its footer is written.
    FooterNotPinned,
    /// `flushlog`: a mark is answered before it is durable.
    MarkNotAwaited,
    /// A write is answered though the oldest that is dirty is older than it may be.
    AgeIgnored,
    /// `damage`: the log ends where a batch is missing that is known durable.
    HoleIsEnd,
    /// `prefix`: batches behind the first of the tail that is missing, torn, or follows another count.
    TailGoesOn,
    /// `run`: batches of a run that began again before them count.
    RunIgnored,
    /// `number`: the sequences of a volume that is taken up begin again.
    SequencesRestarted,
    /// `coalesce`: what a later window overwrites is left out of one before.
    CoalescedAcross,
    /// A TRIM overtakes a write: it comes to the store before writes of its window, or of one before, that were answered before it.
    TrimOvertakes,
    /// `gap`: a volume whose sequences do not run on across lost batches is served.
    GapIgnored,
    /// `jsum`: an epoch counts though its commit's hash or the checksums of its data do not hold.
    EpochSumsIgnored,
    /// `jlast`: a start does not take the last sequence of the epoch that it replays as the frontier.
    EpochLastIgnored,
    /// `jflush`: a journal is replayed that may be in the memory of a server alone.
    JournalReadUnflushed,
    /// `jafter`: what was replayed is not flushed before the journal is given up.
    ReplayNotFlushed,
    /// `jstart`: a start does not replay the journal before it is used again.
    StartUnreplayed,
    /// `jslots`: a start that replays believes the slots under what it replays.
    ReplayedSlotsBelieved,
    /// A marker says that a volume is dirty before its journal says whose it is.
    JournalClaimedLate,
    /// A store is recovered from a journal that is torn as from one that is whole.
    TornJournalBelieved,
    /// What is known of a torn journal is forgotten when it is used again.
    DoubtForgotten,
    /// A journal is written that is another cache's, or another attachment's, by now.
    OthersJournalWritten,
    /// `fresh`: a window or epoch begins however long ago the marker was looked at.
    OldLookCounts,
    /// What the log asks of its device when somebody calls it who carries nothing out is dropped.
    OperatorsAsksDropped,
}

/// A fault, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    #[cfg(feature = "planted")]
    is: Option<Planted>,
}

impl Fault {
    /// Whether faults can be planted in this build.
    pub const POSSIBLE: bool = cfg!(feature = "planted");

    /// This one, if any.
    #[cfg(feature = "planted")]
    pub fn of(is: Option<Planted>) -> Fault {
        Fault { is }
    }

    /// None: this build has no faults.
    #[cfg(not(feature = "planted"))]
    pub fn of(_: Option<Planted>) -> Fault {
        Fault::default()
    }

    /// Whether it is this one.
    #[cfg(feature = "planted")]
    pub fn is(self, fault: Planted) -> bool {
        self.is == Some(fault)
    }

    /// Never.
    #[cfg(not(feature = "planted"))]
    #[inline(always)]
    pub fn is(self, _: Planted) -> bool {
        false
    }
}
