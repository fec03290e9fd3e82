//! What was decided, as one number; and the effects of a call as they pass by.

use crate::block::api::{
    BlockEffects, GroupId, IoFailed, IoId, LineId, Merge, OpId, PartKind, SlotId, Source,
};

/// A running hash of everything that a call asked for and returned.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::block) struct Digest(u64);

impl Digest {
    pub(in crate::block) fn add(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(23) ^ n).wrapping_mul(0x9fb2_1c65_1e98_df25);
    }

    pub(in crate::block) fn all(&mut self, numbers: &[u64]) {
        numbers.iter().for_each(|&n| self.add(n));
    }

    pub(in crate::block) fn finish(self) -> u32 {
        let z = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z >> 32) as u32
    }
}

/// Answers, one bit each.
#[derive(Clone, Debug, Default)]
pub(in crate::block) struct Answers {
    pub count: u64,
    pub bits: Vec<u8>,
}

impl Answers {
    pub(in crate::block) fn push(&mut self, yes: bool) {
        if self.count.is_multiple_of(8) {
            self.bits.push(0);
        }
        if yes && let Some(last) = self.bits.last_mut() {
            *last |= 1 << (self.count % 8);
        }
        self.count += 1;
    }

    /// Answer `at`, counted from 0.
    pub(in crate::block) fn get(&self, at: u64) -> Option<bool> {
        (at < self.count).then(|| self.bits[(at / 8) as usize] >> (at % 8) & 1 == 1)
    }
}

pub(in crate::block) fn kind_code(kind: PartKind) -> u64 {
    match kind {
        PartKind::Read => 0,
        PartKind::Write => 1,
        PartKind::Zero => 2,
        PartKind::Trim => 3,
        PartKind::Prefetch => 4,
    }
}

/// Effects that are noted on their way to `inner`.
pub(super) struct Noting<'a, E> {
    pub inner: &'a mut E,
    pub digest: Digest,
    pub answers: Answers,
}

impl<E: BlockEffects> BlockEffects for Noting<'_, E> {
    fn flash_read(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId) {
        self.digest.all(&[1, io.0.into(), slot.0.into(), line.0, lines.into(), op.0]);
        self.inner.flash_read(io, slot, line, lines, op);
    }

    fn flash_write(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId) {
        self.digest.all(&[2, io.0.into(), slot.0.into(), line.0, lines.into(), op.0]);
        self.inner.flash_write(io, slot, line, lines, op);
    }

    fn fill(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, source: Source) {
        self.digest.all(&[3, io.0.into(), slot.0.into(), line.0, lines.into()]);
        self.digest.all(&source_code(source));
        self.inner.fill(io, slot, line, lines, source);
    }

    fn merge(&mut self, io: IoId, merge: Merge, op: OpId) {
        let Merge { line, from, to, at, len } = merge;
        self.digest.all(&[15, io.0.into(), line.0, from.0.into(), to.0.into()]);
        self.digest.all(&[at, len.into(), op.0]);
        self.inner.merge(io, merge, op);
    }

    fn copy(&mut self, io: IoId, from: SlotId, to: SlotId, lines: u32) {
        self.digest.all(&[16, io.0.into(), from.0.into(), to.0.into(), lines.into()]);
        self.inner.copy(io, from, to, lines);
    }

    fn load(&mut self, io: IoId, page: u32, op: OpId) {
        self.digest.all(&[17, io.0.into(), page.into(), op.0]);
        self.inner.load(io, page, op);
    }

    fn backing_read(&mut self, io: IoId, at: u64, len: u32, op: OpId) {
        self.digest.all(&[4, io.0.into(), at, len.into(), op.0]);
        self.inner.backing_read(io, at, len, op);
    }

    fn backing_change(&mut self, io: IoId, op: OpId, kind: PartKind, at: u64, len: u32) {
        self.digest.all(&[5, io.0.into(), op.0, kind_code(kind), at, len.into()]);
        self.inner.backing_change(io, op, kind, at, len);
    }

    fn deliver(&mut self, source: Source, op: OpId, at: u64, len: u32) {
        self.digest.all(&[6, op.0, at, len.into()]);
        self.digest.all(&source_code(source));
        self.inner.deliver(source, op, at, len);
    }

    fn release(&mut self, io: IoId) {
        self.digest.all(&[7, io.0.into()]);
        self.inner.release(io);
    }

    fn done(&mut self, op: OpId, result: Result<(), IoFailed>, holds: bool) {
        self.digest.all(&[8, op.0, result.is_err().into(), holds.into()]);
        self.inner.done(op, result, holds);
    }

    fn release_op(&mut self, op: OpId) {
        self.digest.all(&[9, op.0]);
        self.inner.release_op(op);
    }

    fn intent(&mut self, region: u32) {
        self.digest.all(&[10, region.into()]);
        self.inner.intent(region);
    }

    fn commit_soon(&mut self) {
        self.digest.add(11);
        self.inner.commit_soon();
    }

    fn prefer(&mut self, line: LineId, victim: LineId) -> bool {
        self.digest.all(&[12, line.0, victim.0]);
        let yes = self.inner.prefer(line, victim);
        self.answers.push(yes);
        yes
    }

    fn keep(&mut self, victim: LineId, line: Option<LineId>) -> bool {
        self.digest.all(&[13, victim.0, line.map_or(u64::MAX, |l| l.0)]);
        let yes = self.inner.keep(victim, line);
        self.answers.push(yes);
        yes
    }

    fn keep_groups(&mut self, first: GroupId, last: GroupId, lines: u32) -> bool {
        self.digest.all(&[18, first.0, last.0, lines.into()]);
        let yes = self.inner.keep_groups(first, last, lines);
        self.answers.push(yes);
        yes
    }

    fn may_grow(&mut self, line: LineId) -> bool {
        self.digest.all(&[14, line.0]);
        let yes = self.inner.may_grow(line);
        self.answers.push(yes);
        yes
    }
}

