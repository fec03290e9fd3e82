//! How often each line was accessed: a sketch of fixed size with counters that age.
//!
//! Azor (Klonatos et al., MSST '11) keeps a counter for each block of the backing store, 256 MB for a TB, or allocates them as
//! blocks are seen. Here it is a count-min sketch with conservative update (Cormode and Muthukrishnan 2005; Estan and
//! Varghese 2002), so that memory follows from the cache and not from the backing store. The four counters of a line lie in one cache line.

use crate::block::LineId;
use crate::block::access::mix;

/// Counters of a line, each in its own quarter of the block.
const ROWS: usize = 4;
/// 64-bit words of a block, a cache line.
const WORDS: usize = 8;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Counts {
    blocks: Vec<[u64; WORDS]>,
    bits: u32,
    seed: u64,
    line_shift: u32,
    /// Accesses after which every counter has been halved once.
    sample: u64,
    /// Fraction of a block that is due to be halved, in `sample`ths.
    due: u64,
    next: usize,
}

impl Counts {
    /// At least `counters` counters of `bits` (4 or 8) bits for lines of `1 << line_shift` bytes; halved once in `sample`
    /// accesses.
    pub(super) fn new(counters: u64, bits: u32, sample: u64, line_shift: u32, seed: u64) -> Counts {
        let blocks = (counters * u64::from(bits)).div_ceil(64 * WORDS as u64).max(1) as usize;
        let sample = sample.max(1);
        Counts { blocks: vec![[0; WORDS]; blocks], bits, seed, line_shift, sample, due: 0, next: 0 }
    }

    fn top(&self) -> u64 {
        (1 << self.bits) - 1
    }

    /// The block of a line, and the word and shift of each of its counters.
    fn places(&self, line: LineId) -> (usize, [(usize, u32); ROWS]) {
        let hash = mix(self.seed, line.volume, line.offset >> self.line_shift);
        let block = ((u128::from(hash) * self.blocks.len() as u128) >> 64) as usize;
        // The high bits chose the block, the low ones choose in it: 5 bits a row are the most that is needed.
        let per_word = 64 / self.bits as usize;
        let row = |r: usize| {
            let at = (hash >> (8 * r)) as usize % (2 * per_word);
            (2 * r + at / per_word, (at % per_word) as u32 * self.bits)
        };
        (block, [row(0), row(1), row(2), row(3)])
    }

    /// Counts an access.
    pub(super) fn add(&mut self, line: LineId) {
        let top = self.top();
        let (block, places) = self.places(line);
        let words = &mut self.blocks[block];
        let least = places.iter().map(|&(w, shift)| words[w] >> shift & top).min().unwrap_or(0);
        if least < top {
            for (w, shift) in places {
                if words[w] >> shift & top == least {
                    words[w] += 1 << shift;
                }
            }
        }
        self.due += self.blocks.len() as u64;
        while self.due >= self.sample {
            self.due -= self.sample;
            self.halve_next();
        }
    }

    fn halve_next(&mut self) {
        let keep = if self.bits == 4 { 0x7777_7777_7777_7777 } else { 0x7f7f_7f7f_7f7f_7f7f };
        for word in &mut self.blocks[self.next] {
            *word = *word >> 1 & keep;
        }
        self.next = (self.next + 1) % self.blocks.len();
    }

    /// The estimate for a line: never below what was counted since its last halving, up to saturation.
    pub(super) fn of(&self, line: LineId) -> u32 {
        let (block, places) = self.places(line);
        let words = &self.blocks[block];
        places.iter().map(|&(w, shift)| (words[w] >> shift & self.top()) as u32).min().unwrap_or(0)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.blocks.capacity() * WORDS * 8
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;
    use crate::block::VolumeId;

    fn line(number: u64) -> LineId {
        LineId { volume: VolumeId(3), offset: number << 12 }
    }

    #[test]
    fn never_below_the_truth_and_seldom_above() {
        for bits in [4, 8] {
            let mut counts = Counts::new(8_000, bits, u64::MAX, 12, 1);
            let mut rng = Rng::new(2);
            let mut truth = [0u32; 1000];
            for _ in 0..5_000 {
                let n = rng.below(1000);
                counts.add(line(n));
                truth[n as usize] += 1;
            }
            let top = (1u32 << bits) - 1;
            let over =
                (0..1000).filter(|&n| counts.of(line(n)) > truth[n as usize].min(top)).count();
            for n in 0..1000 {
                assert!(counts.of(line(n)) >= truth[n as usize].min(top), "bits {bits} line {n}");
            }
            assert!(over < 30, "bits {bits}: {over} of 1000 are too high");
            assert_eq!(counts.of(LineId { volume: VolumeId(4), offset: 0 }), 0, "another volume's");
        }
    }

    #[test]
    fn everything_is_halved_once_in_a_sample() {
        for bits in [4, 8] {
            let mut counts = Counts::new(4096, bits, 1000, 12, 9);
            for block in &mut counts.blocks {
                *block =
                    [if bits == 4 { 0x6666_6666_6666_6666 } else { 0x0606_0606_0606_0606 }; WORDS];
            }
            for _ in 0..1000 {
                counts.add(line(5));
            }
            assert_eq!(counts.next, 0, "went around exactly once");
            let others = (100..200).filter(|&n| counts.of(line(n)) == 3).count();
            assert!(others > 90, "bits {bits}: {others}");
        }
    }

    #[test]
    fn saturates() {
        let mut counts = Counts::new(64, 4, u64::MAX, 12, 0);
        for _ in 0..100 {
            counts.add(line(1));
        }
        assert_eq!(counts.of(line(1)), 15);
    }
}
