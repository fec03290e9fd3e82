use larder_base::Rng;

use super::*;
use crate::block::marker::Order;
use crate::block::write_log::SegmentGeometry;

fn sample() -> BlockSuperblock {
    let layout = Layout::new(64 << 20, 4096, 4, 2).unwrap();
    let mut sb = BlockSuperblock::format(Uuid([7; 16]), 99, 5, layout, UnixSecs(1_700_000_000));
    for (i, name) in ["root", "daten-ä"].iter().enumerate() {
        let (first_group, groups) = sb.allocate(10 << 20).unwrap();
        sb.volumes.push(Volume {
            name: (*name).to_owned(),
            first_group,
            groups,
            bytes: 10 << 20,
            state: if i == 0 { VolumeState::Attached } else { VolumeState::Detached },
            identity: [i as u8; 64],
            write_back: None,
        });
    }
    sb
}

/// With a write log, and volumes of each kind.
fn logged() -> BlockSuperblock {
    let mut sb = sample();
    sb.set_write_log(WriteLogArea::of(sb.layout.device, 100 << 20, 512).unwrap());
    sb.incompatible |= FEATURE_DIRTY;
    sb.attachments = 9;
    sb.volumes[0].write_back = Some(WrittenBack {
        volume: Uuid([3; 16]),
        attachment: 9,
        began: 1 << 40,
        holds: HoldsState::Open,
        generation: 4,
        marker: 70,
        run: 1 << 41,
        order: Order::Journaled,
        cut: None,
    });
    let (first_group, groups) = sb.allocate(1 << 20).unwrap();
    let nothing = WrittenBack {
        volume: Uuid([4; 16]),
        attachment: 0,
        began: 0,
        holds: HoldsState::Nothing,
        generation: 0,
        marker: 0,
        run: 0,
        order: Order::Any,
        cut: None,
    };
    sb.volumes.push(Volume {
        name: "later".to_owned(),
        first_group,
        groups,
        bytes: 1 << 20,
        state: VolumeState::Attached,
        identity: [8; 64],
        write_back: Some(nothing),
    });
    sb
}

/// What becomes of a superblock with these bytes at `at`.
fn changed(
    sb: &BlockSuperblock,
    at: usize,
    bytes: &[u8],
) -> Result<BlockSuperblock, BlockSuperblockError> {
    let mut whole = sb.encode();
    whole[at..at + bytes.len()].copy_from_slice(bytes);
    let crc = crc32c::crc32c(&whole[12..]).to_le_bytes();
    whole[8..12].copy_from_slice(&crc);
    BlockSuperblock::decode(&whole)
}

#[test]
fn a_write_log_comes_back_with_what_it_holds_of_each_volume() {
    let sb = logged();
    assert_eq!(sb.incompatible, FEATURE_WRITE_LOG | FEATURE_DIRTY);
    assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb.clone()));
    for holds in [HoldsState::Clean, HoldsState::TakingUp, HoldsState::Carried] {
        let mut sb = sb.clone();
        sb.volumes[1].write_back = sb.volumes[0].write_back.map(|w| WrittenBack {
            holds,
            attachment: 2,
            volume: Uuid([9; 16]),
            ..w
        });
        assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb));
    }
    // On a sparse device, too.
    let layout = Layout::sparse(64 << 20, 4096, 0, 2).unwrap();
    let mut sparse = BlockSuperblock::format(Uuid([7; 16]), 99, 5, layout, UnixSecs(1));
    sparse.set_write_log(WriteLogArea::of(layout.device, 1 << 30, 4096).unwrap());
    assert_eq!(BlockSuperblock::decode(&sparse.encode()), Ok(sparse));
}

