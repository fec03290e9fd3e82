//! `larder sim`, run as people and scripts run it.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn larder(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_larder")).arg("sim").args(arguments).output().unwrap()
}

fn json(arguments: &[&str]) -> serde_json::Value {
    let output = larder(arguments);
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {problem}");
    serde_json::from_slice(&output.stdout).unwrap()
}

const TRACE: &str = "gen:zipf?objects=20000&requests=100000&skew=0.9&seed=3";

#[test]
fn mrc_prints_the_fields_that_scripts_rely_on() {
    let rows = json(&[
        "mrc",
        TRACE,
        "--policies",
        "lru,s3fifo,belady",
        "--sizes",
        "100,1000",
        "--unit",
        "objects",
        "--json",
    ]);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 6);
    let names: Vec<&str> = rows.iter().map(|r| r["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ["lru", "lru", "s3fifo", "s3fifo", "belady", "belady"]);
    for row in rows {
        for field in ["size", "requests", "misses", "request_bytes", "miss_bytes"] {
            assert!(row[field].is_u64(), "{field} of {row}");
        }
        assert_eq!(row["requests"], 100_000);
        assert!(row["misses"].as_u64().unwrap() > 10_000);
    }
    assert!(rows[1]["misses"].as_u64() < rows[0]["misses"].as_u64());
    assert!(rows[4]["misses"].as_u64() < rows[0]["misses"].as_u64());
}

/// Without sizes they are shares of the objects that there are.
#[test]
fn mrc_has_default_sizes() {
    let rows = json(&["mrc", "gen:zipf?objects=10000&requests=200000&skew=0", "--json"]);
    let sizes: Vec<u64> =
        rows.as_array().unwrap().iter().map(|r| r["size"].as_u64().unwrap()).collect();
    assert_eq!(sizes, [10, 30, 100, 300, 1000, 3000]);
    let refused = larder(&["mrc", "-"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && said.contains("--sizes"), "{said}");
}

/// A server that has nothing and stores nothing.
fn forgetful_server() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            std::thread::spawn(move || -> std::io::Result<()> {
                let (mut reader, mut stream) = (BufReader::new(stream.try_clone()?), stream);
                let mut line = String::new();
                while reader.read_line(&mut line)? > 0 {
                    if line.starts_with("set") {
                        let length: usize =
                            line.split_whitespace().nth(4).unwrap().parse().unwrap();
                        reader.read_exact(&mut vec![0; length + 2])?;
                        stream.write_all(b"STORED\r\n")?;
                    } else {
                        stream.write_all(b"END\r\n")?;
                    }
                    line.clear();
                }
                Ok(())
            });
        }
    });
    address
}

