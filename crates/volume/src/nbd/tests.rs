use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_base::Rng;
use larder_runtime::{AlignedBuf, BufferPool, Payload};
use mio::Interest;
use mio::unix::SourceFd;
use tempfile::TempDir;

use super::*;
use crate::testing::{Client, against_a_model, one, run};
use larder_nbd::server::{Command, Connection, Event, ExportInfo, Limits, Request, TlsPolicy};
use larder_nbd::testing::{Memory, One, one as export};
use larder_nbd::wire::Errno;

/// How a server behaves.
#[derive(Clone, Default)]
pub(crate) struct Manner {
    pub(crate) multi_conn: bool,
    pub(crate) poor: bool,
    /// It does not offer FLUSH, nor FUA.
    pub(crate) unflushed: bool,
    /// One answer in this many ends the connection instead.
    pub(crate) breaks: Option<u64>,
    /// Requests are taken and not answered.
    pub(crate) silent: bool,
    /// It was asked to stop and does not end: it takes connections, and refuses requests.
    pub(crate) stopping: bool,
}

pub(crate) struct State {
    pub(crate) disk: Vec<u8>,
    manner: Manner,
    rng: Rng,
    /// By connections that were made before the last stop requests are refused.
    stops: u32,
    /// Connections that are there, by how many stops there were when they were made.
    open: Vec<u32>,
    streams: Vec<UnixStream>,
    connections: u32,
    pub(crate) flushes: u32,
    /// Writes that were to be durable.
    pub(crate) durable: u32,
}

/// A server with a disk in memory, a thread for each connection.
pub(crate) struct Server {
    dir: TempDir,
    pub(crate) state: Arc<Mutex<State>>,
}

pub(crate) fn locked(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Server {
    pub(crate) fn start(size: usize, manner: Manner) -> Server {
        let dir = TempDir::new().unwrap();
        let disk = vec![0; size];
        let (streams, rng) = (Vec::new(), Rng::new(1));
        let (stops, open) = (0, Vec::new());
        let state = State {
            disk,
            manner,
            rng,
            stops,
            open,
            streams,
            connections: 0,
            flushes: 0,
            durable: 0,
        };
        let server = Server { dir, state: Arc::new(Mutex::new(state)) };
        server.listen();
        server
    }

    pub(crate) fn listen(&self) {
        let path = self.dir.path().join("socket");
        std::fs::remove_file(&path).ok();
        let listener = UnixListener::bind(path).unwrap();
        let state = self.state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let made = {
                    let mut state = locked(&state);
                    state.connections += 1;
                    state.streams.push(stream.try_clone().unwrap());
                    let made = state.stops;
                    state.open.push(made);
                    made
                };
                let state = state.clone();
                std::thread::spawn(move || {
                    serve(stream, made, &state);
                    let mut state = locked(&state);
                    let at = state.open.iter().position(|m| *m == made).unwrap();
                    state.open.swap_remove(at);
                });
            }
        });
    }

    pub(crate) fn uri(&self) -> Uri {
        Uri::NbdUnix { socket: self.dir.path().join("socket"), export: "disk".into() }
    }

    /// As if it were killed: nobody listens, every connection ends.
    pub(crate) fn vanish(&self) {
        std::fs::remove_file(self.dir.path().join("socket")).unwrap();
        self.hang_up();
    }

    /// As if it were asked to stop: it waits for its connections to end, and refuses what is asked by them.
    fn stop(&self) {
        std::fs::remove_file(self.dir.path().join("socket")).unwrap();
        locked(&self.state).stops += 1;
    }

    /// Connections to servers that were asked to stop.
    fn kept(&self) -> usize {
        let state = locked(&self.state);
        state.open.iter().filter(|made| **made < state.stops).count()
    }

    fn hang_up(&self) {
        for stream in locked(&self.state).streams.drain(..) {
            stream.shutdown(std::net::Shutdown::Both).ok();
        }
    }

    pub(crate) fn behave(&self, change: impl FnOnce(&mut Manner)) {
        change(&mut locked(&self.state).manner);
    }

    fn open(&self, timeout: Timeouts) -> NbdBacking {
        NbdBacking::open(&self.uri(), false, timeout).unwrap()
    }
}

