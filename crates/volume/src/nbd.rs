//! An export of an NBD server.
//!
//! A session has connections of its own, with many requests under way on each; a server that does not say
//! `CAN_MULTI_CONN` gets one connection in all, kept by a thread that the sessions share (`connection_pool`). A connection that
//! breaks, or is silent for too long, is made anew and its requests sent again. Meanwhile requests wait.
//!
//! **What a lost connection may have taken with it.** A server that was killed may have lost writes that it had answered
//! and not yet made durable. Who comes back cannot be asked. So if there were such writes, the loss is counted (`ledger`), and
//! so it is when a flush fails: the next flush of every client that was there fails, once, and says why. A client that was told
//! that its flush succeeded must find its data. What is cached of such writes is dropped before that.
//!
//! **A server that stops** refuses requests with `ESHUTDOWN` and waits for its connections to end: they end (`stops`), and
//! what was refused waits for the next server, as with a connection that broke. Where nobody asks it anything, a session that has a
//! connection reads a few bytes every [`QUIET`], and so hears of it; a session that nobody polls has none then ([`Session::rest`]).
//!
//! **A server that offers no FLUSH**, and is followed by one that does: if that is the same export as far as is known, it is flushed from
//! then on. What was written to it before counts as a loss. Where the operator vouches for what it has answered it may offer
//! FLUSH and FUA or not: it is never flushed.
//!
//! **A server that hangs** takes connections and answers nothing. One that was silent for too long counts as lost until it has
//! answered a request; with nobody there to ask it something, a session reads a few bytes of it.
//!
//! **An export that grows.** A connection knows the size that it was told when it was made. Asked to ([`Backing::resize`]),
//! the store looks how large the export is by now, over a connection of its own, and each of its sessions makes its
//! connections anew before it asks for anything else. An export that is found to have another size without that is taken for
//! another export.

mod connection_pool;
mod link;
mod stops;
#[cfg(test)]
mod tests;
mod words;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_runtime::AlignedBuf;
use mio::event::Event;
use mio::{Events, Poll, Registry, Token};
use parking_lot::{Mutex, MutexGuard};

use super::emulation::Steps;
use super::ledger::Ledger;
use super::peer::{Peer, Place};
use super::{
    Backing, BackingError, Capabilities, Flushing, Identity, OpenOptions, Session, StoreTrouble,
    TOKENS, Timeouts, Uri,
};
use crate::op::{Done, Failure, FailureKind, Op};
use connection_pool::Hub;
use larder_nbd::client::Negotiated;
use larder_nbd::wire::transmission;
use link::{Link, News, STOPPING};
use stops::Stops;
#[cfg(test)]
pub(crate) use tests::{Manner, Server, locked};

/// Connections of one session, where the server takes several.
const LINKS: usize = 2;
/// Requests go by the first connection that has no more than this under way, bytes: on one, many small ones are sent and
/// answered with a system call each way. Long ones are spread, so that they are copied side by side.
const FILLED: usize = 128 << 10;
/// The most connections of one session.
const MAX_LINKS: usize = TOKENS;
/// Events taken at once.
const EVENTS: usize = 16;
/// First and longest pause between tries to connect.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// The engine asks for up to this at once; a server that takes less cannot be used.
const LEAST_MAXIMUM: u32 = 1 << 20;
/// The token of a flush that no client asked for: before a connection is made anew.
const RENEWAL: u64 = u64::MAX;
/// That of a read that no client asked for: whether a server that hung answers again.
const PROBE: u64 = u64::MAX - 1;
/// Bytes of it: no server insists on more.
const PROBED: usize = 512;
/// A server that has a connection is asked something so often at least.
const QUIET: Duration = Duration::from_secs(5);
/// For a server that may offer FLUSH by now to say so.
const GLANCE: Duration = Duration::from_secs(1);

/// What sessions of one store share.
#[derive(Debug)]
struct Store {
    uri: String,
    peer: Peer,
    /// See [`Backing::place`].
    key: String,
    /// With the first contact; its size is that of then.
    negotiated: Negotiated,
    /// Bytes: the export may grow. A connection that was made before keeps the size that it was told, and is made anew.
    size: AtomicU64,
    timeout: Timeouts,
    /// The operator vouches for what it has answered.
    durable: bool,
    /// FLUSH is offered: a later server may, where the first did not.
    flushes: AtomicBool,
    ledger: Ledger,
    reach: Reach,
    stops: Stops,
    heard: Heard,
    /// See [`Backing::abandon`].
    abandoned: AtomicBool,
}

