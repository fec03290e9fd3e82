//! Requests and the exact bytes that answer them.

use super::harness::{Client, at};
use crate::connection::{Progress, ProtocolConfig};
use crate::model::ModelEngine;
use crate::protocol::auth::AuthFile;

/// Plays a conversation: lines of request, then `=>` and the answer, `~` for CR LF, on one engine and connection.
fn play(script: &[(&str, &str)]) {
    let engine = ModelEngine::default();
    let mut client = Client::new();
    play_on(&engine, &mut client, script);
}

fn play_on(engine: &ModelEngine, client: &mut Client<ModelEngine>, script: &[(&str, &str)]) {
    for (request, want) in script {
        let (got, _) = client.run(engine, request.replace('~', "\r\n").as_bytes());
        let got = String::from_utf8_lossy(&got).replace("\r\n", "~");
        assert_eq!(got, *want, "answer to {request:?}");
    }
}

#[test]
fn storage() {
    let usage = "CLIENT_ERROR bad command line format.  Usage: delete <key> [noreply]~";
    play(&[
        ("get foo~", "END~"),
        ("set foo 5 0 6~fooval~", "STORED~"),
        ("get foo~", "VALUE foo 5 6~fooval~END~"),
        ("gets foo~", "VALUE foo 5 6 1~fooval~END~"),
        ("get foo bar foo~", "VALUE foo 5 6~fooval~VALUE foo 5 6~fooval~END~"),
        ("get  foo  \n", "VALUE foo 5 6~fooval~END~"),
        ("add foo 0 0 1~x~", "NOT_STORED~"),
        ("add bar 0 0 1~x~", "STORED~"),
        ("replace bar 4294967295 0 2~yy~", "STORED~"),
        ("replace none 0 0 1~x~", "NOT_STORED~"),
        ("append bar 9 0 1~z~get bar~", "STORED~VALUE bar 4294967295 3~yyz~END~"),
        ("prepend bar 9 0 1~a~get bar~", "STORED~VALUE bar 4294967295 4~ayyz~END~"),
        ("append none 0 0 1~a~", "NOT_STORED~"),
        ("cas foo 0 0 1 7~x~", "EXISTS~"),
        ("cas foo 0 0 1 0~x~", "EXISTS~"),
        ("cas none 0 0 1 7~x~", "NOT_FOUND~"),
        ("cas foo 0 0 1 1~x~", "STORED~"),
        ("set e 0 0 0~~get e~", "STORED~VALUE e 0 0~~END~"),
        ("delete foo~delete foo~", "DELETED~NOT_FOUND~"),
        ("delete e 0~delete e 0 noreply~", "DELETED~"),
        ("set e 0 0 1~x~delete e b c d~get e~", &format!("STORED~{usage}VALUE e 0 1~x~END~")),
    ]);
}

#[test]
fn whatever_follows_the_key_of_a_deletion_is_ignored() {
    // What memcached 1.6.45 answers.
    play(&[
        ("set k 0 0 1~a~delete k x~get k~", "STORED~DELETED~END~"),
        ("set k 0 0 1~a~delete k 10~delete k 10~", "STORED~DELETED~NOT_FOUND~"),
        ("set k 0 0 1~a~delete k x noreply~mn~get k~", "STORED~MN~END~"),
        ("delete k noreply x~", "NOT_FOUND~"),
    ]);
}

#[test]
fn an_exptime_beyond_31_bits_is_memcacheds() {
    // By strtol into 32 bits for storage commands; refused elsewhere.
    play(&[
        ("set k 0 2147483648 1~a~mg k t~", "STORED~EN~"),
        ("set k 0 4294967295 1~a~mg k t~", "STORED~EN~"),
        ("set k 0 4294967296 1~a~mg k t~", "STORED~HD t-1~"),
        ("set k 0 4294967396 1~a~mg k t~", "STORED~HD t100~"),
        ("set k 0 +5 1~a~mg k t~", "STORED~HD t5~"),
        ("set k 0 99999999999999999999 1~a~", "CLIENT_ERROR bad command line format~"),
        ("touch k 2147483648~", "CLIENT_ERROR invalid exptime argument~"),
        ("gat 4294967396 k~", "CLIENT_ERROR invalid exptime argument~"),
        ("mg k T4294967396~", "CLIENT_ERROR bad token in command line format~"),
        ("flush_all 4294967396~", "CLIENT_ERROR invalid exptime argument~"),
    ]);
}

