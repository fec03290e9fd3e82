//! Binary formats of block storage, and libCacheSim's lcs.

use larder_base::Nanos;

use super::binary::{libcachesim_op, u16_le, u32_le, u64_le};
use super::{Decode, Fault, Out, Records};
use crate::error::{Bad, Place};
use crate::input::Input;
use crate::request::{Class, Op, Request};

/// The operation of a SCSI command.
fn scsi(command: u8) -> Option<Op> {
    match command {
        0x28 | 0x08 | 0x88 | 0xa8 => Some(Op::Read),
        0x2a | 0x0a | 0x8a | 0xaa => Some(Op::Write),
        0x42 => Some(Op::Trim),
        _ => None,
    }
}

/// Whether `head` starts with two records of this version of vscsi.
pub(crate) fn is_vscsi(head: &[u8], version: u8) -> bool {
    let (len, version_at) = if version == 2 { (40, 2) } else { (32, 14) };
    head.len() >= 2 * len
        && head.chunks_exact(len).take(2).all(|r| u16_le(r, version_at) >> 8 == u16::from(version))
}

/// VMware's vscsi: version 1 of 32 bytes, version 2 of 40. Commands other than reads, writes and unmaps move no data and
/// are passed over.
pub(crate) fn vscsi(version: u8) -> Box<dyn Decode> {
    let v2 = version == 2;
    Box::new(Records {
        len: if v2 { 40 } else { 32 },
        decode: move |r: &[u8], out: &mut Out| {
            let (command, version_at, length_at, lbn_at) =
                if v2 { (0, 2, 8, 16) } else { (12, 14, 4, 16) };
            if u16_le(r, version_at) >> 8 != u16::from(version) {
                return Err(Bad::text(
                    format!("a vscsi record of version {version}"),
                    format!("version {}", u16_le(r, version_at) >> 8),
                ));
            }
            let Some(op) = scsi(u16_le(r, command) as u8) else { return Ok(()) };
            let lbn = u64_le(r, lbn_at);
            let offset = lbn
                .checked_mul(512)
                .ok_or_else(|| Bad::text("a sector below 2^55", lbn.to_string()))?;
            let micros = u64_le(r, 24);
            let time = micros
                .checked_mul(1000)
                .ok_or_else(|| Bad::text("a time in microseconds", micros.to_string()))?;
            let size = u64::from(u32_le(r, length_at));
            out.one(Request { time: Some(Nanos(time)), ..Request::block(op, 0, offset, size) });
            Ok(())
        },
    })
}

/// blktrace's own records: 48 bytes and a payload. Queue events are the requests.
pub(crate) struct BlkTrace;

const BLKTRACE_MAGIC: u32 = 0x6561_7400;

/// Whether `head` starts with a blktrace record.
pub(crate) fn is_blktrace(head: &[u8]) -> bool {
    head.len() >= 48 && u32_le(head, 0) & 0xffff_ff00 == BLKTRACE_MAGIC
}

