//! A shard with the tape that records it: a branch on every call when there is none.

use std::ops::Deref;

use larder_base::Nanos;

use super::digest::{Answers, Digest, Noting, Recorded, kind_code};
use super::tape::{Again, BlockTape, Replayed, StreamReader, unknown};
use crate::block::api::{
    BlockEffects, IoFailed, IoId, LineId, OpId, Part, PartKind, SlotId, Sum, Verdict,
};
use crate::block::map::Map;
use crate::block::paging::TableChange;
use crate::block::shard::{BlockShard, MapRecord};
use larder_format::recording::bytes::put;
use larder_format::recording::{BadRecord, Cursor};

/// What a shard is told.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Input {
    Submit(Part),
    FlashRead(IoId, Option<Vec<u32>>),
    FlashWritten(IoId, Option<Vec<u32>>),
    BackingRead(IoId, bool),
    BackingChanged(IoId, bool),
    LockRange(OpId, LineId, LineId),
    UnlockRange(OpId),
    DropRange(LineId, LineId, u64, u32),
    TakeRecords(u64),
    RecordsDurable,
    RecordsLost,
    State(SlotId, u32),
    Quiet(u32),
    IntentReady(u32),
    Disable,
    Merged(IoId, Option<(u32, u32)>),
    VoidRange(LineId, LineId, u64),
    Sweep(u32),
    PageLoaded(IoId, Option<Vec<Option<Sum>>>),
    TakePages(u64),
    Emptied,
}

/// Most checksums of one read or write.
const MOST_LINES: u64 = 1 << 16;
/// Operations' numbers have the worker on top: it goes below, so that small numbers are short.
const WORKER_BITS: u32 = 16;

fn put_sums(out: &mut Vec<u8>, sums: Option<&[u32]>) {
    put(out, sums.map_or(0, |s| s.len() as u64 + 1));
    for sum in sums.unwrap_or_default() {
        out.extend_from_slice(&sum.to_le_bytes());
    }
}

fn take_sums(cursor: &mut Cursor<'_>) -> Result<Option<Vec<u32>>, BadRecord> {
    let count = cursor.at_most(MOST_LINES + 1, "number of checksums")?;
    if count == 0 {
        return Ok(None);
    }
    (1..count).map(|_| cursor.u32_le("checksum")).collect::<Result<_, _>>().map(Some)
}

/// A page of the table: how many slots and one, a bit for each that has a line, and the checksums of those, three bytes each.
fn put_page(out: &mut Vec<u8>, page: Option<&[Option<Sum>]>) {
    put(out, page.map_or(0, |p| p.len() as u64 + 1));
    let page = page.unwrap_or_default();
    for eight in page.chunks(8) {
        out.push((0..).zip(eight).fold(0, |bits, (i, s)| bits | u8::from(s.is_some()) << i));
    }
    for sum in page.iter().flatten() {
        out.extend_from_slice(&sum.0.to_le_bytes()[..3]);
    }
}

fn take_page(cursor: &mut Cursor<'_>) -> Result<Option<Vec<Option<Sum>>>, BadRecord> {
    let count = cursor.at_most(MOST_LINES + 1, "number of slots of a page")?;
    let Some(slots) = count.checked_sub(1) else { return Ok(None) };
    let bits = cursor.take(slots.div_ceil(8) as usize, "slots of a page that have lines")?;
    let has = |slot: u64| bits[(slot / 8) as usize] >> (slot % 8) & 1 == 1;
    let sum = |c: &mut Cursor<'_>| {
        let sum = c.take(3, "checksum")?;
        Ok(Sum(u32::from_le_bytes([sum[0], sum[1], sum[2], 0])))
    };
    (0..slots)
        .map(|slot| has(slot).then(|| sum(cursor)).transpose())
        .collect::<Result<_, _>>()
        .map(Some)
}

