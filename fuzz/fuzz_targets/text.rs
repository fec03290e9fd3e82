//! Whole client streams, text and meta mixed, against the model engine: no panic, no standstill, bounded memory.
//! The first byte says how the stream is cut.
#![no_main]

use std::sync::Arc;

use larder_base::{Nanos, Now, UnixSecs};
use larder_kv::connection::{
    Admin, BigBuffers, ConnContext, ConnStats, Connection, Progress, ProtocolConfig, SideEffects, SMALL,
};
use larder_kv::model::ModelEngine;
use libfuzzer_sys::fuzz_target;

struct NoAdmin;

impl Admin for NoAdmin {
    fn stats(&mut self, _arguments: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(b"END\r\n");
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((cut, mut stream)) = data.split_first() else { return };
    let piece = usize::from(*cut) + 1;
    let now = Now { mono: Nanos::ZERO, wall: UnixSecs(1_700_000_000) };
    let config = ProtocolConfig { debug_commands: true, ..ProtocolConfig::default() };
    let engine = ModelEngine::new(4096);
    let (mut stats, mut reads) = (ConnStats::default(), Vec::new());
    let (mut side, mut admin) = (SideEffects::default(), NoAdmin);
    let mut conn = Connection::new(&config, Arc::new(BigBuffers::default()));
    let turns = 16 + 4 * data.len();
    for turn in 0.. {
        assert!(turn < turns, "no progress");
        let mut ctx = ConnContext {
            config: &config,
            stats: &mut stats,
            reads: &mut reads,
            side: &mut side,
            admin: &mut admin,
            detail: false,
            app: None,
            watch: None,
        };
        let progress = conn.process(now, &engine, &mut ctx);
        conn.sent(conn.output().len(), now);
        assert!(conn.memory() <= 4 * SMALL);
        match progress {
            Progress::NeedInput if !stream.is_empty() => {
                let n = conn.feed(&stream[..piece.min(stream.len())], now);
                assert!(n > 0);
                stream = &stream[n..];
            }
            Progress::OutputFull => {}
            Progress::NeedInput | Progress::Close | Progress::Shutdown { .. } => return,
            Progress::WaitingForFlash | Progress::WaitingForMemory | Progress::WaitingForRoom => {
                panic!("nothing to wait for")
            }
        }
    }
});
