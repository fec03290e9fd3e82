//! What a block device is called, whatever its number is: numbers are given anew at each start of the system.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{major, minor};

/// A name that stays with the device `number`: from the links that udev makes by what the device says of itself (its world-wide
/// name before its model and serial number), or from the kernel's own description. `None`: it has none.
pub(super) fn lasting_name(number: u64) -> Option<String> {
    by_id(Path::new("/dev/disk/by-id"), |path| {
        fs::metadata(path).is_ok_and(|meta| meta.rdev() == number)
    })
    .or_else(|| described(Path::new("/sys/dev/block"), number))
}

/// The best of the links below `dir` that lead to the device.
fn by_id(dir: &Path, leads_there: impl Fn(&Path) -> bool) -> Option<String> {
    let rank = |name: &str| {
        [
            "wwn-",
            "nvme-eui.",
            "nvme-uuid.",
            "dm-uuid-",
            "md-uuid-",
            "scsi-",
            "nvme-",
            "ata-",
            "virtio-",
        ]
        .iter()
        .position(|prefix| name.starts_with(prefix))
        .unwrap_or(usize::MAX)
    };
    let mut names: Vec<String> = fs::read_dir(dir)
        .ok()?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            leads_there(&entry.path()).then(|| entry.file_name().to_string_lossy().into_owned())
        })
        .collect();
    // Among equals the first by name: the same at each start.
    names.sort_by_key(|name| (rank(name), name.clone()));
    names.into_iter().next().map(|name| format!("by-id:{name}"))
}

/// What the kernel says of it.
fn described(root: &Path, number: u64) -> Option<String> {
    let place = root.join(format!("{}:{}", major(number), minor(number)));
    let text = |path: &str| {
        let text = fs::read_to_string(place.join(path)).ok()?;
        let text = text.trim();
        (!text.is_empty()).then(|| text.to_owned())
    };
    // A partition has its disk's name, above it, and a number.
    if let Some(partition) = text("partition") {
        let disk = ["../wwid", "../device/wwid", "../device/serial", "../serial"];
        let disk = disk.into_iter().find_map(text)?;
        return Some(format!("disk:{disk} partition {partition}"));
    }
    if let Some(file) = text("loop/backing_file") {
        return Some(format!("loop:{file}"));
    }
    ["dm/uuid", "wwid", "device/wwid", "device/serial", "serial"]
        .into_iter()
        .find_map(text)
        .map(|name| format!("disk:{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::makedev;

    #[test]
    fn the_same_name_at_each_start() {
        let dir = tempfile::TempDir::new().unwrap();
        for name in ["ata-DISK_1", "wwn-0x5000", "zzz", "scsi-1"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let all = |_: &Path| true;
        assert_eq!(by_id(dir.path(), all).as_deref(), Some("by-id:wwn-0x5000"));
        let not_wwn = |path: &Path| !path.ends_with("wwn-0x5000");
        assert_eq!(by_id(dir.path(), not_wwn).as_deref(), Some("by-id:scsi-1"));
        assert_eq!(by_id(dir.path(), |_| false), None);
        assert_eq!(by_id(Path::new("/nowhere"), all), None);
    }

    #[test]
    fn what_the_kernel_says() {
        let dir = tempfile::TempDir::new().unwrap();
        let (disk, part) = (dir.path().join("8:0"), dir.path().join("8:0/sda1"));
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::create_dir_all(&part).unwrap();
        fs::write(disk.join("device/wwid"), "naa.5000 \n").unwrap();
        fs::write(part.join("partition"), "1\n").unwrap();
        std::os::unix::fs::symlink(&part, dir.path().join("8:1")).unwrap();
        assert_eq!(described(dir.path(), makedev(8, 0)).as_deref(), Some("disk:naa.5000"));
        assert_eq!(
            described(dir.path(), makedev(8, 1)).as_deref(),
            Some("disk:naa.5000 partition 1")
        );
        assert_eq!(described(dir.path(), makedev(9, 0)), None);
    }
}
