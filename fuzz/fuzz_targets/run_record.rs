//! Records of runs (`larder kv --record`, `larder block serve --record`): the records of a chunk, and whole files.
#![no_main]

use std::io::Cursor as Bytes;
use std::sync::OnceLock;

use larder_base::{HashKey, KeyHasher, Nanos, UnixSecs};
use larder_engine::block::map::Making;
use larder_engine::block::node::record::{ReplayedMaintenance, ReplayedQueue};
use larder_engine::block::record::{BlockRunSetup, StreamReader, RecordedAdmission, VolumeSetup};
use larder_engine::block::{BlockConfig, BlockLimits, Regions, WriteMode};
use larder_engine::kv::node::{ReplayedApplications, ReplayedMaintenance as ReplayedSchedule};
use larder_engine::kv::record::{
    AppsSetup, Clocks, MachineReader, RunSetup, ShardSeed, ShardSetup, decode,
};
use larder_format::recording::Cursor;
use larder_format::Uuid;
use larder_format::block::{BlockSuperblock, Layout};
use larder_policy::admission::AdmissionConfig;
use larder_sim::replay::{RecordFile, replay, replay_block};
use libfuzzer_sys::fuzz_target;

fn block_setup() -> &'static BlockRunSetup {
    static SETUP: OnceLock<BlockRunSetup> = OnceLock::new();
    SETUP.get_or_init(|| {
        let layout = Layout::new(4 << 20, 4096, 2, 1).expect("a layout");
        let superblock = BlockSuperblock::format(Uuid([1; 16]), 7, 9, layout, UnixSecs(0));
        let config = BlockConfig {
            line_bytes: 4096,
            write: WriteMode::WriteThrough,
            limits: BlockLimits::default(),
            regions: Regions { groups: layout.region_groups, count: layout.regions },
        };
        let admission = "sseqr+tc+two_lbs".parse().expect("a chain");
        let volumes = vec![VolumeSetup { name: "v".into(), bytes: 1 << 30, seed: 3 }];
        let quiet = Nanos::from_secs(5);
        BlockRunSetup::new(&superblock, &config, Making::default(), quiet, &admission, volumes, 2)
    })
}

/// A key-value cache in DRAM alone: a stream says itself whether there is flash.
fn kv_setup() -> RunSetup {
    RunSetup {
        kv: RunSetup::VERSION,
        larder: String::new(),
        uuid: String::new(),
        hash_key: [1; 16],
        salt: 0,
        segments: 0,
        segment_bytes: 4096,
        drives: Vec::new(),
        shard: ShardSetup {
            arena_bytes: 64 << 10,
            max_object: 1 << 10,
            no_eviction: false,
            clock_increment: false,
            clock_max: 3,
            free_low: 0,
            free_high: 0,
            flash_min_record: 0,
            access_times: 64,
            buckets: 1,
            index_most: 0,
            admission_memory: 64 << 10,
            objects: 64,
            share_bits: 0.5f64.to_bits(),
            budget_rate_bits: None,
        },
        shards: vec![ShardSeed { cas_base: 0, seed: 1 }; 4],
        admission: AdmissionConfig::default(),
        applications: AppsSetup::default(),
        log: None,
    }
}

fuzz_target!(|data: &[u8]| {
    let (hasher, filler) = (KeyHasher::new(HashKey([1; 16])), [0; 256]);
    let (mut cursor, mut clocks) = (Cursor::new(data), Clocks::default());
    while cursor.position() < data.len() {
        if decode(&mut cursor, &mut clocks, &hasher, &filler).is_err() {
            break;
        }
    }
    if let Ok(mut file) = RecordFile::open(Bytes::new(data)) {
        let _ = replay(&mut file, 64 << 20, &mut |_| {});
    }
    if let Ok(mut file) = RecordFile::open(Bytes::new(data)) {
        let _ = replay_block(&mut file, 64 << 20, &mut |_| {});
    }
    let Some((&which, records)) = data.split_first() else { return };
    let (setup, mut reader) = (block_setup(), StreamReader::new(records));
    match which % 9 {
        0 => {
            let mut shard = setup.build_shard(0).expect("a shard");
            while reader.position() < records.len() && shard.replay(&mut reader).is_ok() {}
        }
        1 => {
            let mut log = setup.build_log().expect("a log");
            while reader.position() < records.len() && log.replay(&mut reader).is_ok() {}
        }
        2 => {
            let mut volumes = setup.build_volumes().expect("a list of volumes");
            while reader.position() < records.len() && volumes.replay(&mut reader).is_ok() {}
        }
        3 => {
            if let Ok((mut late, _)) = RecordedAdmission::replay_later(setup, &mut reader) {
                while reader.position() < records.len() && late.replay(&mut reader).is_ok() {}
            }
        }
        4 => {
            let mut queue = ReplayedQueue::of(setup).expect("a queue");
            while reader.position() < records.len() && queue.replay(&mut reader).is_ok() {}
        }
        5 => {
            let mut machine = ReplayedMaintenance::of(setup).expect("maintenance");
            while reader.position() < records.len() && machine.replay(&mut reader).is_ok() {}
        }
        6 => {
            let mut machine = ReplayedSchedule::of(&kv_setup());
            let mut reader = MachineReader::new(records);
            while reader.position() < records.len() && machine.replay(&mut reader).is_ok() {}
        }
        7 => {
            let mut names = ReplayedApplications::of(&kv_setup()).expect("applications");
            let mut reader = MachineReader::new(records);
            while reader.position() < records.len() && names.replay(&mut reader).is_ok() {}
        }
        _ => {
            let mut admission = setup.build_admission(0).expect("admission");
            while reader.position() < records.len() && admission.replay(&mut reader).is_ok() {}
        }
    }
});
