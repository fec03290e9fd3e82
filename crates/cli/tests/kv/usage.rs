//! What `larder kv` says to those who start it: exit codes, messages, signals, the daemon.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn larder() -> Command {
    let mut c = Command::new(env!("CARGO_BIN_EXE_larder"));
    for variable in ["RUST_LOG", "STATE_DIRECTORY", "LARDER_LISTEN", "KUBERNETES_SERVICE_HOST"] {
        c.env_remove(variable);
    }
    c
}

fn run(arguments: &[&str]) -> Output {
    larder().args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Arguments after `larder kv`, the exit code, and what the message must say.
#[test]
fn what_cannot_be_meant_is_refused_with_one_clear_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let typo = file("typo.toml", "port = 11211\nmemory-limt = \"64m\"\n");
    let wrong = file("wrong.toml", "threads = \"many\"\n");
    let level = file("level.toml", "port = 1\nlog-level = \"loud\"\n");
    let negated = file("negated.toml", "no-first-fill = true\n");
    let reads = file("reads.toml", "port = 1\n[admission.ghost]\nreads = 0\n");
    let shares = file("shares.toml", "[applications.shares.web]\nflor = 0.5\n");
    let not_pem = file("not.pem", "hello\n");
    let tiny = file("tiny", &"x".repeat(5000));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().map(|a| (taken, a.to_string())).unwrap();
    let (_holder, taken) = taken;
    let cases: &[(&[&str], i32, &[&str])] = &[
        (&["-U", "70000"], 2, &["udp-port '70000'", "65535"]),
        (&["-U", "11299", "-Y", "/users"], 2, &["udp-port '11299'", "auth-file"]),
        (&["-B", "morse"], 2, &["protocol 'morse'", "ascii"]),
        (&["-e", "/"], 2, &["memory-file '/'", "must be the path of a file"]),
        (&["-e", "/tmp/mem", "--record", "/tmp/r"], 2, &["memory-file '/tmp/mem'", "record"]),
        (
            &["-e", "/f", "--flash", "/f", "--flash-size", "64m"],
            2,
            &["memory-file '/f'", "the flash"],
        ),
        (&["--flash", "none", "-e", &tiny], 2, &["memory-file '", "tiny'", "remove it", "-e"]),
        (&["-m", "0"], 2, &["memory-limit '0 B'", "at least"]),
        (&["-I", "1000"], 2, &["max-item-size '1000'", "1024"]),
        (&["-I", "256m"], 2, &["max-item-size '256 MiB'", "128 MiB"]),
        (
            &["-m", "64", "-I", "40m"],
            2,
            &["max-item-size '40 MiB'", "half of the memory, which is 64 MiB"],
        ),
        (&["-t", "0"], 2, &["threads '0'", "between 1 and 256"]),
        (&["-c", "0"], 2, &["conn-limit '0'", "greater than 0"]),
        (&["-R", "0"], 2, &["max-reqs-per-event '0'"]),
        (&["-p", "70000"], 2, &["port '70000'", "65535"]),
        (&["-l", "no spaces allowed"], 2, &["listen 'no spaces allowed'", "HOST:PORT"]),
        (&["-s", "/tmp/x", "-a", "999"], 2, &["unix-mask '999'", "octal"]),
        (&["-D", "ab"], 2, &["prefix-delimiter 'ab'", "one printable"]),
        (&["-Z"], 2, &["enable-ssl", "--tls-certificate"]),
        (&["--tls-key", "/k"], 2, &["tls-key '/k'", "tls-certificate"]),
        (&["-o", "no_such_thing=1"], 2, &["no_such_thing=1", "unknown"]),
        (&["-o", "ext_path=/tmp/x:0m"], 2, &["ext_path=/tmp/x:0m", "above zero"]),
        (&["-o", "ext_path=/tmp/x:1GB"], 2, &["ext_path=/tmp/x:1GB", "64m"]),
        (&["-o", "idle_timeout=soon"], 2, &["idle_timeout=soon", "seconds"]),
        (
            &["--flash", "/tmp/nowhere/f", "--flash-size", "1m"],
            2,
            &["flash-size '1 MiB'", "--flash none"],
        ),
        (
            &["-m64", "--flash=/tmp/nowhere/f", "--flash-size=64g", "--flash-object-size=280"],
            2,
            &[
                "68719476736 B / 280 B per object",
                "half of the memory, which is 64 MiB",
                "flash-object-size",
            ],
        ),
        (&["--endurance-tbw", "600", "--endurance-dwpd", "1"], 2, &["not both"]),
        (&["--admission", "lru"], 2, &["admission 'lru'", "flashiness", "ghost"]),
        (&["--clock-bits", "3"], 2, &["clock-bits '3'"]),
        (&["--io", "magic"], 2, &["io 'magic'", "uring"]),
        (&["--http", "everywhere"], 2, &["http 'everywhere'", "off"]),
        (
            &["--config", "/nonexistent/larder.toml"],
            2,
            &["'/nonexistent/larder.toml'", "cannot be read"],
        ),
        (&["--config", &typo], 2, &["line 2", "memory-limt", "--print-config"]),
        (&["--config", &reads], 2, &["reads.toml' line 3", "admission.ghost.reads is 0"]),
        (&["--config", &shares], 2, &["shares.toml' line 2", "flor"]),
        (&["--endurance-tbw", "-5"], 2, &["endurance-tbw '-5'", "positive"]),
        (&["--endurance-years", "-1"], 2, &["endurance-years '-1'", "between"]),
        (&["-l", "app=shop"], 2, &["listen 'app=shop'", "app=NAME:HOST:PORT"]),
        (
            &["--http", "off", "-p", "-1", "--flash", &tiny],
            1,
            &["tiny' has only 5000 bytes", "at least", "larger"],
        ),
        (&["--http", "off", "--flash-size", "64m", "-l", &taken], 1, &[&taken, "in use"]),
        (
            &["--flash-size", "64m", "-p", "-1", "--http", &taken],
            1,
            &["http", &taken, "--http off"],
        ),
        (&["--burst-hours", "0"], 2, &["burst-hours '0'", "720"]),
        (&["--device-write-amplification", "0.5"], 2, &["device-write-amplification '0.5'"]),
        (&["--config", &wrong], 2, &["line 1", "threads"]),
        (&["--config", &level], 2, &["line 2: 'log-level'", "loud", "debug"]),
        (&["--config", &negated], 2, &["line 1", "write 'first-fill = false'"]),
        (&["-u", "nobody-of-this-name"], 2, &["user 'nobody-of-this-name'", "/etc/passwd"]),
        (
            &[
                "--flash",
                "none",
                "--http",
                "off",
                "-p",
                "-1",
                "--tls-certificate",
                &not_pem,
                "--tls-key",
                &not_pem,
            ],
            1,
            &["tls-certificate", "not.pem", "no certificate"],
        ),
        (
            &["--flash", "none", "--http", "off", "-p", "-1", "-Y", "/nonexistent/users"],
            1,
            &["auth-file '/nonexistent/users'"],
        ),
        (
            &["--flash", "none", "--http", "off", "-l", "192.0.2.1:11999"],
            1,
            &["192.0.2.1:11999", "this machine"],
        ),
        (
            &["--flash", "none", "--http", "off", "-s", "/nonexistent/dir/sock"],
            1,
            &["/nonexistent/dir/sock", "exist"],
        ),
    ];
    let root = rustix::process::geteuid().is_root();
    for (arguments, code, words) in cases {
        if arguments[0] == "-u" && !root {
            continue;
        }
        let state = dir.path().join("state").display().to_string();
        let mut all = vec!["kv", "--data-dir", &state];
        all.extend_from_slice(arguments);
        let out = run(&all);
        let text = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(*code), "{arguments:?}: {text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.starts_with("larder: "), "{arguments:?}: {text}");
        for word in *words {
            assert!(last.contains(word), "{arguments:?}: '{last}' lacks '{word}'");
        }
    }
    assert!(!dir.path().join("state").exists(), "a refused start has left something behind");
    assert_eq!(std::fs::metadata(&tiny).unwrap().len(), 5000);
    // Flags that do not exist at all, and values that no flag of the kind has, are clap's to explain.
    for (arguments, words) in [
        (&["--frobnicate"][..], &["--frobnicate"][..]),
        (&["-m", "lots"], &["'lots'", "--memory-limit", "64"]),
        (&["--record-limit", "1g"], &["required", "--record <FILE>"]),
        (&["--log-format", "xml"], &["'xml'", "--log-format", "json"]),
        (&["--log-level", "loud"], &["'loud'", "--log-level", "debug"]),
        (&["--admission-objective", "hits"], &["'hits'", "requests or bytes"]),
    ] {
        let out = run(&[&["kv"], arguments].concat());
        let text = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(2), "{text}");
        assert!(words.iter().all(|word| text.contains(word)), "{arguments:?}: {text}");
    }
}

