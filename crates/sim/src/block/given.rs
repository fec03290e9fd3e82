//! A simulated block cache that is given everything, bytes, times and places: what the library is compared with.
//!
//! [`GivenBlock`] runs the same engine node as the server, over a cache device and stores in memory that take no time. It begins by the engine's start
//! on what the device and the last run's memory have, so that volumes lie where the daemon has them, and it ends by a clean stop or by a kill.
//!
//! **The order of things is part of what it promises**, since whoever is compared with it must do alike: it is the engine's
//! ([`larder_engine::block::node::round`]). I/O is done when it is asked for; what has ended waits in the order in which it was asked for. One call
//! of [`Given::turn`] does all that is due at that time:
//!
//! 1. the queue: its mailbox, postponed requests, answers that wait; then, again until nothing is left, its messages, I/O of the device that has
//!    ended (what it begins too), and what each store has done, store by store in the order in which volumes were first asked for;
//! 2. maintenance, as long as it is due: flushes of stores that have ended, what was left for it, its turn, an operator's task, fills, copies and pages
//!    that have ended. It is due when its machine or its inbox says so;
//! 3. both again, until neither has anything to do;
//! 4. the round of who has time, if it is due: the budget's file, what detectors of metadata want to see, then sweeping and counting.
//!
//! An operator's call is a number of such turns, each with one task for maintenance, as the library sends them to its thread.

mod back;
mod bytes;
mod medium;
mod node;
mod operators;
mod requests;
#[cfg(test)]
mod tests;
mod upkeep;
mod volume;

use std::cell::Ref;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::rc::Rc;

use larder_base::{Nanos, Words};
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Map, Shape};
use larder_engine::block::node::counters::VolumeCounts;
use larder_engine::block::node::event::Op;
use larder_engine::block::node::maintenance::{AtNode, Maintenance, Pace};
use larder_engine::block::node::operator::NotDone;
use larder_engine::block::node::operator::select::Kept;
use larder_engine::block::node::queue::{Config, Node, Queue};
use larder_engine::block::node::quiet::QUIET;
use larder_engine::block::node::round::{AllRounds, all_rounds};
use larder_engine::block::node::share::Share;
pub use larder_engine::block::node::start::Warmth;
use larder_engine::block::node::start::memory::{HEADER_WORDS, Memory};
use larder_engine::block::node::start::places::{Comer, Decided};
use larder_engine::block::node::start::{Left, Notes, Setup, Started};
use larder_engine::block::node::{StoredLog, StoredShard};
use larder_engine::block::{BlockStats, Fault, LogStats};
use larder_format::block::superblock::{COPY_BYTES, choose};
use larder_format::block::{BlockSuperblock, BlockSuperblockError, Volume as Record};
use larder_policy::block::{
    BlockAdmissionConfig, BlockAdmissionError, BlockKind, VerdictCounts, VolumeId,
};
use larder_policy::budget::{BudgetError, BudgetState};

use super::spec::{Block, Wrong};
pub use back::WritesBack;
pub use bytes::{Carried, GivenAnswer, Octets};
use medium::{Medium, MediumIo};
use node::GivenNode;
use requests::{Asked, Requests};
use upkeep::{Task, Upkeep};
use volume::{Attached, Store};

/// Why a given cache does not begin, or does not do what it is asked for.
#[derive(Debug, thiserror::Error)]
pub enum GivenError {
    /// A key of the specification that cannot be meant.
    #[error("{key} is {value}: {must}")]
    Key {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        must: String,
    },
    /// The device has no superblock that can be used.
    #[error("the device given has no usable superblock: {0}; give it as it was formatted")]
    Superblock(#[from] BlockSuperblockError),
    /// The write budget cannot be meant.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// Admission cannot be had.
    #[error("admission: {0}")]
    Admission(#[from] BlockAdmissionError),
    /// The start was refused.
    #[error(
        "the start was refused: {0}; give the device and the volumes as the last run left them"
    )]
    Refused(String),
    /// Something of a volume.
    #[error("volume '{name}': {why}")]
    Volume {
        /// Its name.
        name: String,
        /// What is wrong.
        why: String,
    },
}

impl GivenError {
    fn volume(name: &str, why: impl Into<String>) -> GivenError {
        GivenError::Volume { name: name.to_owned(), why: why.into() }
    }

    fn unknown(name: &str) -> GivenError {
        GivenError::volume(name, "there is none of that name: attach it, or name another")
    }

