//! Parsing of text fields without allocation.

use larder_base::Nanos;

use crate::error::Bad;
use crate::request::parse_u64;

/// Nanoseconds in one unit of a time column.
pub(crate) const SECOND: u64 = 1_000_000_000;
pub(crate) const MILLISECOND: u64 = 1_000_000;
pub(crate) const MICROSECOND: u64 = 1_000;

/// The first `N` fields of a line; `None` when there are fewer. Further ones are ignored.
pub(crate) fn split<const N: usize>(line: &[u8], delimiter: u8) -> Option<[&[u8]; N]> {
    let mut out: [&[u8]; N] = [&[]; N];
    let mut rest = Some(line);
    for slot in &mut out {
        let text = rest?;
        match memchr::memchr(delimiter, text) {
            Some(at) => {
                *slot = text[..at].trim_ascii();
                rest = Some(&text[at + 1..]);
            }
            None => {
                *slot = text.trim_ascii();
                rest = None;
            }
        }
    }
    Some(out)
}

/// Like [`split`], with a complaint that names the columns.
pub(crate) fn columns<'a, const N: usize>(
    line: &'a [u8],
    delimiter: u8,
    names: &str,
) -> Result<[&'a [u8]; N], Bad> {
    split(line, delimiter).ok_or_else(|| Bad::new(format!("{N} fields ({names})"), line))
}

/// The first `N` fields between runs of blanks.
pub(crate) fn words<'a, const N: usize>(line: &'a [u8], names: &str) -> Result<[&'a [u8]; N], Bad> {
    let mut out: [&[u8]; N] = [&[]; N];
    let mut iter = blanks(line);
    for slot in &mut out {
        *slot = iter.next().ok_or_else(|| Bad::new(format!("{N} fields ({names})"), line))?;
    }
    Ok(out)
}

/// The fields between runs of blanks.
pub(crate) fn blanks(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|b| b.is_ascii_whitespace()).filter(|w| !w.is_empty())
}

/// A number that fits 64 bits.
pub(crate) fn number(text: &[u8], what: &str) -> Result<u64, Bad> {
    parse_u64(text).ok_or_else(|| Bad::new(format!("{what}: a whole number up to 2^64-1"), text))
}

/// A number that fits 32 bits.
pub(crate) fn number32(text: &[u8], what: &str) -> Result<u32, Bad> {
    parse_u64(text)
        .and_then(|n| u32::try_from(n).ok())
        .ok_or_else(|| Bad::new(format!("{what}: a whole number up to 2^32-1"), text))
}

/// A size; some tools write whole sizes as `4096.0`, and unknown ones as a negative number, which become 0.
pub(crate) fn size(text: &[u8], what: &str) -> Result<u64, Bad> {
    if let Some(n) = parse_u64(text) {
        return Ok(n);
    }
    if let Some(rest) = text.strip_prefix(b"-")
        && decimal(rest, 1).is_some()
    {
        return Ok(0);
    }
    decimal(text, 1).ok_or_else(|| Bad::new(format!("{what}: a size in bytes"), text))
}

/// A hexadecimal number, with or without `0x`.
pub(crate) fn hex(text: &[u8], what: &str) -> Result<u64, Bad> {
    let digits = text.strip_prefix(b"0x").or_else(|| text.strip_prefix(b"0X")).unwrap_or(text);
    std::str::from_utf8(digits)
        .ok()
        .filter(|d| !d.is_empty() && !d.starts_with('+'))
        .and_then(|d| u64::from_str_radix(d, 16).ok())
        .ok_or_else(|| Bad::new(format!("{what}: a hexadecimal number"), text))
}

/// A time column in units of `unit` nanoseconds, fraction allowed.
pub(crate) fn time(text: &[u8], unit: u64, what: &str) -> Result<Option<Nanos>, Bad> {
    decimal(text, unit)
        .map(|n| Some(Nanos(n)))
        .ok_or_else(|| Bad::new(format!("{what}: a time, a number that is not negative"), text))
}

/// `text` × `scale`, rounded down, exact in decimal (no float): `1.5` × 1000 = 1500. Exponents (`1e3`) fall back to a
/// float.
pub(crate) fn decimal(text: &[u8], scale: u64) -> Option<u64> {
    if let Some(n) = parse_u64(text) {
        return n.checked_mul(scale);
    }
    let text = text.strip_prefix(b"+").unwrap_or(text);
    let point = memchr::memchr(b'.', text);
    if let Some(at) = point {
        let (whole, fraction) = (&text[..at], &text[at + 1..]);
        let whole =
            if whole.is_empty() && !fraction.is_empty() { Some(0) } else { parse_u64(whole) };
        if let Some(whole) = whole
            && fraction.iter().all(u8::is_ascii_digit)
        {
            let mut part: u128 = 0;
            let mut unit: u128 = 1;
            for d in fraction.iter().take(18) {
                part = part * 10 + u128::from(d - b'0');
                unit *= 10;
            }
            let low = u64::try_from(part * u128::from(scale) / unit).ok()?;
            return whole.checked_mul(scale)?.checked_add(low);
        }
    }
    let value: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    let scaled = value * scale as f64;
    (scaled.is_finite() && scaled >= 0.0 && scaled < u64::MAX as f64).then_some(scaled as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_exact() {
        assert_eq!(decimal(b"0.1", SECOND), Some(100_000_000));
        assert_eq!(decimal(b"1700000000.123456789", SECOND), Some(1_700_000_000_123_456_789));
        assert_eq!(decimal(b".5", 10), Some(5));
        assert_eq!(decimal(b"5.", 10), Some(50));
        assert_eq!(decimal(b"1e3", 1), Some(1000));
        for bad in [&b""[..], b".", b"-1", b"1.x", b"nan", b"inf", b"99999999999999999999"] {
            assert_eq!(decimal(bad, SECOND), None, "{bad:?}");
        }
    }

    #[test]
    fn splitting() {
        assert_eq!(split::<2>(b"a, b,c", b','), Some([&b"a"[..], b"b"]));
        assert_eq!(split::<3>(b"a,b", b','), None);
        assert_eq!(words::<2>(b"  a \t b c", "").unwrap(), [b"a", b"b"]);
        assert_eq!(hex(b"0xff", "x").unwrap(), 255);
        assert!(hex(b"0x", "x").is_err());
        assert_eq!(size(b"-1", "s").unwrap(), 0);
    }
}
