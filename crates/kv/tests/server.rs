//! The server over real sockets, on the model engine.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of the server use sockets and clocks"
)]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use larder_base::{ByteSize, Now, ObjectHash, UnixSecs};
use larder_engine::kv::api::{Effects, Op, Request};
use larder_kv::config::{Config, ListenAddress, ListenTls, Machine, Settings, TlsConfig};
use larder_kv::connection::{Engine, Fetched, Step};
use larder_kv::model::ModelEngine;
use larder_kv::server::{Server, ServerError, Span, Store};
use larder_kv::stats::CacheStats;
use larder_runtime::testing::MemoryDevice;
use larder_runtime::{Clock, Device};
use larder_settings::LivePage;

fn machine() -> Machine {
    Machine {
        memory: 1 << 30,
        cpus: 2,
        state_dir: "/nonexistent".into(),
        state_dir_is_named: true,
        listen: None,
        free_space: |_| Some(1 << 40),
        can_hold_files: |_| Ok(()),
    }
}

fn config(settings: Settings) -> Config {
    let given = Settings {
        flash: Some(vec!["none".into()]),
        threads: Some(2),
        live_page: LivePage { http: Some("off".into()), ..LivePage::default() },
        ..settings
    };
    let mut config = Config::resolve(given, &machine()).unwrap();
    if config.unix.is_none() {
        config.listen = vec![any_port()];
    }
    config
}

fn any_port() -> ListenAddress {
    ListenAddress { host: "127.0.0.1".into(), port: 0, tls: ListenTls::Default, application: None }
}

fn start(config: Config) -> Server<ModelEngine> {
    let model = Arc::new(ModelEngine::new(config.max_item_size as usize));
    Server::start(config, model, Arc::new(Clock::start()), Box::new(|| {})).unwrap()
}

struct Client {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Client {
    fn new(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let reader = BufReader::new(stream.try_clone().unwrap());
        Client { stream, reader }
    }

    fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, bytes: &[u8]) -> String {
        self.send(bytes);
        self.line()
    }

    fn stats(&mut self, argument: &str) -> Vec<(String, String)> {
        self.send(format!("stats{argument}\r\n").as_bytes());
        let mut out = Vec::new();
        loop {
            let line = self.line();
            if line == "END" {
                return out;
            }
            let rest =
                line.strip_prefix("STAT ").unwrap_or_else(|| panic!("not a statistic: '{line}'"));
            let (name, value) = rest.split_once(' ').unwrap();
            out.push((name.to_owned(), value.to_owned()));
        }
    }

    fn stat(&mut self, name: &str) -> u64 {
        let all = self.stats("");
        all.iter()
            .find(|(n, _)| n == name)
            .unwrap_or_else(|| panic!("no {name}"))
            .1
            .parse()
            .unwrap()
    }
}

/// Waits for something that other threads bring about.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(120), "not in two minutes: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn commands_and_statistics_over_tcp() {
    let server = start(config(Settings::default()));
    let address = server.addresses()[0];
    let mut a = Client::new(address);
    let mut b = Client::new(address);
    assert_eq!(a.ask(b"set k 5 0 5\r\nhello\r\n"), "STORED");
    assert_eq!(b.ask(b"get k\r\n"), "VALUE k 5 5");
    assert_eq!((b.line().as_str(), b.line().as_str()), ("hello", "END"));
    // Both connections' workers are counted as soon as the answers are there.
    assert_eq!((a.stat("cmd_set"), a.stat("get_hits"), b.stat("cmd_get")), (1, 1, 1));
    // memcached's own test counts its lines; ours have some of their own.
    assert_eq!(a.stats("").len(), 91);
    assert_eq!((a.stat("curr_connections"), a.stat("threads")), (2, 2));
    let settings = a.stats(" settings");
    assert!(settings.contains(&("item_size_max".into(), "1048576".into())), "{settings:?}");
    let conns = b.stats(" conns");
    assert!(conns.iter().any(|(n, v)| n.ends_with(":state") && v == "conn_listening"));
    assert!(
        conns.iter().any(|(n, v)| n.ends_with(":listen_addr") && *v == format!("tcp:{address}"))
    );
    assert_eq!(a.ask(b"stats nonsense\r\n"), "ERROR");
    assert_eq!(a.ask(b"stats reset\r\n"), "RESET");
    assert_eq!((a.stat("cmd_set"), a.stat("get_hits")), (0, 0));
    server.stop();
}

