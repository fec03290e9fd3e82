//! Replays against a small server in the test, honest or with one planted fault, and against memcached where it is
//! installed.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the test runs a server on threads"
)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use larder_replay::{Options, Order, Report, Target};
use larder_trace::{Op, Request};

/// What the server does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    /// Now and then a set is acknowledged and not done.
    LosesSets,
    /// A delete is acknowledged and not done.
    LosesDeletes,
    /// One bit of a value is wrong.
    FlipsBits,
    /// Another key's value.
    WrongKey,
    /// The connection is closed after some commands.
    HangsUp,
    /// Sets answer SERVER_ERROR.
    Errors,
    /// Nonsense instead of replies.
    Babbles,
}

type Store = Arc<Mutex<HashMap<Vec<u8>, Vec<u8>>>>;

fn serve(fault: Fault) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let store = Store::default();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let store = Arc::clone(&store);
            std::thread::spawn(move || {
                let _ = talk(stream, &store, fault);
            });
        }
    });
    address
}

fn talk(stream: TcpStream, store: &Store, fault: Fault) -> std::io::Result<()> {
    // As every memcached: a reply does not wait for the acknowledgement of the one before.
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    let mut input = BufReader::new(stream);
    let mut line = String::new();
    let mut commands = 0u32;
    loop {
        line.clear();
        if input.read_line(&mut line)? == 0 {
            return Ok(());
        }
        commands += 1;
        if fault == Fault::HangsUp && commands == 100 {
            return Ok(());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        let key = words[1].as_bytes().to_vec();
        let reply: Vec<u8> = match words[0] {
            "get" => {
                let store = store.lock().unwrap();
                match store.get(&key) {
                    Some(value) => {
                        let mut value = value.clone();
                        let mut shown = words[1].to_owned();
                        if commands.is_multiple_of(50) && !value.is_empty() {
                            let middle = value.len() / 2;
                            match fault {
                                Fault::FlipsBits => value[middle] ^= 4,
                                Fault::WrongKey => shown.push('x'),
                                _ => {}
                            }
                        }
                        let mut reply = format!("VALUE {shown} 0 {}\r\n", value.len()).into_bytes();
                        reply.extend_from_slice(&value);
                        reply.extend_from_slice(b"\r\nEND\r\n");
                        reply
                    }
                    None if fault == Fault::Babbles && commands > 20 => {
                        b"HTTP/1.1 400 Bad Request\r\n".to_vec()
                    }
                    None => b"END\r\n".to_vec(),
                }
            }
            "delete" => {
                let mut store = store.lock().unwrap();
                let had = store.contains_key(&key);
                if fault != Fault::LosesDeletes {
                    store.remove(&key);
                }
                if had { b"DELETED\r\n".to_vec() } else { b"NOT_FOUND\r\n".to_vec() }
            }
            "set" | "add" => {
                let mut value = vec![0; words[4].parse::<usize>().unwrap() + 2];
                input.read_exact(&mut value)?;
                value.truncate(value.len() - 2);
                let mut store = store.lock().unwrap();
                if fault == Fault::Errors {
                    b"SERVER_ERROR the disk is on fire\r\n".to_vec()
                } else if words[0] == "add" && store.contains_key(&key) {
                    b"NOT_STORED\r\n".to_vec()
                } else {
                    if !(fault == Fault::LosesSets && commands.is_multiple_of(7)) {
                        store.insert(key, value);
                    }
                    b"STORED\r\n".to_vec()
                }
            }
            other => panic!("unexpected command {other}"),
        };
        out.write_all(&reply)?;
    }
}

fn options(address: SocketAddr) -> Options {
    Options {
        connections: 4,
        pipeline: 8,
        threads: 2,
        verify: true,
        timeout: Duration::from_secs(5),
        ..Options::new(Target::Tcp(address))
    }
}

fn replay(
    spec: &str,
    options: &Options,
) -> Result<Report, (larder_replay::ReplayError, Option<Box<Report>>)> {
    let trace = larder_trace::open(spec, &larder_trace::Options::default()).unwrap();
    larder_replay::run(trace.reader, options, |_| {})
}

const MIX: &str =
    "gen:zipf?objects=300&requests=20000&writes=0.2&deletes=0.05&value=1..2000&seed=9";

#[test]
fn an_honest_server_passes_and_every_request_is_counted() {
    let made: Vec<Request> = larder_trace::open(MIX, &larder_trace::Options::default())
        .unwrap()
        .reader
        .map(|r| r.unwrap())
        .collect();
    // What a cache that forgets nothing answers, request by request.
    let mut held = std::collections::HashSet::new();
    let (mut hits, mut misses, mut gets) = (0, 0, 0);
    for r in &made {
        match r.op {
            Op::Get => {
                gets += 1;
                if held.insert(r.id) { misses += 1 } else { hits += 1 }
            }
            Op::Delete => drop(held.remove(&r.id)),
            _ => drop(held.insert(r.id)),
        }
    }
    // One request in flight a connection: a miss is filled before the next request of its key.
    let report = replay(MIX, &Options { pipeline: 1, ..options(serve(Fault::None)) }).unwrap();
    assert_eq!((report.gets, report.hits, report.misses), (gets, hits, misses));
    assert_eq!(report.requests, 20_000);
    assert_eq!((report.stale, report.damaged, report.verified), (0, 0, hits));
    assert_eq!(report.fills, misses);
    let ops: u64 = report.operations.iter().map(|o| o.count).sum();
    assert_eq!(ops, report.requests + report.fills);
    assert_eq!(report.held_back, 0, "nothing can meet");
    // Pipelined, whatever names an object that is being fetched waits: the figures are the same.
    let report = replay(MIX, &options(serve(Fault::None))).unwrap();
    assert_eq!((report.stale, report.damaged, report.requests), (0, 0, 20_000));
    assert_eq!((report.hits, report.misses, report.fills), (hits, misses, misses));
    assert!(report.held_back > 0);
}

#[test]
fn an_object_is_fetched_once_over_any_connection() {
    // Sixty gets in flight over ten objects: all but ten would miss with their forerunners otherwise.
    let spec = "gen:uniform?objects=10&requests=2000&value=1..2000&seed=3";
    let any =
        Options { order: Order::Any, threads: 1, pipeline: 16, ..options(serve(Fault::None)) };
    let report = replay(spec, &any).unwrap();
    assert_eq!((report.requests, report.misses, report.fills), (2000, 10, 10));
    // What waited when its connection was lost is sent all the same.
    for order in [Order::Any, Order::Key] {
        let broken = Options { order, pipeline: 16, ..options(serve(Fault::HangsUp)) };
        let report = replay(spec, &broken).unwrap();
        assert!(report.connections_lost > 5, "{order:?}");
        let ended = report.requests + report.requests_lost;
        assert!(
            ended >= 2000 && ended <= 2000 + report.fills + report.requests_lost,
            "{order:?}: {ended}"
        );
    }
}

#[test]
fn a_second_run_against_a_warm_server_is_clean() {
    let address = serve(Fault::None);
    for _ in 0..2 {
        let report = replay(MIX, &options(address)).unwrap();
        assert_eq!((report.stale, report.damaged), (0, 0));
    }
}

#[test]
fn planted_faults_are_found() {
    for fault in [Fault::LosesSets, Fault::LosesDeletes] {
        assert!(replay(MIX, &options(serve(fault))).unwrap().stale > 0, "{fault:?}");
    }
    for fault in [Fault::FlipsBits, Fault::WrongKey] {
        assert!(replay(MIX, &options(serve(fault))).unwrap().damaged > 0, "{fault:?}");
    }
    let report = replay(MIX, &options(serve(Fault::Errors))).unwrap();
    assert!(report.other_errors > 1000);
    assert_eq!(report.first_error.as_deref(), Some("SERVER_ERROR the disk is on fire"));
    let report = replay(MIX, &options(serve(Fault::HangsUp))).unwrap();
    assert!(report.connections_lost > 10 && report.requests + report.requests_lost >= 20_000);
    let report = replay(MIX, &options(serve(Fault::Babbles))).unwrap();
    assert!(report.first_error.is_some_and(|e| e.contains("HTTP/1.1 400")));
}

#[test]
fn warm_up_order_and_limits() {
    let any = Options { order: Order::Any, warmup: 5000, ..options(serve(Fault::None)) };
    let report = replay(MIX, &any).unwrap();
    assert_eq!((report.requests, report.damaged), (15_000, 0));
    let none = Options { fill: false, ..options(serve(Fault::None)) };
    let report = replay("gen:uniform?objects=100&requests=1000", &none).unwrap();
    assert_eq!((report.hits, report.misses, report.fills), (0, 1000, 0));
}

#[test]
fn timed_replay_keeps_the_times() {
    let timed = Options { speed: Some(2.0), ..options(serve(Fault::None)) };
    // 400 requests at 1,000 a second, twice as fast: 0.2 s.
    let started = Instant::now();
    let report = replay("gen:uniform?objects=50&requests=400&rate=1000&seed=4", &timed).unwrap();
    assert_eq!(report.requests, 400);
    let seconds = started.elapsed().as_secs_f64();
    assert!(seconds > 0.15, "{seconds}");
    let untimed = replay("gen:uniform?objects=50&requests=400", &timed).unwrap_err().0;
    assert!(untimed.to_string().contains("no times"), "{untimed}");
}

#[test]
fn nobody_listening() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = replay(MIX, &options(address)).unwrap_err().0.to_string();
    assert!(error.contains(&address.to_string()) && error.contains("cannot connect"), "{error}");
    for bad in ["nowhere", "unix:", "127.0.0.1:x"] {
        assert!(bad.parse::<Target>().unwrap_err().to_string().contains("HOST:PORT"));
    }
}

/// Against memcached itself, over a unix socket, with evictions.
#[test]
#[cfg_attr(without = "memcached", ignore = "needs memcached (Debian: memcached)")]
fn against_memcached() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("mc.sock");
    let child = std::process::Command::new("memcached")
        .args(["-u", "root", "-m", "4", "-t", "1", "-s"])
        .arg(&socket)
        .spawn();
    let mut child = child.expect("memcached");
    let deadline = Instant::now() + Duration::from_secs(120);
    while !socket.exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let target: Target = format!("unix:{}", socket.display()).parse().unwrap();
    let spec = "gen:memcachier?objects=30000&requests=60000";
    let result = replay(spec, &Options { target, ..options(([127, 0, 0, 1], 1).into()) });
    child.kill().unwrap();
    child.wait().unwrap();
    let report = result.unwrap();
    assert_eq!(
        (report.requests, report.stale, report.damaged, report.other_errors),
        (60_000, 0, 0, 0)
    );
    assert!(report.hit_ratio > 0.3 && report.hit_ratio < 0.99, "{}", report.hit_ratio);
}
