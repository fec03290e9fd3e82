//! One volume, its log, its store and its journal, and what clients know of it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use larder_base::{Nanos, Rng};
use larder_engine::block::PartKind;
use larder_engine::block::node::logged::JournalPart;
use larder_engine::block::writeback::destager::{Config, Destager, Effects, Pace};
use larder_engine::block::writeback::marker;
use larder_engine::block::writeback::overlay::{Dirty, Holds, Overlay, Stretch};
use larder_engine::block::writeback::volume_log::{Cuts, Kind, Logged, Order, VolumeLog};
use larder_engine::block::writeback::{Fault, Planted};
use larder_format::Uuid;
use larder_format::block::superblock::WrittenBack;
use larder_runtime::{AlignedBuf, Payload};
use larder_volume::Backing as _;
use larder_volume::marker::memory::MemoryMarker;
use larder_volume::op::Op;

use super::super::journal::{Kept, Work};
use super::disk::{Disk, Power};
use super::marked::Marked;
use super::objects::Objects;

/// The volume is so many cells; each is written as a whole, and is three sectors, any of which may be lost.
pub(super) const CELLS: u64 = 6;
pub(super) const CELL: u64 = 1536;
/// Bytes of the log that stand for one write, so that an address tells which.
const WRITE: u64 = CELLS * CELL;
/// Bytes of the journal's place.
const REGION: u64 = 128 << 20;

/// What goes wrong in a history.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Setup {
    /// Epochs end at marks alone.
    pub(super) marks: bool,
    /// Some I/O fails.
    pub(super) fails: bool,
    /// The journal is damaged or lost some time.
    pub(super) rots: bool,
    /// The journal is in an object store.
    pub(super) objects: bool,
    /// There PUTs go over whatever is there: what must not be.
    pub(super) unconditional: bool,
    /// Whoever has the marker has it alone.
    pub(super) fenced: bool,
    pub(super) fault: Option<Planted>,
    pub(super) trace: bool,
}

/// How often something was tried.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Starts that replayed an epoch.
    pub(super) replayed: u64,
    pub(super) recovered: u64,
    /// Recoveries that refused a torn journal.
    pub(super) refused: u64,
    pub(super) carried: u64,
    pub(super) epochs: u64,
    pub(super) made_anew: u64,
    /// Processes that came while another lived, and of those others the ones that went on when it was over.
    pub(super) seconds: u64,
    pub(super) woken: u64,
    /// PUTs that came late.
    pub(super) late: u64,
}

impl Counts {
    pub(super) fn add(&mut self, other: &Counts) {
        self.replayed += other.replayed;
        self.recovered += other.recovered;
        self.refused += other.refused;
        self.carried += other.carried;
        self.epochs += other.epochs;
        self.made_anew += other.made_anew;
        self.seconds += other.seconds;
        self.woken += other.woken;
        self.late += other.late;
    }
}

/// A write that was logged.
#[derive(Clone)]
pub(super) struct Write {
    range: Range<u64>,
    kind: Kind,
    /// What its cells hold then; 0: zeros.
    id: u64,
    dependency: u64,
    /// 0 under way, 1 completed, 2 durable.
    pub(super) state: u8,
}

/// What was asked for and has not ended.
enum Io {
    Store(Dirty),
    FlushStore,
    Journal { epoch: u64, last: u64, pieces: Vec<Dirty> },
    FlushJournal,
    Note(u64),
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
        self.0.push(Io::Journal { epoch, last, pieces: pieces.to_vec() });
    }
    fn flush_journal(&mut self) {
        self.0.push(Io::FlushJournal);
    }
    fn note(&mut self, frontier: u64) {
        self.0.push(Io::Note(frontier));
    }
}

/// What becomes of a run.
enum Next {
    Stays,
    /// It goes, or is killed.
    Leaves,
    /// Another process comes.
    Seconded,
}

/// What a run has in memory.
pub(super) struct Run {
    pub(super) records: VolumeLog,
    overlay: Overlay,
    pub(super) destager: Destager,
    pub(super) kept: Kept,
    /// The place of its marker.
    pub(super) marker: Option<Marked>,
    pub(super) number: u64,
    pub(super) durable_number: u64,
    ios: Vec<Io>,
    waiting: VecDeque<(Range<u64>, Kind)>,
    /// Positions of flushes that wait.
    flushes: Vec<u64>,
}

