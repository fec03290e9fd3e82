//! The device: its queues, and the requests on their way between a guest and the cache.
//!
//! One thread does all of it. A turn: wait; take what the queues have; start what the service has collected; answer what has
//! ended; tell the guest. Memory is bounded by the pool of buffers: a queue whose next request finds none waits.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use larder_runtime::{AlignedBuf, Batch, BufferPool, Pile};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rustix::net::SendFlags;
use slab::Slab;
use tracing::{debug, info, warn};
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::config::{MAX_QUEUES, SECTOR, Shape, feature};
use super::inflight::Inflight;
use super::memory::Shared;
use super::request::{self, Malformed, Parsed, Piece, What, status};
use super::ring::{Kept, Ring, Waiting};
use crate::cache::service::Command;
use crate::cache::service::{Answer, Service};
use crate::cache::{Told, Volume};
use crate::served::{FaceStatus, face};

/// Token of the waker.
pub(super) const WAKE: usize = usize::MAX;
pub(super) const LISTEN: usize = 0;
pub(super) const CONNECTION: usize = 1;
/// Tokens of the queues' kicks.
pub(super) const KICK: usize = 2;
/// The first token for the service.
pub(super) const SERVICE: usize = 1 << 40;
/// To the front end: the configuration space is another one (`VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`, protocol version 1, no
/// reply wanted, no payload). The protocol's crate has no call for it.
const CONFIG_CHANGED: [u8; 12] = [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
/// A front end that has said nothing for so long waits for no answer. One that does may hear of a change meanwhile, ask for the
/// space at once, and take the one answer for the other (QEMU 7.2 reads its channel while it waits).
pub(super) const QUIET: Duration = Duration::from_millis(200);
/// Queues that wait for memory are tried again after this.
const STARVED_RETRY: Duration = Duration::from_millis(5);

/// Counters of a device. They only grow, but for `connected`.
#[derive(Debug, Default)]
pub struct VhostCounters {
    /// Front ends connected now: none or one.
    pub connected: AtomicU64,
    /// Front ends ever.
    pub accepted: AtomicU64,
    /// Requests taken.
    pub requests: AtomicU64,
    /// Requests answered with an error of the store.
    pub failed: AtomicU64,
    /// Requests of a guest that were malformed or beyond the volume.
    pub refused: AtomicU64,
    /// Requests begun by an earlier front end or an earlier run, and done again.
    pub resumed: AtomicU64,
    /// What the front end has agreed on.
    pub state: Mutex<VhostState>,
}

impl face::Counted for VhostCounters {
    fn status(&self) -> FaceStatus {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        FaceStatus {
            face: "vhost-user-blk".into(),
            connected: load(&self.connected) > 0,
            queues: state.queues.into(),
            queue_size: state.queue_size.into(),
            features: feature::names(state.features).into_iter().map(str::to_owned).collect(),
            bytes: state.sectors * SECTOR,
            grows: state.told,
            requests: load(&self.requests),
            failed: load(&self.failed),
            refused: load(&self.refused),
            resumed: load(&self.resumed),
            ..FaceStatus::default()
        }
    }
}

/// What a front end has agreed on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostState {
    /// Queues that run.
    pub queues: u32,
    /// Descriptors of the largest of them.
    pub queue_size: u16,
    /// Of [`feature`].
    pub features: u64,
    /// It is told when the volume grows.
    pub told: bool,
    /// Sectors of 512 bytes, as the configuration space says.
    pub sectors: u64,
}

/// A request that has been handed to the service.
struct Ticket {
    ring: usize,
    head: u16,
    status: GuestAddress,
    memory: Kept,
    /// Where what was read goes.
    into: Vec<Piece>,
    /// Answers it waits for.
    parts: u32,
    failed: bool,
}

/// What the poll has said.
#[derive(Default)]
pub(super) struct Ready {
    pub woken: bool,
    pub accept: bool,
    pub connection: bool,
}

