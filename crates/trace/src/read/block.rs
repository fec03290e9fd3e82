//! Text formats of block storage.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use larder_base::Nanos;

use super::text::{
    MICROSECOND, MILLISECOND, SECOND, blanks, columns, decimal, hex, number, number32, time, words,
};
use super::{Decode, Lines, Out};
use crate::error::Bad;
use crate::request::{Class, Op, Request, hash_key, key_id};
use crate::stats::IdHasher;

const SECTOR: u64 = 512;

/// Sectors to bytes.
fn sectors(n: u64, what: &str) -> Result<u64, Bad> {
    n.checked_mul(SECTOR)
        .ok_or_else(|| Bad::text(format!("{what}: sectors of 512 bytes below 2^55"), n.to_string()))
}

/// `R`, `W`, `Read`, `Write`, `rs`, … by the first letter.
fn direction(text: &[u8]) -> Result<Op, Bad> {
    match text.first().map(u8::to_ascii_uppercase) {
        Some(b'R') => Ok(Op::Read),
        Some(b'W') => Ok(Op::Write),
        Some(b'D' | b'T') => Ok(Op::Trim),
        _ => Err(Bad::new("read or write (R or W)", text)),
    }
}

/// A device as a number: one that is not a number is hashed to 32 bits.
fn device(text: &[u8]) -> u32 {
    std::str::from_utf8(text)
        .ok()
        .and_then(|t| t.parse().ok())
        .unwrap_or_else(|| hash_key(text) as u32)
}

fn block(at: Option<Nanos>, op: Op, device: u32, offset: u64, size: u64) -> Request {
    Request { time: at, ..Request::block(op, device, offset, size) }
}

/// Bytes that a block of Tectonic's gets on the volume that its requests are laid out on. Blocks have 8 MiB and a little.
const BLOCK_SPAN: u64 = 16 << 20;

/// Blocks that a trace names by ids, offsets counting within each, laid out side by side in the order of their first
/// requests: without that, the beginnings of all blocks were the same bytes. Some 30 bytes for each distinct block.
#[derive(Default)]
pub(crate) struct Blocks(HashMap<u64, u64, BuildHasherDefault<IdHasher>>);

impl Blocks {
    /// The offset on the volume of `size` bytes from `offset` on in block `id`.
    pub(crate) fn place(&mut self, id: u64, offset: u64, size: u64) -> Result<u64, Bad> {
        if offset.checked_add(size).is_none_or(|end| end > BLOCK_SPAN) {
            return Err(Bad::text(
                "io_offset and io_size within a block of 16 MiB",
                format!("{size} bytes at {offset}"),
            ));
        }
        let next = self.0.len() as u64;
        Ok(*self.0.entry(id).or_insert(next) * BLOCK_SPAN + offset)
    }
}

/// MSR Cambridge: timestamp (100 ns since 1601), host, disk, Read|Write, offset, bytes, response time. A volume is a disk of
/// a host: of the first host by its number, of others (files put together) by the hash of both.
pub(crate) fn msr() -> Box<dyn Decode> {
    let mut first: Option<Vec<u8>> = None;
    Box::new(Lines(move |line: &[u8], out: &mut Out| {
        let [t, host, disk, kind, offset, bytes] =
            columns::<6>(line, b',', "timestamp,host,disk,Read|Write,offset,size[,response time]")?;
        if t.eq_ignore_ascii_case(b"timestamp") {
            return Ok(());
        }
        let (at, op) = (time(t, 100, "timestamp")?, direction(kind)?);
        let (offset, bytes) = (number(offset, "offset")?, number(bytes, "size")?);
        let volume = if first.get_or_insert_with(|| host.to_vec()) == host {
            device(disk)
        } else {
            hash_key(&[host, b",", disk].concat()) as u32
        };
        out.one(block(at, op, volume, offset, bytes));
        Ok(())
    }))
}

/// Microsoft's enterprise traces (ETW as csv): `DiskRead` and `DiskWrite` lines after EndHeader.
pub(crate) fn etw() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let kind = line.trim_ascii_start();
        let op = if kind.starts_with(b"DiskReadInit") || kind.starts_with(b"DiskWriteInit") {
            return Ok(());
        } else if kind.starts_with(b"DiskRead,") || kind.starts_with(b"DiskRead ") {
            Op::Read
        } else if kind.starts_with(b"DiskWrite,") || kind.starts_with(b"DiskWrite ") {
            Op::Write
        } else {
            return Ok(());
        };
        let [_, t, _process, _thread, _irp, offset, bytes, _elapsed, disk] = columns::<9>(
            line,
            b',',
            "DiskRead|DiskWrite,TimeStamp,process,thread,IrpPtr,ByteOffset,IOSize,ElapsedTime,DiskNum",
        )?;
        // The header's own line of names.
        if t.eq_ignore_ascii_case(b"TimeStamp") {
            return Ok(());
        }
        out.one(block(
            time(t, MICROSECOND, "TimeStamp")?,
            op,
            device(disk),
            hex(offset, "ByteOffset")?,
            hex(bytes, "IOSize")?,
        ));
        Ok(())
    }))
}

