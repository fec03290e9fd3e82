//! What is to be read of a part of a journal, and what it has.

use std::ops::Range;
use std::vec::IntoIter;

use larder_format::PAGE_SIZE;
use larder_format::block::journal::{
    COMMIT_AT, COMMIT_BYTES, Commit, DESCRIPTORS_AT, Descriptors, JournalError as Torn,
};
use larder_format::block::write_log::pieces;

use super::super::planted::{Fault, Planted};
use super::{Found, Of, Whose};

/// An epoch that is whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    /// Its commit.
    pub commit: Commit,
    /// Its extents.
    pub descriptors: Descriptors,
    /// Where its data begins in the part.
    pub data: u64,
}

/// A part that is read. See the [module](self).
#[derive(Debug)]
pub struct Reading {
    of: Of,
    /// Most bytes of an epoch.
    most: u64,
    fault: Fault,
    at: At,
}

#[derive(Debug)]
enum At {
    Commit,
    /// Nothing is committed; so many bytes of the descriptors may say which epoch it would be.
    Uncommitted(usize),
    Descriptors(Box<Commit>),
    /// This data is next, whose checksums begin there, and then that.
    Data(Box<Whole>, Option<Data>, IntoIter<Data>),
    End(Found, Option<Box<Whole>>),
}

/// Data of an extent in the part, and where its checksums begin.
type Data = (Range<u64>, usize);

impl Reading {
    /// A part of a journal for the store of `of`. `most`: bytes of the largest epoch that it has room for.
    pub fn new(of: Of, most: u64, fault: Fault) -> Reading {
        Reading { of, most, fault, at: At::Commit }
    }

    /// What is to be read next: from which byte on, counted from where an epoch's journal begins in the format, and how many. `None`: it is known what
    /// the part has.
    pub fn wants(&self) -> Option<(u64, usize)> {
        match &self.at {
            At::Commit => Some((COMMIT_AT, COMMIT_BYTES)),
            At::Uncommitted(len) => Some((DESCRIPTORS_AT, *len)),
            At::Descriptors(commit) => Some((DESCRIPTORS_AT, commit.descriptors as usize)),
            At::Data(_, Some((range, _)), _) => {
                Some((range.start, (range.end - range.start) as usize))
            }
            At::Data(_, None, _) | At::End(..) => None,
        }
    }

    /// These are the bytes that it wanted. `None`: the part is shorter, or cannot be read, which is as if it were damaged.
    pub fn given(&mut self, bytes: Option<&[u8]>) {
        let at = std::mem::replace(&mut self.at, At::End(Found::Nothing, None));
        self.at = match at {
            At::Commit => self.committed(bytes),
            At::Uncommitted(len) => self.uncommitted(bytes, len),
            At::Descriptors(commit) => {
                let torn = At::End(Found::Torn(Some(commit.epoch)), None);
                bytes.and_then(|bytes| self.described(*commit, bytes)).unwrap_or(torn)
            }
            At::Data(whole, Some((_, sums)), left) => {
                let believes = self.fault.is(Planted::EpochSumsIgnored);
                let sums = whole.descriptors.sums.get(sums..).unwrap_or_default();
                match bytes {
                    Some(bytes) if believes || has_sums(sums, bytes) => At::data(whole, left),
                    _ => At::End(Found::Torn(Some(whole.commit.epoch)), None),
                }
            }
            end @ (At::Data(_, None, _) | At::End(..)) => end,
        };
    }

    /// What the part has.
    pub fn end(self) -> (Found, Option<Whole>) {
        match self.at {
            At::End(found, whole) => (found, whole.map(|whole| *whole)),
            _ => (Found::Torn(None), None),
        }
    }

    fn committed(&self, bytes: Option<&[u8]>) -> At {
        let uncommitted = At::Uncommitted(PAGE_SIZE);
        let Some(bytes) = bytes else { return uncommitted };
        let commit = match Commit::decode(bytes, self.of.volume) {
            Ok(commit) => commit,
            Err(Torn::Absent) if bytes.iter().all(|&b| b == 0) => {
                return At::End(Found::Nothing, None);
            }
            // From before the place was this volume's.
            Err(Torn::Volume { .. }) => return At::End(Found::Nothing, None),
            Err(_) => return uncommitted,
        };
        match self.of.whose(&commit) {
            Whose::Own => At::Descriptors(Box::new(commit)),
            Whose::Later => At::End(Found::Later, None),
            Whose::Nobody => At::End(Found::Nothing, None),
        }
    }

