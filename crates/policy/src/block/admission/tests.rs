use larder_base::{Nanos, Rng};

use super::*;
use crate::block::{Victim, VolumeId};

const LINE: u64 = 4096;

fn setup() -> BlockSetup {
    BlockSetup { line_bytes: LINE as u32, lines: 16384, backing_bytes: 1 << 32, seed: 5 }
}

fn admission(name: &str) -> BlockAdmission {
    BlockAdmission::new(&name.parse().unwrap(), &setup()).unwrap()
}

fn access(op: BlockOp, offset: u64, bytes: u64) -> BlockAccess {
    let (volume, kind, now) = (VolumeId(0), BlockKind::Unknown, Nanos::ZERO);
    BlockAccess { volume, offset, bytes, op, kind, now }
}

fn candidate(line: u64, observed: Observed) -> BlockCandidate {
    let line = LineId { volume: VolumeId(0), offset: line * LINE };
    let (op, kind) = (BlockOp::Read, BlockKind::Unknown);
    BlockCandidate { line, op, kind, observed, victim: None }
}

/// Reads lines `first..first + count` in one access; how many of them are admitted.
fn read(admission: &mut BlockAdmission, first: u64, count: u64) -> usize {
    let observed = admission.observe(&access(BlockOp::Read, first * LINE, count * LINE));
    let verdicts = (first..first + count).map(|l| admission.admit(&candidate(l, observed)));
    verdicts.filter(|v| v.is_admit()).count()
}

#[test]
fn all_admits_all_and_takes_no_memory() {
    let mut all = admission("all");
    assert_eq!((0..100).map(|i| read(&mut all, i, 1)).sum::<usize>(), 100);
    assert_eq!((all.memory_bytes(), all.verdicts().admitted), (0, 100));
}

#[test]
fn seqr_rejects_all_but_the_start() {
    let mut seqr = admission("seqr(run=2)");
    assert_eq!((0..100).map(|i| read(&mut seqr, i * 8, 8)).sum::<usize>(), 8);
    assert_eq!(seqr.verdicts().rejected(Reason::Sequential), 99 * 8);
}

#[test]
fn a_stream_may_have_free_slots_where_it_is_told_so() {
    let free = [("seqr(run=2,free=on)", 8), ("sseqr(run=2,length=128k,free=on)", 32)];
    for (name, admitted) in free {
        let mut policy = admission(name);
        assert_eq!((0..100).map(|i| read(&mut policy, i * 8, 8)).sum::<usize>(), admitted);
        let verdicts = policy.verdicts();
        assert_eq!(
            (verdicts.rejected(Reason::Sequential), verdicts.if_free),
            (0, 800 - admitted as u64)
        );
    }
    // Every policy of a chain is asked, and what may have a free slot only leaves no touches.
    let mut chain = admission("seqr(run=2,free=on)+tc(segment=4k)");
    assert_eq!((0..100).map(|i| read(&mut chain, i, 1)).sum::<usize>(), 0);
    assert_eq!((chain.verdicts().if_free, chain.verdicts().rejected(Reason::FewTouches)), (0, 100));
    chain.observe(&access(BlockOp::Read, 1 << 31, LINE));
    assert_eq!(read(&mut chain, 50, 1), 0);
    // What is read ahead of is a stream before it is recognised.
    let ahead = |name: &str| admission(name).judge_ahead();
    let reject = Verdict::Reject(Reason::Sequential);
    assert_eq!((ahead("seqr(free=on)"), ahead("seqr+tc")), (Verdict::IfFree, reject));
    assert_eq!((ahead("all"), ahead("sseqr(free=on)")), (Verdict::Admit, Verdict::Admit));
}

#[test]
fn sseqr_admits_the_first_length_however_it_is_cut() {
    for (down, per_access) in
        [(false, 1), (false, 8), (false, 32), (false, 512), (true, 1), (true, 8)]
    {
        let mut sseqr = admission("sseqr(length=128k)");
        let count = 512 / per_access;
        let admitted: usize = (0..count)
            .map(|i| if down { 10_000 - (i + 1) * per_access } else { 10_000 + i * per_access })
            .map(|first| read(&mut sseqr, first, per_access))
            .sum();
        assert_eq!(admitted, 32, "down {down}, {per_access} lines at a time");
    }
}

