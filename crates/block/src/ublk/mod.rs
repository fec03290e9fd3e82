//! Volumes as disks of this host: `/dev/ublkbN`, by the kernel's ublk driver.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`abi`] | the driver's numbers and structures |
//! | [`request`] | what a descriptor asks for |
//! | `control` | the control device: devices come and go |
//! | `port` | a device's queues |
//! | `worker` | a thread that serves queues |
//! | `device` | a device's life: it begins, is taken over after a crash, goes |
//!
//! Each address is a device of one volume. Its queues are dealt to threads of their own, each with a
//! [`Service`](crate::cache::service::Service) of its own.

pub mod abi;
mod control;
mod device;
mod port;
pub mod request;
#[cfg(test)]
mod tests;
mod worker;

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use mio::{Poll, Registry, Token, Waker};

use crate::cache::service::Service;
use crate::cache::{Volume, Volumes};
use crate::served::{Face, FaceStatus, ServerError, face};
use control::Control;
use device::{Device, Hand};
use port::KernelPort;
use worker::{SERVICE, WAKE, Worker};

/// An address of a device: `ublk:[ID][,volume=NAME]`. The volume may be left out where there is only one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkListen {
    /// The device's number, N in `/dev/ublkbN`; none leaves the choice to the kernel.
    pub id: Option<u32>,
    /// The volume's name, empty for the only one.
    pub volume: String,
}

impl UblkListen {
    /// Whether the text is meant as one.
    pub fn is_meant(text: &str) -> bool {
        text.starts_with("ublk")
    }
}

impl FromStr for UblkListen {
    type Err = ServerError;

    fn from_str(text: &str) -> Result<UblkListen, ServerError> {
        let bad = |reason: &str| ServerError::Address { text: text.into(), reason: reason.into() };
        let rest = text.strip_prefix("ublk:").ok_or_else(|| bad("ublk wants a colon behind it"))?;
        let (id, options) = match rest.split_once(',') {
            None => (rest, None),
            Some((id, options)) => (id, Some(options)),
        };
        let id = match id {
            "" => None,
            // Not by `parse` alone: it takes a sign.
            _ if id.bytes().all(|b| b.is_ascii_digit()) => Some(
                id.parse::<u32>()
                    .ok()
                    .filter(|&id| id < abi::MAX_DEVICES)
                    .ok_or_else(|| bad("the device's number is below 1048576"))?,
            ),
            _ => return Err(bad("the device's number is not one; it may be left out")),
        };
        let volume = match options {
            None => String::new(),
            Some(options) => {
                let name = options
                    .strip_prefix("volume=")
                    .ok_or_else(|| bad("what follows the number is not volume=NAME"))?;
                if name.is_empty() {
                    return Err(bad("the volume's name is missing"));
                }
                name.to_owned()
            }
        };
        Ok(UblkListen { id, volume })
    }
}

impl fmt::Display for UblkListen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ublk:")?;
        if let Some(id) = self.id {
            write!(f, "{id}")?;
        }
        if self.volume.is_empty() { Ok(()) } else { write!(f, ",volume={}", self.volume) }
    }
}

/// Counters of a device. They only grow.
#[derive(Debug, Default)]
pub struct UblkCounters {
    /// Requests taken.
    pub requests: AtomicU64,
    /// Requests answered with an error of the store.
    pub failed: AtomicU64,
    /// Requests that no volume could do.
    pub refused: AtomicU64,
    /// The disk as it is there now.
    pub state: Mutex<Option<UblkState>>,
}

impl face::Counted for UblkCounters {
    fn status(&self) -> FaceStatus {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let connected = state.is_some();
        let disk = state.unwrap_or_default();
        FaceStatus {
            face: "ublk".into(),
            device: connected.then(|| format!("/dev/ublkb{}", disk.id)),
            connected,
            queues: disk.queues.into(),
            queue_size: disk.depth.into(),
            features: abi::flag::names(disk.flags).into_iter().map(str::to_owned).collect(),
            bytes: disk.sectors * abi::SECTOR,
            grows: disk.grows,
            requests: load(&self.requests),
            failed: load(&self.failed),
            refused: load(&self.refused),
            ..FaceStatus::default()
        }
    }
}

/// A disk that is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UblkState {
    /// N of `/dev/ublkbN`.
    pub id: u32,
    /// Its queues.
    pub queues: u16,
    /// Requests of each, at most.
    pub depth: u16,
    /// What driver and daemon have agreed on: of [`abi::flag`].
    pub flags: u64,
    /// Sectors of 512 bytes, as the disk knows.
    pub sectors: u64,
    /// It can be given another size while it is there.
    pub grows: bool,
}

/// The driver, asked on behalf of each address, and no device yet.
pub struct UblkDoors(Vec<(UblkListen, Control)>, Vec<String>);

fn listen_error(listen: &UblkListen, reason: impl Into<String>) -> ServerError {
    ServerError::Listen { address: listen.to_string(), reason: reason.into() }
}

