//! Policies by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{
    Access, Arc, Belady, Clock, Departures, Eviction, Fifo, Gdsf, Lfu, Lirs, Lru, Outcome, S3Fifo,
    S3FifoRelease, Sieve, Slot, Slru, TwoQ, WTinyLfu,
};

/// What a capacity counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Every object takes 1.
    Objects,
    /// An object takes its size.
    Bytes,
}

/// An eviction policy's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EvictionKind {
    /// Least recently used.
    Lru,
    /// First in, first out.
    Fifo,
    /// CLOCK with a counter of so many bits.
    Clock(u8),
    /// Least frequently used.
    Lfu,
    /// Segmented LRU of four lists.
    Slru,
    /// 2Q.
    TwoQ,
    /// Adaptive replacement cache.
    Arc,
    /// LIRS.
    Lirs,
    /// SIEVE.
    Sieve,
    /// S3-FIFO.
    S3Fifo(S3FifoRelease),
    /// W-TinyLFU.
    WTinyLfu,
    /// Greedy-Dual-Size-Frequency.
    Gdsf,
    /// Belady's MIN.
    Belady,
}

/// A name that no policy has.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown eviction policy '{name}': choose from {}", EvictionKind::names().join(", "))]
pub struct UnknownPolicy {
    /// What was asked for.
    pub name: String,
}

impl EvictionKind {
    /// Every policy.
    pub const ALL: [EvictionKind; 16] = [
        EvictionKind::Lru,
        EvictionKind::Fifo,
        EvictionKind::Clock(1),
        EvictionKind::Clock(2),
        EvictionKind::Clock(3),
        EvictionKind::Lfu,
        EvictionKind::Slru,
        EvictionKind::TwoQ,
        EvictionKind::Arc,
        EvictionKind::Lirs,
        EvictionKind::Sieve,
        EvictionKind::S3Fifo(S3FifoRelease::R2024),
        EvictionKind::S3Fifo(S3FifoRelease::R2025),
        EvictionKind::WTinyLfu,
        EvictionKind::Gdsf,
        EvictionKind::Belady,
    ];

    /// The names, in the order of [`EvictionKind::ALL`].
    pub fn names() -> Vec<&'static str> {
        EvictionKind::ALL.iter().map(|k| k.name()).collect()
    }

    /// The name, as written on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            EvictionKind::Lru => "lru",
            EvictionKind::Fifo => "fifo",
            EvictionKind::Clock(2) => "clock2",
            EvictionKind::Clock(3) => "clock3",
            EvictionKind::Clock(_) => "clock",
            EvictionKind::Lfu => "lfu",
            EvictionKind::Slru => "slru",
            EvictionKind::TwoQ => "2q",
            EvictionKind::Arc => "arc",
            EvictionKind::Lirs => "lirs",
            EvictionKind::Sieve => "sieve",
            EvictionKind::S3Fifo(S3FifoRelease::R2024) => "s3fifo",
            EvictionKind::S3Fifo(S3FifoRelease::R2025) => "s3fifo-2025",
            EvictionKind::WTinyLfu => "wtinylfu",
            EvictionKind::Gdsf => "gdsf",
            EvictionKind::Belady => "belady",
        }
    }

    /// Whether the policy reads [`Access::next`].
    pub fn needs_future(self) -> bool {
        self == EvictionKind::Belady
    }

    /// An empty cache of `capacity` in `unit`.
    pub fn build(self, capacity: u64, unit: Unit) -> AnyPolicy {
        match self {
            EvictionKind::Lru => AnyPolicy::Lru(Lru::new(capacity)),
            EvictionKind::Fifo => AnyPolicy::Fifo(Fifo::new(capacity)),
            EvictionKind::Clock(bits) => AnyPolicy::Clock(Clock::new(capacity, bits)),
            EvictionKind::Lfu => AnyPolicy::Lfu(Lfu::new(capacity)),
            EvictionKind::Slru => AnyPolicy::Slru(Slru::new(capacity)),
            EvictionKind::TwoQ => AnyPolicy::TwoQ(TwoQ::new(capacity)),
            EvictionKind::Arc => AnyPolicy::Arc(Arc::new(capacity)),
            EvictionKind::Lirs => AnyPolicy::Lirs(Lirs::new(capacity)),
            EvictionKind::Sieve => AnyPolicy::Sieve(Sieve::new(capacity)),
            EvictionKind::S3Fifo(release) => AnyPolicy::S3Fifo(S3Fifo::new(capacity, release)),
            EvictionKind::WTinyLfu => AnyPolicy::WTinyLfu(WTinyLfu::new(capacity, unit)),
            EvictionKind::Gdsf => AnyPolicy::Gdsf(Gdsf::new(capacity)),
            EvictionKind::Belady => AnyPolicy::Belady(Belady::new(capacity)),
        }
    }
}

