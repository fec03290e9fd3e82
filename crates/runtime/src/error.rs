//! What can go wrong with a flash device, each as one line that names the thing, the value and the remedy.

use std::fmt;
use std::io;
use std::sync::Arc;

use larder_base::ByteSize;

use crate::lock::Holder;

/// An operation on a device, as errors and fault plans name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IoOp {
    /// A read.
    Read,
    /// A write.
    Write,
    /// Making earlier writes durable.
    Sync,
    /// Telling the device that a range is no longer needed.
    Discard,
}

impl fmt::Display for IoOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoOp::Read => "read",
            IoOp::Write => "write",
            IoOp::Sync => "sync",
            IoOp::Discard => "discard",
        })
    }
}

/// An error of a flash device. `device` is its path (or its name, for a device in memory).
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The operating system refused to open, size or prepare the device.
    #[error("cannot {action} flash '{device}': {source}{}", remedy(.source))]
    Open {
        /// The path.
        device: Arc<str>,
        /// What was being done: `open`, `create`, `read the size of` …
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The path names something that cannot hold a cache.
    #[error("flash '{device}' is {kind}: name a regular file or a block device")]
    NotADevice {
        /// The path.
        device: Arc<str>,
        /// What it is: `a directory`, `a character device` …
        kind: &'static str,
    },
    /// Nothing is made under `/dev`.
    #[error(
        "flash '{device}' does not exist, and under /dev no file is made: name a block device that is there, or a file elsewhere"
    )]
    UnderDev {
        /// The path.
        device: Arc<str>,
    },
    /// The file does not exist (or is empty) and no size was given to make it with.
    #[error(
        "flash file '{device}' does not exist yet, or is empty: give the size to create it with (--flash-size)"
    )]
    SizeMissing {
        /// The path.
        device: Arc<str>,
    },
    /// The device has another size than the one asked for.
    #[error(
        "flash '{device}' has {found} bytes, but {wanted} bytes ({}) were asked for: \
         give the size it has, or name another file", ByteSize(*.wanted)
    )]
    SizeDiffers {
        /// The path.
        device: Arc<str>,
        /// Its size, bytes.
        found: u64,
        /// The size asked for, bytes.
        wanted: u64,
    },
    /// Too small to be of use.
    #[error("flash '{device}' has only {size} bytes: at least {least} ({}) are needed; name a larger one, or a file that does not \
         exist yet with the size to make it with", ByteSize(*.least))]
    TooSmall {
        /// The path.
        device: Arc<str>,
        /// Its size, bytes.
        size: u64,
        /// The least size, bytes.
        least: u64,
    },
    /// Another process (or another open device in this one) has it.
    #[error(
        "flash '{device}' is in use{}: stop the other instance, or give this one another path",
        by(.holder)
    )]
    InUse {
        /// The path.
        device: Arc<str>,
        /// Who holds it, where that can be seen.
        holder: Option<Holder>,
    },
    /// The file system has not the room that was to be reserved.
    #[error(
        "flash '{device}' needs {} and its file system has {} free: free some space or ask for less",
        ByteSize(*.needed), ByteSize(*.free)
    )]
    NoSpace {
        /// The path.
        device: Arc<str>,
        /// Bytes to be reserved.
        needed: u64,
        /// Bytes available.
        free: u64,
    },
    /// An operation failed.
    #[error("{op} of {len} bytes at offset {offset} of flash '{device}' failed: {source}")]
    Io {
        /// The path.
        device: Arc<str>,
        /// What failed.
        op: IoOp,
        /// Where, in bytes.
        offset: u64,
        /// How much, in bytes.
        len: u64,
        /// The system's error.
        source: io::Error,
    },
    /// The range is not within the device: a fault of the caller, or a damaged address.
    #[error("{op} of {len} bytes at offset {offset} lies beyond flash '{device}' of {size} bytes")]
    OutOfRange {
        /// The path.
        device: Arc<str>,
        /// What was asked.
        op: IoOp,
        /// Where, in bytes.
        offset: u64,
        /// How much, in bytes.
        len: u64,
        /// The device's size, bytes.
        size: u64,
    },
    /// A write or discard that does not cover whole blocks.
    #[error(
        "{op} of {len} bytes at offset {offset} of flash '{device}' is not a multiple of its {block}-byte blocks"
    )]
    Misaligned {
        /// The path.
        device: Arc<str>,
        /// What was asked.
        op: IoOp,
        /// Where, in bytes.
        offset: u64,
        /// How much, in bytes.
        len: u64,
        /// The unit, bytes.
        block: u32,
    },
    /// One read wants more memory than the ring's whole pool.
    #[error(
        "read of {len} bytes at offset {offset} of flash '{device}' exceeds the ring's buffers of {limit} bytes"
    )]
    TooLong {
        /// The path.
        device: Arc<str>,
        /// Where, in bytes.
        offset: u64,
        /// How much, in bytes.
        len: u64,
        /// The pool's limit, bytes.
        limit: u64,
    },
    /// The ring asked for cannot be had.
    #[error("cannot start {ring} for flash '{device}': {reason}; choose --io auto or --io threads")]
    Ring {
        /// The path.
        device: Arc<str>,
        /// Which ring.
        ring: &'static str,
        /// Why not.
        reason: String,
    },
}

