//! The operations by io_uring. How the ring is set up, and why, is told in `ring/uring.rs`: this one differs in what it
//! is asked to do.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::{FileOp, Job, Moved};
use crate::ring::signal;
use crate::ring::uring::{GETEVENTS, MOST_RETRIES, why};

pub(super) struct Uring {
    ring: IoUring,
    /// By `user_data`.
    flights: Vec<Option<Job>>,
    free: Vec<u32>,
    /// Slots in the submission queue that the kernel has not taken, oldest first.
    queued: VecDeque<u32>,
    /// Operations that the kernel has.
    outstanding: usize,
    deferred: bool,
    enabled: bool,
    /// The error number after which the kernel is asked no more.
    broken: Option<i32>,
    event: Arc<OwnedFd>,
}

impl Uring {
    /// A ring of `depth` entries, signalling `event`. The error is the reason in words.
    pub(super) fn open(depth: u32, event: Arc<OwnedFd>) -> Result<Uring, String> {
        let plain = || IoUring::builder().setup_clamp().build(depth).map(|ring| (ring, false));
        // Disabled until the first flush: the thread that enables it becomes the one that may submit.
        let deferring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_r_disabled()
            .setup_clamp()
            .build(depth)
            .map(|ring| (ring, true));
        let (ring, deferred) = deferring
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
        let needed =
            [opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
        if !needed.iter().all(|code| probe.is_supported(*code)) {
            return Err(
                "kernel too old (no IORING_OP_READ, _WRITE or _FALLOCATE before Linux 5.6)"
                    .to_owned(),
            );
        }
        ring.submitter()
            .register_eventfd(event.as_raw_fd())
            .map_err(|e| format!("registering the eventfd: {e}"))?;
        Ok(Uring {
            ring,
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

    /// Takes a job. The caller keeps within the depth, so there is always a place.
    pub(super) fn submit(&mut self, job: Job) {
        let slot = self.free.pop().expect("the owner keeps within the ring's depth");
        self.flights[slot as usize] = Some(job);
        self.queue(slot);
    }

    /// Puts the (rest of the) operation in `slot` into the submission queue.
    fn queue(&mut self, slot: u32) {
        self.queued.push_back(slot);
        if self.broken.is_some() {
            return;
        }
        let job = self.flights[slot as usize].as_mut().expect("queued slots are taken");
        let entry = entry(job).user_data(u64::from(slot));
        // SAFETY: the entry points into a buffer that its job owns or shares, and names a descriptor that it keeps
        // open. Neither moves nor closes while the job is in `flights`, where it stays until the kernel has posted the
        // completion (`pop`), or is leaked when that cannot be awaited (`drop`). A payload is only read by the kernel.
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
            signal(&self.event);
        } else {
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
        signal(&self.event);
    }

    /// Runs completions that wait for it. The next thing must be to look at the completion queue until it is empty.
    fn run_deferred(&mut self) {
        // As in `ring/uring.rs`: without this each completion wakes the owner twice.
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

    /// The next operation that has ended. The owner may sleep only after `None`.
    pub(super) fn pop(&mut self) -> Option<(Job, io::Result<()>)> {
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
    fn finish(&mut self, slot: u32, result: i32) -> Option<(Job, io::Result<()>)> {
        let job = self.flights[slot as usize].as_mut().expect("completions are of taken slots");
        let outcome = if result < 0 {
            let again = matches!(-result, libc::EAGAIN | libc::EINTR);
            if again && job.retries < MOST_RETRIES && self.broken.is_none() {
                job.retries += 1;
                Moved::GoOn
            } else {
                Moved::Over(Err(io::Error::from_raw_os_error(-result)))
            }
        } else {
            job.advance(result as usize)
        };
        let Moved::Over(outcome) = outcome else {
            self.queue(slot);
            // At once: the owner may not flush again before it sleeps.
            self.flush();
            return None;
        };
        let job = self.flights[slot as usize].take().expect("taken just above");
        self.free.push(slot);
        Some((job, outcome))
    }
}

/// What the kernel is asked to do. Lengths fit: no buffer has more than 32 bits' worth (`length` below cuts).
fn entry(job: &mut Job) -> squeue::Entry {
    let fd = types::Fd(job.file.fd.as_raw_fd());
    let from = job.moved;
    /// The most of one system call, a multiple of any block.
    const MOST: usize = 1 << 30;
    match &mut job.op {
        FileOp::Read { offset, buf } => {
            let rest = &mut buf[from..];
            opcode::Read::new(fd, rest.as_mut_ptr(), rest.len().min(MOST) as u32)
                .offset(*offset + from as u64)
                .build()
        }
        FileOp::Write { offset, data, durable } => {
            let rest = &data[from..];
            opcode::Write::new(fd, rest.as_ptr(), rest.len().min(MOST) as u32)
                .offset(*offset + from as u64)
                .rw_flags(if *durable { libc::RWF_DSYNC } else { 0 })
                .build()
        }
        FileOp::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        FileOp::Punch { offset, len } => opcode::Fallocate::new(fd, *len)
            .offset(*offset)
            .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
            .build(),
        FileOp::Zero { offset, len } => opcode::Fallocate::new(fd, *len)
            .offset(*offset)
            .mode(libc::FALLOC_FL_ZERO_RANGE)
            .build(),
    }
}

impl Drop for Uring {
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
                    // Dropped on another thread than the one that submitted (EEXIST), or worse. The kernel may use the
                    // buffers at any time, so they must never be used for anything else.
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
