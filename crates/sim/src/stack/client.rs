//! The caches of one client.

use larder_base::{Nanos, Rng};
use serde::Serialize;

use super::level::{Level, Victim};
use super::queue::Servers;
use super::{Architecture, Config, Policy, Timing};
use crate::mrc::Interner;

/// Where a read was answered from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// RAM.
    Ram,
    /// Flash.
    Flash,
    /// The filer.
    Filer,
}

/// Blocks by where from and to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Blocks read by the application.
    pub reads: u64,
    /// Of these, found in RAM.
    pub hits_dram: u64,
    /// Of these, found on flash.
    pub hits_flash: u64,
    /// Blocks written by the application.
    pub writes: u64,
    /// Blocks read from the filer.
    pub filer_reads: u64,
    /// Blocks written to the filer.
    pub filer_writes: u64,
    /// Blocks written to flash.
    pub flash_writes: u64,
}

impl Counts {
    /// Adds another host's.
    pub fn add(&mut self, other: &Counts) {
        self.reads += other.reads;
        self.hits_dram += other.hits_dram;
        self.hits_flash += other.hits_flash;
        self.writes += other.writes;
        self.filer_reads += other.filer_reads;
        self.filer_writes += other.filer_writes;
        self.flash_writes += other.flash_writes;
    }

    /// What was counted between `earlier` and these.
    pub fn since(&self, earlier: &Counts) -> Counts {
        Counts {
            reads: self.reads - earlier.reads,
            hits_dram: self.hits_dram - earlier.hits_dram,
            hits_flash: self.hits_flash - earlier.hits_flash,
            writes: self.writes - earlier.writes,
            filer_reads: self.filer_reads - earlier.filer_reads,
            filer_writes: self.filer_writes - earlier.filer_writes,
            flash_writes: self.flash_writes - earlier.flash_writes,
        }
    }
}

/// What takes time.
struct Machines {
    timing: Timing,
    flash: Servers,
    /// To the filer and back: a link in either direction.
    out: Servers,
    back: Servers,
    rng: Rng,
    counts: Counts,
    /// When the request under way was issued.
    issued: Nanos,
    /// How long the filer has worked.
    filer: u128,
}

impl Machines {
    fn flash_read(&mut self, now: Nanos) -> Nanos {
        self.flash.serve(self.issued, now, self.timing.flash_read)
    }

    fn flash_write(&mut self, now: Nanos) -> Nanos {
        self.counts.flash_writes += 1;
        self.flash.serve(self.issued, now, self.timing.flash_write)
    }

    fn filer_read(&mut self, now: Nanos) -> Nanos {
        self.counts.filer_reads += 1;
        let t = self.timing;
        let there = now + t.packet;
        let fast = self.rng.chance(t.fast_share);
        let span = if fast { t.filer_fast } else { t.filer_slow };
        self.filer += u128::from(span.0);
        let read = there + span;
        self.back.serve(self.issued, read, t.data) + t.packet
    }

    fn filer_write(&mut self, now: Nanos) -> Nanos {
        self.counts.filer_writes += 1;
        let t = self.timing;
        self.filer += u128::from(t.filer_write.0);
        self.out.serve(self.issued, now, t.data) + t.packet + t.filer_write + t.packet
    }
}

/// The caches of one client, in virtual time, which must not go back from one call to the next.
pub struct Stack {
    config: Config,
    /// RAM; of the unified architecture, all frames, those on flash marked.
    ram: Level,
    flash: Level,
    /// Unified: frames of RAM in use.
    ram_used: u32,
    machines: Machines,
    blocks: Interner,
    next_sync: [Nanos; 2],
}

const SECOND: u64 = 1_000_000_000;

fn first_sync(policy: Policy) -> Nanos {
    match policy {
        Policy::Periodic(seconds) => Nanos(u64::from(seconds) * SECOND),
        _ => Nanos(u64::MAX),
    }
}

impl Stack {
    /// Empty caches.
    pub fn new(config: &Config) -> Stack {
        let unified = config.architecture == Architecture::Unified;
        let ram = config.ram_blocks.max(1);
        let all = ram.saturating_add(config.flash_blocks);
        Stack {
            config: *config,
            ram: Level::new(if unified { all } else { ram }),
            flash: Level::new(if unified { 0 } else { config.flash_blocks }),
            ram_used: 0,
            machines: Machines {
                timing: config.timing,
                flash: Servers::new(config.timing.flash_channels),
                out: Servers::new(1),
                back: Servers::new(1),
                rng: Rng::new(config.seed),
                counts: Counts::default(),
                issued: Nanos::ZERO,
                filer: 0,
            },
            blocks: Interner::new(),
            next_sync: [first_sync(config.ram_policy), first_sync(config.flash_policy)],
        }
    }

    /// Counts so far.
    pub fn counts(&self) -> Counts {
        self.machines.counts
    }

    /// Seconds that the filer has worked for this client.
    pub fn filer_seconds(&self) -> f64 {
        self.machines.filer as f64 / 1e9
    }

