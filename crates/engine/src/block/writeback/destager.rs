//! Brings dirty data of one volume to its store: one window or epoch after the other.
//!
//! ```text
//! any, ordered   write the window │ flush the store │ note the frontier in the log │ let the log go
//! journaled      journal and commit │ flush the journal │ write in place │ flush the store │ note, let go
//! ```
//!
//! The next window is not begun before the store has the last one durably [barrier] and the log knows it durably [frontier]: a
//! restart would write old versions over newer ones, and a cache that is lost meanwhile would leave no image. A flush of the store
//! counts for a window if the store has lived on since the window's first write [lives]; else any of its writes may be gone, and all of
//! them are written again [rewrite]. Rules in brackets are those of `models/write_back.py`.
//!
//! The machine is told what ends and asks for what begins. It never waits: a store that hangs holds up its own volume alone.

use larder_base::Nanos;

use super::overlay::{Dirty, Holds};
use super::planted::{Fault, Planted};
use super::volume_log::{Order, VolumeLog, Window};

/// When a window or epoch may begin; never in which order (Holland et al., FAST '13, section 4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// As soon as there is one.
    #[default]
    Async,
    /// So long after those before began: all that was answered by then.
    Periodic(Nanos),
    /// When the log holds half of what it may of the volume: from there on clients are slowed down.
    AtBound,
}

/// What a volume's destager is built from.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// In which order.
    pub order: Order,
    /// When.
    pub pace: Pace,
    /// Most bytes of a window, or of an epoch: what the journal holds.
    pub most: u64,
    /// Writes to the store under way at a time.
    pub depth: u32,
}

/// A write to the store of more bytes than this counts as several, where few are to be under way.
const SHORT: u64 = 16 << 10;

/// As how many short writes each of these counts, on an average.
fn each(pieces: &[Dirty]) -> u32 {
    let bytes: u64 = pieces.iter().map(Dirty::memory).sum();
    u32::try_from(bytes / (SHORT * pieces.len().max(1) as u64)).unwrap_or(u32::MAX).max(1)
}

/// How long it waits after the store has failed: so long at first, then twice as long, up to the second.
const PAUSE: (Nanos, Nanos) = (Nanos::from_millis(100), Nanos::from_millis(5_000));

/// What a destager asks for. Each ends by a call of [`Destager`].
pub trait Effects {
    /// Whether there is memory for so many bytes more on their way to the store or the journal. Where there is none, [`Destager::step`] is called when
    /// there may be.
    fn takes(&mut self, _bytes: u64) -> bool {
        true
    }
    /// Of an epoch that may have so many bytes, how many it may have at most.
    fn epoch(&self, most: u64) -> u64 {
        most
    }
    /// A window is to bring these stretches to the store, and leaves those out: whether the log can list what is to be listed behind it.
    fn lists(&mut self, _stored: &[Dirty], skipped: &[Dirty]) -> bool {
        skipped.is_empty()
    }
    /// Whether `any` may leave out what cannot be read.
    fn leaves_out(&self) -> bool {
        true
    }
    /// A window goes on up to this record, behind what may come to the store next: until all of it is there the store alone is no image. Whether the marker is
    /// to say so before anything of it comes there; ends by [`Destager::said`] then.
    fn joins(&mut self, _last: u64) -> bool {
        false
    }
    /// The store is to be told of this stretch; ends by [`Destager::stored`].
    fn store(&mut self, piece: u32, dirty: Dirty);
    /// The store is to be flushed; ends by [`Destager::flushed`].
    fn flush_store(&mut self);
    /// The journal is to have these stretches, and their commit, which says that it holds all up to `last`; ends by
    /// [`Destager::journaled`].
    fn journal(&mut self, epoch: u64, last: u64, pieces: &[Dirty]);
    /// The journal's device is to be flushed; ends by [`Destager::journal_flushed`].
    fn flush_journal(&mut self);
    /// The log is to know durably that the store has all up to this position; ends by [`Destager::noted`].
    fn note(&mut self, frontier: u64);
}

