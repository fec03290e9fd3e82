//! What `larder sim` and `larder trace` are given that has no bound, no sense or no result: each ends in one line, in time.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The slowest of these takes a fraction of it.
const IN_TIME: Duration = Duration::from_secs(240);

/// Ends a process that does not end by itself.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Runs with at most 4 GiB of address space, and no longer than [`IN_TIME`].
fn larder(arguments: &[&str]) -> Output {
    let script = "ulimit -v 4194304; exec \"$0\" \"$@\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_larder")]).args(arguments);
    let child = shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = Ends(child.unwrap());
    let began = Instant::now();
    let pipes = (child.0.stdout.take().unwrap(), child.0.stderr.take().unwrap());
    let read = |mut pipe: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            pipe.read_to_end(&mut bytes).unwrap();
            bytes
        })
    };
    let (stdout, stderr) = (read(Box::new(pipes.0)), read(Box::new(pipes.1)));
    let status = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status;
        }
        assert!(began.elapsed() < IN_TIME, "{arguments:?} does not end");
        std::thread::sleep(Duration::from_millis(10));
    };
    Output { status, stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap() }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The command ends with this code and says this, in a line.
fn says(arguments: &[&str], code: i32, words: &str) {
    let output = larder(arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
    assert!(said.contains(words), "{arguments:?}: no '{words}' in {said}");
    assert!(!said.contains("panicked") && output.stdout.is_empty(), "{arguments:?}: {said}");
}

fn file(dir: &tempfile::TempDir, name: &str, contents: &[u8]) -> String {
    let path: PathBuf = dir.path().join(name);
    std::fs::write(&path, contents).unwrap();
    path.display().to_string()
}

#[test]
fn a_record_of_endless_pages_is_malformed() {
    let dir = tempfile::tempdir().unwrap();
    let good = "128166372003061629,hm,0,Read,4096,8192,100\n";
    for (bad, words) in [
        (
            "0,18446744073709551615",
            "expected a write of at most 1 GiB, found 18446744073709551615 bytes",
        ),
        (
            "18446744073709551615,4096",
            "expected a range that ends below 2^64, found 4096 bytes from byte",
        ),
    ] {
        let bad = format!("{good}128166372003061629,hm,0,Write,{bad},100\n{good}");
        let trace = file(&dir, "one.csv", bad.as_bytes());
        let reads = ["--format", "msr", "--pages"];
        for command in [
            &["trace", "stats", trace.as_str()][..],
            &["sim", "mrc", &trace, "--sizes", "10"],
            &["sim", "stack", &trace, "--ram", "1m"],
        ] {
            let reads = if command[1] == "stack" { &reads[..2] } else { &reads[..] };
            says(&[command, reads].concat(), 1, &format!("one.csv, line 2: {words}"));
        }
        let more = ["trace", "stats", &trace, "--skip-bad", "--json"];
        let output = larder(&[&more[..], &reads].concat());
        let stats: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&stats["skipped"], &stats["requests"]), (&1.into(), &4.into()), "{stats}");
    }
}

#[test]
fn a_sample_of_nothing_is_no_result() {
    let zipf = "gen:zipf?objects=2000&requests=200000";
    let mrc = ["sim", "mrc", zipf, "--sizes", "200", "--sample"];
    says(
        &[&mrc[..], &["0.0001"]].concat(),
        1,
        "none of the trace's objects is in a sample of 0.0001",
    );
    let few = larder(&[&mrc[..], &["0.05"]].concat());
    let said = text(&few.stderr);
    assert!(few.status.success() && said.contains("objects were sampled"), "{said}");
    let enough = larder(&[&mrc[..], &["0.9"]].concat());
    assert!(enough.status.success() && enough.stderr.is_empty(), "{}", text(&enough.stderr));
}

