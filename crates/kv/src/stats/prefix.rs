//! `stats detail`: requests by the prefix of their keys.

use std::collections::BTreeMap;

use crate::connection::PrefixUse;

/// Most prefixes counted; the keys of further ones are not. Clients choose prefixes, so their number needs a limit.
const MAX_PREFIXES: usize = 4096;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    gets: u64,
    hits: u64,
    sets: u64,
    deletes: u64,
}

/// Counts by prefix.
#[derive(Debug)]
pub struct PrefixStats {
    delimiter: u8,
    prefixes: BTreeMap<Box<[u8]>, Counts>,
}

impl PrefixStats {
    /// Prefixes end before the first `delimiter`.
    pub fn new(delimiter: u8) -> PrefixStats {
        PrefixStats { delimiter, prefixes: BTreeMap::new() }
    }

    /// One use of `key`. Keys without a prefix are not counted, as in memcached.
    pub fn record(&mut self, key: &[u8], how: PrefixUse) {
        let Some(end) = key.iter().position(|b| *b == self.delimiter) else { return };
        let prefix = &key[..end];
        if !self.prefixes.contains_key(prefix) {
            if self.prefixes.len() >= MAX_PREFIXES {
                return;
            }
            self.prefixes.insert(prefix.into(), Counts::default());
        }
        let Some(counts) = self.prefixes.get_mut(prefix) else { return };
        match how {
            PrefixUse::Get { hit } => {
                counts.gets += 1;
                counts.hits += u64::from(hit);
            }
            PrefixUse::Set => counts.sets += 1,
            PrefixUse::Delete => counts.deletes += 1,
        }
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.prefixes.clear();
    }

    /// `stats detail dump`.
    pub fn dump(&self, out: &mut Vec<u8>) {
        use std::io::Write;
        for (prefix, c) in &self.prefixes {
            out.extend_from_slice(b"PREFIX ");
            // Binary keys of the meta protocol may hold bytes that would break the line.
            out.extend(prefix.iter().map(|b| if b.is_ascii_graphic() { *b } else { b'?' }));
            // Writing to a Vec cannot fail.
            let _ =
                write!(out, " get {} hit {} set {} del {}\r\n", c.gets, c.hits, c.sets, c.deletes);
        }
        out.extend_from_slice(b"END\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_counted_and_bounded() {
        let mut stats = PrefixStats::new(b':');
        stats.record(b"foo:1", PrefixUse::Set);
        stats.record(b"foo:2", PrefixUse::Get { hit: false });
        stats.record(b"foo:1", PrefixUse::Get { hit: true });
        stats.record(b"plain", PrefixUse::Set);
        stats.record(b"a\r\n:1", PrefixUse::Delete);
        let mut out = Vec::new();
        stats.dump(&mut out);
        let text = String::from_utf8(out).unwrap();
        assert_eq!(
            text,
            "PREFIX a?? get 0 hit 0 set 0 del 1\r\nPREFIX foo get 2 hit 1 set 1 del 0\r\nEND\r\n"
        );
        for i in 0..2 * MAX_PREFIXES {
            stats.record(format!("{i}:x").as_bytes(), PrefixUse::Set);
        }
        assert_eq!(stats.prefixes.len(), MAX_PREFIXES);
    }
}
