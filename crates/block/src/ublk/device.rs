//! A device's life: it begins, is taken over after a crash, goes.
//!
//! ```text
//! none ──add, params, queues served, start──▶ live ──stop, delete──▶ none
//!                                               │ the daemon is killed, or stops while somebody uses the disk
//! live ◀──queues served, end of recovery── quiesced: requests wait
//! ```
//!
//! A device is known again by a note that the driver keeps: a hash of the volume's name and its store's.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_base::{HashKey, KeyHasher};
use mio::Waker;
use rustix::io::Errno as Os;
use tracing::{info, warn};

use super::abi::{self, Info, Params, SECTOR, attribute, control, flag, state};
use super::control::Control;
use super::port::{KernelPort, Place};
use super::request::{MAX_RANGE_SECTORS, Shape};
use super::worker::{Job, Order, Report};
use super::{UblkCounters, UblkListen, UblkState};
use crate::cache::{Client, Told, Volume, Volumes};

/// Bytes of one request's data, at most. Power of two.
pub(super) const TRANSFER: u32 = 1 << 20;
/// Tags of each queue.
const DEPTH: u16 = 128;
/// Where the driver copies data itself, each tag has memory of its own: less of it, and fewer.
const SMALL_TRANSFER: u32 = 512 << 10;
const SMALL_DEPTH: u16 = 64;
/// Between two looks at whether the volume is put aside, or has come back.
const LOOK: Duration = Duration::from_millis(500);
/// For a device to have its disk: partitions are looked for, in the volume.
const START: Duration = Duration::from_secs(60);
/// For the driver to notice that a server has died (Linux before 6.8 looks every five seconds).
const NOTICE: Duration = Duration::from_secs(15);
/// For requests that have begun, when the device stops.
const DRAIN: Duration = Duration::from_secs(10);
/// For a device whose disk is gone to be let go of by whoever has it open.
const LET_GO: Duration = Duration::from_secs(2);
/// Before it is tried again to make a device that could not be made.
const AGAIN: Duration = Duration::from_secs(5);
/// For the driver's and the threads' own work.
const SHORT: Duration = Duration::from_secs(10);
/// For a device's node to appear.
const NODE: Duration = Duration::from_secs(3);

/// A thread that serves queues.
pub(super) struct Hand {
    orders: Option<Sender<Order<KernelPort>>>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
}

impl Hand {
    pub(super) fn new(
        orders: Sender<Order<KernelPort>>,
        waker: Waker,
        thread: JoinHandle<()>,
    ) -> Hand {
        Hand { orders: Some(orders), waker, thread: Some(thread) }
    }

    /// A thread that cannot be told, or woken, has ended, or sees it soon.
    fn tell(&self, order: Order<KernelPort>) {
        if let Some(orders) = &self.orders {
            let _ = orders.send(order);
        }
        let _ = self.waker.wake();
    }
}

