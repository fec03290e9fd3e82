//! What lies on flash, as bytes: superblock, records, segments, checkpoints.
