//! Which bytes of a volume are dirty: in the write log, and not yet in the store for good.
//!
//! The overlay is what reads see first. A record comes into it when its write is acknowledged (`visible`: until then reads see the
//! old bytes) and leaves it when the store has it durably. Records come in the order of their sequence, so that a later one hides
//! what it covers of earlier ones; what an earlier one still shows leaves with that one.
//!
//! Where the bytes of a record lie it does not know: the record itself says that, and goes on to say so when it is moved.
//!
//! All addresses are bytes of the volume, never of the line space: a volume that moves there keeps its overlay.

use std::collections::BinaryHeap;
use std::ops::{Range, RangeInclusive};

use super::extents::{Extents, InOrder, Word};

/// What a dirty stretch holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Bytes of its record's payload.
    Bytes,
    /// Zeros, written as such: data, never a hole.
    Zeros,
    /// Zeros, since it was trimmed.
    Trimmed,
    /// Bytes that cannot be read any more: reads of them fail until they are overwritten or discarded.
    Unreadable,
}

impl Holds {
    /// As a number below 4.
    fn code(self) -> u8 {
        match self {
            Holds::Bytes => 0,
            Holds::Zeros => 1,
            Holds::Trimmed => 2,
            Holds::Unreadable => 3,
        }
    }

