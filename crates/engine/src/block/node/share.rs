//! Which line may be displaced, and by which: pins, and each volume's share of the cache.
//!
//! A volume's share is what others leave it and what it may have at most. Lines that are pinned go for lines that are pinned
//! alone, as long as no more than four fifths of the cache are. The count of a volume's lines ([`Account`]) is kept up
//! by what is decided here, and set anew now and then by who counts them: lines that are dropped are not heard of here.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use larder_base::ByteSize;
use larder_policy::block::{Reason, VolumeId};

use crate::block::api::{GroupId, LineId, SlotId};
use crate::block::map::Slot;
use crate::block::shard::BlockShard;

/// How much of the cache may be pinned, in fifths. If more is, it is admitted always but not kept from being evicted: other
/// lines would have no place, and a log of segments would move its lines about to gain next to nothing.
const PINNED: (u64, u64) = (4, 5);

/// A part of the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Portion {
    /// Per cent of its lines, 0 to 100.
    Percent(f64),
    /// Bytes of lines.
    Bytes(ByteSize),
}

impl Portion {
    /// In lines of a cache of `slots` lines of `line` bytes.
    pub fn lines(self, slots: u64, line: u32) -> u64 {
        match self {
            Portion::Percent(share) => (slots as f64 * share / 100.0) as u64,
            Portion::Bytes(bytes) => bytes.0 / u64::from(line),
        }
    }
}

impl fmt::Display for Portion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Portion::Percent(share) => write!(f, "{share}%"),
            Portion::Bytes(bytes) => bytes.fmt(f),
        }
    }
}

impl FromStr for Portion {
    type Err = String;

    fn from_str(text: &str) -> Result<Portion, String> {
        let wrong = || format!("'{text}' is no part of a cache: write 10% or 20g");
        match text.strip_suffix('%') {
            Some(share) => match share.parse() {
                Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(Portion::Percent(percent)),
                Ok(percent) if percent > 100.0 => {
                    Err(format!("'{text}' is more than there is: at most 100%"))
                }
                _ => Err(wrong()),
            },
            None => text.parse().map(Portion::Bytes).map_err(|_| wrong()),
        }
    }
}

/// Floor and ceiling of a volume: `FLOOR..CEILING`, of which one may be missing.
///
/// Lines of a volume that has no more than its floor are not evicted for others; a volume that has its ceiling takes only
/// the places of its own lines.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Share {
    /// What others leave it.
    pub floor: Option<Portion>,
    /// What it may have at most.
    pub ceiling: Option<Portion>,
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Share, String> {
        let (floor, ceiling) = text.split_once("..").ok_or_else(|| {
            format!("'{text}' is no share: write FLOOR..CEILING, as in 10%..50% or ..20g")
        })?;
        let part = |t: &str| if t.is_empty() { Ok(None) } else { t.parse().map(Some) };
        let share = Share { floor: part(floor)?, ceiling: part(ceiling)? };
        if share == Share::default() {
            return Err(format!(
                "'{text}' says neither floor nor ceiling: write 10%..50%, 10%.. or ..50%"
            ));
        }
        // Per cent and bytes are compared when the cache's size is known.
        if let (Some(Portion::Percent(f)), Some(Portion::Percent(c))) = (share.floor, share.ceiling)
            && f > c
        {
            return Err(format!("'{text}': the floor is above the ceiling"));
        }
        Ok(share)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(floor) = self.floor {
            floor.fmt(f)?;
        }
        f.write_str("..")?;
        self.ceiling.map_or(Ok(()), |ceiling| ceiling.fmt(f))
    }
}

/// A volume's share in lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShareLines {
    /// What others leave it.
    pub floor: u64,
    /// What it may have at most.
    pub ceiling: Option<u64>,
}

impl ShareLines {
    /// `share` of a cache of `slots` lines of `line` bytes.
    ///
    /// # Errors
    /// When the floor is above the ceiling, as a clause that says so of its share.
    pub fn new(share: Share, slots: u64, line: u32) -> Result<ShareLines, String> {
        let floor = share.floor.map_or(0, |f| f.lines(slots, line));
        let ceiling = share.ceiling.map(|c| c.lines(slots, line));
        if ceiling.is_some_and(|c| c < floor) {
            return Err(format!(
                "its share {share}: the floor is above the ceiling in a cache of this size"
            ));
        }
        Ok(ShareLines { floor, ceiling })
    }

