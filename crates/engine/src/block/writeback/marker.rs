//! Who may serve a volume: the marker beside its store decides, the cache's own superblock is a hint.
//!
//! The marker says which cache may hold data that the store lacks, and under which generation G of the volume. G rises with every attach
//! and take-up, so that dirty data of an older one, or of a copy, is void [gencheck, fence, recarry]. Its number rises at each write: a
//! marker with a lower number than the cache knows, or of a later run than the cache's last that had the volume, was set back, or the cache was
//! [setback, runkept]. It is of one volume, beside one store: a cache whose dirty data is of another is refused [samevolume, samestore].
//!
//! Each operation is a list of steps, each durable before the next; a crash behind any of them leaves a state that [`judge`] goes on from. Which
//! step comes next, and what a step that fails leaves to be done, says [`Holder`](super::holder::Holder).
//!
//! | operation | steps |
//! | --- | --- |
//! | attach | the cache is open(G+1) [cachefirst]; the marker is dirty(G+1); the store is flushed; writes are answered [markfirst] |
//! | go on | a journal of G is replayed; the marker is dirty(G) once more, by the new run; writes are answered |
//! | drain | lines are dropped [closedslots]; the store is flushed; a journal of G is replayed; the cache has its run; the log is destaged, and the marker says so |
//! | detach | everything is destaged [drain]; the store is flushed; the cache is clean(G); the marker is clean(G) |
//! | through | what was dirty is destaged; clients wait; as detach; writes go to the store [cleanfirst]; clients go on |
//! | back | clients wait; the store is flushed; as attach; clients go on |
//! | again | the marker is dirty(G), the cache is open(G); changes are logged again |
//! | carry | no window is under way; the log is flushed; the cache is carried(G); the marker is carried(G) |
//! | take up | the cache is open(G+1, keeps G); a journal of G is replayed and the store flushed [takereplay]; the marker is dirty(G+1); the cache is open(G+1) |
//! | recover | the journal is replayed and the store flushed; the marker is clean(G+1); the journal is emptied |
//!
//! Rules in brackets are those of `models/write_back.py`, whose states the tests here walk through.

use larder_base::Nanos;
use larder_format::Uuid;

use super::planted::{Fault, Planted};

/// A dirty marker says how far the store of its volume is, as of so long ago at most: that is what a recovery can tell of a cache that is lost.
pub const REFRESH: Nanos = Nanos::from_secs(10);
/// Marker and journal are looked at so often while their volume is served.
pub const LOOK: Nanos = Nanos::from_secs(1);
/// Who does not answer for so long is away: the place of a marker, asked once (a write makes two copies durable, one after the other), and at a stop the store of
/// a volume of which nothing is dirty. (How long clients are [held](super::holder::HELD) is another matter: there is something to be destaged meanwhile.)
pub const ANSWERS: Nanos = Nanos::from_secs(10);
/// Numbers and generations of a recovery go on so far behind what its marker says where that was set back: behind all that a cache may know of them.
pub const AHEAD: u64 = 1 << 32;
/// They begin behind this where nothing is known of them.
pub const UNKNOWN: u64 = 1 << 40;

/// Number and generation that a recovery goes on from where there is no marker; `seconds` since the Unix epoch have it rise with each that is lost.
pub fn unknown(seconds: u64) -> u64 {
    UNKNOWN + seconds
}

/// What a marker says of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mark {
    /// The store has everything.
    Clean,
    /// This cache may hold more.
    Dirty(Uuid),
    /// This cache may hold more, and was put aside.
    Carried(Uuid),
    /// The log of this cache has failed, and is destaged from memory.
    Closing(Uuid),
    /// The same, and the store has all up to the marker's frontier.
    Closed(Uuid),
}

/// A marker, as a start reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Marker {
    /// What it says.
    pub mark: Mark,
    /// The volume's generation.
    pub generation: u64,
    /// Its number.
    pub number: u64,
    /// The run of the cache that wrote it last.
    pub run: u64,
    /// The volume that it is of, and its attachment on the cache. `None`: a recovery made it where nothing was known of the volume any more.
    pub of: Option<(Uuid, u32)>,
    /// It was written beside another store than that which is there now.
    pub moved: bool,
}

