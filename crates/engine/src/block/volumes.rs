//! Where a volume lies in the line space, and whether what is cached of it may be used: decided when it comes and when it
//! grows.
//!
//! The list is the superblock's. What only its store can tell, whether it is as the cache left it, comes in as yes or no. The
//! caller makes a decision durable before it acts on it.

use larder_format::block::layout::GROUP_LINES;
use larder_format::block::{BlockSuperblock, Volume, VolumeState};

/// A volume that comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coming {
    /// Its name, 1 to [`MAX_NAME`](larder_format::block::superblock::MAX_NAME) bytes.
    pub name: String,
    /// The size of its store, bytes.
    pub bytes: u64,
    /// Its store is as the cache left it, if the cache has known it.
    pub unchanged: bool,
    /// By what its store is known again.
    pub identity: [u8; 64],
}

/// What becomes of lines that the cache has of a volume that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The cache does not know it.
    New,
    /// They are used.
    Warm,
    /// They are not used: nothing proves that its store is as it was.
    Changed,
    /// They are not used: its store has grown in the meantime.
    Grown,
}

/// A volume that was taken up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenUp {
    /// As it stands in the superblock now.
    pub volume: Volume,
    /// Whether its lines are used.
    pub found: Found,
    /// Its former stretch, if it had one: first group and groups.
    pub former: Option<(u64, u64)>,
}

/// Why a volume cannot come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CannotCome {
    /// It had so many bytes when it was last attached, and has fewer now.
    Shrunk(u64),
    /// The superblock has room for no more volumes than so many.
    TooMany(usize),
    /// No stretch of the line space that is free is long enough.
    NoRoom,
}

/// Takes a volume up. Refused, nothing is changed. One whose store has become smaller is refused, unless it may be dirty: then it has as many bytes
/// as before, and whoever serves it sees to it that it is only read.
///
/// # Errors
/// What is in the way.
pub fn take_up(sb: &mut BlockSuperblock, coming: &Coming) -> Result<TakenUp, CannotCome> {
    let known = sb.volumes.iter().position(|v| v.name == coming.name);
    let before = known.map(|at| sb.volumes[at].clone());
    let shrunk = before.as_ref().filter(|b| coming.bytes < b.bytes);
    // Of one that may be dirty nothing is lost: it keeps its size, and is only read.
    let dirty = |b: &&Volume| b.write_back.is_some_and(|w| w.holds.may_be_dirty());
    if let Some(before) = shrunk.filter(|b| !dirty(b)) {
        return Err(CannotCome::Shrunk(before.bytes));
    }
    let bytes = shrunk.map_or(coming.bytes, |before| before.bytes);
    let found = match &before {
        None => Found::New,
        Some(_) if shrunk.is_some() || !coming.unchanged => Found::Changed,
        Some(before) if before.bytes != coming.bytes => Found::Grown,
        Some(_) => Found::Warm,
    };
    let mut others = sb.volumes.clone();
    known.map(|at| others.remove(at));
    let most = sb.most_volumes();
    if found != Found::Warm && others.len() >= most {
        return Err(CannotCome::TooMany(most));
    }
    let own = before.as_ref().map(|b| (b.first_group, b.groups));
    let all = std::mem::replace(&mut sb.volumes, others);
    // A stretch of its own it keeps only with its lines.
    let kept = own.filter(|_| found == Found::Warm);
    let Some((first_group, groups)) = kept.or_else(|| sb.allocate(bytes)) else {
        sb.volumes = all;
        return Err(CannotCome::NoRoom);
    };
    let volume = Volume {
        name: coming.name.clone(),
        first_group,
        groups,
        bytes,
        state: VolumeState::Attached,
        identity: coming.identity,
        // What the log holds of it is not for its lines to say.
        write_back: before.and_then(|b| b.write_back),
    };
    sb.volumes.push(volume.clone());
    Ok(TakenUp { volume, found, former: own })
}

