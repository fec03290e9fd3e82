//! A journal with two epochs in which bytes were changed, or bytes of any kind: what is read is the last epoch as it was, or known to be torn.
#![no_main]

use std::ops::Range;

use larder_block::cache::back::journal::{Journal, Laid, Of};
use larder_engine::block::writeback::Fault;
use larder_format::Uuid;
use larder_format::block::journal::{
    COMMIT_AT, Commit, DESCRIPTORS_AT, Descriptors, ExtentKind, JournalExtent, Size,
};
use larder_format::block::marker::{Marker, MarkerState, Order};
use larder_format::block::write_log::pieces;
use larder_volume::journal::{EpochName, Head, JournalError, JournalPlace, Part};
use libfuzzer_sys::fuzz_target;

const OF: Of = Of { volume: Uuid([1; 16]), cache: Uuid([2; 16]), generation: 3 };

/// Parts in memory.
struct Memory(Vec<Vec<u8>>);

impl JournalPlace for Memory {
    fn head(&mut self) -> Result<Head, JournalError> {
        Ok(Head::Of(Box::new(Marker {
            number: 1,
            state: MarkerState::Dirty,
            volume: OF.volume,
            identity: [0; 64],
            cache: OF.cache,
            run: 1,
            host: "host".into(),
            generation: OF.generation,
            attachment: 1,
            frontier: 0,
            time: 0,
            mark: None,
            order: Order::Journaled,
            applied: 0,
            joins: 0,
            probes: false,
        })))
    }
    fn look(&mut self) -> Result<Head, JournalError> {
        self.head()
    }
    fn set_head(&mut self, _: &Marker) -> Result<(), JournalError> {
        Ok(())
    }
    fn most(&self) -> u64 {
        1 << 20
    }
    fn write(&mut self, _: EpochName, _: &[u8], _: &[u8]) -> Result<(), JournalError> {
        Ok(())
    }
    fn flush(&mut self) -> Result<(), JournalError> {
        Ok(())
    }
    fn parts(&mut self) -> Result<Vec<Part>, JournalError> {
        Ok((0..self.0.len()).map(Part).collect())
    }
    fn read(&mut self, part: Part, at: u64, len: usize) -> Result<Option<Vec<u8>>, JournalError> {
        let part = &self.0[part.0];
        let range = usize::try_from(at).ok().and_then(|at| Some(at..at.checked_add(len)?));
        Ok(range.and_then(|range| part.get(range)).map(<[u8]>::to_vec))
    }
    fn renew(&mut self, _: Part, _: &[Range<u64>]) -> Result<(), JournalError> {
        Ok(())
    }
    fn empty(&mut self) -> Result<(), JournalError> {
        Ok(())
    }
    fn rest(&mut self) {}
    fn describe(&self) -> String {
        "memory".into()
    }
}

/// An epoch, and what it has for the store.
fn epoch(number: u64, fill: u8) -> (Vec<u8>, Vec<Laid>) {
    let extent = |offset, length, kind| JournalExtent { offset, length, kind, may_punch: false };
    let extents = vec![
        extent(512 * number, 700, ExtentKind::Data),
        extent(1 << 20, 1 << 16, ExtentKind::Zero),
        extent(2 << 20, 9000, ExtentKind::Data),
        extent(3 << 20, 512, ExtentKind::Trim),
    ];
    let laid: Vec<Laid> = extents
        .iter()
        .map(|e| Laid {
            range: e.offset..e.offset + e.length,
            bytes: (e.kind == ExtentKind::Data).then(|| vec![fill; e.length as usize]),
        })
        .collect();
    let bytes = laid.iter().filter_map(|one| one.bytes.as_deref());
    let sums = bytes.flat_map(|bytes| pieces::sums(bytes).collect::<Vec<_>>()).collect();
    let size = Size::of(&extents).expect("it fits");
    let Of { volume, cache, generation } = OF;
    let descriptors = Descriptors { volume, cache, epoch: number, generation, extents, sums };
    let encoded = descriptors.encode();
    let commit = Commit::of(&descriptors, &encoded, number * 10, 7, None).encode();
    let mut part = vec![0; size.journal_bytes() as usize];
    part[COMMIT_AT as usize..][..commit.len()].copy_from_slice(&commit);
    let data = DESCRIPTORS_AT as usize + encoded.len();
    part[DESCRIPTORS_AT as usize..data].copy_from_slice(&encoded);
    for (entry, one) in descriptors.entries().zip(&laid) {
        if let Some(bytes) = &one.bytes {
            part[data + entry.data.start as usize..][..bytes.len()].copy_from_slice(bytes);
        }
    }
    (part, laid)
}

fn read(parts: Vec<Vec<u8>>) -> (Vec<Laid>, bool) {
    let place = Box::new(Memory(parts));
    let journal = Journal::over(place, &[OF.volume], Fault::default());
    let mut journal = journal.expect("its head is whole");
    let read = journal.read(OF).expect("memory");
    (journal.stretches(&read).expect("memory"), read.torn.is_some())
}

fuzz_target!(|data: &[u8]| {
    let (first, _) = epoch(4, 1);
    let (second, last) = epoch(5, 2);
    let mut parts = vec![first, second];
    // Each six bytes are a part, a place in it, and what is put there.
    for change in data.chunks_exact(6) {
        let part = &mut parts[usize::from(change[0] & 1)];
        let at = usize::from(u16::from_le_bytes([change[1], change[2]])) % (part.len() - 3);
        part[at..at + 3].copy_from_slice(&change[3..]);
    }
    let (laid, torn) = read(parts);
    assert!(torn || laid == last, "another epoch than the last counts");
    // Anything in a part.
    let (good, wanted) = epoch(9, 3);
    let mut any = vec![0; DESCRIPTORS_AT as usize];
    any.extend_from_slice(data);
    let n = data.len().min(512);
    any[COMMIT_AT as usize..][..n].copy_from_slice(&data[..n]);
    let (laid, torn) = read(vec![any, good]);
    assert!(torn || laid == wanted, "an epoch that is whole is passed over");
});