#[test]
fn features_say_what_is_there() {
    // Forgotten by whoever changed the rest.
    let forgotten = BlockSuperblock { incompatible: 0, ..logged() };
    assert_eq!(BlockSuperblock::decode(&forgotten.encode()), Ok(logged()));
    let none = BlockSuperblock { incompatible: FEATURE_WRITE_LOG, ..sample() };
    assert_eq!(BlockSuperblock::decode(&none.encode()), Ok(sample()));
    // Bit 4 without an area, an area without bit 4, an open volume without bit 0.
    let without = changed(&sample(), 16, &FEATURE_WRITE_LOG.to_le_bytes());
    assert!(matches!(without, Err(BlockSuperblockError::Field { .. })), "{without:?}");
    let sb = BlockSuperblock { volumes: Vec::new(), incompatible: FEATURE_WRITE_LOG, ..logged() };
    let stray = changed(&sb, 16, &[0; 8]);
    assert!(matches!(stray, Err(BlockSuperblockError::Field { .. })), "{stray:?}");
    let clean = changed(&logged(), 16, &FEATURE_WRITE_LOG.to_le_bytes());
    assert_eq!(
        clean,
        Err(BlockSuperblockError::Field { field: "features", value: FEATURE_WRITE_LOG })
    );
}

#[test]
fn a_superblock_without_a_log_is_what_it_was() {
    // Byte for byte what was written before there were logs: nothing behind byte 168, and volumes of 192 bytes.
    let sb = sample();
    let bytes = sb.encode();
    assert!(bytes[168..512].iter().all(|&b| b == 0));
    assert_eq!(&bytes[512 + 192 + 32..][..8], "daten-ä".as_bytes());
    assert_eq!(sb.most_volumes(), 338);
    assert_eq!(sb.check_written_through(), Ok(()));
    assert_eq!(logged().most_volumes(), 246);
    assert_eq!(logged().check_written_through(), Err(BlockSuperblockError::WriteLog));
}

#[test]
fn as_many_volumes_as_it_may_have_fit() {
    for mut sb in [sample(), logged()] {
        for n in sb.volumes.len()..sb.most_volumes() {
            let (first_group, groups) = sb.allocate(1).unwrap();
            sb.volumes.push(Volume {
                name: format!("v{n}"),
                first_group,
                groups,
                bytes: 1,
                state: VolumeState::Detached,
                identity: [0xff; 64],
                write_back: sb.write_log.map(|_| WrittenBack {
                    volume: Uuid([n as u8, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5]),
                    attachment: 0,
                    began: u64::MAX,
                    holds: HoldsState::Nothing,
                    generation: 0,
                    marker: u64::MAX,
                    run: u64::MAX,
                    order: Order::Flush,
                    cut: None,
                }),
            });
        }
        assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb.clone()));
        let more = changed(&sb, 128, &(sb.volumes.len() as u32 + 1).to_le_bytes());
        assert!(matches!(more, Err(BlockSuperblockError::Field { field: "volumes", .. })));
    }
}

#[test]
fn a_log_lies_behind_the_slots_and_counts_for_the_device() {
    let geometry = SegmentGeometry::new(64 << 10, 512).unwrap();
    let area = WriteLogArea::with_segments((64 << 20) + 1, 1 << 20, geometry).unwrap();
    assert_eq!((area.at, area.segments, area.end()), (65 << 20, 16, 66 << 20));
    assert_eq!(area.segment_at(3), (65 << 20) + (192 << 10));
    let area = WriteLogArea::of(64 << 20, 100 << 20, 4096).unwrap();
    assert_eq!((area.at, area.segments, area.bytes()), (64 << 20, 12, 96 << 20));
    let few = WriteLogArea::of(64 << 20, (64 << 20) - 1, 4096).unwrap_err();
    assert_eq!(few, WriteLogAreaError::Small { bytes: (64 << 20) - 1, least: 64 << 20 });
    assert!(
        few.to_string().contains("at least 64 MiB are needed")
            && few.to_string().contains("give it more")
    );
    assert!(
        WriteLogArea::of(0, u64::MAX, 512).is_err()
            && WriteLogArea::of(u64::MAX, 1 << 30, 512).is_err()
    );
    assert!(WriteLogArea::of(0, 1 << 30, 1024).is_err());
    let small = SegmentGeometry::new(16 << 10, 512).unwrap();
    let small = WriteLogArea::with_segments(0, 1 << 30, small);
    assert_eq!(small, Err(WriteLogAreaError::Segment(16 << 10)));
    let sb = logged();
    assert_eq!(sb.check_device(160 << 20), Ok(()));
    let (found, expected) = ((160 << 20) - 1, 160 << 20);
    assert_eq!(sb.check_device(found), Err(BlockSuperblockError::Shrunk { found, expected }));
}