impl Decode for BlkTrace {
    fn step(&mut self, input: &mut Input, out: &mut Out) -> Result<bool, Fault> {
        let place = Place::Byte(input.offset());
        let r = input.peek(48)?;
        let bad = |bad: Bad| Fault::Record(place, bad);
        if r.is_empty() {
            return Ok(false);
        }
        if r.len() < 48 {
            let found = r.len();
            input.advance(found);
            return Err(bad(Bad::text(
                "a record of 48 bytes",
                format!("the end of the file after {found} bytes"),
            )));
        }
        let magic = u32_le(r, 0);
        if magic & 0xffff_ff00 != BLKTRACE_MAGIC {
            input.advance(48);
            return Err(bad(Bad::text("blktrace's magic 0x656174xx", format!("{magic:#010x}"))));
        }
        let (nanos, sector) = (u64_le(r, 8), u64_le(r, 16));
        let (bytes, action, dev) = (u32_le(r, 24), u32_le(r, 28), u32_le(r, 36));
        let payload = usize::from(u16_le(r, 46));
        input.advance(48);
        let have = input.peek(payload)?.len();
        input.advance(have);
        if have < payload {
            let found = format!("the end of the file after {have} bytes");
            return Err(bad(Bad::text(format!("a payload of {payload} bytes"), found)));
        }
        // enum blktrace_act: the low 16 bits are the action (1 = queued), the high ones the category mask.
        const QUEUE: u32 = 1;
        const CATEGORY_WRITE: u32 = 1 << 1;
        const CATEGORY_NOTIFY: u32 = 1 << 10;
        const CATEGORY_META: u32 = 1 << 12;
        const CATEGORY_DISCARD: u32 = 1 << 13;
        let category = action >> 16;
        if action & 0xffff != QUEUE || category & CATEGORY_NOTIFY != 0 || bytes == 0 {
            return Ok(true);
        }
        let op = if category & CATEGORY_DISCARD != 0 {
            Op::Trim
        } else if category & CATEGORY_WRITE != 0 {
            Op::Write
        } else {
            Op::Read
        };
        let Some(offset) = sector.checked_mul(512) else {
            return Err(bad(Bad::text("a sector below 2^55", sector.to_string())));
        };
        let class = if category & CATEGORY_META != 0 { Class::Metadata } else { Class::Unstated };
        out.one(Request {
            time: Some(Nanos(nanos)),
            class,
            ..Request::block(op, dev, offset, u64::from(bytes))
        });
        Ok(true)
    }
}

/// HP's SRT of the Storage Systems Program: a text header up to byte 0x0C, then big-endian records that state their own
/// length.
#[derive(Default)]
pub(crate) struct Srt {
    past_header: bool,
}

/// The signature of an SRT file.
pub(crate) const SRT_SIGNATURE: &[u8] = b"$$TR_IOREC";
/// No header is longer.
const SRT_HEADER: usize = 1 << 20;