/// SPC: ASU, LBA (512 B), bytes, R|W, seconds.
pub(crate) fn spc() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [asu, lba, bytes, kind, t] = columns::<5>(line, b',', "ASU,LBA,size,R|W,time")?;
        let offset = sectors(number(lba, "LBA")?, "LBA")?;
        out.one(block(
            time(t, SECOND, "time")?,
            direction(kind)?,
            number32(asu, "ASU")?,
            offset,
            number(bytes, "size")?,
        ));
        Ok(())
    }))
}

fn read_flag(text: &[u8]) -> Result<Op, Bad> {
    match decimal(text, 1) {
        Some(flags) if flags & 1 == 1 => Ok(Op::Read),
        Some(_) => Ok(Op::Write),
        None => Err(Bad::new("a type (1 read, 0 write)", text)),
    }
}

/// DiskSim ascii and MQSim: time, device, sector, sectors, flags (1 = read); DiskSim's times are milliseconds, MQSim's
/// nanoseconds.
pub(crate) fn disksim(time_unit: u64) -> Box<dyn Decode> {
    Box::new(Lines(move |line: &[u8], out: &mut Out| {
        let [t, dev, lba, count, flags] = words::<5>(line, "time device sector sectors type")?;
        let offset = sectors(number(lba, "sector")?, "sector")?;
        let bytes = sectors(number(count, "sectors")?, "sectors")?;
        out.one(block(time(t, time_unit, "time")?, read_flag(flags)?, device(dev), offset, bytes));
        Ok(())
    }))
}

/// Heimdall's replayer: milliseconds, device, offset in bytes, bytes, 1 = read.
pub(crate) fn replayer() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, dev, offset, bytes, flag] = words::<5>(line, "time_ms device offset size read")?;
        out.one(block(
            time(t, MILLISECOND, "time")?,
            read_flag(flag)?,
            device(dev),
            number(offset, "offset")?,
            number(bytes, "size")?,
        ));
        Ok(())
    }))
}

/// FlashNet: milliseconds, latency (µs), 1 = read, bytes, offset, …
pub(crate) fn flashnet() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, _latency, flag, bytes, offset] =
            columns::<5>(line, b',', "time_ms,latency,read,size,offset,…")?;
        out.one(block(
            time(t, MILLISECOND, "time")?,
            read_flag(flag)?,
            0,
            number(offset, "offset")?,
            number(bytes, "size")?,
        ));
        Ok(())
    }))
}

/// FIU: nanoseconds, pid, process, sector, sectors, R|W, major, minor, md5.
pub(crate) fn fiu() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, _pid, _process, lba, count, kind, major, minor] =
            words::<8>(line, "time pid process sector sectors R|W major minor [md5]")?;
        let offset = sectors(number(lba, "sector")?, "sector")?;
        let bytes = sectors(number(count, "sectors")?, "sectors")?;
        let dev = number32(major, "major")?.wrapping_shl(20) | number32(minor, "minor")? & 0xf_ffff;
        out.one(block(time(t, 1, "time")?, direction(kind)?, dev, offset, bytes));
        Ok(())
    }))
}

/// SYSTOR '17: seconds, response, R|W, LUN, offset, bytes.
pub(crate) fn systor() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, _response, kind, lun, offset, bytes] =
            columns::<6>(line, b',', "timestamp,response,R|W,LUN,offset,size")?;
        if t.eq_ignore_ascii_case(b"timestamp") {
            return Ok(());
        }
        out.one(block(
            time(t, SECOND, "timestamp")?,
            direction(kind)?,
            device(lun),
            number(offset, "offset")?,
            number(bytes, "size")?,
        ));
        Ok(())
    }))
}

/// K5cloud: volume, seconds, R|W, offset, bytes.
pub(crate) fn k5cloud() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [volume, t, kind, offset, bytes] =
            columns::<5>(line, b',', "volume,time,R|W,offset,size")?;
        out.one(block(
            time(t, SECOND, "time")?,
            direction(kind)?,
            device(volume),
            number(offset, "offset")?,
            number(bytes, "size")?,
        ));
        Ok(())
    }))
}

