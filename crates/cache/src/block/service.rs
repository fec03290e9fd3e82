//! What a worker does requests with.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Instant;

use larder_runtime::{AlignedBuf, Batch, Payload, Pile};
use mio::Registry;
use mio::event::Event;

use super::volume::Volume;
use larder_volume::{Session, TOKENS};

use larder_volume::op::{Done, Extent, Failure, FailureKind, Op, Outcome};

/// What a client asks of a volume. The range lies within it.
#[derive(Debug)]
pub enum Command {
    /// Fill the buffer, of the range's length.
    Read {
        /// First byte.
        offset: u64,
        /// As long as the range; contents unspecified.
        buf: AlignedBuf,
    },
    /// Write the buffer.
    Write {
        /// First byte.
        offset: u64,
        /// What to write.
        buf: AlignedBuf,
        /// Answer only once it is durable.
        fua: bool,
    },
    /// Make durable what has been answered.
    Flush,
    /// The range is no longer needed.
    Trim {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Answer only once it is durable.
        fua: bool,
    },
    /// The range shall read as zeroes.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Answer only once it is durable.
        fua: bool,
        /// A hole will do.
        may_punch: bool,
        /// Fail with [`FailureKind::Unsupported`] at once unless it is faster than writing zeroes.
        fast: bool,
    },
    /// The range will be read soon.
    Advise {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Which parts of the range are holes, and which read as zeroes.
    Status {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u32,
        /// One extent will do.
        one: bool,
    },
}

/// A request that has ended.
#[derive(Debug)]
pub struct Answer {
    /// What it was submitted under.
    pub ticket: u64,
    /// How it ended: the extents of a block status, nothing for others.
    pub outcome: Outcome,
    /// The buffer that came with it: filled, for a read that succeeded. A write's may come later, by
    /// [`Service::spent`], if it is still needed.
    pub buf: Option<AlignedBuf>,
    /// What was read, one after the other, in place of what is in the buffer; empty unless the service was told that it
    /// may [lend](Service::lend).
    pub lent: Vec<Payload>,
    /// Of a flush, or a change that is to be durable: how many losses of the store until now clients hear of, with nothing of them in the cache any more. Whoever answers a client
    /// asks [`Told::hear`](super::Told::hear) with it what to say.
    pub losses: Option<u64>,
}

impl Answer {
    /// Without data.
    pub fn new(ticket: u64, outcome: Outcome, buf: Option<AlignedBuf>) -> Answer {
        Answer { ticket, outcome, buf, lent: Vec::new(), losses: None }
    }
}

/// One worker's means to do requests. It is used on one thread, which watches the descriptors that the service
/// registers.
pub trait Service {
    /// Takes a request, whose range lies within the volume. Reads and writes of a device or store that many requests ask for are
    /// started a few at a time ([`Batch`]), others with the next [`Service::flush`].
    fn submit(&mut self, volume: &Arc<Volume>, ticket: u64, command: Command);

    /// A descriptor that it registered is ready.
    fn ready(&mut self, event: &Event, now: Instant);

    /// Starts what was submitted, and does what the time asks for. Called in each turn.
    fn flush(&mut self, now: Instant);

    /// The next request that has ended.
    fn pop(&mut self) -> Option<Answer>;

    /// Reads may be answered with bytes that others have too ([`Answer::lent`]), which saves copying them. Not unless this was
    /// called.
    fn lend(&mut self) {}

    /// Nothing was asked for a while: memory that is kept for the next request may go. Returns how many bytes did.
    fn rest(&mut self) -> usize {
        0
    }

    /// A buffer that was kept beyond its request.
    fn spent(&mut self) -> Option<AlignedBuf> {
        None
    }

    /// [`Service::flush`] is wanted at this time even if nothing happens.
    fn wake_at(&self) -> Option<Instant>;
}

/// Requests go to the store as they are: no cache.
pub struct PassThrough {
    registry: Registry,
    first_token: usize,
    sessions: Vec<Box<dyn Session>>,
    /// By the volume's place in memory, which it keeps as long as it is in here.
    by_volume: BTreeMap<usize, (Arc<Volume>, usize)>,
    ended: Vec<Answer>,
    deferred: DeferredFree,
    /// Requests that are not started yet.
    piled: Pile,
}

impl PassThrough {
    /// Registers its descriptors there, from that token on.
    pub fn new(registry: Registry, first_token: usize) -> PassThrough {
        PassThrough {
            registry,
            first_token,
            sessions: Vec::new(),
            by_volume: BTreeMap::new(),
            ended: Vec::new(),
            deferred: DeferredFree::default(),
            piled: Pile::default(),
        }
    }

