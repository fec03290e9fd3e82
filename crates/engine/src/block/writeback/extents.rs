//! Extents by their first byte, in little memory: what the [`Overlay`](super::overlay::Overlay) is kept in.
//!
//! ```text
//! leaves by a lower bound of their addresses ──▶ up to 128 extents of 13 bytes, in order
//! ```
//!
//! An extent has the low 40 bits of its address; the others are its leaf's, which reaches over no multiple of 1 TiB. A leaf grows by 16 extents, not to
//! twice its size, so it has 8 to spare on the average. One that is full is cut in half, or, where extents come in order, left full; one that gets empty
//! is joined with its neighbour. That makes 15 bytes an extent in all, where a `BTreeMap` takes 25 to 50.

use std::collections::BTreeMap;
use std::ops::Bound;

/// Most extents of a leaf.
const MOST: usize = 128;
/// A leaf with fewer is joined with its neighbour, if both have no more than `JOINED`.
const FEW: usize = 32;
const JOINED: usize = 96;
/// So many more find room in a leaf that grows.
const STEP: usize = 16;
/// Bits of an address that are an extent's own.
const LOW: u32 = 40;

/// What of an extent is the overlay's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word {
    /// Length and kind.
    pub len: u32,
    /// The low half of the sequence.
    pub sequence: u32,
}

/// Without gaps between the fields: each is copied when it is looked at.
#[derive(Clone, Copy, Debug)]
#[repr(C, packed)]
struct Extent {
    low: u32,
    high: u8,
    len: u32,
    sequence: u32,
}

const _: () = assert!(size_of::<Extent>() == 13, "memory of each dirty extent");

impl Extent {
    fn new(at: u64, word: Word) -> Extent {
        let Word { len, sequence } = word;
        Extent { low: at as u32, high: (at >> 32) as u8, len, sequence }
    }

    /// The low bits of its address.
    fn low(&self) -> u64 {
        u64::from(self.high) << 32 | u64::from(self.low)
    }

    fn at(&self, leaf: u64) -> u64 {
        (leaf >> LOW << LOW) + self.low()
    }

    fn word(&self) -> Word {
        Word { len: self.len, sequence: self.sequence }
    }
}

/// Extents in order. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Extents {
    /// By an address that none of theirs is below, and that is above those of the leaf before. None is empty.
    leaves: BTreeMap<u64, Vec<Extent>>,
    len: usize,
}

/// Where an address is or would be in a leaf.
fn find(leaf: &[Extent], at: u64) -> usize {
    let low = at & ((1 << LOW) - 1);
    leaf.partition_point(|extent| extent.low() < low)
}

/// The same in another leaf or none: an address may lie in another stretch of 1 TiB.
fn below(key: u64, leaf: &[Extent], at: u64) -> usize {
    match (at >> LOW).cmp(&(key >> LOW)) {
        std::cmp::Ordering::Less => 0,
        std::cmp::Ordering::Equal => find(leaf, at),
        std::cmp::Ordering::Greater => leaf.len(),
    }
}

fn same(a: u64, b: u64) -> bool {
    a >> LOW == b >> LOW
}