#[test]
fn the_flags_of_mg_take_effect_in_their_order() {
    // What memcached 1.6.45 answers.
    play(&[
        ("set k 0 10 1~a~mg k R30 T100 t v~", "STORED~VA 1 t100 W~a~"),
        ("mg k t R30 T100~", "HD t100 Z~"),
        ("set k 0 10 1~a~mg k T100 R30 t~", "STORED~HD t100~"),
        ("set k 0 0 1~a~mg k R30 T100 t~", "STORED~HD t100~"),
        ("set k 0 0 1~a~mg k T5 R30 t~", "STORED~HD t5 W~"),
        ("set k 0 10 1~a~mg k t T100~mg k t~", "STORED~HD t10~HD t100~"),
        ("mg n1 N60 t~mg n1 t~", "HD t60 W~HD t60 Z~"),
        ("mg n2 t N60~mg n2 t~", "HD t-1 W~HD t60 Z~"),
        ("mg n5 N60 T30 t~mg n5 t~", "HD t30 W~HD t30 Z~"),
        ("mg n6 T30 N60 t~mg n6 t~", "HD t60 W~HD t60 Z~"),
        ("ma n7 N60 T30 t~mg n7 t~", "HD t30~HD t30~"),
        ("ma n8 T30 N60 t~mg n8 t~", "HD t60~HD t60~"),
    ]);
}

#[test]
fn a_binary_client_is_hung_up_on_at_once() {
    let engine = ModelEngine::default();
    let mut client: Client<ModelEngine> = Client::new();
    // A get of "k" in the binary protocol: no end of line anywhere.
    let mut request = vec![0u8; 25];
    request[0] = 0x80;
    request[3] = 1;
    request[11] = 1;
    request[24] = b'k';
    let (answer, progress) = client.run(&engine, &request);
    assert_eq!((answer, progress), (Vec::new(), Progress::Close));
    assert_eq!(client.stats.binary_refused, 1);
    // The same byte in a later line is a bad command, as memcached says.
    play(&[("mn~\u{80}~", "MN~ERROR~")]);
}

#[test]
fn without_cas_every_object_has_zero_and_none_matches() {
    let engine = ModelEngine::default();
    let config = ProtocolConfig { cas_enabled: false, ..Default::default() };
    let mut client = Client::with(config, Default::default());
    for (input, want) in [
        ("set k 0 0 1\r\na\r\ngets k\r\n", "STORED\r\nVALUE k 0 1 0\r\na\r\nEND\r\n"),
        ("cas k 0 0 1 0\r\nb\r\ncas k 0 0 1 1\r\nb\r\n", "EXISTS\r\nEXISTS\r\n"),
        ("ms n 1 c E7\r\n1\r\nma n c\r\nmg n c v\r\n", "HD c0\r\nHD c0\r\nVA 1 c0\r\n2\r\n"),
    ] {
        let (got, _) = client.run(&engine, input.as_bytes());
        assert_eq!(String::from_utf8(got).unwrap(), want, "{input}");
    }
}