/// Alibaba's block traces of 2020: device, R|W, offset, bytes, microseconds.
pub(crate) fn alibaba() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [dev, kind, offset, bytes, t] =
            columns::<5>(line, b',', "device_id,R|W,offset,length,timestamp")?;
        if dev.eq_ignore_ascii_case(b"device_id") {
            return Ok(());
        }
        out.one(block(
            time(t, MICROSECOND, "timestamp")?,
            direction(kind)?,
            device(dev),
            number(offset, "offset")?,
            number(bytes, "length")?,
        ));
        Ok(())
    }))
}

/// Tencent's block storage: seconds, sector, sectors, 0 = read and 1 = write, volume.
pub(crate) fn tencent() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, lba, count, kind, volume] =
            columns::<5>(line, b',', "timestamp,offset,size,type,volume")?;
        if t.eq_ignore_ascii_case(b"timestamp") {
            return Ok(());
        }
        let op = match kind {
            b"0" => Op::Read,
            b"1" => Op::Write,
            _ => return Err(Bad::new("a type (0 read, 1 write)", kind)),
        };
        let offset = sectors(number(lba, "offset")?, "offset")?;
        let bytes = sectors(number(count, "size")?, "size")?;
        out.one(block(time(t, SECOND, "timestamp")?, op, device(volume), offset, bytes));
        Ok(())
    }))
}

/// Baleen (Tectonic): block id, offset, bytes, seconds, operation, …; blanks between, `#` in front of the header.
/// Operations 1, 2 and 5 read, the others write.
pub(crate) fn baleen() -> Box<dyn Decode> {
    let mut blocks = Blocks::default();
    Box::new(Lines(move |line: &[u8], out: &mut Out| {
        if line.starts_with(b"#") {
            return Ok(());
        }
        let [id, offset, bytes, t, op] =
            words::<5>(line, "block_id io_offset io_size op_time op_name …")?;
        let op = if matches!(op, b"1" | b"2" | b"5") { Op::Read } else { Op::Write };
        let (at, id) = (time(t, SECOND, "op_time")?, key_id(id));
        let bytes = number(bytes, "io_size")?;
        let offset = blocks.place(id, number(offset, "io_offset")?, bytes)?;
        out.one(Request { id, ..block(at, op, 0, offset, bytes) });
        Ok(())
    }))
}

/// Thesios (Google): a header, then file, offset in it, …; the operation is the 7th column and the size the 11th.
pub(crate) fn thesios() -> Box<dyn Decode> {
    let mut layout: Option<(usize, usize, usize, usize, usize)> = None;
    Box::new(Lines(move |line: &[u8], out: &mut Out| {
        let fields: Vec<&[u8]> = line.split(|&b| b == b',').map(<[u8]>::trim_ascii).collect();
        let Some((file, offset, t, op, bytes)) = layout else {
            let at = |name: &[u8], or: usize| fields.iter().position(|f| *f == name).unwrap_or(or);
            if !fields.contains(&&b"filename"[..]) {
                return Err(Bad::new("a header that names the column 'filename'", line));
            }
            let t = fields
                .iter()
                .position(|f| f.ends_with(b"_time") || *f == b"time")
                .unwrap_or(usize::MAX);
            layout = Some((
                at(b"filename", 0),
                at(b"file_offset", 1),
                t,
                at(b"op_type", 6),
                at(b"request_io_size_bytes", 10),
            ));
            return Ok(());
        };
        let field = |i: usize| {
            fields
                .get(i)
                .copied()
                .ok_or_else(|| Bad::new(format!("at least {} columns", i + 1), line))
        };
        let at = if t == usize::MAX { None } else { time(field(t)?, SECOND, "time")? };
        let volume = hash_key(field(file)?);
        let mut request = block(
            at,
            direction(field(op)?)?,
            volume as u32,
            number(field(offset)?, "file_offset")?,
            number(field(bytes)?, "size")?,
        );
        request.id = volume ^ (request.offset / SECTOR);
        out.one(request);
        Ok(())
    }))
}

/// Which of blkparse's lines are requests: the queue events of a trace that has them, dispatches in one that does not.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BlkAction {
    Queue,
    Dispatch,
}

