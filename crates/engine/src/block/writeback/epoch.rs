//! The journal of a volume: which of its epochs counts, whether it is torn, until when a store is in doubt, what its head says, and when one that is lost is
//! made anew.
//!
//! A journal has a head that says whose it is, and parts that epochs go to. [`Reading`] says what is to be read of a part, and what that has ([`Found`]);
//! [`judge`] says what all of them mean for the store. An epoch that is whole may be applied once more: it has after-images. The store has had all of an
//! epoch before the next was begun, and may have some of that: where something of a later one is there, or known to be missing, nothing older is put over
//! the store.
//!
//! A store *in doubt* may be between two epochs ([`Doubt`]): the head says so until an epoch is whole that makes up for it.
//!
//! [`Replay`] says in which steps an epoch comes to the store, and [`Keeper`] in which a journal is written while its volume is served. A host does the
//! steps, and says what came of them.

mod keeper;
mod reading;
mod replay;

pub use keeper::{Keeper, Lost, Refused, Seen, Step, Work};
pub use reading::{Reading, Whole};
pub use replay::{Replay, Task, TooLarge};

use larder_format::Uuid;
use larder_format::block::journal::Commit;
use larder_format::block::marker::{MAGIC, Marker, MarkerState, Order};

use super::planted::{Fault, Planted};

/// State of a head that says that the store may be between two epochs, until one behind the head's `applied` is whole.
const DOUBTFUL: MarkerState = MarkerState::Closing;

/// Whose journal it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Of {
    /// The volume.
    pub volume: Uuid,
    /// The cache.
    pub cache: Uuid,
    /// The volume's generation.
    pub generation: u64,
}

/// The store may be between two epochs, until one behind `epoch` is whole that has all up to `last`: a shorter one leaves what the store may have
/// behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doubt {
    /// The last epoch that does not make up for it.
    pub epoch: u64,
    /// The last record that the store may have something of.
    pub last: u64,
}

impl Doubt {
    /// Of a store whose journal is made anew while an epoch is written that ends at `last`: of the epoch before, or of this one, which is written once
    /// more, all may be on its way.
    pub fn of_lost(epoch: u64, last: u64) -> Doubt {
        Doubt { epoch: epoch.saturating_sub(1), last }
    }

    /// Of a store whose journal is torn, for a start whose cache has a log up to `logged`. Of the last epoch that was begun all that there is may be found
    /// later.
    pub fn of_torn(begun: u64, logged: u64) -> Doubt {
        Doubt { epoch: begun.saturating_sub(1), last: logged }
    }
}

/// Whose epoch a commit is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// That of the attachment that is asked for.
    Own,
    /// Of a later attachment of the same cache.
    Later,
    /// None that counts.
    Nobody,
}

impl Of {
    /// Whose epoch this commit is of.
    pub fn whose(&self, commit: &Commit) -> Whose {
        match commit.cache == self.cache {
            true if commit.generation > self.generation => Whose::Later,
            true if commit.generation == self.generation => Whose::Own,
            _ => Whose::Nobody,
        }
    }
}

/// What a part has of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// None that counts.
    Nothing,
    /// One of a later attachment of the same cache.
    Later,
    /// One that is whole: its number, and its last record.
    Whole(u64, u64),
    /// One of that number, if it says so, and it is not whole.
    Torn(Option<u64>),
}

/// What it means for the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Judged {
    /// Which part has the epoch that is to be applied, if one is.
    pub whole: Option<usize>,
    /// The last epoch that was begun.
    pub last: u64,
    /// Why the store may be between two epochs all the same.
    pub torn: Option<&'static str>,
}

