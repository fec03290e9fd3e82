//! The map that knows what a cache may forget.

use std::collections::{BTreeMap, BTreeSet};

use larder_base::{Expiry, UnixSecs};

/// Seeds at which a fault was found once, and which.
pub(crate) const REGRESSIONS: &[(u64, &str)] = &[];

/// One version of an object.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Version {
    pub(crate) value: Vec<u8>,
    pub(crate) flags: u32,
    pub(crate) cas: u64,
    pub(crate) expiry: Expiry,
}

impl std::fmt::Debug for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let start: Vec<u8> = self.value.iter().copied().take(4).collect();
        write!(
            f,
            "[{} bytes {start:?}, flags {}, cas {}, {:?}]",
            self.value.len(),
            self.flags,
            self.cas,
            self.expiry
        )
    }
}

/// What may be answered for a key: absence always, and at most one version.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot {
    pub(crate) allowed: Vec<Version>,
}

#[derive(Default)]
pub(crate) struct Model {
    slots: BTreeMap<usize, Slot>,
    cas_given: BTreeSet<u64>,
    flush_at: Option<u32>,
    flush_came: bool,
}

impl Model {
    pub(crate) fn slot(&mut self, key: usize) -> &mut Slot {
        self.slots.entry(key).or_default()
    }

    /// The one version that may be there, not counting what has expired.
    pub(crate) fn live(&mut self, key: usize, now: UnixSecs) -> Vec<Version> {
        self.slot(key).allowed.iter().filter(|v| !v.expiry.is_past(now)).cloned().collect()
    }

    pub(crate) fn set(&mut self, key: usize, version: Version) {
        self.slot(key).allowed = vec![version];
    }

    pub(crate) fn remove(&mut self, key: usize) {
        self.slot(key).allowed.clear();
    }

    pub(crate) fn flush(&mut self) {
        self.slots.clear();
        self.flush_at = None;
    }

    pub(crate) fn flush_later(&mut self, at: u32) {
        self.flush_at = Some(at);
    }

    /// Whether an announced flush has come due at some time: shards carry it out when they are next used.
    pub(crate) fn flush_came(&self) -> bool {
        self.flush_came
    }

    pub(crate) fn forget_announced_flush(&mut self) -> Option<u32> {
        self.flush_at.take()
    }

    pub(crate) fn announce_again(&mut self, at: Option<u32>) {
        self.flush_at = at;
    }

    pub(crate) fn tick(&mut self, now: UnixSecs) {
        if self.flush_at.is_some_and(|at| at <= now.0) {
            self.flush();
            self.flush_came = true;
        }
    }

    /// A CAS unique given out by the engine must be new.
    pub(crate) fn fresh_cas(&mut self, cas: u64) -> Result<(), String> {
        if self.cas_given.insert(cas) {
            Ok(())
        } else {
            Err(format!("CAS {cas} was given out before"))
        }
    }

    /// A hit must show an allowed version; from then on it is the only one.
    pub(crate) fn hit(&mut self, key: usize, now: UnixSecs, seen: &Version) -> Result<(), String> {
        let allowed = self.live(key, now);
        if !allowed.contains(seen) {
            return Err(format!("key {key}: answered {seen:?}, allowed {allowed:?} at {now:?}"));
        }
        self.set(key, seen.clone());
        Ok(())
    }

    /// Whether some live version satisfies `f`; an answer that needs one.
    pub(crate) fn warrants(
        &mut self,
        key: usize,
        now: UnixSecs,
        f: impl Fn(&Version) -> bool,
    ) -> Result<Version, String> {
        let allowed = self.live(key, now);
        allowed
            .iter()
            .find(|v| f(v))
            .cloned()
            .ok_or_else(|| format!("key {key}: nothing warrants that: {allowed:?}"))
    }
}

/// The number that a value is, as memcached sees it.
pub(crate) fn number(text: &[u8]) -> Option<u64> {
    // C's strtoull, and what memcached makes of it.
    let white = |b: &u8| b" \t\n\x0b\x0c\r".contains(b);
    let start = text.iter().position(|b| !white(b)).filter(|_| text.len() <= 24)?;
    let sign = usize::from(b"+-".contains(&text[start]));
    let digits = text[start + sign..].split(|b| !b.is_ascii_digit()).next()?;
    let after = text.get(start + sign + digits.len());
    let number: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    let number = if text[start] == b'-' { 0u64.wrapping_sub(number) } else { number };
    let negative = text[start] == b'-' && number >= 1 << 63;
    (after.is_none_or(|b| white(b) || *b == 0) && !negative).then_some(number)
}