/// blkparse's text: `major,minor cpu sequence seconds pid action RWBS sector + sectors [process]`. The first Q or D seen
/// settles which of the two the requests are; discards are trims; `M` marks
/// metadata; flushes without data and summary lines are passed over.
pub(crate) fn blkparse() -> Box<dyn Decode> {
    let mut chosen: Option<BlkAction> = None;
    Box::new(Lines(move |line: &[u8], out: &mut Out| {
        let mut fields = blanks(line);
        let Some((major, minor)) = fields.next().and_then(|dev| {
            let at = memchr::memchr(b',', dev)?;
            let part = |t: &[u8]| std::str::from_utf8(t).ok()?.parse::<u32>().ok();
            Some((part(&dev[..at])?, part(&dev[at + 1..])?))
        }) else {
            // Summaries at the end ("CPU0 (8,16):", "Total …", " Reads Queued: …") start otherwise.
            return Ok(());
        };
        let expected =
            || Bad::new("major,minor cpu sequence time pid action RWBS sector + sectors", line);
        let (_cpu, _sequence) =
            (fields.next().ok_or_else(expected)?, fields.next().ok_or_else(expected)?);
        let t = fields.next().ok_or_else(expected)?;
        let (_pid, action) =
            (fields.next().ok_or_else(expected)?, fields.next().ok_or_else(expected)?);
        let action = match action {
            b"Q" => BlkAction::Queue,
            b"D" => BlkAction::Dispatch,
            _ => return Ok(()),
        };
        let Some(kind) = fields.next() else { return Err(expected()) };
        if *chosen.get_or_insert(action) != action {
            return Ok(());
        }
        let op = if kind.contains(&b'D') {
            Op::Trim
        } else if kind.contains(&b'R') {
            Op::Read
        } else if kind.contains(&b'W') {
            Op::Write
        } else {
            return Ok(());
        };
        let (Some(sector), Some(b"+"), Some(count)) = (fields.next(), fields.next(), fields.next())
        else {
            // A flush ("FWS") without data has no range.
            return if kind.contains(&b'F') { Ok(()) } else { Err(expected()) };
        };
        let offset = sectors(number(sector, "sector")?, "sector")?;
        let bytes = sectors(number(count, "sectors")?, "sectors")?;
        let dev = major.wrapping_shl(20) | minor & 0xf_ffff;
        let mut request = block(time(t, SECOND, "time")?, op, dev, offset, bytes);
        if kind.contains(&b'M') {
            request.class = Class::Metadata;
        }
        out.one(request);
        Ok(())
    }))
}

/// fio's I/O logs, versions 2 (no times but `wait`) and 3 (milliseconds in front of each line). Files are devices, in
/// the order in which they are first named.
pub(crate) fn iolog() -> Box<dyn Decode> {
    let mut version = 0u8;
    let mut files: Vec<Vec<u8>> = Vec::new();
    let mut clock = 0u64;
    Box::new(Lines(move |line: &[u8], out: &mut Out| {
        if version == 0 {
            version = match line.trim_ascii() {
                b"fio version 2 iolog" => 2,
                b"fio version 3 iolog" => 3,
                _ => return Err(Bad::new("'fio version 2 iolog' or 'fio version 3 iolog'", line)),
            };
            return Ok(());
        }
        let mut fields = blanks(line);
        let mut at = None;
        if version == 3 {
            at = time(fields.next().unwrap_or_default(), MILLISECOND, "time")?;
        }
        let (Some(file), Some(action)) = (fields.next(), fields.next()) else {
            return Err(Bad::new("a file and an action", line));
        };
        let op = match action {
            b"add" | b"open" | b"close" | b"sync" | b"datasync" | b"sync_file_range" => {
                return Ok(());
            }
            b"wait" => {
                let us = number(fields.next().unwrap_or_default(), "wait")?;
                clock = clock.saturating_add(us.saturating_mul(MICROSECOND));
                return Ok(());
            }
            b"read" => Op::Read,
            b"write" => Op::Write,
            b"trim" => Op::Trim,
            _ => {
                return Err(Bad::new(
                    "an action (add, open, close, read, write, trim, sync, datasync, wait)",
                    action,
                ));
            }
        };
        let (Some(offset), Some(bytes)) = (fields.next(), fields.next()) else {
            return Err(Bad::new("file action offset length", line));
        };
        const FILES: usize = 1 << 16;
        let dev = match files.iter().position(|f| f == file) {
            Some(i) => i,
            None if files.len() < FILES => {
                files.push(file.to_vec());
                files.len() - 1
            }
            None => return Err(Bad::text(format!("at most {FILES} files"), "one more".to_owned())),
        };
        let at = at.or((clock > 0).then_some(Nanos(clock)));
        out.one(block(at, op, dev as u32, number(offset, "offset")?, number(bytes, "length")?));
        Ok(())
    }))
}