impl Input {
    fn tag(&self) -> u8 {
        match self {
            Input::Submit(_) => 0,
            Input::FlashRead(..) => 1,
            Input::FlashWritten(..) => 2,
            Input::BackingRead(..) => 3,
            Input::BackingChanged(..) => 4,
            Input::LockRange(..) => 5,
            Input::UnlockRange(_) => 6,
            Input::DropRange(..) => 7,
            Input::TakeRecords(_) => 8,
            Input::RecordsDurable => 9,
            Input::RecordsLost => 10,
            Input::State(..) => 11,
            Input::Quiet(_) => 12,
            Input::IntentReady(_) => 13,
            Input::Disable => 14,
            Input::Merged(..) => 15,
            Input::VoidRange(..) => 16,
            Input::Sweep(_) => 17,
            Input::PageLoaded(..) => 18,
            Input::TakePages(_) => 19,
            Input::Emptied => 20,
        }
    }

    /// For messages: of a page only how many lines it has.
    fn describe(&self) -> String {
        match self {
            Input::PageLoaded(io, Some(page)) => {
                format!("PageLoaded({io:?}, {} lines)", page.iter().flatten().count())
            }
            other => format!("{other:?}"),
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let op = |out: &mut Vec<u8>, op: OpId| put(out, op.0.rotate_left(WORKER_BITS));
        match self {
            Input::Submit(part) => {
                let verdict = match part.verdict {
                    Verdict::Admit => 0,
                    Verdict::Compete => 1,
                    Verdict::Reject => 2,
                    Verdict::IfFree => 3,
                };
                put(out, kind_code(part.kind) << 2 | verdict);
                op(out, part.op);
                put(out, part.at);
                put(out, part.len.into());
            }
            Input::FlashRead(io, sums) | Input::FlashWritten(io, sums) => {
                put(out, io.0.into());
                put_sums(out, sums.as_deref());
            }
            Input::Merged(io, sums) => {
                put(out, io.0.into());
                put_sums(out, sums.map(|(before, after)| [before, after]).as_ref().map(|s| &s[..]));
            }
            Input::BackingRead(io, ok) | Input::BackingChanged(io, ok) => {
                put(out, u64::from(io.0) << 1 | u64::from(*ok));
            }
            Input::LockRange(id, first, last) => {
                op(out, *id);
                put(out, first.0);
                put(out, last.0);
            }
            Input::UnlockRange(id) => op(out, *id),
            Input::DropRange(first, last, cursor, steps) => {
                [first.0, last.0, *cursor, u64::from(*steps)].iter().for_each(|&n| put(out, n));
            }
            Input::VoidRange(first, last, least) => {
                [first.0, last.0, *least].iter().for_each(|&n| put(out, n));
            }
            Input::Sweep(steps) => put(out, (*steps).into()),
            Input::PageLoaded(io, page) => {
                put(out, io.0.into());
                put_page(out, page.as_deref());
            }
            Input::TakeRecords(most) | Input::TakePages(most) => put(out, *most),
            Input::State(first, most) => {
                put(out, first.0.into());
                put(out, (*most).into());
            }
            Input::Quiet(region) | Input::IntentReady(region) => put(out, (*region).into()),
            Input::RecordsDurable | Input::RecordsLost | Input::Disable | Input::Emptied => {}
        }
    }

    fn decode(tag: u8, c: &mut Cursor<'_>) -> Result<Input, BadRecord> {
        let op = |c: &mut Cursor<'_>| {
            Ok::<_, BadRecord>(OpId(c.varint("operation")?.rotate_right(WORKER_BITS)))
        };
        let line = |c: &mut Cursor<'_>| Ok::<_, BadRecord>(LineId(c.varint("line")?));
        Ok(match tag {
            0 => {
                let code = c.at_most(19, "kind of a part")?;
                let kind = match code >> 2 {
                    0 => PartKind::Read,
                    1 => PartKind::Write,
                    2 => PartKind::Zero,
                    3 => PartKind::Trim,
                    _ => PartKind::Prefetch,
                };
                let verdict = match code & 3 {
                    0 => Verdict::Admit,
                    1 => Verdict::Compete,
                    2 => Verdict::Reject,
                    _ => Verdict::IfFree,
                };
                let op = op(c)?;
                let (at, len) = (c.varint("place")?, c.u32("length")?);
                Input::Submit(Part { op, kind, at, len, verdict })
            }
            1 => Input::FlashRead(IoId(c.u32("I/O")?), take_sums(c)?),
            2 => Input::FlashWritten(IoId(c.u32("I/O")?), take_sums(c)?),
            3 | 4 => {
                let code = c.at_most(u64::from(u32::MAX) << 1 | 1, "I/O")?;
                let (io, ok) = (IoId((code >> 1) as u32), code & 1 == 1);
                if tag == 3 { Input::BackingRead(io, ok) } else { Input::BackingChanged(io, ok) }
            }
            5 => Input::LockRange(op(c)?, line(c)?, line(c)?),
            6 => Input::UnlockRange(op(c)?),
            7 => Input::DropRange(line(c)?, line(c)?, c.varint("cursor")?, c.u32("steps")?),
            8 => Input::TakeRecords(c.varint("number of records")?),
            9 => Input::RecordsDurable,
            10 => Input::RecordsLost,
            11 => Input::State(SlotId(c.u32("slot")?), c.u32("number of slots")?),
            12 => Input::Quiet(c.u32("region")?),
            13 => Input::IntentReady(c.u32("region")?),
            14 => Input::Disable,
            15 => {
                let io = IoId(c.u32("I/O")?);
                let sums = match take_sums(c)?.as_deref() {
                    None => None,
                    Some(&[before, after]) => Some((before, after)),
                    Some(sums) => {
                        let (what, value) = ("checksums of a merged line", sums.len() as u64);
                        return Err(BadRecord::Value { what, value, must: "two" });
                    }
                };
                Input::Merged(io, sums)
            }
            16 => Input::VoidRange(line(c)?, line(c)?, c.varint("number of groups")?),
            17 => Input::Sweep(c.u32("steps")?),
            18 => Input::PageLoaded(IoId(c.u32("I/O")?), take_page(c)?),
            19 => Input::TakePages(c.varint("number of pages")?),
            20 => Input::Emptied,
            other => return Err(unknown(other)),
        })
    }
}

