//! What the tests of this crate need beside cargo.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

#[path = "../../tests/lib/foreign.rs"]
mod foreign;

fn main() {
    foreign::declare(&["mount", "loop"]);
    let disk = disk();
    let readable = disk.as_ref().is_some_and(|disk| {
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(disk).is_ok()
    });
    foreign::declare_able(&[
        ("shm", std::path::Path::new("/dev/shm").is_dir()),
        ("io_uring", io_uring::IoUring::new(4).is_ok()),
        ("direct", has_direct()),
        ("disk", disk.is_some()),
        ("disk-to-read", readable),
    ]);
}

/// Whether files in the temporary directory can be transferred directly.
fn has_direct() -> bool {
    let path = std::env::temp_dir().join(format!("larder-build-{}", std::process::id()));
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).custom_flags(libc::O_DIRECT);
    let able = options.open(&path).is_ok();
    let _ = std::fs::remove_file(&path);
    able
}

/// The disk that the temporary directory lies on, if its file system says where files lie on it.
fn disk() -> Option<PathBuf> {
    let device = File::open(std::env::temp_dir()).ok()?.metadata().ok()?.dev();
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let kind = mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        (left.split(' ').nth(2)? == number).then(|| right.split(' ').next())?
    })?;
    let place = std::fs::canonicalize(format!("/sys/dev/block/{number}")).ok()?;
    let name =
        if place.join("partition").exists() { place.parent()? } else { &place }.file_name()?;
    let layered = ["dm-", "md"].iter().any(|layer| name.to_string_lossy().starts_with(layer));
    let tells = ["ext2", "ext3", "ext4", "xfs", "f2fs"].contains(&kind);
    (tells && !layered).then(|| PathBuf::from("/dev").join(name))
}
