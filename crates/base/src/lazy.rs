//! Tables of words that take memory as they are filled.

use std::fmt;

use crate::lines::LineWords;

/// Words of a group.
const GROUP: usize = 128;
/// Words by which a group's memory grows and shrinks.
const STEP: usize = 4;
/// What the allocator takes for a block beside what it was asked for.
const BLOCK_BYTES: usize = 16;

/// A table of 64-bit words, zero at first. One that [grows](LazyWords::growing) keeps only the words that are not zero, and
/// a bitmap of where they are: 8 bytes for each of them and half a byte for each word of the table. When more of it is in use
/// than its share allows, it becomes an ordinary array, which is faster, and stays one. What is read is the same.
pub struct LazyWords {
    table: Table,
    len: usize,
}

enum Table {
    Whole(LineWords),
    Sparse {
        groups: Box<[Group]>,
        /// Words that are not zero, and how many of them there may be.
        used: usize,
        most: usize,
        /// Bytes of the groups' own memory.
        held: usize,
    },
}

/// [`GROUP`] words: which are not zero, and those in their order, with room behind them.
#[derive(Clone, Default)]
struct Group {
    /// In halves: shifts of 128 bits are many instructions, and so is counting where the processor does not.
    present: [u64; 2],
    words: Box<[u64]>,
}

impl Group {
    fn count(&self) -> usize {
        (self.present[0].count_ones() + self.present[1].count_ones()) as usize
    }

    /// How many words are kept before the one at `at`.
    #[inline]
    fn rank(&self, at: usize) -> usize {
        let [low, high] = self.present;
        let before = (1 << (at % 64)) - 1;
        let ones = if at < 64 {
            (low & before).count_ones()
        } else {
            low.count_ones() + (high & before).count_ones()
        };
        ones as usize
    }

    /// The eight words from `at` on, a multiple of eight. Not inlined: what an array needs beside it is a few instructions.
    #[inline(never)]
    fn line(&self, at: usize) -> [u64; 8] {
        let mut line = [0; 8];
        let mut left = (self.present[at / 64] >> (at % 64)) as u8;
        if left != 0 {
            let mut words = self.words[self.rank(at)..].iter();
            while left != 0 {
                line[left.trailing_zeros() as usize % 8] = *words.next().unwrap_or(&0);
                left &= left - 1;
            }
        }
        line
    }

    #[inline]
    fn has(&self, at: usize) -> bool {
        self.present[at / 64] >> (at % 64) & 1 == 1
    }

    fn resize(&mut self, count: usize, room: usize) {
        let mut words = Vec::with_capacity(room);
        words.extend_from_slice(&self.words[..count]);
        words.resize(room, 0);
        self.words = words.into_boxed_slice();
    }

    /// Changes a word; returns by how many the words in use and the words held have changed.
    fn set(&mut self, at: usize, value: u64) -> (isize, isize) {
        let (rank, count, before) = (self.rank(at), self.count(), self.words.len());
        match (self.has(at), value != 0) {
            (false, false) => return (0, 0),
            (true, true) => {
                self.words[rank] = value;
                return (0, 0);
            }
            (false, true) => {
                if count == before {
                    self.resize(count, (count + STEP).min(GROUP));
                }
                self.words.copy_within(rank..count, rank + 1);
                self.words[rank] = value;
                self.present[at / 64] |= 1 << (at % 64);
            }
            (true, false) => {
                self.words.copy_within(rank + 1..count, rank);
                self.present[at / 64] &= !(1 << (at % 64));
                if before - count >= 3 * STEP {
                    self.resize(count - 1, before - STEP);
                }
            }
        }
        (if value == 0 { -1 } else { 1 }, self.words.len() as isize - before as isize)
    }
}

impl LazyWords {
    /// `len` zero words that take their memory at once.
    pub fn whole(len: usize) -> LazyWords {
        LazyWords { table: Table::Whole(LineWords::zeroed(len)), len }
    }

    /// `len` zero words that take memory as they are used, until more than `percent` of them are not zero.
    pub fn growing(len: usize, percent: usize) -> LazyWords {
        let groups = vec![Group::default(); len.div_ceil(GROUP)].into_boxed_slice();
        let most = (len as u128 * percent.min(100) as u128 / 100) as usize;
        LazyWords { table: Table::Sparse { groups, used: 0, most, held: 0 }, len }
    }

    /// Number of words.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The words, where they are an array.
    #[inline]
    pub fn array(&self) -> Option<&[u64]> {
        match &self.table {
            Table::Whole(words) => Some(words),
            Table::Sparse { .. } => None,
        }
    }

