//! One thread: an epoll, some connections, its share of the trace.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_trace::Op;
use mio::{Events, Poll, Token};

use crate::ReplayError;
use crate::connection::{Connection, Flight, Kind, Received};
use crate::content::{Checked, HEADER, Values, push_key};
use crate::options::{Options, Order};
use crate::protocol::{Asked, Parsed, Reply, parse};
use crate::report::Tally;
use crate::source::{Item, Source, Taken};

/// Requests that wait in a worker's queues before it stops taking more.
const QUEUED: usize = 1 << 16;
/// A request larger than this is no memcached value (its own ceiling).
const MAX_VALUE: u64 = 1 << 30;

/// What is known of an object, to tell a stale value from a fresh one.
#[derive(Clone, Copy, Default)]
struct Known {
    /// The last version given out to a write or a delete.
    issued: u32,
    /// The version that the last acknowledged write or delete left.
    current: u32,
    /// A write failed or changed part of the value: any version passes until the next whole write.
    loose: bool,
}

/// Objects are hashes already.
#[derive(Default)]
struct Plain(u64);

impl Hasher for Plain {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(b);
        }
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = n;
    }
}

pub(crate) struct Worker {
    me: usize,
    options: Options,
    source: Arc<Source>,
    started: Instant,
    poll: Poll,
    connections: Vec<Connection>,
    /// Requests for any connection ([`Order::Any`]).
    shared: VecDeque<Item>,
    incoming: VecDeque<Item>,
    /// Requests of [`Worker::shared`], of the connections' queues and of [`Worker::fetching`].
    queued: usize,
    /// Objects of which a get, or the store after its miss, is under way, and what waits for its end.
    fetching: HashMap<u64, VecDeque<Item>, BuildHasherDefault<Plain>>,
    ended: bool,
    values: Values,
    known: HashMap<u64, Known, BuildHasherDefault<Plain>>,
    key: Vec<u8>,
    tally: Tally,
    /// Not yet added to the shared counters: completed, gets, hits, errors.
    unshown: [u64; 4],
}

