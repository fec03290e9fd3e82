//! A run that is recorded is replayed decision by decision; what is changed in the record is found where it is.

mod live;

use std::io::Cursor;

use larder_base::{ByteSize, Rng};
use larder_format::recording::{
    CHUNK_HEADER, ChunkHeader, END_STREAM, Ended, FILE_HEADER, file_header, parse_file_header, seal,
};
use larder_policy::admission::Objective;
use larder_sim::replay::{RecordFile, flip_decision, replay};
use live::Live;

const MEMORY: u64 = 1 << 30;

fn recorded(policy: &str, seed: u64, requests: u64, flash: bool) -> Vec<u8> {
    let mut live = Live::new(policy, seed, flash);
    live.run(requests);
    live.finish(Ended::Stopped)
}

fn file(bytes: &[u8]) -> RecordFile<Cursor<&[u8]>> {
    RecordFile::open(Cursor::new(bytes)).unwrap()
}

#[test]
fn every_decision_is_the_same() {
    for (policy, seed) in [
        ("all", 1),
        ("flashiness", 2),
        ("flashiness_paper", 3),
        ("ghost", 4),
        ("probability", 5),
        ("expected_reads", 6),
    ] {
        let mut live = Live::new(policy, seed, true);
        live.run(40_000);
        let counts = live.counts();
        let bytes = live.finish(Ended::Stopped);
        eprintln!("{policy}: {counts:?}, {} bytes", bytes.len());
        // The record is worth its name: everything that a run can meet is in it.
        let demanding = policy == "all";
        let (hits, segments) = if demanding { (300, 20) } else { (5, 0) };
        assert!(counts.hits_flash > hits && counts.segments_written > segments, "{counts:?}");
        assert!(!demanding || counts.segments_reclaimed > 5 && counts.corrupt > 0, "{counts:?}");
        // What `all` takes from DRAM goes to flash.
        assert!(demanding || counts.evictions > 20, "{counts:?}");
        assert!(counts.failed_io > 0 && counts.late > 0, "{counts:?}");
        let mut watched = 0;
        let report = replay(&mut file(&bytes), MEMORY, &mut |n| watched = n).unwrap();
        assert_eq!(report.difference, None, "{policy}");
        assert!(report.complete && report.compared == report.records, "{policy}: {report:?}");
        assert_eq!(report.requests, counts.executed, "{policy}");
        assert_eq!(report.segments_written, counts.segments_written, "{policy}");
        assert!(watched > 0);
        // Four shards' arenas hold more than all of the file: values are not in it.
        assert!((bytes.len() as u64) < counts.value_bytes / 2, "{} bytes", bytes.len());
    }
}

/// What `flashiness` seeks where a rate is held, and the price of a write, are of the record's head: a replay decides by them.
#[test]
fn objective_and_price_replay_too() {
    let run = |objective: Objective, price: f32| {
        let mut live = Live::with("flashiness", 2, true, |admission| {
            let f = &mut admission.flashiness;
            (f.objective, f.price, f.bytes_per_second) = (objective, price, ByteSize::kib(2));
        });
        live.run(60_000);
        let counts = live.counts();
        (live.finish(Ended::Stopped), counts)
    };
    let cases = [
        (Objective::Requests, 0.0),
        (Objective::Bytes, 0.0),
        (Objective::Requests, 10.0),
        (Objective::Bytes, 10.0),
    ];
    let mut seen = Vec::new();
    for (objective, price) in cases {
        let (bytes, counts) = run(objective, price);
        let report = replay(&mut file(&bytes), MEMORY, &mut |_| {}).unwrap();
        assert_eq!(report.difference, None, "{objective:?} {price}");
        assert!(report.complete && report.compared == report.records, "{objective:?}: {report:?}");
        seen.push(format!("{counts:?}"));
    }
    assert_ne!(seen[0], seen[1], "the objective makes no difference: it is not tested");
}

#[test]
fn dram_alone_replays_too() {
    let bytes = recorded("all", 9, 20_000, false);
    let report = replay(&mut file(&bytes), MEMORY, &mut |_| {}).unwrap();
    assert!(report.difference.is_none() && report.compared == report.records, "{report:?}");
    assert_eq!(report.segments_written, 0);
}

