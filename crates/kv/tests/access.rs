//! Who gets in, and who keeps others out: TLS, logins, clients that hold on to what all need.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of the server use sockets and clocks"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_kv::config::{Config, ListenAddress, ListenTls, Machine, extended_options};
use larder_kv::model::ModelEngine;
use larder_kv::server::Server;
use larder_net::page::MOST_CONNECTIONS;
use larder_runtime::Clock;
use larder_settings::{Said, of_sources};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion,
};

const LONG: Duration = Duration::from_secs(120);

/// The configuration of memcached's options over `settings`.
fn resolve(options: &str, settings: &[Said<'_>]) -> Result<Config, String> {
    let machine = Machine {
        memory: 1 << 30,
        cpus: 2,
        state_dir: "/nonexistent".into(),
        state_dir_is_named: true,
        listen: None,
        free_space: |_| Some(1 << 40),
        can_hold_files: |_| Ok(()),
    };
    let base = [("flash", "none"), ("threads", "2"), ("http", "off")];
    let options = extended_options(&[options.to_owned()]).map_err(|e| e.to_string())?.settings;
    let options: Vec<_> = options.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let given = of_sources(&[&options, settings, &base]).map_err(|e| e.to_string())?;
    Config::resolve(given, &machine).map_err(|e| e.to_string())
}

fn start(mut config: Config) -> Server<ModelEngine> {
    for l in &mut config.listen {
        (l.host, l.port) = ("127.0.0.1".into(), 0);
    }
    config.listen.truncate(1);
    serve(config)
}

fn serve(config: Config) -> Server<ModelEngine> {
    let model = Arc::new(ModelEngine::new(config.max_item_size as usize));
    Server::start(config, model, Arc::new(Clock::start()), Box::new(|| {})).unwrap()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < LONG, "not in two minutes: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// An authority, a server's certificate and a client's of it, and a client's of another authority.
struct Pki {
    dir: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, name);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

impl Pki {
    fn new() -> Pki {
        let pki = Pki { dir: tempfile::tempdir().unwrap(), authority: authority("ours") };
        std::fs::write(pki.path("ca.pem"), pki.authority.pem()).unwrap();
        pki.issue("server", &pki.authority);
        pki.issue("client", &pki.authority);
        pki.issue("foreign", &authority("theirs"));
        pki
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn issue(&self, who: &str, by: &CertifiedIssuer<'static, KeyPair>) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, by).unwrap();
        std::fs::write(self.path(&format!("{who}.pem")), certificate.pem()).unwrap();
        std::fs::write(self.path(&format!("{who}.key")), key.serialize_pem()).unwrap();
    }

    /// As memcached is told of them.
    fn options(&self, more: &str) -> String {
        format!(
            "ssl_chain_cert={},ssl_key={}{more}",
            self.path("server.pem"),
            self.path("server.key")
        )
    }

    fn ca(&self) -> String {
        format!(",ssl_ca_cert={}", self.path("ca.pem"))
    }

    fn config(&self, more: &str) -> Config {
        resolve(&self.options(more), &[]).unwrap()
    }

    fn client(&self, who: Option<&str>) -> Client<'_> {
        Client {
            pki: self,
            who: who.map(str::to_owned),
            versions: rustls::ALL_VERSIONS,
            cipher: None,
        }
    }
}

struct Client<'a> {
    pki: &'a Pki,
    /// Whose certificate it has.
    who: Option<String>,
    versions: &'static [&'static SupportedProtocolVersion],
    /// The one cipher suite of TLS 1.2 that it knows.
    cipher: Option<rustls::CipherSuite>,
}

type Tls = StreamOwned<ClientConnection, TcpStream>;

