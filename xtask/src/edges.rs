//! `cargo xtask edges`: the architecture's arrows.
//!
//! Engines and policies are to run unchanged under a simulator, so nothing below the runtime may reach a clock, a
//! socket, a thread or the system's randomness. Three things keep it so: clippy's `disallowed-methods` (clippy.toml),
//! this check that no crate below the line lifts that ban or leaves the workspace's lints, and this check that crates
//! import only downward.
//!
//! Imports between the folders of a crate go in no circle ([`crate::circles`]). Two lists hold what should not be and still is, and
//! may only shrink ([`crate::ratchet`]): the engine's machines that hosts call by name, where a host should ask the node; and texts
//! below the front ends that speak of them ([`crate::words`]).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::modules::Modules;
use crate::ratchet::{Counted, Ratchet};
use crate::{Findings, circles, words};

/// Every crate of the workspace and the workspace's crates it may import, in any kind of dependency. What is not
/// listed is refused, so that a new crate is given its place here.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("policy", &["base"]),
    ("format", &["base"]),
    ("trace", &["base"]),
    ("engine", &["base", "policy", "format"]),
    ("lab", &["base", "format", "engine"]),
    ("sim", &["base", "policy", "format", "engine", "trace"]),
    ("runtime", &["base", "format"]),
    ("net", &["base", "runtime"]),
    ("settings", &["base", "policy", "runtime", "net"]),
    ("cache", &["base", "policy", "format", "engine", "trace", "runtime", "volume"]),
    ("kv", &["base", "policy", "engine", "runtime", "cache", "net", "settings"]),
    ("nbd", &["base", "runtime"]),
    ("volume", &["base", "format", "runtime", "nbd"]),
    ("block", &["base", "policy", "format", "engine", "runtime", "net", "nbd", "volume", "cache"]),
    ("replay", &["base", "format", "engine", "runtime", "trace", "nbd", "volume"]),
    (
        "cli",
        &[
            "base", "policy", "format", "engine", "trace", "lab", "sim", "runtime", "net",
            "settings", "nbd", "volume", "cache", "kv", "block", "replay",
        ],
    ),
];

/// The crates to which time, randomness and I/O are arguments.
const BELOW_THE_LINE: &[&str] = &["base", "policy", "format", "trace", "engine", "lab", "sim"];

/// The crates that may hold `unsafe`, each time with its proof; every other one forbids it.
const UNSAFE: &[&str] = &["base", "runtime", "block"];

/// Crates from outside whose purpose is a clock, a socket, an event loop or the system's randomness.
const WORLDLY: &[&str] = &[
    "axum",
    "chrono",
    "fastrand",
    "getrandom",
    "io-uring",
    "libc",
    "mio",
    "nix",
    "quanta",
    "rand",
    "rustix",
    "socket2",
    "time",
    "tokio",
];

/// Of [`WORLDLY`], what a crate below the line may import for files alone: each line that names it names its `fs`. Traces that
/// are written have no name until they are whole, which the standard library has no call for.
const FOR_FILES: &[(&str, &str)] = &[("trace", "rustix")];

/// Crates that supply bytes, time, threads and I/O, and decide nothing about caching.
const HOSTS: &[&str] = &["cache", "kv", "block", "sim", "replay", "cli"];

/// Machines of the engine that only its nodes should call.
const MACHINES: &[&str] = &[
    "BlockShard",
    "KvShard",
    "FlashLog",
    "MapLog",
    "BlockAdmission",
    "RecordedShard",
    "RecordedLog",
    "RecordedAdmission",
    // What a host stores of these three. Where it calls them by itself it names them no more often: what is looked at in shards is in
    // the engine's `node/looks.rs`.
    "StoredShard",
    "StoredLog",
    "StoredAdmission",
    "WriteBudget",
    "KeptBudget",
    "Backoff",
    "Stays",
    "Limits",
    "Failures",
    "Detector",
    "Numbers",
];

/// Whose they are. What has such a name and is another crate's is none.
const OF_MACHINES: &[&str] = &["larder_engine", "larder_policy"];

/// Parts of hosts that may: studies of one machine, and other caches to measure against.
const STUDIES: &[&str] = &["crates/sim/src/lab/"];