#[test]
fn a_flipped_decision_is_found_where_it_is() {
    let bytes = recorded("all", 7, 25_000, true);
    let records: Vec<u64> = {
        let file = file(&bytes);
        (0..file.streams()).map(|s| file.records_of(s)).collect()
    };
    let mut rng = Rng::new(1);
    for (stream, &count) in records.iter().enumerate() {
        for _ in 0..3 {
            let number = rng.below(count);
            let mut flipped = Cursor::new(bytes.clone());
            assert!(flip_decision(&mut flipped, stream, number).unwrap());
            let flipped = flipped.into_inner();
            let mut file = file(&flipped);
            let report = replay(&mut file, MEMORY, &mut |_| {}).unwrap();
            let found = report.difference.expect("a difference");
            assert_eq!((found.stream, found.record), (file.name(stream), number));
            assert_ne!(found.recorded, found.replayed);
        }
        let mut whole = Cursor::new(bytes.clone());
        assert!(!flip_decision(&mut whole, stream, count).unwrap());
    }
}

/// What an earlier version wrote has other streams, and says so, or says nothing.
#[test]
fn a_record_of_another_version_is_refused() {
    let bytes = recorded("all", 3, 200, true);
    let length = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    let setup = FILE_HEADER..FILE_HEADER + length;
    let with = |version: Option<u32>| {
        let mut head: serde_json::Value = serde_json::from_slice(&bytes[setup.clone()]).unwrap();
        let head = head.as_object_mut().unwrap();
        assert_eq!(head.remove("kv"), Some(10.into()));
        head.extend(version.map(|version| ("kv".to_owned(), version.into())));
        let mut out = file_header(&serde_json::to_vec(head).unwrap()).unwrap();
        out.extend_from_slice(&bytes[setup.end..]);
        RecordFile::<_>::open(Cursor::new(out)).map(|_| ()).map_err(|e| e.to_string())
    };
    for (version, said) in [(None, 1), (Some(1), 1), (Some(9), 9), (Some(11), 11)] {
        let why = with(version).unwrap_err();
        let words = format!("of version {said}, and this larder reads version 10");
        assert!(why.contains(&words), "{why}");
    }
    assert_eq!(with(Some(10)), Ok(()));
}

/// Whatever is left of a file is replayed as far as it goes, and no difference is made up.
#[test]
fn a_file_that_was_cut_short_replays_as_far_as_it_goes() {
    let bytes = recorded("flashiness", 3, 20_000, true);
    let whole = file(&bytes).records();
    let mut rng = Rng::new(4);
    for _ in 0..12 {
        let cut = bytes.len() / 4 + rng.below(bytes.len() as u64 * 3 / 4) as usize;
        let report = replay(&mut file(&bytes[..cut]), MEMORY, &mut |_| {}).unwrap();
        assert_eq!(report.difference, None, "cut at {cut}");
        assert!(!report.complete && report.ended.is_none());
        assert!(report.compared > 0 && report.compared <= report.records);
        assert!(report.records < whole);
    }
}

/// Damage is refused with its place, or (when it hits nothing that is read) nothing changes; nothing panics.
#[test]
fn damage_is_refused_with_its_place() {
    let bytes = recorded("all", 5, 3_000, true);
    let mut rng = Rng::new(8);
    let mut refused = 0;
    for _ in 0..400 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + rng.below(3) {
            let at = rng.below(damaged.len() as u64) as usize;
            damaged[at] ^= 1 << rng.below(8);
        }
        if rng.chance(0.2) {
            damaged.truncate(rng.below(damaged.len() as u64) as usize);
        }
        let error = match RecordFile::open(Cursor::new(&damaged[..])) {
            Err(e) => e.to_string(),
            Ok(mut file) => match replay(&mut file, MEMORY, &mut |_| {}) {
                Err(e) => e.to_string(),
                // Only what was cut away is damaged.
                Ok(report) => {
                    assert_eq!(report.difference, None);
                    continue;
                }
            },
        };
        assert!(error.contains("byte ") || error.contains("setup"), "{error}");
        refused += 1;
    }
    assert!(refused > 250, "{refused}");
}

