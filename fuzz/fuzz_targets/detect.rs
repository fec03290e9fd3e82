//! Metadata detection: any bytes at any places of a volume, after a superblock with some of its bytes replaced.
#![no_main]

use larder_policy::block::detect::Detector;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut detector = Detector::new(1 << 34, 512);
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
