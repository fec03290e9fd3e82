//! What a queue is answered and what comes by mail, as numbers.

use larder_format::recording::bytes::put;
use larder_format::recording::{BadRecord, Cursor};
use larder_policy::block::{BlockKind, Rule};

use crate::block::api::{IoId, LineId, Merge, OpId, PartKind, SlotId, Verdict};
use crate::block::node::calls::{Load, Message};
use crate::block::node::coalesce::Piece;
use crate::block::node::event::{Came, Op, ShardIo, State};
use crate::block::record::digest::kind_code as part_code;
use crate::block::record::tape::unknown;

/// No place is beyond this: so that no sum of a place and a length overflows, whatever a file says.
pub(super) const FURTHEST: u64 = 1 << 62;
/// No read or write is longer: each of its groups is a part.
const LONGEST: u64 = 1 << 32;

/// Enums as numbers, and back.
macro_rules! codes {
    ($($to:ident $from:ident $type:ty: $($value:path = $code:literal),+;)*) => {$(
        pub(super) fn $to(of: $type) -> u64 {
            match of { $($value => $code),+ }
        }

        pub(super) fn $from(code: u64) -> Option<$type> {
            match code { $($code => Some($value),)+ _ => None }
        }
    )*};
}

codes! {
    state_code state_of State:
        State::Served = 0, State::Unplaced = 1, State::Detached = 2, State::Lost = 3;
    rule_code rule_of Rule:
        Rule::Always = 0, Rule::Never = 1, Rule::ByPolicy = 2;
    kind_code kind_of BlockKind:
        BlockKind::Data = 0, BlockKind::Metadata = 1, BlockKind::Journal = 2, BlockKind::Unknown = 3;
    verdict_code verdict_of Verdict:
        Verdict::Admit = 0, Verdict::Compete = 1, Verdict::IfFree = 2, Verdict::Reject = 3;
}

fn came_code(came: Came) -> u64 {
    match came {
        Came::Flash => 0,
        Came::AtHand => 1,
        Came::Store { own: false } => 2,
        Came::Store { own: true } => 3,
    }
}

fn put_io(out: &mut Vec<u8>, io: ShardIo) {
    put(out, io.shard.into());
    put(out, io.io.0.into());
}

pub(super) fn take_io(c: &mut Cursor<'_>) -> Result<ShardIo, BadRecord> {
    Ok(ShardIo { shard: c.u32("shard")?, io: IoId(c.u32("number of an I/O")?) })
}

fn put_piece(out: &mut Vec<u8>, piece: Piece) {
    put_io(out, ShardIo { shard: piece.shard, io: piece.io });
    put(out, piece.at);
    put(out, piece.len.into());
}

fn take_piece(c: &mut Cursor<'_>) -> Result<Piece, BadRecord> {
    let ShardIo { shard, io } = take_io(c)?;
    Ok(Piece { shard, io, at: c.at_most(FURTHEST, "place")?, len: c.u32("length")? })
}

/// A message without its bytes.
pub(super) fn put_message<B>(out: &mut Vec<u8>, op: OpId, message: &Message<B>) {
    let tag = match message {
        Message::Deliver { .. } => 0,
        Message::Done { failed: false } => 1,
        Message::Done { failed: true } => 2,
        Message::FlashRead { .. } => 3,
        Message::FlashWrite { .. } => 4,
        Message::Merge { .. } => 5,
        Message::Load(_) => 6,
        Message::BackingRead(_) => 7,
        Message::BackingChange(_) => 8,
        Message::IntentsReady => 9,
        Message::RangeTurn => 10,
        Message::BudgetKept => 11,
        Message::Logged { failed: false } => 12,
        Message::Logged { failed: true } => 13,
        Message::Destage(_) => 14,
        Message::Journal { .. } => 15,
        Message::Marked { .. } => 16,
        Message::Through { .. } => 17,
        Message::FlushThrough => 18,
        // (A run with a write log is not recorded.)
        Message::ForDevice(_) => 19,
    };
    out.push(tag);
    put(out, op.0);
    match *message {
        Message::Deliver { at, len, came, .. } => {
            [at, len.into(), came_code(came)].iter().for_each(|&n| put(out, n));
        }
        Message::FlashRead { io, slot, line, lines } => {
            put_io(out, io);
            [slot.0.into(), line.0, lines.into()].iter().for_each(|&n| put(out, n));
        }
        Message::FlashWrite { io, slot, lines, .. } => {
            put_io(out, io);
            [slot.0.into(), lines.into()].iter().for_each(|&n| put(out, n));
        }
        Message::Merge { io, merge: Merge { line, from, to, at, len }, .. } => {
            put_io(out, io);
            let numbers = [line.0, from.0.into(), to.0.into(), at, len.into()];
            numbers.iter().for_each(|&n| put(out, n));
        }
        Message::Load(Load { shard, io, page }) => {
            put_io(out, ShardIo { shard, io });
            put(out, page.into());
        }
        Message::BackingRead(piece) | Message::BackingChange(piece) => put_piece(out, piece),
        Message::Destage(attachment) => put(out, attachment.into()),
        Message::Journal { attachment, flushed, done } => {
            [attachment.into(), flushed.into(), done.into()].iter().for_each(|&n| put(out, n));
        }
        Message::Marked { attachment, done } => {
            [attachment.into(), done.into()].iter().for_each(|&n| put(out, n));
        }
        Message::Through { kind, at, len, may_punch, .. } => {
            [part_code(kind), at, len, may_punch.into()].iter().for_each(|&n| put(out, n));
        }
        Message::Done { .. }
        | Message::IntentsReady
        | Message::FlushThrough
        | Message::ForDevice(_)
        | Message::RangeTurn
        | Message::BudgetKept
        | Message::Logged { .. } => {}
    }
}

