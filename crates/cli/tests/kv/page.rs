//! The live page in a real browser: what it shows is what `stats` says.
//!
//! Needs Chromium (`chromium`, or the program that LARDER_CHROMIUM names). Without it the test is
//! ignored. LARDER_SCREENSHOTS=DIR keeps pictures of the page.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::browser::stage::{fits_a_phone, graph, stage, with_script};
use crate::browser::{browse, chromium};
use serde_json::{Value, json};

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

    fn live(&self) -> Value {
        serde_json::from_str(&self.get("/api/live.json")).unwrap()
    }

    fn get(&self, path: &str) -> String {
        let address = self.page.trim_start_matches("http://").trim_end_matches('/');
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.split_once("\r\n\r\n").unwrap().1.to_owned()
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

/// Five minutes: 100 hits of DRAM in every second but fifty that nobody used; latencies of 100 µs and of 30 ms.
fn five_minutes(live: &mut Value) {
    let point = |at: u64| {
        let idle = (100..150).contains(&at);
        json!({
            "at": 1000 + at,
            "requests": if idle { 0.0 } else { 100.0 },
            "dram": if idle { Value::Null } else { json!(0.5) },
            "flash": if idle { Value::Null } else { json!(0.25) },
            "p99_dram": if idle { Value::Null } else { json!(100.0) },
            "p99_flash": if idle { Value::Null } else { json!(30_000.0) },
            "flash_writes": 1024.0 * 1024.0,
        })
    };
    live["history"] = (0..=300).map(point).collect();
    live["applications"] = json!([{
        "name": "web", "hit_ratio": 0.5, "gets": 10, "sets": 1, "dram_bytes": 1000, "flash_bytes": 0,
        "model": 0, "precision": null, "recall": null, "unread_writes": null,
    }]);
    // What the last five seconds were, other than the last one.
    live["hit_ratio"] = json!({ "dram": 0.4, "flash": 0.2, "reads": 500 });
    live["latency_dram"]["p99"] = json!(250.0);
    live["latency_flash"]["p99"] = json!(45_000.0);
}

#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn graphs_show_what_was_and_no_more() {
    let program = chromium();
    let larder = Larder::start();
    let mut live = larder.live();
    five_minutes(&mut live);
    let page = larder.get("/");
    let address = stage(page.clone(), &live);
    let dom = dom(&program, &address);

    // A second without reads has no hit ratio: the line is broken there, not at 0.
    let hits = graph(&dom, "g-hit");
    for colour in ["var(--a)", "var(--b)"] {
        assert_eq!(hits.parts(colour, 600.0 * 125.0 / 300.0), 2, "{hits:?}");
    }
    let lowest = hits.runs.iter().flat_map(|(_, run)| run).map(|p| p.1).fold(100.0, f64::min);
    assert_eq!(lowest, 50.0, "{hits:?}");
    // Without requests there were none: that is drawn.
    assert_eq!(graph(&dom, "g-req").runs.len(), 1);

    // By decades: 30 ms stands two and a half of three above 100 µs.
    let latency = graph(&dom, "g-lat");
    let ticks: Vec<&str> = latency.ticks.iter().map(|t| t.0.as_str()).collect();
    assert_eq!(ticks, ["100 µs", "1.0 ms", "10 ms", "100 ms"], "{latency:?}");
    let places: Vec<f64> = latency.ticks.iter().map(|t| t.1).collect();
    assert_eq!(places, [100.0, 66.7, 33.3, 0.0], "{latency:?}");
    let height = |colour: &str| {
        let (_, run) = latency.runs.iter().find(|(stroke, _)| stroke == colour).unwrap();
        (run[0].1 * 10.0).round() / 10.0
    };
    assert_eq!((height("var(--a)"), height("var(--b)")), (0.0, 82.6), "{latency:?}");
    for id in ["g-hit", "g-req", "g-lat", "g-wr"] {
        let g = graph(&dom, id);
        assert_eq!(g.minutes, ["−5 min", "−4", "−3", "−2", "−1", "now"], "{id}");
        assert!(g.ticks.len() >= 3, "{id}: {g:?}");
        // The legend is of the same time as the headline.
        assert!(g.legend.ends_with("last 5 s"), "{id}: {}", g.legend);
    }
    assert!(
        hits.legend.contains("DRAM 40.0 %") && hits.legend.contains("flash 20.0 %"),
        "{hits:?}"
    );
    assert!(dom.contains("id=\"hit\">60.0 %</div>"), "the headline");
    assert!(latency.legend.contains("p99 DRAM 250 µs"), "{latency:?}");
    assert!(latency.legend.contains("p99 flash 45 ms"), "{latency:?}");

    // Words that need it have an explanation.
    for word in ["p99.9", "CLWA: written to flash per byte stored", "ghosts on flash", "precision"]
    {
        let (before, _) = dom
            .split_once(&format!(">{word}</abbr>"))
            .unwrap_or_else(|| panic!("no '{word}': {dom}"));
        let tag = before.rsplit('<').next().unwrap();
        assert!(tag.starts_with("abbr tabindex=\"0\" title=\"") && tag.len() > 50, "{word}: {tag}");
    }
    fits_a_phone(&program, &address);

    // A second that is chosen says its own numbers.
    let keys = "for (let n = 0; n < 20; n++) document.querySelector('#g-hit svg').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowLeft' }));";
    let chosen = browse(&program, &stage(with_script(&page, keys), &live), &["--dump-dom"]);
    let legend = graph(&chosen, "g-hit").legend;
    assert!(legend.contains("DRAM 50.0 %") && legend.ends_with("20 s ago"), "{legend}");
}