#[test]
fn an_interrupted_replay_prints_what_was_measured() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["replay", "gen:zipf?objects=1000&requests=1e9&value=10", "--json", "--to"])
        .arg(forgetful_server())
        .args(["-c", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    crate::interrupt::until_it_heeds(child.id());
    std::thread::sleep(Duration::from_millis(500));
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(began.elapsed() < Duration::from_secs(120), "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["requests"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(report["requests_lost"], 0, "{report}");
    assert!(said.contains("interrupted"), "{said}");
}

#[test]
fn the_same_seed_and_sample_print_the_same_bytes_on_any_number_of_threads() {
    let run = |threads: &str| {
        let arguments = [
            "mrc",
            TRACE,
            "--policies",
            "all",
            "--sizes",
            "1m",
            "--unit",
            "bytes",
            "--sample",
            "0.5",
        ];
        let output = larder(&[&arguments[..], &["--json", "--threads", threads]].concat());
        assert!(output.status.success());
        output.stdout
    };
    assert_eq!(run("1"), run("3"));
}

#[test]
fn baselines_and_drives_report() {
    let rows = json(&["baseline", TRACE, "--flash", "1m", "--block", "16k", "--json"]);
    assert_eq!(rows[0]["cache"], "victim");
    assert_eq!(rows[1]["cache"], "ripq");
    assert!(
        rows[0]["clwa_of_misses"].as_f64().unwrap() > rows[1]["clwa_of_misses"].as_f64().unwrap()
    );

    let drive = ["ssd", "--capacity", "64m", "--page", "4k", "--block", "256k", "--json"];
    let random = json(&drive)["dlwa"].as_f64().unwrap();
    let in_turn = json(&[&drive[..], &["--sequential"]].concat());
    assert!(random > 4.0 && in_turn["dlwa"].as_f64().unwrap() < 1.05, "{random}");
}

#[test]
fn what_cannot_be_meant_is_refused_in_one_line() {
    for (arguments, code, words) in [
        (&["mrc", TRACE, "--policies", "mru", "--sizes", "9"][..], 2, "'mru': choose from lru"),
        (&["mrc", TRACE, "--sizes", "4k"], 2, "'4k': with --unit objects"),
        (&["mrc", TRACE, "--sizes", "0"], 2, "between 1 and"),
        (&["mrc", TRACE, "--sizes", "9", "--sample", "2"], 2, "0 < SHARE <= 1"),
        (&["mrc", "-", "--sizes", "9", "--policies", "belady"], 2, "name a file"),
        (&["mrc", TRACE, "--lru-curve", "--sample", "0.1"], 2, "leave out --sample"),
        (&["mrc", "/nonexistent", "--sizes", "9"], 2, "/nonexistent"),
        (&["baseline", TRACE, "--flash", "4k"], 2, "less than a block"),
        (
            &["baseline", TRACE, "--flash", "1m", "--cache", "fifo-log"],
            2,
            "--flash: flash is 1048576: it must be",
        ),
        (
            &["baseline", TRACE, "--flash", "9m", "--cache", "fifo-log", "--admission", "x"],
            2,
            "choose from all",
        ),
        (&["index", "--choices", "0"], 2, "choices is 0: it must be 1 to 64"),
        (&["index", "--sizes", "big"], 2, "lognormal:MEAN:SIGMA"),
        (&["ssd", "--page", "3k"], 2, "not a multiple"),
        (&["ssd", "--over-provisioning", "0"], 2, "--over-provisioning"),
        (&["ssd", "--capacity", "1g", "--io", "1g", "--hot", "0.9:0.1"], 2, "at least two regions"),
        (&["ssd", "--hot", "0.9"], 2, "0.9:0.1"),
        (&["ssd", "--utilisation", "nan"], 2, "0 < SHARE <= 1"),
        (&["ssd", "--trace", "gen:zipf?requests=10"], 2, "--trace: 'gen:zipf?requests=10' has no"),
        (&["ssd", "--trace", FILES, "--rounds", "3"], 2, "cannot be used with '--rounds"),
        (&["ssd", "--over-provisioning", "1e300"], 2, "--over-provisioning: '1e300': give a share"),
        (&["ssd", "--utilisation", "1e300"], 2, "--utilisation: '1e300' is not a share"),
        (&["stack", TRACE], 2, "has no block reads or writes: give a block trace"),
        (&["stack", FILES, "--warmup", "9000000"], 2, "--warmup: '9000000': the trace has "),
        (&["stack", FILES, "--restart", "9000000"], 2, "--restart: '9000000': the trace has "),
        (&["stack", FILES, "--flash", "1"], 2, "--flash: 1 B is less than a block: give 4k"),
        (&["stack", FILES, "--flash-read", "1e300"], 2, "--flash-read: '1e300' is not a time"),
        (&["block", FILES, "--sizes", "1m", "--backing", "0"], 2, "--backing: '0': volumes hold"),
        (
            &["block", FILES, "--sizes", "1m", "--reclaim", "fifo", "--over-provisioning", "1e300"],
            2,
            "--over-provisioning: '1e300': give a share",
        ),
        (&["mrc", TRACE, "--sizes", "9", "--sample", "1e300"], 2, "--sample: '1e300' is not"),
        (
            &["baseline", TRACE, "--flash", "1000t", "--cache", "set-associative"],
            2,
            "--flash: the buckets of set-associative take ",
        ),
        (&["block", FILES, "--sizes", "15t"], 2, "--sizes: up to 15 TiB the tables"),
        (&["index", "--load", "1e300"], 2, "load is 1e300: it must be above 0"),
        (&["mrc", "gen:zipf?rate=0", "--sizes", "9"], 2, "rate='0' is not a number from 0.000001"),
        (&["mrc", TRACE, "--sizes", "9", "--admission", "probability:3"], 2, "reject_first"),
        (&["ssd", "--capacity", "1p"], 2, "'1p' is not a size"),
        (&["mrc", TRACE, "--sizes", "9", "--warmup", "9000000"], 2, "none is left to count"),
    ] {
        let output = larder(arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
        assert!(message.contains(words), "{arguments:?}: {message}");
    }
}

/// What a list names twice is simulated once, and it is said.
#[test]
fn repeats_are_made_one() {
    let bytes = ["baseline", TRACE, "--dram", "256k", "--region", "64k", "--json"];
    for (arguments, flag, rows) in [
        (&["mrc", TRACE, "--sizes", "10,20,10", "--json"][..], "--sizes", 2),
        (&["mrc", TRACE, "--sizes", "10", "--admission", "all,all", "--json"], "--admission", 1),
        (&["mrc", TRACE, "--sizes", "10", "--policies", "lru,all,lru", "--json"], "--policies", 16),
        (&[&bytes[..], &["--flash", "4m,4096k", "--cache", "victim"]].concat(), "--flash", 1),
        (&[&bytes[..], &["--flash", "4m", "--cache", "ripq,ripq"]].concat(), "--cache", 1),
        (
            &[&bytes[..], &["--flash", "4m", "--cache", "fifo-log", "--admission", "all,all"]]
                .concat(),
            "--admission",
            1,
        ),
        (&["block", FILES, "--sizes", "1m,1024k", "--json"], "--sizes", 1),
        (
            &["block", FILES, "--sizes", "1m", "--replacement", "lru,sieve,lru", "--json"],
            "--replacement",
            2,
        ),
    ] {
        let output = larder(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {said}");
        assert!(
            said.contains(&format!("{flag} names some more than once")),
            "{arguments:?}: {said}"
        );
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found.as_array().unwrap().len(), rows, "{arguments:?}");
    }
}

#[test]
fn cachelib_baselines_and_the_papers_index_report() {
    let args = ["baseline", TRACE, "--cache", "set-associative,fifo-log", "--flash", "1m"];
    let filters = ["--admission", "all,probability:0.1", "--region", "64k", "--json"];
    let rows = json(&[&args[..], &filters[..]].concat());
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 4);
    let figure = |row: usize, name: &str| rows[row][name].as_u64().unwrap();
    for row in rows {
        assert_eq!(row["requests"], rows[0]["requests"]);
        assert!(row["index_bytes_per_object"].as_f64().unwrap() > 0.0);
    }
    assert_eq!(figure(0, "flash_bytes"), figure(0, "flash_writes") * 4096);
    assert_eq!(figure(2, "flash_bytes"), figure(2, "flash_writes") * 65_536);
    assert!(figure(1, "flash_bytes") < figure(0, "flash_bytes"));
    assert_eq!(rows[3]["admission"], "probability:0.1");

    let small =
        ["index", "--objects", "20000", "--turnovers", "1", "--choices", "4", "--load", "0.8"];
    let packing =
        ["--segment", "1m", "--functions", "16", "--offered", "2", "--sizes", "fixed:280"];
    let report = json(&[&small[..], &packing[..], &["--json"][..]].concat());
    let index = report["index"].as_array().unwrap();
    let of = |name: &str, figure: &str| {
        index.iter().find(|r| r["index"] == name).unwrap()[figure].as_f64().unwrap()
    };
    assert!(of("paper", "forced_share") > of("larder", "forced_share"));
    let packed: Vec<f64> = report["packing"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["utilisation"].as_f64().unwrap())
        .collect();
    // Bytes at which objects of one size stop to fit, against pages.
    assert!((0.70..0.75).contains(&packed[0]) && packed[1] > 0.9, "{packed:?}");
}

const FILES: &str = "gen:specsfs?scale=0.0002&requests=40000&seed=2";

#[test]
fn block_policies_are_compared() {
    let base = ["block", FILES, "--sizes", "8m,16m", "--warmup", "10000", "--json"];
    let admissions = ["--admission", "all", "--admission", "sseqr(length=1m)+two_lbs"];
    let rows = json(&[&base[..], &admissions, &["--placement", "full,set:4"]].concat());
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 8);
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} of {row}"));
        assert!((0.0..1.0).contains(&number("hit_ratio")) && number("read_lines") > 1000.0);
        let clwa = number("flash_bytes") / number("written_bytes");
        assert!((number("clwa_of_writes") - clwa).abs() < 1e-9);
        assert!(number("metadata_hits") <= number("metadata_lines"), "{row}");
        let selective = row["admission"].as_str().unwrap().contains("two_lbs");
        assert_eq!(number("not_hotter") > 0.0, selective, "{row}");
    }
    let of = |row: usize, name: &str| rows[row][name].as_f64().unwrap();
    // By size, then placement, then admission.
    assert_eq!(
        (rows[0]["placement"].as_str(), rows[2]["placement"].as_str()),
        (Some("full"), Some("set:4"))
    );
    assert!(of(4, "hit_ratio") > of(0, "hit_ratio"), "more flash, more hits");
    assert!(of(1, "metadata_hits") > of(0, "metadata_hits"), "metadata first");
    let again = larder(&[&base[..], &admissions, &["--placement", "full,set:4"]].concat());
    let threads = ["--placement", "full,set:4", "--threads", "3"];
    let twice = larder(&[&base[..], &admissions, &threads].concat());
    assert_eq!(again.stdout, twice.stdout);
    let table = larder(&["block", FILES, "--sizes", "8m", "--write", "hdd-inv"]);
    let shown = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(shown.contains("metadata") && shown.contains("full lru"), "{shown}");
}

