//! One suite over files (direct and buffered, on disk and on tmpfs), a loop device where one may be had, and memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use larder_base::{ByteSize, Rng};

use super::*;
use crate::PAGE;
use crate::testing::MemoryDevice;

const SIZE: u64 = 6 << 20;

fn open(path: &Path, direct: bool) -> FlashDevice {
    let options = DeviceOptions { direct, ..DeviceOptions::new(path).size(ByteSize(SIZE)) };
    FlashDevice::open(&options).unwrap()
}

fn shm() -> Option<tempfile::TempDir> {
    tempfile::tempdir_in("/dev/shm").ok()
}

/// A loop device over a file.
pub(crate) struct Loop(pub(crate) PathBuf);

impl Loop {
    pub(crate) fn over(file: &Path) -> Loop {
        let out = Command::new("losetup").args(["--find", "--show"]).arg(file).output().unwrap();
        assert!(out.status.success(), "losetup: {}", String::from_utf8_lossy(&out.stderr));
        Loop(String::from_utf8(out.stdout).unwrap().trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// Random writes and reads against a plain array.
fn behaves_like_an_array(device: &dyn Device) {
    let Geometry { size, block } = device.geometry();
    assert_eq!(size, SIZE);
    let mut model = vec![0u8; SIZE as usize];
    let mut rng = Rng::new(17);
    device.write_at(0, &model).unwrap();
    for step in 0..150 {
        let blocks =
            rng.range(0, if step % 10 == 0 { 3 << 11 } else { 40 }).min(SIZE / u64::from(block));
        let len = blocks as usize * block as usize;
        let offset = rng.below((SIZE - len as u64) / u64::from(block) + 1) * u64::from(block);
        let mut bytes = vec![0; len + 1];
        rng.fill(&mut bytes);
        // Memory at odd addresses too: the device must see to alignment itself.
        let from = (step % 2) as usize;
        let bytes = &bytes[from..from + len];
        device.write_at(offset, bytes).unwrap();
        model[offset as usize..offset as usize + len].copy_from_slice(bytes);

        let len = rng.below(if step % 10 == 1 { 3 << 20 } else { 9_000 });
        let offset = rng.below(SIZE - len + 1);
        let mut out = vec![0xEE; len as usize];
        device.read_at(offset, &mut out).unwrap();
        assert!(out == model[offset as usize..(offset + len) as usize], "{len} at {offset}");
        if step % 50 == 0 {
            device.sync().unwrap();
        }
    }
    device.discard(0, 64 << 10).unwrap();
    let mut rest = vec![0; SIZE as usize - (64 << 10)];
    device.read_at(64 << 10, &mut rest).unwrap();
    assert!(rest == model[64 << 10..], "a discard touches its own range only");
    assert!(matches!(device.write_at(1, &[0; 512]), Err(DeviceError::Misaligned { .. })));
    assert!(matches!(device.discard(0, 100), Err(DeviceError::Misaligned { .. })));
    for (offset, len) in [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 1)] {
        assert!(matches!(
            device.read_at(offset, &mut vec![0; len]),
            Err(DeviceError::OutOfRange { .. })
        ));
    }
}

#[test]
fn every_kind_of_device_behaves_like_an_array() {
    let dir = tempfile::tempdir().unwrap();
    behaves_like_an_array(&MemoryDevice::new(SIZE as usize));
    behaves_like_an_array(&open(&dir.path().join("direct"), true));
    let buffered = open(&dir.path().join("buffered"), false);
    assert!(!buffered.is_direct() && buffered.why_buffered().is_some());
    behaves_like_an_array(&buffered);
    if let Some(dir) = shm() {
        // O_DIRECT on tmpfs depends on the kernel; both ways must work.
        let device = open(&dir.path().join("flash"), true);
        assert_eq!(device.is_direct(), device.why_buffered().is_none());
        behaves_like_an_array(&device);
    }
}

#[test]
#[cfg_attr(without = "loop", ignore = "needs a loop device, and root")]
fn a_block_device_is_used_whole_and_guarded() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
    let disk = Loop::over(&image);
    let device = FlashDevice::open(&DeviceOptions::new(&disk.0)).unwrap();
    assert!(device.is_block_device() && !device.was_created());
    behaves_like_an_array(&device);
    let again = FlashDevice::open(&DeviceOptions::new(&disk.0)).unwrap_err();
    assert!(matches!(again, DeviceError::InUse { .. }), "{again}");
    drop(device);
    let beyond =
        FlashDevice::open(&DeviceOptions::new(&disk.0).size(ByteSize(SIZE + 4096))).unwrap_err();
    assert!(matches!(beyond, DeviceError::SizeDiffers { .. }), "{beyond}");
    let part = FlashDevice::open(&DeviceOptions::new(&disk.0).size(ByteSize(1 << 20))).unwrap();
    assert_eq!(part.geometry().size, 1 << 20);
    assert!(part.write_at(1 << 20, &[0; 4096]).is_err(), "beyond the part that was asked for");
}

#[test]
fn a_file_is_made_sparse_or_whole_and_keeps_its_size() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flash");
    let missing = FlashDevice::open(&DeviceOptions::new(&path)).unwrap_err();
    assert!(matches!(missing, DeviceError::SizeMissing { .. }), "{missing}");
    assert!(!path.exists(), "nothing is left behind");

