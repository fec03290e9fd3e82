//! The thread that accepts: it waits for clients at every socket of a server, and while there is no room for more it leaves
//! them in the system's queue.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::event::Source;
use mio::net::{TcpListener, UnixListener};
use mio::{Events, Interest, Poll, Token};
use rustix::io::Errno;
use socket2::SockRef;
use tracing::{debug, warn};

use crate::listen::{SocketAccess, UnixPath, bind_tcp, listen_unix};
use crate::stream::Socket;

/// Token of the waker in the accepting thread's poll.
pub const WAKE: Token = Token(usize::MAX);

/// While there is no room, it is looked for after so long again.
const PAUSE: Duration = Duration::from_millis(10);

#[derive(Debug)]
enum Kind {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A socket to accept from.
#[derive(Debug)]
pub struct Listener {
    kind: Kind,
    name: Arc<str>,
}

impl Listener {
    /// Binds a TCP address, and does not listen yet: until [`Listener::listen`] clients are refused, not kept waiting. `name` makes
    /// its name, for the log, of the address with the port that the system chose if it was left to it.
    ///
    /// # Errors
    /// The system's: in use, not an address of this machine, no such family.
    pub fn bind(
        address: SocketAddr,
        name: impl FnOnce(SocketAddr) -> String,
    ) -> io::Result<Listener> {
        let listener = TcpListener::from_std(bind_tcp(address)?.into());
        let name = name(listener.local_addr().unwrap_or(address)).into();
        Ok(Listener { kind: Kind::Tcp(listener), name })
    }

    /// Listens on a path, which lets in whom `access` says. What a server that is gone has left there goes away.
    ///
    /// # Errors
    /// Why not, and what to do, as [`listen_unix`].
    pub fn unix(
        path: &Path,
        access: SocketAccess,
        backlog: i32,
        name: &str,
    ) -> Result<(Listener, UnixPath), String> {
        let (listener, guard) = listen_unix(path, access, backlog)?;
        let kind = Kind::Unix(UnixListener::from_std(listener));
        Ok((Listener { kind, name: name.into() }, guard))
    }

    /// Lets clients come.
    ///
    /// # Errors
    /// The system's: another server has been quicker.
    pub fn listen(&self, backlog: i32) -> io::Result<()> {
        match &self.kind {
            Kind::Tcp(listener) => SockRef::from(listener).listen(backlog),
            // It does already.
            Kind::Unix(_) => Ok(()),
        }
    }

    /// Its name.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// TCP: the address.
    pub fn address(&self) -> Option<SocketAddr> {
        match &self.kind {
            Kind::Tcp(listener) => listener.local_addr().ok(),
            Kind::Unix(_) => None,
        }
    }

    fn source(&mut self) -> &mut dyn Source {
        match &mut self.kind {
            Kind::Tcp(listener) => listener,
            Kind::Unix(listener) => listener,
        }
    }

    fn accept(&self) -> io::Result<(Socket, Option<SocketAddr>)> {
        match &self.kind {
            Kind::Tcp(listener) => {
                listener.accept().map(|(socket, peer)| (Socket::Tcp(socket), Some(peer)))
            }
            Kind::Unix(listener) => {
                listener.accept().map(|(socket, _)| (Socket::Unix(socket), None))
            }
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match &self.kind {
            Kind::Tcp(listener) => listener.as_raw_fd(),
            Kind::Unix(listener) => listener.as_raw_fd(),
        }
    }
}

/// Why nobody is accepted for now.
#[derive(Debug)]
pub enum Pause {
    /// [`Door::has_room`] says no.
    Full,
    /// The process or the system has no more descriptors or memory.
    Exhausted(io::Error),
}

/// A server, to the thread that accepts for it.
pub trait Door {
    /// It ends.
    fn is_stopping(&self) -> bool;

    /// Whether another connection may come in. While it may not, clients wait in the system's queue.
    fn has_room(&self) -> bool;

    /// A connection has come in, by the listener of this number; `peer`: from there, over TCP.
    fn take(&mut self, listener: usize, socket: Socket, peer: Option<SocketAddr>);

    /// Nobody is accepted from here on.
    fn pause(&mut self, why: Pause);

