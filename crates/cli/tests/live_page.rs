//! The live page in a real browser: what it shows is what `stats` says.
//!
//! Needs Chromium (`chromium`, or the program that LARDER_CHROMIUM names). Without it the test is
//! ignored. LARDER_SCREENSHOTS=DIR keeps pictures of the page.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of a process use processes and clocks"
)]

mod browser;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use browser::{browse, chromium};

struct Larder {
    child: Child,
    page: String,
    port: u16,
    _dir: tempfile::TempDir,
}

impl Drop for Larder {
    fn drop(&mut self) {
        // A test that failed must not leave its server behind.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Larder {
    fn start() -> Larder {
        let dir = tempfile::tempdir().unwrap();
        let ports = dir.path().join("ports");
        let mut child = Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["kv", "-p", "-1", "-l", "127.0.0.1", "--http", "127.0.0.1:0", "-m", "16"])
            .args(["--flash-size", "64m", "--admission", "all", "--endurance-tbw", "1"])
            .arg("--data-dir")
            .arg(dir.path().join("state"))
            .env_remove("RUST_LOG")
            .env("MEMCACHED_PORT_FILENAME", &ports)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let (mut line, mut page) = (String::new(), String::new());
        while !line.contains("ready on") {
            line.clear();
            assert!(log.read_line(&mut line).unwrap() > 0, "ended before it was ready");
            if let Some(rest) = line.split("live page ").nth(1) {
                page = rest.split_whitespace().next().unwrap().to_owned();
            }
        }
        // The pipe must not fill up.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        let text = std::fs::read_to_string(ports).unwrap();
        let port = text.trim().rsplit(' ').next().unwrap().parse().unwrap();
        assert!(page.starts_with("http://127.0.0.1:"), "no page: {page}");
        Larder { child, page, port, _dir: dir }
    }

    /// Sends a command and reads up to a line of this text.
    fn ask(&self, command: &str, end: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.write_all(command.as_bytes()).unwrap();
        let mut out = String::new();
        for line in BufReader::new(stream).lines() {
            let line = line.unwrap();
            out.push_str(&line);
            out.push('\n');
            if line == end {
                return out;
            }
        }
        panic!("ended before '{end}': {out}");
    }

    fn stats(&self, what: &str) -> BTreeMap<String, String> {
        self.ask(&format!("stats {what}\r\n"), "END")
            .lines()
            .filter_map(|l| l.strip_prefix("STAT ")?.split_once(' '))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect()
    }

    fn live(&self) -> serde_json::Value {
        let address = self.page.trim_start_matches("http://").trim_end_matches('/');
        let mut stream = TcpStream::connect(address).unwrap();
        write!(
            stream,
            "GET /api/live.json HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
        )
        .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    }
}

fn dom(program: &str, page: &str) -> String {
    let text = browse(program, page, &["--dump-dom"]);
    for wrong in ["NaN", "undefined", "connecting", "does not answer"] {
        let body = text.split("<script>").next().unwrap();
        assert!(!body.contains(wrong), "'{wrong}' on the page: {body}");
    }
    text
}

fn screenshots(program: &str, larder: &Larder, name: &str) {
    let Some(dir) = std::env::var_os("LARDER_SCREENSHOTS") else { return };
    let dir = std::path::PathBuf::from(dir);
    for (scheme, more) in [("light", "--enable-features=none"), ("dark", "--force-dark-mode")] {
        for size in ["1400,1500", "420,3200"] {
            let width = size.split(',').next().unwrap();
            let file = dir.join(format!("{name}-{scheme}-{width}.png"));
            let shot = format!("--screenshot={}", file.display());
            browse(program, &larder.page, &[&shot, &format!("--window-size={size}"), more]);
            assert!(file.exists());
        }
    }
}

/// The cell after the one that says `name`.
fn cell<'a>(dom: &'a str, name: &str) -> &'a str {
    // A word with an explanation has a tag of its own.
    let (_, after) = dom
        .split_once(&format!(">{name}</abbr></td><td>"))
        .or_else(|| dom.split_once(&format!("<td>{name}</td><td>")))
        .unwrap_or_else(|| panic!("no '{name}' in {dom}"));
    after.split('<').next().unwrap()
}

