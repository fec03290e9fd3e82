//! The cache device and the backing store of the model, sector by sector.

use larder_base::{Killed, Rng};
use larder_engine::block::address::{Place, Placing};
use larder_engine::block::{IoFailed, LineId, LogIo};
use larder_format::PAGE_SIZE;
use larder_format::block::superblock::{COPY_BYTES, choose};
use larder_format::block::{Layout, Volume, table};
use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::panic::resume_unwind;
use std::rc::Rc;

use crate::parts::Purse;

pub(crate) const SECTOR: usize = 512;

/// A device whose writes are volatile until they are flushed. Sectors of lines hold one number each (the rest of their
/// bytes would add nothing); metadata hold bytes.
pub(crate) struct Device {
    /// What a read returns.
    live: Vec<[u8; SECTOR]>,
    /// What a power cut leaves for certain.
    durable: Vec<[u8; SECTOR]>,
    /// Sectors written since the last flush, in order: (sector, content).
    unflushed: Vec<(usize, [u8; SECTOR])>,
    pub(crate) rng: Rng,
    /// Share of operations that fail.
    pub(crate) fail: f64,
    /// Operations so far, and the one that fails.
    pub(crate) ios: u64,
    pub(crate) fail_io: Option<u64>,
    /// Nothing works any more.
    pub(crate) dead: bool,
    /// Metadata operations left before the process is killed (`u64::MAX`: it is not).
    pub(crate) fuse: u64,
    pub(crate) blown: bool,
    /// The kill ends what is done there and then.
    pub(crate) unwinds: bool,
    /// So many operations from now one fails.
    pub(crate) fails_in: Option<u64>,
    /// It is dead from then on.
    pub(crate) dies: bool,
    /// Stretches of which the space was given back.
    pub(crate) holes: u64,
    /// Where the table is, and the generation of its pages.
    pub(crate) table: Option<(Layout, u64)>,
    /// A volume that comes without its lines, while the superblock is written that has it.
    pub(crate) coming: Option<Coming>,
    /// Bytes that were written, by whomever, or that were to be and have failed.
    written: u64,
    /// Who is charged for them.
    account: Option<Account>,
    /// What was wrong with a hole or with the table, or was not charged.
    pub(crate) complaint: Option<String>,
}

/// A volume as the superblock has it when it has come, and its lines, of which the table has none then.
pub(crate) struct Coming {
    pub(crate) volume: Volume,
    pub(crate) lines: RangeInclusive<LineId>,
    pub(crate) placing: Placing,
}

/// What a process was charged since it began, and what it has written or failed to write.
struct Account {
    purse: Purse,
    /// Bytes charged and bytes written before.
    before: (u64, u64),
}

impl Device {
    pub(crate) fn new(bytes: u64, rng: Rng) -> Device {
        let sectors = bytes as usize / SECTOR;
        Device {
            live: vec![[0; SECTOR]; sectors],
            durable: vec![[0; SECTOR]; sectors],
            unflushed: Vec::new(),
            rng,
            fail: 0.0,
            ios: 0,
            fail_io: None,
            dead: false,
            fuse: u64::MAX,
            blown: false,
            unwinds: false,
            fails_in: None,
            dies: false,
            holes: 0,
            table: None,
            coming: None,
            written: 0,
            account: None,
            complaint: None,
        }
    }

    /// Whoever writes from now on is charged by `purse`, if by anybody.
    pub(crate) fn charges(&mut self, purse: Option<Purse>) {
        let account = |purse: Purse| Account { before: (purse.spent(), self.written), purse };
        self.account = purse.map(account);
    }

    pub(crate) fn write(&mut self, at: u64, sectors: &[[u8; SECTOR]]) {
        self.written += (sectors.len() * SECTOR) as u64;
        if let Some(Account { purse, before }) = &self.account {
            let (charged, written) = (purse.spent() - before.0, self.written - before.1);
            if written > charged {
                self.complaint =
                    Some(format!("{written} bytes are written, and {charged} charged"));
            } else if purse.spent() > purse.kept() {
                let (spent, kept) = (purse.spent(), purse.kept());
                self.complaint = Some(format!(
                    "{spent} bytes are charged, and the budget's file knows of {kept}"
                ));
            }
        }
        self.put(at, sectors);
    }

    fn put(&mut self, at: u64, sectors: &[[u8; SECTOR]]) {
        for (i, content) in sectors.iter().enumerate() {
            let sector = at as usize / SECTOR + i;
            self.live[sector] = *content;
            self.unflushed.push((sector, *content));
        }
    }

    /// A write that was under way: some of its sectors, in no order.
    pub(crate) fn write_torn(&mut self, at: u64, sectors: &[[u8; SECTOR]]) {
        for (i, content) in sectors.iter().enumerate() {
            if self.rng.chance(0.5) {
                self.write(at + (i * SECTOR) as u64, &[*content]);
            } else {
                self.not_written(SECTOR as u64);
            }
        }
    }

