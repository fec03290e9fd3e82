//! `larder kv` and its memory, over a Unix socket: what is resident follows `cache_memlimit`, and no set is refused while
//! something can make room.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use larder_base::Rng;

const LONG: Duration = Duration::from_secs(120);

/// A server, killed when the test is over.
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(dir: &Path, more: &[&str]) -> Server {
        let socket = dir.join("socket");
        let child = Command::new(env!("CARGO_BIN_EXE_larder"))
            .env_remove("RUST_LOG")
            .args(["kv", "--http", "off", "-t", "2", "--admission", "all", "-s"])
            .arg(&socket)
            .arg("--data-dir")
            .arg(dir.join("data"))
            .args(more)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let server = Server { child, socket };
        let start = Instant::now();
        while UnixStream::connect(&server.socket).is_err() {
            assert!(start.elapsed() < LONG, "it does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    fn connect(&self) -> Client {
        let stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Client { reader: BufReader::new(stream.try_clone().unwrap()), stream }
    }

    /// Bytes resident, but for the program's own file: a build for tests is large.
    fn resident(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let kib = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap();
            line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap()
        };
        (kib("RssAnon:") + kib("RssShmem:")) << 10
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Client {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl Client {
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, text: &str) -> String {
        self.stream.write_all(text.as_bytes()).unwrap();
        self.line()
    }

    /// Sets of these sizes, sent at once; the answers.
    fn sets(&mut self, rng: &mut Rng, sizes: &[usize]) -> Vec<String> {
        let mut text = Vec::new();
        for &size in sizes {
            text.extend_from_slice(
                format!("set key{} 0 0 {size}\r\n", rng.below(40_000)).as_bytes(),
            );
            text.resize(text.len() + size, b'v');
            text.extend_from_slice(b"\r\n");
        }
        self.stream.write_all(&text).unwrap();
        sizes.iter().map(|_| self.line()).collect()
    }

    fn stat(&mut self, name: &str) -> u64 {
        self.stream.write_all(b"stats\r\n").unwrap();
        let mut found = None;
        loop {
            let line = self.line();
            if line == "END" {
                return found.unwrap_or_else(|| panic!("no {name}"));
            }
            if let Some(value) = line.strip_prefix(&format!("STAT {name} ")) {
                found = value.parse().ok();
            }
        }
    }
}

/// A small object mostly, now and then a large one.
fn mixed(rng: &mut Rng) -> usize {
    match rng.below(1000) {
        0..3 => 50_000 + rng.below(450_000) as usize,
        3..100 => 2_000 + rng.below(18_000) as usize,
        _ => 1 + rng.below(1_500) as usize,
    }
}

/// What is resident is at most the limit and so much more: buffers, stacks, what the allocator keeps.
const BESIDE: u64 = 32 << 20;

#[test]
fn what_is_resident_follows_the_limit_over_thousands_of_changes_under_load() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), &["-m", "48", "--flash-size", "64m"]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (server, done) = (&server, &done);
            scope.spawn(move || {
                let (mut client, mut rng) = (server.connect(), Rng::new(seed));
                while !done.load(Ordering::Relaxed) {
                    let sizes: Vec<usize> = (0..20).map(|_| mixed(&mut rng)).collect();
                    client.sets(&mut rng, &sizes);
                }
            });
        }
        let (mut client, mut rng) = (server.connect(), Rng::new(9));
        for change in 0..4_000 {
            let limit = if change % 2 == 0 { 100 + rng.below(80) } else { 40 + rng.below(40) };
            assert_eq!(client.ask(&format!("cache_memlimit {limit}\r\n")), "OK", "{limit}");
            if change % 40 == 0 {
                // Time for some of it to be carried out.
                std::thread::sleep(Duration::from_millis(30));
            }
        }
        assert_eq!(client.ask("cache_memlimit 48\r\n"), "OK");
        let start = Instant::now();
        let limit = 48 << 20;
        loop {
            let (own, resident) = (client.stat("larder_memory_bytes"), server.resident());
            if own <= limit + (1 << 20) && resident <= limit + BESIDE {
                break;
            }
            if start.elapsed() > LONG {
                done.store(true, Ordering::Relaxed);
                panic!("of 48 MiB: own figure {} MiB, resident {} MiB", own >> 20, resident >> 20);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn no_set_of_mixed_sizes_is_out_of_memory_while_flash_can_take_something() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), &["-m", "32", "--flash-size", "64m"]);
    let (mut client, mut rng) = (server.connect(), Rng::new(14));
    for batch in 0..1_000 {
        let sizes: Vec<usize> = (0..100).map(|_| mixed(&mut rng)).collect();
        for (answer, size) in client.sets(&mut rng, &sizes).iter().zip(&sizes) {
            assert_eq!(answer, "STORED", "{size} bytes, batch {batch}");
        }
    }
    assert_eq!(client.stat("store_no_memory"), 0);
    assert!(client.stat("extstore_objects_written") > 0, "flash takes something");
}
