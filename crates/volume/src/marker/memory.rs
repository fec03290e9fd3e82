//! A marker in memory, with faults, for tests.
//!
//! It is as an NBD export is: two copies and a cache that a power cut empties. What is written in one step may be torn between
//! sectors.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::place::{Medium, PLACE_BYTES, Place, split};
use super::region::{self, Region, SECTOR};
use super::{MarkerIoError, MarkerPlace};

/// How a power cut leaves what was written and not flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unflushed {
    /// It is lost.
    Lost,
    /// It is there.
    Kept,
    /// Of the last write there are so many sectors of 512 bytes, and of those before all.
    Torn(usize),
}

/// A place in memory, which outlives those who open it.
#[derive(Clone, Debug, Default)]
pub struct MemoryMarker {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    durable: Vec<u8>,
    unflushed: Vec<(usize, Vec<u8>)>,
    was: bool,
    fenced: bool,
    /// Who holds it, where it is fenced.
    holder: Option<u64>,
    opened: u64,
    /// Writes and flushes so far.
    steps: u64,
    /// The power goes in place of that step.
    cut: Option<(u64, Unflushed)>,
    /// That step fails, and nothing else is wrong.
    fails: Option<u64>,
    off: bool,
    hangs: bool,
}

impl Default for State {
    fn default() -> State {
        State {
            durable: vec![0; PLACE_BYTES],
            unflushed: Vec::new(),
            was: false,
            fenced: false,
            holder: None,
            opened: 0,
            steps: 0,
            cut: None,
            fails: None,
            off: false,
            hangs: false,
        }
    }
}

impl State {
    /// What is read now.
    fn image(&self) -> Vec<u8> {
        let mut image = self.durable.clone();
        for (at, bytes) in &self.unflushed {
            image[*at..at + bytes.len()].copy_from_slice(bytes);
        }
        image
    }

    fn lose_power(&mut self, unflushed: Unflushed) {
        if let (Unflushed::Torn(sectors), Some((_, bytes))) = (unflushed, self.unflushed.last_mut())
        {
            bytes.truncate(sectors * SECTOR);
        }
        if unflushed != Unflushed::Lost {
            self.durable = self.image();
        }
        self.unflushed.clear();
        self.off = true;
    }
}

impl MemoryMarker {
    /// An empty one, which two may open at once.
    pub fn new() -> MemoryMarker {
        MemoryMarker::default()
    }

    /// An empty one that has one holder at a time.
    pub fn fenced() -> MemoryMarker {
        let memory = MemoryMarker::default();
        memory.shared.state.lock().fenced = true;
        memory
    }

    /// Opens it, to be read only if `look`.
    pub fn open(&self, look: bool) -> Box<dyn MarkerPlace> {
        Box::new(Place::new(self.medium(look)))
    }

    pub(super) fn medium(&self, look: bool) -> MemoryMedium {
        let mut state = self.shared.state.lock();
        state.opened += 1;
        MemoryMedium { shared: self.shared.clone(), number: state.opened, look }
    }

    /// What is read now, 8 KiB.
    pub fn bytes(&self) -> Vec<u8> {
        self.shared.state.lock().image()
    }

