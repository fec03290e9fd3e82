use super::*;

const SWEEP: &str = r#"
title = "sizes"
[experiment.workload]
trace = "gen:zipf?objects=1000&requests=1000"
[[experiment.cache]]
kind = "hybrid"
dram = "1m"
flash = "16m"
[[experiment.cache]]
kind = "ripq"
flash = "16m"
[[axis]]
key = "cache.flash"
values = ["8m", "16m"]
[[axis]]
key = "cache.hybrid.admission.policy"
values = ["ghost", "all"]
[[axis]]
key = "seed"
values = [1, 2, 3]
"#;

fn none(_: &str) -> Result<(String, String), String> {
    Err("no file".to_owned())
}

fn parse(text: &str) -> Result<Sweep, SweepError> {
    Sweep::parse(text, "s.toml", none)
}

#[test]
fn cells_are_all_combinations() {
    let sweep = parse(SWEEP).unwrap();
    let cells = sweep.cells("1", |_| String::new()).unwrap();
    assert_eq!(cells.len(), 12);
    let keys: std::collections::BTreeSet<&str> = cells.iter().map(|c| c.key.as_str()).collect();
    assert_eq!(keys.len(), 12);
    assert_eq!(
        sweep.describe(&cells[1].values),
        "cache.flash=8m cache.hybrid.admission.policy=ghost seed=2"
    );
    assert_eq!(cells[1].experiment.seed, 2);
    // No name: all of them; a name: that one.
    let flash: Vec<u64> = cells[0].experiment.caches.iter().map(|c| c.flash()).collect();
    assert_eq!(flash, [8 << 20, 8 << 20]);
    let json = serde_json::to_value(&cells[3].experiment).unwrap();
    assert_eq!(json["cache"][0]["admission"]["policy"], "all");
    // The version and the trace's state are part of a cell's key.
    let other = sweep.cells("2", |_| String::new()).unwrap();
    assert_ne!(other[0].key, cells[0].key);
    let touched = sweep.cells("1", |_| "changed".to_owned()).unwrap();
    assert_ne!(touched[0].key, cells[0].key);
    assert_eq!(sweep.cells("1", |_| String::new()).unwrap(), cells);
}

#[test]
fn an_experiment_may_be_a_file_and_have_no_axes() {
    let experiment = "[workload]\ntrace = 'gen:zipf'\n[[cache]]\nkind = 'ripq'\nflash = '8m'\n";
    let sweep = Sweep::parse("file = 'e.toml'", "s.toml", |name| {
        assert_eq!(name, "e.toml");
        Ok(("e.toml".to_owned(), experiment.to_owned()))
    });
    assert_eq!(sweep.unwrap().cells("1", |_| String::new()).unwrap().len(), 1);
}

#[test]
fn what_cannot_be_meant_is_named() {
    let axis = |key: &str, values: &str| {
        let base = SWEEP.split("[[axis]]").next().unwrap();
        format!("{base}[[axis]]\nkey = \"{key}\"\nvalues = {values}\n")
    };
    let cases: &[(String, &[&str])] = &[
        ("title = 3".into(), &["s.toml", "line 1", "string"]),
        ("titel = ''".into(), &["line 1", "titel"]),
        ("title = ''".into(), &["no experiment", "[experiment]"]),
        ("file = 'x'".into(), &["no file"]),
        (format!("file = 'x'\n{SWEEP}"), &["both"]),
        (axis("seed", "[]"), &["axis 'seed' has no values"]),
        (axis("seed", "[1, 1]"), &["value 1 twice"]),
        (axis("a..b", "[1]"), &["axis 'a..b'", "cache.flash"]),
        (axis("cache.flsh", "['1m']"), &["cell cache.flsh=1m", "flsh"]),
        (axis("cache.flash", "['much']"), &["cell cache.flash=much", "much"]),
        (axis("workload.limit", "[-1]"), &["cell workload.limit=-1"]),
        (axis("title.x", "[1]"), &["cell title.x=1"]),
        (axis("cache.hybrid", "[1]"), &["names a whole entry"]),
        (axis("seed", &format!("{:?}", (0..100_001).collect::<Vec<_>>())), &["100001 cells"]),
    ];
    for (text, words) in cases {
        let e = match parse(text) {
            Err(e) => e,
            Ok(sweep) => sweep.cells("1", |_| String::new()).unwrap_err(),
        };
        for word in *words {
            assert!(e.to_string().contains(word), "no '{word}' in: {e}\n{text:.300}");
        }
    }
}

#[test]
fn any_text_is_refused_or_read() {
    let mut rng = larder_base::Rng::new(9);
    for _ in 0..2000 {
        let mut bytes = SWEEP.as_bytes().to_vec();
        for _ in 0..1 + rng.below(6) {
            if bytes.is_empty() {
                break;
            }
            let at = rng.below(bytes.len() as u64) as usize;
            match rng.below(3) {
                0 => bytes[at] = 32 + rng.below(95) as u8,
                1 => drop(bytes.remove(at)),
                _ => bytes.truncate(at + 1),
            }
        }
        if let Ok(text) = String::from_utf8(bytes)
            && let Ok(sweep) = parse(&text)
        {
            // Refused or read, but not with a panic.
            let _ = sweep.cells("1", |_| String::new());
        }
    }
}

/// Every sweep that is checked in has cells, and each cell builds: caches of sizes that work, traces that open.
#[test]
fn checked_in_sweeps_can_be_run() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../experiments");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder.join("sweeps")).unwrap() {
        let path = entry.unwrap().path();
        let (name, text) = (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
        let beside = |file: &str| {
            let path = folder.join("sweeps").join(file);
            let text = std::fs::read_to_string(&path).map_err(|e| e.to_string())?;
            Ok((path.display().to_string(), text))
        };
        let sweep = Sweep::parse(&text, &name, beside).unwrap_or_else(|e| panic!("{e}"));
        let cells = sweep.cells("0", |_| String::new()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let results: usize = cells.iter().map(|cell| cell.experiment.caches.len()).sum();
        assert!(results >= 10, "{name}");
        for cell in cells {
            let mut e = cell.experiment;
            // As much of the trace as shows that it and the caches can be had.
            (e.workload.limit, e.workload.warmup) = (Some(50), 0);
            if e.workload.trace.starts_with("../shared/") {
                // One that is not part of the repository: any of the kind shows the same.
                e.workload.trace = "gen:specsfs?scale=0.0002&requests=50".into();
            }
            crate::experiment::run(&e, 1, |_, _| {})
                .unwrap_or_else(|e| panic!("{name}, {}: {e}", sweep.describe(&cell.values)));
        }
        seen += 1;
    }
    assert!(seen >= 2);
}
