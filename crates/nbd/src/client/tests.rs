use larder_base::Rng;
use larder_runtime::AlignedBuf;
use proptest::prelude::*;

use super::pending::Pending;
use super::*;
use crate::server::TlsPolicy;
use crate::testing::Bench;
use crate::wire::{Errno, Extent, chunk, chunk_header, simple_reply, transmission};
use larder_runtime::Payload;

/// Passes `bytes` in pieces and collects what comes of them.
fn feed(client: &mut Client, mut bytes: &[u8], piece: usize) -> Vec<Event> {
    let mut events = Vec::new();
    loop {
        loop {
            match client.poll() {
                Event::NeedInput => break,
                Event::Close(why) => {
                    events.push(Event::Close(why));
                    return events;
                }
                event => events.push(event),
            }
        }
        if bytes.is_empty() {
            return events;
        }
        let space = client.space();
        assert!(!space.is_empty());
        let n = piece.min(bytes.len()).min(space.len());
        space[..n].copy_from_slice(&bytes[..n]);
        client.received(n);
        bytes = &bytes[n..];
    }
}

fn take(client: &mut Client) -> Vec<u8> {
    let mut all = Vec::new();
    while !client.output().is_empty() {
        let first = client.output().first().to_vec();
        all.extend_from_slice(&first);
        client.output().sent(first.len());
    }
    all
}

/// Passes bytes between client and server until both are silent.
fn settle(client: &mut Client, server: &mut Bench, piece: usize) -> Vec<Event> {
    let mut events = Vec::new();
    loop {
        let down = server.sent();
        events.extend(feed(client, &down, piece));
        let up = take(client);
        if up.is_empty() && down.is_empty() {
            return events;
        }
        server.feed(&up, piece);
    }
}

fn connected(size: u64) -> (Client, Bench) {
    let mut server = Bench::new(size, TlsPolicy::Off);
    let mut client = Client::new("disk");
    let events = settle(&mut client, &mut server, 77);
    let [Event::Ready(negotiated)] = &events[..] else { panic!("{events:?}") };
    assert_eq!(negotiated.size, size);
    assert!(negotiated.structured && negotiated.allocation == Some(1) && !negotiated.read_only());
    assert_eq!(negotiated.block.preferred, 4096);
    (client, server)
}

fn filled(len: usize, seed: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len);
    buf.iter_mut().enumerate().for_each(|(i, b)| *b = (i as u8).wrapping_mul(31) ^ seed);
    buf
}

#[test]
fn client_and_server_understand_each_other() {
    let (mut client, mut server) = connected(1 << 20);
    let data = Payload::new(filled(20_000, 3));
    client.submit(1, Request::Write { offset: 5000, data: data.clone(), fua: true });
    client.submit(2, Request::Read { offset: 4000, buf: AlignedBuf::zeroed(30_000) });
    client.submit(3, Request::Flush);
    client.submit(4, Request::Read { offset: 100_000, buf: filled(8192, 1) });
    client.submit(5, Request::Trim { offset: 0, len: 4096, fua: false });
    let zeroes =
        Request::WriteZeroes { offset: 5000, len: 10, fua: false, may_punch: false, fast: true };
    client.submit(6, zeroes);
    client.submit(7, Request::Status { offset: 0, len: 100, one: false });
    client.submit(8, Request::Read { offset: (1 << 20) - 1, buf: AlignedBuf::zeroed(2) });
    assert_eq!(client.in_flight(), 8);
    let events = settle(&mut client, &mut server, 1000);
    assert_eq!(events.len(), 8);
    for event in events {
        let Event::Done(Done { token, request, outcome }) = event else { panic!("{event:?}") };
        match (token, request) {
            (2, Request::Read { buf, .. }) => {
                assert!(buf[1000..21_000] == data[..]);
                assert!(buf[..1000].iter().chain(&buf[21_000..]).all(|&b| b == 0));
            }
            (4, Request::Read { buf, .. }) => {
                assert!(buf.iter().all(|&b| b == 0), "a hole is filled in")
            }
            (7, _) => assert_eq!(
                outcome,
                Ok(vec![
                    Extent { len: 50, hole: true, zero: true },
                    Extent { len: 50, hole: false, zero: false }
                ])
            ),
            (8, _) => {
                let failure = outcome.expect_err("beyond the end");
                assert_eq!(failure.errno, Errno::Inval);
                assert!(failure.message.contains("beyond"));
            }
            _ => assert_eq!(outcome, Ok(vec![])),
        }
    }
    assert_eq!(server.requests[0], "write 5000+20000 true");
    assert!(server.requests.iter().any(|r| r.contains("may_punch: false, fast: true")));
    assert!(data.into_buf().is_some(), "nobody holds the payload any longer");
    client.disconnect();
    settle(&mut client, &mut server, 1000);
    assert_eq!(server.closed, Some(None));
}

