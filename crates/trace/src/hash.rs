//! A trace's hash: what its requests were, whatever the file was called and however it was packed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{BadRecord, TraceError};
use crate::read::{Progress, Reader};
use crate::request::{Request, mix};

/// Hash of requests in their order, with all that a simulation may ask of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceHash(u64);

impl TraceHash {
    /// Takes in the next request.
    #[inline]
    pub fn add(&mut self, r: &Request) {
        for word in [
            r.time.map_or(u64::MAX, |t| t.0),
            r.id,
            r.offset,
            r.size,
            u64::from(r.key_size) << 32 | u64::from(r.ttl),
            u64::from(r.app) << 8 | r.op as u64,
        ] {
            self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9fb2_1c65_1e98_df25);
        }
    }

    /// As outputs name it: 16 digits.
    pub fn text(self) -> String {
        format!("{:016x}", mix(self.0))
    }
}

/// The hash of what a [`Hashed`] reader has handed out so far.
#[derive(Clone, Debug, Default)]
pub struct HashOf(Arc<AtomicU64>);

impl HashOf {
    /// As outputs name it: 16 digits.
    pub fn text(&self) -> String {
        TraceHash(self.0.load(Ordering::Relaxed)).text()
    }
}

/// A reader that hashes what it hands out.
pub struct Hashed {
    inner: Box<dyn Reader>,
    hash: TraceHash,
    shared: HashOf,
}

impl Hashed {
    /// Over `inner`, with the hash that can be asked for when the reader is gone.
    pub fn over(inner: Box<dyn Reader>) -> (Box<dyn Reader>, HashOf) {
        let shared = HashOf::default();
        let hashed = Hashed { inner, hash: TraceHash::default(), shared: shared.clone() };
        (Box::new(hashed), shared)
    }
}

impl Iterator for Hashed {
    type Item = Result<Request, TraceError>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.inner.next();
        if let Some(Ok(request)) = &next {
            self.hash.add(request);
            self.shared.0.store(self.hash.0, Ordering::Relaxed);
        }
        next
    }
}

impl Reader for Hashed {
    fn skipped(&self) -> u64 {
        self.inner.skipped()
    }
    fn first_skipped(&self) -> Option<&BadRecord> {
        self.inner.first_skipped()
    }
    fn progress(&self) -> Progress {
        self.inner.progress()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate;

    #[test]
    fn the_hash_is_of_the_requests_and_of_all_of_them() {
        let hash = |spec: &str| {
            let (reader, hash) = Hashed::over(generate::parse(spec).unwrap());
            let direct = reader.fold(TraceHash::default(), |mut h, r| {
                h.add(&r.unwrap());
                h
            });
            assert_eq!(hash.text(), direct.text());
            hash.text()
        };
        let one = hash("zipf?objects=100&requests=1000");
        assert_eq!(one.len(), 16);
        assert_eq!(one, hash("zipf?requests=1000&objects=100"));
        assert_ne!(one, hash("zipf?objects=100&requests=1001"));
        assert_ne!(one, hash("zipf?objects=100&requests=1000&seed=2"));
    }
}