/// Reads what [`put_message`] writes.
pub(super) fn take_message(c: &mut Cursor<'_>) -> Result<(OpId, Message<()>), BadRecord> {
    let tag = c.u8("kind of a message")?;
    let op = OpId(c.varint("operation")?);
    let slot = |c: &mut Cursor<'_>| c.u32("slot").map(SlotId);
    let line = |c: &mut Cursor<'_>| c.at_most(FURTHEST, "line").map(LineId);
    let message = match tag {
        0 => {
            let (at, len) = (c.at_most(FURTHEST, "place")?, c.u32("length")?);
            let came = match c.at_most(3, "where bytes came from")? {
                0 => Came::Flash,
                1 => Came::AtHand,
                own => Came::Store { own: own == 3 },
            };
            Message::Deliver { at, len, bytes: (), came }
        }
        1 | 2 => Message::Done { failed: tag == 2 },
        3 => {
            let (io, slot, line) = (take_io(c)?, slot(c)?, line(c)?);
            Message::FlashRead { io, slot, line, lines: c.u32("lines")? }
        }
        4 => {
            let (io, slot) = (take_io(c)?, slot(c)?);
            Message::FlashWrite { io, slot, lines: c.u32("lines")?, bytes: () }
        }
        5 => {
            let (io, line, from, to) = (take_io(c)?, line(c)?, slot(c)?, slot(c)?);
            let (at, len) = (c.at_most(FURTHEST, "place")?, c.u32("length")?);
            Message::Merge { io, merge: Merge { line, from, to, at, len }, bytes: () }
        }
        6 => {
            let ShardIo { shard, io } = take_io(c)?;
            Message::Load(Load { shard, io, page: c.u32("page")? })
        }
        7 => Message::BackingRead(take_piece(c)?),
        8 => Message::BackingChange(take_piece(c)?),
        9 => Message::IntentsReady,
        10 => Message::RangeTurn,
        11 => Message::BudgetKept,
        12 => Message::Logged { failed: false },
        13 => Message::Logged { failed: true },
        14 => Message::Destage(c.u32("attachment number")?),
        15 => Message::Journal {
            attachment: c.u32("attachment number")?,
            flushed: c.at_most(1, "flushed")? == 1,
            done: c.at_most(1, "done")? == 1,
        },
        16 => Message::Marked {
            attachment: c.u32("attachment number")?,
            done: c.at_most(1, "done")? == 1,
        },
        17 => Message::Through {
            kind: match c.at_most(3, "kind of a part")? {
                2 => PartKind::Zero,
                3 => PartKind::Trim,
                _ => PartKind::Write,
            },
            at: c.at_most(FURTHEST, "place")?,
            len: c.at_most(FURTHEST, "length")?,
            bytes: None,
            may_punch: c.at_most(1, "hole")? == 1,
        },
        18 => Message::FlushThrough,
        19 => Message::ForDevice(Box::default()),
        other => return Err(unknown(other)),
    };
    Ok((op, message))
}

