//! Text formats of key-value caches and CDNs.

use larder_base::Nanos;
use serde::Deserialize;

use super::block::Blocks;
use super::text::{MILLISECOND, SECOND, columns, decimal, number, number32, size, time, words};
use super::{Decode, Lines, Out};
use crate::error::Bad;
use crate::request::{Class, Op, Request, hash_key, key_id};

/// Memcachier's layout as the Flashield authors' lsm-sim reads it: time (s), application, type, key size, value size,
/// key id, hit. Types: 1 get, 2 set, 3 delete, 4 add, 5 increment; 6 (stats) and 7 (other) touch no object.
pub(crate) fn memcachier() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, app, kind, key_size, value_size, key] =
            columns::<6>(line, b',', "time,application,type,key size,value size,key id[,hit]")?;
        let op = match kind {
            b"1" => Op::Get,
            b"2" => Op::Set,
            b"3" => Op::Delete,
            b"4" => Op::Add,
            b"5" => Op::Incr,
            b"6" | b"7" => return Ok(()),
            _ => return Err(Bad::new("a type from 1 (get) to 7", kind)),
        };
        out.one(Request {
            time: time(t, SECOND, "time")?,
            app: number32(app, "application")?,
            key_size: size(key_size, "key size")?.min(u64::from(u32::MAX)) as u32,
            op,
            ..Request::get(key_id(key), size(value_size, "value size")?)
        });
        Ok(())
    }))
}

/// Twitter's cache traces: timestamp (s), key, key size, value size, client, operation, TTL (s).
pub(crate) fn twitter() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, key, key_size, value_size, _client, op, ttl] =
            columns::<7>(line, b',', "timestamp,key,key_size,value_size,client,operation,ttl")?;
        let op = match op {
            b"get" | b"gets" => Op::Get,
            b"set" => Op::Set,
            b"add" => Op::Add,
            b"replace" => Op::Replace,
            b"cas" => Op::Cas,
            b"append" => Op::Append,
            b"prepend" => Op::Prepend,
            b"delete" => Op::Delete,
            b"incr" => Op::Incr,
            b"decr" => Op::Decr,
            _ => {
                return Err(Bad::new(
                    "an operation (get, gets, set, add, replace, cas, append, …)",
                    op,
                ));
            }
        };
        out.one(Request {
            time: time(t, SECOND, "timestamp")?,
            key_size: number32(key_size, "key_size")?,
            ttl: number32(ttl, "ttl")?,
            op,
            ..Request::get(key_id(key), size(value_size, "value_size")?)
        });
        Ok(())
    }))
}

/// Where the columns of a CacheLib csv are.
#[derive(Clone, Copy, Default)]
struct CacheLibColumns {
    time: Option<usize>,
    key: usize,
    key_size: Option<usize>,
    op: Option<usize>,
    count: Option<usize>,
    size: Option<usize>,
    ttl: Option<usize>,
    usecase: Option<usize>,
    offset: Option<usize>,
    block: bool,
    all: usize,
}

impl CacheLibColumns {
    fn from_header(line: &[u8]) -> Result<CacheLibColumns, Bad> {
        let mut found = CacheLibColumns::default();
        let mut key = None;
        for (i, name) in line.split(|&b| b == b',').enumerate() {
            found.all = i + 1;
            match name.trim_ascii() {
                b"op_time" => found.time = Some(i),
                b"key" => key = Some(i),
                b"block_id" => {
                    key = Some(i);
                    found.block = true;
                }
                b"key_size" => found.key_size = Some(i),
                b"op" | b"op_name" => found.op = Some(i),
                b"op_count" => found.count = Some(i),
                b"size" | b"io_size" => found.size = Some(i),
                b"io_offset" => found.offset = Some(i),
                b"ttl" => found.ttl = Some(i),
                b"usecase" | b"user_namespace" => found.usecase = Some(i),
                _ => {}
            }
        }
        found.key = key
            .ok_or_else(|| Bad::new("a header that names the column 'key' or 'block_id'", line))?;
        if found.all > 64 {
            return Err(Bad::text(
                "a header of at most 64 columns",
                format!("{} columns", found.all),
            ));
        }
        Ok(found)
    }
}