impl Client<'_> {
    fn connect(&self, to: SocketAddr) -> std::io::Result<Tls> {
        let mut roots = RootCertStore::empty();
        roots.add(self.pki.authority.der().clone()).unwrap();
        let mut provider = rustls::crypto::ring::default_provider();
        if let Some(only) = self.cipher {
            provider.cipher_suites.retain(|s| s.suite() == only);
        }
        let builder = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(self.versions)
            .unwrap()
            .with_root_certificates(roots);
        let config = match &self.who {
            None => builder.with_no_client_auth(),
            Some(who) => {
                let path = |end: &str| self.pki.path(&format!("{who}.{end}"));
                let chain = vec![CertificateDer::from_pem_file(path("pem")).unwrap()];
                let key = PrivateKeyDer::from_pem_file(path("key")).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
        };
        let tls = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
        let socket = TcpStream::connect(to)?;
        socket.set_read_timeout(Some(LONG))?;
        Ok(StreamOwned::new(tls, socket))
    }

    /// Whether it is served: an answer came.
    fn served(&self, to: SocketAddr) -> bool {
        let ask = || -> std::io::Result<String> {
            let mut tls = self.connect(to)?;
            tls.write_all(b"version\r\n")?;
            line(&mut tls)
        };
        ask().is_ok_and(|answer| answer.starts_with("VERSION"))
    }
}

fn line(stream: &mut impl Read) -> std::io::Result<String> {
    let mut out = Vec::new();
    let mut byte = [0];
    while stream.read(&mut byte)? == 1 && byte[0] != b'\n' {
        out.push(byte[0]);
    }
    Ok(String::from_utf8_lossy(&out).trim_end().to_owned())
}

fn stats(stream: &mut (impl Read + Write), what: &str) -> Vec<String> {
    stream.write_all(format!("stats{what}\r\n").as_bytes()).unwrap();
    let mut out = Vec::new();
    loop {
        match line(stream).unwrap().as_str() {
            "END" => return out,
            text => out.push(text.strip_prefix("STAT ").unwrap().to_owned()),
        }
    }
}

/// `ssl_verify_mode`'s numbers, by memcached's help: 0 none, 1 request, 2 require, 3 once.
#[test]
fn a_certificate_that_is_required_is_required() {
    let pki = Pki::new();
    // Nobody could be verified: that is said at the start, and nobody is let in.
    for mode in 1..=3 {
        let e = resolve(&pki.options(&format!(",ssl_verify_mode={mode}")), &[]);
        let e = e.unwrap_err();
        assert!(e.contains("ssl_ca_cert"), "{mode}: {e}");
        let e = resolve(&format!("ssl_verify_mode={mode}"), &[]).unwrap_err();
        assert!(e.contains("tls-certificate"), "{mode}: {e}");
    }
    for (mode, [nobody, ours, foreign]) in [
        (",ssl_verify_mode=0", [true, true, true]),
        (",ssl_verify_mode=1", [true, true, false]),
        (",ssl_verify_mode=2", [false, true, false]),
        (",ssl_verify_mode=3", [false, true, false]),
        // Without a mode an authority is there to be asked.
        ("", [false, true, false]),
    ] {
        let server = start(pki.config(&(pki.ca() + mode)));
        let to = server.addresses()[0];
        assert_eq!(pki.client(None).served(to), nobody, "'{mode}', no certificate");
        assert_eq!(pki.client(Some("client")).served(to), ours, "'{mode}', ours");
        assert_eq!(pki.client(Some("foreign")).served(to), foreign, "'{mode}', foreign");
        server.stop();
    }
}

#[test]
fn the_lowest_version_and_the_ciphers_are_in_force() {
    let pki = Pki::new();
    let client = |versions| Client { versions, ..pki.client(None) };
    static OLD: [&SupportedProtocolVersion; 1] = [&rustls::version::TLS12];
    let old = &OLD;
    for (option, wanted) in [
        (",ssl_min_version=2", true),
        (",ssl_min_version=3", false),
        (",ssl_min_version=tlsv1.3", false),
    ] {
        let server = start(pki.config(option));
        let to = server.addresses()[0];
        assert_eq!(client(old).served(to), wanted, "{option}");
        assert!(client(rustls::ALL_VERSIONS).served(to), "{option}");
        server.stop();
    }
    let server = start(pki.config(",ssl_ciphers=ECDHE-ECDSA-AES128-GCM-SHA256"));
    let to = server.addresses()[0];
    for (cipher, wanted) in [
        (rustls::CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, true),
        (rustls::CipherSuite::TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, false),
    ] {
        let client = Client { cipher: Some(cipher), ..client(old) };
        assert_eq!(client.served(to), wanted, "{cipher:?}");
    }
    server.stop();
    let e = resolve(&pki.options(",ssl_ciphers=HIGH"), &[]).unwrap_err();
    assert!(e.contains("'HIGH'") && e.contains("ECDHE-RSA"), "{e}");
    for option in ["ssl_min_version=3", "ssl_ciphers=ECDHE-RSA-AES256-GCM-SHA384", "ssl_ca_cert=/x"]
    {
        let e = resolve(option, &[]).unwrap_err();
        assert!(e.contains("tls-certificate"), "{option}: {e}");
    }
}