pub(super) struct Device<S> {
    pub(super) name: String,
    /// None while it is put aside, or has not come yet.
    pub(super) volume: Option<Arc<Volume>>,
    /// All its queues, and front ends one after the other, are one client: a guest that connects again has written before.
    told: Option<Told>,
    pub(super) shape: Shape,
    pub(super) counters: Arc<VhostCounters>,
    service: S,
    poll: Poll,
    events: Events,
    pool: BufferPool,
    pub(super) features: u64,
    pub(super) writeback: bool,
    /// Where the front end hears of changes, if it wants to.
    pub(super) channel: Option<OwnedFd>,
    /// When the front end has said something last.
    pub(super) heard: Instant,
    /// Sectors of the volume as the front end has read them last.
    pub(super) read_sectors: Option<u64>,
    /// It is to be told of the volume's size, unless it has read it.
    tell: bool,
    /// Something has been agreed on since that was last shown.
    pub(super) changed: bool,
    pub(super) shared: Shared,
    pub(super) rings: Vec<Ring>,
    pub(super) inflight: Option<Inflight>,
    pub(super) ready: Ready,
    tickets: Slab<Ticket>,
    /// Answered since the guest was last told.
    answered: Pile,
    now: Instant,
    /// A buffer came back since queues that wait for one were tried.
    freed: bool,
    /// The front end has gone, and there is nothing by which the next one knows what is answered: answers are dropped.
    orphaned: bool,
    complaints: u64,
}

impl<S: Service> Device<S> {
    pub(super) fn new(
        name: String,
        volume: Option<Arc<Volume>>,
        service: S,
        poll: Poll,
        buffer_bytes: usize,
    ) -> Device<S> {
        let of = |v: &Arc<Volume>| Shape::new(&v.capabilities(), v.preferred());
        let shape = volume.as_ref().map_or_else(Shape::none, of);
        // One request of the longest must always fit, whatever is asked for.
        let least = (shape.max_transfer as usize).next_power_of_two();
        Device {
            name,
            shape,
            told: volume.as_deref().map(Told::new),
            volume,
            counters: Arc::default(),
            service,
            poll,
            events: Events::with_capacity(128),
            pool: BufferPool::new(buffer_bytes.max(least)),
            features: 0,
            writeback: true,
            channel: None,
            heard: Instant::now(),
            read_sectors: None,
            tell: false,
            changed: true,
            shared: Shared::default(),
            rings: (0..MAX_QUEUES).map(|_| Ring::new()).collect(),
            inflight: None,
            ready: Ready::default(),
            tickets: Slab::new(),
            answered: Pile::default(),
            now: Instant::now(),
            freed: false,
            orphaned: false,
            complaints: 0,
        }
    }

    /// Whether a front end may come: the volume is there and stays.
    pub(super) fn serves(&self) -> bool {
        self.volume.as_ref().is_some_and(|v| !v.is_closing())
    }

    /// The volume is let go of, if it is put aside. (No front end is there any more.)
    pub(super) fn let_go(&mut self) {
        if self.volume.as_ref().is_some_and(|v| v.is_closed()) {
            self.volume = None;
        }
    }

    /// The volume has come back.
    pub(super) fn adopt(&mut self, volume: Arc<Volume>, preferred: u32) {
        self.shape = Shape::new(&volume.capabilities(), preferred);
        self.told = Some(Told::new(&volume));
        self.volume = Some(volume);
    }