/// What only a damaged or forged file says: it would be a programmer's error to tell a shard.
fn check(shard: &BlockShard, input: &Input) -> Result<(), BadRecord> {
    let bad = |what, value, must| Err(BadRecord::Value { what, value, must });
    let lines = shard.map().placing().lines();
    let line_bytes = u64::from(shard.line_bytes());
    let group = line_bytes * u64::from(crate::block::GROUP_LINES);
    match input {
        Input::Submit(part) => {
            let end = part.at.checked_add(u64::from(part.len));
            let inside = end.is_some_and(|end| {
                part.len > 0
                    && part.at / group == (end - 1) / group
                    && end.div_ceil(line_bytes) <= lines
            });
            if inside { Ok(()) } else { bad("the place of a part", part.at, "within one group") }
        }
        Input::LockRange(_, first, last)
        | Input::DropRange(first, last, ..)
        | Input::VoidRange(first, last, _)
            if first > last || last.0 >= lines =>
        {
            bad("the last line of a range", last.0, "behind the first, in the line space")
        }
        Input::PageLoaded(io, page) if !shard.awaits_page(*io, page.as_ref().map(Vec::len)) => {
            bad("the I/O of a page", io.0.into(), "one that reads a page of so many slots")
        }
        Input::State(slot, _) if slot.0 >= shard.map().len() => {
            bad("a slot", slot.0.into(), "one of the shard's")
        }
        _ => Ok(()),
    }
}