impl Store {
    fn size(&self) -> u64 {
        self.size.load(Ordering::SeqCst)
    }

    fn flush(&self) -> Flushing {
        match (self.durable, self.flushes.load(Ordering::SeqCst)) {
            (true, _) => Flushing::Needless,
            (false, true) => Flushing::Offered,
            (false, false) => Flushing::Missing,
        }
    }

    /// What the server cannot do that it could, but for the size. One that need not be flushed need not offer that.
    fn can_do_less(&self, now: &Negotiated) -> Option<&'static str> {
        let first = &self.negotiated;
        let flushing = transmission::SEND_FLUSH | transmission::SEND_FUA;
        let flags = match self.flush() {
            Flushing::Needless => first.flags & !flushing,
            Flushing::Offered => first.flags | transmission::SEND_FLUSH,
            Flushing::Missing => first.flags,
        };
        let lacks = flags & !now.flags;
        let blocks = (now.block.minimum, now.block.maximum);
        if lacks & transmission::SEND_FLUSH != 0 {
            Some("it does not offer FLUSH any more")
        } else if lacks != 0 {
            Some("it does not offer all commands that it did")
        } else if now.allocation.is_none() && first.allocation.is_some() {
            Some("it does not tell holes from data any more")
        } else if blocks.0 > first.block.minimum || blocks.1 < first.block.maximum {
            Some("it does not take all lengths of requests that it did")
        } else {
            None
        }
    }

    /// Why what answers now is not the export that it was, as far as that is known.
    fn is_another(&self, now: &Negotiated) -> Option<String> {
        let (was, size) = (self.size(), now.size);
        if size != was {
            let grown = match size > was {
                true => " (if it has grown, say so with larder block resize)",
                false => "",
            };
            return Some(format!(
                "the export is another one now: {size} bytes instead of {was}{grown}"
            ));
        }
        self.can_do_less(now).map(|less| format!("the export can do less than it could: {less}"))
    }

    /// The same export is there as far as is known: it may offer FLUSH by now.
    fn meets(&self, now: &Negotiated) {
        if self.flush() == Flushing::Missing && now.has(transmission::SEND_FLUSH) {
            self.flushes.store(true, Ordering::SeqCst);
            tracing::info!(
                "backing store '{}': offers FLUSH now, which it did not, and is flushed from now on",
                self.uri
            );
            // No flush has covered what was written to it before, and none does.
            self.loses("there was no FLUSH until now: writes may be gone that it had answered");
        }
    }

    /// What it has answered and not made durable may be gone.
    fn loses(&self, why: &str) {
        if self.ledger.lost() {
            tracing::error!("backing store '{}': {why}", self.uri);
        }
    }
}

/// When something was last heard of the server, by any session, or it was last asked whether it is there.
#[derive(Debug)]
struct Heard {
    begun: Instant,
    /// Milliseconds since then.
    last: AtomicU64,
}

impl Default for Heard {
    fn default() -> Heard {
        Heard { begun: Instant::now(), last: AtomicU64::new(0) }
    }
}

impl Heard {
    fn at(&self, now: Instant) {
        let since = now.saturating_duration_since(self.begun).as_millis() as u64;
        // (Not with each answer: all sessions have it in common.)
        if since >= self.last.load(Ordering::Relaxed) + 100 {
            self.last.store(since, Ordering::Relaxed);
        }
    }

    fn last(&self) -> Instant {
        self.begun + Duration::from_millis(self.last.load(Ordering::Relaxed))
    }
}

/// Whether the server is reached. What one session finds out holds for all.
#[derive(Debug, Default)]
struct Reach {
    /// Since when it is not, and why.
    lost: Mutex<Option<(Instant, String)>>,
    /// It was silent for too long: that it takes connections says nothing.
    hangs: AtomicBool,
}

