//! Which drives a cache has at a start, and what becomes of each: found as the last run left it, come back from elsewhere, or new.
//!
//! Drives of one cache have its UUID. A drive that says another run than the last one has contents that nobody vouches for: it is cold, the
//! others are not. A new one is given numbers for its segments that no other drive here has; so is one whose numbers were given to
//! another while it was away.

use larder_base::{HashKey, UnixSecs};
use larder_format::geometry::{MAX_SEGMENTS, Numbers, SMALL_SEGMENTS, run_bits};
use larder_format::superblock::{PLACES, PartOf, most_of};
use larder_format::{Geometry, GeometryError, Superblock, Uuid};

use crate::kv::config::{DriveSegments, FlashGeometry, MOST_DRIVES};
use crate::kv::node::Plan;

/// Segments that a drive has at least, where they can be made small enough.
const WANTED_SEGMENTS: u64 = 32;
/// The smallest segment, bytes.
const LEAST_SEGMENT: u64 = 64 << 10;
/// Segments of a drive that can hold small objects, at least: with fewer they would turn over in no time.
const LEAST_SMALL: u16 = 16;
/// Of the segments that can hold small objects drives have so many together where they could have more, and leave the rest for drives that are
/// added.
const SHARED: u16 = SMALL_SEGMENTS / 2;

/// A drive as a start finds it.
#[derive(Clone, Copy, Debug)]
pub struct FoundDrive<'a> {
    /// What it says of itself; `None` where it holds nothing, or is to be formatted whatever it holds.
    pub superblock: Option<&'a Superblock>,
    /// Bytes that it has.
    pub bytes: u64,
}

/// What a start draws for drives.
#[derive(Clone, Debug)]
pub struct DrivesDrawn {
    /// For a cache that is new.
    pub uuid: Uuid,
    /// The same.
    pub hash_key: HashKey,
    /// A name for each drive that is new; none is 0.
    pub names: Vec<u64>,
    /// When this is.
    pub now: UnixSecs,
}

/// What becomes of a drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// What it is to say.
    pub superblock: Superblock,
    /// It is formatted: what it held is void.
    pub fresh: bool,
}

impl Member {
    /// Which of the drives it is.
    pub fn part(&self) -> PartOf {
        part_of(&self.superblock)
    }
}

/// Why drives cannot be those of one cache. Drives are given by their order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DrivesError {
    /// Too many.
    #[error("{0} drives are more than the {MOST_DRIVES} that one cache can have")]
    TooMany(usize),
    /// Two caches.
    #[error("it belongs to another cache ({0}) than the others ({1})")]
    OtherCache(Uuid, Uuid),
    /// The same drive twice.
    #[error("it is a copy of another of these drives, or that drive itself")]
    Twice,
    /// Its segments are of another size.
    #[error("its segments have {0} bytes, and those of the others {1}")]
    Segments(u32, u32),
    /// No numbers are left for its segments.
    #[error(
        "{0} segments more cannot be numbered beside those of the others: the cache would have to be formatted anew, with all its drives"
    )]
    NoNumbers(u16),
    /// It cannot be divided.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
}

/// Which of the drives an only one is as long as no other has joined it.
fn part_of(superblock: &Superblock) -> PartOf {
    let bits = run_bits(superblock.geometry.segments()) as u8;
    superblock.part.unwrap_or(PartOf { drive: 0, place: 0, numbers: Numbers::ALONE, bits })
}

