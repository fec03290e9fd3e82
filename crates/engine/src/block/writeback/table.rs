//! Rows of numbers that come at the end and go at the front, in little memory: what is kept of each record that is dirty.
//!
//! The last rows are kept as they are. Whenever there are [`BLOCK`] of them they become a block, in which each column takes no more bits than its numbers
//! differ by:
//!
//! ```text
//! base of each column | width and shift of each | row | row | ...        a number = base + (bits of the row << shift)
//! ```
//!
//! Records that follow each other have much in common (kind and length, the batch, the place in the log up to a few blocks), so a row of 32 bytes
//! takes 6 to 10. A block has its own size, and there is one growing array alone, that of the blocks: 1/4 byte a row.

use std::collections::VecDeque;

/// Rows of a block.
const BLOCK: usize = 64;
/// Bits that say how wide a column is, and how far it is shifted.
const WIDTH: u32 = 7;
const SHIFT: u32 = 6;

/// Rows of `N` numbers: at most 4. See the [module](self).
#[derive(Debug)]
pub(super) struct Table<const N: usize> {
    blocks: VecDeque<Box<[u64]>>,
    /// The rows behind those of the blocks.
    open: Vec<[u64; N]>,
    /// Rows at the front that are gone.
    gone: usize,
    /// Rows that were looked at.
    #[cfg(test)]
    pub(super) looks: std::cell::Cell<u64>,
}

impl<const N: usize> Default for Table<N> {
    fn default() -> Table<N> {
        const { assert!(N > 0 && N as u32 * (WIDTH + SHIFT) <= 64, "one word says all widths") }
        Table {
            blocks: VecDeque::new(),
            open: Vec::new(),
            gone: 0,
            #[cfg(test)]
            looks: std::cell::Cell::default(),
        }
    }
}

