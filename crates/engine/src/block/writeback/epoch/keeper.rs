//! A journal while it is used: it is written, looked at, and made anew where it is lost.
//!
//! A [`Keeper`] is asked for [`Work`], and says in which [`Step`]s that is done. A host does the first, says what came of it, and asks for the next.
//!
//! | work | steps |
//! | --- | --- |
//! | an epoch is written | look; where it is lost it is made anew, and the head says that the store is in doubt; write |
//! | it is made durable | flush; look: where it is lost that has failed; the head says that the epoch was begun, where nothing else would tell that it is missing |
//! | it is looked at while nothing is on its way | look; where it is lost it is made anew: all of an epoch is in the store durably, and an empty journal is as good |
//! | it is looked at otherwise | look |
//!
//! One that is another's is never written. One that is made anew at a place that has nothing of a journal may be the store by another name, and is found out to be
//! another place first.

use larder_format::block::marker::Marker;

use super::super::planted::{Fault, Planted};
use super::{Doubt, Of};

/// The head is told of so many epochs of an attachment: of each behind them the one before is there, too.
const TOLD: u8 = 2;

/// What is asked of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// This epoch is written, which ends at that record. It may be once more.
    Write {
        /// Its number.
        epoch: u64,
        /// Its last record.
        last: u64,
    },
    /// What was written is made durable.
    Flush,
    /// It is looked whether it is still there.
    Look {
        /// Nothing is on its way to the store, and what was is there durably.
        idle: bool,
    },
}

impl Work {
    /// That this went well shows that the journal works. (What is written and not durable does not, nor what is there and could not be written.)
    pub fn shows(self) -> bool {
        matches!(self, Work::Flush | Work::Look { idle: true })
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The head is read: [`Keeper::looked`].
    Look,
    /// What is open is let go, and its place is opened once more, to be written, also where it is damaged: [`Keeper::opened`].
    Open,
    /// It is found out whether the place is another than the store; if not, this has failed.
    Apart,
    /// The journal is claimed for the attachment, as [`claim`](super::claim) says.
    Claim(Option<Doubt>),
    /// The epoch is written.
    Write,
    /// What was written is made durable.
    Flush,
    /// The head says that an epoch was begun, as [`begun`](super::begun) says.
    Begun {
        /// Its number.
        epoch: u64,
        /// It was told of the one before.
        second: bool,
    },
}

/// What is where the journal was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen<'a> {
    /// A journal with this head.
    Of(&'a Marker),
    /// Not what is open, or nothing.
    Absent,
    /// A place without a head.
    Empty,
    /// Neither copy of the head is whole.
    Damaged,
}

/// How a journal was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// It is not there.
    Removed,
    /// It has no head any more.
    Emptied,
    /// Its head is damaged.
    Damaged,
}

/// Why work is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is another volume's by now.
    Foreign,
    /// It is another cache's, or another attachment's, by now.
    Others,
    /// It was lost before what was written was durable: the epoch is written once more.
    Lost(Lost),
}

/// A journal that is written, and is to be where its name leads to. See the [module](self).
#[derive(Clone, Debug)]
pub struct Keeper {
    of: Of,
    /// It can be made anew.
    makes: bool,
    /// Something is open.
    open: bool,
    /// The epoch that was written last, and of how many the head was told.
    written: u64,
    told: u8,
    work: Option<Work>,
    next: Option<Step>,
    /// How it was lost, until it is made anew.
    lost: Option<Lost>,
    fault: Fault,
}

impl Keeper {
    /// Of a journal that is open, and was claimed for `of`. `makes`: it can be made anew.
    pub fn new(of: Of, makes: bool, fault: Fault) -> Keeper {
        let (work, next, lost) = (None, None, None);
        Keeper { of, makes, open: true, written: 0, told: 0, work, next, lost, fault }
    }

    /// This is asked for. What was asked before is over.
    pub fn asked(&mut self, work: Work) {
        self.work = Some(work);
        self.lost = None;
        self.next = Some(match work {
            Work::Flush if self.open => Step::Flush,
            _ => Step::Look,
        });
    }

    /// What is to be done next. `None`: all is done.
    pub fn next(&self) -> Option<Step> {
        self.next
    }

    /// Something is open. If not, what a host still has is to be let go: a place that was opened once more and not claimed is none that may be written.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// How it was lost, if it is being made anew.
    pub fn lost(&self) -> Option<Lost> {
        self.lost
    }