impl Extents {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The last one before this address, and all behind it.
    pub(super) fn around(&self, at: u64) -> impl Iterator<Item = (u64, Word)> + use<'_> {
        let mut leaves = self.leaves.range(..=at).rev();
        let (key, leaf, first) = match leaves.next() {
            Some((&key, leaf)) => match below(key, leaf, at).checked_sub(1) {
                Some(before) => (key, leaf.as_slice(), before),
                // A leaf's first address may be above its bound.
                None => leaves.next().map_or((key, leaf.as_slice(), 0), |(&key, leaf)| {
                    (key, leaf.as_slice(), leaf.len().saturating_sub(1))
                }),
            },
            None => (at, &[][..], 0),
        };
        // Further leaves are looked for when they are wanted: most who ask want none.
        let further = std::iter::once(()).flat_map(move |()| {
            let from = if leaf.is_empty() { Bound::Included(key) } else { Bound::Excluded(key) };
            self.leaves.range((from, Bound::Unbounded))
        });
        let of = |key: u64| move |extent: &Extent| (extent.at(key), extent.word());
        let here = leaf.get(first..).unwrap_or_default().iter().map(of(key));
        here.chain(further.flat_map(move |(&key, leaf)| leaf.iter().map(of(key))))
    }

    /// Puts one where none begins.
    pub(super) fn insert(&mut self, at: u64, word: Word) {
        self.len += 1;
        let extent = Extent::new(at, word);
        let before = self.leaves.range_mut(..=at).next_back();
        let Some((&key, leaf)) = before.filter(|(key, _)| same(**key, at)) else {
            return self.insert_first(at, extent);
        };
        let i = find(leaf, at);
        if leaf.len() < MOST {
            return put(leaf, i, extent);
        }
        if i == leaf.len() {
            // They come in order.
            let mut leaf = Vec::new();
            put(&mut leaf, 0, extent);
            self.leaves.insert(at, leaf);
            return;
        }
        let mut behind = Vec::new();
        behind.reserve_exact(MOST / 2 + STEP);
        behind.extend(leaf.drain(MOST / 2..));
        leaf.shrink_to(MOST / 2 + STEP);
        let (bound, first) = (key, behind.first().map_or(at, |first| first.at(key)));
        match at < first {
            true => put(leaf, i, extent),
            false => put(&mut behind, i - MOST / 2, extent),
        }
        debug_assert!(bound < first);
        self.leaves.insert(first, behind);
    }

    /// One that is below all of the leaves of its stretch.
    fn insert_first(&mut self, at: u64, extent: Extent) {
        let next = self.leaves.range(at..).next().map(|(&key, leaf)| (key, leaf.len()));
        let mut leaf = match next {
            Some((key, len)) if same(key, at) && len < MOST => {
                self.leaves.remove(&key).unwrap_or_default()
            }
            _ => Vec::new(),
        };
        put(&mut leaf, 0, extent);
        self.leaves.insert(at, leaf);
    }

    /// What begins here is this now. False if nothing does.
    pub(super) fn set(&mut self, at: u64, word: Word) -> bool {
        let leaf = self.leaves.range_mut(..=at).next_back();
        let Some((_, leaf)) = leaf.filter(|(key, _)| same(**key, at)) else { return false };
        let i = find(leaf, at);
        let extent = leaf.get_mut(i).filter(|extent| extent.low() == at & ((1 << LOW) - 1));
        extent.map(|extent| *extent = Extent::new(at, word)).is_some()
    }

    /// Takes out the one that begins here.
    pub(super) fn remove(&mut self, at: u64) {
        let leaf = self.leaves.range_mut(..=at).next_back();
        let Some((&key, leaf)) = leaf.filter(|(key, _)| same(**key, at)) else { return };
        let i = find(leaf, at);
        if leaf.get(i).is_none_or(|extent| extent.at(key) != at) {
            return;
        }
        leaf.remove(i);
        self.len -= 1;
        if leaf.is_empty() {
            self.leaves.remove(&key);
            return;
        }
        if leaf.capacity() - leaf.len() >= 2 * STEP {
            leaf.shrink_to(leaf.len().next_multiple_of(STEP));
        }
        if leaf.len() < FEW {
            self.join(key);
        }
    }

    /// A leaf has few: it is joined with the next or the one before, if those have few enough.
    fn join(&mut self, key: u64) {
        let next = self.leaves.range(key + 1..).next().map(|(&next, _)| (key, next));
        let before = self.leaves.range(..key).next_back().map(|(&before, _)| (before, key));
        let len = |key: u64| self.leaves.get(&key).map_or(0, Vec::len);
        let fits = |&(a, b): &(u64, u64)| same(a, b) && len(a) + len(b) <= JOINED;
        let Some((a, b)) = next.into_iter().chain(before).find(fits) else { return };
        let behind = self.leaves.remove(&b).unwrap_or_default();
        if let Some(leaf) = self.leaves.get_mut(&a) {
            let all = (leaf.len() + behind.len()).next_multiple_of(STEP);
            leaf.reserve_exact(all - leaf.len());
            leaf.extend(behind);
        }
    }

    /// Of extents that are in order.
    #[cfg(test)]
    pub(super) fn of(all: impl IntoIterator<Item = (u64, Word)>) -> Extents {
        let mut comes = InOrder::default();
        all.into_iter().for_each(|(at, word)| comes.push(at, word));
        comes.all()
    }

    fn add(&mut self, (key, mut leaf): (u64, Vec<Extent>)) {
        if !leaf.is_empty() {
            leaf.shrink_to_fit();
            self.len += leaf.len();
            self.leaves.insert(key, leaf);
        }
    }
}

