//! For build scripts: what a test needs that cargo does not bring. Where a thing is missing, `cfg(without = "NAME")` is set, and
//! the tests that need it say `#[cfg_attr(without = "NAME", ignore = "needs NAME (how to get it)")]`, so that they count as
//! ignored, with the reason. With `LARDER_REQUIRE_FOREIGN=1` nothing is set: such a test then runs, and fails. Two kinds are left
//! out of that, since no installation brings them: what a machine is able to ([`declare_able`]), and the shared traces, which a
//! plain clone has not; where their folder is, their tests run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Sets the cfg for each of `names` that is missing: programs on the path, and what [`there`] knows beside.
pub(crate) fn declare(names: &[&str]) {
    let values: Vec<String> = names.iter().map(|n| format!("{n:?}")).collect();
    println!("cargo::rustc-check-cfg=cfg(without, values({}))", values.join(", "));
    for variable in ["PATH", "LARDER_REQUIRE_FOREIGN", "LARDER_CHROMIUM", "LARDER_SHARED"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let all = std::env::var_os("LARDER_REQUIRE_FOREIGN").is_some_and(|v| v == "1");
    // A folder's time changes with what is installed or removed in it. Only the system's: others change all the time.
    for folder in ["/usr/bin", "/usr/sbin", "/usr/local/bin"] {
        if Path::new(folder).is_dir() {
            println!("cargo::rerun-if-changed={folder}");
        }
    }
    for name in names {
        let required = all && (*name != "shared" || std::env::var_os("LARDER_SHARED").is_some());
        if !required && !there(name) {
            println!("cargo::rustc-cfg=without={name:?}");
        }
    }
}

/// The same for what a kernel, a file system or a user's rights make possible, and whether they do here.
#[allow(dead_code, reason = "each build script uses what it needs")]
pub(crate) fn declare_able(abilities: &[(&str, bool)]) {
    let values: Vec<String> = abilities.iter().map(|(name, _)| format!("{name:?}")).collect();
    println!("cargo::rustc-check-cfg=cfg(without, values({}))", values.join(", "));
    for (name, _) in abilities.iter().filter(|(_, able)| !able) {
        println!("cargo::rustc-cfg=without={name:?}");
    }
}

/// Whether this machine has it.
fn there(name: &str) -> bool {
    match name {
        "chromium" => succeeds(
            &std::env::var("LARDER_CHROMIUM").unwrap_or_else(|_| name.into()),
            &["--version"],
        ),
        "fio-nbd" => Command::new("fio").arg("--enghelp").output().is_ok_and(|out| {
            String::from_utf8_lossy(&out.stdout).lines().any(|line| line.trim() == "nbd")
        }),
        // Debian's module belongs to Debian's Python.
        "python3-libnbd" => ["python3", "/usr/bin/python3"]
            .iter()
            .any(|python| succeeds(python, &["-c", "import nbd"])),
        "fuse" => Path::new("/dev/fuse").exists(),
        "loop" => succeeds("losetup", &["--find"]) && is_root(),
        "mount" => {
            is_root() && succeeds("unshare", &["-m", "mount", "-t", "tmpfs", "none", "/mnt"])
        }
        "root" => is_root(),
        "mount-namespace" => succeeds("unshare", &["-rm", "mount", "-t", "tmpfs", "none", "/mnt"]),
        "shared" => shared().is_dir(),
        program => on_path(program),
    }
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Debian keeps file systems' programs where not every user's path leads.
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .any(|folder| folder.join(program).is_file())
}

fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|s| s.success())
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|out| out.stdout.trim_ascii() == b"0")
}

/// Traces and figures of others that may not be copied into this repository: beside the checkout, or where `LARDER_SHARED` says.
fn shared() -> PathBuf {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
    std::env::var_os("LARDER_SHARED")
        .map_or_else(|| Path::new(&root).join("../../../shared"), PathBuf::from)
}
