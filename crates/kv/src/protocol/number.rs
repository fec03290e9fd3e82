//! Decimal numbers in and out, without allocation.
//!
//! Arguments are parsed strictly: digits only (and a leading minus for signed ones), no overflow.

/// Parses an unsigned decimal of at most 64 bits.
pub fn parse_u64(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 22 {
        return None;
    }
    let mut sum = 0u64;
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        sum = sum.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    Some(sum)
}

/// Parses an unsigned decimal of at most 32 bits.
pub fn parse_u32(digits: &[u8]) -> Option<u32> {
    if digits.len() > 11 {
        return None;
    }
    parse_u64(digits).and_then(|n| u32::try_from(n).ok())
}

/// Parses a signed decimal of at most 32 bits.
pub fn parse_i32(text: &[u8]) -> Option<i32> {
    if text.len() > 11 {
        return None;
    }
    match text.strip_prefix(b"-") {
        Some(digits) => parse_u64(digits).and_then(|n| i32::try_from(-i64::try_from(n).ok()?).ok()),
        None => parse_u64(text).and_then(|n| i32::try_from(n).ok()),
    }
}

/// Parses the expiry of a storage command as memcached does, by `strtol` into 32 bits: white space and a plus may come
/// first, and of a number beyond 32 bits the low ones are taken, so that 2³¹ and more up to 2³² is in the past. More than 64
/// bits are refused.
pub fn parse_wrapped_i32(text: &[u8]) -> Option<i32> {
    let digits = text.strip_prefix(b"+").filter(|rest| rest.first() != Some(&b'-')).unwrap_or(text);
    let (minus, digits) = match digits.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, digits),
    };
    let zeros = digits.iter().take_while(|b| **b == b'0').count();
    let magnitude = match &digits[zeros..] {
        [] if zeros > 0 => 0,
        rest => parse_u64(rest)?,
    };
    let number =
        if minus { 0i64.checked_sub_unsigned(magnitude) } else { i64::try_from(magnitude).ok() };
    number.map(|n| n as i32)
}

/// Parses a signed decimal of at most 64 bits.
pub fn parse_i64(text: &[u8]) -> Option<i64> {
    match text.strip_prefix(b"-") {
        Some(digits) => parse_u64(digits).and_then(|n| 0i64.checked_sub_unsigned(n)),
        None => parse_u64(text).and_then(|n| i64::try_from(n).ok()),
    }
}

/// Parses a non-negative decimal with an optional fraction, as the tuning commands take them.
pub fn parse_ratio(text: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(text).ok()?;
    if text.is_empty() || text.len() > 31 || !text.bytes().all(|b| b.is_ascii_digit() || b == b'.')
    {
        return None;
    }
    text.parse().ok()
}

/// Reads a stored value as the number that incr and decr work on, the way C's `strtoull` does: leading white space and
/// a plus are skipped, and after the digits comes the end or white space.
pub fn parse_value(value: &[u8]) -> Option<u64> {
    let start = value.iter().position(|b| !b.is_ascii_whitespace() && *b != 0x0b)?;
    let rest = value[start..].strip_prefix(b"+").unwrap_or(&value[start..]);
    let len = rest.iter().position(|b| !b.is_ascii_digit()).unwrap_or(rest.len());
    match rest.get(len) {
        Some(after) if !after.is_ascii_whitespace() && *after != 0x0b => None,
        _ => {
            let digits = &rest[..len];
            let zeros = digits.iter().take_while(|b| **b == b'0').count();
            if len > 0 && zeros == len { Some(0) } else { parse_u64(&digits[zeros..]) }
        }
    }
}

const PAIRS: [u8; 200] = {
    let mut table = [0u8; 200];
    let mut i = 0;
    while i < 100 {
        table[2 * i] = b'0' + (i / 10) as u8;
        table[2 * i + 1] = b'0' + (i % 10) as u8;
        i += 1;
    }
    table
};

/// A number as decimal digits on the stack.
#[derive(Clone, Copy)]
pub struct Digits {
    bytes: [u8; 20],
    start: u8,
}

impl Digits {
    /// The digits of `n`, two at a time.
    #[inline]
    pub fn new(mut n: u64) -> Digits {
        let mut bytes = [0u8; 20];
        let mut at = 20;
        while n >= 100 {
            let pair = (n % 100) as usize * 2;
            n /= 100;
            at -= 2;
            bytes[at] = PAIRS[pair];
            bytes[at + 1] = PAIRS[pair + 1];
        }
        if n >= 10 {
            at -= 2;
            bytes[at] = PAIRS[n as usize * 2];
            bytes[at + 1] = PAIRS[n as usize * 2 + 1];
        } else {
            at -= 1;
            bytes[at] = b'0' + n as u8;
        }
        Digits { bytes, start: at as u8 }
    }

    /// The digits, most significant first.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[usize::from(self.start)..]
    }
}

/// Appends `n` in decimal.
#[inline]
pub fn write(out: &mut Vec<u8>, n: u64) {
    out.extend_from_slice(Digits::new(n).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn arguments_are_strict() {
        assert_eq!(parse_u64(b"18446744073709551615"), Some(u64::MAX));
        for bad in [
            &b""[..],
            b"18446744073709551616",
            b"1x",
            b"+1",
            b"-1",
            b" 1",
            b"00000000000000000000001",
        ] {
            assert_eq!(parse_u64(bad), None, "{bad:?}");
        }
        assert_eq!(parse_u32(b"4294967296"), None);
        assert_eq!(parse_i32(b"-2147483648"), Some(i32::MIN));
        assert_eq!(parse_i32(b"2147483648"), None);
        assert_eq!(parse_i64(b"-9223372036854775808"), Some(i64::MIN));
        for (text, seconds) in [
            (&b"2147483647"[..], Some(i32::MAX)),
            (b"2147483648", Some(i32::MIN)),
            (b"4294967295", Some(-1)),
            (b"4294967396", Some(100)),
            (b"+5", Some(5)),
            (b"00000000000000000000000100", Some(100)),
            (b"0", Some(0)),
            (b"-9223372036854775808", Some(0)),
            (b"9223372036854775808", None),
            (b"99999999999999999999", None),
            (b"5x", None),
            (b"+-5", None),
            (b"-", None),
            (b"", None),
        ] {
            assert_eq!(parse_wrapped_i32(text), seconds, "{text:?}");
        }
        assert_eq!(parse_ratio(b"0.9"), Some(0.9));
        assert_eq!(parse_ratio(b"nan"), None);
    }

    #[test]
    fn stored_values_are_read_as_strtoull_does() {
        for (text, number) in [
            (&b"5"[..], 5),
            (b"5   ", 5),
            (b"  7", 7),
            (b"+7", 7),
            (b"12 monkeys", 12),
            (b"000000000000000000000000003", 3),
        ] {
            assert_eq!(parse_value(text), Some(number), "{text:?}");
        }
        for bad in [&b""[..], b"   ", b"x", b"5x", b"-5", b"18446744073709551616", b"+"] {
            assert_eq!(parse_value(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn digits_agree_with_the_library(n: u64, small in 0u64..10_000) {
            for n in [n, small, n >> 32, u64::MAX] {
                let mut out = Vec::new();
                write(&mut out, n);
                prop_assert_eq!(&out[..], &n.to_string().into_bytes()[..]);
                prop_assert_eq!(parse_u64(&out), Some(n));
            }
        }
    }
}