#[test]
fn help_and_version_succeed_and_tell_test_suites_what_there_is() {
    let out = run(&["kv", "-h"]);
    assert_eq!(out.status.code(), Some(0));
    let text = String::from_utf8(out.stdout).unwrap();
    for word in ["ext_path", "enable-ssl", "unix-socket", "--print-config"] {
        assert!(text.contains(word), "{word}");
    }
    for word in ["debugtime", "proxy_config", "sasl"] {
        assert!(!text.contains(word), "{word}");
    }
    let out = run(&["kv", "-V"]);
    assert_eq!(out.status.code(), Some(0));
    assert!(String::from_utf8(out.stdout).unwrap().contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_printed_configuration_starts_the_same_server() {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().join("base.toml");
    std::fs::write(&base, "threads = 3\nport = 12345\nmemory-limit = \"128m\"\n\
         [admission]\npolicy = \"ghost\"\nghost.reads = 2\n[applications.shares.web]\nfloor = 0.25\n").unwrap();
    let state = dir.path().join("state");
    let args = |config: &Path, more: &[&str]| {
        let mut v = vec![
            "kv".to_owned(),
            "--print-config".into(),
            "--config".into(),
            config.display().to_string(),
        ];
        v.extend(["--data-dir".to_owned(), state.display().to_string()]);
        v.extend(more.iter().map(|s| (*s).to_owned()));
        let out = larder().args(&v).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    };
    let first = args(&base, &["-p", "23456", "-v", "-o", "idle_timeout=7", "--admission", "all"]);
    for line in [
        "port = 23456",
        "threads = 3",
        "memory-limit = 134217728",
        "idle-timeout = 7",
        "log-level = \"debug\"",
        "policy = \"all\"",
        "[admission.ghost]",
        "reads = 2",
        "[applications.shares.web]",
        "floor = 0.25",
    ] {
        assert!(first.lines().any(|l| l == line), "no '{line}' in\n{first}");
    }
    let again = dir.path().join("again.toml");
    std::fs::write(&again, &first).unwrap();
    assert_eq!(args(&again, &[]), first);
    // Flags over -o over the file, and what a flag that says no is in a file.
    let text = "idle-timeout = 1\nmaxconns-fast = false\nfirst-fill = false\nconn-limit = 9\n";
    std::fs::write(&base, text).unwrap();
    let options = ["-o", "idle_timeout=2,maxconns_fast,ext_path=/x/f:64m", "--flash-size", "128m"];
    let all = args(&base, &options);
    for line in [
        "idle-timeout = 2",
        "maxconns-fast = true",
        "first-fill = false",
        "conn-limit = 9",
        "flash = [\"/x/f\"]",
        "flash-size = [134217728]",
        "stats-detail = false",
    ] {
        assert!(all.lines().any(|l| l == line), "no '{line}' in\n{all}");
    }
    let all = args(&base, &["--idle-timeout", "3", "-o", "idle_timeout=2", "-D", "/"]);
    for line in ["idle-timeout = 3", "stats-detail = true", "prefix-delimiter = \"/\""] {
        assert!(all.lines().any(|l| l == line), "no '{line}' in\n{all}");
    }
}

struct Running {
    child: Child,
    log: BufReader<std::process::ChildStderr>,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that failed must not leave its server behind.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Running {
    fn start(more: &[&str]) -> Running {
        Running::start_in(&[], more)
    }

    /// With variables in the environment.
    fn start_in(environment: &[(&str, &str)], more: &[&str]) -> Running {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("sock");
        let mut child = larder()
            .args(["kv", "--flash", "none", "--http", "off", "-m", "64", "-s"])
            .arg(&socket)
            .arg("--data-dir")
            .arg(dir.path().join("state"))
            .args(more)
            .envs(environment.iter().copied())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("ready on") {
            line.clear();
            assert!(log.read_line(&mut line).unwrap() > 0, "ended before it was ready");
        }
        Running { child, log, socket, _dir: dir }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn connect(&self) -> UnixStream {
        let s = UnixStream::connect(&self.socket).unwrap();
        s.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        s
    }
}

#[test]
fn sigterm_stops_cleanly_and_in_time() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT] {
        let mut server = Running::start(&[]);
        let mut c = server.connect();
        c.write_all(b"set a 0 0 1\r\nx\r\n").unwrap();
        let mut answer = [0; 8];
        c.read_exact(&mut answer).unwrap();
        let start = Instant::now();
        server.signal(signal);
        let mut rest = Vec::new();
        c.read_to_end(&mut rest).unwrap();
        let status = server.child.wait().unwrap();
        assert!(status.success(), "{status}");
        assert!(start.elapsed() < Duration::from_secs(60));
        assert!(!server.socket.exists(), "the socket's path is left behind");
        let mut log = String::new();
        server.log.read_to_string(&mut log).unwrap();
        assert!(log.contains("stopped"), "{log}");
    }
}

#[test]
fn the_shutdown_command_ends_the_process_when_enabled() {
    let mut server = Running::start(&["-A", "--log-format", "text"]);
    let mut c = server.connect();
    c.write_all(b"shutdown graceful\r\n").unwrap();
    assert!(server.child.wait().unwrap().success());

    let mut server = Running::start(&[]);
    let mut c = server.connect();
    c.write_all(b"shutdown\r\n").unwrap();
    let mut line = String::new();
    BufReader::new(&c).read_line(&mut line).unwrap();
    assert_eq!(line, "SERVER_ERROR: shutdown not enabled\r\n");
    server.signal(rustix::process::Signal::TERM);
    assert!(server.child.wait().unwrap().success());
}

/// What is logged of a client that says these, by flags, environment and file.
fn logged(environment: &[(&str, &str)], more: &[&str]) -> String {
    let mut server = Running::start_in(environment, more);
    let mut c = server.connect();
    c.write_all(b"set one 0 0 3\r\nabc\r\nget one\r\nquit\r\n").unwrap();
    c.read_to_end(&mut Vec::new()).unwrap();
    server.signal(rustix::process::Signal::TERM);
    let mut log = String::new();
    server.log.read_to_string(&mut log).unwrap();
    assert!(server.child.wait().unwrap().success(), "{log}");
    log
}

#[test]
fn flags_and_the_environment_say_how_much_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("larder.toml");
    std::fs::write(&file, "log-level = \"trace\"\n").unwrap();
    let file = file.to_str().unwrap();
    // The environment, flags, and whether connections are in it, and requests.
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str], bool, bool);
    let cases: &[Case] = &[
        (&[], &[], false, false),
        (&[], &["-v"], true, false),
        (&[], &["-vv"], true, true),
        (&[], &["-vvv"], true, true),
        (&[], &["--config", file], true, true),
        // A flag over the environment over the file.
        (&[("RUST_LOG", "")], &[], false, false),
        (&[("RUST_LOG", "debug")], &[], true, false),
        (&[("RUST_LOG", "info,larder_cache::kv=trace")], &[], false, true),
        (&[("RUST_LOG", "info")], &["--config", file], false, false),
        (&[("RUST_LOG", "info")], &["-vv"], true, true),
        (&[("RUST_LOG", "trace")], &["-v"], true, false),
    ];
    for (environment, flags, connections, requests) in cases {
        let log = logged(environment, flags);
        let named = format!("{environment:?} {flags:?}: {log}");
        assert_eq!(log.contains("connection "), *connections, "{named}");
        assert_eq!(
            log.contains("set one 3 bytes") && log.contains("get one"),
            *requests,
            "{named}"
        );
    }
    for command in [
        &["kv", "--flash", "none", "-p", "0"][..],
        &["block", "serve", "--cache", "x", "--listen", "unix:x"],
    ] {
        let out = larder().args(command).env("RUST_LOG", "larder=loud").output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(said.contains("RUST_LOG 'larder=loud'") && said.contains("info"), "{said}");
    }
}

