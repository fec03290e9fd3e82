//! Clients that keep a worker's memory, and who gets it next: a worker whose time is the test's, over sockets.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use tempfile::TempDir;

use super::*;
use crate::backing::{self, Timeouts};
use crate::cache::service::Command;
use crate::nbd::server::{Limits, TlsPolicy};
use crate::nbd::wire::command;
use crate::server::{ServerConfig, Volume, Volumes, WorkerDoor};
use larder_nbd::testing::{HELLO, go, request};
use larder_net::stream::Socket;

const MIB: u32 = 1 << 20;
/// Of the worker, so that one long request of [`LONG`] has room at a time.
const MEMORY: usize = 12 << 20;
const LONG: u32 = 8 * MIB;
const REPLY: usize = 16;
/// Time passes in such steps; looks are taken every 250 ms.
const STEP: Duration = Duration::from_millis(50);

/// Answers whatever it is asked when it is looked at.
#[derive(Default)]
struct AtOnce {
    answers: Vec<Answer>,
    /// A client's end of its connection, and how many bytes lay there each time that an answer was taken.
    client: Option<UnixStream>,
    seen: Vec<u64>,
}

impl Service for AtOnce {
    fn submit(&mut self, _: &Arc<Volume>, ticket: u64, command: Command) {
        let buf = match command {
            Command::Read { buf, .. } | Command::Write { buf, .. } => Some(buf),
            _ => None,
        };
        self.answers.push(Answer::new(ticket, Ok(Vec::new()), buf));
    }

    fn ready(&mut self, _: &mio::event::Event, _: Instant) {}

    fn flush(&mut self, _: Instant) {}

    fn pop(&mut self) -> Option<Answer> {
        let answer = self.answers.pop()?;
        if let Some(client) = &self.client {
            self.seen.push(rustix::io::ioctl_fionread(client).unwrap());
        }
        Some(answer)
    }

    fn wake_at(&self) -> Option<Instant> {
        None
    }
}

struct Bench {
    worker: Worker<AtOnce>,
    now: Instant,
    _dir: TempDir,
}

impl Bench {
    fn new() -> Bench {
        Bench::with(4)
    }

    /// Of a server that takes so many requests of a connection at a time.
    fn with(requests: u32) -> Bench {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("disk");
        std::fs::File::create(&path).unwrap().set_len(LONG.into()).unwrap();
        let uri = format!("file:{}", path.display()).parse().unwrap();
        let store = backing::open(&uri, false, false, Timeouts::default()).unwrap();
        let volumes = Arc::new(Volumes::default());
        volumes.add(Volume::new("disk", store, 4096, false)).unwrap();
        let poll = Poll::new().unwrap();
        let waker = mio::Waker::new(poll.registry(), WAKE).unwrap();
        let config = ServerConfig {
            buffer_bytes: MEMORY,
            limits: Limits { requests, bytes: MEMORY },
            ..ServerConfig::default()
        };
        let shared = Arc::new(Shared {
            config,
            volumes,
            counters: Arc::default(),
            workers: vec![WorkerDoor { queue: Default::default(), waker }],
            stopping: false.into(),
            busy: 0.into(),
            refusals: Default::default(),
            certificate: None,
        });
        let worker = Worker::new(0, shared, poll, AtOnce::default());
        Bench { now: worker.now, worker, _dir: dir }
    }

    /// Turns until nothing more happens at this moment.
    fn settle(&mut self) {
        let mut events = Events::with_capacity(64);
        loop {
            self.worker.poll.poll(&mut events, Some(Duration::ZERO)).unwrap();
            self.worker.turn(&events, self.now);
            let idle = self.worker.again.is_empty() && self.worker.dirty.is_empty();
            if events.is_empty() && idle {
                break;
            }
        }
        // What was freed at the end of the last turn.
        self.worker.turn(&events, self.now);
    }

    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while self.now < until {
            self.now = (self.now + STEP).min(until);
            self.settle();
        }
    }

    fn connect(&mut self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let socket = Socket::Unix(mio::net::UnixStream::from_std(theirs));
        socket.make_room();
        let stream = Stream::new(socket, None);
        self.worker.shared.workers[0].queue.lock().push_back(Dealt {
            stream,
            tls: TlsPolicy::Off,
            guest: None,
            asked: 0,
        });
        self.worker.shared.counters.connections.fetch_add(1, Ordering::Relaxed);
        self.worker.take_new();
        let mut ours = ours;
        ours.write_all(&HELLO).unwrap();
        ours.write_all(&go("disk")).unwrap();
        assert_eq!(self.receive(&mut ours, 18), 18);
        loop {
            let mut head = [0; 20];
            self.settle();
            ours.read_exact(&mut head).unwrap();
            let len = u32::from_be_bytes(head[16..].try_into().unwrap());
            assert_eq!(self.receive(&mut ours, len as usize), len as usize);
            if head[12..16] == [0, 0, 0, 1] {
                return ours;
            }
        }
    }

    /// Another one that has asked for so much.
    fn asks(&mut self, len: u32) -> UnixStream {
        let mut stream = self.connect();
        self.ask(&mut stream, len);
        stream
    }

    fn ask(&mut self, stream: &mut UnixStream, len: u32) {
        stream.write_all(&request(command::READ, 0, 1, 0, len)).unwrap();
        self.settle();
    }

    /// Takes up to `most` bytes that are there, at this moment.
    fn receive(&mut self, stream: &mut UnixStream, most: usize) -> usize {
        let (mut got, mut buf) = (0, vec![0; 64 << 10]);
        while got < most {
            self.settle();
            let n = buf.len().min(most - got);
            match stream.read(&mut buf[..n]) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => panic!("{e}"),
            }
        }
        self.settle();
        got
    }

    fn connections(&self) -> u64 {
        self.worker.shared.counters.connections.load(Ordering::Relaxed)
    }

    /// The reply to one request, all of which is to be had now.
    fn whole(&mut self, stream: &mut UnixStream, len: u32) {
        assert_eq!(self.receive(stream, REPLY + len as usize), REPLY + len as usize);
    }
}

