//! `watch`: connections that are told what happens, line by line, in memcached's format.
//!
//! ```text
//!  worker: Lines of one turn ──publish──▶ Hub ──▶ a buffer of each watcher ──▶ the worker that has its connection
//!  cleaner, shards: evictions ──tell────▶  ┘
//! ```
//!
//! Nobody waits for a watcher. A worker keeps the lines of its turn up to a bound, beyond which they are dropped; a watcher's
//! buffer is bounded too, and what does not fit there is skipped. Both are counted, and a watcher reads `skipped=N` where
//! lines are missing. While nobody watches, a request pays one comparison.

use std::fmt;
use std::io::Write;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use larder_base::{Nanos, Now};
use larder_engine::kv::Evicted;

/// Connections that may watch at a time, as in memcached.
const WATCHERS: usize = 20;
/// Room that a line needs beyond its own length: for the line that tells of skipped ones.
const SKIPPED_LINE: usize = 32;
/// Bytes of a raw command that are shown.
const RAW_MAX: usize = 400;

/// What a connection may watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Topics(u32);

impl Topics {
    /// Look-ups of objects.
    pub const FETCHERS: Topics = Topics(1);
    /// Stores.
    pub const MUTATIONS: Topics = Topics(2);
    /// Deletions that found their object.
    pub const DELETIONS: Topics = Topics(4);
    /// Evictions from DRAM.
    pub const EVICTIONS: Topics = Topics(8);
    /// Connections that come and go.
    pub const CONNEVENTS: Topics = Topics(16);
    /// Command lines as they came.
    pub const RAWCMDS: Topics = Topics(32);

    /// The topic of this name.
    pub fn named(name: &[u8]) -> Option<Topics> {
        Some(match name {
            b"fetchers" => Topics::FETCHERS,
            b"mutations" => Topics::MUTATIONS,
            b"deletions" => Topics::DELETIONS,
            b"evictions" => Topics::EVICTIONS,
            b"connevents" => Topics::CONNEVENTS,
            b"rawcmds" => Topics::RAWCMDS,
            _ => return None,
        })
    }

    /// Both.
    #[must_use]
    pub fn and(self, other: Topics) -> Topics {
        Topics(self.0 | other.0)
    }

    /// Whether they have one in common.
    pub fn meets(self, other: Topics) -> bool {
        self.0 & other.0 != 0
    }

    /// Whether there is none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

/// Counters of what was logged, by memcached's names.
#[derive(Debug, Default)]
pub(crate) struct LogCounters {
    /// Lines that a worker had no room for.
    pub(crate) worker_dropped: AtomicU64,
    /// Lines written by workers, for whoever watches.
    pub(crate) worker_written: AtomicU64,
    /// Lines that a watcher had no room for.
    pub(crate) watcher_skipped: AtomicU64,
    /// Lines given to a watcher.
    pub(crate) watcher_sent: AtomicU64,
}

#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    /// Lines that did not fit since the last that did.
    skipped: u64,
    /// Its worker has been woken, and has not come yet.
    called: bool,
}

impl Buffer {
    fn tell_skipped(&mut self) {
        let skipped = std::mem::take(&mut self.skipped);
        if skipped > 0 {
            // Writing to memory does not fail.
            let _ = writeln!(self.bytes, "skipped={skipped}");
        }
    }
}