#[test]
fn an_export_that_is_not_there() {
    let mut server = Bench::new(4096, TlsPolicy::Off);
    let mut client = Client::new("other");
    let events = settle(&mut client, &mut server, 9);
    assert!(
        matches!(&events[..], [Event::Close(why), ..] if why.contains("no export 'other'")),
        "{events:?}"
    );
    let mut server = Bench::new(4096, TlsPolicy::Required);
    let mut client = Client::new("disk");
    let events = settle(&mut client, &mut server, 9);
    assert!(matches!(&events[..], [Event::Close(why), ..] if why.contains("TLS")), "{events:?}");
}

/// A server that knows nothing but EXPORT_NAME, fixed newstyle or not.
#[test]
fn older_servers() {
    for fixed in [0u8, 1] {
        let mut client = Client::new("disk");
        let mut greeting = b"NBDMAGICIHAVEOPT\0".to_vec();
        greeting.push(fixed);
        assert!(feed(&mut client, &greeting, 99).is_empty());
        let said = take(&mut client);
        assert_eq!(said[..4], [0, 0, 0, fixed]);
        assert_eq!(said[15], if fixed == 1 { 8 } else { 1 }, "STRUCTURED_REPLY or EXPORT_NAME");
        if fixed == 1 {
            for code in [8u8, 7] {
                let mut unsup = 0x0003_e889_0455_65a9u64.to_be_bytes().to_vec();
                unsup.extend_from_slice(&[0, 0, 0, code, 0x80, 0, 0, 1, 0, 0, 0, 0]);
                assert!(feed(&mut client, &unsup, 99).is_empty());
            }
            take(&mut client);
        }
        let mut answer = 4096u64.to_be_bytes().to_vec();
        answer.extend_from_slice(&[0, 5]);
        answer.extend_from_slice(&[0; 124]);
        let events = feed(&mut client, &answer, 13);
        let [Event::Ready(negotiated)] = &events[..] else { panic!("{events:?}") };
        assert!(negotiated.has(transmission::SEND_FLUSH) && !negotiated.structured);
        // Simple replies, then.
        client.submit(1, Request::Read { offset: 0, buf: AlignedBuf::zeroed(3) });
        client.submit(2, Request::Flush);
        let mut replies = simple_reply(0, 2).to_vec();
        replies.extend_from_slice(&simple_reply(0, 1));
        replies.extend_from_slice(b"abc");
        let events = feed(&mut client, &replies, 4);
        assert!(matches!(&events[0], Event::Done(Done { token: 2, outcome: Ok(_), .. })));
        assert!(
            matches!(&events[1], Event::Done(Done { token: 1, request: Request::Read { buf, .. }, .. }) if buf[..] == *b"abc")
        );
    }
}

#[test]
fn what_is_not_an_nbd_server() {
    let mut client = Client::new("");
    let events = feed(&mut client, b"HTTP/1.1 400 Bad Request", 99);
    assert!(matches!(&events[..], [Event::Close(why)] if why.contains("not an NBD server")));
    let mut client = Client::new("");
    let mut old = b"NBDMAGIC".to_vec();
    old.extend_from_slice(&0x0000_4202_8186_1253u64.to_be_bytes());
    let events = feed(&mut client, &old, 99);
    assert!(matches!(&events[..], [Event::Close(why)] if why.contains("old style")), "{events:?}");
}