pub(super) struct World {
    pub(super) rng: Rng,
    pub(super) setup: Setup,
    pub(super) order: Order,
    pub(super) now: Nanos,
    pub(super) power: Power,
    pub(super) store: Disk,
    pub(super) journal: Disk,
    pub(super) objects: Option<Objects>,
    pub(super) marker: MemoryMarker,
    pub(super) volume: Uuid,
    // What the cache device has.
    pub(super) cache: Uuid,
    pub(super) caches: u8,
    pub(super) run: u64,
    pub(super) record: Option<WrittenBack>,
    pub(super) attachments: u32,
    pub(super) log: Vec<Write>,
    pub(super) noted: u64,
    pub(super) known: u64,
    pub(super) slots: BTreeMap<u64, u64>,
    // What is to be.
    base: Vec<u64>,
    next: u64,
    promised: u64,
    acknowledged: u64,
    cuts: BTreeSet<u64>,
    ends: BTreeSet<u64>,
    /// An epoch is being written to the journal, or was and is not known to be there: it may be torn.
    pub(super) unsure: bool,
    /// Something of the journal was damaged or removed; epochs that must be whole until that is over.
    pub(super) rotten: u64,
    pub(super) up: Option<Run>,
    /// A process that does not go on for some time, and its marker as it knows it.
    pub(super) paused: Option<(Run, marker::Marker)>,
    pub(super) counts: Counts,
}

/// The bytes of a cell.
fn fill(id: u64) -> Vec<u8> {
    let mut bytes = vec![0; CELL as usize];
    for (i, word) in bytes.chunks_exact_mut(8).enumerate().filter(|_| id > 0) {
        word.copy_from_slice(&(id << 16 | i as u64).to_le_bytes());
    }
    bytes
}

/// What a cell holds: nothing if it is a mix.
fn id_of(bytes: &[u8]) -> Option<u64> {
    let id = u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?) >> 16;
    (bytes == fill(id)).then_some(id)
}

fn payload(bytes: &[u8]) -> Payload {
    let mut buf = AlignedBuf::zeroed(bytes.len());
    buf.copy_from_slice(bytes);
    Payload::new(buf)
}

fn cells(dirty: &Dirty) -> Range<u64> {
    dirty.at / CELL..(dirty.at + dirty.len) / CELL
}

impl World {
    pub(super) fn new(seed: u64, setup: Setup) -> World {
        let mut rng = Rng::new(seed);
        let power = Power::default();
        let store = Disk::new("store", CELLS * CELL, &power, rng.fork(1));
        let journal = Disk::new("journal", REGION, &power, rng.fork(2));
        let unconditional = setup.unconditional;
        let objects = setup.objects.then(|| Objects::new(&power, Rng::new(seed), unconditional));
        World {
            rng,
            setup,
            order: Order::Journaled(if setup.marks { Cuts::Marks } else { Cuts::Flushes }),
            now: Nanos(0),
            power,
            store,
            journal,
            objects,
            marker: if setup.fenced { MemoryMarker::fenced() } else { MemoryMarker::new() },
            volume: Uuid([9; 16]),
            cache: Uuid([1; 16]),
            caches: 1,
            run: 0,
            record: None,
            attachments: 0,
            log: Vec::new(),
            noted: 0,
            known: 0,
            slots: BTreeMap::new(),
            base: vec![0; CELLS as usize],
            next: 1,
            promised: 0,
            acknowledged: 0,
            cuts: BTreeSet::from([0]),
            ends: BTreeSet::from([0]),
            unsure: false,
            rotten: 0,
            up: None,
            paused: None,
            counts: Counts::default(),
        }
    }

    pub(super) fn fault(&self) -> Fault {
        Fault::of(self.setup.fault)
    }

    pub(super) fn say(&self, what: impl FnOnce() -> String) {
        if self.setup.trace {
            println!("{}", what());
        }
    }

    /// What the first `n` writes make of the volume.
    fn image(&self, n: u64) -> Vec<u64> {
        let mut image = self.base.clone();
        for write in &self.log[..n as usize] {
            for cell in write.range.clone() {
                image[cell as usize] = write.id;
            }
        }
        image
    }

    /// A new attachment: what was logged before is in the store, or void.
    pub(super) fn attaches(&mut self, image: Vec<u64>) {
        self.base = image;
        self.log.clear();
        (self.noted, self.promised, self.acknowledged) = (0, 0, 0);
        self.cuts = BTreeSet::from([0]);
        self.ends = BTreeSet::from([0]);
    }

