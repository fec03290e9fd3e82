//! Journals in each of their places: what a recovery makes of a store whose daemon was killed and whose cache is lost, and what is refused.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;

use larder_block::backing::{self, Timeouts};
use larder_block::op::{FailureKind, Op};
use larder_runtime::{AlignedBuf, Payload};
use tempfile::TempDir;

use super::{format, has, prepare};
use crate::daemon::ask::{ask, json, status_when};
use crate::daemon::{Daemon, one, session, session_of};
use crate::stores::faulty::Store;
use crate::stores::s3::S3;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 64;
const SIZE: u64 = 8 << 20;
/// A journal has no less.
const JOURNAL: u64 = 128 << 20;

const AWS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "larder"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
    ("AWS_REGION", "us-east-1"),
];

/// A store with its marker and its journal.
struct Site {
    dir: TempDir,
    uri: String,
    marker: Option<String>,
    journal: Option<String>,
}

impl Site {
    fn new(uri: &str, marker: Option<&str>, journal: Option<&str>) -> Site {
        let dir = TempDir::new().unwrap();
        format(&dir.path().join("cache"));
        let marker = marker.map(|name| dir.path().join(name).display().to_string());
        let journal = journal.map(str::to_owned);
        Site { dir, uri: uri.to_owned(), marker, journal }
    }

    fn larder(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command.arg("block").args(arguments).envs(AWS);
        command
    }

    fn serve(&self, more: &[&str]) -> Command {
        let mut command = self.larder(&["serve"]);
        let at = |name: &str| self.dir.path().join(name);
        command.arg("--cache").arg(at("cache")).arg("--state-dir").arg(at("state"));
        command.arg("--volume").arg(format!("disk={}", self.uri));
        command.arg("--listen").arg(format!("unix:{}", at("socket").display()));
        if let Some(marker) = &self.marker {
            command.arg("--marker").arg(format!("disk={marker}"));
        }
        if let Some(journal) = &self.journal {
            command.arg("--journal").arg(format!("disk={journal}"));
        }
        command.args(more);
        command
    }

    fn recover(&self, more: &[&str]) -> (i32, String) {
        let mut command = self.larder(&["recover", &self.uri]);
        if let Some(marker) = &self.marker {
            command.args(["--marker", marker]);
        }
        said(command.args(more))
    }

    fn recover_with_journal(&self, more: &[&str]) -> (i32, String) {
        let journal: Vec<&str> =
            self.journal.iter().flat_map(|at| ["--journal", at.as_str()]).collect();
        self.recover(&[&journal[..], more].concat())
    }

    /// Another cache is at the place of the one before.
    fn lose_cache(&self) {
        std::fs::remove_file(self.dir.path().join("cache")).unwrap();
        format(&self.dir.path().join("cache"));
    }

    /// What clients read.
    fn image(&self, more: &[&str]) -> Vec<u8> {
        let daemon = Daemon::of(self.serve(more));
        let uri = format!("nbd+unix:///disk?socket={}", self.dir.path().join("socket").display());
        let store = backing::open(&uri.parse().unwrap(), true, false, Timeouts::default());
        let mut s = store.unwrap().session().unwrap();
        let buf = AlignedBuf::zeroed((BLOCKS * BLOCK) as usize);
        let Op::Read { buf, .. } = one(&mut *s, Op::Read { offset: 0, buf }) else { panic!() };
        daemon.stop();
        buf[..].to_vec()
    }
}

fn said(command: &mut Command) -> (i32, String) {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    (output.status.code().unwrap(), text)
}

/// The `number`th write: its block, and the byte that it is filled with.
fn write(number: u64) -> (u64, u8) {
    (number * 37 % BLOCKS, (number % 255 + 1) as u8)
}

