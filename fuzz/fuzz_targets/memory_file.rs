//! A memory file of any bytes, and a good one with some of its bytes replaced; and its description.
#![no_main]

use larder_format::Uuid;
use larder_format::memory_file::{
    MemoryFileError, MemoryFileReader, MemoryFileWriter, Meta, Next, Object,
};
use libfuzzer_sys::fuzz_target;

fn meta() -> Meta {
    Meta {
        id: [1; 16],
        run: 5,
        cas_base: 6,
        flash: Uuid([0; 16]),
        written: 7,
        flush_at: 0,
        flushed_at: 0,
        objects: 3,
        bytes: 0,
    }
}

fn read(bytes: &[u8]) -> Result<u64, MemoryFileError> {
    let mut reader = MemoryFileReader::open(bytes, &meta(), 200)?;
    let mut sum = 0u64;
    loop {
        match reader.next_object()? {
            Next::End => return Ok(sum),
            Next::TooLarge => {}
            Next::Object(o) => {
                assert!(!o.key.is_empty() && o.key.len() + o.value.len() <= 200);
                sum = sum.wrapping_add(o.cas);
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let _ = read(data);
    if let Ok(found) = Meta::decode(data) {
        assert_eq!(found.encode()[..8], data[..8]);
    }

    let names: [&[u8]; 1] = [b"app"];
    let mut writer = MemoryFileWriter::create(Vec::new(), [1; 16], 5, names).expect("memory");
    for n in 0..3u8 {
        let value = vec![n; usize::from(n) * 100];
        let object = Object { key: b"key", value: &value, cas: 9, ..Object::default() };
        writer.object(&object).expect("memory");
    }
    let (good, _, _) = writer.finish().expect("memory");
    let mut bad = good.clone();
    // One patch of two bytes: a fuzzer that sees comparisons would forge checksums with more.
    if let [low, high, bytes @ ..] = &data[..data.len().min(4)] {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % (bad.len() - 2);
        bad[at..at + bytes.len()].copy_from_slice(bytes);
    }
    assert_eq!(read(&bad).is_ok(), bad == good);
});