const MACHINES_IN_HOSTS: Ratchet = Ratchet {
    file: "xtask/ratchets/machines.txt",
    remedy: "a host decides nothing about caching: ask the engine's node (a file that was moved takes its line along)",
};

/// One crate of the workspace, as far as the check needs it.
#[derive(Debug, Clone, Default)]
struct Member {
    /// Without the prefix `larder-`.
    name: String,
    /// Where its manifest is.
    folder: PathBuf,
    /// Names as in the manifest, whatever the kind of dependency.
    imports: Vec<String>,
    /// Names of normal dependencies: what the product is built from.
    builds_on: Vec<String>,
    inherits_lints: bool,
    /// Path and text of every Rust file.
    sources: Vec<(PathBuf, String)>,
}

pub(crate) fn check(root: &Path) -> Result<Findings, String> {
    let members = members(root)?;
    if members.is_empty() {
        return Err("cargo metadata lists no crate of this workspace".to_owned());
    }
    let mut found = findings(&members);
    let mut machines = Counted::new();
    for (member, modules) in modules(&members)? {
        found.extend(in_circles(&member.name, &modules));
        if HOSTS.contains(&member.name.as_str()) {
            machines_named(root, &modules, &mut machines);
        }
        if member.name == "engine" {
            found.extend(machines_renamed(root, &modules));
        }
    }
    found.extend(MACHINES_IN_HOSTS.check(root, &machines)?);
    found.extend(words::FRONT_END_WORDS.check(root, &front_end_words(&members))?);
    Ok(found)
}

/// Takes off the list what has gone.
pub(crate) fn shrink(root: &Path) -> Result<(), String> {
    let members = members(root)?;
    let mut machines = Counted::new();
    for (_, modules) in modules(&members)?.iter().filter(|(m, _)| HOSTS.contains(&m.name.as_str()))
    {
        machines_named(root, modules, &mut machines);
    }
    MACHINES_IN_HOSTS.shrink(root, &machines)?;
    words::FRONT_END_WORDS.shrink(root, &front_end_words(&members))
}

