//! Reading ahead: who reads one stretch after the other is going to want the next, and a store that is far away is best
//! asked for it before.
//!
//! It begins when a read of such a stream misses, goes on while the store must be asked, and ends where everything is cached.
//! How far it goes grows with the stream, up to a limit. Only streams whose lines are admitted are read ahead of, on the same terms: what
//! admission keeps out (scans, if it is told so) is not brought in by this way, and of what may have free slots only it goes on
//! as long as there are some.
//!
//! What is read ahead is asked for as [`PartKind::Prefetch`](crate::block::PartKind): the shard brings it past admission's other
//! verdicts, keeps it
//! from changes like any other fetch, and lets it go where it would have to wait. Whoever asks sees to it that nothing beyond
//! the end of the volume is asked for, and nothing of which the operator has said something else ([`Streams::same_rule`]).

use larder_base::ByteSize;

use crate::block::api::Verdict;
use crate::block::planted::Planted;

/// How far streams of reads are read ahead of at most, if nobody says otherwise.
pub const DEFAULT: ByteSize = ByteSize::mib(1);
/// The furthest that may be configured.
pub const FURTHEST: ByteSize = ByteSize::mib(64);
/// What is read ahead is asked for in pieces that end at multiples of so many bytes.
const PIECE: u64 = 256 << 10;
/// Of a client's advice no more bytes than this are taken: of a very long range the beginning will do.
pub const MOST_ADVICE: u64 = 64 << 20;

/// Streams that are known at a time, of one worker.
const STREAMS: usize = 16;
/// A stream is one from so many reads and bytes on.
const READS: u32 = 3;
const BYTES: u64 = 128 << 10;

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Where it began and where the next read is expected, as addresses in the line space.
    start: u64,
    next: u64,
    reads: u32,
    /// How far was read ahead.
    asked: u64,
    /// The store must be asked for what comes.
    cold: bool,
    verdict: Verdict,
    /// When it was last read.
    used: u64,
}

/// What is to be read ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadAhead {
    /// First byte in the line space.
    pub from: u64,
    /// The byte after the last.
    pub to: u64,
    /// What its lines may have: any slot, or a free one.
    pub verdict: Verdict,
}

impl ReadAhead {
    /// Takes the next piece that is to be asked for: its first byte, and bytes. `refused` says whether so many bytes, all that is
    /// left, are refused by now: then it goes no further.
    pub fn next(&mut self, refused: impl FnOnce(u64) -> bool) -> Option<(u64, u64)> {
        let at = self.from;
        if at >= self.to || refused(self.to - at) {
            return None;
        }
        self.from = ((at / PIECE + 1) * PIECE).min(self.to);
        Some((at, self.from - at))
    }
}