impl UblkDoors {
    /// Asks the driver. `plain`: for nothing that Linux 6.0 has not, whatever it can do.
    ///
    /// # Errors
    /// [`ServerError`] naming the first address that cannot be had: without ublk, all.
    pub fn open(listen: &[UblkListen], plain: bool) -> Result<UblkDoors, ServerError> {
        let mut doors: Vec<(UblkListen, Control)> = Vec::new();
        for listen in listen {
            if listen.id.is_some() && doors.iter().any(|(other, _)| other.id == listen.id) {
                return Err(listen_error(listen, "its number is given twice"));
            }
            let control = Control::open(plain).map_err(|reason| listen_error(listen, reason))?;
            doors.push((listen.clone(), control));
        }
        Ok(UblkDoors(doors, Vec::new()))
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether each has its volume, and its number is free, or of a device that it may take over. Those of the volumes `later`
    /// have theirs when it comes.
    ///
    /// # Errors
    /// [`ServerError`] naming the first of which that is not so.
    pub fn check(&mut self, volumes: &Volumes, later: &[String]) -> Result<(), ServerError> {
        self.1 = later.to_vec();
        for (listen, control) in &mut self.0 {
            let Some(volume) = find(listen, volumes, later)? else { continue };
            device::find(control, listen.id, &volume)
                .map_err(|reason| listen_error(listen, reason))?;
        }
        Ok(())
    }
}

/// Its volume; `None` if that is one of those that come `later`.
fn find(
    listen: &UblkListen,
    volumes: &Volumes,
    later: &[String],
) -> Result<Option<Arc<Volume>>, ServerError> {
    if later.contains(&listen.volume) {
        return Ok(None);
    }
    match (volumes.find(&listen.volume), &*listen.volume) {
        // Of several one may not be there yet.
        (Some(volume), "") if later.is_empty() => Ok(Some(volume)),
        (_, "") => {
            Err(listen_error(listen, "there are several volumes: say which with ,volume=NAME"))
        }
        (Some(volume), _) => Ok(Some(volume)),
        (None, volume) => Err(listen_error(listen, format!("there is no volume '{volume}'"))),
    }
}

/// Devices that are there, until they are stopped or dropped.
#[derive(Default)]
pub struct UblkServer {
    devices: Vec<Running>,
}

struct Running {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<UblkCounters>,
    volume: String,
    address: String,
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> ServerError {
    move |source| ServerError::System { what, source }
}

impl UblkServer {
    /// Makes the devices, or takes over those that a killed daemon has left, and serves each by `threads` threads. `service`
    /// makes what each does its requests with: it is told the thread's number, over all devices, where to register
    /// descriptors, and the first token that is free for them. `buffer_bytes` is the memory of each thread for requests under
    /// way.
    ///
    /// # Errors
    /// [`ServerError`] when a volume is not there, or a device or thread cannot be had.
    pub fn start_behind<S, F>(
        doors: UblkDoors,
        volumes: &Arc<Volumes>,
        threads: usize,
        buffer_bytes: usize,
        mut service: F,
    ) -> Result<UblkServer, ServerError>
    where
        S: Service + Send + 'static,
        F: FnMut(usize, Registry, usize) -> io::Result<S>,
    {
        let mut server = UblkServer::default();
        for (number, (listen, control)) in doors.0.into_iter().enumerate() {
            let volume = find(&listen, volumes, &doors.1)?;
            let counters: Arc<UblkCounters> = Arc::default();
            let (reports, heard) = mpsc::channel();
            let mut hands = Vec::new();
            for thread in 0..threads {
                let poll = Poll::new().map_err(system("epoll"))?;
                let waker = Waker::new(poll.registry(), Token(WAKE)).map_err(system("eventfd"))?;
                let registry = poll.registry().try_clone().map_err(system("epoll"))?;
                let service = service(number * threads + thread, registry, SERVICE)
                    .map_err(system("a device's rings"))?;
                let (orders, told) = mpsc::channel();
                let worker = Worker::<S, KernelPort>::new(
                    listen.to_string(),
                    service,
                    poll,
                    // One request of the longest must always fit, whatever is asked for.
                    buffer_bytes.max(device::TRANSFER as usize),
                    counters.clone(),
                    told,
                    reports.clone(),
                );
                let thread = std::thread::Builder::new()
                    .name(format!("ublk-{number}-{thread}"))
                    .spawn(move || worker.run())
                    .map_err(system("a thread"))?;
                hands.push(Hand::new(orders, waker, thread));
            }
            let name = volume.as_ref().map_or(&*listen.volume, |v| v.name()).to_owned();
            let seen = counters.clone();
            let mut device =
                Device::new(listen.clone(), control, volumes.clone(), hands, heard, seen);
            let up = volume.map(|volume| device.bring_up(&volume)).transpose();
            let up = up.map_err(|reason| listen_error(&listen, reason))?;
            let of = name.clone();
            let (stop, stopped) = mpsc::channel();
            let thread = std::thread::Builder::new()
                .name(format!("ublk-{number}"))
                .spawn(move || device.run(&of, up, &stopped))
                .map_err(system("a thread"))?;
            server.devices.push(Running {
                stop: Some(stop),
                thread: Some(thread),
                counters,
                volume: name,
                address: listen.to_string(),
            });
        }
        Ok(server)
    }

    /// What each device has done, with the name of its volume.
    pub fn counters(&self) -> impl Iterator<Item = (&str, &Arc<UblkCounters>)> {
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

    /// Answers what is under way. Devices that nobody uses go; the others stay, and their requests wait for the next daemon.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        for device in &mut self.devices {
            // Nobody is left to say anything: that is the word.
            device.stop = None;
        }
        for device in &mut self.devices {
            if let Some(thread) = device.thread.take() {
                // A thread that panicked has said so on stderr already.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for UblkServer {
    fn drop(&mut self) {
        self.end();
    }
}