impl Worker {
    pub(crate) fn new(
        me: usize,
        connections: usize,
        options: Options,
        source: Arc<Source>,
        started: Instant,
    ) -> Result<Worker, ReplayError> {
        let poll = Poll::new().map_err(ReplayError::Poll)?;
        let connections = (0..connections)
            .map(|i| {
                Connection::connect(&options.target, poll.registry(), Token(i)).map_err(|source| {
                    ReplayError::Connect { target: options.target.to_string(), source }
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Worker {
            me,
            options,
            source,
            started,
            poll,
            connections,
            shared: VecDeque::new(),
            incoming: VecDeque::new(),
            queued: 0,
            fetching: HashMap::default(),
            ended: false,
            values: Values::new(),
            known: HashMap::default(),
            key: Vec::new(),
            tally: Tally::default(),
            unshown: [0; 4],
        })
    }

    /// Runs to the end of the trace, or to the first failure that cannot be mended.
    pub(crate) fn run(mut self) -> (Tally, Result<(), ReplayError>) {
        let result = self.work();
        if result.is_err() {
            self.source.stop();
        }
        self.show();
        for c in &self.connections {
            self.tally.bytes_sent += c.sent;
            self.tally.bytes_received += c.received;
        }
        (self.tally, result)
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }

    fn work(&mut self) -> Result<(), ReplayError> {
        let mut events = Events::with_capacity(self.connections.len().clamp(16, 1024));
        let mut last_check = self.now();
        loop {
            let now = self.now();
            let mut wait = self.refill();
            let mut busy = false;
            for i in 0..self.connections.len() {
                if let Some(due) = self.pump(i, now)? {
                    // Times closer than the timer's grain are awaited in a loop.
                    let ahead = Duration::from_nanos(due.saturating_sub(now));
                    wait = wait.min(if ahead < Duration::from_millis(1) {
                        Duration::ZERO
                    } else {
                        ahead
                    });
                }
                busy |= !self.connections[i].flights.is_empty();
            }
            if !busy && self.queued == 0 && (self.ended || self.source.stopped()) {
                return Ok(());
            }
            if self.source.stopped() {
                return Ok(());
            }
            match self.poll.poll(&mut events, Some(wait)) {
                Ok(()) => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(ReplayError::Poll(e)),
            }
            for event in &events {
                let i = event.token().0;
                if event.is_readable() || event.is_read_closed() || event.is_error() {
                    self.receive(i)?;
                }
                if event.is_writable() {
                    self.flush(i)?;
                }
            }
            if self.unshown[0] >= 1000 || events.is_empty() {
                self.show();
            }
            let now = self.now();
            if now - last_check > 500_000_000 {
                last_check = now;
                self.check_timeouts(now)?;
            }
        }
    }

    fn show(&mut self) {
        let [completed, gets, hits, errors] = std::mem::take(&mut self.unshown);
        self.source.completed.fetch_add(completed, Ordering::Relaxed);
        self.source.gets.fetch_add(gets, Ordering::Relaxed);
        self.source.hits.fetch_add(hits, Ordering::Relaxed);
        self.source.errors.fetch_add(errors, Ordering::Relaxed);
    }

    /// Takes requests while a connection has nothing to do; returns how long to wait at most.
    fn refill(&mut self) -> Duration {
        const LONG: Duration = Duration::from_millis(100);
        if self.ended {
            return LONG;
        }
        loop {
            let starving = match self.options.order {
                Order::Any => self.shared.is_empty(),
                Order::Key => self
                    .connections
                    .iter()
                    .any(|c| c.queue.is_empty() && c.flights.len() < self.options.pipeline),
            };
            if !starving || self.queued >= QUEUED {
                return LONG;
            }
            match self.source.take(self.me, &mut self.incoming) {
                Taken::Some => {
                    self.queued += self.incoming.len();
                    match self.options.order {
                        Order::Any => self.shared.append(&mut self.incoming),
                        Order::Key => {
                            let n = self.connections.len() as u64;
                            for item in self.incoming.drain(..) {
                                let i = (item.object & 0xffff_ffff) % n;
                                self.connections[i as usize].queue.push_back(item);
                            }
                        }
                    }
                }
                Taken::Later => return Duration::from_millis(1),
                Taken::End => {
                    self.ended = true;
                    return LONG;
                }
            }
        }
    }

    /// Sends as many requests on connection `i` as it has room for. Returns the time of the next one if that has not
    /// come.
    fn pump(&mut self, i: usize, now: u64) -> Result<Option<u64>, ReplayError> {
        let mut due = None;
        let mut encoded = false;
        while self.connections[i].has_room(self.options.pipeline) {
            let queue = match self.options.order {
                Order::Any => &mut self.shared,
                Order::Key => &mut self.connections[i].queue,
            };
            let Some(item) = queue.front() else { break };
            let mut since = now;
            if let (Some(speed), Some(time)) = (self.options.speed, item.request.time) {
                since = (time.0 as f64 / speed) as u64;
                if since > now {
                    due = Some(since);
                    break;
                }
            }
            let Some(mut item) = queue.pop_front() else { break };
            if !item.held
                && let Some(waiting) = self.fetching.get_mut(&item.object)
            {
                self.tally.held_back += u64::from(item.counted);
                item.held = true;
                waiting.push_back(item);
                continue;
            }
            // What another request held back is late by the server's doing.
            if !item.held {
                self.source.lag.fetch_max(now - since, Ordering::Relaxed);
            }
            self.queued -= 1;
            self.send(i, item, since);
            encoded = true;
        }
        if encoded {
            self.flush(i)?;
        }
        Ok(due)
    }

    fn send(&mut self, i: usize, mut item: Item, since: u64) {
        let op = item.request.op;
        item.request.size = item.request.size.min(MAX_VALUE);
        let kind = match op {
            Op::Get | Op::Read => Kind::Get,
            Op::Delete | Op::Trim => Kind::Delete,
            Op::Touch | Op::Incr | Op::Decr => Kind::Other,
            _ => Kind::Set,
        };
        let mut version = 0;
        if self.tracks() && !matches!(kind, Kind::Get | Kind::Other) {
            // What the server holds of an object that this replay has not met is unknown until a write is acknowledged.
            let unmet = Known { loose: true, ..Known::default() };
            let known = self.known.entry(item.object).or_insert(unmet);
            known.issued = known.issued.wrapping_add(1);
            version = known.issued;
        }
        if item.counted && self.tally.first.is_none() {
            self.tally.first = Some(since);
        }
        if kind == Kind::Get && self.fetches() {
            self.fetching.entry(item.object).or_default();
        }
        let c = &mut self.connections[i];
        c.encode(&item, kind, version, self.options.key_prefix.as_bytes(), &self.values);
        c.flights.push_back(Flight { item, kind, since, version });
    }

    /// Whether an object is fetched by one get at a time, as by an application that fetches what it misses: what names the
    /// object meanwhile waits. With one request in flight on the key's connection nothing can meet.
    fn fetches(&self) -> bool {
        self.options.fill && (self.options.pipeline > 1 || self.options.order == Order::Any)
    }

    /// The fetch of this object has ended: what waited for it is next, in the order of the trace, up to the next get. What is
    /// behind that waits for it.
    fn fetched(&mut self, i: usize, object: u64) {
        let Some(waiting) = self.fetching.get_mut(&object) else { return };
        let get = waiting.iter().position(|w| matches!(w.request.op, Op::Get | Op::Read));
        let next: Vec<Item> = waiting.drain(..get.map_or(waiting.len(), |at| at + 1)).collect();
        if get.is_none() {
            self.fetching.remove(&object);
        }
        let queue = match self.options.order {
            Order::Any => &mut self.shared,
            Order::Key => &mut self.connections[i].queue,
        };
        for item in next.into_iter().rev() {
            queue.push_front(item);
        }
    }

    fn tracks(&self) -> bool {
        self.options.verify && self.options.order == Order::Key
    }

    fn flush(&mut self, i: usize) -> Result<(), ReplayError> {
        match self.connections[i].flush() {
            Ok(()) => Ok(()),
            Err(e) => self.reconnect(i, &format!("sending failed: {e}")),
        }
    }

    fn receive(&mut self, i: usize) -> Result<(), ReplayError> {
        loop {
            let received = match self.connections[i].receive() {
                Ok(received) => received,
                Err(e) => return self.reconnect(i, &format!("receiving failed: {e}")),
            };
            let now = self.now();
            if let Err(problem) = self.replies(i, now) {
                return self.reconnect(i, &problem);
            }
            match received {
                Received::Closed => return self.reconnect(i, "the server closed the connection"),
                Received::Drained => {
                    // Refills of objects that were missed wait in the buffer; new requests join them in one write.
                    self.pump(i, now)?;
                    return self.flush(i);
                }
                Received::Full => {}
            }
        }
    }

    /// Handles the whole replies that have come on connection `i`.
    fn replies(&mut self, i: usize, now: u64) -> Result<(), String> {
        loop {
            let c = &mut self.connections[i];
            let Some(flight) = c.flights.front() else {
                return if c.unparsed().is_empty() {
                    Ok(())
                } else {
                    Err("the server sent bytes that nothing asked for".to_owned())
                };
            };
            let asked = if flight.kind == Kind::Get { Asked::Get } else { Asked::Line };
            let bytes = c.unparsed();
            if bytes.len() < c.need {
                return Ok(());
            }
            match parse(bytes, asked) {
                Parsed::Need(n) => {
                    c.need = n;
                    return Ok(());
                }
                Parsed::Garbage(found) => {
                    return Err(format!("the server sent {found}, which is no reply"));
                }
                Parsed::Reply(reply, used) => {
                    let verified = match reply {
                        Reply::Hit { key, data } if self.options.verify => {
                            self.key.clear();
                            let r = &flight.item.request;
                            push_key(
                                &mut self.key,
                                self.options.key_prefix.as_bytes(),
                                r.app,
                                r.id,
                                r.key_bytes(),
                            );
                            let object = flight.item.object;
                            let known = self.known.get(&object).copied();
                            let (verdict, version) =
                                verify(&self.values, &self.key, key, data, object, known);
                            // The first sight of an object that an earlier run left there: no older one may follow.
                            if let (Order::Key, None, Some(v)) =
                                (self.options.order, known, version)
                            {
                                self.known
                                    .insert(object, Known { issued: v, current: v, loose: false });
                            }
                            Some(verdict)
                        }
                        _ => None,
                    };
                    let outcome = Outcome::of(reply);
                    if let (Reply::Error(line), None) = (reply, &self.tally.first_error) {
                        self.tally.first_error = Some(line.escape_ascii().to_string());
                    }
                    c.consume(used);
                    if let Some(flight) = c.flights.pop_front() {
                        self.complete(i, flight, outcome, verified, now);
                    }
                }
            }
        }
    }

    fn complete(
        &mut self,
        i: usize,
        flight: Flight,
        outcome: Outcome,
        verified: Option<Verdict>,
        now: u64,
    ) {
        let Flight { item, kind, since, version } = flight;
        let counted = item.counted;
        let t = &mut self.tally;
        self.unshown[0] += u64::from(kind != Kind::Fill);
        if counted {
            t.last = t.last.max(now);
            t.record(kind, outcome, item.request.op, now.saturating_sub(since));
        }
        match verified {
            Some(Verdict::Stale) => t.stale += 1,
            Some(Verdict::Damaged) => t.damaged += 1,
            Some(Verdict::Fresh) => t.verified += 1,
            None => {}
        }
        if outcome.is_error() {
            self.unshown[3] += 1;
        }
        if self.tracks() && matches!(kind, Kind::Set | Kind::Delete | Kind::Other) {
            self.acknowledge(&item, kind, outcome, version);
        }
        if kind == Kind::Fill && self.options.order == Order::Any {
            self.fetched(i, item.object);
        }
        if kind != Kind::Get {
            return;
        }
        self.unshown[1] += 1;
        let object = item.object;
        let mut stores = false;
        match outcome {
            Outcome::Hit(bytes) => {
                self.unshown[2] += 1;
                if counted {
                    self.tally.hit_bytes += bytes;
                    self.tally.asked_bytes += bytes;
                }
            }
            Outcome::Miss => {
                if counted {
                    self.tally.asked_bytes += item.request.size;
                }
                stores = self.fill(i, item, now);
            }
            _ => {}
        }
        // On the key's own connection what follows is behind the store; on another it could overtake it.
        if !(stores && self.options.order == Order::Any) {
            self.fetched(i, object);
        }
    }

    /// Stores a missed object with its recorded size, unless a write or a delete of it is on its way already: the store
    /// would undo it. Returns whether it is stored.
    fn fill(&mut self, i: usize, item: Item, now: u64) -> bool {
        if !self.options.fill || item.request.size == 0 {
            return false;
        }
        let overtaken = self.connections[i]
            .flights
            .iter()
            .any(|f| f.item.object == item.object && !matches!(f.kind, Kind::Get | Kind::Fill));
        if overtaken {
            return false;
        }
        let version = self.known.get(&item.object).map_or(0, |k| k.current);
        let c = &mut self.connections[i];
        c.encode(&item, Kind::Fill, version, self.options.key_prefix.as_bytes(), &self.values);
        c.flights.push_back(Flight { item, kind: Kind::Fill, since: now, version });
        true
    }

    fn acknowledge(&mut self, item: &Item, kind: Kind, outcome: Outcome, version: u32) {
        let known = self.known.entry(item.object).or_default();
        match (kind, outcome) {
            (Kind::Delete, Outcome::Done | Outcome::Refused) => {
                known.current = version;
                known.loose = false;
            }
            (Kind::Set, Outcome::Done) => {
                known.current = version;
                known.loose = matches!(item.request.op, Op::Append | Op::Prepend);
            }
            (Kind::Other, Outcome::Done) if item.request.op != Op::Touch => known.loose = true,
            (Kind::Set | Kind::Delete, o) if o.is_error() => known.loose = true,
            _ => {}
        }
    }

    /// Counts what was in flight as lost and connects anew, a few times over.
    fn reconnect(&mut self, i: usize, why: &str) -> Result<(), ReplayError> {
        let old = &mut self.connections[i];
        let lost = old.flights.len() as u64;
        self.tally.connections_lost += 1;
        self.tally.requests_lost += lost;
        self.tally.first_error.get_or_insert_with(|| why.to_owned());
        self.unshown[3] += lost.max(1);
        self.tally.bytes_sent += old.sent;
        self.tally.bytes_received += old.received;
        for flight in &old.flights {
            // Whether it was done is not known.
            if self.options.verify {
                self.known.entry(flight.item.object).or_default().loose = true;
            }
        }
        let fetches: Vec<u64> = old
            .flights
            .iter()
            .filter(|f| match f.kind {
                Kind::Get => true,
                Kind::Fill => self.options.order == Order::Any,
                _ => false,
            })
            .map(|f| f.item.object)
            .collect();
        for object in fetches {
            self.fetched(i, object);
        }
        let queue = std::mem::take(&mut self.connections[i].queue);
        let mut attempt = 0;
        loop {
            match Connection::connect(&self.options.target, self.poll.registry(), Token(i)) {
                Ok(mut fresh) => {
                    fresh.queue = queue;
                    self.connections[i] = fresh;
                    return Ok(());
                }
                Err(_) if attempt < 5 && !self.source.stopped() => {
                    attempt += 1;
                    std::thread::sleep(Duration::from_millis(50 << attempt));
                }
                Err(source) => {
                    return Err(ReplayError::Connect {
                        target: self.options.target.to_string(),
                        source: std::io::Error::new(
                            source.kind(),
                            format!("{why}, and connecting again: {source}"),
                        ),
                    });
                }
            }
        }
    }

    fn check_timeouts(&mut self, now: u64) -> Result<(), ReplayError> {
        let limit = self.options.timeout.as_nanos() as u64;
        for i in 0..self.connections.len() {
            let late = self.connections[i]
                .flights
                .front()
                .is_some_and(|f| now.saturating_sub(f.since) > limit);
            // A timed replay counts from when a request should have been sent, which may be long ago.
            if late && self.options.speed.is_none() {
                self.reconnect(i, &format!("no reply for {} s", self.options.timeout.as_secs()))?;
            }
        }
        Ok(())
    }
}

/// A reply without its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Hit(u64),
    Miss,
    Done,
    Refused,
    TooLarge,
    OutOfMemory,
    NotNumeric,
    Error,
}

impl Outcome {
    fn of(reply: Reply<'_>) -> Outcome {
        match reply {
            Reply::Hit { data, .. } => Outcome::Hit(data.len() as u64),
            Reply::Miss => Outcome::Miss,
            Reply::Done => Outcome::Done,
            Reply::Refused => Outcome::Refused,
            Reply::TooLarge => Outcome::TooLarge,
            Reply::OutOfMemory => Outcome::OutOfMemory,
            Reply::NotNumeric => Outcome::NotNumeric,
            Reply::Error(_) => Outcome::Error,
        }
    }

    pub(crate) fn is_error(self) -> bool {
        matches!(
            self,
            Outcome::TooLarge | Outcome::OutOfMemory | Outcome::NotNumeric | Outcome::Error
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Fresh,
    Stale,
    Damaged,
}

/// Judges a value that came back; `known` is what it must be, where that is known. Returns the version it carries.
fn verify(
    values: &Values,
    expected_key: &[u8],
    key: &[u8],
    data: &[u8],
    object: u64,
    known: Option<Known>,
) -> (Verdict, Option<u32>) {
    if key != expected_key {
        return (Verdict::Damaged, None);
    }
    // Appended to, incremented, or of unknown outcome: the bytes are no longer predictable.
    if known.is_some_and(|k| k.loose) {
        return (Verdict::Fresh, None);
    }
    match (values.check(data, object, known.map_or(0, |k| k.current)), known) {
        // Too short to carry a version, and none is known.
        (Checked::Damaged, None) if data.len() < HEADER => (Verdict::Fresh, None),
        (Checked::Damaged, _) => (Verdict::Damaged, None),
        (Checked::Fits, _) => (Verdict::Fresh, None),
        (Checked::Version(v), None) => (Verdict::Fresh, Some(v)),
        (Checked::Version(v), Some(k)) if v == k.current => (Verdict::Fresh, Some(v)),
        (Checked::Version(_), Some(_)) => (Verdict::Stale, None),
    }
}
