//! Sizes as people write them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes. Parses `4096`, `64k`, `512m`, `4g`, `1t` (powers of 1024; `KiB`, `MB` and the like too).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// Why a size could not be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseSizeError {
    /// Other text.
    #[error(
        "'{0}' is not a size: write a number of bytes, or a number with k, m, g or t (4096, 64k, 512m, 4g)"
    )]
    NotASize(String),
    /// A size that 64 bits do not hold.
    #[error(
        "'{0}' is too large: a size is at most 18446744073709551615 bytes, just under 16777216t"
    )]
    TooLarge(String),
}

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
        let bad = || ParseSizeError::NotASize(text.to_owned());
        let too_large = || ParseSizeError::TooLarge(text.to_owned());
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
            return whole.checked_mul(1 << shift).map(ByteSize).ok_or_else(too_large);
        }
        let value = number.parse::<f64>().map_err(|_| bad())? * (1u64 << shift) as f64;
        // Digits and a point are never below zero, and not a number of their own kind.
        if value >= u64::MAX as f64 { Err(too_large()) } else { Ok(ByteSize(value as u64)) }
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

/// Endurance of a drive: bytes that may be written to it in its life, as drives are rated, in terabytes of 10^12 bytes
/// (TBW). Parses `600` and `600t` (terabytes), `1.2p` (petabytes), `800g`; powers of 1024 where it is said (`600tib`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endurance {
    /// Bytes.
    pub bytes: u64,
}

/// Why an endurance could not be read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not an endurance: write terabytes of 10^12 bytes above 0, as drives are rated (600, 600t, 1.2p)"
)]
pub struct ParseEnduranceError(pub String);

impl Endurance {
    fn of(number: f64, unit: f64) -> Option<Endurance> {
        let bytes = number * unit;
        (bytes >= 1.0 && bytes < u64::MAX as f64).then_some(Endurance { bytes: bytes as u64 })
    }

    /// So many terabytes; none if that is under a byte or over 2^64.
    pub fn terabytes(number: f64) -> Option<Endurance> {
        Endurance::of(number, 1e12)
    }

    /// In terabytes of 10^12 bytes.
    pub fn as_terabytes(self) -> f64 {
        self.bytes as f64 / 1e12
    }
}

impl FromStr for Endurance {
    type Err = ParseEnduranceError;

    fn from_str(text: &str) -> Result<Endurance, ParseEnduranceError> {
        let bad = || ParseEnduranceError(text.to_owned());
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let unit = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "t" | "tb" | "tbw" => 1e12,
            "g" | "gb" => 1e9,
            "p" | "pb" => 1e15,
            "gib" => (1u64 << 30) as f64,
            "tib" => (1u64 << 40) as f64,
            "pib" => (1u64 << 50) as f64,
            _ => return Err(bad()),
        };
        number.parse().ok().and_then(|n| Endurance::of(n, unit)).ok_or_else(bad)
    }
}

impl fmt::Display for Endurance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} TB", self.as_terabytes())
    }
}

impl Serialize for Endurance {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_f64(self.as_terabytes())
    }
}

impl<'de> Deserialize<'de> for Endurance {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Endurance, D::Error> {
        struct Terabytes;
        impl serde::de::Visitor<'_> for Terabytes {
            type Value = Endurance;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of terabytes above 0, or text such as \"600t\" or \"1.2p\"")
            }
            fn visit_f64<E: serde::de::Error>(self, n: f64) -> Result<Endurance, E> {
                let wrong = serde::de::Unexpected::Float(n);
                Endurance::terabytes(n).ok_or_else(|| E::invalid_value(wrong, &self))
            }
            fn visit_u64<E: serde::de::Error>(self, n: u64) -> Result<Endurance, E> {
                self.visit_f64(n as f64)
            }
            fn visit_i64<E: serde::de::Error>(self, n: i64) -> Result<Endurance, E> {
                self.visit_f64(n as f64)
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Endurance, E> {
                text.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Terabytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endurance_is_in_terabytes_as_drives_are_rated() {
        for (text, bytes) in [
            ("600", 600_000_000_000_000),
            ("600t", 600_000_000_000_000),
            ("0.5 TBW", 500_000_000_000),
            ("1.2p", 1_200_000_000_000_000),
            ("1tib", 1 << 40),
        ] {
            assert_eq!(text.parse::<Endurance>().unwrap().bytes, bytes, "{text}");
        }
        for text in ["", "0", "-1", "600m", "x", "1e99", "99999999p", "nan"] {
            assert!(text.parse::<Endurance>().is_err(), "{text}");
        }
        assert_eq!("600".parse::<Endurance>().unwrap().to_string(), "600 TB");
    }

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
        for text in ["99999999t", "99999999999999999999", "99999999.5t"] {
            let said = text.parse::<ByteSize>().unwrap_err().to_string();
            assert!(said.contains(&format!("'{text}' is too large: a size is at most")), "{said}");
        }
        assert_eq!("16777215t".parse::<ByteSize>().unwrap().0, 16_777_215 << 40);
    }
}