impl Drop for Hand {
    fn drop(&mut self) {
        self.orders = None;
        let _ = self.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

/// A device that is served.
pub(super) struct Up {
    volume: Arc<Volume>,
    _client: Client,
    info: Info,
    /// Threads that serve queues of it.
    serving: usize,
    /// Of the disk, as it was told last.
    sectors: u64,
    /// It was said that the disk cannot grow to this.
    stays: u64,
}

/// What is there of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nothing.
    None,
    /// One of this volume, whose server has died: its requests wait, or will.
    Orphan(u32),
    /// One of this volume, without a disk, or about to have none.
    Dead(u32),
}

/// A device, in the driver or not.
pub(super) struct Device {
    listen: UblkListen,
    control: Control,
    volumes: Arc<Volumes>,
    hands: Vec<Hand>,
    reports: Receiver<Report>,
    counters: Arc<UblkCounters>,
}

/// By what a volume's device is known again.
fn note(volume: &Volume) -> u64 {
    // A key that never changes: the note outlives the daemon, and is no secret.
    let hasher = KeyHasher::new(HashKey(*b"larder ublk note"));
    let text = format!("{}\0{}", volume.name(), volume.backing().uri());
    hasher.hash(text.as_bytes()).0 as u64 | 1
}

fn node(kind: char, id: u32) -> PathBuf {
    PathBuf::from(format!("/dev/ublk{kind}{id}"))
}

/// Whether a process is there. Newer drivers have -1 for that of a server which has died; for `kill` that is every process.
fn lives(pid: i32) -> bool {
    let Some(pid) = rustix::process::Pid::from_raw(pid.max(0)) else { return false };
    pid != rustix::process::getpid()
        && rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
}

/// Looks for a device of the volume: that number's, or any.
///
/// # Errors
/// In words, when the number is taken.
pub(super) fn find(
    control: &mut Control,
    wanted: Option<u32>,
    volume: &Volume,
) -> Result<Found, String> {
    let ours = note(volume);
    let ids = match wanted {
        Some(id) => vec![id],
        None => nodes(),
    };
    for id in ids {
        let info = match control.info(id) {
            Ok(Some(info)) => info,
            Ok(None) => continue,
            Err(e) if wanted.is_none() => {
                warn!("ublk device {id}: {e}");
                continue;
            }
            Err(e) => return Err(format!("device {id}: {e}")),
        };
        let alive = info.state != state::DEAD && lives(info.pid);
        match (wanted, info.note == ours, alive) {
            (None, false, _) | (None, true, true) => {}
            (Some(_), false, _) => {
                return Err(format!(
                    "device {id} is there already, of another program or another volume: choose another number, or \
                     remove it (`ublk del -n {id}`)"
                ));
            }
            (Some(_), true, true) => {
                return Err(format!("device {id} is served by process {}: stop it", info.pid));
            }
            // Without recovery (Linux 6.0) the driver takes the disk away when its server dies.
            (_, true, false)
                if info.state == state::DEAD || info.flags & flag::USER_RECOVERY == 0 =>
            {
                return Ok(Found::Dead(id));
            }
            (_, true, false) => return Ok(Found::Orphan(id)),
        }
    }
    Ok(Found::None)
}

/// The numbers of the devices that have a node.
fn nodes() -> Vec<u32> {
    let Ok(dir) = std::fs::read_dir("/dev") else { return Vec::new() };
    let number = |entry: io::Result<std::fs::DirEntry>| {
        entry.ok()?.file_name().to_str()?.strip_prefix("ublkc")?.parse().ok()
    };
    let mut out: Vec<u32> = dir.filter_map(number).collect();
    out.sort_unstable();
    out
}

/// The disk of a volume in lines of `preferred` bytes.
fn params(shape: &Shape, preferred: u32) -> Params {
    // What is answered is durable only behind a flush, as over NBD.
    let cache = attribute::VOLATILE_CACHE | attribute::FUA;
    let best = preferred.max(4096).next_power_of_two().min(1 << 20);
    let changes = |most: u32, may: bool| if may { most } else { 0 };
    Params {
        attributes: if shape.read_only { cache | attribute::READ_ONLY } else { cache },
        // Writes of less than 4 KiB cost a read somewhere; lines are a preference.
        shifts: [9, 12, best.trailing_zeros() as u8, 12],
        max_sectors: shape.max_transfer / SECTOR as u32,
        sectors: shape.sectors,
        discard_granularity: 4096,
        max_discard: changes(MAX_RANGE_SECTORS, shape.discard),
        max_zeroes: changes(MAX_RANGE_SECTORS, !shape.read_only),
    }
}

impl Device {
    pub(super) fn new(
        listen: UblkListen,
        control: Control,
        volumes: Arc<Volumes>,
        hands: Vec<Hand>,
        reports: Receiver<Report>,
        counters: Arc<UblkCounters>,
    ) -> Device {
        Device { listen, control, volumes, hands, reports, counters }
    }

    /// The device's thread, for the volume of that name: until `stopped` is closed.
    pub(super) fn run(mut self, name: &str, mut up: Option<Up>, stopped: &Receiver<()>) {
        // Somebody else has ended the device: it comes back with the volume, not before.
        let mut ended = false;
        // What was said last of why there is no device, and when to try again.
        let mut said = String::new();
        let mut again = Instant::now();
        loop {
            if stopped.recv_timeout(LOOK) != Err(RecvTimeoutError::Timeout) {
                break;
            }
            let there = self.volumes.find(name).filter(|v| !v.is_closing());
            match &mut up {
                Some(now) => {
                    let left = self.reports.try_recv();
                    let listed = there.is_some_and(|v| Arc::ptr_eq(&v, &now.volume));
                    // A detach waits as long as the disk is in use, unless it is to disconnect its clients.
                    let go = now.volume.is_closing() || (!listed && !in_use(now.info.id));
                    if let Ok(report) = left {
                        let why = match report {
                            Report::Left(Err(why)) => why,
                            _ => "somebody has stopped it".to_owned(),
                        };
                        warn!("{}: {} is given up: {why}", self.listen, self.disk(now));
                        ended = true;
                    } else if go {
                        info!("{}: {} goes: its volume is put aside", self.listen, self.disk(now));
                    } else {
                        self.grow(now);
                        continue;
                    }
                    if let Some(now) = up.take() {
                        let already = usize::from(ended);
                        self.remove(now, already);
                    }
                }
                None => match there {
                    None => ended = false,
                    Some(_) if ended || Instant::now() < again => {}
                    Some(volume) => match self.bring_up(&volume) {
                        Ok(now) => {
                            up = Some(now);
                            said.clear();
                        }
                        Err(why) => {
                            if why != said {
                                warn!("{}: no disk for volume '{name}' yet: {why}", self.listen);
                                said = why;
                            }
                            again = Instant::now() + AGAIN;
                        }
                    },
                },
            }
        }
        let Some(now) = up.take() else { return };
        if self.waits_for_another(&now) && in_use(now.info.id) {
            warn!(
                "{}: {} is in use: it stays, and what is asked of it waits for the next daemon",
                self.listen,
                self.disk(&now)
            );
            self.leave(now);
        } else {
            self.remove(now, 0);
        }
    }