fn note_records(digest: &mut Digest, records: &[MapRecord]) {
    digest.add(records.len() as u64);
    for record in records {
        let holds = record.holds.map_or([u64::MAX, 0], |(line, sum)| [line.0, sum.0.into()]);
        digest.add(record.slot.0.into());
        digest.all(&holds);
    }
}

fn note_pages(digest: &mut Digest, pages: &[TableChange]) {
    digest.add(pages.len() as u64);
    for page in pages {
        match page {
            TableChange::Page { page, slots } => {
                digest.all(&[0, (*page).into()]);
                slots.iter().for_each(|s| digest.add(s.map_or(u64::MAX, |sum| sum.0.into())));
            }
            TableChange::Cleared { first, count } => {
                digest.all(&[1, (*first).into(), (*count).into()]);
            }
        }
    }
}

fn note_runs(digest: &mut Digest, runs: &[(SlotId, u32)]) {
    digest.add(runs.len() as u64);
    runs.iter().for_each(|(slot, count)| digest.all(&[slot.0.into(), (*count).into()]));
}

fn note_left(digest: &mut Digest, left: &[Option<(LineId, LineId)>; 2]) {
    for range in left {
        digest.all(&range.map_or([u64::MAX, 0], |(first, last)| [first.0, last.0]));
    }
}

fn note_state(digest: &mut Digest, state: &[Option<(u64, u32)>]) {
    digest.add(state.len() as u64);
    for held in state {
        digest.all(&held.map_or([u64::MAX, 0], |(line, sum)| [line, sum.into()]));
    }
}

/// A shard that records what it is told, if it has a tape. To look at it, it is a [`BlockShard`].
pub struct RecordedShard {
    shard: BlockShard,
    tape: Option<Box<BlockTape>>,
}

impl Deref for RecordedShard {
    type Target = BlockShard;
    fn deref(&self) -> &BlockShard {
        &self.shard
    }
}

type Sums<'a> = Result<&'a [u32], IoFailed>;

impl RecordedShard {
    /// A shard without a tape.
    pub fn new(shard: BlockShard) -> RecordedShard {
        RecordedShard { shard, tape: None }
    }

    /// Records from now on; the shard must be new, and empty.
    pub fn record(&mut self, tape: BlockTape) {
        self.tape = Some(Box::new(tape));
    }

    /// Hands on what is on the tape.
    pub fn flush_chunk(&mut self) {
        if self.tape.as_mut().is_some_and(|tape| !tape.flush_chunk()) {
            self.tape = None;
        }
    }

    /// Ends recording: hands on what is on the tape.
    pub fn end_recording(&mut self) {
        self.flush_chunk();
        self.tape = None;
    }

    fn keep(&mut self, now: Nanos, input: &Input, answers: &Answers, digest: Digest) {
        if let Some(tape) = &mut self.tape
            && !tape.push(input.tag(), now, |out| input.encode(out), answers, digest)
        {
            self.tape = None;
        }
    }

    fn tell<E: BlockEffects>(
        &mut self,
        now: Nanos,
        fx: &mut E,
        input: impl FnOnce() -> Input,
        call: impl FnOnce(&mut BlockShard, &mut Noting<'_, E>),
        plain: impl FnOnce(&mut BlockShard, &mut E),
    ) {
        if self.tape.is_none() {
            return plain(&mut self.shard, fx);
        }
        let mut fx = Noting { inner: fx, digest: Digest::default(), answers: Answers::default() };
        call(&mut self.shard, &mut fx);
        let Noting { digest, answers, .. } = fx;
        self.keep(now, &input(), &answers, digest);
    }
}

/// The same call twice: with the effects noted, and as they are.
macro_rules! told {
    ($self:ident, $now:expr, $fx:ident, $input:expr, |$s:ident, $f:ident| $call:expr) => {
        $self.tell($now, $fx, || $input, |$s, $f| $call, |$s, $f| $call)
    };
}

impl RecordedShard {
    /// [`BlockShard::submit`].
    #[inline]
    pub fn submit(&mut self, now: Nanos, part: Part, fx: &mut impl BlockEffects) {
        told!(self, now, fx, Input::Submit(part), |s, f| s.submit(now, part, f));
    }

