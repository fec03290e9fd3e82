//! Records that a start has found, one after the other in few bytes: a log that is full of small writes has millions.
//!
//! Each is kept as what it has not in common with the one before: of random writes of 4 KiB that is the address, and takes 10 to 12 bytes, where an
//! [`Entry`] has 72 and a [`Dirty`] 96. They are read from the first on.

use larder_format::block::write_log::{Flags, Kind, Record, pieces};

use super::recovery::{Dirty, Entry, Records};

/// Bytes of a chunk: nothing that is kept is moved when more comes.
const CHUNK: usize = 64 << 10;
/// More bytes than one record takes: a byte, and ten for each of ten numbers.
const MOST: usize = 101;

/// The records of a volume. See the [module](self).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    chunks: Vec<Vec<u8>>,
    len: usize,
    /// The last of them.
    before: Option<Dirty>,
}

impl Records for Packed {
    fn push(&mut self, dirty: Dirty) {
        let fits = |chunk: &&mut Vec<u8>| chunk.capacity() - chunk.len() >= MOST;
        if self.chunks.last_mut().filter(fits).is_none() {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let before = self.before.replace(dirty).unwrap_or(FIRST_DIRTY);
        if let Some(chunk) = self.chunks.last_mut() {
            put_entry(chunk, &dirty.entry, &before.entry);
            put(chunk, delta(dirty.batch, before.batch));
            put(chunk, delta(named(dirty.parked), named(before.parked)));
        }
        self.len += 1;
    }

    fn len(&self) -> usize {
        self.len
    }

    fn each(&self) -> impl Iterator<Item = Dirty> + '_ {
        let mut before = FIRST_DIRTY;
        let mut chunks = self.chunks.iter();
        let mut bytes: &[u8] = &[];
        std::iter::from_fn(move || {
            while bytes.is_empty() {
                bytes = chunks.next()?;
            }
            let entry = take_entry(&mut bytes, &before.entry);
            let batch = moved(take(&mut bytes), before.batch);
            let parked = moved(take(&mut bytes), named(before.parked)).checked_sub(1);
            before = Dirty { entry, batch, parked };
            Some(before)
        })
    }
}

/// A parked segment's generation as a number; 0: none.
fn named(parked: Option<u64>) -> u64 {
    parked.map_or(0, |generation| generation.wrapping_add(1))
}

/// The entries of batches, each batch by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PackedEntries {
    chunks: Vec<Vec<u8>>,
}

/// Where those of a batch are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PlaceOf {
    chunk: u32,
    at: u32,
    bytes: u32,
}

impl PackedEntries {
    /// Keeps those of a batch.
    pub(super) fn add(&mut self, entries: &[Entry]) -> PlaceOf {
        let mut bytes = Vec::with_capacity(entries.len() * 16);
        let mut before = FIRST;
        for entry in entries {
            put_entry(&mut bytes, entry, &before);
            before = *entry;
        }
        let room = self.chunks.last().map_or(0, |chunk| chunk.capacity() - chunk.len());
        if room < bytes.len() {
            self.chunks.push(Vec::with_capacity(bytes.len().max(CHUNK)));
        }
        let which = self.chunks.len().saturating_sub(1);
        let Some(chunk) = self.chunks.last_mut() else { return PlaceOf::default() };
        let at = chunk.len();
        chunk.extend_from_slice(&bytes);
        PlaceOf { chunk: which as u32, at: at as u32, bytes: bytes.len() as u32 }
    }

    /// Those of a batch.
    pub(super) fn of(&self, place: PlaceOf) -> impl Iterator<Item = Entry> + '_ {
        let (from, to) = (place.at as usize, (place.at + place.bytes) as usize);
        let chunk = self.chunks.get(place.chunk as usize);
        let mut bytes = chunk.and_then(|chunk| chunk.get(from..to)).unwrap_or(&[]);
        let mut before = FIRST;
        std::iter::from_fn(move || {
            if bytes.is_empty() {
                return None;
            }
            before = take_entry(&mut bytes, &before);
            Some(before)
        })
    }

    /// None are needed any more.
    pub(super) fn clear(&mut self) {
        self.chunks = Vec::new();
    }
}