/// What a client asks for, without bytes.
pub(super) fn put_op<B>(out: &mut Vec<u8>, op: &Op<B>) {
    let flags = |bits: [bool; 3]| bits.iter().rev().fold(0, |all, &bit| all << 1 | u64::from(bit));
    let (tag, at, len, flags) = match *op {
        Op::Read { at, len } => (0, at, len, 0),
        Op::Write { at, len, fua, .. } => (1, at, len, flags([fua, false, false])),
        Op::Flush => (2, 0, 0, 0),
        Op::Zero { at, len, fua, may_punch, fast } => (3, at, len, flags([fua, may_punch, fast])),
        Op::Trim { at, len, fua } => (4, at, len, flags([fua, false, false])),
        Op::Status { at, len, one } => (5, at, len, flags([one, false, false])),
        Op::Advise { at, len } => (6, at, len, 0),
    };
    out.push(tag);
    [at, len, flags].iter().for_each(|&n| put(out, n));
}

/// Reads what [`put_op`] writes.
pub(super) fn take_op(c: &mut Cursor<'_>) -> Result<Op<()>, BadRecord> {
    let tag = c.u8("kind of an operation")?;
    let at = c.at_most(FURTHEST, "place")?;
    let most = if tag <= 1 { LONGEST } else { FURTHEST };
    let (len, flags) = (c.at_most(most, "length")?, c.at_most(7, "flags")?);
    let flag = |bit: u64| flags >> bit & 1 == 1;
    Ok(match tag {
        0 => Op::Read { at, len },
        1 => Op::Write { at, len, bytes: (), fua: flag(0) },
        2 => Op::Flush,
        3 => Op::Zero { at, len, fua: flag(0), may_punch: flag(1), fast: flag(2) },
        4 => Op::Trim { at, len, fua: flag(0) },
        5 => Op::Status { at, len, one: flag(0) },
        6 => Op::Advise { at, len },
        other => return Err(unknown(other)),
    })
}

/// For people.
pub(super) fn describe(op: &Op<()>) -> String {
    let (what, at, len) = match *op {
        Op::Read { at, len } => ("a read", at, len),
        Op::Write { at, len, .. } => ("a write", at, len),
        Op::Flush => return "a flush".to_owned(),
        Op::Zero { at, len, .. } => ("zeros", at, len),
        Op::Trim { at, len, .. } => ("a trim", at, len),
        Op::Status { at, len, .. } => ("a status", at, len),
        Op::Advise { at, len } => ("advice", at, len),
    };
    format!("{what} of {len} bytes at {at}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_operations_are_read_as_they_were_written() {
        let io = ShardIo { shard: 3, io: IoId(300) };
        let piece = Piece { shard: 1, io: IoId(2), at: 1 << 40, len: 65_536 };
        let (slot, line) = (SlotId(70_000), LineId(1 << 33));
        let merge = Merge { line, from: slot, to: SlotId(5), at: 4097, len: 12 };
        let came =
            [Came::Flash, Came::AtHand, Came::Store { own: false }, Came::Store { own: true }];
        let mut messages = vec![
            Message::Done { failed: false },
            Message::Done { failed: true },
            Message::FlashRead { io, slot, line, lines: 16 },
            Message::FlashWrite { io, slot, lines: 2, bytes: () },
            Message::Merge { io, merge, bytes: () },
            Message::Load(Load { shard: 7, io: IoId(8), page: 9 }),
            Message::BackingRead(piece),
            Message::BackingChange(piece),
            Message::IntentsReady,
            Message::RangeTurn,
            Message::BudgetKept,
        ];
        let deliver = |came| Message::Deliver { at: 512, len: 1024, bytes: (), came };
        messages.extend(came.map(deliver));
        for message in messages {
            let mut bytes = Vec::new();
            put_message(&mut bytes, OpId(2 << 48 | 77), &message);
            let mut cursor = Cursor::new(&bytes);
            let (op, back) = take_message(&mut cursor).unwrap();
            assert_eq!((op, cursor.left()), (OpId(2 << 48 | 77), 0));
            assert_eq!(format!("{back:?}"), format!("{message:?}"));
            for cut in 0..bytes.len() {
                assert!(take_message(&mut Cursor::new(&bytes[..cut])).is_err());
            }
        }
        let (at, len) = (1 << 30, 65_537);
        for op in [
            Op::Read { at, len },
            Op::Write { at, len, bytes: (), fua: true },
            Op::Flush,
            Op::Zero { at, len, fua: false, may_punch: true, fast: false },
            Op::Zero { at, len, fua: true, may_punch: false, fast: true },
            Op::Trim { at, len: 1 << 41, fua: true },
            Op::Status { at, len, one: true },
            Op::Advise { at, len },
        ] {
            let mut bytes = Vec::new();
            put_op(&mut bytes, &op);
            let mut cursor = Cursor::new(&bytes);
            assert_eq!(format!("{:?}", take_op(&mut cursor).unwrap()), format!("{op:?}"));
            assert_eq!(cursor.left(), 0);
        }
    }
}
