//! What an operator keeps a cache in order with: `pin`, `never`, `unpin`, `rules`, `extents`, `prefetch` and `check`.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::daemon::ask::{ask, counter, fits_a_terminal, json, settle, status_when};
use crate::daemon::{Daemon, prepare, read, session, session_of, write};
use larder_base::Rng;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// So seldom that nothing is admitted.
const NOTHING: [&str; 2] = ["--admission", "touch_count(threshold=200,bits=8,segment=4k)"];

fn cached(dir: &Path, offset: u64) -> bool {
    json(dir, &["explain", "disk", &offset.to_string(), "--byte"])["cached"] == true
}

/// A volume of 32 MiB, each block with its own bytes.
fn fill_disk(dir: &Path) -> Vec<u8> {
    let bytes: Vec<u8> = (0..32 * MIB).map(|at| (at / 4096 * 7 + at % 251) as u8).collect();
    std::fs::write(dir.join("disk"), &bytes).unwrap();
    bytes
}

#[test]
fn pinned_ranges_are_cached_and_kept_over_a_restart() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let bytes = fill_disk(dir);
    let daemon = Daemon::start(dir, &NOTHING);
    let (code, text, _) = ask(dir, &["pin", "disk", "1m..2m", "8192..8200", "--label", "index"]);
    assert!(
        code == 0 && text.contains("cached always, and kept from eviction: 2 ranges"),
        "{text}"
    );
    // In sectors, from there to the end of the volume.
    assert_eq!(json(dir, &["never", "disk", "40960..", "--lba"])["ranges"], 3);
    let mut s = session(dir);
    for at in (0..24 * MIB).step_by(1 << 20) {
        assert!(read(&mut *s, at, 1 << 20) == bytes[at as usize..][..1 << 20]);
    }
    // A MiB, and a line of which eight bytes are pinned.
    settle(dir);
    let status = json(dir, &["status"]);
    assert_eq!(counter(&status, "fills"), 257, "nothing else is cached");
    assert_eq!(
        (&status["volumes"][0]["selected"], &status["cache"]["pinned_bytes"]),
        (&3.into(), &(MIB + 8).into())
    );
    assert!(cached(dir, MIB) && cached(dir, 8192) && !cached(dir, 0) && !cached(dir, 21 * MIB));
    assert!(status["verdicts"]["never"].as_u64() >= Some(4), "{status:#}");
    drop(s);
    daemon.stop();

    let daemon = Daemon::start(dir, &NOTHING);
    let rules = json(dir, &["rules", "disk"]);
    let want = |start: u64, end: u64, rule: &str, label: &str| serde_json::json!({ "start": start, "end": end, "rule": rule, "label": label });
    let all = vec![
        want(8192, 8200, "always", "index"),
        want(MIB, 2 * MIB, "always", "index"),
        want(20 * MIB, 32 * MIB, "never", ""),
    ];
    assert_eq!(rules["ranges"], Value::Array(all));
    fits_a_terminal(dir, &["rules", "disk"], &["always", "never", "index"]);
    let (_, text, _) = ask(dir, &["rules", "disk"]);
    assert!(text.contains("1048576..2097152") && text.contains("all else: policy"), "{text}");
    assert!(cached(dir, MIB), "warm");
    assert_eq!(json(dir, &["unpin", "disk", "--label", "index"])["ranges"], 1);
    assert_eq!(json(dir, &["unpin", "disk"])["ranges"], 0);
    // The whole volume never: what is cached of it goes, and an exception holds.
    let gone = json(dir, &["never", "disk"]);
    assert_eq!((&gone["dropped_lines"], &gone["ranges"]), (&257.into(), &0.into()));
    json(dir, &["pin", "disk", "..64k"]);
    let mut s = session(dir);
    read(&mut *s, 0, 1 << 20);
    settle(dir);
    assert_eq!(counter(&json(dir, &["status"]), "fills"), 16);
    drop(s);
    daemon.kill();
    // Not even a kill forgets it.
    let daemon = Daemon::start(dir, &[]);
    let rules = json(dir, &["rules", "disk"]);
    assert_eq!((&rules["whole"], rules["ranges"].as_array().unwrap().len()), (&"never".into(), 1));
    daemon.stop();
}