/// How a write or flush of the store ended: the incarnation of the store that answered, or nothing if it failed. A store that may have lost
/// what it was told has another incarnation afterwards.
pub type Outcome = Option<u64>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Idle,
    Journaling,
    JournalFlushing,
    /// The marker is to say that the window joins more than may come to the store at once.
    Saying,
    Writing,
    Flushing,
    Noting,
    /// The store or the journal failed.
    Paused(Nanos),
}

/// The destager of one volume. See the [module](self).
#[derive(Debug)]
pub struct Destager {
    config: Config,
    phase: Phase,
    /// Most bytes of a window, for its time.
    limit: u64,
    /// Most writes of up to [`SHORT`] to the store under way, for now; `None`: there is no such bound.
    depth: Option<u32>,
    /// As how many of those each of the window counts.
    each: u32,
    window: Option<Window>,
    pieces: Vec<Dirty>,
    /// Something of it is left out, since it cannot be read.
    skips: bool,
    /// It goes on behind what may come to the store next, since only so it has something in place of what cannot be read.
    joins: bool,
    /// The marker says so.
    said: bool,
    /// Its store may be another's.
    halted: bool,
    /// Its store is known to have been nobody else's a moment ago; that is all that something waits for; and what does not go on rests.
    sees: bool,
    unseen: bool,
    aside: bool,
    /// How often windows and epochs were begun, or begun again.
    attempts: u64,
    /// No window can begin: the log has no room to list what would be left out behind it.
    unlisted: bool,
    /// Something more of it cannot be read, or nothing can be left out any more: another is begun in its place.
    anew: bool,
    /// Pieces that the store was told of, and those of them that have ended.
    told: usize,
    ended: usize,
    /// One of them failed, or they went to stores of more than one life.
    failed: bool,
    /// The life of the store that the pieces went to.
    life: Option<u64>,
    epoch: u64,
    /// The last of which the store has all durably, since this began.
    applied: u64,
    /// The epoch's writes in place have begun: its journal is all that makes them whole, and stays as it is [jhome].
    in_place: bool,
    /// When the window began.
    began: Option<Nanos>,
    /// Of [`Pace::Periodic`]: when it was last time for windows, and the last record that was answered then.
    round: Option<(Nanos, u64)>,
    /// There was no memory for an epoch that was due.
    starved: bool,
    pause: Nanos,
    /// Failures since something went well.
    failures: u32,
    /// When the first of them was.
    failing: Option<Nanos>,
    fault: Fault,
}

impl Destager {
    /// Of a volume whose last epoch was `epoch`.
    pub fn new(config: Config, epoch: u64) -> Destager {
        Destager {
            config,
            phase: Phase::Idle,
            limit: u64::MAX,
            depth: None,
            each: 1,
            window: None,
            pieces: Vec::new(),
            skips: false,
            joins: false,
            said: false,
            unlisted: false,
            halted: false,
            sees: true,
            unseen: false,
            aside: false,
            attempts: 0,
            anew: false,
            told: 0,
            ended: 0,
            failed: false,
            life: None,
            epoch,
            applied: 0,
            in_place: false,
            began: None,
            round: None,
            starved: false,
            pause: PAUSE.0,
            failures: 0,
            failing: None,
            fault: Fault::default(),
        }
    }

    /// Plants a fault.
    pub fn plant(&mut self, fault: Fault) {
        self.fault = fault;
    }

    /// The last epoch that was begun.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// In which order.
    pub fn order(&self) -> Order {
        self.config.order
    }

    /// Windows are to have no more bytes than this. (Epochs end where they may: their bound is the journal's.)
    pub fn limit(&mut self, bytes: u64) {
        self.limit = bytes;
    }

    /// From now on no more writes to the store are begun than keep so many under way; one always is. Long ones count as several. What is under way
    /// ends as it would. `None`: as many as its depth is.
    pub fn keep_under_way(&mut self, writes: Option<u32>) {
        self.depth = writes;
    }

    /// Writes to the store under way at a time, at most.
    pub fn depth(&self) -> u32 {
        self.config.depth
    }

