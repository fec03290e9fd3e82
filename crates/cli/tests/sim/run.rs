//! `larder sim run`, run as people and scripts run it; the checked-in experiments meet what they expect.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn larder(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.args(["sim", "run"]).args(arguments);
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const SMALL: &str = r#"
title = "a small one"
[workload]
trace = "gen:zipf?objects=5000&requests=40000&writes=0.05"
warmup = 10000
[[cache]]
kind = "hybrid"
dram = "256k"
flash = "1m"
admission.policy = "all"
[[cache]]
kind = "victim"
name = "other \"one\""
dram = "256k"
flash = "1m"
"#;

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, contents: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, contents).unwrap();
        path.display().to_string()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

#[test]
fn checked_in_experiments_meet_what_they_expect() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        // Those of `larder bench equal-writes` are cells, and have tests of their own.
        if path.extension().is_none_or(|e| e != "toml") || path.ends_with("equal-writes.toml") {
            continue;
        }
        let output = larder(&[&path.display().to_string(), "--json"]);
        assert!(output.status.success(), "{}: {}", path.display(), text(&output.stderr));
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(!json["expectations"].as_array().unwrap().is_empty(), "{}", path.display());
        seen += 1;
    }
    assert!(seen >= 1);
}

#[test]
fn json_says_what_was_run_and_repeats_on_any_number_of_threads() {
    let dir = Dir::new();
    let file = dir.file("small.toml", SMALL);
    let run = |more: &[&str]| {
        let output = larder(&[&[file.as_str(), "--json"], more].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        output.stdout
    };
    let one = run(&["--threads", "1"]);
    assert_eq!(one, run(&["--threads", "4"]));
    let json: serde_json::Value = serde_json::from_slice(&one).unwrap();
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&json["seed"], &json["experiment"]["seed"]), (&1.into(), &1.into()));
    assert_eq!(json["workload"]["requests"], 40_000);
    assert_eq!(json["trace"], json["experiment"]["workload"]["trace"]);
    assert_eq!(json["trace_hash"], json["workload"]["trace_hash"]);
    assert_eq!(json["workload"]["trace_hash"].as_str().unwrap().len(), 16);
    assert_eq!(json["experiment"]["cache"][0]["admission"]["policy"], "all");
    let caches = json["caches"].as_array().unwrap();
    assert_eq!(caches.len(), 2);
    for field in
        ["hit_ratio", "clwa_of_sets", "clwa_of_misses", "byte_miss_ratio", "dram_hit_ratio"]
    {
        assert!(caches.iter().all(|c| c[field].as_f64().unwrap() > 0.0), "{field}");
    }
    assert!(caches[0]["life_years"].is_f64() && caches[0]["dlwa"].as_f64().unwrap() >= 1.0);
    assert!(caches[0]["latency"]["read"]["p99_us"].as_f64().unwrap() > 88.0);
    let seeded: serde_json::Value = serde_json::from_slice(&run(&["--seed", "9"])).unwrap();
    assert_eq!((&seeded["seed"], &seeded["experiment"]["seed"]), (&9.into(), &9.into()));
    assert_eq!(seeded["workload"], json["workload"]);
}

