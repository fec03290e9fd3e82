//! Binary formats of libCacheSim and of Caffeine's simulator. Little-endian and packed unless said.

use larder_base::Nanos;

use super::{Decode, Out, Records};
use crate::error::Bad;
use crate::request::{Op, Request};

pub(crate) fn u16_le(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

pub(crate) fn u32_le(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

pub(crate) fn u64_le(b: &[u8], at: usize) -> u64 {
    u64::from(u32_le(b, at)) | u64::from(u32_le(b, at + 4)) << 32
}

/// libCacheSim's operation codes; 0 (no operation recorded) counts as a get.
pub(crate) fn libcachesim_op(code: u8) -> Result<Op, Bad> {
    Ok(match code {
        0..=2 => Op::Get,
        3 => Op::Set,
        4 => Op::Add,
        5 => Op::Cas,
        6 => Op::Replace,
        7 => Op::Append,
        8 => Op::Prepend,
        9 => Op::Delete,
        10 => Op::Incr,
        11 => Op::Decr,
        // The object is an id, not a range: reads, writes and updates of it.
        12 => Op::Get,
        13 | 14 => Op::Set,
        _ => return Err(Bad::text("an operation code from 0 to 14", code.to_string())),
    })
}

/// oracleGeneral: u32 time (s), u64 id, u32 size, i64 next access.
pub(crate) fn oracle_general() -> Box<dyn Decode> {
    Box::new(Records {
        len: 24,
        decode: |r: &[u8], out: &mut Out| {
            let time = Some(Nanos::from_secs(u64::from(u32_le(r, 0))));
            out.one(Request { time, ..Request::get(u64_le(r, 4), u64::from(u32_le(r, 12))) });
            Ok(())
        },
    })
}

/// oracleGeneralOpNS: u32 time (s), u64 id, u32 size, u8 op, u16 name space, i64 next access.
pub(crate) fn oracle_general_opns() -> Box<dyn Decode> {
    Box::new(Records {
        len: 27,
        decode: |r: &[u8], out: &mut Out| {
            out.one(Request {
                time: Some(Nanos::from_secs(u64::from(u32_le(r, 0)))),
                op: libcachesim_op(r[16])?,
                app: u32::from(u16_le(r, 17)),
                ..Request::get(u64_le(r, 4), u64::from(u32_le(r, 12)))
            });
            Ok(())
        },
    })
}

/// twr, and twrNS with a name space: u32 time (s), u64 id, u32 (key size 10 bits high, value size 22 low), u32 (op 8
/// high, TTL 24 low)[, u16 name space].
pub(crate) fn twr(name_space: bool) -> Box<dyn Decode> {
    Box::new(Records {
        len: if name_space { 22 } else { 20 },
        decode: move |r: &[u8], out: &mut Out| {
            let (sizes, op) = (u32_le(r, 12), u32_le(r, 16));
            out.one(Request {
                time: Some(Nanos::from_secs(u64::from(u32_le(r, 0)))),
                key_size: sizes >> 22,
                ttl: op & 0xff_ffff,
                op: libcachesim_op((op >> 24) as u8)?,
                app: if name_space { u32::from(u16_le(r, 20)) } else { 0 },
                ..Request::get(u64_le(r, 4), u64::from(sizes & 0x3f_ffff))
            });
            Ok(())
        },
    })
}

/// libCacheSim's plain records: u32 time (s), u64 id, u32 size (IQI); u64 size (IQQ); u32 id, u32 size (III).
pub(crate) fn standard(len: usize) -> Box<dyn Decode> {
    Box::new(Records {
        len,
        decode: move |r: &[u8], out: &mut Out| {
            let (id, size) = match len {
                12 => (u64::from(u32_le(r, 4)), u64::from(u32_le(r, 8))),
                16 => (u64_le(r, 4), u64::from(u32_le(r, 12))),
                _ => (u64_le(r, 4), u64_le(r, 12)),
            };
            out.one(Request {
                time: Some(Nanos::from_secs(u64::from(u32_le(r, 0)))),
                ..Request::get(id, size)
            });
            Ok(())
        },
    })
}

/// Keys alone, 32 or 64 bits, big-endian, as Caffeine's simulator reads them.
pub(crate) fn big_endian_keys(len: usize) -> Box<dyn Decode> {
    Box::new(Records {
        len,
        decode: |r: &[u8], out: &mut Out| {
            let id = r.iter().fold(0u64, |n, &b| n << 8 | u64::from(b));
            out.one(Request::get(id, 1));
            Ok(())
        },
    })
}
