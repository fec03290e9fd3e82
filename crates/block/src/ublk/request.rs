//! What a descriptor asks for.
//!
//! It comes from the kernel, from whoever may open the disk, and is believed of nothing all the same: it is read once, and the
//! range lies within the volume before anything is done.

use rustix::io::Errno;

use super::abi::{DESCRIPTOR_BYTES, SECTOR, op};
use crate::backing::Capabilities;
use crate::op::FailureKind;

/// Sectors of one discard or writing of zeroes: just below 2 GiB, whole pages of 4 KiB.
pub const MAX_RANGE_SECTORS: u32 = (1 << 22) - 8;

/// A volume as a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Whole sectors of the volume.
    pub sectors: u64,
    /// The longest read or write, bytes.
    pub max_transfer: u32,
    /// Nothing may be written.
    pub read_only: bool,
    /// A discard does something.
    pub discard: bool,
}

impl Shape {
    /// That of a store, with requests of up to `max_transfer` bytes.
    pub fn new(about: &Capabilities, max_transfer: u32) -> Shape {
        Shape {
            sectors: about.size / SECTOR,
            max_transfer: max_transfer.min(about.maximum) / 4096 * 4096,
            read_only: about.read_only,
            discard: about.trim && !about.read_only,
        }
    }
}

/// What is asked for. Ranges are in bytes, lie within the volume and are not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Read.
    Read {
        /// Start.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Write.
    Write {
        /// Start.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Durable when it is answered.
        fua: bool,
    },
    /// Make durable what was answered.
    Flush,
    /// Forget the range.
    Discard {
        /// Start.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Make the range read as zeroes.
    WriteZeroes {
        /// Start.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Durable when it is answered.
        fua: bool,
        /// A hole will do.
        may_punch: bool,
    },
    /// Answered with an error at once.
    Refused {
        /// What is wrong.
        kind: FailureKind,
        /// For the log.
        why: &'static str,
    },
}

/// What the kernel is told of a failure: the error's number, below zero.
pub(super) fn result(kind: FailureKind) -> i32 {
    let errno = match kind {
        FailureKind::Denied => Errno::PERM,
        FailureKind::Failed => Errno::IO,
        FailureKind::NoMemory => Errno::NOMEM,
        FailureKind::Invalid => Errno::INVAL,
        FailureKind::NoSpace => Errno::NOSPC,
        FailureKind::TooLong => Errno::OVERFLOW,
        FailureKind::Unsupported => Errno::OPNOTSUPP,
        FailureKind::Gone => Errno::SHUTDOWN,
    };
    -errno.raw_os_error()
}

fn refused(kind: FailureKind, why: &'static str) -> What {
    What::Refused { kind, why }
}

/// What a descriptor (`struct ublksrv_io_desc`) asks of a volume.
pub fn parse(raw: &[u8; DESCRIPTOR_BYTES], shape: &Shape) -> What {
    let word = |at: usize| u32::from_ne_bytes([raw[at], raw[at + 1], raw[at + 2], raw[at + 3]]);
    let (kind, flags) = ((word(0) & 0xff) as u8, word(0) & !0xff);
    let sectors = word(4);
    let mut start = [0u8; 8];
    start.copy_from_slice(&raw[8..16]);
    let start = u64::from_ne_bytes(start);
    if kind == op::FLUSH {
        return What::Flush;
    }
    let changes = match kind {
        op::READ => false,
        op::WRITE | op::DISCARD | op::WRITE_ZEROES => true,
        _ => return refused(FailureKind::Unsupported, "a request of an unknown kind"),
    };
    if changes && shape.read_only {
        return refused(FailureKind::Denied, "a change of a volume that is only read");
    }
    let inside = start.checked_add(u64::from(sectors)).is_some_and(|end| end <= shape.sectors);
    if sectors == 0 || !inside {
        return refused(
            FailureKind::Invalid,
            "an empty range, or one beyond the end of the volume",
        );
    }
    let most = match kind {
        op::READ | op::WRITE => shape.max_transfer / SECTOR as u32,
        _ => MAX_RANGE_SECTORS,
    };
    if sectors > most {
        return refused(FailureKind::Invalid, "a range that is too long");
    }
    let (offset, len) = (start * SECTOR, sectors * SECTOR as u32);
    let fua = flags & op::FUA != 0;
    match kind {
        op::READ => What::Read { offset, len },
        op::WRITE => What::Write { offset, len, fua },
        op::DISCARD if !shape.discard => refused(FailureKind::Unsupported, "no discard here"),
        op::DISCARD => What::Discard { offset, len },
        _ => What::WriteZeroes { offset, len, fua, may_punch: flags & op::NOUNMAP == 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    pub(crate) const SHAPE: Shape =
        Shape { sectors: 1 << 24, max_transfer: 1 << 20, read_only: false, discard: true };

    fn raw(op_flags: u32, sectors: u32, start: u64) -> [u8; DESCRIPTOR_BYTES] {
        let mut out = [0u8; DESCRIPTOR_BYTES];
        out[..4].copy_from_slice(&op_flags.to_ne_bytes());
        out[4..8].copy_from_slice(&sectors.to_ne_bytes());
        out[8..16].copy_from_slice(&start.to_ne_bytes());
        // An address that nobody looks at.
        out[16..].fill(0xaa);
        out
    }

    #[test]
    fn every_kind() {
        let ask = |op: u8, flags: u32| parse(&raw(u32::from(op) | flags, 8, 16), &SHAPE);
        let (offset, len) = (8192, 4096);
        assert_eq!(ask(op::READ, op::FUA), What::Read { offset, len });
        assert_eq!(ask(op::WRITE, 0), What::Write { offset, len, fua: false });
        assert_eq!(ask(op::WRITE, op::FUA), What::Write { offset, len, fua: true });
        assert_eq!(ask(op::FLUSH, 0), What::Flush);
        assert_eq!(ask(op::DISCARD, 0), What::Discard { offset, len });
        let zeroes = |fua, may_punch| What::WriteZeroes { offset, len, fua, may_punch };
        assert_eq!(ask(op::WRITE_ZEROES, 0), zeroes(false, true));
        assert_eq!(ask(op::WRITE_ZEROES, op::NOUNMAP | op::FUA), zeroes(true, false));
        // A flush is about no range.
        assert_eq!(parse(&raw(u32::from(op::FLUSH), u32::MAX, u64::MAX), &SHAPE), What::Flush);
    }

    #[test]
    fn what_is_refused() {
        let code = |op: u8, sectors, start, shape: &Shape| match parse(
            &raw(u32::from(op), sectors, start),
            shape,
        ) {
            What::Refused { kind, .. } => Some(kind),
            _ => None,
        };
        let end = SHAPE.sectors;
        assert_eq!(code(op::READ, 1, end - 1, &SHAPE), None);
        assert_eq!(code(op::READ, 2, end - 1, &SHAPE), Some(FailureKind::Invalid));
        assert_eq!(code(op::READ, 1, u64::MAX, &SHAPE), Some(FailureKind::Invalid));
        assert_eq!(code(op::READ, 0, 0, &SHAPE), Some(FailureKind::Invalid));
        assert_eq!(code(op::WRITE, 2048, 0, &SHAPE), None);
        assert_eq!(code(op::WRITE, 2049, 0, &SHAPE), Some(FailureKind::Invalid));
        assert_eq!(code(op::DISCARD, MAX_RANGE_SECTORS, 0, &SHAPE), None);
        assert_eq!(code(op::DISCARD, MAX_RANGE_SECTORS + 1, 0, &SHAPE), Some(FailureKind::Invalid));
        assert_eq!(code(op::WRITE_ZEROES, u32::MAX, 0, &SHAPE), Some(FailureKind::Invalid));
        for unknown in [4, 6, 13, 15, 18, 255] {
            assert_eq!(code(unknown, 8, 0, &SHAPE), Some(FailureKind::Unsupported));
        }
        let plain = Shape { discard: false, ..SHAPE };
        assert_eq!(code(op::DISCARD, 8, 0, &plain), Some(FailureKind::Unsupported));
        assert_eq!(code(op::WRITE_ZEROES, 8, 0, &plain), None);
        let read_only = Shape { read_only: true, ..plain };
        for change in [op::WRITE, op::DISCARD, op::WRITE_ZEROES] {
            assert_eq!(code(change, 8, 0, &read_only), Some(FailureKind::Denied));
        }
        assert_eq!(code(op::READ, 8, 0, &read_only), None);
    }

    #[test]
    fn numbers_of_the_kernel() {
        assert_eq!(result(FailureKind::Denied), -1);
        assert_eq!(result(FailureKind::Failed), -5);
        assert_eq!(result(FailureKind::NoMemory), -12);
        assert_eq!(result(FailureKind::Invalid), -22);
        assert_eq!(result(FailureKind::NoSpace), -28);
        assert_eq!(result(FailureKind::TooLong), -75);
        assert_eq!(result(FailureKind::Unsupported), -95);
        assert_eq!(result(FailureKind::Gone), -108);
    }

    /// Whatever is there: no panic, and a range within the volume and the limits.
    #[test]
    fn garbage() {
        let mut rng = Rng::new(23);
        let mut taken = 0;
        for _ in 0..200_000 {
            let mut bytes = raw(
                rng.next_u64() as u32 & 0xff07,
                rng.next_u64() as u32 >> rng.below(32),
                rng.next_u64() >> rng.below(64),
            );
            if rng.below(4) == 0 {
                bytes.iter_mut().for_each(|b| *b = rng.next_u64() as u8);
            }
            match parse(&bytes, &SHAPE) {
                What::Read { offset, len } | What::Write { offset, len, .. } => {
                    assert!(len > 0 && len <= SHAPE.max_transfer && len % 512 == 0);
                    assert!(offset + u64::from(len) <= SHAPE.sectors * SECTOR);
                    taken += 1;
                }
                What::Discard { offset, len } | What::WriteZeroes { offset, len, .. } => {
                    assert!(len > 0 && offset + u64::from(len) <= SHAPE.sectors * SECTOR);
                    taken += 1;
                }
                What::Flush | What::Refused { .. } => {}
            }
        }
        assert!(taken > 1000, "{taken}");
    }
}