/// What reading a marker came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// It is there.
    There(Marker),
    /// There is none. `was`: an attribute of the store, or its identity, says that there was one.
    Absent {
        /// Whether that is so.
        was: bool,
    },
    /// Both copies are damaged.
    Damaged,
    /// The store, or the place of the marker, does not answer.
    Unreachable,
}

/// What this cache's superblock says of the volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holds {
    /// It knows nothing of it.
    #[default]
    Nothing,
    /// Nothing dirty, since this generation was detached.
    Clean(u64),
    /// Dirty data of this generation, perhaps.
    Open(u64),
    /// The same, while a volume is taken up that was carried: what the former generation left counts until the marker has the new one.
    TakingUp(u64),
    /// Dirty data that was put aside.
    Carried(u64),
}

impl Holds {
    /// Whether the log may hold data that the store lacks.
    pub fn may_be_dirty(self) -> bool {
        matches!(self, Holds::Open(_) | Holds::TakingUp(_) | Holds::Carried(_))
    }
}

/// This cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Its UUID.
    pub uuid: Uuid,
    /// The run that had the volume last ([`cache_of`](super::holder::cache_of)).
    pub run: u64,
    /// What it holds of the volume.
    pub holds: Holds,
    /// The number of the volume's marker that it last knew durable.
    pub known: u64,
    /// The volume that it knows by this name, and its attachment.
    pub of: Option<(Uuid, u32)>,
}

/// What a start does with a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is attached, with this generation. `lines`: the cache's clean lines of it may be believed; else all that the cache holds of it is
    /// void.
    Attach {
        /// Its generation.
        generation: u64,
        /// Whether that is so.
        lines: bool,
    },
    /// It is served with what the log holds.
    GoOn,
    /// The same, and the log stays closed: its slots are dropped, and what it holds is drained.
    Drain,
    /// The cache was put aside and is taken up, with this generation.
    TakeUp {
        /// Its generation.
        generation: u64,
    },
    /// A detach was cut short behind the cache's part: the marker is written clean, then it is attached.
    Tidy,
    /// It is neither read nor written before the marker is read.
    Wait,
    /// It is refused.
    Refuse(Why),
}

impl Verdict {
    /// Whether the cache's lines of the volume may be believed. Of a log that has failed none may: what it destaged since it gave the slots up is not
    /// known [closedslots].
    pub fn keeps_lines(self, fault: Fault) -> bool {
        match self {
            Verdict::Attach { lines, .. } => lines,
            Verdict::Drain => fault.is(Planted::ClosedSlotsBelieved),
            _ => true,
        }
    }
}

/// Why a volume is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// A cache may hold more than the store, and it is not this one: it is to be served with that one, or recovered.
    Elsewhere(Uuid),
    /// This cache is named, and does not hold what the marker speaks of: it is to be recovered.
    Lost,
    /// The cache holds dirty data, and nothing at the store says that it counts.
    NoMarker,
    /// There was a marker, and it is gone or damaged.
    MarkerLost,
    /// The marker was set back, or the cache was.
    SetBack,
    /// The marker is of another volume than that whose dirty data this cache has by this name: stores were swapped, or names.
    OtherVolume(Uuid),
    /// The store is another than that of which this cache has dirty data.
    OtherStore,
}

/// What a start with write-back does with a volume. The marker alone decides; nothing has been changed before.
///
/// Data is neither brought to a store that is not known to be its volume's [samevolume, samestore], nor given up because such a store says so.
pub fn judge(read: Read, cache: &Cache, fault: Fault) -> Verdict {
    let verdict = judge_of_one(read, cache, fault);
    let Read::There(marker) = read else { return verdict };
    let dirty = cache.holds.may_be_dirty();
    let own = matches!(marker.mark, Mark::Dirty(u) | Mark::Carried(u) | Mark::Closing(u) | Mark::Closed(u) if u == cache.uuid);
    let other = match (marker.of, cache.of) {
        (Some((there, _)), Some((here, _))) if there != here => Some(there),
        _ => None,
    };
    if let (Some(other), true) = (other, (dirty || own) && !fault.is(Planted::OtherVolumeServed)) {
        return match verdict {
            // What matters is what another cache has of it.
            Verdict::Refuse(Why::Elsewhere(_)) => verdict,
            _ => Verdict::Refuse(Why::OtherVolume(other)),
        };
    }
    let reattached = marker.of.zip(cache.of).is_some_and(|(there, here)| own && there.1 != here.1);
    match verdict {
        Verdict::Refuse(_) | Verdict::Wait => verdict,
        _ if reattached => Verdict::Refuse(Why::SetBack),
        _ if marker.moved && (dirty || own) && !fault.is(Planted::OtherStoreServed) => {
            Verdict::Refuse(Why::OtherStore)
        }
        Verdict::Attach { generation, lines } => {
            Verdict::Attach { generation, lines: lines && other.is_none() }
        }
        _ => verdict,
    }
}