/// Where a volume that grows has its lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Its first group, once it has grown.
    pub first_group: u64,
    /// Groups that it has.
    pub groups: u64,
    /// Groups that it will have. If it stays where it is, what is more lies right behind.
    pub needed: u64,
    /// The first group that it has, if it must move: what is cached of it is not used there.
    pub moves_from: Option<u64>,
}

/// Why a volume cannot grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CannotGrow {
    /// There is none of that name.
    Unknown,
    /// Its size is no multiple of a line: the bytes behind the last whole line go past the shards, which would not know of a
    /// write under way there.
    Uneven,
    /// There is no stretch of the line space that is long enough, neither where it lies nor elsewhere.
    NoRoom,
}

/// How a volume would grow to `bytes`.
///
/// # Errors
/// What is in the way.
pub fn room_to_grow(sb: &BlockSuperblock, name: &str, bytes: u64) -> Result<Growth, CannotGrow> {
    let volume = sb.volumes.iter().find(|v| v.name == name).ok_or(CannotGrow::Unknown)?;
    let line = u64::from(sb.layout.line);
    if !volume.bytes.is_multiple_of(line) {
        return Err(CannotGrow::Uneven);
    }
    let region = sb.layout.region_groups;
    let groups = bytes.div_ceil(line * GROUP_LINES).max(1);
    let needed = groups.checked_next_multiple_of(region).ok_or(CannotGrow::NoRoom)?;
    let needed = needed.max(volume.groups);
    let space = sb.layout.space_lines() / GROUP_LINES / region * region;
    if needed > space {
        return Err(CannotGrow::NoRoom);
    }
    let (first_group, groups) = (volume.first_group, volume.groups);
    let end = first_group + needed;
    let apart = |v: &Volume| {
        v.name == name || v.first_group + v.groups <= first_group || end <= v.first_group
    };
    if end <= space && sb.volumes.iter().all(apart) {
        return Ok(Growth { first_group, groups, needed, moves_from: None });
    }
    let mut others = sb.clone();
    others.volumes.retain(|v| v.name != name);
    let (elsewhere, needed) = others.allocate(bytes).ok_or(CannotGrow::NoRoom)?;
    Ok(Growth { first_group: elsewhere, groups, needed, moves_from: Some(first_group) })
}

/// Gives a volume the size `bytes`, and its store's new identity.
///
/// # Errors
/// As [`room_to_grow`]: nothing is changed.
pub fn grow(
    sb: &mut BlockSuperblock,
    name: &str,
    bytes: u64,
    identity: [u8; 64],
) -> Result<Growth, CannotGrow> {
    let growth = room_to_grow(sb, name, bytes)?;
    for v in sb.volumes.iter_mut().filter(|v| v.name == name) {
        (v.first_group, v.groups) = (growth.first_group, growth.needed);
        (v.bytes, v.identity) = (bytes, identity);
    }
    Ok(growth)
}

/// Puts a volume aside: `identity` is what it is known by when it comes back. Returns the stretch that it keeps, if there
/// is such a volume.
pub fn put_aside(sb: &mut BlockSuperblock, name: &str, identity: [u8; 64]) -> Option<(u64, u64)> {
    let volume = sb.volumes.iter_mut().find(|v| v.name == name)?;
    (volume.state, volume.identity) = (VolumeState::Detached, identity);
    Some((volume.first_group, volume.groups))
}

/// Forgets a volume that was put aside. Returns the stretch that it had: first group and groups. One that is attached is none.
pub fn forget(sb: &mut BlockSuperblock, name: &str) -> Option<(u64, u64)> {
    let aside = |v: &Volume| v.name == name && v.state == VolumeState::Detached;
    let at = sb.volumes.iter().position(aside)?;
    let volume = sb.volumes.remove(at);
    Some((volume.first_group, volume.groups))
}