    fn not_done(name: &str, why: NotDone) -> GivenError {
        let why = match why {
            NotDone::Late | NotDone::Unwanted => {
                "something is under way that does not end now: let time go on, and ask again"
            }
            NotDone::Overtaken => "it has changed meanwhile: ask again",
            NotDone::GivenUp => "the cache was given up: begin anew",
        };
        GivenError::volume(name, why)
    }
}

impl From<Wrong> for GivenError {
    fn from((key, value, must): Wrong) -> GivenError {
        GivenError::Key { key, value, must }
    }
}

/// What is stated of volumes, by their names.
#[derive(Clone, Debug, Default)]
struct Rules {
    shares: BTreeMap<String, Share>,
    saved: BTreeMap<String, Kept>,
}

impl Rules {
    /// The specification has numbers: those of the volumes in the order in which they come first.
    fn of(spec: &Block, volumes: &[Comer]) -> Result<Rules, GivenError> {
        let name = |key, number: u32| {
            let comer = volumes.get(number as usize);
            comer.map(|c| c.name.clone()).ok_or_else(|| GivenError::Key {
                key,
                value: format!("of volume {number}"),
                must: format!("give one of the {} volumes by its number", volumes.len()),
            })
        };
        let mut rules = Rules::default();
        for (number, share) in spec.stated_shares()? {
            rules.shares.insert(name("shares", number)?, share);
        }
        let selection = spec.selection()?;
        for id in selection.volumes() {
            rules.saved.insert(name("select", id.0)?, Kept::of(&selection, id));
        }
        Ok(rules)
    }
}

/// The notes of a host, which say that what is on a device must not be used.
struct Noted<'a>(&'a mut bool);

impl Notes for Noted<'_> {
    fn given_up(&mut self) -> Result<(), String> {
        *self.0 = true;
        Ok(())
    }

    fn forget(&mut self) {
        *self.0 = false;
    }
}

/// What a run has left: all that the next one finds.
#[derive(Debug)]
pub struct GivenLeft {
    flash: Vec<u8>,
    /// The maps' memory, header first, if the last run was killed.
    memory: Option<(Words, Vec<(Words, Words)>)>,
    budget: Option<BudgetState>,
    stores: BTreeMap<String, Store>,
    rules: Rules,
    barred: bool,
    /// Volumes wrote back.
    wrote_back: bool,
}

impl GivenLeft {
    /// The cache device.
    pub fn flash(&self) -> &[u8] {
        &self.flash
    }

    /// The machine was started again: memory is gone.
    pub fn lose_memory(&mut self) {
        self.memory = None;
    }

    /// Bytes of a volume's store, zeros where it has none, are these from `at` on: somebody else has written them.
    pub fn put(&mut self, name: &str, at: u64, bytes: &[u8]) {
        put(&mut self.stores, name, at, bytes);
    }
}

fn put(stores: &mut BTreeMap<String, Store>, name: &str, at: u64, bytes: &[u8]) {
    let mut store = stores.entry(name.to_owned()).or_default().borrow_mut();
    let (at, end) = (at as usize, at as usize + bytes.len());
    if store.len() < end {
        store.resize(end, 0);
    }
    store[at..end].copy_from_slice(bytes);
}

/// See the [module](self). With [`Octets`] it is a [`GivenBlock`].
pub struct Given<B: Carried> {
    node: GivenNode<B>,
    requests: Requests<B>,
    upkeep: Upkeep<B>,
    admission: BlockAdmissionConfig,
    fill_memory: u64,
    rules: Rules,
    stores: BTreeMap<String, Store>,
    /// How many volumes have come in this run.
    volumes: u32,
    /// Operations of an operator so far.
    operations: u64,
    warmth: Warmth,
    decided: Vec<Decided>,
}

/// A cache that does all that is due, with what an operator has done meanwhile; or that ends (`stop`): then no request goes on.
struct Turning<'a, 'e, B: Carried> {
    given: &'a mut Given<B>,
    task: Option<Task<'e, B>>,
    stop: bool,
}

impl<B: Carried> AllRounds for Turning<'_, '_, B> {
    fn queues(&mut self) -> bool {
        !self.stop && self.given.requests.step(&self.given.node)
    }

    fn maintenance(&mut self) -> bool {
        let Given { node, upkeep, .. } = &mut *self.given;
        upkeep.step(node, &mut self.task, self.stop)
    }

    fn scan(&mut self) -> Option<Nanos> {
        Some(self.given.upkeep.round(&self.given.node))
    }

