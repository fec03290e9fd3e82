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
//!
//! Two things more are looked for where streams may have free slots ([`Streams::over_connections`]); the papers' policies do without:
//!
//! - Whoever reads in sequence may have several requests under way, on several connections, and they arrive in about the order in
//!   which they were sent. So once a run has a direction, an access may lie up to four times its own length ahead of its end.
//! - A program that copies with several connections gives each a piece of the volume: runs that advance side by side, with
//!   requests of one length, from places that are whole MiB apart. They are *lanes* of one stream: only the first has an
//!   admitted length, and the others are known by their second access.

use crate::block::{BlockAccess, BlockOp, VolumeId};

/// An access may lie so many times its own length ahead of the run that it continues.
const AHEAD: u64 = 4;
/// Lanes begin in places that are a multiple of this apart, bytes.
const APART: u64 = 1 << 20;

/// See the [module](self). Memory: 80 bytes for each of the window's streams, nothing else.
#[derive(Debug)]
pub(super) struct Streams {
    entries: Vec<Stream>,
    window: usize,
    gap: u64,
    run: u32,
    /// Requests of several connections may be one stream.
    together: bool,
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
    /// Bytes of the last access.
    bytes: u64,
    /// It is another lane of a stream.
    lane: bool,
    begun: u64,
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
    /// It is a stream, and another lane of one that was recognised before.
    pub(super) lane: bool,
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
        let entries = Vec::with_capacity(window);
        Streams { entries, window, gap, run, together: false, recognised: 0, tick: 0 }
    }

    /// The same that knows requests of several connections for one stream, if `together` says so.
    #[must_use]
    pub(super) fn over_connections(self, together: bool) -> Streams {
        Streams { together, ..self }
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
            let Some((kind, distance)) = s.relates(start, end, self.gap, self.together) else {
                continue;
            };
            if best.is_none_or(|(_, _, least)| distance < least) {
                best = Some((at, kind, distance));
            }
        }
        let Some((at, kind, _)) = best else {
            self.start(access);
            let recognised = self.run <= 1;
            return Some(Part { recognised, lane: false, down: false, origin: start });
        };
        let s = &mut self.entries[at];
        s.used = self.tick;
        s.bytes = end - start;
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
        let accesses = s.accesses;
        self.recognised += usize::from(accesses == self.run);
        if self.together && accesses <= self.run && !self.entries[at].lane {
            self.entries[at].lane = self.is_lane(at);
        }
        let s = &self.entries[at];
        let recognised = s.accesses >= self.run || s.lane;
        let down = s.direction == Direction::Down;
        Some(Part { recognised, lane: s.lane, down, origin: if down { s.high } else { s.low } })
    }

    /// Whether the run at `at` advances beside one that was recognised before.
    fn is_lane(&self, at: usize) -> bool {
        let run = self.entries[at];
        let beside = |s: &Stream| {
            s.accesses >= self.run
                && (s.volume, s.op, s.bytes) == (run.volume, run.op, run.bytes)
                && (s.direction, run.direction) == (Direction::Up, Direction::Up)
                && s.used > run.begun
                && s.low.abs_diff(run.low).is_multiple_of(APART)
        };
        self.entries.iter().enumerate().any(|(other, s)| other != at && beside(s))
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
            bytes: access.end() - access.offset,
            lane: false,
            begun: self.tick,
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
    fn relates(&self, start: u64, end: u64, gap: u64, together: bool) -> Option<(Match, u64)> {
        let gap = match self.direction {
            Direction::Up | Direction::Down if together => {
                gap.max((end - start).saturating_mul(AHEAD))
            }
            _ => gap,
        };
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

    /// Eight requests of 256 KiB at a time on four connections, which overtake one another.
    #[test]
    fn requests_of_several_connections_are_one_stream() {
        let mut streams = Streams::new(32, 16 << 10, 4).over_connections(true);
        let mut rng = Rng::new(5);
        let mut order: Vec<u64> = (0..8).collect();
        let mut refused = 0;
        for first in (0..512).step_by(8) {
            rng.shuffle(&mut order[..]);
            // (None comes more than four places too early.)
            order.sort_by_key(|i| i / 4);
            for i in &order {
                let part = streams.observe(&access(BlockOp::Read, (first + i) << 18, 1 << 18));
                refused += u32::from(recognised(part));
            }
        }
        assert!(refused >= 490, "{refused} of 512");
    }

    /// What nbdcopy does with four connections: each takes the next piece when it has copied one.
    #[test]
    fn pieces_that_are_copied_side_by_side_are_lanes_of_one_stream() {
        // What is not refused at once, or has a length of its own.
        let lanes = |piece: u64, shift: u64| {
            let mut streams = Streams::new(32, 16 << 10, 4).over_connections(true);
            let mut first = 0;
            for i in 0..64 {
                for connection in 0..4 {
                    let at = connection * piece + connection * shift + (i << 18);
                    let part = streams.observe(&access(BlockOp::Read, at, 1 << 18));
                    first += u32::from(part.is_some_and(|p| !p.lane));
                }
            }
            first
        };
        // All of one of the four, and what comes before it is recognised; else all.
        assert_eq!((lanes(128 << 20, 0), lanes(128 << 20, 4096)), (64 + 3 * 3, 4 * 64));
        // One after the other is no lane: the next scan has an admitted length again.
        let mut streams = Streams::new(32, 16 << 10, 4).over_connections(true);
        for scan in [0, 128 << 20, 0] {
            for i in 0..64 {
                let part = streams.observe(&access(BlockOp::Read, scan + (i << 18), 1 << 18));
                assert!(part.is_some_and(|p| !p.lane), "{scan} {i}");
            }
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
