//! Meta commands (`mg ms md ma me`): flags in, reply lines out.

use larder_base::{Expiry, Now, UnixSecs};
use larder_engine::kv::api::{Arith, Delete, Get, Item, Op, Store, StoreMode};

use super::base64::{self, BinaryKey};
use super::number::{self, Digits};
use super::tokens::Tokens;
use super::{KEY_MAX, META_TOKENS_MAX, OPAQUE_MAX, answer, expiry};

const BAD_TOKEN: &[u8] = b"CLIENT_ERROR bad token in command line format";

/// Why a meta line is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The line cannot be cut into a key and flags: whether a body follows is unknown.
    Line,
    /// The flags are wrong; the answer says how. A body announced by the line is swallowed.
    Flags(&'static [u8]),
}

/// A parsed meta command line.
#[derive(Clone, Copy)]
pub struct MetaLine<'a> {
    tokens: Tokens<'a>,
    first_flag: usize,
    raw_key: &'a [u8],
    binary_key: Option<BinaryKey>,
    /// `q`: silence for the ordinary answers.
    pub quiet: bool,
    /// `v`: the value is wanted.
    pub value: bool,
    /// `h` or `l`: the answer depends on earlier accesses.
    pub shows_access: bool,
    no_update: bool,
    invalidate: bool,
    drop_value: bool,
    mode: Option<u8>,
    flags: u32,
    touch: Option<i32>,
    vivify: Option<i32>,
    recache: Option<i32>,
    /// `T` stands before `R`, which then looks at what `T` has set.
    touched_first: bool,
    /// `t` stands before any `T` or `N`, and shows what was before them.
    ttl_first: bool,
    /// `T` stands after `N`: an object that `N` creates expires as `T` says.
    touch_last: bool,
    compare: Option<u64>,
    new_cas: Option<u64>,
    delta: u64,
    initial: u64,
}