    /// The session on a volume's store, opened when it is first wanted.
    fn session(&mut self, volume: &Arc<Volume>) -> Result<usize, Failure> {
        let key = Arc::as_ptr(volume) as usize;
        if let Some((_, index)) = self.by_volume.get(&key) {
            return Ok(*index);
        }
        let failure = |text: String| Failure::new(FailureKind::Failed, text);
        let mut session = volume.backing().session().map_err(|e| failure(e.to_string()))?;
        let index = self.sessions.len();
        session
            .attach(&self.registry, self.first_token + index * TOKENS)
            .map_err(|e| failure(format!("a session's descriptor: {e}")))?;
        self.sessions.push(session);
        self.by_volume.insert(key, (volume.clone(), index));
        Ok(index)
    }
}

impl Service for PassThrough {
    fn submit(&mut self, volume: &Arc<Volume>, ticket: u64, command: Command) {
        let op = match command {
            Command::Read { offset, buf } => Op::Read { offset, buf },
            Command::Write { offset, buf, fua } => {
                Op::Write { offset, data: Payload::new(buf), fua }
            }
            Command::Flush => Op::Flush,
            Command::Trim { offset, len, fua } => Op::Trim { offset, len, fua },
            Command::WriteZeroes { offset, len, fua, may_punch, fast } => {
                Op::WriteZeroes { offset, len, fua, may_punch, fast }
            }
            Command::Status { offset, len, one } if volume.capabilities().status => {
                Op::Status { offset, len, one }
            }
            Command::Status { len, .. } => {
                let outcome = Ok(vec![Extent { len, hole: false, zero: false }]);
                self.ended.push(Answer::new(ticket, outcome, None));
                return;
            }
            Command::Advise { .. } => {
                self.ended.push(Answer::new(ticket, Ok(Vec::new()), None));
                return;
            }
        };
        match self.session(volume) {
            Ok(index) => {
                self.sessions[index].submit(ticket, op);
                if self.piled.is_full(Batch::BLOCKS.submit) {
                    self.flush(Instant::now());
                }
            }
            Err(failure) => {
                let buf = self.deferred.buffer(op);
                self.ended.push(Answer::new(ticket, Err(failure), buf));
            }
        }
    }

    fn ready(&mut self, event: &Event, now: Instant) {
        let at = event.token().0 - self.first_token;
        if let Some(session) = self.sessions.get_mut(at / TOKENS) {
            session.ready(at % TOKENS, event, now);
        }
    }

    fn flush(&mut self, now: Instant) {
        for session in &mut self.sessions {
            if session.wake_at().is_some_and(|at| at <= now) {
                session.turn(now);
            }
            session.flush(now);
        }
        self.piled.clear();
    }

    fn pop(&mut self) -> Option<Answer> {
        if let Some(answer) = self.ended.pop() {
            return Some(answer);
        }
        self.sessions.iter_mut().enumerate().find_map(|(index, session)| {
            let Done { token, op, outcome } = session.pop()?;
            let volume = || self.by_volume.values().find(|v| v.1 == index).map(|v| &v.0);
            if let Err(failure) = &outcome
                && let Some(volume) = volume()
            {
                volume.health().failed(volume.name(), failure, Instant::now());
            }
            let losses = op.is_durable().then(|| volume().map(|v| v.told())).flatten();
            let buf = self.deferred.buffer(op);
            Some(Answer { losses, ..Answer::new(token, outcome, buf) })
        })
    }

    fn spent(&mut self) -> Option<AlignedBuf> {
        self.deferred.pop()
    }

    fn wake_at(&self) -> Option<Instant> {
        self.sessions.iter().filter_map(|s| s.wake_at()).min()
    }
}

/// How many of those that were still needed are looked at each time.
const LOOKS: usize = 4;

/// Buffers that somebody still reads when their operation has ended: a connection to a store that has answered before
/// it had read all, a fill of the cache.
#[derive(Debug, Default)]
pub(crate) struct DeferredFree {
    list: VecDeque<Payload>,
}

impl DeferredFree {
    /// The buffer of an operation that has ended, unless it is still needed.
    pub(crate) fn buffer(&mut self, op: Op) -> Option<AlignedBuf> {
        match op {
            Op::Read { buf, .. } => Some(buf),
            Op::Write { data, .. } => self.payload(data),
            _ => None,
        }
    }

    /// The buffer of a payload, unless it is still needed.
    pub(crate) fn payload(&mut self, data: Payload) -> Option<AlignedBuf> {
        data.try_into_buf().map_err(|data| self.list.push_back(data)).ok()
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    /// One that is needed no longer.
    pub(crate) fn pop(&mut self) -> Option<AlignedBuf> {
        // They become free about in the order in which they came; the others are looked at another time.
        for _ in 0..self.list.len().min(LOOKS) {
            match self.list.pop_front()?.try_into_buf() {
                Ok(buf) => return Some(buf),
                Err(data) => self.list.push_back(data),
            }
        }
        None
    }
}

/// What a factory of services returns for the plain case.
///
/// # Errors
/// None: for servers, which ask for a result.
pub fn pass_through(_worker: usize, registry: Registry, token: usize) -> io::Result<PassThrough> {
    Ok(PassThrough::new(registry, token))
}