/// Whether the store beside a marker may be recovered. What its journal has, if it was written through one (`journaled`), is laid over the store that the
/// marker is of, and over no other [samestore].
///
/// # Errors
/// [`Why::OtherStore`].
pub fn may_recover(marker: &Marker, journaled: bool) -> Result<(), Why> {
    let dirty = marker.mark != Mark::Clean;
    if marker.moved && dirty && journaled { Err(Why::OtherStore) } else { Ok(()) }
}

/// Without a marker this cache alone knows. `moved`: the store is another than that which it had.
pub fn unmarked(holds: Holds, moved: bool) -> Verdict {
    match holds {
        _ if moved && holds.may_be_dirty() => Verdict::Refuse(Why::OtherStore),
        Holds::Open(_) => Verdict::GoOn,
        Holds::Clean(g) => Verdict::Attach { generation: g + 1, lines: true },
        Holds::Nothing => Verdict::Attach { generation: 1, lines: true },
        Holds::Carried(g) => Verdict::TakeUp { generation: g + 1 },
        Holds::TakingUp(g) => Verdict::TakeUp { generation: g },
    }
}

/// The same, whichever volume and store the marker is of.
fn judge_of_one(read: Read, cache: &Cache, fault: Fault) -> Verdict {
    let dirty = cache.holds.may_be_dirty();
    let marker = match read {
        Read::There(marker) => marker,
        Read::Unreachable => return Verdict::Wait,
        Read::Absent { .. } | Read::Damaged if dirty => return Verdict::Refuse(Why::NoMarker),
        Read::Damaged | Read::Absent { was: true } => return Verdict::Refuse(Why::MarkerLost),
        Read::Absent { was: false } => return Verdict::Attach { generation: 1, lines: false },
    };
    let g = marker.generation;
    let set_back = match marker.mark {
        // Another cache's numbers and runs say nothing of this one.
        Mark::Clean => marker.number < cache.known,
        Mark::Dirty(u) | Mark::Carried(u) | Mark::Closing(u) | Mark::Closed(u) => {
            u == cache.uuid && (marker.number < cache.known || marker.run > cache.run)
        }
    };
    if set_back && !fault.is(Planted::SetBackBelieved) {
        return Verdict::Refuse(Why::SetBack);
    }
    let open = |of: u64| of == g || fault.is(Planted::GenerationIgnored);
    match marker.mark {
        Mark::Clean
            if fault.is(Planted::CacheBelieved) && matches!(cache.holds, Holds::Open(_)) =>
        {
            Verdict::GoOn
        }
        Mark::Clean => Verdict::Attach { generation: g + 1, lines: cache.holds == Holds::Clean(g) },
        Mark::Dirty(u) | Mark::Carried(u) | Mark::Closing(u) | Mark::Closed(u)
            if u != cache.uuid =>
        {
            match fault.is(Planted::OthersDirtServed) {
                true => Verdict::Attach { generation: g + 1, lines: false },
                false => Verdict::Refuse(Why::Elsewhere(u)),
            }
        }
        Mark::Dirty(_) => match cache.holds {
            Holds::Open(of) | Holds::TakingUp(of) if open(of) => Verdict::GoOn,
            // A carry that was cut short.
            Holds::Carried(of) if open(of) => Verdict::GoOn,
            Holds::Clean(of) if of == g => Verdict::Tidy,
            _ => Verdict::Refuse(Why::Lost),
        },
        Mark::Closing(_) | Mark::Closed(_) => match cache.holds {
            Holds::Open(of) | Holds::TakingUp(of) if open(of) => Verdict::Drain,
            Holds::Clean(of) if of == g => Verdict::Tidy,
            _ => Verdict::Refuse(Why::Lost),
        },
        Mark::Carried(_) => match cache.holds {
            Holds::Carried(of) if open(of) => Verdict::TakeUp { generation: g + 1 },
            // A take-up that was cut short.
            Holds::TakingUp(of) if of == g + 1 => Verdict::TakeUp { generation: g + 1 },
            _ => Verdict::Refuse(Why::Lost),
        },
    }
}

