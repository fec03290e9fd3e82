//! Where the bytes of a stretch lie, and what keeps them there while they are read.

use super::destage::Lies;
use super::{Attached, Config, Piece, Pin, Segments, Sums, closing};
use crate::block::writeback::overlay::{Dirty, Holds};

impl Attached {
    /// Where a dirty stretch lies.
    pub(super) fn lies<B: Clone>(
        &self,
        config: &Config,
        kept: &closing::Payloads<B>,
        dirty: &Dirty,
    ) -> Option<Lies<B>> {
        let here = kept.of(self.attachment, &self.log, dirty).map(Lies::Here);
        here.or_else(|| self.piece(config, dirty).map(Lies::Log))
    }

    /// Where a dirty stretch lies on the device.
    pub(super) fn piece(&self, config: &Config, dirty: &Dirty) -> Option<Piece> {
        use larder_format::block::write_log::pieces;
        if dirty.holds != Holds::Bytes {
            return None;
        }
        let logged = self.log.record(dirty.sequence)?;
        let sums = self.sums.get(dirty.sequence, self.log.frontier())?;
        let from = dirty.at - logged.at;
        let cover = pieces::cover(from..from + dirty.len, logged.len);
        let (first, end) =
            (cover.start / pieces::PIECE as u64, cover.end.div_ceil(pieces::PIECE as u64));
        Some(Piece {
            at: dirty.at,
            len: dirty.len,
            // Where the record lies now: it may have been parked since the stretch was looked at.
            place: config.at + logged.place + cover.start,
            bytes: (cover.end - cover.start) as u32,
            skip: (from - cover.start) as u32,
            sums: Sums::new(sums.as_slice().get(first as usize..end as usize)?),
            pin: match self.parked.get(self.parked.below(0, dirty.sequence)) {
                Some([of, generation]) if of == dirty.sequence => Pin::Parked(generation),
                _ => Pin::Batch(logged.batch),
            },
        })
    }
}

pub(super) fn pin(segments: &mut Segments, of: Pin) {
    match of {
        Pin::Batch(batch) => segments.pin(batch),
        Pin::Parked(generation) => segments.pin_parked(generation),
    }
}

pub(super) fn unpin(segments: &mut Segments, of: Pin) {
    match of {
        Pin::Batch(batch) => segments.unpin(batch),
        Pin::Parked(generation) => segments.unpin_parked(generation),
    }
}