    fn disk(&self, up: &Up) -> String {
        node('b', up.info.id).display().to_string()
    }

    fn waits_for_another(&self, up: &Up) -> bool {
        let both = flag::USER_RECOVERY | flag::USER_RECOVERY_REISSUE;
        up.info.flags & both == both
    }

    /// Makes the device, or takes over what is there of it.
    ///
    /// # Errors
    /// In words.
    pub(super) fn bring_up(&mut self, volume: &Arc<Volume>) -> Result<Up, String> {
        // Of an earlier device.
        while self.reports.try_recv().is_ok() {}
        let about = volume.capabilities();
        let sectors = about.size / SECTOR;
        if sectors == 0 {
            return Err(format!("a volume of {} bytes is no disk", about.size));
        }
        let ((info, disk), taken_over) = match find(&mut self.control, self.listen.id, volume)? {
            // Smaller than the volume, if that has grown meanwhile.
            Found::Orphan(id) => (self.adopt(id, sectors)?, true),
            Found::Dead(id) => {
                self.delete(id, SHORT)
                    .map_err(|e| format!("device {id}, which is left over: {e}"))?;
                ((self.add(volume)?, sectors), false)
            }
            Found::None => ((self.add(volume)?, sectors), false),
        };
        match self.serve(volume, &info, taken_over) {
            Ok(serving) => {
                let mut up = Up {
                    volume: volume.clone(),
                    _client: Client::new(volume),
                    info,
                    serving,
                    sectors: disk,
                    stays: 0,
                };
                self.grow(&mut up);
                self.show(Some(&up));
                let how = if taken_over { "is taken over" } else { "is there" };
                let disk = self.disk(&up);
                info!("{}: {disk} {how}: volume '{}'", self.listen, volume.name());
                Ok(up)
            }
            Err(why) => {
                self.dismiss(0);
                if !taken_over && let Err(e) = self.delete(info.id, LET_GO) {
                    warn!("{}: device {} cannot be removed: {e}", self.listen, info.id);
                }
                Err(why)
            }
        }
    }