#[test]
fn bad_lines() {
    let long = "k".repeat(251);
    let bad = "CLIENT_ERROR bad command line format~";
    for (request, want) in [
        (" \n", bad),
        ("~", bad),
        ("x~", bad),
        ("get~", bad),
        ("get ~", bad),
        ("boguscommand slkdsldkfjsd~", "ERROR~"),
        ("GET foo~", "ERROR~"),
        (" get foo~", "ERROR~"),
        ("bogus noreply~", ""),
        ("set foo 0 0~", bad),
        ("set foo 0 0 -1~", bad),
        ("set foo 0 0 4294967295~", bad),
        ("set foo 0 0 2147483647~", bad),
        ("set foo x 0 2~hi~mn~", "CLIENT_ERROR bad command line format~MN~"),
        ("set foo 4294967296 0 2~hi~mn~", "CLIENT_ERROR bad command line format~MN~"),
        ("set foo 0 x 2~hi~mn~", "CLIENT_ERROR bad command line format~MN~"),
        ("set foo 0 x 2 noreply~hi~mn~", "MN~"),
        ("cas foo 0 0 2~hi~mn~", "CLIENT_ERROR bad command line format~MN~"),
        ("cas foo 0 0 2 x~hi~mn~", "CLIENT_ERROR bad command line format~MN~"),
        (
            "set foo 0 0 2~hix~mn~",
            "CLIENT_ERROR bad data chunk~CLIENT_ERROR bad command line format~MN~",
        ),
        ("incr foo~", bad),
        ("incr foo x~", "CLIENT_ERROR invalid numeric delta argument~"),
        ("incr foo -1~", "CLIENT_ERROR invalid numeric delta argument~"),
        ("touch foo~", bad),
        ("touch foo x~", "CLIENT_ERROR invalid exptime argument~"),
        ("gat 10~", bad),
        ("gat x foo~", "CLIENT_ERROR invalid exptime argument~"),
        ("flush_all x~", "CLIENT_ERROR invalid exptime argument~"),
        ("verbosity invalid~", bad),
        ("slabs automove invalid~", bad),
        (&format!("get a {long}~"), bad),
        (&format!("gets {long} a~"), bad),
        (&format!("gat 1 {long}~"), bad),
        (&format!("set {long} 0 0 2~hi~mn~"), "CLIENT_ERROR bad command line format~MN~"),
        (&format!("delete {long}~"), bad),
        (&format!("mg {long} v~"), bad),
        (&format!("ms {long} 2~hi~mn~"), "CLIENT_ERROR bad command line format~MN~"),
        ("ms a~", bad),
        ("ms a x~", bad),
        ("ms a 2 Tx~hi~mn~", "CLIENT_ERROR bad token in command line format~MN~"),
        ("ms a 2 MZ~hi~mn~", "CLIENT_ERROR invalid mode for ms M token~MN~"),
        (
            "ms a 2 q~hixx~mn~",
            "CLIENT_ERROR bad data chunk~CLIENT_ERROR bad command line format~MN~",
        ),
        ("ma a MZ~", "CLIENT_ERROR invalid mode for ma M token~"),
        ("ma a 1 1~", "CLIENT_ERROR invalid or duplicate flag~"),
        ("mg a *~", bad),
    ] {
        play(&[(request, want)]);
    }
}

#[test]
fn numbers() {
    play(&[
        ("incr n 1~decr n 1~", "NOT_FOUND~NOT_FOUND~"),
        ("set n 0 0 2~10~incr n 5~", "STORED~15~"),
        ("decr n 6~get n~", "9~VALUE n 0 2~9 ~END~"),
        ("incr n 1~get n~", "10~VALUE n 0 2~10~END~"),
        ("decr n 100~get n~", "0~VALUE n 0 2~0 ~END~"),
        (
            "incr n 18446744073709551615~incr n 1~get n~",
            "18446744073709551615~0~VALUE n 0 20~0                   ~END~",
        ),
        (
            "set t 0 0 2~hi~incr t 1~",
            "STORED~CLIENT_ERROR cannot increment or decrement non-numeric value~",
        ),
        (
            "set t 0 0 0~~incr t 1~",
            "STORED~CLIENT_ERROR cannot increment or decrement non-numeric value~",
        ),
        ("incr n 1 noreply~decr n 1 noreply~mn~", "MN~"),
    ]);
}

#[test]
fn noreply_is_silent() {
    play(&[
        ("flush_all noreply~flush_all 0 noreply~verbosity 0 noreply~mn~", "MN~"),
        ("add a 0 0 1 noreply~1~set a 0 0 1 noreply~2~replace a 0 0 1 noreply~3~mn~", "MN~"),
        ("append a 0 0 1 noreply~4~prepend a 0 0 1 noreply~5~gets a~", "VALUE a 0 3 5~534~END~"),
        (
            "cas a 0 0 1 5 noreply~6~touch a 10 noreply~incr a 3 noreply~decr a 2 noreply~get a~",
            "VALUE a 0 1~7~END~",
        ),
        ("delete a noreply~get a~", "END~"),
    ]);
}