#[test]
fn a_partition_and_more_than_fits() {
    let dir = prepare("set:8");
    let dir = dir.path();
    fill_disk(dir);
    // An MBR with partitions 1 and 3.
    let mut sector = [0u8; 512];
    for (number, start, sectors) in [(1usize, 2048u32, 4096u32), (3, 8192, 2048)] {
        let at = 446 + 16 * (number - 1);
        sector[at + 4] = 0x83;
        sector[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
        sector[at + 12..at + 16].copy_from_slice(&sectors.to_le_bytes());
    }
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    File::options().write(true).open(dir.join("disk")).unwrap().write_all_at(&sector, 0).unwrap();
    let big = dir.join("big");
    File::create(&big).unwrap().set_len(256 * MIB).unwrap();
    let volume = format!("big=file:{}", big.display());
    let daemon = Daemon::start(dir, &["--volume", &volume]);
    json(dir, &["never", "disk", "--partition", "3"]);
    let rules = json(dir, &["rules", "disk"]);
    let found = &rules["ranges"][0];
    assert_eq!((&found["start"], &found["end"]), (&(4 * MIB).into(), &(5 * MIB).into()));
    assert_eq!(found["label"], "partition 3");
    json(dir, &["unpin", "disk", "--partition", "3"]);
    assert_eq!(json(dir, &["rules", "disk"])["ranges"], Value::Array(Vec::new()));
    for (volume, number, text) in
        [("disk", "2", "has no partition 2: it has 1, 3"), ("big", "1", "has no partition table")]
    {
        let (code, _, error) = ask(dir, &["pin", volume, "--partition", number]);
        assert!(code == 1 && error.contains(text), "{error}");
    }
    // It is said when more is pinned than can be kept, and in the status until less is.
    let (code, text, _) = ask(dir, &["pin", "big"]);
    assert!(code == 0 && text.contains("warning: 256 MiB are pinned"), "{text}");
    assert!(json(dir, &["status"])["alarms"][0].as_str().unwrap().contains("pinned"));
    json(dir, &["unpin", "big"]);
    assert!(json(dir, &["status"])["alarms"].as_array().unwrap().is_empty());
    daemon.stop();
}

/// A file is pinned where debugfs says that it lies. It takes a loop device, and the right to mount.
#[test]
#[cfg_attr(
    any(without = "mkfs.ext4", without = "debugfs", without = "mount", without = "loop"),
    ignore = "needs mkfs.ext4 and debugfs (Debian: e2fsprogs), root and a loop device"
)]
fn a_file_on_a_mounted_volume() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let (tree, mount) = (dir.join("tree"), dir.join("mnt"));
    std::fs::create_dir(&tree).unwrap();
    std::fs::create_dir(&mount).unwrap();
    std::fs::write(tree.join("index"), vec![3; 300_000]).unwrap();
    std::fs::write(tree.join("other"), vec![4; 300_000]).unwrap();
    let disk = dir.join("disk");
    let run = |program: &str, arguments: &[&str]| {
        let out = Command::new(program).args(arguments).output();
        let out = out.unwrap_or_else(|e| panic!("{program}: {e}"));
        assert!(out.status.success(), "{program}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let (image, at) = (disk.to_str().unwrap(), mount.to_str().unwrap());
    run("mkfs.ext4", &["-q", "-F", "-b", "4096", "-d", tree.to_str().unwrap(), image]);
    let blocks = run("debugfs", &["-R", "blocks /index", image]);
    run("mount", &["-o", "loop,ro", image, at]);
    struct Mounted(String);
    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg(&self.0).status();
        }
    }
    let mounted = Mounted(at.to_owned());
    let daemon = Daemon::start(dir, &NOTHING);
    let file = mount.join("index");
    let file = file.to_str().unwrap();
    assert_eq!(json(dir, &["pin", "disk", "--file", file])["pinned_bytes"], 74 * 4096);
    let lines: Vec<u64> =
        blocks.split_whitespace().map(|b| b.parse::<u64>().unwrap() * 4096).collect();
    let rules = json(dir, &["rules", "disk"]);
    let ranges = rules["ranges"].as_array().unwrap();
    let covered = |at: u64| {
        let of =
            |r: &Value| (r["start"].as_u64().unwrap()..r["end"].as_u64().unwrap()).contains(&at);
        ranges.iter().any(of)
    };
    assert!(lines.len() == 74 && lines.iter().all(|&at| covered(at)), "{rules}");
    assert!(ranges.iter().all(|r| r["label"] == file), "{rules}");

    // The same by way of a list, as a guest would send it.
    let larder = env!("CARGO_BIN_EXE_larder");
    let list = Command::new(larder).args(["block", "extents", file]).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    json(dir, &["unpin", "disk", "--file", file]);
    assert_eq!(json(dir, &["rules", "disk"])["ranges"].as_array().unwrap().len(), 0);
    let mut child = Command::new(larder)
        .args(["block", "pin", "disk", "--ranges", "-", "--label", file, "--state-dir"])
        .arg(dir.join("state"))
        .args(["--answer-within", "120"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(list.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(json(dir, &["rules", "disk"])["ranges"], rules["ranges"]);

    // A disk of another size is another disk.
    let other = dir.join("other");
    File::create(&other).unwrap().set_len(MIB).unwrap();
    json(dir, &["attach", &format!("other=file:{}", other.display())]);
    let (code, _, error) = ask(dir, &["pin", "other", "--file", file]);
    assert!(code == 1 && error.contains("name the volume that is mounted there"), "{error}");
    drop(mounted);
    daemon.stop();
}

#[test]
fn prefetch_brings_what_is_missing_and_says_what_it_left() {
    for placement in ["set:8", "full", "sparse"] {
        let dir = prepare(placement);
        let dir = dir.path();
        let bytes = fill_disk(dir);
        let daemon = Daemon::start(dir, &NOTHING);
        json(dir, &["never", "disk", "2m..3m"]);
        let done = json(dir, &["prefetch", "disk", "..8m"]);
        assert_eq!((&done["lines"], &done["cached_before"]), (&2048.into(), &0.into()), "{done}");
        assert_eq!((&done["brought"], &done["never"]), (&1792.into(), &256.into()), "{done}");
        let again = json(dir, &["prefetch", "disk", "..9m"]);
        assert_eq!(
            (&again["cached_before"], &again["brought"]),
            (&1792.into(), &256.into()),
            "{again}"
        );
        let mut s = session(dir);
        assert!(read(&mut *s, 0, 2 << 20) == bytes[..2 << 20]);
        assert!(read(&mut *s, 3 * MIB, 6 << 20) == bytes[3 << 20..9 << 20]);
        let status = json(dir, &["status"]);
        assert_eq!(counter(&status, "read_hits"), 2048, "{placement}");
        let (code, text, _) = ask(dir, &["prefetch", "disk", "..8m"]);
        assert!(code == 0 && text.contains("1 MiB is selected never"), "{text}");
        drop(s);
        daemon.stop();
    }
}

#[test]
fn prefetch_gives_way_stops_and_stays_within_the_budget() {
    let dir = prepare("set:8");
    let dir = dir.path();
    fill_disk(dir);
    let big = dir.join("big");
    File::create(&big).unwrap().set_len(8 << 30).unwrap();
    let volume = format!("big=file:{}", big.display());
    let daemon = Daemon::start(dir, &["--volume", &volume]);
    // More than there is room for: it stops when the cache has been filled once.
    let full = json(dir, &["prefetch", "big"]);
    let (brought, slots) = (
        full["brought"].as_u64().unwrap(),
        json(dir, &["status"])["cache"]["slots"].as_u64().unwrap(),
    );
    assert!(full["full"] == true && brought > slots / 2 && brought <= slots, "{full}");
    // A client goes on meanwhile, and whoever asked may go away.
    json(dir, &["drop", "big"]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["block", "prefetch", "big", "4g..", "--state-dir"])
        .arg(dir.join("state"))
        .args(["--answer-within", "120"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut s = session(dir);
    for round in 0..50u8 {
        write(&mut *s, u64::from(round) * 65_536, 65_536, round);
        assert!(read(&mut *s, u64::from(round) * 65_536, 65_536).iter().all(|&b| b == round));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // When it has noticed, another may begin.
    let mut last = String::new();
    let begun = (0..1200).any(|_| {
        std::thread::sleep(Duration::from_millis(100));
        let (code, _, error) = ask(dir, &["prefetch", "disk", "..64k"]);
        last = error;
        code == 0
    });
    assert!(begun, "{last}");
    assert!(read(&mut *s, 0, 65_536).iter().all(|&b| b == 0));
    drop(s);
    daemon.stop();
    let tight = ["--endurance-tbw", "0.001", "--no-first-fill", "--volume", &volume];
    let daemon = Daemon::start(dir, &tight);
    // It fails where the budget has nothing left for it at all.
    let (code, out, error) = ask(dir, &["prefetch", "big", "1g..1028m", "--json"]);
    let done: Value = serde_json::from_str(&out).unwrap();
    let nothing = done["brought"] == 0;
    assert_eq!(code, i32::from(nothing), "{error}");
    assert_eq!(error.contains("nothing was brought"), nothing, "{error}");
    let sum: u64 =
        ["budget", "brought", "no_place"].iter().map(|n| done[n].as_u64().unwrap()).sum();
    assert!(done["budget"].as_u64().unwrap() > 900 && sum == 1024, "{done}");
    daemon.stop();
}

#[test]
fn check_finds_rot_and_stores_that_changed() {
    for placement in ["set:8", "full", "sparse"] {
        let dir = prepare(placement);
        let dir = dir.path();
        let bytes = fill_disk(dir);
        let daemon = Daemon::start(dir, &["--no-watch"]);
        json(dir, &["prefetch", "disk", "..8m"]);
        let fine = json(dir, &["check", "--compare"]);
        assert_eq!((&fine["lines"], &fine["compared"]), (&2048.into(), &2048.into()), "{fine}");
        assert_eq!((&fine["corrupt"], &fine["differing"]), (&0.into(), &0.into()), "{fine}");

        // Rot on the cache device, and a change of the store behind the daemon's back.
        let place = json(dir, &["explain", "disk", "1048576", "--byte"]);
        let at = place["device_offset"].as_u64().unwrap();
        let device = File::options().write(true).open(dir.join("cache")).unwrap();
        device.write_all_at(&[0xee; 100], at + 1000).unwrap();
        device.sync_all().unwrap();
        let disk = File::options().write(true).open(dir.join("disk")).unwrap();
        disk.write_all_at(&[0xdd], 2 * MIB + 5).unwrap();
        disk.sync_all().unwrap();
        let (code, out, error) = ask(dir, &["check", "--compare", "--json"]);
        assert!(code == 1 && error.contains("2 faults found"), "{error}");
        let found: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((&found["corrupt"], &found["differing"]), (&1.into(), &1.into()), "{found}");
        let mut offsets: Vec<u64> = found["faults"]
            .as_array()
            .unwrap()
            .iter()
            .map(|f| f["offset"].as_u64().unwrap())
            .collect();
        offsets.sort_unstable();
        assert_eq!(offsets, [MIB, 2 * MIB]);
        let (code, out, _) = ask(dir, &["check", "--volume", "disk"]);
        assert!(code == 1 && out.contains("line at byte 1048576 of disk"), "{out}");

        // Dropped, they are read from the store.
        let (code, out, _) = ask(dir, &["check", "--compare", "--drop", "--json"]);
        let found: Value = serde_json::from_str(&out).unwrap();
        assert!(code == 1 && found["dropped"] == 2, "{found}");
        assert_eq!(json(dir, &["check", "--compare"])["lines"], 2046);
        let mut s = session(dir);
        assert!(read(&mut *s, MIB, 4096) == bytes[1 << 20..][..4096]);
        assert_eq!(read(&mut *s, 2 * MIB, 4096)[5], 0xdd);
        assert_eq!(counter(&json(dir, &["status"]), "corrupt"), 0, "no client has met it");
        drop(s);
        daemon.stop();
    }
}

/// Lines that are written to while they are looked at are no faults.
#[test]
fn check_beside_a_writer() {
    let dir = prepare("full");
    let dir = dir.path();
    fill_disk(dir);
    let daemon = Daemon::start(dir, &[]);
    json(dir, &["prefetch", "disk", "..8m"]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut s = session(dir);
            let mut round = 0u64;
            while !stop.load(Ordering::Relaxed) {
                write(&mut *s, (round * 4099 % 2000) * 4096 + round % 3 * 512, 8192, round as u8);
                round += 1;
            }
        });
        for _ in 0..5 {
            let found = json(dir, &["check", "--compare"]);
            assert!(found["compared"].as_u64().unwrap() > 500, "{found}");
        }
        stop.store(true, Ordering::Relaxed);
    });
    daemon.stop();
}

#[test]
fn check_of_a_device_that_is_not_in_use() {
    for placement in ["set:8", "full", "sparse:64m"] {
        let dir = prepare(placement);
        let dir = dir.path();
        fill_disk(dir);
        let cache = dir.join("cache");
        let path = cache.to_str().unwrap();
        let check = |more: &[&str]| {
            let out = Command::new(env!("CARGO_BIN_EXE_larder"))
                .args(["block", "check", path])
                .args(more)
                .output()
                .unwrap();
            let text = |b: Vec<u8>| String::from_utf8_lossy(&b).into_owned();
            (out.status.code().unwrap(), text(out.stdout), text(out.stderr))
        };
        for (name, bytes, reason) in
            [("tiny", &b"root:x:0:0"[..], "it has only 10 bytes"), ("empty", b"", "it is empty")]
        {
            let path = dir.join(name);
            std::fs::write(&path, bytes).unwrap();
            let (code, message) = crate::daemon::larder(&["check", path.to_str().unwrap()]);
            let words = [name, "is no block cache", reason, "`larder block format`"];
            assert!(code == Some(1) && words.iter().all(|w| message.contains(w)), "{message}");
            assert!(!message.contains("does not exist yet"), "{message}");
        }
        let empty = check(&[]);
        assert!(empty.0 == 0 && empty.1.contains("0 (0 B)"), "{empty:?}");
        let daemon = Daemon::start(dir, &[]);
        json(dir, &["prefetch", "disk", "..8m"]);
        let at = json(dir, &["explain", "disk", "0"])["device_offset"].as_u64().unwrap();
        let (code, _, error) = check(&[]);
        assert!(code == 1 && error.contains("is in use"), "{error}");
        daemon.stop();
        let before = std::fs::read(&cache).unwrap();
        let (code, out, error) = check(&["--json"]);
        assert_eq!(code, 0, "{out} {error}");
        let found: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((&found["lines"], &found["clean"]), (&2048.into(), &true.into()), "{found}");
        assert_eq!(
            (&found["volumes"][0]["name"], &found["volumes"][0]["lines"]),
            (&"disk".into(), &2048.into())
        );

        // A bit of a line, a copy of the superblock.
        let device = File::options().write(true).open(&cache).unwrap();
        device.write_all_at(&[before[at as usize + 77] ^ 4], at + 77).unwrap();
        let (code, out, error) = check(&[]);
        assert!(code == 1 && error.contains("1 fault found"), "{out}{error}");
        assert!(out.contains("line at byte 0 of disk") && out.contains(&at.to_string()), "{out}");
        device.write_all_at(&[before[700] ^ 1], 700).unwrap();
        device.write_all_at(&[before[65_536 + 700] ^ 1], 65_536 + 700).unwrap();
        let (code, _, error) = check(&[]);
        assert!(code == 1 && error.contains("damaged"), "{error}");
        device.write_all_at(&before[700..701], 700).unwrap();
        let one = check(&[]);
        let other = {
            device.write_all_at(&before[65_536 + 700..][..1], 65_536 + 700).unwrap();
            device.write_all_at(&[before[700] ^ 1], 700).unwrap();
            check(&[])
        };
        for (code, out, _) in [one, other] {
            assert!(code == 1 && out.contains("1 copy DAMAGED"), "{out}");
        }
        device.write_all_at(&before[700..701], 700).unwrap();
        device.write_all_at(&before[at as usize + 77..][..1], at + 77).unwrap();
        assert_eq!(check(&[]).0, 0);
        assert!(std::fs::read(&cache).unwrap() == before, "nothing was written");

        // Killed while it was written to: what is in doubt is no fault.
        let daemon = Daemon::start(dir, &[]);
        let mut s = session(dir);
        for i in 0..64 {
            write(&mut *s, i * 40_960, 4096, 9);
        }
        daemon.kill();
        drop(s);
        let (code, out, error) = check(&["--json"]);
        let found: Value = serde_json::from_str(&out).unwrap();
        assert!(code == 0 && found["clean"] == false, "{found} {error}");
        assert!(found["in_doubt"].as_u64().unwrap() > 0 && found["regions_marked"] != 0, "{found}");
    }
}

#[test]
fn wrong_use() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let daemon = Daemon::start(dir, &[]);
    let disk = dir.join("disk").display().to_string();
    let table: [(&[&str], i32, &str); 16] = [
        (&["pin", "none"], 1, "these are: disk"),
        (&["pin", "disk", "5"], 2, "START..END"),
        (&["pin", "disk", "--label", "x"], 2, "a label is for parts"),
        (&["never", "disk", "2m..1m"], 2, "'2m..1m' is no range"),
        (&["pin", "disk", "31m..33m"], 1, "it has 33554432 bytes"),
        (&["pin", "disk", "40m.."], 1, "it has 33554432 bytes"),
        (&["pin", "disk", "--partition", "1"], 1, "has no partition table"),
        (&["pin", "disk", "1m..2m", "--file", "/x"], 2, "cannot be used with"),
        (&["pin", "disk", "--file", "/nowhere/x"], 2, "/nowhere/x"),
        (&["pin", "disk", "--ranges", "/dev/null"], 2, "has no ranges"),
        (&["unpin", "disk", "--label", "x"], 1, "nothing of volume 'disk' is selected as 'x'"),
        (&["unpin", "disk", "1m..2m", "--label", "x"], 2, "leave out --label"),
        (&["prefetch", "disk", "32m.."], 1, "it has 33554432 bytes"),
        (&["check", "--volume", "none"], 1, "these are: disk"),
        (&["check", "/nowhere/x"], 2, "there is no such file"),
        (&["check", &disk], 1, "is in use by process"),
    ];
    for (arguments, want, text) in table {
        let (code, _, error) = ask(dir, arguments);
        assert_eq!(code, want, "{arguments:?}: {error}");
        assert!(error.contains(text), "'{text}' is not in: {error}");
        assert!(want == 2 || error.lines().count() == 1, "{error}");
    }
    assert!(json(dir, &["rules", "disk"])["ranges"].as_array().unwrap().is_empty());
    // What changes nothing says so.
    for (arguments, of) in
        [(&["unpin", "disk"][..], "the whole volume"), (&["unpin", "disk", "1m..2m"], "1 range")]
    {
        let (code, text, _) = ask(dir, arguments);
        assert!(code == 0 && text.contains(of) && text.contains("no change"), "{text}");
    }
    daemon.stop();
}

#[test]
fn a_volume_grows() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let bytes = fill_disk(dir);
    let other = dir.join("other");
    File::create(&other).unwrap().set_len(8 * MIB).unwrap();
    let daemon = Daemon::start(dir, &[]);
    json(dir, &["prefetch", "disk", "..8m"]);
    assert_eq!(json(dir, &["resize", "disk"])["bytes"], 32 * MIB, "nothing has changed");
    let mut old = session(dir);
    read(&mut *old, 0, 4096);
    // The daemon makes it grow, twice.
    let done = json(dir, &["resize", "disk", "40m"]);
    assert_eq!((&done["bytes_before"], &done["bytes"]), (&(32 * MIB).into(), &(40 * MIB).into()));
    let (code, text, _) = ask(dir, &["resize", "disk", "48m"]);
    assert!(code == 0 && text.contains("from 40 MiB to 48 MiB"), "{text}");
    assert_eq!(std::fs::metadata(dir.join("disk")).unwrap().len(), 48 * MIB);
    // Who was there goes on, whoever comes has the new size, and what was cached is.
    let before = counter(&json(dir, &["status"]), "read_hits");
    assert!(read(&mut *old, 0, 1 << 20) == bytes[..1 << 20]);
    assert_eq!(counter(&json(dir, &["status"]), "read_hits"), before + 256);
    let mut s = session(dir);
    write(&mut *s, 47 * MIB, 1 << 20, 6);
    assert!(read(&mut *s, 47 * MIB, 1 << 20).iter().all(|&b| b == 6));
    settle(dir);
    assert_eq!(counter(&json(dir, &["status"]), "fills"), 2048 + 256);
    assert_eq!(json(dir, &["check", "--compare"])["compared"], 2048 + 256);
    drop((s, old));
    for (arguments, want, text) in [
        (&["resize", "disk", "16m"][..], 2, "cannot be made smaller"),
        (&["resize", "none"], 1, "these are: disk"),
    ] {
        let (code, _, error) = ask(dir, arguments);
        assert!(code == want && error.contains(text), "{error}");
    }
    // More than all volumes together may have: nothing changes.
    let (code, _, error) = ask(dir, &["resize", "disk", "17t"]);
    assert!(code == 1 && error.contains("do not fit in the line space"), "{error}");
    assert_eq!(std::fs::metadata(dir.join("disk")).unwrap().len(), 48 * MIB);
    assert!(cached(dir, 0) && cached(dir, 47 * MIB));
    // With another right behind it, it moves.
    json(dir, &["attach", &format!("other=file:{}", other.display())]);
    let (code, text, error) = ask(dir, &["resize", "disk", "64m"]);
    assert!(code == 0 && text.contains("so it has moved, and nothing of it is cached"), "{error}");
    assert!(!cached(dir, 0) && !cached(dir, 47 * MIB));
    let mut s = session(dir);
    assert!(read(&mut *s, 0, 1 << 20) == bytes[..1 << 20]);
    assert!(read(&mut *s, 47 * MIB, 1 << 20).iter().all(|&b| b == 6));
    drop(s);
    settle(dir);
    daemon.kill();
    let daemon = Daemon::start(dir, &[]);
    assert!(cached(dir, 0) && cached(dir, 47 * MIB), "warm after a kill");
    daemon.stop();
    let daemon = Daemon::start(dir, &[]);
    assert!(cached(dir, 0) && cached(dir, 47 * MIB), "and after a stop");
    // A store that has become smaller is refused, and the volume goes on.
    File::options().write(true).open(dir.join("disk")).unwrap().set_len(40 * MIB).unwrap();
    let (code, _, error) = ask(dir, &["resize", "disk"]);
    assert!(code == 1 && error.contains("restore its size"), "{error}");
    // Nor is it made as large as it was, or larger, with zeros for what was cut off.
    for size in ["64m", "72m"] {
        let (code, _, error) = ask(dir, &["resize", "disk", size]);
        assert!(code == 1 && error.contains("restore its size"), "{size}: {error}");
        assert_eq!(std::fs::metadata(dir.join("disk")).unwrap().len(), 40 * MIB);
    }
    daemon.stop();
}