    /// Puts these bytes there, durably.
    pub fn set_bytes(&self, at: usize, bytes: &[u8]) {
        let mut state = self.shared.state.lock();
        state.durable = state.image();
        state.unflushed.clear();
        state.durable[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// Whether something says that there was a marker.
    pub fn set_was(&self, was: bool) {
        self.shared.state.lock().was = was;
    }

    /// Writes and flushes so far.
    pub fn steps(&self) -> u64 {
        self.shared.state.lock().steps
    }

    /// The power goes when so many steps have gone well from now on: a write that is the next is made, and not flushed.
    pub fn cut_after(&self, steps: u64, unflushed: Unflushed) {
        let mut state = self.shared.state.lock();
        state.cut = Some((state.steps + steps, unflushed));
    }

    /// The step behind so many from now on fails.
    pub fn fail_after(&self, steps: u64) {
        let mut state = self.shared.state.lock();
        state.fails = Some(state.steps + steps);
    }

    /// The power goes now, or comes back; who had it then has it no more.
    pub fn set_power(&self, on: bool) {
        let mut state = self.shared.state.lock();
        if on {
            (state.off, state.cut, state.holder) = (false, None, None);
        } else {
            state.lose_power(Unflushed::Lost);
        }
    }

    /// Whether the power is off.
    pub fn is_off(&self) -> bool {
        self.shared.state.lock().off
    }

    /// Whoever asks it something waits, or waits no more.
    pub fn set_hangs(&self, hangs: bool) {
        self.shared.state.lock().hangs = hangs;
        self.shared.changed.notify_all();
    }
}

/// One who has it open.
pub(super) struct MemoryMedium {
    shared: Arc<Shared>,
    number: u64,
    look: bool,
}

impl Drop for MemoryMedium {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if state.holder == Some(self.number) {
            state.holder = None;
        }
    }
}

impl MemoryMedium {
    fn failed(&self, reason: &str) -> MarkerIoError {
        MarkerIoError::Failed { place: self.name(), reason: reason.into() }
    }

    /// Does it, unless the power is off.
    fn ask<T>(
        &self,
        act: impl FnOnce(&mut State) -> Result<T, MarkerIoError>,
    ) -> Result<T, MarkerIoError> {
        let mut state = self.shared.state.lock();
        while state.hangs {
            self.shared.changed.wait(&mut state);
        }
        match state.off {
            true => Err(self.failed("the power is off")),
            false => act(&mut state),
        }
    }

    /// One step of a write: a write, or (`None`) a flush.
    fn step(&self, write: Option<(usize, &[u8])>) -> Result<(), MarkerIoError> {
        self.ask(|state| {
            let now = state.steps;
            state.steps += 1;
            if state.fails.take_if(|at| *at <= now).is_some() {
                return Err(self.failed("a step was to fail"));
            }
            if let Some((at, bytes)) = write {
                state.unflushed.push((at, bytes.to_vec()));
            }
            if let Some((_, unflushed)) = state.cut.take_if(|(at, _)| *at <= now) {
                state.lose_power(unflushed);
                return Err(self.failed("the power went off"));
            }
            if write.is_none() {
                state.durable = state.image();
                state.unflushed.clear();
            }
            Ok(())
        })
    }
}

impl Region for MemoryMedium {
    type Error = MarkerIoError;

    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<(), MarkerIoError> {
        self.step(Some((at as usize, bytes)))?;
        self.step(None)
    }
}

impl Medium for MemoryMedium {
    fn load(&mut self) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError> {
        self.ask(|state| {
            let is_held =
                |state: &mut State| *state.holder.get_or_insert(self.number) != self.number;
            if state.fenced && !self.look && is_held(state) {
                let by = " by another place".to_owned();
                return Err(MarkerIoError::Held { place: self.name(), by });
            }
            if !self.look {
                state.durable = state.image();
                state.unflushed.clear();
            }
            let copies = split(&state.image());
            Ok((!region::is_nothing(&copies)).then_some(copies))
        })
    }

    fn create(&mut self, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        region::create(self, first, bytes)
    }

    fn replace(&mut self, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        region::replace(self, first, bytes)
    }

    fn clear(&mut self) -> Result<(), MarkerIoError> {
        self.ask(|state| {
            state.was = false;
            Ok(())
        })?;
        region::clear(self)
    }

    fn was(&mut self) -> Result<bool, MarkerIoError> {
        self.ask(|state| Ok(state.was))
    }

    fn keep(&mut self) {
        let _ = self.ask(|state| {
            state.was = true;
            Ok(())
        });
    }

    fn is_looked_at(&self) -> bool {
        self.look
    }

    fn is_fenced(&self) -> bool {
        self.shared.state.lock().fenced
    }

    fn name(&self) -> String {
        "marker in memory".into()
    }
}
