//! `larder kv` in memcached's place, as charts, images and distributions start it ([`starts.toml`](starts.toml)), and what
//! Prometheus' exporter asks of it.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::client::Client;
use crate::server::{Server, Site};

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Start {
    name: String,
    #[allow(dead_code, reason = "it is for whoever reads the file")]
    source: String,
    args: Vec<String>,
    uid: u32,
    #[serde(default)]
    volume: bool,
    #[serde(default)]
    pod: bool,
    memory: u64,
    item: u64,
    #[serde(default)]
    settings: BTreeMap<String, String>,
}

fn starts() -> Vec<Start> {
    #[derive(serde::Deserialize)]
    struct All {
        start: Vec<Start>,
    }
    toml::from_str::<All>(include_str!("starts.toml")).unwrap().start
}

/// A container: a program that every user may run, a root that only root may write to, and perhaps a volume.
struct Container {
    site: Site,
    program: PathBuf,
    volume: PathBuf,
}

impl Container {
    fn new() -> Container {
        let site = Site::new();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        mode(site.dir.path(), 0o755);
        // Where the program was built may be closed to other users.
        let program = site.dir.path().join("larder");
        std::fs::copy(env!("CARGO_BIN_EXE_larder"), &program).unwrap();
        mode(&program, 0o755);
        let volume = site.dir.path().join("data");
        std::fs::create_dir(&volume).unwrap();
        mode(&volume, 0o755);
        Container { site, program, volume }
    }

    /// As a volume is given to the group of a pod.
    fn give_volume(&self, gid: u32) {
        chown(&self.volume, Some(0), Some(gid)).unwrap();
        std::fs::set_permissions(&self.volume, std::fs::Permissions::from_mode(0o2775)).unwrap();
    }

    /// With nothing in the environment but a home that it cannot write to.
    fn command(&self, uid: u32, args: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.env_clear().env("HOME", "/").current_dir("/").uid(uid).gid(uid).arg("kv");
        let data = self.volume.to_str().unwrap();
        command.args(args.iter().map(|word| word.replace("/data", data)));
        command
    }

    fn start(&self, command: Command) -> Server {
        let server = Server::of(command, self.site.socket());
        self.remember();
        server
    }