/// Extents that come in order, one by one.
#[derive(Debug, Default)]
pub(super) struct InOrder {
    extents: Extents,
    leaf: (u64, Vec<Extent>),
}

impl InOrder {
    /// The next, behind all that have come.
    pub(super) fn push(&mut self, at: u64, word: Word) {
        if self.leaf.1.len() == JOINED || !same(self.leaf.0, at) {
            self.extents.add(std::mem::take(&mut self.leaf));
        }
        if self.leaf.1.is_empty() {
            self.leaf.0 = at;
        }
        put(&mut self.leaf.1, usize::MAX, Extent::new(at, word));
    }

    /// All of them.
    pub(super) fn all(mut self) -> Extents {
        self.extents.add(self.leaf);
        self.extents
    }
}

/// Puts an extent at this place of a leaf, or behind all.
fn put(leaf: &mut Vec<Extent>, at: usize, extent: Extent) {
    if leaf.len() == leaf.capacity() {
        leaf.reserve_exact(STEP);
    }
    leaf.insert(at.min(leaf.len()), extent);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Puts them in and out, and compares with a map.
    fn compare(steps: Vec<(u64, bool)>) -> Extents {
        let (mut extents, mut plain) = (Extents::default(), BTreeMap::new());
        for (n, (at, comes)) in steps.into_iter().enumerate() {
            let word = Word { len: n as u32, sequence: at as u32 };
            match (comes, plain.contains_key(&at)) {
                (true, true) => assert!(extents.set(at, word)),
                (true, false) => {
                    assert!(!extents.set(at, word));
                    extents.insert(at, word);
                }
                (false, _) => extents.remove(at),
            }
            match comes {
                true => plain.insert(at, word),
                false => plain.remove(&at),
            };
            let before = plain.range(..at).next_back();
            let around = before.into_iter().chain(plain.range(at..)).map(|(&at, &word)| (at, word));
            assert!(extents.around(at).take(150).eq(around.take(150)));
            assert_eq!(extents.len(), plain.len());
        }
        assert!(extents.around(0).eq(plain.iter().map(|(&at, &word)| (at, word))));
        let spare = |leaf: &Vec<Extent>| leaf.capacity() - leaf.len() <= 2 * STEP;
        assert!(extents.leaves.values().all(|leaf| !leaf.is_empty() && spare(leaf)));
        let built = Extents::of(plain.iter().map(|(&at, &word)| (at, word)));
        assert!(built.around(0).eq(extents.around(0)) && built.len() == extents.len());
        extents
    }

    proptest! {
        #[test]
        fn extents_are_those_of_a_plain_map(
            steps in prop::collection::vec((0..600u64, prop::bool::weighted(0.6)), 0..3000),
            scale in prop::sample::select(vec![1u64, 4096, (1 << 40) - 1, 1 << 38, (1 << 40) / 77]),
        ) {
            compare(steps.into_iter().map(|(at, comes)| (at * scale, comes)).collect());
        }
    }

    #[test]
    fn extents_that_come_in_order_fill_their_leaves_whichever_way_they_come() {
        let up = compare((0..1280).map(|n| (n << 12, true)).collect());
        assert_eq!(up.leaves.len(), 10);
        let down = compare((0..1280).rev().map(|n| (n << 12, true)).collect());
        assert_eq!(down.leaves.len(), 10);
    }

    #[test]
    fn leaves_that_get_empty_are_joined() {
        let come = (0..4096).map(|n| ((n * 613 % 4096) << 12, true));
        let go = (0..4096).map(|n| n * 359 % 4096).filter(|n| n % 16 > 0).map(|n| (n << 12, false));
        let few = compare(come.chain(go).collect());
        assert!(few.len() == 256 && few.leaves.len() <= 12, "{} leaves", few.leaves.len());
    }
}
