//! A model of an SSD: a page-mapped flash translation layer with garbage collection.
//!
//! The device has logical pages; each write of one goes to the next page of an open super-block (blocks of all channels
//! and planes erased together), and the page's old copy becomes invalid. When free super-blocks run out, the cleaner
//! picks a victim, copies its valid pages and erases it. Device-level write amplification is pages programmed over
//! pages written by the host.
//!
//! Checked against closed forms for uniform random writes (see [`theory`](crate::lab::theory)), within 1 %.

mod ftl;
mod timing;
mod wear;

pub use ftl::{Geometry, GeometryError, Keep, NoEviction, Ssd, Traffic, Work};
pub use larder_policy::block::VictimPolicy;
pub use timing::{Channels, Timing};
pub use wear::Wear;
