//! Images of the format's versions, kept as files: what was written once must be read for ever, and what is written today
//! must be the same bytes. A change of the format adds a version and new fixtures; these stay.

use std::fs;
use std::path::PathBuf;

use larder_base::{AppId, Expiry, HashKey, UnixSecs};
use larder_format::checkpoint::{
    CheckpointError, CheckpointReader, CheckpointWriter, Identity, kind,
};
use larder_format::page::EXTENT_ALIGN;
use larder_format::superblock::choose;
use larder_format::{
    Filling, Find, Geometry, Kind, PAGE_SIZE, RecordMeta, Superblock, Uuid, encode_into, find,
    find_extent, walk,
};

const SUPERBLOCKS_1: &str = "superblocks-v1.bin";
const SUPERBLOCKS: &str = "superblocks-v2.bin";
const SMALL: &str = "small-segment-v1.bin";
const LARGE: &str = "large-segment-v1.bin";
const CHECKPOINT_1: &str = "checkpoint-v1.bin";
const CHECKPOINT_2: &str = "checkpoint-v2.bin";
const CHECKPOINT: &str = "checkpoint-v3.bin";

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

fn fixture(name: &str) -> Vec<u8> {
    fs::read(path(name)).unwrap_or_else(|e| panic!("fixture {name}: {e}"))
}

fn superblock() -> Superblock {
    let geometry = Geometry::plan(1 << 30).unwrap();
    let hash_key = HashKey(*b"sixteen secret b");
    let uuid = Uuid(*b"\x6b\x0f\x4d\x8a\x01\x02\x43\x04\x85\x06\x07\x08\x09\x0a\x0b\x0c");
    Superblock::format(uuid, hash_key, geometry, UnixSecs(1_800_000_000))
        .start(1000, 0x0123_4567_89ab_cdef)
        .stop(2000)
}

fn filling() -> Filling {
    Filling {
        salt: superblock().salt(),
        segment: 4095,
        generation: superblock().first_generation(),
    }
}

fn meta(i: u32) -> RecordMeta {
    RecordMeta {
        cas: 0x0123_4567_89ab_cdef ^ u64::from(i),
        expiry: Expiry(if i & 1 == 0 { 0 } else { 2_000_000_000 + i }),
        flags: if i & 2 == 0 { 0 } else { 0xdead_0000 | i },
        app: AppId(if i & 4 == 0 { 0 } else { 256 }),
        last_access: UnixSecs(1_800_000_000 + i),
        fetched: i & 8 == 0,
        stale: i & 16 != 0,
        won: i & 32 != 0,
    }
}

fn object(i: u32, len: usize) -> (Vec<u8>, Vec<u8>) {
    let value = (0..len).map(|n| (n as u32).wrapping_mul(31).wrapping_add(i) as u8).collect();
    (format!("object:{i}").into_bytes(), value)
}

fn small_segment() -> Vec<u8> {
    let mut bytes = vec![0; 2 * PAGE_SIZE];
    for page in 0..2 {
        let mut at = page * PAGE_SIZE;
        for i in 0..20 {
            let i = page as u32 * 20 + i;
            let (key, value) = object(i, i as usize * 4);
            at += encode_into(&mut bytes[at..], &meta(i), &key, &value, filling());
        }
    }
    bytes
}

fn large_segment() -> Vec<u8> {
    let mut bytes = vec![0; 3 * PAGE_SIZE];
    let mut at = 0usize;
    for (i, len) in [(1, 1000), (2, 4096), (3, 5001)] {
        let (key, value) = object(i, len);
        at = at.next_multiple_of(EXTENT_ALIGN);
        at += encode_into(&mut bytes[at..], &meta(i), &key, &value, filling());
    }
    bytes
}

fn identity() -> Identity {
    let s = superblock();
    Identity { uuid: s.uuid, epoch: s.epoch, run: s.run, geometry: s.geometry }
}

fn sections() -> [(u32, u32, Vec<u64>); 3] {
    [
        (kind::SEGMENTS, 0, vec![1, 2, 3]),
        (kind::INDEX, 0, (0..1000).map(|i: u64| i.wrapping_mul(i) << 7).collect()),
        (kind::SHARD, 0, vec![]),
    ]
}

fn checkpoint() -> Vec<u8> {
    let mut writer = CheckpointWriter::create(Vec::new(), &identity(), 1_800_000_001).unwrap();
    for (kind, id, words) in sections() {
        writer.section(kind, id, words.len() as u64, words).unwrap();
    }
    writer.finish().unwrap()
}

