//! Other people's NBD clients and servers: nbdinfo, nbdcopy, qemu-io, qemu-img, fio and libnbd's Python against this server;
//! nbdkit and nbd-server behind it.
//!
//! A test whose program is missing is ignored, with its name and package.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of processes use processes and clocks"
)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_block::backing::{self, Timeouts};
use larder_block::nbd::server::TlsPolicy;
use larder_block::server::service::pass_through;
use larder_block::server::{Listen, Server, ServerConfig, TlsFiles, Volume, Volumes};
use tempfile::TempDir;

/// Runs a program to its end and returns what it prints.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|e| panic!("{program}: {e}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

struct Bench {
    dir: TempDir,
    server: Option<Server>,
}

impl Bench {
    /// A server over a store.
    fn over(dir: TempDir, uri: &str, read_only: bool) -> Bench {
        Bench::with(dir, uri, read_only, |_| {})
    }

    fn with(
        dir: TempDir,
        uri: &str,
        read_only: bool,
        change: impl FnOnce(&mut ServerConfig),
    ) -> Bench {
        let timeout = Timeouts { give_up: Some(Duration::from_secs(30)), ..Timeouts::default() };
        let backing = backing::open(&uri.parse().unwrap(), read_only, false, timeout).unwrap();
        let volumes = Arc::new(Volumes::default());
        volumes.add(Volume::new("disk", backing, 4096, false)).unwrap();
        let listen = vec![Listen::unix(dir.path().join("socket"))];
        let mut config = ServerConfig { listen, ..ServerConfig::default() };
        change(&mut config);
        let server = Some(Server::start(config, volumes, pass_through).unwrap());
        Bench { dir, server }
    }

    /// A server over a store that insists on TLS, with its certificate in the directory.
    fn over_tls(dir: TempDir, uri: &str) -> Bench {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
        let (certificate, key) = (dir.path().join("ca-cert.pem"), dir.path().join("key.pem"));
        std::fs::write(&certificate, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let tls = Some(TlsFiles { certificate, key, client_ca: None });
        Bench::with(dir, uri, false, |config| {
            config.tls = tls;
            config.listen[0].tls = Some(TlsPolicy::Required);
        })
    }

    /// Over a new file of this size.
    fn over_file(size: u64) -> Bench {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("disk.img");
        File::create(&path).unwrap().set_len(size).unwrap();
        Bench::over(dir, &format!("file:{}", path.display()), false)
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.path("socket"))
    }
}

/// Somebody else's server, killed at the end.
struct Other(Child);

impl Other {
    fn start(program: &str, arguments: &[&str], socket: &Path) -> Other {
        let child = Command::new(program).args(arguments).stdin(Stdio::null()).spawn().unwrap();
        let other = Other(child);
        let end = Instant::now() + Duration::from_secs(120);
        while !socket.exists() {
            assert!(Instant::now() < end, "{program} does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        other
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Bytes that no two blocks share.
fn pattern(path: &str, size: usize) {
    let mut rng = larder_base::Rng::new(size as u64);
    let bytes: Vec<u8> = (0..size / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    std::fs::write(path, bytes).unwrap();
}

#[test]
#[cfg_attr(without = "nbdinfo", ignore = "needs nbdinfo (Debian: libnbd-bin)")]
fn nbdinfo_knows_what_is_exported() {
    let bench = Bench::over_file(64 << 20);
    let text = run("nbdinfo", &[&bench.uri()]);
    for line in [
        "protocol: newstyle-fixed without TLS, using structured packets",
        "export-size: 67108864 (64M)",
        "base:allocation",
        "is_read_only: false",
        "can_multi_conn: true",
        "can_fast_zero: true",
        "block_size_maximum: 33554432",
    ] {
        assert!(text.contains(line), "no '{line}' in:\n{text}");
    }
    let list =
        run("nbdinfo", &["--list", &format!("nbd+unix:///?socket={}", bench.path("socket"))]);
    assert!(list.contains("export=\"disk\""), "{list}");
    let map = run("nbdinfo", &["--map", &bench.uri()]);
    assert!(map.contains("hole,zero"), "{map}");
}

#[test]
#[cfg_attr(
    any(without = "nbdcopy", without = "qemu-img"),
    ignore = "needs nbdcopy and qemu-img (Debian: libnbd-bin, qemu-utils)"
)]
fn nbdcopy_there_and_back() {
    let bench = Bench::over_file(64 << 20);
    let (from, to) = (bench.path("from"), bench.path("to"));
    pattern(&from, 40 << 20);
    File::options().write(true).open(&from).unwrap().set_len(64 << 20).unwrap();
    run("nbdcopy", &["--connections=4", "--flush", &from, &bench.uri()]);
    run("nbdcopy", &["--connections=4", &bench.uri(), &to]);
    run("cmp", &[&from, &to]);
    run("cmp", &[&from, &bench.path("disk.img")]);
    let text = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &from, &bench.uri()]);
    assert!(text.contains("identical"), "{text}");
}

#[test]
#[cfg_attr(without = "qemu-io", ignore = "needs qemu-io (Debian: qemu-utils)")]
fn qemu_io_patterns() {
    let bench = Bench::over_file(64 << 20);
    let uri = bench.uri();
    let commands = [
        "write -P 0x5a 1000 70000",
        "read -P 0x5a 1000 70000",
        "read -P 0 0 1000",
        "write -f -P 0xa5 1M 4M",
        "aio_write -P 1 8M 64k",
        "aio_write -P 2 9M 64k",
        "aio_flush",
        "read -P 1 8M 64k",
        "read -P 2 9M 64k",
        "write -z 1M 1M",
        "read -P 0 1M 1M",
        "read -P 0xa5 2M 3M",
        "write -z -u 2M 1M",
        "read -P 0 2M 1M",
        "discard 3M 1M",
        "flush",
        "read -P 0xa5 4M 1M",
        "write -P 9 67108352 512",
        "read -P 9 67108352 512",
    ];
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|c| arguments.extend(["-c", c]));
    arguments.push(&uri);
    let text = run("qemu-io", &arguments);
    assert!(!text.contains("verification failed") && !text.contains("failed"), "{text}");
    assert!(text.matches("bytes at offset").count() >= 17, "{text}");
}