    fn due(&mut self) -> Option<Nanos> {
        let node = &self.given.node;
        let written = node.back.as_ref().and_then(|back| back.log.borrow().wakes(node.now.get()));
        Some(self.given.upkeep.due(node)).into_iter().chain(written).min()
    }
}

/// A simulated cache that is given everything, bytes, times and places: what the library is compared with.
pub type GivenBlock = Given<Octets>;

impl<B: Carried> Given<B> {
    /// Begins on a device that was formatted a moment ago, of which all bytes are given. What layout and lines are is the device's; of `spec`
    /// count replacement, reclaim, evict, write, admission, write budget, fill memory, read-ahead, shares and select, where numbers of volumes are those
    /// of `volumes`. Their stores have zeros. `random` is the start's random number.
    ///
    /// # Errors
    /// [`GivenError`].
    pub fn new(
        spec: &Block,
        flash: Vec<u8>,
        volumes: &[Comer],
        random: u32,
    ) -> Result<Given<B>, GivenError> {
        let left = GivenLeft {
            flash,
            memory: None,
            budget: None,
            stores: BTreeMap::new(),
            rules: Rules::of(spec, volumes)?,
            barred: false,
            wrote_back: false,
        };
        Given::again(spec, left, volumes, random)
    }

    /// Begins on what the last run has left. What was stated of shares stays, and what was selected; time begins anew. A store that
    /// was here before has its bytes, and is cut or grows to the size that is stated.
    ///
    /// # Errors
    /// [`GivenError`].
    pub fn again(
        spec: &Block,
        left: GivenLeft,
        volumes: &[Comer],
        random: u32,
    ) -> Result<Given<B>, GivenError> {
        let GivenLeft { flash, memory, budget, stores, rules, mut barred, wrote_back } = left;
        if wrote_back {
            let why = "volumes wrote back in the run before, and what a log has is not read here";
            return Err(GivenError::Refused(why.to_owned()));
        }
        if flash.len() < 2 * COPY_BYTES {
            return Err(BlockSuperblockError::None.into());
        }
        let superblock = choose(&flash[..COPY_BYTES], &flash[COPY_BYTES..2 * COPY_BYTES])?;
        superblock.check_device(flash.len() as u64)?;
        let layout = superblock.layout;
        let shape = Shape::of(&layout);
        let medium = Medium::new(flash, &layout, spec, budget)?;
        let is_old = memory.is_some();
        let (header, words) = memory.unwrap_or_else(|| {
            let (entries, rest) = Map::words(shape);
            let of = |_| (Words::heap(entries), Words::heap(rest));
            (Words::heap(HEADER_WORDS), (0..layout.shards).map(of).collect())
        });
        let mut memory = Memory::new(header, is_old);
        let config = super::shard_config(spec, &layout)?;
        let setup = Setup {
            shape,
            making: spec.making()?,
            config,
            idle: QUIET,
            empty: false,
            random,
            fault: Fault::default(),
        };
        let voided = barred.then_some("the cache was given up, or volumes were served without it");
        let left = Left { superblock, voided, memory: &mut memory, words };
        let io = &mut MediumIo::of(&medium, Nanos::ZERO);
        let judged = left.judge(volumes, &setup, io);
        // (Stores in memory lose nothing.)
        let ready = judged.map(|judged| judged.stores_durable(|_| Ok::<(), Infallible>(())));
        let started =
            ready.and_then(|Ok(ready)| ready.take_over(&mut memory, io, &mut Noted(&mut barred)));
        let begun = match started {
            Ok(Started::With(begun)) => *begun,
            Ok(Started::Without(without)) => return Err(GivenError::Refused(without.why)),
            Err(why) => return Err(GivenError::Refused(format!("{why:?}"))),
        };
        let superblock = begun.log.superblock().clone();
        let shards = begun.shards.into_iter().map(StoredShard::new);
        let node = GivenNode::new(layout, superblock.generation, shards, medium);
        let placing = Placing::of(&layout, superblock.key);
        let queue = Queue::new(node::QUEUE, Config::new(&layout, placing, spec.readahead.0));
        let log = Some(StoredLog::new(begun.log));
        let mut upkeep =
            Upkeep::new(Maintenance::new(Pace::default(), log, superblock.clone()), memory);
        upkeep.begun.barred = barred;
        let mut given = Given {
            node,
            requests: Requests { queue, asked: Asked::default() },
            upkeep,
            admission: spec.admission()?,
            fill_memory: spec.fill_memory.0,
            rules,
            stores,
            volumes: 0,
            operations: 0,
            warmth: begun.warmth,
            decided: begun.places.decided.clone(),
        };
        for record in begun.places.volumes() {
            let attached = given.new_volume(record, &superblock)?;
            given.node.volumes.borrow_mut().insert(record.name.clone(), attached);
        }
        given.node.placed();
        for volume in given.node.all() {
            given.restore_selection(&volume);
        }
        Ok(given)
    }

