//! What a cache decides beside its shards: one file a decision, each a machine without clock, I/O or bytes.
//!
//! The daemon, the simulator and the crash model call the same machines, so that what one of them decides the others decide
//! too. Time is an argument. What is stated in nanoseconds counts from the start of the cache.
//!
//! | module | decides |
//! | --- | --- |
//! | [`backoff`] | how long nothing new is written after the file system under the cache was full |
//! | [`limits`] | what keeps a line from flash, in which order, whatever admission says; what is charged to the write budget |

pub mod backoff;
pub mod limits;
