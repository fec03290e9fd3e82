//! What an NVMe drive reports of its own wear: bytes the host wrote, bytes written to NAND, share of its life used.
//!
//! Read by the admin command "get log page" (NVM Express Base Specification 2.0, section 5.16): the SMART log (page
//! 02h, figure 207), and the OCP Datacenter NVMe SSD Specification's log C0h (version 2.0, section 4.8.3) where the
//! drive has it. Other drives report nothing here.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use crate::device::{Device, FlashDevice};

/// Length of both log pages, bytes.
const LOG_LEN: usize = 512;

/// A drive's own account of its wear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wear {
    /// The drive's device name: `nvme0n1`.
    pub drive: String,
    /// Bytes that hosts have written to it in its life.
    pub host_written: u64,
    /// Bytes written to NAND in its life, where the drive says (OCP drives do).
    pub nand_written: Option<u64>,
    /// Share of its rated life used, per cent; may pass 100 and stops at 255.
    pub percentage_used: u8,
    /// Spare blocks left, per cent.
    pub available_spare: u8,
}

impl Wear {
    /// Device-level write amplification over the drive's life: NAND bytes per host byte.
    pub fn write_amplification(&self) -> Option<f64> {
        let nand = self.nand_written.filter(|_| self.host_written > 0)?;
        Some(nand as f64 / self.host_written as f64)
    }

    /// The wear of the drive under `device`, be it the drive itself, a partition or a file on a file system (through
    /// device-mapper layers with one drive beneath). `None` when that is no NVMe drive, or may not be asked (it takes
    /// root).
    pub fn of(device: &FlashDevice) -> Option<Wear> {
        let stat = rustix::fs::fstat(device.raw()?).ok()?;
        let id = if device.is_block_device() { stat.st_rdev } else { stat.st_dev };
        let drive =
            drive_under(Path::new("/sys/dev/block"), rustix::fs::major(id), rustix::fs::minor(id))?;
        let file = OpenOptions::new().read(true).open(Path::new("/dev").join(&drive)).ok()?;
        Wear::read(drive, &file)
    }

    fn read(drive: String, file: &File) -> Option<Wear> {
        let smart = parse_smart(&log_page(file.as_fd(), 0x02)?);
        let nand_written = log_page(file.as_fd(), 0xC0).and_then(|log| parse_ocp(&log));
        Some(Wear {
            drive,
            host_written: smart.host_written,
            nand_written,
            percentage_used: smart.percentage_used,
            available_spare: smart.available_spare,
        })
    }
}

/// The NVMe namespace (`nvme0n1`) under block device `major:minor`: itself, the drive of a partition, or the one drive
/// beneath a stack of device-mapper volumes. `sys` is `/sys/dev/block`.
fn drive_under(sys: &Path, major: u32, minor: u32) -> Option<String> {
    let mut dir = std::fs::canonicalize(sys.join(format!("{major}:{minor}"))).ok()?;
    // A handful of layers at most; a loop of links must not hold us.
    for _ in 0..8 {
        if dir.join("partition").exists() {
            dir = dir.parent()?.to_owned();
        }
        let name = dir.file_name()?.to_str()?;
        if is_nvme_namespace(name) {
            return Some(name.to_owned());
        }
        let below: Vec<PathBuf> =
            std::fs::read_dir(dir.join("slaves")).ok()?.flatten().map(|e| e.path()).collect();
        let [only] = below.as_slice() else { return None };
        dir = std::fs::canonicalize(only).ok()?;
    }
    None
}

/// `nvme`, digits, `n`, digits.
fn is_nvme_namespace(name: &str) -> bool {
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    name.strip_prefix("nvme")
        .and_then(|rest| rest.split_once('n'))
        .is_some_and(|(a, b)| digits(a) && digits(b))
}

/// `struct nvme_passthru_cmd` of `linux/nvme_ioctl.h`.
#[repr(C)]
#[derive(Default)]
struct AdminCommand {
    opcode: u8,
    flags: u8,
    rsvd1: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    addr: u64,
    metadata_len: u32,
    data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    timeout_ms: u32,
    result: u32,
}

const _: () = assert!(size_of::<AdminCommand>() == 72);

/// One log page of the whole drive; `None` when the drive or the system declines.
fn log_page(fd: BorrowedFd<'_>, id: u8) -> Option<[u8; LOG_LEN]> {
    /// `_IOWR('N', 0x41, struct nvme_passthru_cmd)`.
    const NVME_IOCTL_ADMIN_CMD: libc::Ioctl =
        (3 << 30 | (size_of::<AdminCommand>() as u32) << 16 | (b'N' as u32) << 8 | 0x41)
            as libc::Ioctl;
    const GET_LOG_PAGE: u8 = 0x02;
    const ALL_NAMESPACES: u32 = u32::MAX;
    let mut log = [0u8; LOG_LEN];
    let dwords_less_one = (LOG_LEN / 4 - 1) as u32;
    let mut command = AdminCommand {
        opcode: GET_LOG_PAGE,
        nsid: ALL_NAMESPACES,
        addr: log.as_mut_ptr().expose_provenance() as u64,
        data_len: LOG_LEN as u32,
        cdw10: dwords_less_one << 16 | u32::from(id),
        timeout_ms: 1_000,
        ..AdminCommand::default()
    };
    // SAFETY: the descriptor is open for the borrow's life. The request reads and writes the command structure, whose
    // layout is the kernel's, and writes at most `data_len` bytes at `addr`, which is `log`, before it returns. A
    // descriptor of something else answers ENOTTY.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), NVME_IOCTL_ADMIN_CMD, &raw mut command) };
    // Positive: the drive's own status, such as "no such log page".
    (rc == 0).then_some(log)
}

