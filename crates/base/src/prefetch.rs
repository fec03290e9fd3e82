//! A hint to the processor.

/// Asks the processor to load `slice[index]` into its cache; does nothing when `index` is out of bounds or the
/// processor has no such instruction. Loops over random places run several memory accesses at once this way.
#[inline]
pub fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(place) = slice.get(index) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch reads nothing architecturally and cannot fault; the address is that of a live element all
        // the same.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, index);
}

#[cfg(test)]
mod tests {
    #[test]
    fn is_only_a_hint() {
        let data = [1u8, 2, 3];
        super::prefetch(&data, 1);
        super::prefetch(&data, 99);
        super::prefetch::<u64>(&[], 0);
        assert_eq!(data, [1, 2, 3]);
    }
}
