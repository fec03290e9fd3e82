//! The live page of `larder block serve` in a real browser, and `/metrics`: what they show is what `status` says.
//!
//! Needs Chromium (`chromium`, or the program that LARDER_CHROMIUM names). Without it what
//! needs a browser is ignored.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of a process use processes and clocks"
)]

mod browser;
mod daemon;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use browser::{browse, chromium};
use daemon::ask::settle;
use daemon::{Daemon, prepare, read, session, write};

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