    fn number(&mut self, block: u64) -> u32 {
        // 2^32 - 1 blocks of 4 KiB are 16 TiB; a larger set shares the last number.
        self.blocks.intern(block).unwrap_or(u32::MAX - 1)
    }

    fn naive(&self) -> bool {
        self.config.architecture == Architecture::Naive && self.config.flash_blocks > 0
    }

    /// Reads a block: when it is there, and where it was.
    pub fn read(&mut self, now: Nanos, block: u64) -> (Nanos, Source) {
        let block = self.number(block);
        self.read_block(now, block)
    }

    /// [`read`](Self::read) of a block by its dense number.
    pub(super) fn read_block(&mut self, now: Nanos, block: u32) -> (Nanos, Source) {
        self.sync(now);
        self.machines.counts.reads += 1;
        let ram = self.config.timing.ram;
        match self.ram.touch(block) {
            Some(false) => {
                self.machines.counts.hits_dram += 1;
                // Its frame on flash must not go before it does.
                self.flash.touch(block);
                return (now + ram, Source::Ram);
            }
            Some(true) => {
                self.machines.counts.hits_flash += 1;
                return (self.machines.flash_read(now), Source::Flash);
            }
            None => {}
        }
        if self.flash.touch(block).is_some() {
            self.machines.counts.hits_flash += 1;
            let read = self.machines.flash_read(now);
            return (self.enter_ram(read, block) + ram, Source::Flash);
        }
        let read = self.machines.filer_read(now);
        let room = self.enter_flash(read, block);
        if self.flash.holds(block) {
            // Behind the reader's back.
            self.machines.flash_write(room);
        }
        let room = self.enter_ram(room, block);
        if self.ram.mark(block) {
            self.machines.flash_write(room);
            return (room, Source::Filer);
        }
        (room + ram, Source::Filer)
    }

    /// Writes a block: when the writer may go on.
    pub fn write(&mut self, now: Nanos, block: u64) -> Nanos {
        let block = self.number(block);
        self.write_block(now, block)
    }

    /// [`write`](Self::write) of a block by its dense number.
    pub(super) fn write_block(&mut self, now: Nanos, block: u32) -> Nanos {
        self.sync(now);
        self.machines.counts.writes += 1;
        let mut done = now;
        // It is the most recent on flash too, where it has a frame there, whether RAM has it or not.
        self.flash.touch(block);
        if self.ram.touch(block).is_none() {
            if self.naive() {
                // What is in RAM has a frame on flash too.
                done = self.enter_flash(done, block);
            }
            done = self.enter_ram(done, block);
        }
        let on_flash = self.ram.mark(block);
        done =
            if on_flash { self.machines.flash_write(done) } else { done + self.config.timing.ram };
        let policy = if on_flash { self.config.flash_policy } else { self.config.ram_policy };
        match policy {
            Policy::Synchronous => done = self.write_down(done, block),
            Policy::Asynchronous => {
                self.write_down(done, block);
            }
            Policy::Periodic(_) | Policy::None => self.ram.set_dirty(block, true),
        }
        done
    }

    /// Whether the block is in RAM or on flash.
    #[cfg(test)]
    pub(super) fn holds(&self, block: u32) -> bool {
        self.ram.holds(block) || self.flash.holds(block)
    }

    /// Whether the filer has an older one.
    pub(super) fn is_dirty(&self, block: u32) -> bool {
        self.ram.is_dirty(block) || self.flash.is_dirty(block)
    }

    /// Takes the block out of RAM and flash, for another host has written it. Returns whether it was there.
    pub(super) fn forget(&mut self, block: u32) -> bool {
        let marked = self.ram.mark(block);
        let in_ram = self.ram.remove(block).is_some();
        if in_ram && !marked {
            self.ram_used = self.ram_used.saturating_sub(1);
        }
        let on_flash = self.flash.remove(block).is_some();
        in_ram || on_flash
    }

    /// Another host wants the block: if it is dirty, it is written to the filer. Returns when that is done.
    pub(super) fn recall(&mut self, now: Nanos, block: u32) -> Option<Nanos> {
        if !self.is_dirty(block) {
            return None;
        }
        let now = Nanos(now.0.max(self.machines.issued.0));
        self.machines.issued = now;
        let on_flash = self.ram.mark(block) || !self.ram.is_dirty(block);
        let read = if on_flash { self.machines.flash_read(now) } else { now };
        self.ram.set_dirty(block, false);
        self.flash.set_dirty(block, false);
        Some(self.machines.filer_write(read))
    }

    /// A clean stop, and a start with empty RAM. What is on flash is there again if it is `warm`.
    pub(super) fn restart(&mut self, now: Nanos, warm: bool) {
        let now = Nanos(now.0.max(self.machines.issued.0));
        self.machines.issued = now;
        for block in self.ram.blocks() {
            let (marked, dirty) = (self.ram.mark(block), self.ram.is_dirty(block));
            if dirty {
                // Nobody waits for it.
                let read = if marked { self.machines.flash_read(now) } else { now };
                if !(marked && warm) {
                    self.ram.set_dirty(block, false);
                    self.flash.set_dirty(block, false);
                    self.machines.filer_write(read);
                }
            }
            if !marked || !warm {
                self.ram.remove(block);
            }
        }
        self.ram_used = 0;
        if !warm {
            for block in self.flash.blocks() {
                if self.flash.remove(block) == Some(true) {
                    let read = self.machines.flash_read(now);
                    self.machines.filer_write(read);
                }
            }
        }
    }

