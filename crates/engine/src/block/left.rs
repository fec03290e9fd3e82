//! Lines that have left the map, and that the durable map may still name.

use std::collections::{BTreeMap, BTreeSet};

use super::api::{LineId, SlotId};
use super::regions::RegionSet;
use super::slots::SlotSet;

/// See the [module](self). Not all of them: what leaves while the bit of its region is durable is not noted.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Slots of which nobody knows what the durable map has there: from an earlier run.
    unknown: SlotSet,
    slots: BTreeMap<SlotId, LineId>,
    /// The same the other way round: a line may have left several.
    lines: BTreeSet<(LineId, SlotId)>,
    /// Regions of which more lines have left than are noted one by one.
    regions: RegionSet,
}

impl Left {
    pub(super) fn new(unknown: SlotSet) -> Left {
        Left { unknown, ..Left::default() }
    }

    /// `line` leaves `slot`.
    pub(super) fn add(&mut self, slot: SlotId, line: LineId) {
        self.settled(slot);
        self.slots.insert(slot, line);
        self.lines.insert((line, slot));
    }

    /// Lines of `region` leave: any of them.
    pub(super) fn add_region(&mut self, region: u32) {
        self.regions.set(region);
    }

    /// Whether lines of `region` have left that nobody noted.
    pub(super) fn has_region(&self, region: u32) -> bool {
        self.regions.has(region)
    }

    /// The durable map has every slot as it is.
    pub(super) fn all_settled(&mut self) {
        if !self.regions.is_empty() {
            self.regions.clear_all();
        }
    }

    /// The durable map has `slot` as it is.
    pub(super) fn settled(&mut self, slot: SlotId) {
        self.unknown.remove(slot);
        if let Some(line) = self.slots.remove(&slot) {
            self.lines.remove(&(line, slot));
        }
    }

    /// Whether there is no slot that any line may have left.
    pub(super) fn knows_all(&self) -> bool {
        self.unknown.len() == 0
    }

    /// Whether `line` is one of them.
    pub(super) fn has(&self, line: LineId) -> bool {
        self.lines.range((line, SlotId(0))..=(line, SlotId(u32::MAX))).next().is_some()
    }
}