    /// What all of the log makes of the volume.
    pub(super) fn all(&self) -> Vec<u64> {
        self.image(self.log.len() as u64)
    }

    fn in_store(&self, cell: u64) -> Option<u64> {
        id_of(&self.store.peek(cell * CELL, CELL))
    }

    /// What lies below the overlay.
    fn clean(&self, cell: u64) -> Option<u64> {
        self.slots.get(&cell).copied().or_else(|| self.in_store(cell))
    }

    /// What a client reads.
    fn seen(&self, run: &Run, cell: u64) -> Option<u64> {
        let mut seen = None;
        run.overlay.look(cell * CELL..(cell + 1) * CELL, |stretch| {
            seen = match stretch {
                Stretch::Dirty(dirty) => Some(self.log[dirty.sequence as usize - 1].id),
                Stretch::Clean(..) => self.clean(cell),
            };
        });
        seen
    }

    /// The last batch up to which all have at least this state.
    fn reached(&self, state: u8) -> u64 {
        self.log.iter().take_while(|w| w.state >= state).count() as u64
    }

    /// A run begins with what was found in the log behind `frontier`.
    pub(super) fn begins(
        &mut self,
        (frontier, epoch): (u64, u64),
        kept: Kept,
        number: u64,
    ) -> Result<(), String> {
        let mut records = VolumeLog::new(self.order, frontier);
        records.plant(self.fault());
        let mut overlay = Overlay::default();
        for sequence in frontier + 1..=self.log.len() as u64 {
            let Write { range, kind, dependency, .. } = &self.log[sequence as usize - 1];
            let logged = logged(sequence, range, *kind);
            records.recover(logged, *dependency, &mut overlay);
        }
        records.recovered();
        // A host of another size has more or less memory for an epoch.
        let most = [8, 12, 24][self.rng.below(3) as usize] * CELL;
        let config = Config { order: self.order, pace: Pace::Async, most, depth: 4 };
        let mut destager = Destager::new(config, epoch);
        destager.plant(self.fault());
        let n = self.log.len() as u64;
        self.noted = self.noted.max(frontier);
        (self.promised, self.acknowledged) = (n, n);
        if self.setup.marks {
            self.cuts.iter().for_each(|&cut| records.mark(cut));
        } else {
            self.cuts.insert(n);
        }
        let run = Run {
            records,
            overlay,
            destager,
            kept,
            marker: None,
            number,
            durable_number: number,
            ios: Vec::new(),
            waiting: VecDeque::new(),
            flushes: Vec::new(),
        };
        self.say(|| format!("runs: frontier {frontier} of {n}, epoch {epoch}"));
        for (cell, want) in (0..CELLS).zip(self.all()) {
            let seen = self.seen(&run, cell);
            if seen != Some(want) {
                return Err(format!("a start: cell {cell} holds {seen:?}, the log has {want}"));
            }
        }
        self.up = Some(run);
        Ok(())
    }

    // ---- what clients do ----

    fn issue(&mut self, run: &mut Run) {
        let first = self.rng.below(CELLS);
        let len = [1, 1, 2, 3][self.rng.below(4) as usize];
        let kind = match self.rng.below(10) {
            0 => Kind::Zero,
            1 => Kind::Trim,
            _ => Kind::Write,
        };
        run.waiting.push_back((first..(first + len).min(CELLS), kind));
    }

    fn admit(&mut self, run: &mut Run) {
        let overlaps = |a: &Range<u64>, b: &Range<u64>| a.start < b.end && b.start < a.end;
        let unanswered = &self.log[run.records.acknowledged() as usize..];
        let free = (0..run.waiting.len()).find(|&i| {
            let range = &run.waiting[i].0;
            let before = run.waiting.iter().take(i).map(|w| &w.0);
            !before.chain(unanswered.iter().map(|w| &w.range)).any(|w| overlaps(w, range))
        });
        let Some((range, kind)) = free.and_then(|i| run.waiting.remove(i)) else { return };
        let number = self.log.len() as u64 + 1;
        let (sequence, dependency) =
            run.records.assign(logged(number, &range, kind), None, &mut run.overlay);
        assert_eq!(sequence, number);
        let id = if kind == Kind::Write { self.next } else { 0 };
        self.next += 1;
        self.log.push(Write { range, kind, id, dependency, state: 0 });
    }