    /// Word `index`.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    #[inline]
    pub fn get(&self, index: usize) -> u64 {
        match &self.table {
            Table::Whole(words) => words[index],
            Table::Sparse { groups, .. } => {
                assert!(index < self.len, "word {index} of {}", self.len);
                let (group, at) = (&groups[index / GROUP], index % GROUP);
                if group.has(at) { group.words[group.rank(at)] } else { 0 }
            }
        }
    }

    /// Eight words from `index` on, which must be a multiple of eight: a cache line.
    ///
    /// # Panics
    /// If the line is out of bounds, or `index` is no line's start.
    #[inline]
    pub fn line(&self, index: usize) -> [u64; 8] {
        assert!(index.is_multiple_of(8), "word {index} begins no line");
        match &self.table {
            Table::Whole(words) => *words[index..].first_chunk().expect("eight words"),
            Table::Sparse { groups, .. } => {
                assert!(index + 8 <= self.len, "line {index} of {}", self.len);
                groups[index / GROUP].line(index % GROUP)
            }
        }
    }

    /// Changes eight words from `index` on, which must be a multiple of eight.
    ///
    /// # Panics
    /// If the line is out of bounds, or `index` is no line's start.
    #[inline]
    pub fn set_line(&mut self, index: usize, line: &[u64; 8]) {
        assert!(index.is_multiple_of(8), "word {index} begins no line");
        match &mut self.table {
            Table::Whole(words) => words[index..index + 8].copy_from_slice(line),
            Table::Sparse { .. } => self.set_each(index, line),
        }
    }

    /// Changes those words that are others than before.
    #[inline(never)]
    fn set_each(&mut self, index: usize, line: &[u64; 8]) {
        let before = self.line(index);
        for (i, (&word, before)) in line.iter().zip(before).enumerate() {
            if word != before {
                self.set(index + i, word);
            }
        }
    }

    /// Changes word `index`.
    ///
    /// # Panics
    /// If `index` is out of bounds.
    #[inline]
    pub fn set(&mut self, index: usize, value: u64) {
        match &mut self.table {
            Table::Whole(words) => words[index] = value,
            Table::Sparse { groups, used, most, held } => {
                assert!(index < self.len, "word {index} of {}", self.len);
                let group = &mut groups[index / GROUP];
                let had = group.words.len();
                let (more, grown) = group.set(index % GROUP, value);
                let block = |words: usize| if words == 0 { 0 } else { words * 8 + BLOCK_BYTES };
                if grown != 0 {
                    *held = *held + block(group.words.len()) - block(had);
                }
                *used = used.saturating_add_signed(more);
                if *used > *most {
                    self.make_whole();
                }
            }
        }
    }

    #[cold]
    fn make_whole(&mut self) {
        let mut whole = LineWords::zeroed(self.len);
        if let Table::Sparse { groups, .. } = &mut self.table {
            for (number, group) in groups.iter_mut().enumerate() {
                let start = number * GROUP;
                for (at, &word) in (0..GROUP).filter(|&at| group.has(at)).zip(&group.words) {
                    whole[start + at] = word;
                }
                // Given back as it is copied: the two are never there whole at a time.
                *group = Group::default();
            }
            self.table = Table::Whole(whole);
        }
    }

    /// Asks for the cache line that says where word `index` is, unless that is known: before [`LazyWords::warm`], which
    /// would wait for it. Nothing when it is out of bounds.
    #[inline]
    pub fn expect(&self, index: usize) {
        if let Table::Sparse { groups, .. } = &self.table {
            crate::prefetch(groups, index / GROUP);
        }
    }

    /// Asks for the cache line of word `index`; nothing when it is out of bounds.
    #[inline]
    pub fn warm(&self, index: usize) {
        match &self.table {
            Table::Whole(words) => crate::prefetch(words, index),
            Table::Sparse { groups, .. } => {
                if let Some(group) = groups.get(index / GROUP) {
                    crate::prefetch(&group.words, group.rank(index % GROUP));
                }
            }
        }
    }

    /// Asks for the cache lines that change when word `index` does, which may not have been in use: where only words in use
    /// are kept, those behind it move.
    #[inline]
    pub fn warm_to_set(&self, index: usize) {
        match &self.table {
            Table::Whole(words) => crate::prefetch(words, index),
            Table::Sparse { groups, .. } => {
                if let Some(group) = groups.get(index / GROUP) {
                    let first = group.rank(index % GROUP);
                    (first..group.words.len()).step_by(8).for_each(|at| {
                        crate::prefetch(&group.words, at);
                    });
                }
            }
        }
    }