#[test]
fn what_no_log_and_no_volume_can_be_is_refused() {
    let sb = logged();
    let volume = |n: usize, at: usize| 512 + n * 264 + at;
    let wrong: [(usize, &[u8]); 17] = [
        (168, &[0, 0, 0xf0, 3, 0, 0, 0, 0]), // a MiB before the end of the layout
        (168, &[1]),                         // no MiB
        (168, &[0, 0, 0, 4, 0, 0xff, 0xff, 0x7f]), // far
        (176, &[7, 0, 0, 0]),                // segments
        (176, &[0xff; 4]),                   // segments
        (180, &[0, 0, 0, 0]),                // bytes of one
        (180, &[0, 0x80, 0, 0]),             // too small a one
        (184, &[0, 4, 0, 0]),                // a sector
        (188, &[8, 0, 0, 0]),                // attachments, less than a volume's
        (volume(0, 208), &[0; 4]),           // open without an attachment
        (volume(0, 212), &[6]),              // holds
        (volume(0, 212), &[0]),              // not written back, and yet
        (volume(0, 213), &[4]),              // order
        (volume(0, 214), &[1]),              // zero
        (volume(0, 224), &[0; 8]),           // open without a generation
        (volume(0, 240), &[1]),              // an end, and no last record
        (volume(2, 192), &[3; 16]),          // another's UUID
    ];
    for (at, bytes) in wrong {
        let found = changed(&sb, at, bytes);
        assert!(matches!(found, Err(BlockSuperblockError::Field { .. })), "{at}: {found:?}");
    }
    // Two of one attachment.
    let two = changed(&sb, volume(2, 208), &9u32.to_le_bytes());
    assert!(matches!(two, Err(BlockSuperblockError::Field { .. })), "{two:?}");
    assert!(changed(&sb, volume(2, 208), &8u32.to_le_bytes()).is_ok());
}

#[test]
fn a_write_log_of_a_former_format_is_refused_with_the_way_out() {
    for dirty in [0, FEATURE_DIRTY] {
        let former = (FEATURE_FORMER_WRITE_LOG | dirty).to_le_bytes();
        for sb in [sample(), logged()] {
            let why = changed(&sb, 16, &former).unwrap_err();
            assert_eq!(why, BlockSuperblockError::FormerWriteLog);
            assert!(why.to_string().contains("the Larder that wrote it"), "{why}");
        }
    }
}

#[test]
fn it_comes_back() {
    let sb = sample();
    assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb));
    let log = Layout::full(64 << 20, 4096, 2).unwrap();
    let sb = BlockSuperblock::format(Uuid([7; 16]), 99, 5, log, UnixSecs(1));
    assert_eq!(sb.incompatible, FEATURE_LOG);
    assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb));
}

#[test]
fn the_newer_copy_rules_and_a_torn_one_does_not() {
    let a = sample();
    let b = BlockSuperblock { sequence: 2, epoch: 5, ..sample() };
    assert_eq!(choose(&a.encode(), &b.encode()), Ok(b.clone()));
    let mut torn = b.encode();
    torn[40_000] ^= 1;
    assert_eq!(choose(&a.encode(), &torn), Ok(a));
    assert_eq!(choose(&torn, &torn), Err(BlockSuperblockError::Damaged));
    assert_eq!(choose(&[0; 10], &[]), Err(BlockSuperblockError::None));
}