/// memcached's `-l notls:`, `btls:` and `mtls:`.
#[test]
fn each_address_has_its_own_security() {
    let pki = Pki::new();
    let listen = |tls| ListenAddress { host: "127.0.0.1".into(), port: 0, tls, application: None };
    let all = [ListenTls::Off, ListenTls::Basic, ListenTls::Mutual, ListenTls::Default];
    for (ca, [off, basic, mutual, default], ours) in [
        (pki.ca(), [false, true, false, false], true),
        // Without an authority nobody has a certificate that is good.
        (String::new(), [false, true, false, true], false),
    ] {
        let mut config = pki.config(&ca);
        config.listen = all.map(listen).into();
        let server = serve(config);
        let to = server.addresses().to_vec();
        let served: Vec<bool> = to.iter().map(|&to| pki.client(None).served(to)).collect();
        assert_eq!(served, [off, basic, mutual, default]);
        assert_eq!(pki.client(Some("client")).served(to[2]), ours);
        let mut plain = TcpStream::connect(to[0]).unwrap();
        plain.write_all(b"version\r\n").unwrap();
        assert!(line(&mut plain).unwrap().starts_with("VERSION"));
        server.stop();
    }
    for text in ["mtls:127.0.0.1:1", "btls:127.0.0.1:1"] {
        let e = resolve("", &[("listen", text)]).unwrap_err();
        assert!(e.contains(&text[..5]) && e.contains("tls-certificate"), "{e}");
    }
}

/// memcached's own test, `ssl_settings.t`, expects these.
#[test]
fn the_settings_of_tls_are_told_as_memcached_tells_them() {
    let pki = Pki::new();
    let server = start(pki.config(""));
    let mut tls = pki.client(None).connect(server.addresses()[0]).unwrap();
    let told = stats(&mut tls, " settings");
    for wanted in [
        "ssl_enabled yes",
        "ssl_session_cache no",
        "ssl_kernel_tls no",
        &format!("ssl_chain_cert {}", pki.path("server.pem")),
        &format!("ssl_key {}", pki.path("server.key")),
        "ssl_verify_mode 0",
        "ssl_keyformat 1",
        "ssl_ciphers NULL",
        "ssl_ca_cert NULL",
        "ssl_wbuf_size 16384",
        "ssl_min_version tlsv1.2",
    ] {
        assert!(told.iter().any(|t| t == wanted), "{wanted}: {told:?}");
    }
    server.stop();
    let more = ",ssl_wbuf_size=64,ssl_min_version=3,ssl_session_cache,ssl_verify_mode=1";
    let server = start(pki.config(&(pki.ca() + more)));
    let mut tls = pki.client(None).connect(server.addresses()[0]).unwrap();
    let told = stats(&mut tls, " settings");
    for wanted in [
        "ssl_wbuf_size 65536",
        "ssl_min_version tlsv1.3",
        "ssl_session_cache yes",
        "ssl_verify_mode 1",
    ] {
        assert!(told.iter().any(|t| t == wanted), "{wanted}: {told:?}");
    }
    server.stop();
}