    /// The last epoch of which the store has all durably, 0 before there was one: the journal has had all of it.
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// Most bytes of the next window or epoch.
    pub fn most(&self) -> u64 {
        if self.is_journaled() { self.config.most } else { self.config.most.min(self.limit) }
    }

    /// Where the window ends that is on its way.
    pub fn last(&self) -> Option<u64> {
        self.window.as_ref().map(|window| *window.end())
    }

    /// When the last window began.
    pub fn began(&self) -> Option<Nanos> {
        self.began
    }

    /// Whether epochs go through a journal.
    pub fn is_journaled(&self) -> bool {
        matches!(self.config.order, Order::Journaled(_))
    }

    /// Whether nothing is on its way to the store.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Idle
    }

    /// Whether the store has its window, and the log is to know that.
    pub fn is_noting(&self) -> bool {
        self.phase == Phase::Noting
    }

    /// Whether its window holds more than may come to the store at once: until that is over the store alone is no image.
    pub fn joins(&self) -> bool {
        self.joins && self.config.order != Order::Any
    }

    /// Whether a window could begin, and the log has no room to list what would be left out behind it.
    pub fn is_unlisted(&self) -> bool {
        self.unlisted
    }

    /// Whether the marker is to say that of its window.
    pub fn is_saying(&self) -> bool {
        self.phase == Phase::Saying
    }

    /// Nothing more goes to the store or the journal, nor is anything noted, as long as this is so. Its window begins again afterwards.
    pub fn halt(&mut self, halted: bool) {
        self.halted = halted;
    }

    /// Whether its store is known to be nobody else's (`sees`): nothing is sent there, nor to the journal, before it is; and whether what cannot go on rests
    /// until it is begun again (`aside`).
    pub fn see(&mut self, sees: bool, aside: bool) {
        (self.sees, self.aside) = (sees, aside);
        self.unseen &= !sees;
    }

    /// Whether something would be sent if that were known.
    pub fn is_unseen(&self) -> bool {
        self.unseen
    }

    /// Nothing begins: what is under way ends, or rests.
    pub fn rest(&mut self, fx: &mut impl Effects) {
        self.unseen = false;
        if self.phase == Phase::Writing {
            self.tell(fx);
        }
    }

    /// The window waits for the end of that.
    fn rests(&mut self) {
        self.phase = Phase::Paused(Nanos::ZERO);
    }

    /// Which attempt to bring its windows to the store or the journal this is.
    pub fn attempt(&self) -> u64 {
        self.attempts
    }

    /// Something of its window cannot be read any more: another is begun in its place. (Not of an epoch that the journal has: it is replayed at the next
    /// start.)
    pub fn makes_anew(&mut self) {
        self.anew |= self.window.is_some() && !self.in_place;
    }

    /// The log cannot list any more what is left out: a window that leaves out something is not noted.
    pub fn lists_no_more(&mut self) {
        if self.skips {
            self.makes_anew();
            if self.phase == Phase::Noting {
                self.drops();
            }
        }
    }

    /// The window is neither over nor gone on with.
    fn drops(&mut self) {
        (self.phase, self.window) = (Phase::Idle, None);
        (self.skips, self.joins, self.said, self.anew) = (false, false, false, false);
        self.pieces = Vec::new();
        // The next one is begun whatever its time is: something of this may be in the store.
        (self.began, self.round) = (None, None);
    }

    fn is_void(&self) -> bool {
        self.anew && !self.in_place
    }

    /// Whether neither store nor journal is asked for anything.
    pub fn is_settled(&self) -> bool {
        matches!(self.phase, Phase::Idle | Phase::Paused(_))
    }

    /// How often the store or the journal has failed since it last worked.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// When the first of these failures was.
    pub fn failing_since(&self) -> Option<Nanos> {
        self.failing
    }

    /// As if something had failed now.
    #[cfg(test)]
    pub(in crate::block::writeback) fn fails(&mut self, now: Nanos) {
        self.pauses(now);
    }

    /// When it is to be called again by itself, if nothing happens before.
    pub fn wakes(&self) -> Option<Nanos> {
        match (self.phase, self.config.pace) {
            (Phase::Paused(until), _) => Some(until),
            (Phase::Idle, Pace::Periodic(every)) if !self.starved => {
                self.round.map(|(began, _)| Nanos(began.0 + every.0))
            }
            _ => None,
        }
    }

    /// Begins what may begin. `durable` is the last batch of the log that is durable. `hurry`: the log needs the room, or somebody waits for all of
    /// it to be destaged. `pressed`: an epoch may end anywhere.
    pub fn step(
        &mut self,
        log: &VolumeLog,
        now: Nanos,
        durable: u64,
        (hurry, pressed): (bool, bool),
        fx: &mut impl Effects,
    ) {
        if self.is_void() && matches!(self.phase, Phase::Paused(until) if now >= until) {
            self.drops();
        }
        match self.phase {
            Phase::Paused(until) if now >= until => {
                self.unseen = !self.sees;
                if self.sees {
                    self.again(now, fx);
                }
                return;
            }
            Phase::Idle => {}
            // It may have waited for memory.
            Phase::Writing => return self.tell(fx),
            _ => return,
        }
        let due = match self.config.pace {
            Pace::Periodic(every) => {
                if self.round.is_none_or(|(began, _)| now.0 >= began.0 + every.0) {
                    self.round = Some((now, log.acknowledged()));
                }
                self.round.is_some_and(|(_, last)| log.frontier() < last)
            }
            Pace::AtBound => false,
            Pace::Async => true,
        };
        if !due && !hurry && !self.starved {
            return;
        }
        let journaled = matches!(self.config.order, Order::Journaled(_));
        let most = if journaled { fx.epoch(self.most()) } else { self.most() };
        if !self.sees {
            let any = self.config.order == Order::Any;
            self.unseen = log.next(durable, most, pressed, any).is_some();
            return;
        }
        let Some(window) = self.choose(log, durable, (most, pressed), fx) else { return };
        self.each = each(&self.pieces);
        let epoch = self.pieces.iter().map(Dirty::memory).sum();
        self.starved = journaled && !fx.takes(epoch);
        if self.starved {
            return self.pieces = Vec::new();
        }
        self.began = Some(now);
        let last = *window.end();
        self.window = Some(window);
        // Marks alone change nothing that a journal could make whole.
        let journaled = matches!(self.config.order, Order::Journaled(_)) && !self.pieces.is_empty();
        if journaled && !self.fault.is(Planted::NoJournal) {
            self.epoch += 1;
            self.phase = Phase::Journaling;
            self.attempts += 1;
            fx.journal(self.epoch, last, &self.pieces);
        } else {
            self.say_or_write(fx);
        }
    }

    /// The window goes to the store, once it is said that until then that is no image.
    fn say_or_write(&mut self, fx: &mut impl Effects) {
        if self.joins() && !self.said && self.last().is_some_and(|last| fx.joins(last)) {
            self.phase = Phase::Saying;
            return;
        }
        self.write(fx);
    }

    /// The marker says what [`Effects::joins`] wanted, durably, or could not be written.
    pub fn said(&mut self, now: Nanos, done: bool, fx: &mut impl Effects) {
        if self.phase != Phase::Saying {
            return;
        }
        self.said = done;
        if self.halted {
            return self.rests();
        }
        if self.is_void() {
            return self.drops();
        }
        match done {
            true => self.write(fx),
            // (It is not the store that fails.)
            false => self.phase = Phase::Paused(now + PAUSE.0),
        }
    }

    /// The next window. `any` leaves out what cannot be read, as long as the log can list it.
    fn choose(
        &mut self,
        log: &VolumeLog,
        durable: u64,
        (most, pressed): (u64, bool),
        fx: &mut impl Effects,
    ) -> Option<Window> {
        let any = self.config.order == Order::Any && fx.leaves_out();
        self.unlisted = false;
        for skips in [any, false] {
            let window = log.next(durable, most, pressed, skips)?;
            let bad = |dirty: &Dirty| dirty.holds == Holds::Unreadable;
            let (skipped, stored): (Vec<Dirty>, Vec<Dirty>) =
                log.writes(&window).into_iter().partition(bad);
            self.unlisted = !fx.lists(&stored, &skipped);
            if !self.unlisted {
                (self.pieces, self.skips) = (stored, !skipped.is_empty());
                let alone = log.next(durable, most, pressed, true);
                self.joins = alone.is_none_or(|alone| alone.end() < window.end());
                return Some(window);
            }
            if skipped.is_empty() {
                break;
            }
        }
        None
    }

    /// After a pause: from where nothing is lost.
    fn again(&mut self, now: Nanos, fx: &mut impl Effects) {
        let journaled = matches!(self.config.order, Order::Journaled(_)) && !self.pieces.is_empty();
        if journaled && !self.in_place {
            if !fx.takes(self.pieces.iter().map(Dirty::memory).sum()) {
                self.phase = Phase::Paused(now + PAUSE.0);
                return;
            }
            self.phase = Phase::Journaling;
            let last = self.window.as_ref().map_or(0, |window| *window.end());
            self.attempts += 1;
            return fx.journal(self.epoch, last, &self.pieces);
        }
        self.say_or_write(fx);
    }

    /// All pieces go to the store, from the first.
    fn write(&mut self, fx: &mut impl Effects) {
        self.attempts += 1;
        (self.told, self.ended, self.failed, self.life) = (0, 0, false, None);
        self.phase = Phase::Writing;
        self.tell(fx);
    }

    fn tell(&mut self, fx: &mut impl Effects) {
        let short = self.depth.map_or(u32::MAX, |depth| (depth / self.each).max(1));
        let depth = self.config.depth.min(short) as usize;
        if self.halted && self.phase == Phase::Writing {
            if self.told == self.ended {
                self.rests();
            }
            return;
        }
        while self.told - self.ended < depth && !self.failed && self.sees {
            let Some(&dirty) = self.pieces.get(self.told) else { break };
            if !fx.takes(dirty.memory()) {
                break;
            }
            self.told += 1;
            fx.store(self.told as u32 - 1, dirty);
        }
        if self.told < self.pieces.len() && !self.failed {
            if self.told == self.ended && self.aside {
                return self.rests();
            }
            self.unseen = !self.sees;
        }
        if self.told > self.ended || self.failed || self.told < self.pieces.len() {
            return;
        }
        if self.is_void() {
            return self.drops();
        }
        if self.fault.is(Planted::WindowNotFlushed) {
            return self.notes(fx);
        }
        self.phase = Phase::Flushing;
        fx.flush_store();
    }

    /// The store has the window.
    fn notes(&mut self, fx: &mut impl Effects) {
        (self.pause, self.failures, self.failing) = (PAUSE.0, 0, None);
        self.phase = Phase::Noting;
        if self.in_place {
            self.applied = self.epoch;
        }
        if let Some(window) = &self.window {
            fx.note(*window.end());
        }
    }

    fn pauses(&mut self, now: Nanos) {
        self.failures += 1;
        self.failing.get_or_insert(now);
        self.phase = Phase::Paused(Nanos(now.0 + self.pause.0));
        self.pause = Nanos((self.pause.0 * 2).min(PAUSE.1.0));
    }

    /// A piece is in the store, volatile perhaps, or it failed.
    pub fn stored(&mut self, now: Nanos, outcome: Outcome, fx: &mut impl Effects) {
        if self.phase != Phase::Writing {
            return;
        }
        self.ended += 1;
        match outcome {
            // The oldest life of all: a flush of a later one does not count for what went to it.
            Some(life) => self.life = Some(self.life.map_or(life, |first| first.min(life))),
            None => self.failed = true,
        }
        if self.failed && self.told == self.ended {
            return self.pauses(now);
        }
        self.tell(fx);
    }

    /// The store was flushed, or not.
    pub fn flushed(&mut self, now: Nanos, outcome: Outcome, fx: &mut impl Effects) {
        if self.phase != Phase::Flushing {
            return;
        }
        if self.halted {
            return self.rests();
        }
        if self.is_void() {
            return self.drops();
        }
        match outcome {
            Some(life) if self.life.is_none_or(|first| first == life) => self.notes(fx),
            Some(_) if self.fault.is(Planted::LivesIgnored) => self.notes(fx),
            Some(life) if self.fault.is(Planted::LostNotRewritten) => {
                self.life = Some(life);
                fx.flush_store();
            }
            // It has lived anew: what it was told may be gone, the rest of the store is well.
            Some(_) => self.write(fx),
            None => self.pauses(now),
        }
    }

    /// The journal has the epoch, volatile perhaps, or it failed.
    pub fn journaled(&mut self, now: Nanos, done: bool, fx: &mut impl Effects) {
        if self.phase != Phase::Journaling {
            return;
        }
        if !done {
            return self.pauses(now);
        }
        if self.halted {
            return self.rests();
        }
        if self.fault.is(Planted::JournalNotFlushed) {
            self.in_place = true;
            return self.write(fx);
        }
        self.phase = Phase::JournalFlushing;
        fx.flush_journal();
    }

    /// The journal is durable [jcommit], or may have lost what it was told.
    pub fn journal_flushed(&mut self, now: Nanos, done: bool, fx: &mut impl Effects) {
        if self.phase != Phase::JournalFlushing {
            return;
        }
        if !done {
            return self.pauses(now);
        }
        if self.halted {
            return self.rests();
        }
        self.in_place = true;
        self.write(fx);
    }

    /// The log knows the frontier durably: the window is over. Returns the position up to which the log may be let go.
    pub fn noted(&mut self) -> Option<u64> {
        if self.phase != Phase::Noting {
            return None;
        }
        (self.phase, self.in_place) = (Phase::Idle, false);
        (self.skips, self.joins, self.said, self.anew) = (false, false, false, false);
        self.pieces = Vec::new();
        self.window.take().map(|window| *window.end())
    }
}

