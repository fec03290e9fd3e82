//! Input and output buffers of a connection, and the budget that large values share.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use larder_base::{Nanos, ObjectHash};

use super::ReadToken;

/// Bytes that a connection may keep in either direction without asking: a body or a reply value up to this size needs
/// no share of the budget, and with more than this unsent no further request is parsed.
pub const SMALL: usize = 16 << 10;

/// Input space that a new connection starts with.
const INITIAL_INPUT: usize = 2 << 10;

/// Default size of each budget of [`BigBuffers`].
pub const DEFAULT_BUDGET: u64 = 32 << 20;

/// Default for how long a reader of large values may stand still while others wait.
pub const DEFAULT_STALL: Nanos = Nanos::from_secs(5);

/// Default for how long a sender of a large body may stand still while others wait: it has sent 16 KiB already, so it is
/// in the middle of sending.
pub(super) const DEFAULT_INPUT_STALL: Nanos = Nanos::from_secs(1);

/// Bytes a second that count as progress of a large body, or of an answer that is read, while others wait for its memory: one byte
/// now and then is none.
const LEAST_RATE: u64 = 64 << 10;

/// Whether bytes come, or go, fast enough.
#[derive(Debug)]
pub(super) struct Pace {
    since: Nanos,
    bytes: u64,
    /// In the last whole stretch of time they did not.
    slow: bool,
}

impl Pace {
    pub(super) fn new(now: Nanos) -> Pace {
        Pace { since: now, bytes: 0, slow: false }
    }

    pub(super) fn moved(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
    }

    /// Whether too little has moved for at least `stretch`. To be asked again and again, also while nobody minds.
    pub(super) fn is_slow(&mut self, now: Nanos, stretch: Nanos) -> bool {
        let passed = now.saturating_sub(self.since);
        if passed >= stretch {
            let least = u128::from(LEAST_RATE) * u128::from(passed.0) / 1_000_000_000;
            let slow = u128::from(self.bytes) < least;
            *self = Pace { since: now, bytes: 0, slow };
        }
        self.slow
    }
}

/// A number of bytes that connections of all workers share.
#[derive(Debug)]
pub struct Budget {
    total: u64,
    used: AtomicU64,
    waiting: AtomicUsize,
}

impl Budget {
    /// A budget of `total` bytes.
    pub fn new(total: u64) -> Budget {
        Budget { total, used: AtomicU64::new(0), waiting: AtomicUsize::new(0) }
    }

    /// Takes `bytes` if they fit. A single taker may exceed the total when nobody holds anything, so that values
    /// larger than the budget pass one at a time.
    pub(crate) fn try_take(&self, bytes: usize) -> bool {
        let bytes = bytes as u64;
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                (used == 0 || used + bytes <= self.total).then_some(used + bytes)
            })
            .is_ok()
    }

    /// Takes `bytes` whether they fit or not: for an answer that exists already and could not be had again.
    pub(crate) fn take(&self, bytes: usize) {
        self.used.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes taken.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Connections that wait for a share.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }
}

/// The memory for values too large for a connection's own buffers, one budget each way, shared by all workers.
#[derive(Debug)]
pub struct BigBuffers {
    /// For bodies on their way in.
    pub input: Budget,
    /// For values on their way out, and the flash reads that fetch them.
    pub output: Budget,
    /// How long a reader may make no progress, or less than 64 KiB a second, while others wait; then its connection is closed.
    pub stall: Nanos,
    /// How long a sender may.
    pub input_stall: Nanos,
}

impl Default for BigBuffers {
    fn default() -> BigBuffers {
        BigBuffers {
            input: Budget::new(DEFAULT_BUDGET),
            output: Budget::new(DEFAULT_BUDGET),
            stall: DEFAULT_STALL,
            input_stall: DEFAULT_INPUT_STALL,
        }
    }
}

/// A waiter's mark on a budget.
#[derive(Debug, Default)]
pub(super) struct Waiting(bool);

