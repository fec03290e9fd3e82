//! Calls of what may hang, each on a thread of its own, which is waited for so long at most.
//!
//! A file on another host's file system can keep whoever opens, reads or writes it waiting until that host is there again, and no signal ends that; a
//! server that takes connections and answers nothing keeps whoever asks it for as long as its time limits say. So no thread of the cache, of a client or of
//! an operator is ever in such a call, nor a start. After its time the call is *late*: what it has was lent to that thread, and whoever asks next hears at
//! once where it is, and for how long it has not answered. What was to be written may be there later: it is as with a write that has failed.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::super::attended::{is_attended, is_unwanted, waits_for};
use super::super::locked;
use super::super::operators::LOOK;

/// What is written when nobody waits for it any more has so long still: whether it is there would not be known.
const GRACE: Duration = Duration::from_millis(500);

const ENDED: &str = "the thread that asked it has ended";

/// Late calls, by what they are of as it was called when it was opened: since when, and how many.
static LATE: Mutex<BTreeMap<String, (Instant, usize)>> = Mutex::new(BTreeMap::new());

/// Why nothing came of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoAnswer {
    /// It is late, or one before it is.
    Late(String),
    /// It cannot be asked.
    Failed(String),
}

impl NoAnswer {
    /// It has been asked since then.
    fn late(patience: Duration, since: Instant) -> NoAnswer {
        // (Told anew when it has become twice as long.)
        let (least, elapsed) = (patience.as_secs(), since.elapsed().as_secs());
        let seconds = match elapsed.checked_div(least) {
            Some(times @ 1..) => least << times.ilog2(),
            _ => elapsed,
        };
        NoAnswer::Late(format!(
            "it has not answered for {seconds} s or more: see to the file system or server that it is on"
        ))
    }

    fn no_thread(error: &io::Error) -> NoAnswer {
        NoAnswer::Failed(format!("no thread to ask it: {error}"))
    }

    fn ended() -> NoAnswer {
        NoAnswer::Failed(ENDED.to_owned())
    }
}

/// When a call is not waited for any more.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bound {
    /// After so long.
    pub(super) patience: Duration,
    /// It changes something: whoever waits for it no longer waits for [`GRACE`] all the same.
    pub(super) changes: bool,
}

/// A call on a thread of its own.
struct Asked<T> {
    begun: Instant,
    told: Receiver<T>,
    call: Arc<Mutex<Call>>,
    at: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    UnderWay,
    /// Nobody waits for it.
    Late,
    Ended,
}

/// A call is under way until this goes.
struct Ends(Arc<Mutex<Call>>, String);

impl Drop for Ends {
    fn drop(&mut self) {
        let mut call = locked(&self.0);
        if std::mem::replace(&mut *call, Call::Ended) != Call::Late {
            return;
        }
        let mut all = locked(&LATE);
        let left = all.get_mut(&self.1).map_or(0, |(_, calls)| {
            *calls -= 1;
            *calls
        });
        if left == 0 {
            all.remove(&self.1);
        }
    }
}

impl<T: Send + 'static> Asked<T> {
    /// Of what was opened as `at`.
    fn on_a_thread(at: &str, act: impl FnOnce() -> T + Send + 'static) -> io::Result<Asked<T>> {
        let (tell, told) = mpsc::channel();
        let call = Arc::new(Mutex::new(Call::UnderWay));
        let ends = Ends(call.clone(), at.to_owned());
        let run = move || {
            // It goes last: what nobody waits for any more is gone by then.
            let _ends = ends;
            // Who has asked may have gone.
            let _ = tell.send(act());
        };
        let begun = Instant::now();
        std::thread::Builder::new().name("block-asks".into()).spawn(run)?;
        Ok(Asked { begun, told, call, at: at.to_owned() })
    }

    /// What came of it; nobody waits for it after that.
    fn wait(&self, bound: Bound) -> Result<T, RecvTimeoutError> {
        let _waits = waits_for(&self.at);
        let mut left = bound.patience;
        let mut unwanted = false;
        let said = loop {
            let step = if is_attended() { left.min(LOOK) } else { left };
            let said = self.told.recv_timeout(step);
            left = left.saturating_sub(step);
            if !unwanted && is_unwanted() {
                unwanted = true;
                left = left.min(if bound.changes { GRACE } else { Duration::ZERO });
            }
            if !matches!(said, Err(RecvTimeoutError::Timeout)) || left.is_zero() {
                break said;
            }
        };
        if said.is_err() {
            let mut call = locked(&self.call);
            if *call == Call::UnderWay {
                *call = Call::Late;
                let mut all = locked(&LATE);
                all.entry(self.at.clone()).or_insert((self.begun, 0)).1 += 1;
            }
        }
        said
    }
}