/// A connection that watches.
#[derive(Debug)]
pub(crate) struct Watcher {
    topics: Topics,
    /// The worker that has the connection.
    worker: usize,
    limit: usize,
    buffer: Mutex<Buffer>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watcher {
    /// Takes what is to be sent. Lines that were skipped are told at once, at their place: nothing may happen for long.
    pub(crate) fn take(&self) -> Vec<u8> {
        let mut buffer = lock(&self.buffer);
        buffer.called = false;
        buffer.tell_skipped();
        std::mem::take(&mut buffer.bytes)
    }

    /// Whether something is to be sent.
    pub(crate) fn has_lines(&self) -> bool {
        !lock(&self.buffer).bytes.is_empty()
    }

    /// Takes a line if there is room. Returns whether its worker is to be woken.
    fn offer(&self, line: &[u8], counters: &LogCounters) -> bool {
        let mut buffer = lock(&self.buffer);
        if buffer.bytes.len() + line.len() + SKIPPED_LINE > self.limit {
            buffer.skipped += 1;
            counters.watcher_skipped.fetch_add(1, Ordering::Relaxed);
        } else {
            buffer.tell_skipped();
            buffer.bytes.extend_from_slice(line);
            counters.watcher_sent.fetch_add(1, Ordering::Relaxed);
        }
        !std::mem::replace(&mut buffer.called, true)
    }
}

/// Who watches, and what.
#[derive(Debug)]
pub(crate) struct Hub {
    /// All that anybody watches.
    topics: AtomicU32,
    watchers: Mutex<Vec<Arc<Watcher>>>,
    /// Held while the engine is told whether to note evictions: who is told last is told the last.
    turning: Mutex<()>,
    /// Number of the last line.
    last: AtomicU64,
    /// Microseconds of the epoch at which the server's clock began.
    began: u64,
    watcher_bytes: usize,
    worker_bytes: usize,
    pub(crate) counters: LogCounters,
}

impl Hub {
    /// `now` is the server's clock's.
    pub(crate) fn new(now: Now, watcher_bytes: usize, worker_bytes: usize) -> Hub {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Hub {
            topics: AtomicU32::new(0),
            watchers: Mutex::default(),
            turning: Mutex::default(),
            last: AtomicU64::new(0),
            began: (since.as_micros() as u64).saturating_sub(now.mono.0 / 1000),
            watcher_bytes,
            worker_bytes,
            counters: LogCounters::default(),
        }
    }

    /// What anybody watches.
    #[inline]
    pub(crate) fn topics(&self) -> Topics {
        Topics(self.topics.load(Ordering::Relaxed))
    }

    /// Connections that watch.
    pub(crate) fn watchers(&self) -> usize {
        lock(&self.watchers).len()
    }

    /// A connection of this worker watches from now on; `None` when too many do.
    pub(crate) fn add(&self, topics: Topics, worker: usize) -> Option<Arc<Watcher>> {
        let mut watchers = lock(&self.watchers);
        if watchers.len() >= WATCHERS {
            return None;
        }
        let limit = self.watcher_bytes;
        let watcher = Arc::new(Watcher { topics, worker, limit, buffer: Mutex::default() });
        watchers.push(watcher.clone());
        self.sum(&watchers);
        Some(watcher)
    }

    /// It does not any more.
    pub(crate) fn remove(&self, watcher: &Arc<Watcher>) {
        let mut watchers = lock(&self.watchers);
        watchers.retain(|w| !Arc::ptr_eq(w, watcher));
        self.sum(&watchers);
    }

    /// Has the engine note evictions if anybody watches them now.
    pub(crate) fn turn_evictions(&self, turn: impl FnOnce(bool)) {
        let _one_at_a_time = lock(&self.turning);
        turn(self.topics().meets(Topics::EVICTIONS));
    }

    fn sum(&self, watchers: &[Arc<Watcher>]) {
        let all = watchers.iter().fold(Topics::default(), |all, w| all.and(w.topics));
        self.topics.store(all.0, Ordering::Relaxed);
    }

    /// Begins a line.
    fn head(&self, now: Nanos, out: &mut Vec<u8>) {
        let micros = self.began + now.0 / 1000;
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (seconds, rest) = (micros / 1_000_000, micros % 1_000_000);
        let _ = write!(out, "ts={seconds}.{rest} gid={number} ");
    }

    /// Gives a line to those who watch its topic; `wake` is called for the workers that have something to send now.
    fn deliver(&self, topic: Topics, line: &[u8], wake: &mut impl FnMut(usize)) {
        for watcher in lock(&self.watchers).iter().filter(|w| w.topics.meets(topic)) {
            if watcher.offer(line, &self.counters) {
                wake(watcher.worker);
            }
        }
    }

