//! `larder kv --record` under load on several threads, and `larder sim replay` of what it wrote: every decision the same, one that
//! is changed found where it is. And `--capture`. `LARDER_RECORD_SECONDS` says for how long the load goes on (3 by default).

use std::fs::{File, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::load::{Mix, Notebook, under_load};
use crate::server::{Server, Site};
use larder_sim::replay::{RecordFile, flip_decision};

fn seconds() -> Duration {
    let text = std::env::var("LARDER_RECORD_SECONDS").unwrap_or_else(|_| "3".to_owned());
    Duration::from_secs(text.parse().expect("LARDER_RECORD_SECONDS is a number of seconds"))
}

fn larder(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_larder")).args(arguments).output().unwrap()
}

/// The JSON that a command prints, and its exit code.
fn json(arguments: &[&str]) -> (serde_json::Value, Option<i32>) {
    let output = larder(arguments);
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    let value = serde_json::from_slice(&output.stdout);
    (value.unwrap_or_else(|e| panic!("{arguments:?}: {e}: {problem}")), output.status.code())
}

/// Loads a server from several connections, with reads, writes, counters and more, for `length` at least and until there
/// is `enough` (a busy machine needs longer for the same).
fn load(server: &Server, length: Duration, enough: impl Fn(&mut Client) -> bool) -> u64 {
    let book = Notebook::forgetful();
    let mix = Mix { few: 500, many: 200_000, most: 4_000, counters: 50, pause: false };
    let socket = server.socket().to_owned();
    let connect = || Client::new(UnixStream::connect(&socket).unwrap());
    let mut client = server.connect();
    under_load(&book, mix, 6, 11, connect, || {
        let start = Instant::now();
        while start.elapsed() < length || !enough(&mut client) {
            assert!(start.elapsed() < Duration::from_secs(300) + length, "never enough");
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    book.answers()
}

/// Recording is over.
fn ended(client: &mut Client) -> bool {
    client.stats(" larder")["larder_record"] != "on"
}

/// A server without flash.
fn dram_alone(site: &Site, more: &[&str]) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.env_remove("RUST_LOG").args(["kv", "--http", "off", "--flash", "none", "-s"]);
    command.arg(site.socket()).arg("--data-dir").arg(site.data_dir()).args(more);
    Server::of(command, site.socket())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn what_is_recorded_under_load_is_decided_again() {
    let site = Site::new();
    let record = site.dir.path().join("run.rec");
    let file = text(&record);
    let options =
        ["-m", "16", "-t", "3", "--flash-size", "48m", "--admission", "all", "--record", file];
    let server = site.start(&options);
    let answers = load(&server, seconds(), |client| {
        client.stats("")["extstore_page_allocs"].parse::<u64>().unwrap() > 5
    });
    let stats = server.connect().stats(" larder");
    assert_eq!(stats["larder_record"], "on");
    let log = server.stop();
    assert!(log.contains("record closed: the server stopped"), "{log}");
    let (report, code) = json(&["sim", "replay", file, "--json"]);
    eprintln!("{answers} answers; {} bytes of record: {report}", record.metadata().unwrap().len());
    assert_eq!((code, &report["difference"]), (Some(0), &serde_json::Value::Null), "{report}");
    assert_eq!(
        (report["complete"].as_bool(), &report["records"]),
        (Some(true), &report["compared"])
    );
    assert!(report["requests"].as_u64().unwrap() > answers, "{report}");
    assert!(report["segments_written"].as_u64().unwrap() > 3, "{report}");
    // Where it comes from; the secret of the keys' hashes is nobody's.
    assert_eq!(
        (&report["version"], &report["trace"]),
        (&env!("CARGO_PKG_VERSION").into(), &file.into())
    );
    let (seeds, setup) = (report["seed"].as_array().unwrap(), &report["configuration"]);
    assert_eq!(seeds.len(), report["shards"].as_u64().unwrap() as usize, "{report}");
    assert_eq!(
        (&setup["admission"]["policy"], &setup["shards"][0]["seed"]),
        (&"all".into(), &seeds[0])
    );
    assert!(setup["segments"].as_u64().unwrap() > 1 && setup.get("hash_key").is_none(), "{setup}");
    assert_eq!(record.metadata().unwrap().permissions().mode() & 0o777, 0o600);

    // The report has every stream.
    let streams = report["streams"].as_array().unwrap();
    let names: Vec<&str> = streams.iter().map(|stream| stream[0].as_str().unwrap()).collect();
    assert!(names.ends_with(&["log", "maintenance", "applications"]), "{names:?}");

    // One decision flipped, in a shard, in the log and in maintenance: that record's number, and exit code 1.
    let opened = RecordFile::<_>::open(File::open(&record).unwrap()).unwrap();
    let maintenance = opened.setup().maintenance_stream();
    for stream in [0, maintenance - 1, maintenance] {
        let number = opened.records_of(stream) * 2 / 3;
        let flipped = site.dir.path().join(format!("flipped-{stream}.rec"));
        std::fs::copy(&record, &flipped).unwrap();
        let mut changed = OpenOptions::new().read(true).write(true).open(&flipped).unwrap();
        assert!(flip_decision(&mut changed, stream, number).unwrap());
        let output = larder(&["sim", "replay", text(&flipped)]);
        assert_eq!(output.status.code(), Some(1));
        let (said, why) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let place = format!("{}, record {number}", opened.name(stream));
        assert!(said.contains(&format!("first difference: {place}")), "{said}");
        assert!(said.contains("recorded  ") && why.contains(&place), "{said}{why}");
    }

    // What an earlier run cached is no beginning; an existing file is nobody's to overwrite.
    let again = text(site.dir.path()).to_owned() + "/again.rec";
    let (code, said) = site.refused(&["-m", "16", "--record", &again]);
    assert!(code == Some(2) && said.contains("--format-flash"), "{code:?} {said}");
    let (code, said) = site.refused(&["-m", "16", "--format-flash", "--record", file]);
    assert!(
        code == Some(1) && said.contains("run.rec") && said.contains("exists"),
        "{code:?} {said}"
    );
}

/// A record without a decision proves nothing, whoever cut it, and is told from one that agrees.
#[test]
fn a_record_without_a_decision_is_no_success() {
    let site = Site::new();
    let record = site.dir.path().join("run.rec");
    let server = dram_alone(&site, &["-m", "16", "-t", "1", "--record", text(&record)]);
    load(&server, Duration::ZERO, |_| true);
    server.stop();
    let bytes = std::fs::read(&record).unwrap();
    let cut = site.dir.path().join("cut.rec");
    let replay = |length: usize| {
        std::fs::write(&cut, &bytes[..length]).unwrap();
        let output = larder(&["sim", "replay", text(&cut)]);
        let (said, why) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{said}{why}");
        assert!(!said.contains("every decision is the same"), "{said}");
        why.into_owned()
    };
    // Magic, version, length of the setup, its checksum, the setup.
    let setup = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    let why = replay(20 + setup);
    assert!(why.contains("it holds no decision that can be compared"), "{why}");
    let why = replay(20 + setup - 1);
    let expected =
        format!("byte {}: the file ends {} bytes into its setup of {setup}", 19 + setup, setup - 1);
    assert!(why.contains(&expected), "{why}");
}

/// Models are inputs: a policy that learns decides alike too, and DRAM alone.
#[test]
fn models_and_dram_alone_replay_too() {
    let paper = ["--admission", "flashiness_paper"];
    // Under a budget, seeking hits by bytes; and with a price on writes besides, which only a file can set.
    let bytes = ["--admission-objective", "bytes", "--endurance-tbw", "0.001"];
    for (name, more) in
        [("paper", &paper[..]), ("bytes", &bytes), ("price", &bytes), ("tuned", &[]), ("DRAM", &[])]
    {
        let site = Site::new();
        let record = site.dir.path().join("run.rec");
        let options = ["-m", "16", "-t", "2", "--record", text(&record)];
        let priced = site.dir.path().join("priced.toml");
        std::fs::write(&priced, "[admission.flashiness]\nprice = 0.5\n").unwrap();
        let tuned = site.dir.path().join("tuned.toml");
        std::fs::write(&tuned, "[admission.expected_reads]\nself_tuning = true\n").unwrap();
        let flash = ["--flash-size", "48m"];
        let file = ["--config", text(&priced)];
        let server = match name {
            "DRAM" => dram_alone(&site, &options),
            "price" => site.start(&[&options[..], &flash, more, &file].concat()),
            "tuned" => site.start(&[&options[..], &flash, &["--config", text(&tuned)]].concat()),
            _ => site.start(&[&options[..], &flash, more].concat()),
        };
        load(&server, seconds() / 2, |_| true);
        // Who is asked to find a setting says what it has found.
        let stats = server.connect().stats(" larder");
        assert_eq!(stats.contains_key("larder_admission_thrift_reason"), name == "tuned", "{name}");
        server.stop();
        let (report, code) = json(&["sim", "replay", text(&record), "--json"]);
        let ended = (code, report["complete"].as_bool());
        assert_eq!(ended, (Some(0), Some(true)), "{name}: {report}");
        assert_eq!(report["records"], report["compared"], "{name}: {report}");
    }
}

/// Recording that reaches its limit ends, says so everywhere, and the server goes on; what was recorded replays. So does what a
/// killed server leaves.
#[test]
fn a_record_that_ends_early_says_so() {
    let site = Site::new();
    let record = site.dir.path().join("run.rec");
    let options = ["-m", "16", "-t", "2", "--flash-size", "32m", "--admission", "all"];
    let limited = ["--record", text(&record), "--record-limit", "4m"];
    let server = site.start(&[&options[..], &limited].concat());
    load(&server, Duration::ZERO, ended);
    let stats = server.connect().stats(" larder");
    assert_eq!(stats["larder_record"], "the file reached its limit");
    assert!(server.connect().stats("")["larder_alarms"] != "0");
    let log = server.stop();
    assert!(log.contains("recording ends: the file has reached 4"), "{log}");
    let size = record.metadata().unwrap().len();
    assert!((3 << 20..=(4 << 20) + 4096).contains(&size), "{size}");
    let (report, code) = json(&["sim", "replay", text(&record), "--json"]);
    assert_eq!((code, report["complete"].as_bool()), (Some(0), Some(false)), "{report}");
    assert!(report["compared"].as_u64().unwrap() > 10_000, "{report}");

    let record = site.dir.path().join("killed.rec");
    let server =
        site.start(&[&options[..], &["--format-flash", "--record", text(&record)]].concat());
    load(&server, seconds(), |client| client.stat("larder_record_records") > 40_000);
    server.kill();
    let (report, code) = json(&["sim", "replay", text(&record), "--json"]);
    assert_eq!((code, report["complete"].as_bool()), (Some(0), Some(false)), "{report}");
    assert!(report["ended"].is_null() && report["compared"].as_u64().unwrap() > 10_000, "{report}");
}

/// A file that cannot be written any further: the same.
#[test]
fn a_disk_without_space_ends_the_record_and_not_the_server() {
    let site = Site::new();
    let record = site.dir.path().join("run.rec");
    // Writes beyond a megabyte (or two: shells count in blocks of 512 or 1,024 bytes) fail.
    let line = "trap '' XFSZ; ulimit -f 2048; exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", line, env!("CARGO_BIN_EXE_larder"), "kv", "--http", "off"]);
    command.args(["--flash", "none", "-m", "16", "-t", "2", "-s"]).arg(site.socket());
    command.arg("--data-dir").arg(site.data_dir()).arg("--record").arg(&record);
    let server = Server::of(command, site.socket());
    let answers = load(&server, Duration::ZERO, ended);
    let stats = server.connect().stats(" larder");
    assert_eq!(stats["larder_record"], "the file could not be written any further", "{answers}");
    let log = server.stop();
    assert!(log.contains("the record cannot be written any further; the server goes on"), "{log}");
    let (report, code) = json(&["sim", "replay", text(&record), "--json"]);
    assert_eq!((code, report["complete"].as_bool()), (Some(0), Some(false)), "{report}");
    assert_eq!(report["ended"], "the file could not be written any further", "{report}");
    assert!(report["compared"].as_u64().unwrap() > 5_000, "{report}");
}

#[test]
fn a_capture_is_a_trace_of_the_sampled_keys() {
    let site = Site::new();
    let (all, some) = (site.dir.path().join("all.lrd"), site.dir.path().join("some.lrd.zst"));
    let mut seen = Vec::new();
    for (file, share) in [(&all, "1"), (&some, "0.1")] {
        let options = ["-m", "16", "--capture", text(file), "--capture-share", share];
        let server = dram_alone(&site, &options);
        let mut client = server.connect();
        for round in 0..4 {
            for key in 0..1_000 {
                let key = format!("app{}:key{key}", key % 2);
                if round == 0 {
                    client.set(&key, &[b'x'; 100]);
                } else {
                    assert!(client.get(&key).is_some());
                }
            }
        }
        let stats = client.stats(" larder");
        assert_eq!(stats["larder_capture_dropped"], "0");
        drop(client);
        server.stop();
        let (report, code) = json(&["trace", "stats", text(file), "--json"]);
        assert_eq!(code, Some(0));
        seen.push(report);
    }
    assert_eq!(seen[0]["requests"], 4_000, "{}", seen[0]);
    assert_eq!(seen[0]["objects"], 1_000, "{}", seen[0]);
    // Every request of a sampled key is there.
    let (requests, objects) =
        (seen[1]["requests"].as_u64().unwrap(), seen[1]["objects"].as_u64().unwrap());
    assert_eq!(requests, 4 * objects);
    assert!((50..200).contains(&objects), "{objects} of 1000 keys");
    // No key can be read from it.
    let bytes = std::fs::read(&all).unwrap();
    assert!(!bytes.windows(4).any(|w| w == b"key1" || w == b"app1"));
    let arguments = ["--policies", "lru", "--sizes", "100,1000", "--unit", "objects", "--json"];
    let (rows, code) = json(&[&["sim", "mrc", text(&all)][..], &arguments].concat());
    assert_eq!((code, rows[1]["misses"].as_u64()), (Some(0), Some(1_000)), "{rows}");
}

#[test]
fn shares_that_cannot_be_are_refused() {
    let site = Site::new();
    for share in ["0", "1.5", "nan"] {
        let (code, said) = site.refused(&["--capture", "x", "--capture-share", share]);
        assert!(code == Some(2) && said.contains("capture-share"), "{code:?} {said}");
    }
    let (code, said) = site.refused(&["--record", "x", "--record-limit", "1k"]);
    assert!(code == Some(2) && said.contains("record-limit"), "{code:?} {said}");
    let output = larder(&["sim", "replay", "/dev/null"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("does not begin"), "{said}");
}
