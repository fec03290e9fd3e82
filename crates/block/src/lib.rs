//! The block cache's daemon: NBD, vhost-user and ublk before a cache, stores behind it, and the workers between them.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`cache`] | the library's block cache: the engine between workers and stores, its log, and what survives |
//! | [`control`] | operating a daemon: the control socket, status, the live page |
//! | [`served`] | what all front ends have in common |
//! | [`server`] | NBD: listeners and workers |
//! | [`ublk`] | volumes as disks of this host, by the kernel's ublk driver |
//! | [`vhost`] | volumes as virtio disks of guests, over vhost-user |
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the server stands above the runtime: it reads clocks and starts threads"
)]

pub mod control;
pub mod served;
pub mod server;
pub mod ublk;
pub mod vhost;

// What this crate speaks and stands on, for who embeds it and names no other.
pub use larder_cache::block as cache;
pub use larder_nbd as nbd;
pub use larder_volume as backing;
pub use larder_volume::op;
pub(crate) use larder_volume::rate_limited;