/// It is a volume as it was behind some number of writes, of so many.
#[track_caller]
fn is_prefix(image: &[u8], writes: u64) -> u64 {
    let mut wanted = vec![0u8; image.len()];
    let mut at = None;
    for number in 0..=writes {
        if wanted == image {
            at = Some(number);
        }
        let (block, fill) = write(number);
        wanted[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize].fill(fill);
    }
    at.expect("an image that the volume never had")
}

/// Writes while all of it is destaged, with a flush now and then; then the daemon is killed and its cache lost. Returns how many writes there were.
fn left(site: &Site) -> u64 {
    let daemon = Daemon::of(site.serve(&["--write", "disk=back:journaled"]));
    let dir = site.dir.path();
    let mut s = session(dir);
    let mut number = 0;
    let mut some = |writes: u64| {
        for _ in 0..writes {
            let (block, fill) = write(number);
            let mut data = AlignedBuf::zeroed(BLOCK as usize);
            data.fill(fill);
            let data = Payload::new(data);
            one(&mut *s, Op::Write { offset: block * BLOCK, data, fua: false });
            if number % 7 == 3 {
                one(&mut *s, Op::Flush);
            }
            number += 1;
        }
    };
    some(100);
    status_when(dir, "some of it is in the store", |status| {
        status["volumes"][0]["write_back"]["frontier"].as_u64().unwrap() > 0
    });
    some(300);
    daemon.kill();
    site.lose_cache();
    number
}

/// Refused for writing, read with its journal over it, and recovered to the same.
fn is_recovered(site: &Site) {
    let writes = left(site);
    let (code, message) = said(&mut site.serve(&["--write", "disk=back:journaled"]));
    assert_eq!(code, 1, "{message}");
    has(&message, &["volume 'disk'", "larder block recover"]);
    let shown = site.image(&["--read-only"]);
    assert!(is_prefix(&shown, writes) > 0);
    assert!(site.image(&["--read-only"]) == shown, "it was changed by being read");
    let (code, message) = site.recover_with_journal(&[]);
    assert_eq!(code, 0, "{message}");
    has(&message, &["it was dirty", "order journaled", "at one moment", "generation"]);
    let (code, message) = site.recover_with_journal(&[]);
    assert_eq!(code, 0, "{message}");
    has(&message, &["it was clean"]);
    assert!(site.image(&["--write", "disk=back:journaled"]) == shown);
}

#[test]
fn a_store_is_recovered_from_a_journal_in_another_nbd_export() {
    let (a, b) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let store = Store::start(a.path(), SIZE, FailureKind::Failed);
    let journal = Store::start(b.path(), JOURNAL, FailureKind::Failed);
    is_recovered(&Site::new(&store.uri(), Some("marker"), Some(&journal.uri())));
}

/// (This store deletes nothing: what is over stays, and holds up nobody.)
#[test]
fn a_store_is_recovered_from_a_journal_in_an_object_store_beside_its_chunks() {
    let s3 = S3::start();
    let site = Site::new(&s3.uri("a"), None, None);
    let (code, message) = said(&mut site.larder(&["create", &site.uri, "--size", "8m"]));
    assert_eq!(code, 0, "{message}");
    is_recovered(&site);
    let keys = s3.keys();
    assert!(keys.iter().any(|key| key.ends_with("a/wb/head")), "{keys:?}");
}

/// A journal on another device than the cache's: where there is one.
#[test]
fn a_store_is_recovered_from_a_journal_in_a_file_and_without_it_only_if_that_is_accepted() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let path = memory.path().join("journal");
    let at = path.display().to_string();
    let nbd = TempDir::new().unwrap();
    let store = Store::start(nbd.path(), SIZE, FailureKind::Failed);
    let site = Site::new(&store.uri(), Some("marker"), Some(&at));
    is_recovered(&site);
    let writes = left(&site);
    assert!(writes > 0);
    let (code, message) = site.recover(&[]);
    assert_eq!(code, 2, "{message}");
    has(&message, &["has no place for a journal", "--journal"]);
    std::fs::remove_file(&path).unwrap();
    let (code, message) = site.recover_with_journal(&[]);
    assert_eq!(code, 1, "{message}");
    has(&message, &["is not there", "between two epochs", "--accept-torn"]);
    let (code, message) = said(&mut site.serve(&["--read-only"]));
    assert_eq!(code, 1, "{message}");
    has(&message, &["cannot be read without", "is not there", "larder block recover"]);
    let (code, message) = site.recover_with_journal(&["--accept-torn"]);
    assert_eq!(code, 0, "{message}");
    has(&message, &["torn", "is not there", "not replayed", "Check it"]);
    site.image(&["--write", "disk=back:journaled"]);
}

