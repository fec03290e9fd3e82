//! What a tape costs a shard: processor time per request on one shard in DRAM (one in ten a write of 200 bytes, Zipf 0.9 over
//! 100,000 keys) without a tape type, with a tape type and no tape, and with a tape whose chunks are summed and dropped.
//! The least of several rounds, the three in turn: other programs can only add.

use larder_base::{AppId, Expiry, Nanos, Now, UnixSecs};
use larder_engine::kv::KvShard;
use larder_engine::kv::api::{
    Effects, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::record::{AppsSetup, RecordedShard, RunSetup, ShardSeed, ShardSetup, Tape};
use larder_format::recording::{Chunk, ChunkSink, seal};
use larder_policy::admission::AdmissionConfig;
use larder_trace::generate;

const REQUESTS: usize = 1_000_000;
const ROUNDS: usize = 7;

struct Nobody;

impl Effects for Nobody {
    fn reply(&mut self, _: Reply<'_>) {}
    fn verify(&mut self, _: FlashRead) {}
    fn wake_cleaner(&mut self) {}
}

/// Sums chunks, as the writing thread does, and drops them.
struct Drain(u64);

impl ChunkSink for Drain {
    fn put(&mut self, chunk: Chunk) -> bool {
        let head = seal(chunk.stream, chunk.first, chunk.records, &chunk.payload);
        self.0 += (head.len() + chunk.payload.len()) as u64;
        true
    }
    fn is_open(&self) -> bool {
        true
    }
}

fn setup() -> RunSetup {
    RunSetup {
        kv: RunSetup::VERSION,
        larder: "cost".to_owned(),
        uuid: String::new(),
        hash_key: [1; 16],
        salt: 0,
        segments: 0,
        segment_bytes: 4096,
        drives: Vec::new(),
        shard: ShardSetup {
            arena_bytes: 64 << 20,
            max_object: 1 << 20,
            no_eviction: false,
            clock_increment: false,
            clock_max: 3,
            free_low: 0,
            free_high: 0,
            flash_min_record: 0,
            access_times: 64,
            buckets: 1,
            index_most: 0,
            admission_memory: 1 << 16,
            objects: 1,
            share_bits: 1f64.to_bits(),
            budget_rate_bits: None,
        },
        shards: vec![ShardSeed { cas_base: 0, seed: 1 }],
        admission: AdmissionConfig::from_name("all").unwrap_or_else(|e| panic!("{e}")),
        applications: AppsSetup::default(),
        log: None,
    }
}

/// Processor time of this process so far, in seconds, where the system tells it.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    let ticks = |i: usize| after_name.split(' ').nth(i).and_then(|t| t.parse::<f64>().ok());
    // Fields 14 and 15: user and system time, in hundredths.
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

enum Subject {
    Plain(KvShard),
    Recorded(RecordedShard),
}

fn main() {
    let setup = setup();
    let hasher = setup.hasher();
    let spec = format!("zipf?objects=100000&requests={REQUESTS}&skew=0.9&writes=0.1&value=200");
    let trace: Vec<(Vec<u8>, bool)> = generate::parse(&spec)
        .unwrap_or_else(|e| panic!("{e}"))
        .flatten()
        .map(|r| (format!("key:{:020}", r.id).into_bytes(), r.op.is_write()))
        .collect();
    let value = [7; 200];
    let shard = || setup.build_shard(0).unwrap_or_else(|e| panic!("{e}"));
    let mut taped = RecordedShard::new(shard());
    taped.record(Tape::new(0, Box::new(Drain(0))));
    let mut subjects = [
        ("no tape type", Subject::Plain(shard())),
        ("tape type, no tape", Subject::Recorded(RecordedShard::new(shard()))),
        ("tape", Subject::Recorded(taped)),
    ];
    let mut least = [f64::INFINITY; 3];
    for round in 0..ROUNDS {
        for ((_, subject), least) in subjects.iter_mut().zip(&mut least) {
            let began = processor_seconds();
            for (i, (key, write)) in trace.iter().enumerate() {
                let mono = Nanos((round * REQUESTS + i) as u64 * 1_000);
                let now = Now { mono, wall: UnixSecs(1_000_000_000) };
                let op = if *write {
                    Op::Store(Store {
                        mode: StoreMode::Set,
                        value: &value,
                        flags: 0,
                        expiry: Expiry::NEVER,
                        compare_cas: None,
                        new_cas: None,
                        invalidate: false,
                        vivify: None,
                    })
                } else {
                    Op::Get(Get::default())
                };
                let request = Request { key, hash: hasher.hash(key), app: AppId::DEFAULT, op };
                let outcome = match subject {
                    Subject::Plain(s) => s.execute(now, &request, None, &mut Nobody),
                    Subject::Recorded(s) => s.execute(now, &request, None, &mut Nobody),
                };
                assert!(outcome == Outcome::Done, "no flash here");
            }
            *least = least.min(processor_seconds() - began);
        }
    }
    for ((name, _), least) in subjects.iter().zip(least) {
        println!("{name}: {:.0} ns a request", least / REQUESTS as f64 * 1e9);
    }
}
