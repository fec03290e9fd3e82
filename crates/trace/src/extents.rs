//! Which bytes of volumes were touched, and which requests continue others.

use std::collections::BTreeMap;

/// A set of bytes of volumes, as disjoint ranges that do not touch: at most one for each range that was added, whatever
/// their lengths.
#[derive(Default)]
pub(crate) struct Extents {
    /// (volume, first byte) → end.
    ranges: BTreeMap<(u32, u64), u64>,
    /// Over all volumes, so it may exceed 64 bits.
    bytes: u128,
}

impl Extents {
    /// Adds `len` bytes of `volume` from `start` on.
    pub(crate) fn add(&mut self, volume: u32, start: u64, len: u64) {
        let end = start.saturating_add(len);
        if end == start {
            return;
        }
        let (mut low, mut high) = (start, end);
        // The one range that may start before and reach into this one.
        if let Some((&key, &to)) = self.ranges.range(..=(volume, start)).next_back()
            && key.0 == volume
            && to >= start
        {
            if to >= end {
                return;
            }
            low = key.1;
        }
        // Every range that starts within goes; the tree gives them one at a time.
        while let Some((&key, &to)) = self.ranges.range((volume, low)..=(volume, end)).next() {
            high = high.max(to);
            self.bytes -= u128::from(to - key.1);
            self.ranges.remove(&key);
        }
        self.ranges.insert((volume, low), high);
        self.bytes += u128::from(high - low);
    }

    /// Bytes in the set, 2^64 − 1 where there are more.
    pub(crate) fn bytes(&self) -> u64 {
        u64::try_from(self.bytes).unwrap_or(u64::MAX)
    }
}

/// Requests that may become streams, and streams, remembered by [`Streams`].
const WINDOW: usize = 64;

/// Tells requests that continue another: their offset is where one of the last 64 requests of their volume ended, or one
/// of the last 64 streams, a stream being what was continued once. (Fusion-io's sequentiality detection with a window of
/// 64 and no gap; that streams are kept apart from lone requests keeps slow ones, such as a log, from being forgotten.)
#[derive(Default)]
pub(crate) struct Streams {
    /// (volume, end), the most recent last.
    lone: Vec<(u32, u64)>,
    streams: Vec<(u32, u64)>,
}

impl Streams {
    /// Whether the request continues another.
    pub(crate) fn continues(&mut self, volume: u32, start: u64, len: u64) -> bool {
        let wanted = (volume, start);
        let mut found = false;
        for list in [&mut self.streams, &mut self.lone] {
            if !found && let Some(at) = list.iter().rposition(|&end| end == wanted) {
                list.remove(at);
                found = true;
            }
        }
        let list = if found { &mut self.streams } else { &mut self.lone };
        if list.len() == WINDOW {
            list.remove(0);
        }
        list.push((volume, start.saturating_add(len)));
        found
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn extents_agree_with_a_row_of_bytes(seed in any::<u64>()) {
            let mut rng = Rng::new(seed);
            let mut set = Extents::default();
            let mut naive = vec![[false; 400]; 2];
            for _ in 0..120 {
                let (volume, start) = (rng.below(2) as u32, rng.below(380));
                let len = rng.below(20);
                set.add(volume, start, len);
                naive[volume as usize][start as usize..(start + len) as usize].fill(true);
                let bytes = naive.iter().flatten().filter(|&&b| b).count() as u64;
                prop_assert_eq!(set.bytes(), bytes);
                let edges = naive
                    .iter()
                    .map(|row| (0..400).filter(|&i| row[i] && (i == 0 || !row[i - 1])).count())
                    .sum::<usize>();
                prop_assert_eq!(set.ranges.len(), edges, "ranges are joined");
            }
        }
    }

    #[test]
    fn huge_ranges_cost_one_entry() {
        let mut set = Extents::default();
        set.add(0, 5, u64::MAX);
        set.add(0, 0, 7);
        set.add(1, u64::MAX - 1, 100);
        assert_eq!((set.ranges.len(), set.bytes()), (2, u64::MAX));
        set.add(0, 0, 0);
        assert_eq!(set.ranges.len(), 2);
    }

    #[test]
    fn streams_are_followed_through_others() {
        let mut s = Streams::default();
        assert!(!s.continues(0, 0, 10));
        assert!(!s.continues(1, 10, 10), "another volume");
        for i in 0..62 {
            assert!(!s.continues(0, 1_000_000 + i * 100, 10));
        }
        assert!(s.continues(0, 10, 10));
        assert!(!s.continues(0, 500, 10));
        for i in 0..64 {
            assert!(!s.continues(0, 2_000_000 + i * 100, 10));
        }
        assert!(!s.continues(0, 510, 10), "forgotten after 64 others");
        assert!(s.continues(0, 20, 10), "a stream is not");
    }
}