    /// The head was read. Where nothing is open that is [`Seen::Absent`]. `older`: an epoch before those that its place always keeps may be there still.
    ///
    /// # Errors
    /// [`Refused`]: the work is not done.
    pub fn looked(&mut self, seen: Seen<'_>, older: bool) -> Result<(), Refused> {
        let judged = match seen {
            _ if !self.open => Ok(Some(Lost::Removed)),
            Seen::Absent => Ok(Some(Lost::Removed)),
            Seen::Empty => Ok(Some(Lost::Emptied)),
            Seen::Damaged => Ok(Some(Lost::Damaged)),
            Seen::Of(head) if head.volume != self.of.volume => Err(Refused::Foreign),
            Seen::Of(_) if self.fault.is(Planted::OthersJournalWritten) => Ok(None),
            Seen::Of(head) => {
                let is_own = (head.cache, head.generation) == (self.of.cache, self.of.generation);
                is_own.then_some(None).ok_or(Refused::Others)
            }
        };
        let lost = judged.inspect_err(|_| self.next = None)?;
        self.next = match (self.work, lost) {
            (Some(Work::Flush), Some(lost)) => {
                self.next = None;
                return Err(Refused::Lost(lost));
            }
            (Some(Work::Flush), None) => (self.told < TOLD || older)
                .then_some(Step::Begun { epoch: self.written, second: self.told > 0 }),
            (Some(Work::Write { .. } | Work::Look { idle: true }), Some(lost)) if self.makes => {
                self.lost = Some(lost);
                self.open = false;
                Some(Step::Open)
            }
            _ => self.kept(),
        };
        Ok(())
    }

    /// The place was opened once more. `is_there`: something of a journal is at it.
    pub fn opened(&mut self, is_there: bool) {
        // (Its name may lead elsewhere by now. Nothing is on its way to the store: the journal has to have it first.)
        self.next = Some(if is_there { self.claim() } else { Step::Apart });
    }

    /// The step was done.
    pub fn done(&mut self) {
        self.next = match self.next {
            Some(Step::Apart) => Some(self.claim()),
            Some(Step::Claim(_)) => {
                (self.open, self.told) = (true, 0);
                self.kept()
            }
            Some(Step::Flush) => Some(Step::Look),
            Some(Step::Begun { .. }) => {
                self.told = self.told.saturating_add(1);
                None
            }
            // (What was looked at or opened is told otherwise.)
            None | Some(Step::Write | Step::Look | Step::Open) => None,
        };
    }

    /// The step was not done: nor is the rest.
    pub fn failed(&mut self) {
        self.next = None;
    }

    fn claim(&self) -> Step {
        Step::Claim(match self.work {
            Some(Work::Write { epoch, last }) => Some(Doubt::of_lost(epoch, last)),
            _ => None,
        })
    }

    /// It is there: the work itself.
    fn kept(&mut self) -> Option<Step> {
        let Some(Work::Write { epoch, .. }) = self.work else { return None };
        self.written = epoch;
        Some(Step::Write)
    }
}

#[cfg(test)]
mod tests {
    use larder_format::Uuid;
    use larder_format::block::marker::{MarkerState, Order};

    use super::*;

    const OF: Of = Of { volume: Uuid([1; 16]), cache: Uuid([2; 16]), generation: 3 };
    const WRITE: Work = Work::Write { epoch: 5, last: 50 };
    const DOUBT: Option<Doubt> = Some(Doubt { epoch: 4, last: 50 });

