//! Pipelines whose objects lie on flash: order, barriers, and the same bytes as without any delay.

use proptest::prelude::*;

use super::harness::{Client, Delayed};
use crate::connection::*;
use crate::model::ModelEngine;

/// Sends all of `input`, completes flash reads in an order drawn from `seed`, and returns the output.
fn run_shuffled(engine: &Delayed, input: &[u8], cuts: &[usize], seed: u64) -> Vec<u8> {
    let mut client: Client<Delayed> = Client::new();
    let mut rng = larder_base::Rng::new(seed);
    let mut input = input;
    let mut cuts = cuts.iter().copied().cycle();
    loop {
        let progress = client.process(engine);
        assert!(client.waiting.len() <= READS_MAX);
        if rng.next_u64().is_multiple_of(2) {
            client.drain();
        }
        match progress {
            Progress::WaitingForFlash => {
                assert!(!client.waiting.is_empty(), "a wait for flash has a read to wait for");
                let index = rng.next_u64() as usize % client.waiting.len();
                client.flash_done(engine, index);
            }
            Progress::OutputFull => client.drain(),
            Progress::NeedInput
                if !client.waiting.is_empty() && rng.next_u64().is_multiple_of(2) =>
            {
                let index = rng.next_u64() as usize % client.waiting.len();
                client.flash_done(engine, index);
            }
            Progress::NeedInput if !input.is_empty() => {
                let n = cuts.next().unwrap_or(1).clamp(1, input.len());
                let n = client.conn.feed(&input[..n], client.now);
                assert!(n > 0, "a connection that wants input has room for it");
                input = &input[n..];
            }
            Progress::NeedInput if !client.waiting.is_empty() => client.flash_done(engine, 0),
            Progress::NeedInput | Progress::Close => {
                client.drain();
                return client.received;
            }
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn key() -> impl Strategy<Value = String> {
    prop_oneof![6 => (0..6u8).prop_map(|k| format!("k{k}")), 1 => Just("n".repeat(250)), 1 => Just("none".to_string())]
}

fn body() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[0-9]{1,4}",
        3 => "[a-z]{0,20}",
        1 => (0..40_000usize).prop_map(|n| "v".repeat(n)),
    ]
}

fn command() -> impl Strategy<Value = String> {
    let noreply = || prop_oneof![4 => Just(""), 1 => Just(" noreply")];
    prop_oneof![
        6 => (prop_oneof![Just("get"), Just("gets")], prop::collection::vec(key(), 1..50))
            .prop_map(|(c, keys)| format!("{c} {}\r\n", keys.join(" "))),
        1 => (prop_oneof![Just("gat"), Just("gats")], -1..100i32, prop::collection::vec(key(), 1..8))
            .prop_map(|(c, t, keys)| format!("{c} {t} {}\r\n", keys.join(" "))),
        4 => (prop_oneof![Just("set"), Just("add"), Just("replace"), Just("append"), Just("prepend")],
              key(), 0..9u32, prop_oneof![8 => Just(0), 1 => -1..50i32], body(), noreply())
            .prop_map(|(c, k, f, t, b, q)| format!("{c} {k} {f} {t} {}{q}\r\n{b}\r\n", b.len())),
        2 => (key(), body(), 0..20u64)
            .prop_map(|(k, b, cas)| format!("cas {k} 0 0 {} {cas}\r\n{b}\r\n", b.len())),
        2 => (key(), noreply()).prop_map(|(k, q)| format!("delete {k}{q}\r\n")),
        2 => (prop_oneof![Just("incr"), Just("decr")], key(), any::<u8>(), noreply())
            .prop_map(|(c, k, n, q)| format!("{c} {k} {n}{q}\r\n")),
        1 => (key(), -1..100i32, noreply()).prop_map(|(k, t, q)| format!("touch {k} {t}{q}\r\n")),
        6 => (key(), prop::sample::subsequence(
                vec!["v", "s", "t", "f", "c", "k", "h", "l", "q", "Oab", "N30", "R20", "T40", "u", "E77"], 0..8))
            .prop_map(|(k, f)| format!("mg {k} {}\r\n", f.join(" "))),
        3 => (key(), body(), prop::sample::subsequence(
                vec!["c", "k", "q", "Oxy", "s", "F5", "T30", "I", "C4", "E99", "MA", "N10"], 0..6))
            .prop_map(|(k, b, f)| format!("ms {k} {} {}\r\n{b}\r\n", b.len(), f.join(" "))),
        2 => (key(), prop::sample::subsequence(vec!["q", "k", "I", "T9", "x", "C3", "E50"], 0..4))
            .prop_map(|(k, f)| format!("md {k} {}\r\n", f.join(" "))),
        2 => (key(), prop::sample::subsequence(vec!["q", "v", "t", "c", "k", "N20", "J7", "D3", "M-", "T9"], 0..6))
            .prop_map(|(k, f)| format!("ma {k} {}\r\n", f.join(" "))),
        1 => key().prop_map(|k| format!("me {k}\r\n")),
        1 => prop_oneof![Just("mn\r\n"), Just("version\r\n"), Just("flush_all\r\n"), Just("bogus\r\n"), Just("\r\n")]
            .prop_map(str::to_string),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, failure_persistence: None, ..ProptestConfig::default() })]

    /// However the stream is cut, and whichever objects lie on flash and in whatever order their reads complete, the
    /// client sees the same bytes.
    #[test]
    fn cuts_and_flash_delays_do_not_show(
        commands in prop::collection::vec(command(), 1..40),
        cuts in prop::collection::vec(1usize..3000, 1..20),
        permille in prop_oneof![Just(0u64), Just(300), Just(1000)],
        seed: u64,
    ) {
        let stream = commands.concat();
        let engine = ModelEngine::default();
        let (want, end) = Client::new().run(&engine, stream.as_bytes());
        prop_assert_eq!(end, Progress::NeedInput);
        let got = run_shuffled(&Delayed::new(permille, seed), stream.as_bytes(), &cuts, seed);
        prop_assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(&want));
    }
}

