//! Pages, extents and whole segments of any bytes; and real records with some of their bytes replaced.
#![no_main]

use larder_format::page::locate;
use larder_format::record::mark_dead;
use larder_format::{
    Filling, Find, Kind, PAGE_SIZE, RecordMeta, claimed, encode_into, find, find_extent, walk,
};
use libfuzzer_sys::fuzz_target;

const FILLING: Filling = Filling { salt: 1, segment: 2, generation: 3 };
const KEYS: [&[u8]; 3] = [b"a", b"second", b"the third key"];

fuzz_target!(|data: &[u8]| {
    for kind in [Kind::Small, Kind::Large] {
        for walked in walk(data, kind, FILLING) {
            assert!(walked.offset + walked.record.len() <= data.len());
            let _ = walked.record.meta();
        }
    }
    // Where records begin and end is said by a table that may be damaged.
    let (first, last) = (data.len() / 3, data.len().saturating_mul(2));
    for part in [first..data.len() / 2, last..first, 0..last] {
        for walked in walk(data, Kind::Large, FILLING).within(part.clone()) {
            assert!(walked.offset >= part.start && walked.offset + walked.record.len() <= part.end);
        }
    }
    if let Some(said) = claimed(data) {
        assert!(said.len > said.key.len() && said.key.len() < data.len());
    }
    let page = &data[..data.len().min(PAGE_SIZE)];
    for key in KEYS {
        if let Find::Found(record) = find(page, key, FILLING) {
            assert_eq!(record.key(), key);
        }
        let _ = find_extent(data, key, FILLING);
        assert!(locate(page, key).is_none_or(|at| at.end <= page.len()));
    }
    let _ = mark_dead(&mut page.to_vec(), FILLING);

    // What is patched into a good page may hide its records, but never change one unnoticed.
    let mut good = vec![0; PAGE_SIZE];
    let mut at = 0;
    for key in KEYS {
        at += encode_into(&mut good[at..], &RecordMeta::default(), key, &[7; 100], FILLING);
    }
    // One patch of two bytes: a fuzzer that sees comparisons would forge checksums with more.
    if let [low, high, bytes @ ..] = &data[..data.len().min(4)] {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % (PAGE_SIZE - 2);
        good[at..at + bytes.len()].copy_from_slice(bytes);
    }
    for key in KEYS {
        if let Find::Found(record) = find(&good, key, FILLING) {
            assert_eq!(record.value(), [7; 100]);
        }
    }
});
