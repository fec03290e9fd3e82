//! Sizes as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes. Parses `4096`, `64k`, `512m`, `4g`, `1t` (powers of 1024; `KiB`, `MB` and the like too).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// Why a size could not be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not a size: write a number of bytes, or a number with k, m, g or t (4096, 64k, 512m, 4g)"
)]
pub struct ParseSizeError(pub String);

impl ByteSize {
    /// `n` KiB.
    pub const fn kib(n: u64) -> ByteSize {
        ByteSize(n << 10)
    }
    /// `n` MiB.
    pub const fn mib(n: u64) -> ByteSize {
        ByteSize(n << 20)
    }
    /// `n` GiB.
    pub const fn gib(n: u64) -> ByteSize {
        ByteSize(n << 30)
    }
}

impl FromStr for ByteSize {
    type Err = ParseSizeError;

    fn from_str(text: &str) -> Result<ByteSize, ParseSizeError> {
        let bad = || ParseSizeError(text.to_owned());
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(bad()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(1 << shift).map(ByteSize).ok_or_else(bad);
        }
        let value = number.parse::<f64>().map_err(|_| bad())? * (1u64 << shift) as f64;
        if !value.is_finite() || value < 0.0 || value >= u64::MAX as f64 {
            return Err(bad());
        }
        Ok(ByteSize(value as u64))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        if unit == 0 || value.fract() == 0.0 {
            write!(f, "{value:.0} {}", UNITS[unit])
        } else {
            write!(f, "{value:.1} {}", UNITS[unit])
        }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<ByteSize, D::Error> {
        struct Size;
        impl serde::de::Visitor<'_> for Size {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or text such as \"64k\" or \"4g\"")
            }
            fn visit_u64<E: serde::de::Error>(self, n: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(n))
            }
            fn visit_i64<E: serde::de::Error>(self, n: i64) -> Result<ByteSize, E> {
                let negative = serde::de::Unexpected::Signed(n);
                u64::try_from(n).map(ByteSize).map_err(|_| E::invalid_value(negative, &self))
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, bytes) in
            [("0", 0), ("4096", 4096), ("64k", 65536), ("1.5 GiB", 3 << 29), ("2T", 2 << 40)]
        {
            assert_eq!(text.parse::<ByteSize>().unwrap().0, bytes, "{text}");
        }
        for text in ["", "x", "4q", "-1", "1e99g", "99999999999t"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        assert_eq!(ByteSize(3 << 29).to_string(), "1.5 GiB");
    }
}