impl Reach {
    fn state(&self) -> MutexGuard<'_, Option<(Instant, String)>> {
        self.lost.lock()
    }

    /// A session has no connection.
    fn lost(&self, why: &str, hangs: bool, now: Instant) {
        let mut state = self.state();
        self.hangs.fetch_or(hangs, Ordering::SeqCst);
        let since = state.as_ref().map_or(now, |s| s.0);
        *state = Some((since, why.to_owned()));
    }

    /// A session has one. How long there was none, if so; not where the server hangs.
    fn found(&self, now: Instant) -> Option<Duration> {
        let mut state = self.state();
        if self.hangs() {
            return None;
        }
        state.take().map(|s| now.saturating_duration_since(s.0))
    }

    /// It takes connections, perhaps, and had answered nothing when it was last heard of.
    fn hangs(&self) -> bool {
        self.hangs.load(Ordering::SeqCst)
    }

    /// It has answered a request. How long it had not, if it had hung.
    fn answered(&self, now: Instant) -> Option<Duration> {
        let mut state = self.state();
        let hung = self.hangs.swap(false, Ordering::SeqCst);
        state.take_if(|_| hung).map(|s| now.saturating_duration_since(s.0))
    }
}

/// See the [module](self).
pub struct NbdBacking {
    store: Arc<Store>,
    about: Capabilities,
    /// The one connection to a server that takes no more.
    hub: Option<Arc<Hub>>,
}

impl fmt::Debug for NbdBacking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NbdBacking").field("store", &self.store).finish_non_exhaustive()
    }
}

impl NbdBacking {
    /// Connects once, to learn what the export is.
    ///
    /// # Errors
    /// [`BackingError::Open`] when the server cannot be reached in time, or the export cannot be used.
    pub fn open(uri: &Uri, read_only: bool, timeout: Timeouts) -> Result<NbdBacking, BackingError> {
        NbdBacking::open_with(uri, &OpenOptions { read_only, timeout, ..OpenOptions::default() })
    }

    /// The same, with the operator's word that what it has answered is durable, if that is given.
    ///
    /// # Errors
    /// As [`NbdBacking::open`].
    pub fn open_with(uri: &Uri, options: &OpenOptions) -> Result<NbdBacking, BackingError> {
        let (read_only, timeout) = (options.read_only, options.timeout);
        let name = uri.to_string();
        let bad = |reason: String| BackingError::Open { uri: name.clone(), reason };
        let peer = Peer::of(uri).map_err(&bad)?;
        let peer = peer.ok_or_else(|| bad("is not an NBD server".into()))?;
        let negotiated = first_contact(&peer, timeout.connect).map_err(&bad)?;
        if negotiated.size == 0 {
            return Err(bad("the export is empty".into()));
        }
        if negotiated.read_only() && !read_only {
            return Err(bad("the export is read-only: attach it read-only".into()));
        }
        if negotiated.block.minimum > 512 {
            return Err(bad(format!(
                "the server insists on requests of whole {} bytes, and clients of NBD may use 512: export it without direct access",
                negotiated.block.minimum
            )));
        }
        if negotiated.block.maximum < LEAST_MAXIMUM {
            return Err(bad(format!(
                "the server takes requests of up to {} bytes, and {LEAST_MAXIMUM} are needed",
                negotiated.block.maximum
            )));
        }
        let flushes = negotiated.has(transmission::SEND_FLUSH);
        if !flushes && !options.durable && !read_only {
            tracing::warn!(
                "backing store '{name}' offers no FLUSH: nothing tells when what it has answered is durable"
            );
        }
        let about = Capabilities {
            size: negotiated.size,
            read_only,
            trim: negotiated.has(transmission::SEND_TRIM),
            fast_zero: true,
            status: negotiated.allocation.is_some(),
            // (The store says it anew.)
            flush: Flushing::Missing,
            minimum: negotiated.block.minimum,
            maximum: negotiated.block.maximum,
        };
        let shared = negotiated.has(transmission::CAN_MULTI_CONN) || read_only;
        let store = Arc::new(Store {
            uri: name.clone(),
            key: peer.key(),
            peer,
            size: AtomicU64::new(negotiated.size),
            negotiated,
            timeout,
            durable: options.durable,
            flushes: flushes.into(),
            ledger: Ledger::default(),
            reach: Reach::default(),
            stops: Stops::default(),
            heard: Heard::default(),
            abandoned: AtomicBool::new(false),
        });
        let hub = if shared {
            None
        } else {
            let session = NbdSession::new(store.clone(), 1).map_err(|e| bad(e.to_string()))?;
            Some(Arc::new(Hub::start(session).map_err(|e| bad(e.to_string()))?))
        };
        Ok(NbdBacking { store, about, hub })
    }
}