/// The streams of one worker. Places are bytes of the line space.
#[derive(Debug)]
pub struct Streams {
    list: [Stream; STREAMS],
    clock: u64,
    /// The furthest, bytes; 0: never.
    most: u64,
    group: u64,
    /// A stream is one from so many bytes on.
    least: u64,
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

impl Streams {
    /// Up to `most` bytes are read ahead (0: none), in groups of `group` bytes.
    pub fn new(most: u64, group: u64) -> Streams {
        Streams {
            list: Default::default(),
            clock: 0,
            most,
            group,
            least: BYTES,
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    /// The same where reads of `least` bytes, one after the other, are a stream: for volumes that are small.
    #[must_use]
    pub fn with_least(self, least: u64) -> Streams {
        Streams { least, ..self }
    }

    /// From how many bytes on reads are a stream.
    pub fn least(&self) -> u64 {
        self.least
    }

    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
    }

    /// A planted fault: it does not know where volumes end.
    pub(super) fn ignores_end(&self) -> bool {
        self.planted(Planted::AheadPastEnd)
    }

    /// Another: nor what the operator has said.
    pub(super) fn ignores_rule(&self) -> bool {
        self.planted(Planted::AheadIgnoresRule)
    }

    #[cfg(feature = "planted")]
    fn planted(&self, fault: Planted) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    #[inline(always)]
    fn planted(&self, _: Planted) -> bool {
        false
    }

    /// Bytes `at..at + len` are read, of a volume whose cached part ends at `end`; `verdict` is what admission says of lines that
    /// are read ahead of it. Returns what is to be read ahead.
    pub fn read(&mut self, at: u64, len: u64, end: u64, verdict: Verdict) -> Option<ReadAhead> {
        if self.most == 0 || len == 0 {
            return None;
        }
        self.clock += 1;
        let place = self.list.iter().position(|s| s.used > 0 && s.next == at);
        let Some(place) = place else {
            if let Some(oldest) = self.list.iter_mut().min_by_key(|s| s.used) {
                *oldest = Stream {
                    start: at,
                    next: at + len,
                    reads: 1,
                    asked: at + len,
                    cold: false,
                    verdict,
                    used: self.clock,
                };
            }
            return None;
        };
        let stream = &mut self.list[place];
        stream.next += len;
        stream.reads = stream.reads.saturating_add(1);
        stream.verdict = verdict;
        stream.used = self.clock;
        self.further(place, end)
    }

    /// The store was asked for a read at `at`.
    pub fn missed(&mut self, at: u64, end: u64) -> Option<ReadAhead> {
        let place = self.list.iter().position(|s| s.start <= at && at < s.next)?;
        self.list[place].cold = true;
        self.further(place, end)
    }

    /// All that was read ahead from `at` on was there already, or was not to be had.
    pub fn was_there(&mut self, at: u64) {
        if let Some(s) = self.list.iter_mut().find(|s| s.start <= at && at < s.asked) {
            s.cold = false;
        }
    }

    /// Where, in `from..to` of a volume that begins at `base`, lines of `line` bytes end of which `rule` says what it says of
    /// the one before `from`: what admission said of that one is not said of others.
    pub fn same_rule<R: PartialEq>(
        &self,
        (from, to): (u64, u64),
        base: u64,
        line: u64,
        rule: impl Fn(u64) -> R,
    ) -> u64 {
        if self.planted(Planted::AheadIgnoresRule) {
            return to;
        }
        let first = rule(from.saturating_sub(line).max(base));
        (from..to).step_by(line as usize).find(|&at| rule(at) != first).unwrap_or(to)
    }

    fn further(&mut self, place: usize, end: u64) -> Option<ReadAhead> {
        let end = if self.planted(Planted::AheadPastEnd) { u64::MAX } else { end };
        let least = self.least;
        let stream = &mut self.list[place];
        let run = stream.next - stream.start;
        let verdict = stream.verdict;
        let admitted = matches!(verdict, Verdict::Admit | Verdict::IfFree);
        if !stream.cold || !admitted || stream.reads < READS || run < least {
            return None;
        }
        let from = stream.asked.max(stream.next);
        let to = (stream.next + run.min(self.most)) / self.group * self.group;
        let to = to.min(end);
        // A piece at a time, not a line for each read.
        let worth = (run.min(self.most) / 4).max(self.group);
        if to < from + worth && to < end || to <= from {
            return None;
        }
        stream.asked = to;
        Some(ReadAhead { from, to, verdict })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1 << 10;
    const GROUP: u64 = 64 * K;
    const END: u64 = 1 << 30;

    #[test]
    fn a_stream_that_misses_is_read_ahead_of_further_and_further() {
        let mut streams = Streams::new(1024 * K, GROUP);
        let mut ahead = 0;
        let mut most = 0;
        for i in 0..64 {
            let at = i * 64 * K;
            let mut found = streams.read(at, 64 * K, END, Verdict::Admit);
            if at >= ahead {
                found = found.or(streams.missed(at, END));
            }
            if let Some(ReadAhead { from, to, .. }) = found {
                assert!(from >= ahead && from >= at + 64 * K, "nothing twice: {from} {ahead}");
                assert!(to > from && to <= at + 64 * K + 1024 * K && to % GROUP == 0);
                ahead = to;
            }
            most = most.max(ahead.saturating_sub(at + 64 * K));
            if i >= 8 {
                assert!(ahead > at + 64 * K, "read {i} finds nothing ahead of it");
            }
        }
        assert_eq!(most, 1024 * K);
    }

    #[test]
    fn a_stretch_is_asked_for_in_pieces_as_long_as_nothing_refuses_it() {
        let stretch = ReadAhead { from: 192 * K, to: 700 * K, verdict: Verdict::Admit };
        let mut all = stretch;
        let pieces: Vec<_> = std::iter::from_fn(|| all.next(|_| false)).collect();
        assert_eq!(pieces, [(192 * K, 64 * K), (256 * K, 256 * K), (512 * K, 188 * K)]);
        let mut some = stretch;
        let pieces = std::iter::from_fn(|| some.next(|left| left < 200 * K)).count();
        assert_eq!(pieces, 2);
    }

    #[test]
    fn what_is_no_stream_is_not() {
        let mut streams = Streams::new(1024 * K, GROUP);
        for i in 0..1000u64 {
            let at = i * 7919 % 1000 * 1024 * K;
            let found = streams.read(at, 64 * K, END, Verdict::Admit);
            assert_eq!(found.or(streams.missed(at, END)), None);
        }
        let mut none = Streams::new(0, GROUP);
        for i in 0..100 {
            assert_eq!(none.read(i * 64 * K, 64 * K, END, Verdict::Admit), None);
            assert_eq!(none.missed(i * 64 * K, END), None);
        }
    }

    #[test]
    fn it_ends_where_all_is_there_or_nothing_is_admitted_or_the_volume_ends() {
        let begin = |verdict| {
            let mut streams = Streams::new(1024 * K, GROUP);
            let mut found = None;
            for i in 0..8 {
                found = streams.read(i * 64 * K, 64 * K, END, verdict);
                found = found.or(streams.missed(i * 64 * K, END)).or(found);
            }
            (streams, found)
        };
        let (mut streams, found) = begin(Verdict::Admit);
        let ReadAhead { from, verdict, .. } = found.expect("it is read ahead");
        assert_eq!(verdict, Verdict::Admit);
        streams.was_there(from);
        for i in 8..40 {
            assert_eq!(streams.read(i * 64 * K, 64 * K, END, Verdict::Admit), None);
        }
        assert!(streams.missed(39 * 64 * K, END).is_some(), "a miss begins it again");
        assert_eq!(begin(Verdict::Reject).1, None);
        assert_eq!(begin(Verdict::Compete).1, None);
        let found = begin(Verdict::IfFree).1;
        assert_eq!(found.map(|f| f.verdict), Some(Verdict::IfFree), "on its own terms");
        let mut streams = Streams::new(1024 * K, GROUP);
        let end = 600 * K;
        let mut furthest = 0;
        for i in 0..9 {
            let found = streams.read(i * 64 * K, 64 * K, end, Verdict::Admit);
            furthest = found.or(streams.missed(i * 64 * K, end)).map_or(furthest, |f| f.to);
        }
        assert_eq!(furthest, end);
    }
}
