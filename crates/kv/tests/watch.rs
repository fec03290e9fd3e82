//! `watch` over real sockets, on the model engine.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of the server use sockets and clocks"
)]

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_kv::config::{Config, ListenAddress, ListenTls, Machine, Settings};
use larder_kv::model::ModelEngine;
use larder_kv::server::Server;
use larder_runtime::Clock;
use larder_settings::LivePage;

fn start(settings: Settings) -> Server<ModelEngine> {
    let machine = Machine {
        memory: 1 << 30,
        cpus: 2,
        state_dir: "/nonexistent".into(),
        state_dir_is_named: true,
        listen: None,
        free_space: |_| Some(1 << 40),
        can_hold_files: |_| Ok(()),
    };
    let given = Settings {
        flash: Some(vec!["none".into()]),
        threads: Some(2),
        live_page: LivePage { http: Some("off".into()), ..LivePage::default() },
        ..settings
    };
    let mut config = Config::resolve(given, &machine).unwrap();
    config.listen = vec![ListenAddress {
        host: "127.0.0.1".into(),
        port: 0,
        tls: ListenTls::Default,
        application: None,
    }];
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

    fn watch(address: SocketAddr, topics: &str) -> Client {
        let mut client = Client::new(address);
        assert_eq!(client.ask(&format!("watch {topics}\r\n")), "OK");
        client
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, text: &str) -> String {
        self.stream.write_all(text.as_bytes()).unwrap();
        self.line()
    }

    /// A line without its time, number and descriptor.
    fn told(&mut self) -> String {
        let line = self.line();
        let words: Vec<&str> = line
            .split(' ')
            .filter(|w| !["ts=", "gid=", "cfd=", "rport="].iter().any(|p| w.starts_with(p)))
            .collect();
        words.join(" ")
    }

    fn stat(&mut self, name: &str) -> u64 {
        self.stream.write_all(b"stats\r\n").unwrap();
        let mut found = None;
        loop {
            match self.line() {
                line if line == "END" => return found.unwrap(),
                line => {
                    if let Some(value) = line.strip_prefix(&format!("STAT {name} ")) {
                        found = value.parse().ok();
                    }
                }
            }
        }
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(120), "not in two minutes: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_watcher_is_told_its_topics_in_memcached_s_lines() {
    let server = start(Settings::default());
    let address = server.addresses()[0];
    let mut both = Client::watch(address, "fetchers mutations");
    let mut deletions = Client::watch(address, "deletions");
    let mut raw = Client::watch(address, "rawcmds");
    let mut client = Client::new(address);
    assert_eq!(client.stat("log_watchers"), 3);
    assert_eq!(client.ask("set a#b 0 100 2\r\nhi\r\n"), "STORED");
    assert_eq!(client.ask("get a#b none\r\n"), "VALUE a#b 0 2");
    assert_eq!((client.line().as_str(), client.line().as_str()), ("hi", "END"));
    assert_eq!(client.ask("add a#b 0 0 1\r\nx\r\n"), "NOT_STORED");
    assert_eq!(client.ask("mg a#b s\r\n"), "HD s2");
    assert_eq!(client.ask("delete a#b\r\n"), "DELETED");
    assert_eq!(client.ask("md a#b\r\n"), "NF");
    for want in [
        "type=item_get key=a%23b status=not_found clsid=0 size=0",
        "type=item_store key=a%23b status=stored cmd=set ttl=100 clsid=1 size=2",
        "type=item_get key=a%23b status=found clsid=1 size=2",
        "type=item_get key=none status=not_found clsid=0 size=0",
        "type=item_get key=a%23b status=found clsid=1 size=0",
        "type=item_store key=a%23b status=not_stored cmd=add ttl=0 clsid=0 size=1",
        "type=item_get key=a%23b status=found clsid=1 size=2",
        "type=item_get key=a%23b status=found clsid=1 size=2",
        "type=item_get key=a%23b status=not_found clsid=0 size=0",
    ] {
        assert_eq!(both.told(), want);
    }
    assert_eq!(deletions.told(), "type=deleted key=a%23b cmd=delete clsid=1 size=2");
    // The first line of the raw ones is the question for the statistics.
    for want in ["stats", "set a#b 0 100 2", "get a#b none", "add a#b 0 0 1", "mg a#b s"] {
        let line = raw.told();
        assert!(line.starts_with('<') && line.ends_with(&format!(" {want}")), "{line}");
    }
    drop((both, deletions, raw));
    eventually("nobody watches", || client.stat("log_watchers") == 0);
    let written = client.stat("log_worker_written");
    assert_eq!(client.ask("set a 0 0 1\r\nx\r\n"), "STORED");
    assert_eq!(client.stat("log_worker_written"), written, "nothing is written for nobody");
    server.stop();
}

#[test]
fn connections_that_come_and_go_are_told_with_the_reason() {
    let server = start(Settings { idle_timeout: 1, ..Settings::default() });
    let address = server.addresses()[0];
    let mut watcher = Client::watch(address, "connevents");
    for (request, reason) in
        [("mn\r\nquit\r\n", "normal"), ("GET / HTTP/1.1\r\n", "error"), ("mn\r\n", "idle_timeout")]
    {
        let mut client = Client::new(address);
        client.stream.write_all(request.as_bytes()).unwrap();
        assert_eq!(watcher.told(), "type=conn_new rip=127.0.0.1 transport=tcp");
        let want = format!("type=conn_close rip=127.0.0.1 transport=tcp reason={reason}");
        assert_eq!(watcher.told(), want, "the watcher itself is silent and stays");
        drop(client);
    }
    server.stop();
}

#[test]
fn a_watcher_that_does_not_read_holds_up_nobody_and_skips() {
    let size = larder_base::ByteSize::kib(8);
    let server = start(Settings { watcher_logbuf_size: size, ..Settings::default() });
    let address = server.addresses()[0];
    let mut watcher = Client::watch(address, "fetchers");
    let mut client = Client::new(address);
    let many = format!("get {}\r\n", vec!["k".repeat(200); 64].join(" "));
    eventually("lines are skipped", || {
        for _ in 0..20 {
            assert_eq!(client.ask(&many), "END");
        }
        client.stat("log_watcher_skipped") > 0
    });
    // What is sent again from here on comes behind the line that tells of the gap.
    assert_eq!(client.ask("get x\r\n"), "END");
    let (mut told, mut last) = (0, 0);
    loop {
        let line = watcher.line();
        if let Some(skipped) = line.strip_prefix("skipped=") {
            told += skipped.parse::<u64>().unwrap();
            break;
        }
        last += 1;
        if last % 50 == 0 {
            assert_eq!(client.ask("get x\r\n"), "END");
        }
    }
    assert!(told > 0 && watcher.line().contains("type=item_get"));
    server.stop();
}

#[test]
fn who_may_not_watch_is_told_so_and_closed() {
    let server = start(Settings { disable_watch: true, ..Settings::default() });
    let mut client = Client::new(server.addresses()[0]);
    assert_eq!(client.ask("watch\r\n"), "CLIENT_ERROR watch commands not allowed");
    assert_eq!(client.line(), "", "closed");
    server.stop();
    let server = start(Settings::default());
    let address = server.addresses()[0];
    let _all: Vec<Client> = (0..20).map(|_| Client::watch(address, "deletions")).collect();
    let mut more = Client::new(address);
    assert_eq!(more.ask("watch\r\n"), "WATCHER_TOO_MANY log watcher limit reached");
    assert_eq!(more.line(), "", "closed");
    server.stop();
}
