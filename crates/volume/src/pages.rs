//! Which pages of a file are under way past the page cache, and which through it.
//!
//! A write past the page cache that meets a page which is changed through it loses one of the two, whatever bytes of the page
//! they wanted: the kernel cannot drop the page (it says "Page cache invalidation failure on direct I/O", and fails the next
//! syncs of everybody), and later writes it over what was written past it. So in a page the two take turns, over all sessions of
//! a file. One way alone needs no turns: the kernel orders that.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

/// The most bytes that are taken to be one page: file systems have pages as large as their blocks, some say that their blocks
/// are much larger.
const MOST: u64 = 1 << 20;

/// Which pages an operation meets, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    first: u64,
    last: u64,
    /// Past the page cache.
    direct: bool,
    changes: bool,
}

impl Claim {
    fn excludes(&self, other: &Claim) -> bool {
        self.direct != other.direct
            && (self.changes || other.changes)
            && self.first <= other.last
            && other.first <= self.last
    }
}

/// A session, as the others see it.
#[derive(Debug)]
struct Door {
    event: OwnedFd,
    /// Its operations whose turn has come.
    turns: Mutex<Vec<u64>>,
}

#[derive(Debug)]
struct Waiter {
    claim: Claim,
    door: Arc<Door>,
    key: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Of operations under way: past the page cache, and through it.
    held: [Vec<Option<Claim>>; 2],
    free: [Vec<usize>; 2],
    /// In the order in which they came.
    waiting: VecDeque<Waiter>,
}

impl State {
    fn must_wait(&self, claim: &Claim, ahead: usize) -> bool {
        let others = usize::from(claim.direct);
        let mut held = self.held[others].iter().flatten();
        // Nobody takes it with one way only: then this is one look at an empty list.
        (self.held[others].len() > self.free[others].len() && held.any(|c| c.excludes(claim)))
            || self.waiting.iter().take(ahead).any(|w| w.claim.excludes(claim))
    }

    fn hold(&mut self, claim: Claim) {
        let way = usize::from(!claim.direct);
        match self.free[way].pop() {
            Some(at) => self.held[way][at] = Some(claim),
            None => self.held[way].push(Some(claim)),
        }
    }

    fn release(&mut self, claim: Claim) {
        let way = usize::from(!claim.direct);
        if let Some(at) = self.held[way].iter().position(|held| *held == Some(claim)) {
            self.held[way][at] = None;
            self.free[way].push(at);
        }
        let mut at = 0;
        while at < self.waiting.len() {
            let next = self.waiting[at].claim;
            if self.must_wait(&next, at) {
                at += 1;
            } else if let Some(waiter) = self.waiting.remove(at) {
                self.hold(next);
                waiter.door.turns.lock().push(waiter.key);
                // Full means that it will wake anyway.
                let _ = rustix::io::write(&waiter.door.event, &1u64.to_ne_bytes());
            }
        }
    }
}

/// The pages of a file, for all its sessions.
#[derive(Debug)]
pub(super) struct Pages {
    unit: u64,
    state: Mutex<State>,
}

impl Pages {
    /// Of a file whose file system has blocks of so many bytes.
    pub(super) fn new(block: u64) -> Pages {
        let unit = if block.is_power_of_two() { block.clamp(4096, MOST) } else { 4096 };
        Pages { unit, state: Mutex::default() }
    }

    /// What an operation on bytes `offset..offset + len` meets, of which there is at least one.
    pub(super) fn claim(&self, offset: u64, len: u64, direct: bool, changes: bool) -> Claim {
        let last = (offset + len.max(1) - 1) / self.unit;
        Claim { first: offset / self.unit, last, direct, changes }
    }

    /// Whether the range ends where pages do: then nothing of it goes through the page cache.
    pub(super) fn is_whole(&self, offset: u64, len: u64) -> bool {
        offset.is_multiple_of(self.unit) && len.is_multiple_of(self.unit)
    }

    /// A session's means to take its turns.
    pub(super) fn visitor(self: &Arc<Pages>) -> rustix::io::Result<Visitor> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let door = Arc::new(Door { event, turns: Mutex::default() });
        Ok(Visitor { pages: self.clone(), door, has: Vec::new() })
    }
}

/// A session's turns. Dropped, it gives back what it has.
#[derive(Debug)]
pub(super) struct Visitor {
    pages: Arc<Pages>,
    door: Arc<Door>,
    /// What it has or waits for, by the operation's key.
    has: Vec<Option<Claim>>,
}

