//! What was learned of a volume, in bounded memory: ranges that stay, and single blocks that come and go.

use std::collections::BTreeMap;

use super::MetadataKind;

/// Blocks whose kind was found out, in a table of fixed size: buckets of eight, of which the one learned longest ago is
/// forgotten when a ninth comes.
#[derive(Debug)]
pub(super) struct Learned {
    /// Byte offset / 512, shifted by 8, with the kind's number; 0 is empty.
    buckets: Vec<[u64; WAYS]>,
}

const WAYS: usize = 8;

impl Learned {
    pub(super) fn new(blocks: usize) -> Learned {
        Learned { buckets: vec![[0; WAYS]; blocks.div_ceil(WAYS).max(1)] }
    }

    fn bucket(&self, key: u64) -> usize {
        let mixed = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((u128::from(mixed) * self.buckets.len() as u128) >> 64) as usize
    }

    pub(super) fn get(&self, offset: u64) -> Option<MetadataKind> {
        let key = offset >> 9;
        let found = self.buckets[self.bucket(key)].iter().find(|&&e| e != 0 && e >> 8 == key)?;
        MetadataKind::from_code(*found as u8)
    }

    pub(super) fn set(&mut self, offset: u64, kind: MetadataKind) {
        let key = offset >> 9;
        // The top eight bits would be lost; no volume is that large.
        if key >> 56 != 0 {
            return;
        }
        let bucket = self.bucket(key);
        let bucket = &mut self.buckets[bucket];
        let at = bucket.iter().position(|&e| e >> 8 == key && e != 0).unwrap_or(WAYS - 1);
        bucket[..=at].rotate_right(1);
        bucket[0] = key << 8 | u64::from(kind.code());
    }

    pub(super) fn forget(&mut self, offset: u64) {
        let key = offset >> 9;
        let bucket = self.bucket(key);
        for entry in &mut self.buckets[bucket] {
            if *entry != 0 && *entry >> 8 == key {
                *entry = 0;
            }
        }
    }

    pub(super) fn clear(&mut self) {
        self.buckets.fill([0; WAYS]);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.buckets.capacity() * WAYS * 8
    }
}

/// Ranges of blocks of one kind, neighbours joined; at most a fixed number.
#[derive(Debug)]
pub(super) struct Ranges {
    by_start: BTreeMap<u64, (u64, MetadataKind)>,
    most: usize,
}

impl Ranges {
    pub(super) fn new(most: usize) -> Ranges {
        Ranges { by_start: BTreeMap::new(), most }
    }

    /// Blocks `start..end` are of this kind. Nothing happens where some of them are known already, or there is no room.
    pub(super) fn add(&mut self, mut start: u64, mut end: u64, kind: MetadataKind) {
        if start >= end {
            return;
        }
        if let Some((_, &(before_end, _))) = self.by_start.range(..=start).next_back()
            && before_end > start
        {
            return;
        }
        if self.by_start.range(start..end).next().is_some() {
            return;
        }
        if let Some((&first, &(before_end, before))) = self.by_start.range(..start).next_back()
            && before_end == start
            && before == kind
        {
            start = first;
        }
        if let Some(&(after_end, after)) = self.by_start.get(&end)
            && after == kind
        {
            self.by_start.remove(&end);
            end = after_end;
        }
        if self.by_start.len() < self.most || self.by_start.contains_key(&start) {
            self.by_start.insert(start, (end, kind));
        }
    }

    pub(super) fn get(&self, block: u64) -> Option<MetadataKind> {
        let (_, &(end, kind)) = self.by_start.range(..=block).next_back()?;
        (block < end).then_some(kind)
    }

    pub(super) fn memory_bytes(&self) -> usize {
        // A B-tree's nodes are about two thirds full.
        self.by_start.len() * size_of::<(u64, (u64, MetadataKind))>() * 3 / 2
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn blocks_are_learned_forgotten_and_bounded() {
        let mut learned = Learned::new(1024);
        let memory = learned.memory_bytes();
        for block in 0..500u64 {
            learned.set(block * 4096, MetadataKind::Directory);
        }
        learned.set(4096, MetadataKind::ExtentTree);
        learned.forget(8192);
        assert_eq!(learned.get(0), Some(MetadataKind::Directory));
        assert_eq!(learned.get(4096), Some(MetadataKind::ExtentTree));
        assert_eq!((learned.get(8192), learned.get(1 << 40)), (None, None));
        assert!((0..500).filter(|b| learned.get(b * 4096).is_some()).count() > 480);
        for block in 1000..100_000u64 {
            learned.set(block * 4096, MetadataKind::Directory);
        }
        assert_eq!(learned.memory_bytes(), memory);
        assert_eq!(learned.get(99_999 * 4096), Some(MetadataKind::Directory));
        learned.clear();
        assert_eq!(learned.get(99_999 * 4096), None);
    }

    #[test]
    fn ranges_agree_with_a_map() {
        let kinds = [MetadataKind::InodeTable, MetadataKind::BlockBitmap];
        let mut rng = Rng::new(6);
        for _ in 0..50 {
            let mut ranges = Ranges::new(1000);
            let mut map = [None; 300];
            for _ in 0..60 {
                let (start, kind) = (rng.below(280), kinds[rng.below(2) as usize]);
                let end = start + rng.below(20);
                ranges.add(start, end, kind);
                let part = &mut map[start as usize..end as usize];
                if part.iter().all(Option::is_none) {
                    part.fill(Some(kind));
                }
            }
            assert!((0..300).all(|b| ranges.get(b as u64) == map[b]));
            let runs =
                (0..300).filter(|&b| map[b].is_some() && (b == 0 || map[b - 1] != map[b])).count();
            assert_eq!(ranges.by_start.len(), runs);
        }
        let mut few = Ranges::new(2);
        (0..5).for_each(|i| few.add(i * 10, i * 10 + 1, kinds[0]));
        assert_eq!(few.by_start.len(), 2);
    }
}
