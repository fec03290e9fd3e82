//! Which bytes of a volume are dirty: in the write log, and not yet in the store for good.
//!
//! The overlay is what reads see first. A record comes into it when its write is acknowledged (`visible`: until then reads see the
//! old bytes) and leaves it when the store has it durably. Records come in the order of their sequence, so that a later one hides
//! what it covers of earlier ones; what an earlier one still shows leaves with that one.
//!
//! All addresses are bytes of the volume, never of the line space: a volume that moves there keeps its overlay.

use std::collections::BTreeMap;
use std::ops::Range;

/// What a dirty stretch holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Bytes that lie in the log, the first of them at this byte of the log's area.
    Bytes(u64),
    /// Zeros, written as such: data, never a hole.
    Zeros,
    /// Zeros, since it was trimmed.
    Trimmed,
    /// Bytes that cannot be read any more: reads of them fail until they are overwritten or discarded.
    Unreadable,
}

impl Holds {
    /// Of the stretch that begins `skip` bytes further on.
    fn behind(self, skip: u64) -> Holds {
        match self {
            Holds::Bytes(at) => Holds::Bytes(at + skip),
            other => other,
        }
    }
}

/// A dirty stretch of a volume: what one record still shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dirty {
    /// First byte in the volume.
    pub at: u64,
    /// Bytes; never 0.
    pub len: u64,
    /// The record's sequence in its volume.
    pub sequence: u64,
    /// What is there.
    pub holds: Holds,
}

impl Dirty {
    /// Memory that it takes on its way to a store: its bytes, in whole pieces of the log.
    pub fn memory(&self) -> u64 {
        match self.holds {
            Holds::Bytes(_) => self.len.next_multiple_of(4096) + 4096,
            Holds::Zeros | Holds::Trimmed | Holds::Unreadable => 0,
        }
    }
}

/// A stretch of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch {
    /// In the log.
    Dirty(Dirty),
    /// Below the overlay: `at`, and how many bytes.
    Clean(u64, u64),
}

#[derive(Clone, Copy, Debug)]
struct Extent {
    end: u64,
    sequence: u64,
    holds: Holds,
}

/// The same in 16 bytes: length below the kind, the low half of the sequence, and the place.
#[derive(Clone, Copy, Debug)]
struct Packed {
    len: u32,
    sequence: u32,
    place: u64,
}

const _: () = assert!(size_of::<Packed>() == 16, "memory of each dirty stretch");

/// Longer stretches are kept as several.
const LONGEST: u64 = 1 << 30;

impl Packed {
    fn new(from: u64, extent: &Extent) -> Packed {
        let (kind, place) = match extent.holds {
            Holds::Bytes(place) => (0, place),
            Holds::Zeros => (1, 0),
            Holds::Trimmed => (2, 0),
            Holds::Unreadable => (3, 0),
        };
        // 1 to 2^30 bytes.
        let len = (extent.end - from - 1) as u32;
        Packed { len: len | kind << 30, sequence: extent.sequence as u32, place }
    }

    /// As it is, from this byte on, where `latest` is the highest sequence that there is.
    fn at(self, from: u64, latest: u64) -> Extent {
        let holds = match self.len >> 30 {
            0 => Holds::Bytes(self.place),
            1 => Holds::Zeros,
            2 => Holds::Trimmed,
            _ => Holds::Unreadable,
        };
        let end = from + u64::from(self.len & (LONGEST as u32 - 1)) + 1;
        // No log has 2^32 records of a volume: each holds 4 KiB at least.
        let behind = (latest as u32).wrapping_sub(self.sequence);
        Extent { end, sequence: latest - u64::from(behind), holds }
    }
}

/// The overlay of one volume.
#[derive(Debug, Default)]
pub struct Overlay {
    extents: BTreeMap<u64, Packed>,
    /// The highest sequence that was shown.
    latest: u64,
    bytes: u64,
}

impl Overlay {
    /// Dirty bytes: each counted once, however often it was written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Dirty stretches.
    pub fn extents(&self) -> usize {
        self.extents.len()
    }

