//! Operations by io_uring.
//!
//! The ring is made for one submitting thread with its completions run when that thread asks for them
//! (`SINGLE_ISSUER`, `DEFER_TASKRUN`, Linux 6.1): no interrupt of the worker between two instructions of its own, and
//! completions that come together are run together. Older kernels get what they have. An eventfd registered with the
//! ring wakes the worker's epoll; polling the ring's own descriptor works too, but not alike on all versions that defer.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{Ordering, fence};

use io_uring::{IoUring, Probe};

use super::super::event::Event;
use super::{Done, Moved, Work};

/// `IORING_ENTER_GETEVENTS`: run deferred completions.
const GETEVENTS: u32 = 1;

/// Tries of one operation that the kernel says is to be tried again, before that becomes its error.
const MOST_RETRIES: u32 = 64;

/// An operation whose memory the kernel may be using.
struct Flight<W> {
    work: W,
    retries: u32,
}

/// What a ring is to be.
pub(in crate::ring) struct Setup {
    /// Operations under way at most.
    pub depth: u32,
    /// Deferred completions, if the kernel has them.
    pub defer: bool,
    /// Codes of the operations that it will be asked for, all of Linux 5.6.
    pub codes: &'static [u8],
}

pub(in crate::ring) struct Uring<W: Work> {
    ring: IoUring,
    context: W::Context,
    /// By `user_data`.
    flights: Vec<Option<Flight<W>>>,
    free: Vec<u32>,
    /// Slots in the submission queue that the kernel has not taken, oldest first.
    queued: VecDeque<u32>,
    /// Operations that the kernel has.
    outstanding: usize,
    deferred: bool,
    enabled: bool,
    /// The error number after which the kernel is asked no more.
    broken: Option<i32>,
    event: Event,
}