#[test]
fn verbosity_changes_the_log_level() {
    let mut server = Running::start(&[]);
    let mut c = server.connect();
    c.write_all(b"verbosity 2\r\nverbosity 0\r\n").unwrap();
    let mut log = String::new();
    for level in ["trace", "info"] {
        while !log.contains(&format!("log level {level}:")) {
            assert!(server.log.read_line(&mut log).unwrap() > 0, "no change to {level}: {log}");
        }
    }
    c.write_all(b"stats settings\r\n").unwrap();
    let mut answers = String::new();
    let mut reader = BufReader::new(&c);
    while !answers.contains("END\r\n") {
        assert!(reader.read_line(&mut answers).unwrap() > 0, "{answers}");
    }
    assert!(answers.contains("STAT verbosity 0\r\n"), "{answers}");
}

#[test]
fn verbosity_goes_no_higher_than_memcacheds() {
    let server = Running::start(&[]);
    let mut c = server.connect();
    c.write_all(b"verbosity 99\r\nstats settings\r\nquit\r\n").unwrap();
    let mut answers = String::new();
    c.read_to_string(&mut answers).unwrap();
    assert!(answers.contains("STAT verbosity 2\r\n"), "{answers}");
}

/// What `larder replay` says of a run fits a terminal, and has every column.
#[test]
fn a_report_of_a_replay_fits_sixty_columns() {
    let (port, _) = free_ports();
    let server = Running::start(&["-l", &format!("127.0.0.1:{port}")]);
    let trace = "gen:zipf?objects=100&requests=2000&writes=0.1";
    let output = larder()
        .args(["replay", trace, "--to", &format!("127.0.0.1:{port}")])
        .env("COLUMNS", "60")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    for line in text.lines() {
        assert!(line.chars().count() <= 60, "'{line}' in {text}");
    }
    for word in ["operation", "mean", "p99.9", "max", "get hit"] {
        assert!(text.contains(word), "no '{word}' in {text}");
    }
    server.signal(rustix::process::Signal::TERM);
}