impl NbdBacking {
    /// A session with so many connections; with one in all, shared with other sessions, where the server takes no more.
    ///
    /// # Errors
    /// When there is no more to be had.
    pub fn session_over(&self, connections: usize) -> Result<Box<dyn Session>, BackingError> {
        let bad = |e: std::io::Error| BackingError::Open {
            uri: self.store.uri.clone(),
            reason: e.to_string(),
        };
        Ok(match &self.hub {
            None => {
                let links = connections.clamp(1, MAX_LINKS);
                Box::new(Steps::new(NbdSession::new(self.store.clone(), links).map_err(bad)?))
            }
            Some(hub) => Box::new(Steps::new(hub.session().map_err(bad)?)),
        })
    }
}

/// One connection, only to hear what is there. Of several addresses the first that answers is taken.
fn first_contact(peer: &Peer, timeout: Duration) -> Result<Negotiated, String> {
    let end = Instant::now() + timeout;
    let mut link = Link::new(Token(0));
    let mut tries = match &peer.place {
        Place::Addresses(list) => list.len(),
        Place::Socket(_) => 1,
    };
    loop {
        tries -= 1;
        match contact(&mut link, peer, end, timeout) {
            Err(_) if tries > 0 && Instant::now() < end => {}
            outcome => return outcome,
        }
    }
}

fn contact(
    link: &mut Link,
    peer: &Peer,
    end: Instant,
    timeout: Duration,
) -> Result<Negotiated, String> {
    let system = |e: std::io::Error| format!("cannot poll: {e}");
    let mut poll = Poll::new().map_err(system)?;
    let mut events = Events::with_capacity(8);
    let stops = Stops::default();
    link.connect(peer, poll.registry(), &stops, Instant::now())?;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(format!("no answer within {} s", timeout.as_secs_f32()));
        }
        poll.poll(&mut events, Some(left)).or_else(interrupted).map_err(system)?;
        for event in &events {
            link.ready(event);
        }
        let mut news = Vec::new();
        link.turn(Instant::now(), &stops, &mut news)?;
        for item in news {
            if let News::Ready(negotiated) = item {
                link.goodbye();
                return Ok(negotiated);
            }
        }
    }
}

fn interrupted(e: std::io::Error) -> std::io::Result<()> {
    if e.kind() == std::io::ErrorKind::Interrupted { Ok(()) } else { Err(e) }
}

impl Backing for NbdBacking {
    fn uri(&self) -> &str {
        &self.store.uri
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { size: self.store.size(), flush: self.store.flush(), ..self.about }
    }

    fn identity(&self) -> Result<Identity, BackingError> {
        Ok(Identity::Blind { name: self.store.uri.clone(), size: self.store.size() })
    }

