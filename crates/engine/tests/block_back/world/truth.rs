//! What a sector may hold: told by what clients did and heard alone.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Not yet.
pub(crate) const NEVER: u64 = u64::MAX;

/// A change that was issued. A sector that a write fills has its number; 0 is what was there before all.
struct Write {
    sectors: Range<u64>,
    zeros: bool,
    fua: bool,
    began: u64,
    answered: u64,
    /// When the last FLUSH was issued that had been answered when this was issued.
    level: u64,
    /// A start has found it nowhere: it was overwritten, or is lost.
    gone: bool,
    /// Where a start has found it. (A power cut tears what was written through.)
    found: Option<BTreeSet<u64>>,
}

/// A write of a sector, and since when it is known to be done: it was answered, or somebody has read it.
#[derive(Clone, Copy)]
struct Entry {
    number: u64,
    done: u64,
}

/// Of one volume.
pub(crate) struct Truth {
    writes: Vec<Write>,
    sectors: Vec<Vec<Entry>>,
    /// When the last FLUSH was issued that has been answered.
    level: u64,
}

/// When it is looked at what a sector holds.
#[derive(Clone, Copy)]
pub(crate) enum Look {
    /// By a read that began then, and ends now.
    Read(u64),
    /// After a kill,
    Killed,
    /// or a power cut.
    PowerCut,
}

impl Truth {
    pub(crate) fn new(sectors: u64) -> Truth {
        let (sectors, first) = (0..sectors, vec![Entry { number: 0, done: 0 }]);
        let all = sectors.clone().map(|_| first.clone()).collect();
        let (zeros, fua, gone) = (true, false, true);
        let none =
            Write { sectors, zeros, fua, began: 0, answered: 0, level: 0, gone, found: None };
        Truth { writes: vec![none], sectors: all, level: 0 }
    }

    /// A change is issued. Returns its number.
    pub(crate) fn begin(&mut self, at: u64, sectors: Range<u64>, zeros: bool, fua: bool) -> u64 {
        let number = self.writes.len() as u64;
        let (answered, level, gone) = (NEVER, self.level, false);
        let all = sectors.clone();
        self.writes.push(Write {
            sectors,
            zeros,
            fua,
            began: at,
            answered,
            level,
            gone,
            found: None,
        });
        for sector in all {
            self.sectors[sector as usize].push(Entry { number, done: NEVER });
        }
        number
    }

    /// Whether a change is to be durable when it is answered.
    pub(crate) fn is_fua(&self, number: u64) -> bool {
        self.writes[number as usize].fua
    }

    /// It is answered.
    pub(crate) fn answered(&mut self, at: u64, sectors: Range<u64>, number: u64) {
        self.writes[number as usize].answered = at;
        for sector in sectors {
            self.is_done(at, sector, number);
        }
    }

    fn is_done(&mut self, at: u64, sector: u64, number: u64) {
        for entry in &mut self.sectors[sector as usize] {
            if entry.number == number {
                entry.done = entry.done.min(at);
            }
        }
    }

    /// A FLUSH is answered that was issued then.
    pub(crate) fn flushed(&mut self, issued: u64) {
        self.level = self.level.max(issued);
    }

    /// Whether a sector may hold what was found there: the bytes of a write, or zeros (0).
    pub(crate) fn may_hold(&self, sector: u64, found: u64, look: Look) -> bool {
        let all = &self.sectors[sector as usize];
        let counts = |entry: &Entry| {
            let write = &self.writes[entry.number as usize];
            match look {
                Look::Read(began) => entry.done < began,
                Look::Killed => entry.done != NEVER,
                Look::PowerCut => {
                    write.answered <= self.level || write.fua && write.answered != NEVER
                }
            }
        };
        let is_it = |entry: &&Entry| match found {
            0 => self.writes[entry.number as usize].zeros,
            number => entry.number == number && !self.writes[number as usize].zeros,
        };
        let is_over = |entry: &Entry| {
            let later = |other: &Entry| self.writes[other.number as usize].began > entry.done;
            all.iter().any(|other| later(other) && counts(other))
        };
        all.iter().filter(is_it).any(|entry| !is_over(entry))
    }

    /// A client has read this, or what was found after a start: it stays.
    pub(crate) fn seen(&mut self, at: u64, sector: u64, found: u64) {
        if found > 0 {
            self.is_done(at, sector, found);
        }
    }

    /// A start is over that has found this: it is durable, and what was not found never comes back.
    pub(crate) fn starts(&mut self, at: u64, found: &[u64]) {
        for (sector, &number) in self.sectors.iter_mut().zip(found) {
            // (What was there before all was always done.)
            *sector = vec![Entry { number, done: if number == 0 { 0 } else { at } }];
            let write = &mut self.writes[number as usize];
            write.answered = write.answered.min(at);
        }
        let mut there: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for (sector, &number) in (0u64..).zip(found) {
            there.entry(number).or_default().insert(sector);
        }
        for (number, write) in (0u64..).zip(&mut self.writes) {
            write.found = there.remove(&number);
            write.gone |= write.found.is_none();
        }
        self.level = at;
    }

    /// The cache is lost, and a store has this. If a write is in it, then so is, or something later, what was known to be done when that was
    /// issued: what had been answered (`completion`), or what an answered FLUSH or FUA had covered.
    pub(crate) fn check_image(&self, image: &[u64], completion: bool) -> Result<(), String> {
        let is_older = |sector: u64, than: &Write| match image[sector as usize] {
            0 => {
                let fills = |w: &&Write| w.zeros && w.sectors.contains(&sector);
                let mut zeros = self.writes.iter().filter(fills);
                zeros.all(|zeros| zeros.answered < than.began)
            }
            number => self.writes[number as usize].answered < than.began,
        };
        let there: BTreeSet<u64> = image.iter().copied().collect();
        let there = there.iter().filter(|n| **n > 0).map(|n| &self.writes[*n as usize]);
        let latest = there.clone().map(|write| write.began).max().unwrap_or(0);
        let level = there.map(|write| write.level).max().unwrap_or(0);
        for (number, write) in self.writes.iter().enumerate().filter(|(_, write)| !write.gone) {
            let is_known = match completion {
                true => write.answered <= latest,
                false => write.answered <= level || write.fua && write.answered <= latest,
            };
            let found = |sector: &u64| write.found.as_ref().is_none_or(|f| f.contains(sector));
            let lacks =
                || write.sectors.clone().filter(found).find(|sector| is_older(*sector, write));
            if let Some(sector) = is_known.then(lacks).flatten() {
                let has = image[sector as usize];
                return Err(format!(
                    "sector {sector} has {has}, and something is there that was issued when {number} was known to be done"
                ));
            }
        }
        Ok(())
    }

    /// What is printed of a sector.
    pub(crate) fn of(&self, sector: u64) -> String {
        let entry = |e: &Entry| {
            let Write { zeros, fua, began, answered, .. } = self.writes[e.number as usize];
            let or = |at: u64| if at == NEVER { "-".to_owned() } else { at.to_string() };
            let kind = if zeros { " zeros" } else { "" };
            let fua = if fua { " FUA" } else { "" };
            format!(
                "{}{kind}{fua} issued {began} answered {} done {}",
                e.number,
                or(answered),
                or(e.done)
            )
        };
        let all: Vec<String> = self.sectors[sector as usize].iter().map(entry).collect();
        format!("[{}], flushed {}", all.join("; "), self.level)
    }
}