/// Clients go on until it is dropped, should the test fail too.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Three volumes without a gap between them. Each grows, again and again, while clients write to all of them and read what they
/// have written; then the daemon is killed, and stopped.
#[test]
fn volumes_with_others_right_behind_them_grow() {
    const LEN: usize = 9000;
    const PLACES: u64 = 60;
    let at = |place: u64| place * 20_000;
    for placement in ["set:8", "direct", "full", "sparse"] {
        let dir = prepare(placement);
        let dir = dir.path();
        let names = ["disk", "second", "third"];
        let mut more: Vec<String> = Vec::new();
        for name in names {
            File::create(dir.join(name)).unwrap().set_len(8 * MIB).unwrap();
            let uri = format!("{name}=file:{}", dir.join(name).display());
            more.extend(["--volume".to_owned(), uri].into_iter().filter(|_| name != "disk"));
        }
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let daemon = Daemon::start(dir, &more);
        let done = AtomicBool::new(false);
        let mut moves = 0;
        let mut models: Vec<Vec<u8>> = Vec::new();
        let client = |name: &'static str, seed: u64, done: &AtomicBool| {
            let mut s = session_of(dir, name);
            let (mut rng, mut model) = (Rng::new(seed), vec![0u8; PLACES as usize]);
            let mut rounds = 0u64;
            while !done.load(Ordering::SeqCst) || rounds < 500 {
                let place = rng.below(PLACES);
                if rng.chance(0.4) {
                    let version = (rounds % 250) as u8 + 1;
                    write(&mut *s, at(place), LEN, version);
                    model[place as usize] = version;
                }
                let right = model[place as usize];
                let found = read(&mut *s, at(place), LEN);
                assert!(found.iter().all(|&b| b == right), "{placement}, {name}: {place}");
                rounds += 1;
            }
            model
        };
        let (client, flag) = (&client, &done);
        std::thread::scope(|scope| {
            let ends = Ends(flag);
            let threads: Vec<_> = (1..)
                .zip(names)
                .map(|(n, name)| scope.spawn(move || client(name, n, flag)))
                .collect();
            for step in 1..=3 {
                for name in names {
                    let size = 8 + step * 12;
                    let answer = json(dir, &["resize", name, &format!("{size}m")]);
                    assert_eq!(answer["bytes"], size * MIB, "{placement}, {name}");
                    moves += u32::from(answer["moved"] == true);
                    // What lies behind the old end is its own.
                    let mut s = session_of(dir, name);
                    let end = (size - 1) * MIB;
                    assert!(read(&mut *s, end, LEN).iter().all(|&b| b == 0));
                    write(&mut *s, end, LEN, size as u8);
                    assert!(read(&mut *s, end, LEN).iter().all(|&b| u64::from(b) == size));
                }
            }
            drop(ends);
            models = threads.into_iter().map(|t| t.join().unwrap()).collect();
        });
        assert!(moves >= 3, "{placement}: {moves} moves");
        let check = |what: &str| {
            for (name, model) in names.iter().zip(&models) {
                let mut s = session_of(dir, name);
                for (place, &right) in (0..).zip(model) {
                    let found = read(&mut *s, at(place), LEN);
                    assert!(
                        found.iter().all(|&b| b == right),
                        "{placement}, {what}, {name}: place {place} is {} for {right}",
                        found[0]
                    );
                }
                for size in [20, 32, 44u64] {
                    let found = read(&mut *s, (size - 1) * MIB, LEN);
                    assert!(found.iter().all(|&b| u64::from(b) == size), "{placement}, {what}");
                }
            }
            settle(dir);
            let report = json(dir, &["check", "--compare"]);
            assert_eq!(report["faults"], Value::Array(Vec::new()), "{placement}, {what}: {report}");
        };
        check("grown");
        // They are counted now and then.
        let warm = |what: &str| {
            let lines = |s: &Value| s["cache"]["lines"].as_u64() > Some(0);
            status_when(dir, &format!("{placement} is warm: {what}"), lines);
        };
        warm("grown");
        daemon.kill();
        let daemon = Daemon::start(dir, &more);
        warm("killed");
        check("killed");
        daemon.stop();
        let daemon = Daemon::start(dir, &more);
        warm("stopped");
        check("stopped");
        daemon.stop();
    }
}