#[cfg(test)]
mod tests {
    use larder_base::UnixSecs;
    use larder_format::Uuid;
    use larder_format::block::Layout;

    use super::*;

    fn superblock() -> BlockSuperblock {
        let layout = Layout::new(64 << 20, 4096, 8, 2).unwrap();
        BlockSuperblock::format(Uuid([7; 16]), 1, 2, layout, UnixSecs(0))
    }

    fn coming(name: &str, bytes: u64, unchanged: bool) -> Coming {
        Coming { name: name.into(), bytes, unchanged, identity: [bytes as u8; 64] }
    }

    fn region_bytes(sb: &BlockSuperblock) -> u64 {
        sb.layout.region_groups * GROUP_LINES * u64::from(sb.layout.line)
    }

    #[test]
    fn volumes_come_go_and_come_back() {
        let mut sb = superblock();
        let region = region_bytes(&sb);
        let a = take_up(&mut sb, &coming("a", region, false)).unwrap();
        let b = take_up(&mut sb, &coming("b", 1, false)).unwrap();
        assert_eq!((a.found, a.former, a.volume.first_group), (Found::New, None, 0));
        assert_eq!(b.volume.first_group, a.volume.groups);
        let own = (a.volume.first_group, a.volume.groups);
        assert_eq!(put_aside(&mut sb, "a", [9; 64]), Some(own));
        assert_eq!(put_aside(&mut sb, "c", [9; 64]), None);
        let again = take_up(&mut sb, &coming("a", region, true)).unwrap();
        assert_eq!((again.found, again.former), (Found::Warm, Some(own)));
        assert_eq!((again.volume.first_group, again.volume.state), (0, VolumeState::Attached));
        // Changed, grown, shrunk: what it had is not used; the last is refused and nothing changes.
        let changed = take_up(&mut sb, &coming("a", region, false)).unwrap();
        assert_eq!((changed.found, changed.former), (Found::Changed, Some(own)));
        let grown = take_up(&mut sb, &coming("a", 3 * region, true)).unwrap();
        assert_eq!((grown.found, grown.volume.bytes), (Found::Grown, 3 * region));
        assert!(grown.volume.first_group >= b.volume.first_group + b.volume.groups);
        let before = sb.clone();
        let shrunk = take_up(&mut sb, &coming("a", region, true));
        assert_eq!(shrunk, Err(CannotCome::Shrunk(3 * region)));
        // What is dirty of it may lie beyond its new end.
        let (mut dirty, at) = (sb.clone(), sb.volumes.iter().position(|v| v.name == "a").unwrap());
        dirty.volumes[at].write_back = Some(larder_format::block::superblock::WrittenBack {
            volume: Uuid([1; 16]),
            attachment: 1,
            began: 0,
            holds: larder_format::block::superblock::HoldsState::Open,
            generation: 1,
            marker: 1,
            run: 1,
            order: larder_format::block::marker::Order::Flush,
            cut: None,
        });
        let kept = take_up(&mut dirty, &coming("a", region, true)).unwrap();
        assert_eq!((kept.found, kept.volume.bytes), (Found::Changed, 3 * region));
        assert_eq!(take_up(&mut sb, &coming("d", u64::MAX >> 8, false)), Err(CannotCome::NoRoom));
        // One that has to move and cannot stays as it was.
        assert_eq!(take_up(&mut sb, &coming("b", u64::MAX >> 8, true)), Err(CannotCome::NoRoom));
        assert_eq!(sb, before);
        for n in sb.volumes.len()..sb.most_volumes() {
            take_up(&mut sb, &coming(&format!("v{n}"), 1, false)).unwrap();
        }
        assert_eq!(
            take_up(&mut sb, &coming("more", 1, false)),
            Err(CannotCome::TooMany(sb.most_volumes()))
        );
        assert!(take_up(&mut sb, &coming("b", 1, true)).is_ok(), "it has its place");
        // Only one that was put aside is forgotten; its place is another's then.
        let before = sb.clone();
        assert_eq!((forget(&mut sb, "b"), forget(&mut sb, "x")), (None, None));
        assert_eq!(sb, before);
        let own = put_aside(&mut sb, "b", [9; 64]);
        assert_eq!(forget(&mut sb, "b"), own);
        assert_eq!(forget(&mut sb, "b"), None);
        let more = take_up(&mut sb, &coming("more", 1, false)).unwrap();
        assert_eq!(Some((more.volume.first_group, more.volume.groups)), own);
    }

