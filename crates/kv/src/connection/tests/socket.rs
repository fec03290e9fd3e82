//! A client over a real socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use super::harness::{TestAdmin, at};
use crate::connection::*;
use crate::model::ModelEngine;

/// Serves one blocking connection to its end.
fn serve(mut stream: TcpStream, engine: &ModelEngine) {
    let config = ProtocolConfig::default();
    let (mut stats, mut reads) = (ConnStats::default(), Vec::new());
    let (mut side, mut admin) = (SideEffects::default(), TestAdmin::default());
    let mut conn = Connection::new(&config, Arc::new(BigBuffers::default()));
    loop {
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
        let progress = conn.process(at(0), engine, &mut ctx);
        stream.write_all(conn.output()).unwrap();
        conn.sent(conn.output().len(), at(0));
        match progress {
            Progress::NeedInput => match stream.read(conn.space()).unwrap() {
                0 => return,
                n => conn.received(n, at(0)),
            },
            Progress::OutputFull => {}
            Progress::Close => return,
            other => panic!("unexpected {other:?}"),
        }
    }
}

#[test]
fn talks_over_tcp() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let server =
        std::thread::spawn(move || serve(listener.accept().unwrap().0, &ModelEngine::default()));
    let mut stream = TcpStream::connect(addr).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let mut line = |want: &str| {
        let mut got = String::new();
        answers.read_line(&mut got).unwrap();
        assert_eq!(got, want);
    };
    let big = "b".repeat(300_000);
    write!(stream, "set foo 1 0 3\r\nbar\r\nget foo\r\nset big 0 0 {}\r\n{big}\r\n", big.len())
        .unwrap();
    line("STORED\r\n");
    line("VALUE foo 1 3\r\n");
    line("bar\r\n");
    line("END\r\n");
    line("STORED\r\n");
    write!(stream, "mg big v\r\nmg foo v t\r\nquit\r\n").unwrap();
    line("VA 300000\r\n");
    line(&format!("{big}\r\n"));
    line("VA 3 t-1\r\n");
    line("bar\r\n");
    line("");
    server.join().unwrap();
}
