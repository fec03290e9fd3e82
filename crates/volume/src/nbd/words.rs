//! Operations of a store in NBD's words, and back.

use larder_nbd::client::{self, Request};
use larder_nbd::wire::{self, Errno, MAX_PAYLOAD};

use crate::op::{self, Done, Extent, Failure, FailureKind, Op};

const _: () = assert!(op::MAX_PAYLOAD == MAX_PAYLOAD);

/// What is asked of the server.
pub(super) fn request(op: Op) -> Request {
    match op {
        Op::Read { offset, buf } => Request::Read { offset, buf },
        Op::Write { offset, data, fua } => Request::Write { offset, data, fua },
        Op::Flush => Request::Flush,
        Op::Trim { offset, len, fua } => Request::Trim { offset, len, fua },
        Op::WriteZeroes { offset, len, fua, may_punch, fast } => {
            Request::WriteZeroes { offset, len, fua, may_punch, fast }
        }
        Op::Status { offset, len, one } => Request::Status { offset, len, one },
    }
}

/// The operation that a request was made of.
pub(super) fn asked_for(request: Request) -> Op {
    match request {
        Request::Read { offset, buf } => Op::Read { offset, buf },
        Request::Write { offset, data, fua } => Op::Write { offset, data, fua },
        Request::Flush => Op::Flush,
        Request::Trim { offset, len, fua } => Op::Trim { offset, len, fua },
        Request::WriteZeroes { offset, len, fua, may_punch, fast } => {
            Op::WriteZeroes { offset, len, fua, may_punch, fast }
        }
        Request::Status { offset, len, one } => Op::Status { offset, len, one },
    }
}

/// What a server's number says.
fn kind(errno: Errno) -> FailureKind {
    match errno {
        Errno::Perm => FailureKind::Denied,
        Errno::Io => FailureKind::Failed,
        Errno::NoMem => FailureKind::NoMemory,
        Errno::Inval => FailureKind::Invalid,
        Errno::NoSpc => FailureKind::NoSpace,
        Errno::Overflow => FailureKind::TooLong,
        Errno::NotSup => FailureKind::Unsupported,
        Errno::Shutdown => FailureKind::Gone,
    }
}

/// A request that was answered.
pub(super) fn ended(client::Done { token, request, outcome }: client::Done) -> Done {
    let extent = |wire::Extent { len, hole, zero }| Extent { len, hole, zero };
    let outcome = match outcome {
        Ok(extents) => Ok(extents.into_iter().map(extent).collect()),
        Err(client::Failure { errno, message }) => Err(Failure::new(kind(errno), message)),
    };
    Done { token, op: asked_for(request), outcome }
}

#[cfg(test)]
mod tests {
    use larder_runtime::{AlignedBuf, Payload};

    use super::*;

    /// What goes to a connection that ends comes back as it was.
    #[test]
    fn there_and_back() {
        let data = Payload::new(AlignedBuf::zeroed(9));
        let (offset, len, fua) = (7, 3, true);
        for op in [
            Op::Read { offset, buf: AlignedBuf::zeroed(3) },
            Op::Write { offset, data, fua },
            Op::Flush,
            Op::Trim { offset, len, fua },
            Op::WriteZeroes { offset, len, fua, may_punch: true, fast: false },
            Op::Status { offset, len, one: true },
        ] {
            let (before, range) = (format!("{op:?}"), op.range());
            let request = request(op);
            assert_eq!(request.range(), range);
            assert_eq!(format!("{:?}", asked_for(request)), before);
        }
    }
}
