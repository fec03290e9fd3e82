//! `seqr` and `sseqr`: a table of recent streams, and what in an access continues one of them.
//!
//! Source: Fusion-io, "Flash based Caching: Opportunities and Challenges" (Flash Memory Summit 2013), "Sequentiality
//! detection algorithm"; Yang et al., SYSTOR '13. They give two parameters, window and gap, and for the selective form the
//! admitted length. What they leave open is decided here:
//!
//! - Reads and writes are streams of their own: a program that copies, or updates in place as it goes, makes two.
//! - A stream has a direction, found at its first extension. Scans that run backwards are streams as well.
//! - An access extends a stream if it starts within `gap` of its end *and goes beyond it*. One that stays inside is a stream's
//!   if earlier accesses left holes there (requests of a deep queue arrive out of order); otherwise it is a block read
//!   again, the very opposite of a scan, and is neither part of a stream nor the start of one.
//! - Random accesses start candidates of streams all the time. They replace one another; a stream once recognised is replaced only
//!   by further recognised ones, so that 32 random reads between two steps of a scan do not hide it.

use crate::block::{BlockAccess, BlockOp, VolumeId};

/// See the [module](self). Memory: 56 bytes for each of the window's streams, nothing else.
#[derive(Debug)]
pub(super) struct Streams {
    entries: Vec<Stream>,
    window: usize,
    gap: u64,
    run: u32,
    recognised: usize,
    tick: u64,
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    volume: VolumeId,
    op: BlockOp,
    direction: Direction,
    low: u64,
    high: u64,
    /// Bytes between low and high that were accessed, at most.
    covered: u64,
    accesses: u32,
    used: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Unknown,
    Up,
    Down,
}

/// How an access relates to the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// The run now has as many accesses as it takes to be a stream.
    pub(super) recognised: bool,
    /// Whether it runs towards lower addresses.
    pub(super) down: bool,
    /// Where the run began: its lowest byte, or the byte after its highest if it runs down.
    pub(super) origin: u64,
}

#[derive(Clone, Copy)]
enum Match {
    Up,
    Down,
    Hole,
    Again,
}

impl Streams {
    /// `window` streams, extended by accesses within `gap` bytes of their end, recognised from `run` accesses on.
    pub(super) fn new(window: u32, gap: u64, run: u32) -> Streams {
        let window = window as usize;
        Streams { entries: Vec::with_capacity(window), window, gap, run, recognised: 0, tick: 0 }
    }

    /// Takes note of an access. `None` if it reads again what a stream has just passed.
    pub(super) fn observe(&mut self, access: &BlockAccess) -> Option<Part> {
        self.tick += 1;
        let (start, end) = (access.offset, access.end());
        let mut best: Option<(usize, Match, u64)> = None;
        for (at, s) in self.entries.iter().enumerate() {
            if s.volume != access.volume || s.op != access.op {
                continue;
            }
            let Some((kind, distance)) = s.relates(start, end, self.gap) else { continue };
            if best.is_none_or(|(_, _, least)| distance < least) {
                best = Some((at, kind, distance));
            }
        }
        let Some((at, kind, _)) = best else {
            self.start(access);
            return Some(Part { recognised: self.run <= 1, down: false, origin: start });
        };
        let s = &mut self.entries[at];
        s.used = self.tick;
        match kind {
            Match::Up => {
                s.direction = Direction::Up;
                s.covered += end - start.max(s.high);
                s.high = end;
            }
            Match::Down => {
                s.direction = Direction::Down;
                s.covered += end.min(s.low) - start;
                s.low = start;
            }
            Match::Hole => s.covered += end - start,
            Match::Again => return None,
        }
        s.accesses = s.accesses.saturating_add(1);
        let recognised = s.accesses >= self.run;
        if recognised && s.accesses == self.run {
            self.recognised += 1;
        }
        let s = &self.entries[at];
        let down = s.direction == Direction::Down;
        Some(Part { recognised, down, origin: if down { s.high } else { s.low } })
    }