/// Two ports that nobody listens on.
fn free_ports() -> (u16, u16) {
    let held = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let port = |i: usize| held[i].local_addr().unwrap().port();
    (port(0), port(1))
}

#[test]
fn applications_are_told_apart_by_listener() {
    let (shop, ads) = free_ports();
    let dir = tempfile::tempdir().unwrap();
    let shares = dir.path().join("shares.toml");
    std::fs::write(&shares, "[applications.shares.shop]\nfloor = 0.5\n").unwrap();
    let listen = format!("app=shop:127.0.0.1:{shop},app=ads:127.0.0.1:{ads}");
    let shares = shares.display().to_string();
    let server = Running::start(&["-l", &listen, "--config", &shares]);
    let connect = |port: u16| {
        let stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    };
    let ask = |stream: &mut dyn ReadWrite, request: &[u8], end: &str| {
        stream.write_all(request).unwrap();
        let mut text = String::new();
        let mut byte = [0];
        while !text.ends_with(end) {
            stream.read_exact(&mut byte).unwrap();
            text.push(char::from(byte[0]));
        }
        text
    };
    let (mut shop, mut ads, mut unix) = (connect(shop), connect(ads), server.connect());
    let value = "v".repeat(1000);
    // What comes by the listener belongs to its application, whatever the key's prefix says.
    for key in ["plain", "web:1", "ads:1"] {
        let set = format!("set {key} 0 0 1000\r\n{value}\r\n");
        assert_eq!(ask(&mut shop, set.as_bytes(), "\r\n"), "STORED\r\n");
    }
    // A sixth of the memory for the one, more than all of it for the other: the first has a floor.
    let many = |stream: &mut std::net::TcpStream, count: u32| {
        let sets = |i| format!("set k{count}-{i} 0 0 1000 noreply\r\n{value}\r\n");
        for from in (0..count).step_by(1000) {
            let batch: String = (from..from + 1000).map(sets).collect();
            stream.write_all(batch.as_bytes()).unwrap();
        }
        assert_eq!(ask(stream, b"mn\r\n", "MN\r\n"), "MN\r\n");
    };
    many(&mut shop, 10_000);
    many(&mut ads, 100_000);
    assert_eq!(ask(&mut ads, b"mg plain v\r\nmn\r\n", "MN\r\n").lines().count(), 3);
    // A connection that came by another way is judged by the keys.
    ask(&mut unix, b"set web:2 0 0 1\r\nx\r\n", "STORED\r\n");
    ask(&mut unix, b"get web:2 nobody\r\n", "END\r\n");
    let stats = ask(&mut unix, b"stats larder\r\n", "END\r\n");
    let stat = |name: &str| -> u64 {
        let start = format!("STAT larder_app_{name} ");
        let line = stats.lines().find_map(|l| l.strip_prefix(start.as_str()));
        line.unwrap_or_else(|| panic!("no {name}: {stats}")).parse().unwrap()
    };
    assert_eq!((stat("shop_sets"), stat("ads_sets"), stat("web_sets")), (10_003, 100_000, 1));
    assert_eq!((stat("shop_gets"), stat("ads_gets"), stat("ads_hits")), (0, 1, 1));
    assert_eq!((stat("web_gets"), stat("default_gets")), (1, 1));
    assert!(stat("ads_dram_bytes") > 20 << 20 && stat("shop_dram_bytes") > 10_000_000, "{stats}");
}

