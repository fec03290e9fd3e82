//! `larder sim sweep` and its report: resumable, the same bytes however it is run, and the figures in a real browser show the
//! numbers of the CSV (see `browser/mod.rs`; LARDER_SCREENSHOTS=DIR keeps pictures).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Output};

use crate::browser::{browse, chromium};
use crate::interrupt::until_it_heeds;

const SWEEP: &str = r#"
title = "Two policies at two sizes"
[experiment.workload]
trace = "gen:zipf?objects=8000&requests=30000&skew=0.9&writes=0.05&rate=1000&value=400"
warmup = 10000
[[experiment.cache]]
kind = "hybrid"
dram = "256k"
flash = "1m"
[experiment.report]
interval = 5
[[axis]]
key = "cache.flash"
values = ["1m", "2m"]
[[axis]]
key = "cache.admission.policy"
values = ["all", "reject_first"]
[[axis]]
key = "seed"
values = [1, 2]
"#;

fn sweep(file: &Path, out: &Path, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "sweep"])
        .arg(file)
        .arg("--out")
        .arg(out)
        .args(more)
        .output()
        .unwrap()
}

fn done(output: &Output) -> String {
    let problem = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{problem}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

const FILES: [&str; 6] = [
    "cells.jsonl",
    "results.csv",
    "results.parquet",
    "series.csv",
    "series.parquet",
    "report.html",
];

fn files(dir: &Path) -> Vec<Vec<u8>> {
    FILES.iter().map(|f| std::fs::read(dir.join(f)).unwrap()).collect()
}

#[test]
fn a_sweep_gives_the_same_bytes_however_it_is_run_and_goes_on_where_it_was_cut() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s.toml");
    std::fs::write(&file, SWEEP).unwrap();
    let (one, two) = (dir.path().join("one"), dir.path().join("two"));
    let json = done(&sweep(&file, &one, &["--threads", "1", "--json"]));
    let rows: Vec<serde_json::Value> = serde_json::from_str(&json).unwrap();
    // Each row leads to its whole configuration.
    let log = std::fs::read_to_string(one.join("cells.jsonl")).unwrap();
    let cells: BTreeMap<String, serde_json::Value> = log
        .lines()
        .map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap())
        .map(|l| (l["key"].as_str().unwrap().to_owned(), l["outcome"]["experiment"].clone()))
        .collect();
    for row in &rows {
        let experiment = &cells[row["cell"].as_str().unwrap()];
        assert_eq!(experiment["seed"], row["seed"], "{row}");
        assert_eq!(experiment["cache"][0]["flash"], row["flash"], "{row}");
    }
    assert_eq!(rows.len(), 8);
    for row in &rows {
        for field in ["version", "trace_hash", "seed", "miss_ratio", "flash_bytes"] {
            assert!(!row[field].is_null(), "{field} of {row}");
        }
    }
    let table = done(&sweep(&file, &two, &["--threads", "3"]));
    assert!(table.contains("8 cells") && table.contains("reject_first"), "{table}");
    let hash = rows[0]["trace_hash"].as_str().unwrap();
    assert!(table.contains(env!("CARGO_PKG_VERSION")) && table.contains(hash), "{table}");
    // One figure is one text, wherever it stands: numbers of 32 bits too.
    let csv = std::fs::read_to_string(one.join("results.csv")).unwrap();
    for row in &rows {
        for name in ["miss_ratio", "clwa_of_sets"] {
            let figure = row[name].to_string();
            assert!(csv.contains(&figure) && log.contains(&figure), "{name} {figure}");
        }
    }
    assert!(log.contains("0.2") && !log.contains("0.20000000298"));
    let whole = files(&one);
    // A line that is no JSON any more: its cell runs again.
    let mut lines: Vec<&str> = log.lines().collect();
    let half = &lines[2][..lines[2].len() / 2];
    for bad in [half, "rubbish"] {
        lines[2] = bad;
        std::fs::write(one.join("cells.jsonl"), lines.join("\n") + "\n").unwrap();
        let output = sweep(&file, &one, &["--resume"]);
        done(&output);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("line 3 is damaged") && said.contains("7 of 8 cells"), "{said}");
        assert!(files(&one) == whole, "another outcome after {bad}");
    }
    for (i, name) in FILES.iter().enumerate() {
        assert!(whole[i] == files(&two)[i], "{name} depends on the number of threads");
    }

    // Not by accident: what is there is not written over.
    let again = sweep(&file, &one, &[]);
    assert_eq!(again.status.code(), Some(2));
    let problem = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(problem.contains("8 finished cells") && problem.contains("--resume"), "{problem}");

    // Cut in the middle of a line, as a kill would: it goes on, and gives the same.
    let log = &whole[0];
    let lines: Vec<usize> =
        log.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(at, _)| at).collect();
    for cut in [0, lines[2] + 1, lines[4] + 200, log.len() - 1] {
        std::fs::write(one.join("cells.jsonl"), &log[..cut]).unwrap();
        let resumed = sweep(&file, &one, &["--resume"]);
        done(&resumed);
        let said = String::from_utf8_lossy(&resumed.stderr).into_owned();
        let kept = lines.iter().filter(|&&end| end < cut).count();
        if kept > 0 {
            assert!(said.contains(&format!("{kept} of 8 cells are finished")), "{cut}: {said}");
        }
        for (i, name) in FILES.iter().enumerate() {
            assert!(files(&one)[i] == whole[i], "{name} differs after it was cut at {cut}");
        }
    }

    // Other cells are run, finished ones are kept.
    std::fs::write(&file, SWEEP.replace("values = [1, 2]", "values = [1, 2, 3]")).unwrap();
    let more = sweep(&file, &one, &["--resume"]);
    done(&more);
    assert!(String::from_utf8_lossy(&more.stderr).contains("8 of 12 cells"));
}

