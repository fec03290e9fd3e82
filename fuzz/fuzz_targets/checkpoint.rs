//! A checkpoint of any bytes, and a good one with some of its bytes replaced.
#![no_main]

use larder_format::checkpoint::{CheckpointError, CheckpointReader, CheckpointWriter, Identity};
use larder_format::{Geometry, Uuid};
use libfuzzer_sys::fuzz_target;

fn read(bytes: &[u8], identity: &Identity) -> Result<u64, CheckpointError> {
    let mut reader = CheckpointReader::open(bytes, identity)?;
    let mut sum = 0u64;
    while let Some(section) = reader.next_section()? {
        if section.id % 2 == 0 {
            reader.read_words(|word| sum = sum.wrapping_add(word))?;
        }
    }
    Ok(sum)
}

fuzz_target!(|data: &[u8]| {
    let geometry = Geometry::plan(64 << 20).expect("64 MiB can be divided");
    let identity = Identity { uuid: Uuid([1; 16]), epoch: 5, run: 6, geometry };
    assert!(read(data, &identity).is_err() || data.len() >= 92);

    let mut writer = CheckpointWriter::create(Vec::new(), &identity, 0).expect("memory");
    for id in 0..3 {
        writer.section(2, id, 50, 0..50).expect("memory");
    }
    let good = writer.finish().expect("memory");
    let mut bad = good.clone();
    // One patch of two bytes: a fuzzer that sees comparisons would forge checksums with more.
    if let [low, high, bytes @ ..] = &data[..data.len().min(4)] {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % (bad.len() - 2);
        bad[at..at + bytes.len()].copy_from_slice(bytes);
    }
    assert_eq!(read(&bad, &identity).is_ok(), bad == good);
});
