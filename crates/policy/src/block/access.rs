//! What passes by: accesses, lines, candidates and verdicts.

use larder_base::Nanos;

/// A volume, as the daemon numbers it. Stable while the volume is attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub u32);

/// What a request does to a range of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockOp {
    /// Reads it.
    Read,
    /// Writes it.
    Write,
}

/// What a range of a volume holds, as far as that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BlockKind {
    /// Contents of files.
    Data,
    /// A file system's metadata: tagged by a library call, or [detected](super::detect).
    Metadata,
    /// A file system's journal or log: metadata that is written often and hardly ever read, so it has no preference.
    Journal,
    /// Nobody said. Treated as data.
    #[default]
    Unknown,
}

/// A line of a volume: the unit in which the cache keeps data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LineId {
    /// Whose.
    pub volume: VolumeId,
    /// Its first byte in the volume: a multiple of the line size.
    pub offset: u64,
}

/// One request of a client, before the cache is asked.
#[derive(Clone, Copy, Debug)]
pub struct BlockAccess {
    /// On which volume.
    pub volume: VolumeId,
    /// First byte.
    pub offset: u64,
    /// How many bytes.
    pub bytes: u64,
    /// Read or write.
    pub op: BlockOp,
    /// What it holds.
    pub kind: BlockKind,
    /// When.
    pub now: Nanos,
}

impl BlockAccess {
    /// The byte after the last.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }
}

/// What admission found out about an access while it passed by. To be kept with the access and given back with each
/// [`BlockCandidate`] that comes of it, however much later and in whatever order: nothing else ties them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Bytes of the volume that are part of a sequential stream and beyond its admitted length; empty if start = end.
    pub(super) sequential: (u64, u64),
    pub(super) hints: Hints,
}

/// What an access was like, as far as that tells something of each of its lines: how far into a sequential run it lies, and how long
/// it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints(u8);

impl Hints {
    /// Lengths that are told apart.
    pub(super) const LENGTHS: usize = 3;
    /// Places in a run that are told apart: in none, in its first MiB, in the seven behind it, beyond.
    pub(super) const RUNS: usize = 4;
    const RUN_BITS: u32 = 2;
    /// The greatest [`number`](Self::number).
    pub const MOST: u8 = ((Hints::LENGTHS as u8 - 1) << Hints::RUN_BITS) | (Hints::RUNS as u8 - 1);

    /// Of an access of so many lines that ends so many bytes from where its run began, if it belongs to one.
    pub(super) fn new(into_run: Option<u64>, lines: u64) -> Hints {
        let run = match into_run {
            None => 0,
            Some(0..0x10_0000) => 1,
            Some(0x10_0000..0x80_0000) => 2,
            Some(_) => 3,
        };
        let length = match lines {
            0..=1 => 0,
            2..=15 => 1,
            _ => 2,
        };
        Hints(run | length << Hints::RUN_BITS)
    }

    /// Of a number that [`number`](Self::number) gave, for records; the nearest of one that it does not give.
    pub fn of_number(number: u8) -> Hints {
        Hints(number.min(Hints::MOST))
    }

    /// As a number, for records.
    pub fn number(self) -> u8 {
        self.0
    }

    pub(super) fn run(self) -> usize {
        usize::from(self.0) % Hints::RUNS
    }

    pub(super) fn length(self) -> usize {
        usize::from(self.0 >> Hints::RUN_BITS)
    }
}

impl Observed {
    /// Whether any of the access's bytes is refused for being part of a sequential stream.
    pub fn is_sequential(&self) -> bool {
        self.sequential.0 < self.sequential.1
    }

    /// The bytes of the volume that are refused, first and end; both equal if none are. With [`of`](Self::of), for records
    /// of what was decided.
    pub fn sequential(&self) -> (u64, u64) {
        self.sequential
    }

    /// What the access was like. With [`of`](Self::of), for records of what was decided.
    pub fn hints(&self) -> Hints {
        self.hints
    }

    /// What [`sequential`](Self::sequential) and [`hints`](Self::hints) said of it.
    pub fn of(sequential: (u64, u64), hints: Hints) -> Observed {
        Observed { sequential, hints }
    }

    pub(super) fn refuses(&self, start: u64, bytes: u64) -> bool {
        start < self.sequential.1 && self.sequential.0 < start.saturating_add(bytes)
    }
}

/// The line that would have to leave the cache.
#[derive(Clone, Copy, Debug)]
pub struct Victim {
    /// Which.
    pub line: LineId,
    /// What it holds.
    pub kind: BlockKind,
}

/// A line that is not cached and could be.
#[derive(Clone, Copy, Debug)]
pub struct BlockCandidate {
    /// Which.
    pub line: LineId,
    /// What brought it: a miss, or a write that would allocate.
    pub op: BlockOp,
    /// What it holds.
    pub kind: BlockKind,
    /// What [`BlockAdmission::observe`](super::BlockAdmission::observe) said of the access.
    pub observed: Observed,
    /// What it would displace; `None` while there is a free slot.
    pub victim: Option<Victim>,
}

/// Whether a line goes to flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Yes.
    Admit,
    /// Into a slot that is free, or not at all: nothing leaves for it.
    IfFree,
    /// No, and why.
    Reject(Reason),
}