/// What a marker is to the holder of its volume that looks at it again while the volume is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// Its own.
    Own,
    /// It is gone, damaged, or an older one of this attachment or before it: it is written again.
    Lost,
    /// The store was recovered, or is another cache's or another run's: nothing may come to it any more.
    Others,
    /// It does not answer.
    Unknown,
}

/// Whether a marker may be one that was tried to be written, behind that of number `own`: this, or one before it that was on its way for long.
pub fn was_tried(there: &Marker, tried: &Marker, own: u64) -> bool {
    *there == Marker { number: there.number, ..*tried }
        && (own + 1..=tried.number).contains(&there.number)
}

/// What a marker is to the holder that wrote `own` last, and tried to write `tried` since. A cache that is lost would be missed by nobody without it, and
/// two that write to one store make an image that no volume ever was.
pub fn look_again(read: Read, own: &Marker, tried: Option<&Marker>) -> Again {
    let there = match read {
        // It says what does not hold any more, and nobody else has written it.
        Read::There(there)
            if there.mark != own.mark
                && tried.is_some_and(|t| was_tried(&there, t, own.number)) =>
        {
            return Again::Lost;
        }
        Read::There(there) => there,
        Read::Absent { .. } | Read::Damaged => return Again::Lost,
        Read::Unreachable => return Again::Unknown,
    };
    let of = |mark: Mark| match mark {
        Mark::Clean => None,
        Mark::Dirty(u) | Mark::Carried(u) | Mark::Closing(u) | Mark::Closed(u) => Some(u),
    };
    let is_later = (there.generation, there.run) > (own.generation, own.run);
    let volume = |marker: &Marker| marker.of.map(|(volume, _)| volume);
    if volume(&there).zip(volume(own)).is_some_and(|(there, own)| there != own) {
        return Again::Others;
    }
    match of(there.mark) {
        // One that could not be written may be there.
        Some(u) if Some(u) == of(own.mark) && !is_later => {
            let same = (there.generation, there.run) == (own.generation, own.run);
            if same && there.number >= own.number { Again::Own } else { Again::Lost }
        }
        None if there.generation < own.generation => Again::Lost,
        _ => Again::Others,
    }
}

/// A step of an operation; each is durable before the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The marker is read.
    Read,
    /// Clients' operations on the volume end, and new ones wait.
    Hold,
    /// They go on.
    Release,
    /// Lines of the volume that are cached are dropped: what they hold is not what the store holds, or will be.
    DropLines,
    /// What was dirty when this began is destaged, while clients go on.
    DestageMost,
    /// Everything is destaged.
    Destage,
    /// No window or epoch begins any more, and that under way ends, or stands because the store fails.
    Settle,
    /// The log is flushed.
    FlushLog,
    /// The store is flushed.
    FlushStore,
    /// A committed journal of this generation is replayed, and the store flushed; that it was applied is durable with the next marker.
    Replay(u64),
    /// The cache's superblock says this of the volume.
    Holds(Holds),
    /// The marker says this.
    Mark(Mark, u64),
    /// The log has the volume, and writes are answered from here on.
    Answer,
    /// The log has the volume, and shows what is dirty of it to who reads. Nothing is answered, nor destaged.
    Show,
    /// The log has the volume no more: writes are answered when the store has them.
    Through,
    /// The volume is gone; the log keeps what it has of it.
    Aside,
    /// The volume is destaged again: it stays.
    Resume,
    /// Nothing is logged any more.
    CloseLog,
    /// No change of the volume is logged: it is refused. Its marker may say that nothing is dirty.
    Refuse,
    /// Its changes are logged again.
    Accept,
    /// The journal holds nothing any more.
    EmptyJournal,
}

impl Step {
    /// A volume that comes has come, but for this.
    pub fn is_last(self) -> bool {
        matches!(self, Step::Show | Step::Through | Step::Release)
    }
}