    fn remember(&self) {
        for flash in ["file", "flash"] {
            self.site.remember_region_of(&self.volume.join(flash));
        }
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.remember();
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port()
}

/// A connection to an address that a server on 127.0.0.1 does not answer at.
fn from_elsewhere(port: u16) -> std::io::Result<TcpStream> {
    TcpStream::connect(("127.0.0.2", port))
}

#[test]
#[cfg_attr(without = "root", ignore = "needs root, to run as the users of containers")]
fn charts_start_larder_as_they_start_memcached() {
    for start in starts() {
        let container = Container::new();
        if start.volume {
            container.give_volume(start.uid);
        }
        let port = free_port();
        let mut args: Vec<&str> = start.args.iter().map(String::as_str).collect();
        // The suite runs beside other servers.
        let port_word = port.to_string();
        args.extend(["-p", &port_word, "--http", "off"]);
        let mut command = container.command(start.uid, &args);
        if start.pod {
            command.env("KUBERNETES_SERVICE_HOST", "10.96.0.1");
        }
        let server = container.start(command);
        let log = || format!("{}: {}", start.name, server.log());
        assert_eq!(from_elsewhere(port).is_ok(), start.pod, "{}", log());
        let here = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let mut client = Client::over(here);
        assert_eq!(client.set("key", b"value"), "STORED", "{}", log());
        assert_eq!(client.get("key").as_deref(), Some(&b"value"[..]));
        let settings = client.stats(" settings");
        assert_eq!(settings["maxbytes"], (start.memory << 20).to_string(), "{}", log());
        assert_eq!(settings["item_size_max"], start.item.to_string(), "{}", log());
        for (key, wanted) in &start.settings {
            assert_eq!(&settings[key], wanted, "{key}: {}", log());
        }
        // Flash is where it was said to be, with all that is kept, and nowhere else.
        let named = start.args.iter().any(|word| word.contains("ext_path"));
        assert_eq!(container.volume.join("file").exists(), named, "{}", log());
        let keeps = named || start.args.iter().any(|word| word.contains("memory-file"));
        assert_eq!(container.volume.join("VERSION").exists(), keeps, "{}", log());
        assert_eq!(server.log().contains("no flash, DRAM alone"), !named, "{}", log());
        drop(client);
        let log = server.stop();
        assert!(!log.contains("panicked"), "{log}");
    }
}

/// What was on flash is there again after a pod was replaced.
#[test]
#[cfg_attr(without = "root", ignore = "needs root, to run as the users of containers")]
fn a_volume_is_found_again_by_the_next_pod() {
    let container = Container::new();
    container.give_volume(11211);
    let port = free_port().to_string();
    let args = [
        "-m 64",
        "--extended=modern,ext_path=/data/file:64M",
        "-u 11211",
        "-p",
        &port,
        "--http",
        "off",
    ];
    container.start(container.command(11211, &args)).stop();
    let log = container.start(container.command(11211, &args)).stop();
    assert!(log.contains("warm: 0 objects on flash"), "{log}");
}

/// What is missing is named, with the remedy.
#[test]
#[cfg_attr(without = "root", ignore = "needs root, to run as the users of containers")]
fn a_volume_that_cannot_be_written_is_told_with_the_remedy() {
    // A volume of root's; a volume that is not mounted; a directory that is named and cannot be made.
    for (args, path) in [
        (&["--extended=ext_path=/data/file:64M"][..], "data/lock"),
        (&["--extended=ext_path=/nowhere/file:64M"], "/nowhere"),
        (&["--data-dir", "/nowhere"], "/nowhere"),
        (&["--data-dir", "/data/state"], "data/state"),
    ] {
        let container = Container::new();
        let port = free_port().to_string();
        let more = ["-m 64", "-p", &port, "--http", "off"];
        let command = container.command(11211, &[args, &more].concat());
        let (code, said) = container.site.refused_as(command);
        assert_eq!(code, Some(1), "{args:?}: {said}");
        for word in [path, "ermission denied", "may write there", "--data-dir"] {
            assert!(said.contains(word), "{args:?}: '{said}' lacks '{word}'");
        }
    }
}

/// A user that only has a number, as in images without /etc/passwd entries.
#[test]
#[cfg_attr(without = "root", ignore = "needs root, to run as the users of containers")]
fn root_can_become_a_user_that_only_has_a_number() {
    let container = Container::new();
    container.give_volume(54321);
    let port = free_port().to_string();
    let args = ["-m 64", "-u 54321", "-p", &port, "--http", "off", "-o", "ext_path=/data/file:64M"];
    let server = container.start(container.command(0, &args));
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    for line in ["Uid:\t54321", "Gid:\t54321"] {
        assert!(status.contains(line), "{status}");
    }
    server.stop();
}

fn start_on_port(site: &Site, environment: &[(&str, &str)], more: &[&str]) -> (Server, u16) {
    let port = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.env_clear().envs(environment.iter().copied());
    command.args(["kv", "--http", "off", "--flash", "none", "-m", "64"]).args(more);
    command.args(["-p", &port.to_string(), "--data-dir"]).arg(site.data_dir());
    (Server::of(command, site.socket()), port)
}

#[test]
fn the_environment_opens_the_server_and_flags_close_it() {
    let pod = ("KUBERNETES_SERVICE_HOST", "10.96.0.1");
    for (environment, more, open, said) in [
        (&[][..], &[][..], false, "reachable from this machine alone"),
        (&[pod], &[], true, "this is a pod of Kubernetes"),
        (&[pod], &["-l 127.0.0.1"], false, "reachable from this machine alone"),
        (&[pod, ("LARDER_LISTEN", "127.0.0.1")], &[], false, "reachable from this machine alone"),
        (&[("LARDER_LISTEN", "0.0.0.0, ::")], &[], true, "ready on tcp:0.0.0.0"),
        (&[("KUBERNETES_SERVICE_HOST", "")], &[], false, "LARDER_LISTEN=0.0.0.0"),
    ] {
        let site = Site::new();
        let (server, port) = start_on_port(&site, environment, more);
        assert_eq!(
            from_elsewhere(port).is_ok(),
            open,
            "{environment:?} {more:?}: {}",
            server.log()
        );
        assert!(server.log().contains(said), "{environment:?} {more:?}: {}", server.log());
        server.stop();
    }
}

/// What memcached_exporter 0.16.0 reads (pkg/exporter/exporter.go): `HAS` is what there is of it, `LACKS` what Larder has nothing to
/// count of. The exporter leaves out a metric whose key is not there. A key that is there must be what the exporter takes it for.
mod exporter {
    pub(super) const COMMANDS: [&str; 6] = ["get", "delete", "incr", "decr", "cas", "touch"];
    pub(super) const STATS_HAS: &str = "uptime time cas_badval cmd_flush cmd_set bytes limit_maxbytes curr_items total_items \
        bytes_read bytes_written curr_connections total_connections rejected_connections conn_yields listen_disabled_num \
        evictions reclaimed store_too_large store_no_memory lru_crawler_starts accepting_conns";
    pub(super) const STATS_LACKS: &str = "direct_reclaims crawler_items_checked crawler_reclaimed moves_to_cold moves_to_warm \
        moves_within_lru proxy_backend_total";
    pub(super) const TIMES: [&str; 2] = ["rusage_user", "rusage_system"];
    /// With flash.
    pub(super) const EXTSTORE_HAS: &str = "page_allocs page_reclaims pages_free pages_used objects_evicted objects_read \
        objects_written objects_used bytes_written bytes_read bytes_used limit_maxbytes";
    pub(super) const EXTSTORE_LACKS: &str = "compact_lost compact_rescues compact_skipped page_evictions bytes_evicted \
        bytes_fragmented io_queue";
    pub(super) const SETTINGS_HAS: &str = "maxconns";
    pub(super) const SETTINGS_LACKS: &str = "lru_crawler_sleep lru_crawler_tocrawl lru_maintainer_thread hot_lru_pct warm_lru_pct \
        hot_max_factor warm_max_factor";
    /// Of class 1 of `stats items` and of `stats slabs`.
    pub(super) const ITEMS_HAS: &str =
        "number evicted evicted_unfetched reclaimed expired_unfetched crawler_reclaimed";
    pub(super) const SLABS_HAS: &str = "cas_badval cmd_set get_hits delete_hits incr_hits decr_hits cas_hits touch_hits \
        chunk_size used_chunks mem_requested";
}

#[test]
fn prometheus_exporter_finds_what_it_reads() {
    let site = Site::new();
    let with_flash: &[&str] = &["--flash-size", "64m", "-m", "64"];
    let without: &[&str] = &["-m", "64", "-o", "no_lru_crawler"];
    for (more, flash, crawler) in
        [(with_flash, site.flash(), "yes"), (without, "none".into(), "no")]
    {
        let server = site.start_on(&site.data_dir(), &flash, more);
        let mut client = server.connect();
        for i in 0..100 {
            assert_eq!(client.set(&format!("key{i}"), &[b'x'; 1000]), "STORED");
        }
        let has = |all: &BTreeMap<String, String>, before: &str, keys: &str| {
            for key in keys.split_whitespace().map(|key| format!("{before}{key}")) {
                let value = all.get(&key).unwrap_or_else(|| panic!("no {key} in {all:?}"));
                assert!(value.parse::<f64>().is_ok(), "{key}: {value}");
            }
        };
        let lacks = |all: &BTreeMap<String, String>, before: &str, keys: &str| {
            for key in keys.split_whitespace().map(|key| format!("{before}{key}")) {
                assert!(!all.contains_key(&key), "{key} is there: the exporter's metric too");
            }
        };
        let all = client.stats("");
        for command in exporter::COMMANDS {
            has(&all, command, "_hits _misses");
        }
        has(&all, "", exporter::STATS_HAS);
        lacks(&all, "", exporter::STATS_LACKS);
        for key in exporter::TIMES {
            let (seconds, micros) = all[key].split_once('.').unwrap();
            assert!(seconds.parse::<u64>().is_ok() && micros.len() == 6, "{key}: {}", all[key]);
        }
        if crawler == "yes" {
            has(&all, "extstore_", exporter::EXTSTORE_HAS);
        }
        lacks(&all, "extstore_", exporter::EXTSTORE_LACKS);
        assert!(all["version"].starts_with("1.6."), "{}", all["version"]);
        let settings = client.stats(" settings");
        has(&settings, "", exporter::SETTINGS_HAS);
        lacks(&settings, "", exporter::SETTINGS_LACKS);
        assert_eq!(settings["lru_crawler"], crawler);
        // Lines of classes: CLASS:NAME, and items:CLASS:NAME.
        let (slabs, items) = (client.stats(" slabs"), client.stats(" items"));
        assert_eq!((classes(&slabs, ""), classes(&items, "items:")), (vec![1], vec![1]));
        has(&slabs, "", "total_malloced");
        has(&slabs, "1:", exporter::SLABS_HAS);
        has(&items, "items:1:", exporter::ITEMS_HAS);
        server.stop();
    }
}

/// The classes that keys are of: `1:chunk_size`, `items:1:number`. The exporter refuses one that is no number.
fn classes(all: &BTreeMap<String, String>, before: &str) -> Vec<u32> {
    let of = |key: &String| Some(key.strip_prefix(before)?.split_once(':')?.0.to_owned());
    let mut found: Vec<u32> =
        all.keys().filter_map(of).map(|class| class.parse().unwrap()).collect();
    found.dedup();
    found
}

/// Each way to write a flag and its value, as getopt reads them.
#[test]
fn a_flag_and_its_value_may_be_one_argument() {
    let print = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command
            .env_clear()
            .args(["kv", "--print-config", "--data-dir", "/nonexistent"])
            .args(words);
        let out = command.output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{words:?}: {error}");
        String::from_utf8(out.stdout).unwrap()
    };
    for (letter, value, line) in [
        ("m", "512", "memory-limit = 536870912"),
        ("m", "2g", "memory-limit = 2147483648"),
        ("I", "5m", "max-item-size = 5242880"),
        ("c", "16384", "conn-limit = 16384"),
        ("b", "64", "listen-backlog = 64"),
        ("t", "3", "threads = 3"),
        ("R", "20", "max-reqs-per-event = 20"),
        ("p", "-1", "port = -1"),
        ("p", "11999", "port = 11999"),
        ("U", "11999", "udp-port = 11999"),
        ("l", "0.0.0.0", "listen = [\"0.0.0.0\"]"),
        ("u", "11211", "user = \"11211\""),
        ("a", "0770", "unix-mask = \"0770\""),
        ("s", "/tmp/s", "unix-socket = \"/tmp/s\""),
        ("P", "/tmp/pid", "pidfile = \"/tmp/pid\""),
        ("e", "/tmp/mem", "memory-file = \"/tmp/mem\""),
        ("Y", "/tmp/users", "auth-file = \"/tmp/users\""),
        ("B", "ascii", "protocol = \"ascii\""),
        ("D", "/", "prefix-delimiter = \"/\""),
        ("o", "idle_timeout=7", "idle-timeout = 7"),
        ("f", "1.25", "threads ="),
        ("n", "48", "threads ="),
        ("N", "2", "threads ="),
    ] {
        let flag = format!("-{letter}");
        let spaced = format!(" {value}");
        for words in [
            &[format!("{flag} {value}")][..],
            &[format!("{flag}{value}")],
            &[flag.clone(), value.to_owned()],
            &[flag.clone(), spaced.clone()],
            &[format!("-v{letter} {value}")],
        ] {
            if spaced.contains('/') && letter != "D" && words == [flag.clone(), spaced.clone()] {
                continue; // A path may begin with a space.
            }
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let printed = print(&words);
            assert!(printed.lines().any(|l| l.starts_with(line)), "{words:?}: no '{line}'");
        }
    }
    let printed = print(&["-m 64", "-c 5", "-m", "128", "-c 7", "--verbose"]);
    for line in ["memory-limit = 134217728", "conn-limit = 7", "log-level = \"debug\""] {
        assert!(printed.lines().any(|l| l == line), "no '{line}'");
    }
}

#[test]
fn what_is_not_here_is_refused_with_what_is() {
    let site = Site::new();
    for (words, remedy) in [
        (&["-S"][..], "--auth-file"),
        (&["-o", "proxy_config=routelib"], "in front"),
        (&["-o", "drop_privileges"], "-u"),
        (&["-o", "ext_path=/a:64m:compact"], "needs a size"),
        (&["-o", "ext_path=/data/file:0G"], "above zero"),
    ] {
        let (code, said) = site.refused(words);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(remedy), "{words:?}: {said}");
    }
}
