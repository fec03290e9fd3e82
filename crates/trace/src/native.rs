//! Larder's own trace format: compact, checked, readable from any block on.
//!
//! ```text
//! file    magic "LRDTRACE", u16 version 2, u16 0, u32 0, blocks …, end block
//! block   u32 payload bytes (1 ..= 128 KiB), u32 records, u32 CRC-32C of the payload, payload
//! end     u32 0, u32 0, u32 CRC-32C of the next field, u64 records of the file
//! record  u8 op (low 4 bits), bit 4 time, bit 5 application and what follows it below, bit 6 offset, bit 7 id as 8 bytes
//!         [time]          varint, nanoseconds since the block's previous timed record
//!         id              varint of the zigzag difference to the previous id, or 8 bytes
//!         size            varint
//!         [offset]        varint
//!         [application, key size, TTL, class + 4 × host]  varints; without bit 5 those of the previous record
//! ```
//! Integers are little-endian; varints are LEB128. Within a block the previous values start at 0, so a damaged block
//! costs its own records alone. A file without its end block was cut short.
//!
//! Version 1, which is still read, had no class and no host.

use std::io::{self, Write};

use larder_base::Nanos;

use crate::error::{Bad, Place};
use crate::input::Input;
use crate::read::binary::{u32_le, u64_le};
use crate::read::{Decode, Fault, Out};
use crate::request::{Class, Op, Request};

pub(crate) const MAGIC: &[u8; 8] = b"LRDTRACE";
const VERSION: u16 = 2;
const HEADER: usize = 16;
const BLOCK_HEADER: usize = 12;
/// A block is closed when its payload exceeds this …
const BLOCK: usize = 64 << 10;
/// … and is never longer than this.
const MAX_BLOCK: usize = 128 << 10;

const TIME: u8 = 1 << 4;
const META: u8 = 1 << 5;
const OFFSET: u8 = 1 << 6;
const WIDE: u8 = 1 << 7;

/// What is carried from record to record within a block.
#[derive(Clone, Copy, Default)]
struct Previous {
    time: u64,
    id: u64,
    app: u32,
    key_size: u32,
    ttl: u32,
    class: Class,
    host: u16,
}

/// Writes the native format.
pub struct NativeWriter<W: Write> {
    out: W,
    payload: Vec<u8>,
    records: u32,
    total: u64,
    previous: Previous,
}

fn varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn zigzag(n: i64) -> u64 {
    ((n << 1) ^ (n >> 63)) as u64
}

fn unzigzag(n: u64) -> i64 {
    (n >> 1) as i64 ^ -((n & 1) as i64)
}

impl<W: Write> NativeWriter<W> {
    /// Writes the header.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn new(mut out: W) -> io::Result<NativeWriter<W>> {
        out.write_all(MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&[0; 6])?;
        Ok(NativeWriter {
            out,
            payload: Vec::with_capacity(MAX_BLOCK),
            records: 0,
            total: 0,
            previous: Previous::default(),
        })
    }

    /// Appends a request. Times must not go back; one that does is written as the one before it.
    ///
    /// # Errors
    /// Those of the output.
    pub fn push(&mut self, r: &Request) -> io::Result<()> {
        let p = &mut self.previous;
        let out = &mut self.payload;
        let at = out.len();
        let mut control = r.op as u8;
        out.push(0);
        if let Some(time) = r.time {
            control |= TIME;
            let time = time.0.max(p.time);
            varint(out, time - p.time);
            p.time = time;
        }
        let difference = zigzag(r.id.wrapping_sub(p.id) as i64);
        if difference < 1 << 49 {
            varint(out, difference);
        } else {
            control |= WIDE;
            out.extend_from_slice(&r.id.to_le_bytes());
        }
        p.id = r.id;
        varint(out, r.size);
        if r.offset != 0 {
            control |= OFFSET;
            varint(out, r.offset);
        }
        if (r.app, r.key_size, r.ttl, r.class, r.host)
            != (p.app, p.key_size, p.ttl, p.class, p.host)
        {
            control |= META;
            for n in [r.app, r.key_size, r.ttl] {
                varint(out, u64::from(n));
            }
            varint(out, r.class as u64 | u64::from(r.host) << 2);
            (p.app, p.key_size, p.ttl) = (r.app, r.key_size, r.ttl);
            (p.class, p.host) = (r.class, r.host);
        }
        out[at] = control;
        self.records += 1;
        if self.payload.len() >= BLOCK { self.close_block() } else { Ok(()) }
    }

    fn close_block(&mut self) -> io::Result<()> {
        if self.records == 0 {
            return Ok(());
        }
        self.out.write_all(&(self.payload.len() as u32).to_le_bytes())?;
        self.out.write_all(&self.records.to_le_bytes())?;
        self.out.write_all(&crc32c::crc32c(&self.payload).to_le_bytes())?;
        self.out.write_all(&self.payload)?;
        self.total += u64::from(self.records);
        self.records = 0;
        self.payload.clear();
        self.previous = Previous::default();
        Ok(())
    }

    /// Writes the end block and returns the output.
    ///
    /// # Errors
    /// Those of the output.
    pub fn finish(mut self) -> io::Result<W> {
        self.close_block()?;
        let total = self.total.to_le_bytes();
        self.out.write_all(&[0; 8])?;
        self.out.write_all(&crc32c::crc32c(&total).to_le_bytes())?;
        self.out.write_all(&total)?;
        self.out.flush()?;
        Ok(self.out)
    }
}