/// One connection, until it ends; whatever fails ends it.
fn serve(mut stream: UnixStream, made: u32, state: &Mutex<State>) {
    let mut pool = BufferPool::new(64 << 20);
    let mut conn: Connection<Memory> = Connection::new(TlsPolicy::Off, Limits::default());
    loop {
        let exports = {
            let state = locked(state);
            let One(memory) = export(state.disk.len() as u64);
            let mut info: ExportInfo = memory.info.clone();
            info.multi_conn = state.manner.multi_conn;
            info.flush = !state.manner.unflushed;
            if state.manner.poor {
                (info.trim, info.write_zeroes, info.fast_zero) = (false, false, false);
            }
            One(Arc::new(Memory { info }))
        };
        match conn.poll(&exports, &mut pool) {
            Event::NeedInput => {
                while !conn.output().is_empty() {
                    let Ok(n) = stream.write(conn.output().first()) else { return };
                    conn.output().sent(n);
                }
                conn.recycle(&mut pool);
                match stream.read(conn.space()) {
                    Ok(0) | Err(_) => return,
                    Ok(n) => conn.received(n),
                }
            }
            Event::Request(request) => {
                let mut state = locked(state);
                let breaks = state.manner.breaks;
                if breaks.is_some_and(|n| state.rng.below(n) == 0) {
                    drop(state);
                    stream.shutdown(std::net::Shutdown::Both).ok();
                    return;
                }
                if made < state.stops || state.manner.stopping {
                    let held = match request.command {
                        Command::Read { buf, .. } | Command::Write { buf, .. } => buf.capacity(),
                        _ => 0,
                    };
                    conn.fail(request.cookie, held, Errno::Shutdown, "");
                } else if !state.manner.silent {
                    execute(&mut state, &mut conn, &mut pool, request);
                }
            }
            Event::Close(_) | Event::Starved | Event::StartTls => return,
        }
    }
}

fn execute(
    state: &mut State,
    conn: &mut Connection<Memory>,
    pool: &mut BufferPool,
    Request { cookie, command }: Request,
) {
    match command {
        Command::Read { offset, mut buf } => {
            let len = buf.len();
            buf.copy_from_slice(&state.disk[offset as usize..][..len]);
            conn.data(cookie, offset, buf, Vec::new());
        }
        Command::Write { offset, buf, fua } => {
            state.durable += u32::from(fua);
            state.disk[offset as usize..][..buf.len()].copy_from_slice(&buf);
            conn.written(cookie, buf.capacity());
            pool.give(buf);
        }
        Command::Trim { offset, len, .. } | Command::WriteZeroes { offset, len, .. } => {
            state.disk[offset as usize..][..len as usize].fill(0);
            conn.done(cookie);
        }
        Command::BlockStatus { len, one, .. } => {
            let data = larder_nbd::wire::Extent { len, hole: false, zero: false };
            conn.extents(cookie, len, one, [data]);
        }
        Command::Flush => {
            state.flushes += 1;
            conn.done(cookie);
        }
        Command::Cache { .. } => conn.done(cookie),
    }
}

fn patient() -> Timeouts {
    Timeouts::default()
}

fn write(offset: u64, fill: u8) -> Op {
    let mut buf = AlignedBuf::zeroed(8192);
    buf.fill(fill);
    Op::Write { offset, data: Payload::new(buf), fua: false }
}

#[test]
fn random_operations() {
    for (seed, (multi_conn, poor)) in
        [(true, false), (false, false), (true, true)].into_iter().enumerate()
    {
        let server = Server::start(1 << 20, Manner { multi_conn, poor, ..Manner::default() });
        let backing = server.open(patient());
        assert_eq!(backing.capabilities().size, 1 << 20);
        assert_eq!(backing.capabilities().trim, !poor);
        assert_eq!(backing.hub.is_none(), multi_conn);
        let mut session = backing.session().unwrap();
        let model = against_a_model(&mut *session, 1 << 20, seed as u64, 20);
        assert!(locked(&server.state).disk == model);
    }
}

