//! Reply lines of the text protocol.

use larder_engine::kv::api::Item;

use super::number::Digits;

/// Appends `VALUE <key> <flags> <bytes>[ <cas>]`, the value and the ends of line.
#[inline]
pub fn value(out: &mut Vec<u8>, key: &[u8], item: &Item<'_>, with_cas: bool) {
    // One reservation for the longest line: the pushes below then never grow the vector on their own.
    out.reserve(6 + key.len() + 3 * 21 + 2 + item.value.len() + 2);
    out.extend_from_slice(b"VALUE ");
    out.extend_from_slice(key);
    if item.flags == 0 {
        out.extend_from_slice(b" 0 ");
    } else {
        out.push(b' ');
        out.extend_from_slice(Digits::new(u64::from(item.flags)).as_bytes());
        out.push(b' ');
    }
    out.extend_from_slice(Digits::new(item.value.len() as u64).as_bytes());
    if with_cas {
        out.push(b' ');
        out.extend_from_slice(Digits::new(item.cas).as_bytes());
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(item.value);
    out.extend_from_slice(b"\r\n");
}

/// Appends a line and its end.
#[inline]
pub fn line(out: &mut Vec<u8>, text: &[u8]) {
    out.extend_from_slice(text);
    out.extend_from_slice(b"\r\n");
}