#[test]
fn dirty_lines_and_other_versions_are_left_alone() {
    let dirty = BlockSuperblock { incompatible: FEATURE_DIRTY, ..sample() };
    assert_eq!(BlockSuperblock::decode(&dirty.encode()), Err(BlockSuperblockError::Dirty));
    let dirty = BlockSuperblock { incompatible: FEATURE_DIRTY | 32, ..logged() };
    assert_eq!(BlockSuperblock::decode(&dirty.encode()), Err(BlockSuperblockError::Dirty));
    let feature = BlockSuperblock { incompatible: 32, ..sample() };
    assert_eq!(
        BlockSuperblock::decode(&feature.encode()),
        Err(BlockSuperblockError::Feature { unknown: 32 })
    );
    let mut newer = sample().encode();
    newer[12] = 9;
    let crc = crc32c::crc32c(&newer[12..]).to_le_bytes();
    newer[8..12].copy_from_slice(&crc);
    assert_eq!(BlockSuperblock::decode(&newer), Err(BlockSuperblockError::Version { found: 9 }));
}

#[test]
fn sealed_garbage_never_panics() {
    let mut rng = Rng::new(5);
    let whole = sample().encode();
    let log = Layout::full(64 << 20, 4096, 2).unwrap();
    let log = BlockSuperblock::format(Uuid([7; 16]), 99, 5, log, UnixSecs(1)).encode();
    let written = logged().encode();
    for _ in 0..6_000 {
        let mut bytes = match rng.below(3) {
            0 => whole.clone(),
            1 => log.clone(),
            _ => written.clone(),
        };
        for _ in 0..rng.range(1, 4) {
            let at = rng.below(1024 + 256) as usize;
            bytes[at] = if rng.chance(0.5) { rng.below(8) as u8 } else { rng.next_u64() as u8 };
        }
        if rng.chance(0.9) {
            let crc = crc32c::crc32c(&bytes[12..]).to_le_bytes();
            bytes[8..12].copy_from_slice(&crc);
        }
        if let Ok(sb) = BlockSuperblock::decode(&bytes) {
            assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb));
        }
    }
}

#[test]
fn what_was_given_up_comes_back_and_takes_the_room_that_volumes_leave() {
    let mut sb = logged();
    sb.volumes[1].write_back =
        sb.volumes[0].write_back.map(|w| WrittenBack { attachment: 2, volume: Uuid([9; 16]), ..w });
    assert!(sb.give_up(9, &[(0, 7), (8, 8), (10, 1 << 50)]) && sb.give_up(2, &[(3, 4)]));
    let whole = sb.encode();
    assert_eq!(BlockSuperblock::decode(&whole), Ok(sb.clone()));
    assert_eq!(sb.given_up_of(9), [(0, 7), (8, 8), (10, 1 << 50)]);
    // What was of a volume that has gone is forgotten, and there is not room for any number.
    sb.volumes[1].write_back = None;
    let many: Vec<(u64, u64)> = (1..=MOST_GIVEN_UP as u64).map(|n| (2 * n, 2 * n)).collect();
    let before = sb.clone();
    assert!(!sb.give_up(9, &[&many[..], &[(9_000, 9_000)]].concat()) && sb == before);
    assert!(sb.give_up(9, &many) && sb.given_up.len() == MOST_GIVEN_UP);
    assert!(sb.most_volumes() < before.most_volumes());
    assert_eq!(BlockSuperblock::decode(&sb.encode()), Ok(sb.clone()));
    for (at, bytes) in [
        (192, &[0xff; 4][..]),
        (COPY_BYTES - 24, &[0; 4]),
        (COPY_BYTES - 24, &[200]),
        (COPY_BYTES - 16, &[0xff; 8]),
    ] {
        let stray = changed(&sb, at, bytes);
        assert!(matches!(stray, Err(BlockSuperblockError::Field { .. })), "{at}: {stray:?}");
    }
}
