//! Numbers as bytes: varints (LEB128) out, checked reads in.

/// Why a record cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// The chunk ends before the record does.
    #[error("the chunk ends in the middle of a record, where its {0} should be")]
    Short(&'static str),
    /// A field has a value that nothing writes.
    #[error("{what} is {value}: it must be {must}")]
    Value {
        /// Which field.
        what: &'static str,
        /// What it says.
        value: u64,
        /// What it could say.
        must: &'static str,
    },
}

/// Appends a varint.
pub fn put(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// A signed number as an unsigned one that is short where the number is near 0.
pub fn zigzag(n: i64) -> u64 {
    ((n << 1) ^ (n >> 63)) as u64
}

/// Takes [`zigzag`] back.
pub fn unzigzag(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}

/// Bytes that are read from front to back.
#[derive(Clone, Copy, Debug)]
pub struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// At the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, at: 0 }
    }

    /// Goes on at byte `at` of `bytes`.
    pub fn resume(bytes: &'a [u8], at: usize) -> Cursor<'a> {
        Cursor { bytes, at: at.min(bytes.len()) }
    }

    /// How far it has come.
    pub fn position(&self) -> usize {
        self.at
    }

    /// How many bytes are left.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `n` bytes.
    ///
    /// # Errors
    /// [`BadRecord::Short`], with what should have been there.
    pub fn take(&mut self, n: usize, what: &'static str) -> Result<&'a [u8], BadRecord> {
        let end = self.at.checked_add(n).ok_or(BadRecord::Short(what))?;
        let taken = self.bytes.get(self.at..end).ok_or(BadRecord::Short(what))?;
        self.at = end;
        Ok(taken)
    }

    /// One byte.
    ///
    /// # Errors
    /// As [`Cursor::take`].
    pub fn u8(&mut self, what: &'static str) -> Result<u8, BadRecord> {
        Ok(self.take(1, what)?[0])
    }

    /// Four bytes, little-endian.
    ///
    /// # Errors
    /// As [`Cursor::take`].
    pub fn u32_le(&mut self, what: &'static str) -> Result<u32, BadRecord> {
        let taken = self.take(4, what)?;
        Ok(u32::from_le_bytes([taken[0], taken[1], taken[2], taken[3]]))
    }

    /// A varint.
    ///
    /// # Errors
    /// As [`Cursor::take`], and [`BadRecord::Value`] for more than 64 bits.
    pub fn varint(&mut self, what: &'static str) -> Result<u64, BadRecord> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8(what)?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            n |= bits << shift;
            if byte < 0x80 {
                return Ok(n);
            }
        }
        Err(BadRecord::Value { what, value: n, must: "a number of at most 64 bits" })
    }

    /// A varint of at most `most`.
    ///
    /// # Errors
    /// As [`Cursor::varint`], and [`BadRecord::Value`] for a larger one.
    pub fn at_most(&mut self, most: u64, what: &'static str) -> Result<u64, BadRecord> {
        let value = self.varint(what)?;
        if value <= most {
            Ok(value)
        } else {
            Err(BadRecord::Value { what, value, must: "smaller" })
        }
    }

    /// A varint of at most 32 bits.
    ///
    /// # Errors
    /// As [`Cursor::at_most`].
    pub fn u32(&mut self, what: &'static str) -> Result<u32, BadRecord> {
        Ok(self.at_most(u64::from(u32::MAX), what)? as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip() {
        for n in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
            let mut out = Vec::new();
            put(&mut out, n);
            assert_eq!(Cursor::new(&out).varint("x"), Ok(n));
            assert_eq!(zigzag(unzigzag(n)), n);
            for cut in 0..out.len() {
                assert_eq!(Cursor::new(&out[..cut]).varint("x"), Err(BadRecord::Short("x")));
            }
        }
        // Eleven bytes, or a tenth with more than one bit.
        assert!(Cursor::new(&[0xff; 11]).varint("x").is_err());
        let mut long = [0xff; 10];
        long[9] = 2;
        assert!(Cursor::new(&long).varint("x").is_err());
    }
}