#[test]
fn too_large_swallows_the_body_and_removes_the_old_value() {
    let body = "B".repeat(1024 * 1024 + 1);
    let len = body.len();
    play(&[
        ("set a 0 0 3~MOO~", "STORED~"),
        (&format!("set a 0 0 {len}~{body}~"), "SERVER_ERROR object too large for cache~"),
        ("get a~", "END~"),
        ("set a 0 0 3~MOO~", "STORED~"),
        (&format!("append a 0 0 {len}~{body}~"), "SERVER_ERROR object too large for cache~"),
        ("get a~", "VALUE a 0 3~MOO~END~"),
        (&format!("ms a {len} q~{body}~"), "SERVER_ERROR object too large for cache~"),
        ("get a~", "END~"),
        (&format!("set a 0 0 1040000~{}~", &body[..1_040_000]), "STORED~"),
        (&format!("append a 0 0 20000~{}~", &body[..20_000]), "NOT_STORED~"),
        ("set a 0 0 1~x~get a~", "STORED~VALUE a 0 1~x~END~"),
    ]);
}

#[test]
fn time() {
    let engine = ModelEngine::default();
    let mut client = Client::new();
    let steps: &[(u32, &str, &str)] = &[
        (
            0,
            "set a 0 3 1~x~set b 0 -1 1~x~set c 0 0 1~x~set d 0 1700000004 1~x~",
            "STORED~STORED~STORED~STORED~",
        ),
        (2, "get a b c d~", "VALUE a 0 1~x~VALUE c 0 1~x~VALUE d 0 1~x~END~"),
        (3, "get a c d~", "VALUE c 0 1~x~VALUE d 0 1~x~END~"),
        (3, "touch d 10~touch none 10~", "TOUCHED~NOT_FOUND~"),
        (4, "get d~", "VALUE d 0 1~x~END~"),
        (4, "gat 20 d~gats -1 c~get c~", "VALUE d 0 1~x~END~VALUE c 0 1 3~x~END~END~"),
        (23, "get d~", "VALUE d 0 1~x~END~"),
        (24, "get d~", "END~"),
        (24, "set e 0 0 1~x~flush_all 5~get e~", "STORED~OK~VALUE e 0 1~x~END~"),
        (28, "set f 0 0 1~x~get e f~", "STORED~VALUE e 0 1~x~VALUE f 0 1~x~END~"),
        (29, "get e f~set f 0 0 1~y~get f~", "END~STORED~VALUE f 0 1~y~END~"),
        (29, "flush_all~get f~set f 0 0 1~y~get f~", "OK~END~STORED~VALUE f 0 1~y~END~"),
        (30, "mg f t l h~", "HD t-1 l1 h1~"),
        (30, "mg f T30 t u h~", "HD t30 h1~"),
        (40, "ma f~", "CLIENT_ERROR cannot increment or decrement non-numeric value~"),
        (40, "me f~me none~", "ME f exp=20 la=10 cas=8 fetch=yes cls=1 size=2~EN~"),
    ];
    for (secs, request, want) in steps {
        client.now = at(*secs);
        play_on(&engine, &mut client, &[(request, want)]);
    }
}

#[test]
fn meta() {
    play(&[
        ("mn~", "MN~"),
        ("mg a v~mg a v k Oq~mg a v q~", "EN~EN ka Oq~"),
        ("ms a 2 c F7 T90 k s Oabc~hi~", "HD c1 ka s2 Oabc~"),
        ("mg a s v t f c k Ox~", "VA 2 s2 t90 f7 c1 ka Ox~hi~"),
        ("mg a s~", "HD s2~"),
        ("mg a~", "HD~"),
        ("mg a v C1 c~mg a v C2 c~", "HD c1~VA 2 c1~hi~"),
        ("ms a 2 c C11~io~", "EX c0~"),
        ("ms a 2 c C1 E4000~io~", "HD c4000~"),
        ("ms n 2 C1~io~ms n 2 MR~io~ms a 2 ME~io~", "NF~NS~NS~"),
        ("ms a 2 MA s~cc~ms a 2 MP s q~bb~mg a v s~", "HD s4~VA 6 s6~bbiocc~"),
        ("ms v 2 MA N30~mo~ms v 2 MA C5000~hi~ms w 2 MA C5000~hi~", "HD~EX~NS~"),
        ("md a C5~md a C3 q~md a q~md b q k~", "EX~NF~NF kb~"),
        (
            "ms 44OG44K544OI 2 b~po~mg 44OG44K544OI v~mg 44OG44K544OI b v k~",
            "HD~EN~VA 2 k44OG44K544OI b~po~",
        ),
        ("me 44OG44K544OI b~", "ME 44OG44K544OI exp=-1 la=0 cas=5 fetch=yes cls=1 size=11~"),
    ]);
}