/// CacheLib's csv, every version (kvcache of 2022 and 2023/24, and the block store's): the header names the columns.
/// `op_count` requests are made of each line. GET_LEASE is a get, SET_LEASE a set; for the block store `get…` is a read
/// of a range and `put…` a write.
pub(crate) fn cachelib() -> Box<dyn Decode> {
    let mut layout: Option<CacheLibColumns> = None;
    let mut blocks = Blocks::default();
    Box::new(Lines(move |line: &[u8], out: &mut Out| {
        let Some(c) = layout else {
            layout = Some(CacheLibColumns::from_header(line)?);
            return Ok(());
        };
        let mut fields: [&[u8]; 64] = [&[]; 64];
        let mut n = 0;
        for (slot, field) in fields.iter_mut().zip(line.split(|&b| b == b',')) {
            *slot = field.trim_ascii();
            n += 1;
        }
        if n < c.all {
            return Err(Bad::new(format!("{} fields as the header names", c.all), line));
        }
        let get = |at: Option<usize>| at.map(|i| fields[i]);
        let op = match (c.block, get(c.op)) {
            (_, None) => Op::Get,
            (false, Some(b"GET" | b"GET_LEASE")) => Op::Get,
            (false, Some(b"SET" | b"SET_LEASE")) => Op::Set,
            (false, Some(b"ADD")) => Op::Add,
            (false, Some(b"DELETE")) => Op::Delete,
            (true, Some(name)) if name.starts_with(b"get") => Op::Read,
            (true, Some(name)) if name.starts_with(b"put") => Op::Write,
            (true, Some(name)) if name.starts_with(b"delete") => Op::Trim,
            (false, Some(name)) => {
                return Err(Bad::new("GET, GET_LEASE, SET, SET_LEASE, ADD or DELETE", name));
            }
            (true, Some(name)) => return Err(Bad::new("an operation get…, put… or delete…", name)),
        };
        let count = get(c.count).map_or(Ok(1), |t| number(t, "op_count"))?;
        let at = get(c.time).map_or(Ok(None), |t| time(t, SECOND, "op_time"))?;
        let id = key_id(fields[c.key]);
        let bytes = get(c.size).map_or(Ok(0), |t| size(t, "size"))?;
        let offset = get(c.offset).map_or(Ok(0), |t| number(t, "io_offset"))?;
        let request = Request {
            time: at,
            // The block store names blocks by text; the id is the block's, which has its own place on the volume.
            offset: if c.block { blocks.place(id, offset, bytes)? } else { offset },
            key_size: get(c.key_size).map_or(Ok(0), |t| number32(t, "key_size"))?,
            ttl: get(c.ttl).map_or(Ok(0), |t| number32(t, "ttl"))?,
            app: get(c.usecase).map_or(Ok(0), |t| number32(t, "usecase"))?,
            op,
            ..Request::get(id, bytes)
        };
        out.run(request, count, 0);
        Ok(())
    }))
}

/// webcachesim's layout, also of the AdaptSize, Wikipedia and LRB traces: time, id, size, blanks between; whole
/// seconds, or a counter where there are no times.
pub(crate) fn webcachesim() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, id, bytes] = words::<3>(line, "time id size")?;
        out.one(Request {
            time: time(t, SECOND, "time")?,
            ..Request::get(key_id(id), size(bytes, "size")?)
        });
        Ok(())
    }))
}

/// Tragen's output: time, id, size, commas between.
pub(crate) fn tragen() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, id, bytes] = columns::<3>(line, b',', "time,id,size")?;
        out.one(Request {
            time: time(t, SECOND, "time")?,
            ..Request::get(key_id(id), size(bytes, "size")?)
        });
        Ok(())
    }))
}

/// IBM object store: time (ms), REST.GET.OBJECT and the like, key, size, first and last byte; blanks between.
pub(crate) fn ibm_cos() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, verb, key] = words::<3>(line, "time_ms REST.VERB.OBJECT key [size]")?;
        let op = match verb {
            b"REST.GET.OBJECT" => Op::Get,
            b"REST.PUT.OBJECT" | b"REST.COPY.OBJECT" => Op::Set,
            b"REST.DELETE.OBJECT" => Op::Delete,
            b"REST.HEAD.OBJECT" => return Ok(()),
            _ => {
                return Err(Bad::new(
                    "REST.GET.OBJECT, REST.PUT.OBJECT, REST.DELETE.OBJECT, …",
                    verb,
                ));
            }
        };
        let bytes = super::text::blanks(line).nth(3).map_or(Ok(0), |s| size(s, "size"))?;
        out.one(Request {
            time: time(t, MILLISECOND, "time")?,
            op,
            ..Request::get(hash_key(key), bytes)
        });
        Ok(())
    }))
}