    /// Tells of evictions that the engine has noted.
    pub(crate) fn tell_evicted(
        &self,
        now: Now,
        evicted: &[Evicted],
        lost: u64,
        mut wake: impl FnMut(usize),
    ) {
        self.counters.worker_dropped.fetch_add(lost, Ordering::Relaxed);
        self.counters.worker_written.fetch_add(evicted.len() as u64, Ordering::Relaxed);
        let mut line = Vec::new();
        for e in evicted {
            line.clear();
            self.head(now.mono, &mut line);
            let ttl = e.expiry.remaining(now.wall).map_or(-1, i64::from);
            let _ = writeln!(
                line,
                "type=eviction key={} fetch={} ttl={ttl} la={} clsid=1 size={}",
                Encoded(&e.key),
                if e.fetched { "yes" } else { "no" },
                e.last_access,
                e.size
            );
            self.deliver(Topics::EVICTIONS, &line, &mut wake);
        }
    }

    pub(crate) fn reset_counters(&self) {
        let c = &self.counters;
        for counter in [&c.worker_dropped, &c.worker_written, &c.watcher_skipped, &c.watcher_sent] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}

/// A key as lines show it: whatever is no letter, digit or one of `-._~` as `%XX`.
struct Encoded<'a>(&'a [u8]);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for &byte in self.0 {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                    write!(f, "{}", byte as char)?;
                }
                _ => write!(f, "%{byte:02X}")?,
            }
        }
        Ok(())
    }
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The client did something wrong, or its socket failed.
    Error,
    /// The client has gone.
    Normal,
    /// It was silent for too long.
    Idle,
    /// The server stops.
    Shutdown,
}

/// The lines of one worker's turn.
#[derive(Debug)]
pub struct Lines {
    hub: Arc<Hub>,
    bytes: Vec<u8>,
    /// Topic and end of each.
    lines: Vec<(Topics, usize)>,
    dropped: u64,
}

impl Lines {
    pub(crate) fn new(hub: Arc<Hub>) -> Lines {
        Lines { hub, bytes: Vec::new(), lines: Vec::new(), dropped: 0 }
    }

    /// Whether anybody watches this.
    #[inline]
    pub(crate) fn wanted(&self, topic: Topics) -> bool {
        self.hub.topics().meets(topic)
    }

    /// Whether anybody watches anything.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        !self.hub.topics().is_empty()
    }

    /// Whether there is something to publish.
    pub(crate) fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.dropped == 0
    }

    fn line(&mut self, now: Now, topic: Topics, rest: fmt::Arguments<'_>) {
        if !self.wanted(topic) {
            return;
        }
        let start = self.bytes.len();
        self.hub.head(now.mono, &mut self.bytes);
        let _ = writeln!(self.bytes, "{rest}");
        if self.bytes.len() > self.hub.worker_bytes {
            self.bytes.truncate(start);
            self.dropped += 1;
        } else {
            self.lines.push((topic, self.bytes.len()));
        }
    }

    /// A connection has come.
    pub(crate) fn came(&mut self, now: Now, peer: &Peer<'_>, fd: RawFd) {
        self.line(now, Topics::CONNEVENTS, format_args!("type=conn_new {peer} cfd={fd}"));
    }

    /// A connection has ended.
    pub(crate) fn went(&mut self, now: Now, peer: &Peer<'_>, fd: RawFd, why: Ending) {
        let reason = match why {
            Ending::Error => "error",
            Ending::Normal => "normal",
            Ending::Idle => "idle_timeout",
            Ending::Shutdown => "shutdown",
        };
        self.line(
            now,
            Topics::CONNEVENTS,
            format_args!("type=conn_close {peer} reason={reason} cfd={fd}"),
        );
    }

    /// Hands the turn's lines to those who watch.
    pub(crate) fn publish(&mut self, mut wake: impl FnMut(usize)) {
        if self.is_empty() {
            return;
        }
        let counters = &self.hub.counters;
        counters.worker_dropped.fetch_add(self.dropped, Ordering::Relaxed);
        counters.worker_written.fetch_add(self.lines.len() as u64, Ordering::Relaxed);
        let mut start = 0;
        for &(topic, end) in &self.lines {
            self.hub.deliver(topic, &self.bytes[start..end], &mut wake);
            start = end;
        }
        self.dropped = 0;
        self.lines.clear();
        self.bytes.clear();
        if self.hub.topics().is_empty() {
            (self.bytes, self.lines) = (Vec::new(), Vec::new());
        }
    }
}