#[test]
fn meta_arithmetic() {
    play(&[
        ("ma m~ma m q k~", "NF~NF km~"),
        ("ma m N90 J13 v t c~ma m N0 J13 v~ma m D30 v~", "VA 2 t90 c1~13~VA 2~14~VA 2~44~"),
        ("ma m MD D22 v~ma m M- D9000 v~mg m v~", "VA 2~22~VA 1~0~VA 2~0 ~"),
        ("ma m q D1~mn~", "MN~"),
        ("ma m C99999 v~ma m C6 c v~ma m E8765 c~", "EX~VA 1 c7~2~HD c8765~"),
        ("ma m T300 t Oz k~", "HD t300 Oz km~"),
    ]);
}

#[test]
fn win_stale_and_recache() {
    play(&[
        ("mg w s c v N30 t~", "VA 0 s0 c1 t30 W~~"),
        ("mg w s c v N30 t~", "VA 0 s0 c1 t30 Z~~"),
        ("ms w 2 C9 T120~nu~", "EX~"),
        ("ms w 2 C1 T120~mu~", "HD~"),
        ("mg w v N30 t~", "VA 2 t120~mu~"),
        ("mg w v N30 R130~mg w v N30 R130~", "VA 2 W~mu~VA 2 Z~mu~"),
        ("ms w 4 C2 T300~zuuu~mg w t R30~", "HD~HD t300~"),
        // Invalidation by md, a stale refill, a good refill.
        ("set i 0 0 3~moo~md i I T30~", "STORED~HD~"),
        ("get i~", "VALUE i 0 3~moo~END~"),
        ("mg i t c v~mg i t c v~", "VA 3 t30 c5 X W~moo~VA 3 t30 c5 Z X~moo~"),
        ("ms i 1 T90 C0~f~ms i 1 I T90 C1~f~", "EX~HD~"),
        ("mg i t c v~", "VA 1 t30 c6 Z X~f~"),
        ("ms i 1 I T90 C99~f~", "EX~"),
        ("ms i 1 T90 C6~g~mg i t v~", "HD~VA 1 t90~g~"),
        ("md i C7 E5678 I~mg i c~", "HD~HD c5678 X W~"),
        ("mg e9 c N30 E9876~mg e9 c E5~", "HD c9876 W~HD c9876 Z~"),
        // Tombstones.
        ("ms x 2 T50~mx~md x x~mg x t v~", "HD~HD~VA 0 t-1~~"),
        ("ms x 2 T50~mx~md x x I~mg x t v~", "HD~HD~VA 0 t-1 X W~~"),
    ]);
}

#[test]
fn access_marks() {
    play(&[
        ("ms h 1~x~mg h h~mg h h~", "HD~HD h0~HD h1~"),
        ("ms h 1~x~mg h u h~mg h h~mg h u h~", "HD~HD h0~HD h0~HD h1~"),
        ("ms h 1~x~get h~mg h h~", "HD~VALUE h 0 1~x~END~HD h1~"),
    ]);
}

