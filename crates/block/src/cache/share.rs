//! A volume's share of the cache: what others leave it, and what it may have at most.

use std::fmt;
use std::str::FromStr;

use larder_base::ByteSize;

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
            Some(share) => share
                .parse()
                .ok()
                .filter(|s| (0.0..=100.0).contains(s))
                .map(Portion::Percent)
                .ok_or_else(wrong),
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
}