    fn start(&mut self, access: &BlockAccess) {
        let fresh = Stream {
            volume: access.volume,
            op: access.op,
            direction: Direction::Unknown,
            low: access.offset,
            high: access.end(),
            covered: access.end() - access.offset,
            accesses: 1,
            used: self.tick,
        };
        if self.run <= 1 {
            self.recognised += 1;
        }
        if self.entries.len() < self.window {
            self.entries.push(fresh);
            return;
        }
        // Recognised streams keep three quarters of the window against candidates.
        let (window, run) = (self.window, self.run);
        let any = self.recognised * 4 > window * 3 || self.recognised >= window;
        let oldest = |(_, s): &(usize, &Stream)| (!any && s.accesses >= run, s.used);
        let Some(at) = self.entries.iter().enumerate().min_by_key(oldest).map(|(at, _)| at) else {
            return;
        };
        if self.entries[at].accesses >= run {
            self.recognised -= 1;
        }
        self.entries[at] = fresh;
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Stream>()
    }

    /// The recognised streams that `offset` lies in or just ahead of.
    pub(super) fn covering(&self, volume: VolumeId, offset: u64) -> usize {
        let near = |s: &&Stream| {
            s.volume == volume
                && s.accesses >= self.run
                && offset >= s.low.saturating_sub(self.gap)
                && offset <= s.high.saturating_add(self.gap)
        };
        self.entries.iter().filter(near).count()
    }
}

impl Stream {
    /// How `start..end` relates, and how far it is from where the stream was expected to go on.
    fn relates(&self, start: u64, end: u64, gap: u64) -> Option<(Match, u64)> {
        let behind = gap.max(end - start);
        if self.direction != Direction::Down && start >= self.low {
            let distance = start.abs_diff(self.high);
            if end > self.high && distance <= gap.max(self.high.min(end).saturating_sub(start)) {
                return Some((Match::Up, distance));
            }
            if end <= self.high && distance <= behind {
                return Some((self.inside(end - start), distance));
            }
        }
        if self.direction != Direction::Up && end <= self.high {
            let distance = end.abs_diff(self.low);
            if start < self.low && distance <= gap.max(end.saturating_sub(self.low.max(start))) {
                return Some((Match::Down, distance));
            }
            if start >= self.low && distance <= behind {
                return Some((self.inside(end - start), distance));
            }
        }
        None
    }