/// Tencent's photo cache: time, hexadecimal id, format, size category, bytes, …; blanks between. One picture in another
/// format or size is another object.
pub(crate) fn tencent_photo() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [t, id, format, category, bytes] =
            words::<5>(line, "timestamp id format size_category bytes …")?;
        let mut key = Vec::with_capacity(id.len() + format.len() + category.len() + 2);
        for part in [id, b":", format, b":", category] {
            key.extend_from_slice(part);
        }
        out.one(Request {
            time: photo_time(t)?,
            ..Request::get(hash_key(&key), size(bytes, "bytes")?)
        });
        Ok(())
    }))
}

/// Seconds, or `YYYYMMDDhhmmss`, which becomes seconds since 1970 (UTC).
fn photo_time(text: &[u8]) -> Result<Option<Nanos>, Bad> {
    if text.len() != 14 {
        return time(text, SECOND, "timestamp");
    }
    let n = number(text, "timestamp")?;
    let (date, clock) = (n / 1_000_000, n % 1_000_000);
    let (year, month, day) = (date / 10_000, date / 100 % 100, date % 100);
    let (hour, minute, second) = (clock / 10_000, clock / 100 % 100, clock % 100);
    if !(1970..=2200).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return Err(Bad::new("a timestamp YYYYMMDDhhmmss", text));
    }
    // Days since 1970 by the civil calendar (Hinnant's algorithm).
    let y = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = y / 400 * 146_097 + (y % 400) * 365 + (y % 400) / 4 - (y % 400) / 100 + day_of_year
        - 719_468;
    Ok(Some(Nanos::from_secs(days * 86_400 + hour * 3600 + minute * 60 + second)))
}

#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    hash_ids: Vec<u64>,
}

/// Size given to a Mooncake block of 512 tokens when no other is asked for: the trace records hashes of blocks alone.
pub(crate) const MOONCAKE_BLOCK: u64 = 4096;

/// Mooncake's traces of an LLM service: one JSON object a line; each of `hash_ids` is a block of 512 tokens of the
/// KV cache, read in order.
pub(crate) fn mooncake() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let record: MooncakeLine = serde_json::from_slice(line)
            .map_err(|e| Bad::new(format!("JSON with timestamp (ms) and hash_ids ({e})"), line))?;
        let ns = record.timestamp * MILLISECOND as f64;
        if !(ns >= 0.0 && ns < u64::MAX as f64) {
            return Err(Bad::text(
                "a timestamp in milliseconds that is not negative",
                record.timestamp.to_string(),
            ));
        }
        for id in record.hash_ids {
            out.one(Request { time: Some(Nanos(ns as u64)), ..Request::get(id, MOONCAKE_BLOCK) });
        }
        Ok(())
    }))
}

/// One id a line, a number or any text.
pub(crate) fn txt() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        out.one(Request::get(key_id(line.trim_ascii()), 1));
        Ok(())
    }))
}

/// LIRS's traces: one id a line; lines starting with `*` separate phases.
pub(crate) fn lirs() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let id = line.trim_ascii();
        if !id.starts_with(b"*") {
            out.one(Request::get(number(id, "block number")?, 1));
        }
        Ok(())
    }))
}

/// ARC's traces: first block (512 B), blocks, ignored, sequence number. Each block is a request; they are numbers of
/// pages as far as the ARC paper and every simulator since is concerned, so a block counts 1 and has no volume offset.
pub(crate) fn arc() -> Box<dyn Decode> {
    Box::new(Lines(|line: &[u8], out: &mut Out| {
        let [first, count] = words::<2>(line, "first_block blocks ignored sequence")?;
        let (first, count) = (number(first, "first block")?, number(count, "blocks")?);
        out.run(Request::get(first, 1), count, 1);
        Ok(())
    }))
}

/// Columns of a csv file as an option names them: `time-col=2,obj-id-col=5,obj-size-col=4,…` (libCacheSim's names,
/// columns counted from 1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CsvColumns {
    time: Option<usize>,
    id: usize,
    size: Option<usize>,
    op: Option<usize>,
    app: Option<usize>,
    ttl: Option<usize>,
    offset: Option<usize>,
    key_size: Option<usize>,
    class: Option<usize>,
    host: Option<usize>,
    delimiter: u8,
    header: bool,
    time_unit: u64,
}

