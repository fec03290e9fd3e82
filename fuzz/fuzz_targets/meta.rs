//! One meta command line: parsing and every form of answer.
#![no_main]

use larder_base::{Expiry, Nanos, Now, UnixSecs};
use larder_engine::kv::api::{Item, Tier};
use larder_kv::protocol::meta::MetaLine;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let now = Now { mono: Nanos::ZERO, wall: UnixSecs(1_700_000_000) };
    for first_flag in [2, 3] {
        let Ok(meta) = MetaLine::parse(data, first_flag) else { continue };
        assert!(meta.key().len() <= 250);
        let _ = (meta.get(now), meta.store(now, b"value"), meta.delete(now), meta.arith(now));
        let item = Item {
            value: b"value",
            flags: 7,
            cas: 8,
            expiry: Expiry(1_700_000_009),
            expiry_before: Expiry(1_700_000_008),
            last_access: 1,
            hit_before: true,
            won: true,
            stale: true,
            already_won: true,
            tier: Tier::Flash,
        };
        let mut out = Vec::new();
        meta.write_item(&mut out, &item, now.wall);
        meta.write_status(&mut out, b"EN");
        meta.write_stored(&mut out, b"HD", 1, 2);
        meta.write_number(&mut out, 3, &item, now.wall);
        meta.write_debug(&mut out, &item, now.wall);
        assert!(out.ends_with(b"\r\n"));
    }
});