#[test]
fn what_cannot_be_meant_is_refused_before_anything_runs() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s.toml");
    let cases: &[(&str, &str, &[&str])] = &[
        ("key = \"seed\"", "kee = \"seed\"", &["s.toml' line", "kee"]),
        ("cache.flash", "cache.flsh", &["cell cache.flsh=1m", "flsh"]),
        ("\"all\", ", "\"lru\", ", &["cell cache.flash=1m cache.admission.policy=lru", "lru"]),
        ("values = [1, 2]", "values = []", &["axis 'seed' has no values"]),
        ("gen:zipf?objects=8000", "-", &["standard input", "name a file"]),
        (
            "values = [\"1m\"",
            "values = [\"1m\", 1048576",
            &["same experiment", "cache.flash=1048576"],
        ),
        ("[experiment.workload]", "[experimnt.workload]", &["experimnt"]),
        ("gen:zipf?", "gen:zopf?", &["cell cache.flash=1m", "zopf"]),
    ];
    for (old, new, words) in cases {
        let mut text = SWEEP.replacen(old, new, 1);
        if *new == "-" {
            text = text.replace("-&requests=30000&skew=0.9&writes=0.05&rate=1000&value=400", "-");
        }
        std::fs::write(&file, text).unwrap();
        let output = sweep(&file, &dir.path().join("out"), &[]);
        let problem = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{new}: {problem}");
        for word in *words {
            assert!(problem.contains(word), "no '{word}' in {problem}");
        }
    }
    let output = sweep(&dir.path().join("none.toml"), &dir.path().join("out"), &[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("none.toml"));
    std::fs::write(&file, SWEEP).unwrap();
    let out = dir.path().join("foreign");
    std::fs::create_dir(&out).unwrap();
    for (other, more) in [("hello\n", &["--resume"][..]), ("hello", &["--resume"]), ("hello", &[])]
    {
        std::fs::write(out.join("cells.jsonl"), other).unwrap();
        let output = sweep(&file, &out, more);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("line 1 is no finished cell"));
        assert_eq!(std::fs::read_to_string(out.join("cells.jsonl")).unwrap(), other);
    }
}