    /// Whether anything is stated.
    pub fn is_any(&self) -> bool {
        self.floor > 0 || self.ceiling.is_some()
    }
}

/// Whether each volume's share is said once.
///
/// # Errors
/// Of which it is said twice, and what, as a clause.
pub fn check_once(shares: &[(String, Share)]) -> Result<(), String> {
    let mut said: BTreeMap<&str, Share> = BTreeMap::new();
    for (name, share) in shares {
        if let Some(before) = said.insert(name, *share) {
            return Err(format!(
                "{name}={share}: volume '{name}' has the share {before} already: say one of the two"
            ));
        }
    }
    Ok(())
}

/// Whether a cache of `slots` lines of `line` bytes has as much as these volumes are to be left, all together.
///
/// # Errors
/// Their names with their floors, and what they are together, as a clause.
pub fn check_floors(shares: &[(String, Share)], slots: u64, line: u32) -> Result<(), String> {
    let floors: Vec<(&str, Portion)> =
        shares.iter().filter_map(|(name, share)| Some((name.as_str(), share.floor?))).collect();
    // (In bytes: what is too much by a little would be 100 % of 100 %.)
    let bytes = |portion: &Portion| match portion {
        Portion::Percent(share) => slots as f64 * share / 100.0 * f64::from(line),
        Portion::Bytes(bytes) => bytes.0 as f64,
    };
    let has = slots * u64::from(line);
    let together = floors.iter().map(|(_, floor)| bytes(floor)).sum::<f64>().ceil();
    let lines: u64 = floors.iter().map(|(_, floor)| floor.lines(slots, line)).sum();
    if lines <= slots {
        return Ok(());
    }
    let all: Vec<String> = floors.iter().map(|(name, floor)| format!("{name}={floor}..")).collect();
    let together = (together as u64).max(lines.saturating_mul(u64::from(line)));
    Err(format!(
        "{}: these floors are {together} bytes together, and the cache has {has} (100 %): lower them by {} bytes in all",
        all.join(", "),
        together - has
    ))
}

/// How many lines of the cache a volume has, about, and how many it may. Read and changed without a lock.
#[derive(Debug, Default)]
pub struct Account {
    lines: AtomicI64,
    share: ShareLines,
}

impl Account {
    /// Of a volume without lines.
    pub fn new(share: ShareLines) -> Account {
        Account { lines: AtomicI64::new(0), share }
    }

    /// What it may have.
    pub fn share(&self) -> ShareLines {
        self.share
    }

    /// Its lines in the cache, about.
    pub fn lines(&self) -> u64 {
        self.lines.load(Ordering::Relaxed).max(0) as u64
    }

    /// It has so many lines: they were counted.
    pub fn set(&self, lines: u64) {
        self.lines.store(lines as i64, Ordering::Relaxed);
    }

    /// So many of its lines were dropped.
    pub fn dropped(&self, lines: u64) {
        self.lines.fetch_sub(lines as i64, Ordering::Relaxed);
    }

    /// Whether it has as many lines as it may.
    pub fn at_ceiling(&self) -> bool {
        self.share.ceiling.is_some_and(|ceiling| self.lines() >= ceiling)
    }

    /// Whether it may have one more line. If so, that counts as there.
    pub fn may_grow(&self) -> bool {
        if self.at_ceiling() {
            return false;
        }
        self.lines.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// How much is pinned, and whether anything is to be looked at when a line is to go.
#[derive(Debug, Default)]
pub struct Pins {
    /// Bytes of lines in the cache.
    capacity: u64,
    pinned: AtomicU64,
    governed: AtomicBool,
}

impl Pins {
    /// Of a cache with so many bytes of lines.
    pub fn new(capacity: u64) -> Pins {
        Pins { capacity, ..Pins::default() }
    }

    /// So many bytes are pinned. `governed`: something is selected, or some volume has a share.
    pub fn set(&self, pinned: u64, governed: bool) {
        self.pinned.store(pinned, Ordering::Relaxed);
        self.governed.store(governed, Ordering::Relaxed);
    }

    /// Bytes that are pinned, and how many may be for them to be kept from eviction.
    pub fn pinned(&self) -> (u64, u64) {
        (self.pinned.load(Ordering::Relaxed), self.capacity / PINNED.1 * PINNED.0)
    }

    fn hold(&self) -> bool {
        let (pinned, most) = self.pinned();
        pinned <= most
    }
}

/// A line that is to go, or to come: whose it is, and whether it is pinned.
pub struct Side<'a, P: Fn() -> bool> {
    /// Its volume.
    pub volume: VolumeId,
    /// The volume's account.
    pub account: &'a Account,
    /// Whether it is selected to be cached always.
    pub pinned: P,
}

/// Whether a line stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// It goes, and counts as evicted.
    No,
    /// It stays. With the reason for which the line that would have come is refused, if there is one: where it is about room
    /// alone nobody is refused anything.
    Yes(Option<Reason>),
}

