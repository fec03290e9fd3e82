//! What clients did with a volume, counted: what counts as what.

use std::sync::atomic::{AtomicU64, Ordering};

use larder_policy::block::BlockKind;

use super::event::Ended;
use crate::block::api::{PartKind, Source};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a volume. All only grow; any thread may count.
        #[derive(Debug, Default)]
        pub struct VolumeCounters {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// What [`VolumeCounters`] said at a moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct VolumeCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl VolumeCounters {
            /// What they say now. While others count, a later field may know of more than an earlier one.
            pub fn counts(&self) -> VolumeCounts {
                VolumeCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Of the reads, answered without asking the store or waiting for it. (Read before `reads`, and counted after it: no more
    /// are hits than there are reads.)
    read_hits,
    /// Reads that ended.
    reads,
    /// Bytes read.
    read_bytes,
    /// Writes, zeroes and trims that ended.
    writes,
    /// Bytes written (trims and zeroes have none).
    write_bytes,
    /// Requests that failed.
    failed,
    /// Of the reads of a file system's metadata, answered without asking the store or waiting for it.
    metadata_hits,
    /// Reads of a file system's metadata, as far as recognised.
    metadata_reads,
    /// Lines that began to be filled.
    filled,
    /// Of them, by reads that missed.
    filled_by_reads,
}

impl VolumeCounters {
    /// A client's operation ended. `kind` says what bytes of the volume hold, where the client did not.
    pub fn ended(&self, ended: &Ended, kind: impl FnOnce() -> BlockKind) {
        count(&self.failed, u64::from(ended.failed));
        match ended.kind {
            PartKind::Read => {
                let hit = u64::from(ended.hit);
                count(&self.reads, 1);
                count(&self.read_bytes, ended.len);
                count(&self.read_hits, hit);
                let holds = match ended.holds {
                    BlockKind::Unknown => kind(),
                    stated => stated,
                };
                if holds == BlockKind::Metadata {
                    count(&self.metadata_reads, 1);
                    count(&self.metadata_hits, hit);
                }
            }
            PartKind::Write | PartKind::Zero | PartKind::Trim => {
                count(&self.writes, 1);
                if ended.kind == PartKind::Write {
                    count(&self.write_bytes, ended.len);
                }
            }
            PartKind::Prefetch => {}
        }
    }

    /// So many lines begin to be filled.
    pub fn filling(&self, lines: u32, source: Source) {
        count(&self.filled, lines.into());
        if matches!(source, Source::Io(_)) {
            count(&self.filled_by_reads, lines.into());
        }
    }
}

fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use larder_base::Nanos;

    use super::*;

    fn ended(kind: PartKind, hit: bool, holds: BlockKind) -> Ended {
        let (began, failed) = (Nanos::ZERO, false);
        let (asked_store, from_flash, shared) = (!hit, 0, 0);
        Ended { kind, at: 0, len: 4096, holds, began, failed, hit, asked_store, from_flash, shared }
    }

    #[test]
    fn what_the_client_says_of_its_bytes_is_asked_of_nobody_else() {
        let counters = VolumeCounters::default();
        let never = || -> BlockKind { panic!("the client has said it") };
        counters.ended(&ended(PartKind::Read, true, BlockKind::Metadata), never);
        counters.ended(&ended(PartKind::Read, true, BlockKind::Data), never);
        counters.ended(&ended(PartKind::Read, false, BlockKind::Unknown), || BlockKind::Metadata);
        let counts = counters.counts();
        assert_eq!((counts.reads, counts.read_hits, counts.read_bytes), (3, 2, 3 * 4096));
        assert_eq!((counts.metadata_reads, counts.metadata_hits), (2, 1));
    }

    #[test]
    fn a_trim_writes_no_bytes_and_a_prefetch_is_no_clients() {
        let counters = VolumeCounters::default();
        for kind in [PartKind::Write, PartKind::Zero, PartKind::Trim, PartKind::Prefetch] {
            counters.ended(&ended(kind, false, BlockKind::Unknown), || BlockKind::Metadata);
        }
        let counts = counters.counts();
        assert_eq!((counts.writes, counts.write_bytes, counts.reads), (3, 4096, 0));
        assert_eq!((counts.metadata_reads, counts.metadata_hits), (0, 0));
    }
}