#[test]
fn an_interruption_says_how_to_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let (file, out) = (dir.path().join("s.toml"), dir.path().join("out"));
    // So long that it cannot end before the signal.
    std::fs::write(&file, SWEEP.replace("requests=30000", "requests=30000000")).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "sweep", "--threads", "1", "--out"])
        .args([&out, &file])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let began = std::time::Instant::now();
    while !out.join("cells.jsonl").exists() {
        assert!(began.elapsed().as_secs() < 120, "it never began");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    until_it_heeds(child.id());
    std::thread::sleep(std::time::Duration::from_secs(2));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("0 of 8 cells") && said.contains("--resume"), "{said}");
    std::fs::write(&file, SWEEP).unwrap();
    done(&sweep(&file, &out, &["--resume"]));
}

/// Attributes of all elements of a class, in the order of the document.
fn marks<'a>(html: &'a str, tag: &str, class: &str) -> Vec<BTreeMap<&'a str, &'a str>> {
    let opening = format!("<{tag} class=\"{class}\"");
    html.split(&opening)
        .skip(1)
        .map(|rest| {
            let mut attributes = BTreeMap::new();
            let mut text = rest.split('>').next().unwrap();
            while let Some((name, after)) = text.split_once("=\"") {
                let (value, after) = after.split_once('"').unwrap();
                attributes.insert(name.trim(), value);
                text = after;
            }
            attributes
        })
        .collect()
}

fn number(attributes: &BTreeMap<&str, &str>, name: &str) -> f64 {
    attributes[name].parse().unwrap_or_else(|_| panic!("{name} of {attributes:?}"))
}

/// A figure of the document, by its title.
fn figure<'a>(dom: &'a str, title: &str) -> &'a str {
    let (_, rest) =
        dom.split_once(&format!("<h2>{title}</h2>")).unwrap_or_else(|| panic!("no {title}"));
    rest.split("</section>").next().unwrap()
}

/// Where the figure's own grid lines put a value of an axis, for lines that are not logarithmic.
fn placed(figure: &str, axis: &str, at: &str, value: f64) -> f64 {
    let lines: Vec<(f64, f64)> = marks(figure, "line", "grid")
        .iter()
        .filter(|l| l.contains_key(axis))
        .map(|l| (number(l, axis), number(l, at)))
        .collect();
    let (a, b) = (lines[0], lines[lines.len() - 1]);
    assert!(lines.len() >= 2, "an axis has at least two lines: {lines:?}");
    a.1 + (value - a.0) / (b.0 - a.0) * (b.1 - a.1)
}