impl CsvColumns {
    /// Parses the option's text.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    pub fn parse(text: &str) -> Result<CsvColumns, String> {
        let mut c = CsvColumns {
            time: None,
            id: 0,
            size: None,
            op: None,
            app: None,
            ttl: None,
            offset: None,
            key_size: None,
            class: None,
            host: None,
            delimiter: b',',
            header: false,
            time_unit: SECOND,
        };
        // `delimiter=,` holds the separator itself.
        let text = text.replace("delimiter=,,", "delimiter=comma,");
        let text = text
            .strip_suffix("delimiter=,")
            .map_or(text.clone(), |t| format!("{t}delimiter=comma"));
        for part in text.split(',').filter(|p| !p.trim().is_empty()) {
            let (name, value) = part.split_once('=').ok_or_else(|| {
                format!("'{part}' is not a column: write NAME=NUMBER, as in time-col=1")
            })?;
            let column = || match value.trim().parse::<usize>() {
                Ok(n @ 1..=256) => Ok(Some(n)),
                _ => Err(format!("{name}='{value}' is not a column (1 to 256)")),
            };
            let flag = || match value.trim() {
                "1" | "true" => Ok(true),
                "0" | "false" => Ok(false),
                _ => Err(format!("{name}='{value}' is neither true nor false")),
            };
            match name.trim() {
                "time-col" => c.time = column()?,
                "obj-id-col" => c.id = column()?.unwrap_or(0),
                "obj-size-col" => c.size = column()?,
                "op-col" => c.op = column()?,
                "tenant-col" => c.app = column()?,
                "ttl-col" => c.ttl = column()?,
                "offset-col" => c.offset = column()?,
                "key-size-col" => c.key_size = column()?,
                "class-col" => c.class = column()?,
                "host-col" => c.host = column()?,
                "has-header" => c.header = flag()?,
                // Numbers and texts are told apart value by value; the flag is accepted for scripts that give it.
                "obj-id-is-num" => drop(flag()?),
                "time-unit" => {
                    c.time_unit = match value.trim() {
                        "s" => SECOND,
                        "ms" => MILLISECOND,
                        "us" => 1000,
                        "ns" => 1,
                        _ => {
                            return Err(format!("time-unit='{value}' is not one of s, ms, us, ns"));
                        }
                    }
                }
                "delimiter" => {
                    c.delimiter = match value {
                        "comma" => b',',
                        "\\t" | "tab" => b'\t',
                        "space" => b' ',
                        v if v.len() == 1 => v.as_bytes()[0],
                        _ => {
                            return Err(format!(
                                "delimiter='{value}' is not one character, comma, tab or space"
                            ));
                        }
                    }
                }
                _ => {
                    return Err(format!(
                        "unknown column option '{name}'; known are time-col, obj-id-col, obj-size-col, op-col, tenant-col, \
                         ttl-col, offset-col, key-size-col, class-col, host-col, delimiter, has-header, time-unit, obj-id-is-num"
                    ));
                }
            }
        }
        if c.id == 0 {
            return Err(
                "obj-id-col is missing: write it, as in obj-id-col=2 (columns are counted from 1)"
                    .to_owned(),
            );
        }
        Ok(c)
    }
}

/// As [`CsvColumns::parse`] takes it, with every default.
impl std::fmt::Display for CsvColumns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "obj-id-col={}", self.id)?;
        for (name, column) in [
            ("time-col", self.time),
            ("obj-size-col", self.size),
            ("op-col", self.op),
            ("tenant-col", self.app),
            ("ttl-col", self.ttl),
            ("offset-col", self.offset),
            ("key-size-col", self.key_size),
            ("class-col", self.class),
            ("host-col", self.host),
        ] {
            if let Some(column) = column {
                write!(f, ",{name}={column}")?;
            }
        }
        let unit = match self.time_unit {
            SECOND => "s",
            MILLISECOND => "ms",
            1000 => "us",
            _ => "ns",
        };
        write!(f, ",has-header={},time-unit={unit},delimiter=", u8::from(self.header))?;
        match self.delimiter {
            b',' => f.write_str("comma"),
            b'\t' => f.write_str("tab"),
            b' ' => f.write_str("space"),
            other => write!(f, "{}", char::from(other)),
        }
    }
}