    /// For whoever asks for the status.
    fn show(&self, up: Option<&Up>) {
        let grows = self.control.features & flag::UPDATE_SIZE != 0;
        let state = up.map(|up| UblkState {
            id: up.info.id,
            queues: up.info.queues,
            depth: up.info.depth,
            flags: up.info.flags | self.control.features & flag::UPDATE_SIZE,
            sectors: up.sectors,
            grows,
        });
        *self.counters.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Tells the disk if its volume has grown, where the driver can be told.
    fn grow(&mut self, up: &mut Up) {
        let wanted = up.volume.capabilities().size / SECTOR;
        if wanted <= up.sectors || wanted == up.stays {
            return;
        }
        let (disk, id) = (self.disk(up), up.info.id);
        let told = tell_size(self.control.features, wanted, &mut |sectors| {
            let until = Instant::now() + SHORT;
            self.control.tell(control::UPDATE_SIZE, id, sectors, &mut || Instant::now() < until)
        });
        match told {
            Ok(()) => {
                info!("{}: {disk} has grown from {} to {wanted} sectors", self.listen, up.sectors);
                up.sectors = wanted;
            }
            Err(why) => {
                warn!(
                    "{}: {disk} keeps its {} sectors, and volume '{}' has {wanted}: {why}; detach the volume and attach it \
                     again to have the larger disk",
                    self.listen,
                    up.sectors,
                    up.volume.name()
                );
                up.stays = wanted;
            }
        }
        self.show(Some(&*up));
    }

    fn add(&mut self, volume: &Volume) -> Result<Info, String> {
        // Where the driver cannot be asked what it can do, it cannot do that either.
        let user_copy = self.control.features & flag::USER_COPY;
        let (transfer, depth) = match user_copy {
            0 => (SMALL_TRANSFER, SMALL_DEPTH),
            _ => (TRANSFER, DEPTH),
        };
        let shape = Shape::new(&volume.capabilities(), transfer);
        let encode = if self.control.as_ioctl { flag::CMD_IOCTL_ENCODE } else { 0 };
        let wish = Info {
            queues: self.hands.len().clamp(1, usize::from(abi::MAX_QUEUES)) as u16,
            depth,
            max_transfer: shape.max_transfer,
            id: self.listen.id.unwrap_or(abi::ANY),
            flags: flag::USER_RECOVERY | flag::USER_RECOVERY_REISSUE | user_copy | encode,
            note: note(volume),
            ..Info::default()
        };
        let info = self.control.add(&wish).map_err(|e| match Os::from_io_error(&e) {
            Some(Os::EXIST) => format!("device {} is there already: choose another", wish.id),
            Some(Os::PERM | Os::ACCESS) => "no permission: ublk needs CAP_SYS_ADMIN".to_owned(),
            _ => format!("the driver makes no device: {e}"),
        })?;
        if !info.is_sound() {
            return Err(format!("the driver makes a device that cannot be served: {info:?}"));
        }
        let shape = Shape::new(&volume.capabilities(), info.max_transfer);
        let params = params(&shape, volume.preferred());
        if let Err(e) = self.control.set_params(info.id, &params) {
            // It has no disk yet.
            let _ = self.delete(info.id, LET_GO);
            return Err(format!("the driver does not take the disk's parameters: {e}"));
        }
        Ok(info)
    }

    /// Takes over a device whose server has died. Returns the sectors of its disk too.
    fn adopt(&mut self, id: u32, sectors: u64) -> Result<(Info, u64), String> {
        let failed = |e: io::Error| format!("device {id} cannot be taken over: {e}");
        let until = Instant::now() + NOTICE;
        loop {
            let more = &mut || Instant::now() < until;
            match self.control.tell(control::START_RECOVERY, id, 0, more) {
                Ok(()) => break,
                // Its server's end is not noticed yet.
                Err(e) if Os::from_io_error(&e) == Some(Os::BUSY) && Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(e) => return Err(failed(e)),
            }
        }
        let info = self.control.info(id).map_err(failed)?;
        let info = info.filter(Info::is_sound).ok_or_else(|| {
            format!("device {id} cannot be served: remove it (`ublk del -n {id}`)")
        })?;
        let disk = self.control.params(id).map_err(failed)?.sectors;
        if disk > sectors {
            return Err(format!(
                "device {id} is a disk of {disk} sectors, and the volume has {sectors}: remove it (`ublk del -n {id}`)"
            ));
        }
        Ok((info, disk))
    }

    /// Deals the queues to the threads, and has the disk started. Returns how many threads serve.
    fn serve(
        &mut self,
        volume: &Arc<Volume>,
        info: &Info,
        taken_over: bool,
    ) -> Result<usize, String> {
        let path = node('c', info.id);
        let file = open_node(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let place = Place {
            file: Arc::new(file),
            depth: info.depth,
            max_transfer: info.max_transfer,
            as_ioctl: self.control.as_ioctl,
            user_copy: info.flags & flag::USER_COPY != 0,
        };
        let shape = Shape::new(&volume.capabilities(), info.max_transfer);
        let told = Arc::new(Told::new(volume));
        let threads = self.hands.len().min(usize::from(info.queues));
        for (n, hand) in self.hands.iter().enumerate().take(threads) {
            let queues: Vec<u16> = (0..info.queues).skip(n).step_by(threads).collect();
            let place = place.clone();
            let open = Box::new(move || KernelPort::open(place, &queues));
            hand.tell(Order::Serve(Job {
                volume: volume.clone(),
                told: told.clone(),
                shape,
                open,
            }));
        }
        drop(place);
        for _ in 0..threads {
            match self.reports.recv_timeout(SHORT) {
                Ok(Report::Serving) => {}
                Ok(Report::Left(how)) => return Err(how.err().unwrap_or_default()),
                Err(_) => {
                    return Err("its queues cannot be served: a thread does not answer".into());
                }
            }
        }
        let until = Instant::now() + START;
        let mut left = None;
        let number = if taken_over { control::END_RECOVERY } else { control::START };
        let pid = rustix::process::getpid().as_raw_nonzero().get() as u64;
        let started = self.control.tell(number, info.id, pid, &mut || {
            left = left.take().or_else(|| self.reports.try_recv().ok());
            left.is_none() && Instant::now() < until
        });
        match (started, left) {
            (Ok(()), None) => Ok(threads),
            (_, Some(Report::Left(Err(why)))) => Err(why),
            (_, Some(_)) => Err("somebody has removed the device".into()),
            (Err(e), None) => Err(format!("the driver does not start the disk: {e}")),
        }
    }

    /// The device goes. `left`: threads that have left it already.
    fn remove(&mut self, up: Up, left: usize) {
        self.show(None);
        let id = up.info.id;
        let until = Instant::now() + DRAIN;
        let stopped = self.control.tell(control::STOP, id, 0, &mut || Instant::now() < until);
        if let Err(e) = &stopped {
            warn!("{}: device {id} does not stop: {e}; what is under way there fails", self.listen);
        }
        let waiting = up.serving.saturating_sub(left);
        // With all their requests ended, the threads leave by themselves.
        self.dismiss(if stopped.is_ok() { waiting } else { 0 });
        // Whoever waits for the volume need not wait for the number.
        drop(up);
        match self.delete(id, LET_GO) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::TimedOut => warn!(
                "{}: somebody still has {} open: its number is free when that is closed",
                self.listen,
                node('b', id).display()
            ),
            Err(e) => warn!("{}: device {id} cannot be removed: {e}", self.listen),
        }
    }

    /// The device stays for another daemon.
    fn leave(&mut self, up: Up) {
        self.show(None);
        self.hands.iter().for_each(|hand| hand.tell(Order::Leave));
        self.hear(up.serving, DRAIN);
        self.hands.iter().for_each(|hand| hand.tell(Order::Drop));
    }

    /// The threads let go of the device's file, of which so many do so by themselves.
    fn dismiss(&self, by_themselves: usize) {
        self.hear(by_themselves, SHORT);
        self.hands.iter().for_each(|hand| hand.tell(Order::Drop));
    }

    fn hear(&self, count: usize, limit: Duration) {
        let until = Instant::now() + limit;
        let mut left = 0;
        while left < count {
            match self.reports.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Report::Left(_)) => left += 1,
                Ok(Report::Serving) => {}
                Err(_) => return,
            }
        }
    }

