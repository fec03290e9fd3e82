//! The DRAM tier: an arena of variable-sized objects, and the table that finds them.

mod accesses;
mod arena;
mod compact;
mod free;
mod memory;
mod object;
mod table;

pub use accesses::{Accesses, Gaps};
pub use arena::{Arena, Block, Tail, UNIT, footprint};
pub use compact::{CompactArena, Contents, Key};
pub use memory::ObjectMemory;
pub use object::{HEADER_BYTES, ObjectHeader, State, object_bytes};
pub use table::Table;