impl DeviceError {
    /// The device that reading or writing failed of.
    pub fn device(&self) -> Option<&std::sync::Arc<str>> {
        match self {
            DeviceError::OutOfRange { device, .. }
            | DeviceError::Misaligned { device, .. }
            | DeviceError::TooLong { device, .. }
            | DeviceError::Io { device, .. } => Some(device),
            _ => None,
        }
    }

    /// The system's error number, where the system reported one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            DeviceError::Open { source, .. } | DeviceError::Io { source, .. } => {
                source.raw_os_error()
            }
            _ => None,
        }
    }
}

fn by(holder: &Option<Holder>) -> String {
    holder.as_ref().map(|h| format!(" by {h}")).unwrap_or_default()
}

/// An error of the system in words, without its number, and with what to do about the usual ones.
pub fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    let words = text.split(" (os error").next().unwrap_or(&text);
    let remedy = match error.kind() {
        io::ErrorKind::NotFound => ": create it, or name another path",
        io::ErrorKind::PermissionDenied => ": run as a user who may, or choose another path",
        io::ErrorKind::ReadOnlyFilesystem => ": choose a path on a writable file system",
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ": free some space there",
        io::ErrorKind::AddrInUse => ": stop who listens there, or choose another address",
        io::ErrorKind::AddrNotAvailable => ": it is no address of this machine",
        io::ErrorKind::NotADirectory => ": a directory of that name is needed",
        io::ErrorKind::IsADirectory => ": name a file",
        _ => match error.raw_os_error() {
            Some(libc::EIO) => ": look at the device's health and the system's log",
            Some(libc::EMFILE | libc::ENFILE) => ": raise ulimit -n",
            _ => "",
        },
    };
    format!("{words}{remedy}")
}

/// What to do about the usual refusals.
fn remedy(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => " (create the directory first)",
        io::ErrorKind::PermissionDenied => " (run as a user who may read and write it)",
        io::ErrorKind::ReadOnlyFilesystem => " (choose a path on a writable file system)",
        io::ErrorKind::StorageFull => " (free some space or choose a smaller size)",
        io::ErrorKind::FileTooLarge => " (raise the file size limit or choose a smaller size)",
        io::ErrorKind::ResourceBusy => {
            " (it is mounted or part of another volume: choose a device that is free)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_in_words() {
        let text = |code: i32| plain(&io::Error::from_raw_os_error(code));
        assert_eq!(text(libc::ENOSPC), "No space left on device: free some space there");
        assert_eq!(text(libc::EINTR), "Interrupted system call");
        assert!(text(libc::EIO).starts_with("Input/output error: look at"));
        assert_eq!(plain(&io::Error::other("odd")), "odd");
    }
}