#[test]
fn a_journal_that_cannot_be_is_refused_with_what_to_do() {
    let (a, b) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let store = Store::start(a.path(), SIZE, FailureKind::Failed);
    let small = Store::start(b.path(), 1 << 20, FailureKind::Failed);
    let site = |journal: Option<&str>| Site::new(&store.uri(), Some("marker"), journal);
    let refused = |site: &Site, code: i32, words: &[&str]| {
        let (found, message) = said(&mut site.serve(&["--write", "disk=back:journaled"]));
        assert_eq!(found, code, "{message}");
        has(&message, words);
        let marker = site.marker.as_ref().unwrap();
        assert!(!Path::new(marker).exists(), "nothing is dirty: {message}");
    };
    refused(
        &site(None),
        2,
        &["volume 'disk'", "has no place for a journal", "--journal NAME=PLACE"],
    );
    refused(&site(Some(&small.uri())), 2, &["has 1 MiB", "needs 128 MiB", "larger"]);
    refused(&site(Some(&store.uri())), 2, &["the volume's own store", "another place"]);
    let on_cache = site(None);
    let journal = on_cache.dir.path().join("journal").display().to_string();
    let on_cache = Site { journal: Some(journal), ..on_cache };
    refused(&on_cache, 2, &["would be lost with the cache", "same device", "another device"]);
    refused(&site(Some("nbd+unix:///j?socket=/nowhere/socket")), 1, &["/nowhere/socket"]);
    refused(&site(Some("s3://b")), 2, &["--journal 'disk=s3://b'", "is not a bucket's name"]);
}

/// Its cache is there, and has all of it.
#[test]
fn a_start_whose_store_fails_while_a_journal_is_laid_into_it_serves_the_others_and_that_volume_when_it_works()
 {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else { return };
    let journal = memory.path().join("journal").display().to_string();
    let nbd = TempDir::new().unwrap();
    let store = Store::start(nbd.path(), SIZE, FailureKind::NoSpace);
    let site = Site::new(&store.uri(), Some("marker"), Some(&journal));
    let dir = site.dir.path();
    let other = dir.join("other");
    std::fs::File::create(&other).unwrap().set_len(1 << 20).unwrap();
    let other = format!("other=file:{}", other.display());
    let back = ["--write", "disk=back:journaled", "--volume", &other, "--backing-give-up", "1"];
    let daemon = Daemon::of(site.serve(&back));
    let mut s = session_of(dir, "disk");
    let write = |s: &mut dyn backing::Session, fill: u8| {
        for block in 0..BLOCKS {
            let mut data = AlignedBuf::zeroed(BLOCK as usize);
            data.fill(fill);
            let data = Payload::new(data);
            one(s, Op::Write { offset: block * BLOCK, data, fua: false });
        }
        one(s, Op::Flush);
    };
    write(&mut *s, 1);
    status_when(dir, "some of it is in the store", |status| {
        status["volumes"][0]["write_back"]["frontier"].as_u64().unwrap() > 0
    });
    // The next epoch is committed, and is not in the store.
    store.plan.changes_alone.store(true, Ordering::SeqCst);
    store.plan.fail_every.store(1, Ordering::SeqCst);
    write(&mut *s, 2);
    status_when(dir, "its store fails", |status| {
        status["volumes"][0]["write_back"]["failures"].as_u64().unwrap() > 0
    });
    // A flush that ends without it says why.
    let (code, out, error) = ask(dir, &["flush", "disk", "--timeout", "1"]);
    assert_eq!(code, 1, "{out}{error}");
    has(&out, &["disk", "of the write log left", "its store fails"]);
    daemon.kill();
    let (code, message) = said(&mut site.serve(&back));
    assert_eq!(code, 1, "{message}");
    let uri = store.uri();
    let words = [
        "volume 'disk'",
        "comes to its store",
        &uri,
        "See to the store",
        "--on-backing-failure wait",
    ];
    has(&message, &words);
    let waits = [&back[..], &["--on-backing-failure", "wait"]].concat();
    let daemon = Daemon::of(site.serve(&waits));
    let status = status_when(dir, "it waits", |s| s["volumes"][0]["store"]["state"] == "waiting");
    has(
        &status["alarms"].to_string(),
        &["volume 'disk'", "comes to its store", "every 5 s", "the store lacks"],
    );
    let mut s = session_of(dir, "other");
    write(&mut *s, 3);
    store.plan.fail_every.store(0, Ordering::SeqCst);
    status_when(dir, "it is served", |s| s["volumes"][0]["store"]["state"] == "ok");
    let mut s = session_of(dir, "disk");
    let read = crate::daemon::read(&mut *s, 0, (BLOCKS * BLOCK) as usize);
    assert!(read.iter().all(|&byte| byte == 2));
    daemon.stop();
}

