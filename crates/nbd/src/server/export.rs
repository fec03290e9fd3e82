//! What a server offers.

use std::sync::Arc;

use crate::wire::{MAX_PAYLOAD, transmission};

/// Sizes of requests, bytes. They are advertised; requests of any size and place are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// The smallest unit that costs no more than its length: a power of two from 1 to 64 KiB.
    pub minimum: u32,
    /// What requests are best multiples of: a power of two, at least the minimum.
    pub preferred: u32,
    /// The longest payload; a multiple of the minimum.
    pub maximum: u32,
}

impl Default for BlockSizes {
    fn default() -> BlockSizes {
        BlockSizes { minimum: 1, preferred: 4096, maximum: MAX_PAYLOAD }
    }
}

/// An export as its clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// What it is asked for by.
    pub name: String,
    /// A line for people; may be empty.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// Writes, trims and zeroes are refused.
    pub read_only: bool,
    /// FLUSH and FUA are offered.
    pub flush: bool,
    /// TRIM is offered.
    pub trim: bool,
    /// WRITE_ZEROES is offered.
    pub write_zeroes: bool,
    /// WRITE_ZEROES knows beforehand whether it will be fast, so FAST_ZERO is offered.
    pub fast_zero: bool,
    /// CACHE is offered.
    pub cache: bool,
    /// A flush on one connection covers what was completed on all.
    pub multi_conn: bool,
    /// Sizes of requests.
    pub block: BlockSizes,
}

impl ExportInfo {
    /// The flags sent when this export is chosen.
    pub fn transmission_flags(&self, structured: bool) -> u16 {
        let mut flags = transmission::HAS_FLAGS;
        let mut set = |on: bool, flag: u16| {
            if on {
                flags |= flag;
            }
        };
        set(self.flush, transmission::SEND_FLUSH | transmission::SEND_FUA);
        set(self.read_only, transmission::READ_ONLY);
        set(self.trim && !self.read_only, transmission::SEND_TRIM);
        set(self.write_zeroes && !self.read_only, transmission::SEND_WRITE_ZEROES);
        set(self.fast_zero && self.write_zeroes && !self.read_only, transmission::SEND_FAST_ZERO);
        set(self.cache, transmission::SEND_CACHE);
        set(self.multi_conn, transmission::CAN_MULTI_CONN);
        set(structured, transmission::SEND_DF);
        flags
    }
}

/// Something that can be exported.
pub trait Export {
    /// As its clients see it, at this moment.
    fn info(&self) -> ExportInfo;
}

/// The exports of a server.
pub trait Exports {
    /// What is exported.
    type Export: Export;

    /// The export of that name; the empty name is the default export's, if there is one.
    fn find(&self, name: &str) -> Option<Arc<Self::Export>>;

    /// Every name with its description.
    fn list(&self) -> Vec<(String, String)>;
}
