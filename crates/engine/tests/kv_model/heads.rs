//! The two pages at the head of the flash: what was written and is not durable a power cut takes, or a part of it; a write that
//! fails or is killed has been made, in part or not at all.

use larder_base::{Killed, Rng};
use larder_engine::kv::IoFailed;
use larder_engine::kv::node::start::{Heads, Superblocks};
use larder_format::superblock::{Chosen, choose};
use larder_format::{PAGE_SIZE, Superblock};

/// What is written as a whole, or not at all, bytes: less than devices write so, since a superblock lies in one sector of them.
const UNIT: usize = 64;
/// Units with anything of a superblock.
const UNITS: u64 = 2;
/// How often a write or a sync fails, and how often the run is killed in it.
const FAILS: f64 = 0.03;
const DIES: f64 = 0.04;

/// The pages.
#[derive(Clone)]
pub(super) struct Pages {
    durable: [Vec<u8>; 2],
    /// What was written since, the latest last: what reads give.
    written: [Vec<Vec<u8>>; 2],
}

impl Pages {
    /// As a format leaves them.
    pub(super) fn format(first: &Superblock) -> Pages {
        let void = || vec![0; PAGE_SIZE];
        let mut pages = Pages { durable: [void(), void()], written: [Vec::new(), Vec::new()] };
        let Ok(()) =
            Superblocks::formatted(first.clone()).write(&mut Certain(&mut pages), first.clone());
        pages
    }

    fn read(&self, copy: usize) -> &[u8] {
        self.written[copy].last().unwrap_or(&self.durable[copy])
    }

    /// What a start finds.
    pub(super) fn find(&self) -> Result<Chosen, String> {
        choose(self.read(0), self.read(1)).map_err(|why| format!("no superblock is whole: {why}"))
    }

    fn sync(&mut self) {
        for (durable, written) in self.durable.iter_mut().zip(&mut self.written) {
            if let Some(last) = written.drain(..).next_back() {
                *durable = last;
            }
        }
    }

    /// Of each unit that was written and is not durable some version stays.
    pub(super) fn power_cut(&mut self, rng: &mut Rng) {
        for (durable, written) in self.durable.iter_mut().zip(&mut self.written) {
            for from in (0..PAGE_SIZE).step_by(UNIT) {
                let version = rng.below(written.len() as u64 + 1) as usize;
                if let Some(page) = version.checked_sub(1).map(|at| &written[at]) {
                    durable[from..from + UNIT].copy_from_slice(&page[from..from + UNIT]);
                }
            }
            written.clear();
        }
    }

    /// The same pages on a copy of the flash.
    pub(super) fn copied(&self) -> Pages {
        let mut copy = self.clone();
        copy.sync();
        copy
    }
}

/// Nothing goes wrong.
struct Certain<'a>(&'a mut Pages);

impl Heads for Certain<'_> {
    type Error = std::convert::Infallible;

    fn write(&mut self, copy: usize, superblock: &Superblock) -> Result<(), Self::Error> {
        self.0.written[copy].push(superblock.encode().to_vec());
        Ok(())
    }
    fn sync(&mut self) -> Result<(), Self::Error> {
        self.0.sync();
        Ok(())
    }
}

/// Pages as a run writes them.
pub(super) struct InUse<'a> {
    pub(super) pages: &'a mut Pages,
    pub(super) rng: &'a mut Rng,
}

impl Heads for InUse<'_> {
    type Error = IoFailed;

    fn write(&mut self, copy: usize, superblock: &Superblock) -> Result<(), IoFailed> {
        let (fails, dies) = (self.rng.chance(FAILS), self.rng.chance(DIES));
        let mut page = superblock.encode().to_vec();
        if fails || dies {
            let made = self.rng.below(UNITS + 1) as usize * UNIT;
            page[made..].copy_from_slice(&self.pages.read(copy)[made..]);
        }
        self.pages.written[copy].push(page);
        match () {
            () if dies => std::panic::resume_unwind(Box::new(Killed)),
            () if fails => Err(IoFailed),
            () => Ok(()),
        }
    }

    fn sync(&mut self) -> Result<(), IoFailed> {
        if self.rng.chance(FAILS) {
            return Err(IoFailed);
        }
        let (dies, after) = (self.rng.chance(DIES), self.rng.chance(0.5));
        if !dies || after {
            self.pages.sync();
        }
        if dies {
            std::panic::resume_unwind(Box::new(Killed));
        }
        Ok(())
    }
}