/// Each would be written over the other. Nothing is made before that is said, of a start and of a volume that comes later.
#[test]
fn a_journal_at_the_place_of_its_volumes_marker_is_refused_as_usage_and_nothing_is_made() {
    let dir = prepare();
    let dir = dir.path();
    let at = |name: &str| dir.join(name).display().to_string();
    std::fs::File::create(dir.join("late")).unwrap().set_len(SIZE).unwrap();
    std::fs::create_dir(dir.join("folder")).unwrap();
    std::os::unix::fs::symlink(dir.join("disk.larder"), dir.join("link")).unwrap();
    let start = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
        command.args(["block", "serve", "--cache", &at("cache"), "--state-dir", &at("state")]);
        command.args(["--volume", &format!("disk=file:{}", at("disk"))]);
        command.args(["--listen", &format!("unix:{}", at("socket"))]);
        command.args(["--write", "disk=back:journaled", "--journal-local"]).args(more);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (here, marker) = (at("folder/../here"), format!("disk={}", at("here")));
    for (journal, marker) in [
        (at("disk.larder"), None),
        (at("folder/../disk.larder"), None),
        (at("link"), None),
        (here.clone(), Some(&*marker)),
    ] {
        let journal = format!("disk={journal}");
        let with = marker.map_or_else(Vec::new, |marker| vec!["--marker", marker]);
        let (code, said) = start(&[&["--journal", &*journal][..], &with].concat());
        assert_eq!(code, Some(2), "{said}");
        has(&said, &["volume 'disk'", "is where its marker is", "name another place"]);
        assert!(!dir.join("disk.larder").exists() && !dir.join("here").exists());
    }
    let daemon = Daemon::start(dir, &[]);
    let late = format!("late=file:{}", at("late"));
    for (journal, marker) in [(at("late.larder"), None), (here, Some(at("here")))] {
        let mut args = vec!["attach", &late, "--write", "back:journaled", "--journal", &journal];
        args.extend(marker.iter().flat_map(|marker| ["--marker", marker]));
        let (code, _, said) = ask(dir, &args);
        assert_eq!(code, 2, "{said}");
        has(&said, &["volume 'late'", "is where its marker is", "name another place"]);
        assert!(!dir.join("late.larder").exists() && !dir.join("here").exists());
        let status = json(dir, &["status"]);
        assert!(!status["put_aside"].to_string().contains("late"), "{status:#}");
    }
    daemon.stop();
}
