//! A journal while it is used: it is written, looked at, and made anew where it is lost.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, Weak};

use larder_base::Nanos;
use larder_engine::block::OpId;
use larder_engine::block::node::calls::{Message, OP_BITS, send};
use larder_engine::block::node::queue::Node as _;
use larder_engine::block::writeback::Planted;
use larder_format::block::marker::Marker;
use larder_volume::journal::{Head, JournalError, JournalPlace};

use super::super::super::{Core, locked};
use super::super::kept::Troubles;
use super::{Doubt, Journal, Of, Work};

/// Opens a journal's place anew, to be written.
pub(in super::super) type Opens =
    Box<dyn FnMut() -> Result<Box<dyn JournalPlace>, JournalError> + Send>;

/// Refuses a journal whose place is the store itself by another name.
pub(in super::super) type Apart = Box<dyn FnMut(&mut Journal) -> Result<(), String> + Send>;

/// How a journal that is lost is made anew.
pub(in super::super) struct Anew {
    pub(in super::super) opens: Opens,
    pub(in super::super) apart: Apart,
}

/// The head is told of so many epochs of an attachment: of each behind them the one before is there, too.
const TOLD: u8 = 2;

/// A journal that is written, and is to be where its name leads to.
pub(in super::super) struct Kept {
    of: Of,
    anew: Option<Anew>,
    head: Option<Box<Marker>>,
    /// Open; if not, it could not be made anew.
    journal: Option<Journal>,
    /// The epoch that was written last, and of how many the head was told.
    written: u64,
    told: u8,
    trouble: Arc<Mutex<Troubles>>,
}

/// What a journal is found to be.
enum Look {
    Own,
    /// It is not there, or holds nothing: it is made anew.
    Lost(&'static str),
}

impl Kept {
    /// One that was claimed. `anew`: it is made so where it is lost.
    pub(in super::super) fn new(
        of: Of,
        anew: Option<Anew>,
        journal: Journal,
        trouble: Arc<Mutex<Troubles>>,
    ) -> Kept {
        let head = journal.head.clone();
        Kept { of, anew, head, journal: Some(journal), written: 0, told: 0, trouble }
    }

    fn look(&mut self) -> Result<Look, JournalError> {
        let Some(journal) = &mut self.journal else { return Ok(Look::Lost("was removed")) };
        let (of, believes) = (self.of, journal.fault.is(Planted::OthersJournalWritten));
        match journal.place.look() {
            Ok(Head::None) => Ok(Look::Lost("was emptied")),
            Ok(Head::Damaged) => Ok(Look::Lost("was damaged")),
            Err(JournalError::Absent { .. }) => Ok(Look::Lost("was removed")),
            Ok(Head::Of(head)) if head.volume != of.volume => Err(JournalError::Foreign {
                place: journal.describe(),
                volume: head.volume,
                host: head.host,
            }),
            Ok(Head::Of(head)) => {
                match believes || (head.cache, head.generation) == (of.cache, of.generation) {
                    true => Ok(Look::Own),
                    false => Err(JournalError::Failed {
                        place: journal.describe(),
                        reason: format!(
                            "it is that of cache {} on host '{}' now, generation {}",
                            head.cache, head.host, head.generation
                        ),
                    }),
                }
            }
            Err(error) => Err(error),
        }
    }

    /// It is there, made anew if it was not. `doubt`: when the store is whole, if it may not be.
    fn keep(&mut self, now: Nanos, doubt: Option<Doubt>) -> Result<(), JournalError> {
        let Look::Lost(how) = self.look()? else { return Ok(()) };
        let (Some(anew), Some(head)) = (&mut self.anew, &self.head) else { return Ok(()) };
        // What is open has its lock.
        let fault = self.journal.take().map(|journal| journal.fault).unwrap_or_default();
        let (mut journal, is_there) = Journal::again((anew.opens)()?, head, fault)?;
        // Its name may lead elsewhere by now, to a place that has nothing of a journal. (Nothing is on its way to the store: the journal has to have it
        // first.)
        if !is_there {
            (anew.apart)(&mut journal)
                .map_err(|reason| JournalError::Failed { place: journal.describe(), reason })?;
        }
        journal.claim(head, doubt)?;
        self.told = 0;
        journal.place.rest();
        let what = format!(
            "{} {how} while the volume is served, and was made anew: see what does that; without it a store whose cache is lost cannot be recovered",
            journal.describe()
        );
        self.journal = Some(journal);
        tracing::warn!("{what}");
        locked(&self.trouble).is(&what, Some(now));
        Ok(())
    }

    /// The journal has an epoch durably, and nothing of it is in the store yet: the head says so where nothing else would tell that it is missing.
    fn tell(&mut self) -> Result<(), JournalError> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        if self.told < TOLD || journal.place.has_older() {
            journal.begun(self.written, self.told > 0)?;
            self.told = self.told.saturating_add(1);
        }
        Ok(())
    }

    pub(in super::super) fn do_work(&mut self, now: Nanos, work: Work) -> Result<(), JournalError> {
        match work {
            Work::Write(named, parts) => {
                let doubt = Doubt::of_lost(named.0, named.1);
                self.keep(now, Some(doubt))?;
                self.written = named.0;
                self.journal.as_mut().map_or(Ok(()), |j| j.write(self.of, named, &parts))
            }
            Work::Flush => {
                self.journal.as_mut().map_or(Ok(()), |journal| journal.place.flush())?;
                match self.look()? {
                    Look::Own => self.tell(),
                    Look::Lost(how) => {
                        let place = self.journal.as_ref().map(Journal::describe);
                        let reason = format!("it {how}");
                        Err(JournalError::Failed { place: place.unwrap_or_default(), reason })
                    }
                }
            }
            Work::Look(true) => self.keep(now, None),
            Work::Look(false) => self.look().map(drop),
        }
    }
}

pub(super) fn run(core: &Weak<Core>, attachment: u32, kept: &mut Kept, asked: &Receiver<Work>) {
    while let Ok(work) = asked.recv() {
        let of = match work {
            Work::Write(..) => Some(false),
            Work::Flush => Some(true),
            Work::Look(_) => None,
        };
        let now = core.upgrade().map_or(Nanos(0), |core| core.now());
        // What is written and not durable, or is there and could not be written, does not show that it works.
        let shows = matches!(work, Work::Flush | Work::Look(true));
        let done = kept.do_work(now, work);
        match &done {
            Ok(()) if shows => locked(&kept.trouble).none(),
            Ok(()) => {}
            Err(error) => {
                if locked(&kept.trouble).is(&error.to_string(), None) {
                    tracing::error!("{error}");
                }
            }
        }
        let Some(flushed) = of else { continue };
        let Some(core) = core.upgrade() else { return };
        let thread = core.destages(attachment) as u64;
        let message = Message::Journal { attachment, flushed, done: done.is_ok() };
        send(&*core, OpId(thread << OP_BITS), message);
    }
}