#[test]
fn a_pipeline_is_answered_in_order_however_it_is_cut() {
    let server = start(config(Settings::default()));
    let mut c = Client::new(server.addresses()[0]);
    let mut sent = Vec::new();
    let mut expected = Vec::new();
    for i in 0..2_000 {
        let value = "v".repeat(i % 300);
        sent.extend_from_slice(
            format!("set k{i} 0 0 {}\r\n{value}\r\nget k{i}\r\n", value.len()).as_bytes(),
        );
        expected.extend_from_slice(
            format!("STORED\r\nVALUE k{i} 0 {}\r\n{value}\r\nEND\r\n", value.len()).as_bytes(),
        );
    }
    let mut writer = c.stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        let mut at = 0;
        let mut step = 1;
        while at < sent.len() {
            let end = (at + step).min(sent.len());
            writer.write_all(&sent[at..end]).unwrap();
            at = end;
            step = step * 7 % 40_009 + 1;
        }
    });
    let mut got = vec![0; expected.len()];
    c.reader.read_exact(&mut got).unwrap();
    assert!(got == expected);
    sender.join().unwrap();
    server.stop();
}

#[test]
fn a_unix_socket_has_its_permissions_and_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let settings = Settings {
        unix_socket: Some(path.clone()),
        unix_mask: "0770".into(),
        ..Settings::default()
    };
    // A stale socket of a server that was killed is taken over.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = start(config(settings.clone()));
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o770);
    let mut c = UnixStream::connect(&path).unwrap();
    c.write_all(b"set a 0 0 1\r\nx\r\nget a\r\nquit\r\n").unwrap();
    let mut text = String::new();
    c.read_to_string(&mut text).unwrap();
    assert_eq!(text, "STORED\r\nVALUE a 0 1\r\nx\r\nEND\r\n");
    // A second server does not steal it.
    let e = refused(config(settings.clone()));
    assert!(e.contains("another server listens") && e.contains("sock"), "{e}");
    server.stop();
    assert!(!path.exists());
    // Something else at that path is left alone.
    std::fs::write(&path, "precious").unwrap();
    let e = refused(config(settings));
    assert!(e.contains("not a socket"), "{e}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

fn refused(config: Config) -> String {
    let model = Arc::new(ModelEngine::new(1 << 20));
    let result: Result<Server<ModelEngine>, ServerError> =
        Server::start(config, model, Arc::new(Clock::start()), Box::new(|| {}));
    match result {
        Ok(_) => panic!("the server started"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn a_taken_port_is_an_error_with_a_remedy() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let mut config = config(Settings::default());
    config.listen[0].port = port;
    let e = refused(config);
    assert!(e.contains(&port.to_string()) && e.contains("choose another port"), "{e}");
}

struct Pem {
    _dir: tempfile::TempDir,
    files: TlsConfig,
    certificate: rustls::pki_types::CertificateDer<'static>,
}

fn certificate() -> Pem {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    Pem { files: TlsConfig::new(certificate, key), certificate: made.cert.der().clone(), _dir: dir }
}

#[test]
fn tls_carries_large_values_both_ways_and_plain_clients_are_turned_away() {
    let pem = certificate();
    let mut config = config(Settings::default());
    config.tls = Some(pem.files.clone());
    let server = start(config);
    let mut roots = rustls::RootCertStore::empty();
    roots.add(pem.certificate.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let mut tls =
        rustls::ClientConnection::new(Arc::new(client), "localhost".try_into().unwrap()).unwrap();
    let mut socket = TcpStream::connect(server.addresses()[0]).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut stream = rustls::Stream::new(&mut tls, &mut socket);
    let value: Vec<u8> = (0..900_000u32).map(|i| b'a' + (i % 23) as u8).collect();
    stream.write_all(format!("set big 0 0 {}\r\n", value.len()).as_bytes()).unwrap();
    stream.write_all(&value).unwrap();
    stream.write_all(b"\r\nget big\r\n").unwrap();
    let head = format!("STORED\r\nVALUE big 0 {}\r\n", value.len());
    let mut got = vec![0; head.len() + value.len() + 7];
    stream.read_exact(&mut got).unwrap();
    assert!(
        got.starts_with(head.as_bytes()) && got[head.len()..head.len() + value.len()] == value[..]
    );

    let mut plain = TcpStream::connect(server.addresses()[0]).unwrap();
    plain.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    plain.write_all(b"get a\r\nget a\r\n").unwrap();
    let mut answer = Vec::new();
    // A TLS alert, then the end (or a reset): never an answer in plain text.
    match plain.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset),
    }
    assert!(!answer.windows(3).any(|w| w == b"END"));
    // The TLS client is still served.
    stream.write_all(b"version\r\n").unwrap();
    let mut version = [0; 8];
    stream.read_exact(&mut version).unwrap();
    assert_eq!(&version, b"VERSION ");
    server.stop();
}

#[test]
fn bad_certificates_are_named() {
    let pem = certificate();
    let files = |f: fn(&TlsConfig) -> TlsConfig| {
        let mut c = config(Settings::default());
        c.tls = Some(f(&pem.files));
        refused(c)
    };
    let e = files(|f| TlsConfig { certificate: "/nonexistent.pem".into(), ..f.clone() });
    assert!(e.contains("tls-certificate '/nonexistent.pem'"), "{e}");
    let e = files(|f| TlsConfig { certificate: f.key.clone(), ..f.clone() });
    assert!(e.contains("holds no certificate"), "{e}");
    let e = files(|f| TlsConfig { key: f.certificate.clone(), ..f.clone() });
    assert!(e.contains("tls-key"), "{e}");
}

#[test]
fn connections_over_the_limit_are_told_so() {
    let server = start(config(Settings { conn_limit: 3, ..Settings::default() }));
    let address = server.addresses()[0];
    let mut kept: Vec<Client> = (0..3).map(|_| Client::new(address)).collect();
    for c in &mut kept {
        assert!(c.ask(b"version\r\n").starts_with("VERSION"));
    }
    let mut over = Client::new(address);
    assert_eq!(over.line(), "ERROR Too many open connections");
    assert_eq!(over.line(), "", "and closed");
    assert_eq!(kept[0].stat("rejected_connections"), 1);
    drop(kept.pop());
    eventually("a place is free again", || {
        let mut c = Client::new(address);
        c.send(b"version\r\n");
        c.line().starts_with("VERSION")
    });
    server.stop();
}

#[test]
fn without_maxconns_fast_connections_wait_their_turn() {
    let server =
        start(config(Settings { conn_limit: 1, maxconns_fast: false, ..Settings::default() }));
    let address = server.addresses()[0];
    let mut first = Client::new(address);
    assert!(first.ask(b"version\r\n").starts_with("VERSION"));
    let mut second = Client::new(address);
    second.send(b"version\r\n");
    eventually("accepting has paused", || first.stat("listen_disabled_num") == 1);
    assert_eq!(first.stat("accepting_conns"), 0);
    drop(first);
    assert!(second.line().starts_with("VERSION"));
    assert!(second.stat("time_in_listen_disabled_us") > 0);
    server.stop();
}

#[test]
fn idle_connections_are_closed_and_active_ones_are_not() {
    let server = start(config(Settings { idle_timeout: 1, ..Settings::default() }));
    let address = server.addresses()[0];
    let mut idle = Client::new(address);
    let mut active = Client::new(address);
    assert!(idle.ask(b"version\r\n").starts_with("VERSION"));
    let start = Instant::now();
    while active.stat("idle_kicks") == 0 {
        assert!(start.elapsed() < Duration::from_secs(120));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(start.elapsed() > Duration::from_millis(900), "closed too early");
    assert_eq!(idle.line(), "", "closed");
    server.stop();
}

#[test]
fn clients_that_do_not_read_cost_bounded_memory_and_hold_up_nobody() {
    let server =
        start(config(Settings { buffer_limit: Some(ByteSize::mib(4)), ..Settings::default() }));
    let address = server.addresses()[0];
    let mut good = Client::new(address);
    let value = vec![b'x'; 500_000];
    good.send(b"set big 0 0 500000\r\n");
    good.send(&value);
    assert_eq!(good.ask(b"\r\n"), "STORED");
    let before = larder_runtime::machine::resident_memory().unwrap();
    let mut slow = Vec::new();
    for i in 0..40 {
        let mut c = TcpStream::connect(address).unwrap();
        if i % 2 == 0 {
            // Answers that nobody reads.
            c.set_nonblocking(true).unwrap();
            let many = b"get big\r\n".repeat(2_000);
            drop(c.write_all(&many));
        } else {
            // Bodies that never come.
            c.write_all(b"set s 0 0 900000\r\nabc").unwrap();
        }
        slow.push(c);
    }
    for _ in 0..50 {
        let start = Instant::now();
        assert!(good.ask(b"version\r\n").starts_with("VERSION"));
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(4));
    }
    let grown = larder_runtime::machine::resident_memory().unwrap().saturating_sub(before);
    assert!(grown < 64 << 20, "{} MiB for 40 slow clients", grown >> 20);
    drop(slow);
    // What they held comes back: large values flow again.
    good.send(b"get big\r\n");
    assert_eq!(good.line(), "VALUE big 0 500000");
    let mut rest = vec![0; 500_000 + 7];
    good.reader.read_exact(&mut rest).unwrap();
    eventually("the slow ones are gone", || good.stat("curr_connections") == 1);
    server.stop();
}

#[test]
fn half_closed_clients_get_their_answers() {
    let server = start(config(Settings::default()));
    let mut c = Client::new(server.addresses()[0]);
    c.send(b"set a 0 0 1\r\n1\r\nget a\r\nget par");
    c.stream.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    c.reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "STORED\r\nVALUE a 0 1\r\n1\r\nEND\r\n");
    server.stop();
}

#[test]
fn stopping_finishes_what_has_arrived() {
    let server = start(config(Settings::default()));
    let mut c = Client::new(server.addresses()[0]);
    assert!(c.ask(b"version\r\n").starts_with("VERSION"));
    c.send(&b"get x\r\n".repeat(1_000));
    let mut idle = Client::new(server.addresses()[0]);
    assert!(idle.ask(b"version\r\n").starts_with("VERSION"));
    let start = Instant::now();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        c.reader.read_to_string(&mut text).unwrap();
        text
    });
    server.stop();
    assert!(start.elapsed() < Duration::from_secs(60));
    assert_eq!(reader.join().unwrap(), "END\r\n".repeat(1_000));
    assert_eq!(idle.line(), "");
}

