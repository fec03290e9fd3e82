//! The footer and the header of a segment of the write log: any bytes, with checksums that hold.
#![no_main]

use larder_format::Uuid;
use larder_format::block::write_log::footer::END_BYTES;
use larder_format::block::write_log::segment::HEADER_BYTES;
use larder_format::block::write_log::{Footer, SegmentGeometry, SegmentHeader};
use libfuzzer_sys::fuzz_target;

const CACHE: Uuid = Uuid([1; 16]);

fuzz_target!(|data: &[u8]| {
    let geometry = SegmentGeometry::new(1 << 20, 512).expect("a segment");
    let _ = Footer::decode(data, CACHE, 7, geometry);
    let _ = SegmentHeader::decode(data, CACHE);

    // The fuzzer's first bytes are the counts, the rest is what they count.
    let (counts, rest) = data.split_at(data.len().min(32));
    let bytes = (rest.len() + END_BYTES).next_multiple_of(512);
    let mut footer = vec![0; bytes];
    footer[..rest.len()].copy_from_slice(rest);
    let (body, end) = footer.split_at_mut(bytes - END_BYTES);
    end[..8].copy_from_slice(b"LARDERWF");
    end[12..16].copy_from_slice(&1u32.to_le_bytes());
    end[16..32].copy_from_slice(&CACHE.0);
    end[32..40].copy_from_slice(&7u64.to_le_bytes());
    end[40..40 + counts.len()].copy_from_slice(counts);
    end[52..56].copy_from_slice(&(bytes as u32).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&end[12..]), body);
    end[8..12].copy_from_slice(&crc.to_le_bytes());
    if let Ok(found) = Footer::decode(&footer, CACHE, 7, geometry) {
        let again = found.encode(geometry);
        assert_eq!(Footer::decode(&again, CACHE, 7, geometry), Ok(found));
    }

    let mut header = [0; HEADER_BYTES];
    let n = data.len().min(HEADER_BYTES);
    header[..n].copy_from_slice(&data[..n]);
    header[..8].copy_from_slice(b"LARDERWS");
    header[12..16].copy_from_slice(&1u32.to_le_bytes());
    header[16..32].copy_from_slice(&CACHE.0);
    let crc = crc32c::crc32c(&header[12..]);
    header[8..12].copy_from_slice(&crc.to_le_bytes());
    if let Ok(found) = SegmentHeader::decode(&header, CACHE) {
        let mut again = vec![0; found.geometry.sector() as usize];
        found.encode(&mut again);
        assert_eq!(SegmentHeader::decode(&again, CACHE), Ok(found));
    }
});
