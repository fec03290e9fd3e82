//! Descriptors of any bytes: what is accepted lies within the volume and the limits.
#![no_main]

use larder_block::ublk::abi::DESCRIPTOR_BYTES;
use larder_block::ublk::request::{MAX_RANGE_SECTORS, Shape, What, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let [kind, sectors, rest @ ..] = data else { return };
    let Some(raw) = rest.first_chunk::<DESCRIPTOR_BYTES>() else { return };
    let shape = Shape {
        sectors: 1 << (sectors % 40),
        max_transfer: 1 << 20,
        read_only: kind & 1 != 0,
        discard: kind & 2 != 0,
    };
    let inside = |offset: u64, len: u32, most: u32| {
        assert!(len > 0 && len <= most && len % 512 == 0);
        assert!(offset + u64::from(len) <= shape.sectors * 512);
    };
    match parse(raw, &shape) {
        What::Read { offset, len } => inside(offset, len, shape.max_transfer),
        What::Write { offset, len, .. } => {
            assert!(!shape.read_only);
            inside(offset, len, shape.max_transfer);
        }
        What::Discard { offset, len } => {
            assert!(shape.discard && !shape.read_only);
            inside(offset, len, MAX_RANGE_SECTORS * 512);
        }
        What::WriteZeroes { offset, len, .. } => {
            assert!(!shape.read_only);
            inside(offset, len, MAX_RANGE_SECTORS * 512);
        }
        What::Flush | What::Refused { .. } => {}
    }
});
