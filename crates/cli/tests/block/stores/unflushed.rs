//! A server that does not offer FLUSH: nobody is told that what it has answered is durable, and nothing is written back to it, unless the
//! operator vouches for it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::daemon::ask::{ask, json};
use crate::daemon::{Daemon, larder, session_of, write};

const BYTES: u64 = 8 << 20;

/// nbdkit with a plugin that can do no more than read and write a file.
struct Plain(Child);

impl Plain {
    fn start(dir: &Path) -> Plain {
        File::create(dir.join("image")).unwrap().set_len(BYTES).unwrap();
        let (socket, image) = (dir.join("kit"), dir.join("image").display().to_string());
        let read = format!(
            "pread=dd if='{image}' iflag=skip_bytes,count_bytes skip=$4 count=$3 bs=128k status=none"
        );
        let write = format!(
            "pwrite=dd of='{image}' oflag=seek_bytes seek=$4 bs=128k conv=notrunc status=none"
        );
        let size = format!("get_size=stat -c %s '{image}'");
        let mut kit = Command::new("nbdkit");
        kit.args(["-f", "--exit-with-parent", "-U"]).arg(&socket).arg("eval");
        kit.args([&size, &read, &write, "can_write=exit 0"]);
        let kit = kit.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let plain = Plain(kit.spawn().unwrap());
        let end = Instant::now() + Duration::from_secs(120);
        while !socket.exists() {
            assert!(Instant::now() < end, "nbdkit does not come up");
            std::thread::sleep(Duration::from_millis(5));
        }
        plain
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// A cache with a write log, a file as the first volume, and a server without FLUSH: its URI.
fn prepare(dir: &Path) -> (Plain, String) {
    let cache = dir.join("cache");
    let format = ["format", cache.to_str().unwrap(), "--size", "128m", "--write-log", "64m"];
    let (code, message) = larder(&format);
    assert_eq!(code, Some(0), "{message}");
    File::create(dir.join("disk")).unwrap().set_len(8 << 20).unwrap();
    let plain = Plain::start(dir);
    (plain, format!("nbd+unix:///?socket={}", dir.join("kit").display()))
}

#[track_caller]
fn has(text: &str, words: &[&str]) {
    words.iter().for_each(|word| assert!(text.contains(word), "no '{word}' in: {text}"));
}

#[test]
#[cfg_attr(
    any(without = "nbdkit", without = "nbdinfo"),
    ignore = "needs nbdkit and nbdinfo (Debian: nbdkit, libnbd-bin)"
)]
fn a_store_without_flush_is_written_through_and_its_clients_are_offered_none() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let (_plain, uri) = prepare(dir);
    let daemon = Daemon::start(dir, &["--volume", &format!("plain={uri}")]);
    let status = json(dir, &["status"]);
    let flush = |at: usize| status["volumes"][at]["store"]["flush"].as_str().unwrap().to_owned();
    assert_eq!((flush(0), flush(1)), ("offered".to_owned(), "missing".to_owned()));
    let offers = |volume: &str| {
        let uri = format!("nbd+unix:///{volume}?socket={}", dir.join("socket").display());
        let told = Command::new("nbdinfo").args(["--can", "flush", &uri]).status().unwrap();
        told.success()
    };
    assert_eq!((offers("disk"), offers("plain")), (true, false));
    let (code, _, error) = ask(dir, &["write", "plain", "back:ordered", "--no-marker"]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["volume 'plain'", "offers no flush", "vouch"]);
    daemon.stop();
}

#[test]
#[cfg_attr(without = "nbdkit", ignore = "needs nbdkit (Debian: nbdkit)")]
fn a_store_without_flush_is_refused_for_write_back_unless_it_is_vouched_for() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let (_plain, uri) = prepare(dir);
    let volume = format!("plain={uri}");
    // At a start, where nothing has changed then,
    let cache = dir.join("cache");
    let state = dir.join("other-state");
    let listen = format!("unix:{}", dir.join("other-socket").display());
    let serve = [
        &["serve", "--cache", cache.to_str().unwrap(), "--state-dir", state.to_str().unwrap()][..],
        &["--listen", &listen, "--volume", &volume, "--no-marker", "plain"],
        &["--write", "back:ordered"],
    ];
    let (code, message) = larder(&serve.concat());
    assert_eq!(code, Some(1), "{message}");
    has(&message, &["volume 'plain'", "offers no flush", "--store-durable"]);
    // and of one that comes later.
    let daemon = Daemon::start(dir, &[]);
    let attach = ["attach", &volume, "--write", "back:ordered", "--no-marker"];
    let (code, _, error) = ask(dir, &attach);
    assert_eq!(code, 1, "{error}");
    has(&error, &["volume 'plain'", "offers no flush"]);
    let attached = json(dir, &[&attach[..], &["--store-durable"]].concat());
    assert_eq!(attached["write"], "back:ordered", "{attached:#}");
    let status = json(dir, &["status"]);
    assert_eq!(status["volumes"][1]["store"]["flush"], "needless", "{status:#}");
    write(&mut *session_of(dir, "plain"), 4096, 4096, 7);
    let (code, said, error) = ask(dir, &["detach", "plain", "--disconnect"]);
    assert_eq!(code, 0, "{said}{error}");
    let mut found = [0; 4096];
    File::open(dir.join("image")).unwrap().read_exact_at(&mut found, 4096).unwrap();
    assert!(found.iter().all(|b| *b == 7));
    // A file is flushed, whoever says that it need not be.
    let file = format!("more=file:{}", dir.join("image").display());
    let (code, _, error) = ask(dir, &["attach", &file, "--store-durable"]);
    assert_eq!(code, 1, "{error}");
    has(&error, &["volatile cache", "vouch"]);
    daemon.stop();
    let vouched = ["--volume", &volume, "--store-durable", "plain", "--write", "plain=back:any"];
    let daemon = Daemon::start(dir, &[&vouched[..], &["--no-marker", "plain"]].concat());
    let status = json(dir, &["status"]);
    assert_eq!(status["volumes"][1]["store"]["flush"], "needless", "{status:#}");
    daemon.stop();
}