impl fmt::Display for EvictionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EvictionKind {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<EvictionKind, UnknownPolicy> {
        let plain: String =
            text.trim().to_ascii_lowercase().chars().filter(|c| !matches!(c, '-' | '_')).collect();
        let wanted = match plain.as_str() {
            "clock1" => "clock",
            "twoq" => "2q",
            "s3fifo2024" => "s3fifo",
            other => other,
        };
        EvictionKind::ALL
            .into_iter()
            .find(|k| k.name().replace('-', "") == wanted)
            .ok_or_else(|| UnknownPolicy { name: text.to_owned() })
    }
}

/// Any policy, by value. The simulator's inner loop matches once per batch ([`AnyPolicy::visit`]).
#[derive(Debug)]
#[expect(missing_docs, reason = "each variant is the type of its name")]
pub enum AnyPolicy {
    Lru(Lru),
    Fifo(Fifo),
    Clock(Clock),
    Lfu(Lfu),
    Slru(Slru),
    TwoQ(TwoQ),
    Arc(Arc),
    Lirs(Lirs),
    Sieve(Sieve),
    S3Fifo(S3Fifo),
    WTinyLfu(WTinyLfu),
    Gdsf(Gdsf),
    Belady(Belady),
}

/// Work to be done with a policy whose type is known.
pub trait Visitor {
    /// Does it.
    fn visit<P: Eviction>(self, policy: &mut P);
}

macro_rules! each {
    ($self:expr, $p:ident => $body:expr) => {
        match $self {
            AnyPolicy::Lru($p) => $body,
            AnyPolicy::Fifo($p) => $body,
            AnyPolicy::Clock($p) => $body,
            AnyPolicy::Lfu($p) => $body,
            AnyPolicy::Slru($p) => $body,
            AnyPolicy::TwoQ($p) => $body,
            AnyPolicy::Arc($p) => $body,
            AnyPolicy::Lirs($p) => $body,
            AnyPolicy::Sieve($p) => $body,
            AnyPolicy::S3Fifo($p) => $body,
            AnyPolicy::WTinyLfu($p) => $body,
            AnyPolicy::Gdsf($p) => $body,
            AnyPolicy::Belady($p) => $body,
        }
    };
}

impl AnyPolicy {
    /// Runs `visitor` on the policy itself, so that its loop is compiled for that policy.
    pub fn visit(&mut self, visitor: impl Visitor) {
        each!(self, p => visitor.visit(p));
    }
}

impl Eviction for AnyPolicy {
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        each!(self, p => p.request(access, slot, gone))
    }

    fn remove(&mut self, slot: Slot) -> bool {
        each!(self, p => p.remove(slot))
    }

    fn used(&self) -> u64 {
        each!(self, p => p.used())
    }

    fn memory_bytes(&self) -> usize {
        each!(self, p => p.memory_bytes())
    }

    fn prefetch(&self, slot: Slot) {
        each!(self, p => p.prefetch(slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_both_ways() {
        for kind in EvictionKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert_eq!("TwoQ".parse(), Ok(EvictionKind::TwoQ));
        assert_eq!("S3-FIFO".parse(), Ok(EvictionKind::S3Fifo(S3FifoRelease::R2024)));
        let error = "mru".parse::<EvictionKind>().unwrap_err().to_string();
        assert!(error.contains("'mru'") && error.contains("lru, fifo"), "{error}");
    }
}