#[test]
fn the_table_and_the_series_name_what_was_run() {
    let dir = Dir::new();
    let file = dir.file("small.toml", SMALL);
    let csv = dir.path("series.csv");
    let output = larder(&[&file, "--csv", &csv.display().to_string()]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for words in [
        "a small one",
        "gen:zipf?objects=5000",
        "hash ",
        "seed 1",
        "hybrid",
        "other \"one\"",
        "CLWA, of bytes missed",
        "drive life",
        "99.9 %",
        "by workload.rate",
        env!("CARGO_PKG_VERSION"),
    ] {
        assert!(shown.contains(words), "'{words}' is not in\n{shown}");
    }
    let series = std::fs::read_to_string(csv).unwrap();
    let lines: Vec<&str> = series.lines().collect();
    assert!(lines[0].starts_with("# larder ") && lines[0].contains(" seed 1 "), "{}", lines[0]);
    // With every default.
    let (_, configuration) = lines[0].split_once(" configuration ").unwrap();
    let configuration: serde_json::Value = serde_json::from_str(configuration).unwrap();
    assert_eq!(configuration["timing"]["flash_read_us"], 88.0, "{configuration}");
    assert!(lines[1].starts_with("cache,time,interval_share,requests,reads,"));
    let requests = |name: &str| -> u64 {
        let of = lines[2..].iter().filter_map(|l| l.strip_prefix(name));
        of.map(|l| l.split(',').nth(3).unwrap().parse::<u64>().unwrap()).sum()
    };
    assert_eq!((requests("\"hybrid\""), requests("\"other \"\"one\"\"\"")), (30_000, 30_000));
}

#[test]
fn expectations_that_are_not_met_end_with_one() {
    let dir = Dir::new();
    let more = "[expect.hybrid]\nhit_ratio = { min = 0.999 }\n[expect.order]\nclwa_of_sets = [\"hybrid\", \"other \\\"one\\\"\"]\n";
    let file = dir.file("hopeful.toml", &format!("{SMALL}{more}"));
    let output = larder(&[&file]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("NOT MET"));
    assert!(text(&output.stderr).contains("expected hybrid.hit_ratio: at least 0.999, found 0."));
}

#[test]
fn what_cannot_be_meant_is_refused_in_one_line() {
    let dir = Dir::new();
    for (name, contents, words) in [
        ("typo", SMALL.replace("warmup", "warm-up"), "line 5: unknown field `warm-up`"),
        ("syntax", "a = = b".to_owned(), "line 1"),
        ("trace", SMALL.replace("gen:zipf?", "/nonexistent?"), "cannot open trace '/nonexistent"),
        ("generator", SMALL.replace("gen:zipf", "gen:zip"), "zip"),
        ("dram", SMALL.replacen("256k", "1k", 1), "cache 'hybrid': dram is 1024"),
        (
            "flash",
            SMALL.replacen("flash = \"1m\"", "flash = \"8k\"", 1),
            "cache 'hybrid': flash is 8192",
        ),
        (
            "huge",
            SMALL.replacen("dram = \"256k\"", "dram = \"4000t\"", 1),
            "cache 'hybrid': dram is",
        ),
        ("segment", SMALL.replacen("flash =", "segment = \"5000\"\nflash =", 1), "cache 'hybrid'"),
        (
            "drive",
            format!("{SMALL}[ssd]\ncapacity = \"64k\"\n"),
            "ssd.capacity under cache 'hybrid'",
        ),
        ("warmup", SMALL.replace("10000", "40000"), "workload.warmup is 40000"),
        ("kind", SMALL.replace("\"victim\"", "\"writeback\""), "unknown variant `writeback`"),
        (
            "negative",
            SMALL.replacen("dram = \"256k\"", "dram = -5", 1),
            "integer `-5`, expected a number of bytes, or text such as \"64k\"",
        ),
        (
            "mean",
            SMALL.replacen("flash =", "mean_record = 99999999999\nflash =", 1),
            "mean_record is 99999999999: give between 64 and 10^9 bytes",
        ),
        (
            "too much flash",
            format!("{SMALL}[ssd]\npage = \"64k\"\n").replacen(
                "flash = \"1m\"",
                "mean_record = 1000000\nflash = \"2t\"",
                1,
            ),
            "flash is 2199023255552: it must be at most 4095 segments",
        ),
        // 48 bytes a bucket: 192 GiB. No machine that tests run on has them, and it must be known before they are asked for.
        (
            "buckets",
            format!(
                "{SMALL}[[cache]]\nkind = \"set-associative\"\ndram = \"1m\"\nflash = \"15.9t\"\n[ssd]\npage = \"64k\"\n"
            ),
            "of memory: less flash, or a larger ssd.page",
        ),
    ] {
        let file = dir.file(&format!("{name}.toml"), &contents);
        let output = larder(&[&file]);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{name}: {message}");
        assert!(message.contains(words) && message.lines().count() == 1, "{name}: {message}");
    }
    for (arguments, words) in [
        (&["/nonexistent.toml"][..], "cannot read experiment '/nonexistent.toml'"),
        (&["experiments/memcachier-mix.toml", "--threads", "0"], "--threads '0'"),
    ] {
        let output = larder(arguments);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
}

/// A share that the server refuses is refused here in its words, and applications have a table of their own.
#[test]
fn applications_have_the_servers_words() {
    let dir = Dir::new();
    let wrong = "[applications.shares.web]\nfloor = 0.5\nceiling = 0.2\n";
    let server = dir.file("server.toml", wrong);
    let served = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["kv", "--config", &server, "--print-config"])
        .output()
        .unwrap();
    let words = "applications.shares.web: the floor 0.5 is above the ceiling 0.2";
    assert!(text(&served.stderr).contains(words), "{}", text(&served.stderr));
    let cache = format!(
        "{SMALL}[[cache]]\nkind = \"hybrid\"\nname = \"shared\"\ndram = \"256k\"\nflash = \"2m\"\napplication_names = {{ 0 = \"web\" }}\n"
    );
    let file = dir.file("wrong.toml", &format!("{cache}{}", wrong.replace("[app", "[cache.app")));
    let output = larder(&[&file]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    let sound = "[cache.applications.shares.web]\nfloor = 0.25\n";
    let file = dir.file("sound.toml", &format!("{cache}{sound}"));
    let output = larder(&[&file]);
    let table = text(&output.stdout);
    assert!(output.status.success() && table.contains("applications of shared"), "{table}");
    let output = larder(&[&file, "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let cache = &json["caches"][2];
    assert_eq!(cache["applications"]["web"]["reads"], cache["reads"], "{cache}");
}

/// Holland's conclusions on a volume that tests can afford: 64 MiB, of which 2 MiB are the working set.
#[test]
fn flash_on_the_client_is_a_win_whatever_the_policy() {
    let trace = "gen:fileserver?size=64m&set=2m&requests=40000&outside=0.2&writes=0.3";
    let sim = |arguments: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["sim", "stack", trace])
            .args(arguments)
            .output()
            .unwrap()
    };
    let common =
        ["--ram", "256k", "--flash", "0,2m", "--ram-policy", "a,n", "--warmup", "20000", "--json"];
    let output = sim(&common);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(output.stdout, sim(&common).stdout);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["version"], &json["seed"]), (&env!("CARGO_PKG_VERSION").into(), &1.into()));
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 12);
    let read = |row: &serde_json::Value| row["read_mean_us"].as_f64().unwrap();
    let (without, with): (Vec<_>, Vec<_>) = rows.iter().partition(|r| r["flash"] == 0);
    let best_without = without.iter().map(|r| read(r)).fold(f64::MAX, f64::min);
    for row in with {
        assert!(read(row) < 0.75 * best_without, "{row}");
        assert!(
            row["hits_flash"].as_u64().unwrap() > 0 && row["filer_writes"].as_u64().unwrap() > 0
        );
    }
    for (arguments, words) in [
        (&["--ram", "0"][..], "--ram: 0 B is 0 blocks"),
        (&["--architecture", "direct"], "naive, lookaside, unified"),
        (&["--flash-policy", "p0"], "s, a, n, or p and seconds"),
        (&["--fast-share", "2"], "--fast-share: '2'"),
        (&["--flash-read", "nan"], "--flash-read: 'NaN'"),
        (&["--threads", "0"], "--threads '0'"),
    ] {
        let output = sim(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(words), "{arguments:?}: {message}");
    }
}
