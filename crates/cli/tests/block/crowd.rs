//! Clients that ask for much and read nothing: memory stays within its bound, comes back when they leave, and others are served.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::daemon::ask::json;
use crate::daemon::{Daemon, larder, prepare, read, session, write};

const READ: u16 = 0;
const BLOCK_STATUS: u16 = 7;
const MIB: u64 = 1 << 20;

/// A good client waits for no longer on the slowest machine; for those that read nothing it would wait for the server's timeout
/// with each of them, 30 s.
const SERVED: Duration = Duration::from_secs(10);

/// A connection after its handshake.
fn connect(dir: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(dir.join("socket")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let option = |kind: u32, data: &[u8]| {
        let mut out = b"IHAVEOPT".to_vec();
        out.extend(kind.to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(data);
        out
    };
    stream.read_exact(&mut [0; 18]).unwrap();
    let mut hello = 3u32.to_be_bytes().to_vec();
    let context = b"base:allocation";
    let mut query = 4u32.to_be_bytes().to_vec();
    query.extend(b"disk");
    query.extend(1u32.to_be_bytes());
    query.extend((context.len() as u32).to_be_bytes());
    query.extend(context);
    let mut go = 4u32.to_be_bytes().to_vec();
    go.extend(b"disk\0\0");
    hello.extend(option(8, &[]));
    hello.extend(option(10, &query));
    hello.extend(option(7, &go));
    stream.write_all(&hello).unwrap();
    // Replies to three options: until the last one's acknowledgement.
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head).unwrap();
        let field = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        stream.read_exact(&mut vec![0; field(16) as usize]).unwrap();
        if (field(8), field(12)) == (7, 1) {
            return stream;
        }
    }
}

fn request(command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut out = 0x2560_9513u32.to_be_bytes().to_vec();
    out.extend(0u16.to_be_bytes());
    out.extend(command.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(offset.to_be_bytes());
    out.extend(len.to_be_bytes());
    out
}

/// Clients that have asked for as much as the server takes, and read nothing.
fn crowd(dir: &Path, count: u64) -> Vec<UnixStream> {
    let clients: Vec<UnixStream> = (0..count)
        .map(|n| {
            let mut stream = connect(dir);
            stream.set_nonblocking(true).unwrap();
            // Short ones, long ones, and such whose replies hold no data.
            let (command, len) =
                [(READ, 4096), (READ, 1 << 20), (BLOCK_STATUS, 1 << 20), (READ, 65536)]
                    [n as usize % 4];
            for i in 0..20_000u64 {
                let offset = (i * u64::from(len)) % (31 * MIB);
                match stream.write_all(&request(command, i, offset, len)) {
                    Ok(()) => {}
                    // Half a request may have gone: the server waits for the rest.
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => panic!("{e}"),
                }
            }
            stream
        })
        .collect();
    clients
}

fn resident(dir: &Path) -> u64 {
    json(dir, &["status"])["resident_bytes"].as_u64().unwrap()
}

/// 400 MiB for connections. Beside that: the program and its stacks, 64 MiB for fills, and what each worker keeps to read into.
#[test]
fn memory_is_bounded_and_comes_back() {
    const CONNECTIONS: u64 = 400 * MIB;
    const SLACK: u64 = 150 * MIB;
    let dir = prepare("set:8");
    let dir = dir.path();
    let mut daemon = Daemon::start(dir, &["--connection-memory", "400m"]);
    assert!(daemon.said("400 MiB for connections"), "{:#?}", daemon.seen);
    let mut good = session(dir);
    write(&mut *good, 0, 16 << 20, 9);
    let before = resident(dir);
    let stuck = crowd(dir, 150);
    let mut most = 0;
    let begun = Instant::now();
    // Long enough for all that they may get, and until they have got what is looked for below.
    while begun.elapsed() < Duration::from_secs(8)
        || most <= before + 80 * MIB && begun.elapsed() < Duration::from_secs(120)
    {
        most = most.max(resident(dir));
        // Whoever reads is served meanwhile.
        let begun = Instant::now();
        assert!(read(&mut *good, 8 * MIB, 65536).iter().all(|&b| b == 9));
        assert!(begun.elapsed() < SERVED, "{:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(100));
    }
    eprintln!("resident: {} MiB before, {} MiB at most", before / MIB, most / MIB);
    assert!(most < CONNECTIONS + SLACK, "{} MiB", most / MIB);
    assert!(most > before + 80 * MIB, "they held something: {} MiB", most / MIB);
    drop(stuck);
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let now = resident(dir);
        if now < before + 48 * MIB {
            eprintln!("resident: {} MiB after", now / MIB);
            break;
        }
        assert!(Instant::now() < end, "{} MiB stay, of {} before", now / MIB, before / MIB);
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(read(&mut *good, 8 * MIB, 65536).iter().all(|&b| b == 9));
    drop(good);
    daemon.stop();
}

/// They hold what they were given, and whoever comes then gets something too: it was twenty seconds until they were thrown out.
#[test]
fn others_go_on() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    write(&mut *session(dir), 0, 16 << 20, 5);
    let stuck = crowd(dir, 64);
    std::thread::sleep(Duration::from_millis(500));
    let mut good = session(dir);
    let mut worst = Duration::ZERO;
    for i in 0..200u64 {
        let len = if i % 10 == 0 { 1 << 20 } else { 4096 };
        let begun = Instant::now();
        assert!(read(&mut *good, i % 8 * MIB, len).iter().all(|&b| b == 5));
        write(&mut *good, i % 8 * MIB, 4096, 5);
        worst = worst.max(begun.elapsed());
    }
    eprintln!("the slowest of 200 reads and writes took {worst:?}");
    assert!(worst < SERVED, "{worst:?}");
    drop(stuck);
    drop(good);
    daemon.stop();
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let dir = prepare("set:8");
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (cache, disk, socket) =
        (at("cache"), format!("disk=file:{}", at("disk")), format!("unix:{}", at("socket")));
    for (more, says) in [
        (["--connection-memory", "100m"], "say 160 MiB or more"),
        (["--connection-memory", "1023t"], "--connection-memory 1023 TiB"),
        (["--fill-memory", "0"], "--fill-memory 0 B"),
        (["--readahead", "99g"], "--readahead 99 GiB"),
        (["--reclaim", "greedy"], "--reclaim greedy"),
        (["--evict", "cache"], "--evict cache"),
    ] {
        let mut arguments =
            vec!["serve", "--cache", &cache, "--volume", &disk, "--listen", &socket];
        let state = at("state");
        arguments.extend(["--state-dir", &state]);
        arguments.extend(more);
        let (code, error) = larder(&arguments);
        assert!(
            code == Some(2) && error.contains(says) && error.lines().count() == 1,
            "{more:?}: {code:?} {error}"
        );
    }
}
