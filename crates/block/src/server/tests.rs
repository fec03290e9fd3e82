use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use larder_runtime::{AlignedBuf, Payload};
use tempfile::TempDir;

use super::*;
use crate::backing::{self, Backing, Timeouts, Uri};
use crate::cache::service::pass_through;
use crate::nbd::server::TlsPolicy;
use crate::nbd::wire::command;
use crate::op::{FailureKind, Op};
use larder_nbd::testing::{HELLO, go, request};
use larder_volume::testing::{against_a_model, one, run};

/// A server over a file, without a cache.
struct Bench {
    dir: TempDir,
    server: Option<Server>,
}

impl Bench {
    fn start(size: u64, change: impl FnOnce(&mut ServerConfig)) -> Bench {
        let dir = TempDir::new().unwrap();
        File::create(dir.path().join("disk")).unwrap().set_len(size).unwrap();
        let mut bench = Bench { dir, server: None };
        let uri = format!("file:{}", bench.dir.path().join("disk").display());
        let server = bench.serve(&uri, false, "socket", change);
        bench.server = Some(server);
        bench
    }

    fn serve(
        &self,
        uri: &str,
        read_only: bool,
        socket: &str,
        change: impl FnOnce(&mut ServerConfig),
    ) -> Server {
        let uri: Uri = uri.parse().unwrap();
        let backing = backing::open(&uri, read_only, false, Timeouts::default()).unwrap();
        let volumes = Arc::new(Volumes::default());
        volumes.add(Volume::new("disk", backing, 4096, false)).unwrap();
        let socket = self.dir.path().join(socket);
        let listen = vec![Listen::unix(socket)];
        let mut config = ServerConfig { listen, ..ServerConfig::default() };
        change(&mut config);
        Server::start(config, volumes, pass_through).unwrap()
    }