/// Replies out of order and in pieces; each way to be wrong closes, and gives back what was not answered.
#[test]
fn wrong_replies() {
    let data = |cookie, offset: u64, bytes: &[u8], flags| {
        let mut out =
            chunk_header(flags, chunk::OFFSET_DATA, cookie, bytes.len() as u32 + 8).to_vec();
        out.extend_from_slice(&offset.to_be_bytes());
        out.extend_from_slice(bytes);
        out
    };
    let (mut client, _server) = connected(1 << 20);
    client.submit(1, Request::Read { offset: 100, buf: filled(6, 9) });
    let mut bytes = data(1, 104, b"ef", 0);
    bytes.extend(data(1, 100, b"ab", 0));
    let mut hole = chunk_header(chunk::DONE, chunk::OFFSET_HOLE, 1, 12).to_vec();
    hole.extend_from_slice(&102u64.to_be_bytes());
    hole.extend_from_slice(&2u32.to_be_bytes());
    bytes.extend(&hole);
    let events = feed(&mut client, &bytes, 1);
    assert!(
        matches!(&events[..], [Event::Done(Done { request: Request::Read { buf, .. }, .. })] if buf[..] == *b"ab\0\0ef")
    );

    let status = |id: u32, extents: &[(u32, u32)]| {
        let mut out =
            chunk_header(chunk::DONE, chunk::BLOCK_STATUS, 2, 4 + 8 * extents.len() as u32)
                .to_vec();
        out.extend_from_slice(&id.to_be_bytes());
        for (len, flags) in extents {
            out.extend_from_slice(&len.to_be_bytes());
            out.extend_from_slice(&flags.to_be_bytes());
        }
        out
    };
    let error = |errno: u32, message: u16, body: &[u8]| {
        let mut out = chunk_header(chunk::DONE, chunk::ERROR, 2, 6 + body.len() as u32).to_vec();
        out.extend_from_slice(&errno.to_be_bytes());
        out.extend_from_slice(&message.to_be_bytes());
        out.extend_from_slice(body);
        out
    };
    let mut twice = data(1, 100, b"abc", 0);
    twice.extend(data(1, 102, b"cdef", chunk::DONE));
    let wrong: Vec<(&str, Vec<u8>)> = vec![
        ("no request", simple_reply(0, 77).to_vec()),
        ("simple reply", simple_reply(0, 1).to_vec()),
        ("before all", data(1, 100, b"abc", chunk::DONE)),
        ("in reply to a read", data(1, 99, b"abc", 0)),
        ("in reply to a read", data(1, 104, b"abc", 0)),
        ("in reply to a read", data(1, u64::MAX, b"abc", 0)),
        ("twice", twice),
        ("reads nothing", data(2, 100, b"abc", 0)),
        ("chunk of type 0x1", chunk_header(0, chunk::OFFSET_DATA, 1, 8).to_vec()),
        ("chunk of type 0x0", chunk_header(0, chunk::NONE, 1, 0).to_vec()),
        ("chunk of type 0x63", chunk_header(0, 99, 1, 0).to_vec()),
        ("chunk of type 0x8001", chunk_header(0, chunk::ERROR, 1, u32::MAX).to_vec()),
        ("nobody asked", status(7, &[(5, 0)])),
        ("an extent of 0", status(1, &[(0, 0)])),
        ("an extent of 1", status(1, &[(100, 0), (1, 0)])),
        ("without extents", chunk_header(chunk::DONE, chunk::NONE, 2, 0).to_vec()),
        ("without an error", error(0, 0, &[])),
        ("longer than its chunk", error(5, 9, b"abc")),
        ("0x12345678", vec![0x12, 0x34, 0x56, 0x78, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ];
    for (why, bytes) in wrong {
        let (mut client, _server) = connected(1 << 20);
        client.submit(10, Request::Read { offset: 100, buf: filled(6, 9) });
        client.submit(20, Request::Status { offset: 0, len: 100, one: false });
        let events = feed(&mut client, &bytes, 5);
        let [Event::Close(reason)] = &events[..] else { panic!("{why}: {events:?}") };
        assert!(reason.contains(why), "{reason} is not {why}");
        let left = client.abandon();
        assert_eq!(left.iter().map(|l| l.0).collect::<Vec<_>>(), [10, 20], "{why}");
    }
    // An error with its message, and an unknown kind of error, end the request only.
    for kind in [chunk::ERROR, chunk::ERROR_BIT + 99] {
        let (mut client, _server) = connected(1 << 20);
        client.submit(10, Request::Read { offset: 100, buf: filled(6, 9) });
        let mut bytes = chunk_header(chunk::DONE, kind, 1, 9).to_vec();
        bytes.extend_from_slice(&[0, 0, 0, 28, 0, 3]);
        bytes.extend_from_slice(b"no\n");
        let events = feed(&mut client, &bytes, 5);
        let [Event::Done(Done { outcome: Err(failure), .. })] = &events[..] else { panic!() };
        assert_eq!((failure.errno, &failure.message[..]), (Errno::NoSpc, "no"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The pieces of a read, against a plain map of its bytes.
    #[test]
    fn pieces_fill_a_read_exactly_once(list in proptest::collection::vec((0u64..40, 0u64..12), 1..20)) {
        let mut pending = Pending::new(1, Request::Read { offset: 8, buf: AlignedBuf::zeroed(24) });
        let mut seen = [false; 24];
        for (offset, len) in list {
            let range = offset.saturating_sub(8) as usize..(offset + len).saturating_sub(8) as usize;
            let fits = offset >= 8 && len > 0 && range.end <= 24 && !seen[range.clone()].contains(&true);
            match pending.piece(offset, len) {
                Ok(start) => {
                    prop_assert!(fits);
                    prop_assert_eq!(start as u64, offset - 8);
                    seen[range].fill(true);
                }
                Err(_) => {
                    prop_assert!(!fits);
                    break;
                }
            }
            prop_assert_eq!(pending.whole().is_ok(), !seen.contains(&false));
        }
    }
}

/// Mutated answers: no panic, no standstill, every operation comes back once.
#[test]
fn mutated_answers() {
    let mut rng = Rng::new(11);
    let ops = |client: &mut Client| {
        client.submit(
            1,
            Request::Write { offset: 0, data: Payload::new(filled(6000, 1)), fua: false },
        );
        client.submit(2, Request::Read { offset: 0, buf: AlignedBuf::zeroed(5000) });
        client.submit(3, Request::Status { offset: 0, len: 100, one: false });
        client.submit(4, Request::Read { offset: 7000, buf: AlignedBuf::zeroed(5000) });
        client.submit(5, Request::Read { offset: 1 << 20, buf: AlignedBuf::zeroed(5) });
        client.submit(6, Request::Flush);
    };
    // Both directions of a good conversation.
    let (mut client, mut server) = connected(1 << 20);
    ops(&mut client);
    server.feed(&take(&mut client), 1 << 20);
    let answers = server.sent();
    let greeting = {
        let mut server = Bench::new(1 << 20, TlsPolicy::Off);
        let mut client = Client::new("disk");
        let mut all = Vec::new();
        loop {
            let down = server.sent();
            if down.is_empty() {
                break all;
            }
            all.extend_from_slice(&down);
            feed(&mut client, &down, 99);
            server.feed(&take(&mut client), 99);
        }
    };
    let (mut closed, mut whole) = (0, 0);
    for round in 0..3000 {
        let mutate = |rng: &mut Rng, bytes: &mut Vec<u8>| {
            for _ in 0..rng.range(1, 4) {
                let at = rng.below(bytes.len() as u64) as usize;
                match rng.below(3) {
                    0 => bytes[at] ^= 1 << rng.below(8),
                    1 => bytes[at] = rng.below(256) as u8,
                    _ => drop(bytes.drain(at..(at + 1 + rng.below(20) as usize).min(bytes.len()))),
                }
                if bytes.is_empty() {
                    return;
                }
            }
        };
        let mut hello = greeting.clone();
        let mut rest = answers.clone();
        if round % 2 == 0 {
            mutate(&mut rng, &mut hello);
        } else {
            mutate(&mut rng, &mut rest);
        }
        let mut client = Client::new("disk");
        let piece = 1 + rng.below(4000) as usize;
        let events = feed(&mut client, &hello, piece);
        if !matches!(events[..], [Event::Ready(_)]) {
            closed += 1;
            continue;
        }
        ops(&mut client);
        let events = feed(&mut client, &rest, piece);
        let mut tokens: Vec<u64> = events
            .iter()
            .filter_map(|e| if let Event::Done(d) = e { Some(d.token) } else { None })
            .collect();
        whole += u32::from(tokens.len() == 6);
        tokens.extend(client.abandon().iter().map(|l| l.0));
        tokens.sort_unstable();
        assert_eq!(tokens, [1, 2, 3, 4, 5, 6]);
    }
    assert!(closed > 300 && whole > 300, "{closed} {whole}");
}
