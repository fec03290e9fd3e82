//! How the operations on files are done: what the kernel is asked for, and what a thread does.

use std::io::{self, IoSlice};
use std::os::fd::AsRawFd;

use io_uring::{opcode, squeue, types};
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};

use super::super::backend::{Moved, Work, go_on_from};
use super::{FileOp, Job};

/// Codes of the operations of io_uring that are used.
pub(super) const CODES: &[u8] =
    &[opcode::Read::CODE, opcode::Write::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];

impl Job {
    /// Bytes to move in all; nothing for the operations that move none.
    fn length(&self) -> usize {
        match &self.op {
            FileOp::Read { buf, .. } => buf.len(),
            FileOp::Write { data, .. } => data.len(),
            _ => 0,
        }
    }
}

// SAFETY: the entry points into a buffer that the job owns or shares and whose memory does not move with the job; a
// payload is only read by the kernel. It names a descriptor that the job keeps open.
unsafe impl Work for Job {
    type Context = ();
    type Error = io::Error;

    /// Lengths fit: a longer transfer is cut, and goes on.
    fn entry(&mut self, _: &()) -> squeue::Entry {
        let fd = types::Fd(self.file.fd.as_raw_fd());
        let from = self.moved;
        /// The most of one system call, a multiple of any block.
        const MOST: usize = 1 << 30;
        match &mut self.op {
            FileOp::Read { offset, buf } => {
                let rest = &mut buf[from..];
                opcode::Read::new(fd, rest.as_mut_ptr(), rest.len().min(MOST) as u32)
                    .offset(*offset + from as u64)
                    .build()
            }
            FileOp::Write { offset, data, durable } => {
                let rest = &data[from..];
                opcode::Write::new(fd, rest.as_ptr(), rest.len().min(MOST) as u32)
                    .offset(*offset + from as u64)
                    .rw_flags(if *durable { libc::RWF_DSYNC } else { 0 })
                    .build()
            }
            FileOp::Sync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            FileOp::Punch { offset, len } => opcode::Fallocate::new(fd, *len)
                .offset(*offset)
                .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
            FileOp::Zero { offset, len } => opcode::Fallocate::new(fd, *len)
                .offset(*offset)
                .mode(libc::FALLOC_FL_ZERO_RANGE)
                .build(),
        }
    }

    fn advance(&mut self, n: usize) -> Moved {
        if self.moved + n >= self.length() {
            return Moved::Over(Ok(()));
        }
        if let Some(moved) = go_on_from(self.moved, n, self.file.unit as usize) {
            self.moved = moved;
            return Moved::GoOn;
        }
        Moved::Over(Err(match self.op {
            FileOp::Read { .. } => {
                io::Error::new(io::ErrorKind::UnexpectedEof, "the file ended early")
            }
            _ => io::Error::new(io::ErrorKind::WriteZero, "the file took no bytes"),
        }))
    }

    fn failed(&self, _: &(), error: io::Error) -> io::Error {
        error
    }

    fn perform(&mut self, _: &()) -> io::Result<()> {
        loop {
            let from = self.moved;
            let fd = &self.file;
            let result = match &mut self.op {
                FileOp::Read { offset, buf } => {
                    rustix::io::pread(fd, &mut buf[from..], *offset + from as u64)
                }
                FileOp::Write { offset, data, durable } => {
                    let flags =
                        if *durable { ReadWriteFlags::DSYNC } else { ReadWriteFlags::empty() };
                    let rest = [IoSlice::new(&data[from..])];
                    rustix::io::pwritev2(fd, &rest, *offset + from as u64, flags)
                }
                FileOp::Sync => rustix::fs::fdatasync(fd).map(|()| 0),
                FileOp::Punch { offset, len } => {
                    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(fd, flags, *offset, *len).map(|()| 0)
                }
                FileOp::Zero { offset, len } => {
                    rustix::fs::fallocate(fd, FallocateFlags::ZERO_RANGE, *offset, *len).map(|()| 0)
                }
            };
            match result {
                Ok(n) => {
                    if let Moved::Over(result) = self.advance(n) {
                        return result;
                    }
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}