#[test]
fn certificates_and_users_are_read_again() {
    let mut pki = Pki::new();
    let users = pki.path("users");
    std::fs::write(&users, "u:old\n").unwrap();
    let options = pki.options(&pki.ca());
    let server = start(resolve(&options, &[("auth-file", &users)]).unwrap());
    let to = server.addresses()[0];
    let login = |tls: &mut Tls, password: &str| {
        tls.write_all(format!("set a 0 0 {}\r\nu {password}\r\n", 2 + password.len()).as_bytes())
            .unwrap();
        line(tls).unwrap()
    };
    let mut first = pki.client(Some("client")).connect(to).unwrap();
    assert_eq!(login(&mut first, "old"), "STORED");
    let before = first.conn.peer_certificates().unwrap()[0].clone();

    // Files that cannot be used change nothing.
    std::fs::write(pki.path("server.pem"), "nothing").unwrap();
    std::fs::write(&users, "nobody\n").unwrap();
    server.reload();
    first.write_all(b"refresh_certs\r\n").unwrap();
    let answer = line(&mut first).unwrap();
    assert!(answer.starts_with("SERVER_ERROR") && answer.contains("server.pem"), "{answer}");
    assert_eq!(login(&mut pki.client(Some("client")).connect(to).unwrap(), "old"), "STORED");

    // All anew: authority, certificates, users.
    let old = std::mem::replace(&mut pki.authority, authority("new"));
    std::fs::write(pki.path("ca.pem"), pki.authority.pem()).unwrap();
    pki.issue("server", &pki.authority);
    pki.issue("client", &old);
    std::fs::write(&users, "u:new\n").unwrap();
    server.reload();
    assert!(!pki.client(Some("client")).served(to), "signed by an authority of the past");
    pki.issue("client", &pki.authority);
    let mut second = pki.client(Some("client")).connect(to).unwrap();
    assert_eq!(login(&mut second, "old"), "CLIENT_ERROR authentication failure");
    assert_eq!(login(&mut second, "new"), "STORED");
    assert_ne!(second.conn.peer_certificates().unwrap()[0], before);
    // Who was there stays.
    assert!(stats(&mut first, "").iter().any(|s| s.starts_with("time_since_server_cert_refresh ")));

    // By the command too.
    pki.issue("server", &pki.authority);
    first.write_all(b"refresh_certs\r\n").unwrap();
    assert_eq!(line(&mut first).unwrap(), "OK");
    let mut third = pki.client(Some("client")).connect(to).unwrap();
    assert_eq!(login(&mut third, "new"), "STORED");
    assert_ne!(third.conn.peer_certificates(), second.conn.peer_certificates());
    server.stop();
}