const FIRST: Entry = Entry {
    record: Record {
        attachment: 0,
        generation: 0,
        sequence: 0,
        dependency: 0,
        offset: 0,
        length: 0,
        kind: Kind::Write,
        flags: Flags { fua: false, may_punch: false, unreadable: false },
    },
    place: 0,
    readable: true,
    sums: 0,
};
const FIRST_DIRTY: Dirty = Dirty { entry: FIRST, batch: 0, parked: None };

/// Bits of the byte that a record begins with.
const FUA: u8 = 1 << 3;
const MAY_PUNCH: u8 = 1 << 4;
const UNREADABLE: u8 = 1 << 5;
const READABLE: u8 = 1 << 6;
/// It is the next of its volume, as long as the one before, and its checksums are the next.
const USUAL: u8 = 1 << 7;

fn code(kind: Kind) -> u8 {
    match kind {
        Kind::Write => 0,
        Kind::Zero => 1,
        Kind::Trim => 2,
        Kind::Mark => 3,
        Kind::Frontier => 4,
    }
}

fn kind(code: u8) -> Kind {
    match code & 7 {
        0 => Kind::Write,
        1 => Kind::Zero,
        2 => Kind::Trim,
        3 => Kind::Mark,
        _ => Kind::Frontier,
    }
}

/// The checksums that follow those of an entry.
fn next_sums(entry: &Entry) -> u32 {
    entry.sums.wrapping_add(pieces::count(entry.record.payload_bytes()) as u32)
}

fn put_entry(out: &mut Vec<u8>, entry: &Entry, before: &Entry) {
    let (record, last) = (&entry.record, &before.record);
    let usual = record.attachment == last.attachment
        && record.generation == last.generation
        && record.sequence == last.sequence.wrapping_add(1)
        && record.length == last.length
        && entry.sums == next_sums(before);
    let bit = |is, bit| if is { bit } else { 0 };
    let flags = record.flags;
    out.push(
        code(record.kind)
            | bit(flags.fua, FUA)
            | bit(flags.may_punch, MAY_PUNCH)
            | bit(flags.unreadable, UNREADABLE)
            | bit(entry.readable, READABLE)
            | bit(usual, USUAL),
    );
    if !usual {
        put(out, delta(record.attachment.into(), last.attachment.into()));
        put(out, delta(record.generation, last.generation));
        put(out, delta(record.sequence, last.sequence));
        put(out, delta(record.length, last.length));
        put(out, delta(entry.sums.into(), before.sums.into()));
    }
    put(out, delta(record.offset, last.offset.wrapping_add(last.length)));
    put(out, delta(record.dependency, last.dependency));
    put(out, delta(entry.place, before.place));
}

fn take_entry(bytes: &mut &[u8], before: &Entry) -> Entry {
    let last = before.record;
    let first = bytes.split_off_first().copied().unwrap_or(0);
    let mut entry = *before;
    let record = &mut entry.record;
    record.kind = kind(first);
    let has = |bit| first & bit != 0;
    record.flags = Flags { fua: has(FUA), may_punch: has(MAY_PUNCH), unreadable: has(UNREADABLE) };
    entry.readable = has(READABLE);
    if has(USUAL) {
        record.sequence = last.sequence.wrapping_add(1);
        entry.sums = next_sums(before);
    } else {
        record.attachment = moved(take(bytes), last.attachment.into()) as u32;
        record.generation = moved(take(bytes), last.generation);
        record.sequence = moved(take(bytes), last.sequence);
        record.length = moved(take(bytes), last.length);
        entry.sums = moved(take(bytes), before.sums.into()) as u32;
    }
    record.offset = moved(take(bytes), last.offset.wrapping_add(last.length));
    record.dependency = moved(take(bytes), last.dependency);
    entry.place = moved(take(bytes), before.place);
    entry
}

