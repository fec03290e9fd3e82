//! The operations by a pool of threads, for hosts that forbid io_uring.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};

use super::{FileOp, Job, Moved};
use crate::ring::signal;

type Done = (Job, io::Result<()>);

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    stop: bool,
}

struct Shared {
    event: Arc<OwnedFd>,
    queue: Mutex<Queue>,
    work: Condvar,
    done: Mutex<Vec<Done>>,
}

/// A thread of the pool does not panic while it holds a lock, and a queue is whole after each operation.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Submitted since the last flush: one lock and one wake-up for all of them.
    batch: Vec<Job>,
    ready: VecDeque<Done>,
}

impl Threads {
    pub(super) fn start(threads: u32, event: Arc<OwnedFd>) -> io::Result<Threads> {
        let shared = Arc::new(Shared {
            event,
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Mutex::default(),
        });
        let mut pool =
            Threads { shared, threads: Vec::new(), batch: Vec::new(), ready: VecDeque::new() };
        for i in 0..threads {
            let shared = pool.shared.clone();
            let thread = std::thread::Builder::new().name(format!("io-{i}")).stack_size(128 << 10);
            match thread.spawn(move || shared.serve()) {
                Ok(handle) => pool.threads.push(handle),
                // A limit on threads: go on with those there are.
                Err(_) if !pool.threads.is_empty() => break,
                Err(e) => return Err(e),
            }
        }
        Ok(pool)
    }

    pub(super) fn submit(&mut self, job: Job) {
        self.batch.push(job);
    }

    pub(super) fn flush(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let count = self.batch.len();
        locked(&self.shared.queue).waiting.extend(self.batch.drain(..));
        if count >= self.threads.len() {
            self.shared.work.notify_all();
        } else {
            (0..count).for_each(|_| self.shared.work.notify_one());
        }
    }

    pub(super) fn pop(&mut self) -> Option<Done> {
        if self.ready.is_empty() {
            self.ready.extend(locked(&self.shared.done).drain(..));
        }
        self.ready.pop_front()
    }
}

impl Shared {
    fn serve(&self) {
        loop {
            let mut queue = locked(&self.queue);
            let mut job = loop {
                if let Some(job) = queue.waiting.pop_front() {
                    break job;
                }
                if queue.stop {
                    return;
                }
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            let result = perform(&mut job);
            locked(&self.done).push((job, result));
            signal(&self.event);
        }
    }
}

/// The whole operation.
fn perform(job: &mut Job) -> io::Result<()> {
    loop {
        let from = job.moved;
        let fd = &job.file;
        let result = match &mut job.op {
            FileOp::Read { offset, buf } => {
                rustix::io::pread(fd, &mut buf[from..], *offset + from as u64)
            }
            FileOp::Write { offset, data, durable } => {
                let flags = if *durable { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
                let rest = [IoSlice::new(&data[from..])];
                rustix::io::pwritev2(fd, &rest, *offset + from as u64, flags)
            }
            FileOp::Sync => rustix::fs::fdatasync(fd).map(|()| 0),
            FileOp::Punch { offset, len } => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(fd, flags, *offset, *len).map(|()| 0)
            }
            FileOp::Zero { offset, len } => {
                rustix::fs::fallocate(fd, FallocateFlags::ZERO_RANGE, *offset, *len).map(|()| 0)
            }
        };
        match result {
            Ok(n) => {
                if let Moved::Over(result) = job.advance(n) {
                    return result;
                }
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        {
            let mut queue = locked(&self.shared.queue);
            queue.waiting.clear();
            queue.stop = true;
        }
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has nothing to wait for.
            let _ = thread.join();
        }
    }
}