trait ReadWrite: Read + Write {}
impl<T: Read + Write> ReadWrite for T {}

#[test]
fn a_reader_that_goes_away_causes_no_panic() {
    for arguments in [&["kv", "--print-config"][..], &["bench", "packing", "--help"]] {
        let mut child =
            larder().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let out = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(!text.contains("panicked"), "{arguments:?}: {text}");
    }
}

#[test]
fn the_daemon_is_ready_when_its_parent_returns() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, pidfile) = (dir.path().join("sock"), dir.path().join("pid"));
    let out = larder()
        .args(["kv", "--flash", "none", "--http", "off", "-d", "-A", "-s"])
        .arg(&socket)
        .arg("-P")
        .arg(&pidfile)
        .arg("--data-dir")
        .arg(dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(out.success());
    let pid: i32 = std::fs::read_to_string(&pidfile).unwrap().trim().parse().unwrap();
    let mut c = UnixStream::connect(&socket).unwrap();
    c.write_all(b"stats\r\nshutdown\r\n").unwrap();
    let mut text = String::new();
    c.read_to_string(&mut text).unwrap();
    assert!(text.contains(&format!("STAT pid {pid}\r\n")));
    let start = Instant::now();
    while pidfile.exists() {
        assert!(start.elapsed() < Duration::from_secs(120), "the daemon does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Its log goes on where it said.
    let log = std::fs::read_to_string(dir.path().join("larder.log")).unwrap();
    assert!(log.contains("a client asked for shutdown") || log.contains("stopp"), "{log}");
    // A directory that is not there is made, for the log.
    let fresh = dir.path().join("a/b");
    let out = larder()
        .args(["kv", "--flash", "none", "--http", "off", "-d", "-A", "-s"])
        .arg(&socket)
        .arg("--data-dir")
        .arg(&fresh)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(out.success());
    let mut c = UnixStream::connect(&socket).unwrap();
    c.write_all(b"shutdown\r\n").unwrap();
    let log = || std::fs::read_to_string(fresh.join("larder.log")).unwrap_or_default();
    let start = Instant::now();
    while !log().contains("stopped") {
        assert!(start.elapsed() < Duration::from_secs(120), "no log: {}", log());
        std::thread::sleep(Duration::from_millis(10));
    }
    // A daemon that cannot start says so to whoever started it.
    let out = larder()
        .args([
            "kv",
            "--flash",
            "none",
            "--http",
            "off",
            "-d",
            "-s",
            "/nonexistent/dir/sock",
            "--data-dir",
        ])
        .arg(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8(out.stderr).unwrap().contains("/nonexistent/dir/sock"));
}

/// A file of the server's own, or somebody's that is no pid file, is neither replaced nor removed.
#[test]
fn files_that_hold_something_are_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    for name in ["checkpoint", "run.json", "flash"] {
        std::fs::write(data.join(name), "kept").unwrap();
    }
    std::fs::write(data.join("lock"), "123\n").unwrap();
    std::fs::write(dir.path().join("notes"), "kept").unwrap();
    std::fs::hard_link(data.join("checkpoint"), dir.path().join("link")).unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    for (flag, name, why) in [
        ("-e", "data/checkpoint", "is the checkpoint"),
        ("-e", "data/../data/run.json", "which run"),
        ("-e", "link", "is the checkpoint"),
        ("-e", "data/flash", "is the flash"),
        ("-P", "data/checkpoint", "is the checkpoint"),
        ("-P", "data/lock", "is the lock"),
        ("-P", "data/flash", "is the flash"),
        ("-P", "link", "is the checkpoint"),
        ("-P", "notes", "something else than a process id"),
        ("--record", "data/checkpoint", "is the checkpoint"),
        ("--capture", "data/run.json", "which run"),
        ("-s", "data/lock", "is the lock"),
        ("--flash", "data/checkpoint", "is the checkpoint"),
    ] {
        let out = larder()
            .args(["kv", "--http", "off", "-l", "127.0.0.1", "-p", "0", flag, &path(name)])
            .args(["--data-dir", &path("data")])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{flag} {name}: {text}");
        assert!(text.contains(why) && text.contains("another"), "{flag} {name}: {text}");
    }
    for name in ["data/checkpoint", "data/run.json", "data/flash", "notes"] {
        assert_eq!(std::fs::read_to_string(path(name)).unwrap(), "kept", "{name}");
    }
}

#[test]
fn json_logs_are_json() {
    let mut server = Running::start(&["--log-format", "json"]);
    server.signal(rustix::process::Signal::TERM);
    let mut log = String::new();
    server.log.read_to_string(&mut log).unwrap();
    assert!(server.child.wait().unwrap().success());
    for line in log.lines() {
        let value: serde_json::Value =
            serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(value["fields"]["message"].is_string(), "{line}");
    }
    assert!(log.lines().count() >= 2);
}

/// A negative number is a value that a flag refuses, not a flag that there is not.
#[test]
fn negative_numbers_are_refused_by_the_flag_they_were_given_to() {
    let mrc = ["sim", "mrc", "gen:zipf?objects=10&requests=20", "--sizes"];
    let advise = ["sim", "advise", "--trace", "gen:zipf", "--drive-tbw", "1", "--price"];
    let cases: &[(&[&str], &[&str], &str)] = &[
        (&mrc, &["-1"], "--sizes"),
        (&mrc, &["5", "--seed", "-1"], "--seed"),
        (&mrc, &["5", "--threads", "-1"], "--threads"),
        (&mrc, &["5", "--lru-curve", "-1"], "--lru-curve"),
        (&mrc, &["-1,2"], "--sizes"),
        (&mrc, &["-1m", "--unit", "bytes"], "--sizes"),
        (&mrc, &["5", "--sample", "-1e3"], "--sample"),
        (&mrc, &["5", "--pages", "-1k"], "--pages"),
        (&["sim", "ssd", "--capacity", "1m"], &["--utilisation", "-1.5"], "--utilisation"),
        (&["sim", "ssd", "--capacity"], &["-1m"], "--capacity"),
        (&["sim", "stack", "gen:fileserver", "--flash"], &["-1m,2m"], "--flash"),
        (&["kv", "--http", "off", "-m"], &["-1g"], "memory-limit"),
        (&["block", "format", "/nonexistent", "--size"], &["-1g"], "--size"),
        (
            &advise,
            &["-1", "--dram-cost", "1", "--flash-cost", "1", "--target-hit-ratio", "0.5"],
            "price",
        ),
        (&["trace", "head", "gen:zipf", "-n"], &["-1"], "--requests"),
    ];
    for (command, more, flag) in cases {
        let output = run(&[*command, *more].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{more:?}: {said}");
        assert!(said.contains(flag) && said.contains("-1"), "{more:?}: {said}");
        assert!(!said.contains("unexpected argument"), "{more:?}: {said}");
    }
    for value in ["-inf", "-nan"] {
        let output = run(&["sim", "ssd", "--capacity", "64m", "--utilisation", value]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("--utilisation"), "{said}");
    }
    // Where a word stands by itself, or behind -- or behind a flag without a value, it is still no flag.
    for (alone, words) in [
        (
            &["trace", "head", "gen:zipf", "--json", "-1m"][..],
            "unexpected value '-1m' for '--json'",
        ),
        (&["trace", "head", "--", "-1"], "cannot open trace '-1'"),
    ] {
        let output = run(alone);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(words), "{alone:?}: {said}");
    }
    let output = run(&["trace", "head", "-1"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("unexpected argument"), "{said}");
}

/// 0 is success, 2 a command line that cannot be meant (with a file to read that is not there), 1 any other failure; what is said
/// on the way is one line.
#[test]
fn exit_codes_are_the_same_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(path("junk"), "junk\n").unwrap();
    let (junk, none, deep, state) = (path("junk"), path("none"), path("no/where"), path("state"));
    let zipf = "gen:zipf?objects=10&requests=20";
    let cases: &[(&[&str], i32)] = &[
        (&["trace", "head", zipf], 0),
        (&["sim", "mrc", zipf, "--sizes", "5"], 0),
        (&["kv", "--print-config"], 0),
        (&["--version"], 0),
        // Flags and values.
        (&["no-such-command"], 2),
        (&["kv", "--no-such-flag"], 2),
        (&["sim", "replay"], 2),
        (&["block", "serve", "-t", "0"], 2),
        (&["block", "serve", "--endurance-tbw", "x"], 2),
        (&["trace", "head", "gen:none"], 2),
        // What is to be read is not there, or is no configuration.
        (&["kv", "--config", &none], 2),
        (&["kv", "--config", &junk], 2),
        (&["block", "serve", "--config", &none], 2),
        (&["sim", "run", &none], 2),
        (&["sim", "run", &junk], 2),
        (&["sim", "sweep", &none], 2),
        (&["sim", "mrc", &none, "--sizes", "5"], 2),
        (&["sim", "replay", &none], 2),
        (&["trace", "head", &none], 2),
        (&["replay", &none, "--to", "127.0.0.1:1"], 2),
        (&["block", "check", &none], 2),
        (&["block", "extents", &none], 2),
        (&["block", "pin", "disk", "--ranges", &none], 2),
        (&["block", "pin", "disk", "--file", &none], 2),
        // It went wrong on the way.
        (&["sim", "replay", &junk], 1),
        (&["block", "check", &junk], 1),
        (&["trace", "head", &junk, "--format", "ibm-cos"], 1),
        (&["replay", zipf, "--to", "127.0.0.1:1"], 1),
        (&["block", "format", &deep, "--size", "64m"], 1),
        (&["block", "status", "--state-dir", &none], 1),
        (&["block", "serve", "--cache", &none, "--listen", "unix:x", "--state-dir", &state], 1),
        (&["kv", "--flash", "none", "-s", &deep, "--data-dir", &state], 1),
    ];
    for (command, code) in cases {
        let output = larder().current_dir(dir.path()).args(*command).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(*code), "{command:?}: {said}");
        let errors = said.lines().filter(|line| line.starts_with("larder: ")).count();
        assert!(*code == 0 || errors == 1, "{command:?}: {said}");
        assert!(*code != 2 || said.lines().count() <= 3, "{command:?}: {said}");
    }
}