#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn the_report_shows_the_numbers_of_the_csv() {
    let program = chromium();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("s.toml");
    std::fs::write(&file, SWEEP).unwrap();
    let out = dir.path().join("out");
    done(&sweep(&file, &out, &[]));
    let csv = std::fs::read_to_string(out.join("results.csv")).unwrap();
    let mut lines = csv.lines();
    let names: Vec<&str> = lines.next().unwrap().split(',').collect();
    let rows: Vec<BTreeMap<&str, &str>> =
        lines.map(|l| names.iter().copied().zip(l.split(',')).collect()).collect();
    assert_eq!(rows.len(), 8);

    let page = format!("file://{}", out.join("report.html").display());
    let dom = browse(&program, &page, &["--dump-dom"]);
    let body = dom.split("<script").next().unwrap();
    for wrong in ["NaN", "undefined", "Infinity"] {
        assert!(!body.contains(wrong), "'{wrong}' on the page");
    }
    for row in &rows {
        for name in ["miss_ratio", "flash_bytes", "life_years", "latency_read_p99_us"] {
            let cell = format!("<td class=\"n\" title=\"{}\">", row[name]);
            assert!(row[name].is_empty() || body.contains(&cell), "no {name} {cell}");
        }
    }

    // Marks of the front: means over the two seeds, at the place that the axes say.
    for flash in ["1m", "2m"] {
        let size = format!("{} MiB", &flash[..1]);
        let front = figure(body, &format!("Misses against flash writes: flash {size}"));
        let found = marks(front, "path", "mark");
        assert_eq!(found.len(), 2);
        for policy in ["all", "reject_first"] {
            let mean = |name: &str| {
                let of: Vec<f64> = rows
                    .iter()
                    .filter(|r| r["cache.flash"] == flash && r["cache.admission.policy"] == policy)
                    .map(|r| r[name].parse().unwrap())
                    .collect();
                assert_eq!(of.len(), 2);
                of.iter().sum::<f64>() / 2.0
            };
            let mark = found.iter().find(|m| m["data-series"] == policy).unwrap();
            let (x, y) = (number(mark, "data-x"), number(mark, "data-y"));
            assert!((x / mean("flash_bytes") - 1.0).abs() < 1e-9, "{x}");
            assert!((y / mean("miss_ratio") - 1.0).abs() < 1e-9, "{y}");
            let shift = mark["transform"].trim_start_matches("translate(").trim_end_matches(')');
            let (px, py) = shift.split_once(',').unwrap();
            let wanted = (placed(front, "data-x", "x1", x), placed(front, "data-y", "y1", y));
            assert!((px.parse::<f64>().unwrap() - wanted.0).abs() < 0.5, "{px} {wanted:?}");
            assert!((py.parse::<f64>().unwrap() - wanted.1).abs() < 0.5, "{py} {wanted:?}");
        }
    }
    // Curves: a line of two sizes for each policy. Time: a line for each run.
    let curves = marks(figure(body, "Miss ratio by size"), "path", "mark");
    assert_eq!(curves.len(), 4);
    // Two seeds are one mark.
    let series = std::fs::read_to_string(out.join("series.csv")).unwrap();
    let times = |flash: &str| {
        let title = format!("Hit ratio over time: flash {flash}");
        marks(figure(body, &title), "path", "mark")
    };
    let (one, two) = (times("1 MiB"), times("2 MiB"));
    assert_eq!(2 * (one.len() + two.len()), series.lines().count() - 1);
    // A policy has one colour in every figure.
    for policy in ["all", "reject_first"] {
        let front = figure(body, "Misses against flash writes: flash 2 MiB");
        let front = marks(front, "path", "mark");
        let all = front.iter().chain(&curves).chain(&one).chain(&two);
        let colours: BTreeSet<&str> =
            all.filter(|m| m["data-series"] == policy).map(|m| m["fill"]).collect();
        assert_eq!(colours.len(), 1, "{policy}: {colours:?}");
    }
    ticks_are_round(body);
    // On a telephone text has its size still.
    let narrow = browse(&program, &page, &["--dump-dom", "--window-size=390,800"]);
    let figure = figure(&narrow, "Miss ratio by size");
    let (_, rest) = figure.split_once("viewBox=\"0 0 ").unwrap();
    let width: f64 = rest.split(' ').next().unwrap().parse().unwrap();
    assert!((250.0..=520.0).contains(&width), "{width} units across a narrow screen");
    pictures(&program, &page);
}

/// Every linear axis names round numbers, all in one unit.
fn ticks_are_round(body: &str) {
    let mut seen = 0;
    for figure in body.split("<section class=\"plot\">").skip(1) {
        let title = figure.split("</h2>").next().unwrap();
        for axis in ["tick-x", "tick-y"] {
            // The curve over sizes is logarithmic across.
            if title.contains("by size") && axis == "tick-x" || title.contains("Wear") {
                continue;
            }
            let texts: Vec<&str> = figure
                .split(&format!("class=\"{axis}\">"))
                .skip(1)
                .map(|rest| rest.split('<').next().unwrap())
                .collect();
            assert!(texts.len() >= 2, "{title} {axis}: {texts:?}");
            let parts: Vec<(f64, &str)> = texts
                .iter()
                .map(|t| {
                    let (number, unit) = t.split_once(' ').unwrap_or((t, ""));
                    assert!(number.len() <= 7, "{title} {axis}: {texts:?}");
                    (number.parse().unwrap_or_else(|_| panic!("{title} {axis}: {t}")), unit)
                })
                .collect();
            let units: BTreeSet<&str> = parts.iter().map(|p| p.1).collect();
            assert_eq!(units.len(), 1, "{title} {axis}: {texts:?}");
            let step = parts[1].0 - parts[0].0;
            let digit = step / 10f64.powf(step.log10().floor());
            let near = |d: f64| (digit - d).abs() < 1e-6;
            let time = matches!(parts[0].1, "min" | "h");
            assert!(
                near(1.0) || near(2.0) || near(5.0) || near(10.0) || time,
                "{title} {axis}: {texts:?}"
            );
            seen += 1;
        }
    }
    assert!(seen >= 6, "{seen} axes");
}