/// Reads the native format, a block at a step.
#[derive(Default)]
pub(crate) struct Native {
    started: bool,
    version: u16,
    ended: bool,
    records: u64,
    damaged: bool,
}

/// A cursor over a payload.
struct Bytes<'a> {
    left: &'a [u8],
}

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.left.split_first()?;
        self.left = rest;
        Some(first)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut n = 0u64;
        for shift in (0..70).step_by(7) {
            let b = self.byte()?;
            let part = u64::from(b & 0x7f);
            if shift == 63 && part > 1 {
                return None;
            }
            n |= part << shift;
            if b & 0x80 == 0 {
                return Some(n);
            }
        }
        None
    }

    fn record(&mut self, p: &mut Previous, version: u16) -> Option<Request> {
        let control = self.byte()?;
        let op = Op::from_code(control & 15)?;
        let mut time = None;
        if control & TIME != 0 {
            p.time = p.time.checked_add(self.varint()?)?;
            time = Some(Nanos(p.time));
        }
        if control & WIDE != 0 {
            p.id = u64_le(self.left.get(..8)?, 0);
            self.left = &self.left[8..];
        } else {
            p.id = p.id.wrapping_add(unzigzag(self.varint()?) as u64);
        }
        let size = self.varint()?;
        let offset = if control & OFFSET != 0 { self.varint()? } else { 0 };
        if control & META != 0 {
            p.app = u32::try_from(self.varint()?).ok()?;
            p.key_size = u32::try_from(self.varint()?).ok()?;
            p.ttl = u32::try_from(self.varint()?).ok()?;
            if version >= 2 {
                let packed = self.varint()?;
                p.class = Class::from_code(packed & 3)?;
                p.host = u16::try_from(packed >> 2).ok()?;
            }
        }
        Some(Request {
            time,
            id: p.id,
            offset,
            size,
            key_size: p.key_size,
            ttl: p.ttl,
            app: p.app,
            op,
            class: p.class,
            host: p.host,
        })
    }
}

impl Native {
    /// Passes over everything that is left: without a length that can be trusted there is no way to the next block.
    fn drain(&mut self, input: &mut Input) -> Result<(), Fault> {
        self.ended = true;
        loop {
            let n = input.peek(64 << 10)?.len();
            if n == 0 {
                return Ok(());
            }
            input.advance(n);
        }
    }
}

impl Decode for Native {
    fn step(&mut self, input: &mut Input, out: &mut Out) -> Result<bool, Fault> {
        if self.ended {
            return Ok(false);
        }
        let place = Place::Byte(input.offset());
        let bad = |expected: &str, found: String| Fault::Record(place, Bad::text(expected, found));
        if !self.started {
            let head = input.peek(HEADER)?;
            if head.len() < HEADER || !head.starts_with(MAGIC) {
                let found = crate::error::quote(head);
                self.drain(input)?;
                return Err(bad("the header of Larder's trace format (LRDTRACE)", found));
            }
            let version = u16::from_le_bytes([head[8], head[9]]);
            if !(1..=VERSION).contains(&version) {
                self.drain(input)?;
                return Err(bad(
                    "version 1 or 2 of Larder's trace format",
                    format!("version {version}"),
                ));
            }
            self.version = version;
            input.advance(HEADER);
            self.started = true;
            return Ok(true);
        }
        let head = input.peek(BLOCK_HEADER)?;
        if head.len() < BLOCK_HEADER {
            let found = format!("the end of the file after {} bytes: it was cut short", head.len());
            self.drain(input)?;
            return Err(bad("another block or the end block", found));
        }
        let (len, records, crc) = (u32_le(head, 0) as usize, u32_le(head, 4), u32_le(head, 8));
        if len == 0 {
            let end = input.peek(BLOCK_HEADER + 8)?;
            let total = end
                .get(BLOCK_HEADER..BLOCK_HEADER + 8)
                .filter(|t| crc32c::crc32c(t) == crc)
                .map(|t| u64_le(t, 0));
            let have = self.records;
            self.drain(input)?;
            return match total {
                Some(total) if total == have || self.damaged => Ok(false),
                Some(total) => {
                    Err(bad(&format!("{total} records as the end block says"), format!("{have}")))
                }
                None => Err(bad("an end block that fits its checksum", "another".to_owned())),
            };
        }
        if len > MAX_BLOCK || records as usize > len {
            self.damaged = true;
            self.drain(input)?;
            return Err(bad(
                "a block of at most 128 KiB",
                format!("{len} bytes with {records} records"),
            ));
        }
        input.advance(BLOCK_HEADER);
        let payload = input.peek(len)?;
        let have = payload.len();
        let result = if have < len {
            Err(bad(
                &format!("a block of {len} bytes"),
                format!("the end of the file after {have} bytes"),
            ))
        } else if crc32c::crc32c(payload) != crc {
            Err(bad("a block that fits its checksum", format!("{len} bytes that do not")))
        } else {
            decode_block(payload, records, self.version, out)
                .ok_or_else(|| bad("well-formed records", "others".to_owned()))
        };
        input.advance(have);
        match result {
            Ok(()) => self.records += u64::from(records),
            Err(_) => self.damaged = true,
        }
        result.map(|()| true)
    }
}

fn decode_block(payload: &[u8], records: u32, version: u16, out: &mut Out) -> Option<()> {
    let mut bytes = Bytes { left: payload };
    let mut previous = Previous::default();
    for _ in 0..records {
        out.one(bytes.record(&mut previous, version)?);
    }
    bytes.left.is_empty().then_some(())
}
