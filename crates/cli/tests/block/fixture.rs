//! A cache device with a line that the volume does not have: what write-back will leave behind. This version refuses it, says
//! why, and changes nothing on it.
//!
//! The image is checked in. It was made, and is made anew when the format changes, by
//! `cargo test -p larder-cli --test block fixture:: -- --ignored`.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use larder_block::backing::{self, Timeouts};
use larder_block::op::Op;
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::{COPY_BYTES, FEATURE_DIRTY};
use larder_runtime::{AlignedBuf, Payload};
use tempfile::TempDir;

/// What the line holds.
const LINE: [u8; 4096] = [0xd1; 4096];

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/block/dirty.img.zst")
}

fn serve(dir: &Path) -> Command {
    let path = |name: &str| dir.join(name).display().to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_larder"));
    command
        .args(["block", "serve", "--cache", &path("cache")])
        .args(["--volume", &format!("disk=file:{}", path("disk"))])
        .args(["--listen", &format!("unix:{}", path("socket"))])
        .args(["--state-dir", &path("state")]);
    command
}

#[test]
fn a_dirty_line_is_refused_and_left_alone() {
    let dir = TempDir::new().unwrap();
    let image = zstd::decode_all(std::fs::File::open(fixture()).unwrap()).unwrap();
    assert!(image.windows(LINE.len()).any(|bytes| bytes == LINE), "the line is there");
    let cache = dir.path().join("cache");
    std::fs::write(&cache, &image).unwrap();
    std::fs::File::create(dir.path().join("disk")).unwrap().set_len(4 << 20).unwrap();
    let output = serve(dir.path()).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("data that the volumes do not have yet (write-back)"), "{message}");
    assert!(message.contains("use the Larder that wrote it"), "{message}");
    let format = ["block", "format", cache.to_str().unwrap()];
    let output = Command::new(env!("CARGO_BIN_EXE_larder")).args(format).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("--yes"), "{message}");
    assert!(std::fs::read(&cache).unwrap() == image, "nothing was changed on it");
}

/// A device of a later version of the format is told from a damaged one, and left alone by everything that would use it.
#[test]
fn a_later_format_is_refused_and_left_alone() {
    let dir = TempDir::new().unwrap();
    let cache = dir.path().join("cache");
    let larder = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_larder"))
            .arg("block")
            .args(arguments)
            .arg(&cache)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    assert_eq!(larder(&["format", "--size", "64m"]).0, Some(0));
    std::fs::File::create(dir.path().join("disk")).unwrap().set_len(4 << 20).unwrap();
    let mut image = std::fs::read(&cache).unwrap();
    for copy in image[..2 * COPY_BYTES].chunks_exact_mut(COPY_BYTES) {
        // The version, in a superblock that is otherwise whole.
        copy[12..16].copy_from_slice(&9u32.to_le_bytes());
        let crc = crc32c::crc32c(&copy[12..]);
        copy[8..12].copy_from_slice(&crc.to_le_bytes());
    }
    std::fs::write(&cache, &image).unwrap();
    let output = serve(dir.path()).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("version 9"), "{message}");
    let (code, message) = larder(&["check"]);
    assert!(code == Some(1) && message.contains("version 9"), "{code:?} {message}");
    let (code, message) = larder(&["format"]);
    assert!(code == Some(2) && message.contains("--yes"), "{code:?} {message}");
    assert!(std::fs::read(&cache).unwrap() == image, "nothing was changed on it");
}

/// Makes the image: a daemon caches a line, the volume loses it, and both superblocks say what that means.
#[test]
#[ignore = "makes the fixture anew"]
fn make_the_fixture() {
    let dir = TempDir::new().unwrap();
    let cache = dir.path().join("cache");
    std::fs::File::create(dir.path().join("disk")).unwrap().set_len(4 << 20).unwrap();
    let format = ["block", "format", cache.to_str().unwrap(), "--size", "4m", "--shards", "1"];
    let output = Command::new(env!("CARGO_BIN_EXE_larder")).args(format).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut daemon = serve(dir.path()).stderr(Stdio::piped()).spawn().unwrap();
    let log = BufReader::new(daemon.stderr.take().unwrap());
    assert!(log.lines().map_while(Result::ok).any(|line| line.contains("ready")));
    let uri = format!("nbd+unix:///disk?socket={}", dir.path().join("socket").display());
    let store = backing::open(&uri.parse().unwrap(), false, false, Timeouts::default()).unwrap();
    let mut session = store.session().unwrap();
    let mut data = AlignedBuf::zeroed(LINE.len());
    data.copy_from_slice(&LINE);
    session.submit(1, Op::Write { offset: 8192, data: Payload::new(data), fua: true });
    loop {
        session.flush(Instant::now());
        session.turn(Instant::now());
        if let Some(done) = session.pop() {
            done.outcome.unwrap();
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    drop((session, store));
    std::thread::sleep(std::time::Duration::from_secs(1));
    let pid = rustix::process::Pid::from_child(&daemon);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(daemon.wait().unwrap().success());
    let mut image = std::fs::read(&cache).unwrap();
    assert!(image.windows(LINE.len()).any(|bytes| bytes == LINE), "the line is there");
    for copy in 0..2 {
        let at = copy * COPY_BYTES;
        if let Ok(mut sb) = BlockSuperblock::decode(&image[at..at + COPY_BYTES]) {
            sb.incompatible |= FEATURE_DIRTY;
            let bytes = sb.encode();
            image[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }
    std::fs::create_dir_all(fixture().parent().unwrap()).unwrap();
    std::fs::write(fixture(), zstd::encode_all(&image[..], 19).unwrap()).unwrap();
}