    /// The record of this sequence is acknowledged, and shows in this range. It is the latest of its volume.
    pub fn show(&mut self, range: Range<u64>, sequence: u64, holds: Holds) {
        if range.is_empty() {
            return;
        }
        self.cut(&range, |hidden| {
            debug_assert!(
                hidden.sequence < sequence,
                "records show in the order of their sequence"
            );
            None
        });
        self.bytes += range.end - range.start;
        self.latest = self.latest.max(sequence);
        self.insert(range.start, Extent { end: range.end, sequence, holds });
    }

    fn insert(&mut self, from: u64, extent: Extent) {
        pieces(from, extent, |from, packed| {
            self.extents.insert(from, packed);
        });
    }

    /// What these records show, which come in the order of their sequence: the same as to [`Overlay::show`] one after the other, and in a fraction of the
    /// time where they are many.
    pub fn build(records: Vec<(Range<u64>, u64, Holds)>) -> Overlay {
        let mut records = records;
        records.retain(|(range, ..)| !range.is_empty());
        let latest = records.last().map_or(0, |(_, sequence, _)| *sequence);
        let mut overlay = Overlay { latest, ..Overlay::default() };
        // Those that touch none are as they are; where some overlap, they are shown one after the other.
        records.sort_unstable_by_key(|(range, sequence, _)| (range.start, *sequence));
        let mut all: Vec<(u64, Packed)> = Vec::with_capacity(records.len());
        let mut rest = &mut records[..];
        while let Some((first, ..)) = rest.first() {
            let (mut end, mut n) = (first.end, 1);
            while let Some((next, ..)) = rest.get(n).filter(|(next, ..)| next.start < end) {
                (end, n) = (end.max(next.end), n + 1);
            }
            let (group, more) = rest.split_at_mut(n);
            rest = more;
            if let [(range, sequence, holds)] = group {
                let extent = Extent { end: range.end, sequence: *sequence, holds: *holds };
                overlay.bytes += range.end - range.start;
                pieces(range.start, extent, |from, packed| all.push((from, packed)));
                continue;
            }
            group.sort_unstable_by_key(|(_, sequence, _)| *sequence);
            let mut some = Overlay { latest, ..Overlay::default() };
            group.iter().for_each(|(range, n, holds)| some.show(range.clone(), *n, *holds));
            overlay.bytes += some.bytes;
            all.extend(some.extents);
        }
        overlay.extents = all.into_iter().collect();
        overlay
    }

    /// The store has what the record of this sequence, which is of this range, still showed.
    pub fn settle(&mut self, range: Range<u64>, sequence: u64) {
        self.cut(&range, |extent| (extent.sequence != sequence).then_some(extent));
    }

    /// What the record of this sequence, which is of this range, still shows lies elsewhere in the log (the range's first byte at
    /// `to`) and can be read there, or cannot be read any more (`None`).
    pub fn moves(&mut self, range: Range<u64>, sequence: u64, to: Option<u64>) {
        let first = range.start;
        self.cut(&range, |extent| {
            let holds = match (extent.holds, to) {
                _ if extent.sequence != sequence => extent.holds,
                (Holds::Bytes(_) | Holds::Unreadable, Some(to)) => {
                    Holds::Bytes(to + (extent.at - first))
                }
                (Holds::Bytes(_), None) => Holds::Unreadable,
                (other, _) => other,
            };
            Some(Dirty { holds, ..extent })
        });
    }

    /// The operator gives up what is dirty in this range.
    pub fn discard(&mut self, range: Range<u64>) {
        self.cut(&range, |_| None);
    }

    /// The stretches of this range, in order.
    pub fn look(&self, range: Range<u64>, mut each: impl FnMut(Stretch)) {
        let mut at = range.start;
        for (from, extent) in self.touching(&range) {
            let (start, end) = (from.max(range.start), extent.end.min(range.end));
            if at < start {
                each(Stretch::Clean(at, start - at));
            }
            let holds = extent.holds.behind(start - from);
            let sequence = extent.sequence;
            each(Stretch::Dirty(Dirty { at: start, len: end - start, sequence, holds }));
            at = end;
        }
        if at < range.end {
            each(Stretch::Clean(at, range.end - at));
        }
    }

