//! Bringing what is not cached into the cache, because an operator asks for it.
//!
//! One prefetch runs at a time, on a thread of its own with its own [`Cached`]: it asks like a client, group by group. It
//! goes past admission, as a client's advice does, but not past what is selected never, shares, or the write budget. How fast it
//! asks is [`Pacing`]'s.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_engine::block::node::limits::Allows as _;
use larder_engine::block::node::looks::Looks as _;
use larder_engine::block::node::prefetch::Prefetch as Pacing;
use larder_engine::block::{GROUP_LINES, LineId};
use larder_policy::block::Reason;
use larder_runtime::RingChoice;
use mio::{Events, Poll};
use serde::{Deserialize, Serialize};

use larder_engine::block::node::setup;

use super::open::CacheError;
use super::operators::check_range;
use super::{Attached, Cached, Core, locked};

use super::service::{Command, Service};

/// For what is under way to end, when whoever asked has gone.
const DRAIN: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(100);
const TICK: Duration = Duration::from_millis(5);

/// What a prefetch has done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Prefetched {
    /// Lines that were looked at.
    pub lines: u64,
    /// Of them, cached already.
    pub cached_before: u64,
    /// Brought into the cache.
    pub brought: u64,
    /// Not brought: selected never to be cached.
    pub never: u64,
    /// Not brought: the write budget has nothing left.
    pub budget: u64,
    /// Not brought: their places are taken by lines that stay, or they were evicted or written to at once.
    pub no_place: u64,
    /// Not brought: the store failed.
    pub failed: u64,
    /// As many lines were brought as the cache, or the volume's ceiling, has room for: it went no further.
    pub full: bool,
    /// Whoever asked has gone: it went no further.
    pub interrupted: bool,
    /// Seconds that it took.
    pub seconds: f64,
    /// Bytes of a line.
    pub line_bytes: u32,
}

/// How far a prefetch is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefetching {
    /// Bytes that were looked at.
    pub done: u64,
    /// Bytes to look at.
    pub total: u64,
    /// Bytes brought so far.
    pub brought: u64,
}

/// Between the thread and who waits for it.
#[derive(Default)]
struct Told {
    stop: AtomicBool,
    done: AtomicU64,
    brought: AtomicU64,
}

/// One prefetch at a time.
struct Turn(Arc<Core>);

impl Turn {
    fn take(cache: &Arc<Core>) -> Option<Turn> {
        let busy = cache.node_limits.prefetching.swap(true, Ordering::SeqCst);
        (!busy).then(|| Turn(cache.clone()))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.node_limits.prefetching.store(false, Ordering::SeqCst);
    }
}

impl Core {
    /// The party that prefetches: its mailbox is between the workers' and the operators'.
    fn porter(&self) -> usize {
        self.mailboxes.len() - 2
    }

    /// Brings ranges of a volume (start and length in bytes), or all of it, into the cache. `go_on` hears how far it is, and
    /// may say no.
    ///
    /// # Errors
    /// When the volume is not attached, a range is not in it, the cache is out of use, another prefetch runs, or the store
    /// fails.
    pub fn prefetch(
        self: &Arc<Self>,
        name: &str,
        ranges: Option<&[(u64, u64)]>,
        go_on: &mut dyn FnMut(Prefetching) -> bool,
    ) -> Result<Prefetched, CacheError> {
        let volume = self.attached(name)?;
        let fail = |reason: String| CacheError::Volume { name: name.to_owned(), reason };
        if self.hand.get().is_some() {
            return Err(fail(
                "a cache without threads brings nothing ahead by itself: ask for it by advice"
                    .to_owned(),
            ));
        }
        for &(start, bytes) in ranges.unwrap_or_default() {
            check_range(&volume, start, bytes)?;
        }
        let turn = Turn::take(self).ok_or_else(|| {
            fail("something is prefetched already, or a volume moves: wait for that to end".into())
        })?;
        let all = [(0, volume.bytes())];
        let ranges = ranges.unwrap_or(&all);
        let total = ranges.iter().map(|r| r.1).sum();
        let told = Arc::new(Told::default());
        let (tell, ended) = mpsc::channel();
        let porter = Porter::new(turn, volume, ranges.to_vec(), told.clone())
            .map_err(|e| fail(format!("it cannot be prefetched: {e}")))?;
        std::thread::Builder::new()
            .name("block-prefetch".into())
            .spawn(move || {
                // Whoever asked may have gone.
                let _ = tell.send(porter.run());
            })
            .map_err(|e| fail(format!("a thread: {e}")))?;
        let mut until = None;
        loop {
            match ended.recv_timeout(LOOK) {
                Ok(outcome) => return outcome.map_err(fail),
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(fail("the prefetch has ended without a word".into()));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => {}
            }
            let (done, brought) =
                (told.done.load(Ordering::Relaxed), told.brought.load(Ordering::Relaxed));
            let now = Instant::now();
            if until.is_none() && !go_on(Prefetching { done, total, brought }) {
                told.stop.store(true, Ordering::SeqCst);
                until = Some(now + DRAIN);
            }
            if until.is_some_and(|until| now >= until) {
                // The store hangs: the thread ends when that does.
                return Err(fail("interrupted, and its store does not answer".into()));
            }
        }
    }
}

