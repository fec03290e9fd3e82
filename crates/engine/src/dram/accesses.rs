//! What an object in DRAM remembers of its accesses, in 51 bits: when the last one was, how many reads there were, and three
//! times between them.
//!
//! A time is kept as a floating-point number without a sign: short ones exactly, longer ones cut off. Nothing is added up, so
//! that cutting off does not add up either: each time is measured anew from when the object was written, which is known to the
//! millisecond.

use larder_policy::admission::Features;

/// Bits behind the leading one of the time from the write to the last access: exact up to 32 s, then cut off by less than
/// 1/16,384 of itself (5 s in a day).
const SPAN_BITS: u32 = 14;
/// Bits of [`Accesses::span_code`].
pub(super) const SPAN_CODE_BITS: u32 = 19;
/// The same of the times between reads: exact up to 15 ms, then cut off by less than an eighth of itself. Admission takes their
/// logarithms.
const GAP_BITS: u32 = 3;

/// `x` in `bits` bits behind the leading one: a code that grows with `x`, and no faster.
#[inline]
fn code(x: u32, bits: u32) -> u32 {
    // As many bits as are cut off: none of a number that has no more than one before them.
    let cut = (x | 1 << bits).ilog2() - bits;
    (cut << bits) + (x >> cut)
}

/// The least number of a code.
#[inline]
fn least(code: u32, bits: u32) -> u32 {
    match code >> bits {
        0 | 1 => code,
        e => (code & ((1 << bits) - 1) | 1 << bits) << (e - 1).min(31 - bits),
    }
}

/// The accesses of an object since it was written. Times are milliseconds that wrap after 49 days.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// From the write to the last access.
    span: u32,
    reads: u8,
    max_gap: u8,
    first_read: u8,
    last_gap: u8,
}

/// The longest time between two reads, that from the write to the first, and that between the last two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gaps {
    /// Longest time between two reads.
    pub max: u32,
    /// From the write to the first read.
    pub first_read: u32,
    /// Between the last two reads.
    pub last: u32,
}

impl Accesses {
    /// What is known of an object by other means: the last access came `span` after the write.
    pub fn known(span: u32, reads: u32, gaps: Gaps) -> Accesses {
        let gap = |x| code(x, GAP_BITS) as u8;
        Accesses {
            span: code(span, SPAN_BITS),
            reads: reads.min(u32::from(u8::MAX)) as u8,
            max_gap: gap(gaps.max),
            first_read: gap(gaps.first_read),
            last_gap: gap(gaps.last),
        }
    }

    /// From the write to the last access.
    #[inline]
    pub fn span(self) -> u32 {
        least(self.span, SPAN_BITS)
    }

    /// Reads since it was written, as far as 255.
    #[inline]
    pub fn reads(self) -> u32 {
        self.reads.into()
    }

    /// Times between reads.
    pub fn gaps(self) -> Gaps {
        let gap = |x| least(u32::from(x), GAP_BITS);
        Gaps { max: gap(self.max_gap), first_read: gap(self.first_read), last: gap(self.last_gap) }
    }

    /// Accessed at `now`, but not read.
    #[inline]
    pub(super) fn touch(&mut self, written: u32, now: u32) {
        self.span = code(now.wrapping_sub(written), SPAN_BITS);
    }

    /// Counts a read at `now`: the five features of Flashield §3.1.
    #[inline]
    pub(super) fn note_read(&mut self, written: u32, now: u32) {
        let span = now.wrapping_sub(written);
        if self.reads == 0 {
            self.first_read = code(span, GAP_BITS) as u8;
        } else {
            self.last_gap = code(span.wrapping_sub(self.span()), GAP_BITS) as u8;
            self.max_gap = self.max_gap.max(self.last_gap);
        }
        self.reads = self.reads.saturating_add(1);
        self.span = code(span, SPAN_BITS);
    }

    /// What admission sees of an object of this `age`.
    pub(super) fn features(self, age: u32, flash_bytes: u32) -> Features {
        let (reads, gaps) = (self.reads(), self.gaps());
        let span = self.span();
        let mean_gap = match reads {
            0 | 1 => 0,
            // The span is known more exactly than its parts are: what they allow bounds what is left between the first read and
            // the last.
            _ => {
                let between = u64::from(span.saturating_sub(gaps.first_read));
                let times = u64::from(reads - 1);
                let longest = u64::from(gaps.max);
                let most = longest * times + longest / 8 * times;
                (between.clamp(longest, most.max(longest)) / times) as u32
            }
        };
        Features {
            reads,
            mean_gap,
            last_gap: gaps.last,
            max_gap: gaps.max,
            first_read: gaps.first_read,
            age,
            idle: age.wrapping_sub(span),
            size: flash_bytes,
        }
    }

    /// The last access, as [`SPAN_CODE_BITS`] bits.
    #[inline]
    pub(super) fn span_code(self) -> u32 {
        self.span
    }

    /// What is counted of reads.
    #[inline]
    pub(super) fn read_bytes(self) -> [u8; 4] {
        [self.reads, self.max_gap, self.first_read, self.last_gap]
    }