/// How far a number is from the one before: small where it is little, in either direction.
fn delta(number: u64, before: u64) -> u64 {
    let by = number.wrapping_sub(before) as i64;
    (by << 1 ^ by >> 63) as u64
}

/// The number that is so far from the one before.
fn moved(delta: u64, before: u64) -> u64 {
    let by = (delta >> 1) as i64 ^ -((delta & 1) as i64);
    before.wrapping_add(by as u64)
}

/// Seven bits a byte, the lowest first.
fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn take(bytes: &mut &[u8]) -> u64 {
    let (mut number, mut shift) = (0, 0);
    while let Some(&byte) = bytes.split_off_first() {
        number |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte < 0x80 {
            break;
        }
        shift += 7;
    }
    number
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn number() -> impl Strategy<Value = u64> {
        prop_oneof![Just(0u64), Just(u64::MAX), any::<u64>(), 0..300u64]
    }

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let numbers = (number(), number(), number(), number());
        let record =
            (any::<bool>(), any::<u32>(), numbers, 0..(1u64 << 41), 0..5u8, any::<[bool; 4]>());
        let entry = (record, number(), any::<u32>());
        prop::collection::vec(entry, 0..60).prop_map(|all| {
            let mut before = FIRST;
            let of = |((usual, attachment, numbers, length, code, flags), place, sums)| {
                let (generation, sequence, dependency, offset) = numbers;
                let [fua, may_punch, unreadable, readable]: [bool; 4] = flags;
                let flags = Flags { fua, may_punch, unreadable };
                let last = before.record;
                let record = Record {
                    attachment: if usual { last.attachment } else { attachment },
                    generation: if usual { last.generation } else { generation },
                    sequence: if usual { last.sequence.wrapping_add(1) } else { sequence },
                    dependency,
                    offset,
                    length: if usual { last.length } else { length },
                    kind: kind(code),
                    flags,
                };
                let sums = if usual { next_sums(&before) } else { sums };
                before = Entry { record, place, readable, sums };
                before
            };
            all.into_iter().map(of).collect()
        })
    }

    proptest! {
        #[test]
        fn records_are_read_as_they_came(
            entries in entries(),
            others in prop::collection::vec((number(), any::<Option<u32>>()), 60),
        ) {
            let (mut packed, mut plain) = (Packed::default(), Vec::new());
            for (entry, (batch, parked)) in entries.iter().zip(others) {
                let dirty = Dirty { entry: *entry, batch, parked: parked.map(u64::from) };
                packed.push(dirty);
                plain.push(dirty);
            }
            prop_assert_eq!(packed.len(), plain.len());
            prop_assert_eq!(packed.each().collect::<Vec<Dirty>>(), plain);
        }

        #[test]
        fn entries_of_batches_are_read_as_they_came(batches in prop::collection::vec(entries(), 0..8)) {
            let mut packed = PackedEntries::default();
            let places: Vec<PlaceOf> = batches.iter().map(|batch| packed.add(batch)).collect();
            for (place, batch) in places.into_iter().zip(&batches) {
                prop_assert_eq!(&packed.of(place).collect::<Vec<Entry>>(), batch);
            }
        }
    }

    #[test]
    fn random_writes_take_few_bytes_and_chunks_are_not_moved() {
        let mut packed = Packed::default();
        let mut at = 1u64;
        for n in 1..=100_000u64 {
            at = at * 48_271 % 0x7fff_ffff;
            let record = Record {
                attachment: 1,
                generation: 3,
                sequence: n,
                dependency: n.saturating_sub(40),
                offset: (at % (1 << 28)) << 12,
                length: 4096,
                ..FIRST.record
            };
            let entry = Entry { record, place: n * 4096, readable: true, sums: n as u32 };
            packed.push(Dirty { entry, batch: n / 32, parked: None });
        }
        let bytes: usize = packed.chunks.iter().map(Vec::capacity).sum();
        assert!(bytes <= 14 * packed.len(), "{bytes} bytes");
        assert!(packed.chunks.iter().all(|chunk| chunk.capacity() == CHUNK));
        assert_eq!(packed.each().count(), 100_000);
    }
}
