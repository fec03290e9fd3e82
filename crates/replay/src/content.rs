//! Keys and values. Both follow from the object alone (and, for values, from how often it was written), so that nothing
//! is stored to send them and anything that comes back can be checked.

use larder_base::Rng;
use larder_trace::mix;

/// Longest key of the protocol.
pub(crate) const MAX_KEY: usize = 250;
/// Values start anywhere in the first half and run on from the beginning at the end.
const BLOCK: usize = 1 << 20;
const STARTS: u64 = 1 << 19;
/// Bytes in front of a value that carry its version.
pub(crate) const HEADER: usize = 8;

/// Appends the key of object `id` of application `app`: prefix, `app:` unless 0, the id in hexadecimal with zeros in
/// front up to `key_size` bytes.
pub(crate) fn push_key(out: &mut Vec<u8>, prefix: &[u8], app: u32, id: u64, key_size: u32) {
    let begin = out.len();
    out.extend_from_slice(prefix);
    if app != 0 {
        push_number(out, u64::from(app));
        out.push(b':');
    }
    let wanted = (key_size as usize).min(MAX_KEY);
    let digits = (64 - id.leading_zeros() as usize).div_ceil(4).max(1);
    let zeros = wanted.saturating_sub(out.len() - begin + digits);
    out.resize(out.len() + zeros, b'0');
    for i in (0..digits).rev() {
        out.push(b"0123456789abcdef"[(id >> (4 * i)) as usize & 15]);
    }
}

/// Appends a decimal number.
pub(crate) fn push_number(out: &mut Vec<u8>, n: u64) {
    let mut text = [0u8; 20];
    let mut at = text.len();
    let mut n = n;
    loop {
        at -= 1;
        text[at] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            break;
        }
    }
    out.extend_from_slice(&text[at..]);
}

/// Makes and checks values.
///
/// ```text
/// bytes 0..4   the version, u32 little-endian
/// bytes 4..8   a check over object and version
/// bytes 8..    random bytes from a place that object and version choose
/// ```
/// Shorter values are cut off.
pub(crate) struct Values {
    block: Box<[u8]>,
}

/// What a value turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checked {
    /// The object's value of this version.
    Version(u32),
    /// Too short to carry a version; its bytes fit the version asked for.
    Fits,
    /// Not this object's value, or damaged.
    Damaged,
}

impl Values {
    pub(crate) fn new() -> Values {
        let mut block = vec![0u8; BLOCK];
        Rng::new(0x1a2d_e201).fill(&mut block);
        Values { block: block.into_boxed_slice() }
    }

    fn header(object: u64, version: u32) -> ([u8; HEADER], u64) {
        let h = mix(object ^ mix(u64::from(version)));
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&version.to_le_bytes());
        header[4..].copy_from_slice(&(h as u32).to_le_bytes());
        (header, (h >> 32) % STARTS)
    }

    /// Appends the value of `object` as written the `version`th time.
    pub(crate) fn push(&self, out: &mut Vec<u8>, object: u64, version: u32, size: usize) {
        let (header, start) = Self::header(object, version);
        out.extend_from_slice(&header[..size.min(HEADER)]);
        let mut left = size.saturating_sub(HEADER);
        let mut at = start as usize;
        while left > 0 {
            let n = left.min(BLOCK - at);
            out.extend_from_slice(&self.block[at..at + n]);
            left -= n;
            at = 0;
        }
    }

    /// Checks a value that came back; `version` is used only when the value is too short to carry its own.
    pub(crate) fn check(&self, value: &[u8], object: u64, version: u32) -> Checked {
        if value.len() < HEADER {
            let (header, _) = Self::header(object, version);
            return if header[..value.len()] == *value { Checked::Fits } else { Checked::Damaged };
        }
        let carried = u32::from_le_bytes([value[0], value[1], value[2], value[3]]);
        let (header, start) = Self::header(object, carried);
        if value[..HEADER] != header {
            return Checked::Damaged;
        }
        let mut rest = &value[HEADER..];
        let mut at = start as usize;
        while !rest.is_empty() {
            let n = rest.len().min(BLOCK - at);
            if rest[..n] != self.block[at..at + n] {
                return Checked::Damaged;
            }
            rest = &rest[n..];
            at = 0;
        }
        Checked::Version(carried)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let key = |prefix: &str, app, id, size| {
            let mut out = Vec::new();
            push_key(&mut out, prefix.as_bytes(), app, id, size);
            String::from_utf8(out).unwrap()
        };
        assert_eq!(key("", 0, 0xabc, 16), "0000000000000abc");
        assert_eq!(key("p", 7, 1, 8), "p7:00001");
        assert_eq!(key("", 0, u64::MAX, 4), "ffffffffffffffff");
        assert_eq!(key("", 0, 0, 1), "0");
        assert_eq!(key("", 0, 1, 4000).len(), MAX_KEY);
    }

    #[test]
    fn values_are_checked_to_the_byte() {
        let values = Values::new();
        for size in [0usize, 1, 7, 8, 9, 257, 2 * BLOCK + 3] {
            let mut v = Vec::new();
            values.push(&mut v, 42, 3, size);
            assert_eq!(v.len(), size);
            let good = values.check(&v, 42, 3);
            assert_eq!(good, if size < HEADER { Checked::Fits } else { Checked::Version(3) });
            for at in [0, size / 2, size.saturating_sub(1)] {
                if at < size {
                    let mut bad = v.clone();
                    bad[at] ^= 1;
                    assert_eq!(
                        values.check(&bad, 42, 3),
                        Checked::Damaged,
                        "size {size} byte {at}"
                    );
                }
            }
            if size >= HEADER {
                assert_eq!(values.check(&v, 43, 3), Checked::Damaged);
            }
        }
    }
}
