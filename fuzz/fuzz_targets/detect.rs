//! Metadata detection: any bytes at any places of a volume, after a superblock with some of its bytes replaced.
#![no_main]

use larder_policy::block::detect::Detector;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut detector = Detector::new(1 << 34, 512);
    // First, a superblock of ext4 or XFS, or none; then how many of its bytes are replaced, each by a place (2 bytes) and a byte.
    let [file_system, replaced, data @ ..] = data else { return };
    let mut head = match file_system % 3 {
        0 => Vec::new(),
        1 => ext4_head(),
        _ => xfs_head(),
    };
    let (patches, data) = data.split_at(data.len().min(usize::from(*replaced % 16) * 3));
    for patch in patches.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([patch[0], patch[1]]));
        if let Some(byte) = head.get_mut(at % 4096) {
            *byte = patch[2];
        }
    }
    detector.observe(0, &head);
    // Pieces of: a place (in sectors, 3 bytes), a length in 512 bytes (1 byte), and what is repeated there.
    let mut rest = data;
    while let [a, b, c, len, tail @ ..] = rest {
        let offset = u64::from(u32::from_le_bytes([*a, *b, *c, 0])) * 512;
        let len = usize::from(*len % 17) * 512;
        let take = tail.len().min(len.max(1));
        let (seed, next) = tail.split_at(take);
        let mut bytes = vec![0u8; len];
        let end = seed.len().min(len);
        bytes[..end].copy_from_slice(&seed[..end]);
        detector.observe(offset, &bytes);
        detector.classify(offset, len as u64);
        while let Some((offset, len)) = detector.next_wanted() {
            assert!(offset + len <= 1 << 34);
        }
        rest = next;
    }
    assert!(detector.memory_bytes() < 64 << 20);
});

/// The first 4 KiB of an ext4 with blocks of 4 KiB, in one group.
fn ext4_head() -> Vec<u8> {
    let mut head = vec![0u8; 4096];
    let mut put = |at: usize, v: &[u8]| head[1024 + at..][..v.len()].copy_from_slice(v);
    put(0x00, &8192u32.to_le_bytes());
    put(0x04, &32768u32.to_le_bytes());
    put(0x18, &2u32.to_le_bytes());
    put(0x20, &32768u32.to_le_bytes());
    put(0x28, &8192u32.to_le_bytes());
    put(0x38, &0xef53u16.to_le_bytes());
    put(0x4c, &1u32.to_le_bytes());
    put(0x58, &256u16.to_le_bytes());
    put(0x60, &0x42u32.to_le_bytes());
    put(0x64, &1u32.to_le_bytes());
    put(0x68, &[7; 16]);
    head
}

/// The first 4 KiB of an XFS of version 5 with blocks of 4 KiB, in two groups.
fn xfs_head() -> Vec<u8> {
    let mut head = vec![0u8; 4096];
    let mut put = |at: usize, v: &[u8]| head[at..][..v.len()].copy_from_slice(v);
    put(0, b"XFSB");
    put(4, &4096u32.to_be_bytes());
    put(8, &32768u64.to_be_bytes());
    put(32, &[7; 16]);
    put(48, &100u64.to_be_bytes());
    put(84, &16384u32.to_be_bytes());
    put(88, &2u32.to_be_bytes());
    put(96, &50u32.to_be_bytes());
    put(100, &0xb4a5u16.to_be_bytes());
    put(102, &512u16.to_be_bytes());
    put(104, &512u16.to_be_bytes());
    put(120, &[12, 9, 9, 3, 14]);
    head
}