#[test]
fn block_refuses_what_cannot_be_meant() {
    for (arguments, words) in [
        (&["--sizes", "8m", "--placement", "set:33"][..], "'set:33' is no placement"),
        (&["--sizes", "8m", "--admission", "tc(bits=3)"], "bits"),
        (&["--sizes", "8m", "--write", "back"], "'back' is not a write mode"),
        (&["--sizes", "8m", "--replacement", "mru"], "mru"),
        (&["--sizes", "8m", "--line", "3000"], "power of two"),
        (&["--sizes", "4k"], "at least one group"),
        (&["--sizes", "8m", "--warmup", "50000"], "--warmup: '50000'"),
    ] {
        let output = larder(&[&["block", FILES][..], arguments].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: '{said}' lacks '{words}'");
    }
    let output = larder(&["block", TRACE, "--sizes", "8m"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("no block reads"), "{said}");
}

#[test]
fn stack_has_hosts_and_restarts() {
    let trace = "gen:fileserver?size=64m&set=8m&hosts=3&requests=30000&writes=0.3";
    let base = ["stack", trace, "--ram", "256k", "--flash", "16m", "--architecture", "naive"];
    let more = ["--restart", "15000", "--persistence", "warm,cold", "--json"];
    let report = json(&[&base[..], &more].concat());
    let rows = report["rows"].as_array().unwrap();
    let kept: Vec<&str> = rows.iter().map(|r| r["persistence"].as_str().unwrap()).collect();
    assert_eq!(kept, ["warm", "cold"]);
    for row in rows {
        let of = |name: &str| row[name].as_u64().unwrap_or_else(|| panic!("{name} of {row}"));
        // An I/O is of several blocks; all but the first 15,000 are counted.
        let counted = of("reads") + of("writes");
        assert!(of("hosts") == 3 && (30_000..150_000).contains(&counted), "{counted}");
        assert!(
            of("invalidations") >= of("invalidating_writes") && of("invalidating_writes") > 100
        );
        assert!(row["filer_load"].as_f64().unwrap() > 0.1);
    }
    assert!(rows[0]["read_mean_us"].as_f64() < rows[1]["read_mean_us"].as_f64(), "{report}");
    let table = larder(&[&base[..], &["--threads", "2"]].concat());
    let shown = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(shown.contains("invalidating") && shown.contains("filer load"), "{shown}");
    let wrong = larder(&[&base[..], &["--persistence", "cold"]].concat());
    let said = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(wrong.status.code() == Some(2) && said.contains("--restart"), "{said}");
}

#[test]
fn every_output_names_version_seed_and_trace() {
    let version = env!("CARGO_PKG_VERSION");
    let blocks = "gen:fileserver?size=64m&set=8m&requests=5000&writes=0.3";
    let commands: [(&str, &[&str]); 5] = [
        (TRACE, &["oracle", TRACE, "--dram", "1m", "--flash", "8m", "--levels", "0.5"]),
        (TRACE, &["mrc", TRACE, "--sizes", "100", "--policies", "lru,belady"]),
        (TRACE, &["baseline", TRACE, "--flash", "4m", "--cache", "victim"]),
        (FILES, &["block", FILES, "--sizes", "8m"]),
        (blocks, &["stack", blocks, "--ram", "256k", "--flash", "4m"]),
    ];
    // A flag that was given, and one that was not.
    let flags: [[(&str, serde_json::Value); 2]; 5] = [
        [("most_runs", 24.into()), ("objective", "requests".into())],
        [("unit", "objects".into()), ("warmup", 0.into())],
        [("bucket", 4096.into()), ("align", 1.into())],
        [("write", "hdd-ssd".into()), ("line", 4096.into())],
        [("pages", 4096.into()), ("flash_read", 88.0.into())],
    ];
    for ((trace, command), flags) in commands.into_iter().zip(flags) {
        let seeded = [command, &["--seed", "7"]].concat();
        let found = json(&[&seeded[..], &["--json"]].concat());
        let rows = found.as_array().cloned().unwrap_or_else(|| vec![found]);
        let hash =
            rows[0]["trace_hash"].as_str().unwrap_or_else(|| panic!("{}", rows[0])).to_owned();
        assert_eq!(hash.len(), 16);
        for row in &rows {
            let named = (&row["version"], &row["seed"], &row["trace"], &row["trace_hash"]);
            let wanted = (version.into(), 7.into(), trace.into(), hash.as_str().into());
            assert_eq!(named, (&wanted.0, &wanted.1, &wanted.2, &wanted.3));
            let configuration = &row["configuration"];
            assert_eq!(configuration["format"], "generated", "{configuration}");
            assert_eq!(configuration["skip_bad"], false);
            for (flag, value) in &flags {
                assert_eq!(&configuration[*flag], value, "{flag} of {configuration}");
            }
        }
        let table = String::from_utf8(larder(&seeded).stdout).unwrap();
        let line = format!("larder {version}, seed 7, trace {trace}, hash {hash}");
        assert!(table.contains(&line), "no '{line}' in\n{table}");
        let (_, configuration) = table.split_once("\nconfiguration: ").unwrap();
        assert!(configuration.contains(&format!("{}=", flags[0].0)), "{configuration}");
        // A rule around the header and at the end, none between rows.
        let rules = table.lines().filter(|l| l.starts_with(['─', '═'])).count();
        assert!(rules <= 3, "{rules} rules in\n{table}");
        // One more request.
        let other = trace.replace("000", "001");
        let other = json(&[&command[..1], &[other.as_str()], &command[2..], &["--json"]].concat());
        let other = if other.is_array() { other[0].clone() } else { other };
        assert_ne!(other["trace_hash"], hash.as_str(), "another trace has another hash");
    }
}

#[test]
fn a_drive_says_what_it_was() {
    let base = [
        "ssd",
        "--capacity",
        "64m",
        "--page",
        "16k",
        "--block",
        "1m",
        "--victim",
        "fifo",
        "--seed",
        "5",
    ];
    let found = json(&[&base[..], &["--hot", "0.9:0.1", "--json"]].concat());
    assert_eq!((&found["seed"], &found["version"]), (&5.into(), &env!("CARGO_PKG_VERSION").into()));
    let configuration = &found["configuration"];
    assert_eq!((&configuration["victim"], &found["cleaned"]), (&"fifo".into(), &true.into()));
    for (flag, bytes) in [("capacity", 64 << 20), ("block", 1 << 20), ("io", 16 << 10)] {
        assert_eq!(configuration[flag], bytes, "{configuration}");
    }
    assert_eq!((&configuration["hot"], &configuration["rounds"]), (&"0.9:0.1".into(), &8.into()));
    let shown = String::from_utf8(larder(&base).stdout).unwrap();
    for words in [
        "drive of 64 MiB",
        "victim fifo",
        "over-provisioning 0.07",
        "seed 5",
        "random writes of 16 KiB",
    ] {
        assert!(shown.contains(words), "no '{words}' in {shown}");
    }
    assert!(!shown.contains("never filled"), "{shown}");
    // A trace that writes less than the drive holds.
    let few = "gen:fileserver?size=16m&set=1m&requests=50&writes=1";
    let shown = larder(&["ssd", "--capacity", "1g", "--trace", few]);
    let shown = String::from_utf8(shown.stdout).unwrap();
    for words in ["the drive never filled", "--capacity", "hash "] {
        assert!(shown.contains(words), "no '{words}' in {shown}");
    }
}

#[test]
fn the_exact_curve_ends_at_all_objects_and_is_marked() {
    let arguments = ["mrc", TRACE, "--sizes", "100", "--lru-curve=5"];
    let rows = json(&[&arguments[..], &["--json"]].concat());
    let rows = rows.as_array().unwrap();
    assert!(rows[0].get("curve").is_none() && rows[1..].iter().all(|r| r["curve"] == true));
    let shown = String::from_utf8(larder(&arguments).stdout).unwrap();
    assert!(shown.contains("lru (curve)"), "{shown}");
    let last = rows.last().unwrap();
    assert!(shown.contains(&format!("{} objects,", last["size"])), "{last} {shown}");
    assert_eq!((rows[1]["size"].as_u64(), rows.len()), (Some(1), 6));
}

/// A figure has one name in every output, and a name one meaning: those of `run`.
#[test]
fn a_figure_has_the_name_that_experiments_give_it() {
    let blocks = "gen:fileserver?size=64m&set=8m&requests=5000&writes=0.3";
    let found = [
        json(&["baseline", TRACE, "--flash", "4m", "--cache", "victim", "--json"])[0].clone(),
        json(&["block", FILES, "--sizes", "8m", "--reclaim", "fifo", "--json"])[0].clone(),
        json(&["stack", blocks, "--ram", "256k", "--flash", "4m", "--json"])["rows"][0].clone(),
        json(&["ssd", "--capacity", "64m", "--block", "1m", "--json"]),
    ];
    let wanted: [&[&str]; 4] = [
        &["hit_ratio", "hits_dram", "clwa_of_misses", "flash", "dram"],
        &["hit_ratio", "line_hit_ratio", "clwa_of_writes", "dlwa", "flash"],
        &["hits_dram", "hits_flash", "read_mean_us", "write_mean_us", "flash", "dram"],
        &["dlwa", "wear"],
    ];
    for (row, wanted) in found.iter().zip(wanted) {
        for name in wanted {
            assert!(!row[*name].is_null(), "no {name} in {row}");
        }
        for name in ["clwa", "flwa", "write_amplification", "ram", "dram_hits", "read_us"] {
            assert!(row.get(name).is_none(), "{name} in {row}");
        }
    }
    let of = |name: &str| found[1][name].as_f64().unwrap();
    assert_eq!(of("hit_ratio"), of("whole_hits") / of("reads"));
    assert_eq!(of("line_hit_ratio"), of("hit_lines") / of("read_lines"));
}

/// In a terminal of 80 columns no line is longer but for a word that is.
#[test]
fn what_is_said_fits_eighty_columns() {
    let run = "experiments/memcachier-mix.toml";
    let timed = "gen:zipf?objects=5000&requests=20000&skew=0.9&rate=1000&value=400";
    let advise = ["sim", "advise", "--trace", timed, "--drive-tbw", "600", "--dram-cost", "4"];
    let wanted =
        ["--flash-cost", "0.1", "--target-hit-ratio", "0.5", "--policies", "flashiness,all"];
    let commands: [&[&str]; 9] = [
        &["sim", "run", run],
        &[&advise[..], &wanted].concat(),
        &["sim", "ssd", "--capacity", "64m", "--block", "1m"],
        &["sim", "ssd", "--capacity", "1g", "--trace", FILES],
        &["sim", "baseline", TRACE, "--flash", "4m", "--block", "64k"],
        &["sim", "index", "--objects", "10000", "--turnovers", "1", "--segment", "1m"],
        &["sim", "mrc", TRACE, "--sizes", "10"],
        &["trace", "stats", FILES],
        &["trace", "formats"],
    ];
    for command in commands {
        let output = Command::new(env!("CARGO_BIN_EXE_larder"))
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
            .args(command)
            .env("COLUMNS", "80")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8(output.stdout).unwrap();
        for line in said.lines() {
            let fits = line.chars().count() <= 80 || !line.trim().contains(' ');
            assert!(fits, "{command:?}: '{line}'");
        }
    }
}

/// In a terminal of 80 columns no table has longer lines, and every figure is there.
#[test]
fn tables_fit_eighty_columns() {
    let blocks = "gen:fileserver?size=64m&set=8m&hosts=2&requests=5000&writes=0.3";
    let commands: [(&[&str], &[&str]); 3] = [
        (&["stack", blocks, "--ram", "256k", "--flash", "4m"], &["filer load", "invalidating"]),
        (&["block", FILES, "--sizes", "8m", "--reclaim", "fifo,greedy"], &["DLWA", "CLWA"]),
        (&["baseline", TRACE, "--flash", "4m", "--block", "64k"], &["B/object", "missed"]),
    ];
    for (command, words) in commands {
        let shown = |columns: &str| {
            let output = Command::new(env!("CARGO_BIN_EXE_larder"))
                .arg("sim")
                .args(command)
                .env("COLUMNS", columns)
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let tables = |text: &str| -> Vec<String> {
            let mut inside = 0;
            let mut lines = Vec::new();
            for line in text.lines() {
                let rule = line.starts_with('─');
                inside += usize::from(rule);
                if rule || inside % 3 != 0 {
                    lines.push(line.to_owned());
                }
            }
            lines
        };
        let (narrow, wide) = (shown("80"), shown("400"));
        assert!(tables(&narrow).len() > 4, "{narrow}");
        for line in tables(&narrow) {
            assert!(line.chars().count() <= 80, "{line}");
        }
        assert!(tables(&wide).iter().any(|line| line.chars().count() > 80), "{wide}");
        for word in words.iter().flat_map(|w| w.split(' ')) {
            assert!(narrow.contains(word), "no '{word}' in {narrow}");
        }
    }
}

/// Memory is for the objects that there are, and pages are for block I/O.
#[test]
fn a_small_trace_in_a_huge_cache_takes_little_memory() {
    let trace = "gen:zipf?objects=1000&requests=5000";
    let output = larder(&["mrc", trace, "--policies", "wtinylfu", "--sizes", "1000000000"]);
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    let memory = shown.lines().find(|l| l.contains("of simulator memory")).unwrap();
    assert!(memory.contains(" KiB of"), "{memory}");
    for (arguments, noted) in
        [(&["--pages"][..], true), (&[], false), (&["--pages", "--policies", "lru,belady"], true)]
    {
        let output = larder(&[&["mrc", trace, "--sizes", "10"], arguments].concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success());
        assert_eq!(said.contains("has no block I/O"), noted, "{arguments:?}: {said}");
    }
    let blocks = larder(&["mrc", FILES, "--sizes", "10", "--pages"]);
    assert!(blocks.stderr.is_empty(), "{}", String::from_utf8_lossy(&blocks.stderr));
}

/// A figure has one name: the victim cache of `sim baseline` is that of `sim run`, whatever else than reads there is.
#[test]
fn a_baseline_has_the_figures_of_an_experiment() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("e.toml");
    let trace = "gen:memcachier?objects=5000&requests=40000&rate=1000";
    let text = format!(
        "[workload]\ntrace = \"{trace}\"\nwarmup = 10000\n[[cache]]\nkind = \"victim\"\ndram = \"128k\"\nflash = \"512k\"\n"
    );
    std::fs::write(&file, text).unwrap();
    let run = json(&["run", file.to_str().unwrap(), "--json"]);
    let args = ["--cache", "victim", "--dram", "128k", "--flash", "512k", "--warmup", "10000"];
    let rows = json(&[&["baseline", trace, "--json"], &args[..]].concat());
    let (row, cache) = (&rows[0], &run["caches"][0]);
    assert!(cache["reads"].as_u64() < cache["requests"].as_u64(), "the trace has other requests");
    for key in [
        "requests",
        "reads",
        "hits_dram",
        "set_bytes",
        "miss_bytes",
        "flash_bytes",
        "hit_ratio",
        "clwa_of_sets",
        "clwa_of_misses",
    ] {
        assert_eq!(row[key], cache[key], "{key}");
    }
}
