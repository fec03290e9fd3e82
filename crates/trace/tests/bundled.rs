//! The traces that come with the repository.

use std::path::PathBuf;

use larder_trace::{Collector, Format, Options, Stats, open};

fn stats(name: &str, format: Option<Format>) -> Stats {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/traces").join(name);
    let trace = open(&path.to_string_lossy(), &Options::default()).unwrap();
    assert_eq!(trace.format, format, "{name}: {}", trace.explanation);
    let mut all = Collector::new();
    for request in trace.reader {
        all.add(&request.unwrap());
    }
    all.finish()
}

#[test]
fn bundled_traces_hold_what_their_description_says() {
    let s = stats("cachelib-kv.csv.zst", Some(Format::CacheLib));
    assert_eq!((s.requests, s.operations["set"], s.operations["delete"]), (691, 10, 3));
    let s = stats("cachelib-block.csv.zst", Some(Format::CacheLib));
    assert_eq!((s.requests, s.operations["write"]), (1023, 400));
    let s = stats("mooncake-conversation.jsonl.zst", Some(Format::Mooncake));
    assert_eq!((s.requests, s.objects, s.timed), (288_500, 182_790, true));
    assert_eq!(s.seconds, 3536.999);
    let s = stats("mqsim-websearch.trace.zst", Some(Format::MqSim));
    assert_eq!((s.requests, s.operations["write"]), (24_783, 4));
}

/// Meta's kvcache workload, generated: its key sizes and operations, and the same stream for the same seed.
#[test]
fn the_bundled_cachebench_workload_generates() {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/traces/kvcache_reg");
    let make = |seed: u32| -> Vec<_> {
        let spec = format!(
            "gen:cachebench?dir={}&objects=100000&requests=50000&seed={seed}",
            dir.display()
        );
        open(&spec, &Options::default()).unwrap().reader.map(|r| r.unwrap()).collect()
    };
    let all = make(1);
    assert!(all.iter().all(|r| (16..=255).contains(&r.key_size) && r.op == larder_trace::Op::Get));
    assert!(all == make(1) && all != make(2));
    // config.json: lone gets are 0.1347 of 0.9845 + 0.1347.
    let lone = all.iter().filter(|r| r.id >> 62 == 1).count() as f64 / 50_000.0;
    assert!((lone - 0.1204).abs() < 0.005, "{lone}");
}
