//! `larder block serve --config`: a daemon that is told everything by a file, flags that win over it, and mistakes in it.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::daemon::{Daemon, larder, prepare, read, session_of, write};

/// The file of a daemon with two volumes in `dir`.
fn file(dir: &Path) -> String {
    let at = dir.display();
    format!(
        "# All in one file.\n\
         cache = \"{at}/cache\"\n\
         listen = [\"unix:{at}/socket\"]\n\
         state-dir = \"{at}/state\"\n\
         write = \"hdd-inv\"\n\
         admission = \"seqr(window=16)+tc\"\n\
         threads = 3\n\
         endurance-tbw = 600.5\n\
         read-only = false\n\
         [volume]\n\
         disk = \"file:{at}/disk\"\n\
         \"second one\" = \"file:{at}/second\"\n\
         [share]\n\
         disk = \"30%..\"\n"
    )
}

fn printed(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "serve", "--print-config"])
        .args(arguments)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_file_says_all_and_flags_win() {
    let dir = prepare("set:8");
    let dir = dir.path();
    std::fs::File::create(dir.join("second")).unwrap().set_len(4 << 20).unwrap();
    let config = dir.join("larder.toml");
    std::fs::write(&config, file(dir)).unwrap();
    let config = config.to_str().unwrap();
    for by_file in [true, false] {
        let mut program = Command::new(env!("CARGO_BIN_EXE_larder"));
        program.args(["block", "serve", "--config", config]);
        if !by_file {
            program.args(["--read-only", "--volume"]);
            program.arg(format!("other=file:{}", dir.join("second").display()));
        }
        let daemon = Daemon::of(program);
        let output = Command::new(env!("CARGO_BIN_EXE_larder"))
            .args(["block", "status", "--json", "--state-dir"])
            .arg(dir.join("state"))
            .args(["--answer-within", "120"])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let status: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let names: Vec<&str> = status["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v["name"].as_str().unwrap())
            .collect();
        if by_file {
            assert_eq!(names, ["disk", "second one"]);
            let mut s = session_of(dir, "disk");
            write(&mut *s, 4096, 8192, 3);
            assert!(read(&mut *s, 4096, 8192).iter().all(|&b| b == 3));
        } else {
            // The file's volumes are not among those that were given by flag.
            assert_eq!(names, ["other"]);
            assert_eq!(status["volumes"][0]["read_only"], true, "{status:#}");
        }
        daemon.stop();
    }

    // What is printed says the same, and reads back as itself.
    let text = printed(&["--config", config, "-t", "5"]);
    for line in [
        "threads = 5\n",
        "write = [\"hdd-inv\"]\n",
        "endurance-tbw = 600.5\n",
        "share = [\"disk=30%..\"]\n",
        "# tls-key =\n",
        "fill-memory = \"64 MiB\"\n",
        "read-only = false\n",
    ] {
        assert!(text.contains(&format!("\n{line}")), "no '{line}' in {text}");
    }
    let again = dir.join("again.toml");
    std::fs::write(&again, &text).unwrap();
    assert_eq!(printed(&["--config", again.to_str().unwrap()]), text);
    // Without anything it is a file to begin with, and every flag is in it.
    let empty = printed(&[]);
    assert!(empty.contains("\n# cache =\n") && empty.contains("\n# listen =\n"), "{empty}");
    let help = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "serve", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let flags: Vec<&str> = help
        .lines()
        .filter_map(|line| line.trim_start().split_once("--"))
        .filter(|(before, _)| before.is_empty() || before.starts_with('-'))
        .filter_map(|(_, rest)| rest.split([' ', ',']).next())
        .filter(|flag| !matches!(*flag, "config" | "print-config" | "help" | "version"))
        .collect();
    assert!(flags.len() > 25, "{help}");
    for flag in flags {
        // The key of a flag that says no says yes.
        let flag = if flag == "no-first-fill" { "first-fill" } else { flag };
        let found = ["\n", "\n# "].iter().any(|b| empty.contains(&format!("{b}{flag} =")));
        assert!(found, "no '{flag}' in {empty}");
    }
}

#[test]
fn mistakes_in_a_file() {
    let dir = prepare("set:8");
    let good = file(dir.path());
    let config = dir.path().join("larder.toml");
    let serve = |text: &str, more: &[&str]| {
        std::fs::write(&config, text).unwrap();
        larder(&[&["serve", "--config", config.to_str().unwrap()], more].concat())
    };
    for (text, more, words) in [
        (good.replace("threads", "treads"), &[][..], &["line 7", "'treads'", "'threads'"][..]),
        (good.replace("= 3", "= 99"), &[], &["line 7", "'threads'", "99", "from 1 to 64"]),
        (good.replace("hdd-inv", "fast"), &[], &["line 5", "'write'", "hdd-ssd"]),
        (good.replace("\"30%..\"", "\"lots\""), &[], &["line 14", "'share'", "lots"]),
        (good.replace("\"file:", "\"ftp:"), &[], &["'volume'", "ftp:", "backing store"]),
        (good.replace("= 3", "= 3 3"), &[], &["line 7"]),
        (good.replace("cache =", "#"), &[], &["--cache <PATH>", "larder.toml"]),
        // What is wrong in the file is said although a flag wins over it.
        (good.replace("= 3", "= 99"), &["-t", "2"], &["line 7", "99"]),
        (format!("record-limit = \"1g\"\n{good}"), &[], &["--record <FILE>"]),
        (good.replace("seqr(", "best("), &[], &["admission", "best"]),
        (good.replace("= 600.5", "= -1"), &[], &["endurance-tbw", "-1"]),
        (format!("tls-key = \"/k\"\n{good}"), &[], &["tls-key '/k'", "needs tls-certificate too"]),
        (good.replace("/socket\"", "/socket,tls=on\""), &[], &["tls=on", "--tls-certificate"]),
        (good.replace("/socket\"", "/socket,tls=yes\""), &[], &["tls= is off, on or require"]),
    ] {
        let (code, message) = serve(&text, more);
        assert_eq!(code, Some(2), "{message}");
        assert_eq!(message.trim().lines().count(), 1, "{message}");
        for word in words {
            assert!(message.contains(word), "'{word}' is not in: {message}");
        }
    }
    let (code, message) = larder(&["serve", "--config", "/nowhere/larder.toml"]);
    assert!(
        code == Some(2) && message.contains("'/nowhere/larder.toml' cannot be read"),
        "{message}"
    );
    let (code, message) = larder(&["serve", "--listen", "unix:/x"]);
    assert!(code == Some(2) && message.contains("--cache"), "{message}");
}

/// `-v` wins over the environment, and that over the file.
#[test]
fn flags_and_the_file_say_how_much_is_logged() {
    let dir = prepare("set:8");
    let dir = dir.path();
    std::fs::File::create(dir.join("second")).unwrap().set_len(4 << 20).unwrap();
    let config = dir.join("larder.toml");
    std::fs::write(&config, format!("log-level = \"trace\"\n{}", file(dir))).unwrap();
    let config = config.to_str().unwrap();
    assert!(printed(&["--config", config]).contains("log-level = \"trace\""));
    let request = "read 8192 at 4096";
    let cases: [(&str, &[&str], bool, bool); 4] = [
        ("", &[], true, true),
        ("info", &[], false, false),
        ("info", &["-v"], true, false),
        ("info", &["-vv"], true, true),
    ];
    for (environment, flags, connections, requests) in cases {
        let mut program = Command::new(env!("CARGO_BIN_EXE_larder"));
        program.env("RUST_LOG", environment);
        program.args(["block", "serve", "--config", config]).args(flags);
        let mut daemon = Daemon::of(program);
        read(&mut *session_of(dir, "disk"), 4096, 8192);
        // The counters are said behind everything else.
        daemon.counters("lines read");
        let named = format!("{environment} {flags:?}: {:#?}", daemon.seen);
        assert_eq!(daemon.said("a connection from"), connections, "{named}");
        assert_eq!(daemon.said(request), requests, "{named}");
        daemon.stop();
    }
}

/// A name under /dev that is not there is a device that is not there, by whatever links it is named.
#[test]
fn format_makes_nothing_under_dev() {
    let dir = tempfile::tempdir().unwrap();
    let at = format!("/dev/larder-test-block-{}", std::process::id());
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::os::unix::fs::symlink(&at, path("link")).unwrap();
    std::os::unix::fs::symlink("link", path("second")).unwrap();
    std::os::unix::fs::symlink(path("second"), path("third")).unwrap();
    for name in [at.clone(), path("link"), path("second"), path("third")] {
        let (code, said) = larder(&["format", &name, "--size", "64m"]);
        let made = Path::new(&at).exists();
        std::fs::remove_file(&at).ok();
        assert!(!made && code == Some(2), "{name}: {said}");
        assert!(said.contains("/dev") && said.contains("a file elsewhere"), "{said}");
    }
    // Links that lead in a circle end.
    std::os::unix::fs::symlink(path("b"), path("a")).unwrap();
    std::os::unix::fs::symlink(path("a"), path("b")).unwrap();
    let (code, said) = larder(&["format", &path("a"), "--size", "64m"]);
    assert!(
        code.is_some_and(|c| c != 0) && said.contains("'") && !said.contains("panicked"),
        "{said}"
    );
}