#[test]
#[cfg_attr(without = "python3-libnbd", ignore = "needs python3-libnbd (Debian: python3-libnbd)")]
fn every_command_by_libnbd() {
    // Debian's module belongs to Debian's Python.
    let python = ["python3", "/usr/bin/python3"].into_iter().find(|python| {
        let import = Command::new(python).args(["-c", "import nbd"]).stderr(Stdio::null()).status();
        import.is_ok_and(|s| s.success())
    });
    let python = python.expect("Python's nbd is missing: apt-get install python3-libnbd");
    let bench = Bench::over_file(64 << 20);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/every_command.py");
    let text = run(python, &[script, &bench.path("socket")]);
    assert!(text.contains("every command: ok"));
    let counters = bench.server.as_ref().unwrap().counters();
    assert_eq!(counters.broken.load(std::sync::atomic::Ordering::Relaxed), 0);
}

/// Random writes, verified by their checksums, by fio's own engine for NBD.
#[test]
#[cfg_attr(without = "fio-nbd", ignore = "needs fio-nbd (Debian: fio)")]
fn fio_verifies() {
    let bench = Bench::over_file(64 << 20);
    let uri = format!("--uri={}", bench.uri());
    let text = run(
        "fio",
        &[
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bsrange=512-64k",
            "--bs_unaligned=1",
            "--iodepth=32",
            "--size=64m",
            "--io_size=48m",
            "--verify=crc32c",
            "--do_verify=1",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--randseed=7",
            "--fsync=64",
        ],
    );
    assert!(text.contains("err= 0"), "{text}");
}

/// nbdkit as the store: what is written through this server is what nbdkit has, also when its connections are cut.
#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "nbdcopy", without = "qemu-img"),
    ignore = "needs nbdkit, nbdcopy and qemu-img (Debian: nbdkit, libnbd-bin, qemu-utils)"
)]
fn nbdkit_behind() {
    let dir = TempDir::new().unwrap();
    let (socket, disk) = (dir.path().join("kit"), dir.path().join("disk.img"));
    File::create(&disk).unwrap().set_len(32 << 20).unwrap();
    let start = || {
        std::fs::remove_file(&socket).ok();
        let (socket, disk) = (socket.to_str().unwrap(), disk.to_str().unwrap());
        Other::start("nbdkit", &["-f", "-U", socket, "file", disk], Path::new(socket))
    };
    let kit = start();
    let bench = Bench::over(dir, &format!("nbd+unix:///?socket={}", socket.display()), false);
    let (from, to) = (bench.path("from"), bench.path("to"));
    pattern(&from, 32 << 20);
    run("nbdcopy", &["--flush", &from, &bench.uri()]);
    run("cmp", &[&from, disk.to_str().unwrap()]);
    // The store goes away and comes back in the middle of a copy.
    let copy = {
        let (uri, to) = (bench.uri(), to.clone());
        std::thread::spawn(move || run("nbdcopy", &["--request-size=65536", &uri, &to]))
    };
    std::thread::sleep(Duration::from_millis(30));
    drop(kit);
    std::thread::sleep(Duration::from_millis(200));
    let _kit = start();
    copy.join().unwrap();
    run("cmp", &[&from, &to]);
    let text = run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &from, &bench.uri()]);
    assert!(text.contains("identical"), "{text}");
}