/// A group that was asked for.
struct Asked {
    /// Its first line in the line space, and a bit for each line that is wanted.
    first: LineId,
    wanted: u16,
    since: Nanos,
    again: bool,
}

struct Porter {
    cache: Arc<Core>,
    volume: Arc<Attached>,
    ranges: Vec<(u64, u64)>,
    told: Arc<Told>,
    poll: Poll,
    events: Events,
    service: Cached,
    next: u64,
    under_way: BTreeMap<u64, Asked>,
    /// Answered, and on their way to flash.
    settling: VecDeque<Asked>,
    report: Prefetched,
    /// Lines that may be brought.
    room: u64,
    pacing: Pacing,
    _turn: Turn,
}

impl Porter {
    fn new(
        turn: Turn,
        volume: Arc<Attached>,
        ranges: Vec<(u64, u64)>,
        told: Arc<Told>,
    ) -> std::io::Result<Porter> {
        let cache = turn.0.clone();
        let poll = Poll::new()?;
        let registry = poll.registry().try_clone()?;
        // What a former one was told too late is nobody's.
        locked(&cache.mailboxes[cache.porter()].inbox).clear();
        let service = Cached::new(cache.clone(), cache.porter(), registry, 0, RingChoice::Auto)?;
        let slots = cache.layout.capacity();
        let room = volume.share().1.map_or(slots, |c| c.min(slots));
        let line_bytes = cache.layout.line;
        let pacing = Pacing::new(setup::fills(cache.config.fill_memory, &cache.layout));
        Ok(Porter {
            cache,
            volume,
            ranges,
            told,
            poll,
            events: Events::with_capacity(64),
            service,
            next: 0,
            under_way: BTreeMap::new(),
            settling: VecDeque::new(),
            report: Prefetched { line_bytes, ..Prefetched::default() },
            room,
            pacing,
            _turn: turn,
        })
    }