fn i32_be(b: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

impl Decode for Srt {
    fn step(&mut self, input: &mut Input, out: &mut Out) -> Result<bool, Fault> {
        let place = Place::Byte(input.offset());
        let bad = |expected: &str, found: String| Fault::Record(place, Bad::text(expected, found));
        if !self.past_header {
            let head = input.peek(SRT_HEADER)?;
            if !head.starts_with(SRT_SIGNATURE) {
                let found = crate::error::quote(&head[..head.len().min(16)]);
                // Nothing behind a wrong signature can be read as records.
                let all = head.len();
                input.advance(all);
                return Err(bad("the signature $$TR_IOREC", found));
            }
            let Some(end) = memchr::memchr(0x0c, head) else {
                let all = head.len();
                input.advance(all);
                return Err(bad(
                    "a header that ends with a form feed (0x0C)",
                    format!("{all} bytes without one"),
                ));
            };
            input.advance(end + 1);
            self.past_header = true;
            return Ok(true);
        }
        let r = input.peek(52)?;
        if r.is_empty() {
            return Ok(false);
        }
        if r.len() < 4 {
            let found = r.len();
            input.advance(found);
            return Err(bad("a record", format!("the end of the file after {found} bytes")));
        }
        let len = i32_be(r, 0) as usize;
        if !(8..=4096).contains(&len) {
            // The length is what leads to the next record: without it there is no way on but word by word.
            input.advance(4);
            return Err(bad("a record's length from 8 to 4096", len.to_string()));
        }
        let r = input.peek(len)?;
        if r.len() < len {
            let found = r.len();
            input.advance(found);
            return Err(bad(
                &format!("a record of {len} bytes"),
                format!("the end of the file after {found} bytes"),
            ));
        }
        const SHORT_IO: u32 = 1;
        let result = if i32_be(r, 4) & 0xffff != SHORT_IO {
            Ok(())
        } else if len < 48 {
            Err(bad("an I/O record of at least 48 bytes", format!("{len} bytes")))
        } else {
            let word = |i: usize| i32_be(r, 4 * i);
            let (sec, usec, bytes, kib) = (word(2), word(3), word(6), word(7));
            // HP-UX: the minor number (24 bits) names the disk, the major number the driver it was reached through.
            let (dev, flags) = (word(8) & 0x00ff_ffff, word(11));
            let op = if flags & 1 == 1 { Op::Read } else { Op::Write };
            let time = Nanos(u64::from(sec) * 1_000_000_000 + u64::from(usec) * 1000);
            out.one(Request {
                time: Some(time),
                ..Request::block(op, dev, u64::from(kib) * 1024, u64::from(bytes))
            });
            Ok(())
        };
        input.advance(len);
        result.map(|()| true)
    }
}

/// libCacheSim's lcs with its header: the old layout (1,024 bytes of header, fields by a format string) and the new one
/// (8,192 bytes, versions 1 to 8).
#[derive(Default)]
pub(crate) struct Lcs {
    layout: Option<LcsLayout>,
}

#[derive(Clone, Debug)]
struct LcsLayout {
    len: usize,
    time: Option<Field>,
    id: Field,
    size: Option<Field>,
    op: Option<Field>,
    ttl: Option<Field>,
    tenant: Option<Field>,
    /// Operation in the low 8 bits and tenant in the high 24 of one word at this offset.
    packed: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Field {
    at: usize,
    bytes: usize,
}

impl Field {
    fn read(self, r: &[u8]) -> u64 {
        r[self.at..self.at + self.bytes].iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
    }
}

pub(crate) const LCS_OLD_MAGIC: u64 = 0x1234_5678_9abc_def0;
const LCS_OLD_HEADER: usize = 1024;
const LCS_NEW_HEADER: usize = 8192;

/// Fields of a Python struct string (`<IQIq`), by place and width.
fn struct_fields(format: &[u8]) -> Result<(Vec<Field>, usize), String> {
    let mut fields = Vec::new();
    let mut at = 0usize;
    for &c in format {
        let bytes = match c {
            b'<' | b'=' | b' ' => continue,
            b'b' | b'B' | b'c' | b'?' => 1,
            b'h' | b'H' => 2,
            b'i' | b'I' | b'l' | b'L' | b'f' => 4,
            b'q' | b'Q' | b'd' => 8,
            other => return Err(format!("'{}' in the struct string", other.escape_ascii())),
        };
        fields.push(Field { at, bytes });
        at += bytes;
    }
    Ok((fields, at))
}

impl LcsLayout {
    fn old(header: &[u8]) -> Result<LcsLayout, Bad> {
        let text = &header[8..248];
        let text = &text[..text.iter().position(|&b| b == 0).unwrap_or(text.len())];
        let (fields, len) = struct_fields(text)
            .map_err(|found| Bad::text("a Python struct string of integers", found))?;
        let field = |slot: usize| {
            let index = usize::from(header[248 + slot]);
            index.checked_sub(1).and_then(|i| fields.get(i)).copied()
        };
        let id = field(0)
            .ok_or_else(|| Bad::new("a field index of the object's id", &header[248..257]))?;
        Ok(LcsLayout {
            len,
            id,
            size: field(1),
            time: field(2),
            op: field(5),
            ttl: field(6),
            tenant: field(7),
            packed: None,
        })
    }

    fn new(version: u64) -> Result<LcsLayout, Bad> {
        let field = |at, bytes| Some(Field { at, bytes });
        let base = LcsLayout {
            len: 24,
            time: field(0, 4),
            id: Field { at: 4, bytes: 8 },
            size: field(12, 4),
            op: None,
            ttl: None,
            tenant: None,
            packed: None,
        };
        // Version 3 and later: u32 time, u64 id, i64 size, u32 op and tenant, u32 ttl, i64 next, u32 features.
        let third = |features: usize| LcsLayout {
            len: 36 + 4 * features,
            size: field(12, 8),
            packed: Some(20),
            ttl: field(24, 4),
            ..base.clone()
        };
        Ok(match version {
            1 => base,
            2 => LcsLayout { len: 28, packed: Some(16), ..base },
            3 => third(0),
            4..=8 => third(1 << (version - 4)),
            _ => return Err(Bad::text("an lcs version from 1 to 8", version.to_string())),
        })
    }
}

/// The kind of lcs that `head` starts: `Some(true)` for the old header.
pub(crate) fn is_lcs(head: &[u8]) -> Option<bool> {
    if head.len() >= LCS_OLD_HEADER && u64_le(head, 0) == LCS_OLD_MAGIC && u64_le(head, 8) > 8 {
        return Some(true);
    }
    let new = head.len() >= LCS_NEW_HEADER
        && (1..=8).contains(&u64_le(head, 8))
        && u64_le(head, 0) > 1 << 32
        && u64_le(head, LCS_NEW_HEADER - 8) > 1 << 32
        && u64_le(head, 16) <= 1 << 16;
    new.then_some(false)
}

impl Decode for Lcs {
    fn step(&mut self, input: &mut Input, out: &mut Out) -> Result<bool, Fault> {
        let place = Place::Byte(input.offset());
        let Some(layout) = &self.layout else {
            let head = input.peek(LCS_NEW_HEADER)?;
            let (layout, len) = match is_lcs(head) {
                Some(true) => (LcsLayout::old(head), LCS_OLD_HEADER),
                Some(false) => (LcsLayout::new(u64_le(head, 8)), LCS_NEW_HEADER),
                None => (
                    Err(Bad::text(
                        "an lcs header of 1,024 or 8,192 bytes",
                        "another start".to_owned(),
                    )),
                    head.len(),
                ),
            };
            let layout = layout.and_then(|l| {
                if (1..=4096).contains(&l.len) {
                    Ok(l)
                } else {
                    Err(Bad::text("records of 1 to 4096 bytes", l.len.to_string()))
                }
            });
            match layout {
                Ok(layout) => {
                    input.advance(len);
                    self.layout = Some(layout);
                    return Ok(true);
                }
                Err(bad) => {
                    // Without a header no record can be read: a trace that goes on is passed over to its end.
                    loop {
                        let n = input.peek(64 << 10)?.len();
                        if n == 0 {
                            break;
                        }
                        input.advance(n);
                    }
                    return Err(Fault::Record(place, bad));
                }
            }
        };
        let r = input.peek(layout.len)?;
        if r.is_empty() {
            return Ok(false);
        }
        let found = r.len();
        let result = if found < layout.len {
            Err(Bad::text(
                format!("a record of {} bytes", layout.len),
                format!("the end of the file after {found} bytes"),
            ))
        } else {
            lcs_record(layout, r).map(|request| out.one(request))
        };
        input.advance(found);
        result.map_err(|bad| Fault::Record(place, bad))?;
        Ok(true)
    }
}

fn lcs_record(layout: &LcsLayout, r: &[u8]) -> Result<Request, Bad> {
    let get = |f: Option<Field>| f.map(|f| f.read(r));
    let mut op = get(layout.op);
    let mut tenant = get(layout.tenant).unwrap_or(0);
    if let Some(at) = layout.packed {
        let word = u32_le(r, at);
        op = Some(u64::from(word & 0xff));
        tenant = u64::from(word >> 8);
    }
    let size = get(layout.size).unwrap_or(1);
    if layout.size.is_some_and(|f| f.bytes == 8) && size > i64::MAX as u64 {
        return Err(Bad::text("a size that is not negative", (size as i64).to_string()));
    }
    let seconds = get(layout.time);
    let time = match seconds {
        None => None,
        Some(s) => Some(Nanos(
            s.checked_mul(1_000_000_000)
                .ok_or_else(|| Bad::text("a time in seconds", s.to_string()))?,
        )),
    };
    let ttl = get(layout.ttl).unwrap_or(0) as u32;
    Ok(Request {
        time,
        op: op.map_or(Ok(Op::Get), |op| libcachesim_op(u8::try_from(op).unwrap_or(u8::MAX)))?,
        app: tenant as u32,
        // libCacheSim writes −1 for no time to live.
        ttl: if ttl == u32::MAX { 0 } else { ttl },
        ..Request::get(layout.id.read(r), size)
    })
}