impl Visitor {
    /// Readable when [`Visitor::turns`] has something.
    pub(super) fn fd(&self) -> RawFd {
        self.door.event.as_raw_fd()
    }

    pub(super) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Whether operation `key` may begin; else it is among the [`Visitor::turns`] later.
    pub(super) fn enter(&mut self, key: u64, claim: Claim) -> bool {
        let at = key as usize;
        if self.has.len() <= at {
            self.has.resize(at + 1, None);
        }
        self.has[at] = Some(claim);
        let mut state = self.pages.state.lock();
        if state.must_wait(&claim, usize::MAX) {
            let door = self.door.clone();
            state.waiting.push_back(Waiter { claim, door, key });
            return false;
        }
        state.hold(claim);
        true
    }

    /// Operations whose turn has come.
    pub(super) fn turns(&mut self) -> Vec<u64> {
        // EAGAIN means that nothing was signalled.
        let _ = rustix::io::read(&self.door.event, &mut [0u8; 8]);
        std::mem::take(&mut *self.door.turns.lock())
    }

    /// Operation `key` has ended.
    pub(super) fn leave(&mut self, key: u64) {
        if let Some(claim) = self.has.get_mut(key as usize).and_then(Option::take) {
            self.pages.state.lock().release(claim);
        }
    }
}

impl Drop for Visitor {
    fn drop(&mut self) {
        let mut state = self.pages.state.lock();
        let mut waited = Vec::new();
        state.waiting.retain(|w| {
            let mine = Arc::ptr_eq(&w.door, &self.door);
            if mine {
                waited.push(w.key);
            }
            !mine
        });
        for (key, claim) in self.has.iter().enumerate() {
            // What only waited is held by nobody.
            if let Some(claim) = claim.filter(|_| !waited.contains(&(key as u64))) {
                state.release(claim);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_take_turns_in_a_page_in_the_order_in_which_they_came() {
        let pages = Arc::new(Pages::new(512));
        let (mut a, mut b) = (pages.visitor().unwrap(), pages.visitor().unwrap());
        // Three pages past the cache; most of them through it; and neighbours of both.
        assert!(a.enter(0, pages.claim(0, 12_288, true, true)));
        assert!(!b.enter(0, pages.claim(0, 11_776, false, true)));
        assert!(b.enter(1, pages.claim(12_288, 512, false, true)));
        assert!(a.enter(1, pages.claim(16_384, 4096, true, true)));
        // It would go before who waits.
        assert!(!a.enter(2, pages.claim(8192, 4096, true, true)));
        // The same way needs no turn.
        assert!(b.enter(2, pages.claim(12_800, 100, false, true)));
        assert!(b.turns().is_empty() && a.turns().is_empty());
        a.leave(0);
        assert_eq!((b.turns(), a.turns()), (vec![0], vec![]));
        b.leave(0);
        assert_eq!((b.turns(), a.turns()), (vec![], vec![2]));
    }

    #[test]
    fn reads_meet_reads() {
        let pages = Arc::new(Pages::new(4096));
        let mut a = pages.visitor().unwrap();
        assert!(a.enter(0, pages.claim(0, 4096, true, false)));
        assert!(a.enter(1, pages.claim(0, 100, false, false)));
        assert!(!a.enter(2, pages.claim(0, 4096, true, true)), "a write past the cache waits");
        assert!(!a.enter(3, pages.claim(10, 10, false, false)), "and is not passed");
        a.leave(1);
        assert_eq!(a.turns(), [2]);
    }

    #[test]
    fn who_leaves_for_good_gives_everything_back() {
        let pages = Arc::new(Pages::new(4096));
        let (mut a, mut b) = (pages.visitor().unwrap(), pages.visitor().unwrap());
        assert!(a.enter(0, pages.claim(0, 8192, true, true)));
        assert!(!b.enter(0, pages.claim(0, 100, false, true)));
        assert!(!a.enter(1, pages.claim(0, 4096, true, true)));
        drop(a);
        assert_eq!(b.turns(), [0]);
        drop(b);
        let mut c = pages.visitor().unwrap();
        assert!(c.enter(0, pages.claim(0, 8192, true, true)));
        assert!(c.enter(1, pages.claim(8192, 8192, false, true)));
    }
}
