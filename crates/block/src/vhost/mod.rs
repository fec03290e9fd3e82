//! Volumes as virtio disks: the device's side of vhost-user-blk.
//!
//! A front end (QEMU, Cloud Hypervisor) shares its guest's memory over a Unix socket, and the guest's requests are taken from
//! its queues and answered there without passing through a socket.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`config`] | features, limits, the configuration space |
//! | [`request`] | a chain of descriptors, looked at as what it is: a stranger's bytes |
//! | [`inflight`] | requests under way, in memory that outlives this process |
//! | `memory` | the shared memory |
//! | `ring` | a queue |
//! | `device` | the queues, and the requests on their way to the cache and back |
//! | `protocol` | what a front end says |
//!
//! Each address to listen on is a device of one volume, with a thread of its own and one front end at a time; any number of
//! guests' queues are served by that thread. What is asked for by a front end that has gone is finished before another is let
//! in, so that its writes cannot come after those of the next.

pub mod config;
mod device;
pub mod inflight;
mod memory;
mod protocol;
pub mod request;
mod ring;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::{self, ErrorKind, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_net::listen::{SocketAccess, UnixPath};
use mio::unix::SourceFd;
use mio::{Interest, Poll, Registry, Token, Waker};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketType};
use tracing::{info, warn};
use vhost::vhost_user::{BackendReqHandler, Error as ProtocolError};

use crate::cache::service::Service;
use crate::cache::{Client, Volume, Volumes};
use crate::served::{Face, ServerError, bind_unix};
use device::{CONNECTION, Device, LISTEN, SERVICE, WAKE};
pub use device::{VhostCounters, VhostState};
pub use memory::Memory;

/// A front end that stops in the middle of a message is left alone after this.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a stopping device waits for requests that have begun.
const DRAIN: Duration = Duration::from_secs(10);
/// Messages taken before the queues have their turn.
const MESSAGES: u32 = 64;
/// The number of the message that brings a socket for the device's own (`VHOST_USER_SET_BACKEND_REQ_FD`).
const SET_BACKEND_REQ_FD: u32 = 21;
/// Between two looks at whether the volume is put aside, has come back, or has grown.
const LOOK: Duration = Duration::from_millis(500);

/// An address of a device: `vhost:PATH,volume=NAME`. The volume may be left out where there is only one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostListen {
    /// The socket's path; only the owner may connect.
    pub path: PathBuf,
    /// The volume's name, empty for the only one.
    pub volume: String,
}

impl VhostListen {
    /// Whether the text is meant as one.
    pub fn is_meant(text: &str) -> bool {
        text.starts_with("vhost:")
    }
}

impl FromStr for VhostListen {
    type Err = ServerError;

    fn from_str(text: &str) -> Result<VhostListen, ServerError> {
        let bad = |reason: &str| ServerError::Address { text: text.into(), reason: reason.into() };
        let rest =
            text.strip_prefix("vhost:").ok_or_else(|| bad("it does not begin with vhost:"))?;
        let (path, options) = rest.split_once(',').unwrap_or((rest, ""));
        match path.len() {
            0 => return Err(bad("the path is missing")),
            108.. => return Err(bad("a socket's path has at most 107 bytes")),
            _ => {}
        }
        let mut volume = String::new();
        // A volume's name may have commas: it is the last.
        if !options.is_empty() || rest.contains(',') {
            let name = options
                .strip_prefix("volume=")
                .ok_or_else(|| bad("what follows the path is not volume=NAME"))?;
            if name.is_empty() {
                return Err(bad("the volume's name is missing"));
            }
            volume = name.to_owned();
        }
        Ok(VhostListen { path: path.into(), volume })
    }
}

impl fmt::Display for VhostListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vhost:{}", self.path.display())?;
        if self.volume.is_empty() { Ok(()) } else { write!(f, ",volume={}", self.volume) }
    }
}

/// Sockets of devices that are bound, and nobody is served at yet. Dropped, they go.
pub struct VhostDoors(Vec<Door>, Vec<String>);

struct Door {
    name: String,
    volume: String,
    listener: UnixListener,
    path: UnixPath,
}