    fn complete(&mut self) {
        let todo: Vec<usize> = (0..self.log.len()).filter(|&i| self.log[i].state == 0).collect();
        if !todo.is_empty() {
            let i = todo[self.rng.below(todo.len() as u64) as usize];
            self.log[i].state = 1;
        }
    }

    fn acknowledge(&mut self, run: &mut Run) {
        let written = self.reached(1);
        while run.records.answerable(written).is_some() {
            run.records.answer(&mut run.overlay);
            if self.rng.chance(0.3) {
                break;
            }
        }
        self.acknowledged = run.records.acknowledged();
    }

    fn flush(&mut self, run: &mut Run) {
        let position = run.records.acknowledged();
        if self.setup.marks {
            self.cuts.insert(position);
            return run.records.mark(position);
        }
        run.flushes.push(position);
    }

    pub(super) fn flush_log(&mut self, run: &mut Run) {
        for write in &mut self.log {
            write.state = if write.state > 0 { 2 } else { 0 };
        }
        let durable = self.reached(2);
        let (done, left): (Vec<u64>, Vec<u64>) = run
            .flushes
            .iter()
            .partition(|&&p| run.records.batch_of(p).is_none_or(|batch| batch <= durable));
        run.flushes = left;
        for position in done {
            run.records.promise(position);
            self.promised = self.promised.max(position);
            self.cuts.insert(position);
        }
    }

    fn read(&mut self, run: &Run) -> Result<(), String> {
        let cell = self.rng.below(CELLS);
        let (seen, fresh) = (self.seen(run, cell), self.image(run.records.acknowledged()));
        if seen != Some(fresh[cell as usize]) {
            return Err(format!("a read of cell {cell} gives {seen:?}: {fresh:?} is answered"));
        }
        if let Some(clean) = self.clean(cell).filter(|_| self.rng.chance(0.5)) {
            self.slots.insert(cell, clean);
        }
        Ok(())
    }

    // ---- destaging ----

    fn step(&mut self, run: &mut Run) {
        self.now.0 += 10_000_000;
        let mut asked = Asked::default();
        let pressed = run.records.last() - run.records.frontier() > 6;
        let pressed = pressed && (!self.setup.marks || self.rng.chance(0.1));
        if run.ios.is_empty() {
            let durable = self.reached(2);
            let now = self.now;
            run.destager.step(&run.records, now, durable, (false, pressed), &mut asked);
        } else {
            let i = self.rng.below(run.ios.len() as u64) as usize;
            self.end(run, i, &mut asked);
        }
        for io in asked.0 {
            if let Io::Journal { last, epoch, .. } = &io {
                self.say(|| format!("epoch {epoch} up to {last}, pressed {pressed}"));
                self.counts.epochs += 1;
                if pressed {
                    self.cuts.insert(*last);
                }
                self.ends.insert(*last);
            }
            run.ios.push(io);
        }
    }

    /// One I/O ends.
    fn end(&mut self, run: &mut Run, i: usize, asked: &mut Asked) {
        match run.ios.swap_remove(i) {
            Io::Store(dirty) => {
                let life = self.store.losses();
                // The slots go first, as with any change; then perhaps they are there again.
                self.slots.retain(|cell, _| !cells(&dirty).contains(cell));
                let (offset, len) = (dirty.at, dirty.len as u32);
                let mut op = match dirty.holds {
                    Holds::Bytes => {
                        Op::Write { offset, data: payload(&self.bytes(&dirty)), fua: false }
                    }
                    _ => Op::WriteZeroes { offset, len, fua: false, may_punch: true, fast: false },
                };
                let done = self.store.perform(&mut op).is_ok();
                if done && self.rng.chance(0.3) {
                    let id = self.log[dirty.sequence as usize - 1].id;
                    self.slots.extend(cells(&dirty).map(|cell| (cell, id)));
                }
                run.destager.stored(self.now, done.then_some(life), asked);
            }
            Io::FlushStore => {
                let done = self.store.perform(&mut Op::Flush).is_ok();
                run.destager.flushed(self.now, done.then(|| self.store.losses()), asked);
            }
            Io::Journal { epoch, last, pieces } => {
                let parts = pieces.iter().map(|dirty| JournalPart {
                    at: dirty.at,
                    len: dirty.len,
                    kind: match dirty.holds {
                        Holds::Zeros => PartKind::Zero,
                        Holds::Trimmed => PartKind::Trim,
                        _ => PartKind::Write,
                    },
                    bytes: matches!(dirty.holds, Holds::Bytes).then(|| payload(&self.bytes(dirty))),
                });
                let parts = parts.collect();
                self.unsure = true;
                let done =
                    run.kept.do_work(self.now, Work::Write((epoch, last, epoch, None), parts));
                self.say(|| format!("journal: epoch {epoch} {done:?}"));
                run.destager.journaled(self.now, done.is_ok(), asked);
            }
            Io::FlushJournal => {
                let done = run.kept.do_work(self.now, Work::Flush);
                if done.is_ok() {
                    self.unsure = false;
                    self.rotten = self.rotten.saturating_sub(1);
                }
                self.say(|| format!("journal: flush {done:?}"));
                run.destager.journal_flushed(self.now, done.is_ok(), asked);
            }
            Io::Note(frontier) => {
                self.noted = frontier;
                self.say(|| format!("noted {frontier}"));
                if let Some(to) = run.destager.noted() {
                    run.records.let_go(to, &mut run.overlay, |_, _| {});
                }
            }
        }
    }