    /// Asks the server, over a connection of its own, how large the export is by now. A server has no command by which it
    /// could be made larger.
    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        let store = &self.store;
        let bad = |reason: String| BackingError::Open { uri: store.uri.clone(), reason };
        let found = first_contact(&store.peer, store.timeout.connect)
            .map_err(|e| bad(format!("its size: {e}")))?;
        let (before, now) = (store.size(), found.size);
        if now < before {
            return Err(bad(format!("it had {before} bytes and has {now}: restore its size")));
        }
        let less = store.can_do_less(&found);
        let less =
            less.or((found.read_only() && !self.about.read_only).then_some("it is read-only"));
        if let Some(less) = less {
            return Err(bad(format!(
                "the export can do less than when it was attached ({less}): detach the volume and attach it again"
            )));
        }
        store.meets(&found);
        match bytes {
            Some(bytes) if bytes > now => Err(bad(format!(
                "the server exports {now} bytes: make the export larger there first"
            ))),
            Some(bytes) if bytes < now => Err(bad(format!(
                "it has {now} bytes already, more than {bytes}: say no size, or that"
            ))),
            _ => {
                store.size.store(now, Ordering::SeqCst);
                Ok(now)
            }
        }
    }

    fn place(&self) -> String {
        self.store.key.clone()
    }

    fn peer(&self) -> Option<Peer> {
        Some(self.store.peer.clone())
    }

    fn losses(&self) -> u64 {
        self.store.ledger.losses()
    }

    fn trouble(&self) -> Option<StoreTrouble> {
        let (since, why) = self.store.reach.state().clone()?;
        let what = format!("'{}' is not reached: {why}; requests wait", self.store.uri);
        Some(StoreTrouble { state: "lost", since, what })
    }

    /// Of a server that offered no FLUSH: whether the one that is there now does, if no session has a connection by which that would be heard.
    fn look_at_place(&self) {
        let (store, now) = (&self.store, Instant::now());
        let wanted = store.flush() == Flushing::Missing && !self.about.read_only;
        if !wanted || store.stops.has_connections() || now < store.heard.last() + QUIET {
            return;
        }
        store.heard.at(now);
        if let Ok(found) = first_contact(&store.peer, store.timeout.connect.min(GLANCE))
            && store.is_another(&found).is_none()
        {
            store.meets(&found);
        }
    }

    fn abandon(&self, abandoned: bool) {
        self.store.abandoned.store(abandoned, Ordering::SeqCst);
        if let Some(hub) = &self.hub {
            hub.wake();
        }
    }

    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        self.session_over(LINKS)
    }
}

/// A request that has no connection to go by.
#[derive(Debug)]
struct Waiting {
    token: u64,
    op: Op,
    /// It fails then.
    until: Option<Instant>,
}

/// A worker's connections.
struct NbdSession {
    store: Arc<Store>,
    /// Its own, for those who wait for its descriptor.
    poll: Poll,
    events: Events,
    /// Where the links are registered: with `poll`, or with that of whoever has it.
    registry: Registry,
    attached: bool,
    links: Vec<Link>,
    waiting: VecDeque<Waiting>,
    /// When requests fail that were sent to no avail before, by token: a server that takes connections and answers nothing is
    /// no store either.
    deadlines: BTreeMap<u64, Instant>,
    /// How many writes a flush under way covers, by token.
    covers: Vec<(u64, u64)>,
    ready: VecDeque<Done>,
    in_flight: usize,
    /// Why there is no connection.
    trouble: Option<String>,
    news: Vec<News>,
}

impl NbdSession {
    fn new(store: Arc<Store>, links: usize) -> std::io::Result<NbdSession> {
        let poll = Poll::new()?;
        Ok(NbdSession {
            store,
            registry: poll.registry().try_clone()?,
            poll,
            attached: false,
            events: Events::with_capacity(EVENTS),
            links: (0..links).map(|i| Link::new(Token(i))).collect(),
            waiting: VecDeque::new(),
            deadlines: BTreeMap::new(),
            covers: Vec::new(),
            ready: VecDeque::new(),
            in_flight: 0,
            trouble: None,
            news: Vec::new(),
        })
    }

    fn end(&mut self, token: u64, op: Op, outcome: crate::op::Outcome) {
        self.deadlines.remove(&token);
        let ledger = &self.store.ledger;
        if matches!(op, Op::Flush) {
            if let Some(at) = self.covers.iter().position(|c| c.0 == token) {
                let (_, covers) = self.covers.swap_remove(at);
                // One that the server was not asked for makes nothing durable.
                if self.store.flush() != Flushing::Missing {
                    self.flushed(covers, outcome.is_ok());
                }
            }
        } else if op.changes()
            && !op.is_durable()
            && outcome.is_ok()
            && self.store.flush() != Flushing::Needless
        {
            ledger.answered();
        }
        self.ready.push_back(Done { token, op, outcome });
    }

    /// A flush that was sent when `covers` writes had been answered has ended.
    fn flushed(&self, covers: u64, well: bool) {
        let ledger = &self.store.ledger;
        if well {
            ledger.flushed(covers);
        } else if ledger.lost() {
            tracing::error!(
                "backing store '{}': a flush failed: writes that it had answered may be gone",
                self.store.uri
            );
        }
    }