fn superblocks() -> Vec<u8> {
    let newer = superblock();
    let older = Superblock {
        sequence: newer.sequence - 1,
        clean_epoch: 0,
        cas_base: 1000,
        ..newer.clone()
    };
    [&older.encode()[..], &newer.encode()[..]].concat()
}

/// `cargo test -p larder-format --test fixtures -- --ignored` writes the files: only for a new version of the format.
#[test]
#[ignore = "writes the fixtures"]
fn write_fixtures() {
    let all = [
        (SUPERBLOCKS, superblocks()),
        (SMALL, small_segment()),
        (LARGE, large_segment()),
        (CHECKPOINT, checkpoint()),
    ];
    for (name, bytes) in all {
        // Those of a released version never change.
        if !path(name).exists() {
            fs::write(path(name), bytes).unwrap();
        }
    }
}

#[test]
fn today_writes_the_same_bytes() {
    assert!(fixture(SUPERBLOCKS) == superblocks());
    assert!(fixture(SMALL) == small_segment());
    assert!(fixture(LARGE) == large_segment());
    assert!(fixture(CHECKPOINT) == checkpoint());
}

#[test]
fn superblocks_are_read() {
    let bytes = fixture(SUPERBLOCKS);
    let chosen = choose(&bytes[..PAGE_SIZE], &bytes[PAGE_SIZE..]).unwrap();
    assert_eq!((chosen.copy, chosen.other_valid), (1, true));
    let s = chosen.superblock;
    assert_eq!(s, superblock());
    assert_eq!(s.uuid.to_string(), "6b0f4d8a-0102-4304-8506-0708090a0b0c");
    assert_eq!((s.epoch, s.cas_base, s.is_clean()), (1, 2000, true));
    assert_eq!((s.geometry.segments(), s.geometry.segment_bytes()), (1023, 1 << 20));
}

#[test]
fn superblocks_of_version_1_are_read_and_name_no_run() {
    let bytes = fixture(SUPERBLOCKS_1);
    let chosen = choose(&bytes[..PAGE_SIZE], &bytes[PAGE_SIZE..]).unwrap();
    assert_eq!(chosen.superblock, Superblock { run: 0, ..superblock() });
}

#[test]
fn checkpoints_of_version_1_prove_nothing() {
    let bytes = fixture(CHECKPOINT_1);
    let refused = CheckpointReader::open(&bytes[..], &identity());
    assert!(matches!(refused, Err(CheckpointError::Version { found: 1 })), "{refused:?}");
}

#[test]
fn small_segments_are_read() {
    let bytes = fixture(SMALL);
    for i in 0..40 {
        let (key, value) = object(i, i as usize * 4);
        let page = &bytes[i as usize / 20 * PAGE_SIZE..][..PAGE_SIZE];
        let Find::Found(record) = find(page, &key, filling()) else { panic!("{i} is lost") };
        assert_eq!((record.value(), record.meta()), (&value[..], meta(i)));
    }
    let mut records = walk(&bytes, Kind::Small, filling());
    assert_eq!(records.by_ref().count(), 40);
    assert_eq!(records.corrupt(), 0);
}

#[test]
fn large_segments_are_read() {
    let bytes = fixture(LARGE);
    let mut records = walk(&bytes, Kind::Large, filling());
    for (i, len) in [(1, 1000), (2, 4096), (3, 5001)] {
        let (key, value) = object(i, len);
        let walked = records.next().unwrap();
        let extent = &bytes[walked.offset..walked.offset + walked.record.len()];
        let record = find_extent(extent, &key, filling()).found().unwrap();
        assert_eq!((record.value(), record.meta()), (&value[..], meta(i)));
    }
    assert!(records.next().is_none());
    assert_eq!(records.corrupt(), 0);
}

#[test]
fn checkpoints_are_read() {
    for name in [CHECKPOINT_2, CHECKPOINT] {
        checkpoint_is_read(&fixture(name));
    }
}

fn checkpoint_is_read(bytes: &[u8]) {
    let mut reader = CheckpointReader::open(bytes, &identity()).unwrap();
    for (kind, id, words) in sections() {
        let section = reader.next_section().unwrap().unwrap();
        assert_eq!((section.kind, section.id, section.words), (kind, id, words.len() as u64));
        let mut read = Vec::new();
        reader.read_words(|w| read.push(w)).unwrap();
        assert_eq!(read, words);
    }
    assert!(reader.next_section().unwrap().is_none());
    assert_eq!(reader.written(), 1_800_000_001);
}