    /// So many bytes were charged, and nothing comes of them.
    pub(crate) fn not_written(&mut self, bytes: u64) {
        self.written += bytes;
    }

    /// All that is charged was written, has failed, or is under way, of which there are so many bytes.
    pub(crate) fn check_charged(&mut self, under_way: u64) {
        let Some(Account { purse, before }) = &self.account else { return };
        let (charged, written) = (purse.spent() - before.0, self.written - before.1);
        if charged != written + under_way && self.complaint.is_none() {
            self.complaint = Some(format!(
                "{charged} bytes are charged, {written} written, and {under_way} under way"
            ));
        }
    }

    /// Whether nothing is about to fail.
    pub(crate) fn works_for_now(&self) -> bool {
        let fails = self.fails_in.is_some() || self.fail_io.is_some_and(|at| at >= self.ios);
        !self.dead && !fails && self.fuse == u64::MAX
    }

    /// How often what it has was changed.
    pub(crate) fn changes(&self) -> (u64, u64) {
        (self.written, self.holes)
    }

    /// A hole that was being made.
    fn put_torn(&mut self, at: u64, sectors: &[[u8; SECTOR]]) {
        for (i, content) in sectors.iter().enumerate() {
            if self.rng.chance(0.5) {
                self.put(at + (i * SECTOR) as u64, &[*content]);
            }
        }
    }

    pub(crate) fn read(&self, at: u64, sectors: usize) -> Vec<[u8; SECTOR]> {
        self.live[at as usize / SECTOR..][..sectors].to_vec()
    }

    /// What a power cut leaves for certain of so many bytes.
    pub(crate) fn durable_bytes(&self, at: u64, len: usize) -> Vec<u8> {
        self.durable[at as usize / SECTOR..][..len / SECTOR].concat()
    }

    pub(crate) fn flush(&mut self) {
        for (sector, content) in self.unflushed.drain(..) {
            self.durable[sector] = content;
        }
        self.check_coming();
    }

    /// From the moment that the durable superblock has a volume that comes without its lines, the durable table has none of them:
    /// after a power cut they would be used.
    fn check_coming(&mut self) {
        let Some((layout, generation)) = self.table else { return };
        let Some(Coming { volume, lines, placing }) = &self.coming else { return };
        let copy = |n: usize| self.durable_bytes((n * COPY_BYTES) as u64, COPY_BYTES);
        if !choose(&copy(0), &copy(1)).is_ok_and(|sb| sb.volumes.contains(volume)) {
            return;
        }
        let per = layout.page_groups * 16;
        let mut pages = (0..layout.shards)
            .flat_map(|shard| (0..layout.table_pages()).map(move |page| (shard, page)));
        let named = |(shard, page): (u32, u32)| -> Option<LineId> {
            let bytes = self.durable_bytes(layout.table_at(shard, page), PAGE_SIZE);
            let slots = table::decode(&bytes, generation, layout.table_number(shard, page))?;
            let named = (page * per..(page + 1) * per).zip(slots).filter(|(_, sum)| sum.is_some());
            let line =
                |slot: u32| placing.line(shard, Place { group_set: slot / 16, tag: 0 }, slot % 16);
            named.map(|(slot, _)| line(slot)).find(|line| lines.contains(line))
        };
        let found = pages.find_map(named);
        if let Some(line) = found {
            self.complaint = Some(format!(
                "the superblock has '{}' without its lines, and the durable table has {line:?}",
                volume.name
            ));
        }
    }

    /// Each unflushed sector write is there, or not, or begun (drives that promise whole sectors do better), whatever became of
    /// the others.
    pub(crate) fn power_cut(&mut self) {
        // (Elsewhere both are the same.)
        let unflushed = std::mem::take(&mut self.unflushed);
        for &(sector, ref content) in &unflushed {
            if self.rng.chance(0.5) {
                let whole = self.rng.chance(0.9);
                let end = if whole { SECTOR } else { self.rng.range(1, 63) as usize * 8 };
                self.durable[sector][..end].copy_from_slice(&content[..end]);
            }
        }
        unflushed.iter().for_each(|(sector, _)| self.live[*sector] = self.durable[*sector]);
    }

    /// No slot becomes a hole while the durable table names a line in it.
    fn check_hole(&mut self, at: u64, len: u64) {
        let Some((layout, generation)) = self.table.filter(|(layout, _)| at >= layout.data) else {
            return;
        };
        let line = u64::from(layout.line);
        let (first, last) = ((at - layout.data) / line, (at + len - layout.data) / line);
        let per = layout.page_groups * 16;
        for number in first..last {
            let shard = (number / u64::from(layout.shard_slots())) as u32;
            let slot = (number % u64::from(layout.shard_slots())) as u32;
            let page = slot / per;
            let from = layout.table_at(shard, page) as usize / SECTOR;
            let bytes = self.durable[from..][..PAGE_SIZE / SECTOR].concat();
            let number = layout.table_number(shard, page);
            let named = table::decode(&bytes, generation, number)
                .and_then(|mut slots| slots.nth((slot % per) as usize).flatten());
            if named.is_some() {
                self.complaint = Some(format!(
                    "a hole in slot {slot} of shard {shard}, in which the durable table has a line"
                ));
            }
        }
    }