    /// Whether any byte of this range is dirty.
    pub fn touches(&self, range: &Range<u64>) -> bool {
        self.touching(range).next().is_some()
    }

    fn touching(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, Extent)> + use<'_> {
        let (start, end) = (range.start, range.end.max(range.start));
        let ends = |at: u64, packed: &Packed| packed.at(at, self.latest).end;
        let before = self.extents.range(..start).next_back();
        let before = before.filter(|(at, packed)| ends(**at, packed) > start);
        let latest = self.latest;
        let all = before.into_iter().chain(self.extents.range(start..end));
        all.map(move |(&at, packed)| (at, packed.at(at, latest)))
    }

    /// What of this range `f` makes of each dirty stretch in it; stretches that reach beyond it are cut.
    fn cut(&mut self, range: &Range<u64>, mut f: impl FnMut(Dirty) -> Option<Dirty>) {
        let touched: Vec<(u64, Extent)> = self.touching(range).collect();
        for (from, extent) in touched {
            self.extents.remove(&from);
            let (start, end) = (from.max(range.start), extent.end.min(range.end));
            if from < start {
                self.insert(from, Extent { end: start, ..extent });
            }
            if end < extent.end {
                let holds = extent.holds.behind(end - from);
                self.insert(end, Extent { holds, ..extent });
            }
            let holds = extent.holds.behind(start - from);
            let dirty = Dirty { at: start, len: end - start, sequence: extent.sequence, holds };
            match f(dirty) {
                None => self.bytes -= end - start,
                Some(Dirty { sequence, holds, .. }) => {
                    self.insert(start, Extent { end, sequence, holds });
                }
            }
        }
    }
}