    /// [`BlockShard::flash_read`].
    pub fn flash_read(&mut self, now: Nanos, io: IoId, sums: Sums<'_>, fx: &mut impl BlockEffects) {
        let input = || Input::FlashRead(io, sums.ok().map(<[u32]>::to_vec));
        told!(self, now, fx, input(), |s, f| s.flash_read(now, io, sums, f));
    }

    /// [`BlockShard::flash_written`].
    pub fn flash_written(
        &mut self,
        now: Nanos,
        io: IoId,
        sums: Sums<'_>,
        fx: &mut impl BlockEffects,
    ) {
        let input = || Input::FlashWritten(io, sums.ok().map(<[u32]>::to_vec));
        told!(self, now, fx, input(), |s, f| s.flash_written(now, io, sums, f));
    }

    /// [`BlockShard::merged`].
    pub fn merged(
        &mut self,
        now: Nanos,
        io: IoId,
        sums: Result<(u32, u32), IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        told!(self, now, fx, Input::Merged(io, sums.ok()), |s, f| s.merged(now, io, sums, f));
    }

    /// [`BlockShard::backing_read`].
    pub fn backing_read(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<(), IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        let input = Input::BackingRead(io, outcome.is_ok());
        told!(self, now, fx, input, |s, f| s.backing_read(now, io, outcome, f));
    }

    /// [`BlockShard::backing_changed`].
    pub fn backing_changed(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<(), IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        let input = Input::BackingChanged(io, outcome.is_ok());
        told!(self, now, fx, input, |s, f| s.backing_changed(now, io, outcome, f));
    }

    /// [`BlockShard::lock_range`].
    pub fn lock_range(
        &mut self,
        now: Nanos,
        op: OpId,
        first: LineId,
        last: LineId,
        fx: &mut impl BlockEffects,
    ) {
        let input = Input::LockRange(op, first, last);
        told!(self, now, fx, input, |s, f| s.lock_range(now, op, first, last, f));
    }

    /// [`BlockShard::unlock_range`].
    pub fn unlock_range(&mut self, now: Nanos, op: OpId, fx: &mut impl BlockEffects) {
        told!(self, now, fx, Input::UnlockRange(op), |s, f| s.unlock_range(now, op, f));
    }

    /// [`BlockShard::drop_range`].
    pub fn drop_range(
        &mut self,
        first: LineId,
        last: LineId,
        cursor: u64,
        steps: u32,
    ) -> Option<u64> {
        let next = self.shard.drop_range(first, last, cursor, steps);
        if self.tape.is_some() {
            let mut digest = Digest::default();
            digest.add(next.unwrap_or(u64::MAX));
            let input = Input::DropRange(first, last, cursor, steps);
            self.keep(Nanos::ZERO, &input, &Answers::default(), digest);
        }
        next
    }

    /// [`BlockShard::void_range`].
    pub fn void_range(
        &mut self,
        first: LineId,
        last: LineId,
        least: u64,
    ) -> [Option<(LineId, LineId)>; 2] {
        let left = self.shard.void_range(first, last, least);
        if self.tape.is_some() {
            let mut digest = Digest::default();
            note_left(&mut digest, &left);
            let input = Input::VoidRange(first, last, least);
            self.keep(Nanos::ZERO, &input, &Answers::default(), digest);
        }
        left
    }