    pub(crate) fn rot(&mut self, at: u64) {
        let sector = at as usize / SECTOR;
        // Often where the model keeps its number: elsewhere rot is seen by checksums alone.
        let span = if self.rng.chance(0.7) { 8 } else { SECTOR as u64 };
        let byte = self.rng.below(span) as usize;
        self.live[sector][byte] ^= 0x40;
        self.durable[sector] = self.live[sector];
    }

    /// A byte of a page of the map, or all of it.
    pub(crate) fn rot_page(&mut self, at: u64) {
        if self.rng.chance(0.3) {
            // Nothing is left of it.
            for sector in at as usize / SECTOR..(at as usize + PAGE_SIZE) / SECTOR {
                self.live[sector] = [0; SECTOR];
                self.durable[sector] = [0; SECTOR];
            }
            return;
        }
        let sector = at as usize / SECTOR + self.rng.below((PAGE_SIZE / SECTOR) as u64) as usize;
        let byte = self.rng.below(SECTOR as u64) as usize;
        self.live[sector][byte] ^= 0x40;
        self.durable[sector] = self.live[sector];
    }

    pub(crate) fn zero(&mut self) {
        for sectors in [&mut self.live, &mut self.durable] {
            sectors.iter_mut().for_each(|s| *s = [0; SECTOR]);
        }
        self.unflushed.clear();
        self.dead = false;
    }

    pub(crate) fn fails(&mut self) -> bool {
        let fail = self.fail;
        self.chosen() || self.dead || self.rng.chance(fail)
    }

    /// Counts an operation: whether it is the one that fails.
    fn chosen(&mut self) -> bool {
        let fails = self.fails_in == Some(0);
        self.dead |= fails && self.dies;
        let chosen = self.fail_io == Some(self.ios) || fails;
        self.ios += 1;
        self.fails_in = self.fails_in.and_then(|left| left.checked_sub(1));
        chosen
    }
}

/// The log's view of the device: every operation may be the last before a kill.
#[derive(Clone)]
pub(crate) struct Io(pub(crate) Rc<RefCell<Device>>);

impl Io {
    fn burn(&self) -> Result<(), IoFailed> {
        let mut device = self.0.borrow_mut();
        if device.chosen() {
            return Err(IoFailed);
        }
        if device.fuse == 0 {
            device.blown = true;
        } else if device.fuse != u64::MAX {
            device.fuse -= 1;
        }
        if device.blown || device.dead { Err(IoFailed) } else { Ok(()) }
    }

    /// Nothing more is done after a kill.
    fn die(&self) {
        let device = self.0.borrow();
        if device.blown && device.unwinds {
            drop(device);
            resume_unwind(Box::new(Killed));
        }
    }
}

impl LogIo for Io {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        if self.0.borrow_mut().chosen() || self.0.borrow().dead {
            return Err(IoFailed);
        }
        let sectors = self.0.borrow().read(at, out.len() / SECTOR);
        for (to, from) in out.chunks_exact_mut(SECTOR).zip(sectors) {
            to.copy_from_slice(&from);
        }
        Ok(())
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        let sectors: Vec<[u8; SECTOR]> =
            bytes.chunks_exact(SECTOR).map(|c| c.try_into().expect("a sector")).collect();
        let gone = self.0.borrow().blown;
        let outcome = self.burn();
        let mut device = self.0.borrow_mut();
        match outcome {
            Ok(()) => device.write(at, &sectors),
            // Of a process that is gone nothing is written, but what it was at.
            Err(_) if device.dead || gone => device.not_written(bytes.len() as u64),
            Err(_) => device.write_torn(at, &sectors),
        }
        drop(device);
        self.die();
        outcome
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        let outcome = self.burn();
        self.die();
        outcome?;
        self.0.borrow_mut().flush();
        Ok(())
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        self.0.borrow_mut().check_hole(at, len);
        let zeros = vec![[0; SECTOR]; len as usize / SECTOR];
        let gone = self.0.borrow().blown;
        let outcome = self.burn();
        let mut device = self.0.borrow_mut();
        match outcome {
            Ok(()) => device.put(at, &zeros),
            Err(_) if device.dead || gone => {}
            Err(_) => device.put_torn(at, &zeros),
        }
        device.holes += 1;
        drop(device);
        self.die();
        outcome
    }
}
