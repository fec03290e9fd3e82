//! A hundred clients that are slow, broken or malicious.

use std::io::{ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use larder_base::Rng;

use super::{MIB, bound, descriptors, resident, seconds};
use crate::server::Site;

const CLIENTS: usize = 100;

/// One bad client: what it writes over and over without ever reading an answer.
struct Bad {
    kind: usize,
    stream: Option<UnixStream>,
    /// The rest of what is being written.
    pending: Vec<u8>,
    /// It has written what it wanted to leave half done.
    waits: bool,
}

impl Bad {
    /// What the client writes next. `true` when it then keeps silent.
    fn next(&self, rng: &mut Rng) -> (Vec<u8>, bool) {
        match self.kind % 10 {
            // Half a command, the other half of which never comes.
            0 => (b"set half 0 0 10".to_vec(), true),
            // Half a large value.
            1 => {
                let mut text = b"set large 0 0 1000000\r\n".to_vec();
                text.resize(text.len() + rng.range(1, 999_999) as usize, b'x');
                (text, true)
            }
            // A key without end.
            2 => (vec![b'k'; 64 << 10], false),
            3 => (
                b"get "
                    .iter()
                    .copied()
                    .chain(std::iter::repeat_n(b'k', 9_000))
                    .chain(*b"\r\n")
                    .collect(),
                false,
            ),
            // Lengths that cannot be.
            4 => {
                let lengths =
                    ["-1", "99999999999999999999", "-9223372036854775808", "2147483648", "x", ""];
                let length = lengths[rng.below(lengths.len() as u64) as usize];
                (format!("set neg 0 0 {length}\r\nms neg {length}\r\n").into_bytes(), false)
            }
            // Pipelines without end whose answers are never read: small, large, and many keys at a time.
            5 => (b"get small-1\r\n".repeat(1_000), false),
            6 => (b"get huge\r\nmg huge v k c\r\n".repeat(50), false),
            7 => {
                let mut text = b"get".to_vec();
                for _ in 0..200 {
                    text.extend_from_slice(b" huge");
                }
                text.extend_from_slice(b"\r\n");
                (text, false)
            }
            // Noise.
            8 => {
                let mut noise = vec![0; 8 << 10];
                rng.fill(&mut noise);
                (noise, false)
            }
            // Large values, written and never acknowledged to anyone.
            _ => {
                let mut text = format!("set big-{} 0 0 1000000\r\n", rng.below(40)).into_bytes();
                text.resize(text.len() + 1_000_000, b'y');
                text.extend_from_slice(b"\r\n");
                (text, false)
            }
        }
    }

    /// Writes what the socket takes.
    fn work(&mut self, site: &Site, rng: &mut Rng) -> usize {
        if self.stream.is_none() {
            let Ok(stream) = UnixStream::connect(site.socket()) else { return 0 };
            stream.set_nonblocking(true).unwrap();
            (self.stream, self.waits) = (Some(stream), false);
            self.pending.clear();
        }
        if self.pending.is_empty() && !self.waits {
            (self.pending, self.waits) = self.next(rng);
        }
        let Some(stream) = &mut self.stream else { return 0 };
        match stream.write(&self.pending) {
            Ok(n) => {
                self.pending.drain(..n);
                n
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => 0,
            // The server has had enough of it: it comes again.
            Err(_) => {
                self.stream = None;
                0
            }
        }
    }
}

#[test]
fn a_hundred_bad_clients_cost_no_more_than_is_promised() {
    let site = Site::new();
    let server = site.start(&["-m", "32", "-t", "2", "--flash-size", "96m", "-I", "1m"]);
    let mut good = server.connect();
    assert_eq!(good.set("huge", &vec![b'h'; 1_000_000]), "STORED");
    for i in 0..1_000 {
        assert_eq!(good.set(&format!("small-{i}"), format!("value-{i}").as_bytes()), "STORED");
    }
    let before = descriptors(server.pid());
    let stop = AtomicBool::new(false);
    let length = Duration::from_secs(seconds().min(20));
    let limit = bound(32 * MIB, CLIENTS as u64 + 1);
    let (most, longest, served, sent) = std::thread::scope(|scope| {
        let bad = scope.spawn(|| {
            let mut rng = Rng::new(99);
            let mut all: Vec<Bad> = (0..CLIENTS)
                .map(|kind| Bad { kind, stream: None, pending: Vec::new(), waits: false })
                .collect();
            let mut sent = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let n: usize = all.iter_mut().map(|b| b.work(&site, &mut rng)).sum();
                sent += n as u64;
                if n == 0 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            sent
        });
        let (mut most, mut longest, mut served) = (0, Duration::ZERO, 0u32);
        let start = Instant::now();
        let mut i = 0;
        while start.elapsed() < length {
            i += 1;
            let asked = Instant::now();
            let (key, value) = (format!("good-{}", i % 500), format!("mine-{i}"));
            assert_eq!(good.set(&key, value.as_bytes()), "STORED");
            if let Some(found) = good.get(&key) {
                assert_eq!(found, value.as_bytes());
                served += 1;
            }
            longest = longest.max(asked.elapsed());
            most = most.max(resident(server.pid()));
            std::thread::sleep(Duration::from_millis(2));
        }
        stop.store(true, Ordering::Relaxed);
        (most, longest, served, bad.join().unwrap())
    });
    eprintln!(
        "{} MiB written by {CLIENTS} bad clients; at most {} KiB resident of {} KiB allowed; {served} answers to the good \
         one, the slowest after {longest:?}",
        sent / MIB,
        most >> 10,
        limit >> 10
    );
    assert!(most <= limit, "{most} bytes resident, {limit} allowed");
    assert!(served > 20 && longest < Duration::from_secs(5), "{served} answers, {longest:?}");
    // They have gone: so have their descriptors.
    let start = Instant::now();
    while descriptors(server.pid()) > before {
        assert!(start.elapsed() < Duration::from_secs(10), "descriptors are left open");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(good);
    server.stop();
}