/// An extent as it is kept: in as many pieces as that takes.
fn pieces(from: u64, extent: Extent, mut each: impl FnMut(u64, Packed)) {
    let mut at = from;
    while at < extent.end {
        let end = extent.end.min(at + LONGEST);
        each(at, Packed::new(at, &Extent { end, holds: extent.holds.behind(at - from), ..extent }));
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BYTES: usize = 64;

    #[derive(Clone, Debug)]
    enum Step {
        Show(u64, u64, u8),
        Settle(usize),
        Moves(usize, bool),
        Discard(u64, u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let range = || (0..BYTES as u64, 1..24u64);
        let step = prop_oneof![
            5 => (range(), 0..3u8).prop_map(|((at, len), holds)| Step::Show(at, len, holds)),
            3 => any::<prop::sample::Index>().prop_map(|i| Step::Settle(i.index(1 << 16))),
            1 => (any::<prop::sample::Index>(), any::<bool>()).prop_map(|(i, b)| Step::Moves(i.index(1 << 16), b)),
            1 => range().prop_map(|(at, len)| Step::Discard(at, len)),
        ];
        prop::collection::vec(step, 1..60)
    }

    /// One byte at a time: which record shows there, and what that byte of it is.
    type Plain = Vec<Option<(u64, Holds)>>;

    fn check(overlay: &Overlay, plain: &Plain) {
        let mut seen: Plain = Vec::new();
        overlay.look(0..BYTES as u64, |stretch| match stretch {
            Stretch::Clean(at, len) => {
                assert!(at == seen.len() as u64 && len > 0);
                seen.extend((0..len).map(|_| None));
            }
            Stretch::Dirty(d) => {
                assert!(d.at == seen.len() as u64 && d.len > 0);
                seen.extend((0..d.len).map(|i| Some((d.sequence, d.holds.behind(i)))));
            }
        });
        assert_eq!(&seen, plain);
        assert_eq!(overlay.bytes(), plain.iter().flatten().count() as u64);
        for at in 0..BYTES as u64 {
            assert_eq!(overlay.touches(&(at..at + 1)), plain[at as usize].is_some());
        }
        assert!(!overlay.touches(&(3..3)) || plain[3].is_some());
    }

    #[test]
    fn stretches_of_any_length_are_what_they_were() {
        let mut overlay = Overlay::default();
        let last = (1 << 41) + (5 << 30) + 7;
        overlay.show(3..last, 1 << 33, Holds::Trimmed);
        overlay.show(1 << 40..(1 << 40) + 4096, (1 << 33) + 1, Holds::Bytes(77));
        let mut seen = Vec::new();
        overlay.look(0..last + 1, |stretch| seen.push(stretch));
        let whole = seen.iter().fold(0, |at, stretch| match stretch {
            Stretch::Clean(from, len) => {
                assert!(*from == at && (*from == 0 || *from == last));
                at + len
            }
            Stretch::Dirty(Dirty { at: from, len, sequence, holds }) => {
                let written = *from == 1 << 40;
                assert_eq!(*sequence, (1 << 33) + u64::from(written));
                assert_eq!(*holds, if written { Holds::Bytes(77) } else { Holds::Trimmed });
                assert_eq!(*from, at);
                at + len
            }
        });
        assert_eq!((whole, overlay.bytes()), (last + 1, last - 3));
        overlay.settle(3..last, 1 << 33);
        assert_eq!((overlay.bytes(), overlay.extents()), (4096, 1));
    }

    proptest! {
        #[test]
        fn an_overlay_shows_what_a_plain_map_of_bytes_does(steps in steps()) {
            let mut overlay = Overlay::default();
            let mut plain: Plain = vec![None; BYTES];
            let mut records: Vec<Range<u64>> = Vec::new();
            for step in steps {
                match step {
                    Step::Show(at, len, kind) => {
                        let range = at..(at + len).min(BYTES as u64);
                        let sequence = records.len() as u64;
                        let holds = [Holds::Bytes(sequence * 1000), Holds::Zeros, Holds::Trimmed][usize::from(kind)];
                        for (i, byte) in range.clone().enumerate() {
                            plain[byte as usize] = Some((sequence, holds.behind(i as u64)));
                        }
                        overlay.show(range.clone(), sequence, holds);
                        records.push(range);
                    }
                    Step::Settle(which) if !records.is_empty() => {
                        let which = which % records.len();
                        overlay.settle(records[which].clone(), which as u64);
                        plain.iter_mut().filter(|p| p.is_some_and(|p| p.0 == which as u64)).for_each(|p| *p = None);
                    }
                    Step::Moves(which, readable) if !records.is_empty() => {
                        let which = which % records.len();
                        let to = readable.then_some(1 << 20);
                        overlay.moves(records[which].clone(), which as u64, to);
                        for byte in records[which].clone() {
                            let Some((sequence, holds)) = plain[byte as usize] else { continue };
                            if !matches!(holds, Holds::Bytes(_) | Holds::Unreadable) {
                                continue;
                            }
                            if sequence == which as u64 {
                                let holds = to.map_or(Holds::Unreadable, |to| Holds::Bytes(to + byte - records[which].start));
                                plain[byte as usize] = Some((sequence, holds));
                            }
                        }
                    }
                    Step::Discard(at, len) => {
                        let range = at..(at + len).min(BYTES as u64);
                        range.clone().for_each(|byte| plain[byte as usize] = None);
                        overlay.discard(range);
                    }
                    _ => {}
                }
                check(&overlay, &plain);
            }
        }

        #[test]
        fn records_that_come_at_once_show_what_they_do_one_after_the_other(
            steps in prop::collection::vec((0..BYTES as u64, 0..12u64, 0..3usize), 0..80),
        ) {
            let mut overlay = Overlay::default();
            let mut records = Vec::new();
            for ((at, len, kind), sequence) in steps.into_iter().zip(7u64..) {
                let range = at..(at + len).min(BYTES as u64);
                let holds = [Holds::Bytes(sequence * 1000), Holds::Zeros, Holds::Trimmed][kind];
                overlay.show(range.clone(), sequence, holds);
                records.push((range, sequence, holds));
            }
            let built = Overlay::build(records);
            let all = |overlay: &Overlay| {
                let mut all = Vec::new();
                overlay.look(0..BYTES as u64, |stretch| all.push(stretch));
                all
            };
            assert_eq!((all(&built), built.bytes()), (all(&overlay), overlay.bytes()));
        }
    }
}