/// Whatever comes of it by bytes.
#[test]
fn a_handshake_has_its_time_and_no_more() {
    let pki = Pki::new();
    let mut config = pki.config("");
    config.tls.as_mut().unwrap().handshake = Duration::from_millis(500);
    let server = start(config);
    let to = server.addresses()[0];
    let mut good = pki.client(None).connect(to).unwrap();
    good.write_all(b"version\r\n").unwrap();
    assert!(line(&mut good).unwrap().starts_with("VERSION"));
    let silent = TcpStream::connect(to).unwrap();
    let mut slow = TcpStream::connect(to).unwrap();
    // The head of a record of 512 bytes, and then a byte now and then.
    slow.write_all(&[22, 3, 1, 2, 0]).unwrap();
    let stop = Instant::now() + LONG;
    while slow.write_all(&[1]).is_ok() {
        assert!(Instant::now() < stop, "still open");
        std::thread::sleep(Duration::from_millis(100));
    }
    let stat = |good: &mut Tls, name: &str| -> u64 {
        let all = stats(good, "");
        let line = all.iter().find_map(|s| s.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap().parse().unwrap()
    };
    eventually("both are closed", || stat(&mut good, "curr_connections") == 1);
    assert!(stat(&mut good, "ssl_handshake_errors") >= 2);
    drop(silent);
    server.stop();
}

/// Forty clients that send a byte each 0.4 s of a large body kept all others from storing one.
#[test]
fn a_byte_now_and_then_is_no_progress() {
    let server = start(resolve("", &[("buffer-limit", "4m")]).unwrap());
    let to = server.addresses()[0];
    let mut slow: Vec<TcpStream> = (0..40)
        .map(|_| {
            let mut s = TcpStream::connect(to).unwrap();
            s.write_all(b"set a 0 0 1000000\r\n").unwrap();
            s.write_all(&[b'x'; 20_000]).unwrap();
            s
        })
        .collect();
    let mut good = TcpStream::connect(to).unwrap();
    good.set_read_timeout(Some(LONG)).unwrap();
    let reader = good.try_clone().unwrap();
    let held = |good: &mut TcpStream| {
        let all = stats(good, "");
        let bytes = all.iter().find_map(|s| s.strip_prefix("read_buf_bytes "));
        bytes.unwrap().parse::<u64>().unwrap()
    };
    eventually("the budget is taken", || held(&mut good) > 3_000_000);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let trickle = std::thread::spawn(move || {
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            // Those that are closed are no more.
            slow.retain_mut(|s| s.write_all(b"x").is_ok());
            std::thread::sleep(Duration::from_millis(400));
        }
    });
    let body = [&b"set b 0 0 1000000\r\n"[..], &vec![b'y'; 1_000_000], b"\r\n"].concat();
    for _ in 0..3 {
        good.write_all(&body).unwrap();
        let mut answer = String::new();
        BufReader::new(&reader).read_line(&mut answer).unwrap();
        assert_eq!(answer, "STORED\r\n");
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    trickle.join().unwrap();
    assert!(stats(&mut good, "").iter().any(|s| {
        s.strip_prefix("larder_big_buffer_stalls ").is_some_and(|n| n.parse::<u64>().unwrap() > 0)
    }));
    server.stop();
}

/// Connections that a listener of this port has, by the kernel's table: `sl local_address rem_address st …`, in hexadecimal.
fn connections_of(port: u16) -> usize {
    const ESTABLISHED: &str = "01";
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    table
        .lines()
        .filter(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            fields.len() > 3 && fields[1].ends_with(&local) && fields[3] == ESTABLISHED
        })
        .count()
}

/// Half-sent requests took every descriptor, and no client of the cache got in.
#[test]
fn the_live_page_has_few_connections_and_its_own_name() {
    let server = start(resolve("", &[]).unwrap());
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let page = larder_kv::admin::start(socket, server.view(), &["cache1".to_owned()]).unwrap();
    let get = |host: &str| -> String {
        let mut s = TcpStream::connect(page.address()).unwrap();
        s.set_read_timeout(Some(LONG)).unwrap();
        write!(s, "GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        s.read_to_string(&mut text).unwrap();
        text
    };
    for host in ["localhost:1", "127.0.0.1", "[::1]:80", "cache1", "CACHE1:80"] {
        assert!(get(host).starts_with("HTTP/1.1 200"), "{host}");
    }
    for host in ["evil.example", "evil.example:11280", "127.0.0.1.evil.example"] {
        assert!(get(host).starts_with("HTTP/1.1 421"), "{host}: {}", get(host));
    }
    let half: Vec<TcpStream> = (0..4 * MOST_CONNECTIONS)
        .map(|_| {
            let mut s = TcpStream::connect(page.address()).unwrap();
            let _ = s.write_all(b"GET / HTTP/1.1\r\nHost: ");
            s
        })
        .collect();
    // A request is served all the same, and the oldest have gone.
    assert!(get("localhost").starts_with("HTTP/1.1 200"));
    eventually("there are few", || connections_of(page.address().port()) <= MOST_CONNECTIONS);
    let mut client = TcpStream::connect(server.addresses()[0]).unwrap();
    client.write_all(b"version\r\n").unwrap();
    assert!(line(&mut client).unwrap().starts_with("VERSION"));
    // Without an end to its head a request has ten seconds.
    let mut last = half.last().unwrap();
    last.set_read_timeout(Some(LONG)).unwrap();
    let mut answer = Vec::new();
    let ended = last.read_to_end(&mut answer);
    assert!(ended.is_ok() || ended.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    drop(page);
    server.stop();
}