    /// A part whose commit is damaged: its descriptors may say which epoch it has. (If they are of one before it, the epoch that was committed behind
    /// them is not durable, and nothing of it is in the store.)
    fn uncommitted(&self, bytes: Option<&[u8]>, len: usize) -> At {
        let of = self.of;
        match bytes.map(|bytes| Descriptors::decode(bytes, of.volume)) {
            Some(Ok(found)) if (found.cache, found.generation) == (of.cache, of.generation) => {
                At::End(Found::Torn(Some(found.epoch)), None)
            }
            Some(Err(Torn::Short { need, .. })) if need > len as u64 && need <= self.most => {
                At::Uncommitted(need as usize)
            }
            _ => At::End(Found::Torn(None), None),
        }
    }

    /// `None`: they are not those of the commit.
    fn described(&self, commit: Commit, bytes: &[u8]) -> Option<At> {
        let descriptors = Descriptors::decode(bytes, self.of.volume).ok()?;
        let same = (descriptors.epoch, descriptors.generation) == (commit.epoch, commit.generation);
        if !same || !(commit.covers(bytes) || self.fault.is(Planted::EpochSumsIgnored)) {
            return None;
        }
        let (data, mut sums) = (DESCRIPTORS_AT + bytes.len() as u64, 0);
        let mut left = Vec::new();
        for entry in descriptors.entries() {
            if !entry.data.is_empty() {
                left.push((data + entry.data.start..data + entry.data.end, sums));
            }
            sums += entry.sums.len();
        }
        let whole = Box::new(Whole { commit, descriptors, data });
        Some(At::data(whole, left.into_iter()))
    }
}

impl At {
    fn data(whole: Box<Whole>, mut left: IntoIter<Data>) -> At {
        match left.next() {
            Some(next) => At::Data(whole, Some(next), left),
            None => At::End(Found::Whole(whole.commit.epoch, whole.commit.last), Some(whole)),
        }
    }
}

fn has_sums(sums: &[u32], bytes: &[u8]) -> bool {
    let count = pieces::count(bytes.len() as u64) as usize;
    sums.get(..count).is_some_and(|sums| pieces::check(sums, 0, bytes).is_ok())
}

#[cfg(test)]
mod tests {
    use larder_format::Uuid;
    use larder_format::block::journal::{ExtentKind, JournalExtent};

    use super::*;

    const OF: Of = Of { volume: Uuid([1; 16]), cache: Uuid([2; 16]), generation: 3 };
    const MOST: u64 = 1 << 20;

    /// A part with epoch 5 up to record 50 of `of`: zeros, two stretches of data, and a trim between them.
    fn part(of: Of) -> Vec<u8> {
        let extent = |offset, length, kind| {
            let may_punch = kind == ExtentKind::Zero;
            JournalExtent { offset, length, kind, may_punch }
        };
        let extents = vec![
            extent(0, 512, ExtentKind::Zero),
            extent(4096, 5000, ExtentKind::Data),
            extent(10_000, 512, ExtentKind::Trim),
            extent(20_000, 512, ExtentKind::Data),
        ];
        let (a, b) = (vec![7; 5000], vec![9; 512]);
        let sums = pieces::sums(&a).chain(pieces::sums(&b)).collect();
        let Of { volume, cache, generation } = of;
        let descriptors = Descriptors { volume, cache, epoch: 5, generation, extents, sums };
        let encoded = descriptors.encode();
        let commit = Commit::of(&descriptors, &encoded, 50, 0, None);
        let mut bytes = vec![0; DESCRIPTORS_AT as usize];
        bytes[COMMIT_AT as usize..][..COMMIT_BYTES].copy_from_slice(&commit.encode());
        bytes.extend(encoded);
        bytes.extend(a);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes.extend(b);
        bytes
    }