    /// What the server cannot do is answered here.
    fn not_offered(&self, op: &Op) -> Option<crate::op::Outcome> {
        let negotiated = &self.store.negotiated;
        let needed = match op {
            // Where it is missing, those who need it have been told so (`Capabilities::flush`).
            Op::Flush if self.store.flush() != Flushing::Offered => return Some(Ok(Vec::new())),
            Op::Trim { .. } => negotiated.has(transmission::SEND_TRIM),
            Op::WriteZeroes { fast, .. } => {
                negotiated.has(transmission::SEND_WRITE_ZEROES)
                    && (!fast || negotiated.has(transmission::SEND_FAST_ZERO))
            }
            Op::Status { .. } => negotiated.allocation.is_some(),
            _ => true,
        };
        (!needed)
            .then(|| Err(Failure::new(FailureKind::Unsupported, "the server does not offer it")))
    }

    fn until(&self, now: Instant) -> Option<Instant> {
        self.store.timeout.give_up.map(|timeout| now + timeout)
    }

    /// Sends what waits, if there is a connection.
    fn dispatch(&mut self, now: Instant) {
        let abandoned = self.store.abandoned.load(Ordering::SeqCst);
        let expired = |w: &Waiting| abandoned || w.until.is_some_and(|until| until <= now);
        while self.waiting.iter().any(expired) {
            let Some(at) = self.waiting.iter().position(expired) else { break };
            if let Some(Waiting { token, op, .. }) = self.waiting.remove(at) {
                let why = self.trouble.as_deref().unwrap_or("it does not answer");
                let text = format!("backing store '{}' cannot be reached: {why}", self.store.uri);
                self.end(token, op, Err(Failure::new(FailureKind::Failed, text)));
            }
        }
        while !self.waiting.is_empty() {
            let up =
                self.links.iter_mut().filter(|l| l.takes_requests() && !is_old(&self.store, l));
            let best = up.min_by_key(|link| link.load().saturating_sub(FILLED));
            let Some(link) = best else { break };
            if let Some(next) = self.waiting.pop_front() {
                link.submit(next.token, next.op, now);
            }
        }
    }

    /// A connection has gone: its requests wait for another.
    fn broke(&mut self, index: usize, reason: String, now: Instant) {
        let was_up = self.links[index].is_up();
        // One that stops may take connections until it has: whether it answers is to be seen.
        let hangs = self.links[index].is_silent(now, self.store.timeout) || reason == STOPPING;
        let left = self.links[index].down(&self.registry, now, PAUSE);
        if was_up {
            tracing::warn!("backing store '{}': connection lost: {reason}", self.store.uri);
            self.store.loses(
                "with the connection writes may be gone that it had answered and not made durable",
            );
        } else if self.trouble.as_ref() != Some(&reason) {
            tracing::warn!("backing store '{}': no connection: {reason}", self.store.uri);
        }
        if hangs || !self.links.iter().any(Link::is_up) {
            self.store.reach.lost(&reason, hangs, now);
        }
        self.trouble = Some(reason);
        let until = self.until(now);
        // They came before what waits already.
        for (token, op) in left.into_iter().rev() {
            if token == PROBE {
                continue;
            }
            if token == RENEWAL {
                self.covers.retain(|c| c.0 != RENEWAL);
                continue;
            }
            let until = until.map(|until| *self.deadlines.entry(token).or_insert(until));
            self.waiting.push_front(Waiting { token, op, until });
        }
    }

    /// Lets go of connections that know the export by a smaller size, as soon as nothing is under way on them: a server
    /// may refuse by them what lies behind. Where no other connection's flush covers what was written by one, it flushes
    /// first. Those go too that are to a server before the one that offers FLUSH.
    fn renew(&mut self, now: Instant) {
        for link in &mut self.links {
            if !link.takes_requests() || !is_old(&self.store, link) || !link.is_idle() {
                continue;
            }
            if self.store.flush() == Flushing::Offered && !link.flushes() {
                self.store.loses("its server offers no FLUSH, and another follows that does");
                link.goodbye();
                continue;
            }
            let negotiated = &self.store.negotiated;
            let apart = !negotiated.has(transmission::CAN_MULTI_CONN)
                && self.store.flush() == Flushing::Offered;
            if apart && self.store.ledger.is_owed() {
                self.covers.push((RENEWAL, self.store.ledger.covers()));
                link.submit(RENEWAL, Op::Flush, now);
            } else {
                link.goodbye();
            }
        }
    }

