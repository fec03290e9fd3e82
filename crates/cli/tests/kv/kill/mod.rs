//! `larder kv` killed, stopped, restarted and misled: what an answer may be afterwards.

mod disk;
mod live;
mod memory_file;
mod mislead;
mod moves;
mod restart;
