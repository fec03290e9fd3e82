//! `larder kv` on several drives: each has its part, and comes, goes and fails without the others.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::server::{Server, Site};

const VALUE: usize = 4000;
/// Objects of [`VALUE`] bytes: four times the DRAM for objects.
const KEYS: usize = 20_000;

fn drive(site: &Site, name: &str) -> PathBuf {
    site.dir.path().join(name)
}

/// A server on the site's flash and on these, of so many MiB each.
fn start(site: &Site, sizes: &[(&str, u32)], more: &[&str]) -> Server {
    let mut args: Vec<String> =
        ["-m", "32", "--admission", "all", "-t", "2"].map(str::to_owned).into();
    for (i, (name, mib)) in sizes.iter().enumerate() {
        if i > 0 {
            args.extend(["--flash".to_owned(), drive(site, name).display().to_string()]);
        }
        args.extend(["--flash-size".to_owned(), format!("{mib}m")]);
    }
    args.extend(more.iter().map(|word| (*word).to_owned()));
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    site.start_on(&site.data_dir(), &drive(site, sizes[0].0), &args)
}

fn value(key: usize, version: usize) -> Vec<u8> {
    let mut value = format!("{key}/{version}/").into_bytes();
    value.resize(VALUE, b'v');
    value
}

fn store(client: &mut Client, version: usize) {
    for key in 0..KEYS {
        assert_eq!(client.set(&format!("key{key}"), &value(key, version)), "STORED");
    }
    std::thread::sleep(Duration::from_millis(500));
}

/// How many answer; all that do with their latest version.
fn found(client: &mut Client, version: usize) -> usize {
    let one = |key: &usize| {
        let got = client.get(&format!("key{key}"));
        assert!(got.as_ref().is_none_or(|got| *got == value(*key, version)), "key {key}");
        got.is_some()
    };
    (0..KEYS).filter(one).count()
}

#[test]
fn each_drive_has_its_part_and_goes_and_comes_alone() {
    let site = Site::new();
    let two = [("flash", 128), ("b", 256)];
    let server = start(&site, &two, &[]);
    let mut client = server.connect();
    store(&mut client, 1);
    let written =
        |client: &mut Client, place| client.stat(&format!("larder_drive_{place}_bytes_written"));
    let (a, b) = (written(&mut client, 0), written(&mut client, 1));
    let ratio = b as f64 / a as f64;
    // (While one is writing the other takes more than its part: on a busy disk that is often.)
    assert!((1.2..3.0).contains(&ratio), "{a} and {b} bytes to 128 and 256 MiB");
    assert_eq!(
        client.stats(" larder")["larder_drive_1_path"],
        drive(&site, "b").display().to_string()
    );
    let all = found(&mut client, 1);
    assert!(all > KEYS * 95 / 100, "{all}");
    server.kill();

    // What is overwritten while a drive is away does not come back with it.
    let server = start(&site, &two, &[]);
    let mut client = server.connect();
    let warm = found(&mut client, 1);
    assert!(warm > all / 2, "{warm} of {all}");
    server.stop();
    let server = start(&site, &two[..1], &[]);
    let mut client = server.connect();
    assert!(
        server.log().contains("took part in the last run, and is not named now"),
        "{}",
        server.log()
    );
    let left = found(&mut client, 1);
    assert!(left > warm / 5 && left < warm / 2, "{left} of {warm}");
    store(&mut client, 2);
    server.stop();
    let server = start(&site, &two, &[]);
    let mut client = server.connect();
    assert!(server.log().contains("is not as the last run left it"), "{}", server.log());
    found(&mut client, 2);
    store(&mut client, 3);
    assert!(written(&mut client, 1) > 0);
    let before = found(&mut client, 3);
    server.kill();

    // One is replaced, and one added.
    std::fs::remove_file(drive(&site, "b")).unwrap();
    let server = start(&site, &[("flash", 128), ("c", 256), ("b", 256)], &[]);
    let mut client = server.connect();
    let kept = found(&mut client, 3);
    assert!(kept > before / 6, "{kept} of {before}");
    store(&mut client, 4);
    assert!(found(&mut client, 4) > KEYS * 95 / 100);
    let drives = client.stats(" larder");
    let drives = drives.keys().filter(|k| k.starts_with("larder_drive_") && k.ends_with("_path"));
    assert_eq!(drives.count(), 3);
    server.stop();
}