fn source_code(source: Source) -> [u64; 2] {
    match source {
        Source::Op(op) => [0, op.0],
        Source::Io(io) => [1, io.0.into()],
    }
}

/// The world of a replay: it does nothing, and answers as was recorded.
pub(super) struct Recorded<'a> {
    pub answers: &'a Answers,
    pub next: u64,
}

impl Recorded<'_> {
    fn answer(&mut self) -> bool {
        self.next += 1;
        // Asked for more than was recorded: the digest differs then.
        self.answers.get(self.next - 1).unwrap_or(false)
    }
}

impl BlockEffects for Recorded<'_> {
    fn flash_read(&mut self, _: IoId, _: SlotId, _: LineId, _: u32, _: OpId) {}
    fn flash_write(&mut self, _: IoId, _: SlotId, _: LineId, _: u32, _: OpId) {}
    fn fill(&mut self, _: IoId, _: SlotId, _: LineId, _: u32, _: Source) {}
    fn merge(&mut self, _: IoId, _: Merge, _: OpId) {}
    fn copy(&mut self, _: IoId, _: SlotId, _: SlotId, _: u32) {}
    fn backing_read(&mut self, _: IoId, _: u64, _: u32, _: OpId) {}
    fn backing_change(&mut self, _: IoId, _: OpId, _: PartKind, _: u64, _: u32) {}
    fn deliver(&mut self, _: Source, _: OpId, _: u64, _: u32) {}
    fn release(&mut self, _: IoId) {}
    fn done(&mut self, _: OpId, _: Result<(), IoFailed>, _: bool) {}
    fn release_op(&mut self, _: OpId) {}
    fn intent(&mut self, _: u32) {}
    fn commit_soon(&mut self) {}

    fn prefer(&mut self, _: LineId, _: LineId) -> bool {
        self.answer()
    }

    fn keep(&mut self, _: LineId, _: Option<LineId>) -> bool {
        self.answer()
    }

    fn keep_groups(&mut self, _: GroupId, _: GroupId, _: u32) -> bool {
        self.answer()
    }

    fn may_grow(&mut self, _: LineId) -> bool {
        self.answer()
    }
}
