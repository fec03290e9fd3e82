//! A journal while it is used: the steps of the engine's [`Keeper`] are done here.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, Weak};

use larder_base::Nanos;
use larder_engine::block::OpId;
use larder_engine::block::node::calls::{Message, OP_BITS, send};
use larder_engine::block::node::queue::Node as _;
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::epoch::{self, Keeper, Lost, Refused, Seen, Step};
use larder_format::block::marker::Marker;
use larder_volume::journal::{Head, JournalError, JournalPlace};

use super::super::super::{Core, locked};
use super::super::kept::Troubles;
use super::{Journal, Of, Work};

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

/// A journal that is written, and is to be where its name leads to.
pub(in super::super) struct Kept {
    of: Of,
    keeper: Keeper,
    anew: Option<Anew>,
    head: Option<Box<Marker>>,
    /// Open; if not, it could not be made anew.
    journal: Option<Journal>,
    fault: Fault,
    trouble: Arc<Mutex<Troubles>>,
}

fn how(lost: Lost) -> &'static str {
    match lost {
        Lost::Removed => "was removed",
        Lost::Emptied => "was emptied",
        Lost::Damaged => "was damaged",
    }
}

impl Kept {
    /// One that was claimed. `anew`: it is made so where it is lost.
    pub(in super::super) fn new(
        of: Of,
        anew: Option<Anew>,
        journal: Journal,
        trouble: Arc<Mutex<Troubles>>,
    ) -> Kept {
        let (head, fault) = (journal.head.clone(), journal.fault);
        let keeper = Keeper::new(of, anew.is_some() && head.is_some(), fault);
        Kept { of, keeper, anew, head, journal: Some(journal), fault, trouble }
    }

    fn failed(&self, reason: String) -> JournalError {
        let place = self.journal.as_ref().map(Journal::describe).unwrap_or_default();
        JournalError::Failed { place, reason }
    }

    fn look(&mut self) -> Result<(), JournalError> {
        let (seen, older) = match &mut self.journal {
            None => (Ok(Head::None), false),
            Some(journal) => (journal.place.look(), journal.place.has_older()),
        };
        let head = match &seen {
            Ok(Head::Of(head)) => Some(head),
            _ => None,
        };
        let looked = match &seen {
            Ok(Head::Of(head)) => self.keeper.looked(Seen::Of(head), older),
            Ok(Head::None) => self.keeper.looked(Seen::Empty, older),
            Ok(Head::Damaged) => self.keeper.looked(Seen::Damaged, older),
            Err(JournalError::Absent { .. }) => self.keeper.looked(Seen::Absent, older),
            Err(error) => return Err(error.clone()),
        };
        looked.map_err(|why| match (why, head) {
            (Refused::Lost(lost), _) => self.failed(format!("it {}", how(lost))),
            (Refused::Foreign, Some(head)) => JournalError::Foreign {
                place: self.journal.as_ref().map(Journal::describe).unwrap_or_default(),
                volume: head.volume,
                host: head.host.clone(),
            },
            (Refused::Others, Some(head)) => self.failed(format!(
                "it is that of cache {} on host '{}' now, generation {}",
                head.cache, head.host, head.generation
            )),
            (_, None) => self.failed("it is another's".to_owned()),
        })
    }

    /// Opens it once more. What is open has its lock.
    fn open(&mut self) -> Result<(), JournalError> {
        self.journal = None;
        let (Some(anew), Some(head)) = (&mut self.anew, &self.head) else {
            return Err(self.failed("it cannot be made anew".to_owned()));
        };
        let (journal, is_there) = Journal::again((anew.opens)()?, head, self.fault)?;
        self.journal = Some(journal);
        self.keeper.opened(is_there);
        Ok(())
    }

    fn apart(&mut self) -> Result<(), JournalError> {
        let (Some(anew), Some(journal)) = (&mut self.anew, &mut self.journal) else {
            return Ok(());
        };
        (anew.apart)(journal)
            .map_err(|reason| JournalError::Failed { place: journal.describe(), reason })
    }

    fn claim(&mut self, now: Nanos, doubt: Option<epoch::Doubt>) -> Result<(), JournalError> {
        let (Some(head), Some(journal)) = (&self.head, &mut self.journal) else { return Ok(()) };
        journal.claim(head, doubt)?;
        journal.place.rest();
        let what = format!(
            "{} {} while the volume is served, and was made anew: see what does that; without it a store whose cache is lost cannot be recovered",
            journal.describe(),
            self.keeper.lost().map_or("was lost", how)
        );
        tracing::warn!("{what}");
        locked(&self.trouble).is(&what, Some(now));
        Ok(())
    }

    pub(in super::super) fn do_work(&mut self, now: Nanos, work: Work) -> Result<(), JournalError> {
        self.keeper.asked(work.asks());
        while let Some(step) = self.keeper.next() {
            let done = match (step, &mut self.journal, &work) {
                (Step::Look, ..) => self.look(),
                (Step::Open, ..) => self.open(),
                (Step::Apart, ..) => self.apart(),
                (Step::Claim(doubt), ..) => self.claim(now, doubt),
                (Step::Write, Some(journal), Work::Write(named, parts)) => {
                    journal.write(self.of, named.clone(), parts)
                }
                (Step::Flush, Some(journal), _) => journal.place.flush(),
                (Step::Begun { epoch, second }, Some(journal), _) => journal.begun(epoch, second),
                (Step::Write | Step::Flush | Step::Begun { .. }, ..) => {
                    Err(self.failed("nothing is open".to_owned()))
                }
            };
            match (done, step) {
                // What came of these is told by themselves.
                (Ok(()), Step::Look | Step::Open) => {}
                (Ok(()), _) => self.keeper.done(),
                (Err(error), _) => {
                    self.keeper.failed();
                    if !self.keeper.is_open() {
                        self.journal = None;
                    }
                    return Err(error);
                }
            }
        }
        Ok(())
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
        let shows = work.asks().shows();
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