/// Whether `victim` stays, though `line` would take its place (`None`: it is only about room).
pub fn keep<P: Fn() -> bool, Q: Fn() -> bool>(
    pins: &Pins,
    victim: &Side<'_, P>,
    line: Option<&Side<'_, Q>>,
) -> Stays {
    let keep = pins.governed.load(Ordering::Relaxed) && {
        if pins.hold() && (victim.pinned)() {
            // Among what is pinned the newer may have the place.
            !line.is_some_and(|line| (line.pinned)())
        } else if line.is_some_and(|line| line.volume == victim.volume) {
            false
        } else {
            victim.account.lines() <= victim.account.share.floor
                || line.is_some_and(|line| line.account.at_ceiling())
        }
    };
    if keep {
        let reason = |ceiling| if ceiling { Reason::Ceiling } else { Reason::NoSlot };
        return Stays::Yes(line.map(|line| reason(line.account.at_ceiling())));
    }
    victim.account.lines.fetch_sub(1, Ordering::Relaxed);
    if let Some(line) = line {
        line.account.lines.fetch_add(1, Ordering::Relaxed);
    }
    Stays::No
}

/// What [`keep`] let go stays after all.
pub fn not_taken(victim: &Account, line: &Account) {
    victim.lines.fetch_add(1, Ordering::Relaxed);
    line.lines.fetch_sub(1, Ordering::Relaxed);
}

/// Whether the lines of a page of a sparse cache's table stay, of which each account of `shares` has so many. `pinned` says
/// whether one that could be there is pinned. If they go, they count as evicted.
pub fn keep_page<'a>(
    pins: &Pins,
    shares: impl Iterator<Item = (&'a Account, u64)> + Clone,
    pinned: impl FnOnce() -> bool,
) -> bool {
    if pins.governed.load(Ordering::Relaxed) {
        let below = |(account, lines): (&Account, u64)| {
            let floor = account.share.floor;
            floor > 0 && lines > 0 && account.lines() < floor + lines
        };
        if shares.clone().any(below) || pins.hold() && pinned() {
            return true;
        }
    }
    shares.for_each(|(account, lines)| account.dropped(lines));
    false
}

/// How many of `lines` lines, which lie nobody knows where in a shard's groups from `first` to `last` (every `stride`th is
/// its), which volume has, about: in proportion to its groups, together all of them, unless there is no volume. One that has all
/// the groups has exactly these. `of` says whose a group is.
pub fn of_page<K: Copy + Ord, V>(
    (first, last): (GroupId, GroupId),
    stride: u64,
    lines: u64,
    of: impl Fn(GroupId) -> Option<(K, V)>,
) -> Vec<(V, u64)> {
    match (of(first), of(last)) {
        (Some((volume, v)), Some((same, _))) if volume == same => return vec![(v, lines)],
        _ => {}
    }
    // Where none of a volume's groups are, there are no lines: the rest of the page has them.
    let mut groups: BTreeMap<K, (V, u64)> = BTreeMap::new();
    for (volume, v) in
        (first.0..=last.0).step_by(stride.max(1) as usize).filter_map(|g| of(GroupId(g)))
    {
        groups.entry(volume).or_insert((v, 0)).1 += 1;
    }
    let (mut left, mut all) = (lines, groups.values().map(|g| g.1).sum::<u64>());
    let share = |(v, groups): (V, u64)| {
        let lines = left * groups / all;
        (left, all) = (left - lines, all - groups);
        (v, lines)
    };
    groups.into_values().map(share).collect()
}