impl<const N: usize> Table<N> {
    /// How many rows there are.
    pub(super) fn len(&self) -> usize {
        self.blocks.len() * BLOCK + self.open.len() - self.gone
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// So many rows come at once.
    pub(super) fn reserve(&mut self, rows: usize) {
        self.blocks.reserve_exact(rows.div_ceil(BLOCK));
    }

    /// The row at this place, counted from the first that there is.
    pub(super) fn get(&self, at: usize) -> Option<[u64; N]> {
        let (block, row) = self.place(at);
        match self.blocks.get(block) {
            Some(block) => Some(unpack(block, row)),
            None => self.open.get(self.in_open(at)?).copied(),
        }
    }

    /// One number of that row.
    pub(super) fn column(&self, at: usize, column: usize) -> Option<u64> {
        let (block, row) = self.place(at);
        match self.blocks.get(block) {
            Some(block) => Some(number::<N>(block, row, column)),
            None => self.open.get(self.in_open(at)?).map(|row| row[column]),
        }
    }

    /// The block of a row, and which of it.
    fn place(&self, at: usize) -> (usize, usize) {
        #[cfg(test)]
        self.looks.set(self.looks.get() + 1);
        let at = at.saturating_add(self.gone);
        (at / BLOCK, at % BLOCK)
    }

    fn in_open(&self, at: usize) -> Option<usize> {
        at.saturating_add(self.gone).checked_sub(self.blocks.len() * BLOCK)
    }

    /// The first row.
    pub(super) fn first(&self) -> Option<[u64; N]> {
        self.get(0)
    }

    /// The last row.
    pub(super) fn last(&self) -> Option<[u64; N]> {
        self.get(self.len().checked_sub(1)?)
    }

    /// How many rows at the front are such; those behind them are not.
    pub(super) fn partition_point(&self, mut is: impl FnMut(usize) -> bool) -> usize {
        let (mut from, mut to) = (0, self.len());
        while from < to {
            let middle = from + (to - from) / 2;
            match is(middle) {
                true => from = middle + 1,
                false => to = middle,
            }
        }
        from
    }

    /// How many rows at the front have less than this in a column, in which they rise.
    pub(super) fn below(&self, column: usize, number: u64) -> usize {
        self.partition_point(|at| self.column(at, column).is_some_and(|n| n < number))
    }

    /// One more row.
    pub(super) fn push(&mut self, row: [u64; N]) {
        if self.open.len() == self.open.capacity() {
            // Not more than a block ever has.
            let more = self.open.len().max(4).min(BLOCK - self.open.len());
            self.open.reserve_exact(more);
        }
        self.open.push(row);
        if self.open.len() == BLOCK {
            self.blocks.push_back(pack(&self.open));
            self.open.clear();
        }
    }

    /// Takes the first row.
    pub(super) fn pop(&mut self) -> Option<[u64; N]> {
        let row = self.first()?;
        self.gone += 1;
        if self.gone == BLOCK {
            self.blocks.pop_front();
            self.gone = 0;
            if self.blocks.capacity() > 64 && self.blocks.len() * 4 < self.blocks.capacity() {
                self.blocks.shrink_to(self.blocks.len() * 2);
            }
        }
        if self.is_empty() {
            // All that there were are of the open block.
            self.open.clear();
            self.gone = 0;
        }
        Some(row)
    }

    /// No rows.
    pub(super) fn clear(&mut self) {
        *self = Table::default();
    }

    /// Another row in place of one.
    pub(super) fn set(&mut self, at: usize, row: [u64; N]) {
        let (block, of) = self.place(at);
        let in_open = self.in_open(at);
        if let Some(block) = self.blocks.get_mut(block) {
            let mut rows: Vec<[u64; N]> = (0..BLOCK).map(|row| unpack(block, row)).collect();
            rows[of] = row;
            *block = pack(&rows);
        } else if let Some(old) = in_open.and_then(|at| self.open.get_mut(at)) {
            *old = row;
        }
    }

    /// A row before that at this place: a step for each behind it.
    pub(super) fn insert(&mut self, at: usize, row: [u64; N]) {
        let behind: Vec<[u64; N]> = (at..self.len()).filter_map(|at| self.get(at)).collect();
        let (whole, rest) = self.place(at);
        if let Some(block) = self.blocks.get(whole) {
            self.open = (0..rest).map(|row| unpack(block, row)).collect();
            self.blocks.truncate(whole);
        } else {
            self.open.truncate(rest);
        }
        self.push(row);
        behind.into_iter().for_each(|row| self.push(row));
    }
}

/// Rows in as few bits as they take.
fn pack<const N: usize>(rows: &[[u64; N]]) -> Box<[u64]> {
    let (mut base, mut bits) = ([u64::MAX; N], [0; N]);
    for row in rows {
        (0..N).for_each(|n| base[n] = base[n].min(row[n]));
    }
    for row in rows {
        (0..N).for_each(|n| bits[n] |= row[n] - base[n]);
    }
    let mut columns = [(0, 0); N];
    let (mut words, mut all) = (0, 0);
    for n in 0..N {
        let shift = if bits[n] == 0 { 0 } else { bits[n].trailing_zeros() };
        let width = u64::BITS - (bits[n] >> shift).leading_zeros();
        columns[n] = (shift, width);
        words |= u64::from(shift | width << SHIFT) << (n as u32 * (WIDTH + SHIFT));
        all += width as usize;
    }
    let mut packed = vec![0; N + 1 + (rows.len() * all).div_ceil(64)].into_boxed_slice();
    packed[..N].copy_from_slice(&base);
    packed[N] = words;
    let mut at = 0;
    for row in rows {
        for n in 0..N {
            let (shift, width) = columns[n];
            if width == 0 {
                continue;
            }
            let bits = (row[n] - base[n]) >> shift;
            let (word, of) = (N + 1 + at / 64, at as u32 % 64);
            packed[word] |= bits << of;
            if of + width > 64 {
                packed[word + 1] |= bits >> (64 - of);
            }
            at += width as usize;
        }
    }
    packed
}

fn unpack<const N: usize>(block: &[u64], row: usize) -> [u64; N] {
    let columns = columns::<N>(block[N]);
    let all: u32 = columns.iter().map(|column| column.1).sum();
    let mut at = row * all as usize;
    std::array::from_fn(|n| {
        let (shift, width) = columns[n];
        let number = block[n] + (take(&block[N + 1..], at, width) << shift);
        at += width as usize;
        number
    })
}

fn number<const N: usize>(block: &[u64], row: usize, column: usize) -> u64 {
    let columns = columns::<N>(block[N]);
    let all: u32 = columns.iter().map(|column| column.1).sum();
    let before: u32 = columns[..column].iter().map(|column| column.1).sum();
    let (shift, width) = columns[column];
    block[column] + (take(&block[N + 1..], row * all as usize + before as usize, width) << shift)
}

/// Shift and width of each column.
fn columns<const N: usize>(words: u64) -> [(u32, u32); N] {
    std::array::from_fn(|n| {
        let word = (words >> (n as u32 * (WIDTH + SHIFT))) as u32;
        (word & ((1 << SHIFT) - 1), word >> SHIFT & ((1 << WIDTH) - 1))
    })
}

/// So many bits.
fn take(words: &[u64], at: usize, width: u32) -> u64 {
    if width == 0 {
        return 0;
    }
    let (word, of) = (at / 64, at as u32 % 64);
    let low = words[word] >> of;
    let bits = if of + width > 64 { low | words[word + 1] << (64 - of) } else { low };
    bits & (u64::MAX >> (64 - width))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        Push(u8, [u64; 3]),
        Pop(u8),
        Set(prop::sample::Index, [u64; 3]),
        Insert(prop::sample::Index, [u64; 3]),
        Clear,
    }

