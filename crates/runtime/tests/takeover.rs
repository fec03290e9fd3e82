//! What one process leaves to the next, checked with real processes that are really killed.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::{ByteSize, Rng, Words};
use larder_runtime::{
    AlignedBuf, DataDir, DataDirError, Device, DeviceError, DeviceOptions, FlashDevice,
    SharedRegion,
};

const SIZE: u64 = 64 << 20;

/// Starts this test program again to play `role`, and waits until it says that it is at work.
fn start(role: &str, dir: &Path) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_child", "--nocapture"])
        .env("LARDER_TEST_ROLE", role)
        .env("LARDER_TEST_DIR", dir)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|l| l.unwrap().contains("at work")), "{role} did not start");
    child
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Not a test of its own: what the processes started by the tests do.
#[test]
fn in_a_child() {
    let Some(role) = std::env::var_os("LARDER_TEST_ROLE") else { return };
    let dir = std::path::PathBuf::from(std::env::var_os("LARDER_TEST_DIR").unwrap());
    match role.to_str().unwrap() {
        "writer" => {
            let options = DeviceOptions::new(dir.join("flash")).size(ByteSize(SIZE));
            let device = Arc::new(FlashDevice::open(&options).unwrap());
            let (tell, written) = std::sync::mpsc::channel();
            let writers: Vec<_> = (0..4u64)
                .map(|i| {
                    let (device, tell) = (device.clone(), tell.clone());
                    std::thread::spawn(move || {
                        let mut rng = Rng::new(i);
                        let mut bytes = AlignedBuf::zeroed(4 << 20);
                        loop {
                            rng.fill(&mut bytes[..64]);
                            device.write_at(rng.below(15) * (4 << 20), &bytes).unwrap();
                            tell.send(()).unwrap();
                        }
                    })
                })
                .collect();
            for _ in 0..8 {
                written.recv().unwrap();
            }
            println!("at work");
            writers.into_iter().for_each(|w| w.join().unwrap());
        }
        "counter" => {
            let region = SharedRegion::open(&dir, "words", 1 << 20).unwrap();
            let mut words = Words::from_static(region.words());
            for value in 1u64.. {
                if value == 3 {
                    println!("at work");
                }
                for i in 0..words.len() {
                    words.store(i, value);
                }
            }
        }
        "owner" => {
            let _dir = DataDir::open(&dir.join("data"), 1).unwrap();
            println!("at work");
            std::thread::sleep(Duration::from_secs(60));
        }
        other => panic!("no role {other}"),
    }
}

#[test]
fn no_write_of_a_killed_process_lands_after_the_take_over() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..4 {
        let child = start("writer", dir.path());
        kill(child);
        let device = FlashDevice::open(&DeviceOptions::new(dir.path().join("flash"))).unwrap();
        let heads = || -> Vec<[u8; 64]> {
            let head = |i: u64| {
                let mut out = [0; 64];
                device.read_at(i * (4 << 20), &mut out).unwrap();
                out
            };
            (0..15).map(head).collect()
        };
        let first = heads();
        std::thread::sleep(Duration::from_millis(60));
        assert!(heads() == first, "round {round}: the device changed under its new owner");
        assert!(first.iter().any(|h| h.iter().any(|&b| b != 0)), "the writer wrote");
    }
}

#[test]
fn shared_words_keep_every_store_before_a_kill_in_order() {
    let dir = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let child = start("counter", dir.path());
        std::thread::sleep(Duration::from_millis(30 + round * 7));
        kill(child);
        let region = SharedRegion::open(dir.path(), "words", 1 << 20).unwrap();
        assert!(!region.is_fresh());
        let values: Vec<u64> = region.words().iter().map(|w| w.load(Ordering::Relaxed)).collect();
        // Stored one after the other: a run of the newer value, then the one before it.
        let newest = values[0];
        let turn = values.iter().position(|&v| v != newest).unwrap_or(values.len());
        assert!(values[turn..].iter().all(|&v| v + 1 == newest), "round {round}: turn at {turn}");
        assert!(newest > 1, "killed before it had gone round once");
        drop(region);
        SharedRegion::remove(dir.path(), "words").unwrap();
    }
}

#[test]
fn a_data_directory_in_use_names_its_owner_and_is_free_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let child = start("owner", dir.path());
    let pid = child.id();
    let refused = DataDir::open(&dir.path().join("data"), 1).unwrap_err();
    assert!(matches!(&refused, DataDirError::InUse { pid: Some(p), .. } if *p == pid), "{refused}");
    assert!(refused.to_string().contains(&format!("process {pid}")), "{refused}");
    kill(child);
    DataDir::open(&dir.path().join("data"), 1).unwrap();
}

/// A tmpfs of two megabytes.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> SmallDisk {
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=2m", "none"])
            .arg(dir.path())
            .stderr(Stdio::null())
            .status();
        assert!(mounted.unwrap().success(), "no tmpfs may be mounted here");
        SmallDisk(dir)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
#[cfg_attr(without = "mount", ignore = "needs the right to mount a tmpfs")]
fn a_sparse_file_on_a_disk_that_fills_up_fails_by_the_write() {
    let disk = SmallDisk::mount();
    let options = DeviceOptions::new(disk.0.path().join("flash")).size(ByteSize(8 << 20));
    let device = FlashDevice::open(&options).unwrap();
    let mut failed = None;
    for segment in 0..8u64 {
        if let Err(e) = device.write_at(segment << 20, &vec![7; 1 << 20]) {
            failed = Some((segment, e));
            break;
        }
    }
    let (segment, e) = failed.unwrap();
    assert!((1..=2).contains(&segment), "{segment}");
    assert!(matches!(&e, DeviceError::Io { .. }) && e.to_string().contains("No space left"), "{e}");
    let mut first = vec![0; 1 << 20];
    device.read_at(0, &mut first).unwrap();
    assert!(first.iter().all(|&b| b == 7), "what was written stays readable");
    device.discard(0, 1 << 20).unwrap();
    device.write_at(4 << 20, &vec![8; 1 << 19]).unwrap();

    let whole =
        DeviceOptions { preallocate: true, ..DeviceOptions::new(disk.0.path().join("whole")) };
    let e = FlashDevice::open(&whole.size(ByteSize(8 << 20))).unwrap_err();
    assert!(matches!(e, DeviceError::NoSpace { .. }), "{e}");
    let shared = SharedRegion::open(disk.0.path(), "words", 8 << 20).unwrap_err();
    assert!(shared.to_string().contains("8 MiB"), "{shared}");
}

#[test]
fn a_limit_on_file_sizes_is_an_error_not_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new("sh")
        .args(["-c", "ulimit -f 64; exec \"$0\" --exact limited_child --nocapture"])
        .arg(std::env::current_exe().unwrap())
        .env("LARDER_TEST_LIMITED", dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && text.contains("File too large"), "{:?} {text}", out.status);
}

/// Not a test of its own: see above.
#[test]
fn limited_child() {
    let Some(dir) = std::env::var_os("LARDER_TEST_LIMITED") else { return };
    let options = DeviceOptions::new(Path::new(&dir).join("flash")).size(ByteSize(1 << 20));
    println!("{}", FlashDevice::open(&options).unwrap_err());
}