#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn curves_of_mrc_as_a_report() {
    let program = chromium();
    let dir = tempfile::tempdir().unwrap();
    let html = dir.path().join("mrc.html");
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "mrc", "gen:zipf?objects=5000&requests=20000", "--policies", "lru,sieve"])
        .args(["--sizes", "50,500,2000", "--json", "--html"])
        .arg(&html)
        .output()
        .unwrap();
    let rows: Vec<serde_json::Value> = serde_json::from_str(&done(&output)).unwrap();
    let dom = browse(&program, &format!("file://{}", html.display()), &["--dump-dom"]);
    let found = marks(figure(&dom, "Miss ratio by size"), "path", "mark");
    assert_eq!(found.len(), 6);
    for row in rows {
        let mark = found.iter().find(|m| {
            m["data-series"] == row["policy"]
                && number(m, "data-x") == row["size"].as_f64().unwrap()
        });
        assert_eq!(number(mark.unwrap(), "data-y"), row["miss_ratio"].as_f64().unwrap());
    }
}

/// Colours of the reports.
const COLOURS: usize = 16;

/// Of all policies at once no two curves look alike, in the figure and in its legend.
#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn every_policy_has_a_look_of_its_own() {
    let program = chromium();
    let dir = tempfile::tempdir().unwrap();
    let html = dir.path().join("mrc.html");
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["sim", "mrc", "gen:zipf?objects=500&requests=2000", "--policies", "all"])
        .args(["--sizes", "50,200", "--json", "--html"])
        .arg(&html)
        .output()
        .unwrap();
    let rows: Vec<serde_json::Value> = serde_json::from_str(&done(&output)).unwrap();
    let policies: BTreeSet<&str> = rows.iter().map(|r| r["policy"].as_str().unwrap()).collect();
    let dom = browse(&program, &format!("file://{}", html.display()), &["--dump-dom"]);
    let figure = figure(&dom, "Miss ratio by size");
    let attribute = |tag: &str, name: &str| {
        let (_, rest) = tag.split_once(&format!(" {name}=\"")).unwrap();
        rest.split('"').next().unwrap().to_owned()
    };
    let mut looks = BTreeSet::new();
    let mut keys = BTreeSet::new();
    for tag in figure.split("<path ").skip(1).map(|rest| rest.split('>').next().unwrap()) {
        if !tag.contains("stroke-dasharray") {
            continue;
        }
        let tag = format!(" {tag}");
        let look = (attribute(&tag, "stroke"), attribute(&tag, "stroke-dasharray"));
        if tag.contains("data-series") {
            keys.insert(look)
        } else {
            looks.insert(look)
        };
    }
    assert_eq!((looks.len(), policies.len() > 14), (policies.len(), true), "{looks:?}");
    // By the colour alone, as far as there are colours that can be told apart.
    let strokes: BTreeSet<&str> = looks.iter().map(|look| look.0.as_str()).collect();
    assert_eq!(strokes.len(), policies.len().min(COLOURS), "{looks:?}");
    assert_eq!(keys, looks);
}

/// Hours are named in quarters at most, whatever the length of a run.
#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn long_times_have_short_names() {
    let program = chromium();
    let dir = tempfile::tempdir().unwrap();
    for hours in [3, 7, 50] {
        let rate = 4000.0 / (f64::from(hours) * 3600.0);
        let text = format!(
            "[workload]\ntrace = \"gen:zipf?objects=100&requests=4000&rate={rate}\"\n\
             [report]\ninterval = 60.0\n[[cache]]\nkind = \"victim\"\ndram = \"8k\"\nflash = \"64k\"\n"
        );
        let (file, html) = (dir.path().join("e.toml"), dir.path().join("e.html"));
        std::fs::write(&file, text).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["sim", "run", "--html"])
            .args([&html, &file])
            .output()
            .unwrap();
        done(&output);
        let dom = browse(&program, &format!("file://{}", html.display()), &["--dump-dom"]);
        let figure = figure(&dom, "Hit ratio over time");
        let texts: Vec<&str> = figure
            .split("class=\"tick-x\">")
            .skip(1)
            .map(|rest| rest.split('<').next().unwrap())
            .collect();
        assert!(texts.len() >= 3, "{texts:?}");
        for text in &texts {
            assert!(text.len() <= 7 && (text.ends_with(" h") || text.ends_with(" d")), "{texts:?}");
        }
    }
}

