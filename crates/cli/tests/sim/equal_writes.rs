//! `larder bench equal-writes`, run as people and scripts run it.

use std::process::{Command, Output};

const TABLE: &str = "title = 'small'\nflash = [0.3]\nmemory = [0.001, 0.5]\nbudgets = [0.3]\n[[trace]]\nname = 'z'\nrole = 'claimed'\n\
    source = 'gen:zipf?objects=60000&requests=90000&skew=0.8&value=2500&rate=2000'\nseeds = 2\n\
    [[trace]]\nname = 'gone'\nrole = 'tuned'\nsource = 'nowhere/gone.zst'\n";

fn run(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.args(["bench", "equal-writes"]).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn cells_are_listed_chosen_and_measured() {
    let dir = std::env::temp_dir().join(format!("larder-equal-writes-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("table.toml");
    std::fs::write(&file, TABLE).unwrap();
    let file = file.to_str().unwrap();

    let list = text(&run(&["--table", file, "--list", "--role", "claimed"]).stdout);
    assert!(list.contains("z:30:0.1") && list.contains("z:30:50") && !list.contains("gone"));
    let output = run(&["--table", file, "--seeds", "1", "--json"]);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("gone:30:0.1 left out"), "{said}");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found.as_array().unwrap().len(), 2);
    assert!(found[0]["does_not_start"].as_str().unwrap().contains("memory"), "{}", found[0]);
    let at = &found[1]["budgets"][0];
    assert_eq!((&found[1]["role"], &at["level"]), (&"claimed".into(), &0.3.into()));
    let rivals: Vec<&str> =
        at["rivals"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    for name in [
        "expected_reads",
        "flashiness",
        "s3_fifo",
        "lru_reject_first",
        "fifo_reinsertion",
        "kangaroo",
    ] {
        assert!(rivals.contains(&name), "{rivals:?}");
    }
    assert!(at["oracle"]["requests"].as_f64() < at["ours"]["requests"].as_f64());

    let output = run(&["--table", file, "--cells", "z:30:50", "--seeds", "1"]);
    let table = text(&output.stdout);
    assert!(
        table.contains("kangaroo") && table.contains("claimed: 1 cells at a budget"),
        "{table}"
    );

    let output = run(&["--table", file, "--cells", "z:30:0.1", "--seeds", "1"]);
    let table = text(&output.stdout);
    assert!(table.contains("1 of 1 cells do not start a server"), "{table}");
    assert!(found[0]["least_memory"].as_u64().unwrap() > found[0]["memory"].as_u64().unwrap());

    for (arguments, words) in [
        (&["--table", file, "--cells", "y"][..], "--cells: 'y' names no cell"),
        (&["--table", file, "--cells", "gone"], "no cell is left to run"),
        (&["--table", "/nonexistent"], "--table '/nonexistent'"),
        (&["--threads", "0"], "--threads '0'"),
    ] {
        let output = run(arguments);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(words), "{arguments:?}: {said}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_list_that_is_built_in_is_the_committed_one() {
    let list = text(&run(&["--list"]).stdout);
    assert!(list.contains("scarab:10:12.5") && list.contains("bursts:30:0.1"), "{list}");
}
