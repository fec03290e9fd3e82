//! What caches tell the drive below them.

/// What the drive below is told, in the order it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceOp {
    /// A request waits for these bytes.
    Read {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache reads these bytes, and no request waits.
    BackgroundRead {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache writes these bytes, and no request waits.
    Write {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache has no use for these bytes any more.
    Trim {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
}
