//! `lru_crawler metadump` and `mgdump`: the keys in DRAM, a few at a time, as fast as the client takes them. Flash has no
//! keys in DRAM to list.

use larder_base::Now;
use larder_engine::kv::api::Item;

use super::engine::Engine;
use crate::protocol::base64;
use crate::protocol::number::parse_u32;

/// The class that `stats items` calls DRAM.
const DRAM: u32 = 1;
/// memcached has so many classes at most.
const CLASSES: u32 = 64;

/// What a line of the listing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `key=… exp=… la=… cas=… fetch=… cls=… size=… flags=…`
    Meta,
    /// `mg KEY`
    Mg,
}

/// A listing that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dump {
    form: Form,
    /// The classes asked for hold objects in DRAM.
    any: bool,
}

impl Dump {
    /// From `all`, `hash`, or class numbers between commas. `None` for anything else.
    pub(super) fn new(form: Form, classes: &[u8]) -> Option<Dump> {
        if matches!(classes, b"all" | b"hash") {
            return Some(Dump { form, any: true });
        }
        let mut any = false;
        for class in classes.split(|b| *b == b',') {
            let number = parse_u32(class).filter(|n| (1..CLASSES).contains(n))?;
            any |= number == DRAM;
        }
        Some(Dump { form, any })
    }

    /// Writes the next lines. Where to go on; `None` when the end has been written.
    pub(super) fn list<E: Engine>(
        self,
        now: Now,
        engine: &E,
        cursor: u64,
        out: &mut Vec<u8>,
    ) -> Option<u64> {
        let mut line = |key: &[u8], item: &Item<'_>, bytes: usize| match self.form {
            Form::Meta => meta_line(out, now, key, item, bytes),
            Form::Mg => mg_line(out, key),
        };
        let next = if self.any { engine.list(now, cursor, &mut line) } else { None };
        if next.is_none() {
            out.extend_from_slice(match self.form {
                Form::Meta => b"END\r\n",
                Form::Mg => b"EN\r\n",
            });
        }
        next
    }
}

fn meta_line(out: &mut Vec<u8>, now: Now, key: &[u8], item: &Item<'_>, bytes: usize) {
    out.extend_from_slice(b"key=");
    for &b in key {
        // RFC 3986's unreserved characters stay as they are.
        if b.is_ascii_alphanumeric() || b"-._~".contains(&b) {
            out.push(b);
        } else {
            out.extend_from_slice(format!("%{b:02X}").as_bytes());
        }
    }
    let expiry = item.expiry.0;
    let text = format!(
        " exp={} la={} cas={} fetch={} cls={DRAM} size={bytes} flags={} \n",
        if expiry == 0 { -1 } else { i64::from(expiry) },
        now.wall.0.saturating_sub(item.last_access),
        item.cas,
        if item.hit_before { "yes" } else { "no" },
        item.flags,
    );
    out.extend_from_slice(text.as_bytes());
}

fn mg_line(out: &mut Vec<u8>, key: &[u8]) {
    out.extend_from_slice(b"mg ");
    // A key that no line can carry came by base64, and goes by it.
    if key.iter().any(|&b| b <= b' ' || b == 0x7f) {
        base64::encode(out, key);
        out.extend_from_slice(b" b");
    } else {
        out.extend_from_slice(key);
    }
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::{Expiry, Nanos, UnixSecs};
    use larder_engine::kv::api::Tier;

    #[test]
    fn classes() {
        let any = |classes: &[u8]| Dump::new(Form::Meta, classes).map(|d| d.any);
        assert_eq!(any(b"all"), Some(true));
        assert_eq!(any(b"hash"), Some(true));
        assert_eq!(any(b"3,1"), Some(true));
        assert_eq!(any(b"2,63"), Some(false));
        for bad in [&b""[..], b"x", b"0", b"64", b"1,", b"-1", b"ALL"] {
            assert_eq!(any(bad), None);
        }
    }

    #[test]
    fn lines_are_memcacheds() {
        let now = Now { mono: Nanos::ZERO, wall: UnixSecs(1000) };
        let item = Item {
            value: b"v",
            flags: 7,
            cas: 9,
            expiry: Expiry(1234),
            expiry_before: Expiry(1234),
            last_access: 10,
            hit_before: true,
            won: false,
            stale: false,
            already_won: false,
            tier: Tier::Dram,
        };
        let mut out = Vec::new();
        meta_line(&mut out, now, b"a b%\xff", &item, 64);
        let never = Item { expiry: Expiry::NEVER, hit_before: false, ..item };
        meta_line(&mut out, now, b"x-._~", &never, 80);
        mg_line(&mut out, b"plain");
        mg_line(&mut out, b"a b");
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "key=a%20b%25%FF exp=1234 la=990 cas=9 fetch=yes cls=1 size=64 flags=7 \n\
             key=x-._~ exp=-1 la=990 cas=9 fetch=no cls=1 size=80 flags=7 \n\
             mg plain\r\nmg YSBi b\r\n"
        );
    }
}
