//! The segments of a log: which is written, which are closed, which are free.
//!
//! ```text
//! free -> open -> closing (its last writes are under way) -> closed -> being cleaned -> emptied -> free
//! ```
//!
//! A segment is free again when no line is in it, the durable map knows of none in it, and no I/O of it is under way.

use std::collections::VecDeque;

use larder_base::Rng;
use larder_policy::block::{SegmentPicker, VictimPolicy};

/// Who writes a segment: lines that come and lines that are kept do not mix, as they will not leave together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    Fills = 0,
    Copies = 1,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Free,
    Open,
    Closing,
    /// In the picker, unless it is empty.
    Closed,
    Cleaning,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    role: Role,
    valid: u32,
    held: u32,
    writing: u32,
    reading: u32,
}

/// A segment that is written: which, and its next slot.
#[derive(Clone, Copy, Debug)]
struct Open {
    segment: u32,
    next: u32,
}

/// What a segment is when the map is attached.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    pub valid: u32,
    pub held: u32,
    /// When it was closed, as far as that is known.
    pub closed: u64,
}

/// The segments of a shard.
#[derive(Debug)]
pub(super) struct Segments {
    lines: u32,
    all: Vec<Segment>,
    /// Valid lines of each, for the picker.
    valid: Vec<u32>,
    free: VecDeque<u32>,
    open: [Option<Open>; 2],
    picker: SegmentPicker,
    rng: Rng,
    /// Slots given out so far: the time by which segments age.
    clock: u64,
    /// Segments without a line that are not free yet.
    emptied: u32,
    /// Slots that fills write at the moment, and lines in all segments.
    pub writing: u32,
    pub lines_valid: u32,
    #[cfg(feature = "planted")]
    pub fault: Option<super::super::Planted>,
}

impl Segments {
    pub(super) fn new(
        lines: u32,
        policy: VictimPolicy,
        found: impl ExactSizeIterator<Item = Found>,
    ) -> Segments {
        let count = found.len();
        let mut segments = Segments {
            lines,
            all: Vec::with_capacity(count),
            valid: Vec::with_capacity(count),
            free: VecDeque::new(),
            open: [None, None],
            picker: SegmentPicker::new(policy, count),
            rng: Rng::new(count as u64),
            clock: 1,
            emptied: 0,
            writing: 0,
            lines_valid: 0,
            #[cfg(feature = "planted")]
            fault: None,
        };
        for (number, Found { valid, held, closed }) in found.enumerate() {
            let role = if valid == 0 && held == 0 { Role::Free } else { Role::Closed };
            segments.all.push(Segment { role, valid, held, writing: 0, reading: 0 });
            segments.valid.push(valid);
            segments.lines_valid += valid;
            segments.clock = segments.clock.max(closed.saturating_add(1));
            match (role, valid) {
                (Role::Free, _) => segments.free.push_back(number as u32),
                (_, 0) => segments.emptied += 1,
                _ => segments.picker.insert(number as u32, valid, closed),
            }
        }
        segments
    }

    /// Bytes of memory that a segment takes at most.
    pub(super) const BYTES_EACH: u64 = (Self::OWN_EACH + SegmentPicker::BYTES_EACH) as u64;
    /// Of it, what is here.
    const OWN_EACH: usize = size_of::<Segment>() + 4 + 4;

    pub(super) fn memory_bytes(&self) -> u64 {
        let each = Self::OWN_EACH;
        (self.all.capacity() * each + self.picker.memory_bytes()) as u64
    }

    fn planted(&self, fault: super::super::Planted) -> bool {
        #[cfg(feature = "planted")]
        return self.fault == Some(fault);
        #[cfg(not(feature = "planted"))]
        {
            let _ = fault;
            false
        }
    }

    /// Segments that are free, or will be when the durable map has come so far.
    pub(super) fn soon_free(&self) -> u32 {
        self.free.len() as u32 + self.emptied
    }

    pub(super) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    pub(super) fn emptied(&self) -> u32 {
        self.emptied
    }

    pub(super) fn closed(&self) -> u32 {
        self.picker.segments().len() as u32
    }

    /// Whether [`Segments::peek`] has one for a fill.
    pub(super) fn can_fill(&self) -> bool {
        self.open[Head::Fills as usize].is_some() || self.free.len() > 1
    }

    /// The slot that [`Segments::take`] would give out next. Fills leave one free segment to the cleaner.
    pub(super) fn peek(&mut self, head: Head) -> Option<u32> {
        if let Some(Open { segment, next }) = self.open[head as usize] {
            return Some(segment * self.lines + next);
        }
        let keep = if head == Head::Fills { 1 } else { 0 };
        if self.free.len() <= keep {
            return None;
        }
        let segment = self.free.pop_front()?;
        self.all[segment as usize].role = Role::Open;
        self.open[head as usize] = Some(Open { segment, next: 0 });
        Some(segment * self.lines)
    }