    fn socket(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn client(&self, socket: &str) -> Box<dyn Backing> {
        let uri = format!("nbd+unix:///disk?socket={}", self.socket(socket));
        backing::open(&uri.parse().unwrap(), false, false, Timeouts::default()).unwrap()
    }
}

/// From end to end, and through a second server that has the first as its store.
#[test]
fn random_operations_through_one_server_and_two() {
    let bench = Bench::start(1 << 20, |_| {});
    let client = bench.client("socket");
    assert_eq!(client.capabilities().size, 1 << 20);
    assert!(client.capabilities().trim && client.capabilities().status);
    let model = against_a_model(&mut *client.session().unwrap(), 1 << 20, 1, 15);
    assert!(std::fs::read(bench.dir.path().join("disk")).unwrap() == model);
    std::fs::write(bench.dir.path().join("disk"), vec![0; 1 << 20]).unwrap();
    let first = format!("nbd+unix:///disk?socket={}", bench.socket("socket"));
    let second = bench.serve(&first, false, "second", |c| c.threads = 3);
    let client = bench.client("second");
    let model = against_a_model(&mut *client.session().unwrap(), 1 << 20, 2, 15);
    assert!(std::fs::read(bench.dir.path().join("disk")).unwrap() == model);
    assert!(second.counters().requests.load(Ordering::Relaxed) > 200);
    second.stop();
    drop(client);
    // Everybody has gone: the first server notices.
    let counters = bench.server.as_ref().unwrap().counters();
    let end = Instant::now() + Duration::from_secs(120);
    while counters.connections.load(Ordering::Relaxed) > 0 {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Little memory, large requests on many connections: all of them are served.
#[test]
fn buffers_that_hardly_suffice() {
    let bench = Bench::start(32 << 20, |config| {
        config.threads = 1;
        config.buffer_bytes = 9 << 20;
        config.limits = Limits { requests: 4, bytes: 9 << 20 };
    });
    let client = bench.client("socket");
    let mut sessions: Vec<_> = (0..4).map(|_| client.session().unwrap()).collect();
    for (i, session) in sessions.iter_mut().enumerate() {
        for k in 0..6u64 {
            let mut buf = AlignedBuf::zeroed(1 << 20);
            buf.fill(i as u8 * 16 + k as u8 + 1);
            let offset = (i as u64 * 8 + k) << 20;
            session.submit(k, Op::Write { offset, data: Payload::new(buf), fua: false });
        }
        session.flush(Instant::now());
    }
    for session in &mut sessions {
        assert!(run(&mut **session, 6).iter().all(|d| d.outcome.is_ok()));
    }
    // Read all at once: whoever does not read holds up the others, up to the server's timeout.
    std::thread::scope(|scope| {
        for (i, mut session) in sessions.into_iter().enumerate() {
            scope.spawn(move || {
                let offset = (i as u64 * 8) << 20;
                let done =
                    one(&mut *session, Op::Read { offset, buf: AlignedBuf::zeroed(6 << 20) });
                assert!(done.outcome.is_ok());
                let Op::Read { buf, .. } = done.op else { panic!() };
                for k in 0..6 {
                    let expected = i as u8 * 16 + k as u8 + 1;
                    assert!(buf[(k << 20)..][..1 << 20].iter().all(|&b| b == expected));
                }
            });
        }
    });
}

#[test]
fn a_read_only_export() {
    let mut bench = Bench::start(1 << 20, |_| {});
    // While one server writes to the file, another does not open it, to read it only either.
    bench.server.take().unwrap().stop();
    let uri = format!("file:{}", bench.dir.path().join("disk").display());
    let _server = bench.serve(&uri, true, "ro", |_| {});
    let uri: Uri = format!("nbd+unix:///disk?socket={}", bench.socket("ro")).parse().unwrap();
    let error = backing::open(&uri, false, false, Timeouts::default()).unwrap_err().to_string();
    assert!(error.contains("read-only"), "{error}");
    let client = backing::open(&uri, true, false, Timeouts::default()).unwrap();
    let mut session = client.session().unwrap();
    let data = Payload::new(AlignedBuf::zeroed(512));
    let done = one(&mut *session, Op::Write { offset: 0, data, fua: false });
    assert_eq!(done.outcome.unwrap_err().kind, FailureKind::Denied);
    one(&mut *session, Op::Read { offset: 0, buf: AlignedBuf::zeroed(512) }).outcome.unwrap();
}

/// Bad clients: nonsense, half a handshake, half a request, replies that are never read. The others are served.
#[test]
fn bad_clients() {
    let bench = Bench::start(8 << 20, |config| {
        config.threads = 1;
        config.timeout = Duration::from_millis(2500);
        config.buffer_bytes = 12 << 20;
    });
    let connect = || UnixStream::connect(bench.socket("socket")).unwrap();
    let mut greeting = [0; 18];
    let mut nonsense = connect();
    nonsense.read_exact(&mut greeting).unwrap();
    nonsense.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    assert_eq!(nonsense.read(&mut greeting).unwrap(), 0, "closed");
    let mute = connect();
    // Holds a large buffer, then nothing.
    let mut half = connect();
    half.write_all(&HELLO).unwrap();
    half.write_all(&go("disk")).unwrap();
    half.write_all(&request(command::WRITE, 0, 1, 0, 8 << 20)).unwrap();
    half.write_all(&[7; 1000]).unwrap();
    // Asks for much and does not read it.
    let mut deaf = connect();
    deaf.write_all(&HELLO).unwrap();
    deaf.write_all(&go("disk")).unwrap();
    for i in 0..100 {
        deaf.write_all(&request(command::READ, 0, i, 0, 2 << 20)).unwrap();
    }
    std::thread::sleep(Duration::from_millis(300));
    let client = bench.client("socket");
    let mut session = client.session().unwrap();
    let mut buf = AlignedBuf::zeroed(4 << 20);
    buf.fill(3);
    let begin = Instant::now();
    one(&mut *session, Op::Write { offset: 0, data: Payload::new(buf), fua: false })
        .outcome
        .unwrap();
    assert!(begin.elapsed() < Duration::from_secs(120));
    let counters = bench.server.as_ref().unwrap().counters();
    let end = Instant::now() + Duration::from_secs(120);
    // The mute one, and one of those that held memory, are gone in the end.
    while counters.connections.load(Ordering::Relaxed) > 4 {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(counters.broken.load(Ordering::Relaxed), 1);
    drop((mute, half, deaf));
}

/// Chooses the export, by hand.
fn enter(stream: &mut (impl Read + Write)) {
    stream.write_all(&HELLO).unwrap();
    stream.write_all(&go("disk")).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    loop {
        let mut head = [0; 20];
        stream.read_exact(&mut head).unwrap();
        let len = u32::from_be_bytes(head[16..].try_into().unwrap());
        stream.read_exact(&mut vec![0; len as usize]).unwrap();
        if head[12..16] == [0, 0, 0, 1] {
            break;
        }
    }
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(120);
    while !is() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One client has all the memory and reads nothing; others have asked for as much, and hang up. Nothing of theirs is begun, and
/// nobody waits for it. Whoever says goodbye is answered first.
#[test]
fn requests_of_clients_that_hung_up_are_not_begun() {
    const LEN: u32 = 6 << 20;
    let bench = Bench::start(8 << 20, |config| {
        config.threads = 1;
        config.buffer_bytes = 9 << 20;
        (config.timeout, config.impatience) =
            (Duration::from_secs(3600), Duration::from_secs(3600));
        config.listen.push(Listen::tcp("127.0.0.1:0"));
    });
    let server = bench.server.as_ref().unwrap();
    let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let counters = server.counters();
    let mut holder = UnixStream::connect(bench.socket("socket")).unwrap();
    enter(&mut holder);
    holder.write_all(&request(command::READ, 0, 1, 0, LEN)).unwrap();
    wait_until("the first has its memory", || load(&counters.requests) == 1);
    let asks = [request(command::READ, 0, 1, 0, LEN), request(command::READ, 0, 2, 4096, LEN)];
    let mut over_unix = Vec::new();
    let mut over_tcp = Vec::new();
    for _ in 0..10 {
        let mut stream = UnixStream::connect(bench.socket("socket")).unwrap();
        enter(&mut stream);
        stream.write_all(&asks.concat()).unwrap();
        over_unix.push(stream);
        let mut stream = std::net::TcpStream::connect(server.addresses()[0]).unwrap();
        enter(&mut stream);
        stream.write_all(&asks.concat()).unwrap();
        over_tcp.push(stream);
    }
    let mut polite = std::net::TcpStream::connect(server.addresses()[0]).unwrap();
    enter(&mut polite);
    polite.write_all(&asks[0]).unwrap();
    polite.write_all(&request(command::DISC, 0, 3, 0, 0)).unwrap();
    polite.shutdown(std::net::Shutdown::Write).unwrap();
    drop((over_unix, over_tcp));
    wait_until("they are gone", || load(&counters.connections) == 2);
    assert_eq!((load(&counters.requests), load(&counters.abandoned)), (1, 40));
    // The first reads at last, and the polite one has its turn.
    let mut reply = vec![0; 16 + LEN as usize];
    holder.read_exact(&mut reply).unwrap();
    polite.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    assert_eq!(polite.read(&mut reply).unwrap(), 0);
}

/// Whoever connects and asks nothing keeps nobody out; whoever uses a volume stays.
#[test]
fn connections_that_ask_nothing_make_way() {
    let bench = Bench::start(1 << 20, |config| {
        config.threads = 1;
        config.connections = 4;
        config.gives_way = Duration::ZERO;
    });
    let client = bench.client("socket");
    let mut session = client.session().unwrap();
    let mut asks = || one(&mut *session, Op::Read { offset: 0, buf: AlignedBuf::zeroed(512) });
    asks().outcome.unwrap();
    let counters = bench.server.as_ref().unwrap().counters();
    let mut idle: Vec<UnixStream> = Vec::new();
    for _ in 0..20 {
        let mut stream = UnixStream::connect(bench.socket("socket")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        enter(&mut stream);
        idle.push(stream);
    }
    let other = bench.client("socket");
    one(&mut *other.session().unwrap(), Op::Flush).outcome.unwrap();
    asks().outcome.unwrap();
    assert!(counters.made_way.load(Ordering::Relaxed) >= 17);
}

/// A worker whose connections are all in use looks to the others for one that makes way.
#[test]
fn a_connection_of_another_worker_makes_way() {
    let bench = Bench::start(1 << 20, |config| {
        config.threads = 2;
        config.connections = 4;
        config.gives_way = Duration::ZERO;
    });
    // Dealt in turn: those of one worker ask, those of the other do not.
    let mut streams: Vec<UnixStream> = Vec::new();
    for number in 0..4u64 {
        let mut stream = UnixStream::connect(bench.socket("socket")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        enter(&mut stream);
        if number.is_multiple_of(2) {
            stream.write_all(&request(command::FLUSH, 0, number, 0, 0)).unwrap();
            stream.read_exact(&mut [0; 16]).unwrap();
        }
        streams.push(stream);
    }
    let counters = bench.server.as_ref().unwrap().counters();
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let mut late = UnixStream::connect(bench.socket("socket")).unwrap();
    late.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    enter(&mut late);
    assert_eq!((load(&counters.made_way), load(&counters.refused)), (1, 0));
    for stream in streams.iter_mut().step_by(2) {
        stream.write_all(&request(command::FLUSH, 0, 9, 0, 0)).unwrap();
        stream.read_exact(&mut [0; 16]).unwrap();
    }
}

/// One address does not take all connections.
#[test]
fn one_address_does_not_have_all_connections() {
    let bench = Bench::start(1 << 20, |config| {
        config.per_peer = 2;
        config.listen.push(Listen::tcp("127.0.0.1:0"));
    });
    let server = bench.server.as_ref().unwrap();
    let connect = || std::net::TcpStream::connect(server.addresses()[0]).unwrap();
    let mut greeting = [0; 18];
    let mut list: Vec<_> = (0..3).map(|_| connect()).collect();
    let greeted: Vec<bool> = list.iter_mut().map(|s| s.read_exact(&mut greeting).is_ok()).collect();
    assert_eq!(greeted, [true, true, false]);
    assert!(UnixStream::connect(bench.socket("socket")).unwrap().read_exact(&mut greeting).is_ok());
    assert_eq!(server.counters().refused.load(Ordering::Relaxed), 1);
    drop(list);
    wait_until("its places are free again", || connect().read_exact(&mut greeting).is_ok());
}

/// Replies wait for room in the socket, which the poll is asked for only then; afterwards all goes on as before.
#[test]
fn a_client_that_reads_late() {
    const LEN: u32 = 1 << 20;
    let bench = Bench::start(8 << 20, |_| {});
    let disk: Vec<u8> = (0..8u32 << 20).map(|i| (i * 7 + (i >> 12)) as u8).collect();
    std::fs::write(bench.dir.path().join("disk"), &disk).unwrap();
    let mut stream = UnixStream::connect(bench.socket("socket")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    enter(&mut stream);
    for round in 0..3 {
        for i in 0..40 {
            let at = (i * 3 + round) % 7 * u64::from(LEN) + 512;
            stream.write_all(&request(command::READ, 0, i, at, LEN)).unwrap();
        }
        std::thread::sleep(Duration::from_millis(200));
        let (mut head, mut data) = ([0; 16], vec![0; LEN as usize]);
        for _ in 0..40 {
            stream.read_exact(&mut head).unwrap();
            stream.read_exact(&mut data).unwrap();
            let i = u64::from_be_bytes(head[8..].try_into().unwrap());
            let at = ((i * 3 + round) % 7 * u64::from(LEN) + 512) as usize;
            assert!(head[4..8] == [0; 4] && data[..] == disk[at..at + LEN as usize]);
        }
    }
}

#[test]
fn too_many_connections() {
    let bench = Bench::start(1 << 20, |config| {
        config.connections = 2;
        config.gives_way = Duration::from_secs(3600);
    });
    let mut greeting = [0; 18];
    let mut list: Vec<UnixStream> = Vec::new();
    for i in 0..3 {
        let mut stream = UnixStream::connect(bench.socket("socket")).unwrap();
        assert_eq!(stream.read_exact(&mut greeting).is_ok(), i < 2);
        list.push(stream);
    }
    drop(list);
    // Their places are free again.
    let end = Instant::now() + Duration::from_secs(120);
    loop {
        let mut stream = UnixStream::connect(bench.socket("socket")).unwrap();
        if stream.read_exact(&mut greeting).is_ok() {
            break;
        }
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn sockets() {
    let bench = Bench::start(1 << 20, |config| config.listen.push(Listen::tcp("127.0.0.1:0")));
    let server = bench.server.as_ref().unwrap();
    let address = server.addresses()[0];
    let uri: Uri = format!("nbd://{address}/disk").parse().unwrap();
    let client = backing::open(&uri, false, false, Timeouts::default()).unwrap();
    let model = against_a_model(&mut *client.session().unwrap(), 1 << 20, 3, 5);
    assert!(std::fs::read(bench.dir.path().join("disk")).unwrap() == model);
    let again = |listen: Listen| {
        let config = ServerConfig { listen: vec![listen], ..ServerConfig::default() };
        Server::start(config, Arc::default(), pass_through).map(drop).unwrap_err().to_string()
    };
    assert!(again(Listen::unix(bench.socket("socket"))).contains("another server"));
    assert!(again(Listen::unix(bench.socket("disk"))).contains("not a socket"));
    assert!(again(Listen::tcp(address.to_string())).contains("cannot listen on tcp:"));
    // It takes its path with it.
    let path = bench.dir.path().join("socket");
    assert!(path.exists());
    if let Some(server) = bench.server {
        server.stop();
    }
    assert!(!path.exists());
}

/// A certificate for `localhost` that signs itself, in a directory as libnbd wants it.
pub(crate) fn certificate(dir: &std::path::Path) -> TlsFiles {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
    let (certificate, key) = (dir.join("server-cert.pem"), dir.join("server-key.pem"));
    std::fs::write(&certificate, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    std::fs::write(dir.join("ca-cert.pem"), made.cert.pem()).unwrap();
    TlsFiles { certificate, key, client_ca: None }
}

/// TLS from STARTTLS on, by hand: the handshake in plain text, then a request under TLS, in pieces.
#[test]
fn tls() {
    use larder_nbd::testing::opt;
    use rustls::pki_types::ServerName;
    use rustls::pki_types::pem::PemObject;

    let dir = TempDir::new().unwrap();
    let files = certificate(dir.path());
    let bench = Bench::start(8 << 20, |config| {
        config.tls = Some(files.clone());
        config.listen[0].tls = Some(TlsPolicy::Required);
        // On a Unix socket it is the client's choice, unless it is said otherwise.
        let free = Listen::unix(
            config.listen[0].to_string().replace("unix:", "").replace(",tls=require", "2"),
        );
        config.listen.push(free);
    });
    let free = bench.client("socket2");
    assert_eq!(free.capabilities().size, 8 << 20);
    // Without TLS: refused in words.
    let uri: Uri = format!("nbd+unix:///disk?socket={}", bench.socket("socket")).parse().unwrap();
    let error = backing::open(&uri, false, false, Timeouts::default()).unwrap_err().to_string();
    assert!(error.contains("requires TLS"), "{error}");

    let mut socket = UnixStream::connect(bench.socket("socket")).unwrap();
    let mut greeting = [0; 18];
    socket.read_exact(&mut greeting).unwrap();
    socket.write_all(&HELLO).unwrap();
    socket.write_all(&opt(crate::nbd::wire::option::STARTTLS, &[])).unwrap();
    let mut ack = [0; 20];
    socket.read_exact(&mut ack).unwrap();
    assert_eq!(ack[8..], [0, 0, 0, 5, 0, 0, 0, 1, 0, 0, 0, 0]);
    let mut roots = rustls::RootCertStore::empty();
    roots
        .add(rustls::pki_types::CertificateDer::from_pem_file(&files.certificate).unwrap())
        .unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let session = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = rustls::StreamOwned::new(session, socket);
    stream.write_all(&go("disk")).unwrap();
    let mut answer = [0; 32 + 34 + 20];
    stream.read_exact(&mut answer).unwrap();
    let mut write = request(command::WRITE, 0, 7, 4096, 6 << 20);
    write.resize(write.len() + (6 << 20), 0xab);
    stream.write_all(&write).unwrap();
    let mut reply = [0; 16];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    // Larger than what may be buffered at a time.
    stream.write_all(&request(command::READ, 0, 8, 4096, 6 << 20)).unwrap();
    stream.read_exact(&mut reply).unwrap();
    let mut data = vec![0; 6 << 20];
    stream.read_exact(&mut data).unwrap();
    assert!(data.iter().all(|&b| b == 0xab));
    stream.write_all(&request(command::DISC, 0, 0, 0, 0)).unwrap();
    assert_eq!(stream.read(&mut reply).unwrap(), 0, "closed with a word of leave");
}

#[test]
fn certificates_that_cannot_be_used() {
    let dir = TempDir::new().unwrap();
    let files = certificate(dir.path());
    let why = |change: &dyn Fn(&mut TlsFiles)| {
        let mut files = files.clone();
        change(&mut files);
        let config = ServerConfig { tls: Some(files), ..ServerConfig::default() };
        Server::start(config, Arc::default(), pass_through).map(drop).unwrap_err().to_string()
    };
    assert!(
        why(&|f| f.certificate = "/nonexistent".into()).contains("'/nonexistent' cannot be read")
    );
    assert!(why(&|f| f.certificate = f.key.clone()).contains("holds no certificate"));
    assert!(why(&|f| f.key = f.certificate.clone()).contains("cannot be read"));
}