/// A server that takes one connection for an export, with a delay, and qemu's own.
#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "qemu-nbd", without = "nbdcopy"),
    ignore = "needs nbdkit, qemu-nbd and nbdcopy (Debian: nbdkit, qemu-utils, libnbd-bin)"
)]
fn other_servers_behind() {
    type Start = fn(&Path, &Path) -> Other;
    let kinds: [Start; 3] = [
        |socket, disk| {
            let (s, d) = (socket.to_str().unwrap(), disk.to_str().unwrap());
            Other::start("qemu-nbd", &["-t", "-e", "8", "-f", "raw", "-k", s, "-x", "x", d], socket)
        },
        |socket, disk| {
            let (s, d) = (socket.to_str().unwrap(), disk.to_str().unwrap());
            let arguments =
                ["-f", "-U", s, "--filter=multi-conn", "file", d, "multi-conn-mode=disable"];
            Other::start("nbdkit", &arguments, socket)
        },
        |socket, disk| {
            let (s, d) = (socket.to_str().unwrap(), disk.to_str().unwrap());
            // Neither structured replies nor anything but reads, writes and flushes.
            let arguments =
                ["-f", "-U", s, "--no-sr", "--filter=nozero", "file", d, "zeromode=none"];
            Other::start("nbdkit", &arguments, socket)
        },
    ];
    for (i, start) in kinds.into_iter().enumerate() {
        let dir = TempDir::new().unwrap();
        let (socket, disk) = (dir.path().join("other"), dir.path().join("disk.img"));
        File::create(&disk).unwrap().set_len(16 << 20).unwrap();
        let _other = start(&socket, &disk);
        let export = if i == 0 { "x" } else { "" };
        let uri = format!("nbd+unix:///{export}?socket={}", socket.display());
        let bench = Bench::over(dir, &uri, false);
        let from: PathBuf = bench.path("from").into();
        pattern(from.to_str().unwrap(), 16 << 20);
        run("nbdcopy", &["--connections=4", "--flush", from.to_str().unwrap(), &bench.uri()]);
        let zeroes = [
            "-f",
            "raw",
            "-c",
            "write -z -u 1M 3M",
            "-c",
            "write -z -f 5000 700",
            "-c",
            "read -P 0 1M 3M",
        ];
        run("qemu-io", &[&zeroes[..], &[bench.uri().as_str()]].concat());
        let mut expected = std::fs::read(&from).unwrap();
        expected[1 << 20..4 << 20].fill(0);
        expected[5000..5700].fill(0);
        assert!(std::fs::read(&disk).unwrap() == expected, "kind {i}");
    }
}

/// libnbd's TLS is GnuTLS: another implementation than ours.
#[test]
#[cfg_attr(
    any(without = "nbdcopy", without = "nbdinfo"),
    ignore = "needs nbdcopy and nbdinfo (Debian: libnbd-bin)"
)]
fn tls_by_libnbd() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(16 << 20).unwrap();
    let bench = Bench::over_tls(dir, &format!("file:{}", path.display()));
    let uri = format!(
        "nbds+unix://localhost/disk?socket={}&tls-certificates={}",
        bench.path("socket"),
        bench.dir.path().display()
    );
    let text = run("nbdinfo", &[&uri]);
    assert!(text.contains("newstyle-fixed with TLS"), "{text}");
    let from = bench.path("from");
    pattern(&from, 16 << 20);
    run("nbdcopy", &["--connections=2", "--flush", &from, &uri]);
    let to = bench.path("to");
    run("nbdcopy", &["--connections=2", &uri, &to]);
    run("cmp", &[&from, &to]);
}