/// The steps of an attach as generation `g`.
pub fn attach(cache: Uuid, g: u64, fault: Fault) -> Vec<Step> {
    let mut steps = vec![
        Step::Holds(Holds::Open(g)),
        Step::Mark(Mark::Dirty(cache), g),
        Step::FlushStore,
        Step::Answer,
    ];
    if fault.is(Planted::MarkerBeforeCache) {
        steps.swap(0, 1);
    }
    if fault.is(Planted::AnsweredBeforeMarker) {
        steps.insert(1, Step::Answer);
    }
    steps
}

/// A journal of generation `g` is replayed: lines under it are older than what it brings [jslots].
fn replay(g: u64, fault: Fault) -> Vec<Step> {
    let mut steps = vec![Step::DropLines, Step::Replay(g)];
    if fault.is(Planted::ReplayedSlotsBelieved) {
        steps.remove(0);
    }
    if fault.is(Planted::StartUnreplayed) {
        steps.pop();
    }
    steps
}

/// The steps by which a volume of generation `g` goes on with what the log has of it. The marker has the cache's new run before anything is
/// answered: else a cache that is set back to before it would be believed [setback].
pub fn go_on(cache: Uuid, g: u64, journaled: bool, fault: Fault) -> Vec<Step> {
    let mut steps = Vec::new();
    if journaled {
        steps.extend(replay(g, fault));
    }
    steps.extend([Step::Holds(Holds::Open(g)), Step::Mark(Mark::Dirty(cache), g), Step::Answer]);
    steps
}

/// The steps by which a volume of generation `g` is served whose log has failed. What came to the store from memory, and is in no log, is durable before
/// anybody sees it. The cache has its run, if its device can still be written, before the marker has it; the marker says already what is so.
pub fn drain(g: u64, journaled: bool, fault: Fault) -> Vec<Step> {
    let mut steps = vec![Step::FlushStore];
    if journaled {
        steps.extend(replay(g, fault));
    }
    steps.extend([Step::Holds(Holds::Open(g)), Step::Answer]);
    steps
}

/// The steps of a detach of generation `g`.
pub fn detach(g: u64, fault: Fault) -> Vec<Step> {
    let mut steps = vec![
        Step::Destage,
        Step::FlushStore,
        Step::Holds(Holds::Clean(g)),
        Step::Mark(Mark::Clean, g),
    ];
    if fault.is(Planted::CleanBeforeDrained) {
        steps.rotate_right(1);
    }
    steps.push(Step::Through);
    steps
}

/// The steps by which a volume of generation `g` stays whose marker could not be written twice when it went: whatever that says, it says again that
/// the volume writes back, and then changes are logged.
pub fn again(cache: Uuid, g: u64) -> Vec<Step> {
    vec![Step::Mark(Mark::Dirty(cache), g), Step::Holds(Holds::Open(g)), Step::Accept]
}

/// The steps by which a volume of generation `g` is put aside with what is dirty.
pub fn carry(cache: Uuid, g: u64) -> Vec<Step> {
    vec![
        Step::Settle,
        Step::FlushLog,
        Step::Holds(Holds::Carried(g)),
        Step::Mark(Mark::Carried(cache), g),
        Step::Aside,
    ]
}

/// The steps by which a volume that was put aside is taken up as generation `g`.
pub fn take_up(cache: Uuid, g: u64, journaled: bool, fault: Fault) -> Vec<Step> {
    // A copy of the cache that was made meanwhile is void.
    let marked = if fault.is(Planted::TakenUpUnraised) { g - 1 } else { g };
    let holds =
        if fault.is(Planted::TakenUpUnraised) { Holds::Open(g - 1) } else { Holds::TakingUp(g) };
    let mut steps = vec![Step::Holds(holds)];
    if journaled && !fault.is(Planted::TakenUpUnreplayed) {
        steps.extend(replay(g - 1, fault));
    }
    steps.extend([
        Step::FlushStore,
        Step::Mark(Mark::Dirty(cache), marked),
        Step::Holds(Holds::Open(marked)),
        Step::Answer,
    ]);
    steps
}