impl<'a> MetaLine<'a> {
    /// Parses `line` (without its end) whose flags start at token `first_flag`: 2, or 3 after the length of `ms`.
    pub fn parse(line: &'a [u8], first_flag: usize) -> Result<MetaLine<'a>, Refused> {
        let tokens = Tokens::new(line);
        if tokens.len() < first_flag {
            return Err(Refused::Line);
        }
        let flags = &tokens.as_slice()[first_flag..];
        if !flags.iter().all(|t| matches!(t[0], b'0'..=b'9' | b'A'..=b'z')) {
            return Err(Refused::Line);
        }
        let raw_key = tokens.as_slice()[1];
        if raw_key.len() > KEY_MAX {
            return Err(Refused::Flags(answer::BAD_FORMAT));
        }
        if tokens.len() > META_TOKENS_MAX {
            return Err(Refused::Flags(b"CLIENT_ERROR options flags are too long"));
        }
        let mut meta = MetaLine {
            tokens,
            first_flag,
            raw_key,
            binary_key: None,
            quiet: false,
            value: false,
            shows_access: false,
            no_update: false,
            invalidate: false,
            drop_value: false,
            mode: None,
            flags: 0,
            touch: None,
            vivify: None,
            recache: None,
            touched_first: false,
            ttl_first: false,
            touch_last: false,
            compare: None,
            new_cas: None,
            delta: 1,
            initial: 0,
        };
        meta.parse_flags()?;
        Ok(meta)
    }

    fn parse_flags(&mut self) -> Result<(), Refused> {
        let tokens = self.tokens;
        let mut seen = 0u128;
        // As in memcached an argument that does not parse is reported after the whole line was looked at, so that an
        // unknown or repeated flag further right wins.
        let mut wrong: Option<&'static [u8]> = None;
        for token in &tokens.as_slice()[self.first_flag..] {
            let (flag, argument) = (token[0], &token[1..]);
            let bit = 1u128 << flag;
            if seen & bit != 0 {
                return Err(Refused::Flags(b"CLIENT_ERROR duplicate flag"));
            }
            seen |= bit;
            match flag {
                b'b' => {
                    self.binary_key = BinaryKey::decode(self.raw_key);
                    if self.binary_key.is_none() {
                        wrong = Some(b"CLIENT_ERROR error decoding key");
                    }
                }
                b'N' => seconds(argument, &mut self.vivify, &mut wrong),
                b'T' => {
                    seconds(argument, &mut self.touch, &mut wrong);
                    self.touch_last = self.vivify.is_some();
                }
                b't' => self.ttl_first = self.touch.is_none() && self.vivify.is_none(),
                b'R' => {
                    seconds(argument, &mut self.recache, &mut wrong);
                    self.touched_first = self.touch.is_some();
                }
                b'F' => match number::parse_u32(argument) {
                    Some(flags) => self.flags = flags,
                    None => wrong = wrong.or(Some(answer::BAD_FORMAT)),
                },
                b'C' => cas(argument, &mut self.compare, &mut wrong),
                b'E' => cas(argument, &mut self.new_cas, &mut wrong),
                b'M' => self.mode = Some(argument.first().copied().unwrap_or(b' ')),
                b'J' => match number::parse_u64(argument) {
                    Some(n) => self.initial = n,
                    None => wrong = Some(b"CLIENT_ERROR invalid numeric initial value"),
                },
                b'D' => match number::parse_u64(argument) {
                    Some(n) => self.delta = n,
                    None => wrong = Some(b"CLIENT_ERROR invalid numeric delta value"),
                },
                b'v' => self.value = true,
                b'h' | b'l' => self.shows_access = true,
                b'u' => self.no_update = true,
                b'q' => self.quiet = true,
                b'x' => self.drop_value = true,
                b'I' => self.invalidate = true,
                b'O' => {
                    if token.len() > OPAQUE_MAX {
                        wrong = Some(b"CLIENT_ERROR opaque token too long");
                    }
                }
                // Returned on request, or hints to proxies (P, L), without meaning here.
                b'k' | b's' | b'c' | b'f' | b'P' | b'L' => {}
                _ => return Err(Refused::Flags(b"CLIENT_ERROR invalid flag")),
            }
        }
        // CAS 0 stands for "the next number".
        self.new_cas = self.new_cas.filter(|cas| *cas != 0);
        wrong.map_or(Ok(()), |text| Err(Refused::Flags(text)))
    }

    /// The key, decoded when it came in base64.
    pub fn key(&self) -> &[u8] {
        self.binary_key.as_ref().map_or(self.raw_key, |k| k.as_bytes())
    }

    /// What `mg` asks of the engine, and whether it may change the object (which orders it among this connection's
    /// requests).
    pub fn get(&self, now: Now) -> (Op<'static>, bool) {
        let changes = self.touch.is_some() || self.vivify.is_some() || self.recache.is_some();
        // With T, N or R the object changes anyway, and the read counts as an access (memcached: not even then).
        if self.no_update && !changes {
            return (Op::Peek, false);
        }
        let recache_below = self.recache.and_then(|argument| {
            let at = expiry(now, argument);
            (argument > 0).then(|| at.remaining(now.wall).unwrap_or(0))
        });
        let touch = self.touch.map(|t| expiry(now, t));
        let mut recache_below = recache_below.filter(|secs| *secs > 0);
        if self.touched_first {
            let due = Get { recache_below, ..Get::default() };
            recache_below = touch.filter(|new| due.recache_due(*new, now.wall)).map(|_| u32::MAX);
        }
        let get = Get {
            touch,
            vivify: self.vivified(now),
            recache_below,
            new_cas: self.new_cas,
            meta: true,
        };
        (Op::Get(get), changes)
    }

    /// The expiry of an object that `N` creates: that of `T` where this stands behind it.
    fn vivified(&self, now: Now) -> Option<Expiry> {
        let last = if self.touch_last { self.touch } else { self.vivify };
        self.vivify.and(last).map(|seconds| expiry(now, seconds))
    }

    /// What `ms` asks of the engine.
    pub fn store<'v>(&self, now: Now, value: &'v [u8]) -> Result<Store<'v>, Refused> {
        let mode = match self.mode {
            None | Some(b'S') => StoreMode::Set,
            Some(b'E') => StoreMode::Add,
            Some(b'A') => StoreMode::Append,
            Some(b'P') => StoreMode::Prepend,
            Some(b'R') => StoreMode::Replace,
            Some(_) => return Err(Refused::Flags(b"CLIENT_ERROR invalid mode for ms M token")),
        };
        let extends = matches!(mode, StoreMode::Append | StoreMode::Prepend);
        let compare_cas = match mode {
            // Add never compares; append and prepend take CAS 0 for "none given".
            StoreMode::Add => None,
            StoreMode::Append | StoreMode::Prepend => self.compare.filter(|cas| *cas != 0),
            StoreMode::Set | StoreMode::Replace => self.compare,
        };
        let expiry_argument = self.touch.unwrap_or(0);
        Ok(Store {
            // A set or replace that compares is a cas.
            mode: if compare_cas.is_some() && mode == StoreMode::Replace {
                StoreMode::Set
            } else {
                mode
            },
            value,
            flags: self.flags,
            expiry: expiry(now, expiry_argument),
            compare_cas,
            new_cas: self.new_cas,
            invalidate: self.invalidate && compare_cas.is_some() && !extends,
            vivify: self.vivify.filter(|_| extends).map(|t| expiry(now, t)),
        })
    }

    /// What `md` asks of the engine.
    pub fn delete(&self, now: Now) -> Delete {
        Delete {
            compare_cas: self.compare,
            new_cas: self.new_cas,
            mark_stale: self.invalidate,
            touch: self.touch.map(|t| expiry(now, t)),
            drop_value: self.drop_value,
        }
    }

    /// What `ma` asks of the engine.
    pub fn arith(&self, now: Now) -> Result<Arith, Refused> {
        let decrement = match self.mode {
            None | Some(b'I' | b'+') => false,
            Some(b'D' | b'-') => true,
            Some(_) => return Err(Refused::Flags(b"CLIENT_ERROR invalid mode for ma M token")),
        };
        Ok(Arith {
            decrement,
            delta: self.delta,
            compare_cas: self.compare.filter(|cas| *cas != 0),
            new_cas: self.new_cas,
            vivify: self.vivified(now).map(|expiry| (expiry, self.initial)),
            touch: self.touch.map(|t| expiry(now, t)),
            meta: true,
        })
    }

    /// Whether `mg T` asked for a new expiry (such a read counts as a touch).
    pub fn touches(&self) -> bool {
        self.touch.is_some()
    }

    /// Whether the reply to an `mg` that finds `item` carries its value.
    pub fn wants_value(&self, item: &Item<'_>) -> bool {
        self.value && self.compare != Some(item.cas)
    }

    /// Appends the answer of `mg` to an object.
    pub fn write_item(&self, out: &mut Vec<u8>, item: &Item<'_>, now: UnixSecs) {
        let value = self.wants_value(item);
        if value {
            out.reserve(item.value.len() + 128 + self.raw_key.len());
            out.extend_from_slice(b"VA ");
            number::write(out, item.value.len() as u64);
        } else {
            out.extend_from_slice(b"HD");
        }
        for token in self.flags_given() {
            match token[0] {
                b's' => flag(out, b's', item.value.len() as u64),
                b't' => self.write_ttl(out, item, now),
                b'c' => flag(out, b'c', item.cas),
                b'f' => flag(out, b'f', u64::from(item.flags)),
                b'l' => flag(out, b'l', u64::from(item.last_access)),
                b'h' => flag(out, b'h', u64::from(item.hit_before)),
                _ => self.write_echo(out, token),
            }
        }
        if item.already_won {
            out.extend_from_slice(b" Z");
        }
        if item.stale {
            out.extend_from_slice(b" X");
        }
        if item.won {
            out.extend_from_slice(b" W");
        }
        out.extend_from_slice(b"\r\n");
        if value {
            out.extend_from_slice(item.value);
            out.extend_from_slice(b"\r\n");
        }
    }

    /// Appends a two-letter status with the flags that need no object (`O`, `k`).
    pub fn write_status(&self, out: &mut Vec<u8>, status: &[u8; 2]) {
        out.extend_from_slice(status);
        for token in self.flags_given() {
            self.write_echo(out, token);
        }
        out.extend_from_slice(b"\r\n");
    }

    /// Appends the answer of `ms`: the CAS (0 when nothing was stored) and the length of the value.
    pub fn write_stored(&self, out: &mut Vec<u8>, status: &[u8; 2], cas: u64, size: u64) {
        out.extend_from_slice(status);
        for token in self.flags_given() {
            match token[0] {
                b'c' => flag(out, b'c', cas),
                b's' => flag(out, b's', size),
                _ => self.write_echo(out, token),
            }
        }
        out.extend_from_slice(b"\r\n");
    }

    /// Appends the answer of `ma` to a number.
    pub fn write_number(&self, out: &mut Vec<u8>, number: u64, item: &Item<'_>, now: UnixSecs) {
        let digits = Digits::new(number);
        if self.value {
            out.extend_from_slice(b"VA ");
            number::write(out, digits.as_bytes().len() as u64);
        } else {
            out.extend_from_slice(b"HD");
        }
        for token in self.flags_given() {
            match token[0] {
                b'c' => flag(out, b'c', item.cas),
                b't' => self.write_ttl(out, item, now),
                _ => self.write_echo(out, token),
            }
        }
        out.extend_from_slice(b"\r\n");
        if self.value {
            out.extend_from_slice(digits.as_bytes());
            out.extend_from_slice(b"\r\n");
        }
    }

    /// Appends the answer of `me`. `cls` is the tier (1 DRAM, 2 flash): there are no slab classes.
    pub fn write_debug(&self, out: &mut Vec<u8>, item: &Item<'_>, now: UnixSecs) {
        out.extend_from_slice(b"ME ");
        if self.binary_key.is_some() {
            base64::encode(out, self.key());
        } else {
            out.extend_from_slice(self.raw_key);
        }
        out.extend_from_slice(b" exp=");
        match item.expiry.remaining(now) {
            Some(secs) => number::write(out, u64::from(secs)),
            None => out.extend_from_slice(b"-1"),
        }
        out.extend_from_slice(b" la=");
        number::write(out, u64::from(item.last_access));
        out.extend_from_slice(b" cas=");
        number::write(out, item.cas);
        out.extend_from_slice(if item.hit_before { b" fetch=yes" } else { b" fetch=no" });
        out.extend_from_slice(match item.tier {
            larder_engine::kv::api::Tier::Dram => b" cls=1 size=",
            larder_engine::kv::api::Tier::Flash => b" cls=2 size=",
        });
        number::write(out, (self.key().len() + item.value.len()) as u64);
        out.extend_from_slice(b"\r\n");
    }

    fn flags_given(&self) -> &[&'a [u8]] {
        &self.tokens.as_slice()[self.first_flag..]
    }

    /// The seconds left: before this request's `T` or `N`, if `t` stands before them in the line.
    fn write_ttl(&self, out: &mut Vec<u8>, item: &Item<'_>, now: UnixSecs) {
        let expiry = if self.ttl_first { item.expiry_before } else { item.expiry };
        match expiry.remaining(now) {
            Some(secs) => flag(out, b't', u64::from(secs)),
            None => out.extend_from_slice(b" t-1"),
        }
    }

    fn write_echo(&self, out: &mut Vec<u8>, token: &[u8]) {
        match token[0] {
            b'O' => {
                out.push(b' ');
                out.extend_from_slice(token);
            }
            b'k' => {
                out.extend_from_slice(b" k");
                if self.binary_key.is_some() {
                    base64::encode(out, self.key());
                    out.extend_from_slice(b" b");
                } else {
                    out.extend_from_slice(self.raw_key);
                }
            }
            _ => {}
        }
    }
}