    /// Gives out the slot that was [peeked](Segments::peek). When that fills its segment, it is closed: answers then
    /// with its number and the time, for the record.
    pub(super) fn take(&mut self, slot: u32) -> Option<(u32, u64)> {
        let segment = slot / self.lines;
        self.clock += 1;
        self.writing += 1;
        self.all[segment as usize].writing += 1;
        for open in &mut self.open {
            let Some(o) = open.as_mut().filter(|o| o.segment == segment) else { continue };
            debug_assert_eq!(o.next, slot % self.lines, "slots are given out in order");
            o.next += 1;
            if o.next == self.lines {
                *open = None;
                self.all[segment as usize].role = Role::Closing;
                return Some((segment, self.clock));
            }
        }
        None
    }

    pub(super) fn written(&mut self, slot: u32) {
        let at = (slot / self.lines) as usize;
        self.writing -= 1;
        self.all[at].writing -= 1;
        if self.all[at].role == Role::Closing && self.all[at].writing == 0 {
            self.close(at as u32);
        }
    }

    /// A segment whose writes are over, or that was cleaned.
    fn close(&mut self, segment: u32) {
        let Segment { valid, .. } = self.all[segment as usize];
        self.all[segment as usize].role = Role::Closed;
        if valid > 0 {
            self.picker.insert(segment, valid, self.clock);
        } else {
            self.emptied += 1;
            self.settle(segment);
        }
    }

    pub(super) fn begin_read(&mut self, slot: u32) {
        self.all[(slot / self.lines) as usize].reading += 1;
    }

    pub(super) fn end_read(&mut self, slot: u32) {
        self.all[(slot / self.lines) as usize].reading -= 1;
        self.settle(slot / self.lines);
    }

    /// `slot` has a line now.
    pub(super) fn gained(&mut self, slot: u32) {
        let at = (slot / self.lines) as usize;
        debug_assert!(self.all[at].writing > 0, "a line where nothing was written");
        self.all[at].valid += 1;
        self.valid[at] += 1;
        self.lines_valid += 1;
    }

    /// `slot`, which had a line, is held now.
    pub(super) fn lost(&mut self, slot: u32) {
        let at = (slot / self.lines) as usize;
        let segment = &mut self.all[at];
        segment.valid -= 1;
        segment.held += 1;
        self.valid[at] -= 1;
        self.lines_valid -= 1;
        let (role, left) = (segment.role, segment.valid);
        if role == Role::Closed {
            self.picker.invalidated(at as u32, left);
            if left == 0 {
                self.picker.remove(at as u32, 0);
                self.emptied += 1;
                self.settle(at as u32);
            }
        }
    }

    /// The first segment that is free though something of it is read.
    pub(super) fn free_while_read(&self) -> Option<u32> {
        let at = self.all.iter().position(|s| s.role == Role::Free && s.reading > 0);
        at.map(|at| at as u32)
    }

    /// `slot`, which was free, is held now.
    pub(super) fn held(&mut self, slot: u32) {
        self.all[(slot / self.lines) as usize].held += 1;
    }

    /// `slot`, which was held, is free now.
    pub(super) fn freed(&mut self, slot: u32) {
        let at = slot / self.lines;
        self.all[at as usize].held -= 1;
        self.settle(at);
    }

    /// The segment is free if nothing is left in it.
    fn settle(&mut self, segment: u32) {
        use super::super::Planted::{SegmentReusedEarly, SegmentReusedWhileRead};
        let s = self.all[segment as usize];
        let durable = s.held == 0 || self.planted(SegmentReusedEarly);
        let unread = s.reading == 0 || self.planted(SegmentReusedWhileRead);
        if s.role == Role::Closed && s.valid == 0 && durable && unread && s.writing == 0 {
            self.all[segment as usize].role = Role::Free;
            self.emptied -= 1;
            self.free.push_back(segment);
        }
    }

    /// Takes the segment that is to be cleaned.
    pub(super) fn pick(&mut self) -> Option<u32> {
        let segment = self.picker.take(&self.valid, self.lines, self.clock, &mut self.rng)?;
        self.all[segment as usize].role = Role::Cleaning;
        Some(segment)
    }

    /// It is cleaned as far as it could be. Returns whether it is empty.
    pub(super) fn cleaned(&mut self, segment: u32) -> bool {
        self.close(segment);
        self.all[segment as usize].valid == 0
    }
}