/// A client that only reads: one that would write is refused such an export when it connects.
fn read_only(dir: &Path, volume: &str) -> Box<dyn larder_block::backing::Session> {
    use larder_block::backing::{Timeouts, open};
    let uri = format!("nbd+unix:///{volume}?socket={}", dir.join("socket").display());
    let uri = uri.parse().unwrap();
    let error = open(&uri, false, false, Timeouts::default()).unwrap_err().to_string();
    assert!(error.contains("read-only"), "{error}");
    open(&uri, true, false, Timeouts::default()).unwrap().session().unwrap()
}

#[test]
fn a_volume_that_is_only_read() {
    let dir = prepare("set:8");
    let dir = dir.path();
    let bytes = fill_disk(dir);
    let other = dir.join("other");
    std::fs::write(&other, vec![5; 1 << 20]).unwrap();
    let daemon = Daemon::start(dir, &["--read-only-volume", "disk"]);
    assert_eq!(json(dir, &["status"])["volumes"][0]["read_only"], true);
    assert_eq!(
        json(dir, &["attach", "--read-only", &format!("other=file:{}", other.display())])["read_only"],
        true
    );
    for volume in ["disk", "other"] {
        let mut s = read_only(dir, volume);
        let buf = larder_runtime::AlignedBuf::zeroed(4096);
        let data = larder_runtime::Payload::new(buf);
        s.submit(1, larder_block::op::Op::Write { offset: 0, data, fua: false });
        let end = std::time::Instant::now() + Duration::from_secs(120);
        let failure = loop {
            s.flush(std::time::Instant::now());
            s.turn(std::time::Instant::now());
            if let Some(done) = s.pop() {
                break done.outcome.unwrap_err();
            }
            assert!(std::time::Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        };
        assert_eq!(failure.kind, larder_block::op::FailureKind::Denied, "{failure}");
    }
    let mut s = read_only(dir, "disk");
    assert!(read(&mut *s, 0, 1 << 20) == bytes[..1 << 20], "nothing was written");
    drop(s);
    daemon.stop();
    let (code, message) = crate::daemon::larder(&[
        "serve",
        "--cache",
        "/nowhere",
        "--listen",
        "unix:/nowhere/s",
        "--volume",
        "a=file:/x",
        "--read-only-volume",
        "b",
    ]);
    assert!(code == Some(2) && message.contains("no --volume has that name"), "{message}");
}
