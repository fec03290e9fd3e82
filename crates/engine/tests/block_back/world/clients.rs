//! What clients ask for, and what they hear.

use larder_base::Nanos;
use larder_engine::block::IoFailed;
use larder_engine::block::node::event::{Op as Asked, Submit};
use larder_policy::block::BlockKind;

use super::truth::Look;
use super::{Checked, World};
use crate::device::SECTOR;
use crate::parts::{Bytes, Extent, fill, filled};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Read,
    /// The number of the write.
    Change(u64),
    Flush,
    Status,
    Advise,
}

/// A client's operation.
#[derive(Debug)]
pub(super) struct Op {
    volume: usize,
    what: What,
    /// First sector, and how many.
    at: u64,
    len: u64,
    began: u64,
    /// What a read got, by sector.
    got: Vec<Option<u64>>,
}

impl Op {
    /// Whether it is of this volume.
    pub(super) fn is_of(&self, v: usize) -> bool {
        self.volume == v
    }
}

impl World {
    /// Some sectors of a volume: many clients turn to the same few.
    fn some_sectors(&mut self, v: usize) -> (u64, u64) {
        let all = self.stores[v].sectors();
        let hot = if self.rng.chance(0.7) { 64 } else { all };
        let (mut at, mut len) = (self.rng.below(hot), self.rng.range(1, 20));
        if self.rng.chance(0.5) {
            // Whole lines, as file systems do.
            (at, len) = (at / 8 * 8, len.div_ceil(8) * 8);
        }
        if self.rng.chance(0.1) {
            // The end of a volume need not be that of a line.
            at = all - 1 - self.rng.below(12);
        }
        if self.rng.chance(0.03) {
            (at, len) = (self.rng.below(16), all);
        }
        (at, len.min(all - at))
    }

    pub(super) fn submit(&mut self) -> Checked {
        let v = self.rng.below(self.stores.len() as u64) as usize;
        if self.beside[v].held {
            return Ok(());
        }
        let (at, mut len) = self.some_sectors(v);
        let sectors = SECTOR as u64;
        let fua = self.rng.chance(0.1);
        self.tick += 1;
        let began = self.tick;
        let place = at * sectors;
        let choice = self.rng.below(100);
        if (30..65).contains(&choice) {
            len = len.min(24);
        }
        let bytes = len * sectors;
        let zeros = choice >= 65;
        let mut number = 0;
        if (30..76).contains(&choice) {
            number = self.truth[v].begin(began, at..at + len, zeros, fua);
            self.seen.changes += 1;
            self.seen.through += u64::from(self.kinds[v].is_none());
            self.seen.ranges += u64::from(zeros && len > 128 + 8);
        }
        let (what, op) = match choice {
            0..30 => {
                self.seen.reads += 1;
                (What::Read, Asked::Read { at: place, len: bytes })
            }
            30..65 => {
                let content = (at..at + len).flat_map(|sector| fill(v, number, sector)).collect();
                let content = Bytes::new(content);
                let op = Asked::Write { at: place, len: bytes, bytes: content, fua };
                (What::Change(number), op)
            }
            65..71 => {
                let may_punch = self.rng.chance(0.5);
                let op = Asked::Zero { at: place, len: bytes, fua, may_punch, fast: false };
                (What::Change(number), op)
            }
            71..76 => (What::Change(number), Asked::Trim { at: place, len: bytes, fua }),
            76..86 => {
                self.seen.flushes += 1;
                (What::Flush, Asked::Flush)
            }
            86..94 => {
                self.seen.status += 1;
                (What::Status, Asked::Status { at: place, len: bytes, one: false })
            }
            _ => (What::Advise, Asked::Advise { at: place, len: bytes }),
        };
        self.ask(v, what, (at, len), op)
    }

    fn ask(&mut self, v: usize, what: What, (at, len): (u64, u64), op: Asked<Bytes>) -> Checked {
        let ticket = self.next_op;
        self.next_op += 1;
        self.says(|| format!("{ticket} v{v}: {what:?} {at}..{}", at + len));
        let got = vec![None; if what == What::Read { len as usize } else { 0 }];
        let began = self.tick;
        self.ops.insert(ticket, Op { volume: v, what, at, len, began, got });
        let volume = self.life().shared.volumes[v];
        let queue = self.rng.below(self.queues as u64) as usize;
        let submit = Submit { volume, ticket, op, holds: BlockKind::Unknown };
        self.tell(queue, |queue, node, now, fx| queue.submit(node, now, fx, submit))
    }

