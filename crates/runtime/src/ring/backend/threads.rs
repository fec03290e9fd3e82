//! Operations by a pool of threads: for hosts that forbid io_uring, and for devices without a descriptor.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::super::event::Event;
use super::{Done, Work};

struct Queue<W> {
    waiting: VecDeque<W>,
    stop: bool,
}

struct Shared<W: Work> {
    context: W::Context,
    event: Event,
    queue: Mutex<Queue<W>>,
    work: Condvar,
    done: Mutex<Vec<Done<W>>>,
}

/// A thread of the pool does not panic while it holds a lock, and a queue is whole after each operation.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(in crate::ring) struct Threads<W: Work> {
    shared: Arc<Shared<W>>,
    threads: Vec<JoinHandle<()>>,
    /// Submitted since the last flush: one lock and one wake-up for all of them.
    batch: Vec<W>,
    ready: VecDeque<Done<W>>,
}

impl<W: Work> Threads<W> {
    pub(super) fn start(
        context: W::Context,
        threads: u32,
        name: &str,
        event: Event,
    ) -> io::Result<Threads<W>> {
        let shared = Arc::new(Shared {
            context,
            event,
            queue: Mutex::new(Queue { waiting: VecDeque::new(), stop: false }),
            work: Condvar::new(),
            done: Mutex::default(),
        });
        let mut pool =
            Threads { shared, threads: Vec::new(), batch: Vec::new(), ready: VecDeque::new() };
        for i in 0..threads {
            let shared = pool.shared.clone();
            let thread =
                std::thread::Builder::new().name(format!("{name}-{i}")).stack_size(128 << 10);
            match thread.spawn(move || shared.serve()) {
                Ok(handle) => pool.threads.push(handle),
                // A limit on threads: go on with those there are.
                Err(_) if !pool.threads.is_empty() => break,
                Err(e) => return Err(e),
            }
        }
        Ok(pool)
    }

    pub(super) fn submit(&mut self, work: W) {
        self.batch.push(work);
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

    pub(super) fn pop(&mut self) -> Option<Done<W>> {
        if self.ready.is_empty() {
            self.ready.extend(locked(&self.shared.done).drain(..));
        }
        self.ready.pop_front()
    }
}

impl<W: Work> Shared<W> {
    fn serve(&self) {
        loop {
            let mut queue = locked(&self.queue);
            let mut work = loop {
                if let Some(work) = queue.waiting.pop_front() {
                    break work;
                }
                if queue.stop {
                    return;
                }
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            let result = work.perform(&self.context);
            let mut done = locked(&self.done);
            done.push((work, result));
            // The owner takes all of them at once, so one signal per batch is enough.
            let first = done.len() == 1;
            drop(done);
            if first {
                self.event.signal();
            }
        }
    }
}

impl<W: Work> Drop for Threads<W> {
    fn drop(&mut self) {
        let mut queue = locked(&self.shared.queue);
        queue.waiting.clear();
        queue.stop = true;
        drop(queue);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}