/// A connection's other end, as lines show it.
#[derive(Debug)]
pub(crate) struct Peer<'a> {
    /// As `stats conns` shows it: `tcp:1.2.3.4:5`, `tcp6:[::1]:5`, `unix:/path`.
    pub(crate) text: &'a str,
}

impl fmt::Display for Peer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = match self.text.split_once(':') {
            Some(("tcp" | "tcp6", address)) => address.rsplit_once(':'),
            _ => None,
        };
        match address {
            Some((host, port)) => {
                let host = host.trim_start_matches('[').trim_end_matches(']');
                write!(f, "rip={host} rport={port} transport=tcp")
            }
            None => f.write_str("rip=unix rport=0 transport=local"),
        }
    }
}

/// What one connection's turn tells whoever watches.
#[derive(Debug)]
pub struct Watch<'a> {
    /// The worker's lines.
    pub(crate) lines: &'a mut Lines,
    /// The connection's descriptor.
    pub(crate) fd: RawFd,
}

impl Watch<'_> {
    /// Whether anybody watches this.
    pub(crate) fn wants(&self, topic: Topics) -> bool {
        self.lines.wanted(topic)
    }

    /// A look-up of a key. `class`: 0 when nothing was found, 1 DRAM, 2 flash.
    pub(crate) fn item_get(&mut self, now: Now, key: &[u8], class: u8, size: usize) {
        let (status, fd) = (if class > 0 { "found" } else { "not_found" }, self.fd);
        let key = Encoded(key);
        self.lines.line(
            now,
            Topics::FETCHERS,
            format_args!(
                "type=item_get key={key} status={status} clsid={class} cfd={fd} size={size}"
            ),
        );
    }

    /// A store, and how it went.
    pub(crate) fn item_store(&mut self, now: Now, key: &[u8], stored: &Stored) {
        let (key, fd) = (Encoded(key), self.fd);
        let Stored { status, command, ttl, size } = stored;
        let class = u8::from(*status == "stored");
        self.lines.line(
            now,
            Topics::MUTATIONS,
            format_args!(
                "type=item_store key={key} status={status} cmd={command} ttl={ttl} clsid={class} cfd={fd} size={size}"
            ),
        );
    }

    /// A deletion that found its object.
    pub(crate) fn deleted(&mut self, now: Now, key: &[u8], command: &str, size: u32) {
        let key = Encoded(key);
        self.lines.line(
            now,
            Topics::DELETIONS,
            format_args!("type=deleted key={key} cmd={command} clsid=1 size={size}"),
        );
    }

    /// A command line as it came; what is no printable character is shown as a dot, and a long one is cut.
    pub(crate) fn command(&mut self, now: Now, line: &[u8]) {
        if !self.wants(Topics::RAWCMDS) {
            return;
        }
        let text: String = line[..line.len().min(RAW_MAX)]
            .iter()
            .map(|&b| if b == b' ' || b.is_ascii_graphic() { b as char } else { '.' })
            .collect();
        let fd = self.fd;
        self.lines.line(now, Topics::RAWCMDS, format_args!("<{fd} {text}"));
    }
}

