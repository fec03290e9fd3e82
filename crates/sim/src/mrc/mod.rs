//! Miss ratios of eviction policies over many cache sizes at once.
//!
//! The trace is decoded once, in chunks. Each object's id is interned to a dense 32-bit tag once; every run (a policy
//! at a size) then needs one array look-up a request to find its slot, whatever the number of runs. Runs are spread
//! over threads chunk by chunk, so results do not depend on the number of threads.
//!
//! Memory: 14 to 26 bytes an object seen (interning; 4 more where the trace has stores or reads without a size), and for each run 4 bytes an object seen and about 20 bytes an
//! object held or remembered as a ghost. Belady adds 4 bytes a request.

mod filter;
mod intern;
mod items;
mod run;
mod shards;
mod sizes;
mod stack;
mod sweep;

pub use filter::Filter;
pub use intern::Interner;
pub use items::{Item, Items, Said};
pub use shards::Sampler;
pub use stack::{LruCurve, StackDistances};
pub use sweep::{Found, Job, Row, Sweep, SweepError, sweep};