    fn of(code: u8) -> Holds {
        match code & 3 {
            0 => Holds::Bytes,
            1 => Holds::Zeros,
            2 => Holds::Trimmed,
            _ => Holds::Unreadable,
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
            Holds::Bytes => self.len.next_multiple_of(4096) + 4096,
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

/// Longer stretches are kept as several.
const LONGEST: u64 = 1 << 30;

impl Extent {
    /// The same in 8 bytes: length below the kind, and the low half of the sequence.
    fn word(&self, from: u64) -> Word {
        let kind = u32::from(self.holds.code());
        // 1 to 2^30 bytes.
        let len = (self.end - from - 1) as u32;
        Word { len: len | kind << 30, sequence: self.sequence as u32 }
    }

    /// As it was, from this byte on, where `latest` is the highest sequence that there is.
    fn of(word: Word, from: u64, latest: u64) -> Extent {
        let holds = Holds::of((word.len >> 30) as u8);
        let end = from + u64::from(word.len & (LONGEST as u32 - 1)) + 1;
        // No log has 2^32 records of a volume: each holds 4 KiB at least.
        let behind = (latest as u32).wrapping_sub(word.sequence);
        Extent { end, sequence: latest - u64::from(behind), holds }
    }
}

/// The overlay of one volume.
#[derive(Debug, Default)]
pub struct Overlay {
    extents: Extents,
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
        self.latest = self.latest.max(sequence);
        let extent = Extent { end: range.end, sequence, holds };
        let (first, more) = {
            let mut touching = self.touching(&range);
            (touching.next(), touching.next().is_some())
        };
        match first {
            None => {
                self.bytes += range.end - range.start;
                return self.insert(range.start, extent);
            }
            // Most that hide any hide just one that is as long.
            Some((from, of)) if !more && (from, of.end) == (range.start, range.end) => {
                debug_assert!(of.sequence < sequence, "records show in their order");
                self.extents.set(from, extent.word(from));
                return;
            }
            _ => {}
        }
        self.cut(&range, |hidden| {
            debug_assert!(
                hidden.sequence < sequence,
                "records show in the order of their sequence"
            );
            None
        });
        self.bytes += range.end - range.start;
        self.insert(range.start, extent);
    }

    fn insert(&mut self, from: u64, extent: Extent) {
        pieces(from, extent, |from, word| self.extents.insert(from, word));
    }

    /// What the records of these sequences show, each of which `shows` says when it is asked for, more than once: the same as to [`Overlay::show`] one
    /// after the other, and in a fraction of the time where they are many.
    ///
    /// Memory beside what is returned: 4 bytes a record, and 24 for each of some thousands, or of those that begin at one byte if they are more.
    pub fn of_records(
        sequences: RangeInclusive<u64>,
        shows: impl Fn(u64) -> Option<(Range<u64>, Holds)>,
    ) -> Overlay {
        let first = *sequences.start();
        let count = sequences.end().checked_sub(first).map_or(0, |more| more as usize + 1);
        let shown = |sequence| {
            let (range, holds) = shows(sequence)?;
            let key = sequence << 2 | u64::from(holds.code());
            (!range.is_empty()).then_some(Shown { start: range.start, end: range.end, key })
        };
        let bounds = bounds(count, |n| shown(first + n).map(|shown| shown.start));
        let part = |shown: &Shown| bounds.partition_point(|&bound| bound <= shown.start);
        // Where each part begins in the order of parts.
        let mut begins = vec![0; bounds.len() + 2];
        sequences.clone().filter_map(shown).for_each(|shown| begins[part(&shown) + 1] += 1);
        (1..begins.len()).for_each(|n| begins[n] += begins[n - 1]);
        let mut order = vec![0u32; begins.last().copied().unwrap_or(0)];
        let mut next = begins.clone();
        for sequence in sequences {
            let Some(shown) = shown(sequence) else { continue };
            let at = &mut next[part(&shown)];
            // No log has 2^32 records of a volume.
            order[*at] = (sequence - first) as u32;
            *at += 1;
        }
        let (mut sweep, mut some) = (Sweep::default(), Vec::new());
        for part in begins.windows(2) {
            let mine = order[part[0]..part[1]].iter().map(|&n| first + u64::from(n));
            some.clear();
            some.reserve_exact(mine.len());
            some.extend(mine.filter_map(shown));
            some.sort_unstable_by_key(|shown: &Shown| (shown.start, shown.key));
            some.iter().for_each(|shown| sweep.next(*shown));
        }
        sweep.overlay()
    }

    /// The store has what the record of this sequence, which is of this range, still showed.
    pub fn settle(&mut self, range: Range<u64>, sequence: u64) {
        self.cut(&range, |extent| (extent.sequence != sequence).then_some(extent));
    }

    /// What the record of this sequence, which is of this range, still shows of its bytes cannot be read any more.
    pub fn lose(&mut self, range: Range<u64>, sequence: u64) {
        self.becomes(&range, sequence, [Holds::Bytes, Holds::Unreadable]);
    }

    /// What could not be read of the record of this sequence, which is of this range, can be read after all.
    pub fn find(&mut self, range: Range<u64>, sequence: u64) {
        self.becomes(&range, sequence, [Holds::Unreadable, Holds::Bytes]);
    }

    fn becomes(&mut self, range: &Range<u64>, sequence: u64, [from, to]: [Holds; 2]) {
        self.cut(range, |extent| {
            let becomes = extent.sequence == sequence && extent.holds == from;
            Some(Dirty { holds: if becomes { to } else { extent.holds }, ..extent })
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
            let Extent { sequence, holds, .. } = extent;
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
        let latest = self.latest;
        let whole = move |(at, word): (u64, Word)| (at, Extent::of(word, at, latest));
        let all = self.extents.around(start).map(whole);
        all.skip_while(move |(_, extent)| extent.end <= start).take_while(move |(at, _)| *at < end)
    }

    /// What of this range `f` makes of each dirty stretch in it; stretches that reach beyond it are cut.
    fn cut(&mut self, range: &Range<u64>, mut f: impl FnMut(Dirty) -> Option<Dirty>) {
        let touched: Vec<(u64, Extent)> = self.touching(range).collect();
        for (from, extent) in touched {
            let (start, end) = (from.max(range.start), extent.end.min(range.end));
            let dirty = Dirty {
                at: start,
                len: end - start,
                sequence: extent.sequence,
                holds: extent.holds,
            };
            let makes = f(dirty);
            if makes == Some(dirty) {
                continue;
            }
            self.extents.remove(from);
            if from < start {
                self.insert(from, Extent { end: start, ..extent });
            }
            if end < extent.end {
                self.insert(end, extent);
            }
            match makes {
                None => self.bytes -= end - start,
                Some(Dirty { sequence, holds, .. }) => {
                    self.insert(start, Extent { end, sequence, holds });
                }
            }
        }
    }
}

/// So many records are sorted at a time.
const PART: usize = if cfg!(test) { 8 } else { 1 << 14 };
/// So many are looked at for each part, to make parts of about one size.
const LOOKS: usize = 16;

/// Addresses that cut so many records into parts; `start` says where one begins.
fn bounds(count: usize, start: impl Fn(u64) -> Option<u64>) -> Vec<u64> {
    let parts = count.div_ceil(PART);
    if parts < 2 {
        return Vec::new();
    }
    let looks = parts * LOOKS;
    let at = |look: usize| (look as u64) * (count as u64) / (looks as u64);
    let mut starts: Vec<u64> = (0..looks).filter_map(|look| start(at(look))).collect();
    starts.sort_unstable();
    let mut bounds: Vec<u64> = starts.into_iter().step_by(LOOKS).skip(1).collect();
    bounds.dedup();
    bounds
}

/// What a record shows.
#[derive(Clone, Copy, Debug)]
struct Shown {
    start: u64,
    end: u64,
    /// Its sequence, and below it what is there.
    key: u64,
}

/// What records show that come in the order of their first bytes.
#[derive(Debug, Default)]
struct Sweep {
    /// What shows, up to where the top begins.
    extents: InOrder,
    bytes: u64,
    latest: u64,
    /// The last of those that reach here, which shows from this byte on.
    top: Option<(u64, Shown)>,
    /// Others that it hides, and that reach further: their keys and ends.
    hidden: BinaryHeap<(u64, u64)>,
}

impl Sweep {
    /// The next record.
    fn next(&mut self, one: Shown) {
        self.reach(one.start);
        match self.top {
            Some((from, top)) if top.key < one.key => {
                self.show(from..one.start, top.key);
                if top.end > one.end {
                    self.hidden.push((top.key, top.end));
                }
                self.top = Some((one.start, one));
            }
            Some((_, top)) if one.end > top.end => self.hidden.push((one.key, one.end)),
            Some(_) => {}
            None => self.top = Some((one.start, one)),
        }
    }

    /// No record begins before this byte any more.
    fn reach(&mut self, at: u64) {
        while let Some((from, top)) = self.top.filter(|(_, top)| top.end <= at) {
            self.show(from..top.end, top.key);
            let start = top.end;
            let below = std::iter::from_fn(|| self.hidden.pop()).find(|(_, end)| *end > start);
            self.top = below.map(|(key, end)| (start, Shown { start, end, key }));
        }
    }

    fn show(&mut self, range: Range<u64>, key: u64) {
        if range.is_empty() {
            return;
        }
        let (sequence, holds) = (key >> 2, Holds::of(key as u8));
        self.latest = self.latest.max(sequence);
        self.bytes += range.end - range.start;
        let extent = Extent { end: range.end, sequence, holds };
        pieces(range.start, extent, |from, word| self.extents.push(from, word));
    }

    fn overlay(mut self) -> Overlay {
        self.reach(u64::MAX);
        Overlay { extents: self.extents.all(), latest: self.latest, bytes: self.bytes }
    }
}

/// An extent as it is kept: in as many pieces as that takes.
fn pieces(from: u64, extent: Extent, mut each: impl FnMut(u64, Word)) {
    let mut at = from;
    while at < extent.end {
        let end = extent.end.min(at + LONGEST);
        each(at, Extent { end, ..extent }.word(at));
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
        /// It is found again, where it was lost.
        Lose(usize, bool),
        Discard(u64, u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let range = || (0..BYTES as u64, 1..24u64);
        let step = prop_oneof![
            5 => (range(), 0..3u8).prop_map(|((at, len), holds)| Step::Show(at, len, holds)),
            3 => any::<prop::sample::Index>().prop_map(|i| Step::Settle(i.index(1 << 16))),
            1 => any::<(prop::sample::Index, bool)>().prop_map(|(i, again)| Step::Lose(i.index(1 << 16), again)),
            1 => range().prop_map(|(at, len)| Step::Discard(at, len)),
        ];
        prop::collection::vec(step, 1..60)
    }

    /// One byte at a time: which record shows there, and what it holds.
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
                seen.extend((0..d.len).map(|_| Some((d.sequence, d.holds))));
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
        overlay.show(1 << 40..(1 << 40) + 4096, (1 << 33) + 1, Holds::Bytes);
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
                assert_eq!(*holds, if written { Holds::Bytes } else { Holds::Trimmed });
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
                        let holds = [Holds::Bytes, Holds::Zeros, Holds::Trimmed][usize::from(kind)];
                        for byte in range.clone() {
                            plain[byte as usize] = Some((sequence, holds));
                        }
                        overlay.show(range.clone(), sequence, holds);
                        records.push(range);
                    }
                    Step::Settle(which) if !records.is_empty() => {
                        let which = which % records.len();
                        overlay.settle(records[which].clone(), which as u64);
                        plain.iter_mut().filter(|p| p.is_some_and(|p| p.0 == which as u64)).for_each(|p| *p = None);
                    }
                    Step::Lose(which, again) if !records.is_empty() => {
                        let which = which % records.len();
                        let [from, to] = match again {
                            true => [Holds::Unreadable, Holds::Bytes],
                            false => [Holds::Bytes, Holds::Unreadable],
                        };
                        match again {
                            true => overlay.find(records[which].clone(), which as u64),
                            false => overlay.lose(records[which].clone(), which as u64),
                        }
                        for byte in records[which].clone() {
                            if plain[byte as usize] == Some((which as u64, from)) {
                                plain[byte as usize] = Some((which as u64, to));
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
                let holds = [Holds::Bytes, Holds::Zeros, Holds::Trimmed][kind];
                overlay.show(range.clone(), sequence, holds);
                records.push((range, holds));
            }
            let last = 6 + records.len() as u64;
            let built = Overlay::of_records(7..=last, |n| records.get(n as usize - 7).cloned());
            let all = |overlay: &Overlay| {
                let mut all = Vec::new();
                overlay.look(0..BYTES as u64, |stretch| all.push(stretch));
                all
            };
            assert_eq!((all(&built), built.bytes()), (all(&overlay), overlay.bytes()));
        }
    }
}
