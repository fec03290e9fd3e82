//! `larder trace`, run as people and scripts run it.

use std::process::{Command, Output};

fn larder(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_larder")).arg("trace").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn stats(arguments: &[&str]) -> serde_json::Value {
    let output = larder(&[&["stats", "--json"], arguments].concat());
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The figures by which generators are calibrated are printed, for machines and for people, and survive conversion.
#[test]
fn calibration_figures_are_shown() {
    let dir = tempfile::tempdir().unwrap();
    let spec = "gen:specsfs?size=64m&requests=20000&metadata=0.7";
    let file = dir.path().join("sfs.lt.zst").display().to_string();
    assert!(larder(&["convert", spec, &file]).status.success());
    let (made, read) = (stats(&[spec]), stats(&[&file]));
    assert_eq!(made["block"], read["block"]);
    // A trace has its hash whatever file it is in.
    let hash = made["trace_hash"].as_str().unwrap();
    assert_eq!((&made["trace_hash"], hash.len()), (&read["trace_hash"], 16));
    assert_eq!(made["version"], env!("CARGO_PKG_VERSION"));
    let shown = text(&larder(&["stats", spec]).stdout);
    let version = format!("larder {}", env!("CARGO_PKG_VERSION"));
    assert!(shown.contains(hash) && shown.contains(&version), "{shown}");
    let paged = stats(&[spec, "--pages", "--limit", "900"]);
    let wanted = serde_json::json!(
        { "format": "generated", "skip_bad": false, "pages": 4096, "limit": 900 }
    );
    assert_eq!(paged["configuration"], wanted);
    assert_eq!(made["block"]["metadata_share"], 0.7);
    assert_eq!((&made["read_share"], &made["hosts"]), (&0.4.into(), &1.into()));
    for name in ["unique_bytes", "nonsequential_unique_bytes"] {
        assert!(made["block"][name].as_u64().unwrap() > 10 << 20, "{}", made["block"]);
    }
    let shown = text(&larder(&["stats", &file]).stdout);
    for line in
        ["reads                 40.00 %", "unique block data", "sequential", "70.00 % of block"]
    {
        assert!(shown.contains(line), "'{line}' is not in\n{shown}");
    }
    // A key-value trace has none of it.
    assert!(stats(&["gen:zipf?objects=10"]).get("block").is_none());
    let head = text(&larder(&["head", "-n", "40", "--json", &file]).stdout);
    assert!(head.contains("\"class\":\"metadata\"") && head.contains("\"class\":\"data\""));
    let hosts = stats(&["gen:fileserver?size=1g&set=64m&hosts=3&shared=0&requests=3000"]);
    assert_eq!(hosts["hosts"], 3);
}

#[test]
fn bad_records_are_named_or_counted() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.csv").display().to_string();
    std::fs::write(&file, "1,1,1,0,68,1,1\n2,1,9,0,68,1,1\nrubbish\n4,1,1,0,68,2,1\n").unwrap();
    let arguments = ["stats", "--format", "memcachier", file.as_str()];
    let output = larder(&arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    for part in [file.as_str(), "line 2", "expected a type from 1", "'9'", "--skip-bad"] {
        assert!(said.contains(part), "{said}");
    }
    let output = larder(&[&arguments[..], &["--skip-bad"]].concat());
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("2 malformed records passed over; the first:"), "{said}");
    assert!(said.contains("line 2"), "{said}");
    let json = stats(&["--format", "memcachier", "--skip-bad", &file]);
    assert_eq!((&json["requests"], &json["skipped"]), (&2.into(), &2.into()));

    // A native file that was cut: the byte, and that it was cut.
    let whole = dir.path().join("whole.lt").display().to_string();
    assert!(larder(&["generate", "zipf?objects=100&requests=5000", &whole]).status.success());
    let bytes = std::fs::read(&whole).unwrap();
    let cut = dir.path().join("cut.lt").display().to_string();
    std::fs::write(&cut, &bytes[..bytes.len() - 3]).unwrap();
    let output = larder(&["stats", &cut]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains(&cut) && said.contains("byte ") && said.contains("expected"), "{said}");
}

