//! What `larder kv` and `larder block` leave in shared memory: it goes with its owner, and `larder maps` shows and removes it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::daemon::{Daemon, prepare};
use serde_json::Value;

fn maps(arguments: &[&str]) -> (Option<i32>, String, String) {
    let larder = env!("CARGO_BIN_EXE_larder");
    let output = Command::new(larder).arg("maps").args(arguments).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The map of this data or state directory.
fn map_of(directory: &Path) -> Option<Value> {
    let (code, text, error) = maps(&["list", "--json"]);
    assert_eq!(code, Some(0), "{error}");
    let all: Value = serde_json::from_str(&text).unwrap();
    let all = all["maps"].as_array().unwrap();
    all.iter().find(|map| map["directory"] == *directory.to_str().unwrap()).cloned()
}

fn file_of(map: &Value) -> PathBuf {
    Path::new("/dev/shm").join(map["name"].as_str().unwrap())
}

fn note_of(map: &Value) -> PathBuf {
    file_of(map).with_extension("owner")
}

fn kv(dir: &Path) -> Daemon {
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command.env_remove("RUST_LOG").env_remove("STATE_DIRECTORY");
    command.args(["kv", "--http", "off", "-m", "16", "--flash-size", "64m", "-s"]);
    command.arg(dir.join("socket")).arg("--data-dir").arg(dir.join("data"));
    Daemon::of(command)
}

#[test]
fn a_map_of_kv_goes_with_its_data_directory() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let server = kv(one.path());
    let data = one.path().canonicalize().unwrap().join("data");
    let map = map_of(&data).unwrap();
    assert_eq!(map["state"], "in-use", "{map:#}");
    assert_eq!(map["command"], "larder kv", "{map:#}");
    let name = map["name"].as_str().unwrap();
    let (code, _, error) = maps(&["remove", name]);
    assert!(code == Some(1) && error.contains("in use by process"), "{code:?} {error}");

    server.kill();
    assert_eq!(map_of(&data).unwrap()["state"], "warm");
    // Another start, and one of who has no flash, leave it alone; so does a command without its name.
    kv(two.path()).stop();
    assert_eq!(maps(&["remove"]).0, Some(0));
    assert!(file_of(&map).exists() && note_of(&map).exists());

    drop(one);
    kv(two.path()).stop();
    assert!(!file_of(&map).exists() && !note_of(&map).exists());
    let (code, _, error) = maps(&["remove", name]);
    assert!(code == Some(2) && error.contains("larder maps list"), "{code:?} {error}");
    // A clean stop has left none.
    assert_eq!(map_of(&two.path().canonicalize().unwrap().join("data")), None);
}

/// A start that is refused once its map is there takes it away again; one that was there before stays.
#[test]
fn a_refused_start_leaves_no_map_that_it_has_made() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().canonicalize().unwrap().join("data");
    let record = dir.path().join("record");
    std::fs::write(&record, "another's").unwrap();
    let refused = |flash: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command.env_remove("RUST_LOG").env_remove("STATE_DIRECTORY");
        command.args(["kv", "--http", "off", "-m", "16", "--flash-size", flash, "-s"]);
        command.arg(dir.path().join("socket")).arg("--data-dir").arg(&data);
        let output = command.arg("--record").arg(&record).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        said
    };
    // The same file system as before, and a data directory that is there already: only the map is this start's.
    kv(dir.path()).stop();
    assert_eq!(map_of(&data), None, "a clean stop leaves none");
    let said = refused("64m");
    assert!(said.contains("record"), "{said}");
    assert_eq!(map_of(&data), None);
    kv(dir.path()).kill();
    let map = map_of(&data).unwrap();
    refused("64m");
    assert_eq!(map_of(&data).map(|m| m["name"].clone()), Some(map["name"].clone()));
}

#[test]
fn a_map_of_block_goes_with_its_cache() {
    let (one, two) = (prepare("set:8"), prepare("set:8"));
    let daemon = Daemon::start(one.path(), &[]);
    let state = one.path().canonicalize().unwrap().join("state");
    let map = map_of(&state).unwrap();
    assert_eq!((&map["state"], &map["command"]), (&"in-use".into(), &"larder block".into()));
    daemon.kill();
    // Another daemon with another state directory.
    Daemon::start(two.path(), &[]).stop();
    assert!(file_of(&map).exists());
    drop(one);
    Daemon::start(two.path(), &[]).stop();
    assert!(!file_of(&map).exists() && !note_of(&map).exists());
}

#[test]
fn a_map_that_is_removed_by_name_leaves_a_cold_cache() {
    let dir = tempfile::tempdir().unwrap();
    kv(dir.path()).kill();
    let map = map_of(&dir.path().canonicalize().unwrap().join("data")).unwrap();
    let (code, said, error) = maps(&["remove", map["name"].as_str().unwrap()]);
    assert_eq!(code, Some(0), "{error}");
    assert!(said.contains("is cold at its next start"), "{said}");
    let mut server = kv(dir.path());
    assert!(server.said("cold: no memory of an earlier run"), "{:#?}", server.seen);
    server.stop();
}

/// A map that an earlier version made opens as before, and is noted from then on.
#[test]
fn a_map_without_an_owner_is_warm() {
    let dir = tempfile::tempdir().unwrap();
    kv(dir.path()).kill();
    let data = dir.path().canonicalize().unwrap().join("data");
    let map = map_of(&data).unwrap();
    std::fs::remove_file(note_of(&map)).unwrap();
    let (_, table, _) = maps(&["list"]);
    let line = table.lines().find(|l| l.contains(map["name"].as_str().unwrap())).unwrap();
    assert!(line.contains("owner unknown"), "{table}");
    let mut server = kv(dir.path());
    assert!(server.said("index found in memory"), "{:#?}", server.seen);
    assert_eq!(map_of(&data).unwrap()["name"], map["name"]);
    server.stop();
}

/// Where there are no maps but the test's own.
#[test]
#[cfg_attr(
    without = "mount-namespace",
    ignore = "needs a mount namespace of its own (unshare -rm)"
)]
fn all_that_is_not_in_use_goes_with_yes() {
    let script = "mount -t tmpfs none /dev/shm && cd /dev/shm && umask 077 && \
        for n in 1 2; do head -c 8192 /dev/zero >larder-0000000$n-0000-0000-0000-000000000000; done && \
        touch other && \"$1\" maps remove && ls && \"$1\" maps remove --yes && ls && \"$1\" maps list";
    let larder = env!("CARGO_BIN_EXE_larder");
    let output = Command::new("unshare").args(["-rm", "sh", "-c", script, "sh", larder]).output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
    let wanted = "nothing to remove: 2 maps, none of them stale (`larder maps list`)\n\
        larder-00000001-0000-0000-0000-000000000000\nlarder-00000002-0000-0000-0000-000000000000\nother\n";
    assert!(text.starts_with(wanted), "{text}");
    assert_eq!(text.matches("is cold at its next start").count(), 2, "{text}");
    assert!(text.ends_with("\nother\nno maps in /dev/shm\n"), "{text}");
}