struct Smart {
    host_written: u64,
    percentage_used: u8,
    available_spare: u8,
}

/// The SMART log: available spare in byte 3, percentage used in byte 5, data units written in bytes 48 to 63 (little
/// endian, thousands of 512-byte units, rounded up).
fn parse_smart(log: &[u8; LOG_LEN]) -> Smart {
    Smart {
        host_written: u64::try_from(u128_at(log, 48).saturating_mul(512_000)).unwrap_or(u64::MAX),
        percentage_used: log[5],
        available_spare: log[3],
    }
}

/// The OCP log: physical media units written, in bytes, in bytes 0 to 15. Known by its GUID in bytes 496 to 511, since
/// vendors use page C0h for other things too.
fn parse_ocp(log: &[u8; LOG_LEN]) -> Option<u64> {
    const GUID: u128 = 0xAFD5_14C9_7C6F_4F9C_A4F2_BFEA_2810_AFC5;
    (u128_at(log, 496) == GUID).then(|| u64::try_from(u128_at(log, 0)).unwrap_or(u64::MAX))
}

fn u128_at(log: &[u8; LOG_LEN], at: usize) -> u128 {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&log[at..at + 16]);
    u128::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_smart_log_is_read_as_specified() {
        let mut log = [0u8; LOG_LEN];
        log[3] = 98; // available spare
        log[5] = 7; // percentage used
        log[32..36].copy_from_slice(&[0xFF; 4]); // data units read: not ours
        log[48..51].copy_from_slice(&[0x40, 0x42, 0x0F]); // 1,000,000 units written
        let smart = parse_smart(&log);
        assert_eq!(smart.host_written, 512_000_000_000);
        assert_eq!((smart.percentage_used, smart.available_spare), (7, 98));
        log[48..64].fill(0xFF);
        assert_eq!(parse_smart(&log).host_written, u64::MAX);
    }

    #[test]
    fn the_ocp_log_counts_only_with_its_guid() {
        let mut log = [0u8; LOG_LEN];
        log[0..6].copy_from_slice(&[0, 0, 0, 0, 0, 1]); // 2^40 bytes
        assert_eq!(parse_ocp(&log), None);
        log[496..512].copy_from_slice(&[
            0xC5, 0xAF, 0x10, 0x28, 0xEA, 0xBF, 0xF2, 0xA4, 0x9C, 0x4F, 0x6F, 0x7C, 0xC9, 0x14,
            0xD5, 0xAF,
        ]);
        assert_eq!(parse_ocp(&log), Some(1 << 40));
        log[511] ^= 1;
        assert_eq!(parse_ocp(&log), None);
    }

    #[test]
    fn amplification_needs_both_numbers() {
        let mut wear = Wear {
            drive: "nvme0n1".into(),
            host_written: 100,
            nand_written: Some(250),
            percentage_used: 0,
            available_spare: 100,
        };
        assert_eq!(wear.write_amplification(), Some(2.5));
        wear.host_written = 0;
        assert_eq!(wear.write_amplification(), None);
    }

    #[test]
    fn the_drive_is_found_through_partitions_and_mapped_volumes() {
        let top = tempfile::tempdir().unwrap();
        let devices = top.path().join("devices");
        let sys = top.path().join("dev/block");
        std::fs::create_dir_all(&sys).unwrap();
        let add = |id: &str, path: &str| {
            let dir = devices.join(path);
            std::fs::create_dir_all(&dir).unwrap();
            symlink(&dir, sys.join(id)).unwrap();
            dir
        };
        add("259:0", "pci/nvme/nvme0/nvme0n1");
        let partition = add("259:1", "pci/nvme/nvme0/nvme0n1/nvme0n1p1");
        std::fs::write(partition.join("partition"), "1").unwrap();
        let volume = add("253:0", "virtual/block/dm-0");
        std::fs::create_dir(volume.join("slaves")).unwrap();
        symlink(&partition, volume.join("slaves/nvme0n1p1")).unwrap();
        let stripe = add("253:1", "virtual/block/dm-1");
        std::fs::create_dir(stripe.join("slaves")).unwrap();
        symlink(&partition, stripe.join("slaves/a")).unwrap();
        symlink(&volume, stripe.join("slaves/b")).unwrap();
        let knot = add("253:2", "virtual/block/dm-2");
        std::fs::create_dir(knot.join("slaves")).unwrap();
        symlink(&knot, knot.join("slaves/dm-2")).unwrap();
        add("8:0", "pci/ata1/sda");

        for (major, minor) in [(259, 0), (259, 1), (253, 0)] {
            assert_eq!(
                drive_under(&sys, major, minor).as_deref(),
                Some("nvme0n1"),
                "{major}:{minor}"
            );
        }
        for (major, minor) in [(253, 1), (253, 2), (8, 0), (7, 7)] {
            assert_eq!(drive_under(&sys, major, minor), None, "{major}:{minor}");
        }
    }

    #[test]
    fn what_is_no_drive_declines() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(log_page(file.as_fd(), 2), None);
        for name in ["nvme0", "nvme0n", "nvmen1", "nvme0n1p1", "sda", "nvme0c0n1"] {
            assert!(!is_nvme_namespace(name), "{name}");
        }
    }
}