/// Judges a journal for the store of `of` by its head and its parts. `keeps`: so many of the last epochs are always there, once there were so many.
pub fn judge(head: Option<&Marker>, of: Of, parts: &[Found], keeps: usize, fault: Fault) -> Judged {
    let later = parts.contains(&Found::Later);
    let wholes = parts.iter().enumerate().filter_map(|(at, part)| match part {
        // (One whose PUT comes late, when all were lost meanwhile, may have a later number, and has less.)
        &Found::Whole(epoch, last) => Some((last, epoch, at)),
        _ => None,
    });
    let torn = |part: &Found| match part {
        Found::Torn(epoch) => Some(*epoch),
        _ => None,
    };
    let found = wholes.clone().count() + parts.iter().filter_map(torn).count();
    let most = wholes.clone().map(|(_, epoch, _)| epoch).max().unwrap_or(0);
    // Of two with as much the first counts.
    let whole = wholes.max_by_key(|&(last, epoch, at)| (last, epoch, std::cmp::Reverse(at)));
    // (Epochs begin with 1.)
    let (last, is_whole) = whole.map_or((0, 0), |(last, epoch, _)| (last, epoch));
    // A take-up that was cut short has replayed it before it said that it is the next attachment's.
    let mine = head.filter(|head| {
        let next = head.generation == of.generation.saturating_add(1) && !later;
        head.cache == of.cache && (head.generation == of.generation || next)
    });
    let doubtful = mine.filter(|head| head.state == DOUBTFUL);
    let (doubtful, all) =
        doubtful.map_or((0, 0), |head| (head.applied.saturating_add(1), head.frontier));
    let doubtful_still = is_whole < doubtful || last < all;
    let behind = |epoch: Option<u64>| epoch.is_none_or(|epoch| epoch > is_whole);
    let cut_short = parts.iter().filter_map(torn).any(behind);
    let known = mine.filter(|head| head.generation == of.generation);
    let (known, second) = begun_in(known.map_or(0, |head| head.joins));
    let both = known > 0 && (second || is_whole > known);
    let missing = is_whole < known || both && found < keeps;
    let why = match () {
        () if fault.is(Planted::TornJournalBelieved) => None,
        () if head.is_none() => Some("it is empty, and was made after the last epoch"),
        () if mine.is_none() => Some("it is that of an earlier attachment"),
        () if cut_short => Some("an epoch in it is damaged or was cut short"),
        () if missing => Some("an epoch that was begun is missing in it"),
        () if doubtful_still => {
            Some("it was damaged before, and no epoch has come to it since that makes up for it")
        }
        () => None,
    };
    let begun = parts.iter().filter_map(torn).flatten().max().unwrap_or(0);
    let counts = !cut_short && !doubtful_still && !missing;
    Judged {
        whole: whole.filter(|_| counts).map(|(.., at)| at),
        last: begun.max(most).max(doubtful).max(known),
        torn: why,
    }
}

/// Why a journal whose last whole epoch has this number is not that of the store of which `marker` speaks, as it was left: the store has nothing of an epoch
/// before the journal has all of it. (Not where the log has failed: what is kept then comes to the store without the journal.)
pub fn is_older(epoch: Option<u64>, marker: &Marker) -> Option<&'static str> {
    let older = epoch.is_some_and(|epoch| epoch < marker.applied);
    (older && matches!(marker.state, MarkerState::Dirty | MarkerState::Carried)).then_some(
        "the store has had later epochs by its marker: an earlier copy of it was put back",
    )
}

/// The head of a journal that is that of an attachment from now on. `head`: what is there; `marker`: what the volume's marker says or will say; `doubt`: when
/// the store is whole, if it may not be.
pub fn claim(head: Option<&Marker>, marker: &Marker, doubt: Option<Doubt>, fault: Fault) -> Marker {
    let doubt = doubt.filter(|_| !fault.is(Planted::DoubtForgotten));
    Marker {
        // One that says so already may be in a cache alone from which no flush takes it to the disk any more: it is written all the same.
        number: head.map_or(1, |head| head.number.saturating_add(1)),
        state: if doubt.is_some() { DOUBTFUL } else { MarkerState::Dirty },
        order: Order::Journaled,
        applied: doubt.map_or(0, |doubt| doubt.epoch),
        frontier: doubt.map_or(marker.frontier, |doubt| doubt.last),
        mark: None,
        joins: 0,
        probes: false,
        ..marker.clone()
    }
}