    /// [`BlockShard::sweep`]; a call that finds nothing to do is no part of a record.
    pub fn sweep(&mut self, steps: u32) -> bool {
        if !self.shard.wants_sweep() {
            return false;
        }
        let more = self.shard.sweep(steps);
        if self.tape.is_some() {
            let mut digest = Digest::default();
            digest.add(more.into());
            self.keep(Nanos::ZERO, &Input::Sweep(steps), &Answers::default(), digest);
        }
        more
    }

    /// [`BlockShard::take_records`].
    pub fn take_records(&mut self, most: usize, out: &mut Vec<MapRecord>) {
        let from = out.len();
        self.shard.take_records(most, out);
        if self.tape.is_some() {
            let mut digest = Digest::default();
            note_records(&mut digest, &out[from..]);
            let input = Input::TakeRecords(most as u64);
            self.keep(Nanos::ZERO, &input, &Answers::default(), digest);
        }
    }

    /// [`BlockShard::page_loaded`].
    pub fn page_loaded(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<&[Option<Sum>], IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        let input = || Input::PageLoaded(io, outcome.ok().map(<[_]>::to_vec));
        told!(self, now, fx, input(), |s, f| s.page_loaded(now, io, outcome, f));
    }

    /// [`BlockShard::take_pages`].
    pub fn take_pages(&mut self, most: usize, out: &mut Vec<TableChange>) {
        let from = out.len();
        self.shard.take_pages(most, out);
        if self.tape.is_some() {
            let mut digest = Digest::default();
            note_pages(&mut digest, &out[from..]);
            let input = Input::TakePages(most as u64);
            self.keep(Nanos::ZERO, &input, &Answers::default(), digest);
        }
    }

    /// [`BlockShard::emptied`], which is recorded too: by it space is given back.
    pub fn emptied(&mut self, out: &mut Vec<(SlotId, u32)>) {
        let from = out.len();
        self.shard.emptied(out);
        if self.tape.is_some() {
            let mut digest = Digest::default();
            note_runs(&mut digest, &out[from..]);
            self.keep(Nanos::ZERO, &Input::Emptied, &Answers::default(), digest);
        }
    }

    /// [`BlockShard::records_durable`].
    pub fn records_durable(&mut self, now: Nanos, fx: &mut impl BlockEffects) {
        told!(self, now, fx, Input::RecordsDurable, |s, f| s.records_durable(now, f));
    }

    /// [`BlockShard::records_lost`].
    pub fn records_lost(&mut self) {
        self.shard.records_lost();
        self.keep(Nanos::ZERO, &Input::RecordsLost, &Answers::default(), Digest::default());
    }

    /// [`BlockShard::state`], which is recorded too: it shows the whole map.
    pub fn state(&mut self, first: SlotId, most: u32, out: &mut Vec<Option<(u64, u32)>>) {
        let from = out.len();
        self.shard.state(first, most, out);
        if self.tape.is_some() {
            let mut digest = Digest::default();
            note_state(&mut digest, &out[from..]);
            let input = Input::State(first, most);
            self.keep(Nanos::ZERO, &input, &Answers::default(), digest);
        }
    }

    /// [`BlockShard::quiet`].
    pub fn quiet(&mut self, region: u32) -> bool {
        let quiet = self.shard.quiet(region);
        if self.tape.is_some() {
            let mut digest = Digest::default();
            digest.add(quiet.into());
            self.keep(Nanos::ZERO, &Input::Quiet(region), &Answers::default(), digest);
        }
        quiet
    }

    /// [`BlockShard::intent_ready`].
    pub fn intent_ready(&mut self, now: Nanos, region: u32, fx: &mut impl BlockEffects) {
        told!(self, now, fx, Input::IntentReady(region), |s, f| s.intent_ready(now, region, f));
    }

    /// [`BlockShard::disable`].
    pub fn disable(&mut self, now: Nanos, fx: &mut impl BlockEffects) {
        told!(self, now, fx, Input::Disable, |s, f| s.disable(now, f));
    }

