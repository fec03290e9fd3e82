use larder_base::Rng;

use super::*;
use crate::block::detect::partition::tests::mbr_of;

/// A superblock of ext4 with blocks of 4 KiB, 32768 of them to a group.
pub(super) fn ext4_head(blocks: u32, uuid: u8) -> Vec<u8> {
    let mut head = vec![0u8; 4096];
    let sb = &mut head[1024..];
    let mut put32 = |at: usize, v: u32| sb[at..at + 4].copy_from_slice(&v.to_le_bytes());
    put32(0, 8192 * blocks.div_ceil(32768));
    put32(4, blocks);
    put32(0x18, 2);
    put32(0x20, 32768);
    put32(0x28, 8192);
    put32(0x4c, 1);
    put32(0x60, 0x42);
    put32(0x64, 1);
    sb[0x38..0x3a].copy_from_slice(&MAGIC_EXT4.to_le_bytes());
    sb[0x58..0x5a].copy_from_slice(&256u16.to_le_bytes());
    sb[0x68..0x78].fill(uuid);
    head
}

const MAGIC_EXT4: u16 = 0xef53;

/// A superblock of XFS version 5 with blocks of 4 KiB and groups of 16384.
pub(super) fn xfs_head(blocks: u64, uuid: u8) -> Vec<u8> {
    let mut head = vec![0u8; 4096];
    head[..4].copy_from_slice(b"XFSB");
    let put = |head: &mut Vec<u8>, at: usize, v: &[u8]| head[at..at + v.len()].copy_from_slice(v);
    put(&mut head, 4, &4096u32.to_be_bytes());
    put(&mut head, 8, &blocks.to_be_bytes());
    put(&mut head, 32, &[uuid; 16]);
    put(&mut head, 48, &100u64.to_be_bytes());
    put(&mut head, 84, &16384u32.to_be_bytes());
    put(&mut head, 88, &(blocks.div_ceil(16384) as u32).to_be_bytes());
    put(&mut head, 96, &50u32.to_be_bytes());
    put(&mut head, 100, &0xb4a5u16.to_be_bytes());
    put(&mut head, 102, &512u16.to_be_bytes());
    put(&mut head, 104, &512u16.to_be_bytes());
    put(&mut head, 120, &[12, 9, 9, 3, 14]);
    head
}

fn small() -> Detector {
    Detector::new(1 << 40, 1024)
}

#[test]
fn file_systems_in_partitions_are_found_and_asked_for() {
    let mut d = small();
    assert_eq!(d.next_wanted(), Some((0, PARTITION_TABLE_BYTES as u64)));
    d.observe(0, &mbr_of(&[(0x83, 2048, 300_000), (0x83, 400_000, 300_000)]));
    assert_eq!(d.find(0), Some(MetadataKind::PartitionTable));
    let (first, second) = (2048 * 512, 400_000 * 512);
    assert_eq!((d.next_wanted(), d.next_wanted()), (Some((first, 4096)), Some((second, 4096))));
    assert_eq!(d.observe(first, &ext4_head(32768, 1)), BlockKind::Metadata);
    assert_eq!(d.observe(second, &xfs_head(32768, 2)), BlockKind::Metadata);
    let known: Vec<_> = d.file_systems().collect();
    assert_eq!(known, [("ext4", first), ("xfs", second)]);
    assert_eq!(d.next_wanted(), Some((first + 4096, 4096)), "the group descriptors");
    assert_eq!(d.classify(first + (1000 << 12), 4096), BlockKind::Data);
    assert_eq!(d.classify(second + (120 << 12), 4096), BlockKind::Journal);
    assert_eq!(
        d.find(second + (16384 << 12)),
        Some(MetadataKind::Superblock),
        "of the second group"
    );
    assert_eq!(d.classify(1 << 39, 4096), BlockKind::Unknown);
    // A line that begins in data and ends in metadata.
    assert_eq!(d.classify(second + (16383 << 12), 8192), BlockKind::Metadata);
}

#[test]
fn a_new_file_system_replaces_the_old() {
    let mut d = small();
    d.observe(0, &ext4_head(32768, 1));
    d.learned.set(500 << 12, MetadataKind::Directory);
    d.observe(0, &ext4_head(32768, 1));
    assert_eq!(d.find(500 << 12), Some(MetadataKind::Directory), "the same again");
    d.observe(0, &ext4_head(32768, 2));
    assert_eq!(d.find(500 << 12), None, "another UUID");
    d.observe(0, &xfs_head(32768, 2));
    assert_eq!(d.file_systems().collect::<Vec<_>>(), [("xfs", 0)]);
    d.observe(0, &[0; 4096]);
    assert_eq!(d.file_systems().count(), 0);
}