impl Waiting {
    pub(super) fn set(&mut self, budget: &Budget, on: bool) {
        if self.0 != on {
            self.0 = on;
            if on {
                budget.waiting.fetch_add(1, Ordering::Relaxed);
            } else {
                budget.waiting.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn is_set(&self) -> bool {
        self.0
    }
}

/// Bytes received and not yet used. Commands are parsed in place; a body lies behind its command line, so that both
/// are slices of one piece.
#[derive(Debug)]
pub(super) struct Input {
    /// Wholly initialised; `start..end` is what has been received.
    buf: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes after `start` already searched for an end of line.
    pub(super) searched: usize,
    /// Bytes from `start` on that the command in progress needs at once.
    pub(super) need: usize,
    /// Share of the input budget held for that.
    pub(super) held: usize,
}

impl Input {
    pub(super) fn new() -> Input {
        Input { buf: Vec::new(), start: 0, end: 0, searched: 0, need: 0, held: 0 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    pub(super) fn len(&self) -> usize {
        self.end - self.start
    }

    pub(super) fn capacity(&self) -> usize {
        self.buf.len()
    }

    /// Drops the first `n` bytes.
    #[inline]
    pub(super) fn consume(&mut self, n: usize) {
        debug_assert!(n <= self.len());
        self.start += n;
        self.searched = 0;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Room for more input: none when [`SMALL`] bytes lie unused and the command in progress needs no more.
    pub(super) fn space(&mut self) -> &mut [u8] {
        let have = self.len();
        if self.start > 0 && self.buf.len() - self.end < INITIAL_INPUT.min(self.buf.len()) / 2 {
            self.buf.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = have;
        }
        if self.buf.len() - self.start < self.need {
            if self.start > 0 {
                self.buf.copy_within(self.start..self.end, 0);
                self.start = 0;
                self.end = have;
            }
            self.buf.resize(self.need, 0);
        } else if self.end == self.buf.len() {
            // Full: small commands come faster than they are taken, or a long line is coming.
            let doubled = (2 * self.buf.len()).clamp(INITIAL_INPUT, SMALL);
            if doubled > self.buf.len() {
                self.buf.resize(doubled, 0);
            }
        }
        &mut self.buf[self.end..]
    }

    pub(super) fn filled(&mut self, n: usize) {
        assert!(n <= self.buf.len() - self.end, "more input than there was room for");
        self.end += n;
    }

    /// Gives back what a large body took, and for an idle connection everything above the initial size.
    pub(super) fn shrink(&mut self, to: usize) {
        let have = self.len();
        if self.buf.len() > to && have <= to {
            let mut small = vec![0; if have == 0 && to == 0 { 0 } else { to.max(INITIAL_INPUT) }];
            small[..have].copy_from_slice(&self.buf[self.start..self.end]);
            self.buf = small;
            self.start = 0;
            self.end = have;
        }
    }
}

/// A read that waits for flash, with what its answer needs, and the answers that must follow it.
#[derive(Debug)]
pub(super) struct Pending<R> {
    pub(super) token: ReadToken,
    pub(super) read: R,
    /// The key of a text read, or the whole line of a meta command.
    pub(super) request: Box<[u8]>,
    pub(super) hash: ObjectHash,
    pub(super) kind: PendingKind,
    /// It may change the object: later reads wait for it.
    pub(super) changes: bool,
    pub(super) answered: bool,
    pub(super) answer: Vec<u8>,
    /// Answers of later requests, up to the next pending one.
    pub(super) after: Vec<u8>,
    /// Share of the output budget held for its answer.
    pub(super) held: usize,
}

/// How a [`Pending`] request is answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum PendingKind {
    /// A key of get, gets, gat, gats.
    Text { op: larder_engine::kv::api::Get, with_cas: bool },
    /// mg.
    MetaGet,
    /// me.
    MetaDebug,
}

/// Answers in the order of their requests: those that can be sent, then those that wait for flash.
#[derive(Debug)]
pub(super) struct Output<R> {
    pub(super) ready: Vec<u8>,
    pub(super) sent: usize,
    pub(super) pending: VecDeque<Pending<R>>,
    next_token: u32,
    /// Share of the output budget held by finished answers.
    pub(super) held: usize,
    /// Since when the request under execution is put off, for want of room in the cache.
    pub(super) room_since: Option<Nanos>,
}

impl<R> Output<R> {
    pub(super) fn new() -> Output<R> {
        Output {
            ready: Vec::new(),
            sent: 0,
            pending: VecDeque::new(),
            next_token: 0,
            held: 0,
            room_since: None,
        }
    }

    /// Where the answer to the request under execution goes.
    #[inline]
    pub(super) fn tail(&mut self) -> &mut Vec<u8> {
        match self.pending.back_mut() {
            None => &mut self.ready,
            Some(last) => &mut last.after,
        }
    }

    /// Bytes that the client has not taken yet.
    #[inline]
    pub(super) fn unsent(&self) -> usize {
        let queued = if self.pending.is_empty() {
            0
        } else {
            self.pending.iter().map(|p| p.answer.len() + p.after.len()).sum()
        };
        self.ready.len() - self.sent + queued
    }

    pub(super) fn token(&mut self) -> ReadToken {
        self.next_token = self.next_token.wrapping_add(1);
        ReadToken(self.next_token)
    }

    /// Moves finished answers at the front to where they can be sent.
    pub(super) fn settle(&mut self) {
        while self.pending.front().is_some_and(|p| p.answered) {
            let done = self.pending.pop_front().expect("there is a front");
            if self.ready.len() == self.sent && self.ready.capacity() < done.answer.len() {
                self.ready = done.answer;
                self.sent = 0;
            } else {
                self.ready.extend_from_slice(&done.answer);
            }
            self.ready.extend_from_slice(&done.after);
            self.held += done.held;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_lets_one_oversized_taker_pass() {
        let budget = Budget::new(100);
        assert!(budget.try_take(500));
        assert!(!budget.try_take(1));
        budget.give(500);
        assert!(budget.try_take(60) && !budget.try_take(41) && budget.try_take(40));
        budget.take(7);
        assert_eq!(budget.used(), 107);
    }

    #[test]
    fn progress_is_a_rate() {
        let second = Nanos::from_secs(1);
        let at = |tenths: u64| Nanos::from_millis(100 * tenths);
        let mut pace = Pace::new(at(0));
        pace.moved(1);
        assert!(!pace.is_slow(at(9), second), "not for a second yet");
        assert!(pace.is_slow(at(10), second) && pace.is_slow(at(11), second));
        pace.moved(LEAST_RATE as usize);
        assert!(!pace.is_slow(at(20), second), "it is fast again");
        // Much at once is not saved up for later.
        pace.moved(1 << 30);
        assert!(!pace.is_slow(at(30), second) && pace.is_slow(at(40), second));
    }

    #[test]
    fn input_keeps_its_bytes_over_growth_and_shrinking() {
        let mut input = Input::new();
        let mut expected = Vec::new();
        let mut byte = 0u8;
        for round in 0..2_000 {
            input.need = if round % 97 == 0 { 40_000 } else { 0 };
            let space = input.space();
            let n = space.len().min(round % 37 + 1);
            for slot in &mut space[..n] {
                *slot = byte;
                expected.push(byte);
                byte = byte.wrapping_add(1);
            }
            input.filled(n);
            assert_eq!(input.bytes(), &expected[..]);
            let take = (round * 7 % 41).min(expected.len());
            input.consume(take);
            expected.drain(..take);
            if round % 53 == 0 {
                input.need = 0;
                input.shrink(SMALL);
            }
            assert_eq!(input.bytes(), &expected[..]);
        }
    }
}