    /// Clients are accepted again, after so long.
    fn resume(&mut self, after: Duration);
}

/// Accepts until the server stops; whoever stops it wakes the poll by [`WAKE`].
pub fn run(mut poll: Poll, mut listeners: Vec<Listener>, door: &mut impl Door) {
    let mut events = Events::with_capacity(64);
    let mut paused: Option<Instant> = None;
    watch(&mut listeners, &poll, true);
    loop {
        // The listeners stay readable, so there is nothing to wait for but time.
        if let Err(e) = poll.poll(&mut events, paused.map(|_| PAUSE))
            && e.kind() != ErrorKind::Interrupted
        {
            warn!("the accepting thread cannot poll: {e}");
            return;
        }
        if door.is_stopping() {
            return;
        }
        if let Some(since) = paused {
            if !door.has_room() {
                continue;
            }
            paused = None;
            watch(&mut listeners, &poll, true);
            door.resume(since.elapsed());
        }
        if let Some(why) = accept_all(&listeners, door) {
            paused = Some(Instant::now());
            watch(&mut listeners, &poll, false);
            door.pause(why);
        }
    }
}

/// Accepts whoever waits. Every listener is tried on every event: they are few, and a readiness left over from a pause is not
/// lost. Returns why it has to stop.
fn accept_all(listeners: &[Listener], door: &mut impl Door) -> Option<Pause> {
    for (number, listener) in listeners.iter().enumerate() {
        loop {
            if !door.has_room() {
                return Some(Pause::Full);
            }
            match listener.accept() {
                Ok((socket, peer)) => door.take(number, socket, peer),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if is_exhaustion(&e) => return Some(Pause::Exhausted(e)),
                // The peer went away between its connect and our accept, and the like: nothing of ours.
                Err(e) => debug!("a connection was not accepted: {e}"),
            }
        }
    }
    None
}

fn is_exhaustion(e: &io::Error) -> bool {
    e.raw_os_error().is_some_and(|code| {
        [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM]
            .iter()
            .any(|x| x.raw_os_error() == code)
    })
}

/// Adds the listeners to the poll, or takes them out. Adding them anew also reports connections that already wait.
fn watch(listeners: &mut [Listener], poll: &Poll, on: bool) {
    for (number, listener) in listeners.iter_mut().enumerate() {
        let name = listener.name.clone();
        let done = if on {
            poll.registry().register(listener.source(), Token(number), Interest::READABLE)
        } else {
            poll.registry().deregister(listener.source())
        };
        if let Err(e) = done {
            warn!("{name}: cannot be polled: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use mio::Waker;

    use super::*;

    #[derive(Debug, PartialEq)]
    enum Told {
        Came(usize, bool),
        Paused,
        Resumed,
    }

    struct Inn {
        rooms: AtomicUsize,
        stopping: AtomicBool,
        guests: Mutex<Vec<Socket>>,
    }

    struct Keeper {
        inn: Arc<Inn>,
        tell: Sender<Told>,
    }

    impl Door for Keeper {
        fn is_stopping(&self) -> bool {
            self.inn.stopping.load(Ordering::SeqCst)
        }

        fn has_room(&self) -> bool {
            self.inn.guests.lock().unwrap().len() < self.inn.rooms.load(Ordering::SeqCst)
        }

        fn take(&mut self, listener: usize, socket: Socket, peer: Option<SocketAddr>) {
            self.inn.guests.lock().unwrap().push(socket);
            self.tell.send(Told::Came(listener, peer.is_some())).unwrap();
        }

        fn pause(&mut self, why: Pause) {
            assert!(matches!(why, Pause::Full), "{why:?}");
            self.tell.send(Told::Paused).unwrap();
        }

        fn resume(&mut self, _: Duration) {
            self.tell.send(Told::Resumed).unwrap();
        }
    }

    fn next(told: &Receiver<Told>) -> Told {
        told.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    /// Whoever comes when there is no room is taken once there is, by whatever socket; and a stop ends it.
    #[test]
    fn clients_wait_until_there_is_room() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let tcp = Listener::bind("127.0.0.1:0".parse().unwrap(), |a| format!("tcp:{a}")).unwrap();
        let address = tcp.address().unwrap();
        assert_eq!(&**tcp.name(), format!("tcp:{address}"));
        // Bound, and not listened on.
        assert!(std::net::TcpStream::connect(address).is_err());
        tcp.listen(8).unwrap();
        let (unix, _guard) = Listener::unix(&path, SocketAccess::OWNER, 8, "unix:s").unwrap();
        let inn = Arc::new(Inn {
            rooms: AtomicUsize::new(1),
            stopping: AtomicBool::new(false),
            guests: Mutex::default(),
        });
        let (tell, told) = channel();
        let poll = Poll::new().unwrap();
        let waker = Waker::new(poll.registry(), WAKE).unwrap();
        let mut keeper = Keeper { inn: inn.clone(), tell };
        let thread = std::thread::spawn(move || run(poll, vec![tcp, unix], &mut keeper));
        let _first = UnixStream::connect(&path).unwrap();
        assert_eq!(next(&told), Told::Came(1, false));
        let _second = std::net::TcpStream::connect(address).unwrap();
        assert_eq!(next(&told), Told::Paused);
        inn.rooms.store(2, Ordering::SeqCst);
        assert_eq!(next(&told), Told::Resumed);
        assert_eq!(next(&told), Told::Came(0, true));
        inn.stopping.store(true, Ordering::SeqCst);
        waker.wake().unwrap();
        thread.join().unwrap();
    }
}