/// What a line says of a store.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) status: &'static str,
    pub(crate) command: &'static str,
    /// Seconds left; 0 for ever.
    pub(crate) ttl: u32,
    pub(crate) size: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(watcher: usize, worker: usize) -> Arc<Hub> {
        Arc::new(Hub::new(Now::default(), watcher, worker))
    }

    fn text(watcher: &Watcher) -> Vec<String> {
        String::from_utf8(watcher.take()).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_watcher_that_does_not_read_skips_lines_and_is_told_how_many() {
        let hub = hub(4096, 1 << 20);
        let mut lines = Lines::new(hub.clone());
        let watcher = hub.add(Topics::FETCHERS, 3).unwrap();
        let mut woken = Vec::new();
        for i in 0..1000 {
            let mut watch = Watch { lines: &mut lines, fd: 7 };
            watch.item_get(Now::default(), format!("key {i}").as_bytes(), 0, 0);
            watch.deleted(Now::default(), b"unwatched", "md", 1);
        }
        lines.publish(|worker| woken.push(worker));
        assert_eq!(woken, [3], "woken once until it comes");
        let held = lock(&watcher.buffer).bytes.len();
        assert!(held <= 4096, "{held}");
        let mut got = text(&watcher);
        let told = got.pop().unwrap();
        assert_eq!(
            told,
            format!("skipped={}", 1000 - got.len()),
            "told before anything else happens"
        );
        assert!(
            got[0]
                .contains(" gid=1 type=item_get key=key%200 status=not_found clsid=0 cfd=7 size=0")
        );
        Watch { lines: &mut lines, fd: 7 }.item_get(Now::default(), b"later", 2, 5);
        lines.publish(|_| ());
        let after = text(&watcher);
        assert!(after[0].ends_with("key=later status=found clsid=2 cfd=7 size=5"), "{after:?}");
        assert_eq!(after.len(), 1);
        let c = &hub.counters;
        let counted = [&c.worker_written, &c.watcher_sent, &c.watcher_skipped, &c.worker_dropped];
        let counted = counted.map(|n| n.load(Ordering::Relaxed));
        let sent = got.len() as u64 + 1;
        assert_eq!(counted, [1001, sent, 1001 - sent, 0]);
    }

    #[test]
    fn a_turn_s_lines_are_bounded_and_counted() {
        let hub = hub(1 << 20, 4096);
        let mut lines = Lines::new(hub.clone());
        let watcher = hub.add(Topics::RAWCMDS.and(Topics::CONNEVENTS), 0).unwrap();
        let mut watch = Watch { lines: &mut lines, fd: 9 };
        for _ in 0..100 {
            watch.command(Now::default(), &[b'x'; 5000]);
        }
        assert!(lines.bytes.len() <= 4096);
        lines.publish(|_| ());
        let got = text(&watcher);
        let dropped = hub.counters.worker_dropped.load(Ordering::Relaxed);
        assert!(dropped > 0 && dropped + got.len() as u64 == 100);
        let tcp = Peer { text: "tcp6:[::1]:77" };
        lines.came(Now::default(), &tcp, 4);
        lines.went(Now::default(), &Peer { text: "unix:/run/x:1" }, 4, Ending::Idle);
        lines.publish(|_| ());
        let got = text(&watcher);
        assert!(got[0].ends_with("type=conn_new rip=::1 rport=77 transport=tcp cfd=4"), "{got:?}");
        assert!(got[1].ends_with("rip=unix rport=0 transport=local reason=idle_timeout cfd=4"));
    }

    #[test]
    fn there_are_twenty_watchers_at_most_and_nothing_is_kept_without_them() {
        let hub = hub(4096, 4096);
        let all: Vec<_> = (0..WATCHERS).map(|i| hub.add(Topics::EVICTIONS, i).unwrap()).collect();
        assert!(hub.add(Topics::EVICTIONS, 0).is_none());
        all.iter().for_each(|watcher| hub.remove(watcher));
        assert!(hub.topics().is_empty() && hub.watchers() == 0);
        let mut lines = Lines::new(hub);
        Watch { lines: &mut lines, fd: 1 }.deleted(Now::default(), b"k", "delete", 1);
        assert!(lines.is_empty());
    }
}