#[test]
fn a_multiget_reads_in_parallel_up_to_the_limit() {
    let engine = Delayed::new(0, 1);
    let mut client: Client<Delayed> = Client::new();
    let mut sets = String::new();
    let mut want = String::new();
    for i in 0..100 {
        sets += &format!("set k{i} 0 0 2 noreply\r\n{i:02}\r\n");
        want += &format!("VALUE k{i} 0 2\r\n{i:02}\r\n");
    }
    let _ = client.run(&engine, sets.as_bytes());
    let engine = Delayed { permille: 1000, ..engine };
    let keys: Vec<String> = (0..100).map(|i| format!("k{i}")).collect();
    client.conn.feed(format!("get {}\r\nmn\r\n", keys.join(" ")).as_bytes(), client.now);
    assert_eq!(client.process(&engine), Progress::WaitingForFlash);
    assert_eq!(client.waiting.len(), READS_MAX);
    // The last comes first: nothing can be sent before the first is there.
    client.flash_done(&engine, READS_MAX - 1);
    while client.process(&engine) == Progress::WaitingForFlash || !client.waiting.is_empty() {
        let last = client.waiting.len() - 1;
        client.flash_done(&engine, last);
    }
    client.drain();
    assert_eq!(String::from_utf8_lossy(&client.received), format!("{want}END\r\nMN\r\n"));
}

#[test]
fn a_change_waits_for_earlier_reads_and_holds_up_later_ones() {
    let engine = Delayed::new(0, 1);
    let mut client: Client<Delayed> = Client::new();
    let _ = client.run(&engine, b"set a 0 0 1\r\n1\r\nset b 0 0 1\r\n2\r\n");
    let engine = Delayed { permille: 1000, ..engine };
    client.conn.feed(b"get a\r\nget b\r\nincr a 1\r\nget a\r\nget b\r\n", client.now);
    assert_eq!(client.process(&engine), Progress::WaitingForFlash);
    assert_eq!(client.waiting.len(), 2, "both gets read, the incr waits for them");
    assert!(!client.conn.wants_input());
    let mut rounds = 0;
    while client.waiting.len() > 1 {
        client.flash_done(&engine, 0);
        let _ = client.process(&engine);
        rounds += 1;
        assert!(rounds < 100);
    }
    // One read is left: of a get, or of the incr alone.
    while !client.waiting.is_empty() {
        assert!(client.waiting.len() <= 2);
        client.flash_done(&engine, 0);
        let _ = client.process(&engine);
    }
    client.drain();
    assert_eq!(
        String::from_utf8_lossy(&client.received),
        "VALUE a 0 1\r\n1\r\nEND\r\nVALUE b 0 1\r\n2\r\nEND\r\n2\r\nVALUE a 0 1\r\n2\r\nEND\r\nVALUE b 0 1\r\n2\r\nEND\r\n"
    );
}