/// Names and titles come from the experiment: what they hold stays text on the page.
#[test]
#[cfg_attr(without = "chromium", ignore = "needs chromium (Debian: chromium)")]
fn one_run_as_a_report() {
    const TITLE: &str = r#"</script><script>document.title='x'</script> & \"<b>\""#;
    let dir = tempfile::tempdir().unwrap();
    let (file, html) = (dir.path().join("e.toml"), dir.path().join("run.html"));
    let experiment = format!(
        "title = \"{TITLE}\"\n[workload]\ntrace = \"gen:zipf?objects=8000&requests=30000&writes=0.05&rate=1000\"\n\
         warmup = 10000\n[[cache]]\nkind = \"hybrid\"\nname = \"<i>one</i>\"\ndram = \"256k\"\nflash = \"1m\"\n\
         admission.policy = \"all\"\n[[cache]]\nkind = \"ripq\"\nflash = \"1m\"\nblock = \"32k\"\n"
    );
    std::fs::write(&file, experiment).unwrap();
    let run = |html: &Path| {
        Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["sim", "run", "--json", "--html"])
            .args([html, &file])
            .output()
            .unwrap()
    };
    let outcome: serde_json::Value = serde_json::from_str(&done(&run(&html))).unwrap();
    let page = std::fs::read_to_string(&html).unwrap();
    assert!(!page.contains("<i>one") && !page.contains("<script>document"), "markup from a name");
    for wanted in ["src=", "href=\"http", "@import", "url(http"] {
        assert!(!page.contains(wanted), "the page needs something else: {wanted}");
    }
    // Where it cannot be written, nothing is claimed.
    let failed = run(&dir.path().join("none").join("run.html"));
    assert_eq!(failed.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&failed.stderr).contains("run.html"));

    let program = chromium();
    let dom = browse(&program, &format!("file://{}", html.display()), &["--dump-dom"]);
    let body = dom.split("<script").next().unwrap();
    assert!(body.contains("&lt;i&gt;one&lt;/i&gt;"), "the name as it is");
    for wrong in ["NaN", "undefined", "Infinity"] {
        assert!(!body.contains(wrong), "'{wrong}' on the page");
    }
    let shown: Vec<f64> = body
        .split("<td class=\"n\" title=\"")
        .skip(1)
        .map(|cell| cell.split('"').next().unwrap().parse().unwrap())
        .collect();
    for cache in outcome["caches"].as_array().unwrap() {
        for name in ["miss_ratio", "flash_bytes", "dlwa", "life_years"] {
            let value = cache[name].as_f64().unwrap();
            assert!(shown.contains(&value), "no {name} {value}");
        }
    }
    let points: usize = outcome["caches"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|c| c["series"].as_array().unwrap())
        .filter(|p| p["interval_share"].as_f64().unwrap() >= 0.9)
        .count();
    let hits = marks(figure(body, "Hit ratio over time"), "path", "mark");
    assert_eq!(hits.len(), points);
}

fn pictures(program: &str, page: &str) {
    let Some(dir) = std::env::var_os("LARDER_SCREENSHOTS") else { return };
    for (scheme, more) in [("light", "--enable-features=none"), ("dark", "--force-dark-mode")] {
        let file = Path::new(&dir).join(format!("report-{scheme}.png"));
        let shot = format!("--screenshot={}", file.display());
        browse(program, page, &[&shot, "--window-size=1200,4200", more]);
    }
    let pdf = format!("--print-to-pdf={}", Path::new(&dir).join("report.pdf").display());
    browse(program, page, &[&pdf]);
}
