//! Outcomes in NBD's words.

use crate::nbd::wire::{self, Errno};
use crate::op::{Extent, FailureKind};

/// The number that says what went wrong.
pub(super) fn errno(kind: FailureKind) -> Errno {
    match kind {
        FailureKind::Denied => Errno::Perm,
        FailureKind::Failed => Errno::Io,
        FailureKind::NoMemory => Errno::NoMem,
        FailureKind::Invalid => Errno::Inval,
        FailureKind::NoSpace => Errno::NoSpc,
        FailureKind::TooLong => Errno::Overflow,
        FailureKind::Unsupported => Errno::NotSup,
        FailureKind::Gone => Errno::Shutdown,
    }
}

/// A part of a block status.
pub(super) fn extent(Extent { len, hole, zero }: Extent) -> wire::Extent {
    wire::Extent { len, hole, zero }
}
