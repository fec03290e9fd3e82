//! A marker in the first 8 KiB of an NBD export.

use std::time::{Duration, Instant};

use larder_runtime::{AlignedBuf, Payload};

use super::place::{Medium, PLACE_BYTES, split};
use super::region::{self, Region};
use super::{MarkerIoError, PlaceOptions};
use crate::nbd::NbdBacking;
use crate::op::{Op, Outcome};
use crate::{Alone, Backing, Flushing, Likeness, Peer, Timeouts, Uri};

/// An operation ends by itself before that is over, with what went wrong.
const SPARE: Duration = Duration::from_secs(5);

pub(super) struct NbdMedium {
    uri: Uri,
    /// The server of the volume's own store.
    store: Option<Peer>,
    look: bool,
    timeout: Timeouts,
    way: Option<(Alone, NbdBacking)>,
    token: u64,
}

impl NbdMedium {
    /// Not asked before the first read.
    pub(super) fn new(uri: Uri, store: Option<Peer>, options: &PlaceOptions) -> NbdMedium {
        let timeout = super::bounded(options.timeout);
        NbdMedium { uri, store, look: options.look, timeout, way: None, token: 0 }
    }

    fn unreachable(&self, reason: impl ToString) -> MarkerIoError {
        MarkerIoError::Unreachable { place: self.name(), reason: reason.to_string() }
    }

    /// The connection, made anew after something went wrong.
    fn way(&mut self) -> Result<(Alone, NbdBacking), MarkerIoError> {
        if let Some(way) = self.way.take() {
            return Ok(way);
        }
        let peer = Peer::of(&self.uri).map_err(|e| self.unreachable(e))?;
        if let (Some(own), Some(peer)) = (&self.store, &peer)
            && own.likeness(peer) == Likeness::Same
        {
            let reason = "is the volume's own store".to_owned();
            return Err(MarkerIoError::NotAMarker { place: self.name(), reason });
        }
        let backing = NbdBacking::open(&self.uri, self.look, self.timeout)
            .map_err(|e| self.unreachable(e))?;
        let needed = PLACE_BYTES as u64;
        let size = backing.capabilities().size;
        if size < needed {
            let reason = format!("has {size} bytes, and a marker needs {needed}");
            return Err(MarkerIoError::NotAMarker { place: self.name(), reason });
        }
        let session = backing.session_over(1).map_err(|e| self.unreachable(e))?;
        let way = Alone::new(session).map_err(|e| self.unreachable(e))?;
        Ok((way, backing))
    }

    /// One operation, waited for.
    fn ask(&mut self, op: Op) -> Result<Op, MarkerIoError> {
        let (mut way, backing) = self.way()?;
        self.token += 1;
        way.submit(self.token, op);
        let limit = self.timeout.give_up.unwrap_or_default() + self.timeout.connect + SPARE;
        let until = Instant::now() + limit;
        let ended: Option<(Op, Outcome)> =
            way.next(limit, || Instant::now() >= until).map(|done| (done.op, done.outcome));
        match ended {
            Some((op, Ok(_))) => {
                self.way = Some((way, backing));
                Ok(op)
            }
            Some((_, Err(failure))) if backing.trouble().is_some() => {
                Err(self.unreachable(failure))
            }
            Some((_, Err(failure))) => {
                Err(MarkerIoError::Failed { place: self.name(), reason: failure.to_string() })
            }
            None => Err(self.unreachable("no answer in time")),
        }
    }
}

impl Region for NbdMedium {
    type Error = MarkerIoError;

    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<(), MarkerIoError> {
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf.copy_from_slice(bytes);
        let op = Op::Write { offset: at, data: Payload::new(buf), fua: true };
        self.ask(op).map(drop)
    }
}

impl Medium for NbdMedium {
    fn load(&mut self) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError> {
        if !self.look {
            self.ask(Op::Flush)?;
        }
        self.glance()
    }

    fn glance(&mut self) -> Result<Option<[Vec<u8>; 2]>, MarkerIoError> {
        let read = Op::Read { offset: 0, buf: AlignedBuf::zeroed(PLACE_BYTES) };
        let copies = match self.ask(read)? {
            Op::Read { buf, .. } => split(&buf),
            _ => return Err(self.unreachable("it answered something else")),
        };
        Ok((!region::is_nothing(&copies)).then_some(copies))
    }

    /// (One that is there already is gone on with, wherever it is.)
    fn create(&mut self, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        let way = self.way()?;
        let flush = way.1.capabilities().flush;
        self.way = Some(way);
        if flush == Flushing::Missing {
            let reason =
                "offers no FLUSH, so that a marker there may be lost: name a place that does"
                    .to_owned();
            return Err(MarkerIoError::NotAMarker { place: self.name(), reason });
        }
        region::create(self, first, bytes)
    }

    fn replace(&mut self, first: usize, bytes: &[u8]) -> Result<(), MarkerIoError> {
        region::replace(self, first, bytes)
    }

    fn clear(&mut self) -> Result<(), MarkerIoError> {
        region::clear(self)
    }

    fn was(&mut self) -> Result<bool, MarkerIoError> {
        Ok(false)
    }

    fn keep(&mut self) {}

    fn is_looked_at(&self) -> bool {
        self.look
    }

    fn is_fenced(&self) -> bool {
        false
    }

    fn name(&self) -> String {
        format!("marker '{}'", self.uri)
    }
}