/// The head of a journal that had `head`, once it is to say that this epoch was begun, and whether it was told before that the one before it was (`second`): what
/// is missing from then on is torn. `None`: it says so.
pub fn begun(head: &Marker, epoch: u64, second: bool) -> Option<Marker> {
    let joins = begun_word(epoch, second);
    let says = head.joins >= joins;
    (!says).then(|| Marker { number: head.number.saturating_add(1), joins, ..head.clone() })
}

/// Whether the place of a journal may be that of its store by another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Apart {
    /// It is another place.
    Is,
    /// It is the same.
    IsNot,
    /// Only bytes that are put there, and are looked for in the store, can tell.
    Unknown,
}

/// Whether a place is another than the store, which begins with these bytes. `has_head`: a journal is at the place.
pub fn apart(has_head: bool, store: &[u8]) -> Apart {
    match () {
        () if store.starts_with(&MAGIC) => Apart::IsNot,
        // Where the store begins with something else than zeros it is another place than one that has nothing yet.
        () if !has_head && store.iter().all(|&b| b == 0) => Apart::Unknown,
        () => Apart::Is,
    }
}

/// What a head has in place of [`Marker::joins`]: the last epoch of this attachment that it was told of, and whether that before it was one of it, too.
fn begun_word(epoch: u64, second: bool) -> u64 {
    epoch << 1 | u64::from(second)
}

