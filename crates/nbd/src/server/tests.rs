use std::sync::Arc;

use larder_base::Rng;
use larder_runtime::{AlignedBuf, BufferPool};
use proptest::prelude::*;

use super::*;
use crate::testing::{Bench, HELLO, Memory, One, go, one, open, opt, request, string};
use crate::wire::{Errno, MAX_PAYLOAD, command, flag, option, reply};

/// Replies to options: option, type, payload.
fn option_replies(mut bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut out = Vec::new();
    while !bytes.is_empty() {
        assert_eq!(bytes[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
        let word = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        let len = word(16) as usize;
        out.push((word(8), word(12), bytes[20..20 + len].to_vec()));
        bytes = &bytes[20 + len..];
    }
    out
}

#[test]
fn the_greeting_and_the_old_way_in() {
    let mut bench = Bench::new(1 << 20, TlsPolicy::Off);
    assert_eq!(bench.sent(), b"NBDMAGICIHAVEOPT\0\x03");
    bench.feed(&[0, 0, 0, 1], 1);
    bench.feed(&opt(option::EXPORT_NAME, b"disk"), 3);
    let mut expected = (1u64 << 20).to_be_bytes().to_vec();
    // HAS_FLAGS, FLUSH, FUA, TRIM, WRITE_ZEROES, MULTI_CONN, CACHE, FAST_ZERO; no DF.
    expected.extend_from_slice(&0x0d6du16.to_be_bytes());
    expected.extend_from_slice(&[0; 124]);
    assert_eq!(bench.sent(), expected);
    assert!(bench.conn.in_transmission());

    let mut bench = Bench::new(1 << 20, TlsPolicy::Off);
    bench.sent();
    bench.feed(&HELLO, 4);
    bench.feed(&opt(option::EXPORT_NAME, b"nothing"), 99);
    assert_eq!(bench.closed, Some(Some("no export has the name 'nothing'".into())));

    let mut bench = Bench::new(1 << 20, TlsPolicy::Off);
    bench.feed(&[0, 0, 0, 4], 4);
    assert!(matches!(&bench.closed, Some(Some(why)) if why.contains("client flags")));
}

#[test]
fn options_and_their_answers() {
    let mut bench = Bench::new(1 << 20, TlsPolicy::Off);
    bench.sent();
    bench.feed(&HELLO, 4);
    let mut ask = |code: u32, data: &[u8]| {
        bench.feed(&opt(code, data), 7);
        let replies = option_replies(&bench.sent());
        assert!(replies.iter().all(|r| r.0 == code));
        replies.into_iter().map(|(_, kind, data)| (kind, data)).collect::<Vec<_>>()
    };
    let kinds = |replies: &[(u32, Vec<u8>)]| replies.iter().map(|r| r.0).collect::<Vec<_>>();

    let list = ask(option::LIST, &[]);
    assert_eq!(list[0], (reply::SERVER, b"\0\0\0\x04diska test".to_vec()));
    assert_eq!(kinds(&list), [reply::SERVER, reply::ACK]);
    assert_eq!(kinds(&ask(option::LIST, b"x")), [reply::ERR_INVALID]);
    assert_eq!(kinds(&ask(4711, b"x")), [reply::ERR_UNSUP]);
    assert_eq!(kinds(&ask(option::STARTTLS, &[])), [reply::ERR_POLICY]);

    // Metadata contexts need structured replies.
    let mut everything = string("disk");
    everything.extend_from_slice(&[0, 0, 0, 0]);
    assert_eq!(kinds(&ask(option::LIST_META_CONTEXT, &everything)), [reply::ERR_INVALID]);
    assert_eq!(kinds(&ask(option::STRUCTURED_REPLY, b"x")), [reply::ERR_INVALID]);
    assert_eq!(kinds(&ask(option::STRUCTURED_REPLY, &[])), [reply::ACK]);
    let listed = ask(option::LIST_META_CONTEXT, &everything);
    assert_eq!(listed[0], (reply::META_CONTEXT, b"\0\0\0\0base:allocation".to_vec()));
    assert_eq!(kinds(&ask(option::SET_META_CONTEXT, &everything)), [reply::ACK]);
    let mut query = string("disk");
    query.extend_from_slice(&[0, 0, 0, 2]);
    query.extend_from_slice(&string("x-none:what"));
    query.extend_from_slice(&string("base:allocation"));
    let set = ask(option::SET_META_CONTEXT, &query);
    assert_eq!(set[0], (reply::META_CONTEXT, b"\0\0\0\x01base:allocation".to_vec()));
    assert_eq!(kinds(&set), [reply::META_CONTEXT, reply::ACK]);
    query.push(0);
    assert_eq!(kinds(&ask(option::SET_META_CONTEXT, &query)), [reply::ERR_INVALID]);
    let mut unknown = string("other");
    unknown.extend_from_slice(&[0, 0, 0, 0]);
    assert_eq!(kinds(&ask(option::LIST_META_CONTEXT, &unknown)), [reply::ERR_UNKNOWN]);

    let mut all = string("disk");
    all.extend_from_slice(&[0, 5, 0, 0, 0, 1, 0, 2, 0, 3, 0, 99]);
    let info = ask(option::INFO, &all);
    assert_eq!(kinds(&info), [reply::INFO, reply::INFO, reply::INFO, reply::INFO, reply::ACK]);
    assert_eq!(info[0].1, [0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0x0d, 0xed]);
    assert_eq!(info[1].1, b"\0\x01disk");
    assert_eq!(info[2].1, b"\0\x02a test");
    assert_eq!(info[3].1, [0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 2, 0, 0, 0]);
    for bad in
        [&b""[..], b"\0\0\0", b"\0\0\0\x05disk\0\0", b"\0\0\0\x04disk", b"\0\0\0\x04disk\0\x02\0\0"]
    {
        assert_eq!(kinds(&ask(option::INFO, bad)), [reply::ERR_INVALID], "{bad:?}");
        assert_eq!(kinds(&ask(option::GO, bad)), [reply::ERR_INVALID], "{bad:?}");
    }
    assert_eq!(kinds(&ask(option::GO, b"\0\0\0\x05other\0\0")), [reply::ERR_UNKNOWN]);
    assert_eq!(kinds(&ask(option::GO, b"\0\0\0\x02\xff\xfe\0\0")), [reply::ERR_INVALID]);
    assert_eq!(kinds(&ask(option::ABORT, &[])), [reply::ACK]);
    assert_eq!(bench.closed, Some(None));
}

/// Many exports, many queries, and options that are too long: each has an answer, and the client goes on.
#[test]
fn clients_that_want_much() {
    struct Many(Vec<Arc<Memory>>);
    impl Exports for Many {
        type Export = Memory;
        fn find(&self, name: &str) -> Option<Arc<Memory>> {
            self.0.iter().find(|e| e.info.name == name).cloned()
        }
        fn list(&self) -> Vec<(String, String)> {
            self.0.iter().map(|e| (e.info.name.clone(), String::new())).collect()
        }
    }
    let template = one(4096).0.info();
    let export =
        |i| Arc::new(Memory { info: ExportInfo { name: format!("disk{i}"), ..template.clone() } });
    let exports = Many((0..1000).map(export).collect());
    let mut conn: Connection<Memory> = Connection::new(TlsPolicy::Off, Limits::default());
    let mut pool = BufferPool::new(1 << 20);
    let mut ask = |bytes: &[u8]| {
        let mut left = bytes;
        let mut out = Vec::new();
        let mut closed = None;
        loop {
            match conn.poll(&exports, &mut pool) {
                Event::Close(reason) => closed = Some(reason),
                event => assert!(matches!(event, Event::NeedInput), "{event:?}"),
            }
            while !conn.output().is_empty() {
                let first = conn.output().first().to_vec();
                out.extend_from_slice(&first);
                conn.output().sent(first.len());
            }
            if left.is_empty() || closed.is_some() {
                return (out, closed);
            }
            let space = conn.space();
            let n = space.len().min(left.len()).min(50_000);
            space[..n].copy_from_slice(&left[..n]);
            conn.received(n);
            left = &left[n..];
        }
    };
    ask(&HELLO);
    let list = option_replies(&ask(&opt(option::LIST, &[])).0);
    assert_eq!(list.len(), 1001);
    assert_eq!(list[999], (option::LIST, reply::SERVER, b"\0\0\0\x07disk999".to_vec()));
    assert_eq!(option_replies(&ask(&opt(option::STRUCTURED_REPLY, &[])).0)[0].1, reply::ACK);
    // Three hundred contexts that nobody has, and one that is known.
    let mut query = string("disk7");
    query.extend_from_slice(&301u32.to_be_bytes());
    (0..300).for_each(|i| query.extend(string(&format!("x-other:context{i}"))));
    query.extend(string("base:allocation"));
    let set = option_replies(&ask(&opt(option::SET_META_CONTEXT, &query)).0);
    assert_eq!(set.iter().map(|r| r.1).collect::<Vec<_>>(), [reply::META_CONTEXT, reply::ACK]);
    // More of them than there is room for.
    for len in [16 * 1024 + 1, 100_000, 1 << 20] {
        let (out, closed) = ask(&opt(option::SET_META_CONTEXT, &vec![0; len]));
        let answer = option_replies(&out);
        assert_eq!((answer.len(), answer[0].1, closed), (1, reply::ERR_TOO_BIG, None));
    }
    // The last that was set holds.
    assert_eq!(option_replies(&ask(&go("disk7")).0).last().unwrap().1, reply::ACK);
    let (out, _) = ask(&request(command::BLOCK_STATUS, 0, 1, 4096, 1));
    assert_eq!(out[..4], 0x668e_33efu32.to_be_bytes(), "a structured reply");
    assert_eq!((&out[6..8], &out[20..24]), (&[0x80, 1][..], &[0, 0, 0, 22][..]), "past the end");

    // A length that no client means, and a name that is too long: there is nothing to be said.
    for (code, len) in [(option::LIST, 2 << 20), (option::EXPORT_NAME, 20_000)] {
        let mut bench = Bench::new(4096, TlsPolicy::Off);
        bench.feed(&HELLO, 4);
        bench.feed(&opt(code, &vec![b'x'; len]), 4096);
        assert!(matches!(&bench.closed, Some(Some(why)) if why.contains("bytes")));
    }
}

#[test]
fn tls_first_where_it_is_required() {
    let mut bench = Bench::new(4096, TlsPolicy::Required);
    bench.sent();
    bench.feed(&HELLO, 4);
    bench.feed(&go("disk"), 99);
    bench.feed(&opt(option::LIST, &[]), 99);
    let kinds: Vec<u32> = option_replies(&bench.sent()).iter().map(|r| r.1).collect();
    assert_eq!(kinds, [reply::ERR_TLS_REQD, reply::ERR_TLS_REQD]);
    bench.feed(&opt(option::STARTTLS, &[]), 99);
    assert!(bench.tls);
    bench.sent();
    bench.conn.tls_started();
    bench.feed(&opt(option::STARTTLS, &[]), 99);
    assert_eq!(option_replies(&bench.sent())[0].1, reply::ERR_INVALID);
    bench.feed(&go("disk"), 99);
    assert!(bench.conn.in_transmission());

    // A name sent without TLS, plain text smuggled behind STARTTLS.
    let mut bench = Bench::new(4096, TlsPolicy::Required);
    bench.feed(&HELLO, 4);
    bench.feed(&opt(option::EXPORT_NAME, b"disk"), 99);
    assert!(matches!(bench.closed, Some(Some(_))));
    let mut bench = Bench::new(4096, TlsPolicy::Offered);
    bench.feed(&HELLO, 4);
    let mut both = opt(option::STARTTLS, &[]);
    both.extend_from_slice(&go("disk"));
    bench.feed(&both, 99);
    assert!(matches!(&bench.closed, Some(Some(why)) if why.contains("STARTTLS")) && !bench.tls);
}

/// What was agreed before TLS is void after it.
#[test]
fn tls_forgets_what_went_before() {
    let mut bench = Bench::new(4096, TlsPolicy::Offered);
    bench.feed(&HELLO, 4);
    bench.feed(&opt(option::STRUCTURED_REPLY, &[]), 99);
    bench.feed(&opt(option::STARTTLS, &[]), 99);
    bench.conn.tls_started();
    bench.feed(&go("disk"), 99);
    bench.sent();
    bench.feed(&request(command::READ, 0, 1, 0, 1), 99);
    assert_eq!(
        bench.sent(),
        [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0][..]].concat()
    );
}

#[test]
fn simple_replies() {
    let mut bench = open(1 << 20, false);
    let mut write = request(command::WRITE, flag::FUA, 7, 4096, 4);
    write.extend_from_slice(b"milk");
    bench.feed(&write, 5);
    bench.feed(&request(command::READ, 0, 8, 4095, 6), 5);
    bench.feed(&request(command::FLUSH, 0, 9, 0, 0), 5);
    bench.feed(&request(command::READ, 0, 10, 1 << 20, 1), 5);
    bench.feed(&request(command::DISC, 0, 0, 0, 0), 5);
    #[rustfmt::skip]
    assert_eq!(bench.sent(), [
        0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7,
        0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, b'm', b'i', b'l', b'k', 0,
        0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9,
        0x67, 0x44, 0x66, 0x98, 0, 0, 0, 22, 0, 0, 0, 0, 0, 0, 0, 10,
    ]);
    assert_eq!(bench.requests, ["write 4096+4 true", "read 4095+6", "Flush"]);
    assert_eq!(bench.closed, Some(None));
}

#[test]
fn what_is_taken_makes_room() {
    let mut bench = open(1 << 20, false);
    let room = bench.conn.space().len();
    for cookie in 0..4 {
        bench.feed(&request(command::READ, 0, cookie, 4096, 512), 28);
        assert_eq!(bench.requests.len() as u64, cookie + 1);
        assert_eq!(bench.conn.space().len(), room);
    }
}

#[test]
fn structured_replies() {
    let mut bench = open(1 << 20, true);
    bench.disk[8192] = 9;
    let head = |kind: [u8; 2], cookie: u8, len: u8| {
        let mut out = vec![0x66, 0x8e, 0x33, 0xef, 0, 1, kind[0], kind[1]];
        out.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, cookie, 0, 0, 0, len]);
        out
    };
    bench.feed(&request(command::READ, flag::DF, 1, 8192, 2), 99);
    let mut expected = head([0, 1], 1, 10);
    expected.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0x20, 0, 9, 0]);
    assert_eq!(bench.sent(), expected);

    bench.feed(&request(command::READ, 0, 2, 16384, 8192), 99);
    let mut expected = head([0, 2], 2, 12);
    expected.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0x20, 0]);
    assert_eq!(bench.sent(), expected, "zeroes go as a hole");

    bench.feed(&request(command::BLOCK_STATUS, 0, 3, 0, 1000), 99);
    let mut expected = head([0, 5], 3, 20);
    expected.extend_from_slice(&[0, 0, 0, 1, 0, 0, 1, 0xf4, 0, 0, 0, 3, 0, 0, 1, 0xf4, 0, 0, 0, 0]);
    assert_eq!(bench.sent(), expected);
    bench.feed(&request(command::BLOCK_STATUS, flag::REQ_ONE, 4, 0, 1000), 99);
    let mut expected = head([0, 5], 4, 12);
    expected.extend_from_slice(&[0, 0, 0, 1, 0, 0, 1, 0xf4, 0, 0, 0, 3]);
    assert_eq!(bench.sent(), expected);

    bench.feed(&request(command::READ, 0, 5, 1 << 20, 1), 99);
    let sent = bench.sent();
    assert_eq!(sent[6..8], [0x80, 1]);
    assert_eq!(sent[20..24], [0, 0, 0, 22]);
    assert_eq!(&sent[26..], b"READ: the range ends beyond the export");
}

