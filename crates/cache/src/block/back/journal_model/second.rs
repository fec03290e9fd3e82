//! A second process over one store, begun while the first lives: where there is a lease it is refused, and where there is none the first finds, when it
//! goes on, that nothing of the store is its own any more.

use larder_engine::block::PartKind;
use larder_engine::block::node::logged::JournalPart;
use larder_engine::block::writeback::holder::{Comer, Holder};
use larder_engine::block::writeback::marker::{self, Again, Mark, look_again};
use larder_format::Uuid;
use larder_format::block::marker::{MarkerState, Order as MarkerOrder};
use larder_volume::journal::JournalError;
use larder_volume::marker::{Found, MarkerIoError, MarkerPlace as _};

use super::super::journal::{Journal, Work};
use super::super::recover::{RecoverError, RecoverWish, recover_at};
use super::host::read_of;
use super::world::{CELL, Run, World};

impl World {
    /// Somebody starts another cache over the store, and then an operator recovers it, as if the one that lives were lost.
    pub(super) fn seconded(&mut self, mut run: Run) -> Result<(), String> {
        self.counts.seconds += 1;
        self.comes_second()?;
        if self.setup.fenced && !self.power.is_off() {
            self.recovers_second()?;
        }
        if self.power.is_off() {
            drop(run);
            return self.fails();
        }
        let Some(entry) = self.record.filter(|_| !self.setup.fenced && self.rng.chance(0.6)) else {
            self.up = Some(run);
            return Ok(());
        };
        // The first does not go on for some time.
        let own = marker::Marker {
            mark: Mark::Dirty(self.cache),
            generation: entry.generation,
            number: run.durable_number,
            run: self.run,
            of: Some((self.volume, entry.attachment)),
            moved: false,
        };
        self.is_cut_off(&mut run);
        if self.power.is_off() {
            drop(run);
            return self.fails();
        }
        self.paused = Some((run, own));
        self.say(|| "it pauses, and is taken for lost".into());
        self.recovers()
    }

    fn comes_second(&mut self) -> Result<(), String> {
        let mut place = self.marked();
        place.fails = 0.0;
        let found = match place.read() {
            Ok(_) if self.setup.fenced => return Err("two have the marker at once".into()),
            Ok(found) => found,
            Err(MarkerIoError::Held { .. }) if !self.setup.fenced => {
                return Err("a marker without a lease is held".into());
            }
            Err(_) => return Ok(()),
        };
        let said = match &found {
            Found::There(marker) => Some(&**marker),
            _ => None,
        };
        let comer = Comer {
            cache: Uuid([0xee; 16]),
            former: 0,
            run: 1,
            record: None,
            logged: None,
            order: Some(MarkerOrder::Journaled),
            marked: true,
            served: false,
            drains: false,
            later: false,
            shrunk: false,
            fresh: Uuid([0xed; 16]),
        };
        match Holder::comes(comer, self.fault()).read(read_of(&found), said) {
            Err(_) => Ok(()),
            Ok(()) => Err(format!("another cache is let to a store that is served: {said:?}")),
        }
    }

    fn recovers_second(&mut self) -> Result<(), String> {
        let (store, fault) = (self.store.clone(), self.fault());
        let mut marker = self.marked();
        let mut open = |_: Uuid| -> Result<Journal, JournalError> {
            Err(JournalError::Absent { place: "a journal that nobody is to open".into() })
        };
        let wish = RecoverWish { accept_torn: true, ..RecoverWish::default() };
        match recover_at(&store, &mut marker, &mut open, &wish, fault) {
            Err(RecoverError::Marker(_)) => Ok(()),
            told => Err(format!("a store is recovered that is served: {told:?}")),
        }
    }

    /// The process that was paused goes on, while another serves the store.
    pub(super) fn wakes(&mut self) -> Result<(), String> {
        if self.rotten > 0 {
            // It would find the journal lost, and make its own.
            return Ok(());
        }
        let Some((mut run, own)) = self.paused.take() else { return Ok(()) };
        let Some(entry) = self.record else { return Ok(()) };
        self.counts.woken += 1;
        self.say(|| "the one that was paused goes on".into());
        let part = JournalPart { at: 0, len: CELL, kind: PartKind::Zero, bytes: None };
        let epoch = self.rng.range(1, 8);
        for work in [
            Work::Write((epoch, epoch, epoch, None), vec![part]),
            Work::Flush,
            Work::Look(true),
            Work::Look(false),
        ] {
            if run.kept.do_work(self.now, work).is_ok() && !self.power.is_off() {
                return Err("one that was paused uses a journal that is another's by now".into());
            }
        }
        let Some(mut place) = run.marker.take() else { return Ok(()) };
        place.fails = 0.0;
        let says = self.says(&entry, own.number + 1, MarkerState::Dirty, 0);
        if place.write(&says).is_ok() {
            return Err("one that was paused writes the marker of another".into());
        }
        match place.read().map(|found| look_again(read_of(&found), &own, None)) {
            Ok(Again::Others) | Err(_) => Ok(()),
            Ok(again) => Err(format!("one that was paused takes another's marker for {again:?}")),
        }
    }
}