    /// Waits for something to happen, and notes it.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        if let Err(e) = self.poll.poll(&mut self.events, timeout)
            && e.kind() != std::io::ErrorKind::Interrupted
        {
            warn!("{}: cannot poll: {e}", self.name);
            self.ready.woken = true;
        }
        self.now = Instant::now();
        for event in &self.events {
            match event.token().0 {
                WAKE => self.ready.woken = true,
                LISTEN => self.ready.accept = true,
                CONNECTION => self.ready.connection = true,
                token if token >= SERVICE => self.service.ready(event, self.now),
                token => {
                    if let Some(ring) = self.rings.get_mut(token - KICK) {
                        ring.kicked = true;
                    }
                }
            }
        }
    }

    /// How long there is nothing to do, if nothing happens.
    pub(super) fn timeout(&self) -> Option<Duration> {
        let running = || self.rings.iter().filter(|r| r.runs());
        let waiting = running().any(|r| r.waiting.is_some());
        if running().any(|r| r.waiting.is_none() && (r.kicked || !r.again.is_empty()))
            || (waiting && self.freed)
        {
            return Some(Duration::ZERO);
        }
        let retry = waiting.then(|| Instant::now() + STARVED_RETRY);
        let at = [retry, self.service.wake_at()].into_iter().flatten().min()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    /// Does what there is to do. With `take`, also takes what the queues offer.
    pub(super) fn run(&mut self, take: bool) {
        self.take_answers();
        self.freed = false;
        for index in 0..self.rings.len() {
            let ring = &self.rings[index];
            let work = ring.waiting.is_some() || (take && (ring.kicked || !ring.again.is_empty()));
            if ring.runs() && work {
                self.pull(index, take);
            }
        }
        self.service.flush(self.now);
        // What was there at once, in memory, is answered in the same turn.
        self.take_answers();
        self.tell_guest();
    }

    /// Tells the guest of all answers that there are.
    fn tell_guest(&mut self) {
        self.answered.clear();
        for ring in &mut self.rings {
            ring.tell(self.shared.memory());
        }
    }

    /// Requests taken and not answered, of one queue or all.
    pub(super) fn under_way(&self, ring: Option<usize>) -> u32 {
        match ring {
            Some(index) => self.rings[index].under_way,
            None => self.rings.iter().map(|r| r.under_way).sum(),
        }
    }

    /// Ends what has begun, of one queue or all, and takes nothing new. `until`: it does not wait longer.
    pub(super) fn drain(&mut self, ring: Option<usize>, until: Option<Instant>) {
        for (index, r) in self.rings.iter_mut().enumerate() {
            if ring.is_none_or(|wanted| wanted == index) {
                r.put_back();
            }
        }
        while self.under_way(ring) > 0 {
            self.run(false);
            if self.under_way(ring) == 0 || until.is_some_and(|at| Instant::now() >= at) {
                break;
            }
            let most = Duration::from_millis(50);
            self.wait(Some(self.timeout().unwrap_or(most).min(most)));
        }
    }

    /// The front end has gone. What it asked for is done, so that a later one cannot be overtaken by it.
    pub(super) fn hang_up(&mut self, until: Option<Instant>) {
        self.orphaned = self.inflight.is_none();
        self.drain(None, until);
        self.orphaned = false;
        for index in 0..self.rings.len() {
            self.forget(index);
        }
        self.shared = Shared::default();
        self.inflight = None;
        self.features = 0;
        self.writeback = true;
        self.channel = None;
        self.read_sectors = None;
        self.tell = false;
        self.changed = true;
    }

    /// For whoever asks for the status, if something is new.
    pub(super) fn show(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let running = || self.rings.iter().filter(|r| r.queue.ready());
        let state = VhostState {
            queues: running().count() as u32,
            queue_size: running().map(|r| r.size).max().unwrap_or(0),
            features: self.features,
            told: self.channel.is_some(),
            sectors: self.shape.sectors,
        };
        *self.counters.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Looks whether the volume has grown: then the configuration space says so, and the front end is told to read it.
    pub(super) fn look(&mut self) {
        let Some(volume) = &self.volume else { return };
        let (now, before) = (volume.capabilities().size / SECTOR, self.shape.sectors);
        if now > before {
            self.shape.sectors = now;
            self.tell = true;
            self.changed = true;
            info!("{}: the volume has grown from {before} to {now} sectors", self.name);
        }
        self.tell_size();
    }

    /// Tells the front end to read the configuration space, if it has not read of this size. One that connects again believes
    /// what it has read before, and one whose guest has not begun forgets what it is told: so it is told whenever queues begin
    /// to run too.
    fn tell_size(&mut self) {
        if !self.tell || self.now.duration_since(self.heard) < QUIET {
            return;
        }
        let Some(channel) = &self.channel else { return };
        self.tell = false;
        if self.read_sectors == Some(self.shape.sectors) {
            return;
        }
        // A front end that does not listen holds nobody up.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match rustix::net::send(channel, &CONFIG_CHANGED, flags) {
            Ok(n) if n == CONFIG_CHANGED.len() => {}
            told => {
                warn!("{}: the front end cannot be told of the volume's size: {told:?}", self.name);
                self.channel = None;
                self.changed = true;
            }
        }
    }

    /// A queue as it was at first.
    pub(super) fn forget(&mut self, index: usize) {
        self.unwatch(index);
        self.rings[index].reset();
    }

    /// Listens for kicks no more. The description lives on at the front end: closing our end of it is not enough.
    pub(super) fn unwatch(&mut self, index: usize) {
        if let Some(file) = self.rings[index].kick.take() {
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
        }
    }

    /// Listens for kicks.
    pub(super) fn watch(&mut self, index: usize) -> std::io::Result<()> {
        let Some(file) = &self.rings[index].kick else { return Ok(()) };
        let fd = std::os::fd::AsRawFd::as_raw_fd(file);
        self.poll.registry().register(&mut SourceFd(&fd), Token(KICK + index), Interest::READABLE)
    }

    pub(super) fn registry(&self) -> &mio::Registry {
        self.poll.registry()
    }

    /// Starts a queue whose parts are all there.
    pub(super) fn start(&mut self, index: usize) -> std::io::Result<()> {
        let invalid = |text: String| std::io::Error::new(std::io::ErrorKind::InvalidInput, text);
        let ring = &mut self.rings[index];
        if ring.queue.ready() {
            return Ok(());
        }
        if !ring.place(&self.shared) {
            return Err(invalid(format!("queue {index} is not in the shared memory")));
        }
        let memory = self.shared.memory().clone();
        ring.queue.set_event_idx(self.features & feature::EVENT_IDX != 0);
        ring.queue.set_ready(true);
        let used = ring.queue.used_idx(&*memory, Ordering::Acquire);
        let (true, Ok(used)) = (ring.queue.is_valid(&*memory), used) else {
            ring.queue.set_ready(false);
            return Err(invalid(format!("queue {index} is not in the shared memory")));
        };
        ring.queue.set_next_used(used.0);
        ring.queue.set_next_avail(ring.base);
        if let Some(inflight) = &self.inflight {
            if !inflight.covers(index, ring.size) {
                ring.queue.set_ready(false);
                return Err(invalid(format!("queue {index} has no room for requests under way")));
            }
            ring.again = inflight.recover(index, ring.size, used.0).into();
            // Everything up to there is either answered or about to be done again.
            ring.queue.set_next_avail(used.0.wrapping_add(ring.again.len() as u16));
        }
        if !ring.again.is_empty() {
            debug!("{}: queue {index}: {} requests are done again", self.name, ring.again.len());
            self.counters.resumed.fetch_add(ring.again.len() as u64, Ordering::Relaxed);
        }
        ring.broken = false;
        ring.kicked = true;
        self.tell = true;
        Ok(())
    }

    /// Takes what a queue offers, as far as there is memory, and as many as it has descriptors.
    fn pull(&mut self, index: usize, take: bool) {
        let memory = self.shared.memory().clone();
        let ring = &mut self.rings[index];
        if let Some(waiting) = ring.waiting.take()
            && !self.begin(index, waiting, &memory)
        {
            return;
        }
        if !take {
            return;
        }
        let ring = &mut self.rings[index];
        let mut left = ring.queue.size();
        let mut result = ring.queue.disable_notification(&*memory).map_err(|e| e.to_string());
        while result.is_ok() {
            if left == 0 {
                // Others have their turn; this one goes on in the next.
                return;
            }
            left -= 1;
            let ring = &mut self.rings[index];
            let resumed = ring.again.pop_front();
            let head = match resumed {
                Some(head) => Ok(Some(head)),
                None => ring.take(&memory),
            };
            let head = match head {
                Ok(Some(head)) => head,
                Ok(None) => match ring.queue.enable_notification(&*memory) {
                    Ok(true) => continue,
                    Ok(false) => {
                        ring.kicked = false;
                        return;
                    }
                    Err(e) => {
                        result = Err(e.to_string());
                        continue;
                    }
                },
                Err(e) => {
                    result = Err(e);
                    continue;
                }
            };
            if head >= ring.queue.size() {
                result = Err(format!("descriptor {head} is beyond the ring"));
                continue;
            }
            ring.under_way += 1;
            self.counters.requests.fetch_add(1, Ordering::Relaxed);
            let table = self.rings[index].table();
            match request::parse(&*memory, table, head, &self.shape) {
                Ok(parsed) => {
                    let resumed = resumed.is_some();
                    if !self.begin(index, Waiting { parsed, resumed }, &memory) {
                        return;
                    }
                }
                Err(e) => {
                    self.complain(index, &e);
                    self.finish(index, head, 0);
                }
            }
        }
        if let Err(why) = result {
            self.break_ring(index, &why);
        }
    }

    fn break_ring(&mut self, index: usize, why: &str) {
        warn!("{}: queue {index} is given up until it is reset: {why}", self.name);
        self.rings[index].fail();
    }

    /// Begins a request. `false`: it waits for memory.
    fn begin(&mut self, index: usize, waiting: Waiting, memory: &Kept) -> bool {
        let Waiting { parsed: Parsed { head, status: at, what }, resumed } = waiting;
        let len = match &what {
            What::Read { len, .. } | What::Write { len, .. } => Some(*len as usize),
            _ => None,
        };
        let mut buf = None;
        if let Some(len) = len {
            buf = self.pool.take(len);
            if buf.is_none() {
                let parsed = Parsed { head, status: at, what };
                self.rings[index].waiting = Some(Waiting { parsed, resumed });
                return false;
            }
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.begin(index, head);
        }
        // Without a flush, or with writeback switched off, what is answered is durable.
        let fua = !self.writeback || self.features & feature::FLUSH == 0;
        let mut commands: Vec<Command> = Vec::new();
        let mut ticket = Ticket {
            ring: index,
            head,
            status: at,
            memory: memory.clone(),
            into: Vec::new(),
            parts: 0,
            failed: false,
        };
        match (what, buf) {
            (What::Read { offset, into, .. }, Some(buf)) => {
                ticket.into = into;
                commands.push(Command::Read { offset, buf });
            }
            (What::Write { offset, from, .. }, Some(mut buf)) => {
                match request::copy_in(&**memory, &from, &mut buf) {
                    Ok(()) => commands.push(Command::Write { offset, buf, fua }),
                    Err(e) => {
                        self.give(Some(buf));
                        self.complain(index, &e);
                        self.end(ticket, status::IOERR, 0);
                        return true;
                    }
                }
            }
            (What::Flush, _) => commands.push(Command::Flush),
            (What::Discard(ranges), _) => commands.extend(ranges.iter().map(|r| Command::Trim {
                offset: r.offset,
                len: r.len,
                fua,
            })),
            (What::WriteZeroes(ranges), _) => {
                commands.extend(ranges.iter().map(|r| Command::WriteZeroes {
                    offset: r.offset,
                    len: r.len,
                    fua,
                    may_punch: r.unmap,
                    fast: false,
                }));
            }
            (What::Id(into), buf) => {
                self.give(buf);
                let id = request::id(self.volume.as_ref().map_or("", |v| v.name()));
                match request::copy_out(&*ticket.memory, &id, &into) {
                    Ok(n) => self.end(ticket, status::OK, n),
                    Err(e) => {
                        self.complain(index, &e);
                        self.end(ticket, status::IOERR, 0);
                    }
                }
                return true;
            }
            (What::Refused { status, why }, buf) => {
                self.give(buf);
                self.complain(index, &why);
                self.end(ticket, status, 0);
                return true;
            }
            // A buffer goes with reads and writes alone, and both have one.
            (What::Nothing | What::Read { .. } | What::Write { .. }, buf) => {
                self.give(buf);
                self.end(ticket, status::OK, 0);
                return true;
            }
        }
        let Some(volume) = self.volume.clone() else {
            self.end(ticket, status::IOERR, 0);
            return true;
        };
        ticket.parts = commands.len() as u32;
        let slot = self.tickets.insert(ticket);
        for command in commands {
            self.service.submit(&volume, slot as u64, command);
        }
        true
    }

    fn take_answers(&mut self) {
        while let Some(answer) = self.service.pop() {
            self.answer(answer);
            if self.answered.is_full(Batch::BLOCKS.send) {
                self.tell_guest();
            }
        }
        while let Some(buf) = self.service.spent() {
            self.give(Some(buf));
        }
    }

    fn answer(&mut self, Answer { ticket: slot, outcome, buf, losses, .. }: Answer) {
        let slot = slot as usize;
        let outcome = match &self.told {
            Some(told) => told.hear(losses, outcome),
            None => outcome,
        };
        let Some(ticket) = self.tickets.get_mut(slot) else {
            return self.give(buf);
        };
        ticket.parts -= 1;
        if let Err(failure) = &outcome {
            ticket.failed = true;
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            debug!("{}: a request failed: {failure}", self.name);
        }
        if ticket.parts > 0 {
            return self.give(buf);
        }
        let ticket = self.tickets.remove(slot);
        let mut written = 0;
        let mut code = if ticket.failed { status::IOERR } else { status::OK };
        if !ticket.failed && !ticket.into.is_empty() {
            let copied = match (&buf, self.orphaned) {
                (_, true) => Ok(0),
                (Some(buf), false) => request::copy_out(&*ticket.memory, buf, &ticket.into),
                // A service that breaks its word: no data is better than wrong data.
                (None, false) => Err(Malformed::NoStatus),
            };
            match copied {
                Ok(n) => written = n,
                Err(_) => code = status::IOERR,
            }
        }
        self.give(buf);
        self.end(ticket, code, written);
    }

    /// Answers a request with a status, behind `written` bytes of data.
    fn end(&mut self, ticket: Ticket, code: u8, written: u32) {
        let index = ticket.ring;
        if self.orphaned {
            self.rings[index].under_way -= 1;
            return;
        }
        if let Err(e) = ticket.memory.write_obj(code, ticket.status) {
            self.complain(index, &e);
        }
        self.finish(index, ticket.head, written + 1);
    }

    /// Puts a chain into the used ring.
    fn finish(&mut self, index: usize, head: u16, len: u32) {
        let memory = self.shared.memory().clone();
        let ring = &mut self.rings[index];
        ring.under_way -= 1;
        if !ring.queue.ready() {
            return;
        }
        if let Some(inflight) = &self.inflight {
            inflight.ending(index, head);
        }
        match ring.queue.add_used(&*memory, head, len) {
            Ok(()) => {
                ring.answered = true;
                let used = ring.queue.next_used();
                if let Some(inflight) = &self.inflight {
                    inflight.ended(index, head, used);
                }
            }
            Err(e) => self.break_ring(index, &e.to_string()),
        }
    }

    fn give(&mut self, buf: Option<AlignedBuf>) {
        if let Some(buf) = buf {
            self.pool.give(buf);
            self.freed = true;
        }
    }

    /// A guest that does what it must not: said now and then.
    fn complain(&mut self, index: usize, what: &dyn std::fmt::Display) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        self.complaints += 1;
        if self.complaints <= 10 || self.complaints.is_power_of_two() {
            warn!("{}: queue {index}: a request is refused: {what}", self.name);
        }
    }
}
