//! Connections driven without sockets.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use larder_base::{Nanos, Now, ObjectHash, Rng, UnixSecs};
use larder_engine::kv::api::{Effects, Request};

use crate::connection::*;
use crate::model::ModelEngine;

/// Noon of some day.
pub(super) fn at(secs: u32) -> Now {
    Now { mono: Nanos::from_secs(u64::from(secs)), wall: UnixSecs(1_700_000_000 + secs) }
}

/// Records what the connection asks of the server.
#[derive(Debug, Default)]
pub(super) struct TestAdmin {
    pub(super) seen: Vec<String>,
    /// The crawler is on.
    pub(super) crawls: bool,
    pub(super) prefixes: Vec<(Vec<u8>, PrefixUse)>,
}

impl Admin for TestAdmin {
    fn stats(&mut self, arguments: &[u8], out: &mut Vec<u8>) {
        self.seen.push(format!("stats {}", String::from_utf8_lossy(arguments)));
        out.extend_from_slice(b"STAT x 1\r\nEND\r\n");
    }
    fn verbosity(&mut self, level: u32) {
        self.seen.push(format!("verbosity {level}"));
    }
    fn memory_limit(&mut self, mebibytes: u32) -> bool {
        mebibytes < 1000
    }
    fn crawler(&mut self, on: bool) {
        self.crawls = on;
    }
    fn crawl(&mut self) -> bool {
        self.crawls
    }
    fn debug_time(&mut self, how: DebugTime) {
        self.seen.push(format!("{how:?}"));
    }
    fn prefix_use(&mut self, key: &[u8], how: PrefixUse) {
        self.prefixes.push((key.to_vec(), how));
    }
}

/// An engine that pretends, for a share of its requests, that the object lies on flash: it asks for one or two reads
/// before it lets the model answer.
pub(super) struct Delayed {
    pub(super) model: ModelEngine,
    /// Reads per thousand requests, and the draws.
    pub(super) permille: u64,
    pub(super) rng: Mutex<Rng>,
    /// Bytes that each read is said to take.
    pub(super) read_len: usize,
}

impl Delayed {
    pub(super) fn new(permille: u64, seed: u64) -> Delayed {
        Delayed {
            model: ModelEngine::default(),
            permille,
            rng: Mutex::new(Rng::new(seed)),
            read_len: 4096,
        }
    }
}

/// A pretended read, and how many more follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pretended {
    more: u64,
}

impl Engine for Delayed {
    type Read = Pretended;

    fn hash(&self, key: &[u8]) -> ObjectHash {
        self.model.hash(key)
    }

    fn fits(&self, key_len: usize, value_len: usize) -> bool {
        self.model.fits(key_len, value_len)
    }

    fn read_len(&self, _read: &Pretended) -> usize {
        self.read_len
    }

    fn execute<X: Effects>(
        &self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<Fetched<'_, Pretended>>,
        effects: &mut X,
    ) -> Step<Pretended> {
        let mut rng = self.rng.lock().unwrap();
        let more = match fetched {
            None if rng.next_u64() % 1000 < self.permille => 1 + rng.next_u64() % 2,
            None => 0,
            Some(f) => f.read.more,
        };
        if more > 0 {
            return Step::Read(Pretended { more: more - 1 });
        }
        match self.model.execute(now, request, None, effects) {
            Step::Done => Step::Done,
            Step::Read(_) => unreachable!("the model reads no flash"),
        }
    }

    fn flush_all(&self, now: Now, at: UnixSecs) {
        self.model.flush_all(now, at);
    }
}

/// One client.
pub(super) struct Client<E: Engine> {
    pub(super) conn: Connection<E::Read>,
    pub(super) config: ProtocolConfig,
    pub(super) stats: ConnStats,
    pub(super) admin: TestAdmin,
    pub(super) side: SideEffects,
    pub(super) waiting: VecDeque<(ReadToken, E::Read)>,
    pub(super) received: Vec<u8>,
    pub(super) now: Now,
    pub(super) detail: bool,
}

impl<E: Engine> Client<E> {
    pub(super) fn new() -> Client<E> {
        Self::with(ProtocolConfig::default(), Arc::new(BigBuffers::default()))
    }

    pub(super) fn with(config: ProtocolConfig, big: Arc<BigBuffers>) -> Client<E> {
        Client {
            conn: Connection::new(&config, big),
            config,
            stats: ConnStats::default(),
            admin: TestAdmin::default(),
            side: SideEffects::default(),
            waiting: VecDeque::new(),
            received: Vec::new(),
            now: at(0),
            detail: false,
        }
    }

    fn in_turn<T>(
        &mut self,
        f: impl FnOnce(&mut Connection<E::Read>, Now, &mut ConnContext<'_, E::Read>) -> T,
    ) -> T {
        let mut reads = Vec::new();
        let mut ctx = ConnContext {
            config: &self.config,
            stats: &mut self.stats,
            reads: &mut reads,
            side: &mut self.side,
            admin: &mut self.admin,
            detail: self.detail,
            app: None,
            watch: None,
        };
        let result = f(&mut self.conn, self.now, &mut ctx);
        self.waiting.extend(reads);
        result
    }

    pub(super) fn process(&mut self, engine: &E) -> Progress {
        self.in_turn(|conn, now, ctx| conn.process(now, engine, ctx))
    }

    pub(super) fn flash_done(&mut self, engine: &E, index: usize) {
        let (token, _) = self.waiting.remove(index).expect("such a read is waiting");
        self.in_turn(|conn, now, ctx| conn.flash_done(now, engine, ctx, token, Some(b"")));
    }

    /// Takes all output.
    pub(super) fn drain(&mut self) {
        let output = self.conn.output().to_vec();
        self.received.extend_from_slice(&output);
        self.conn.sent(output.len(), self.now);
    }

    /// Sends `input` and serves it to the end, flash reads in the order in which they were asked for.
    pub(super) fn run(&mut self, engine: &E, input: &[u8]) -> (Vec<u8>, Progress) {
        let mut input = input;
        loop {
            let progress = self.process(engine);
            self.drain();
            match progress {
                Progress::WaitingForFlash => self.flash_done(engine, 0),
                Progress::NeedInput if input.is_empty() && !self.waiting.is_empty() => {
                    self.flash_done(engine, 0)
                }
                Progress::NeedInput if !input.is_empty() => {
                    let n = self.conn.feed(input, self.now);
                    assert!(n > 0, "a connection that wants input has room for it");
                    input = &input[n..];
                }
                Progress::OutputFull => {}
                end => return (std::mem::take(&mut self.received), end),
            }
        }
    }
}