    /// What is on its way to the journal comes there late, or never, and this process does not hear of it.
    pub(super) fn is_cut_off(&mut self, run: &mut Run) {
        let at = run.ios.iter().position(|io| matches!(io, Io::Journal { .. }));
        if let (Some(objects), Some(at)) = (&self.objects, at) {
            objects.lingers();
            self.end(run, at, &mut Asked::default());
        }
    }

    pub(super) fn journal_fails(&self, share: f64) {
        self.journal.fails(share);
        self.objects.iter().for_each(|objects| objects.fails(share));
    }

    pub(super) fn journal_is_failing(&self) -> bool {
        self.journal.is_failing() || self.objects.as_ref().is_some_and(Objects::is_failing)
    }

    fn bytes(&self, dirty: &Dirty) -> Vec<u8> {
        let id = self.log[dirty.sequence as usize - 1].id;
        cells(dirty).flat_map(|_| fill(id)).collect()
    }

    /// The journal's thread looks whether it is still there.
    fn look(&mut self, run: &mut Run) {
        let idle = run.records.is_clean() && run.destager.is_idle() && run.waiting.is_empty();
        let done = run.kept.do_work(self.now, Work::Look(idle));
        self.say(|| format!("journal: look, idle {idle} {done:?}"));
    }

    // ---- what fails ----

    /// Something happens to the journal that no flush helps against.
    fn harm(&mut self) {
        let what = self.rng.below(4);
        let range = match what {
            0 => 0..8 << 10,
            1 => 8 << 10..REGION,
            _ => 0..REGION,
        };
        let part = self.rng.below(2) * (REGION / 2);
        let range = match what {
            // A part is trimmed, and the head is not.
            3 if self.rng.chance(0.5) => part + (8 << 10)..part + REGION / 2,
            _ => range,
        };
        let done = match what {
            _ if self.objects.is_some() => {
                self.objects.as_ref().is_some_and(|objects| objects.harm(what == 3))
            }
            0..3 => self.journal.rots(range),
            _ => {
                self.journal.wipe(range);
                true
            }
        };
        if done {
            self.say(|| format!("the journal is harmed: {what}"));
            self.rotten = 4;
        }
    }

    /// What was in memory is gone, and perhaps more: the log has what it has by then.
    pub(super) fn crash(&mut self, power: bool) -> Result<(), String> {
        for disk in [&self.store, &self.journal] {
            if power && self.rng.chance(0.7) {
                disk.crash();
            }
        }
        self.say(|| format!("crash, power {power}"));
        self.up = None;
        self.power.comes_back();
        self.marker.set_power(true);
        Ok(())
    }

    /// What the log has after a crash.
    pub(super) fn keeps(&mut self, power: bool) -> Result<(), String> {
        let must = if power { self.promised } else { self.promised.max(self.acknowledged) };
        let mut n = 0;
        while n < self.log.len() {
            let kept = match self.log[n].state {
                2 => true,
                1 if !power => true,
                _ => self.rng.chance(0.5),
            };
            if !kept {
                break;
            }
            n += 1;
        }
        if (n as u64) < must {
            return Err(format!("promised {must}, kept {n}"));
        }
        self.log.truncate(n);
        self.log.iter_mut().for_each(|write| write.state = 2);
        self.noted = self.noted.min(n as u64);
        (self.promised, self.acknowledged) = (n as u64, n as u64);
        self.cuts.retain(|&cut| cut <= n as u64);
        self.ends.retain(|&end| end <= n as u64);
        Ok(())
    }

