//! The table of a FRONTIER of any bytes: no two tables say the same.
#![no_main]

use larder_format::block::write_log::Frontier;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(found) = Frontier::decode(data) {
        assert_eq!(found.encode(), data);
    }
    // Counts that fit the length, so that most tables get past them.
    let mut table = data.to_vec();
    if table.len() >= 32 {
        let rest = table.len() - 32;
        table[16..32].fill(0);
        table[16..18].copy_from_slice(&((rest / 32) as u16).to_le_bytes());
        table[20] = (rest % 32 / 16) as u8;
    }
    if let Ok(found) = Frontier::decode(&table) {
        assert_eq!(found.encode(), table);
    }
});