    fn run(mut self) -> Result<Prefetched, String> {
        let begun = Instant::now();
        let mut outcome = Ok(());
        'ranges: for (start, bytes) in std::mem::take(&mut self.ranges) {
            let line = u64::from(self.cache.layout.line);
            let group = line * u64::from(GROUP_LINES);
            let (mut at, end) = (start, (start + bytes).min(self.volume.cached_bytes()));
            while at < end {
                // Volumes begin with a group.
                let next = ((at / group + 1) * group).min(end);
                if let Err(why) = self.one(at, next) {
                    outcome = Err(why);
                    break 'ranges;
                }
                if self.report.full || self.report.interrupted {
                    break 'ranges;
                }
                self.told.done.fetch_add(next - at, Ordering::Relaxed);
                at = next;
            }
        }
        // What was begun is finished: clients may wait for the same lines.
        while !self.under_way.is_empty() || !self.settling.is_empty() {
            self.settle();
            self.turn(TICK);
        }
        self.report.seconds = begun.elapsed().as_secs_f64();
        outcome.map(|()| self.report)
    }

    /// Bytes `at..next` of the volume, which lie in one group.
    fn one(&mut self, at: u64, next: u64) -> Result<(), String> {
        let line = u64::from(self.cache.layout.line);
        let first = LineId((self.volume.base() + at) / line).group().line(0);
        let (from, to) = ((self.volume.base() + at) / line, (self.volume.base() + next - 1) / line);
        let shard = self.cache.placing.shard(first.group());
        let asked = (from..=to).fold(0u16, |mask, number| mask | 1 << LineId(number).index());
        let (cached, _) = self.cache.cached(shard, first.group(), asked);
        let wanted = asked & !cached;
        self.report.cached_before += u64::from(cached.count_ones());
        self.report.lines += to - from + 1;
        let (node_limits, report) = (&self.cache.node_limits, &mut self.report);
        let mut lines: Vec<u32> = (0..GROUP_LINES).filter(|i| wanted & 1 << i != 0).collect();
        node_limits.limits.keep_advised(
            self.cache.now(),
            &mut lines,
            |_| line,
            |&index| {
                let offset = first.group().line(index).0 * line;
                node_limits.rule(&self.volume, offset - self.volume.base(), line)
            },
            |reason| match reason {
                Reason::Never => report.never += 1,
                Reason::NoSpace => report.no_place += 1,
                _ => report.budget += 1,
            },
        );
        let wanted = lines.iter().fold(0u16, |mask, index| mask | 1 << index);
        if wanted == 0 {
            return Ok(());
        }
        let count = u64::from(wanted.count_ones());
        loop {
            if self.told.stop.load(Ordering::SeqCst) || locked(&self.cache.log_inbox).stopped {
                self.report.interrupted = true;
                return Ok(());
            }
            self.check()?;
            self.pacing.look_at_clients(self.cache.asked_by_clients());
            if self.may_ask(shard, wanted.count_ones()) {
                break;
            }
            self.settle();
            self.turn(TICK);
        }
        if self.report.brought + self.on_the_way() + count > self.room {
            self.report.full = true;
            return Ok(());
        }
        self.ask(Asked { first, wanted, since: self.cache.now(), again: false });
        self.turn(Duration::ZERO);
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        if !self.cache.is_enabled() {
            return Err("the cache is out of use: there is nothing to prefetch into".into());
        }
        if self.volume.volume().is_closed() {
            // A detach that cannot end leaves it attached.
            return Err(if self.cache.is_attached(&self.volume) {
                "it is being detached: what was brought is kept; prefetch the rest if it stays attached".into()
            } else {
                "it was detached meanwhile".into()
            });
        }
        match self.pacing.gives_up() {
            Some(times) => Err(format!("its store failed {times} times one after the other")),
            None => Ok(()),
        }
    }

    /// Lines that are asked for and not counted yet.
    fn on_the_way(&self) -> u64 {
        let all = self.under_way.values().chain(&self.settling);
        all.map(|a| u64::from(a.wanted.count_ones())).sum()
    }

    fn may_ask(&self, shard: u32, lines: u32) -> bool {
        let filling = self.cache.fills_under_way(shard);
        self.pacing.may_ask(self.cache.now(), filling, lines)
    }

    fn ask(&mut self, asked: Asked) {
        let line = u64::from(self.cache.layout.line);
        let (low, high) = (asked.wanted.trailing_zeros(), 15 - asked.wanted.leading_zeros());
        let offset = (asked.first.0 + u64::from(low)) * line - self.volume.base();
        let len = (high - low + 1) * self.cache.layout.line;
        self.next += 1;
        self.under_way.insert(self.next, asked);
        self.pacing.asked();
        let volume = self.volume.volume().clone();
        self.service.submit(&volume, self.next, Command::Advise { offset, len });
    }

    /// Lets what is under way go on, for no longer than `wait`.
    fn turn(&mut self, wait: Duration) {
        self.service.flush(Instant::now());
        self.take_answers();
        // Interrupted or not: it is looked at again.
        let _ = self.poll.poll(&mut self.events, Some(wait));
        let now = Instant::now();
        for event in &self.events {
            self.service.ready(event, now);
        }
        self.service.flush(now);
        self.take_answers();
    }

    fn take_answers(&mut self) {
        while let Some(answer) = self.service.pop() {
            let Some(mut asked) = self.under_way.remove(&answer.ticket) else { continue };
            let now = self.cache.now();
            self.pacing.answered(now, asked.since, answer.outcome.is_ok());
            asked.since = now;
            if answer.outcome.is_err() {
                self.report.failed += u64::from(asked.wanted.count_ones());
            } else {
                self.settling.push_back(asked);
            }
        }
    }

    /// Counts groups whose lines have come to flash, or will not come any more.
    fn settle(&mut self) {
        let line = u64::from(self.cache.layout.line);
        for _ in 0..self.settling.len() {
            let Some(mut asked) = self.settling.pop_front() else { return };
            let shard = self.cache.placing.shard(asked.first.group());
            let (cached, filling) = self.cache.cached(shard, asked.first.group(), asked.wanted);
            let missing = asked.wanted & !cached;
            let now = self.cache.now();
            if missing != 0 && filling > 0 && self.pacing.waits_for(now, asked.since) {
                self.settling.push_back(asked);
                continue;
            }
            let may_ask = self.pacing.settled();
            let count = u64::from(cached.count_ones());
            self.report.brought += count;
            self.told.brought.fetch_add(count * line, Ordering::Relaxed);
            if missing == 0 {
                continue;
            }
            if asked.again || !may_ask || self.report.interrupted {
                self.report.no_place += u64::from(missing.count_ones());
            } else {
                (asked.wanted, asked.again, asked.since) = (missing, true, now);
                self.ask(asked);
            }
        }
    }
}