#[test]
fn administration() {
    let engine = ModelEngine::default();
    let mut client = Client::new();
    play_on(
        &engine,
        &mut client,
        &[
            ("stats~stats  settings ~", "STAT x 1~END~STAT x 1~END~"),
            ("verbosity 2~", "OK~"),
            ("cache_memlimit 4~", "MEMLIMIT_TOO_SMALL cannot set maxbytes to less than 8m~"),
            ("cache_memlimit 64~cache_memlimit x~", "OK~ERROR~"),
            ("cache_memlimit 4000~", "MEMLIMIT_ADJUST_FAILED out of bounds or unable to adjust~"),
            ("extstore free_memchunks 1 0~extstore item_age 2~extstore max_frag 0.9~", "OK~OK~OK~"),
            ("extstore~extstore bogus 1~extstore item_age x~", "ERROR~ERROR~ERROR~"),
            ("slabs automove 0~slabs reassign 1 2~", "OK~NOSPARE source class has no spare pages~"),
            ("lru_crawler metadump all~", "OK~END~"),
            (
                "lru_crawler enable~lru_crawler crawl 1~lru_crawler crawl 2,all~lru_crawler crawl 99~",
                "OK~OK~BADCLASS invalid class id~BADCLASS invalid class id~",
            ),
            (
                "lru_crawler disable~lru_crawler crawl all~lru_crawler~",
                "OK~CLIENT_ERROR lru crawler disabled~ERROR~",
            ),
            (
                "lru_crawler sleep 100~lru_crawler sleep 1000001~",
                "OK~CLIENT_ERROR sleep must be one second or less~",
            ),
            (
                "lru_crawler sleep x~lru_crawler tocrawl 5~",
                "CLIENT_ERROR bad command line format~OK~",
            ),
            (
                "mn~lru_crawler metadump all~",
                "MN~ERROR cannot pipeline other commands before metadump~",
            ),
            ("shutdown~", "SERVER_ERROR: shutdown not enabled~"),
            ("debugtime p~refresh_certs~", "ERROR~ERROR~"),
        ],
    );
    assert_eq!(client.admin.seen, ["stats ", "stats settings", "verbosity 2"]);
    let config = ProtocolConfig {
        shutdown_enabled: true,
        flush_enabled: false,
        debug_commands: true,
        version: "1.2.3".into(),
        ..ProtocolConfig::default()
    };
    let mut client = Client::with(config, Default::default());
    play_on(
        &engine,
        &mut client,
        &[
            ("version~", "VERSION 1.2.3~"),
            ("flush_all~flush_all noreply~", "CLIENT_ERROR flush_all not allowed~"),
            ("debugtime p~debugtime -3~debugtime r~debugtime x~", "OK~OK~OK~ERROR~"),
            ("shutdown now~", "CLIENT_ERROR invalid shutdown mode~"),
        ],
    );
    assert_eq!(client.admin.seen, ["Pause", "Jump(-3)", "Resume"]);
    assert_eq!(
        client.run(&engine, b"shutdown graceful\r\n").1,
        Progress::Shutdown { graceful: true }
    );
}

#[test]
fn hanging_up() {
    let engine = ModelEngine::default();
    for input in [
        "GET / HTTP/1.0\r\n".to_string(),
        "DELETE HTTP/1.1\r\n".to_string(),
        "quit\r\nmg foo s\r\n".to_string(),
        format!("incr {} manyspaces 1", " ".repeat(2048)),
        " ".repeat(14_000),
    ] {
        let mut client = Client::new();
        let (got, end) = client.run(&engine, input.as_bytes());
        assert_eq!((got.as_slice(), end), (&b""[..], Progress::Close), "{input:?}");
    }
    for (line, refused) in [
        (
            "watch fetchers proxyreqs~",
            "CLIENT_ERROR there is nothing here that would tell of proxyreqs~",
        ),
        ("watch sysevents~mn~", "CLIENT_ERROR there is nothing here that would tell of sysevents~"),
        ("watch~mn~", "CLIENT_ERROR watch commands not allowed~"),
    ] {
        let mut client: Client<ModelEngine> = Client::new();
        let (got, end) = client.run(&engine, line.replace('~', "\r\n").as_bytes());
        let want = refused.replace('~', "\r\n");
        assert_eq!((String::from_utf8(got).unwrap(), end), (want, Progress::Close));
    }
    play(&[("watch everything~mn~", "ERROR~MN~")]);
    let config = ProtocolConfig { binary_only: true, ..Default::default() };
    let mut client = Client::with(config, Default::default());
    let (got, end) = client.run(&engine, b"no line, and no binary protocol");
    let refused = b"CLIENT_ERROR the binary protocol is not spoken here\r\n";
    assert_eq!((got.as_slice(), end), (&refused[..], Progress::Close));
    assert_eq!(client.stats.binary_refused, 1, "it is counted");
    let mut client = Client::new();
    let (got, end) = client.run(&engine, b"mn\r\nquit\r\nmn\r\n");
    assert_eq!((got.as_slice(), end), (&b"MN\r\n"[..], Progress::Close));
}