#[cfg(test)]
mod tests {
    use super::super::overlay::Overlay;
    use super::super::volume_log::{Kind, Logged};
    use super::*;

    #[derive(Default)]
    struct Told(usize);

    impl Effects for Told {
        fn store(&mut self, _piece: u32, _dirty: Dirty) {
            self.0 += 1;
        }
        fn flush_store(&mut self) {}
        fn journal(&mut self, _epoch: u64, _last: u64, _pieces: &[Dirty]) {}
        fn flush_journal(&mut self) {}
        fn note(&mut self, _frontier: u64) {}
    }

    /// Writes to the store under way of a window of forty writes of `len` bytes, while so many are to be, and when that is over and one has ended.
    fn under_way(len: u64, writes: u32) -> (usize, usize) {
        let (mut log, mut overlay) = (VolumeLog::new(Order::Any, 0), Overlay::default());
        for n in 0..40 {
            let logged = Logged { at: n << 20, len, kind: Kind::Write, batch: 1, place: n << 20 };
            log.assign(logged, None, &mut overlay);
            log.answer(&mut overlay);
        }
        let config = Config { order: Order::Any, pace: Pace::Async, most: 1 << 30, depth: 32 };
        let (mut destager, mut told) = (Destager::new(config, 0), Told::default());
        destager.keep_under_way(Some(writes));
        destager.step(&log, Nanos(0), 1, (false, false), &mut told);
        let few = told.0;
        destager.keep_under_way(None);
        destager.stored(Nanos(1), Some(1), &mut told);
        (few, told.0 - 1)
    }

    #[test]
    fn long_writes_count_as_several_where_few_are_to_be_under_way_and_one_always_is() {
        assert_eq!(under_way(4096, 1), (1, 32));
        assert_eq!(under_way(4096, 8), (8, 32));
        assert_eq!(under_way(256 << 10, 8), (1, 32));
        assert_eq!(under_way(64 << 10, 8), (2, 32));
        assert_eq!(under_way(4096, 64), (32, 32));
    }
}