/// No byte of a chunk's header can be another without being missed: least of all its length, by which the rest of the file
/// would count as cut short.
#[test]
fn damage_in_the_headers_of_chunks_is_refused_with_its_place() {
    let whole = recorded("all", 5, 3_000, true);
    let mut chunks = chunks_of(&whole);
    let last = *chunks.last().unwrap();
    let end = last.0 + CHUNK_HEADER + last.1.len as usize;
    chunks.push((end, ChunkHeader::parse(whole[end..].first_chunk().unwrap()).unwrap()));
    // With its end, and as a kill between two chunks leaves it.
    // Or one within a chunk, or within its header: those before it are whole.
    let within = last.0 + CHUNK_HEADER + last.1.len as usize / 2;
    for bytes in [&whole[..], &whole[..end], &whole[..within], &whole[..last.0 + 5]] {
        let mut refused = 0;
        let is_whole =
            |c: &&(usize, ChunkHeader)| c.0 + CHUNK_HEADER + c.1.len as usize <= bytes.len();
        for &(at, _) in chunks.iter().filter(is_whole) {
            for bit in 0..8 * CHUNK_HEADER {
                let mut damaged = bytes.to_vec();
                damaged[at + bit / 8] ^= 1 << (bit % 8);
                let error = match RecordFile::open(Cursor::new(&damaged[..])) {
                    Err(e) => e,
                    Ok(mut file) => {
                        let report = replay(&mut file, MEMORY, &mut |_| {});
                        report.expect_err(&format!("bit {bit} of the chunk at {at}"))
                    }
                };
                assert!(error.to_string().contains("byte "), "{error}");
                refused += 1;
            }
        }
        assert!(refused >= 4 * 8 * CHUNK_HEADER, "{refused}");
    }
}

/// Records that make no sense, in chunks whose checksums hold, are refused or replayed to a difference; nothing panics.
#[test]
fn damaged_records_in_sound_chunks_do_no_harm() {
    let bytes = recorded("flashiness", 6, 2_000, true);
    let chunks = chunks_of(&bytes);
    let mut rng = Rng::new(12);
    let (mut refused, mut differs) = (0, 0);
    for _ in 0..300 {
        let mut damaged = bytes.clone();
        let (at, header) = chunks[rng.below(chunks.len() as u64) as usize];
        let payload = at + CHUNK_HEADER..at + CHUNK_HEADER + header.len as usize;
        for _ in 0..1 + rng.below(4) {
            damaged[payload.start + rng.below(payload.len() as u64) as usize] =
                rng.next_u64() as u8;
        }
        let head = seal(header.stream, header.first, header.records, &damaged[payload]);
        damaged[at..at + CHUNK_HEADER].copy_from_slice(&head);
        let mut file = file(&damaged);
        match replay(&mut file, MEMORY, &mut |_| {}) {
            Ok(report) => differs += u32::from(report.difference.is_some()),
            Err(e) => {
                assert!(e.to_string().contains("byte "), "{e}");
                refused += 1;
            }
        }
    }
    assert!(refused > 30 && differs > 100, "{refused} refused, {differs} differ");
}

#[test]
fn too_little_memory_is_refused() {
    let bytes = recorded("all", 5, 100, true);
    let error = replay(&mut file(&bytes), 1 << 20, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("1 MiB may") && error.contains("a server with less"), "{error}");
    // Enough for the shards, not for what comes to be on flash.
    let bytes = recorded("all", 1, 40_000, true);
    let mut file = file(&bytes);
    let memory = file.setup().memory_bytes() + (16 << 10);
    let error = replay(&mut file, memory, &mut |_| {}).unwrap_err().to_string();
    assert!(error.contains("16 KiB are left") && error.contains("of the log"), "{error}");
}

/// A chunk taken out of the middle is missed.
#[test]
fn a_missing_chunk_is_missed() {
    let bytes = recorded("all", 5, 8_000, true);
    let chunks = chunks_of(&bytes);
    let (first, header) = chunks[0];
    let next = first + CHUNK_HEADER + header.len as usize;
    let without = [&bytes[..first], &bytes[next..]].concat();
    let error = RecordFile::<_>::open(Cursor::new(&without[..])).err().unwrap().to_string();
    assert!(error.contains("byte ") && error.contains("record"), "{error}");
}

/// Where the chunks of records lie.
fn chunks_of(bytes: &[u8]) -> Vec<(usize, ChunkHeader)> {
    let head = bytes.first_chunk().unwrap();
    let mut at = FILE_HEADER + parse_file_header(head).unwrap().0;
    let mut all = Vec::new();
    while let Some(head) = bytes[at..].first_chunk() {
        let header = ChunkHeader::parse(head).unwrap();
        if header.stream != END_STREAM {
            all.push((at, header));
        }
        at += CHUNK_HEADER + header.len as usize;
    }
    all
}
