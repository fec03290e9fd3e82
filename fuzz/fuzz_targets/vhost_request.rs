//! A guest's memory of any bytes, and a chain of descriptors in it: what is accepted lies within the memory and the volume.
#![no_main]

use larder_block::vhost::Memory;
use larder_block::vhost::config::Shape;
use larder_block::vhost::request::{Table, What, parse};
use libfuzzer_sys::fuzz_target;
use vm_memory::{Bytes, GuestAddress};

const MEMORY: u64 = 0x4000;
const BASE: u64 = 0x1000;

fuzz_target!(|data: &[u8]| {
    let [head, len, kind, rest @ ..] = data else { return };
    let shape = Shape {
        sectors: 1000,
        max_transfer: 1 << 20,
        size_max: 8192,
        read_only: kind & 1 != 0,
        discard: kind & 2 != 0,
        preferred: 4096,
    };
    let ranges = [(GuestAddress(BASE), MEMORY as usize)];
    let Ok(memory) = Memory::from_ranges(&ranges) else { return };
    let rest = &rest[..rest.len().min(MEMORY as usize)];
    if memory.write_slice(rest, GuestAddress(BASE)).is_err() {
        return;
    }
    let table = Table { at: GuestAddress(BASE), len: u16::from(*len).max(1) };
    let Ok(parsed) = parse(&memory, table, u16::from(*head), &shape) else { return };
    let held = |at: GuestAddress, len: u64| assert!(at.0 >= BASE && at.0 + len <= BASE + MEMORY);
    let inside = |offset: u64, len: u32| assert!(len > 0 && offset + u64::from(len) <= 512_000);
    held(parsed.status, 1);
    match parsed.what {
        What::Read { offset, len, into: pieces } | What::Write { offset, len, from: pieces } => {
            inside(offset, len);
            pieces.iter().for_each(|p| held(p.at, u64::from(p.len)));
            assert_eq!(pieces.iter().map(|p| p.len).sum::<u32>(), len);
        }
        What::Discard(list) | What::WriteZeroes(list) => {
            assert!(!shape.read_only && list.len() <= 32);
            list.iter().for_each(|r| inside(r.offset, r.len));
        }
        What::Id(pieces) => pieces.iter().for_each(|p| held(p.at, u64::from(p.len))),
        What::Flush | What::Nothing | What::Refused { .. } => {}
    }
});