/// 1.25 GiB in pieces of 128 MiB, of which four connections copy one each at a time.
#[test]
fn of_a_copy_by_four_connections_one_length_is_admitted() {
    let lines_admitted = |name: &str| {
        let mut policy = admission(name);
        let mut admitted = 0;
        // Each one's piece, and how far it has come there, in requests of 256 KiB; they do not keep step.
        let mut at: Vec<(u64, u64)> = (0..4).map(|piece| (piece, 0)).collect();
        let (mut next, mut rng) = (4, Rng::new(2));
        while !at.is_empty() {
            let connection = rng.below(at.len() as u64) as usize;
            let (piece, done) = at[connection];
            admitted += read(&mut policy, piece * 32_768 + done * 64, 64);
            at[connection].1 += 1;
            if done + 1 < 512 {
                continue;
            }
            at[connection] = (next, 0);
            next += 1;
            at.retain(|(piece, _)| *piece < 10);
        }
        admitted * 4096 / (256 << 10)
    };
    // The length of 4 MiB, and of each of the nine other pieces what comes before it is known for a lane: about three requests, not 16.
    let (seqr, sseqr) = (lines_admitted("seqr(free=on)"), lines_admitted("sseqr(free=on)"));
    assert!(sseqr <= 16 + 9 * 4 && seqr <= 10 * 3, "{sseqr} {seqr}");
    assert!(sseqr >= 16, "{sseqr}");
    // The papers' policy has a length for each piece.
    assert!(lines_admitted("sseqr") >= 10 * 16);
}

#[test]
fn an_observation_keeps_its_meaning_while_others_pass() {
    let mut seqr = admission("seqr(run=2)");
    seqr.observe(&access(BlockOp::Read, 0, LINE));
    let scan = seqr.observe(&access(BlockOp::Read, LINE, LINE));
    let random = seqr.observe(&access(BlockOp::Read, 1 << 30, LINE));
    assert_eq!(seqr.admit(&candidate(1, scan)), Verdict::Reject(Reason::Sequential));
    assert_eq!(seqr.admit(&candidate(1 << 18, random)), Verdict::Admit);
    assert_eq!(seqr.admit(&candidate(1, scan)), Verdict::Reject(Reason::Sequential));
}

#[test]
fn touch_count_admits_at_the_threshold() {
    let mut tc = admission("touch_count(threshold=3,segment=4k)");
    assert_eq!((0..5).map(|_| read(&mut tc, 77, 1)).collect::<Vec<_>>(), [0, 0, 1, 1, 1]);
    assert_eq!(tc.verdicts().rejected(Reason::FewTouches), 2);
    // A line larger than a segment: any of its segments will do.
    let config = "tc(segment=4k)".parse().unwrap();
    let mut wide =
        BlockAdmission::new(&config, &BlockSetup { line_bytes: 65536, ..setup() }).unwrap();
    wide.observe(&access(BlockOp::Read, 65536 + 8192, 512));
    let observed = wide.observe(&access(BlockOp::Read, 65536 + 8192, 512));
    assert_eq!(wide.admit(&candidate(16, observed)), Verdict::Admit);
    assert_eq!(wide.admit(&candidate(32, observed)), Verdict::Reject(Reason::FewTouches));
}

#[test]
fn in_a_chain_a_scan_leaves_no_touches() {
    for (name, wanted) in [("seqr+tc(segment=4k)", 0), ("tc(segment=4k)+seqr", 1)] {
        let mut chain = admission(name);
        for i in 0..100 {
            read(&mut chain, i, 1);
        }
        // A random read of a line that the scan passed: its first touch, or its second.
        chain.observe(&access(BlockOp::Read, 1 << 31, LINE));
        assert_eq!(read(&mut chain, 50, 1), wanted, "{name}");
    }
}