    /// [`BlockShard::begin_anew`], for which a record has no word: not done while one is made.
    pub fn begin_anew(&mut self, map: Map) -> bool {
        self.tape.is_none() && self.shard.begin_anew(map)
    }

    /// Reads the next record of a stream, tells the shard the same, and says what was decided then and now.
    ///
    /// # Errors
    /// A record that makes no sense.
    pub fn replay(&mut self, reader: &mut StreamReader<'_>) -> Replayed {
        let begun = reader.begin()?;
        let input = Input::decode(begun.tag, &mut reader.cursor)?;
        let ended = reader.end()?;
        let (now, s) = (begun.now, &mut self.shard);
        check(s, &input)?;
        let mut world = Recorded { answers: &ended.answers, next: 0 };
        let mut f =
            Noting { inner: &mut world, digest: Digest::default(), answers: Answers::default() };
        let ok = |ok: bool| if ok { Ok(()) } else { Err(IoFailed) };
        let sums = |sums: &Option<Vec<u32>>| sums.clone().ok_or(IoFailed);
        match &input {
            Input::Submit(part) => s.submit(now, *part, &mut f),
            Input::FlashRead(io, crcs) => {
                let crcs = sums(crcs);
                s.flash_read(now, *io, crcs.as_deref().map_err(|e| *e), &mut f);
            }
            Input::FlashWritten(io, crcs) => {
                let crcs = sums(crcs);
                s.flash_written(now, *io, crcs.as_deref().map_err(|e| *e), &mut f);
            }
            Input::BackingRead(io, fine) => s.backing_read(now, *io, ok(*fine), &mut f),
            Input::BackingChanged(io, fine) => s.backing_changed(now, *io, ok(*fine), &mut f),
            Input::LockRange(op, first, last) => s.lock_range(now, *op, *first, *last, &mut f),
            Input::UnlockRange(op) => s.unlock_range(now, *op, &mut f),
            Input::DropRange(first, last, cursor, steps) => {
                let next = s.drop_range(*first, *last, *cursor, *steps);
                f.digest.add(next.unwrap_or(u64::MAX));
            }
            Input::VoidRange(first, last, least) => {
                note_left(&mut f.digest, &s.void_range(*first, *last, *least));
            }
            Input::Sweep(steps) => {
                let more = s.sweep(*steps);
                f.digest.add(more.into());
            }
            Input::TakeRecords(most) => {
                let mut out = Vec::new();
                s.take_records(usize::try_from(*most).unwrap_or(usize::MAX), &mut out);
                note_records(&mut f.digest, &out);
            }
            Input::PageLoaded(io, page) => {
                let page = page.as_deref().ok_or(IoFailed);
                s.page_loaded(now, *io, page, &mut f);
            }
            Input::TakePages(most) => {
                let mut out = Vec::new();
                s.take_pages(usize::try_from(*most).unwrap_or(usize::MAX), &mut out);
                note_pages(&mut f.digest, &out);
            }
            Input::Emptied => {
                let mut out = Vec::new();
                s.emptied(&mut out);
                note_runs(&mut f.digest, &out);
            }
            Input::RecordsDurable => s.records_durable(now, &mut f),
            Input::RecordsLost => s.records_lost(),
            Input::State(first, most) => {
                let mut out = Vec::new();
                s.state(*first, *most, &mut out);
                note_state(&mut f.digest, &out);
            }
            Input::Quiet(region) => {
                let quiet = s.quiet(*region);
                f.digest.add(quiet.into());
            }
            Input::IntentReady(region) => s.intent_ready(now, *region, &mut f),
            Input::Disable => s.disable(now, &mut f),
            Input::Merged(io, sums) => s.merged(now, *io, sums.ok_or(IoFailed), &mut f),
        }
        let replayed = f.digest.finish();
        let input = input.describe();
        Ok(Again { nanos: now.0, input, recorded: ended.digest, replayed })
    }
}
