//! A server that is asked to stop refuses requests with `ESHUTDOWN`, and waits for its clients to take their leave.
//!
//! Only who asks something hears of it; where nobody does, a session asks for a few bytes now and then. A connection by which nothing is asked would keep
//! the server from ending, and the one that follows from beginning. So connections of all sessions are known here: when one hears that its server
//! stops, the idle ones that were made before are shut down, which their sessions see as any end; busy ones end when
//! all has been answered.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use rustix::net::Shutdown;

/// A connection, as other sessions know it.
#[derive(Debug)]
pub(super) struct Known {
    /// So many stops of servers were heard of when it was begun.
    begun: u64,
    busy: AtomicBool,
    socket: OnceLock<OwnedFd>,
}

impl Known {
    /// Its socket.
    pub(super) fn is_at(&self, socket: &impl AsFd) {
        // (Without a descriptor to spare it is not shut down by others: it hears of the stop when it asks.)
        if let Ok(socket) = socket.as_fd().try_clone_to_owned() {
            let _ = self.socket.set(socket);
        }
    }

    /// Whether requests are under way by it.
    pub(super) fn is_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::SeqCst);
    }
}

/// See the [module](self). Of one store.
#[derive(Debug, Default)]
pub(super) struct Stops {
    heard: AtomicU64,
    connections: Mutex<Vec<Weak<Known>>>,
}

impl Stops {
    /// One that is begun now.
    pub(super) fn connection(&self) -> Arc<Known> {
        let begun = self.heard.load(Ordering::SeqCst);
        let known = Arc::new(Known { begun, busy: false.into(), socket: OnceLock::new() });
        let mut all = self.connections.lock();
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&known));
        known
    }

    /// Whether any session has a connection, or is about to.
    pub(super) fn has_connections(&self) -> bool {
        self.connections.lock().iter().any(|known| known.strong_count() > 0)
    }

    /// Whether its server has stopped since, as far as any session has heard.
    pub(super) fn has_stopped(&self, known: &Known) -> bool {
        known.begun < self.heard.load(Ordering::SeqCst)
    }

    /// The server of a connection has said that it stops.
    pub(super) fn stopped(&self, known: &Known) {
        if self.has_stopped(known) {
            return;
        }
        let all = self.connections.lock();
        self.heard.fetch_max(known.begun + 1, Ordering::SeqCst);
        for other in all.iter().filter_map(Weak::upgrade) {
            if self.has_stopped(&other)
                && !other.busy.load(Ordering::SeqCst)
                && let Some(socket) = other.socket.get()
            {
                // One that has ended by itself needs no more.
                let _ = rustix::net::shutdown(socket, Shutdown::Both);
            }
        }
    }
}