    fn inside(&self, bytes: u64) -> Match {
        let holes = (self.high - self.low).saturating_sub(self.covered);
        if self.direction != Direction::Unknown && holes >= bytes {
            Match::Hole
        } else {
            Match::Again
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_base::{Nanos, Rng};

    use super::*;
    use crate::block::BlockKind;

    fn access(op: BlockOp, offset: u64, bytes: u64) -> BlockAccess {
        let kind = BlockKind::Unknown;
        BlockAccess { volume: VolumeId(1), offset, bytes, op, kind, now: Nanos::ZERO }
    }

    fn read(offset: u64) -> BlockAccess {
        access(BlockOp::Read, offset, 4096)
    }

    fn recognised(part: Option<Part>) -> bool {
        part.is_some_and(|p| p.recognised)
    }

    #[test]
    fn a_scan_is_recognised_and_random_reads_are_not() {
        let mut streams = Streams::new(32, 0, 2);
        let verdicts: Vec<bool> =
            (0..5).map(|i| recognised(streams.observe(&read(i * 4096)))).collect();
        assert_eq!(verdicts, [false, true, true, true, true]);
        let mut rng = Rng::new(1);
        let random =
            (0..1000).filter(|_| recognised(streams.observe(&read(rng.below(1 << 30) * 4096))));
        assert_eq!(random.count(), 0);
    }

    #[test]
    fn interleaved_streams_and_random_reads_do_not_hide_one_another() {
        let mut streams = Streams::new(32, 65536, 2);
        let mut rng = Rng::new(2);
        for step in 0..200u64 {
            for stream in 0..16u64 {
                let part = streams.observe(&read((stream << 36) + step * 4096));
                assert_eq!(recognised(part), step > 0, "stream {stream} at step {step}");
                // Once recognised, none is lost to forty random reads a step.
                for _ in 0..if step > 1 { 40 } else { 0 } {
                    streams.observe(&read((17 << 36) + rng.below(1 << 36)));
                }
            }
        }
    }

    #[test]
    fn backwards_overlapping_and_out_of_order() {
        let mut down = Streams::new(4, 0, 2);
        let parts: Vec<Option<Part>> =
            (0..4).map(|i| down.observe(&read((100 - i) * 4096))).collect();
        assert!(parts[1..].iter().all(|p| p.is_some_and(|p| p.recognised && p.down)), "{parts:?}");
        assert_eq!(parts[3].unwrap().origin, 101 * 4096);

        let mut overlapping = Streams::new(4, 0, 2);
        for i in 0..4u64 {
            let part = overlapping.observe(&access(BlockOp::Read, i * 4096, 8192));
            assert_eq!(recognised(part), i > 0, "{i}");
        }

        let mut shuffled = Streams::new(4, 16384, 2);
        let order = [0, 2, 1, 4, 3, 6, 5, 8, 7];
        let verdicts = order.map(|i| recognised(shuffled.observe(&read(i * 4096))));
        assert!(verdicts[1..].iter().all(|&v| v), "{verdicts:?}");
    }

    #[test]
    fn a_block_read_again_is_no_stream() {
        for gap in [0, 65536] {
            let mut streams = Streams::new(8, gap, 2);
            for _ in 0..50 {
                assert!(!recognised(streams.observe(&read(40_960))), "gap {gap}");
            }
            // Nor is the block that a scan has just passed.
            streams.observe(&read(45_056));
            assert!(recognised(streams.observe(&read(49_152))));
            assert_eq!(streams.observe(&read(49_152)), None);
        }
    }

    #[test]
    fn a_second_scan_of_the_same_range_is_recognised() {
        let mut streams = Streams::new(8, 16384, 2);
        for round in 0..3 {
            let refused =
                (0..1000).filter(|i| recognised(streams.observe(&read(i * 4096)))).count();
            assert!(refused >= 998, "round {round}: {refused}");
        }
    }

    #[test]
    fn reads_writes_and_volumes_are_apart() {
        let mut streams = Streams::new(8, 0, 2);
        for i in 0..4u64 {
            for op in [BlockOp::Read, BlockOp::Write] {
                assert_eq!(recognised(streams.observe(&access(op, i * 4096, 4096))), i > 0);
            }
        }
        let other = BlockAccess { volume: VolumeId(2), ..read(16384) };
        assert!(!recognised(streams.observe(&other)));
    }

    #[test]
    fn the_gap_is_the_limit() {
        for (gap, step, wanted) in
            [(8192, 12288, true), (8192, 16384, false), (0, 4096, true), (0, 8192, false)]
        {
            let mut streams = Streams::new(8, gap, 2);
            streams.observe(&read(0));
            assert_eq!(recognised(streams.observe(&read(step))), wanted, "gap {gap} step {step}");
        }
    }

    #[test]
    fn any_access_is_survived_and_memory_stays() {
        let mut streams = Streams::new(16, 65536, 3);
        let memory = streams.memory_bytes();
        let mut rng = Rng::new(3);
        for _ in 0..20_000 {
            let near_end = u64::MAX - rng.below(1 << 17);
            let offset = if rng.chance(0.2) { near_end } else { rng.below(1 << 20) };
            let bytes = rng.below(1 << 17);
            let op = if rng.chance(0.5) { BlockOp::Read } else { BlockOp::Write };
            streams.observe(&access(op, offset, bytes));
            let counted = streams.entries.iter().filter(|s| s.accesses >= 3).count();
            assert_eq!(counted, streams.recognised);
            assert!(streams.entries.iter().all(|s| s.low <= s.high));
        }
        assert_eq!(streams.memory_bytes(), memory);
    }
}