/// The lines of each file below the front ends whose texts speak of them.
fn front_end_words(members: &[Member]) -> Counted {
    let below = members.iter().filter(|m| words::BELOW.contains(&m.name.as_str()));
    let files = below.flat_map(|m| &m.sources);
    let named = files.map(|(path, text)| (path.display().to_string(), text));
    named
        .filter(|(path, _)| path.contains("/src/"))
        .map(|(path, text)| (path.clone(), words::count(&path, text)))
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// The modules of each crate's library and of its program.
fn modules(members: &[Member]) -> Result<Vec<(&Member, Modules)>, String> {
    let mut all = Vec::new();
    for member in members {
        for first in ["src/lib.rs", "src/main.rs"] {
            let first = member.folder.join(first);
            if first.is_file() {
                all.push((member, Modules::read(&first)?));
            }
        }
    }
    Ok(all)
}

/// Imports between folders that go in a circle, each with the remedy.
fn in_circles(name: &str, modules: &Modules) -> Findings {
    circles::in_circles(name, modules)
        .into_iter()
        .map(|arrow| {
            format!(
                "{arrow}: part of a circle: let one of the two folders know the other, not both; move what both need below them"
            )
        })
        .collect()
}

fn machines_named(root: &Path, modules: &Modules, into: &mut Counted) {
    for module in modules.0.values() {
        let file = module.file.strip_prefix(root).unwrap_or(&module.file).display().to_string();
        if STUDIES.iter().any(|study| file.starts_with(study)) {
            continue;
        }
        for machine in MACHINES {
            if module.is_anothers(machine, OF_MACHINES) {
                continue;
            }
            if let Some(count) = module.idents.get(*machine) {
                *into.entry(format!("{file} {machine}")).or_default() += count;
            }
        }
    }
}

/// Machines that the engine gives out under a name that is on no list: a host that has it from there would not be seen.
fn machines_renamed(root: &Path, modules: &Modules) -> Findings {
    let mut found = Findings::new();
    for module in modules.0.values() {
        let file = module.file.strip_prefix(root).unwrap_or(&module.file).display();
        let renamed = module.renamed();
        let machines =
            renamed.filter(|(name, is)| MACHINES.contains(is) && !MACHINES.contains(name));
        found.extend(machines.map(|(name, is)| {
            format!("{file}: gives the machine {is} as {name}: put that name on the list in xtask/src/edges.rs too")
        }));
    }
    found
}

fn findings(members: &[Member]) -> Findings {
    let rules: BTreeMap<&str, &[&str]> = MAY_IMPORT.iter().copied().collect();
    let mut found = Findings::new();
    for member in members.iter().filter(|m| m.name != "xtask") {
        let name = member.name.as_str();
        let Some(allowed) = rules.get(name) else {
            found.push(format!(
                "{name}: has no place in the order of imports; give it one in xtask/src/edges.rs"
            ));
            continue;
        };
        for import in &member.imports {
            let Some(import) = import.strip_prefix("larder-") else { continue };
            // A crate's tests may ask for a feature of the crate itself.
            if import != name && !allowed.contains(&import) {
                found.push(format!(
                    "{name} imports {import}: it may import only [{}]",
                    allowed.join(", ")
                ));
            }
        }
        if !member.inherits_lints {
            found.push(format!("{name}: Cargo.toml lacks `[lints] workspace = true`"));
        }
        let first = |path: &Path| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
        let forbids = |text: &str| text.lines().any(|line| line == "#![forbid(unsafe_code)]");
        for (path, text) in member.sources.iter().filter(|(path, _)| first(path)) {
            if !UNSAFE.contains(&name) && !forbids(text) {
                found.push(format!("{}: lacks `#![forbid(unsafe_code)]`", path.display()));
            }
        }
        if BELOW_THE_LINE.contains(&name) {
            found.extend(worldly(member));
        }
    }
    found
}

/// What a crate below the line does that only those above may.
fn worldly(member: &Member) -> Findings {
    let name = &member.name;
    let mut found = Findings::new();
    for import in member.builds_on.iter().filter(|i| WORLDLY.contains(&i.as_str())) {
        let (crate_name, fs) = (format!("{import}::"), format!("{import}::fs"));
        let mut lines = member.sources.iter().flat_map(|(_, text)| text.lines());
        if FOR_FILES.contains(&(name.as_str(), import.as_str()))
            && lines.all(|l| l.matches(&crate_name).count() == l.matches(&fs).count())
        {
            continue;
        }
        found.push(format!(
            "{name} imports {import}: clocks, sockets and randomness live in the runtime and above"
        ));
    }
    for (path, text) in &member.sources {
        // What measures needs a clock, and is no part of the crate.
        if path.components().any(|c| c.as_os_str() == "examples" || c.as_os_str() == "benches") {
            continue;
        }
        for (number, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("//") {
                continue;
            }
            if line.contains("clippy::disallowed_") {
                found.push(format!(
                    "{}:{}: {name} sets aside the ban on clocks, threads and randomness",
                    path.display(),
                    number + 1
                ));
            }
        }
    }
    found
}

fn members(root: &Path) -> Result<Vec<Member>, String> {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["metadata", "--format-version=1", "--no-deps", "--locked"])
        .current_dir(root)
        .output()
        .map_err(|e| format!("cannot start cargo metadata: {e}"))?;
    if !output.status.success() {
        return Err(format!(
            "cargo metadata failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)
        .map_err(|e| format!("cargo metadata printed no JSON: {e}"))?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata lists no packages")?;
    packages.iter().map(|package| member(root, package)).collect()
}

fn member(root: &Path, package: &Value) -> Result<Member, String> {
    let full = package["name"].as_str().ok_or("a package has no name")?;
    let manifest = Path::new(package["manifest_path"].as_str().ok_or("a package has no manifest")?);
    let dependencies = package["dependencies"].as_array().cloned().unwrap_or_default();
    let names = |wanted: &dyn Fn(&Value) -> bool| -> Vec<String> {
        dependencies
            .iter()
            .filter(|d| wanted(d))
            .filter_map(|d| d["name"].as_str().map(str::to_owned))
            .collect()
    };
    let text = read(manifest)?;
    let mut sources = Vec::new();
    let folder = manifest.parent().ok_or("a manifest has no folder")?;
    rust_files(folder, &mut sources)?;
    Ok(Member {
        name: full.strip_prefix("larder-").unwrap_or(full).to_owned(),
        folder: folder.to_owned(),
        imports: names(&|_| true),
        builds_on: names(&|d| d["kind"].is_null()),
        inherits_lints: inherits_lints(&text),
        sources: sources
            .into_iter()
            .map(|(p, t)| (p.strip_prefix(root).map(Path::to_path_buf).unwrap_or(p), t))
            .collect(),
    })
}

fn inherits_lints(manifest: &str) -> bool {
    let mut lines = manifest.lines().map(str::trim);
    lines.any(|line| line == "[lints]") && lines.next() == Some("workspace = true")
}

fn rust_files(folder: &Path, into: &mut Vec<(PathBuf, String)>) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for entry in entries {
        let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
        if path.is_dir() {
            rust_files(&path, into)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = read(&path)?;
            into.push((path, text));
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sound(name: &str, imports: &[&str]) -> Member {
        Member {
            name: name.to_owned(),
            folder: PathBuf::new(),
            imports: imports.iter().map(|&i| i.to_owned()).collect(),
            builds_on: imports.iter().map(|&i| i.to_owned()).collect(),
            inherits_lints: true,
            sources: vec![(
                PathBuf::from("lib.rs"),
                "//! clippy::disallowed_methods is spoken of here\n".to_owned(),
            )],
        }
    }

    #[test]
    fn a_sound_workspace_passes() {
        let members = [
            sound("base", &["thiserror"]),
            sound("engine", &["larder-base", "larder-policy", "larder-format"]),
            sound("runtime", &["larder-base", "rustix", "libc"]),
            sound("cli", &["larder-kv", "larder-sim", "larder-trace"]),
            sound("xtask", &["serde_json"]),
        ];
        assert_eq!(findings(&members), Findings::new());
    }

    #[test]
    fn an_import_upward_is_found() {
        let found = findings(&[sound("engine", &["larder-base", "larder-runtime"])]);
        assert_eq!(found, ["engine imports runtime: it may import only [base, policy, format]"]);
        assert_eq!(findings(&[sound("trace", &["larder-policy"])]).len(), 1);
        assert_eq!(findings(&[sound("kv", &["larder-sim"])]).len(), 1);
    }

    #[test]
    fn an_import_upward_counts_in_tests_too() {
        let mut member = sound("policy", &["larder-base"]);
        member.imports.push("larder-sim".to_owned());
        assert_eq!(findings(&[member]), ["policy imports sim: it may import only [base]"]);
    }

    #[test]
    fn a_ban_set_aside_is_found_below_the_line_alone() {
        let allow = "#![allow(\n    clippy::disallowed_methods,\n)]\n".to_owned();
        let mut engine = sound("engine", &[]);
        engine.sources.push((PathBuf::from("crates/engine/src/kv/shard.rs"), allow.clone()));
        assert_eq!(
            findings(&[engine]),
            [
                "crates/engine/src/kv/shard.rs:2: engine sets aside the ban on clocks, threads and randomness"
            ]
        );
        let mut measured = sound("sim", &[]);
        measured.sources.push((PathBuf::from("crates/sim/examples/rate.rs"), allow.clone()));
        assert_eq!(findings(&[measured]), Findings::new());
        let mut runtime = sound("runtime", &[]);
        runtime.sources.push((PathBuf::from("crates/runtime/src/lib.rs"), allow));
        assert_eq!(findings(&[runtime]), Findings::new());
    }

    #[test]
    fn the_world_is_not_imported_below_the_line() {
        assert_eq!(
            findings(&[sound("sim", &["larder-base", "rand"])]),
            ["sim imports rand: clocks, sockets and randomness live in the runtime and above"]
        );
        // For files, and for nothing else.
        let mut traces = sound("trace", &["larder-base", "rustix"]);
        assert_eq!(findings(std::slice::from_ref(&traces)), Findings::new());
        traces.sources.push(("a.rs".into(), "use rustix::net::connect;".to_owned()));
        assert_eq!(findings(&[traces]).len(), 1);
        let mut for_tests_only = sound("trace", &["larder-base"]);
        for_tests_only.imports.push("rustix".to_owned());
        assert_eq!(findings(&[for_tests_only]), Findings::new());
    }

    #[test]
    fn a_crate_that_does_not_forbid_unsafe_is_found() {
        let with = |name: &str, text: &str| {
            let mut member = sound(name, &[]);
            member.sources.push((format!("crates/{name}/src/lib.rs").into(), text.to_owned()));
            findings(&[member])
        };
        let lacks = "crates/nbd/src/lib.rs: lacks `#![forbid(unsafe_code)]`";
        assert_eq!(with("nbd", "//! #![forbid(unsafe_code)]\n"), [lacks]);
        assert_eq!(with("nbd", "//! Bytes.\n\n#![forbid(unsafe_code)]\n"), Findings::new());
        assert_eq!(with("runtime", "//! Rings.\n"), Findings::new());
    }

    #[test]
    fn a_crate_outside_the_order_or_the_lints_is_found() {
        assert_eq!(findings(&[sound("extras", &[])]).len(), 1);
        let mut stray = sound("format", &["larder-base"]);
        stray.inherits_lints = false;
        assert_eq!(findings(&[stray]), ["format: Cargo.toml lacks `[lints] workspace = true`"]);
        assert!(inherits_lints("[package]\nname = \"x\"\n\n[lints]\nworkspace = true\n"));
        assert!(!inherits_lints(
            "[package]\nname = \"x\"\n\n[lints.rust]\nmissing_docs = \"allow\"\n"
        ));
    }

    #[test]
    fn a_circle_between_folders_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod x; use crate::b::Y;"),
            ("a/x.rs", ""),
            ("b/mod.rs", "mod y; use crate::a::X;"),
            ("b/y.rs", ""),
        ] {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let found = in_circles("sim", &Modules::read(&dir.path().join("lib.rs")).unwrap());
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("sim: a -> b: part of a circle: "), "{found:?}");
    }

    /// A host that names a machine of the engine is found where it stands; one in a comment, a test or a study is none.
    #[test]
    fn machines_in_hosts_are_counted_by_file() {
        let dir = tempfile::tempdir().unwrap();
        let src = dir.path().join("crates/sim/src");
        std::fs::create_dir_all(src.join("lab")).unwrap();
        for (name, text) in [
            ("lib.rs", "mod lab; mod a; #[cfg(test)] mod t; // KvShard"),
            (
                "a.rs",
                "use larder_engine::kv::{KvShard, Now};\nfn f(s: &mut KvShard) { g!(e::block::MapLog::new()) }",
            ),
            ("t.rs", "use e::KvShard;"),
            ("lab/mod.rs", "use e::KvShard;"),
        ] {
            std::fs::write(src.join(name), text).unwrap();
        }
        let mut found = Counted::new();
        machines_named(dir.path(), &Modules::read(&src.join("lib.rs")).unwrap(), &mut found);
        let expected = [("crates/sim/src/a.rs KvShard", 2), ("crates/sim/src/a.rs MapLog", 1)];
        assert_eq!(found, expected.map(|(line, count)| (line.to_owned(), count)).into());
    }

    /// Under another name it is a machine still, and what has the name of one may be none.
    #[test]
    fn names_of_machines_are_followed() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("lib.rs", "mod a; mod b; mod c;"),
            (
                "a.rs",
                "pub use larder_engine::x::{RecordedShard as StoredShard, RecordedLog as Log};",
            ),
            ("b.rs", "use larder_engine::block::node::limits::{self, Limits}; fn f(l: &Limits) {}"),
            ("c.rs", "use crate::b::Limits; fn f(l: &Limits) {}"),
        ] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let modules = Modules::read(&dir.path().join("lib.rs")).unwrap();
        let remedy = "put that name on the list in xtask/src/edges.rs too";
        assert_eq!(
            machines_renamed(dir.path(), &modules),
            [format!("a.rs: gives the machine RecordedLog as Log: {remedy}")]
        );
        let mut found = Counted::new();
        machines_named(dir.path(), &modules, &mut found);
        // Where one is given another name it is named once.
        let in_a = [("a.rs RecordedLog", 1), ("a.rs RecordedShard", 1)];
        let expected = in_a.into_iter().chain([("b.rs Limits", 2)]);
        assert_eq!(found, expected.map(|(line, count)| (line.to_owned(), count)).collect());
    }

    #[test]
    fn this_workspace_passes() {
        assert_eq!(check(&crate::root()).unwrap(), Findings::new());
    }
}