    /// A frame in RAM (or of either kind) for a block that has none. Returns when it is free.
    fn enter_ram(&mut self, now: Nanos, block: u32) -> Nanos {
        if self.ram.holds(block) {
            return now;
        }
        let mut free = now;
        let mut mark = false;
        if self.config.architecture == Architecture::Unified {
            mark = self.ram_used >= self.config.ram_blocks.max(1);
        }
        if let Some(victim) = self.ram.make_room() {
            // The frame stays of the kind that it is.
            mark = victim.mark;
            if victim.dirty {
                free = self.put_down(now, victim);
            }
        } else if !mark {
            self.ram_used += 1;
        }
        self.ram.insert(block, mark);
        free
    }

    /// Writes a block that has lost its frame in RAM.
    fn put_down(&mut self, now: Nanos, victim: Victim) -> Nanos {
        let read = if victim.mark { self.machines.flash_read(now) } else { now };
        self.write_down(read, victim.block)
    }

    /// Writes a block of RAM (unified: of its frame) to what is below. Returns when that is done; it is clean then.
    fn write_down(&mut self, now: Nanos, block: u32) -> Nanos {
        self.ram.set_dirty(block, false);
        if self.naive() {
            let room = self.enter_flash(now, block);
            let written = self.machines.flash_write(room);
            return match self.config.flash_policy {
                Policy::Synchronous => self.machines.filer_write(written),
                Policy::Asynchronous => {
                    self.machines.filer_write(written);
                    written
                }
                Policy::Periodic(_) | Policy::None => {
                    self.flash.set_dirty(block, true);
                    written
                }
            };
        }
        let done = self.machines.filer_write(now);
        if self.config.architecture == Architecture::Lookaside && self.config.flash_blocks > 0 {
            let room = self.enter_flash(now, block);
            self.machines.flash_write(room);
        }
        done
    }

    /// A frame on flash for a block that may have one. Returns when it is free.
    fn enter_flash(&mut self, now: Nanos, block: u32) -> Nanos {
        if self.config.flash_blocks == 0
            || self.config.architecture == Architecture::Unified
            || self.flash.holds(block)
        {
            return now;
        }
        let mut free = now;
        if let Some(victim) = self.flash.make_room() {
            let mut dirty = victim.dirty;
            let mut in_ram = false;
            if self.naive()
                && let Some(newer) = self.ram.remove(victim.block)
            {
                dirty |= newer;
                in_ram = true;
            }
            if dirty {
                let read = if in_ram { now } else { self.machines.flash_read(now) };
                free = self.machines.filer_write(read);
            }
        }
        self.flash.insert(block, false);
        free
    }

    /// The syncers, whose turns have come: everything dirty is written down, and nobody waits.
    fn sync(&mut self, now: Nanos) {
        self.machines.issued = now;
        if now < self.next_sync[0] && now < self.next_sync[1] {
            return;
        }
        let unified = self.config.architecture == Architecture::Unified;
        for level in 0..2 {
            if now < self.next_sync[level] {
                continue;
            }
            let policy = [self.config.ram_policy, self.config.flash_policy][level];
            let Policy::Periodic(seconds) = policy else { continue };
            let at = self.next_sync[level];
            let every = u64::from(seconds) * SECOND;
            self.next_sync[level] = Nanos(at.0 + (1 + (now.0 - at.0) / every) * every);
            if level == 0 || unified {
                for block in self.ram.take_dirty() {
                    let marked = self.ram.mark(block);
                    if marked == (level == 1) {
                        let read = if marked { self.machines.flash_read(now) } else { now };
                        self.write_down(read, block);
                    } else {
                        self.ram.set_dirty(block, true);
                    }
                }
            } else {
                for _ in self.flash.take_dirty() {
                    let read = self.machines.flash_read(now);
                    self.machines.filer_write(read);
                }
            }
        }
    }

    /// Checks that what is in RAM is on flash, and that no clean block is thought dirty, of the blocks numbered below
    /// `blocks`. For tests.
    ///
    /// # Errors
    /// What does not hold.
    pub fn validate(&self, blocks: u32) -> Result<(), String> {
        for block in 0..blocks {
            if self.naive() && self.ram.holds(block) && !self.flash.holds(block) {
                return Err(format!("block {block} is in RAM and not on flash"));
            }
            let lost = |level: &Level| level.is_dirty(block) && !level.holds(block);
            if lost(&self.ram) || lost(&self.flash) {
                return Err(format!("block {block} is dirty and nowhere"));
            }
            if self.config.architecture == Architecture::Lookaside && self.flash.is_dirty(block) {
                return Err(format!("block {block} is dirty on flash"));
            }
        }
        Ok(())
    }
}
