//! One shard, and what two drives' logs do to it, step by step.

use larder_base::{Expiry, HashKey, Nanos, Now, ObjectHash, UnixSecs};
use larder_engine::dram::Block;
use larder_engine::index::Place;
use larder_engine::kv::api::{
    Effects, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::node::start::drives::{DrivesDrawn, FoundDrive, assemble, flash_of};
use larder_engine::kv::node::{AdmissionNeed, Cache, LogStart, Plan, Start, defaults, run_setup};
use larder_engine::kv::record::AppsSetup;
use larder_engine::kv::{Destination, KvShard, StageSink, Staged};
use larder_engine::segment::NoRoom;
use larder_format::{Kind, RecordMeta, Uuid, record_len};
use larder_policy::admission::AdmissionConfig;

const NOW: Now = Now { mono: Nanos::from_secs(9), wall: UnixSecs(1_000_000) };
const KEY: &[u8] = b"the key";

fn shard() -> KvShard {
    let drawn = DrivesDrawn {
        uuid: Uuid([3; 16]),
        hash_key: HashKey([4; 16]),
        names: vec![1, 2],
        now: NOW.wall,
    };
    let found = [FoundDrive { superblock: None, bytes: 4 << 20 }; 2];
    let flash = flash_of(&assemble(&found, 4 << 20, 32 << 10, &drawn).unwrap());
    let admission = AdmissionConfig::from_name("all").unwrap();
    let need = AdmissionNeed::of(&admission);
    let plan = Plan::over(4 << 20, 32 << 10, Some((flash, 512)), need).unwrap();
    let cache = Cache {
        max_item: 32 << 10,
        no_eviction: false,
        clock_mode: defaults::CLOCK_MODE,
        clock_max: 1,
        hot_percent: defaults::HOT_PERCENT,
        reinsert_percent: defaults::REINSERT_PERCENT,
        admission,
        budget: Default::default(),
        applications: AppsSetup::default(),
    };
    let start = Start {
        larder: String::new(),
        uuid: String::new(),
        hash_key: HashKey([4; 16]),
        cas_base: 1,
        cas_bits: 40,
        seed: 1,
        flash,
        log: Some(LogStart::default()),
    };
    run_setup(&cache, &plan, &start).unwrap().build_shard(0).unwrap()
}

#[derive(Default)]
struct Sink {
    hit: bool,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        self.hit = matches!(reply, Reply::Item(_));
    }
    fn verify(&mut self, _: FlashRead) {}
    fn wake_cleaner(&mut self) {}
}

/// What it comes to, and whether that is an item.
fn execute(shard: &mut KvShard, now: Now, key: &[u8], op: Op<'_>) -> (Outcome, bool) {
    let hash = shard.config().hasher.hash(key);
    let request = Request { key, hash, app: larder_base::AppId::DEFAULT, op };
    let mut sink = Sink::default();
    (shard.execute(now, &request, None, &mut sink), sink.hit)
}

fn fill(shard: &mut KvShard, value: &[u8]) {
    let store = |value| {
        Op::Store(Store {
            mode: StoreMode::Set,
            value,
            flags: 0,
            expiry: Expiry::NEVER,
            compare_cas: None,
            new_cas: None,
            invalidate: false,
            vivify: None,
        })
    };
    if !execute(shard, NOW, KEY, Op::Get(Get::default())).1 {
        let _ = execute(shard, NOW, KEY, store(value));
    }
    let mut i = 0;
    while !shard.is_short() {
        let _ = execute(shard, NOW, format!("other{i}").as_bytes(), store(&[1; 800]));
        i += 1;
    }
}

/// Takes one object for a drive, and none of the others.
struct OnlyThis {
    drive: usize,
    hash: ObjectHash,
    segment: u16,
    taken: Vec<Staged>,
}

impl StageSink for OnlyThis {
    fn drive(&self) -> usize {
        self.drive
    }
    fn offer(
        &mut self,
        hash: ObjectHash,
        meta: &RecordMeta,
        key: &[u8],
        value: &[u8],
        block: Block,
    ) -> Result<(), NoRoom> {
        if hash != self.hash {
            return Err(NoRoom::TooLarge);
        }
        let bytes = record_len(meta, key.len(), value.len()) as u32;
        let (segment, place) = (self.segment, Place::Page { function: 0 });
        let staged = Staged { hash, block, cas: meta.cas, segment, generation: 5, place, bytes };
        self.taken.push(staged);
        Ok(())
    }
    fn is_full(&self, _: Kind) -> bool {
        false
    }
    fn close(&mut self, _: Kind) -> bool {
        false
    }
    fn spend(&mut self, _: u32) -> bool {
        true
    }
}

/// An object is staged on one drive, gets another expiry, which leaves its CAS, and is wanted on flash again while the first drive has not
/// written. What the first has of it stays dead, whichever drive writes first.
#[test]
fn what_changed_on_its_way_to_one_drive_is_not_taken_for_what_goes_to_another() {
    let mut shard = shard();
    let hash = shard.config().hasher.hash(KEY);
    let sink =
        |drive: usize| OnlyThis { drive, hash, segment: 1 + 20 * drive as u16, taken: Vec::new() };
    let (mut first, mut second) = (sink(0), sink(1));
    while first.taken.is_empty() {
        fill(&mut shard, b"its value");
        shard.stage(NOW, &mut first);
    }
    let to = |drive| Destination { drive, kind: Kind::Small, goes_on: false };
    let soon = Expiry::at(UnixSecs(NOW.wall.0 + 10));
    let _ = execute(&mut shard, NOW, KEY, Op::Touch(soon));
    for _ in 0..50 {
        fill(&mut shard, b"its value");
        shard.stage(NOW, &mut second);
        // What the second drive writes meanwhile is nothing of it.
        shard.publish(NOW, 22, 5, to(1), &[]);
    }
    shard.publish(NOW, first.segment, 5, to(0), &first.taken);
    let late = Now { wall: UnixSecs(NOW.wall.0 + 60), ..NOW };
    // On flash is the record that never expires: nothing may lead there.
    let (outcome, hit) = execute(&mut shard, late, KEY, Op::Get(Get::default()));
    assert!(outcome == Outcome::Done && !hit, "{outcome:?}");
}

/// A large record goes on in the next segment, and its object gets another expiry meanwhile: it does not go to flash again before the end of the
/// record is written, since only its CAS would tell it from what goes on.
#[test]
fn what_changed_while_it_goes_on_does_not_go_to_flash_again_before_its_end() {
    let mut shard = shard();
    let hash = shard.config().hasher.hash(KEY);
    let value = [7; 20_000];
    let sink = || OnlyThis { drive: 0, hash, segment: 1, taken: Vec::new() };
    let to = |goes_on| Destination { drive: 0, kind: Kind::Large, goes_on };
    let tries = |shard: &mut KvShard| {
        let mut sink = sink();
        for _ in 0..50 {
            fill(shard, &value);
            shard.stage(NOW, &mut sink);
        }
        sink.taken.len()
    };
    let mut first = sink();
    while first.taken.is_empty() {
        fill(&mut shard, &value);
        shard.stage(NOW, &mut first);
    }
    let soon = Expiry::at(UnixSecs(NOW.wall.0 + 100));
    let _ = execute(&mut shard, NOW, KEY, Op::Touch(soon));
    // The segment where it begins is written.
    shard.publish(NOW, 1, 5, to(true), &[]);
    assert_eq!(tries(&mut shard), 0);
    // It has been given up, or its end is written: then it may.
    shard.publish(NOW, 2, 6, to(false), &[]);
    assert!(tries(&mut shard) > 0);
}