impl CsvColumns {
    /// The columns that a header's names tell, and the sentence that says so; `None` where no column is an id.
    pub(crate) fn from_header(line: &[u8]) -> Option<(CsvColumns, String)> {
        let delimiter = *b",;\t".iter().max_by_key(|d| line.iter().filter(|b| b == d).count())?;
        let names: Vec<Vec<u8>> = line
            .split(|&b| b == delimiter)
            .take(256)
            .map(|n| n.trim_ascii().to_ascii_lowercase())
            .collect();
        let find = |wanted: &[&[u8]]| {
            wanted.iter().find_map(|w| names.iter().position(|n| n == w)).map(|i| i + 1)
        };
        let id = find(&[
            b"obj_id",
            b"object_id",
            b"object",
            b"id",
            b"key",
            b"lbn",
            b"lba",
            b"block",
            b"page",
        ])?;
        let c = CsvColumns {
            time: find(&[b"time", b"timestamp", b"ts", b"clock_time"]),
            id,
            size: find(&[b"obj_size", b"object_size", b"size", b"length", b"bytes"]),
            op: find(&[b"op", b"operation", b"type", b"cmd"]),
            app: find(&[b"tenant", b"app", b"application", b"volume"]),
            ttl: find(&[b"ttl"]),
            offset: find(&[b"offset"]),
            key_size: find(&[b"key_size"]),
            class: find(&[b"class"]),
            host: find(&[b"host"]),
            delimiter,
            header: true,
            time_unit: SECOND,
        };
        let show = |n: Option<usize>| n.map_or("none".to_owned(), |n| n.to_string());
        let why = format!(
            "csv with a header: id in column {id}, time {} (taken as seconds), size {}, operation {}; --columns says otherwise",
            show(c.time),
            show(c.size),
            show(c.op)
        );
        Some((c, why))
    }
}

fn csv_op(text: &[u8]) -> Option<Op> {
    let lower = text.to_ascii_lowercase();
    let op = match lower.as_slice() {
        b"r" | b"read" | b"28" | b"0x28" => Op::Read,
        b"w" | b"write" | b"2a" | b"0x2a" => Op::Write,
        b"gets" => Op::Get,
        b"d" | b"t" | b"discard" => Op::Trim,
        name => *Op::ALL.iter().find(|op| op.name().as_bytes() == name)?,
    };
    Some(op)
}

/// A csv file whose columns an option names. Where no column holds offsets, block operations (R, W, read, write, SCSI codes
/// 28 and 2a) are read as gets and sets of the object in the id column, as libCacheSim does; with offsets they stay what
/// they are.
pub(crate) fn csv(c: CsvColumns) -> Box<dyn Decode> {
    let mut header = c.header;
    let optional = [c.time, c.size, c.op, c.app, c.ttl, c.offset, c.key_size, c.class, c.host];
    let last = optional.into_iter().flatten().max().unwrap_or(0).max(c.id);
    Box::new(Lines(move |line: &[u8], out: &mut Out| {
        if std::mem::take(&mut header) {
            return Ok(());
        }
        let mut request = Request::get(0, 1);
        let mut n = 0;
        for (i, field) in line.split(|&b| b == c.delimiter).enumerate().take(last) {
            n = i + 1;
            let field = field.trim_ascii();
            let at = Some(n);
            if n == c.id {
                request.id = key_id(field);
            }
            // A request without a time has nothing there.
            if at == c.time && !field.is_empty() {
                request.time = decimal(field, c.time_unit).map(Nanos);
                if request.time.is_none() {
                    return Err(Bad::new(format!("a time in column {n}"), field));
                }
            }
            if at == c.size {
                request.size = size(field, "size")?;
            }
            if at == c.op {
                request.op = match csv_op(field)
                    .ok_or_else(|| Bad::new("an operation (get, set, R, W, …)", field))?
                {
                    op if c.offset.is_some() => op,
                    Op::Read => Op::Get,
                    Op::Write => Op::Set,
                    Op::Trim => Op::Delete,
                    op => op,
                };
            }
            if at == c.offset {
                request.offset = number(field, "offset")?;
            }
            if at == c.key_size {
                request.key_size = number32(field, "key size")?;
            }
            if at == c.class {
                request.class =
                    *Class::ALL
                        .iter()
                        .find(|class| class.name().as_bytes() == field)
                        .ok_or_else(|| Bad::new("a class (data, metadata, or nothing)", field))?;
            }
            if at == c.host {
                request.host = u16::try_from(number32(field, "host")?)
                    .map_err(|_| Bad::new("a host (at most 65535)", field))?;
            }
            if at == c.app {
                request.app = number32(field, "tenant")?;
            }
            if at == c.ttl {
                request.ttl = number32(field, "ttl")?;
            }
        }
        if n < last {
            return Err(Bad::new(format!("at least {last} columns"), line));
        }
        out.one(request);
        Ok(())
    }))
}
