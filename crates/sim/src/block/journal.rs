//! The device that the journals of volumes lie on: what an epoch costs there. Which epochs there are, and when, the engine decides.

use std::collections::BTreeMap;
use std::ops::Range;

use larder_base::Nanos;
use larder_engine::block::PartKind;
use larder_engine::block::node::logged::JournalPart;
use larder_format::block::journal::{
    COMMIT_AT, COMMIT_BYTES, DESCRIPTORS_AT, ExtentKind, JournalExtent, PART_BYTES, REQUEST_BYTES,
    REQUESTS, Size,
};

use super::node::Blank;
use crate::device::store::StoreModel;

/// What was written of an epoch on its way there.
struct Epoch {
    /// What is not begun of its descriptors and data,
    left: Range<u64>,
    /// and where its commit goes, which is written when they are there. `None`: that is on its way.
    commit: Option<u64>,
    /// Requests under way.
    under_way: usize,
}

/// See the [module](self).
pub(super) struct Journals {
    device: StoreModel,
    /// By attachment number.
    epochs: BTreeMap<u32, Epoch>,
    /// Bytes written so far, and epochs.
    pub bytes: u64,
    pub written: u64,
}

impl Journals {
    pub(super) fn new(device: StoreModel) -> Journals {
        Journals { device, epochs: BTreeMap::new(), bytes: 0, written: 0 }
    }

    /// An epoch is to be written: when the requests end that this begins.
    pub(super) fn write(
        &mut self,
        now: Nanos,
        (attachment, epoch): (u32, u64),
        parts: &[JournalPart<Blank>],
    ) -> Vec<Nanos> {
        let extents: Vec<JournalExtent> = parts.iter().map(extent).collect();
        // (One that no journal has room for is refused by the engine's bound on epochs.)
        let size = Size::of(&extents).unwrap_or_default();
        let start = epoch % 2 * PART_BYTES;
        let body = start + DESCRIPTORS_AT;
        let epoch = Epoch {
            left: body..body + size.descriptors_bytes() + size.data_bytes(),
            commit: Some(start + COMMIT_AT),
            under_way: 0,
        };
        self.written += 1;
        self.epochs.insert(attachment, epoch);
        self.goes_on(now, attachment)
    }

    /// What may be begun of an epoch.
    fn goes_on(&mut self, now: Nanos, attachment: u32) -> Vec<Nanos> {
        let Journals { device, epochs, bytes, .. } = self;
        let mut ends = Vec::new();
        let Some(epoch) = epochs.get_mut(&attachment) else { return ends };
        while epoch.under_way < REQUESTS && !epoch.left.is_empty() {
            let len = (epoch.left.end - epoch.left.start).min(REQUEST_BYTES);
            ends.push(device.write(now, (attachment, epoch.left.start), len, true));
            epoch.left.start += len;
            epoch.under_way += 1;
            *bytes += len;
        }
        if epoch.under_way == 0
            && let Some(at) = epoch.commit.take()
        {
            let len = COMMIT_BYTES as u64;
            ends.push(device.write(now, (attachment, at), len, true));
            epoch.under_way = 1;
            *bytes += len;
        }
        ends
    }

    /// A request of an epoch has ended: when those end that this begins; none: the journal has the epoch, if nothing is under way any more.
    pub(super) fn ended(&mut self, now: Nanos, attachment: u32) -> Option<Vec<Nanos>> {
        let epoch = self.epochs.get_mut(&attachment)?;
        epoch.under_way -= 1;
        let ends = self.goes_on(now, attachment);
        let epoch = self.epochs.get(&attachment)?;
        if epoch.under_way > 0 {
            return Some(ends);
        }
        self.epochs.remove(&attachment);
        None
    }

    /// The device is flushed: when that is over.
    pub(super) fn flush(&mut self, now: Nanos) -> Nanos {
        self.device.flush(now)
    }
}

fn extent(part: &JournalPart<Blank>) -> JournalExtent {
    let kind = match part.kind {
        PartKind::Zero => ExtentKind::Zero,
        PartKind::Trim => ExtentKind::Trim,
        _ => ExtentKind::Data,
    };
    JournalExtent { offset: part.at, length: part.len, kind, may_punch: false }
}
