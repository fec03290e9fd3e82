//! What a cache decides beside its shards: one file a decision, each a machine without clock, I/O or bytes.
//!
//! The daemon, the simulator and the crash model call the same machines, so that what one of them decides the others decide
//! too. Time is an argument. What is stated in nanoseconds counts from the start of the cache.
//!
//! | module | decides |
//! | --- | --- |
//! | [`attachment`] | how a volume comes, goes, grows and is forgotten: which step follows which |
//! | [`backoff`] | how long nothing new is written after the file system under the cache was full |
//! | [`calls`] | how shards are called, and how what they ask for comes to those who do it |
//! | [`charged`] | what maintenance and a start are charged for what they write, and when |
//! | [`coalesce`] | which requests of shards for the store become one |
//! | [`counters`] | what is counted for a volume, and as what |
//! | [`cut`] | into which parts an operation is cut |
//! | [`defaults`] | what a cache is where nobody says otherwise |
//! | [`event`] | what a queue is told and asks for: the types of a host |
//! | [`failing`] | which ends of I/O of the cache device count as failures, which find no space, and what follows |
//! | [`flushes`] | which flush of a store covers which region whose bit is to go |
//! | [`held`] | which bytes a shard may still ask for |
//! | [`limits`] | what keeps a line from flash, in which order, whatever admission says; what is charged to the write budget |
//! | [`looks`] | nothing: it is what operators, counts, figures and recordings ask of shards |
//! | [`maintenance`] | when fills and records are written, which ranges have their bits, which store is flushed, when the cache is given up, how a run ends |
//! | [`operator`] | how what an operator asks for is done: lines locked over all shards and dropped in turns, stores distrusted, bits hurried, what a change of what is selected drops |
//! | [`losses`] | which losses of a store the clients of its volume hear of |
//! | [`logged`] | nothing: how the write log is called, and what it asks for handed on |
//! | [`owners`] | whose a line is, and with that which may be displaced, may come, or is pinned |
//! | [`prefetch`] | how fast what an operator wants ahead is asked for, beside clients |
//! | [`queue`] | what a client's operation goes through, from its coming to its answer: what uses the others here |
//! | [`quiet`] | when a region has been quiet for long enough |
//! | [`ranged`] | how a change of a large range takes its lines, in which order and how many at a time |
//! | [`readahead`] | what is read before anybody asks for it |
//! | [`record`] | nothing: it takes note of what queues and maintenance decide, and calls them again |
//! | [`round`] | in which order maintenance and what is around it do what there is to do |
//! | [`setup`] | what shards, admission and the write budget are built from |
//! | [`share`] | which line may be displaced by which: pins, floors and ceilings of volumes |
//! | [`start`] | what survives a start: which map is believed, which volumes keep their lines, what becomes durable in which order |

pub mod attachment;
pub mod backoff;
pub mod calls;
pub mod charged;
pub mod coalesce;
pub mod counters;
pub mod cut;
pub mod defaults;
pub mod event;
pub mod failing;
pub mod flushes;
pub mod held;
pub mod limits;
pub mod logged;
pub mod looks;
pub mod losses;
pub mod maintenance;
pub mod operator;
pub mod owners;
pub mod prefetch;
pub mod queue;
pub mod quiet;
pub mod ranged;
pub mod readahead;
pub mod record;
pub mod round;
pub mod setup;
pub mod share;
pub mod start;

/// The machines that a host stores behind its locks and hands back here: it calls none. Each notes what it is told and decides, while a
/// run is recorded.
pub use super::record::{
    RecordedAdmission as StoredAdmission, RecordedLog as StoredLog, RecordedShard as StoredShard,
};
