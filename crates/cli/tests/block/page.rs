//! The live page of `larder block serve` in a real browser, and `/metrics`: what they show is what `status` says.
//!
//! Needs Chromium (`chromium`, or the program that LARDER_CHROMIUM names). Without it what
//! needs a browser is ignored.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::browser::stage::{fits_a_phone, graph, stage};
use crate::browser::{browse, chromium};
use crate::daemon::ask::settle;
use crate::daemon::{Daemon, prepare, read, session, write};
use serde_json::{Value, json};

fn get(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text.split_once("\r\n\r\n").unwrap().1.to_owned()
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

/// A daemon that has served three hits and a miss, when its page says so: the folder, the daemon, its address, what the page shows.
fn served() -> (tempfile::TempDir, Daemon, String, serde_json::Value) {
    let dir = prepare("set:8");
    let daemon = Daemon::start(dir.path(), &["--http", "127.0.0.1:0", "--endurance-tbw", "1"]);
    let line = daemon.seen.iter().find(|l| l.contains("live page")).unwrap();
    let page = line.split("live page ").nth(1).unwrap().split(' ').next().unwrap();
    let address = page.trim_start_matches("http://").trim_end_matches('/').to_owned();
    let mut s = session(dir.path());
    write(&mut *s, 0, 1 << 20, 5);
    read(&mut *s, 4 << 20, 1 << 20);
    // A read that comes before the fill would be no hit.
    settle(dir.path());
    for _ in 0..3 {
        read(&mut *s, 4 << 20, 1 << 20);
    }
    let end = Instant::now() + Duration::from_secs(120);
    let live = loop {
        let live: serde_json::Value =
            serde_json::from_str(&get(&address, "/api/live.json")).unwrap();
        let status = &live["status"];
        if status["volumes"][0]["reads"] == 4 && status["cache"]["lines"] == 512 {
            break live;
        }
        assert!(Instant::now() < end, "{live:#}");
        std::thread::sleep(Duration::from_millis(100));
    };
    drop(s);
    (dir, daemon, address, live["status"].clone())
}

#[test]
fn metrics_show_what_status_says() {
    let (_dir, daemon, address, status) = served();
    assert_eq!(status["volumes"][0]["read_hits"], 3, "{status:#}");
    // After a second nothing follows for years from what a cache that fills has written.
    let years = &status["flash"]["expected_life_years"];
    let early = status["uptime_seconds"].as_u64().unwrap() < 60;
    assert!(if early { years.is_null() } else { years.as_f64().unwrap() > 0.0 }, "{status:#}");
    let metrics = get(&address, "/metrics");
    for line in [
        "larder_block_volume_reads_total{volume=\"disk\",result=\"hit\"} 3",
        "larder_block_volume_reads_total{volume=\"disk\",result=\"miss\"} 1",
        "larder_block_cache_lines 512",
        "larder_block_engine_fills_total 512",
        "larder_block_cache_in_use 1",
    ] {
        assert!(metrics.contains(line), "no '{line}' in {metrics}");
    }
    assert!(metrics.trim_end().ends_with("# EOF"));
    assert_eq!(get(&address, "/healthz"), "ok\n");
    daemon.stop();
}

/// As for `larder kv`: the word, also against what a configuration file says.
#[test]
fn there_is_no_page_with_http_off() {
    let dir = prepare("set:8");
    let file = dir.path().join("block.toml");
    std::fs::write(&file, "http = \"127.0.0.1:0\"\n").unwrap();
    let file = file.to_str().unwrap();
    for (arguments, page) in [
        (&["--config", file][..], true),
        (&["--config", file, "--http", "off"], false),
        (&["--http", "off"], false),
    ] {
        let mut daemon = Daemon::start(dir.path(), arguments);
        assert_eq!(daemon.said("live page"), page, "{arguments:?}: {:#?}", daemon.seen);
        daemon.stop();
    }
    std::fs::write(file, "http = \"off\"\n").unwrap();
    let mut daemon = Daemon::start(dir.path(), &["--config", file]);
    assert!(!daemon.said("live page"), "{:#?}", daemon.seen);
    daemon.stop();
}

#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn the_page_shows_what_status_says() {
    let (_dir, daemon, address, status) = served();
    let (program, page) = (chromium(), format!("http://{address}/"));
    let dom = browse(&program, &page, &["--dump-dom"]);
    let body = dom.split("<script>").next().unwrap();
    for wrong in ["NaN", "undefined", "connecting", "does not answer"] {
        assert!(!body.contains(wrong), "'{wrong}' on the page: {body}");
    }
    assert_eq!(cell(&dom, "fills"), "512");
    assert_eq!(cell(&dom, "admitted"), status["verdicts"]["admitted"].to_string());
    assert!(dom.contains("since start 75.0 % of reads"), "{body}");
    assert!(dom.contains("<td>disk</td><td>32.0 MiB</td><td>2.0 MiB</td>"), "{body}");
    if let Some(dir) = std::env::var_os("LARDER_SCREENSHOTS") {
        for (scheme, more) in [("light", "--enable-features=none"), ("dark", "--force-dark-mode")] {
            for size in ["1400,1500", "420,3200"] {
                let width = size.split(',').next().unwrap();
                let name = format!("block-{scheme}-{width}.png");
                let shot =
                    format!("--screenshot={}", std::path::Path::new(&dir).join(name).display());
                browse(&program, &page, &[&shot, &format!("--window-size={size}"), more]);
            }
        }
    }
    daemon.stop();
}

#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn graphs_show_what_was_and_no_more() {
    let (_dir, daemon, address, _) = served();
    let program = chromium();
    let mut live: Value = serde_json::from_str(&get(&address, "/api/live.json")).unwrap();
    // Nobody read for fifty seconds of five minutes.
    let point = |at: u64| {
        let idle = (100..150).contains(&at);
        let some = |x: f64| if idle { Value::Null } else { json!(x) };
        json!({
            "at": 1000 + at,
            "reads": if idle { 0.0 } else { 100.0 },
            "writes": 10.0,
            "hits": some(0.75),
            "p99_hit": some(100.0),
            "p99_miss": some(30_000.0),
            "p99_write": some(1000.0),
            "flash_writes": 1024.0,
        })
    };
    live["history"] = (0..=300).map(point).collect();
    live["hit_ratio"] = json!(0.6);
    live["latency"]["miss"]["p99"] = json!(45_000.0);
    let address = stage(get(&address, "/"), &live);
    let dom = browse(&program, &address, &["--dump-dom"]);
    let hits = graph(&dom, "g-hit");
    assert_eq!(hits.parts("var(--a)", 600.0 * 125.0 / 300.0), 2, "{hits:?}");
    assert!(hits.runs.iter().flat_map(|(_, run)| run).all(|p| p.1 == 75.0), "{hits:?}");
    assert!(hits.legend.contains("hits 60.0 %") && hits.legend.ends_with("last 5 s"), "{hits:?}");
    let latency = graph(&dom, "g-lat");
    let ticks: Vec<&str> = latency.ticks.iter().map(|t| t.0.as_str()).collect();
    assert_eq!(ticks, ["100 µs", "1.0 ms", "10 ms", "100 ms"], "{latency:?}");
    assert!(latency.legend.contains("p99 miss 45 ms"), "{latency:?}");
    for word in ["p99.9", "floor", "ceiling", "metadata hits"] {
        assert!(dom.contains(&format!(">{word}</abbr>")), "{word} has no explanation");
    }
    fits_a_phone(&program, &address);
    daemon.stop();
}
