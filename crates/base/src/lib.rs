//! Typed units, hashing, seeded randomness and shared words: what every Larder crate stands on.
//!
//! Nothing here reads a clock or draws randomness from the operating system. Time enters as [`Now`], randomness as a
//! seed for [`Rng`], so that everything built on this crate replays.

pub mod bytes;
mod hash;
mod lazy;
mod lines;
pub mod lock;
mod prefetch;
mod rng;
mod short;
mod size;
pub mod slab;
mod time;
mod words;

pub use hash::{HashKey, KeyHasher, ObjectHash};
pub use lazy::LazyWords;
pub use prefetch::prefetch;
pub use rng::Rng;
pub use short::Short;
pub use size::{ByteSize, Endurance, ParseEnduranceError, ParseSizeError};
pub use time::{Expiry, Nanos, Now, UnixSecs};
pub use words::{Killed, Supply, Words};

/// A name space of keys with its own classifier, statistics and share of the cache (see the glossary).
///
/// At most 256 applications are told apart; id 0 is `default` (keys without a prefix), and keys of further prefixes
/// fall into [`AppId::OTHER`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AppId(pub u16);

impl AppId {
    /// The application of keys that carry no prefix.
    pub const DEFAULT: AppId = AppId(0);
    /// Where the keys of the 257th and later applications are counted.
    pub const OTHER: AppId = AppId(256);
    /// Length of a table indexed by application.
    pub const COUNT: usize = 257;

    /// The id as an index into a table of [`AppId::COUNT`] entries.
    pub fn index(self) -> usize {
        usize::from(self.0).min(Self::COUNT - 1)
    }
}