impl VhostDoors {
    /// Opens the sockets, which let in whom `access` says.
    ///
    /// # Errors
    /// [`ServerError`] naming the first that cannot be had.
    pub fn open(listen: &[VhostListen], access: SocketAccess) -> Result<VhostDoors, ServerError> {
        let door = |listen: &VhostListen| {
            let name = listen.to_string();
            let (listener, path) = bind_unix(&name, &listen.path, access)?;
            Ok::<_, ServerError>(Door { name, volume: listen.volume.clone(), listener, path })
        };
        let doors = listen.iter().map(door).collect::<Result<_, _>>()?;
        Ok(VhostDoors(doors, Vec::new()))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether each has its volume. Those of the volumes `later` have theirs when it comes.
    ///
    /// # Errors
    /// [`ServerError`] naming the first that has none.
    pub fn check(&mut self, volumes: &Volumes, later: &[String]) -> Result<(), ServerError> {
        self.1 = later.to_vec();
        self.0.iter().try_for_each(|door| door.find(volumes, later).map(drop))
    }
}

impl Door {
    /// Its volume; `None` if that is one of those that come `later`.
    fn find(
        &self,
        volumes: &Volumes,
        later: &[String],
    ) -> Result<Option<Arc<Volume>>, ServerError> {
        let bad = |reason: String| ServerError::Listen { address: self.name.clone(), reason };
        if later.contains(&self.volume) {
            return Ok(None);
        }
        match (volumes.find(&self.volume), &*self.volume) {
            // Of several one may not be there yet.
            (Some(volume), "") if later.is_empty() => Ok(Some(volume)),
            (_, "") => Err(bad("there are several volumes: say which with ,volume=NAME".into())),
            (Some(volume), _) => Ok(Some(volume)),
            (None, volume) => Err(bad(format!("there is no volume '{volume}'"))),
        }
    }
}

/// Devices that run, until they are stopped or dropped.
#[derive(Default)]
pub struct VhostServer {
    devices: Vec<Running>,
}

struct Running {
    waker: Waker,
    stopping: Arc<AtomicBool>,
    /// The connection as it is, to wake a thread that waits for the rest of a message.
    connection: Arc<Mutex<Option<UnixStream>>>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<VhostCounters>,
    volume: String,
    address: String,
    _path: UnixPath,
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> ServerError {
    move |source| ServerError::System { what, source }
}

impl VhostServer {
    /// Opens the sockets and starts a thread for each. `service` makes what each does its requests with: it is told the
    /// device's number, where to register descriptors, and the first token that is free for them. `buffer_bytes` is the
    /// memory of each for requests under way.
    ///
    /// # Errors
    /// [`ServerError`] when a volume is not there, or a socket or thread cannot be had.
    pub fn start<S, F>(
        listen: &[VhostListen],
        volumes: &Arc<Volumes>,
        buffer_bytes: usize,
        service: F,
    ) -> Result<VhostServer, ServerError>
    where
        S: Service + Send + 'static,
        F: FnMut(usize, Registry, usize) -> io::Result<S>,
    {
        VhostServer::start_behind(
            VhostDoors::open(listen, SocketAccess::OWNER)?,
            volumes,
            buffer_bytes,
            service,
        )
    }

    /// The same behind doors that were opened before.
    ///
    /// # Errors
    /// [`ServerError`] when a volume is not there, or a thread cannot be had.
    pub fn start_behind<S, F>(
        doors: VhostDoors,
        volumes: &Arc<Volumes>,
        buffer_bytes: usize,
        mut service: F,
    ) -> Result<VhostServer, ServerError>
    where
        S: Service + Send + 'static,
        F: FnMut(usize, Registry, usize) -> io::Result<S>,
    {
        let mut server = VhostServer::default();
        for (number, door) in doors.0.into_iter().enumerate() {
            let volume = door.find(volumes, &doors.1)?;
            let Door { name, listener, path, volume: of } = door;
            let of = volume.as_ref().map_or(of, |v| v.name().to_owned());
            let poll = Poll::new().map_err(system("epoll"))?;
            let waker = Waker::new(poll.registry(), Token(WAKE)).map_err(system("eventfd"))?;
            let fd = listener.as_raw_fd();
            let registry = poll.registry().try_clone().map_err(system("epoll"))?;
            registry
                .register(&mut SourceFd(&fd), Token(LISTEN), Interest::READABLE)
                .map_err(system("epoll"))?;
            let service = service(number, registry, SERVICE).map_err(system("a device's rings"))?;
            let device = Device::new(name.clone(), volume, service, poll, buffer_bytes);
            let place = Place { name: of.clone(), volumes: volumes.clone() };
            let counters = device.counters.clone();
            let stopping = Arc::new(AtomicBool::new(false));
            let connection = Arc::default();
            let seen = (stopping.clone(), Arc::clone(&connection));
            let thread = std::thread::Builder::new()
                .name(format!("vhost-{number}"))
                .spawn(move || run(device, &place, &listener, &seen.0, &seen.1))
                .map_err(system("a thread"))?;
            server.devices.push(Running {
                waker,
                stopping,
                connection,
                thread: Some(thread),
                counters,
                volume: of,
                address: name,
                _path: path,
            });
        }
        Ok(server)
    }