#[test]
fn a_rate_gives_times_to_what_has_none() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys.txt").display().to_string();
    std::fs::write(&file, "a\nb\na\nc\n").unwrap();
    assert_eq!(stats(&["--format", "txt", &file])["timed"], false);
    let timed = stats(&["--format", "txt", "--rate", "2", &file]);
    assert_eq!((&timed["timed"], &timed["seconds"]), (&true.into(), &1.5.into()));
    let output = larder(&["stats", "--rate", "0", &file]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("positive number of requests per second"));
}

#[test]
fn generators_that_cannot_be_meant_are_refused() {
    for (spec, words) in [
        ("gen:oltp?size=1g", "unknown option 'size'"),
        ("gen:oltp?scale=2", "scale='2'"),
        ("gen:oltp-backup?scale=0.001&requests=100", "longer backup-io"),
        ("gen:specsfs?metadata=1.5", "metadata='1.5'"),
        ("gen:tpcc?size=1m", "size='1m'"),
        ("gen:fileserver?size=1g&set=512m&hosts=4&shared=0", "4 working sets"),
        ("gen:nfs", "known are fill, uniform"),
    ] {
        let output = larder(&["stats", spec]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{spec}: {said}");
        assert!(said.contains(words), "{spec}: {said}");
    }
}

/// What is converted to `-` is what a file would hold.
#[test]
fn standard_output_is_a_file_too() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("t.csv").display().to_string();
    let spec = "gen:zipf?objects=100&requests=1000";
    assert!(larder(&["convert", spec, &file, "--to", "csv"]).status.success());
    let output = larder(&["convert", spec, "-", "--to", "csv"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(output.stdout == std::fs::read(&file).unwrap() && output.stdout.len() > 10_000);
}

#[test]
fn what_can_be_written_is_what_is_listed() {
    let help = text(&larder(&["convert", "--help"]).stdout);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in ["larder (compact), csv, memcachier, webcachesim or oracle-general", "Examples:"] {
        assert!(help.contains(words), "no '{words}' in {help}");
    }
    for (to, words) in [("foo", "no such format"), ("vscsi", "can be read but not written")] {
        let output = larder(&["convert", "gen:zipf?objects=9&requests=9", "-", "--to", to]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(words) && said.contains("oracle-general"), "{said}");
        assert!(!said.contains("blkparse"), "a format that is only read is offered: {said}");
    }
}

#[test]
fn a_scale_that_does_not_apply_is_named() {
    let output = larder(&["head", "gen:fileserver?set=60g&scale=0.01"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("scale does not apply to a set that is given"), "{said}");
    let output = larder(&["head", "gen:fileserver?set=2g&size=1g"]);
    let said = text(&output.stderr);
    assert!(said.contains("give a larger size or a smaller set"), "{said}");
}

/// In a terminal of 80 columns no line of the first requests is longer, and every column is there.
#[test]
fn the_first_requests_fit_eighty_columns() {
    let head = |columns: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command.args(["trace", "head", "gen:specsfs?size=64m&requests=100&rate=10"]);
        match columns {
            Some(columns) => command.env("COLUMNS", columns),
            None => command.env_remove("COLUMNS"),
        };
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let narrow = head(Some("80"));
    assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
    let wide = head(None);
    assert_eq!((wide.lines().count(), &wide), (11, &head(Some("200"))));
    let mut words: Vec<&str> = wide.split_whitespace().collect();
    words.sort_unstable();
    words.dedup();
    for word in words {
        assert!(narrow.contains(word), "no '{word}' in {narrow}");
    }
}

#[test]
fn what_would_give_nothing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json").display().to_string();
    std::fs::write(&config, "{\n  \"cache_config\": {}\n}\n").unwrap();
    let squeezed = dir.path().join("x.lt.bz2").display().to_string();
    for (arguments, words) in [
        (&["stats", "gen:zipf", "--limit", "0"][..], "--limit"),
        (&["head", "gen:zipf", "--limit", "0"], "--limit"),
        (&["convert", "gen:zipf?requests=10", &squeezed], ".bz2 is not written"),
        (&["stats", &config], "gen:cachebench?dir="),
    ] {
        let output = larder(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: '{said}' lacks '{words}'");
    }
    assert!(!std::path::Path::new(&squeezed).exists());
}