    fn head() -> Marker {
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
            frontier: 0,
            time: 0,
            mark: None,
            order: Order::Journaled,
            applied: 0,
            joins: 0,
            probes: false,
        }
    }

    /// The steps of this work where that is seen. `is_there`: where it is opened once more something of a journal is. `fails`: this step fails.
    fn does(
        keeper: &mut Keeper,
        work: Work,
        seen: Seen<'_>,
        (is_there, older): (bool, bool),
        fails: Option<Step>,
    ) -> (Vec<Step>, Option<Refused>) {
        keeper.asked(work);
        let (mut steps, mut refused) = (Vec::new(), None);
        while let Some(step) = keeper.next() {
            steps.push(step);
            match step {
                _ if Some(step) == fails => keeper.failed(),
                Step::Look => refused = keeper.looked(seen, older).err(),
                Step::Open => keeper.opened(is_there),
                _ => keeper.done(),
            }
        }
        (steps, refused)
    }

    fn keeper() -> Keeper {
        Keeper::new(OF, true, Fault::default())
    }

    #[test]
    fn each_work_has_its_steps() {
        use Step::{Apart, Claim, Flush, Look, Open, Write};
        let own = head();
        let begun = Step::Begun { epoch: 0, second: false };
        let lost = |how| Some(Refused::Lost(how));
        let idle = |idle| Work::Look { idle };
        for (what, work, seen, is_there, steps, refused) in [
            ("writes", WRITE, Seen::Of(&own), false, vec![Look, Write], None),
            ("flushes", Work::Flush, Seen::Of(&own), false, vec![Flush, Look, begun], None),
            ("looks", idle(true), Seen::Of(&own), false, vec![Look], None),
            ("looks", idle(false), Seen::Of(&own), false, vec![Look], None),
            (
                "is in doubt where it is lost",
                WRITE,
                Seen::Damaged,
                true,
                vec![Look, Open, Claim(DOUBT), Write],
                None,
            ),
            (
                "is apart where nothing is there",
                WRITE,
                Seen::Absent,
                false,
                vec![Look, Open, Apart, Claim(DOUBT), Write],
                None,
            ),
            (
                "is as good empty while nothing is on its way",
                idle(true),
                Seen::Empty,
                false,
                vec![Look, Open, Apart, Claim(None)],
                None,
            ),
            ("waits for the next epoch", idle(false), Seen::Absent, false, vec![Look], None),
            (
                "has not made durable",
                Work::Flush,
                Seen::Absent,
                false,
                vec![Flush, Look],
                lost(Lost::Removed),
            ),
            (
                "has not made durable",
                Work::Flush,
                Seen::Empty,
                false,
                vec![Flush, Look],
                lost(Lost::Emptied),
            ),
            (
                "has not made durable",
                Work::Flush,
                Seen::Damaged,
                false,
                vec![Flush, Look],
                lost(Lost::Damaged),
            ),
        ] {
            let done = does(&mut keeper(), work, seen, (is_there, false), None);
            assert_eq!(done, (steps, refused), "{what}: {work:?}, {seen:?}");
        }
    }

    #[test]
    fn a_journal_that_is_anothers_is_never_written() {
        let foreign = Marker { volume: Uuid([9; 16]), ..head() };
        let others = Marker { cache: Uuid([9; 16]), ..head() };
        for work in [WRITE, Work::Flush, Work::Look { idle: true }, Work::Look { idle: false }] {
            for (of, why) in [
                (&foreign, Refused::Foreign),
                (&others, Refused::Others),
                (&Marker { generation: 2, ..head() }, Refused::Others),
                (&Marker { generation: 4, ..head() }, Refused::Others),
            ] {
                let (steps, refused) = does(&mut keeper(), work, Seen::Of(of), (true, false), None);
                assert_eq!(refused, Some(why), "{work:?}");
                assert_eq!(steps.last(), Some(&Step::Look), "{work:?}: nothing follows");
            }
        }
    }

    #[test]
    fn the_head_is_told_of_two_epochs_and_of_more_only_where_older_ones_are_left() {
        let (own, mut keeper) = (head(), keeper());
        let mut told = |epoch, older, fails| {
            let work = Work::Write { epoch, last: epoch * 10 };
            does(&mut keeper, work, Seen::Of(&own), (true, false), None);
            let begun = Step::Begun { epoch, second: epoch > 1 };
            let fails = (fails == Some(true)).then_some(begun);
            let done = does(&mut keeper, Work::Flush, Seen::Of(&own), (true, older), fails);
            match done.0[..] {
                [Step::Flush, Step::Look] => None,
                [Step::Flush, Step::Look, Step::Begun { epoch, second }] => Some((epoch, second)),
                _ => panic!("{done:?}"),
            }
        };
        assert_eq!(told(1, false, Some(true)), Some((1, false)), "that has failed");
        assert_eq!(told(1, false, None), Some((1, false)));
        assert_eq!(told(2, false, None), Some((2, true)));
        assert_eq!(told(3, false, None), None);
        assert_eq!(told(4, true, None), Some((4, true)));
        // One that is made anew knows of none.
        does(&mut keeper, Work::Look { idle: true }, Seen::Absent, (true, false), None);
        let done = does(&mut keeper, Work::Flush, Seen::Of(&own), (true, false), None);
        assert_eq!(done.0.last(), Some(&Step::Begun { epoch: 4, second: false }));
    }

    #[test]
    fn one_that_could_not_be_made_anew_is_lost_until_it_is() {
        let own = head();
        for fails in [Step::Open, Step::Apart, Step::Claim(DOUBT)] {
            let mut keeper = keeper();
            does(&mut keeper, WRITE, Seen::Absent, (false, false), Some(fails));
            // Whatever is there: nothing of it is open.
            let (steps, refused) =
                does(&mut keeper, Work::Flush, Seen::Of(&own), (true, false), None);
            assert_eq!((steps, refused), (vec![Step::Look], Some(Refused::Lost(Lost::Removed))));
            let (steps, _) = does(&mut keeper, WRITE, Seen::Of(&own), (true, false), None);
            let all = [Step::Look, Step::Open, Step::Claim(DOUBT), Step::Write];
            assert_eq!(steps, all, "{fails:?}");
            let (steps, _) = does(&mut keeper, WRITE, Seen::Of(&own), (true, false), None);
            assert_eq!(steps, [Step::Look, Step::Write]);
        }
    }

    #[test]
    fn one_that_cannot_be_made_anew_is_written_where_it_is_and_never_counts_as_durable() {
        let mut keeper = Keeper::new(OF, false, Fault::default());
        let (steps, refused) = does(&mut keeper, WRITE, Seen::Absent, (true, false), None);
        assert_eq!((steps, refused), (vec![Step::Look, Step::Write], None));
        let (_, refused) = does(&mut keeper, Work::Flush, Seen::Absent, (true, false), None);
        assert_eq!(refused, Some(Refused::Lost(Lost::Removed)));
    }
}