/// What waits for room, and what was sent behind it, is served before the server has stopped.
#[test]
fn stopping_finishes_what_waits_for_room() {
    let model = Arc::new(ModelEngine::new(1 << 20));
    model.put_off(100);
    let clock = Arc::new(Clock::start());
    let server =
        Server::start(config(Settings::default()), model.clone(), clock, Box::new(|| {})).unwrap();
    let mut c = Client::new(server.addresses()[0]);
    let value = vec![b'v'; 100_000];
    c.send(b"set a 0 0 100000\r\n");
    c.send(&value);
    c.send(b"\r\ndelete a\r\n");
    eventually("it waits", || model.puts_off() < 100);
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        c.reader.read_to_string(&mut text).unwrap();
        text
    });
    server.stop();
    assert_eq!(reader.join().unwrap(), "STORED\r\nDELETED\r\n");
}

#[test]
fn the_shutdown_command_tells_the_process() {
    let told = Arc::new(AtomicUsize::new(0));
    let config = config(Settings { enable_shutdown: true, ..Settings::default() });
    let model = Arc::new(ModelEngine::new(1 << 20));
    let seen = told.clone();
    let on_shutdown = Box::new(move || {
        seen.fetch_add(1, Ordering::SeqCst);
    });
    let server = Server::start(config, model, Arc::new(Clock::start()), on_shutdown).unwrap();
    let mut c = Client::new(server.addresses()[0]);
    c.send(b"shutdown\r\n");
    eventually("the process was told", || told.load(Ordering::SeqCst) == 1);
    server.stop();
}

