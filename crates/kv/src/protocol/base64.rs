//! Base64 (RFC 4648 with padding) for the meta protocol's binary keys.
//!
//! Decoding is as lenient as memcached's: characters outside the alphabet are skipped, and the rest must come in groups
//! of four. Whoever stored a key through a lenient server must find it again. (The crate `base64` refuses such characters, and
//! has no engine that skips them.)

use super::KEY_MAX;

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const SKIP: u8 = 0x80;

const TABLE: [u8; 256] = {
    let mut table = [SKIP; 256];
    let mut i = 0;
    while i < 64 {
        table[ALPHABET[i] as usize] = i as u8;
        i += 1;
    }
    table[b'=' as usize] = 0;
    table
};

/// A decoded key on the stack.
#[derive(Clone, Copy)]
pub struct BinaryKey {
    bytes: [u8; KEY_MAX],
    len: u8,
}

impl BinaryKey {
    /// Decodes at most [`KEY_MAX`] characters. `None` when nothing comes out or the padding is wrong.
    pub fn decode(text: &[u8]) -> Option<BinaryKey> {
        if text.len() > KEY_MAX {
            return None;
        }
        let symbols = text.iter().filter(|b| TABLE[usize::from(**b)] != SKIP).count();
        if symbols == 0 || symbols % 4 != 0 {
            return None;
        }
        let mut bytes = [0; KEY_MAX];
        let mut len = 0;
        let mut group = [0u8; 4];
        let mut filled = 0;
        let mut padding = 0;
        for &symbol in text {
            let value = TABLE[usize::from(symbol)];
            if value == SKIP {
                continue;
            }
            padding += usize::from(symbol == b'=');
            group[filled] = value;
            filled += 1;
            if filled == 4 {
                filled = 0;
                bytes[len] = group[0] << 2 | group[1] >> 4;
                bytes[len + 1] = group[1] << 4 | group[2] >> 2;
                bytes[len + 2] = group[2] << 6 | group[3];
                len += 3;
                if padding > 2 {
                    return None;
                }
                len -= padding;
                if padding > 0 {
                    break;
                }
            }
        }
        (len > 0).then_some(BinaryKey { bytes, len: len as u8 })
    }

    /// The decoded bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// Appends `bytes` in base64 with padding.
pub fn encode(out: &mut Vec<u8>, bytes: &[u8]) {
    for group in bytes.chunks(3) {
        let [a, b, c] = [group[0], *group.get(1).unwrap_or(&0), *group.get(2).unwrap_or(&0)];
        let symbols = [a >> 2, (a & 3) << 4 | b >> 4, (b & 15) << 2 | c >> 6, c & 63];
        for (i, symbol) in symbols.iter().enumerate() {
            out.push(if i <= group.len() { ALPHABET[usize::from(*symbol)] } else { b'=' });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_values() {
        for (plain, coded) in
            [(&b"f"[..], &b"Zg=="[..]), (b"fo", b"Zm8="), (b"foo", b"Zm9v"), (b"\xff\xfe", b"//4=")]
        {
            let mut out = Vec::new();
            encode(&mut out, plain);
            assert_eq!(out, coded);
            assert_eq!(BinaryKey::decode(coded).unwrap().as_bytes(), plain);
        }
        for bad in [&b""[..], b"Z", b"Zg=", b"Z===", b"====", b"!!!!"] {
            assert!(BinaryKey::decode(bad).is_none(), "{bad:?}");
        }
        assert_eq!(BinaryKey::decode(b"Zm-9v").unwrap().as_bytes(), b"foo");
    }

    proptest! {
        #[test]
        fn round_trip(bytes in prop::collection::vec(any::<u8>(), 1..=186)) {
            let mut out = Vec::new();
            encode(&mut out, &bytes);
            let key = BinaryKey::decode(&out).unwrap();
            prop_assert_eq!(key.as_bytes(), &bytes[..]);
        }

        #[test]
        fn never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = BinaryKey::decode(&bytes);
        }
    }
}