/// What goes round together leaves the drive and the processors idle in turn.
#[test]
fn of_many_answers_some_are_sent_before_the_others() {
    const LEN: u32 = 512;
    let mut bench = Bench::with(128);
    let mut client = bench.connect();
    bench.worker.service.client = Some(client.try_clone().unwrap());
    let send = Batch::BLOCKS.send;
    let count = u64::from(send) + 6;
    let requests: Vec<u8> =
        (0..count).flat_map(|cookie| request(command::READ, 0, cookie, 0, LEN)).collect();
    client.write_all(&requests).unwrap();
    bench.settle();
    let reply = REPLY as u64 + u64::from(LEN);
    let sent: Vec<u64> =
        (0..count).map(|done| done / u64::from(send) * u64::from(send) * reply).collect();
    assert_eq!(bench.worker.service.seen, sent);
    let all = (count * reply) as usize;
    assert_eq!(bench.receive(&mut client, all + 1), all);
}

const TWO: Duration = Duration::from_secs(2);

#[test]
fn who_reads_does_not_wait_behind_those_that_do_not() {
    const BAD: u64 = 20;
    let mut bench = Bench::new();
    let mut good = bench.connect();
    for _ in 0..3 {
        bench.ask(&mut good, LONG);
        bench.whole(&mut good, LONG);
    }
    let bad: Vec<_> = (0..BAD).map(|_| bench.asks(LONG)).collect();
    bench.ask(&mut good, LONG);
    // Nobody has seen this one read anything.
    let mut new = bench.asks(LONG);
    bench.pass(TWO - STEP);
    assert_eq!(bench.connections(), BAD + 2);
    assert_eq!(bench.receive(&mut good, 1), 0);
    bench.pass(STEP * 6);
    bench.whole(&mut good, LONG);
    assert_eq!(bench.connections(), BAD + 1);
    let begun = bench.now;
    while bench.receive(&mut new, 1) == 0 {
        assert!(bench.now - begun < (TWO + STEP * 6) * BAD as u32);
        bench.pass(STEP);
    }
    assert_eq!(bench.receive(&mut new, REPLY + LONG as usize), REPLY + LONG as usize - 1);
    assert_eq!(bench.connections(), 2);
    drop(bad);
}

#[test]
fn as_many_are_closed_as_it_takes() {
    let mut bench = Bench::new();
    let mut kept: Vec<_> = (0..4).map(|_| bench.asks(2 * MIB)).collect();
    let mut good = bench.asks(3 * MIB);
    bench.pass(TWO * 2);
    bench.whole(&mut good, 3 * MIB);
    assert_eq!(bench.connections(), 4);
    // Nobody waits any more: those that are left may take their time.
    bench.pass(Duration::from_secs(60));
    assert_eq!(bench.connections(), 4);
    assert!(bench.receive(&mut kept[0], 3 * MIB as usize) < 2 * MIB as usize);
    for stays in &mut kept[1..] {
        bench.whole(stays, 2 * MIB);
    }
}

#[test]
fn who_takes_a_little_now_and_then_stays() {
    let mut bench = Bench::new();
    let mut slow = bench.asks(LONG);
    let mut other = bench.asks(LONG);
    // As little as the poll does not tell of.
    let (little, mut took) = (64 << 10, 0);
    for _ in 0..80 {
        bench.pass(TWO - STEP * 6);
        took += bench.receive(&mut slow, little);
    }
    assert_eq!(took, 80 * little);
    assert_eq!(bench.connections(), 2);
    assert_eq!(bench.receive(&mut other, 1), 0);
    // Then no more.
    bench.pass(TWO + STEP * 6);
    assert_eq!(bench.connections(), 1);
    bench.whole(&mut other, LONG);
}