    fn read(bytes: &[u8], unreadable: Range<u64>) -> (Found, Option<Whole>, usize) {
        let (mut reading, mut reads) = (Reading::new(OF, MOST, Fault::default()), 0);
        while let Some((at, len)) = reading.wants() {
            let fails = at < unreadable.end && unreadable.start < at + len as u64;
            let at = at as usize;
            reading.given(bytes.get(at..at + len).filter(|_| !fails));
            reads += 1;
        }
        let (found, whole) = reading.end();
        (found, whole, reads)
    }

    #[test]
    fn a_part_that_is_whole_is_read_once_and_its_data_lies_where_it_says() {
        let bytes = part(OF);
        let (found, whole, reads) = read(&bytes, 0..0);
        assert_eq!((found, reads), (Found::Whole(5, 50), 4));
        let whole = whole.unwrap();
        let data: Vec<u8> = whole
            .descriptors
            .entries()
            .filter(|entry| !entry.data.is_empty())
            .map(|entry| bytes[(whole.data + entry.data.start) as usize])
            .collect();
        assert_eq!(data, [7, 9]);
    }

    #[test]
    fn a_part_counts_by_its_commit_and_is_torn_where_anything_behind_that_is_not_what_it_says() {
        let whole = part(OF);
        let of = |cache: u8, generation| Of { cache: Uuid([cache; 16]), generation, ..OF };
        let other = |volume: u8| Of { volume: Uuid([volume; 16]), ..OF };
        let spoilt = |at: u64| {
            let mut bytes = whole.clone();
            bytes[at as usize] ^= 1;
            bytes
        };
        let zeroed = |range: Range<u64>| {
            let mut bytes = whole.clone();
            bytes[range.start as usize..range.end as usize].fill(0);
            bytes
        };
        let (data, end) = (DESCRIPTORS_AT + 4096, whole.len() as u64);
        let none = 0..0;
        for (what, bytes, unreadable, found) in [
            ("zeros", vec![0; whole.len()], none.clone(), Found::Nothing),
            ("nothing", vec![], none.clone(), Found::Torn(None)),
            ("another volume's", part(other(9)), none.clone(), Found::Nothing),
            ("another cache's", part(of(9, 3)), none.clone(), Found::Nothing),
            ("an earlier attachment's", part(of(2, 2)), none.clone(), Found::Nothing),
            ("a later attachment's", part(of(2, 4)), none.clone(), Found::Later),
            ("a later attachment of another cache", part(of(9, 4)), none.clone(), Found::Nothing),
            ("commit damaged", spoilt(COMMIT_AT + 50), none.clone(), Found::Torn(Some(5))),
            ("commit unreadable", whole.clone(), COMMIT_AT..COMMIT_AT + 1, Found::Torn(Some(5))),
            // Nothing tells whether it had one.
            ("commit trimmed", zeroed(COMMIT_AT..DESCRIPTORS_AT), none.clone(), Found::Nothing),
            ("descriptors", spoilt(DESCRIPTORS_AT + 100), none.clone(), Found::Torn(Some(5))),
            ("all unreadable", whole.clone(), 0..end, Found::Torn(None)),
            ("first data", spoilt(data + 4999), none.clone(), Found::Torn(Some(5))),
            ("last data", spoilt(end - 1), none.clone(), Found::Torn(Some(5))),
            ("data unreadable", whole.clone(), end - 1..end, Found::Torn(Some(5))),
            ("cut short", whole[..whole.len() - 1].to_vec(), none, Found::Torn(Some(5))),
        ] {
            let (is, whole, _) = read(&bytes, unreadable);
            assert_eq!((is, whole), (found, None), "{what}");
        }
    }

    #[test]
    fn descriptors_under_a_damaged_commit_are_read_only_as_far_as_a_journal_has_room() {
        let mut bytes = part(OF);
        bytes[COMMIT_AT as usize] ^= 1;
        let count = DESCRIPTORS_AT as usize + 72;
        // So many extents no journal has room for.
        bytes[count..count + 4].copy_from_slice(&(MOST as u32).to_le_bytes());
        let (found, _, reads) = read(&bytes, 0..0);
        assert_eq!((found, reads), (Found::Torn(None), 2));
        // More than one page of them is read in two steps, and is short then.
        bytes[count..count + 4].copy_from_slice(&1000u32.to_le_bytes());
        let (found, _, reads) = read(&bytes, 0..0);
        assert_eq!((found, reads), (Found::Torn(None), 3));
    }
}