    /// A flush that no client asked for has ended.
    fn renewed(&mut self, outcome: &crate::op::Outcome) {
        let Some(at) = self.covers.iter().position(|c| c.0 == RENEWAL) else { return };
        let (_, covers) = self.covers.swap_remove(at);
        self.flushed(covers, outcome.is_ok());
    }

    fn connect(&mut self, now: Instant) {
        for index in 0..self.links.len() {
            if !self.links[index].wants_connection(now) {
                continue;
            }
            // Further connections only where there is something to do for them.
            if index > 0 && self.in_flight == 0 {
                continue;
            }
            let store = self.store.clone();
            let link = &mut self.links[index];
            if let Err(e) = link.connect(&store.peer, &self.registry, &store.stops, now) {
                self.broke(index, e, now);
            }
        }
    }

    /// The server answers, which had hung.
    fn answers(&mut self, now: Instant) {
        self.trouble = None;
        if let Some(gone) = self.store.reach.answered(now) {
            tracing::info!(
                "backing store '{}': answers again, after {:.1} s",
                self.store.uri,
                gone.as_secs_f64()
            );
        }
    }

    /// The connection by which the server is to be asked something, since nobody asks it anything, and when: one that hung is asked whether it answers
    /// again, another whether it stops.
    fn to_probe(&self) -> Option<(usize, Instant)> {
        let abandoned = self.store.abandoned.load(Ordering::SeqCst);
        if abandoned || self.in_flight > 0 || !self.links.iter().all(Link::is_idle) {
            return None;
        }
        let index = self.links.iter().position(Link::takes_requests)?;
        let at = match (self.trouble.is_some(), self.store.reach.hangs()) {
            (true, true) => self.links[index].heard()?,
            // (Also where another of its connections was lost: a server that stops takes no new one, and waits for this one.)
            _ => self.store.heard.last() + QUIET,
        };
        Some((index, at))
    }

    fn probe(&mut self, now: Instant) {
        if let Some((index, _)) = self.to_probe().filter(|(_, at)| *at <= now) {
            self.store.heard.at(now);
            let len = PROBED.min(self.links[index].size() as usize);
            let probe = Op::Read { offset: 0, buf: AlignedBuf::zeroed(len) };
            self.links[index].submit(PROBE, probe, now);
        }
    }

    fn links_turn(&mut self, now: Instant) {
        for index in 0..self.links.len() {
            let mut news = std::mem::take(&mut self.news);
            let result = self.links[index].turn(now, &self.store.stops, &mut news);
            if !news.is_empty() {
                self.store.heard.at(now);
            }
            for item in news.drain(..) {
                if matches!(item, News::Done(_)) && self.store.reach.hangs() {
                    self.answers(now);
                }
                match item {
                    News::Done(Done { token: PROBE, .. }) => {}
                    News::Done(Done { token: RENEWAL, outcome, .. }) => self.renewed(&outcome),
                    News::Done(Done { token, op, outcome }) => self.end(token, op, outcome),
                    News::Ready(negotiated) => {
                        if let Some(why) = self.store.is_another(&negotiated) {
                            self.broke(index, why, now);
                            continue;
                        }
                        self.store.meets(&negotiated);
                        self.links[index].up(&negotiated, self.store.durable);
                        if self.store.reach.hangs() {
                            // Whether it answers again is to be seen.
                            continue;
                        }
                        let had_trouble = self.trouble.take().is_some();
                        if let Some(gone) = self.store.reach.found(now) {
                            tracing::info!(
                                "backing store '{}': connected again, after {:.1} s",
                                self.store.uri,
                                gone.as_secs_f64()
                            );
                        } else if had_trouble {
                            tracing::info!("backing store '{}': connected", self.store.uri);
                        }
                    }
                }
            }
            self.news = news;
            let timeout = self.store.timeout;
            let result = result.and_then(|()| self.links[index].check(now, timeout));
            if let Err(reason) = result {
                self.broke(index, reason, now);
            }
        }
    }
}