    /// All of a volume is read.
    pub(super) fn read_all(&mut self, v: usize) -> Checked {
        let all = self.stores[v].sectors();
        for at in (0..all).step_by(29) {
            self.tick += 1;
            let len = 29.min(all - at);
            let op = Asked::Read { at: at * SECTOR as u64, len: len * SECTOR as u64 };
            self.ask(v, What::Read, (at, len), op)?;
        }
        Ok(())
    }

    pub(super) fn delivered(&mut self, ticket: u64, at: u64, bytes: &[u8]) -> Checked {
        let Some(op) = self.ops.get_mut(&ticket) else {
            return Err(format!("bytes for {ticket}, which is over"));
        };
        let first = at / SECTOR as u64;
        for (i, bytes) in (first..).zip(bytes.chunks_exact(SECTOR)) {
            let Some(number) = filled(op.volume, op.at + i, bytes) else {
                return Err(format!("{ticket}: sector {} has no write's bytes", op.at + i));
            };
            let Some(got) = op.got.get_mut(i as usize) else {
                return Err(format!("{ticket}: more than was asked for"));
            };
            *got = Some(number);
        }
        Ok(())
    }

    /// A client hears what became of what it asked for.
    pub(super) fn answered(
        &mut self,
        ticket: u64,
        outcome: Result<Vec<Extent>, IoFailed>,
    ) -> Checked {
        let Some(op) = self.ops.remove(&ticket) else {
            return Err(format!("{ticket} is answered twice"));
        };
        self.tick += 1;
        self.says(|| format!("{ticket} is answered, failed: {}", outcome.is_err()));
        let Op { volume: v, what, at, len, began, got } = op;
        let now = self.tick;
        let Ok(extents) = outcome else {
            let is_back = self.attachment(v).is_some();
            // Without a marker nothing says that the store has what a failed log had.
            let closed = self.life().shared.log.borrow().closed().is_some();
            let promises = match what {
                What::Flush => true,
                What::Change(number) => self.truth[v].is_fua(number),
                _ => false,
            };
            if closed && !self.marked && promises {
                self.seen.failed_flushes += 1;
                return Ok(());
            }
            let may_be_logged = is_back && matches!(what, What::Change(_) | What::Flush);
            let refused = self.beside[v].refused && matches!(what, What::Change(_));
            if may_be_logged && (began <= self.let_go[v] || refused) {
                return Ok(());
            }
            // So may what waits at the bound of a volume whose store fails for a minute.
            let long = self.now >= Nanos::from_secs(60) && matches!(what, What::Change(_));
            if may_be_logged && long && self.seen.store_failures > 0 {
                return Ok(());
            }
            let is_logged = may_be_logged && !closed;
            return match self.store_failed < began || is_logged {
                true => Err(format!("{ticket} {what:?} has failed, and its store has not")),
                false => Ok(()),
            };
        };
        match what {
            What::Read => {
                for (sector, got) in (at..).zip(got) {
                    let Some(got) = got else {
                        return Err(format!("{ticket}: sector {sector} was not delivered"));
                    };
                    if !self.truth[v].may_hold(sector, got, Look::Read(began)) {
                        let of = self.truth[v].of(sector);
                        return Err(format!(
                            "{ticket} reads {got} in sector {sector} of v{v}, begun at {began}: {of}"
                        ));
                    }
                    self.truth[v].seen(now, sector, got);
                }
            }
            What::Change(number) => self.truth[v].answered(now, at..at + len, number),
            What::Flush => self.truth[v].flushed(began),
            What::Status => {
                for (sector, extent) in (at..).zip(&extents) {
                    let is_data = *extent == Extent::Data;
                    if !is_data && !self.truth[v].may_hold(sector, 0, Look::Read(began)) {
                        let of = self.truth[v].of(sector);
                        return Err(format!(
                            "{ticket} calls sector {sector} of v{v} {extent:?}: {of}"
                        ));
                    }
                    self.seen.dirty_status += u64::from(is_data && self.stores[v].see(sector) == 0);
                }
            }
            What::Advise => {}
        }
        Ok(())
    }
}
