//! Reads by a pool of threads: for hosts that forbid io_uring, and for devices without a descriptor.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Job, signal};
use crate::device::Device;
use crate::error::DeviceError;

type Done = (Job, Result<(), DeviceError>);

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Job>,
    stop: bool,
}

struct Shared {
    device: Arc<dyn Device>,
    event: Arc<OwnedFd>,
    queue: Mutex<Queue>,
    work: Condvar,
    done: Mutex<Vec<Done>>,
}

/// A reader thread does not panic while it holds a lock, and a queue is whole after each operation.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) struct Threads {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
    /// Submitted since the last flush: one lock and one wake-up for all of them.
    batch: Vec<Job>,
    ready: VecDeque<Done>,
}

impl Threads {
    pub(super) fn start(
        device: Arc<dyn Device>,
        threads: u32,
        event: Arc<OwnedFd>,
    ) -> io::Result<Threads> {
        let shared = Arc::new(Shared {
            device,
            event,
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Mutex::default(),
        });
        let mut pool =
            Threads { shared, readers: Vec::new(), batch: Vec::new(), ready: VecDeque::new() };
        for i in 0..threads {
            let shared = pool.shared.clone();
            let reader =
                std::thread::Builder::new().name(format!("read-{i}")).stack_size(128 << 10);
            match reader.spawn(move || shared.serve()) {
                Ok(handle) => pool.readers.push(handle),
                // A limit on threads: go on with those there are.
                Err(_) if !pool.readers.is_empty() => break,
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
        if count >= self.readers.len() {
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
            let result = self.device.read_at(job.start, &mut job.buf);
            let mut done = locked(&self.done);
            done.push((job, result));
            // The owner takes all of them at once, so one signal per batch is enough.
            let first = done.len() == 1;
            drop(done);
            if first {
                signal(&self.event);
            }
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut queue = locked(&self.shared.queue);
        queue.waiting.clear();
        queue.stop = true;
        drop(queue);
        self.shared.work.notify_all();
        for reader in self.readers.drain(..) {
            // A reader that panicked has said so on stderr already.
            let _ = reader.join();
        }
    }
}