#[test]
fn directories_are_told_from_what_resembles_them() {
    let mut d = small();
    d.observe(0, &ext4_head(32768, 1));
    let mut block = vec![0u8; 4096];
    let entries: [(u32, u16, &[u8]); 3] =
        [(2, 12, b"."), (2, 12, b".."), (11, 4072, b"lost+found")];
    let mut at = 0;
    for (inode, len, name) in entries {
        block[at..at + 4].copy_from_slice(&inode.to_le_bytes());
        block[at + 4..at + 6].copy_from_slice(&len.to_le_bytes());
        block[at + 6..at + 8].copy_from_slice(&[name.len() as u8, 2]);
        block[at + 8..at + 8 + name.len()].copy_from_slice(name);
        at += usize::from(len);
    }
    assert_eq!(d.observe(700 << 12, &block), BlockKind::Metadata);
    assert_eq!(d.find(700 << 12), Some(MetadataKind::Directory));
    assert_eq!(
        d.observe(700 << 12, &[0; 4096]),
        BlockKind::Data,
        "it was freed and used for a file"
    );
    assert_eq!(d.find(700 << 12), None);
    for (at, value) in [(0, 0xff), (4, 13), (6, 200), (7, 9), (24 + 8, b'/'), (28, 0xe0)] {
        let mut other = block.clone();
        other[at] = value;
        if at == 0 {
            other[3] = value;
        }
        assert_eq!(d.observe(700 << 12, &other), BlockKind::Data, "byte {at}");
    }
}

/// An encrypted directory has names of any bytes: it is one where its inode says so, and nowhere else.
#[test]
fn an_encrypted_directory_is_one_where_its_inode_says_so() {
    let mut d = small();
    d.observe(0, &ext4_head(32768, 1));
    let mut block = vec![0u8; 4096];
    let entries: [(u32, u16, &[u8]); 3] =
        [(2, 12, b"."), (2, 12, b".."), (11, 4072, b"a/b\0c\xff/\0")];
    let mut at = 0;
    for (inode, len, name) in entries {
        block[at..at + 4].copy_from_slice(&inode.to_le_bytes());
        block[at + 4..at + 6].copy_from_slice(&len.to_le_bytes());
        block[at + 6..at + 8].copy_from_slice(&[name.len() as u8, 2]);
        block[at + 8..at + 8 + name.len()].copy_from_slice(name);
        at += usize::from(len);
    }
    assert_eq!(d.observe(700 << 12, &block), BlockKind::Data);
    d.learned.set(700 << 12, MetadataKind::Directory);
    assert_eq!(d.observe(700 << 12, &block), BlockKind::Metadata);
    assert_eq!(d.observe(700 << 12, &[7; 4096]), BlockKind::Data, "a file's by now");
    assert_eq!(d.observe(700 << 12, &block), BlockKind::Data);
}

/// Blocks with every magic, and superblocks, with some of their bytes replaced.
#[test]
fn any_bytes_are_survived_and_memory_is_bounded() {
    let mut rng = Rng::new(8);
    let magics: [&[u8]; 14] = [
        b"XFSB",
        b"XAGF",
        b"XAGI",
        b"IAB3",
        b"IABT",
        b"BMA3",
        b"BMAP",
        b"IN",
        b"XDB3",
        b"XSLM",
        b"DQ",
        &[0x0a, 0xf3],
        &[0, 0, 2, 0xea],
        &[2, 0, 0, 0, 12, 0, 1, 2, b'.', 0],
    ];
    for round in 0..300 {
        let mut d = Detector::new(1 << 34, 256);
        let mut head = match round % 3 {
            0 => ext4_head(rng.range(1, 1 << 20) as u32, 1),
            1 => xfs_head(rng.range(16, 1 << 20), 1),
            _ => mbr_of(&[(0x83, rng.below(100) as u32, 100_000)]),
        };
        for _ in 0..rng.below(6) {
            let at = rng.below(head.len() as u64) as usize;
            head[at] = rng.next_u64() as u8;
        }
        if round % 3 == 0 && rng.chance(0.7) {
            let at = 1024 + rng.below(0x180) as usize;
            head[at] = rng.next_u64() as u8;
        }
        d.observe(0, &head);
        for _ in 0..60 {
            let len = [0u64, 511, 512, 4096, 8192, 65_536][rng.below(6) as usize];
            let mut bytes = vec![0u8; len as usize];
            if rng.chance(0.3) {
                rng.fill(&mut bytes);
            }
            for block in bytes.chunks_mut(4096) {
                let magic = magics[rng.below(magics.len() as u64) as usize];
                if rng.chance(0.7) && block.len() > 200 {
                    block[..magic.len()].copy_from_slice(magic);
                    for _ in 0..rng.below(20) {
                        let at = rng.below(200) as usize;
                        block[at] = rng.next_u64() as u8;
                    }
                }
            }
            let offset = match rng.below(4) {
                0 => u64::MAX - rng.below(9000),
                1 => rng.next_u64(),
                _ => rng.below(1 << 20) * 512,
            };
            d.observe(offset, &bytes);
            d.classify(offset, len);
            if let Some((offset, len)) = d.next_wanted() {
                assert!(offset + len <= 1 << 34);
                d.observe(offset, &head[..(len as usize).min(head.len())]);
            }
        }
        assert!(d.memory_bytes() < 1 << 20, "{}", d.memory_bytes());
    }
}
