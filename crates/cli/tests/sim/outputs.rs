//! Files that commands write, and a standard output that cannot be written: what was there before is not lost, and nothing
//! panics.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory, and what is in it.
struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), text).unwrap();
        self.path(name)
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(self.0.path()).unwrap();
        let mut names: Vec<String> =
            names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command.current_dir(self.0.path()).args(arguments).stdin(Stdio::null());
        command
    }

    /// The exit code, and what was said.
    fn larder(&self, arguments: &[&str]) -> (i32, String) {
        said(&self.command(arguments).output().unwrap())
    }
}

fn said(output: &Output) -> (i32, String) {
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A trace of three requests.
const TRACE: &str = "time,id,size\n1,1,10\n2,2,20\n3,1,10\n";

const MRC: [&str; 6] = ["sim", "mrc", "gen:zipf?objects=10&requests=100", "--sizes", "5", "--html"];

#[test]
fn convert_refuses_its_input_by_every_name() {
    let dir = Dir::new();
    let input = dir.file("a.csv", TRACE);
    fs::hard_link(&input, dir.path("hard")).unwrap();
    symlink("a.csv", dir.path("soft")).unwrap();
    for output in ["a.csv", "hard", "soft", "./a.csv"] {
        let (code, said) = dir.larder(&["trace", "convert", "a.csv", output, "--to", "csv"]);
        assert_eq!(code, 2, "{said}");
        assert!(said.contains(&format!("'{output}' is the trace that is read")), "{said}");
    }
    // By its descriptor, and to standard output.
    let stdin = || Stdio::from(File::open(&input).unwrap());
    let mut by_stdin = dir.command(&["trace", "convert", "-", "hard", "--to", "csv"]);
    let (code, problem) = said(&by_stdin.stdin(stdin()).output().unwrap());
    assert_eq!(code, 2, "{problem}");
    let mut by_stdout = dir.command(&["trace", "convert", "a.csv", "-", "--to", "csv"]);
    let append = File::options().append(true).open(&input).unwrap();
    let (code, problem) = said(&by_stdout.stdout(append).output().unwrap());
    assert_eq!(code, 2, "{problem}");
    assert_eq!(fs::read_to_string(&input).unwrap(), TRACE);
    assert_eq!(dir.names(), ["a.csv", "hard", "soft"]);
}

#[test]
fn a_conversion_that_fails_leaves_what_was_there() {
    let dir = Dir::new();
    let whole = dir.path("whole.lt.zst");
    let whole = whole.to_str().unwrap();
    assert_eq!(dir.larder(&["trace", "convert", "gen:zipf?requests=50000", whole]).0, 0);
    let mut bytes = fs::read(whole).unwrap();
    bytes.truncate(bytes.len() / 2);
    dir.file("cut.lt.zst", &bytes);
    dir.file("out.csv", "precious");
    let (code, said) = dir.larder(&["trace", "convert", "cut.lt.zst", "out.csv", "--to", "csv"]);
    assert_eq!(code, 1, "{said}");
    assert_eq!(fs::read(dir.path("out.csv")).unwrap(), b"precious");
    assert_eq!(dir.larder(&["trace", "convert", "cut.lt.zst", "new.csv", "--to", "csv"]).0, 1);
    assert_eq!(dir.names(), ["cut.lt.zst", "out.csv", "whole.lt.zst"]);
    assert_eq!(dir.larder(&["trace", "convert", whole, "out.csv", "--to", "csv"]).0, 0);
    assert!(fs::metadata(dir.path("out.csv")).unwrap().len() > 1 << 20);
}

#[test]
fn convert_blames_what_is_wrong() {
    let dir = Dir::new();
    dir.file("a.csv", "time,id,size\n1,1,10\n2,2,9000000000\n");
    let (code, said) = dir.larder(&["trace", "convert", "a.csv", "none/x"]);
    assert_eq!(code, 1);
    assert!(said.contains("cannot write trace 'none/x'"), "{said}");
    let (code, said) = dir.larder(&["trace", "convert", "a.csv", "x", "--to", "oracle-general"]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("request 2 of the trace, 1 s and 9000000000 bytes"), "{said}");
    assert_eq!(dir.names(), ["a.csv"]);
}

/// What is written has no name until it is whole, where the file system can do that.
#[test]
fn a_kill_leaves_nothing_half_written() {
    use rustix::fs::{Mode, OFlags};
    let dir = Dir::new();
    let flags = OFlags::TMPFILE | OFlags::WRONLY;
    let can = rustix::fs::open(dir.0.path(), flags, Mode::from_raw_mode(0o600)).is_ok();
    assert!(
        can,
        "'{}' is on a file system without unnamed files: set TMPDIR",
        dir.0.path().display()
    );
    dir.file("old.lrd", "old");
    for output in ["old.lrd", "new.lrd"] {
        let spec = "zipf?objects=1000&requests=4000000000";
        let mut command = dir.command(&["trace", "generate", spec, output]);
        let mut child = command.stderr(Stdio::null()).spawn().unwrap();
        // Until something was written to a file in the directory.
        let fds = PathBuf::from(format!("/proc/{}/fd", child.id()));
        let written = |fd: PathBuf| {
            let inside = fs::read_link(&fd).is_ok_and(|at| at.starts_with(dir.0.path()));
            inside && fs::metadata(&fd).is_ok_and(|m| m.len() > 0)
        };
        let found = (0..600).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            fs::read_dir(&fds).unwrap().flatten().any(|fd| written(fd.path()))
        });
        assert!(found, "nothing was written in half a minute");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(dir.names(), ["old.lrd"], "{output}");
        assert_eq!(fs::read(dir.path("old.lrd")).unwrap(), b"old");
    }
}