fn begun_in(word: u64) -> (u64, bool) {
    (word >> 1, word & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF: Of = Of { volume: Uuid([1; 16]), cache: Uuid([2; 16]), generation: 3 };

    fn marker() -> Marker {
        Marker {
            number: 7,
            state: MarkerState::Dirty,
            volume: OF.volume,
            identity: [0; 64],
            cache: OF.cache,
            run: 1,
            host: String::new(),
            generation: 3,
            attachment: 1,
            frontier: 10,
            time: 0,
            mark: None,
            order: Order::Journaled,
            applied: 0,
            joins: 0,
            probes: false,
        }
    }

    fn judged(head: &Marker, parts: &[Found]) -> Judged {
        judge(Some(head), OF, parts, 1, Fault::default())
    }

    #[test]
    fn the_epoch_that_has_most_counts_and_none_where_a_later_one_was_begun() {
        let head = claim(None, &marker(), None, Fault::default());
        let whole = |of: &Judged| (of.whole, of.last, of.torn.is_some());
        let (a, b) = (Found::Whole(4, 40), Found::Whole(5, 50));
        assert_eq!(whole(&judged(&head, &[a, b])), (Some(1), 5, false));
        assert_eq!(whole(&judged(&head, &[b, a])), (Some(0), 5, false));
        // A late request has a later number, and less.
        assert_eq!(whole(&judged(&head, &[Found::Whole(6, 30), b])), (Some(1), 6, false));
        assert_eq!(whole(&judged(&head, &[a, Found::Nothing])), (Some(0), 4, false));
        assert_eq!(whole(&judged(&head, &[])), (None, 0, false));
        assert_eq!(whole(&judged(&head, &[a, Found::Torn(Some(5))])), (None, 5, true));
        assert_eq!(whole(&judged(&head, &[a, Found::Torn(None)])), (None, 4, true));
        assert_eq!(whole(&judged(&head, &[b, Found::Torn(Some(4))])), (Some(0), 5, false));
    }

    #[test]
    fn a_journal_is_torn_that_is_not_there_or_is_another_attachments() {
        let torn = |head: Option<&Marker>, parts: &[Found]| {
            judge(head, OF, parts, 1, Fault::default()).torn.is_some()
        };
        let head = claim(None, &marker(), None, Fault::default());
        let of = |generation, cache| Marker { generation, cache, ..head.clone() };
        assert!(torn(None, &[]));
        assert!(torn(Some(&of(2, OF.cache)), &[Found::Whole(1, 9)]));
        assert!(torn(Some(&of(3, Uuid([9; 16]))), &[Found::Whole(1, 9)]));
        assert!(torn(Some(&of(5, OF.cache)), &[Found::Whole(1, 9)]));
        // That of a take-up that was cut short, before anything was written for it.
        assert!(!torn(Some(&of(4, OF.cache)), &[Found::Whole(1, 9)]));
        assert!(torn(Some(&of(4, OF.cache)), &[Found::Whole(1, 9), Found::Later]));
    }

    #[test]
    fn a_store_is_in_doubt_until_an_epoch_makes_up_for_it() {
        let found = judged(&marker(), &[Found::Whole(4, 40), Found::Torn(Some(5))]);
        let doubt = Doubt::of_torn(found.last, 60);
        assert_eq!((found.torn.is_some(), doubt), (true, Doubt { epoch: 4, last: 60 }));
        let head = claim(Some(&marker()), &marker(), Some(doubt), Fault::default());
        assert_eq!((head.state, head.number), (DOUBTFUL, 8));
        let is_torn = |epoch, last| judged(&head, &[Found::Whole(epoch, last)]).torn.is_some();
        assert_eq!([is_torn(4, 70), is_torn(5, 59), is_torn(5, 60)], [true, true, false]);
        // The next one is behind it, whatever is there.
        assert_eq!(judged(&head, &[]).last, 5);
        let head = claim(Some(&head), &marker(), None, Fault::default());
        assert_eq!((head.state, judged(&head, &[]).torn), (MarkerState::Dirty, None));
        assert_eq!(Doubt::of_lost(5, 60), Doubt { epoch: 4, last: 60 });
    }

    #[test]
    fn a_journal_that_has_fewer_epochs_than_its_store_is_an_earlier_copy() {
        let told = |applied| Marker { applied, ..marker() };
        assert_eq!(is_older(Some(4), &told(4)), None);
        assert!(is_older(Some(4), &told(5)).is_some());
        // One that was made anew has none, and a log that has failed is drained without it.
        assert_eq!(is_older(None, &told(5)), None);
        assert_eq!(is_older(Some(4), &Marker { state: MarkerState::Closed, ..told(5) }), None);
    }

    #[test]
    fn a_place_is_told_from_the_store_by_what_both_begin_with() {
        let mut journal = vec![0; 512];
        journal[..MAGIC.len()].copy_from_slice(&MAGIC);
        for (has_head, store, is) in [
            (true, &journal[..], Apart::IsNot),
            (false, &journal[..], Apart::IsNot),
            (true, &[0; 512], Apart::Is),
            (false, &[7; 512], Apart::Is),
            (false, &[0; 512], Apart::Unknown),
            (false, &[], Apart::Unknown),
        ] {
            assert_eq!(apart(has_head, store), is, "{has_head}, {:?}", store.first());
        }
    }

    #[test]
    fn an_epoch_that_was_begun_and_is_missing_is_torn() {
        let head = claim(None, &marker(), None, Fault::default());
        let first = begun(&head, 1, false).unwrap();
        assert_eq!(begun(&first, 1, false), None);
        let second = begun(&first, 2, true).unwrap();
        let torn = |head: &Marker, parts: &[Found], keeps| {
            judge(Some(head), OF, parts, keeps, Fault::default()).torn.is_some()
        };
        let (one, two) = (Found::Whole(1, 10), Found::Whole(2, 20));
        assert!(torn(&first, &[Found::Nothing], 2) && !torn(&first, &[one], 2));
        assert!(torn(&second, &[one], 2) && torn(&second, &[two], 2));
        assert!(!torn(&second, &[one, two], 2) && !torn(&second, &[two], 1));
        assert_eq!(judged(&second, &[]).last, 2);
    }
}
