//! Pieces: a part of a payload is verified alone.

use std::ops::Range;

use larder_format::block::write_log::pieces::{PIECE, check, count, cover, sums};
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_part_is_verified_alone(
        seed: u64, length in 1usize..20_000, start in 0usize..20_000, len in 1usize..9_000, rot: usize,
    ) {
        let mut payload = vec![0; length];
        larder_base::Rng::new(seed).fill(&mut payload);
        let sums: Vec<u32> = sums(&payload).collect();
        prop_assert_eq!(sums.len() as u64, count(length as u64));
        let part = cover(start as u64..(start + len) as u64, length as u64);
        let (from, to) = (part.start as usize, part.end as usize);
        let end = (start + len).min(length);
        prop_assert!(start >= end || from <= start && end <= to);
        let first = from / PIECE;
        prop_assert_eq!(check(&sums, first, &payload[from..to]), Ok(()));
        let rot = rot % length;
        payload[rot] ^= 4;
        let hit = (from..to).contains(&rot);
        let want = if hit { Err(rot / PIECE) } else { Ok(()) };
        prop_assert_eq!(check(&sums, first, &payload[from..to]), want);
    }
}

#[test]
fn pieces_without_a_checksum_and_cut_pieces_are_damaged() {
    let payload = [7; 5000];
    let sums: Vec<u32> = sums(&payload).collect();
    assert_eq!(check(&sums, 0, &payload[..4999]), Err(1));
    assert_eq!(check(&sums[..1], 0, &payload), Err(1));
    assert_eq!(check(&sums, usize::MAX, &[]), Ok(()));
    assert_eq!(cover(Range { start: 9, end: 4 }, 100), 0..0);
    assert_eq!(cover(u64::MAX - 1..u64::MAX, u64::MAX), u64::MAX / 4096 * 4096..u64::MAX);
}