fn seconds(argument: &[u8], into: &mut Option<i32>, wrong: &mut Option<&'static [u8]>) {
    match number::parse_i32(argument) {
        Some(n) if !argument.is_empty() => *into = Some(n),
        _ => *wrong = Some(BAD_TOKEN),
    }
}

fn cas(argument: &[u8], into: &mut Option<u64>, wrong: &mut Option<&'static [u8]>) {
    match number::parse_u64(argument) {
        Some(n) => *into = Some(n),
        None => *wrong = Some(BAD_TOKEN),
    }
}

fn flag(out: &mut Vec<u8>, letter: u8, n: u64) {
    out.extend_from_slice(&[b' ', letter]);
    number::write(out, n);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str, first_flag: usize) -> &'static str {
        match MetaLine::parse(line.as_bytes(), first_flag) {
            Ok(_) => "",
            Err(Refused::Line) => "line",
            Err(Refused::Flags(text)) => std::str::from_utf8(text).unwrap(),
        }
    }

    #[test]
    fn refusals() {
        for (line, want) in [
            ("mg", "line"),
            ("mg a *", "line"),
            ("mg a {x", "line"),
            ("mg a v v", "CLIENT_ERROR duplicate flag"),
            ("mg foo m o o o o o o o o o", "CLIENT_ERROR invalid flag"),
            ("mg a 7", "CLIENT_ERROR invalid flag"),
            ("mg a S100", "CLIENT_ERROR invalid flag"),
            ("mg a Tx", "CLIENT_ERROR bad token in command line format"),
            ("mg a T", "CLIENT_ERROR bad token in command line format"),
            ("mg a C", "CLIENT_ERROR bad token in command line format"),
            ("mg a Tx v v", "CLIENT_ERROR duplicate flag"),
            ("mg a Fx", "CLIENT_ERROR bad command line format"),
            ("mg a Fx Tx", "CLIENT_ERROR bad token in command line format"),
            ("mg a Dx", "CLIENT_ERROR invalid numeric delta value"),
            ("mg a Jx", "CLIENT_ERROR invalid numeric initial value"),
            ("mg !!! b", "CLIENT_ERROR error decoding key"),
            ("mg a O23456789012345678901234567890123", "CLIENT_ERROR opaque token too long"),
            ("mg a O2345678901234567890123456789012", ""),
            ("mg a s v c f t k h l u q x I P L b", "CLIENT_ERROR error decoding key"),
        ] {
            assert_eq!(refused(line, 2), want, "{line}");
        }
        let long = "k".repeat(KEY_MAX + 1);
        assert_eq!(refused(&format!("mg {long} v"), 2), "CLIENT_ERROR bad command line format");
        assert_eq!(
            refused(&format!("mg a{}", " v".repeat(19)), 2),
            "CLIENT_ERROR options flags are too long"
        );
        assert_eq!(refused("ms a", 3), "line");
    }

    #[test]
    fn modes() {
        let now = Now::default();
        let store =
            |line: &'static str| MetaLine::parse(line.as_bytes(), 3).unwrap().store(now, b"");
        assert_eq!(store("ms a 1 MR C5").unwrap().mode, StoreMode::Set);
        assert_eq!(store("ms a 1 ME C5").unwrap().compare_cas, None);
        assert_eq!(store("ms a 1 MA C0").unwrap().compare_cas, None);
        assert_eq!(store("ms a 1 C0").unwrap().compare_cas, Some(0));
        assert!(store("ms a 1 M").is_err() && store("ms a 1 MZ").is_err());
        assert!(!store("ms a 1 I").unwrap().invalidate);
        assert!(MetaLine::parse(b"ma a MZ", 2).unwrap().arith(now).is_err());
        assert!(MetaLine::parse(b"ma a M-", 2).unwrap().arith(now).unwrap().decrement);
    }
}
