//! What tests speak to a server with: a volume in memory, and requests as bytes.
#![allow(missing_docs, reason = "for tests")]

use std::sync::Arc;

use larder_runtime::BufferPool;

use crate::server::{
    BlockSizes, Command, Connection, Event, Export, ExportInfo, Exports, Limits, Request, TlsPolicy,
};
use crate::wire::{Extent, RequestHeader, option};

/// A volume in memory behind the protocol.
pub struct Memory {
    pub info: ExportInfo,
}

impl Export for Memory {
    fn info(&self) -> ExportInfo {
        self.info.clone()
    }
}

pub struct One(pub Arc<Memory>);

impl Exports for One {
    type Export = Memory;
    fn find(&self, name: &str) -> Option<Arc<Memory>> {
        (name == self.0.info.name || name.is_empty()).then(|| self.0.clone())
    }
    fn list(&self) -> Vec<(String, String)> {
        vec![(self.0.info.name.clone(), self.0.info.description.clone())]
    }
}

pub fn one(size: u64) -> One {
    One(Arc::new(Memory {
        info: ExportInfo {
            name: "disk".into(),
            description: "a test".into(),
            size,
            read_only: false,
            flush: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            cache: true,
            multi_conn: true,
            block: BlockSizes::default(),
        },
    }))
}

/// A connection with its volume's bytes, its pool and what it has said.
pub struct Bench {
    pub exports: One,
    pub conn: Connection<Memory>,
    pub pool: BufferPool,
    pub disk: Vec<u8>,
    pub closed: Option<Option<String>>,
    pub requests: Vec<String>,
    pub tls: bool,
}

impl Bench {
    pub fn new(size: u64, tls: TlsPolicy) -> Bench {
        Bench {
            exports: one(size),
            conn: Connection::new(tls, Limits::default()),
            pool: BufferPool::new(128 << 20),
            disk: vec![0; size as usize],
            closed: None,
            requests: Vec::new(),
            tls: false,
        }
    }

    /// Everything there is to send.
    pub fn sent(&mut self) -> Vec<u8> {
        let mut all = Vec::new();
        while !self.conn.output().is_empty() {
            let first = self.conn.output().first().to_vec();
            all.extend_from_slice(&first);
            self.conn.output().sent(first.len());
        }
        self.conn.recycle(&mut self.pool);
        all
    }

    /// Feeds bytes in pieces, carrying out what they ask for.
    pub fn feed(&mut self, mut bytes: &[u8], piece: usize) {
        loop {
            self.run();
            if bytes.is_empty() || self.closed.is_some() {
                return;
            }
            let space = self.conn.space();
            assert!(!space.is_empty());
            let n = piece.min(bytes.len()).min(space.len());
            space[..n].copy_from_slice(&bytes[..n]);
            self.conn.received(n);
            bytes = &bytes[n..];
        }
    }

    pub fn run(&mut self) {
        loop {
            match self.conn.poll(&self.exports, &mut self.pool) {
                Event::NeedInput => return,
                Event::Starved => panic!("nothing is held for long here"),
                Event::StartTls => self.tls = true,
                Event::Close(reason) => {
                    self.closed = Some(reason);
                    return;
                }
                Event::Request(request) => self.execute(request),
            }
        }
    }

    fn execute(&mut self, Request { cookie, command }: Request) {
        let size = self.disk.len() as u64;
        let inside = |offset: u64, len: usize| assert!(len > 0 && offset + len as u64 <= size);
        let text = match &command {
            Command::Read { offset, buf } => format!("read {offset}+{}", buf.len()),
            Command::Write { offset, buf, fua } => format!("write {offset}+{} {fua}", buf.len()),
            other => format!("{other:?}"),
        };
        self.requests.push(text);
        match command {
            Command::Read { offset, mut buf } => {
                inside(offset, buf.len());
                let len = buf.len();
                buf.copy_from_slice(&self.disk[offset as usize..][..len]);
                self.conn.data(cookie, offset, buf, Vec::new());
            }
            Command::Write { offset, buf, .. } => {
                inside(offset, buf.len());
                self.disk[offset as usize..][..buf.len()].copy_from_slice(&buf);
                self.conn.written(cookie, buf.capacity());
                self.pool.give(buf);
            }
            Command::Flush => self.conn.done(cookie),
            Command::Cache { offset, len } => {
                inside(offset, len as usize);
                self.conn.done(cookie);
            }
            Command::Trim { offset, len, .. } | Command::WriteZeroes { offset, len, .. } => {
                inside(offset, len as usize);
                self.disk[offset as usize..][..len as usize].fill(0);
                self.conn.done(cookie);
            }
            Command::BlockStatus { offset, len, one } => {
                inside(offset, len as usize);
                let half = Extent { len: len.div_ceil(2), hole: true, zero: true };
                let rest = Extent { len, hole: false, zero: false };
                self.conn.extents(cookie, len, one, [half, rest]);
            }
        }
    }
}

pub const HELLO: [u8; 4] = [0, 0, 0, 3];

pub fn opt(code: u32, data: &[u8]) -> Vec<u8> {
    let mut out = b"IHAVEOPT".to_vec();
    out.extend_from_slice(&code.to_be_bytes());
    out.extend_from_slice(&(data.len() as u32).to_be_bytes());
    out.extend_from_slice(data);
    out
}

pub fn string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u32).to_be_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out
}

pub fn go(name: &str) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&[0, 1, 0, 3]);
    opt(option::GO, &data)
}

pub fn request(kind: u16, flags: u16, cookie: u64, offset: u64, length: u32) -> Vec<u8> {
    RequestHeader { flags, command: kind, cookie, offset, length }.encode().to_vec()
}

/// A connection in transmission, with structured replies and `base:allocation` if wanted.
pub fn open(size: u64, structured: bool) -> Bench {
    let mut bench = Bench::new(size, TlsPolicy::Off);
    bench.feed(&HELLO, 4);
    if structured {
        bench.feed(&opt(option::STRUCTURED_REPLY, &[]), 99);
        let mut data = string("disk");
        data.extend_from_slice(&[0, 0, 0, 1]);
        data.extend_from_slice(&string("base:allocation"));
        bench.feed(&opt(option::SET_META_CONTEXT, &data), 99);
    }
    bench.feed(&go("disk"), 99);
    assert!(bench.conn.in_transmission());
    bench.sent();
    bench
}