    #[test]
    fn a_volume_grows_where_it_lies_if_it_can() {
        let mut sb = superblock();
        let region = region_bytes(&sb);
        take_up(&mut sb, &coming("a", 4096, false)).unwrap();
        let one = sb.volumes[0].groups;
        // Within its last region nothing else is needed.
        let growth = grow(&mut sb, "a", region, [3; 64]).unwrap();
        assert_eq!((growth.groups, growth.needed), (one, one));
        assert_eq!((sb.volumes[0].bytes, sb.volumes[0].identity), (region, [3; 64]));
        let growth = grow(&mut sb, "a", region + 1, [4; 64]).unwrap();
        assert_eq!((growth.groups, growth.needed), (one, 2 * one));
        let before = sb.clone();
        let refused = |sb: &mut BlockSuperblock, name: &str, bytes| grow(sb, name, bytes, [5; 64]);
        assert_eq!(refused(&mut sb, "a", 3 * region), Err(CannotGrow::Uneven));
        assert_eq!(refused(&mut sb, "x", region), Err(CannotGrow::Unknown));
        assert_eq!(sb, before);
        let mut sb = superblock();
        take_up(&mut sb, &coming("a", 4096, false)).unwrap();
        take_up(&mut sb, &coming("b", 4096, false)).unwrap();
        for bytes in [u64::MAX, u64::MAX >> 1, sb.layout.space_lines() * 4096 + 4096] {
            assert_eq!(refused(&mut sb, "b", bytes), Err(CannotGrow::NoRoom), "{bytes}");
        }
        let growth = grow(&mut sb, "b", 5 * region, [5; 64]).unwrap();
        assert_eq!((growth.moves_from, growth.first_group), (None, one));
    }

    /// Who has another right behind moves to where there is room, and back where others have left some.
    #[test]
    fn a_volume_that_cannot_grow_where_it_lies_moves() {
        let mut sb = superblock();
        let region = region_bytes(&sb);
        for name in ["a", "b", "c"] {
            take_up(&mut sb, &coming(name, region, false)).unwrap();
        }
        let one = sb.volumes[0].groups;
        let growth = grow(&mut sb, "a", 2 * region, [3; 64]).unwrap();
        let moved =
            Growth { first_group: 3 * one, groups: one, needed: 2 * one, moves_from: Some(0) };
        assert_eq!(growth, moved);
        // Its own place counts as free.
        let growth = grow(&mut sb, "b", 2 * region, [3; 64]).unwrap();
        assert_eq!((growth.first_group, growth.moves_from), (0, Some(one)));
        let growth = grow(&mut sb, "c", 3 * region, [3; 64]).unwrap();
        assert_eq!((growth.first_group, growth.moves_from), (5 * one, Some(2 * one)));
        let places = sb.volumes.iter().map(|v| (&v.name[..], v.first_group, v.groups, v.bytes));
        let places: Vec<_> = places.collect();
        let b = 2 * region;
        let right =
            [("a", 3 * one, 2 * one, b), ("b", 0, 2 * one, b), ("c", 5 * one, 3 * one, 3 * region)];
        assert_eq!(places, right);
        let before = sb.clone();
        let all = sb.layout.space_lines() * 4096;
        assert_eq!(grow(&mut sb, "b", all - 2 * region, [5; 64]), Err(CannotGrow::NoRoom));
        assert_eq!(sb, before);
    }
}