    /// A volume that comes, with the next number.
    fn new_volume(
        &mut self,
        record: &Record,
        superblock: &BlockSuperblock,
    ) -> Result<Rc<Attached>, GivenError> {
        let store = self.stores.entry(record.name.clone()).or_default().clone();
        store.borrow_mut().resize(record.bytes as usize, 0);
        let share = self.rules.shares.get(&record.name).copied().unwrap_or_default();
        let id = VolumeId(self.volumes);
        self.volumes += 1;
        Attached::new(record, id, superblock, (&self.admission, share), store)
    }

    fn attached(&self, name: &str) -> Result<Rc<Attached>, GivenError> {
        let volumes = self.node.volumes.borrow();
        volumes.get(name).cloned().ok_or_else(|| GivenError::unknown(name))
    }

    // ---- time and requests ----

    /// The time. It does not go back.
    pub fn now(&self) -> Nanos {
        self.node.now.get()
    }

    fn set_now(&mut self, now: Nanos) {
        self.node.now.set(now.max(self.now()));
    }

    /// A request on a volume begins; `holds` is what the client says of its bytes. Places and lengths must lie in the volume. Its answer comes with a turn.
    /// Returns its number.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn submit(
        &mut self,
        now: Nanos,
        volume: &str,
        op: Op<Vec<u8>>,
        holds: BlockKind,
    ) -> Result<u64, GivenError> {
        self.set_now(now);
        let attached = self.attached(volume)?;
        Ok(self.requests.submit(&self.node, &attached, op, holds))
    }

    /// Does all that is due, in the order that the [module](self) states. Returns when there is something to do again.
    pub fn turn(&mut self, now: Nanos) -> Nanos {
        self.set_now(now);
        self.all_turns(None, false)
    }

    fn all_turns(&mut self, task: Option<Task<'_, B>>, stop: bool) -> Nanos {
        let all = all_rounds(&mut Turning { given: self, task, stop });
        all.unwrap_or_else(|| self.now())
    }

    /// The next answer, in the order in which they came.
    pub fn answer(&mut self) -> Option<GivenAnswer> {
        self.requests.asked.answers.pop_front()
    }

    /// A request begins, then everything that is due is done. The answer to it, if it has come; otherwise it comes later.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn ask(
        &mut self,
        now: Nanos,
        volume: &str,
        op: Op<Vec<u8>>,
    ) -> Result<Option<GivenAnswer>, GivenError> {
        let number = self.submit(now, volume, op, BlockKind::Unknown)?;
        self.turn(now);
        let answers = &mut self.requests.asked.answers;
        let at = answers.iter().position(|answer| answer.number == number);
        Ok(at.and_then(|at| answers.remove(at)))
    }

    /// What is under way or waits behind the replies, and slots that the durable map does not know as they are.
    pub fn unsettled(&mut self, now: Nanos) -> usize {
        self.set_now(now);
        self.in_log(|at| at.machine.unsettled(&mut at.shards))
    }

    // ---- ends ----

    /// Ends in good order. Time goes on as far as maintenance wants it to. `identities` is what stores are known by then.
    ///
    /// # Errors
    /// Why the cache was given up on the way, if it was: the next start does not use it.
    pub fn stop(
        mut self,
        now: Nanos,
        identities: &BTreeMap<String, [u8; 64]>,
    ) -> Result<GivenLeft, (String, Box<GivenLeft>)> {
        self.set_now(now);
        self.upkeep.begun.identities = identities.clone();
        self.all_turns(None, true);
        while !self.upkeep.over {
            let due = self.upkeep.due(&self.node);
            self.set_now(due);
            self.all_turns(None, true);
        }
        self.node.medium.save(self.now());
        let why = self.node.given_up.take();
        let stopped = self.upkeep.begun.stopped;
        let left = self.leave(false);
        match why {
            Some(why) if !stopped => Err((why, Box::new(left))),
            _ => Ok(left),
        }
    }

    /// Ends at once: memory stays as it is.
    pub fn kill(self) -> GivenLeft {
        self.leave(true)
    }

    fn leave(self, keeps_memory: bool) -> GivenLeft {
        let Given { node, upkeep, rules, stores, .. } = self;
        let memory = keeps_memory.then(|| {
            let words = node.cells.iter().map(|cell| cell.borrow().0.map().snapshot());
            (upkeep.begun.memory.borrow().snapshot(), words.collect())
        });
        let Medium { flash, file, .. } = node.medium;
        GivenLeft {
            flash: flash.into_inner(),
            memory,
            budget: file.get(),
            stores,
            rules,
            barred: upkeep.begun.barred,
            wrote_back: node.back.is_some(),
        }
    }

    // ---- to look at ----

    /// Whether the cache is used.
    pub fn is_enabled(&self) -> bool {
        Node::is_enabled(&self.node)
    }

    /// How the map was found.
    pub fn warmth(&self) -> &Warmth {
        &self.warmth
    }

    /// What the start has decided of each volume.
    pub fn decided(&self) -> &[Decided] {
        &self.decided
    }

    /// The whole cache device.
    pub fn flash(&self) -> Ref<'_, [u8]> {
        Ref::map(self.node.medium.flash.borrow(), Vec::as_slice)
    }

    /// The superblock in force; none when the cache was given up.
    pub fn superblock(&self) -> Option<&BlockSuperblock> {
        self.upkeep.machine.superblock()
    }

    /// What a volume's store has.
    ///
    /// # Errors
    /// When there never was such a volume.
    pub fn store(&self, name: &str) -> Result<Ref<'_, [u8]>, GivenError> {
        let store = self.stores.get(name).ok_or_else(|| GivenError::unknown(name))?;
        Ok(Ref::map(store.borrow(), Vec::as_slice))
    }

    /// Bytes of a volume's store are these from `at` on, past the cache: it must have none of them.
    pub fn put(&mut self, name: &str, at: u64, bytes: &[u8]) {
        put(&mut self.stores, name, at, bytes);
    }

    /// The next `times` reads and changes of a volume's store, asked for by requests, fail and do nothing.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn fail_store(&mut self, name: &str, times: u32) -> Result<(), GivenError> {
        self.attached(name)?.fails.set(times);
        Ok(())
    }

    /// Counters of all shards.
    pub fn stats(&self) -> BlockStats {
        let mut sum = BlockStats::default();
        self.node.cells.iter().for_each(|cell| sum.add(&cell.borrow().0.stats()));
        sum
    }

    /// Counters of the map's log.
    pub fn log_stats(&self) -> LogStats {
        self.upkeep.machine.stats()
    }

    /// Regions with a bit in the write-intent map.
    pub fn regions_set(&self) -> usize {
        self.upkeep.machine.regions_set()
    }

    /// Bytes written to flash: lines and logs.
    pub fn flash_bytes(&self) -> u64 {
        let lines = self.stats().flash_lines_written * self.node.line_bytes();
        lines + self.log_stats().bytes + self.written_back()
    }

    /// Lines in the cache, by a walk over the map.
    pub fn count_lines(&self) -> u64 {
        self.node.cells.iter().map(|cell| u64::from(cell.borrow().0.lines())).sum()
    }

    /// What is under way and waits in all shards, without a turn.
    pub fn under_way(&mut self) -> usize {
        let mut shards = AtNode::new(&self.node, self.node.layout.shards);
        self.upkeep.machine.unsettled(&mut shards)
    }

    /// Verdicts on a volume's requests: admission's, and those of shares, selection, room and the write budget.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn verdicts(&self, name: &str) -> Result<VerdictCounts, GivenError> {
        Ok(self.attached(name)?.verdicts())
    }

    /// A volume's lines in the cache, about, by its account.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn lines(&self, name: &str) -> Result<u64, GivenError> {
        Ok(self.attached(name)?.account.lines())
    }

    /// What clients did with a volume.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn counts(&self, name: &str) -> Result<VolumeCounts, GivenError> {
        Ok(self.attached(name)?.counters.counts())
    }

    /// A volume's first byte in the line space, and its bytes.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn place(&self, name: &str) -> Result<(u64, u64), GivenError> {
        let volume = self.attached(name)?;
        Ok((volume.base(), volume.bytes()))
    }

    /// Names of the volumes that are attached.
    pub fn names(&self) -> Vec<String> {
        self.node.volumes.borrow().keys().cloned().collect()
    }

    /// The write budget's bytes a second, and how many may be written now, if there is a limit.
    pub fn budget(&self) -> Option<(f64, u64)> {
        self.node.medium.limits.budget(self.now())
    }

    /// What the budget's file says.
    pub fn budget_file(&self) -> Option<BudgetState> {
        self.node.medium.file.get()
    }
}