/// One row for each way to be refused; the connection goes on after each.
#[test]
fn what_is_refused_and_how() {
    let size = 1u64 << 20;
    let table: &[(u16, u16, u64, u32, Errno)] = &[
        (command::READ, 0, size - 1, 2, Errno::Inval),
        (command::READ, 0, u64::MAX, 2, Errno::Inval),
        (command::READ, 0, 0, 0, Errno::Inval),
        (command::READ, 0, 0, MAX_PAYLOAD + 1, Errno::Inval),
        (command::READ, flag::NO_HOLE, 0, 1, Errno::Inval),
        (command::READ, 1 << 15, 0, 1, Errno::Inval),
        (command::WRITE, 0, size - 1, 2, Errno::NoSpc),
        (command::WRITE, 0, u64::MAX - 1, 2, Errno::NoSpc),
        (command::WRITE, 0, 0, 0, Errno::Inval),
        (command::WRITE, flag::DF, 0, 3, Errno::Inval),
        (command::FLUSH, 0, 1, 0, Errno::Inval),
        (command::FLUSH, 0, 0, 1, Errno::Inval),
        (command::TRIM, 0, size, 1, Errno::Inval),
        (command::TRIM, flag::NO_HOLE, 0, 1, Errno::Inval),
        (command::WRITE_ZEROES, 0, size, 1, Errno::NoSpc),
        (command::WRITE_ZEROES, flag::REQ_ONE, 0, 1, Errno::Inval),
        (command::CACHE, 0, size, 1, Errno::Inval),
        (command::BLOCK_STATUS, 0, size, 1, Errno::Inval),
        (command::BLOCK_STATUS, 0, 0, 0, Errno::Inval),
        (8, 0, 0, 1, Errno::Inval),
        (99, 0, 0, 1, Errno::Inval),
    ];
    for structured in [false, true] {
        let mut bench = open(size, structured);
        for (i, &(kind, flags, offset, length, errno)) in table.iter().enumerate() {
            let mut bytes = request(kind, flags, i as u64, offset, length);
            if kind == command::WRITE {
                bytes.resize(bytes.len() + length as usize, b'x');
            }
            bench.feed(&bytes, 13);
            let sent = bench.sent();
            let at = if structured { 20 } else { 4 };
            assert_eq!(sent[at..at + 4], errno.code().to_be_bytes(), "row {i}, {structured}");
        }
        assert!(bench.requests.is_empty());
        assert!(bench.disk.iter().all(|&b| b == 0));
        assert!(bench.closed.is_none());
        assert!(!bench.conn.partial());
    }
    // Without the context agreed upon; without FAST_ZERO offered; read-only.
    let mut bench = open(size, false);
    bench.feed(&request(command::BLOCK_STATUS, 0, 1, 0, 1), 99);
    assert_eq!(bench.sent()[4..8], [0, 0, 0, 22]);
    let mut bench = Bench::new(size, TlsPolicy::Off);
    let info = ExportInfo { read_only: true, ..bench.exports.0.info.clone() };
    assert_eq!(info.transmission_flags(true) & 0b1110_0010, 0b1000_0010);
    bench.exports = One(Arc::new(Memory { info }));
    bench.feed(&HELLO, 4);
    bench.feed(&go("disk"), 99);
    bench.sent();
    for kind in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
        let mut bytes = request(kind, 0, 1, 0, 5);
        if kind == command::WRITE {
            bytes.extend_from_slice(b"abcde");
        }
        bench.feed(&bytes, 3);
        assert_eq!(bench.sent()[4..8], [0, 0, 0, 1], "{kind}");
    }
    bench.feed(&request(command::READ, 0, 1, 0, 5), 3);
    assert_eq!(bench.sent().len(), 21);
}