/// A store whose reads must all see flash first: a model behind a device, for the way through the ring.
struct Flashy {
    model: ModelEngine,
    device: Arc<MemoryDevice>,
    reads: AtomicU64,
    failures: AtomicU64,
}

impl Engine for Flashy {
    type Read = u64;
    fn hash(&self, key: &[u8]) -> ObjectHash {
        self.model.hash(key)
    }
    fn fits(&self, key_len: usize, value_len: usize) -> bool {
        self.model.fits(key_len, value_len)
    }
    fn read_len(&self, _read: &u64) -> usize {
        4096
    }
    fn execute<X: Effects>(
        &self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<Fetched<'_, u64>>,
        effects: &mut X,
    ) -> Step<u64> {
        match (request.op, fetched) {
            (Op::Get(_), None) => {
                self.reads.fetch_add(1, Ordering::Relaxed);
                return Step::Read(u64::from(request.key[request.key.len() - 1]) * 4096);
            }
            (Op::Get(_), Some(Fetched { read, bytes: Some(bytes) })) => {
                assert_eq!(bytes.len(), 4096);
                assert!(
                    bytes.iter().all(|b| u64::from(*b) == read / 4096),
                    "the bytes of another read"
                );
            }
            (Op::Get(_), Some(Fetched { bytes: None, .. })) => {
                self.failures.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
        match self.model.execute(now, request, None, effects) {
            Step::Done => Step::Done,
            Step::Read(_) => unreachable!("the model has no flash"),
        }
    }
    fn flush_all(&self, now: Now, at: UnixSecs) {
        self.model.flush_all(now, at);
    }
}

impl Store for Flashy {
    fn device(&self) -> Option<Arc<dyn Device>> {
        Some(self.device.clone())
    }
    fn span(&self, read: &u64) -> Span {
        Span { offset: *read, len: 4096 }
    }
    fn stats(&self, now: Now) -> CacheStats {
        self.model.stats(now)
    }
}

fn flashy() -> Arc<Flashy> {
    let image: Vec<u8> = (0..256 * 4096).map(|i| (i / 4096) as u8).collect();
    Arc::new(Flashy {
        model: ModelEngine::new(1 << 20),
        device: Arc::new(MemoryDevice::from_bytes(image)),
        reads: AtomicU64::new(0),
        failures: AtomicU64::new(0),
    })
}

#[test]
fn requests_that_wait_for_flash_go_through_the_ring_and_keep_their_order() {
    let store = flashy();
    let server = Server::start(
        config(Settings::default()),
        store.clone(),
        Arc::new(Clock::start()),
        Box::new(|| {}),
    )
    .unwrap();
    let address = server.addresses()[0];
    let threads: Vec<_> = (0..4)
        .map(|t| {
            std::thread::spawn(move || {
                let mut c = Client::new(address);
                for i in 0..60 {
                    let mut sent = String::new();
                    let mut expected = String::new();
                    for k in 0..30 {
                        let key = format!("{t}-{i}-{}", (b'0' + k) as char);
                        sent.push_str(&format!("set {key} 0 0 2\r\nv{}\r\nget {key}\r\n", k % 10));
                        expected.push_str(&format!(
                            "STORED\r\nVALUE {key} 0 2\r\nv{}\r\nEND\r\n",
                            k % 10
                        ));
                    }
                    c.send(sent.as_bytes());
                    let mut got = vec![0; expected.len()];
                    c.reader.read_exact(&mut got).unwrap();
                    assert_eq!(String::from_utf8(got).unwrap(), expected);
                }
            })
        })
        .collect();
    for t in threads {
        t.join().unwrap();
    }
    assert_eq!(store.reads.load(Ordering::Relaxed), 4 * 60 * 30);
    assert_eq!(store.failures.load(Ordering::Relaxed), 0);
    // Clients that go away while their reads are under way leave nothing behind.
    for _ in 0..50 {
        let mut c = Client::new(address);
        c.send(&b"get a b c d e f\r\n".repeat(20));
    }
    let mut c = Client::new(address);
    eventually("they are gone", || c.stat("curr_connections") == 1);
    // A worker times one turn in 64 or more, and one connection that waits for flash in each request is timed too.
    let before = c.stat("larder_latency_flash_samples");
    for i in 0..200 {
        let key = format!("timed-{i}-0");
        assert_eq!(c.ask(format!("set {key} 0 0 1\r\nx\r\n").as_bytes()), "STORED");
        c.send(format!("get {key}\r\n").as_bytes());
        assert_eq!(c.line(), format!("VALUE {key} 0 1"));
        assert_eq!(c.line(), "x");
        assert_eq!(c.line(), "END");
    }
    assert!(c.stat("larder_latency_flash_samples") > before);
    server.stop();
}

#[test]
fn the_live_page_and_the_metrics_answer() {
    let server = start(config(Settings::default()));
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let page = larder_kv::admin::start(socket, server.view(), &[]).unwrap();
    let mut c = Client::new(server.addresses()[0]);
    assert_eq!(c.ask(b"set k 0 0 1\r\nx\r\n"), "STORED");
    let get = |path: &str| {
        let mut s = TcpStream::connect(page.address()).unwrap();
        s.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        write!(s, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        s.read_to_string(&mut text).unwrap();
        text
    };
    let metrics = get("/metrics");
    assert!(metrics.contains("larder_kv_requests_total{command=\"set\"} 1\n"), "{metrics}");
    assert!(metrics.ends_with("# EOF\n"));
    for line in metrics.lines().skip_while(|l| !l.starts_with("# HELP")) {
        assert!(line.starts_with('#') || line.starts_with("larder_kv_"), "{line}");
    }
    eventually("a sample was taken", || get("/api/live.json").contains("\"dram_items\":1"));
    let html = get("/");
    assert!(
        html.contains("<title>Larder</title>")
            && !html.contains("http://")
            && !html.contains("https://")
    );
    assert!(get("/healthz").ends_with("ok\n"));
    assert!(get("/nothing").starts_with("HTTP/1.1 404"));
    drop(page);
    server.stop();
}

#[test]
fn an_auth_file_that_cannot_be_used_is_named() {
    let mut c = config(Settings::default());
    c.auth_file = Some(Path::new("/nonexistent/users").to_owned());
    let e = refused(c);
    assert!(e.contains("auth-file '/nonexistent/users'"), "{e}");
}

#[test]
fn a_pipeline_gives_way_after_its_turn() {
    let server = start(config(Settings { max_reqs_per_event: 1, ..Settings::default() }));
    let mut c = Client::new(server.addresses()[0]);
    c.send(&b"set k 0 0 1\r\nx\r\n".repeat(6));
    for _ in 0..6 {
        assert_eq!(c.line(), "STORED");
    }
    assert!(c.stat("conn_yields") >= 5);
    server.stop();
}

#[test]
fn latency_counts_the_server_s_time_and_not_the_client_s() {
    let server = start(config(Settings::default()));
    let mut c = Client::new(server.addresses()[0]);
    c.stream.set_nodelay(true).unwrap();
    let sampled = |c: &mut Client| {
        c.stats("").iter().find(|(n, _)| n == "larder_latency_dram_samples").unwrap().1.clone()
    };
    // One turn in 64 is timed: among these there is one that nothing answers, and then the client is silent.
    for _ in 0..80 {
        c.send(b"set k 0 0 1 noreply\r\nx\r\n");
        std::thread::sleep(Duration::from_millis(4));
    }
    std::thread::sleep(Duration::from_secs(6));
    for _ in 0..200 {
        assert_eq!(c.ask(b"mn\r\n"), "MN");
    }
    assert_ne!(sampled(&mut c), "0");
    let stats = c.stats("");
    let max = &stats.iter().find(|(n, _)| n == "larder_latency_dram_max_us").unwrap().1;
    assert!(max.parse::<f64>().unwrap() < 5_500_000.0, "{max} us");
    server.stop();
}

#[test]
fn udp_answers_in_numbered_datagrams() {
    let mut config = config(Settings::default());
    config.udp = vec![any_port()];
    let server = start(config);
    let mut c = Client::new(server.addresses()[0]);
    let value = "v".repeat(5000);
    c.stream
        .write_all(format!("set big 0 0 5000 noreply\r\n{value}\r\nmn\r\n").as_bytes())
        .unwrap();
    let mut line = String::new();
    c.reader.read_line(&mut line).unwrap();
    assert_eq!(line, "MN\r\n");
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let to = server.udp_addresses()[0];
    let ask = |header: [u8; 8], text: &str| {
        socket.send_to(&[&header[..], text.as_bytes()].concat(), to).unwrap();
        let mut parts: Vec<Option<Vec<u8>>> = Vec::new();
        loop {
            let mut buffer = [0; 2000];
            let (n, _) = socket.recv_from(&mut buffer).unwrap();
            assert_eq!(buffer[..2], header[..2]);
            let number = usize::from(u16::from_be_bytes([buffer[2], buffer[3]]));
            let total = usize::from(u16::from_be_bytes([buffer[4], buffer[5]]));
            parts.resize(total, None);
            parts[number] = Some(buffer[8..n].to_vec());
            if parts.iter().all(Option::is_some) {
                return String::from_utf8(parts.into_iter().flatten().flatten().collect()).unwrap();
            }
        }
    };
    let got = ask([1, 2, 0, 0, 0, 1, 0, 0], "get big\r\n");
    assert_eq!(got, format!("VALUE big 0 5000\r\n{value}\r\nEND\r\n"));
    assert_eq!(
        ask([3, 4, 0, 0, 0, 1, 0, 0], "set u 0 0 2\r\nhi\r\nget u\r\n"),
        "STORED\r\nVALUE u 0 2\r\nhi\r\nEND\r\n"
    );
    let refused = ask([5, 6, 0, 0, 0, 2, 0, 0], "get u\r\n");
    assert_eq!(refused, "SERVER_ERROR multi-packet request not supported\r\n");
    // What is no frame is passed over, and the next request is served.
    socket.send_to(b"short", to).unwrap();
    assert_eq!(ask([7, 8, 0, 0, 0, 1, 0, 0], "mn\r\nget half"), "MN\r\n");
    server.stop();
}

#[test]
fn stalled_uploads_hold_others_up_for_a_moment_only() {
    // Room for two large bodies at a time, and two clients that stop in the middle of theirs.
    let server =
        start(config(Settings { buffer_limit: Some(ByteSize::mib(2)), ..Settings::default() }));
    let address = server.addresses()[0];
    let set = b"set a 0 0 1000000\r\n";
    let mut stalled = [(); 2].map(|()| Client::new(address));
    for client in &mut stalled {
        client.send(set);
        client.send(&vec![b'x'; 600_000]);
    }
    // A hundred that only announce theirs take nothing.
    let mut announced: Vec<Client> = (0..100).map(|_| Client::new(address)).collect();
    announced.iter_mut().for_each(|client| client.send(set));
    let mut good = Client::new(address);
    eventually("both hold their share", || good.stat("read_buf_bytes") > 1_900_000);
    let began = Instant::now();
    let body = [&b"set b 0 0 1000000\r\n"[..], &vec![b'y'; 1_000_000], b"\r\n"].concat();
    assert_eq!(good.ask(&body), "STORED");
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "waited {took:?} for senders that stand still");
    assert!(good.stat("larder_big_buffer_stalls") >= 1);
    server.stop();
}