    /// Makes every word zero; what has become an array stays one.
    pub fn clear(&mut self) {
        match &mut self.table {
            Table::Whole(words) => words.fill(0),
            Table::Sparse { groups, used, held, .. } => {
                groups.fill(Group::default());
                (*used, *held) = (0, 0);
            }
        }
    }

    /// Bytes of memory that it takes now.
    pub fn held_bytes(&self) -> usize {
        match &self.table {
            Table::Whole(words) => words.memory_bytes(),
            Table::Sparse { groups, held, .. } => size_of_val(&**groups) + held,
        }
    }

    /// Bytes of the words alone, were all of them there.
    pub fn whole_bytes(&self) -> usize {
        self.len * size_of::<u64>()
    }
}

impl fmt::Debug for LazyWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = matches!(self.table, Table::Whole(_));
        f.debug_struct("LazyWords").field("len", &self.len).field("whole", &whole).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    /// Against a plain array: words, lines, memory, before and after it has become one.
    #[test]
    fn words_are_those_of_an_array() {
        for (len, percent) in [(1000, 100), (1000, 30), (128, 50), (130, 0), (8, 100)] {
            let mut rng = Rng::new(len as u64 + percent as u64);
            let mut lazy = LazyWords::growing(len, percent);
            let mut plain = vec![0u64; len];
            for step in 0..20_000 {
                let at = rng.below(len as u64) as usize;
                // More and more, and then fewer.
                let zero = rng.chance(if step < 10_000 { 0.3 } else { 0.9 });
                let value = if zero { 0 } else { rng.next_u64() | 1 };
                lazy.set(at, value);
                lazy.expect(at);
                lazy.warm(at);
                lazy.warm_to_set(at);
                plain[at] = value;
                let at = rng.below(len as u64) as usize;
                assert_eq!(lazy.get(at), plain[at]);
                let line = at / 8 * 8;
                if line + 8 <= len {
                    assert_eq!(lazy.line(line), plain[line..line + 8]);
                    if rng.chance(0.2) {
                        let mut new = lazy.line(line);
                        new[rng.below(8) as usize] = if zero { 0 } else { rng.next_u64() };
                        lazy.set_line(line, &new);
                        plain[line..line + 8].copy_from_slice(&new);
                    }
                }
                let used = plain.iter().filter(|&&w| w != 0).count();
                if let Table::Sparse { groups, used: counted, most, held } = &lazy.table {
                    assert_eq!((used, *most), (*counted, len * percent / 100));
                    assert!(used <= *most);
                    let words: usize = groups.iter().map(|g| g.words.len()).sum();
                    let blocks = groups.iter().filter(|g| !g.words.is_empty()).count();
                    assert_eq!(*held, words * 8 + blocks * BLOCK_BYTES);
                    assert!(words <= used + groups.len() * 4 * STEP);
                } else {
                    assert!(lazy.held_bytes() >= lazy.whole_bytes());
                }
            }
            assert!((0..len).all(|i| lazy.get(i) == plain[i]));
            assert_eq!(matches!(lazy.table, Table::Whole(_)), percent < 70, "{len} {percent}");
        }
    }

    #[test]
    fn clearing_leaves_zeros() {
        for mut lazy in [LazyWords::growing(300, 50), LazyWords::growing(300, 1)] {
            let empty = lazy.held_bytes();
            for i in 0..60 {
                lazy.set(i * 5, 9);
            }
            let whole = matches!(lazy.table, Table::Whole(_));
            lazy.clear();
            assert!((0..300).all(|i| lazy.get(i) == 0));
            assert_eq!(lazy.held_bytes() == empty, !whole);
            lazy.set(7, 3);
            assert_eq!((lazy.get(7), lazy.get(8)), (3, 0));
        }
    }

    #[test]
    fn a_table_that_is_hardly_used_takes_little() {
        let mut lazy = LazyWords::growing(1 << 20, 50);
        assert!(lazy.held_bytes() * 20 < lazy.whole_bytes());
        let mut rng = Rng::new(7);
        for _ in 0..1 << 16 {
            lazy.set(rng.below(1 << 20) as usize, 1);
        }
        assert!(lazy.held_bytes() < lazy.whole_bytes() / 5, "{}", lazy.held_bytes());
    }

    #[test]
    #[should_panic(expected = "word 8 of 8")]
    fn out_of_bounds_is_refused() {
        LazyWords::growing(8, 100).get(8);
    }
}
