//! Stores in real files, which do everything on the thread that asks, in order.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use larder_block::backing::{Backing, BackingError, Capabilities, Flushing, Identity, Session};
use larder_block::op::{Done, Failure, FailureKind, Op};
use larder_engine::block::node::start::places::Comer;

/// A store that cannot tell whether it was changed, and is trusted not to be.
#[derive(Debug)]
pub(crate) struct Store {
    name: String,
    file: Arc<File>,
    size: AtomicU64,
    fails: Arc<AtomicU32>,
}

fn identity(name: &str, size: u64) -> Identity {
    Identity::Blind { name: name.to_owned(), size }
}

/// What such a store of `size` bytes is known by.
pub(crate) fn known_by(name: &str, size: u64) -> [u8; 64] {
    identity(name, size).encode()
}

/// The same as it comes to the simulator.
pub(crate) fn comer(name: &str, bytes: u64) -> Comer {
    let is = identity(name, bytes);
    let encoded = is.encode();
    let proves = Box::new(move |then: &[u8; 64], let_go| is.proves(then, let_go, true));
    Comer { name: name.to_owned(), bytes, identity: encoded, proves }
}

impl Store {
    /// The next reads and changes fail and do nothing, as many as `fails` says.
    pub(crate) fn open(path: &Path, name: &str, fails: Arc<AtomicU32>) -> Box<dyn Backing> {
        let file = File::options().read(true).write(true).open(path).unwrap();
        let size = file.metadata().unwrap().len().into();
        Box::new(Store { name: name.to_owned(), file: Arc::new(file), size, fails })
    }
}

impl Backing for Store {
    fn uri(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            size: self.size.load(Ordering::SeqCst),
            read_only: false,
            trim: true,
            fast_zero: true,
            status: true,
            flush: Flushing::Offered,
            minimum: 1,
            maximum: 32 << 20,
        }
    }

    fn identity(&self) -> Result<Identity, BackingError> {
        Ok(identity(&self.name, self.capabilities().size))
    }

    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        if let Some(bytes) = bytes {
            self.file.set_len(bytes).unwrap();
            self.size.store(bytes, Ordering::SeqCst);
        }
        Ok(self.capabilities().size)
    }

    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let (file, fails) = (self.file.clone(), self.fails.clone());
        let event = UnixStream::pair().unwrap();
        Ok(Box::new(AtOnce { file, fails, ended: VecDeque::new(), event }))
    }
}

struct AtOnce {
    file: Arc<File>,
    fails: Arc<AtomicU32>,
    ended: VecDeque<Done>,
    /// Says nothing: who asks looks at once.
    event: (UnixStream, UnixStream),
}

impl Session for AtOnce {
    fn fd(&self) -> RawFd {
        self.event.0.as_raw_fd()
    }

    fn submit(&mut self, token: u64, mut op: Op) {
        let is_sure = matches!(op, Op::Flush | Op::Status { .. });
        let left = self.fails.load(Ordering::SeqCst);
        if !is_sure && left > 0 {
            self.fails.store(left - 1, Ordering::SeqCst);
            let outcome = Err(Failure::new(FailureKind::Failed, "a fault"));
            return self.ended.push_back(Done { token, op, outcome });
        }
        match &mut op {
            Op::Read { offset, buf } => self.file.read_exact_at(buf, *offset).unwrap(),
            Op::Write { offset, data, .. } => self.file.write_all_at(data, *offset).unwrap(),
            Op::Trim { offset, len, .. } | Op::WriteZeroes { offset, len, .. } => {
                self.file.write_all_at(&vec![0; *len as usize], *offset).unwrap();
            }
            Op::Flush | Op::Status { .. } => {}
        }
        self.ended.push_back(Done { token, op, outcome: Ok(Vec::new()) });
    }

    fn flush(&mut self, _: Instant) {}

    fn turn(&mut self, _: Instant) {}

    fn pop(&mut self) -> Option<Done> {
        self.ended.pop_front()
    }

    fn in_flight(&self) -> usize {
        self.ended.len()
    }
}