#[test]
fn two_lbs_prefers_metadata_then_the_hotter() {
    let mut two = admission("two_lbs");
    for _ in 0..3 {
        read(&mut two, 10, 1);
    }
    read(&mut two, 20, 1);
    let line = |n: u64| LineId { volume: VolumeId(0), offset: n * LINE };
    let against = |n, kind, victim, victim_kind| BlockCandidate {
        kind,
        victim: Some(Victim { line: line(victim), kind: victim_kind }),
        ..candidate(n, Observed::default())
    };
    let (data, meta, journal) = (BlockKind::Data, BlockKind::Metadata, BlockKind::Journal);
    let colder = Verdict::Reject(Reason::NotHotter);
    assert_eq!(two.admit(&against(10, data, 20, data)), Verdict::Admit);
    assert_eq!(two.admit(&against(20, data, 10, data)), colder);
    assert_eq!(two.admit(&against(20, data, 20, data)), colder, "equal is not enough");
    assert_eq!(two.admit(&against(20, meta, 10, data)), Verdict::Admit);
    assert_eq!(two.admit(&against(20, meta, 10, meta)), Verdict::Admit);
    assert_eq!(two.admit(&against(10, data, 20, meta)), Verdict::Reject(Reason::MetadataVictim));
    assert_eq!(two.admit(&against(20, journal, 10, data)), colder, "a journal has no preference");
    assert_eq!(two.admit(&candidate(30, Observed::default())), Verdict::Admit, "a free slot");
    let write = |writes: &str, n, victim| {
        let mut two = admission(&format!("two_lbs(writes={writes})"));
        read(&mut two, 10, 1);
        two.admit(&BlockCandidate { op: BlockOp::Write, ..against(n, data, victim, data) })
    };
    assert_eq!(write("compare", 10, 20), Verdict::Admit);
    assert_eq!(write("compare", 20, 10), colder);
    assert_eq!(write("admit", 20, 10), Verdict::Admit);
    assert_eq!(write("reject", 10, 20), colder);
}

#[test]
fn metadata_passes_a_chain_with_two_lbs_only() {
    for (name, wanted) in [("seqr(run=2)+two_lbs", 10), ("seqr+tc(segment=4k)", 0)] {
        let mut chain = admission(name);
        let mut admitted = 0;
        for i in 0..10 {
            let kind = BlockKind::Metadata;
            let observed =
                chain.observe(&BlockAccess { kind, ..access(BlockOp::Read, i * LINE, LINE) });
            admitted += usize::from(
                chain.admit(&BlockCandidate { kind, ..candidate(i, observed) }).is_admit(),
            );
        }
        assert_eq!(admitted, wanted, "{name}");
    }
}

#[test]
fn memory_follows_from_parameters_and_stays() {
    for (name, most) in [
        ("seqr", 64 * 64),
        ("tc", 64 << 10),
        ("tc(counters=1m,bits=4,bitmaps=3)", 4 << 19),
        ("two_lbs", 2 * 16384),
        ("sseqr+tc", 70 << 10),
    ] {
        let mut a = admission(name);
        let memory = a.memory_bytes();
        assert!(memory > 0 && memory <= most, "{name}: {memory}");
        let mut rng = Rng::new(1);
        for _ in 0..2_000 {
            read(&mut a, rng.below(1 << 20), rng.range(1, 16));
        }
        assert_eq!(a.memory_bytes(), memory, "{name}");
    }
    let huge = "tc(counters=16g,bits=8,bitmaps=16)".parse().unwrap();
    let error = BlockAdmission::new(&huge, &setup()).unwrap_err().to_string();
    assert!(error.contains("touch_count") && error.contains("272 GiB"), "{error}");
}

#[test]
fn the_same_accesses_give_the_same_verdicts() {
    let run = || {
        let mut a = admission("sseqr+tc+two_lbs");
        let mut rng = Rng::new(9);
        for _ in 0..5_000 {
            read(&mut a, rng.below(1 << 14), rng.range(1, 8));
        }
        *a.verdicts()
    };
    assert_eq!(run(), run());
    assert!(run().admitted > 0 && run().rejected(Reason::FewTouches) > 0);
}

#[test]
fn accesses_at_the_end_of_the_address_space_and_empty_ones() {
    for name in BLOCK_POLICY_NAMES {
        let mut a = admission(name);
        for (offset, bytes) in
            [(u64::MAX, 0), (u64::MAX - 5, u64::MAX), (0, 0), (0, u64::MAX), (1, 1)]
        {
            for _ in 0..3 {
                let observed = a.observe(&access(BlockOp::Write, offset, bytes));
                a.admit(&candidate(offset >> 12, observed));
            }
        }
    }
}

#[test]
fn explains_what_it_knows() {
    let mut a = admission("seqr+tc(segment=4k)+two_lbs");
    read(&mut a, 9, 1);
    let text = a.explain(&candidate(9, Observed::default()));
    for part in
        ["rejected", "touched 1 times", "2 are needed", "accessed 1 times", "0 of the sequential"]
    {
        assert!(text.contains(part), "'{text}' lacks '{part}'");
    }
    let verdicts = *a.verdicts();
    a.explain(&candidate(9, Observed::default()));
    assert_eq!(*a.verdicts(), verdicts);
}
