//! Whole client streams against the NBD server's side: no panic, no standstill, bounded memory, and no request outside
//! the export. The first byte says how the stream is cut.
#![no_main]

use std::sync::Arc;

use larder_nbd::server::{
    BlockSizes, Command, Connection, Event, Export, ExportInfo, Exports, Limits, TlsPolicy,
};
use larder_nbd::wire::{Errno, Extent};
use larder_runtime::BufferPool;
use libfuzzer_sys::fuzz_target;

const SIZE: u64 = 1 << 16;

struct Volume;

impl Export for Volume {
    fn info(&self) -> ExportInfo {
        ExportInfo {
            name: "disk".into(),
            description: String::new(),
            size: SIZE,
            read_only: false,
            flush: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            cache: true,
            multi_conn: true,
            block: BlockSizes::default(),
        }
    }
}

impl Exports for Volume {
    type Export = Volume;
    fn find(&self, name: &str) -> Option<Arc<Volume>> {
        (name == "disk").then(|| Arc::new(Volume))
    }
    fn list(&self) -> Vec<(String, String)> {
        vec![("disk".into(), String::new())]
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((cut, mut stream)) = data.split_first() else { return };
    let piece = usize::from(*cut) + 1;
    let mut pool = BufferPool::new(1 << 20);
    let mut conn: Connection<Volume> = Connection::new(TlsPolicy::Offered, Limits::default());
    for turn in 0.. {
        assert!(turn < 16 + 4 * data.len(), "no progress");
        let (cookie, command) = match conn.poll(&Volume, &mut pool) {
            Event::NeedInput if stream.is_empty() => return,
            Event::NeedInput => {
                let space = conn.space();
                let n = piece.min(stream.len()).min(space.len());
                assert!(n > 0);
                space[..n].copy_from_slice(&stream[..n]);
                conn.received(n);
                stream = &stream[n..];
                continue;
            }
            Event::Starved => {
                let unsent = conn.output().len();
                conn.output().sent(unsent);
                conn.recycle(&mut pool);
                // A buffer larger than the pool is never to be had.
                if unsent == 0 {
                    return;
                }
                continue;
            }
            Event::StartTls => {
                conn.tls_started();
                continue;
            }
            Event::Close(_) => return,
            Event::Request(request) => (request.cookie, request.command),
        };
        let inside = |offset: u64, len: u64| assert!(len > 0 && offset + len <= SIZE);
        match command {
            Command::Read { offset, buf } => {
                inside(offset, buf.len() as u64);
                conn.data(cookie, offset, buf, Vec::new());
            }
            Command::Write { offset, buf, .. } => {
                inside(offset, buf.len() as u64);
                conn.written(cookie, buf.capacity());
                pool.give(buf);
            }
            Command::Flush => conn.done(cookie),
            Command::Trim { offset, len, .. } | Command::Cache { offset, len } => {
                inside(offset, u64::from(len));
                conn.done(cookie);
            }
            Command::WriteZeroes { offset, len, .. } => {
                inside(offset, u64::from(len));
                conn.fail(cookie, 0, Errno::NotSup, "not fast");
            }
            Command::BlockStatus { offset, len, one } => {
                inside(offset, u64::from(len));
                conn.extents(cookie, len, one, [Extent { len: 1, hole: true, zero: true }]);
            }
        }
    }
});
