//! `larder sim advise`, run as people and scripts run it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::interrupt::until_it_heeds;

fn advise(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "advise", "--drive-tbw", "600", "--dram-cost", "4", "--flash-cost", "0.1"])
        .args(["--policies", "reject_first,all", "--years", "5"])
        .args(arguments)
        .output()
        .unwrap()
}

const TRACE: &str =
    "gen:zipf?objects=10000&requests=6000&skew=0.9&writes=0.03&rate=1000&value=16000";

#[test]
fn the_answer_names_sizes_policy_cost_and_margins() {
    let run = |threads: &str| {
        let output = advise(&[
            "--trace",
            TRACE,
            "--target-hit-ratio",
            "0.35",
            "--json",
            "--threads",
            threads,
        ]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let one = run("1");
    assert_eq!(one, run("3"), "the answer depends on the number of threads");
    let found: serde_json::Value = serde_json::from_slice(&one).unwrap();
    let answer = &found["answer"];
    let figure = |name: &str| answer[name].as_f64().unwrap_or_else(|| panic!("{name}: {answer}"));
    assert!(figure("hit_ratio") >= 0.35 && figure("hit_ratio_margin") >= 0.0);
    assert!(figure("life_years") >= 5.0 && figure("flash") > figure("dram"));
    let cost = (figure("dram") * 4.0 + figure("flash") * 0.1) / 1e9;
    assert!((figure("cost") - cost).abs() < 1e-9);
    assert!(found["runner_up"]["cost"].as_f64().unwrap() >= cost);
    assert_eq!(found["sample_rate"], 1.0);
    for m in found["measured"].as_array().unwrap() {
        assert!(m["meets"] == false || m["cost"].as_f64().unwrap() >= cost, "{m}");
    }
    // Under the names of the flags, and as they take it.
    let asked = found["configuration"].as_object().unwrap();
    let names: Vec<&str> = asked.keys().map(String::as_str).collect();
    let flags = "admission_objective device_write_amplification dram dram_cost drive_tbw flash flash_cost format \
                 policies price sample_requests skip_bad target_hit_ratio years";
    assert_eq!(names, flags.split(' ').collect::<Vec<_>>());
    assert_eq!((&asked["drive_tbw"], &asked["flash_cost"]), (&600.0.into(), &0.1.into()));
}

/// The other target and the optional flag, by their names too; what was not given is not there.
#[test]
fn the_configuration_is_what_was_given() {
    let more =
        ["--target-miss-ratio", "0.65", "--drive-capacity", "1g", "--limit", "4000", "--json"];
    let output = advise(&[&["--trace", TRACE], &more[..]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let asked = &found["configuration"];
    assert_eq!((&asked["target_miss_ratio"], &asked["limit"]), (&0.65.into(), &4000.into()));
    assert_eq!(asked["drive_capacity"], 1u64 << 30);
    for name in ["target_hit_ratio", "endurance_bytes", "most_flash", "seed"] {
        assert!(asked.get(name).is_none(), "{name}: {asked}");
    }
}

/// What is dear is bought less of.
#[test]
fn costs_decide_what_is_bought() {
    let bought = |dram_cost: &str, flash_cost: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["sim", "advise", "--drive-tbw", "600", "--policies", "all", "--json"])
            .args(["--dram-cost", dram_cost, "--flash-cost", flash_cost])
            .args(["--trace", TRACE, "--target-hit-ratio", "0.35", "--limit", "4000"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let bytes = |what: &str| found["answer"][what].as_u64().unwrap();
        (bytes("dram"), bytes("flash"))
    };
    let (dram, flash) = bought("4", "0.1");
    let (dear_flash_dram, dear_flash) = bought("0.1", "4");
    assert!(flash > dram, "flash is cheap: {dram} {flash}");
    assert!(dear_flash < flash && dear_flash_dram > dram, "{dear_flash_dram} {dear_flash}");
}

#[test]
fn a_table_for_people_and_a_failure_when_nothing_will_do() {
    let output = advise(&["--trace", TRACE, "--target-miss-ratio", "0.65", "--limit", "4000"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (hit, years) = ("margin, hit ratio", "margin, years");
    for words in ["answer", "drive life", hit, years, "± error", "hash ", "seed 1"] {
        assert!(text.contains(words), "no '{words}' in {text}");
    }
    // What would do too is called so, after the answer and before what would not.
    let place = |words: &str| {
        text.lines()
            .position(|l| l.starts_with(&format!(" {words} ")))
            .unwrap_or_else(|| panic!("{words}: {text}"))
    };
    let (answer, other) = (place("answer"), place("alternative, other"));
    assert!(answer < other && other < place("misses the target"), "{text}");
    assert!(text.contains("alternatives meet it too"), "{text}");
    let output = advise(&["--trace", TRACE, "--target-hit-ratio", "0.99", "--limit", "4000"]);
    assert_eq!(output.status.code(), Some(1));
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(problem.contains("0.9900") && problem.contains("nearest"), "{problem}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains("none of the rows is a choice") && !text.contains("alternative"),
        "{text}"
    );
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--trace", TRACE], &["--target-hit-ratio"]),
        (&["--trace", TRACE, "--target-hit-ratio", "1.5"], &["--target-hit-ratio: '1.5'"]),
        (&["--trace", TRACE, "--target-miss-ratio", "0"], &["--target-miss-ratio: '0'"]),
        (
            &["--trace", "gen:zipf?objects=9&requests=9&rate=1", "--target-hit-ratio", "0.5"],
            &["1000"],
        ),
        (
            &["--trace", "gen:zipf?objects=9000&requests=9000", "--target-hit-ratio", "0.5"],
            &["no times", "--rate"],
        ),
        (
            &["--trace", TRACE, "--target-hit-ratio", "0.5", "--dram", "1k"],
            &["--dram 1 KiB", "2 MiB"],
        ),
        (&["--trace", "gen:nothing", "--target-hit-ratio", "0.5"], &["nothing"]),
    ];
    for (arguments, words) in cases {
        let output = advise(arguments);
        let problem = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {problem}");
        for word in *words {
            assert!(problem.contains(word), "no '{word}' in {problem}");
        }
    }
}

#[test]
fn flashiness_below_an_ample_budget_with_what_a_server_needs() {
    let arguments =
        ["--trace", TRACE, "--target-hit-ratio", "0.35", "--policies", "flashiness,all"];
    let (dram, flash) = (["--dram", "5m"], ["--flash", "40m,0"]);
    let run = |more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_larder"))
            .args([
                "sim",
                "advise",
                "--drive-tbw",
                "600",
                "--dram-cost",
                "4",
                "--flash-cost",
                "0.1",
            ])
            .args(arguments.iter().chain(&dram).chain(&flash).chain(more))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let shown = run(&[]);
    // The whole trace was simulated: there is no error of sampling.
    assert!(!shown.contains("0.0000  "), "{shown}");
    for words in ["writes held by", "threshold", "/s ", "equal those of all"] {
        assert!(shown.contains(words), "no '{words}' in {shown}");
    }
    // What it tells a server, a server takes.
    let (_, settings) = shown.split_once("as settings of larder kv --config:\n\n").unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("larder.toml");
    std::fs::write(&file, settings).unwrap();
    let taken = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["kv", "--print-config", "--config"])
        .arg(&file)
        .output()
        .unwrap();
    assert!(taken.status.success(), "{settings}: {}", String::from_utf8_lossy(&taken.stderr));
    for size in ["memory-limit = ", "flash-size = ", "flash-object-size = "] {
        assert!(settings.contains(size), "no '{size}' in {settings}");
    }
    assert!(!shown.contains("dram= "), "{shown}");
    starts(&file, dir.path());

    let found: serde_json::Value = serde_json::from_str(&run(&["--json"])).unwrap();
    assert_eq!(found["complete"], true);
    let measured = found["measured"].as_array().unwrap();
    let limits: Vec<&serde_json::Value> = measured
        .iter()
        .filter(|m| m["policy"] == "flashiness")
        .filter(|m| (m["dram"].as_u64(), m["flash"].as_u64()) == (Some(5 << 20), Some(40 << 20)))
        .map(|m| &m["write_limit"])
        .collect();
    assert!(limits.iter().any(|l| *l == "budget") && limits.iter().any(|l| *l == "threshold"));
    assert!(limits.iter().filter(|l| l["rate"].as_u64().is_some()).count() == 2, "{limits:?}");
    for m in measured.iter().filter(|m| m["life_years"].is_f64()) {
        let margin = m["life_years"].as_f64().unwrap() - 5.0;
        assert!((m["life_years_margin"].as_f64().unwrap() - margin).abs() < 1e-9, "{m}");
    }
}

#[test]
fn an_interruption_leaves_what_was_found() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "advise", "--drive-tbw", "600", "--dram-cost", "4", "--flash-cost", "0.1"])
        .args(["--target-hit-ratio", "0.9", "--threads", "1", "--json", "--trace"])
        .arg("gen:zipf?objects=200000&requests=400000&skew=0.7&rate=1000&value=400")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // It reads, and then tries: whenever the signal comes, it is heeded.
    until_it_heeds(child.id());
    std::thread::sleep(std::time::Duration::from_secs(2));
    let pid = rustix::process::Pid::from_child(&child);
    assert!(child.try_wait().unwrap().is_none(), "it ended before it could be interrupted");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted after"), "{said}");
    if !said.contains("nothing tried") {
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found["complete"], false);
    }
}