/// Two workers of a server that takes one connection only.
#[test]
fn one_connection_for_two_workers() {
    let server = Server::start(1 << 20, Manner::default());
    let backing = server.open(patient());
    let (mut a, mut b) = (backing.session().unwrap(), backing.session().unwrap());
    for i in 0..50 {
        a.submit(i, write(i * 8192, 1));
        b.submit(i, write((i + 64) * 8192, 2));
    }
    a.flush(Instant::now());
    b.flush(Instant::now());
    for session in [&mut *a, &mut *b] {
        let mut tokens: Vec<u64> = run(session, 50).iter().map(|d| d.token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..50).collect::<Vec<_>>());
    }
    let state = locked(&server.state);
    assert!(state.disk[..50 * 8192].iter().all(|&b| b == 1));
    assert!(state.disk[64 * 8192..][..50 * 8192].iter().all(|&b| b == 2));
    assert_eq!(state.connections, 2, "the first contact's, and the one");
}

/// A flush by a client that has heard of so many losses: whether it is good for it.
fn flush(backing: &NbdBacking, session: &mut dyn Session, seen: &mut u64) -> bool {
    let ended = one(session, Op::Flush).outcome;
    let before = std::mem::replace(seen, backing.losses());
    ended.is_ok() && *seen == before
}

/// Connections end at random; nothing is lost, nothing is done twice to anybody's harm, reads are right.
#[test]
fn connections_that_break() {
    for multi_conn in [true, false] {
        let server =
            Server::start(1 << 20, Manner { multi_conn, breaks: Some(20), ..Manner::default() });
        let backing = server.open(patient());
        let mut session = backing.session().unwrap();
        let mut rng = Rng::new(9);
        let mut model = vec![0u8; 1 << 20];
        let (mut doubts, mut good, mut seen) = (0, 0, 0);
        for round in 0..40u64 {
            let places: Vec<u64> = (0..8).map(|i| i * 16 + rng.below(8)).collect();
            for (i, place) in places.iter().enumerate() {
                session.submit(i as u64, write(place * 8192, round as u8));
                model[(place * 8192) as usize..][..8192].fill(round as u8);
            }
            assert!(run(&mut *session, 8).iter().all(|d| d.outcome.is_ok()));
            match flush(&backing, &mut *session, &mut seen) {
                true => good += 1,
                false => doubts += 1,
            }
            let place = places[rng.below(8) as usize] * 8192;
            let done =
                one(&mut *session, Op::Read { offset: place, buf: AlignedBuf::zeroed(8192) });
            let Op::Read { buf, .. } = done.op else { panic!() };
            assert!(done.outcome.is_ok() && buf.iter().all(|&b| b == round as u8));
        }
        assert!(doubts > 0 && good > 0, "{doubts} {good}");
        let state = locked(&server.state);
        assert!(state.disk == model);
        assert!(state.connections > 10);
    }
}