/// A value that only the server as a whole can judge is refused like one that its parser refuses.
#[test]
fn values_that_are_judged_late_are_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = dir.path().join("no/where").display().to_string();
    let state = dir.path().join("state").display().to_string();
    let servers: [(&[&str], &[&str]); 2] = [
        (
            &["kv", "--flash", "none", "--http", "off", "-s", &nowhere, "--data-dir", &state],
            &["--memory-limit", "--max-item-size", "--conn-limit", "--threads", "--unix-mask"],
        ),
        (
            &["block", "serve", "--cache", &nowhere, "--listen", "unix:x", "--state-dir", &state],
            &[
                "--endurance-years",
                "--device-write-amplification",
                "--burst-hours",
                "--fill-memory",
            ],
        ),
    ];
    let mut refused = 0;
    for (server, flags) in servers {
        for flag in flags {
            for value in ["x", "0", "-1", "", "99999999999999999999"] {
                let flag = format!("{flag}={value}");
                let mut command = larder();
                command.current_dir(dir.path()).args(server).arg(&flag);
                if flag.contains("endurance") || flag.contains("burst") || flag.contains("device") {
                    command.args(["--endurance-tbw", "600"]);
                }
                let output = command.output().unwrap();
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                // What may be meant fails at the address or the cache that are not there.
                assert!(matches!(output.status.code(), Some(1 | 2)), "{flag}: {said}");
                if output.status.code() == Some(2) {
                    refused += 1;
                    let name = flag.trim_start_matches("--").split('=').next().unwrap();
                    assert!(said.contains(name) && said.lines().count() == 1, "{flag}: {said}");
                }
            }
        }
    }
    assert!(refused > 20, "{refused}");
}