#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn the_page_shows_what_stats_says() {
    let program = chromium();
    let larder = Larder::start();

    let empty = dom(&program, &larder.page);
    for words in ["no reads", "no requests yet", "nothing yet", "CLWA"] {
        assert!(empty.contains(words), "no '{words}' on the empty page");
    }
    screenshots(&program, &larder, "empty");

    // Twice the DRAM, so that a part goes to flash; then reads that find it and reads that miss.
    let value = "v".repeat(900);
    let mut load = String::new();
    for i in 0..20_000 {
        let app = ["web", "img", "session"][i % 3];
        load.push_str(&format!("set {app}:{i} 0 0 {} noreply\r\n{value}\r\n", value.len()));
        if i % 1000 == 999 {
            larder.ask(&format!("{load}mn\r\n"), "MN");
            load.clear();
            // A pace that the cleaner can follow.
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    for round in 0..6 {
        for i in (0..22_000).step_by(7) {
            load.push_str(&format!("get {}:{i}\r\n", ["web", "img", "session"][i % 3]));
        }
        larder.ask(&format!("{load}mn\r\n"), "MN");
        load.clear();
        if round < 5 {
            std::thread::sleep(Duration::from_millis(700));
        }
    }
    // The page's sample is taken once a second.
    let stats = larder.stats("");
    let began = Instant::now();
    let counter = |live: &serde_json::Value, name: &str| {
        let all = live["counters"].as_array().unwrap();
        all.iter().find(|c| c[0] == name).map(|c| c[1].to_string()).unwrap()
    };
    loop {
        let live = larder.live();
        if counter(&live, "cmd_get") == stats["cmd_get"] {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(120), "the page does not catch up: {live}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let full = dom(&program, &larder.page);
    assert_eq!(stats["cmd_get"], (6 * 22_000_usize.div_ceil(7)).to_string());
    for name in ["cmd_get", "cmd_set", "get_hits", "get_misses"] {
        assert_eq!(cell(&full, name), stats[name], "{name}");
    }
    assert_eq!(cell(&full, "get_flash_hits"), stats["larder_get_hits_flash"]);
    assert_eq!(cell(&full, "store items"), stats["curr_items"]);
    assert_eq!(cell(&full, "store client_bytes"), stats["larder_client_bytes"]);
    assert_ne!(stats["larder_get_hits_flash"], "0", "nothing was read from flash: {stats:?}");
    for app in ["web", "img", "session"] {
        assert!(full.contains(&format!("<td>{app}</td>")), "{app}");
    }
    // What is said of the whole in words agrees with the counters.
    let number = |name: &str| stats[name].parse::<f64>().unwrap();
    let ratio = format!("since start {:.1} %", 100.0 * number("get_hits") / number("cmd_get"));
    assert!(full.contains(&ratio), "no '{ratio}' on the page");
    let clwa = cell(&full, "CLWA: written to flash per byte stored").parse::<f64>().unwrap();
    assert!((clwa - number("larder_clwa")).abs() < 0.002, "{clwa} {}", stats["larder_clwa"]);
    assert!(clwa > 0.0);

    let own = larder.stats("larder");
    let counted: u64 = own
        .iter()
        .filter(|(name, _)| name.starts_with("larder_memory_"))
        .map(|(_, bytes)| bytes.parse::<u64>().unwrap())
        .sum();
    assert!(counted > 0 && counted <= 16 << 20, "{counted} bytes of -m 16: {own:?}");
    screenshots(&program, &larder, "full");

    // After a reset the counters of flash begin anew with those of the clients: their ratio stays one of one time.
    assert_eq!(larder.ask("stats reset\r\n", "RESET"), "RESET\n");
    larder.ask("set web:1 0 0 1\r\nx\r\n", "STORED");
    let stats = larder.stats("");
    assert_eq!((stats["cmd_set"].as_str(), stats["larder_client_bytes"].as_str()), ("1", "6"));
    assert_eq!(stats["larder_clwa"], "0.0000", "{stats:?}");
    assert_eq!(larder.stats("larder")["larder_app_web_gets"], "0");
}