/// A server that is gone for a while: requests wait, and the flush behind unflushed writes says what may be lost, once.
#[test]
fn a_server_that_comes_back() {
    let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
    let backing = server.open(patient());
    let mut session = backing.session().unwrap();
    one(&mut *session, write(0, 5)).outcome.unwrap();
    server.vanish();
    session.submit(7, Op::Read { offset: 0, buf: AlignedBuf::zeroed(8192) });
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(200) {
        session.turn(Instant::now());
        assert!(session.pop().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(session.wake_at().is_some());
    server.listen();
    let done = run(&mut *session, 1).pop().unwrap();
    assert!(done.outcome.is_ok() && done.token == 7);
    let mut seen = 0;
    assert!(!flush(&backing, &mut *session, &mut seen), "the write may be gone");
    assert!(flush(&backing, &mut *session, &mut seen));
    // Nothing was written since: nothing to be in doubt about.
    server.hang_up();
    assert!(flush(&backing, &mut *session, &mut seen));
}

/// A server that is asked to stop waits for its clients to go, the idle ones too, and the next one takes its place.
#[test]
fn a_server_that_stops_is_left_and_the_next_one_is_asked() {
    for multi_conn in [true, false] {
        let server = Server::start(1 << 20, Manner { multi_conn, ..Manner::default() });
        let backing = server.open(patient());
        let (mut busy, mut idle) = (backing.session().unwrap(), backing.session().unwrap());
        one(&mut *idle, Op::Flush).outcome.unwrap();
        (0..8).for_each(|i| busy.submit(i, write(i * 8192, 1)));
        assert!(run(&mut *busy, 8).iter().all(|done| done.outcome.is_ok()));
        for round in 0..3 {
            server.stop();
            assert!(server.kept() > 0);
            (0..8).for_each(|i| busy.submit(i, write(i * 8192, 2 + round)));
            busy.submit(8, Op::Flush);
            busy.submit(9, Op::Read { offset: 1 << 19, buf: AlignedBuf::zeroed(512) });
            let end = Instant::now() + Duration::from_secs(120);
            while server.kept() > 0 || backing.trouble().is_none() {
                busy.flush(Instant::now());
                busy.turn(Instant::now());
                // As its thread does when its descriptor says so.
                idle.turn(Instant::now());
                assert!(busy.pop().is_none() && Instant::now() < end, "{multi_conn}");
                std::thread::sleep(Duration::from_millis(1));
            }
            let trouble = backing.trouble().unwrap();
            assert_eq!(trouble.state, "lost");
            assert!(trouble.what.contains("unix"), "names its store: {}", trouble.what);
            server.listen();
            let done = run(&mut *busy, 10);
            assert!(done.iter().all(|done| done.outcome.is_ok()), "{multi_conn}: {done:?}");
            assert!(backing.trouble().is_none(), "{:?}", backing.trouble());
            assert!(locked(&server.state).disk[..8 * 8192].iter().all(|b| *b == 2 + round));
        }
        assert!(backing.losses() > 0, "what was answered before and not flushed may have gone");
    }
}

/// One that goes on taking connections while it stops is not asked again and again without a pause, and requests end in time.
#[test]
fn a_server_that_does_not_end_is_given_up_in_time() {
    let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
    let give_up = Some(Duration::from_secs(2));
    let backing = server.open(Timeouts { give_up, ..patient() });
    let mut session = backing.session().unwrap();
    one(&mut *session, write(0, 5)).outcome.unwrap();
    server.behave(|m| m.stopping = true);
    let before = locked(&server.state).connections;
    let failure = one(&mut *session, write(0, 6)).outcome.unwrap_err();
    assert_eq!(failure.kind, FailureKind::Failed);
    assert!(failure.message.contains("unix"), "{failure}");
    assert!(backing.trouble().is_some());
    let made = locked(&server.state).connections - before;
    assert!(made < 60, "{made} connections within two seconds");
}

/// What a store that is away, or silent, was asked ends at once where nobody waits for it any more.
#[test]
fn what_is_waited_for_no_more_ends_at_once() {
    for (multi_conn, silent) in [(true, false), (true, true), (false, false), (false, true)] {
        let server = Server::start(1 << 20, Manner { multi_conn, ..Manner::default() });
        let backing = server.open(patient());
        let mut session = backing.session().unwrap();
        one(&mut *session, Op::Flush).outcome.unwrap();
        match silent {
            true => server.behave(|m| m.silent = true),
            false => server.vanish(),
        }
        session.submit(1, write(0, 1));
        session.submit(2, Op::Flush);
        session.flush(Instant::now());
        std::thread::sleep(Duration::from_millis(50));
        session.turn(Instant::now());
        assert!(session.pop().is_none());
        let begun = Instant::now();
        backing.abandon(true);
        let done = run(&mut *session, 2);
        assert!(done.iter().all(|done| done.outcome.is_err()), "{done:?}");
        assert!(one(&mut *session, write(0, 1)).outcome.is_err());
        assert!(begun.elapsed() < Duration::from_secs(20));
        // It stays after all.
        server.behave(|m| m.silent = false);
        if !silent {
            server.listen();
        }
        backing.abandon(false);
        one(&mut *session, write(0, 2)).outcome.unwrap();
    }
}

/// Two sessions have written when the server goes; whoever flushes first, and however often, the other hears of it too. One that
/// comes afterwards does not. Once where each has its connections, once where they share one.
#[test]
fn every_client_hears_of_a_loss_once() {
    for multi_conn in [true, false] {
        let server = Server::start(1 << 20, Manner { multi_conn, ..Manner::default() });
        let backing = server.open(patient());
        let mut sessions: Vec<_> = (0..3).map(|_| backing.session().unwrap()).collect();
        let mut clients: Vec<_> = (0..3).map(|_| Client::new(&backing)).collect();
        for (session, place) in sessions.iter_mut().zip(0..2) {
            one(&mut **session, write(place * 8192, 5)).outcome.unwrap();
        }
        server.vanish();
        // As soon as one that has a connection looks.
        let end = Instant::now() + Duration::from_secs(120);
        while backing.losses() == 0 {
            assert!(Instant::now() < end);
            sessions.iter_mut().for_each(|session| session.turn(Instant::now()));
            std::thread::sleep(Duration::from_millis(1));
        }
        server.listen();
        // Who has written nothing, first; and twice.
        for (at, good) in [(2, false), (2, true), (0, false), (1, false), (1, true), (0, true)] {
            let outcome = one(&mut *sessions[at], Op::Flush).outcome;
            let heard = clients[at].believes(outcome.is_ok(), backing.losses());
            assert_eq!(heard, good, "{multi_conn}, client {at}: {outcome:?}");
        }
        assert_eq!(backing.losses(), 1);
        assert!(Client::new(&backing).believes(true, backing.losses()), "it came afterwards");
    }
}

/// A server that is silent counts as lost until it has answered something, though it takes connections; with nobody there to ask
/// it, too.
#[test]
fn a_server_that_hangs_is_lost_until_it_answers() {
    for idle in [false, true] {
        let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
        let silence = Duration::from_millis(300);
        let give_up = Some(Duration::from_millis(if idle { 700 } else { 600_000 }));
        let backing = server.open(Timeouts { silence, give_up, ..patient() });
        let mut session = backing.session().unwrap();
        one(&mut *session, write(0, 5)).outcome.unwrap();
        server.behave(|m| m.silent = true);
        session.submit(1, write(0, 6));
        session.flush(Instant::now());
        let before = locked(&server.state).connections;
        let end = Instant::now() + Duration::from_secs(120);
        let mut was_lost = false;
        // Made anew, and silent again, several times.
        while locked(&server.state).connections < before + 3 || (idle && session.in_flight() > 0) {
            assert!(Instant::now() < end);
            session.flush(Instant::now());
            session.turn(Instant::now());
            was_lost |= backing.trouble().is_some();
            assert_eq!(was_lost, backing.trouble().is_some(), "{:?}", backing.trouble());
            if let Some(done) = session.pop() {
                assert!(idle && done.outcome.is_err(), "{done:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(was_lost && backing.trouble().unwrap().what.contains("no answer"));
        server.behave(|m| m.silent = false);
        while backing.trouble().is_some() {
            assert!(Instant::now() < end, "{:?}", backing.trouble());
            session.flush(Instant::now());
            session.turn(Instant::now());
            std::thread::sleep(Duration::from_millis(1));
        }
        if !idle {
            run(&mut *session, 1).pop().unwrap().outcome.unwrap();
        }
    }
}

#[test]
fn patience_ends() {
    let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
    let give_up = Some(Duration::from_secs(12));
    let silence = Duration::from_millis(400);
    let backing = server.open(Timeouts { give_up, silence, ..patient() });
    let mut session = backing.session().unwrap();
    // Taken and not answered: another connection, as soon as the silence has lasted too long.
    server.behave(|m| m.silent = true);
    session.submit(1, write(0, 5));
    session.flush(Instant::now());
    let before = locked(&server.state).connections;
    let begin = Instant::now();
    while locked(&server.state).connections <= before + 1 {
        session.turn(Instant::now());
        assert!(begin.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(5));
    }
    server.behave(|m| m.silent = false);
    run(&mut *session, 1).pop().unwrap().outcome.unwrap();
    // Nobody there: an error, in the end.
    server.vanish();
    let failure = one(&mut *session, write(0, 6)).outcome.unwrap_err();
    assert!(failure.message.contains("cannot be reached"), "{failure}");
    assert_eq!(failure.kind, FailureKind::Failed);
    let trouble = backing.trouble().unwrap().what;
    assert!(trouble.ends_with("requests wait for 12 s, then they fail"), "{trouble}");
}

/// Another export has taken the place of the first: it is not written to.
#[test]
fn an_export_of_another_size() {
    let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
    let give_up = Some(Duration::from_secs(3));
    let backing = server.open(Timeouts { give_up, ..patient() });
    let mut session = backing.session().unwrap();
    one(&mut *session, write(0, 5)).outcome.unwrap();
    locked(&server.state).disk = vec![0; 2 << 20];
    server.hang_up();
    let failure = one(&mut *session, write(0, 6)).outcome.unwrap_err();
    assert!(failure.message.contains("another one now"), "{failure}");
    assert!(failure.message.contains("larder block resize"), "{failure}");
    assert!(locked(&server.state).disk.iter().all(|&b| b == 0));
}

/// Asked how large the export is, the store sees that it has grown, and connections that were told the old size are made
/// anew; what was written by them is durable before they go, or the server's flush covers it.
#[test]
fn an_export_that_grows() {
    for multi_conn in [true, false] {
        let server = Server::start(1 << 20, Manner { multi_conn, ..Manner::default() });
        let backing = server.open(patient());
        let mut session = backing.session().unwrap();
        let mut other = backing.session().unwrap();
        one(&mut *session, write(0, 5)).outcome.unwrap();
        one(&mut *other, write(8192, 6)).outcome.unwrap();
        assert_eq!(backing.resize(None).unwrap(), 1 << 20, "as before");
        locked(&server.state).disk.resize(2 << 20, 0);
        // Nobody has said so: what lies behind the old end is refused by connections that know no better.
        assert_eq!(backing.capabilities().size, 1 << 20);
        let end = (2 << 20) - 8192;
        assert!(one(&mut *session, write(end, 7)).outcome.is_err());
        let refuse = |bytes| backing.resize(Some(bytes)).unwrap_err().to_string();
        assert!(refuse(4 << 20).contains("make the export larger there first"));
        assert!(refuse(1 << 20).contains("more than 1048576"));
        // What is under way meanwhile goes by the connection that it is on.
        (0..40).for_each(|i| session.submit(i, write(i * 8192, 5)));
        session.flush(Instant::now());
        let connections = locked(&server.state).connections;
        assert_eq!(backing.resize(None).unwrap(), 2 << 20);
        session.submit(40, write(end - 16384, 4));
        assert!(run(&mut *session, 41).iter().all(|d| d.outcome.is_ok()));
        assert_eq!(backing.capabilities().size, 2 << 20);
        let Identity::Blind { size, .. } = backing.identity().unwrap() else { panic!() };
        assert_eq!(size, 2 << 20);
        one(&mut *other, write(end, 7)).outcome.unwrap();
        one(&mut *other, write(end - 8192, 8)).outcome.unwrap();
        one(&mut *other, Op::Flush).outcome.unwrap();
        let done = one(&mut *other, Op::Read { offset: 0, buf: AlignedBuf::zeroed(8192) });
        let Op::Read { buf, .. } = done.op else { panic!() };
        assert!(done.outcome.is_ok() && buf.iter().all(|&b| b == 5));
        let state = locked(&server.state);
        assert!(state.disk[end as usize..].iter().all(|&b| b == 7));
        assert!(state.connections > connections + 1, "asked, and made anew");
        if !multi_conn {
            assert!(state.flushes >= 2, "the old connection's, and the client's");
        }
        drop(state);
        // Broken, it is found again with its new size.
        server.hang_up();
        one(&mut *other, write(end, 9)).outcome.unwrap();
        locked(&server.state).disk.truncate(1 << 20);
        let shrunk = backing.resize(None).unwrap_err().to_string();
        assert!(shrunk.contains("restore its size"), "{shrunk}");
        assert_eq!(backing.capabilities().size, 2 << 20);
    }
}

#[test]
fn what_cannot_be_opened() {
    let dir = TempDir::new().unwrap();
    let uri = Uri::NbdUnix { socket: dir.path().join("none"), export: String::new() };
    let within = |uri: &Uri, connect: Duration| {
        let timeout = Timeouts { connect, ..patient() };
        NbdBacking::open(uri, false, timeout).unwrap_err().to_string()
    };
    let why = |uri: &Uri| within(uri, Duration::from_secs(10));
    assert!(why(&uri).contains("none"));
    let server = Server::start(4096, Manner::default());
    let Uri::NbdUnix { socket, .. } = server.uri() else { panic!() };
    let other = Uri::NbdUnix { socket, export: "other".into() };
    assert!(why(&other).contains("no export 'other'"));
    // Somebody listens and says nothing.
    let path = dir.path().join("mute");
    let _listener = UnixListener::bind(&path).unwrap();
    let uri = Uri::NbdUnix { socket: path, export: String::new() };
    assert!(within(&uri, Duration::from_millis(200)).contains("within 0.2 s"));
}

#[test]
fn a_server_that_offers_no_flush_is_called_so_and_is_not_sent_one() {
    let manner = Manner { multi_conn: true, unflushed: true, ..Manner::default() };
    let server = Server::start(1 << 20, manner);
    let backing = server.open(patient());
    assert_eq!(backing.capabilities().flush, Flushing::Missing);
    let mut session = backing.session().unwrap();
    one(&mut *session, write(0, 1)).outcome.unwrap();
    one(&mut *session, Op::Flush).outcome.unwrap();
    assert_eq!(locked(&server.state).flushes, 0);
}

/// By the operator's word: whatever it offers.
#[test]
fn a_server_that_is_vouched_for_is_never_flushed_and_loses_nothing() {
    for unflushed in [true, false] {
        let manner = Manner { multi_conn: true, unflushed, ..Manner::default() };
        let server = Server::start(1 << 20, manner);
        let options = OpenOptions { durable: true, ..OpenOptions::default() };
        let backing = NbdBacking::open_with(&server.uri(), &options).unwrap();
        assert_eq!(backing.capabilities().flush, Flushing::Needless);
        let mut session = backing.session().unwrap();
        one(&mut *session, write(0, 1)).outcome.unwrap();
        one(&mut *session, Op::Flush).outcome.unwrap();
        one(&mut *session, write(8192, 2)).outcome.unwrap();
        server.hang_up();
        // (Sent again by another connection, it says that the one that has gone was noticed.)
        one(&mut *session, Op::Read { offset: 0, buf: AlignedBuf::zeroed(8192) }).outcome.unwrap();
        assert_eq!((locked(&server.state).flushes, backing.losses()), (0, 0));
    }
}

/// Turns a session that nobody asks anything, as its thread does: when its descriptor says so, or when it wants to be.
fn turns(session: &mut dyn Session) {
    let now = Instant::now();
    if session.wake_at().is_some_and(|at| at <= now) {
        session.turn(now);
    }
    let mut events = Events::with_capacity(4);
    let mut poll = Poll::new().unwrap();
    let fd = session.fd();
    poll.registry().register(&mut SourceFd(&fd), Token(0), Interest::READABLE).unwrap();
    poll.poll(&mut events, Some(Duration::from_millis(5))).or_else(interrupted).unwrap();
    if !events.is_empty() {
        session.turn(Instant::now());
    }
}

/// Nobody asks the volume anything: its server hears so little of it that it ends, and the next one is found.
#[test]
fn a_server_that_stops_is_left_by_those_who_ask_it_nothing() {
    for multi_conn in [true, false] {
        let server = Server::start(1 << 20, Manner { multi_conn, ..Manner::default() });
        let backing = server.open(patient());
        let mut sessions: Vec<_> = (0..2).map(|_| backing.session().unwrap()).collect();
        for session in &mut sessions {
            one(&mut **session, Op::Flush).outcome.unwrap();
        }
        server.stop();
        let begun = Instant::now();
        while server.kept() > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "{multi_conn}: it is kept");
            sessions.iter_mut().for_each(|session| turns(&mut **session));
        }
        server.listen();
        for session in &mut sessions {
            one(&mut **session, write(0, 1)).outcome.unwrap();
        }
        assert_eq!(backing.losses(), 0);
    }
}

#[test]
fn a_session_that_nobody_turns_keeps_no_server_while_it_rests() {
    let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
    let backing = server.open(patient());
    let mut session = backing.session().unwrap();
    one(&mut *session, write(0, 1)).outcome.unwrap();
    one(&mut *session, Op::Flush).outcome.unwrap();
    session.rest();
    server.stop();
    let begun = Instant::now();
    while server.kept() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is kept");
        std::thread::sleep(Duration::from_millis(1));
    }
    server.listen();
    one(&mut *session, write(0, 2)).outcome.unwrap();
    assert_eq!(backing.losses(), 0);
}

/// It is never flushed, so a server that cannot be is as good; one that lacks something else is not.
#[test]
fn a_store_that_is_vouched_for_goes_on_with_a_server_that_offers_no_flush() {
    let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
    let give_up = Some(Duration::from_secs(3));
    let timeout = Timeouts { give_up, ..patient() };
    let options = OpenOptions { durable: true, timeout, ..OpenOptions::default() };
    let backing = NbdBacking::open_with(&server.uri(), &options).unwrap();
    let mut session = backing.session().unwrap();
    let durable = |fill| match write(0, fill) {
        Op::Write { offset, data, .. } => Op::Write { offset, data, fua: true },
        op => op,
    };
    one(&mut *session, durable(1)).outcome.unwrap();
    server.vanish();
    server.behave(|m| m.unflushed = true);
    server.listen();
    one(&mut *session, durable(2)).outcome.unwrap();
    one(&mut *session, Op::Flush).outcome.unwrap();
    assert!(locked(&server.state).disk[..8192].iter().all(|&b| b == 2));
    let told = {
        let state = locked(&server.state);
        (state.flushes, state.durable)
    };
    assert_eq!(told, (0, 1));
    assert_eq!((backing.losses(), backing.capabilities().flush), (0, Flushing::Needless));
    backing.resize(None).unwrap();
    server.vanish();
    server.behave(|m| m.poor = true);
    server.listen();
    let failure = one(&mut *session, durable(3)).outcome.unwrap_err();
    assert!(failure.message.contains("does not offer all commands"), "{failure}");
    // One that nobody vouches for is to be flushed.
    let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
    let backing = server.open(timeout);
    let mut session = backing.session().unwrap();
    one(&mut *session, write(0, 1)).outcome.unwrap();
    server.vanish();
    server.behave(|m| m.unflushed = true);
    server.listen();
    let failure = one(&mut *session, write(0, 2)).outcome.unwrap_err();
    assert!(failure.message.contains("does not offer FLUSH any more"), "{failure}");
    let refused = backing.resize(None).unwrap_err().to_string();
    assert!(refused.contains("does not offer FLUSH any more"), "{refused}");
}

/// What was written before counts as lost once, since no flush has covered it.
#[test]
fn a_server_that_is_mended_is_flushed_from_then_on() {
    for (multi_conn, asked) in [(true, true), (true, false), (false, true), (false, false)] {
        let manner = Manner { multi_conn, unflushed: true, ..Manner::default() };
        let server = Server::start(1 << 20, manner);
        let backing = server.open(patient());
        let mut session = backing.session().unwrap();
        let mut client = Client::new(&backing);
        one(&mut *session, write(0, 1)).outcome.unwrap();
        one(&mut *session, Op::Flush).outcome.unwrap();
        assert_eq!(backing.capabilities().flush, Flushing::Missing);
        // One that is another export is told as that.
        if multi_conn {
            server.vanish();
            server.behave(|m| m.unflushed = false);
            locked(&server.state).disk.resize(2 << 20, 0);
            server.listen();
            let begun = Instant::now();
            let told = |backing: &NbdBacking| backing.trouble().map_or(String::new(), |t| t.what);
            while !told(&backing).contains("2097152 bytes instead of 1048576") {
                assert!(begun.elapsed() < Duration::from_secs(60), "{}", told(&backing));
                turns(&mut *session);
            }
            assert_eq!(backing.capabilities().flush, Flushing::Missing);
            locked(&server.state).disk.truncate(1 << 20);
        }
        if !asked {
            // Whether or not it has one now.
            drop(session);
            session = backing.session().unwrap();
        }
        server.vanish();
        server.behave(|m| m.unflushed = false);
        server.listen();
        let begun = Instant::now();
        while backing.capabilities().flush != Flushing::Offered {
            assert!(begun.elapsed() < Duration::from_secs(60), "{multi_conn} {asked}");
            match asked {
                true => turns(&mut *session),
                false => backing.look_at_place(),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let ended = one(&mut *session, Op::Flush).outcome.is_ok();
        assert!(!client.believes(ended, backing.losses()), "{multi_conn} {asked}");
        let flushes = locked(&server.state).flushes;
        one(&mut *session, write(0, 2)).outcome.unwrap();
        let ended = one(&mut *session, Op::Flush).outcome.is_ok();
        assert!(client.believes(ended, backing.losses()));
        assert_eq!(locked(&server.state).flushes, flushes + 1);
    }
}
