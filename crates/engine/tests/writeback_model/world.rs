//! The crash model of one volume's write-back: records, overlay and destager over a log, a store and a journal's device that lose what was
//! not flushed. It follows `World` of `models/write_back.py`; the oracle is that model's, the machines are the engine's.
//!
//! A sector is one byte of the volume, and holds the number of the write that filled it last, so every check is exact.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use larder_base::{Nanos, Rng};

#[cfg(feature = "planted")]
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::Planted;
use larder_engine::block::writeback::destager::{Config, Destager, Effects, Pace};
use larder_engine::block::writeback::overlay::{Dirty, Holds, Overlay, Stretch};
use larder_engine::block::writeback::volume_log::{Cuts, Grain, Kind, Logged, Order, VolumeLog};

const SECTORS: u64 = 6;
/// Bytes of the log that stand for one write, so that an address tells which.
const WRITE: u64 = 16;

pub(super) const ORDERS: [(&str, Order, char); 5] = [
    ("any", Order::Any, 'a'),
    ("ordered, completion", Order::Ordered(Grain::Completion), 'c'),
    ("ordered, flush", Order::Ordered(Grain::Flush), 'f'),
    ("journaled", Order::Journaled(Cuts::Flushes), 'j'),
    ("journaled, marks", Order::Journaled(Cuts::Marks), 'k'),
];

/// A device that keeps what was flushed; a crash leaves each block as it was or as any write since left it.
#[derive(Default)]
struct Device<K, V> {
    durable: BTreeMap<K, V>,
    pending: Vec<(K, V)>,
    /// Crashes that may have lost something.
    life: u64,
}

impl<K: Ord + Clone, V: Clone> Device<K, V> {
    fn write(&mut self, key: K, value: V) {
        self.pending.push((key, value));
    }
    fn see(&self, key: &K) -> Option<V> {
        let last = self.pending.iter().rev().find(|(k, _)| k == key).map(|(_, v)| v.clone());
        last.or_else(|| self.durable.get(key).cloned())
    }
    fn flush(&mut self) -> u64 {
        self.durable.extend(self.pending.drain(..));
        self.life
    }
    fn crash(&mut self, rng: &mut Rng) {
        if self.pending.is_empty() {
            return;
        }
        self.life += 1;
        let keys: BTreeSet<K> = self.pending.iter().map(|(k, _)| k.clone()).collect();
        for key in keys {
            let mut values = vec![self.durable.get(&key).cloned()];
            values.extend(
                self.pending.iter().filter(|(k, _)| *k == key).map(|(_, v)| Some(v.clone())),
            );
            if let Some(value) = values.swap_remove(rng.below(values.len() as u64) as usize) {
                self.durable.insert(key, value);
            }
        }
        self.pending.clear();
    }
}

/// A write that was issued.
#[derive(Clone)]
struct Write {
    range: Range<u64>,
    /// Writes that its client knew complete (or flushed, as the order says) when it issued this one.
    known: BTreeSet<u64>,
    /// What its record says.
    dependency: u64,
    /// 0 under way, 1 completed, 2 durable.
    state: u8,
}

