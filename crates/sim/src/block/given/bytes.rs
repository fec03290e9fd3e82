//! What bytes are, and the types that follow from it.

use std::fmt;
use std::marker::PhantomData;
use std::rc::Rc;

use larder_engine::block::node::event::{Ended, Host, Why};
use larder_engine::block::writeback::log::Sums;
use larder_format::block::write_log::pieces;

use super::volume::Known;

/// Bytes, or what stands for them.
pub trait Carried: Clone + fmt::Debug + 'static {
    /// These.
    fn of(bytes: Vec<u8>) -> Self;
    /// `len` bytes of memory from `at` on.
    fn read(memory: &[u8], at: u64, len: u64) -> Self;
    /// Puts them into memory, from `at` on.
    fn write(&self, memory: &mut [u8], at: u64);
    /// `len` of them from `from` on.
    fn part(&self, from: u64, len: u64) -> Self;
    /// CRC-32C of each line.
    fn crcs(&self, line: u32) -> Vec<u32>;
    /// The same with `others` over them, from `at` on.
    fn under(&self, others: &Self, at: u64) -> Self;
    /// CRC-32C of each 4 KiB.
    fn sums(&self) -> Vec<u32>;
    /// What somebody who looks into them sees.
    fn seen(&self) -> Option<&[u8]>;
}

/// Bytes as they are. Parts of them share their memory.
#[derive(Clone)]
pub struct Octets {
    all: Rc<[u8]>,
    from: usize,
    len: usize,
}

impl Octets {
    fn bytes(&self) -> &[u8] {
        &self.all[self.from..self.from + self.len]
    }
}

impl fmt::Debug for Octets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len)
    }
}

impl Carried for Octets {
    fn of(bytes: Vec<u8>) -> Octets {
        let len = bytes.len();
        Octets { all: bytes.into(), from: 0, len }
    }

    fn read(memory: &[u8], at: u64, len: u64) -> Octets {
        Octets::of(memory[at as usize..(at + len) as usize].to_vec())
    }

    fn write(&self, memory: &mut [u8], at: u64) {
        memory[at as usize..at as usize + self.len].copy_from_slice(self.bytes());
    }

    fn part(&self, from: u64, len: u64) -> Octets {
        Octets { all: self.all.clone(), from: self.from + from as usize, len: len as usize }
    }

    fn crcs(&self, line: u32) -> Vec<u32> {
        self.bytes().chunks(line as usize).map(crc32c::crc32c).collect()
    }

    fn under(&self, others: &Octets, at: u64) -> Octets {
        let mut bytes = self.bytes().to_vec();
        others.write(&mut bytes, at);
        Octets::of(bytes)
    }

    fn sums(&self) -> Vec<u32> {
        pieces::sums(self.bytes()).collect()
    }

    fn seen(&self) -> Option<&[u8]> {
        Some(self.bytes())
    }
}

/// The types that the given cache brings.
pub(super) struct House<B>(PhantomData<B>);

impl<B: Carried> Host for House<B> {
    type Bytes = B;
    type Volume = Known;
    type Ticket = Ticket;
    type Failure = &'static str;
    type Extents = ();

    fn part(bytes: &B, from: u64, len: u64) -> B {
        bytes.part(from, len)
    }

    fn apart(bytes: &B, from: u64, len: u64) -> B {
        bytes.part(from, len)
    }

    fn sums(bytes: &B) -> Sums {
        Sums::new(&bytes.sums())
    }

    fn failure(why: Why) -> &'static str {
        match why {
            Why::Failed => "the store failed",
            Why::Detached => "the volume was detached",
            Why::Lost => "another writer has the volume's store",
        }
    }
}

/// A request, and what was delivered to it.
pub(super) struct Ticket {
    pub number: u64,
    /// Of a read.
    pub bytes: Vec<u8>,
}

/// What a request has come to.
#[derive(Clone, Debug)]
pub struct GivenAnswer {
    /// Its number.
    pub number: u64,
    /// Why it failed, if it did.
    pub outcome: Result<(), &'static str>,
    /// What was read.
    pub bytes: Vec<u8>,
    /// What became of it; `None` of what went straight to the store, or was refused.
    pub ended: Option<Ended>,
}