/// The objective and the price reach the simulation, the settings, and by them a server.
#[test]
fn the_objective_is_of_the_answer_and_its_settings() {
    let run = |more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["sim", "advise", "--drive-tbw", "4", "--dram-cost", "4", "--flash-cost"])
            .args(["0.1", "--trace"])
            // More than flash holds, so that the classifiers have enough to learn from.
            .arg("gen:zipf?objects=200000&requests=300000&skew=0.5&writes=0.03&rate=100&value=64..600")
            .args(["--target-hit-ratio", "0.05", "--policies", "flashiness", "--dram", "2m"])
            .args(["--flash", "16m"])
            .args(more)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let bytes = ["--admission-objective", "bytes", "--price", "0.5"];
    let json = |more: &[&str]| -> serde_json::Value {
        serde_json::from_str(&run(&[more, &["--json"]].concat())).unwrap()
    };
    let (requests, found) = (json(&[]), json(&bytes));
    // A price alone: under the same budget fewer writes are worth theirs.
    let priced = json(&["--price", "2"]);
    let written = |of: &serde_json::Value| -> BTreeMap<(u64, u64), f64> {
        let all = of["measured"].as_array().unwrap().iter();
        let under_budget = all.filter(|m| m["write_limit"] == "budget");
        let sizes =
            |m: &serde_json::Value| (m["dram"].as_u64().unwrap(), m["flash"].as_u64().unwrap());
        under_budget.map(|m| (sizes(m), m["flash_bytes_per_second"].as_f64().unwrap())).collect()
    };
    let (free, dear) = (written(&requests), written(&priced));
    let fewer =
        |(sizes, rate): (&(u64, u64), &f64)| free.get(sizes).is_some_and(|f| *rate < 0.75 * f);
    assert!(dear.iter().any(fewer), "a price of 2 makes it {dear:?} instead of {free:?}");
    assert_eq!(requests["configuration"]["admission_objective"], "requests");
    let asked = &found["configuration"];
    assert_eq!((&asked["admission_objective"], &asked["price"]), (&"bytes".into(), &0.5.into()));
    let figures = |of: &serde_json::Value| -> Vec<(String, String)> {
        let all = of["measured"].as_array().unwrap().iter();
        all.map(|m| (m["hit_ratio"].to_string(), m["byte_miss_ratio"].to_string())).collect()
    };
    assert_ne!(figures(&requests), figures(&found), "the objective makes a difference");
    let shown = run(&bytes);
    let (_, settings) = shown.split_once("as settings of larder kv --config:\n\n").unwrap();
    for line in ["admission-objective = \"bytes\"", "policy = \"flashiness\"", "price = 0.5"] {
        assert!(settings.contains(line), "no '{line}' in {settings}");
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("larder.toml");
    std::fs::write(&file, settings).unwrap();
    let taken = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["kv", "--print-config", "--config"])
        .arg(&file)
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&taken.stdout).into_owned();
    assert!(taken.status.success(), "{settings}: {}", String::from_utf8_lossy(&taken.stderr));
    assert!(printed.contains("price = 0.5") && printed.contains("bytes"), "{printed}");
}

/// A server of these settings begins to serve, with flash.
fn starts(settings: &Path, dir: &Path) {
    let mut server = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["kv", "--http", "off", "--config"])
        .arg(settings)
        .arg("-s")
        .arg(dir.join("socket"))
        .arg("--data-dir")
        .arg(dir.join("data"))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let lines = BufReader::new(server.stderr.take().unwrap()).lines();
    for line in lines.map_while(Result::ok) {
        said += &format!("{line}\n");
        if line.contains("ready on") {
            break;
        }
    }
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(said.contains("ready on") && said.contains("in use, admission"), "{said}");
}