    fn numbers() -> impl Strategy<Value = [u64; 3]> {
        let number = prop_oneof![
            Just(0u64),
            Just(u64::MAX),
            any::<u64>(),
            (0..1000u64).prop_map(|n| n << 12),
            1_000_000..1_000_010u64,
        ];
        [number.clone(), number.clone(), number]
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let at = any::<prop::sample::Index>;
        let step = prop_oneof![
            6 => (1..80u8, numbers()).prop_map(|(n, row)| Step::Push(n, row)),
            4 => (1..80u8).prop_map(Step::Pop),
            2 => (at(), numbers()).prop_map(|(at, row)| Step::Set(at, row)),
            2 => (at(), numbers()).prop_map(|(at, row)| Step::Insert(at, row)),
            1 => Just(Step::Clear),
        ];
        prop::collection::vec(step, 1..40)
    }

    proptest! {
        #[test]
        fn a_table_has_the_rows_that_a_plain_queue_has(steps in steps()) {
            let (mut table, mut plain) = (Table::<3>::default(), VecDeque::new());
            for step in steps {
                match step {
                    Step::Push(n, row) => {
                        for n in 0..u64::from(n) {
                            let row = [row[0].wrapping_add(n), row[1], row[2].wrapping_mul(n)];
                            table.push(row);
                            plain.push_back(row);
                        }
                    }
                    Step::Pop(n) => {
                        for _ in 0..n {
                            assert_eq!(table.pop(), plain.pop_front());
                        }
                    }
                    Step::Set(at, row) if !plain.is_empty() => {
                        let at = at.index(plain.len());
                        table.set(at, row);
                        plain[at] = row;
                    }
                    Step::Insert(at, row) => {
                        let at = at.index(plain.len() + 1);
                        table.insert(at, row);
                        plain.insert(at, row);
                    }
                    Step::Clear => {
                        table.clear();
                        plain.clear();
                    }
                    Step::Set(..) => {}
                }
                assert_eq!((table.len(), table.is_empty()), (plain.len(), plain.is_empty()));
                assert_eq!((table.first(), table.last()), (plain.front().copied(), plain.back().copied()));
                for at in 0..plain.len() + 70 {
                    assert_eq!(table.get(at), plain.get(at).copied());
                    for column in 0..3 {
                        assert_eq!(table.column(at, column), plain.get(at).map(|row| row[column]));
                    }
                }
            }
        }
    }

    #[test]
    fn how_many_rows_are_below_a_number_is_counted() {
        let mut table = Table::<2>::default();
        (0..200).for_each(|n| table.push([n / 2 * 10, n]));
        (0..10).for_each(|_| assert!(table.pop().is_some()));
        assert_eq!((table.below(0, 0), table.below(0, 51), table.below(0, 5000)), (0, 2, 190));
        assert_eq!((table.below(1, 10), table.below(1, 11), table.below(1, 199)), (0, 1, 189));
    }

    #[test]
    fn records_that_follow_each_other_take_few_bytes() {
        let mut table = Table::<4>::default();
        let mut at = 1;
        for n in 0..64 {
            at = at * 48_271 % 0x7fff_ffff;
            table.push([(at % (1 << 28)) << 12, 4096 << 2, (1 << 33) + n * 4608, (1 << 40) + n]);
        }
        // 28 bits of an address, none of kind and length, 10 of a place in steps of 4,608 bytes, and 6 of a batch.
        assert!(table.blocks[0].len() * 8 <= 64 * 7, "{} words", table.blocks[0].len());
    }
}