#[test]
fn reports_replace_files_and_nothing_else() {
    let dir = Dir::new();
    // A file of the user's that has the name which once was the temporary one.
    dir.file("r.html.new", "mine");
    dir.file("target", "old");
    symlink("target", dir.path("link")).unwrap();
    for name in ["r.html", "link"] {
        let (code, said) = dir.larder(&[&MRC[..], &[name]].concat());
        assert_eq!(code, 0, "{said}");
    }
    assert_eq!(fs::read(dir.path("r.html.new")).unwrap(), b"mine");
    assert!(fs::symlink_metadata(dir.path("link")).unwrap().is_symlink());
    for report in ["r.html", "target"] {
        assert!(fs::read_to_string(dir.path(report)).unwrap().contains("<html"), "{report}");
    }
    // A device stays one, and says when it is full.
    let (code, said) = dir.larder(&[&MRC[..], &["/dev/full"]].concat());
    assert_eq!(code, 1);
    assert!(said.contains("--html: cannot write '/dev/full': No space left"), "{said}");
    for device in ["/dev/full", "/dev/null"] {
        assert!(fs::metadata(device).unwrap().file_type().is_char_device());
    }
    assert_eq!(dir.larder(&[&MRC[..], &["/dev/null"]].concat()).0, 0);
    assert_eq!(dir.names(), ["link", "r.html", "r.html.new", "target"]);
}

#[test]
fn a_report_goes_through_a_pipe() {
    let dir = Dir::new();
    let pipe = dir.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read_to_string(pipe).unwrap()
    });
    assert_eq!(dir.larder(&[&MRC[..], &["pipe"]].concat()).0, 0);
    assert!(reader.join().unwrap().contains("</html>"));
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
}