    /// What each device has done, with the name of its volume.
    pub fn counters(&self) -> impl Iterator<Item = (&str, &Arc<VhostCounters>)> {
        self.devices.iter().map(|d| (d.volume.as_str(), &d.counters))
    }

    /// Each device, to be looked at.
    pub fn faces(&self) -> impl Iterator<Item = Face> {
        self.devices.iter().map(|d| Face {
            address: d.address.clone(),
            volume: d.volume.clone(),
            counted: d.counters.clone(),
        })
    }

    /// Answers what is under way, hangs up, ends.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        for device in &self.devices {
            device.stopping.store(true, Ordering::SeqCst);
            // A thread that cannot be woken ends at its next event.
            let _ = device.waker.wake();
            if let Some(connection) = &*locked(&device.connection) {
                let _ = connection.shutdown(std::net::Shutdown::Read);
            }
        }
        for device in &mut self.devices {
            if let Some(thread) = device.thread.take() {
                // A thread that panicked has said so on stderr already.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for VhostServer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Nothing panics while it holds one of these locks, and what they guard is whole after each operation.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a device's volume is found again when it was put aside and comes back.
struct Place {
    name: String,
    volumes: Arc<Volumes>,
}

/// A front end that is connected.
struct Front<S: Service> {
    _client: Client,
    handler: BackendReqHandler<Mutex<Device<S>>>,
    /// The same connection, to be watched.
    stream: UnixStream,
}

/// A device's thread.
fn run<S: Service>(
    device: Device<S>,
    place: &Place,
    listener: &UnixListener,
    stopping: &AtomicBool,
    connection: &Mutex<Option<UnixStream>>,
) {
    let name = device.name.clone();
    let counters = device.counters.clone();
    // The protocol's crate wants a lock; nobody else ever takes it.
    let device = Arc::new(Mutex::new(device));
    let mut front: Option<Front<S>> = None;
    loop {
        {
            let mut device = locked(&device);
            let more = (device.ready.connection && front.is_some())
                || (device.ready.accept && front.is_none() && device.serves());
            let timeout = if more { Duration::ZERO } else { device.timeout().unwrap_or(LOOK) };
            device.wait(Some(timeout.min(LOOK)));
        }
        if stopping.load(Ordering::SeqCst) {
            break;
        }
        if !locked(&device).serves() {
            if front.is_some() {
                info!("{name}: the front end is dropped: its volume is put aside");
                close(&device, &mut front, connection, Some(Instant::now() + DRAIN));
            }
            let mut device = locked(&device);
            device.let_go();
            if device.volume.is_none()
                && let Some(volume) = place.volumes.find(&place.name)
            {
                let preferred = volume.preferred();
                device.adopt(volume, preferred);
            }
        }
        if front.is_none()
            && locked(&device).serves()
            && std::mem::take(&mut locked(&device).ready.accept)
        {
            front = accept(&device, listener, connection);
        }
        if let Some(open) = &mut front
            && std::mem::take(&mut locked(&device).ready.connection)
            && let Err(e) = messages(&device, open)
        {
            match e {
                ProtocolError::Disconnected => info!("{name}: the front end has gone"),
                e => warn!("{name}: the front end is dropped: {e}"),
            }
            close(&device, &mut front, connection, None);
        }
        let mut device = locked(&device);
        device.look();
        device.run(true);
        device.show();
    }
    let until = Some(Instant::now() + DRAIN);
    if front.is_some() {
        close(&device, &mut front, connection, until);
    }
    counters.connected.store(0, Ordering::Relaxed);
}

/// The next front end, if one waits.
fn accept<S: Service>(
    device: &Arc<Mutex<Device<S>>>,
    listener: &UnixListener,
    connection: &Mutex<Option<UnixStream>>,
) -> Option<Front<S>> {
    let mut guard = locked(device);
    let client = Client::new(guard.volume.as_ref()?);
    let stream = match listener.accept() {
        Ok((stream, _)) => stream,
        Err(e) if e.kind() == ErrorKind::WouldBlock => return None,
        Err(e) => {
            // The peer went away meanwhile, or there are no descriptors: the next event tells.
            warn!("{}: cannot accept: {e}", guard.name);
            return None;
        }
    };
    // Another may wait behind this one.
    guard.ready.accept = true;
    let fd = stream.as_raw_fd();
    let set_up = || -> io::Result<UnixStream> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let other = stream.try_clone()?;
        *locked(connection) = Some(stream.try_clone()?);
        guard.registry().register(&mut SourceFd(&fd), Token(CONNECTION), Interest::READABLE)?;
        Ok(other)
    };
    let other = match set_up() {
        Ok(other) => other,
        Err(e) => {
            warn!("{}: a connection cannot be used: {e}", guard.name);
            *locked(connection) = None;
            return None;
        }
    };
    info!("{}: a front end has come", guard.name);
    guard.counters.accepted.fetch_add(1, Ordering::Relaxed);
    guard.counters.connected.store(1, Ordering::Relaxed);
    guard.ready.connection = true;
    drop(guard);
    let handler = BackendReqHandler::from_stream(other, device.clone());
    Some(Front { _client: client, handler, stream })
}

/// Takes the messages that are there.
fn messages<S: Service>(
    device: &Arc<Mutex<Device<S>>>,
    front: &mut Front<S>,
) -> Result<(), ProtocolError> {
    for _ in 0..MESSAGES {
        let ready = {
            let mut list = [PollFd::from_borrowed_fd(front.stream.as_fd(), PollFlags::IN)];
            let none = Timespec { tv_sec: 0, tv_nsec: 0 };
            rustix::event::poll(&mut list, Some(&none))
        };
        match ready {
            Ok(0) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(ProtocolError::SocketError(e.into())),
            Ok(_) => {
                if let Some(channel) = channel(&front.stream) {
                    locked(device).channel = Some(channel);
                }
                locked(device).changed = true;
                front.handler.handle_request()?;
                locked(device).heard = Instant::now();
            }
        }
    }
    locked(device).ready.connection = true;
    Ok(())
}

/// The socket that the next message brings, if it is one by which the front end wants to hear of changes. The protocol's crate
/// keeps that socket to itself, so the message is looked at before it is taken: both have a descriptor of it then.
fn channel(stream: &UnixStream) -> Option<OwnedFd> {
    // Request, flags and size, 4 bytes each.
    let mut header = [0u8; 12];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let (_, seen) = rustix::net::recv(stream, &mut header[..], flags).ok()?;
    if seen < header.len() || header[..4] != SET_BACKEND_REQ_FD.to_ne_bytes() {
        return None;
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut into = [IoSliceMut::new(&mut header)];
    rustix::net::recvmsg(stream, &mut into, &mut control, flags).ok()?;
    let file = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    // The protocol's crate refuses what is none.
    file.filter(|f| rustix::net::sockopt::socket_type(f) == Ok(SocketType::STREAM))
}

fn close<S: Service>(
    device: &Arc<Mutex<Device<S>>>,
    front: &mut Option<Front<S>>,
    connection: &Mutex<Option<UnixStream>>,
    until: Option<Instant>,
) {
    let mut device = locked(device);
    if let Some(open) = front.take() {
        let fd = open.stream.as_raw_fd();
        let _ = device.registry().deregister(&mut SourceFd(&fd));
    }
    // With the clone gone the front end sees the end.
    *locked(connection) = None;
    device.hang_up(until);
    device.counters.connected.store(0, Ordering::Relaxed);
    device.ready.accept = true;
}