/// The steps by which a volume of generation `g` is recovered without its cache.
pub fn recover(g: u64) -> Vec<Step> {
    vec![Step::Replay(g), Step::Mark(Mark::Clean, g + 1), Step::EmptyJournal]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_was_tried_if_it_is_behind_the_last_known_one_and_no_later_than_the_last_try() {
        let me = Uuid([1; 16]);
        let of = Some((Uuid([9; 16]), 1));
        let tried =
            Marker { mark: Mark::Clean, generation: 5, number: 9, run: 3, of, moved: false };
        let numbers = (0..12).filter(|&number| was_tried(&Marker { number, ..tried }, &tried, 6));
        assert_eq!(numbers.collect::<Vec<u64>>(), [7, 8, 9]);
        // What else it says is what was to be said.
        let others = [
            Marker { mark: Mark::Carried(me), ..tried },
            Marker { generation: 6, ..tried },
            Marker { run: 4, ..tried },
            Marker { of: None, ..tried },
        ];
        assert!(!others.iter().any(|there| was_tried(there, &tried, 6)));
    }

    #[test]
    fn a_holder_knows_its_marker_a_lost_one_and_another_holders() {
        let (me, other) = (Uuid([1; 16]), Uuid([2; 16]));
        let of = Some((Uuid([9; 16]), 1));
        let own =
            Marker { mark: Mark::Dirty(me), generation: 5, number: 9, run: 3, of, moved: false };
        let again = |there: Marker| look_again(Read::There(there), &own, None);
        assert_eq!(again(own), Again::Own);
        // A write that failed may be there all the same.
        assert_eq!(again(Marker { number: 10, ..own }), Again::Own);
        for was in [true, false] {
            assert_eq!(look_again(Read::Absent { was }, &own, None), Again::Lost);
        }
        assert_eq!(look_again(Read::Damaged, &own, None), Again::Lost);
        assert_eq!(look_again(Read::Unreachable, &own, None), Again::Unknown);
        // Copies of before.
        for older in [
            Marker { number: 8, ..own },
            Marker { run: 2, number: 20, ..own },
            Marker { generation: 4, number: 20, run: 3, ..own },
            Marker { mark: Mark::Clean, generation: 4, ..own },
        ] {
            assert_eq!(again(older), Again::Lost, "{older:?}");
        }
        // A copy of the cache, another cache, a recovery.
        for others in [
            Marker { run: 4, ..own },
            Marker { mark: Mark::Dirty(other), ..own },
            Marker { mark: Mark::Dirty(other), generation: 2, number: 1, run: 1, ..own },
            Marker { mark: Mark::Clean, generation: 6, ..own },
            Marker { mark: Mark::Clean, ..own },
        ] {
            assert_eq!(again(others), Again::Others, "{others:?}");
        }
        // What could not be written, and was, is written over; what looks like it is another's.
        let tried = Marker { mark: Mark::Clean, number: 10, ..own };
        assert_eq!(look_again(Read::There(tried), &own, Some(&tried)), Again::Lost);
        let there = Marker { number: 11, ..tried };
        assert_eq!(look_again(Read::There(there), &own, Some(&tried)), Again::Others);
    }

    /// It was on its way for long, and is there now: nobody else has written it.
    #[test]
    fn a_marker_whose_number_was_tried_is_written_over_and_any_other_is_somebody_elses() {
        let me = Uuid([1; 16]);
        let of = Some((Uuid([9; 16]), 1));
        let own =
            Marker { mark: Mark::Dirty(me), generation: 5, number: 9, run: 3, of, moved: false };
        // Clean ones were tried with the numbers 10 to 12, the last of which is known.
        let tried = Marker { mark: Mark::Clean, number: 12, ..own };
        let again = |there: Marker, tried| look_again(Read::There(there), &own, tried);
        for number in 10..=12 {
            let there = Marker { number, ..tried };
            assert!(was_tried(&there, &tried, own.number), "{number}");
            assert_eq!(again(there, Some(&tried)), Again::Lost, "{number}");
            assert_eq!(again(there, None), Again::Others, "{number}: none was tried");
        }
        for number in [8, 9, 13] {
            let there = Marker { number, ..tried };
            assert!(!was_tried(&there, &tried, own.number), "{number}");
            assert_eq!(again(there, Some(&tried)), Again::Others, "{number}");
        }
        for others in [
            Marker { generation: 6, ..tried },
            Marker { run: 4, ..tried },
            Marker { of: Some((Uuid([8; 16]), 1)), ..tried },
            Marker { of: Some((Uuid([9; 16]), 2)), ..tried },
            Marker { mark: Mark::Dirty(Uuid([2; 16])), ..tried },
        ] {
            assert!(!was_tried(&others, &tried, own.number), "{others:?}");
            assert_eq!(again(others, Some(&tried)), Again::Others, "{others:?}");
        }
    }
}