    /// The store was recovered without its cache.
    pub(super) fn check_recovered(&mut self, torn: bool) -> Result<Vec<u64>, String> {
        if torn && self.rotten > 0 {
            // What a failed flush has lost is not there, though reads may still show it.
            self.store.crash();
        }
        let image: Vec<Option<u64>> = (0..CELLS).map(|cell| self.in_store(cell)).collect();
        if torn && self.rotten > 0 {
            // It is whatever it is. (A volume's owner writes over it.)
            for (cell, _) in image.iter().enumerate().filter(|(_, is)| is.is_none()) {
                self.store.wipe(cell as u64 * CELL..(cell as u64 + 1) * CELL);
            }
            return Ok((0..CELLS).map(|cell| self.in_store(cell).unwrap_or(0)).collect());
        }
        let whole: Option<Vec<u64>> = image.iter().copied().collect();
        let Some(whole) = whole else {
            return Err(format!("recovered: a cell is a mix: {image:?}"));
        };
        let n = self.log.len() as u64;
        let at = self.ends.iter().filter(|&&end| end <= n && self.image(end) == whole).max();
        let Some(&at) = at else {
            return Err(format!("recovered: {whole:?} is no epoch's end"));
        };
        if at < self.noted {
            return Err(format!("recovered: {at}, and {} was safe", self.noted));
        }
        if !self.cuts.iter().any(|&cut| cut <= n && self.image(cut) == whole) {
            return Err(format!("recovered: {whole:?} is no consistency point"));
        }
        Ok(whole)
    }

    pub(super) fn is_settled(&self, run: &Run) -> bool {
        run.ios.is_empty() && run.destager.is_settled()
    }

    pub(super) fn is_clean(&self, run: &Run) -> bool {
        run.records.is_clean() && run.destager.is_idle() && run.waiting.is_empty()
    }

    fn act(&mut self, run: &mut Run) -> Result<Next, String> {
        match self.rng.below(1_000) {
            0..120 => self.issue(run),
            120..270 => self.admit(run),
            270..420 => self.complete(),
            420..540 => self.acknowledge(run),
            540..590 => self.flush_log(run),
            590..620 => self.flush(run),
            620..680 => self.read(run)?,
            680..970 => self.step(run),
            970..975 => self.look(run),
            975..980 => self.refresh(run),
            980..984 => self.store.crash(),
            984..987 => self.journal.crash(),
            987..991 if self.setup.rots => self.harm(),
            991..995 => return Ok(Next::Leaves),
            995..997 => return Ok(Next::Seconded),
            _ => self.power.goes_after(self.rng.below(16)),
        }
        if self.paused.is_some() && self.rng.chance(0.05) {
            self.wakes()?;
        }
        Ok(Next::Stays)
    }

    pub(super) fn play(&mut self, steps: u64) -> Result<(), String> {
        for _ in 0..steps {
            if self.setup.fails && self.rng.chance(0.02) {
                let share = if self.rng.chance(0.5) { 0.1 } else { 0.0 };
                self.store.fails(share);
                self.journal_fails(share);
            }
            if let Some(objects) = &self.objects
                && self.rng.chance(0.03)
            {
                self.counts.late += objects.some_land() as u64;
            }
            let Some(mut run) = self.up.take() else {
                self.start()?;
                continue;
            };
            let next = self.act(&mut run)?;
            if self.power.is_off() {
                drop(run);
                self.fails()?;
                continue;
            }
            match next {
                Next::Stays => self.up = Some(run),
                Next::Leaves => self.leaves(run)?,
                Next::Seconded => self.seconded(run)?,
            }
        }
        self.up = None;
        self.crash(true)?;
        self.recovers()
    }
}

fn logged(number: u64, range: &Range<u64>, kind: Kind) -> Logged {
    Logged {
        at: range.start * CELL,
        len: (range.end - range.start) * CELL,
        kind,
        batch: number,
        place: number * WRITE,
    }
}