#[test]
fn quit_answers_what_came_before_it() {
    let engine = Delayed::new(1000, 3);
    let mut client: Client<Delayed> = Client::new();
    client.conn.feed(b"get a\r\nquit\r\nget b\r\n", client.now);
    assert_eq!(client.process(&engine), Progress::WaitingForFlash);
    while !client.waiting.is_empty() {
        client.flash_done(&engine, 0);
    }
    assert_eq!(client.process(&engine), Progress::Close);
    client.drain();
    assert_eq!(client.received, b"END\r\n");
}

#[test]
fn late_and_unknown_tokens_are_ignored() {
    let engine = Delayed::new(1000, 3);
    let mut client: Client<Delayed> = Client::new();
    client.conn.feed(b"get a\r\n", client.now);
    let _ = client.process(&engine);
    let (token, read) = client.waiting[0];
    client.waiting.push_back((ReadToken(token.0 + 7), read));
    client.flash_done(&engine, 1);
    while !client.waiting.is_empty() {
        client.flash_done(&engine, 0);
    }
    client.waiting.push_back((token, read));
    client.flash_done(&engine, 0);
    client.drain();
    assert_eq!(client.received, b"END\r\n");
}

/// Bytes that look like commands often enough to reach every parser: mutations of valid streams.
#[test]
fn garbage_never_panics() {
    let seeds: [&[u8]; 8] = [
        b"get a b c\r\nset a 1 2 3\r\nabc\r\n",
        b"ms a 3 T0 F1 I C5 E6 MA N3 q k Ox b\r\nabc\r\n",
        b"mg YWJj b v t s c f h l k q u N3 R4 T5 E6 C7 Oabc\r\nmn\r\n",
        b"ma a D1 J2 N3 M- t c v q k\r\nmd a x I T1 C2 E3 q k\r\nme a b\r\n",
        b"cas a 0 0 1 5 noreply\r\nx\r\nincr a 5\r\ndecr a 5\r\ntouch a 5\r\ngat 5 a b\r\n",
        b"stats items\r\nflush_all 5\r\nverbosity 1\r\nlru_crawler metadump all\r\nextstore max_frag 0.5\r\n",
        b"cache_memlimit 64\r\nslabs automove 1\r\nshutdown\r\nversion\r\nwatch\r\n",
        b"append a 0 0 2147483645\r\nprepend a 0 0 0\r\n\r\ngets  a \n",
    ];
    let alphabet = b"\r\n  0123456789-abgmsTNRCEq\0\xff=";
    let mut rng = larder_base::Rng::new(7);
    let mut draw = move |n: usize| rng.next_u64() as usize % n;
    for round in 0..4_000u64 {
        let mut input = seeds[draw(seeds.len())].to_vec();
        for _ in 0..draw(8) {
            let at = draw(input.len());
            match draw(4) {
                0 => input[at] = alphabet[draw(alphabet.len())],
                1 => {
                    input.remove(at);
                }
                2 => input.insert(at, alphabet[draw(alphabet.len())]),
                _ => {
                    let run = vec![input[at]; draw(400)];
                    input.splice(at..at, run);
                }
            }
            if input.is_empty() {
                input.push(b' ');
            }
        }
        let engine = Delayed::new(round % 3 * 300, round);
        let mut client: Client<Delayed> = Client::new();
        let mut rest = &input[..];
        // The budget of turns catches a connection that neither goes on nor waits for anything.
        for turn in 0.. {
            assert!(turn < 10_000, "no progress on {input:?}");
            let progress = client.process(&engine);
            client.drain();
            assert!(client.conn.memory() <= 4 * SMALL, "{} bytes held", client.conn.memory());
            match progress {
                _ if !client.waiting.is_empty() => client.flash_done(&engine, 0),
                Progress::NeedInput if !rest.is_empty() => {
                    let n = (1 + draw(200)).min(rest.len());
                    rest = &rest[client.conn.feed(&rest[..n], client.now)..];
                }
                Progress::NeedInput | Progress::Close | Progress::Shutdown { .. } => break,
                Progress::OutputFull
                | Progress::WaitingForFlash
                | Progress::WaitingForMemory
                | Progress::WaitingForRoom => {}
            }
        }
    }
}