#[test]
fn reports_do_not_go_over_what_is_read() {
    let dir = Dir::new();
    let refused = |arguments: &[&str]| {
        let (code, said) = dir.larder(arguments);
        assert_eq!(code, 2, "{arguments:?}: {said}");
        assert!(said.contains("is read"), "{said}");
    };
    dir.file("a.csv", TRACE);
    fs::hard_link(dir.path("a.csv"), dir.path("hard")).unwrap();
    refused(&["sim", "mrc", "a.csv", "--sizes", "2", "--html", "hard"]);
    let experiment = "[workload]\ntrace = \"a.csv\"\n[[cache]]\nkind = \"victim\"\nname = \"v\"\ndram = \"64k\"\nflash = \"1m\"\n";
    dir.file("e.toml", experiment);
    refused(&["sim", "run", "e.toml", "--csv", "e.toml"]);
    refused(&["sim", "run", "e.toml", "--html", "a.csv"]);
    let (code, said) = dir.larder(&["sim", "run", "e.toml", "--html", "x", "--csv", "x"]);
    assert!(code == 2 && said.contains("name two"), "{said}");
    fs::create_dir(dir.path("out")).unwrap();
    dir.file("out/results.csv", TRACE);
    let sweep = experiment
        .replace("[workload]", "[experiment.workload]")
        .replace("[[cache]]", "[[experiment.cache]]");
    let axis = "[[axis]]\nkey = \"seed\"\nvalues = [1, 2]\n";
    dir.file("s.toml", format!("{}{axis}", sweep.replace("a.csv", "out/results.csv")));
    refused(&["sim", "sweep", "s.toml", "--out", "out"]);
    assert_eq!(fs::read_to_string(dir.path("a.csv")).unwrap(), TRACE);
    assert_eq!(fs::read_to_string(dir.path("e.toml")).unwrap(), experiment);
    assert_eq!(fs::read_to_string(dir.path("out/results.csv")).unwrap(), TRACE);
}

fn prints_to_full(dir: &Dir, arguments: &[&str]) {
    for more in [&[][..], &["--json"]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let arguments = [arguments, more].concat();
        let (code, said) = said(&dir.command(&arguments).stdout(full).output().unwrap());
        assert!(
            code == 1 && said.contains("cannot write to standard output"),
            "{arguments:?}: {code} {said}"
        );
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_full_standard_output_is_told_and_no_panic() {
    let dir = Dir::new();
    dir.file(
        "e.toml",
        "[workload]\ntrace = \"gen:zipf?objects=100&requests=1000&rate=100\"\n[[cache]]\nkind = \"victim\"\nname = \"v\"\ndram = \"64k\"\nflash = \"1m\"\n",
    );
    let kv = "gen:zipf?objects=100&requests=1000&rate=100";
    let block = "gen:specsfs?size=16m&requests=500";
    for arguments in [
        &["trace", "stats", kv][..],
        &["sim", "mrc", kv, "--sizes", "5"],
        &["sim", "run", "e.toml"],
        &["sim", "ssd", "--capacity", "16m", "--block", "256k"],
        &["sim", "stack", block, "--ram", "1m", "--flash", "4m"],
        &["sim", "block", block, "--sizes", "1m"],
        &["sim", "baseline", kv, "--flash", "1m", "--block", "16k"],
        &["bench", "packing", "--flash-size", "64m", "--segments", "1"],
    ] {
        prints_to_full(&dir, arguments);
    }
    // Remarks on standard error are no reason to end.
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let mut convert = dir.command(&["trace", "convert", kv, "x.csv", "--to", "csv"]);
    assert!(convert.stderr(full()).status().unwrap().success());
    assert!(Path::new(&dir.path("x.csv")).exists());
}

/// What the tables of people's terminals are printed by: no line is longer than the terminal, and every heading is there.
#[test]
fn tables_of_benchmarks_fit_sixty_columns() {
    let dir = Dir::new();
    let commands: [(&[&str], &[&str]); 3] = [
        (
            &["index", "--objects", "20000", "--turnovers", "1", "--probes", "1000"],
            &["figure", "forced"],
        ),
        (&["admission", "--list-workloads"], &["workload"]),
        (&["equal-writes", "--list"], &["cell", "role"]),
    ];
    for (command, words) in commands {
        let mut larder = dir.command(&["bench"]);
        let output = larder.args(command).env("COLUMNS", "60").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{command:?}: {}", said(&output).1);
        for line in text.lines() {
            assert!(line.chars().count() <= 60, "{command:?}: '{line}'");
        }
        for word in words {
            assert!(text.contains(word), "{command:?}: no '{word}' in {text}");
        }
    }
}