#[test]
fn a_write_too_long_to_skip_and_a_bad_magic_close() {
    let mut bench = open(1 << 20, true);
    bench.feed(&request(command::WRITE, 0, 1, 0, u32::MAX), 99);
    assert_eq!(bench.closed, Some(Some("a write of 4294967295 bytes".into())));
    let mut bench = open(1 << 20, true);
    bench.feed(&[0; 28], 99);
    assert!(matches!(&bench.closed, Some(Some(why)) if why.contains("0x00000000")));
    let mut bench = Bench::new(1 << 20, TlsPolicy::Off);
    bench.feed(&HELLO, 4);
    let mut long = b"IHAVEOPT".to_vec();
    long.extend_from_slice(&[0, 0, 0, 3, 0xff, 0xff, 0xff, 0xff]);
    bench.feed(&long, 99);
    assert!(matches!(bench.closed, Some(Some(_))));
}

/// A client that asks and does not read is made to wait; nothing is taken beyond the limits.
#[test]
fn limits_are_kept() {
    let exports = one(1 << 20);
    let mut pool = BufferPool::new(1 << 20);
    let limits = Limits { requests: 4, bytes: 64 << 10 };
    let mut conn: Connection<Memory> = Connection::new(TlsPolicy::Off, limits);
    let mut bytes = HELLO.to_vec();
    bytes.extend_from_slice(&go("disk"));
    for i in 0..10 {
        bytes.extend_from_slice(&request(command::READ, 0, i, 0, 40 << 10));
    }
    let put = |conn: &mut Connection<Memory>, bytes: &[u8]| {
        conn.space()[..bytes.len()].copy_from_slice(bytes);
        conn.received(bytes.len());
    };
    put(&mut conn, &bytes);
    let take =
        |conn: &mut Connection<Memory>, pool: &mut BufferPool| match conn.poll(&exports, pool) {
            Event::Request(Request { cookie, command: Command::Read { offset, buf } }) => {
                Some((cookie, offset, buf))
            }
            Event::Starved => None,
            other => panic!("{other:?}"),
        };
    let (cookie, offset, buf) = take(&mut conn, &mut pool).expect("one is always let through");
    assert!(take(&mut conn, &mut pool).is_none());
    conn.data(cookie, offset, buf, Vec::new());
    assert!(take(&mut conn, &mut pool).is_none(), "unsent answers count");
    let all = conn.output().len();
    conn.output().sent(all);
    conn.recycle(&mut pool);
    assert!(take(&mut conn, &mut pool).is_some());
    // A dry pool starves too.
    let mut dry = BufferPool::new(0);
    let mut conn: Connection<Memory> = Connection::new(TlsPolicy::Off, Limits::default());
    put(&mut conn, &bytes);
    assert!(matches!(conn.poll(&exports, &mut dry), Event::Starved));
    // So do many small requests.
    let mut conn: Connection<Memory> = Connection::new(TlsPolicy::Off, limits);
    let mut small = HELLO.to_vec();
    small.extend_from_slice(&go("disk"));
    (0..10).for_each(|i| small.extend_from_slice(&request(command::FLUSH, 0, i, 0, 0)));
    put(&mut conn, &small);
    for _ in 0..4 {
        assert!(matches!(conn.poll(&exports, &mut pool), Event::Request(_)));
    }
    assert!(matches!(conn.poll(&exports, &mut pool), Event::Starved));
    conn.done(0);
    assert!(matches!(conn.poll(&exports, &mut pool), Event::Request(_)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// However the stream is cut, the volume and the answers are the same.
    #[test]
    fn cuts_do_not_matter(
        ops in proptest::collection::vec((0u8..6, 0u64..60_000, 1u32..9000, any::<u8>()), 1..20),
        piece in 1usize..40_000,
        structured in any::<bool>(),
    ) {
        let mut stream = Vec::new();
        let mut model = vec![0u8; 1 << 16];
        for (i, &(kind, offset, len, fill)) in ops.iter().enumerate() {
            let fits = offset + u64::from(len) <= model.len() as u64;
            let range = offset as usize..(offset + u64::from(len)).min(model.len() as u64) as usize;
            match kind {
                0 | 1 => {
                    stream.extend(request(command::WRITE, u16::from(kind), i as u64, offset, len));
                    stream.resize(stream.len() + len as usize, fill);
                    if fits { model[range].fill(fill) }
                }
                2 => {
                    stream.extend(request(command::WRITE_ZEROES, flag::NO_HOLE, i as u64, offset, len));
                    if fits { model[range].fill(0) }
                }
                3 => stream.extend(request(command::FLUSH, 0, i as u64, 0, 0)),
                _ => stream.extend(request(command::READ, 0, i as u64, offset, len)),
            }
        }
        let (mut whole, mut cut) = (open(1 << 16, structured), open(1 << 16, structured));
        whole.feed(&stream, stream.len());
        cut.feed(&stream, piece);
        prop_assert!(whole.disk == model);
        prop_assert!(cut.disk == model);
        prop_assert!(whole.sent() == cut.sent());
        prop_assert_eq!(whole.conn.under_way(), 0);
    }
}

/// Mutated streams: no panic, no standstill, memory within the pool, and what is asked of the volume lies within it
/// (`Bench::execute` checks).
#[test]
fn mutated_streams() {
    let mut seed = HELLO.to_vec();
    seed.extend(opt(option::LIST, &[]));
    seed.extend(opt(option::STRUCTURED_REPLY, &[]));
    let mut query = string("disk");
    query.extend_from_slice(&[0, 0, 0, 1]);
    query.extend(string("base:allocation"));
    seed.extend(opt(option::SET_META_CONTEXT, &query));
    seed.extend(go("disk"));
    let handshake = seed.len() as u64;
    for i in 0..6u64 {
        let mut write = request(command::WRITE, 0, i, i * 100, 50);
        write.resize(28 + 50, 1);
        seed.extend(write);
        seed.extend(request(command::READ, flag::DF, i, i * 70, 6000));
        seed.extend(request(command::TRIM, flag::FUA, i, i * 70, 80));
        seed.extend(request(command::WRITE_ZEROES, flag::FAST_ZERO, i, i * 70, 80));
        seed.extend(request(command::BLOCK_STATUS, 0, i, 0, 80));
        seed.extend(request(command::CACHE, 0, i, 0, 80));
    }
    let mut rng = Rng::new(2026);
    let (mut reached, mut closed) = (0, 0);
    for round in 0..4000 {
        let mut bytes = seed.clone();
        for _ in 0..rng.range(1, 6) {
            // Half of them behind the handshake, which few mutants survive.
            let from = if rng.chance(0.5) { handshake } else { 0 };
            let at = rng.range(from, bytes.len() as u64 - 1) as usize;
            match rng.below(4) {
                0 => bytes[at] = rng.below(256) as u8,
                1 => bytes[at] ^= 1 << rng.below(8),
                2 => drop(bytes.drain(at..(at + 1 + rng.below(40) as usize).min(bytes.len()))),
                _ => bytes.insert(at, rng.below(256) as u8),
            }
            if bytes.len() as u64 <= handshake {
                break;
            }
        }
        let mut bench =
            Bench::new(8192, if round % 5 == 0 { TlsPolicy::Offered } else { TlsPolicy::Off });
        bench.feed(&bytes, 1 + rng.below(300) as usize);
        reached += u32::from(bench.conn.in_transmission());
        closed += u32::from(bench.closed.is_some());
        assert!(bench.pool.allocated() <= 70 << 20);
        bench.sent();
        bench.conn.give_back(&mut bench.pool);
    }
    assert!(reached > 1000 && closed > 300, "{reached} {closed}");
}

#[test]
fn zeroes_are_told_from_data() {
    let mut buf = AlignedBuf::zeroed(10_001);
    for at in [0, 15, 16, 79, 80, 4095, 4096, 9999, 10_000] {
        assert!(super::connection::is_zero(&buf));
        buf[at] = 1;
        assert!(!super::connection::is_zero(&buf), "{at}");
        buf[at] = 0;
    }
}