#[test]
fn long_multigets() {
    let spaces = " ".repeat(2048);
    play(&[(&format!("get {spaces} manyspaces~"), "END~")]);
    let keys = "foobarbaz ".repeat(20_000);
    let hits = "VALUE foobarbaz 0 2~hi~".repeat(20_000);
    play(&[
        ("set foobarbaz 0 0 2~hi~", "STORED~"),
        (&format!("get {keys}~mn~"), &format!("{hits}END~MN~")),
        (
            &format!("gets {spaces}{}~mn~", "k".repeat(251)),
            "CLIENT_ERROR bad command line format~MN~",
        ),
        (
            &format!("get {spaces}{}~mn~", "k".repeat(9000)),
            "CLIENT_ERROR bad command line format~MN~",
        ),
        (&format!("get {spaces}{}~mn~", "k".repeat(250)), "END~MN~"),
        (&format!(" get {}~mn~", "k ".repeat(9000)), "ERROR~MN~"),
    ]);
}

#[test]
fn login() {
    let engine = ModelEngine::default();
    let config = || ProtocolConfig {
        auth: Some(std::sync::Arc::new(AuthFile::parse(b"foo:bar\n").unwrap().into())),
        ..Default::default()
    };
    let mut client = Client::with(config(), Default::default());
    play_on(
        &engine,
        &mut client,
        &[
            ("set foo 0 0 2~hi~", "CLIENT_ERROR bad authentication token format~"),
            ("get foo~", "CLIENT_ERROR unauthenticated~"),
            ("set foo 0 0 7~foo bab~", "CLIENT_ERROR authentication failure~"),
            ("set foo 0 0 2147483646~", "CLIENT_ERROR auth token too long~"),
            ("set foo 0 0 4~foo bar~", "CLIENT_ERROR bad command line termination~"),
        ],
    );
    let mut client = Client::with(config(), Default::default());
    play_on(
        &engine,
        &mut client,
        &[
            ("set foo 0 0 7~foo bar~", "STORED~"),
            ("set a 0 0 2~hi~get a~", "STORED~VALUE a 0 2~hi~END~"),
        ],
    );
    assert_eq!((client.stats.auth_cmds, client.stats.auth_errors), (1, 0));
    let mut client: Client<ModelEngine> = Client::with(config(), Default::default());
    assert_eq!(client.run(&engine, b"quit\r\n").1, Progress::Close);
}

#[test]
fn counters() {
    let engine = ModelEngine::default();
    let mut client = Client::new();
    client.detail = true;
    let _ = client.run(
        &engine,
        b"set a 0 0 1\r\n1\r\nget a b\r\ngat 0 a c\r\ntouch a 0\r\ntouch c 0\r\nincr a 1\r\nincr c 1\r\ndecr a 1\r\n\
          decr c 1\r\ncas a 0 0 1 99\r\nx\r\ncas c 0 0 1 1\r\nx\r\ndelete a\r\ndelete a\r\nflush_all\r\nmg a\r\nbad\r\n",
    );
    let mut counted = Vec::new();
    client.stats.each(|name, n| {
        if n > 0 {
            counted.push(format!("{name}={n}"));
        }
    });
    assert_eq!(
        counted.join(" "),
        "cmd_get=3 cmd_set=3 cmd_flush=1 cmd_touch=4 get_hits=1 get_misses=2 delete_hits=1 delete_misses=1 \
         incr_hits=1 incr_misses=1 decr_hits=1 decr_misses=1 cas_misses=1 cas_badval=1 touch_hits=2 touch_misses=2 \
         malformed=1"
    );
    assert_eq!(client.admin.prefixes.len(), 10);
}