    /// Back from [`Accesses::span_code`] and [`Accesses::read_bytes`].
    #[inline]
    pub(super) fn from_parts(span: u32, bytes: [u8; 4]) -> Accesses {
        let [reads, max_gap, first_read, last_gap] = bytes;
        Accesses { span, reads, max_gap, first_read, last_gap }
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    /// Numbers of every length, and those about the powers of two.
    fn numbers() -> impl Iterator<Item = u32> {
        let mut rng = Rng::new(1);
        let edges = (0..32).flat_map(|e| {
            let power = 1u32 << e;
            [power.wrapping_sub(1), power, power + 1, power | power >> 1, power | power >> 4]
        });
        let random: Vec<u32> =
            (0..20_000).map(|_| (rng.next_u64() as u32) >> rng.below(32)).collect();
        edges.chain(random).chain([u32::MAX])
    }

    #[test]
    fn codes_grow_with_the_number_and_lose_little_of_it() {
        for (bits, most) in [(SPAN_BITS, 1 << SPAN_CODE_BITS), (GAP_BITS, 1 << 8)] {
            let mut all: Vec<u32> = numbers().collect();
            all.sort_unstable();
            let mut last = 0;
            for x in all {
                let c = code(x, bits);
                assert!(c >= last && c < most, "{x}: {c} after {last}");
                last = c;
                let back = least(c, bits);
                assert!(back <= x && x - back <= x >> bits, "{x}: {back}");
                assert_eq!(code(back, bits), c, "what was cut off stays as it is");
                assert!(x >= 2 << bits || back == x, "{x} is exact");
            }
        }
    }

    #[test]
    fn every_code_has_a_number() {
        for bits in [SPAN_BITS, GAP_BITS] {
            for c in 0..=code(u32::MAX, bits) {
                assert_eq!(code(least(c, bits), bits), c);
            }
        }
        // None that cannot be made is read as less than the greatest.
        assert!(least(u8::MAX.into(), GAP_BITS) >= 1 << 31);
        assert!(least((1 << SPAN_CODE_BITS) - 1, SPAN_BITS) >= 1 << 31);
    }

    /// Each field is what it was, alone, whatever the others are.
    #[test]
    fn fields_do_not_touch_each_other() {
        let mut rng = Rng::new(7);
        for _ in 0..5_000 {
            let mut draw = || (rng.next_u64() as u32) >> rng.below(32);
            let (span, reads, max, first_read, last) = (draw(), draw(), draw(), draw(), draw());
            let a = Accesses::known(span, reads, Gaps { max, first_read, last });
            let alone = |x: u32, bits| least(code(x, bits), bits);
            assert_eq!((a.span(), a.reads()), (alone(span, SPAN_BITS), reads.min(255)));
            let [max, first_read, last] = [max, first_read, last].map(|x| alone(x, GAP_BITS));
            assert_eq!(a.gaps(), Gaps { max, first_read, last });
            assert_eq!(Accesses::from_parts(a.span_code(), a.read_bytes()), a);
            assert_eq!(Accesses::known(a.span(), a.reads(), a.gaps()), a);
        }
    }

    #[test]
    fn reads_are_counted_as_far_as_they_go() {
        let mut a = Accesses::default();
        for read in 1..=1000 {
            a.note_read(0, read);
            assert_eq!(a.reads(), read.min(255));
        }
    }

    /// Beside what would be known if every time were kept in 32 bits.
    #[test]
    fn features_are_near_the_exact_ones() {
        for seed in 0..400 {
            let mut rng = Rng::new(seed);
            let written = rng.next_u64() as u32;
            let scale = 1 + rng.below(20);
            let (mut a, mut now) = (Accesses::default(), written);
            let (mut times, mut gaps) = (Vec::new(), Vec::new());
            for _ in 0..rng.below(40) {
                let gap = (rng.next_u64() >> (64 - scale)) as u32;
                now = now.wrapping_add(gap);
                if !times.is_empty() {
                    gaps.push(gap);
                }
                times.push(now.wrapping_sub(written));
                a.note_read(written, now);
            }
            let age = now.wrapping_sub(written) + rng.below(1 << scale) as u32;
            let f = a.features(age, 100);
            assert_eq!((f.reads as usize, f.age, f.size), (times.len(), age, 100));
            let near = |what: &str, got: u32, exact: u32, part: u32| {
                let off = got.abs_diff(exact);
                assert!(off <= exact / part + 1, "seed {seed}: {what} {got}, not {exact}");
            };
            let last = times.last().copied().unwrap_or(0);
            assert!(f.idle >= age - last && f.idle - (age - last) <= last >> SPAN_BITS);
            near("first read", f.first_read, times.first().copied().unwrap_or(0), 8);
            let cut = last >> SPAN_BITS;
            let longest = gaps.iter().max().copied().unwrap_or(0);
            assert!(f.max_gap <= longest + cut && f.max_gap >= longest - longest / 8, "{seed}");
            let gap = gaps.last().copied().unwrap_or(0);
            assert!(f.last_gap <= gap + cut && f.last_gap >= gap - gap / 8, "{seed}");
            if let Some(n) = u32::try_from(gaps.len()).ok().filter(|&n| n > 0) {
                let first = times[0];
                let exact = (last - first) / n;
                assert!(f.mean_gap <= f.max_gap + f.max_gap / 8 && f.mean_gap >= f.max_gap / n);
                let off = first / 8 / n + cut + exact / 8 + 1;
                assert!(f.mean_gap.abs_diff(exact) <= off, "{seed}: {} not {exact}", f.mean_gap);
            }
        }
    }
}
