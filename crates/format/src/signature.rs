//! Telling that a device holds somebody's data, before anything is written to it.
//!
//! The offsets and magic numbers are those that libblkid and wipefs know (util-linux `libblkid/src/superblocks`). What is
//! not recognised but is not zero either counts as unknown data: formatting over it needs the operator's word.

use std::fmt;

use crate::le;

/// Bytes from the start of a device that [`Signature::detect`] wants to see.
pub const HEAD_BYTES: usize = 128 << 10;
/// Bytes up to the end of a device that [`Signature::detect_tail`] wants to see.
pub const TAIL_BYTES: usize = 128 << 10;

/// What a device holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature {
    /// In words: "an ext4 file system".
    pub name: &'static str,
    /// Where the signature was found, bytes from the start of what was looked at.
    pub offset: usize,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (signature at byte {})", self.name, self.offset)
    }
}

/// Magic numbers at fixed places, the specific before the general: a FAT boot sector also ends like an MBR.
const FIXED: &[(usize, &[u8], &str)] = &[
    (0, b"XFSB", "an XFS file system"),
    (65_600, b"_BHRfS_M", "a btrfs file system"),
    (1024, b"\x10\x20\xf5\xf2", "an f2fs file system"),
    (1024, b"\xe2\xe1\xf5\xe0", "an EROFS file system"),
    (0, b"hsqs", "a squashfs file system"),
    (65_588, b"ReIsErFs", "a reiserfs file system"),
    (65_588, b"ReIsEr2Fs", "a reiserfs file system"),
    (65_588, b"ReIsEr3Fs", "a reiserfs file system"),
    (32_768, b"JFS1", "a JFS file system"),
    (32_769, b"CD001", "an ISO 9660 file system"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4086, b"SWAP-SPACE", "swap space"),
    (8182, b"SWAPSPACE2", "swap space"),
    (16_374, b"SWAPSPACE2", "swap space"),
    (65_526, b"SWAPSPACE2", "swap space"),
    (4086, b"S1SUSPEND", "a hibernation image"),
    (0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    (16_384, b"SKUL\xba\xbe", "a LUKS encrypted volume"),
    (3, b"-FVE-FS-", "a BitLocker encrypted volume"),
    (0, b"dmvdo001", "a VDO volume"),
    (516, b"!Stra0tis\x86\xff\x02^\x41rh", "a Stratis pool member"),
    (0, b"bluestore block device", "a Ceph BlueStore device"),
    (4120, BCACHE, "a bcache device"),
    (4120, BCACHEFS, "a bcachefs file system"),
    (0, MD_MAGIC, "an md RAID member"),
    (4096, MD_MAGIC, "an md RAID member"),
    (0, b"QFI\xfb", "a QEMU qcow2 disk image"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT12   ", "a FAT file system"),
    (54, b"FAT16   ", "a FAT file system"),
    (82, b"FAT32   ", "a FAT file system"),
    (512, GPT, "a GPT partition table"),
    (4096, GPT, "a GPT partition table"),
];

const GPT: &[u8] = b"EFI PART";
/// 0xa92b4efc, little endian (versions 0.90 on little-endian hosts, and 1.x).
const MD_MAGIC: &[u8] = b"\xfc\x4e\x2b\xa9";
const BCACHE: &[u8] = b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81";
const BCACHEFS: &[u8] = b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef";

impl Signature {
    /// Looks at the first bytes of a device, [`HEAD_BYTES`] of them or as many as it has. `None` means that they are all
    /// zero. A Larder superblock is not looked for ([`choose`](crate::superblock::choose) comes first).
    pub fn detect(head: &[u8]) -> Option<Signature> {
        ext(head)
            .or_else(|| lvm(head))
            .or_else(|| fixed(head))
            .or_else(|| zfs(head))
            .or_else(|| mbr(head))
            .or_else(|| {
                let offset = head.iter().position(|&b| b != 0)?;
                Some(Signature { name: "unknown data (not zero)", offset })
            })
    }

    /// Looks at the last bytes of a device ([`TAIL_BYTES`]), which end where it ends, for what is kept there: the backup of
    /// a GPT, an md RAID superblock. Other bytes mean nothing there.
    pub fn detect_tail(tail: &[u8]) -> Option<Signature> {
        // Devices are whole sectors: count from the end.
        let phase = tail.len() % 512;
        (phase..tail.len()).step_by(512).find_map(|offset| {
            let sector = &tail[offset..];
            let from_end = tail.len() - offset;
            if sector.starts_with(GPT) && (from_end == 512 || from_end == 4096) {
                return Some(Signature { name: "the backup of a GPT partition table", offset });
            }
            sector.starts_with(MD_MAGIC).then_some(Signature { name: "an md RAID member", offset })
        })
    }
}

fn fixed(head: &[u8]) -> Option<Signature> {
    FIXED
        .iter()
        .find(|(offset, magic, _)| head.get(*offset..).is_some_and(|at| at.starts_with(magic)))
        .map(|&(offset, _, name)| Signature { name, offset })
}

/// ext2, 3 and 4 share a magic number; their features tell them apart.
fn ext(head: &[u8]) -> Option<Signature> {
    let superblock = head.get(1024..2048)?;
    if superblock[56..58] != [0x53, 0xef] {
        return None;
    }
    let features = |at: usize| le(&superblock[at..at + 4]);
    const HAS_JOURNAL: u64 = 0x4;
    const EXTENTS_64BIT_FLEX_BG: u64 = 0x40 | 0x80 | 0x200;
    let name = if features(96) & EXTENTS_64BIT_FLEX_BG != 0 {
        "an ext4 file system"
    } else if features(92) & HAS_JOURNAL != 0 {
        "an ext3 file system"
    } else {
        "an ext2 file system"
    };
    Some(Signature { name, offset: 1080 })
}

/// An LVM2 label lies in any of the first four sectors.
fn lvm(head: &[u8]) -> Option<Signature> {
    (0..4).map(|sector| sector * 512).find_map(|offset| {
        let label = head.get(offset..offset + 32)?;
        let found = label.starts_with(b"LABELONE") && &label[24..32] == b"LVM2 001";
        found.then_some(Signature { name: "an LVM2 physical volume", offset })
    })
}

/// A ZFS label: an XDR name-value list at 16 KiB, whose first pair is named "version".
fn zfs(head: &[u8]) -> Option<Signature> {
    let list = head.get(16_384..16_384 + 31)?;
    let found = list[0] == 1 && list[20..24] == [0, 0, 0, 7] && &list[24..31] == b"version";
    found.then_some(Signature { name: "a ZFS pool member", offset: 16_384 })
}

/// An MBR: its end mark and at least one entry in use, every entry's flag being one that partitions have.
fn mbr(head: &[u8]) -> Option<Signature> {
    let sector = head.get(..512)?;
    let mut entries = sector[446..510].chunks_exact(16);
    let used = entries.clone().any(|entry| entry[4] != 0);
    let plausible = entries.all(|entry| matches!(entry[0], 0 | 0x80));
    (sector[510..] == [0x55, 0xaa] && used && plausible)
        .then_some(Signature { name: "an MBR partition table", offset: 510 })
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    fn head_with(parts: &[(usize, &[u8])]) -> Vec<u8> {
        let mut head = vec![0; HEAD_BYTES];
        for (at, bytes) in parts {
            head[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
        head
    }

    #[test]
    fn every_magic_is_known() {
        for &(offset, magic, name) in FIXED {
            let found = Signature::detect(&head_with(&[(offset, magic)])).unwrap();
            assert_eq!(found, Signature { name, offset });
            let short = &head_with(&[(offset, magic)])[..offset + magic.len() - 1];
            assert_ne!(Signature::detect(short).map(|s| s.name), Some(name), "{name} cut short");
        }
    }

    #[test]
    fn the_ext_family() {
        let magic: (usize, &[u8]) = (1080, b"\x53\xef");
        let name = |parts: &[(usize, &[u8])]| Signature::detect(&head_with(parts)).unwrap().name;
        assert_eq!(name(&[magic]), "an ext2 file system");
        assert_eq!(name(&[magic, (1116, &[4])]), "an ext3 file system");
        assert_eq!(name(&[magic, (1116, &[4]), (1120, &[0x40])]), "an ext4 file system");
        assert_eq!(name(&[magic, (1121, &[2])]), "an ext4 file system");
    }

    #[test]
    fn labels_and_tables() {
        let lvm = head_with(&[(512, b"LABELONE"), (536, b"LVM2 001")]);
        assert_eq!(Signature::detect(&lvm).unwrap().name, "an LVM2 physical volume");
        let zfs = head_with(&[
            (
                16_384,
                &[1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0x24, 0, 0, 0, 0x20, 0, 0, 0, 7],
            ),
            (16_408, b"version"),
        ]);
        assert_eq!(Signature::detect(&zfs).unwrap().name, "a ZFS pool member");
        let mbr = head_with(&[(446, &[0x80]), (450, &[0x83]), (510, &[0x55, 0xaa])]);
        assert_eq!(Signature::detect(&mbr).unwrap().name, "an MBR partition table");
        // A FAT boot sector has the same end mark.
        let fat =
            head_with(&[(82, b"FAT32   "), (446, &[0x80]), (450, &[1]), (510, &[0x55, 0xaa])]);
        assert_eq!(Signature::detect(&fat).unwrap().name, "a FAT file system");
        // A protective MBR before a GPT: the table that counts is named.
        let gpt = head_with(&[(450, &[0xee]), (510, &[0x55, 0xaa]), (512, GPT)]);
        assert_eq!(Signature::detect(&gpt).unwrap().name, "a GPT partition table");
    }

    #[test]
    fn nothing_and_anything() {
        assert_eq!(Signature::detect(&[0; HEAD_BYTES]), None);
        assert_eq!(Signature::detect(&[]), None);
        let text = Signature::detect(b"\0\0dear diary").unwrap();
        assert_eq!(text.to_string(), "unknown data (not zero) (signature at byte 2)");
    }

    #[test]
    fn tails() {
        let mut tail = vec![0; TAIL_BYTES];
        assert_eq!(Signature::detect_tail(&tail), None);
        tail[TAIL_BYTES - 512..][..8].copy_from_slice(GPT);
        assert!(Signature::detect_tail(&tail).unwrap().name.contains("GPT"));
        let mut tail = vec![7; 65_536];
        assert_eq!(Signature::detect_tail(&tail), None);
        tail[65_536 - 8192..][..4].copy_from_slice(MD_MAGIC);
        assert_eq!(Signature::detect_tail(&tail).unwrap().name, "an md RAID member");
        assert_eq!(Signature::detect_tail(&[]), None);
    }

    #[test]
    fn random_bytes_never_panic() {
        let mut rng = Rng::new(12);
        let mut bytes = vec![0; 70_000];
        for _ in 0..200 {
            rng.fill(&mut bytes);
            let len = rng.below(bytes.len() as u64) as usize;
            let _ = Signature::detect_tail(&bytes[..len]);
            assert_eq!(
                Signature::detect(&bytes[..len]).is_some(),
                bytes[..len].iter().any(|&b| b != 0)
            );
        }
    }
}