/// Slots of the map, or pages of a table, that are looked at in one turn.
const STEP: u32 = 4096;
const PAGES: u32 = 256;

/// How far a count of a shard's lines is. Each turn looks at some of them, so that a lock need not be held for
/// longer.
#[derive(Debug, Default)]
pub struct Count {
    next: u32,
    begun: bool,
}

impl Count {
    /// One turn: tells `each` of volumes that have so many lines more. `of` says whose a group is. Lines on their way to flash
    /// count too: a volume at its ceiling must not get as many again. One that arrives meanwhile may be counted twice. Of
    /// a page of a table that several volumes share, and that is not in memory, each is taken to have its part. Returns whether
    /// there is more to count.
    pub fn turn<K: Copy + Ord>(
        &mut self,
        shard: &BlockShard,
        of: impl Fn(GroupId) -> Option<K>,
        mut each: impl FnMut(K, u64),
    ) -> bool {
        if !std::mem::replace(&mut self.begun, true) {
            for (group, lines) in shard.filling() {
                of(group).into_iter().for_each(|volume| each(volume, lines.into()));
            }
        }
        let from = self.next;
        let map = shard.map();
        let Some(table) = map.sparse() else {
            let mut slots = Vec::new();
            shard.state(SlotId(from), STEP, &mut slots);
            for (line, _) in slots.iter().flatten() {
                of(LineId(*line).group()).into_iter().for_each(|volume| each(volume, 1));
            }
            self.next = from + slots.len() as u32;
            return self.next < map.len();
        };
        self.next = from.saturating_add(PAGES).min(table.pages());
        for page in (from..self.next).filter(|&page| table.lines_in(page) > 0) {
            let lines = u64::from(table.lines_in(page));
            let (first, last) = table.groups_of(page);
            let whole = of(first).is_some() && of(first) == of(last);
            if !whole && table.is_here(page) {
                let per = table.page_slots();
                for at in page * per..(page + 1) * per {
                    if let Slot::Line(line) = table.get(SlotId(at)) {
                        of(line.group()).into_iter().for_each(|volume| each(volume, 1));
                    }
                }
                continue;
            }
            let stride = map.placing().shards();
            let shares = of_page((first, last), stride, lines, |g| of(g).map(|v| (v, v)));
            shares.into_iter().for_each(|(volume, lines)| each(volume, lines));
        }
        self.next < table.pages()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_and_nonsense_refused() {
        let share: Share = "10%..50%".parse().unwrap();
        assert_eq!(share.floor.unwrap().lines(1000, 4096), 100);
        assert_eq!(share.ceiling.unwrap().lines(1000, 4096), 500);
        assert_eq!(share.to_string(), "10%..50%");
        let share: Share = "..8m".parse().unwrap();
        assert_eq!((share.floor, share.ceiling.unwrap().lines(1, 4096)), (None, 2048));
        for wrong in ["", "..", "10%", "60%..50%", "101%..", "x..y", "-1%..", "NaN%.."] {
            assert!(wrong.parse::<Share>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn floors_that_are_more_than_the_cache_together_are_refused_with_what_they_are() {
        let of = |all: &[(&str, &str)]| {
            let shares: Vec<(String, Share)> =
                all.iter().map(|(name, s)| ((*name).to_owned(), s.parse().unwrap())).collect();
            check_floors(&shares, 1000, 4096)
        };
        assert_eq!(of(&[("a", "50%.."), ("b", "50%..60%"), ("c", "..90%")]), Ok(()));
        let why = of(&[("a", "60%.."), ("b", "50%..")]).unwrap_err();
        assert!(
            why.contains("a=60%.., b=50%..") && why.contains("lower them by 409600 bytes"),
            "{why}"
        );
        let why = of(&[("a", "60%.."), ("b", "2m..")]).unwrap_err();
        assert!(why.contains("a=60%..") && why.contains("lower them by 458752 bytes"), "{why}");
        // What is too much by a little is said as that.
        let why = of(&[("a", "100%.."), ("b", "4k..")]).unwrap_err();
        assert!(why.contains("4100096 bytes together, and the cache has 4096000"), "{why}");
        assert!(why.contains("lower them by 4096 bytes") && !why.contains("100 % of"), "{why}");
        let why = "160%..".parse::<Share>().unwrap_err();
        assert!(why.contains("'160%' is more than there is: at most 100%"), "{why}");
    }

    #[test]
    fn a_share_that_is_said_twice_is_refused_with_both() {
        let of = |all: &[(&str, &str)]| {
            let shares: Vec<(String, Share)> =
                all.iter().map(|(name, s)| ((*name).to_owned(), s.parse().unwrap())).collect();
            check_once(&shares)
        };
        assert_eq!(of(&[("a", "50%.."), ("b", "50%..60%"), ("c", "..90%")]), Ok(()));
        let why = of(&[("a", "10%.."), ("b", "5%.."), ("a", "..2g")]).unwrap_err();
        assert!(why.contains("a=..2") && why.contains("'a' has the share 10%.. already"), "{why}");
        assert!(of(&[("a", "10%.."), ("a", "10%..")]).is_err());
    }

    fn side(volume: u32, account: &Account, pinned: bool) -> Side<'_, impl Fn() -> bool> {
        Side { volume: VolumeId(volume), account, pinned: move || pinned }
    }

    fn account(floor: u64, ceiling: Option<u64>, lines: u64) -> Account {
        let account = Account::new(ShareLines { floor, ceiling });
        account.set(lines);
        account
    }

    #[test]
    fn floors_ceilings_and_pins() {
        let pins = Pins::new(1000);
        let (low, rich, full) =
            (account(10, None, 10), account(0, None, 50), account(0, Some(5), 5));
        let ask = |victim: (u32, &Account, bool), line: (u32, &Account, bool)| {
            let (victim, line) = (side(victim.0, victim.1, victim.2), side(line.0, line.1, line.2));
            keep(&pins, &victim, Some(&line))
        };
        // Nothing is stated: every line may go.
        assert_eq!(ask((1, &low, false), (2, &rich, false)), Stays::No);
        assert_eq!((low.lines(), rich.lines()), (9, 51));
        not_taken(&low, &rich);
        pins.set(0, true);
        assert_eq!(ask((1, &low, false), (2, &rich, false)), Stays::Yes(Some(Reason::NoSlot)));
        assert_eq!(ask((1, &low, false), (1, &low, false)), Stays::No, "its own");
        assert_eq!(ask((2, &rich, false), (3, &full, false)), Stays::Yes(Some(Reason::Ceiling)));
        assert_eq!(ask((3, &full, false), (3, &full, false)), Stays::No);
        assert_eq!(ask((2, &rich, false), (1, &low, false)), Stays::No);
        assert_eq!((low.lines(), rich.lines(), full.lines()), (11, 49, 5));
        assert!(!full.may_grow() && rich.may_grow());
        // Pinned lines go for pinned ones, while no more than four fifths are pinned.
        assert_eq!(ask((2, &rich, true), (1, &low, false)), Stays::Yes(Some(Reason::NoSlot)));
        assert_eq!(ask((2, &rich, true), (1, &low, true)), Stays::No);
        pins.set(801, true);
        assert_eq!(ask((2, &rich, true), (1, &low, false)), Stays::No);
        // About room alone nobody is refused.
        let low = account(10, None, 10);
        let room = keep(&pins, &side(1, &low, false), None::<&Side<'_, fn() -> bool>>);
        assert_eq!(room, Stays::Yes(None));
    }

    #[test]
    fn a_page_goes_as_a_whole() {
        let pins = Pins::new(1000);
        pins.set(0, true);
        let (low, rich) = (account(10, None, 12), account(0, None, 50));
        let page = |of_low| [(&low, of_low), (&rich, 20)].into_iter();
        assert!(keep_page(&pins, page(3), || false), "it would have less than its floor");
        assert!(keep_page(&pins, page(2), || true), "something is pinned there");
        assert!(!keep_page(&pins, page(2), || false));
        assert_eq!((low.lines(), rich.lines()), (10, 30));
        // Volumes of three groups and of one; lines of nobody.
        let of = |g: GroupId| (g.0 < 8).then(|| (VolumeId(u32::from(g.0 >= 6)), g.0 >= 6));
        assert_eq!(of_page((GroupId(0), GroupId(9)), 2, 10, of), [(false, 7), (true, 3)]);
        assert_eq!(of_page((GroupId(0), GroupId(4)), 2, 10, of), [(false, 10)]);
        assert_eq!(of_page((GroupId(8), GroupId(9)), 1, 10, of), []);
    }
}