/// Has something done that may hang, of what is called `at`, unless another such call is late: whoever tries again and again takes no more threads for that.
///
/// # Errors
/// [`NoAnswer`].
pub(super) fn ask<T: Send + 'static>(
    at: &str,
    bound: Bound,
    act: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NoAnswer> {
    if let Some((since, _)) = locked(&LATE).get(at) {
        return Err(NoAnswer::late(bound.patience, *since));
    }
    let asked = Asked::on_a_thread(at, act).map_err(|e| NoAnswer::no_thread(&e))?;
    asked.wait(bound).map_err(|why| match why {
        RecvTimeoutError::Timeout => NoAnswer::late(bound.patience, asked.begun),
        RecvTimeoutError::Disconnected => NoAnswer::ended(),
    })
}

/// What is lent to the thread of each call.
pub(super) struct Lent<P: Send + 'static> {
    opened_as: String,
    patience: Duration,
    place: Where<P>,
}

enum Where<P> {
    Here(P),
    /// A thread has it since then, and gives it back.
    Away(Instant, Receiver<P>),
    /// Its thread has panicked.
    Lost,
}

impl<P: Send + 'static> Lent<P> {
    /// `opened_as`: what it was called when it was opened. To close it takes `patience` at most.
    pub(super) fn new(place: P, opened_as: String, patience: Duration) -> Lent<P> {
        Lent { opened_as, patience, place: Where::Here(place) }
    }

    /// It, if it is not away.
    fn take(&mut self) -> Result<P, NoAnswer> {
        match std::mem::replace(&mut self.place, Where::Lost) {
            Where::Here(place) => Ok(place),
            Where::Lost => Err(NoAnswer::ended()),
            Where::Away(since, back) => match back.try_recv() {
                Ok(place) => Ok(place),
                Err(TryRecvError::Disconnected) => Err(NoAnswer::ended()),
                Err(TryRecvError::Empty) => {
                    self.place = Where::Away(since, back);
                    Err(NoAnswer::late(self.patience, since))
                }
            },
        }
    }

    /// Gives it up for good, unless it is away.
    pub(super) fn give(&mut self) -> Option<P> {
        self.take().ok()
    }

    /// A call that nobody waits for has it.
    pub(super) fn is_away(&mut self) -> bool {
        match self.take() {
            Ok(place) => {
                self.place = Where::Here(place);
                false
            }
            Err(_) => matches!(self.place, Where::Away(..)),
        }
    }

    /// Has it called; `seen` sees it when it is back.
    ///
    /// # Errors
    /// [`NoAnswer`].
    pub(super) fn ask<T: Send + 'static>(
        &mut self,
        bound: Bound,
        act: impl FnOnce(&mut P) -> T + Send + 'static,
        seen: impl FnOnce(&P),
    ) -> Result<T, NoAnswer> {
        // It is here still where there is no thread to be had.
        let here = Arc::new(Mutex::new(Some(self.take()?)));
        let (give, back) = mpsc::channel();
        let taken = here.clone();
        let run = move || {
            let mut place = locked(&taken).take()?;
            let said = act(&mut place);
            // (Before it is told: then it is here again.)
            let _ = give.send(place);
            Some(said)
        };
        self.place = Where::Away(Instant::now(), back);
        let asked = match Asked::on_a_thread(&self.opened_as, run) {
            Ok(asked) => asked,
            Err(error) => {
                self.place = locked(&here).take().map_or(Where::Lost, Where::Here);
                return Err(NoAnswer::no_thread(&error));
            }
        };
        match asked.wait(bound) {
            Ok(Some(said)) => {
                let place = self.take()?;
                seen(&place);
                self.place = Where::Here(place);
                Ok(said)
            }
            Err(RecvTimeoutError::Timeout) => Err(NoAnswer::late(bound.patience, asked.begun)),
            Ok(None) | Err(RecvTimeoutError::Disconnected) => {
                self.place = Where::Lost;
                Err(NoAnswer::ended())
            }
        }
    }
}

impl<P: Send + 'static> Drop for Lent<P> {
    /// To close it may take as long as any other call.
    fn drop(&mut self) {
        if let Where::Here(place) = std::mem::replace(&mut self.place, Where::Lost)
            && let Ok(asked) = Asked::on_a_thread(&self.opened_as, move || drop(place))
        {
            let _ = asked.wait(Bound { patience: self.patience, changes: false });
        }
    }
}