    let device = open(&path, true);
    assert!(device.was_created());
    assert!(device.allocated().unwrap() < SIZE / 4, "sparse");
    device.write_at(8192, &[3; 4096]).unwrap();
    drop(device);

    for wanted in [SIZE - 4096, SIZE * 2] {
        let e = FlashDevice::open(&DeviceOptions::new(&path).size(ByteSize(wanted))).unwrap_err();
        assert!(matches!(e, DeviceError::SizeDiffers { found, .. } if found == SIZE), "{e}");
    }
    assert_eq!(std::fs::metadata(&path).unwrap().len(), SIZE);
    let device = FlashDevice::open(&DeviceOptions::new(&path)).unwrap();
    assert!(!device.was_created());
    let mut page = [0; PAGE];
    device.read_at(8192, &mut page).unwrap();
    assert_eq!(page, [3; PAGE]);

    let whole = DeviceOptions { preallocate: true, ..DeviceOptions::new(dir.path().join("whole")) };
    let device = FlashDevice::open(&whole.size(ByteSize(SIZE))).unwrap();
    assert!(device.allocated().unwrap() >= SIZE);
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn what_is_no_device_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let refuse = |path: &Path, words: &str| {
        let e = FlashDevice::open(&DeviceOptions::new(path).size(ByteSize(SIZE)))
            .unwrap_err()
            .to_string();
        assert!(
            e.contains(words) && e.contains(path.to_str().unwrap()) && !e.contains('\n'),
            "{e}"
        );
    };
    refuse(dir.path(), "a directory");
    refuse(Path::new("/dev/null"), "a character device");
    refuse(Path::new("/nonexistent/dir/flash"), "create the directory first");
    let pipe = dir.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .unwrap();
    refuse(&pipe, "a pipe");
    let small = dir.path().join("small");
    std::fs::write(&small, b"tiny").unwrap();
    let e = FlashDevice::open(&DeviceOptions::new(&small)).unwrap_err();
    assert!(matches!(e, DeviceError::TooSmall { size: 4, .. }), "{e}");
    assert_eq!(std::fs::read(&small).unwrap(), b"tiny");
}

#[test]
#[cfg_attr(without = "shm", ignore = "needs /dev/shm")]
fn a_disk_without_room_is_named_with_the_arithmetic() {
    let dir = shm().unwrap();
    let path = dir.path().join("flash");
    let options = DeviceOptions { preallocate: true, ..DeviceOptions::new(&path) };
    let e = FlashDevice::open(&options.size(ByteSize(1 << 50))).unwrap_err();
    assert!(matches!(e, DeviceError::NoSpace { needed, .. } if needed == 1 << 50), "{e}");
    assert!(!path.exists(), "nothing stays behind");
}

/// Not a test of its own: run in a child process by the tests below.
#[test]
fn child_that_holds_the_lock() {
    let Some(path) = std::env::var_os("LARDER_TEST_HOLD") else { return };
    let _device = FlashDevice::open(&DeviceOptions::new(path)).unwrap();
    println!("holding");
    std::thread::sleep(std::time::Duration::from_secs(60));
}

#[test]
fn a_second_process_is_refused_and_told_who_holds_it_until_the_first_is_killed() {
    use std::io::{BufRead, BufReader};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flash");
    drop(open(&path, true));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "device::tests::child_that_holds_the_lock", "--nocapture"])
        .env("LARDER_TEST_HOLD", &path)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|l| l.unwrap().contains("holding")));
    let refused = FlashDevice::open(&DeviceOptions::new(&path)).unwrap_err();
    let DeviceError::InUse { holder: Some(holder), .. } = &refused else { panic!("{refused}") };
    assert_eq!(holder.pid, child.id());
    assert!(refused.to_string().contains(&format!("process {}", child.id())), "{refused}");
    child.kill().unwrap();
    child.wait().unwrap();
    FlashDevice::open(&DeviceOptions::new(&path)).unwrap();
}

#[test]
fn a_second_open_in_one_process_is_refused_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("flash");
    let first = open(&path, true);
    let e = FlashDevice::open(&DeviceOptions::new(&path)).unwrap_err();
    assert!(
        matches!(&e, DeviceError::InUse { holder: Some(h), .. } if h.pid == std::process::id()),
        "{e}"
    );
    drop(first);
    FlashDevice::open(&DeviceOptions::new(&path)).unwrap();
}

#[test]
fn the_open_file_waits_for_its_io() {
    let dir = tempfile::tempdir().unwrap();
    let device = open(&dir.path().join("flash"), true);
    let flags = rustix::fs::fcntl_getfl(device.raw().unwrap()).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK), "{flags:?}");
    assert_eq!(flags.contains(rustix::fs::OFlags::DIRECT), device.is_direct());
}
