//! `larder sim oracle`, run as people and scripts run it.

use std::process::{Command, Output};

const TRACE: &str = "gen:memcachier?objects=8000&requests=40000&seed=3&rate=1000";
const SIZES: [&str; 4] = ["--dram", "256k", "--flash", "640k"];

fn oracle(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.args(["sim", "oracle", TRACE]).args(arguments).output().unwrap()
}

fn rows(arguments: &[&str]) -> Vec<serde_json::Value> {
    let output = oracle(&[arguments, &["--json"]].concat());
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {problem}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn budgets_are_met_and_more_of_them_hit_more() {
    let found = rows(&[&SIZES[..], &["--levels", "1,0.3,0.02"]].concat());
    assert_eq!((found.len(), &found[0]["cache"]), (4, &"all".into()));
    let of = |row: usize, name: &str| found[row][name].as_f64().unwrap();
    for row in &found[1..] {
        let of = |name: &str| row[name].as_f64().unwrap();
        assert_eq!(row["cache"], "oracle");
        assert!(of("writes") <= 1.02, "{row}");
        let ratio = (of("hits_dram") + of("hits_flash")) / of("reads");
        assert!((ratio - of("hit_ratio")).abs() < 1e-9);
        assert!(row["setting"]["threshold"].is_number());
    }
    assert!(of(1, "hit_ratio") >= of(0, "hit_ratio"), "{found:?}");
    assert!(of(1, "hit_ratio") >= of(2, "hit_ratio") && of(2, "hit_ratio") > of(3, "hit_ratio"));
    // The same budget in bytes, and as a rate: the trace takes 40 s, and two thirds of it count.
    let bytes = of(2, "budget");
    let again = rows(&[&SIZES[..], &["--writes", &bytes.to_string()]].concat());
    assert_eq!(again[0]["hits_flash"], found[2]["hits_flash"]);
    let rate = rows(&[&SIZES[..], &["--write-rate", "20k"]].concat());
    let budget = rate[0]["budget"].as_f64().unwrap();
    assert!((500e3..600e3).contains(&budget), "{budget}");
}

#[test]
fn memory_is_divided_as_a_server_divides_it() {
    let found = rows(&["--memory", "4m", "--flash", "16m", "--levels", "0.5"]);
    let dram = found[1]["dram"].as_u64().unwrap();
    assert!((2 << 20..4 << 20).contains(&dram), "{dram}");
}

#[test]
fn what_cannot_be_meant_is_refused() {
    for (arguments, words) in [
        (&["--flash", "2m"][..], "--dram"),
        (&[&SIZES[..], &["--memory", "2m"]].concat(), "--memory"),
        (&[&SIZES[..], &["--levels", "2"]].concat(), "--levels: '2': between"),
        (&[&SIZES[..], &["--warmup", "40000"]].concat(), "none is left to count"),
        (&["--dram", "1k", "--flash", "2m"], "dram"),
        (&["--memory", "2m", "--flash", "100g"], "flash"),
        (&[&SIZES[..], &["--most-runs", "0"]].concat(), "--most-runs"),
    ] {
        let output = oracle(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(words), "{arguments:?}: {said}");
    }
    let keys = ["sim", "oracle", "gen:zipf?objects=500&requests=3000", "--write-rate", "1k"];
    let output =
        Command::new(env!("CARGO_BIN_EXE_larder")).args(keys).args(SIZES).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && said.contains("has no times"), "{said}");
}