impl<W: Work> Uring<W> {
    /// A ring that signals `event`. The error is the reason in words.
    pub(in crate::ring) fn open(
        context: W::Context,
        setup: &Setup,
        event: Event,
    ) -> Result<Uring<W>, String> {
        let depth = setup.depth;
        let plain = || IoUring::builder().setup_clamp().build(depth).map(|ring| (ring, false));
        // Disabled until the first flush: the thread that enables it becomes the one that may submit.
        let deferring = || {
            IoUring::builder()
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_r_disabled()
                .setup_clamp()
                .build(depth)
                .map(|ring| (ring, true))
        };
        let opened = if setup.defer { deferring() } else { plain() };
        let (ring, deferred) = opened
            .or_else(|e| if e.raw_os_error() == Some(libc::EINVAL) { plain() } else { Err(e) })
            .map_err(|e| why(&e))?;
        if ring.params().sq_entries() < depth {
            return Err(format!(
                "the kernel grants only {} entries of {depth}",
                ring.params().sq_entries()
            ));
        }
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|e| format!("kernel too old ({e})"))?;
        if let Some(code) = setup.codes.iter().find(|code| !probe.is_supported(**code)) {
            return Err(format!(
                "kernel too old (io_uring has no operation {code} before Linux 5.6)"
            ));
        }
        ring.submitter()
            .register_eventfd(event.as_raw_fd())
            .map_err(|e| format!("registering the eventfd: {e}"))?;
        Ok(Uring {
            ring,
            context,
            flights: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            queued: VecDeque::new(),
            outstanding: 0,
            deferred,
            enabled: !deferred,
            broken: None,
            event,
        })
    }

    /// Registers files, which entries may name as `Fixed(0)` and so on. The context keeps them open.
    pub(in crate::ring) fn register(&mut self, files: &[RawFd]) -> Result<(), String> {
        let registered = self.ring.submitter().register_files(files);
        registered.map_err(|e| format!("registering the file: {e}"))
    }

    /// Takes an operation. The caller keeps within the depth, so there is always a place.
    pub(super) fn submit(&mut self, work: W) {
        let slot = self.free.pop().expect("the owner keeps within the ring's depth");
        self.flights[slot as usize] = Some(Flight { work, retries: 0 });
        self.queue(slot);
    }

    /// Puts the (rest of the) operation in `slot` into the submission queue.
    fn queue(&mut self, slot: u32) {
        self.queued.push_back(slot);
        if self.broken.is_some() {
            return;
        }
        let flight = self.flights[slot as usize].as_mut().expect("queued slots are taken");
        let entry = flight.work.entry(&self.context).user_data(u64::from(slot));
        // SAFETY: by `Work`'s contract the entry points into memory that its operation owns or shares and that does not
        // move when the operation does, and names files that stay open. The operation stays in `flights` until the
        // kernel has posted the completion (`pop`), or is leaked when that cannot be awaited (`drop`).
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // At most `depth` operations exist and the queue has at least `depth` entries.
        pushed.expect("the submission queue holds the ring's depth");
    }

    pub(super) fn flush(&mut self) {
        if self.queued.is_empty() {
            return;
        }
        if self.broken.is_some() {
            // They end in `pop`.
            self.event.signal();
        } else {
            // Deferred completions are not run here: they have signalled already, and running them would signal anew.
            self.enter(0);
        }
    }

    /// One `io_uring_enter`: submits what is queued.
    fn enter(&mut self, flags: u32) {
        if !self.enabled {
            // The only failures are of a ring that is enabled already, which this one is not.
            self.enabled = self.ring.submitter().register_enable_rings().is_ok();
        }
        // Publishes the entries pushed so far.
        self.ring.submission().sync();
        let count = self.queued.len() as u32;
        let entered = loop {
            // SAFETY: no argument structure is passed (with none, the size is that of the default signal set's), and
            // the entries' buffers are valid as said in `queue`.
            let entered =
                unsafe { self.ring.submitter().enter::<libc::sigset_t>(count, 0, flags, None) };
            if !matches!(&entered, Err(e) if e.raw_os_error() == Some(libc::EINTR)) {
                break entered;
            }
        };
        match entered {
            Ok(taken) => {
                let taken = taken.min(self.queued.len());
                self.queued.drain(..taken);
                self.outstanding += taken;
                if taken == count as usize {
                    return;
                }
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {}
            Err(e) => {
                // Lasting: what the kernel has not taken will never be, and fails in `pop`.
                tracing::error!(error = %e, "io_uring_enter failed; its operations fail");
                self.broken = Some(e.raw_os_error().unwrap_or(libc::EIO));
            }
        }
        // Short of memory, or broken: the owner must not sleep, but come back and flush again.
        self.event.signal();
    }

    /// Runs completions that wait for it. The next thing must be to look at the completion queue until it is empty.
    fn run_deferred(&mut self) {
        // Without this each completion wakes the owner twice: when it came, and when this call posts it.
        //
        // One that comes between the end of the call and the enabling has signalled nothing, so the caller looks for
        // deferred work once more. On x86 the kernel's setting of the flag orders it before its look at whether the
        // signal is enabled; elsewhere that order is not promised, and one wake-up too many is the lesser evil.
        let quiet = cfg!(target_arch = "x86_64");
        if quiet {
            self.ring.completion().disable_eventfd();
        }
        self.enter(GETEVENTS);
        if quiet {
            self.ring.completion().enable_eventfd();
            fence(Ordering::SeqCst);
        }
    }

    /// Has the kernel post what has ended, whether it has signalled it or not. Returns whether [`Uring::pop`] has something.
    pub(super) fn look(&mut self) -> bool {
        if self.outstanding == 0 || self.broken.is_some() {
            return false;
        }
        if self.deferred {
            self.enter(GETEVENTS);
        }
        !self.ring.completion().is_empty()
    }

    /// The next operation that has ended. The owner may sleep only after `None`.
    pub(super) fn pop(&mut self) -> Option<Done<W>> {
        loop {
            let next = self.ring.completion().next();
            match next {
                Some(entry) => {
                    self.outstanding = self.outstanding.saturating_sub(1);
                    if let Some(done) = self.finish(entry.user_data() as u32, entry.result()) {
                        return Some(done);
                    }
                }
                None if self.deferred
                    && self.outstanding > 0
                    && self.broken.is_none()
                    && self.ring.submission().taskrun() =>
                {
                    self.run_deferred();
                }
                None => {
                    let errno = self.broken?;
                    let slot = self.queued.pop_front()?;
                    return self.finish(slot, -errno);
                }
            }
        }
    }

    /// What a completion means for its operation: over, or to be continued (`None`).
    fn finish(&mut self, slot: u32, result: i32) -> Option<Done<W>> {
        let flight = self.flights[slot as usize].as_mut().expect("completions are of taken slots");
        let outcome = if result < 0 {
            let again = matches!(-result, libc::EAGAIN | libc::EINTR);
            if again && flight.retries < MOST_RETRIES && self.broken.is_none() {
                flight.retries += 1;
                Moved::GoOn
            } else {
                Moved::Over(Err(io::Error::from_raw_os_error(-result)))
            }
        } else {
            flight.work.advance(result as usize)
        };
        let Moved::Over(outcome) = outcome else {
            self.queue(slot);
            // At once: the owner may not flush again before it sleeps.
            self.flush();
            return None;
        };
        let Flight { work, .. } = self.flights[slot as usize].take().expect("taken just above");
        self.free.push(slot);
        let outcome = outcome.map_err(|e| work.failed(&self.context, e));
        Some((work, outcome))
    }
}

impl<W: Work> Drop for Uring<W> {
    fn drop(&mut self) {
        while self.outstanding > 0 {
            // Not `enter`: what is still queued shall stay so.
            // SAFETY: as in `enter`.
            let waited =
                unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, GETEVENTS, None) };
            match waited {
                Err(e)
                    if !matches!(
                        e.raw_os_error(),
                        Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
                    ) =>
                {
                    // Dropped on another thread than the one that submitted (EEXIST), or worse. The kernel may use
                    // the buffers at any time, so they must never be used for anything else.
                    mem::forget(mem::take(&mut self.flights));
                    return;
                }
                _ => {
                    let ended = self.ring.completion().count();
                    self.outstanding = self.outstanding.saturating_sub(ended);
                }
            }
        }
    }
}

/// Why `io_uring_setup` failed, in words.
fn why(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EPERM) => "io_uring is forbidden here (EPERM: kernel.io_uring_disabled or the container's seccomp profile)".to_owned(),
        Some(libc::ENOSYS) => "this kernel has no io_uring (ENOSYS)".to_owned(),
        Some(libc::ENOMEM) => "no memory may be locked for io_uring (ENOMEM: raise the limit memlock)".to_owned(),
        _ => format!("io_uring_setup: {error}"),
    }
}