/// What becomes of the drives, in their order; a drive that is alone, and always was, is not asked about.
///
/// # Errors
/// What is wrong, and with which drive.
pub fn assemble(
    found: &[FoundDrive<'_>],
    memory: u64,
    max_item: u64,
    drawn: &DrivesDrawn,
) -> Result<Vec<Member>, (usize, DrivesError)> {
    if found.len() > MOST_DRIVES.min(PLACES.into()) {
        return Err((MOST_DRIVES, DrivesError::TooMany(found.len())));
    }
    let known: Vec<(usize, &Superblock)> =
        found.iter().enumerate().filter_map(|(i, f)| Some((i, f.superblock?))).collect();
    check(&known)?;
    // Of two that claim one place or number, the one that was here last has it.
    let loses = |(i, mine): &(usize, &Superblock)| {
        known.iter().any(|(j, other)| {
            let (a, b) = (part_of(mine), part_of(other));
            let meet = a.place == b.place
                || a.numbers.overlap(
                    mine.geometry.segments(),
                    &b.numbers,
                    other.geometry.segments(),
                );
            i != j && meet && (mine.epoch, *j) < (other.epoch, *i)
        })
    };
    let staying: Vec<_> = known.iter().filter(|one| !loses(one)).copied().collect();
    let segment = match staying.first() {
        Some((_, superblock)) => u64::from(superblock.geometry.segment_bytes()),
        None => segment_of(found, memory, max_item).map_err(|e| (0, e.into()))?,
    };
    let divided = |bytes| Geometry::with_segment(bytes, segment);
    let segments: Vec<u64> = (0..found.len())
        .map(|i| divided(found[i].bytes).map_or(0, |g| u64::from(g.segments())))
        .collect();
    let total: u64 = segments.iter().sum::<u64>().max(1);
    // How entries are read follows from this: it is the cache's for good. New ones have numbers for as many again.
    let bits = match staying.first() {
        Some((_, superblock)) => part_of(superblock).bits,
        None => run_bits((2 * total).min(MAX_SEGMENTS.into()) as u16) as u8,
    };
    let most = most_of(bits);
    let first = match known.first() {
        Some((_, superblock)) => (*superblock).clone(),
        None => {
            let any = divided(found[0].bytes).map_err(|e| (0, e.into()))?;
            Superblock::format(drawn.uuid, drawn.hash_key, any, drawn.now)
        }
    };
    let mut taken: Vec<(Numbers, u16)> = Vec::new();
    let mut places = [false; MOST_DRIVES];
    for (_, superblock) in &staying {
        let part = part_of(superblock);
        taken.push((part.numbers, superblock.geometry.segments()));
        places[usize::from(part.place)] = true;
    }
    let mut names = drawn.names.iter();
    let mut members = Vec::with_capacity(found.len());
    for i in 0..found.len() {
        let mut name = || names.next().copied().unwrap_or(1).max(1);
        if let Some((_, superblock)) = staying.iter().find(|(j, _)| *j == i) {
            let superblock = match superblock.part {
                Some(_) => (*superblock).clone(),
                None => superblock.as_part(PartOf { drive: name(), ..part_of(superblock) }),
            };
            members.push(Member { superblock, fresh: false });
            continue;
        }
        let geometry = divided(found[i].bytes).map_err(|e| (i, e.into()))?;
        // All of them, where there are enough for twice the drives; else by capacity.
        let small = match total <= u64::from(SHARED) {
            true => geometry.segments(),
            false => (u64::from(SHARED) * segments[i] / total).max(LEAST_SMALL.into()) as u16,
        };
        let numbers = Numbers::beside(&taken, geometry.segments(), small, most)
            .or_else(|| Numbers::beside(&taken, geometry.segments(), SMALL_SEGMENTS, most))
            .filter(|n| n.small >= LEAST_SMALL.min(geometry.segments()))
            .ok_or((i, DrivesError::NoNumbers(geometry.segments())))?;
        let place = places.iter().position(|taken| !taken).unwrap_or(0);
        places[place] = true;
        taken.push((numbers, geometry.segments()));
        let part = PartOf { drive: name(), place: place as u8, numbers, bits };
        let superblock = first.format_beside(geometry, part, drawn.now);
        members.push(Member { superblock, fresh: true });
    }
    Ok(members)
}

/// That these can be drives of one cache.
fn check(known: &[(usize, &Superblock)]) -> Result<(), (usize, DrivesError)> {
    for (at, (i, mine)) in known.iter().enumerate() {
        for (_, other) in &known[..at] {
            let segments = (mine.geometry.segment_bytes(), other.geometry.segment_bytes());
            let name = |s: &Superblock| s.part.map(|part| part.drive);
            // One that says that it is alone has become a part since, unless the others have not been in any run.
            let before = match (mine.part, other.part) {
                (None, Some(_)) => other.run != 0,
                (Some(_), None) => mine.run != 0,
                _ => name(mine) == name(other),
            };
            let bits = (part_of(mine).bits, part_of(other).bits);
            let why = if mine.uuid != other.uuid || mine.hash_key != other.hash_key {
                DrivesError::OtherCache(mine.uuid, other.uuid)
            } else if before {
                DrivesError::Twice
            } else if segments.0 != segments.1 || bits.0 != bits.1 {
                DrivesError::Segments(segments.0, segments.1)
            } else {
                continue;
            };
            return Err((*i, why));
        }
    }
    Ok(())
}

/// Bytes of a segment for drives that are all new: as for one drive of twice their size, so that there are numbers for others later, but small
/// enough for the smallest of them to have some.
fn segment_of(found: &[FoundDrive<'_>], memory: u64, max_item: u64) -> Result<u64, GeometryError> {
    let total: u64 = found.iter().map(|f| f.bytes).sum();
    let smallest = found.iter().map(|f| f.bytes).min().unwrap_or(0);
    // Each drive holds three of them in memory.
    let memory = memory / found.len().max(1) as u64;
    let one = Plan::geometry(memory, total.saturating_mul(2), max_item)
        // (Not all numbers are given out: drives end with whole segments, and leave some of those that can hold small objects.)
        .or_else(|_| Plan::geometry(memory, total.saturating_add(total / 8), max_item))?;
    let mut segment = u64::from(one.segment_bytes());
    // (Of all numbers, less what drives lose that are cut into whole segments.)
    let numbered = |segment: u64| total / segment <= u64::from(MAX_SEGMENTS / 2);
    while smallest / segment < WANTED_SEGMENTS
        && segment / 2 >= LEAST_SEGMENT
        && (segment / 2).is_multiple_of(4096)
        && numbered(segment / 2)
    {
        segment /= 2;
    }
    Ok(segment)
}

/// The flash of these drives.
pub fn flash_of(members: &[Member]) -> FlashGeometry {
    let none = DriveSegments { numbers: Numbers::ALONE, segments: 0 };
    let mut drives = [none; MOST_DRIVES];
    for member in members {
        let PartOf { place, numbers, .. } = member.part();
        let segments = member.superblock.geometry.segments();
        if let Some(drive) = drives.get_mut(usize::from(place)) {
            *drive = DriveSegments { numbers, segments };
        }
    }
    let (salt, segment) = members
        .first()
        .map_or((0, 4096), |m| (m.superblock.salt(), m.superblock.geometry.segment_bytes()));
    let most = members.first().map_or(0, |m| m.part().most());
    FlashGeometry::of_drives(salt, segment, most, &drives)
}

/// The drive from which a start goes on: one that was in the last run, if there is one, and was there to its end.
pub fn lead(members: &[Member], last_run: Option<u64>) -> usize {
    let kept = |m: &Member| !m.fresh;
    let of_last = |m: &Member| kept(m) && Some(m.superblock.run) == last_run;
    let to_its_end = |m: &Member| of_last(m) && m.superblock.is_clean();
    let newest = || {
        let kept = members.iter().enumerate().filter(|(_, m)| kept(m));
        kept.max_by_key(|(i, m)| (m.superblock.epoch, std::cmp::Reverse(*i))).map(|(i, _)| i)
    };
    let first = members.iter().position(to_its_end);
    first.or_else(|| members.iter().position(of_last)).or_else(newest).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn drawn() -> DrivesDrawn {
        let names = (11..30).collect();
        DrivesDrawn { uuid: Uuid([7; 16]), hash_key: HashKey([8; 16]), names, now: UnixSecs(9) }
    }

    fn assembled(
        found: &[(Option<&Superblock>, u64)],
    ) -> Result<Vec<Member>, (usize, DrivesError)> {
        let found: Vec<_> = found
            .iter()
            .map(|(superblock, bytes)| FoundDrive { superblock: *superblock, bytes: *bytes })
            .collect();
        assemble(&found, 4 * GIB, 1 << 20, &drawn())
    }

    /// No number and no place twice, and small objects find some on each.
    fn are_apart(members: &[Member]) {
        let flash = flash_of(members);
        // How entries are read does not depend on which of them are there.
        for member in members {
            let alone = flash_of(std::slice::from_ref(member));
            assert_eq!(alone.segments, flash.segments);
            assert_eq!(alone.extent_align(), flash.extent_align());
        }
        for (i, a) in members.iter().enumerate() {
            let (part, segments) = (a.part(), a.superblock.geometry.segments());
            assert!(part.numbers.can_be(segments, part.most()), "{a:?}");
            assert_eq!(part.bits, members[0].part().bits);
            assert!(part.numbers.small >= LEAST_SMALL.min(segments), "{a:?}");
            for s in [1, segments / 2, segments] {
                assert_eq!(flash.at(part.numbers.number(s)), Some((part.place.into(), s)));
            }
            for b in &members[i + 1..] {
                assert_ne!((part.place, part.drive), (b.part().place, b.part().drive));
                let others = b.superblock.geometry.segments();
                assert!(!part.numbers.overlap(segments, &b.part().numbers, others));
            }
        }
    }

    #[test]
    fn new_drives_are_numbered_apart_whatever_their_sizes() {
        for sizes in [
            &[GIB, GIB][..],
            &[100 * GIB, GIB, 30 * GIB],
            &[4 << 40, 4 << 40, 4 << 40],
            &[7 << 40, 6 << 40],
            &[8 << 20, 9 << 20],
            &[2 * GIB; 16],
            &[64 * GIB],
        ] {
            let found: Vec<_> = sizes.iter().map(|bytes| (None, *bytes)).collect();
            let members = assembled(&found).unwrap();
            are_apart(&members);
            assert!(members.iter().all(|m| m.fresh && m.superblock.uuid == Uuid([7; 16])));
            // Another one of a usual size can join later.
            let mut found: Vec<_> =
                members.iter().zip(sizes).map(|(m, bytes)| (Some(&m.superblock), *bytes)).collect();
            if found.len() < MOST_DRIVES && sizes.iter().sum::<u64>() < 5 << 40 {
                found.push((None, sizes[0]));
                let more = assembled(&found).unwrap();
                are_apart(&more);
                assert_eq!(more.iter().filter(|m| m.fresh).count(), 1);
                assert!(more.iter().zip(&members).all(|(a, b)| a == b || !a.fresh && b.fresh));
            }
        }
    }

    #[test]
    fn one_that_was_alone_is_joined_and_keeps_its_numbers() {
        let geometry = Geometry::with_segment(GIB, 1 << 20).unwrap();
        let alone = Superblock::format(Uuid([1; 16]), HashKey([2; 16]), geometry, UnixSecs(3));
        let members = assembled(&[(None, 2 * GIB), (Some(&alone), GIB)]).unwrap();
        are_apart(&members);
        assert!(members[0].fresh && !members[1].fresh);
        assert_eq!(members[1].part().numbers.number(77), 77);
        assert_eq!(members[0].superblock.salt(), alone.salt());
        // It has all the numbers that can hold small objects, or that there can be.
        let large = Geometry::with_segment(3 * GIB, 1 << 20).unwrap();
        let large = Superblock { geometry: large, ..alone.clone() };
        let why = assembled(&[(Some(&large), 3 * GIB), (None, 2 * GIB)]).unwrap_err();
        assert!(matches!(why, (1, DrivesError::NoNumbers(_))), "{why:?}");
        let geometry = Geometry::plan(100 * GIB).unwrap();
        let full = Superblock { geometry, ..alone };
        let why = assembled(&[(Some(&full), 100 * GIB), (None, GIB)]).unwrap_err();
        assert!(matches!(why, (1, DrivesError::NoNumbers(_))), "{why:?}");
    }

    #[test]
    fn what_cannot_be_one_cache_is_refused_and_named() {
        let two = assembled(&[(None, GIB), (None, GIB)]).unwrap();
        let (a, b) = (&two[0].superblock, &two[1].superblock);
        let other = Superblock { uuid: Uuid([3; 16]), ..b.clone() };
        let refused = |found: &[(Option<&Superblock>, u64)]| assembled(found).unwrap_err();
        let why = refused(&[(Some(a), GIB), (None, GIB), (Some(&other), GIB)]);
        assert!(matches!(why, (2, DrivesError::OtherCache(..))), "{why:?}");
        assert_eq!(refused(&[(Some(a), GIB), (Some(a), GIB)]), (1, DrivesError::Twice));
        // A copy of the first from when it was alone.
        let alone = Superblock { part: None, incompatible: 0, ..a.clone() };
        let ran = Superblock { run: 5, epoch: 1, ..a.clone() };
        assert_eq!(refused(&[(Some(&ran), GIB), (Some(&alone), GIB)]), (1, DrivesError::Twice));
        assert!(matches!(refused(&[(None, GIB); 17]), (_, DrivesError::TooMany(17))));
        let small = refused(&[(Some(a), GIB), (None, 4096)]);
        assert!(matches!(small, (1, DrivesError::Geometry(_))), "{small:?}");
    }

    /// As often as somebody likes.
    #[test]
    fn drives_are_replaced_one_after_the_other() {
        for sizes in [[GIB, GIB], [1 << 40, 1 << 40], [3 << 40, 1 << 40]] {
            let mut members = assembled(&[(None, sizes[0]), (None, sizes[1])]).unwrap();
            let bits = members[0].part().bits;
            for i in 0..9 {
                let kept = |j: usize| (i % 2 != j).then_some(&members[j].superblock);
                members = assembled(&[(kept(0), sizes[0]), (kept(1), sizes[1])]).unwrap();
                are_apart(&members);
                assert_eq!(members[0].part().bits, bits);
                assert!(members[i % 2].fresh && !members[1 - i % 2].fresh);
            }
        }
    }

    /// What of the last run stopped in good order leads, whichever is named first.
    #[test]
    fn a_drive_that_was_there_to_the_end_leads() {
        let two = assembled(&[(None, GIB), (None, GIB)]).unwrap();
        let of = |clean_epoch, m: &Member| Member {
            superblock: Superblock { epoch: 4, clean_epoch, run: 7, ..m.superblock.clone() },
            fresh: false,
        };
        let members = [of(3, &two[0]), of(4, &two[1])];
        assert_eq!(lead(&members, Some(7)), 1);
        assert_eq!(lead(&[of(3, &two[0]), of(3, &two[1])], Some(7)), 0);
    }

    /// A drive was away, and its place has been given to another: the one that came back is formatted, however they are named.
    #[test]
    fn who_was_here_last_keeps_place_and_numbers() {
        let two = assembled(&[(None, GIB), (None, GIB)]).unwrap();
        let away = Superblock { epoch: 3, run: 4, ..two[1].superblock.clone() };
        let first = Superblock { epoch: 9, run: 8, ..two[0].superblock.clone() };
        let new = assembled(&[(Some(&first), GIB), (None, GIB)]).unwrap();
        let new = Superblock { epoch: 9, run: 8, ..new[1].superblock.clone() };
        assert_eq!(new.part.unwrap().numbers, away.part.unwrap().numbers);
        let new = Superblock { part: Some(PartOf { drive: 99, ..new.part.unwrap() }), ..new };
        for order in [[&away, &first, &new], [&new, &away, &first]] {
            let found = order.map(|superblock| (Some(superblock), GIB));
            let members = assembled(&found).unwrap();
            are_apart(&members);
            for (member, found) in members.iter().zip(order) {
                assert_eq!(member.fresh, found == &away);
            }
            assert_eq!(&members[lead(&members, Some(8))].superblock.run, &8);
        }
    }
}
