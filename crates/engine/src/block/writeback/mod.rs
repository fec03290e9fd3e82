//! Write-back: writes that are answered when they are on local flash, and come to the store later, in an order that can lose the cache.
//!
//! All dirty data of a cache device lies in one log beside the slots (`larder_format::block::write_log`); slots hold clean lines only. These
//! are its machines; they know no clock, no thread and no I/O:
//!
//! | machine | decides |
//! | --- | --- |
//! | [`overlay`] | which bytes are dirty, and of which record (which knows where they lie); what a read sees first |
//! | [`volume_log`] | the order of a volume's writes: sequence, dependency, what is answered, promised, and may be destaged together |
//! | [`destager`] | when a window or epoch begins, what the store and the journal are asked for, when the log is let go |
//! | [`epoch`] | which epoch of a journal counts, whether it is torn, until when a store is in doubt |
//! | [`marker`] | who may serve a volume; the steps of attach, detach, carrying, taking up, recovering |
//! | [`holder`] | which of these steps a host does next, and what becomes of one that fails |
//! | [`log`] | all of these of one cache device: batches, answers, flushes, windows; what a queue is to carry out |
//! | [`segments`] | where the next batch goes, what is written and durable, when a segment is used again |
//! | [`scan`] | what a start reads of the log, and what it could not read |
//! | [`recovery`] | what a start makes of the log: which batches count, what is dirty, what is lost |
//! | [`throttle`] | how fast writes are answered near the bound; how old what is dirty may become |
//! | [`bounds`] | what volumes may hold of the log, each and together |
//! | [`economy`] | what the write budget makes of it: slower, through, back again |
//! | [`void`] | what of a volume's records does not count, by an operator's word |
//! | [`words`] | how an order and a pace are said |
//! | `extents`, `table`, `packed` | no decisions: the memory of the overlay, of what is kept of each record, and of what a start finds, in few bytes |
//!
//! The design with its reasons, and an executable model in which each rule is needed: `models/write_back.py`. The crash model of these
//! machines is `tests/writeback_model`. A queue calls them (`node/queue/logged.rs`); the crash model of both is `tests/block_back`.

pub mod bounds;
pub mod destager;
pub mod economy;
pub mod epoch;
mod extents;
pub mod holder;
pub mod log;
pub mod marker;
pub mod overlay;
mod packed;
mod planted;
pub mod recovery;
pub mod scan;
pub mod segments;
mod table;
pub mod throttle;
pub mod void;
pub mod volume_log;
pub mod words;

pub use planted::{Fault, Planted};