/// What was asked for and has not ended.
enum Io {
    Store(Dirty),
    FlushStore,
    Journal { epoch: u64, last: u64, left: Vec<(Piece, Block)> },
    FlushJournal,
    Note(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Piece {
    Data(usize),
    Commit,
}

#[derive(Clone)]
enum Block {
    Data { epoch: u64, sector: u64, write: u64 },
    Commit { epoch: u64, pieces: usize, sum: u64, last: u64 },
}

#[derive(Default)]
struct Asked(Vec<Io>);

impl Effects for Asked {
    fn store(&mut self, _: u32, dirty: Dirty) {
        self.0.push(Io::Store(dirty));
    }
    fn flush_store(&mut self) {
        self.0.push(Io::FlushStore);
    }
    fn journal(&mut self, epoch: u64, last: u64, pieces: &[Dirty]) {
        let all: Vec<(u64, u64)> = pieces.iter().flat_map(sectors).collect();
        let sum = sum(&all);
        let data = all
            .iter()
            .enumerate()
            .map(|(i, &(sector, write))| (Piece::Data(i), Block::Data { epoch, sector, write }));
        let mut left: Vec<(Piece, Block)> = data.collect();
        left.push((Piece::Commit, Block::Commit { epoch, pieces: all.len(), sum, last }));
        self.0.push(Io::Journal { epoch, last, left });
    }
    fn flush_journal(&mut self) {
        self.0.push(Io::FlushJournal);
    }
    fn note(&mut self, frontier: u64) {
        self.0.push(Io::Note(frontier));
    }
}

/// Each sector of a stretch, and the write that is there.
fn sectors(dirty: &Dirty) -> Vec<(u64, u64)> {
    let bytes = if dirty.holds == Holds::Bytes { dirty.len } else { 0 };
    (0..bytes).map(|i| (dirty.at + i, dirty.sequence)).collect()
}

fn sum(pieces: &[(u64, u64)]) -> u64 {
    pieces.iter().fold(17, |h: u64, &(s, w)| h.wrapping_mul(1_000_003) ^ (s << 32 | w))
}

pub(super) struct World {
    rng: Rng,
    order: Order,
    now: Nanos,
    store: Device<u64, u64>,
    journal: Device<Piece, Block>,
    /// All writes of this history, by number from 1; the sequence of a write is its number.
    log: Vec<Write>,
    waiting: VecDeque<Write>,
    slots: BTreeMap<u64, u64>,
    records: VolumeLog,
    overlay: Overlay,
    destager: Destager,
    ios: Vec<Io>,
    /// The frontier that a start would find.
    noted: u64,
    /// Positions of flushes that wait.
    flushes: Vec<u64>,
    /// Covered by an answered flush, or kept by a start.
    promised: u64,
    known: BTreeSet<u64>,
    cuts: BTreeSet<u64>,
    /// The journal's device has lived on since the epoch's first write if it is this one.
    journal_life: u64,
    fault: Option<Planted>,
}

impl World {
    pub(super) fn new(seed: u64, order: Order, fault: Option<Planted>) -> World {
        let mut world = World {
            rng: Rng::new(seed),
            order,
            now: Nanos(0),
            store: Device { durable: BTreeMap::new(), pending: Vec::new(), life: 0 },
            journal: Device { durable: BTreeMap::new(), pending: Vec::new(), life: 0 },
            log: Vec::new(),
            waiting: VecDeque::new(),
            slots: BTreeMap::new(),
            records: VolumeLog::new(order, 0),
            overlay: Overlay::default(),
            destager: Destager::new(config(order), 0),
            ios: Vec::new(),
            noted: 0,
            flushes: Vec::new(),
            promised: 0,
            known: BTreeSet::new(),
            cuts: BTreeSet::from([0]),
            journal_life: 0,
            fault,
        };
        world.plant();
        world
    }

    fn plant(&mut self) {
        #[cfg(feature = "planted")]
        {
            self.records.plant(Fault::of(self.fault));
            self.destager.plant(Fault::of(self.fault));
        }
    }

    fn is_journaled(&self) -> bool {
        matches!(self.order, Order::Journaled(_))
    }

    fn by_marks(&self) -> bool {
        self.order == Order::Journaled(Cuts::Marks)
    }

    fn by_completion(&self) -> bool {
        self.order == Order::Ordered(Grain::Completion)
    }

    /// The last batch up to which all have at least this state.
    fn reached(&self, state: u8) -> u64 {
        self.log.iter().take_while(|w| w.state >= state).count() as u64
    }

    /// The last write of a sector among the first `n`.
    fn last(&self, sector: u64, n: u64) -> u64 {
        let first = self.log[..n as usize].iter().rposition(|w| w.range.contains(&sector));
        first.map_or(0, |i| i as u64 + 1)
    }

    /// What lies below the overlay.
    fn clean(&self, sector: u64) -> u64 {
        self.slots.get(&sector).copied().unwrap_or_else(|| self.store.see(&sector).unwrap_or(0))
    }

    fn seen(&self, sector: u64) -> u64 {
        let mut seen = 0;
        self.overlay.look(sector..sector + 1, |stretch| {
            seen = match stretch {
                Stretch::Dirty(dirty) => sectors(&dirty).first().map_or(0, |s| s.1),
                Stretch::Clean(..) => self.clean(sector),
            };
        });
        seen
    }

    // ---- what clients do ----

    fn issue(&mut self) {
        let first = self.rng.below(SECTORS);
        let len = [1, 1, 2, 3][self.rng.below(4) as usize];
        let range = first..(first + len).min(SECTORS);
        self.waiting.push_back(Write { range, known: self.known.clone(), dependency: 0, state: 0 });
    }

    fn admit(&mut self) {
        let overlaps = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        let unacknowledged = &self.log[self.records.acknowledged() as usize..];
        let free = (0..self.waiting.len()).find(|&i| {
            let range = &self.waiting[i].range;
            let before = self.waiting.iter().take(i).chain(unacknowledged);
            !before.into_iter().any(|w| overlaps(&w.range, range))
        });
        let Some(mut write) = free.and_then(|i| self.waiting.remove(i)) else { return };
        let number = self.log.len() as u64 + 1;
        let (at, len) = (write.range.start, write.range.end - write.range.start);
        let logged = Logged { at, len, kind: Kind::Write, batch: number, place: number * WRITE };
        let (sequence, dependency) = self.records.assign(logged, None, &mut self.overlay);
        write.dependency = dependency;
        assert_eq!(sequence, number);
        self.log.push(write);
    }

    fn complete(&mut self) {
        let todo: Vec<usize> = (0..self.log.len()).filter(|&i| self.log[i].state == 0).collect();
        if !todo.is_empty() {
            let i = todo[self.rng.below(todo.len() as u64) as usize];
            self.log[i].state = 1;
        }
    }

    fn acknowledge(&mut self) {
        let written = self.reached(1);
        while self.records.answerable(written).is_some() {
            self.records.answer(&mut self.overlay);
            if self.by_completion() {
                self.known.insert(self.records.acknowledged());
            }
            if self.rng.chance(0.3) {
                break;
            }
        }
    }

    /// An application names a consistency point.
    fn mark(&mut self) {
        let position = self.records.acknowledged();
        if self.by_marks() {
            self.cuts.insert(position);
        }
        self.records.mark(position);
    }

    fn flush(&mut self) {
        if self.by_marks() {
            return self.mark();
        }
        self.flushes.push(self.records.acknowledged());
    }

    fn flush_log(&mut self) {
        for write in &mut self.log {
            write.state = if write.state > 0 { 2 } else { 0 };
        }
        let durable = self.reached(2);
        let (done, left) = self
            .flushes
            .iter()
            .partition(|&&p| self.records.batch_of(p).is_none_or(|b| b <= durable));
        self.flushes = left;
        let done: Vec<u64> = done;
        for position in done {
            self.records.promise(position);
            self.promised = self.promised.max(position);
            if !self.by_marks() {
                self.cuts.insert(position);
            }
            if !self.by_completion() {
                self.known.extend(1..=position);
            }
        }
    }

    fn read(&mut self) -> Result<(), String> {
        let sector = self.rng.below(SECTORS);
        let (seen, fresh) = (self.seen(sector), self.last(sector, self.records.acknowledged()));
        if seen < fresh {
            return Err(format!("a read of sector {sector} gives {seen}, acknowledged {fresh}"));
        }
        if self.by_completion() && seen > 0 {
            self.known.insert(seen);
        }
        if self.rng.chance(0.5) {
            self.slots.insert(sector, self.clean(sector));
        }
        Ok(())
    }

    // ---- destaging ----

    /// An ordinary write-through change: the slot goes, then the store has it, then perhaps a slot.
    fn engine(&mut self, sector: u64, write: u64) {
        self.slots.remove(&sector);
        self.store.write(sector, write);
        if self.rng.chance(0.3) {
            self.slots.insert(sector, write);
        }
    }

    fn step(&mut self) -> Result<(), String> {
        self.now.0 += 10_000_000;
        let mut asked = Asked::default();
        // Nobody flushes: an epoch may end anywhere.
        let pressed = self.records.last() - self.records.frontier() > 6 && !self.by_marks();
        if self.ios.is_empty() {
            let durable = self.reached(2);
            self.destager.step(&self.records, self.now, durable, (false, pressed), &mut asked);
        } else {
            let i = self.rng.below(self.ios.len() as u64) as usize;
            self.end(i, &mut asked)?;
        }
        for io in asked.0 {
            if let Io::Journal { last, .. } = &io {
                if pressed {
                    self.cuts.insert(*last);
                }
                self.journal_life = self.journal.life;
            }
            self.ios.push(io);
        }
        Ok(())
    }

    /// One I/O goes on, or ends.
    fn end(&mut self, i: usize, asked: &mut Asked) -> Result<(), String> {
        match self.ios.swap_remove(i) {
            Io::Store(dirty) => {
                // Some fail, whatever the store has of them.
                let outcome = (!self.rng.chance(0.01)).then_some(self.store.life);
                let some = outcome.is_some() || self.rng.chance(0.5);
                for (sector, write) in sectors(&dirty).into_iter().filter(|_| some) {
                    self.engine(sector, write);
                }
                self.destager.stored(self.now, outcome, asked);
            }
            Io::FlushStore => {
                let life = self.store.flush();
                self.destager.flushed(self.now, Some(life), asked);
            }
            Io::Journal { epoch, last, mut left } => {
                if left.is_empty() {
                    self.destager.journaled(self.now, true, asked);
                    return Ok(());
                }
                let (piece, block) = left.swap_remove(self.rng.below(left.len() as u64) as usize);
                self.journal.write(piece, block);
                self.ios.push(Io::Journal { epoch, last, left });
            }
            Io::FlushJournal => {
                let done = self.journal.flush() == self.journal_life;
                self.destager.journal_flushed(self.now, done, asked);
            }
            Io::Note(frontier) => {
                if self.fault != Some(Planted::FrontierNotNoted) {
                    self.noted = frontier;
                }
                let Some(to) = self.destager.noted() else {
                    return Err("nothing was noted".into());
                };
                self.records.let_go(to, &mut self.overlay, |_, _| {});
            }
        }
        Ok(())
    }

    /// What `recover` and a start do with the journal: the last sequence of its epoch.
    fn replay(&mut self) -> u64 {
        self.journal.flush();
        let Some(Block::Commit { epoch, pieces, sum: want, last }) =
            self.journal.see(&Piece::Commit)
        else {
            return 0;
        };
        let mut all = Vec::new();
        for i in 0..pieces {
            let Some(Block::Data { epoch: of, sector, write }) = self.journal.see(&Piece::Data(i))
            else {
                return 0;
            };
            if of != epoch {
                return 0;
            }
            all.push((sector, write));
        }
        if sum(&all) != want {
            return 0;
        }
        while !all.is_empty() {
            let (sector, write) = all.swap_remove(self.rng.below(all.len() as u64) as usize);
            self.store.write(sector, write);
            self.slots.remove(&sector);
        }
        last
    }

    // ---- what fails ----

    fn power(&mut self) {
        if self.rng.chance(0.5) {
            self.store.crash(&mut self.rng);
        }
        if self.rng.chance(0.5) {
            self.journal.crash(&mut self.rng);
        }
    }

    fn restart(&mut self, power: bool) -> Result<(), String> {
        if power {
            self.power();
        }
        self.waiting.clear();
        self.flushes.clear();
        self.ios.clear();
        let acknowledged = self.records.acknowledged();
        let must = if power { self.promised } else { self.promised.max(acknowledged) };
        let alive = |w: &Write, rng: &mut Rng| match w.state {
            2 => true,
            1 if !power => true,
            _ => rng.chance(0.5),
        };
        let mut n = 0;
        while n < self.log.len() && alive(&self.log[n], &mut self.rng) {
            n += 1;
        }
        let (n, name) = (n as u64, if power { "power cut" } else { "kill" });
        if n < must {
            return Err(format!("{name}: promised {must}, kept {n}"));
        }
        self.log.truncate(n as usize);
        // What is recovered is made durable before it counts.
        self.log.iter_mut().for_each(|w| w.state = 2);
        self.noted = self.noted.min(n);
        let replayed = if self.is_journaled() { self.replay() } else { 0 };
        if self.is_journaled() {
            self.store.flush();
        }
        self.noted = self.noted.max(replayed.min(n));
        self.records = VolumeLog::new(self.order, self.noted);
        self.plant();
        self.overlay = Overlay::default();
        for number in self.noted + 1..=n {
            let Write { range, dependency, .. } = &self.log[number as usize - 1];
            let (at, len) = (range.start, range.end - range.start);
            let logged =
                Logged { at, len, kind: Kind::Write, batch: number, place: number * WRITE };
            self.records.recover(logged, *dependency, &mut self.overlay);
        }
        self.records.recovered();
        self.destager = Destager::new(config(self.order), self.destager.epoch() + 1);
        self.plant();
        for sector in 0..SECTORS {
            let (seen, want) = (self.seen(sector), self.last(sector, n));
            if seen != want {
                return Err(format!("{name}: sector {sector} holds {seen}, the prefix has {want}"));
            }
        }
        self.promised = n;
        self.cuts.retain(|&cut| cut <= n);
        if self.by_marks() {
            self.cuts.iter().for_each(|&cut| self.records.mark(cut));
        } else {
            self.cuts.insert(n);
        }
        self.known.retain(|&w| w <= n);
        self.known.extend(1..=n);
        Ok(())
    }

    /// The cache device is gone: what does the store hold?
    fn lose_cache(&mut self) -> Result<(), String> {
        self.power();
        if self.is_journaled() {
            for _ in 0..self.rng.below(3) + 1 {
                self.replay();
                self.power();
            }
            self.replay();
        }
        self.store.flush();
        let image: Vec<u64> = (0..SECTORS).map(|s| self.store.see(&s).unwrap_or(0)).collect();
        let noted = self.records.frontier();
        if self.is_journaled() {
            let is = |cut: u64| (0..SECTORS).all(|s| image[s as usize] == self.last(s, cut));
            let fits =
                self.cuts.iter().filter(|&&cut| cut <= self.log.len() as u64 && is(cut)).max();
            let Some(&at) = fits else {
                return Err("cache lost: the recovered image is no epoch's end".into());
            };
            if at < noted {
                return Err("cache lost: older than what status called safe".into());
            }
        } else if self.order != Order::Any {
            for &write in image.iter().filter(|&&w| w > 0) {
                for &before in &self.log[write as usize - 1].known {
                    for sector in self.log[before as usize - 1].range.clone() {
                        if image[sector as usize] < before {
                            return Err(format!(
                                "cache lost: {write} is there, and {before}, which its client knew, is not"
                            ));
                        }
                    }
                }
            }
            for sector in 0..SECTORS {
                if image[sector as usize] < self.last(sector, noted) {
                    return Err("cache lost: older than what status called safe".into());
                }
            }
        }
        Ok(())
    }

    pub(super) fn play(&mut self, steps: u64) -> Result<(), String> {
        for _ in 0..steps {
            match self.rng.below(1_000) {
                0..120 => self.issue(),
                120..270 => self.admit(),
                270..420 => self.complete(),
                420..540 => self.acknowledge(),
                540..590 => self.flush_log(),
                590..615 => self.flush(),
                615..690 => self.read()?,
                690..985 => self.step()?,
                985..989 => self.store.crash(&mut self.rng),
                989..992 => self.journal.crash(&mut self.rng),
                992..996 => self.restart(false)?,
                _ => self.restart(true)?,
            }
        }
        self.lose_cache()
    }
}

fn config(order: Order) -> Config {
    Config { order, pace: Pace::Async, most: 12, depth: 4 }
}
