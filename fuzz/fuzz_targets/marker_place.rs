//! What is read from a marker's place of any bytes, and what a write over it leaves: the marker before or the new one, whatever is cut short.
#![no_main]

use larder_format::Uuid;
use larder_format::block::marker::{COPY_BYTES, Marker, MarkerState, Order};
use larder_volume::marker::Found;
use larder_volume::marker::memory::{MemoryMarker, Unflushed};
use libfuzzer_sys::fuzz_target;

fn marker(number: u64) -> Marker {
    Marker {
        number,
        state: MarkerState::Dirty,
        volume: Uuid([1; 16]),
        identity: [0; 64],
        cache: Uuid([2; 16]),
        run: 1,
        host: "host".into(),
        generation: 3,
        attachment: 1,
        frontier: 9,
        time: 0,
        mark: None,
        order: Order::Flush,
        applied: 0,
        joins: 0,
        probes: false,
    }
}

fuzz_target!(|data: &[u8]| {
    // Both copies of a marker, with bytes that were changed.
    let memory = MemoryMarker::new();
    for copy in 0..2 {
        memory.set_bytes(copy * COPY_BYTES, &marker(7).encode());
    }
    let mut changed = [false; 2];
    for change in data.chunks_exact(4) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % (2 * COPY_BYTES - 1);
        memory.set_bytes(at, &change[2..]);
        changed[at / COPY_BYTES] = true;
        changed[(at + 1) / COPY_BYTES] = true;
    }
    let mut place = memory.open(false);
    let found = place.read();
    if changed != [true; 2] {
        assert!(matches!(&found, Ok(Found::There(there)) if **there == marker(7)));
    }
    // (A marker of another version, or no marker: then nothing is written.)
    let (Ok(Found::There(before)), [steps, sectors, ..]) = (found, data) else { return };
    let Some(number) = before.number.checked_add(1) else { return };
    let next = marker(number);
    memory.cut_after(u64::from(*steps % 6), Unflushed::Torn(usize::from(*sectors % 9)));
    let written = place.write(&next);
    drop(place);
    memory.set_power(true);
    match memory.open(false).read() {
        Ok(Found::There(there)) if written.is_ok() => assert_eq!(*there, next),
        Ok(Found::There(there)) => assert!(*there == *before || *there == next),
        other => panic!("neither is there: {other:?}"),
    }
});
