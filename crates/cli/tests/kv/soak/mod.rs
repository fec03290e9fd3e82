//! `larder kv` under load for long, and among clients that mean it harm: memory within its bound and flat, descriptors
//! flat, others served. `LARDER_SOAK_SECONDS` says for how long (5 by default).

mod malice;

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::load::{Mix, Notebook, under_load};
use crate::server::Site;

pub(crate) const MIB: u64 = 1 << 20;
/// A server that does not come to its work in so long has failed.
const SLOW: Duration = Duration::from_secs(120);

pub(crate) fn seconds() -> u64 {
    match std::env::var("LARDER_SOAK_SECONDS") {
        Ok(text) => text.parse().expect("LARDER_SOAK_SECONDS is a number of seconds"),
        Err(_) => 5,
    }
}

/// Resident bytes of a process, shared memory included.
pub(crate) fn resident(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

pub(crate) fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// What issue and manual promise: `-m`, 16 KiB for each connection, and 64 MiB for everything else.
pub(crate) fn bound(memory: u64, connections: u64) -> u64 {
    memory + connections * (16 << 10) + 64 * MIB
}

#[test]
fn memory_and_descriptors_stay_flat_under_load() {
    let site = Site::new();
    let server = site.start(&["-m", "32", "-t", "2", "--flash-size", "96m", "--admission", "all"]);
    let book = Notebook::forgetful();
    let mix = Mix { few: 500, many: 200_000, most: 4_000, counters: 50, pause: false };
    let connections = 8;
    let socket = server.socket().to_owned();
    let connect = || Client::new(UnixStream::connect(&socket).unwrap());
    let mut client = server.connect();
    let length = Duration::from_secs(seconds());
    // Resident bytes and descriptors, ten times a second.
    let samples = under_load(&book, mix, connections, 5, connect, || {
        // A slow machine takes longer to come to where flash is written to, and DRAM has all been touched.
        let begin = Instant::now();
        let mut works = || {
            let pages: u64 = client.stats("")["extstore_page_allocs"].parse().unwrap();
            pages > 2 && book.answers() > 1_000 * length.as_secs()
        };
        while !works() && begin.elapsed() < SLOW {
            std::thread::sleep(Duration::from_millis(100));
        }
        let start = Instant::now();
        let mut samples = Vec::new();
        while start.elapsed() < length {
            std::thread::sleep(Duration::from_millis(100));
            samples.push((resident(server.pid()), descriptors(server.pid())));
        }
        samples
    });
    let stats = client.stats("");
    let most = samples.iter().map(|s| s.0).max().unwrap();
    let limit = bound(32 * MIB, connections + 1);
    eprintln!(
        "{} answers in {} s; at most {} KiB resident of {} KiB allowed; {} descriptors; {} hits by flash",
        book.answers(),
        length.as_secs(),
        most >> 10,
        limit >> 10,
        samples.last().unwrap().1,
        stats["get_extstore"]
    );
    assert!(most <= limit, "{most} bytes resident, {limit} allowed");
    assert!(book.answers() > 1_000 * length.as_secs(), "{}", book.answers());
    assert!(stats["extstore_page_allocs"].parse::<u64>().unwrap() > 2, "{stats:?}");
    // Flat: the last third as the second.
    let third = samples.len() / 3;
    let peak = |part: &[(u64, usize)]| part.iter().map(|s| s.0).max().unwrap();
    let (second, last) = (peak(&samples[third..2 * third]), peak(&samples[2 * third..]));
    // In a few seconds on a slow machine memory is still being touched for the first time; the bound above holds anyway.
    let slack = if length.as_secs() < 30 { 8 } else { 3 };
    assert!(last <= second + slack * MIB, "memory grows: {second} bytes, then {last}");
    let open = |part: &[(u64, usize)]| part.iter().map(|s| s.1).max().unwrap();
    assert_eq!(open(&samples[third..2 * third]), open(&samples[2 * third..]), "descriptors grow");
}