    fn delete(&mut self, id: u32, limit: Duration) -> io::Result<()> {
        let until = Instant::now() + limit;
        match self.control.tell(control::DELETE, id, 0, &mut || Instant::now() < until) {
            Err(e) if Os::from_io_error(&e) == Some(Os::NODEV) => Ok(()),
            other => other,
        }
    }
}

/// Gives a disk that is there so many sectors, by `tell`, where a driver with these features can.
///
/// # Errors
/// Why not, for people.
fn tell_size(
    features: u64,
    sectors: u64,
    tell: &mut dyn FnMut(u64) -> io::Result<()>,
) -> Result<(), String> {
    if features & flag::UPDATE_SIZE == 0 {
        return Err("this kernel cannot tell a disk a new size (Linux 6.16 and later can)".into());
    }
    tell(sectors).map_err(|e| format!("the driver does not take it: {e}"))
}

/// Somebody has the disk for himself: it is mounted, swapped to, or part of another.
fn in_use(id: u32) -> bool {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(node('b', id), flags, Mode::empty()).is_err_and(|e| e == Os::BUSY)
}

/// The device's node, for which whoever makes nodes may need a moment.
fn open_node(path: &PathBuf) -> io::Result<File> {
    let until = Instant::now() + NODE;
    loop {
        match File::options().read(true).write(true).open(path) {
            Err(e)
                if matches!(Os::from_io_error(&e), Some(Os::NOENT | Os::BUSY))
                    && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_has_died_is_no_process() {
        assert!(!lives(0) && !lives(-1) && !lives(i32::MIN));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(lives(pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!lives(pid));
    }

    #[test]
    fn a_size_is_told_where_that_can_be_done() {
        let mut asked = Vec::new();
        let mut tell = |sectors| {
            asked.push(sectors);
            if sectors > 100 { Err(io::Error::from_raw_os_error(19)) } else { Ok(()) }
        };
        let why = tell_size(flag::USER_COPY, 50, &mut tell).unwrap_err();
        assert!(why.contains("Linux 6.16"), "{why}");
        let can = flag::USER_COPY | flag::UPDATE_SIZE;
        assert_eq!(tell_size(can, 50, &mut tell), Ok(()));
        let why = tell_size(can, 101, &mut tell).unwrap_err();
        assert!(why.contains("does not take it"), "{why}");
        assert_eq!(asked, [50, 101], "nothing is asked of a driver that cannot");
    }
}