impl Verdict {
    /// Whether it goes to flash, whatever that displaces.
    pub fn is_admit(self) -> bool {
        self == Verdict::Admit
    }
}

/// Why a line does not go to flash. The first five are found by admission, the others by who asks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Part of a sequential stream (`seqr`, `sseqr`).
    Sequential,
    /// Its segment was touched too few times (`touch_count`).
    FewTouches,
    /// Accessed no more often than the line it would displace (`two_lbs`).
    NotHotter,
    /// Data that would displace metadata (`two_lbs`).
    MetadataVictim,
    /// Too few reads are expected of it (`expected_reads`).
    FewReads,
    /// The range is selected never to be cached.
    Never,
    /// The write budget is spent.
    Budget,
    /// Its volume has all that it may have.
    Ceiling,
    /// Too many fills are under way: dropped under pressure.
    Pressure,
    /// Every slot that could take it is pinned or in use.
    NoSlot,
    /// The volume is in pass-through.
    PassThrough,
    /// The file system under the cache is full.
    NoSpace,
}

impl Reason {
    /// Every reason, in the order of their declaration.
    pub const ALL: [Reason; 12] = [
        Reason::Sequential,
        Reason::FewTouches,
        Reason::NotHotter,
        Reason::MetadataVictim,
        Reason::FewReads,
        Reason::Never,
        Reason::Budget,
        Reason::Ceiling,
        Reason::Pressure,
        Reason::NoSlot,
        Reason::PassThrough,
        Reason::NoSpace,
    ];

    /// The reason as statistics name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Sequential => "sequential",
            Reason::FewTouches => "few_touches",
            Reason::NotHotter => "not_hotter",
            Reason::MetadataVictim => "metadata_victim",
            Reason::FewReads => "few_reads",
            Reason::Never => "never",
            Reason::Budget => "budget",
            Reason::Ceiling => "ceiling",
            Reason::Pressure => "pressure",
            Reason::NoSlot => "no_slot",
            Reason::PassThrough => "pass_through",
            Reason::NoSpace => "no_space",
        }
    }

    /// The reason as a sentence for people, as `explain` prints it.
    pub fn describe(self) -> &'static str {
        match self {
            Reason::Sequential => "part of a sequential stream",
            Reason::FewTouches => "its segment was touched too few times",
            Reason::NotHotter => "accessed no more often than the line it would displace",
            Reason::MetadataVictim => "data that would displace metadata",
            Reason::FewReads => "too few reads are expected of it for what is written",
            Reason::Never => "selected never to be cached",
            Reason::Budget => "the drive's write budget is spent",
            Reason::Ceiling => "the volume has all of the cache that it may have",
            Reason::Pressure => "too many fills were under way",
            Reason::NoSlot => "every slot that could take it is pinned or in use",
            Reason::PassThrough => "the volume is in pass-through",
            Reason::NoSpace => "the file system under the cache is full",
        }
    }
}

/// How many lines were admitted, and rejected for what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerdictCounts {
    /// Admitted.
    pub admitted: u64,
    /// Those that may have a free slot and displace nothing. Whether there was one is known where slots are.
    pub if_free: u64,
    /// Rejected, in the order of [`Reason::ALL`].
    pub rejected: [u64; Reason::ALL.len()],
}

impl VerdictCounts {
    /// Counts one verdict.
    pub fn count(&mut self, verdict: Verdict) {
        match verdict {
            Verdict::Admit => self.admitted += 1,
            Verdict::IfFree => self.if_free += 1,
            Verdict::Reject(reason) => self.rejected[reason as usize] += 1,
        }
    }

    /// Rejected for `reason`.
    pub fn rejected(&self, reason: Reason) -> u64 {
        self.rejected[reason as usize]
    }

    /// Adds another policy's.
    pub fn add(&mut self, other: &VerdictCounts) {
        self.admitted += other.admitted;
        self.if_free += other.if_free;
        for (sum, more) in self.rejected.iter_mut().zip(other.rejected) {
            *sum += more;
        }
    }
}

/// A well-mixed 64-bit hash of a place in a volume (the finalizer of MurmurHash3 over both parts).
pub(super) fn mix(seed: u64, volume: VolumeId, place: u64) -> u64 {
    let mut h =
        place ^ seed ^ u64::from(volume.0).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    h = (h ^ (h >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    h = (h ^ (h >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_in_order_and_named_apart() {
        let mut counts = VerdictCounts::default();
        for (place, reason) in Reason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, place);
            for _ in 0..=place {
                counts.count(Verdict::Reject(reason));
            }
            assert_eq!(counts.rejected(reason), place as u64 + 1);
        }
        counts.count(Verdict::Admit);
        counts.count(Verdict::IfFree);
        assert_eq!((counts.admitted, counts.if_free), (1, 1));
        let mut names = Reason::ALL.map(Reason::as_str).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
    }

    #[test]
    fn an_observation_refuses_what_overlaps_it() {
        let nothing = Observed::default();
        assert!(!nothing.is_sequential() && !nothing.refuses(0, u64::MAX));
        let some = Observed::of((8192, 12288), Hints::default());
        assert!(some.is_sequential());
        assert!(!some.refuses(4096, 4096) && !some.refuses(12288, 4096));
        assert!(some.refuses(4096, 4097) && some.refuses(8192, 1));
    }
}