/// A drive of which most is gone while it is in use fails: the other takes what it would.
#[test]
fn a_drive_that_takes_no_writes_costs_its_share() {
    let site = Site::new();
    let two = [("flash", 128), ("b", 128)];
    let server = start(&site, &two, &[]);
    let mut client = server.connect();
    store(&mut client, 1);
    // Cut off while it is in use: reads and writes behind its end fail.
    let file = std::fs::OpenOptions::new().write(true).open(drive(&site, "b")).unwrap();
    file.set_len(1 << 20).unwrap();
    let left = found(&mut client, 1);
    assert!(left > KEYS * 4 / 10 && left < KEYS * 9 / 10, "{left}");
    let begun = Instant::now();
    for version in 2.. {
        store(&mut client, version);
        let found = found(&mut client, version);
        if found > KEYS * 8 / 10 {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{found}: {}", server.log());
    }
    assert!(client.stat("larder_drive_1_read_errors") > 0);
    server.kill();
}

#[test]
fn what_cannot_be_drives_of_one_cache_is_refused() {
    let site = Site::new();
    let two = [("flash", 64), ("b", 64)];
    start(&site, &two, &[]).stop();
    let other = Site::new();
    start(&other, &two, &[]).stop();
    let path = |site: &Site, name: &str| drive(site, name).display().to_string();
    let refused = |flags: &[&str]| site.refused(flags);
    let (code, told) = refused(&["--flash", &path(&site, "flash")]);
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("named twice"), "{told}");
    std::os::unix::fs::symlink(drive(&site, "flash"), drive(&site, "link")).unwrap();
    let (code, told) = refused(&["--flash", &path(&site, "link")]);
    assert!(code == Some(2) && told.contains("named twice"), "{told}");
    let (code, told) = refused(&["--flash", &path(&other, "b")]);
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("another cache") && told.contains("leave it out"), "{told}");
    std::fs::copy(drive(&site, "flash"), drive(&site, "copy")).unwrap();
    let (_, told) = refused(&["--flash", &path(&site, "copy")]);
    assert!(told.contains("a copy of another"), "{told}");
    std::fs::write(drive(&site, "pdf"), [b"%PDF-1.4".as_slice(), &[1; 32 << 20]].concat()).unwrap();
    let (code, told) = refused(&["--flash", &path(&site, "pdf")]);
    assert!(code == Some(1) && told.contains("not Larder's data"), "{told}");
    let (code, told) = refused(&["--flash", &path(&site, "new"), "--flash-size", "1g"]);
    assert!(code == Some(2) && told.contains("give each drive its size"), "{told}");
    let (code, told) = refused(&["--flash", &path(&site, "new")]);
    assert!(code == Some(2) && told.contains("is not there yet"), "{told}");
    let record = path(&site, "record");
    let (code, told) = refused(&["--flash", &path(&site, "b"), "--record", &record]);
    assert!(code == Some(2) && told.contains("one drive"), "{told}");
    // Nothing was changed by all that.
    let server = start(&site, &two, &[]);
    assert!(!server.log().contains("formatted"), "{}", server.log());
    server.stop();
}

/// Where one of them cannot be used, none is made anew, though that was asked for.
#[test]
fn a_format_that_is_refused_changes_no_drive() {
    let site = Site::new();
    let two = [("flash", 64), ("b", 64)];
    let server = start(&site, &two, &[]);
    let mut client = server.connect();
    store(&mut client, 1);
    server.stop();
    let server = start(&site, &two, &[]);
    let before = found(&mut server.connect(), 1);
    server.stop();
    let z = drive(&site, "z").display().to_string();
    let b = drive(&site, "b").display().to_string();
    for (size, remedy) in [("1m", "at least"), ("900t", "too large")] {
        let (code, told) = site.refused(&[
            "-m",
            "32",
            "--admission",
            "all",
            "--flash-size",
            "72m",
            "--flash",
            &b,
            "--flash-size",
            "64m",
            "--flash",
            &z,
            "--flash-size",
            size,
            "--format-flash",
        ]);
        assert!(code.is_some_and(|code| code != 0), "{told}");
        assert!(told.contains(remedy) || told.contains("more than"), "{told}");
    }
    let server = start(&site, &two, &[]);
    assert!(server.log().contains("warm: "), "{}", server.log());
    assert_eq!(found(&mut server.connect(), 1), before);
    server.stop();
}

/// As charts give them.
#[test]
fn several_paths_of_extstore_are_drives() {
    let site = Site::new();
    let (a, b) = (drive(&site, "a").display().to_string(), drive(&site, "b").display().to_string());
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_larder"));
    command.args(["kv", "--http", "off", "-m", "64", "-s"]).arg(site.socket());
    command.arg("--data-dir").arg(site.data_dir());
    command.args(["-o", &format!("ext_path={a}:64m,ext_path={b}:128m")]);
    let server = Server::of(command, site.socket());
    site.remember_region_of(&drive(&site, "a"));
    let mut client = server.connect();
    let capacity = |place: u8, client: &mut Client| {
        client.stat(&format!("larder_drive_{place}_capacity_bytes"))
    };
    let (a, b) = (capacity(0, &mut client), capacity(1, &mut client));
    assert!(a > 60 << 20 && b > 120 << 20, "{a} {b}");
    server.stop();
}