impl Session for NbdSession {
    fn fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }

    fn attach(&mut self, registry: &Registry, first: usize) -> std::io::Result<()> {
        self.registry = registry.try_clone()?;
        self.attached = true;
        self.links = (0..self.links.len()).map(|i| Link::new(Token(first + i))).collect();
        Ok(())
    }

    fn detach(&mut self, _registry: &Registry) {
        self.links.iter_mut().for_each(Link::goodbye);
    }

    fn ready(&mut self, at: usize, event: &Event, now: Instant) {
        if let Some(link) = self.links.get_mut(at) {
            link.ready(event);
        }
        self.turn(now);
    }

    fn submit(&mut self, token: u64, op: Op) {
        self.in_flight += 1;
        if matches!(op, Op::Flush) {
            self.covers.push((token, self.store.ledger.covers()));
        }
        if let Some(outcome) = self.not_offered(&op) {
            self.end(token, op, outcome);
            return;
        }
        self.waiting.push_back(Waiting { token, op, until: None });
    }

    fn flush(&mut self, now: Instant) {
        if self.waiting.iter().any(|w| w.until.is_none()) {
            let until = self.until(now);
            self.waiting.iter_mut().for_each(|w| w.until = w.until.or(until));
        }
        if self.store.abandoned.load(Ordering::SeqCst) {
            for index in 0..self.links.len() {
                if !self.links[index].is_idle() {
                    self.broke(index, "nothing of it is waited for any more".into(), now);
                }
            }
        } else {
            self.renew(now);
            self.connect(now);
        }
        self.dispatch(now);
        // Sends; and a connection on this machine may be there at once.
        self.links_turn(now);
        self.dispatch(now);
        self.probe(now);
        for index in 0..self.links.len() {
            self.links[index].send();
            if let Err(reason) = self.links[index].watch(&self.registry) {
                self.broke(index, reason, now);
            }
        }
    }

    fn turn(&mut self, now: Instant) {
        while !self.attached {
            let polled = self.poll.poll(&mut self.events, Some(Duration::ZERO));
            if let Err(e) = polled.or_else(interrupted) {
                tracing::error!("backing store '{}': cannot poll: {e}", self.store.uri);
                return;
            }
            let mut count = 0;
            for event in &self.events {
                count += 1;
                if let Some(link) = self.links.get_mut(event.token().0) {
                    link.ready(event);
                }
            }
            // No more than fit at once: asking again would be one system call for nothing.
            if count < EVENTS {
                break;
            }
        }
        self.links_turn(now);
        self.flush(now);
    }

    fn pop(&mut self) -> Option<Done> {
        let done = self.ready.pop_front()?;
        self.in_flight -= 1;
        Some(done)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn wake_at(&self) -> Option<Instant> {
        let timeout = self.store.timeout;
        if self.in_flight == 0 {
            // (Nobody waits for one that is abandoned.)
            if self.store.abandoned.load(Ordering::SeqCst) {
                return None;
            }
            if let Some((_, at)) = self.to_probe() {
                return Some(at);
            }
            if self.trouble.is_none() {
                // What is under way is a question whether it is there.
                let busy = self.links.iter().filter(|link| !link.is_idle());
                return busy.filter_map(|link| link.wake_at(timeout)).min();
            }
            // One that was lost is looked for, so that it is known when it is there again.
            let further = self.links.iter().skip(1).filter(|l| l.is_up());
            let links = self.links.iter().take(1).chain(further);
            return links.filter_map(|l| l.wake_at(timeout)).min();
        }
        let links = self.links.iter().filter_map(|l| l.wake_at(timeout));
        links.chain(self.waiting.iter().filter_map(|w| w.until)).min()
    }

    /// Connections by which nothing is asked go.
    fn rest(&mut self) {
        if self.in_flight == 0 && self.trouble.is_none() {
            self.links.iter_mut().filter(|link| link.is_idle()).for_each(Link::goodbye);
        }
    }

    fn native_fua(&self) -> bool {
        self.store.negotiated.has(transmission::SEND_FUA)
    }
}

/// A connection that was made before the export had grown, or to a server before the one that offers FLUSH.
fn is_old(store: &Store, link: &Link) -> bool {
    link.size() != store.size() || store.flush() == Flushing::Offered && !link.flushes()
}

impl Drop for NbdSession {
    fn drop(&mut self) {
        self.links.iter_mut().for_each(Link::goodbye);
    }
}