#[test]
fn a_curve_has_so_many_points_at_most() {
    let curve = ["sim", "mrc", "gen:zipf?objects=50&requests=1000", "--lru-curve"];
    for wrong in ["0", "100001", "18446744073709551615"] {
        says(&[&curve[..], &[wrong]].concat(), 2, "from 1 to 100000");
    }
    let most = larder(&[&curve[..], &["100000", "--json"]].concat());
    let rows: serde_json::Value = serde_json::from_slice(&most.stdout).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), 50);
}

#[test]
fn policies_named_twice_are_simulated_once() {
    let zipf = "gen:zipf?objects=50&requests=1000";
    let output =
        larder(&["sim", "mrc", zipf, "--sizes", "5", "--policies", "lru,fifo,lru", "--json"]);
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> =
        rows.as_array().unwrap().iter().map(|r| r["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ["lru", "fifo"]);
    assert!(text(&output.stderr).contains("--policies names some more than once"));
}

#[test]
fn a_stack_that_only_warms_up_has_no_figures() {
    let trace = "gen:specsfs?size=16m&requests=500";
    let stack = ["sim", "stack", trace, "--ram", "1m", "--flash", "4m", "--warmup"];
    says(&[&stack[..], &["99999999"]].concat(), 2, "so that none is left to count");
    assert!(larder(&[&stack[..], &["10"]].concat()).status.success());
}

const SWEEP: &str = r#"
[experiment.workload]
trace = "gen:zipf?objects=500&requests=3000&rate=1000&value=400"
[[experiment.cache]]
kind = "victim"
name = "v"
dram = "64k"
flash = "1m"
[[axis]]
key = "seed"
values = [1, 2, 3]
"#;

#[test]
fn cells_that_were_damaged_are_run_again() {
    let dir = tempfile::tempdir().unwrap();
    let sweep = file(&dir, "s.toml", SWEEP.as_bytes());
    let out = dir.path().join("out").display().to_string();
    let run = ["sim", "sweep", &sweep, "--out", &out, "--threads", "1"];
    assert!(larder(&run).status.success());
    let results = || std::fs::read_to_string(dir.path().join("out/results.csv")).unwrap();
    let cells = dir.path().join("out/cells.jsonl");
    let (whole, lines) = (results(), std::fs::read_to_string(&cells).unwrap());
    let second = lines.lines().nth(1).unwrap();
    let (head, _) = second.split_once("\"outcome\":").unwrap();
    let miss = second.find("\"miss_ratio\":").unwrap() + 13;
    for changed in [
        format!("{head}\"outcome\":{{}}}}"),
        format!("{}7{}", &second[..miss], &second[miss + 1..]),
        second.replacen("\"version\":\"", "\"version\":\"9", 1),
    ] {
        std::fs::write(&cells, lines.replacen(second, &changed, 1)).unwrap();
        let output = larder(&[&run[..], &["--resume"]].concat());
        let said = text(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert!(
            said.contains("cells.jsonl' line 2 is damaged") && said.contains("2 of 3 cells"),
            "{said}"
        );
        assert_eq!(results(), whole);
        assert_eq!(std::fs::read_to_string(&cells).unwrap(), lines);
    }
}

#[test]
fn experiments_without_an_end_are_not_read_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let sweep =
        file(&dir, "s.toml", b"file = \"/dev/zero\"\n[[axis]]\nkey = \"seed\"\nvalues = [1]\n");
    let out = dir.path().join("out").display().to_string();
    for arguments in [
        &["sim", "run", "/dev/zero"][..],
        &["sim", "sweep", "/dev/zero", "--out", &out],
        &["sim", "sweep", &sweep, "--out", &out],
    ] {
        says(arguments, 2, "'/dev/zero' is no");
    }
}

#[test]
fn a_drive_beyond_the_memory_is_refused() {
    // Its maps take 22 GiB, and the process has 4.
    says(
        &["sim", "ssd", "--capacity", "11t", "--page", "4k", "--over-provisioning", "0.0001"],
        2,
        "GiB of memory",
    );
}
