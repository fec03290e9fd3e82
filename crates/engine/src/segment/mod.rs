//! Segments under construction: where each object goes, and what it costs.

pub mod bench;
mod builder;

pub use builder::{
    Choice, FUNCTIONS, Fill, FullMark, MAX_EXTENT_PAGES, NoRoom, Placed, SegmentBuilder,
};
