//! A request that waits for its reply.

use super::request::{Failure, Request};
use crate::wire::Extent;

/// Most pieces of one read that are remembered apart. Servers send a handful.
const MAX_PIECES: usize = 4096;
/// Most extents of one status that are kept; the rest may be asked for again.
pub(super) const MAX_EXTENTS: usize = 1024;

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) token: u64,
    pub(super) request: Request,
    /// What of a read has come: `start..end` within its buffer, sorted, not touching.
    pieces: Vec<(usize, usize)>,
    pub(super) failure: Option<Failure>,
    pub(super) extents: Vec<Extent>,
    /// Bytes that the extents have told of, also those not kept.
    told: u64,
    /// An extent was not kept, so no later one may be.
    full: bool,
    /// A chunk with extents has come.
    pub(super) status: bool,
}

impl Pending {
    pub(super) fn new(token: u64, request: Request) -> Pending {
        Pending {
            token,
            request,
            pieces: Vec::new(),
            failure: None,
            extents: Vec::new(),
            told: 0,
            full: false,
            status: false,
        }
    }

    /// Where a piece of a read lies within its buffer, taken note of; an error if it does not belong there.
    pub(super) fn piece(&mut self, offset: u64, len: u64) -> Result<usize, String> {
        let Request::Read { offset: begin, buf } = &self.request else {
            return Err("data in reply to a request that reads nothing".into());
        };
        let start = offset.checked_sub(*begin);
        let end = start.and_then(|s| s.checked_add(len)).filter(|end| *end <= buf.len() as u64);
        let (Some(start), Some(end), true) = (start, end, len > 0) else {
            return Err(format!("{len} bytes at {offset} in reply to a read at {begin}"));
        };
        let (start, end) = (start as usize, end as usize);
        let at = self.pieces.partition_point(|p| p.1 <= start);
        if self.pieces.get(at).is_some_and(|p| p.0 < end) {
            return Err(format!("bytes at {offset} twice in one reply"));
        }
        // Joined with its neighbours where they touch.
        let left = at > 0 && self.pieces[at - 1].1 == start;
        let right = self.pieces.get(at).is_some_and(|p| p.0 == end);
        match (left, right) {
            (true, true) => {
                self.pieces[at - 1].1 = self.pieces[at].1;
                self.pieces.remove(at);
            }
            (true, false) => self.pieces[at - 1].1 = end,
            (false, true) => self.pieces[at].0 = start,
            (false, false) if self.pieces.len() == MAX_PIECES => {
                return Err("a read in too many pieces".into());
            }
            (false, false) => self.pieces.insert(at, (start, end)),
        }
        Ok(start)
    }

    /// An extent of a status.
    pub(super) fn extent(&mut self, len: u32, hole: bool, zero: bool) -> Result<(), String> {
        let (_, asked) = self.request.range();
        if len == 0 || self.told >= asked {
            return Err(format!("an extent of {len} bytes behind {} of {asked}", self.told));
        }
        // The last one may tell of more than was asked for.
        let len = u64::from(len).min(asked - self.told) as u32;
        self.told += u64::from(len);
        if self.full {
            return Ok(());
        }
        if let Some(last) = self.extents.last_mut().filter(|l| l.hole == hole && l.zero == zero) {
            last.len += len;
        } else if self.extents.len() < MAX_EXTENTS {
            self.extents.push(Extent { len, hole, zero });
        } else {
            self.full = true;
        }
        Ok(())
    }

    /// The reply is complete: is it whole?
    pub(super) fn whole(&self) -> Result<(), String> {
        if self.failure.is_some() {
            return Ok(());
        }
        match &self.request {
            Request::Read { buf, .. } if self.pieces[..] != [(0, buf.len())] => {
                Err("a read ended before all of it had come".into())
            }
            Request::Status { .. } if self.extents.is_empty() => {
                Err("a status without extents".into())
            }
            _ => Ok(()),
        }
    }
}