#[test]
fn who_stops_in_the_middle_of_a_write_makes_way() {
    let mut bench = Bench::new();
    let mut writes = bench.connect();
    writes.write_all(&request(command::WRITE, 0, 1, 0, LONG)).unwrap();
    bench.settle();
    let mut other = bench.asks(LONG);
    for _ in 0..30 {
        writes.write_all(&[7; 64 << 10]).unwrap();
        bench.pass(TWO - STEP * 6);
    }
    assert_eq!(bench.connections(), 2);
    assert_eq!(bench.receive(&mut other, 1), 0);
    bench.pass(TWO + STEP * 6);
    assert_eq!(bench.connections(), 1);
    bench.whole(&mut other, LONG);
}

/// Otherwise a few clients that send nearly nothing keep a worker's memory for hours.
#[test]
fn who_sends_a_byte_now_and_then_does_not_go_on() {
    let mut bench = Bench::new();
    let mut writes = bench.connect();
    writes.write_all(&request(command::WRITE, 0, 1, 0, LONG)).unwrap();
    bench.settle();
    let mut other = bench.asks(LONG);
    for _ in 0..8 {
        // The last may be closed already.
        let _ = writes.write_all(&[7]);
        bench.pass(STEP * 8);
    }
    assert_eq!(bench.connections(), 1);
    bench.whole(&mut other, LONG);
}

/// The same of a client that reads.
#[test]
fn who_takes_a_byte_now_and_then_does_not_go_on() {
    let mut bench = Bench::new();
    let mut slow = bench.asks(LONG);
    let mut other = bench.asks(LONG);
    for _ in 0..8 {
        bench.receive(&mut slow, 4096 / 8);
        bench.pass(STEP * 8);
    }
    assert_eq!(bench.connections(), 1);
    bench.whole(&mut other, LONG);
}

/// A handshake takes so long at most, however slowly bytes of it come.
#[test]
fn a_handshake_that_goes_on_by_bytes_ends() {
    let mut bench = Bench::new();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let socket = Socket::Unix(mio::net::UnixStream::from_std(theirs));
    socket.make_room();
    let stream = Stream::new(socket, None);
    bench.worker.shared.workers[0].queue.lock().push_back(Dealt {
        stream,
        tls: TlsPolicy::Off,
        guest: None,
        asked: 0,
    });
    bench.worker.shared.counters.connections.fetch_add(1, Ordering::Relaxed);
    bench.worker.take_new();
    let timeout = bench.worker.shared.config.timeout;
    let begun = bench.now;
    for byte in HELLO.iter().chain(&go(&"x".repeat(200))) {
        if bench.now - begun >= timeout {
            break;
        }
        ours.write_all(&[*byte]).unwrap();
        bench.pass(STEP * 18);
    }
    assert!(bench.now - begun < timeout * 2);
    bench.pass(SCAN * 2);
    assert_eq!(bench.connections(), 0);
}

/// Who asks for little could go on forever where much is waited for.
#[test]
fn what_is_long_is_not_overtaken_by_what_is_less_so() {
    let mut bench = Bench::new();
    let mut holds = bench.asks(4 * MIB);
    let mut long = bench.asks(LONG);
    let mut less = bench.asks(MIB);
    assert_eq!(bench.receive(&mut less, 1), 0);
    assert_eq!(bench.receive(&mut long, 1), 0);
    // What is short finds room.
    let mut short = bench.asks(4096);
    bench.whole(&mut short, 4096);
    bench.whole(&mut holds, 4 * MIB);
    bench.whole(&mut long, LONG);
    bench.whole(&mut less, MIB);
}

/// Timeouts is long where nobody has waited for long.
#[test]
fn a_pause_alone_closes_nobody() {
    let mut bench = Bench::new();
    let mut paused = bench.asks(LONG);
    bench.pass(Duration::from_secs(120));
    // It reads on in the moment in which somebody comes to wait.
    let mut other = bench.asks(LONG);
    bench.pass(STEP * 10);
    bench.whole(&mut paused, LONG);
    bench.whole(&mut other, LONG);
    assert_eq!(bench.connections(), 2);
}

/// It may destage volumes, and others may have mail for it.
#[test]
fn while_a_server_stops_a_worker_goes_on_until_none_has_requests_under_way() {
    let mut bench = Bench::new();
    let other = Busy::one_of(&bench.worker.shared);
    assert!(!bench.worker.drained());
    assert!(bench.worker.busy.is_none(), "it has nothing under way itself");
    drop(other);
    assert!(bench.worker.drained());
    let _other = Busy::one_of(&bench.worker.shared);
    bench.worker.now += DRAIN;
    assert!(bench.worker.drained(), "not for ever");
}
