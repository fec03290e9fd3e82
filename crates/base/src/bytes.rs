//! The bytes of a cache line, looked at all at once.

/// A line as words, its lowest byte first.
type Line = [u64; 8];

/// Which of the bytes are this one: a bit for each, the lowest for the first.
#[inline]
pub fn equal(line: &Line, byte: u8) -> u64 {
    lanes::equal(line, byte)
}

/// The greatest byte.
#[inline]
pub fn greatest(line: &Line) -> u8 {
    lanes::greatest(line)
}

#[cfg(target_arch = "x86_64")]
mod lanes {
    use std::arch::x86_64::{
        __m128i, _mm_cmpeq_epi8, _mm_cvtsi128_si32, _mm_max_epu8, _mm_movemask_epi8,
        _mm_set_epi64x, _mm_set1_epi8, _mm_srli_si128,
    };

    use super::Line;

    /// Sixteen bytes each.
    #[inline]
    #[target_feature(enable = "sse2")]
    fn quarters(line: &Line) -> [__m128i; 4] {
        let [a, b, c, d, e, f, g, h] = line.map(u64::cast_signed);
        [_mm_set_epi64x(b, a), _mm_set_epi64x(d, c), _mm_set_epi64x(f, e), _mm_set_epi64x(h, g)]
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    fn equal_by_sixteen(line: &Line, byte: u8) -> u64 {
        let byte = _mm_set1_epi8(byte.cast_signed());
        let [a, b, c, d] = quarters(line);
        [d, c, b, a].into_iter().fold(0, |all, quarter| {
            let alike = _mm_movemask_epi8(_mm_cmpeq_epi8(quarter, byte));
            all << 16 | u64::from(alike as u16)
        })
    }

    #[inline]
    #[target_feature(enable = "sse2")]
    fn greatest_by_sixteen(line: &Line) -> u8 {
        let [a, b, c, d] = quarters(line);
        let all = _mm_max_epu8(_mm_max_epu8(a, b), _mm_max_epu8(c, d));
        let all = _mm_max_epu8(all, _mm_srli_si128::<8>(all));
        let all = _mm_max_epu8(all, _mm_srli_si128::<4>(all));
        let all = _mm_max_epu8(all, _mm_srli_si128::<2>(all));
        let all = _mm_max_epu8(all, _mm_srli_si128::<1>(all));
        _mm_cvtsi128_si32(all) as u8
    }

    #[inline]
    pub(super) fn equal(line: &Line, byte: u8) -> u64 {
        // SAFETY: every x86-64 processor has SSE2.
        unsafe { equal_by_sixteen(line, byte) }
    }

    #[inline]
    pub(super) fn greatest(line: &Line) -> u8 {
        // SAFETY: every x86-64 processor has SSE2.
        unsafe { greatest_by_sixteen(line) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
use portable as lanes;

#[cfg(any(test, not(target_arch = "x86_64")))]
mod portable {
    use super::Line;

    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;

    #[inline]
    pub(super) fn equal(line: &Line, byte: u8) -> u64 {
        line.iter().rev().fold(0, |all, word| {
            let x = word ^ u64::from_ne_bytes([byte; 8]);
            // The upper bit of each byte that is zero; then these eight beside each other.
            let zero = !(((x & LOW) + LOW) | x | LOW) >> 7;
            all << 8 | zero.wrapping_mul(0x0102_0408_1020_4080) >> 56
        })
    }

    #[inline]
    pub(super) fn greatest(line: &Line) -> u8 {
        line.iter().flat_map(|word| word.to_le_bytes()).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    /// Beside the bytes looked at one after another.
    #[test]
    fn all_at_once_is_one_after_another() {
        let mut rng = Rng::new(1);
        for _ in 0..20_000 {
            let few = 1 + rng.below(256);
            let bytes: [u8; 64] = std::array::from_fn(|_| rng.below(few) as u8);
            let line: Line = std::array::from_fn(|word| {
                u64::from_le_bytes(std::array::from_fn(|at| bytes[word * 8 + at]))
            });
            let byte = rng.below(few) as u8;
            let alike = (0..64).filter(|&at| bytes[at] == byte).fold(0, |all, at| all | 1 << at);
            assert_eq!((equal(&line, byte), portable::equal(&line, byte)), (alike, alike));
            let most = bytes.into_iter().max().unwrap();
            assert_eq!((greatest(&line), portable::greatest(&line)), (most, most));
        }
    }
}
